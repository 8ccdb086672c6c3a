#include "comm/staged.h"

#include <ATen/ATen.h>

#include <vector>

namespace motley {

namespace {

class Staged final : public Communicator {
 public:
  Staged(Communicator& on_cpu, at::Device device) : on_cpu_(on_cpu), device_(device) {}

  int rank() const override { return on_cpu_.rank(); }
  int size() const override { return on_cpu_.size(); }
  at::Device device() const override { return device_; }
  bool has_messages() const override { return on_cpu_.has_messages(); }
  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    at::Tensor copy = down(tensor);
    on_cpu_.all_reduce(copy, reduction);
    tensor.copy_(copy);
  }
  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    at::Tensor copy = down(tensor);
    auto message = on_cpu_.start_all_reduce(copy);
    return copied_back(tensor, copy, std::move(message));
  }
  void all_gather(std::vector<at::Tensor>& pieces) override {
    std::vector<at::Tensor> copies = room_for(pieces);
    copies[rank()] = down(pieces[rank()]);
    on_cpu_.all_gather(copies);
    up(copies, pieces);
  }
  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    std::vector<at::Tensor> copies = room_for(pieces);
    copies[rank()] = down(pieces[rank()]);
    on_cpu_.all_gather_grouped(copies);
    up(copies, pieces);
  }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return on_cpu_.reduce_scatter(down(pieces)).to(device_);
  }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return on_cpu_.reduce_scatter_grouped(down(pieces)).to(device_);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    std::vector<at::Tensor> copies = room_for(receive);
    on_cpu_.all_to_all(down(send), copies);
    up(copies, receive);
  }
  void barrier() override { on_cpu_.barrier(); }
  void abort() override { on_cpu_.abort(); }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    at::Tensor copy = down(tensor);
    auto message = on_cpu_.send(copy, to, tag);
    return copied_back({}, copy, std::move(message));
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    at::Tensor copy = room_for(tensor);
    auto message = on_cpu_.receive(copy, from, tag);
    return copied_back(tensor, copy, std::move(message));
  }

 private:
  // Always a copy: what is being sent may be written meanwhile.
  static at::Tensor down(const at::Tensor& tensor) {
    return tensor.to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  static std::vector<at::Tensor> down(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& t : tensors) copies.push_back(down(t));
    return copies;
  }
  static at::Tensor room_for(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  }
  static std::vector<at::Tensor> room_for(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> room;
    for (const at::Tensor& t : tensors) room.push_back(room_for(t));
    return room;
  }
  static void up(const std::vector<at::Tensor>& copies, std::vector<at::Tensor>& tensors) {
    for (size_t i = 0; i < copies.size(); ++i) tensors[i].copy_(copies[i]);
  }

  Communicator& on_cpu_;
  at::Device device_;
};

}  // namespace

std::unique_ptr<Communicator> staged(Communicator& on_cpu, at::Device device) {
  return std::make_unique<Staged>(on_cpu, device);
}

}  // namespace motley

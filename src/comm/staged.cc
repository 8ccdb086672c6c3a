#include "comm/staged.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>
#include <vector>

#include "comm/background.h"

namespace motley {

namespace {

class Staged final : public Communicator {
 public:
  Staged(Communicator& on_cpu, at::Device device)
      : on_cpu_(on_cpu), device_(device), collectives_(device), sends_(device) {}

  int rank() const override { return on_cpu_.rank(); }
  int size() const override { return on_cpu_.size(); }
  at::Device device() const override { return device_; }
  bool has_messages() const override { return on_cpu_.has_messages(); }
  bool has_all_to_all() const override { return on_cpu_.has_all_to_all(); }
  bool adds_half() const override { return on_cpu_.adds_half(); }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    reduced(tensor, reduction)->wait();
  }
  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    return reduced(tensor, Reduction::sum);
  }
  void all_gather(std::vector<at::Tensor>& pieces) override {
    gathered(pieces, [this](auto& copies) { on_cpu_.all_gather(copies); });
  }
  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    gathered(pieces, [this](auto& copies) { on_cpu_.all_gather_grouped(copies); });
  }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return scattered(pieces, [this](auto& copies) { return on_cpu_.reduce_scatter(copies); });
  }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return scattered(pieces,
                     [this](auto& copies) { return on_cpu_.reduce_scatter_grouped(copies); });
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    run(collectives_, [&] {
      std::vector<at::Tensor> out = down(send), in = room_for(receive);
      on_cpu_.all_to_all(out, in);
      for (size_t i = 0; i < in.size(); ++i) up(in[i], receive[i]);
    });
  }
  void barrier() override {
    run(collectives_, [&] { on_cpu_.barrier(); });
  }
  void abort() override { on_cpu_.abort(); }

  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    auto sent = std::make_shared<std::unique_ptr<Message>>();
    sends_.keep(tensor);
    const int64_t number = sends_.start([this, tensor, to, tag, sent] {
      const at::NoGradGuard no_grad;
      at::Tensor copy = down(tensor);
      *sent = copied_back({}, copy, on_cpu_.send(copy, to, tag));
    });
    return message_of(sends_, number, [sent] { (*sent)->wait(); });
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    at::Tensor copy = room_for(tensor);
    auto message = on_cpu_.receive(copy, from, tag);
    return std::make_unique<Received>(*this, tensor, copy, std::move(message));
  }

 private:
  struct Received final : Message {
    Received(Staged& s, at::Tensor t, at::Tensor c, std::unique_ptr<Message> m)
        : staged(s), tensor(std::move(t)), copy(std::move(c)), message(std::move(m)) {}
    void wait() override {
      if (!message) return;
      message->wait();
      message.reset();
      staged.up(copy, tensor);
      tensor.reset();
      copy.reset();
    }
    Staged& staged;
    at::Tensor tensor, copy;
    std::unique_ptr<Message> message;
  };

  // Collectives run on a thread of their own, in the order in which they are asked for, which is the
  // same on every rank: it waits for the copies down, the caller does not.
  std::unique_ptr<Message> reduced(at::Tensor& tensor, Reduction reduction) {
    collectives_.keep(tensor);
    const int64_t number = collectives_.start([this, tensor, reduction]() mutable {
      const at::NoGradGuard no_grad;
      at::Tensor copy = down(tensor);
      on_cpu_.all_reduce(copy, reduction);
      up(copy, tensor);
    });
    return message_of(collectives_, number);
  }
  template <typename F>
  void run(Background& background, F body) {
    background.wait(background.start([body] {
      const at::NoGradGuard no_grad;
      body();
    }));
  }
  template <typename F>
  void gathered(std::vector<at::Tensor>& pieces, F gather) {
    run(collectives_, [&] {
      std::vector<at::Tensor> copies = room_for(pieces);
      copies[static_cast<size_t>(rank())] = down(pieces[static_cast<size_t>(rank())]);
      gather(copies);
      for (size_t i = 0; i < copies.size(); ++i)
        if (static_cast<int>(i) != rank()) up(copies[i], pieces[i]);
    });
  }
  template <typename F>
  at::Tensor scattered(const std::vector<at::Tensor>& pieces, F scatter) {
    at::Tensor mine;
    run(collectives_, [&] {
      const std::vector<at::Tensor> copies = down(pieces);
      const at::Tensor sum = scatter(copies);
      mine = at::empty(sum.sizes(), sum.options().device(device_));
      up(sum.is_pinned() || !device_.is_cuda() ? sum : sum.pin_memory(), mine);
    });
    collectives_.keep_for_caller(mine);
    return mine;
  }

  // Always copies, of memory that the device reads and writes by itself: what is being sent may be
  // written meanwhile.
  at::Tensor room_for(const at::Tensor& tensor) const {
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(
                                         device_.is_cuda() && tensor.numel() > 0));
  }
  std::vector<at::Tensor> room_for(const std::vector<at::Tensor>& tensors) const {
    std::vector<at::Tensor> room;
    for (const at::Tensor& t : tensors) room.push_back(room_for(t));
    return room;
  }
  std::vector<at::Tensor> down(const std::vector<at::Tensor>& tensors) const {
    std::vector<at::Tensor> copies = room_for(tensors);
    for (size_t i = 0; i < copies.size(); ++i) copies[i].copy_(tensors[i], /*non_blocking=*/true);
    Moment(device_).wait();
    return copies;
  }
  at::Tensor down(const at::Tensor& tensor) const {
    return down(std::vector<at::Tensor>{tensor})[0];
  }
  static void up(const at::Tensor& copy, at::Tensor tensor) {
    tensor.copy_(copy, /*non_blocking=*/true);
  }

  Communicator& on_cpu_;
  at::Device device_;
  Background collectives_, sends_;
};

}  // namespace

std::unique_ptr<Communicator> staged(Communicator& on_cpu, at::Device device) {
  return std::make_unique<Staged>(on_cpu, device);
}

}  // namespace motley

#include "comm/alone.h"

#include <ATen/ATen.h>

#include <vector>

#include "core/error.h"

namespace motley {

namespace {

class Alone final : public Communicator {
 public:
  explicit Alone(at::Device device) : device_(device) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  at::Device device() const override { return device_; }
  bool adds_half() const override { return true; }

  void all_reduce(at::Tensor& /*tensor*/, Reduction /*reduction*/) override {}
  void all_gather(std::vector<at::Tensor>& /*pieces*/) override {}
  void all_gather_grouped(std::vector<at::Tensor>& /*pieces*/) override {}
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return pieces.at(0).clone();  // the caller's own
  }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return reduce_scatter(pieces);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    receive.at(0).copy_(send.at(0));
  }
  void barrier() override {}
  std::unique_ptr<Message> send(const at::Tensor&, int, int) override { return refuse(); }
  std::unique_ptr<Message> receive(at::Tensor&, int, int) override { return refuse(); }

 private:
  static std::unique_ptr<Message> refuse() {
    MOTLEY_CHECK(false, "a message of a device that is alone");
  }
  at::Device device_;
};

}  // namespace

std::unique_ptr<Communicator> alone_on(at::Device device) {
  return std::make_unique<Alone>(device);
}

}  // namespace motley

// A Communicator that hands everything on to another; what it does otherwise it overrides.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace motley {

class Forwarding : public Communicator {
 public:
  explicit Forwarding(Communicator& group) : group_(group) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  at::Device device() const override { return group_.device(); }
  bool has_messages() const override { return group_.has_messages(); }
  bool has_all_to_all() const override { return group_.has_all_to_all(); }
  bool adds_half() const override { return group_.adds_half(); }
  Communicator* among(const std::vector<int>& ranks, int use) override {
    return group_.among(ranks, use);
  }
  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    group_.all_reduce(tensor, reduction);
  }
  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    return group_.start_all_reduce(tensor);
  }
  void all_gather(std::vector<at::Tensor>& pieces) override { group_.all_gather(pieces); }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return group_.reduce_scatter(pieces);
  }
  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    group_.all_gather_grouped(pieces);
  }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return group_.reduce_scatter_grouped(pieces);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    group_.all_to_all(send, receive);
  }
  void barrier() override { group_.barrier(); }
  void abort() override { group_.abort(); }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    return group_.send(tensor, to, tag);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    return group_.receive(tensor, from, tag);
  }

 protected:
  Communicator& group_;
};

}  // namespace motley

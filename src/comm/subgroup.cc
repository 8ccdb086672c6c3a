#include "comm/subgroup.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/error.h"

namespace motley {

namespace {

class Subgroup final : public Communicator {
 public:
  Subgroup(Communicator& group, std::vector<int> ranks, int tag)
      : group_(group), native_(group.among(ranks, tag)), ranks_(std::move(ranks)), tag_(tag) {
    auto it = std::find(ranks_.begin(), ranks_.end(), group.rank());
    MOTLEY_CHECK(it != ranks_.end(), "rank {} is not in its subgroup", group.rank());
    rank_ = static_cast<int>(it - ranks_.begin());
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  at::Device device() const override { return group_.device(); }
  bool has_messages() const override { return group_.has_messages(); }
  bool adds_half() const override { return native_ != nullptr && native_->adds_half(); }
  Communicator* among(const std::vector<int>& members, int use) override {
    std::vector<int> ranks;
    for (int r : members) ranks.push_back(ranks_.at(static_cast<size_t>(r)));
    return group_.among(ranks, use);
  }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    const int p = size();
    if (p == 1 || tensor.numel() == 0) return;
    if (native_ != nullptr) return native_->all_reduce(tensor, reduction);
    at::Tensor flat = summable(tensor).reshape({-1});
    // Chunk c ends on rank c; then everybody passes on what is done.
    std::vector<at::Tensor> chunks;
    const int64_t n = flat.numel();
    for (int c = 0; c < p; ++c)
      chunks.push_back(flat.narrow(0, n * c / p, n * (c + 1) / p - n * c / p));
    for (int round = 0; round + 1 < p; ++round) {
      at::Tensor& mine = chunks[around(rank_ - round - 2)];
      at::Tensor arriving = at::empty_like(mine);
      exchange(chunks[around(rank_ - round - 1)], arriving);
      if (reduction == Reduction::sum)
        mine.add_(arriving);
      else
        mine.copy_(at::maximum(mine, arriving));
    }
    for (int round = 0; round + 1 < p; ++round)
      exchange(chunks[around(rank_ - round)], chunks[around(rank_ - round - 1)]);
    if (!flat.is_alias_of(tensor)) tensor.copy_(flat.reshape(tensor.sizes()));
  }

  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    if (native_ != nullptr) return native_->start_all_reduce(tensor);
    all_reduce(tensor, Reduction::sum);
    return nullptr;
  }

  void all_gather(std::vector<at::Tensor>& pieces) override {
    if (native_ != nullptr) return native_->all_gather(pieces);
    for (int round = 0; round + 1 < size(); ++round)
      exchange(pieces[around(rank_ - round)], pieces[around(rank_ - round - 1)]);
  }

  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    if (size() == 1) return pieces[0].clone();
    if (native_ != nullptr) return native_->reduce_scatter(pieces);
    const at::ScalarType type = pieces[0].scalar_type();
    // The sum for rank c starts at its right neighbour and walks around the ring to c.
    at::Tensor travelling = pieces[around(rank_ - 1)].to(sums_in_f32(type) ? at::kFloat : type);
    for (int round = 0; round + 1 < size(); ++round) {
      const at::Tensor& mine = pieces[around(rank_ - round - 2)];
      at::Tensor arriving = at::empty(mine.sizes(), travelling.options());
      exchange(travelling, arriving);
      travelling = arriving.add_(mine);
    }
    return travelling.to(type);
  }

  void all_to_all(const std::vector<at::Tensor>& send_pieces,
                  std::vector<at::Tensor>& receive_pieces) override {
    if (native_ != nullptr) return native_->all_to_all(send_pieces, receive_pieces);
    std::vector<std::unique_ptr<Message>> messages;
    for (int k = 1; k < size(); ++k) {
      const int from = around(rank_ - k), to = around(rank_ + k);
      messages.push_back(group_.receive(receive_pieces[from], ranks_[from], tag_));
      messages.push_back(group_.send(send_pieces[to], ranks_[to], tag_));
    }
    receive_pieces[rank_].copy_(send_pieces[rank_]);
    for (auto& message : messages) message->wait();
  }

  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    if (native_ != nullptr) return native_->all_gather_grouped(pieces);
    Communicator::all_gather_grouped(pieces);
  }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    if (native_ != nullptr) return native_->reduce_scatter_grouped(pieces);
    return Communicator::reduce_scatter_grouped(pieces);
  }

  void barrier() override {
    at::Tensor one = at::ones({1}, at::TensorOptions(group_.device()).dtype(at::kInt));
    all_reduce(one, Reduction::sum);
  }

  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    return group_.send(tensor, ranks_[to], tag);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    return group_.receive(tensor, ranks_[from], tag);
  }

 private:
  int around(int r) const { return (r % size() + size()) % size(); }
  void exchange(const at::Tensor& out, at::Tensor& in) {
    auto coming = group_.receive(in, ranks_[around(rank_ - 1)], tag_);
    auto going = group_.send(out, ranks_[around(rank_ + 1)], tag_);
    coming->wait();
    going->wait();
  }

  Communicator& group_;
  Communicator* native_;  // the same group of the backend's own; nullptr: there is none
  std::vector<int> ranks_;
  int tag_, rank_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> subgroup(Communicator& group, std::vector<int> ranks, int tag) {
  return std::make_unique<Subgroup>(group, std::move(ranks), tag);
}

}  // namespace motley

#include "comm/mixed.h"

#include <algorithm>

#include "core/error.h"

namespace motley {

namespace {

class Mixed final : public Communicator {
 public:
  Mixed(Communicator& all, std::vector<int> members, Communicator& part)
      : all_(all), members_(std::move(members)), part_(part) {
    MOTLEY_CHECK(static_cast<int>(members_.size()) == part.size() &&
                 members_.at(static_cast<size_t>(part.rank())) == all.rank());
  }

  int rank() const override { return all_.rank(); }
  int size() const override { return all_.size(); }
  at::Device device() const override { return all_.device(); }
  bool has_messages() const override { return all_.has_messages(); }

  Communicator* among(const std::vector<int>& ranks, int use) override {
    std::vector<int> inside;
    for (int r : ranks) {
      inside.push_back(in_part(r));
      if (inside.back() < 0) return nullptr;
    }
    return part_.among(inside, use);
  }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    all_.all_reduce(tensor, reduction);
  }
  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    return all_.start_all_reduce(tensor);
  }
  void all_gather(std::vector<at::Tensor>& pieces) override { all_.all_gather(pieces); }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return all_.reduce_scatter(pieces);
  }
  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    all_.all_gather_grouped(pieces);
  }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return all_.reduce_scatter_grouped(pieces);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    all_.all_to_all(send, receive);
  }
  void barrier() override { all_.barrier(); }
  void abort() override {
    part_.abort();
    all_.abort();
  }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    const int inside = in_part(to);
    return inside >= 0 && part_.has_messages() ? part_.send(tensor, inside, tag)
                                               : all_.send(tensor, to, tag);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    const int inside = in_part(from);
    return inside >= 0 && part_.has_messages() ? part_.receive(tensor, inside, tag)
                                               : all_.receive(tensor, from, tag);
  }

 private:
  int in_part(int rank) const {
    const auto it = std::lower_bound(members_.begin(), members_.end(), rank);
    return it != members_.end() && *it == rank ? static_cast<int>(it - members_.begin()) : -1;
  }

  Communicator& all_;
  std::vector<int> members_;
  Communicator& part_;
};

}  // namespace

std::unique_ptr<Communicator> mixed(Communicator& all, std::vector<int> members,
                                    Communicator& part) {
  return std::make_unique<Mixed>(all, std::move(members), part);
}

}  // namespace motley

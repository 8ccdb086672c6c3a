#include "comm/mixed.h"

#include <algorithm>

#include "comm/forwarding.h"
#include "core/error.h"

namespace motley {

namespace {

class Mixed final : public Forwarding {
 public:
  Mixed(Communicator& all, std::vector<int> members, Communicator& part)
      : Forwarding(all), members_(std::move(members)), part_(part) {
    MOTLEY_CHECK(static_cast<int>(members_.size()) == part.size() &&
                 members_.at(static_cast<size_t>(part.rank())) == all.rank());
  }

  bool has_all_to_all() const override { return group_.has_all_to_all(); }
  bool adds_half() const override { return group_.adds_half() && part_.adds_half(); }
  Communicator* among(const std::vector<int>& ranks, int use) override {
    std::vector<int> inside;
    for (int r : ranks) {
      inside.push_back(in_part(r));
      if (inside.back() < 0) return group_.among(ranks, use);
    }
    return part_.among(inside, use);
  }

  void abort() override {
    part_.abort();
    group_.abort();
  }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    const int inside = in_part(to);
    return inside >= 0 && part_.has_messages() ? part_.send(tensor, inside, tag)
                                               : group_.send(tensor, to, tag);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    const int inside = in_part(from);
    return inside >= 0 && part_.has_messages() ? part_.receive(tensor, inside, tag)
                                               : group_.receive(tensor, from, tag);
  }

 private:
  int in_part(int rank) const {
    const auto it = std::lower_bound(members_.begin(), members_.end(), rank);
    return it != members_.end() && *it == rank ? static_cast<int>(it - members_.begin()) : -1;
  }

  std::vector<int> members_;
  Communicator& part_;
};

}  // namespace

std::unique_ptr<Communicator> mixed(Communicator& all, std::vector<int> members,
                                    Communicator& part) {
  return std::make_unique<Mixed>(all, std::move(members), part);
}

}  // namespace motley

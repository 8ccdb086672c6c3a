// What collectives do to data (P2 section 3.2, Figure 8; the rules are in net/device_states.h),
// with the matrices as bitsets: n * k rows of n bits. The synthesiser enumerates with it on small
// systems; net::SparseStates follows programs on thousands of devices, and is tested equal.
#pragma once

#include <cstdint>
#include <vector>

#include "net/device_states.h"
#include "reduce/language.h"

namespace motley::reduce {

using net::SparseStates;

class DenseStates {
 public:
  // n devices with k = n chunks each.
  explicit DenseStates(int devices);

  // Applies the collective to all groups. Returns false, and leaves the states unspecified, where
  // it is an error.
  bool apply(Collective collective, const Groups& groups);

  bool equals(const DenseStates& other) const { return bits_ == other.bits_; }
  uint64_t hash() const;

  // Does a chunk of any device have a contribution from outside goal[device]? Both are sets of
  // devices as bitsets of words().
  bool strays(const std::vector<std::vector<uint64_t>>& goal) const;
  // The goal's state: every chunk of device d has exactly goal[d].
  void set_goal(const std::vector<std::vector<uint64_t>>& goal);

  // How many chunks there are whose contributions, over the devices [first, first + count)
  // together, lack some device.
  int lacking(int first, int count) const;

  // How many chunks the device holds.
  int held(int device) const;

  int devices() const { return devices_; }
  int words() const { return words_; }

 private:
  uint64_t* row(int device, int chunk) {
    return bits_.data() + (static_cast<size_t>(device) * devices_ + chunk) * words_;
  }
  const uint64_t* row(int device, int chunk) const {
    return const_cast<DenseStates*>(this)->row(device, chunk);
  }
  bool holds(int device, int chunk) const;
  // Empty if the union of the group's matrices is not allowed.
  bool reduce_group(const std::vector<int>& group, std::vector<uint64_t>* sum) const;
  bool apply_group(Collective collective, const std::vector<int>& group);

  int devices_ = 0, words_ = 0;
  std::vector<uint64_t> bits_;
};

}  // namespace motley::reduce

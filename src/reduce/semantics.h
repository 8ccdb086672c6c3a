// What collectives do to data (P2 section 3.2, Figure 8), twice.
//
// The data of a device is k chunks; its state is a k x k Boolean matrix s: s[c][d] says that chunk
// c has device d's contribution in it; an empty row is a chunk the device does not hold. At first
// s_d[c] = {d}; at the end of a reduction every chunk has the contributions of the whole group. A
// collective on devices 0 .. n-1 is a Hoare triple; it is an error unless
//
//   all_reduce, reduce,     all hold the same chunks, at least one, and no contribution to a chunk
//   is reduce_scatter          in two of them; reduce_scatter: n divides the number of chunks
//   all_gather              no chunk is held twice, and all hold equally many, at least one
//   broadcast               s_i within s_0 for all i, and somewhere strictly
//
// and then: all_reduce gives all of them the union; reduce gives it to 0 and empties the others;
// reduce_scatter gives i the i-th n-th of the chunks; all_gather gives all of them everything;
// broadcast copies s_0. Every group of a step must fulfil this.
//
// DenseStates holds the matrices as bitsets: n * k rows of n bits. The synthesiser enumerates with
// it on small systems. SparseStates holds a device as stretches of chunks with the same
// contributors, and contributors as interned sets, which verifies programs on thousands of devices:
// a step costs O(devices * stretches), a set k/64 words once.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "net/traffic.h"
#include "reduce/language.h"

namespace motley::reduce {

using net::Collective;

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

class SparseStates {
 public:
  explicit SparseStates(int devices);

  bool apply(Collective collective, const Groups& groups);  // as above
  bool at_goal() const;  // every device holds every chunk with every contribution

 private:
  struct Stretch {
    int first, count, set;
    friend bool operator==(const Stretch&, const Stretch&) = default;
  };
  using State = std::vector<Stretch>;  // by first chunk; neighbours with one set are one stretch

  int intern(std::vector<uint64_t> set);
  // The union of disjoint sets, -1 if two of them overlap.
  int join(const std::vector<int>& sets);
  bool within(int a, int b) const;  // set a within set b
  bool reduce_group(const std::vector<int>& group, State* sum);
  bool broadcastable(const std::vector<int>& group) const;
  static void append(State* state, Stretch stretch);

  int devices_ = 0;
  std::vector<State> states_;
  std::vector<std::vector<uint64_t>> sets_;
  std::map<std::vector<uint64_t>, int> index_;
  std::map<std::vector<int>, int> joins_;
};

}  // namespace motley::reduce

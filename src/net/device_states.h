// What collectives do to data (P2 section 3.2, Figure 8).
//
// The data of a device is k chunks; its state is a k x k Boolean matrix s: s[c][d] says that chunk
// c has device d's contribution in it; an empty row is a chunk the device does not hold. At first
// s_d[c] = {d}; at the end of a reduction every chunk has the contributions of the whole group. A
// collective on devices 0 .. n-1 is a Hoare triple; it is an error unless
//
//   all_reduce, reduce,     all hold the same chunks, at least one, and no contribution to a chunk
//   reduce_scatter          in two of them; reduce_scatter: n divides the number of chunks
//   all_gather              no chunk is held twice, and all hold equally many, at least one
//   broadcast               s_i within s_0 for all i, and somewhere strictly
//
// and then: all_reduce gives all of them the union; reduce gives it to 0 and empties the others;
// reduce_scatter gives i the i-th n-th of the chunks; all_gather gives all of them everything;
// broadcast copies s_0. Every group of a step must fulfil this.
//
// A device is stored as stretches of chunks with the same contributors, and contributors as
// interned sets: a step costs O(devices * stretches), a set k/64 words once.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "net/traffic.h"

namespace motley::net {

using Groups = std::vector<std::vector<int>>;

class SparseStates {
 public:
  // `devices` of one reduction; as many chunks each.
  explicit SparseStates(int devices);

  // Applies the collective to all groups. Returns false, and leaves the states as they were, where
  // it is an error.
  bool apply(Collective collective, const Groups& groups);
  // The chunks that a device holds: [first, first + count), ascending.
  std::vector<std::pair<int, int>> held(int device) const;
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

}  // namespace motley::net

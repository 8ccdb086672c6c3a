// Part of a group as a group of its own, over the messages of the larger one: the stages of a
// pipeline, and the replicas of a stage.
//
// Rings, as in gloo.h: with p members, S bytes in all and m the largest piece, all_reduce moves
// 2(p-1)/p S per member, all_gather and reduce_scatter (p-1) m; all_to_all goes pair by pair. Sums
// are the same bits on every member; sums of 16-bit numbers are taken in f32. Where the backend has
// groups of its own, the collectives are theirs.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace motley {

// `ranks` of the larger group, this one's among them. `tag` tells the messages of groups with
// common pairs apart. All members make it. The larger group must outlive it.
std::unique_ptr<Communicator> subgroup(Communicator& group, std::vector<int> ranks, int tag);

}  // namespace motley

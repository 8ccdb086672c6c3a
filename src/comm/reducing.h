// All-reduces by reduction programs (net/reduction.h) over the messages of a group.
//
// The tensor is cut into as many chunks as there are devices, nearly equal, of which a device holds
// those that the rules of P2 give it. A step runs in the groups of the program at the same time:
// all_reduce, reduce_scatter and all_gather as rings (subgroup.h), reduce and broadcast as chains
// from and to the root along which the tensor travels in segments. Integers come out as from the
// plain all-reduce, floats up to rounding; 16-bit floats are summed in f32 over backends that cannot add them. Programs that are
// started and not waited for run on a thread of their own, one after another.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "net/reduction.h"

namespace motley {

// `group` itself, but sums of tensors of at least programs[i].from bytes take the last such
// program. REQUIRES: the programs are sound for the group's size, by ascending `from`, and every
// rank gives the same. `group` must outlive the result.
std::unique_ptr<Communicator> reducing(Communicator& group,
                                       const std::vector<ReductionProgram>& programs);

}  // namespace motley

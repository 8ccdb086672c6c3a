// A group over several fabrics: workers of one part talk over a backend of that part, NCCL inside of
// a machine say, and all workers over another, gloo say.
//
// Messages take the backend of the part where both ends are in it. Groups inside of the part are
// the part's own (subgroup.h), so that a reduction program (reducing.h) runs every step over the
// fabric on which it was priced. Collectives of all workers take the other backend.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace motley {

// `part`: this rank's, of the ranks `members` of `all`, ascending. Both must outlive it, and their
// tensors are on one device.
std::unique_ptr<Communicator> mixed(Communicator& all, std::vector<int> members,
                                    Communicator& part);

}  // namespace motley

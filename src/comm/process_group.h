// A Communicator over any backend of c10d, by process groups that somebody else has made, such as
// torch.distributed in Python. gloo.h has one that makes its own groups and suits gloo better.
//
//   all_reduce       the backend's; 16-bit numbers as f32 where it cannot add them (cluster/backend.h)
//   all_gather       the backend's, of pieces padded to the largest; the grouped form is one
//                    broadcast per piece, posted together
//   reduce_scatter   all-to-all, then sums in rank order
//   all_to_all       the backend's, of one buffer; where it has none, messages; where it has none
//                    of these either, an all-gather of everything
//   send, receive    the backend's, with tags. Where it has no tags, the sender announces what it
//                    sends on the control group, and receives are posted in the order of the
//                    announcements: so programs that are correct with tags end, with the same
//                    results, on a backend that matches messages by their order alone
//
// Pieces travel as bytes, so every dtype works. Empty pieces are not sent. On a CUDA device results
// are there in the order of the current stream: wait() holds that up, not the caller, but for the
// announcements. barrier() waits for the device.
//
// Tested over gloo, under its own name and as a backend of which nothing is known, and over one that
// delays, reorders and refuses (tests/fake_backend.h); it has not been run over NCCL.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cluster/backend.h"
#include "comm/communicator.h"
#include "comm/gloo.h"
#include "interpret/torch_version.h"

namespace motley {

// A backend as a process group of its members; `device`: of the tensors that it is given.
ProcessGroup process_group_of(c10::intrusive_ptr<CollectiveBackend> backend,
                              const c10::intrusive_ptr<c10d::Store>& store, at::DeviceType device);

// A group of c10d's gloo, between the members of `where` that meet in the store.
c10::intrusive_ptr<CollectiveBackend> gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const Rendezvous& where);

// The process groups of some workers, in the order of their ranks.
struct ProcessGroups {
  ProcessGroup collectives;
  // Messages to higher and to lower ranks, where the backend has no tags: in one group, two ranks
  // that send to each other first would wait for ever. Null: it has no messages.
  ProcessGroup up, down;
};
// Makes those of the workers with these ranks (ascending) of the launch; called by all of them.
using MakeGroups = std::function<ProcessGroups(const std::vector<int>& ranks)>;

struct OverProcessGroups {
  std::vector<int> ranks;  // of the launch, ascending: the members
  MakeGroups make;
  Backend backend;
  at::Device device = at::kCPU;  // where all tensors are
  Communicator* control =
      nullptr;                // between the same workers, on the CPU, with tags; must outlive it
  std::optional<int> number;  // what messages call this worker, if not by its rank
};
// Throws UserError if the backend lacks what every backend has.
std::unique_ptr<Communicator> communicator_over(OverProcessGroups over);

}  // namespace motley

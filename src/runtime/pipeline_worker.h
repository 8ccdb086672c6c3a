// One worker of a pipeline plan (plan/pipeline.h): a rank of a stage of a replica, of several
// stages that share their devices, or none.
//
// The worker takes its stages' passes in the order of the plan. Messages travel
// while it computes: receives are posted kAhead passes before they are needed and waited for when
// they are, sends are posted as soon as their tensor is there and waited for when the other side's
// progress shows that they have arrived. Between stages each rank sends each other rank the part of
// the value that both hold (reshard.h).
//
// At the end of a step gradients, summed over the stage's micro-batches, are reduced as its program
// says, then over replicas (or both at once, where the plan has a program for that; a ring where
// all hold equal pieces, otherwise rings of those that do, which then exchange their sums), then,
// for tied parameters, over the stages of the replica. All holders of an element take its terms in
// the same order and so get the same bits.
#pragma once

#include <memory>

#include "runtime/worker.h"

namespace motley {

// Passes of each direction for which receives are posted ahead.
constexpr int kAhead = 2;

std::unique_ptr<Worker> make_pipeline_worker(const Plan& plan, Communicator& group,
                                             const ExecutorOptions& options);

}  // namespace motley

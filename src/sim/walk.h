// Walks the devices of a group through a stretch of an SPMD program, with their own integer pieces:
// computation occupies its device, a collective starts when the last device arrives and occupies
// all of them.
//
// Devices of one type that have equally large pieces of everything do the same at the same time:
// one of them stands for all, so that a walk costs steps * kinds of devices, not steps * devices.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "cost/cost.h"

namespace motley {

enum class WalkKind : uint8_t { compute, comm, wait };

// Called with what a device does from `begin` to `end`.
using WalkSink = std::function<void(int device, Seconds begin, Seconds end, const std::string& name,
                                    WalkKind kind, NodeId node)>;

struct WalkOptions {
  bool each = false;  // the sink is told of every device, not of those alone that stand for others
  Deadline deadline;  // throws TimeIsUp
};

// Steps [begin, end). `now`, [device], is when each is free, and when it is done. Returns, [device],
// the first device that does the same at the same time: the sink is told of these alone.
std::vector<int> walk(const Theory& theory, const Program& program, const CostModel& model,
                      const Fractions& fractions, int begin, int end, std::vector<Seconds>* now,
                      const WalkSink& sink, const WalkOptions& options = {});

// The optimizer on every device's pieces, as far as it keeps their state; likewise.
std::vector<int> walk_optimizer(const Theory& theory, const Program& program,
                                const CostModel& model, const Fractions& fractions,
                                Optimizer optimizer, std::vector<Seconds>* now,
                                const WalkSink& sink, const ZeroShare& kept = {},
                                const WalkOptions& options = {});

}  // namespace motley

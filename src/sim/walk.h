// Walks the devices of a group through a stretch of an SPMD program, with their own integer pieces:
// computation occupies its device, a collective starts when the last device arrives and occupies
// all of them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cost/cost.h"

namespace motley {

enum class WalkKind : uint8_t { compute, comm, wait };

// Called with what a device does from `begin` to `end`.
using WalkSink = std::function<void(int device, Seconds begin, Seconds end, const std::string& name,
                                    WalkKind kind, NodeId node)>;

// Steps [begin, end). `now`, [device], is when each is free, and when it is done.
void walk(const Theory& theory, const Program& program, const CostModel& model,
          const Fractions& fractions, int begin, int end, std::vector<Seconds>* now,
          const WalkSink& sink);

// The optimizer on every device's pieces, as far as it keeps their state.
void walk_optimizer(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, Optimizer optimizer, std::vector<Seconds>* now,
                    const WalkSink& sink, const ZeroShare& kept = {});

}  // namespace motley

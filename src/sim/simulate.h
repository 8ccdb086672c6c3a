// The event simulator: a plan, device by device, through one step.
//
// Where the cost model prices types at their largest piece and sums over stages, the simulator
// walks every device through the program with its own integer pieces. Computation occupies its
// device; a collective starts when the last device arrives and occupies all of them (the runtime's
// collectives block). The answer is a timeline. Pipelines: see pipeline.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "plan/plan.h"
#include "sim/walk.h"

namespace motley {

struct Span {
  int device = 0;
  Seconds begin = 0, end = 0;
  std::string name;  // "aten::mm", "all_reduce"
  WalkKind kind = WalkKind::compute;
  NodeId node;       // compute
  Seconds comm = 0;  // of a pipeline's pass: what its devices communicate in it
};

// What a stage of a replica sends another of it, once its pass is done and the way is free.
struct StageMessage {
  int replica = 0, from = 0, to = 0;  // stages
  bool backward = false;
  Seconds begin = 0, end = 0;
};

struct DeviceTime {
  Seconds busy = 0;          // computing
  Seconds comm = 0;          // in collectives and messages from other stages
  Seconds exposed_comm = 0;  // of it not hidden behind computation
  Seconds idle = 0;          // waiting for others; busy + exposed_comm + idle = step
  Bytes peak_memory = 0;     // as planned for
  Bytes allocated = 0;       // of it at most at a time, gradients freed after every step
};

// What pipelines send between groups of devices: "stage 0 to 1, forward", "gradients over replicas,
// stage 1".
struct Exchange {
  std::string what;
  int count = 0;        // a step
  Bytes bytes = 0;      // of one: what all its messages carry
  Seconds seconds = 0;  // of one
};

// Whose spans are wanted. Alike: one device's for all that do the same at the same times. All:
// everyone's, but where there would be more than kMostSpans those of `alike`.
enum class Spans : uint8_t { none, alike, all };
inline constexpr size_t kMostSpans = 1 << 22;

struct Simulation {
  Seconds step = 0;
  std::vector<DeviceTime> devices;
  double overlap = 0;                  // share of communication that is hidden
  double load_balance = 0;             // mean busy time over largest busy time
  std::vector<Exchange> exchanges;     // of pipelines
  std::vector<Span> spans;             // only if asked for; none if there would be too many
  std::vector<int> like;               // [device] whose spans are its own; empty: all have theirs
  bool too_long = false;               // there would be too many
  std::vector<StageMessage> messages;  // of pipelines, with the spans
};

// Adds a span to those of `simulation`, or leaves all out if they are too many.
void add_span(Span span, Simulation* simulation);

// Throws TimeIsUp if the deadline passes.
Simulation simulate(const Plan& plan, Spans spans = Spans::none, const Deadline& deadline = {});

// The trace-event format that Perfetto and chrome://tracing open. Throws UserError if the timeline
// was too long.
std::string to_trace(const Plan& plan, const Simulation& simulation);

}  // namespace motley

// A strategy of the grid: degrees, micro-batch, layers per stage, devices per rank (AMP section
// 3.3's tuple (pp, dp, tmp, p, mbs, a), and what came later: context and expert parallelism,
// interleaved stages, recomputation, ZeRO, unequal replicas).
//
// Ranks are numbered tensor parallel first, then context, then data, then pipeline:
//
//     rank(stage, replica, c, t) = ((stage * dp + replica) * cp + c) * tp + t
//
// Expert parallelism divides the experts over ep of the dp * cp ranks; it adds no ranks.
//
// With `interleave` = v > 1 stage s holds the layer ranges s, s + pp, s + 2 pp, ...: `stages` lists
// all v * pp ranges in layer order.
//
// Text form, the same as users give to fix a strategy ("pp=4,dp=4,tp=1,mbs=1,layers=6/6/6/6"); what
// is left out is free in a search and 1, or evenly shared, in a strategy.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "grid/model.h"

namespace motley::grid {

// What runs the plan, which decides what overlaps:
//   motley     transfers run beside computation, gradients are reduced once the stage is done
//   deepspeed  a stage receives and sends while it does not compute; with tp > 1 messages are cut
//              over the tp ranks and gathered by the receiver
//   megatron   the same, but with tp > 1 every rank sends the whole message
enum class Runtime { motley, deepspeed, megatron };
const char* to_string(Runtime runtime);

enum class Recompute { none, selective, full };  // selective: the attention scores only
const char* to_string(Recompute recompute);

struct Strategy {
  int pp = 1, dp = 1, tp = 1, cp = 1, ep = 1;
  int micro_batch = 1;
  int interleave = 1;
  int zero = 0;  // ZeRO stage
  Recompute recompute = Recompute::none;
  Runtime runtime = Runtime::motley;
  std::vector<int> stages;         // layers of each range; sums to the model's layers
  std::vector<int> micro_batches;  // of each replica
  std::vector<int> devices;        // [rank]

  int ranks() const { return pp * dp * cp * tp; }
  int device(int stage, int replica, int c, int t) const {
    return devices[((static_cast<size_t>(stage) * dp + replica) * cp + c) * tp + t];
  }
  friend bool operator==(const Strategy&, const Strategy&) = default;
};

// "pp=4,dp=4,tp=1,mbs=1,layers=6/6/6/6", and what differs from the defaults.
std::string to_string(const Strategy& strategy);

// Fixed choices of a search. Throws UserError naming the key on anything it does not know.
struct Fixed {
  std::optional<int> pp, dp, tp, cp, ep, micro_batch, interleave, zero;
  std::optional<Recompute> recompute;
  std::optional<std::vector<int>> stages;
  std::optional<std::vector<int>> devices;
};
Fixed parse_fixed(const std::string& text);

}  // namespace motley::grid

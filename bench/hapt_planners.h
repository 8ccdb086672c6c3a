// Planners of GPT on mixed clusters, run in one event simulator (see hapt_bench.cc).
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/units.h"
#include "hapt_gpt.h"
#include "pipeline/search.h"

namespace motley::pipeline::hapt {

struct Outcome {
  Seconds step = std::numeric_limits<double>::infinity();
  double balance = 0;
  std::string plan, schedule;
  Pipeline pipeline;
};

inline const std::vector<int64_t> kMicroBatches = {1, 2, 4, 8, 16, 32};

// `first`: the piece at which each layer starts; `blind`: links are taken to be free;
// `inside_nodes`: no stage is wider than a node.
Outcome run_motley(const Case& c, std::vector<int> first, bool blind = false,
                   bool inside_nodes = false);
Outcome run_megatron(const Case& c);
Outcome run_alpa(const Case& c);
Outcome run_hexiscale(const Case& c);

}  // namespace motley::pipeline::hapt

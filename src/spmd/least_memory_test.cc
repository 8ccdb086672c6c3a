#include "spmd/least_memory.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"
#include "spmd/recompute.h"

namespace motley::spmd {
namespace {

// No program holds less in all devices together; some hold hardly more.
TEST(LeastMemory, NoProgramHoldsLess) {
  Rng rng(11);
  double nearest = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    const CostModel model(mixed(2, 2));
    ProblemBuilder builder(theory, model, Optimizer::adamw);
    for (int i = 0; i < 40; ++i) {
      const double fast = 0.1 + 0.3 * rng.uniform();
      const Shares shares({fast, fast, 0.5 - fast, 0.5 - fast});
      const Fractions fractions(model.cluster(), shares);
      builder.price(fractions);
      const Program program = random_program(builder, &rng);
      for (const Optimizer optimizer : {Optimizer::sgd, Optimizer::adamw}) {
        const MemoryCost memory = memory_of(theory, program, fractions, model.types(), optimizer);
        Bytes all = 0;
        for (const Device& d : model.cluster().devices) all += memory.peak[d.type];
        const Bytes least = least_memory(graph, optimizer);
        EXPECT_LE(least, all * (1 + 1e-9)) << name;
        EXPECT_LE(least_memory_again(graph, optimizer), all * (1 + 1e-9)) << name;
        // With any of its blocks computed again, too.
        const std::vector<int> block = blocks_of(graph);
        std::vector<bool> chosen(*std::max_element(block.begin(), block.end()) + 1);
        for (size_t b = 0; b < chosen.size(); ++b) chosen[b] = rng.chance(0.7);
        const MemoryCost lean = memory_of(theory, recompute(theory, program, block, chosen),
                                          fractions, model.types(), optimizer);
        Bytes leaner = 0;
        for (const Device& d : model.cluster().devices) leaner += lean.peak[d.type];
        EXPECT_LE(least_memory_again(graph, optimizer), leaner * (1 + 1e-9)) << name;
        nearest = std::max(nearest, least / all);
      }
    }
    // On one device it is all but what the passes themselves need: a small convolution's columns
    // and blocks are most of it.
    const bool convolves = std::string(name) == "convnet";
    const CostModel alone(mixed(1, 0));
    const Shares whole(std::vector<double>{1.0});
    const MemoryCost memory = memory_of(theory, whole_program(theory),
                                        Fractions(alone.cluster(), whole), 1, Optimizer::adamw);
    EXPECT_LE(least_memory(graph, Optimizer::adamw), memory.peak[0] * (1 + 1e-9)) << name;
    EXPECT_GE(least_memory(graph, Optimizer::adamw), (convolves ? 0.2 : 0.5) * memory.peak[0])
        << name;
  }
  EXPECT_GT(nearest, 0.3);
}

}  // namespace
}  // namespace motley::spmd

// Captured graphs and small clusters that several tests share.
#pragma once

#include <string>
#include <utility>

#include "cluster/cluster.h"
#include "reference/graphs.h"
#include "shard/program.h"

namespace motley::spmd {

using namespace solver;

inline DeviceType device(const std::string& name, double flops, double memory = 16e9) {
  return {name, flops, 4 * flops, memory, flops / 20, 1e-6, 0};
}

// `fast` devices and `slow` ones of a quarter of their speed on one switch.
inline Cluster mixed(int fast, int slow, double bandwidth = 1e9, double memory = 16e9) {
  return flat_cluster({device("fast", 4e12, memory), device("slow", 1e12, memory)}, {fast, slow},
                      {LinkKind::switched, bandwidth, 1e-5});
}

// Every device does everything.
inline Program whole_program(const Theory& theory) {
  std::vector<motley::Step> steps;
  const Graph& graph = theory.graph();
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    motley::Step step;
    step.node = NodeId(n);
    const auto& triples = theory.triples(step.node);
    for (size_t t = 0; t < triples.size(); ++t)
      if (triples[t].cut == 0 && triples[t].out[0].is_replicated())
        step.triple = static_cast<int>(t);
    steps.push_back(step);
  }
  return {std::move(steps)};
}

}  // namespace motley::spmd

#include "cli/layer_speed.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "cli/model_graphs.h"
#include "cluster/resources.h"
#include "core/error.h"
#include "cost/cost.h"
#include "graph/precision.h"
#include "planner/sizes.h"
#include "spmd/recompute.h"

namespace motley {

namespace {

constexpr size_t kMostPoints = 6;  // each is a graph of the model; the largest are taken

// Seconds of the forward pass of a block of the model on one device.
Seconds of_a_block(const Graph& graph, const DeviceType& type) {
  const Theory theory(graph);
  const CostModel cost(flat_cluster({type}, {1}, {LinkKind::switched, 1, 0}));
  const std::vector<int> block = spmd::blocks_of(graph);
  std::set<int> blocks;
  Seconds sum = 0;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (block[n] < 0) continue;
    blocks.insert(block[n]);
    sum += cost.compute(0, work_of(theory, NodeId(n), theory.triples(NodeId(n))[0]), 1);
  }
  return blocks.empty() ? 0 : sum / static_cast<double>(blocks.size());
}

}  // namespace

LayerSpeed speed_from(const readers::LayerTimes& times, const std::string& name,
                      const std::string& model, const DeviceType& type) {
  ModelGraphs graphs(model);
  std::string why;
  const std::optional<Sizes> sizes = sizes_of(graphs.at(1), &why);
  if (!sizes) throw user_error("cluster", "--model {}: {}; give a transformer", model, why);
  const auto measured = times.forward.find(sizes->seq);
  if (measured == times.forward.end()) {
    std::vector<int64_t> tokens;
    for (const auto& [of, _] : times.forward) tokens.push_back(of);
    throw user_error("cluster",
                     "{}: is of samples of {} tokens, --model {} has {}; give the model that was "
                     "measured",
                     name, fmt::join(tokens, ", "), model, sizes->seq);
  }
  LayerSpeed found{type, 1, 0, 0, sizes->seq};
  std::vector<double> ratios;  // measured to priced
  const auto& points = measured->second;
  for (size_t i = points.size() - std::min(points.size(), kMostPoints); i < points.size(); ++i) {
    const auto& [samples, seconds] = points[i];
    Graph graph = graphs.at(samples);
    if (times.half) graph = with_precision(graph, DType::bf16);
    const Seconds priced = of_a_block(graph, type);
    if (!(priced > 0)) throw user_error("cluster", "--model {}: has no layers", model);
    ratios.push_back(seconds / priced);
  }
  // The geometric mean, so that no time counts for more than another.
  double sum = 0;
  for (const double ratio : ratios) sum += std::log(ratio);
  found.points = ratios.size();
  found.slower = std::exp(sum / static_cast<double>(ratios.size()));
  slow_down(&found.type, found.slower);
  for (const double ratio : ratios)
    found.error += std::abs(found.slower / ratio - 1) / static_cast<double>(ratios.size());
  return found;
}

}  // namespace motley

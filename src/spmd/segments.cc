#include "spmd/segments.h"

#include <metis.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/units.h"
#include "graph/op.h"
#include "graph/segment.h"

namespace motley::spmd {

namespace {

// METIS computes in integers of 32 bits: the sum of all weights.
constexpr double kWeights = 1e9;
// How much heavier than the mean a part may be, in thousandths. A cut at a small tensor is worth
// more than parts of one weight.
constexpr idx_t kImbalance = 500;

Flops flops_of(const Graph& graph, const Node& node) {
  const OpDef* op = find_op(node.op);
  if (op && op->alias) return 0;
  if (op && op->flops) return op->flops(graph, node);
  int64_t largest = 0;
  for (ValueId v : node.outputs)
    if (v.valid()) largest = std::max(largest, graph.spec(v).numel());
  return static_cast<Flops>(largest);
}

// Integers in proportion to weights, at least 1.
std::vector<idx_t> scaled(const std::vector<double>& weights) {
  double sum = 0;
  for (double w : weights) sum += w;
  std::vector<idx_t> result;
  for (double w : weights)
    result.push_back(1 + static_cast<idx_t>(sum > 0 ? std::floor(w / sum * kWeights) : 0));
  return result;
}

}  // namespace

const char* to_string(SegmentWeight weight) {
  return weight == SegmentWeight::bytes ? "bytes" : "flops";
}

std::vector<int> partition_segments(const Graph& graph, int count, SegmentWeight weight) {
  MOTLEY_CHECK(count >= 1 && count <= kMaxSegments);
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  auto is_forward = [&](const Node& node) {
    return !is_source(node) && node.phase == Phase::forward;
  };
  // A vertex is a node and the views of what it makes; views of sources go with what reads them.
  std::vector<int> vertex(graph.nodes.size(), -1);
  std::vector<NodeId> node_of;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (!is_forward(node)) continue;
    const OpDef* op = find_op(node.op);
    const ValueList inputs = graph.inputs_of(node);
    if (op && op->alias && inputs.size() == 1) {
      vertex[n] = vertex[graph.value(inputs[0]).producer.index];
      continue;
    }
    vertex[n] = static_cast<int>(node_of.size());
    node_of.push_back(NodeId(static_cast<int64_t>(n)));
  }
  std::vector<int> segment(graph.nodes.size(), -1);
  if (count == 1 || node_of.size() < 2) {
    for (size_t n = 0; n < graph.nodes.size(); ++n)
      if (is_forward(graph.nodes[n])) segment[n] = 0;
    return with_backward(graph, std::move(segment));
  }
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    if (!is_forward(graph.nodes[n])) continue;
    for (ValueId v : graph.nodes[n].outputs)
      for (size_t r = 0; v.valid() && vertex[n] < 0 && r < consumers[v.index].size(); ++r)
        vertex[n] = vertex[consumers[v.index][r].index];
    vertex[n] = std::max(vertex[n], 0);
  }

  // A value joins the node that makes it to those that read it; a parameter its readers.
  std::vector<double> weights(node_of.size(), 0);
  std::map<std::pair<int, int>, double> edges;
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const NodeId maker = graph.values[v].producer;
    const auto bytes = static_cast<double>(graph.values[v].spec.bytes());
    int from = vertex[maker.index];
    if (from < 0 && graph.node(maker).op != "motley::parameter") continue;
    const OpDef* op = find_op(graph.node(maker).op);
    const bool view = from >= 0 && op && op->alias;
    if (from >= 0 && weight == SegmentWeight::bytes && !view) weights[from] += bytes;
    for (NodeId reader : consumers[v]) {
      const int to = vertex[reader.index];
      if (to < 0 || to == from) continue;
      if (from < 0) {
        from = to;
        if (weight == SegmentWeight::bytes) weights[to] += bytes;
        continue;
      }
      edges[{std::min(from, to), std::max(from, to)}] += bytes;
    }
  }
  if (weight == SegmentWeight::flops)
    for (size_t i = 0; i < node_of.size(); ++i)
      weights[i] = flops_of(graph, graph.node(node_of[i]));

  std::vector<double> edge_bytes;
  for (const auto& [ends, bytes] : edges) edge_bytes.push_back(bytes);
  const std::vector<idx_t> edge_weights = scaled(edge_bytes);
  std::vector<std::vector<std::pair<idx_t, idx_t>>> neighbours(node_of.size());
  size_t e = 0;
  for (const auto& [ends, bytes] : edges) {
    neighbours[ends.first].emplace_back(ends.second, edge_weights[e]);
    neighbours[ends.second].emplace_back(ends.first, edge_weights[e]);
    ++e;
  }
  std::vector<idx_t> start{0}, adjacent, adjacent_weight, vertex_weight = scaled(weights);
  for (const auto& list : neighbours) {
    for (const auto& [to, w] : list) {
      adjacent.push_back(to);
      adjacent_weight.push_back(w);
    }
    start.push_back(static_cast<idx_t>(adjacent.size()));
  }
  std::array<idx_t, METIS_NOPTIONS> options;
  METIS_SetDefaultOptions(options.data());
  options[METIS_OPTION_SEED] = 1;
  options[METIS_OPTION_UFACTOR] = kImbalance;
  auto vertices = static_cast<idx_t>(node_of.size()), constraints = idx_t{1},
       parts = static_cast<idx_t>(count), cut = idx_t{0};
  std::vector<idx_t> part(node_of.size(), 0);
  const int status = METIS_PartGraphRecursive(
      &vertices, &constraints, start.data(), adjacent.data(), vertex_weight.data(), nullptr,
      adjacent_weight.data(), &parts, nullptr, nullptr, options.data(), &cut, part.data());
  MOTLEY_CHECK(status == METIS_OK, "METIS: {}", status);

  std::map<idx_t, int> number;
  for (size_t n = 0; n < graph.nodes.size(); ++n)
    if (is_forward(graph.nodes[n]))
      segment[n] =
          number.try_emplace(part[vertex[n]], static_cast<int>(number.size())).first->second;
  return with_backward(graph, std::move(segment));
}

}  // namespace motley::spmd

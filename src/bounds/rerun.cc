#include "bounds/rerun.h"

#include <algorithm>
#include <utility>

namespace motley::bounds {

using namespace solver;
using namespace spmd;

Rerun::Rerun(const Theory& theory, const ProblemBuilder& builder,
             const std::vector<int>& block_of) {
  const Graph& graph = theory.graph();
  find_readers(graph, builder, block_of);
  find_twice(graph, builder);
  const int blocks = 1 + *std::max_element(block_of.begin(), block_of.end());
  begin.assign(std::max(blocks, 0), kNever);
  alone.assign(begin.size(), true);
  const Problem& problem = builder.problem();
  for (size_t n = 0; n < problem.nodes.size(); ++n) {
    const NodeId node = builder.node(static_cast<int>(n));
    if (!node.valid() || graph.node(node).phase == Phase::forward) continue;
    std::vector<int> read;
    for (int c : problem.nodes[n].inputs)
      if (is_inner(c)) read.push_back(values[c].block);
    for (int b : read) {
      begin[b] = std::min<int64_t>(begin[b], node.index);
      for (int other : read)
        if (other != b) alone[b] = false;
    }
  }
}

void Rerun::find_readers(const Graph& graph, const ProblemBuilder& builder,
                         const std::vector<int>& block_of) {
  const Problem& problem = builder.problem();
  for (int c = 0; c < builder.values(); ++c) {
    Value v;
    v.maker = graph.value(builder.root(c)).producer;
    const Node& node = graph.node(v.maker);
    v.made_forward = node.phase == Phase::forward;
    v.source = is_source(node);
    v.block = block_of[v.maker.index];
    v.inner = v.made_forward && v.block >= 0 && (!v.source || node.op == "motley::parameter");
    values.push_back(std::move(v));
  }
  // Views of other blocks read it too.
  for (size_t i = 0; i < graph.values.size(); ++i) {
    const NodeId maker = graph.values[i].producer;
    Value& v = values[builder.value(ValueId(i))];
    if (graph.node(maker).phase == Phase::forward && block_of[maker.index] != v.block)
      v.inner = false;
  }
  for (size_t n = 0; n < problem.nodes.size(); ++n) {
    const NodeId node = builder.node(static_cast<int>(n));
    const ValueList views = node.valid() ? graph.inputs_of(graph.node(node)) : ValueList();
    const auto& inputs = problem.nodes[n].inputs;
    for (int slot = 0; slot < static_cast<int>(inputs.size()); ++slot) {
      if (inputs[slot] >= builder.values()) continue;
      Value& v = values[inputs[slot]];
      if (!node.valid()) {  // needed at the end
        v.inner = false;
        continue;
      }
      const bool backward = graph.node(node).phase == Phase::backward;
      v.last = std::max<int64_t>(v.last, node.index);
      (backward ? v.backward : v.forward)
          .push_back({static_cast<int>(n), slot, node.index, views[slot]});
      if (!backward && block_of[node.index] != v.block) v.inner = false;
    }
  }
  // Values of one node stay together.
  for (const ProblemNode& node : problem.nodes) {
    bool all = true;
    for (int c : node.outputs) all = all && (c >= builder.values() || values[c].inner);
    for (int c : node.outputs)
      if (c < builder.values() && !all) values[c].inner = false;
  }
}

// What the backward pass reads of a block and only that reads forward is made again, and all that
// it is made of. What other blocks read too may be made again.
void Rerun::find_twice(const Graph& graph, const ProblemBuilder& builder) {
  const Problem& problem = builder.problem();
  std::vector<int> problem_node(graph.nodes.size(), -1);
  for (size_t n = 0; n < problem.nodes.size(); ++n)
    if (const NodeId node = builder.node(static_cast<int>(n)); node.valid())
      problem_node[node.index] = static_cast<int>(n);
  must.assign(graph.nodes.size(), false);
  may = must;
  auto close = [&](std::vector<bool>* set, std::vector<int64_t> stack) {
    while (!stack.empty()) {
      const int64_t n = stack.back();
      stack.pop_back();
      if (must[n] || (*set)[n]) continue;
      (*set)[n] = true;
      for (int c : problem.nodes[problem_node[n]].inputs)
        if (is_inner(c)) stack.push_back(values[c].maker.index);
    }
  };
  std::vector<int64_t> inner, outer;
  for (const Value& v : values)
    if (v.made_forward && !v.source && v.block >= 0 && !v.backward.empty())
      (v.inner ? inner : outer).push_back(v.maker.index);
  close(&must, std::move(inner));
  close(&may, std::move(outer));
}

}  // namespace motley::bounds

#include "planner/grid_model.h"

#include <numeric>
#include <set>
#include <utility>

#include "cluster/backend.h"
#include "cost/cost.h"
#include "graph/op.h"

namespace motley::planner {

grid::Model grid_model(const LayeredGraph& builder, int64_t samples) {
  const Graph& graph = builder.graph();
  const double n = static_cast<double>(samples);
  grid::Model model;
  model.name = graph.model;
  bool half = false;
  for (const Parameter& p : graph.parameters)
    half = half || (p.gradient.valid() && size_of(graph.spec(p.gradient).dtype) == 2);
  model.precision = half ? grid::fp16_adam() : grid::fp32_adam();
  model.heads = 64;
  std::set<ValueId> seen;
  std::vector<bool> parameter(graph.values.size());
  for (const Parameter& p : graph.parameters) parameter[p.value.index] = true;
  const auto& layers = builder.layers().layers;
  for (size_t l = 0; l < layers.size(); ++l) {
    grid::Layer layer;
    layer.name = fmt::format("layer {}", l);
    int products = 0;
    bool attends = false;
    for (NodeId id : layers[l].forward) {
      const Node& node = graph.node(id);
      const OpDef* op = find_op(node.op);
      // Attention scores tell the heads and the tokens, whose keys and values all others read.
      if (node.op == "aten::_softmax" && graph.spec(node.outputs[0]).shape.size() == 4) {
        const Shape& scores = graph.spec(node.outputs[0]).shape;
        model.heads = static_cast<int>(scores[1]);
        model.tokens = scores[2];
        attends = true;
      }
      Bytes bytes = 0;
      bool weights = false;
      for (ValueId v : graph.inputs_of(node)) {
        bytes += static_cast<Bytes>(graph.spec(v).bytes());
        ValueId root = v;
        for (;;) {
          const Node& producer = graph.node(graph.value(root).producer);
          const OpDef* maker = find_op(producer.op);
          if (is_source(producer) || !maker || !maker->alias) break;
          root = graph.inputs_of(producer)[0];
        }
        if (!parameter[root.index]) continue;
        const TensorSpec& spec = graph.spec(root);
        weights = weights || spec.shape.size() > 1;
        // Experts' weights are stacked: [expert, in, out].
        const bool stacked = node.op == "aten::bmm" && spec.shape.size() == 3;
        if (stacked) {
          model.experts = static_cast<int>(spec.shape[0]);
          layer.routed += static_cast<double>(graph.spec(node.outputs[0]).numel()) / n;
        }
        if (!seen.insert(root).second) continue;
        (stacked                 ? layer.expert_parameters
         : spec.shape.size() > 1 ? layer.parameters
                                 : layer.parameters_whole) += static_cast<double>(spec.numel());
      }
      for (ValueId v : node.outputs)
        if (v.valid()) bytes += static_cast<Bytes>(graph.spec(v).bytes());
      if (op && op->alias) continue;
      layer.kernels += 1;
      if (op && op->flops) {
        layer.flops += op->flops(graph, node) / n;
        products += weights;
        layer.block = layer.block || op->flops(graph, node) > 0;
      } else {
        layer.traffic += bytes / n;
      }
    }
    layer.output =
        l + 1 < layers.size() ? layers[l + 1].boundary / model.precision.activation / n : 1;
    layer.saved = layers[l].saved / n;
    layer.all_reduces = (products + 1) / 2;
    if (attends) layer.key_values = 2 * layer.output;
    model.layers.push_back(layer);
  }
  return model;
}

grid::Estimator estimator_of(grid::Model model, const Cluster& cluster, double workspace) {
  if (model.precision.half)
    model.precision.reduced = 2 * widening(backend_of(cluster), Collective::all_reduce, true);
  grid::Calibration calibration = grid::default_calibration(cluster, model.precision);
  for (auto& [type, rates] : calibration.types) rates.context = rates.channels = 0;
  calibration.fragmentation = workspace;
  return grid::Estimator(std::move(model), cluster, calibration);
}

int merged_replicas(const grid::Strategy& s) {
  return s.zero == 3 ? s.dp : std::max(1, s.ep / s.cp);
}

int taken_by(const grid::Strategy& s, int first, int merged) {
  return std::accumulate(s.micro_batches.begin() + first, s.micro_batches.begin() + first + merged,
                         0);
}

Composition composition_of(const grid::Strategy& s, Again again) {
  Composition composition;
  const int merged = merged_replicas(s);
  composition.micro_batch = s.micro_batch * merged;
  composition.zero = s.zero == 3 ? 3 : 0;
  for (int r = 0; r < s.dp; r += merged) {
    ReplicaChoice replica;
    replica.micro_batches = taken_by(s, r, merged) / merged;
    int first = 0;
    for (int p = 0; p < s.pp * s.interleave; ++p) {
      StageChoice stage{first,
                        first + s.stages[p] - 1,
                        {},
                        s.recompute == grid::Recompute::none ? Again::never : again};
      for (int k = r; k < r + merged; ++k)
        for (int c = 0; c < s.cp; ++c)
          for (int t = 0; t < s.tp; ++t) stage.devices.push_back(s.device(p % s.pp, k, c, t));
      first += s.stages[p];
      replica.stages.push_back(std::move(stage));
    }
    composition.replicas.push_back(std::move(replica));
  }
  return composition;
}

}  // namespace motley::planner

#include "pipeline/layer_homes.h"

#include <algorithm>

#include "graph/op.h"
#include "graph/owner.h"

namespace motley::pipeline {

namespace {

bool is_alias(const Node& node) {
  const OpDef* op = find_op(node.op);
  return op && op->alias;
}

class HomeFinder {
 public:
  HomeFinder(const Graph& graph, const std::vector<NodeId>& forward,
             const std::vector<int>& layer_of, int layers)
      : graph_(graph),
        forward_(forward),
        last_layer_(layers - 1),
        consumers_(graph.consumers()),
        parameter_(graph.values.size(), false),
        constant_(graph.nodes.size(), false),
        folded_(graph.nodes.size(), false),
        copies_(graph.nodes.size(), false),
        owner_(graph.values.size(), -1),
        readers_(graph.values.size()),
        seen_(graph.values.size(), false) {
    homes_.layer_of.assign(graph.nodes.size(), -1);
    for (size_t q = 0; q < forward.size(); ++q) home(forward[q]) = layer_of[q];
    for (std::vector<Bytes>* bytes : {&homes_.parameters, &homes_.saved, &homes_.gradients})
      bytes->assign(layers, 0);
    for (const Parameter& p : graph.parameters) parameter_[p.value.index] = true;
    for (size_t v = 0; v < graph.values.size(); ++v)
      base_.push_back(ValueId(static_cast<int64_t>(v)));
  }

  LayerHomes run() {
    follow();
    move_gradients();
    move_copies();
    add_gradients();
    return std::move(homes_);
  }

 private:
  int& home(NodeId node) { return homes_.layer_of[node.index]; }
  NodeId producer(ValueId v) const { return graph_.value(v).producer; }
  bool is_backward(NodeId node) const {
    return graph_.node(node).phase == Phase::backward && !is_source(graph_.node(node));
  }
  // A gradient, not a copy of a forward value.
  bool is_gradient(ValueId v) const {
    return is_backward(producer(v)) && !copies_[producer(v).index];
  }

  // In order: every backward node to the layer of what it reads.
  void follow() {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (is_source(node)) continue;
      auto inputs = graph_.inputs_of(node);
      const OpDef* op = find_op(node.op);
      constant_[i] =
          !(op && op->random) && std::all_of(inputs.begin(), inputs.end(), [&](ValueId v) {
            return constant_[producer(v).index] ||
                   graph_.node(producer(v)).op == "motley::constant";
          });
      if (node.phase == Phase::backward) place(i, &inputs);
      for (ValueId v : inputs)
        if (node.phase == Phase::forward) readers_[v.index].push_back(homes_.layer_of[i]);
      for (ValueId v : inputs)
        if (parameter_[v.index] && owner_[v.index] < 0) {
          owner_[v.index] = homes_.layer_of[i];
          homes_.parameters[homes_.layer_of[i]] += static_cast<Bytes>(graph_.spec(v).bytes());
        }
    }
  }

  // To the layer of the forward values that it reads, the deepest of them, or of the gradient it
  // continues. What stands for a forward value takes that one's place among the inputs.
  void place(size_t i, ValueList* inputs) {
    int forward = -1, backward = last_layer_;
    for (ValueId v : *inputs)
      if (is_gradient(v)) backward = std::min(backward, home(producer(v)));
    for (ValueId& v : *inputs) v = base_[v.index];
    const Node& node = graph_.nodes[i];
    copies_[i] = is_copy(node) && is_forward_or_parameter((*inputs)[0]);
    if (copies_[i]) base_[node.outputs[0].index] = (*inputs)[0];
    for (ValueId v : *inputs) {
      const NodeId maker = producer(v);
      int l = home(maker);
      if (l < 0 || constant_[maker.index] || graph_.node(maker).phase != Phase::forward) continue;
      if (!seen_[v.index]) homes_.saved[l] += static_cast<Bytes>(graph_.spec(v).bytes());
      seen_[v.index] = true;
      // A mask that many layers read stands for the reader that the gradient has come past.
      const std::vector<int>& at = readers_[v.index];
      if (!at.empty() && at.back() > at.front() + 1) l = std::max(l, past(at, backward));
      forward = std::max(forward, l);
    }
    // A parameter read again stands for the reader that the gradient has just come past.
    for (ValueId v : *inputs)
      if (parameter_[v.index]) forward = std::max(forward, past(readers_[v.index], backward));
    folded_[i] = forward >= 0;
    homes_.layer_of[i] = forward >= 0 ? std::min(forward, backward) : backward;
  }

  // The last of some layers, ascending, that is not behind one; -1: none.
  static int past(const std::vector<int>& layers, int limit) {
    const auto behind = std::upper_bound(layers.begin(), layers.end(), limit);
    return behind == layers.begin() ? -1 : *(behind - 1);
  }

  // A view or a copy: nothing that a layer would have to be sent beside its input.
  static bool is_copy(const Node& node) {
    return node.outputs.size() == 1 && node.outputs[0].valid() &&
           (is_alias(node) || node.op == "aten::_to_copy" || node.op == "aten::clone");
  }
  bool is_forward_or_parameter(ValueId v) const {
    const Node& maker = graph_.node(producer(v));
    return is_source(maker) ? parameter_[v.index] : maker.phase == Phase::forward;
  }

  // What only leads to the gradient of a parameter moves to the layer that owns it, or if it reads
  // forward values to the last use of the parameter that the gradient has come past: what it reads
  // of earlier layers came in there, too.
  void move_gradients() {
    std::vector<int> target(graph_.values.size(), -1), gradient_of(graph_.values.size(), -1);
    for (const Parameter& p : graph_.parameters) {
      if (!p.gradient.valid()) continue;
      target[p.gradient.index] = owner_[p.value.index];
      gradient_of[p.gradient.index] = p.value.index;
    }
    const std::vector<std::vector<int>> users = parameter_users();
    const size_t nodes = graph_.nodes.size();
    std::vector<int> anchor(nodes, -1), leads(nodes, -1);  // leads: to this parameter's gradient
    for (size_t i = nodes; i-- > 0;) {
      const Node& node = graph_.nodes[i];
      if (node.phase != Phase::backward || is_source(node)) continue;
      bool only = true;
      int to = -1, to_parameter = -1;
      for (ValueId v : node.outputs) {
        if (!v.valid()) continue;
        to = std::max(to, target[v.index]);
        to_parameter = std::max(to_parameter, gradient_of[v.index]);
        for (NodeId c : consumers_[v.index]) {
          to_parameter = std::max(to_parameter, leads[c.index]);
          only = only && anchor[c.index] >= 0;
          to = std::max(to, anchor[c.index]);
        }
      }
      if (!only || to < 0) continue;
      if (!folded_[i]) {
        anchor[i] = to;
        leads[i] = to_parameter;
        homes_.layer_of[i] = std::min(homes_.layer_of[i], to);
        continue;
      }
      int limit = last_layer_;
      for (ValueId v : graph_.inputs_of(node))
        if (is_gradient(v)) limit = std::min(limit, home(producer(v)));
      if (to_parameter >= 0)
        homes_.layer_of[i] = std::max(homes_.layer_of[i], past(users[to_parameter], limit));
    }
  }

  // [value] Layers whose forward nodes use a parameter, itself or a view of it, ascending.
  std::vector<std::vector<int>> parameter_users() {
    std::vector<std::vector<int>> users(graph_.values.size());
    std::vector<int> root(graph_.values.size());
    for (size_t v = 0; v < root.size(); ++v) root[v] = static_cast<int>(v);
    for (NodeId id : forward_) {
      const Node& node = graph_.node(id);
      const auto inputs = graph_.inputs_of(node);
      const bool view = is_alias(node) && !inputs.empty();
      for (ValueId v : node.outputs)
        if (view && v.valid()) root[v.index] = root[inputs[0].index];
      for (ValueId v : inputs)
        if (!view && parameter_[root[v.index]]) users[root[v.index]].push_back(home(id));
    }
    return users;
  }

  // Copies of forward values are made where they are read.
  void move_copies() {
    for (size_t i = graph_.nodes.size(); i-- > 0;) {
      if (!copies_[i]) continue;
      int reader = -1;
      for (NodeId c : consumers_[graph_.nodes[i].outputs[0].index])
        reader = std::max(reader, home(c));
      if (reader >= 0) homes_.layer_of[i] = reader;
    }
  }

  // What goes back over the cut in front of each layer: gradients that an earlier layer reads,
  // themselves or a view of them.
  void add_gradients() {
    const std::vector<bool> own = made_by_readers(graph_), sums = sums_of_terms();
    std::vector<ValueId> root;
    std::vector<int> least;  // [root] layer that reads it
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      root.push_back(ValueId(static_cast<int64_t>(v)));
      least.push_back(home(producer(root.back())));
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (node.phase != Phase::backward || is_source(node) || sums[i]) continue;
      const auto inputs = graph_.inputs_of(node);
      if (is_alias(node) && !inputs.empty() && node.outputs[0].valid())
        root[node.outputs[0].index] = root[inputs[0].index];
      for (ValueId v : inputs) {
        int& first = least[root[v.index].index];
        first = std::min(first, homes_.layer_of[i]);
      }
    }
    for (size_t v = 0; v < least.size(); ++v) {
      const NodeId maker = graph_.values[v].producer;
      if (!is_backward(maker) || own[maker.index]) continue;
      for (int l = least[v] + 1; l <= home(maker); ++l)
        homes_.gradients[l] += static_cast<Bytes>(graph_.values[v].spec.bytes());
    }
  }

  // The nodes that add up the gradient of a parameter used in several places: its terms stay where
  // they are made (graph/stage.h).
  std::vector<bool> sums_of_terms() const {
    std::vector<bool> sums(graph_.nodes.size(), false);
    std::vector<ValueId> open;
    for (const Parameter& p : graph_.parameters)
      if (p.gradient.valid()) open.push_back(p.gradient);
    while (!open.empty()) {
      const NodeId id = producer(open.back());
      open.pop_back();
      if (graph_.node(id).op != "aten::add.Tensor" || sums[id.index]) continue;
      sums[id.index] = true;
      for (ValueId v : graph_.inputs_of(graph_.node(id))) open.push_back(v);
    }
    return sums;
  }

  const Graph& graph_;
  const std::vector<NodeId>& forward_;
  const int last_layer_;
  const std::vector<std::vector<NodeId>> consumers_;
  std::vector<bool> parameter_;
  // [node] What follows from constants alone, which every layer makes for itself (graph/stage.h);
  // backward nodes that read forward values; views and copies of forward values and parameters that
  // the backward pass makes, which stand for them.
  std::vector<bool> constant_, folded_, copies_;
  std::vector<ValueId> base_;              // [value] what it stands for
  std::vector<int> owner_;                 // [value] of a parameter: the first layer that reads it
  std::vector<std::vector<int>> readers_;  // [value] layers, forward
  std::vector<bool> seen_;                 // [value] is among LayerHomes::saved
  LayerHomes homes_;
};

}  // namespace

LayerHomes find_homes(const Graph& graph, const std::vector<NodeId>& forward,
                      const std::vector<int>& layer_of, int layers) {
  return HomeFinder(graph, forward, layer_of, layers).run();
}

}  // namespace motley::pipeline

#include "pipeline/layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>

#include "core/error.h"
#include "core/rng.h"
#include "graph/op.h"
#include "graph/owner.h"
#include "pipeline/layer_homes.h"
#include "pipeline/runs.h"

namespace motley::pipeline {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of the average, that a layer does at least: one of views alone would be worth no stage.
constexpr double kLeastWork = 0.1;
constexpr int kMostLayers = 160;  // unless the user asks for more

// Numbers calls: those with the same op, constants and shapes alike, wherever their tensors come
// from.
class Tokens {
 public:
  explicit Tokens(const Graph& graph) : graph_(graph) {}

  int of(const Node& node) {
    key_.clear();
    add_arg(node.op);
    add(node.args.size());
    for (const Arg& arg : node.args) {
      add(arg.index());
      std::visit([&](const auto& a) { add_arg(a); }, arg);
    }
    add(node.outputs.size());
    for (ValueId v : node.outputs) add_arg(v);
    return numbers_.try_emplace(key_, static_cast<int>(numbers_.size())).first->second;
  }

 private:
  template <typename T>
  void add(T number) {
    key_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  template <typename T>
  void add_arg(const T& a) {
    if constexpr (std::is_same_v<T, ValueId>) {
      add(a.valid() ? static_cast<int>(graph_.spec(a).dtype) : -1);
      if (a.valid()) add_arg(graph_.spec(a).shape);
    } else if constexpr (std::is_same_v<T, std::string>) {
      add(a.size());
      key_ += a;
    } else if constexpr (std::is_same_v<T, std::vector<ValueId>> ||
                         std::is_same_v<T, std::vector<int64_t>> ||
                         std::is_same_v<T, std::vector<double>>) {
      add(a.size());
      for (const auto& x : a) add_arg(x);
    } else if constexpr (!std::is_same_v<T, std::monostate>) {
      add(a);
    }
  }

  const Graph& graph_;
  std::string key_;  // of the call that is looked at: bytes, every length in front of what it is of
  std::unordered_map<std::string, int> numbers_;
};

class Builder {
 public:
  Builder(const Graph& graph, const LayerOptions& options)
      : graph_(graph), options_(options), numbers_(graph) {
    position_.assign(graph.nodes.size(), -1);
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      const Node& node = graph.nodes[i];
      if (is_source(node) || node.phase == Phase::backward) continue;
      position_[i] = static_cast<int>(order_.size());
      order_.push_back(NodeId(static_cast<int64_t>(i)));
      tokens_.push_back(numbers_.of(node));
    }
    if (order_.empty())
      throw user_error("pipeline", "graph '{}' has no forward nodes; capture a training step",
                       graph.model);
    n_ = static_cast<int>(order_.size());
    measure();
  }

  Layers build() {
    Layers result;
    std::vector<int> cuts;  // first forward position of each layer
    std::vector<int> module_of;
    if (options_.begin.empty()) {
      find_cuts(&result, &cuts, &module_of);
    } else {
      result.modules = {{0, n_, 1}};
      for (NodeId node : options_.begin) cuts.push_back(cuts.empty() ? 0 : position_[node.index]);
      module_of.assign(cuts.size(), 0);
    }
    result.layers.resize(cuts.size());
    std::vector<int> layer_of(n_);
    for (size_t l = 0; l < cuts.size(); ++l) {
      int end = l + 1 < cuts.size() ? cuts[l + 1] : n_;
      result.layers[l].module = module_of[l];
      result.layers[l].boundary = live_[cuts[l]];
      for (int q = cuts[l]; q < end; ++q) layer_of[q] = static_cast<int>(l);
    }
    options_.deadline.check();
    move_views(static_cast<int>(cuts.size()), &layer_of);
    for (int q = 0; q < n_; ++q) result.layers[layer_of[q]].forward.push_back(order_[q]);
    options_.deadline.check();
    assign(layer_of, &result);
    options_.deadline.check();
    classify(&result);
    return result;
  }

 private:
  // By repeated modules.
  void find_cuts(Layers* result, std::vector<int>* cuts, std::vector<int>* module_of) const {
    result->modules = modules();
    const int finest = std::clamp(heavy_before_[n_], 1, kMostLayers);
    cut(*result, options_.layers > 0 ? options_.layers : finest, cuts, module_of);
    result->coarser =
        options_.layers == 0 && options_.most > 0 && static_cast<int>(cuts->size()) > options_.most;
    if (result->coarser) cut(*result, options_.most, cuts, module_of);
  }

  void cut(const Layers& result, double wanted, std::vector<int>* cuts,
           std::vector<int>* module_of) const {
    cuts->clear();
    module_of->clear();
    const Flops total = flops_before_[n_];
    for (size_t m = 0; m < result.modules.size(); ++m) {
      const Module& module = result.modules[m];
      int period = (module.end - module.first) / module.repeats;
      Flops work = flops_before_[module.first + period] - flops_before_[module.first];
      int count = static_cast<int>(std::lround(total > 0 ? wanted * work / total : 1));
      auto inner = cluster(module.first, module.first + period, std::clamp(count, 1, period));
      const int together = inner.size() == 1 ? repeats_together(module.repeats) : 1;
      for (int r = 0; r < module.repeats; r += together)
        for (int cut : inner) {
          cuts->push_back(cut + r * period);
          module_of->push_back(static_cast<int>(m));
        }
    }
  }

  // How many of that many repeats are a layer, where there would be too many of them: as many in
  // all layers, if that can be.
  int repeats_together(int repeats) const {
    const int most = std::max(kMostLayers, options_.layers), least = (repeats + most - 1) / most;
    for (int n = least; n < 2 * least; ++n)
      if (repeats % n == 0) return n;
    return least;
  }

  Flops flops_of(const Node& node) const {
    const OpDef* op = find_op(node.op);
    if (is_source(node) || (op && op->alias)) return 0;
    if (op && op->flops) return op->flops(graph_, node);
    int64_t largest = 0;
    for (ValueId v : graph_.inputs_of(node)) largest = std::max(largest, graph_.spec(v).numel());
    for (ValueId v : node.outputs)
      if (v.valid()) largest = std::max(largest, graph_.spec(v).numel());
    return static_cast<Flops>(largest);
  }

  // Heavy: more operations than elements it touches, by far.
  bool is_heavy(const Node& node) const {
    const OpDef* op = find_op(node.op);
    if (!op || !op->flops || op->alias) return false;
    int64_t touched = 0;
    for (ValueId v : graph_.inputs_of(node)) touched = std::max(touched, graph_.spec(v).numel());
    return node.op.str().find("mm") != std::string::npos ||
           node.op.str().find("conv") != std::string::npos ||
           op->flops(graph_, node) > 64.0 * static_cast<double>(touched);
  }

  void measure() {
    flops_before_.assign(n_ + 1, 0);
    heavy_before_.assign(n_ + 1, 0);
    for (int q = 0; q < n_; ++q) {
      const Node& node = graph_.node(order_[q]);
      flops_before_[q + 1] = flops_before_[q] + flops_of(node);
      heavy_before_[q + 1] = heavy_before_[q] + (is_heavy(node) ? 1 : 0);
    }
    // A value of a forward node is live from behind its producer up to its last forward reader,
    // unless readers make it for themselves. An alias stands for the tensor it is of: that one is
    // carried.
    const std::vector<bool> own = made_by_readers(graph_);
    std::vector<int> root(graph_.values.size()), last(graph_.values.size(), -1);
    for (size_t v = 0; v < root.size(); ++v) root[v] = static_cast<int>(v);
    for (NodeId id : order_) {
      const Node& node = graph_.node(id);
      const OpDef* op = find_op(node.op);
      auto inputs = graph_.inputs_of(node);
      if (op && op->alias && !inputs.empty())
        for (ValueId v : node.outputs)
          if (v.valid()) root[v.index] = root[inputs[0].index];
      for (ValueId v : inputs) last[root[v.index]] = position_[id.index];
    }
    std::vector<double> change(n_ + 1, 0);
    for (size_t v = 0; v < root.size(); ++v) {
      const NodeId producer = graph_.values[v].producer;
      int made = position_[producer.index];
      if (made < 0 || own[producer.index] || root[v] != static_cast<int>(v) || last[v] <= made)
        continue;
      auto bytes = static_cast<double>(graph_.values[v].spec.bytes());
      change[made + 1] += bytes;
      change[last[v] + 1] -= bytes;
    }
    live_.assign(n_ + 1, 0);
    for (int q = 0; q < n_; ++q) live_[q + 1] = live_[q] + change[q + 1];
    live_[0] = 0;
  }

  std::vector<Module> modules() const {
    std::vector<Module> done, open = {{0, n_, 1}};
    while (!open.empty()) {
      options_.deadline.check();
      Module part = open.back();
      open.pop_back();
      std::vector<int> tokens(tokens_.begin() + part.first, tokens_.begin() + part.end);
      int covered = 0;
      Module best;
      for (const Repetition& run : find_runs(tokens)) {
        int first = part.first + run.first, end = part.first + run.end;
        for (int period = run.period; 2 * period <= end - first; period += run.period) {
          if (heavy_before_[first + period] - heavy_before_[first] < options_.heavy) continue;
          int repeats = (end - first) / period;
          int start = first;
          for (int q = first; q + repeats * period <= end; ++q)
            if (live_[q] < live_[start]) start = q;
          int heavy = heavy_before_[start + repeats * period] - heavy_before_[start];
          if (heavy > covered) {
            covered = heavy;
            best = {start, start + repeats * period, repeats};
          }
          break;
        }
      }
      if (covered == 0) {
        done.push_back(part);
        continue;
      }
      done.push_back(best);
      if (part.first < best.first) open.push_back({part.first, best.first, 1});
      if (best.end < part.end) open.push_back({best.end, part.end, 1});
    }
    std::sort(done.begin(), done.end(),
              [](const Module& a, const Module& b) { return a.first < b.first; });
    return done;
  }

  // First positions of `count` layers between first and end; of fewer where FLOPs are too lumpy for
  // so many that all do some of the work.
  std::vector<int> cluster(int first, int end, int count) const {
    if (count == 1) return {first};
    int n = end - first;
    Flops total = flops_before_[end] - flops_before_[first], average = total / count;
    for (double slack = options_.slack;; slack = 2 * slack + 0.05) {
      const Flops most = average * (1 + slack), least = average * kLeastWork;
      // cost[j][q]: least bytes across the cuts of first..q-1 in j layers.
      std::vector<std::vector<double>> cost(count + 1, std::vector<double>(n + 1, kInfinity));
      std::vector<std::vector<int>> from(count + 1, std::vector<int>(n + 1, -1));
      cost[0][0] = 0;
      for (int j = 1; j <= count; ++j)
        for (int q = j; q <= n; ++q)
          for (int k = q - 1; k >= j - 1; --k) {
            const Flops work = flops_before_[first + q] - flops_before_[first + k];
            if (work > most && k < q - 1) break;
            double c = cost[j - 1][k] + (k > 0 ? live_[first + k] : 0);
            if (work <= most && work >= least && c < cost[j][q]) {
              cost[j][q] = c;
              from[j][q] = k;
            }
          }
      int found = count;
      while (found > 0 && cost[found][n] == kInfinity) --found;
      if (found == 0) continue;
      std::vector<int> cuts(found);
      for (int j = found, q = n; j > 0; --j) {
        q = from[j][q];
        cuts[j - 1] = first + q;
      }
      return cuts;
    }
  }

  // Views and conversions of parameters go to the layer that reads them first, so that no other
  // holds the parameter for them; a layer keeps one node at least.
  void move_views(int layers, std::vector<int>* layer_of) const {
    std::vector<int> left(layers, 0);
    for (int l : *layer_of) ++left[l];
    std::vector<bool> own(graph_.values.size(), false);  // parameters, their views and conversions
    for (const Parameter& p : graph_.parameters) own[p.value.index] = true;
    for (NodeId id : order_) {
      const Node& node = graph_.node(id);
      const OpDef* op = find_op(node.op);
      const auto inputs = graph_.inputs_of(node);
      const bool follows = node.op == "aten::_to_copy" || (op && op->alias);
      if (!follows || inputs.empty() || !own[inputs[0].index]) continue;
      for (ValueId v : node.outputs)
        if (v.valid()) own[v.index] = true;
    }
    const auto consumers = graph_.consumers();
    for (int q = n_; q-- > 0;) {
      int first = layers;
      for (ValueId v : graph_.node(order_[q]).outputs) {
        if (!v.valid() || !own[v.index]) continue;
        for (NodeId reader : consumers[v.index])
          if (const int at = position_[reader.index]; at >= 0)
            first = std::min(first, (*layer_of)[at]);
      }
      int& layer = (*layer_of)[q];
      if (first == layers || first == layer || left[layer] == 1) continue;
      --left[layer];
      ++left[first];
      layer = first;
    }
  }

  void assign(const std::vector<int>& layer_of, Layers* result) const {
    std::vector<Layer>& layers = result->layers;
    const LayerHomes homes = find_homes(graph_, order_, layer_of, static_cast<int>(layers.size()));
    for (size_t l = 0; l < layers.size(); ++l) {
      layers[l].parameters = homes.parameters[l];
      layers[l].saved = homes.saved[l];
      layers[l].gradients = homes.gradients[l];
    }
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      if (is_source(node)) continue;
      Layer& layer = layers[homes.layer_of[i]];
      const bool backward = node.phase == Phase::backward;
      if (backward) layer.backward.push_back(NodeId(static_cast<int64_t>(i)));
      (backward ? layer.backward_flops : layer.forward_flops) += flops_of(node);
    }
  }

  // Equal tokens forward and backward, equal bytes: equal class.
  void classify(Layers* result) {
    std::map<std::tuple<std::vector<int>, std::vector<int>, Bytes, Bytes>, int> classes;
    for (Layer& layer : result->layers) {
      std::vector<int> forward, backward;
      for (NodeId id : layer.forward) forward.push_back(tokens_[position_[id.index]]);
      for (NodeId id : layer.backward) backward.push_back(numbers_.of(graph_.node(id)));
      std::tuple look(std::move(forward), std::move(backward), layer.parameters, layer.saved);
      layer.layer_class =
          classes.try_emplace(std::move(look), static_cast<int>(classes.size())).first->second;
    }
  }

  const Graph& graph_;
  const LayerOptions& options_;
  Tokens numbers_;
  int n_ = 0;
  std::vector<NodeId> order_;  // forward nodes
  std::vector<int> position_;  // [node] among them; -1: none
  std::vector<int> tokens_;    // [forward position]
  std::vector<Flops> flops_before_;
  std::vector<int> heavy_before_;
  std::vector<Bytes> live_;  // [forward position] in front of it
};

}  // namespace

std::vector<int> Layers::class_of() const {
  std::vector<int> classes;
  for (const Layer& layer : layers) classes.push_back(layer.layer_class);
  return classes;
}

Layers find_layers(const Graph& graph, const LayerOptions& options) {
  return Builder(graph, options).build();
}

std::string to_text(const Layers& layers) {
  std::string text =
      "layer  module  class  nodes      forward     backward    parameters  "
      "boundary    gradients\n";
  for (size_t l = 0; l < layers.layers.size(); ++l) {
    const Layer& layer = layers.layers[l];
    text += fmt::format("{:>5}  {:>6}  {:>5}  {:>4}+{:<4}  {:<10}  {:<10}  {:<10}  {:<10}  {}\n", l,
                        layer.module, layer.layer_class, layer.forward.size(),
                        layer.backward.size(), format_flops(layer.forward_flops),
                        format_flops(layer.backward_flops), format_bytes(layer.parameters),
                        format_bytes(layer.boundary), format_bytes(layer.gradients));
  }
  return text;
}

}  // namespace motley::pipeline

#include "graph/precision.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "core/error.h"
#include "graph/op.h"
#include "graph/rewrite.h"

namespace motley {

namespace {

// In 16 bits, whatever they read.
bool is_product(std::string_view op) {
  static constexpr std::array products = {"aten::addmm",
                                          "aten::baddbmm",
                                          "aten::bmm",
                                          "aten::convolution",
                                          "aten::convolution_backward",
                                          "aten::dot",
                                          "aten::mm",
                                          "aten::mv",
                                          "motley_torch::rows_mm",
                                          "motley_torch::rows_outer"};
  return std::find(products.begin(), products.end(), op) != products.end();
}

// Needs more than 16 bits: sums of logarithms, positions, statistics of a batch.
bool is_delicate(std::string_view op) {
  static constexpr std::array delicate = {"aten::_log_softmax",
                                          "aten::_log_softmax_backward_data",
                                          "aten::cumsum",
                                          "aten::native_batch_norm",
                                          "aten::native_batch_norm_backward",
                                          "aten::sort",
                                          "aten::topk"};
  return std::find(delicate.begin(), delicate.end(), op) != delicate.end() ||
         op.find("_loss") != std::string_view::npos ||
         op.find("binary_cross_entropy") != std::string_view::npos;
}

class PrecisionRewriter : Rewriting {
 public:
  PrecisionRewriter(const Graph& from, DType type)
      : Rewriting(from), type_(type), low_(from.values.size()) {
    for (const Parameter& p : from.parameters)
      if (is_float(from.spec(p.value).dtype)) master_ = from.spec(p.value).dtype;
    for (const Parameter& p : from.parameters) {
      MOTLEY_CHECK(from.spec(p.value).dtype == master_ || !is_float(from.spec(p.value).dtype),
                   "parameter {} is not {}", p.name, to_string(master_));
      weak_.insert(p.value);
    }
    for (const Input& i : from.inputs) weak_.insert(i.value);
    for (const Buffer& b : from.buffers)
      if (b.update.valid()) exact_.insert(b.update);
  }

  Graph run() {
    for (const Node& node : from_.nodes) rewrite(node);
    return finish();
  }

 private:
  // Scalars do not decide the type of what they are combined with.
  bool floats(ValueId v) const {
    const TensorSpec& spec = from_.spec(v);
    return spec.dtype == master_ && !spec.shape.empty();
  }

  // A value of from_ in 16 bits or in its own.
  ValueId as(ValueId v, bool low, Phase phase) {
    if (!floats(v) || low_[v.index] == low) return value_[v.index];
    // Converted up, it is made again for the backward pass rather than held.
    const Phase once = low ? Phase::forward : phase;
    auto [it, fresh] = converted_.try_emplace({v, once});
    if (!fresh) return it->second;
    TensorSpec spec = from_.spec(v);
    spec.dtype = low ? type_ : master_;
    const NodeId node = to_.add(
        "aten::_to_copy", {value_[v.index], spec.dtype, {}, {}, {}, false, {}}, {spec}, phase);
    return it->second = to_.node(node).outputs[0];
  }

  // Whether a node runs in 16 bits.
  bool runs_low(const Node& node) const {
    bool any_float = false, any_low = false;
    for (ValueId v : from_.inputs_of(node)) {
      if (!floats(v)) continue;
      any_float = true;
      any_low = any_low || low_[v.index] || weak_.count(v) > 0;
    }
    if (!any_float) return false;
    bool scalars = true;
    for (ValueId v : node.outputs) {
      if (exact_.count(v) > 0) return false;
      scalars = scalars && (!v.valid() || from_.spec(v).shape.empty());
    }
    return !scalars && (is_product(node.op.str()) || (any_low && !is_delicate(node.op.str())));
  }

  void rewrite(const Node& node) {
    std::vector<TensorSpec> specs = results(node);
    std::vector<Arg> args = node.args;
    const bool low = !is_source(node) && runs_low(node);
    for (Arg& arg : args) {
      if (auto v = std::get_if<ValueId>(&arg); v && v->valid()) *v = as(*v, low, node.phase);
      if (auto list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list)
          if (v.valid()) v = as(v, low, node.phase);
      if (auto dtype = std::get_if<DType>(&arg); dtype && *dtype == master_ && low) *dtype = type_;
    }
    for (TensorSpec& spec : specs)
      if (low && spec.dtype == master_) spec.dtype = type_;
    add(node, std::move(args), specs);
    for (ValueId v : node.outputs)
      if (v.valid()) low_[v.index] = low && floats(v);
  }

  const DType type_;
  DType master_ = DType::f32;
  std::vector<bool> low_;    // [value of from_] in 16 bits
  std::set<ValueId> weak_;   // parameters and inputs: readers may have them in 16 bits
  std::set<ValueId> exact_;  // updates of buffers
  std::map<std::pair<ValueId, Phase>, ValueId> converted_;
};

}  // namespace

Graph with_precision(const Graph& graph, DType type) {
  return PrecisionRewriter(graph, type).run();
}

void check_precision(const Graph& graph, DType type) {
  std::optional<DType> own;
  for (const Parameter& p : graph.parameters) {
    const DType dtype = graph.spec(p.value).dtype;
    if (!is_float(dtype)) continue;
    if (own && *own != dtype)
      throw user_error("plan", "precision {} needs parameters of one type; {} is {}, others are {}",
                       to_string(type), p.name, to_string(dtype), to_string(*own));
    own = dtype;
  }
  if (own && size_of(*own) <= size_of(type))
    throw user_error("plan", "precision is {}, but the parameters are {}; leave it out",
                     to_string(type), to_string(*own));
}

}  // namespace motley

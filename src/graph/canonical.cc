#include "graph/canonical.h"

#include <optional>
#include <utility>

#include "core/error.h"
#include "graph/aligned.h"
#include "graph/ops/builder.h"
#include "graph/rewrite.h"
#include "graph/unsorted.h"

namespace motley {

namespace {

constexpr int64_t kNone = 0, kMean = 1, kSum = 2;  // at::Reduction

// A mean of 16 bits is well within their range where the sum may not be.
bool sums_in_32_bits(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

class CanonicalRewriter : Rewriting {
 public:
  explicit CanonicalRewriter(const Graph& from) : Rewriting(from) {}

  Graph run() {
    for (const Node& node : from_.nodes) rewrite(node);
    return finish();
  }

 private:
  ValueId scale(ValueId x, double factor, Phase phase) {
    return emit("aten::mul.Tensor", {x, factor}, to_.spec(x), phase);
  }

  // The mean over all dimensions, or over `dims` = (dimensions, keep them).
  ValueId mean(ValueId x, const std::vector<Arg>& dims, const TensorSpec& out, Phase phase) {
    const double ratio =
        static_cast<double>(out.numel()) / static_cast<double>(to_.spec(x).numel());
    TensorSpec wide = out;
    const bool converts = sums_in_32_bits(to_.spec(x).dtype);
    if (converts) wide.dtype = DType::f32;
    std::vector<Arg> args = {x};
    args.insert(args.end(), dims.begin(), dims.end());
    args.emplace_back();
    if (converts) args.back() = DType::f32;
    const ValueId sum =
        emit(dims.empty() ? "aten::sum" : "aten::sum.dim_IntList", std::move(args), wide, phase);
    const ValueId scaled = scale(sum, ratio, phase);
    if (wide == out) return scaled;
    return emit("aten::_to_copy", {scaled, out.dtype, {}, {}, {}, false, {}}, out, phase);
  }

  // How many targets are not `ignored`, or with weights [class] the sum of theirs, as a scalar of
  // the given dtype; once per target.
  ValueId count(ValueId target, int64_t ignored, DType dtype, ValueId weights) {
    for (const auto& [t, i, w, c] : counts_)
      if (t == target && i == ignored && w == weights && to_.spec(c).dtype == dtype) return c;
    TensorSpec spec = to_.spec(target);
    auto as = [&](ValueId x, DType type) {
      spec.dtype = type;
      return emit("aten::_to_copy", {x, type, {}, {}, {}, false, {}}, spec, Phase::forward);
    };
    spec.dtype = DType::b8;
    const ValueId kept = emit("aten::ne.Scalar", {target, ignored}, spec, Phase::forward);
    ValueId real = as(kept, dtype);
    if (weights.valid()) {
      const ValueId whole = as(kept, to_.spec(target).dtype);  // ignored targets: class 0, times 0
      const ValueId safe = emit("aten::mul.Tensor", {target, whole}, spec, Phase::forward);
      spec.dtype = dtype;
      const ValueId weight =
          emit("aten::index.Tensor", {weights, std::vector<ValueId>{safe}}, spec, Phase::forward);
      real = emit("aten::mul.Tensor", {weight, real}, spec, Phase::forward);
    }
    const ValueId sum = emit("aten::sum", {real, {}}, {dtype, {}}, Phase::forward);
    counts_.push_back({target, ignored, weights, sum});
    return sum;
  }

  void rewrite(const Node& node) {
    std::vector<Arg> args = arguments(node);
    auto output = [&](size_t o) { return node.outputs[o]; };
    auto tensor = [&](size_t at) { return std::get<ValueId>(args[at]); };
    auto weights = [&](const Node& of, size_t at) {
      return ops::is_tensor_arg(of, at) ? tensor(at) : ValueId();
    };
    const std::string& op = node.op;
    if ((op == "aten::mean" || op == "aten::mean.dim") && is_float(to_.spec(tensor(0)).dtype)) {
      value_[output(0).index] = mean(
          tensor(0), op == "aten::mean" ? std::vector<Arg>{} : std::vector<Arg>{args[1], args[2]},
          from_.spec(output(0)), node.phase);
    } else if (const int at = ops::pointwise_loss_reduction(op);
               at >= 0 && ops::int_arg(node, static_cast<size_t>(at), kMean) == kMean) {
      // The first operand of the loss, the second of its backward, has the elements.
      const bool backward = op.ends_with("_backward");
      const double n = static_cast<double>(to_.spec(tensor(backward ? 1 : 0)).numel());
      if (!backward && sums_in_32_bits(to_.spec(tensor(0)).dtype)) {
        args[static_cast<size_t>(at)] = kNone;
        const ValueId each = emit(op, args, to_.spec(tensor(0)), node.phase);
        value_[output(0).index] = mean(each, {}, from_.spec(output(0)), node.phase);
        return;
      }
      args[static_cast<size_t>(at)] = kSum;
      if (backward) args[0] = scale(tensor(0), 1 / n, node.phase);
      const ValueId sum = emit(op, args, from_.spec(output(0)), node.phase);
      value_[output(0).index] = backward ? sum : scale(sum, 1 / n, node.phase);
    } else if ((op == "aten::nll_loss_forward" || op == "aten::nll_loss2d_forward") &&
               ops::int_arg(node, 3, kMean) == kMean) {
      const TensorSpec loss = from_.spec(output(0));
      ValueId n = count(tensor(1), ops::int_arg(node, 4, -100), loss.dtype, weights(node, 2));
      std::vector<Arg> summed = args;
      summed[3] = kSum;
      NodeId id = to_.add(op, summed, {loss, loss}, node.phase);
      value_[output(0).index] =
          emit("aten::div.Tensor", {to_.node(id).outputs[0], n}, loss, node.phase);
      if (output(1).valid()) value_[output(1).index] = n;
    } else if ((op == "aten::nll_loss_backward" || op == "aten::nll_loss2d_backward") &&
               ops::int_arg(node, 4, kMean) == kMean) {
      ValueId n = count(tensor(2), ops::int_arg(node, 5, -100), to_.spec(tensor(0)).dtype,
                        weights(node, 3));
      ValueId dy = emit("aten::div.Tensor", {args[0], n}, to_.spec(tensor(0)), node.phase);
      value_[output(0).index] = emit(op, {dy, args[1], args[2], args[3], kSum, args[5], n},
                                     from_.spec(output(0)), node.phase);
    } else if (op == "aten::nll_loss_backward" || op == "aten::nll_loss2d_backward") {
      // Only a mean reads the sum of weights.
      args[6] = emit("aten::full", {Shape{}, 1.0, to_.spec(tensor(6)).dtype, {}, {}, {}},
                     {to_.spec(tensor(6)).dtype, {}}, node.phase);
      add(node, std::move(args), results(node));
    } else if (op == "aten::ones_like" || op == "aten::zeros_like" || op == "aten::empty_like" ||
               op == "aten::full_like" || op == "aten::empty.memory_format") {
      const TensorSpec& spec = from_.spec(output(0));
      Arg fill = op == "aten::full_like" ? args[1] : Arg(op == "aten::ones_like" ? 1.0 : 0.0);
      if (std::holds_alternative<ValueId>(fill)) return add(node, std::move(args), results(node));
      value_[output(0).index] =
          emit("aten::full", {spec.shape, fill, spec.dtype, {}, {}, {}}, spec, node.phase);
    } else {
      add(node, std::move(args), results(node));
    }
  }

  struct Count {
    ValueId target;
    int64_t ignored;
    ValueId weights;  // invalid: none
    ValueId count;
  };

  std::vector<Count> counts_;
};

}  // namespace

Graph canonicalize(const Graph& graph) {
  std::optional<Graph> changed = unsorted(graph);
  if (std::optional<Graph> more = aligned(changed ? *changed : graph)) changed = std::move(more);
  return CanonicalRewriter(changed ? *changed : graph).run();
}

}  // namespace motley

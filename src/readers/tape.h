// Training steps written down without libtorch: the forward pass is called operator by operator,
// and the backward pass follows by reverse accumulation, in the operators that autograd runs.
//
//   Tape tape;
//   const ValueId w = tape.parameter("w", {16, 8}), x = tape.input("x", {DType::f32, {4, 8}});
//   const Graph step = tape.finish(tape.sum(tape.linear(x, w)));    // with the gradient of w
//
// It knows the operators that transformers need, each with its derivative. Shapes are those of
// ATen; tensors are 32-bit floating point. A call with shapes that do not fit is our failure.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace motley::readers {

class Tape {
 public:
  ValueId parameter(const std::string& name, Shape shape);
  ValueId input(const std::string& name, const TensorSpec& spec);
  const Shape& shape(ValueId v) const { return graph_.spec(v).shape; }

  // x [..., in], weight [out, in] or, `turned`, [in, out]; bias [out] or invalid. [..., out].
  ValueId linear(ValueId x, ValueId weight, ValueId bias = {}, bool turned = false);
  ValueId embedding(ValueId table, ValueId ids);  // [rows, n], [...] -> [..., n]
  // Over the last dimension; weight and bias [n], or invalid.
  ValueId layer_norm(ValueId x, ValueId weight, ValueId bias, double eps);
  ValueId rms_norm(ValueId x, ValueId weight, double eps);
  ValueId add(ValueId a, ValueId b);  // b may be broadcast
  ValueId mul(ValueId a, ValueId b);  // likewise
  ValueId div(ValueId a, ValueId b);  // of one shape
  ValueId scale(ValueId x, double by);
  ValueId shift(ValueId x, double by);
  ValueId neg(ValueId x);
  // gelu, gelu_tanh, relu, sigmoid, silu, tanh.
  ValueId activation(const std::string& name, ValueId x);
  ValueId softmax(ValueId x);  // over the last dimension
  ValueId bmm(ValueId a, ValueId b);
  ValueId view(ValueId x, Shape shape);
  ValueId transpose(ValueId x, int a, int b);
  ValueId expand(ValueId x, Shape shape);  // dimensions of size 1
  // Pieces of the last dimension.
  std::vector<ValueId> split(ValueId x, const std::vector<int64_t>& sizes);
  ValueId cat(const std::vector<ValueId>& parts);                // in the last dimension
  ValueId sum(ValueId x, std::vector<int64_t> dims, bool keep);  // ascending
  ValueId sum(ValueId x);                                        // of everything
  // Mean over rows of -log softmax(logits)[row, target]; logits [n, classes], targets i64[n].
  ValueId cross_entropy(ValueId logits, ValueId targets);

  // An operator through which no gradient goes.
  ValueId fixed(const std::string& op, std::vector<Arg> args, const TensorSpec& spec);
  std::vector<ValueId> fixed(const std::string& op, std::vector<Arg> args,
                             const std::vector<TensorSpec>& specs);

  // The step with the gradients of all parameters that the loss depends on.
  Graph finish(ValueId loss);

 private:
  ValueId emit(const std::string& op, std::vector<Arg> args, Shape shape);
  // Entered in the order of the forward pass; run in reverse, with the gradient of `out`.
  void derive(ValueId out, std::vector<ValueId> from, std::function<void(ValueId)> backward);
  void accumulate(ValueId v, ValueId gradient);
  bool needed(ValueId v) const { return v.valid() && needs_[v.index]; }
  ValueId reduced_to(ValueId x, const Shape& shape);  // sums over what was broadcast
  ValueId solid(ValueId x);                           // in memory as its shape says
  void grow();

  struct Entry {
    std::vector<ValueId> outs;
    std::function<void(ValueId)> backward;  // with the gradient of the first
  };
  Graph graph_;
  Phase phase_ = Phase::forward;
  std::vector<bool> needs_, loose_;  // [value] has a gradient; is not laid out as its shape says
  std::vector<ValueId> gradients_;   // [value]
  std::vector<Entry> entries_;
};

}  // namespace motley::readers

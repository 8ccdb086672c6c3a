// Helpers to write the signatures of op families.
#pragma once

#include <initializer_list>

#include "graph/op.h"

namespace motley::ops {

// A call that no operator could have made, from a file: throws UserError naming the op.
[[noreturn]] void bad_call(const Node& node, const std::string& why);

// A shape whose subscripts are checked: graphs may come from hostile files.
class CheckedShape {
 public:
  CheckedShape(const Node& node, const Shape& shape) : node_(&node), shape_(&shape) {}
  int64_t operator[](size_t d) const {
    if (d >= shape_->size()) bad_call(*node_, "a tensor has too few dimensions");
    return (*shape_)[d];
  }
  size_t size() const { return shape_->size(); }
  bool empty() const { return shape_->empty(); }
  auto begin() const { return shape_->begin(); }
  auto end() const { return shape_->end(); }
  const Shape& plain() const { return *shape_; }
  friend bool operator==(const CheckedShape& a, const CheckedShape& b) {
    return *a.shape_ == *b.shape_;
  }

 private:
  const Node* node_;
  const Shape* shape_;
};

// Tensor operand i, result o; throws UserError if there is none.
const TensorSpec& operand_spec(const Graph& graph, const Node& node, size_t i);
const TensorSpec& result_spec(const Graph& graph, const Node& node, size_t o);

// Dimensions of the first operand.
inline size_t rank_of(const Graph& graph, const Node& node) {
  return operand_spec(graph, node, 0).shape.size();
}

// Builds the Signature of one call. Labels of size 1 are dropped, so that callers need not care.
class Builder {
 public:
  Builder(const Graph& graph, const Node& node);

  int operands() const { return static_cast<int>(in_.size()); }
  int results() const { return static_cast<int>(out_.size()); }
  CheckedShape in(int i) const;
  CheckedShape out(int r) const;
  bool has_result(int r) const { return r < results() && out_[r] != nullptr; }

  int label(int64_t size, LabelKind kind = LabelKind::parallel);
  // Says that dimension d (negative: from the end) of operand i / result r carries labels,
  // outermost first.
  void operand(int i, int d, std::initializer_list<int> labels);
  void result(int r, int d, std::initializer_list<int> labels);
  void operand_list(int i, int d, std::vector<int> labels);
  void result_list(int r, int d, std::vector<int> labels);
  void linear(std::vector<int> operands) { signature_.linear.push_back(std::move(operands)); }
  void added(int operand) { signature_.added.push_back(operand); }
  Label& info(int label) { return signature_.labels[label]; }

  // Every dimension of result r gets a label of its own (of kind `kind`), which operands that
  // broadcast against it share.
  std::vector<int> pointwise(int r = 0, LabelKind kind = LabelKind::parallel);
  // Operand i broadcasts against dimensions that carry the given labels (right-aligned).
  void broadcast_operand(int i, const std::vector<int>& labels, const CheckedShape& shape);

  Signature take() { return std::move(signature_); }

 private:
  const Node& node_;
  std::vector<const Shape*> in_, out_;
  Signature signature_;
};

// Arguments by position, with defaults for missing or `none`.
int64_t int_arg(const Node& node, size_t at, int64_t otherwise = 0);
bool bool_arg(const Node& node, size_t at, bool otherwise = false);
double real_arg(const Node& node, size_t at, double otherwise = 0);  // also of integers
std::vector<int64_t> ints_arg(const Node& node, size_t at);  // one integer counts as a list of one
bool is_tensor_arg(const Node& node, size_t at);
// Which tensor operand the tensor argument `at` is, or -1.
int operand_index(const Graph& graph, const Node& node, size_t at);
// Negative dimensions count from the end. Throws UserError outside of [0, rank) (a scalar has
// dimension 0).
int64_t wrap_dim(int64_t dim, size_t rank);

// Where a loss that is a number for each pair of elements, and its backward, have the argument that
// says how the numbers are put together (at::Reduction); -1: the op is none of them.
int pointwise_loss_reduction(const std::string& op);

// Families; each lists its entries by name.
const std::vector<OpDef>& attention_ops();
const std::vector<OpDef>& batched_ops();
const std::vector<OpDef>& elementwise_ops();
const std::vector<OpDef>& matmul_ops();
const std::vector<OpDef>& view_ops();
const std::vector<OpDef>& reduction_ops();
const std::vector<OpDef>& normalization_ops();
const std::vector<OpDef>& loss_ops();
const std::vector<OpDef>& index_ops();
const std::vector<OpDef>& convolution_ops();
const std::vector<OpDef>& factory_ops();

// Entries of the op table.
inline OpDef def(const char* name, decltype(OpDef::signature) signature,
                 decltype(OpDef::flops) flops = nullptr,
                 decltype(OpDef::localize) localize = nullptr) {
  OpDef op{name};
  op.signature = signature;
  op.flops = flops;
  op.localize = localize;
  return op;
}
inline OpDef def(const char* name, decltype(OpDef::signature) signature,
                 decltype(OpDef::extra) extra) {
  OpDef op{name};
  op.signature = signature;
  op.extra = extra;
  return op;
}
inline OpDef def(const char* name, decltype(OpDef::signature) signature, int size_arg) {
  OpDef op{name};
  op.signature = signature;
  op.size_arg = size_arg;
  return op;
}

}  // namespace motley::ops

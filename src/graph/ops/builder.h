// Helpers to write the signatures of op families.
#pragma once

#include <initializer_list>

#include "graph/op.h"

namespace motley::ops {

// Builds the Signature of one call. Labels of size 1 are dropped, so that callers need not care.
class Builder {
 public:
  Builder(const Graph& graph, const Node& node);

  int operands() const { return static_cast<int>(in_.size()); }
  int results() const { return static_cast<int>(out_.size()); }
  const Shape& in(int i) const { return *in_[i]; }
  const Shape& out(int r) const { return *out_[r]; }
  bool has_result(int r) const { return r < results() && out_[r] != nullptr; }

  int label(int64_t size, LabelKind kind = LabelKind::parallel);
  // Says that dimension d (negative: from the end) of operand i / result r carries labels,
  // outermost first.
  void operand(int i, int d, std::initializer_list<int> labels);
  void result(int r, int d, std::initializer_list<int> labels);
  void operand_list(int i, int d, std::vector<int> labels) {
    signature_.operands[i].dims[d] = std::move(labels);
  }
  void result_list(int r, int d, std::vector<int> labels) {
    signature_.results[r].dims[d] = std::move(labels);
  }
  void linear(std::vector<int> operands) { signature_.linear.push_back(std::move(operands)); }
  void added(int operand) { signature_.added.push_back(operand); }
  Label& info(int label) { return signature_.labels[label]; }

  // Every dimension of result r gets a label of its own (of kind `kind`), which operands that
  // broadcast against it share.
  std::vector<int> pointwise(int r = 0, LabelKind kind = LabelKind::parallel);
  // Operand i broadcasts against dimensions that carry the given labels (right-aligned).
  void broadcast_operand(int i, const std::vector<int>& labels, const Shape& shape);

  Signature take() { return std::move(signature_); }

 private:
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
int64_t wrap_dim(int64_t dim, size_t rank);

// Families; each lists its entries by name.
const std::vector<OpDef>& elementwise_ops();
const std::vector<OpDef>& matmul_ops();
const std::vector<OpDef>& view_ops();
const std::vector<OpDef>& reduction_ops();
const std::vector<OpDef>& normalization_ops();
const std::vector<OpDef>& loss_ops();
const std::vector<OpDef>& index_ops();
const std::vector<OpDef>& convolution_ops();
const std::vector<OpDef>& factory_ops();

}  // namespace motley::ops

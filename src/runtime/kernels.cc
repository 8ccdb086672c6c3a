#include "runtime/kernels.h"

#include <ATen/ATen.h>

#include "core/error.h"
#include "graph/ops/builder.h"
#include "interpret/dispatch.h"

namespace motley {

namespace {

int64_t dim_arg(const KernelCall& c, size_t at) {
  return ops::wrap_dim(ops::int_arg(c.node, at), c.graph.spec(c.node.outputs[0]).shape.size());
}

at::Tensor inside(const KernelCall& c, const at::Tensor& index) {
  return (index >= c.begin).logical_and_(index < c.begin + c.length);
}

// As one device does, on the CPU: an index that nobody holds is an error and does not read as zero.
void check_indices(const at::Tensor& index, int64_t size, const char* what) {
  if (!index.is_cpu() || index.numel() == 0) return;
  const int64_t low = index.min().item<int64_t>(), high = index.max().item<int64_t>();
  if (low < 0 || high >= size)
    throw user_error("run", "{} {} is out of range; there are {}", what, low < 0 ? low : high,
                     size);
}

// What a device does not hold is filled with zero, never multiplied by it: numbers may be infinite.

// embedding(weight[v d], index): rows of other devices read as zero.
std::vector<at::Tensor> embedding(const KernelCall& c) {
  const at::Tensor &weight = c.operands[0], &index = c.operands[1];
  check_indices(index, ops::operand_spec(c.graph, c.node, 0).shape[0], "index of an embedding");
  if (c.length == 0) return {at::zeros(c.results[0], weight.options())};
  at::Tensor mine = inside(c, index);
  at::Tensor rows = at::embedding(weight, at::where(mine, index - c.begin, at::zeros_like(index)));
  return {rows.masked_fill_(mine.logical_not().unsqueeze_(-1), 0)};
}

// embedding_dense_backward(dy, index, num_weights, padding_idx, scale): the rows of this device.
std::vector<at::Tensor> embedding_backward(const KernelCall& c) {
  const at::Tensor &dy = c.operands[0], &index = c.operands[1];
  at::Tensor grad = at::zeros(c.results[0], dy.options());
  if (c.length == 0) return {grad};
  at::Tensor mine = inside(c, index);
  if (int64_t padding = ops::int_arg(c.node, 3, -1); padding >= 0)
    mine = mine.logical_and(index != padding);
  at::Tensor rows = dy.masked_fill(mine.logical_not().unsqueeze_(-1), 0).reshape({-1, dy.size(-1)});
  at::Tensor at = at::where(mine, index - c.begin, at::zeros_like(index)).reshape({-1});
  return {grad.index_add_(0, at, rows)};
}

// rows_mm(x[s k], w[e k n], ids[s]) and rows_outer(x[s m], y[s n], ids[s], experts): as if there were
// none but this device's matrices, whose numbers begin with c.begin.
std::vector<at::Tensor> call_rows(const char* op, const KernelCall& c, std::vector<Arg> args) {
  std::vector<at::Tensor> operands = c.operands;
  operands[2] = operands[2] - c.begin;
  return call(
      find_operator(op), args, [&](ValueId v) { return operands[static_cast<size_t>(v.index)]; },
      c.operands[0].device());
}
std::vector<at::Tensor> rows_mm(const KernelCall& c) {
  if (c.length == 0) return {at::zeros(c.results[0], c.operands[0].options())};
  return call_rows("motley_torch::rows_mm", c, {ValueId(0), ValueId(1), ValueId(2)});
}
std::vector<at::Tensor> rows_outer(const KernelCall& c) {
  if (c.length == 0) return {at::zeros(c.results[0], c.operands[0].options())};
  return call_rows("motley_torch::rows_outer", c, {ValueId(0), ValueId(1), ValueId(2), c.length});
}

// nll_loss_forward(x[n c], target[n], none, sum, ignore) with classes cut -> partial loss, whole
// total weight.
std::vector<at::Tensor> nll_loss(const KernelCall& c) {
  const at::Tensor &x = c.operands[0], &target = c.operands[1];
  at::Tensor kept = target != ops::int_arg(c.node, 4, -100);
  at::Tensor total = kept.sum().to(x.scalar_type());
  check_indices(target.masked_fill(kept.logical_not(), 0),
                ops::operand_spec(c.graph, c.node, 0).shape[1], "target class");
  if (c.length == 0) return {at::zeros({}, x.options()), total};
  at::Tensor mine = inside(c, target).logical_and_(kept);
  at::Tensor at = at::where(mine, target - c.begin, at::zeros_like(target));
  at::Tensor picked = x.gather(1, at.unsqueeze(1)).squeeze(1);
  return {picked.masked_fill(mine.logical_not(), 0).sum().neg(), total};
}

// nll_loss_backward(dy, x[n c], target[n], none, sum, ignore, total): the classes of this device.
std::vector<at::Tensor> nll_loss_backward(const KernelCall& c) {
  const at::Tensor &dy = c.operands[0], &x = c.operands[1], &target = c.operands[2];
  at::Tensor dx = at::zeros_like(x);
  if (c.length == 0) return {dx};
  at::Tensor mine = inside(c, target).logical_and_(target != ops::int_arg(c.node, 5, -100));
  at::Tensor at = at::where(mine, target - c.begin, at::zeros_like(target));
  at::Tensor d = dy.neg().expand_as(target).masked_fill(mine.logical_not(), 0);
  return {dx.scatter_(1, at.unsqueeze(1), d.unsqueeze(1))};
}

// Row maxima and sums of exp(x - max) over all devices.
void row_statistics(const KernelCall& c, const at::Tensor& x, int64_t dim, at::Tensor* max,
                    at::Tensor* sum) {
  std::vector<int64_t> rows = x.sizes().vec();
  rows[dim] = 1;
  *max = c.length == 0 ? at::full(rows, -std::numeric_limits<double>::infinity(), x.options())
                       : x.amax(dim, true).contiguous();
  c.communicator.all_reduce(*max, Reduction::max);
  *sum =
      c.length == 0 ? at::zeros(rows, x.options()) : (x - *max).exp_().sum(dim, true).contiguous();
  c.communicator.all_reduce(*sum);
}

std::vector<at::Tensor> log_softmax(const KernelCall& c) {
  at::Tensor max, sum;
  row_statistics(c, c.operands[0], dim_arg(c, 1), &max, &sum);
  return {(c.operands[0] - max).sub_(sum.log_())};
}

std::vector<at::Tensor> softmax(const KernelCall& c) {
  at::Tensor max, sum;
  row_statistics(c, c.operands[0], dim_arg(c, 1), &max, &sum);
  return {(c.operands[0] - max).exp_().div_(sum)};
}

at::Tensor row_sum(const KernelCall& c, const at::Tensor& x, int64_t dim) {
  at::Tensor sum = x.sum(dim, true).contiguous();
  c.communicator.all_reduce(sum);
  return sum;
}

// _log_softmax_backward_data(dy, y, dim, dtype): dy - exp(y) * sum(dy)
std::vector<at::Tensor> log_softmax_backward(const KernelCall& c) {
  const at::Tensor sum = row_sum(c, c.operands[0], dim_arg(c, 2));
  return {c.operands[0] - c.operands[1].exp().mul_(sum)};
}

// _softmax_backward_data(dy, y, dim, dtype): y * (dy - sum(dy * y))
std::vector<at::Tensor> softmax_backward(const KernelCall& c) {
  const at::Tensor &dy = c.operands[0], &y = c.operands[1];
  const at::Tensor sum = row_sum(c, dy * y, dim_arg(c, 2));
  return {(dy - sum).mul_(y)};
}

at::Tensor optional_operand(const KernelCall& c, size_t at) {
  int i = ops::operand_index(c.graph, c.node, at);
  return i < 0 ? at::Tensor() : c.operands[i];
}

std::vector<int64_t> all_but_channel(const at::Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d != 1) dims.push_back(d);
  return dims;
}

at::Tensor channelwise(const at::Tensor& v, const at::Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = v.size(0);
  return v.reshape(shape);
}

// How many elements a channel has on all devices.
double elements(const KernelCall& c, size_t operand) {
  const Shape& shape = c.graph.spec(c.graph.inputs_of(c.node)[operand]).shape;
  double n = 1;
  for (size_t d = 0; d < shape.size(); ++d)
    if (d != 1) n *= static_cast<double>(shape[d]);
  return n;
}

// native_batch_norm(x, w?, b?, mean?, var?, training, momentum, eps) with the batch cut: two
// passes, as one device does.
std::vector<at::Tensor> batch_norm(const KernelCall& c) {
  const at::Tensor& x = c.operands[0];
  at::Tensor weight = optional_operand(c, 1), bias = optional_operand(c, 2);
  double n = elements(c, 0), eps = ops::real_arg(c.node, 7);
  auto dims = all_but_channel(x);
  at::Tensor mean = x.sum(dims).contiguous();
  c.communicator.all_reduce(mean);
  mean = mean / n;
  at::Tensor centered = x - channelwise(mean, x);
  at::Tensor var = centered.square().sum(dims).contiguous();
  c.communicator.all_reduce(var);
  at::Tensor invstd = (var / n + eps).rsqrt();
  at::Tensor y = centered.mul_(channelwise(weight.defined() ? invstd * weight : invstd, x));
  if (bias.defined()) y.add_(channelwise(bias, x));
  return {y, mean, invstd};
}

// native_batch_norm_backward(dy, x, w?, mean?, var?, save_mean?, save_invstd?, train, eps, mask)
std::vector<at::Tensor> batch_norm_backward(const KernelCall& c) {
  const at::Tensor &dy = c.operands[0], &x = c.operands[1];
  at::Tensor weight = optional_operand(c, 2), mean = optional_operand(c, 5),
             invstd = optional_operand(c, 6);
  double n = elements(c, 1);
  auto dims = all_but_channel(x);
  at::Tensor normal = (x - channelwise(mean, x)).mul_(channelwise(invstd, x));
  at::Tensor sums = at::cat({(dy * normal).sum(dims), dy.sum(dims)}).contiguous();
  c.communicator.all_reduce(sums);
  int64_t channels = x.size(1);
  at::Tensor dw = sums.narrow(0, 0, channels).clone(),
             db = sums.narrow(0, channels, channels).clone();
  at::Tensor scale = weight.defined() ? invstd * weight : invstd;
  at::Tensor dx = dy - channelwise(db / n, x);
  dx.sub_(normal.mul_(channelwise(dw / n, x))).mul_(channelwise(scale, x));
  return {dx, dw, db};
}

}  // namespace

RuleKernel find_kernel(const std::string& rule) {
  static const std::map<std::string, RuleKernel> kernels = {
      {"batch_norm.batch", batch_norm},   {"batch_norm_backward.batch", batch_norm_backward},
      {"embedding.vocab", embedding},     {"embedding_backward.vocab", embedding_backward},
      {"log_softmax.class", log_softmax}, {"log_softmax_backward.class", log_softmax_backward},
      {"nll_loss.class", nll_loss},       {"nll_loss_backward.class", nll_loss_backward},
      {"rows_mm.experts", rows_mm},       {"rows_outer.experts", rows_outer},
      {"softmax.class", softmax},         {"softmax_backward.class", softmax_backward},
  };
  auto it = kernels.find(rule);
  MOTLEY_CHECK(it != kernels.end(), "no kernel for the rule {}", rule);
  return it->second;
}

}  // namespace motley

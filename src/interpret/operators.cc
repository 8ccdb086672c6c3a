#include "interpret/operators.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "interpret/attention.h"

namespace motley {
namespace {

std::tuple<at::Tensor, at::Tensor> ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets,
                                            const at::Tensor& input_lengths,
                                            const at::Tensor& target_lengths, int64_t blank,
                                            bool zero_infinity) {
  auto [loss, alpha] =
      at::_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  // Behind a sample's end it is what the memory was.
  const double impossible = -std::numeric_limits<double>::infinity();
  const auto steps = at::arange(alpha.size(1), input_lengths.options()).view({1, -1, 1});
  const auto states = at::arange(alpha.size(2), input_lengths.options()).view({1, 1, -1});
  const auto behind = steps.ge(input_lengths.view({-1, 1, 1}))
                          .logical_or(states.gt(2 * target_lengths.view({-1, 1, 1})));
  const int64_t missing = ctc_width(targets.sizes().vec()) - alpha.size(2);
  return {loss, at::constant_pad_nd(alpha.masked_fill(behind.to(alpha.device()), impossible),
                                    {0, missing}, impossible)};
}

// Rows by the matrix that their id names.
struct Sorted {
  at::Tensor order;  // [s] which row is next; last those that name none
  at::Tensor ids;    // [s] in that order, between 0 and experts
  int64_t experts;
};
Sorted sorted_rows(const at::Tensor& ids, int64_t experts) {
  const at::Tensor named = ids.ge(0).logical_and_(ids.lt(experts));
  auto [sorted, order] = ids.masked_fill(named.logical_not(), experts).sort();
  return {order, sorted, experts};
}

// aten::_grouped_mm(a, b, ends of each matrix's rows) of torch 2, where it has it for this type.
std::optional<at::Tensor> grouped(const at::Tensor& a, const at::Tensor& b, const Sorted& rows) {
  static const auto op = c10::Dispatcher::singleton().findSchema({"aten::_grouped_mm", ""});
  if (!op || a.scalar_type() != at::kBFloat16) return {};
  constexpr int64_t kAligned = 8;  // 16 bytes
  for (const at::Tensor* t : {&a, &b})
    for (int64_t d = t->dim() - 2; d < t->dim(); ++d)
      if (t->size(d) % kAligned != 0) return {};
  const at::Tensor numbers = at::arange(rows.experts, rows.ids.options());
  const at::Tensor ends = at::searchsorted(rows.ids, numbers, /*out_int32=*/true, /*right=*/true);
  torch::jit::Stack stack{a, b, ends, c10::IValue(), c10::IValue()};
  op->callBoxed(&stack);
  return stack.at(0).toTensor();
}

// [e] How many rows there are of each, and of none.
std::vector<int64_t> counts_of(const Sorted& rows) {
  const at::Tensor counts = at::bincount(rows.ids, {}, rows.experts + 1).cpu();
  return {counts.data_ptr<int64_t>(), counts.data_ptr<int64_t>() + rows.experts + 1};
}

at::Tensor rows_mm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& ids) {
  const Sorted rows = sorted_rows(ids, w.size(0));
  const at::Tensor in_order = x.index_select(0, rows.order);
  at::Tensor products;
  if (auto made = grouped(in_order, w, rows)) {
    products = made->masked_fill(rows.ids.eq(w.size(0)).unsqueeze(1), 0);
  } else {
    std::vector<at::Tensor> parts{at::zeros({0, w.size(2)}, x.options())};
    const std::vector<int64_t> counts = counts_of(rows);
    int64_t begin = 0;
    for (int64_t e = 0; e < w.size(0); begin += counts[static_cast<size_t>(e++)])
      if (const int64_t count = counts[static_cast<size_t>(e)]; count > 0)
        parts.push_back(in_order.narrow(0, begin, count).mm(w.select(0, e)));
    parts.push_back(at::zeros({x.size(0) - begin, w.size(2)}, x.options()));
    products = at::cat(parts);
  }
  return at::zeros({x.size(0), w.size(2)}, x.options()).index_copy(0, rows.order, products);
}

at::Tensor rows_outer(const at::Tensor& x, const at::Tensor& y, const at::Tensor& ids,
                      int64_t experts) {
  const Sorted rows = sorted_rows(ids, experts);
  const at::Tensor left = x.index_select(0, rows.order).t(), right = y.index_select(0, rows.order);
  if (auto made = grouped(left, right, rows)) return *made;
  std::vector<at::Tensor> parts;
  const std::vector<int64_t> counts = counts_of(rows);
  int64_t begin = 0;
  for (int64_t e = 0; e < experts; begin += counts[static_cast<size_t>(e++)]) {
    const int64_t count = counts[static_cast<size_t>(e)];
    parts.push_back(left.narrow(1, begin, count).mm(right.narrow(0, begin, count)));
  }
  return at::stack(parts);
}

}  // namespace

int64_t ctc_width(const Shape& targets) { return 2 * targets.back() + 1; }

void register_operators() {
  // Never freed: the dispatcher outlives it. Several libraries of one process may hold this code.
  static const bool registered = [] {
    if (c10::Dispatcher::singleton().findSchema({"motley_torch::ctc_loss", ""})) return true;
    auto* l = new torch::Library(torch::Library::FRAGMENT, "motley_torch", c10::nullopt, __FILE__,
                                 __LINE__);
    l->def(
        "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
        "int blank, bool zero_infinity) -> (Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &ctc_loss));
    l->def("rows_mm(Tensor x, Tensor w, Tensor ids) -> Tensor",
           torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &rows_mm));
    l->def("rows_outer(Tensor x, Tensor y, Tensor ids, int experts) -> Tensor",
           torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &rows_outer));
    return true;
  }();
  MOTLEY_CHECK(registered);
  register_attention();
}

}  // namespace motley

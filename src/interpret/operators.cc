#include "interpret/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_ctc_loss.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "core/error.h"

namespace motley {
namespace {

std::tuple<at::Tensor, at::Tensor> ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets,
                                            const at::Tensor& input_lengths,
                                            const at::Tensor& target_lengths, int64_t blank,
                                            bool zero_infinity) {
  auto [loss, alpha] =
      at::_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity);
  const int64_t missing = ctc_width(targets.sizes().vec()) - alpha.size(2);
  return {loss, at::constant_pad_nd(alpha, {0, missing}, -std::numeric_limits<double>::infinity())};
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
    return true;
  }();
  MOTLEY_CHECK(registered);
}

}  // namespace motley

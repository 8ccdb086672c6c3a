#include "interpret/batch_norm.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>

namespace motley {
namespace {

// Whether cuDNN was seen to hand its backward pass what native_batch_norm has no result for. It does
// in other layouts alone.
std::atomic<bool> hands_over{false};

bool suits(const at::Tensor& x, const c10::IValue& weight, bool training) {
  if (!x.is_cuda() || !training || hands_over || !at::globalContext().userEnabledCuDNN() ||
      x.dim() < 3 || x.dim() > 5 || x.numel() == 0 || x.size(0) > 880801 || !x.is_contiguous() ||
      !weight.isTensor() || !weight.toTensor().defined())
    return false;
  const at::ScalarType of = weight.toTensor().scalar_type();
  return x.element_size() == 2 ? of == at::kFloat : of == x.scalar_type();
}

torch::jit::Stack called(const char* name, torch::jit::Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return stack;
}

}  // namespace

// (x, weight?, bias?, mean?, variance?, training, momentum, eps)
bool batch_norm_by_cudnn(torch::jit::Stack* stack) {
  const torch::jit::Stack& a = *stack;
  const at::Tensor x = a.at(0).toTensor();
  if (!suits(x, a.at(1), a.at(5).toBool())) return false;
  if (!a.at(2).isTensor() || a.at(3).isNone() != a.at(4).isNone()) return false;
  torch::jit::Stack made = called("aten::cudnn_batch_norm", a);
  if (made.at(3).toTensor().numel() > 0) {
    hands_over = true;
    return false;
  }
  made.pop_back();
  *stack = std::move(made);
  return true;
}

// (dy, x, weight?, mean?, variance?, save_mean?, save_invstd?, train, eps, mask)
bool batch_norm_backward_by_cudnn(torch::jit::Stack* stack) {
  const torch::jit::Stack& a = *stack;
  const at::Tensor dy = a.at(0).toTensor(), x = a.at(1).toTensor();
  if (!suits(x, a.at(2), a.at(7).toBool()) || dy.scalar_type() != x.scalar_type()) return false;
  if (!a.at(5).isTensor() || !a.at(6).isTensor()) return false;
  const at::Tensor nothing = at::empty({0}, x.options().dtype(at::kByte));
  torch::jit::Stack made =
      called("aten::cudnn_batch_norm_backward",
             {x, dy.contiguous(), a.at(2), a.at(3), a.at(4), a.at(5), a.at(6), a.at(8), nothing});
  const c10::List<bool> wanted = a.at(9).toBoolList();
  for (size_t i = 0; i < made.size(); ++i)
    if (!wanted.get(i)) made[i] = at::Tensor();
  *stack = std::move(made);
  return true;
}

}  // namespace motley

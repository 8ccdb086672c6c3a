#include "capture/autocast.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "interpret/torch_version.h"

namespace motley {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

// Above autograd and autocast, and used by nothing else.
constexpr DispatchKey kFront = DispatchKey::TESTING_ONLY_GenericMode;

using Types = std::vector<at::ScalarType>;  // of all tensors among arguments, in order

// A call of an autocast kernel that is stopped where the kernel calls on.
struct Question {
  const c10::OperatorHandle* op;
  bool asked = false;
  Types answer;
};
struct Answered {};

struct Following {
  at::DeviceType device;
  // Casts of parameters, by the original, which is held.
  std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> casts;
  // What the kernel of an operator makes of the types of its operands.
  std::map<std::tuple<const void*, at::DeviceType, at::ScalarType, Types>, Types> answers;
};

thread_local Following* following = nullptr;
thread_local Question* question = nullptr;

DispatchKey key_of(at::DeviceType device) {
  return device == at::kCUDA ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU;
}

// The device whose autocast is on; Meta: none.
at::DeviceType active() {
  if (following->device != at::kCPU && autocast_enabled(at::kCUDA)) return at::kCUDA;
  if (following->device != at::kCUDA && autocast_enabled(at::kCPU)) return at::kCPU;
  return at::kMeta;
}

// Calls `f` on every defined tensor among the last `count` values of a stack and puts what it
// returns in its place.
template <typename F>
void each_tensor(Stack* stack, size_t count, F f) {
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = f(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
      value = list;
    } else if (value.isList()) {
      c10::List<c10::IValue> list = value.toList();
      for (size_t j = 0; j < list.size(); j++) {
        const c10::IValue element = list.get(j);
        if (element.isTensor() && element.toTensor().defined()) list.set(j, f(element.toTensor()));
      }
    }
  }
}

Types types_of(Stack stack, size_t count) {
  Types types;
  each_tensor(&stack, count, [&](const at::Tensor& t) {
    types.push_back(t.scalar_type());
    return t;
  });
  return types;
}

// The types to which the operator's autocast kernel casts its operands.
const Types& answer(const c10::OperatorHandle& op, at::DeviceType device, const Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const at::ScalarType lower = autocast_type(device);
  auto [it, fresh] = following->answers.try_emplace(
      {&op.schema(), device, lower, types_of(stack, count)}, Types());
  if (!fresh) return it->second;
  Question mine{&op, false, {}};
  Stack arguments(stack.end() - static_cast<int64_t>(count), stack.end());
  {
    c10::impl::ExcludeDispatchKeyGuard unrecorded(DispatchKey::Fake);
    at::NoGradGuard no_grad;
    each_tensor(&arguments, count, [&](const at::Tensor& t) {
      return at::empty(t.dim() == 0 ? std::vector<int64_t>{} : std::vector<int64_t>(t.dim(), 0),
                       at::TensorOptions(device).dtype(t.scalar_type()));
    });
    question = &mine;
    try {
      op.callBoxed(&arguments);
    } catch (const Answered&) {
    } catch (...) {
      question = nullptr;
      following->answers.erase(it);
      throw;  // what autocast says of operators that it does not allow
    }
    question = nullptr;
  }
  if (mine.answer.size() != types_of(stack, count).size()) {
    following->answers.erase(it);
    throw user_error("capture",
                     "{} runs under torch.autocast by another operator, which a capture does not "
                     "follow; call it with autocast off",
                     op.schema().name());
  }
  return it->second = mine.answer;
}

at::Tensor cast(const at::Tensor& t, at::ScalarType type) {
  const bool kept = t.scalar_type() == at::kFloat && t.requires_grad() && t.is_leaf() &&
                    !t.is_view() && at::autocast::is_autocast_cache_enabled() &&
                    type != at::kDouble;
  if (!kept) return t.to(type);
  auto& [held, copy] = following->casts[t.unsafeGetTensorImpl()];
  if (!copy.defined() || copy.scalar_type() != type) held = t, copy = t.to(type);
  return copy;
}

void front(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kFront);
  if (question != nullptr && question->op->operator_name() == op.operator_name()) {
    if (question->asked) {
      question->answer = types_of(*stack, op.schema().arguments().size());
      throw Answered();
    }
    question->asked = true;
  }
  const at::DeviceType device = question == nullptr && following != nullptr ? active() : at::kMeta;
  if (device == at::kMeta || !op.hasKernelForDispatchKey(key_of(device))) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const Types& types = answer(op, device, *stack);
  size_t next = 0;
  each_tensor(stack, op.schema().arguments().size(), [&](const at::Tensor& t) {
    const at::ScalarType type = types[next++];
    return type == t.scalar_type() ? t : cast(t, type);
  });
  c10::impl::ExcludeDispatchKeyGuard inside(key_of(device));
  op.redispatchBoxed(below, stack);
}

}  // namespace

FollowAutocast::FollowAutocast(at::DeviceType device) {
  MOTLEY_CHECK(following == nullptr);
  // Never freed: the dispatcher outlives it.
  static const torch::Library* library = [] {
    auto* l = new torch::Library(torch::Library::IMPL, "_", kFront, __FILE__, __LINE__);
    l->fallback(torch::CppFunction::makeFromBoxedFunction<&front>());
    return l;
  }();
  MOTLEY_CHECK(library != nullptr);
  following = new Following{device, {}, {}};
  include_ = std::make_unique<c10::impl::IncludeDispatchKeyGuard>(kFront);
}

FollowAutocast::~FollowAutocast() {
  include_.reset();
  delete following;
  following = nullptr;
}

std::unique_ptr<WithoutAutocast> without_autocast() {
  return std::make_unique<WithoutAutocast>(c10::autocast_dispatch_keyset);
}

void forget_casts() {
  if (following != nullptr) following->casts.clear();
}

}  // namespace motley

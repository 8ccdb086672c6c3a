#include <algorithm>

#include "core/error.h"
#include "torch/recorder.h"

namespace motley::recording {
// Operators that are not recorded as they are.
const std::unordered_map<std::string, Handler>& Recorder::handlers() {
  static const std::unordered_map<std::string, Handler> table = {
      {"aten::_index_put_impl_", &Recorder::index_put},
      {"aten::_local_scalar_dense", &Recorder::refuse_value},
      {"aten::_to_copy", &Recorder::to_copy},
      {"aten::_unique", &Recorder::refuse_value},
      {"aten::_unique2", &Recorder::refuse_value},
      {"aten::as_strided", &Recorder::as_strided},
      {"aten::bincount", &Recorder::refuse_value},
      {"aten::clone", &Recorder::clone},
      {"aten::copy_", &Recorder::copy},
      {"aten::empty_like", &Recorder::empty_like},
      {"aten::empty_strided", &Recorder::factory},
      {"aten::equal", &Recorder::refuse_value},
      {"aten::fill_.Scalar", &Recorder::fill},
      {"aten::masked_select", &Recorder::refuse_value},
      {"aten::native_batch_norm", &Recorder::batch_norm},
      {"aten::native_batch_norm_backward", &Recorder::batch_norm_backward},
      {"aten::new_empty", &Recorder::factory},
      {"aten::new_empty_strided", &Recorder::factory},
      {"aten::new_full", &Recorder::factory},
      {"aten::new_ones", &Recorder::factory},
      {"aten::new_zeros", &Recorder::factory},
      {"aten::nonzero", &Recorder::refuse_value},
      {"aten::repeat_interleave.Tensor", &Recorder::refuse_value},
      {"aten::resize_", &Recorder::refuse_storage},
      {"aten::set_.source_Storage", &Recorder::refuse_storage},
      {"aten::set_.source_Storage_storage_offset", &Recorder::refuse_storage},
      {"aten::set_.source_Tensor", &Recorder::refuse_storage},
      {"aten::unique_consecutive", &Recorder::refuse_value},
      {"aten::unique_dim", &Recorder::refuse_value},
      {"aten::view.dtype", &Recorder::refuse_storage},
      {"aten::zero_", &Recorder::fill},
  };
  return table;
}

std::vector<std::string> Recorder::refused() {
  std::vector<std::string> names;
  for (const auto& [name, handler] : handlers())
    if (handler == &Recorder::refuse_value || handler == &Recorder::refuse_storage)
      names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

ValueId Recorder::cast(ValueId value, const TensorSpec& spec) {
  const TensorSpec from = graph().spec(value);
  if (from.dtype != spec.dtype)
    value = emit("aten::_to_copy", {value, spec.dtype, {}, {}, {}, false, {}},
                 {spec.dtype, from.shape});
  if (from.shape != spec.shape) value = emit("aten::expand", {value, spec.shape, false}, spec);
  return value;
}

void Recorder::mutate(const OpInfo& info, Stack* stack) {
  if (info.twin == nullptr)
    throw user_error("capture", "{} changes a tensor in place and has no functional form",
                     info.op.name);
  const c10::IValue* args = arguments(info, stack);
  const at::Tensor self = args[info.written].toTensor();
  Stack call;
  for (size_t i = 0; i < info.op.args.size(); i++)
    if (!info.out || i != static_cast<size_t>(info.written)) call.push_back(args[i]);
  if (info.twin->handler != nullptr)
    (this->*info.twin->handler)(*info.twin, &call);
  else
    record(*info.twin, &call);
  const at::Tensor value = call.back().toTensor();
  if (value.is_alias_of(self)) {  // t_, squeeze_, ...: only the geometry changes
    info.op.handle.callBoxed(stack);
    return;
  }
  Place place = find(self);
  if (!place || !value.sizes().equals(self.sizes()))
    throw user_error("capture", "{} writes {} to a tensor {}", info.op.name,
                     to_string(motley::spec_of(value)), to_string(motley::spec_of(self)));
  write(place, cast(value_of(value, info.name), motley::spec_of(self)));
  finish(info, stack, self);
}

void Recorder::copy(const OpInfo& info, Stack* stack) {
  const c10::IValue* args = arguments(info, stack);
  const at::Tensor self = args[0].toTensor();
  const TensorSpec spec = motley::spec_of(self);
  const Arg source = to_arg(info, info.op.args[1], args[1]);
  value_of(self, info.name);
  const auto* value = std::get_if<ValueId>(&source);
  write(find(self), value != nullptr
                        ? cast(*value, spec)
                        : emit("aten::full", {spec.shape, source, spec.dtype, {}, {}, {}}, spec));
  finish(info, stack, self);
}

void Recorder::fill(const OpInfo& info, Stack* stack) {
  const c10::IValue* args = arguments(info, stack);
  const at::Tensor self = args[0].toTensor();
  const ValueId old = value_of(self, info.name);
  std::vector<Arg> like = {old, {}, {}, {}, {}, {}};
  if (info.op.args.size() > 1)
    like.insert(like.begin() + 1, to_arg(info, info.op.args[1], args[1]));
  const char* op = info.op.args.size() > 1 ? "aten::full_like" : "aten::zeros_like";
  write(find(self), emit(op, std::move(like), motley::spec_of(self)));
  finish(info, stack, self);
}

void Recorder::index_put(const OpInfo& info, Stack* stack) {
  const c10::IValue* values = arguments(info, stack);
  const at::Tensor self = values[0].toTensor();
  std::vector<Arg> args = to_args(info, values);
  args.pop_back();
  write(find(self), emit("aten::index_put", std::move(args), motley::spec_of(self)));
  finish(info, stack, self);
}

void Recorder::clone(const OpInfo& info, Stack* stack) {
  const at::Tensor self = arguments(info, stack)[0].toTensor();
  const bool contiguous = geometry_of(self).contiguous();
  const ValueId value = value_of(self, info.name);
  info.op.handle.callBoxed(stack);
  const at::Tensor& out = stack->back().toTensor();
  // A copy that changes the order of elements in memory costs time; any other is the value itself.
  define(out, !contiguous && geometry_of(out).contiguous()
                  ? emit("aten::clone", {value, {}}, motley::spec_of(out))
                  : value);
}

void Recorder::to_copy(const OpInfo& info, Stack* stack) {
  const at::Tensor self = arguments(info, stack)[0].toTensor();
  const ValueId value = value_of(self, info.name);
  info.op.handle.callBoxed(stack);
  const at::Tensor& out = stack->back().toTensor();
  define(out, cast(value, motley::spec_of(out)));
}

void Recorder::factory(const OpInfo& info, Stack* stack) {
  const Arg number = info.op.name == "aten::new_full"
                         ? to_arg(info, info.op.args[2], arguments(info, stack)[2])
                         : Arg();
  info.op.handle.callBoxed(stack);
  const at::Tensor& out = stack->back().toTensor();
  const TensorSpec spec = motley::spec_of(out);
  std::vector<Arg> args = {spec.shape, spec.dtype, {}, {}, {}};
  const char* op = "aten::empty.memory_format";
  if (info.op.name == "aten::new_full") {
    op = "aten::full";
    args.insert(args.begin() + 1, number);
  } else if (info.op.name == "aten::new_zeros") {
    op = "aten::zeros";
  } else if (info.op.name == "aten::new_ones") {
    op = "aten::ones";
  } else {
    args.emplace_back();
  }
  define(out, emit(op, std::move(args), spec));
}

// Memory without values may as well hold those of `self`; random ops drawn into it follow its
// shape.
void Recorder::empty_like(const OpInfo& info, Stack* stack) {
  const at::Tensor self = arguments(info, stack)[0].toTensor();
  const ValueId value = value_of(self, info.name);
  info.op.handle.callBoxed(stack);
  const at::Tensor& out = stack->back().toTensor();
  const TensorSpec spec = motley::spec_of(out);
  define(out, spec == motley::spec_of(self) ? value
                                            : emit("aten::empty.memory_format",
                                                   {spec.shape, spec.dtype, {}, {}, {}, {}}, spec));
}

void Recorder::batch_norm(const OpInfo& info, Stack* stack) {
  c10::IValue* args = arguments(info, stack);
  if (!args[5].toBool()) {
    record(info, stack);
    return;
  }
  const c10::IValue mean = args[3], var = args[4];
  const double momentum = args[6].toDouble(), eps = args[7].toDouble();
  const double n = static_cast<double>(args[0].toTensor().numel() / args[0].toTensor().size(1));
  args[3] = args[4] = c10::IValue();
  const std::vector<at::Tensor> outputs = record(info, stack);
  // running = (1 - momentum) running + momentum batch
  auto update = [&](const at::Tensor& running, ValueId batch, double weight) {
    const TensorSpec spec = motley::spec_of(running);
    const ValueId kept =
        emit("aten::mul.Tensor", {value_of(running, info.name), 1 - momentum}, spec);
    write(find(running), cast(emit("aten::add.Tensor", {kept, batch, weight}, spec), spec));
  };
  if (mean.isTensor() && mean.toTensor().defined())
    update(mean.toTensor(), value_of(outputs[1], info.name), momentum);
  if (var.isTensor() && var.toTensor().defined()) {
    // The saved inverse deviation is (var + eps)^-1/2 of the biased variance.
    const TensorSpec spec = motley::spec_of(outputs[2]);
    const ValueId squared =
        emit("aten::pow.Tensor_Scalar", {value_of(outputs[2], info.name), -2.0}, spec);
    const ValueId biased = emit("aten::sub.Tensor", {squared, eps, int64_t{1}}, spec);
    update(var.toTensor(), biased, momentum * n / (n - 1));
  }
}

void Recorder::batch_norm_backward(const OpInfo& info, Stack* stack) {
  c10::IValue* args = arguments(info, stack);
  if (args[7].toBool()) args[3] = args[4] = c10::IValue();  // in training they are not read
  record(info, stack);
}

void Recorder::refuse_value(const OpInfo& info, Stack*) {
  throw user_error("capture",
                   "the model reads a number out of a tensor ({}); control flow and shapes that "
                   "depend on values cannot be captured",
                   info.op.name);
}

void Recorder::refuse_storage(const OpInfo& info, Stack*) {
  throw user_error("capture", "the model uses {}, which changes how memory is read", info.op.name);
}

}  // namespace motley::recording

#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <map>
#include <set>

#include "capture/recorder.h"
#include "core/error.h"
#include "interpret/interpret.h"
#include "interpret/operators.h"

namespace motley::recording {
// Operators that are not recorded as they are.
const std::unordered_map<std::string, Handler>& Recorder::handlers() {
  static const std::unordered_map<std::string, Handler> table = {
      {"aten::_ctc_loss.Tensor", &Recorder::ctc_loss},
      {"aten::_efficientzerotensor", &Recorder::zero_tensor},
      {"aten::_index_put_impl_", &Recorder::index_put},
      {"aten::_linalg_det", &Recorder::determinant},
      {"aten::_linalg_slogdet", &Recorder::determinant},
      {"aten::_linalg_solve_ex", &Recorder::solve},
      {"aten::_local_scalar_dense", &Recorder::read_number},
      {"aten::_to_copy", &Recorder::to_copy},
      {"aten::_unique", &Recorder::refuse_value},
      {"aten::_unique2", &Recorder::refuse_value},
      {"aten::allclose", &Recorder::refuse_value},
      {"aten::as_strided", &Recorder::as_strided},
      {"aten::bincount", &Recorder::refuse_value},
      {"aten::clone", &Recorder::clone},
      {"aten::copy_", &Recorder::copy},
      {"aten::empty_like", &Recorder::empty_like},
      {"aten::empty_strided", &Recorder::factory},
      {"aten::equal", &Recorder::refuse_value},
      {"aten::fill_.Scalar", &Recorder::fill},
      {"aten::full", &Recorder::full},
      {"aten::index.Tensor", &Recorder::index},
      {"aten::is_same_size", &Recorder::same_on_meta},
      {"aten::lift_fresh", &Recorder::lift_fresh},
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
  if (info.functional == nullptr)
    throw user_error("capture", "{} changes a tensor in place and has no functional form",
                     info.op.name);
  const c10::IValue* args = arguments(info, stack);
  const at::Tensor self = args[info.written].toTensor();
  Stack call;
  for (size_t i = 0; i < info.op.args.size(); i++)
    if (!info.out || i != static_cast<size_t>(info.written)) call.push_back(args[i]);
  if (info.functional->handler != nullptr)
    (this->*info.functional->handler)(*info.functional, &call);
  else
    record(*info.functional, &call);
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

// The type follows from the number, which the Meta device does not look at.
void Recorder::full(const OpInfo& info, Stack* stack) {
  c10::IValue* args = arguments(info, stack);
  if (args[2].isNone()) {
    if (args[1].isBool())
      args[2] = static_cast<int64_t>(at::kBool);
    else if (args[1].isInt())
      args[2] = static_cast<int64_t>(at::kLong);
  }
  record(info, stack);
}

void Recorder::index(const OpInfo& info, Stack* stack) {
  for (const c10::IValue& element : arguments(info, stack)[1].toListRef())
    if (element.isTensor() && element.toTensor().defined() &&
        (element.toTensor().scalar_type() == at::kBool ||
         element.toTensor().scalar_type() == at::kByte))
      throw user_error("capture",
                       "the model picks elements by a mask ({}), and how many depends on its "
                       "numbers; use torch.where, or multiply by the mask",
                       info.op.name);
  record(info, stack);
}

// What torch.tensor(numbers) returns: its numbers are those of every step.
void Recorder::lift_fresh(const OpInfo& info, Stack* stack) {
  finish(info, stack, arguments(info, stack)[0]);
}

// Zeros that take no memory, by which autograd says that there is no gradient.
void Recorder::zero_tensor(const OpInfo& info, Stack* stack) {
  const c10::IValue* args = arguments(info, stack);
  TensorSpec spec{DType::f32, args[0].toIntVector()};
  spec.dtype = from_torch(args[1].isNone() ? at::get_default_dtype_as_scalartype()
                                           : static_cast<at::ScalarType>(args[1].toInt()));
  finish(info, stack, made(emit("aten::zeros", {spec.shape, spec.dtype, {}, {}, {}}, spec)));
}

// A question about shapes and types.
void Recorder::same_on_meta(const OpInfo& info, Stack* stack) { info.op.handle.callBoxed(stack); }

// Determinants keep the factors of the transpose where the matrix is contiguous, which the backward
// pass goes by. Graphs have no strides: `call` makes these operands contiguous, and the factors of
// a matrix that is not are those of its transpose's transpose.
void Recorder::determinant(const OpInfo& info, Stack* stack) {
  c10::IValue* args = arguments(info, stack);
  const at::Tensor matrix = args[0].toTensor();
  if (!matrix.is_contiguous()) {
    TensorSpec spec = motley::spec_of(matrix);
    const auto rank = static_cast<int64_t>(spec.shape.size());
    std::swap(spec.shape[spec.shape.size() - 1], spec.shape[spec.shape.size() - 2]);
    args[0] =
        made(emit("aten::transpose.int", {value_of(matrix, info.name), rank - 2, rank - 1}, spec));
  }
  record(info, stack);
}

// The same of solve(A, B, left, check_errors) -> X, LU, pivots, info: where A is not contiguous the
// factors are those of A itself, by operators whose results do not depend on strides.
void Recorder::solve(const OpInfo& info, Stack* stack) {
  const c10::IValue* args = arguments(info, stack);
  const at::Tensor a = args[0].toTensor(), b = args[1].toTensor();
  if (a.is_contiguous()) {
    record(info, stack);
    return;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  auto recorded = [&](const char* name, Stack operands) {
    return record(info_of(dispatcher.findSchemaOrThrow(name, "")), &operands);
  };
  const std::vector<at::Tensor> factors =
      recorded("aten::linalg_lu_factor_ex", {a, /*pivot=*/true, args[3]});
  // One vector, or a batch of them.
  const bool vectors =
      b.dim() == 1 || (a.dim() - 1 == b.dim() && b.sizes().equals(a.sizes().slice(0, b.dim())));
  at::Tensor right = b;
  if (vectors) {
    TensorSpec spec = motley::spec_of(b);
    spec.shape.push_back(1);
    right = made(emit("aten::view", {value_of(b, info.name), spec.shape}, spec));
  }
  at::Tensor x = recorded("aten::linalg_lu_solve",
                          {factors[0], factors[1], right, args[2], /*adjoint=*/false})[0];
  if (vectors) {
    TensorSpec spec = motley::spec_of(x);
    spec.shape.pop_back();
    x = made(emit("aten::view", {value_of(x, info.name), spec.shape}, spec));
  }
  stack->resize(stack->size() - info.op.args.size());
  for (const at::Tensor& t : {x, factors[0], factors[1], factors[2]}) stack->push_back(t);
}

// How long the longest target is depends on numbers.
void Recorder::ctc_loss(const OpInfo& info, Stack* stack) {
  const c10::IValue* args = arguments(info, stack);
  const at::Tensor probabilities = args[0].toTensor(), targets = args[1].toTensor();
  const bool batched = probabilities.dim() == 3;
  const Shape samples = {batched ? probabilities.size(1) : 1};
  const TensorSpec loss{from_torch(probabilities.scalar_type()), samples};
  const TensorSpec alpha{loss.dtype,
                         {samples[0], probabilities.size(0), ctc_width(targets.sizes().vec())}};
  const NodeId id =
      graph().add("motley_torch::ctc_loss", to_args(info, args), {loss, alpha}, phase);
  stack->resize(stack->size() - info.op.args.size());
  for (ValueId v : graph().node(id).outputs) stack->push_back(made(v));
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
  const char* op = "aten::zeros";  // of what is to be filled too: nobody reads it before
  if (info.op.name == "aten::new_full") {
    op = "aten::full";
    args.insert(args.begin() + 1, number);
  } else if (info.op.name == "aten::new_ones") {
    op = "aten::ones";
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

// The graph of a value that follows from constants alone.
Graph part_of(const Graph& graph, ValueId value) {
  std::set<NodeId> needed;
  std::vector<ValueId> open = {value};
  while (!open.empty()) {
    const NodeId producer = graph.value(open.back()).producer;
    open.pop_back();
    if (!needed.insert(producer).second) continue;
    for (ValueId v : graph.inputs_of(graph.node(producer))) open.push_back(v);
  }
  Graph part;
  std::map<ValueId, ValueId> moved;
  for (NodeId id : needed) {
    Node node = graph.node(id);
    for (Arg& arg : node.args) {
      if (auto* one = std::get_if<ValueId>(&arg); one != nullptr && one->valid())
        *one = moved.at(*one);
      if (auto* list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list)
          if (v.valid()) v = moved.at(v);
    }
    std::vector<TensorSpec> specs;
    for (ValueId v : node.outputs)
      specs.push_back(v.valid() ? graph.spec(v) : TensorSpec{DType::f32, {-1}});
    const NodeId made = part.add(node.op, node.args, specs, node.phase);
    for (size_t o = 0; o < node.outputs.size(); o++)
      if (node.outputs[o].valid()) moved[node.outputs[o]] = part.node(made).outputs[o];
  }
  part.outputs = {moved.at(value)};
  return part;
}

// A number that follows from constants alone, such as whether positions that are 0, 1, 2, ... have
// a gap, is the same in every step.
void Recorder::read_number(const OpInfo& info, Stack* stack) {
  const at::Tensor tensor = arguments(info, stack)[0].toTensor();
  if (!known(tensor) || !fixed(tensor)) return refuse_value(info, stack);
  const at::Tensor number = interpret(part_of(graph(), value_of(tensor, info.name)), {}).outputs[0];
  finish(info, stack, number.item());
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

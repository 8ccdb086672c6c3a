#include "interpret/dispatch.h"

#include <ATen/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>

#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "core/blas.h"
#include "core/error.h"
#include "interpret/batch_norm.h"
#include "interpret/operators.h"

namespace motley {
namespace {

using c10::TypeKind;

ArgKind kind_of(const c10::Type& type, const std::string& name) {
  if (name == "pin_memory") return ArgKind::left_out;
  switch (type.kind()) {
    case TypeKind::TensorType:
      return ArgKind::tensor;
    case TypeKind::NumberType:
      return ArgKind::scalar;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      return ArgKind::integer;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      return ArgKind::real;
    case TypeKind::BoolType:
      return ArgKind::boolean;
    case TypeKind::StringType:
      return ArgKind::text;
    case TypeKind::ScalarTypeType:
      return ArgKind::dtype;
    case TypeKind::DeviceObjType:
      return ArgKind::device;
    case TypeKind::LayoutType:
    case TypeKind::MemoryFormatType:
    case TypeKind::GeneratorType:
      return ArgKind::left_out;
    case TypeKind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      switch (element.kind()) {
        case TypeKind::TensorType:
          return ArgKind::tensors;
        case TypeKind::OptionalType:
          return ArgKind::optional_tensors;
        case TypeKind::IntType:
        case TypeKind::SymIntType:
          return ArgKind::integers;
        case TypeKind::FloatType:
          return ArgKind::reals;
        case TypeKind::BoolType:
          return ArgKind::booleans;
        default:
          return ArgKind::unsupported;
      }
    }
    default:
      return ArgKind::unsupported;
  }
}

// On the CPU whatever the device: kernels take a number beside their tensors without a transfer.
at::Tensor number(const at::Scalar& value) {
  at::Tensor t = at::scalar_tensor(value, at::TensorOptions(at::kCPU).dtype(value.type()));
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

// The same elements in order at the beginning of a memory.
at::Tensor in_one_run(const at::Tensor& t) {
  return t.is_contiguous() && t.storage_offset() == 0 ? t : t.clone(at::MemoryFormat::Contiguous);
}

template <typename T>
bool numeric(const Arg& arg, T* out) {
  if (const auto* i = std::get_if<int64_t>(&arg)) return *out = static_cast<T>(*i), true;
  if (const auto* d = std::get_if<double>(&arg)) return *out = static_cast<T>(*d), true;
  if (const auto* b = std::get_if<bool>(&arg)) return *out = static_cast<T>(*b), true;
  return false;
}

c10::IValue convert(const Operator& op, const OperatorArg& schema, const Arg& arg,
                    TensorOf tensor_of, at::Device device) {
  if (schema.kind == ArgKind::device) return device;
  if (schema.kind == ArgKind::left_out) return schema.fill;
  if (std::holds_alternative<std::monostate>(arg)) {
    if (schema.optional) return c10::IValue();
    if (schema.kind == ArgKind::tensor) return at::Tensor();
  }
  switch (schema.kind) {
    case ArgKind::tensor:
      if (const auto* v = std::get_if<ValueId>(&arg)) return tensor_of(*v);
      if (const auto* i = std::get_if<int64_t>(&arg)) return number(*i);
      if (const auto* d = std::get_if<double>(&arg)) return number(*d);
      if (const auto* b = std::get_if<bool>(&arg)) return number(*b);
      break;
    case ArgKind::tensors:
      if (const auto* values = std::get_if<std::vector<ValueId>>(&arg)) {
        c10::List<at::Tensor> list;
        for (ValueId v : *values) list.push_back(v.valid() ? tensor_of(v) : at::Tensor());
        return list;
      }
      break;
    case ArgKind::optional_tensors:
      if (const auto* values = std::get_if<std::vector<ValueId>>(&arg)) {
        c10::List<c10::optional<at::Tensor>> list;
        for (ValueId v : *values)
          list.push_back(v.valid() ? c10::make_optional(tensor_of(v)) : c10::nullopt);
        return list;
      }
      break;
    case ArgKind::scalar:
      if (const auto* i = std::get_if<int64_t>(&arg)) return *i;
      if (const auto* d = std::get_if<double>(&arg)) return *d;
      if (const auto* b = std::get_if<bool>(&arg)) return *b;
      break;
    case ArgKind::integer: {
      int64_t i;
      if (!std::holds_alternative<double>(arg) && numeric(arg, &i)) return i;
      break;
    }
    case ArgKind::real: {
      double d;
      if (numeric(arg, &d)) return d;
      break;
    }
    case ArgKind::boolean: {
      bool b;
      if (!std::holds_alternative<double>(arg) && numeric(arg, &b)) return b;
      break;
    }
    case ArgKind::integers:
      if (const auto* i = std::get_if<int64_t>(&arg)) return std::vector<int64_t>{*i};
      if (const auto* list = std::get_if<std::vector<int64_t>>(&arg)) return *list;
      break;
    case ArgKind::reals:
      if (const auto* d = std::get_if<double>(&arg)) return std::vector<double>{*d};
      if (const auto* list = std::get_if<std::vector<double>>(&arg)) return *list;
      break;
    case ArgKind::booleans:
      if (const auto* list = std::get_if<std::vector<int64_t>>(&arg)) {
        c10::List<bool> flags;
        for (int64_t i : *list) flags.push_back(i != 0);
        return flags;
      }
      break;
    case ArgKind::text:
      if (const auto* s = std::get_if<std::string>(&arg)) return *s;
      break;
    case ArgKind::dtype:
      if (const auto* d = std::get_if<DType>(&arg)) return static_cast<int64_t>(to_torch(*d));
      break;
    case ArgKind::device:
    case ArgKind::left_out:
    case ArgKind::unsupported:
      break;
  }
  throw user_error("torch", "{}: argument '{}' has a value that its schema does not take", op.name,
                   schema.name);
}

}  // namespace

std::string operator_name(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name()
                                        : schema.name() + "." + schema.overload_name();
}

Operator digest(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  Operator op{operator_name(schema), handle, {}};
  for (const c10::Argument& argument : schema.arguments()) {
    OperatorArg arg;
    arg.name = argument.name();
    c10::TypePtr type = argument.real_type();
    if (type->kind() == TypeKind::OptionalType) {
      arg.optional = true;
      type = type->castRaw<c10::OptionalType>()->getElementType();
    }
    arg.kind = kind_of(*type, arg.name);
    arg.written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (argument.default_value()) arg.fill = *argument.default_value();
    op.args.push_back(std::move(arg));
  }
  return op;
}

const Operator& find_operator(const std::string& name) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<Operator>> cache;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Operator>& entry = cache[name];
  if (entry == nullptr) {
    const std::string wanted = name == "aten::view" ? "aten::reshape" : name;
    register_operators();
    const size_t dot = wanted.find('.');
    const auto handle = c10::Dispatcher::singleton().findSchema(
        {wanted.substr(0, dot), dot == std::string::npos ? "" : wanted.substr(dot + 1)});
    if (!handle) throw user_error("torch", "this libtorch has no operator '{}'", name);
    entry = std::make_unique<Operator>(digest(*handle));
    entry->name = name;
    static const std::set<std::string> by_strides = {"aten::_linalg_det", "aten::_linalg_slogdet",
                                                     "aten::_linalg_solve_ex", "aten::as_strided",
                                                     "aten::as_strided_scatter"};
    entry->contiguous = by_strides.count(name) > 0;
    if (name == "aten::native_batch_norm") entry->instead = batch_norm_by_cudnn;
    if (name == "aten::native_batch_norm_backward") entry->instead = batch_norm_backward_by_cudnn;
    if (name == "aten::clone")
      entry->args.back().fill = static_cast<int64_t>(at::MemoryFormat::Contiguous);
  }
  return *entry;
}

namespace {

std::vector<at::Tensor> call_at(const Operator& op, const std::vector<Arg>& args,
                                TensorOf tensor_of, at::Device device) {
  if (args.size() > op.args.size())
    throw user_error("torch", "{} takes {} arguments, not {}", op.name, op.args.size(),
                     args.size());
  torch::jit::Stack stack;
  stack.reserve(op.args.size());
  for (size_t i = 0; i < op.args.size(); i++) {
    const OperatorArg& schema = op.args[i];
    if (i >= args.size())
      stack.push_back(schema.kind == ArgKind::device ? c10::IValue(device) : schema.fill);
    else if (op.contiguous && schema.kind == ArgKind::tensor)
      stack.push_back(in_one_run(convert(op, schema, args[i], tensor_of, device).toTensor()));
    else
      stack.push_back(convert(op, schema, args[i], tensor_of, device));
  }
  {
    const auto turn = blas_turn();
    if (op.instead == nullptr || !op.instead(&stack)) op.handle.callBoxed(&stack);
  }
  std::vector<at::Tensor> outputs;
  for (c10::IValue& value : stack) {
    if (value.isTensor()) {
      outputs.push_back(std::move(value).toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) outputs.push_back(t);
    } else {
      outputs.emplace_back();
    }
  }
  return outputs;
}

}  // namespace

std::vector<at::Tensor> call(const Operator& op, const std::vector<Arg>& args, TensorOf tensor_of,
                             at::Device device) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_at(op, args, tensor_of, device);
}

std::vector<at::Tensor> call_differentiably(const Operator& op, const std::vector<Arg>& args,
                                            TensorOf tensor_of) {
  // Kernels of ours have a backward pass beside them, not behind them.
  if (op.name.starts_with("motley_torch::"))
    throw user_error("torch", "{} cannot be differentiated by libtorch", op.name);
  return call_at(op, args, tensor_of, at::kCPU);
}

at::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return at::kDouble;
    case DType::f32:
      return at::kFloat;
    case DType::f16:
      return at::kHalf;
    case DType::bf16:
      return at::kBFloat16;
    case DType::i64:
      return at::kLong;
    case DType::i32:
      return at::kInt;
    case DType::i16:
      return at::kShort;
    case DType::i8:
      return at::kChar;
    case DType::u8:
      return at::kByte;
    case DType::b8:
      return at::kBool;
  }
  MOTLEY_CHECK(false, "dtype {}", static_cast<int>(dtype));
}

DType from_torch(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kLong:
      return DType::i64;
    case at::kInt:
      return DType::i32;
    case at::kShort:
      return DType::i16;
    case at::kChar:
      return DType::i8;
    case at::kByte:
      return DType::u8;
    case at::kBool:
      return DType::b8;
    default:
      throw user_error("torch", "a tensor has type {}; graphs hold real numbers and integers",
                       c10::toString(type));
  }
}

TensorSpec spec_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {DType::f32, {-1}};
  return {from_torch(tensor.scalar_type()), tensor.sizes().vec()};
}

}  // namespace motley

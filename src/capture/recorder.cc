#include "capture/recorder.h"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <map>

#include "core/error.h"
#include "graph/op.h"
#include "graph/ops/shapes.h"

namespace motley::recording {
namespace {

// Arithmetic with a number is the same with a number that stands for a tensor; one name for both.
std::string recorded_name(const c10::FunctionSchema& schema) {
  const std::string& base = schema.name();
  if (schema.overload_name() == "Scalar" &&
      (base == "aten::add" || base == "aten::sub" || base == "aten::mul" || base == "aten::div"))
    return base + ".Tensor";
  return operator_name(schema);
}

bool same_types(const Operator& a, const std::vector<size_t>& skip, const Operator& b) {
  size_t j = 0;
  for (size_t i = 0; i < a.args.size(); i++) {
    if (std::find(skip.begin(), skip.end(), i) != skip.end()) continue;
    if (j == b.args.size() || a.args[i].kind != b.args[j].kind ||
        a.args[i].optional != b.args[j].optional)
      return false;
    j++;
  }
  return j == b.args.size();
}

// Draws of random numbers, and tensors like others.
bool reads_no_numbers(const std::string& op) {
  const OpDef* def = find_op(op);
  return (def != nullptr && def->random) || op.find("_like") != std::string::npos;
}

}  // namespace

// Whether training changes a value's numbers.
bool Recorder::varies(ValueId value) {
  for (; walked_ < graph().nodes.size(); ++walked_) {
    const Node& node = graph().nodes[walked_];
    bool any = false;
    if (node.op != "aten::detach" && !reads_no_numbers(node.op))
      for (ValueId v : graph().inputs_of(node)) any = any || varies_[v.index];
    for (ValueId v : node.outputs)
      if (v.valid())
        varies_.push_back(is_float(graph().spec(v).dtype) && (any || trained_.count(v) > 0));
  }
  return varies_[value.index];
}

// What autograd does not follow, though training changes it, has a node that says so: the graph's
// gradients are then the derivative of its forward pass.
at::Tensor Recorder::detached(const at::Tensor& tensor, const std::string& reader) {
  if (tensor.requires_grad() && at::GradMode::is_enabled()) return tensor;
  if (!tensor.is_meta() || !tensor.is_floating_point()) return tensor;
  if (!find(tensor)) return tensor;
  const ValueId value = value_of(tensor, reader);
  if (!varies(value)) return tensor;
  const auto [it, fresh] = stopped_.try_emplace(value);
  if (fresh) it->second = emit("aten::detach", {value}, motley::spec_of(tensor));
  const at::Tensor copy = at::empty_strided(
      tensor.sizes(), tensor.strides(), at::TensorOptions(at::kMeta).dtype(tensor.scalar_type()));
  define(copy, it->second);
  return copy;
}

const OpInfo& Recorder::info_of(const c10::OperatorHandle& handle) {
  const void* key = &handle.schema();
  auto it = infos_.find(key);
  if (it != infos_.end()) return it->second;
  OpInfo& info =
      infos_.emplace(key, OpInfo{digest(handle), recorded_name(handle.schema())}).first->second;
  if (auto h = handlers().find(info.op.name); h != handlers().end()) info.handler = h->second;
  if (const OpDef* def = find_op(info.name)) info.shape = def->shape;
  if (info.shape == nullptr) info.shape = find_shape(info.name);
  for (size_t i = 0; i < info.op.args.size(); i++) {
    const OperatorArg& arg = info.op.args[i];
    info.has_dtype |= arg.kind == ArgKind::dtype;
    info.has_tensors |= arg.kind == ArgKind::tensor || arg.kind == ArgKind::tensors;
    if (!arg.written) continue;
    info.several |= info.written >= 0;
    info.written = static_cast<int>(i);
    info.out = handle.schema().arguments()[i].is_out();
  }
  for (const c10::Argument& arg : handle.schema().arguments())
    info.views |= arg.alias_info() != nullptr && !arg.alias_info()->isWrite();
  info.shaped = reads_no_numbers(info.name);
  if (info.written >= 0 && info.handler == nullptr) {
    info.handler = &Recorder::mutate;
    info.functional = functional_of(info);
  }
  return info;
}

// The operator that returns what `info` writes: "aten::add_.Tensor" has "aten::add.Tensor",
// "aten::add.out" too.
const OpInfo* Recorder::functional_of(const OpInfo& info) {
  if (info.several) return nullptr;
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::FunctionSchema& schema = info.op.handle.schema();
  std::string base = schema.name();
  std::vector<size_t> skip;
  if (info.out)
    skip.push_back(static_cast<size_t>(info.written));
  else if (base.back() == '_')
    base.pop_back();
  static const std::unordered_map<std::string, c10::OperatorName> irregular = {
      {"aten::bernoulli_.float", {"aten::bernoulli", "p"}},
      {"aten::normal_", {"aten::normal_functional", ""}},
  };
  if (auto it = irregular.find(info.op.name); it != irregular.end())
    return &info_of(
        dispatcher.findSchemaOrThrow(it->second.name.c_str(), it->second.overload_name.c_str()));
  auto usable = [&](const c10::OperatorHandle& handle) {
    for (const c10::Argument& a : handle.schema().arguments())
      if (a.alias_info() != nullptr && a.alias_info()->isWrite()) return false;
    return same_types(info.op, skip, digest(handle));
  };
  if (auto handle = dispatcher.findSchema({base, schema.overload_name()}))
    if (usable(*handle)) return &info_of(*handle);
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name != base) continue;
    auto handle = dispatcher.findSchema(name);
    if (handle && usable(*handle)) return &info_of(*handle);
  }
  return nullptr;
}

bool is_literal(const at::Tensor& t) {
  return !t.is_meta() && t.unsafeGetTensorImpl()->is_wrapped_number();
}

Arg Recorder::to_arg(const OpInfo& info, const OperatorArg& schema, const c10::IValue& value) {
  if (value.isNone()) return {};
  switch (schema.kind) {
    case ArgKind::tensor: {
      const at::Tensor& t = value.toTensor();
      if (!t.defined()) return {};
      if (is_literal(t)) {
        const at::Scalar number = t.item();
        if (number.isBoolean()) return number.toBool();
        if (number.isIntegral(false)) return number.toLong();
        if (number.isFloatingPoint()) return number.toDouble();
        break;
      }
      return value_of(t, info.name);
    }
    case ArgKind::tensors:
    case ArgKind::optional_tensors: {
      std::vector<ValueId> values;
      for (const c10::IValue& element : value.toListRef()) {
        const bool hole = element.isNone() || !element.toTensor().defined();
        values.push_back(hole ? ValueId() : value_of(element.toTensor(), info.name));
      }
      return values;
    }
    case ArgKind::scalar:
      if (value.isInt()) return value.toInt();
      if (value.isDouble()) return value.toDouble();
      if (value.isBool()) return value.toBool();
      break;
    case ArgKind::integer:
      if (value.isInt()) return value.toInt();
      break;
    case ArgKind::real:
      return value.toDouble();
    case ArgKind::boolean:
      return value.toBool();
    case ArgKind::integers:
      if (value.isIntList()) return value.toIntVector();
      break;
    case ArgKind::reals:
      return value.toDoubleVector();
    case ArgKind::booleans: {
      std::vector<int64_t> flags;
      for (bool b : value.toBoolList()) flags.push_back(b);
      return flags;
    }
    case ArgKind::text:
      return value.toStringRef();
    case ArgKind::dtype:
      return from_torch(static_cast<at::ScalarType>(value.toInt()));
    case ArgKind::device:
    case ArgKind::left_out:
      return {};
    case ArgKind::unsupported:
      break;
  }
  throw user_error("capture", "{}: argument '{}' cannot be written in a graph", info.op.name,
                   schema.name);
}

std::vector<Arg> Recorder::to_args(const OpInfo& info, const c10::IValue* values) {
  std::vector<Arg> args;
  args.reserve(info.op.args.size());
  for (size_t i = 0; i < info.op.args.size(); i++)
    args.push_back(to_arg(info, info.op.args[i], values[i]));
  return args;
}

c10::IValue* arguments(const OpInfo& info, Stack* stack) {
  return stack->data() + (stack->size() - info.op.args.size());
}

// Replaces the arguments on the stack by one result.
void finish(const OpInfo& info, Stack* stack, c10::IValue result) {
  stack->resize(stack->size() - info.op.args.size());
  stack->push_back(std::move(result));
}

// A CPU tensor of one number beside a real tensor with dimensions does not take part in type
// promotion, as a wrapped number does not; otherwise it is adopted.
at::Tensor Recorder::adopt_operand(const OpInfo& info, const c10::IValue* args, size_t i) {
  const at::Tensor& t = args[i].toTensor();
  const bool arithmetic = info.name == "aten::add.Tensor" || info.name == "aten::sub.Tensor" ||
                          info.name == "aten::mul.Tensor" || info.name == "aten::div.Tensor";
  if (arithmetic && t.dim() == 0 && t.is_floating_point() && args[1 - i].isTensor()) {
    const at::Tensor& other = args[1 - i].toTensor();
    if (other.dim() > 0 && other.is_floating_point()) {
      check_outside(t, info.name);
      result.outside.push_back(t);
      at::Tensor number = t.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return number;
    }
  }
  return adopt(t, info.name);
}

void Recorder::handle(const c10::OperatorHandle& handle, Stack* stack) {
  const OpInfo& info = info_of(handle);
  const bool lifts = info.handler == &Recorder::lift_fresh;
  const bool follows = phase == Phase::forward && !info.views && !info.shaped;
  c10::IValue* args = arguments(info, stack);
  const bool averages = info.handler == &Recorder::batch_norm && args[5].toBool();
  const auto is_written = [&](size_t i) {
    return static_cast<int>(i) == info.written || (averages && (i == 3 || i == 4));
  };
  for (size_t i = 0; i < info.op.args.size(); i++) {
    const ArgKind kind = info.op.args[i].kind;
    if (kind == ArgKind::device) {
      if (!args[i].isNone() || !info.has_tensors) args[i] = at::Device(at::kMeta);
    } else if (recording && kind == ArgKind::tensor && args[i].isTensor()) {
      const at::Tensor& t = args[i].toTensor();
      if (t.defined() && !t.is_meta() && !is_literal(t))
        args[i] = lifts ? adopt(t, info.name, true) : adopt_operand(info, args, i);
      else if (t.defined() && follows && !is_written(i))
        args[i] = detached(t, info.name);
    } else if (recording && (kind == ArgKind::tensors || kind == ArgKind::optional_tensors) &&
               args[i].isList()) {
      c10::List<c10::IValue> list = args[i].toList();
      for (size_t j = 0; j < list.size(); j++) {
        const c10::IValue element = list.get(j);
        if (!element.isTensor() || !element.toTensor().defined()) continue;
        if (!element.toTensor().is_meta())
          list.set(j, adopt(element.toTensor(), info.name));
        else if (follows)
          list.set(j, detached(element.toTensor(), info.name));
      }
    } else if (recording && kind == ArgKind::left_out && args[i].isGenerator()) {
      throw user_error("capture",
                       "{} draws random numbers from a generator of its own, whose state a step "
                       "does not keep",
                       info.op.name);
    }
  }
  if (!recording) {
    // The Meta device holds no numbers to change.
    if (info.written >= 0 && !info.out && handle.schema().returns().size() == 1)
      finish(info, stack, args[info.written]);
    else
      handle.callBoxed(stack);
  } else if (info.handler != nullptr) {
    (this->*info.handler)(info, stack);
  } else {
    record(info, stack);
  }
}

namespace {

// Above these sizes operators are not tried on the CPU, first or at all.
constexpr int64_t kQuickTrial = int64_t{1} << 18, kLargestTrial = int64_t{1} << 26;

// What a Meta tensor could be on the CPU. Integers are zero, which is a valid index and count
// wherever there is one; real numbers are those of a well-behaved matrix.
at::Tensor stand_in(const at::Tensor& t, bool other) {
  at::Tensor out =
      at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(at::kCPU).dtype(t.scalar_type()));
  if (!t.is_floating_point()) return t.scalar_type() == at::kBool ? out.fill_(other) : out.zero_();
  out.fill_(other ? 0.5 : 0.25);
  if (t.dim() >= 2 && t.size(-1) == t.size(-2))
    out.diagonal(0, -2, -1).fill_(static_cast<double>(t.size(-1)) + (other ? 2.0 : 1.0));
  return out;
}

// The arguments of a call with CPU tensors in the place of Meta tensors, as `replaced` makes them.
template <typename F>
void replace_tensors(const OpInfo& info, Stack* arguments, F replaced) {
  for (size_t i = 0; i < arguments->size(); i++) {
    c10::IValue& value = (*arguments)[i];
    const ArgKind kind = info.op.args[i].kind;
    if (value.isNone()) continue;
    if (kind == ArgKind::device) {
      value = at::Device(at::kCPU);
    } else if (kind == ArgKind::tensor) {
      if (value.toTensor().defined() && !is_literal(value.toTensor()))
        value = replaced(value.toTensor());
    } else if (kind == ArgKind::tensors) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(replaced(t));
      value = list;
    } else if (kind == ArgKind::optional_tensors) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const c10::IValue& element : value.toListRef())
        list.push_back(element.isNone() || !element.toTensor().defined()
                           ? c10::optional<at::Tensor>()
                           : c10::make_optional(replaced(element.toTensor())));
      value = list;
    }
  }
}

// The tensors that a call left on the stack; false if there is something else.
bool tensors_of(const Stack& stack, std::vector<at::Tensor>* tensors) {
  for (const c10::IValue& value : stack) {
    if (value.isTensor())
      tensors->push_back(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) tensors->push_back(t);
    else
      return false;
  }
  return true;
}

int64_t elements_of(const OpInfo& info, Stack arguments) {
  int64_t n = 0;
  replace_tensors(info, &arguments, [&](const at::Tensor& t) {
    n += t.numel();
    return t;
  });
  return n;
}

// What an operator returns on the CPU for other numbers of the same shapes, as Meta tensors of the
// same strides; empty if it fails for all. Throws UserError if the shapes depend on the numbers.
std::vector<at::Tensor> trial(const OpInfo& info, const Stack& arguments) {
  std::vector<at::Tensor> found;
  for (const bool other : {false, true}) {
    Stack stack = arguments;
    std::vector<at::Tensor> outputs;
    replace_tensors(info, &stack, [&](const at::Tensor& t) { return stand_in(t, other); });
    try {
      info.op.handle.callBoxed(&stack);
    } catch (const std::exception&) {
      continue;
    }
    if (!tensors_of(stack, &outputs)) return {};
    for (at::Tensor& t : outputs)
      if (t.defined())
        t = t.layout() == at::kStrided
                ? at::empty_strided(t.sizes(), t.strides(),
                                    at::TensorOptions(at::kMeta).dtype(t.scalar_type()))
                : t;
    for (size_t i = 0; i < found.size() && i < outputs.size(); i++)
      if (found[i].defined() != outputs[i].defined() ||
          (found[i].defined() && !found[i].sizes().equals(outputs[i].sizes())))
        throw user_error("capture",
                         "{} returns a tensor whose shape depends on the numbers of its operands; "
                         "control flow and shapes that depend on values cannot be captured",
                         info.op.name);
    found = std::move(outputs);
  }
  return found;
}

// Finds the shapes of results by running the op on the CPU with small sizes: each size of an
// operand is replaced by a prime of its own, and the primes in the results are replaced back.
// Empty: that does not explain the results.
std::vector<TensorSpec> probe(const OpInfo& info, Stack arguments,
                              const std::vector<int64_t>& primes) {
  std::map<int64_t, int64_t> small = {{1, 1}}, large = {{1, 1}};
  int64_t rank = 0;
  replace_tensors(info, &arguments, [&](const at::Tensor& t) {
    std::vector<int64_t> sizes;
    rank = std::max(rank, t.dim());
    for (int64_t size : t.sizes()) {
      if (!small.count(size) && small.size() <= primes.size() && size > 1) {
        const int64_t prime = primes[small.size() - 1];
        small[size] = prime;
        large[prime] = size;
      }
      sizes.push_back(small.count(size) ? small[size] : 0);
    }
    return at::zeros(sizes, at::TensorOptions(at::kCPU).dtype(t.scalar_type()));
  });
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::IValue& value = arguments[i];
    if (info.op.args[i].kind == ArgKind::optional_tensors) return {};
    if (info.op.args[i].kind == ArgKind::integers && !value.isNone())
      for (int64_t d : value.toIntVector())  // dimensions are fine, sizes are not
        if (d < -rank || d >= rank) return {};
  }
  std::vector<TensorSpec> specs;
  try {
    info.op.handle.callBoxed(&arguments);
  } catch (const std::exception&) {
    return {};
  }
  for (const c10::IValue& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) return {};
    TensorSpec spec = motley::spec_of(value.toTensor());
    for (int64_t& size : spec.shape) {
      if (!large.count(size)) return {};
      size = large[size];
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

bool returns_views(const OpInfo& info) {
  const auto& arguments = info.op.handle.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& a) { return a.alias_info() != nullptr; });
}

}  // namespace

// Meta kernels may be missing, or be there and wrong: operators that the table lacks are tried on
// the CPU first where that is quick.
std::vector<at::Tensor> Recorder::evaluate(const OpInfo& info, Node* node, Stack* stack) {
  std::vector<at::Tensor> outputs;
  const size_t below = stack->size() - info.op.args.size();
  auto returned = [&] {
    stack->resize(below);
    for (const at::Tensor& t : outputs) stack->push_back(t);
    return outputs;
  };
  auto of_specs = [&](const std::vector<TensorSpec>& specs) {
    for (const TensorSpec& spec : specs) {
      outputs.emplace_back();
      if (spec.shape != Shape{-1})
        outputs.back() =
            at::empty(spec.shape, at::TensorOptions(at::kMeta).dtype(to_torch(spec.dtype)));
    }
    return returned();
  };
  if (info.shape != nullptr) return of_specs(info.shape(graph(), *node));
  const Stack arguments(stack->end() - static_cast<int64_t>(info.op.args.size()), stack->end());
  const bool may_try = info.has_tensors && !returns_views(info);
  const int64_t elements = elements_of(info, arguments);
  const bool lists = std::any_of(
      info.op.handle.schema().returns().begin(), info.op.handle.schema().returns().end(),
      [](const c10::Argument& r) { return r.type()->kind() != c10::TypeKind::TensorType; });
  if (may_try && !lists && find_op(info.name) == nullptr && elements <= kQuickTrial) {
    outputs = trial(info, arguments);
    if (!outputs.empty()) return returned();
  }
  std::exception_ptr failure;
  try {
    info.op.handle.callBoxed(stack);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    std::vector<TensorSpec> specs;
    if (may_try && !lists && elements <= kLargestTrial) outputs = trial(info, arguments);
    if (outputs.empty() && may_try) {
      specs = probe(info, arguments, {2, 3, 5, 7, 11, 13, 17, 19});
      if (specs != probe(info, arguments, {5, 2, 3, 13, 7, 19, 11, 17})) specs.clear();
    }
    if (outputs.empty() && specs.empty()) {
      try {
        std::rethrow_exception(failure);
      } catch (const c10::NotImplementedError&) {
      }
      throw user_error("capture",
                       "{} cannot be captured: neither libtorch nor the op table knows the shape "
                       "of its result",
                       info.name);
    }
    failure = nullptr;
    if (forget_error) forget_error();
    return outputs.empty() ? of_specs(specs) : returned();
  }
  if (!tensors_of(Stack(stack->begin() + static_cast<int64_t>(below), stack->end()), &outputs))
    throw user_error("capture", "{} returns something that is not a tensor", info.name);
  return outputs;
}

std::vector<at::Tensor> Recorder::record(const OpInfo& info, Stack* stack) {
  if (find_op(info.name) == nullptr && info.op.handle.hasTag(at::Tag::nondeterministic_seeded))
    throw user_error("capture", "{} draws random numbers, which would differ from device to device",
                     info.op.name);
  const c10::IValue* args = arguments(info, stack);
  Node node{info.name, to_args(info, args), {}, phase};
  Place parent;
  if (!info.op.args.empty() && info.op.args[0].kind == ArgKind::tensor && args[0].isTensor() &&
      args[0].toTensor().defined() && args[0].toTensor().is_meta())
    parent = find(args[0].toTensor());
  std::vector<at::Tensor> outputs = evaluate(info, &node, stack);
  for (const at::Tensor& t : outputs)
    if (t.defined() && t.layout() != at::kStrided)
      throw user_error("capture",
                       "{} makes a sparse tensor; graphs hold dense real numbers and integers, so "
                       "use its dense form",
                       info.op.name);
  if (info.has_dtype && !info.has_tensors)
    for (size_t i = 0; i < node.args.size(); i++)
      if (info.op.args[i].kind == ArgKind::dtype)
        node.args[i] = from_torch(outputs[0].scalar_type());
  for (const at::Tensor& t : outputs) {
    if (t.defined() && stores(t)) {
      record_views(info, std::move(node), parent, outputs);
      return outputs;
    }
  }
  std::vector<TensorSpec> specs;
  for (const at::Tensor& t : outputs) specs.push_back(motley::spec_of(t));
  const NodeId id = graph().add(std::move(node.op), std::move(node.args), specs, phase);
  for (size_t i = 0; i < outputs.size(); i++)
    if (outputs[i].defined()) define(outputs[i], graph().node(id).outputs[i]);
  return outputs;
}

}  // namespace motley::recording

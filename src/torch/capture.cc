#include "torch/capture.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>

#include "core/error.h"
#include "graph/op.h"
#include "graph/ops/shapes.h"
#include "torch/dispatch.h"
#include "torch/module.h"

namespace motley {
namespace {

using torch::jit::Stack;

constexpr int64_t kMaxConstant = 4096;

// A tensor's place in its storage.
struct Geometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType type = at::kFloat;
  friend bool operator==(const Geometry&, const Geometry&) = default;

  bool contiguous() const {
    int64_t expected = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }
  int64_t numel() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }
};

bool matches(const Geometry& g, const at::Tensor& t) {
  return g.offset == t.storage_offset() && g.type == t.scalar_type() && t.sizes().equals(g.sizes) &&
         t.strides().equals(g.strides);
}

Geometry geometry_of(const at::Tensor& t) {
  return {t.sizes().vec(), t.strides().vec(), t.storage_offset(), t.scalar_type()};
}

// One way to look at a storage.
struct View {
  Geometry geometry;
  int parent = -1;        // -1: the base
  std::string op;         // makes it from the parent ...
  std::vector<Arg> args;  // ... with these arguments after the tensor
  ValueId value;
  int64_t version = -1;  // of the storage when `value` was recorded
};

struct Stored {
  c10::Storage storage;  // held, so that its address stays its own
  std::vector<View> views;
  int64_t version = 0;
};

// A tensor of the step: a view of a storage.
struct Place {
  Stored* stored = nullptr;
  int view = -1;
  explicit operator bool() const { return stored != nullptr; }
};

class Recorder;
using Handler = void (Recorder::*)(const struct OpInfo&, Stack*);

// What the recorder needs to know of an operator; made at its first call.
struct OpInfo {
  Operator op;
  std::string name;  // as recorded
  Handler handler = nullptr;
  std::vector<TensorSpec> (*shape)(const Graph&, const Node&) = nullptr;
  int written = -1;      // the argument changed in place
  bool several = false;  // changes more than one argument
  bool out = false;      // the changed argument only receives the result
  const OpInfo* twin = nullptr;
  bool has_dtype = false;
  bool has_tensors = false;
};

// A view's op with negative dimensions resolved and sizes made explicit.
struct ViewOp {
  std::string op;
  std::vector<Arg> args;
};

int64_t wrap(int64_t dim, size_t rank) { return dim < 0 ? dim + static_cast<int64_t>(rank) : dim; }

class Recorder {
 public:
  Capture result;

  // While false, calls run on the Meta device and nothing is recorded.
  bool recording = false;
  Phase phase = Phase::forward;

  void handle(const c10::OperatorHandle& handle, Stack* stack);

  bool known(const at::Tensor& tensor) { return static_cast<bool>(find(tensor)); }
  bool stores(const at::Tensor& tensor) const {
    return by_storage_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
  }
  // Makes `tensor` the base of its storage.
  void define(const at::Tensor& tensor, ValueId value);
  ValueId value_of(const at::Tensor& tensor, const std::string& reader);
  // Whether a defined tensor was written to since.
  bool changed(const at::Tensor& tensor);
  static std::vector<std::string> refused();

 private:
  Graph& graph() { return result.graph; }
  static const std::unordered_map<std::string, Handler>& handlers();
  const OpInfo& info_of(const c10::OperatorHandle& handle);
  const OpInfo* twin_of(const OpInfo& info);

  ValueId emit(const std::string& op, std::vector<Arg> args, const TensorSpec& spec);
  Place find(const at::Tensor& tensor);
  ValueId value_at(Place place);
  void write(Place place, ValueId value);
  ValueId undo(const View& view, const View& parent, ValueId old_parent, ValueId value);
  int add_view(Stored* stored, int parent, Geometry geometry, ViewOp op);
  at::Tensor adopt(const at::Tensor& tensor, const std::string& reader);
  at::Tensor adopt_operand(const OpInfo& info, const c10::IValue* args, size_t i);

  Arg to_arg(const OpInfo& info, const OperatorArg& schema, const c10::IValue& value);
  std::vector<Arg> to_args(const OpInfo& info, const c10::IValue* values);
  // Runs an op on the Meta device, or its shape function.
  std::vector<at::Tensor> evaluate(const OpInfo& info, Node* node, Stack* stack);
  // Records a functional call; its arguments on the stack are replaced by its results.
  std::vector<at::Tensor> record(const OpInfo& info, Stack* stack);
  void record_views(const OpInfo& info, Node node, Place parent,
                    const std::vector<at::Tensor>& outputs);
  ViewOp canonical_view(const Node& node, const Geometry& parent, const Geometry& out, size_t index,
                        const std::vector<at::Tensor>& outputs);
  ValueId cast(ValueId value, const TensorSpec& spec);

  void mutate(const OpInfo& info, Stack* stack);
  void as_strided(const OpInfo& info, Stack* stack);
  bool find_like(Stored* stored, const Geometry& wanted);
  bool unflatten(Stored* stored, const Geometry& wanted);
  void batch_norm(const OpInfo& info, Stack* stack);
  void batch_norm_backward(const OpInfo& info, Stack* stack);
  void copy(const OpInfo& info, Stack* stack);
  void fill(const OpInfo& info, Stack* stack);
  void clone(const OpInfo& info, Stack* stack);
  void to_copy(const OpInfo& info, Stack* stack);
  void factory(const OpInfo& info, Stack* stack);
  void empty_like(const OpInfo& info, Stack* stack);
  void index_put(const OpInfo& info, Stack* stack);
  void refuse_value(const OpInfo& info, Stack* stack);
  void refuse_storage(const OpInfo& info, Stack* stack);

  std::unordered_map<const void*, OpInfo> infos_;  // by the address of the schema
  std::vector<std::unique_ptr<Stored>> stored_;
  std::unordered_map<const c10::StorageImpl*, Stored*> by_storage_;
  std::unordered_map<const c10::StorageImpl*, at::Tensor>
      adopted_;                           // CPU tensors and their Meta twins
  std::vector<at::Tensor> adopted_from_;  // held, so that their storages' addresses stay their own
};

// ---- operators ---------------------------------------------------------------------------------

// Arithmetic with a number is the same with a number that stands for a tensor; one name for both.
std::string recorded_name(const c10::FunctionSchema& schema) {
  const std::string& base = schema.name();
  if (schema.overload_name() == "Scalar" &&
      (base == "aten::add" || base == "aten::sub" || base == "aten::mul" || base == "aten::div"))
    return base + ".Tensor";
  return operator_name(schema);
}

std::vector<std::string> Recorder::refused() {
  std::vector<std::string> names;
  for (const auto& [name, handler] : handlers())
    if (handler == &Recorder::refuse_value || handler == &Recorder::refuse_storage)
      names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
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
  if (info.written >= 0 && info.handler == nullptr) {
    info.handler = &Recorder::mutate;
    info.twin = twin_of(info);
  }
  return info;
}

// The operator that returns what `info` writes: "aten::add_.Tensor" has "aten::add.Tensor",
// "aten::add.out" too.
const OpInfo* Recorder::twin_of(const OpInfo& info) {
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

// ---- values, views and storages ----------------------------------------------------------------

ValueId Recorder::emit(const std::string& op, std::vector<Arg> args, const TensorSpec& spec) {
  const NodeId node = graph().add(op, std::move(args), {spec}, phase);
  return graph().node(node).outputs[0];
}

TensorSpec spec_of(const Geometry& g) { return {from_torch(g.type), g.sizes}; }

void Recorder::define(const at::Tensor& tensor, ValueId value) {
  auto stored = std::make_unique<Stored>();
  stored->storage = tensor.storage();
  stored->views.push_back({geometry_of(tensor), -1, "", {}, value, 0});
  by_storage_[tensor.storage().unsafeGetStorageImpl()] = stored.get();
  stored_.push_back(std::move(stored));
}

Place Recorder::find(const at::Tensor& tensor) {
  auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == by_storage_.end()) return {};
  const std::vector<View>& views = it->second->views;
  for (size_t i = 0; i < views.size(); i++)
    if (matches(views[i].geometry, tensor)) return {it->second, static_cast<int>(i)};
  return {};
}

ValueId Recorder::value_at(Place place) {
  View& view = place.stored->views[static_cast<size_t>(place.view)];
  if (view.version != place.stored->version) {
    MOTLEY_CHECK(view.parent >= 0);
    std::vector<Arg> args = {value_at({place.stored, view.parent})};
    args.insert(args.end(), view.args.begin(), view.args.end());
    view.value = emit(view.op, std::move(args), spec_of(view.geometry));
    view.version = place.stored->version;
  }
  return view.value;
}

// The parent's value after one of its views was given `value`.
ValueId Recorder::undo(const View& view, const View& parent, ValueId old_parent, ValueId value) {
  const TensorSpec spec = spec_of(parent.geometry);
  if (view.op == "aten::view") return emit("aten::view", {value, spec.shape}, spec);
  if (view.op == "aten::t" || view.op == "aten::transpose.int") {
    std::vector<Arg> args = {value};
    args.insert(args.end(), view.args.begin(), view.args.end());
    return emit(view.op, std::move(args), spec);
  }
  if (view.op == "aten::permute") {
    const auto& dims = std::get<std::vector<int64_t>>(view.args[0]);
    std::vector<int64_t> inverse(dims.size());
    for (size_t i = 0; i < dims.size(); i++)
      inverse[static_cast<size_t>(wrap(dims[i], dims.size()))] = static_cast<int64_t>(i);
    return emit("aten::permute", {value, inverse}, spec);
  }
  const char* scatter = view.op == "aten::slice.Tensor" ? "aten::slice_scatter"
                        : view.op == "aten::select.int" ? "aten::select_scatter"
                        : view.op == "aten::diagonal"   ? "aten::diagonal_scatter"
                                                        : nullptr;
  if (scatter == nullptr)
    throw user_error("capture", "the model writes in place through {}, which has no inverse",
                     view.op);
  std::vector<Arg> args = {old_parent, value};
  args.insert(args.end(), view.args.begin(), view.args.end());
  return emit(scatter, std::move(args), spec);
}

void Recorder::write(Place place, ValueId value) {
  Stored& stored = *place.stored;
  // Bottom up: the new value of each ancestor, from its old one.
  std::vector<std::pair<int, ValueId>> fresh = {{place.view, value}};
  for (int at = place.view; stored.views[static_cast<size_t>(at)].parent >= 0;) {
    const View& view = stored.views[static_cast<size_t>(at)];
    const bool scatters = view.op == "aten::slice.Tensor" || view.op == "aten::select.int" ||
                          view.op == "aten::diagonal";
    const ValueId old = scatters ? value_at({&stored, view.parent}) : ValueId();
    const View& parent = stored.views[static_cast<size_t>(view.parent)];
    value = undo(view, parent, old, value);
    at = view.parent;
    fresh.push_back({at, value});
  }
  stored.version++;
  for (const auto& [at, v] : fresh) {
    stored.views[static_cast<size_t>(at)].value = v;
    stored.views[static_cast<size_t>(at)].version = stored.version;
  }
}

int Recorder::add_view(Stored* stored, int parent, Geometry geometry, ViewOp op) {
  for (size_t i = 0; i < stored->views.size(); i++)
    if (stored->views[i].geometry == geometry) return static_cast<int>(i);
  stored->views.push_back(
      {std::move(geometry), parent, std::move(op.op), std::move(op.args), {}, -1});
  return static_cast<int>(stored->views.size()) - 1;
}

bool Recorder::changed(const at::Tensor& tensor) {
  auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  return it != by_storage_.end() && it->second->version > 0;
}

ValueId Recorder::value_of(const at::Tensor& tensor, const std::string& reader) {
  if (Place place = find(tensor)) return value_at(place);
  throw user_error("capture",
                   "{} reads a tensor {} that is neither a parameter, a buffer, an input nor made "
                   "in the step; register it as a buffer",
                   reader, to_string(motley::spec_of(tensor)));
}

// A Meta tensor that stands for a CPU tensor from outside, whose numbers become a constant.
at::Tensor Recorder::adopt(const at::Tensor& tensor, const std::string& reader) {
  at::Tensor& twin = adopted_[tensor.storage().unsafeGetStorageImpl()];
  if (!twin.defined()) {
    if (tensor.requires_grad())
      throw user_error("capture",
                       "{} reads a tensor {} that takes a gradient but is no parameter of the "
                       "model; register it as one",
                       reader, to_string(motley::spec_of(tensor)));
    if (tensor.numel() > kMaxConstant)
      throw user_error("capture",
                       "{} reads a tensor {} from outside the step; register it as a buffer, as "
                       "constants have at most {} elements",
                       reader, to_string(motley::spec_of(tensor)), kMaxConstant);
    const at::Tensor doubles = tensor.to(at::kDouble).contiguous();
    const double* data = doubles.data_ptr<double>();
    const ValueId value = graph().add_constant(motley::spec_of(tensor),
                                               std::vector<double>(data, data + doubles.numel()));
    twin = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
    define(twin, value);
    adopted_from_.push_back(tensor);
  }
  if (!twin.sizes().equals(tensor.sizes()))
    throw user_error("capture", "{} reads a view of a tensor from outside the step", reader);
  return twin;
}

// ---- arguments ---------------------------------------------------------------------------------

// A number that libtorch wrapped.
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
      at::Tensor number = t.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return number;
    }
  }
  return adopt(t, info.name);
}

// ---- recording ---------------------------------------------------------------------------------

void Recorder::handle(const c10::OperatorHandle& handle, Stack* stack) {
  const OpInfo& info = info_of(handle);
  c10::IValue* args = arguments(info, stack);
  for (size_t i = 0; i < info.op.args.size(); i++) {
    const ArgKind kind = info.op.args[i].kind;
    if (kind == ArgKind::device) {
      if (!args[i].isNone() || !info.has_tensors) args[i] = at::Device(at::kMeta);
    } else if (recording && kind == ArgKind::tensor && args[i].isTensor()) {
      const at::Tensor& t = args[i].toTensor();
      if (t.defined() && !t.is_meta() && !is_literal(t)) args[i] = adopt_operand(info, args, i);
    } else if (recording && (kind == ArgKind::tensors || kind == ArgKind::optional_tensors) &&
               args[i].isList()) {
      c10::List<c10::IValue> list = args[i].toList();
      for (size_t j = 0; j < list.size(); j++) {
        const c10::IValue element = list.get(j);
        if (element.isTensor() && element.toTensor().defined() && !element.toTensor().is_meta())
          list.set(j, adopt(element.toTensor(), info.name));
      }
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

// Finds the shapes of results by running the op on the CPU with small sizes: each size of an
// operand is replaced by a prime of its own, and the primes in the results are replaced back.
// Empty: that does not explain the results.
std::vector<TensorSpec> probe(const OpInfo& info, Stack arguments,
                              const std::vector<int64_t>& primes) {
  std::map<int64_t, int64_t> small = {{1, 1}}, large = {{1, 1}};
  int64_t rank = 0;
  auto shrink = [&](const at::Tensor& t) {
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
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = arguments[i];
    const ArgKind kind = info.op.args[i].kind;
    if (value.isNone()) continue;
    if (kind == ArgKind::device) {
      value = at::Device(at::kCPU);
    } else if (kind == ArgKind::tensor && value.toTensor().defined() &&
               !is_literal(value.toTensor())) {
      value = shrink(value.toTensor());
    } else if (kind == ArgKind::tensors) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(shrink(t));
      value = list;
    } else if (kind == ArgKind::optional_tensors) {
      return {};
    } else if (kind == ArgKind::integers) {  // dimensions are fine, sizes are not
      for (int64_t d : value.toIntVector())
        if (d < -rank || d >= rank) return {};
    }
  }
  std::vector<TensorSpec> specs;
  try {
    info.op.handle.callBoxed(&arguments);
  } catch (const c10::Error&) {
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

std::vector<at::Tensor> Recorder::evaluate(const OpInfo& info, Node* node, Stack* stack) {
  std::vector<at::Tensor> outputs;
  const size_t below = stack->size() - info.op.args.size();
  auto return_specs = [&](const std::vector<TensorSpec>& specs) {
    stack->resize(below);
    for (const TensorSpec& spec : specs) {
      outputs.emplace_back();
      if (spec.shape != Shape{-1})
        outputs.back() =
            at::empty(spec.shape, at::TensorOptions(at::kMeta).dtype(to_torch(spec.dtype)));
      stack->push_back(outputs.back());
    }
  };
  if (info.shape != nullptr) {
    return_specs(info.shape(graph(), *node));
    return outputs;
  }
  const Stack arguments(stack->end() - static_cast<int64_t>(info.op.args.size()), stack->end());
  // Meta kernels may be missing, or be there and wrong.
  std::exception_ptr failure;
  bool missing = false;
  try {
    info.op.handle.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    missing = true;
  } catch (...) {
    failure = std::current_exception();
  }
  if (missing || failure) {
    const std::vector<TensorSpec> specs = probe(info, arguments, {2, 3, 5, 7, 11, 13, 17, 19});
    if (!specs.empty() && specs == probe(info, arguments, {5, 2, 3, 13, 7, 19, 11, 17})) {
      return_specs(specs);
      return outputs;
    }
    if (failure) std::rethrow_exception(failure);
    throw user_error("capture",
                     "{} cannot be captured: neither libtorch nor the op table knows the shape of "
                     "its result",
                     info.name);
  }
  for (size_t i = below; i < stack->size(); i++) {
    const c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      outputs.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) outputs.push_back(t);
    } else {
      throw user_error("capture", "{} returns something that is not a tensor", info.name);
    }
  }
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

ViewOp Recorder::canonical_view(const Node& node, const Geometry& parent, const Geometry& out,
                                size_t index, const std::vector<at::Tensor>& outputs) {
  const size_t rank = parent.sizes.size();
  auto integer = [&](size_t i) { return std::get<int64_t>(node.args[i]); };
  auto dim = [&](size_t i) { return wrap(integer(i), rank); };
  const std::string& op = node.op;
  if (op == "aten::view" || op == "aten::_unsafe_view" || op == "aten::_reshape_alias" ||
      op == "aten::reshape" || op == "aten::unsqueeze" || op.starts_with("aten::squeeze"))
    return {"aten::view", {out.sizes}};
  if (op == "aten::expand") return {op, {out.sizes, false}};
  if (op == "aten::transpose.int") return {op, {dim(1), dim(2)}};
  if (op == "aten::permute") {
    auto dims = std::get<std::vector<int64_t>>(node.args[1]);
    for (int64_t& d : dims) d = wrap(d, rank);
    return {op, {dims}};
  }
  if (op == "aten::slice.Tensor") {
    const int64_t d = dim(1), size = parent.sizes[static_cast<size_t>(d)];
    auto bound = [&](size_t i, int64_t missing) {
      const auto* given = std::get_if<int64_t>(&node.args[i]);
      if (given == nullptr) return missing;
      return std::clamp(*given < 0 ? *given + size : *given, int64_t{0}, size);
    };
    const int64_t start = bound(2, 0);
    return {op, {d, start, std::max(start, bound(3, size)), integer(4)}};
  }
  if (op == "aten::select.int") {
    const int64_t d = dim(1);
    return {op,
            {d, integer(2) < 0 ? integer(2) + parent.sizes[static_cast<size_t>(d)] : integer(2)}};
  }
  if (op == "aten::unbind.int") return {"aten::select.int", {dim(1), static_cast<int64_t>(index)}};
  if (op == "aten::split.Tensor" || op == "aten::split_with_sizes" ||
      op == "aten::unsafe_split.Tensor" || op == "aten::unsafe_split_with_sizes") {
    const int64_t d = dim(2);
    int64_t start = 0;
    for (size_t i = 0; i < index; i++) start += outputs[i].size(d);
    return {"aten::slice.Tensor",
            {d, start, start + out.sizes[static_cast<size_t>(d)], int64_t{1}}};
  }
  return {op, std::vector<Arg>(node.args.begin() + 1, node.args.end())};
}

void Recorder::record_views(const OpInfo& info, Node node, Place parent,
                            const std::vector<at::Tensor>& outputs) {
  if (!parent)
    throw user_error("capture", "{} returns a view of an argument that is not its first",
                     info.op.name);
  Stored* stored = parent.stored;
  const bool fresh =
      outputs.size() > 1 &&
      std::none_of(outputs.begin(), outputs.end(), [&](const at::Tensor& t) { return known(t); });
  std::vector<ValueId> values;
  if (fresh) {
    std::vector<TensorSpec> specs;
    for (const at::Tensor& t : outputs) specs.push_back(motley::spec_of(t));
    values = graph().node(graph().add(node.op, node.args, specs, phase)).outputs;
  }
  for (size_t i = 0; i < outputs.size(); i++) {
    Geometry out = geometry_of(outputs[i]);
    // add_view may move the views, so the parent's geometry is copied.
    const Geometry from = stored->views[static_cast<size_t>(parent.view)].geometry;
    ViewOp op = canonical_view(node, from, out, i, outputs);
    const int view = add_view(stored, parent.view, std::move(out), std::move(op));
    if (fresh) {
      stored->views[static_cast<size_t>(view)].value = values[i];
      stored->views[static_cast<size_t>(view)].version = stored->version;
    } else {
      value_at({stored, view});
    }
  }
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

// ---- as_strided --------------------------------------------------------------------------------

void Recorder::as_strided(const OpInfo& info, Stack* stack) {
  const at::Tensor self = arguments(info, stack)[0].toTensor();
  value_of(self, info.name);
  info.op.handle.callBoxed(stack);
  const at::Tensor& out = stack->back().toTensor();
  if (known(out)) return;
  Stored* stored = find(self).stored;
  const Geometry wanted = geometry_of(out);
  if (!find_like(stored, wanted) && !unflatten(stored, wanted))
    throw user_error("capture", "as_strided to sizes [{}] and strides [{}] is no sequence of views",
                     fmt::join(wanted.sizes, ", "), fmt::join(wanted.strides, ", "));
  value_at(find(out));
}

// Looks for a tensor with the same memory and a view of it with the wanted geometry, and takes over
// its ops.
bool Recorder::find_like(Stored* stored, const Geometry& wanted) {
  for (const auto& other : stored_) {
    if (other->views[0].geometry != stored->views[0].geometry) continue;
    for (size_t i = 0; i < other->views.size(); i++) {
      if (other->views[i].geometry != wanted) continue;
      std::vector<int> path;
      for (int at = static_cast<int>(i); at > 0; at = other->views[static_cast<size_t>(at)].parent)
        path.push_back(at);
      int parent = 0;
      for (size_t j = path.size(); j-- > 0;) {
        const View view = other->views[static_cast<size_t>(path[j])];
        parent = add_view(stored, parent, view.geometry, {view.op, view.args});
      }
      return true;
    }
  }
  return false;
}

// Makes the wanted geometry of a contiguous base: the strides, sorted, are the radices into which
// the base is unflattened; each digit is sliced, the digits are put in order, and the result is
// viewed with its sizes of one.
bool Recorder::unflatten(Stored* stored, const Geometry& wanted) {
  const Geometry base = stored->views[0].geometry;
  if (!base.contiguous() || base.offset != 0 || wanted.numel() == 0) return false;
  std::vector<size_t> dims;  // of `wanted`, larger than one, by falling stride
  for (size_t i = 0; i < wanted.sizes.size(); i++)
    if (wanted.sizes[i] != 1) dims.push_back(i);
  std::vector<size_t> order = dims;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return wanted.strides[a] > wanted.strides[b]; });
  Geometry now = base;
  now.sizes.clear();
  std::vector<int64_t> radices;
  int64_t block = base.numel();
  for (size_t i : order) {
    const int64_t stride = wanted.strides[i];
    if (stride <= 0 || block % stride != 0) return false;
    radices.push_back(block / stride);
    block = stride;
  }
  radices.push_back(block);
  now.sizes = radices;
  now.strides.assign(radices.size(), 1);
  for (size_t i = radices.size() - 1; i-- > 0;)
    now.strides[i] = now.strides[i + 1] * radices[i + 1];
  std::vector<int64_t> starts, ends;
  for (size_t i = 0; i < radices.size(); i++) {
    starts.push_back(wanted.offset / now.strides[i] % radices[i]);
    ends.push_back(starts[i] + (i < order.size() ? wanted.sizes[order[i]] : 1));
    if (ends[i] > radices[i]) return false;
  }
  int at = add_view(stored, 0, now, {"aten::view", {now.sizes}});
  for (size_t i = 0; i < radices.size(); i++) {
    if (starts[i] == 0 && ends[i] == radices[i]) continue;
    now.sizes[i] = ends[i] - starts[i];
    now.offset += starts[i] * now.strides[i];
    at =
        add_view(stored, at, now,
                 {"aten::slice.Tensor", {static_cast<int64_t>(i), starts[i], ends[i], int64_t{1}}});
  }
  std::vector<int64_t> permutation;
  for (size_t i : dims)
    permutation.push_back(std::find(order.begin(), order.end(), i) - order.begin());
  permutation.push_back(static_cast<int64_t>(order.size()));
  Geometry permuted = now;
  for (size_t i = 0; i < permutation.size(); i++) {
    permuted.sizes[i] = now.sizes[static_cast<size_t>(permutation[i])];
    permuted.strides[i] = now.strides[static_cast<size_t>(permutation[i])];
  }
  at = add_view(stored, at, permuted, {"aten::permute", {permutation}});
  add_view(stored, at, wanted, {"aten::view", {wanted.sizes}});
  return true;
}

// ---- the dispatch key --------------------------------------------------------------------------

thread_local Recorder* current = nullptr;

void fallback(const c10::OperatorHandle& handle, Stack* stack) {
  MOTLEY_CHECK(current != nullptr);
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::Fake);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  current->handle(handle, stack);
}

void register_fallback() {
  // Never freed: the dispatcher outlives it.
  static const torch::Library* library = [] {
    auto* l =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::Fake, __FILE__, __LINE__);
    l->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
#if TORCH_VERSION_MAJOR < 2
    // Custom operators without a backward pass skip autograd, as they do on other devices.
    static torch::Library autograd(torch::Library::IMPL, "_", c10::DispatchKey::AutogradMeta,
                                   __FILE__, __LINE__);
    autograd.fallback(torch::CppFunction::makeFallthrough());
#endif
    return l;
  }();
  MOTLEY_CHECK(library != nullptr);
}

class Recording {
 public:
  explicit Recording(Recorder* recorder) : include_(c10::DispatchKey::Fake) {
    MOTLEY_CHECK(current == nullptr);
    register_fallback();
    current = recorder;
  }
  ~Recording() { current = nullptr; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
};

using Clock = std::chrono::steady_clock;

// Records a step under a Recording of `recorder`, which has recorded nothing yet.
Capture record_step(Recorder& recorder, const MetaStep& step, Clock::time_point start) {
  Graph& graph = recorder.result.graph;
  const std::string& name = step.name;
  graph.model = name;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  for (const auto& [key, tensor] : step.parameters) {
    if (recorder.known(tensor)) {
      for (size_t i = 0; i < parameters.size(); i++)
        if (parameters[i].is_alias_of(tensor)) recorder.result.tied.push_back({key, names[i]});
      continue;
    }
    if (recorder.stores(tensor))
      throw user_error("capture", "{}: parameter {} shares memory with another but not its shape",
                       name, key);
    recorder.define(tensor, graph.add_parameter(key, motley::spec_of(tensor)));
    parameters.push_back(tensor);
    names.push_back(key);
  }
  for (const auto& [key, tensor] : step.buffers)
    recorder.define(tensor, graph.add_buffer(key, motley::spec_of(tensor)));
  for (const auto& [key, tensor] : step.inputs)
    recorder.define(tensor, graph.add_input(key, motley::spec_of(tensor)));

  recorder.recording = true;
  std::vector<std::pair<size_t, at::Tensor>> replaced;
  const at::Tensor loss = step.loss(&replaced);
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point() || !loss.requires_grad())
    throw user_error("capture",
                     "{}: the loss is {}; it must be a real number that depends on a "
                     "parameter",
                     name, loss.defined() ? to_string(motley::spec_of(loss)) : "undefined");
  graph.loss = recorder.value_of(loss, "the loss");
  recorder.phase = Phase::backward;
  std::vector<at::Tensor> trained;
  std::vector<size_t> positions;
  for (size_t i = 0; i < parameters.size(); i++) {
    if (!parameters[i].requires_grad()) continue;
    trained.push_back(parameters[i]);
    positions.push_back(i);
  }
  const std::vector<at::Tensor> gradients =
      torch::autograd::grad({loss}, trained, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t i = 0; i < gradients.size(); i++)
    if (gradients[i].defined())
      graph.parameters[positions[i]].gradient = recorder.value_of(gradients[i], "the gradient");
  for (size_t i = 0; i < parameters.size(); i++)
    if (recorder.changed(parameters[i]))
      throw user_error(
          "capture",
          "{}: the step changes parameter {} in place; change it between steps, or make "
          "it a buffer",
          name, names[i]);
  for (size_t i = 0; i < step.buffers.size(); i++)
    if (recorder.changed(step.buffers[i].second))
      graph.buffers[i].update = recorder.value_of(step.buffers[i].second, "the update");
  for (const auto& [i, tensor] : replaced) {
    const ValueId value = recorder.value_of(tensor, "the update");
    if (graph.spec(value) != graph.spec(graph.buffers[i].value))
      throw user_error("capture", "{}: the step makes buffer {} {} of {}; keep its shape and type",
                       name, graph.buffers[i].name, to_string(graph.spec(value)),
                       to_string(graph.spec(graph.buffers[i].value)));
    graph.buffers[i].update = value;
  }
  remove_dead(&graph);
  std::set<std::string> unknown;
  for (const Node& node : graph.nodes)
    if (!is_source(node) && find_op(node.op) == nullptr && unknown.insert(node.op).second)
      recorder.result.unknown_ops.push_back(node.op);
  recorder.result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return std::move(recorder.result);
}

}  // namespace

Capture capture(const std::string& model, int64_t batch, DType dtype) {
  const ModelSpec spec = parse_model(model);
  return capture(
      spec.text(), [&] { return build_model(spec); }, batch, dtype);
}

Capture capture(const std::string& name, const std::function<std::shared_ptr<TrainModule>()>& build,
                int64_t batch, DType dtype) {
  const auto start = Clock::now();
  if (batch < 1) throw user_error("capture", "the batch is {}; give a positive number", batch);
  Recorder recorder;
  Recording recording(&recorder);
  DefaultDType default_type(dtype);

  const std::shared_ptr<TrainModule> module = build();
  MetaStep step;
  step.name = name;
  for (const auto& item : module->named_parameters())
    step.parameters.push_back({item.key(), item.value()});
  for (const auto& item : module->named_buffers())
    step.buffers.push_back({item.key(), item.value()});
  std::vector<at::Tensor> inputs;
  for (const InputSpec& input : module->inputs(batch)) {
    inputs.push_back(at::empty(input.spec.shape,
                               at::TensorOptions(at::kMeta).dtype(to_torch(input.spec.dtype))));
    step.inputs.push_back({input.name, inputs.back()});
  }
  step.loss = [&](std::vector<std::pair<size_t, at::Tensor>>*) { return module->loss(inputs); };
  return record_step(recorder, step, start);
}

std::vector<std::string> refused_ops() { return Recorder::refused(); }

Capture capture(const MetaStep& step) {
  const auto start = Clock::now();
  Recorder recorder;
  Recording recording(&recorder);
  return record_step(recorder, step, start);
}

}  // namespace motley

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "capture/recorder.h"
#include "core/error.h"
#include "graph/op.h"

namespace motley::recording {
namespace {

constexpr int64_t kMaxConstant = 4096;

}  // namespace

bool matches(const Geometry& g, const at::Tensor& t) {
  return g.offset == t.storage_offset() && g.type == t.scalar_type() && t.sizes().equals(g.sizes) &&
         t.strides().equals(g.strides);
}

Geometry geometry_of(const at::Tensor& t) {
  return {t.sizes().vec(), t.strides().vec(), t.storage_offset(), t.scalar_type()};
}

TensorSpec spec_of(const Geometry& g) { return {from_torch(g.type), g.sizes}; }

int64_t wrap(int64_t dim, size_t rank) { return dim < 0 ? dim + static_cast<int64_t>(rank) : dim; }

ValueId Recorder::emit(const std::string& op, std::vector<Arg> args, const TensorSpec& spec) {
  const NodeId node = graph().add(op, std::move(args), {spec}, phase);
  return graph().node(node).outputs[0];
}

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
                        : view.op == "aten::as_strided" ? "aten::as_strided_scatter"
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
  if (stored.outside)
    throw user_error("capture",
                     "the step changes a tensor {} from outside, which the next step would read; "
                     "register it as a buffer, or change a clone of it",
                     to_string(spec_of(stored.views[0].geometry)));
  // Bottom up: the new value of each ancestor, from its old one.
  std::vector<std::pair<int, ValueId>> fresh = {{place.view, value}};
  for (int at = place.view; stored.views[static_cast<size_t>(at)].parent >= 0;) {
    const View& view = stored.views[static_cast<size_t>(at)];
    const bool scatters = view.op == "aten::slice.Tensor" || view.op == "aten::select.int" ||
                          view.op == "aten::diagonal" || view.op == "aten::as_strided";
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

bool Recorder::fixed(const at::Tensor& tensor) {
  const Place place = find(tensor);
  if (!place) return !tensor.is_meta();
  std::vector<ValueId> open = {value_at(place)};
  std::vector<bool> seen(graph().values.size());
  while (!open.empty()) {
    const ValueId value = open.back();
    open.pop_back();
    if (seen[value.index]) continue;
    seen[value.index] = true;
    const Node& node = graph().node(graph().value(value).producer);
    if (is_source(node) && node.op != "motley::constant") return false;
    if (const OpDef* op = find_op(node.op); op != nullptr && op->random) return false;
    for (ValueId v : graph().inputs_of(node)) open.push_back(v);
  }
  return true;
}

ValueId Recorder::value_of(const at::Tensor& tensor, const std::string& reader) {
  if (Place place = find(tensor)) return value_at(place);
  throw user_error("capture",
                   "{} reads a tensor {} that is neither a parameter, a buffer, an input nor made "
                   "in the step; register it as a buffer",
                   reader, to_string(motley::spec_of(tensor)));
}

void Recorder::own(const std::string& name, const at::Tensor& tensor) {
  if (tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
      tensor.numel() > 0)
    owned_.emplace(tensor.storage().unsafeGetStorageImpl(), name);
}

// Whether the numbers of a tensor from outside may become part of the graph.
void Recorder::check_outside(const at::Tensor& tensor, const std::string& reader) const {
  if (tensor.layout() != at::kStrided || tensor.is_quantized())
    throw user_error("capture",
                     "{} reads a tensor that is sparse or quantised; graphs hold dense real "
                     "numbers and integers, so use its dense form",
                     reader);
  const TensorSpec spec = motley::spec_of(tensor);
  if (auto owner = owned_.find(tensor.storage().unsafeGetStorageImpl()); owner != owned_.end())
    throw user_error("capture",
                     "{} reads a tensor {} that shares the memory of {} but is another object (a "
                     "view, .data or .detach() from before the step), and would keep the numbers "
                     "it has now; use {} itself in the step",
                     reader, to_string(spec), owner->second, owner->second);
  if (tensor.requires_grad())
    throw user_error("capture",
                     "{} reads a tensor {} that takes a gradient but is no parameter of the "
                     "model; register it as one",
                     reader, to_string(spec));
  if (tensor.numel() > kMaxConstant)
    throw user_error("capture",
                     "{} reads a tensor {} from outside the step; register it as a buffer, as "
                     "constants have at most {} elements",
                     reader, to_string(spec), kMaxConstant);
}

// A Meta tensor that stands for a CPU tensor from outside, whose numbers become a constant. One
// that is `fresh` was made by the step itself from plain numbers, which may write to it.
at::Tensor Recorder::adopt(const at::Tensor& tensor, const std::string& reader, bool fresh) {
  if (tensor.layout() == at::kStrided && !fresh)
    for (const Adopted& a : adopted_[tensor.storage().unsafeGetStorageImpl()])
      if (matches(geometry_of(a.from), tensor)) return a.meta;
  check_outside(tensor, reader);
  const at::Tensor numbers = tensor.detach().cpu();
  const at::Tensor doubles = numbers.to(at::kDouble).contiguous();
  if (!at::isFloatingType(tensor.scalar_type()) && !doubles.to(tensor.scalar_type()).equal(numbers))
    throw user_error("capture",
                     "{} reads a tensor {} from outside the step with integers beyond 2^53, which "
                     "constants cannot hold; register it as a buffer",
                     reader, to_string(motley::spec_of(tensor)));
  const double* data = doubles.data_ptr<double>();
  const ValueId value = graph().add_constant(motley::spec_of(tensor),
                                             std::vector<double>(data, data + doubles.numel()));
  const at::Tensor meta = made(value);
  if (fresh) return meta;
  by_storage_[meta.storage().unsafeGetStorageImpl()]->outside = true;
  adopted_[tensor.storage().unsafeGetStorageImpl()].push_back({tensor, meta});
  result.outside.push_back(tensor);
  return meta;
}

at::Tensor Recorder::made(ValueId value) {
  const TensorSpec spec = graph().spec(value);
  at::Tensor tensor =
      at::empty(spec.shape, at::TensorOptions(at::kMeta).dtype(to_torch(spec.dtype)));
  define(tensor, value);
  return tensor;
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

void Recorder::as_strided(const OpInfo& info, Stack* stack) {
  const at::Tensor self = arguments(info, stack)[0].toTensor();
  value_of(self, info.name);
  info.op.handle.callBoxed(stack);
  const at::Tensor& out = stack->back().toTensor();
  if (known(out)) return;
  Stored* stored = find(self).stored;
  const Geometry wanted = geometry_of(out);
  if (!find_like(stored, wanted) && !unflatten(stored, wanted) && !read_strided(stored, wanted))
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

// Reads any geometry from a base that fills its memory: with its dimensions in the order of memory
// it is contiguous, and as_strided is then a function of its elements alone.
bool Recorder::read_strided(Stored* stored, const Geometry& wanted) {
  const Geometry base = stored->views[0].geometry;
  std::vector<int64_t> order(base.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  auto stride = [&](int64_t d) { return base.strides[static_cast<size_t>(d)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return stride(a) > stride(b); });
  Geometry sorted = base;
  for (size_t i = 0; i < order.size(); i++) {
    sorted.sizes[i] = base.sizes[static_cast<size_t>(order[i])];
    sorted.strides[i] = stride(order[i]);
  }
  int64_t last = 0;
  for (size_t i = 0; i < wanted.sizes.size(); i++)
    last += (wanted.sizes[i] - 1) * wanted.strides[i];
  if (!sorted.contiguous() || wanted.numel() == 0 || wanted.offset < base.offset ||
      wanted.offset + last >= base.offset + base.numel() || wanted.type != base.type)
    return false;
  int at = 0;
  if (sorted != base) at = add_view(stored, 0, sorted, {"aten::permute", {order}});
  add_view(stored, at, wanted,
           {"aten::as_strided", {wanted.sizes, wanted.strides, wanted.offset - base.offset}});
  return true;
}

}  // namespace motley::recording

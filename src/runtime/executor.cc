#include "runtime/executor.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "cost/overlap.h"
#include "graph/ops/builder.h"
#include "interpret/dispatch.h"
#include "runtime/kernels.h"

namespace motley {

namespace {

// A value's shape with every dimension split into its atomic factors: a placement then cuts one
// axis.
struct Factored {
  std::vector<int64_t> shape;  // of the whole value
  int axis = -1;               // the cut one; -1: none
};

// Pieces of a new tensor along one axis, which then is in *whole. Where the axis is the outermost
// they are parts of it; otherwise they are tensors of their own, and *whole stays undefined.
std::vector<at::Tensor> empty_pieces(const std::vector<int64_t>& shape, int axis,
                                     const std::vector<int64_t>& sizes,
                                     const at::TensorOptions& options, at::Tensor* whole) {
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> of = shape;
  of[axis] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (std::all_of(of.begin(), of.begin() + axis, [](int64_t n) { return n == 1; })) {
    *whole = at::empty(of, options);
    return whole->split_with_sizes(sizes, axis);
  }
  for (int64_t size : sizes) {
    of[axis] = size;
    pieces.push_back(at::empty(of, options));
  }
  return pieces;
}

Factored factored(const Theory& theory, ValueId value, Placement p) {
  Factored f;
  const auto& factors = theory.factors(value);
  for (size_t d = 0; d < factors.size(); ++d) {
    if (theory.graph().spec(value).shape[d] == 0) f.shape.push_back(0);
    if (p.is_shard() && d == p.dim) f.axis = static_cast<int>(f.shape.size()) + p.factor;
    f.shape.insert(f.shape.end(), factors[d].begin(), factors[d].end());
  }
  return f;
}

}  // namespace

double random_element(uint64_t seed, int64_t step, int node, int64_t index) {
  uint64_t stream =
      mix64(mix64(mix64(seed) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(node));
  return static_cast<double>(mix64(stream ^ mix64(static_cast<uint64_t>(index))) >> 11) * 0x1p-53;
}

namespace {

// Significant bits of a type's numbers.
int digits_of(DType dtype) {
  return dtype == DType::f32 ? 24 : dtype == DType::f16 ? 11 : dtype == DType::bf16 ? 8 : 53;
}

// The largest number of so many bits that is not above x >= 0: a random number below p stays so.
double cut_off(double x, int digits) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::floor(std::ldexp(mantissa, digits)), exponent - digits);
}

// Element of the given uniform numbers in [0, 1) as a random operator draws it, in double precision
// whatever the type of the result: what is drawn in 16 bits must be as likely as in 64.
double drawn(const Node& node, double u, double v, int digits) {
  const std::string& op = node.op;
  if (op == "aten::bernoulli.p") return u < ops::real_arg(node, 1, 0.5) ? 1 : 0;
  if (op == "aten::exponential") return -std::log1p(-u) / ops::real_arg(node, 1, 1);
  if (op == "aten::randn" || op == "aten::randn_like" || op == "aten::normal_functional") {
    const double normal =
        std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * M_PI * v);  // Box and Muller
    return op == "aten::normal_functional"
               ? ops::real_arg(node, 1, 0) + ops::real_arg(node, 2, 1) * normal
               : normal;
  }
  if (op == "aten::rand" || op == "aten::rand_like") return cut_off(u, digits);
  double low = 0, high = 1;
  if (op == "aten::uniform") {
    low = ops::real_arg(node, 1, 0), high = ops::real_arg(node, 2, 1);
    const double x = low + u * (high - low);
    return x < 0 ? x : cut_off(x, digits);  // below `high` also when it is rounded
  }
  const size_t first = op == "aten::randint_like" || op == "aten::randint_like.low_dtype" ? 1 : 0;
  if (op.ends_with(".low") || op.ends_with(".low_dtype"))
    low = ops::real_arg(node, first), high = ops::real_arg(node, first + 1);
  else
    high = ops::real_arg(node, first);
  return std::floor(low + u * (high - low));
}

// The piece of a random operator's result that `global_index` (by local element, in order) says.
template <typename F>
at::Tensor draw(const Node& node, const Shape& local, DType dtype, uint64_t seed, int64_t step,
                int id, F global_index) {
  at::Tensor out = at::empty(local, at::TensorOptions().dtype(to_torch(dtype)));
  const int digits = digits_of(dtype);
  const bool normal =
      node.op.find("norm") != std::string::npos || node.op.starts_with("aten::randn");
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, out.scalar_type(), "draw", [&] {
    auto* data = out.data_ptr<scalar_t>();
    for (int64_t i = 0, n = out.numel(); i < n; ++i) {
      const int64_t index = global_index(i);
      data[i] =
          static_cast<scalar_t>(drawn(node, random_element(seed, step, id, index),
                                      normal ? random_element(~seed, step, id, index) : 0, digits));
    }
  });
  return out;
}

}  // namespace

namespace {

// Where element i of a part of a value is in the whole.
struct InWhole {
  InWhole() = default;
  InWhole(const PartCut& cut, int parts, int64_t part)
      : size(cut.size),
        length(cut.is_whole() ? 1 : cut.size / parts),
        inner(cut.inner),
        begin(part * length) {}
  int64_t operator()(int64_t i) const {
    return size == 0
               ? i
               : ((i / (inner * length)) * size + begin + i / inner % length) * inner + i % inner;
  }
  int64_t size = 0, length = 1, inner = 1, begin = 0;
};

Kernel kernel_of(uint64_t seed, int64_t step, std::vector<int> stream, std::vector<InWhole> part) {
  return [=](const Graph& graph, const Node& node, const std::vector<at::Tensor>&) {
    const int id = graph.value(node.outputs[0]).producer.index;
    const TensorSpec& spec = graph.spec(node.outputs[0]);
    return std::vector<at::Tensor>{draw(node, spec.shape, spec.dtype, seed, step,
                                        stream.empty() ? id : stream[id],
                                        part.empty() ? InWhole() : part[id])};
  };
}

}  // namespace

Kernel random_kernel(uint64_t seed, int64_t step, std::vector<int> stream) {
  return kernel_of(seed, step, std::move(stream), {});
}

namespace {

std::map<std::string, Kernel> for_all_random(const Kernel& kernel) {
  std::map<std::string, Kernel> kernels;
  for (const OpDef* op : all_ops())
    if (op->random) kernels[op->name] = kernel;
  return kernels;
}

}  // namespace

std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step) {
  return for_all_random(kernel_of(seed, step, {}, {}));
}

std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step, const MicroBatch& part,
                                             int64_t micro_batch) {
  std::vector<int> stream;
  std::vector<InWhole> in_whole;
  for (size_t n = 0; n < part.node_of.size(); ++n) {
    stream.push_back(part.node_of[n].index);
    in_whole.emplace_back(part.random[n], part.parts, micro_batch);
  }
  return for_all_random(kernel_of(seed, step, std::move(stream), std::move(in_whole)));
}

namespace {

// The elements in one run that may be overwritten: those of the tensor itself if `last` says that
// its value is not read again and nothing else holds them.
at::Tensor own_elements(const at::Tensor& tensor, bool last) {
  const bool shared =
      !last || tensor.use_count() > 1 || tensor.storage().use_count() > 1 || tensor.numel() == 0;
  at::Tensor flat = tensor.reshape({-1});
  const bool own =
      !shared && flat.is_contiguous();  // an expanded tensor has no elements of its own
  return own || !flat.is_alias_of(tensor) ? flat : flat.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

struct Executor::Instruction {
  enum class Kind {
    source,
    call,
    rule,
    random,
    empty,
    boundary,
    convert,
    keep,
    send,
    bucket
  } kind = Kind::call;
  const Node* node = nullptr;
  NodeId id;
  const Operator* op = nullptr;
  RuleKernel rule = nullptr;
  std::vector<Arg> args;
  std::map<ValueId, int> operand_slot;  // tensors of args
  std::vector<int> operands, results;   // slots in order; -1: an undefined output
  std::vector<Shape> result_shapes;
  std::vector<bool> wanted;  // empty piece: results that must be computed all the same
  std::vector<Shape>
      stand_in;  // empty piece: shapes of operands to call with (empty: the operand itself)
  std::vector<Placement> placements;  // of the results
  int64_t begin = 0, length = 0;      // of this device's piece of the cut dimension
  std::vector<Step> steps;            // conversions: one, or a bucket of all-reduces
  int message = -1;                   // send, bucket: which message of gradients
  bool last = false;                  // one conversion: its operand is not read again
  bool passes = false;                // boundary: nothing moves
  std::vector<int> free;              // slots dead after this instruction
  std::vector<int> sums;              // slots added to the sums of micro-batches after it
};

Executor::Executor(const Theory& theory, const Program& program, const Shares& shares,
                   Communicator& communicator, ExecutorOptions options)
    : theory_(theory),
      program_(program),
      shares_(shares),
      communicator_(communicator),
      options_(std::move(options)) {
  MOTLEY_CHECK(shares.devices() == communicator.size());
  stored_ = stored_placements(theory, program);
  compile();
}

Executor::~Executor() = default;

int Executor::slot(ValueId value, Placement placement) const {
  return slots_.at({value, placement});
}

Shape Executor::local_shape(ValueId value, Placement placement) const {
  return theory_.local_shape(value, placement, shares_, communicator_.rank());
}

Placement Executor::stored(ValueId source) const { return stored_[source.index]; }

at::Tensor Executor::piece(ValueId value, Placement placement, const at::Tensor& whole) const {
  if (!placement.is_shard()) return whole;
  Factored f = factored(theory_, value, placement);
  const Cut cut = theory_.cut(value, placement);
  return whole.reshape(f.shape)
      .narrow(f.axis, shares_.begin(cut, communicator_.rank()),
              shares_.of(cut)[communicator_.rank()])
      .reshape(local_shape(value, placement))
      .contiguous();
}

void Executor::set(ValueId source, at::Tensor local) {
  MOTLEY_CHECK(local.sizes().vec() == local_shape(source, stored(source)),
               "the piece of %{} has another shape", source.index);
  sources_[source] = std::move(local);
}

at::Tensor Executor::get(ValueId source) const { return sources_.at(source); }

void Executor::compile() {
  const Graph& graph = theory_.graph();
  const int rank = communicator_.rank();
  const std::vector<Held> held = lifetimes(theory_, program_);
  const int end = static_cast<int>(program_.steps.size());
  for (size_t h = 0; h < held.size(); ++h)
    slots_[{held[h].value, held[h].placement}] = static_cast<int>(h);
  values_.resize(held.size());
  std::vector<std::vector<int>> dead(end + 1);
  for (ValueId v : graph.outputs) {
    const Placement p = output_placement(theory_, program_, v);
    const int h = slot(v, p);
    outputs_[v] = {p, h, false};
  }
  const Phases phases = phases_of(theory_, program_);
  for (size_t h = 0; h < held.size(); ++h) {
    const Held& x = held[h];
    auto it = outputs_.find(x.value);
    if (it != outputs_.end() && it->second.slot == static_cast<int>(h)) {
      const int until = x.made < phases.backward ? phases.backward : phases.reduction;
      it->second.released = x.last == until - 1;
      if (it->second.released) continue;  // take() frees it
    }
    dead[x.last].push_back(slot(x.value, x.placement));
  }
  for (const auto& [v, p] : accumulated(theory_, program_)) accumulated_.push_back(slot(v, p));
  const std::set<int> left_out(options_.left_out.begin(), options_.left_out.end());
  std::vector<GradientMessage> messages = gradient_messages(theory_, program_, shares_);
  for (GradientMessage& m : messages)
    std::erase_if(m.steps, [&](int s) { return left_out.count(s) > 0; });
  std::erase_if(messages, [](const GradientMessage& m) { return m.steps.empty(); });
  sent_.resize(messages.size());
  std::vector<int> message_of(end, -1);
  for (size_t m = 0; m < messages.size(); ++m)
    for (int s : messages[m].steps) message_of[s] = static_cast<int>(m);
  size_t next_message = 0;

  auto operand_of = [&](int s) { return slot(program_.steps[s].value, program_.steps[s].from); };
  auto last_use = [&](int s) {
    return std::find(dead[s].begin(), dead[s].end(), operand_of(s)) != dead[s].end();
  };
  auto send_ready = [&](int s) {
    for (; next_message < messages.size() && messages[next_message].ready == s; ++next_message) {
      Instruction send;
      send.kind = Instruction::Kind::send;
      send.message = static_cast<int>(next_message);
      for (int member : messages[next_message].steps) {
        send.steps.push_back(program_.steps[member]);
        if (last_use(member)) send.free.push_back(operand_of(member));
      }
      send.last = last_use(messages[next_message].steps[0]);
      instructions_.push_back(std::move(send));
    }
  };
  for (int s = 0; s < end; ++s) {
    const Step& step = program_.steps[s];
    Instruction in;
    in.free = dead[s];
    if (s == phases.backward) backward_ = instructions_.size();
    if (s == phases.reduction) reduction_ = instructions_.size();
    if (!step.is_compute()) {
      in.message = message_of[s];
      in.kind = left_out.count(s) ? Instruction::Kind::keep
                : in.message >= 0 ? Instruction::Kind::bucket
                                  : Instruction::Kind::convert;
      in.steps = {step};
      in.last = last_use(s);
      if (in.message >= 0) {
        // All of a message are there where the first is needed.
        const std::vector<int>& members = messages[in.message].steps;
        if (members[0] != s) continue;
        in.steps.clear();
        in.free.clear();
        for (int member : members) {
          in.steps.push_back(program_.steps[member]);
          in.free.insert(in.free.end(), dead[member].begin(), dead[member].end());
        }
      }
      instructions_.push_back(std::move(in));
      send_ready(s);
      continue;
    }
    const Node& node = graph.node(step.node);
    const Triple& triple = theory_.triples(step.node)[step.triple];
    const OpDef* def = is_source(node) ? nullptr : find_op(node.op);
    auto inputs = graph.inputs_of(node);
    in.node = &node;
    in.id = step.node;
    in.args = node.args;
    std::vector<Shape> operand_shapes;
    for (size_t i = 0; i < inputs.size(); ++i) {
      in.operands.push_back(slot(inputs[i], triple.in[i]));
      operand_shapes.push_back(local_shape(inputs[i], triple.in[i]));
    }
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      ValueId v = node.outputs[o];
      in.results.push_back(v.valid() ? slot(v, triple.out[o]) : -1);
      in.result_shapes.push_back(v.valid() ? local_shape(v, triple.out[o]) : Shape{});
    }
    if (triple.cut > 0) {
      const Cut cut = theory_.cut(step.node, triple);
      in.length = shares_.of(cut)[rank];
      in.begin = shares_.begin(cut, rank);
    }
    in.placements = triple.out;
    if (is_source(node)) {
      in.kind = Instruction::Kind::source;
    } else if (is_boundary(node)) {
      in.kind = Instruction::Kind::boundary;
      in.passes = moves_nothing(theory_, step.node, triple, shares_);
    } else if (!triple.kernel.empty()) {
      in.kind = Instruction::Kind::rule;
      in.rule = find_kernel(triple.kernel);
      // The kernels think in elements of the cut dimension; the cut factor is its outermost.
      for (size_t i = 0; i < inputs.size(); ++i)
        if (triple.in[i].is_shard()) {
          int64_t inner = graph.spec(inputs[i]).shape[triple.in[i].dim] / triple.cut;
          in.begin *= inner, in.length *= inner;
          break;
        } else if (i + 1 == inputs.size() && triple.out[0].is_shard()) {
          int64_t inner = graph.spec(node.outputs[0]).shape[triple.out[0].dim] / triple.cut;
          in.begin *= inner, in.length *= inner;
        }
    } else if (def && def->random) {
      in.kind = Instruction::Kind::random;
    } else {
      bool empty = triple.cut > 0 && in.length == 0;
      in.kind = empty ? Instruction::Kind::empty : Instruction::Kind::call;
      std::vector<Shape> result_shapes = in.result_shapes;
      bool any = false;
      bool partial_operand = std::any_of(triple.in.begin(), triple.in.end(),
                                         [](Placement p) { return p.is_partial(); });
      for (size_t o = 0; o < node.outputs.size(); ++o) {
        // A partial operand (a bias under a cut sum) goes into partial results even where the piece
        // is empty.
        in.wanted.push_back(
            empty && node.outputs[o].valid() &&
            (triple.out[o].is_replicated() || (triple.out[o].is_partial() && partial_operand)));
        any = any || in.wanted.back();
      }
      if (empty && any) {
        // Results that do not depend on the cut operands are computed with a piece of size one in
        // their place.
        for (size_t i = 0; i < inputs.size(); ++i) {
          in.stand_in.push_back({});
          if (!triple.in[i].is_shard()) continue;
          Shape shape = graph.spec(inputs[i]).shape;
          shape[triple.in[i].dim] /= triple.cut;
          operand_shapes[i] = in.stand_in.back() = shape;
        }
        for (size_t o = 0; o < node.outputs.size(); ++o)
          if (node.outputs[o].valid() && triple.out[o].is_shard()) {
            result_shapes[o] = graph.spec(node.outputs[o]).shape;
            result_shapes[o][triple.out[o].dim] /= triple.cut;
          }
      }
      in.op = &find_operator(node.op);
      if (def && def->size_arg >= 0) in.args[def->size_arg] = result_shapes[0];
      if (def && def->localize)
        def->localize({graph, node, operand_shapes, result_shapes}, &in.args);
    }
    instructions_.push_back(std::move(in));
    send_ready(s);
  }
  if (phases.backward == end) backward_ = instructions_.size();
  if (phases.reduction == end) reduction_ = instructions_.size();
  std::vector<int> last(values_.size(), -1);  // instruction of the backward phase, by slot
  for (size_t i = backward_; i < reduction_; ++i) {
    const Instruction& in = instructions_[i];
    if (in.kind == Instruction::Kind::send) continue;  // not in phases
    auto touch = [&](int slot) {
      if (slot >= 0) last[slot] = static_cast<int>(i);
    };
    for (int s : in.operands) touch(s);
    for (int s : in.results) touch(s);
    for (const Step& s : in.steps) touch(slot(s.value, s.from)), touch(slot(s.value, s.to));
  }
  for (int s : accumulated_)
    if (last[s] >= 0) instructions_[last[s]].sums.push_back(s);
}

void Executor::convert(const Instruction& instruction) {
  const Step& step = instruction.steps[0];
  const int rank = communicator_.rank();
  const at::Tensor& from = values_[slot(step.value, step.from)];
  at::Tensor to;
  const Shape target = local_shape(step.value, step.to);
  switch (step.kind) {
    case CollectiveKind::all_reduce:
      to = own_elements(from, instruction.last).view(target);
      communicator_.all_reduce(to);
      break;
    case CollectiveKind::mask:
      to = rank == 0 ? from : at::zeros_like(from);
      break;
    case CollectiveKind::slice:
      to = piece(step.value, step.to, from);
      break;
    case CollectiveKind::all_gather:
      to = gather(step.value, step.from, from, step.form);
      break;
    case CollectiveKind::reduce_scatter: {
      Factored f = factored(theory_, step.value, step.to);
      std::vector<int64_t> sizes = shares_.of(theory_.cut(step.value, step.to));
      std::vector<at::Tensor> pieces = from.reshape(f.shape).split_with_sizes(sizes, f.axis);
      for (at::Tensor& p : pieces) p = p.contiguous();
      to = step.form == PieceForm::grouped ? communicator_.reduce_scatter_grouped(pieces)
                                           : communicator_.reduce_scatter(pieces);
      to = to.reshape(target);
      break;
    }
    case CollectiveKind::all_to_all: {
      Factored f = factored(theory_, step.value, step.from),
               g = factored(theory_, step.value, step.to);
      const auto& from_sizes = shares_.of(theory_.cut(step.value, step.from));
      const auto& to_sizes = shares_.of(theory_.cut(step.value, step.to));
      std::vector<int64_t> local = f.shape, shape = f.shape;
      local[f.axis] = from_sizes[rank];
      shape[g.axis] = to_sizes[rank];
      at::Tensor whole;
      std::vector<at::Tensor> send = from.reshape(local).split_with_sizes(to_sizes, g.axis),
                              receive =
                                  empty_pieces(shape, f.axis, from_sizes, from.options(), &whole);
      for (at::Tensor& p : send) p = p.contiguous();
      communicator_.all_to_all(send, receive);
      to = (whole.defined() ? whole : at::cat(receive, f.axis)).reshape(target);
      break;
    }
  }
  values_[slot(step.value, step.to)] = to;
}

// Pieces in the shares of one segment become pieces in those of another: to every device what its
// new piece has of this one's.
at::Tensor Executor::exchange(const Instruction& in) {
  const at::Tensor& from = values_[in.operands[0]];
  if (in.passes) return from;
  const Placement placement = in.placements[0];
  const ValueId taken = in.node->outputs[0], given = theory_.graph().inputs_of(*in.node)[0];
  const Factored f = factored(theory_, given, placement);
  const Cut a = theory_.cut(given, placement), b = theory_.cut(taken, placement);
  const int rank = communicator_.rank(), size = communicator_.size();
  // Where the new piece of one device and the old one of another meet: from, length.
  auto meet = [&](int giver, int taker) {
    const int64_t begin = std::max(shares_.begin(a, giver), shares_.begin(b, taker));
    const int64_t end = std::min(shares_.begin(a, giver) + shares_.of(a)[giver],
                                 shares_.begin(b, taker) + shares_.of(b)[taker]);
    return std::pair(begin, std::max<int64_t>(0, end - begin));
  };
  std::vector<int64_t> shape = f.shape;
  shape[f.axis] = shares_.of(a)[rank];
  const at::Tensor local = from.reshape(shape);
  std::vector<at::Tensor> send, receive;
  for (int r = 0; r < size; ++r) {
    const auto [begin, length] = meet(rank, r);
    send.push_back(
        local.narrow(f.axis, length > 0 ? begin - shares_.begin(a, rank) : 0, length).contiguous());
    shape[f.axis] = meet(r, rank).second;
    receive.push_back(at::empty(shape, from.options()));
  }
  communicator_.all_to_all(send, receive);
  return at::cat(receive, f.axis).reshape(in.result_shapes[0]);
}

at::Tensor Executor::gather(ValueId value, Placement placement, const at::Tensor& local,
                            PieceForm form) {
  if (placement.is_replicated()) return local;
  if (placement.is_partial()) {
    at::Tensor sum = local.contiguous().clone();
    communicator_.all_reduce(sum);
    return sum;
  }
  Factored f = factored(theory_, value, placement);
  const auto& sizes = shares_.of(theory_.cut(value, placement));
  at::Tensor whole;
  std::vector<at::Tensor> pieces = empty_pieces(f.shape, f.axis, sizes, local.options(), &whole);
  pieces[communicator_.rank()].copy_(local.reshape(pieces[communicator_.rank()].sizes()));
  if (form == PieceForm::grouped)
    communicator_.all_gather_grouped(pieces);
  else
    communicator_.all_gather(pieces);
  return (whole.defined() ? whole : at::cat(pieces, f.axis))
      .reshape(theory_.graph().spec(value).shape);
}

std::vector<at::Tensor> Executor::compute(const Instruction& in, int64_t step_number,
                                          int64_t micro_batch) {
  const Graph& graph = theory_.graph();
  std::vector<ValueId> inputs = graph.inputs_of(*in.node);
  switch (in.kind) {
    case Instruction::Kind::source: {
      ValueId v = in.node->outputs[0];
      if (in.node->op == "motley::constant") {
        const auto& data = std::get<std::vector<double>>(in.node->args[0]);
        at::Tensor whole =
            at::tensor(data, at::kDouble)
                .to(at::TensorOptions(options_.device).dtype(to_torch(graph.spec(v).dtype)))
                .reshape(graph.spec(v).shape);
        return {piece(v, in.placements[0], whole)};
      }
      auto it = sources_.find(v);
      MOTLEY_CHECK(it != sources_.end(), "{} was not set", std::get<std::string>(in.node->args[0]));
      return {it->second};
    }
    case Instruction::Kind::boundary:
      return {exchange(in)};
    case Instruction::Kind::rule: {
      std::vector<at::Tensor> operands;
      for (int s : in.operands) operands.push_back(values_[s]);
      return in.rule(
          {graph, *in.node, operands, in.result_shapes, communicator_, in.begin, in.length});
    }
    case Instruction::Kind::random: {
      const TensorSpec& spec = graph.spec(in.node->outputs[0]);
      const int stream =
          options_.random_stream.empty() ? in.id.index : options_.random_stream[in.id.index];
      const InWhole of_step =
          options_.random_part.empty()
              ? InWhole()
              : InWhole(options_.random_part[in.id.index], options_.parts, micro_batch);
      if (!in.placements[0].is_shard())
        return {draw(*in.node, spec.shape, spec.dtype, options_.seed, step_number, stream, of_step)
                    .to(options_.device)};
      // Local index (o, l, i) of (outer, piece, inner) is global index (o, begin + l, i).
      Factored f = factored(theory_, in.node->outputs[0], in.placements[0]);
      int64_t inner = 1;
      for (size_t a = f.axis + 1; a < f.shape.size(); ++a) inner *= f.shape[a];
      int64_t n = f.shape[f.axis], begin = in.begin, length = std::max<int64_t>(in.length, 1);
      return {draw(*in.node, in.result_shapes[0], spec.dtype, options_.seed, step_number, stream,
                   [=](int64_t i) {
                     return of_step(((i / (inner * length)) * n + begin + i / inner % length) *
                                        inner +
                                    i % inner);
                   })
                  .to(options_.device)};
    }
    case Instruction::Kind::empty: {
      std::vector<at::Tensor> computed;
      if (!in.stand_in.empty()) {
        std::map<ValueId, at::Tensor> operands;
        for (size_t i = 0; i < inputs.size(); ++i)
          operands[inputs[i]] = in.stand_in[i].empty()
                                    ? values_[in.operands[i]]
                                    : at::zeros(in.stand_in[i], values_[in.operands[i]].options());
        computed = call(
            *in.op, in.args, [&](ValueId v) { return operands.at(v); }, options_.device);
      }
      std::vector<at::Tensor> results;
      for (size_t o = 0; o < in.node->outputs.size(); ++o) {
        ValueId v = in.node->outputs[o];
        if (!v.valid())
          results.emplace_back();
        else if (in.wanted[o])
          results.push_back(computed[o]);
        else
          results.push_back(
              at::zeros(in.result_shapes[o],
                        at::TensorOptions(options_.device).dtype(to_torch(graph.spec(v).dtype))));
      }
      return results;
    }
    default: {
      // The operands in order; a value that occurs twice may be held in two placements.
      size_t next = 0;
      return call(
          *in.op, in.args, [&](ValueId) { return values_[in.operands[next++]]; }, options_.device);
    }
  }
}

// Starts the sum of a message's gradients.
void Executor::send(const Instruction& in) {
  Sent& sent = sent_[in.message];
  if (in.steps.size() == 1) {
    sent.bucket = own_elements(values_[slot(in.steps[0].value, in.steps[0].from)], in.last);
  } else {
    std::vector<at::Tensor> flat;
    for (const Step& s : in.steps) flat.push_back(values_[slot(s.value, s.from)].reshape({-1}));
    sent.bucket = at::cat(flat);
    flat.clear();
    for (int s : in.free) values_[s].reset();
  }
  sent.message = communicator_.start_all_reduce(sent.bucket);
}

void Executor::run(size_t begin, size_t end, int64_t step, int64_t micro_batch) {
  const Graph& graph = theory_.graph();
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (size_t i = begin; i < end; ++i) {
    const Instruction& in = instructions_[i];
    const bool sends = in.kind == Instruction::Kind::send;
    if (sends && !overlap_) continue;
    bool is_compute = in.steps.empty() || sends;
    const bool exchanges = in.kind == Instruction::Kind::boundary && !in.passes;
    if (options_.before) options_.before(is_compute && !exchanges);
    if (in.kind == Instruction::Kind::convert) {
      convert(in);
    } else if (in.kind == Instruction::Kind::keep) {
      const Step& s = in.steps[0];
      values_[slot(s.value, s.to)] = values_[slot(s.value, s.from)];
    } else if (sends) {
      send(in);
    } else if (in.kind == Instruction::Kind::bucket) {
      if (!overlap_) send(in);
      Sent& sent = sent_[in.message];
      if (sent.message) sent.message->wait();
      int64_t at = 0;
      for (const Step& s : in.steps) {
        int64_t n = graph.spec(s.value).numel();
        values_[slot(s.value, s.to)] =
            sent.bucket.narrow(0, at, n).reshape(graph.spec(s.value).shape);
        at += n;
      }
      sent = {};
    } else {
      std::vector<at::Tensor> results = compute(in, step, micro_batch);
      MOTLEY_CHECK(results.size() >= in.results.size(), "{} has {} results, not {}", in.node->op,
                   results.size(), in.results.size());
      for (size_t o = 0; o < in.results.size(); ++o) {
        if (in.results[o] < 0) continue;
        if (results[o].sizes().vec() != in.result_shapes[o])
          throw user_error("run",
                           "result {} of {} (node {}) is [{}], not [{}] as when it was captured: "
                           "its shape depends on the numbers of the batch, which a graph cannot "
                           "follow; compute it before the step and pass it as an input",
                           o, in.node->op, in.id.index, fmt::join(results[o].sizes().vec(), ","),
                           fmt::join(in.result_shapes[o], ","));
        values_[in.results[o]] = std::move(results[o]);
      }
    }
    if (options_.observe && !sends) {
      for (const Step& s : in.steps) options_.observe(s.value, s.to, values_[slot(s.value, s.to)]);
      if (is_compute)
        for (size_t o = 0; o < in.results.size(); ++o)
          if (in.results[o] >= 0)
            options_.observe(in.node->outputs[o], in.placements[o], values_[in.results[o]]);
    }
    for (int s : in.free) values_[s].reset();
    if (options_.after) options_.after(is_compute && !exchanges, &in);
    if (summing_)
      for (int s : in.sums) add_up(s);
  }
}

// Undefined until the phase that makes it has run.
at::Tensor Executor::loss_of(Placement* placement) const {
  const ValueId v = theory_.graph().loss;
  for (Placement p : {Placement::replicated(), Placement::partial()}) {
    auto it = slots_.find({v, p});
    if (it == slots_.end() || !values_[it->second].defined()) continue;
    *placement = p;
    return values_[it->second];
  }
  return {};
}

std::vector<at::Tensor> Executor::gradients() const {
  std::vector<at::Tensor> list;
  for (const Parameter& p : theory_.graph().parameters) {
    list.push_back(p.gradient.valid() ? values_[slot(p.gradient, stored(p.value))] : at::Tensor());
    // The optimizer would pass over one that is missing.
    MOTLEY_CHECK(!p.gradient.valid() || list.back().defined(), "the gradient of {} is not held",
                 p.name);
  }
  return list;
}

void Executor::update_buffers() {
  const std::vector<Buffer>& buffers = theory_.graph().buffers;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (!b.update.valid()) continue;
    const at::Tensor& update = values_[slot(b.update, stored(b.value))];
    const bool now = i < options_.updated_by_part.size() && options_.updated_by_part[i];
    if (update.defined()) (now ? sources_ : next_)[b.value] = update;
  }
}

void Executor::commit() {
  for (auto& [buffer, value] : next_) sources_[buffer] = std::move(value);
  next_.clear();
}

Executor::Result Executor::step(int64_t number) {
  overlap_ = true;
  run(0, instructions_.size(), number, 0);
  overlap_ = false;
  Result result;
  if (theory_.graph().loss.valid()) {
    Placement placement;
    const at::Tensor local = loss_of(&placement);
    result.loss = gather(theory_.graph().loss, placement, local);
  }
  result.gradients = gradients();
  update_buffers();
  commit();
  for (at::Tensor& v : values_) v.reset();
  return result;
}

Executor::Flight Executor::forward(int64_t step, int64_t micro_batch, bool again) {
  run(0, backward_, step, micro_batch);
  if (!again) update_buffers();
  Flight flight(values_.size());
  std::swap(flight, values_);
  return flight;
}

void Executor::backward(Flight* flight, int64_t step, int64_t micro_batch) {
  std::swap(*flight, values_);
  if (sums_.empty()) sums_.resize(values_.size());
  summing_ = true;
  run(backward_, reduction_, step, micro_batch);
  summing_ = false;
  for (int s : accumulated_)
    if (values_[s].defined()) add_up(s);  // made in the forward phase
  std::swap(*flight, values_);
}

// The first is copied where it may be a view of something larger, or of what others hold. Many
// small terms would be lost in a sum of 16 bits.
void Executor::add_up(int s) {
  at::Tensor& value = values_[s];
  if (sums_in_f32(value.scalar_type())) value = value.to(at::kFloat);
  if (sums_[s].defined())
    sums_[s].add_(value);
  else
    sums_[s] = value.is_contiguous() && value.use_count() == 1 && value.storage().use_count() == 1
                   ? value
                   : value.clone(at::MemoryFormat::Contiguous);
  value.reset();
}

at::Tensor Executor::take(Flight* flight, ValueId output) {
  const Output& o = outputs_.at(output);
  at::Tensor value = (*flight)[o.slot];
  MOTLEY_CHECK(value.defined(), "the output %{} is not there", output.index);
  if (o.released) (*flight)[o.slot].reset();
  return value;
}

Executor::Loss Executor::loss(const Flight& flight) const {
  const ValueId v = theory_.graph().loss;
  for (Placement p : {Placement::replicated(), Placement::partial()})
    if (auto it = slots_.find({v, p}); it != slots_.end() && flight[it->second].defined())
      return {flight[it->second], p.is_partial()};
  MOTLEY_CHECK(false, "the loss is not there");
}

std::vector<at::Tensor> Executor::reduce(int64_t step) {
  if (sums_.empty()) sums_.resize(values_.size());
  std::swap(sums_, values_);
  for (const auto& [key, s] : slots_)
    if (values_[s].defined())
      values_[s] = values_[s].to(to_torch(theory_.graph().spec(key.first).dtype));
  run(reduction_, instructions_.size(), step, 0);
  std::vector<at::Tensor> result = gradients();
  values_.assign(values_.size(), at::Tensor());
  sums_.clear();
  return result;
}

}  // namespace motley

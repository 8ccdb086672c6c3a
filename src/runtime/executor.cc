#include "runtime/executor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "comm/background.h"
#include "comm/moment.h"
#include "core/error.h"
#include "graph/op.h"
#include "runtime/instruction.h"
#include "runtime/random.h"

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

at::Tensor own_elements(const at::Tensor& tensor, bool last) {
  const bool shared =
      !last || tensor.use_count() > 1 || tensor.storage().use_count() > 1 || tensor.numel() == 0;
  at::Tensor flat = tensor.reshape({-1});
  const bool own =
      !shared && flat.is_contiguous();  // an expanded tensor has no elements of its own
  return own || !flat.is_alias_of(tensor) ? flat : flat.clone(at::MemoryFormat::Contiguous);
}

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
  if (options_.asynchronous) {
    travelling_.resize(values_.size());
    background_ = std::make_unique<Background>(options_.device);
  }
}

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

at::Tensor Executor::converted(const Instruction& instruction, at::Tensor from) {
  const Step& step = instruction.steps[0];
  const int rank = communicator_.rank();
  at::Tensor to;
  const Shape target = local_shape(step.value, step.to);
  switch (step.kind) {
    case Collective::all_reduce:
      to = own_elements(from, instruction.last).view(target);
      communicator_.all_reduce(to);
      break;
    case Collective::mask:
      to = rank == 0 ? from : at::zeros_like(from);
      break;
    case Collective::slice:
      to = piece(step.value, step.to, from);
      break;
    case Collective::all_gather:
      to = gather(step.value, step.from, from, step.form);
      break;
    case Collective::reduce_scatter: {
      Factored f = factored(theory_, step.value, step.to);
      std::vector<int64_t> sizes = shares_.of(theory_.cut(step.value, step.to));
      std::vector<at::Tensor> pieces = from.reshape(f.shape).split_with_sizes(sizes, f.axis);
      for (at::Tensor& p : pieces) p = p.contiguous();
      to = step.form == PieceForm::grouped ? communicator_.reduce_scatter_grouped(pieces)
                                           : communicator_.reduce_scatter(pieces);
      to = to.reshape(target);
      break;
    }
    case Collective::all_to_all: {
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
    default:
      MOTLEY_CHECK(false, "{}", to_string(step.kind));
  }
  return to;
}

// Pieces in the shares of one segment become pieces in those of another: to every device what its
// new piece has of this one's.
at::Tensor Executor::exchange(const Instruction& in) {
  const at::Tensor& from = values_[in.operands[0]];
  if (in.passes) return from;
  const ValueId taken = in.node->outputs[0], given = theory_.graph().inputs_of(*in.node)[0];
  const Factored f = factored(theory_, given, in.given);
  const Cut a = theory_.cut(given, in.given), b = theory_.cut(taken, in.placements[0]);
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
      auto it = sources_.find(v);
      if (it == sources_.end() && in.node->op == "motley::constant") {  // stays on the device
        const auto& data = std::get<std::vector<double>>(in.node->args[0]);
        const at::Tensor whole = at::tensor(data, at::kDouble)
                                     .to(to_torch(graph.spec(v).dtype))
                                     .reshape(graph.spec(v).shape);
        const at::Tensor mine = piece(v, in.placements[0], whole);
        it = sources_.emplace(v, moved_to(mine, options_.device)).first;
      }
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
    case Instruction::Kind::joined:
      return compute_joined(in);
    case Instruction::Kind::random: {
      const TensorSpec& spec = graph.spec(in.node->outputs[0]);
      const int stream =
          options_.random_stream.empty() ? in.id.index : options_.random_stream[in.id.index];
      const InWhole of_step =
          options_.duplex != nullptr ? InWhole(options_.duplex->random[in.id.index])
          : options_.random_part.empty()
              ? InWhole()
              : InWhole(options_.random_part[in.id.index], options_.parts, micro_batch);
      std::vector<InWhole> where;
      if (in.placements[0].is_shard()) {
        const Factored f = factored(theory_, in.node->outputs[0], in.placements[0]);
        int64_t inner = 1;
        for (size_t a = f.axis + 1; a < f.shape.size(); ++a) inner *= f.shape[a];
        where.emplace_back(f.shape[f.axis], std::max<int64_t>(in.length, 1), inner, in.begin);
      }
      where.push_back(of_step);
      return {draw(*in.node, in.placements[0].is_shard() ? in.result_shapes[0] : spec.shape,
                   spec.dtype, options_.seed, step_number, stream, where, options_.device)};
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
  sent.begun = now_seconds();
  sent.message = communicator_.start_all_reduce(sent.bucket);
}

void Executor::wait_for(const Sent& sent) {
  if (!sent.message) return;
  const double waiting = now_seconds();
  sent.message->wait();
  const std::optional<double> arrived = sent.message->arrived();
  if (!arrived || !overlap_) return;
  hidden_ += std::max(0.0, std::min(*arrived, waiting) - std::max(sent.begun, last_arrival_));
  last_arrival_ = std::max(last_arrival_, *arrived);
}

void Executor::run(size_t begin, size_t end, int64_t step, int64_t micro_batch) {
  const Graph& graph = theory_.graph();
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (size_t i = begin; i < end; ++i) {
    const Instruction& in = instructions_[i];
    const bool sends = in.kind == Instruction::Kind::send;
    if (sends && !overlap_) continue;
    if (options_.asynchronous) arrive_for(in);
    bool is_compute = in.steps.empty() || sends || in.beside;
    const bool exchanges = in.kind == Instruction::Kind::boundary && !in.passes;
    if (options_.before) options_.before(is_compute && !exchanges);
    const double since = is_compute && !exchanges ? 0 : now_seconds();
    if (in.beside) {
      start(in);
    } else if (in.kind == Instruction::Kind::convert) {
      const Step& s = in.steps[0];
      at::Tensor& held = values_[slot(s.value, s.from)];
      at::Tensor from = in.last ? std::move(held) : held;
      values_[slot(s.value, s.to)] = converted(in, std::move(from));
    } else if (in.kind == Instruction::Kind::keep) {
      const Step& s = in.steps[0];
      values_[slot(s.value, s.to)] = values_[slot(s.value, s.from)];
    } else if (sends) {
      send(in);
    } else if (in.kind == Instruction::Kind::bucket) {
      if (!overlap_) send(in);
      Sent& sent = sent_[in.message];
      wait_for(sent);
      int64_t at = 0;
      for (const Step& s : in.steps) {
        int64_t n = graph.spec(s.value).numel();
        values_[slot(s.value, s.to)] =
            sent.bucket.narrow(0, at, n).reshape(graph.spec(s.value).shape);
        at += n;
      }
      sent = {};
    } else {
      std::vector<at::Tensor> results;
      try {
        results = compute(in, step, micro_batch);
      } catch (c10::Error& error) {
        error.add_context(fmt::format("in {} (node {} of the plan)", in.node->op, in.id.index));
        throw;
      }
      MOTLEY_CHECK(results.size() >= in.results.size(), "{} has {} results, not {}", in.node->op,
                   results.size(), in.results.size());
      for (size_t o = 0; o < in.results.size(); ++o) {
        if (in.results[o] < 0) continue;
        if (results[o].sizes().vec() != in.result_shapes[o] && !is_scratch(in.node->op, o))
          throw user_error("run",
                           "result {} of {} (node {}) is [{}], not [{}] as when it was captured: "
                           "its shape depends on the numbers of the batch, which a graph cannot "
                           "follow; compute it before the step and pass it as an input",
                           o, in.node->op, in.id.index, fmt::join(results[o].sizes().vec(), ","),
                           fmt::join(in.result_shapes[o], ","));
        values_[in.results[o]] = std::move(results[o]);
      }
    }
    if (options_.observe && !sends && !in.beside) {
      for (const Step& s : in.steps) options_.observe(s.value, s.to, values_[slot(s.value, s.to)]);
      if (is_compute)
        for (size_t o = 0; o < in.results.size(); ++o)
          if (in.results[o] >= 0)
            options_.observe(in.made[o], in.placements[o], values_[in.results[o]]);
    }
    if (since > 0) blocked_ += now_seconds() - since;
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
  overlap_ = options_.overlap && !options_.asynchronous;
  run(0, instructions_.size(), number, 0);
  overlap_ = false;
  arrive_all();
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
  run_summing(flight, backward_, weights_, step, micro_batch);
}

void Executor::weights(Flight* flight, int64_t step, int64_t micro_batch) {
  run_summing(flight, weights_, reduction_, step, micro_batch);
}

void Executor::run_summing(Flight* flight, size_t begin, size_t end, int64_t step,
                           int64_t micro_batch) {
  std::swap(*flight, values_);
  if (sums_.empty()) sums_.resize(values_.size());
  // All terms of a micro-batch are added by its last pass.
  summing_ = end == reduction_;
  run(begin, end, step, micro_batch);
  for (int s : accumulated_)
    if (summing_ && values_[s].defined()) add_up(s);  // made in an earlier pass
  summing_ = false;
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

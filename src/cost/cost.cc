#include "cost/cost.h"

#include <algorithm>
#include <utility>

#include "cluster/second_holders.h"
#include "core/error.h"
#include "cost/joined.h"
#include "cost/overlap.h"

namespace motley {

Bytes state_bytes(const Graph& graph, const Parameter& p, Optimizer optimizer) {
  const auto bytes = static_cast<Bytes>(graph.spec(p.value).bytes());
  if (!p.gradient.valid()) return bytes;
  return bytes * (1 + state_factor(optimizer)) + static_cast<Bytes>(graph.spec(p.gradient).bytes());
}

Work work_of(const Theory& theory, NodeId id, const Triple& triple) {
  const Graph& graph = theory.graph();
  const Node& node = graph.node(id);
  Work work;
  work.cut = theory.cut(id, triple);
  const OpDef* op = find_op(node.op);
  work.op = op;
  if (is_source(node) || is_boundary(node) || (op && op->alias)) {
    work.free = true;
    return work;
  }
  int64_t largest = 0;
  auto touch = [&](ValueId v, Placement p) {
    const TensorSpec& spec = graph.spec(v);
    (p.is_shard() ? work.cut_bytes : work.whole_bytes) += static_cast<Bytes>(spec.bytes());
    largest = std::max(largest, spec.numel());
    work.half = work.half || is_half(spec.dtype);
  };
  auto inputs = graph.inputs_of(node);
  for (size_t i = 0; i < inputs.size(); ++i) touch(inputs[i], triple.in[i]);
  for (size_t o = 0; o < node.outputs.size(); ++o)
    if (node.outputs[o].valid()) touch(node.outputs[o], triple.out[o]);
  work.flops = op && op->flops ? op->flops(graph, node) : static_cast<Flops>(largest);
  return work;
}

CostModel::CostModel(const Cluster& cluster, const std::vector<ReductionProgram>& reductions,
                     OverReplicas replicas)
    : cluster_(cluster),
      backend_(backend_of(cluster)),
      net_(cluster, backend_.messages ? reductions : std::vector<ReductionProgram>()),
      replicas_(std::move(replicas)) {
  for (const DeviceType& type : cluster_.types) {
    Rates& rates = rates_.emplace_back();
    for (const OpRate& rate : type.ops) {
      rates.launches = rates.launches || rate.launch > 0;
      if (rate.op == "motley::adamw")
        rates.adamw = &rate;
      else if (rate.op == "motley::sgd")
        rates.sgd = &rate;
      else if (rate.op == "motley::step")
        rates.step = &rate;
      else if (const OpDef* op = find_op(rate.op))
        rates.ops[op] = &rate;
      else if (rate.op.ends_with(kHalfRate))
        if (const OpDef* half = find_op(rate.op.substr(0, rate.op.size() - kHalfRate.size())))
          rates.half_ops[half] = &rate;
    }
  }
}

Seconds CostModel::compute(int type, const Work& work, double fraction, Seconds* cut,
                           Seconds* whole) const {
  Seconds slope = 0, base = 0;
  if (!work.free) {
    if (work.cut.size == 0) fraction = 1;
    const DeviceType& t = cluster_.types[type];
    double rate = work.half ? t.half_flops : t.flops;
    const auto& rates = work.half ? rates_[type].half_ops : rates_[type].ops;
    const auto measured = rates.find(work.op);
    if (measured != rates.end()) {
      const OpRate& r = *measured->second;
      base = r.overhead;
      if (r.flops > 0) slope += work.flops / r.flops;
      if (r.memory_bandwidth > 0) {
        slope += work.cut_bytes / r.memory_bandwidth;
        base += work.whole_bytes / r.memory_bandwidth;
      }
    } else {
      double by_flops = work.flops * fraction / rate;
      double by_bytes = (work.cut_bytes * fraction + work.whole_bytes) / t.memory_bandwidth;
      base = t.overhead;
      if (by_flops >= by_bytes) {
        slope = work.flops / rate;
      } else {
        slope = work.cut_bytes / t.memory_bandwidth;
        base += work.whole_bytes / t.memory_bandwidth;
      }
    }
    if (work.cut.size == 0) base += slope, slope = 0;
  }
  if (cut) *cut = slope;
  if (whole) *whole = base;
  return !work.free && work.cut.size > 0 && fraction == 0 ? 0 : slope * fraction + base;
}

double widening(const Backend& backend, Collective kind, bool half) {
  const bool wide = (kind == Collective::all_reduce && !backend.half_sums) ||
                    (kind == Collective::reduce_scatter && !backend.half_scatters);
  return half && wide ? 2 : 1;
}

Bytes CostModel::moved(Collective kind, const TensorSpec& spec) const {
  return static_cast<Bytes>(spec.bytes()) * widening(backend_, kind, is_half(spec.dtype));
}

Bytes CostModel::moved(const InnerCollective& inner) const {
  return static_cast<Bytes>(inner.bytes) * widening(backend_, inner.kind, inner.half);
}

Seconds CostModel::gradient_all_reduce(const TensorSpec& gradient, GradientRun* run) const {
  const GradientRun before = *run;
  run->any = true;
  run->small = before.small || static_cast<Bytes>(gradient.bytes()) < run->sizes.alone;
  const Bytes bytes = moved(Collective::all_reduce, gradient);
  if (replicas_.piece.empty())
    return (before.small ? message_seconds(*this, gradient, run->sizes) : net_.all_reduce(bytes)) +
           copying_seconds(gradient, run->sizes);
  // A whole gradient pays for its reduction over replicas with its update.
  const double paid = *std::max_element(replicas_.piece.begin(), replicas_.piece.end());
  return (before.any ? 0 : replicas_.fixed) +
         bytes * std::max(0.0, replicas_.seconds_per_byte - paid);
}

Seconds CostModel::copying_seconds(const TensorSpec& gradient, const GradientSizes& sizes) const {
  const auto bytes = static_cast<Bytes>(gradient.bytes());
  if (bytes >= sizes.alone || bytes < GradientSizes().alone) return 0;
  BytesPerSecond slowest = cluster_.types[0].memory_bandwidth;
  for (const DeviceType& t : cluster_.types) slowest = std::min(slowest, t.memory_bandwidth);
  return 2 * bytes / slowest;
}

Seconds CostModel::update(int type, Bytes bytes, Optimizer optimizer, Seconds* linear) const {
  if (linear != nullptr) *linear = 0;
  if (bytes == 0) return 0;
  const Seconds reduction = replicas_.piece.empty() ? 0 : bytes * replicas_.piece[type];
  // Reads parameter, gradient and state, writes parameter and state.
  const DeviceType& t = cluster_.types[type];
  const OpRate* rate = optimizer.kind == Optimizer::sgd ? rates_[type].sgd : rates_[type].adamw;
  const Bytes touched = bytes * (3 + 2 * state_factor(optimizer));
  Seconds all = t.overhead + touched / t.memory_bandwidth, beyond = 0;
  if (rate != nullptr) {
    all = rate->overhead + (rate->memory_bandwidth > 0 ? touched / rate->memory_bandwidth : 0);
    if (rate->uncached_bandwidth > 0)
      beyond = std::max(0.0, touched - rate->cached) / rate->uncached_bandwidth;
  }
  if (linear != nullptr) *linear = all + reduction;
  return all + beyond + reduction;
}

Seconds CostModel::per_step(int type, const Graph& graph) const {
  const OpRate* rate = rates_[type].step;
  if (rate == nullptr) return 0;
  Bytes inputs = 0;
  for (const Input& input : graph.inputs)
    inputs += static_cast<Bytes>(graph.spec(input.value).bytes());
  return rate->overhead + (rate->memory_bandwidth > 0 ? inputs / rate->memory_bandwidth : 0);
}

Seconds CostModel::collective(Collective kind, Bytes bytes,
                              const CollectiveModel::ShareProfile& shares) const {
  return std::min(collective(kind, bytes, shares, PieceForm::padded),
                  collective(kind, bytes, shares, PieceForm::grouped));
}

Seconds CostModel::collective(Collective kind, Bytes bytes,
                              const CollectiveModel::ShareProfile& shares, PieceForm form) const {
  const bool grouped = form == PieceForm::grouped;
  switch (kind) {
    case Collective::all_reduce:
      return net_.all_reduce(bytes);
    case Collective::reduce_scatter:
      return grouped ? net_.reduce_scatter_grouped(bytes, shares)
                     : net_.reduce_scatter(bytes, shares);
    case Collective::all_gather:
      return grouped ? net_.all_gather_grouped(bytes, shares) : net_.all_gather(bytes, shares);
    case Collective::all_to_all:
      // Where there is no other way, all devices get everything and take their own.
      if (!backend_.all_to_all && !backend_.messages) return net_.all_gather(bytes, shares);
      return net_.all_to_all(bytes, shares);
    default:
      MOTLEY_CHECK(moves_nothing(kind));
      return 0;
  }
}

Fractions::Fractions(const Cluster& cluster, const Shares& shares, int redundancy)
    : cluster_(cluster),
      shares_(shares),
      first_(redundancy > 0 ? first_holders(cluster) : std::vector<int>{}) {}

const std::vector<double>& Fractions::second_by_device(Cut cut) const {
  auto [it, fresh] = second_by_device_.try_emplace(cut);
  if (fresh) {
    it->second.assign(shares_.devices(), 0.0);
    if (!twice() || cut.size == 0) return it->second;
    const std::vector<double>& own = by_device(cut);
    for (int d = 0; d < shares_.devices(); ++d) it->second[d] = own[first_[d]];
  }
  return it->second;
}

const std::vector<double>& Fractions::second_by_type(Cut cut) const {
  auto [it, fresh] = second_by_type_.try_emplace(cut);
  if (fresh) {
    it->second.assign(cluster_.types.size(), 0.0);
    const std::vector<double>& device = second_by_device(cut);
    for (int d = 0; d < shares_.devices(); ++d) {
      double& f = it->second[cluster_.devices[d].type];
      f = std::max(f, device[d]);
    }
  }
  return it->second;
}

double Fractions::to_second(Cut cut, const CollectiveModel& net) const {
  if (!twice() || cut.size == 0) return 0;
  auto [it, fresh] = to_second_.try_emplace(cut, 0);
  if (!fresh) return it->second;
  const std::vector<double>& kept = second_by_device(cut);
  for (const CollectiveModel::ExchangePort& port : net.exchange_ports()) {
    const auto below = [&](int d) { return d >= port.first && d < port.first + port.count; };
    double in = 0, out = 0;
    for (int d = 0; d < shares_.devices(); ++d) {
      if (below(d) && !below(first_[d])) in += kept[d];
      if (!below(d) && below(first_[d])) out += kept[d];
    }
    it->second = std::max(it->second, std::max(in, out) * port.seconds_per_byte);
  }
  return it->second;
}

SecondCopy second_copy(const Theory& theory, const Parameter& p, Placement stored,
                       const CostModel& model, const Fractions& fractions, Optimizer optimizer) {
  SecondCopy copy{0, std::vector<Seconds>(model.types(), 0)};
  if (!fractions.twice() || !stored.is_shard() || !p.gradient.valid()) return copy;
  const Cut cut = theory.cut(p.value, stored);
  const auto bytes = static_cast<Bytes>(theory.graph().spec(p.value).bytes());
  copy.send = bytes * fractions.to_second(cut, model.net());
  const std::vector<double>& kept = fractions.second_by_type(cut);
  for (int t = 0; t < model.types(); ++t)
    copy.update[t] = model.update(t, bytes * kept[t], optimizer);
  return copy;
}

const std::vector<double>& Fractions::by_device(Cut cut) const {
  auto [it, fresh] = by_device_.try_emplace(cut);
  if (fresh) {
    it->second.assign(shares_.devices(), 1.0);
    if (cut.size == 0) return it->second;
    const std::vector<int64_t>& pieces = shares_.of(cut);
    for (int d = 0; d < shares_.devices(); ++d)
      it->second[d] = static_cast<double>(pieces[d]) / static_cast<double>(cut.size);
  }
  return it->second;
}

const CollectiveModel::ShareProfile& Fractions::profile(Cut cut, const CollectiveModel& net) const {
  auto [it, fresh] = profile_.try_emplace(cut);
  if (fresh) it->second = net.profile(by_device(cut));
  return it->second;
}

const std::vector<double>& Fractions::by_type(Cut cut) const {
  auto [it, fresh] = by_type_.try_emplace(cut);
  if (fresh) {
    it->second.assign(cluster_.types.size(), 0.0);
    const auto& device = by_device(cut);
    for (int d = 0; d < shares_.devices(); ++d) {
      double& f = it->second[cluster_.devices[d].type];
      f = std::max(f, device[d]);
    }
  }
  return it->second;
}

std::vector<double> Fractions::by_type(Cut cut, double most) const {
  std::vector<double> result(cluster_.types.size(), 0.0);
  const auto& device = by_device(cut);
  for (int d = 0; d < shares_.devices(); ++d) {
    double& f = result[cluster_.devices[d].type];
    if (device[d] <= most) f = std::max(f, device[d]);
  }
  return result;
}

double Fractions::exchange(int64_t size, int from, int to, const CollectiveModel& net) const {
  auto [it, fresh] = exchange_.try_emplace({Cut(size, from), to});
  if (fresh) it->second = net.exchange(by_device({size, from}), by_device({size, to}));
  return it->second;
}

bool moves_nothing(const Theory& theory, NodeId id, const Triple& triple, const Shares& shares) {
  const Node& node = theory.graph().node(id);
  if (!triple.in[0].is_shard()) return true;
  return shares.of(theory.cut(theory.graph().inputs_of(node)[0], triple.in[0])) ==
         shares.of(theory.cut(node.outputs[0], triple.out[0]));
}

Seconds inner_seconds(const Theory& theory, NodeId id, const Triple& triple, const CostModel& model,
                      const Fractions& fractions) {
  Seconds seconds = 0;
  for (const InnerCollective& c : triple.collectives) {
    const Bytes bytes = model.moved(c);
    if (c.kind == Collective::all_reduce) {
      seconds += model.net().all_reduce(bytes);
      continue;
    }
    const ValueId from = theory.graph().inputs_of(theory.graph().node(id))[0];
    seconds += model.net().exchange(bytes, fractions.exchange(triple.cut, theory.segment(from),
                                                              theory.segment(id), model.net()));
  }
  return seconds;
}

void choose_forms(const Theory& theory, Program* program, const CostModel& model,
                  const Fractions& fractions) {
  program->steps.change([&](std::vector<Step>& steps) {
    for (Step& step : steps) {
      if (step.is_compute() || !has_forms(step.kind)) continue;
      const Placement cut = step.from.is_shard() ? step.from : step.to;
      const auto& shares = fractions.profile(theory.cut(step.value, cut), model.net());
      const Bytes bytes = model.moved(step.kind, theory.graph().spec(step.value));
      auto seconds = [&](PieceForm form) {
        return model.collective(step.kind, bytes, shares, form);
      };
      step.form = seconds(PieceForm::grouped) < seconds(PieceForm::padded) ? PieceForm::grouped
                                                                           : PieceForm::padded;
    }
  });
}

namespace {

// Seconds of a call on every type, and of them those that are cut and those that are not.
struct PricedCall {
  bool free = false;
  std::vector<Seconds> seconds, cut, whole;  // [type]
};

PricedCall price_call(const Work& work, const CostModel& model, const Fractions& fractions) {
  PricedCall price;
  price.free = work.free;
  const auto& f = fractions.by_type(work.cut);
  for (int t = 0; t < model.types(); ++t) {
    Seconds cut, whole;
    price.seconds.push_back(model.compute(t, work, f[t], &cut, &whole));
    price.cut.push_back(cut);
    price.whole.push_back(whole);
  }
  return price;
}

// The stages of the steps [begin, end); of collectives of pure gradients `gradient_part` counts.
void price_steps(const Theory& theory, const Program& program, const CostModel& model,
                 const Fractions& fractions, int begin, int end, double gradient_part,
                 ProgramCost* out) {
  const Graph& graph = theory.graph();
  const int types = model.types();
  const std::vector<bool>& pure = theory.pure_gradients();
  ProgramCost& cost = *out;
  cost.compute.assign(types, 0);
  cost.exchanged.assign(static_cast<size_t>(theory.segments()) * theory.segments(), 0);
  auto new_stage = [&] {
    StageCost stage;
    stage.compute.assign(types, 0);
    stage.cut.assign(static_cast<size_t>(theory.segments()) * types, 0);
    stage.whole.assign(types, 0);
    cost.stages.push_back(std::move(stage));
  };
  new_stage();
  std::vector<std::vector<PricedCall>> priced(theory.tables());  // equal calls cost the same
  GradientRun run(program.sizes);
  // `padded`: seconds per unit of the largest share, of which `seconds` holds the present value.
  // `follows`: a gradient behind another, in its stage.
  auto communicate = [&](Seconds seconds, Seconds padded, double largest, int segment, bool follows,
                         double part) {
    if (!follows) new_stage();
    seconds *= part;
    padded *= part;
    StageCost& stage = cost.stages.back();
    stage.comm += seconds;
    stage.comm_padded += padded;
    stage.comm_fixed += seconds - padded * largest;
    stage.segment = segment;
    cost.comm += seconds;
  };
  const std::vector<JoinedCall> calls = joined_calls(theory, program);
  auto call = calls.begin();
  for (int s = begin; s < end; ++s) {
    const Step& step = program.steps[s];
    while (call != calls.end() && call->begin < s) ++call;
    if (call != calls.end() && call->begin == s && call->end <= end) {
      add_joined(theory, program, *call, model, fractions, &cost);
      run.end();
      s = call->end - 1;
      continue;
    }
    if (step.is_compute()) {
      const auto& triples = theory.triples(step.node);
      const Triple& triple = triples[step.triple];
      auto& table = priced[theory.table(step.node)];
      table.resize(triples.size());
      PricedCall& price = table[step.triple];
      if (price.seconds.empty())
        price = price_call(work_of(theory, step.node, triple), model, fractions);
      if (!triple.collectives.empty() && is_boundary(graph.node(step.node))) {
        const Seconds seconds = inner_seconds(theory, step.node, triple, model, fractions);
        const ValueId value = graph.inputs_of(graph.node(step.node))[0];
        const int from = theory.segment(value), to = theory.segment(step.node);
        const auto bytes = static_cast<Bytes>(graph.spec(value).bytes());
        cost.exchanged[static_cast<size_t>(from) * theory.segments() + to] += bytes;
        if (seconds > 0) {
          run.end();
          communicate(seconds, 0, 0, from, false, 1);
          cost.stages.back().comm_fixed -=
              bytes * fractions.exchange(triple.cut, from, to, model.net());
        }
      } else {
        if (!triple.collectives.empty()) run.end();
        for (const InnerCollective& c : triple.collectives)
          communicate(model.net().all_reduce(model.moved(c)), 0, 0, 0, false, 1);
      }
      if (price.free) continue;
      run.end();
      StageCost& stage = cost.stages.back();
      for (int t = 0; t < types; ++t) {
        stage.compute[t] += price.seconds[t];
        stage.cut[static_cast<size_t>(theory.segment(step.node)) * types + t] += price.cut[t];
        stage.whole[t] += price.whole[t];
        cost.compute[t] += price.seconds[t];
      }
      continue;
    }
    if (moves_nothing(step.kind)) continue;
    const Bytes bytes = model.moved(step.kind, graph.spec(step.value));
    // For all-to-all both cuts matter; they are close, and the one it starts from is used.
    const auto& shares = fractions.profile(
        theory.cut(step.value, step.from.is_shard() ? step.from : step.to), model.net());
    const bool pads = step.form == PieceForm::padded && has_forms(step.kind);
    double largest = shares.largest;
    const bool gradient = step.kind == Collective::all_reduce && pure[step.value.index];
    const bool follows = gradient && run.any;
    if (!gradient) run.end();
    Seconds seconds = gradient ? model.gradient_all_reduce(graph.spec(step.value), &run)
                               : model.collective(step.kind, bytes, shares, step.form);
    communicate(seconds,
                pads && largest > 0
                    ? (seconds - model.collective(step.kind, 0, shares, step.form)) / largest
                    : 0,
                largest, theory.segment(step.value), follows,
                pure[step.value.index] && !step.each ? gradient_part : 1);
  }
}

Seconds sum_of(const ProgramCost& cost) {
  Seconds sum = 0;
  for (const StageCost& stage : cost.stages)
    sum += stage.comm + *std::max_element(stage.compute.begin(), stage.compute.end());
  return sum;
}

// What keeping state twice takes, in a stage of its own: gradients go to the other copies, which
// the optimizer steps too. Shares near these are priced as if a device kept as much as it has.
void add_second_copies(const Theory& theory, const std::vector<Placement>& stored,
                       const CostModel& model, const Fractions& fractions, Optimizer optimizer,
                       double part, ProgramCost* cost) {
  if (!fractions.twice()) return;
  const auto types = static_cast<size_t>(model.types());
  StageCost stage;
  stage.compute.assign(types, 0);
  stage.cut.assign(types * theory.segments(), 0);
  stage.whole.assign(types, 0);
  for (const Parameter& p : theory.graph().parameters) {
    const SecondCopy copy =
        second_copy(theory, p, stored[p.value.index], model, fractions, optimizer);
    if (copy.send == 0) continue;
    stage.comm += part * copy.send;
    const Cut cut = theory.cut(p.value, stored[p.value.index]);
    for (size_t t = 0; t < types; ++t) {
      const Seconds s = part * copy.update[t];
      const double own = fractions.by_type(cut)[t];
      stage.compute[t] += s;
      cost->compute[t] += s;
      if (own > 0)
        stage.cut[theory.segment(p.value) * types + t] += s / own;
      else
        stage.whole[t] += s;
    }
  }
  if (stage.comm == 0) return;
  stage.comm_fixed = stage.comm += part * model.latency();
  cost->comm += stage.comm;
  cost->stages.push_back(std::move(stage));
}

}  // namespace

ProgramCost cost_of(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, Optimizer optimizer, int micro_batches,
                    bool with_memory) {
  const Graph& graph = theory.graph();
  const int types = model.types();
  const double part = 1.0 / micro_batches;
  ProgramCost cost;
  price_steps(theory, program, model, fractions, 0, static_cast<int>(program.steps.size()), part,
              &cost);
  // The optimizer works on local pieces.
  const std::vector<Placement> stored = stored_placements(theory, program);
  add_second_copies(theory, stored, model, fractions, optimizer, part, &cost);
  for (const Parameter& p : graph.parameters) {
    if (!p.gradient.valid()) continue;
    Placement placement = stored[p.value.index];
    const auto& f = fractions.by_type(theory.cut(p.value, placement));
    Bytes bytes = static_cast<Bytes>(graph.spec(p.value).bytes());
    for (int t = 0; t < types; ++t) {
      Seconds s = part * model.update(t, bytes * f[t], optimizer);
      StageCost& stage = cost.stages.back();
      stage.compute[t] += s;
      cost.compute[t] += s;
      if (placement.is_shard()) {
        Seconds linear = 0;
        model.update(t, bytes, optimizer, &linear);
        stage.cut[static_cast<size_t>(theory.segment(p.value)) * types + t] += part * linear;
      } else {
        stage.whole[t] += s;
      }
    }
  }
  for (int t = 0; t < types; ++t) {
    const Seconds seconds = part * model.per_step(t, graph);
    StageCost& stage = cost.stages.back();
    stage.compute[t] += seconds;
    stage.whole[t] += seconds;
    cost.compute[t] += seconds;
  }
  cost.step = sum_of(cost);
  if (with_memory) {
    cost.memory = memory_of(theory, program, fractions, types, optimizer);
  } else {
    const std::vector<Bytes> none(types, 0);
    cost.memory.peak = cost.memory.allocated = cost.memory.state = cost.memory.whole = none;
    cost.memory.cut.assign(static_cast<size_t>(theory.segments()) * types, 0);
  }
  return cost;
}

PhaseSeconds phase_seconds(const Theory& theory, const Program& program, const CostModel& model,
                           const Fractions& fractions, Optimizer optimizer) {
  const Phases phases = phases_of(theory, program);
  const int end = static_cast<int>(program.steps.size());
  auto seconds = [&](int first, int last) {
    ProgramCost cost;
    price_steps(theory, program, model, fractions, first, last, 1, &cost);
    return sum_of(cost);
  };
  PhaseSeconds result;
  result.forward = seconds(0, phases.backward);
  result.weights = seconds(phases.weights, phases.reduction);
  result.backward = seconds(phases.backward, phases.weights) + result.weights;
  result.reduction = seconds(phases.reduction, end);
  const std::vector<Placement> stored = stored_placements(theory, program);
  std::vector<Seconds> update(model.types(), 0);
  for (const Parameter& p : theory.graph().parameters) {
    if (!p.gradient.valid()) continue;
    const auto& f = fractions.by_type(theory.cut(p.value, stored[p.value.index]));
    for (int t = 0; t < model.types(); ++t)
      update[t] += model.update(t, static_cast<Bytes>(theory.graph().spec(p.value).bytes()) * f[t],
                                optimizer);
  }
  result.update = *std::max_element(update.begin(), update.end());
  return result;
}

}  // namespace motley

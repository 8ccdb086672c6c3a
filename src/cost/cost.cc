#include "cost/cost.h"

#include <algorithm>

#include "core/error.h"

namespace motley {

const char* to_string(Optimizer optimizer) { return optimizer == Optimizer::sgd ? "sgd" : "adamw"; }

bool parse_optimizer(const std::string& text, Optimizer* optimizer) {
  if (text == "sgd") return *optimizer = Optimizer::sgd, true;
  if (text == "adamw") return *optimizer = Optimizer::adamw, true;
  return false;
}

double state_factor(Optimizer optimizer) { return optimizer == Optimizer::sgd ? 1 : 2; }

Work work_of(const Theory& theory, NodeId id, const Triple& triple) {
  const Graph& graph = theory.graph();
  const Node& node = graph.node(id);
  Work work;
  work.cut = triple.cut;
  const OpDef* op = find_op(node.op);
  if (is_source(node) || (op && op->alias)) {
    work.free = true;
    return work;
  }
  int64_t largest = 0;
  auto touch = [&](ValueId v, Placement p) {
    const TensorSpec& spec = graph.spec(v);
    (p.is_shard() ? work.cut_bytes : work.whole_bytes) += static_cast<Bytes>(spec.bytes());
    largest = std::max(largest, spec.numel());
    work.half = work.half || spec.dtype == DType::f16 || spec.dtype == DType::bf16;
  };
  auto inputs = graph.inputs_of(node);
  for (size_t i = 0; i < inputs.size(); ++i) touch(inputs[i], triple.in[i]);
  for (size_t o = 0; o < node.outputs.size(); ++o)
    if (node.outputs[o].valid()) touch(node.outputs[o], triple.out[o]);
  work.flops = op && op->flops ? op->flops(graph, node) : static_cast<Flops>(largest);
  return work;
}

CostModel::CostModel(const Cluster& cluster) : cluster_(cluster), net_(cluster) {}

Seconds CostModel::compute(int type, const Work& work, double fraction) const {
  if (work.free) return 0;
  if (work.cut == 0) fraction = 1;
  if (fraction == 0) return 0;
  const DeviceType& t = cluster_.types[type];
  double flops = work.flops * fraction, bytes = work.cut_bytes * fraction + work.whole_bytes;
  return t.overhead +
         std::max(flops / (work.half ? t.half_flops : t.flops), bytes / t.memory_bandwidth);
}

Seconds CostModel::update(int type, Bytes bytes, Optimizer optimizer) const {
  if (bytes == 0) return 0;
  // Reads parameter, gradient and state, writes parameter and state.
  const DeviceType& t = cluster_.types[type];
  return t.overhead + bytes * (3 + 2 * state_factor(optimizer)) / t.memory_bandwidth;
}

Seconds CostModel::collective(CollectiveKind kind, Bytes bytes,
                              const std::vector<double>& shares) const {
  switch (kind) {
    case CollectiveKind::all_reduce:
      return net_.all_reduce(bytes);
    case CollectiveKind::reduce_scatter:
      return net_.reduce_scatter(bytes, shares);
    case CollectiveKind::all_gather:
      return net_.all_gather(bytes, shares);
    case CollectiveKind::all_to_all:
      return net_.all_to_all(bytes, shares);
    case CollectiveKind::slice:
    case CollectiveKind::mask:
      return 0;
  }
  return 0;
}

const std::vector<double>& Fractions::by_device(int64_t cut) const {
  auto [it, fresh] = by_device_.try_emplace(cut);
  if (fresh) {
    it->second.assign(shares_.devices(), 1.0);
    if (cut > 0)
      for (int d = 0; d < shares_.devices(); ++d)
        it->second[d] = static_cast<double>(shares_.of(cut)[d]) / static_cast<double>(cut);
  }
  return it->second;
}

const std::vector<double>& Fractions::by_type(int64_t cut) const {
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

namespace {

int64_t cut_of(const Theory& theory, ValueId v, Placement p) {
  return p.is_shard() ? theory.cut_size(v, p) : 0;
}

}  // namespace

ProgramCost cost_of(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, Optimizer optimizer) {
  const Graph& graph = theory.graph();
  const int types = model.types();
  ProgramCost cost;
  cost.compute.assign(types, 0);
  cost.stages.push_back({0, std::vector<Seconds>(types, 0)});
  auto compute = [&](const Work& work) {
    if (work.free) return;
    const auto& f = fractions.by_type(work.cut);
    for (int t = 0; t < types; ++t) {
      Seconds s = model.compute(t, work, f[t]);
      cost.stages.back().compute[t] += s;
      cost.compute[t] += s;
    }
  };
  auto communicate = [&](Seconds s, bool joins_previous) {
    if (joins_previous)
      cost.stages.back().comm += s;
    else
      cost.stages.push_back({s, std::vector<Seconds>(types, 0)});
    cost.comm += s;
  };
  bool after_all_reduce = false;
  for (const Step& step : program.steps) {
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      Work work = work_of(theory, step.node, triple);
      for (const InnerCollective& c : triple.collectives)
        communicate(model.net().all_reduce(static_cast<Bytes>(c.bytes)), false);
      compute(work);
      if (!work.free) after_all_reduce = false;
      continue;
    }
    Bytes bytes = static_cast<Bytes>(graph.spec(step.value).bytes());
    if (step.kind == CollectiveKind::slice || step.kind == CollectiveKind::mask) continue;
    bool joins = step.kind == CollectiveKind::all_reduce && after_all_reduce;
    // For all-to-all both cuts matter; they are close, and the one that is left is used.
    Placement cut = step.from.is_shard() ? step.from : step.to;
    Seconds s =
        model.collective(step.kind, bytes, fractions.by_device(cut_of(theory, step.value, cut)));
    if (joins) s = std::max(0.0, s - model.net().all_reduce(0));
    communicate(s, joins);
    after_all_reduce = step.kind == CollectiveKind::all_reduce;
  }
  // The optimizer works on local pieces.
  const std::vector<Placement> stored = stored_placements(theory, program);
  for (int t = 0; t < types; ++t) {
    Seconds s = 0;
    for (const Parameter& p : graph.parameters) {
      if (!p.gradient.valid()) continue;
      Placement placement = stored[p.value.index];
      s += model.update(t,
                        static_cast<Bytes>(graph.spec(p.value).bytes()) *
                            fractions.by_type(cut_of(theory, p.value, placement))[t],
                        optimizer);
    }
    cost.stages.back().compute[t] += s;
    cost.compute[t] += s;
  }
  for (const Stage& stage : cost.stages)
    cost.step += stage.comm + *std::max_element(stage.compute.begin(), stage.compute.end());
  memory_of(theory, program, fractions, types, optimizer, &cost.peak_memory, &cost.state_memory);
  return cost;
}

void memory_of(const Theory& theory, const Program& program, const Fractions& fractions, int types,
               Optimizer optimizer, std::vector<Bytes>* peak, std::vector<Bytes>* state) {
  const Graph& graph = theory.graph();
  std::vector<Held> held = lifetimes(theory, program);
  state->assign(types, 0);
  const std::vector<Placement> stored = stored_placements(theory, program);
  std::vector<bool> persistent(graph.values.size());
  for (const Parameter& p : graph.parameters) {
    persistent[p.value.index] = true;
    if (p.gradient.valid()) persistent[p.gradient.index] = true;
    double copies = p.gradient.valid() ? 2 + state_factor(optimizer) : 1;
    const auto& f = fractions.by_type(cut_of(theory, p.value, stored[p.value.index]));
    for (int t = 0; t < types; ++t)
      (*state)[t] += copies * static_cast<Bytes>(graph.spec(p.value).bytes()) * f[t];
  }
  // Aliases share the storage of what they view: the storage lives until its last alias dies.
  std::vector<int> storage(held.size());
  std::map<std::pair<ValueId, Placement>, int> index;
  const int end = static_cast<int>(program.steps.size());
  for (size_t h = 0; h < held.size(); ++h) {
    storage[h] = static_cast<int>(h);
    index[{held[h].value, held[h].placement}] = static_cast<int>(h);
    const Step& step = program.steps[held[h].made];
    if (step.is_compute()) {
      const Node& node = graph.node(step.node);
      const OpDef* op = find_op(node.op);
      if (op && op->alias) {
        const Triple& triple = theory.triples(step.node)[step.triple];
        auto it = index.find({graph.inputs_of(node)[0], triple.in[0]});
        if (it != index.end()) storage[h] = storage[it->second];
      }
    } else if (step.kind == CollectiveKind::slice) {
      auto it = index.find({step.value, step.from});
      if (it != index.end()) storage[h] = storage[it->second];
    }
    held[storage[h]].last = std::max(held[storage[h]].last, held[h].last);
  }
  std::vector<std::vector<Bytes>> delta(end + 2);
  for (size_t h = 0; h < held.size(); ++h) {
    if (storage[h] != static_cast<int>(h)) continue;
    const Held& x = held[h];
    bool whole_step = x.last == end && persistent[x.value.index];
    if (whole_step) continue;  // counted as state
    const auto& f = fractions.by_type(cut_of(theory, x.value, x.placement));
    auto add = [&](int at, double sign) {
      if (delta[at].empty()) delta[at].assign(types, 0);
      for (int t = 0; t < types; ++t)
        delta[at][t] += sign * static_cast<Bytes>(graph.spec(x.value).bytes()) * f[t];
    };
    add(x.made, 1);
    add(x.last + 1, -1);
  }
  peak->assign(types, 0);
  std::vector<Bytes> now(types, 0);
  for (const auto& d : delta) {
    if (d.empty()) continue;
    for (int t = 0; t < types; ++t) {
      now[t] += d[t];
      (*peak)[t] = std::max((*peak)[t], now[t]);
    }
  }
  for (int t = 0; t < types; ++t) (*peak)[t] += (*state)[t];
}

}  // namespace motley

#include "cost/parts.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.h"
#include "cost/storage.h"

namespace motley {

namespace {

class Parts {
 public:
  Parts(const Theory& theory, const Program& program, const CostModel& model,
        const Fractions& fractions, Optimizer optimizer, std::vector<int> given, int parts)
      : theory_(theory),
        graph_(theory.graph()),
        program_(program),
        model_(model),
        fractions_(fractions),
        optimizer_(optimizer),
        consumers_(graph_.consumers()),
        part_of_(std::move(given)),
        phases_(phases_of(theory, program)),
        pure_(theory.pure_gradients()),
        end_(static_cast<int>(program.steps.size())),
        result_(parts) {
    MOTLEY_CHECK(part_of_.size() == graph_.nodes.size() && parts >= 1);
    const std::vector<DeviceType>& types = model.cluster().types;
    Bytes least = types[0].memory;
    for (const DeviceType& type : types) least = std::min(least, type.memory);
    for (const DeviceType& type : types)
      fullness_.push_back(type.memory > 0 ? least / type.memory : 1);
    complete();
  }

  std::vector<PartCost> run() {
    price_steps();
    add_parameters();
    add_memory();
    add_inputs();
    return std::move(result_);
  }

 private:
  // Readers come behind what they read.
  void complete() {
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      if (part_of_[n] >= 0) continue;
      for (ValueId v : graph_.nodes[n].outputs) {
        if (!v.valid()) continue;
        for (NodeId reader : consumers_[v.index]) {
          const int part = part_of_[reader.index];
          if (part >= 0 && (part_of_[n] < 0 || part < part_of_[n])) part_of_[n] = part;
        }
      }
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (part_of_[n] >= 0) continue;
      const ValueList read = graph_.inputs_of(graph_.nodes[n]);
      part_of_[n] = read.empty() ? 0 : part_of(read[0]);
    }
  }

  int part_of(ValueId v) const { return part_of_[graph_.value(v).producer.index]; }
  int part_of(const Step& step) const {
    return step.is_compute() ? part_of_[step.node.index] : part_of(step.value);
  }
  // The piece that fills its device most, as of one with the least memory.
  double fraction(ValueId v, Placement placement) const {
    const auto& f = fractions_.by_type(theory_.cut(v, placement));
    double most = 0;
    for (size_t t = 0; t < f.size(); ++t) most = std::max(most, f[t] * fullness_[t]);
    return most;
  }
  Bytes bytes_of(ValueId v) const { return static_cast<Bytes>(graph_.spec(v).bytes()); }

  // As phase_seconds() prices them.
  void price_steps() {
    struct Priced {
      bool known = false, free = false;
      Seconds seconds = 0;
    };
    std::vector<std::vector<Priced>> priced(theory_.tables());
    GradientRun run(program_.sizes);
    for (int s = 0; s < end_; ++s) {
      if (s == phases_.backward || s == phases_.reduction) run.end();
      const Step& step = program_.steps[s];
      Seconds seconds = 0;
      if (step.is_compute()) {
        const auto& triples = theory_.triples(step.node);
        const Triple& triple = triples[step.triple];
        if (!triple.collectives.empty()) {
          seconds = inner_seconds(theory_, step.node, triple, model_, fractions_);
          if (seconds > 0) run.end();
        }
        auto& table = priced[theory_.table(step.node)];
        table.resize(triples.size());
        Priced& price = table[step.triple];
        if (!price.known) {
          const Work work = work_of(theory_, step.node, triple);
          price.known = true;
          price.free = work.free;
          const auto& f = fractions_.by_type(work.cut);
          for (int t = 0; t < model_.types(); ++t)
            price.seconds = std::max(price.seconds, model_.compute(t, work, f[t]));
        }
        if (!price.free) {
          seconds += price.seconds;
          run.end();
        }
      } else if (!moves_nothing(step.kind)) {
        const Bytes bytes = model_.moved(step.kind, graph_.spec(step.value));
        const bool gradient = step.kind == Collective::all_reduce && pure_[step.value.index];
        if (gradient) {
          seconds = model_.gradient_all_reduce(graph_.spec(step.value), &run);
        } else {
          const Placement cut = step.from.is_shard() ? step.from : step.to;
          seconds = model_.collective(
              step.kind, bytes, fractions_.profile(theory_.cut(step.value, cut), model_.net()),
              step.form);
        }
        if (!gradient) run.end();
      }
      PhaseSeconds& to = result_[part_of(step)].seconds;
      (s < phases_.backward    ? to.forward
       : s < phases_.reduction ? to.backward
                               : to.reduction) += seconds;
    }
  }

  void add_parameters() {
    const std::vector<Placement> stored = stored_placements(theory_, program_);
    for (const Parameter& p : graph_.parameters) {
      std::set<int> readers;
      for (NodeId reader : consumers_[p.value.index])
        if (graph_.node(reader).phase == Phase::forward) readers.insert(part_of_[reader.index]);
      if (readers.empty()) readers.insert(part_of(p.value));
      const double f = fraction(p.value, stored[p.value.index]);
      for (int part : readers) result_[part].state += state_bytes(graph_, p, optimizer_) * f;
      if (!p.gradient.valid()) continue;
      PartCost& cost = result_[*readers.begin()];
      Seconds slowest = 0;
      const auto& by_type = fractions_.by_type(theory_.cut(p.value, stored[p.value.index]));
      for (int t = 0; t < model_.types(); ++t)
        slowest = std::max(slowest, model_.update(t, bytes_of(p.value) * by_type[t], optimizer_));
      cost.seconds.update += slowest;
      // The optimizer has it in the type of the parameter, too.
      if (graph_.spec(p.gradient).dtype != graph_.spec(p.value).dtype)
        cost.late += bytes_of(p.value) * f;
    }
  }

  void add_memory() {
    std::vector<bool> persistent(graph_.values.size());
    std::vector<double> as_state(graph_.values.size(), 0);  // of gradients, by fraction()
    const std::vector<Placement> stored = stored_placements(theory_, program_);
    for (const Parameter& p : graph_.parameters) {
      persistent[p.value.index] = true;
      if (!p.gradient.valid()) continue;
      persistent[p.gradient.index] = true;
      as_state[p.gradient.index] = fraction(p.value, stored[p.value.index]);
    }
    std::set<std::pair<ValueId, Placement>> summed;
    for (const auto& [v, p] : accumulated(theory_, program_)) {
      // Sums of 16-bit gradients have 32 bits. They are there before what is counted as state.
      const bool half = is_half(graph_.spec(v).dtype);
      result_[part_of(v)].state +=
          bytes_of(v) * ((half ? 2 : 1) * fraction(v, p) - as_state[v.index]);
      summed.insert({v, p});
    }
    std::vector<Bytes> change(static_cast<size_t>(end_) + 2);  // [step]
    for (const Storage& x : storages(theory_, program_, fractions_, true,
                                     gradient_messages(theory_, program_, fractions_.shares()))) {
      if (std::any_of(x.to_end.begin(), x.to_end.end(),
                      [&](const auto& what) { return persistent[what.first.index]; }))
        continue;  // state
      const Bytes bytes = bytes_of(x.value) * fraction(x.value, x.placement);
      PartCost& cost = result_[part_of(x.value)];
      if (x.made < phases_.backward && x.last >= phases_.backward) {
        cost.held += bytes;
      } else if (summed.count({x.value, x.placement})) {  // added to its sum when it is there
        change[x.made] += bytes;
        change[x.made + 1] -= bytes;
      } else if (x.made < phases_.reduction && x.last >= phases_.reduction) {
        cost.late += bytes;
      } else {
        change[x.made] += bytes;
        change[x.last + 1] -= bytes;
      }
    }
    std::vector<Bytes> local;
    Bytes now = 0;
    for (int s = 0; s < end_; ++s) {
      now += change[s];
      PartCost& cost = result_[part_of(program_.steps[s])];
      Bytes fixed = 0;
      for (const Amount& amount : workspace_of(theory_, program_.steps[s], fractions_)) {
        Bytes most = 0;
        local_bytes(amount, fractions_, &local);
        for (size_t t = 0; t < local.size(); ++t) most = std::max(most, local[t] * fullness_[t]);
        fixed += most;
      }
      cost.workspace = std::max(cost.workspace, now + fixed);
    }
  }

  void add_inputs() {
    // How a value is first there whole or cut.
    std::vector<Placement> placement(graph_.values.size(), Placement::partial());
    auto make = [&](ValueId v, Placement p) {
      if (v.valid() && placement[v.index].is_partial()) placement[v.index] = p;
    };
    for (int s = 0; s < phases_.backward; ++s) {
      const Step& step = program_.steps[s];
      if (step.is_compute()) {
        const Node& node = graph_.node(step.node);
        for (size_t o = 0; o < node.outputs.size(); ++o)
          make(node.outputs[o], theory_.triples(step.node)[step.triple].out[o]);
      } else {
        make(step.value, step.to);
      }
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (is_source(node) || node.phase != Phase::forward) continue;
      for (ValueId v : node.outputs) {
        if (!v.valid()) continue;
        int last = part_of_[n];
        for (NodeId reader : consumers_[v.index])
          if (graph_.node(reader).phase == Phase::forward)
            last = std::max(last, part_of_[reader.index]);
        for (int part = part_of_[n] + 1; part <= last; ++part)
          result_[part].held_inputs += bytes_of(v) * fraction(v, placement[v.index]);
      }
    }
  }

  const Theory& theory_;
  const Graph& graph_;
  const Program& program_;
  const CostModel& model_;
  const Fractions& fractions_;
  Optimizer optimizer_;
  std::vector<std::vector<NodeId>> consumers_;  // [value]
  std::vector<int> part_of_;                    // [node]
  Phases phases_;
  std::vector<bool> pure_;  // [value]
  int end_;
  std::vector<double> fullness_;  // [type] the least memory of any over its own
  std::vector<PartCost> result_;
};

}  // namespace

std::vector<PartCost> part_costs(const Theory& theory, const Program& program,
                                 const CostModel& model, const Fractions& fractions,
                                 Optimizer optimizer, const std::vector<int>& part_of, int parts) {
  return Parts(theory, program, model, fractions, optimizer, part_of, parts).run();
}

}  // namespace motley

#include "explain/tensors.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "cluster/part.h"
#include "planner/alternation.h"
#include "shard/restricted.h"
#include "sim/simulate.h"

namespace motley::explain {

namespace {

struct Tensors {
  TensorChoice choice;
  std::vector<NodeId> nodes;  // that make them
  Placement placement;
};

std::string starred(const std::string& name) {
  std::string out;
  for (const char c : name) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0)
      out += c;
    else if (out.empty() || out.back() != '*')
      out += '*';
  }
  return out;
}

std::string words(const Theory& theory, ValueId value, Placement p) {
  if (p.is_replicated()) return "whole on every device";
  if (p.is_partial()) return "partial sums";
  return fmt::format("cut in dimension {}{} (of {})", p.dim,
                     p.factor ? fmt::format(", factor {}", p.factor) : "",
                     theory.cut_size(value, p));
}

// [node] What the node's first output is made as; by the first step that runs it.
std::vector<Placement> made_as(const Theory& theory, const Program& program) {
  std::vector<Placement> made(theory.graph().nodes.size());
  for (const Step& step : program.steps)
    if (step.is_compute() && !step.again && !theory.triples(step.node)[step.triple].out.empty())
      made[step.node.index] = theory.triples(step.node)[step.triple].out[0];
  return made;
}

bool has_gradient(const Graph& graph, ValueId value) {
  return std::any_of(graph.parameters.begin(), graph.parameters.end(),
                     [&](const Parameter& p) { return p.value == value && p.gradient.valid(); });
}

std::vector<Tensors> groups_of(const Theory& theory, const Program& program, int stage) {
  const Graph& graph = theory.graph();
  const std::vector<Placement> made = made_as(theory, program);
  const std::vector<Placement> stored = stored_placements(theory, program);
  std::map<std::tuple<std::string, Shape, Placement>, Tensors> groups;
  const auto add = [&](const std::string& name, ValueId value, Placement placement) {
    const TensorSpec& spec = graph.spec(value);
    Tensors& t = groups[{name, spec.shape, placement}];
    if (t.nodes.empty()) {
      t.choice.name = name;
      t.choice.stage = stage;
      t.choice.count = 0;
      t.choice.spec = spec;
      t.choice.placement = words(theory, value, placement);
      t.placement = placement;
    }
    ++t.choice.count;
    t.choice.bytes += static_cast<Bytes>(spec.bytes());
    t.nodes.push_back(graph.value(value).producer);
  };
  for (const Parameter& p : graph.parameters) add(starred(p.name), p.value, stored[p.value.index]);
  std::vector<bool> saved(graph.values.size(), false);
  for (const ValueId v : saved_activations(graph)) saved[v.index] = true;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const OpDef* op = find_op(node.op);
    if (node.phase != Phase::forward || is_source(node) || (op && op->alias)) continue;
    if (node.outputs.empty() || !node.outputs[0].valid() || !saved[node.outputs[0].index]) continue;
    add("activations of " + node.op.str(), node.outputs[0], made[n]);
  }
  std::vector<Tensors> list;
  for (auto& [key, t] : groups) list.push_back(std::move(t));
  return list;
}

struct Outcome {
  Seconds step = 0, compute = 0, comm = 0;
  Bytes memory = 0;
  std::string lacks;  // "V100-16GB lacks 3 GiB"; empty: it fits
};

Outcome outcome_of(const Plan& plan) {
  const Simulation sim = simulate(plan);
  Outcome out;
  out.step = sim.step;
  Bytes most = 0;
  for (int d = 0; d < plan.cluster.size(); ++d) {
    const DeviceTime& t = sim.devices[d];
    const DeviceType& type = plan.cluster.type_of(d);
    out.compute = std::max(out.compute, t.busy);
    out.comm = std::max(out.comm, t.exposed_comm);
    out.memory = std::max(out.memory, t.peak_memory);
    if (const Bytes lack = t.peak_memory - type.memory; lack > most) {
      most = lack;
      out.lacks = fmt::format("{} lacks {}", type.name, format_bytes(lack));
    }
  }
  return out;
}

class Alternatives {
 public:
  Alternatives(Plan* plan, const Options& options, const Deadline& deadline)
      : plan_(plan), options_(options), deadline_(deadline), now_(outcome_of(*plan)) {}

  std::vector<TensorChoice> run(bool* out_of_time) {
    std::vector<Tensors> all;
    if (!plan_->pipeline) {
      if (plan_->cluster.size() > 1 && !plan_->duplex)
        all = groups_of(*plan_->theory, plan_->program, -1);
    } else {
      for (int s = 0; s < plan_->pipeline->stages(); ++s)
        if (plan_->pipeline->replicas[0].stages[s].devices.size() > 1)
          for (Tensors& t : groups_of(plan_->pipeline->theory(s),
                                      plan_->pipeline->replicas[0].stages[s].program, s))
            all.push_back(std::move(t));
    }
    std::stable_sort(all.begin(), all.end(), [](const Tensors& a, const Tensors& b) {
      return a.choice.bytes > b.choice.bytes;
    });
    if (all.size() > static_cast<size_t>(options_.tensors))
      all.resize(static_cast<size_t>(options_.tensors));
    std::vector<TensorChoice> choices;
    for (Tensors& t : all) {
      if (deadline_.over()) {
        *out_of_time = true;
        break;
      }
      choices.push_back(choice(std::move(t)));
    }
    return choices;
  }

 private:
  TensorChoice choice(Tensors t) {
    TensorChoice c = std::move(t.choice);
    c.compute = now_.compute, c.comm = now_.comm, c.memory = now_.memory;
    const Theory& theory = c.stage < 0 ? *plan_->theory : plan_->pipeline->theory(c.stage);
    const ValueId value = theory.graph().node(t.nodes[0]).outputs[0];
    if (is_source(theory.graph().node(t.nodes[0])) && !has_gradient(theory.graph(), value)) {
      c.why = "its gradient is not made here: it is held whole, and pieces of it are free";
      return c;
    }
    for (const Placement p : theory.placements(value)) {
      if (p == t.placement || deadline_.over()) continue;
      Theory restricted(theory.graph());
      if (!restricted.restrict_to(t.nodes, p)) continue;
      TensorChoice::Other other;
      other.placement = words(theory, value, p);
      try {
        evaluate(theory, restricted, c.stage, &other);
      } catch (const TimeIsUp&) {
        other.reason = "no program was found in time";
      }
      c.others.push_back(std::move(other));
    }
    std::stable_sort(c.others.begin(), c.others.end(),
                     [](const TensorChoice::Other& a, const TensorChoice::Other& b) {
                       return std::pair(!a.feasible, a.step) < std::pair(!b.feasible, b.step);
                     });
    c.why = why(c);
    return c;
  }

  void evaluate(const Theory& theory, const Theory& restricted, int stage,
                TensorChoice::Other* other) {
    planner::AlternationOptions search;
    search.optimizer = plan_->optimizer;
    search.redundancy = plan_->redundancy;
    search.certify = false;
    search.polish = false;
    search.overlap = stage < 0;
    search.limits.deadline = deadline_.part(0.25);
    std::vector<Program*> places;
    if (stage < 0) {
      if (plan_->ratios.size() == 1) search.ratios = plan_->ratios[0];
      places = {&plan_->program};
    } else {
      auto& replicas = plan_->pipeline->replicas;
      const StagePlan& first = replicas[0].stages[stage];
      search.ratios = first.ratios;
      search.memory_limit = false;
      search.micro_batches = replicas[0].micro_batches;
      for (ReplicaPlan& replica : replicas)
        if (replica.stages[stage].program.steps == first.program.steps)
          places.push_back(&replica.stages[stage].program);
    }
    const Cluster part =
        stage < 0 ? plan_->cluster
                  : part_of(plan_->cluster, plan_->pipeline->replicas[0].stages[stage].devices);
    const CostModel model(
        part, stage < 0 ? plan_->reductions
                        : programs_for(plan_->reductions,
                                       plan_->pipeline->replicas[0].stages[stage].devices,
                                       plan_->cluster.size()));
    const planner::Alternation found = planner::alternate(restricted, model, search);
    if (!found.feasible) {
      other->reason = found.reason;
      return;
    }
    Program program = renumbered(restricted, theory, found.program);
    if (stage >= 0) program = phase_ordered(theory, program);
    std::vector<Program> before;
    for (Program* place : places) before.push_back(std::exchange(*place, program));
    const Ratios ratios = plan_->ratios;
    if (stage < 0) plan_->ratios = found.ratios;
    const Outcome outcome = outcome_of(*plan_);
    plan_->ratios = ratios;
    for (size_t i = 0; i < places.size(); ++i) *places[i] = std::move(before[i]);
    other->feasible = outcome.lacks.empty() || !now_.lacks.empty();
    other->reason = outcome.lacks;
    other->step = outcome.step, other->compute = outcome.compute, other->comm = outcome.comm;
    other->memory = outcome.memory;
  }

  std::string why(const TensorChoice& c) const {
    if (c.others.empty()) return "it cannot be held otherwise";
    const TensorChoice::Other& next = c.others[0];
    if (!next.feasible) return fmt::format("nothing else fits: {} {}", next.placement, next.reason);
    const Seconds more = next.step - now_.step;
    if (more <= 1e-3 * now_.step && more >= -1e-3 * now_.step)
      return fmt::format("{} would take as long", next.placement);
    if (more < 0)
      return fmt::format(
          "{} would take {} less: the plan's search, which knows estimates, missed it",
          next.placement, format_seconds(-more));
    std::vector<std::string> terms;
    const auto term = [&](const char* what, Seconds was, Seconds is) {
      if (std::abs(is - was) > 0.02 * more)
        terms.push_back(fmt::format("{}{} of {}", is > was ? "+" : "-",
                                    format_seconds(std::abs(is - was)), what));
    };
    term("communication", now_.comm, next.comm);
    term("computation", now_.compute, next.compute);
    return fmt::format("{} would take {} more ({:.1f}%){}{}", next.placement, format_seconds(more),
                       100 * more / now_.step, terms.empty() ? "" : ": ", fmt::join(terms, ", "));
  }

  Plan* plan_;
  const Options& options_;
  const Deadline& deadline_;
  const Outcome now_;
};

}  // namespace

std::vector<TensorChoice> tensor_choices(Plan* plan, const Options& options,
                                         const Deadline& deadline, bool* out_of_time) {
  return options.tensors > 0 ? Alternatives(plan, options, deadline).run(out_of_time)
                             : std::vector<TensorChoice>();
}

}  // namespace motley::explain

#include <algorithm>
#include <map>
#include <tuple>

#include "core/error.h"
#include "cost/allocated.h"
#include "cost/overlap.h"
#include "plan/plan.h"
#include "shard/joined.h"

namespace motley {

const char* role_of(const Graph& graph, const std::vector<bool>& is_gradient, ValueId value) {
  if (is_gradient[value.index]) return "gradients";
  for (;;) {
    const Node& producer = graph.node(graph.value(value).producer);
    if (producer.op == "motley::parameter") return "parameters";
    const OpDef* op = find_op(producer.op);
    if (!op || !op->alias) return "activations";
    value = graph.inputs_of(producer)[0];
  }
}

namespace {

std::string describe_precision(const Plan& plan) {
  return plan.precision == DType::f32
             ? ""
             : fmt::format("  precision   {}; parameters and optimizer state in f32\n",
                           to_string(plan.precision));
}

std::string describe_reductions(const Plan& plan) {
  std::map<std::string, int> groups;
  for (const ReductionProgram& program : plan.reductions) {
    std::vector<std::string> steps;
    for (const ReductionStep& step : program.steps)
      steps.push_back(fmt::format(
          "{} in {} of {}", to_string(step.collective),
          step.groups.size() == 1 ? "one group" : fmt::format("{} groups", step.groups.size()),
          step.groups.empty() ? 0 : step.groups[0].size()));
    ++groups[fmt::format("from {} on: {}", format_bytes(program.from),
                         fmt::join(steps, ", then "))];
  }
  std::string out;
  for (const auto& [text, count] : groups)
    out += fmt::format("  reductions  all_reduce {}{}\n", text,
                       count > 1 ? fmt::format(" (in {} groups of devices)", count) : "");
  return out;
}

// Of messages of gradients, if they have other sizes than usual.
std::string describe_sizes(const Program& program, const std::string& whose) {
  const GradientSizes& sizes = program.sizes;
  if (sizes == GradientSizes()) return "";
  return fmt::format("  gradients   {}of less than {} share messages of about {}\n", whose,
                     format_bytes(sizes.alone), format_bytes(sizes.together));
}

std::string describe_schedule(const PipelinePlan& pipeline) {
  std::vector<int> counts;
  std::vector<std::string> behind;
  bool splits = false;
  for (const StagePlan& stage : pipeline.replicas[0].stages) {
    counts.push_back(stage.warm_up);
    splits = splits || has_later(stage.program);
    behind.push_back(has_later(stage.program) ? std::to_string(stage.weights_behind) : "-");
  }
  return fmt::format("  schedule    {}: warm-up {}{}\n", pipeline.schedule, fmt::join(counts, ", "),
                     splits ? fmt::format("; gradients of weights {} micro-batches behind",
                                          fmt::join(behind, ", "))
                            : "");
}

// How many replicas that are alike are told together.
constexpr size_t kTogether = 4;

// Of a stage of one replica.
struct StageLine {
  std::string types, devices, rest;
};

// ", recomputes 60%": of what it computes in forward passes. `known`: of replicas with the same steps.
using KnownShares = std::map<const std::vector<Step>*, double>;
std::string recomputes(const Theory& theory, const StagePlan& stage, KnownShares* known) {
  double share = 1;
  if (!stage.recompute) {
    const auto [it, fresh] = known->try_emplace(&stage.program.steps.all(), 0);
    if (fresh) it->second = computed_again(theory, stage);
    share = it->second;
  }
  return share > 0 ? fmt::format(", recomputes {:.0f}%", 100 * share) : "";
}

std::vector<StageLine> stage_lines(const Plan& plan, const ReplicaPlan& replica,
                                   const std::vector<Bytes>& memory,
                                   std::vector<KnownShares>* known) {
  const PipelinePlan& pipeline = *plan.pipeline;
  std::vector<StageLine> lines;
  for (int s = 0; s < pipeline.stages(); ++s) {
    const StagePlan& stage = replica.stages[s];
    const Graph& graph = pipeline.graph(s);
    std::string types;
    for (size_t i = 0; i < stage.devices.size();) {
      size_t end = i;
      const std::string& type = plan.cluster.type_of(stage.devices[i]).name;
      while (end < stage.devices.size() && plan.cluster.type_of(stage.devices[end]).name == type)
        ++end;
      types += fmt::format("{}{} x {}", i ? " + " : "", end - i, type);
      i = end;
    }
    std::map<std::string, int> cuts;
    const auto stored = stored_placements(pipeline.theory(s), stage.program);
    for (const Parameter& p : graph.parameters)
      ++cuts[stored[p.value.index].is_shard() ? "cut" : "whole"];
    std::string parameters;
    for (const auto& [how, count] : cuts)
      parameters += fmt::format("{}{} {}", parameters.empty() ? "" : ", ", count, how);
    Bytes most = 0;
    for (int d : stage.devices) most = std::max(most, memory[d]);
    lines.push_back(
        {types, fmt::format("device {}{}", stage.devices[0], stage.devices.size() > 1 ? " on" : ""),
         fmt::format("{} nodes, parameters {} ({}), holds {}{}, {} of {}", graph.nodes.size(),
                     parameters.empty() ? "none" : parameters,
                     format_bytes(static_cast<Bytes>(graph.parameter_bytes())),
                     in_flight(replica, s), recomputes(pipeline.theory(s), stage, &(*known)[s]),
                     format_bytes(most),
                     format_bytes(plan.cluster.type_of(stage.devices[0]).memory))});
  }
  return lines;
}

// What stages send one another; alike messages to the next stage, or from or to one stage, in a line.
std::string describe_messages(const PipelinePlan& pipeline) {
  constexpr size_t kShown = 3;
  std::map<std::tuple<bool, int, int>, std::pair<int, Bytes>> sent;  // [backward, from, to]
  for (const Transfer& t : pipeline.parts().transfers) {
    auto& [count, bytes] = sent[{t.backward, t.from, t.to}];
    ++count;
    bytes += static_cast<Bytes>(pipeline.part().graph.spec(t.value).bytes());
  }
  struct Line {
    const char* direction;
    std::string what;
    std::vector<std::string> ways;
  };
  std::vector<Line> lines;
  std::map<std::tuple<bool, int, int, Bytes>, size_t> line_of;
  for (const auto& [way, sum] : sent) {
    const auto& [backward, from, to] = way;
    const auto& [count, bytes] = sum;
    const int next = backward ? from - 1 : from + 1, end = to == next ? -1 : backward ? to : from;
    const auto [it, fresh] = line_of.try_emplace({backward, end, count, bytes}, lines.size());
    if (fresh)
      lines.push_back({backward ? "backward" : "forward",
                       fmt::format("{} value{}, {} a micro-batch", count, count > 1 ? "s" : "",
                                   format_bytes(bytes)),
                       {}});
    lines[it->second].ways.push_back(fmt::format("{} -> {}", from, to));
  }
  std::string out;
  for (Line& line : lines) {
    const size_t all = line.ways.size(), more = all > kShown + 1 ? all - kShown : 0;
    line.ways.resize(all - more);
    out += fmt::format("  sends       {}{} {}: {}{}\n", fmt::join(line.ways, ", "),
                       more > 0 ? fmt::format(" and {} more", more) : "", line.direction,
                       all > 1 ? "each " : "", line.what);
  }
  return out;
}

std::string describe_pipeline(const Plan& plan) {
  const PipelinePlan& pipeline = *plan.pipeline;
  std::string out = fmt::format(
      "{} on {} devices of {}, global batch {}: {} stage{}, {} replica{}, micro-batches of {}\n",
      plan.model, plan.cluster.size(), plan.cluster.name, plan.batch, pipeline.stages(),
      pipeline.stages() > 1 ? "s" : "", pipeline.replicas.size(),
      pipeline.replicas.size() > 1 ? "s" : "", pipeline.micro_batch);
  out += describe_precision(plan);
  const std::vector<Bytes> memory = pipeline_memory(pipeline, plan.cluster, plan.optimizer);
  std::vector<std::vector<StageLine>> lines;
  std::vector<KnownShares> again(pipeline.stages());
  for (const ReplicaPlan& replica : pipeline.replicas)
    lines.push_back(stage_lines(plan, replica, memory, &again));
  for (size_t r = 0, end = 0; r < lines.size(); r = end) {
    // Many that differ in their devices alone are told once.
    const auto alike = [&](size_t other) {
      return pipeline.replicas[other].micro_batches == pipeline.replicas[r].micro_batches &&
             std::equal(lines[r].begin(), lines[r].end(), lines[other].begin(),
                        [](const StageLine& a, const StageLine& b) {
                          return a.types == b.types && a.rest == b.rest;
                        });
    };
    for (end = r + 1; end < lines.size() && alike(end);) ++end;
    if (end - r < kTogether) end = r + 1;
    const bool one = end == r + 1;
    out += fmt::format("  replica{} {}{}   {}{} micro-batches\n", one ? "" : "s", r,
                       one ? "" : fmt::format(" to {}", end - 1), one ? "" : "each ",
                       pipeline.replicas[r].micro_batches);
    for (size_t s = 0; s < lines[r].size(); ++s)
      out += fmt::format("    stage {:<2}  {} ({}{}), {}\n", s, lines[r][s].types,
                         lines[r][s].devices, one ? "" : " in the first", lines[r][s].rest);
  }
  out += describe_messages(pipeline);
  for (const Tied& tied : pipeline.parts().tied)
    out += fmt::format("  tied        {} in stages {}\n",
                       plan.graph->parameters[tied.parameter].name, fmt::join(tied.stages, ", "));
  for (int s = 0; s < pipeline.stages(); ++s)
    out += describe_sizes(pipeline.replicas[0].stages[s].program,
                          pipeline.stages() > 1 ? fmt::format("of stage {} ", s) : "");
  for (int s = 0; s < pipeline.stages(); ++s) {
    const DividedState divided = divided_state(pipeline, s);
    if (!divided.any()) continue;
    Bytes bytes = 0;
    const auto& parameters = pipeline.graph(s).parameters;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (divided.optimizer[i])
        bytes += static_cast<Bytes>(pipeline.graph(s).spec(parameters[i].value).bytes());
    std::vector<std::string> shares;
    for (size_t r = 0, end = 0; r < divided.shares.size(); r = end) {
      const auto text = [&](size_t of) { return fmt::format("{:.3g}%", 100 * divided.shares[of]); };
      for (end = r + 1; end < divided.shares.size() && text(end) == text(r);) ++end;
      if (end - r < kTogether) end = r + 1;
      shares.push_back(text(r) + (end > r + 1 ? fmt::format(" on each of {}", end - r) : ""));
    }
    out += fmt::format("  zero        stage {} level {}: replicas divide the {} of {}, {}\n", s,
                       pipeline.level(s),
                       pipeline.level(s) == 1 ? "optimizer state" : "optimizer state and gradients",
                       format_bytes(bytes), fmt::join(shares, ", "));
  }
  for (int s = 0; s < pipeline.stages(); ++s) {
    const StagePlan& stage = pipeline.replicas[0].stages[s];
    if (std::none_of(stage.program.steps.begin(), stage.program.steps.end(),
                     [](const Step& step) { return step.each; }))
      continue;
    const auto stored = stored_placements(pipeline.theory(s), stage.program);
    Bytes bytes = 0;
    for (const Parameter& p : pipeline.graph(s).parameters)
      if (stored[p.value.index].is_shard())
        bytes += static_cast<Bytes>(pipeline.graph(s).spec(p.value).bytes());
    out += fmt::format(
        "  zero        stage {} level 3: its devices divide {} of parameters, which "
        "passes gather and whose gradients they scatter\n",
        s, format_bytes(bytes));
  }
  if (!pipeline.part().exact())
    out += fmt::format("  not exact   {}\n", normalised_by_part(*plan.graph, pipeline.part()));
  out += describe_reductions(plan);
  out += describe_schedule(pipeline);
  if (plan.predicted_step_s > 0)
    out += fmt::format("  predicted   {} a step\n", format_seconds(plan.predicted_step_s));
  return out;
}

// "; features.0.weight to features.34.bias": the parameters of a segment.
std::string describe_segment(const Theory& theory, int segment) {
  const Parameter *first = nullptr, *last = nullptr;
  Bytes bytes = 0;
  for (const Parameter& p : theory.graph().parameters) {
    if (theory.segment(p.value) != segment) continue;
    if (first == nullptr) first = &p;
    last = &p;
    bytes += static_cast<Bytes>(theory.graph().spec(p.value).bytes());
  }
  if (first == nullptr) return "; no parameters";
  return fmt::format("; {} to {}, {}", first->name, last->name, format_bytes(bytes));
}

std::string describe_shares(const Plan& plan) {
  const Theory& theory = *plan.theory;
  std::string out;
  for (int s = 0; s < theory.segments(); ++s) {
    const std::vector<double>& ratios = plan.ratios[s];
    out += theory.segments() == 1 ? "  shares      " : fmt::format("  segment {:<3} ", s);
    for (int d = 0; d < plan.cluster.size();) {
      int n = 0;
      double r = ratios[d];
      int type = plan.cluster.devices[d].type;
      while (d < plan.cluster.size() && plan.cluster.devices[d].type == type && ratios[d] == r)
        ++d, ++n;
      out += fmt::format("{}{} x {} {:.1f}%", n == d ? "" : ", ", n, plan.cluster.types[type].name,
                         100 * r);
    }
    if (theory.segments() > 1) out += describe_segment(theory, s);
    out += "\n";
  }
  return out;
}

struct Sum {
  int count = 0;
  Bytes bytes = 0;
};

// What redundancy keeps twice, and what it sends in a step.
std::string describe_twice(const Plan& plan, const std::vector<Placement>& stored) {
  if (plan.redundancy == 0) return "";
  const Theory& theory = plan.running();
  const CostModel model(plan.cluster, plan.reductions);
  const Shares shares(plan.ratios);
  const Fractions fractions(plan.cluster, shares, plan.redundancy);
  int count = 0;
  Bytes state = 0, sent = 0;
  Seconds seconds = 0;
  for (const Parameter& p : theory.graph().parameters) {
    if (!stored[p.value.index].is_shard()) continue;
    const auto bytes = static_cast<Bytes>(theory.graph().spec(p.value).bytes());
    const bool trained = p.gradient.valid();
    ++count;
    state += bytes * (trained ? 1 + state_factor(plan.optimizer) : 1);
    sent += trained ? bytes : 0;
    seconds += second_copy(theory, p, stored[p.value.index], model, fractions, plan.optimizer).send;
  }
  if (count == 0) return "  twice       nothing: every parameter is whole on every device\n";
  return fmt::format(
      "  twice       pieces of {} with their optimizer state, {} in all, on a second device each; "
      "{} of gradients sent there in {}\n",
      count == 1 ? "1 parameter" : fmt::format("{} parameters", count), format_bytes(state),
      format_bytes(sent), format_seconds(seconds + (seconds > 0 ? model.latency() : 0)));
}

std::string describe_stored(const Plan& plan) {
  const Theory& theory = plan.running();
  const Graph& graph = theory.graph();
  std::string out;
  auto stored = stored_placements(theory, plan.program);
  std::map<std::string, Sum> by_placement;
  std::map<std::string, std::string> example;
  for (const Parameter& p : graph.parameters) {
    Placement placement = stored[p.value.index];
    std::string key = placement.is_shard() ? fmt::format("cut in dimension {}", placement.dim)
                                           : "whole on every device";
    Sum& sum = by_placement[key];
    sum.bytes += static_cast<Bytes>(graph.spec(p.value).bytes());
    if (sum.count++ == 0) example[key] = p.name;
  }
  for (const auto& [key, sum] : by_placement)
    out += fmt::format("  parameters  {} {} ({}), such as {}\n", sum.count, key,
                       format_bytes(sum.bytes), example[key]);
  out += describe_twice(plan, stored);
  for (const Input& i : graph.inputs) {
    Placement placement = stored[i.value.index];
    out +=
        fmt::format("  input       {} {}\n", i.name,
                    placement.is_shard() ? fmt::format("cut in dimension {} (of {})", placement.dim,
                                                       theory.cut_size(i.value, placement))
                                         : "whole on every device");
  }
  return out;
}

std::string describe_communication(const Plan& plan, const Shares& shares) {
  const Theory& theory = plan.running();
  const Graph& graph = theory.graph();
  std::map<std::string, Sum> comm;
  const std::vector<bool> is_gradient = pure_gradients(graph);
  for (const Step& step : plan.program.steps) {
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      const bool boundary = is_boundary(graph.node(step.node));
      if (boundary && moves_nothing(theory, step.node, triple, shares)) continue;
      for (const InnerCollective& c : triple.collectives) {
        Sum& sum =
            comm[boundary ? "exchange between segments" : "all_reduce inside " + triple.kernel];
        ++sum.count;
        sum.bytes += static_cast<Bytes>(c.bytes);
      }
    } else if (!moves_nothing(step.kind)) {
      Sum& sum = comm[fmt::format("{}{} of {}", step.form == PieceForm::grouped ? "grouped " : "",
                                  to_string(step.kind), role_of(graph, is_gradient, step.value))];
      ++sum.count;
      sum.bytes += static_cast<Bytes>(graph.spec(step.value).bytes());
    }
  }
  if (comm.empty()) return "  communication  none\n";
  std::string out;
  for (const auto& [what, sum] : comm)
    out +=
        fmt::format("  each step   {} {}, {} in all\n", sum.count, what, format_bytes(sum.bytes));
  return out;
}

std::string describe_recomputation(const Plan& plan) {
  const Graph& graph = plan.running().graph();
  int again = 0, forward = 0, places = 0;
  for (size_t s = 0; s < plan.program.steps.size(); ++s) {
    const Step& step = plan.program.steps[s];
    again += step.again;
    places += step.again && !plan.program.steps[s - 1].again;
    forward += !step.again && step.is_compute() && !is_source(graph.node(step.node)) &&
               graph.node(step.node).phase == Phase::forward;
  }
  if (again == 0) return "";
  return fmt::format("  recomputes  {} of {} forward steps, in {} places of the backward pass\n",
                     again, forward, places);
}

}  // namespace

std::string describe(const Plan& plan) {
  if (plan.pipeline) return describe_pipeline(plan);
  const Theory& theory = plan.running();
  const Shares shares(plan.ratios);
  std::string out = fmt::format("{} on {} devices of {}, global batch {}\n", plan.model,
                                plan.cluster.size(), plan.cluster.name, plan.batch);
  if (plan.duplex)
    out += fmt::format(
        "  duplex      {} parts, of {} samples: one communicates while another computes\n",
        plan.duplex->parts(), fmt::join(plan.duplex->samples, " and "));
  size_t at_once = 0;
  for (const JoinedCall& call : joined_calls(theory, plan.program))
    at_once += !find_op(theory.graph().node(plan.program.steps[call.begin].node).op)->alias;
  if (at_once > 0)
    out += fmt::format("              {} operators run once for all parts\n", at_once);
  out += describe_precision(plan) + describe_shares(plan) + describe_stored(plan) +
         describe_recomputation(plan) + describe_communication(plan, shares) +
         describe_reductions(plan);

  Fractions fractions(plan.cluster, shares, plan.redundancy);
  CostModel model(plan.cluster, plan.reductions);
  ProgramCost cost = cost_of(theory, plan.program, model, fractions, plan.optimizer);
  const Seconds hidden = plan.duplex ? std::max(0.0, cost.step - plan.predicted_step_s)
                                     : hidden_seconds(theory, plan.program, model, fractions);
  const Launching calls = launching(theory, plan.program, model, fractions, plan.optimizer);
  const Seconds late = calls.beyond(cost.comm - hidden),
                step = plan.duplex && plan.predicted_step_s > 0 ? plan.predicted_step_s
                                                                : cost.step - hidden + late;
  out += fmt::format("  predicted   {} a step: {} of communication", format_seconds(step),
                     format_seconds(cost.comm));
  if (calls.launches > 0)
    out += fmt::format(", {} to launch its calls{}", format_seconds(calls.launches),
                       late > 0.01 * step
                           ? fmt::format(", for which the devices wait {}", format_seconds(late))
                           : "");
  if (hidden > 1e-9 * cost.step)
    out += fmt::format(", {} of it during {}", format_seconds(hidden),
                       plan.duplex ? "computation" : "the backward pass");
  for (size_t t = 0; t < cost.compute.size(); ++t)
    out += fmt::format(", {} busy {}", plan.cluster.types[t].name, format_seconds(cost.compute[t]));
  out += "\n" + describe_sizes(plan.program, "") + "  memory      ";
  for (size_t t = 0; t < cost.memory.peak.size(); ++t) {
    const Bytes most = allocated_bytes(cost.memory, model, static_cast<int>(t));
    out += fmt::format(
        "{}{} {} of {}{}", t ? ", " : "", plan.cluster.types[t].name,
        format_bytes(cost.memory.peak[t]), format_bytes(plan.cluster.types[t].memory),
        most < 0.99 * cost.memory.peak[t] ? fmt::format(" ({} at a time)", format_bytes(most))
                                          : "");
  }
  return out + "\n";
}

}  // namespace motley

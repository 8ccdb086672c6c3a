#include "report/words.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <tuple>

#include "cluster/part.h"
#include "report/html.h"

namespace motley::report {

namespace {

// The first number in a name ("blocks.3.weight", "block3.weight"): what is before it, it, what is
// after it.
bool numbered(const std::string& name, std::string* before, int* number, std::string* after) {
  const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const auto first = std::find_if(name.begin(), name.end(), digit);
  const auto last = std::find_if_not(first, name.end(), digit);
  if (first == last || last - first > 6) return false;
  *before = std::string(name.begin(), first);
  *number = std::stoi(std::string(first, last));
  *after = std::string(last, name.end());
  return true;
}

std::string placement_in_words(const Theory& theory, ValueId value, Placement placement,
                               const std::vector<double>& ratios) {
  if (!placement.is_shard()) return ratios.size() > 1 ? "whole on every device" : "whole";
  const int64_t n = theory.cut_size(value, placement);
  std::string pieces;
  if (ratios.size() <= 16)
    pieces = fmt::format(": {}", fmt::join(Shares(ratios).of(n), " / "));
  else
    pieces = fmt::format(" over {} devices", ratios.size());
  return fmt::format("cut in dimension {}{}, {}{}", placement.dim,
                     placement.factor ? fmt::format(" (factor {})", placement.factor) : "", n,
                     pieces);
}

void add_parameters(const Theory& theory, const Program& program, const Ratios& ratios, int stage,
                    std::vector<ParameterGroup>* out) {
  const Graph& graph = theory.graph();
  const auto stored = stored_placements(theory, program);
  std::map<std::tuple<std::string, std::string, Shape, std::string>, size_t> group;
  std::map<size_t, std::tuple<std::string, std::vector<int>, std::string>> names;
  for (const Parameter& p : graph.parameters) {
    std::string before = p.name, after;
    int number = -1;
    numbered(p.name, &before, &number, &after);
    const TensorSpec& spec = graph.spec(p.value);
    const std::string how =
        placement_in_words(theory, p.value, stored[p.value.index], ratios[theory.segment(p.value)]);
    auto [it, fresh] =
        group.try_emplace({before, number < 0 ? "" : after + "#", spec.shape, how}, out->size());
    if (fresh) out->push_back({p.name, stage, 0, spec.shape, 0, how});
    ParameterGroup& g = (*out)[it->second];
    ++g.count;
    g.bytes += static_cast<Bytes>(spec.bytes());
    auto& [b, numbers, a] = names[it->second];
    b = before;
    a = after;
    if (number >= 0) numbers.push_back(number);
  }
  for (auto& [i, parts] : names) {
    auto& [before, numbers, after] = parts;
    std::sort(numbers.begin(), numbers.end());
    if ((*out)[i].count > 1) (*out)[i].name = before + ranges(numbers) + after;
  }
}

// What makes a value partial, and who wants it otherwise.
std::string reason(const Theory& theory, const Program& program, size_t at) {
  const Graph& graph = theory.graph();
  const Step& step = program.steps[at];
  const Node& producer = graph.node(graph.value(step.value).producer);
  const std::string maker =
      is_source(producer) ? "where it is kept," : "after " + producer.op.str();
  std::string reader;
  for (size_t i = at + 1; i < program.steps.size() && reader.empty(); ++i) {
    const Step& next = program.steps[i];
    if (!next.is_compute()) {
      if (next.value == step.value && next.from == step.to) reader = to_string(next.kind);
      continue;
    }
    const auto inputs = graph.inputs_of(graph.node(next.node));
    const auto& in = theory.triples(next.node)[next.triple].in;
    for (size_t k = 0; k < inputs.size(); ++k)
      if (inputs[k] == step.value && in[k] == step.to) reader = graph.node(next.node).op;
  }
  if (reader.empty()) reader = "the optimizer";
  auto held = [](Placement p) {
    return p.is_shard() ? fmt::format("cut in dimension {}", p.dim) : std::string("whole");
  };
  switch (step.kind) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
      return fmt::format("every device has its own terms of the sum of {}; {} reads it {}",
                         producer.op, reader, held(step.to));
    case Collective::all_gather:
      return fmt::format("{} it is {}; {} reads it whole", maker, held(step.from), reader);
    default:
      return fmt::format("{} it is {}; {} reads it {}", maker, held(step.from), reader,
                         held(step.to));
  }
}

void add_communications(const std::string& where, const Theory& theory, const Program& program,
                        const CostModel& model, const Fractions& fractions, int passes,
                        int recomputed, std::vector<Communication>* out) {
  const Graph& graph = theory.graph();
  const std::vector<bool> gradient = pure_gradients(graph);
  const Phases phases = phases_of(theory, program);
  std::map<std::tuple<std::string, std::string, std::string>, size_t> place;
  auto add = [&](const std::string& what, const std::string& tensor, const std::string& why,
                 int count, Bytes bytes, Seconds seconds) {
    auto [it, fresh] = place.try_emplace({what, tensor, why}, out->size());
    if (fresh) out->push_back({where, what, tensor, why, 0, 0, 0});
    Communication& c = (*out)[it->second];
    c.count += count;
    c.bytes += bytes * count;
    c.seconds += seconds * count;
  };
  GradientRun run(program.sizes);
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    const int index = static_cast<int>(i);
    const int count = index >= phases.reduction ? 1
                      : index < phases.backward ? passes * (1 + recomputed)
                                                : passes;
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      if (is_boundary(graph.node(step.node))) {
        const Seconds s = inner_seconds(theory, step.node, triple, model, fractions);
        if (s == 0) continue;
        const TensorSpec& spec = graph.spec(graph.node(step.node).outputs[0]);
        add("exchange", to_string(spec), "two segments have other shares", count,
            static_cast<Bytes>(spec.bytes()), s);
        run.end();
        continue;
      }
      for (const InnerCollective& c : triple.collectives)
        add("all_reduce inside " + triple.kernel, graph.node(step.node).op,
            "the operator is cut along what it sums over", count, model.moved(c),
            model.net().all_reduce(model.moved(c)));
      if (!work_of(theory, step.node, triple).free) run.end();
      continue;
    }
    if (moves_nothing(step.kind)) continue;
    const Placement cut = step.from.is_shard() ? step.from : step.to;
    const Bytes bytes = model.moved(step.kind, graph.spec(step.value));
    const bool pure = step.kind == Collective::all_reduce && gradient[step.value.index];
    const Seconds seconds =
        pure ? model.gradient_all_reduce(graph.spec(step.value), &run)
             : model.collective(step.kind, bytes,
                                fractions.profile(theory.cut(step.value, cut), model.net()),
                                step.form);
    if (!pure) run.end();
    add(fmt::format("{}{} of {}", step.form == PieceForm::grouped ? "grouped " : "",
                    to_string(step.kind), role_of(graph, gradient, step.value)),
        to_string(graph.spec(step.value)), reason(theory, program, i), count, bytes, seconds);
  }
}

}  // namespace

std::vector<ParameterGroup> parameter_groups(const Plan& plan) {
  std::vector<ParameterGroup> groups;
  if (!plan.pipeline) {
    add_parameters(plan.running(), plan.program, plan.ratios, -1, &groups);
    return groups;
  }
  for (int s = 0; s < plan.pipeline->stages(); ++s) {
    const StagePlan& stage = plan.pipeline->replicas[0].stages[s];
    add_parameters(plan.pipeline->theory(s), stage.program, {stage.ratios}, s, &groups);
  }
  return groups;
}

std::string modules_of(const Graph& graph) {
  std::vector<std::string> order;
  std::map<std::string, std::set<int>> numbers;
  for (const Parameter& p : graph.parameters) {
    std::string before, after;
    int number = -1;
    if (numbered(p.name, &before, &number, &after)) {
      if (before.ends_with('.')) before.pop_back();
    } else {
      before = p.name.substr(0, p.name.rfind('.'));
    }
    auto [it, fresh] = numbers.try_emplace(before);
    if (fresh) order.push_back(before);
    if (number >= 0) it->second.insert(number);
  }
  std::string out;
  for (const std::string& name : order) {
    const std::set<int>& set = numbers[name];
    out += fmt::format("{}{}", out.empty() ? "" : ", ", name);
    if (!set.empty()) out += " " + ranges({set.begin(), set.end()});
  }
  return out;
}

std::vector<Communication> communications(const Plan& plan) {
  std::vector<Communication> list;
  if (!plan.pipeline) {
    const CostModel model(plan.cluster, plan.reductions);
    const Shares shares(plan.ratios);
    const Fractions fractions(model.cluster(), shares);
    add_communications("", plan.running(), plan.program, model, fractions, 1, 0, &list);
  } else {
    const PipelinePlan& pipeline = *plan.pipeline;
    for (int s = 0; s < pipeline.stages(); ++s) {
      std::vector<std::tuple<std::string, const Program*, std::vector<double>, int>> seen;
      for (size_t r = 0; r < pipeline.replicas.size(); ++r) {
        const StagePlan& stage = pipeline.replicas[r].stages[s];
        const int passes = pipeline.replicas[r].micro_batches;
        const Cluster part = part_of(plan.cluster, stage.devices);
        const std::string text = to_yaml(part);
        const bool known = std::any_of(seen.begin(), seen.end(), [&](const auto& k) {
          return std::get<0>(k) == text && *std::get<1>(k) == stage.program &&
                 std::get<2>(k) == stage.ratios && std::get<3>(k) == passes;
        });
        if (known) continue;
        seen.emplace_back(text, &stage.program, stage.ratios, passes);
        const CostModel model(part,
                              programs_for(plan.reductions, stage.devices, plan.cluster.size()));
        const Shares shares(stage.ratios);
        const Fractions fractions(model.cluster(), shares);
        add_communications(
            r == 0 ? fmt::format("stage {}", s) : fmt::format("stage {}, replica {}", s, r),
            pipeline.theory(s), stage.program, model, fractions, passes, stage.recompute, &list);
      }
    }
  }
  std::stable_sort(list.begin(), list.end(), [](const Communication& a, const Communication& b) {
    return a.seconds > b.seconds;
  });
  return list;
}

}  // namespace motley::report

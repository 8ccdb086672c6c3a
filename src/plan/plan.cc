#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "core/error.h"

namespace motley {

namespace {

Json lines(const std::string& text) {
  Json list = Json::array();
  size_t start = 0;
  while (start < text.size()) {
    size_t end = text.find('\n', start);
    if (end == std::string::npos) end = text.size();
    list.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return list;
}

std::string joined(const Json& list, const std::string& where) {
  std::string text;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string())
      throw user_error("plan", "{}[{}]: is {}; give a line of text", where, i, list[i].dump());
    text += list[i].get<std::string>() + "\n";
  }
  return text;
}

}  // namespace

Json to_json(const Plan& plan) {
  Json j;
  j["motley_plan"] = kPlanVersion;
  j["engine"] = plan.engine;
  j["model"] = plan.model;
  j["batch"] = plan.batch;
  j["optimizer"] = to_string(plan.optimizer);
  j["predicted"] = {{"step_s", plan.predicted_step_s},
                    {"lower_bound_s", plan.lower_bound_s},
                    {"peak_memory_bytes", plan.peak_memory_bytes}};
  j["ratios"] = plan.ratios;
  j["cluster"] = lines(to_yaml(plan.cluster));
  Json program = Json::array();
  for (const Step& step : plan.program.steps) program.push_back(to_text(*plan.theory, step));
  j["program"] = std::move(program);
  j["graph"] = lines(to_text(*plan.graph));
  return j;
}

Plan parse_plan(const std::string& text, const std::string& name) {
  Json json = parse_json(text, name);
  Fields fields(json, "plan", name);
  if (!fields.find("motley_plan"))
    throw fields.bad("motley_plan", "is missing; this is not a plan of motley");
  if (int64_t version = fields.integer("motley_plan"); version != kPlanVersion)
    throw fields.bad("motley_plan",
                     fmt::format("is {}; this motley reads version {}", version, kPlanVersion));
  Plan plan;
  plan.engine = fields.text("engine");
  if (plan.engine != "spmd") throw fields.bad("engine", "is '" + plan.engine + "'; give spmd");
  plan.model = fields.text("model");
  plan.batch = fields.integer("batch");
  if (plan.batch < 1) throw fields.bad("batch", "is not positive");
  if (!parse_optimizer(fields.text("optimizer"), &plan.optimizer))
    throw fields.bad("optimizer", "is '" + fields.text("optimizer") + "'; give sgd or adamw");
  plan.cluster =
      parse_cluster(joined(fields.array("cluster"), name + ": cluster"), name + ": cluster");
  const Json& ratios = fields.array("ratios");
  for (size_t i = 0; i < ratios.size(); ++i) {
    double r = ratios[i].is_number() ? ratios[i].get<double>() : -1;
    if (!(r >= 0) || !std::isfinite(r))
      throw user_error("plan", "{}: ratios[{}] is {}; give a number of at least 0", name, i,
                       ratios[i].dump());
    plan.ratios.push_back(r);
  }
  if (static_cast<int>(plan.ratios.size()) != plan.cluster.size())
    throw fields.bad("ratios", fmt::format("has {} numbers; the cluster has {} devices",
                                           plan.ratios.size(), plan.cluster.size()));
  if (std::accumulate(plan.ratios.begin(), plan.ratios.end(), 0.0) <= 0)
    throw fields.bad("ratios", "are all zero; give some device work");
  plan.set_graph(parse_graph(joined(fields.array("graph"), name + ": graph"), name + ": graph"));
  const Json& program = fields.array("program");
  for (size_t i = 0; i < program.size(); ++i) {
    std::string where = fmt::format("{}: program[{}]", name, i);
    if (!program[i].is_string())
      throw user_error("plan", "{} is {}; give a line of text", where, program[i].dump());
    plan.program.steps.push_back(parse_step(*plan.theory, program[i].get<std::string>(), where));
  }
  if (const Json* predicted = fields.find("predicted")) {
    Fields p(*predicted, "plan", name + ": predicted");
    plan.predicted_step_s = p.number("step_s");
    plan.lower_bound_s = p.number("lower_bound_s");
    for (const Json& b : p.array("peak_memory_bytes"))
      plan.peak_memory_bytes.push_back(b.is_number() ? b.get<double>() : 0);
  }
  return plan;
}

void save_plan(const Plan& plan, const std::string& path) {
  write_file(path, to_json(plan).dump(1) + "\n");
}
Plan load_plan(const std::string& path) { return parse_plan(read_file(path), path); }

std::vector<std::string> check(const Plan& plan, bool memory_limit) {
  std::vector<std::string> problems = verify(*plan.graph);
  if (!problems.empty()) return problems;
  Theory theory(*plan.graph);  // derived afresh: nothing of the planner is trusted
  problems = check(theory, plan.program);
  if (static_cast<int>(plan.ratios.size()) != plan.cluster.size()) {
    problems.push_back("there is not one ratio per device");
  } else if (problems.empty() && memory_limit) {
    Shares shares(plan.ratios);
    Fractions fractions(plan.cluster, shares);
    auto peak = memory_of(theory, plan.program, fractions,
                          static_cast<int>(plan.cluster.types.size()), plan.optimizer)
                    .peak;
    for (size_t t = 0; t < peak.size(); ++t)
      if (peak[t] > plan.cluster.types[t].memory)
        problems.push_back(fmt::format("device type {} needs {} and has {}",
                                       plan.cluster.types[t].name, format_bytes(peak[t]),
                                       format_bytes(plan.cluster.types[t].memory)));
  }
  return problems;
}

std::string describe(const Plan& plan) {
  const Theory& theory = *plan.theory;
  const Graph& graph = *plan.graph;
  std::string out = fmt::format("{} on {} devices of {}, global batch {}\n", plan.model,
                                plan.cluster.size(), plan.cluster.name, plan.batch);

  out += "  shares      ";
  for (int d = 0; d < plan.cluster.size();) {
    int n = 0;
    double r = plan.ratios[d];
    int type = plan.cluster.devices[d].type;
    while (d < plan.cluster.size() && plan.cluster.devices[d].type == type && plan.ratios[d] == r)
      ++d, ++n;
    out += fmt::format("{}{} x {} {:.1f}%", n == d ? "" : ", ", n, plan.cluster.types[type].name,
                       100 * r);
  }
  out += "\n";

  auto stored = stored_placements(theory, plan.program);
  std::map<std::string, std::pair<int, Bytes>> by_placement;
  std::map<std::string, std::string> example;
  for (const Parameter& p : graph.parameters) {
    Placement placement = stored[p.value.index];
    std::string key = placement.is_shard() ? fmt::format("cut in dimension {}", placement.dim)
                                           : "whole on every device";
    auto& [count, bytes] = by_placement[key];
    bytes += static_cast<Bytes>(graph.spec(p.value).bytes());
    if (count++ == 0) example[key] = p.name;
  }
  for (const auto& [key, value] : by_placement)
    out += fmt::format("  parameters  {} {} ({}), such as {}\n", value.first, key,
                       format_bytes(value.second), example[key]);
  for (const Input& i : graph.inputs) {
    Placement placement = stored[i.value.index];
    out +=
        fmt::format("  input       {} {}\n", i.name,
                    placement.is_shard() ? fmt::format("cut in dimension {} (of {})", placement.dim,
                                                       theory.cut_size(i.value, placement))
                                         : "whole on every device");
  }

  struct Sum {
    int count = 0;
    Bytes bytes = 0;
  };
  std::map<std::string, Sum> comm;
  // What a value is to a reader: a parameter or a view of one, a gradient on its way to the
  // optimizer, an activation.
  const std::vector<bool> is_gradient = pure_gradients(graph);
  auto role = [&](ValueId v) {
    if (is_gradient[v.index]) return "gradients";
    for (;;) {
      const Node& producer = graph.node(graph.value(v).producer);
      if (producer.op == "motley::parameter") return "parameters";
      const OpDef* op = find_op(producer.op);
      if (!op || !op->alias) return "activations";
      v = graph.inputs_of(producer)[0];
    }
  };
  for (const Step& step : plan.program.steps) {
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      for (const InnerCollective& c : triple.collectives) {
        Sum& sum = comm["all_reduce inside " + triple.kernel];
        ++sum.count;
        sum.bytes += static_cast<Bytes>(c.bytes);
      }
    } else if (step.kind != CollectiveKind::slice && step.kind != CollectiveKind::mask) {
      Sum& sum = comm[fmt::format("{} of {}", to_string(step.kind), role(step.value))];
      ++sum.count;
      sum.bytes += static_cast<Bytes>(graph.spec(step.value).bytes());
    }
  }
  if (comm.empty()) out += "  communication  none\n";
  for (const auto& [what, sum] : comm)
    out +=
        fmt::format("  each step   {} {}, {} in all\n", sum.count, what, format_bytes(sum.bytes));

  Shares shares(plan.ratios);
  Fractions fractions(plan.cluster, shares);
  CostModel model(plan.cluster);
  ProgramCost cost = cost_of(theory, plan.program, model, fractions, plan.optimizer);
  out += fmt::format("  predicted   {} a step: {} of communication", format_seconds(cost.step),
                     format_seconds(cost.comm));
  for (size_t t = 0; t < cost.compute.size(); ++t)
    out += fmt::format(", {} busy {}", plan.cluster.types[t].name, format_seconds(cost.compute[t]));
  out += "\n  memory      ";
  for (size_t t = 0; t < cost.memory.peak.size(); ++t)
    out +=
        fmt::format("{}{} {} of {}", t ? ", " : "", plan.cluster.types[t].name,
                    format_bytes(cost.memory.peak[t]), format_bytes(plan.cluster.types[t].memory));
  return out + "\n";
}

}  // namespace motley

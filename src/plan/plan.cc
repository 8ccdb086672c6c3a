#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "core/error.h"
#include "cost/overlap.h"

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

constexpr size_t kMaxAlternatives = 1000;
constexpr int64_t kMaxPasses = int64_t{1} << 22;
constexpr int64_t kMaxStages = 4096;

Json program_lines(const Theory& theory, const Program& program) {
  Json list = Json::array();
  for (const Step& step : program.steps) list.push_back(to_text(theory, step));
  return list;
}

Program read_program(const Theory& theory, const Json& list, const std::string& name) {
  Program program;
  for (size_t i = 0; i < list.size(); ++i) {
    std::string where = fmt::format("{}[{}]", name, i);
    if (!list[i].is_string())
      throw user_error("plan", "{} is {}; give a line of text", where, list[i].dump());
    program.steps.push_back(parse_step(theory, list[i].get<std::string>(), where));
  }
  return program;
}

std::vector<double> read_ratios(const Json& list, const std::string& name) {
  std::vector<double> ratios;
  for (size_t i = 0; i < list.size(); ++i) {
    double r = list[i].is_number() ? list[i].get<double>() : -1;
    if (!(r >= 0) || !std::isfinite(r))
      throw user_error("plan", "{}: ratios[{}] is {}; give a number of at least 0", name, i,
                       list[i].dump());
    ratios.push_back(r);
  }
  if (!(std::accumulate(ratios.begin(), ratios.end(), 0.0) > 0))
    throw user_error("plan", "{}.ratios are all zero; give some device work", name);
  return ratios;
}

// Of one segment a list of numbers, of several a list of such lists.
Json ratios_json(const Ratios& ratios) {
  return ratios.size() == 1 ? Json(ratios[0]) : Json(ratios);
}

Ratios read_segment_ratios(const Json& list, int segments, const std::string& name) {
  if (segments == 1) return {read_ratios(list, name)};
  if (static_cast<int>(list.size()) != segments)
    throw user_error("plan",
                     "{}.ratios has {} entries; the graph has {} segments, give a list for each",
                     name, list.size(), segments);
  Ratios ratios;
  for (int s = 0; s < segments; ++s) {
    if (!list[s].is_array())
      throw user_error("plan", "{}.ratios[{}] is {}; give the shares of all devices in segment {}",
                       name, s, list[s].dump(), s);
    ratios.push_back(read_ratios(list[s], fmt::format("{}.ratios[{}]", name, s)));
  }
  return ratios;
}

Json to_json(const PipelinePlan& pipeline) {
  Json j;
  j["schedule"] = pipeline.schedule;
  j["micro_batch"] = pipeline.micro_batch;
  j["stages"] = pipeline.stages();
  Json runs = Json::array();
  for (size_t n = 0; n < pipeline.stage_of.size(); ++n)
    if (n == 0 || pipeline.stage_of[n] != pipeline.stage_of[n - 1])
      runs.push_back({n, pipeline.stage_of[n]});
  j["nodes"] = std::move(runs);
  Json replicas = Json::array();
  for (const ReplicaPlan& replica : pipeline.replicas) {
    Json stages = Json::array();
    for (size_t s = 0; s < replica.stages.size(); ++s) {
      const StagePlan& stage = replica.stages[s];
      Json k = {{"devices", stage.devices}, {"ratios", stage.ratios}, {"warm_up", stage.warm_up}};
      if (stage.recompute) k["recompute"] = true;
      // Replicas mostly run the program of the first.
      const bool same = &replica != &pipeline.replicas[0] &&
                        stage.program.steps == pipeline.replicas[0].stages[s].program.steps;
      if (!same) k["program"] = program_lines(pipeline.theory(static_cast<int>(s)), stage.program);
      stages.push_back(std::move(k));
    }
    replicas.push_back({{"micro_batches", replica.micro_batches}, {"stages", std::move(stages)}});
  }
  j["replicas"] = std::move(replicas);
  for (const Division& division : pipeline.zero) {
    Json k = {{"level", division.level}};
    if (!division.shares.empty()) k["shares"] = division.shares;
    j["zero"].push_back(std::move(k));
  }
  return j;
}

// [stage] How replicas divide the state of parameters.
std::vector<Division> read_divisions(const Json& list, int stages, size_t replicas,
                                     const std::string& name) {
  std::vector<Division> divisions;
  if (static_cast<int>(list.size()) != stages)
    throw user_error("plan", "{}.zero has {} entries; the pipeline has {} stages", name,
                     list.size(), stages);
  for (int s = 0; s < stages; ++s) {
    const std::string where = fmt::format("{}.zero[{}]", name, s);
    Fields fields(list[s], "plan", where);
    Division division;
    const int64_t level = fields.integer("level");
    if (level == 3)
      throw fields.bad("level",
                       "is 3; replicas divide optimizer state (1) and gradients (2), parameters "
                       "are cut by the programs of stages");
    if (level < 0 || level > 2)
      throw fields.bad("level", fmt::format("is {}; give 0, 1 or 2", level));
    division.level = static_cast<int>(level);
    if (fields.find("shares")) {
      division.shares = read_ratios(fields.array("shares"), where + ".shares");
      if (division.shares.size() != replicas)
        throw fields.bad("shares", fmt::format("has {} numbers; the pipeline has {} replicas",
                                               division.shares.size(), replicas));
    }
    divisions.push_back(std::move(division));
  }
  return divisions;
}

std::unique_ptr<PipelinePlan> read_pipeline(const Json& json, const Theory& whole, int64_t batch,
                                            const std::string& name) {
  auto integer = [](const Fields& fields, const char* field, int64_t low, int64_t high) {
    int64_t value = fields.integer(field);
    if (value < low || value > high)
      throw fields.bad(field, fmt::format("is {}; give a number from {} to {}", value, low, high));
    return value;
  };
  Fields fields(json, "plan", name);
  auto pipeline = std::make_unique<PipelinePlan>();
  pipeline->schedule = fields.text("schedule");
  pipeline->micro_batch = integer(fields, "micro_batch", 1, int64_t{1} << 24);
  const int stages = static_cast<int>(integer(fields, "stages", 1, kMaxStages));
  pipeline->take_parts(whole, batch, name);
  const Graph& graph = pipeline->part().graph;
  const Json& runs = fields.array("nodes");
  const int64_t nodes = static_cast<int64_t>(graph.nodes.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const bool pair = runs[i].is_array() && runs[i].size() == 2 && runs[i][0].is_number_integer() &&
                      runs[i][1].is_number_integer();
    const int64_t first = pair ? runs[i][0].get<int64_t>() : -1,
                  stage = pair ? runs[i][1].get<int64_t>() : -1;
    const int64_t before = static_cast<int64_t>(pipeline->stage_of.size());
    if (first < 0 || first >= nodes || stage < 0 || stage >= stages ||
        (i == 0 ? first != 0 : first < before))
      throw user_error("plan",
                       "{}: nodes[{}] is {}; give [first node, stage] with nodes rising from 0 to "
                       "{} and stages below {}",
                       name, i, runs[i].dump(), nodes - 1, stages);
    if (i > 0) {
      const int last = pipeline->stage_of.back();
      pipeline->stage_of.resize(first, last);
    }
    pipeline->stage_of.push_back(static_cast<int>(stage));
  }
  if (runs.empty()) throw fields.bad("nodes", "is empty; give [[0, 0], ...]");
  const int last = pipeline->stage_of.back();
  pipeline->stage_of.resize(nodes, last);
  pipeline->cut(stages, name);

  const Json& replicas = fields.array("replicas");
  if (replicas.empty() || replicas.size() > static_cast<size_t>(kMaxDevices))
    throw fields.bad("replicas", fmt::format("has {} entries; give at least one", replicas.size()));
  for (size_t r = 0; r < replicas.size(); ++r) {
    const std::string where = fmt::format("{}.replicas[{}]", name, r);
    Fields f(replicas[r], "plan", where);
    ReplicaPlan replica;
    replica.micro_batches = static_cast<int>(integer(f, "micro_batches", 1, kMaxMicroBatches));
    const Json& list = f.array("stages");
    if (static_cast<int>(list.size()) != stages)
      throw f.bad("stages",
                  fmt::format("has {} entries; the pipeline has {} stages", list.size(), stages));
    for (int s = 0; s < stages; ++s) {
      const std::string here = fmt::format("{}.stages[{}]", where, s);
      Fields g(list[s], "plan", here);
      StagePlan stage;
      for (const Json& d : g.array("devices")) {
        if (!d.is_number_integer() || d.get<int64_t>() < 0 || d.get<int64_t>() >= kMaxDevices)
          throw g.bad("devices", "holds " + d.dump() + "; give numbers of devices");
        stage.devices.push_back(d.get<int>());
      }
      stage.ratios = read_ratios(g.array("ratios"), here);
      stage.warm_up = static_cast<int>(integer(g, "warm_up", 1, kMaxMicroBatches));
      if (const Json* b = g.find("recompute")) {
        if (!b->is_boolean()) throw g.bad("recompute", "is " + b->dump() + "; give true or false");
        stage.recompute = b->get<bool>();
      }
      if (r == 0 || g.find("program"))
        stage.program = read_program(pipeline->theory(s), g.array("program"), here + ".program");
      else
        stage.program = pipeline->replicas[0].stages[s].program;
      replica.stages.push_back(std::move(stage));
    }
    pipeline->replicas.push_back(std::move(replica));
  }
  if (fields.find("zero"))
    pipeline->zero = read_divisions(fields.array("zero"), stages, pipeline->replicas.size(), name);
  return pipeline;
}

constexpr size_t kMaxReductions = 1 << 14, kMaxReductionSteps = 64;

std::vector<int> read_devices(const Json& list, const Fields& fields, const char* name) {
  std::vector<int> devices;
  if (!list.is_array()) throw fields.bad(name, "holds " + list.dump() + "; give lists");
  for (const Json& d : list) {
    if (!d.is_number_integer() || d.get<int64_t>() < 0 || d.get<int64_t>() >= kMaxDevices)
      throw fields.bad(name, "holds " + d.dump() + "; give numbers of devices");
    devices.push_back(d.get<int>());
  }
  return devices;
}

Json to_json(const ReductionProgram& program) {
  Json steps = Json::array();
  for (const ReductionStep& step : program.steps)
    steps.push_back({{"collective", net::to_string(step.collective)}, {"groups", step.groups}});
  Json j;
  if (!program.devices.empty()) j["devices"] = program.devices;
  j["from_bytes"] = program.from;
  j["fixed_s"] = program.fixed;
  j["seconds_per_byte"] = program.seconds_per_byte;
  j["steps"] = std::move(steps);
  return j;
}

net::Collective read_collective(const Fields& fields) {
  using net::Collective;
  const std::string text = fields.text("collective");
  for (Collective c : {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
                       Collective::reduce, Collective::broadcast})
    if (text == net::to_string(c)) return c;
  throw fields.bad("collective", "is '" + text +
                                     "'; give all_reduce, reduce_scatter, all_gather, reduce or "
                                     "broadcast");
}

ReductionProgram read_reduction(const Json& json, const std::string& name) {
  Fields fields(json, "plan", name);
  ReductionProgram program;
  if (fields.find("devices"))
    program.devices = read_devices(fields.array("devices"), fields, "devices");
  program.from = fields.number("from_bytes");
  program.fixed = fields.number("fixed_s");
  program.seconds_per_byte = fields.number("seconds_per_byte");
  if (program.from < 0 || program.fixed < 0 || program.seconds_per_byte < 0)
    throw fields.bad("from_bytes", "or a time is negative; give numbers of at least 0");
  const Json& steps = fields.array("steps");
  if (steps.size() > kMaxReductionSteps)
    throw fields.bad(
        "steps", fmt::format("has {} entries; give at most {}", steps.size(), kMaxReductionSteps));
  for (size_t s = 0; s < steps.size(); ++s) {
    Fields f(steps[s], "plan", fmt::format("{}.steps[{}]", name, s));
    ReductionStep step;
    step.collective = read_collective(f);
    for (const Json& members : f.array("groups"))
      step.groups.push_back(read_devices(members, f, "groups"));
    program.steps.push_back(std::move(step));
  }
  return program;
}

Alternative read_alternative(const Json& json, const std::string& name) {
  Fields fields(json, "plan", name);
  Alternative a;
  a.name = fields.text("name");
  if (fields.find("what")) a.what = fields.text("what");
  if (const Json* baseline = fields.find("baseline")) {
    if (!baseline->is_boolean())
      throw fields.bad("baseline", "is " + baseline->dump() + "; give true or false");
    a.baseline = baseline->get<bool>();
  }
  a.feasible = fields.find("step_s") != nullptr;
  if (a.feasible) a.step_s = fields.number("step_s");
  if (a.step_s < 0) throw fields.bad("step_s", "is negative; give seconds");
  return a;
}

std::vector<std::string> check_reductions(const Plan& plan) {
  std::vector<std::string> problems;
  std::map<std::vector<int>, Bytes> last;  // devices -> from
  for (size_t i = 0; i < plan.reductions.size() && problems.size() < 20; ++i) {
    const ReductionProgram& program = plan.reductions[i];
    auto problem = [&](const std::string& text) {
      problems.push_back(fmt::format("reductions[{}]: {}", i, text));
    };
    std::set<int> devices(program.devices.begin(), program.devices.end());
    if (devices.size() != program.devices.size() ||
        (!devices.empty() && (*devices.begin() < 0 || *devices.rbegin() >= plan.cluster.size())))
      problem("a device is named twice or not in the cluster");
    if (!plan.pipeline && !devices.empty())
      problem("one SPMD program reduces over all devices; leave devices out");
    const int size = devices.empty() ? plan.cluster.size() : static_cast<int>(devices.size());
    if (std::string wrong = check(program.steps, size); !wrong.empty()) problem(wrong);
    auto [it, first] = last.try_emplace(program.devices, program.from);
    if (!first && program.from <= it->second)
      problem("starts at no more bytes than the one before");
    it->second = program.from;
  }
  return problems;
}

// What keeps the groups of a replica from taking their passes. REQUIRES: stages have devices, and
// share all of them or none.
void check_order(const ReplicaPlan& replica, const PipelinePlan& fresh, const std::string& where,
                 std::vector<std::string>* problems) {
  const auto groups = stage_groups(replica);
  const int stages = fresh.stages();
  if (static_cast<int>(groups.size()) == stages) {
    for (int s = 1; s < stages; ++s)
      if (replica.stages[s].warm_up > replica.stages[s - 1].warm_up)
        problems->push_back(
            fmt::format("{}, stage {}: {} warm-up passes after {} of the stage before; they may "
                        "not rise",
                        where, s, replica.stages[s].warm_up, replica.stages[s - 1].warm_up));
    return;
  }
  if (2 * int64_t{replica.micro_batches} * stages > kMaxPasses) {
    problems->push_back(fmt::format(
        "{}: {} micro-batches through {} stages that share devices; give at most {} passes", where,
        replica.micro_batches, stages, kMaxPasses));
    return;
  }
  for (const Tied& tied : fresh.parts().tied)
    for (const auto& group : groups) {
      std::vector<int> both;
      std::set_intersection(group.begin(), group.end(), tied.stages.begin(), tied.stages.end(),
                            std::back_inserter(both));
      if (both.size() > 1)
        problems->push_back(fmt::format(
            "{}: stages {} share devices and a parameter; make them one stage or part them", where,
            fmt::join(both, " and ")));
    }
  if (ticks_of(replica).empty())
    problems->push_back(fmt::format(
        "{}: with these warm-up passes, stages that share devices wait for ever; give more",
        where));
}

// What keeps the replicas of stages from dividing the state of parameters. REQUIRES: replicas have
// as many stages as the pipeline.
void check_divisions(const PipelinePlan& pipeline, std::vector<std::string>* problems) {
  if (pipeline.zero.empty()) return;
  if (static_cast<int>(pipeline.zero.size()) != pipeline.stages()) {
    problems->push_back(fmt::format("zero has {} entries; the pipeline has {} stages",
                                    pipeline.zero.size(), pipeline.stages()));
    return;
  }
  bool meet = false;  // in every backward pass
  for (int s = 0; s < pipeline.stages(); ++s) {
    const Division& division = pipeline.zero[s];
    if (division.level < 0 || division.level > 2)
      problems->push_back(
          fmt::format("stage {}: zero level {}; give 0, 1 or 2", s, division.level));
    meet = meet || division.level == 2;
    double sum = 0;
    bool bad = false;
    for (double share : division.shares) {
      bad = bad || !(share >= 0) || !std::isfinite(share);
      sum += share;
    }
    if (!division.shares.empty() &&
        (division.shares.size() != pipeline.replicas.size() || bad || !(sum > 0)))
      problems->push_back(fmt::format(
          "stage {}: zero has not one share per replica, numbers of at least 0 of which "
          "one is more",
          s));
  }
  if (!meet) return;
  const ReplicaPlan& first = pipeline.replicas[0];
  for (size_t r = 1; r < pipeline.replicas.size(); ++r) {
    const ReplicaPlan& replica = pipeline.replicas[r];
    bool same = replica.micro_batches == first.micro_batches &&
                stage_groups(replica) == stage_groups(first);
    for (int s = 0; s < pipeline.stages(); ++s)
      same = same && replica.stages[s].warm_up == first.stages[s].warm_up;
    if (!same)
      problems->push_back(
          fmt::format("zero level 2, at which replicas meet in every backward pass, and replica {} "
                      "takes others than replica 0; give them as many micro-batches and the same "
                      "warm-up passes, or level 1",
                      r));
  }
}

// What is wrong with a pipeline, its memory apart.
std::vector<std::string> check_pipeline(const Plan& plan) {
  const PipelinePlan& pipeline = *plan.pipeline;
  std::vector<std::string> problems;
  auto problem = [&](const std::string& text) { problems.push_back(text); };
  if (!plan.program.steps.empty() || !plan.ratios.empty())
    problem("a pipeline has no program or ratios of its own; its stages have");
  PipelinePlan fresh;  // derived afresh: nothing of the planner is trusted
  fresh.micro_batch = pipeline.micro_batch;
  fresh.stage_of = pipeline.stage_of;
  try {
    fresh.take_parts(Theory(*plan.graph), plan.batch, "pipeline");
    if (pipeline.stage_of.size() != fresh.part().graph.nodes.size() || pipeline.replicas.empty() ||
        to_text(fresh.part().graph) != to_text(pipeline.part().graph)) {
      problem("not every node has a stage, or there is no replica");
      return problems;
    }
    fresh.cut(pipeline.stages(), "pipeline");
  } catch (const UserError& e) {
    problem(e.what());
    return problems;
  }
  if (pipeline.micro_batch * pipeline.micro_batches() != plan.batch)
    problem(fmt::format("{} micro-batches of {} are not the batch of {}", pipeline.micro_batches(),
                        pipeline.micro_batch, plan.batch));
  std::vector<const StagePlan*> used(plan.cluster.size(), nullptr);  // first stage of a device
  std::vector<size_t> of_replica(plan.cluster.size());
  for (size_t r = 0; r < pipeline.replicas.size(); ++r) {
    const ReplicaPlan& replica = pipeline.replicas[r];
    if (replica.micro_batches < 1)
      problem(fmt::format("replica {} has {} micro-batches", r, replica.micro_batches));
    if (static_cast<int>(replica.stages.size()) != fresh.stages()) {
      problem(fmt::format("replica {} has {} stages, not {}", r, replica.stages.size(),
                          fresh.stages()));
      return problems;
    }
    for (int s = 0; s < fresh.stages(); ++s) {
      const StagePlan& stage = replica.stages[s];
      auto here = [&](const std::string& text) {
        if (problems.size() < 20) problem(fmt::format("replica {}, stage {}: {}", r, s, text));
      };
      if (stage.devices.empty() || stage.ratios.size() != stage.devices.size())
        here("there is not one ratio per device, or no device");
      for (size_t i = 0; i < stage.devices.size(); ++i) {
        const int d = stage.devices[i];
        if (d < 0 || d >= plan.cluster.size())
          here(fmt::format("device {} is not in the cluster", d));
        else if (used[d] && (of_replica[d] != r || used[d]->devices != stage.devices))
          here(fmt::format("device {} has another stage too, of other devices or another replica",
                           d));
        else if (used[d] && used[d]->warm_up != stage.warm_up)
          here(fmt::format("{} warm-up passes, and {} of another stage on the same devices",
                           stage.warm_up, used[d]->warm_up));
        else if (!used[d])
          used[d] = &stage, of_replica[d] = r;
        if (i > 0 && d <= stage.devices[i - 1]) here("its devices are not in ascending order");
      }
      if (stage.warm_up < 1) here(fmt::format("{} warm-up passes; give at least 1", stage.warm_up));
      auto wrong = check(fresh.theory(s), stage.program);
      if (wrong.empty()) wrong = check_phases(fresh.theory(s), stage.program);
      for (const std::string& text : wrong) here(text);
    }
  }
  for (size_t r = 0; r < pipeline.replicas.size() && problems.empty(); ++r)
    check_order(pipeline.replicas[r], fresh, fmt::format("replica {}", r), &problems);
  if (problems.empty()) check_divisions(pipeline, &problems);
  return problems;
}

// What is wrong with the precision: the graph computes in another, or in more than it says.
std::vector<std::string> check_precision(const Plan& plan) {
  const Graph& graph = *plan.graph;
  bool computes = plan.precision == DType::f32;
  for (const Value& value : graph.values) computes = computes || value.spec.dtype == plan.precision;
  if (!computes)
    return {fmt::format("precision is {}, but nothing in the graph is computed in it",
                        to_string(plan.precision))};
  for (const Parameter& p : graph.parameters) {
    if (!p.gradient.valid()) continue;
    const DType type = graph.spec(p.gradient).dtype, own = graph.spec(p.value).dtype;
    if (type != own && type != plan.precision)
      return {fmt::format("the gradient of {} is {}, neither its own {} nor the precision {}",
                          p.name, to_string(type), to_string(own), to_string(plan.precision))};
  }
  return {};
}

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
          "{} in {} of {}", net::to_string(step.collective),
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

std::string describe_pipeline(const Plan& plan) {
  const PipelinePlan& pipeline = *plan.pipeline;
  std::string out = fmt::format(
      "{} on {} devices of {}, global batch {}: {} stages, {} replica{}, micro-batches of {}\n",
      plan.model, plan.cluster.size(), plan.cluster.name, plan.batch, pipeline.stages(),
      pipeline.replicas.size(), pipeline.replicas.size() > 1 ? "s" : "", pipeline.micro_batch);
  out += describe_precision(plan);
  const std::vector<Bytes> memory = pipeline_memory(pipeline, plan.cluster, plan.optimizer);
  for (size_t r = 0; r < pipeline.replicas.size(); ++r) {
    const ReplicaPlan& replica = pipeline.replicas[r];
    out += fmt::format("  replica {}   {} micro-batches\n", r, replica.micro_batches);
    for (int s = 0; s < pipeline.stages(); ++s) {
      const StagePlan& stage = replica.stages[s];
      const Graph& graph = pipeline.graph(s);
      std::string devices;
      for (size_t i = 0; i < stage.devices.size();) {
        size_t end = i;
        const std::string& type = plan.cluster.type_of(stage.devices[i]).name;
        while (end < stage.devices.size() && plan.cluster.type_of(stage.devices[end]).name == type)
          ++end;
        devices += fmt::format("{}{} x {}", i ? " + " : "", end - i, type);
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
      out += fmt::format(
          "    stage {:<2}  {} (device {}{}), {} nodes, parameters {} ({}), holds {}{}, "
          "{} of {}\n",
          s, devices, stage.devices[0], stage.devices.size() > 1 ? " on" : "", graph.nodes.size(),
          parameters.empty() ? "none" : parameters,
          format_bytes(static_cast<Bytes>(graph.parameter_bytes())), in_flight(replica, s),
          stage.recompute ? ", recomputes" : "", format_bytes(most),
          format_bytes(plan.cluster.type_of(stage.devices[0]).memory));
    }
  }
  std::map<std::tuple<bool, int, int>, std::pair<int, Bytes>> sent;
  for (const Transfer& t : pipeline.parts().transfers) {
    auto& [count, bytes] = sent[{t.backward, t.from, t.to}];
    ++count;
    bytes += static_cast<Bytes>(pipeline.part().graph.spec(t.value).bytes());
  }
  for (const auto& [way, sum] : sent)
    out += fmt::format("  sends       {} -> {} {}: {} values, {} a micro-batch\n", std::get<1>(way),
                       std::get<2>(way), std::get<0>(way) ? "backward" : "forward", sum.first,
                       format_bytes(sum.second));
  for (const Tied& tied : pipeline.parts().tied)
    out += fmt::format("  tied        {} in stages {}\n",
                       plan.graph->parameters[tied.parameter].name, fmt::join(tied.stages, ", "));
  for (int s = 0; s < pipeline.stages(); ++s) {
    const DividedState divided = divided_state(pipeline, s);
    if (!divided.any()) continue;
    Bytes bytes = 0;
    const auto& parameters = pipeline.graph(s).parameters;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (divided.optimizer[i])
        bytes += static_cast<Bytes>(pipeline.graph(s).spec(parameters[i].value).bytes());
    std::vector<std::string> shares;
    for (double share : divided.shares) shares.push_back(fmt::format("{:.0f}%", 100 * share));
    out += fmt::format("  zero        stage {} level {}: replicas divide the {} of {}, {}\n", s,
                       pipeline.level(s),
                       pipeline.level(s) == 1 ? "optimizer state" : "optimizer state and gradients",
                       format_bytes(bytes), fmt::join(shares, " "));
  }
  for (int s = 0; s < pipeline.stages(); ++s) {
    const StagePlan& stage = pipeline.replicas[0].stages[s];
    if (std::none_of(stage.program.steps.begin(), stage.program.steps.end(),
                     [](const Step& step) { return step.each || step.again; }))
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
  std::vector<int> counts;
  for (const StagePlan& stage : pipeline.replicas[0].stages) counts.push_back(stage.warm_up);
  out += describe_reductions(plan);
  out += fmt::format("  schedule    {}: warm-up {}\n", pipeline.schedule, fmt::join(counts, ", "));
  if (plan.predicted_step_s > 0)
    out += fmt::format("  predicted   {} a step\n", format_seconds(plan.predicted_step_s));
  return out;
}

}  // namespace

Json to_json(const Plan& plan) {
  Json j;
  j["motley_plan"] = kPlanVersion;
  j["engine"] = plan.engine;
  j["model"] = plan.model;
  j["batch"] = plan.batch;
  j["optimizer"] = to_string(plan.optimizer);
  if (plan.precision != DType::f32) j["precision"] = to_string(plan.precision);
  j["predicted"] = {{"step_s", plan.predicted_step_s},
                    {"lower_bound_s", plan.lower_bound_s},
                    {"peak_memory_bytes", plan.peak_memory_bytes}};
  for (const Alternative& a : plan.alternatives) {
    Json k = {{"name", a.name}, {"baseline", a.baseline}};
    if (a.feasible) k["step_s"] = a.step_s;
    if (!a.what.empty()) k["what"] = a.what;
    j["predicted"]["alternatives"].push_back(std::move(k));
  }
  if (!plan.pipeline) j["ratios"] = ratios_json(plan.ratios);
  if (!plan.reductions.empty()) {
    j["reductions"] = Json::array();
    for (const ReductionProgram& program : plan.reductions)
      j["reductions"].push_back(to_json(program));
  }
  j["cluster"] = lines(to_yaml(plan.cluster));
  if (plan.pipeline)
    j["pipeline"] = to_json(*plan.pipeline);
  else
    j["program"] = program_lines(*plan.theory, plan.program);
  j["fingerprint"] = fmt::format("{:016x}", plan.graph_fingerprint);
  j["graph"] = lines(to_text(*plan.graph));
  return j;
}

Plan parse_plan(const std::string& text, const std::string& name) {
  Json json = parse_json(text, name);
  Fields fields(json, "plan", name);
  if (!fields.find("motley_plan"))
    throw fields.bad("motley_plan", "is missing; this is not a plan of motley");
  const int64_t version = fields.integer("motley_plan");
  if (version != kPlanVersion && version != 1)
    throw fields.bad("motley_plan",
                     fmt::format("is {}; this motley reads version {}", version, kPlanVersion));
  Plan plan;
  plan.engine = fields.text("engine");
  if (plan.engine.empty() || plan.engine.size() > 32 ||
      plan.engine.find_first_not_of("abcdefghijklmnopqrstuvwxyz-") != std::string::npos)
    throw fields.bad("engine", "is '" + plan.engine + "'; give a name, such as spmd or pipeline");
  plan.model = fields.text("model");
  plan.batch = fields.integer("batch");
  if (plan.batch < 1) throw fields.bad("batch", "is not positive");
  if (!parse_optimizer(fields.text("optimizer"), &plan.optimizer))
    throw fields.bad("optimizer", "is '" + fields.text("optimizer") + "'; give sgd or adamw");
  if (fields.find("precision") && (!parse_dtype(fields.text("precision"), &plan.precision) ||
                                   (plan.precision != DType::f16 && plan.precision != DType::bf16)))
    throw fields.bad("precision",
                     "is '" + fields.text("precision") + "'; give bf16 or f16, or leave it out");
  plan.cluster =
      parse_cluster(joined(fields.array("cluster"), name + ": cluster"), name + ": cluster");
  plan.set_graph(parse_graph(joined(fields.array("graph"), name + ": graph"), name + ": graph"));
  // Files of older versions have none, which check() of graphs says.
  plan.graph_fingerprint = fields.find("fingerprint")
                               ? std::strtoull(fields.text("fingerprint").c_str(), nullptr, 16)
                               : 0;
  if (const Json* pipeline = fields.find("pipeline")) {
    for (const char* other : {"ratios", "program"})
      if (fields.find(other))
        throw fields.bad(other, "cannot be combined with a pipeline; its stages have their own");
    if (version == 1)
      throw fields.bad("motley_plan",
                       "is 1, in which pipelines had the graph of a micro-batch; plan again");
    plan.pipeline = read_pipeline(*pipeline, *plan.theory, plan.batch, name + ": pipeline");
  } else {
    plan.ratios = read_segment_ratios(fields.array("ratios"), plan.theory->segments(), name);
    for (const std::vector<double>& ratios : plan.ratios)
      if (static_cast<int>(ratios.size()) != plan.cluster.size())
        throw fields.bad("ratios", fmt::format("has {} numbers; the cluster has {} devices",
                                               ratios.size(), plan.cluster.size()));
    plan.program = read_program(*plan.theory, fields.array("program"), name + ": program");
  }
  if (fields.find("reductions")) {
    const Json& list = fields.array("reductions");
    if (list.size() > kMaxReductions)
      throw fields.bad("reductions",
                       fmt::format("has {} entries; give at most {}", list.size(), kMaxReductions));
    for (size_t i = 0; i < list.size(); ++i)
      plan.reductions.push_back(
          read_reduction(list[i], fmt::format("{}: reductions[{}]", name, i)));
  }
  if (const Json* predicted = fields.find("predicted")) {
    Fields p(*predicted, "plan", name + ": predicted");
    plan.predicted_step_s = p.number("step_s");
    plan.lower_bound_s = p.number("lower_bound_s");
    for (const Json& b : p.array("peak_memory_bytes"))
      plan.peak_memory_bytes.push_back(b.is_number() ? b.get<double>() : 0);
    if (p.find("alternatives")) {
      const Json& list = p.array("alternatives");
      if (list.size() > kMaxAlternatives)
        throw p.bad("alternatives",
                    fmt::format("has {} entries; give at most {}", list.size(), kMaxAlternatives));
      for (size_t i = 0; i < list.size(); ++i)
        plan.alternatives.push_back(
            read_alternative(list[i], fmt::format("{}: predicted.alternatives[{}]", name, i)));
    }
  }
  return plan;
}

void save_plan(const Plan& plan, const std::string& path) {
  write_file(path, to_json(plan).dump(1) + "\n");
}
Plan load_plan(const std::string& path) { return parse_plan(read_file(path), path); }

std::vector<std::string> check(const Plan& plan, bool memory_limit) {
  std::vector<std::string> problems = verify(*plan.graph);
  for (const std::string& text : check_reductions(plan)) problems.push_back(text);
  for (const std::string& text : check_precision(plan)) problems.push_back(text);
  if (!problems.empty()) return problems;
  if (plan.pipeline) {
    problems = check_pipeline(plan);
    if (!problems.empty() || !memory_limit) return problems;
    const std::vector<Bytes> bytes = pipeline_memory(*plan.pipeline, plan.cluster, plan.optimizer);
    for (int d = 0; d < plan.cluster.size() && problems.size() < 20; ++d)
      if (bytes[d] > plan.cluster.type_of(d).memory)
        problems.push_back(fmt::format("device {} ({}) needs {} and has {}", d,
                                       plan.cluster.type_of(d).name, format_bytes(bytes[d]),
                                       format_bytes(plan.cluster.type_of(d).memory)));
    return problems;
  }
  Theory theory(*plan.graph);  // derived afresh: nothing of the planner is trusted
  problems = check(theory, plan.program);
  if (static_cast<int>(plan.ratios.size()) != theory.segments() ||
      std::any_of(plan.ratios.begin(), plan.ratios.end(), [&](const auto& ratios) {
        return static_cast<int>(ratios.size()) != plan.cluster.size();
      })) {
    problems.push_back("there is not one ratio per device and segment");
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

}  // namespace

std::string describe(const Plan& plan) {
  if (plan.pipeline) return describe_pipeline(plan);
  const Theory& theory = *plan.theory;
  const Graph& graph = *plan.graph;
  std::string out = fmt::format("{} on {} devices of {}, global batch {}\n", plan.model,
                                plan.cluster.size(), plan.cluster.name, plan.batch);
  out += describe_precision(plan);

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
  const Shares shares(plan.ratios);
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
    } else if (step.kind != CollectiveKind::slice && step.kind != CollectiveKind::mask) {
      Sum& sum = comm[fmt::format("{}{} of {}", step.form == PieceForm::grouped ? "grouped " : "",
                                  to_string(step.kind), role_of(graph, is_gradient, step.value))];
      ++sum.count;
      sum.bytes += static_cast<Bytes>(graph.spec(step.value).bytes());
    }
  }
  int again = 0, forward = 0, places = 0;
  for (size_t s = 0; s < plan.program.steps.size(); ++s) {
    const Step& step = plan.program.steps[s];
    again += step.again;
    places += step.again && !plan.program.steps[s - 1].again;
    forward += !step.again && step.is_compute() && !is_source(graph.node(step.node)) &&
               graph.node(step.node).phase == Phase::forward;
  }
  if (again > 0)
    out += fmt::format("  recomputes  {} of {} forward steps, in {} places of the backward pass\n",
                       again, forward, places);
  if (comm.empty()) out += "  communication  none\n";
  for (const auto& [what, sum] : comm)
    out +=
        fmt::format("  each step   {} {}, {} in all\n", sum.count, what, format_bytes(sum.bytes));

  out += describe_reductions(plan);

  Fractions fractions(plan.cluster, shares);
  CostModel model(plan.cluster, plan.reductions);
  ProgramCost cost = cost_of(theory, plan.program, model, fractions, plan.optimizer);
  const Seconds hidden = hidden_seconds(theory, plan.program, model, fractions);
  out += fmt::format("  predicted   {} a step: {} of communication",
                     format_seconds(cost.step - hidden), format_seconds(cost.comm));
  if (hidden > 0) out += fmt::format(", {} of it during the backward pass", format_seconds(hidden));
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

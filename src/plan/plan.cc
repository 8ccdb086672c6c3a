#include "plan/plan.h"

#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"

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
constexpr int64_t kMaxStages = 4096;

Json program_lines(const Theory& theory, const Program& program) {
  Json list = Json::array();
  for (const Step& step : program.steps) list.push_back(to_text(theory, step));
  return list;
}

Program read_program(const Theory& theory, const Json& list, const std::string& name) {
  std::vector<Step> steps;
  for (size_t i = 0; i < list.size(); ++i) {
    std::string where = fmt::format("{}[{}]", name, i);
    if (!list[i].is_string())
      throw user_error("plan", "{} is {}; give a line of text", where, list[i].dump());
    steps.push_back(parse_step(theory, list[i].get<std::string>(), where));
  }
  return {std::move(steps)};
}

void add_sizes(const GradientSizes& sizes, Json* to) {
  if (sizes == GradientSizes()) return;
  (*to)["gradient_messages"] = {{"alone", static_cast<int64_t>(sizes.alone)},
                                {"together", static_cast<int64_t>(sizes.together)}};
}

// Those of a program, if it has other ones than usual.
GradientSizes read_sizes(const Fields& program, const std::string& name) {
  const Json* json = program.find("gradient_messages");
  if (json == nullptr) return {};
  Fields fields(*json, "plan", name + ": gradient_messages");
  GradientSizes sizes;
  const auto read = [&](const char* field, Bytes most) {
    const int64_t bytes = fields.integer(field);
    if (bytes < 0 || static_cast<Bytes>(bytes) > most)
      throw fields.bad(field, fmt::format("is {}; give bytes from 0 to {:.0f}", bytes, most));
    return static_cast<Bytes>(bytes);
  };
  sizes.alone = read("alone", kLargestSizes.alone);
  sizes.together = read("together", kLargestSizes.together);
  return sizes;
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
      if (stage.weights_behind > 0) k["weights_behind"] = stage.weights_behind;
      if (stage.recompute) k["recompute"] = true;
      // Replicas mostly run the program of the first.
      const bool same = &replica != &pipeline.replicas[0] &&
                        stage.program == pipeline.replicas[0].stages[s].program;
      if (!same) {
        k["program"] = program_lines(pipeline.theory(static_cast<int>(s)), stage.program);
        add_sizes(stage.program.sizes, &k);
      }
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
      if (g.find("weights_behind"))
        stage.weights_behind = static_cast<int>(integer(g, "weights_behind", 0, kMaxMicroBatches));
      if (const Json* b = g.find("recompute")) {
        if (!b->is_boolean()) throw g.bad("recompute", "is " + b->dump() + "; give true or false");
        stage.recompute = b->get<bool>();
      }
      if (r == 0 || g.find("program")) {
        stage.program = read_program(pipeline->theory(s), g.array("program"), here + ".program");
        stage.program.sizes = read_sizes(g, here);
      } else {
        stage.program = pipeline->replicas[0].stages[s].program;
      }
      replica.stages.push_back(std::move(stage));
    }
    pipeline->replicas.push_back(std::move(replica));
  }
  if (fields.find("zero"))
    pipeline->zero = read_divisions(fields.array("zero"), stages, pipeline->replicas.size(), name);
  return pipeline;
}

std::unique_ptr<Duplex> read_duplex(const Json& json, const Theory& whole, int64_t batch,
                                    const std::string& name) {
  Fields fields(json, "plan", name);
  const Json& list = fields.array("parts");
  std::vector<int64_t> parts;
  int64_t sum = 0;
  for (const Json& n : list) {
    if (!n.is_number_integer() || n.get<int64_t>() < 1 || n.get<int64_t>() > batch)
      throw fields.bad("parts", "holds " + n.dump() + "; give the samples of every part");
    parts.push_back(n.get<int64_t>());
    sum += parts.back();
    if (parts.size() > kMaxParts || sum > batch) break;
  }
  if (parts.empty() || parts.size() > kMaxParts || sum != batch)
    throw fields.bad("parts",
                     fmt::format("is {}; give 1 to {} numbers of samples that add up to the "
                                 "batch of {}",
                                 list.dump(), kMaxParts, batch));
  if (whole.segments() > 1)
    throw user_error("plan", "{}: the model has {} segments; leave duplex out, or plan one segment",
                     name, whole.segments());
  return duplex_of(whole, parts, name);
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
    steps.push_back({{"collective", to_string(step.collective)}, {"groups", step.groups}});
  Json j;
  if (!program.devices.empty()) j["devices"] = program.devices;
  j["from_bytes"] = program.from;
  j["fixed_s"] = program.fixed;
  j["seconds_per_byte"] = program.seconds_per_byte;
  if (program.least > 0) j["least_s"] = program.least;
  j["steps"] = std::move(steps);
  return j;
}

Collective read_collective(const Fields& fields) {
  const std::string text = fields.text("collective");
  if (const auto collective = parse_collective(text, net::kReductionCollectives))
    return *collective;
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
  if (fields.find("least_s")) program.least = fields.number("least_s");
  if (program.from < 0 || program.fixed < 0 || program.seconds_per_byte < 0 || program.least < 0)
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

void read_redundancy(Fields& fields, Plan* plan) {
  const int64_t times = fields.integer("redundancy");
  if (times != 0 && times != 1)
    throw fields.bad("redundancy",
                     fmt::format("is {}; give 0, or 1 to keep what is cut twice", times));
  if (times == 1)
    for (const char* other : {"pipeline", "duplex"})
      if (fields.find(other))
        throw fields.bad("redundancy",
                         fmt::format("is 1, which is of one program, and there is a {}; plan with "
                                     "--redundancy 1, or leave it out",
                                     other));
  if (times == 1 && plan->cluster.size() < 2)
    throw fields.bad("redundancy", "is 1, but the cluster has one device; give 0, or two devices");
  plan->redundancy = static_cast<int>(times);
}

Json without_graph(const Plan& plan) {
  Json j;
  j["motley_plan"] = kPlanVersion;
  j["engine"] = plan.engine;
  j["model"] = plan.model;
  j["batch"] = plan.batch;
  j["optimizer"] = to_string(plan.optimizer);
  if (plan.precision != DType::f32) j["precision"] = to_string(plan.precision);
  if (plan.redundancy > 0) j["redundancy"] = plan.redundancy;
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
    j["program"] = program_lines(plan.running(), plan.program);
  add_sizes(plan.program.sizes, &j);
  if (plan.duplex) j["duplex"] = {{"parts", plan.duplex->samples}};
  j["fingerprint"] = fmt::format("{:016x}", plan.graph_fingerprint);
  return j;
}

Json graph_of(const Plan& plan) { return {{"graph", lines(to_text(*plan.graph))}}; }

}  // namespace

Json to_json(const Plan& plan) {
  Json j = without_graph(plan);
  j.update(graph_of(plan));
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
      plan.engine.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") != std::string::npos)
    throw fields.bad("engine", "is '" + plan.engine + "'; give a name, such as spmd or pipeline");
  plan.model = fields.text("model");
  plan.batch = fields.integer("batch");
  if (plan.batch < 1) throw fields.bad("batch", "is not positive");
  if (!parse_optimizer(fields.text("optimizer"), &plan.optimizer))
    throw fields.bad("optimizer", fmt::format("is '{}'; give {}", fields.text("optimizer"),
                                              fmt::join(optimizer_names(), ", ")));
  if (fields.find("precision") && (!parse_dtype(fields.text("precision"), &plan.precision) ||
                                   (plan.precision != DType::f16 && plan.precision != DType::bf16)))
    throw fields.bad("precision",
                     "is '" + fields.text("precision") + "'; give bf16 or f16, or leave it out");
  plan.cluster =
      parse_cluster(joined(fields.array("cluster"), name + ": cluster"), name + ": cluster");
  if (fields.find("redundancy")) read_redundancy(fields, &plan);
  plan.set_graph(parse_graph(joined(fields.array("graph"), name + ": graph"), name + ": graph"));
  // Files of older versions have none, which check() of graphs says.
  plan.graph_fingerprint = fields.find("fingerprint")
                               ? std::strtoull(fields.text("fingerprint").c_str(), nullptr, 16)
                               : 0;
  if (const Json* pipeline = fields.find("pipeline")) {
    for (const char* other : {"ratios", "program", "duplex", "gradient_messages"})
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
    if (const Json* duplex = fields.find("duplex"))
      plan.duplex = read_duplex(*duplex, *plan.theory, plan.batch, name + ": duplex");
    plan.program = read_program(plan.running(), fields.array("program"), name + ": program");
    plan.program.sizes = read_sizes(fields, name);
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

void save_plan(const Plan& plan, const std::string& path, int threads) {
  std::string text, graph;  // "{\n fields of one\n}": to be one object of all
  parallel_for(2, threads, [&](int i) {
    i == 0 ? text = without_graph(plan).dump(1) : graph = graph_of(plan).dump(1);
  });
  text.resize(text.size() - std::string_view("\n}").size());
  text += ',';
  text.append(graph, 1);
  text += '\n';
  write_file(path, text);
}
Plan load_plan(const std::string& path) { return parse_plan(read_file(path), path); }

}  // namespace motley

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "core/error.h"
#include "plan/plan.h"
#include "shard/joined.h"

namespace motley {

namespace {

constexpr int64_t kMaxPasses = int64_t{1} << 22;

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
  for (const auto& group : groups)
    for (int s : group)
      if (group.size() > 1 && has_later(replica.stages[s].program))
        problems->push_back(fmt::format(
            "{}, stage {}: steps say later, and the stage shares its devices with another", where,
            s));
  if (!problems->empty()) return;
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
      same = same && replica.stages[s].warm_up == first.stages[s].warm_up &&
             replica.stages[s].weights_behind == first.stages[s].weights_behind &&
             has_later(replica.stages[s].program) == has_later(first.stages[s].program);
    if (!same)
      problems->push_back(
          fmt::format("zero level 2, at which replicas meet in every backward pass, and replica {} "
                      "takes others than replica 0; give them as many micro-batches, the same "
                      "warm-up passes and weights_behind, or level 1",
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
      const bool splits = has_later(stage.program);
      if (stage.weights_behind < 0 || (!splits && stage.weights_behind > 0))
        here(fmt::format("weights_behind is {}; give at least 0, and 0 where no step says later",
                         stage.weights_behind));
      if (has_joined(stage.program)) here("a step says joined, which is for parts of a batch");
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

std::vector<std::string> check_redundancy(const Plan& plan) {
  if (plan.redundancy == 0) return {};
  if (plan.redundancy != 1) return {fmt::format("redundancy is {}; give 0 or 1", plan.redundancy)};
  if (plan.pipeline || plan.duplex)
    return {"redundancy is 1, which is of one program on whole batches; give 0"};
  if (plan.cluster.size() < 2) return {"redundancy is 1, but there is one device; give 0"};
  if (const Backend backend = backend_of(plan.cluster); !backend.messages)
    return {
        fmt::format("redundancy is 1, which needs messages between two workers, and the "
                    "backend {} of cluster {} has none; give 0, or name another backend",
                    backend.name, plan.cluster.name)};
  return {};
}

}  // namespace

std::vector<std::string> check(const Plan& plan, bool memory_limit) {
  std::vector<std::string> problems = verify(*plan.graph);
  const Backend backend = backend_of(plan.cluster);
  if (!backend.messages && (plan.pipeline || !plan.reductions.empty()))
    problems.push_back(fmt::format(
        "{} sends messages between two workers, and the backend {} of cluster {} has none; plan "
        "with "
        "--engine spmd, or name another backend in the cluster file",
        plan.pipeline ? "a pipeline" : "a reduction in steps", backend.name, plan.cluster.name));
  for (const std::string& text : check_redundancy(plan)) problems.push_back(text);
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
  std::unique_ptr<Duplex> duplex;
  try {
    if (plan.duplex) {
      if (theory.segments() > 1) return {"duplex: the model has segments; plan one segment"};
      duplex = duplex_of(theory, plan.duplex->samples, "duplex");
    }
  } catch (const UserError& e) {
    return {e.what()};
  }
  if (duplex && to_text(duplex->graph) != to_text(plan.duplex->graph))
    return {"duplex: its graph is not that of the batch in parts"};
  const Theory& running = duplex ? *duplex->theory : theory;
  problems = check(running, plan.program);
  if (has_later(plan.program))
    problems.push_back("a step says later, which is for stages of pipelines");
  if (has_joined(plan.program) && !duplex)
    problems.push_back("a step says joined, which is for parts of a batch (duplex)");
  if (duplex && problems.empty()) problems = check_joined(*duplex, plan.program);
  if (static_cast<int>(plan.ratios.size()) != theory.segments() ||
      std::any_of(plan.ratios.begin(), plan.ratios.end(), [&](const auto& ratios) {
        return static_cast<int>(ratios.size()) != plan.cluster.size();
      })) {
    problems.push_back("there is not one ratio per device and segment");
  } else if (problems.empty() && memory_limit) {
    Shares shares(plan.ratios);
    Fractions fractions(plan.cluster, shares, plan.redundancy);
    auto peak = memory_of(running, plan.program, fractions,
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

}  // namespace motley

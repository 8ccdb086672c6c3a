#include "planner/arrangement.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "graph/op.h"
#include "graph/owner.h"
#include "planner/program_plan.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"
#include "spmd/build.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

constexpr double kEqual = 1e-6;  // shares

const char* strategy_of(Inside inside) {
  switch (inside) {
    case Inside::batch:
      return "dp-ev";
    case Inside::experts:
      return "expert-parallel";
    case Inside::pieces:
      return "fsdp";
    case Inside::tensors:
      return "matrices";
  }
  return "";
}

bool equal_shares(const std::vector<double>& shares) {
  return std::all_of(shares.begin(), shares.end(), [&](double share) {
    return std::abs(share * static_cast<double>(shares.size()) - 1) < kEqual;
  });
}

// The parameter that a value is, or is a view or conversion of; -1: none.
int parameter_of(const Graph& graph, ValueId value, const std::vector<int>& number) {
  for (;;) {
    const Node& producer = graph.node(graph.value(value).producer);
    if (number[value.index] >= 0) return number[value.index];
    const OpDef* op = find_op(producer.op);
    const bool follows = producer.op == "aten::_to_copy" || (op && op->alias);
    const ValueList inputs = graph.inputs_of(producer);
    if (is_source(producer) || !follows || inputs.empty()) return -1;
    value = inputs[0];
  }
}

// What the devices of one stage divide; nothing and the reason if several things.
std::optional<Inside> inside_of(const Theory& theory, const Program& program, std::string* reason) {
  const Graph& graph = theory.graph();
  const std::vector<Placement> stored = stored_placements(theory, program);
  std::vector<int> number(graph.values.size(), -1);
  int cut = 0, experts = 0, gathered = 0;
  std::vector<bool> is_cut(graph.parameters.size()), is_gathered(graph.parameters.size());
  for (size_t p = 0; p < graph.parameters.size(); ++p) {
    const ValueId value = graph.parameters[p].value;
    number[value.index] = static_cast<int>(p);
    is_cut[p] = stored[value.index].is_shard();
    cut += is_cut[p];
    experts += is_cut[p] && graph.spec(value).shape.size() == 3;
  }
  for (const Step& step : program.steps)
    if (!step.is_compute() && step.kind == Collective::all_gather)
      if (const int p = parameter_of(graph, step.value, number); p >= 0 && !is_gathered[p]) {
        is_gathered[p] = true;
        gathered += is_cut[p];
      }
  bool rows = false, whole = true;
  for (const Input& input : graph.inputs) {
    const Placement p = stored[input.value.index];
    rows = rows || (p.is_shard() && p.dim == 0);
    whole = whole && !p.is_shard();
  }
  if (rows && cut == 0) return Inside::batch;
  if (rows && gathered == cut) return Inside::pieces;
  if (rows && experts == cut) return Inside::experts;
  if (!rows && cut > 0 && gathered == 0) return Inside::tensors;
  if (cut == 0 && whole)
    *reason = "gives the same work to all its devices";
  else if (rows)
    *reason = fmt::format("cuts {} of its {} parameters and the batch at once", cut,
                          graph.parameters.size());
  else
    *reason = fmt::format(
        "cuts {} of its {} parameters, of which {} are gathered, and not the rows "
        "of the batch",
        cut, graph.parameters.size(), gathered);
  return std::nullopt;
}

// Whether blocks of one program are computed again: all (but the last, which saves nothing), or
// none; nothing if some are.
std::optional<bool> recomputed(const Graph& graph, const Program& program) {
  const std::vector<int> block = spmd::blocks_of(graph);
  std::vector<bool> again(count_blocks(graph) + 1);
  for (const Step& step : program.steps)
    if (step.again && step.is_compute() && block[step.node.index] >= 0 &&
        !made_by_readers(graph)[step.node.index])
      again[block[step.node.index]] = true;
  const auto count = std::count(again.begin(), again.end(), true);
  if (count == 0) return false;
  if (count + 2 >= static_cast<int64_t>(again.size())) return true;
  return std::nullopt;
}

// [stage] Blocks; empty and the reason if a stage begins inside of one.
std::vector<int> blocks_of_stages(const Graph& graph, const std::vector<int>& stage_of, int stages,
                                  std::string* reason) {
  const std::vector<int> block = spmd::blocks_of(graph);
  const std::vector<bool> own = made_by_readers(graph);
  const int count = count_blocks(graph);
  std::vector<int> stage(count, -1), blocks(stages, 0);
  int last = -1;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (is_source(graph.nodes[n]) || graph.nodes[n].phase == Phase::backward || own[n]) continue;
    const int b = block[n], s = stage_of[n];
    if (b < 0) {
      if (s == (last < 0 ? 0 : stages - 1)) continue;
      *reason = last < 0
                    ? fmt::format("what is in front of the first layer is partly of stage {}", s)
                    : fmt::format("what follows the last layer is partly of stage {}", s);
      return {};
    }
    last = b;
    if (stage[b] < 0) stage[b] = s;
    if (stage[b] == s) continue;
    *reason = fmt::format("layer {} is partly of stage {} and partly of stage {}", b, stage[b], s);
    return {};
  }
  for (int b = 0; b < count; ++b) {
    if (b > 0 && stage[b] < stage[b - 1]) {
      *reason = fmt::format("layer {} is of stage {}, the one before of stage {}", b, stage[b],
                            stage[b - 1]);
      return {};
    }
    ++blocks[std::max(0, stage[b])];
  }
  return blocks;
}

std::optional<Arrangement> of_one_program(const Plan& plan, std::string* reason) {
  if (plan.ratios.size() != 1) {
    *reason = fmt::format("it has {} segments with shares of their own", plan.ratios.size());
    return std::nullopt;
  }
  const auto again = recomputed(*plan.graph, plan.program);
  if (!again) {
    *reason = "it computes some layers again and others not";
    return std::nullopt;
  }
  Arrangement a;
  a.micro_batch = plan.batch;
  a.micro_batches = {1};
  ArrangedStage stage;
  stage.blocks = count_blocks(*plan.graph);
  stage.recompute = *again;
  stage.devices.resize(1);
  for (int d = 0; d < plan.cluster.size(); ++d) stage.devices[0].push_back(d);
  if (plan.cluster.size() > 1) {
    std::string what;
    const auto inside = inside_of(*plan.theory, plan.program, &what);
    if (!inside) {
      *reason = "its program " + what;
      return std::nullopt;
    }
    stage.inside = *inside;
    if (!equal_shares(plan.ratios[0])) a.shares = plan.ratios[0];
  }
  a.stages = {stage};
  return a;
}

// A plan whose stages divide what they are to divide; nothing and the reason if a program was found
// that does otherwise.
std::unique_ptr<Plan> as_arranged(std::unique_ptr<Plan> plan, const Arrangement& a,
                                  std::string* reason) {
  if (!plan) return plan;
  const std::optional<Arrangement> found = read_arrangement(*plan, reason);
  if (!found) return nullptr;
  for (size_t s = 0; s < a.stages.size(); ++s)
    if (a.stages[s].width() > 1 && a.stages[s].inside != found->stages[s].inside) {
      *reason = fmt::format("stage {} would divide its {} rather than its {}", s,
                            to_string(found->stages[s].inside), to_string(a.stages[s].inside));
      return nullptr;
    }
  return plan;
}

// Warm-up passes, the same in all replicas, and the interleaving.
bool read_schedule(const PipelinePlan& pipeline, Arrangement* a, std::string* reason) {
  const int stages = pipeline.stages();
  const auto groups = stage_groups(pipeline.replicas[0]);
  a->interleave = stages / static_cast<int>(groups.size());
  bool plain = true;
  for (const ReplicaPlan& replica : pipeline.replicas) {
    const auto own = stage_groups(replica);
    for (size_t g = 0; g < own.size(); ++g)
      for (size_t k = 0; k < own[g].size(); ++k)
        if (own != groups || own[g][k] != static_cast<int>(g + k * groups.size())) {
          *reason = "its stages share devices in another order than interleaved ones do";
          return false;
        }
    for (int s = 0; s < stages; ++s) {
      if (replica.stages[s].warm_up != pipeline.replicas[0].stages[s].warm_up) {
        *reason = fmt::format("stage {} has {} warm-up passes in one replica and {} in another", s,
                              pipeline.replicas[0].stages[s].warm_up, replica.stages[s].warm_up);
        return false;
      }
      if (has_later(replica.stages[s].program) && a->split < 0) a->split = s;
      a->stages[s].warm_up = replica.stages[s].warm_up;
      plain = plain && replica.stages[s].warm_up == std::min(stages - s, replica.micro_batches);
    }
  }
  a->schedule = a->interleave > 1 ? "interleaved" : plain ? "1f1b" : "";
  return true;
}

}  // namespace

const char* to_string(Inside inside) {
  switch (inside) {
    case Inside::batch:
      return "batch";
    case Inside::experts:
      return "experts";
    case Inside::pieces:
      return "pieces";
    case Inside::tensors:
      return "tensors";
  }
  return "?";
}

int64_t Arrangement::batch() const {
  return micro_batch * std::accumulate(micro_batches.begin(), micro_batches.end(), int64_t{0});
}

bool Arrangement::rectangle() const {
  return std::all_of(stages.begin(), stages.end(),
                     [&](const ArrangedStage& s) {
                       return s.width() == stages[0].width() &&
                              (s.inside == stages[0].inside || s.width() == 1);
                     }) &&
         std::all_of(micro_batches.begin(), micro_batches.end(),
                     [&](int count) { return count == micro_batches[0]; });
}

std::string to_string(const Arrangement& a) {
  const auto list = [&](auto value) {
    std::vector<int> values;
    for (const ArrangedStage& s : a.stages) values.push_back(static_cast<int>(value(s)));
    const bool same =
        std::all_of(values.begin(), values.end(), [&](int v) { return v == values[0]; });
    return same ? fmt::format("{}", values[0]) : fmt::format("{}", fmt::join(values, "/"));
  };
  const ArrangedStage& first = a.stages[0];
  std::string text = fmt::format(
      "pp={},dp={},tp={},mbs={}", a.pp(), list([](const ArrangedStage& s) { return s.dp(); }),
      list([](const ArrangedStage& s) { return s.tp(); }),
      a.micro_batch * static_cast<int64_t>(first.devices.size()) / first.dp());
  if (const std::string ep =
          list([](const ArrangedStage& s) { return s.inside == Inside::experts ? s.width() : 1; });
      ep != "1" || first.inside == Inside::experts)
    text += ",ep=" + ep;
  if (a.interleave > 1) text += fmt::format(",interleave={}", a.interleave);
  if (a.zero > 0 || first.inside == Inside::pieces)
    text += fmt::format(",zero={}", first.inside == Inside::pieces ? 3 : a.zero);
  if (const std::string r = list([](const ArrangedStage& s) { return s.recompute ? 1 : 0; });
      r != "0")
    text += r == "1" ? ",recompute=full" : ",recompute=" + r;
  if (a.schedule.empty())
    text += ",warm_up=" + list([](const ArrangedStage& s) { return s.warm_up; });
  std::vector<int> blocks;
  for (const ArrangedStage& s : a.stages) blocks.push_back(s.blocks);
  return text + fmt::format(",layers={}", fmt::join(blocks, "/"));
}

int count_blocks(const Graph& graph) {
  const std::vector<int> block = spmd::blocks_of(graph);
  return block.empty() ? 0 : *std::max_element(block.begin(), block.end()) + 1;
}

std::optional<Arrangement> read_arrangement(const Plan& plan, std::string* reason) {
  if (plan.duplex) {
    *reason = "its batch is taken in parts side by side; plan again with --duplex off";
    return std::nullopt;
  }
  if (!plan.pipeline) return of_one_program(plan, reason);
  const PipelinePlan& pipeline = *plan.pipeline;
  const int stages = pipeline.stages();
  Arrangement a;
  a.micro_batch = pipeline.micro_batch;
  for (const ReplicaPlan& replica : pipeline.replicas)
    a.micro_batches.push_back(replica.micro_batches);
  const std::vector<int> blocks =
      blocks_of_stages(pipeline.part().graph, pipeline.stage_of, stages, reason);
  if (blocks.empty()) return std::nullopt;
  for (int s = 0; s < stages; ++s) {
    ArrangedStage stage;
    stage.blocks = blocks[s];
    const std::vector<StagePlan>& first = pipeline.replicas[0].stages;
    const auto again = [&](const StagePlan& of) {
      return of.recompute ? true : recomputed(pipeline.graph(s), of.program);
    };
    const std::optional<bool> first_again = again(first[s]);
    if (!first_again) {
      *reason = fmt::format("stage {} computes some layers again and others not", s);
      return std::nullopt;
    }
    stage.recompute = *first_again;
    for (size_t r = 0; r < pipeline.replicas.size(); ++r) {
      const StagePlan& own = pipeline.replicas[r].stages[s];
      const bool equal = equal_shares(own.ratios);
      std::string what;
      auto inside = own.devices.size() == 1 ? std::optional(Inside::batch)
                                            : inside_of(pipeline.theory(s), own.program, &what);
      if (!inside) {
        *reason = fmt::format("stage {} {}", s, what);
      } else if (own.devices.size() != first[s].devices.size() ||
                 (r > 0 && *inside != stage.inside)) {
        *reason = fmt::format("stage {} is on {} devices in one replica and on {} in another", s,
                              first[s].devices.size(), own.devices.size());
        inside.reset();
      } else if (!equal && (stages > 1 || pipeline.replicas.size() > 1)) {
        *reason = fmt::format("stage {} gives its devices unequal shares ({:.1f}% to {:.1f}%)", s,
                              100 * *std::min_element(own.ratios.begin(), own.ratios.end()),
                              100 * *std::max_element(own.ratios.begin(), own.ratios.end()));
        inside.reset();
      } else if (again(own) != stage.recompute) {
        *reason = fmt::format("stage {} computes again in one replica and not in another", s);
        inside.reset();
      }
      if (!inside) return std::nullopt;
      if (!equal) a.shares = own.ratios;
      stage.inside = *inside;
      stage.devices.push_back(own.devices);
    }
    a.stages.push_back(std::move(stage));
  }
  if (!read_schedule(pipeline, &a, reason)) return std::nullopt;
  for (const Division& division : pipeline.zero) {
    if (division.level != pipeline.zero[0].level) {
      *reason = "its stages divide state at unlike levels";
      return std::nullopt;
    }
    a.zero = division.level;
  }
  return a;
}

Arranger::Arranger(const PlanOptions& options, const Cluster& cluster,
                   std::shared_ptr<BatchStep> step, bool planned)
    : options_(options), cluster_(cluster), groups_(cluster_, planned), step_(std::move(step)) {
  options_.strategy.clear();
}

PlanBuilder* Arranger::builder(int64_t samples) {
  auto [it, fresh] = builders_.try_emplace(samples);
  if (fresh && step_->of(samples))
    it->second =
        std::make_unique<PlanBuilder>(options_, &groups_, step_, samples, kBlockLayers, &cache_);
  return it->second.get();
}

std::unique_ptr<Plan> Arranger::make(const Arrangement& a, const std::string& engine,
                                     std::string* reason, bool free) {
  options_.limits.deadline.check();
  const bool one = a.stages.size() == 1 && !a.stages[0].recompute && a.replicas() == 1 &&
                   a.micro_batches[0] == 1 && !free && a.stages[0].width() == cluster_.size();
  if (one) return as_arranged(one_program(a, engine, reason), a, reason);
  PlanBuilder* own = builder(a.micro_batch);
  if (!own) {
    *reason = step_->why_not();
    return nullptr;
  }
  const int blocks =
      std::accumulate(a.stages.begin(), a.stages.end(), 0,
                      [](int sum, const ArrangedStage& s) { return sum + s.blocks; });
  if (own->size() != std::max(1, blocks)) {
    *reason = fmt::format("the model has {} layers, the stages have {}", own->size(), blocks);
    return nullptr;
  }
  Composition composition;
  composition.micro_batch = a.micro_batch;
  composition.schedule = a.any_schedule || a.interleave > 1 ? "" : a.schedule;
  composition.zero = a.stages[0].inside == Inside::pieces ? 3 : a.zero;
  composition.thorough = false;
  composition.try_split = false;
  for (int r = 0; r < a.replicas(); ++r) {
    ReplicaChoice replica;
    replica.micro_batches = a.micro_batches[r];
    int first = 0;
    for (const ArrangedStage& s : a.stages) {
      const int last = a.stages.size() == 1 ? own->size() - 1 : first + s.blocks - 1;
      StageChoice choice{first, last, s.devices[r], s.recompute ? Again::always : Again::never};
      if (!free && s.width() > 1) {
        choice.strategy = strategy_of(s.inside);
        choice.ratios = a.shares;
      }
      replica.stages.push_back(std::move(choice));
      first += s.blocks;
    }
    composition.replicas.push_back(std::move(replica));
  }
  std::unique_ptr<Plan> plan = own->compose(composition, engine, reason);
  if (plan && a.schedule.empty() && !a.any_schedule && a.interleave == 1) {
    for (ReplicaPlan& replica : plan->pipeline->replicas)
      for (size_t s = 0; s < a.stages.size(); ++s) replica.stages[s].warm_up = a.stages[s].warm_up;
    plan->predicted_step_s = simulate(*plan).step;
  }
  return free ? std::move(plan) : as_arranged(std::move(plan), a, reason);
}

// Gradients travel during its backward pass.
std::unique_ptr<Plan> Arranger::one_program(const Arrangement& a, const std::string& engine,
                                            std::string* reason) const {
  ProgramRequest request;
  request.model = options_.model;
  request.batch = options_.batch;
  request.baselines = false;
  if (groups_.planned()) request.reductions = reduce::reductions_of_all;
  request.alternation = restricted(strategy_of(a.stages[0].inside), cluster_, {});
  if (!a.shares.empty() || a.balanced) request.alternation.ratios = a.shares;
  request.alternation.optimizer = options_.optimizer;
  request.alternation.memory_limit = options_.memory_limit;
  request.alternation.recompute = false;
  request.alternation.limits = options_.limits;
  request.alternation.certify = false;
  ProgramResult result = plan_program(step_->graph(), cluster_, request);
  *reason = result.reason;
  if (!result.feasible) return nullptr;
  auto plan = std::make_unique<Plan>(std::move(result.plan));
  plan->engine = engine;
  return plan;
}

}  // namespace motley::planner

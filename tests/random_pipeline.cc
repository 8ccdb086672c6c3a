#include "random_pipeline.h"

#include <algorithm>
#include <numeric>

#include "capture/capture.h"
#include "cluster/part.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "pipeline/layers.h"
#include "reference/sample.h"
#include "spmd/build.h"
#include "spmd/recompute.h"

namespace motley {

std::vector<ReductionStep> random_reduction(int devices, Rng* rng) {
  std::vector<int> all(devices);
  std::iota(all.begin(), all.end(), 0);
  switch (rng->below(3)) {
    case 0:
      return {{Collective::reduce_scatter, {all}}, {Collective::all_gather, {all}}};
    case 1:
      return {{Collective::reduce, {all}}, {Collective::broadcast, {all}}};
    default:
      break;
  }
  // Through the heads of two parts.
  const int cut = static_cast<int>(1 + rng->below(devices - 1));
  net::Groups parts;
  for (const auto& part : {std::vector<int>(all.begin(), all.begin() + cut),
                           std::vector<int>(all.begin() + cut, all.end())})
    if (part.size() > 1) parts.push_back(part);
  std::vector<ReductionStep> steps = {{Collective::all_reduce, {{0, cut}}}};
  if (parts.empty()) return steps;
  steps.insert(steps.begin(), {Collective::reduce, parts});
  steps.push_back({Collective::broadcast, parts});
  return steps;
}

namespace {

void add_reductions(Plan* plan, bool joint, Rng* rng) {
  const PipelinePlan& pipeline = *plan->pipeline;
  auto add = [&](const std::vector<int>& devices) {
    // Stages that share their devices share the program.
    if (devices.size() > 1 && programs_for(plan->reductions, devices, plan->cluster.size()).empty())
      plan->reductions.push_back(
          {devices, random_reduction(static_cast<int>(devices.size()), rng), 0, 0, 0});
  };
  for (const ReplicaPlan& replica : pipeline.replicas)
    for (const StagePlan& stage : replica.stages) add(stage.devices);
  for (int s = 0; s < pipeline.stages() && joint; ++s) {
    const std::vector<int> all = devices_of(pipeline, s);
    if (all.size() > pipeline.replicas.size() && rng->chance(0.8)) add(all);
  }
  for (int s = 0; s < pipeline.stages(); ++s) {
    const size_t ranks = pipeline.replicas[0].stages[s].devices.size();
    for (size_t i = 0; i < ranks; ++i) {
      std::vector<int> devices;
      for (const ReplicaPlan& replica : pipeline.replicas)
        if (replica.stages[s].devices.size() == ranks)
          devices.push_back(replica.stages[s].devices[i]);
      if (devices.size() == pipeline.replicas.size()) add(devices);
    }
  }
}

void shuffle(std::vector<int>* list, Rng* rng) {
  for (size_t i = list->size(); i-- > 1;)
    std::swap((*list)[i], (*list)[static_cast<size_t>(rng->below(static_cast<int64_t>(i) + 1))]);
}

// One to four stages of layers that are cut anywhere.
void cut_anywhere(PipelinePlan* pipeline, Rng* rng) {
  pipeline::LayerOptions options;
  options.layers = static_cast<int>(2 + rng->below(8));
  const Graph& graph = pipeline->part().graph;
  const pipeline::Layers layers = find_layers(graph, options);
  const int count = static_cast<int>(layers.layers.size());
  const int stages = static_cast<int>(1 + rng->below(std::min(count, 4)));
  std::vector<int> cuts(count - 1);
  std::iota(cuts.begin(), cuts.end(), 1);
  shuffle(&cuts, rng);
  cuts.resize(stages - 1);
  std::sort(cuts.begin(), cuts.end());

  pipeline->stage_of.assign(graph.nodes.size(), 0);
  for (int l = 0; l < count; ++l) {
    const int stage =
        static_cast<int>(std::upper_bound(cuts.begin(), cuts.end(), l) - cuts.begin());
    for (NodeId n : layers.layers[l].forward) pipeline->stage_of[n.index] = stage;
    for (NodeId n : layers.layers[l].backward) pipeline->stage_of[n.index] = stage;
  }
  pipeline->cut(stages, "random pipeline");
}

// Which replicas are copies of others, and what their stages run on.
struct ReplicaShapes {
  bool alike = false;                      // all are copies of the first
  std::vector<int> like;                   // [replica] an earlier one that it is a copy of, or -1
  std::vector<std::vector<int>> sizes;     // [replica][stage] devices
  std::vector<std::vector<int>> group_of;  // [replica][stage]: stages of one share their devices
};

ReplicaShapes random_shapes(const RandomPipeline& what, const PipelinePlan& pipeline, Rng* rng) {
  const int stages = pipeline.stages();
  const bool several = what.reductions || what.zero;
  const int replicas = what.plain       ? 1
                       : what.kinds > 0 ? static_cast<int>(what.kinds + 1 + rng->below(3))
                                        : static_cast<int>((several ? 2 : 1) + rng->below(2));
  ReplicaShapes shapes;
  shapes.alike = what.kinds == 1 || (what.kinds == 0 && rng->chance(0.5));
  std::vector<int>& like = shapes.like;
  like.assign(replicas, -1);
  for (int r = std::max(1, what.kinds); r < replicas; ++r)
    if (shapes.alike || what.kinds > 0)
      like[r] = shapes.alike ? 0 : static_cast<int>(rng->below(what.kinds));
  auto& sizes = shapes.sizes;
  sizes.assign(replicas, std::vector<int>(stages, 1));
  for (int r = 0; r < replicas; ++r)
    for (int s = 0; s < stages; ++s)
      if (!what.plain)
        sizes[r][s] = like[r] >= 0 ? sizes[like[r]][s] : static_cast<int>(1 + rng->below(3));
  shapes.group_of.resize(replicas);
  for (int r = 0; r < replicas; ++r) {
    std::vector<int>& group_of = shapes.group_of[r];
    auto tied_twice = [&] {
      for (const Tied& tied : pipeline.parts().tied)
        for (int a : tied.stages)
          for (int b : tied.stages)
            if (a < b && group_of[a] == group_of[b]) return true;
      return false;
    };
    do {
      group_of.clear();
      for (int s = 0; s < stages; ++s)
        group_of.push_back(what.shared ? static_cast<int>(rng->below(s + 1)) : s);
    } while (tied_twice());
    if (like[r] >= 0) group_of = shapes.group_of[like[r]];
    for (int s = 0; s < stages; ++s) sizes[r][s] = sizes[r][group_of[s]];
  }
  return shapes;
}

void random_ratios(StagePlan* stage, Rng* rng) {
  double total = 0;
  for (size_t i = 0; i < stage->devices.size(); ++i) {
    stage->ratios.push_back(rng->chance(0.1) ? 1e-3 : 0.2 + rng->uniform());
    total += stage->ratios.back();
  }
  for (double& ratio : stage->ratios) ratio /= total;
}

Program random_stage_program(const RandomPipeline& what, const Plan& plan, int s,
                             const StagePlan& stage, Rng* rng) {
  const Theory& theory = plan.pipeline->theory(s);
  const CostModel model(part_of(plan.cluster, stage.devices));
  spmd::ProblemBuilder builder(theory, model, plan.optimizer);
  const Shares shares(stage.ratios);
  builder.price(Fractions(model.cluster(), shares));
  Program program = phase_ordered(theory, random_program(builder, rng));
  if (what.again && rng->chance(0.7)) {
    const std::vector<int> block = spmd::blocks_of(theory.graph());
    std::vector<bool> chosen(1 + *std::max_element(block.begin(), block.end()));
    for (size_t b = 0; b < chosen.size(); ++b) chosen[b] = rng->chance(0.7);
    program = spmd::recompute(theory, program, block, chosen);
  }
  if (what.pieces && rng->chance(0.8)) program = spmd::hold_pieces(theory, program);
  const size_t steps = program.steps.size();
  program.sizes = {static_cast<Bytes>(1 << steps % 18), static_cast<Bytes>(1 << steps % 21)};
  return program;
}

// Warm-up counts of groups of stages that share their devices.
void warm_up_shared(ReplicaPlan* replica, Rng* rng) {
  const auto groups = stage_groups(*replica);
  const auto stages = static_cast<int>(replica->stages.size());
  if (static_cast<int>(groups.size()) == stages) return;
  for (const auto& group : groups) {
    const auto all = static_cast<int64_t>(group.size()) * replica->micro_batches;
    const int warm = static_cast<int>(1 + rng->below(all));
    for (int s : group) replica->stages[s].warm_up = warm;
  }
  // Too few can keep groups waiting for each other; all never do.
  if (ticks_of(*replica).empty())
    for (StagePlan& stage : replica->stages) stage.warm_up = stages * replica->micro_batches;
}

// Stages that have their devices to themselves split their backward passes; copies where the first
// replica's do.
void split_some(const PipelinePlan& pipeline, bool copy, ReplicaPlan* replica, Rng* rng) {
  for (const auto& group : stage_groups(*replica)) {
    StagePlan& stage = replica->stages[group[0]];
    if (group.size() > 1) continue;
    if (!copy && rng->chance(0.5))
      stage.program = weights_later(pipeline.theory(group[0]), stage.program);
    if (has_later(stage.program)) stage.weights_behind = static_cast<int>(rng->below(4));
  }
}

// Any levels and shares. Replicas that meet in every backward pass take the same passes.
void add_divisions(PipelinePlan* pipeline, bool alike, Rng* rng) {
  bool meet = false;
  for (int s = 0; s < pipeline->stages(); ++s) {
    Division division;
    division.level = static_cast<int>(rng->below(alike ? 3 : 2));
    meet = meet || division.level == 2;
    if (rng->chance(0.5))
      for (size_t r = 0; r < pipeline->replicas.size(); ++r)
        division.shares.push_back(r > 0 && rng->chance(0.3) ? 0 : 0.2 + rng->uniform());
    pipeline->zero.push_back(std::move(division));
  }
  const ReplicaPlan& first = pipeline->replicas[0];
  for (ReplicaPlan& replica : pipeline->replicas) {
    if (!meet) break;
    replica.micro_batches = first.micro_batches;
    for (int s = 0; s < pipeline->stages(); ++s)
      replica.stages[s].warm_up = first.stages[s].warm_up,
      replica.stages[s].weights_behind = first.stages[s].weights_behind;
  }
}

}  // namespace

void fit_batch(Plan* plan, DType dtype) {
  PipelinePlan& pipeline = *plan->pipeline;
  MOTLEY_CHECK(pipeline.micro_batches() > 1);
  const int stages = pipeline.stages();
  plan->batch = pipeline.micro_batch * pipeline.micro_batches();
  plan->set_graph(canonicalize(capture(plan->model, plan->batch, dtype).graph));
  pipeline.take_parts(*plan->theory, plan->batch, "random pipeline");
  pipeline.cut(stages, "random pipeline");
}

Plan random_pipeline(const RandomPipeline& what, Rng* rng) {
  Plan plan;
  plan.engine = "pipeline";
  plan.model = what.model;
  plan.optimizer = Optimizer::sgd;
  // Of any number of micro-batches the graph is the same, but for the scale of means.
  plan.batch = 2 * what.micro_batch;
  plan.set_graph(canonicalize(capture(what.model, plan.batch, what.dtype).graph));

  plan.pipeline = std::make_unique<PipelinePlan>();
  PipelinePlan& pipeline = *plan.pipeline;
  pipeline.schedule = "random";
  pipeline.micro_batch = what.micro_batch;
  pipeline.take_parts(*plan.theory, plan.batch, "random pipeline");
  cut_anywhere(&pipeline, rng);
  const int stages = pipeline.stages();
  const ReplicaShapes shapes = random_shapes(what, pipeline, rng);
  const auto replicas = static_cast<int>(shapes.like.size());
  // One device is left out now and then.
  auto devices = static_cast<int>(rng->below(2));
  for (const std::vector<int>& sizes : shapes.sizes)
    devices = std::accumulate(sizes.begin(), sizes.end(), devices);
  std::vector<int> order(devices);
  std::iota(order.begin(), order.end(), 0);
  shuffle(&order, rng);
  plan.cluster =
      flat_cluster({device_catalogue().back()}, {devices}, {LinkKind::switched, 1e9, 1e-5});
  size_t next = 0;
  Rng draw(
      static_cast<uint64_t>(100 * devices + stages));  // of what is split: all else is as without
  for (int r = 0; r < replicas; ++r) {
    const int like = shapes.like[r];
    const std::vector<int>& group_of = shapes.group_of[r];
    ReplicaPlan replica;
    replica.micro_batches = static_cast<int>(1 + rng->below(5));
    if (replicas == 1) replica.micro_batches = std::max(2, replica.micro_batches);  // to be parts
    int warm_up = static_cast<int>(1 + rng->below(2 * stages));
    for (int s = 0; s < stages; ++s) {
      StagePlan stage;
      const auto first = std::find(group_of.begin(), group_of.end(), group_of[s]);
      if (const auto g = static_cast<size_t>(first - group_of.begin()); g < replica.stages.size())
        stage.devices = replica.stages[g].devices;
      else
        for (int i = 0; i < shapes.sizes[r][s]; ++i) stage.devices.push_back(order[next++]);
      std::sort(stage.devices.begin(), stage.devices.end());
      random_ratios(&stage, rng);
      stage.recompute = !what.plain && rng->chance(0.3);
      stage.warm_up = warm_up;
      warm_up = static_cast<int>(1 + rng->below(warm_up));
      if (like >= 0) {
        stage.ratios = pipeline.replicas[like].stages[s].ratios;
        stage.program = pipeline.replicas[like].stages[s].program;
      } else {
        stage.program = random_stage_program(what, plan, s, stage, rng);
      }
      replica.stages.push_back(std::move(stage));
    }
    warm_up_shared(&replica, rng);
    if (what.split) split_some(pipeline, like >= 0, &replica, &draw);
    pipeline.replicas.push_back(std::move(replica));
  }
  if (what.zero) add_divisions(&pipeline, shapes.alike, rng);
  fit_batch(&plan, what.dtype);
  if (what.reductions) add_reductions(&plan, what.joint, rng);
  return plan;
}

}  // namespace motley

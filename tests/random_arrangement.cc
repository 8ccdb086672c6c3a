#include "random_arrangement.h"

#include <algorithm>
#include <numeric>

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"

namespace motley {

using planner::ArrangedStage;
using planner::Arrangement;
using planner::Inside;

namespace {

struct Model {
  const char* name;
  int layers, heads, kv_heads, experts;
};
const Model kModels[] = {
    {"gpt:layers=4,hidden=32,heads=4,seq=8,vocab=64", 4, 4, 4, 0},
    {"gpt:layers=7,hidden=32,heads=2,seq=8,vocab=50", 7, 2, 2, 0},
    {"llama:layers=5,hidden=32,heads=4,kv_heads=2,ffn=48,seq=8,vocab=64", 5, 4, 2, 0},
    {"llama:layers=8,hidden=32,heads=8,kv_heads=8,ffn=96,seq=8,vocab=32", 8, 8, 8, 0},
    {"moe:layers=4,hidden=32,heads=4,kv_heads=4,ffn=32,experts=4,top=2,seq=8,vocab=64", 4, 4, 4,
     4}};
const int64_t kBatches[] = {8, 12, 24};

Cluster random_cluster(Rng* rng) {
  const int machines = static_cast<int>(rng->between(1, 4));
  std::string yaml = "name: random\nlink: {bandwidth: 10 Gbps, latency: 30 us}\ngroups:\n";
  const char* types[] = {"A100-40GB", "V100-16GB", "P100-16GB"};
  for (int m = 0; m < machines; ++m)
    yaml += fmt::format(
        "  - {{name: node{}, link: {{bandwidth: 100 GB/s, latency: 5 us}}, devices: "
        "[{{type: {}, count: {}}}]}}\n",
        m, types[rng->below(3)], 1 << rng->below(3));
  return parse_cluster(yaml, "random");
}

// `sum` in `parts` of at least one each.
std::vector<int> composition(Rng* rng, int sum, int parts) {
  std::vector<int> list(parts, 1);
  for (int left = sum - parts; left > 0; --left) ++list[rng->below(parts)];
  return list;
}

int divisor(Rng* rng, int64_t of, int most) {
  std::vector<int> all;
  for (int d = 1; d <= most && d <= of; ++d)
    if (of % d == 0) all.push_back(d);
  return all[rng->below(static_cast<int64_t>(all.size()))];
}

// Whether stages with these warm-up passes do not wait for one another for ever.
bool ends(const PipelinePlan& pipeline) {
  return std::none_of(pipeline.replicas.begin(), pipeline.replicas.end(),
                      [](const ReplicaPlan& replica) { return ticks_of(replica).empty(); });
}

std::unique_ptr<PipelinePlan> without_programs(const Arrangement& a) {
  auto pipeline = std::make_unique<PipelinePlan>();
  for (int r = 0; r < a.replicas(); ++r) {
    ReplicaPlan replica;
    replica.micro_batches = a.micro_batches[r];
    for (const ArrangedStage& s : a.stages) {
      StagePlan stage;
      stage.devices = s.devices[r];
      stage.warm_up = s.warm_up;
      replica.stages.push_back(std::move(stage));
    }
    pipeline->replicas.push_back(std::move(replica));
  }
  return pipeline;
}

}  // namespace

struct RandomPlans::Case {
  const Model* model;
  int64_t batch;
  Arrangement arrangement;
};

bool RandomPlans::choose(Rng* rng, const Cluster& cluster, Case* c) const {
  const int n = cluster.size();
  Arrangement& a = c->arrangement;
  a = {};
  std::vector<int> devices(n);
  std::iota(devices.begin(), devices.end(), 0);
  const bool by_type = target_.meshes;
  if (by_type)
    std::stable_sort(devices.begin(), devices.end(), [&](int x, int y) {
      return cluster.devices[x].type < cluster.devices[y].type;
    });
  else if (target_.pipelines && rng->chance(0.3))
    for (int i = n - 1; i > 0; --i) std::swap(devices[i], devices[rng->below(i + 1)]);
  if (!target_.pipelines) {
    const int count = divisor(rng, c->batch, 4);
    a.micro_batch = c->batch / count;
    if (a.micro_batch < n) return false;
    a.micro_batches = {count};
    ArrangedStage stage;
    stage.inside = target_.pieces_alone && n > 1 ? Inside::pieces : Inside::batch;
    stage.blocks = c->model->layers;
    stage.recompute = rng->chance(0.3);
    stage.devices = {devices};
    a.stages = {stage};
    std::vector<int> rows = composition(rng, static_cast<int>(a.micro_batch), n);
    const bool equal = std::all_of(rows.begin(), rows.end(), [&](int r) { return r == rows[0]; });
    for (int r : rows)
      if (!equal) a.shares.push_back(static_cast<double>(r) / static_cast<double>(a.micro_batch));
    return true;
  }
  const int replicas = 1 << rng->below(3),
            stages = static_cast<int>(rng->between(1, std::min(4, n)));
  a.interleave = target_.interleaved && stages > 1 && rng->chance(0.2) ? 2 : 1;
  if (stages * a.interleave > c->model->layers || c->batch % replicas != 0) return false;
  int width = 1 << rng->below(3);
  Inside inside = target_.tensors && (stages == 1 || target_.tensors_in_stages) ? Inside::tensors
                                                                                : Inside::batch;
  if (target_.experts && c->model->experts > 0 && rng->chance(0.5)) inside = Inside::experts;
  if (target_.pieces && stages == 1 && replicas == 1 && rng->chance(0.5)) inside = Inside::pieces;
  if (inside == Inside::batch && !by_type) width = 1;
  a.micro_batch = divisor(rng, c->batch / replicas, 4);
  a.micro_batches.assign(replicas, static_cast<int>(c->batch / a.micro_batch / replicas));
  const std::string levels = target_.zero;
  if (replicas > 1) a.zero = levels[rng->below(static_cast<int64_t>(levels.size()))] - '0';
  a.schedule = a.interleave > 1 ? "interleaved" : "1f1b";
  const bool again = rng->chance(0.3);
  const std::vector<int> blocks = composition(rng, c->model->layers, stages * a.interleave);
  size_t next = 0;
  for (int s = 0; s < stages * a.interleave; ++s) {
    ArrangedStage stage;
    if (s >= stages) {
      stage = a.stages[s - stages];
    } else {
      int own = width;
      stage.inside = inside;
      if (by_type && inside != Inside::experts) {
        own = 1 << rng->below(3);
        stage.inside = rng->chance(0.5) ? Inside::tensors : Inside::batch;
      }
      if (own == 1) stage.inside = Inside::batch;
      if (stage.inside == Inside::tensors && c->model->heads % own != 0) return false;
      if (stage.inside == Inside::experts && c->model->experts % own != 0) return false;
      if (stage.inside != Inside::tensors && a.micro_batch % own != 0) return false;
      // Rows are divided by replicas as far as all stages do.
      if (by_type && s == 0 && stage.inside == Inside::batch) own = 1;
      for (int r = 0; r < replicas; ++r) {
        if (next + own > devices.size()) return false;
        std::vector<int> seat(devices.begin() + static_cast<int64_t>(next),
                              devices.begin() + static_cast<int64_t>(next) + own);
        std::sort(seat.begin(), seat.end());
        stage.devices.push_back(std::move(seat));
        next += own;
      }
    }
    stage.blocks = blocks[s];
    stage.recompute = target_.recompute_by_stage ? rng->chance(0.3) : again;
    stage.warm_up = std::min(stages * a.interleave - s, a.micro_batches[0]);
    a.stages.push_back(std::move(stage));
  }
  if (a.interleave > 1 && c->model->name[0] == 'g') return false;  // tied stages share devices
  if (target_.any_warm_up && a.interleave == 1 && stages > 1 && rng->chance(0.5)) {
    int least = 1;
    for (int s = stages; s-- > 0;) {
      least = std::min(a.micro_batches[0],
                       least + (s + 1 < stages ? static_cast<int>(rng->below(3)) : 0));
      a.stages[s].warm_up = least = std::max(least, 1);
      if (a.stages[s].warm_up != std::min(stages - s, a.micro_batches[0])) a.schedule.clear();
    }
  }
  // One pass of all devices alone is one program to readers.
  if (stages == 1 && a.micro_batches[0] == 1 && a.stages[0].tp() == 1 && a.zero == 0) return false;
  const Model& m = *c->model;
  return planner::cannot_say(target_, a, cluster, {}).empty() &&
         (a.stages[0].tp() == 1 || target_.copies_kv || m.kv_heads % a.stages[0].tp() == 0);
}

std::unique_ptr<Plan> RandomPlans::plan(uint64_t seed, int i) {
  Rng rng(mix64(seed) + static_cast<uint64_t>(i));
  for (;;) {
    Case c;
    const Cluster cluster = random_cluster(&rng);
    c.model = &kModels[rng.below(std::size(kModels))];
    c.batch = kBatches[rng.below(std::size(kBatches))];
    if (!choose(&rng, cluster, &c)) continue;
    auto& step = steps_[fmt::format("{} {}", c.model->name, c.batch)];
    if (!step)
      step = std::make_shared<planner::BatchStep>(
          canonicalize(capture(c.model->name, c.batch).graph), c.batch);
    planner::PlanOptions options;
    options.model = c.model->name;
    options.batch = c.batch;
    options.memory_limit = false;
    options.threads = 1;
    planner::Arranger arranger(options, cluster, step);
    std::string reason;
    if (std::unique_ptr<Plan> plan = arranger.make(c.arrangement, target_.name, &reason))
      return plan;
  }
}

std::unique_ptr<Plan> RandomPlans::outline(uint64_t seed, int i, Arrangement* arrangement) {
  Rng rng(mix64(seed) + static_cast<uint64_t>(i));
  Case c;
  auto plan = std::make_unique<Plan>();
  for (;;) {
    plan->cluster = random_cluster(&rng);
    c.model = &kModels[rng.below(std::size(kModels))];
    c.batch = kBatches[rng.below(std::size(kBatches))];
    if (!choose(&rng, plan->cluster, &c)) continue;
    plan->pipeline = without_programs(c.arrangement);
    if (ends(*plan->pipeline)) break;
  }
  auto& step = steps_[fmt::format("{} {}", c.model->name, c.batch)];
  if (!step)
    step = std::make_shared<planner::BatchStep>(canonicalize(capture(c.model->name, c.batch).graph),
                                                c.batch);
  plan->engine = target_.name;
  plan->model = c.model->name;
  plan->batch = c.batch;
  plan->graph = std::make_unique<Graph>(step->graph());
  *arrangement = c.arrangement;
  return plan;
}

}  // namespace motley

// Steps of training by pipeline plans: what they compute, hold in memory and send.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "capture/capture.h"
#include "counted.h"
#include "graph/canonical.h"
#include "pipeline_cases.h"
#include "planner/alternation.h"
#include "random_pipeline.h"
#include "runtime/eager.h"
#include "runtime/pipeline_worker.h"
#include "runtime/trainer.h"
#include "sim/simulate.h"
#include "spmd/recompute.h"
#include "zoo/module.h"

namespace motley {
namespace {

std::vector<double> losses(const Plan& plan, const TrainOptions& options, int steps,
                           std::map<std::string, at::Tensor>* parameters = nullptr,
                           std::vector<double>* norms = nullptr) {
  std::vector<double> list;
  std::mutex mutex;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    Trainer trainer(plan, group, options);
    for (int i = 0; i < steps; ++i) {
      const StepReport report = trainer.step();
      if (group.rank() == 0) list.push_back(report.loss);
      if (group.rank() == 0 && norms) norms->push_back(report.gradient_norm);
    }
    if (!options.checkpoint.empty()) trainer.save(), trainer.conclude();
    if (!parameters) return;
    for (const Parameter& p : plan.graph->parameters) {
      const at::Tensor whole = trainer.parameter(p.name);
      std::lock_guard lock(mutex);
      if (group.rank() == 0) (*parameters)[p.name] = whole;
    }
  });
  return list;
}

// Several optimizer steps, clipped, against one device in double precision; and a checkpoint that
// either goes on from.
TEST(Pipeline, TrainsAsOneDevice) {
  const DefaultDType default_type(DType::f64);
  RandomPipeline what = pipeline_cases()[0];
  what.dtype = DType::f64;
  Rng rng(11);
  for (Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
    Plan plan = random_pipeline(what, &rng);
    while (plan.pipeline->parts().tied.empty() || plan.pipeline->replicas.size() < 2)
      plan = random_pipeline(what, &rng);
    plan.optimizer = optimizer;
    Plan one;  // all replicated: one stage on one device
    one.engine = "pipeline";
    one.model = plan.model;
    one.batch = plan.batch;
    one.optimizer = optimizer;
    one.cluster = flat_cluster({device_catalogue().back()}, {1}, {LinkKind::switched, 1e9, 1e-5});
    one.set_graph(canonicalize(capture(plan.model, plan.batch, what.dtype).graph));
    one.ratios = {{1.}};
    std::vector<Step> steps;
    for (size_t n = 0; n < one.graph->nodes.size(); ++n) {
      const auto& triples = one.theory->triples(NodeId(n));
      for (size_t t = 0; t < triples.size(); ++t)
        if (triples[t].cut == 0 && triples[t].kernel.empty() &&
            std::all_of(triples[t].in.begin(), triples[t].in.end(),
                        [](Placement p) { return p.is_replicated(); }) &&
            std::all_of(triples[t].out.begin(), triples[t].out.end(),
                        [](Placement p) { return p.is_replicated(); })) {
          Step step;
          step.node = NodeId(n);
          step.triple = static_cast<int>(t);
          steps.push_back(step);
          break;
        }
    }
    one.program.steps = std::move(steps);
    ASSERT_TRUE(check(one, false).empty()) << check(one, false)[0];
    const std::string folder =
        (std::filesystem::temp_directory_path() / "motley_pipeline_test").string();
    std::filesystem::remove_all(folder);
    TrainOptions options;
    options.seed = 4;
    options.clip = 0.5;
    std::vector<double> norms, expected_norms;
    std::map<std::string, at::Tensor> parameters, expected_parameters;
    const auto expected = losses(one, options, 4, &expected_parameters, &expected_norms);
    options.checkpoint = folder;
    auto got = losses(plan, options, 2, nullptr, &norms);
    const auto rest = losses(plan, options, 2, &parameters, &norms);
    got.insert(got.end(), rest.begin(), rest.end());
    std::filesystem::remove_all(folder);
    ASSERT_EQ(got.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(got[i], expected[i], 1e-9) << i;
      EXPECT_NEAR(norms[i], expected_norms[i], 1e-9 * expected_norms[i]) << i;
    }
    EXPECT_GT(std::abs(expected[3] - expected[0]), 1e-4);  // steps that do nothing are alike too
    for (const auto& [name, tensor] : expected_parameters)
      EXPECT_LT((parameters.at(name) - tensor).abs().max().item<double>(), 1e-9) << name;
  }
}

// Several clipped steps of both optimizers are those of replicas that keep everything, in double
// precision; either goes on from the other's checkpoint.
TEST(Pipeline, DividedStateTrainsAsWhole) {
  const DefaultDType default_type(DType::f64);
  RandomPipeline what = pipeline_cases()[0];
  what.zero = true;
  what.dtype = DType::f64;
  Rng rng(19);
  std::set<int> levels;
  for (int trial = 0; trial < 4; ++trial) {
    Plan plan = random_pipeline(what, &rng);
    plan.optimizer = trial % 2 == 0 ? Optimizer::adamw : Optimizer::sgd;
    Plan whole = parse_plan(to_json(plan).dump(), "plan");
    whole.pipeline->zero.clear();
    bool any = false;
    for (int s = 0; s < plan.pipeline->stages(); ++s) {
      if (divided_state(*plan.pipeline, s).any()) levels.insert(plan.pipeline->level(s));
      any = any || divided_state(*plan.pipeline, s).any();
    }
    if (!any) continue;
    const std::string folder =
        (std::filesystem::temp_directory_path() / "motley_divided_test").string();
    TrainOptions options;
    options.seed = 4;
    options.clip = 0.5;
    std::vector<double> expected_norms;
    std::map<std::string, at::Tensor> expected_parameters;
    const auto expected = losses(whole, options, 4, &expected_parameters, &expected_norms);
    options.checkpoint = folder;
    for (const bool divided_first : {true, false}) {
      std::filesystem::remove_all(folder);
      std::vector<double> norms;
      std::map<std::string, at::Tensor> parameters;
      auto got = losses(divided_first ? plan : whole, options, 2, nullptr, &norms);
      const auto rest = losses(divided_first ? whole : plan, options, 2, &parameters, &norms);
      got.insert(got.end(), rest.begin(), rest.end());
      ASSERT_EQ(got.size(), 4u);
      for (int i = 0; i < 4; ++i) {
        EXPECT_NEAR(got[i], expected[i], 1e-9 * expected[i]) << i;
        EXPECT_NEAR(norms[i], expected_norms[i], 1e-9 * expected_norms[i]) << i;
      }
      for (const auto& [name, tensor] : expected_parameters)
        EXPECT_LT((parameters.at(name) - tensor).abs().max().item<double>(), 1e-9) << name;
    }
    std::filesystem::remove_all(folder);
  }
  EXPECT_EQ(levels, (std::set<int>{1, 2}));
}

// The most memory that devices hold in a step falls by what the account of the plan says.
TEST(Pipeline, DividedStateIsNotHeld) {
  RandomPipeline what = {"mlp:layers=16,hidden=64,in=64,classes=64", 1024};
  what.plain = true;
  Rng rng(23);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() != 1) plan = random_pipeline(what, &rng);
  plan.optimizer = Optimizer::adamw;
  PipelinePlan& pipeline = *plan.pipeline;
  pipeline.replicas[0].stages[0].devices = {0};
  pipeline.replicas[0].micro_batches = 2;
  pipeline.replicas[0].stages[0].warm_up = 1;  // so that most is held beside the first's sums
  pipeline.replicas.push_back(pipeline.replicas[0]);
  pipeline.replicas[1].stages[0].devices = {1};
  fit_batch(&plan);
  plan.cluster = flat_cluster({device_catalogue().back()}, {2}, {LinkKind::switched, 1e9, 1e-5});
  std::map<int, std::vector<double>> planned, measured;  // [level][device]
  for (int level : {0, 1, 2}) {
    pipeline.zero = {{level, {3, 1}}};
    ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
    planned[level] = pipeline_memory(pipeline, plan.cluster, plan.optimizer);
    for (const HeldBytes& held : held_by_workers(plan)) measured[level].push_back(held.most);
  }
  const auto parameters = static_cast<double>(pipeline.graph(0).parameter_bytes());
  for (int device : {0, 1})
    for (int level : {1, 2}) {
      const double saved = planned[level - 1][device] - planned[level][device];
      EXPECT_GT(saved, 0) << level;
      EXPECT_NEAR(measured[level - 1][device] - measured[level][device], saved, 0.1 * parameters)
          << "device " << device << " level " << level;
    }
}

// A stage of four devices that cut all parameters: where passes gather and scatter, devices hold as
// much less at most as the account of the plan says.
TEST(Pipeline, PiecesAreHeld) {
  RandomPipeline what = {"mlp:layers=16,hidden=128,in=128,classes=128", 1024};
  what.plain = true;
  Rng rng(31);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() != 1) plan = random_pipeline(what, &rng);
  plan.optimizer = Optimizer::adamw;
  plan.cluster = flat_cluster({device_catalogue().back()}, {4}, {LinkKind::switched, 1e9, 1e-5});
  PipelinePlan& pipeline = *plan.pipeline;
  StagePlan& stage = pipeline.replicas[0].stages[0];
  pipeline.replicas[0].micro_batches = 2;
  fit_batch(&plan);
  stage.warm_up = 1;
  stage.devices = {0, 1, 2, 3};
  stage.ratios = {0.25, 0.25, 0.25, 0.25};
  planner::AlternationOptions options;
  options.restriction = spmd::Restriction::zero;
  options.memory_limit = options.certify = options.polish = false;
  options.ratios = stage.ratios;
  const CostModel model(plan.cluster);
  const planner::Alternation found = planner::alternate(pipeline.theory(0), model, options);
  ASSERT_TRUE(found.feasible) << found.reason;
  const Program whole = phase_ordered(pipeline.theory(0), found.program);
  double planned[2] = {}, measured[2] = {};
  for (const bool pieces : {false, true}) {
    stage.program = pieces ? spmd::hold_pieces(pipeline.theory(0), whole) : whole;
    ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
    planned[pieces] = pipeline_memory(pipeline, plan.cluster, plan.optimizer)[0];
    measured[pieces] = held_by_workers(plan)[0].most;
  }
  const auto parameters = static_cast<double>(pipeline.graph(0).parameter_bytes());
  EXPECT_GT(planned[0] - planned[1], parameters);  // gathered copies, and sums of gradients
  EXPECT_NEAR(measured[0] - measured[1], planned[0] - planned[1], 0.1 * parameters);
  EXPECT_LE(measured[1], planned[1]);
  EXPECT_GT(measured[1], planned[1] - 0.6 * parameters);
}

// One step of a worker, from the parameters that the model begins with.
void step_once(const Plan& plan, Worker* worker) {
  const auto all = materialize(parse_model(plan.model), 1);
  const TensorMap values = parameters_of(*all);
  for (size_t i = 0; i < worker->parameters().size(); ++i)
    worker->set_parameter(
        i, worker->parameter_piece(
               i, values.at(plan.graph->parameters[worker->parameters()[i]].name).detach()));
  worker->step(0, input_pieces(plan, *worker, random_inputs(*all, plan.batch, 2)));
}

// Counts what is sent from one side to another.
class CountedGroup final : public Communicator {
 public:
  CountedGroup(Communicator& group, const std::vector<int>& sides, std::atomic<int64_t>* bytes)
      : group_(group), sides_(sides), bytes_(*bytes) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    group_.all_reduce(tensor, reduction);
  }
  void all_gather(std::vector<at::Tensor>& pieces) override { group_.all_gather(pieces); }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return group_.reduce_scatter(pieces);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    group_.all_to_all(send, receive);
  }
  void barrier() override { group_.barrier(); }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    if (sides_[to] != sides_[rank()]) bytes_ += static_cast<int64_t>(tensor.nbytes());
    return group_.send(tensor, to, tag);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    return group_.receive(tensor, from, tag);
  }

 private:
  Communicator& group_;
  const std::vector<int>& sides_;  // [rank]
  std::atomic<int64_t>& bytes_;
};

// Stages send each other what the simulator says; the gradient of a parameter that two of them hold
// crosses once in each direction, however many devices need all of it.
TEST(Pipeline, SendsWhatIsSimulated) {
  Rng rng(23);
  int tied = 0, wide = 0, unequal = 0;
  for (int trial = 0; trial < 80; ++trial) {
    const Plan plan = random_pipeline(pipeline_cases()[trial % 2], &rng);
    const PipelinePlan& pipeline = *plan.pipeline;
    if (pipeline.replicas.size() > 1 || pipeline.stages() < 2) continue;
    const std::vector<StagePlan>& stages = pipeline.replicas[0].stages;
    double expected = 0;
    for (const Exchange& e : simulate(plan).exchanges) {
      expected += e.count * e.bytes;
      if (!e.what.starts_with("gradients of tied")) continue;
      const Tied& t = pipeline.parts().tied[0];
      const size_t a = stages[t.stages[0]].devices.size(), b = stages[t.stages[1]].devices.size();
      ASSERT_EQ(t.stages.size(), 2U);
      const auto bytes = static_cast<double>(
          plan.graph->spec(plan.graph->parameters[t.parameter].gradient).bytes());
      EXPECT_NEAR(e.bytes, 2 * bytes, 1e-6 * bytes);
      ++tied;
      unequal += a != b;
      for (int s : t.stages) {
        const auto& held = pipeline.parts().parameter_of[s];
        const size_t i = std::find(held.begin(), held.end(), t.parameter) - held.begin();
        const ValueId v = pipeline.graph(s).parameters[i].value;
        wide += stages[s].devices.size() > 1 &&
                !stored_placements(pipeline.theory(s), stages[s].program)[v.index].is_shard();
      }
    }
    std::vector<int> sides(plan.cluster.size(), -1);
    for (int s = 0; s < pipeline.stages(); ++s)
      for (int d : stages[s].devices) sides[d] = s;
    std::atomic<int64_t> sent = 0;
    run_thread_group(plan.cluster.size(), [&](Communicator& group) {
      at::NoGradGuard no_grad;
      CountedGroup counted(group, sides, &sent);
      const auto worker = make_worker(plan, counted, {});
      step_once(plan, worker.get());
    });
    EXPECT_NEAR(static_cast<double>(sent), expected, 1e-6 * expected) << "trial " << trial;
  }
  // The draw covers what is special.
  EXPECT_GT(tied, 5);
  EXPECT_GT(unequal, 3);
  EXPECT_GT(wide, 3);
}

// A stage holds as many micro-batches as its warm-up count says, no more.
TEST(Pipeline, HoldsAsManyMicroBatchesAsPlanned) {
  Rng rng(21);
  for (int trial = 0; trial < 12; ++trial) {
    RandomPipeline what = pipeline_cases()[3];
    what.shared = trial % 2 == 1;
    const Plan plan = random_pipeline(what, &rng);
    run_thread_group(plan.cluster.size(), [&](Communicator& group) {
      at::NoGradGuard no_grad;
      const auto worker = make_worker(plan, group, {});
      const std::vector<Seat> seats = plan.pipeline->seats(group.rank());
      step_once(plan, worker.get());
      if (seats.empty()) return;
      const ReplicaPlan& replica = plan.pipeline->replicas[seats[0].replica];
      if (seats.size() == 1) {
        const int stage = seats[0].stage;
        EXPECT_EQ(
            worker->most_in_flight(),
            std::min(replica.micro_batches, in_flight(replica, stage) + waiting(replica, stage)));
        return;
      }
      // All forward passes of the group's warm-up hold something, and never more is held.
      EXPECT_EQ(worker->most_in_flight(),
                std::min(replica.stages[seats[0].stage].warm_up,
                         static_cast<int>(seats.size()) * replica.micro_batches));
    });
  }
}

}  // namespace
}  // namespace motley

// Every kind of plan over a backend that delays, reorders and refuses: equal to the same plan on a
// backend that does everything at once.
#include "fake_backend.h"

#include <gtest/gtest.h>

#include "cluster/cluster.h"
#include "core/error.h"
#include "interpret/dispatch.h"
#include "interpret/torch_version.h"
#include "planner/planner.h"
#include "random_pipeline.h"
#include "reference/sample.h"
#include "runtime/trainer.h"
#include "runtime/worker.h"
#include "shard/duplex.h"
#include "two_speeds.h"
#include "zoo/module.h"

#if !MOTLEY_TORCH_AT_LEAST(2, 0)
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

// What libtorch 1 does not know of tensors without memory.
TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("embedding_dense_backward",
               [](const at::Tensor& dy, const at::Tensor&, int64_t rows, int64_t, bool) {
                 return at::empty({rows, dy.size(-1)}, dy.options());
               });
  library.impl("logical_not.out", [](const at::Tensor& x, at::Tensor& out) -> at::Tensor& {
    out.resize_(x.sizes());
    return out;
  });
  library.impl("where.self", [](const at::Tensor& which, const at::Tensor& a, const at::Tensor& b) {
    const auto shape = at::infer_size(which.sizes(), at::infer_size(a.sizes(), b.sizes()));
    return at::empty(shape, a.options());
  });
  library.impl("native_layer_norm_backward",
               [](const at::Tensor& dy, const at::Tensor& x, at::IntArrayRef, const at::Tensor&,
                  const at::Tensor&, const c10::optional<at::Tensor>& weight,
                  const c10::optional<at::Tensor>& bias, std::array<bool, 3>) {
                 return std::make_tuple(at::empty_like(dy),
                                        weight ? at::empty_like(*weight) : at::empty_like(x),
                                        bias ? at::empty_like(*bias) : at::empty_like(x));
               });
  library.impl("relu", [](const at::Tensor& x) { return at::empty_like(x); });
  library.impl("index_select", [](const at::Tensor& x, int64_t dim, const at::Tensor& index) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape.at(static_cast<size_t>(dim)) = index.numel();
    return at::empty(shape, x.options());
  });
  library.impl("logical_and.out",
               [](const at::Tensor& a, const at::Tensor& b, at::Tensor& out) -> at::Tensor& {
                 out.resize_(at::infer_size(a.sizes(), b.sizes()));
                 return out;
               });
  library.impl(
      "native_batch_norm",
      [](const at::Tensor& x, const c10::optional<at::Tensor>&, const c10::optional<at::Tensor>&,
         const c10::optional<at::Tensor>&, const c10::optional<at::Tensor>&, bool, double, double) {
        const at::Tensor channels = at::empty({x.size(1)}, x.options());
        return std::make_tuple(at::empty_like(x), channels, at::empty_like(channels));
      });
}
#endif

namespace motley {
namespace {

std::vector<FakeOptions> kinds() {
  std::vector<FakeOptions> list;
  FakeOptions tagged, plain, refusing, nccl;
  tagged.name = "gloo";  // it is known to have tags
  tagged.tags = true;
  plain.name = "unheard-of";
  refusing.name = "poor";
  refusing.uneven_all_to_all = false;
  nccl.name = "nccl";  // no tags; adds 16-bit numbers as they are
  list = {tagged, plain, refusing, nccl};
  refusing.all_to_all = false;
  list.push_back(refusing);
  for (size_t i = 0; i < list.size(); ++i) list[i].seed = i;
  return list;
}

using Run = std::function<void(const std::function<void(Communicator&)>&)>;

// Losses of three steps and the parameters behind them.
struct Trained {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;
};

Trained train_over(const Plan& plan, const Run& run) {
  Trained trained;
  run([&](Communicator& group) {
    Trainer trainer(plan, group, {});
    for (int i = 0; i < 3; ++i) {
      const StepReport report = trainer.step();
      if (group.rank() == 0) trained.losses.push_back(report.loss);
    }
    for (const Parameter& p : plan.graph->parameters) {
      const at::Tensor whole = trainer.parameter(p.name);
      if (group.rank() == 0) trained.parameters.push_back(whole);
    }
  });
  return trained;
}

void expect_equal(const Plan& plan, const FakeOptions& options, const std::string& what) {
  const int size = plan.cluster.size();
  const Trained expected = train_over(plan, [&](const auto&body) { run_thread_group(size, body); }),
                got =
                    train_over(plan, [&](const auto&body) { run_fake_group(size, options, body); });
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i)
    EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-9 * std::abs(expected.losses[i]) + 1e-12)
        << what << " over " << options.name << ", step " << i;
  for (size_t i = 0; i < got.parameters.size(); ++i) {
    const double most = expected.parameters[i].abs().max().item<double>();
    const double error = (got.parameters[i] - expected.parameters[i]).abs().max().item<double>();
    EXPECT_LE(error, 1e-9 * most + 1e-12)
        << what << " over " << options.name << ": " << plan.graph->parameters[i].name;
  }
}

// A random program with random shares, in parts if more than one.
Plan one_program(const std::string& model, int64_t batch, int parts, Rng* rng) {
  Plan plan;
  plan.engine = parts > 1 ? "duplex" : "spmd";
  plan.model = model;
  plan.batch = batch;
  plan.cluster = cluster_of(1, 2, 1e9);
  plan.set_graph(canonicalize(capture(model, batch, DType::f64).graph));
  plan.ratios = {{0.2 + rng->uniform(), rng->uniform(), rng->uniform()}};
  const double sum = plan.ratios[0][0] + plan.ratios[0][1] + plan.ratios[0][2];
  for (double& r : plan.ratios[0]) r /= sum;
  const CostModel cost(plan.cluster);
  std::optional<Theory> part;
  if (parts > 1) {
    plan.duplex = duplex_of(*plan.theory, even_parts(batch, parts), "test");
    part.emplace(plan.duplex->first->graph);
  }
  const Theory& theory = part ? *part : *plan.theory;
  spmd::ProblemBuilder builder(theory, cost, plan.optimizer);
  builder.price(Fractions(plan.cluster, Shares(plan.ratios)));
  plan.program = spmd::random_program(builder, rng);
  if (!part) return plan;
  StageDivision division;
  division.begin = {0};
  for (int i = 1; i < static_cast<int>(plan.program.steps.size()); ++i)
    if (rng->chance(0.3)) division.begin.push_back(i);
  division.reduce = static_cast<Reduce>(rng->below(3));
  division.ahead = static_cast<int>(rng->below(4));
  for (size_t s = 0; s < division.begin.size() * static_cast<size_t>(parts); ++s)
    division.slack.push_back(1e4 * rng->uniform());
  plan.program = mirrored(*plan.duplex, *part, plan.program, division, "test");
  return plan;
}

TEST(FakeBackend, ProgramsInOneAndInParts) {
  const DefaultDType default_type(DType::f64);
  Rng rng(1);
  for (const FakeOptions& options : kinds())
    for (const char* model :
         {"mlp:layers=2,hidden=16,in=12,classes=5", "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=24",
          "bert-moe:layers=1,hidden=16,heads=2,seq=6,vocab=24,experts=4,every=1"})
      for (const int parts : {1, 2}) {
        const Plan plan = one_program(model, 8, parts, &rng);
        ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
        expect_equal(plan, options, fmt::format("{} in {} parts", model, parts));
      }
}

TEST(FakeBackend, PipelinesOfEveryKind) {
  const DefaultDType default_type(DType::f64);
  Rng rng(2);
  for (const FakeOptions& options : kinds())
    for (int kind = 0; kind < 7; ++kind) {
      if (options.name == "poor" && kind % 3 != 0)
        continue;  // as the one before it but for all-to-all
      RandomPipeline what = {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11", 2};
      if (kind % 2 == 1) what = {"mlp:layers=4,hidden=12,in=10,classes=7", 3};
      what.dtype = DType::f64;
      what.reductions = kind == 1 || kind == 2;
      what.joint = kind == 2;
      what.shared = kind == 3;
      what.zero = kind == 4;
      what.pieces = kind == 5 || kind == 6;
      const Plan plan = random_pipeline(what, &rng);
      ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
      expect_equal(plan, options, fmt::format("pipeline {}", kind));
    }
}

TEST(FakeBackend, WithoutMessagesProgramsRunAndPipelinesAreRefused) {
  const DefaultDType default_type(DType::f64);
  Rng rng(3);
  FakeOptions options;
  options.name = "unheard-of";
  options.messages = false;
  for (const bool all_to_all : {true, false}) {
    options.all_to_all = all_to_all;
    expect_equal(one_program("mlp:layers=2,hidden=16,in=12,classes=5", 8, 1, &rng), options, "mlp");
  }
  RandomPipeline what = {"mlp:layers=4,hidden=12,in=10,classes=7", 3};
  what.dtype = DType::f64;
  Plan plan = random_pipeline(what, &rng);
  try {
    train_over(plan, [&](const auto& body) { run_fake_group(plan.cluster.size(), options, body); });
    FAIL() << "a pipeline ran without messages";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("has no messages between two workers"), std::string::npos)
        << e.what();
  }
}

// A group whose collectives make nothing, of tensors that hold nothing.
class OnNothing final : public Communicator {
 public:
  OnNothing(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  at::Device device() const override { return at::kMeta; }
  void all_reduce(at::Tensor& tensor, Reduction /*reduction*/) override { see(tensor); }
  void all_gather(std::vector<at::Tensor>& pieces) override {
    for (const at::Tensor& piece : pieces) see(piece);
  }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return at::empty_like(pieces[static_cast<size_t>(rank_)]);
  }
  void all_gather_grouped(std::vector<at::Tensor>& pieces) override { all_gather(pieces); }
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return reduce_scatter(pieces);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    for (const at::Tensor& piece : send) see(piece);
    for (const at::Tensor& piece : receive) see(piece);
  }
  void barrier() override {}
  std::unique_ptr<Message> send(const at::Tensor& tensor, int /*to*/, int /*tag*/) override {
    see(tensor);
    return std::make_unique<Nothing>();
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int /*from*/, int /*tag*/) override {
    see(tensor);
    return std::make_unique<Nothing>();
  }

 private:
  struct Nothing final : Message {
    void wait() override {}
  };
  static void see(const at::Tensor& tensor) { EXPECT_TRUE(tensor.is_meta()); }
  int rank_, size_;
};

// Every rank's step on tensors without memory: whoever asks the device for a number, or copies one to
// the CPU, throws. So no step waits for its device before it is over, and it can be recorded as a CUDA
// graph.
void expect_no_question(const Plan& plan, const std::string& what, int* steps) {
  for (int rank = 0; rank < plan.cluster.size(); ++rank) {
    OnNothing group(rank, plan.cluster.size());
    ExecutorOptions options;
    options.device = at::kMeta;
    const auto worker = make_worker(plan, group, options);
    const auto empty = [&](ValueId v) {
      const TensorSpec& spec = plan.graph->spec(v);
      return at::empty(spec.shape, at::TensorOptions(at::kMeta).dtype(to_torch(spec.dtype)));
    };
    for (size_t i = 0; i < worker->parameters().size(); ++i)
      worker->set_parameter(
          i,
          worker->parameter_piece(i, empty(plan.graph->parameters[worker->parameters()[i]].value))
              .clone());
    for (size_t i = 0; i < worker->buffers().size(); ++i)
      worker->set_buffer(
          i,
          worker->buffer_piece(i, empty(plan.graph->buffers[worker->buffers()[i]].value)).clone());
    for (int step = 0; step < 2; ++step) {
      std::vector<at::Tensor> inputs;
      for (size_t i = 0; i < plan.graph->inputs.size(); ++i)
        inputs.push_back(worker->input_piece(i, empty(plan.graph->inputs[i].value)));
      Worker::Result result;
      try {
        result = worker->step(step, inputs);
      } catch (const c10::Error& e) {
        ADD_FAILURE() << what << ", rank " << rank << ": " << e.what_without_backtrace();
        return;
      }
      ++*steps;
      EXPECT_TRUE(result.loss.is_meta()) << what;
      EXPECT_ANY_THROW(result.loss.item<double>());  // this test can fail
      for (const at::Tensor& gradient : result.gradients)
        if (gradient.defined()) {
          EXPECT_TRUE(gradient.is_meta()) << what;
        }
    }
  }
}

TEST(FakeBackend, AStepAsksItsDeviceNothing) {
#if MOTLEY_TORCH_AT_LEAST(2, 0)
  GTEST_SKIP() << "torch 2 has many of its Meta kernels in Python";
#endif
  const DefaultDType default_type(DType::f64);
  Rng rng(4);
  int steps = 0;
  for (const char* model :
       {"mlp:layers=2,hidden=16,in=12,classes=5", "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=24",
        "bert-moe:layers=1,hidden=16,heads=2,seq=6,vocab=24,experts=4,every=1"})
    for (const int parts : {1, 2})
      for (int trial = 0; trial < 4; ++trial)
        expect_no_question(one_program(model, 8, parts, &rng),
                           fmt::format("{} in {} parts", model, parts), &steps);
  for (int kind = 0; kind < 7; ++kind) {
    RandomPipeline what = {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11", 2};
    if (kind % 2 == 1) what = {"mlp:layers=4,hidden=12,in=10,classes=7", 3};
    what.dtype = DType::f64;
    what.reductions = kind == 1 || kind == 2;
    what.joint = kind == 2;
    what.shared = kind == 3;
    what.zero = kind == 4;
    what.pieces = kind == 5 || kind == 6;
    expect_no_question(random_pipeline(what, &rng), fmt::format("pipeline {}", kind), &steps);
  }
  EXPECT_GT(steps, 40);
}

// The tests above can fail: whoever reads before it waits, reads NaN.
TEST(FakeBackend, WhoDoesNotWaitReadsNonsense) {
  run_fake_group(2, kinds()[0], [](Communicator& group) {
    at::Tensor here = at::ones({4}, at::kDouble);
    if (group.rank() == 0) {
      const auto coming = group.receive(here, 1, 1);
      EXPECT_TRUE(here.isnan().all().item<bool>());
      group.barrier();
      coming->wait();
      EXPECT_EQ(here.sum().item<double>(), 8);
    } else {
      group.barrier();
      at::Tensor twos = 2 * here;
      group.send(twos, 0, 1)->wait();
    }
  });
}

}  // namespace
}  // namespace motley

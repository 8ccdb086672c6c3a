#include "soundness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "capture/capture.h"
#include "core/rng.h"
#include "graph/canonical.h"
#include "graph/ops/builder.h"
#include "reference/sample.h"
#include "runtime/eager.h"
#include "runtime/executor.h"
#include "runtime/random.h"
#include "spmd/build.h"
#include "zoo/zoo.h"

namespace motley {
namespace {

TEST(Soundness, RandomProgramsEqualOneDevice) {
  const auto& cases = soundness_cases();
  for (const ModelInfo& model : zoo())
    EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [&](const SoundnessCase& c) {
      return c.model.starts_with(model.name + ":");
    })) << model.name;
  SoundnessReport report = run_soundness(cases, {2, 3, 4, 5}, 6, 7, false);
  EXPECT_EQ(report.rejected_by_checker, 0) << report.worst_case;
  EXPECT_LT(report.worst, 1e-9) << report.worst_case;
  EXPECT_EQ(report.programs, static_cast<int>(cases.size()) * 4 * 6);
  EXPECT_GT(report.recomputing, static_cast<int>(cases.size()) * 4);
}

// Wrong rules, each planted in place of the right entry; running random programs must catch every
// one.
struct Planted {
  const char* op;
  const char* model;
  Signature (*signature)(const Graph&, const Node&);
};

Signature right(const Graph& graph, const Node& node) {
  return find_op(node.op)->signature(graph, node);
}

const std::vector<Planted>& planted() {
  static const std::vector<Planted> list = {
      // A nonlinear op said to be linear.
      {"aten::gelu", "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=7",
       [](const Graph& g, const Node& n) {
         Signature s = right(g, n);
         s.linear.push_back({0});
         return s;
       }},
      // A sum over one partial operand only: the other is added once per device.
      {"aten::add.Tensor", "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=7",
       [](const Graph& g, const Node& n) {
         Signature s = right(g, n);
         if (s.operands.size() == 2) s.linear.push_back({0});
         return s;
       }},
      // The bias of a product is added by every device.
      {"aten::addmm", "mlp:layers=2,hidden=12,in=10,classes=7",
       [](const Graph& g, const Node& n) {
         Signature s = right(g, n);
         s.added.clear();
         return s;
       }},
      // A softmax over a cut dimension without its collectives.
      {"aten::_softmax", "vit:layers=1,hidden=8,heads=2,image=8,patch=4,classes=5",
       [](const Graph& g, const Node& n) {
         Signature s = right(g, n);
         for (Label& l : s.labels) l.kind = LabelKind::parallel;
         return s;
       }},
      // Gradients of layer norm's weights said to be whole where each device sees a part of the
      // batch.
      {"aten::native_layer_norm_backward", "bert:layers=1,hidden=8,heads=2,seq=4,vocab=7",
       [](const Graph& g, const Node& n) {
         Signature s = right(g, n);
         for (Label& l : s.labels)
           if (l.kind == LabelKind::reduction) l.kind = LabelKind::parallel, l.ignored_by = 6;
         return s;
       }},
      // A convolution whose cut input channels are not summed.
      {"aten::convolution", "convnet:width=4,image=8,classes=5",
       [](const Graph& g, const Node& n) {
         Signature s = right(g, n);
         for (Label& l : s.labels)
           if (l.kind == LabelKind::reduction) l.kind = LabelKind::parallel, l.ignored_by = 1;
         return s;
       }},
  };
  return list;
}

const Planted* now = nullptr;

const OpDef* wrong_lookup(const OpName& name) {
  if (!(name == now->op)) return find_op(name);
  static OpDef wrong{""};
  wrong = *find_op(name);
  wrong.signature = now->signature;
  return &wrong;
}

// Programs of graphs that are cut into segments at random, with random ratios for each.
TEST(Soundness, RandomSegmentsEqualOneDevice) {
  const SoundnessReport report =
      run_soundness(soundness_cases(), {2, 3, 4}, 4, 11, false, find_op, 4);
  EXPECT_EQ(report.programs, static_cast<int>(soundness_cases().size()) * 3 * 4);
  EXPECT_EQ(report.rejected_by_checker, 0) << report.worst_case;
  EXPECT_LT(report.worst, 1e-9) << report.worst_case;
  EXPECT_GT(report.exchanges, 500);
  EXPECT_GT(report.recomputing, 25);
}

TEST(Soundness, CatchesEveryPlantedWrongRule) {
  for (const Planted& p : planted()) {
    now = &p;
    SoundnessReport report;
    for (uint64_t seed = 0; seed < 100 && report.worst < 1e-6; ++seed)
      report = run_soundness({{p.model, 6}}, {2, 3}, 20, seed, false, wrong_lookup);
    EXPECT_GT(report.worst, 1e-6) << p.op;
  }
}

// Mutants of sound programs. Every mutant the checker lets pass must still equal one device.
TEST(Checker, LetsNoWrongMutantPass) {
  int refused = 0, passed = 0;
  for (const char* model :
       {"mlp:layers=2,hidden=12,in=10,classes=7", "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=7",
        "convnet:width=4,image=8,classes=5"}) {
    const int64_t batch = 6;
    auto module = materialize(parse_model(model), 1, DType::f64);
    Graph graph = canonicalize(capture(model, batch, DType::f64).graph);
    Theory theory(graph);
    Feeds feeds{parameters_of(*module), buffers_of(*module),
                random_inputs(*module, batch, 2, DType::f64)};
    for (auto* map : {&feeds.parameters, &feeds.buffers})
      for (auto& [name, tensor] : *map) tensor = tensor.detach().clone();
    InterpretOptions options;
    options.kernels = random_kernels(1, 0);
    StepResult expected = interpret(graph, feeds, options);
    CostModel cost(flat_cluster({device_catalogue().back()}, {3}, {LinkKind::switched, 1e9, 1e-5}));
    Shares shares({0.5, 0.3, 0.2});
    spmd::ProblemBuilder builder(theory, cost, Optimizer::sgd);
    builder.price(Fractions(cost.cluster(), shares));
    Rng rng(5);
    for (int trial = 0; trial < 600; ++trial) {
      std::vector<Step> steps = spmd::random_program(builder, &rng).steps;
      const auto any = [&] {
        return static_cast<size_t>(rng.below(static_cast<int64_t>(steps.size())));
      };
      const size_t at = any();
      Step& step = steps[at];
      const int kind = static_cast<int>(rng.below(5));
      if (kind == 0) {
        steps.erase(steps.begin() + static_cast<int64_t>(at));
      } else if (kind == 1) {
        std::swap(step, steps[any()]);
      } else if (kind == 2 && step.is_compute()) {
        step.triple =
            static_cast<int>(rng.below(static_cast<int64_t>(theory.triples(step.node).size())));
      } else if (kind == 3 && !step.is_compute()) {
        auto placements = theory.placements(step.value);
        (rng.chance(0.5) ? step.from : step.to) =
            placements[static_cast<size_t>(rng.below(static_cast<int64_t>(placements.size())))];
        step.kind = Theory::conversion(step.from, step.to).value_or(step.kind);
      } else if (kind == 4 && !step.is_compute()) {
        step.kind = static_cast<Collective>(rng.below(kCollectives));
      } else {
        continue;
      }
      const Program program{std::move(steps)};
      auto right_when_run = [&] {
        try {
          return program_error(theory, program, shares, feeds, expected, 1) < 1e-9;
        } catch (const std::exception&) {
          return false;
        }
      };
      if (check(theory, program).empty()) {
        ++passed;
        EXPECT_TRUE(right_when_run()) << model << " trial " << trial;
      } else {
        ++refused;
      }
    }
  }
  std::printf("%d mutants refused, %d passed and equal one device\n", refused, passed);
  EXPECT_GE(refused, 1000);
  EXPECT_GT(passed, 50);
}

}  // namespace
}  // namespace motley

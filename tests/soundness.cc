#include "soundness.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>

#include "capture/capture.h"
#include "core/error.h"
#include "core/rng.h"
#include "graph/canonical.h"
#include "graph/segment.h"
#include "reference/sample.h"
#include "runtime/eager.h"
#include "runtime/executor.h"
#include "runtime/random.h"
#include "spmd/build.h"
#include "spmd/recompute.h"

namespace motley {

namespace {

double error_of(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type()) return 1e300;
  if (expected.numel() == 0) return 0;
  const at::Tensor a = got.to(at::kDouble), b = expected.to(at::kDouble);
  const at::Tensor finite = b.isfinite();
  // Infinite numbers and those that are none are at the same places and the same.
  const at::Tensor same = a.eq(b).logical_or_(a.isnan().logical_and_(b.isnan()));
  if (!same.logical_or(finite).all().item<bool>()) return 1e300;
  const at::Tensor size = b.abs().masked_fill_(finite.logical_not(), 0);
  const at::Tensor error = (a - b).abs_().masked_fill_(same, 0);
  const double worst = error.max().item<double>();
  return worst == worst ? worst / std::max(size.max().item<double>(), 1e-6) : 1e300;
}

}  // namespace

std::string first_wrong_value(const Theory& theory, const Program& program, const Shares& shares,
                              const Feeds& feeds, uint64_t seed) {
  const Graph& graph = theory.graph();
  std::map<ValueId, at::Tensor> expected;
  InterpretOptions interpret_options;
  interpret_options.kernels = random_kernels(seed, 0);
  interpret_options.observe = [&](ValueId v, const at::Tensor& t) { expected[v] = t.clone(); };
  interpret(graph, feeds, interpret_options);
  std::mutex mutex;
  std::string found;
  run_thread_group(shares.devices(), [&](Communicator& communicator) {
    ExecutorOptions options;
    options.seed = seed;
    Executor* running = nullptr;
    options.observe = [&](ValueId v, Placement p, const at::Tensor& local) {
      double error = error_of(running->gather(v, p, local), expected.at(v));
      std::lock_guard lock(mutex);
      if (error < 1e-9 || !found.empty()) return;
      const Value& value = graph.value(v);
      found = fmt::format("%{} as {} is off by {:.1e}; made by node {} {}", v.index, to_string(p),
                          error, value.producer.index, graph.node(value.producer).op);
      for (const Step& s : program.steps)
        if (s.node == value.producer || s.value == v) found += "\n    " + to_text(theory, s);
    };
    Executor executor(theory, program, shares, communicator, options);
    running = &executor;
    auto feed = [&](ValueId v, const at::Tensor& whole) {
      executor.set(v, executor.piece(v, executor.stored(v), whole));
    };
    for (const Parameter& p : graph.parameters) feed(p.value, feeds.parameters.at(p.name));
    for (const Buffer& b : graph.buffers) feed(b.value, feeds.buffers.at(b.name));
    for (const Input& i : graph.inputs) feed(i.value, feeds.inputs.at(i.name));
    executor.step(0);
  });
  return found;
}

double program_error(const Theory& theory, const Program& program, const Shares& shares,
                     const Feeds& feeds, const StepResult& expected, uint64_t seed) {
  const Graph& graph = theory.graph();
  std::mutex mutex;
  double worst = 0;
  run_thread_group(shares.devices(), [&](Communicator& communicator) {
    ExecutorOptions options;
    options.seed = seed;
    Executor executor(theory, program, shares, communicator, options);
    auto feed = [&](ValueId v, const at::Tensor& whole) {
      executor.set(v, executor.piece(v, executor.stored(v), whole));
    };
    for (const Parameter& p : graph.parameters) feed(p.value, feeds.parameters.at(p.name));
    for (const Buffer& b : graph.buffers) feed(b.value, feeds.buffers.at(b.name));
    for (const Input& i : graph.inputs) feed(i.value, feeds.inputs.at(i.name));
    Executor::Result result = executor.step(0);
    double mine = error_of(result.loss, expected.loss);
    for (size_t p = 0; p < graph.parameters.size(); ++p) {
      const Parameter& parameter = graph.parameters[p];
      if (!parameter.gradient.valid()) continue;
      at::Tensor whole = executor.gather(parameter.gradient, executor.stored(parameter.value),
                                         result.gradients[p]);
      mine = std::max(mine, error_of(whole, expected.gradients.at(parameter.name)));
    }
    for (const Buffer& b : graph.buffers) {
      if (!b.update.valid()) continue;
      at::Tensor whole = executor.gather(b.value, executor.stored(b.value), executor.get(b.value));
      mine = std::max(mine, error_of(whole, expected.updates.at(b.name)));
    }
    std::lock_guard lock(mutex);
    worst = std::max(worst, mine);
  });
  return worst;
}

const std::vector<SoundnessCase>& soundness_cases() {
  static const std::vector<SoundnessCase> cases = {
      {"bert:layers=1,hidden=16,heads=4,seq=6,vocab=11", 6},
      {"bert-moe:layers=2,hidden=8,heads=2,seq=6,vocab=11,experts=5,every=2", 6},
      {"convnet:width=4,image=8,classes=5", 6},
      {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11,dropout=0.2", 6},
      {"llama:layers=1,hidden=8,heads=2,kv_heads=1,ffn=6,seq=6,vocab=11", 5},
      {"mlp:layers=2,hidden=12,in=10,classes=7", 9},
      {"moe:layers=1,hidden=8,heads=2,kv_heads=1,ffn=6,experts=3,seq=6,vocab=11", 5},
      {"resnet50:width=2,image=32,classes=5", 6},
      {"transgan:layers=1,hidden=128,heads=2,side=2,latent=8", 3},
      {"vgg19:width=2,image=32,classes=5", 4},
      {"vit:layers=1,hidden=16,heads=4,image=8,patch=4,classes=5", 6},
      {"vit-moe:layers=2,hidden=8,heads=2,image=8,patch=4,classes=5,experts=5", 6},
  };
  return cases;
}

std::vector<std::vector<double>> soundness_ratios(int devices, uint64_t seed) {
  Rng rng(seed);
  std::vector<std::vector<double>> list;
  list.push_back(std::vector<double>(devices, 1.0 / devices));
  std::vector<double> random(devices), extreme(devices, 1.0);
  for (double& r : random) r = 0.05 + rng.uniform();
  extreme[rng.below(devices)] = 1e-3;
  list.push_back(random);
  list.push_back(extreme);
  for (auto& ratios : list) {
    double total = 0;
    for (double r : ratios) total += r;
    for (double& r : ratios) r /= total;
  }
  return list;
}

std::vector<int> random_segments(const Graph& graph, int segments, Rng* rng) {
  std::vector<int> segment(graph.nodes.size(), -1);
  int now = static_cast<int>(rng->below(segments));
  const double change = 0.02 + 0.2 * rng->uniform();
  for (size_t n = 0; n < segment.size(); ++n) {
    if (is_source(graph.nodes[n]) || graph.nodes[n].phase == Phase::backward) continue;
    if (rng->chance(change)) now = static_cast<int>(rng->below(segments));
    segment[n] = now;
  }
  segment = with_backward(graph, std::move(segment));
  if (rng->chance(0.5))
    for (int& s : segment)
      if (rng->chance(0.05)) s = static_cast<int>(rng->below(segments));
  return segment;
}

Ratios random_ratios(int segments, int devices, Rng* rng) {
  Ratios all;
  for (int s = 0; s < segments; ++s) {
    if (s > 0 && rng->chance(0.2)) {
      all.push_back(all[static_cast<size_t>(rng->below(s))]);
      continue;
    }
    std::vector<double> ratios(devices);
    double total = 0;
    while (total == 0) {
      for (double& r : ratios) r = rng->chance(0.25) ? 0 : 0.05 + rng->uniform();
      total = std::accumulate(ratios.begin(), ratios.end(), 0.0);
    }
    for (double& r : ratios) r /= total;
    all.push_back(std::move(ratios));
  }
  return all;
}

SoundnessReport run_soundness(const std::vector<SoundnessCase>& cases,
                              const std::vector<int>& devices, int programs, uint64_t seed,
                              bool verbose, Theory::Lookup lookup, int segments) {
  SoundnessReport report;
  for (const SoundnessCase& c : cases) {
    ModelSpec spec = parse_model(c.model);
    auto module = materialize(spec, seed, DType::f64);
    const Graph whole = canonicalize(capture(c.model, c.batch, DType::f64).graph);
    Feeds feeds{parameters_of(*module), buffers_of(*module),
                random_inputs(*module, c.batch, seed + 1, DType::f64)};
    for (auto* map : {&feeds.parameters, &feeds.buffers})
      for (auto& [name, tensor] : *map) tensor = tensor.detach().clone();
    InterpretOptions interpret_options;
    interpret_options.kernels = random_kernels(seed, 0);
    for (int n : devices) {
      DeviceType type = device_catalogue().back();
      CostModel model(flat_cluster({type}, {n}, {LinkKind::switched, 1e9, 1e-5}));
      auto ratios = soundness_ratios(n, seed + static_cast<uint64_t>(n));
      Rng rng(mix64(seed ^ static_cast<uint64_t>(n)) ^ std::hash<std::string>()(c.model));
      double worst_here = 0;
      std::unique_ptr<Graph> cut;
      std::unique_ptr<Theory> theory_of_cut;
      std::unique_ptr<spmd::ProblemBuilder> builder_of_cut;
      StepResult expected;
      for (int i = 0; i < programs; ++i) {
        if (i == 0 || segments > 1) {
          builder_of_cut.reset();
          theory_of_cut.reset();
          cut = std::make_unique<Graph>(
              segments > 1 ? with_segments(whole, random_segments(whole, segments, &rng)) : whole);
          theory_of_cut = std::make_unique<Theory>(*cut, lookup);
          builder_of_cut =
              std::make_unique<spmd::ProblemBuilder>(*theory_of_cut, model, Optimizer::sgd);
          expected = interpret(*cut, feeds, interpret_options);
        }
        const Graph& graph = *cut;
        const Theory& theory = *theory_of_cut;
        spmd::ProblemBuilder& builder = *builder_of_cut;
        Shares shares(theory.segments() > 1 ? random_ratios(theory.segments(), n, &rng)
                                            : Ratios{ratios[i % ratios.size()]});
        builder.price(Fractions(model.cluster(), shares));
        Program program = spmd::random_program(builder, &rng);
        // Every second one computes some of its blocks again in the backward pass.
        if (i % 2 == 1) {
          const std::vector<int> block = spmd::blocks_of(graph);
          std::vector<bool> chosen(1 + *std::max_element(block.begin(), block.end()));
          for (size_t b = 0; b < chosen.size(); ++b) chosen[b] = rng.chance(0.7);
          const size_t before = program.steps.size();
          program = spmd::recompute(theory, program, block, chosen);
          report.recomputing += program.steps.size() > before;
        }
        for (const Step& step : program.steps)
          if (step.is_compute() && is_boundary(graph.node(step.node)))
            report.exchanges +=
                !moves_nothing(theory, step.node, theory.triples(step.node)[step.triple], shares);
        auto problems = verify(graph);
        if (problems.empty()) problems = check(theory, program);
        if (!problems.empty()) {
          ++report.rejected_by_checker;
          report.worst_case = c.model + ": " + problems[0];
        }
        double error = 0;
        try {
          error = program_error(theory, program, shares, feeds, expected, seed);
        } catch (const std::exception& e) {
          error = 1e301;
          report.worst_case = e.what();
        }
        ++report.programs;
        worst_here = std::max(worst_here, error);
        if (error > report.worst) {
          report.worst = error;
          if (error < 1e301)
            report.worst_case = fmt::format("{} on {} devices, program {}, ratios {}", c.model, n,
                                            i, fmt::join(shares.ratios(), " "));
          if (error > 1e-9 && error < 1e300)
            report.worst_case +=
                "\n  first wrong: " + first_wrong_value(theory, program, shares, feeds, seed);
        }
      }
      if (verbose)
        std::printf("%-60s %d devices  %d programs  worst error %.2e\n", c.model.c_str(), n,
                    programs, worst_here),
            std::fflush(stdout);
    }
  }
  return report;
}

}  // namespace motley

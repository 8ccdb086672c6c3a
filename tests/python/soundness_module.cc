// A test's extension: random programs of a captured graph on threads against one device. See
// soundness.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "core/rng.h"
#include "graph/op.h"
#include "reference/sample.h"
#include "runtime/executor.h"
#include "runtime/random.h"
#include "soundness.h"
#include "spmd/build.h"

namespace motley {
namespace {

// The worst error of `programs` random programs for each number of devices, and what was wrong
// with it; tensors are in double precision.
std::pair<double, std::string> worst_error(const std::string& text, TensorMap parameters,
                                           TensorMap buffers, TensorMap inputs,
                                           const std::vector<int>& devices, int programs,
                                           uint64_t seed) {
  const Graph graph = parse_graph(text, "captured");
  const Theory theory(graph);
  const Feeds feeds{std::move(parameters), std::move(buffers), std::move(inputs)};
  InterpretOptions interpretation;
  interpretation.kernels = random_kernels(seed, 0);
  const StepResult expected = interpret(graph, feeds, interpretation);
  double worst = 0;
  std::string what;
  for (int n : devices) {
    const CostModel model(
        flat_cluster({device_catalogue().back()}, {n}, {LinkKind::switched, 1e9, 1e-5}));
    const auto ratios = soundness_ratios(n, seed + static_cast<uint64_t>(n));
    Rng rng(mix64(seed ^ static_cast<uint64_t>(n)));
    spmd::ProblemBuilder builder(theory, model, Optimizer::sgd);
    for (int i = 0; i < programs; ++i) {
      const Shares shares(ratios[static_cast<size_t>(i) % ratios.size()]);
      builder.price(Fractions(model.cluster(), shares));
      const Program program = spmd::random_program(builder, &rng);
      for (const std::string& problem : check(theory, program)) return {1e301, problem};
      const double error = program_error(theory, program, shares, feeds, expected, seed);
      if (error <= worst) continue;
      worst = error;
      if (error > 1e-9) what = first_wrong_value(theory, program, shares, feeds, seed);
    }
  }
  return {worst, what};
}

// The sets of operands in which the node that updates the buffers of a graph is linear.
std::vector<std::vector<int>> linear_sets(const std::string& text) {
  const Graph graph = parse_graph(text, "call");
  const Node* call = nullptr;
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) call = &graph.node(graph.value(b.update).producer);
  const OpDef* op = call == nullptr ? nullptr : find_op(call->op);
  if (op == nullptr || op->signature == nullptr) return {};
  return op->signature(graph, *call).linear;
}

}  // namespace

PYBIND11_MODULE(soundness_module, m) {
  m.def("linear_sets", &linear_sets);
  m.def("worst_error", &worst_error, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace motley

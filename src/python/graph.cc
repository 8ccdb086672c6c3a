// Capture, graphs and the op table.
#include <torch/csrc/Exceptions.h>

#include "graph/canonical.h"
#include "graph/file.h"
#include "graph/op.h"
#include "graph/segment.h"
#include "python/bindings.h"
#include "torch/capture.h"
#include "torch/executor.h"
#include "torch/interpret.h"

namespace motley::python {

namespace {

using Named = MetaStep::Named;
using Replaced = std::vector<std::pair<size_t, at::Tensor>>;

// `loss()` returns the loss and a list of (position of a buffer, its new tensor).
CapturedGraph capture_step(const std::string& name, Named parameters, Named buffers, Named inputs,
                           int64_t batch, const py::function& loss) {
  MetaStep step{name, std::move(parameters), std::move(buffers), std::move(inputs), {}};
  step.loss = [&](Replaced* replaced) {
    py::gil_scoped_acquire locked;
    const auto result = loss().cast<std::pair<at::Tensor, Replaced>>();
    *replaced = result.second;
    return result.first;
  };
  CapturedGraph graph;
  try {
    // The autograd engine takes the lock by itself where it meets Python.
    py::gil_scoped_release unlocked;
    Capture captured = capture(step);
    graph.graph = canonicalize(captured.graph);
    graph.seconds = captured.seconds;
    graph.unknown_ops = std::move(captured.unknown_ops);
  } catch (python_error& e) {  // of a backward pass written in Python
    e.restore();
    throw py::error_already_set();
  }
  graph.batch = batch;
  return graph;
}

py::dict spec_dict(const Graph& graph, ValueId value) {
  const TensorSpec& spec = graph.spec(value);
  return py::dict(py::arg("dtype") = to_string(spec.dtype), py::arg("shape") = spec.shape);
}

template <typename List>
py::dict specs(const Graph& graph, const List& list) {
  py::dict all;
  for (const auto& item : list) all[py::str(item.name)] = spec_dict(graph, item.value);
  return all;
}

std::string text_without_model(const Graph& graph) {
  Graph copy = graph;
  copy.model.clear();
  return to_text(copy);
}

}  // namespace

void bind_graph(py::module_& m) {
  py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "Graph", py::dynamic_attr())
      .def(
          "__str__", [](const CapturedGraph& g) { return to_text(g.graph); }, "The graph as text.")
      .def("text_without_model", [](const CapturedGraph& g) { return text_without_model(g.graph); })
      .def(
          "save",
          [](const CapturedGraph& g, const std::string& path, const CapturedGraph* other) {
            save_graph(
                {path, g.batch, g.graph, other ? other->batch : 0, other ? other->graph : Graph()});
          },
          py::arg("path"), py::arg("other") = nullptr,
          "`other`: the step at another batch, which gives all others.")
      .def_property_readonly("model", [](const CapturedGraph& g) { return g.graph.model; })
      .def_readonly("batch", &CapturedGraph::batch)
      .def_readonly("capture_s", &CapturedGraph::seconds)
      .def_readonly("unknown_ops", &CapturedGraph::unknown_ops)
      .def_property_readonly("nodes", [](const CapturedGraph& g) { return g.graph.nodes.size(); })
      .def_property_readonly("ops",
                             [](const CapturedGraph& g) {
                               std::vector<std::string> ops;
                               for (const Node& node : g.graph.nodes)
                                 if (!is_source(node)) ops.push_back(node.op);
                               return ops;
                             })
      .def_property_readonly(
          "parameters", [](const CapturedGraph& g) { return specs(g.graph, g.graph.parameters); })
      .def_property_readonly("buffers",
                             [](const CapturedGraph& g) { return specs(g.graph, g.graph.buffers); })
      .def_property_readonly("inputs",
                             [](const CapturedGraph& g) { return specs(g.graph, g.graph.inputs); });

  m.def("capture", &capture_step);
  m.def("load_graph", [](const std::string& path, int64_t batch) {
    CapturedGraph graph;
    graph.graph = load_graph_file(path, batch);
    graph.batch = batch;
    return graph;
  });
  m.def(
      "capture_zoo",
      [](const std::string& model, int64_t batch) {
        CapturedGraph graph;
        Capture captured = capture(model, batch);
        graph.graph = canonicalize(captured.graph);
        graph.seconds = captured.seconds;
        graph.batch = batch;
        return graph;
      },
      py::call_guard<py::gil_scoped_release>());

  // One step on one device, random ops as distributed runs draw them.
  m.def(
      "interpret",
      [](const CapturedGraph& g, TensorMap parameters, TensorMap buffers, TensorMap inputs,
         uint64_t seed, int64_t step) {
        InterpretOptions options;
        options.kernels = random_kernels(seed, step);
        const StepResult result = interpret(
            g.graph, {std::move(parameters), std::move(buffers), std::move(inputs)}, options);
        return std::make_tuple(result.loss, result.gradients, result.updates);
      },
      py::call_guard<py::gil_scoped_release>());

  m.def("refused_ops", &refused_ops);
  m.def("op_table", [] {
    py::list list;
    for (const OpDef* op : all_ops()) {
      if (std::string_view(op->name) == kBoundary) continue;
      list.append(py::dict(py::arg("name") = op->name, py::arg("cut") = op->signature != nullptr,
                           py::arg("rules") = op->extra != nullptr, py::arg("alias") = op->alias,
                           py::arg("random") = op->random));
    }
    return list;
  });
}

}  // namespace motley::python

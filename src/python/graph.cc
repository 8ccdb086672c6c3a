// Capture, graphs and the op table.
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <optional>

#include "capture/autocast.h"
#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "graph/file.h"
#include "graph/op.h"
#include "graph/precision.h"
#include "graph/segment.h"
#include "interpret/interpret.h"
#include "interpret/operators.h"
#include "python/bindings.h"
#include "runtime/executor.h"
#include "runtime/random.h"

namespace motley::python {

namespace {

using Named = MetaStep::Named;
using Replaced = std::vector<std::pair<size_t, at::Tensor>>;

// `loss()` returns the loss, a list of (position of a buffer, its new tensor), and a function of
// (position of a parameter, its gradient) that gives the gradient to take instead.
CapturedGraph capture_step(const std::string& name, Named parameters, Named buffers, Named inputs,
                           int64_t batch, const py::function& loss, Named owners) {
  MetaStep step{
      name, std::move(parameters), std::move(buffers), std::move(inputs), std::move(owners), {}, {},
      {}};
  step.forget_error = [] {
    py::gil_scoped_acquire locked;
    PyErr_Clear();
  };
  py::function hooked;
  step.loss = [&](Replaced* replaced) {
    py::gil_scoped_acquire locked;
    const auto result = loss().cast<std::tuple<at::Tensor, Replaced, py::function>>();
    *replaced = std::get<1>(result);
    hooked = std::get<2>(result);
    return std::get<0>(result);
  };
  step.gradient = [&](size_t parameter, const at::Tensor& gradient) {
    py::gil_scoped_acquire locked;
    return hooked(parameter, gradient).cast<at::Tensor>();
  };
  CapturedGraph graph;
  torch::PyWarningHandler warnings;  // libtorch's become Python's
  try {
    // The autograd engine takes the lock by itself where it meets Python.
    py::gil_scoped_release unlocked;
    Capture captured = capture(step);
    graph.graph = canonicalize(captured.graph);
    graph.seconds = captured.seconds;
    graph.unknown_ops = whole_ops(graph.graph);
    graph.outside = std::move(captured.outside);
    graph.prepared = std::move(captured.prepared);
  } catch (python_error& e) {  // of a backward pass written in Python
    e.restore();
    throw py::error_already_set();
  }
  graph.batch = batch;
  return graph;
}

// [(parameter, operator, arguments after the tensor)]
py::list prepared(const CapturedGraph& captured) {
  py::list all;
  for (const Preparation& one : captured.prepared) {
    py::list args;
    for (const Arg& arg : one.args) {
      if (const auto* number = std::get_if<double>(&arg))
        args.append(*number);
      else if (const auto* whole = std::get_if<int64_t>(&arg))
        args.append(*whole);
      else if (std::holds_alternative<std::monostate>(arg))
        args.append(py::none());
      else
        throw InternalError("a preparation with another argument");
    }
    all.append(py::make_tuple(one.parameter, one.op, args));
  }
  return all;
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

// Names of the buffers whose values the step uses.
std::vector<std::string> read_buffers(const CapturedGraph& captured) {
  const Graph& graph = captured.graph;
  std::vector<bool> read(graph.values.size());
  auto use = [&](ValueId v) {
    if (v.valid()) read[static_cast<size_t>(v.index)] = true;
  };
  for (const Node& node : graph.nodes)
    for (ValueId v : graph.inputs_of(node)) use(v);
  use(graph.loss);
  for (const Buffer& b : graph.buffers) use(b.update);
  std::vector<std::string> names;
  for (const Buffer& b : graph.buffers)
    if (read[static_cast<size_t>(b.value.index)]) names.push_back(b.name);
  return names;
}

// [(node, operator, shape, type)] of what draws random numbers.
py::list random_nodes(const CapturedGraph& captured) {
  const Graph& graph = captured.graph;
  py::list list;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
    if (op == nullptr || !op->random) continue;
    const TensorSpec& spec = graph.spec(node.outputs[0]);
    list.append(py::make_tuple(n, node.op.str(), spec.shape, to_string(spec.dtype)));
  }
  return list;
}

// The numbers that node `number` of a plan's graph draws in a step, as an operator with these
// arguments and this shape.
at::Tensor draw(const std::string& op, const std::vector<double>& numbers,
                const std::vector<int64_t>& shape, const std::string& type, uint64_t seed,
                int64_t step, int number) {
  TensorSpec spec;
  spec.shape = shape;
  if (!parse_dtype(type, &spec.dtype)) throw user_error("python", "there is no type '{}'", type);
  Graph graph;
  const NodeId id = graph.add(op, {numbers.begin(), numbers.end()}, {spec});
  return random_kernel(seed, step, {number})(graph, graph.node(id), {})[0];
}

// Bytes of what the forward pass of one device makes and keeps for its backward pass, of its
// largest tensor and of the gradients.
int64_t step_bytes(const CapturedGraph& captured) {
  const Graph& graph = captured.graph;
  int64_t bytes = graph.parameter_bytes(), largest = 0;
  for (ValueId value : saved_activations(graph)) bytes += graph.spec(value).bytes();
  for (const Value& value : graph.values) largest = std::max(largest, value.spec.bytes());
  return bytes + 3 * largest;
}

std::string text_without_model(const Graph& graph) {
  Graph copy = graph;
  copy.model.clear();
  return to_text(copy);
}

// A graph computed in `precision` (a DType's name) with parameters in their own type.
CapturedGraph in_precision(const CapturedGraph& from, const std::string& precision) {
  DType type;
  MOTLEY_CHECK(parse_dtype(precision, &type));
  check_precision(from.graph, type);
  CapturedGraph made = from;
  made.graph = with_precision(from.graph, type);
  return made;
}

}  // namespace

void bind_graph(py::module_& m) {
  py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "Graph", py::dynamic_attr())
      .def(
          "__str__", [](const CapturedGraph& g) { return to_text(g.graph); }, "The graph as text.")
      .def("in_precision", &in_precision)
      .def("text_without_model", [](const CapturedGraph& g) { return text_without_model(g.graph); })
      .def(
          "save",
          [](const CapturedGraph& g, const std::string& path, const py::object& at) {
            GraphFile file{path, g.batch, g.graph, 0, {}};
            std::string alone;
            if (!at.is_none())
              alone = file.add_other([&](int64_t samples) -> std::optional<Graph> {
                try {
                  return at(samples).cast<const CapturedGraph&>().graph;
                } catch (const py::error_already_set&) {
                  return std::nullopt;
                }
              });
            save_graph(file);
            return std::pair(alone, file.differs);
          },
          py::arg("path"), py::arg("at") = py::none(),
          "`at(samples)`: the step at another batch. Returns why the file has this batch alone, "
          "and "
          "whether captures at others are there and differ otherwise than in a straight line.")
      .def_property_readonly("model", [](const CapturedGraph& g) { return g.graph.model; })
      .def_readonly("batch", &CapturedGraph::batch)
      .def_readonly("capture_s", &CapturedGraph::seconds)
      .def_readonly("unknown_ops", &CapturedGraph::unknown_ops)
      .def_property_readonly("read_buffers", &read_buffers)
      .def_property_readonly("updated_buffers",
                             [](const CapturedGraph& g) {
                               std::vector<std::string> names;
                               for (const Buffer& b : g.graph.buffers)
                                 if (b.update.valid()) names.push_back(b.name);
                               return names;
                             })
      .def_property_readonly("prepared", &prepared,
                             "What the step does to parameters before it reads them.")
      .def_property_readonly("random_nodes", &random_nodes)
      .def_property_readonly("step_bytes", &step_bytes)
      .def_readonly("outside", &CapturedGraph::outside,
                    "Tensors from outside the step whose numbers are constants of the graph.")
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

  m.def("capture", &capture_step, py::arg("name"), py::arg("parameters"), py::arg("buffers"),
        py::arg("inputs"), py::arg("batch"), py::arg("loss"), py::arg("owners") = Named());
  m.def("draw", &draw);
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

  register_operators();  // also for what Python calls by itself
  m.def("forget_casts", &forget_casts, "Where a region of torch.autocast ends.");
  m.def("between_operators", &between_operators);
  m.def("is_fixed", &is_fixed);
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

#include "interpret/interpret.h"

#include <ATen/ops/tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "core/error.h"
#include "graph/op.h"
#include "graph/segment.h"
#include "interpret/dispatch.h"

namespace motley {
namespace {

at::Tensor fed(const TensorMap& map, const char* kind, const Node& node, const TensorSpec& spec,
               at::Device device) {
  const std::string& name = std::get<std::string>(node.args[0]);
  const auto it = map.find(name);
  if (it == map.end()) throw user_error("interpret", "{} '{}' has no tensor", kind, name);
  if (spec_of(it->second) != spec)
    throw user_error("interpret", "{} '{}' is {}; the graph has {}", kind, name,
                     to_string(spec_of(it->second)), to_string(spec));
  return it->second.detach().to(device);
}

at::Tensor constant(const Node& node, const TensorSpec& spec, at::Device device) {
  const auto& data = std::get<std::vector<double>>(node.args[0]);
  return at::tensor(data, at::kDouble)
      .to(at::TensorOptions(device).dtype(to_torch(spec.dtype)))
      .reshape(spec.shape);
}

}  // namespace

StepResult interpret(const Graph& graph, const Feeds& feeds, const InterpretOptions& options) {
  // The node after which a value is no longer needed; results of the step stay.
  std::vector<size_t> last(graph.values.size(), 0);
  for (size_t n = 0; n < graph.nodes.size(); n++)
    for (ValueId v : graph.inputs_of(graph.nodes[n])) last[static_cast<size_t>(v.index)] = n;
  auto keep = [&](ValueId v) {
    if (v.valid()) last[static_cast<size_t>(v.index)] = graph.nodes.size();
  };
  keep(graph.loss);
  for (ValueId v : graph.outputs) keep(v);
  for (const Parameter& p : graph.parameters) keep(p.gradient);
  for (const Buffer& b : graph.buffers) keep(b.update);

  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<at::Tensor> values(graph.values.size());
  auto value = [&](ValueId v) -> at::Tensor { return values[static_cast<size_t>(v.index)]; };
  for (size_t n = 0; n < graph.nodes.size(); n++) {
    const Node& node = graph.nodes[n];
    const ValueList operands = graph.inputs_of(node);
    std::vector<at::Tensor> results;
    if (is_source(node)) {
      const TensorSpec& spec = graph.spec(node.outputs[0]);
      if (node.op == "motley::parameter")
        results = {fed(feeds.parameters, "parameter", node, spec, options.device)};
      else if (node.op == "motley::buffer")
        results = {fed(feeds.buffers, "buffer", node, spec, options.device)};
      else if (node.op == "motley::input")
        results = {fed(feeds.inputs, "input", node, spec, options.device)};
      else
        results = {constant(node, spec, options.device)};
    } else if (is_boundary(node)) {
      results = {value(operands[0])};
    } else if (auto kernel = options.kernels.find(node.op); kernel != options.kernels.end()) {
      std::vector<at::Tensor> tensors;
      for (ValueId v : operands) tensors.push_back(value(v));
      results = kernel->second(graph, node, tensors);
    } else {
      results = call(find_operator(node.op), node.args, value, options.device);
    }
    MOTLEY_CHECK(results.size() == node.outputs.size(), "{} has {} results, not {}", node.op,
                 results.size(), node.outputs.size());
    for (size_t o = 0; o < results.size(); o++) {
      const ValueId v = node.outputs[o];
      if (!v.valid()) continue;
      if (results[o].sizes() != graph.spec(v).shape && !is_scratch(node.op, o))
        throw user_error("run",
                         "result {} of {} (node {}) is [{}], not [{}] as when it was captured: its "
                         "shape depends on the numbers of the batch, which a graph cannot follow; "
                         "compute it before the step and pass it as an input",
                         o, node.op, n, fmt::join(results[o].sizes().vec(), ","),
                         fmt::join(graph.spec(v).shape, ","));
      if (options.observe) options.observe(v, results[o]);
      values[static_cast<size_t>(v.index)] = std::move(results[o]);
    }
    for (ValueId v : operands)
      if (last[static_cast<size_t>(v.index)] == n) values[static_cast<size_t>(v.index)].reset();
  }

  StepResult result;
  if (graph.loss.valid()) result.loss = value(graph.loss);
  for (ValueId v : graph.outputs) result.outputs.push_back(value(v));
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) result.gradients[p.name] = value(p.gradient);
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) result.updates[b.name] = value(b.update);
  return result;
}

}  // namespace motley

#include "runtime/derivative.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/error.h"
#include "graph/op.h"
#include "graph/segment.h"
#include "interpret/dispatch.h"
#include "runtime/executor.h"
#include "runtime/random.h"

namespace motley {

namespace {

constexpr double kMostFlops = 2e10, kMostElements = 1e8;
constexpr double kClose = 1e-7;  // relative, in double precision

// Numbers that no kind of draw gives the graph.
struct Unrunnable {
  std::string why;
};

std::string first_line(const std::exception& e) {
  const std::string text = e.what();
  return text.substr(0, text.find('\n'));
}

bool is_random(const Node& node) {
  const OpDef* op = find_op(node.op);
  return op != nullptr && op->random;
}

bool is_large(const Graph& graph) {
  double flops = 0, elements = 0;
  for (const Node& node : graph.nodes)
    if (const OpDef* op = find_op(node.op); op && op->flops) flops += op->flops(graph, node);
  for (const Value& value : graph.values) elements += static_cast<double>(value.spec.numel());
  return flops > kMostFlops || elements > kMostElements;
}

// What of the graph's structure cannot be of a captured step.
std::vector<std::string> misplaced(const Graph& graph) {
  std::vector<std::string> problems;
  const auto phase_of = [&](ValueId v) { return graph.node(graph.value(v).producer).phase; };
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (graph.nodes[n].phase != Phase::forward) continue;
    for (ValueId v : graph.inputs_of(graph.nodes[n]))
      if (phase_of(v) == Phase::backward)
        problems.push_back(
            fmt::format("node {} ({}) of the forward pass reads %{}, which the backward pass makes",
                        n, graph.nodes[n].op, v.index));
  }
  if (graph.loss.valid() && phase_of(graph.loss) == Phase::backward)
    problems.push_back(fmt::format("the loss %{} is made by the backward pass", graph.loss.index));
  for (const Parameter& p : graph.parameters)
    if (p.frozen && p.gradient.valid())
      problems.push_back(fmt::format("parameter {} is frozen and has a gradient", p.name));
  Graph alive = graph;
  remove_dead(&alive);
  if (alive.nodes.size() < graph.nodes.size()) {
    size_t n = 0;  // the first that is gone
    const auto same = [&](const Node& a, const Node& b) {
      return a.op == b.op && a.outputs.size() == b.outputs.size() && a.phase == b.phase;
    };
    while (n < alive.nodes.size() && same(alive.nodes[n], graph.nodes[n])) ++n;
    problems.push_back(
        fmt::format("{} nodes lead to no loss, gradient or update, one about node {} ({}): a role "
                    "was moved or taken away",
                    graph.nodes.size() - alive.nodes.size(), n, graph.nodes[n].op));
  }
  return problems;
}

// The forward nodes under autograd, with `draws` in the place of what random nodes make. Returns
// the gradients of the trained parameters, undefined where the loss does not depend on one.
TensorMap differentiated(const Graph& graph, const Feeds& feeds,
                         const std::map<int, at::Tensor>& draws, at::Tensor* loss) {
  at::AutoGradMode follow(true);
  std::vector<at::Tensor> values(graph.values.size());
  const auto value = [&](ValueId v) { return values[static_cast<size_t>(v.index)]; };
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;
  for (const Parameter& p : graph.parameters) {
    at::Tensor leaf = feeds.parameters.at(p.name).detach().clone();
    values[static_cast<size_t>(p.value.index)] = leaf;
    if (p.frozen || !leaf.is_floating_point()) continue;
    leaves.push_back(leaf.requires_grad_());
    names.push_back(p.name);
  }
  for (const Buffer& b : graph.buffers)
    values[static_cast<size_t>(b.value.index)] = feeds.buffers.at(b.name);
  for (const Input& i : graph.inputs)
    values[static_cast<size_t>(i.value.index)] = feeds.inputs.at(i.name);
  for (const Node& node : graph.nodes) {
    if (node.phase != Phase::forward) continue;
    if (is_source(node) && node.op != "motley::constant") continue;
    std::vector<at::Tensor> results;
    if (node.op == "motley::constant") {
      const TensorSpec& spec = graph.spec(node.outputs[0]);
      results = {at::tensor(std::get<std::vector<double>>(node.args[0]), at::kDouble)
                     .to(to_torch(spec.dtype))
                     .reshape(spec.shape)};
    } else if (is_boundary(node)) {
      results = {value(graph.inputs_of(node)[0])};
    } else if (is_random(node)) {
      for (ValueId v : node.outputs)
        results.push_back(v.valid() ? draws.at(v.index) : at::Tensor());
    } else {
      results = call_differentiably(find_operator(node.op), node.args, value);
    }
    for (size_t o = 0; o < node.outputs.size() && o < results.size(); ++o)
      if (node.outputs[o].valid()) values[static_cast<size_t>(node.outputs[o].index)] = results[o];
  }
  *loss = value(graph.loss);
  TensorMap result;
  for (const std::string& name : names) result[name] = at::Tensor();
  if (leaves.empty() || !loss->requires_grad()) return result;
  const std::vector<at::Tensor> gradients =
      torch::autograd::grad({*loss}, leaves, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t i = 0; i < names.size(); ++i) result[names[i]] = gradients[i];
  return result;
}

bool finite(const at::Tensor& t) { return !t.defined() || at::isfinite(t).all().item<bool>(); }

std::vector<std::string> compare(const Graph& graph, const StepResult& step,
                                 const TensorMap& right) {
  double largest = 0;
  for (const auto& [name, gradient] : right)
    if (gradient.defined() && gradient.numel() > 0)
      largest = std::max(largest, gradient.abs().max().item<double>());
  std::vector<std::string> problems;
  for (const Parameter& p : graph.parameters) {
    const auto it = right.find(p.name);
    if (it == right.end() || p.custom) continue;
    const at::Tensor zero = at::zeros(graph.spec(p.value).shape, at::kDouble);
    const at::Tensor wanted = it->second.defined() ? it->second : zero;
    const auto mine = step.gradients.find(p.name);
    const at::Tensor got = mine == step.gradients.end() ? zero : mine->second;
    if (got.numel() == 0) continue;
    const double scale = std::max(wanted.abs().max().item<double>(), 1e-6 * largest);
    const double off = (got - wanted).abs().max().item<double>();
    if (off <= kClose * scale) continue;
    problems.push_back(
        mine == step.gradients.end()
            ? fmt::format("the loss depends on parameter {}, which has no gradient and is not "
                          "frozen",
                          p.name)
            : fmt::format(
                  "the gradient of {} is not the derivative of the loss: it is off by {:.1e} "
                  "of its largest element",
                  p.name, scale > 0 ? off / scale : off));
  }
  return problems;
}

// Throws Unrunnable if numbers of this kind do not say anything.
std::vector<std::string> compared(const Graph& graph, uint64_t seed, int kind) {
  const Feeds feeds = drawn(graph, seed, kind);
  std::map<int, at::Tensor> draws;
  InterpretOptions options;
  options.kernels = random_kernels(seed, 0);
  options.observe = [&](ValueId v, const at::Tensor& t) {
    const Node& node = graph.node(graph.value(v).producer);
    if (node.phase == Phase::forward && is_random(node)) draws[v.index] = t;
  };
  StepResult step;
  TensorMap right;
  at::Tensor loss;
  try {
    step = interpret(graph, feeds, options);
    right = differentiated(graph, feeds, draws, &loss);
  } catch (const std::exception& e) {
    throw Unrunnable{first_line(e)};
  }
  bool good = finite(step.loss) && finite(loss);
  for (const auto& [name, gradient] : right) good = good && finite(gradient);
  if (!good) throw Unrunnable{"the loss or a gradient is not finite"};
  return compare(graph, step, right);
}

}  // namespace

Graph in_type(const Graph& graph, DType type) {
  Graph out = graph;
  for (Value& value : out.values)
    if (is_float(value.spec.dtype)) value.spec.dtype = type;
  for (Node& node : out.nodes)
    for (Arg& arg : node.args)
      if (auto* of = std::get_if<DType>(&arg); of && is_float(*of)) *of = type;
  return out;
}

Feeds drawn(const Graph& graph, uint64_t seed) {
  std::string why;
  for (int kind = 0; kind < kDraws; ++kind) {
    Feeds feeds = drawn(graph, seed, kind);
    InterpretOptions options;
    options.kernels = random_kernels(seed, 0);
    try {
      const StepResult step = interpret(graph, feeds, options);
      bool good = finite(step.loss);
      for (const auto& [name, gradient] : step.gradients) good = good && finite(gradient);
      if (good) return feeds;
      if (why.empty()) why = "its loss or a gradient is not finite";
    } catch (const std::exception& e) {
      if (why.empty()) why = first_line(e);
    }
  }
  throw user_error("verify", "the graph of {} cannot be run on random numbers: {}", graph.model,
                   why);
}

Feeds drawn(const Graph& graph, uint64_t seed, int kind) {
  at::NoGradGuard no_grad;
  at::manual_seed(seed);
  const auto draw = [&](ValueId v, bool positive) {
    const TensorSpec& spec = graph.spec(v);
    const at::ScalarType type = to_torch(spec.dtype);
    if (is_float(spec.dtype))
      return kind == 0 && !positive ? at::randn(spec.shape, type)
                                    : at::rand(spec.shape, type) * 0.9 + 0.1;
    if (kind == 0 || spec.dtype == DType::b8) return at::randint(0, 2, spec.shape, type);
    return at::full(spec.shape, kind == 1 ? 1 : 0, type);
  };
  Feeds feeds;
  for (const Parameter& p : graph.parameters) {
    feeds.parameters[p.name] = draw(p.value, false);
    // Products of many stay within what can be told from rounding.
    const TensorSpec& spec = graph.spec(p.value);
    if (is_float(spec.dtype) && spec.shape.size() >= 2)
      feeds.parameters[p.name] /=
          std::sqrt(static_cast<double>(std::max<int64_t>(spec.numel() / spec.shape[0], 1)));
  }
  for (const Buffer& b : graph.buffers) feeds.buffers[b.name] = draw(b.value, true);
  for (const Input& i : graph.inputs) feeds.inputs[i.name] = draw(i.value, false);
  return feeds;
}

Derivative check_derivative(const Graph& graph, uint64_t seed) {
  Derivative result;
  result.problems = misplaced(graph);
  if (!result.problems.empty() || !graph.loss.valid()) return result;
  if (is_large(graph)) {
    result.unchecked = "it computes too much for that";
    return result;
  }
  const Graph exact = in_type(graph, DType::f64);
  for (int kind = 0; kind < kDraws; ++kind) {
    try {
      result.problems = compared(exact, seed, kind);
      result.unchecked.clear();
      break;
    } catch (const Unrunnable& e) {
      if (kind == 0) result.unchecked = fmt::format("on random numbers, {}", e.why);
    }
  }
  const auto custom = std::count_if(graph.parameters.begin(), graph.parameters.end(),
                                    [](const Parameter& p) { return p.custom; });
  if (custom > 0 && result.unchecked.empty())
    result.unchecked = fmt::format(
        "{} gradients are changed by hooks or by functions with a backward pass of their own",
        custom);
  return result;
}

}  // namespace motley

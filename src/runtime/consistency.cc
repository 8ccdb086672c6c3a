#include "runtime/consistency.h"

#include <ATen/ATen.h>

#include <map>

#include "core/error.h"
#include "graph/file.h"
#include "graph/op.h"
#include "graph/ops/shapes.h"
#include "graph/segment.h"
#include "interpret/dispatch.h"
#include "runtime/derivative.h"
#include "runtime/trainer.h"
#include "zoo/zoo.h"

namespace motley {

namespace {

constexpr int64_t kMostCalled = int64_t{1} << 20;  // elements of operands and results of one call

using Specs = std::vector<TensorSpec>;

at::Tensor stand_in(const TensorSpec& spec, at::Device device) {
  const auto options = at::TensorOptions(device).dtype(to_torch(spec.dtype));
  return device.is_meta() ? at::empty(spec.shape, options) : at::zeros(spec.shape, options);
}

Specs called(const Graph& graph, const Node& node, at::Device device) {
  Specs specs;
  const auto tensor_of = [&](ValueId v) { return stand_in(graph.spec(v), device); };
  for (const at::Tensor& t : call(find_operator(node.op), node.args, tensor_of, device))
    specs.push_back(spec_of(t));
  return specs;
}

bool is_small(const Graph& graph, const Node& node) {
  int64_t elements = 0;
  for (ValueId v : graph.inputs_of(node)) elements += graph.spec(v).numel();
  for (ValueId v : node.outputs)
    if (v.valid()) elements += graph.spec(v).numel();
  return elements <= kMostCalled;
}

// What a node makes of its operands; empty: nothing says. Throws what libtorch throws where it
// cannot be called like that.
Specs derived(const Graph& graph, const Node& node) {
  if (is_boundary(node)) return {graph.spec(graph.inputs_of(node)[0])};
  const OpDef* def = find_op(node.op);
  ShapeFunction shape = def != nullptr ? def->shape : nullptr;
  if (shape == nullptr) shape = find_shape(node.op);
  if (shape == nullptr) {
    try {
      return called(graph, node, at::kMeta);
    } catch (const UserError&) {
      throw;
    } catch (const std::exception&) {
      // No Meta kernel, or one that takes less than the real one.
    }
  }
  if (shape != nullptr) return shape(graph, node);
  return is_small(graph, node) ? called(graph, node, at::kCPU) : Specs{};
}

std::string first_line(const std::exception& e) {
  const std::string text = e.what();
  return text.substr(0, text.find('\n'));
}

// All that the results of a node depend on.
std::string key_of(const Graph& graph, const Node& node) {
  std::string key = node.op;
  auto tensor = [&](ValueId v) { key += v.valid() ? to_string(graph.spec(v)) : "none"; };
  for (const Arg& arg : node.args) {
    key += fmt::format("|{}:", arg.index());
    if (auto v = std::get_if<ValueId>(&arg)) tensor(*v);
    if (auto list = std::get_if<std::vector<ValueId>>(&arg))
      for (ValueId v : *list) tensor(v), key += ",";
    if (auto i = std::get_if<int64_t>(&arg)) key += std::to_string(*i);
    if (auto d = std::get_if<double>(&arg)) key += fmt::format("{}", *d);
    if (auto b = std::get_if<bool>(&arg)) key += *b ? "t" : "f";
    if (auto s = std::get_if<std::string>(&arg)) key += *s;
    if (auto l = std::get_if<std::vector<int64_t>>(&arg))
      key += fmt::format("{}", fmt::join(*l, ","));
    if (auto l = std::get_if<std::vector<double>>(&arg))
      key += fmt::format("{}", fmt::join(*l, ","));
    if (auto t = std::get_if<DType>(&arg)) key += to_string(*t);
  }
  return key;
}

}  // namespace

std::vector<std::string> check_results(const Graph& graph, int* underived) {
  // Only the first: what comes behind it would be called with what its operands are not.
  std::vector<std::string> problems;
  if (underived != nullptr) *underived = 0;
  at::NoGradGuard no_grad;
  struct Known {
    Specs specs;
    std::string failure;
  };
  std::map<std::string, Known> known;
  for (size_t n = 0; n < graph.nodes.size() && problems.empty(); ++n) {
    const Node& node = graph.nodes[n];
    if (is_source(node)) continue;
    const auto [it, fresh] = known.try_emplace(key_of(graph, node));
    Known& result = it->second;
    if (fresh) {
      try {
        result.specs = derived(graph, node);
      } catch (const std::exception& e) {
        result.failure = first_line(e);
      }
    }
    if (!result.failure.empty()) {
      problems.push_back(
          fmt::format("node {} ({}) cannot be called like that: {}", n, node.op, result.failure));
      continue;
    }
    if (result.specs.empty()) {
      if (underived != nullptr) ++*underived;
      continue;
    }
    if (result.specs.size() != node.outputs.size()) {
      problems.push_back(fmt::format("node {} ({}) has {} results, not {}", n, node.op,
                                     result.specs.size(), node.outputs.size()));
      continue;
    }
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      const ValueId v = node.outputs[o];
      // A result that nobody wants may be left undefined; gradients by an output mask are.
      if (!v.valid() || graph.spec(v) == result.specs[o]) continue;
      problems.push_back(
          fmt::format("node {} ({}) makes %{} as {}, which is written as {}", n, node.op, v.index,
                      result.specs[o].shape == Shape{-1} ? "nothing" : to_string(result.specs[o]),
                      to_string(graph.spec(v))));
    }
  }
  return problems;
}

bool is_of_zoo(const Plan& plan) {
  const std::string model = is_graph_file(plan.model) ? plan.graph->model : plan.model;
  const std::string name = model.substr(0, model.find(':'));
  for (const ModelInfo& info : zoo())
    if (info.name == name) return true;
  return false;
}

std::vector<std::string> check_graph(const Plan& plan, std::string* unchecked) {
  if (!is_of_zoo(plan)) {
    std::vector<std::string> problems = check_results(*plan.graph);
    if (!problems.empty()) return problems;
    Derivative derivative = check_derivative(*plan.graph);
    if (unchecked != nullptr) *unchecked = derivative.unchecked;
    if (derivative.problems.empty() && plan.graph_fingerprint != fingerprint(*plan.graph))
      return {fmt::format(
          "the graph ({:016x}) is not the one that was planned ({:016x}): it was changed "
          "since; plan it again",
          fingerprint(*plan.graph), plan.graph_fingerprint)};
    return std::move(derivative.problems);
  }
  std::string model;
  try {
    model = to_text(captured_graph(plan));
  } catch (const UserError& e) {
    const std::string why = e.what();
    return {why.substr(why.find("] ") + 2)};
  } catch (const c10::Error& e) {
    return {fmt::format("{} cannot be captured: {}", plan.model, first_line(e))};
  }
  const std::string text = to_text(*plan.graph);
  if (text == model) return {};
  // The first line that differs.
  size_t start = 0;
  for (size_t i = 0; i < std::min(text.size(), model.size()) && text[i] == model[i]; ++i)
    if (text[i] == '\n') start = i + 1;
  auto line = [&](const std::string& all) {
    return all.substr(start, std::min(all.find('\n', start), all.size()) - start);
  };
  return {
      fmt::format("the graph is not that of {} at batch {}: where the model has '{}', it has "
                  "'{}'; plan the model again",
                  plan.model, plan.batch, line(model).substr(0, 200), line(text).substr(0, 200))};
}

}  // namespace motley

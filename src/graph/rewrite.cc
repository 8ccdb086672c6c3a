#include "graph/rewrite.h"

namespace motley {

std::vector<TensorSpec> Rewriting::results(const Node& node) const {
  std::vector<TensorSpec> specs;
  for (ValueId v : node.outputs)
    specs.push_back(v.valid() ? from_.spec(v) : TensorSpec{DType::f32, {-1}});
  return specs;
}

std::vector<Arg> Rewriting::arguments(const Node& node) const {
  std::vector<Arg> args = node.args;
  for (Arg& arg : args) {
    if (auto v = std::get_if<ValueId>(&arg); v && v->valid()) *v = value_[v->index];
    if (auto list = std::get_if<std::vector<ValueId>>(&arg))
      for (ValueId& v : *list)
        if (v.valid()) v = value_[v.index];
  }
  return args;
}

void Rewriting::add(const Node& node, std::vector<Arg> args, const std::vector<TensorSpec>& specs) {
  const NodeId id = to_.add(node.op, std::move(args), specs, node.phase);
  for (size_t o = 0; o < node.outputs.size(); ++o)
    if (node.outputs[o].valid()) value_[node.outputs[o].index] = to_.node(id).outputs[o];
}

Graph Rewriting::finish() {
  auto role = [&](ValueId v) { return v.valid() ? value_[v.index] : v; };
  for (const Parameter& p : from_.parameters)
    to_.parameters.push_back({p.name, role(p.value), role(p.gradient), p.frozen, p.custom});
  for (const Buffer& b : from_.buffers)
    to_.buffers.push_back({b.name, role(b.value), role(b.update)});
  for (const Input& i : from_.inputs) to_.inputs.push_back({i.name, role(i.value)});
  to_.loss = role(from_.loss);
  for (ValueId v : from_.outputs) to_.outputs.push_back(role(v));
  remove_dead(&to_);
  return std::move(to_);
}

}  // namespace motley

#include "planner/shape.h"

#include <fmt/format.h>

namespace motley::planner {

Graph anonymous(const Graph& graph) {
  Graph plain = graph;
  plain.model.clear();
  const auto forget = [](auto& list) {
    for (auto& item : list) item.name.clear();
  };
  forget(plain.parameters);
  forget(plain.buffers);
  forget(plain.inputs);
  for (Node& node : plain.nodes)
    if (is_source(node) && node.op != "motley::constant") node.args = {std::string()};
  return plain;
}

std::string shape_of(const Graph& graph) {
  Graph plain = anonymous(graph);
  for (Node& node : plain.nodes)
    for (Arg& arg : node.args)
      if (std::holds_alternative<double>(arg)) arg = 0.0;
  return fmt::format("{:016x}", fingerprint(plain));
}

}  // namespace motley::planner

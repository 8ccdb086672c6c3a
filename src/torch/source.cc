#include "torch/source.h"

#include "core/error.h"
#include "core/file.h"
#include "graph/canonical.h"
#include "graph/op.h"
#include "torch/capture.h"

namespace motley {

bool is_graph_file(const std::string& model) {
  return model.find('/') != std::string::npos ||
         (model.size() > 5 && model.substr(model.size() - 5) == ".json");
}

void save_graph(const Graph& graph, int64_t batch, const std::string& path) {
  Json j;
  j["motley_graph"] = 1;
  j["batch"] = batch;
  j["graph"] = to_text(graph);
  write_file(path, j.dump() + "\n");
}

GraphSource load_graph(const std::string& model, int64_t batch, DType dtype) {
  GraphSource source;
  if (is_graph_file(model)) {
    Json json = parse_json(read_file(model), model);
    Fields fields(json, "graph", model);
    if (!fields.find("motley_graph"))
      throw fields.bad("motley_graph", "is missing; this is not a file of `motley capture`");
    if (fields.integer("motley_graph") != 1) throw fields.bad("motley_graph", "is not version 1");
    if (int64_t b = fields.integer("batch"); b != batch)
      throw fields.bad(
          "batch",
          fmt::format("is {}; give --batch {} or capture again with --batch {}", b, b, batch));
    source.graph = parse_graph(fields.text("graph"), model);
    for (const Node& node : source.graph.nodes)
      if (!is_source(node) && !find_op(node.op)) source.unknown_ops.push_back(node.op);
    return source;
  }
  Capture captured = capture(model, batch, dtype);
  source.capture_s = captured.seconds;
  source.unknown_ops = captured.unknown_ops;
  source.graph = canonicalize(captured.graph);
  return source;
}

}  // namespace motley

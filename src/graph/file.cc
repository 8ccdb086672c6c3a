#include "graph/file.h"

#include "core/error.h"
#include "core/file.h"

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

Graph load_graph_file(const std::string& path, int64_t batch) {
  Json json = parse_json(read_file(path), path);
  Fields fields(json, "graph", path);
  if (!fields.find("motley_graph"))
    throw fields.bad("motley_graph", "is missing; this is not a file of `motley capture`");
  if (fields.integer("motley_graph") != 1) throw fields.bad("motley_graph", "is not version 1");
  if (int64_t b = fields.integer("batch"); b != batch)
    throw fields.bad("batch", fmt::format("is {}; give --batch {} or capture again with --batch {}",
                                          b, b, batch));
  return parse_graph(fields.text("graph"), path);
}

}  // namespace motley

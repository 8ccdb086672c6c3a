#include "graph/file.h"

#include "core/error.h"
#include "core/file.h"
#include "graph/rebatch.h"

namespace motley {

bool is_graph_file(const std::string& model) {
  return model.find('/') != std::string::npos ||
         (model.size() > 5 && model.substr(model.size() - 5) == ".json");
}

Graph GraphFile::at(int64_t samples) const {
  if (samples == batch) return graph;
  if (other_batch > 0) return at_batch(graph, batch, other, other_batch, samples, path);
  throw user_error("graph",
                   "{}: field 'batch' is {}; give --batch {} or capture again with --batch {}",
                   path, batch, batch, samples);
}

void save_graph(const GraphFile& file) {
  Json j;
  j["motley_graph"] = 1;
  j["batch"] = file.batch;
  j["graph"] = to_text(file.graph);
  if (file.other_batch > 0)
    j["other"] = {{"batch", file.other_batch}, {"graph", to_text(file.other)}};
  write_file(file.path, j.dump() + "\n");
}

GraphFile load_graph_file(const std::string& path) {
  Json json = parse_json(read_file(path), path);
  Fields fields(json, "graph", path);
  if (!fields.find("motley_graph"))
    throw fields.bad("motley_graph", "is missing; this is not a file of `motley capture`");
  if (fields.integer("motley_graph") != 1) throw fields.bad("motley_graph", "is not version 1");
  GraphFile file;
  file.path = path;
  file.batch = fields.integer("batch");
  if (file.batch < 1) throw fields.bad("batch", "is not positive");
  file.graph = parse_graph(fields.text("graph"), path);
  if (const Json* other = fields.find("other")) {
    Fields again(*other, "graph", path);
    file.other_batch = again.integer("batch");
    if (file.other_batch < 1 || file.other_batch == file.batch)
      throw again.bad("batch", "has to be another positive number than the first");
    file.other = parse_graph(again.text("graph"), path);
  }
  return file;
}

Graph load_graph_file(const std::string& path, int64_t batch) {
  return load_graph_file(path).at(batch);
}

}  // namespace motley

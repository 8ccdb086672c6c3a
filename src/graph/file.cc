#include "graph/file.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "graph/rebatch.h"

namespace motley {

namespace {

// The first line in which two graphs of one batch differ by more than rounding; empty if none.
std::string first_difference(const Graph& told, Graph right, int64_t samples) {
  for (size_t n = 0; n < std::min(told.nodes.size(), right.nodes.size()); ++n)
    for (size_t i = 0; i < std::min(told.nodes[n].args.size(), right.nodes[n].args.size()); ++i) {
      const auto* x = std::get_if<double>(&told.nodes[n].args[i]);
      auto* y = std::get_if<double>(&right.nodes[n].args[i]);
      if (x && y && std::abs(*x - *y) <= 1e-12 * std::abs(*x)) *y = *x;
    }
  const std::string one = to_text(told), other = to_text(right);
  if (one == other) return "";
  std::istringstream a(one), b(other);
  std::string mine, theirs;
  while (std::getline(a, mine) && std::getline(b, theirs))
    if (mine != theirs) break;
  return fmt::format("at {} samples '{}' is '{}'", samples, mine.substr(0, 200),
                     theirs.substr(0, 200));
}

}  // namespace

bool is_graph_file(const std::string& model) {
  return model.find('/') != std::string::npos ||
         (model.size() > 5 && model.substr(model.size() - 5) == ".json");
}

Graph GraphFile::at(int64_t samples) const {
  if (samples == batch) return graph;
  if (samples == other_batch) return other;
  if (other_batch > 0 && samples >= from && samples <= to)
    return at_batch(graph, batch, other, other_batch, samples, path);
  if (other_batch > 0)
    throw user_error("graph",
                     "{}: was captured for batches from {} to {}, not {}; capture again with "
                     "--batch {}",
                     path, from, to, samples, samples);
  throw user_error("graph",
                   "{}: field 'batch' is {}; give --batch {} or capture again with --batch {}",
                   path, batch, batch, samples);
}

std::string GraphFile::add_other(
    const std::function<std::optional<Graph>(int64_t samples)>& capture) {
  other_batch = 0;
  differs = false;
  for (int64_t samples : {batch / 2, 2 * batch}) {
    std::optional<Graph> found;
    if (other_batch == 0 && samples > 0) found = capture(samples);
    if (!found) continue;
    other_batch = samples;
    other = *std::move(found);
  }
  if (other_batch == 0) return fmt::format("the model takes batches of {} alone", batch);
  from = std::min(batch, other_batch), to = std::max(batch, other_batch);
  int compared = 0;
  try {
    for (int64_t samples : {int64_t{2}, int64_t{3}, batch + 1, 3 * batch, 64 * batch + 7}) {
      if (samples == batch || samples == other_batch) continue;
      const std::optional<Graph> right = capture(samples);
      if (!right) continue;
      const Graph told = at_batch(graph, batch, other, other_batch, samples, path);
      if (const std::string where = first_difference(told, *right, samples); !where.empty())
        throw user_error("graph", "{}: a size does not grow with the batch in a straight line: {}",
                         path, where);
      from = std::min(from, samples), to = std::max(to, samples);
      ++compared;
    }
  } catch (const UserError& e) {
    other_batch = 0;
    differs = true;
    return e.what();
  }
  if (compared > 0) return "";
  other_batch = 0;
  return fmt::format("the model takes batches of {} and {} alone", from, to);
}

void save_graph(const GraphFile& file) {
  Json j;
  j["motley_graph"] = 1;
  j["batch"] = file.batch;
  j["graph"] = to_text(file.graph);
  if (file.other_batch > 0)
    j["other"] = {{"batch", file.other_batch},
                  {"graph", to_text(file.other)},
                  {"from", file.from},
                  {"to", file.to}};
  write_file(file.path, j.dump() + "\n");
}

GraphFile parse_graph_file(const std::string& text, const std::string& path) {
  const Json json = parse_json(text, path);
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
    file.from = again.integer("from");
    file.to = again.integer("to");
  }
  return file;
}

GraphFile load_graph_file(const std::string& path) {
  return parse_graph_file(read_file(path), path);
}

Graph load_graph_file(const std::string& path, int64_t batch) {
  return load_graph_file(path).at(batch);
}

}  // namespace motley

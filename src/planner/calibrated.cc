#include "planner/calibrated.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "cluster/resources.h"
#include "core/error.h"
#include "planner/batch_step.h"
#include "planner/engines.h"
#include "planner/shape.h"
#include "planner/sub_clusters.h"

namespace motley::planner {

namespace {

constexpr int kCalibrationRuns = 8;  // micro-batches of the step whose programs are measured

}  // namespace

LayerShapes::LayerShapes(const PlanOptions& request, const Cluster& cluster,
                         const GraphOf& graph_of)
    : groups_(cluster) {
  std::set<std::string> known;
  std::set<std::pair<std::string, int>> known_on;  // shape, group
  const std::vector<std::vector<int>> meshes = stage_meshes(cluster);
  for (int64_t size : request.micro_batches) {
    BatchStep step(graph_of(size * kCalibrationRuns), size * kCalibrationRuns);
    const auto part = step.of(size);
    if (!part) throw UserError(step.why_not());
    graphs_.push_back(std::make_unique<LayeredGraph>(
        request, &groups_, std::shared_ptr<const Graph>(part, &part->graph),
        step.layers(size, std::max(0, request.layers))));
    LayeredGraph& graph = *graphs_.back();
    for (const Theory* theory : graph.distinct_layers()) {
      const std::string shape = shape_of(theory->graph());
      if (known.insert(shape).second) shapes.push_back({shape, size, theory});
    }
    for (const LayeredGraph::Window& window : graph.windows()) {
      const std::string shape = shape_of(window.theory->graph());
      for (const std::vector<int>& mesh : meshes) {
        if (mesh.size() == 1) continue;
        const DeviceGroups::Kind& group = groups_.of(mesh);
        if (!known_on.emplace(shape, group.number).second) continue;
        Planned planned = graph.plan_window(window, group, kCalibrationRuns, false);
        if (planned.feasible)
          shapes.push_back({shape, size, window.theory.get(), mesh, count_nodes(group.cluster),
                            std::move(planned.program), std::move(planned.ratios)});
      }
    }
  }
}

Cluster corrected(const Cluster& cluster, const PlanOptions& request, const GraphOf& graph_of) {
  std::set<int64_t> sizes;
  for (const ProfiledStage& m : request.measured)
    if (request.batch % m.micro_batch == 0) sizes.insert(m.micro_batch);
  PlanOptions plain = request;  // by the model alone
  plain.measured.clear();
  DeviceGroups groups(cluster);
  std::map<std::string, std::pair<Seconds, Seconds>> seconds;  // by type: measured, by the model
  if (sizes.empty()) return cluster;
  BatchStep step(graph_of(request.batch), request.batch);
  for (int64_t size : sizes) {
    const auto part = step.of(size);
    if (!part) continue;
    LayeredGraph graph(plain, &groups, {part, &part->graph},
                       step.layers(size, std::max(0, request.layers)));
    std::vector<std::string> shapes(graph.size());
    for (int l = 0; l < graph.size(); ++l)
      if (const Theory* theory = graph.layer_theory(l)) shapes[l] = shape_of(theory->graph());
    for (size_t t = 0; t < cluster.types.size(); ++t) {
      int device = 0;
      while (cluster.devices[device].type != static_cast<int>(t)) ++device;
      const DeviceGroups::Kind& one = groups.of({device});
      auto& [measured, modelled] = seconds[cluster.types[t].name];
      for (int l = 0; l < graph.size(); ++l)
        for (const ProfiledStage& m : request.measured) {
          if (m.shape != shapes[l] || m.devices > 1 || m.type != cluster.types[t].name) continue;
          const auto& cost =
              graph.layer_cost(l, one, static_cast<int>(request.batch / size), false);
          measured += m.forward + m.backward;
          modelled += cost.seconds.forward + cost.seconds.backward;
        }
    }
  }
  Cluster result = cluster;
  for (DeviceType& type : result.types) {
    const auto [measured, modelled] = seconds[type.name];
    if (!(measured > 0 && modelled > 0)) continue;
    const double slower = measured / modelled;
    slow_down(&type, slower);
  }
  return result;
}
}  // namespace motley::planner

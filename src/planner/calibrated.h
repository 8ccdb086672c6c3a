// Measured layers: what is to be measured, and a cluster as fast as was measured.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "planner/layered_graph.h"

namespace motley::planner {

// What `motley calibrate --stages` measures at some micro-batch sizes: the layers of a model, as
// the pipeline engine cuts it, each distinct one once, on every device by itself; and on every kind
// of sub-mesh that it may give a stage neighbouring layers, by the program that it would plan.
struct LayerShapes {
  struct Shape {
    std::string shape;
    int64_t micro_batch;
    const Theory* theory;
    std::vector<int> devices = {};  // that run it together; none: each by itself
    int nodes = 1;
    Program program = {};
    std::vector<double> ratios = {};
  };
  LayerShapes(const PlanOptions& request, const Cluster& cluster, const GraphOf& graph_of);
  std::vector<Shape> shapes;

 private:
  DeviceGroups groups_;
  std::vector<std::unique_ptr<LayeredGraph>> graphs_;
};

// The cluster with device types as fast as request.measured says: the numbers of a type are scaled
// so that the model's layers take it, together, what they were measured to. Types of which no layer
// was measured stay as they are.
Cluster corrected(const Cluster& cluster, const PlanOptions& request, const GraphOf& graph_of);

}  // namespace motley::planner

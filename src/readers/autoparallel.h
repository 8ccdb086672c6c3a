// Plans of autoparallel (github.com/meta-pytorch/autoparallel), as its `get_json()` writes them: the
// operators of a model's forward and backward pass in order, and how the tensors of each are held by
// the devices of a mesh.
//
//   {"mesh": {"shape": [4, 2], "dim_names": ["dp", "tp"]},
//    "nodes": [{"name": "primals_1", "op": "placeholder", "phase": "forward", "placement": "RS(0)",
//               "shape": [128, 64], "dtype": "float32", "inputs": [], "compute_cost": 0.0}, ...],
//    "summary": {"total": 812.4, "comm": 300.1, "compute": 511.3, "transition": 1.0}}
//
// A placement is one letter for each dimension of the mesh: R whole, S(d) cut in dimension d, P or
// P(sum) partial sums. Of what several dimensions of the mesh cut, S(d)[i] says which of them cuts
// first; one that cuts pieces of a later one is strided, which torch also writes as _S(d, pieces). Costs are microseconds by autoparallel's own model, without the optimizer.
#pragma once

#include <string>
#include <vector>

#include "core/file.h"
#include "core/units.h"
#include "graph/graph.h"
#include "graph/placement.h"

namespace motley::readers {

struct AutoparallelNode {
  std::string where;  // "plan.json: nodes[3] (addmm)", for messages
  std::string op;     // "placeholder", or as graphs name it: "aten::addmm"
  bool backward = false;
  bool tangent = false;              // a gradient that comes in
  Shape shape;                       // of the first tensor that it makes, whole; of one: dtype too
  std::vector<Placement> placement;  // of that tensor [dimension of the mesh]; empty: none is made
  std::vector<bool> strided;         // cuts pieces of a later dimension of the mesh
};

struct AutoparallelPlan {
  std::vector<int> mesh;  // devices in each dimension; ranks count the last one fastest
  std::vector<AutoparallelNode> nodes;
  Seconds compute = 0, comm = 0;  // of a step, one after the other
};

// Whether it looks like such a plan.
bool is_autoparallel(const Json& json);
// Throws UserError that names the file, the field, its value and what to give.
AutoparallelPlan read_autoparallel(const Json& json, const std::string& name);

}  // namespace motley::readers

// The model that a plan is for, captured again.
#pragma once

#include <string>

#include "plan/plan.h"
#include "zoo/zoo.h"

namespace motley {

// The zoo's model that the plan is for; a plan of a captured graph file names it in the graph.
ModelSpec model_of(const Plan& plan);

DType dtype_of(const Plan& plan);  // of its parameters

// The graph of the plan's model with parameters of a type. A plan of mixed precision computes in
// `compute`; with the type of the parameters that is the same graph, and nothing is rounded.
Graph captured_graph(const Plan& plan, DType dtype, DType compute);
// The canonical graph of the plan's model at the type of the plan's parameters, captured again.
// Throws UserError if the plan is not for a model of the zoo.
Graph captured_graph(const Plan& plan);
// The same. Throws UserError naming both models if the plan's graph is not it, or if the plan is
// not for a model of the zoo.
Graph graph_of_model(const Plan& plan);

// The plan in a file, if it can be trained by: UserError if it is not sound, if it is for another
// number of workers (0: any), or of fp16, which needs loss scaling.
Plan plan_to_run(const std::string& path, int workers = 0);

}  // namespace motley

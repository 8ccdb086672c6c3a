// Whether the graph of a plan is what it says it is: a training step of one device.
//
// A plan holds its graph, so that a file made or changed in an editor could hold any. The checker
// of programs (shard/program.h) proves that a program equals its graph; this is about the graph.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace motley {

// What of the graph does not follow: every node's results are derived again from its operands, by
// the table's shape function, libtorch's Meta kernel, or a call on zeros where both are missing and
// tensors are small. Empty if all follow. `underived`: nodes of which none of these says anything.
std::vector<std::string> check_results(const Graph& graph, int* underived = nullptr);

// Whether `plan` names a model of the zoo.
bool is_of_zoo(const Plan& plan);

// Of a model of the zoo: whether the graph is that of the model, captured again. Of any other:
// check_results, and whether its gradients are the derivative of its loss (derivative.h);
// `unchecked` says which could not be compared.
std::vector<std::string> check_graph(const Plan& plan, std::string* unchecked = nullptr);

}  // namespace motley

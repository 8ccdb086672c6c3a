// What passes that make a graph again, node by node, share.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"

namespace motley {

class Rewriting {
 protected:
  explicit Rewriting(const Graph& from) : from_(from), value_(from.values.size()) {
    to_.model = from.model;
  }
  ~Rewriting() = default;

  // The types and shapes of a node's results; those that it does not have are f32[-1].
  std::vector<TensorSpec> results(const Node& node) const;
  // A node's arguments as values of to_.
  std::vector<Arg> arguments(const Node& node) const;
  // Adds a node with one result, which is returned.
  ValueId emit(const std::string& op, std::vector<Arg> args, const TensorSpec& spec, Phase phase) {
    return to_.node(to_.add(op, std::move(args), {spec}, phase)).outputs[0];
  }
  // Adds the node with these arguments, values of to_, and results; they stand for its old results
  // from now on.
  void add(const Node& node, std::vector<Arg> args, const std::vector<TensorSpec>& specs);
  // The new graph once every node is rewritten: parameters, buffers, inputs, loss and outputs are
  // what stands for the old ones, and nodes that nothing reads are removed.
  Graph finish();

  const Graph& from_;
  Graph to_;
  std::vector<ValueId> value_;  // [value of from_] what stands for it in to_
};

}  // namespace motley

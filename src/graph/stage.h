// Pipeline stages: the parts of a micro-batch's graph that different groups of devices run.
//
// Every node belongs to a stage. A stage's graph holds its nodes in order, the forward nodes before
// the backward ones. What it reads of other stages comes in as an input that is named after the
// value ("%123"), of the phase of the node that makes it; what others read of it is an output. A
// value goes straight from the stage that makes it to every stage that reads it, however many lie
// between.
//
// Nothing is sent that each stage can make for itself: parameters, buffers, inputs and constants,
// views and conversions of them, and what follows from constants alone (a causal mask). Of a value
// and its views only the value is sent.
//
// A parameter that several stages read is tied: each of them holds it. Its gradient is a sum, whose
// terms stay with the stages that make them; the runtime adds them up, once per step.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace motley {

struct StageGraph {
  Graph graph;
  std::vector<NodeId> node_of;    // [node] of the whole graph; invalid: made for this stage
  std::vector<ValueId> value_of;  // [value] likewise
};

// One value on its way; forward ones go to later stages, backward ones to any other.
// Whether an input of a stage's graph comes from another stage; of those the name is that of the
// value, "%12".
inline bool is_received(const Input& input) { return input.name.starts_with('%'); }

struct Transfer {
  int from = 0, to = 0;
  bool backward = false;
  ValueId value;        // of the whole graph
  ValueId made, taken;  // the same in the graphs of the two stages
};

struct Tied {
  int parameter = 0;        // of the whole graph
  std::vector<int> stages;  // ascending
};

struct Stages {
  std::vector<StageGraph> graphs;
  std::vector<Transfer> transfers;  // by (backward, from, to, value)
  std::vector<Tied> tied;
  // [stage][parameter of its graph] parameter of the whole graph; likewise buffers.
  std::vector<std::vector<int>> parameter_of, buffer_of;
};

// `stage_of` names the stage of every node, 0 <= stage < stages; what it says of sources and of
// nodes that every stage can make for itself does not matter. Throws UserError that starts with
// `where` if data would have to flow against the order of the passes, or a stage is left without
// nodes.
Stages cut_stages(const Graph& graph, const std::vector<int>& stage_of, int stages,
                  const std::string& where);

}  // namespace motley

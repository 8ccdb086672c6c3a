// The program in words: how every parameter is placed, what is communicated where, and why.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace motley::report {

// Parameters that differ in one number of their names alone ("blocks.0-11.attn.weight").
struct ParameterGroup {
  std::string name;
  int stage = -1;  // -1: one SPMD program
  int count = 1;
  Shape shape;
  Bytes bytes = 0;  // of all of them, whole
  std::string placement;
};
std::vector<ParameterGroup> parameter_groups(const Plan& plan);

// "embedding, blocks 0-5": the modules whose parameters a graph has.
std::string modules_of(const Graph& graph);

// Collectives of a step that do the same for the same reason, added up; longest first.
struct Communication {
  std::string where;   // "stage 2"; empty: one SPMD program
  std::string what;    // "all_reduce of gradients"
  std::string tensor;  // "f32[8,64]"
  std::string why;
  int count = 0;
  Bytes bytes = 0;      // whole tensors
  Seconds seconds = 0;  // before anything overlaps
};
// Of pipelines: of replica 0, and of other replicas where they differ from it.
std::vector<Communication> communications(const Plan& plan);

}  // namespace motley::report

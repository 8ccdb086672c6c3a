// What the parts of a program cost: its nodes are given to parts, such as the layers of a pipeline,
// and every step counts for one of them. Neighbouring parts that run the same steps as a program of
// their own cost about the sum: what a stage of a pipeline takes, known without planning it.
//
// A collective belongs to the part that makes what it converts; if that is a source, to the first
// part that reads it. Of several device types a step counts as on the slowest, and bytes as on the
// one whose memory they fill most, in proportion to the least memory of any: a part fits if they do
// in that. Of one type the seconds of all parts add up to phase_seconds(), and state and held bytes
// to memory_of().
#pragma once

#include <vector>

#include "cost/cost.h"

namespace motley {

struct PartCost {
  PhaseSeconds seconds;  // reduction: small neighbouring ones share a latency
  Bytes state = 0;       // parameters, gradients, optimizer, sums: there for the whole step
  Bytes held = 0;        // made forward, there until the backward pass
  // Values of earlier parts that this one or a later one reads in its forward pass: what comes in
  // where a pipeline is cut in front of this part.
  Bytes held_inputs = 0;
  Bytes workspace = 0;  // the most that is there beyond these, at one time, while the part runs
  Bytes late = 0;       // gradients that wait for the reduction, there from the backward pass on
};

// [part]. `part_of` [node], 0 <= part < parts; -1: with its first reader, or else with what it
// reads first. State of a parameter that several parts read counts in all of them. REQUIRES:
// `program` is ordered by phases.
std::vector<PartCost> part_costs(const Theory& theory, const Program& program,
                                 const CostModel& model, const Fractions& fractions,
                                 Optimizer optimizer, const std::vector<int>& part_of, int parts);

}  // namespace motley

// Synthesis of reduction programs (P2 section 3.5): every sequence of at most `size_limit` steps,
// each a form of the language and a collective, that takes the initial state to the goal.
//
// Programs are paths in the graph of device states, which is explored breadth first, every state
// once; "does this state reach the goal in s steps" is answered once per (state, s). Programs come
// in increasing size. The goal has no successor (nothing can be reduced twice), so that no program
// is a prefix of another. Two rules that Figure 8 does not print: every participating group must
// hold something, and Master goes with all_reduce only.
//
// Which programs there are depends on how many levels there are, not on their sizes: a level enters
// the semantics through "the own part" and "all parts" of it, which differ as soon as the size is
// 2; the divisibility that reduce_scatter asks for always holds, because the number of chunks is
// the product of the sizes; and how chunks are numbered does not matter. So `program_space`
// explores [1 2 .. 2], where a state is a few words, and the forms are applied to the true levels.
// `program_space_on` explores the levels as they are, for any goal; it is the brute-force
// reference, and what hierarchies (a) to (c) of section 3.4 need.
//
// How much of the buffer a device holds follows from the levels that are scattered: reduce_scatter
// over a form scatters the levels it spans, all_gather gathers them, and a device holds the buffer
// divided by the sizes of the levels scattered.
//
// Cost: states * forms * 5 applications. At limit 5, one level has 4 states, two 26, three 251,
// four 2,200 and five 13,032.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reduce/language.h"
#include "reduce/semantics.h"

namespace motley::reduce {

constexpr int kMaxSizeLimit = 8;
constexpr int64_t kMaxPrograms = 200000;

struct Step {
  Form form;
  Collective collective = Collective::all_reduce;
  friend bool operator==(const Step&, const Step&) = default;
};
using Program = std::vector<Step>;

struct Transition {
  Step step;
  int to = 0;
};

struct ProgramState {
  std::vector<Transition> next;  // those on a way to the goal within the limit
  bool goal = false;
  uint32_t scattered = 0;    // bit l: level l is scattered
  std::vector<double> lack;  // [level l]: of the chunks, the least share that a block of the
                             // devices that agree in levels 1 .. l lacks contributions for (0, 1/2
                             // or 1: see best.h); only from program_space
};

struct ProgramSpace {
  int size_limit = 0;
  std::vector<ProgramState> states;  // states[0] is the initial one
  int64_t programs = 0;              // how many there are
};

// REQUIRES: levels >= 0 (root not counted). Throws UserError if there are more than kMaxPrograms or
// the levels are too many to explore.
ProgramSpace program_space(int levels, int size_limit);

// `goal[d]` is the set of devices that device d reduces with, itself included.
ProgramSpace program_space_on(const std::vector<int>& levels,
                              const std::vector<std::vector<int>>& goal, int size_limit);

// All programs of a space, by size, then in the order of forms and collectives.
std::vector<Program> programs_of(const ProgramSpace& space);

// Runs a program on the full states of `levels` as they are: whether every step is allowed and the
// goal (all devices) is reached.
bool verify(const Program& program, const std::vector<int>& levels);

// "(node, InsideGroup, ReduceScatter); (root, Parallel(node), AllReduce)". Names by level, root
// first.
std::string to_string(const Step& step, const std::vector<std::string>& names);

}  // namespace motley::reduce

// Slow, obvious references of the searches over synthesis problems (solver/problem.h), a checker,
// and random problems.
#pragma once

#include <cstdint>
#include <string>

#include "solver/problem.h"

namespace motley::solver {

// Tries every combination of options. REQUIRES: few nodes.
Solution brute_force(const Problem& problem, const Weights& weights);

// An integer program solved by CBC to a proven optimum: a binary per option; per value and required
// form a unit of flow from the form made to the form required over conversion arcs, each bought
// once by a binary.
Solution integer_program(const Problem& problem, const Weights& weights);

// The same optimum by a binary per option and a column per (value, form made, set of forms
// required) at the cost of completing the one to the other. Tighter: it reaches captured models of
// a few layers.
Solution integer_program_by_sets(const Problem& problem, const Weights& weights);

// Walks a solution step by step: every conversion starts from a form that is there, every input is
// there in the form its option needs, and the price is the sum of what was paid. Returns what is
// wrong, or "".
std::string check_solution(const Problem& problem, const Solution& solution,
                           const Weights& weights);

struct RandomShape {
  int nodes = 12;
  int types = 2;
  int max_forms = 4;
  int max_options = 4;
  bool gaps = true;  // conversions that are missing, nodes without options
};

// A random problem: a dag with shared values, nodes of two outputs, tokens without conversions,
// backward flags, conversions that are missing or free, tables shared by several nodes, and now and
// then no solution.
Problem random_problem(uint64_t seed, const RandomShape& shape);

// Random weights over types, summing to 1.
Weights random_weights(uint64_t seed, int types);

}  // namespace motley::solver

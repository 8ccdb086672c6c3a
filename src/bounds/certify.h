// The lower bound of overlap_pricing.h: of the step of any program at given shares, whose gradients
// are sent during the backward pass.
//
// Cutting planes (cutting_planes.h) raise the bound of a class of programs, whose lines are over the
// bounds of overlap_pricing.h. Where the bound of a class is least, the class is divided where a
// program that keeps it low has its last barrier, or gets a stretch that begins where the messages
// of such a program begin to queue, or is divided by whether the largest gradient is all-reduced
// that only some of these programs all-reduce. A class goes on from the weights that proved most of
// the class it is part of.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/build.h"

namespace motley::bounds {

constexpr double kWideGap = 1e-2;  // up to which a step is certified

// Programs that searches found, each once. They stay where they are.
class ProgramPool {
 public:
  const Program& add(Program program);
  // The program of a solution. Searches often find that of an earlier one again.
  const Program& of(const spmd::ProblemBuilder& builder, const solver::Solution& solution);

  struct Found {
    std::vector<int> option;  // empty: not from a search
    std::vector<solver::Conversion> conversions;
    std::unique_ptr<Program> program;
  };
  const std::vector<Found>& found() const { return found_; }

 private:
  std::vector<Found> found_;
};

// What searches took so far.
struct Effort {
  int solves = 0;
  int64_t states = 0;
  solver::StopReason worst_stop = solver::StopReason::kOptimal;
};

// What a bound is wanted of.
struct BoundRequest {
  const Fractions* fractions;
  std::function<Seconds()> step;  // no bound is looked for that is nearer to it than need be
  const Program* program;         // of that step
  ValueId first = {};             // see hidden_seconds()
  // Told of every program that searches find, which may lower the step.
  std::function<void(const Program&)> found;
  std::function<bool(const Effort&)> enough;  // no search begins once it says so
};

class Certifier {
 public:
  // `builder` and `order` are of the same theory and model; the builder is left with other prices.
  // REQUIRES: all outlive this.
  Certifier(const Theory& theory, const CostModel& model, Optimizer optimizer,
            spmd::Restriction restriction, const solver::Limits& limits,
            spmd::ProblemBuilder* builder, const solver::Order* order, solver::WarmStart* warm,
            ProgramPool* pool);

  // No more than the step. Where it is more than kWideGap below the step, that was enough, classes
  // were divided that often, or nothing is left to divide by.
  Seconds bound(const BoundRequest& request, int divisions = std::numeric_limits<int>::max());

  const Effort& effort() const { return effort_; }

 private:
  struct BoundProblem;
  struct Class;

  std::vector<int64_t> stretches(std::vector<int64_t> from) const;
  void raise_bound(const BoundRequest& request, BoundProblem* problem);
  ValueId branching_gradient(const BoundRequest& request,
                             const std::vector<const Program*>& programs,
                             const std::vector<spmd::Decision>& decided) const;
  void divide(const BoundRequest& request, const Class& weak, int64_t last, ValueId gradient,
              std::vector<Class>* classes);
  solver::Solution solve(const spmd::ProblemBuilder& builder, const solver::Order& order,
                         solver::WarmStart* warm);

  const Theory& theory_;
  const CostModel& model_;
  Optimizer optimizer_;
  spmd::Restriction restriction_;
  solver::Limits limits_;
  spmd::ProblemBuilder* builder_;
  const solver::Order* order_;
  solver::WarmStart* warm_;
  ProgramPool* pool_;
  Effort effort_;
};

}  // namespace motley::bounds

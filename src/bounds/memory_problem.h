// The problem of a program search that knows what programs hold at one node of the backward pass, the peak node,
// and that blocks may be computed again (recompute.h).
//
// At the peak node a program holds the state of its parameters and, in one form or another, what was
// made before and is read from then on; of a block that it computes again later, only what other
// blocks read. So a block has a *mode*, once or twice, that its operators pass on from one to the
// next. Once, its operators run once, and what its own backward pass reads of it is held in its
// smallest form. Twice, they run again, with the collectives between them: values have *second*
// values, made in the same form, that only what runs again reads, and that are not held.
//
// What is read before the peak node and after it in the same form is held in that form: the earlier
// reader passes the form that it read on to the later one. So copies of parameters count that are
// gathered once for both passes, and what blocks read of one another.
//
// A gradient that is all-reduced and then cut, for a parameter that is stored in pieces, is not
// hidden: the program waits where it is cut. So gradients have a form for being all-reduced, which
// an update of the whole parameter takes as it is, and which is cut at the price of a message.
//
// A solution is a program and a choice of blocks. Its price is at most the time of that program,
// and its bytes are at most what that program holds at the peak node; either may be less, since forms
// count that are no program's.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "solver/problem.h"
#include "spmd/build.h"
#include "spmd/overlap_pricing.h"

namespace motley::bounds {

class MemoryProblem {
 public:
  // The node of the backward pass at which programs that compute nothing again hold most, all in
  // their smallest forms; invalid: there is no backward pass.
  static NodeId peak_node(const Theory& theory, const spmd::ProblemBuilder& builder,
                          const Fractions& fractions);

  // `block_of` as by blocks_of(); where all are -1, nothing is computed again. `from`: the parts of
  // the builder. REQUIRES: builder.price() was called; theory and builder outlive this.
  MemoryProblem(const Theory& theory, const spmd::ProblemBuilder& builder,
                const std::vector<int>& block_of, const Fractions& fractions, NodeId peak_node,
                std::vector<int64_t> from = {});

  const solver::Problem& problem() const { return problem_; }
  // Takes over the prices of the builder, which were set with this pricing.
  void price(const spmd::OverlapPricing* pricing);
  // Adds seconds to a solution for each block of a kind that runs twice, or once.
  void price_modes(const std::vector<Seconds>& twice, const std::vector<Seconds>& once);
  // [type] What any solution holds in addition to the bytes of its options.
  const std::vector<Bytes>& fixed_bytes() const { return fixed_bytes_; }
  // [kind] How many blocks there are that could run twice.
  const std::vector<int>& kinds() const { return kinds_; }
  // [kind] How many do.
  std::vector<int> twice(const solver::Solution& solution) const;
  // [block] Whether it does.
  std::vector<bool> chosen(const solver::Solution& solution) const;
  // Its program, that computes nothing again: a solution of the builder's problem.
  solver::Solution plain(const solver::Solution& solution) const;

 private:
  // A value and two nodes that read it, one before the peak node and one after.
  struct Pair;
  class Assembly;
  // Where an option comes from.
  struct Variant {
    int option = 0;            // of the builder's table
    int runs = 1;              // of its operator
    std::vector<Bytes> bytes;  // [type] held, state of parameters excluded
  };
  struct TableOrigin {
    int base = -1;                  // option table of the builder; -1: it chooses a mode
    int kind = -1;                  // of a block whose mode it chooses
    bool state = false;             // bytes of the builder count too
    int part = 0, again = 0;        // of `from`: where its operators run, and where again
    std::vector<Variant> variants;  // [option]
  };

  const spmd::ProblemBuilder& builder_;
  solver::Problem problem_;
  std::vector<TableOrigin> origins_;  // [option table]
  int first_form_table_ = 0;          // after those of the builder
  // Where a form table comes from: one of the builder with a last form more.
  struct FormOrigin {
    int base = -1;     // -1: it has no conversions
    int reduced = -1;  // a gradient whose last form is: all-reduced; -1: it is: none
  };
  std::vector<FormOrigin> form_origins_;  // [form table from there]
  std::vector<Bytes> fixed_bytes_;
  std::vector<int> kinds_;
  struct Mode {
    int block, kind;
  };
  std::vector<Mode> modes_;  // [node of the problem, the first ones] that it chooses
  size_t blocks_ = 0;
};

}  // namespace motley::bounds

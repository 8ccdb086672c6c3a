// The search of alternation.h: rounds (alternation.cc), what fits into memory
// (alternation_memory.cc) and bounds (alternation_bounds.cc) of one best pair of program and
// shares.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bounds/certify.h"
#include "planner/alternation.h"
#include "solver/balance.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/build.h"

namespace motley::planner {

using namespace bounds;
using namespace solver;
using namespace spmd;

constexpr double kRoundGain = 1e-3;  // that a round has to gain for another to follow
// Of a step that communicates less, overlapping does not decide.
constexpr double kWorthOverlapping = 0.02;

class AlternationSearch {
 public:
  AlternationSearch(const Theory& theory, const CostModel& model,
                    const AlternationOptions& options);

  // Throws TimeIsUp if the deadline passes before anything is found.
  Alternation run();
  // What run() leaves out without `certify`, if its answer takes no longer than `below`, or not
  // much longer: the lower bounds, and rounds elsewhere where they are far. REQUIRES: run().
  Alternation certify(Seconds below);

 private:
  void search();
  // Bounds, and rounds elsewhere where these are far.
  void prove();
  // The best pair after a search, or so far if time is up.
  Alternation timed(const std::function<void()>& search);

  static bool close(const std::vector<double>& a, const std::vector<double>& b);
  static bool close(const Ratios& a, const Ratios& b);

  // The same ratios in all segments.
  Ratios everywhere(const std::vector<double>& ratios) const;

  // Rounds until they repeat or gain nothing.
  void alternate(Ratios ratios, Weights weights);

  // What follows the rounds: shares nearby, and programs that hide more.
  void finish();

  // Rounds from another beginning, to their own end: what is best before gradients are hidden need
  // not be so after. The better end is kept.
  void restart(const std::function<void()>& rounds);

  // Rounds without the devices of one type.
  void leave_out();

  // Shares in proportion to speed of all devices but those of a type; empty if computation alone
  // takes longer than the best step then, as far as speeds tell.
  std::vector<double> without(int type) const;

  // A round at shares between those in proportion to speed and those without the devices of one
  // type, to which rounds tend that see no gradients hidden: so much of the way to the latter.
  // Their bounds come with programs that hide more.
  void halfway(double way);

  // Rounds for programs in which types wait for one another in turn: no weights of types find them.
  void price_alternating_types();

  // The ratios of a type in every segment, from the linear program.
  Balance balance_of(const ProgramCost& cost, bool memory_limit) const;

  double gap() const { return 1 - best_.lower_bound / best_.step(); }

  // The lower bounds of the plan's shares, if they are worth it.
  void bound();
  // What they may cost is spent.
  bool bounded_enough() const;

  // Shares that divide well are not always those of the linear program, which knows no integers:
  // the best program with a little more for one type and less for another.
  void polish();

  // Shares of types a and b in the segments [first, end).
  void polish(int first, int end, int a, int b);

  // Rounds at prices that know of the overlap.
  void hide();

  // The best program with its gradients in messages of other sizes.
  void choose_sizes();

  // Parameters, gradients and optimizer state have to be somewhere, once (under data parallelism on
  // every device). If all devices together are too small for them, no program fits, and no search
  // is needed to say so.
  bool holds_state();

  // Whether a program may take no longer than is worth it, by a rough bound.
  bool worth_searching();

  bool fits(const ProgramCost& cost) const;

  struct Offer {
    const Program* program;  // of pool_
    Ratios ratios;
    GradientSizes sizes;
    ProgramCost cost;
    Seconds hidden;
    bool fits;
  };

  // Keeps the pair if it is feasible and the best so far.
  const Offer& offer(const Program& program, const Ratios& ratios);

  struct Lean {
    Program program;
    ProgramCost cost;
    std::vector<bool> blocks;
  };
  // The program with the cheapest blocks computed again that make it fit; none: no blocks do.
  std::optional<Lean> recomputed(const Program& program, const Fractions& fractions);

  // Bytes over the memory of the type that lacks most; below 0: it fits.
  Bytes lack(const ProgramCost& cost) const;

  Solution solve(const Ratios& ratios, const Weights& weights);

  // Of the problem, once it is priced: it does not depend on prices.
  const Order& order();

  Weights slowest() const;

  Ratios by_device(const std::vector<std::vector<double>>& by_type) const;

  // One iteration: the best program at these ratios, then the best ratios for it. Returns the
  // latter (empty: no program).
  Ratios round(const Ratios& ratios, bool rebalance, std::vector<double> memory_price = {});

  // A price per byte, equal on all types: high enough that a program fits, then brought to where
  // the programs on both sides of the limit cost the same.
  void limit_memory();

  // A program found at a price per byte: its time and bytes as they are priced.
  struct Priced {
    double price = 0, seconds = 0, memory = 0;
    bool fits = false;
  };

  Priced try_price(double price, Ratios& ratios);

  Priced priced(const Solution& solution, const Weights& weights) const;

  // A lower bound of the synchronised step at the ratios of the best pair: the greatest least price
  // over weights. A better program found on the way is kept. `search` false: what there is.
  Seconds bound_synchronised(bool search);

  // The same of the step with overlap, of the best pair, for about so many states.
  Seconds bound_overlapped(int64_t states, int divisions = std::numeric_limits<int>::max());

  // A lower bound of the step of the best pair, with overlap or nothing hidden, that knows of the
  // memory of devices; 0 where that is no limit.
  Seconds bound_limited(bool overlap);

  // What every program takes besides its operators, as it is priced.
  Seconds fixed_seconds(const Weights& weights) const;

  // A lower bound at some ratios, nothing hidden.
  struct Proven {
    Ratios ratios;
    Seconds bound;
  };

  const Theory& theory_;
  const CostModel& model_;
  AlternationOptions options_;  // its deadline counts the work of this search
  ProgramPool pool_;
  std::deque<Offer> offers_;
  std::vector<Proven> proven_;
  ProblemBuilder builder_;
  OrderMemo own_orders_;
  const Order* order_ = nullptr;  // once it is asked for
  Weights weights_;
  WarmStart warm_;
  const OverlapPricing* pricing_ = nullptr;  // in prices
  ValueId first_;                            // of the best pair, see hidden_seconds()
  std::vector<double> byte_prices_;          // that the limits ask for; empty: none
  Priced last_;                              // of the last round
  std::vector<Ratios> seen_;
  Alternation best_, beaten_;              // beaten_: the best so far, while rounds begin anew
  const Program* best_program_ = nullptr;  // of pool_
  GradientSizes sizes_;                    // that programs are offered with
  std::string no_program_, lack_;
  double least_excess_ = 0;
  bool restarted_ = false;         // rounds begin anew, and beaten_ is the best so far
  bool price_at_slowest_ = false;  // prices are those of the slowest type of each operator
  bool tied_ = false;              // all segments have the same ratios
  bool fits_plain_ = false;        // a program fits with nothing computed again
  std::vector<int> block_of_;      // [node of the graph]
  int blocks_ = 0;
  // Of the best pair, computed again; empty: none.
  std::vector<bool> best_blocks_;
  bool polishing_ = false;  // shares near the best pair's are tried
  StopReason worst_stop_ = StopReason::kOptimal;
  StopReason stop_ = StopReason::kOptimal;  // of plans, not of bounds
  int64_t most_work_ = 0;                   // that bounds may reach
  double seconds_ = 0;                      // so far
};

}  // namespace motley::planner

// What the bounds of programs have in common: cutting planes, and branch and bound.
//
// A program costs at least its price at any weights of device types (or of the bounds of
// overlap_pricing.h) and any multipliers of limits, PriceLine in balance.h. A search for the
// cheapest program at some weights so proves a bound of the step, and finds a program. The next
// weights are those at which the cheapest of the known programs costs most: no bound of this kind
// can prove more than that (Kelley's method on the Lagrangian dual).
//
// Where that is not enough, the programs are divided into classes with bounds of their own.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "core/units.h"
#include "solver/balance.h"

namespace motley::bounds {

// What a search at some weights proved of the programs of a class, and what it found.
struct PlaneSearch {
  Seconds bound = 0;  // no program costs less at these weights; infinite: there is no program
  std::optional<solver::PriceLine> line;  // of the program that it found; none: it found none
  bool known = false;                     // a program that it was told of, or found before
  bool limited = false;                   // it stopped at its limit of states
};

struct PlaneRules {
  std::function<Seconds()> step;  // that the bound is of; programs that are found may lower it
  double gap = 0;                 // of the step: a bound that is nearer is enough
  double gain = 0;                // of the step: what a search must be able to prove more
  double reachable = 0;           // of the step: no search where known programs cost less than that
  int searches = 0;               // at most
  int limited = std::numeric_limits<int>::max();  // that may stop at their limit of states
  // Every other search is halfway to the weights that proved most: those that few programs ask for
  // are extreme, and searches there take long and prove little.
  bool halfway = false;
  double most_multiplier = 0;  // as far as CuttingPlanes::most may grow
};

struct CuttingPlanes {
  std::vector<solver::PriceLine> lines = {};  // of the programs that are known
  // In: where the first search is if no program is known. Out: where the last one was.
  solver::MaxMin at = {};
  std::vector<double> best = {};      // weights that proved most; in: to start from, or empty
  double most = 0;                    // of a multiplier; grows where no known program fits
  Seconds bound = 0;                  // in: proven before; infinite: there is no program
  bool raised = false;                // `best` is of a search here
  std::vector<size_t> cheapest = {};  // lines that keep the bound low
};

// Searches while `go_on` says so and the rules do.
void raise_bound(const PlaneRules& rules, const std::function<bool()>& go_on,
                 const std::function<PlaneSearch(const solver::MaxMin&)>& search,
                 CuttingPlanes* planes);

// The least bound of classes of programs. Takes the class of the least one out, unless it is enough
// or `most` were taken, and hands it to divide(class, &classes), which adds its parts, or itself;
// false: nothing more can be gained. Infinite: no class has a program.
template <typename Class, typename Enough, typename Divide>
Seconds branch_and_bound(std::vector<Class> classes, int most, Enough enough, Divide divide) {
  for (int i = 0; i < most && !classes.empty(); ++i) {
    const auto least =
        std::min_element(classes.begin(), classes.end(),
                         [](const Class& a, const Class& b) { return a.bound < b.bound; });
    if (enough(*least)) break;
    Class weak = std::move(*least);
    classes.erase(least);
    if (!divide(std::move(weak), &classes)) break;
  }
  Seconds bound = std::numeric_limits<double>::infinity();
  for (const Class& c : classes) bound = std::min(bound, c.bound);
  return bound;
}

}  // namespace motley::bounds

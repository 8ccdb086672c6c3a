// A bound for every plan there is: what its computation takes at least.
//
// Every element that an op makes is made by some device, so a plan gives each op's work w to the
// devices in shares that add up to at least 1; a share of it takes a device of type t no less than
// that part of a(t, w), the time of all of it without launch overhead, every tensor cut. The step
// is at least the busiest device's time, which is at least any average of them: for prices p > 0
// with the sum over devices of p = 1,
//
//     step >= sum over ops w of  min over types t of  p(t) a(t, w)
//
// The best prices are the duals of the fractional assignment of ops to devices; they are found by
// multiplicative steps, and each of them is a bound. Communication, idle time and the optimizer
// count nothing, so the gap to a pipeline's or grid's plan is its bubbles, messages and imbalance.
#pragma once

#include <vector>

#include "cost/cost.h"

namespace motley::bounds {

// `times`: how often the graph runs in a step (micro-batches).
Seconds compute_bound(const Theory& theory, const CostModel& model, int times = 1);
// The ops that it is of, equal ones together: [op][type] seconds.
std::vector<std::vector<Seconds>> compute_work(const Theory& theory, const CostModel& model,
                                               int times);

// The bound for given ops: a[op][type] seconds, count[type] devices.
Seconds assignment_bound(const std::vector<std::vector<Seconds>>& a, const std::vector<int>& count);

}  // namespace motley::bounds

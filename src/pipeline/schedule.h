// Launch counts of strict-order pipelines (HAPT section 4), exactly.
//
// A pipeline has S stages; stage i spends f_i on the forward pass of one micro-batch and b_i on its
// backward pass (t_i = f_i + b_i). Link i carries activations from stage i to i+1 in cF_i and
// gradients back in cB_i, one message at a time in each direction. Stage i launches N_i forward
// passes in warm-up, then alternates one backward, one forward, and drains. It holds the
// activations of N_i micro-batches.
//
// Such a pipeline is a timed event graph: B of micro-batch m follows F of m + N_i - 1 on stage i,
// and F of m follows B of m - N_i. Its elementary circuits are one task after itself and the round
// trips between two stages i < j, which last D_ij and advance by N_i - N_j + 1 micro-batches. Hence
// the steady-state period
//
//   period(N) = max{ t_i, cF_i, cB_i, max over i<j of D_ij / (N_i - N_j + 1) }
//   D_ij      = sum over k=i..j of t_k + sum over k=i..j-1 of (cF_k + cB_k)
//
// so that counts reach a period p iff N_i >= N_j - 1 + D_ij / p for all i < j, and there is a least
// solution with N_S = 1, found backwards in O(S) (all in seconds):
//
//   Z_S = t_S;   Y_i = Z_{i+1} + t_i + cF_i + cB_i;   N_i = max(1, ceil(Y_i / p))
//   Z_i = max(Y_i, (N_i - 1) p + t_i)
//
// Both are compared with simulation and with the O(S^2) constraints in schedule_test.cc.
//
// A stage may split its backward pass: w_i of b_i, gradients of weights, is a pass of its own that
// nothing waits for (zero-bubble schedules; Qi et al. 2023). Then it takes B of micro-batch m, W of
// m - L_i, F of m + N_i in turn, and what is left of W at the end. It holds N_i + L_i micro-batches.
// Of a round trip only the first stage's W is left,
//
//   D_ij = sum over k=i..j of t_k - sum over k=i+1..j of w_k + links
//   Z_S = t_S - w_S;   Z_i = max(Y_i - w_i, (N_i - 1) p + t_i - w_i)
//
// with Y_i and N_i as above. The L_i do not change the period, but how soon gradients go back in
// the beginning, and what is left to do in the end.
#pragma once

#include <string>
#include <vector>

#include "core/pass_kind.h"
#include "core/units.h"

namespace motley::pipeline {

struct StageTime {
  Seconds forward = 0, backward = 0;  // of one micro-batch; recomputation belongs to backward
  Seconds weights = 0;                // of backward: what may be a pass of its own
  Seconds total() const { return forward + backward; }
};

struct LinkTime {
  Seconds forward = 0, backward = 0;  // activations down, gradients up
  Seconds total() const { return forward + backward; }
};

struct Pipeline {
  std::vector<StageTime> stages;
  std::vector<LinkTime> links;       // one fewer than stages
  std::vector<int> in_flight_limit;  // [stage], at least 1; empty: none
  std::vector<double> waiting;       // [stage] what a micro-batch holds between its backward pass
                                     // and its gradients of weights, in that of one in flight;
                                     // empty: 1
  std::vector<Seconds> epilogue;     // [stage] after its last backward pass, e.g. to reduce
                                     // gradients; empty: none
  int size() const { return static_cast<int>(stages.size()); }
};

// Steady-state period of launch counts; with `split` of stages that split their backward passes.
// REQUIRES: counts do not increase along the pipeline.
Seconds period(const Pipeline& pipeline, const std::vector<int>& counts, bool split = false);

// max{ t_i, cF_i, cB_i }: no schedule has a shorter period.
Seconds least_period(const Pipeline& pipeline);

// Relative slack of the ceiling in launch counts, so that rounding errors do not add a launch.
constexpr double kCountSlack = 1e-12;

// One step of the recursion: the launch state Z and count of a stage in front of a suffix of state
// `next`, `gap` being cF + cB of the link between them.
struct Launch {
  Seconds state = 0;
  int count = 1;
};
Launch launch_last(Seconds total, Seconds weights = 0);
Launch launch_before(const Launch& next, Seconds total, Seconds gap, Seconds target,
                     Seconds weights = 0);

// The elementwise least counts whose period is at most `target` (up to kCountSlack).
// REQUIRES: target >= least_period.
std::vector<int> exact_counts(const Pipeline& pipeline, Seconds target, bool split = false);

// The least period that counts within in_flight_limit can reach, and the least counts that reach
// it. Bisection on the target, O(S) each.
struct ExactCounts {
  std::vector<int> counts;
  Seconds period = 0;
};
ExactCounts exact_counts(const Pipeline& pipeline, bool split = false);

// No schedule of B micro-batches within the limits is shorter than
//   max over stages j of   head_j + B t_j + tail_j                 the stage is busy
//   max over links         sum (t + cF + cB) + (B - 1) c           the link is
//   max over stages j of   head_j + B R_j / limit_j + tail_j       its memory is (R_j: round trip)
// with head_j, tail_j the way of one micro-batch from stage 1 to j and back. Where stages may split
// their backward passes, w is on the way back of no stage but the first, a stage may have all that
// it holds of it to do behind its last backward pass, and then its end alone counts.
Seconds makespan_lower_bound(const Pipeline& pipeline, int micro_batches);

// ---- schedules ----------------------------------------------------------------------------------

struct Task {
  int micro_batch = 0;
  PassKind kind = PassKind::forward;
  friend bool operator==(const Task&, const Task&) = default;
};

struct Schedule {
  std::string kind;
  std::vector<int> counts;               // forward passes before the first backward, per stage
  std::vector<int> weights_behind;       // [stage] L; empty: no stage splits its backward pass
  std::vector<std::vector<Task>> order;  // [stage]
};

// The strict order of launch counts, with gradients of weights so far behind, if that is given.
// REQUIRES: counts do not increase along the pipeline.
Schedule strict_schedule(std::string kind, const std::vector<int>& counts, int micro_batches,
                         const std::vector<int>& weights_behind = {});

// Counts cut down to the limits and the number of micro-batches, still non-increasing.
std::vector<int> within_limits(const Pipeline& pipeline, std::vector<int> counts,
                               int micro_batches);

// Seconds of a pass of stage i under a schedule.
Seconds time_of(const Pipeline& pipeline, const Schedule& schedule, int i, PassKind kind);

// Throws UserError if sizes do not fit, a time is negative or not finite, or a limit is below 1.
void validate(const Pipeline& pipeline, const std::string& name);

}  // namespace motley::pipeline

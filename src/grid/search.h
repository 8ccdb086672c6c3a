// The search of the grid: degrees, micro-batch, placement, layers, recomputation and ZeRO (AMP
// algorithm 1), with every choice costed by one Estimator.
//
// Enumerated are tensor-parallel degrees that divide the heads, pipeline depths, dp = the devices
// left over / (pp * tp * cp) (so that counts that do not factor leave devices out), also with one
// kind of node left out, micro-batches that divide the global batch, placements (placement.h), ZeRO
// stages, recomputation and interleaving. Layers are assigned exactly for each (assign.h), against
// each stage's device speed and memory, then moved one at a time between neighbours while the exact
// estimate falls (finalists). Replicas that are not equally fast, or a batch that dp does not
// divide, get unequal numbers of micro-batches.
//
// Bounds: before layers are assigned, a candidate is bounded by its computation at perfect balance
// over its stages, with gradients and optimizer shared out as evenly, and dropped if its stages
// together need more memory than they have; after, by finish_bounds (schedule.h). Candidates are
// taken in the order of the first bound and the search stops when it exceeds the worst of the
// strategies kept, so that it is exact over what it enumerates up to the layer assignment's
// objective (eq. 5, not the 1F1B recurrence). `lower_bound` is what no enumerated strategy can
// beat, whatever its layers.
//
// Fixed choices (strategy.h) are honoured; a fixed `layers` whose sum is the number of blocks gets
// the layers before the first block in its first stage and those after the last in its last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "grid/assign.h"
#include "grid/estimate.h"
#include "grid/strategy.h"

namespace motley::grid {

constexpr int kFewDevices = 64;

struct SearchOptions {
  int global_batch = 0;
  Runtime runtime = Runtime::motley;
  Fixed fixed;
  bool memory = true;              // strategies must fit
  std::vector<int> zero = {0, 1};  // stages tried
  bool least_zero = false;         // of those, in order, only up to the first that fits
  std::vector<Recompute> recompute = {Recompute::none, Recompute::full};
  std::vector<int> interleave = {1};
  std::vector<int> cp = {1}, ep = {1};
  double least_used = 0.7;      // share of the devices a strategy must use
  bool heuristic_only = false;  // no refinement of placement and layers of the finalists
  // Placements enumerated for each finalist on up to kFewDevices devices, in proportion fewer on
  // more; 0: none.
  int64_t enumerate_limit = 300;
  int anneal_steps = 60;  // of each finalist's placement, on clusters of mixed nodes
  uint64_t seed = 0;
  int keep = 10;    // ranked strategies returned
  int threads = 1;  // what is found does not depend on it, counters may
  Deadline deadline;
};

struct Candidate {
  Strategy strategy;
  Estimate estimate;
};

struct SearchCounters {
  int64_t enumerated = 0, bounded = 0, infeasible = 0, estimated = 0, assign_solves = 0;
  SearchCounters& operator+=(const SearchCounters& other);
};

struct SearchResult {
  std::vector<Candidate> ranked;  // best first; different degrees, micro-batch or options
  Seconds lower_bound = 0;
  std::string stop_reason;  // "exhausted", "bound" or "time limit"
  std::string reason;       // why nothing fits, if `ranked` is empty
  SearchCounters counters;
  Seconds seconds = 0;
};

// Throws UserError for fixed choices that no strategy can have.
SearchResult search(const Estimator& estimator, const SearchOptions& options);

// Whether some layers may fit into the stages' memory, which is all of the mesh that is looked at:
// with as few micro-batches in flight as replicas can have, and stages without a block allowed.
bool may_fit(const Estimator& estimator, int global_batch, const Mesh& mesh, Strategy strategy);

// The exact assignment of a strategy's degrees and placement; false if no stages fit.
bool assign(const Estimator& estimator, const Mesh& mesh, bool memory, Strategy* strategy,
            SearchCounters* counters);

// Simulated annealing over swaps of (stage, replica) groups, used or left out (AMP section 4.2).
// Layers are assigned anew for every placement. Returns the best seen, the start included.
Candidate anneal_placement(const Estimator& estimator, const Candidate& start, bool memory,
                           uint64_t seed, int steps, SearchCounters* counters);

// Shares `total` micro-batches out so that the largest count * per_micro_batch is least; every
// replica gets at least one. REQUIRES: total >= number of replicas.
std::vector<int> share_micro_batches(int total, const std::vector<double>& per_micro_batch);

// Micro-batches of every replica, in proportion to its speed; false if the batch cannot be cut so.
bool give_micro_batches(const Estimator& estimator, int global_batch, const Mesh& mesh,
                        Strategy* strategy);

// Moves one layer at a time over a stage boundary while the exact estimate falls.
void polish(const Estimator& estimator, bool memory, Candidate* candidate,
            SearchCounters* counters);

// A list of fixed stages that counts blocks only is completed to all layers.
std::vector<int> expand_stages(const Model& model, std::vector<int> stages);

std::vector<int> divisors(int n);

}  // namespace motley::grid

// Programs of stages: for each the best that leaves room for its micro-batches in flight.
//
// Where the best program of all does not leave it, it computes as few of its blocks again as do, if
// it may. Else one with all parameters cut may do, or one found under the memory that the other
// micro-batches leave. Equal stages are planned once.
#pragma once

#include <atomic>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "planner/composition.h"
#include "planner/groups.h"
#include "planner/options.h"
#include "planner/program_search.h"

namespace motley::planner {

// What replicas divide at a level, and the share of it that one keeps; or level 3.
struct Divided {
  int level = 0;
  double share = 1;
  auto operator<=>(const Divided&) const = default;
};

// A stage on a group, with `in_flight` micro-batches in one part in `stages_per_device` of the
// memory.
struct StageTask {
  const Theory* theory;
  int number;                  // of its graph (StagePrograms::numbers_of)
  std::string strategy;        // as in PlanOptions
  std::vector<double> ratios;  // fixed; empty: free, or what the strategy says
  const DeviceGroups::Kind* group;
  int stages_per_device, micro_batches, in_flight;
  int fewer;  // in flight, if there is no room for `in_flight`; if there is none for these, 1
  Again again;
  bool thorough;
  Seconds worth;  // of all micro-batches: no program is fitted into memory that takes longer
  Divided divided;
  Bytes fixed_bytes = 0;    // that its devices hold all the time: the batch
  int exchanged_among = 1;  // groups that exchange gradients at the end of a step
  bool replicas = false;    // there are several, which sum gradients
  // Whether parameters are cut and gathered, and gradients scattered, in every pass.
  bool pieces() const { return divided.level == 3 && group->cluster.size() > 1; }
};

// What is tried for stages whose best program does not fit into memory: nothing, one with all
// parameters cut that is hardly slower, or all there is, which takes long.
enum class Effort : uint8_t { none, lean, all };

class StagePrograms {
  // Graph, group, stages per device, count, in flight, again, thorough, divided.
  using StageKey = std::tuple<int, int, int, int, int, Again, bool, Divided>;

 public:
  // Both outlive this.
  StagePrograms(const PlanOptions& request, ProgramSearch* search)
      : request_(request), search_(*search), threads_(request.threads) {}

  // [stage] Graphs of one number are the same but for names, and planned by the same of `strategies`.
  std::vector<int> numbers_of(const PipelinePlan& plan, const std::vector<std::string>& strategies);

  // What is found beside other threads, and what was refused.
  class Draft {
   public:
    // Begins with the last stage, so that like ones are not worked out at the same time elsewhere.
    bool backwards = false;

   private:
    friend StagePrograms;
    std::map<StageKey, Planned> stages_;
    std::set<StageKey> refused_;
  };

  // [task] The best that fit; what it points to stays. Returns the first task in whose way
  // something is, or -1, and `*why`. With a draft, stages that are found are known to it alone, and
  // threads may have drafts of their own while effort is `none`: what they ask for twice
  // is searched for once.
  int find(const std::vector<StageTask>& tasks, std::vector<const Planned*>* found,
           std::string* why, Draft* draft = nullptr);
  // Whether it is as if it had been found now: nothing was refused that is known by now.
  bool holds(const Draft& draft) const;
  // Its stages are known from now on, unless they were.
  void take(Draft&& draft);

  // Whether the best program of some stage did not fit into memory.
  bool limited() const { return was_limited_; }

  // Whether some stage takes longer than it is worth, even with more memory.
  bool slow() const { return was_slow_; }

  // Until told otherwise. Stages that are refused with less than `all` are planned again when they
  // are next asked for.
  void set_effort(Effort effort) { effort_ = effort; }

  // Of searches; as PlanOptions say, until told otherwise.
  void set_threads(int threads) { threads_ = threads; }

 private:
  // `memory_price`: of a like stage, in; of this one, out. `lean`: parameters and their state are
  // cut wherever they can be.
  Planned search(const StageTask& task, const CostModel& model, bool memory_limit, bool lean,
                 double* memory_price, solver::WarmStart* warm);
  // Of a type of devices: what a program lacks, what other micro-batches take, and its own peak.
  struct Shortage {
    Bytes lack = 0, others = 0, peak = 0;
  };
  // A program as it runs: with pieces held, and blocks computed again.
  struct Run {
    Planned planned;  // with its memory, if nothing is divided
    std::vector<Shortage> shortages;
    bool fits() const;
    Bytes lack() const;  // of the type that lacks most
  };
  MemoryCost memory_with(const StageTask& task, const Planned& planned,
                         const ZeroShare& kept) const;
  Run measured(const StageTask& task, Planned as_run) const;
  // As few blocks computed again as fit, if any do; else what lacks least.
  Run run_of(const StageTask& task, const Planned& found) const;
  // Refused for what it lacks: "V100 lacks 3 GiB, T4 lacks 5 GiB".
  static Planned too_large(const StageTask& task, const Run& run);
  // With pieces held, if they are to be; once, with `blocks` blocks computed again.
  static Planned as_run(const StageTask& task, Planned found, int blocks = 0);
  // The best program regardless of memory; of equal graphs and groups once. Unless told to wait,
  // nothing if another thread searches for it.
  const Planned* unlimited(const StageTask& task, bool lean, solver::WarmStart* warm,
                           bool wait = true);
  // Finds it for a stage, and the lean one beside it if that will be asked for.
  bool plan_unlimited(const StageTask& task, bool wait);
  // Finds what plan() will ask for first, for all tasks at the same time.
  void plan_unlimited(const std::vector<StageTask>& tasks, bool backwards);
  // The best that fits.
  Planned plan(const StageTask& task);

  const PlanOptions& request_;
  ProgramSearch& search_;
  std::atomic<int> threads_;
  std::map<std::string, int> numbers_;  // of graphs
  struct Unlimited {
    std::mutex mutex;  // of what follows
    bool known = false;
    Planned planned;
  };
  std::map<std::tuple<int, int, int, bool>, Unlimited> unlimited_;  // graph, group, count, lean
  // Graph, group, count, and whether pieces are held.
  std::map<std::tuple<int, int, int, bool>, std::vector<Planned>> limited_;
  // Likewise, of groups of one type: the memory below which nothing fits.
  std::map<std::tuple<int, int, int, bool>, Bytes> unfit_;
  std::map<int, double> memory_price_;  // by group
  static StageKey key_of(const StageTask& task);
  // What is known of a stage, to the draft too; null: nothing.
  const Planned* known_of(const StageKey& key, const Draft* draft) const;
  std::map<StageKey, Planned> stages_;
  std::mutex mutex_;  // of the maps above, while stages are planned: threads have groups of
                      // their own, and so entries, or drafts
  std::atomic<bool> was_limited_ = false, was_slow_ = false;
  Effort effort_ = Effort::all;
};

}  // namespace motley::planner

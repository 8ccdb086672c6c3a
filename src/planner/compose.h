// From a choice of stages to a plan: which layers on which devices, how many micro-batches to whom.
//
// What the choice leaves open is found here: every stage's SPMD program and shares, planned once
// per different (stage, group of devices) and cut down to the memory that the micro-batches in
// flight leave (stage_programs.h); the warm-up counts, the best in the event simulator among all
// schedules of pipeline/ under the devices' memory; and how gradients are summed over replicas.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "plan/plan.h"
#include "planner/batch_step.h"
#include "planner/composition.h"
#include "planner/groups.h"
#include "planner/layered_graph.h"
#include "planner/options.h"
#include "planner/program_search.h"
#include "planner/stage_programs.h"

namespace motley::planner {

// A micro-batch's graph with its layers, and the stages that were planned of it.
class PlanBuilder : public LayeredGraph {
 public:
  // As of LayeredGraph. REQUIRES: step->of(samples).
  PlanBuilder(const PlanOptions& request, DeviceGroups* groups, std::shared_ptr<BatchStep> step,
              int64_t samples, int layers, SearchCache* cache = nullptr)
      : LayeredGraph(request, groups, {step->of(samples), &step->of(samples)->graph},
                     step->layers(samples, layers == kBlockLayers ? layers : std::max(0, layers)),
                     cache),
        step_(std::move(step)),
        programs_(this->request(), &search()) {}

  // The plan, simulated; nothing and the reason if it does not fit. With drafts of their own,
  // threads may compose at the same time.
  std::unique_ptr<Plan> compose(const Composition& composition, const std::string& engine,
                                std::string* reason, StagePrograms::Draft* draft = nullptr);

  // The plan at the least level of ZeRO from the composition's own to `most` at which it fits, which
  // the composition then has; nothing and the reason if there is none.
  std::unique_ptr<Plan> compose_divided(Composition* composition, int most,
                                        const std::string& engine, std::string* reason,
                                        StagePrograms::Draft* draft = nullptr);
  bool holds(const StagePrograms::Draft& draft) const { return programs_.holds(draft); }
  void take(StagePrograms::Draft&& draft) { programs_.take(std::move(draft)); }

  int planned() const { return search().count(); }  // program searches
  // Whether the best program of some stage did not fit into memory.
  bool limited() const { return programs_.limited(); }
  // As of StagePrograms.
  bool slow() const { return programs_.slow(); }
  void set_effort(Effort effort) { programs_.set_effort(effort); }
  void set_threads(int threads) { programs_.set_threads(threads); }

 private:
  class Composer;
  // The reduction over all devices of a stage, [replica] its ranks, of tensors of `bytes` in all.
  const ReductionProgram& joint_reduction(const net::Groups& ranks, Bytes bytes);

  std::shared_ptr<BatchStep> step_;
  StagePrograms programs_;
  std::mutex mutex_;  // of what follows
  std::map<net::Groups, ReductionProgram> joint_;
};

}  // namespace motley::planner

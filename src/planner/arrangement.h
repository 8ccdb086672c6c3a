// A plan as training frameworks see one: which blocks of the model are a stage, over how many
// devices a stage divides its tensors or its batch, and how many micro-batches go through.
//
//   2 stages of 7 and 5 blocks, each on 2 devices that divide tensors, in 3 replicas that take 4
//   micro-batches of 2 samples: pp=2 tp=2 dp=3
//
// Plans say more than that. read_arrangement() tells whether one is no more than that; Arranger
// makes the plan of an arrangement, always the same one, so that what was written for a framework
// (exporters/) and read back is the plan that it was.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/compose.h"

namespace motley::planner {

// What the devices of a stage divide.
enum class Inside {
  batch,    // rows of a micro-batch; parameters are whole (data parallelism)
  experts,  // rows, and the experts of the layers that have them
  pieces,   // rows, and parameters, which are gathered where they are used (ZeRO 3, FSDP)
  tensors,  // matrices; the batch is whole (tensor parallelism)
};
const char* to_string(Inside inside);

struct ArrangedStage {
  Inside inside = Inside::batch;
  int blocks = 0;  // of the model; the first stage has what is in front, the last what follows
  bool recompute = false;
  int warm_up = 1;
  std::vector<std::vector<int>> devices;  // [replica] of the cluster, as many in each
  int width() const { return static_cast<int>(devices[0].size()); }
  int tp() const { return inside == Inside::tensors ? width() : 1; }
  int dp() const {  // replicas included
    return static_cast<int>(devices.size()) * (inside == Inside::tensors ? 1 : width());
  }
};

struct Arrangement {
  int64_t micro_batch = 1;         // samples that a replica takes at a time
  std::vector<int> micro_batches;  // [replica]
  int zero = 0;                    // the level at which replicas divide state
  int interleave = 1;              // stages of a device
  int split = -1;                  // the first stage that splits its backward passes; none: -1
  std::string schedule = "1f1b";   // of warm-up passes; empty: another
  std::vector<double> shares;  // [device] of the batch, of one stage in one replica; empty: equal
  // Of these the planner chooses, and reading a plan sets neither: the best shares of one program
  // in one pass, and the best warm-up passes of any schedule.
  bool balanced = false, any_schedule = false;
  std::vector<ArrangedStage> stages;

  int pp() const { return static_cast<int>(stages.size()) / interleave; }
  int replicas() const { return static_cast<int>(micro_batches.size()); }
  int64_t batch() const;
  // Stages, degrees and micro-batch are the same everywhere.
  bool rectangle() const;
  bool pipelined() const { return stages.size() > 1; }
};
// "pp=2,dp=3,tp=2,mbs=2,blocks=7/5", and what differs from the defaults.
std::string to_string(const Arrangement& arrangement);

// Nothing and the reason, a sentence, if the plan has what no arrangement has. REQUIRES: check(plan,
// false) finds nothing.
std::optional<Arrangement> read_arrangement(const Plan& plan, std::string* reason);

// Blocks of a plan's model, in words of frameworks its layers.
int count_blocks(const Graph& graph);

// Makes plans of arrangements of one model on one cluster.
class Arranger {
 public:
  // `planned`: with reduction programs, which frameworks do not have. The cluster outlives it.
  Arranger(const PlanOptions& options, const Cluster& cluster, std::shared_ptr<BatchStep> step,
           bool planned = false);

  // The plan, or nothing and the reason. `free`: the programs of stages are not restricted to what
  // the arrangement says, nor their shares. Throws TimeIsUp.
  std::unique_ptr<Plan> make(const Arrangement& arrangement, const std::string& engine,
                             std::string* reason, bool free = false);

  // Of micro-batches of so many samples, its layers being blocks; null: the model does not allow it.
  PlanBuilder* builder(int64_t samples);
  const BatchStep& step() const { return *step_; }

 private:
  std::unique_ptr<Plan> one_program(const Arrangement& arrangement, const std::string& engine,
                                    std::string* reason) const;

  PlanOptions options_;
  const Cluster& cluster_;
  DeviceGroups groups_;
  std::shared_ptr<BatchStep> step_;
  SearchCache cache_;
  std::map<int64_t, std::unique_ptr<PlanBuilder>> builders_;
};

}  // namespace motley::planner

// motley run --elastic as a worker of torchrun, which starts all workers again when one is lost or a machine comes.
//
//   torchrun --nnodes=1:4 --nproc_per_node=8 --max_restarts=10 ... --no-python motley run plan.json --elastic
//
// In every attempt the workers say which device each of them is: those that were there before stay what they were, new ones
// take devices that nobody has. For the devices that are there rank 0 finds a plan, or has made it beforehand. Every worker leaves its
// pieces in memory of its machine after each step (runtime/recent.h), and what machines have is given to all before
// they go on. The batch and the order of samples stay.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/part_planner.h"
#include "comm/gloo.h"
#include "plan/plan.h"

namespace motley {

class ElasticWorker {
 public:
  // All workers of the attempt together. `plan`: of all devices that there may be. Throws UserError where no launcher starts
  // workers again, or more workers come than the plan has devices; as PartPlanner::get.
  ElasticWorker(const Plan& plan, const Rendezvous& where);
  ~ElasticWorker();
  ElasticWorker(const ElasticWorker&) = delete;
  ElasticWorker& operator=(const ElasticWorker&) = delete;

  // Whether the plan of this attempt has work for this worker.
  bool works() const { return works_; }
  // Of the devices that are there. Its workers meet at place().
  const Plan& plan() const { return plan_; }
  const Rendezvous& place() const { return place_; }
  const std::string& folder() const { return folder_; }
  int attempt() const { return attempt_; }

  // Rank 0 of the plan makes plans for the loss of each machine from now on, when nobody else wants the cores.
  void prepare();
  // When training is over, also for a worker without work: waits for the others, and leaves nothing behind. Collective.
  void finish();

 private:
  struct Row;  // what a worker says of itself
  void take_devices(const std::vector<Row>& rows);
  void share_pieces(const std::vector<Row>& rows);
  void find_plan(const std::vector<Row>& rows, const Rendezvous& where);

  const Plan& whole_;
  std::string folder_;
  int attempt_ = 0;
  std::unique_ptr<ProcessCommunicator> all_;
  std::vector<int> device_of_;         // [rank]
  std::vector<std::string> machines_;  // [rank]
  std::unique_ptr<PartPlanner> planner_;
  std::vector<int> devices_, used_;
  bool works_ = false;
  Plan plan_;
  Rendezvous place_;
};

}  // namespace motley

// Plans for parts of a cluster while workers train: each is made by a process of its own, `motley plan`.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "plan/plan.h"

namespace motley {

class PartPlanner {
 public:
  // Of the model, batch and optimizer of `plan`, for devices of `cluster`, numbered as in `plan`'s. Files are
  // written into `folder`, which is made.
  PartPlanner(const Plan& plan, Cluster cluster, std::string folder);
  ~PartPlanner() { stop(); }
  PartPlanner(const PartPlanner&) = delete;
  PartPlanner& operator=(const PartPlanner&) = delete;

  // A plan for these devices of the cluster; it may leave some of them out.
  struct Found {
    std::string file;
    std::vector<int> devices;  // that it uses, in the order of its workers
    Seconds step_s = 0;        // predicted
  };

  // Plans for each of these sets of devices, in the background, when nobody else wants the cores.
  void prepare(std::vector<std::vector<int>> sets);
  // Throws std::runtime_error if there is none.
  Found get(const std::vector<int>& devices);
  // The same without what goes on in the background; another thread may stop() it.
  Found search(const std::vector<int>& devices);
  void stop();

 private:
  bool twice(const std::vector<int>& devices) const;
  std::string name(const std::vector<int>& devices, const char* ending) const;
  std::optional<Found> found(const std::vector<int>& devices) const;
  void try_for(const std::vector<int>& devices, double limit, bool twice);
  bool plan_for(const std::vector<int>& devices, double limit, bool idle, bool twice);

  const Plan& plan_;
  const Cluster cluster_;
  const std::string folder_;
  std::mutex mutex_;
  pid_t running_ = -1;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace motley

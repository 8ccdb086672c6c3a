#include "counted.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/trainer.h"

namespace motley {

namespace {

// What a thread has allocated, and the most it had at once; others may free it.
class Counted final : public c10::MemoryReportingInfoBase {
 public:
  // Versions of libtorch differ in which of these they call.
  void reportMemoryUsage(void* at, int64_t size, int64_t, int64_t, c10::Device) { add(at, size); }
  void reportMemoryUsage(void* at, int64_t size, size_t, size_t, c10::Device) { add(at, size); }
  bool memoryProfilingEnabled() const override { return true; }
  ~Counted() override {
    const std::lock_guard lock(mutex_);
    std::erase_if(owner_, [this](const auto& entry) { return entry.second == this; });
  }
  HeldBytes held() const { return {static_cast<double>(most_), static_cast<double>(held_)}; }
  void start() { most_ = held_; }

 private:
  void add(void* at, int64_t size) {
    const std::lock_guard lock(mutex_);
    // Memory that is freed where nobody counts may be allocated again.
    if (size > 0) owner_[at] = this;
    const auto owner = owner_.find(at);
    if (owner == owner_.end()) return;
    Counted& counted = *owner->second;
    counted.held_ += size;
    counted.most_ = std::max(counted.most_, counted.held_);
    if (size < 0) owner_.erase(owner);
  }
  static std::mutex mutex_;
  static std::map<void*, Counted*> owner_;
  int64_t held_ = 0, most_ = 0;
};
std::mutex Counted::mutex_;
std::map<void*, Counted*> Counted::owner_;

}  // namespace

std::vector<HeldBytes> held_by_workers(const Plan& plan) {
  const int workers = plan.cluster.size();
  std::vector<HeldBytes> held(workers);
  std::vector<std::shared_ptr<Counted>> counts;
  for (int i = 0; i < workers; ++i) counts.push_back(std::make_shared<Counted>());
  run_thread_group(workers, [&](Communicator& group) {
    const auto counted = counts[group.rank()];
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counted);
    Trainer trainer(plan, group, {});
    trainer.step();
    counted->start();
    trainer.step();
    held[group.rank()] = counted->held();
  });
  return held;
}

}  // namespace motley

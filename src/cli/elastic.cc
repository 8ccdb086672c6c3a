#include "cli/elastic.h"

#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "cli/part_planner.h"
#include "cli/replanning.h"
#include "comm/gloo.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/units.h"
#include "runtime/recent.h"

namespace motley {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

namespace {

constexpr const char* kFolderVariable = "MOTLEY_RECENT";
constexpr const char* kAttemptVariable = "MOTLEY_ATTEMPT";

// In memory; on disk where there is no such memory.
std::string parent_of_pieces() {
  return access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : fs::temp_directory_path().string();
}

// A folder of this run. Those of runs that were killed are removed.
class RunFolder {
 public:
  explicit RunFolder(const std::string& parent) {
    const std::string prefix = fmt::format("motley-{}-", getuid());
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(parent, error)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(prefix)) continue;
      const pid_t owner = std::atoi(name.c_str() + prefix.size());
      if (owner > 0 && kill(owner, 0) != 0 && errno == ESRCH) fs::remove_all(entry.path(), error);
    }
    std::string name = fmt::format("{}/{}{}-XXXXXX", parent, prefix, getpid());
    if (mkdtemp(name.data()) == nullptr)
      throw user_error("run", "--elastic: {} cannot be made: {}", name, std::strerror(errno));
    path_ = name;
  }
  ~RunFolder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// How an attempt ended: at its end, without a worker, or because the launcher wanted it.
struct Ended {
  bool left = false;
  int lost = -1;
  std::string why;
};

// Throws what launch_workers does where nobody can go on.
Ended end_of(const LaunchOptions& launch, bool others) {
  try {
    launch_workers(launch);
    return {};
  } catch (const WorkersLeft&) {
    return {true, -1, ""};
  } catch (const WorkerLost& e) {
    if (!others) throw;
    return {false, e.rank, e.what()};
  } catch (const WorkerMissing& e) {
    if (!others) throw;
    return {false, e.rank, e.what()};
  }
}

// Devices whose workers were lost, and when each is tried again: `wait` later, twice as long each
// time that it is lost once more. A wait of 0: never.
class Away {
 public:
  explicit Away(Seconds wait) : wait_(wait) {}
  void lost(int device) {
    const double times = std::exp2(times_lost_[device]++);
    if (wait_ > 0)
      back_at_[device] =
          Clock::now() +
          std::chrono::milliseconds(std::llround(std::min(1e3 * wait_ * times, kLongestWaitMs)));
  }
  // Those whose time has come.
  std::vector<int> due() const {
    std::vector<int> devices;
    for (const auto& [device, when] : back_at_)
      if (when <= Clock::now()) devices.push_back(device);
    return devices;
  }
  void is_back(int device) { back_at_.erase(device); }

 private:
  static constexpr double kLongestWaitMs = 86400e3;
  Seconds wait_;
  std::map<int, int> times_lost_;
  std::map<int, Clock::time_point> back_at_;
};

std::string since(Clock::time_point begun) {
  return format_seconds(std::chrono::duration<double>(Clock::now() - begun).count());
}

// What a device left in the attempts of `history` ([attempt] devices of its workers): gone with it.
void remove_pieces_of(int device, const std::vector<std::vector<int>>& history,
                      const std::string& folder) {
  for (size_t a = 0; a < history.size(); ++a)
    for (size_t r = 0; r < history[a].size(); ++r)
      if (history[a][r] == device) remove_recent(folder, static_cast<int>(a), static_cast<int>(r));
}

// What is left of `devices` by the loss of any one of `used`, or of all of a group.
std::vector<std::vector<int>> after_losses(const Cluster& cluster, const std::vector<int>& devices,
                                           const std::vector<int>& used) {
  std::vector<std::vector<int>> sets;
  const auto lose = [&](int first, int count) {
    std::vector<int> left = devices;
    std::erase_if(left, [&](int d) { return d >= first && d < first + count; });
    if (!left.empty() && left.size() < devices.size() &&
        std::find(sets.begin(), sets.end(), left) == sets.end())
      sets.push_back(left);
  };
  for (int device : used) lose(device, 1);
  for (const Group& group : cluster.groups)
    if (group.children.empty()) lose(group.first_device, group.device_count);
  return sets;
}

bool made_a_step(const std::string& folder, int attempt) {
  const std::vector<RecentStep> steps = recent_steps(folder, attempt + 1);
  return std::any_of(steps.begin(), steps.end(),
                     [&](const RecentStep& step) { return step.attempt == attempt; });
}

}  // namespace

std::optional<Attempt> attempt_of_worker() {
  const char *folder = std::getenv(kFolderVariable), *number = std::getenv(kAttemptVariable);
  if (!is_launched_worker() || folder == nullptr || number == nullptr) return std::nullopt;
  return Attempt{folder, std::atoi(number)};
}

void launch_elastic(const RunOptions& options, const Plan& plan, const LaunchOptions& first) {
  const RunFolder folder(parent_of_pieces());
  const RunFolder plans(fs::temp_directory_path());
  auto planner = std::make_unique<PartPlanner>(plan, plan.cluster, plans.path() + "/0");
  Replanning replanning(plan, plans.path());
  std::vector<int> devices(static_cast<size_t>(plan.cluster.size()));
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<int> used = devices;        // by the plan, in the order of its workers
  std::vector<std::vector<int>> history;  // [attempt] used
  Away away(options.return_after_s);
  std::vector<int> returning;
  int attempt = 0;
  bool slower = false;  // than the cluster of `plan` says: its file is not to be used any more
  RunOptions own = options;
  LaunchOptions launch = first;
  launch.environment[kFolderVariable] = folder.path();
  launch.leave = [&] {
    returning = made_a_step(folder.path(), attempt) ? away.due() : std::vector<int>();
    return !returning.empty() || (options.replan == "auto" && replanning.worth_it());
  };
  for (;; ++attempt) {
    launch.environment[kAttemptVariable] = std::to_string(attempt);
    launch.arguments = own.arguments();
    launch.workers = static_cast<int>(used.size());
    launch.places = used;
    set_fault_rank(-1, attempt);
    replanning.follow({folder.path(), attempt, own.plan, devices, used, options.steps});
    planner->prepare(after_losses(plan.cluster, devices, used));
    const Ended ended = end_of(launch, devices.size() > 1);
    if (!ended.left && ended.lost < 0) return;
    const auto begun = Clock::now();
    history.push_back(used);
    replanning.stop();
    if (options.replan == "auto" && !notes_of(folder.path(), attempt).empty()) {
      slower = true;
      planner = std::make_unique<PartPlanner>(plan, replanning.cluster(),
                                              fmt::format("{}/{}", plans.path(), attempt + 1));
    }
    PartPlanner::Found found;
    if (ended.left && !returning.empty()) {
      for (int device : returning) {
        away.is_back(device);
        devices.push_back(device);
      }
      std::sort(devices.begin(), devices.end());
      const bool whole = !slower && static_cast<int>(devices.size()) == plan.cluster.size();
      found = whole ? PartPlanner::Found{options.plan, devices, plan.predicted_step_s}
                    : planner->get(devices);
      std::fprintf(stderr,
                   "[run] going on with device %s again: planned for %zu of %zu devices in %s\n",
                   fmt::format("{}", fmt::join(returning, ", ")).c_str(), found.devices.size(),
                   devices.size(), since(begun).c_str());
    } else if (ended.left) {
      const Replanning::Result& better = replanning.result();
      found = better.plan;
      std::fprintf(stderr,
                   "[run] step %lld: goes on by a plan for the speed that device %d has now, %s a "
                   "step in the place of %s: planned in %s\n",
                   static_cast<long long>(better.note.step),
                   used.at(static_cast<size_t>(better.note.worker)),
                   format_seconds(found.step_s).c_str(), format_seconds(better.before).c_str(),
                   format_seconds(better.planning_s).c_str());
    } else {
      const int device = used.at(static_cast<size_t>(ended.lost));
      remove_pieces_of(device, history, folder.path());
      away.lost(device);
      std::erase(devices, device);
      found = planner->get(devices);
      std::fprintf(stderr,
                   "%s; going on without device %d: planned for %zu of the %zu that are left in "
                   "%s\n",
                   ended.why.c_str(), device, found.devices.size(), devices.size(),
                   since(begun).c_str());
    }
    own.plan = found.file;
    own.profile = found.file == options.plan ? options.profile : "";  // others' cluster has it
    used = found.devices;
  }
}

}  // namespace motley

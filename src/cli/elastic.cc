#include "cli/elastic.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
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

std::string since(Clock::time_point begun) {
  return format_seconds(std::chrono::duration<double>(Clock::now() - begun).count());
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
  RunOptions own = options;
  LaunchOptions launch = first;
  launch.environment[kFolderVariable] = folder.path();
  if (options.replan == "auto") launch.leave = [&] { return replanning.worth_it(); };
  for (int attempt = 0;; ++attempt) {
    launch.environment[kAttemptVariable] = std::to_string(attempt);
    launch.arguments = own.arguments();
    launch.workers = static_cast<int>(used.size());
    launch.places = used;
    set_fault_rank(-1, attempt);
    replanning.follow({folder.path(), attempt, own.plan, devices, used, options.steps});
    planner->prepare(devices, used);
    const Ended ended = end_of(launch, devices.size() > 1);
    if (!ended.left && ended.lost < 0) return;
    const auto begun = Clock::now();
    history.push_back(used);
    replanning.stop();
    if (options.replan == "auto" && !notes_of(folder.path(), attempt).empty())
      planner = std::make_unique<PartPlanner>(plan, replanning.cluster(),
                                              fmt::format("{}/{}", plans.path(), attempt + 1));
    PartPlanner::Found found;
    if (ended.left) {
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
      for (size_t a = 0; a < history.size(); ++a)
        for (size_t r = 0; r < history[a].size(); ++r)
          if (history[a][r] == device)
            remove_recent(folder.path(), static_cast<int>(a), static_cast<int>(r));
      std::erase(devices, device);
      found = planner->get(devices);
      std::fprintf(stderr,
                   "%s; going on without device %d: planned for %zu of the %zu that are left in "
                   "%s\n",
                   ended.why.c_str(), device, found.devices.size(), devices.size(),
                   since(begun).c_str());
    }
    own.plan = found.file;
    own.profile.clear();  // what it says is in the plan's cluster
    used = found.devices;
  }
}

}  // namespace motley

#include "cli/elastic.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "cluster/part.h"
#include "comm/gloo.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/file.h"
#include "core/units.h"
#include "runtime/recent.h"

namespace motley {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

namespace {

constexpr const char* kFolderVariable = "MOTLEY_RECENT";
constexpr const char* kAttemptVariable = "MOTLEY_ATTEMPT";
constexpr double kPlanSeconds = 1;
// Beyond its time until a process that plans is taken to hang.
constexpr std::chrono::seconds kPlanPatience{5};
constexpr int kTries = 5;  // of planning for the same devices, where whoever does it is killed

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

// Makes plans for parts of a cluster, each by a process of its own.
class Planner {
 public:
  Planner(const Plan& plan, std::string folder) : plan_(plan), folder_(std::move(folder)) {}
  ~Planner() { stop(); }
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  // A plan for these devices of the cluster; it may leave some of them out.
  struct Found {
    std::string file;
    std::vector<int> devices;  // that it uses, in the order of its workers
  };

  // Plans for the loss of any one of `used`, of `devices`, in the background.
  void prepare(const std::vector<int>& devices, const std::vector<int>& used) {
    stop();
    stopping_ = false;
    if (devices.size() < 2) return;
    thread_ = std::thread([this, devices, used] {
      for (int lost : used) {
        std::vector<int> left = devices;
        std::erase(left, lost);
        if (stopping_) return;
        try {
          if (!found(left)) plan_for(left, kPlanSeconds, /*idle=*/true, twice(left));
        } catch (const std::exception&) {
          return;  // such as a full disk; they are made when they are needed
        }
      }
    });
  }

  // Throws std::runtime_error if there is none.
  Found get(const std::vector<int>& devices) {
    stop();
    stopping_ = false;
    for (double limit : {kPlanSeconds, 10 * kPlanSeconds}) try_for(devices, limit, twice(devices));
    if (!found(devices) && twice(devices)) {
      try_for(devices, 10 * kPlanSeconds, /*twice=*/false);
      if (found(devices))
        std::fprintf(stderr, "[run] what is left has no room for state kept twice\n");
    }
    const auto plan = found(devices);
    if (!plan)
      throw std::runtime_error(
          fmt::format("[run] no plan was found for the {} devices that are left; start again with "
                      "more, from a checkpoint if --checkpoint was given",
                      devices.size()));
    return *plan;
  }

  void stop() {
    stopping_ = true;
    {
      const std::lock_guard lock(mutex_);
      if (running_ > 0) kill(running_, SIGKILL);
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  bool twice(const std::vector<int>& devices) const {
    return plan_.redundancy > 0 && devices.size() > 1;
  }
  std::string name(const std::vector<int>& devices, const char* ending) const {
    return fmt::format("{}/plan-{}{}", folder_, fmt::join(devices, "-"), ending);
  }
  std::optional<Found> found(const std::vector<int>& devices) const {
    Found result{name(devices, ".json"), {}};
    if (!fs::exists(result.file)) return std::nullopt;
    const Json said = parse_json(read_file(name(devices, ".said"), size_t{1} << 26), "motley plan");
    for (const Json& d : said.at("devices")) result.devices.push_back(devices.at(d.get<size_t>()));
    return result;
  }
  // Again where whoever plans is killed.
  void try_for(const std::vector<int>& devices, double limit, bool twice) {
    for (int tries = 0; tries < kTries && !found(devices); ++tries)
      if (plan_for(devices, limit, /*idle=*/false, twice)) return;
  }
  // Whether the process came to its end, with a plan or without.
  bool plan_for(const std::vector<int>& devices, double limit, bool idle, bool twice) {
    const std::string cluster = name(devices, ".yaml");
    write_file(cluster, to_yaml(part_of(plan_.cluster, devices)));
    std::vector<std::string> words = {"motley",
                                      "plan",
                                      plan_.model,
                                      "--cluster",
                                      cluster,
                                      "--batch",
                                      std::to_string(plan_.batch),
                                      "--optimizer",
                                      to_string(plan_.optimizer),
                                      "--precision",
                                      plan_.precision == DType::bf16 ? "bf16" : "fp32",
                                      "--time-limit",
                                      fmt::format("{}", limit),
                                      "-o",
                                      name(devices, ".json"),
                                      "--json"};
    if (twice) words.insert(words.end(), {"--redundancy", "1"});
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const std::string program = fs::read_symlink("/proc/self/exe").string();
    const int said =
        open(name(devices, ".said").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const pid_t parent = getpid();
    pid_t pid;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) {
        close(said);
        return true;
      }
      pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        const sched_param none{};
        if (idle) sched_setscheduler(0, SCHED_IDLE, &none);
        const int null = open("/dev/null", O_RDWR);
        for (int fd : {STDIN_FILENO, STDERR_FILENO}) dup2(null, fd);
        dup2(said, STDOUT_FILENO);
        execv(program.c_str(), arguments.data());
        _exit(127);
      }
      running_ = pid;
    }
    close(said);
    if (const std::string fault = fault_due("replanning"); !fault.empty())
      kill(pid, fault == "stop" ? SIGSTOP : SIGKILL);
    wait_for(pid, Clock::now() + std::chrono::milliseconds(static_cast<int>(1000 * limit)) +
                      (idle ? 12 : 1) * kPlanPatience);
    const std::lock_guard lock(mutex_);  // nobody kills it any more, whoever has its number then
    running_ = -1;
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) fs::remove(name(devices, ".json"));
    return WIFEXITED(status);
  }

  // Until it has ended, or hangs and is killed.
  static void wait_for(pid_t pid, Clock::time_point until) {
    for (bool killed = false;;) {
      siginfo_t ended{};
      if (waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT | WNOHANG) == 0 &&
          ended.si_pid == pid)
        return;
      if (!killed && Clock::now() > until) killed = kill(pid, SIGKILL) == 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  const Plan& plan_;
  std::string folder_;
  std::mutex mutex_;
  pid_t running_ = -1;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Which worker is lost, and why; -1: the run came to its end. Throws what launch_workers does where
// nobody can go on.
std::pair<int, std::string> loss_of(const LaunchOptions& launch, bool others) {
  try {
    launch_workers(launch);
    return {-1, ""};
  } catch (const WorkerLost& e) {
    if (!others) throw;
    return {e.rank, e.what()};
  } catch (const WorkerMissing& e) {
    if (!others) throw;
    return {e.rank, e.what()};
  }
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
  Planner planner(plan, plans.path());
  std::vector<int> devices(static_cast<size_t>(plan.cluster.size()));
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<int> used = devices;        // by the plan, in the order of its workers
  std::vector<std::vector<int>> history;  // [attempt] used
  RunOptions own = options;
  LaunchOptions launch = first;
  launch.environment[kFolderVariable] = folder.path();
  for (int attempt = 0;; ++attempt) {
    launch.environment[kAttemptVariable] = std::to_string(attempt);
    launch.arguments = own.arguments();
    launch.workers = static_cast<int>(used.size());
    launch.places = used;
    set_fault_rank(-1, attempt);
    planner.prepare(devices, used);
    const auto [lost, reason] = loss_of(launch, devices.size() > 1);
    if (lost < 0) return;
    const auto begun = Clock::now();
    const int device = used.at(static_cast<size_t>(lost));
    history.push_back(used);
    for (size_t a = 0; a < history.size(); ++a)
      for (size_t r = 0; r < history[a].size(); ++r)
        if (history[a][r] == device)
          remove_recent(folder.path(), static_cast<int>(a), static_cast<int>(r));
    std::erase(devices, device);
    const Planner::Found found = planner.get(devices);
    own.plan = found.file;
    own.profile.clear();  // what it says is in the plan's cluster
    used = found.devices;
    std::fprintf(
        stderr, "%s; going on without device %d: planned for %zu of the %zu that are left in %s\n",
        reason.c_str(), device, used.size(), devices.size(),
        format_seconds(std::chrono::duration<double>(Clock::now() - begun).count()).c_str());
  }
}

}  // namespace motley

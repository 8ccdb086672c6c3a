#include "cli/part_planner.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "cluster/part.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/file.h"

namespace motley {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

namespace {

constexpr double kPlanSeconds = 0.8;  // with its start and end, a second
// Beyond its time until a process that plans is taken to hang.
constexpr std::chrono::seconds kPlanPatience{2};
constexpr int kTries = 5;  // of planning for the same devices, where whoever does it is killed

// Until it has ended, or hangs and is killed.
void wait_for(pid_t pid, Clock::time_point until) {
  for (bool killed = false;;) {
    siginfo_t ended{};
    if (waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT | WNOHANG) == 0 &&
        ended.si_pid == pid)
      return;
    if (!killed && Clock::now() > until) killed = kill(pid, SIGKILL) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

PartPlanner::PartPlanner(const Plan& plan, Cluster cluster, std::string folder)
    : plan_(plan), cluster_(std::move(cluster)), folder_(std::move(folder)) {
  fs::create_directories(folder_);
}

void PartPlanner::prepare(std::vector<std::vector<int>> sets) {
  stop();
  stopping_ = false;
  thread_ = std::thread([this, sets = std::move(sets)] {
    for (const std::vector<int>& devices : sets) {
      if (stopping_) return;
      try {
        if (!found(devices)) plan_for(devices, kPlanSeconds, /*idle=*/true, twice(devices));
      } catch (const std::exception&) {
        return;  // such as a full disk; they are made when they are needed
      }
    }
  });
}

PartPlanner::Found PartPlanner::get(const std::vector<int>& devices) {
  stop();
  stopping_ = false;
  return search(devices);
}

PartPlanner::Found PartPlanner::search(const std::vector<int>& devices) {
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

void PartPlanner::stop() {
  stopping_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (running_ > 0) kill(running_, SIGKILL);
  }
  if (thread_.joinable()) thread_.join();
}

bool PartPlanner::twice(const std::vector<int>& devices) const {
  return plan_.redundancy > 0 && devices.size() > 1;
}

std::string PartPlanner::name(const std::vector<int>& devices, const char* ending) const {
  return fmt::format("{}/plan-{}{}", folder_, fmt::join(devices, "-"), ending);
}

std::optional<PartPlanner::Found> PartPlanner::found(const std::vector<int>& devices) const {
  Found result{name(devices, ".json"), {}, 0};
  if (!fs::exists(result.file)) return std::nullopt;
  const Json said = parse_json(read_file(name(devices, ".said"), size_t{1} << 26), "motley plan");
  for (const Json& d : said.at("devices")) result.devices.push_back(devices.at(d.get<size_t>()));
  result.step_s = said.at("predicted_step_s").get<double>();
  return result;
}

// Again where whoever plans is killed.
void PartPlanner::try_for(const std::vector<int>& devices, double limit, bool twice) {
  for (int tries = 0; tries < kTries && !found(devices); ++tries)
    if (plan_for(devices, limit, /*idle=*/false, twice)) return;
}

// Whether the process came to its end, with a plan or without.
bool PartPlanner::plan_for(const std::vector<int>& devices, double limit, bool idle, bool twice) {
  const std::string cluster = name(devices, ".yaml");
  write_file(cluster, to_yaml(part_of(cluster_, devices)));
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
  const std::string program = fs::read_symlink("/proc/self/exe").parent_path() / "motley";
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

}  // namespace motley

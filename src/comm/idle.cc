#include "comm/idle.h"

#include <fmt/format.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/process.h"

namespace motley {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

namespace {

constexpr double kWorks = 0.01;                    // processors in use
constexpr double kWakes = 1, kBytes = 100 * 1000;  // a second
constexpr auto kStopped =
    std::chrono::seconds(2);  // between two looks: this process was stopped itself
constexpr size_t kMostProcesses = 4096;

std::atomic<int> waits{0};
std::atomic<int64_t> turns{0};
std::atomic<int64_t> turned_at{0};  // of the clock below

int64_t clock_ms() {
  return std::chrono::duration_cast<milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double seconds_of(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A thread, by the files in its folder.
struct Thread {
  bool runs = false, at_disk = false;
  int64_t wakes = 0, bytes = 0;
};
Thread thread_of(const std::string& folder) {
  Thread thread;
  std::string line;
  const auto number = [&] { return std::atoll(line.c_str() + line.find(':') + 1); };
  for (std::ifstream file(folder + "/status"); std::getline(file, line);) {
    if (line.starts_with("State:")) {
      thread.runs = line.find("R (") != std::string::npos;
      thread.at_disk = line.find("D (") != std::string::npos;
    }
    if (line.starts_with("voluntary_ctxt") || line.starts_with("nonvoluntary_ctxt"))
      thread.wakes += number();
  }
  for (std::ifstream file(folder + "/io"); std::getline(file, line);)
    if (line.starts_with("rchar:") || line.starts_with("wchar:")) thread.bytes += number();
  return thread;
}

// Of a process that may end meanwhile.
std::vector<pid_t> threads_of(pid_t process) {
  std::vector<pid_t> list;
  std::error_code error;
  fs::directory_iterator entry(fmt::format("/proc/{}/task", process), error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    list.push_back(std::atoi(entry->path().filename().c_str()));
  return list;
}

std::string folder_of(pid_t process, pid_t thread) {
  return fmt::format("/proc/{}/task/{}", process, thread);
}

// Seconds of processors that a process took.
double time_of(pid_t process) {
  double ticks = 0;
  for (const int field : {14, 15}) ticks += std::atof(process_field(process, field).c_str());
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// What this process started, and what that started.
std::set<pid_t> processes_below() {
  std::set<pid_t> found;
  std::vector<pid_t> open{getpid()};
  while (!open.empty() && found.size() < kMostProcesses) {
    const pid_t process = open.back();
    open.pop_back();
    for (const pid_t thread : threads_of(process)) {
      std::ifstream file(folder_of(process, thread) + "/children");
      for (pid_t child = 0; file >> child;)
        if (sched_getscheduler(child) != SCHED_IDLE && found.insert(child).second)
          open.push_back(child);
    }
  }
  return found;
}

}  // namespace

WaitsForOthers::WaitsForOthers() {
  turned_at = clock_ms();
  ++turns;
  ++waits;
}

WaitsForOthers::~WaitsForOthers() {
  --waits;
  turned_at = clock_ms();
  ++turns;
}

Activity::Done Activity::done() {
  Done all;
  const auto count = [&](pid_t process, pid_t id) {
    const Thread thread = thread_of(folder_of(process, id));
    all.bytes += thread.bytes;
    all.busy = all.busy || thread.at_disk;
    if (id != process) return;  // others run in the moment in which they wake this one
    all.busy = all.busy || thread.runs;
    all.wakes[process] = thread.wakes;
  };
  for (const pid_t id : threads_of(getpid()))
    if (id != gettid()) count(getpid(), id);
  all.seconds = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - seconds_of(CLOCK_THREAD_CPUTIME_ID);
  for (const pid_t child : processes_below()) {
    count(child, child);
    all.seconds += time_of(child);
  }
  return all;
}

Activity::Now Activity::look() {
  const Time now = std::chrono::steady_clock::now();
  const int64_t turned = turns;
  const bool waiting = waits > 0;
  const bool goes_on = turned != turns_ || waiting || now - looked_ > kStopped;
  turns_ = turned;
  looked_ = now;
  Now result;
  if (waiting) result.waiting = milliseconds(clock_ms() - turned_at);
  if (goes_on) {
    since_ = {};
    return result;
  }
  Done next = done();
  const double elapsed = std::chrono::duration<double>(now - since_).count();
  bool does = since_ == Time{} || next.busy || next.seconds - done_.seconds >= kWorks * elapsed ||
              static_cast<double>(next.bytes - done_.bytes) >= kBytes * elapsed ||
              next.wakes.size() != done_.wakes.size();
  for (const auto& [process, wakes] : next.wakes) {
    const auto before = done_.wakes.find(process);  // a new process is something done
    const int64_t more = before == done_.wakes.end() ? INT64_MAX : wakes - before->second;
    does = does || (more > 0 && static_cast<double>(more) >= kWakes * elapsed);
  }
  if (does) {
    since_ = now;
    done_ = std::move(next);
    return result;
  }
  result.idle = std::chrono::duration_cast<milliseconds>(now - since_);
  return result;
}

}  // namespace motley

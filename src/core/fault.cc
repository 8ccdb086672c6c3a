#include "core/fault.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

namespace motley {

namespace {

struct Fault {
  std::string action, point;
  int rank = 0, count = 1, attempt = 0;
};

std::vector<Fault> read_faults() {
  std::vector<Fault> faults;
  const char* text = std::getenv("MOTLEY_FAULTS");
  std::istringstream list(text == nullptr ? "" : text);
  for (std::string item; std::getline(list, item, ';');) {
    Fault fault;
    if (const size_t at = item.find('@'); at != std::string::npos) {
      fault.attempt = std::atoi(item.c_str() + at + 1);
      item.resize(at);
    }
    std::istringstream fields(item);
    std::string rank, count;
    std::getline(fields, fault.action, ':');
    std::getline(fields, fault.point, ':');
    std::getline(fields, rank, ':');
    std::getline(fields, count, ':');
    fault.rank = std::atoi(rank.c_str());
    fault.count = std::max(1, std::atoi(count.c_str()));
    faults.push_back(fault);
  }
  return faults;
}

const std::vector<Fault>& faults() {
  static const std::vector<Fault> list = read_faults();
  return list;
}

std::atomic<int> own_rank{-1}, own_attempt{0};
std::atomic<double> slowness{1};

}  // namespace

void set_fault_rank(int rank, int attempt) {
  own_rank = rank;
  own_attempt = attempt;
}

double fault_slowness() { return slowness.load(std::memory_order_relaxed); }

void fault_point(const char* point) {
  if (faults().empty()) return;
  static std::mutex mutex;
  static std::map<std::string, int> counts;
  const std::lock_guard lock(mutex);
  const int count = ++counts[point];
  for (const Fault& fault : faults()) {
    if (fault.point != point || fault.count != count || fault.rank != own_rank ||
        fault.attempt != own_attempt)
      continue;
    if (fault.action == "kill") std::raise(SIGKILL);
    if (fault.action == "stop") std::raise(SIGSTOP);
    if (fault.action == "slow") slowness = 2;
    if (fault.action == "delay") std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

}  // namespace motley

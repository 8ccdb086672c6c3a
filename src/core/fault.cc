#include "core/fault.h"

#include <fcntl.h>
#include <net/if.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

extern char** environ;

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

[[noreturn]] void impossible(const char* why) {
  std::fprintf(stderr, "MOTLEY_FAULTS: %s\n", why);
  std::abort();
}

// A namespace that the launcher made: nobody cuts off the machine itself.
void need_own_network() {
  if (std::getenv("MOTLEY_NETWORK") == nullptr)
    impossible("cut and part are for workers in network namespaces; give --emulate");
}

// Every interface but loopback goes down: nothing is refused, nothing comes through.
void cut_network() {
  need_own_network();
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct if_nameindex* const all = if_nameindex();
  if (fd < 0 || all == nullptr) impossible("the interfaces are not known");
  for (const struct if_nameindex* i = all; i->if_name != nullptr; ++i) {
    if (std::strcmp(i->if_name, "lo") == 0) continue;
    ifreq request{};
    std::strncpy(request.ifr_name, i->if_name, IFNAMSIZ - 1);
    if (ioctl(fd, SIOCGIFFLAGS, &request) != 0) impossible("an interface is not known");
    request.ifr_flags = static_cast<short>(request.ifr_flags & ~IFF_UP);
    if (ioctl(fd, SIOCSIFFLAGS, &request) != 0) impossible("an interface does not go down");
  }
  if_freenameindex(all);
  close(fd);
}

// What goes to other workers is dropped; the launcher has an address in the upper half (testbed/network.cc).
void cut_from_workers() {
  need_own_network();
  const char* words[] = {"ip", "route", "replace", "blackhole", "10.77.0.0/17", nullptr};
  pid_t pid = -1;
  int status = -1;
  if (posix_spawnp(&pid, "ip", nullptr, nullptr, const_cast<char**>(words), environ) != 0 ||
      waitpid(pid, &status, 0) != pid || status != 0)
    impossible("ip route failed");
}

std::string filler() {
  const char* folder = std::getenv("MOTLEY_FAULT_DISK");
  if (folder == nullptr) impossible("MOTLEY_FAULT_DISK is not set");
  return std::string(folder) + "/filler";
}

void fill_disk() {
  constexpr double kMost = 1 << 30;
  const std::string path = filler();
  struct statvfs disk {};
  if (statvfs(std::getenv("MOTLEY_FAULT_DISK"), &disk) != 0 ||
      static_cast<double>(disk.f_blocks) * static_cast<double>(disk.f_frsize) > kMost)
    impossible("MOTLEY_FAULT_DISK is not on a disk of at most 1 GiB");
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) impossible("the disk cannot be filled");
  const std::vector<char> block(1 << 16);
  for (size_t size = block.size(); size > 0; size /= 2)
    while (write(fd, block.data(), size) > 0) {
    }
  close(fd);
}

void suffer(const Fault& fault) {
  // For whoever measures how long it takes to go on.
  std::fprintf(stderr, "MOTLEY_FAULTS: %s at %s\n", fault.action.c_str(), fault.point.c_str());
  if (fault.action == "kill") std::raise(SIGKILL);
  if (fault.action == "stop") std::raise(SIGSTOP);
  if (fault.action == "slow") slowness = 2;
  if (fault.action == "hang") std::this_thread::sleep_for(std::chrono::hours(24));
  if (fault.action == "delay") std::this_thread::sleep_for(std::chrono::seconds(1));
  if (fault.action == "cut") cut_network();
  if (fault.action == "part") cut_from_workers();
  if (fault.action == "fill") fill_disk();
  if (fault.action == "free") std::remove(filler().c_str());
}

// Those of this process that are due when it comes to a point once more.
std::vector<Fault> due(const char* point) {
  static std::mutex mutex;
  static std::map<std::string, int> counts;
  const std::lock_guard lock(mutex);
  const int count = ++counts[point];
  std::vector<Fault> list;
  for (const Fault& fault : faults())
    if (fault.point == point && fault.count == count && fault.rank == own_rank &&
        fault.attempt == own_attempt)
      list.push_back(fault);
  return list;
}

}  // namespace

void set_fault_rank(int rank, int attempt) {
  own_rank = rank;
  own_attempt = attempt;
}

double fault_slowness() { return slowness.load(std::memory_order_relaxed); }

void fault_point(const char* point) {
  if (faults().empty()) return;
  for (const Fault& fault : due(point)) suffer(fault);
}

std::string fault_due(const char* point) {
  if (faults().empty()) return "";
  const std::vector<Fault> list = due(point);
  return list.empty() ? "" : list[0].action;
}

}  // namespace motley

#include "testbed/network.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "core/error.h"
#include "testbed/relay.h"

namespace motley {

namespace {

int open_own_namespace() { return open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC); }

// A new network namespace; -errno where that is not allowed.
int new_namespace() {
  int fd = -1;
  std::thread([&] {
    if (unshare(CLONE_NEWNET) != 0)
      fd = -errno;
    else if (fd = open_own_namespace(); fd < 0)
      fd = -errno;
  }).join();
  return fd;
}

constexpr const char* kInsideVariable = "MOTLEY_USER_NAMESPACE";

// Runs this very command line again in a user namespace in which it is root, and ends as it ends.
// Returns only if that is not possible, with the reason.
std::string enter_user_namespace() {
  if (getenv(kInsideVariable) != nullptr) return "not even as root of a user namespace";
  std::vector<std::string> words(1);
  if (FILE* file = fopen("/proc/self/cmdline", "re")) {
    for (int c; (c = fgetc(file)) != EOF;) {
      if (c == 0)
        words.emplace_back();
      else
        words.back() += static_cast<char>(c);
    }
    fclose(file);
  }
  words.pop_back();
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::string users = fmt::format("0 {} 1", geteuid()),
                    groups = fmt::format("0 {} 1", getegid());
  int out[2];
  MOTLEY_CHECK(pipe2(out, O_CLOEXEC) == 0, "pipe: {}", std::strerror(errno));
  const pid_t parent = getpid(), pid = fork();
  MOTLEY_CHECK(pid >= 0, "fork: {}", std::strerror(errno));
  if (pid == 0) {
    // Only a process of one thread may enter one, and after a fork there is one.
    auto put = [](const char* path, const std::string& text) {
      const int fd = open(path, O_WRONLY | O_CLOEXEC);
      return fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    };
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && unshare(CLONE_NEWUSER) == 0 && put("/proc/self/setgroups", "deny") &&
        put("/proc/self/uid_map", users) && put("/proc/self/gid_map", groups)) {
      setenv(kInsideVariable, "1", 1);
      execv("/proc/self/exe", arguments.data());
    }
    const int error = errno;
    _exit(write(out[1], &error, sizeof error) > 0 ? 1 : 2);
  }
  close(out[1]);
  int error = 0, status = 0;
  const bool failed = read(out[0], &error, sizeof error) > 0;
  close(out[0]);
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (failed) return fmt::format("a user namespace: {}", std::strerror(error));
  std::fflush(nullptr);
  if (WIFSIGNALED(status)) {
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
  }
  _exit(WEXITSTATUS(status));
}

// Runs `tool -batch -` in a namespace on the given lines. Empty, or what it complains of.
std::string batch(const char* tool, int space, const std::string& lines) {
  // The lines are in memory, so that a tool that is not there breaks no pipe.
  const int in = memfd_create("batch", MFD_CLOEXEC);
  int out[2];
  MOTLEY_CHECK(in >= 0 && pipe2(out, O_CLOEXEC) == 0, "pipe: {}", std::strerror(errno));
  MOTLEY_CHECK(write(in, lines.data(), lines.size()) == static_cast<ssize_t>(lines.size()) &&
                   lseek(in, 0, SEEK_SET) == 0,
               "memfd: {}", std::strerror(errno));
  const pid_t pid = fork();
  MOTLEY_CHECK(pid >= 0, "fork: {}", std::strerror(errno));
  if (pid == 0) {
    if (setns(space, CLONE_NEWNET) != 0) _exit(126);
    dup2(in, STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    dup2(out[1], STDERR_FILENO);
    for (const char* folder : {"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"}) {
      char path[64];
      std::strcpy(path, folder);
      std::strcat(path, tool);
      execl(path, tool, "-batch", "-", nullptr);
    }
    _exit(127);
  }
  close(in);
  close(out[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(out[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(n));
  close(out[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
    return fmt::format("{} is not installed (package iproute2)", tool);
  return fmt::format("{}: {}", tool, text.substr(0, text.find('\n')));
}

// What limits the traffic that leaves an interface.
std::string limit(const std::string& interface, BytesPerSecond rate) {
  return fmt::format(
      "qdisc add dev {0} root handle 1: htb default 1\n"
      "class add dev {0} parent 1: classid 1:1 htb rate {1}bit burst 15k cburst 15k quantum "
      "60000\n",
      interface, std::max<int64_t>(static_cast<int64_t>(rate * 8), 8000));
}

}  // namespace

struct Network::Impl {
  std::string mode, address;
  int hub = -1;
  std::vector<int> workers;
  Relay relay;

  Impl() = default;
  ~Impl() {
    if (hub >= 0) close(hub);
    for (int fd : workers) close(fd);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // On a thread of its own: in a user namespace there is no way back.
  template <typename F>
  static void inside(int space, F body) {
    std::exception_ptr failure;
    std::thread([&] {
      try {
        MOTLEY_CHECK(setns(space, CLONE_NEWNET) == 0, "setns: {}", std::strerror(errno));
        body();
      } catch (...) {
        failure = std::current_exception();
      }
    }).join();
    if (failure) std::rethrow_exception(failure);
  }

  // A port between interface `up` in the hub and `down` in the namespace `below`, without limits.
  std::string connect(const std::string& up, const std::string& down, int below, Seconds latency,
                      std::string* ip) {
    if (latency < kRelayedLatency) {
      *ip += fmt::format("link add {} type veth peer name {}", up, down);
      if (below != hub) *ip += fmt::format(" netns /proc/{}/fd/{}", getpid(), below);
      *ip += "\n";
      return "";
    }
    int a = -1, b = -1;
    inside(hub, [&] { a = open_tap(up); });
    if (a >= 0) inside(below, [&] { b = open_tap(down); });
    if (a < 0 || b < 0) {
      if (a >= 0) close(a);
      return fmt::format("/dev/net/tun: {}", std::strerror(a < 0 ? -a : -b));
    }
    relay.join(a, b, latency / 2);
    return "";
  }

  // Empty, or what went wrong.
  std::string build(const Cluster& cluster) {
    if (hub = new_namespace(); hub < 0)
      return fmt::format("a network namespace: {}", std::strerror(-hub));
    for (int r = 0; r < cluster.size(); ++r) {
      workers.push_back(new_namespace());
      if (workers.back() < 0) {
        const int error = -workers.back();
        workers.pop_back();
        return fmt::format("a network namespace: {}", std::strerror(error));
      }
    }
    address = "10.77.255.254";
    std::string ip, up, tc, problem;
    for (size_t g = 0; g < cluster.groups.size(); ++g)
      ip += fmt::format("link add g{} type bridge forward_delay 0 stp_state 0\n", g);
    // Both ends of a port of group g.
    auto port = [&](size_t g, const Group& group, size_t members, BytesPerSecond uplink,
                    const std::string& above, const std::string& below) {
      BytesPerSecond rate = uplink > 0 ? uplink : group.link.bandwidth;
      if (group.link.kind == LinkKind::bus) rate /= 2. * static_cast<double>(members);
      up += fmt::format("link set {} master g{} mtu 9000 up\n", above, g);
      if (members > 1) tc += limit(above, rate);
      return members > 1 ? limit(below, rate) : std::string();
    };
    for (size_t g = 0; g < cluster.groups.size() && problem.empty(); ++g) {
      const Group& group = cluster.groups[g];
      const bool leaf = group.children.empty();
      const size_t members = leaf ? static_cast<size_t>(group.device_count) : group.children.size();
      const Seconds latency = members > 1 ? group.link.latency : 0;
      for (GroupId child : group.children) {
        const std::string above = fmt::format("d{}", child.index),
                          below = fmt::format("u{}", child.index);
        if (problem = connect(above, below, hub, latency, &ip); !problem.empty()) break;
        tc += port(g, group, members, cluster.groups[child.index].uplink, above, below);
        up += fmt::format("link set {} master g{} mtu 9000 up\n", below, child.index);
      }
      for (int d = 0; leaf && d < group.device_count; ++d) {
        const int r = group.first_device + d;
        const std::string above = fmt::format("p{}", r);
        if (problem = connect(above, kWorkerInterface, workers[r], latency, &ip); !problem.empty())
          break;
        below_.push_back(port(g, group, members, 0, above, kWorkerInterface));
      }
    }
    if (!problem.empty()) return problem;
    for (size_t g = 0; g < cluster.groups.size(); ++g)
      up += fmt::format("link set g{} mtu 9000 up\n", g);
    up += fmt::format("addr add {}/16 dev g0\nlink set lo up\n", address) + route("g0");
    if (problem = batch("ip", hub, ip + up); !problem.empty()) return problem;
    if (problem = batch("tc", hub, tc); !problem.empty()) return problem;
    for (int r = 0; r < cluster.size(); ++r) {
      const std::string lines =
          fmt::format("link set lo up\nlink set {0} mtu 9000 up\naddr add {1}/16 dev {0}\n",
                      kWorkerInterface, Network::worker_address(r));
      if (problem = batch("ip", workers[r], lines + route(kWorkerInterface)); !problem.empty())
        return problem;
      if (below_[r].empty()) continue;
      if (problem = batch("tc", workers[r], below_[r]); !problem.empty()) return problem;
    }
    relay.start();
    return "";
  }

 private:
  // Model-based congestion controls would fight the limits.
  static std::string route(const std::string& interface) {
    return fmt::format("route replace 10.77.0.0/16 dev {} congctl cubic\n", interface);
  }

  std::vector<std::string> below_;  // [worker] tc lines of its interface
};

Network::Network(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Network::~Network() = default;

const std::string& Network::mode() const { return impl_->mode; }
int Network::worker(int rank) const { return impl_->workers[rank]; }
std::string Network::worker_address(int rank) {
  return fmt::format("10.77.{}.{}", rank / 250, 1 + rank % 250);
}
const std::string& Network::hub_address() const { return impl_->address; }
void Network::in_hub(const std::function<void()>& body) const { Impl::inside(impl_->hub, body); }

std::unique_ptr<Network> open_network(const Cluster& cluster, std::string* why) {
  MOTLEY_CHECK(cluster.size() <= 1000, "{} workers", cluster.size());
  for (const Group& group : cluster.groups)
    if (!group.direct.empty() || group.nics.size() > 1)
      throw user_error(
          "emulate", "{}: group {} has {}, which are not emulated; describe it by one link",
          cluster.name, group.name, group.direct.empty() ? "several nics" : "direct links");
  std::string mode = "network namespaces";
  if (const int fd = new_namespace(); fd >= 0) {
    close(fd);
  } else {
    *why = enter_user_namespace();
    return nullptr;
  }
  if (getenv(kInsideVariable) != nullptr) mode += " of a user namespace";
  auto impl = std::make_unique<Network::Impl>();
  impl->mode = mode;
  if (*why = impl->build(cluster); !why->empty()) return nullptr;
  return std::unique_ptr<Network>(new Network(std::move(impl)));
}

}  // namespace motley

#include "testbed/network.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "core/error.h"

namespace motley {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A TCP connection between two workers.
struct Wire {
  int a = -1, b = -1;
  Wire(const Network& network, int from, int to) {
    int listener = -1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(7000);
    inet_pton(AF_INET, fmt::format("10.77.0.{}", to + 1).c_str(), &address.sin_addr);
    auto* where = reinterpret_cast<sockaddr*>(&address);
    std::thread([&] {
      ASSERT_EQ(setns(network.worker(to), CLONE_NEWNET), 0);
      listener = socket(AF_INET, SOCK_STREAM, 0);
      const int yes = 1;
      setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      ASSERT_EQ(bind(listener, where, sizeof address), 0) << std::strerror(errno);
      ASSERT_EQ(listen(listener, 1), 0);
    }).join();
    std::thread([&] {
      ASSERT_EQ(setns(network.worker(from), CLONE_NEWNET), 0);
      a = socket(AF_INET, SOCK_STREAM, 0);
      ASSERT_EQ(connect(a, where, sizeof address), 0) << std::strerror(errno);
    }).join();
    b = accept(listener, nullptr, nullptr);
    close(listener);
    const int yes = 1;
    for (int fd : {a, b}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  }
  ~Wire() {
    close(a);
    close(b);
  }

  // Bytes per second from a to b.
  double rate(size_t bytes) const {
    std::vector<char> out(bytes), in(1 << 20);
    const auto start = Clock::now();
    std::thread sender([&] {
      for (size_t sent = 0; sent < bytes;) {
        const ssize_t n = send(a, out.data() + sent, bytes - sent, MSG_NOSIGNAL);
        if (n <= 0) break;
        sent += static_cast<size_t>(n);
      }
    });
    size_t got = 0;
    while (got < bytes) {
      const ssize_t n = recv(b, in.data(), in.size(), 0);
      if (n <= 0) break;
      got += static_cast<size_t>(n);
    }
    sender.join();
    return static_cast<double>(got) / since(start);
  }

  // Seconds there and back of one byte, the best of a few.
  double round_trip() const {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      char byte = 0;
      const auto start = Clock::now();
      send(a, &byte, 1, 0);
      recv(b, &byte, 1, 0);
      send(b, &byte, 1, 0);
      recv(a, &byte, 1, 0);
      best = std::min(best, since(start));
    }
    return best;
  }
};

int descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

const char* kTwoSites = R"(
name: two-sites
link: {bandwidth: 100 Mbps, latency: 3 ms}
groups:
  - {name: a, link: {bandwidth: 400 Mbps, latency: 1 us}, devices: [{type: cpu-core, count: 2}]}
  - {name: b, link: {bandwidth: 400 Mbps, latency: 1 us}, devices: [{type: cpu-core, count: 1}]}
)";

TEST(Network, LinksAreAsFastAndFarAsTheFileSays) {
  const int before = descriptors();
  {
    std::string why;
    const auto network = open_network(parse_cluster(kTwoSites, "test"), &why);
    if (!network) GTEST_SKIP() << why;
    const Wire near(*network, 0, 1), far(*network, 1, 2);
    // The best of a few tries: others may hold the cores.
    double fast = 0, slow = 0;
    for (int i = 0; i < 3 && fast < 0.9 * 50e6; ++i) fast = std::max(fast, near.rate(8 << 20));
    for (int i = 0; i < 3 && slow < 0.85 * 12.5e6; ++i) slow = std::max(slow, far.rate(4 << 20));
    EXPECT_GT(fast, 0.85 * 50e6);
    EXPECT_LT(fast, 1.05 * 50e6);
    EXPECT_GT(slow, 0.8 * 12.5e6);
    EXPECT_LT(slow, 1.05 * 12.5e6);
    EXPECT_LT(near.round_trip(), 2e-3);
    EXPECT_GT(far.round_trip(), 6e-3);
    EXPECT_LT(far.round_trip(), 9e-3);
  }
  EXPECT_EQ(descriptors(), before);
}

TEST(Network, TheMachineIsUntouched) {
  auto interfaces = [] {
    std::vector<std::string> names;
    DIR* folder = opendir("/sys/class/net");
    while (const dirent* entry = readdir(folder)) names.emplace_back(entry->d_name);
    closedir(folder);
    return names;
  };
  const auto before = interfaces();
  std::string why;
  const auto network = open_network(parse_cluster(kTwoSites, "test"), &why);
  if (!network) GTEST_SKIP() << why;
  EXPECT_EQ(interfaces(), before);
  bool moved = false;
  network->in_hub([&] {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, network->hub_address().c_str(), &address.sin_addr);
    moved = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(fd);
  });
  EXPECT_TRUE(moved);
}

}  // namespace
}  // namespace motley

#include "testbed/relay.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <deque>
#include <limits>
#include <thread>
#include <vector>

#include "core/error.h"

namespace motley {

namespace {

constexpr Seconds kLatest = 100e-6;  // that a frame is taken to be late by waking up
constexpr size_t kFrame = (size_t{64} << 10) + 1024;  // with headers
constexpr size_t kMaxQueued = size_t{64} << 20;       // bytes on the way in one direction

Seconds now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<Seconds>(t.tv_sec) + 1e-9 * static_cast<Seconds>(t.tv_nsec);
}

}  // namespace

int open_tap(const std::string& name) {
  const int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return -errno;
  ifreq request{};
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(fd, TUNSETIFF, &request) != 0 ||
      ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0) {
    const int error = errno;
    close(fd);
    return -error;
  }
  return fd;
}

struct Relay::Impl {
  struct Frame {
    Seconds due;
    std::vector<char> bytes;
  };
  struct Direction {
    int from, to;
    Seconds delay;
    std::deque<Frame> frames;
    size_t queued = 0;
  };
  std::vector<Direction> directions;
  int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::thread thread;

  void run() {
    prctl(PR_SET_TIMERSLACK, 1UL);
    sched_param priority{};
    priority.sched_priority = 1;
    // Frames wait for the delay and not for a core; without the right to it, as good as it gets.
    sched_setscheduler(0, SCHED_RR, &priority);
    std::vector<char> buffer(kFrame);
    std::vector<pollfd> list;
    Seconds late = 0;  // by how much frames go too late on average: how long waking up takes
    for (;;) {
      Seconds next = std::numeric_limits<double>::infinity();
      list.clear();
      list.push_back({wake, POLLIN, 0});
      for (const Direction& d : directions) {
        list.push_back({d.from, static_cast<short>(d.queued < kMaxQueued ? POLLIN : 0), 0});
        if (!d.frames.empty()) next = std::min(next, d.frames.front().due);
      }
      timespec timeout{};
      const Seconds wait = std::max(0.0, next - now());
      if (std::isfinite(wait)) {
        timeout.tv_sec = static_cast<time_t>(wait);
        timeout.tv_nsec = static_cast<long>((wait - std::floor(wait)) * 1e9);
      }
      if (ppoll(list.data(), list.size(), std::isfinite(wait) ? &timeout : nullptr, nullptr) < 0 &&
          errno != EINTR)
        return;
      if (list[0].revents != 0) return;
      for (size_t i = 0; i < directions.size(); ++i) {
        Direction& d = directions[i];
        while ((list[i + 1].revents & POLLIN) != 0 && d.queued < kMaxQueued) {
          const ssize_t n = read(d.from, buffer.data(), buffer.size());
          if (n <= 0) break;
          d.frames.push_back({now() + d.delay - late, {buffer.begin(), buffer.begin() + n}});
          d.queued += static_cast<size_t>(n);
        }
        for (Seconds t = now(); !d.frames.empty() && d.frames.front().due <= t; t = now()) {
          const Frame& f = d.frames.front();
          late += 0.02 * (std::min(t - f.due, kLatest) - late);
          // A frame that the other side does not take is lost, as on a wire.
          if (write(d.to, f.bytes.data(), f.bytes.size()) < 0 && errno == EINTR) continue;
          d.queued -= f.bytes.size();
          d.frames.pop_front();
        }
      }
    }
  }
};

Relay::Relay() : impl_(std::make_unique<Impl>()) {}

Relay::~Relay() {
  if (impl_->thread.joinable()) {
    const uint64_t one = 1;
    MOTLEY_CHECK(write(impl_->wake, &one, sizeof one) == sizeof one, "eventfd");
    impl_->thread.join();
  }
  // Every device is the end of two directions.
  for (size_t i = 0; i < impl_->directions.size(); i += 2) {
    close(impl_->directions[i].from);
    close(impl_->directions[i].to);
  }
  close(impl_->wake);
}

void Relay::join(int a, int b, Seconds delay) {
  impl_->directions.push_back({a, b, delay, {}, 0});
  impl_->directions.push_back({b, a, delay, {}, 0});
}

void Relay::start() {
  if (!impl_->directions.empty()) impl_->thread = std::thread([this] { impl_->run(); });
}

}  // namespace motley

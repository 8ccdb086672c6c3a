#include "comm/store.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "comm/idle.h"
#include "comm/line.h"
#include "core/error.h"

namespace motley {

namespace {

constexpr size_t kMaxStrangers = 64;  // connections that have not given it yet
constexpr uint32_t kMaxHello = 256;

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// [field] of a request behind its first byte.
std::vector<std::string> fields_of(std::string request) {
  request.erase(0, 1);
  std::vector<std::string> list;
  while (!request.empty()) {
    std::optional<std::string> next = take_frame(&request, kMaxFrame);
    if (!next) throw std::runtime_error("half a field");
    list.push_back(std::move(*next));
  }
  return list;
}

milliseconds beat_interval() {
  return std::clamp(hang_limit() / 10, milliseconds(20), milliseconds(1000));
}

std::string seconds_text(milliseconds time) {
  return fmt::format("{:g} s", static_cast<double>(time.count()) / 1000);
}

}  // namespace

milliseconds hang_limit() {
  const char* text = std::getenv("MOTLEY_HANG_SECONDS");
  if (text == nullptr || *text == 0) return milliseconds(30000);
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != 0 || !(seconds >= 0.1) || !(seconds <= 86400))
    throw user_error("run", "MOTLEY_HANG_SECONDS is '{}'; give a number from 0.1 to 86400", text);
  return milliseconds(static_cast<int64_t>(1000 * seconds));
}

std::string random_token() {
  unsigned char bytes[16];
  MOTLEY_CHECK(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "getrandom");
  std::string text;
  for (unsigned char b : bytes) text += fmt::format("{:02x}", b);
  return text;
}

std::vector<std::string> addresses_to_listen(const std::string& host) {
  const bool local = host == "localhost" || host.starts_with("127.") || host == "::1";
  if (local) return {host == "::1" ? "::1" : "127.0.0.1"};
  const Addresses found(host, 0, 0);
  std::vector<std::string> list;
  for (const addrinfo* a = found.list; a != nullptr; a = a->ai_next) {
    char text[NI_MAXHOST] = "";
    if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
      continue;
    const std::string address = text;
    if (address.starts_with("127.") || address == "::1") return {""};
    if (listen_on(address, 0).fd() >= 0) list.push_back(address);
  }
  return list.empty() ? std::vector<std::string>{""} : list;
}

// ---- The server

struct StoreServer::Impl {
  struct Peer {
    Socket socket;
    std::string in, out;
    Clock::time_point since = Clock::now();  // connected
    bool known = false;                      // gave the token
    int rank = -1;                           // of a watch; -1: none
    Clock::time_point heard = since;
    milliseconds idle{0}, waiting{0};  // as it said (idle.h)
    bool lost = false, closing = false;
  };

  Impl(const std::string& address, int port, std::string secret, bool holder)
      : token(std::move(secret)), rank0(holder), limit(hang_limit()), interval(beat_interval()) {
    listener = listen_on(address, port);
    if (listener.fd() < 0)
      throw user_error(
          "run", "MASTER_PORT {} is in use or may not be used; give a free one or unset it", port);
    MOTLEY_CHECK(pipe2(wake, O_CLOEXEC) == 0, "pipe");
    thread = std::thread([this] { serve(); });
  }
  ~Impl() {
    stopping = true;
    if (write(wake[1], "x", 1) < 0) std::abort();
    thread.join();
    close(wake[0]);
    close(wake[1]);
  }

  void serve() {
    auto beat = Clock::now(), before = beat;
    while (!stopping) {
      std::vector<pollfd> list = {{wake[0], POLLIN, 0}, {listener.fd(), POLLIN, 0}};
      for (const Peer& p : peers)
        list.push_back(
            {p.socket.fd(), static_cast<short>(POLLIN | (p.out.empty() ? 0 : POLLOUT)), 0});
      poll(list.data(), list.size(), static_cast<int>(interval.count() / 2 + 1));
      const auto now = Clock::now();
      // This process was stopped itself: nobody could be heard.
      if (now - before > limit / 2)
        for (Peer& p : peers) p.heard = now;
      before = now;
      for (size_t i = 0; i < peers.size(); ++i)
        if (list[i + 2].revents != 0) handle(peers[i]);
      if (list[1].revents != 0) accept_all();
      if (now - beat >= interval) {
        beat = now;
        for (Peer& p : peers)
          if (p.rank >= 0) say(p, "beat");
      }
      for (size_t i = 0; i < peers.size(); ++i) check_time(peers[i], now);
      for (size_t i = 0; i < peers.size(); ++i)
        if (peers[i].closing) ended(peers[i]);
      std::erase_if(peers, [](const Peer& p) { return p.closing; });
    }
  }

  void accept_all() {
    for (;;) {
      Socket s(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (s.fd() < 0) return;
      const auto strangers =
          std::count_if(peers.begin(), peers.end(), [](const Peer& p) { return !p.known; });
      if (strangers >= static_cast<int64_t>(kMaxStrangers)) continue;
      const int yes = 1;
      setsockopt(s.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      peers.push_back({std::move(s)});
    }
  }

  void handle(Peer& p) {
    char buffer[1 << 14];
    for (;;) {
      const ssize_t n = recv(p.socket.fd(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (n > 0) {
        p.in.append(buffer, static_cast<size_t>(n));
        if (n == sizeof buffer && p.in.size() < 2 * size_t{kMaxFrame}) continue;
      } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        p.closing = true;
      }
      break;
    }
    try {
      while (auto frame = take_frame(&p.in, p.known ? kMaxFrame : kMaxHello)) answer(p, *frame);
    } catch (const std::exception&) {
      p.closing = true;  // no message of ours
    }
    flush(p);
  }

  void answer(Peer& p, const std::string& frame) {
    if (!p.known) {
      const std::string hello = kHello + token;
      unsigned difference = frame.size() != hello.size();  // in the same time wherever it is
      for (size_t i = 0; i < std::min(frame.size(), hello.size()); ++i)
        difference |= static_cast<unsigned char>(frame[i] ^ hello[i]);
      if (difference != 0) throw std::runtime_error("a stranger");
      p.known = true;
      return say(p, "welcome");
    }
    if (frame.empty()) throw std::runtime_error("an empty message");
    p.heard = Clock::now();
    const std::vector<std::string> f = fields_of(frame);
    const auto key = [&]() -> const std::string& { return f.at(0); };
    switch (frame[0]) {
      case 'S':
        values[key()] = f.at(1);
        return say(p, "");
      case 'G': {
        const auto it = values.find(key());
        return say(p, it == values.end() ? "-" : "+" + it->second);
      }
      case 'C':
        return say(p, std::all_of(f.begin(), f.end(),
                                  [&](const std::string& k) { return values.count(k) > 0; })
                          ? "+"
                          : "-");
      case 'A': {
        std::string& value = values[key()];
        const auto sum = static_cast<uint64_t>(std::atoll(value.c_str())) +
                         static_cast<uint64_t>(std::atoll(f.at(1).c_str()));
        value = std::to_string(static_cast<int64_t>(sum));  // whatever a worker sends
        return say(p, value);
      }
      case 'D':
        return say(p, values.erase(key()) > 0 ? "+" : "-");
      case 'N':
        return say(p, std::to_string(values.size()));
      case 'W':  // a watch
        p.rank = std::atoi(key().c_str());
        return say(p, fmt::format("holder {}", rank0 ? 1 : 0));
      case 'B':  // it is there; what it does, where it says so
        p.idle = milliseconds(f.empty() ? 0 : std::atoll(f[0].c_str()));
        p.waiting = milliseconds(f.size() < 2 ? 0 : std::atoll(f[1].c_str()));
        return;
      case 'Q':  // it stops in good order
        p.rank = -1;
        return;
      default:
        throw std::runtime_error("no message of ours");
    }
  }

  void say(Peer& p, const std::string& text) { p.out += framed(text); }
  void flush(Peer& p) {
    while (!p.out.empty() && !p.closing) {
      const ssize_t n =
          send(p.socket.fd(), p.out.data(), p.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) {
        p.out.erase(0, static_cast<size_t>(n));
      } else if (errno == EAGAIN) {
        break;
      } else if (errno != EINTR) {
        p.closing = true;
      }
    }
    // Beats to who is stopped pile up.
    if (p.out.size() > 4 * size_t{kMaxFrame}) p.closing = true;
  }

  void tell_others(const Peer& about, const std::string& text) {
    for (Peer& p : peers)
      if (&p != &about && p.rank >= 0) say(p, text), flush(p);
  }
  void check_time(Peer& p, Clock::time_point now) {
    if (!p.known && now - p.since > kHelloTime) p.closing = true;
    if (p.rank >= 0 && !p.lost && now - p.heard > limit) {
      p.lost = true;
      tell_others(p, fmt::format("lost {}", p.rank));
    }
    if (p.rank >= 0 && !p.lost && p.idle > limit && others_wait(p)) {
      p.lost = true;
      tell_others(p, fmt::format("idle {}", p.rank));
    }
    if (!p.closing) flush(p);
  }
  // A while ago, perhaps for this worker. What nobody waits for may take as long as it likes.
  bool others_wait(const Peer& about) const {
    return std::any_of(peers.begin(), peers.end(), [&](const Peer& p) {
      return &p != &about && p.rank >= 0 && p.waiting > limit / 2;
    });
  }
  void ended(Peer& p) {
    if (p.rank >= 0 && !p.lost) tell_others(p, fmt::format("ended {}", p.rank));
  }

  const std::string token;
  const bool rank0;
  const milliseconds limit, interval;
  Socket listener;
  int wake[2] = {-1, -1};
  std::vector<Peer> peers;
  std::map<std::string, std::string> values;
  std::atomic<bool> stopping{false};
  std::thread thread;
};

StoreServer::StoreServer(const std::string& address, int port, std::string token, bool rank0)
    : impl_(std::make_unique<Impl>(address, port, std::move(token), rank0)) {}
StoreServer::~StoreServer() = default;
int StoreServer::port() const { return port_of(impl_->listener.fd()); }

// ---- Clients

namespace {

class Client final : public c10d::Store {
 public:
  Client(const std::string& host, int port, const std::string& token, milliseconds patience)
      : c10d::Store(patience),
        host_(host),
        port_(port),
        token_(token),
        line_(host, port, token, patience) {}

  // Overrides c10d's since libtorch 2.6: the same store by a connection of its own.
  c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<Client>(host_, port_, token_, timeout_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ask("S" + framed(key) + framed(std::string(value.begin(), value.end())));
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, timeout_);
    const std::string answer = ask("G" + framed(key));
    return {answer.begin() + 1, answer.end()};
  }
  int64_t add(const std::string& key, int64_t value) override {
    return std::atoll(ask("A" + framed(key) + framed(std::to_string(value))).c_str());
  }
  bool deleteKey(const std::string& key) override { return ask("D" + framed(key)) == "+"; }
  bool check(const std::vector<std::string>& keys) override {
    std::string request = "C";
    for (const std::string& key : keys) request += framed(key);
    return ask(request) == "+";
  }
  int64_t getNumKeys() override { return std::atoll(ask("N").c_str()); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto until = Clock::now() + timeout;
    for (milliseconds pause(2); !check(keys); pause = std::min(2 * pause, milliseconds(50))) {
      if (Clock::now() >= until)
        throw std::runtime_error("the store waited in vain for " + keys.at(0));
      std::this_thread::sleep_for(pause);
    }
  }

 private:
  std::string ask(const std::string& request) {
    const std::lock_guard lock(mutex_);
    const auto until = Clock::now() + std::max(hang_limit(), milliseconds(2000));
    line_.send(request, until);
    return line_.receive(until);
  }

  const std::string host_;
  const int port_;
  const std::string token_;
  std::mutex mutex_;
  Line line_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, int port,
                                              const std::string& token, milliseconds patience) {
  return c10::make_intrusive<Client>(host, port, token, patience);
}

// ---- The watch of this process

namespace {

// Lives as long as the process, since its thread does.
struct Watching {
  std::mutex mutex;
  bool started = false;
  std::atomic<bool> stopping{false};
  std::string lost;
  std::set<int> ended;
  std::map<int, int> sockets;    // and the rank at the other end
  std::vector<int> unreachable;  // ranks that only this worker may miss
  bool idle = false;             // who is lost is there, and does nothing
  bool exits = false;
  std::atomic<bool> says_idle{false};
};

Watching& watching() {
  static auto* state = new Watching;
  return *state;
}

milliseconds silence_limit() { return std::max(hang_limit(), milliseconds(3000)); }

std::string reason_of(const Watching& state) {
  if (state.idle)
    return fmt::format("it has neither computed nor waited for others for {}",
                       seconds_text(hang_limit()));
  if (!state.unreachable.empty())
    return fmt::format("nothing has come through from it for {}", seconds_text(silence_limit()));
  return fmt::format("it has said nothing for {} (it is stopped, or its machine is)",
                     seconds_text(hang_limit()));
}

void found_lost(int rank, bool idle = false) {
  Watching& state = watching();
  const std::lock_guard lock(state.mutex);
  if (!state.lost.empty()) return;
  state.lost = fmt::format("rank {}", rank);
  state.idle = idle;
  for (const auto& [fd, _] : state.sockets) shutdown(fd, SHUT_RDWR);
  if (!state.exits) return;
  std::fprintf(stderr, "motley: [run] lost %s: %s\n", state.lost.c_str(), reason_of(state).c_str());
  _exit(1);
}

// How long nothing has come from the machine at the other end; negative: the connection has ended. What waits
// to be sent is sent again, and what is idle is asked every third of hang_limit(), so a living one is heard.
milliseconds silence_of(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      info.tcpi_state != TCP_ESTABLISHED)
    return milliseconds(-1);
  return milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
}

void keep_asking(int fd) {
  const int yes = 1, every = std::max(1, static_cast<int>(hang_limit().count() / 3000)), many = 100;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &every, sizeof every);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &many, sizeof many);
}

// Workers to which the way is cut.
void look_for_cuts() {
  Watching& state = watching();
  std::set<int> silent, nearly;
  {
    const std::lock_guard lock(state.mutex);
    for (const auto& [fd, rank] : state.sockets) {
      const milliseconds silence = silence_of(fd);
      if (silence > silence_limit()) silent.insert(rank);
      if (silence > silence_limit() * 3 / 4) nearly.insert(rank);
    }
    if (silent.empty() || !state.lost.empty()) return;
    state.unreachable.assign(nearly.begin(), nearly.end());
  }
  found_lost(*silent.begin());
}

void watch(Line line) {
  Watching& state = watching();
  const milliseconds limit = hang_limit(), interval = beat_interval();
  auto heard = Clock::now(), before = heard, beat = heard - interval;
  bool rank0 = false;  // holds the other end
  Activity activity;
  try {
    while (!state.stopping) {
      pollfd p{line.fd(), POLLIN, 0};
      poll(&p, 1, static_cast<int>(interval.count() / 2 + 1));
      const auto now = Clock::now();
      if (now - before > limit / 2) heard = now;  // this process was stopped itself
      before = now;
      if (p.revents != 0 && !line.read_some()) return;  // its end is seen elsewhere
      while (auto frame = line.take()) {
        heard = now;
        const int number = std::atoi(frame->c_str() + std::min(frame->size(), frame->find(' ')));
        if (frame->starts_with("holder ")) rank0 = number == 1;
        if (frame->starts_with("lost ")) found_lost(number);
        if (frame->starts_with("idle ")) found_lost(number, /*idle=*/true);
        if (frame->starts_with("ended ")) {
          const std::lock_guard lock(state.mutex);
          state.ended.insert(number);
        }
      }
      if (rank0 && now - heard > limit) found_lost(0);
      if (now - beat >= interval) {
        beat = now;
        std::string said = "B";
        if (state.says_idle) {
          const Activity::Now does = activity.look();
          said += framed(std::to_string(does.idle.count())) +
                  framed(std::to_string(does.waiting.count()));
        }
        line.send(said, now + limit);
        look_for_cuts();
      }
    }
    line.send("Q", Clock::now() + milliseconds(100));
  } catch (const std::runtime_error&) {
    // The holder of the store is gone.
  }
}

}  // namespace

void Watch::start(int rank, const std::string& host, int port, const std::string& token) {
  Watching& state = watching();
  const std::lock_guard lock(state.mutex);
  if (state.started) return;
  Line line(host, port, token, milliseconds(10000));
  line.send("W" + framed(std::to_string(rank)), Clock::now() + kHelloTime);
  state.started = true;
  std::thread(watch, std::move(line)).detach();
}

std::string Watch::lost() {
  const std::lock_guard lock(watching().mutex);
  return watching().lost;
}

std::vector<int> Watch::unreachable() {
  const std::lock_guard lock(watching().mutex);
  return watching().unreachable;
}

std::string Watch::reason() {
  const std::lock_guard lock(watching().mutex);
  return reason_of(watching());
}

std::string Watch::ended() {
  const std::lock_guard lock(watching().mutex);
  const std::set<int>& ended = watching().ended;
  return ended.empty() ? "" : fmt::format("rank {}", fmt::join(ended, ", "));
}

void Watch::close_when_lost(const std::vector<int>& sockets, const std::vector<int>& ranks) {
  Watching& state = watching();
  const std::lock_guard lock(state.mutex);
  for (size_t i = 0; i < sockets.size(); ++i) {
    const int fd = sockets[i];
    if (fd < 0) continue;
    keep_asking(fd);
    state.sockets[fd] = ranks.at(i);
    if (!state.lost.empty()) shutdown(fd, SHUT_RDWR);
  }
}

void Watch::forget(const std::vector<int>& sockets) {
  Watching& state = watching();
  const std::lock_guard lock(state.mutex);
  for (int fd : sockets) state.sockets.erase(fd);
}

void Watch::say_when_idle() { watching().says_idle = true; }

void Watch::exit_when_lost() {
  const std::lock_guard lock(watching().mutex);
  watching().exits = true;
}

void Watch::stop() { watching().stopping = true; }

}  // namespace motley

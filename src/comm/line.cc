#include "comm/line.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace motley {

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Addresses::Addresses(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const std::string service = std::to_string(port);
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &list) != 0)
    list = nullptr;
}

Addresses::~Addresses() {
  if (list != nullptr) freeaddrinfo(list);
}

Socket listen_on(const std::string& address, int port) {
  const Addresses found(address, port, AI_PASSIVE | (address.empty() ? 0 : AI_NUMERICHOST));
  for (int family : {AF_INET6, AF_INET})
    for (const addrinfo* a = found.list; a != nullptr; a = a->ai_next) {
      if (a->ai_family != family) continue;
      Socket s(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (s.fd() < 0) continue;
      const int yes = 1;
      setsockopt(s.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      if (bind(s.fd(), a->ai_addr, a->ai_addrlen) == 0 && listen(s.fd(), 256) == 0) return s;
    }
  return Socket();
}

bool ready(int fd, short what, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now()).count();
    pollfd p{fd, what, 0};
    const int n = poll(&p, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
    if (n > 0) return true;
    if (n == 0 || errno != EINTR) return false;
  }
}

std::string framed(const std::string& text) {
  const uint32_t size = htonl(static_cast<uint32_t>(text.size()));
  return std::string(reinterpret_cast<const char*>(&size), 4) + text;
}

std::optional<std::string> take_frame(std::string* in, uint32_t most) {
  if (in->size() < 4) return std::nullopt;
  uint32_t size;
  std::memcpy(&size, in->data(), 4);
  size = ntohl(size);
  if (size > most) throw std::runtime_error("a message that is too long");
  if (in->size() < 4 + size_t{size}) return std::nullopt;
  std::string frame = in->substr(4, size);
  in->erase(0, 4 + size_t{size});
  return frame;
}

Line::Line(const std::string& host, int port, const std::string& token, milliseconds patience) {
  const auto until = Clock::now() + patience;
  for (;;) {
    const Addresses found(host, port, 0);
    for (const addrinfo* a = found.list; a != nullptr; a = a->ai_next)
      if (try_connect(*a, token, until)) return;
    if (Clock::now() >= until || refused_)
      throw std::runtime_error(refused_ ? "it does not take our token" : "nobody answers");
    std::this_thread::sleep_for(milliseconds(50));
  }
}

void Line::send(const std::string& text, Clock::time_point until) {
  const std::string all = framed(text);
  for (size_t at = 0; at < all.size();) {
    const ssize_t n = ::send(fd(), all.data() + at, all.size() - at, MSG_NOSIGNAL);
    if (n > 0) {
      at += static_cast<size_t>(n);
    } else if (errno != EINTR && (errno != EAGAIN || !ready(fd(), POLLOUT, until))) {
      throw std::runtime_error("the connection was closed");
    }
  }
}

std::string Line::receive(Clock::time_point until) {
  for (;;) {
    if (auto frame = take_frame(&in_, kMaxFrame)) return *frame;
    if (!ready(fd(), POLLIN, until)) throw std::runtime_error("no answer");
    if (!read_some()) throw std::runtime_error("the connection was closed");
  }
}

bool Line::read_some() {
  char buffer[1 << 14];
  const ssize_t n = recv(fd(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (n > 0) in_.append(buffer, static_cast<size_t>(n));
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

bool Line::try_connect(const addrinfo& a, const std::string& token, Clock::time_point until) {
  Socket s(socket(a.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (s.fd() < 0) return false;
  const int yes = 1;
  setsockopt(s.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (connect(s.fd(), a.ai_addr, a.ai_addrlen) != 0) {
    if (errno != EINPROGRESS || !ready(s.fd(), POLLOUT, until)) return false;
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return false;
  }
  socket_ = std::move(s);
  in_.clear();
  try {
    send(kHello + token, until);
    if (receive(std::min(until, Clock::now() + kHelloTime)) == "welcome") return true;
    refused_ = true;
  } catch (const std::runtime_error&) {
    // Closed at once: the server does not know the token, or is about to end.
    if (++closed_ >= 3) refused_ = true;
  }
  return false;
}

}  // namespace motley

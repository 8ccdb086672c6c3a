// Connections of the store (store.h), and frames on them: a length, then as many bytes.
#pragma once

#include <netdb.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace motley {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHelloTime{5000};  // for the token
constexpr uint32_t kMaxFrame = 1 << 24;
constexpr const char* kHello = "motley store 1 ";

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }

 private:
  int fd_;
};

struct Addresses {
  addrinfo* list = nullptr;
  Addresses(const std::string& host, int port, int flags);
  ~Addresses();
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
};

// No socket: it cannot.
Socket listen_on(const std::string& address, int port);

// Waits until a socket can be read or written; false after `until`.
bool ready(int fd, short what, Clock::time_point until);

std::string framed(const std::string& text);
// The next frame at the front of what has come in; nothing: it is not complete. Throws if it is
// larger than `most`.
std::optional<std::string> take_frame(std::string* in, uint32_t most);

// A connection that blocks, for clients. Throws std::runtime_error where it fails.
class Line {
 public:
  Line(const std::string& host, int port, const std::string& token, milliseconds patience);
  int fd() const { return socket_.fd(); }

  void send(const std::string& text, Clock::time_point until);
  std::string receive(Clock::time_point until);
  // Reads what is there; false at the end.
  bool read_some();
  std::optional<std::string> take() { return take_frame(&in_, kMaxFrame); }

 private:
  bool try_connect(const addrinfo& a, const std::string& token, Clock::time_point until);

  Socket socket_;
  std::string in_;
  bool refused_ = false;
  int closed_ = 0;
};

}  // namespace motley

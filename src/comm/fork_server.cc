#include "comm/fork_server.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/file.h"
#include "core/terminal.h"

namespace motley {

namespace {

constexpr size_t kMostDescriptors = 3;
constexpr int kTerminalSignals[] = {SIGINT, SIGTERM, SIGHUP};

bool send_all(int fd, const void* data, size_t size) {
  for (const char* at = static_cast<const char*>(data); size > 0;) {
    const ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

bool receive_all(int fd, void* data, size_t size) {
  for (char* at = static_cast<char*>(data); size > 0;) {
    const ssize_t n = read(fd, at, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

// The head of a message: the length of its body, with which the descriptors travel.
struct Envelope {
  uint64_t size = 0;
  iovec part{&size, sizeof size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)]{};
  msghdr message{};
  Envelope() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;
};

bool send_message(int socket, const std::vector<uint8_t>& body,
                  const std::vector<int>& descriptors) {
  Envelope envelope;
  envelope.size = body.size();
  envelope.message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
  if (!descriptors.empty())
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  ssize_t n;
  do n = sendmsg(socket, &envelope.message, MSG_NOSIGNAL);
  while (n < 0 && errno == EINTR);
  return n == sizeof envelope.size && send_all(socket, body.data(), body.size());
}

bool receive_message(int socket, std::vector<uint8_t>* body, std::vector<int>* descriptors) {
  Envelope envelope;
  ssize_t n;
  do n = recvmsg(socket, &envelope.message, MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  const cmsghdr* header = n == sizeof envelope.size ? CMSG_FIRSTHDR(&envelope.message) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return false;
  descriptors->resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  if (!descriptors->empty())
    std::memcpy(descriptors->data(), CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
  body->resize(envelope.size);
  return receive_all(socket, body->data(), body->size());
}

// The rest of a worker's life.
[[noreturn]] void work(const Json& start, const std::vector<int>& descriptors,
                       ForkServer::Main main) {
  const auto descriptor = [&](const char* name) {
    const int index = start.at(name);
    return index < 0 ? -1 : descriptors.at(static_cast<size_t>(index));
  };
  const int report = descriptor("report"), output = descriptor("output");
  if (const int network = descriptor("network"); network >= 0) {
    if (setns(network, CLONE_NEWNET) != 0) _exit(126);
    close(network);
  }
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    close(output);
  }
  clearenv();
  for (const auto& [name, value] : start.at("environment").items())
    setenv(name.c_str(), value.get<std::string>().c_str(), 1);
  setenv(start.at("report_variable").get<std::string>().c_str(), std::to_string(report).c_str(), 1);
  auto words = start.at("words").get<std::vector<std::string>>();
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  end_process(main(static_cast<int>(words.size()), arguments.data()));
}

// In the middle process, whose end makes the worker a child of the launcher.
[[noreturn]] void fork_and_end(int pid_pipe, pid_t launcher, int socket, const Json& start,
                               const std::vector<int>& descriptors, ForkServer::Main main) {
  const pid_t middle = getpid(), worker = fork();
  if (worker != 0)
    _exit(worker > 0 && write(pid_pipe, &worker, sizeof worker) == sizeof worker ? 0 : 1);
  close(pid_pipe);
  close(socket);
  for (int signal : kTerminalSignals) std::signal(signal, SIG_DFL);
  while (getppid() == middle) usleep(100);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);
  work(start, descriptors, main);
}

[[noreturn]] void serve(int socket, pid_t launcher, ForkServer::Main main) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);
  prctl(PR_SET_NAME, ForkServer::kName);
  for (int signal : kTerminalSignals) std::signal(signal, SIG_IGN);
  std::vector<uint8_t> body;
  std::vector<int> descriptors;
  while (receive_message(socket, &body, &descriptors)) {
    const Json start = Json::from_cbor(body);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) _exit(1);
    const pid_t middle = fork();
    if (middle == 0) fork_and_end(ends[1], launcher, socket, start, descriptors, main);
    close(ends[1]);
    pid_t worker = -1;
    if (middle > 0) waitpid(middle, nullptr, 0);
    if (read(ends[0], &worker, sizeof worker) != sizeof worker) worker = -1;
    close(ends[0]);
    for (int fd : descriptors) close(fd);
    if (!send_all(socket, &worker, sizeof worker)) break;
  }
  _exit(0);
}

}  // namespace

ForkServer::ForkServer(Main main) {
  int ends[2];
  MOTLEY_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair: {}",
               std::strerror(errno));
  // Workers come to this process when those that forked them end.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::fflush(nullptr);
  const pid_t launcher = getpid();
  pid_ = fork();
  MOTLEY_CHECK(pid_ >= 0, "fork: {}", std::strerror(errno));
  if (pid_ == 0) {
    close(ends[0]);
    serve(ends[1], launcher, main);
  }
  close(ends[1]);
  socket_ = ends[0];
}

ForkServer::~ForkServer() {
  close(socket_);
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::optional<pid_t> ForkServer::start(const WorkerStart& worker) {
  std::vector<int> descriptors;
  const auto add = [&](int fd) {
    if (fd < 0) return -1;
    descriptors.push_back(fd);
    return static_cast<int>(descriptors.size()) - 1;
  };
  const Json start = {{"words", worker.words},
                      {"environment", worker.environment},
                      {"report_variable", worker.report_variable},
                      {"report", add(worker.report)},
                      {"output", add(worker.output)},
                      {"network", add(worker.network)}};
  pid_t pid = -1;
  if (!send_message(socket_, Json::to_cbor(start), descriptors) ||
      !receive_all(socket_, &pid, sizeof pid) || pid <= 0)
    return std::nullopt;
  return pid;
}

}  // namespace motley

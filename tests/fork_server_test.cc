// Workers that begin as copies: they are children of whoever wanted them, and begin with exactly what was said.
#include "comm/fork_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "core/blas.h"

namespace motley {
namespace {

extern "C" char** environ;

std::string all_of(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(n));
  return text;
}

// Writes what it has into its report, and one line to its standard output.
int report_all(int argc, char** argv) {
  std::string text = getppid() == std::atoi(std::getenv("PARENT")) ? "child\n" : "stranger\n";
  for (int i = 0; i < argc; ++i) text += std::string(argv[i]) + "\n";
  text += argv[argc] == nullptr ? "" : "no end\n";
  std::string report;
  for (char** v = environ; *v != nullptr; ++v) {
    const std::string variable = *v;
    if (variable.starts_with("REPORT=")) report = variable.substr(7);
    text += variable.substr(0, variable.find('=')) + ";";
  }
  text += "\n" + std::string(std::getenv("ODD"));
  struct sigaction action {};
  sigaction(SIGINT, nullptr, &action);
  if (action.sa_handler != SIG_DFL) text += "ignores signals";
  if (write(std::atoi(report.c_str()), text.data(), text.size()) < 0) return 1;
  std::puts("said");
  return 7;
}

int sleep_on(int, char**) {
  for (;;) pause();
}

// Within five seconds; as a child of this process too, which takes those whose launcher ended.
bool gone(pid_t pid) {
  const auto there = [&] { return waitpid(pid, nullptr, WNOHANG) != pid && kill(pid, 0) == 0; };
  for (int i = 0; i < 500; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10)))
    if (!there()) return true;
  return false;
}

// The child of this process that is a server, once it is.
pid_t server_of_this() {
  const std::string self = std::to_string(getpid());
  for (int i = 0; i < 500; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10))) {
    std::ifstream children("/proc/" + self + "/task/" + self + "/children");
    for (pid_t child; children >> child;) {
      std::string called;
      std::ifstream("/proc/" + std::to_string(child) + "/comm") >> called;
      if (called == ForkServer::kName) return child;
    }
  }
  return -1;
}

class Forks : public testing::Test {
 protected:
  void SetUp() override { end_blas_threads(); }  // as the program does
};

TEST_F(Forks, BeginWithWhatWasSaid) {
  ForkServer server(report_all);
  for (int i = 0; i < 20; ++i) {
    int report[2], output[2];
    ASSERT_EQ(pipe(report) + pipe(output), 0);
    const std::string large(1 << 20, 'x');
    const auto pid = server.start({{"motley", "", "a b", "\xff"},
                                   {{"PARENT", std::to_string(getpid())},
                                    {"ODD", std::string("=\xfe \n") + std::to_string(i)},
                                    {"LARGE", large}},
                                   "REPORT",
                                   report[1],
                                   output[1],
                                   -1});
    ASSERT_TRUE(pid.has_value());
    for (int fd : {report[1], output[1]}) close(fd);
    EXPECT_EQ(all_of(report[0]),
              "child\nmotley\n\na b\n\xff\nLARGE;ODD;PARENT;REPORT;\n=\xfe \n" + std::to_string(i));
    EXPECT_EQ(all_of(output[0]), "said\n");
    for (int fd : {report[0], output[0]}) close(fd);
    int status = 0;
    ASSERT_EQ(waitpid(*pid, &status, 0), *pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  }
}

TEST_F(Forks, AServerThatIsGoneStartsNothing) {
  ForkServer server(report_all);
  const pid_t pid = server_of_this();
  ASSERT_GT(pid, 0);
  kill(pid, SIGTERM);  // as a terminal's, not for it
  kill(pid, SIGKILL);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (int i = 0; i < 2; ++i)
    EXPECT_FALSE(server.start({{"motley"}, {}, "REPORT", -1, -1, -1}).has_value());
}

TEST_F(Forks, EndWithTheirLauncher) {
  int pids[2];
  ASSERT_EQ(pipe(pids), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    ForkServer server(sleep_on);
    const int fd = dup(STDOUT_FILENO);
    const pid_t worker = server.start({{"motley"}, {}, "REPORT", fd, -1, -1}).value_or(-1);
    const pid_t both[] = {server_of_this(), worker};
    if (write(pids[1], both, sizeof both) == sizeof both) pause();
    _exit(1);
  }
  pid_t both[2] = {-1, -1};
  ASSERT_EQ(read(pids[0], both, sizeof both), static_cast<ssize_t>(sizeof both));
  for (pid_t pid : both) {
    ASSERT_GT(pid, 0);
    EXPECT_EQ(kill(pid, 0), 0);
  }
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  for (pid_t pid : both) EXPECT_TRUE(gone(pid));
  for (int fd : pids) close(fd);
}

}  // namespace
}  // namespace motley

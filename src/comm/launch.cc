#include "comm/launch.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>

#include "comm/fork_server.h"
#include "comm/gloo.h"
#include "comm/store.h"
#include "core/blas.h"
#include "core/error.h"
#include "core/file.h"
#include "core/interrupted.h"

extern char** environ;

namespace motley {

namespace {

constexpr const char* kReportVariable = "MOTLEY_REPORT_FD";
constexpr const char* kNetworkVariable = "MOTLEY_NETWORK";
// How long to wait for the cause when a worker only complains of a lost peer.
constexpr std::chrono::milliseconds kGrace{2000};

bool memory_is_kept = false;

std::unique_ptr<ForkServer> fork_server;  // of prepare_workers()

volatile std::sig_atomic_t caught_signal = 0;
void catch_signal(int signal) { caught_signal = signal; }

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Notes these signals for the life of the object.
class Signals {
 public:
  Signals() {
    struct sigaction action {};
    action.sa_handler = catch_signal;
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~Signals() {
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  struct sigaction before_[std::size(kSignals)]{};
};

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    MOTLEY_CHECK(pipe2(ends, O_CLOEXEC) == 0, "pipe: {}", std::strerror(errno));
    read = ends[0], write = ends[1];
  }
};

struct Worker {
  pid_t pid = -1;
  int report = -1, output = -1;  // what is read; -1: closed
  std::string report_text, output_text;
  bool running = true;
  int status = 0;
};

enum class Failure { none, peer_lost, cause, stopped };

const char* signal_name(int number) {
  return number == SIGINT ? "SIGINT" : number == SIGTERM ? "SIGTERM" : "SIGHUP";
}

struct Outcome {
  Failure failure = Failure::none;
  bool user = false;  // the user can fix it
  int stopped = 0;    // by which signal it was asked to end
  int lost = -1;      // the worker that is gone or hangs
  std::string message;
  std::vector<int> unreachable;  // by this worker, while others may hear them
};

Outcome outcome_of(const Worker& worker, int rank) {
  Outcome outcome;
  if (WIFSIGNALED(worker.status)) {
    outcome.failure = Failure::cause;
    outcome.lost = rank;
    const int signal = WTERMSIG(worker.status);
    outcome.message =
        fmt::format("[run] worker {} was killed by signal {} ({}); the others were stopped", rank,
                    signal, strsignal(signal));
    return outcome;
  }
  if (WEXITSTATUS(worker.status) == 0) return outcome;
  outcome.failure = Failure::cause;
  const Json report = Json::parse(worker.report_text, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object()) {
    outcome.lost = rank;
    outcome.message = fmt::format("[run] worker {} ended with code {}; the others were stopped",
                                  rank, WEXITSTATUS(worker.status));
    return outcome;
  }
  const std::string kind = report["kind"], message = report["message"];
  outcome.user = kind == "user";
  if (report.contains("rank")) outcome.lost = report["rank"];
  if (kind == "peer lost" || kind == "cut off") outcome.failure = Failure::peer_lost;
  if (kind == "cut off") outcome.unreachable = report["ranks"].get<std::vector<int>>();
  if (kind == "stopped") {
    outcome.failure = Failure::stopped;
    outcome.stopped = report["signal"];
  }
  outcome.message =
      kind == "internal" ? fmt::format("[run] worker {}: {}", rank, message) : message;
  return outcome;
}

// Appends what can be read; closes at the end.
void drain(int* fd, std::string* text) {
  char buffer[1 << 16];
  const ssize_t n = read(*fd, buffer, sizeof buffer);
  if (n > 0) {
    text->append(buffer, static_cast<size_t>(n));
  } else if (n == 0 || errno != EINTR) {
    close(*fd);
    *fd = -1;
  }
}

// A worker that executes a program; empty: this very one.
pid_t start_anew(WorkerStart start, const std::string& program) {
  // Everything is prepared before the fork: the child only makes system calls.
  start.environment[start.report_variable] = std::to_string(start.report);
  const std::string path = program.empty() ? "/proc/self/exe" : program;
  std::vector<std::string> lines;
  for (const auto& [name, value] : start.environment) lines.push_back(name + "=" + value);
  std::vector<char*> environment, arguments;
  for (std::string& line : lines) environment.push_back(line.data());
  for (std::string& word : start.words) arguments.push_back(word.data());
  environment.push_back(nullptr);
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  MOTLEY_CHECK(pid >= 0, "fork: {}", std::strerror(errno));
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  if (start.network >= 0 && setns(start.network, CLONE_NEWNET) != 0) _exit(126);
  fcntl(start.report, F_SETFD, 0);
  if (start.output >= 0) dup2(start.output, STDOUT_FILENO);
  execvpe(path.c_str(), arguments.data(), environment.data());
  _exit(127);
}

class Workers {
 public:
  explicit Workers(const LaunchOptions& options) : options_(options) {}
  ~Workers() {
    stop();
    if (null_ >= 0) close(null_);
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // `store`: where motley's workers meet; `port`: where torch's would.
  void start(const RendezvousStore& store, int port) {
    for (int r = 0; r < options_.workers; ++r) start_worker(r, store, port);
  }

  std::string wait() {
    std::optional<Outcome> failure;
    std::chrono::steady_clock::time_point give_up;
    while (running_ > 0) {
      if (caught_signal != 0) {
        const bool second = asked_ != 0;
        asked_ = caught_signal;
        caught_signal = 0;
        if (second || !options_.stops) {
          stop();
          throw Interrupted(asked_, fmt::format("[run] stopped by {}", signal_name(asked_)));
        }
        for (const Worker& w : workers_)
          if (w.running) kill(w.pid, asked_);
      }
      poll_once(failure ? 50 : 500);
      if (!failure && asked_ == 0 && options_.leave && options_.leave()) {
        stop();
        throw WorkersLeft();
      }
      for (int r = 0; r < options_.workers; ++r) {
        Worker& w = workers_[r];
        if (!w.running || !has_ended(&w)) continue;
        if (waitpid(w.pid, &w.status, 0) != w.pid) continue;
        w.running = false;
        --running_;
        const Outcome outcome = outcome_of(w, r);
        if (outcome.failure == Failure::none) continue;
        for (int other : outcome.unreachable)
          missed_[other] += 1.0 / static_cast<double>(outcome.unreachable.size());
        if (!failure) give_up = std::chrono::steady_clock::now() + kGrace;
        if (!failure || outcome.failure > failure->failure ||
            (outcome.failure == Failure::stopped && !outcome.message.empty()))
          failure = outcome;
      }
      // Workers that were asked to stop end one after the other, rank 0 with the message.
      const bool stopping = asked_ != 0 || (failure && failure->failure == Failure::stopped);
      if (failure && !stopping &&
          (failure->failure == Failure::cause || std::chrono::steady_clock::now() >= give_up))
        break;
    }
    if (asked_ != 0 || (failure && failure->stopped != 0)) {
      stop();
      throw Interrupted(asked_ != 0 ? asked_ : failure->stopped,
                        failure && failure->stopped != 0
                            ? failure->message
                            : fmt::format("[run] stopped by {}", signal_name(asked_)));
    }
    if (failure) {
      stop();
      if (failure->failure == Failure::peer_lost && !missed_.empty()) blame(&*failure);
      if (failure->user && failure->lost >= 0) throw WorkerMissing(failure->lost, failure->message);
      if (failure->user) throw UserError(failure->message);
      if (failure->lost >= 0) throw WorkerLost(failure->lost, failure->message);
      throw std::runtime_error(failure->message);
    }
    return workers_.empty() ? std::string() : workers_[0].output_text;
  }

 private:
  int place(int rank) const {
    return options_.places.empty() ? rank : options_.places.at(static_cast<size_t>(rank));
  }
  // What a worker begins with, but for its descriptors.
  WorkerStart start_of(int rank, const RendezvousStore& store, int port) const {
    WorkerStart start;
    std::map<std::string, std::string>& variables = start.environment;
    for (char** v = environ; *v != nullptr; ++v) {
      const std::string text = *v;
      const size_t equals = text.find('=');
      if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
    }
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
    variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(options_.workers);
    variables["MASTER_ADDR"] = "127.0.0.1";
    variables["MASTER_PORT"] = std::to_string(port);
    variables["MOTLEY_STORE"] = store.text();
    // Whoever uses torch.distributed: its rank 0 holds a store of torch's.
    variables.erase("TORCHELASTIC_USE_AGENT_STORE");
    variables["OMP_NUM_THREADS"] = variables["OPENBLAS_NUM_THREADS"] =
        std::to_string(options_.threads);
    // Errors come as exceptions; libtorch's log would repeat them.
    variables.try_emplace("GLOG_minloglevel", "3");
    // Steps allocate the same tensors again and again: memory that is given back to the system is
    // faulted in anew, a tenth of a step on CPUs.
    variables.try_emplace("MALLOC_MMAP_THRESHOLD_", "1073741824");
    variables.try_emplace("MALLOC_TRIM_THRESHOLD_", "17179869184");
    if (options_.network != nullptr) {
      // torch's store is held by rank 0, motley's own by the hub.
      variables["MASTER_ADDR"] = options_.program.empty()
                                     ? options_.network->hub_address()
                                     : options_.network->worker_address(place(0));
      variables["GLOO_SOCKET_IFNAME"] = kWorkerInterface;
      variables[kNetworkVariable] = options_.network->mode();
      start.network = options_.network->worker(place(rank));
    }
    for (const auto& [name, value] : options_.environment) variables[name] = value;
    start.words = {options_.program.empty() ? "motley" : options_.program};
    start.words.insert(start.words.end(), options_.arguments.begin(), options_.arguments.end());
    start.report_variable = kReportVariable;
    return start;
  }

  void start_worker(int rank, const RendezvousStore& store, int port) {
    Pipe report;
    std::optional<Pipe> output;
    if (rank == 0 && options_.capture) output.emplace();
    if (null_ < 0) null_ = open("/dev/null", O_WRONLY | O_CLOEXEC);
    WorkerStart start = start_of(rank, store, port);
    start.report = report.write;
    start.output = output ? output->write : rank == 0 ? -1 : null_;
    std::optional<pid_t> pid;
    if (options_.program.empty() && fork_server) pid = fork_server->start(start);
    if (!pid) pid = start_anew(start, options_.program);
    close(report.write);
    if (output) close(output->write);
    Worker worker;
    worker.pid = *pid;
    worker.report = report.read;
    worker.output = output ? output->read : -1;
    workers_.push_back(std::move(worker));
    ++running_;
  }

  // Its pipes are closed, or only others have them still: a process that was forked meanwhile and has
  // not got as far as closing them.
  static bool has_ended(Worker* w) {
    if (w->report < 0 && w->output < 0) return true;
    siginfo_t ended{};
    if (waitid(P_PID, static_cast<id_t>(w->pid), &ended, WEXITED | WNOWAIT | WNOHANG) != 0 ||
        ended.si_pid != w->pid)
      return false;
    for (auto [fd, text] :
         {std::pair{&w->report, &w->report_text}, {&w->output, &w->output_text}}) {
      while (*fd >= 0) {
        pollfd waiting{*fd, POLLIN, 0};
        if (poll(&waiting, 1, 0) <= 0) break;
        drain(fd, text);
      }
      if (*fd >= 0) close(*fd), *fd = -1;
    }
    return true;
  }

  void poll_once(int timeout_ms) {
    std::vector<pollfd> list;
    std::vector<std::pair<int*, std::string*>> sinks;
    for (Worker& w : workers_)
      for (auto [fd, text] : {std::pair{&w.report, &w.report_text}, {&w.output, &w.output_text}})
        if (*fd >= 0) {
          list.push_back({*fd, POLLIN, 0});
          sinks.emplace_back(fd, text);
        }
    if (poll(list.data(), list.size(), timeout_ms) <= 0) return;
    for (size_t i = 0; i < list.size(); ++i)
      if (list[i].revents != 0) drain(sinks[i].first, sinks[i].second);
  }

  // Who is cut off: the one that others miss most, each with one vote for all that it misses, so that one that misses
  // all others has little to say. The last of several.
  void blame(Outcome* failure) const {
    double most = 0;
    for (const auto& [rank, votes] : missed_)
      if (votes >= most) most = votes, failure->lost = rank;
    failure->message = fmt::format(
        "[run] nothing comes through from worker {} to others; all were stopped", failure->lost);
  }

  void stop() {
    for (Worker& w : workers_) {
      if (w.running) {
        kill(w.pid, SIGKILL);
        waitpid(w.pid, &w.status, 0);
        w.running = false;
        --running_;
      }
      for (int* fd : {&w.report, &w.output})
        if (*fd >= 0) close(*fd), *fd = -1;
    }
  }

  const LaunchOptions& options_;
  std::vector<Worker> workers_;
  int running_ = 0;
  int null_ = -1;                 // where the standard output of all but rank 0 goes
  int asked_ = 0;                 // the signal by which workers were asked to end
  std::map<int, double> missed_;  // [rank] by workers to whom nothing comes from it
};

int port_from_environment() {
  const char* text = std::getenv("MASTER_PORT");
  if (text == nullptr || *text == 0) return 0;
  char* end = nullptr;
  const long port = std::strtol(text, &end, 10);
  if (*end != 0 || port < 1 || port > 65535)
    throw user_error("run", "MASTER_PORT is '{}'; give an integer from 1 to 65535", text);
  return static_cast<int>(port);
}

}  // namespace

void prepare_workers(int (*main)(int, char**)) {
  int threads = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    threads += !entry.path().empty();
  // A copy of a process with more has locks that nobody ever opens.
  if (threads == 1 && !is_launched_worker()) fork_server = std::make_unique<ForkServer>(main);
}

std::string launch_workers(const LaunchOptions& options) {
  std::unique_ptr<RendezvousStore> store;
  int port = port_from_environment();
  // A program of others' needs the port for itself.
  const bool own = options.program.empty();
  const auto open = [&] {
    const std::string address =
        options.network != nullptr ? options.network->hub_address() : "127.0.0.1";
    store = std::make_unique<RendezvousStore>(own ? port : 0, address);
    if (own) port = store->port();
    if (port == 0) port = RendezvousStore(0, address).port();  // free a moment ago
  };
  if (options.network != nullptr)
    options.network->in_hub(open);
  else
    open();
  caught_signal = 0;
  Signals signals;
  Workers group(options);
  group.start(*store, port);
  if (!options.again) fork_server.reset();
  return group.wait();
}

const char* network_of_worker() { return std::getenv(kNetworkVariable); }

bool is_launched_worker() { return std::getenv(kReportVariable) != nullptr; }

void note_signals() {
  static Signals* kept = nullptr;
  if (kept == nullptr) kept = new Signals;
}

int noted_signal() { return caught_signal; }

void set_threads(int threads) {
  at::set_num_threads(threads);
  set_blas_threads(threads);
}

void keep_freed_memory() {
  memory_is_kept = true;
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

void reserve_memory(Bytes bytes) {
  const auto free = static_cast<Bytes>(sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE));
  if (!memory_is_kept || !(bytes >= 1)) return;
  const auto size = static_cast<size_t>(std::min(bytes, free / 4));
  // Ones: malloc and zeros would become calloc, which does not touch fresh pages.
  void* block = std::malloc(size);
  if (block != nullptr) std::memset(block, 1, size);
  asm volatile("" : : "r"(block) : "memory");
  std::free(block);
}

void run_worker(const std::function<void()>& body) {
  keep_freed_memory();
  if (!is_launched_worker()) return body();
  if (const char* rank = std::getenv("RANK"))
    prctl(PR_SET_NAME, fmt::format("motley-rank-{}", rank).c_str());  // for ps
  const int fd = std::atoi(std::getenv(kReportVariable));
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  Json report;
  int code = 1;
  try {
    return body();
  } catch (const WorkerMissing& e) {
    report = {{"kind", "user"}, {"message", e.what()}, {"rank", e.rank}};
    code = 2;
  } catch (const UserError& e) {
    report = {{"kind", "user"}, {"message", e.what()}};
    code = 2;
  } catch (const Interrupted& e) {
    report = {{"kind", "stopped"}, {"message", e.what()}, {"signal", e.signal}};
  } catch (const PeerLost& e) {
    // A hung worker is the cause, and only the others can say so.
    const std::string lost = Watch::lost();  // "rank 2"
    const size_t space = lost.find(' ');
    report = {{"kind", lost.empty() ? "peer lost" : "hung"}, {"message", e.what()}};
    if (space != std::string::npos) report["rank"] = std::atoi(lost.c_str() + space);
    if (const std::vector<int> ranks = Watch::unreachable(); !ranks.empty()) {
      report["kind"] = "cut off";  // they, or this one
      report["ranks"] = ranks;
    }
  } catch (const std::exception& e) {
    const std::string text = e.what();
    report = {{"kind", "internal"}, {"message", text.substr(0, text.find('\n'))}};
  }
  const std::string text = report.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (write(fd, text.data(), text.size()) < 0) code = 1;
  _exit(code);
}

}  // namespace motley

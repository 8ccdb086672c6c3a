// Local workers: one command started several times on this machine.
//
// The launcher holds the store where the workers meet and speaks torchrun's protocol (RANK,
// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so a worker does not care who started it. The
// workers die with the launcher, however it ends. When one fails, the others are stopped and one
// error says which worker failed and why: a worker reports its exception through a pipe, and a
// report that names a cause, or a death by signal, goes before the complaints of workers that lost
// a peer.
#pragma once

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/units.h"
#include "testbed/network.h"

namespace motley {

constexpr int kMaxLocalWorkers = 64;

struct LaunchOptions {
  std::string program;                 // empty: this very program
  std::vector<std::string> arguments;  // without the program's name
  int workers = 1;
  bool capture = false;                            // rank 0's standard output is returned
  int threads = 1;                                 // of each worker
  std::map<std::string, std::string> environment;  // more variables for the workers
  bool stops =
      false;  // on SIGINT and SIGTERM workers end by themselves; a second signal kills them
  const Network* network = nullptr;  // whose workers' namespaces the workers are started in
  std::vector<int> places = {};      // [worker] which of these; empty: as numbered
  std::function<bool()> leave = {};  // asked twice a second: whether all workers are to be stopped
  bool again = false;  // workers are launched once more after these: what prepared them stays
};

// `leave` said so. The workers were stopped.
class WorkersLeft : public std::runtime_error {
 public:
  WorkersLeft() : std::runtime_error("[run] the workers were stopped") {}
};

// A worker that was killed, ended without a word, or hangs. The others were stopped.
class WorkerLost : public std::runtime_error {
 public:
  WorkerLost(int r, const std::string& what) : std::runtime_error(what), rank(r) {}
  int rank;
};

// Workers of this program will begin as copies of this process (comm/fork_server.h), which runs
// `main` in them. To be called first of all; where there are threads already, it does nothing, and
// workers load the program anew.
void prepare_workers(int (*main)(int, char**));

// Starts the workers and waits for them. Only rank 0 keeps standard output; standard error is
// shared. MASTER_PORT is used if set, any free port otherwise. Throws what the first failing worker
// threw if it was a UserError, WorkerLost where it is gone, WorkersLeft, std::runtime_error with one line otherwise. On SIGINT, SIGTERM and
// SIGHUP the workers end and Interrupted (core/interrupted.h) is thrown.
std::string launch_workers(const LaunchOptions& options);

// True in a process that launch_workers started.
bool is_launched_worker();

// Network::mode() of the network this worker was started in; nullptr: the machine's own.
const char* network_of_worker();

// From now on SIGINT, SIGTERM and SIGHUP are noted; which of them came last, 0: none.
void note_signals();
int noted_signal();

// Threads of one operator in this process.
void set_threads(int threads);
// From now on this process keeps the memory that it frees, for the next step and whichever thread:
// pages that go back to the system cost more to get again than an optimizer's pass over them.
void keep_freed_memory();
// Then also: makes that much memory the process's own, at most a quarter of what is free. On an
// emulated device the time in which the system finds pages would be padded like work.
void reserve_memory(Bytes bytes);

// Runs a worker's body. In a launched worker what it throws is reported to the launcher and the
// process ends at once, without waiting for the group; elsewhere it is thrown on.
void run_worker(const std::function<void()>& body);

}  // namespace motley

// Groups of processes: the Communicator over c10d's gloo backend.
//
// Rings carry everything whose total is what matters, all-to-all goes pair by pair. With p workers,
// S bytes in all and m the largest piece:
//
//   all_reduce       gloo's ring                                    2(p-1)/p S per link
//   all_gather       gloo's ring where pieces are equal and numerous, else p-1 rounds to the right
//                    neighbour: (p-1) m per link
//   reduce_scatter   gloo has none: p-1 rounds of partial sums to the right neighbour, (p-1) m
//   all_to_all       every pair at once, without copies
//
// Pieces travel as bytes, so every dtype works; sums of 16-bit numbers are taken in f32. Empty
// pieces are not sent.
//
// A worker that dies closes its connections. Every collective of the others then fails within
// milliseconds with PeerLost, one line that names the worker where the connection tells.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/error.h"

namespace motley {

// Where the workers of a run meet.
struct Rendezvous {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";
  int port = 29500;
  bool store_outside = false;         // a launcher holds the store; otherwise rank 0 does
  bool of_torch = false;              // the store is one of torch's, held outside
  std::string token;                  // of our own store (store.h)
  std::string prefix;                 // of keys in the store
  std::chrono::seconds patience{60};  // until all workers must be there
  std::vector<int> numbers;           // [rank] what messages call a worker; empty: its rank

  int number(int r) const { return numbers.empty() ? r : numbers[static_cast<size_t>(r)]; }
};

// Where some workers of a group that has been joined meet for a group of their own. `ranks` of the
// larger group, this one's among them; `name` tells such groups apart.
Rendezvous part_of(const Rendezvous& whole, const std::vector<int>& ranks, const std::string& name);

// Reads what launchers set: RANK and WORLD_SIZE (motley itself, torchrun), SLURM_PROCID and
// SLURM_NTASKS of a step of several tasks, or OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE; with
// MASTER_ADDR and MASTER_PORT. Workers of motley's own launcher find its store in MOTLEY_STORE;
// where rank 0 holds it, its token is MOTLEY_TOKEN, or made of the launcher's job. Nothing if no
// launcher started this process. Throws UserError naming the variable that is missing or wrong.
std::optional<Rendezvous> rendezvous_from_environment();

// Another worker is gone or does not answer. A consequence, not a cause.
class PeerLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Not all workers came. The first of them.
class WorkerMissing : public UserError {
 public:
  WorkerMissing(int r, const std::string& what) : UserError(what), rank(r) {}
  int rank;
};

enum class Traffic { ring, all_pairs };

class ProcessCommunicator : public Communicator {
 public:
  // [rank] The connected socket to each peer, for pacing; -1: this rank, or not found.
  virtual const std::vector<int>& sockets() const = 0;
  // Called before each collective with the pairs that it uses.
  virtual void on_traffic(std::function<void(Traffic)> hook) = 0;
  // Ends the connections and the threads that serve them, so that none of these runs while the process
  // takes its libraries down. Collectives throw UserError from then on. REQUIRES: no thread is in one.
  virtual void close() = 0;
};

// Joins the group; returns when all workers are connected. Throws UserError if the store's port is
// taken or nobody answers there, and if not all workers come within the time limit.
std::unique_ptr<ProcessCommunicator> join_group(const Rendezvous& rendezvous);

// The meeting point of local workers, held by the process that starts them.
class RendezvousStore {
 public:
  // On one address of this machine. port 0: any free one. Throws UserError if the port is taken.
  explicit RendezvousStore(int port, const std::string& address = "127.0.0.1");
  ~RendezvousStore();
  int port() const;
  const std::string& token() const;
  // Rank `rank` of `size` that meets there.
  Rendezvous member(int rank, int size) const;
  // The variable for workers: "MOTLEY_STORE" is "address port token".
  std::string text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace motley

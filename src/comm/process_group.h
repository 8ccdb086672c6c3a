// A Communicator over any backend of c10d, by what all of them have: all-reduce, broadcast and
// all-to-all of uneven pieces. It is for NCCL (nccl.h); gloo.h has one that suits gloo better.
//
//   all_reduce       the backend's
//   all_gather       the backend's, of pieces padded to the largest; the grouped form is one
//                    broadcast per piece, posted together, one NCCL group
//   reduce_scatter   all-to-all, then sums in rank order
//   all_to_all       the backend's, of one buffer
//
// Pieces travel as bytes, so every dtype works; sums of 16-bit numbers are taken in f32. Empty
// pieces are not broadcast. On a CUDA device results are there in the order of the current stream;
// barrier() waits for the device.
//
// Tested over gloo on the CPU; it has not been run over NCCL.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>

#include "comm/communicator.h"
#include "comm/gloo.h"
#include "core/error.h"
#include "interpret/torch_version.h"

namespace motley {

// For one collective, which includes waiting for slower workers.
constexpr std::chrono::minutes kCollectiveTime{30};

// What ProcessGroupGloo and ProcessGroupNCCL derive from: c10d::ProcessGroup in libtorch 1,
// c10d::Backend in libtorch 2.
#if MOTLEY_TORCH_AT_LEAST(2, 0)
using CollectiveBackend = c10d::Backend;
#else
using CollectiveBackend = c10d::ProcessGroup;
#endif

// All tensors given to it are on `device`. `number`: what messages call this worker, if not by its
// rank.
std::unique_ptr<Communicator> communicator_over(c10::intrusive_ptr<CollectiveBackend> group,
                                                at::Device device, std::optional<int> number = {});

// A group of c10d's gloo, between the members of `where` that meet in the store.
c10::intrusive_ptr<CollectiveBackend> gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const Rendezvous& where);

// Connects to the store, waits until all workers are there, and has them watched (store.h). Throws
// UserError as join_group does, and if workers meet for different backends.
c10::intrusive_ptr<c10d::Store> meet(const Rendezvous& where, const std::string& backend);

// Throws what set_up() does while it waits.
void check_set_up(const Rendezvous& where, const char* what,
                  std::chrono::steady_clock::time_point until);

// body(), which may wait for others for ever, in a thread of its own. Throws PeerLost if one of
// them ends or hangs meanwhile, UserError when the time is over; then the thread is left behind.
template <typename Result, typename Body>
Result set_up(const Rendezvous& where, const char* what, Body body) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Result> result;
    std::exception_ptr failure;
  };
  auto state = std::make_shared<State>();
  std::thread([state, body] {
    std::optional<Result> result;
    std::exception_ptr failure;
    try {
      result.emplace(body());
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(state->mutex);
    state->result = std::move(result);
    state->failure = failure;
    state->changed.notify_all();
  }).detach();
  const auto until = std::chrono::steady_clock::now() + where.patience + std::chrono::seconds(2);
  std::unique_lock lock(state->mutex);
  while (!state->result && !state->failure) {
    state->changed.wait_for(lock, std::chrono::milliseconds(50));
    if (!state->result && !state->failure) check_set_up(where, what, until);
  }
  if (state->failure) std::rethrow_exception(state->failure);
  return std::move(*state->result);
}
// What c10d threw during a collective, in one line; `who` is gone if somebody is.
PeerLost peer_lost(int rank, const std::string& who, const char* what, const std::exception& error);

// Runs a collective, body(). Throws PeerLost for what c10d throws; who() is gone.
template <typename Who, typename Body>
void run_collective(int rank, const Who& who, const char* what, const Body& body) {
  try {
    body();
  } catch (const UserError&) {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& e) {
    throw peer_lost(rank, who(), what, e);
  }
}

}  // namespace motley

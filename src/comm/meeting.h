// How the workers of a launch meet in a store, are watched meanwhile, and what they throw when one of them is lost.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/gloo.h"
#include "comm/idle.h"
#include "core/error.h"
#include "core/fault.h"

namespace motley {

// For one collective, which includes waiting for slower workers.
constexpr std::chrono::minutes kCollectiveTime{30};

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
  const WaitsForOthers waits;
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
  fault_point("collective");
  const WaitsForOthers waits;
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

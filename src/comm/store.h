// Where workers meet: a key-value store, and a watch over who still answers.
//
// The process that starts local workers holds it, or rank 0 does where a launcher of others started
// them. It listens on one interface: loopback for local runs. Every connection begins with a token
// and has a few seconds for it; what strangers send, or half send, holds nobody up, since the
// server never waits for one connection. Workers of torchrun meet in its own store instead
// (gloo.h), and rank 0 holds one of these for the watch.
//
// The watch. A thread of every worker says once a second that it is there, whatever the worker
// computes: slow is not hung. A worker that says nothing for hang_limit() (it is stopped, or its
// machine is) is named to all others, whose connections to their peers are closed then: every
// collective ends with PeerLost. So is one that neither computes nor waits for others for as long
// (idle.h), while another one waits. A worker that was itself stopped counts no time for that. Two
// workers whose way to each other is cut, while the server hears both, see that themselves.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace motley {

// How long a worker may say nothing: MOTLEY_HANG_SECONDS, 30 if unset. Throws UserError naming the
// variable if it is not a number from 0.1 to 86400.
std::chrono::milliseconds hang_limit();

// 128 random bits in hexadecimal.
std::string random_token();

// The numeric addresses to listen on so that workers reach `host`: {"127.0.0.1"} for local names;
// {""}, all interfaces, where it is no address of this machine, or the name is another one
// elsewhere (one that this machine maps to loopback).
std::vector<std::string> addresses_to_listen(const std::string& host);

class StoreServer {
 public:
  // port 0: any free one. Throws UserError if the port is taken. `rank0`: the holder is rank 0, and
  // is missed if it says nothing.
  StoreServer(const std::string& address, int port, std::string token, bool rank0);
  ~StoreServer();
  int port() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A connection to a server. Throws std::runtime_error where nobody answers within `patience`, or
// not to this token.
c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, int port,
                                              const std::string& token,
                                              std::chrono::milliseconds patience);

// The watch of this process.
class Watch {
 public:
  // Says from now on that `rank` is there. One that is watched already stays so.
  static void start(int rank, const std::string& host, int port, const std::string& token);
  // The worker that is lost, "rank 2"; empty: none is. And why, in words.
  static std::string lost();
  // Where nothing comes from workers that the holder of the store may still hear, so that they or this
  // one are cut off: their ranks. Empty: it is not so.
  static std::vector<int> unreachable();
  static std::string reason();
  // The workers whose process ended without a word since the start, in words; empty: none.
  static std::string ended();
  // Shuts these sockets down when a worker is lost, until they are forgotten. [socket] in `ranks`: the
  // worker at its other end, who is lost, too, when nothing comes from its machine for hang_limit(), at
  // least 3 s; machines answer for processes that are stopped or busy. Negative sockets are none.
  static void close_when_lost(const std::vector<int>& sockets, const std::vector<int>& ranks);
  static void forget(const std::vector<int>& sockets);
  // Says from now on also whether this worker does anything. Where a script may sleep as it likes, it
  // is not said, and who waits for it waits.
  static void say_when_idle();
  // Ends this process with one line when a worker is lost, for backends whose waiting cannot be
  // ended.
  static void exit_when_lost();
  // Stops saying that this worker is there, in good order.
  static void stop();
};

}  // namespace motley

// What counts as doing something.
#include "comm/idle.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

namespace motley {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kTime{1500};

void compute_until(Clock::time_point end) {
  for (volatile int64_t i = 0; Clock::now() < end;) i = i + 1;
}
void sleep_until(Clock::time_point end) { std::this_thread::sleep_until(end); }

// What another thread sees while this one does something for kTime: the longest of either.
Activity::Now seen_during(const std::function<void(Clock::time_point)>& body) {
  std::atomic<bool> over{false};
  Activity::Now most;
  std::thread other([&] {
    for (Activity activity; !over; std::this_thread::sleep_for(milliseconds(20))) {
      const Activity::Now now = activity.look();
      most.idle = std::max(most.idle, now.idle);
      most.waiting = std::max(most.waiting, now.waiting);
    }
  });
  body(Clock::now() + kTime);
  over = true;
  other.join();
  return most;
}

// While a child does something for as long.
void with_child(const std::function<void(Clock::time_point)>& body, Clock::time_point end) {
  const pid_t child = fork();
  if (child == 0) {
    body(end);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
}

TEST(Idle, WhoSleepsForEver) {
  const Activity::Now seen = seen_during(sleep_until);
  EXPECT_GT(seen.idle, kTime * 2 / 3);
  EXPECT_LE(seen.idle, kTime * 2);
  EXPECT_EQ(seen.waiting.count(), 0);
}

TEST(Idle, WhoComputesIsNot) { EXPECT_LT(seen_during(compute_until).idle, kTime / 4); }

TEST(Idle, WhoOftenWakesUpIsNot) {
  const auto reads = [](Clock::time_point end) {
    while (Clock::now() < end) std::this_thread::sleep_for(milliseconds(40));
  };
  EXPECT_LT(seen_during(reads).idle, kTime / 4);
}

// gloo's threads wake up for ever.
TEST(Idle, OfOtherThreadsWhatTheyReadAndWriteCounts) {
  const auto another = [](size_t bytes) {
    return seen_during([bytes](Clock::time_point end) {
      std::thread([&] {
        const std::string block(bytes, 'x');
        for (std::ofstream file("/dev/null"); Clock::now() < end;) {
          file << block << std::flush;
          std::this_thread::sleep_for(milliseconds(40));
        }
      }).join();
    });
  };
  EXPECT_LT(another(1 << 16).idle, kTime / 4);
  EXPECT_GT(another(0).idle, kTime / 2);
}

TEST(Idle, WhoWaitsForOthersIsNot) {
  const Activity::Now seen = seen_during([](Clock::time_point end) {
    const WaitsForOthers waits;
    sleep_until(end);
  });
  EXPECT_EQ(seen.idle.count(), 0);
  EXPECT_GT(seen.waiting, kTime * 2 / 3);
}

TEST(Idle, WhatItStartedCounts) {
  EXPECT_LT(seen_during([](Clock::time_point end) { with_child(compute_until, end); }).idle,
            kTime / 4);
  EXPECT_GT(seen_during([](Clock::time_point end) { with_child(sleep_until, end); }).idle,
            kTime / 2);
  // Plans that are made beforehand.
  const auto beside = [](Clock::time_point end) {
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);
    compute_until(end);
  };
  EXPECT_GT(seen_during([&](Clock::time_point end) { with_child(beside, end); }).idle, kTime / 2);
}

}  // namespace
}  // namespace motley

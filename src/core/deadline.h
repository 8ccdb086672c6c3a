// When a search has to end. It looks now and then, every few milliseconds: where it has an answer
// it returns that, where it has none yet it throws TimeIsUp to whoever does. One point in time is
// handed down to all searches; when most of the time is gone (near()) they keep fewer states.
// Without a limit nothing looks at the clock.
#pragma once

#include <chrono>
#include <exception>
#include <limits>

namespace motley {

struct TimeIsUp : std::exception {
  const char* what() const noexcept override { return "time is up"; }
};

class Deadline {
 public:
  Deadline() = default;  // never
  // So many seconds from now.
  static Deadline in(double seconds) {
    Deadline deadline;
    deadline.begin_ = now();
    deadline.end_ = deadline.begin_ + seconds;
    return deadline;
  }
  // At that part of the time from now on.
  Deadline part(double of_what_is_left) const {
    return never() ? *this : in(left() * of_what_is_left);
  }
  bool never() const { return !(end_ < kLatest); }
  double left() const { return never() ? kLatest : end_ - now(); }  // seconds
  bool over() const { return !never() && now() > end_; }
  // Most of the time is gone: what is not yet found should be found in a simpler way.
  bool near() const { return !never() && now() > begin_ + kNear * (end_ - begin_); }
  void check() const {
    if (over()) throw TimeIsUp();
  }

 private:
  static constexpr double kLatest = 1e15, kNear = 0.6;
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  double begin_ = 0, end_ = std::numeric_limits<double>::infinity();
};

}  // namespace motley

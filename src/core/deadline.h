// When a search has to end: at a point in time, after so much work, or when someone interrupts it.
// It looks now and then, every few milliseconds: where it has an answer it returns that, where it
// has none yet it throws TimeIsUp to whoever does. One deadline is handed down to all searches, and
// parts of it to those that others follow; when most of it is gone (near()) searches keep fewer
// states. A part counts its own work, and that of the whole.
//
// Work is counted where searches look: states that they expand, nodes that they sweep or price. A
// search that ends after so much work does the same on every machine, if on one thread. Without a
// limit nothing looks at the clock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>

namespace motley {

struct TimeIsUp : std::exception {
  const char* what() const noexcept override { return "time is up"; }
};

class Deadline {
 public:
  struct Limits {
    double seconds = std::numeric_limits<double>::infinity();  // from now
    int64_t work = std::numeric_limits<int64_t>::max();
    const std::atomic<bool>* interrupted = nullptr;  // outlives the deadline; null: by nobody
  };

  Deadline() = default;  // never
  explicit Deadline(const Limits& limits) : shared_(std::make_shared<Shared>()) {
    shared_->interrupted = limits.interrupted;
    work_end_ = limits.work;
    begin_ = now();
    end_ = begin_ + limits.seconds;
  }
  // So many seconds from now.
  static Deadline in(double seconds) { return Deadline(Limits{.seconds = seconds}); }

  // The same, and work() counts from now on.
  Deadline counting() const {
    Deadline part = *this;
    part.shared_ = std::make_shared<Shared>();
    part.shared_->whole = shared_;
    part.shared_->interrupted = shared_ ? shared_->interrupted : nullptr;
    if (counted()) {
      part.work_begin_ -= work();
      part.work_end_ -= work();
    }
    return part;
  }
  // At that part of the time, and of the work, from now on.
  Deadline part(double of_what_is_left) const {
    Deadline part = counting();
    if (timed()) {
      part.begin_ = now();
      part.end_ = part.begin_ + left() * of_what_is_left;
    }
    if (counted()) {
      part.work_begin_ = 0;
      part.work_end_ = static_cast<int64_t>(static_cast<double>(part.work_end_) * of_what_is_left);
    }
    return part;
  }
  // Seconds; very many where time is not limited.
  double left() const { return timed() ? end_ - now() : kLatest; }
  int64_t work() const { return shared_ ? shared_->work.load() : 0; }  // so far, in all parts
  bool interrupted() const { return shared_ && shared_->interrupted && *shared_->interrupted; }
  bool over() const {
    return interrupted() || (counted() && work() > work_end_) || (timed() && now() > end_);
  }
  // Most of it is gone: what is not yet found should be found in a simpler way.
  bool near() const {
    return interrupted() ||
           (counted() && static_cast<double>(work() - work_begin_) >
                             kNear * static_cast<double>(work_end_ - work_begin_)) ||
           (timed() && now() > begin_ + kNear * (end_ - begin_));
  }
  void spend(int64_t work) const {
    for (Shared* s = shared_.get(); s; s = s->whole.get()) s->work += work;
  }
  // Throws TimeIsUp if it is over, with that much more work done.
  void check(int64_t work = 0) const {
    spend(work);
    if (over()) throw TimeIsUp();
  }

 private:
  // What copies of a deadline have in common.
  struct Shared {
    std::atomic<int64_t> work = 0;
    std::shared_ptr<Shared> whole;  // that this is a part of; null: none
    const std::atomic<bool>* interrupted = nullptr;
  };
  static constexpr double kLatest = 1e15, kNear = 0.6;
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  bool timed() const { return end_ < kLatest; }
  bool counted() const { return work_end_ < std::numeric_limits<int64_t>::max(); }

  std::shared_ptr<Shared> shared_;
  double begin_ = 0, end_ = std::numeric_limits<double>::infinity();
  int64_t work_begin_ = 0, work_end_ = std::numeric_limits<int64_t>::max();
};

}  // namespace motley

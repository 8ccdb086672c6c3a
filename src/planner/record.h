// What planning has found so far: engines tell it as they go, from any thread; whoever watches sees
// it at once.
#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <string>

#include "core/units.h"

namespace motley::planner {

struct Progress {
  double seconds = 0;  // since planning began
  // The step of the best plan so far; infinite: there is none. And its engine.
  Seconds best = std::numeric_limits<double>::infinity();
  std::string engine;
  Seconds bound = 0;   // no plan takes less; 0: not known yet
  std::string trying;  // "pipeline: micro-batches of 8"
};

class Record {
 public:
  // `watch` is told of all that changes, one thing at a time; empty: nobody watches.
  explicit Record(std::function<void(const Progress&)> watch = {});

  void found(const std::string& engine, Seconds step);
  void trying(const std::string& what);
  void bounded(Seconds bound);

  Progress now() const;
  // Seconds from the beginning to the first plan; infinite: there is none.
  double first_s() const;

 private:
  double seconds() const;

  const std::function<void(const Progress&)> watch_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  Progress progress_;
  double first_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace motley::planner

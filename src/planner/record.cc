#include "planner/record.h"

#include <algorithm>
#include <utility>

namespace motley::planner {

Record::Record(std::function<void(const Progress&)> watch) : watch_(std::move(watch)) {}

void Record::found(const std::string& engine, Seconds step) {
  const std::lock_guard lock(mutex_);
  first_s_ = std::min(first_s_, seconds());
  if (step >= progress_.best) return;
  progress_.best = step;
  progress_.engine = engine;
  progress_.seconds = seconds();
  if (watch_) watch_(progress_);
}

void Record::trying(const std::string& what) {
  const std::lock_guard lock(mutex_);
  progress_.trying = what;
  progress_.seconds = seconds();
  if (watch_) watch_(progress_);
}

void Record::bounded(Seconds bound) {
  const std::lock_guard lock(mutex_);
  progress_.bound = bound;
  progress_.seconds = seconds();
  if (watch_) watch_(progress_);
}

Progress Record::now() const {
  const std::lock_guard lock(mutex_);
  Progress progress = progress_;
  progress.seconds = seconds();
  return progress;
}

double Record::first_s() const {
  const std::lock_guard lock(mutex_);
  return first_s_;
}

double Record::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace motley::planner

#include "comm/background.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <chrono>
#include <iterator>
#include <memory>
#include <utility>

namespace motley {

Background::Background(at::Device device) : device_(device) {
  if (has_streams(device)) stream_ = Beside::new_stream(device);
  thread_ = std::thread([this, threads = at::get_num_threads()] {
    at::set_num_threads(threads);  // of this thread's own pool
    run();
  });
}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    work_.clear();
  }
  changed_.notify_all();
  thread_.join();
}

int64_t Background::start(std::function<void()> work) {
  const at::ThreadLocalState state;
  const std::lock_guard lock(mutex_);
  work_.push_back([this, state, begin = std::make_shared<Moment>(device_), work = std::move(work)] {
    const at::ThreadLocalStateGuard guard(state);
    const Beside beside(device_, stream_);
    begin->hold_up();
    work();
    if (!has_streams(device_)) return;
    const std::lock_guard inside(mutex_);
    over_.emplace(done_ + 1, Moment(device_));
  });
  changed_.notify_all();
  return ++started_;
}

void Background::wait(int64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number || failure_; });
  if (failure_) std::rethrow_exception(failure_);
  if (auto end = over_.find(number); end != over_.end()) {
    end->second.hold_up();
    over_.erase(over_.begin(), std::next(end));
  }
}

void Background::keep(const at::Tensor& tensor) const {
  if (stream_) tensor.record_stream(*stream_);
}

void Background::keep_for_caller(const at::Tensor& tensor) const {
  if (stream_) tensor.record_stream(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void Background::wait_all() {
  int64_t last = 0;
  {
    const std::lock_guard lock(mutex_);
    last = started_;
  }
  wait(last);
}

bool Background::idle() {
  const std::lock_guard lock(mutex_);
  return done_ == started_ || failure_;
}

double Background::worked() {
  const std::lock_guard lock(mutex_);
  return worked_;
}

void Background::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || (!work_.empty() && !failure_); });
    if (ending_) return;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    const auto begin = std::chrono::steady_clock::now();
    std::exception_ptr failure;
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    work = nullptr;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    lock.lock();
    worked_ += seconds;
    ++done_;
    if (failure) failure_ = failure;
    changed_.notify_all();
  }
}

namespace {

class Later final : public Message {
 public:
  Later(Background& background, int64_t number, std::function<void()> then)
      : background_(background), number_(number), then_(std::move(then)) {}
  ~Later() override {
    try {
      wait();
    } catch (const std::exception&) {  // whoever waits for another is told
    }
  }
  void wait() override {
    if (number_ == 0) return;
    background_.wait(std::exchange(number_, 0));
    if (then_) then_();
  }

 private:
  Background& background_;
  int64_t number_;
  std::function<void()> then_;
};

}  // namespace

std::unique_ptr<Message> message_of(Background& background, int64_t number,
                                    std::function<void()> then) {
  return std::make_unique<Later>(background, number, std::move(then));
}

}  // namespace motley

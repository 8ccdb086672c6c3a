#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/error.h"

namespace motley {

namespace {

struct Aborted {};

// A barrier and mailboxes that can be broken: when one thread fails, the others leave with Aborted.
// Threads are woken one by one, or all by one call: they meet millions of times in tests.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), posts_(size), boxes_(size) {}

  // Everybody posts a list of tensors, then sees everybody's.
  const std::vector<std::vector<at::Tensor>>& post(int rank, std::vector<at::Tensor> tensors) {
    posts_[rank] = std::move(tensors);
    wait();
    return posts_;
  }
  // Waits for everybody to have seen what was posted, and lets go of it.
  void seen(int rank) {
    wait();
    posts_[rank].clear();
  }
  void wait() {
    const int round =
        round_;  // before it is seen that nobody aborted: who aborts goes on to the next
    if (aborted_) throw Aborted();
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      round_.notify_all();
      return;
    }
    round_.wait(round);
    if (aborted_) throw Aborted();
  }
  void put(int from, int to, int tag, at::Tensor tensor) {
    Mailbox& box = boxes_[to];
    {
      std::lock_guard lock(box.mutex);
      box.mail[{from, tag}].push_back(std::move(tensor));
    }
    box.changed.notify_all();
  }
  at::Tensor take(int from, int to, int tag) {
    Mailbox& box = boxes_[to];
    std::unique_lock lock(box.mutex);
    std::deque<at::Tensor>& mail = box.mail[{from, tag}];
    box.changed.wait(lock, [&] { return !mail.empty() || aborted_; });
    if (mail.empty()) throw Aborted();
    at::Tensor tensor = std::move(mail.front());
    mail.pop_front();
    return tensor;
  }
  void abort() {
    aborted_ = true;
    ++round_;
    round_.notify_all();
    for (Mailbox& box : boxes_) {
      { std::lock_guard lock(box.mutex); }  // who waits has seen it, or is woken
      box.changed.notify_all();
    }
  }

 private:
  struct Mailbox {  // of one rank
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::pair<int, int>, std::deque<at::Tensor>> mail;  // by (from, tag)
  };

  const int size_;
  std::atomic<int> arrived_ = 0, round_ = 0;
  std::atomic<bool> aborted_ = false;
  std::vector<std::vector<at::Tensor>> posts_;
  std::vector<Mailbox> boxes_;
};

class Sent final : public Message {
 public:
  explicit Sent(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  void wait() override { tensor_.reset(); }

 private:
  at::Tensor tensor_;  // stays until then, as over sockets
};

class Awaited final : public Message {
 public:
  Awaited(Meeting& meeting, int from, int to, int tag, at::Tensor tensor)
      : meeting_(meeting), from_(from), to_(to), tag_(tag), tensor_(std::move(tensor)) {}
  void wait() override {
    if (!tensor_.defined()) return;
    const at::Tensor arrived = meeting_.take(from_, to_, tag_);
    MOTLEY_CHECK(arrived.sizes() == tensor_.sizes() && arrived.dtype() == tensor_.dtype(),
                 "a message from rank {} has another shape than expected", from_);
    tensor_.copy_(arrived);
    tensor_.reset();
  }

 private:
  Meeting& meeting_;
  int from_, to_, tag_;
  at::Tensor tensor_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(Meeting& meeting, int rank, int size)
      : meeting_(meeting), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    // Each takes an equal part for all, so that nobody needs another whole tensor.
    const auto& posts = meeting_.post(rank_, {tensor.view({-1})});
    const int64_t n = tensor.numel(), begin = n * rank_ / size_,
                  length = n * (rank_ + 1) / size_ - begin;
    for (int r = 1; r < size_; ++r)
      MOTLEY_CHECK(posts[r][0].numel() == n, "all_reduce of different shapes");
    at::Tensor total = posts[0][0].narrow(0, begin, length).clone();
    for (int r = 1; r < size_; ++r) {
      const at::Tensor part = posts[r][0].narrow(0, begin, length);
      if (reduction == Reduction::sum)
        total.add_(part);
      else
        at::maximum_out(total, total, part);
    }
    for (int r = 0; r < size_; ++r) posts[r][0].narrow(0, begin, length).copy_(total);
    meeting_.seen(rank_);
  }
  void all_gather(std::vector<at::Tensor>& pieces) override {
    const auto& posts = meeting_.post(rank_, {pieces[rank_]});
    for (int r = 0; r < size_; ++r)
      if (r != rank_) fill(pieces[r], posts[r][0]);
    meeting_.seen(rank_);
  }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    const auto& posts = meeting_.post(rank_, pieces);
    at::Tensor total = posts[0][rank_].clone();
    for (int r = 1; r < size_; ++r) total.add_(posts[r][rank_]);
    meeting_.seen(rank_);
    return total;
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    const auto& posts = meeting_.post(rank_, send);
    for (int r = 0; r < size_; ++r) fill(receive[r], posts[r][rank_]);
    meeting_.seen(rank_);
  }
  void barrier() override { meeting_.wait(); }
  void abort() override { meeting_.abort(); }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    // The copy stands for what is in the network: no worker's memory, and not libtorch's.
    at::Tensor copy = at::from_blob(std::malloc(std::max<size_t>(1, tensor.nbytes())),
                                    tensor.sizes(), std::free, tensor.options());
    meeting_.put(rank_, to, tag, copy.copy_(tensor));
    return std::make_unique<Sent>(tensor);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    return std::make_unique<Awaited>(meeting_, from, rank_, tag, tensor);
  }

 private:
  static void fill(at::Tensor& to, const at::Tensor& from) {
    MOTLEY_CHECK(to.sizes() == from.sizes(), "a piece has another shape than expected");
    to.copy_(from);
  }

  Meeting& meeting_;
  int rank_, size_;
};

}  // namespace

std::unique_ptr<Message> Communicator::send(const at::Tensor&, int, int) {
  throw user_error("run",
                   "this backend has no messages between two workers, which pipelines need; use "
                   "--device cpu");
}
std::unique_ptr<Message> Communicator::receive(at::Tensor& tensor, int from, int tag) {
  return send(tensor, from, tag);
}

void run_thread_group(int size, const std::function<void(Communicator&)>& body) {
  Meeting meeting(size);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        ThreadCommunicator communicator(meeting, r, size);
        body(communicator);
      } catch (const Aborted&) {
      } catch (...) {
        {
          std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        meeting.abort();
      }
    });
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace motley

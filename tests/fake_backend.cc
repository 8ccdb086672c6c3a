#include "fake_backend.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "core/error.h"
#include "core/rng.h"

namespace motley {

namespace {

using Work = c10d::Work;
using WorkPointer = c10::intrusive_ptr<Work>;

class FakeWork final : public Work {
 public:
  void done(std::exception_ptr failure) { finish(std::move(failure)); }
};

// What a rank brings to a collective.
struct Offer {
  std::string what;  // must be equal on all ranks
  std::vector<at::Tensor> in, out;
  int root = 0;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
};

// What all ranks of all groups share.
class Fabric {
 public:
  explicit Fabric(FakeOptions options) : options_(std::move(options)), rng_(options_.seed) {}
  const FakeOptions& options() const { return options_; }

  // Three works of four begin at once.
  void sleep() {
    std::chrono::microseconds time{0};
    {
      const std::lock_guard lock(mutex_);
      if (rng_.chance(0.25))
        time = std::chrono::microseconds(
            rng_.below(static_cast<uint64_t>(options_.longest.count()) + 1));
    }
    if (time.count() > 0) std::this_thread::sleep_for(time);
  }

  // Until all have come; the last one computes.
  void meet(const std::string& group, int64_t number, int rank, int size, Offer offer) {
    std::unique_lock lock(mutex_);
    auto& meeting = meetings_[{group, number}];
    if (meeting == nullptr) meeting = std::make_shared<Meeting>();
    const auto mine = meeting;
    mine->offers[rank] = std::move(offer);
    if (static_cast<int>(mine->offers.size()) == size) {
      meetings_.erase({group, number});
      compute(mine.get());
      mine->done = true;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return mine->done || ended_; });
    if (!mine->done) throw std::runtime_error("another rank has ended");
    if (!mine->problem.empty()) throw std::runtime_error(mine->problem);
  }

  struct Letter {
    at::Tensor tensor;
    int tag = 0;
    bool taken = false;
  };
  using Channel = std::tuple<std::string, int, int>;  // group, from, to

  void send(const Channel& channel, const at::Tensor& tensor, int tag) {
    std::unique_lock lock(mutex_);
    auto letter = std::make_shared<Letter>();
    letter->tensor = tensor;
    letter->tag = tag;
    letters_[channel].push_back(letter);
    changed_.notify_all();
    changed_.wait(lock, [&] { return letter->taken || ended_; });
    if (!letter->taken) throw std::runtime_error("another rank has ended");
  }
  void receive(const Channel& channel, at::Tensor tensor, int tag) {
    std::unique_lock lock(mutex_);
    auto& waiting = letters_[channel];
    auto it = waiting.end();
    changed_.wait(lock, [&] {
      it = options_.tags ? std::find_if(waiting.begin(), waiting.end(),
                                        [&](const auto& l) { return l->tag == tag; })
                         : waiting.begin();
      return it != waiting.end() || ended_;
    });
    if (it == waiting.end()) throw std::runtime_error("another rank has ended");
    const auto letter = *it;
    waiting.erase(it);
    const bool fits = letter->tensor.nbytes() == tensor.nbytes() &&
                      letter->tensor.scalar_type() == tensor.scalar_type();
    if (fits) tensor.copy_(letter->tensor);
    letter->taken = true;
    changed_.notify_all();
    if (!fits) throw std::runtime_error("a message does not fit its receive");
  }

  void end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  struct Meeting {
    std::map<int, Offer> offers;
    bool done = false;
    std::string problem;
  };

  static std::string shape_of(const std::vector<at::Tensor>& tensors) {
    std::string text;
    for (const at::Tensor& t : tensors)
      text += fmt::format("{}{} ", toString(t.scalar_type()), t.numel());
    return text;
  }

  static void compute(Meeting* m) {
    Offer& first = m->offers.begin()->second;
    const int size = static_cast<int>(m->offers.size());
    for (auto& [rank, offer] : m->offers) {
      if (offer.what != first.what || offer.root != first.root ||
          offer.reduction != first.reduction)
        m->problem = "ranks call different collectives: " + first.what + ", " + offer.what;
      else if (offer.what != "alltoall" && shape_of(offer.in) != shape_of(first.in))
        m->problem = "tensors of " + offer.what + " differ";
    }
    if (!m->problem.empty()) return;
    if (first.what == "allreduce") {
      at::Tensor sum = first.in[0].clone();
      for (int r = 1; r < size; ++r)
        sum = first.reduction == c10d::ReduceOp::MAX ? at::maximum(sum, m->offers[r].in[0])
                                                     : sum + m->offers[r].in[0];
      for (auto& [rank, offer] : m->offers) offer.out[0].copy_(sum);
    } else if (first.what == "broadcast") {
      const at::Tensor value = m->offers[first.root].in[0].clone();
      for (auto& [rank, offer] : m->offers) offer.out[0].copy_(value);
    } else if (first.what == "allgather") {
      for (auto& [rank, offer] : m->offers)
        for (int r = 0; r < size; ++r) offer.out[static_cast<size_t>(r)].copy_(m->offers[r].in[0]);
    } else {
      for (auto& [rank, offer] : m->offers)
        for (int r = 0; r < size; ++r) {
          const at::Tensor& from = m->offers[r].in[static_cast<size_t>(rank)];
          at::Tensor& to = offer.out[static_cast<size_t>(r)];
          if (from.numel() != to.numel())
            m->problem = "sizes of an all-to-all differ";
          else
            to.copy_(from);
        }
    }
  }

  FakeOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Rng rng_;
  std::map<std::pair<std::string, int64_t>, std::shared_ptr<Meeting>> meetings_;
  std::map<Channel, std::list<std::shared_ptr<Letter>>> letters_;
  bool ended_ = false;
};

// Does what it is given, one after the other.
class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}
  ~Queue() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void add(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
      ++open_;
    }
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return open_ == 0;
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ending_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      --open_;
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  int open_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

class FakeBackend final : public CollectiveBackend {
 public:
  FakeBackend(std::shared_ptr<Fabric> fabric, std::string group, int rank, int size)
      : CollectiveBackend(rank, size), fabric_(std::move(fabric)), group_(std::move(group)) {}

  const std::string getBackendName() const override { return "fake"; }

  WorkPointer allreduce(std::vector<at::Tensor>& tensors,
                        const c10d::AllreduceOptions& options) override {
    Offer offer{"allreduce", tensors, tensors};
    offer.reduction = options.reduceOp;
    return collective(std::move(offer), false);
  }
  WorkPointer broadcast(std::vector<at::Tensor>& tensors,
                        const c10d::BroadcastOptions& options) override {
    Offer offer{"broadcast", tensors, tensors};
    offer.root = static_cast<int>(options.rootRank);
    return collective(std::move(offer), offer.root != getRank());
  }
  WorkPointer allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                        const c10d::AllgatherOptions& /*options*/) override {
    for (const at::Tensor& t : out.at(0))
      if (t.numel() != in.at(0).numel())
        throw std::runtime_error("an all-gather of unequal pieces");
    return collective({"allgather", in, out[0]}, true);
  }
  WorkPointer alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                            std::vector<int64_t>& in_sizes,
                            const c10d::AllToAllOptions& /*options*/) override {
    if (!fabric_->options().all_to_all)
      throw std::runtime_error("Backend fake does not support alltoall_base");
    Offer offer{"alltoall", {}, {}};
    bool even = true;
    for (int64_t r = 0, i = 0, o = 0; r < getSize(); ++r) {
      const auto at = static_cast<size_t>(r);
      offer.in.push_back(in.narrow(0, i, in_sizes[at]));
      offer.out.push_back(out.narrow(0, o, out_sizes[at]));
      i += in_sizes[at];
      o += out_sizes[at];
      even = even && in_sizes[at] == in_sizes[0] && out_sizes[at] == out_sizes[0];
    }
    if (!even && !fabric_->options().uneven_all_to_all)
      throw std::runtime_error("Backend fake: unequal split sizes");
    return collective(std::move(offer), true);
  }
  WorkPointer send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    need_messages();
    return later(to, [fabric = fabric_, channel = Fabric::Channel{group_, getRank(), to},
                      tensor = tensors.at(0), tag] { fabric->send(channel, tensor, tag); });
  }
  WorkPointer recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    need_messages();
    poison(tensors.at(0));
    return later(from, [fabric = fabric_, channel = Fabric::Channel{group_, from, getRank()},
                        tensor = tensors.at(0), tag] { fabric->receive(channel, tensor, tag); });
  }

 private:
  void need_messages() const {
    if (!fabric_->options().messages)
      throw std::runtime_error("Backend fake does not support send");
  }
  static void poison(const at::Tensor& tensor) {
    if (tensor.numel() > 0) memset(tensor.data_ptr(), 0xff, tensor.nbytes());
  }
  WorkPointer collective(Offer offer, bool poisoned) {
    for (const auto* list : {&offer.in, &offer.out})
      for (const at::Tensor& t : *list)
        if (!t.is_contiguous()) throw std::runtime_error("a tensor is not contiguous");
    if (poisoned)
      for (const at::Tensor& t : offer.out) poison(t);
    const int64_t number = next_++;
    auto work = c10::make_intrusive<FakeWork>();
    queue_.add([fabric = fabric_, group = group_, number, rank = getRank(), size = getSize(),
                offer = std::move(offer), work]() mutable {
      run(*fabric, *work, [&] { fabric->meet(group, number, rank, size, std::move(offer)); });
    });
    return work;
  }
  WorkPointer later(int other, std::function<void()> job) {
    auto work = c10::make_intrusive<FakeWork>();
    auto all = [fabric = fabric_, job = std::move(job), work] { run(*fabric, *work, job); };
    if (!fabric_->options().tags) {
      auto& queue = messages_[other];
      if (queue == nullptr) queue = std::make_unique<Queue>();
      queue->add(std::move(all));
      return work;
    }
    std::erase_if(loose_, [](const auto& queue) { return queue->idle(); });
    loose_.push_back(std::make_unique<Queue>());
    loose_.back()->add(std::move(all));
    return work;
  }
  template <typename F>
  static void run(Fabric& fabric, FakeWork& work, F job) {
    std::exception_ptr failure;
    try {
      fabric.sleep();
      job();
    } catch (...) {
      failure = std::current_exception();
    }
    work.done(failure);
  }

  std::shared_ptr<Fabric> fabric_;
  std::string group_;
  int64_t next_ = 0;
  std::list<std::unique_ptr<Queue>> loose_;         // one for each message with a tag
  std::map<int, std::unique_ptr<Queue>> messages_;  // from and to another rank, without tags
  Queue queue_;
};

}  // namespace

void run_fake_group(int size, const FakeOptions& options,
                    const std::function<void(Communicator&)>& body) {
  auto fabric = std::make_shared<Fabric>(options);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_thread_group(size, [&](Communicator& control) {
    std::map<std::vector<int>, int> made;
    OverProcessGroups over;
    over.backend = backend_named(options.name);
    over.control = &control;
    for (int r = 0; r < size; ++r) over.ranks.push_back(r);
    over.make = [&](const std::vector<int>& ranks) {
      const int rank =
          static_cast<int>(std::find(ranks.begin(), ranks.end(), control.rank()) - ranks.begin());
      const std::string name = fmt::format("{} {}", fmt::join(ranks, ","), made[ranks]++);
      const auto one = [&](const char* use) {
        return process_group_of(c10::make_intrusive<FakeBackend>(fabric, name + use, rank,
                                                                 static_cast<int>(ranks.size())),
                                store, at::kCPU);
      };
      return ProcessGroups{one(""), one(" up"), one(" down")};
    };
    try {
      const auto communicator = communicator_over(std::move(over));
      body(*communicator);
      control.barrier();
    } catch (...) {
      fabric->end();
      throw;
    }
  });
}

}  // namespace motley

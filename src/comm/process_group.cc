#include "comm/process_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <type_traits>

#include "comm/meeting.h"
#include "comm/moment.h"
#include "comm/store.h"
#include "core/error.h"

namespace motley {

namespace {

using Work = WorkHandle;

constexpr int kAnnounceTag = 1 << 22;  // on the control group, away from those of messages

class ProcessGroupCommunicator final : public Communicator {
 public:
  explicit ProcessGroupCommunicator(OverProcessGroups over)
      : over_(std::move(over)),
        groups_(over_.make(over_.ranks)),
        group_(groups_.collectives),
        rank_(group_->getRank()),
        size_(group_->getSize()),
        number_(over_.number.value_or(rank_)),
        peers_(static_cast<size_t>(size_)),
        has_messages_(groups_.up && groups_.down &&
                      (over_.backend.tags || over_.control != nullptr)),
        has_all_to_all_(true) {
    if (size_ > 1 && !over_.backend.known) try_what_it_can();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  at::Device device() const override { return over_.device; }
  bool has_messages() const override { return has_messages_; }
  bool has_all_to_all() const override { return has_all_to_all_; }
  bool adds_half() const override { return over_.backend.half_sums; }

  Communicator* among(const std::vector<int>& members, int use) override {
    std::vector<int> ranks;
    for (int r : members) ranks.push_back(over_.ranks.at(static_cast<size_t>(r)));
    if (!std::is_sorted(ranks.begin(), ranks.end()) || members.size() < 2) return nullptr;
    auto& part = parts_[{ranks, use}];
    if (part == nullptr) {
      OverProcessGroups over = over_;
      over.ranks = ranks;
      over.control = nullptr;  // of messages: they go by the whole group
      over.backend.known = true;
      auto made = std::make_unique<ProcessGroupCommunicator>(std::move(over));
      made->has_all_to_all_ = has_all_to_all_;
      part = std::move(made);
    }
    return part.get();
  }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    if (auto message = started(tensor, reduction)) message->wait();
  }
  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    return started(tensor, Reduction::sum);
  }

  void all_gather(std::vector<at::Tensor>& pieces) override {
    int64_t most = 0;
    for (const at::Tensor& piece : pieces)
      most = std::max(most, static_cast<int64_t>(piece.nbytes()));
    if (size_ == 1 || most == 0) return;
    run("all_gather", [&] {
      const at::TensorOptions bytes = at::TensorOptions(over_.device).dtype(at::kByte);
      std::vector<std::vector<at::Tensor>> out(1);
      for (at::Tensor& piece : pieces) {
        const at::Tensor flat = as_bytes(piece);
        out[0].push_back(flat.numel() == most ? flat : at::empty({most}, bytes));
      }
      const int64_t mine = as_bytes(pieces[rank_]).numel();
      std::vector<at::Tensor> in{at::zeros({most}, bytes)};
      in[0].narrow(0, 0, mine).copy_(as_bytes(pieces[rank_]));
      group_->allgather(out, in)->wait();
      for (int r = 0; r < size_; ++r) {
        const at::Tensor flat = as_bytes(pieces[r]);
        if (flat.numel() < most) flat.copy_(out[0][r].narrow(0, 0, flat.numel()));
      }
    });
  }

  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    bool empty = true;
    for (const at::Tensor& piece : pieces) empty = empty && piece.numel() == 0;
    if (size_ == 1 || empty) return;
    run("all_gather", [&] {
      grouped(*group_, over_.device.type(), [&](std::vector<Work>& works) {
        for (int r = 0; r < size_; ++r) {
          if (pieces[r].numel() == 0) continue;
          std::vector<at::Tensor> list{as_bytes(pieces[r])};
          c10d::BroadcastOptions options;
          options.rootRank = r;
          works.push_back(group_->broadcast(list, options));
        }
      });
    });
  }

  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    if (size_ == 1) return pieces[0].clone();
    const at::ScalarType type = pieces[0].scalar_type();
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size_; ++r) parts.push_back(at::empty_like(pieces[rank_]));
    run("reduce_scatter", [&] { exchange(pieces, parts); });
    at::Tensor total = sums_in_f32(type) ? parts[0].to(at::kFloat) : parts[0];
    for (int r = 1; r < size_; ++r) total += parts[r];
    return total.to(type);
  }

  // Nothing is padded in the other one.
  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    return reduce_scatter(pieces);
  }

  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    if (size_ == 1) {
      receive[0].copy_(send[0]);
      return;
    }
    run("all_to_all", [&] { exchange(send, receive); });
  }

  void barrier() override {
    at::Tensor one = at::ones({1}, at::TensorOptions(over_.device).dtype(at::kInt));
    all_reduce(one, Reduction::sum);
    MOTLEY_CHECK(one.item<int>() == size_, "barrier of {} workers", size_);
  }

  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    need_messages();
    auto sent = std::make_unique<Sent>(*this, tensor);
    if (tensor.numel() == 0) return sent;
    run("send", [&] {
      std::vector<at::Tensor> list{as_bytes(tensor)};
      if (over_.backend.tags) {
        sent->work = group_->send(list, to, tag);
        return;
      }
      Peer& peer = peers_[static_cast<size_t>(to)];
      const std::lock_guard lock(peer.sending);  // announced in the order in which they are sent
      sent->announced =
          at::tensor({static_cast<int64_t>(tag), list[0].numel()}, at::TensorOptions(at::kLong));
      sent->announcement = over_.control->send(sent->announced, to, kAnnounceTag);
      try {
        sent->work = channel(to > rank_)->send(list, to, 0);
      } catch (...) {
        sent->announcement->wait();
        throw;
      }
    });
    return sent;
  }

  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    need_messages();
    auto received = std::make_unique<Received>(*this, from);
    if (tensor.numel() == 0) return received;
    if (over_.backend.tags) {
      run("receive", [&] {
        std::vector<at::Tensor> list{as_bytes(tensor)};
        received->coming = std::make_shared<Coming>(tag, list[0]);
        received->coming->work = group_->recv(list, from, tag);
      });
      return received;
    }
    Peer& peer = peers_[static_cast<size_t>(from)];
    const std::lock_guard lock(peer.mutex);
    received->coming = std::make_shared<Coming>(tag, as_bytes(tensor));
    // What came before it was asked for is copied when it is waited for.
    auto early = std::find_if(peer.early.begin(), peer.early.end(),
                              [&](const auto& coming) { return coming->tag == tag; });
    if (early == peer.early.end()) {
      received->coming->asked.emplace(over_.device);
      peer.asked.push_back(received->coming);
    } else {
      received->coming->early = (*early)->bytes;
      received->coming->work = (*early)->work;
      peer.early.erase(early);
    }
    return received;
  }

 private:
  // A message that is received.
  struct Coming {
    Coming(int t, at::Tensor b) : tag(t), bytes(std::move(b)) {}
    int tag;
    at::Tensor bytes, early;      // where it belongs; where it came to before that was known
    std::optional<Moment> asked;  // from when on `bytes` may be written
    Work work;                    // null: it has not been announced
  };
  // What is known of the messages from another rank, where the backend has no tags.
  struct Peer {
    std::mutex sending;
    std::mutex mutex;  // of what follows
    std::condition_variable changed;
    bool listening = false;                           // a thread waits for the next announcement
    std::list<std::shared_ptr<Coming>> asked, early;  // not announced; not asked for
  };

  struct Started final : Message {
    Started(ProcessGroupCommunicator& g, Work w) : group(g), work(std::move(w)) {}
    void wait() override {
      if (work) group.run("all_reduce", [&] { work->wait(); });
      work.reset();
    }
    ProcessGroupCommunicator& group;
    Work work;
  };

  struct Sent final : Message {
    Sent(ProcessGroupCommunicator& g, at::Tensor t) : group(g), tensor(std::move(t)) {}
    void wait() override {
      if (announcement) announcement->wait();
      announcement.reset();
      if (work) group.run("send", [&] { work->wait(); });
      work.reset();
      tensor.reset();
    }
    ProcessGroupCommunicator& group;
    at::Tensor tensor, announced;  // stay until they have gone
    std::unique_ptr<Message> announcement;
    Work work;
  };

  struct Received final : Message {
    Received(ProcessGroupCommunicator& g, int r) : group(g), from(r) {}
    void wait() override {
      if (!coming) return;
      if (!group.over_.backend.tags) group.listen_for(from, *coming);
      group.run("receive", [&] { coming->work->wait(); });
      if (coming->early.defined()) coming->bytes.copy_(coming->early);
      coming.reset();
    }
    ProcessGroupCommunicator& group;
    int from;
    std::shared_ptr<Coming> coming;
  };

  const ProcessGroup& channel(bool up) const { return up ? groups_.up : groups_.down; }

  void need_messages() const {
    if (!has_messages_)
      throw user_error("run",
                       "the backend {} has no messages between two workers, which this plan needs; "
                       "plan with --engine spmd, or use another backend",
                       over_.backend.name);
  }

  // Posts the receives of what the other rank announces until that of `wanted` is.
  void listen_for(int from, Coming& wanted) {
    Peer& peer = peers_[static_cast<size_t>(from)];
    std::unique_lock lock(peer.mutex);
    while (!wanted.work) {
      if (peer.listening) {
        peer.changed.wait(lock);
        continue;
      }
      peer.listening = true;
      lock.unlock();
      at::Tensor said = at::empty({2}, at::TensorOptions(at::kLong));
      std::exception_ptr failure;
      try {
        over_.control->receive(said, from, kAnnounceTag)->wait();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      peer.listening = false;
      if (!failure) {
        try {
          post(from, peer, static_cast<int>(said[0].item<int64_t>()), said[1].item<int64_t>());
        } catch (...) {
          failure = std::current_exception();
        }
      }
      peer.changed.notify_all();
      if (failure) std::rethrow_exception(failure);
    }
  }

  // REQUIRES: the peer's mutex is held.
  void post(int from, Peer& peer, int tag, int64_t bytes) {
    auto it = std::find_if(peer.asked.begin(), peer.asked.end(),
                           [&](const auto& coming) { return coming->tag == tag; });
    std::shared_ptr<Coming> coming;
    if (it == peer.asked.end()) {
      coming = std::make_shared<Coming>(
          tag, at::empty({bytes}, at::TensorOptions(over_.device).dtype(at::kByte)));
      coming->asked.emplace(over_.device);
      peer.early.push_back(coming);
    } else {
      coming = *it;
      peer.asked.erase(it);
      MOTLEY_CHECK(coming->bytes.numel() == bytes, "a message of {} bytes, not {}", bytes,
                   coming->bytes.numel());
    }
    run("receive", [&] {
      const Beside beside(over_.device);  // so that it does not wait for what came after the asking
      coming->asked->hold_up();
      std::vector<at::Tensor> list{coming->bytes};
      coming->work = channel(from < rank_)->recv(list, from, 0);
    });
  }

  std::unique_ptr<Message> started(at::Tensor& tensor, Reduction reduction) {
    if (size_ == 1 || tensor.numel() == 0) return nullptr;
    check(tensor);
    const bool half = sums_in_f32(tensor.scalar_type());
    at::Tensor sum = half && over_.backend.half_sums ? tensor : summable(tensor);
    Work work;
    run("all_reduce", [&] {
      std::vector<at::Tensor> list{sum.detach()};  // one that Python does not know (gloo.cc)
      c10d::AllreduceOptions options;
      options.reduceOp = reduction == Reduction::sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
      options.timeout = kCollectiveTime;
      work = group_->allreduce(list, options);
    });
    const bool same = sum.is_same(tensor);
    return copied_back(same ? at::Tensor() : tensor, sum,
                       std::make_unique<Started>(*this, std::move(work)));
  }

  // One small message around the ring, and one all-to-all: what a backend has not, it refuses at
  // once, on every rank.
  void try_what_it_can() {
    if (has_messages_) {
      at::Tensor out = at::ones({1}, at::TensorOptions(over_.device).dtype(at::kByte)),
                 in = at::empty_like(out);
      try {
        const auto coming = receive(in, (rank_ + size_ - 1) % size_, kAnnounceTag - 1);
        const auto going = send(out, (rank_ + 1) % size_, kAnnounceTag - 1);
        coming->wait();
        going->wait();
      } catch (const PeerLost&) {
        has_messages_ = false;
      }
    }
    std::vector<at::Tensor> out, in;
    for (int r = 0; r < size_; ++r) {
      // Of another size to each: not all backends that have one take that.
      out.push_back(at::ones({rank_ + r + 1}, at::TensorOptions(over_.device).dtype(at::kByte)));
      in.push_back(at::empty_like(out.back()));
    }
    try {
      run("all_to_all", [&] { exchange(out, in); });
    } catch (const PeerLost&) {
      has_all_to_all_ = false;
    }
  }

  void check(const at::Tensor& tensor) const {
    MOTLEY_CHECK(tensor.is_contiguous(), "a piece is not contiguous");
    MOTLEY_CHECK(tensor.device() == over_.device, "a piece is on {}, not {}", tensor.device().str(),
                 over_.device.str());
  }
  // The same memory.
  at::Tensor as_bytes(const at::Tensor& tensor) const {
    check(tensor);
    // A dimension of one element may have any stride.
    return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
  }

  void exchange(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) {
    if (!has_all_to_all_)
      return has_messages_ ? by_messages(send, receive) : by_gather(send, receive);
    std::vector<int64_t> in_sizes, out_sizes;
    std::vector<at::Tensor> pieces;
    int64_t total = 0;
    for (int r = 0; r < size_; ++r) {
      pieces.push_back(as_bytes(send[r]));
      in_sizes.push_back(pieces.back().numel());
      out_sizes.push_back(static_cast<int64_t>(receive[r].nbytes()));
      total += out_sizes.back();
    }
    at::Tensor in = at::cat(pieces);
    at::Tensor out = at::empty({total}, in.options());
    std::vector<int64_t> out_splits = out_sizes;  // gloo takes them away
    all_to_all_of(*group_, out, in, out_splits, in_sizes)->wait();
    for (int64_t r = 0, at = 0; r < size_; at += out_sizes[r++])
      as_bytes(receive[r]).copy_(out.narrow(0, at, out_sizes[r]));
  }
  void by_messages(const std::vector<at::Tensor>& out, std::vector<at::Tensor>& in) {
    std::vector<std::unique_ptr<Message>> messages;
    for (int k = 1; k < size_; ++k) {
      const int from = (rank_ - k + size_) % size_, to = (rank_ + k) % size_;
      messages.push_back(receive(in[from], from, kAnnounceTag - 2));
      messages.push_back(send(out[to], to, kAnnounceTag - 2));
    }
    in[rank_].copy_(out[rank_]);
    for (auto& message : messages) message->wait();
  }
  // Everybody gets everything, and takes its own.
  void by_gather(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) {
    const at::TensorOptions numbers = at::TensorOptions(over_.device).dtype(at::kLong);
    std::vector<int64_t> mine;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& piece : send) {
      flat.push_back(as_bytes(piece));
      mine.push_back(flat.back().numel());
    }
    std::vector<at::Tensor> sizes, all;
    for (int r = 0; r < size_; ++r)
      sizes.push_back(r == rank_ ? at::tensor(mine).to(numbers) : at::empty({size_}, numbers));
    all_gather(sizes);
    for (int r = 0; r < size_; ++r)
      all.push_back(r == rank_ ? at::cat(flat)
                               : at::empty({sizes[r].sum().item<int64_t>()}, flat[0].options()));
    all_gather(all);
    for (int r = 0; r < size_; ++r) {
      const int64_t before = sizes[r].narrow(0, 0, rank_).sum().item<int64_t>();
      at::Tensor to = as_bytes(receive[r]);
      to.copy_(all[r].narrow(0, before, to.numel()));
    }
  }

  template <typename F>
  void run(const char* what, F body) {
    run_collective(
        number_, [] { return "another worker"; }, what, body);
  }

  OverProcessGroups over_;
  ProcessGroups groups_;
  ProcessGroup group_;
  int rank_, size_;
  int number_;  // of this worker in messages
  std::vector<Peer> peers_;
  bool has_messages_, has_all_to_all_;
  std::map<std::pair<std::vector<int>, int>, std::unique_ptr<ProcessGroupCommunicator>> parts_;
};

}  // namespace

ProcessGroup process_group_of(c10::intrusive_ptr<CollectiveBackend> backend,
                              const c10::intrusive_ptr<c10d::Store>& store, at::DeviceType device) {
  return as_process_group(std::move(backend), store, device);
}

std::unique_ptr<Communicator> communicator_over(OverProcessGroups over) {
  return std::make_unique<ProcessGroupCommunicator>(std::move(over));
}

}  // namespace motley

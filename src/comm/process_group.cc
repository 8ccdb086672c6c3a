#include "comm/process_group.h"

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "comm/store.h"
#include "core/error.h"

namespace motley {

namespace {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Runs post(works), which starts collectives, as one group where the backend groups them, and waits
// for all. A template, since libtorch's interface of this differs between versions.
template <typename Group, typename F>
void grouped(Group& group, F post) {
  Works works;
  if constexpr (requires { group.endCoalescing(works); }) {
    group.startCoalescing();
    post(works);
    group.endCoalescing(works);
  } else if (group.supportsCoalescing()) {
    group.startCoalescing();
    post(works);
    works = {group.endCoalescing()};
  } else {
    post(works);
  }
  for (auto& work : works) work->wait();
}

class ProcessGroupCommunicator final : public Communicator {
 public:
  ProcessGroupCommunicator(c10::intrusive_ptr<CollectiveBackend> group, at::Device device,
                           std::optional<int> number)
      : group_(std::move(group)),
        device_(device),
        rank_(group_->getRank()),
        size_(group_->getSize()),
        number_(number.value_or(rank_)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    if (size_ == 1 || tensor.numel() == 0) return;
    check(tensor);
    at::Tensor work = summable(tensor);
    run("all_reduce", [&] {
      std::vector<at::Tensor> list{work};
      c10d::AllreduceOptions options;
      options.reduceOp = reduction == Reduction::sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
      group_->allreduce(list, options)->wait();
    });
    if (!work.is_same(tensor)) tensor.copy_(work);
  }

  void all_gather(std::vector<at::Tensor>& pieces) override {
    int64_t most = 0;
    for (const at::Tensor& piece : pieces)
      most = std::max(most, static_cast<int64_t>(piece.nbytes()));
    if (size_ == 1 || most == 0) return;
    run("all_gather", [&] {
      const at::TensorOptions bytes = at::TensorOptions(device_).dtype(at::kByte);
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
      grouped(*group_, [&](Works& works) {
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
    at::Tensor one = at::ones({1}, at::TensorOptions(device_).dtype(at::kInt));
    all_reduce(one, Reduction::sum);
    MOTLEY_CHECK(one.item<int>() == size_, "barrier of {} workers", size_);
  }

 private:
  void check(const at::Tensor& tensor) const {
    MOTLEY_CHECK(tensor.is_contiguous(), "a piece is not contiguous");
    MOTLEY_CHECK(tensor.device() == device_, "a piece is on {}, not {}", tensor.device().str(),
                 device_.str());
  }
  // The same memory.
  at::Tensor as_bytes(const at::Tensor& tensor) const {
    check(tensor);
    return tensor.view({-1}).view(at::kByte);
  }

  void exchange(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) {
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
    group_->alltoall_base(out, in, out_splits, in_sizes)->wait();
    for (int64_t r = 0, at = 0; r < size_; at += out_sizes[r++])
      as_bytes(receive[r]).copy_(out.narrow(0, at, out_sizes[r]));
  }

  template <typename F>
  void run(const char* what, F body) {
    run_collective(
        number_, [] { return "another worker"; }, what, body);
  }

  c10::intrusive_ptr<CollectiveBackend> group_;
  at::Device device_;
  int rank_, size_;
  int number_;  // of this worker in messages
};

}  // namespace

std::unique_ptr<Communicator> communicator_over(c10::intrusive_ptr<CollectiveBackend> group,
                                                at::Device device, std::optional<int> number) {
  return std::make_unique<ProcessGroupCommunicator>(std::move(group), device, number);
}

namespace {

using StorePointer = c10::intrusive_ptr<c10d::Store>;

// Servers that this process holds; others may need them until it ends.
std::shared_ptr<StoreServer> hold(std::shared_ptr<StoreServer> server) {
  static auto* held = new std::vector<std::shared_ptr<StoreServer>>;
  held->push_back(server);
  return server;
}

StorePointer connect(const Rendezvous& where) {
  const auto nobody = [&](const char* why) {
    return user_error("run", "nobody answers at MASTER_ADDR {} port {}{}; is rank 0 running there?",
                      where.host, where.port, why);
  };
  if (!where.of_torch) {
    if (where.rank == 0 && !where.store_outside)
      hold(std::make_shared<StoreServer>(addresses_to_listen(where.host)[0], where.port,
                                         where.token, /*rank0=*/true));
    try {
      return connect_store(where.host, where.port, where.token, where.patience);
    } catch (const std::runtime_error& e) {
      const bool refused = std::string(e.what()).find("token") != std::string::npos;
      throw nobody(refused ? " but another program, or a launch with another MOTLEY_TOKEN" : "");
    }
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(where.port);
  options.isServer = false;
  options.timeout = where.patience;
  options.waitWorkers = false;
  try {
    return c10::make_intrusive<c10d::TCPStore>(where.host, options);
  } catch (const std::exception&) {
    throw nobody("");
  }
}

// Has the workers of a launch watched: by whoever holds the store, or by rank 0 where that is
// torch's.
void start_watch(const Rendezvous& where, c10d::Store& store) {
  try {
    if (!where.of_torch) return Watch::start(where.rank, where.host, where.port, where.token);
    std::string row;
    if (where.rank == 0) {
      const std::string token = random_token();
      const auto server = hold(std::make_shared<StoreServer>(addresses_to_listen(where.host)[0], 0,
                                                             token, /*rank0=*/true));
      row = fmt::format("{} {}", server->port(), token);
      store.set("/watch", std::vector<uint8_t>(row.begin(), row.end()));
    } else {
      const std::vector<uint8_t> raw = store.get("/watch");
      row.assign(raw.begin(), raw.end());
    }
    const size_t space = row.find(' ');
    Watch::start(where.rank, where.host, std::atoi(row.c_str()), row.substr(space + 1));
  } catch (const std::runtime_error& e) {
    std::fprintf(stderr,
                 "motley: rank %d cannot be watched by rank 0 at %s (%s): if a worker is stopped, "
                 "others wait %lld minutes for it\n",
                 where.rank, where.host.c_str(), e.what(),
                 static_cast<long long>(kCollectiveTime.count()));
  }
}

}  // namespace

void check_set_up(const Rendezvous& where, const char* what,
                  std::chrono::steady_clock::time_point until) {
  if (const std::string lost = Watch::lost(); !lost.empty())
    throw PeerLost(fmt::format("[run] rank {} lost {} while {}: {}", where.number(where.rank), lost,
                               what, Watch::reason()));
  if (const std::string ended = Watch::ended(); !ended.empty())
    throw PeerLost(fmt::format("[run] rank {} lost {} while {}: it ended or was killed",
                               where.number(where.rank), ended, what));
  if (std::chrono::steady_clock::now() > until)
    throw user_error("run",
                     "rank {} waited {} s in vain while {}; is every worker running, and "
                     "are their ports open to each other?",
                     where.number(where.rank), where.patience.count(), what);
}

namespace {

StorePointer meet_at(const Rendezvous& where, const std::string& backend) {
  const StorePointer tcp = connect(where);
  auto store = c10::make_intrusive<c10d::PrefixStore>("motley" + where.prefix, tcp);

  auto key = [](int r) { return fmt::format("/here/{}", r); };
  store->set(key(where.rank), std::vector<uint8_t>(backend.begin(), backend.end()));
  std::vector<std::string> all;
  for (int r = 0; r < where.size; ++r) all.push_back(key(r));
  try {
    store->wait(all, where.patience);
  } catch (const std::exception&) {
    std::string missing;
    for (int r = 0; r < where.size; ++r)
      if (!store->check({key(r)}))
        missing += fmt::format("{}{}", missing.empty() ? "" : ", ", where.number(r));
    throw user_error("run",
                     "rank {} waited {} s in vain for rank {} of {} workers; start all of them",
                     where.number(where.rank), where.patience.count(), missing, where.size);
  }
  for (int r = 0; r < where.size; ++r) {
    const std::vector<uint8_t> raw = store->get(key(r));
    const std::string theirs(raw.begin(), raw.end());
    if (theirs != backend)
      throw user_error("run", "rank {} uses {}, but rank {} {}; give all workers the same --device",
                       where.number(where.rank), backend, where.number(r), theirs);
  }
  return store;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> meet(const Rendezvous& where, const std::string& backend) {
  return set_up<StorePointer>(where, "meeting the others", [where, backend] {
    StorePointer store = meet_at(where, backend);
    if (where.numbers.empty() && where.size > 1) start_watch(where, *store);
    return store;
  });
}

PeerLost peer_lost(int rank, const std::string& who, const char* what,
                   const std::exception& error) {
  const std::string text = error.what();
  // Whoever is told so closes its connections; the others learn why in the same moment.
  std::string lost = Watch::lost();
  for (int i = 0; i < 5 && lost.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    lost = Watch::lost();
  }
  if (!lost.empty())
    return PeerLost(
        fmt::format("[run] rank {} lost {} during {}: {}", rank, lost, what, Watch::reason()));
  const bool closed = text.find("losed") != std::string::npos ||
                      text.find("reset") != std::string::npos ||
                      text.find("roken pipe") != std::string::npos;
  if (closed)
    return PeerLost(
        fmt::format("[run] rank {} lost {} during {}: it ended or was killed", rank, who, what));
  if (text.find("imed out") != std::string::npos)
    return PeerLost(fmt::format("[run] rank {} got no answer from {} during {} in {} minutes", rank,
                                who, what, kCollectiveTime.count()));
  return PeerLost(
      fmt::format("[run] rank {}: {} failed: {}", rank, what, text.substr(0, text.find('\n'))));
}

}  // namespace motley

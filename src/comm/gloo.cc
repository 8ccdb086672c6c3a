#include "comm/gloo.h"

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/meeting.h"
#include "comm/process_group.h"
#include "comm/store.h"
#include "core/error.h"

namespace motley {

namespace {

constexpr int64_t kNativeGatherBytes = int64_t{64} << 10;  // smaller gathers go pair by pair

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != 0 ? value : nullptr;
}

int64_t integer_variable(const char* name, int64_t low, int64_t high) {
  const char* text = variable(name);
  if (text == nullptr)
    throw user_error("run", "{} is not set; launchers set it beside the rank", name);
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [p, error] = std::from_chars(text, end, value);
  if (error != std::errc() || p != end || value < low || value > high)
    throw user_error("run", "{} is '{}'; give an integer from {} to {}", name, text, low, high);
  return value;
}

// A TCP end point as text, "127.0.0.1:4711".
std::string end_point(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &a.sin_addr, text, sizeof text);
    return fmt::format("{}:{}", text, ntohs(a.sin_port));
  }
  const auto& a = reinterpret_cast<const sockaddr_in6&>(address);
  inet_ntop(AF_INET6, &a.sin6_addr, text, sizeof text);
  return fmt::format("{}:{}", text, ntohs(a.sin6_port));
}

struct Connection {
  int fd;
  std::string here, there;
};

// The other end of a connected socket; empty if it is not one.
std::string peer_end(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  return end_point(address);
}

// The connected TCP sockets of this process.
std::vector<Connection> connections() {
  std::vector<Connection> list;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return list;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    const int fd = std::atoi(entry->d_name);
    int type = 0;
    socklen_t length = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) continue;
    sockaddr_storage here{}, there{};
    socklen_t a = sizeof here, b = sizeof there;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &a) != 0 ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&there), &b) != 0)
      continue;
    if (here.ss_family != AF_INET && here.ss_family != AF_INET6) continue;
    list.push_back({fd, end_point(here), end_point(there)});
  }
  closedir(folder);
  return list;
}

bool ends_with_port(const std::string& end, int port) {
  return end.ends_with(fmt::format(":{}", port));
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  MOTLEY_CHECK(tensor.is_contiguous(), "a piece is not contiguous");
  return at::from_blob(tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())},
                       at::TensorOptions().dtype(at::kByte));
}

// gloo's threads let go of tensors a while after their collective has ended. With one that Python has
// an object of they ask for its lock then, and where Python is about to end, the process aborts.
std::vector<at::Tensor> unknown_to_python(const at::Tensor& tensor) { return {tensor.detach()}; }

// Threads that are started meanwhile do not interrupt others when they have something to do. gloo's
// thread for its sockets tries again and again for a lock whose holder it interrupted: where cores
// are few, until the system's next tick, 4 ms, for a message of 0.2 ms.
class PatientThreads {
 public:
  PatientThreads() : before_(sched_getscheduler(0)) {
    const sched_param none{};
    if (before_ == SCHED_OTHER) changed_ = sched_setscheduler(0, SCHED_BATCH, &none) == 0;
  }
  ~PatientThreads() {
    const sched_param none{};
    if (changed_) sched_setscheduler(0, before_, &none);
  }
  PatientThreads(const PatientThreads&) = delete;
  PatientThreads& operator=(const PatientThreads&) = delete;

 private:
  const int before_;
  bool changed_ = false;
};

std::shared_ptr<::gloo::transport::Device> device_of(const std::string& host) {
  const PatientThreads patient;
  if (const char* name = variable("GLOO_SOCKET_IFNAME"))
    return c10d::ProcessGroupGloo::createDeviceForInterface(name);
  if (host == "localhost" || host.starts_with("127.") || host == "::1")
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

class GlooCommunicator final : public ProcessCommunicator {
 public:
  explicit GlooCommunicator(const Rendezvous& where)
      : rank_(where.rank), size_(where.size), where_(where) {
    store_ = meet(where, "gloo");
    const std::vector<Connection> before = connections();  // of other groups
    group_ = set_up<c10::intrusive_ptr<CollectiveBackend>>(
        where, "connecting", [store = store_, where] { return gloo_group(store, where); });
    find_sockets(before);
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r) ranks.push_back(where.number(r));
    Watch::close_when_lost(sockets_, ranks);
  }
  ~GlooCommunicator() override { Watch::forget(sockets_); }

  void close() override {
    Watch::forget(sockets_);
    for (int& fd : sockets_) {  // what nobody waits for any more would hold up gloo's threads
      if (fd >= 0) shutdown(fd, SHUT_RDWR);
      fd = -1;
    }
    group_.reset();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::vector<int>& sockets() const override { return sockets_; }
  void on_traffic(std::function<void(Traffic)> hook) override { hook_ = std::move(hook); }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    if (size_ == 1 || tensor.numel() == 0) return;
    at::Tensor work = summable(tensor);
    run("all_reduce", Traffic::ring, [&] {
      std::vector<at::Tensor> list = unknown_to_python(work);
      c10d::AllreduceOptions options;
      options.reduceOp = reduction == Reduction::sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
      options.timeout = kCollectiveTime;
      group_->allreduce(list, options)->wait();
    });
    if (!work.is_same(tensor)) tensor.copy_(work);
  }

  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    if (size_ == 1 || tensor.numel() == 0) return nullptr;
    at::Tensor sum = summable(tensor);
    if (hook_) hook_(Traffic::ring);
    auto started = message("all_reduce", sum, [&](std::vector<at::Tensor>&) {
      std::vector<at::Tensor> list = unknown_to_python(sum);
      c10d::AllreduceOptions options;
      options.timeout = kCollectiveTime;
      return group_->allreduce(list, options);
    });
    started->note_arrival();
    if (sum.is_same(tensor)) return started;
    return copied_back(tensor, sum, std::move(started));
  }

  void all_gather(std::vector<at::Tensor>& pieces) override {
    if (size_ == 1) return;
    bool equal = true;
    for (const at::Tensor& p : pieces) equal = equal && p.nbytes() == pieces[0].nbytes();
    if (equal && static_cast<int64_t>(pieces[0].nbytes()) <= kNativeGatherBytes) {
      if (pieces[0].nbytes() == 0) return;
      run("all_gather", Traffic::ring, [&] {
        std::vector<std::vector<at::Tensor>> out(1);
        for (const at::Tensor& p : pieces) out[0].push_back(as_bytes(p));
        std::vector<at::Tensor> in{out[0][rank_]};
        c10d::AllgatherOptions options;
        options.timeout = kCollectiveTime;
        group_->allgather(out, in, options)->wait();
      });
      return;
    }
    run("all_gather", Traffic::ring, [&] {
      for (int round = 0; round + 1 < size_; ++round)
        exchange(right(), pieces[around(rank_ - round)], left(), pieces[around(rank_ - round - 1)]);
    });
  }

  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    if (size_ == 1) return pieces[0].clone();
    at::Tensor result;
    run("reduce_scatter", Traffic::ring, [&] {
      // The sum for rank c starts at its right neighbour and walks around the ring to c.
      const at::ScalarType type = pieces[0].scalar_type();
      const at::ScalarType sum = sums_in_f32(type) ? at::kFloat : type;
      at::Tensor travelling = pieces[around(rank_ - 1)].to(sum);
      for (int round = 0; round + 1 < size_; ++round) {
        const at::Tensor& mine = pieces[around(rank_ - round - 2)];
        at::Tensor arriving = at::empty(mine.sizes(), mine.options().dtype(sum));
        exchange(right(), travelling, left(), arriving);
        travelling = arriving.add_(mine);
      }
      result = travelling.to(type);
    });
    return result;
  }

  void all_gather_grouped(std::vector<at::Tensor>& pieces) override {
    if (hook_) hook_(Traffic::ring);
    Communicator::all_gather_grouped(pieces);
  }

  at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) override {
    if (hook_) hook_(Traffic::ring);
    return Communicator::reduce_scatter_grouped(pieces);
  }

  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    run("all_to_all", Traffic::all_pairs, [&] {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (int k = 1; k < size_; ++k)
        post_receive(around(rank_ - k), receive[around(rank_ - k)], &works);
      for (int k = 1; k < size_; ++k) post_send(around(rank_ + k), send[around(rank_ + k)], &works);
      receive[rank_].copy_(send[rank_]);
      for (auto& work : works) work->wait(kCollectiveTime);
    });
  }

  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    return message("send", tensor,
                   [&](std::vector<at::Tensor>& list) { return group_->send(list, to, tag); });
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    return message("receive", tensor,
                   [&](std::vector<at::Tensor>& list) { return group_->recv(list, from, tag); });
  }

  void barrier() override {
    at::Tensor one = at::ones({1}, at::kInt);
    all_reduce(one, Reduction::sum);
  }

 private:
  class GlooMessage final : public Message {
   public:
    GlooMessage(GlooCommunicator& group, const char* what, at::Tensor tensor,
                c10::intrusive_ptr<c10d::Work> work)
        : group_(group), what_(what), tensor_(std::move(tensor)), work_(std::move(work)) {}
    void wait() override {
      if (!work_) return;
      group_.guard(what_, [&] { work_->wait(kCollectiveTime); });
      work_.reset();
      tensor_.reset();
    }
    // From now on it notes when it arrives. REQUIRES: a collective, of which c10d has a future.
    void note_arrival() {
      if (!work_) return;
      at_ = std::make_shared<std::atomic<double>>(0);
      work_->getFuture()->addCallback(
          [at = at_](c10::ivalue::Future&) { at->store(steady_seconds()); });
    }
    // The callback may be a moment behind who waits.
    std::optional<double> arrived() const override {
      if (!at_ || work_) return std::nullopt;
      const double at = at_->load();
      return at > 0 ? at : steady_seconds();
    }

   private:
    static double steady_seconds() {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
          .count();
    }

    GlooCommunicator& group_;
    const char* what_;
    at::Tensor tensor_;  // stays until it has gone
    c10::intrusive_ptr<c10d::Work> work_;
    std::shared_ptr<std::atomic<double>> at_;
  };

  template <typename F>
  std::unique_ptr<GlooMessage> message(const char* what, const at::Tensor& tensor, F post) {
    c10::intrusive_ptr<c10d::Work> work;
    if (tensor.numel() > 0)
      guard(what, [&] {
        std::vector<at::Tensor> list{as_bytes(tensor)};
        work = post(list);
      });
    return std::make_unique<GlooMessage>(*this, what, tensor, std::move(work));
  }

  int around(int r) const { return (r % size_ + size_) % size_; }
  int right() const { return around(rank_ + 1); }
  int left() const { return around(rank_ - 1); }

  void post_send(int to, const at::Tensor& piece,
                 std::vector<c10::intrusive_ptr<c10d::Work>>* works) {
    if (piece.numel() == 0) return;
    std::vector<at::Tensor> list{as_bytes(piece)};
    works->push_back(group_->send(list, to, 0));
  }
  void post_receive(int from, const at::Tensor& piece,
                    std::vector<c10::intrusive_ptr<c10d::Work>>* works) {
    if (piece.numel() == 0) return;
    std::vector<at::Tensor> list{as_bytes(piece)};
    works->push_back(group_->recv(list, from, 0));
  }
  void exchange(int to, const at::Tensor& out, int from, at::Tensor& in) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    post_receive(from, in, &works);
    post_send(to, out, &works);
    for (auto& work : works) work->wait(kCollectiveTime);
  }

  // Runs a collective, or body alone; what gloo throws becomes PeerLost.
  template <typename F>
  void run(const char* what, Traffic traffic, F body) {
    if (hook_) hook_(traffic);
    guard(what, body);
  }
  template <typename F>
  void guard(const char* what, F body) {
    if (!group_) throw user_error("run", "{} after the workers have parted", what);
    run_collective(
        where_.number(rank_), [&] { return lost(); }, what, body);
  }

  // The peers whose connection gloo has closed.
  std::string lost() const {
    std::string ranks;
    int count = 0;
    for (int r = 0; r < size_; ++r) {
      if (sockets_[r] < 0 || peer_end(sockets_[r]) == peer_ends_[r]) continue;
      ranks += fmt::format("{}{}", count++ > 0 ? ", " : "", where_.number(r));
    }
    return count == 0 ? "another worker" : fmt::format("rank{} {}", count > 1 ? "s" : "", ranks);
  }

  // Everybody publishes its end points; a connection to rank r is one whose ends r has the other
  // way round.
  void find_sockets(const std::vector<Connection>& before) {
    std::vector<Connection> mine;
    std::string list;
    for (const Connection& c : connections()) {
      const bool old = std::any_of(before.begin(), before.end(), [&](const Connection& b) {
        return b.here == c.here && b.there == c.there;
      });
      if (old || ends_with_port(c.here, where_.port) || ends_with_port(c.there, where_.port))
        continue;
      mine.push_back(c);
      list += c.here + " " + c.there + "\n";
    }
    auto key = [](int r) { return fmt::format("/sockets/{}", r); };
    store_->set(key(rank_), std::vector<uint8_t>(list.begin(), list.end()));
    sockets_.assign(size_, -1);
    peer_ends_.assign(size_, "");
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const std::vector<uint8_t> raw = store_->get(key(r));
      const std::string theirs = "\n" + std::string(raw.begin(), raw.end());
      for (const Connection& c : mine)
        if (theirs.find("\n" + c.there + " " + c.here + "\n") != std::string::npos) {
          sockets_[r] = c.fd;
          peer_ends_[r] = c.there;
        }
    }
  }

  int rank_, size_;
  Rendezvous where_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<CollectiveBackend> group_;
  std::vector<int> sockets_;
  std::vector<std::string> peer_ends_;  // [rank] "127.0.0.1:4711"
  std::function<void(Traffic)> hook_;
};

}  // namespace

c10::intrusive_ptr<CollectiveBackend> gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const Rendezvous& where) {
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->timeout = kCollectiveTime;
  options->threads = 1;
  options->devices.push_back(device_of(where.host));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, where.rank, where.size, options);
}

namespace {

// Known to all workers of a launch, and to few others.
std::string token_of_job() {
  if (const char* token = variable("MOTLEY_TOKEN")) return token;
  std::string text;
  for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE",
                           "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MASTER_PORT"})
    if (const char* value = variable(name)) text += fmt::format("{}={} ", name, value);
  return text.substr(0, 200);
}

// "address port token" of the launcher's store.
void read_store(const std::string& text, Rendezvous* where) {
  const size_t first = text.find(' '), second = text.find(' ', first + 1);
  if (second == std::string::npos)
    throw user_error("run", "MOTLEY_STORE is '{}'; leave it to motley's launcher", text);
  where->host = text.substr(0, first);
  where->port = std::atoi(text.substr(first + 1, second - first - 1).c_str());
  where->token = text.substr(second + 1);
  where->store_outside = true;
  where->of_torch = false;
}

}  // namespace

std::optional<Rendezvous> rendezvous_from_environment() {
  struct Source {
    const char *rank, *size;
  };
  Rendezvous where;
  const Source sources[] = {{"RANK", "WORLD_SIZE"},
                            {"SLURM_PROCID", "SLURM_NTASKS"},
                            {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}};
  for (const Source& source : sources) {
    if (variable(source.rank) == nullptr) continue;
    where.size = static_cast<int>(integer_variable(source.size, 1, 1 << 17));
    where.rank = static_cast<int>(integer_variable(source.rank, 0, where.size - 1));
    // A batch script is itself one task; its local workers are started as anywhere else.
    if (where.size == 1 && std::strcmp(source.rank, "SLURM_PROCID") == 0) continue;
    if (const char* host = variable("MASTER_ADDR"))
      where.host = host;
    else if (const char* first = variable("SLURM_LAUNCH_NODE_IPADDR"))
      where.host = first;
    else
      throw user_error("run", "MASTER_ADDR is not set; give the address of rank 0");
    where.port = static_cast<int>(integer_variable("MASTER_PORT", 1, 65535));
    if (variable("MOTLEY_HANG_SECONDS") != nullptr)
      where.patience = std::chrono::ceil<std::chrono::seconds>(2 * hang_limit());
    where.token = token_of_job();
    const char* agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    where.store_outside = where.of_torch = agent != nullptr && std::string(agent) == "True";
    if (const char* store = variable("MOTLEY_STORE")) read_store(store, &where);
    return where;
  }
  return std::nullopt;
}

Rendezvous part_of(const Rendezvous& whole, const std::vector<int>& ranks,
                   const std::string& name) {
  const auto own = std::find(ranks.begin(), ranks.end(), whole.rank);
  MOTLEY_CHECK(own != ranks.end(), "rank {} is not in its part", whole.rank);
  Rendezvous part = whole;
  part.size = static_cast<int>(ranks.size());
  part.rank = static_cast<int>(own - ranks.begin());
  part.prefix += name;
  part.store_outside = true;
  part.numbers.clear();
  for (int rank : ranks) part.numbers.push_back(whole.number(rank));
  return part;
}

std::unique_ptr<ProcessCommunicator> join_group(const Rendezvous& rendezvous) {
  return std::make_unique<GlooCommunicator>(rendezvous);
}

struct RendezvousStore::Impl {
  std::string address, token;
  StoreServer server;
};

RendezvousStore::RendezvousStore(int port, const std::string& address) {
  const std::string token = random_token();
  impl_.reset(new Impl{address, token, StoreServer(address, port, token, /*rank0=*/false)});
}

RendezvousStore::~RendezvousStore() = default;

int RendezvousStore::port() const { return impl_->server.port(); }
const std::string& RendezvousStore::token() const { return impl_->token; }

Rendezvous RendezvousStore::member(int rank, int size) const {
  Rendezvous where;
  where.rank = rank;
  where.size = size;
  where.host = impl_->address;
  where.port = port();
  where.token = impl_->token;
  where.store_outside = true;
  return where;
}

std::string RendezvousStore::text() const {
  return fmt::format("{} {} {}", impl_->address, port(), impl_->token);
}

}  // namespace motley

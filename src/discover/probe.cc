#include <ATen/ATen.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>

#include "comm/subgroup.h"
#include "discover/discover.h"
#include "measure/device_clock.h"

namespace motley::discover {

namespace {

constexpr int kTag = 77000;
constexpr int kSubgroupTag = 1 << 17;
constexpr Seconds kLong = 0.04;  // a transfer that takes as long tells the bandwidth
constexpr int64_t kSmallest = int64_t{64} << 10, kLargest = int64_t{64} << 20;

using Pairs = std::vector<std::pair<int, int>>;

// Messages between this worker and another. Both call the same functions at the same time, one as
// the one who asks.
class Probe {
 public:
  Probe(Communicator& group, int other, bool asks)
      : group_(group),
        other_(other),
        asks_(asks),
        one_(at::zeros({1}, at::TensorOptions(group.device()).dtype(at::kByte))) {}

  // One way, of a byte. Of twenty round trips a quick one counts: what else the machines do makes
  // some of them longer.
  Seconds latency() {
    std::vector<double> times;
    for (int i = 0; i < 20; ++i) {
      const Seconds start = wall_clock();
      if (asks_) send(one_);
      receive(one_);
      if (!asks_) send(one_);
      if (i >= 4) times.push_back(wall_clock() - start);
    }
    std::sort(times.begin(), times.end());
    round_trip_ = times[times.size() / 4];
    return round_trip_ / 2;
  }

  // Of ever larger messages, until one takes long enough; from the one who asks to the other.
  BytesPerSecond bandwidth() {
    Seconds last = 0, before = 0;
    int64_t sent = 0;
    for (int64_t bytes = kSmallest;; bytes *= 4) {
      const bool enough = last > kLong || bytes > kLargest;
      at::Tensor next = at::full({1}, enough ? 0 : bytes, at::TensorOptions(at::kLong));
      if (group_.device() != at::kCPU) next = next.to(group_.device());
      asks_ ? send(next) : receive(next);
      const int64_t size = next.item<int64_t>();
      if (size == 0) break;
      before = last;
      last = transfer(size, 2);
      sent = size;
    }
    // What the last one took beyond a quarter of it: what goes before or at once counts in neither.
    const auto more = static_cast<double>(sent);
    if (before > 0 && last > 2 * before) return 0.75 * more / (last - before);
    return more / std::max(last - round_trip_, 1e-9);
  }

  // Seconds until so many bytes have come and the other has said so; the least of `repeats`.
  Seconds transfer(int64_t bytes, int repeats) {
    const at::Tensor message = at::zeros({bytes}, one_.options());
    Seconds least = 0;
    for (int i = 0; i < repeats; ++i) {
      at::Tensor buffer = message;
      const Seconds start = wall_clock();
      asks_ ? send(buffer) : receive(buffer);
      asks_ ? receive(one_) : send(one_);
      const Seconds took = wall_clock() - start;
      if (i == 0 || took < least) least = took;
    }
    return least;
  }

 private:
  void send(const at::Tensor& tensor) { group_.send(tensor, other_, kTag)->wait(); }
  void receive(at::Tensor& tensor) {
    group_.receive(tensor, other_, kTag)->wait();
    if (tensor.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(tensor.device().index());
  }

  Communicator& group_;
  int other_;
  bool asks_;
  at::Tensor one_;
  Seconds round_trip_ = 0;
};

// Rounds in which all pairs of n meet once, at most one at a time each (the circle method).
std::vector<Pairs> tournament(const std::vector<int>& workers) {
  std::vector<int> circle = workers;
  if (circle.size() % 2 != 0) circle.push_back(-1);
  std::vector<Pairs> rounds;
  for (size_t round = 0; round + 1 < circle.size(); ++round) {
    Pairs pairs;
    for (size_t i = 0; i < circle.size() / 2; ++i) {
      const int a = circle[i], b = circle[circle.size() - 1 - i];
      if (a >= 0 && b >= 0) pairs.emplace_back(std::min(a, b), std::max(a, b));
    }
    rounds.push_back(std::move(pairs));
    std::rotate(circle.begin() + 1, circle.begin() + 2, circle.end());
  }
  return rounds;
}

std::vector<Pairs> rounds_of(int size, const std::vector<int>& machines) {
  std::map<int, std::vector<int>> of;
  for (int w = 0; w < size; ++w) of[machines[static_cast<size_t>(w)]].push_back(w);
  std::vector<Pairs> rounds;
  std::vector<int> first;
  for (const auto& [_, workers] : of) {
    first.push_back(workers[0]);
    size_t round = 0;  // one pair at a time inside of a machine, all machines side by side
    for (size_t a = 0; a < workers.size(); ++a)
      for (size_t b = a + 1; b < workers.size(); ++b, ++round) {
        if (round == rounds.size()) rounds.emplace_back();
        rounds[round].emplace_back(workers[a], workers[b]);
      }
  }
  for (Pairs& pairs : tournament(first)) {
    if (first.size() > kAlone) {
      rounds.push_back(std::move(pairs));
      continue;
    }
    for (const auto& pair : pairs) rounds.push_back({pair});
  }
  return rounds;
}

at::Tensor summed(Communicator& group, const std::vector<std::vector<double>>& matrix) {
  at::Tensor sum = at::zeros({static_cast<int64_t>(matrix.size()), group.size()}, at::kDouble);
  for (size_t r = 0; r < matrix.size(); ++r)
    for (size_t c = 0; c < matrix[r].size(); ++c)
      sum[static_cast<int64_t>(r)][static_cast<int64_t>(c)] = matrix[r][c];
  sum = sum.to(group.device());
  group.all_reduce(sum);
  return sum.to(at::kCPU);
}

// What the senders of these pairs reach together, all at the same time: all bytes by the longest
// time.
BytesPerSecond side_by_side(Communicator& group, const Distances& distances, const Pairs& pairs) {
  std::vector<std::vector<double>> mine(2,
                                        std::vector<double>(static_cast<size_t>(group.size()), 0));
  const auto me = static_cast<size_t>(group.rank());
  group.barrier();
  const Seconds start = wall_clock();
  for (const auto& [from, to] : pairs) {
    if (group.rank() != from && group.rank() != to) continue;
    Probe probe(group, group.rank() == from ? to : from, group.rank() == from);
    BytesPerSecond alone = distances.bandwidth[from][to];
    if (alone <= 0) alone = 1e8;  // not measured: the pair's groups were, by others
    const auto bytes = std::clamp(static_cast<int64_t>(alone * 0.15), kSmallest, kLargest);
    probe.transfer(bytes, 1);
    if (group.rank() != from) continue;
    mine[0][me] = static_cast<double>(bytes);
    mine[1][me] = wall_clock() - start;
  }
  const at::Tensor all = summed(group, mine);
  return all[0].sum().item<double>() / all[1].max().item<double>();
}

BytesPerSecond reduction(Communicator& group, Communicator* part, BytesPerSecond port) {
  double mine = 0;
  group.barrier();
  if (part != nullptr) {
    const double p = part->size();
    const auto numel =
        std::clamp(static_cast<int64_t>(port * 0.05 / 8), int64_t{1} << 14, int64_t{1} << 22);
    at::Tensor tensor = at::ones({numel}, at::TensorOptions(group.device()));
    part->all_reduce(tensor);
    std::vector<double> times;
    for (int i = 0; i < 3; ++i) {
      const Seconds start = wall_clock();
      part->all_reduce(tensor);
      if (tensor.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(tensor.device().index());
      times.push_back(wall_clock() - start);
    }
    mine = 2 * (p - 1) / p * 4 * static_cast<double>(numel) / median(times);
  }
  return mine;
}

// The least of what the members of each group measured.
std::vector<BytesPerSecond> agreed(Communicator& group, const std::vector<const Level*>& levels,
                                   const std::vector<double>& mine) {
  std::vector<std::vector<double>> rows(levels.size(),
                                        std::vector<double>(static_cast<size_t>(group.size()), 0));
  for (size_t l = 0; l < levels.size(); ++l) rows[l][static_cast<size_t>(group.rank())] = mine[l];
  const at::Tensor all = summed(group, rows);
  std::vector<BytesPerSecond> least;
  for (size_t l = 0; l < levels.size(); ++l) {
    double value = 0;
    for (int w : levels[l]->workers) {
      const auto theirs = all[static_cast<int64_t>(l)][w].item<double>();
      if (theirs > 0 && (value == 0 || theirs < value)) value = theirs;
    }
    least.push_back(value);
  }
  return least;
}

void list_levels(const Level& level, std::vector<const Level*>* list) {
  if (level.workers.size() < 2) return;
  list->push_back(&level);
  for (const Level& group : level.groups) list_levels(group, list);
}

bool member(const Level& level, int worker) {
  return std::find(level.workers.begin(), level.workers.end(), worker) != level.workers.end();
}

}  // namespace

Seconds round_trip_of([[maybe_unused]] int socket) {
#ifdef __linux__
  if (socket < 0) return 0;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
      size < offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt)
    return 0;
  // No round trip yet: the largest number.
  return info.tcpi_min_rtt > 100000000 ? 0 : 1e-6 * info.tcpi_min_rtt;
#else
  return 0;
#endif
}

Distances measure_distances(Communicator& group, const std::vector<int>& machines,
                            const std::vector<int>& sockets) {
  Distances mine(group.size());
  for (const Pairs& pairs : rounds_of(group.size(), machines)) {
    group.barrier();
    for (const auto& [a, b] : pairs) {
      const int me = group.rank();
      if (me != a && me != b) continue;
      const int other = me == a ? b : a;
      Probe asks(group, other, true), answers(group, other, false);
      Probe &first = me == a ? asks : answers, &second = me == a ? answers : asks;
      for (Probe* probe : {&first, &second}) {
        const Seconds latency = probe->latency();
        const BytesPerSecond bandwidth = probe->bandwidth();
        if (probe != &asks) continue;
        const Seconds wire =
            sockets.empty() ? 0 : round_trip_of(sockets[static_cast<size_t>(other)]) / 2;
        mine.latency[me][other] = wire > 0 ? wire : latency;
        mine.bandwidth[me][other] = bandwidth;
      }
    }
  }
  const at::Tensor bandwidth = summed(group, mine.bandwidth), latency = summed(group, mine.latency);
  Distances all(group.size());
  for (int a = 0; a < group.size(); ++a)
    for (int b = 0; b < group.size(); ++b) {
      all.bandwidth[a][b] = bandwidth[a][b].item<double>();
      all.latency[a][b] = latency[a][b].item<double>();
    }
  return all;
}

void measure_ports(Communicator& group, const Distances& distances, Level* level) {
  for (Level& child : level->groups) {
    std::vector<int> others;
    for (size_t i = 0, before = 1; others.size() != before; ++i) {  // of each sibling in turn
      before = others.size();
      for (const Level& sibling : level->groups)
        if (&sibling != &child && i < sibling.workers.size()) others.push_back(sibling.workers[i]);
    }
    Pairs pairs;
    for (size_t i = 0; i < child.workers.size() && i < others.size(); ++i)
      pairs.emplace_back(child.workers[i], others[i]);
    if (pairs.size() < 2) continue;
    const BytesPerSecond together = side_by_side(group, distances, pairs);
    if (together > kAlike * child.port) child.port = together;
  }
  for (Level& child : level->groups) {
    level->bandwidth = std::max(level->bandwidth, child.port);
    measure_ports(group, distances, &child);
  }
}

std::vector<LevelRate> measure_reductions(Communicator& group, const Level& level) {
  std::vector<const Level*> levels;
  list_levels(level, &levels);
  std::vector<std::unique_ptr<Communicator>> parts(levels.size());
  std::vector<double> alone(levels.size(), 0), beside(levels.size(), 0);
  for (size_t l = 0; l < levels.size(); ++l) {
    if (member(*levels[l], group.rank()))
      parts[l] = subgroup(group, levels[l]->workers, kSubgroupTag + static_cast<int>(l));
    alone[l] = reduction(group, parts[l].get(), levels[l]->bandwidth);
  }
  for (const Level* parent : levels) {
    Communicator* part = nullptr;
    size_t own = 0, siblings = 0;
    BytesPerSecond port = 0;
    for (size_t l = 0; l < levels.size(); ++l) {
      const bool child = std::any_of(parent->groups.begin(), parent->groups.end(),
                                     [&](const Level& g) { return &g == levels[l]; });
      if (!child) continue;
      ++siblings;
      if (parts[l] != nullptr) part = parts[l].get(), own = l, port = levels[l]->bandwidth;
    }
    if (siblings < 2) continue;
    const double rate = reduction(group, part, port);
    if (part != nullptr) beside[own] = rate;
  }
  const auto a = agreed(group, levels, alone), b = agreed(group, levels, beside);
  std::vector<LevelRate> rates;
  for (size_t l = 0; l < levels.size(); ++l) rates.push_back({levels[l]->workers, a[l], b[l]});
  return rates;
}

}  // namespace motley::discover

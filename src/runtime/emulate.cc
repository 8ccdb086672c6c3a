#include "runtime/emulate.h"

#include <ATen/ATen.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <limits>

#include "capture/capture.h"
#include "comm/launch.h"
#include "core/error.h"
#include "core/fault.h"
#include "cost/cost.h"
#include "graph/canonical.h"
#include "runtime/eager.h"
#include "runtime/executor.h"
#include "runtime/random.h"

namespace motley {

namespace {

constexpr Seconds kMaxDebt = 5e-3;      // oversleep that is carried over
constexpr Seconds kWorthASleep = 1e-3;  // ops are padded together until this much is owed

Seconds seconds_of(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<Seconds>(t.tv_sec) + 1e-9 * static_cast<Seconds>(t.tv_nsec);
}
Seconds wall_clock() { return seconds_of(CLOCK_MONOTONIC); }
Seconds cpu_clock() { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace

Padding::Padding(double speed) : speed_(speed) {
  MOTLEY_CHECK(speed > 0 && speed <= 1, "speed {}", speed);
  prctl(PR_SET_TIMERSLACK, 1UL);
  mark();
}

void Padding::mark() {
  wall_ = wall_clock();
  cpu_ = cpu_clock();
}

void Padding::account(const void* work) {
  const Seconds wall = wall_, cpu = cpu_;
  mark();
  Seconds worked = cpu_ - cpu;
  if (work != nullptr) {
    const auto [known, first] = least_.try_emplace(work, worked);
    if (first) return;
    // The clock of a virtual machine takes back what the host took: nothing is no measurement.
    if (worked > 0) known->second = known->second > 0 ? std::min(known->second, worked) : worked;
    worked = known->second;
  }
  owed_ = std::max(-kMaxDebt, owed_ + worked * fault_slowness() / speed_ - (wall_ - wall));
}

void Padding::sleep() {
  if (owed_ <= 0) return;
  timespec t;
  t.tv_sec = static_cast<time_t>(owed_);
  t.tv_nsec = static_cast<long>((owed_ - std::floor(owed_)) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR) {
  }
  account();
}

void Padding::before(bool compute) {
  if (compute) return;
  account();
  sleep();
}

void Padding::after(bool compute, const void* work) {
  if (!compute) return mark();
  account(work);
  if (owed_ >= kWorthASleep) sleep();
}

BytesPerSecond pair_bandwidth(const Cluster& cluster, int a, int b, Traffic traffic) {
  BytesPerSecond slowest = std::numeric_limits<double>::infinity();
  const int all = cluster.size();
  // The ports on the way from a device up to the group that holds both.
  auto climb = [&](int device, int other) {
    int below = 1;  // devices behind the port
    BytesPerSecond own = 0;
    for (GroupId g = cluster.devices[device].parent; g.valid();
         g = cluster.groups[g.index].parent) {
      const Group& group = cluster.groups[g.index];
      const int members =
          group.children.empty() ? group.device_count : static_cast<int>(group.children.size());
      BytesPerSecond port = own > 0 ? own : group.link.bandwidth;
      if (group.link.kind == LinkKind::bus) port /= 2. * members;
      if (traffic == Traffic::all_pairs) port /= static_cast<double>(below) * (all - below);
      if (members > 1) slowest = std::min(slowest, port);
      below = group.device_count;
      own = group.uplink;
      if (other >= group.first_device && other < group.first_device + group.device_count) return;
    }
  };
  climb(a, b);
  climb(b, a);
  return slowest;
}

std::string limit_bandwidth(ProcessCommunicator& group, const Cluster& cluster) {
  const std::vector<int> sockets = group.sockets();
  const int rank = group.rank();
  std::vector<uint64_t> rates[2];
  for (Traffic traffic : {Traffic::ring, Traffic::all_pairs})
    for (int r = 0; r < group.size(); ++r)
      rates[static_cast<int>(traffic)].push_back(
          r == rank
              ? 0
              : static_cast<uint64_t>(std::min(1e18, pair_bandwidth(cluster, rank, r, traffic))));
  std::string problem;
  for (int r = 0; r < group.size() && problem.empty(); ++r) {
    if (r == rank) continue;
    if (sockets[r] < 0) {
      problem = "the connections of the group were not found";
      continue;
    }
    // Model-based congestion controls would fight the pacing.
    setsockopt(sockets[r], IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
    const uint64_t rate = rates[0][r];
    if (setsockopt(sockets[r], SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate) != 0)
      problem = std::string("SO_MAX_PACING_RATE: ") + std::strerror(errno);
  }
  at::Tensor failed = at::full({1}, problem.empty() ? 0 : 1, at::kInt);
  group.all_reduce(failed, Reduction::max);
  if (failed.item<int>() != 0)
    return "no pacing: " + (problem.empty() ? std::string("another worker could not") : problem);
  group.on_traffic(
      [sockets, ring = rates[0], pairs = rates[1], now = Traffic::ring](Traffic traffic) mutable {
        if (traffic == now) return;
        now = traffic;
        const std::vector<uint64_t>& rate = traffic == Traffic::ring ? ring : pairs;
        for (size_t r = 0; r < sockets.size(); ++r)
          if (sockets[r] >= 0)
            setsockopt(sockets[r], SOL_SOCKET, SO_MAX_PACING_RATE, &rate[r], sizeof rate[r]);
      });
  return "paced sockets";
}

std::unique_ptr<Network> network_for(const Cluster& cluster) {
  std::string why;
  std::unique_ptr<Network> network = open_network(cluster, &why);
  if (!network)
    std::fprintf(stderr, "emulation: no network namespaces (%s); pacing sockets instead\n",
                 why.c_str());
  return network;
}

std::string emulate_links(ProcessCommunicator& group, const Cluster& cluster) {
  if (const char* mode = network_of_worker()) return mode;
  return limit_bandwidth(group, cluster);
}

Measured measure(Communicator& group, double speed) {
  Measured result;
  at::NoGradGuard no_grad;
  Padding padding(speed);
  // Seconds of one call of `op` on the emulated device, over about `budget` seconds.
  auto seconds_per_call = [&](const char* name, Seconds budget, auto op) {
    op();
    group.barrier();
    padding.after(false);
    const Seconds start = wall_clock();
    int calls = 0;
    while (calls < 3 || wall_clock() - start < budget) {
      op();
      padding.after(true, name);
      ++calls;
    }
    padding.before(false);
    const Seconds seconds = (wall_clock() - start) / calls;
    group.barrier();
    return seconds;
  };
  const at::Tensor tiny = at::ones({8});
  result.overhead = seconds_per_call("launch", 0.2, [&] { at::add(tiny, tiny); });
  const at::Tensor a = at::ones({256, 256}), b = at::ones({256, 1024});
  result.flops = 2. * 256 * 256 * 1024 / seconds_per_call("product", 0.5, [&] { at::mm(a, b); });
  // A mix of what models do other than products, in multiples of the tensor's bytes.
  const at::Tensor x = at::randn({256, 512}), w = at::ones({512});
  const double bytes = 4. * 256 * 512;
  const Seconds mix = seconds_per_call("mix", 0.5, [&] {
    at::add(x, x);  // reads one or two, writes one
    at::mul(x, x);
    at::gelu(x);
    at::_softmax(x, -1, false);
    at::native_layer_norm(x, {512}, w, w, 1e-5);
    at::gelu_backward(x, x);
    at::_softmax_backward_data(x, x, -1, at::kFloat);
  });
  result.memory_bandwidth = 18 * bytes / std::max(mix - 7 * result.overhead, 1e-9);
  if (group.size() == 1) return result;

  auto seconds_of_all_reduce = [&](int64_t numel, int repeats) {
    at::Tensor t = at::zeros({numel});
    group.all_reduce(t);
    std::vector<Seconds> times;
    for (int i = 0; i < repeats; ++i) {
      group.barrier();
      const Seconds start = wall_clock();
      group.all_reduce(t);
      times.push_back(wall_clock() - start);
    }
    std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
    // The slowest worker's, so that all agree.
    at::Tensor slowest = at::full({1}, times[repeats / 2], at::kDouble);
    group.all_reduce(slowest, Reduction::max);
    return slowest.item<double>();
  };
  const double p = group.size();
  const Seconds small = seconds_of_all_reduce(1, 11);
  const int64_t numel = 2 << 20;
  const Seconds large = seconds_of_all_reduce(numel, 3);
  result.latency = small / (2 * (p - 1));
  result.ring_bandwidth =
      2 * (p - 1) / p * 4. * static_cast<double>(numel) / std::max(large - small, 1e-9);
  return result;
}

namespace {

// A step of a model on one emulated device: the launches of its operators and the rest as the cost
// model prices them, and its time as measured.
struct PricedStep {
  Seconds launches = 0, rest = 0, measured = 0;
};

Seconds priced(const Theory& theory, const DeviceType& type) {
  const CostModel cost(flat_cluster({type}, {1}, {LinkKind::switched, 1, 0}));
  Seconds sum = 0;
  for (size_t n = 0; n < theory.graph().nodes.size(); ++n)
    for (const Triple& triple : theory.triples(NodeId(n)))
      if (triple.cut == 0 && std::all_of(triple.in.begin(), triple.in.end(),
                                         [](Placement p) { return p.is_replicated(); })) {
        sum += cost.compute(0, work_of(theory, NodeId(n), triple), 1);
        break;
      }
  return sum;
}

PricedStep priced_step(Communicator& group, double speed, const std::string& model, int64_t batch,
                       int steps, const Measured& device) {
  const Graph graph = canonicalize(capture(model, batch).graph);
  const Theory theory(graph);
  DeviceType type;
  type.name = "this";
  type.flops = type.half_flops = device.flops;
  type.memory_bandwidth = device.memory_bandwidth;
  type.memory = 1;
  PricedStep step;
  step.rest = priced(theory, type);
  type.overhead = device.overhead;
  step.launches = priced(theory, type) - step.rest;

  const std::shared_ptr<TrainModule> module = materialize(parse_model(model), 0);
  Feeds feeds{{}, buffers_of(*module), random_inputs(*module, batch, 1)};
  for (const auto& [name, tensor] : parameters_of(*module))
    feeds.parameters[name] = tensor.detach();
  Padding padding(speed);
  InterpretOptions options;
  options.kernels = random_kernels(0, 0);
  options.observe = [&](ValueId v, const at::Tensor&) { padding.after(true, &graph.value(v)); };
  std::vector<Seconds> times;
  for (int i = 0; i < steps; ++i) {
    group.barrier();
    padding.after(false);
    const Seconds start = wall_clock();
    interpret(graph, feeds, options);
    padding.before(false);
    times.push_back(wall_clock() - start);
  }
  // An operator's least time, which padding goes by, falls over the first steps.
  step.measured = *std::min_element(times.begin() + 1, times.end());
  return step;
}

}  // namespace

void fit_to_model(Communicator& group, double speed, const std::string& model, int64_t batch,
                  Measured* mine) {
  const PricedStep small = priced_step(group, speed, model, 1, 12, *mine),
                   large = priced_step(group, speed, model, batch, 6, *mine);
  // Both steps launch the same operators.
  double work = (large.measured - small.measured) / (large.rest - small.rest),
         launch = (small.measured - work * small.rest) / small.launches;
  if (!(work > 0 && launch > 0)) work = launch = large.measured / (large.launches + large.rest);
  mine->flops /= work;
  mine->memory_bandwidth /= work;
  mine->overhead *= launch;
}

Cluster calibrated(Communicator& group, const Cluster& cluster, const Measured& mine) {
  const int types = static_cast<int>(cluster.types.size()),
            own = cluster.devices[group.rank()].type;
  // Maxima of what grows with slowness.
  at::Tensor slowness = at::zeros({types, 3}, at::kDouble);
  slowness[own][0] = 1 / mine.flops;
  slowness[own][1] = 1 / mine.memory_bandwidth;
  slowness[own][2] = mine.overhead;
  group.all_reduce(slowness, Reduction::max);
  Cluster result = cluster;
  for (int t = 0; t < types; ++t) {
    DeviceType& type = result.types[t];
    type.flops = type.half_flops = 1 / slowness[t][0].item<double>();
    type.memory_bandwidth = 1 / slowness[t][1].item<double>();
    type.overhead = slowness[t][2].item<double>();
  }
  if (group.size() == 1) return result;
  at::Tensor link = at::tensor({1 / mine.ring_bandwidth, mine.latency}, at::kDouble);
  group.all_reduce(link, Reduction::max);
  BytesPerSecond nominal = std::numeric_limits<double>::infinity();
  for (int r = 0; r < group.size(); ++r)
    nominal = std::min(nominal, pair_bandwidth(cluster, r, (r + 1) % group.size(), Traffic::ring));
  const double scale = 1 / link[0].item<double>() / nominal;
  for (Group& g : result.groups) {
    g.link.bandwidth *= scale;
    g.uplink *= scale;
    g.link.latency = link[1].item<double>();
  }
  return result;
}

}  // namespace motley

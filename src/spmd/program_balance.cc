#include "spmd/program_balance.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace motley::spmd {

using namespace solver;

namespace {

// The ports of a network that may be the slowest of an exchange. What a device gives away or takes
// changes evenly along equal devices, so of equal ports in a row the first and the last are enough.
std::vector<BalancePort> balance_ports(const CostModel& model) {
  const Cluster& cluster = model.cluster();
  const std::vector<CollectiveModel::ExchangePort> ports = model.net().exchange_ports();
  auto like = [&](size_t p, size_t q, int distance) {
    if (q >= ports.size() || ports[q].count != ports[p].count ||
        ports[q].first != ports[p].first + distance ||
        ports[q].seconds_per_byte != ports[p].seconds_per_byte)
      return false;
    const int type = cluster.devices[ports[p].first].type;
    for (const auto& port : {ports[p], ports[q]})
      for (int d = port.first; d < port.first + port.count; ++d)
        if (cluster.devices[d].type != type) return false;
    return true;
  };
  std::vector<BalancePort> result;
  for (size_t p = 0; p < ports.size(); ++p) {
    const int count = ports[p].count;
    if (p > 0 && like(p, p - 1, -count) && like(p, p + 1, count)) continue;
    BalancePort port;
    port.seconds_per_byte = ports[p].seconds_per_byte;
    port.before.assign(cluster.types.size(), 0);
    for (int d = 0; d < ports[p].first; ++d) ++port.before[cluster.devices[d].type];
    port.until = port.before;
    for (int d = ports[p].first; d < ports[p].first + count; ++d)
      ++port.until[cluster.devices[d].type];
    result.push_back(std::move(port));
  }
  return result;
}

}  // namespace

BalanceProblem balance_problem(const ProgramCost& cost, const CostModel& model, int segments,
                               bool tied, bool memory_limit) {
  const Cluster& cluster = model.cluster();
  const auto types = static_cast<int64_t>(cluster.types.size());
  BalanceProblem lp;
  lp.devices = cluster.count_by_type();
  for (const StageCost& s : cost.stages)
    lp.stages.push_back({s.comm_fixed, s.comm_padded, s.cut, s.whole, s.segment});
  for (int64_t s = 0; s < segments; ++s)
    lp.sharded.emplace_back(cost.memory.cut.begin() + s * types,
                            cost.memory.cut.begin() + (s + 1) * types);
  lp.fixed = cost.memory.whole;
  for (const DeviceType& t : cluster.types)
    lp.capacity.push_back(memory_limit ? t.memory : std::numeric_limits<double>::infinity());
  if (tied) {
    auto sum = [&](const std::vector<double>& by_segment) {
      std::vector<double> all(types, 0);
      for (size_t i = 0; i < by_segment.size(); ++i) all[i % types] += by_segment[i];
      return all;
    };
    for (BalanceStage& stage : lp.stages) {
      stage.sharded = sum(stage.sharded);
      stage.segment = 0;
    }
    lp.sharded = {sum(cost.memory.cut)};
    return lp;
  }
  for (int a = 0; a < segments; ++a)
    for (int b = a + 1; b < segments; ++b)
      if (const Bytes bytes = cost.exchanged[a * segments + b] + cost.exchanged[b * segments + a];
          bytes > 0)
        lp.exchanges.push_back({a, b, bytes});
  if (!lp.exchanges.empty()) lp.ports = balance_ports(model);
  return lp;
}

Weights deciding_weights(const ProgramCost& cost) {
  Weights weights;
  weights.compute.assign(cost.compute.size(), 0);
  double total = 0;
  for (const StageCost& s : cost.stages) {
    size_t slowest = std::max_element(s.compute.begin(), s.compute.end()) - s.compute.begin();
    weights.compute[slowest] += s.compute[slowest];
    total += s.compute[slowest];
  }
  if (total == 0) weights.compute[0] = total = 1;
  for (double& w : weights.compute) w /= total;
  return weights;
}

}  // namespace motley::spmd

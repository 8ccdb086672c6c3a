#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "grid/placement.h"
#include "grid/search.h"

namespace motley::grid {

namespace {

// Of the replicas: with layers balanced over its stages, a replica's stages take 1 / sum of
// their speeds.
std::vector<double> seconds_per_micro_batch(const Estimator& estimator, const Strategy& s,
                                            const Mesh& mesh) {
  std::map<Mesh::Kind, double> speed;
  std::vector<double> per_micro_batch;
  for (int r = 0; r < s.dp; ++r) {
    if (mesh.like[r] != r) {
      per_micro_batch.push_back(per_micro_batch[mesh.like[r]]);
      continue;
    }
    double sum = 0;
    for (int stage = 0; stage < s.pp; ++stage) {
      const size_t g = static_cast<size_t>(stage) * s.dp + r;
      auto [it, fresh] = speed.try_emplace(mesh.kind(g), 0.0);
      if (fresh) {
        const std::vector<Seconds> times = estimator.group_times(s, mesh, g);
        it->second = 1 / std::accumulate(times.begin(), times.end(), Seconds{0});
      }
      sum += it->second;
    }
    per_micro_batch.push_back(1 / sum);
  }
  return per_micro_batch;
}

}  // namespace

bool give_micro_batches(const Estimator& estimator, int global_batch, const Mesh& mesh,
                        Strategy* s) {
  if (global_batch % s->micro_batch != 0) return false;
  const int total = global_batch / s->micro_batch;
  if (total < s->dp) return false;
  if (s->zero >= 2 && s->runtime == Runtime::motley) {  // its replicas meet in every backward pass
    s->micro_batches.assign(s->dp, total / s->dp);
    return total % s->dp == 0 && (s->interleave == 1 || s->micro_batches[0] % s->pp == 0);
  }
  std::vector<double> per_micro_batch = seconds_per_micro_batch(estimator, *s, mesh);
  const auto [low, high] = std::minmax_element(per_micro_batch.begin(), per_micro_batch.end());
  if (total % s->dp == 0 && *high <= *low * (1 + 1e-9)) {
    s->micro_batches.assign(s->dp, total / s->dp);
  } else if (s->interleave > 1) {
    return false;
  } else {
    s->micro_batches = share_micro_batches(total, per_micro_batch);
  }
  return s->interleave == 1 || s->micro_batches[0] % s->pp == 0;
}

std::vector<int> share_micro_batches(int total, const std::vector<double>& per_micro_batch) {
  const int n = static_cast<int>(per_micro_batch.size());
  MOTLEY_CHECK(total >= n && n > 0);
  // The largest time T is least when counts floor(T / per_micro_batch), at least one, add up to the
  // total.
  auto counts = [&](double limit) {
    std::vector<int> c(n);
    for (int r = 0; r < n; ++r)
      c[r] = static_cast<int>(std::clamp(std::floor(limit / per_micro_batch[r] + 1e-9), 1.0,
                                         static_cast<double>(total)));
    return c;
  };
  double low = 0, high = total * *std::max_element(per_micro_batch.begin(), per_micro_batch.end());
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    const std::vector<int> c = counts(middle);
    (std::accumulate(c.begin(), c.end(), int64_t{0}) >= total ? high : low) = middle;
  }
  std::vector<int> c = counts(high);
  int64_t extra = std::accumulate(c.begin(), c.end(), int64_t{0}) - total;
  while (extra > 0) {  // give back where it takes most off
    int worst = -1;
    for (int r = 0; r < n; ++r)
      if (c[r] > 1 && (worst < 0 || c[r] * per_micro_batch[r] > c[worst] * per_micro_batch[worst]))
        worst = r;
    --c[worst];
    --extra;
  }
  return c;
}

namespace {

// What layers take in each range, and how much there is.
void set_memory(const Estimator& estimator, const Mesh& mesh, const Strategy& s,
                AssignProblem* problem) {
  const int layers = estimator.model().size(), ranges = s.pp * s.interleave;
  std::vector<Bytes> state(layers), activation(layers);
  Bytes transient = 0;  // the most that one layer is alive with
  for (int l = 0; l < layers; ++l) {
    state[l] = estimator.state_bytes(l, l + 1, s);
    activation[l] =
        (1 + estimator.calibration().fragmentation) * estimator.activation_bytes(l, l + 1, s);
    transient = std::max(transient, estimator.transient_bytes(l, l + 1, s));
  }
  for (int range = 0; range < ranges; ++range) {
    std::vector<Bytes> row(layers);
    const double held = estimator.in_flight(range, s);
    for (int l = 0; l < layers; ++l) row[l] = state[l] + held * activation[l];
    problem->memory.push_back(std::move(row));
    problem->limit.push_back((estimator.memory_limit(range % s.pp, s, mesh) -
                              estimator.context_bytes(s) -
                              transient * Estimator::alive_at_once(s)) /
                             s.interleave);
  }
}

}  // namespace

bool may_fit(const Estimator& estimator, int global_batch, const Mesh& mesh, Strategy s) {
  const int total = global_batch / s.micro_batch;
  if (s.interleave > 1 && total % s.dp != 0) return true;
  s.micro_batches = {(total + s.dp - 1) / s.dp};
  AssignProblem problem;
  set_memory(estimator, mesh, s, &problem);
  // Each range takes as many layers as it can.
  int at = 0;
  for (size_t range = 0; range < problem.memory.size(); ++range)
    for (Bytes used = 0; at < estimator.model().size(); ++at) {
      used += problem.memory[range][at];
      if (used > problem.limit[range] * (1 + 1e-9)) break;
    }
  return at == estimator.model().size();
}

bool assign(const Estimator& estimator, const Mesh& mesh, bool memory, Strategy* s,
            SearchCounters* counters) {
  const Model& model = estimator.model();
  const int layers = model.size(), ranges = s->pp * s->interleave;
  if (ranges > layers) return false;
  AssignProblem problem;
  problem.block = model.blocks();
  problem.micro_batches = *std::max_element(s->micro_batches.begin(), s->micro_batches.end());
  problem.blocking = s->runtime != Runtime::motley;
  std::map<Mesh::Kind, std::vector<Seconds>> rows;
  std::vector<int> replicas;  // one of those that are alike
  {
    std::set<std::pair<int, int>> seen;
    for (int r = 0; r < s->dp; ++r)
      if (seen.insert({mesh.like[r], s->micro_batches[r]}).second) replicas.push_back(r);
  }
  for (int range = 0; range < ranges; ++range) {
    const int stage = range % s->pp;
    std::vector<Seconds> time(layers, 0.0);
    std::set<std::pair<Mesh::Kind, int>> seen;
    for (int r : replicas) {
      const size_t g = static_cast<size_t>(stage) * s->dp + r;
      if (!seen.insert({mesh.kind(g), s->micro_batches[r]}).second) continue;
      auto [row, fresh] = rows.try_emplace(mesh.kind(g));
      if (fresh) row->second = estimator.group_times(*s, mesh, g);
      const double share = static_cast<double>(s->micro_batches[r]) / problem.micro_batches;
      for (int l = 0; l < layers; ++l) time[l] = std::max(time[l], share * row->second[l]);
    }
    problem.time.push_back(std::move(time));
    if (range + 1 < ranges) {
      std::vector<Seconds> transfer(layers, 0.0);
      int slowest = 0;
      for (int r : replicas) {
        const size_t at = static_cast<size_t>(stage) * s->dp;
        if (mesh.message_seconds_per_byte[at + r] > mesh.message_seconds_per_byte[at + slowest])
          slowest = r;
      }
      double last = -1;
      for (int l = 0; l < layers; ++l) {
        const double output = model.layers[l].output;
        if (output == last) {
          transfer[l] = transfer[l - 1];
          continue;
        }
        last = output;
        const Seconds forth = estimator.message_time(l, stage, slowest, *s, mesh, false);
        const Seconds back = estimator.message_time(l, stage, slowest, *s, mesh, true);
        transfer[l] = problem.blocking ? std::max(forth, back) : forth + back;
      }
      problem.transfer.push_back(std::move(transfer));
    }
  }
  if (memory) set_memory(estimator, mesh, *s, &problem);
  const Assignment a = assign_layers(problem);
  if (counters) counters->assign_solves += a.solves;
  if (!a.feasible) return false;
  s->stages = a.stages;
  return true;
}

Candidate anneal_placement(const Estimator& estimator, const Candidate& start, bool memory,
                           uint64_t seed, int steps, SearchCounters* counters) {
  const Strategy& s = start.strategy;
  const int size = s.cp * s.tp, groups = s.pp * s.dp;
  // Groups of devices: those placed, then those left out, cut inside nodes where possible.
  std::vector<std::vector<int>> group;
  std::vector<bool> used(estimator.cluster().size(), false);
  for (int g = 0; g < groups; ++g) {
    group.emplace_back(s.devices.begin() + static_cast<int64_t>(g) * size,
                       s.devices.begin() + static_cast<int64_t>(g + 1) * size);
    for (int d : group.back()) used[d] = true;
  }
  for (const std::vector<int>& node : nodes_of(estimator.cluster()).devices) {
    std::vector<int> left;
    for (int d : node)
      if (!used[d]) left.push_back(d);
    for (size_t i = 0; i + size <= left.size(); i += size)
      group.emplace_back(left.begin() + static_cast<int64_t>(i),
                         left.begin() + static_cast<int64_t>(i + size));
  }
  const int total = static_cast<int>(group.size());
  const int batch =
      s.micro_batch * std::accumulate(s.micro_batches.begin(), s.micro_batches.end(), 0);
  Candidate best = start, now = start;
  Rng rng(seed);
  std::vector<int> order(total);
  std::iota(order.begin(), order.end(), 0);
  for (int step = 0; step < steps && total > 1; ++step) {
    const int a = static_cast<int>(rng.below(groups)), b = static_cast<int>(rng.below(total));
    const double chance = rng.uniform();
    if (a == b) continue;
    std::swap(order[a], order[b]);
    Candidate next = now;
    next.strategy.devices.clear();
    for (int g = 0; g < groups; ++g)
      next.strategy.devices.insert(next.strategy.devices.end(), group[order[g]].begin(),
                                   group[order[g]].end());
    const Mesh mesh = estimator.mesh(next.strategy);
    bool good = give_micro_batches(estimator, batch, mesh, &next.strategy) &&
                assign(estimator, mesh, memory, &next.strategy, counters);
    if (good) {
      next.estimate = estimator.estimate(next.strategy, mesh);
      if (counters) ++counters->estimated;
      good = next.estimate.fits || !memory;
    }
    const double heat = 0.05 * now.estimate.step * (1 - static_cast<double>(step) / steps) + 1e-12;
    if (good && (next.estimate.step <= now.estimate.step ||
                 chance < std::exp((now.estimate.step - next.estimate.step) / heat))) {
      now = next;
      if (now.estimate.step < best.estimate.step) best = now;
    } else {
      std::swap(order[a], order[b]);
    }
  }
  return best;
}

void polish(const Estimator& estimator, bool memory, Candidate* c, SearchCounters* counters) {
  const Mesh mesh = estimator.mesh(c->strategy);
  const std::vector<bool> block = estimator.model().blocks();
  auto degenerate = [&](const std::vector<int>& stages) {
    int at = 0;
    for (int n : stages) {
      if (std::find(block.begin() + at, block.begin() + at + n, true) == block.begin() + at + n)
        return true;
      at += n;
    }
    return false;
  };
  for (bool better = true; better;) {
    better = false;
    for (size_t i = 0; i + 1 < c->strategy.stages.size(); ++i)
      for (int move : {1, -1}) {
        Strategy s = c->strategy;
        s.stages[i] += move;
        s.stages[i + 1] -= move;
        if (s.stages[i] < 1 || s.stages[i + 1] < 1 || degenerate(s.stages)) continue;
        Estimate e = estimator.estimate(s, mesh);
        ++counters->estimated;
        if ((memory && !e.fits) || e.step >= c->estimate.step * (1 - 1e-9)) continue;
        c->strategy = std::move(s);
        c->estimate = std::move(e);
        better = true;
      }
  }
}

}  // namespace motley::grid

#include "grid/search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "grid/placement.h"

namespace motley::grid {

namespace {

// Groups of one kind take the same time for a layer: device types, and seconds per byte of the
// rings.
using Kind = std::tuple<int, double, double>;
Kind kind_of(const Mesh& mesh, size_t group) {
  return {mesh.mix[group], mesh.tensor[group].seconds_per_byte,
          mesh.context[group].seconds_per_byte};
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<bool> blocks_of(const Model& model) {
  std::vector<bool> block;
  for (const Layer& layer : model.layers) block.push_back(layer.block);
  return block;
}

// A list that counts blocks only is completed to all layers.
std::vector<int> expand_stages(const Model& model, std::vector<int> stages) {
  const std::vector<bool> block = blocks_of(model);
  const auto first = std::find(block.begin(), block.end(), true);
  const auto last = std::find(block.rbegin(), block.rend(), true);
  const int before = static_cast<int>(first - block.begin());
  const int after = static_cast<int>(last - block.rbegin());
  const int sum = std::accumulate(stages.begin(), stages.end(), 0);
  if (first != block.end() && sum + before + after == model.size()) {
    stages.front() += before;
    stages.back() += after;
  }
  return stages;
}

std::vector<LayerTimes::Time> times_of(const Estimator& estimator, const Strategy& s,
                                       const Mesh& mesh, size_t group) {
  return estimator.layer_times(mesh.types_of(group), s, mesh.tensor[group], mesh.context[group]);
}

// Seconds of a micro-batch in all layers, forward and backward, on one group.
Seconds chain_time(const Estimator& estimator, const Strategy& s, const Mesh& mesh, size_t group) {
  Seconds sum = 0;
  for (const LayerTimes::Time& t : times_of(estimator, s, mesh, group))
    sum += t.forward + t.backward;
  return sum;
}

// Of the replicas: with layers balanced over its stages, a replica's stages take 1 / sum of
// their speeds.
std::vector<double> seconds_per_micro_batch(const Estimator& estimator, const Strategy& s,
                                            const Mesh& mesh) {
  std::map<Kind, double> speed;
  std::vector<double> per_micro_batch;
  for (int r = 0; r < s.dp; ++r) {
    if (mesh.like[r] != r) {
      per_micro_batch.push_back(per_micro_batch[mesh.like[r]]);
      continue;
    }
    double sum = 0;
    for (int stage = 0; stage < s.pp; ++stage) {
      const size_t g = static_cast<size_t>(stage) * s.dp + r;
      auto [it, fresh] = speed.try_emplace(kind_of(mesh, g), 0.0);
      if (fresh) it->second = 1 / chain_time(estimator, s, mesh, g);
      sum += it->second;
    }
    per_micro_batch.push_back(1 / sum);
  }
  return per_micro_batch;
}

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

}  // namespace

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

bool assign(const Estimator& estimator, const Mesh& mesh, bool memory, Strategy* s,
            SearchCounters* counters) {
  const Model& model = estimator.model();
  const int layers = model.size(), ranges = s->pp * s->interleave;
  if (ranges > layers) return false;
  AssignProblem problem;
  problem.block = blocks_of(model);
  problem.micro_batches = *std::max_element(s->micro_batches.begin(), s->micro_batches.end());
  problem.blocking = s->runtime != Runtime::motley;
  std::map<Kind, std::vector<Seconds>> rows;
  std::vector<int> replicas;  // one of those that are alike
  {
    std::set<std::pair<int, int>> seen;
    for (int r = 0; r < s->dp; ++r)
      if (seen.insert({mesh.like[r], s->micro_batches[r]}).second) replicas.push_back(r);
  }
  for (int range = 0; range < ranges; ++range) {
    const int stage = range % s->pp;
    std::vector<Seconds> time(layers, 0.0);
    std::set<std::pair<Kind, int>> seen;
    for (int r : replicas) {
      const size_t g = static_cast<size_t>(stage) * s->dp + r;
      if (!seen.insert({kind_of(mesh, g), s->micro_batches[r]}).second) continue;
      auto [row, fresh] = rows.try_emplace(kind_of(mesh, g));
      if (fresh)
        for (const LayerTimes::Time& t : times_of(estimator, *s, mesh, g))
          row->second.push_back(t.forward + t.backward);
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
  if (memory) {
    std::vector<Bytes> state(layers), activation(layers);
    Bytes transient = 0;
    for (int l = 0; l < layers; ++l) {
      state[l] = estimator.state_bytes(l, l + 1, *s);
      activation[l] =
          (1 + estimator.calibration().fragmentation) * estimator.activation_bytes(l, l + 1, *s);
      transient = std::max(transient, estimator.transient_bytes(l, l + 1, *s));
    }
    for (int range = 0; range < ranges; ++range) {
      std::vector<Bytes> row(layers);
      const double held = estimator.in_flight(range, *s);
      for (int l = 0; l < layers; ++l) row[l] = state[l] + held * activation[l];
      problem.memory.push_back(std::move(row));
      problem.limit.push_back((Estimator::memory_limit(range % s->pp, *s, mesh) -
                               estimator.calibration().context - transient) /
                              s->interleave);
    }
  }
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

namespace {

// Moves one layer at a time over a stage boundary while the exact estimate falls.
void polish(const Estimator& estimator, bool memory, Candidate* c, SearchCounters* counters) {
  const Mesh mesh = estimator.mesh(c->strategy);
  const std::vector<bool> block = blocks_of(estimator.model());
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

// Degrees and what else is chosen before devices are placed.
struct Option {
  int pp = 1, dp = 1, tp = 1, cp = 1, ep = 1, micro_batch = 1, interleave = 1, zero = 0;
  Recompute recompute = Recompute::none;
  Seconds bound = 0;

  Strategy strategy(Runtime runtime) const {
    Strategy s;
    s.pp = pp, s.dp = dp, s.tp = tp, s.cp = cp, s.ep = ep;
    s.micro_batch = micro_batch, s.interleave = interleave, s.zero = zero;
    s.recompute = recompute, s.runtime = runtime;
    return s;
  }
};

// What can be said before anything is placed: perfect balance, what tensor and context parallelism
// send at the speed of the fastest link, gradients and optimizer as if the stages shared them out.
// The work of a layer is its time on the fastest type; a type's speed is the most work per second
// it does in any layer.
//
// A group of several types is at each layer no faster than any of its members. Let stage s of
// replica r have at most speed v_sr, work w_s and gradients that take g_s, M_r micro-batches
// going to replica r. The step T is at least M_r w_s / v_sr + g_s for all of them, so that
//
//     T sum v_sr >= sum M_r w_s + sum g_s v_sr,   T >= total work / joint speed + share * sum g_s
//
// where `share` is the least part that one stage has of all speeds: slowest / (fastest * pp). With
// M_r micro-batches of p_r seconds each, replica r also takes (M_r - 1) p_r and one micro-batch
// from end to end (one of the two where stages are interleaved); the M_r add up to the total and
// the 1 / p_r to at most the joint speed.
class FirstBound {
 public:
  FirstBound(const Estimator& estimator, const SearchOptions& options)
      : estimator_(estimator), options_(options), counts_(estimator.cluster().count_by_type()) {
    std::vector<Bytes> memory;
    for (const Device& d : estimator.cluster().devices)
      memory.push_back(estimator.cluster().types[d.type].memory);
    std::sort(memory.rbegin(), memory.rend());
    for (Bytes m : memory) largest_sum_.push_back(largest_sum_.back() + m);
  }

  Seconds operator()(const Strategy& s) {
    const Layers& layers = layers_of(s);
    double joint = 0;
    int left = s.ranks();
    for (int type : layers.fastest) {
      const int n = std::min(counts_[type], left);
      joint += n * layers.speed[type];
      left -= n;
    }
    const double total = static_cast<double>(options_.global_batch) / s.micro_batch;
    const Seconds per_micro_batch = layers.work * s.tp * s.cp / joint;
    const Seconds gradients = layers.least_share / s.pp * layers.parameters *
                              estimator_.reduced_at_end(s) *
                              estimator_.best_data_seconds_per_byte(s);
    return std::max(total * per_micro_batch + (options_.fixed.devices ? 0 : gradients),
                    (s.interleave > 1 ? 0 : (total - s.dp) * per_micro_batch) + layers.work) +
           tail(s, layers);
  }

  // What follows the reduction of gradients: some stage has the mean of all parameters at least.
  Seconds tail(const Strategy& s) { return tail(s, layers_of(s)); }

  // Whether all stages together need more than they can have, wherever devices and layers go. Where
  // replicas share the state by their memory a stage has the mean of theirs, else the least: with n
  // devices a stage, the i-th best one cannot have more than the i n-th largest device.
  bool too_large(const Strategy& s) const {
    const int layers = estimator_.model().size(), each = s.dp * s.cp * s.tp;
    const Calibration& c = estimator_.calibration();
    Bytes room = 0;
    if (s.zero > 0 && s.runtime == Runtime::motley) {
      room = largest_sum_[s.ranks()] / each;
    } else {
      for (int i = 1; i <= s.pp; ++i) room += largest_sum_[i * each] - largest_sum_[i * each - 1];
    }
    return estimator_.state_bytes(0, layers, s) +
               (1 + c.fragmentation) * estimator_.activation_bytes(0, layers, s) >
           (room - c.context * s.pp) * (1 + 1e-12);
  }

 private:
  struct Layers {
    Seconds work = 0;           // of one micro-batch in all layers, each on its fastest type
    std::vector<double> speed;  // [type]
    std::vector<int> fastest;   // types, the fastest first
    double least_share = 1;     // slowest / fastest
    double parameters = 0;      // of a rank that had all layers
  };

  Seconds tail(const Strategy& s, const Layers& layers) const {
    return estimator_.update_time(layers.parameters / s.pp, s, estimator_.fastest_memory()) +
           estimator_.calibration().step;
  }

  // Pipeline depth, replicas and ZeRO change nothing of it.
  const Layers& layers_of(const Strategy& s) {
    auto [it, fresh] =
        known_.try_emplace({s.tp, s.cp, s.ep, s.micro_batch, s.recompute, s.runtime});
    Layers& layers = it->second;
    if (!fresh) return layers;
    const int types = static_cast<int>(counts_.size());
    layers.speed.assign(types, 0.0);
    const Mesh::Ring ring = estimator_.best_ring(s.tp), context = estimator_.best_ring(s.cp);
    std::vector<std::vector<LayerTimes::Time>> times;
    for (int type = 0; type < types; ++type)
      times.push_back(estimator_.layer_times({type}, s, ring, context));
    for (int l = 0; l < estimator_.model().size(); ++l) {
      Seconds least = std::numeric_limits<double>::infinity();
      for (int type = 0; type < types; ++type)
        least = std::min(least, times[type][l].forward + times[type][l].backward);
      layers.work += least;
      for (int type = 0; type < types; ++type)
        if (least > 0)
          layers.speed[type] = std::max(layers.speed[type],
                                        least / (times[type][l].forward + times[type][l].backward));
    }
    layers.parameters = estimator_.parameters(0, estimator_.model().size(), s);
    layers.fastest.resize(types);
    std::iota(layers.fastest.begin(), layers.fastest.end(), 0);
    std::stable_sort(layers.fastest.begin(), layers.fastest.end(),
                     [&](int x, int y) { return layers.speed[x] > layers.speed[y]; });
    layers.least_share = layers.speed[layers.fastest.back()] / layers.speed[layers.fastest[0]];
    return layers;
  }

  const Estimator& estimator_;
  const SearchOptions& options_;
  const std::vector<int> counts_;           // [type] devices
  std::vector<Bytes> largest_sum_ = {0.0};  // [n] memory of the n largest devices
  std::map<std::tuple<int, int, int, int, Recompute, Runtime>, Layers> known_;
};

// The same once devices are placed and micro-batches given: replica by replica, with the rings it
// has.
Seconds placed_bound(const Estimator& estimator, const Strategy& s, const Mesh& mesh) {
  const int layers = estimator.model().size();
  std::map<Kind, std::vector<Seconds>> kinds;  // times of the layers
  std::map<std::map<Kind, int>, std::pair<Seconds, Seconds>> known;
  std::set<std::pair<int, int>> seen;
  Seconds bound = 0;
  for (int r = 0; r < s.dp; ++r) {
    if (!seen.insert({mesh.like[r], s.micro_batches[r]}).second) continue;
    std::map<Kind, int> groups;  // of each kind, how many stages
    for (int stage = 0; stage < s.pp; ++stage) {
      const size_t g = static_cast<size_t>(stage) * s.dp + r;
      const Kind kind = kind_of(mesh, g);
      ++groups[kind];
      auto [row, fresh] = kinds.try_emplace(kind);
      if (fresh)
        for (const LayerTimes::Time& t : times_of(estimator, s, mesh, g))
          row->second.push_back(t.forward + t.backward);
    }
    auto [it, fresh] = known.try_emplace(groups);
    auto& [per_micro_batch, chain] = it->second;
    if (fresh) {
      std::map<Kind, double> most;
      for (int l = 0; l < layers; ++l) {
        Seconds least = std::numeric_limits<double>::infinity();
        for (const auto& [kind, n] : groups) least = std::min(least, kinds[kind][l]);
        chain += least;
        for (const auto& [kind, n] : groups)
          if (least > 0) most[kind] = std::max(most[kind], least / kinds[kind][l]);
      }
      double joint = 0;
      for (const auto& [kind, n] : groups) joint += n * most[kind];
      per_micro_batch = chain / joint;
    }
    const int count = s.micro_batches[r];
    bound = std::max(bound, s.interleave > 1 ? std::max(count * per_micro_batch, chain)
                                             : (count - 1) * per_micro_batch + chain);
  }
  return bound;
}

std::vector<int> divisors(int n) {
  std::vector<int> result;
  for (int d = 1; d <= n; ++d)
    if (n % d == 0) result.push_back(d);
  return result;
}

}  // namespace

SearchResult search(const Estimator& estimator, const SearchOptions& options) {
  const double start = now_s();
  const Model& model = estimator.model();
  const Cluster& cluster = estimator.cluster();
  const Fixed& fixed = options.fixed;
  const int devices = cluster.size();
  if (options.global_batch < 1)
    throw user_error("grid", "the global batch is {}; give at least 1", options.global_batch);
  SearchResult result;
  auto values = [](const std::optional<int>& one, std::vector<int> many) {
    return one ? std::vector<int>{*one} : many;
  };
  const std::vector<bool> block = blocks_of(model);
  const int blocks = static_cast<int>(std::count(block.begin(), block.end(), true));
  const int deepest = blocks > 0 ? blocks : model.size();
  std::vector<int> depths(std::min(deepest, devices));
  std::iota(depths.begin(), depths.end(), 1);
  int node = 1;
  const Nodes nodes = nodes_of(cluster);
  for (const auto& n : nodes.devices) node = std::max(node, static_cast<int>(n.size()));
  std::vector<int> tps;
  for (int tp : divisors(model.heads))
    if (tp <= 2 * node) tps.push_back(tp);
  const std::vector<Recompute> recomputes =
      fixed.recompute ? std::vector<Recompute>{*fixed.recompute} : options.recompute;
  const std::vector<int> fixed_stages =
      fixed.stages ? expand_stages(model, *fixed.stages) : std::vector<int>();

  // How many devices are left when those of one kind of node stay out.
  std::set<int> without;
  for (int kind = 0; kind < nodes.kinds; ++kind) {
    int left = devices;
    for (size_t n = 0; n < nodes.devices.size(); ++n)
      if (nodes.kind[n] == kind) left -= static_cast<int>(nodes.devices[n].size());
    without.insert(left);
  }

  std::vector<Option> open;
  for (int tp : values(fixed.tp, tps))
    for (int cp : values(fixed.cp, options.cp))
      for (int v : values(fixed.interleave, options.interleave))
        for (int pp : values(fixed.pp, depths)) {
          if (fixed.stages && static_cast<int>(fixed_stages.size()) != pp * v) continue;
          if (v > 1 && (pp == 1 || pp * v > deepest)) continue;
          const int room = devices / (tp * cp * pp);
          if (room < 1) continue;
          for (int mbs : values(fixed.micro_batch, divisors(options.global_batch))) {
            if (options.global_batch % mbs != 0) continue;
            std::set<int> dps;
            if (fixed.dp) {
              dps = {*fixed.dp};
            } else {
              const int most = std::min(room, options.global_batch / mbs);
              dps = {most};
              for (int left : without)
                if (left >= tp * cp * pp) dps.insert(std::min(most, left / (tp * cp * pp)));
            }
            for (int dp : dps) {
              if (dp > room || dp > options.global_batch / mbs) continue;
              if (!fixed.dp && !fixed.pp && !fixed.tp &&
                  dp * tp * cp * pp < options.least_used * devices)
                continue;
              for (int ep : values(fixed.ep, options.ep))
                for (int zero : values(fixed.zero, options.zero))
                  for (Recompute recompute : recomputes) {
                    if (ep > 1 &&
                        (model.experts % ep != 0 || model.experts == 0 || dp * cp % ep != 0))
                      continue;
                    if (zero > 0 && dp * cp == 1 && !fixed.zero) continue;
                    if (zero >= 2 && pp > 1 && options.runtime == Runtime::deepspeed) continue;
                    if (model.heads % tp != 0 || model.tokens % cp != 0) continue;
                    Option o;
                    o.pp = pp, o.dp = dp, o.tp = tp, o.cp = cp, o.ep = ep, o.micro_batch = mbs;
                    o.interleave = v, o.zero = zero, o.recompute = recompute;
                    open.push_back(o);
                  }
            }
          }
        }
  result.counters.enumerated = static_cast<int64_t>(open.size());
  if (open.empty()) {
    result.stop_reason = "exhausted";
    result.reason = fmt::format(
        "no degrees suit {} devices, {} heads, {} layers and a batch of {} with the fixed choices",
        devices, model.heads, model.size(), options.global_batch);
    return result;
  }
  FirstBound first_bound(estimator, options);
  // The least over the stages of ZeRO where those are taken in their order: of one that is bounded
  // nobody knows whether it fits.
  auto least = [&](const Option& o, auto bound) {
    Seconds seconds = bound(o.strategy(options.runtime));
    if (!options.least_zero) return seconds;
    Option other = o;
    for (int zero : values(fixed.zero, options.zero)) {
      other.zero = zero;
      seconds = std::min(seconds, bound(other.strategy(options.runtime)));
    }
    return seconds;
  };
  for (Option& o : open) o.bound = least(o, [&](const Strategy& s) { return first_bound(s); });
  std::stable_sort(open.begin(), open.end(),
                   [](const Option& a, const Option& b) { return a.bound < b.bound; });

  std::vector<Candidate>& ranked = result.ranked;
  auto cutoff = [&] {
    return static_cast<int>(ranked.size()) < options.keep ? std::numeric_limits<double>::infinity()
                                                          : ranked.back().estimate.step;
  };
  auto faster = [](const Candidate& a, const Candidate& b) {
    return a.estimate.step < b.estimate.step;
  };
  result.lower_bound = std::numeric_limits<double>::infinity();
  result.stop_reason = "exhausted";
  std::string tightest;
  std::map<std::tuple<int, int, int>, std::vector<std::pair<std::vector<int>, Mesh>>> meshes;
  Seconds lowest_open = std::numeric_limits<double>::infinity();
  std::optional<Strategy> fitting;  // before anything is placed, of ZeRO stage 0
  for (const Option& o : open) {
    if (o.bound >= cutoff()) {
      result.stop_reason = "bound";
      lowest_open = o.bound;
      break;
    }
    options.deadline.spend(1);
    if (options.deadline.over()) {
      result.stop_reason = "time limit";
      lowest_open = o.bound;
      break;
    }
    result.lower_bound = std::min(result.lower_bound, o.bound);
    const Strategy s = o.strategy(options.runtime);
    Strategy plain = s;
    plain.zero = 0;
    if (options.least_zero && fitting && *fitting == plain) continue;
    if (options.memory && !fixed.stages && first_bound.too_large(s)) {
      ++result.counters.infeasible;
      if (tightest.empty())
        tightest = fmt::format("{}: no layer assignment fits in memory", to_string(s));
      continue;
    }
    auto [slot, fresh] = meshes.try_emplace({s.pp, s.dp, s.tp * 4096 + s.cp});
    if (fresh) {
      std::vector<std::vector<int>> placements;
      if (fixed.devices)
        placements = {*fixed.devices};
      else
        placements = heuristic_placements(cluster, s.pp, s.dp, s.tp * s.cp);
      for (auto& placement : placements) {
        Strategy placed = s;
        placed.devices = placement;
        if (static_cast<int>(placement.size()) != s.ranks())
          throw user_error("grid", "fixed choice devices lists {}, pp*dp*cp*tp is {}",
                           placement.size(), s.ranks());
        placed.interleave = 2;  // so that the way back to the first stage is there too
        slot->second.push_back({std::move(placement), estimator.mesh(placed)});
      }
    }
    std::optional<Candidate> best;
    const Seconds tail = least(o, [&](const Strategy& of) { return first_bound.tail(of); });
    for (const auto& [placement, mesh] : slot->second) {
      Candidate c;
      c.strategy = s;
      c.strategy.devices = placement;
      if (!give_micro_batches(estimator, options.global_batch, mesh, &c.strategy)) {
        ++result.counters.infeasible;
        continue;
      }
      if (placed_bound(estimator, c.strategy, mesh) + tail >= cutoff()) {
        ++result.counters.bounded;
        fitting = plain;
        continue;
      }
      if (fixed.stages) {
        c.strategy.stages = fixed_stages;
        estimator.check(c.strategy);
      } else if (!assign(estimator, mesh, options.memory, &c.strategy, &result.counters)) {
        ++result.counters.infeasible;
        tightest = fmt::format("{}: no layer assignment fits in memory", to_string(c.strategy));
        continue;
      }
      if (estimator.lower_bound(c.strategy, mesh) >=
          std::min(cutoff(),
                   best ? best->estimate.step : std::numeric_limits<double>::infinity())) {
        ++result.counters.bounded;
        fitting = plain;
        continue;
      }
      c.estimate = estimator.estimate(c.strategy, mesh);
      ++result.counters.estimated;
      if (options.memory && !c.estimate.fits) {
        ++result.counters.infeasible;
        tightest = fmt::format("{}: {}", to_string(c.strategy), c.estimate.reason);
        continue;
      }
      if (!best || c.estimate.step < best->estimate.step) best = std::move(c);
    }
    if (best) fitting = plain;
    if (!best || best->estimate.step >= cutoff()) continue;
    ranked.insert(std::upper_bound(ranked.begin(), ranked.end(), *best, faster), *best);
    if (static_cast<int>(ranked.size()) > options.keep) ranked.pop_back();
  }
  result.lower_bound = std::min(result.lower_bound, lowest_open);
  if (ranked.empty()) {
    result.reason = result.stop_reason == "time limit" ? "time ran out before a plan was found"
                    : tightest.empty()                 ? "no strategy suits the batch"
                                                       : tightest;
  } else if (!options.heuristic_only) {
    const bool mixed = nodes.kinds > 1;
    constexpr size_t kFinalists = 3;
    for (size_t i = 0; i < std::min(kFinalists, ranked.size()); ++i) {
      Candidate& c = ranked[i];
      if (options.deadline.over()) break;
      if (!fixed.devices && !fixed.stages) {
        if (mixed && options.anneal_steps > 0)
          c = anneal_placement(estimator, c, options.memory, options.seed, options.anneal_steps,
                               &result.counters);
        if (const int64_t limit =
                options.enumerate_limit * kFewDevices / std::max(kFewDevices, devices);
            limit > 0) {
          Candidate found = c;
          enumerate_placements(
              cluster, c.strategy.pp, c.strategy.dp, c.strategy.tp * c.strategy.cp, limit,
              [&](const std::vector<int>& placement) {
                Candidate next = c;
                next.strategy.devices = placement;
                const Mesh mesh = estimator.mesh(next.strategy);
                if (!give_micro_batches(estimator, options.global_batch, mesh, &next.strategy) ||
                    placed_bound(estimator, next.strategy, mesh) + first_bound.tail(c.strategy) >=
                        found.estimate.step ||
                    !assign(estimator, mesh, options.memory, &next.strategy, &result.counters) ||
                    estimator.lower_bound(next.strategy, mesh) >= found.estimate.step)
                  return;
                next.estimate = estimator.estimate(next.strategy, mesh);
                ++result.counters.estimated;
                if ((next.estimate.fits || !options.memory) &&
                    next.estimate.step < found.estimate.step)
                  found = std::move(next);
              });
          c = std::move(found);
        }
      }
      if (!fixed.stages) polish(estimator, options.memory, &c, &result.counters);
    }
    std::stable_sort(ranked.begin(), ranked.end(), faster);
  }
  result.seconds = now_s() - start;
  return result;
}

Strategy complete(const Estimator& estimator, const SearchOptions& options) {
  const Fixed& f = options.fixed;
  Strategy s;
  s.pp = f.pp.value_or(1), s.dp = f.dp.value_or(1), s.tp = f.tp.value_or(1);
  s.cp = f.cp.value_or(1), s.ep = f.ep.value_or(1), s.micro_batch = f.micro_batch.value_or(1);
  s.interleave = f.interleave.value_or(1), s.zero = f.zero.value_or(0);
  s.recompute = f.recompute.value_or(Recompute::none);
  s.runtime = options.runtime;
  if (f.devices) {
    s.devices = *f.devices;
  } else {
    s.devices.resize(s.ranks());
    std::iota(s.devices.begin(), s.devices.end(), 0);
  }
  s.micro_batches.assign(s.dp, 1);
  s.stages = f.stages ? expand_stages(estimator.model(), *f.stages)
                      : uniform_layers(blocks_of(estimator.model()), s.pp * s.interleave);
  Strategy checked = s;
  if (s.interleave > 1) checked.micro_batches.assign(s.dp, s.pp);
  estimator.check(checked);
  const Mesh mesh = estimator.mesh(s);
  if (!give_micro_batches(estimator, options.global_batch, mesh, &s))
    throw user_error("grid", "a batch of {} cannot be cut in micro-batches of {} for {} replicas",
                     options.global_batch, s.micro_batch, s.dp);
  if (!f.stages) assign(estimator, mesh, false, &s, nullptr);
  return s;
}

std::vector<Baseline> baselines(const Estimator& estimator, const SearchOptions& options,
                                const Candidate& best) {
  std::vector<Baseline> result;
  const Model& model = estimator.model();
  const std::vector<bool> block = blocks_of(model);
  auto add = [&](const std::string& name, std::optional<Candidate> found, std::string reason) {
    Baseline b;
    b.name = name;
    b.feasible = found && (found->estimate.fits || !options.memory);
    b.reason = found && !found->estimate.fits ? found->estimate.reason : std::move(reason);
    if (found) b.candidate = std::move(*found);
    result.push_back(std::move(b));
  };
  auto price = [&](const Strategy& s) { return Candidate{s, estimator.estimate(s)}; };

  // Megatron's heuristic.
  const Nodes nodes = nodes_of(estimator.cluster());
  size_t node = std::numeric_limits<size_t>::max();
  for (const auto& n : nodes.devices) node = std::min(node, n.size());
  const int devices = estimator.cluster().size();
  std::optional<Candidate> megatron;
  std::vector<std::pair<int, int>> degrees;  // (tp, pp)
  for (int tp : divisors(devices))
    for (int pp : divisors(devices / tp))
      if (tp <= static_cast<int>(node) && model.heads % tp == 0 &&
          pp <= std::count(block.begin(), block.end(), true))
        degrees.push_back({tp, pp});
  std::stable_sort(degrees.begin(), degrees.end(), [](const auto& a, const auto& b) {
    return a.first * a.second < b.first * b.second;
  });
  for (size_t i = 0; i < degrees.size(); ++i) {
    const auto [tp, pp] = degrees[i];
    if (megatron && degrees[i - 1].first * degrees[i - 1].second < tp * pp) break;
    for (int mbs : divisors(options.global_batch)) {
      Strategy s;
      s.tp = tp, s.pp = pp, s.dp = devices / tp / pp, s.micro_batch = mbs;
      s.runtime = options.runtime;
      if (options.global_batch % (mbs * s.dp) != 0) continue;
      s.micro_batches.assign(s.dp, options.global_batch / mbs / s.dp);
      s.stages = uniform_layers(block, pp);
      s.devices.resize(s.ranks());
      std::iota(s.devices.begin(), s.devices.end(), 0);
      Candidate c = price(s);
      if ((c.estimate.fits || !options.memory) &&
          (!megatron || c.estimate.step < megatron->estimate.step))
        megatron = std::move(c);
    }
  }
  add("megatron", megatron, "no degrees with uniform layers fit in memory");

  std::optional<Candidate> random;
  Rng rng(options.seed);
  for (int trial = 0; trial < 50 && !degrees.empty(); ++trial) {
    const auto [tp, pp] = degrees[rng.below(static_cast<int64_t>(degrees.size()))];
    Strategy s;
    s.tp = tp, s.pp = pp, s.dp = devices / tp / pp, s.runtime = options.runtime;
    if (options.global_batch % s.dp != 0) continue;
    const std::vector<int> sizes = divisors(options.global_batch / s.dp);
    s.micro_batch = sizes[rng.below(static_cast<int64_t>(sizes.size()))];
    s.micro_batches.assign(s.dp, options.global_batch / s.dp / s.micro_batch);
    // A random set of cuts.
    std::vector<int> cuts(model.size() - 1);
    std::iota(cuts.begin(), cuts.end(), 1);
    for (size_t i = cuts.size(); i > 1; --i)
      std::swap(cuts[i - 1], cuts[rng.below(static_cast<int64_t>(i))]);
    cuts.resize(pp - 1);
    std::sort(cuts.begin(), cuts.end());
    cuts.push_back(model.size());
    for (int i = 0, at = 0; i < pp; at = cuts[i], ++i) s.stages.push_back(cuts[i] - at);
    s.devices.resize(s.ranks());
    std::iota(s.devices.begin(), s.devices.end(), 0);
    for (size_t i = s.devices.size(); i > 1; --i)
      std::swap(s.devices[i - 1], s.devices[rng.below(static_cast<int64_t>(i))]);
    Candidate c = price(s);
    if ((c.estimate.fits || !options.memory) &&
        (!random || c.estimate.step < random->estimate.step))
      random = std::move(c);
  }
  add("random", random, "none of 50 random strategies fits in memory");

  std::vector<double> parameters;
  for (int l = 0; l < model.size(); ++l)
    parameters.push_back(estimator.parameters(l, l + 1, best.strategy));
  const int ranges = best.strategy.pp * best.strategy.interleave;
  Strategy s = best.strategy;
  s.stages = uniform_layers(block, ranges);
  add("uniform layers", price(s), "");
  s.stages = uniform_parameters(parameters, ranges);
  add("uniform parameters", price(s), "");
  return result;
}

}  // namespace motley::grid

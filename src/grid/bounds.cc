#include "grid/bounds.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

namespace motley::grid {

FirstBound::FirstBound(const Estimator& estimator, const SearchOptions& options)
    : estimator_(estimator), options_(options), counts_(estimator.cluster().count_by_type()) {
  std::vector<Bytes> memory;
  for (const Device& d : estimator.cluster().devices)
    memory.push_back(estimator.cluster().types[d.type].memory);
  std::sort(memory.rbegin(), memory.rend());
  for (Bytes m : memory) largest_sum_.push_back(largest_sum_.back() + m);
}

Seconds FirstBound::operator()(const Strategy& s) {
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
                            estimator_.reduced_at_end(s) * estimator_.best_data_seconds_per_byte(s);
  return std::max(total * per_micro_batch + (options_.fixed.devices ? 0 : gradients),
                  (s.interleave > 1 ? 0 : (total - s.dp) * per_micro_batch) + layers.work) +
         tail(s, layers);
}

bool FirstBound::too_large(const Strategy& s) const {
  const int layers = estimator_.model().size(), each = s.dp * s.cp * s.tp;
  const Calibration& c = estimator_.calibration();
  Bytes room = 0;
  if (s.zero > 0 && s.runtime == Runtime::motley) {
    room = largest_sum_[s.ranks()] / each;
  } else {
    for (int i = 1; i <= s.pp; ++i) room += largest_sum_[i * each] - largest_sum_[i * each - 1];
  }
  const Bytes held = (1 + c.fragmentation) * estimator_.activation_bytes(0, layers, s);
  return estimator_.state_bytes(0, layers, s) + held >
         (room - estimator_.context_bytes(s) * s.pp) * (1 + 1e-12);
}

Seconds FirstBound::tail(const Strategy& s, const Layers& layers) const {
  return estimator_.update_time(layers.parameters / s.pp, s, estimator_.fastest_memory()) +
         estimator_.host_step();
}

const FirstBound::Layers& FirstBound::layers_of(const Strategy& s) {
  auto [it, fresh] = known_.try_emplace(key_of(s));
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

Seconds placed_bound(const Estimator& estimator, const Strategy& s, const Mesh& mesh) {
  const int layers = estimator.model().size();
  std::map<Mesh::Kind, std::vector<Seconds>> kinds;  // times of the layers
  std::map<std::map<Mesh::Kind, int>, std::pair<Seconds, Seconds>> known;
  std::set<std::pair<int, int>> seen;
  Seconds bound = 0;
  for (int r = 0; r < s.dp; ++r) {
    if (!seen.insert({mesh.like[r], s.micro_batches[r]}).second) continue;
    std::map<Mesh::Kind, int> groups;  // of each kind, how many stages
    for (int stage = 0; stage < s.pp; ++stage) {
      const size_t g = static_cast<size_t>(stage) * s.dp + r;
      const Mesh::Kind kind = mesh.kind(g);
      ++groups[kind];
      auto [row, fresh] = kinds.try_emplace(kind);
      if (fresh) row->second = estimator.group_times(s, mesh, g);
    }
    auto [it, fresh] = known.try_emplace(groups);
    auto& [per_micro_batch, chain] = it->second;
    if (fresh) {
      std::map<Mesh::Kind, double> most;
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

}  // namespace motley::grid

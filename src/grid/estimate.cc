#include "grid/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "cluster/part.h"
#include "core/error.h"

namespace motley::grid {

Estimator::Estimator(const Model& model, const Cluster& cluster, const Calibration& calibration,
                     const LayerTimes& times)
    : model_(model),
      cluster_(cluster),
      calibration_(calibration),
      times_(times),
      topology_(cluster) {
  for (const DeviceType& type : cluster.types) {
    auto known = calibration.types.find(type.name);
    if (known == calibration.types.end())
      throw user_error("grid", "{}: the calibration has no rates for device type {}", cluster.name,
                       type.name);
    rates_.push_back(known->second);
  }
  std::vector<LinkRates> of_group;
  for (const Group& group : cluster.groups) {
    const auto known = calibration.links.find(group.link.type);
    of_group.push_back(known == calibration.links.end() ? LinkRates{} : known->second);
    start_.push_back(of_group.back().start);
  }
  expert_bandwidth_ = std::numeric_limits<double>::infinity();
  for (const net::NetworkLink& link : topology_.links()) {
    ring_bandwidth_.push_back(link.bandwidth);
    message_bandwidth_.push_back(link.bandwidth * of_group[link.group].message);
    fastest_ring_ = std::max(fastest_ring_, link.bandwidth);
    expert_bandwidth_ = std::min(expert_bandwidth_, link.bandwidth);
  }
  // Channels of direct links leave a device by all of them.
  BytesPerSecond widest = 0;
  for (const Group& group : cluster.groups) {
    std::vector<BytesPerSecond> sums(group.device_count, 0);
    for (const DirectLink& d : group.direct)
      for (int end : {d.a, d.b}) widest = std::max(widest, sums[end] += d.links * d.bandwidth);
  }
  fastest_ring_ += widest;
  for (int l = 0; l < model.size(); ++l) {
    int first = times.empty() ? 0 : l;  // measured layers are each their own
    for (; first < l; ++first) {
      Layer other = model.layers[first];
      other.name = model.layers[l].name;
      if (first_like_[first] == first && other == model.layers[l]) break;
    }
    first_like_.push_back(first);
  }
  for (GroupId id : machines_of(cluster)) {
    const Group& group = cluster.groups[id.index];
    const bool first = widest_port_ == 0;
    smallest_node_ = first ? group.device_count : std::min(smallest_node_, group.device_count);
    largest_node_ = std::max(largest_node_, group.device_count);
    widest_port_ =
        std::max(widest_port_, topology_.bandwidth_into(group.first_device, group.device_count));
  }
  even_nodes_ = smallest_node_ == largest_node_;
}

void Estimator::check(const Strategy& s) const {
  auto positive = [](const char* name, int value) {
    if (value < 1) throw user_error("grid", "strategy: {} is {}; give at least 1", name, value);
  };
  positive("pp", s.pp), positive("dp", s.dp), positive("tp", s.tp), positive("cp", s.cp);
  positive("ep", s.ep), positive("mbs", s.micro_batch), positive("interleave", s.interleave);
  if (s.zero < 0 || s.zero > 3)
    throw user_error("grid", "strategy: zero is {}; give a stage from 0 to 3", s.zero);
  if (s.zero >= 2 && s.pp > 1 && s.runtime == Runtime::deepspeed)
    throw user_error("grid", "strategy: zero={} with pp={}: DeepSpeed pipelines take zero 0 or 1",
                     s.zero, s.pp);
  if (model_.heads % s.tp != 0)
    throw user_error("grid", "strategy: tp={} does not divide the {} heads of {}", s.tp,
                     model_.heads, model_.name);
  if (model_.tokens % s.cp != 0)
    throw user_error("grid", "strategy: cp={} does not divide the {} tokens of {}", s.cp,
                     model_.tokens, model_.name);
  if (s.ep > 1 && (model_.experts % s.ep != 0 || model_.experts == 0 || s.dp * s.cp % s.ep != 0))
    throw user_error("grid", "strategy: ep={} must divide the {} experts of {} and dp*cp={}", s.ep,
                     model_.experts, model_.name, s.dp * s.cp);
  if (static_cast<int>(s.stages.size()) != s.pp * s.interleave)
    throw user_error("grid", "strategy: layers lists {} stages; pp={} and interleave={} need {}",
                     s.stages.size(), s.pp, s.interleave, s.pp * s.interleave);
  int layers = 0;
  for (int n : s.stages) {
    positive("layers of a stage", n);
    layers += n;
  }
  if (layers != model_.size())
    throw user_error("grid", "strategy: layers sum to {}; {} has {}", layers, model_.name,
                     model_.size());
  if (static_cast<int>(s.micro_batches.size()) != s.dp)
    throw user_error("grid", "strategy: micro-batches are given for {} replicas, dp is {}",
                     s.micro_batches.size(), s.dp);
  for (int m : s.micro_batches) {
    positive("micro-batches of a replica", m);
    if (s.interleave > 1 && m % s.pp != 0)
      throw user_error("grid",
                       "strategy: interleave={} needs micro-batches ({}) divisible by pp={}",
                       s.interleave, m, s.pp);
  }
  if (static_cast<int>(s.devices.size()) != s.ranks())
    throw user_error("grid", "strategy: {} devices are placed, pp*dp*cp*tp is {}", s.devices.size(),
                     s.ranks());
  std::vector<bool> used(cluster_.size(), false);
  for (int d : s.devices) {
    if (d < 0 || d >= cluster_.size())
      throw user_error("grid", "strategy: device {} does not exist; {} has {}", d, cluster_.name,
                       cluster_.size());
    if (used[d]) throw user_error("grid", "strategy: device {} is placed twice", d);
    used[d] = true;
  }
}

Mesh::Ring Estimator::best_ring(int size) const {
  return {size, 2.0 * (size - 1) / size / fastest_ring_, 0};
}

double Estimator::best_data_seconds_per_byte(const Strategy& s) const {
  const int size = s.dp * s.cp;
  if (size < 2) return 0;
  const double best = best_ring(size).seconds_per_byte;
  const bool inside = even_nodes_ && largest_node_ % (s.tp * s.cp) == 0;
  const int members = inside ? largest_node_ / s.tp : largest_node_;  // of a ring, in a node
  if (size <= members) return best;
  return std::max(best, 2.0 * (size - 1) / size * (inside ? s.tp : 1) / widest_port_);
}

Seconds Estimator::host_step() const {
  Seconds least = std::numeric_limits<double>::infinity();
  for (const Rates& rates : rates_) least = std::min(least, rates.step);
  return least;
}

BytesPerSecond Estimator::fastest_memory() const {
  BytesPerSecond fastest = 0;
  for (const Rates& rates : rates_) fastest = std::max(fastest, rates.memory);
  return fastest;
}

std::vector<LayerTimes::Time> Estimator::layer_times(const std::vector<int>& types,
                                                     const Strategy& s, const Mesh::Ring& tensor,
                                                     const Mesh::Ring& context) const {
  std::vector<LayerTimes::Time> times(model_.layers.size());
  for (int l = 0; l < model_.size(); ++l) {
    if (first_like_[l] < l) {
      times[l] = times[first_like_[l]];
      continue;
    }
    for (int type : types) {
      const LayerTimes::Time time = layer_time(l, type, s, tensor, context);
      times[l].forward = std::max(times[l].forward, time.forward);
      times[l].backward = std::max(times[l].backward, time.backward);
    }
  }
  return times;
}

std::vector<Seconds> Estimator::group_times(const Strategy& s, const Mesh& mesh,
                                            size_t group) const {
  std::vector<Seconds> seconds;
  for (const LayerTimes::Time& t :
       layer_times(mesh.types_of(group), s, mesh.tensor[group], mesh.context[group]))
    seconds.push_back(t.forward + t.backward);
  return seconds;
}

Seconds Estimator::alone(const Layer& layer, const Rates& rates, double samples) const {
  const Bytes weights = (layer.parameters + layer.parameters_whole + layer.expert_parameters) *
                        model_.precision.weight;
  return samples * layer.flops / rates.flops +
         (samples * (layer.traffic + layer.traffic_whole) + weights) / rates.memory;
}

LayerTimes::Time Estimator::layer_time(int index, int type, const Strategy& s,
                                       const Mesh::Ring& tensor, const Mesh::Ring& context) const {
  const Layer& layer = model_.layers[index];
  const double b = static_cast<double>(s.micro_batch) / s.cp;
  LayerTimes::Time time;
  const bool measured = s.cp == 1 && s.ep == 1 && !times_.empty() &&
                        times_.find(cluster_.types[type].name, s.tp, s.micro_batch, index, &time);
  const Rates& rates = rates_[type];
  auto device = [&](Flops flops, Bytes cut, Bytes whole) {
    return b * flops / s.tp / rates.flops + b * (cut / s.tp + whole) / rates.memory;
  };
  auto pass = [&](Seconds host, Seconds work) {
    const double k = calibration_.overlap_power;
    const double high = std::max(host, work), low = std::min(host, work);
    if (high <= 0) return 0.0;
    const double ratio = low / high;
    if (k == 4) return high * std::sqrt(std::sqrt(1 + ratio * ratio * ratio * ratio));
    return high * std::pow(1 + std::pow(ratio, k), 1 / k);
  };
  const Bytes activation = model_.precision.activation;
  Seconds communication = 0;
  double collectives = 0;
  if (s.tp > 1 && layer.all_reduces > 0) {
    communication += layer.all_reduces *
                     (b * layer.output * activation * tensor.seconds_per_byte + tensor.latency);
    collectives += layer.all_reduces;
  }
  if (s.cp > 1 && layer.key_values > 0) {  // an all-gather, half of an all-reduce
    communication += (b * s.cp * layer.key_values / s.tp * activation * context.seconds_per_byte +
                      context.latency) /
                     2;
    collectives += 1;
  }
  if (s.ep > 1 && layer.routed > 0) {
    // Two all-to-alls among ep ranks of the data-parallel group; each rank keeps 1/ep.
    const double ratio = (s.ep - 1.0) / s.ep;
    communication += 2 * ratio * b * layer.routed / s.tp * activation / expert_bandwidth_;
    collectives += 2;
  }
  const bool fused = s.micro_batch * (model_.heads / s.tp) % 4 == 0;
  const double kernels = layer.kernels + (fused ? 0 : layer.unfused);
  Seconds host = kernels * rates.launch + collectives * rates.collective;
  Seconds host_back = 2 * host - collectives * rates.collective;
  if (!measured) {
    const Bytes weights =
        (layer.parameters / s.tp + layer.parameters_whole + layer.expert_parameters / s.tp / s.ep) *
        model_.precision.weight;
    const Seconds work =
        device(layer.flops, layer.traffic, layer.traffic_whole) + weights / rates.memory;
    time = {work + communication, 2 * work + communication};
    if (const LayerProfile* profile = times_.profile(cluster_.types[type].name, index)) {
      const Slower slower =
          slower_than(layer.kernels * rates.launch, alone(layer, rates, profile->micro_batch),
                      profile->forward, calibration_.overlap_power);
      host *= slower.host, host_back *= slower.host;
      const Seconds more = (slower.device - 1) * work;
      time.forward += more, time.backward += 2 * more;
    }
  }
  time.forward = pass(host, time.forward);
  time.backward = pass(host_back, time.backward);
  if (s.recompute == Recompute::full && layer.block) {
    time.backward += time.forward;
  } else if (s.recompute == Recompute::selective) {
    time.backward += device(layer.core_flops, layer.core_traffic, 0);
  }
  return time;
}

Seconds Estimator::message_time(int layer_before, int boundary, int replica, const Strategy& s,
                                const Mesh& mesh, bool gradient) const {
  const Bytes bytes =
      model_.layers[layer_before].output * s.micro_batch / s.cp * model_.precision.activation;
  const size_t at = static_cast<size_t>(boundary) * s.dp + replica;
  const bool cut = s.tp > 1 && s.runtime != Runtime::megatron;
  const Bytes each = (cut ? bytes / s.tp : bytes) + (gradient ? 0 : model_.message_extra);
  Seconds time = calibration_.message_launch + mesh.message_latency[at] +
                 each * mesh.message_seconds_per_byte[at];
  if (cut) {
    const int receiver = (gradient ? boundary : (boundary + 1) % s.pp) * s.dp + replica;
    const Mesh::Ring& ring = mesh.tensor[receiver];
    time += (bytes * ring.seconds_per_byte + ring.latency) / 2;
  }
  return time;
}

double Estimator::parameters(int first, int last, const Strategy& s) const {
  double sum = 0;
  for (int l = first; l < last; ++l) {
    const Layer& layer = model_.layers[l];
    sum += layer.parameters / s.tp + layer.parameters_whole + layer.expert_parameters / s.tp / s.ep;
    if (layer.tied >= 0 && (layer.tied < first || layer.tied >= last))
      sum += model_.layers[layer.tied].parameters / s.tp;
  }
  return sum;
}

Bytes Estimator::memory_limit(int stage, const Strategy& s, const Mesh& mesh) const {
  if (s.zero == 0 || s.runtime != Runtime::motley) return mesh.memory[stage];
  const Precision& p = model_.precision;
  const double divided =
      p.optimizer + (s.zero >= 2 ? p.gradient + p.reduce_buffer : 0) + (s.zero >= 3 ? p.weight : 0);
  const Bytes taken_over = parameters(0, model_.size(), s) / s.pp * divided / (s.dp * s.cp);
  return std::min(mesh.mean_memory[stage], mesh.memory[stage] + taken_over);
}

Bytes Estimator::state_bytes(int first, int last, const Strategy& s) const {
  const Precision& p = model_.precision;
  const double replicas = static_cast<double>(s.dp) * s.cp;
  const double each = p.weight / (s.zero >= 3 ? replicas : 1) +
                      (p.gradient + p.reduce_buffer) / (s.zero >= 2 ? replicas : 1) +
                      p.optimizer / (s.zero >= 1 ? replicas : 1);
  return parameters(first, last, s) * each;
}

Bytes Estimator::activation_bytes(int first, int last, const Strategy& s) const {
  Bytes sum = 0;
  for (int l = first; l < last; ++l) {
    const Layer& layer = model_.layers[l];
    if (s.recompute == Recompute::full && layer.block) {
      sum += layer.output * model_.precision.activation;
      continue;
    }
    const Bytes core = s.recompute == Recompute::selective ? layer.core_saved : 0;
    sum += (layer.saved - core) / s.tp + layer.saved_whole;
  }
  return sum * s.micro_batch / s.cp;
}

Bytes Estimator::transient_bytes(int first, int last, const Strategy& s) const {
  if (s.recompute == Recompute::none) return 0;
  Bytes most = 0;
  for (int l = first; l < last; ++l) {
    const Layer& layer = model_.layers[l];
    if (s.recompute == Recompute::full) {
      if (layer.block) most = std::max(most, layer.saved / s.tp + layer.saved_whole);
    } else {
      most = std::max(most, layer.core_saved / s.tp);
    }
  }
  // With gradients of half as many bytes, which Megatron's calibration has elsewhere.
  const double whole = s.runtime == Runtime::motley ? 1.5 + calibration_.fragmentation : 1;
  return whole * most * s.micro_batch / s.cp;
}

double Estimator::in_flight(int range, const Strategy& s) const {
  const int stage = range % s.pp;
  const int m = *std::max_element(s.micro_batches.begin(), s.micro_batches.end());
  if (s.interleave == 1) return std::min(m, s.pp - stage);
  // Launched before the first backward, over all the stage's ranges (schedule.h).
  const int total = m * s.interleave;
  const int warm =
      m == s.pp ? total : std::min(total, (s.pp - stage - 1) * 2 + (s.interleave - 1) * s.pp + 1);
  return static_cast<double>(warm) / s.interleave;
}

namespace {

// motley's own runtime reduces divided gradients in every backward pass: they are whole in one
// only.
bool reduces_in_passes(const Strategy& s) { return s.zero >= 2 && s.runtime == Runtime::motley; }

}  // namespace

Bytes Estimator::reduced_at_end(const Strategy& s) const {
  const Precision& p = model_.precision;
  // ZeRO splits the all-reduce in a reduce-scatter of gradients and an all-gather of weights.
  if (s.zero == 0) return p.reduced;
  if (reduces_in_passes(s)) return s.zero == 2 ? p.weight / 2 : 0;
  return s.zero <= 2 ? (p.reduced + p.weight) / 2 : p.reduced / 2;
}

Seconds Estimator::update_time(double parameters, const Strategy& s, BytesPerSecond memory) const {
  const Precision& p = model_.precision;
  const double replicas = s.zero >= 1 ? static_cast<double>(s.dp) * s.cp : 1;
  return calibration_.optimizer_passes * parameters * (p.weight + p.gradient + p.optimizer) /
         replicas / memory;
}

Estimate Estimator::estimate(const Strategy& s, const Mesh& mesh) const {
  return run(s, mesh, false);
}

Seconds Estimator::lower_bound(const Strategy& s, const Mesh& mesh) const {
  return run(s, mesh, true).step;
}

std::vector<Seconds> Estimator::finish(const Strategy& s, const Mesh& mesh, bool bound,
                                       const std::vector<int>& first,
                                       const std::vector<double>& weights) const {
  const int ranges = s.pp * s.interleave;
  const Precision& precision = model_.precision;
  // Layer times by what they depend on: types and rings of the group.
  struct Key {
    int mix;
    double tensor, tensor_latency, context, context_latency;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, std::vector<LayerTimes::Time>> cumulative;
  auto times_of = [&](int group) -> const std::vector<LayerTimes::Time>& {
    const Mesh::Ring &t = mesh.tensor[group], &c = mesh.context[group];
    auto [it, fresh] = cumulative.try_emplace(
        Key{mesh.mix[group], t.seconds_per_byte, t.latency, c.seconds_per_byte, c.latency});
    if (fresh) {
      const std::vector<LayerTimes::Time> each = layer_times(mesh.types_of(group), s, t, c);
      it->second.resize(model_.size() + 1);
      for (int l = 0; l < model_.size(); ++l) {
        it->second[l + 1].forward = it->second[l].forward + each[l].forward;
        it->second[l + 1].backward = it->second[l].backward + each[l].backward;
      }
    }
    return it->second;
  };

  std::vector<Seconds> ready(s.pp, 0.0);
  std::set<std::pair<int, int>> seen;  // alike, with as many micro-batches
  for (int replica = 0; replica < s.dp; ++replica) {
    if (!seen.insert({mesh.like[replica], s.micro_batches[replica]}).second) continue;
    Pipeline pipeline;
    pipeline.forward.resize(ranges);
    pipeline.backward.resize(ranges);
    for (int r = 0; r < ranges; ++r) {
      const int group = (r % s.pp) * s.dp + replica;
      const auto& sums = times_of(group);
      pipeline.forward[r] = sums[first[r + 1]].forward - sums[first[r]].forward;
      pipeline.backward[r] = sums[first[r + 1]].backward - sums[first[r]].backward;
      if (s.zero == 3) {  // weights are gathered for each pass, half of an all-reduce
        const Mesh::Ring& ring = mesh.data[r % s.pp];
        const Seconds gather =
            (weights[r] * precision.weight * ring.seconds_per_byte + ring.latency) / 2;
        const bool again = s.recompute == Recompute::full && s.runtime == Runtime::motley;
        pipeline.forward[r] += gather;
        pipeline.backward[r] += again ? 2 * gather : gather;
      }
      if (reduces_in_passes(s)) {  // half of an all-reduce, which nothing hides
        const Mesh::Ring& ring = mesh.data[r % s.pp];
        pipeline.backward[r] +=
            (weights[r] * precision.reduced * ring.seconds_per_byte + ring.latency) / 2;
      }
      if (r + 1 < ranges) {
        for (bool gradient : {false, true})
          (gradient ? pipeline.gradient : pipeline.activation)
              .push_back(message_time(first[r + 1] - 1, r % s.pp, replica, s, mesh, gradient));
      }
    }
    const int m = s.micro_batches[replica];
    const std::vector<Seconds> done = bound ? finish_bounds(pipeline, s.pp, m, s.runtime)
                                      : s.interleave > 1
                                          ? simulate_interleaved(pipeline, s.pp, m, s.runtime)
                                          : simulate_1f1b(pipeline, m, s.runtime);
    for (int stage = 0; stage < s.pp; ++stage) ready[stage] = std::max(ready[stage], done[stage]);
  }
  return ready;
}

Estimate Estimator::run(const Strategy& s, const Mesh& mesh, bool bound) const {
  MOTLEY_CHECK(mesh.pp == s.pp && mesh.dp == s.dp && mesh.tp == s.tp && mesh.cp == s.cp);
  const int ranges = s.pp * s.interleave;
  std::vector<int> first(ranges + 1, 0);
  for (int r = 0; r < ranges; ++r) first[r + 1] = first[r] + s.stages[r];
  const Precision& precision = model_.precision;

  std::vector<double> weights(ranges);  // parameters of each range
  for (int r = 0; r < ranges; ++r) weights[r] = parameters(first[r], first[r + 1], s);

  std::vector<Seconds> ready = finish(s, mesh, bound, first, weights);
  Estimate e;
  e.pipeline = *std::max_element(ready.begin(), ready.end());
  // Tied parameters that live in two stages.
  for (int l = 0; l < model_.size(); ++l) {
    const int owner = model_.layers[l].tied;
    if (owner < 0) continue;
    auto stage_of = [&](int layer) {
      return static_cast<int>(std::upper_bound(first.begin(), first.end(), layer) - first.begin() -
                              1) %
             s.pp;
    };
    const int a = stage_of(owner), b = stage_of(l);
    if (a == b) continue;
    const Bytes bytes = model_.layers[owner].parameters / s.tp * precision.weight;
    const Seconds time = bytes * mesh.tied.seconds_per_byte + mesh.tied.latency;
    const Seconds meet = std::max(ready[a], ready[b]) + time;
    ready[a] = ready[b] = meet;
    e.tied += time;
  }
  Seconds reduced = 0, update = 0, host_step = 0;
  const Bytes sent = reduced_at_end(s);
  for (int stage = 0; stage < s.pp; ++stage) {
    double held = 0;
    BytesPerSecond slow = std::numeric_limits<double>::infinity();
    for (int r = stage; r < ranges; r += s.pp) held += weights[r];
    for (int replica = 0; replica < s.dp; ++replica)
      for (int type : mesh.types_of(static_cast<size_t>(stage) * s.dp + replica)) {
        slow = std::min(slow, rates_[type].memory);
        host_step = std::max(host_step, rates_[type].step);
      }
    const Mesh::Ring& ring = mesh.data[stage];
    Seconds reduce = 0;
    if (ring.size > 1 && sent > 0)
      reduce = held * sent * ring.seconds_per_byte + ring.latency / (reduces_in_passes(s) ? 2 : 1);
    reduced = std::max(reduced, ready[stage] + reduce);
    update = std::max(update, update_time(held, s, slow));
  }
  e.gradients = reduced - e.pipeline - e.tied;
  e.optimizer = update + host_step;
  e.step = reduced + e.optimizer;
  if (bound) return e;

  for (int stage = 0; stage < s.pp; ++stage) {
    e.parts.push_back(memory_parts(stage, s));
    const Bytes used = e.parts.back().all();
    e.memory.push_back(used);
    if (const Bytes limit = memory_limit(stage, s, mesh); used > limit && e.fits) {
      e.fits = false;
      e.reason = fmt::format("stage {} needs {}, {} more than its device has", stage,
                             format_bytes(used), format_bytes(used - limit));
    }
  }
  return e;
}

Bytes Estimator::context_bytes(const Strategy& s, Bytes* buffers) const {
  const int communicators = kCommunicators + (s.tp > 1) + (s.dp * s.cp > 1) + (s.pp > 1);
  Bytes most = 0;
  for (const Rates& rates : rates_) {
    const Bytes kept = s.ranks() > 1 ? rates.channels * communicators * kChannelBytes : 0;
    if (rates.context + kept < most) continue;
    most = rates.context + kept;
    if (buffers) *buffers = kept;
  }
  return most;
}

MemoryParts Estimator::memory_parts(int stage, const Strategy& s) const {
  MemoryParts parts;
  parts.context = context_bytes(s, &parts.buffers);
  parts.context -= parts.buffers;
  std::vector<int> first(s.stages.size() + 1, 0);
  for (size_t r = 0; r < s.stages.size(); ++r) first[r + 1] = first[r] + s.stages[r];
  Bytes transient = 0;
  for (size_t r = stage; r < s.stages.size(); r += s.pp) {
    const Bytes activation = activation_bytes(first[r], first[r + 1], s);
    const Bytes held = in_flight(static_cast<int>(r), s) * activation;
    parts.state += state_bytes(first[r], first[r + 1], s);
    parts.activations += held;
    parts.slack += calibration_.fragmentation * held;
    transient = std::max(transient, transient_bytes(first[r], first[r + 1], s));
    // At the end of a backward pass its gradients are there in the place of its activations; where
    // parameters are divided too, those of a layer and its gradients, one after the other.
    const Precision& p = model_.precision;
    if (reduces_in_passes(s) && s.zero == 2)
      transient =
          std::max(transient, parameters(first[r], first[r + 1], s) * p.gradient - activation);
    for (int l = first[r]; s.zero == 3 && s.runtime == Runtime::motley && l < first[r + 1]; ++l)
      transient = std::max(transient, parameters(l, l + 1, s) * std::max(p.weight, p.gradient) -
                                          activation_bytes(l + 1, first[r + 1], s));
  }
  parts.transient = transient * alive_at_once(s);
  return parts;
}

}  // namespace motley::grid

#include "reference/grid.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/rng.h"
#include "grid/placement.h"

namespace motley::grid {

std::vector<int> uniform_parameters(const std::vector<double>& parameters, int stages) {
  const int layers = static_cast<int>(parameters.size());
  std::vector<double> sums(layers + 1, 0.0);
  for (int l = 0; l < layers; ++l) sums[l + 1] = sums[l] + parameters[l];
  std::vector<int> counts;
  int start = 0;
  for (int s = 0; s < stages; ++s) {
    int end = layers;
    if (s + 1 < stages) {
      const double goal = sums[layers] * (s + 1) / stages;
      end = start + 1;
      while (end + 1 <= layers - (stages - 1 - s) &&
             std::abs(sums[end + 1] - goal) <= std::abs(sums[end] - goal))
        ++end;
    }
    counts.push_back(end - start);
    start = end;
  }
  return counts;
}

Model transformer_model(const std::string& name, const TransformerShape& shape,
                        const Precision& precision) {
  if (shape.layers < 1 || shape.hidden < 1 || shape.heads < 1 || shape.seq < 1 || shape.vocab < 1)
    throw user_error("grid", "{}: layers, hidden, heads, seq and vocab must be positive", name);
  const double h = shape.hidden, s = static_cast<double>(shape.seq),
               v = static_cast<double>(shape.vocab), a = shape.heads;
  const double f = shape.ffn > 0 ? shape.ffn : 4 * h;
  const double e = precision.activation, scale = e / 2;
  const double used = shape.experts > 0 ? shape.top_k : 1;

  Model model;
  model.name = name;
  model.precision = precision;
  model.heads = shape.heads;
  model.experts = shape.experts;
  model.tokens = shape.seq;

  Layer embedding;
  embedding.name = "embedding";
  embedding.parameters = v * h;
  embedding.parameters_whole = s * h;
  embedding.traffic_whole = 6 * s * h * e;
  embedding.kernels = 4;
  embedding.output = s * h;
  embedding.saved_whole = s * h;
  model.layers.push_back(embedding);

  Layer block;
  block.flops = 2 * s * (4 * h * h + 2 * h * f * used) + 4 * s * s * h;
  block.traffic = (shape.score_passes * a * s * s + shape.hidden_passes * 2 / 3 * s * h) * e;
  block.traffic_whole = shape.hidden_passes / 3 * s * h * e;
  block.kernels = shape.kernels;
  block.unfused = shape.unfused;
  block.parameters = 4 * h * h + 3 * h;
  block.parameters_whole = 6 * h;
  const double feed_forward = 2 * h * f + f;
  if (shape.experts > 0) {
    block.expert_parameters = feed_forward * shape.experts;
    block.parameters_whole += h * shape.experts;
    block.routed = s * h * shape.top_k;
  } else {
    block.parameters += feed_forward;
  }
  block.output = s * h;
  block.key_values = 2 * s * h;
  block.saved = (24 * s * h + 5 * a * s * s) * scale;
  block.saved_whole = 10 * s * h * scale;
  block.core_flops = 4 * s * s * h;
  block.core_traffic = shape.score_passes * a * s * s * e;
  block.core_saved = 5 * a * s * s * scale;
  block.all_reduces = 2;
  block.block = true;
  for (int i = 0; i < shape.layers; ++i) {
    block.name = fmt::format("block {}", i);
    model.layers.push_back(block);
  }

  Layer head;
  head.name = "head";
  head.flops = 2 * s * h * v;
  head.traffic = 6 * s * v * 4;  // the loss works on 32-bit logits
  head.traffic_whole = 4 * s * h * e;
  head.kernels = 10;
  head.parameters_whole = 2 * h;
  if (shape.tied)
    head.tied = 0;
  else
    head.parameters = v * h;
  head.output = 1;
  head.saved = s * v * (4 + e);
  head.saved_whole = 2 * s * h * e;
  model.layers.push_back(head);
  return model;
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
                      : uniform_layers(estimator.model().blocks(), s.pp * s.interleave);
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
  const std::vector<bool> block = model.blocks();
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

// What users would run otherwise, each with the best of its own knobs:
//
//   ddp, fsdp          PyTorch's on all devices, with even batches
//   ...-by-speed       with batches in proportion to the devices' speeds
//   ...-fastest        with even batches, on the devices of the fastest type alone
//   megatron           tensor parallelism inside a machine, pipelines and replicas, even layers
//   megatron-fastest   on the devices of the fastest type alone
//
// The knobs of DDP and FSDP are micro-batches whose gradients add up, and recomputation; FSDP
// gathers parameters in every pass, those of the next layer while it computes one. Those of
// Megatron are its degrees, micro-batches, recomputation and optimizer state that replicas divide (ZeRO 1). Gradients are summed by the plain collectives,
// those of DDP during the last backward pass. The one whose plan is fastest on motley's runtime is a
// candidate, so that no plan is slower than any of them there.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "cluster/part.h"
#include "core/error.h"
#include "core/parallel.h"
#include "cost/overlap.h"
#include "grid/assign.h"
#include "grid/estimate.h"
#include "planner/compose.h"
#include "planner/engines.h"
#include "planner/grid_model.h"
#include "spmd/least_memory.h"

namespace motley::planner {

namespace {

constexpr int kLayers = 48;
// Strategies of Megatron that are composed, the fastest by formula first: so many, and more until
// one fits.
constexpr size_t kMegatron = 3, kMegatronTried = 8;
// Beside activations, in parts of them, for what the formulas do not count.
constexpr double kRoom[] = {0, 0.5, 1.5};

struct Rule {
  const char* name;
  const char* strategy;  // what programs are restricted to (program_plan.h); Megatron's: tensors
  bool pieces;           // parameters are gathered in every pass
  bool fastest;          // on the devices of the fastest type alone
  int early;             // the larger, the sooner it is planned: searches of FSDP take long
};
const Rule kRules[] = {{"ddp", "dp-ev", false, false, 1},
                       {"ddp-by-speed", "dp-cp", false, false, 1},
                       {"ddp-fastest", "dp-ev", false, true, 2},
                       {"fsdp", "zero", true, false, 0},
                       {"fsdp-by-speed", "zero-cp", true, false, 0},
                       {"fsdp-fastest", "zero", true, true, 1},
                       {"megatron", "tensor-parallel", false, false, 2},
                       {"megatron-fastest", "tensor-parallel", false, true, 3}};

bool even(const Cluster& cluster) {
  return std::all_of(cluster.types.begin(), cluster.types.end(),
                     [&](const DeviceType& type) { return type.flops == cluster.types[0].flops; });
}

// A plan of a rule, and its knobs; or why there is none.
struct Found {
  std::unique_ptr<Plan> plan;
  // Of its user's framework: gradients travel during the last micro-batch's backward pass.
  Seconds step = 0;
  std::string knobs, reason;
};

class Opponent {
 public:
  Opponent(const PlanOptions& options, const Cluster& cluster, std::shared_ptr<BatchStep> step,
           const Rule& rule, solver::OrderMemo* orders)
      : options_(options),
        orders_(orders),
        rule_(rule),
        cluster_(cluster),
        groups_(cluster_, /*planned=*/false),
        step_(std::move(step)) {
    options_.strategy = rule.strategy;
    options_.threads = 1;
    options_.step = step_;
  }

  Found run() {
    try {
      if (std::string(rule_.name).starts_with("megatron"))
        megatron();
      else
        data_parallel();
    } catch (const TimeIsUp&) {
      if (!best_.plan) best_.reason = kNoTime;
    }
    return std::move(best_);
  }

 private:
  // Few large micro-batches are faster than many small ones: the fewest that fit, without
  // recomputation and with.
  void data_parallel() {
    if (!holds_state()) return;
    std::vector<int64_t> counts;  // of micro-batches
    for (int64_t k = 1; options_.batch % k == 0 && options_.batch / k >= cluster_.size(); k *= 2)
      counts.push_back(k);
    if (counts.empty()) counts.push_back(1);
    size_t fewest = counts.size();
    for (const bool recompute : {false, true}) {
      if (recompute && (!options_.recompute || fewest == 0)) break;
      // By halving: if so many fit, so do more.
      size_t low = 0, high = counts.size();
      while (!recompute && low < high && !may_fit(counts[low])) ++low;
      Found found;
      for (bool first = true; low < high; first = false) {
        const size_t middle = first ? low : (low + high) / 2;
        if (Found at = attempt(counts[middle], recompute); at.plan) {
          found = std::move(at);
          high = middle;
        } else {
          best_.reason = at.reason;
          low = middle + 1;
        }
      }
      if (!recompute) fewest = high;
      keep(std::move(found));
    }
  }

  Bytes whole_state() const {
    Bytes state = 0;
    for (const Parameter& p : step_->graph().parameters)
      state += state_bytes(step_->graph(), p, options_.optimizer);
    return state;
  }

  // Parameters, gradients and optimizer state, whole on every device or divided among them.
  bool holds_state() {
    Bytes state = whole_state();
    if (rule_.pieces) state /= cluster_.size();
    for (const DeviceType& t : cluster_.types)
      if (options_.memory_limit && state > t.memory)
        best_.reason = fmt::format("{} lacks {}: state alone takes {} on every device", t.name,
                                   format_bytes(state - t.memory), format_bytes(state));
    return best_.reason.empty();
  }

  // Whether all devices together have room for their state, and for what a backward pass reads.
  bool may_fit(int64_t count) {
    if (!options_.memory_limit) return true;
    const Bytes state = whole_state();
    Bytes room = 0;
    for (int d = 0; d < cluster_.size(); ++d) room += cluster_.type_of(d).memory;
    const Bytes saved = spmd::least_memory(step_->graph(), options_.optimizer) - state,
                held = rule_.pieces ? state : cluster_.size() * state;
    const Bytes lack = held + saved / static_cast<double>(count) - room;
    if (lack > 0) best_.reason = fmt::format("all devices together lack {}", format_bytes(lack));
    return lack <= 0;
  }

  // As few blocks as it takes are computed again.
  Found attempt(int64_t count, bool recompute) {
    options_.limits.deadline.check();
    Found found = count == 1 ? in_one_pass(recompute) : in_passes(count, recompute);
    const int64_t samples = options_.batch / count;
    found.knobs = fmt::format("{} micro-batch{} of {}{}", count, count > 1 ? "es" : "", samples,
                              recompute ? ", selective recomputation" : "");
    return found;
  }

  Found in_one_pass(bool recompute) const {
    ProgramRequest request;
    request.model = options_.model;
    request.batch = options_.batch;
    request.strategy = rule_.strategy;
    request.baselines = false;
    request.alternation.optimizer = options_.optimizer;
    request.alternation.memory_limit = options_.memory_limit;
    request.alternation.recompute = recompute;
    request.alternation.limits = options_.limits;
    request.alternation.certify = false;
    request.alternation.orders = orders_;
    ProgramResult result = plan_program(step_, cluster_, request);
    Found found;
    found.reason = result.reason;
    if (!result.feasible) return found;
    found.plan = std::make_unique<Plan>(std::move(result.plan));
    // FSDP gathers the parameters of the next layer while it computes one.
    if (rule_.pieces)
      if (auto beside = overlapped(options_, *found.plan, found.plan->predicted_step_s))
        found.plan = std::move(beside);
    found.plan->engine = rule_.name;
    found.step = found.plan->predicted_step_s;
    return found;
  }

  Found in_passes(int64_t count, bool recompute) {
    Found found;
    const int64_t samples = options_.batch / count;
    if (!step_->of(samples)) {
      found.reason = step_->why_not();
      return found;
    }
    PlanBuilder builder(options_, &groups_, step_, samples, 1, &cache_);
    Composition composition;
    composition.micro_batch = samples;
    composition.zero = rule_.pieces && cluster_.size() > 1 ? 3 : 0;
    std::vector<int> devices(cluster_.size());
    std::iota(devices.begin(), devices.end(), 0);
    const Again again = recompute ? Again::if_needed : Again::never;
    composition.replicas = {{static_cast<int>(count), {{0, builder.size() - 1, devices, again}}}};
    found.plan = builder.compose(composition, rule_.name, &found.reason);
    if (!found.plan) return found;
    const StagePlan& stage = found.plan->pipeline->replicas[0].stages[0];
    const Theory& theory = found.plan->pipeline->theory(0);
    const CostModel& model = groups_.of(devices).model;
    const Shares shares(stage.ratios);
    const Fractions fractions(cluster_, shares);
    found.step = found.plan->predicted_step_s;
    if (!rule_.pieces) {
      found.step -= hidden_seconds(theory, stage.program, model, fractions);
    } else {
      const PhaseSeconds s =
          phase_seconds(theory, stage.program, model, fractions, options_.optimizer);
      const double passes = stage.recompute ? 1 + s.forward / (s.forward + s.backward) : 1;
      found.step -=
          static_cast<double>(count) * passes * prefetched(theory, stage.program, model, shares);
    }
    return found;
  }

  // Seconds of a pass that FSDP saves by gathering the parameters of the next layer while it
  // computes one: the first, as it were the largest, it waits for.
  Seconds prefetched(const Theory& theory, const Program& program, const CostModel& model,
                     const Shares& shares) const {
    const ProgramCost cost = cost_of(theory, program, model, Fractions(cluster_, shares),
                                     options_.optimizer, 1, /*with_memory=*/false);
    Seconds comm = 0, compute = 0, largest = 0;
    for (const StageCost& stage : cost.stages) {
      comm += stage.comm;
      largest = std::max(largest, stage.comm);
      compute += *std::max_element(stage.compute.begin(), stage.compute.end());
    }
    return std::max(0.0, comm + compute - std::max(comm, compute) - largest);
  }

  // The best by the grid's formulas that fit.
  void megatron() {
    options_.limits.deadline.check();
    int64_t samples = 1;
    while (samples < 4 && options_.batch % (2 * samples) == 0) samples *= 2;
    if (!step_->of(samples)) {
      best_.reason = step_->why_not();
      return;
    }
    const PlanBuilder builder(options_, &groups_, step_, samples, kLayers);
    const grid::Model model = grid_model(builder, samples);
    best_.reason = "no degrees with even layers fit";
    // First what need not be fitted into memory for long: what fits by the formulas, or as they do not
    // count all that a pass needs, with room left.
    const std::vector<grid::Strategy> all = uniform_strategies(model);
    std::set<std::string> tried;
    for (const double room : kRoom) {
      const std::vector<grid::Strategy> order = by_time(model, all, room);
      for (size_t i = 0; i < order.size() && i < (best_.plan ? kMegatron : kMegatronTried); ++i)
        if (tried.insert(grid::to_string(order[i])).second) compose(order[i], model, Effort::lean);
      if (best_.plan || !options_.memory_limit) return;
    }
    const std::vector<grid::Strategy> order = by_time(model, all, kRoom[0]);
    for (size_t i = 0; i < std::min(kMegatron, order.size()) && !best_.plan; ++i)
      compose(order[i], model, Effort::all);
  }

  // Those that fit with `room` for that much more than activations, in parts of them.
  std::vector<grid::Strategy> by_time(const grid::Model& model,
                                      const std::vector<grid::Strategy>& all, double room) {
    const grid::Estimator estimator = estimator_of(model, cluster_, room);
    std::vector<std::pair<Seconds, const grid::Strategy*>> order;
    grid::Mesh mesh;  // of all strategies with the same degrees: one follows the other
    int tp = 0, pp = 0;
    for (const grid::Strategy& s : all) {
      options_.limits.deadline.check();
      estimator.check(s);
      if (s.tp != tp || s.pp != pp) mesh = estimator.mesh(s);
      tp = s.tp, pp = s.pp;
      if (const grid::Estimate e = estimator.estimate(s, mesh); e.fits || !options_.memory_limit)
        order.emplace_back(e.step, &s);
    }
    std::stable_sort(order.begin(), order.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<grid::Strategy> sorted;
    for (const auto& [step, s] : order) sorted.push_back(*s);
    return sorted;
  }

  void compose(const grid::Strategy& s, const grid::Model& model, Effort effort) {
    options_.limits.deadline.check();
    if (!step_->of(s.micro_batch)) return;
    std::unique_ptr<PlanBuilder>& own = builders_[s.micro_batch];
    if (!own)
      own =
          std::make_unique<PlanBuilder>(options_, &groups_, step_, s.micro_batch, kLayers, &cache_);
    if (own->size() != model.size()) return;
    own->set_effort(effort);
    Composition composition = composition_of(s);
    composition.zero = s.zero;
    composition.try_split = false;  // Megatron has no backward passes of weights alone
    Found found;
    found.plan = own->compose(composition, rule_.name, &found.reason);
    found.knobs = grid::to_string(s);
    if (found.plan) found.step = found.plan->predicted_step_s;
    if (!found.plan && !best_.plan) best_.reason = found.reason;
    keep(std::move(found));
  }

  // Tensor parallelism within a machine, as many blocks in all stages, as many micro-batches in all
  // replicas.
  std::vector<grid::Strategy> uniform_strategies(const grid::Model& model) const {
    std::vector<bool> block;
    for (const grid::Layer& layer : model.layers) block.push_back(layer.block);
    const int blocks = static_cast<int>(std::count(block.begin(), block.end(), true));
    const int devices = cluster_.size(), machine = smallest_machine();
    std::vector<grid::Strategy> all;
    for (int tp = 1; tp <= machine; tp *= 2)
      for (int pp = 1; pp <= std::min(devices / tp, blocks); ++pp) {
        if (devices % (tp * pp) != 0 || machine % tp != 0 || model.heads % tp != 0) continue;
        grid::Strategy s;
        s.tp = tp, s.pp = pp, s.dp = devices / tp / pp;
        s.stages = grid::uniform_layers(block, pp);
        s.devices.resize(s.ranks());
        std::iota(s.devices.begin(), s.devices.end(), 0);
        for (s.micro_batch = 1; s.micro_batch * s.dp <= options_.batch; s.micro_batch *= 2) {
          if (options_.batch % (s.micro_batch * s.dp) != 0) continue;
          s.micro_batches.assign(s.dp, static_cast<int>(options_.batch / s.micro_batch / s.dp));
          for (s.zero = 0; s.zero <= (s.dp > 1 ? 1 : 0); ++s.zero)
            for (const grid::Recompute recompute : {grid::Recompute::none, grid::Recompute::full}) {
              if (recompute != grid::Recompute::none && !options_.recompute) continue;
              s.recompute = recompute;
              all.push_back(s);
            }
        }
      }
    return all;
  }
  int smallest_machine() const {
    int least = cluster_.size();
    for (const Group& group : cluster_.groups)
      if (group.children.empty()) least = std::min(least, group.device_count);
    return least;
  }

  void keep(Found found) {
    if (!found.plan) return;
    if (!best_.plan || found.step < best_.step) best_ = std::move(found);
  }

  PlanOptions options_;
  solver::OrderMemo* orders_;
  const Rule& rule_;
  const Cluster cluster_;
  DeviceGroups groups_;
  std::shared_ptr<BatchStep> step_;
  SearchCache cache_;
  std::map<int64_t, std::unique_ptr<PlanBuilder>> builders_;  // by samples, of Megatron
  Found best_;
};

}  // namespace

EngineResult plan_opponents(const PlanOptions& options, const Cluster& cluster,
                            const GraphOf& graph_of) {
  const auto start = std::chrono::steady_clock::now();
  EngineResult result;
  const auto step = step_of(options, graph_of);
  const bool alike = even(cluster);
  std::vector<const Rule*> rules;
  for (const Rule& rule : kRules)
    if (!alike || (!rule.fastest && !std::string(rule.name).ends_with("by-speed")))
      rules.push_back(&rule);
  const std::vector<int> fastest = fastest_of(cluster);
  const Cluster fast = part_of(cluster, fastest);
  std::vector<Found> found(rules.size());
  solver::OrderMemo orders;
  // Those that are usually fastest come first, should time run out.
  std::vector<size_t> order(rules.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return rules[a]->early > rules[b]->early; });
  parallel_for(static_cast<int>(rules.size()), options.threads, [&](int n) {
    const size_t i = order[static_cast<size_t>(n)];
    const Rule& rule = *rules[i];
    found[i] = Opponent(options, rule.fastest ? fast : cluster, step, rule, &orders).run();
  });
  for (size_t i = 0; i < rules.size(); ++i) {
    Found& f = found[i];
    if (f.plan && !exact(*f.plan))
      f.knobs += "; normalises by micro-batch, which one device does not";
    result.baselines.push_back({rules[i]->name, f.plan != nullptr, f.step, f.reason, f.knobs,
                                f.plan ? f.plan->predicted_step_s : 0});
    if (!f.plan) continue;
    result.add(std::move(f.plan), f.knobs);
    if (rules[i]->fastest) result.candidates.back().devices = fastest;
  }
  rank(&result);
  while (result.candidates.size() > 1) {
    result.others.push_back(std::move(result.candidates.back()));
    result.candidates.pop_back();
  }
  if (result.candidates.empty() && !found.empty()) result.reason = found[0].reason;
  result.search_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace motley::planner

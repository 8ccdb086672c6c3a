// The best plan that a training framework can say (targets.h): a set of candidates of its own.
//
//   stages      degrees tp x dp x pp, placements, micro-batches, recomputation and ZeRO, priced by the
//               grid's formulas on the model's blocks; the most promising are composed and simulated,
//               and blocks of the best moved between neighbours while its step falls
//   by type     where degrees may differ from stage to stage: each type of device has stages of its
//               own, on as many devices each, in an order of types
//   rows        one program on all devices or the faster ones, with equal rows, rows by speed, or the
//               rows that the load-balancing program finds
//
// Defaults are candidates too: even layers on all devices in the order of the file, and equal rows.
// What a limit costs is the best plan again, composed without it.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>

#include "cluster/part.h"
#include "core/error.h"
#include "grid/assign.h"
#include "grid/placement.h"
#include "grid/search.h"
#include "planner/by_type.h"
#include "planner/engines.h"
#include "planner/grid_model.h"
#include "planner/parts.h"
#include "planner/program_plan.h"
#include "planner/targets.h"
#include "shard/shares.h"

namespace motley::planner {

namespace {

constexpr double kSearching = 0.2, kComposing = 0.6, kLifting = 0.75;  // of the time, until then
constexpr int kComposed = 12;   // arrangements, the most promising first
constexpr double kWorth = 1.3;  // times the best estimate that one may have
constexpr int kMostPlacements = 8;
constexpr Seconds kNever = std::numeric_limits<double>::infinity();

using Priced = std::pair<Seconds, Arrangement>;

class TargetSearch {
 public:
  TargetSearch(const PlanOptions& options, const Cluster& cluster, const GraphOf& graph_of)
      : options_(options),
        target_(*find_target(options.target)),
        cluster_(cluster),
        parts_(parts_worth_trying(cluster)),
        fixed_(grid::parse_fixed(options.fix)),
        step_(step_of(options, graph_of)),
        sizes_(sizes_of(step_->graph())),
        arranger_(searching(), cluster_, step_) {
    options_.fix.clear();
    result_.record = options.record;
    result_.reason = fmt::format("no plan that {} can say fits", target_.title);
  }

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    result_.engine = target_.name;
    try {
      if (target_.pipelines) stages();
      one_program();
      if (best_) improve();
    } catch (const TimeIsUp&) {
    }
    if (!best_) at_least_one();
    try {
      if (best_) lift();
    } catch (const TimeIsUp&) {
    }
    default_.feasible = default_.predicted_step_s > 0;
    if (!default_.feasible) default_.reason = result_.reason;
    default_.name = "default";
    result_.baselines.push_back(default_);
    rank(&result_);
    // Those that compute the same as one device first, and of plans in the same words the fastest:
    // others are on other devices of the kind.
    std::stable_partition(result_.candidates.begin(), result_.candidates.end(),
                          [](const Candidate& c) { return exact(*c.plan); });
    std::set<std::string> said;
    std::erase_if(result_.candidates,
                  [&](const Candidate& c) { return !said.insert(c.note).second; });
    if (result_.candidates.size() > 5) result_.candidates.resize(5);
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(result_);
  }

 private:
  // Time is left to tell what limits cost.
  PlanOptions searching() const {
    PlanOptions options = options_;
    options.limits.deadline = options_.limits.deadline.part(kLifting);
    return options;
  }

  // Where time ran out first: what a user would begin with, however long it takes.
  void at_least_one() {
    PlanOptions patient = options_;
    patient.limits.deadline = Deadline();
    Arranger arranger(patient, cluster_, step_);
    std::vector<Arrangement> tries;
    for (const Priced& priced : first_) tries.push_back(priced.second);
    for (const Inside inside : {Inside::batch, Inside::pieces})
      if (inside == Inside::batch ? !target_.pieces_alone : target_.pieces)
        tries.push_back(with_even_rows(one_stage(cluster_.size(), inside, 1, false), cluster_));
    for (const Arrangement& a : tries) {
      if (best_) return;
      if (!allowed(a) || !cannot_say(target_, a, cluster_, sizes_).empty()) continue;
      std::string reason;
      if (std::unique_ptr<Plan> plan = arranger.make(a, target_.name, &reason))
        keep(a, std::move(plan), {});
      else
        result_.reason = reason;
    }
  }
  Arrangement with_even_rows(Arrangement a, const Cluster& part) const {
    if (!target_.rows || a.micro_batch % part.size() == 0) return a;
    for (const int64_t r : divide(a.micro_batch, even_ratios(part)))
      a.shares.push_back(static_cast<double>(r) / static_cast<double>(a.micro_batch));
    return a;
  }

  bool allowed(const Arrangement& a) const {
    const ArrangedStage& first = a.stages[0];
    const int dp = first.dp(), pp = a.pp();
    const int64_t samples = a.micro_batch * a.replicas() / dp;
    if (fixed_.pp.value_or(pp) != pp || fixed_.dp.value_or(dp) != dp ||
        fixed_.tp.value_or(first.tp()) != first.tp() ||
        fixed_.micro_batch.value_or(static_cast<int>(samples)) != samples ||
        fixed_.interleave.value_or(a.interleave) != a.interleave ||
        fixed_.zero.value_or(zero_of(a)) != zero_of(a) ||
        (fixed_.recompute && (*fixed_.recompute == grid::Recompute::full) != first.recompute))
      return false;
    if (!fixed_.stages) return true;
    for (size_t s = 0; s < a.stages.size(); ++s)
      if (s >= fixed_.stages->size() || a.stages[s].blocks != (*fixed_.stages)[s]) return false;
    return a.stages.size() == fixed_.stages->size();
  }
  static int zero_of(const Arrangement& a) {
    return a.stages[0].inside == Inside::pieces && a.stages[0].width() > 1 ? 3 : a.zero;
  }

  // The plan of an arrangement that the target can say, kept; its step, or infinity.
  Seconds attempt(const Arrangement& a, bool is_default = false) {
    if (!allowed(a) || !cannot_say(target_, a, cluster_, sizes_).empty()) return kNever;
    const std::string key = to_string(a) + fmt::format(" {} {}", fmt::join(rank_order(a), " "),
                                                       fmt::join(a.shares, " "));
    const auto [it, fresh] = steps_.try_emplace(key);
    Tried& known = it->second;
    if (fresh) {
      std::string reason;
      std::unique_ptr<Plan> plan = arranger_.make(a, target_.name, &reason);
      if (plan) {
        known = {plan->predicted_step_s, exact(*plan)};
        keep(a, std::move(plan), {});
      } else if (!best_) {
        result_.reason = reason;
      }
    }
    if (is_default)
      remember_default(known.step,
                       to_string(a) + (known.exact ? "" : ", which normalises by micro-batch"));
    return known.step;
  }

  void keep(const Arrangement& a, std::unique_ptr<Plan> plan, const std::vector<int>& devices) {
    const Seconds step = plan->predicted_step_s;
    result_.add(std::move(plan),
                to_string(a) + types_in_words(cluster_, devices.empty() ? rank_order(a) : devices));
    std::vector<int>& own = result_.candidates.back().devices;
    own = devices;
    if (own.empty()) own.resize(cluster_.size());
    if (devices.empty()) std::iota(own.begin(), own.end(), 0);
    const bool same = exact(*result_.candidates.back().plan);
    if (best_ && (best_exact_ != same ? best_exact_ : step >= best_step_)) return;
    best_ = std::make_unique<Arrangement>(a);
    best_step_ = step;
    best_exact_ = same;
    best_devices_ = devices;
  }
  void remember_default(Seconds step, const std::string& what) {
    if (step == kNever || (default_.predicted_step_s > 0 && default_.predicted_step_s <= step))
      return;
    default_.predicted_step_s = step;
    default_.knobs = what;
  }

  // ---- one program

  void one_program() {
    if (fixed_.pp.value_or(1) > 1 || fixed_.tp.value_or(1) > 1) return;
    one_program(/*uneven=*/false);
    if (target_.rows) one_program(/*uneven=*/true);
  }
  void one_program(bool uneven) {
    for (const std::vector<int>& devices : parts_) {
      const Cluster part = part_of(cluster_, devices);
      Arranger own(searching(), part, step_);
      for (const Inside inside : {Inside::batch, Inside::pieces}) {
        if (inside == Inside::batch ? target_.pieces_alone && part.size() > 1
                                    : !target_.pieces || part.size() == 1)
          continue;
        rows(devices, part, inside, uneven, &own);
      }
    }
  }

  // Few large micro-batches are faster than many: the fewest that fit, without recomputation and
  // with.
  void rows(const std::vector<int>& devices, const Cluster& part, Inside inside, bool uneven,
            Arranger* own) {
    const int n = part.size();
    bool fitted = false;
    for (const bool recompute : {false, true}) {
      if ((recompute && !options_.recompute) || fitted) continue;
      for (int64_t count = 1; options_.batch % count == 0 && options_.batch / count >= n;
           count *= 2) {
        // Where there are stages too, replicas take several micro-batches.
        if (target_.pipelines && inside == Inside::batch && (count > 1 || recompute)) break;
        Arrangement a = one_stage(n, inside, count, recompute);
        bool fits = false;
        if ((a.micro_batch % n == 0 || target_.rows) && !uneven)
          fits = row_attempt(with_even_rows(a, part), devices, part, own, n == cluster_.size());
        if (uneven && n > 1)
          for (const std::vector<double>& shares : shares_of(a, part, own)) {
            Arrangement by_rows = a;
            by_rows.shares = shares;
            fits = row_attempt(by_rows, devices, part, own, false) || fits;
          }
        fitted = fitted || fits;
        if (fits && !fixed_.micro_batch) break;
      }
    }
  }

  Arrangement one_stage(int devices, Inside inside, int64_t count, bool recompute) const {
    Arrangement a;
    a.micro_batch = options_.batch / count;
    a.micro_batches = {static_cast<int>(count)};
    ArrangedStage stage;
    stage.inside = devices == 1 ? Inside::batch : inside;
    stage.blocks = std::max(1, count_blocks(step_->graph()));
    stage.recompute = recompute;
    stage.devices.resize(1);
    for (int d = 0; d < devices; ++d) stage.devices[0].push_back(d);
    a.stages = {std::move(stage)};
    return a;
  }

  bool row_attempt(const Arrangement& a, const std::vector<int>& devices, const Cluster& part,
                   Arranger* own, bool is_default) {
    if (!allowed(a) || !cannot_say(target_, a, part, sizes_).empty()) return false;
    std::string reason;
    std::unique_ptr<Plan> plan = own->make(a, target_.name, &reason);
    if (!plan) {
      if (!best_) result_.reason = reason;
      return false;
    }
    if (is_default) remember_default(plan->predicted_step_s, to_string(a));
    keep(a, std::move(plan), devices);
    return true;
  }

  // Whole rows of a micro-batch, by speed and as the load-balancing program shares them out.
  std::vector<std::vector<double>> shares_of(const Arrangement& a, const Cluster& part,
                                             Arranger* own) const {
    std::set<std::vector<double>> all;
    const auto add = [&](const std::vector<double>& shares) {
      std::vector<double> whole;
      bool equal = true;
      for (const int64_t rows : divide(a.micro_batch, shares)) {
        whole.push_back(static_cast<double>(rows) / static_cast<double>(a.micro_batch));
        equal = equal && whole.back() == whole[0];
      }
      if (!equal && *std::min_element(whole.begin(), whole.end()) > 0) all.insert(whole);
    };
    add(proportional_ratios(part));
    Arrangement balanced = a;
    balanced.balanced = true;
    std::string reason;
    if (a.micro_batches[0] == 1 && !a.stages[0].recompute)
      if (const std::unique_ptr<Plan> plan = own->make(balanced, target_.name, &reason))
        add(plan->ratios[0]);
    return {all.begin(), all.end()};
  }

  // ---- stages

  void stages() {
    int64_t samples = 1;
    while (samples < 4 && options_.batch % (2 * samples) == 0) samples *= 2;
    PlanBuilder* builder = arranger_.builder(samples);
    if (!builder) {
      result_.reason = step_->why_not();
      return;
    }
    model_ = grid_model(*builder, samples);
    if (model_.size() < 1) return;
    grid::Calibration calibration = grid::default_calibration(cluster_, model_.precision);
    calibration.fragmentation = 0;
    for (auto& [type, rates] : calibration.types) rates.context = rates.channels = 0;
    const grid::Estimator estimator(model_, cluster_, calibration);
    std::vector<Priced> found, defaults;
    const Deadline searching = options_.limits.deadline.part(kSearching);
    for (const auto& [tp, pp, dp] : degrees())
      price(estimator, tp, pp, dp, &found, &defaults, searching);
    by_type(&found);
    by_price(&found);
    by_price(&defaults);
    first_.assign(defaults.begin(), defaults.begin() + std::min<int64_t>(2, std::ssize(defaults)));
    first_.insert(first_.end(), found.begin(),
                  found.begin() + std::min<int64_t>(4, std::ssize(found)));
    const Deadline composing = options_.limits.deadline.part(kComposing);
    for (size_t i = 0; i < defaults.size() && i < 2; ++i) attempt(defaults[i].second, true);
    int tried = 0;
    for (const auto& [seconds, a] : found) {
      if (best_ && (tried >= kComposed || composing.over() || seconds > kWorth * found[0].first))
        break;
      if (tried >= 4 * kComposed) break;
      attempt(a);
      ++tried;
    }
    // Where none of the two that promise most fits.
    for (size_t i = 2; i < defaults.size() && i < kComposed; ++i)
      if (default_.predicted_step_s == 0 && !composing.over()) attempt(defaults[i].second, true);
  }

  static void by_price(std::vector<Priced>* list) {
    std::stable_sort(list->begin(), list->end(),
                     [](const Priced& a, const Priced& b) { return a.first < b.first; });
  }

  struct Degrees {
    int tp, pp, dp;
  };
  // As many replicas as all devices allow, or those of the faster types.
  std::vector<Degrees> degrees() const {
    int machine = 1;
    for (const Host& host : hosts_of(cluster_))
      machine = std::max(machine, static_cast<int>(host.devices.size()));
    std::set<int> sizes;
    for (const std::vector<int>& devices : parts_) sizes.insert(static_cast<int>(devices.size()));
    std::vector<Degrees> all;
    for (int tp = 1; tp <= machine; tp *= 2) {
      if (model_.heads % tp != 0 || (tp > 1 && !target_.tensors)) continue;
      if (sizes_ && !cannot_divide(target_, tp, 1, *sizes_).empty()) continue;
      for (int pp = 1; pp <= std::min(cluster_.size() / tp, model_.size()); ++pp) {
        if (tp > 1 && pp > 1 && !target_.tensors_in_stages) break;
        std::set<int> replicas;
        for (const int size : sizes) {
          int dp = size / (tp * pp);
          while (dp > 1 && options_.batch % dp != 0) --dp;
          if (dp > 0) replicas.insert(dp);
        }
        if (fixed_.dp) replicas = {*fixed_.dp};
        for (const int dp : replicas)
          if (fixed_.tp.value_or(tp) == tp && fixed_.pp.value_or(pp) == pp &&
              tp * pp * dp <= cluster_.size() && options_.batch % dp == 0)
            all.push_back({tp, pp, dp});
      }
    }
    return all;
  }

  void price(const grid::Estimator& estimator, int tp, int pp, int dp, std::vector<Priced>* found,
             std::vector<Priced>* defaults, const Deadline& searching) {
    grid::Strategy s;
    s.tp = tp, s.pp = pp, s.dp = dp;
    const std::vector<int> even = grid::uniform_layers(model_.blocks(), pp);
    auto placements = grid::heuristic_placements(cluster_, pp, dp, tp);
    if (placements.size() > kMostPlacements) placements.resize(kMostPlacements);
    for (size_t p = 0; p < placements.size(); ++p) {
      if (p > 0 && searching.over()) return;
      s.devices = placements[p];
      s.micro_batches.assign(dp, 1);
      s.stages = even;
      const grid::Mesh mesh = estimator.mesh(s);
      const bool all = p == 0 && s.ranks() == cluster_.size();
      for (s.micro_batch = 1; int64_t{s.micro_batch} * dp <= options_.batch; s.micro_batch *= 2) {
        if (options_.batch % (int64_t{s.micro_batch} * dp) != 0) break;
        s.micro_batches.assign(dp, static_cast<int>(options_.batch / s.micro_batch / dp));
        for (const bool again : {false, true}) {
          if (again && !options_.recompute) continue;
          s.recompute = again ? grid::Recompute::full : grid::Recompute::none;
          bool fits = false;
          for (const char level : std::string(dp > 1 ? target_.zero : "0")) {
            s.zero = level - '0';
            s.stages = fixed_.stages ? *fixed_.stages : even;
            if (fixed_.stages &&
                (static_cast<int>(s.stages.size()) != pp ||
                 std::accumulate(s.stages.begin(), s.stages.end(), 0) != model_.size()))
              continue;
            fits =
                add(estimator, mesh, s, found, all && !fixed_.stages ? defaults : nullptr) || fits;
            grid::SearchCounters counters;
            if (pp > 1 && !fixed_.stages && !searching.over() &&
                grid::assign(estimator, mesh, options_.memory_limit, &s, &counters))
              fits = add(estimator, mesh, s, found, nullptr) || fits;
          }
          if (fits) break;
        }
      }
    }
  }

  bool add(const grid::Estimator& estimator, const grid::Mesh& mesh, const grid::Strategy& s,
           std::vector<Priced>* found, std::vector<Priced>* defaults) {
    const grid::Estimate e = estimator.estimate(s, mesh);
    if (!e.fits && options_.memory_limit) return false;
    Arrangement a;
    a.micro_batch = s.micro_batch;
    a.micro_batches = s.micro_batches;
    a.zero = s.zero;
    for (int p = 0; p < s.pp; ++p) {
      ArrangedStage stage;
      stage.inside = s.tp > 1 ? Inside::tensors : Inside::batch;
      stage.blocks = s.stages[p];
      stage.recompute = s.recompute != grid::Recompute::none;
      for (int r = 0; r < s.dp; ++r) {
        std::vector<int> devices;
        for (int t = 0; t < s.tp; ++t) devices.push_back(s.device(p, r, 0, t));
        std::sort(devices.begin(), devices.end());
        stage.devices.push_back(std::move(devices));
      }
      stage.warm_up = std::min(s.pp - p, s.micro_batches[0]);
      a.stages.push_back(std::move(stage));
    }
    // Experts are divided by replicas that are one stage together.
    if (target_.experts && model_.experts > 0 && s.tp == 1 && s.dp > 1)
      add_experts(a, e.step, found);
    if (defaults) defaults->emplace_back(e.step, a);
    found->emplace_back(e.step, std::move(a));
    return true;
  }

  void add_experts(const Arrangement& a, Seconds step, std::vector<Priced>* found) const {
    for (int ep = 2; ep <= a.replicas(); ++ep) {
      if (a.replicas() % ep != 0 || model_.experts % ep != 0) continue;
      Arrangement merged = a;
      merged.micro_batch *= ep;
      merged.micro_batches.resize(a.replicas() / ep);
      for (ArrangedStage& stage : merged.stages) {
        std::vector<std::vector<int>> devices(a.replicas() / ep);
        for (int r = 0; r < a.replicas(); ++r) devices[r / ep].push_back(stage.devices[r][0]);
        for (std::vector<int>& group : devices) std::sort(group.begin(), group.end());
        stage.devices = std::move(devices);
        stage.inside = Inside::experts;
      }
      if (merged.replicas() == 1) merged.zero = 0;
      found->emplace_back(step * 0.999, std::move(merged));
    }
  }

  // Their prices are rough: what is compared with the grid's is their order alone.
  void by_type(std::vector<Priced>* found) const {
    if (!target_.meshes || cluster_.types.size() < 2 || cluster_.types.size() > 4) return;
    Seconds price = 0;
    for (const Priced& other : *found)
      price = price == 0 ? other.first : std::min(price, other.first);
    int count = 0;
    for (Arrangement& a : arrangements_by_type(target_, cluster_, model_, options_.batch)) {
      if (!allowed(a) || count++ == kComposed) continue;
      found->emplace_back(price * (1 + 0.02 * count), std::move(a));
    }
  }

  // ---- the best, improved

  void improve() {
    if (!best_devices_.empty() || fixed_.stages) return;
    for (bool better = true; better;) {
      better = false;
      const Arrangement start = *best_;
      const Seconds before = best_step_;
      for (size_t s = 0; s + 1 < start.stages.size() && !better; ++s)
        for (const int by : {1, -1}) {
          Arrangement moved = start;
          moved.stages[s].blocks += by;
          moved.stages[s + 1].blocks -= by;
          if (moved.stages[s].blocks < 1 || moved.stages[s + 1].blocks < 1) continue;
          attempt(moved);
          better = better || best_step_ < before * (1 - 1e-9);
        }
      if (!better && target_.recompute_by_stage)
        for (size_t s = 0; s < start.stages.size() && !better; ++s) {
          Arrangement once = start;
          if (!once.stages[s].recompute) continue;
          once.stages[s].recompute = false;
          attempt(once);
          better = best_step_ < before * (1 - 1e-9);
        }
    }
  }

  // ---- what limits cost

  void lift() {
    Arrangement best = *best_;
    const bool alone = !best.pipelined() && best.replicas() == 1;
    std::vector<int> devices = best_devices_;
    if (alone && devices.empty()) {
      std::vector<int>& own = best.stages[0].devices[0];
      devices = own;
      std::iota(own.begin(), own.end(), 0);
    }
    const Cluster part = devices.empty() ? cluster_ : part_of(cluster_, devices);
    const auto tell = [&](const char* limit, std::unique_ptr<Plan> plan) {
      if (plan && plan->predicted_step_s < best_step_ * (1 - 1e-6))
        result_.lifted.push_back({limit, plan->predicted_step_s});
    };
    std::string reason;
    Arranger plain(options_, part, step_), planned(options_, part, step_, true);
    tell("collectives are NCCL's own", planned.make(best, target_.name, &reason));
    if (alone && best.shares.empty() && !target_.rows) {
      Arrangement a = best;
      a.shares = proportional_ratios(part);
      tell("all devices take as many rows", plain.make(a, target_.name, &reason));
    }
    if (alone) {
      tell("one cut for all tensors, and shares that are equal or rows", any_program(part));
    } else {
      tell("devices of a stage have equal shares of the batch or of matrices",
           plain.make(best, target_.name, &reason, /*free=*/true));
      Arrangement a = best;
      if (a.pipelined() && a.interleave == 1 && !target_.any_warm_up) {
        a.any_schedule = true;
        tell("stages run 1F1B", plain.make(a, target_.name, &reason));
      }
      tell("replicas take as many micro-batches", by_speed(&plain));
    }
    std::stable_sort(result_.lifted.begin(), result_.lifted.end(),
                     [](const Lifted& a, const Lifted& b) { return a.step_s < b.step_s; });
  }

  std::unique_ptr<Plan> any_program(const Cluster& part) const {
    ProgramRequest request;
    request.model = options_.model;
    request.batch = options_.batch;
    request.baselines = false;
    request.alternation.optimizer = options_.optimizer;
    request.alternation.memory_limit = options_.memory_limit;
    request.alternation.limits = options_.limits;
    request.alternation.certify = false;
    ProgramResult result = plan_program(step_->graph(), part, request);
    return result.feasible ? std::make_unique<Plan>(std::move(result.plan)) : nullptr;
  }

  // Micro-batches in proportion to the slowest stage of each replica.
  std::unique_ptr<Plan> by_speed(Arranger* plain) const {
    Arrangement a = *best_;
    if (a.replicas() < 2 || a.zero > 1) return nullptr;
    std::vector<double> seconds;
    for (int r = 0; r < a.replicas(); ++r) {
      double slowest = 0;
      for (const ArrangedStage& stage : a.stages)
        for (int d : stage.devices[r])
          slowest = std::max(slowest, stage.blocks / cluster_.type_of(d).flops);
      seconds.push_back(slowest);
    }
    a.micro_batches = grid::share_micro_batches(
        std::accumulate(a.micro_batches.begin(), a.micro_batches.end(), 0), seconds);
    if (a.micro_batches == best_->micro_batches) return nullptr;
    std::string reason;
    return plain->make(a, target_.name, &reason);
  }

  PlanOptions options_;
  const Target& target_;
  const Cluster& cluster_;
  const std::vector<std::vector<int>> parts_;
  const grid::Fixed fixed_;
  std::shared_ptr<BatchStep> step_;
  std::optional<Sizes> sizes_;
  Arranger arranger_;
  grid::Model model_;
  struct Tried {
    Seconds step = kNever;
    bool exact = true;
  };
  std::map<std::string, Tried> steps_;
  std::vector<Priced> first_;  // what is composed first
  std::unique_ptr<Arrangement> best_;
  Seconds best_step_ = kNever;
  bool best_exact_ = false;
  std::vector<int> best_devices_;
  StrategyTime default_;
  EngineResult result_;
};

}  // namespace

EngineResult plan_target(const PlanOptions& options, const Cluster& cluster,
                         const GraphOf& graph_of) {
  return TargetSearch(options, cluster, graph_of).run();
}

}  // namespace motley::planner

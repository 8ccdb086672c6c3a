#include "grid/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "grid/bounds.h"
#include "grid/placement.h"

namespace motley::grid {

namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr size_t kFinalists = 3;
// Threads that place a strategy know what was kept of all but the last so many in front of it; of
// fewer strategies there is one thread.
constexpr size_t kLag = 16;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<int> values(const std::optional<int>& one, std::vector<int> many) {
  return one ? std::vector<int>{*one} : std::move(many);
}

bool faster(const Candidate& a, const Candidate& b) { return a.estimate.step < b.estimate.step; }

class Search {
 public:
  Search(const Estimator& estimator, const SearchOptions& options)
      : estimator_(estimator),
        options_(options),
        fixed_(options.fixed),
        nodes_(nodes_of(estimator.cluster())),
        first_bound_(estimator, options) {
    if (options.global_batch < 1)
      throw user_error("grid", "the global batch is {}; give at least 1", options.global_batch);
    if (fixed_.stages) stages_ = expand_stages(estimator.model(), *fixed_.stages);
  }

  SearchResult run() {
    const double start = now_s();
    std::vector<Open> open = enumerate();
    for (const Open& o : open) result_.counters.enumerated += static_cast<int64_t>(o.levels.size());
    result_.stop_reason = "exhausted";
    if (open.empty()) {
      const Model& model = estimator_.model();
      result_.reason = fmt::format(
          "no degrees suit {} devices, {} heads, {} layers and a batch of {} with the fixed "
          "choices",
          estimator_.cluster().size(), model.heads, model.size(), options_.global_batch);
      return std::move(result_);
    }
    for (Open& o : open) o.bound = least(o, first_bound_);
    std::stable_sort(open.begin(), open.end(),
                     [](const Open& a, const Open& b) { return a.bound < b.bound; });
    result_.lower_bound = kForever;
    take_all(open);
    std::vector<Candidate>& ranked = result_.ranked;
    if (ranked.empty()) {
      result_.reason = result_.stop_reason == "time limit" ? "time ran out before a plan was found"
                       : tightest_.empty()                 ? "no strategy suits the batch"
                                                           : tightest_;
    } else if (!options_.heuristic_only) {
      refine_all();
      std::stable_sort(ranked.begin(), ranked.end(), faster);
    }
    result_.seconds = now_s() - start;
    return std::move(result_);
  }

 private:
  // Degrees and what else is chosen before devices are placed, with the levels of ZeRO that are
  // taken in their order: all where the least is wanted, else one.
  struct Open {
    Strategy strategy;
    std::vector<int> levels;
    Seconds bound = 0;  // the least over them: of one that is bounded nobody knows if it fits
    Strategy at(int zero) const {
      Strategy s = strategy;
      s.zero = zero;
      return s;
    }
  };

  // How many devices may be left: all, or without those of one kind of node.
  std::set<int> devices_left() const {
    const int devices = estimator_.cluster().size();
    std::set<int> left = {devices};
    for (int kind = 0; kind < nodes_.kinds; ++kind) {
      int without = devices;
      for (size_t n = 0; n < nodes_.devices.size(); ++n)
        if (nodes_.kind[n] == kind) without -= static_cast<int>(nodes_.devices[n].size());
      left.insert(without);
    }
    return left;
  }

  std::vector<Open> enumerate() const {
    const Model& model = estimator_.model();
    const int devices = estimator_.cluster().size();
    const std::vector<bool> block = model.blocks();
    const int blocks = static_cast<int>(std::count(block.begin(), block.end(), true));
    const int deepest = blocks > 0 ? blocks : model.size();
    std::vector<int> depths(std::min(deepest, devices));
    std::iota(depths.begin(), depths.end(), 1);
    size_t node = 1;
    for (const auto& n : nodes_.devices) node = std::max(node, n.size());
    std::vector<int> tps = divisors(model.heads);
    std::erase_if(tps, [&](int tp) { return tp > 2 * static_cast<int>(node); });
    const std::set<int> left = devices_left();
    std::vector<Open> open;
    Strategy s;
    s.runtime = options_.runtime;
    for (int tp : values(fixed_.tp, tps))
      for (int cp : values(fixed_.cp, options_.cp)) {
        if (model.heads % tp != 0 || model.tokens % cp != 0) continue;
        s.tp = tp, s.cp = cp;
        for (int v : values(fixed_.interleave, options_.interleave))
          for (int pp : values(fixed_.pp, depths)) {
            if (fixed_.stages && static_cast<int>(stages_.size()) != pp * v) continue;
            if (v > 1 && (pp == 1 || pp * v > deepest)) continue;
            s.interleave = v, s.pp = pp;
            for (int mbs : values(fixed_.micro_batch, divisors(options_.global_batch))) {
              if (options_.global_batch % mbs != 0) continue;
              s.micro_batch = mbs;
              const int each = tp * cp * pp, batches = options_.global_batch / mbs,
                        most = std::min(devices / each, batches);
              std::set<int> dps;
              if (fixed_.dp) dps = {*fixed_.dp};
              for (int n : left)
                if (!fixed_.dp && n >= each) dps.insert(std::min(most, n / each));
              for (int dp : dps) {
                if (dp > most) continue;
                if (!fixed_.dp && !fixed_.pp && !fixed_.tp &&
                    dp * each < options_.least_used * devices)
                  continue;
                s.dp = dp;
                add_open(s, &open);
              }
            }
          }
      }
    return open;
  }

  // With expert parallelism, ZeRO and recomputation.
  void add_open(Strategy s, std::vector<Open>* open) const {
    const Model& model = estimator_.model();
    const std::vector<Recompute> recomputes =
        fixed_.recompute ? std::vector<Recompute>{*fixed_.recompute} : options_.recompute;
    for (int ep : values(fixed_.ep, options_.ep)) {
      if (ep > 1 && (model.experts % ep != 0 || model.experts == 0 || s.dp * s.cp % ep != 0))
        continue;
      s.ep = ep;
      std::vector<int> levels;
      for (int zero : values(fixed_.zero, options_.zero))
        if ((zero == 0 || s.dp * s.cp > 1 || fixed_.zero) &&
            (zero < 2 || s.pp == 1 || options_.runtime != Runtime::deepspeed))
          levels.push_back(zero);
      for (size_t i = 0; i < levels.size(); i += options_.least_zero ? levels.size() : 1)
        for (Recompute recompute : recomputes) {
          s.recompute = recompute;
          open->push_back({s, options_.least_zero ? levels : std::vector<int>{levels[i]}});
        }
    }
  }

  template <typename F>
  static Seconds least(const Open& open, F&& bound) {
    Seconds seconds = kForever;
    for (int zero : open.levels) seconds = std::min(seconds, bound(open.at(zero)));
    return seconds;
  }

  // What a strategy must be faster than to be kept.
  Seconds cutoff() const {
    const auto& ranked = result_.ranked;
    return static_cast<int>(ranked.size()) < options_.keep ? kForever : ranked.back().estimate.step;
  }

  struct Placed {
    std::vector<int> devices;
    Mesh groups;
    std::optional<Mesh> mesh;  // with links, once it was asked for
  };
  std::vector<Placed>& placements(const Strategy& s) {
    const std::lock_guard lock(placed_mutex_);
    auto [slot, fresh] = placed_.try_emplace({s.pp, s.dp, s.tp, s.cp});
    if (!fresh) return slot->second;
    std::vector<std::vector<int>> all;
    if (fixed_.devices)
      all = {*fixed_.devices};
    else
      all = heuristic_placements(estimator_.cluster(), s.pp, s.dp, s.tp * s.cp);
    for (std::vector<int>& devices : all) {
      Strategy placed = s;
      placed.devices = devices;
      if (static_cast<int>(devices.size()) != s.ranks())
        throw user_error("grid", "fixed choice devices lists {}, pp*dp*cp*tp is {}", devices.size(),
                         s.ranks());
      slot->second.push_back({std::move(devices), estimator_.groups(placed), {}});
    }
    return slot->second;
  }

  const Mesh& mesh_of(Strategy s, Placed* placed) {
    const std::lock_guard lock(placed_mutex_);
    if (placed->mesh) return *placed->mesh;
    s.interleave = 2;  // so that the way back to the first stage is there too
    placed->mesh = placed->groups;
    estimator_.add_links(s, &*placed->mesh);
    return *placed->mesh;
  }

  // What became of a strategy whose devices were placed in all ways.
  struct Taken {
    std::optional<Candidate> best;  // of what is faster than was asked for
    bool bounded = false;           // something that is not
    bool too_large = false;         // wherever it is placed
    std::string lack;               // why the last placement does not fit
    SearchCounters counters;
  };

  // In their order, until none can be among the best any more. What is kept does not depend on how
  // many threads place them, as bounds leave out nothing that would be.
  void take_all(const std::vector<Open>& open) {
    const int threads = open.size() < kLag ? 1 : threads_of(options_.threads);
    const size_t lag = threads == 1 ? 1 : kLag;
    std::mutex mutex;  // of what follows
    std::condition_variable changed;
    std::vector<std::vector<Taken>> taken(open.size());  // [open][level] until it is merged
    std::vector<char> ready(open.size(), false);
    std::vector<Seconds> cutoffs;  // [open] once it is merged
    size_t next = 0;
    bool over = false;
    parallel_for(threads, threads, [&](int) {
      std::unique_lock lock(mutex);
      while (next < open.size()) {
        const size_t o = next++;
        changed.wait(lock, [&] { return over || cutoffs.size() + lag > o; });
        if (over) return;
        const Seconds cutoff = o < lag ? kForever : cutoffs[o - lag];
        lock.unlock();
        try {
          taken[o] = take(open[o], cutoff);
        } catch (...) {
          lock.lock();
          over = true;
          changed.notify_all();
          throw;
        }
        lock.lock();
        ready[o] = true;
        for (size_t m = cutoffs.size(); !over && m < open.size() && ready[m]; ++m) {
          over = !merge(open[m], std::exchange(taken[m], {}));
          cutoffs.push_back(this->cutoff());
        }
        changed.notify_all();
      }
    });
  }

  // By level, up to the first that fits, or that is left out by a bound.
  std::vector<Taken> take(const Open& open, Seconds cutoff) {
    std::vector<Taken> taken;
    const Seconds tail = least(open, [&](const Strategy& s) { return first_bound_.tail(s); });
    for (int zero : open.levels) {
      if (open.bound >= cutoff || options_.deadline.over()) break;
      taken.push_back(take(open.at(zero), tail, cutoff));
      if (taken.back().best || taken.back().bounded) break;
    }
    return taken;
  }

  // Keeps what is among the best. False: the search is over.
  bool merge(const Open& open, std::vector<Taken> levels) {
    if (open.bound >= cutoff())
      result_.stop_reason = "bound";
    else if (options_.deadline.spend(static_cast<int64_t>(open.levels.size()));
             options_.deadline.over())
      result_.stop_reason = "time limit";
    result_.lower_bound = std::min(result_.lower_bound, open.bound);
    if (result_.stop_reason != "exhausted") return false;
    for (Taken& taken : levels) {
      result_.counters += taken.counters;
      if (!taken.lack.empty() && !(taken.too_large && !tightest_.empty()))
        tightest_ = std::move(taken.lack);
      if (!taken.best || taken.best->estimate.step >= cutoff()) continue;
      std::vector<Candidate>& ranked = result_.ranked;
      ranked.insert(std::upper_bound(ranked.begin(), ranked.end(), *taken.best, faster),
                    *std::move(taken.best));
      if (static_cast<int>(ranked.size()) > options_.keep) ranked.pop_back();
    }
    return true;
  }

  // Places a strategy's devices in all ways.
  Taken take(const Strategy& s, Seconds tail, Seconds cutoff) {
    Taken taken;
    if (options_.memory && !fixed_.stages && first_bound_.too_large(s)) {
      ++taken.counters.infeasible;
      taken.too_large = true;
      taken.lack = fmt::format("{}: no layer assignment fits in memory", to_string(s));
      return taken;
    }
    for (Placed& placed : placements(s)) {
      Candidate c{s, {}};
      c.strategy.devices = placed.devices;
      if (complete(&placed, tail, cutoff, &c, &taken)) taken.best = std::move(c);
    }
    return taken;
  }

  // Micro-batches, layers and estimate of a strategy whose devices are placed; false if there are
  // none, or it does not beat both `cutoff` and the best of the other placements.
  bool complete(Placed* placed, Seconds tail, Seconds cutoff, Candidate* c, Taken* taken) {
    SearchCounters& counters = taken->counters;
    auto infeasible = [&](const std::string& why) {
      ++counters.infeasible;
      if (!why.empty()) taken->lack = fmt::format("{}: {}", to_string(c->strategy), why);
      return false;
    };
    auto too_slow = [&] {
      ++counters.bounded;
      taken->bounded = true;
      return false;
    };
    const Seconds best = taken->best ? taken->best->estimate.step : kForever;
    if (options_.memory && !fixed_.stages &&
        !may_fit(estimator_, options_.global_batch, placed->groups, c->strategy))
      return infeasible("no layer assignment fits in memory");
    const Mesh& mesh = mesh_of(c->strategy, placed);
    if (!give_micro_batches(estimator_, options_.global_batch, mesh, &c->strategy))
      return infeasible("");
    if (placed_bound(estimator_, c->strategy, mesh) + tail >= cutoff) return too_slow();
    if (fixed_.stages) {
      c->strategy.stages = stages_;
      estimator_.check(c->strategy);
    } else if (!assign(estimator_, mesh, options_.memory, &c->strategy, &counters)) {
      return infeasible("no layer assignment fits in memory");
    }
    if (estimator_.lower_bound(c->strategy, mesh) >= std::min(cutoff, best)) return too_slow();
    c->estimate = estimator_.estimate(c->strategy, mesh);
    ++counters.estimated;
    if (options_.memory && !c->estimate.fits) return infeasible(c->estimate.reason);
    return c->estimate.step < best;
  }

  void refine_all() {
    std::vector<Candidate>& ranked = result_.ranked;
    std::vector<Finalist> finalists(std::min(kFinalists, ranked.size()));
    const auto count = static_cast<int>(finalists.size());
    const auto each = [&](const auto& improve) {
      parallel_for(count, options_.threads, [&](int i) {
        if (!options_.deadline.over()) improve(&ranked[i], &finalists[i].counters);
      });
    };
    const bool place = !fixed_.devices && !fixed_.stages;
    if (place && nodes_.kinds > 1 && options_.anneal_steps > 0)
      each([&](Candidate* c, SearchCounters* counters) {
        *c = anneal_placement(estimator_, *c, options_.memory, options_.seed, options_.anneal_steps,
                              counters);
      });
    if (place) try_placements(&finalists);
    if (!fixed_.stages)
      each([&](Candidate* c, SearchCounters* counters) {
        polish(estimator_, options_.memory, c, counters);
      });
    for (const Finalist& f : finalists) result_.counters += f.counters;
  }

  struct Finalist {
    Candidate start;
    Seconds tail;                              // of its first bound
    std::vector<std::vector<int>> placements;  // others
    std::atomic<Seconds> least;                // of those that were looked at
    std::mutex mutex;                          // of what follows
    Candidate best;
    size_t at;  // its placement; how many there are: that of the start
    SearchCounters counters;
  };

  // The best of other placements of finalists, of equally good ones the first.
  void try_placements(std::vector<Finalist>* finalists) {
    const int devices = estimator_.cluster().size();
    const int64_t limit = options_.enumerate_limit * kFewDevices / std::max(kFewDevices, devices);
    std::vector<std::pair<Finalist*, size_t>> all;
    for (size_t i = 0; i < finalists->size(); ++i) {
      Finalist& f = (*finalists)[i];
      f.start = f.best = result_.ranked[i];
      const Strategy& s = f.start.strategy;
      f.tail = first_bound_.tail(s);
      if (limit > 0)
        enumerate_placements(estimator_.cluster(), s.pp, s.dp, s.tp * s.cp, limit,
                             [&](const std::vector<int>& of) { f.placements.push_back(of); });
      f.least = f.start.estimate.step;
      f.at = f.placements.size();
      for (size_t k = 0; k < f.placements.size(); ++k) all.emplace_back(&f, k);
    }
    parallel_for(static_cast<int>(all.size()), options_.threads, [&](int i) {
      if (!options_.deadline.over()) try_placement(all[i].second, all[i].first);
    });
    for (size_t i = 0; i < finalists->size(); ++i)
      result_.ranked[i] = std::move((*finalists)[i].best);
  }

  void try_placement(size_t at, Finalist* f) const {
    Candidate next = f->start;
    next.strategy.devices = f->placements[at];
    SearchCounters counters;
    const bool better = complete_placed(f->tail, f->least, &next, &counters) &&
                        next.estimate.step < f->start.estimate.step;
    const std::lock_guard lock(f->mutex);
    f->counters += counters;
    if (!better || next.estimate.step > f->least || (next.estimate.step == f->least && at > f->at))
      return;
    f->least = next.estimate.step;
    f->best = std::move(next);
    f->at = at;
  }

  // Micro-batches, layers and estimate of a finalist placed otherwise. Whether it fits and may take
  // no longer than `least`.
  bool complete_placed(Seconds tail, Seconds least, Candidate* c, SearchCounters* counters) const {
    const Mesh mesh = estimator_.mesh(c->strategy);
    if (!give_micro_batches(estimator_, options_.global_batch, mesh, &c->strategy) ||
        placed_bound(estimator_, c->strategy, mesh) + tail > least ||
        !assign(estimator_, mesh, options_.memory, &c->strategy, counters) ||
        estimator_.lower_bound(c->strategy, mesh) > least)
      return false;
    c->estimate = estimator_.estimate(c->strategy, mesh);
    ++counters->estimated;
    return c->estimate.fits || !options_.memory;
  }

  const Estimator& estimator_;
  const SearchOptions& options_;
  const Fixed& fixed_;
  const Nodes nodes_;
  std::vector<int> stages_;  // fixed, of all layers
  FirstBound first_bound_;
  std::mutex placed_mutex_;
  std::map<std::tuple<int, int, int, int>, std::vector<Placed>> placed_;
  SearchResult result_;
  std::string tightest_;  // why the last one does not fit
};

}  // namespace

SearchCounters& SearchCounters::operator+=(const SearchCounters& other) {
  enumerated += other.enumerated;
  bounded += other.bounded;
  infeasible += other.infeasible;
  estimated += other.estimated;
  assign_solves += other.assign_solves;
  return *this;
}

std::vector<int> divisors(int n) {
  std::vector<int> result;
  for (int d = 1; d <= n; ++d)
    if (n % d == 0) result.push_back(d);
  return result;
}

std::vector<int> expand_stages(const Model& model, std::vector<int> stages) {
  const std::vector<bool> block = model.blocks();
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

SearchResult search(const Estimator& estimator, const SearchOptions& options) {
  return Search(estimator, options).run();
}

}  // namespace motley::grid

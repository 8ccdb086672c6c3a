#include "planner/stage_programs.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "plan/pipeline.h"
#include "planner/arrangement.h"
#include "planner/program_plan.h"
#include "planner/shape.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

// Of programs with all parameters cut, of which many are about as good: states of each step.
constexpr int64_t kLeanStates = 50;

constexpr int kHalvings = 3;  // of the number of blocks that may have to be computed again
constexpr int kAttempts = 4;  // to fit a stage's program into the memory that is left
// Times what a program may take that is fitted into memory, for one to be searched for at all.
constexpr double kRoughly = 1.5;
// Times the time of the best program.
constexpr double kHardlySlower = 1.02, kLittleSlower = 1.1;

AlternationOptions lean_of(AlternationOptions options) {
  options.restriction = spmd::Restriction::zero;
  options.limits.max_states = std::min(options.limits.max_states, kLeanStates);
  options.limits.max_sweeps = options.limits.sweeps;
  return options;
}

}  // namespace

std::vector<int> StagePrograms::numbers_of(const PipelinePlan& plan,
                                           const std::vector<std::string>& strategies) {
  std::vector<int> numbers;
  for (int s = 0; s < plan.stages(); ++s) {
    if (const int like = plan.like(s); like < s && strategies[like] == strategies[s]) {
      numbers.push_back(numbers[like]);
      continue;
    }
    std::string text = strategies[s] + "\n" + to_text(anonymous(plan.graph(s)));
    const std::lock_guard lock(mutex_);
    numbers.push_back(
        numbers_.try_emplace(std::move(text), static_cast<int>(numbers_.size())).first->second);
  }
  return numbers;
}

StagePrograms::StageKey StagePrograms::key_of(const StageTask& t) {
  return {t.number,    t.group->number, t.stages_per_device, t.micro_batches,
          t.in_flight, t.again,         t.thorough,          t.divided};
}

int StagePrograms::find(const std::vector<StageTask>& tasks, std::vector<const Planned*>* found,
                        std::string* why, Draft* draft) {
  found->assign(tasks.size(), nullptr);
  std::map<StageKey, Planned>& stages = draft ? draft->stages_ : stages_;
  // What is found for one stage helps the next on a group of its kind; kinds are independent.
  struct Chain {
    std::vector<int> tasks;  // on groups that look alike, in order
    int failed = -1;         // the first in whose way something is
    std::string why;
  };
  std::vector<Chain> chains;
  std::map<int, size_t> chain_of;  // [group]
  std::vector<StageTask> fresh;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const size_t chain = chain_of.try_emplace(tasks[i].group->number, chains.size()).first->second;
    if (chain == chains.size()) chains.emplace_back();
    chains[chain].tasks.push_back(static_cast<int>(i));
    if (known_of(key_of(tasks[i]), draft) == nullptr) fresh.push_back(tasks[i]);
  }
  // In turn, nothing is searched for behind the first strategy that does not fit.
  const bool in_turn =
      request_.threads == 1 && std::none_of(tasks.begin(), tasks.end(),
                                            [](const StageTask& t) { return t.strategy.empty(); });
  if (!in_turn) plan_unlimited(fresh, draft && draft->backwards);
  std::atomic<int> first_failed = static_cast<int>(chains.size());  // in turn
  parallel_for(static_cast<int>(chains.size()), threads_, [&](int c) {
    for (int i : chains[c].tasks) {
      if (in_turn && first_failed < c) break;
      const StageKey key = key_of(tasks[i]);
      std::unique_lock lock(mutex_);
      const Planned* known = known_of(key, draft);
      lock.unlock();
      Planned refused;
      if (known == nullptr) {
        Planned planned;
        StageTask task = tasks[i];
        for (int held : std::set<int, std::greater<>>{task.in_flight, task.fewer, 1}) {
          task.in_flight = held;
          planned = plan(task);
          if (planned.feasible || effort_ != Effort::all) break;
        }
        lock.lock();
        if (planned.feasible || effort_ == Effort::all) {
          known = &stages.try_emplace(key, std::move(planned)).first->second;
        } else {
          refused = std::move(planned);
          if (draft) draft->refused_.insert(key);
        }
        lock.unlock();
      }
      (*found)[i] = known;
      const Planned& answer = known ? *known : refused;
      if (answer.feasible) continue;
      chains[c].failed = i;
      chains[c].why = answer.reason;
      if (answer.slow) was_slow_ = true;
      for (int first = first_failed; c < first && !first_failed.compare_exchange_weak(first, c);) {
      }
      break;
    }
  });
  for (const Chain& chain : chains)
    if (chain.failed >= 0) {
      *why = chain.why;
      return chain.failed;
    }
  return -1;
}

const Planned* StagePrograms::known_of(const StageKey& key, const Draft* draft) const {
  if (const auto it = stages_.find(key); it != stages_.end()) return &it->second;
  if (draft == nullptr) return nullptr;
  const auto it = draft->stages_.find(key);
  return it != draft->stages_.end() ? &it->second : nullptr;
}

bool StagePrograms::holds(const Draft& draft) const {
  return std::none_of(draft.refused_.begin(), draft.refused_.end(),
                      [&](const StageKey& key) { return stages_.count(key) > 0; });
}

void StagePrograms::take(Draft&& draft) { stages_.merge(draft.stages_); }

const Planned* StagePrograms::unlimited(const StageTask& task, bool lean, solver::WarmStart* warm,
                                        bool wait) {
  lean = lean && task.strategy.empty();  // else it says what is cut
  std::unique_lock lock(mutex_);
  Unlimited& entry = unlimited_[{task.number, task.group->number, task.micro_batches, lean}];
  lock.unlock();
  std::unique_lock its(entry.mutex, std::defer_lock);
  if (wait)
    its.lock();
  else if (!its.try_lock())
    return nullptr;
  double no_price = 0;
  if (!entry.known) entry.planned = search(task, task.group->model, false, lean, &no_price, warm);
  entry.known = true;
  return &entry.planned;
}

Planned StagePrograms::search(const StageTask& task, const CostModel& model, bool memory_limit,
                              bool lean, double* memory_price, solver::WarmStart* warm) {
  request_.limits.deadline.check();
  AlternationOptions options = search_.options(task.micro_batches, warm);
  options.memory_limit = memory_limit;
  options.worth = kRoughly * task.worth / task.micro_batches;
  options.recompute = false;  // chosen when it is found (run_of)
  if (!task.strategy.empty())
    options = restricted(task.strategy, model.cluster(), std::move(options));
  else if (lean)
    options = lean_of(std::move(options));
  if (!task.ratios.empty()) options.ratios = task.ratios;
  return search_.find(*task.theory, model, std::move(options), memory_price);
}

bool StagePrograms::Run::fits() const { return lack() <= 0; }

Bytes StagePrograms::Run::lack() const {
  Bytes most = -std::numeric_limits<Bytes>::infinity();
  for (const Shortage& s : shortages) most = std::max(most, s.lack);
  return most;
}

Planned StagePrograms::as_run(const StageTask& task, Planned found, int blocks) {
  if (!found.feasible) return found;
  if (blocks > 0) {
    std::vector<int> block = spmd::blocks_of(task.theory->graph());
    std::vector<bool> chosen(1 + *std::max_element(block.begin(), block.end()), false);
    std::fill_n(chosen.begin(), blocks, true);
    Program again = spmd::recompute(*task.theory, found.program, block, chosen);
    if (again.steps.size() > found.program.steps.size()) found.blocks_again = blocks;
    found.program = std::move(again);
  }
  if (task.pieces() || found.in_pieces)
    found.program = spmd::hold_pieces(*task.theory, found.program);
  return found;
}

MemoryCost StagePrograms::memory_with(const StageTask& task, const Planned& planned,
                                      const ZeroShare& kept) const {
  const Shares shares(planned.ratios);
  return memory_of(*task.theory, planned.program, Fractions(task.group->cluster, shares),
                   task.group->model.types(), request_.optimizer, true, kept);
}

StagePrograms::Run StagePrograms::measured(const StageTask& task, Planned as_run) const {
  const Cluster& cluster = task.group->cluster;
  const Divided& divided = task.divided;
  // As if the pieces of all replicas were alike.
  ZeroShare kept;
  kept.share = divided.share;
  for (const Parameter& parameter : task.theory->graph().parameters) {
    if (divided.level == 1 || divided.level == 2)
      kept.optimizer.push_back(parameter.gradient.valid());
    if (divided.level == 2) kept.gradient.push_back(parameter.gradient.valid());
  }
  Run run{std::move(as_run), {}};
  const auto counted = std::make_shared<const MemoryCost>(memory_with(task, run.planned, kept));
  const MemoryCost& memory = *counted;
  if (kept.optimizer.empty() && kept.gradient.empty()) run.planned.memory = counted;
  const Shares shares(run.planned.ratios);
  const Fractions fractions(cluster, shares);
  const int types = task.group->model.types();
  const std::vector<Bytes> at_the_end = reduction_workspace(
      *task.theory, run.planned.program, task.exchanged_among, task.replicas, fractions, types);
  for (int t = 0; t < types; ++t) {
    const Bytes others = memory.sums[t] + task.fixed_bytes / task.stages_per_device,
                flying = (task.in_flight - 1) * memory.another(t, run.planned.all_again),
                // Beside the state: in a pass, or when gradients are summed.
        peak = std::max(memory.peak[t] + flying, memory.state[t] + at_the_end[t]);
    run.shortages.push_back({peak + others - cluster.types[t].memory / task.stages_per_device,
                             peak + others - memory.peak[t], memory.peak[t]});
  }
  return run;
}

StagePrograms::Run StagePrograms::run_of(const StageTask& task, const Planned& found) const {
  const auto with = [&](int blocks) { return measured(task, as_run(task, found, blocks)); };
  Run best;
  if (task.again != Again::always) {
    best = with(0);
    if (task.again == Again::never || best.fits()) return best;
  }
  const int blocks = count_blocks(task.theory->graph());
  // What is computed again at once saves nothing: the last block may as well stay.
  for (int most = blocks; most > 0 && most >= blocks - 1; --most) {
    Run run = with(most);
    if (run.planned.blocks_again == 0) break;  // all that is made is read by others
    if (run.fits()) {
      int low = task.again == Again::always ? most - 1 : 0;  // do not fit
      for (int i = 0; i < kHalvings && most - low > 1; ++i) {
        const int middle = (low + most) / 2;
        Run fewer = with(middle);
        if (fewer.fits())
          most = middle, run = std::move(fewer);
        else
          low = middle;
      }
      return run;
    }
    if (best.shortages.empty() || run.lack() < best.lack()) best = std::move(run);
  }
  Planned again = as_run(task, found);
  again.all_again = true;
  Run run = measured(task, std::move(again));
  return best.shortages.empty() || run.lack() < best.lack() ? run : best;
}

Planned StagePrograms::too_large(const StageTask& task, const Run& run) {
  Planned planned;
  for (size_t t = 0; t < run.shortages.size(); ++t)
    if (run.shortages[t].lack > 0)
      planned.reason +=
          fmt::format("{}{} lacks {}", planned.reason.empty() ? "" : ", ",
                      task.group->cluster.types[t].name, format_bytes(run.shortages[t].lack));
  return planned;
}

void StagePrograms::plan_unlimited(const std::vector<StageTask>& tasks, bool backwards) {
  std::vector<const StageTask*> distinct;  // the first of equal ones has most in flight
  std::set<std::tuple<int, int, int, bool>> known;
  for (const StageTask& t : tasks)
    if (known.emplace(t.number, t.group->number, t.micro_batches, t.pieces()).second)
      distinct.push_back(&t);
  if (backwards) std::reverse(distinct.begin(), distinct.end());
  // First what no other thread searches for already. Threads may be given while searches go on.
  std::vector<char> done(distinct.size(), false);
  for (const bool wait : {false, true})
    for (size_t i = 0; i < distinct.size();) {
      const int threads = threads_,
                count = threads == 1 ? 1 : static_cast<int>(distinct.size() - i);
      parallel_for(count, threads, [&](int k) {
        if (!done[i + k]) done[i + k] = plan_unlimited(*distinct[i + k], wait);
      });
      i += count;
    }
}

bool StagePrograms::plan_unlimited(const StageTask& task, bool wait) {
  solver::WarmStart warm;
  const Planned* best = unlimited(task, task.pieces(), &warm, wait);
  if (best == nullptr) return false;
  if (!request_.memory_limit || !best->feasible || task.pieces() || !task.strategy.empty() ||
      task.group->cluster.size() == 1 || effort_ == Effort::none || run_of(task, *best).fits())
    return true;
  return unlimited(task, true, &warm, wait) != nullptr;
}

Planned StagePrograms::plan(const StageTask& task) {
  const Theory& theory = *task.theory;
  const DeviceGroups::Kind& group = *task.group;
  Planned planned = *unlimited(task, task.pieces(), nullptr);
  if (!planned.feasible) return planned;
  if (!request_.memory_limit && task.again != Again::always) return as_run(task, planned);
  Run run = run_of(task, planned);
  if (!request_.memory_limit || run.fits()) return std::move(run.planned);
  if (!task.strategy.empty() || effort_ == Effort::none) return too_large(task, run);
  // `passes`: forward passes of a micro-batch; `hidden`: with as much of the reduction as a backward
  // pass can hide.
  const auto seconds_of = [&](const Planned& p, int passes = 1, bool hidden = false) {
    const Shares shares(p.ratios);
    const PhaseSeconds s = phase_seconds(theory, p.program, group.model,
                                         Fractions(group.cluster, shares), request_.optimizer);
    const Seconds reduction = hidden ? std::max(0.0, s.reduction - s.backward) : s.reduction;
    return s.forward * (p.all_again ? 2 : passes) + s.backward +
           (reduction + s.update) / task.micro_batches;
  };
  if (const Seconds all = task.micro_batches * seconds_of(planned, 1, true); all > task.worth) {
    planned.feasible = false;
    planned.slow = true;
    planned.reason = fmt::format("takes {:.3g} s a step even with more memory", all);
    return planned;
  }
  was_limited_ = true;
  // One that was found for a stage with more in flight does for its equals behind it: they are not
  // slower.
  std::unique_lock lock(mutex_);
  const std::tuple like(task.number, group.number, task.micro_batches, task.pieces());
  std::vector<Planned>& limited = limited_[like];
  Bytes& unfit = unfit_[like];
  double& memory_price = memory_price_[group.number];
  lock.unlock();
  for (const Planned& known : limited)
    if (Run again = run_of(task, known); again.fits()) return std::move(again.planned);
  // With all parameters cut: good enough if it is hardly slower, and better than nothing. Or that
  // gathered and scattered in every pass, where it does not fit, or only if it computes again.
  std::optional<Planned> lean;
  Planned cut;  // as it was found
  if (group.cluster.size() > 1 && !task.pieces()) {
    for (const bool in_pieces : {false, true}) {
      Planned next = *unlimited(task, true, nullptr);
      if (!next.feasible || (lean && !lean->again())) break;
      next.in_pieces = in_pieces;
      Run its = run_of(task, next);
      if (!its.fits() || (lean && seconds_of(*lean) <= seconds_of(its.planned))) continue;
      lean = std::move(its.planned);
      cut = std::move(next);
    }
    const double worse = task.thorough ? kHardlySlower : kLittleSlower;
    if (lean &&
        seconds_of(*lean) <= worse * seconds_of(planned, task.again == Again::never ? 1 : 2))
      return *lean;
  }
  if (effort_ == Effort::lean) return too_large(task, run);
  Cluster left = group.cluster;  // with the memory that other micro-batches leave
  solver::WarmStart warm;
  for (int attempt = 1; attempt < kAttempts; ++attempt) {
    const std::vector<Shortage>& shortages = run.shortages;
    const std::vector<Bytes> whole = memory_with(task, planned, {}).peak;
    for (size_t t = 0; t < left.types.size(); ++t) {
      const DeviceType& type = group.cluster.types[t];
      const Bytes most =
          std::max(0.0, type.memory / task.stages_per_device + whole[t] - shortages[t].peak);
      if (attempt == 1) left.types[t].memory = most;
      if (shortages[t].lack <= 0) continue;
      planned.reason = fmt::format("{} lacks {}", type.name, format_bytes(shortages[t].lack));
      left.types[t].memory =
          std::max(0.3 * left.types[t].memory,
                   std::min(attempt > 1 ? left.types[t].memory - shortages[t].lack : most,
                            most - shortages[t].others));
    }
    if (left.types.size() == 1 && left.types[0].memory < unfit) {
      planned.feasible = false;
      planned.reason = fmt::format("{} lacks {}", left.types[0].name,
                                   format_bytes(unfit - left.types[0].memory));
      break;
    }
    planned = search(task, CostModel(left, group.reductions, group.replicas), true, task.pieces(),
                     &memory_price, &warm);
    if (!planned.feasible) {
      unfit = std::max(unfit, left.types[0].memory + planned.excess);
      break;
    }
    run = run_of(task, planned);
    if (!run.fits()) continue;
    const bool slower = lean && seconds_of(*lean) < seconds_of(run.planned);
    limited.push_back(slower ? cut : planned);
    return slower ? *lean : std::move(run.planned);
  }
  if (lean) return *lean;
  if (!planned.feasible) return planned;
  planned.feasible = false;
  planned.reason =
      fmt::format("no program leaves room for {} micro-batches in flight", task.in_flight);
  return planned;
}

}  // namespace motley::planner

#include "planner/stage_programs.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "plan/pipeline.h"
#include "planner/program_plan.h"
#include "planner/shape.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

// Of programs with all parameters cut, of which many are about as good: states of each step.
constexpr int64_t kLeanStates = 50;

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
          t.in_flight, t.recompute,     t.thorough,          t.divided};
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
  options.recompute = false;  // all of a stage or nothing (StageChoice::recompute)
  if (!task.strategy.empty())
    options = restricted(task.strategy, model.cluster(), std::move(options));
  else if (lean)
    options = lean_of(std::move(options));
  if (!task.ratios.empty()) options.ratios = task.ratios;
  return search_.find(*task.theory, model, std::move(options), memory_price);
}

Planned StagePrograms::as_run(const StageTask& task, Planned planned) {
  if (task.pieces() && planned.feasible)
    planned.program = spmd::hold_pieces(*task.theory, planned.program);
  return planned;
}

std::vector<StagePrograms::Shortage> StagePrograms::shortage_of(
    const StageTask& task, const Planned& p, std::shared_ptr<const MemoryCost>* known) const {
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
  const Shares shares(p.ratios);
  const Fractions fractions(cluster, shares);
  const auto memory_with = [&](const Program& program, const ZeroShare& what) {
    return memory_of(*task.theory, program, fractions, task.group->model.types(),
                     request_.optimizer, true, what);
  };
  Program in_pieces;
  if (task.pieces() && p.feasible) in_pieces = spmd::hold_pieces(*task.theory, p.program);
  const Program& program = task.pieces() && p.feasible ? in_pieces : p.program;
  const auto counted = std::make_shared<const MemoryCost>(memory_with(program, kept));
  const MemoryCost& memory = *counted;
  if (known && kept.optimizer.empty() && kept.gradient.empty()) *known = counted;
  const int types = task.group->model.types();
  const std::vector<Bytes> at_the_end = reduction_workspace(
      *task.theory, program, task.exchanged_among, task.replicas, fractions, types);
  std::vector<Shortage> shortages;
  for (int t = 0; t < types; ++t) {
    const Bytes others = memory.sums[t] + task.fixed_bytes / task.stages_per_device,
                flying = (task.in_flight - 1) * memory.another(t, task.recompute),
                // Beside the state: in a pass, or when gradients are summed.
        peak = std::max(memory.peak[t] + flying, memory.state[t] + at_the_end[t]);
    shortages.push_back({peak + others - cluster.types[t].memory / task.stages_per_device,
                         peak + others - memory.peak[t], 0});
  }
  if (divided.level == 0) return shortages;
  const MemoryCost whole = memory_with(p.program, {});
  for (size_t t = 0; t < shortages.size(); ++t)
    shortages[t].divided = whole.peak[t] - memory.peak[t];
  return shortages;
}

bool StagePrograms::fits(const StageTask& task, const Planned& planned,
                         std::shared_ptr<const MemoryCost>* memory) const {
  const std::vector<Shortage> shortages = shortage_of(task, planned, memory);
  return std::all_of(shortages.begin(), shortages.end(),
                     [](const Shortage& r) { return r.lack <= 0; });
}

std::string StagePrograms::lack_of(const StageTask& task, const Planned& planned) const {
  const std::vector<Shortage> shortages = shortage_of(task, planned);
  std::string text;
  for (size_t t = 0; t < shortages.size(); ++t)
    if (shortages[t].lack > 0)
      text += fmt::format("{}{} lacks {}", text.empty() ? "" : ", ",
                          task.group->cluster.types[t].name, format_bytes(shortages[t].lack));
  return text;
}

Planned StagePrograms::too_large(const StageTask& task, Planned planned) const {
  planned.feasible = false;
  planned.reason = lack_of(task, planned);
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
      task.group->cluster.size() == 1 || effort_ == Effort::none || fits(task, *best))
    return true;
  return unlimited(task, true, &warm, wait) != nullptr;
}

Planned StagePrograms::plan(const StageTask& task) {
  const Theory& theory = *task.theory;
  const DeviceGroups::Kind& group = *task.group;
  Planned planned = *unlimited(task, task.pieces(), nullptr);
  std::shared_ptr<const MemoryCost> memory;
  if (!request_.memory_limit || !planned.feasible || fits(task, planned, &memory)) {
    planned = as_run(task, std::move(planned));
    planned.memory = std::move(memory);
    return planned;
  }
  if (!task.strategy.empty() || effort_ == Effort::none) return too_large(task, planned);
  // `hidden`: with as much of the reduction as a backward pass can hide.
  const auto seconds_of = [&](const Planned& p, bool hidden = false) {
    const Shares shares(p.ratios);
    const PhaseSeconds s = phase_seconds(theory, p.program, group.model,
                                         Fractions(group.cluster, shares), request_.optimizer);
    const Seconds reduction = hidden ? std::max(0.0, s.reduction - s.backward) : s.reduction;
    return s.forward * (task.recompute ? 2 : 1) + s.backward +
           (reduction + s.update) / task.micro_batches;
  };
  if (const Seconds all = task.micro_batches * seconds_of(planned, true); all > task.worth) {
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
    if (fits(task, known)) return as_run(task, known);
  // With all parameters cut: good enough if it is hardly slower, and better than nothing. Where
  // that does not fit, gathered and scattered in every pass.
  const Planned* lean = nullptr;
  Planned in_pieces;
  if (group.cluster.size() > 1 && !task.pieces()) {
    const Planned& cut = *unlimited(task, true, nullptr);
    if (cut.feasible && fits(task, cut)) {
      lean = &cut;
    } else if (cut.feasible) {
      in_pieces = cut;
      in_pieces.program = spmd::hold_pieces(theory, cut.program);
      if (fits(task, in_pieces)) lean = &in_pieces;
    }
    if (lean &&
        seconds_of(*lean) <= (task.thorough ? kHardlySlower : kLittleSlower) * seconds_of(planned))
      return *lean;
  }
  if (effort_ == Effort::lean) return too_large(task, planned);
  const auto better = [&](const Planned& p) {
    return lean && seconds_of(*lean) < seconds_of(p) ? *lean : p;
  };
  Cluster left = group.cluster;  // with the memory that other micro-batches leave
  solver::WarmStart warm;
  for (int attempt = 1; attempt < kAttempts; ++attempt) {
    const std::vector<Shortage> shortages = shortage_of(task, planned);
    for (size_t t = 0; t < left.types.size(); ++t) {
      const DeviceType& type = group.cluster.types[t];
      const Bytes most = std::max(0.0, type.memory / task.stages_per_device + shortages[t].divided);
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
    if (fits(task, planned)) {
      limited.push_back(better(planned));
      return as_run(task, limited.back());
    }
  }
  if (lean) return *lean;
  if (!planned.feasible) return planned;
  planned.feasible = false;
  planned.reason =
      fmt::format("no program leaves room for {} micro-batches in flight", task.in_flight);
  return planned;
}

}  // namespace motley::planner

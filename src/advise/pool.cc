#include "advise/pool.h"

#include <algorithm>

#include "cluster/part.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"

namespace motley::advise {

namespace {

constexpr int kKept = 4;  // plans of a variant

// Leaves out devices without work, so that the plan's cluster is what it needs. Returns the devices
// that stay, of the plan's cluster.
std::vector<int> compact(Plan* plan) {
  std::vector<int> working;
  for (int d = 0; d < plan->cluster.size(); ++d)
    if (!plan->pipeline || !plan->pipeline->seats(d).empty()) working.push_back(d);
  if (static_cast<int>(working.size()) == plan->cluster.size()) return working;
  const auto renumber = [&](std::vector<int>* devices) {
    for (int& d : *devices)
      d = static_cast<int>(std::lower_bound(working.begin(), working.end(), d) - working.begin());
  };
  for (ReplicaPlan& replica : plan->pipeline->replicas)
    for (StagePlan& stage : replica.stages) renumber(&stage.devices);
  // Those of all devices are of no stage, as some have none.
  std::erase_if(plan->reductions, [&](const ReductionProgram& r) {
    return r.devices.empty() ||
           !std::includes(working.begin(), working.end(), r.devices.begin(), r.devices.end());
  });
  for (ReductionProgram& r : plan->reductions) {
    renumber(&r.devices);
    if (r.devices.size() == working.size()) r.devices.clear();
  }
  plan->cluster = motley::part_of(plan->cluster, working);
  return working;
}

}  // namespace

Pool::Pool(const Question& question) : question_(question) {
  for (const auto& [type, t] : question.tariffs) {
    priced_ = priced_ || t.price > 0;
    powered_ = powered_ || t.watts > 0;
  }
}

const Tariff* Pool::tariff(const std::string& type) const {
  std::string name = type;
  while (!name.empty() && name.back() == '+') name.pop_back();  // a faster edition
  const auto it = question_.tariffs.find(name);
  return it == question_.tariffs.end() ? nullptr : &it->second;
}

double Pool::rate(const std::string& type) const {
  if (!priced_) return 1;
  const Tariff* t = tariff(type);
  return t ? t->price / 3600 : 0;
}

bool Pool::has_price(const std::string& type) const {
  const Tariff* t = tariff(type);
  return t && t->price > 0;
}

bool Pool::has_watts(const std::string& type) const {
  const Tariff* t = tariff(type);
  return t && t->watts > 0;
}

double Pool::spent(const Cost& cost) const { return cost.money; }

double Pool::value(const Cost& cost) const {
  switch (question_.objective) {
    case Objective::money:
      return cost.money;
    case Objective::energy:
      return cost.joules;
    case Objective::seconds:
      break;
  }
  return cost.step;
}

void Pool::add(const Variant& variant, planner::Candidate candidate) {
  if (kept_[variant.key]++ >= kKept) return;
  Known known;
  known.what = fmt::format("{}: {}", candidate.plan->engine, candidate.note);
  std::vector<int> devices = candidate.devices;
  if (candidate.plan->pipeline ||
      devices.size() != static_cast<size_t>(candidate.plan->cluster.size())) {
    devices.clear();
    for (int d = 0; d < candidate.plan->cluster.size(); ++d) devices.push_back(d);
  }
  known.plan = std::move(candidate.plan);
  for (const int d : compact(known.plan.get())) known.ids.push_back(variant.ids[devices[d]]);
  known_.push_back(std::move(known));
}

void Pool::failed(const Variant& variant, const std::string& reason) {
  reasons_[variant.key] = reason;
}

const Pool::Tried& Pool::tried(const Known& known, size_t number, const Variant& variant) {
  const auto [it, fresh] = tried_.try_emplace({number, variant.key});
  Tried& out = it->second;
  if (!fresh) return out;
  std::vector<int> devices;
  for (const int64_t id : known.ids) {
    const auto found = std::find(variant.ids.begin(), variant.ids.end(), id);
    if (found == variant.ids.end()) return out;
    devices.push_back(static_cast<int>(found - variant.ids.begin()));
  }
  if (!std::is_sorted(devices.begin(), devices.end())) return out;
  Cluster cluster = motley::part_of(variant.cluster, devices);
  std::vector<ReductionProgram> reductions = known.plan->reductions;
  reduce::reprice(known.plan->cluster, cluster, &reductions);
  std::swap(known.plan->reductions, reductions);
  std::swap(known.plan->cluster, cluster);
  const Simulation sim = simulate(*known.plan);
  out.fits = true;
  out.cost.step = sim.step;
  std::map<std::string, int> uses;
  for (int d = 0; d < known.plan->cluster.size(); ++d) {
    const DeviceType& type = known.plan->cluster.type_of(d);
    const DeviceTime& t = sim.devices[d];
    out.fits = out.fits && (!question_.options.memory_limit || t.peak_memory <= type.memory);
    ++uses[type.name];
    out.cost.money += rate(type.name) * sim.step;
    out.cost.money_known = out.cost.money_known && has_price(type.name);
    out.cost.joules_known = out.cost.joules_known && has_watts(type.name);
    if (const Tariff* costs = tariff(type.name)) {
      const Seconds idle = std::clamp(t.idle, 0.0, sim.step);
      out.cost.joules += costs->watts * (sim.step - idle) + costs->idle_watts * idle;
    }
  }
  std::swap(known.plan->cluster, cluster);
  std::swap(known.plan->reductions, reductions);
  out.uses.assign(uses.begin(), uses.end());
  return out;
}

template <typename Better>
Answer Pool::best(const Variant& variant, Better&& better, size_t* which) {
  const Tried* found = nullptr;
  for (size_t k = 0; k < known_.size(); ++k) {
    const Tried& t = tried(known_[k], k, variant);
    if (t.fits && (!found || better(t.cost, found->cost))) found = &t, *which = k;
  }
  Answer answer;
  answer.name = variant.name;
  answer.devices = variant.cluster.size();
  if (!found) {
    const auto it = reasons_.find(variant.key);
    answer.reason = it == reasons_.end() ? "no plan was found" : it->second;
    return answer;
  }
  answer.found = true;
  answer.cost = found->cost;
  answer.uses = found->uses;
  answer.plan = known_[*which].what;
  return answer;
}

Answer Pool::answer(const Variant& variant) {
  size_t which = 0;
  return best(
      variant,
      [&](const Cost& a, const Cost& b) {
        const auto late = [&](const Cost& c) {
          return question_.deadline > 0 && question_.objective != Objective::seconds &&
                 c.step > question_.deadline;
        };
        if (late(a) != late(b)) return late(b);
        return std::pair(late(a) ? a.step : value(a), a.step) <
               std::pair(late(b) ? b.step : value(b), b.step);
      },
      &which);
}

Answer Pool::cheapest(const Variant& variant, Seconds deadline) {
  size_t which = 0;
  Answer answer = best(
      variant,
      [&](const Cost& a, const Cost& b) {
        const bool late = a.step > deadline, other = b.step > deadline;
        if (late != other) return other;
        return late ? a.step < b.step : std::pair(spent(a), a.step) < std::pair(spent(b), b.step);
      },
      &which);
  if (answer.found && answer.cost.step > deadline) {
    answer.found = false;
    answer.reason =
        fmt::format("the fastest plan that was found takes {}", format_seconds(answer.cost.step));
  }
  return answer;
}

std::shared_ptr<Plan> Pool::plan_of(const Variant& variant) {
  const Answer answer = this->answer(variant);
  if (!answer.found) return nullptr;
  for (size_t k = 0; k < known_.size(); ++k) {
    const Tried& t = tried(known_[k], k, variant);
    if (t.fits && t.cost.step == answer.cost.step && known_[k].what == answer.plan) {
      std::vector<int> devices;
      for (const int64_t id : known_[k].ids)
        devices.push_back(static_cast<int>(std::find(variant.ids.begin(), variant.ids.end(), id) -
                                           variant.ids.begin()));
      Plan& plan = *known_[k].plan;
      Cluster cluster = motley::part_of(variant.cluster, devices);
      reduce::reprice(plan.cluster, cluster, &plan.reductions);
      plan.cluster = std::move(cluster);
      known_[k].plan->predicted_step_s = t.cost.step;
      return known_[k].plan;
    }
  }
  return nullptr;
}

}  // namespace motley::advise

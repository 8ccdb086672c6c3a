#include "planner/program_plan.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <set>

#include "bounds/compute_bound.h"
#include "cluster/part.h"
#include "core/error.h"
#include "core/ranges.h"

namespace motley::planner {

using namespace spmd;

Plan make_plan(Graph graph, const Cluster& cluster, const ProgramRequest& request,
               const Alternation& s) {
  Plan plan;
  plan.model = request.model;
  plan.batch = request.batch;
  plan.optimizer = request.synthesis.optimizer;
  plan.cluster = cluster;
  plan.ratios = s.ratios;
  plan.set_graph(std::move(graph));
  plan.program = s.program;
  plan.predicted_step_s = s.step();
  plan.lower_bound_s = s.lower_bound;
  for (int d = 0; d < cluster.size(); ++d)
    plan.peak_memory_bytes.push_back(s.cost.memory.peak[cluster.devices[d].type]);
  return plan;
}

namespace {

// Times the best step, of an answer for the whole cluster that is looked at again.
constexpr double kNearly = 1.1;

struct Known {
  const char* name;
  Restriction restriction;
  std::vector<double> (*ratios)(const Cluster&);
};
const Known kKnown[] = {{"dp-ev", Restriction::data_parallel, even_ratios},
                        {"dp-cp", Restriction::data_parallel, proportional_ratios},
                        {"zero", Restriction::zero, even_ratios},
                        {"expert-parallel", Restriction::expert_parallel, even_ratios},
                        {"tensor-parallel", Restriction::tensor_parallel, even_ratios}};

AlternationOptions restricted(const Known& known, const Cluster& cluster,
                              AlternationOptions options) {
  options.restriction = known.restriction;
  options.recompute = false;
  options.ratios = known.ratios(cluster);
  return options;
}

// Parts of a cluster that might be faster than all of it, each a list of devices.
std::vector<std::vector<int>> parts_of(const Cluster& cluster) {
  std::set<std::vector<int>> parts;
  auto add = [&](auto belongs) {
    std::vector<int> devices;
    for (int d = 0; d < cluster.size(); ++d)
      if (belongs(d)) devices.push_back(d);
    if (!devices.empty() && static_cast<int>(devices.size()) < cluster.size())
      parts.insert(std::move(devices));
  };
  for (const Group& g : cluster.groups)
    add([&](int d) { return d >= g.first_device && d < g.first_device + g.device_count; });
  for (const DeviceType& slowest : cluster.types) {
    add([&](int d) { return cluster.type_of(d).flops >= slowest.flops; });
    // The first device of the type.
    int first = 0;
    while (&cluster.type_of(first) != &slowest) ++first;
    add([&](int d) { return d == first; });
    // One group's devices of that speed.
    for (const Group& g : cluster.groups)
      add([&](int d) {
        return d >= g.first_device && d < g.first_device + g.device_count &&
               cluster.type_of(d).flops >= slowest.flops;
      });
  }
  return {parts.begin(), parts.end()};
}

}  // namespace

std::vector<std::string> strategies() {
  std::vector<std::string> names;
  for (const Known& known : kKnown) names.emplace_back(known.name);
  return names;
}

std::string part_in_words(const std::vector<int>& devices, int of, const std::string& cluster) {
  return fmt::format(
      "{} of the {} of {} ({}): with the others it would communicate longer than they save",
      devices.size(), of, cluster, format_ranges(devices));
}

ProgramResult plan_program(Graph graph, const Cluster& cluster, const ProgramRequest& request) {
  auto start = std::chrono::steady_clock::now();
  ProgramResult result;
  auto reductions_of = [&](const Cluster& c) {
    return request.reductions && request.strategy.empty() ? request.reductions(c)
                                                          : std::vector<ReductionProgram>{};
  };
  const std::vector<ReductionProgram> all_reductions = reductions_of(cluster);
  std::vector<ReductionProgram> reductions;
  const CostModel model(cluster, all_reductions), plain(cluster);
  Alternation best;
  auto take_all = [&] {
    reductions = all_reductions;
    result.devices.resize(cluster.size());
    std::iota(result.devices.begin(), result.devices.end(), 0);
  };
  take_all();
  Cluster chosen = cluster;
  {
    Theory theory(graph);
    AlternationOptions options = request.synthesis;
    if (!request.strategy.empty()) {
      const Known* known = std::find_if(std::begin(kKnown), std::end(kKnown),
                                        [&](const Known& k) { return request.strategy == k.name; });
      if (known == std::end(kKnown))
        throw user_error("plan", "there is no strategy '{}'; give one of {}", request.strategy,
                         fmt::join(strategies(), ", "));
      options = restricted(*known, cluster, options);
    }
    const bool free = options.restriction == Restriction::none && options.ratios.empty();
    options.overlap = true;
    // Keeps the better of the best so far and a new one.
    const Deadline deadline = options.limits.deadline;
    // A synthesis, or that there was no time for it.
    auto synthesized = [&](const CostModel& costs, const AlternationOptions& how) {
      Alternation s;
      s.reason = "time ran out before a plan was found";
      if (deadline.over()) return s;
      try {
        return alternate(theory, costs, how);
      } catch (const TimeIsUp&) {
        return s;
      }
    };
    auto search = [&](const CostModel& costs, Seconds below) {
      options.certify_below = below;
      Alternation s = synthesized(costs, options);
      s.solves += best.solves;
      s.states += best.states;
      // The same answer may now be certified.
      const bool better = s.feasible && (!best.feasible || s.step() < best.step() ||
                                         (s.step() == best.step() && best.lower_bound == 0));
      if (better) {
        best = std::move(s);
        chosen = costs.cluster();
      } else {
        best.solves = s.solves;
        best.states = s.states;
        if (!best.feasible && best.reason.empty()) best.reason = s.reason;
      }
      return better;
    };
    constexpr Seconds kAny = std::numeric_limits<Seconds>::infinity();
    const bool parts = request.parts && free;
    // Whether the answer for the whole cluster matters is known after that for its parts.
    search(model, parts ? 0 : kAny);
    const Seconds whole = best.feasible ? best.step() : kAny;
    if (parts) {
      for (const std::vector<int>& devices : parts_of(cluster)) {
        if (deadline.over()) break;
        const Cluster part = part_of(cluster, devices);
        if (best.feasible && bounds::compute_bound(theory, CostModel(part)) >= best.step())
          continue;
        std::vector<ReductionProgram> its_reductions = reductions_of(part);
        if (search(CostModel(part, its_reductions), best.feasible ? best.step() : kAny)) {
          reductions = std::move(its_reductions);
          result.devices = devices;
        }
      }
      if (whole <= kNearly * best.step() && search(model, kNearly * best.step())) take_all();
    }
    result.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    Alternation rival;
    if (request.baselines)
      for (const Known& known : kKnown) {
        AlternationOptions of_baseline = restricted(known, cluster, request.synthesis);
        of_baseline.overlap = true;
        of_baseline.certify = false;
        Alternation s = synthesized(plain, of_baseline);
        result.baselines.push_back(
            {known.name, s.feasible, s.feasible ? s.step() : 0, s.feasible ? "" : s.reason});
        if (s.feasible && (!rival.feasible || s.step() < rival.step())) rival = std::move(s);
      }
    if (free && rival.feasible && !(best.feasible && best.step() <= rival.step())) {
      options.ratios = rival.ratios[0];
      options.known = &rival;
      if (search(plain, best.feasible ? best.step() : kAny)) {
        take_all();
        reductions.clear();
      }
      result.search_s += best.seconds;
    }
    result.synchronised_bound_s = best.synchronised_bound;
    result.hidden_s = best.hidden;
  }
  result.feasible = best.feasible;
  result.reason = best.reason;
  result.solves = best.solves;
  result.states = best.states;
  if (!best.feasible) return result;
  result.plan = make_plan(std::move(graph), chosen, request, best);
  const auto largest =
      static_cast<Bytes>(largest_all_reduce(*result.plan.theory, result.plan.program));
  std::erase_if(reductions, [&](const ReductionProgram& r) { return r.from > largest; });
  result.plan.reductions = std::move(reductions);
  return result;
}

}  // namespace motley::planner

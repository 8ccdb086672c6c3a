#include "advise/advise.h"

#include <algorithm>
#include <limits>
#include <map>

#include "advise/pool.h"
#include "bounds/compute_bound.h"
#include "cluster/part.h"
#include "cluster/resources.h"
#include "core/error.h"

namespace motley::advise {

namespace {

constexpr size_t kGroups = 6;  // of devices, the largest, that are looked at one by one
constexpr size_t kParts = 64;  // of the cluster, for the cheapest
constexpr double kOverhead =
    0.85;  // of a part of the time: planning starts and simulations come on top

class Adviser {
 public:
  explicit Adviser(const Question& question)
      : question_(question),
        deadline_(question.options.limits.deadline),
        next_(question.cluster.size()),
        pool_(question) {}

  Advice run(std::unique_ptr<Plan> known) {
    Advice advice;
    const Variant now = unchanged(question_.cluster);
    std::vector<Variant> edits;
    for (const std::string& text : question_.edits) edits.push_back(edited(now, text, &next_));
    require_tariffs(now.cluster, question_.cluster.name, question_.deadline > 0 && pool_.priced());
    for (const Variant& v : edits) require_tariffs(v.cluster, v.name, false);
    struct Group {
      DeviceGroup group;
      std::vector<int> machine;
      std::optional<Variant> without, lending, replaced;
    };
    std::vector<Group> groups;
    for (DeviceGroup& group : largest_groups()) {
      Group g{std::move(group), {}, {}, {}, {}};
      g.machine = last_machine(g.group);
      g.without = less(now, g.group.devices, "without " + g.group.name);
      g.lending = less(now, g.machine, "without a machine of " + g.group.name);
      if (const DeviceType best = best_type(); best.name != g.group.type)
        g.replaced = replaced(now, g.group.devices, best, best.name, &next_);
      groups.push_back(std::move(g));
    }
    double weights =
        3 + 2 * static_cast<double>(edits.size()) + 2.5 * static_cast<double>(groups.size());
    if (question_.deadline > 0) weights += 4;
    const auto plan = [&](const Variant& v, double weight) {
      find(v, weight / weights, &advice.out_of_time);
      weights -= weight;
    };
    if (known) {
      planner::Candidate candidate;
      candidate.plan = std::move(known);
      candidate.note = "the plan as it is";
      pool_.add(now, std::move(candidate));
      weights -= 3;
    } else {
      plan(now, 3);
    }
    for (const Variant& v : edits) plan(v, 2);
    for (const Group& g : groups) {
      if (g.without) plan(*g.without, 1);
      if (g.lending) plan(*g.lending, 0.5);
      if (g.replaced) plan(*g.replaced, 1);
    }
    if (question_.deadline > 0) plan_parts(now, &advice);
    advice.now = pool_.answer(now);
    for (const Variant& v : edits) advice.edits.push_back(pool_.answer(v));
    for (const Group& g : groups) {
      Worth worth{g.group.name, static_cast<int>(g.group.devices.size()), {}, 0, {}, {}, {}};
      if (g.without) worth.without = pool_.answer(*g.without);
      worth.lent = static_cast<int>(g.machine.size());
      if (g.lending) worth.lending = pool_.answer(*g.lending);
      if (g.replaced)
        worth.replacement = g.replaced->name, worth.replaced = pool_.answer(*g.replaced);
      advice.groups.push_back(std::move(worth));
    }
    if (question_.deadline > 0) advice.cheapest = pool_.cheapest(now, question_.deadline);
    advice.priced = pool_.priced();
    advice.powered = pool_.powered();
    advice.plan = pool_.plan_of(now);
    verdicts(&advice);
    return advice;
  }

 private:
  std::vector<DeviceGroup> largest_groups() const {
    std::vector<DeviceGroup> groups;
    if (question_.groups) groups = device_groups(question_.cluster);
    std::stable_sort(groups.begin(), groups.end(), [](const DeviceGroup& a, const DeviceGroup& b) {
      return a.devices.size() > b.devices.size();
    });
    if (groups.size() > kGroups) groups.resize(kGroups);
    return groups;
  }

  // The devices of a group in its last machine.
  std::vector<int> last_machine(const DeviceGroup& group) const {
    const GroupId machine = question_.cluster.devices[group.devices.back()].parent;
    std::vector<int> devices;
    for (const int d : group.devices)
      if (question_.cluster.devices[d].parent == machine) devices.push_back(d);
    if (question_.cluster.groups[machine.index].parent.valid()) return devices;
    return {group.devices.back()};  // a flat cluster
  }

  std::optional<Variant> less(const Variant& v, const std::vector<int>& gone,
                              const std::string& name) const {
    std::vector<int> keep;
    for (int d = 0; d < v.cluster.size(); ++d)
      if (!std::binary_search(gone.begin(), gone.end(), d)) keep.push_back(d);
    if (keep.empty()) return std::nullopt;
    return advise::part_of(v, keep, name);
  }

  FlopsPerSecond speed(const DeviceType& type) const {
    return question_.options.precision == DType::f32 ? type.flops : type.half_flops;
  }
  // The fastest of which is known what is to be least.
  DeviceType best_type() const {
    DeviceType best = question_.cluster.types[0];
    for (const auto* list : {&question_.cluster.types, &device_catalogue()})
      for (const DeviceType& t : *list)
        if (speed(t) > speed(best) && missing(t.name, false).empty()) best = t;
    return best;
  }

  // What has to be known of a type and is not: a price, watts; empty: nothing.
  std::string missing(const std::string& type, bool price) const {
    if ((price || question_.objective == Objective::money) && !pool_.has_price(type))
      return "price";
    return question_.objective == Objective::energy && !pool_.has_watts(type) ? "watts" : "";
  }
  void require_tariffs(const Cluster& cluster, const std::string& where, bool price) const {
    for (const DeviceType& type : cluster.types)
      if (const std::string field = missing(type.name, price); !field.empty())
        throw user_error("advise",
                         "{}: the {} of {} is not given; give device_types: [{{name: {}, {}: {}}}] "
                         "in the cluster file",
                         where, field, type.name, type.name, field,
                         field == "price" ? "1.10" : "400");
  }

  void find(const Variant& v, double part, bool* out_of_time) {
    const Deadline share = deadline_.part(std::min(1.0, part) * kOverhead);
    if (deadline_.over()) {
      *out_of_time = true;
      pool_.failed(v, "there was no time to plan");
      return;
    }
    planner::PlanOptions options = question_.options;
    options.limits.deadline = share;
    if (v.cluster.size() < 2) options.redundancy = 0;
    planner::PlanReport report = planner::plan(question_.graph_of, v.cluster, options);
    *out_of_time = *out_of_time || report.out_of_time;
    if (report.candidates.empty())
      pool_.failed(
          v, report.out_of_time ? "no plan was found in time: " + report.reason : report.reason);
    for (planner::Candidate& c : report.candidates) pool_.add(v, std::move(c));
  }

  // Parts of the cluster by how many machines of each group they have, cheapest first.
  void plan_parts(const Variant& now, Advice* advice) {
    struct Part {
      double rate;  // money, or devices, in a second
      std::vector<int> devices;
    };
    std::vector<std::vector<std::vector<int>>> choices;  // [group][choice] devices
    for (const DeviceGroup& group : device_groups(question_.cluster)) {
      std::map<int64_t, std::vector<int>> machines;
      const bool flat =
          !question_.cluster.groups[question_.cluster.devices[group.devices[0]].parent.index]
               .parent.valid();
      for (const int d : group.devices)
        machines[flat ? d : question_.cluster.devices[d].parent.index].push_back(d);
      std::vector<std::vector<int>> counts = {{}};
      const size_t n = machines.size();
      std::vector<size_t> wanted;
      for (size_t k = 1; k < n; k = k < 3 ? k + 1 : 2 * k) wanted.push_back(k);
      wanted.push_back(n);
      for (const size_t k : wanted) {
        std::vector<int> devices;
        size_t taken = 0;
        for (const auto& [id, list] : machines)
          if (taken++ < k) devices.insert(devices.end(), list.begin(), list.end());
        counts.push_back(devices);
      }
      choices.push_back(std::move(counts));
    }
    std::vector<Part> parts = {{0, {}}};
    for (const auto& counts : choices) {
      std::vector<Part> next;
      for (const Part& part : parts)
        for (const auto& devices : counts) {
          Part more = part;
          more.devices.insert(more.devices.end(), devices.begin(), devices.end());
          next.push_back(std::move(more));
        }
      parts = std::move(next);
      if (parts.size() > 4096) parts.resize(4096);
    }
    std::erase_if(parts, [&](const Part& p) {
      return p.devices.empty() || static_cast<int>(p.devices.size()) == question_.cluster.size();
    });
    for (Part& part : parts) {
      std::sort(part.devices.begin(), part.devices.end());
      for (const int d : part.devices) part.rate += pool_.rate(question_.cluster.type_of(d).name);
    }
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& a, const Part& b) { return a.rate < b.rate; });
    const Graph graph = question_.graph_of(question_.options.batch);
    const Theory theory(graph);
    size_t left = std::min(parts.size(), kParts);
    for (const Part& part : parts) {
      if (left == 0) break;
      const Variant v = advise::part_of(now, part.devices, "a part");
      const Seconds bound = bounds::compute_bound(theory, CostModel(v.cluster), 1);
      const std::optional<Answer> best = pool_.cheapest(now, question_.deadline);
      if (bound > question_.deadline ||
          (best && best->found && part.rate * bound >= pool_.spent(best->cost))) {
        ++advice->parts_bounded;
        continue;
      }
      --left;
      ++advice->parts_planned;
      find(v, 1.0 / static_cast<double>(std::max<size_t>(left, 3)), &advice->out_of_time);
    }
  }

  // Which group to leave out, lend and replace first.
  void verdicts(Advice* advice) const {
    const auto value = [&](const Answer& a) {
      return a.found ? pool_.value(a.cost) : std::numeric_limits<double>::infinity();
    };
    const double now = value(advice->now);
    double least = std::numeric_limits<double>::infinity(), lent = least, best = now;
    for (const Worth& w : advice->groups) {
      // What a group's devices are worth, each.
      if (const double loss = value(w.without) - now; w.without.found && loss / w.devices < least)
        least = loss / w.devices, advice->leave_out = w.group;
      if (const double loss = value(w.lending) - now; w.lending.found && loss / w.lent < lent)
        lent = loss / w.lent, advice->lend = w.group;
      if (value(w.replaced) < best) best = value(w.replaced), advice->replace = w.group;
    }
  }

  const Question& question_;
  const Deadline deadline_;
  int64_t next_;
  Pool pool_;
};

}  // namespace

Advice advise(const Question& question, std::unique_ptr<Plan> known) {
  return Adviser(question).run(std::move(known));
}

}  // namespace motley::advise

#include "planner/parts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "bounds/certify.h"
#include "cluster/part.h"
#include "core/error.h"

namespace motley::spmd {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kMostChoices = 200;            // of devices, that are bounded one by one
constexpr int64_t kPlainStates = 20'000;     // of one game
constexpr int64_t kClassStates = 3'000'000;  // of one box that classes of programs are looked at in
constexpr int kWideBoxes = 4;                // divisions of a box before classes are looked at
constexpr int kDivisions = 20;               // of a box in all
// Of the step, that a box of half the size has to gain; so many that did not are enough.
constexpr double kIdle = 5e-4;
constexpr int kMostIdle = 4;
constexpr double kAlike = 0.98;  // all-reduces of different numbers of devices

}  // namespace

LeastSeconds::LeastSeconds(const Theory& theory, const CostModel& model)
    : operators_(theory.tables()), all_(model.types(), 0) {
  for (size_t n = 0; n < theory.graph().nodes.size(); ++n) {
    const NodeId node(static_cast<int64_t>(n));
    Operators& op = operators_[theory.table(node)];
    if (op.times++ == 0) {
      op.seconds.assign(model.types(), kInfinity);
      for (const Triple& triple : theory.triples(node)) {
        const Work work = work_of(theory, node, triple);
        for (int t = 0; t < model.types(); ++t)
          op.seconds[t] = std::min(op.seconds[t], model.compute(t, work, 1));
      }
    }
    for (int t = 0; t < model.types(); ++t) all_[t] += op.seconds[t];
  }
}

Seconds LeastSeconds::of(const std::vector<int>& count) const {
  if (*std::min_element(all_.begin(), all_.end()) <= 0) return 0;
  double speed = 0;  // of all devices, in models a second
  for (size_t t = 0; t < count.size(); ++t) speed += count[t] / all_[t];
  if (speed == 0) return kInfinity;
  Seconds least = 0;
  for (const Operators& op : operators_) {
    if (op.times == 0) continue;
    Seconds share = kInfinity;
    for (size_t t = 0; t < count.size(); ++t)
      if (count[t] > 0) share = std::min(share, op.seconds[t] / all_[t] / speed);
    least += op.times * share;
  }
  return least;
}

namespace {

// What searches for one certificate share.
struct Common {
  const Theory* theory;
  const SynthesisOptions* options;
  Seconds step;
  OrderMemo orders;
  std::vector<int64_t> sizes;  // of what may be cut, ascending
  int searched = 0;
  int64_t states = 0, most_states = 0;

  Common(const Theory& the_theory, const SynthesisOptions& the_options, Seconds the_step,
         int64_t the_most_states)
      : theory(&the_theory), options(&the_options), step(the_step), most_states(the_most_states) {
    std::set<int64_t> all;
    for (size_t v = 0; v < theory->graph().values.size(); ++v)
      for (Placement p : theory->placements(ValueId(v)))
        if (p.is_shard()) all.insert(theory->cut(ValueId(v), p).size);
    sizes.assign(all.begin(), all.end());
  }
  Seconds enough() const { return (1 - kWideGap) * step; }
  bool spent() const { return states >= most_states; }
};

// Devices of which the shares are not known: branch and bound over boxes of the shares of all
// devices of a type together.
class Boxes {
 public:
  // `count` [type] devices, those of the cluster; or, of choices of devices together, the most that
  // there may be. `floor`: a bound that is known.
  Boxes(Common* common, std::shared_ptr<const CostModel> model, std::vector<int> count,
        bool together, Seconds floor)
      : common_(*common),
        model_(std::move(model)),
        count_(std::move(count)),
        together_(together),
        builder_(*common->theory, *model_, common->options->optimizer) {
    const Shares even(even_ratios(model_->cluster()));
    builder_.price(Fractions(model_->cluster(), even));
    certifier_.emplace(*common->theory, *model_, common->options->optimizer, Restriction::none,
                       common->options->limits, &builder_, &common_.orders.of(builder_.problem()),
                       &warm_, &pool_);
    const size_t types = count_.size();
    boxes_.push_back({std::vector<double>(types, 0), std::vector<double>(types, 1), floor, floor});
    tighten(&boxes_[0]);
    evaluate(&boxes_[0], false);
  }

  Seconds bound() const { return std::min(least()->bound, common_.step); }
  // Whether more searches may raise the bound.
  bool open() const { return !least()->done; }
  int divisions() const { return least()->divisions; }

  // Looks closer where the bound is least. REQUIRES: open().
  void raise() {
    const auto box = boxes_.begin() + (least() - boxes_.begin());
    const bool point = count_.size() == 1;
    if (point || (box->divisions >= kWideBoxes && !box->classes)) {
      box->classes = true;
      evaluate(&*box, true);
      // Where classes of programs find no more in smaller boxes, it is not for the size of the box.
      box->idle = box->bound - box->above > kIdle * common_.step ? 0 : box->idle + 1;
      box->above = box->bound;
      box->done = box->bound < common_.enough() &&
                  (point || box->divisions >= kDivisions || box->idle >= kMostIdle);
      return;
    }
    Box a = *box, b = *box;
    boxes_.erase(box);
    size_t widest = 0;
    for (size_t t = 1; t < count_.size(); ++t)
      if (a.most[t] - a.least[t] > a.most[widest] - a.least[widest]) widest = t;
    a.most[widest] = b.least[widest] = between(a, widest);
    for (Box* half : {&a, &b}) {
      ++half->divisions;
      half->classes = false;
      if (!tighten(half)) continue;
      evaluate(half, false);
      boxes_.push_back(*half);
    }
  }

 private:
  struct Box {
    std::vector<double> least, most;  // [type] share of all devices of the type
    Seconds bound;
    Seconds above;  // that classes of programs found last, for a box around it
    int divisions = 0, idle = 0;
    bool classes = false, done = false;
  };

  std::vector<Box>::const_iterator least() const {
    return std::min_element(boxes_.begin(), boxes_.end(),
                            [](const Box& a, const Box& b) { return a.bound < b.bound; });
  }

  // Where to divide a box: where the pieces of the smallest size change that do so inside, nearest
  // to its middle.
  double between(const Box& box, size_t type) const {
    const double from = box.least[type], to = box.most[type], middle = (from + to) / 2;
    for (int64_t size : common_.sizes) {
      double nearest = 0;
      for (size_t t = 0; t < count_.size() && count_.size() <= 2; ++t) {
        const double per_piece = static_cast<double>(count_[t]) / static_cast<double>(size);
        const double at = t == type ? middle : 1 - middle;
        for (const double k : {std::floor(at / per_piece), std::floor(at / per_piece) - 1,
                               std::floor(at / per_piece) + 1}) {
          const double share = (k + 0.5) * per_piece;
          const double x = t == type ? share : 1 - share;
          if (x > from + 0.01 * (to - from) && x < to - 0.01 * (to - from) &&
              std::abs(x - middle) < std::abs(nearest - middle))
            nearest = x;
        }
      }
      if (nearest > from && nearest < to) return nearest;
    }
    return middle;
  }

  // Drops what does not add up to 1; false: nothing is left.
  static bool tighten(Box* box) {
    const double from = std::accumulate(box->least.begin(), box->least.end(), 0.0),
                 to = std::accumulate(box->most.begin(), box->most.end(), 0.0);
    if (from > 1 + 1e-12 || to < 1 - 1e-12) return false;
    const std::vector<double> least = box->least, most = box->most;
    for (size_t t = 0; t < least.size(); ++t) {
      box->least[t] = std::max(least[t], 1 - (to - most[t]));
      box->most[t] = std::max(box->least[t], std::min(most[t], 1 - (from - least[t])));
    }
    return true;
  }

  // [device] of shares by type.
  std::vector<double> by_device(const std::vector<double>& by_type) const {
    std::vector<double> result;
    for (const Device& d : model_->cluster().devices)
      result.push_back(by_type[d.type] / count_[d.type]);
    return result;
  }

  void evaluate(Box* box, bool classes) {
    if (common_.spent()) return;
    std::vector<double> middle;
    for (size_t t = 0; t < count_.size(); ++t) middle.push_back((box->least[t] + box->most[t]) / 2);
    const Shares shares(by_device(middle));
    RatioRange range{by_device(box->least), by_device(box->most), !together_};
    if (together_) {
      range.to.assign(range.from.size(), 1);
    } else if (count_.size() == 2) {  // more of one type is less of the other
      range.from = by_device({box->least[0], box->most[1]});
      range.to = by_device({box->most[0], box->least[1]});
    } else if (count_.size() > 2) {
      range.line = false;
    }
    const Fractions fractions(model_->cluster(), shares, range);
    const Certified certified{&fractions, [this] { return common_.step; }};
    const int64_t before = certifier_->effort().states;
    const int64_t left = common_.most_states - common_.states;
    const Seconds bound = classes
                              ? certifier_->bound(certified, std::min(left, kClassStates))
                              : certifier_->plain_bound(certified, std::min(left, kPlainStates));
    common_.states += certifier_->effort().states - before;
    ++common_.searched;
    box->bound = std::max(box->bound, bound);
  }

  Common& common_;
  std::shared_ptr<const CostModel> model_;
  std::vector<int> count_;
  bool together_;
  Builder builder_;
  WarmStart warm_;
  ProgramPool pool_;
  std::optional<Certifier> certifier_;
  std::vector<Box> boxes_;
};

bool alike(const Cluster& cluster, const Group& a, const Group& b) {
  if (!(a.link == b.link) || a.uplink != b.uplink || a.measured != b.measured ||
      a.device_count != b.device_count || a.children.size() != b.children.size())
    return false;
  for (size_t c = 0; c < a.children.size(); ++c)
    if (!alike(cluster, cluster.groups[a.children[c].index], cluster.groups[b.children[c].index]))
      return false;
  for (int d = 0; d < a.device_count; ++d)
    if (cluster.devices[a.first_device + d].type != cluster.devices[b.first_device + d].type)
      return false;
  return true;
}

// Children of a group that are alike, together.
std::vector<std::vector<const Group*>> like_children(const Cluster& cluster, const Group& group) {
  std::vector<std::vector<const Group*>> classes;
  for (GroupId id : group.children) {
    const Group* child = &cluster.groups[id.index];
    const auto found = std::find_if(classes.begin(), classes.end(),
                                    [&](const auto& c) { return alike(cluster, *c[0], *child); });
    if (found == classes.end())
      classes.push_back({child});
    else
      found->push_back(child);
  }
  return classes;
}

using Devices = std::vector<int>;

Devices shifted(Devices devices, int by) {
  for (int& d : devices) d += by;
  return devices;
}

// Of the choices below a group that are like one, always the same.
Devices same_for_all(const Cluster& cluster, const Group& group, const Devices& devices) {
  Devices result;
  auto inside = [](const Group& g, int d) {
    return d >= g.first_device && d < g.first_device + g.device_count;
  };
  if (group.children.empty()) {
    std::vector<int> left(cluster.types.size(), 0);
    for (int d : devices) left[cluster.devices[d].type] += inside(group, d);
    for (int d = group.first_device; d < group.first_device + group.device_count; ++d)
      if (left[cluster.devices[d].type]-- > 0) result.push_back(d);
    return result;
  }
  for (const auto& children : like_children(cluster, group)) {
    std::vector<Devices> of_child;  // counted from its first device
    for (const Group* child : children)
      of_child.push_back(shifted(same_for_all(cluster, *child, devices), -child->first_device));
    std::sort(of_child.rbegin(), of_child.rend());
    for (size_t c = 0; c < children.size(); ++c) {
      const Devices its = shifted(of_child[c], children[c]->first_device);
      result.insert(result.end(), its.begin(), its.end());
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

// All choices below a group, the empty one too, of those that are alike one; false: more than
// `most`.
bool choices_below(const Cluster& cluster, const Group& group, size_t most,
                   std::vector<Devices>* choices) {
  // One of every number of devices at least.
  if (static_cast<size_t>(group.device_count) > most) return false;
  std::set<Devices> all{{}};
  // Puts together what there is with each of some more.
  auto with = [&](const std::vector<Devices>& more) {
    std::set<Devices> next;
    for (const Devices& a : all)
      for (const Devices& b : more) {
        Devices both = a;
        both.insert(both.end(), b.begin(), b.end());
        next.insert(same_for_all(cluster, group, both));
        if (next.size() > most + 1) return false;
      }
    all = std::move(next);
    return true;
  };
  if (group.children.empty()) {
    for (int d = group.first_device; d < group.first_device + group.device_count; ++d)
      if (!with({{}, {d}})) return false;
  }
  for (const auto& children : like_children(cluster, group)) {
    std::vector<Devices> of_first;
    if (!choices_below(cluster, *children[0], most, &of_first)) return false;
    for (const Group* child : children) {
      std::vector<Devices> of_child;
      for (const Devices& devices : of_first)
        of_child.push_back(shifted(devices, child->first_device - children[0]->first_device));
      if (!with(of_child)) return false;
    }
  }
  choices->assign(all.begin(), all.end());
  return true;
}

std::vector<int> count_of(const Cluster& cluster, const Devices& devices) {
  std::vector<int> count(cluster.types.size(), 0);
  for (int d : devices) ++count[cluster.devices[d].type];
  return count;
}

// The fastest port that a choice of devices may have which no single child of the root holds.
BytesPerSecond fastest_port(const Cluster& cluster) {
  const Group& root = cluster.groups[0];
  BytesPerSecond fastest = root.link.bandwidth;
  for (size_t g = 1; g < cluster.groups.size(); ++g)
    fastest = std::max(fastest, cluster.groups[g].uplink);
  return root.link.kind == LinkKind::bus ? fastest / 4 : fastest;  // two members, both ways
}

// At least so many children of the root hold so many devices, two at least.
int least_ports(const Cluster& cluster, int devices) {
  const Group& root = cluster.groups[0];
  std::vector<int> sizes;
  for (GroupId child : root.children) sizes.push_back(cluster.groups[child.index].device_count);
  if (root.children.empty()) sizes.assign(root.device_count, 1);
  std::sort(sizes.rbegin(), sizes.rend());
  int ports = 0;
  for (int held = 0; held < devices && ports < static_cast<int>(sizes.size()); ++ports)
    held += sizes[ports];
  return std::max(2, ports);
}

// Numbers of devices by type.
struct Counts {
  std::vector<int> least, most;
};

// Choices of devices, and what is known of them.
struct Region {
  Seconds bound;
  Devices devices;  // one choice; empty: all of `counts` that no child of the root holds
  Counts counts = {};
  bool done = false;  // nothing can raise the bound
  std::unique_ptr<Boxes> boxes = {};

  bool several() const { return devices.empty() && counts.least != counts.most; }
};

// The other choices of devices of a cluster, best first.
class Regions {
 public:
  Regions(const Theory& theory, const Cluster& cluster, const std::vector<int>& devices,
          const Reductions& reductions)
      : cluster_(cluster),
        reductions_(reductions),
        least_(theory, CostModel(cluster)),
        own_(same_for_all(cluster, cluster.groups[0], devices)) {
    std::vector<Devices> choices = choices_of_devices(cluster, kMostChoices);
    for (const Devices& choice : choices) add(choice);
    if (!choices.empty()) return;
    // Too many: those inside of a child of the root one by one, the others together.
    const Group& root = cluster.groups[0];
    for (const auto& children : like_children(cluster, root)) {
      if (!choices_below(cluster, *children[0], kMostChoices, &choices)) {
        Devices inside(children[0]->device_count);
        std::iota(inside.begin(), inside.end(), children[0]->first_device);
        regions_.push_back({least_.of(count_of(cluster, inside)), inside, {}, true});
        continue;
      }
      for (const Devices& choice : choices) add(choice);
    }
    const std::vector<int> all = cluster.count_by_type();
    const unsigned sets = 1u << all.size();
    for (unsigned present = 1; present < sets; ++present) {
      Counts counts{std::vector<int>(all.size(), 0), std::vector<int>(all.size(), 0)};
      for (size_t t = 0; t < all.size(); ++t)
        if (present >> t & 1) {
          counts.least[t] = 1;
          counts.most[t] = all[t];
        }
      if (present + 1 < sets || static_cast<int>(own_.size()) < cluster.size()) {
        add(counts);
        continue;
      }
      for (size_t t = 0; t < all.size(); ++t) {  // of all devices the choice is the plan's own
        Counts fewer = counts;
        if (--fewer.most[t] > 0) add(fewer);
      }
    }
  }

  Seconds bound() const { return regions_.empty() ? kInfinity : least()->bound; }
  bool open() const { return !regions_.empty() && !least()->done; }

  // Looks closer where the bound is least. REQUIRES: open().
  void raise(Common* common) {
    const auto region = regions_.begin() + (least() - regions_.begin());
    if (region->several() &&
        (unlike(region->counts) || (region->boxes != nullptr && !region->boxes->open()))) {
      divide(region);
      return;
    }
    if (region->boxes == nullptr)
      region->boxes = boxes_of(*region, common);
    else
      region->boxes->raise();
    region->bound = region->boxes->bound();
    region->done = !region->boxes->open() && !region->several();
  }

 private:
  std::vector<Region>::const_iterator least() const {
    return std::min_element(regions_.begin(), regions_.end(),
                            [](const Region& a, const Region& b) { return a.bound < b.bound; });
  }

  void add(const Devices& choice) {
    if (choice.empty() || same_for_all(cluster_, cluster_.groups[0], choice) == own_) return;
    regions_.push_back({least_.of(count_of(cluster_, choice)), choice});
  }

  void add(const Counts& counts, Seconds bound = 0) {
    if (std::accumulate(counts.most.begin(), counts.most.end(), 0) < 2) return;
    const bool measured = std::any_of(cluster_.groups.begin(), cluster_.groups.end(),
                                      [](const Group& g) { return !g.measured.empty(); });
    regions_.push_back({std::max(bound, least_.of(counts.most)), {}, counts, measured});
  }

  // Fewer choices at a time.
  void divide(std::vector<Region>::iterator region) {
    Counts fewer = region->counts, more = region->counts;
    const Seconds bound = region->bound;
    regions_.erase(region);
    size_t widest = 0;
    for (size_t t = 1; t < fewer.most.size(); ++t)
      if (fewer.most[t] - fewer.least[t] > fewer.most[widest] - fewer.least[widest]) widest = t;
    fewer.most[widest] = (fewer.least[widest] + fewer.most[widest]) / 2;
    more.least[widest] = fewer.most[widest] + 1;
    add(fewer, bound);
    add(more, bound);
  }

  // Whether all-reduces of these choices may differ much.
  bool unlike(const Counts& counts) const {
    const auto sent = [&](const std::vector<int>& count) {
      const int devices = std::max(2, std::accumulate(count.begin(), count.end(), 0));
      const double members = reductions_ ? least_ports(cluster_, devices) : devices;
      return (members - 1) / members;
    };
    return sent(counts.least) < kAlike * sent(counts.most);
  }

  std::unique_ptr<Boxes> boxes_of(const Region& region, Common* common) const {
    if (!region.devices.empty()) {
      const Cluster part = part_of(cluster_, region.devices);
      const auto its = reductions_ ? reductions_(part) : std::vector<ReductionProgram>{};
      return std::make_unique<Boxes>(common, std::make_shared<CostModel>(part, its),
                                     part.count_by_type(), false, region.bound);
    }
    // As many devices as there are at least, on one switch.
    Cluster flat;
    flat.name = cluster_.name;
    flat.groups.emplace_back();
    std::vector<int> most;
    for (size_t t = 0; t < cluster_.types.size(); ++t) {
      if (region.counts.most[t] == 0) continue;
      flat.devices.insert(flat.devices.end(), region.counts.least[t],
                          {static_cast<int>(flat.types.size()), GroupId(0)});
      flat.types.push_back(cluster_.types[t]);
      most.push_back(region.counts.most[t]);
    }
    if (flat.size() == 1) flat.devices.push_back(flat.devices[0]);
    Group& root = flat.groups[0];
    root.device_count = flat.size();
    root.link = {LinkKind::switched, fastest_port(cluster_), cluster_.groups[0].link.latency};
    std::vector<ReductionProgram> in_steps;
    if (reductions_) {
      const double ports = least_ports(cluster_, flat.size());
      in_steps.emplace_back();
      in_steps[0].seconds_per_byte = 2 * (ports - 1) / ports / root.link.bandwidth;
    }
    return std::make_unique<Boxes>(common, std::make_shared<CostModel>(flat, in_steps), most, true,
                                   region.bound);
  }

  const Cluster& cluster_;
  const Reductions& reductions_;
  LeastSeconds least_;
  Devices own_;
  std::vector<Region> regions_;
};

}  // namespace

std::vector<std::vector<int>> choices_of_devices(const Cluster& cluster, int most) {
  std::vector<Devices> choices;
  if (!choices_below(cluster, cluster.groups[0], static_cast<size_t>(most), &choices)) return {};
  std::erase_if(choices, [](const Devices& devices) { return devices.empty(); });
  return choices;
}

Elsewhere bound_at_any_shares(const Theory& theory, const CostModel& model,
                              const SynthesisOptions& options, Seconds step, int64_t states) {
  const std::vector<int> count = model.cluster().count_by_type();
  Elsewhere result{std::min(step, LeastSeconds(theory, model).of(count))};
  if (states <= 0 || result.bound >= (1 - kWideGap) * step) return result;
  Common common(theory, options, step, states);
  Boxes boxes(&common, {std::shared_ptr<void>(), &model}, count, false, result.bound);
  while (boxes.bound() < common.enough() && boxes.open() && !common.spent()) boxes.raise();
  return {boxes.bound(), common.searched, common.states};
}

Elsewhere bound_elsewhere(const Theory& theory, const Cluster& cluster,
                          const std::vector<int>& devices, const Reductions& reductions,
                          const SynthesisOptions& options, Seconds step, int64_t states) {
  MOTLEY_CHECK(theory.segments() == 1 && !devices.empty());
  Common common(theory, options, step, states);
  Regions regions(theory, cluster, devices, reductions);
  while (regions.bound() < common.enough() && regions.open() && !common.spent())
    regions.raise(&common);
  return {std::min(step, regions.bound()), common.searched, common.states};
}

}  // namespace motley::spmd

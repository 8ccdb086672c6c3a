#include "advise/edits.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "cluster/part.h"
#include "cluster/resources.h"
#include "core/error.h"
#include "core/limits.h"

namespace motley::advise {

namespace {

constexpr int kMachine = 8;  // devices of a machine of a new kind

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// A cluster as a tree that can be changed: devices are where they belong.
struct Site {
  Group group;
  std::vector<Site> children;
  std::vector<std::pair<int, int64_t>> devices;  // (type, id)
  int size() const {
    int n = static_cast<int>(devices.size());
    for (const Site& child : children) n += child.size();
    return n;
  }
};

Site site_of(const Variant& v, GroupId id) {
  Site site{v.cluster.groups[id.index], {}, {}};
  for (const GroupId child : site.group.children) site.children.push_back(site_of(v, child));
  for (int i = 0; site.children.empty() && i < site.group.device_count; ++i) {
    const int d = site.group.first_device + i;
    site.devices.emplace_back(v.cluster.devices[d].type, v.ids[d]);
  }
  return site;
}

void add_site(const Site& site, GroupId parent, Variant* out) {
  const GroupId id(static_cast<int64_t>(out->cluster.groups.size()));
  out->cluster.groups.push_back(site.group);
  if (parent.valid()) out->cluster.groups[parent.index].children.push_back(id);
  Group group = site.group;
  group.parent = parent;
  group.children.clear();
  group.first_device = out->cluster.size();
  out->cluster.groups[id.index] = group;
  for (const Site& child : site.children) add_site(child, id, out);
  for (const auto& [type, device] : site.devices) {
    out->cluster.devices.push_back({type, id});
    out->ids.push_back(device);
  }
  Group& made = out->cluster.groups[id.index];
  made.device_count = out->cluster.size() - made.first_device;
}

class Edit {
 public:
  Edit(const Variant& variant, std::string text, int64_t* next)
      : v_(variant), text_(std::move(text)), next_(next) {
    std::istringstream in(text_);
    for (std::string word; in >> word;) words_.push_back(word);
  }

  Variant run() {
    if (words_.empty())
      throw bad("is empty", "such as add 8 H100-80GB, drop v100, cross-link 100 Gbps");
    const std::string verb = lower(words_[0]);
    if (verb == "add") return add();
    if (verb == "drop") return drop();
    if (verb == "replace") return replace();
    if (verb == "cross-link" || verb == "link") return link(verb == "link");
    if (verb == "memory" || verb == "speed") return device(verb == "memory");
    throw bad(fmt::format("begins with '{}'", words_[0]),
              "one that begins with add, drop, replace, cross-link, link, memory or speed");
  }

 private:
  UserError bad(const std::string& what, const std::string& fix) const {
    return user_error("advise", "--what-if '{}' {}; give {}", text_, what, fix);
  }
  std::string word(size_t i, const char* what) const {
    if (i >= words_.size()) throw bad(fmt::format("lacks {}", what), what);
    return words_[i];
  }
  // The words from the i-th on, as a quantity.
  double quantity(size_t i, const char* kind, size_t end = 1000) const {
    std::string rest = word(i, kind);
    for (size_t k = i + 1; k < std::min(end, words_.size()); ++k) rest += " " + words_[k];
    const double value = parse_quantity(rest, kind, "--what-if '" + text_ + "'");
    check_range(value, kind, "--what-if '" + text_ + "'");
    if (value <= 0) throw bad("has a quantity of 0", "one that is greater");
    return value;
  }
  static bool number(const std::string& text, int* value) {
    if (text.empty() || text.size() > 6 ||
        text.find_first_not_of("0123456789") != std::string::npos)
      return false;
    *value = std::stoi(text);
    return true;
  }
  int count(size_t i) const {
    int n = 0;
    if (!number(word(i, "a number of devices"), &n) || n < 1)
      throw bad(fmt::format("has '{}' for a number of devices", words_[i]), "one from 1 on");
    if (n > kMaxDevices - v_.cluster.size())
      throw bad(fmt::format("adds {} devices", n), fmt::format("at most {} in all", kMaxDevices));
    return n;
  }

  std::string names() const {
    std::vector<std::string> list;
    for (const DeviceType& t : v_.cluster.types) list.push_back(t.name);
    for (const Group& g : v_.cluster.groups)
      if (g.parent.valid() && std::find(list.begin(), list.end(), g.name) == list.end() &&
          list.size() < 20)
        list.push_back(g.name);
    return fmt::format("one of {}", fmt::join(list, ", "));
  }
  // Devices of types or groups of a name, or else of those whose names begin so.
  std::vector<int> named(const std::string& name) const {
    const std::string wanted = lower(name);
    for (const bool whole : {true, false}) {
      const auto fits = [&](const std::string& text) {
        return whole ? lower(text) == wanted : lower(text).starts_with(wanted);
      };
      std::vector<int> devices;
      for (int d = 0; d < v_.cluster.size(); ++d) {
        // A type of which the name is the beginning, such as V100 of V100-16GB, is the name's too.
        bool found = fits(v_.cluster.type_of(d).name) ||
                     lower(v_.cluster.type_of(d).name).starts_with(wanted + "-");
        for (GroupId g = v_.cluster.devices[d].parent; g.valid() && !found;
             g = v_.cluster.groups[g.index].parent)
          found =
              v_.cluster.groups[g.index].parent.valid() && fits(v_.cluster.groups[g.index].name);
        if (found) devices.push_back(d);
      }
      if (!devices.empty()) return devices;
    }
    throw bad(fmt::format("names '{}', which is no device type and no group", name), names());
  }
  DeviceType type(const std::string& name) const {
    std::vector<std::string> known;
    for (const bool whole : {true, false})
      for (const auto* list : {&v_.cluster.types, &device_catalogue()})
        for (const DeviceType& t : *list) {
          if (whole ? lower(t.name) == lower(name) : lower(t.name).starts_with(lower(name)))
            return t;
          if (whole) known.push_back(t.name);
        }
    std::sort(known.begin(), known.end());
    known.erase(std::unique(known.begin(), known.end()), known.end());
    throw bad(fmt::format("names '{}', which is no known device type", name),
              fmt::format("one of {}, or describe it under device_types in the cluster file",
                          fmt::join(known, ", ")));
  }

  // The group of fewest devices whose devices are all of a type; invalid: none.
  GroupId machine_of(const std::string& name) const {
    GroupId best;
    for (size_t i = 0; i < v_.cluster.groups.size(); ++i) {
      const Group& g = v_.cluster.groups[i];
      if (!g.children.empty() || g.device_count == 0 || !g.parent.valid()) continue;
      const bool all =
          std::all_of(v_.cluster.devices.begin() + g.first_device,
                      v_.cluster.devices.begin() + g.first_device + g.device_count,
                      [&](const Device& d) { return v_.cluster.types[d.type].name == name; });
      if (all && !best.valid()) best = GroupId(static_cast<int64_t>(i));
    }
    return best;
  }

  Variant add() {
    const int n = count(1);
    std::string name = word(2, "a device type");
    const DeviceType of = type(name);
    BytesPerSecond inside = 0;
    if (words_.size() > 3) {
      if (lower(words_[3]) != "link")
        throw bad(fmt::format("goes on with '{}'", words_[3]), "link and a bandwidth");
      inside = quantity(4, "bandwidth");
    }
    Variant base = v_;
    const int t = use(&base.cluster, of);
    Site root = site_of(base, GroupId(0));
    if (root.children.empty()) {  // a flat cluster: one more of its devices each
      for (int i = 0; i < n; ++i) root.devices.emplace_back(t, (*next_)++);
      root.group.measured.clear();
      return rebuilt(base, root);
    }
    const GroupId like = machine_of(of.name);
    Site machine;
    Site* into = &root;
    if (like.valid()) {
      machine.group = v_.cluster.groups[like.index];
      std::vector<int64_t> path;  // of child numbers to its parent
      for (GroupId g = machine.group.parent; v_.cluster.groups[g.index].parent.valid();
           g = v_.cluster.groups[g.index].parent) {
        const auto& siblings = v_.cluster.groups[v_.cluster.groups[g.index].parent.index].children;
        path.push_back(std::find(siblings.begin(), siblings.end(), g) - siblings.begin());
      }
      root.group.measured.clear();
      for (auto it = path.rbegin(); it != path.rend(); ++it) {
        into = &into->children[static_cast<size_t>(*it)];
        into->group.measured.clear();
      }
    } else {
      machine.group.name = lower(of.name);
      machine.group.link = v_.cluster.groups[0].link;
      for (const Group& g : v_.cluster.groups)
        if (g.children.empty() && g.device_count > 1 &&
            g.link.bandwidth > machine.group.link.bandwidth)
          machine.group.link = g.link;
      machine.group.device_count = kMachine;
      root.group.measured.clear();
    }
    if (inside > 0) machine.group.link.bandwidth = inside;
    const int size = std::max(1, machine.group.device_count);
    for (int left = n; left > 0; left -= size) {
      Site one = machine;
      if (left < size) one.group.measured.clear();
      for (int i = 0; i < std::min(left, size); ++i) one.devices.emplace_back(t, (*next_)++);
      into->children.push_back(std::move(one));
    }
    return rebuilt(base, root);
  }

  static int use(Cluster* cluster, const DeviceType& type) {
    for (size_t i = 0; i < cluster->types.size(); ++i)
      if (cluster->types[i].name == type.name) return static_cast<int>(i);
    cluster->types.push_back(type);
    return static_cast<int>(cluster->types.size()) - 1;
  }
  static Variant rebuilt(const Variant& base, const Site& root) {
    Variant out;
    out.name = base.name;
    out.cluster.name = base.cluster.name;
    out.cluster.types = base.cluster.types;
    add_site(root, GroupId(), &out);
    return out;
  }

  Variant drop() {
    int n = 0;
    const bool some = words_.size() > 2 && number(words_[1], &n);
    if (words_.size() > (some ? 3U : 2U))
      throw bad("has more words than it needs", "drop and a name");
    std::vector<int> gone = named(word(some ? 2 : 1, "a device type or a group"));
    if (some && (n < 1 || n > static_cast<int>(gone.size())))
      throw bad(fmt::format("drops {} of {} devices", n, gone.size()),
                "as many as there are at most");
    if (some) gone.erase(gone.begin(), gone.end() - n);
    std::vector<int> keep;
    for (int d = 0; d < v_.cluster.size(); ++d)
      if (!std::binary_search(gone.begin(), gone.end(), d)) keep.push_back(d);
    if (keep.empty()) throw bad("leaves no device", "fewer to drop");
    return advise::part_of(v_, keep, v_.name);
  }

  Variant replace() {
    const std::vector<int> devices = named(word(1, "a device type or a group"));
    if (lower(word(2, "'with'")) != "with")
      throw bad(fmt::format("has '{}' for 'with'", words_[2]), "replace NAME with TYPE");
    if (words_.size() > 4) throw bad("has more words than it needs", "replace NAME with TYPE");
    return replaced(v_, devices, type(word(3, "a device type")), v_.name, next_);
  }

  Variant link(bool of_group) {
    std::vector<GroupId> groups;
    size_t at = 1;
    if (of_group) {
      const std::string name = lower(word(at++, "the name of a group"));
      for (const bool whole : {true, false})
        for (size_t i = 1; i < v_.cluster.groups.size() && (whole || groups.empty()); ++i)
          if (const std::string g = lower(v_.cluster.groups[i].name);
              whole ? g == name : g.starts_with(name)) {
            groups.clear();
            for (size_t k = 1; k < v_.cluster.groups.size(); ++k)
              if (lower(v_.cluster.groups[k].name) == g)
                groups.push_back(GroupId(static_cast<int64_t>(k)));
          }
      if (groups.empty())
        throw bad(fmt::format("names '{}', which is no group", words_[1]), names());
    } else {
      groups = {GroupId(0)};
    }
    const bool latency = lower(word(at, "a bandwidth or latency")) == "latency";
    const double wanted = latency ? quantity(at + 1, "time") : quantity(at, "bandwidth");
    Variant out = v_;
    for (const GroupId id : groups) {
      const Link& now = out.cluster.groups[id.index].link;
      if (latency && now.latency == 0) {
        out.cluster.groups[id.index].link.latency = wanted;
        continue;
      }
      const Resource resource{
          latency ? ResourceKind::latency : ResourceKind::bandwidth, "", {}, {id}};
      out.cluster =
          with_more(out.cluster, resource, latency ? now.latency / wanted : wanted / now.bandwidth);
    }
    return out;
  }

  Variant device(bool memory) {
    const std::vector<int> devices = named(word(1, "a device type or a group"));
    Variant out = v_;
    std::vector<std::vector<int>> by_type(v_.cluster.types.size());
    for (const int d : devices) by_type[v_.cluster.devices[d].type].push_back(d);
    const double wanted = quantity(2, memory ? "bytes" : "number");
    for (size_t t = 0; t < by_type.size(); ++t)
      if (!by_type[t].empty())
        out.cluster = with_more(
            out.cluster, {memory ? ResourceKind::memory : ResourceKind::speed, "", by_type[t], {}},
            memory ? wanted / v_.cluster.types[t].memory : wanted);
    return out;
  }

  const Variant& v_;
  const std::string text_;
  int64_t* next_;
  std::vector<std::string> words_;
};

Variant keyed(Variant v) {
  v.key = fmt::format("{}|{}", look_of(v.cluster), fmt::join(v.ids, ","));
  return v;
}

}  // namespace

Variant unchanged(const Cluster& cluster) {
  Variant v{"as it is", cluster, {}, {}};
  for (int d = 0; d < cluster.size(); ++d) v.ids.push_back(d);
  return keyed(std::move(v));
}

Variant edited(const Variant& variant, const std::string& edit, int64_t* next) {
  Variant v = variant;
  std::string rest = edit;
  for (;;) {
    const size_t semicolon = rest.find(';'), word = lower(rest).find(" and ");
    const size_t end = std::min(semicolon, word);
    v = Edit(v, rest.substr(0, end), next).run();
    if (end == std::string::npos) break;
    rest = rest.substr(end + (end == semicolon ? 1 : 5));
  }
  v.name = edit;
  return keyed(std::move(v));
}

Variant part_of(const Variant& variant, const std::vector<int>& keep, const std::string& name) {
  Variant out{name, motley::part_of(variant.cluster, keep), {}, {}};
  for (const int d : keep) out.ids.push_back(variant.ids[d]);
  return keyed(std::move(out));
}

Variant replaced(const Variant& variant, const std::vector<int>& devices, const DeviceType& type,
                 const std::string& name, int64_t* next) {
  Variant out = variant;
  out.name = name;
  int number = -1;
  for (size_t i = 0; i < out.cluster.types.size(); ++i)
    if (out.cluster.types[i].name == type.name) number = static_cast<int>(i);
  if (number < 0) {
    number = static_cast<int>(out.cluster.types.size());
    out.cluster.types.push_back(type);
  }
  for (const int d : devices) {
    out.cluster.devices[d].type = number;
    out.ids[d] = (*next)++;
  }
  // Types without devices would be planned for.
  std::vector<int> all;
  for (int d = 0; d < out.cluster.size(); ++d) all.push_back(d);
  out.cluster = motley::part_of(out.cluster, all);
  return keyed(std::move(out));
}

}  // namespace motley::advise

#include "cluster/cluster.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "cluster/part.h"
#include "cluster/tariff.h"
#include "core/error.h"
#include "core/file.h"
#include "core/limits.h"
#include "core/printable.h"
#include "core/yaml.h"

namespace motley {

const char* to_string(LinkKind kind) {
  switch (kind) {
    case LinkKind::switched:
      return "switch";
    case LinkKind::ring:
      return "ring";
    case LinkKind::bus:
      return "bus";
  }
  return "?";
}

std::vector<int> Cluster::count_by_type() const {
  std::vector<int> counts(types.size());
  for (const Device& d : devices) ++counts[d.type];
  return counts;
}

namespace {

constexpr size_t kMaxOps = 4096;    // measured operators of one device type
constexpr size_t kMaxName = 200;    // characters of a name
constexpr size_t kMaxTypes = 1024;  // device types that a file describes
constexpr int kMaxDirect = 64;      // devices of a group with direct links
constexpr int kMaxLinks = 64;       // direct links side by side

// Walks one file; every failure names it and the path of the field.
class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  Cluster read(const std::string& text) {
    const Yaml root = Yaml::parse(text, "cluster", file_);
    if (!root.is_map())
      throw error("the file", "is not a map",
                  "start with 'name:', 'link:' and 'groups:' or 'devices:'");
    known_ = device_catalogue();
    if (Yaml list = root["device_types"]) {
      sequence(list, "device_types");
      if (list.size() > kMaxTypes)
        throw error("device_types", fmt::format("has {} entries", list.size()),
                    fmt::format("give at most {}", kMaxTypes));
      for (size_t i = 0; i < list.size(); ++i)
        read_type(list[i], fmt::format("device_types[{}]", i));
    }
    cluster_.name = root["name"] ? name(root["name"], "name") : "unnamed";
    allow(root, "",
          {"name", "link", "groups", "devices", "device_types", "uplink", "count", "collectives",
           "direct", "backend"});
    group(root, GroupId(), "", 0);
    if (cluster_.devices.empty())
      throw error("the file", "has no devices", "give 'devices:' in some group");
    return std::move(cluster_);
  }

  Tariffs tariffs() const {
    Tariffs given = tariffs_;
    std::erase_if(given, [](const auto& t) { return t.second.price == 0 && t.second.watts == 0; });
    return given;
  }

 private:
  UserError error(const std::string& field, const std::string& what, const std::string& fix) const {
    return user_error("cluster", "{}: {} {}; {}", file_, field, what, fix);
  }
  static std::string join(const std::string& path, const std::string& field) {
    return path.empty() ? field : path + "." + field;
  }
  void allow(const Yaml& map, const std::string& path,
             std::initializer_list<std::string_view> names) const {
    for (const auto& [key, value] : map.entries()) {
      if (std::find(names.begin(), names.end(), key) == names.end())
        throw error(join(path, key), "is not a known field",
                    fmt::format("known are {}", fmt::join(names, ", ")));
    }
  }
  std::string scalar(const Yaml& node, const std::string& field) const {
    if (!node.is_scalar()) throw error(field, "is not a single value", "give one");
    return node.scalar();
  }
  // A name of something, which is printed and copied to all that `count` repeats.
  std::string name(const Yaml& node, const std::string& field) const {
    std::string text = scalar(node, field);
    if (text.empty()) throw error(field, "is empty", "give a name");
    if (text.size() > kMaxName)
      throw error(field, fmt::format("has {} characters", text.size()),
                  fmt::format("give at most {}", kMaxName));
    if (!is_printable(text)) throw error(field, "holds control characters", "give printable text");
    return text;
  }
  void sequence(const Yaml& node, const std::string& field) const {
    if (!node.is_list()) throw error(field, "is not a list", "give a list");
  }
  double quantity(const Yaml& node, const char* kind, const std::string& field) const {
    try {
      const double value = parse_quantity(scalar(node, field), kind, field);
      check_range(value, kind, field);
      return value;
    } catch (const UserError& e) {
      std::string what = e.what();
      throw user_error("cluster", "{}: {}", file_, what.substr(what.find("] ") + 2));
    }
  }
  double positive(const Yaml& node, const char* kind, const std::string& field) const {
    double x = quantity(node, kind, field);
    if (x <= 0)
      throw error(field, fmt::format("is {}", node.scalar()), "give a number greater than 0");
    return x;
  }
  int count(const Yaml& node, const std::string& field) const {
    double x = positive(node, "number", field);
    if (x != std::floor(x) || x > kMaxDevices)
      throw error(field, fmt::format("is {}", node.scalar()),
                  fmt::format("give a whole number from 1 to {}", kMaxDevices));
    return static_cast<int>(x);
  }

  void read_type(const Yaml& node, const std::string& path) {
    if (!node.is_map()) throw error(path, "is not a map", "give name, flops, memory, ...");
    allow(node, path,
          {"name", "like", "flops", "half_flops", "memory", "reserved", "memory_bandwidth",
           "overhead", "speed", "interference", "ops", "price", "watts", "idle_watts"});
    if (!node["name"]) throw error(join(path, "name"), "is missing", "give the type a name");
    DeviceType type;
    std::string name = this->name(node["name"], join(path, "name"));
    bool complete = false;
    std::string base = node["like"] ? scalar(node["like"], join(path, "like")) : name;
    for (const DeviceType& k : known_)
      if (k.name == base) type = k, complete = true;
    if (node["like"] && !complete)
      throw error(join(path, "like"), "is '" + base + "', which is not a known device type",
                  known_names());
    type.name = name;
    auto take = [&](const char* field, const char* kind, double* into, bool required) {
      if (node[field])
        *into = positive(node[field], kind, join(path, field));
      else if (required && !complete)
        throw error(join(path, field), "is missing", "a new device type needs it");
    };
    bool half = static_cast<bool>(node["half_flops"]);
    take("flops", "flops", &type.flops, true);
    take("half_flops", "flops", &type.half_flops, false);
    if (!half && (!complete || node["flops"]))
      type.half_flops = std::max(type.half_flops, type.flops);
    if (node["memory"] || node["reserved"]) type.memory += type.reserved;
    take("memory", "bytes", &type.memory, true);
    take("reserved", "bytes", &type.reserved, false);
    if (node["memory"] || node["reserved"]) type.memory -= type.reserved;
    if (type.memory <= 0)
      throw error(join(path, "reserved"), "is all of the memory", "leave some for tensors");
    take("memory_bandwidth", "bandwidth", &type.memory_bandwidth, true);
    take("overhead", "time", &type.overhead, false);
    if (node["speed"]) {
      type.speed = positive(node["speed"], "number", join(path, "speed"));
      if (type.speed > 1)
        throw error(join(path, "speed"), "is more than 1", "give the share of one core");
    } else if (!complete) {
      type.speed = 0;
    }
    take("interference", "number", &type.interference, false);
    if (type.interference > kMostInterference)
      throw error(join(path, "interference"), fmt::format("is more than {}", kMostInterference),
                  "give by what part computation is slower beside a collective, such as 0.1");
    if (node["ops"]) read_ops(node["ops"], join(path, "ops"), &type);
    read_tariff(node, path, name, base);
    std::erase_if(known_, [&](const DeviceType& k) { return k.name == name; });
    known_.push_back(type);
  }

  void read_tariff(const Yaml& node, const std::string& path, const std::string& name,
                   const std::string& base) {
    Tariff tariff = tariffs_[base];
    auto take = [&](const char* field, double* into) {
      if (!node[field]) return;
      *into = quantity(node[field], "number", join(path, field));
      if (*into > 1e9)
        throw error(join(path, field), "is " + node[field].scalar(), "give at most 1e9");
    };
    take("price", &tariff.price);
    take("watts", &tariff.watts);
    if (node["watts"]) tariff.idle_watts = tariff.watts;
    take("idle_watts", &tariff.idle_watts);
    if (tariff.idle_watts > tariff.watts)
      throw error(join(path, "idle_watts"), "is more than watts", "give what it draws while idle");
    tariffs_[name] = tariff;
  }

  void read_ops(const Yaml& list, const std::string& path, DeviceType* type) const {
    sequence(list, path);
    type->ops.clear();
    if (list.size() > kMaxOps)
      throw error(path, fmt::format("has {} entries", list.size()),
                  fmt::format("give at most {}", kMaxOps));
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string field = fmt::format("{}[{}]", path, i);
      if (!list[i].is_map() || !list[i]["op"])
        throw error(field, "has no op", "give {op: aten::mm, overhead: ..., flops: ...}");
      allow(list[i], field,
            {"op", "overhead", "flops", "memory_bandwidth", "cached", "uncached_bandwidth",
             "launch"});
      OpRate rate;
      rate.op = name(list[i]["op"], join(field, "op"));
      for (const auto& [key, kind, value] : {std::tuple{"overhead", "time", &rate.overhead},
                                             {"cached", "bytes", &rate.cached},
                                             {"launch", "time", &rate.launch}})
        if (const Yaml x = list[i][key]) *value = quantity(x, kind, join(field, key));
      for (const auto& [key, kind, value] :
           {std::tuple{"flops", "flops", &rate.flops},
            {"memory_bandwidth", "bandwidth", &rate.memory_bandwidth},
            {"uncached_bandwidth", "bandwidth", &rate.uncached_bandwidth}})
        if (const Yaml x = list[i][key]) *value = positive(x, kind, join(field, key));
      type->ops.push_back(rate);
    }
  }

  std::vector<CollectiveRate> read_collectives(const Yaml& list, const std::string& path) const {
    sequence(list, path);
    std::vector<CollectiveRate> rates;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string field = fmt::format("{}[{}]", path, i);
      if (!list[i].is_map() || !list[i]["form"] || !list[i]["bandwidth"])
        throw error(field, "has no form or no bandwidth",
                    "give {form: all_reduce, latency: ..., bandwidth: ...}");
      allow(list[i], field, {"form", "latency", "bandwidth", "least"});
      const std::string name = scalar(list[i]["form"], join(field, "form"));
      const auto collective = parse_collective(name, kMeasuredCollectives);
      if (!collective)
        throw error(join(field, "form"), "is '" + name + "'",
                    "give all_reduce, all_gather, reduce_scatter, all_to_all or broadcast");
      CollectiveRate rate;
      rate.collective = *collective;
      for (const CollectiveRate& other : rates)
        if (other.collective == rate.collective)
          throw error(join(field, "form"), "is '" + name + "' again", "give each form once");
      rate.bandwidth = positive(list[i]["bandwidth"], "bandwidth", join(field, "bandwidth"));
      for (auto [word, value] : {std::pair("latency", &rate.latency), {"least", &rate.least}})
        if (const Yaml x = list[i][word]) *value = quantity(x, "time", join(field, word));
      rates.push_back(rate);
    }
    return rates;
  }

  std::string known_names() const {
    std::vector<std::string> names;
    for (const DeviceType& k : known_) names.push_back(k.name);
    std::sort(names.begin(), names.end());
    return fmt::format("known are {}; or describe it under device_types", fmt::join(names, ", "));
  }

  int use_type(const std::string& name, const std::string& field) {
    for (size_t i = 0; i < cluster_.types.size(); ++i)
      if (cluster_.types[i].name == name) return static_cast<int>(i);
    for (const DeviceType& k : known_)
      if (k.name == name) {
        cluster_.types.push_back(k);
        return static_cast<int>(cluster_.types.size()) - 1;
      }
    throw error(field, "is '" + name + "', which is not a known device type", known_names());
  }

  // Bandwidth and latency of a link; where it has a type, what the catalogue says of that.
  Link link_of(const Yaml& node, const std::string& path) const {
    Link link;
    if (const Yaml type = node["type"]) {
      link.type = scalar(type, join(path, "type"));
      const LinkType* known = find_link_type(link.type);
      if (known == nullptr) {
        std::vector<std::string> names;
        for (const LinkType& t : link_catalogue()) names.push_back(t.name);
        throw error(
            join(path, "type"), "is '" + link.type + "', which is no known type of link",
            fmt::format("give one of {}, or bandwidth and latency", fmt::join(names, ", ")));
      }
      link.bandwidth = known->nominal * known->share;
      link.latency = known->latency;
      if (const Yaml x = node["nominal"]; x && node["bandwidth"])
        throw error(join(path, "nominal"), "stands beside bandwidth",
                    "give bandwidth where it was measured, else nominal");
      else if (x)
        link.bandwidth = known->share * positive(x, "bandwidth", join(path, "nominal"));
    } else if (node["nominal"]) {
      throw error(join(path, "nominal"), "has no type beside it", "give the type of link");
    } else if (!node["bandwidth"]) {
      throw error(join(path, "bandwidth"), "is missing", "for example 10 Gbps");
    }
    if (const Yaml x = node["bandwidth"])
      link.bandwidth = positive(x, "bandwidth", join(path, "bandwidth"));
    if (const Yaml x = node["latency"]) link.latency = quantity(x, "time", join(path, "latency"));
    return link;
  }

  Link read_link(const Yaml& node, const std::string& path) const {
    if (!node) throw error(path, "is missing", "give link: {bandwidth: ..., latency: ...}");
    if (!node.is_map()) throw error(path, "is not a map", "give {bandwidth: ..., latency: ...}");
    allow(node, path, {"kind", "type", "nominal", "bandwidth", "latency"});
    Link link = link_of(node, path);
    if (!node["kind"]) return link;
    const std::string kind = scalar(node["kind"], join(path, "kind"));
    for (LinkKind k : {LinkKind::switched, LinkKind::ring, LinkKind::bus})
      if (link.kind = k; kind == to_string(k)) return link;
    throw error(join(path, "kind"), "is '" + kind + "'", "give switch, ring or bus");
  }

  // Whole numbers of devices of a group.
  std::vector<int> members(const Yaml& list, const std::string& path, const Group& g) const {
    sequence(list, path);
    std::vector<int> devices;
    for (size_t i = 0; i < list.size(); ++i) {
      devices.push_back(member(list[i], fmt::format("{}[{}]", path, i), g));
    }
    return devices;
  }
  int member(const Yaml& node, const std::string& field, const Group& g) const {
    const double x = quantity(node, "number", field);
    if (x != std::floor(x) || x < 0 || x >= g.device_count)
      throw error(field, "is " + node.scalar(),
                  fmt::format("give a device from 0 to {}", g.device_count - 1));
    return static_cast<int>(x);
  }

  // Adds links between two devices; `pairs`: those that have one already.
  void add_direct(int a, int b, int links, const Link& link, const std::string& field,
                  std::set<std::pair<int, int>>* pairs, Group* g) const {
    if (a == b) throw error(field, fmt::format("joins {} to itself", a), "give two devices");
    if (!pairs->emplace(std::min(a, b), std::max(a, b)).second)
      throw error(field, fmt::format("joins {} and {} again", a, b),
                  "give each pair once, with its number of links");
    g->direct.push_back({std::min(a, b), std::max(a, b), links, link.bandwidth, link.latency});
  }

  // The direct links of a group, whose devices are known: rings, meshes and pairs.
  void read_direct(const Yaml& list, const std::string& path, Group* g) const {
    sequence(list, path);
    if (g->device_count > kMaxDirect)
      throw error(path, fmt::format("is of a group of {} devices", g->device_count),
                  fmt::format("give direct links inside groups of at most {}", kMaxDirect));
    std::set<std::pair<int, int>> pairs;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string field = fmt::format("{}[{}]", path, i);
      const Yaml entry = list[i];
      if (!entry.is_map()) throw error(field, "is not a map", "give {kind: ring, bandwidth: ...}");
      allow(entry, field,
            {"kind", "type", "nominal", "bandwidth", "latency", "links", "over", "between"});
      const Link link = link_of(entry, field);
      const int links = entry["links"] ? count(entry["links"], join(field, "links")) : 1;
      if (links > kMaxLinks)
        throw error(join(field, "links"), fmt::format("is {}", links),
                    fmt::format("give at most {}", kMaxLinks));
      if (static_cast<bool>(entry["kind"]) == static_cast<bool>(entry["between"]))
        throw error(field, "must have either 'kind' or 'between'",
                    "give kind: ring, kind: mesh, or between: [[0, 1], [1, 2]]");
      if (entry["between"]) {
        if (entry["over"] || entry["links"])
          throw error(field, "has 'over' or 'links' beside 'between'",
                      "give the number of links as third number of a pair");
        const Yaml between = entry["between"];
        sequence(between, join(field, "between"));
        for (size_t k = 0; k < between.size(); ++k) {
          const std::string at = fmt::format("{}.between[{}]", field, k);
          sequence(between[k], at);
          if (between[k].size() != 2 && between[k].size() != 3)
            throw error(at, fmt::format("has {} numbers", between[k].size()),
                        "give two devices, and how many links they have if not one");
          const int ends[] = {member(between[k][0], at + "[0]", *g),
                              member(between[k][1], at + "[1]", *g)};
          int side = between[k].size() == 3 ? count(between[k][2], at + "[2]") : 1;
          if (side > kMaxLinks)
            throw error(at + "[2]", fmt::format("is {}", side),
                        fmt::format("give at most {}", kMaxLinks));
          add_direct(ends[0], ends[1], side, link, at, &pairs, g);
        }
        continue;
      }
      const std::string kind = scalar(entry["kind"], join(field, "kind"));
      if (kind != "ring" && kind != "mesh")
        throw error(join(field, "kind"), "is '" + kind + "'", "give ring or mesh");
      std::vector<int> over(g->device_count);
      std::iota(over.begin(), over.end(), 0);
      if (entry["over"]) over = members(entry["over"], join(field, "over"), *g);
      const size_t n = over.size();
      if (n < 2) throw error(field, fmt::format("joins {} devices", n), "give two or more");
      for (size_t a = 0; a < n; ++a)
        for (size_t b = a + 1; b < n; ++b)
          if (kind == "mesh" || b == a + 1 || (a == 0 && b + 1 == n))
            add_direct(over[a], over[b], links, link, field, &pairs, g);
    }
  }

  // Several ports of a group to the outside, each near some of its devices.
  void read_nics(const Yaml& node, const std::string& path, Group* g) const {
    const Yaml list = node["nics"];
    const std::string field = join(path, "nics");
    if (node["uplink"]) throw error(field, "stands beside uplink", "give one of them");
    sequence(list, field);
    std::vector<int> of(g->device_count, -1);
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string at = fmt::format("{}[{}]", field, i);
      if (!list[i].is_map() || !list[i]["near"])
        throw error(at, "has no 'near'", "give {bandwidth: 100 Gbps, near: [0, 1]}");
      allow(list[i], at, {"type", "nominal", "bandwidth", "near"});
      Nic nic{link_of(list[i], at).bandwidth, members(list[i]["near"], join(at, "near"), *g)};
      if (nic.near.empty()) throw error(join(at, "near"), "is empty", "name the devices near it");
      for (int d : nic.near) {
        if (of[d] >= 0)
          throw error(join(at, "near"), fmt::format("names device {} again", d),
                      "give each device one NIC");
        of[d] = static_cast<int>(i);
      }
      std::sort(nic.near.begin(), nic.near.end());
      g->uplink += nic.bandwidth;
      g->nics.push_back(std::move(nic));
    }
    for (int d = 0; d < g->device_count; ++d)
      if (of[d] < 0)
        throw error(field, fmt::format("leaves out device {}", d), "give each device one NIC");
  }

  void group(const Yaml& node, GroupId parent, const std::string& path, int depth) {
    if (depth > 8) throw error(path, "is nested deeper than 8 groups", "use fewer levels");
    if (static_cast<int>(cluster_.groups.size()) > kMaxDevices)
      throw error(path, "makes too many groups", "use fewer");
    GroupId id(static_cast<int64_t>(cluster_.groups.size()));
    cluster_.groups.emplace_back();
    Group g;
    g.name = node["name"] ? name(node["name"], join(path, "name")) : (depth ? "group" : "cluster");
    g.parent = parent;
    g.first_device = cluster_.size();
    g.link = read_link(node["link"], join(path, "link"));
    if (node["uplink"]) g.uplink = positive(node["uplink"], "bandwidth", join(path, "uplink"));
    if (node["backend"]) g.backend = read_backend(node["backend"], file_, join(path, "backend"));
    if (node["collectives"])
      g.measured = read_collectives(node["collectives"], join(path, "collectives"));
    Yaml groups = node["groups"], devices = node["devices"];
    if (static_cast<bool>(groups) == static_cast<bool>(devices))
      throw error(path.empty() ? "the file" : path, "must have either 'groups' or 'devices'",
                  "give one of them");
    if (groups) {
      sequence(groups, join(path, "groups"));
      for (size_t i = 0; i < groups.size(); ++i) {
        std::string child = join(path, fmt::format("groups[{}]", i));
        if (!groups[i].is_map()) throw error(child, "is not a map", "give link and devices");
        allow(groups[i], child,
              {"name", "count", "link", "uplink", "groups", "devices", "collectives", "direct",
               "nics", "backend"});
        int copies = groups[i]["count"] ? count(groups[i]["count"], join(child, "count")) : 1;
        for (int c = 0; c < copies; ++c) {
          g.children.push_back(GroupId(static_cast<int64_t>(cluster_.groups.size())));
          group(groups[i], id, child, depth + 1);
        }
      }
    } else {
      sequence(devices, join(path, "devices"));
      for (size_t i = 0; i < devices.size(); ++i) {
        std::string field = join(path, fmt::format("devices[{}]", i));
        const Yaml d = devices[i];
        if (!d.is_map() || !d["type"])
          throw error(field, "has no type", "give {type: ..., count: ...}");
        allow(d, field, {"type", "count"});
        int type = use_type(scalar(d["type"], join(field, "type")), join(field, "type"));
        int copies = d["count"] ? count(d["count"], join(field, "count")) : 1;
        if (cluster_.size() + copies > kMaxDevices)
          throw error(field, "makes too many devices",
                      fmt::format("at most {} are planned for", kMaxDevices));
        for (int c = 0; c < copies; ++c) cluster_.devices.push_back({type, id});
      }
    }
    g.device_count = cluster_.size() - g.first_device;
    if (node["direct"]) read_direct(node["direct"], join(path, "direct"), &g);
    if (node["nics"]) read_nics(node, path, &g);
    cluster_.groups[id.index] = std::move(g);
  }

  std::string file_;
  std::vector<DeviceType> known_;
  Cluster cluster_;
  Tariffs tariffs_;
};

}  // namespace

Cluster parse_cluster(const std::string& yaml, const std::string& name) {
  return Reader(name).read(yaml);
}

Tariffs parse_tariffs(const std::string& yaml, const std::string& name) {
  Reader reader(name);
  reader.read(yaml);
  return reader.tariffs();
}

namespace {

// The text of a cluster file.
std::string text_of(const std::string& path_or_name) {
  namespace fs = std::filesystem;
  bool is_name =
      path_or_name.find('/') == std::string::npos && path_or_name.find('.') == std::string::npos;
  if (!is_name || fs::is_regular_file(path_or_name))
    return read_file(path_or_name, size_t{1} << 24);
  std::vector<std::string> folders;
  char self[4096];
  if (ssize_t n = readlink("/proc/self/exe", self, sizeof self); n > 0)
    for (fs::path p = fs::path(std::string(self, static_cast<size_t>(n))).parent_path();
         p.has_relative_path(); p = p.parent_path())
      folders.push_back(p / "clusters");
  folders.push_back("clusters");
  std::vector<std::string> names;
  for (const std::string& folder : folders) {
    std::error_code code;
    if (fs::is_regular_file(folder + "/" + path_or_name + ".yaml", code))
      return read_file(folder + "/" + path_or_name + ".yaml", size_t{1} << 24);
    for (const auto& entry : fs::directory_iterator(folder, code))
      if (entry.path().extension() == ".yaml") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  throw user_error("cluster",
                   "'{}' is neither a file nor a shipped cluster; give a path or one of {}",
                   path_or_name, fmt::join(names, ", "));
}

}  // namespace

Cluster load_cluster(const std::string& path_or_name) {
  return parse_cluster(text_of(path_or_name), path_or_name);
}

Tariffs load_tariffs(const std::string& path_or_name) {
  return parse_tariffs(text_of(path_or_name), path_or_name);
}

Cluster flat_cluster(const std::vector<DeviceType>& types, const std::vector<int>& counts,
                     Link link) {
  Cluster cluster;
  cluster.name = "flat";
  cluster.types = types;
  Group root;
  root.name = "cluster";
  root.link = link;
  for (size_t t = 0; t < types.size(); ++t)
    for (int i = 0; i < counts[t]; ++i)
      cluster.devices.push_back({static_cast<int>(t), GroupId(0)});
  root.device_count = cluster.size();
  cluster.groups.push_back(root);
  return cluster;
}

}  // namespace motley

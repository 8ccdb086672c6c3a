#include "cluster/cluster.h"

#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "cluster/part.h"
#include "cluster/tariff.h"
#include "core/error.h"
#include "core/file.h"
#include "core/limits.h"
#include "core/printable.h"

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

// Walks one file; every failure names it and the path of the field.
class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  Cluster read(const std::string& text) {
    YAML::Node root;
    try {
      root = YAML::Load(text);
    } catch (const YAML::Exception& e) {
      throw user_error("cluster", "{}: line {}: not valid YAML: {}", file_, e.mark.line + 1, e.msg);
    }
    if (!root.IsMap())
      throw error("the file", "is not a map",
                  "start with 'name:', 'link:' and 'groups:' or 'devices:'");
    known_ = device_catalogue();
    if (YAML::Node list = root["device_types"]) {
      sequence(list, "device_types");
      if (list.size() > kMaxTypes)
        throw error("device_types", fmt::format("has {} entries", list.size()),
                    fmt::format("give at most {}", kMaxTypes));
      for (size_t i = 0; i < list.size(); ++i)
        read_type(list[i], fmt::format("device_types[{}]", i));
    }
    cluster_.name = root["name"] ? name(root["name"], "name") : "unnamed";
    allow(root, "",
          {"name", "link", "groups", "devices", "device_types", "uplink", "count", "collectives"});
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
  void allow(const YAML::Node& map, const std::string& path, std::vector<std::string> names) const {
    for (auto it : map) {
      std::string key = scalar(it.first, join(path, "a key"));
      if (std::find(names.begin(), names.end(), key) == names.end())
        throw error(join(path, key), "is not a known field",
                    fmt::format("known are {}", fmt::join(names, ", ")));
    }
  }
  std::string scalar(const YAML::Node& node, const std::string& field) const {
    if (!node.IsScalar()) throw error(field, "is not a single value", "give one");
    return node.Scalar();
  }
  // A name of something, which is printed and copied to all that `count` repeats.
  std::string name(const YAML::Node& node, const std::string& field) const {
    std::string text = scalar(node, field);
    if (text.empty()) throw error(field, "is empty", "give a name");
    if (text.size() > kMaxName)
      throw error(field, fmt::format("has {} characters", text.size()),
                  fmt::format("give at most {}", kMaxName));
    if (!is_printable(text)) throw error(field, "holds control characters", "give printable text");
    return text;
  }
  void sequence(const YAML::Node& node, const std::string& field) const {
    if (!node.IsSequence()) throw error(field, "is not a list", "give a list");
  }
  double quantity(const YAML::Node& node, const char* kind, const std::string& field) const {
    try {
      const double value = parse_quantity(scalar(node, field), kind, field);
      check_range(value, kind, field);
      return value;
    } catch (const UserError& e) {
      std::string what = e.what();
      throw user_error("cluster", "{}: {}", file_, what.substr(what.find("] ") + 2));
    }
  }
  double positive(const YAML::Node& node, const char* kind, const std::string& field) const {
    double x = quantity(node, kind, field);
    if (x <= 0)
      throw error(field, fmt::format("is {}", node.Scalar()), "give a number greater than 0");
    return x;
  }
  int count(const YAML::Node& node, const std::string& field) const {
    double x = positive(node, "number", field);
    if (x != std::floor(x) || x > kMaxDevices)
      throw error(field, fmt::format("is {}", node.Scalar()),
                  fmt::format("give a whole number from 1 to {}", kMaxDevices));
    return static_cast<int>(x);
  }

  void read_type(const YAML::Node& node, const std::string& path) {
    if (!node.IsMap()) throw error(path, "is not a map", "give name, flops, memory, ...");
    allow(node, path,
          {"name", "like", "flops", "half_flops", "memory", "reserved", "memory_bandwidth",
           "overhead", "speed", "ops", "price", "watts", "idle_watts"});
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
    if (node["ops"]) read_ops(node["ops"], join(path, "ops"), &type);
    read_tariff(node, path, name, base);
    std::erase_if(known_, [&](const DeviceType& k) { return k.name == name; });
    known_.push_back(type);
  }

  void read_tariff(const YAML::Node& node, const std::string& path, const std::string& name,
                   const std::string& base) {
    Tariff tariff = tariffs_[base];
    auto take = [&](const char* field, double* into) {
      if (!node[field]) return;
      *into = quantity(node[field], "number", join(path, field));
      if (*into > 1e9)
        throw error(join(path, field), "is " + node[field].Scalar(), "give at most 1e9");
    };
    take("price", &tariff.price);
    take("watts", &tariff.watts);
    if (node["watts"]) tariff.idle_watts = tariff.watts;
    take("idle_watts", &tariff.idle_watts);
    if (tariff.idle_watts > tariff.watts)
      throw error(join(path, "idle_watts"), "is more than watts", "give what it draws while idle");
    tariffs_[name] = tariff;
  }

  void read_ops(const YAML::Node& list, const std::string& path, DeviceType* type) const {
    sequence(list, path);
    type->ops.clear();
    if (list.size() > kMaxOps)
      throw error(path, fmt::format("has {} entries", list.size()),
                  fmt::format("give at most {}", kMaxOps));
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string field = fmt::format("{}[{}]", path, i);
      if (!list[i].IsMap() || !list[i]["op"])
        throw error(field, "has no op", "give {op: aten::mm, overhead: ..., flops: ...}");
      allow(list[i], field,
            {"op", "overhead", "flops", "memory_bandwidth", "cached", "uncached_bandwidth"});
      OpRate rate;
      rate.op = name(list[i]["op"], join(field, "op"));
      if (const YAML::Node x = list[i]["overhead"])
        rate.overhead = quantity(x, "time", join(field, "overhead"));
      if (const YAML::Node x = list[i]["flops"])
        rate.flops = positive(x, "flops", join(field, "flops"));
      if (const YAML::Node x = list[i]["memory_bandwidth"])
        rate.memory_bandwidth = positive(x, "bandwidth", join(field, "memory_bandwidth"));
      if (const YAML::Node x = list[i]["cached"])
        rate.cached = quantity(x, "bytes", join(field, "cached"));
      if (const YAML::Node x = list[i]["uncached_bandwidth"])
        rate.uncached_bandwidth = positive(x, "bandwidth", join(field, "uncached_bandwidth"));
      type->ops.push_back(rate);
    }
  }

  std::vector<CollectiveRate> read_collectives(const YAML::Node& list,
                                               const std::string& path) const {
    sequence(list, path);
    std::vector<CollectiveRate> rates;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string field = fmt::format("{}[{}]", path, i);
      if (!list[i].IsMap() || !list[i]["form"] || !list[i]["bandwidth"])
        throw error(field, "has no form or no bandwidth",
                    "give {form: all_reduce, latency: ..., bandwidth: ...}");
      allow(list[i], field, {"form", "latency", "bandwidth"});
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
      if (const YAML::Node x = list[i]["latency"])
        rate.latency = quantity(x, "time", join(field, "latency"));
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

  void group(const YAML::Node& node, GroupId parent, const std::string& path, int depth) {
    if (depth > 8) throw error(path, "is nested deeper than 8 groups", "use fewer levels");
    if (static_cast<int>(cluster_.groups.size()) > kMaxDevices)
      throw error(path, "makes too many groups", "use fewer");
    GroupId id(static_cast<int64_t>(cluster_.groups.size()));
    cluster_.groups.emplace_back();
    Group g;
    g.name = node["name"] ? name(node["name"], join(path, "name")) : (depth ? "group" : "cluster");
    g.parent = parent;
    g.first_device = cluster_.size();
    YAML::Node link = node["link"];
    if (!link)
      throw error(join(path, "link"), "is missing", "give link: {bandwidth: ..., latency: ...}");
    if (!link.IsMap())
      throw error(join(path, "link"), "is not a map", "give {bandwidth: ..., latency: ...}");
    allow(link, join(path, "link"), {"kind", "bandwidth", "latency"});
    if (!link["bandwidth"])
      throw error(join(path, "link.bandwidth"), "is missing", "for example 10 Gbps");
    g.link.bandwidth = positive(link["bandwidth"], "bandwidth", join(path, "link.bandwidth"));
    if (link["latency"])
      g.link.latency = quantity(link["latency"], "time", join(path, "link.latency"));
    if (link["kind"]) {
      std::string kind = scalar(link["kind"], join(path, "link.kind"));
      if (kind == "switch")
        g.link.kind = LinkKind::switched;
      else if (kind == "ring")
        g.link.kind = LinkKind::ring;
      else if (kind == "bus")
        g.link.kind = LinkKind::bus;
      else
        throw error(join(path, "link.kind"), "is '" + kind + "'", "give switch, ring or bus");
    }
    if (node["uplink"]) g.uplink = positive(node["uplink"], "bandwidth", join(path, "uplink"));
    if (node["collectives"])
      g.measured = read_collectives(node["collectives"], join(path, "collectives"));
    YAML::Node groups = node["groups"], devices = node["devices"];
    if (static_cast<bool>(groups) == static_cast<bool>(devices))
      throw error(path.empty() ? "the file" : path, "must have either 'groups' or 'devices'",
                  "give one of them");
    if (groups) {
      sequence(groups, join(path, "groups"));
      for (size_t i = 0; i < groups.size(); ++i) {
        std::string child = join(path, fmt::format("groups[{}]", i));
        if (!groups[i].IsMap()) throw error(child, "is not a map", "give link and devices");
        allow(groups[i], child,
              {"name", "count", "link", "uplink", "groups", "devices", "collectives"});
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
        const YAML::Node d = devices[i];
        if (!d.IsMap() || !d["type"])
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
    cluster_.groups[id.index] = std::move(g);
  }

  std::string file_;
  std::vector<DeviceType> known_;
  Cluster cluster_;
  Tariffs tariffs_;
};

void write_group(const Cluster& cluster, GroupId id, YAML::Emitter& out) {
  const Group& g = cluster.groups[id.index];
  out << YAML::Key << "link" << YAML::Value << YAML::Flow << YAML::BeginMap;
  if (g.link.kind != LinkKind::switched)
    out << YAML::Key << "kind" << YAML::Value << to_string(g.link.kind);
  out << YAML::Key << "bandwidth" << YAML::Value << fmt::format("{}", g.link.bandwidth);
  out << YAML::Key << "latency" << YAML::Value << fmt::format("{}", g.link.latency) << YAML::EndMap;
  if (g.uplink > 0) out << YAML::Key << "uplink" << YAML::Value << fmt::format("{}", g.uplink);
  if (!g.measured.empty()) {
    out << YAML::Key << "collectives" << YAML::Value << YAML::BeginSeq;
    for (const CollectiveRate& rate : g.measured)
      out << YAML::Flow << YAML::BeginMap << YAML::Key << "form" << YAML::Value
          << to_string(rate.collective) << YAML::Key << "latency" << YAML::Value
          << fmt::format("{}", rate.latency) << YAML::Key << "bandwidth" << YAML::Value
          << fmt::format("{}", rate.bandwidth) << YAML::EndMap;
    out << YAML::EndSeq;
  }
  if (!g.children.empty()) {
    out << YAML::Key << "groups" << YAML::Value << YAML::BeginSeq;
    for (GroupId child : g.children) {
      out << YAML::BeginMap << YAML::Key << "name" << YAML::Value
          << cluster.groups[child.index].name;
      write_group(cluster, child, out);
      out << YAML::EndMap;
    }
    out << YAML::EndSeq;
  } else {
    out << YAML::Key << "devices" << YAML::Value << YAML::BeginSeq;
    for (int d = 0; d < g.device_count;) {
      int type = cluster.devices[g.first_device + d].type, n = 0;
      while (d < g.device_count && cluster.devices[g.first_device + d].type == type) ++d, ++n;
      out << YAML::Flow << YAML::BeginMap << YAML::Key << "type" << YAML::Value
          << cluster.types[type].name << YAML::Key << "count" << YAML::Value << n << YAML::EndMap;
    }
    out << YAML::EndSeq;
  }
}

// yaml-cpp recurses and expands aliases: both are bounded before it sees the text.
void check_depth(const std::string& yaml, const std::string& name) {
  if (yaml.size() > (size_t{1} << 24)) throw user_error("cluster", "{}: larger than 16 MiB", name);
  int depth = 0, deepest = 0;
  for (char c : yaml) {
    if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    if (c == ']' || c == '}') depth = std::max(0, depth - 1);
  }
  if (deepest > 64) throw user_error("cluster", "{}: nested deeper than 64 brackets", name);
  size_t column = 0, indent = 0;
  bool leading = true;
  for (char c : yaml) {
    if (c == '\n')
      column = 0, leading = true;
    else if (leading && (c == ' ' || c == '-' || c == '?'))
      indent = std::max(indent, ++column);
    else
      leading = false;
  }
  if (indent > 512) throw user_error("cluster", "{}: indented deeper than 512 columns", name);
}

}  // namespace

Cluster parse_cluster(const std::string& yaml, const std::string& name) {
  check_depth(yaml, name);
  return Reader(name).read(yaml);
}

Tariffs parse_tariffs(const std::string& yaml, const std::string& name) {
  check_depth(yaml, name);
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

std::string to_yaml(const Cluster& cluster) {
  YAML::Emitter out;
  out << YAML::BeginMap << YAML::Key << "name" << YAML::Value << cluster.name;
  write_group(cluster, GroupId(0), out);
  out << YAML::Key << "device_types" << YAML::Value << YAML::BeginSeq;
  for (const DeviceType& t : cluster.types) {
    out << YAML::Flow << YAML::BeginMap << YAML::Key << "name" << YAML::Value << t.name;
    auto put = [&](const char* field, double x) {
      if (x > 0) out << YAML::Key << field << YAML::Value << fmt::format("{}", x);
    };
    put("flops", t.flops);
    put("half_flops", t.half_flops);
    put("memory", t.memory + t.reserved);
    put("reserved", t.reserved);
    put("memory_bandwidth", t.memory_bandwidth);
    put("overhead", t.overhead);
    put("speed", t.speed);
    if (!t.ops.empty()) {
      out << YAML::Key << "ops" << YAML::Value << YAML::BeginSeq;
      for (const OpRate& rate : t.ops) {
        out << YAML::BeginMap << YAML::Key << "op" << YAML::Value << rate.op;
        put("overhead", rate.overhead);
        put("flops", rate.flops);
        put("memory_bandwidth", rate.memory_bandwidth);
        put("cached", rate.cached);
        put("uncached_bandwidth", rate.uncached_bandwidth);
        out << YAML::EndMap;
      }
      out << YAML::EndSeq;
    }
    out << YAML::EndMap;
  }
  out << YAML::EndSeq << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

Cluster scaled_down(const Cluster& cluster, int workers, double cores) {
  // The child of the root that a device is in; the device itself in a flat cluster.
  auto site = [&](int d) {
    int64_t below = -1 - d;
    for (GroupId g = cluster.devices[d].parent; cluster.groups[g.index].parent.valid();
         g = cluster.groups[g.index].parent)
      below = g.index;
    return below;
  };
  std::vector<int> chosen, by_type(cluster.types.size());
  std::map<int64_t, int> by_site;
  std::vector<bool> taken(cluster.size());
  while (static_cast<int>(chosen.size()) < std::min(workers, cluster.size())) {
    int best = -1;
    for (int d = 0; d < cluster.size(); ++d) {
      if (taken[d]) continue;
      auto rank = [&](int x) {
        return std::pair(by_site[site(x)], by_type[cluster.devices[x].type]);
      };
      if (best < 0 || rank(d) < rank(best)) best = d;
    }
    taken[best] = true;
    ++by_site[site(best)];
    ++by_type[cluster.devices[best].type];
    chosen.push_back(best);
  }
  std::sort(chosen.begin(), chosen.end());
  const DeviceType core = [] {
    for (const DeviceType& t : device_catalogue())
      if (t.name == "cpu-core") return t;
    return DeviceType{};
  }();
  Cluster whole = cluster;
  FlopsPerSecond total = 0;
  for (int d : chosen) total += cluster.type_of(d).flops;
  double slower = 0;  // by how much time is stretched
  for (size_t i = 0; i < whole.types.size(); ++i) {
    if (by_type[i] == 0) continue;
    DeviceType& t = whole.types[i];
    t.speed = std::clamp(cores * t.flops / total, 0.01, 1.0);
    slower = std::max(slower, t.flops / (core.flops * t.speed));
    t.flops = t.half_flops = core.flops * t.speed;
    t.memory_bandwidth = core.memory_bandwidth * t.speed;
    t.overhead = core.overhead / t.speed;
    t.ops.clear();
  }
  // The part of a group's devices that is left: ports shrink with the devices that share them.
  auto left = [&](const Group& g) {
    const auto first = std::lower_bound(chosen.begin(), chosen.end(), g.first_device);
    const auto last = std::lower_bound(first, chosen.end(), g.first_device + g.device_count);
    return static_cast<double>(last - first) / g.device_count;
  };
  for (Group& group : whole.groups) {
    double shared = 1;
    for (GroupId child : group.children)
      if (const double part = left(whole.groups[child.index]); part > 0)
        shared = std::min(shared, part);
    group.link.bandwidth *= shared / slower;
    group.uplink *= left(group) / slower;
    group.measured.clear();
  }
  Cluster part = part_of(whole, chosen);
  part.name = fmt::format("{}-scaled-{}", cluster.name, part.size());
  return part;
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

// The YAML text of a cluster.
#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include "cluster/cluster.h"

namespace motley {

namespace {

void write_group(const Cluster& cluster, GroupId id, YAML::Emitter& out) {
  const Group& g = cluster.groups[id.index];
  out << YAML::Key << "link" << YAML::Value << YAML::Flow << YAML::BeginMap;
  if (g.link.kind != LinkKind::switched)
    out << YAML::Key << "kind" << YAML::Value << to_string(g.link.kind);
  if (!g.link.type.empty()) out << YAML::Key << "type" << YAML::Value << g.link.type;
  out << YAML::Key << "bandwidth" << YAML::Value << fmt::format("{}", g.link.bandwidth);
  out << YAML::Key << "latency" << YAML::Value << fmt::format("{}", g.link.latency) << YAML::EndMap;
  if (!g.nics.empty()) {
    out << YAML::Key << "nics" << YAML::Value << YAML::BeginSeq;
    for (const Nic& nic : g.nics)
      out << YAML::Flow << YAML::BeginMap << YAML::Key << "bandwidth" << YAML::Value
          << fmt::format("{}", nic.bandwidth) << YAML::Key << "near" << YAML::Value << nic.near
          << YAML::EndMap;
    out << YAML::EndSeq;
  } else if (g.uplink > 0) {
    out << YAML::Key << "uplink" << YAML::Value << fmt::format("{}", g.uplink);
  }
  if (!g.direct.empty()) {
    out << YAML::Key << "direct" << YAML::Value << YAML::BeginSeq;
    for (const DirectLink& d : g.direct)
      out << YAML::Flow << YAML::BeginMap << YAML::Key << "bandwidth" << YAML::Value
          << fmt::format("{}", d.bandwidth) << YAML::Key << "latency" << YAML::Value
          << fmt::format("{}", d.latency) << YAML::Key << "between" << YAML::Value << YAML::BeginSeq
          << std::vector<int>{d.a, d.b, d.links} << YAML::EndSeq << YAML::EndMap;
    out << YAML::EndSeq;
  }
  if (const Backend& b = g.backend; b == backend_named(b.name) && !b.name.empty())
    out << YAML::Key << "backend" << YAML::Value << b.name;
  else if (!b.name.empty())
    out << YAML::Key << "backend" << YAML::Value << YAML::Flow << YAML::BeginMap << YAML::Key
        << "name" << YAML::Value << b.name << YAML::Key << "messages" << YAML::Value << b.messages
        << YAML::Key << "all_to_all" << YAML::Value << b.all_to_all << YAML::Key << "half_sums"
        << YAML::Value << b.half_sums << YAML::Key << "hides" << YAML::Value << b.hides
        << YAML::EndMap;
  if (!g.measured.empty()) {
    out << YAML::Key << "collectives" << YAML::Value << YAML::BeginSeq;
    for (const CollectiveRate& rate : g.measured) {
      out << YAML::Flow << YAML::BeginMap << YAML::Key << "form" << YAML::Value
          << to_string(rate.collective) << YAML::Key << "latency" << YAML::Value
          << fmt::format("{}", rate.latency) << YAML::Key << "bandwidth" << YAML::Value
          << fmt::format("{}", rate.bandwidth);
      if (rate.least > 0)
        out << YAML::Key << "least" << YAML::Value << fmt::format("{}", rate.least);
      out << YAML::EndMap;
    }
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

}  // namespace

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
    put("interference", t.interference);
    if (!t.ops.empty()) {
      out << YAML::Key << "ops" << YAML::Value << YAML::BeginSeq;
      for (const OpRate& rate : t.ops) {
        out << YAML::BeginMap << YAML::Key << "op" << YAML::Value << rate.op;
        put("overhead", rate.overhead);
        put("flops", rate.flops);
        put("memory_bandwidth", rate.memory_bandwidth);
        put("cached", rate.cached);
        put("uncached_bandwidth", rate.uncached_bandwidth);
        put("launch", rate.launch);
        out << YAML::EndMap;
      }
      out << YAML::EndSeq;
    }
    out << YAML::EndMap;
  }
  out << YAML::EndSeq << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace motley

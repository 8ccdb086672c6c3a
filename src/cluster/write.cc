// The YAML text of a cluster.
#include "cluster/cluster.h"
#include "core/yaml.h"

namespace motley {

namespace {

void write_group(const Cluster& cluster, GroupId id, YamlWriter* out) {
  const Group& g = cluster.groups[id.index];
  out->key("link");
  out->begin_map(YamlWriter::flow);
  if (g.link.kind != LinkKind::switched) out->entry("kind", to_string(g.link.kind));
  if (!g.link.type.empty()) out->entry("type", g.link.type);
  out->entry("bandwidth", g.link.bandwidth);
  out->entry("latency", g.link.latency);
  out->end();
  if (!g.nics.empty()) {
    out->key("nics");
    out->begin_list();
    for (const Nic& nic : g.nics) {
      out->begin_map(YamlWriter::flow);
      out->entry("bandwidth", nic.bandwidth);
      out->key("near");
      out->begin_list(YamlWriter::flow);
      for (int device : nic.near) out->scalar(device);
      out->end();
      out->end();
    }
    out->end();
  } else if (g.uplink > 0) {
    out->entry("uplink", g.uplink);
  }
  if (!g.direct.empty()) {
    out->key("direct");
    out->begin_list();
    for (const DirectLink& d : g.direct) {
      out->begin_map(YamlWriter::flow);
      out->entry("bandwidth", d.bandwidth);
      out->entry("latency", d.latency);
      out->key("between");
      out->begin_list();
      out->begin_list();
      for (int number : {d.a, d.b, d.links}) out->scalar(number);
      out->end();
      out->end();
      out->end();
    }
    out->end();
  }
  if (const Backend& b = g.backend; b == backend_named(b.name) && !b.name.empty()) {
    out->entry("backend", b.name);
  } else if (!b.name.empty()) {
    out->key("backend");
    out->begin_map(YamlWriter::flow);
    out->entry("name", b.name);
    out->entry("messages", b.messages);
    out->entry("all_to_all", b.all_to_all);
    out->entry("half_sums", b.half_sums);
    out->entry("hides", b.hides);
    out->end();
  }
  if (!g.measured.empty()) {
    out->key("collectives");
    out->begin_list();
    for (const CollectiveRate& rate : g.measured) {
      out->begin_map(YamlWriter::flow);
      out->entry("form", to_string(rate.collective));
      out->entry("latency", rate.latency);
      out->entry("bandwidth", rate.bandwidth);
      if (rate.least > 0) out->entry("least", rate.least);
      out->end();
    }
    out->end();
  }
  if (!g.children.empty()) {
    out->key("groups");
    out->begin_list();
    for (GroupId child : g.children) {
      out->begin_map();
      out->entry("name", cluster.groups[child.index].name);
      write_group(cluster, child, out);
      out->end();
    }
    out->end();
  } else {
    out->key("devices");
    out->begin_list();
    for (int d = 0; d < g.device_count;) {
      int type = cluster.devices[g.first_device + d].type, n = 0;
      while (d < g.device_count && cluster.devices[g.first_device + d].type == type) ++d, ++n;
      out->begin_map(YamlWriter::flow);
      out->entry("type", cluster.types[type].name);
      out->entry("count", n);
      out->end();
    }
    out->end();
  }
}

}  // namespace

std::string to_yaml(const Cluster& cluster) {
  YamlWriter out;
  out.begin_map();
  out.entry("name", cluster.name);
  write_group(cluster, GroupId(0), &out);
  out.key("device_types");
  out.begin_list();
  for (const DeviceType& t : cluster.types) {
    out.begin_map(YamlWriter::flow);
    out.entry("name", t.name);
    auto put = [&](const char* field, double x) {
      if (x > 0) out.entry(field, x);
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
      out.key("ops");
      out.begin_list();
      for (const OpRate& rate : t.ops) {
        out.begin_map();
        out.entry("op", rate.op);
        put("overhead", rate.overhead);
        put("flops", rate.flops);
        put("memory_bandwidth", rate.memory_bandwidth);
        put("cached", rate.cached);
        put("uncached_bandwidth", rate.uncached_bandwidth);
        put("launch", rate.launch);
        out.end();
      }
      out.end();
    }
    out.end();
  }
  out.end();
  out.end();
  return out.written() + "\n";
}

}  // namespace motley

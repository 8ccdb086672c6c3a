#include "readers/assemble.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/units.h"
#include "readers/machines.h"
#include "readers/nccl.h"
#include "readers/planners.h"
#include "readers/text.h"

namespace motley::readers {

namespace {

constexpr double kNetwork = 12.5e9, kNetworkLatency = 10e-6;
constexpr int kMachine = 8;  // GPUs, where nothing says how many

struct Site {
  std::string name, why;  // why: what the link is assumed from; empty: it was measured
  BytesPerSecond bandwidth = kNetwork;
  Seconds latency = kNetworkLatency;
  std::vector<Site> children;
  std::vector<std::string> devices;  // types
  std::string direct;                // links between pairs of them, as a cluster file has them
  std::map<Collective, NcclFit> measured;

  int size() const {
    int n = static_cast<int>(devices.size());
    for (const Site& child : children) n += child.size();
    return n;
  }
};

// GB/s of a NVLink and of PCIe with 16 lanes, in one direction, as GPUs of a type have it.
double nvlink_of(const std::string& type) { return type.starts_with("P100") ? 20 : 25; }
double pcie_of(const std::string& type) {
  if (type.starts_with("H100") || type.starts_with("GH200")) return 48;
  return type.starts_with("A100") ? 24 : 12;
}

class Assembler {
 public:
  explicit Assembler(const Sources& sources) : s_(sources) {}

  Assembled run() {
    if (!s_.topo && !s_.query && !s_.nodes && !s_.hostfile && s_.nccl.empty())
      throw user_error("cluster",
                       "nothing says which devices there are; give --from-nodes, --from-hostfile, "
                       "--from-nccl, --from-query or --from-topo");
    for (const Source& file : s_.nccl)
      for (NcclRun& run : parse_communication(file.text, file.name)) {
        runs_.push_back(std::move(run));
        names_.push_back(file.name);
      }
    if (s_.topo) matrix_ = parse_topo(s_.topo->text, s_.topo->name);
    if (s_.query) gpus_ = parse_query(s_.query->text, s_.query->name);
    find_machines();
    Site root = outer();
    for (size_t i = 0; i < runs_.size(); ++i) measure(&root, runs_[i], names_[i]);
    assume(root);
    if (s_.device) put_device();
    write(root);
    return std::move(out_);
  }

 private:
  void find_machines() {
    std::string from;
    if (s_.nodes)
      machines_ = parse_nodes(s_.nodes->text, s_.nodes->name), from = s_.nodes->name;
    else if (s_.hostfile)
      machines_ = parse_hostfile(s_.hostfile->text, s_.hostfile->name), from = s_.hostfile->name;
    else
      from_ranks(&from);
    if (machines_.empty()) {
      machines_ = {{"machine", 0, ""}};
      from = (s_.topo ? s_.topo : s_.query)->name;
    }
    int64_t devices = 0;
    for (Machine& m : machines_) {
      if (m.gpus == 0 && s_.query) m.gpus = static_cast<int>(gpus_.size());
      if (m.gpus == 0 && s_.topo) m.gpus = static_cast<int>(matrix_.between.size());
      if (m.gpus == 0) {
        m.gpus = kMachine;
        assumed(fmt::format("devices of {}: {}", plain(m.host), kMachine));
      }
      devices += m.gpus;
    }
    if (devices > kMaxDevices)
      throw user_error("cluster", "{}: has {} devices; at most {} are read", from, devices,
                       kMaxDevices);
    out_.read.push_back(fmt::format("{} machine{} with {} devices: {}", machines_.size(),
                                    machines_.size() > 1 ? "s" : "", devices, from));
  }

  void from_ranks(std::string* from) {
    for (size_t i = 0; i < runs_.size(); ++i) {
      std::vector<Machine> machines;
      for (const NcclRun::Rank& rank : runs_[i].all) {
        auto it = std::find_if(machines.begin(), machines.end(),
                               [&](const Machine& m) { return m.host == rank.host; });
        if (it == machines.end()) it = machines.insert(it, {rank.host, 0, rank.device});
        ++it->gpus;
      }
      const auto total = [](const std::vector<Machine>& list) {
        return std::accumulate(list.begin(), list.end(), 0,
                               [](int n, const Machine& m) { return n + m.gpus; });
      };
      if (total(machines) > total(machines_)) machines_ = machines, *from = names_[i];
    }
  }

  void assumed(const std::string& what) {
    if (std::find(out_.assumed.begin(), out_.assumed.end(), what) == out_.assumed.end())
      out_.assumed.push_back(what);
  }

  // The device type of a GPU of a machine; describes it if the catalogue does not have it.
  std::string type_of(const Machine& m, int gpu) {
    std::string name = m.type;
    Bytes memory = 0;
    // What nvidia-smi says is of the machine it ran on, and of those like it.
    if (static_cast<int>(gpus_.size()) == m.gpus &&
        (name.empty() || lower(gpus_[gpu].name).find(lower(name)) != std::string::npos)) {
      name = gpus_[gpu].name;
      memory = gpus_[gpu].memory;
    }
    if (name.empty()) {
      for (const NcclRun& run : runs_)
        for (const NcclRun::Rank& rank : run.all)
          if (name.empty() && (rank.host == m.host || run.hosts == 1)) name = rank.device;
    }
    if (name.empty()) {
      assumed("type of the devices: A100-40GB (give --from-query or --from-nodes)");
      return "A100-40GB";
    }
    if (const std::string known = catalogue_type(name, memory); !known.empty()) {
      if (memory == 0 && (known.starts_with("A100") || known.starts_with("V100")) &&
          lower(name).find("gb") == std::string::npos)
        assumed(fmt::format("memory of {}: that of {} (give --from-query)", plain(name), known));
      return known;
    }
    std::string label = plain(name);
    if (!described_.count(label)) {
      const std::string n = lower(name);
      const auto has = [&](const char* part) { return n.find(part) != std::string::npos; };
      const std::string like =
          has("h200") || has("h800") || has("h20") || has("b200") || has("b300") ? "H100-80GB"
          : has("a800") || has("a40") || has("l40") || has("a30")                ? "A100-40GB"
                                                                                 : "T4";
      assumed(
          fmt::format("speed of {}: that of {} (measure it with motley calibrate)", label, like));
      if (memory == 0) assumed(fmt::format("memory of {}: that of {}", label, like));
      const double kept = memory > 0 ? std::max(0.5 * memory, memory - 1024. * 1024 * 1024) : 0;
      described_[label] = fmt::format("  - {{name: {}, like: {}{}}}", label, like,
                                      kept > 0 ? fmt::format(", memory: {}", kept) : "");
    }
    return label;
  }

  Site machine(const Machine& m, const std::string& name) {
    std::vector<std::string> types;
    for (int g = 0; g < m.gpus; ++g) types.push_back(type_of(m, g));
    if (s_.topo && static_cast<int>(matrix_.between.size()) == m.gpus) {
      std::vector<int> all(static_cast<size_t>(m.gpus));
      std::iota(all.begin(), all.end(), 0);
      return inside(all, types, name);
    }
    Site site{name, "", pcie_of(types[0]) * kGB, 8e-6, {}, types, {}};
    site.why = fmt::format("PCIe of {}", types[0]);
    return site;
  }

  // GPUs that are nearer to each other than to the rest are a group.
  Site inside(const std::vector<int>& gpus, const std::vector<std::string>& types,
              const std::string& name) {
    Near farthest = Near::nvlink;
    for (const int a : gpus)
      for (const int b : gpus)
        if (a != b) farthest = std::max(farthest, matrix_.between[a][b].near);
    Site site{name, "", 0, 0, {}, {}, {}};
    const std::string& type = types[gpus[0]];
    const double pcie = pcie_of(type);
    switch (farthest) {
      case Near::nvlink: {
        const int links = nvlinks(gpus);
        site.bandwidth = nvlink_of(type) * links * kGB, site.latency = 3e-6;
        site.why =
            fmt::format("{} NVLink{} of {} GB/s", links, links > 1 ? "s" : "", nvlink_of(type));
        break;
      }
      case Near::pix:
      case Near::pxb:
        site.bandwidth = pcie * kGB, site.latency = 5e-6;
        break;
      case Near::phb:
      case Near::node:
        site.bandwidth = 0.8 * pcie * kGB, site.latency = 7e-6;
        break;
      case Near::sys:
        site.bandwidth = 0.6 * pcie * kGB, site.latency = 10e-6;
        break;
    }
    if (site.why.empty()) site.why = fmt::format("{}, PCIe of {}", to_string(farthest), type);
    // Components of what is nearer.
    std::vector<std::vector<int>> parts;
    std::set<int> left(gpus.begin(), gpus.end());
    while (!left.empty() && farthest != Near::nvlink) {
      std::vector<int> part = {*left.begin()};
      left.erase(left.begin());
      for (size_t i = 0; i < part.size(); ++i)
        for (auto it = left.begin(); it != left.end();)
          if (matrix_.between[part[i]][*it].near < farthest) {
            part.push_back(*it);
            it = left.erase(it);
          } else {
            ++it;
          }
      std::sort(part.begin(), part.end());
      parts.push_back(std::move(part));
    }
    const bool split = parts.size() > 1 && std::any_of(parts.begin(), parts.end(),
                                                       [](auto& p) { return p.size() > 1; });
    if (!split) {
      // Joined through others by something nearer: a ring or mesh of NVLinks with gaps.
      if (parts.size() == 1 && farthest != Near::nvlink && nvlinks(gpus) > 0) {
        site.direct = pairs(gpus);
        site.why += fmt::format(", beside NVLinks of {} GB/s", nvlink_of(type));
      }
      for (const int g : gpus) site.devices.push_back(types[g]);
      if (!std::is_sorted(gpus.begin(), gpus.end()))
        assumed("the order of ranks follows the groups");
      return site;
    }
    std::vector<int> order;
    for (const auto& part : parts) order.insert(order.end(), part.begin(), part.end());
    if (!std::is_sorted(order.begin(), order.end()))
      assumed(fmt::format("ranks of a machine are its GPUs {} (CUDA_VISIBLE_DEVICES={})",
                          fmt::join(order, " "), fmt::join(order, ",")));
    for (const auto& part : parts)
      site.children.push_back(
          inside(part, types, to_string(farthest) == std::string("SYS") ? "socket" : "switch"));
    return site;
  }

  // "[0, 1, 2], [0, 3]": the GPUs of a group that NVLinks join, and by how many.
  std::string pairs(const std::vector<int>& gpus) const {
    std::string list;
    for (size_t a = 0; a < gpus.size(); ++a)
      for (size_t b = a + 1; b < gpus.size(); ++b)
        if (const int links = matrix_.between[gpus[a]][gpus[b]].links; links > 0)
          list += fmt::format("{}[{}, {}, {}]", list.empty() ? "" : ", ", a, b, links);
    return list;
  }

  // NVLinks of the GPU that has the fewest, to those of a group; behind a switch of all its own, to
  // each.
  int nvlinks(const std::vector<int>& gpus) const {
    int fewest = 1 << 20, all = 0, each = 0;
    bool equal = true;
    for (const int a : gpus) {
      int sum = 0;
      for (const int b : gpus)
        if (a != b) {
          const int links = matrix_.between[a][b].links;
          sum += links;
          equal = equal && (each == 0 || links == each);
          each = links;
        }
      fewest = std::min(fewest, sum);
      all = std::max(all, sum);
    }
    constexpr int kMostLinks = 18;  // that a GPU has
    return equal && gpus.size() > 2 && all > kMostLinks
               ? each
               : std::max(fewest, gpus.size() == 1 ? 1 : 0);
  }

  Site outer() {
    if (!s_.topology) {
      if (machines_.size() == 1) return machine(machines_[0], "machine");
      Site root{"", "a network of 100 Gbps", kNetwork, kNetworkLatency, {}, {}, {}};
      for (const Machine& m : machines_) root.children.push_back(machine(m, "machine"));
      return root;
    }
    const Switch tree = parse_topology(s_.topology->text, s_.topology->name);
    std::map<std::string, const Machine*> by_host;
    for (const Machine& m : machines_) by_host[m.host] = &m;
    Site root = of_switch(tree, &by_host);
    if (root.size() == 0)
      throw user_error("cluster",
                       "{}: joins none of the machines, such as {}; give the topology of these",
                       s_.topology->name, machines_[0].host);
    if (!by_host.empty()) {
      assumed(fmt::format("{} machine{} that {} does not name, such as {}: joined at the top",
                          by_host.size(), by_host.size() > 1 ? "s" : "", s_.topology->name,
                          by_host.begin()->first));
      Site top{"", "a network of 100 Gbps", kNetwork, kNetworkLatency, {}, {}, {}};
      top.children.push_back(std::move(root));
      for (const auto& [host, m] : by_host) top.children.push_back(machine(*m, "machine"));
      root = std::move(top);
    }
    out_.read.push_back(fmt::format("switches: {}", s_.topology->name));
    return root;
  }

  Site of_switch(const Switch& s, std::map<std::string, const Machine*>* by_host) {
    Site site{plain(s.name.empty() ? "network" : "switch"),
              "a network of 100 Gbps",
              kNetwork,
              kNetworkLatency,
              {},
              {},
              {}};
    if (s.speed_given)
      assumed(fmt::format("LinkSpeed in {} is not used: it has no unit, and Slurm does not read it",
                          s_.topology->name));
    for (const Switch& below : s.switches) {
      Site child = of_switch(below, by_host);
      if (child.size() > 0) site.children.push_back(std::move(child));
    }
    for (const std::string& host : s.machines)
      if (const auto it = by_host->find(host); it != by_host->end()) {
        site.children.push_back(machine(*it->second, "machine"));
        by_host->erase(it);
      }
    if (site.children.size() == 1 && s.machines.empty()) return std::move(site.children[0]);
    return site;
  }

  // The groups whose devices a run was over: those of its size, or else the smallest that have more.
  static void level_of(Site* site, int ranks, std::map<int, std::vector<Site*>>* by_size) {
    const int n = site->size();
    if (n >= ranks && n > 1) (*by_size)[n].push_back(site);
    for (Site& child : site->children) level_of(&child, ranks, by_size);
  }

  void measure(Site* root, const NcclRun& run, const std::string& name) {
    NcclFit fitted = fit(run);
    const bool one_size = std::all_of(run.points.begin(), run.points.end(), [&](const auto& p) {
      return p.first == run.points[0].first;
    });  // which says nothing of the latency
    std::map<int, std::vector<Site*>> by_size;
    level_of(root, run.ranks, &by_size);
    if (by_size.empty())
      throw user_error(
          "cluster",
          "{}: is of {} ranks, but there are {} devices; give the machines that it ran on", name,
          run.ranks, root->size());
    if (fitted.bandwidth <= 0)
      throw user_error("cluster",
                       "{}: times do not grow with the size; give sizes up to some 100 MB", name);
    // Of a level with one child the child is meant where a run was on one machine.
    std::vector<Site*>& sites = by_size.begin()->second;
    for (Site* site : sites) {
      const bool first = site->why.empty();
      if (site->direct.empty() && (!first || run.collective == Collective::all_reduce)) {
        site->bandwidth = fitted.port;
        if (!one_size) site->latency = fitted.latency;
        site->why.clear();
      }
      if (one_size) fitted.latency = site->latency;
      if (!run.message && site->size() == run.ranks) site->measured[run.collective] = fitted;
    }
    out_.read.push_back(
        fmt::format("link of groups of {} devices: {}, {} over {} ranks: {:.4g} GB/s, {} a round "
                    "(fit {:.1f}% off, R2 {:.4f})",
                    sites[0]->size(), name, run.message ? "messages" : to_string(run.collective),
                    run.ranks, fitted.port / kGB, format_seconds(fitted.latency),
                    100 * fitted.line.error, fitted.line.r2));
  }

  void assume(const Site& site) {
    if (!site.why.empty() && site.size() > 1)
      assumed(fmt::format(
          "link of groups of {} devices: {:.4g} GB/s, {} ({}; measure it with nccl-tests)",
          site.size(), site.bandwidth / kGB, format_seconds(site.latency), site.why));
    for (const Site& child : site.children) assume(child);
  }

  static std::string text_of(const Site& site, const std::string& indent) {
    std::string out =
        fmt::format("{}link: {{bandwidth: {:.6g}, latency: {:.4g}}}{}\n", indent, site.bandwidth,
                    site.latency, site.why.empty() ? "" : "  # assumed: " + site.why);
    if (!site.direct.empty())
      out += fmt::format("{0}direct:\n{0}  - {{type: {1}, between: [{2}]}}\n", indent,
                         site.devices[0].starts_with("P100")   ? "NVLink1"
                         : site.devices[0].starts_with("V100") ? "NVLink2"
                                                               : "NVLink3",
                         site.direct);
    if (!site.measured.empty()) {
      out += indent + "collectives:\n";
      for (const auto& [collective, fitted] : site.measured)
        out += fmt::format("{}  - {{form: {}, latency: {:.6g}, bandwidth: {:.6g}}}\n", indent,
                           to_string(collective), fitted.latency, fitted.bandwidth);
    }
    if (!site.devices.empty()) {
      out += indent + "devices:\n";
      for (size_t i = 0; i < site.devices.size();) {
        size_t end = i;
        while (end < site.devices.size() && site.devices[end] == site.devices[i]) ++end;
        out += fmt::format("{}  - {{type: {}, count: {}}}\n", indent, site.devices[i], end - i);
        i = end;
      }
      return out;
    }
    out += indent + "groups:\n";
    std::vector<std::string> texts;
    for (const Site& child : site.children) texts.push_back(text_of(child, indent + "    "));
    for (size_t i = 0; i < texts.size();) {
      size_t end = i;
      while (end < texts.size() && texts[end] == texts[i] &&
             site.children[end].name == site.children[i].name)
        ++end;
      out += fmt::format("{}  - name: {}\n", indent, site.children[i].name);
      if (end - i > 1) out += fmt::format("{}    count: {}\n", indent, end - i);
      out += texts[i];
      i = end;
    }
    return out;
  }

  // As a type of the file, on top of what the catalogue or nvidia-smi says.
  void put_device() {
    const DeviceType& d = *s_.device;
    const std::string fields = fmt::format(
        "flops: {:.6g}, half_flops: {:.6g}, memory_bandwidth: {:.6g}, overhead: {:.4g}{}}}",
        d.flops, d.half_flops, d.memory_bandwidth, d.overhead,
        d.interference > 0 ? fmt::format(", interference: {:.4g}", d.interference) : "");
    std::string& text = described_[d.name];
    text = text.empty() ? fmt::format("  - {{name: {}, ", d.name)
                        : text.substr(0, text.size() - 1) + ", ";
    text += fields;
    out_.read.insert(out_.read.end(), s_.of_device.begin(), s_.of_device.end());
    std::erase_if(out_.assumed, [&](const std::string& what) {
      return what.starts_with(fmt::format("speed of {}:", d.name));
    });
  }

  void write(const Site& root) {
    const auto comment = [](std::string text) {
      for (char& c : text)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
      return text;
    };
    std::string yaml;
    for (const std::string& line : out_.read) yaml += "# read: " + comment(line) + "\n";
    for (const std::string& line : out_.assumed)
      yaml += "# not known, assumed: " + comment(line) + "\n";
    yaml += fmt::format("name: {}\n", plain(s_.cluster));
    yaml += text_of(root, "");
    if (!described_.empty()) {
      yaml += "device_types:\n";
      for (const auto& [label, text] : described_) yaml += text + "\n";
    }
    out_.cluster = parse_cluster(yaml, plain(s_.cluster) + ".yaml");
    out_.yaml = std::move(yaml);
  }

  const Sources& s_;
  std::vector<NcclRun> runs_;
  std::vector<std::string> names_;  // [run] of its file
  TopoMatrix matrix_;
  std::vector<Gpu> gpus_;
  std::vector<Machine> machines_;
  std::map<std::string, std::string> described_;  // device types that are not in the catalogue
  Assembled out_;
};

}  // namespace

Assembled assemble(const Sources& sources) { return Assembler(sources).run(); }

}  // namespace motley::readers

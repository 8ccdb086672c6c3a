// From what was measured to a cluster file, and what is said about it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "cluster/part.h"
#include "core/error.h"
#include "core/median.h"
#include "discover/discover.h"
#include "readers/assemble.h"
#include "readers/machines.h"
#include "readers/text.h"

namespace motley::discover {

namespace {

using readers::plain;

std::string who(const Facts& facts, int rank) {
  return fmt::format("rank {} ({})", rank, facts.host);
}

// A group of the file.
struct Site {
  std::string name;
  BytesPerSecond bandwidth = 0, uplink = 0;  // uplink 0: the link's above
  Seconds latency = 0;
  std::vector<DirectLink> direct;  // between workers, counted from the first
  std::string backend;             // empty: that of the group around it
  std::vector<Site> sites;
  std::vector<int> workers;  // all below
};

class Writer {
 public:
  Writer(const std::vector<Facts>& facts, const std::vector<std::string>& types)
      : facts_(facts), types_(types) {}

  void write(const Site& site, const std::string& indent, std::vector<int>* ranks) {
    out_ += fmt::format("{}link: {{bandwidth: {:.4g}, latency: {:.3g}}}\n", indent, site.bandwidth,
                        site.latency);
    if (!site.backend.empty()) out_ += fmt::format("{}backend: {}\n", indent, site.backend);
    if (site.uplink > 0) out_ += fmt::format("{}uplink: {:.4g}\n", indent, site.uplink);
    if (!site.direct.empty()) {
      out_ += indent + "direct:\n";
      for (const DirectLink& d : site.direct)
        out_ +=
            fmt::format("{}  - {{bandwidth: {:.4g}, latency: {:.3g}, between: [[{}, {}, {}]]}}\n",
                        indent, d.bandwidth, d.latency, d.a, d.b, d.links);
    }
    if (site.sites.empty()) {
      out_ += indent + "devices:\n";
      for (int w : site.workers) {
        out_ += fmt::format("{}  - {{type: {}}}  # {}\n", indent, types_[static_cast<size_t>(w)],
                            comment(who(facts_[static_cast<size_t>(w)], w)));
        ranks->push_back(w);
      }
      return;
    }
    out_ += indent + "groups:\n";
    for (const Site& child : site.sites) {
      out_ += fmt::format("{}  - name: {}\n", indent, child.name);
      write(child, indent + "    ", ranks);
    }
  }
  const std::string& text() const { return out_; }

 private:
  static std::string comment(std::string text) {
    for (char& c : text)
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    return text;
  }
  const std::vector<Facts>& facts_;
  const std::vector<std::string>& types_;
  std::string out_;
};

// The inside of a machine with GPUs as nvidia-smi says it, of those that workers have.
class Inside {
 public:
  Inside(const std::vector<Facts>& facts, const Distances& distances)
      : facts_(facts), distances_(distances) {}

  // Nothing where the workers are not all GPUs of one machine.
  std::optional<Site> of(std::vector<int> workers) const {
    const Facts& first = facts_[static_cast<size_t>(workers[0])];
    std::set<int> gpus;
    for (int w : workers) {
      const Facts& f = facts_[static_cast<size_t>(w)];
      if (f.machine != first.machine || f.gpu < 0) return std::nullopt;
      gpus.insert(f.gpu);
    }
    if (first.topo.empty() || gpus.size() != workers.size()) return std::nullopt;
    std::sort(workers.begin(), workers.end(), [&](int a, int b) {
      return facts_[static_cast<size_t>(a)].gpu < facts_[static_cast<size_t>(b)].gpu;
    });
    readers::Sources sources;
    sources.topo = readers::Source{first.host + ": nvidia-smi topo -m", first.topo};
    if (!first.query.empty())
      sources.query = readers::Source{first.host + ": nvidia-smi --query-gpu", first.query};
    const Cluster whole = readers::assemble(sources).cluster;
    if (*gpus.rbegin() >= whole.size()) return std::nullopt;
    const Cluster part = part_of(whole, {gpus.begin(), gpus.end()});
    return site(part, 0, workers);
  }

 private:
  Site site(const Cluster& part, size_t g, const std::vector<int>& workers) const {
    const Group& group = part.groups[g];
    Site site;
    site.name = plain(group.name);
    site.direct = group.direct;
    for (int d = 0; d < group.device_count; ++d)
      site.workers.push_back(workers[static_cast<size_t>(group.first_device + d)]);
    for (GroupId child : group.children)
      site.sites.push_back(this->site(part, static_cast<size_t>(child.index), workers));
    // a < b.
    auto direct_of = [&](int a, int b) {
      return std::find_if(site.direct.begin(), site.direct.end(),
                          [&](const DirectLink& d) { return d.a == a && d.b == b; });
    };
    auto child_of = [&](int w) {
      for (size_t c = 0; c < site.sites.size(); ++c)
        for (int below : site.sites[c].workers)
          if (below == w) return static_cast<int>(c);
      return -1 - w;
    };
    std::vector<double> bandwidths, latencies;
    for (int a = 0; a < group.device_count; ++a)
      for (int b = a + 1; b < group.device_count; ++b) {
        const int x = site.workers[static_cast<size_t>(a)],
                  y = site.workers[static_cast<size_t>(b)];
        const double bandwidth = (distances_.bandwidth[x][y] + distances_.bandwidth[y][x]) / 2;
        const double latency = (distances_.latency[x][y] + distances_.latency[y][x]) / 2;
        if (const auto d = direct_of(a, b); d != site.direct.end()) {
          d->bandwidth = bandwidth / d->links;
          d->latency = latency;
        } else if (child_of(x) != child_of(y)) {
          bandwidths.push_back(bandwidth);
          latencies.push_back(latency);
        }
      }
    site.bandwidth = bandwidths.empty() ? group.link.bandwidth : median(bandwidths);
    site.latency = latencies.empty() ? group.link.latency : median(latencies);
    return site;
  }

  const std::vector<Facts>& facts_;
  const Distances& distances_;
};

class Sites {
 public:
  Sites(const std::vector<Facts>& facts, const Distances& distances, std::string backend)
      : facts_(facts), inside_(facts, distances), backend_(std::move(backend)) {}

  // `mixed`: more than one machine is around it.
  Site of(const Level& level, BytesPerSecond above, bool mixed = true) {
    std::set<std::string> machines;
    for (int w : level.workers) machines.insert(facts_[static_cast<size_t>(w)].machine);
    const bool outermost = mixed && machines.size() == 1 && level.workers.size() > 1;
    if (auto machine = inside_.of(level.workers)) {
      if (outermost) machine->backend = backend_;
      if (level.workers.size() > 1) return named(std::move(*machine), level, above);
    }
    Site site;
    if (outermost) site.backend = backend_;
    site.bandwidth = level.bandwidth > 0 ? level.bandwidth : std::max(level.port, 1.0);
    site.latency = level.latency;
    site.workers = level.workers;
    for (const Level& group : level.groups)
      site.sites.push_back(of(group, level.bandwidth, machines.size() > 1));
    return named(std::move(site), level, above);
  }

 private:
  Site named(Site site, const Level& level, BytesPerSecond above) {
    std::set<std::string> hosts;
    for (int w : site.workers) hosts.insert(facts_[static_cast<size_t>(w)].host);
    site.name = hosts.size() == 1 ? plain(*hosts.begin()) : "group";
    if (const int n = used_[site.name]++; n > 0 || hosts.size() > 1)
      site.name += fmt::format("-{}", n);
    // A port a tenth off the link's is that link's.
    if (level.port > 0 && level.port < 0.9 * above) site.uplink = level.port;
    return site;
  }

  const std::vector<Facts>& facts_;
  Inside inside_;
  std::string backend_;  // inside of a machine
  std::map<std::string, int> used_;
};

}  // namespace

std::vector<int> types_of(const std::vector<Facts>& facts, const std::vector<DeviceRates>& rates,
                          std::vector<std::string>* warnings) {
  std::map<std::tuple<std::string, double, Bytes>, std::vector<int>> kinds;
  for (size_t w = 0; w < facts.size(); ++w)
    kinds[{facts[w].kind, facts[w].speed, facts[w].memory}].push_back(static_cast<int>(w));
  std::vector<int> type(facts.size(), -1);
  int next = 0;
  for (auto& [kind, workers] : kinds) {
    std::sort(workers.begin(), workers.end(), [&](int a, int b) {
      return std::pair{-rates[static_cast<size_t>(a)].flops, a} <
             std::pair{-rates[static_cast<size_t>(b)].flops, b};
    });
    const DeviceRates& best = rates[static_cast<size_t>(workers[0])];
    double last = best.flops;
    for (size_t i = 0; i < workers.size(); ++i) {
      const DeviceRates& own = rates[static_cast<size_t>(workers[i])];
      if (i == 0 || own.flops * kThrottled < last) ++next;
      last = own.flops;
      type[static_cast<size_t>(workers[i])] = next - 1;
      if (own.flops * kThrottled < best.flops)
        warnings->push_back(
            fmt::format("{} computes at {:.0f}% of the fastest {}: throttled, or not alone?",
                        who(facts[static_cast<size_t>(workers[i])], workers[i]),
                        100 * own.flops / best.flops, std::get<0>(kind)));
    }
  }
  // In the order of their first worker.
  std::map<int, int> order;
  for (int& t : type) t = order.try_emplace(t, static_cast<int>(order.size())).first->second;
  for (size_t w = 0; w < facts.size(); ++w)
    if (facts[w].taken > 0.1 * facts[w].memory)
      warnings->push_back(fmt::format("{}: {} of {} are taken by other processes",
                                      who(facts[w], static_cast<int>(w)),
                                      format_bytes(facts[w].taken), format_bytes(facts[w].memory)));
  return type;
}

namespace {

std::string workers_text(const Level& level, const std::vector<Facts>& facts) {
  if (level.workers.size() == 1)
    return who(facts[static_cast<size_t>(level.workers[0])], level.workers[0]);
  return fmt::format("ranks {}", fmt::join(level.workers, ", "));
}

std::multiset<std::string> kinds_of(const Level& level, const std::vector<Facts>& facts) {
  std::multiset<std::string> kinds;
  for (int w : level.workers)
    kinds.insert(fmt::format("{} {}", facts[static_cast<size_t>(w)].kind,
                             facts[static_cast<size_t>(w)].speed));
  return kinds;
}

}  // namespace

void check_links(const Level& level, const Distances& distances, const std::vector<Facts>& facts,
                 std::vector<std::string>* warnings) {
  for (const Level& group : level.groups) {
    const Level* better = nullptr;
    for (const Level& other : level.groups)
      if (other.port > kSlowLink * group.port && kinds_of(other, facts) == kinds_of(group, facts) &&
          (better == nullptr || other.port > better->port))
        better = &other;
    if (better != nullptr)
      warnings->push_back(fmt::format("{}: {}/s to the others, where {} have {}/s: a slow link?",
                                      workers_text(group, facts), format_bytes(group.port),
                                      workers_text(*better, facts), format_bytes(better->port)));
    check_links(group, distances, facts, warnings);
  }
  double worst = kSlowLink;
  std::pair<int, int> pair{-1, -1};
  for (int a : level.workers)
    for (int b : level.workers) {
      if (a == b || !(distances.bandwidth[a][b] > 0)) continue;
      const bool deeper =
          std::any_of(level.groups.begin(), level.groups.end(), [&](const Level& g) {
            return std::count(g.workers.begin(), g.workers.end(), a) > 0 &&
                   std::count(g.workers.begin(), g.workers.end(), b) > 0;
          });
      const double ratio = distances.bandwidth[b][a] / distances.bandwidth[a][b];
      if (deeper || ratio <= worst) continue;
      worst = ratio;
      pair = {a, b};
    }
  if (pair.first >= 0)
    warnings->push_back(
        fmt::format("{} to rank {}: {}/s, but {}/s in the other direction: a link with errors?",
                    who(facts[static_cast<size_t>(pair.first)], pair.first), pair.second,
                    format_bytes(distances.bandwidth[pair.first][pair.second]),
                    format_bytes(distances.bandwidth[pair.second][pair.first])));
}

std::string cluster_file(const std::string& name, const Level& level, const Distances& distances,
                         const std::vector<Facts>& facts, const std::vector<DeviceRates>& rates,
                         const std::vector<int>& types, std::vector<int>* ranks,
                         const std::string& backend, const std::string& inside) {
  std::map<int, std::string> names;
  std::map<std::string, int> used;
  std::string described = "device_types:\n";
  for (size_t w = 0; w < facts.size(); ++w) {
    if (names.contains(types[w])) continue;
    const Facts& f = facts[w];
    std::string type = readers::catalogue_type(f.kind, f.memory);
    if (type.empty()) type = plain(f.kind);
    if (f.speed > 0) type += fmt::format("-{:g}", f.speed);
    if (const int n = used[type]++; n > 0) type += fmt::format("-{}", n + 1);
    names[types[w]] = type;
    // The slowest of a type stands for it.
    DeviceRates least = rates[w];
    Bytes taken = f.taken;
    for (size_t v = 0; v < facts.size(); ++v) {
      if (types[v] != types[w]) continue;
      least.flops = std::min(least.flops, rates[v].flops);
      least.half_flops = std::min(least.half_flops, rates[v].half_flops);
      least.memory_bandwidth = std::min(least.memory_bandwidth, rates[v].memory_bandwidth);
      least.overhead = std::max(least.overhead, rates[v].overhead);
      taken = std::max(taken, facts[v].taken);
    }
    const Bytes reserved = f.gpu >= 0 ? 1024. * 1024 * 1024 : 0;
    const bool known = std::any_of(device_catalogue().begin(), device_catalogue().end(),
                                   [&](const DeviceType& t) { return t.name == type; });
    described += fmt::format(
        "  - {{name: {}, {}flops: {:.4g}, half_flops: {:.4g}, memory: {:.0f}, {}memory_bandwidth: "
        "{:.4g}, overhead: {:.3g}{}}}\n",
        type, known ? fmt::format("like: {}, ", type) : "", least.flops, least.half_flops,
        std::max(f.memory - taken, 2 * reserved),
        reserved > 0 ? fmt::format("reserved: {:.0f}, ", reserved) : "", least.memory_bandwidth,
        least.overhead, f.speed > 0 ? fmt::format(", speed: {:g}", f.speed) : "");
  }
  std::vector<std::string> type_of;
  for (int t : types) type_of.push_back(names[t]);
  Writer writer(facts, type_of);
  Site root = Sites(facts, distances, inside).of(level, 0);
  if (root.backend.empty()) root.backend = backend;
  if (facts.size() == 1) root.bandwidth = 1e9;
  writer.write(root, "", ranks);
  return fmt::format("# Measured by motley.discover.\nname: {}\n{}{}", plain(name), writer.text(),
                     described);
}

namespace {

void draw_level(const Level& level, const Discovered& found, const std::vector<Facts>& facts,
                const std::string& before, std::string* out) {
  auto device = [&](int w) {
    const Facts& f = facts[static_cast<size_t>(w)];
    const DeviceRates& r = found.devices[static_cast<size_t>(w)];
    return fmt::format("rank {}  {}  {}  {}/s  {}", w, f.host,
                       f.speed > 0 ? fmt::format("{} x {:g}", f.kind, f.speed) : f.kind,
                       format_flops(r.flops), format_bytes(f.memory));
  };
  if (level.workers.size() == 1) {
    *out += device(level.workers[0]) + "\n";
    return;
  }
  const auto rate = std::find_if(found.rates.begin(), found.rates.end(),
                                 [&](const LevelRate& r) { return r.workers == level.workers; });
  *out +=
      fmt::format("{}/s a port, {}", format_bytes(level.bandwidth), format_seconds(level.latency));
  if (rate != found.rates.end()) {
    *out += fmt::format("; all-reduce {}/s", format_bytes(rate->alone));
    if (rate->beside > 0) *out += fmt::format(", {}/s beside others", format_bytes(rate->beside));
  }
  *out += "\n";
  const size_t n = level.groups.empty() ? level.workers.size() : level.groups.size();
  for (size_t i = 0; i < n; ++i) {
    const bool last = i + 1 == n;
    *out += before + (last ? "└─ " : "├─ ");
    if (level.groups.empty()) {
      *out += device(level.workers[i]) + "\n";
      continue;
    }
    const Level& group = level.groups[i];
    if (group.port < 0.9 * level.bandwidth)
      *out += fmt::format("[port {}/s] ", format_bytes(group.port));
    draw_level(group, found, facts, before + (last ? "   " : "│  "), out);
  }
}

}  // namespace

std::string draw(const Discovered& found, const std::vector<Facts>& facts) {
  std::string out;
  draw_level(found.levels, found, facts, "", &out);
  return out;
}

}  // namespace motley::discover

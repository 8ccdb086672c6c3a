#include "readers/planners.h"

#include <cmath>
#include <map>
#include <optional>
#include <regex>
#include <utility>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/file.h"
#include "readers/text.h"

namespace motley::readers {

namespace {

int number(const std::string& digits, const std::string& name) {
  int64_t value = 0;
  if (!whole(digits, &value) || value < 1 || value > kMaxDevices)
    throw cluster_error(name,
                        fmt::format("says {}, which is no number of devices", digits.substr(0, 20)),
                        fmt::format("numbers from 1 to {}", kMaxDevices));
  return static_cast<int>(value);
}

NcclRun run_over(Collective collective, int ranks, int per_host) {
  NcclRun run;
  run.collective = collective;
  run.ranks = ranks;
  run.hosts = (ranks + per_host - 1) / per_host;
  for (int r = 0; r < ranks; ++r)
    run.all.push_back({0, fmt::format("node{}", r / per_host + 1), ""});
  return run;
}

// "allreduce_bandwidth_2nodes_8gpus_per_node.json"
std::optional<std::pair<int, int>> machines_in(const std::string& name) {
  static const std::regex form(R"((\d{1,9})nodes_(\d{1,9})gpus_per_node)");
  std::smatch found;
  if (!std::regex_search(name, found, form)) return std::nullopt;
  return std::pair(number(found[1], name), number(found[2], name));
}

std::pair<int, int> machines_of(const std::string& name) {
  if (const auto found = machines_in(name)) {
    if (static_cast<int64_t>(found->first) * found->second <= kMaxDevices) return *found;
    throw cluster_error(name, "is of too many devices", fmt::format("{} at most", kMaxDevices));
  }
  throw cluster_error(name, "does not say of which machines it is",
                      "a name such as sp_time_2nodes_8gpus_per_node.json, as Galvatron writes it");
}

// {"allreduce_size_8_consec_1": GB/s}, of ranks that are neighbours: bandwidth of the bus, so a time without a constant.
// {"allreduce_size_8_64MB_time": ms}
// {"pp_size_2": GB/s}, of messages between so many stages: of two or more machines between them.
std::vector<NcclRun> of_galvatron(const Json& json, const std::string& name) {
  static const std::regex bandwidth(R"(allreduce_size_(\d{1,9})_consec_([01]))");
  static const std::regex time(R"(([a-z0-9_]{1,30})_size_(\d{1,9})_(\d{1,9})MB_time)");
  static const std::regex message(R"(pp_size_(\d{1,9}))");
  std::map<std::pair<Collective, int>, NcclRun> runs;
  std::vector<NcclRun> list;
  const auto [hosts, per_host] = machines_of(name);
  size_t points = 0;
  for (const auto& [key, value] : json.items()) {
    std::smatch found;
    std::optional<Collective> collective;
    double bytes = 0, seconds = 0;
    int ranks = 0;
    if (std::regex_match(key, found, message)) {
      const int stages = number(found[1], name);
      if (stages < 2 || stages > hosts * per_host)
        throw cluster_error(
            name,
            fmt::format("{} is of {} of {} devices", key.substr(0, 60), stages, hosts * per_host),
            "two stages or more of them");
      NcclRun run = run_over(Collective::broadcast,
                             hosts > 1 && stages <= hosts ? hosts * per_host : per_host, per_host);
      run.message = true;
      run.points.emplace_back(256 * kMiB, 256 * kMiB / (positive(value, name, key) * kGB));
      if (run.ranks > 1) list.push_back(std::move(run));
    } else if (std::regex_match(key, found, bandwidth)) {
      ranks = number(found[1], name);
      if (found[2] == "0" && ranks < hosts * per_host) continue;  // every n-th rank
      collective = Collective::all_reduce;
      bytes = 256 * kMiB;
      seconds = bytes * 2 * (ranks - 1) / ranks / (positive(value, name, key) * kGB);
    } else if (std::regex_match(key, found, time)) {
      collective = collective_in(found[1]);
      ranks = number(found[2], name);
      bytes = number(found[3], name) * kMiB;
      seconds = positive(value, name, key) * 1e-3;
    }
    if (!collective) continue;
    if (ranks < 2 || ranks > hosts * per_host)
      throw cluster_error(
          name,
          fmt::format("{} is of {} of {} devices", key.substr(0, 60), ranks, hosts * per_host),
          "groups of two or more of them");
    if (++points > kMostPoints) throw cluster_error(name, "has too many entries", "fewer");
    auto& run = runs[{*collective, ranks}];
    if (run.all.empty()) run = run_over(*collective, ranks, per_host);
    run.points.emplace_back(bytes, seconds);
  }
  for (auto& [_, run] : runs) list.push_back(std::move(run));
  return list;
}

// {"all gather": [[MB, ...], [s, ...]], ...}
std::vector<NcclRun> of_nnscaler(const Json& json, const std::string& name) {
  static const std::regex form(R"(intra_(\d{1,9})(\.json)?$)");
  std::smatch found;
  if (!std::regex_search(name, found, form))
    throw cluster_error(name, "does not say of how many devices it is",
                        "a name such as intra_8.json, as nnScaler has it");
  const int ranks = number(found[1], name);
  if (ranks < 2) throw cluster_error(name, "one device sends nothing", "the file of two or more");
  std::vector<NcclRun> list;
  for (const auto& [key, value] : json.items()) {
    const std::optional<Collective> collective = collective_in(key);
    if (!collective) continue;
    if (!value.is_array() || value.size() != 2 || !value[0].is_array() || !value[1].is_array() ||
        value[0].size() != value[1].size() || value[0].empty() || value[0].size() > kMostPoints)
      throw cluster_error(name,
                          fmt::format("{} is no pair of lists of one length", key.substr(0, 60)),
                          "[[MB, ...], [seconds, ...]]");
    NcclRun run = run_over(*collective, ranks, ranks);
    for (size_t i = 0; i < value[0].size(); ++i)
      run.points.emplace_back(positive(value[0][i], name, key) * kMiB,
                              positive(value[1][i], name, key));
    list.push_back(std::move(run));
  }
  return list;
}

}  // namespace

std::vector<NcclRun> parse_communication(const std::string& text, const std::string& name) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos || text[first] != '{') return {parse_nccl(text, name)};
  const Json json = parse_json(text, name);
  bool galvatron = false, nnscaler = false;
  for (const auto& [key, value] : json.items()) {
    galvatron = galvatron || key.find("_size_") != std::string::npos;
    nnscaler = nnscaler || (value.is_array() && collective_in(key).has_value());
  }
  if (!galvatron && !nnscaler) return {parse_nccl(text, name)};
  std::vector<NcclRun> runs = galvatron ? of_galvatron(json, name) : of_nnscaler(json, name);
  if (runs.empty())
    throw cluster_error(
        name, "has no collective that is read",
        "allreduce_bandwidth_*.json, p2p_bandwidth_*.json or sp_time_*.json of Galvatron, or "
        "intra_*.json of nnScaler");
  return runs;
}

}  // namespace motley::readers

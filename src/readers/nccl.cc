#include "readers/nccl.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/file.h"
#include "readers/text.h"

namespace motley::readers {

std::optional<Collective> collective_in(std::string name) {
  static const std::map<std::string, Collective> known = {
      {"allreduce", Collective::all_reduce},         {"allgather", Collective::all_gather},
      {"reducescatter", Collective::reduce_scatter}, {"alltoall", Collective::all_to_all},
      {"all2all", Collective::all_to_all},           {"broadcast", Collective::broadcast}};
  std::erase_if(name, [](char c) { return c == '_' || c == '-' || c == ' '; });
  name = lower(name);
  for (const auto& [text, collective] : known)
    if (name.find(text) != std::string::npos) return collective;
  return std::nullopt;
}

namespace {

constexpr size_t kMostRows = 100000;

void finish(NcclRun* run, const std::string& name) {
  if (run->points.empty())
    throw user_error("cluster",
                     "{}: has no rows of times; give the output of an nccl-tests program", name);
  if (run->all.empty())
    throw user_error("cluster", "{}: names no ranks; give the output with its header", name);
  std::map<int, std::pair<int, std::set<std::string>>> groups;
  for (const NcclRun::Rank& rank : run->all) {
    ++groups[rank.group].first;
    groups[rank.group].second.insert(rank.host);
  }
  for (const auto& [group, size] : groups) {
    run->ranks = std::max(run->ranks, size.first);
    run->hosts = std::max(run->hosts, static_cast<int>(size.second.size()));
  }
  if (run->ranks < 2)
    throw user_error("cluster", "{}: one rank in a group sends nothing; give a run of two or more",
                     name);
}

NcclRun from_text(const std::string& text, const std::string& name) {
  NcclRun run;
  std::optional<Collective> collective;
  int number = 0;
  for (const std::string& line : lines_of(text)) {
    ++number;
    const std::vector<std::string> words = words_of(line);
    if (words.empty()) continue;
    const auto bad = [&](const std::string& what, const std::string& fix) {
      return user_error("cluster", "{}: line {}: {}; give {}", name, number, what, fix);
    };
    if (words[0].starts_with('#')) {
      if (!collective) collective = collective_in(line);  // "# ./build/all_reduce_perf -b 8 ..."
      // "#  Rank  0 Group  0 Pid 123 on host device  0 [0x07] NAME"
      const auto on = std::find(words.begin(), words.end(), "on");
      if (words.size() > 6 && words[1] == "Rank" && on != words.end() && on + 1 != words.end()) {
        NcclRun::Rank rank;
        int64_t group = 0;
        const auto at = std::find(words.begin(), words.end(), "Group");
        if (at != words.end() && at + 1 != words.end() && whole(*(at + 1), &group) &&
            group < 1 << 20)
          rank.group = static_cast<int>(group);
        rank.host = *(on + 1);
        const size_t bracket = line.find(']');
        if (bracket != std::string::npos) rank.device = trimmed(line.substr(bracket + 1));
        if (run.all.size() >= static_cast<size_t>(kMaxDevices))
          throw bad("too many ranks", "a smaller run");
        run.all.push_back(std::move(rank));
      }
      continue;
    }
    int64_t size = 0, count = 0;
    if (words.size() < 8 || !whole(words[0], &size) || !whole(words[1], &count)) continue;
    // size count type [redop root] time algbw busbw wrong ...: the time is the first real number.
    size_t column = 3;
    int64_t root = 0;
    double time = 0;
    if (column < words.size() && (words[column] == "none" || !real(words[column], &time))) ++column;
    if (column < words.size() && whole(words[column], &root, true) &&
        words[column].find('.') == std::string::npos && words.size() > column + 3)
      ++column;
    if (column >= words.size() || !real(words[column], &time) || time < 0)
      throw bad(fmt::format("has no time in microseconds where '{}' stands",
                            column < words.size() ? words[column].substr(0, 40) : ""),
                "rows as nccl-tests prints them");
    if (column + 3 < words.size() && words[column + 3] != "N/A" && words[column + 3] != "0")
      if (double wrong = 0; real(words[column + 3], &wrong) && wrong > 0)
        throw bad(fmt::format("says that {} results are wrong", words[column + 3].substr(0, 20)),
                  "a run that is right");
    if (size > 0 && time > 0) run.points.emplace_back(static_cast<double>(size), time * 1e-6);
    // The same in place: behind as many columns as there are of the first (-I 1 adds four).
    const size_t half = (words.size() - column) / 2;
    if ((half == 4 || half == 8) && real(words[column + half], &time) && size > 0 && time > 0)
      run.points.emplace_back(static_cast<double>(size), time * 1e-6);
    if (run.points.size() > kMostRows) throw bad("too many rows", "fewer");
  }
  if (!collective) collective = collective_in(name);
  if (!collective)
    throw user_error(
        "cluster",
        "{}: does not say which collective it is of; give the output with its header, or "
        "a name such as all_reduce.txt",
        name);
  run.collective = *collective;
  finish(&run, name);
  return run;
}

NcclRun from_json(const std::string& text, const std::string& name) {
  const Json json = parse_json(text, name);
  const auto bad = [&](const std::string& field, const std::string& fix) {
    return user_error("cluster", "{}: {}; give {}", name, field, fix);
  };
  if (!json.is_object()) throw bad("is no object", "what nccl-tests -J wrote");
  NcclRun run;
  std::string about = name;
  if (json.contains("args"))
    about = json["args"].dump(-1, ' ', true, Json::error_handler_t::replace) + " " + name;
  if (!json.contains("results") || !json["results"].is_array())
    throw bad("results is missing", "what nccl-tests -J wrote");
  if (json.contains("devices") && json["devices"].is_array())
    for (const Json& device : json["devices"]) {
      NcclRun::Rank rank;
      if (device.is_object() && device.contains("group") && device["group"].is_number_integer())
        rank.group =
            static_cast<int>(std::clamp<int64_t>(device["group"].get<int64_t>(), 0, 1 << 20));
      for (const auto& [field, into] :
           {std::pair("hostname", &rank.host), {"device_info", &rank.device}})
        if (device.is_object() && device.contains(field) && device[field].is_string())
          *into = trimmed(device[field].get<std::string>());
      if (run.all.size() >= static_cast<size_t>(kMaxDevices))
        throw bad("devices has too many entries", "a smaller run");
      run.all.push_back(std::move(rank));
    }
  size_t row = 0;
  for (const Json& result : json["results"]) {
    const std::string where = fmt::format("results[{}]", row++);
    if (!result.is_object() || !result.contains("size") || !result["size"].is_number())
      throw bad(where + ".size is missing", "a number of bytes");
    for (const char* place : {"out_of_place", "in_place"}) {
      if (!result.contains(place) || !result[place].is_object()) continue;
      const Json& numbers = result[place];
      const char* field = numbers.contains("time") ? "time" : "cpu_time";
      if (!numbers.contains(field) || !numbers[field].is_number())
        throw bad(fmt::format("{}.{}.time is missing", where, place), "microseconds");
      if (numbers.contains("nwrong") && numbers["nwrong"].is_number() &&
          numbers["nwrong"].get<double>() > 0)
        throw bad(fmt::format("{}.{}.nwrong is not 0", where, place), "a run that is right");
      const double size = result["size"].get<double>(), time = numbers[field].get<double>();
      if (size > 0 && time > 0 && std::isfinite(size * time))
        run.points.emplace_back(size, time * 1e-6);
    }
    if (row > kMostRows) throw bad("results has too many entries", "fewer");
  }
  const std::optional<Collective> collective = collective_in(about);
  if (!collective)
    throw bad("args does not say which collective it is of", "a name such as all_reduce.json");
  run.collective = *collective;
  finish(&run, name);
  return run;
}

}  // namespace

NcclRun parse_nccl(const std::string& text, const std::string& name) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{' ? from_json(text, name)
                                                          : from_text(text, name);
}

Line fit_line(const std::vector<std::pair<Bytes, Seconds>>& points) {
  // Weighted by 1 / seconds^2: relative errors.
  double w = 0, ws = 0, wss = 0, wt = 0, wst = 0;
  for (const auto& [s, t] : points) {
    const double weight = 1 / (t * t);
    w += weight, ws += weight * s, wss += weight * s * s, wt += weight * t, wst += weight * s * t;
  }
  Line line;
  const double det = w * wss - ws * ws;
  if (det > 1e-12 * w * wss) {
    line.per_byte = (w * wst - ws * wt) / det;
    line.fixed = (wt - line.per_byte * ws) / w;
  }
  if (line.fixed < 0 || det <= 1e-12 * w * wss) line.fixed = 0, line.per_byte = wst / wss;
  if (line.per_byte < 0) line.per_byte = 0, line.fixed = wt / w;
  double mean = 0, total = 0, left = 0;
  for (const auto& [s, t] : points) mean += t / static_cast<double>(points.size());
  for (const auto& [s, t] : points) {
    const double off = t - line.fixed - line.per_byte * s;
    left += off * off;
    total += (t - mean) * (t - mean);
    line.error += std::abs(off) / t / static_cast<double>(points.size());
  }
  line.r2 = total > 0 ? 1 - left / total : 1;
  return line;
}

NcclFit fit(const NcclRun& run) {
  const double p = run.ranks;
  // Rounds, what they send in all for a byte of the size that nccl-tests prints (cluster.h,
  // CollectiveRate), and what goes through a port.
  double rounds = p - 1, sent = (p - 1) / p;
  if (run.collective == Collective::all_reduce) rounds = 2 * (p - 1), sent = 2 * (p - 1) / p;
  if (run.collective == Collective::broadcast) sent = p - 1;
  const double through = run.collective == Collective::broadcast ? 1 : sent;
  NcclFit fit;
  fit.line = fit_line(run.points);
  fit.latency = fit.line.fixed / rounds;
  if (fit.line.per_byte > 0) {
    fit.bandwidth = sent / fit.line.per_byte;
    fit.port = through / fit.line.per_byte;
  }
  return fit;
}

}  // namespace motley::readers

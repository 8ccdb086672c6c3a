#include "discover/discover.h"

#include <ATen/ATen.h>

#include <map>

#include "comm/subgroup.h"
#include "comm/texts.h"
#include "core/error.h"
#include "core/file.h"
#include "measure/calibrate.h"
#include "measure/device_clock.h"

namespace motley::discover {

Json to_json(const Facts& f) {
  return {{"host", f.host},     {"machine", f.machine}, {"kind", f.kind},
          {"memory", f.memory}, {"taken", f.taken},     {"gpu", f.gpu},
          {"speed", f.speed},   {"topo", f.topo},       {"query", f.query}};
}

Facts parse_facts(const std::string& text, const std::string& name) {
  const Json json = parse_json(text, name);
  const Fields fields(json, "discover", name);
  const auto amount = [&](const char* field) {
    const double value = fields.number(field);
    if (value < 0) throw fields.bad(field, "is negative");
    return value;
  };
  Facts f;
  f.host = fields.text("host");
  f.machine = fields.text("machine");
  f.kind = fields.text("kind");
  f.memory = amount("memory");
  f.taken = amount("taken");
  const int64_t gpu = fields.integer("gpu");
  if (gpu < -1 || gpu >= kMaxDevices) throw fields.bad("gpu", "is not the number of a device");
  f.gpu = static_cast<int>(gpu);
  f.speed = amount("speed");
  f.topo = fields.text("topo");
  f.query = fields.text("query");
  return f;
}

namespace {

void list(const Level& level, const Discovered& found, Json* out) {
  if (level.workers.size() > 1) {
    Json entry = {
        {"ranks", level.workers}, {"bandwidth", level.bandwidth}, {"latency_s", level.latency}};
    if (level.port > 0) entry["port"] = level.port;
    for (const LevelRate& rate : found.rates)
      if (rate.workers == level.workers) {
        entry["all_reduce"] = rate.alone;
        if (rate.beside > 0) entry["all_reduce_beside_others"] = rate.beside;
      }
    out->push_back(std::move(entry));
  }
  for (const Level& group : level.groups) list(group, found, out);
}

}  // namespace

Json to_json(const Discovered& found) {
  Json levels = Json::array();
  list(found.levels, found, &levels);
  std::vector<double> flops;
  for (const DeviceRates& device : found.devices) flops.push_back(device.flops);
  return {{"levels", levels},
          {"flops", flops},
          {"bandwidth", found.distances.bandwidth},
          {"latency_s", found.distances.latency},
          {"ranks", found.ranks},
          {"warnings", found.warnings},
          {"seconds", found.seconds}};
}

namespace {

std::vector<DeviceRates> gather_rates(Communicator& group, const ProfiledDevice& mine) {
  at::Tensor all = at::zeros({group.size(), 4}, at::kDouble);
  const double values[] = {mine.flops, mine.half_flops, mine.memory_bandwidth, mine.overhead};
  for (int i = 0; i < 4; ++i) all[group.rank()][i] = values[i];
  all = all.to(group.device());
  group.all_reduce(all);
  all = all.to(at::kCPU);
  std::vector<DeviceRates> rates;
  for (int r = 0; r < group.size(); ++r)
    rates.push_back({all[r][0].item<double>(), all[r][1].item<double>(), all[r][2].item<double>(),
                     all[r][3].item<double>()});
  return rates;
}

}  // namespace

Discovered discover(Communicator& group, const Facts& mine, const DiscoverOptions& options) {
  if (group.size() > 1 && !group.has_messages())
    throw user_error("discover",
                     "this backend has no messages between two workers; leave out --backend");
  const Seconds start = wall_clock();
  auto say = [&](const std::string& what) {
    if (options.progress) options.progress(what);
  };
  std::vector<Facts> facts;
  std::map<std::string, int> machines;
  std::vector<int> machine;
  for (const std::string& text : gather_texts(group, to_json(mine).dump())) {
    facts.push_back(parse_facts(text, fmt::format("what rank {} says", facts.size())));
    machine.push_back(machines.try_emplace(facts.back().machine, static_cast<int>(machines.size()))
                          .first->second);
  }
  Discovered found;
  say(fmt::format("links between {} workers on {} machines", group.size(), machines.size()));
  found.distances = measure_distances(group, machine, options.sockets);
  found.levels = levels_of(found.distances, machine);
  measure_ports(group, found.distances, &found.levels);
  found.rates = measure_reductions(group, found.levels);
  check_links(found.levels, found.distances, facts, &found.warnings);
  for (const LevelRate& rate : found.rates)
    if (rate.beside > 0 && rate.beside * kSlowLink < rate.alone)
      found.warnings.push_back(fmt::format(
          "ranks {}: all-reduces of their group take {:.1f} times as long beside those of other "
          "groups: do they share a link?",
          fmt::join(rate.workers, ", "), rate.alone / rate.beside));

  say("devices");
  group.barrier();
  const ProfiledDevice classes = measure_classes(mine.speed, group.device());
  found.devices = gather_rates(group, classes);
  const std::vector<int> types = types_of(facts, found.devices, &found.warnings);
  found.yaml = cluster_file(options.name, found.levels, found.distances, facts, found.devices,
                            types, &found.ranks, options.backend, options.inside);
  found.cluster = parse_cluster(found.yaml, options.name + ".yaml");
  found.drawing = draw(found, facts);

  if (options.profile) {
    const std::unique_ptr<Communicator> ordered = subgroup(group, found.ranks, 1 << 18);
    Communicator& used = std::is_sorted(found.ranks.begin(), found.ranks.end()) ? group : *ordered;
    CalibrateOptions calibration;
    calibration.speed = mine.speed;
    calibration.device = group.device();
    calibration.quick = true;
    calibration.half = !group.device().is_cpu();  // where models are trained in it
    calibration.optimizer = options.optimizer;
    calibration.budget = 8;
    calibration.classes = classes;
    calibration.progress = say;
    found.profile = calibrate(used, found.cluster, calibration);
    if (mine.speed > 0) found.profile.emulated = "by the launcher";
  }
  found.seconds = wall_clock() - start;
  return found;
}

}  // namespace motley::discover

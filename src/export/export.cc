#include "export/export.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "export/common.h"

namespace motley {

namespace fs = std::filesystem;
using planner::Arrangement;

namespace exports {
// Each from its own file.
void write_deepspeed(const ExportJob& job, Exported* out);
void write_flagscale(const ExportJob& job, Exported* out);
void write_galvatron(const ExportJob& job, Exported* out);
void write_megatron(const ExportJob& job, Exported* out);
void write_rows(const ExportJob& job, Exported* out);
void write_torchtitan(const ExportJob& job, Exported* out);
Arrangement read_deepspeed(const ImportJob& job);
Arrangement read_flagscale(const ImportJob& job);
Arrangement read_galvatron(const ImportJob& job);
Arrangement read_megatron(const ImportJob& job);
Arrangement read_rows(const ImportJob& job);
Arrangement read_torchtitan(const ImportJob& job);
}  // namespace exports

const std::vector<Exporter>& exporters() {
  using namespace exports;
  static const std::vector<Exporter> table = {
      {"ddp", "rows.json", write_rows, read_rows},
      {"deepspeed", "ds_config.json", write_deepspeed, read_deepspeed},
      {"flagscale", "train/train.yaml", write_flagscale, read_flagscale},
      {"fsdp2", "rows.json", write_rows, read_rows},
      {"galvatron", "galvatron_config.json", write_galvatron, read_galvatron},
      {"megatron", "arguments.txt", write_megatron, read_megatron},
      {"torchtitan", "train.toml", write_torchtitan, read_torchtitan},
  };
  return table;
}

const Exporter* find_exporter(const std::string& target) {
  for (const Exporter& exporter : exporters())
    if (target == exporter.target) return &exporter;
  return nullptr;
}

const Sizes& ExportJob::need_sizes(const char* target) const {
  if (!sizes)
    throw user_error("export",
                     "{} has to be told the sizes of {}, which the plan does not know: {}", target,
                     plan.model, no_sizes);
  return *sizes;
}

namespace {

constexpr const char* kOrigin = "motley.json";
constexpr const char* kRanks = "ranks.txt";

// Ranks by replica, then stage, which is the order of Megatron's --use-tp-pp-dp-mapping.
std::vector<int> replicas_outside(const Arrangement& a) {
  std::vector<int> order;
  for (int r = 0; r < a.replicas(); ++r)
    for (int s = 0; s < a.pp(); ++s)
      order.insert(order.end(), a.stages[s].devices[r].begin(), a.stages[s].devices[r].end());
  return order;
}

ExportedFile rank_file(const ExportJob& job) {
  std::string text;
  for (size_t r = 0; r < job.ranks.size(); ++r)
    for (const planner::Host& host : job.hosts) {
      const auto at = std::find(host.devices.begin(), host.devices.end(), job.ranks[r]);
      if (at != host.devices.end())
        text += fmt::format("{} {} {}\n", r, host.name, at - host.devices.begin());
    }
  return {kRanks, text};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

ExportedFile origin_file(const ExportJob& job, const char* target) {
  const Plan& plan = job.plan;
  Json j = {{"motley_export", 1},
            {"target", target},
            {"model", plan.model},
            {"batch", plan.batch},
            {"optimizer", to_string(plan.optimizer)}};
  if (plan.precision != DType::f32) j["precision"] = to_string(plan.precision);
  j["predicted_step_s"] = plan.predicted_step_s;
  j["arrangement"] = planner::to_string(job.arrangement);
  j["cluster"] = lines_of(to_yaml(plan.cluster));
  j["graph"] = lines_of(to_text(*plan.graph));
  return {kOrigin, j.dump(1) + "\n"};
}

// [rank] Device, by the names of hosts; throws where a rank has none or a device two.
std::vector<int> read_ranks(const ExportDirectory& directory, const Cluster& cluster,
                            const std::vector<planner::Host>& all) {
  const std::string file = directory.name(kRanks);
  std::map<std::string, std::vector<int>> hosts;
  for (const planner::Host& host : all) hosts[host.name] = host.devices;
  std::vector<int> ranks;
  std::set<int> seen;
  for (const std::string& line : lines_of(directory.text(kRanks))) {
    if (line.empty()) continue;
    const size_t first = line.find(' '), second = line.find(' ', first + 1);
    if (first == std::string::npos || second == std::string::npos)
      throw user_error("import", "{}: '{}' is not a rank, a host and a device", file,
                       line.substr(0, 40));
    const std::string name = line.substr(first + 1, second - first - 1);
    exports::same(file + ": rank", exports::number_in(line.substr(0, first), file + ": rank", 0),
                  static_cast<int64_t>(ranks.size()), "the next rank");
    const auto host = hosts.find(name);
    if (host == hosts.end())
      throw user_error("import", "{}: host {} is not in {}; its machines are called {} ...", file,
                       name.substr(0, 40), cluster.name, hosts.empty() ? "" : hosts.begin()->first);
    const int64_t device = exports::number_in(line.substr(second + 1), file + ": device of " + name,
                                              0, static_cast<int64_t>(host->second.size()) - 1);
    if (!seen.insert(host->second[device]).second)
      throw user_error("import", "{}: device {} of {} is two ranks", file, device, name);
    ranks.push_back(host->second[device]);
  }
  if (ranks.empty()) throw user_error("import", "{} has no ranks", file);
  return ranks;
}

// Those with ranks, in the order of their first ones: node ranks are lines of the hostfile.
std::vector<planner::Host> hosts_with(const std::vector<planner::Host>& all,
                                      const std::vector<int>& ranks) {
  std::vector<std::pair<size_t, planner::Host>> used;
  for (const planner::Host& host : all) {
    size_t first = ranks.size();
    for (int d : host.devices)
      first = std::min<size_t>(first, std::find(ranks.begin(), ranks.end(), d) - ranks.begin());
    if (first < ranks.size()) used.emplace_back(first, host);
  }
  std::sort(used.begin(), used.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<planner::Host> hosts;
  for (auto& [first, host] : used) hosts.push_back(std::move(host));
  return hosts;
}

// HOST slots=N, and type=NAME of all or none.
void check_hostfile(const ExportDirectory& directory, const Cluster& cluster,
                    const std::vector<planner::Host>& hosts, const std::vector<int>& ranks) {
  const std::string file = directory.name("hostfile");
  size_t next = 0;
  for (const std::string& line : lines_of(directory.text("hostfile"))) {
    const size_t space = line.find(" slots=");
    if (line.empty() || line[0] == '#') continue;
    if (space == std::string::npos)
      throw user_error("import", "{}: '{}' is not HOST slots=N", file, line.substr(0, 40));
    const std::string name = line.substr(0, space);
    if (next == hosts.size())
      throw user_error("import", "{}: host {} has no rank in ranks.txt; leave it out", file,
                       name.substr(0, 40));
    const planner::Host& host = hosts[next++];
    if (name != host.name)
      throw user_error("import", "{}: host {} is '{}'; give {}, in the order of ranks.txt", file,
                       next - 1, name.substr(0, 40), host.name);
    const size_t end = std::min(line.find(' ', space + 1), line.size());
    exports::same(
        file + ": slots of " + name,
        exports::number_in(line.substr(space + 7, end - space - 7), file + ": slots", 1),
        std::count_if(host.devices.begin(), host.devices.end(),
                      [&](int d) { return std::count(ranks.begin(), ranks.end(), d) > 0; }),
        "ranks.txt: its ranks");
    if (line.compare(end, 6, " type=") == 0)
      exports::same_word(file + ": type of " + name, line.substr(end + 6),
                         cluster.type_of(host.devices[0]).name, "the cluster's");
    else if (end < line.size())
      throw user_error("import", "{}: '{}' behind the slots of {}; give type=NAME or nothing", file,
                       line.substr(end + 1, 40), name);
  }
  if (next < hosts.size())
    throw user_error("import", "{}: host {} is missing", file, hosts[next].name);
}

}  // namespace

bool ExportDirectory::has(const std::string& file) const {
  std::error_code code;
  return fs::is_regular_file(name(file), code);
}

std::string ExportDirectory::text(const std::string& file) const { return read_file(name(file)); }

Exported export_plan(const Plan& plan, const Exporter& exporter, std::string* reason) {
  if (plan.pipeline && plan.pipeline->stages() > 1 &&
      !planner::find_target(exporter.target)->pipelines) {
    *reason = fmt::format("it has {} stages", plan.pipeline->stages());
    return {};
  }
  const std::optional<Arrangement> arrangement = planner::read_arrangement(plan, reason);
  return arrangement ? export_arrangement(plan, *arrangement, exporter, reason) : Exported();
}

Exported export_arrangement(const Plan& plan, const Arrangement& arrangement,
                            const Exporter& exporter, std::string* reason) {
  const planner::Target& target = *planner::find_target(exporter.target);
  Exported out;
  ExportJob job{plan, arrangement, std::nullopt, "", {}, planner::rank_order(arrangement)};
  job.sizes = sizes_of(*plan.graph, &job.no_sizes);
  *reason = planner::cannot_say(target, arrangement, plan.cluster, job.sizes);
  if (!reason->empty()) return out;
  const std::vector<planner::Host> hosts = planner::hosts_of(plan.cluster);
  if (const std::vector<int> other = replicas_outside(arrangement);
      std::string(exporter.target) == "megatron" && !planner::contiguous(hosts, job.ranks) &&
      planner::contiguous(hosts, other) && arrangement.stages[0].inside != planner::Inside::batch) {
    job.ranks = other;
    job.replicas_outside = true;
  }
  job.hosts = hosts_with(hosts, job.ranks);
  exporter.write(job, &out);
  out.files.push_back(exports::host_file(job, std::string(exporter.target) == "flagscale"));
  out.files.push_back(rank_file(job));
  out.files.push_back(origin_file(job, exporter.target));
  if (!plan.reductions.empty())
    out.differences.push_back("gradients are summed by reduction programs, " +
                              std::string(target.title) + " has NCCL's collectives");
  std::sort(out.files.begin(), out.files.end(),
            [](const ExportedFile& a, const ExportedFile& b) { return a.path < b.path; });
  return out;
}

void write_directory(const Exported& exported, const std::string& path, bool force) {
  std::error_code code;
  const fs::path target = fs::path(path).lexically_normal();
  if (fs::exists(target, code)) {
    if (!fs::is_directory(target, code))
      throw user_error("export", "-o {} is no directory; give another name", path);
    if (!fs::is_empty(target, code) && !force)
      throw user_error("export", "-o {} is not empty; give another name, or --force to replace it",
                       path);
  }
  const fs::path place = target.has_filename() ? target : target.parent_path();
  const fs::path beside =
      place.parent_path() / fmt::format(".{}.{}.tmp", place.filename().string(), getpid());
  const auto failed = [&](const std::string& what) {
    fs::remove_all(beside, code);
    return user_error("export", "-o {}: {}", path, what);
  };
  fs::remove_all(beside, code);
  fs::create_directories(beside, code);
  if (code) throw failed("cannot be written: " + code.message());
  try {
    for (const ExportedFile& file : exported.files) {
      const fs::path own = beside / file.path;
      fs::create_directories(own.parent_path(), code);
      write_file(own.string(), file.text);
      if (file.executable) chmod(own.c_str(), 0755);
    }
  } catch (const UserError& e) {
    throw failed(e.what());
  }
  fs::path old;
  if (fs::exists(place, code)) {
    old = place.parent_path() / fmt::format(".{}.{}.old", place.filename().string(), getpid());
    fs::rename(place, old, code);
    if (code) throw failed("cannot be replaced: " + code.message());
  }
  fs::rename(beside, place, code);
  if (code) {
    const std::string why = code.message();
    if (!old.empty()) fs::rename(old, place, code);
    throw failed("cannot be written: " + why);
  }
  if (!old.empty()) fs::remove_all(old, code);
}

Origin read_origin(const ExportDirectory& directory) {
  const std::string file = directory.name(kOrigin);
  const Json json = parse_json(directory.text(kOrigin), file);
  const Fields fields(json, "import", file);
  if (fields.integer("motley_export") != 1) throw fields.bad("motley_export", "is not 1");
  const auto text_of = [&](const char* name) {
    std::string text;
    for (const Json& line : fields.array(name)) {
      if (!line.is_string()) throw fields.bad(name, "holds what is no line");
      text += line.get<std::string>() + "\n";
    }
    return text;
  };
  Origin origin;
  origin.target = fields.text("target");
  origin.model = fields.text("model");
  origin.batch = fields.integer("batch");
  if (origin.batch < 1 || origin.batch > (1 << 24))
    throw fields.bad("batch", fmt::format("is {}; give samples", origin.batch));
  if (!parse_optimizer(fields.text("optimizer"), &origin.optimizer))
    throw fields.bad("optimizer", fmt::format("is '{}'; give {}", fields.text("optimizer"),
                                              fmt::join(optimizer_names(), ", ")));
  if (fields.find("precision") && !parse_dtype(fields.text("precision"), &origin.precision))
    throw fields.bad("precision", "is '" + fields.text("precision") + "'; give bf16 or f16");
  fields.find("predicted_step_s");
  fields.find("arrangement");
  origin.cluster = parse_cluster(text_of("cluster"), file + ": cluster");
  origin.graph = parse_graph(text_of("graph"), file + ": graph");
  if (const auto problems = verify(origin.graph); !problems.empty())
    throw fields.bad("graph", problems[0]);
  return origin;
}

Arrangement import_arrangement(const ExportDirectory& directory, const Exporter& exporter,
                               const Cluster& cluster, const Graph& graph,
                               const planner::PlanOptions& step) {
  const planner::Target& target = *planner::find_target(exporter.target);
  ImportJob job{directory, cluster, graph, target, step.batch, step.optimizer, step.precision};
  const std::vector<planner::Host> hosts = planner::hosts_of(cluster);
  job.ranks = read_ranks(directory, cluster, hosts);
  job.hosts = hosts_with(hosts, job.ranks);
  check_hostfile(directory, cluster, job.hosts, job.ranks);
  std::string why;
  job.sizes = sizes_of(graph, &why);
  Arrangement arrangement = exporter.read(job);
  why = planner::cannot_say(target, arrangement, cluster, job.sizes);
  if (!why.empty())
    throw user_error("import", "{}: {}, which {} cannot say", directory.name(exporter.file), why,
                     target.title);
  return arrangement;
}

std::unique_ptr<Plan> import_plan(const std::string& path, const Cluster* cluster,
                                  const Graph* graph) {
  const ExportDirectory directory(path);
  const Origin origin = read_origin(directory);
  const Exporter* exporter = find_exporter(origin.target);
  if (!exporter)
    throw user_error("import", "{}: target is '{}'; give one of {}", directory.name(kOrigin),
                     origin.target.substr(0, 40), planner::target_names());
  const Cluster& devices = cluster ? *cluster : origin.cluster;
  const Graph& step = graph ? *graph : origin.graph;
  planner::PlanOptions options;
  options.model = origin.model;
  options.batch = origin.batch;
  options.optimizer = origin.optimizer;
  options.precision = origin.precision;
  options.memory_limit = false;
  const Arrangement arrangement = import_arrangement(directory, *exporter, devices, step, options);
  const auto batch = std::make_shared<planner::BatchStep>(step, origin.batch);
  planner::Arranger arranger(options, devices, batch);
  std::string why;
  std::unique_ptr<Plan> plan = arranger.make(arrangement, origin.target, &why);
  if (!plan) throw user_error("import", "{}: {}", directory.name(exporter->file), why);
  plan->precision = origin.precision;
  return plan;
}

}  // namespace motley

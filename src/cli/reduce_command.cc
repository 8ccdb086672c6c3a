#include "cli/reduce_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include "cli/command_line.h"
#include "cluster/cluster.h"
#include "core/error.h"
#include "core/file.h"
#include "core/units.h"
#include "net/topology.h"
#include "net/traffic.h"
#include "reduce/best.h"
#include "reduce/cluster.h"
#include "reduce/explain.h"

namespace motley {

namespace {

using namespace reduce;

// Every program is listed while this many device numbers suffice; else the best of each placement.
constexpr int64_t kMaxListed = 5'000'000;
constexpr size_t kRows = 40;            // of the table for people
constexpr int64_t kMaxVerified = 8192;  // devices of a group; states of more are not run

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A cluster of the hierarchy's shape: 8 GB/s and 30 us outside, 270 GB/s and 5 us inside, geometric
// in between.
Cluster assumed_cluster(const Hierarchy& hierarchy) {
  constexpr BytesPerSecond kOuter = 8e9, kInner = 270e9;
  constexpr Seconds kOuterLatency = 30e-6, kInnerLatency = 5e-6;
  Cluster cluster;
  cluster.name = "assumed";
  cluster.types = {device_catalogue()[0]};
  size_t depth = hierarchy.size();
  auto grow = [&](auto&& self, GroupId parent, size_t level) -> void {
    size_t id = cluster.groups.size();
    cluster.groups.emplace_back();
    Group g;
    g.name = level == 0 ? "system" : hierarchy[level - 1].name;
    g.parent = parent;
    double inner = depth == 1 ? 1 : static_cast<double>(level) / static_cast<double>(depth - 1);
    g.link.bandwidth = kOuter * std::pow(kInner / kOuter, inner);
    g.link.latency = kOuterLatency * std::pow(kInnerLatency / kOuterLatency, inner);
    g.first_device = cluster.size();
    for (int i = 0; i < hierarchy[level].size; ++i) {
      if (level + 1 < depth) {
        g.children.push_back(GroupId(static_cast<int64_t>(cluster.groups.size())));
        self(self, GroupId(static_cast<int64_t>(id)), level + 1);
      } else {
        cluster.devices.push_back({0, GroupId(static_cast<int64_t>(id))});
      }
    }
    g.device_count = cluster.size() - g.first_device;
    cluster.groups[id] = std::move(g);
  };
  grow(grow, GroupId(), 0);
  return cluster;
}

Bytes parse_bytes(const std::string& text, const std::string& option) {
  Bytes bytes = parse_quantity(text, "bytes", option);
  if (bytes <= 0) throw user_error("reduce", "{} is {}; give more than 0 bytes", option, text);
  return bytes;
}

Json to_json(const Matrix& matrix) {
  Json rows = Json::array();
  for (int i = 0; i < matrix.axes; ++i) {
    Json row = Json::array();
    for (int j = 0; j < matrix.levels; ++j) row.push_back(matrix.at(i, j));
    rows.push_back(std::move(row));
  }
  return rows;
}

// A program with its steps lowered to groups of devices.
Json to_json(const Program& program, const PlacementCost& cost, const Hierarchy& hierarchy) {
  Json steps = Json::array();
  for (const Step& step : program)
    steps.push_back(Json{{"collective", to_string(step.collective)},
                         {"form", to_string(step, level_names(cost.hierarchy(), hierarchy))},
                         {"groups", lower(step.form, cost.hierarchy())}});
  return steps;
}

// Whether it was run on full states; a program that fails there is a bug of ours.
bool check(const Program& program, const PlacementCost& cost) {
  if (size_of(cost.hierarchy().levels) > kMaxVerified) return false;
  MOTLEY_CHECK(verify(program, cost.hierarchy().levels),
               "a synthesised program does not reach its goal");
  return true;
}

struct Job {
  Hierarchy hierarchy;
  std::vector<int> axes;
  std::vector<Reduction> reductions;
  CostModel model;
  Numbering numbering = Numbering::level_major;
  int size_limit = 5;
  bool json = false;
};

void print_program(const Program& program, PlacementCost* cost, const Hierarchy& hierarchy) {
  Program prefix;
  double before = 0;
  for (size_t s = 0; s < program.size(); ++s) {
    prefix.push_back(program[s]);
    double until = cost->program(prefix);
    Groups groups = lower(program[s].form, cost->hierarchy());
    std::vector<int> first(groups[0].begin(),
                           groups[0].begin() + std::min<size_t>(6, groups[0].size()));
    fmt::print("  {}. {}: {} group{} of {}, the first {{{}{}}}, {}\n", s + 1,
               in_words(program[s], cost->hierarchy(), hierarchy), groups.size(),
               groups.size() == 1 ? "" : "s", groups[0].size(), fmt::join(first, " "),
               first.size() < groups[0].size() ? " .." : "", format_seconds(until - before));
    before = until;
  }
  if (program.empty()) fmt::print("  nothing to do: every group is one device\n");
}

// The placements of one reduction, each with its best program.
struct OneReduction {
  explicit OneReduction(const Job& of) : job(of), spaces(of.size_limit) { search(); }
  void search();
  void print_json();
  void print_table();

  const Job& job;
  const Reduction& reduction = job.reductions[0];
  ProgramSpaces spaces;
  std::vector<Matrix> matrices = placements(job.hierarchy, job.axes);
  // [placement]
  std::vector<PlacementCost> costs;
  std::vector<std::vector<Program>> programs;                  // if all are listed
  std::vector<std::vector<std::pair<Seconds, size_t>>> order;  // of these, the fastest first
  std::vector<BestProgram> best;
  std::vector<std::pair<Seconds, size_t>> by_time;  // placements, the fastest first
  int64_t total = 0;                                // programs
  bool list = false;
  double synthesis = 0, simulation = 0;  // seconds
};

void OneReduction::search() {
  double start = now();
  for (const Matrix& m : matrices) {
    costs.emplace_back(job.model, reduction.bytes, job.hierarchy, m, reduction.axes, job.numbering);
    total += spaces.of(costs.back().levels()).programs;
  }
  list = job.json && total * devices_of(job.hierarchy) * 3 <= kMaxListed;
  programs.resize(matrices.size());
  if (list)
    for (size_t i = 0; i < matrices.size(); ++i)
      programs[i] = programs_of(spaces.of(costs[i].levels()));
  synthesis = now() - start;

  // Placements in order of what they cannot beat. A table shows the fastest only, so that the rest
  // need not be searched.
  start = now();
  size_t wanted = job.json ? matrices.size() : std::min(kRows, matrices.size());
  std::vector<std::pair<Seconds, size_t>> bounds;
  for (size_t i = 0; i < matrices.size(); ++i)
    bounds.push_back({costs[i].at_least(spaces.of(costs[i].levels()).states[0]), i});
  std::sort(bounds.begin(), bounds.end());
  best.resize(matrices.size());
  for (auto [bound, i] : bounds) {
    if (by_time.size() == wanted && bound > by_time.back().first) break;
    best[i] = best_program(spaces.of(costs[i].levels()), &costs[i]);
    by_time.push_back({best[i].seconds, i});
    std::sort(by_time.begin(), by_time.end());
    if (by_time.size() > wanted) by_time.pop_back();
  }
  order.resize(matrices.size());
  for (size_t i = 0; i < matrices.size(); ++i) {
    for (size_t p = 0; p < programs[i].size(); ++p)
      order[i].push_back({costs[i].program(programs[i][p]), p});
    std::sort(order[i].begin(), order[i].end());
    if (list) MOTLEY_CHECK(order[i][0].first == best[i].seconds);
  }
  simulation = now() - start;
}

void OneReduction::print_json() {
  Json placed = Json::array();
  for (size_t i = 0; i < matrices.size(); ++i) {
    Json listed = Json::array();
    bool verified = true;
    auto add = [&](const Program& program, Seconds seconds) {
      verified = check(program, costs[i]) && verified;
      listed.push_back(
          Json{{"predicted_s", seconds}, {"steps", to_json(program, costs[i], job.hierarchy)}});
    };
    for (auto [seconds, p] : order[i]) add(programs[i][p], seconds);
    if (!list) add(best[i].program, best[i].seconds);
    placed.push_back(Json{{"matrix", to_json(matrices[i])},
                          {"all_reduce_s", costs[i].all_reduce()},
                          {"best_s", best[i].seconds},
                          {"programs_count", spaces.of(costs[i].levels()).programs},
                          {"verified", verified},
                          {"programs", std::move(listed)}});
  }
  Json out{{"hierarchy", to_string(job.hierarchy)},
           {"axes", job.axes},
           {"reduce", reduction.axes},
           {"bytes", reduction.bytes},
           {"algorithm", net::to_string(job.model.algorithm)},
           {"placements", std::move(placed)},
           {"programs_total", total},
           {"synthesis_s", synthesis},
           {"simulation_s", simulation}};
  if (!list)
    fmt::print(stderr, "[reduce] {} programs: only the best of each placement is listed\n", total);
  fmt::print("{}\n", out.dump());
}

void OneReduction::print_table() {
  fmt::print("{} placement{} of axes {} on {}, {} reduced over axes {} ({})\n\n", matrices.size(),
             matrices.size() == 1 ? "" : "s", fmt::join(job.axes, ","), to_string(job.hierarchy),
             format_bytes(reduction.bytes), fmt::join(reduction.axes, ","),
             net::to_string(job.model.algorithm));
  size_t width = 9;
  for (const Matrix& m : matrices) width = std::max(width, to_string(m).size());
  fmt::print("{:<{}}  {:>10}  {:>10}  {:>8}  {:>8}  best program\n", "placement", width,
             "all-reduce", "best", "speed-up", "programs");
  for (auto [seconds, i] : by_time) {
    std::vector<std::string> words;
    for (const Step& step : best[i].program)
      words.push_back(in_words(step, costs[i].hierarchy(), job.hierarchy));
    double all_reduce = costs[i].all_reduce();
    fmt::print("{:<{}}  {:>10}  {:>10}  {:>7.2f}x  {:>8}  {}\n", to_string(matrices[i]), width,
               format_seconds(all_reduce), format_seconds(best[i].seconds),
               best[i].seconds > 0 ? all_reduce / best[i].seconds : 1.0,
               spaces.of(costs[i].levels()).programs,
               words.empty() ? "nothing" : fmt::format("{}", fmt::join(words, "; ")));
  }
  if (by_time.size() < matrices.size())
    fmt::print("and {} placements that are not faster\n", matrices.size() - by_time.size());
  size_t top = by_time[0].second;
  bool verified = check(best[top].program, costs[top]);
  fmt::print("\nfastest: {}{}\n", to_string(matrices[top]),
             verified ? ", verified on full states" : "");
  print_program(best[top].program, &costs[top], job.hierarchy);
  if (!best[top].program.empty())
    fmt::print("\nwho talks to whom in the first group (same letter; capital: root; dot: idle)\n{}",
               draw(best[top].program, costs[top].hierarchy(), job.hierarchy));
  fmt::print("\n{} programs synthesised in {}, simulated in {}\n", total, format_seconds(synthesis),
             format_seconds(simulation));
}

void one_reduction(const Job& job) {
  OneReduction reduction(job);
  if (job.json)
    reduction.print_json();
  else
    reduction.print_table();
}

void several_reductions(const Job& job) {
  double start = now();
  JointPlacement joint =
      place_jointly(job.model, job.hierarchy, job.axes, job.reductions, job.size_limit);
  double searched = now() - start;
  Json reductions = Json::array();
  if (!job.json)
    fmt::print(
        "{} reductions of axes {} on {}: the placement with the least total is {}, {} ({} "
        "placements, {})\n",
        job.reductions.size(), fmt::join(job.axes, ","), to_string(job.hierarchy),
        to_string(joint.matrix), format_seconds(joint.seconds), joint.placements,
        format_seconds(searched));
  for (size_t r = 0; r < job.reductions.size(); ++r) {
    const Reduction& reduction = job.reductions[r];
    PlacementCost cost(job.model, reduction.bytes, job.hierarchy, joint.matrix, reduction.axes);
    const BestProgram& best = joint.programs[r];
    bool verified = check(best.program, cost);
    if (job.json) {
      reductions.push_back(Json{{"axes", reduction.axes},
                                {"bytes", reduction.bytes},
                                {"all_reduce_s", cost.all_reduce()},
                                {"predicted_s", best.seconds},
                                {"verified", verified},
                                {"steps", to_json(best.program, cost, job.hierarchy)}});
    } else {
      fmt::print("\naxes {}, {}: {} (all-reduce {})\n", fmt::join(reduction.axes, ","),
                 format_bytes(reduction.bytes), format_seconds(best.seconds),
                 format_seconds(cost.all_reduce()));
      print_program(best.program, &cost, job.hierarchy);
    }
  }
  if (job.json)
    fmt::print("{}\n", Json{{"hierarchy", to_string(job.hierarchy)},
                            {"axes", job.axes},
                            {"matrix", to_json(joint.matrix)},
                            {"predicted_s", joint.seconds},
                            {"reductions", std::move(reductions)},
                            {"placements_count", joint.placements},
                            {"search_s", searched}}
                           .dump());
}

}  // namespace

void reduce_command(const ReduceOptions& options) {
  Job job;
  Cluster cluster;
  if (!options.cluster.empty()) cluster = load_cluster(options.cluster);
  if (!options.hierarchy.empty()) {
    job.hierarchy = parse_hierarchy(options.hierarchy);
  } else if (!options.cluster.empty()) {
    const std::optional<Hierarchy> levels = hierarchy_of(cluster);
    if (!levels)
      throw user_error("reduce", "cluster '{}' has unequal groups; give --hierarchy", cluster.name);
    job.hierarchy = *levels;
  } else {
    throw user_error(
        "reduce",
        "--hierarchy and --cluster are missing; give one, for example --hierarchy node:4,gpu:16");
  }
  job.axes = parse_axes(options.axes, job.hierarchy);
  for (const std::string& text : options.reduce) {
    size_t colon = text.find(':');
    std::string bytes = colon == std::string::npos ? options.bytes : text.substr(colon + 1);
    job.reductions.push_back(
        {parse_reduce_axes(text.substr(0, colon), static_cast<int>(job.axes.size())),
         parse_bytes(bytes, colon == std::string::npos ? "--bytes" : "--reduce")});
  }
  if (job.reductions.empty())
    throw user_error("reduce",
                     "--reduce is missing; give the axes to reduce over, for example --reduce 0");
  if (options.cluster.empty()) {
    cluster = assumed_cluster(job.hierarchy);
    fmt::print(
        stderr,
        "[reduce] no --cluster: assuming 8 GB/s and 30 us between the outermost units, 270 GB/s "
        "and 5 us inside the innermost\n");
  } else if (cluster.size() != devices_of(job.hierarchy)) {
    throw user_error(
        "reduce", "--hierarchy {} has {} devices, but cluster '{}' has {}; make them equal",
        to_string(job.hierarchy), devices_of(job.hierarchy), cluster.name, cluster.size());
  }
  if (options.numbering != "level" && options.numbering != "axis")
    throw user_error("reduce", "--numbering is '{}'; give level or axis", options.numbering);
  if (options.tree_share < 0 || options.tree_share > 1 || std::isnan(options.tree_share))
    throw user_error("reduce", "--tree-share is {}; give a share above 0 and at most 1",
                     options.tree_share);
  net::Topology network(cluster);
  job.numbering = options.numbering == "axis" ? Numbering::axis_major : Numbering::level_major;
  job.model.network = &network;
  job.model.algorithm = net::parse_algorithm(options.algo);
  job.model.tuning.launch = parse_quantity(options.launch, "time", "--launch");
  job.model.tuning.tree_share = options.tree_share > 0 ? options.tree_share : net::kNcclTreeShare;
  job.size_limit = options.size_limit;
  job.json = options.json;
  if (job.reductions.size() == 1) {
    one_reduction(job);
  } else {
    if (job.numbering == Numbering::axis_major)
      throw user_error("reduce",
                       "--numbering is axis, which joint placement does not use; leave it out");
    several_reductions(job);
  }
}

namespace {

void add_network_options(Command command, ReduceOptions* options) {
  const std::string group = "Network";
  command
      .add_option("--cluster", options->cluster,
                  "Cluster file, or the name of a shipped cluster; default: assumed links")
      .group(group);
  command
      .add_option("--hierarchy", options->hierarchy,
                  "Levels, outermost first, such as node:4,gpu:16; default: those of the cluster")
      .group(group);
  command
      .add_option("--launch", options->launch,
                  "Time that every collective takes before it moves data; default: 0 s")
      .group(group);
  command
      .add_option(
          "--tree-share", options->tree_share,
          fmt::format("Share of a link that a tree can use; default: {}", net::kNcclTreeShare))
      .group(group);
}

void add_program_options(Command command, ReduceOptions* options) {
  const std::string group = "Reductions";
  command.add_option("--bytes", options->bytes, "Size of the buffer of each device; default: 2 GiB")
      .group(group);
  command
      .add_option("--algo", options->algo,
                  "Algorithm of a collective: ring (default), tree, hierarchical or direct")
      .group(group);
  command
      .add_option("--numbering", options->numbering,
                  "Order of the devices of a group: level (default), that of the levels, or axis, "
                  "that of the axes")
      .group(group);
  command.add_option("--size-limit", options->size_limit, "Most steps of a program; default: 5")
      .group(group);
}

}  // namespace

void add_reduce_command(Command app) {
  auto options = std::make_shared<ReduceOptions>();
  Command command = app.add_subcommand(
      "reduce", "Place parallelism axes on a cluster and find the best reductions over them (P2)");
  command.add_option("--axes", options->axes, "Sizes of the parallelism axes, such as 16,2,2")
      .required();
  command
      .add_option("--reduce", options->reduce,
                  "Axes to reduce over, such as 0,2, or with bytes of their own, 0,2:1GiB; given "
                  "again, axes are placed for all of them jointly")
      .required();
  command.add_flag("--json", options->json, "Print one JSON object");
  add_network_options(command, options.get());
  add_program_options(command, options.get());
  command.footer(
      "Examples:\n"
      "  motley reduce --hierarchy node:4,gpu:16 --axes 16,2,2 --reduce 0,2\n"
      "  motley reduce --cluster p2-a100-4 --axes 16,4 --reduce 0 --bytes 512MiB --algo tree");
  command.callback([options] { reduce_command(*options); });
}

}  // namespace motley

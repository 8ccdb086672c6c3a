#include "cluster/profile.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "core/limits.h"

namespace motley {

namespace {

constexpr size_t kMaxProfileBytes = size_t{64} << 20;
constexpr int kProfileVersion = 1;

Json to_json(const FitQuality& fit) {
  Json points = Json::array();
  for (const auto& [x, y] : fit.points) points.push_back({x, y});
  return {{"r2", fit.r2}, {"error", fit.error}, {"points", points}};
}

// The kind of quantity that a field is.
const char* kind_of(const std::string& name) {
  if (name.ends_with("bandwidth")) return "bandwidth";
  if (name.ends_with("flops")) return "flops";
  if (name == "overhead" || name == "latency" || name == "least" || name == "forward_s" ||
      name == "backward_s")
    return "time";
  return name == "cached" || name == "activation_bytes" ? "bytes" : "number";
}

// A finite number in range, at least 0 or more than 0.
double not_negative(const Fields& fields, const char* name) {
  const double x = fields.number(name);
  if (!(x >= 0)) throw fields.bad(name, fmt::format("is {}; give a number from 0", x));
  try {
    check_range(x, kind_of(name), name);
  } catch (const UserError& e) {
    const std::string why = e.what();
    throw user_error("profile", "{}: {}", fields.where(), why.substr(why.find("] ") + 2));
  }
  return x;
}
double optional(const Fields& fields, const char* name) {
  return fields.find(name) != nullptr ? not_negative(fields, name) : 0;
}
double positive(const Fields& fields, const char* name) {
  const double x = not_negative(fields, name);
  if (!(x > 0)) throw fields.bad(name, fmt::format("is {}; give a number above 0", x));
  return x;
}

FitQuality fit_of(const Fields& parent) {
  const Fields fields(parent.at("fit"), "profile", parent.where() + ".fit");
  FitQuality fit;
  fit.r2 = fields.number("r2");
  fit.error = fields.number("error");
  for (const Json& point : fields.array("points")) {
    if (!point.is_array() || point.size() != 2 || !point[0].is_number() || !point[1].is_number())
      throw fields.bad("points",
                       "holds something else than pairs of numbers; give [size, seconds]");
    fit.points.emplace_back(point[0].get<double>(), point[1].get<double>());
  }
  return fit;
}

template <typename F>
void each(const Fields& fields, const char* name, F body) {
  const Json& list = fields.array(name);
  for (size_t i = 0; i < list.size(); ++i)
    body(Fields(list[i], "profile", fmt::format("{}.{}[{}]", fields.where(), name, i)));
}

// The group at a path; nullptr if there is none.
Group* find(Cluster* cluster, const std::vector<int>& path) {
  Group* group = &cluster->groups[0];
  for (int child : path) {
    if (child < 0 || child >= static_cast<int>(group->children.size())) return nullptr;
    group = &cluster->groups[group->children[child].index];
  }
  return group;
}

}  // namespace

std::string types_of(const Cluster& cluster) {
  if (cluster.types.size() == 1) return cluster.types[0].name;
  const std::vector<int> counts = cluster.count_by_type();
  std::vector<std::string> names;
  for (size_t t = 0; t < counts.size(); ++t)
    names.push_back(fmt::format("{} x{}", cluster.types[t].name, counts[t]));
  return fmt::format("{}", fmt::join(names, " + "));
}

Json to_json(const ProfiledStage& s) {
  return {{"shape", s.shape},
          {"model", s.model},
          {"type", s.type},
          {"micro_batch", s.micro_batch},
          {"forward_s", s.forward},
          {"backward_s", s.backward},
          {"activation_bytes", s.activation},
          {"devices", s.devices},
          {"nodes", s.nodes}};
}

Json to_json(const Profile& profile) {
  Json devices = Json::array(), groups = Json::array();
  for (const ProfiledDevice& d : profile.devices) {
    Json classes = Json::array(), ops = Json::array();
    for (const ProfiledClass& c : d.classes)
      classes.push_back({{"class", c.name},
                         {"dtype", c.dtype},
                         {"overhead", c.overhead},
                         {"rate", c.rate},
                         {"fit", to_json(c.fit)}});
    for (const ProfiledOp& op : d.ops)
      ops.push_back({{"op", op.rate.op},
                     {"overhead", op.rate.overhead},
                     {"flops", op.rate.flops},
                     {"memory_bandwidth", op.rate.memory_bandwidth},
                     {"cached", op.rate.cached},
                     {"uncached_bandwidth", op.rate.uncached_bandwidth},
                     {"launch", op.rate.launch},
                     {"fit", to_json(op.fit)}});
    devices.push_back({{"type", d.type},
                       {"flops", d.flops},
                       {"half_flops", d.half_flops},
                       {"memory_bandwidth", d.memory_bandwidth},
                       {"overhead", d.overhead},
                       {"classes", classes},
                       {"ops", ops}});
    if (d.interference) devices.back()["interference"] = *d.interference;
  }
  for (const ProfiledGroup& g : profile.groups) {
    Json collectives = Json::array();
    for (size_t i = 0; i < g.collectives.size(); ++i)
      collectives.push_back({{"form", to_string(g.collectives[i].collective)},
                             {"latency", g.collectives[i].latency},
                             {"bandwidth", g.collectives[i].bandwidth},
                             {"least", g.collectives[i].least},
                             {"fit", to_json(g.fits[i])}});
    groups.push_back({{"path", g.path}, {"types", g.types}, {"collectives", collectives}});
  }
  Json json = {{"motley_profile", kProfileVersion},
               {"cluster", profile.cluster},
               {"emulated", profile.emulated},
               {"seconds", profile.seconds},
               {"devices", devices},
               {"groups", groups}};
  for (const ProfiledStage& s : profile.stages) json["stages"].push_back(to_json(s));
  return json;
}

Profile parse_profile(const std::string& text, const std::string& name) {
  const Json json = parse_json(text, name);
  const Fields file(json, "profile", name);
  if (const int64_t version = file.integer("motley_profile"); version != kProfileVersion)
    throw file.bad("motley_profile",
                   fmt::format("is {}; this program reads version {}", version, kProfileVersion));
  Profile profile;
  profile.cluster = file.text("cluster");
  profile.emulated = file.text("emulated");
  profile.seconds = file.number("seconds");
  each(file, "devices", [&](const Fields& device) {
    ProfiledDevice d;
    d.type = device.text("type");
    d.flops = positive(device, "flops");
    d.half_flops = positive(device, "half_flops");
    d.memory_bandwidth = positive(device, "memory_bandwidth");
    d.overhead = not_negative(device, "overhead");
    if (device.find("interference") != nullptr) {
      d.interference = not_negative(device, "interference");
      if (*d.interference > kMostInterference)
        throw device.bad("interference",
                         fmt::format("is {}; give at most {}", *d.interference, kMostInterference));
    }
    each(device, "classes", [&](const Fields& c) {
      d.classes.push_back({c.text("class"), c.text("dtype"), not_negative(c, "overhead"),
                           not_negative(c, "rate"), fit_of(c)});
    });
    each(device, "ops", [&](const Fields& op) {
      d.ops.push_back({{op.text("op"), not_negative(op, "overhead"), not_negative(op, "flops"),
                        not_negative(op, "memory_bandwidth"), optional(op, "cached"),
                        optional(op, "uncached_bandwidth"), optional(op, "launch")},
                       fit_of(op)});
    });
    profile.devices.push_back(std::move(d));
  });
  each(file, "groups", [&](const Fields& group) {
    ProfiledGroup g;
    for (const Json& child : group.array("path")) {
      if (!child.is_number_integer()) throw group.bad("path", "holds something else than integers");
      g.path.push_back(child.get<int>());
    }
    for (const Json& type : group.array("types")) {
      if (!type.is_string()) throw group.bad("types", "holds something else than names");
      g.types.push_back(type.get<std::string>());
    }
    each(group, "collectives", [&](const Fields& c) {
      const std::string form = c.text("form");
      const auto collective = parse_collective(form, kMeasuredCollectives);
      if (!collective)
        throw c.bad("form", fmt::format("is '{}'; give all_reduce, all_gather, reduce_scatter, "
                                        "all_to_all or broadcast",
                                        form));
      for (const CollectiveRate& other : g.collectives)
        if (other.collective == *collective)
          throw c.bad("form", fmt::format("is '{}' again; give each form once", form));
      g.collectives.push_back({*collective, not_negative(c, "latency"), positive(c, "bandwidth"),
                               c.find("least") ? not_negative(c, "least") : 0});
      g.fits.push_back(fit_of(c));
    });
    profile.groups.push_back(std::move(g));
  });
  std::set<std::tuple<std::string, std::string, int, int>> known;
  if (file.find("stages"))
    each(file, "stages", [&](const Fields& stage) {
      ProfiledStage s;
      s.shape = stage.text("shape");
      s.model = stage.text("model");
      s.type = stage.text("type");
      s.micro_batch = stage.integer("micro_batch");
      if (s.micro_batch < 1)
        throw stage.bad("micro_batch", fmt::format("is {}; give a positive number", s.micro_batch));
      s.forward = not_negative(stage, "forward_s");
      s.backward = not_negative(stage, "backward_s");
      s.activation = not_negative(stage, "activation_bytes");
      if (s.shape.empty()) throw stage.bad("shape", "is empty; give what calibrate wrote");
      if (stage.find("devices")) {
        constexpr int64_t kMost = 1 << 20;
        const int64_t devices = stage.integer("devices"), nodes = stage.integer("nodes");
        if (nodes < 1 || nodes > kMost)
          throw stage.bad("nodes", fmt::format("is {}; give 1 to {}", nodes, kMost));
        if (devices < nodes || devices > kMost)
          throw stage.bad("devices",
                          fmt::format("is {}; give at least one per node, of {}", devices, nodes));
        s.devices = static_cast<int>(devices);
        s.nodes = static_cast<int>(nodes);
      }
      if (!known.emplace(s.shape, s.type, s.devices, s.nodes).second)
        throw stage.bad(
            "shape",
            fmt::format("is {} again for {}; give each shape once for each type", s.shape, s.type));
      profile.stages.push_back(std::move(s));
    });
  return profile;
}

void save_profile(const Profile& profile, const std::string& path) {
  write_file(path, to_json(profile).dump(1) + "\n");
}

Profile load_profile(const std::string& path) {
  return parse_profile(read_file(path, kMaxProfileBytes), path);
}

void apply(const Profile& profile, const std::string& name, Cluster* cluster) {
  for (DeviceType& type : cluster->types) {
    const auto it = std::find_if(profile.devices.begin(), profile.devices.end(),
                                 [&](const ProfiledDevice& d) { return d.type == type.name; });
    if (it == profile.devices.end())
      throw user_error("profile",
                       "{}: devices has no type {}, which cluster {} has; calibrate that cluster",
                       name, type.name, cluster->name);
    type.flops = it->flops;
    type.half_flops = it->half_flops;
    type.memory_bandwidth = it->memory_bandwidth;
    type.overhead = it->overhead;
    if (it->interference) type.interference = *it->interference;
    type.ops.clear();
    for (const ProfiledOp& op : it->ops) type.ops.push_back(op.rate);
  }
  for (const ProfiledGroup& measured : profile.groups) {
    Group* group = find(cluster, measured.path);
    if (group == nullptr || group->device_count != static_cast<int>(measured.types.size()))
      continue;
    bool same = true;
    for (int d = 0; d < group->device_count; ++d)
      same = same && cluster->type_of(group->first_device + d).name == measured.types[d];
    if (same) group->measured = measured.collectives;
  }
}

Cluster load_cluster(const std::string& path_or_name, int scale, const std::string& profile) {
  Cluster cluster = load_cluster(path_or_name);
  if (scale > 0) cluster = scaled_down(cluster, scale);
  if (!profile.empty()) apply(load_profile(profile), profile, &cluster);
  return cluster;
}

}  // namespace motley

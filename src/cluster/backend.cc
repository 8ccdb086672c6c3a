#include "cluster/backend.h"

#include <algorithm>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/yaml.h"

namespace motley {

namespace {

constexpr bool yes = true, no = false;

const std::vector<Backend>& table() {
  static const std::vector<Backend> backends = {
      // name, messages, all_to_all, half_sums, half_scatters, hides, tags, cpu, cuda, known
      {"cncl", yes, yes, yes, yes, yes, no, no, yes, yes},
      {"gloo", yes, yes, no, no, yes, yes, yes, no, yes},
      {"hccl", yes, yes, yes, yes, yes, no, no, yes, yes},
      {"mpi", yes, yes, no, yes, yes, yes, yes, no, yes},
      {"nccl", yes, yes, yes, yes, yes, no, no, yes, yes},
      {"ucc", no, no, no, yes, yes, no, yes, yes, no},
      {"xccl", yes, yes, yes, yes, yes, no, no, yes, yes},
  };
  return backends;
}

}  // namespace

Backend backend_named(const std::string& name) {
  if (name.empty()) return {"", yes, yes, yes, yes, yes, yes, yes, yes, no};
  for (const Backend& backend : table())
    if (backend.name == name) return backend;
  Backend unknown;
  unknown.name = name;
  unknown.half_scatters = true;  // its terms are exchanged as they are
  return unknown;
}

Backend read_backend(const Yaml& node, const std::string& file, const std::string& field) {
  const auto error = [&](const std::string& at, const std::string& what) {
    return user_error(
        "cluster",
        "{}: {} {}; give a backend of torch.distributed, such as nccl, or of one that is not "
        "known {{name: mine, messages: true, all_to_all: true, half_sums: true, hides: true}}",
        file, at, what);
  };
  const Yaml named = node.is_map() ? node["name"] : node;
  if (!named || !named.is_scalar()) throw error(field, "has no name");
  const std::string name = named.scalar();
  const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '-' || c == ':' || c == ',';
  });
  if (name.empty() || name.size() > 60 || !plain)
    throw error(field, fmt::format("is '{}', which is no name of a backend", name.substr(0, 60)));
  Backend backend = backend_named(name);
  if (!node.is_map()) return backend;
  for (const auto& [key, value] : node.entries()) {
    bool* what = key == "messages"     ? &backend.messages
                 : key == "all_to_all" ? &backend.all_to_all
                 : key == "half_sums"  ? &backend.half_sums
                 : key == "hides"      ? &backend.hides
                                       : nullptr;
    if (key == "name") continue;
    if (what == nullptr) throw error(field + "." + key, "is not a known field");
    const std::optional<bool> said = value.boolean();
    if (!said) throw error(field + "." + key, "is neither true nor false");
    *what = *said;
  }
  return backend;
}

Backend backend_of(const Cluster& cluster) {
  const Backend& said = cluster.groups[0].backend;
  if (!said.name.empty()) return said;
  const bool emulated = std::any_of(cluster.types.begin(), cluster.types.end(),
                                    [](const DeviceType& type) { return type.speed > 0; });
  return backend_named(emulated ? "gloo" : "");
}

Backend backend_among(const Cluster& cluster, const std::vector<int>& devices) {
  Backend found = backend_of(cluster);
  if (devices.empty()) return found;
  const auto [first, last] = std::minmax_element(devices.begin(), devices.end());
  for (const Group& group : cluster.groups)  // outer ones first
    if (group.parent.valid() && !group.backend.name.empty() && *first >= group.first_device &&
        *last < group.first_device + group.device_count)
      found = group.backend;
  return found;
}

}  // namespace motley

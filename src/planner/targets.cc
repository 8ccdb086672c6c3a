#include "planner/targets.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/error.h"

namespace motley::planner {

const std::vector<Target>& targets() {
  // name, title, pipelines, tensors, in stages, experts, pieces, alone, meshes, any warm-up,
  // interleaved, rows, recompute by stage, levels of zero
  static const std::vector<Target> table = {
      {"ddp", "DDP", false, false, false, false, false, false, false, false, false, true, false,
       "0", false, false},
      {"deepspeed", "DeepSpeed", true, true, false, false, true, false, false, false, false, false,
       false, "01", true, false},
      {"flagscale", "FlagScale", true, true, true, true, false, false, true, false, false, false,
       true, "01", true, false},
      {"fsdp2", "FSDP2", false, false, false, false, true, true, false, false, false, true, false,
       "0", false, false},
      {"galvatron", "Galvatron", true, true, true, false, true, false, false, false, false, false,
       true, "02", true, false},
      {"megatron", "Megatron-LM", true, true, true, true, false, false, false, false, true, false,
       false, "01", true, false},
      {"torchtitan", "torchtitan", true, true, true, true, true, false, false, true, true, false,
       false, "1", false, true},
  };
  return table;
}

const Target* find_target(const std::string& name) {
  for (const Target& target : targets())
    if (name == target.name) return &target;
  return nullptr;
}

std::string target_names() {
  std::string names;
  for (const Target& target : targets())
    names += (names.empty() ? "" : ", ") + std::string(target.name);
  return names;
}

namespace {

// FlagScale's process meshes: ranks are sorted by type, and a mesh divides whole rows.
std::string cannot_mesh(const Arrangement& a, const Cluster& cluster) {
  std::set<int> done;
  int now = -1;
  for (size_t s = 0; s < a.stages.size(); ++s) {
    const ArrangedStage& stage = a.stages[s];
    const int type = cluster.devices[stage.devices[0][0]].type;
    for (const std::vector<int>& devices : stage.devices)
      for (int d : devices)
        if (cluster.devices[d].type != type)
          return fmt::format("stage {} has devices of several types", s);
    if (type != now && !done.insert(type).second)
      return fmt::format("stage {} goes back to {}; its meshes follow one another by type", s,
                         cluster.types[type].name);
    now = type;
    if (a.micro_batch * a.replicas() % stage.dp() != 0)
      return fmt::format("{} samples do not divide into the {} replicas of stage {}",
                         a.micro_batch * a.replicas(), stage.dp(), s);
  }
  if (!contiguous(hosts_of(cluster), rank_order(a)))
    return "the ranks of a machine do not follow one another";
  return "";
}

std::string cannot_stage(const Target& target, const Arrangement& a, size_t s) {
  const ArrangedStage& stage = a.stages[s];
  if (stage.width() > 1 && stage.inside == Inside::tensors &&
      (!target.tensors || (a.pipelined() && !target.tensors_in_stages)))
    return fmt::format("stage {} cuts matrices over {} devices", s, stage.width());
  if (stage.width() > 1 && stage.inside == Inside::experts && !target.experts)
    return fmt::format("stage {} cuts experts over {} devices", s, stage.width());
  if (stage.width() > 1 && stage.inside == Inside::pieces &&
      (!target.pieces || a.pipelined() || a.replicas() > 1))
    return fmt::format("stage {} gathers parameters in every pass", s);
  if (stage.width() > 1 && stage.inside == Inside::batch && target.pieces_alone)
    return "its parameters are whole on every device";
  if (stage.recompute != a.stages[0].recompute && !target.recompute_by_stage)
    return fmt::format("stage {} computes activations {}, stage 0 {}", s,
                       stage.recompute ? "again" : "once", stage.recompute ? "once" : "again");
  // Rows of a stage are cut equally.
  if (stage.dp() > a.replicas() && a.shares.empty() && a.micro_batch % stage.width() != 0)
    return fmt::format("micro-batches of {} do not divide among the {} devices of stage {}",
                       a.micro_batch, stage.width(), s);
  return "";
}

}  // namespace

std::string cannot_divide(const Target& target, int tp, int ep, const Sizes& sizes) {
  const std::string over = fmt::format("over {} devices", tp);
  if (sizes.heads % tp != 0) return fmt::format("it cuts {} heads {}", sizes.heads, over);
  if (sizes.kv_heads % tp != 0 && (!target.copies_kv || tp % sizes.kv_heads != 0))
    return fmt::format("it cuts {} heads of keys and values {}", sizes.kv_heads, over);
  if (sizes.ffn % tp != 0) return fmt::format("it cuts {} columns of layers {}", sizes.ffn, over);
  if ((target.tokens || sizes.experts > 0) && sizes.seq % tp != 0)
    return fmt::format("it cuts {} tokens {}", sizes.seq, over);
  if (ep > 1 && (sizes.experts == 0 || sizes.experts % ep != 0))
    return fmt::format("it cuts {} experts over {} devices", sizes.experts, ep);
  return "";
}

std::string cannot_say(const Target& target, const Arrangement& a, const Cluster& cluster,
                       const std::optional<Sizes>& sizes) {
  if (a.pipelined() && !target.pipelines) return fmt::format("it has {} stages", a.stages.size());
  if (a.replicas() > 1 && !target.pipelines && a.micro_batches.size() > 1 &&
      !std::all_of(a.micro_batches.begin(), a.micro_batches.end(),
                   [&](int m) { return m == a.micro_batches[0]; }))
    return "its replicas take unequal numbers of micro-batches";
  if (!target.meshes && a.pipelined()) {
    for (size_t s = 1; s < a.stages.size(); ++s)
      if (a.stages[s].tp() != a.stages[0].tp() || a.stages[s].dp() != a.stages[0].dp())
        return fmt::format(
            "stage 0 is on {} x {} devices (replicas x tensors), stage {} on {} x {}",
            a.stages[0].dp(), a.stages[0].tp(), s, a.stages[s].dp(), a.stages[s].tp());
  }
  for (int r = 1; r < a.replicas(); ++r)
    if (a.micro_batches[r] != a.micro_batches[0])
      return fmt::format("replica 0 takes {} micro-batches, replica {} takes {}",
                         a.micro_batches[0], r, a.micro_batches[r]);
  if (!a.shares.empty() && !target.rows) {
    const auto [least, most] = std::minmax_element(a.shares.begin(), a.shares.end());
    return fmt::format("it gives devices unequal shares ({:.1f}% to {:.1f}%)", 100 * *least,
                       100 * *most);
  }
  if (!a.shares.empty() && a.stages[0].inside != Inside::batch &&
      a.stages[0].inside != Inside::pieces)
    return "it cuts tensors into unequal shares";
  for (size_t s = 0; s < a.stages.size(); ++s)
    if (std::string why = cannot_stage(target, a, s); !why.empty()) return why;
  for (const ArrangedStage& stage : a.stages) {
    const int ep = stage.inside == Inside::experts ? stage.width() : 1;
    if (!sizes) break;
    if (std::string why = cannot_divide(target, stage.tp(), ep, *sizes); !why.empty()) return why;
  }
  if (a.split >= 0)
    return fmt::format("stage {} computes gradients of weights in passes of their own", a.split);
  if (a.interleave > 1 && !target.interleaved)
    return fmt::format("devices have {} stages each", a.interleave);
  if (a.interleave == 1 && a.schedule.empty() && !target.any_warm_up)
    return fmt::format("stage 0 runs {} warm-up passes; 1F1B has {}", a.stages[0].warm_up,
                       std::min<int>(static_cast<int>(a.stages.size()), a.micro_batches[0]));
  // Replicas alone may hold everything.
  const bool plain = a.zero == 0 && !a.pipelined() && a.stages[0].tp() == 1;
  if (a.replicas() > 1 && !plain &&
      std::string(target.zero).find(static_cast<char>('0' + a.zero)) == std::string::npos)
    return fmt::format("its replicas divide state at level {} of ZeRO", a.zero);
  if (target.pieces_alone && a.stages[0].width() * a.replicas() > 1 &&
      a.stages[0].inside != Inside::pieces)
    return "its parameters are whole on every device";
  return target.meshes ? cannot_mesh(a, cluster) : "";
}

std::vector<int> rank_order(const Arrangement& a) {
  std::vector<int> order;
  for (int s = 0; s < a.pp(); ++s)
    for (const std::vector<int>& devices : a.stages[s].devices)
      order.insert(order.end(), devices.begin(), devices.end());
  return order;
}

std::vector<Host> hosts_of(const Cluster& cluster) {
  std::vector<Host> hosts;
  std::map<std::string, int> seen;
  for (const Group& group : cluster.groups) {
    if (!group.children.empty() || group.device_count == 0) continue;
    std::string name;
    for (const char c : group.name.empty() ? cluster.name : group.name)
      name += std::isalnum(static_cast<unsigned char>(c)) || c == '-' ? c : '-';
    std::vector<int> devices;
    for (int d = 0; d < group.device_count; ++d) devices.push_back(group.first_device + d);
    hosts.push_back({name.empty() ? "host" : name, std::move(devices)});
    ++seen[hosts.back().name];
  }
  std::map<std::string, int> used;
  for (Host& host : hosts)
    if (const std::string base = host.name; seen[base] > 1) do
        host.name = fmt::format("{}-{}", base, used[base]++);
      while (seen.count(host.name) > 0);
  return hosts;
}

bool contiguous(const std::vector<Host>& hosts, const std::vector<int>& devices) {
  std::map<int, size_t> host_of;
  for (size_t h = 0; h < hosts.size(); ++h)
    for (int d : hosts[h].devices) host_of[d] = h;
  std::set<size_t> done;
  for (size_t i = 0; i < devices.size(); ++i)
    if (i == 0 || host_of[devices[i]] != host_of[devices[i - 1]])
      if (!done.insert(host_of[devices[i]]).second) return false;
  return true;
}

}  // namespace motley::planner

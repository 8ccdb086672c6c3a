#include "cluster/part.h"

#include <algorithm>

#include "core/error.h"

namespace motley {

namespace {

class Part {
 public:
  Part(const Cluster& cluster, const std::vector<int>& devices)
      : from_(cluster), devices_(devices) {
    to_.name = cluster.name;
    type_.assign(cluster.types.size(), -1);
    for (size_t t = 0; t < cluster.types.size(); ++t)
      for (int d : devices)
        if (cluster.devices[d].type == static_cast<int>(t) && type_[t] < 0) {
          type_[t] = static_cast<int>(to_.types.size());
          to_.types.push_back(cluster.types[t]);
        }
  }

  Cluster run() {
    add(GroupId(0), GroupId(), 0);
    return std::move(to_);
  }

 private:
  // The devices below a group, as a range of devices_.
  std::pair<size_t, size_t> below(GroupId id) const {
    const Group& g = from_.groups[id.index];
    auto first = std::lower_bound(devices_.begin(), devices_.end(), g.first_device);
    auto last = std::lower_bound(first, devices_.end(), g.first_device + g.device_count);
    return {first - devices_.begin(), last - devices_.begin()};
  }

  // `uplink`: of the groups passed over on the way from the parent, 0 if none has one.
  void add(GroupId id, GroupId parent, BytesPerSecond uplink) {
    const Group& g = from_.groups[id.index];
    std::vector<GroupId> children;
    for (GroupId child : g.children)
      if (auto [first, last] = below(child); first < last) children.push_back(child);
    if (uplink == 0) uplink = g.uplink;
    if (children.size() == 1) {
      add(children[0], parent, uplink);
      return;
    }
    GroupId mine(static_cast<int64_t>(to_.groups.size()));
    to_.groups.push_back(g);
    if (parent.valid()) to_.groups[parent.index].children.push_back(mine);
    auto [first, last] = below(id);
    {
      Group& copy = to_.groups[mine.index];
      copy.parent = parent;
      copy.uplink = parent.valid() ? uplink : 0;
      copy.children.clear();
      copy.first_device = static_cast<int>(first);
      copy.device_count = static_cast<int>(last - first);
      if (copy.device_count != g.device_count) copy.measured.clear();
    }
    for (GroupId child : children) add(child, mine, 0);
    if (!children.empty()) return;
    for (size_t i = first; i < last; ++i)
      to_.devices.push_back({type_[from_.devices[devices_[i]].type], mine});
  }

  const Cluster& from_;
  const std::vector<int>& devices_;
  std::vector<int> type_;
  Cluster to_;
};

}  // namespace

Cluster part_of(const Cluster& cluster, const std::vector<int>& devices) {
  MOTLEY_CHECK(!devices.empty() && std::is_sorted(devices.begin(), devices.end()));
  MOTLEY_CHECK(devices.front() >= 0 && devices.back() < cluster.size());
  return Part(cluster, devices).run();
}

}  // namespace motley

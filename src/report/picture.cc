#include "report/picture.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "core/error.h"
#include "net/topology.h"
#include "report/html.h"
#include "sim/traffic.h"

namespace motley::report {

namespace {

constexpr const char* kTypeColours[] = {"#3b78d8", "#b9770e", "#2b9a86", "#c8558e",
                                        "#8a63c9", "#7a8a2e", "#b8574a", "#5b7f95"};
constexpr int kDrawnOneByOne = 64;  // devices of a cluster; in a larger one what is alike is one
constexpr size_t kMostDrawn = 400;  // boxes, of a cluster of which nothing is alike
constexpr size_t kBusiest = 8;
constexpr double kLevels[] = {0.001, 0.1, 0.3, 0.6};  // busy parts of the step

std::string link_text(const Link& link) {
  const char* kind = link.kind == LinkKind::ring  ? "ring"
                     : link.kind == LinkKind::bus ? "bus"
                                                  : "switch";
  return fmt::format("{} of {}/s, {}", kind, format_bytes(link.bandwidth),
                     format_seconds(link.latency));
}

std::string rounded_percent(double part) {
  return part > 0 && part < 0.001 ? "<0.1%"
                                  : fmt::format("{:.{}f}%", 100 * part, part < 0.1 ? 1 : 0);
}

class Picture {
 public:
  Picture(const Plan& plan, const Simulation& simulation)
      : plan_(plan), cluster_(plan.cluster), step_(simulation.step), topology_(plan.cluster) {
    for (const DeviceTime& d : simulation.devices) works_.push_back(d.busy > 0);
    bytes_ = link_bytes(plan, topology_);
    number_links();
  }

  std::string run() {
    std::string out = "<div class=\"legend\">";
    const std::vector<int> count = cluster_.count_by_type();
    for (size_t t = 0; t < cluster_.types.size(); ++t)
      out += fmt::format("<span><i style=\"background:{}\"></i>{}</span>",
                         type_colour(static_cast<int>(t)),
                         escape(fmt::format("{} × {}: {}/s, {}", count[t], cluster_.types[t].name,
                                            format_flops(cluster_.types[t].flops),
                                            format_bytes(cluster_.types[t].memory))));
    if (std::count(works_.begin(), works_.end(), false) > 0)
      out += "<span>faint: without work</span>";
    out +=
        "</div>\n<div class=\"legend\"><span>links, by the part of the step that they are "
        "busy:</span>";
    for (size_t level = 0; level <= std::size(kLevels); ++level)
      out += fmt::format("<span><i class=\"l{}\"></i>{}</span>", level,
                         level == 0   ? "none"
                         : level == 1 ? "under 10%"
                         : level == 2 ? "under 30%"
                         : level == 3 ? "under 60%"
                                      : "more");
    return out + "</div>\n" + draw(0, 1) + "\n" + busiest();
  }

 private:
  double busy(int link) const {
    return link < 0 || step_ <= 0 ? 0 : bytes_[link] / topology_.links()[link].bandwidth / step_;
  }
  static int level(double busy) {
    return static_cast<int>(std::upper_bound(std::begin(kLevels), std::end(kLevels), busy) -
                            std::begin(kLevels));
  }

  // Topology numbers the ports of groups, then those of devices, then what groups have inside.
  void number_links() {
    const std::vector<net::NetworkLink>& links = topology_.links();
    group_port_.assign(cluster_.groups.size(), -1);
    device_port_.assign(cluster_.size(), -1);
    inside_.resize(cluster_.groups.size());
    nics_.resize(cluster_.groups.size());
    int next = 0;
    const auto port = [&](GroupId parent, BytesPerSecond uplink) {
      if (uplink <= 0 && cluster_.groups[parent.index].link.kind != LinkKind::switched) return -1;
      MOTLEY_CHECK(links[next].group == parent.index && links[next].name.ends_with(" up"));
      next += 2;
      return next - 2;
    };
    for (size_t g = 1; g < cluster_.groups.size(); ++g)
      group_port_[g] = port(cluster_.groups[g].parent, cluster_.groups[g].uplink);
    for (int d = 0; d < cluster_.size(); ++d) device_port_[d] = port(cluster_.devices[d].parent, 0);
    std::vector<size_t> owners;  // of NICs, in the order in which they are numbered
    for (size_t g = 0; g < cluster_.groups.size(); ++g)
      if (cluster_.groups[g].nics.size() > 1)
        owners.insert(owners.end(), cluster_.groups[g].nics.size(), g);
    const size_t first_nic = links.size() - 2 * owners.size();
    for (size_t l = next; l < first_nic; ++l)
      inside_[links[l].group].push_back(static_cast<int>(l));
    for (size_t n = 0; n < owners.size(); ++n) {
      group_port_[owners[n]] = -1;
      nics_[owners[n]].push_back(static_cast<int>(first_nic + 2 * n));
    }
  }

  double port_busy(int up) const { return up < 0 ? 0 : std::max(busy(up), busy(up + 1)); }

  std::string link_title(const std::string& name, int up) const {
    return fmt::format("{}: {} up ({} of the step), {} down ({})", name, format_bytes(bytes_[up]),
                       rounded_percent(busy(up)), format_bytes(bytes_[up + 1]),
                       rounded_percent(busy(up + 1)));
  }
  std::string gauge(double part, const std::string& what, const std::string& title) const {
    return fmt::format("<span class=\"gauge\" title=\"{}\"><i class=\"l{}\"></i>{} {}</span>",
                       escape(title), level(part), escape(what), rounded_percent(part));
  }

  // What tells a group from another, names and numbers of devices apart.
  std::string look(int g) const {
    const Group& group = cluster_.groups[g];
    std::string out = fmt::format("{} {} {} {} ", group.name, link_text(group.link), group.uplink,
                                  group.direct.size());
    for (const int l : inside_[g]) out += rounded_percent(busy(l)) + ",";
    for (const int l : nics_[g]) out += rounded_percent(port_busy(l)) + ",";
    for (GroupId child : group.children)
      out += fmt::format("({} {})", rounded_percent(port_busy(group_port_[child.index])),
                         look(child.index));
    for (int d = group.first_device;
         group.children.empty() && d < group.first_device + group.device_count; ++d)
      out += look_of_device(d) + ";";
    return out;
  }
  std::string look_of_device(int d) const {
    std::string stages;
    if (plan_.pipeline)
      for (const Seat& seat : plan_.pipeline->seats(d)) stages += fmt::format("{}+", seat.stage);
    return fmt::format("{} {} {} {}", cluster_.devices[d].type, works_[d] ? 1 : 0, stages,
                       rounded_percent(port_busy(device_port_[d])));
  }

  std::string draw(int g, int times) {
    const Group& group = cluster_.groups[g];
    std::string out = "<div class=\"group\"><div class=\"title\">";
    if (times > 1) out += fmt::format("<b>{} ×</b> ", times);
    out += fmt::format("<b>{}</b> {}", escape(group.name.empty() ? "cluster" : group.name),
                       escape(link_text(group.link)));
    if (group.uplink > 0) out += escape(fmt::format(", uplink {}/s", format_bytes(group.uplink)));
    for (size_t n = 0; n < nics_[g].size(); ++n)
      out += " " + gauge(port_busy(nics_[g][n]), fmt::format("NIC {}", n),
                         link_title(fmt::format("NIC {}", n), nics_[g][n]));
    // A bus, the hops of a ring, direct links: the busiest of them.
    if (!inside_[g].empty()) {
      const int most = *std::max_element(inside_[g].begin(), inside_[g].end(),
                                         [&](int a, int b) { return busy(a) < busy(b); });
      const bool bus = group.link.kind == LinkKind::bus && inside_[g].size() == 1;
      out += " " + gauge(busy(most),
                         bus ? "bus" : fmt::format("busiest of {} links", inside_[g].size()),
                         fmt::format("{}: {} a step", topology_.links()[most].name,
                                     format_bytes(bytes_[most])));
    }
    out += "</div><div class=\"inside\">";
    const bool one_by_one = cluster_.size() <= kDrawnOneByOne;
    for (size_t i = 0; i < group.children.size();) {
      const int child = group.children[i].index, up = group_port_[child];
      size_t end = i + 1;
      if (!one_by_one) {
        const std::string kind = fmt::format("{} {}", rounded_percent(port_busy(up)), look(child));
        while (end < group.children.size() &&
               fmt::format("{} {}",
                           rounded_percent(port_busy(group_port_[group.children[end].index])),
                           look(group.children[end].index)) == kind)
          ++end;
      }
      if (++drawn_ > kMostDrawn) {
        out += fmt::format("<span class=\"soft\">and {} more</span>", group.children.size() - i);
        break;
      }
      out += "<div class=\"hang\">";
      if (up >= 0)
        out += fmt::format("<span class=\"wire\" title=\"{}\"><i class=\"l{}\"></i>{}</span>",
                           escape(link_title(cluster_.groups[child].name, up)),
                           level(port_busy(up)), rounded_percent(port_busy(up)));
      out += draw(child, static_cast<int>(end - i)) + "</div>";
      i = end;
    }
    if (group.children.empty()) out += devices(group, one_by_one);
    return out + "</div></div>";
  }

  std::string devices(const Group& group, bool one_by_one) {
    std::string out;
    const int last = group.first_device + group.device_count;
    for (int d = group.first_device; d < last;) {
      int end = d + 1;
      const std::string kind = look_of_device(d);
      while (!one_by_one && group.device_count > 16 && end < last && look_of_device(end) == kind)
        ++end;
      if (++drawn_ > kMostDrawn)
        return out + fmt::format("<span class=\"soft\">and {} more</span>", last - d);
      std::string what = fmt::format(
          "device {}: {}", end - d > 1 ? fmt::format("{}–{}", d, end - 1) : std::to_string(d),
          cluster_.type_of(d).name);
      if (const std::string seat = seat_text(plan_, d); !seat.empty()) what += ", " + seat;
      const int up = device_port_[d];
      if (up >= 0) what = link_title(what, up);
      std::string label = end - d > 1 ? fmt::format("×{}", end - d) : "";
      if (label.empty() && plan_.pipeline)
        if (const auto seats = plan_.pipeline->seats(d); !seats.empty())
          label = std::to_string(seats[0].stage);
      out += fmt::format(
          "<div class=\"leaf\" title=\"{}\"><i class=\"l{}\"></i><b class=\"device{}\" "
          "style=\"background:{}\">{}</b></div>",
          escape(what), level(port_busy(up)), works_[d] ? "" : " off",
          type_colour(cluster_.devices[d].type), label);
      d = end;
    }
    return out;
  }

  std::string busiest() const {
    // Links whose names differ in numbers alone and are as busy.
    std::map<std::pair<std::string, std::string>, std::vector<int>> alike;
    for (size_t l = 0; l < bytes_.size(); ++l) {
      const int link = static_cast<int>(l);
      if (bytes_[l] <= 0) continue;
      std::string name;
      for (const char c : topology_.links()[l].name)
        if (!std::isdigit(static_cast<unsigned char>(c))) name += c;
      alike[{name, rounded_percent(busy(link))}].push_back(link);
    }
    std::vector<std::vector<int>> order;
    for (auto& [key, list] : alike) order.push_back(std::move(list));
    std::stable_sort(order.begin(), order.end(),
                     [&](const auto& a, const auto& b) { return busy(a[0]) > busy(b[0]); });
    if (order.empty()) return "<p>Nothing crosses a link.</p>\n";
    std::string out = "<div class=\"wide\"><table>\n" +
                      row({"busiest links", "bandwidth", "bytes a step", "busy", ""}, true);
    for (size_t i = 0; i < order.size() && i < kBusiest; ++i) {
      const net::NetworkLink& link = topology_.links()[order[i][0]];
      const double part = busy(order[i][0]);
      out +=
          row({escape(link.name) + (order[i].size() > 1
                                        ? fmt::format(" <span class=\"soft\">and {} like it</span>",
                                                      order[i].size() - 1)
                                        : ""),
               format_bytes(link.bandwidth) + "/s", format_bytes(bytes_[order[i][0]]),
               fmt::format("<div class=\"bar\"><i class=\"l{}\" style=\"width:{:.1f}%\"></i></div>",
                           level(part), std::clamp(100 * part, 0.0, 100.0)),
               rounded_percent(part)});
    }
    return out + "</table></div>\n";
  }

  const Plan& plan_;
  const Cluster& cluster_;
  const Seconds step_;
  const net::Topology topology_;
  std::vector<bool> works_;
  std::vector<Bytes> bytes_;                   // [link]
  std::vector<int> group_port_, device_port_;  // the link up, behind it the one down; -1: none
  std::vector<std::vector<int>> inside_;       // [group] its bus, hops of its ring, direct links
  std::vector<std::vector<int>> nics_;         // [group] likewise, where there are several
  size_t drawn_ = 0;
};

}  // namespace

std::string type_colour(int type) { return kTypeColours[type % std::size(kTypeColours)]; }

std::string seat_text(const Plan& plan, int device) {
  if (!plan.pipeline) return "";
  std::vector<int> stages;
  int replica = 0;
  for (const Seat& seat : plan.pipeline->seats(device)) {
    replica = seat.replica;
    stages.push_back(seat.stage);
  }
  if (stages.empty()) return "";
  return fmt::format("replica {}, stage {}", replica, fmt::join(stages, " + "));
}

std::string picture(const Plan& plan, const Simulation& simulation) {
  return Picture(plan, simulation).run();
}

}  // namespace motley::report

#include "readers/machines.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/yaml.h"
#include "readers/text.h"

namespace motley::readers {

namespace {

constexpr size_t kMostGpus = 1024;
constexpr int kMostSlots = 1024, kDeepest = 8;

UserError bad(const std::string& name, size_t line, const std::string& what,
              const std::string& fix) {
  return user_error("cluster", "{}: line {}: {}; give {}", name, line, what, fix);
}

// "key=value" words of a line.
std::map<std::string, std::string> fields_of(const std::string& line) {
  std::map<std::string, std::string> fields;
  for (const std::string& word : words_of(line))
    if (const size_t equals = word.find('='); equals != std::string::npos)
      fields.emplace(word.substr(0, equals), word.substr(equals + 1));
  return fields;
}

}  // namespace

const char* to_string(Near near) {
  switch (near) {
    case Near::nvlink:
      return "NVLink";
    case Near::pix:
      return "PIX";
    case Near::pxb:
      return "PXB";
    case Near::phb:
      return "PHB";
    case Near::node:
      return "NODE";
    case Near::sys:
      return "SYS";
  }
  return "?";
}

TopoMatrix parse_topo(const std::string& text, const std::string& name) {
  static const std::map<std::string, Near> classes = {{"PIX", Near::pix}, {"PXB", Near::pxb},
                                                      {"PHB", Near::phb}, {"NODE", Near::node},
                                                      {"SOC", Near::sys}, {"SYS", Near::sys}};
  const auto is_gpu = [](const std::string& word) {
    int64_t n = 0;
    return word.starts_with("GPU") && whole(word.substr(3), &n);
  };
  TopoMatrix matrix;
  size_t gpus = 0, number = 0;
  for (const std::string& line : lines_of(text)) {
    ++number;
    const std::vector<std::string> words = words_of(line);
    if (words.empty() || !is_gpu(words[0])) continue;
    if (gpus == 0) {  // the header
      while (gpus < words.size() && is_gpu(words[gpus])) ++gpus;
      if (gpus > kMostGpus) throw bad(name, number, "too many GPUs", "one machine");
      continue;
    }
    if (matrix.between.size() == gpus) break;  // the legend
    if (words[0] != fmt::format("GPU{}", matrix.between.size()))
      throw bad(name, number,
                fmt::format("is of {} where GPU{} is next", words[0].substr(0, 20),
                            matrix.between.size()),
                "the whole output of nvidia-smi topo -m");
    if (words.size() < gpus + 1)
      throw bad(name, number, fmt::format("has {} columns for {} GPUs", words.size() - 1, gpus),
                "the whole output of nvidia-smi topo -m");
    std::vector<TopoMatrix::Path> row;
    for (size_t g = 0; g < gpus; ++g) {
      const std::string& cell = words[g + 1];
      TopoMatrix::Path path;
      int64_t links = 0;
      if (cell == "X") {
        if (g != matrix.between.size())
          throw bad(name, number, "has X off the diagonal", "a matrix");
        path = {Near::nvlink, 0};
      } else if (cell.starts_with("NV") && whole(cell.substr(2), &links) && links >= 1 &&
                 links < 1000) {
        path = {Near::nvlink, static_cast<int>(links)};
      } else if (const auto it = classes.find(cell); it != classes.end()) {
        path.near = it->second;
      } else {
        throw bad(name, number, fmt::format("has '{}'", cell.substr(0, 20)),
                  "X, NV#, PIX, PXB, PHB, NODE or SYS");
      }
      row.push_back(path);
    }
    matrix.between.push_back(std::move(row));
  }
  if (gpus == 0 || matrix.between.size() != gpus)
    throw user_error("cluster",
                     "{}: has {} of {} rows of GPUs; give the output of nvidia-smi topo -m", name,
                     matrix.between.size(), gpus);
  return matrix;
}

std::vector<Gpu> parse_query(const std::string& text, const std::string& name) {
  std::vector<Gpu> gpus;
  size_t number = 0, name_at = 0, memory_at = 1;
  for (const std::string& line : lines_of(text)) {
    ++number;
    if (trimmed(line).empty()) continue;
    std::vector<std::string> cells = split(line, ',');
    for (std::string& cell : cells) cell = trimmed(cell);
    const auto header = [&](const char* word) {
      return std::find_if(cells.begin(), cells.end(),
                          [&](const std::string& c) {
                            return c == word || c.starts_with(std::string(word) + " ");
                          }) -
             cells.begin();
    };
    if (const auto at = static_cast<size_t>(header("name")); gpus.empty() && at < cells.size()) {
      name_at = at;
      memory_at = static_cast<size_t>(header("memory.total"));
      continue;
    }
    if (name_at >= cells.size() || cells[name_at].empty())
      throw bad(name, number, "has no name of a GPU",
                "the output of nvidia-smi --query-gpu=name,memory.total --format=csv");
    Gpu gpu{cells[name_at], 0};
    if (memory_at < cells.size()) {
      const std::vector<std::string> words = words_of(cells[memory_at]);
      double mib = 0;
      if (words.empty() || !real(words[0], &mib) || mib <= 0 || mib > 1e9)
        throw bad(name, number,
                  fmt::format("has '{}' for memory.total", cells[memory_at].substr(0, 30)),
                  "a number of MiB");
      gpu.memory = mib * kMiB;
    }
    gpus.push_back(std::move(gpu));
    if (gpus.size() > kMostGpus) throw bad(name, number, "too many GPUs", "one machine");
  }
  if (gpus.empty())
    throw user_error(
        "cluster",
        "{}: has no GPUs; give the output of nvidia-smi --query-gpu=name,memory.total --format=csv",
        name);
  return gpus;
}

std::vector<Machine> parse_hostfile(const std::string& text, const std::string& name) {
  std::vector<Machine> machines;
  std::set<std::string> seen;
  size_t number = 0;
  for (const std::string& whole_line : lines_of(text)) {
    ++number;
    const std::string line = whole_line.substr(0, whole_line.find('#'));
    const std::vector<std::string> words = words_of(line);
    if (words.empty()) continue;
    Machine m;
    m.host = words[0];
    int64_t slots = 0;
    if (const size_t colon = m.host.rfind(':');
        colon != std::string::npos && whole(m.host.substr(colon + 1), &slots, /*negative=*/true)) {
      if (slots < 1)
        throw bad(name, number, fmt::format("has {} slots", slots), "HOST:N, N at least 1");
      m.host.resize(colon);
    }
    for (const auto& [key, value] : fields_of(line)) {
      if (key == "slots" && (!whole(value, &slots) || slots < 1))
        throw bad(name, number, fmt::format("has slots={}", value.substr(0, 20)), "slots=N");
      if (key == "type") m.type = value;
    }
    if (slots > kMostSlots)
      throw bad(name, number, fmt::format("has {} slots", slots),
                fmt::format("at most {}", kMostSlots));
    m.gpus = static_cast<int>(slots);
    if (m.host.empty() || m.host.size() > 200 || m.host.find('=') != std::string::npos)
      throw bad(name, number, "does not begin with a host", "HOST slots=8");
    if (!seen.insert(m.host).second)
      throw bad(name, number, fmt::format("names {} again", m.host.substr(0, 60)),
                "each host once");
    machines.push_back(std::move(m));
    if (machines.size() > static_cast<size_t>(kMaxDevices))
      throw bad(name, number, "too many hosts", "fewer");
  }
  if (machines.empty())
    throw user_error("cluster", "{}: names no host; give lines HOST slots=8", name);
  return machines;
}

std::vector<Machine> parse_nodes(const std::string& text, const std::string& name) {
  std::vector<Machine> machines;
  size_t number = 0, first = 0;  // machine of the last NodeName
  for (const std::string& line : lines_of(text)) {
    ++number;
    for (const auto& [key, value] : fields_of(line)) {
      if (key == "NodeName") {
        first = machines.size();
        for (const std::string& host :
             hostlist(value, fmt::format("{}: line {}: NodeName", name, number)))
          machines.push_back({host, 0, ""});
        if (machines.size() > static_cast<size_t>(kMaxDevices))
          throw bad(name, number, "too many nodes", "fewer");
      }
    }
    const auto fields = fields_of(line);
    const auto gres = fields.find("Gres");
    if (gres == fields.end() || machines.empty()) continue;
    // "gpu:a100:8(S:0-1)", "gpu:8", "(null)", several with commas.
    for (std::string entry : split(gres->second, ',')) {
      entry = entry.substr(0, entry.find('('));
      const std::vector<std::string> parts = split(entry, ':');
      if (parts[0] != "gpu") continue;
      int64_t count = 1;
      Machine& m = machines.back();
      if (parts.size() > 1 && !whole(parts.back(), &count)) {
        m.type = parts[1];
        count = 1;
      } else if (parts.size() > 2) {
        m.type = parts[1];
      }
      if (count < 1 || count > kMostSlots || m.gpus + count > kMostSlots)
        throw bad(name, number, fmt::format("has Gres={}", gres->second.substr(0, 40)),
                  "gpu:TYPE:N");
      m.gpus += static_cast<int>(count);
    }
    // A NodeName of several machines has one Gres for all.
    for (size_t i = first; i + 1 < machines.size(); ++i)
      machines[i].gpus = machines.back().gpus, machines[i].type = machines.back().type;
  }
  std::erase_if(machines, [](const Machine& m) { return m.gpus == 0; });
  if (machines.empty())
    throw user_error(
        "cluster",
        "{}: names no node with GPUs (Gres=gpu:TYPE:N); give the output of scontrol show node",
        name);
  return machines;
}

namespace {

// Switches by name, and who is below whom; the roots are those that nobody names.
class Tree {
 public:
  explicit Tree(const std::string& name) : name_(name) {}

  void add(const std::string& line_name, Switch s, std::vector<std::string> below) {
    if (!switches_.emplace(line_name, std::move(s)).second)
      throw user_error("cluster", "{}: names the switch {} again; give each once", name_,
                       line_name.substr(0, 60));
    order_.push_back(line_name);
    below_[line_name] = std::move(below);
  }

  Switch run() {
    std::set<std::string> named;
    for (const auto& [s, below] : below_)
      for (const std::string& other : below) {
        if (!switches_.count(other))
          throw user_error("cluster", "{}: switch {} joins {}, which is no switch; describe it",
                           name_, s.substr(0, 60), other.substr(0, 60));
        if (!named.insert(other).second)
          throw user_error("cluster", "{}: switch {} is below two others; give a tree", name_,
                           other.substr(0, 60));
      }
    Switch root;
    for (const std::string& s : order_)
      if (!named.count(s)) root.switches.push_back(whole_of(s, 0));
    if (root.switches.empty())
      throw user_error("cluster", "{}: has no switch at the top; give a tree of switches", name_);
    return root.switches.size() == 1 ? root.switches[0] : root;
  }

 private:
  Switch whole_of(const std::string& s, int depth) {
    if (depth > kDeepest)
      throw user_error("cluster", "{}: switches are nested deeper than {}; use fewer levels", name_,
                       kDeepest);
    Switch out = switches_[s];
    for (const std::string& below : below_[s]) out.switches.push_back(whole_of(below, depth + 1));
    return out;
  }

  const std::string& name_;
  std::map<std::string, Switch> switches_;
  std::map<std::string, std::vector<std::string>> below_;
  std::vector<std::string> order_;
};

Switch from_yaml(const std::string& text, const std::string& name) {
  const auto at = [&](const Yaml& map, const char* key) {
    return map && map.is_map() && map[key] && map[key].is_scalar() ? map[key].scalar()
                                                                   : std::string();
  };
  Tree tree(name);
  bool any = false;
  int64_t anonymous = 0;
  const Yaml root = Yaml::parse(text, "cluster", name);
  const std::vector<Yaml> list = root.is_list() ? root.items() : std::vector<Yaml>{root};
  for (const Yaml& topology : list) {
    if (!topology.is_map()) continue;
    const bool blocks = static_cast<bool>(topology["block"]);
    const Yaml inside = topology[blocks ? "block" : "tree"];
    if (!inside || !inside.is_map()) continue;
    const Yaml entries = inside[blocks ? "blocks" : "switches"];
    if (!entries || !entries.is_list()) continue;
    for (const Yaml& entry : entries.items()) {
      std::string label = at(entry, blocks ? "block" : "switch");
      if (label.empty()) label = fmt::format("switch{}", anonymous++);
      Switch s{label, {}, {}, false};
      const std::string where = fmt::format("{}: {}", name, label.substr(0, 60));
      s.machines = hostlist(at(entry, "nodes"), where);
      tree.add(label, std::move(s), hostlist(at(entry, "children"), where));
      any = true;
    }
    break;  // the first that has a tree or blocks
  }
  if (!any)
    throw user_error("cluster",
                     "{}: has no tree of switches and no blocks; give Slurm's topology.yaml", name);
  return tree.run();
}

}  // namespace

Switch parse_topology(const std::string& text, const std::string& name) {
  if (text.size() > size_t{1} << 24) throw user_error("cluster", "{}: larger than 16 MiB", name);
  if (text.find("SwitchName=") == std::string::npos &&
      text.find("BlockName=") == std::string::npos && text.find("RingName=") == std::string::npos) {
    int depth = 0;
    for (const char c : text) {
      depth += (c == '[' || c == '{') - (c == ']' || c == '}');
      if (depth > 64) throw user_error("cluster", "{}: nested deeper than 64 brackets", name);
    }
    for (const std::string& line : lines_of(text))
      if (line.find_first_not_of(" -?") > 512 && line.size() > 512)
        throw user_error("cluster", "{}: indented deeper than 512 columns", name);
    return from_yaml(text, name);
  }
  Tree tree(name);
  size_t number = 0;
  std::string joined;
  for (const std::string& part : lines_of(text)) {
    ++number;
    std::string line = part.substr(0, part.find('#'));
    if (const std::string t = trimmed(line); !t.empty() && t.back() == '\\') {
      joined += t.substr(0, t.size() - 1) + " ";
      continue;
    }
    line = joined + line;
    joined.clear();
    const auto fields = fields_of(line);
    for (const char* kind : {"SwitchName", "BlockName", "RingName"}) {
      const auto label = fields.find(kind);
      if (label == fields.end()) continue;
      Switch s{label->second, {}, {}, fields.count("LinkSpeed") > 0};
      const std::string where = fmt::format("{}: line {}: ", name, number);
      std::vector<std::string> below;
      if (const auto it = fields.find("Nodes"); it != fields.end())
        s.machines = hostlist(it->second, where + "Nodes");
      if (const auto it = fields.find("Switches"); it != fields.end())
        below = hostlist(it->second, where + "Switches");
      if (s.machines.empty() && below.empty())
        throw bad(name, number,
                  fmt::format("{} {} joins nothing", kind, label->second.substr(0, 60)),
                  "Nodes= or Switches=");
      tree.add(label->second, std::move(s), std::move(below));
    }
  }
  return tree.run();
}

std::string catalogue_type(const std::string& text, Bytes memory) {
  const std::string name = lower(text);
  const double gib = memory / kMiB / 1024;
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  const auto larger = [&](const char* small, const char* large, const char* mark, double above) {
    return has(mark) || (memory > 0 && gib > above) ? std::string(large) : std::string(small);
  };
  if (has("gh200")) return "GH200";
  if (has("h100")) return "H100-80GB";
  if (has("a100")) return larger("A100-40GB", "A100-80GB", "80g", 50);
  if (has("v100")) return larger("V100-16GB", "V100-32GB", "32g", 20);
  if (has("p100")) return "P100-16GB";
  if (has("1080 ti") || has("1080ti")) return "1080Ti";
  for (const std::string& word : words_of(name))
    if (word == "t4" || word == "tesla-t4") return "T4";
  return "";
}

}  // namespace motley::readers

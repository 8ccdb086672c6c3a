#include "readers/autoparallel.h"

#include <cmath>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/printable.h"
#include "readers/text.h"

namespace motley::readers {

namespace {

constexpr size_t kMostNodes = 1'000'000, kMostDims = 8;
constexpr int64_t kLargest = int64_t{1} << 40;

UserError bad(const std::string& where, const std::string& what, const std::string& fix) {
  return user_error("import", "{} {}; give {}", where, what, fix);
}

// What a message shows of a value.
std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 40) text = text.substr(0, 40) + "...";
  return text;
}

const Json& field(const Json& object, const char* name, const std::string& where) {
  const auto it = object.find(name);
  if (it == object.end())
    throw bad(where + "." + name, "is missing", "a file as autoparallel's get_json() returns it");
  return *it;
}

std::string text_of(const Json& object, const char* name, const std::string& where) {
  const Json& value = field(object, name, where);
  if (!value.is_string()) throw bad(where + "." + name, "is " + shown(value), "a string");
  return value.get<std::string>();
}

int64_t whole_of(const Json& value, int64_t least, int64_t most, const std::string& where) {
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= uint64_t(kLargest)
                                               : value.is_number_integer();
  const int64_t number = fits ? value.get<int64_t>() : least - 1;
  if (number < least || number > most)
    throw bad(where, "is " + shown(value),
              fmt::format("a whole number from {} to {}", least, most));
  return number;
}

std::vector<int> mesh_of(const Json& json, const std::string& name) {
  const std::string where = name + ": mesh";
  const Json& mesh = field(json, "mesh", name);
  if (!mesh.is_object()) throw bad(where, "is " + shown(mesh), "an object with a shape");
  const Json& shape = field(mesh, "shape", where);
  if (!shape.is_array() || shape.empty() || shape.size() > kMostDims)
    throw bad(where + ".shape", "is " + shown(shape),
              fmt::format("the sizes of 1 to {} dimensions", kMostDims));
  std::vector<int> sizes;
  int64_t devices = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t size = whole_of(shape[d], 1, kMaxDevices, fmt::format("{}.shape[{}]", where, d));
    sizes.push_back(static_cast<int>(size));
    devices *= size;
    if (devices > kMaxDevices)
      throw bad(where + ".shape", "is " + shown(shape),
                fmt::format("{} devices at most", kMaxDevices));
  }
  return sizes;
}

// "S(0)RP(sum)", letter by letter.
class PlacementText {
 public:
  PlacementText(const std::string& text, size_t dims, const std::string& where)
      : text_(text), dims_(dims), where_(where) {}

  void read(size_t mesh, AutoparallelNode* node) {
    while (at_ < text_.size() && node->placement.size() <= mesh) read_letter(node);
    if (node->placement.size() != mesh)
      throw wrong(fmt::format("the mesh has {} dimensions", mesh), "one letter for each");
    for (size_t m = 0; m < mesh; ++m)
      for (size_t later = m + 1; later < mesh; ++later)
        if (node->placement[m] == node->placement[later] && order_[later] < order_[m])
          node->strided[m] = true;
  }

 private:
  UserError wrong(const std::string& why, const std::string& fix) const {
    return bad(where_ + ".placement", fmt::format("is '{}': {}", text_.substr(0, 60), why), fix);
  }
  bool next(const std::string& word) {
    const bool is = text_.compare(at_, word.size(), word) == 0;
    if (is) at_ += word.size();
    return is;
  }
  int64_t number(char end, int64_t least, int64_t most, const std::string& why,
                 const std::string& fix) {
    const size_t close = text_.find(end, at_);
    int64_t value = 0;
    if (close == std::string::npos || !whole(text_.substr(at_, close - at_), &value) ||
        value < least || value > most)
      throw wrong(why, fix);
    at_ = close + 1;
    return value;
  }
  Placement cut(char end) {
    const auto most = static_cast<int64_t>(std::min<size_t>(dims_, 250)) - 1;
    return Placement::shard(
        static_cast<int>(number(end, 0, most, fmt::format("the tensor has {} dimensions", dims_),
                                "one of them, from 0 on")));
  }

  void read_letter(AutoparallelNode* node) {
    bool strided = false;
    int64_t order = static_cast<int64_t>(node->placement.size());
    if (next("R")) {
      node->placement.push_back(Placement::replicated());
    } else if (next("P(sum)")) {
      node->placement.push_back(Placement::partial());
    } else if (next("P(")) {
      throw wrong("motley's partial results are sums", "P(sum)");
    } else if (next("P")) {
      node->placement.push_back(Placement::partial());
    } else if (next("_S(")) {
      node->placement.push_back(cut(','));
      next(" ");
      strided = number(')', 1, kMaxDevices, "a strided shard is of pieces", "_S(d, pieces)") > 1;
    } else if (next("S(")) {
      node->placement.push_back(cut(')'));
      if (next("["))
        order = number(']', 0, int64_t{kMostDims} - 1, "the order of cuts is a number",
                       "S(d)[0] for what is cut first");
    } else {
      throw wrong("motley reads R, S(d), _S(d, pieces) and P(sum)",
                  "a plan without other placements");
    }
    node->strided.push_back(strided);
    order_.push_back(order);
  }

  const std::string& text_;
  const size_t dims_;
  const std::string& where_;
  size_t at_ = 0;
  std::vector<int64_t> order_;  // [dimension of the mesh] of cuts of one dimension of the tensor
};

// Of "(S(0)R, None)" the first; empty: "None".
std::string first_of(const std::string& text) {
  std::string first = text;
  if (text.starts_with("(")) {
    int depth = 0;
    size_t end = 1;
    for (; end < text.size(); ++end) {
      depth += text[end] == '(' ? 1 : text[end] == ')' ? -1 : 0;
      if (depth < 0 || (depth == 0 && text[end] == ',')) break;
    }
    first = trimmed(text.substr(1, end - 1));
  }
  return first == "None" ? "" : first;
}

// "aten.addmm.default" -> "aten::addmm", "aten.add.Tensor" -> "aten::add.Tensor"
std::string op_of(std::string target) {
  const size_t space = target.find('.');
  if (space == std::string::npos) return target;
  target.replace(space, 1, "::");
  if (target.ends_with(".default")) target.resize(target.size() - 8);
  return target;
}

Shape shape_of(const Json& json, const std::string& where) {
  const Json& shape = field(json, "shape", where);
  if (!shape.is_array() || shape.size() > 64)
    throw bad(where + ".shape", "is " + shown(shape), "the sizes of a tensor");
  Shape sizes;
  for (const Json& size : shape) sizes.push_back(whole_of(size, 0, kLargest, where + ".shape"));
  return sizes;
}

AutoparallelNode node_of(const Json& json, size_t number, size_t mesh, const std::string& name) {
  AutoparallelNode node;
  node.where = fmt::format("{}: nodes[{}]", name, number);
  if (!json.is_object()) throw bad(node.where, "is " + shown(json), "an object");
  const std::string title = text_of(json, "name", node.where);
  node.where += fmt::format(" ({})", printable(title.substr(0, 40), /*line=*/true));
  node.tangent = title.starts_with("tangents");
  node.op = op_of(text_of(json, "op", node.where));
  if (node.op == "output") return node;
  const std::string phase = text_of(json, "phase", node.where);
  if (phase != "forward" && phase != "backward")
    throw bad(node.where + ".phase", "is '" + phase.substr(0, 40) + "'", "forward or backward");
  node.backward = phase == "backward";
  const std::string placement = first_of(text_of(json, "placement", node.where));
  if (placement.empty()) return node;
  // Of what makes several tensors, or none that has a shape, it may be missing.
  if (json.contains("shape") || node.op == "placeholder") {
    node.shape = shape_of(json, node.where);
    PlacementText(placement, node.shape.size(), node.where).read(mesh, &node);
  }
  return node;
}

Seconds cost_of(const Json& summary, const char* name, const std::string& where) {
  const Json& value = field(summary, name, where);
  const double micros = value.is_number() ? value.get<double>() : -1;
  if (!(micros >= 0) || !std::isfinite(micros))
    throw bad(where + "." + name, "is " + shown(value), "microseconds, 0 or more");
  return micros * 1e-6;
}

}  // namespace

bool is_autoparallel(const Json& json) {
  return json.is_object() && json.contains("mesh") && json.contains("nodes") &&
         json.contains("summary");
}

AutoparallelPlan read_autoparallel(const Json& json, const std::string& name) {
  if (!json.is_object()) throw bad(name + ":", "is " + shown(json), "a plan of autoparallel");
  AutoparallelPlan plan;
  plan.mesh = mesh_of(json, name);
  const Json& nodes = field(json, "nodes", name);
  if (!nodes.is_array() || nodes.empty() || nodes.size() > kMostNodes)
    throw bad(name + ": nodes",
              nodes.is_array() ? fmt::format("are {}", nodes.size()) : "is " + shown(nodes),
              fmt::format("an array of 1 to {}", kMostNodes));
  for (size_t n = 0; n < nodes.size(); ++n)
    plan.nodes.push_back(node_of(nodes[n], n, plan.mesh.size(), name));
  const Json& summary = field(json, "summary", name);
  if (!summary.is_object())
    throw bad(name + ": summary", "is " + shown(summary), "an object with comm and compute");
  plan.compute = cost_of(summary, "compute", name + ": summary");
  plan.comm = cost_of(summary, "comm", name + ": summary");
  return plan;
}

}  // namespace motley::readers

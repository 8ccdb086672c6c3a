// The text form of graphs and placements.
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/error.h"
#include "graph/graph.h"
#include "graph/placement.h"

namespace motley {

namespace {

void append_quoted(const std::string& text, std::string* out) {
  *out += '"';
  for (char c : text) {
    if (c == '"' || c == '\\') *out += '\\';
    if (c == '\n') {
      *out += "\\n";
      continue;
    }
    *out += c;
  }
  *out += '"';
}

std::string quoted(const std::string& text) {
  std::string out;
  append_quoted(text, &out);
  return out;
}

void append_integer(int64_t i, std::string* out) {
  char digits[24];
  out->append(digits, std::to_chars(digits, digits + sizeof digits, i).ptr);
}

// Shortest text that parses back to the same double, always recognisable as a real number.
void append_real(double x, std::string* out) {
  if (std::isnan(x)) {
    *out += "nan.";
  } else if (std::isinf(x)) {
    *out += x > 0 ? "inf." : "-inf.";
  } else {
    const size_t begin = out->size();
    fmt::format_to(std::back_inserter(*out), "{}", x);
    if (out->find_first_of(".e", begin) == std::string::npos) *out += ".0";
  }
}

void append_value(ValueId v, std::string* out) {
  if (!v.valid()) {
    *out += "none";
    return;
  }
  *out += '%';
  append_integer(v.index, out);
}

template <typename T, typename F>
void append_list(const std::vector<T>& items, F append, std::string* out) {
  *out += '[';
  for (size_t i = 0; i < items.size(); ++i) {
    if (i) *out += ", ";
    append(items[i], out);
  }
  *out += ']';
}

void append_arg(const Arg& arg, std::string* out) {
  struct Visitor {
    std::string* out;
    void operator()(std::monostate) const { *out += "none"; }
    void operator()(ValueId v) const { append_value(v, out); }
    void operator()(const std::vector<ValueId>& l) const {
      if (l.empty())
        *out += "[%]";
      else
        append_list(l, append_value, out);
    }
    void operator()(int64_t i) const { append_integer(i, out); }
    void operator()(double d) const { append_real(d, out); }
    void operator()(bool b) const { *out += b ? "true" : "false"; }
    void operator()(const std::string& s) const { append_quoted(s, out); }
    void operator()(const std::vector<int64_t>& l) const { append_list(l, append_integer, out); }
    void operator()(const std::vector<double>& l) const {
      if (l.empty())
        *out += "[.]";
      else
        append_list(l, append_real, out);
    }
    void operator()(DType t) const { *out += to_string(t); }
  };
  std::visit(Visitor{out}, arg);
}

void append_spec(const TensorSpec& spec, std::string* out) {
  *out += to_string(spec.dtype);
  *out += '[';
  for (size_t d = 0; d < spec.shape.size(); ++d) {
    if (d) *out += ',';
    append_integer(spec.shape[d], out);
  }
  *out += ']';
}

// A cursor over one line. Every failure names the file, the line and the column.
class Line {
 public:
  Line(std::string_view text, const std::string& name, int number)
      : text_(text), name_(name), number_(number) {}

  UserError error(const std::string& why) const {
    return user_error("graph", "{}: line {}, column {}: {}", name_, number_, at_ + 1, why);
  }
  void space() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool done() {
    space();
    return at_ == text_.size();
  }
  char peek() {
    space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(std::string_view token) {
    space();
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) throw error(fmt::format("expected '{}'", token));
  }
  // Characters up to one of `stop`.
  std::string_view word(std::string_view stop) {
    space();
    size_t end = text_.find_first_of(stop, at_);
    if (end == std::string_view::npos) end = text_.size();
    std::string_view word = text_.substr(at_, end - at_);
    if (word.empty()) throw error("something is missing here");
    at_ = end;
    return word;
  }
  std::string_view rest() {
    space();
    return text_.substr(at_);
  }
  template <typename T>
  T number(std::string_view word) const {
    T value{};
    auto [end, code] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (code != std::errc() || end != word.data() + word.size())
      throw error(fmt::format("'{}' is not a number that fits", word));
    return value;
  }
  std::string string() {
    expect("\"");
    std::string out;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) {
        ++at_;
        out += text_[at_] == 'n' ? '\n' : text_[at_];
      } else {
        out += text_[at_];
      }
    }
    if (at_ == text_.size()) throw error("the text has no closing quote");
    ++at_;
    return out;
  }
  ValueId value() {
    if (accept("none")) return ValueId();
    expect("%");
    return ValueId(number<int32_t>(word(" ,])=:")));
  }
  double real(std::string_view word) const {
    if (word == "nan.") return std::numeric_limits<double>::quiet_NaN();
    if (word == "inf.") return std::numeric_limits<double>::infinity();
    if (word == "-inf.") return -std::numeric_limits<double>::infinity();
    return number<double>(word);
  }
  static bool is_real(std::string_view word) {
    return word.find_first_of(".e") != std::string_view::npos;
  }

  Arg arg() {
    char c = peek();
    if (c == '"') return string();
    if (c == '%') return value();
    if (c == '[') return list_arg();
    std::string_view w = word(" ,)]");
    if (w == "none") return std::monostate{};
    if (w == "true") return true;
    if (w == "false") return false;
    DType dtype;
    if (parse_dtype(std::string(w), &dtype)) return dtype;
    if (is_real(w)) return real(w);
    return number<int64_t>(w);
  }

  TensorSpec tensor() {
    TensorSpec spec;
    std::string type(word("["));
    if (!parse_dtype(type, &spec.dtype)) throw error("unknown dtype '" + type + "'");
    expect("[");
    double elements = 1;
    while (!accept("]")) {
      if (!spec.shape.empty()) expect(",");
      spec.shape.push_back(number<int64_t>(word(",]")));
      if (spec.shape.back() < 0 || spec.shape.size() > 16) throw error("bad shape");
      elements *= static_cast<double>(spec.shape.back());
    }
    if (elements > 1e15) throw error("a tensor of more than 1e15 elements");
    return spec;
  }

 private:
  Arg list_arg() {
    expect("[");
    if (accept("%]")) return std::vector<ValueId>{};
    if (accept(".]")) return std::vector<double>{};
    if (accept("]")) return std::vector<int64_t>{};
    std::vector<ValueId> values;
    std::vector<int64_t> integers;
    std::vector<double> reals;
    do {
      if (peek() == '%' || peek() == 'n') {
        size_t before = at_;
        if (peek() == 'n' && !accept("none")) {
          reals.push_back(real(word(" ,]")));
          continue;
        }
        at_ = before;
        values.push_back(value());
        continue;
      }
      std::string_view w = word(" ,]");
      if (is_real(w))
        reals.push_back(real(w));
      else
        integers.push_back(number<int64_t>(w));
    } while (accept(","));
    expect("]");
    if ((!values.empty()) + (!integers.empty()) + (!reals.empty()) != 1)
      throw error("a list mixes tensors, integers and real numbers");
    if (!values.empty()) return values;
    if (!integers.empty()) return integers;
    return reals;
  }

  std::string_view text_;
  const std::string& name_;
  int number_;
  size_t at_ = 0;
};

}  // namespace

std::string to_string(const TensorSpec& spec) {
  std::string text;
  append_spec(spec, &text);
  return text;
}

std::string to_text(const Graph& graph) {
  std::string out = "model " + graph.model + "\n";
  for (const Node& node : graph.nodes) {
    const auto separate = [&](size_t i) {
      if (i) out += ", ";
    };
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      separate(o);
      append_value(node.outputs[o], &out);
    }
    out += " = ";
    out += node.op;
    out += '(';
    for (size_t a = 0; a < node.args.size(); ++a) {
      separate(a);
      append_arg(node.args[a], &out);
    }
    out += ") : ";
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      separate(o);
      if (const ValueId v = node.outputs[o]; v.valid())
        append_spec(graph.spec(v), &out);
      else
        out += "none";
    }
    out += node.phase == Phase::backward ? " backward\n" : "\n";
  }
  if (graph.loss.valid()) out += fmt::format("loss %{}\n", graph.loss.index);
  for (const Parameter& p : graph.parameters) {
    if (p.gradient.valid())
      out += fmt::format("gradient {} %{}{}\n", quoted(p.name), p.gradient.index,
                         p.custom ? " custom" : "");
    if (p.frozen) out += fmt::format("frozen {}\n", quoted(p.name));
  }
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) out += fmt::format("update {} %{}\n", quoted(b.name), b.update.index);
  for (ValueId v : graph.outputs) out += fmt::format("output %{}\n", v.index);
  return out;
}

Graph parse_graph(const std::string& text, const std::string& name) {
  Graph graph;
  int number = 0;
  size_t start = 0;
  auto declared = [&](Line & line, auto& list, const std::string& what) -> auto& {
    std::string role = line.string();
    for (auto& item : list)
      if (item.name == role) return item;
    throw line.error(fmt::format("there is no {} '{}'", what, role));
  };
  auto existing = [&](Line& line) {
    ValueId v = line.value();
    if (!v.valid() || v.index >= static_cast<int64_t>(graph.values.size()))
      throw line.error("this value is not made above");
    return v;
  };
  while (start < text.size()) {
    size_t end = text.find('\n', start);
    if (end == std::string::npos) end = text.size();
    Line line(std::string_view(text).substr(start, end - start), name, ++number);
    start = end + 1;
    if (line.done()) continue;
    if (line.accept("model ")) {
      graph.model = std::string(line.rest());
    } else if (line.accept("loss ")) {
      graph.loss = existing(line);
    } else if (line.accept("gradient ")) {
      auto& p = declared(line, graph.parameters, "parameter");
      p.gradient = existing(line);
      p.custom = line.accept("custom");
    } else if (line.accept("frozen ")) {
      declared(line, graph.parameters, "parameter").frozen = true;
    } else if (line.accept("update ")) {
      auto& b = declared(line, graph.buffers, "buffer");
      b.update = existing(line);
    } else if (line.accept("output ")) {
      graph.outputs.push_back(existing(line));
    } else {
      std::vector<ValueId> outputs;
      do outputs.push_back(line.value());
      while (line.accept(","));
      line.expect("=");
      const OpName op(line.word("("));
      if (op.str().starts_with("motley::") && !op.is_source() && !op.def())
        throw line.error("unknown source " + op.str());
      std::vector<Arg> args;
      line.expect("(");
      while (!line.accept(")")) {
        if (!args.empty()) line.expect(",");
        args.push_back(line.arg());
      }
      line.expect(":");
      std::vector<TensorSpec> specs;
      for (size_t o = 0; o < outputs.size(); ++o) {
        if (o) line.expect(",");
        specs.push_back(line.accept("none") ? TensorSpec{DType::f32, {-1}} : line.tensor());
        if ((specs.back().shape == Shape{-1}) == outputs[o].valid())
          throw line.error(fmt::format("output {} and its type do not agree", o));
      }
      Phase phase = line.accept("backward") ? Phase::backward : Phase::forward;
      if (!line.done()) throw line.error("something is left over at the end of the line");
      int64_t next = static_cast<int64_t>(graph.values.size());
      for (ValueId v : outputs)
        if (v.valid() && v.index != next++)
          throw line.error(fmt::format("outputs are numbered in order; expected %{}", next - 1));
      const auto made = static_cast<int64_t>(graph.values.size());
      const NodeId id = graph.add(op, std::move(args), specs, phase);
      for (ValueId v : graph.inputs_of(graph.node(id)))
        if (v.index >= made)
          throw line.error(fmt::format("%{} is read before it is made", v.index));
      if (is_source(graph.node(id))) {
        const Node& node = graph.node(id);
        if (node.args.size() != 1 || node.outputs.size() != 1 || !node.outputs[0].valid())
          throw line.error(op.str() + " takes one argument and makes one tensor");
        ValueId v = node.outputs[0];
        auto role = std::get_if<std::string>(&node.args[0]);
        if (op == "motley::constant") {
          auto data = std::get_if<std::vector<double>>(&node.args[0]);
          if (!data || static_cast<int64_t>(data->size()) != graph.spec(v).numel())
            throw line.error("motley::constant takes a list of as many numbers as it has elements");
        } else if (!role) {
          throw line.error(op.str() + " takes a name in quotes");
        } else if (op == "motley::parameter") {
          graph.parameters.push_back({*role, v, {}});
        } else if (op == "motley::buffer") {
          graph.buffers.push_back({*role, v, {}});
        } else {
          graph.inputs.push_back({*role, v});
        }
      }
      continue;
    }
    if (!line.done() && graph.model != line.rest())
      throw line.error("something is left over at the end of the line");
  }
  if (auto problems = verify(graph); !problems.empty())
    throw user_error("graph", "{}: {}", name, problems.front());
  return graph;
}

std::string to_string(Placement p) {
  if (p.is_replicated()) return "R";
  if (p.is_partial()) return "P";
  std::string text = "S(";
  append_integer(p.dim, &text);
  if (p.factor != 0) append_integer(p.factor, &(text += '.'));
  return text += ')';
}

bool parse_placement(const std::string& text, Placement* placement) {
  if (text == "R") return *placement = Placement::replicated(), true;
  if (text == "P") return *placement = Placement::partial(), true;
  int dim = 0, factor = 0, end = 0;
  const char* t = text.c_str();
  bool ok = std::sscanf(t, "S(%2d)%n", &dim, &end) == 1 && end == static_cast<int>(text.size());
  if (!ok) {
    end = 0;
    ok = std::sscanf(t, "S(%2d.%2d)%n", &dim, &factor, &end) == 2 &&
         end == static_cast<int>(text.size());
  }
  if (!ok || dim < 0 || factor < 0) return false;
  *placement = Placement::shard(dim, factor);
  return true;
}

}  // namespace motley

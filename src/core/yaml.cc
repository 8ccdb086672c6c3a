#include "core/yaml.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/yaml_library.h"

namespace motley {

namespace {

// yaml-cpp recurses: how deep a text can be is bounded before it sees it.
void check_depth(const std::string& yaml, const char* module, const std::string& name) {
  if (yaml.size() > (size_t{1} << 24)) throw user_error(module, "{}: larger than 16 MiB", name);
  int depth = 0, deepest = 0;
  for (char c : yaml) {
    if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    if (c == ']' || c == '}') depth = std::max(0, depth - 1);
  }
  if (deepest > 64) throw user_error(module, "{}: nested deeper than 64 brackets", name);
  size_t column = 0, indent = 0;
  bool leading = true;
  for (char c : yaml) {
    if (c == '\n')
      column = 0, leading = true;
    else if (leading && (c == ' ' || c == '-' || c == '?'))
      indent = std::max(indent, ++column);
    else
      leading = false;
  }
  if (indent > 512) throw user_error(module, "{}: indented deeper than 512 columns", name);
}

}  // namespace

class Yaml::Builder {
 public:
  Yaml read(const std::string& text, const char* module, const std::string& name) {
    const YamlListener listener = {
        this,
        [](void* to) { of(to).begin(Kind::map); },
        [](void* to) { of(to).begin(Kind::list); },
        [](void* to) { of(to).end(); },
        [](void* to, const char* key, size_t size) { of(to).key_.emplace_back(key, size); },
        [](void* to, const char* scalar, size_t size) {
          of(to).add({Kind::scalar, std::string(scalar, size), {}, {}});
        },
        [](void* to) { of(to).add({}); }};
    std::array<char, 400> why{};
    if (yaml_read(text.data(), text.size(), &listener, why.data(), why.size()) != 0)
      throw user_error(module, "{}: {}", name, why.data());
    return root_;
  }

 private:
  static Builder& of(void* self) { return *static_cast<Builder*>(self); }

  void begin(Kind kind) {
    open_.emplace_back();
    open_.back().kind = kind;
  }
  void end() {
    Value done = std::move(open_.back());
    open_.pop_back();
    add(std::move(done));
  }
  void add(Value value) {
    Yaml node;
    node.what_ = std::make_shared<const Value>(std::move(value));
    if (open_.empty()) {
      root_ = node;
    } else if (open_.back().kind == Kind::list) {
      open_.back().items.push_back(node);
    } else {
      open_.back().entries.emplace_back(std::move(key_.back()), node);
      key_.pop_back();
    }
  }

  std::vector<Value> open_;
  std::vector<std::string> key_;  // one for each map that waits for a value
  Yaml root_;
};

Yaml Yaml::parse(const std::string& text, const char* module, const std::string& name) {
  check_depth(text, module, name);
  return Builder().read(text, module, name);
}

const std::string& Yaml::scalar() const {
  static const std::string none;
  return what_ ? what_->scalar : none;
}

std::optional<bool> Yaml::boolean() const {
  std::string word = scalar();
  for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const char* yes : {"true", "yes", "on", "y"})
    if (word == yes) return true;
  for (const char* no : {"false", "no", "off", "n"})
    if (word == no) return false;
  return std::nullopt;
}

size_t Yaml::size() const { return what_ ? what_->items.size() + what_->entries.size() : 0; }

Yaml Yaml::operator[](const std::string& key) const {
  for (const auto& [name, value] : entries())
    if (name == key) return value;
  return {};
}

Yaml Yaml::operator[](size_t i) const { return i < items().size() ? items()[i] : Yaml(); }

const std::vector<std::pair<std::string, Yaml>>& Yaml::entries() const {
  static const std::vector<std::pair<std::string, Yaml>> none;
  return what_ ? what_->entries : none;
}

const std::vector<Yaml>& Yaml::items() const {
  static const std::vector<Yaml> none;
  return what_ ? what_->items : none;
}

YamlWriter::YamlWriter() : out_(yaml_emitter()) {}
YamlWriter::~YamlWriter() { yaml_free(out_); }

void YamlWriter::begin(bool map, Style style) {
  open_.push_back(map);
  yaml_begin(out_, map, style == flow);
}

void YamlWriter::end() {
  yaml_end(out_, open_.back());
  open_.pop_back();
}

void YamlWriter::key(const std::string& name) { yaml_key(out_, name.data(), name.size()); }

void YamlWriter::text(const std::string& scalar) {
  yaml_scalar(out_, scalar.data(), scalar.size());
}

std::string YamlWriter::written() const { return yaml_text(out_); }

}  // namespace motley

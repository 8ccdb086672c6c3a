#include "core/yaml_library.h"

#include <yaml-cpp/yaml.h>

#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>

namespace {

constexpr int kDeepest = 128;
constexpr int64_t kMostNodes = 1 << 20;  // aliases followed

// Tells a listener what a node holds.
class Walk {
 public:
  explicit Walk(const YamlListener& listener) : to_(listener) {}

  void node(const YAML::Node& node, int depth) {
    if (depth > kDeepest) throw std::runtime_error("nested too deep, or an alias of itself");
    if (++nodes_ > kMostNodes) throw std::runtime_error("more than a million values");
    if (node.IsMap())
      map(node, depth);
    else if (node.IsSequence())
      list(node, depth);
    else if (node.IsScalar())
      to_.scalar(to_.self, node.Scalar().data(), node.Scalar().size());
    else
      to_.null(to_.self);
  }

 private:
  void map(const YAML::Node& node, int depth) {
    std::set<std::string> seen;
    to_.begin_map(to_.self);
    for (const auto& entry : node) {
      const int line = entry.first.Mark().line + 1;
      if (!entry.first.IsScalar())
        throw std::runtime_error("line " + std::to_string(line) + ": a key is not a single value");
      const std::string& key = entry.first.Scalar();
      if (!seen.insert(key).second)
        throw std::runtime_error("line " + std::to_string(line) + ": '" + key.substr(0, 60) +
                                 "' is given twice");
      to_.key(to_.self, key.data(), key.size());
      this->node(entry.second, depth + 1);
    }
    to_.end(to_.self);
  }

  void list(const YAML::Node& node, int depth) {
    to_.begin_list(to_.self);
    for (const YAML::Node& item : node) this->node(item, depth + 1);
    to_.end(to_.self);
  }

  const YamlListener& to_;
  int64_t nodes_ = 0;
};

}  // namespace

struct YamlEmitter {
  YAML::Emitter out;
};

extern "C" {

int yaml_read(const char* text, size_t size, const YamlListener* listener, char* why, size_t room) {
  try {
    Walk(*listener).node(YAML::Load(std::string(text, size)), 0);
    return 0;
  } catch (const YAML::Exception& e) {
    std::snprintf(why, room, "line %d: not valid YAML: %s", e.mark.line + 1, e.msg.c_str());
  } catch (const std::exception& e) {
    std::snprintf(why, room, "%s", e.what());
  }
  return 1;
}

YamlEmitter* yaml_emitter(void) { return new YamlEmitter; }

void yaml_begin(YamlEmitter* to, bool map, bool flow) {
  if (flow) to->out << YAML::Flow;
  if (map)
    to->out << YAML::BeginMap;
  else
    to->out << YAML::BeginSeq;
}

void yaml_end(YamlEmitter* to, bool map) {
  if (map)
    to->out << YAML::EndMap;
  else
    to->out << YAML::EndSeq;
}

void yaml_key(YamlEmitter* to, const char* text, size_t size) {
  to->out << YAML::Key << std::string(text, size) << YAML::Value;
}

void yaml_scalar(YamlEmitter* to, const char* text, size_t size) {
  to->out << std::string(text, size);
}

const char* yaml_text(YamlEmitter* of) { return of->out.c_str(); }

void yaml_free(YamlEmitter* of) { delete of; }

}  // extern "C"

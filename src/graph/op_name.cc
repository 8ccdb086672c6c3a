#include "graph/op_name.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "core/rng.h"
#include "graph/op.h"

namespace motley {

namespace {

// Of two words of a name, as the first ones are mostly "aten::".
struct NameHash {
  size_t operator()(std::string_view name) const {
    constexpr size_t kPrefix = 6;
    uint64_t middle = 0, end = 0;
    if (name.size() >= sizeof end) std::memcpy(&end, name.end() - sizeof end, sizeof end);
    if (name.size() >= kPrefix) {
      name.remove_prefix(kPrefix);
      std::memcpy(&middle, name.data(), std::min(name.size(), sizeof middle));
    }
    return mix64(middle ^ mix64(end ^ name.size()));
  }
};

}  // namespace

const OpName::Known* OpName::find(std::string_view name) {
  struct Index {
    std::deque<Known> names;
    std::unordered_map<std::string_view, const Known*, NameHash> of;
    Index() {
      for (const OpDef* op : all_ops()) names.push_back({op->name, op, false});
      for (const char* source : {"parameter", "buffer", "input", "constant"})
        names.push_back({std::string("motley::") + source, nullptr, true});
      for (const Known& known : names) of[known.name] = &known;
    }
  };
  static const Index index;
  const auto it = index.of.find(name);
  return it == index.of.end() ? nullptr : it->second;
}

void OpName::set(std::string_view name) {
  known_ = find(name);
  if (known_ == nullptr && !name.empty()) other_ = std::make_shared<const std::string>(name);
}

const std::string& OpName::str() const {
  static const std::string empty;
  return known_ ? known_->name : other_ ? *other_ : empty;
}

}  // namespace motley

#include "graph/op.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "core/error.h"
#include "core/rng.h"
#include "graph/ops/builder.h"

namespace motley {

const std::vector<const OpDef*>& all_ops() {
  static const std::vector<const OpDef*> ops = [] {
    std::vector<const OpDef*> list;
    for (auto family : {ops::attention_ops, ops::batched_ops, ops::convolution_ops,
                        ops::elementwise_ops, ops::factory_ops, ops::index_ops, ops::loss_ops,
                        ops::matmul_ops, ops::normalization_ops, ops::reduction_ops, ops::view_ops})
      for (const OpDef& op : family()) list.push_back(&op);
    std::sort(list.begin(), list.end(),
              [](auto a, auto b) { return std::string_view(a->name) < b->name; });
    for (size_t i = 1; i < list.size(); ++i)
      MOTLEY_CHECK(std::string_view(list[i - 1]->name) != list[i]->name,
                   "{} is in the op table twice", list[i]->name);
    return list;
  }();
  return ops;
}

namespace {

// Of two words of a name, as the first ones are mostly "aten::": names are looked up for every node
// over and over.
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

const OpDef* find_op(const std::string& name) {
  static const std::unordered_map<std::string_view, const OpDef*, NameHash> index = [] {
    std::unordered_map<std::string_view, const OpDef*, NameHash> map;
    for (const OpDef* op : all_ops()) map[op->name] = op;
    return map;
  }();
  auto it = index.find(name);
  return it == index.end() ? nullptr : it->second;
}

bool is_scratch(const std::string& op, size_t o) {
  const OpDef* def = o > 0 ? find_op(op) : nullptr;
  return def != nullptr && def->scratch;
}

}  // namespace motley

#include "graph/op.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
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

bool is_scratch(const OpName& op, size_t o) {
  const OpDef* def = o > 0 ? op.def() : nullptr;
  return def != nullptr && def->scratch;
}

}  // namespace motley

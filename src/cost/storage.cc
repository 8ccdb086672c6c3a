#include "cost/storage.h"

#include <algorithm>

#include "graph/op.h"
#include "graph/segment.h"
#include "shard/held_index.h"

namespace motley {

std::vector<Held> storages(const Theory& theory, const Program& program,
                           const Fractions& fractions) {
  const Graph& graph = theory.graph();
  std::vector<Held> held = lifetimes(theory, program);
  std::vector<int> storage(held.size());
  HeldIndex index(graph.values.size(), held);
  for (int h = 0; h < static_cast<int>(held.size()); ++h) {
    storage[h] = h;
    const Step& step = program.steps[held[h].made];
    auto shares_with = [&](ValueId v, Placement p) {
      if (int other = index.find(v, p); other >= 0) storage[h] = storage[other];
    };
    if (step.is_compute()) {
      const Node& node = graph.node(step.node);
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      const bool passes = is_boundary(node) &&
                          moves_nothing(theory, step.node, theory.triples(step.node)[step.triple],
                                        fractions.shares());
      if ((op && op->alias) || passes)
        shares_with(graph.inputs_of(node)[0], theory.triples(step.node)[step.triple].in[0]);
    } else if (step.kind == CollectiveKind::slice) {
      shares_with(step.value, step.from);
    }
    index.add(h);
    held[storage[h]].last = std::max(held[storage[h]].last, held[h].last);
  }
  std::vector<Held> roots;
  for (int h = 0; h < static_cast<int>(held.size()); ++h)
    if (storage[h] == h) roots.push_back(held[h]);
  return roots;
}

}  // namespace motley

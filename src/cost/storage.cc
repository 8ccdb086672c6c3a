#include "cost/storage.h"

#include <algorithm>
#include <map>

#include "graph/op.h"
#include "graph/segment.h"
#include "shard/held_index.h"
#include "shard/joined.h"

namespace motley {

bool is_one_run(const Theory& theory, ValueId value, Placement cut) {
  const Shape& shape = theory.graph().spec(value).shape;
  const auto& factors = theory.factors(value)[cut.dim];
  int64_t before = 1;
  for (int d = 0; d < cut.dim; ++d) before *= shape[d];
  for (int f = 0; f < cut.factor; ++f) before *= factors[f];
  return before == 1;
}

namespace {

class Storages {
 public:
  Storages(const Theory& theory, const Program& program, const Fractions& fractions, bool phased,
           const std::vector<GradientMessage>& messages)
      : theory_(theory),
        graph_(theory.graph()),
        program_(program),
        fractions_(fractions),
        phased_(phased),
        phases_(phases_of(theory, program)),
        held_(lifetimes(theory, program)),
        index_(graph_.values.size(), held_),
        root_(held_.size()),
        sent_(program.steps.size(), -1) {
    for (const GradientMessage& m : messages)
      for (int s : m.steps) {
        sent_[s] = phased ? m.steps[0] : m.ready;
        if (m.steps.size() > 1) together_.push_back(s);
      }
    std::sort(together_.begin(), together_.end());
    for (const JoinedCall& call : joined_calls(theory, program))
      for (int s = call.begin; s < call.end && !call.sums(); ++s) call_of_[s] = call.begin;
  }

  std::vector<Storage> run() {
    const int end = static_cast<int>(program_.steps.size());
    std::vector<Storage> all(held_.size());
    std::map<std::pair<int, int>, std::vector<int>> joined;  // [call, result] entries of held_
    for (int h = 0; h < static_cast<int>(held_.size()); ++h) {
      const Step& step = program_.steps[held_[h].made];
      root_[h] = h;
      static_cast<Held&>(all[h]) = held_[h];
      if (step.is_compute())
        place_result(h, step, &all[h]);
      else
        place_conversion(h, step, &all);
      if (const auto it = call_of_.find(held_[h].made); it != call_of_.end())
        joined[{it->second, graph_.value(held_[h].value).output}].push_back(h);
      index_.add(h);
      Storage& root = all[root_[h]];
      root.last = std::max(root.last, held_[h].last);
      if (held_[h].last == end) root.to_end.emplace_back(held_[h].value, held_[h].placement);
    }
    // What one call made for all parts is one tensor, and lives as long as any of its rows.
    for (const auto& [call, rows] : joined) {
      int made = end, last = 0;
      for (int h : rows) {
        made = std::min(made, all[root_[h]].made);
        last = std::max(last, all[root_[h]].last);
      }
      for (int h : rows) all[root_[h]].made = made, all[root_[h]].last = last;
    }
    std::vector<Storage> roots;
    for (size_t h = 0; h < held_.size(); ++h)
      if (root_[h] == static_cast<int>(h)) roots.push_back(std::move(all[h]));
    return roots;
  }

 private:
  void share(int h, ValueId v, Placement p) {
    if (const int other = index_.find(v, p); other >= 0) root_[h] = root_[other];
  }

  void place_result(int h, const Step& step, Storage* storage) {
    const Node& node = graph_.node(step.node);
    if (is_source(node)) {
      const bool input = node.op == "motley::input";
      if (node.op == "motley::constant") return;
      storage->made = !phased_ || storage->made < phases_.backward ? 0 : phases_.backward;
      if (input && !phased_) storage->last = static_cast<int>(program_.steps.size());
      return;
    }
    const Triple& triple = theory_.triples(step.node)[step.triple];
    const OpDef* op = find_op(node.op);
    const bool passes =
        is_boundary(node) && moves_nothing(theory_, step.node, triple, fractions_.shares());
    if ((op && op->alias) || passes) share(h, graph_.inputs_of(node)[0], triple.in[0]);
  }

  void place_conversion(int h, const Step& step, std::vector<Storage>* all) {
    const int s = held_[h].made, other = index_.find(step.value, step.from);
    if (step.kind == Collective::slice && is_one_run(theory_, step.value, step.to))
      share(h, step.value, step.from);
    if (step.kind != Collective::all_reduce || other < 0) return;
    Storage& operand = (*all)[root_[other]];
    const bool dies = root_[other] == other && operand.last == s && !is_source_(operand.made) &&
                      !call_of_.count(operand.made) &&
                      !(phased_ && operand.made < phases_.reduction && s >= phases_.reduction);
    if (std::binary_search(together_.begin(), together_.end(), s)) {
      (*all)[h].made = sent_[s];
      if (dies) operand.last = std::max(operand.made, sent_[s]);
    } else if (dies) {
      root_[h] = other;
    } else if (sent_[s] >= 0) {
      (*all)[h].made = sent_[s];
    }
  }
  bool is_source_(int step) const {
    const Step& made = program_.steps[step];
    return made.is_compute() && is_source(graph_.node(made.node));
  }

  const Theory& theory_;
  const Graph& graph_;
  const Program& program_;
  const Fractions& fractions_;
  const bool phased_;
  const Phases phases_;
  const std::vector<Held> held_;
  HeldIndex index_;
  std::vector<int> root_;       // [entry of held_]
  std::vector<int> sent_;       // [step] of a gradient: where its message starts; -1: no gradient
  std::vector<int> together_;   // steps of messages of several, ascending
  std::map<int, int> call_of_;  // steps that make rows of one tensor, by where that begins
};

}  // namespace

std::vector<Storage> storages(const Theory& theory, const Program& program,
                              const Fractions& fractions, bool phases,
                              const std::vector<GradientMessage>& messages) {
  return Storages(theory, program, fractions, phases, messages).run();
}

}  // namespace motley

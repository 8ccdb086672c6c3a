// How the factors of a theory's values are found: every dimension begins as one factor, and all are
// refined until operators, parameters and their gradients agree.
#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "shard/factors.h"
#include "shard/theory.h"

namespace motley {
namespace {

// The products of the factors behind each bound of a list, outermost first: [8, 7] has 56, 7, 1.
Factors bounds_of(const Factors& f) {
  Factors bounds = {1};
  for (size_t i = f.size(); i-- > 0;) bounds.push_back(bounds.back() * f[i]);
  std::reverse(bounds.begin(), bounds.end());
  return bounds;
}

Factors between(const Factors& bounds) {
  Factors f;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) f.push_back(bounds[i] / bounds[i + 1]);
  return f;
}

// `a` with those bounds of `b` that divide, and are divided by, the ones it has: [64, 56] by [64, 8, 7] is
// [64, 8, 7]; [8, 7] by [28, 2] stays as it is. REQUIRES: equal products.
Factors refined(const Factors& a, const Factors& b) {
  Factors bounds = bounds_of(a);
  for (int64_t bound : bounds_of(b)) {
    auto behind = std::lower_bound(bounds.begin(), bounds.end(), bound, std::greater<>());
    if (behind == bounds.end() || *behind == bound || behind == bounds.begin()) continue;
    if (*std::prev(behind) % bound == 0 && bound % *behind == 0) bounds.insert(behind, bound);
  }
  return between(bounds);
}

// Of tensors of one shape. Whether one of them changed.
bool refine_each_other(std::vector<Factors>* a, std::vector<Factors>* b) {
  if (a->size() != b->size()) return false;
  bool changed = false;
  for (size_t d = 0; d < a->size(); ++d) {
    Factors& mine = (*a)[d];
    Factors& other = (*b)[d];
    if (mine == other || product(mine, 0, mine.size()) != product(other, 0, other.size())) continue;
    Factors x = refined(mine, other), y = refined(other, mine);
    changed = changed || x != mine || y != other;
    mine = std::move(x), other = std::move(y);
  }
  return changed;
}

// What is placed alike is numbered alike: bounds that only one of two tensors of one shape could take
// are given up.
void keep_common(std::vector<Factors>* a, std::vector<Factors>* b) {
  if (a->size() != b->size()) return;
  for (size_t d = 0; d < a->size(); ++d) {
    if ((*a)[d] == (*b)[d]) continue;
    const Factors x = bounds_of((*a)[d]), y = bounds_of((*b)[d]);
    Factors both;
    std::set_intersection(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(both),
                          std::greater<>());
    if (x.front() == y.front()) (*a)[d] = (*b)[d] = between(both);
  }
}

}  // namespace

// Sweeps over the nodes of a graph until none of them refines its values any more.
class Theory::Refinement {
 public:
  explicit Refinement(Theory* theory)
      : theory_(*theory),
        graph_(theory->graph_),
        factors_(theory->factors_),
        uses_(theory->kinds_.size()),
        changed_at_(graph_.values.size(), 0),
        seen_at_(graph_.nodes.size(), -1) {
    for (size_t k = 0; k < uses_.size(); ++k) find_uses(k);
  }

  void run() {
    // Refinement only ever adds boundaries, so this ends; a handful of sweeps is usual.
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t n = 0; n < graph_.nodes.size(); ++n) changed = visit(n) || changed;
      for (const Parameter& p : graph_.parameters) changed = share(p.value, p.gradient) || changed;
      for (const Buffer& b : graph_.buffers) changed = share(b.value, b.update) || changed;
      if (!changed) break;
      for (size_t n = graph_.nodes.size(); n-- > 0;) changed = visit(n) || changed;
    }
    for (const Parameter& p : graph_.parameters)
      if (p.gradient.valid()) keep_common(&factors_[p.value.index], &factors_[p.gradient.index]);
    for (const Buffer& b : graph_.buffers)
      if (b.update.valid()) keep_common(&factors_[b.value.index], &factors_[b.update.index]);
  }

 private:
  // Where a label of a kind of node occurs.
  struct Use {
    int label;
    size_t tensor;         // among the node's
    size_t dim, position;  // position among the dimension's labels
    const std::vector<int>* labels;
  };
  using UseIterator = std::vector<Use>::const_iterator;

  // Of a kind of node, by label.
  void find_uses(size_t kind) {
    const Signature& s = theory_.kinds_[kind].signature;
    if (s.labels.empty()) return;
    std::vector<Use>& uses = uses_[kind];
    const size_t n = theory_.kinds_[kind].first.index;
    const ValueId* const of = theory_.tensors(n);
    auto collect = [&](size_t t, const TensorLabels& tensor) {
      const ValueId v = of[t];
      if (!v.valid()) return;
      for (size_t d = 0; d < tensor.dims.size(); ++d) {
        int64_t size = 1;
        for (int l : tensor.dims[d]) size *= s.labels[l].size;
        if (size != graph_.spec(v).shape[d]) continue;
        for (size_t p = 0; p < tensor.dims[d].size(); ++p)
          uses.push_back({tensor.dims[d][p], t, d, p, &tensor.dims[d]});
      }
    };
    const size_t outputs = graph_.nodes[n].outputs.size();
    const size_t inputs = theory_.first_tensor_[n + 1] - theory_.first_tensor_[n] - outputs;
    for (size_t i = 0; i < inputs; ++i) collect(i, s.operands[i]);
    for (size_t o = 0; o < outputs; ++o)
      if (of[inputs + o].valid()) collect(inputs + o, s.results[o]);
    std::stable_sort(uses.begin(), uses.end(),
                     [](const Use& a, const Use& b) { return a.label < b.label; });
  }

  // Refines the values of a node by one another. Whether one of them changed.
  bool visit(size_t n) {
    const std::vector<Use>& uses = uses_[theory_.kind_[n]];
    if (!is_due(n, uses)) return false;
    seen_at_[n] = clock_;
    changed_ = false;
    cut_between_labels(n, uses);
    for (auto use = uses.begin(); use != uses.end();) {
      auto end = use;
      while (end != uses.end() && end->label == use->label) ++end;
      unite(n, use, end);
      use = end;
    }
    if (changed_) seen_at_[n] = clock_ - 1;  // what it wrote may interact within the node
    return changed_;
  }

  // A node is looked at again only after a value it touches has changed.
  bool is_due(size_t n, const std::vector<Use>& uses) const {
    const ValueId* const of = theory_.tensors(n);
    for (const Use& use : uses)
      if (changed_at_[of[use.tensor].index] > seen_at_[n]) return true;
    return false;
  }

  // A dimension of several labels has to be cut at their bounds before these can be found in it.
  void cut_between_labels(size_t n, const std::vector<Use>& uses) {
    const std::vector<Label>& labels = theory_.kinds_[theory_.kind_[n]].signature.labels;
    const ValueId* const of = theory_.tensors(n);
    for (const Use& use : uses) {
      if (use.labels->size() < 2 || use.position != 0) continue;
      sizes_.clear();
      for (int l : *use.labels) sizes_.push_back(labels[l].size);
      Factors& mine = factors_[of[use.tensor].index][use.dim];
      Factors fine = refined(mine, sizes_);
      if (fine == mine) continue;
      mine = std::move(fine);
      note_change(of[use.tensor]);
    }
  }

  // Refines the factors of one label, which is used at [first, last), by one another; usually they
  // are the same. What two places cannot both have (8 x 7 and 28 x 2) each keeps as it is.
  void unite(size_t n, UseIterator first, UseIterator last) {
    const std::vector<Label>& labels = theory_.kinds_[theory_.kind_[n]].signature.labels;
    const ValueId* const of = theory_.tensors(n);
    bool equal = true;
    shared_.clear();
    size_t begin = 0, end = 0;
    for (auto use = first; use != last; ++use) {
      const Factors& f = factors_[of[use->tensor].index][use->dim];
      if (!locate(f, *use->labels, labels, use->position, &begin, &end)) return;
      auto from = f.begin() + static_cast<int64_t>(begin),
           to = f.begin() + static_cast<int64_t>(end);
      if (use == first) {
        shared_.assign(from, to);
      } else if (!std::equal(shared_.begin(), shared_.end(), from, to)) {
        equal = false;
        shared_ = refined(shared_, Factors(from, to));
      }
    }
    if (equal) return;
    for (auto use = first; use != last; ++use) {
      Factors& f = factors_[of[use->tensor].index][use->dim];
      locate(f, *use->labels, labels, use->position, &begin, &end);
      auto from = f.begin() + static_cast<int64_t>(begin),
           to = f.begin() + static_cast<int64_t>(end);
      const Factors old(from, to);
      const Factors fine = refined(old, shared_);
      if (fine == old) continue;
      f.insert(f.erase(from, to), fine.begin(), fine.end());
      note_change(of[use->tensor]);
    }
  }

  void note_change(ValueId v) {
    changed_at_[v.index] = ++clock_;
    changed_ = true;
  }

  // Parameters and their gradients (buffers and their updates) are placed alike, so they share
  // factors. Whether one of them changed.
  bool share(ValueId a, ValueId b) {
    if (!b.valid() || !refine_each_other(&factors_[a.index], &factors_[b.index])) return false;
    changed_at_[a.index] = changed_at_[b.index] = ++clock_;
    return true;
  }

  const Theory& theory_;
  const Graph& graph_;
  std::vector<std::vector<Factors>>& factors_;  // [value][dim]
  std::vector<std::vector<Use>> uses_;          // [kind of node]
  int64_t clock_ = 0;                           // changes so far
  std::vector<int64_t> changed_at_, seen_at_;   // [value], [node] on the clock
  bool changed_ = false;                        // by the visit that goes on
  Factors sizes_, shared_;                      // of a visit, kept for their memory
};

void Theory::refine() { Refinement(this).run(); }

}  // namespace motley

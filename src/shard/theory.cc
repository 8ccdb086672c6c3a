#include "shard/theory.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/error.h"

namespace motley {

std::string to_string(const Triple& triple) {
  std::string in, out;
  for (size_t i = 0; i < triple.in.size(); ++i) in += (i ? ", " : "") + to_string(triple.in[i]);
  for (size_t o = 0; o < triple.out.size(); ++o) out += (o ? ", " : "") + to_string(triple.out[o]);
  return in + " -> " + out + (triple.kernel.empty() ? "" : " [" + triple.kernel + "]");
}

namespace {

using Factors = std::vector<int64_t>;

int64_t product(const Factors& f, size_t begin, size_t end) {
  int64_t p = 1;
  for (size_t i = begin; i < end; ++i) p *= f[i];
  return p;
}

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

// Where a label's factors lie in the factor list of a dimension: [begin, end), or false if its
// bounds fall inside a factor.
bool locate(const Factors& factors, const std::vector<int>& labels, const std::vector<Label>& info,
            size_t which, size_t* begin, size_t* end) {
  size_t at = 0;
  for (size_t l = 0; l <= which; ++l) {
    *begin = at;
    int64_t p = 1;
    while (p < info[labels[l]].size && at < factors.size()) p *= factors[at++];
    if (p != info[labels[l]].size) return false;
  }
  *end = at;
  return true;
}

// A factor of a label. A cut is one digit of an index: (index / inner) % size. Where a tensor has a
// factor of this size with this much behind it, it is the same digit, whatever its others are.
struct Digit {
  int64_t size, inner;
  bool operator==(const Digit&) const = default;
};

// Where a label occurs in a tensor: its digits are factors `begin` and on of dimension `dim`.
struct Place {
  int dim = -1;
  size_t begin = 0;
  std::vector<Digit> digits;
  Placement cut(Digit digit) const {
    const auto it = std::find(digits.begin(), digits.end(), digit);
    return Placement::shard(dim, static_cast<int>(begin + (it - digits.begin())));
  }
};

// The place of a label in a tensor, without a dimension where it does not occur. False if it occurs
// twice, or its bounds fall inside a factor.
bool find_label(const TensorLabels& tensor, size_t label, const std::vector<Label>& labels,
                const std::vector<Factors>& factors, Place* place) {
  for (size_t d = 0; d < tensor.dims.size(); ++d)
    for (size_t p = 0; p < tensor.dims[d].size(); ++p) {
      if (tensor.dims[d][p] != static_cast<int>(label)) continue;
      size_t begin, end;
      const Factors& f = factors[d];
      if (place->dim >= 0 || !locate(f, tensor.dims[d], labels, p, &begin, &end)) return false;
      *place = {static_cast<int>(d), begin, {}};
      for (size_t k = begin; k < end; ++k) place->digits.push_back({f[k], product(f, k + 1, end)});
    }
  return true;
}

// Leaves those that these have too.
void keep_common(const std::vector<Digit>& these, bool first, std::vector<Digit>* shared) {
  if (first) *shared = these;
  std::erase_if(*shared, [&](Digit digit) {
    return std::find(these.begin(), these.end(), digit) == these.end();
  });
}

}  // namespace

Theory::Theory(const Graph& graph, Lookup lookup)
    : graph_(graph), lookup_(lookup), segments_(segments_of(graph)) {
  factors_.resize(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v)
    for (int64_t n : graph.values[v].spec.shape)
      factors_[v].push_back(n > 1 ? Factors{n} : Factors{});
  classify();
  refine();
  derive();
}

void Theory::classify() {
  std::unordered_map<std::string, int> known;
  std::string key;
  auto raw = [&](const auto& x) {
    key.append(reinterpret_cast<const char*>(&x), sizeof x);  // of a number
  };
  auto list = [&](const auto& xs) {
    raw(xs.size());
    for (const auto& x : xs) raw(x);
  };
  auto spec = [&](ValueId v) {
    raw(graph_.spec(v).dtype);
    list(graph_.spec(v).shape);
  };
  kind_.reserve(graph_.nodes.size());
  first_tensor_.reserve(graph_.nodes.size() + 1);
  for (size_t n = 0; n < graph_.nodes.size(); ++n) {
    const Node& node = graph_.nodes[n];
    const size_t first = tensors_.size();
    first_tensor_.push_back(first);
    const bool source = is_source(node);
    key.assign(node.op).push_back('\0');
    raw(segments_.of_node[n]);
    auto tensor = [&](ValueId v) {
      raw(v.valid());
      if (!v.valid()) return;
      // Which of the tensors so far it is, if it is one of them.
      raw(std::find(tensors_.begin() + static_cast<int64_t>(first), tensors_.end(), v) -
          tensors_.begin() - static_cast<int64_t>(first));
      tensors_.push_back(v);
      spec(v);
    };
    for (const Arg& arg : node.args) {
      if (source) break;
      raw(arg.index());
      if (auto one = std::get_if<ValueId>(&arg)) {
        tensor(*one);
      } else if (auto many = std::get_if<std::vector<ValueId>>(&arg)) {
        raw(many->size());
        for (ValueId v : *many) tensor(v);
      } else if (auto text = std::get_if<std::string>(&arg)) {
        list(*text);
      } else if (auto integers = std::get_if<std::vector<int64_t>>(&arg)) {
        list(*integers);
      } else if (auto reals = std::get_if<std::vector<double>>(&arg)) {
        list(*reals);
      } else if (auto integer = std::get_if<int64_t>(&arg)) {
        raw(*integer);
      } else if (auto real = std::get_if<double>(&arg)) {
        raw(*real);
      } else if (auto flag = std::get_if<bool>(&arg)) {
        raw(*flag);
      } else if (auto dtype = std::get_if<DType>(&arg)) {
        raw(*dtype);
      }
    }
    for (ValueId v : node.outputs) {
      raw(v.valid());
      if (v.valid()) spec(v);
      tensors_.push_back(v);
    }
    auto [it, fresh] = known.try_emplace(key, static_cast<int>(kinds_.size()));
    kind_.push_back(it->second);
    if (!fresh) continue;
    const OpDef* op = source ? nullptr : lookup_(node.op);
    kinds_.push_back({op && op->signature ? op->signature(graph_, node) : Signature{},
                      NodeId(static_cast<int64_t>(n))});
  }
  first_tensor_.push_back(tensors_.size());
}

void Theory::refine() {
  // Where the labels of a kind of node occur, by label. A dimension of several labels has to be cut
  // at their bounds first.
  struct Use {
    int label;
    size_t tensor;         // among the node's
    size_t dim, position;  // position among the dimension's labels
    const std::vector<int>* labels;
  };
  std::vector<std::vector<Use>> uses(kinds_.size());
  for (size_t k = 0; k < kinds_.size(); ++k) {
    const Signature& s = kinds_[k].signature;
    if (s.labels.empty()) continue;
    const size_t n = kinds_[k].first.index;
    auto collect = [&](size_t t, const TensorLabels& tensor) {
      const ValueId v = tensors(n)[t];
      if (!v.valid()) return;
      for (size_t d = 0; d < tensor.dims.size(); ++d) {
        int64_t size = 1;
        for (int l : tensor.dims[d]) size *= s.labels[l].size;
        if (size != graph_.spec(v).shape[d]) continue;
        for (size_t p = 0; p < tensor.dims[d].size(); ++p)
          uses[k].push_back({tensor.dims[d][p], t, d, p, &tensor.dims[d]});
      }
    };
    const size_t outputs = graph_.nodes[n].outputs.size();
    const size_t inputs = first_tensor_[n + 1] - first_tensor_[n] - outputs;
    for (size_t i = 0; i < inputs; ++i) collect(i, s.operands[i]);
    for (size_t o = 0; o < outputs; ++o)
      if (tensors(n)[inputs + o].valid()) collect(inputs + o, s.results[o]);
    std::stable_sort(uses[k].begin(), uses[k].end(),
                     [](const Use& a, const Use& b) { return a.label < b.label; });
  }

  // A node is looked at again only after a value it touches has changed.
  int64_t clock = 0;
  std::vector<int64_t> changed_at(graph_.values.size(), 0), seen_at(graph_.nodes.size(), -1);
  Factors sizes, shared;
  auto visit = [&](size_t n) {
    const std::vector<Label>& labels = kinds_[kind_[n]].signature.labels;
    const std::vector<Use>& used = uses[kind_[n]];
    const auto begin_use = used.begin(), end_use = used.end();
    const ValueId* const of = tensors(n);
    bool due = false;
    for (auto u = begin_use; u != end_use && !due; ++u)
      due = changed_at[of[u->tensor].index] > seen_at[n];
    if (!due) return false;
    seen_at[n] = clock;
    bool changed = false;
    auto write = [&](ValueId v) {
      changed_at[v.index] = ++clock;
      changed = true;
    };
    for (auto u = begin_use; u != end_use; ++u) {
      if (u->labels->size() < 2 || u->position != 0) continue;
      sizes.clear();
      for (int l : *u->labels) sizes.push_back(labels[l].size);
      Factors& mine = factors_[of[u->tensor].index][u->dim];
      Factors fine = refined(mine, sizes);
      if (fine == mine) continue;
      mine = std::move(fine);
      write(of[u->tensor]);
    }
    for (auto u = begin_use; u != end_use;) {
      auto last = u;
      while (last != end_use && last->label == u->label) ++last;
      // The factors of this label at every place; usually they are the same. What two places
      // cannot both have (8 x 7 and 28 x 2) each keeps as it is.
      bool located = true, equal = true;
      shared.clear();
      size_t begin, end;
      for (auto w = u; w != last && located; ++w) {
        const Factors& f = factors_[of[w->tensor].index][w->dim];
        located = locate(f, *w->labels, labels, w->position, &begin, &end);
        if (!located) break;
        auto from = f.begin() + static_cast<int64_t>(begin),
             to = f.begin() + static_cast<int64_t>(end);
        if (w == u) {
          shared.assign(from, to);
        } else if (!std::equal(shared.begin(), shared.end(), from, to)) {
          equal = false;
          shared = refined(shared, Factors(from, to));
        }
      }
      if (located && !equal)
        for (auto w = u; w != last; ++w) {
          Factors& f = factors_[of[w->tensor].index][w->dim];
          locate(f, *w->labels, labels, w->position, &begin, &end);
          auto from = f.begin() + static_cast<int64_t>(begin),
               to = f.begin() + static_cast<int64_t>(end);
          const Factors old(from, to);
          const Factors fine = refined(old, shared);
          if (fine == old) continue;
          f.insert(f.erase(from, to), fine.begin(), fine.end());
          write(of[w->tensor]);
        }
      u = last;
    }
    if (changed) seen_at[n] = clock - 1;  // what it wrote may interact within the node
    return changed;
  };
  // Parameters and their gradients (buffers and their updates) are placed alike, so they share
  // factors.
  auto share = [&](ValueId a, ValueId b) {
    if (!b.valid() || !refine_each_other(&factors_[a.index], &factors_[b.index])) return false;
    changed_at[a.index] = changed_at[b.index] = ++clock;
    return true;
  };
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

void Theory::derive() {
  // Values with equal factors have equal numbers.
  std::unordered_map<std::string, int> known_factors;
  std::vector<int> factors_of(factors_.size());
  std::string key;
  auto raw = [&](const auto& x) { key.append(reinterpret_cast<const char*>(&x), sizeof x); };
  for (size_t v = 0; v < factors_.size(); ++v) {
    key.clear();
    for (const Factors& f : factors_[v]) {
      raw(f.size());
      for (int64_t x : f) raw(x);
    }
    factors_of[v] =
        known_factors.try_emplace(key, static_cast<int>(known_factors.size())).first->second;
  }

  std::unordered_map<std::string, int> known;
  triples_.resize(graph_.nodes.size());
  table_.resize(graph_.nodes.size());
  for (size_t n = 0; n < graph_.nodes.size(); ++n) {
    // All that the triples depend on: the kind of node and the factors.
    key.clear();
    raw(kind_[n]);
    for (size_t t = first_tensor_[n]; t < first_tensor_[n + 1]; ++t)
      raw(tensors_[t].valid() ? factors_of[tensors_[t].index] : -1);
    auto [it, fresh] = known.try_emplace(key, static_cast<int>(tables_.size()));
    table_[n] = it->second;
    if (!fresh) {
      triples_[n] = tables_[it->second].get();
      continue;
    }

    const Node& node = graph_.nodes[n];
    const std::vector<ValueId> inputs = graph_.inputs_of(node);
    const std::vector<ValueId>& outputs = node.outputs;
    const Signature& s = kinds_[kind_[n]].signature;
    const OpDef* op = is_source(node) ? nullptr : lookup_(node.op);
    std::vector<ExtraRule> extra;
    if (op && op->extra) extra = op->extra(graph_, node);

    auto misfit = [&] {
      throw user_error("graph",
                       "node {} calls {} with {} tensors and {} results, which it cannot take; "
                       "capture the model again",
                       n, node.op, inputs.size(), outputs.size());
    };
    auto table = std::make_unique<std::vector<Triple>>();
    auto add = [&](Triple triple) {
      for (size_t i = 0; i < inputs.size(); ++i)
        if (!legal(inputs[i], triple.in[i])) return;
      for (size_t o = 0; o < outputs.size(); ++o)
        if (outputs[o].valid() && !legal(outputs[o], triple.out[o])) return;
      for (const Triple& t : *table)
        if (t.in == triple.in && t.out == triple.out) return;
      table->push_back(std::move(triple));
    };
    Triple whole{
        std::vector<Placement>(inputs.size()), std::vector<Placement>(outputs.size()), 0, "", {}};
    add(whole);

    if (is_source(node)) {
      // A source is made in any placement at no cost: {} parameter-shard(d) {S(d)}.
      for (Placement p : placements(outputs[0])) {
        if (!p.is_shard()) continue;
        Triple t = whole;
        t.out[0] = p;
        t.cut = cut_size(outputs[0], p);
        add(t);
      }
    }

    for (size_t l = 0; l < s.labels.size(); ++l) {
      if (s.labels[l].kind == LabelKind::blocked) continue;
      std::vector<Digit> shared;
      bool first = true, agreed = true;
      std::vector<Place> in(inputs.size()), out(outputs.size());
      auto find = [&](ValueId v, const TensorLabels& tensor, Place* place) {
        agreed = agreed && find_label(tensor, l, s.labels, factors_[v.index], place);
        if (agreed && place->dim >= 0)
          keep_common(place->digits, std::exchange(first, false), &shared);
      };
      for (size_t i = 0; i < inputs.size(); ++i) find(inputs[i], s.operands[i], &in[i]);
      for (size_t o = 0; o < outputs.size(); ++o)
        if (outputs[o].valid()) find(outputs[o], s.results[o], &out[o]);
      if (!agreed) continue;
      for (const Digit digit : shared) {
        Triple t = whole;
        t.cut = digit.size;
        bool possible = true;
        for (size_t i = 0; i < inputs.size(); ++i) {
          if (in[i].dim >= 0)
            t.in[i] = in[i].cut(digit);
          else if (s.labels[l].kind == LabelKind::reduction &&
                   std::count(s.added.begin(), s.added.end(), static_cast<int>(i)))
            t.in[i] = Placement::partial();
        }
        for (size_t o = 0; o < outputs.size(); ++o) {
          if (!outputs[o].valid()) continue;
          if (out[o].dim >= 0)
            t.out[o] = out[o].cut(digit);
          else if (s.labels[l].ignored_by >> o & 1)
            t.out[o] = Placement::replicated();
          else if (s.labels[l].kind == LabelKind::reduction)
            t.out[o] = Placement::partial();
          else
            possible = false;
        }
        if (possible && is_boundary(node))
          t.collectives = {{Collective::exchange, graph_.spec(outputs[0]).bytes()}};
        if (possible) add(t);
      }
    }

    for (const auto& set : s.linear) {
      Triple t = whole;
      for (int i : set) {
        if (i >= static_cast<int>(inputs.size())) misfit();
        t.in[i] = Placement::partial();
      }
      for (size_t o = 0; o < outputs.size(); ++o)
        if (outputs[o].valid()) t.out[o] = Placement::partial();
      add(t);
    }

    for (const ExtraRule& rule : extra) {
      if (rule.operands.size() != inputs.size() || rule.results.size() != outputs.size()) misfit();
      Triple t{rule.operands, rule.results, 0, rule.name, rule.collectives};
      bool possible = true;
      auto cut = [&](ValueId v, Placement p) {
        if (!p.is_shard()) return;
        possible = possible && legal(v, p) && (t.cut == 0 || t.cut == cut_size(v, p));
        if (possible) t.cut = cut_size(v, p);
      };
      for (size_t i = 0; i < inputs.size(); ++i) cut(inputs[i], t.in[i]);
      for (size_t o = 0; o < outputs.size(); ++o)
        if (outputs[o].valid()) cut(outputs[o], t.out[o]);
      if (possible) add(t);
    }
    triples_[n] = table.get();
    tables_.push_back(std::move(table));
  }
}

bool Theory::restrict_to(const std::vector<NodeId>& nodes, Placement out) {
  const auto made_so = [&](const Triple& t) { return !t.out.empty() && t.out[0] == out; };
  for (const NodeId node : nodes)
    if (std::none_of(triples(node).begin(), triples(node).end(), made_so)) return false;
  std::map<int, int> number;  // of tables, to those in their place
  for (const NodeId node : nodes) {
    const auto [it, fresh] = number.try_emplace(table(node), tables());
    if (fresh) {
      auto kept = std::make_unique<std::vector<Triple>>();
      std::copy_if(triples(node).begin(), triples(node).end(), std::back_inserter(*kept), made_so);
      tables_.push_back(std::move(kept));
    }
    table_[node.index] = it->second;
    triples_[node.index] = tables_[it->second].get();
  }
  return true;
}

bool Theory::legal(ValueId value, Placement p) const {
  if (p.is_replicated()) return true;
  if (p.is_partial()) return is_float(graph_.spec(value).dtype);
  const auto& factors = factors_[value.index];
  return p.dim < factors.size() && p.factor < factors[p.dim].size() && factors[p.dim][p.factor] > 1;
}

std::vector<Placement> Theory::placements(ValueId value) const {
  std::vector<Placement> list = {Placement::replicated()};
  if (is_float(graph_.spec(value).dtype)) list.push_back(Placement::partial());
  const auto& factors = factors_[value.index];
  for (size_t d = 0; d < factors.size(); ++d)
    for (size_t k = 0; k < factors[d].size(); ++k)
      if (factors[d][k] > 1)
        list.push_back(Placement::shard(static_cast<int>(d), static_cast<int>(k)));
  return list;
}

int64_t Theory::cut_size(ValueId value, Placement p) const {
  MOTLEY_CHECK(p.is_shard() && legal(value, p), "{} of %{}", to_string(p), value.index);
  return factors_[value.index][p.dim][p.factor];
}

Shape Theory::local_shape(ValueId value, Placement p, const Shares& shares, int device) const {
  Shape shape = graph_.spec(value).shape;
  if (p.is_shard()) {
    const Cut c = cut(value, p);
    shape[p.dim] = shape[p.dim] / c.size * shares.of(c)[device];
  }
  return shape;
}

std::vector<std::string> Theory::unknown_ops() const {
  std::set<std::string> names;
  for (const Node& node : graph_.nodes)
    if (!is_source(node) && !lookup_(node.op)) names.insert(node.op);
  return {names.begin(), names.end()};
}

std::optional<Collective> Theory::conversion(Placement a, Placement b) {
  using K = Placement::Kind;
  if (a == b) return std::nullopt;
  if (a.kind == K::partial && b.kind == K::replicated) return Collective::all_reduce;
  if (a.kind == K::partial && b.kind == K::shard) return Collective::reduce_scatter;
  if (a.kind == K::shard && b.kind == K::replicated) return Collective::all_gather;
  if (a.kind == K::shard && b.kind == K::shard) return Collective::all_to_all;
  if (a.kind == K::replicated && b.kind == K::shard) return Collective::slice;
  if (a.kind == K::replicated && b.kind == K::partial) return Collective::mask;
  return std::nullopt;
}

}  // namespace motley

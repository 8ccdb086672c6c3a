#include "shard/theory.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "core/error.h"

namespace motley {

const char* to_string(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::all_reduce:
      return "all_reduce";
    case CollectiveKind::reduce_scatter:
      return "reduce_scatter";
    case CollectiveKind::all_gather:
      return "all_gather";
    case CollectiveKind::all_to_all:
      return "all_to_all";
    case CollectiveKind::slice:
      return "slice";
    case CollectiveKind::mask:
      return "mask";
  }
  return "?";
}

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

// The coarsest list that refines both, or false if neither order of their boundaries divides.
bool common_refinement(const Factors& a, const Factors& b, Factors* result) {
  std::vector<int64_t> cuts = {1};
  int64_t suffix = 1;
  for (size_t i = a.size(); i-- > 0;) cuts.push_back(suffix *= a[i]);
  suffix = 1;
  for (size_t i = b.size(); i-- > 0;) cuts.push_back(suffix *= b[i]);
  std::sort(cuts.rbegin(), cuts.rend());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  result->clear();
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    if (cuts[i] % cuts[i + 1] != 0) return false;
    result->push_back(cuts[i] / cuts[i + 1]);
  }
  return true;
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

}  // namespace

Theory::Theory(const Graph& graph, Lookup lookup) : graph_(graph), lookup_(lookup) {
  factors_.resize(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v)
    for (int64_t n : graph.values[v].spec.shape)
      factors_[v].push_back(n > 1 ? Factors{n} : Factors{});
  signatures_.reserve(graph.nodes.size());
  for (const Node& node : graph.nodes) {
    const OpDef* op = is_source(node) ? nullptr : lookup_(node.op);
    signatures_.push_back(op && op->signature ? op->signature(graph, node) : Signature{});
  }
  refine();
  derive();
}

void Theory::refine() {
  // Where labels occur, node by node, found once. A dimension of several labels has to be cut at
  // their bounds first.
  struct Use {
    int label;
    ValueId value;
    size_t dim, position;  // position among the dimension's labels
    const std::vector<int>* labels;
  };
  std::vector<Use> uses;
  std::vector<size_t> first_use(graph_.nodes.size() + 1);
  for (size_t n = 0; n < graph_.nodes.size(); ++n) {
    first_use[n] = uses.size();
    const Signature& s = signatures_[n];
    if (s.labels.empty()) continue;
    auto collect = [&](ValueId v, const TensorLabels& tensor) {
      for (size_t d = 0; d < tensor.dims.size(); ++d) {
        int64_t size = 1;
        for (int l : tensor.dims[d]) size *= s.labels[l].size;
        if (size != graph_.spec(v).shape[d]) continue;
        for (size_t p = 0; p < tensor.dims[d].size(); ++p)
          uses.push_back({tensor.dims[d][p], v, d, p, &tensor.dims[d]});
      }
    };
    auto inputs = graph_.inputs_of(graph_.nodes[n]);
    for (size_t i = 0; i < inputs.size(); ++i) collect(inputs[i], s.operands[i]);
    for (size_t o = 0; o < graph_.nodes[n].outputs.size(); ++o)
      if (graph_.nodes[n].outputs[o].valid()) collect(graph_.nodes[n].outputs[o], s.results[o]);
    std::stable_sort(uses.begin() + static_cast<int64_t>(first_use[n]), uses.end(),
                     [](const Use& a, const Use& b) { return a.label < b.label; });
  }
  first_use.back() = uses.size();

  // A node is looked at again only after a value it touches has changed.
  int64_t clock = 0;
  std::vector<int64_t> changed_at(graph_.values.size(), 0), seen_at(graph_.nodes.size(), -1);
  Factors sizes, refined, shared;
  auto visit = [&](size_t n) {
    const std::vector<Label>& labels = signatures_[n].labels;
    const auto begin_use = uses.begin() + static_cast<int64_t>(first_use[n]),
               end_use = uses.begin() + static_cast<int64_t>(first_use[n + 1]);
    bool due = false;
    for (auto u = begin_use; u != end_use && !due; ++u)
      due = changed_at[u->value.index] > seen_at[n];
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
      Factors& mine = factors_[u->value.index][u->dim];
      if (!common_refinement(mine, sizes, &refined) || refined == mine) continue;
      mine = refined;
      write(u->value);
    }
    for (auto u = begin_use; u != end_use;) {
      auto last = u;
      while (last != end_use && last->label == u->label) ++last;
      // The factors of this label at every place; usually they are the same.
      bool agreed = true, equal = true;
      shared.clear();
      size_t begin, end;
      for (auto w = u; w != last && agreed; ++w) {
        const Factors& f = factors_[w->value.index][w->dim];
        agreed = locate(f, *w->labels, labels, w->position, &begin, &end);
        if (!agreed) break;
        auto from = f.begin() + static_cast<int64_t>(begin),
             to = f.begin() + static_cast<int64_t>(end);
        if (w == u) {
          shared.assign(from, to);
        } else if (!std::equal(shared.begin(), shared.end(), from, to)) {
          equal = false;
          agreed = common_refinement(shared, Factors(from, to), &refined);
          if (agreed) shared = refined;
        }
      }
      if (agreed && !equal)
        for (auto w = u; w != last; ++w) {
          Factors& f = factors_[w->value.index][w->dim];
          locate(f, *w->labels, labels, w->position, &begin, &end);
          auto from = f.begin() + static_cast<int64_t>(begin),
               to = f.begin() + static_cast<int64_t>(end);
          if (std::equal(shared.begin(), shared.end(), from, to)) continue;
          f.insert(f.erase(from, to), shared.begin(), shared.end());
          write(w->value);
        }
      u = last;
    }
    if (changed) seen_at[n] = clock - 1;  // what it wrote may interact within the node
    return changed;
  };
  // Parameters and their gradients (buffers and their updates) are placed alike, so they share
  // factors.
  auto share = [&](ValueId a, ValueId b) {
    if (!b.valid() || graph_.spec(a).shape != graph_.spec(b).shape) return false;
    bool changed = false;
    for (size_t d = 0; d < factors_[a.index].size(); ++d) {
      Factors both;
      Factors &fa = factors_[a.index][d], &fb = factors_[b.index][d];
      if (fa == fb || !common_refinement(fa, fb, &both)) continue;
      fa = fb = both;
      changed_at[a.index] = changed_at[b.index] = ++clock;
      changed = true;
    }
    return changed;
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
}

void Theory::derive() {
  std::unordered_map<std::string, int> known;
  triples_.resize(graph_.nodes.size());
  table_.resize(graph_.nodes.size());
  for (size_t n = 0; n < graph_.nodes.size(); ++n) {
    const Node& node = graph_.nodes[n];
    auto inputs = graph_.inputs_of(node);
    std::vector<ValueId> outputs = node.outputs;

    // The key says all that the triples depend on: the signature, the factors, the extra rules.
    const OpDef* op = is_source(node) ? nullptr : lookup_(node.op);
    std::vector<ExtraRule> extra;
    if (op && op->extra) extra = op->extra(graph_, node);
    std::string key = node.op + "|";
    auto add_key = [&](ValueId v) {
      if (!v.valid()) {
        key += "-;";
        return;
      }
      key += to_string(graph_.spec(v).dtype);
      for (const Factors& f : factors_[v.index]) {
        key += ',';
        for (int64_t x : f) (key += std::to_string(x)) += '.';
      }
      key += ';';
    };
    for (ValueId v : inputs) add_key(v);
    key += "|";
    for (ValueId v : outputs) add_key(v);
    const Signature& s = signatures_[n];
    auto add_labels = [&](const std::vector<TensorLabels>& tensors) {
      for (const TensorLabels& t : tensors) {
        for (const auto& d : t.dims) {
          for (int l : d) (key += std::to_string(l)) += '.';
          key += ',';
        }
        key += ';';
      }
    };
    for (const Label& l : s.labels)
      (((key += std::to_string(l.size)) += "pnb"[static_cast<int>(l.kind)]) +=
       std::to_string(l.ignored_by)) += '/';
    add_labels(s.operands);
    add_labels(s.results);
    for (const auto& set : s.linear) key += fmt::format("l{}", fmt::join(set, "."));
    for (int a : s.added) key += fmt::format("a{}", a);
    for (const ExtraRule& rule : extra) {
      key += "|" + rule.name;
      for (const auto& c : rule.collectives) key += fmt::format(":{}", c.bytes);
      for (Placement p : rule.operands) key += to_string(p);
    }
    auto [it, fresh] = known.try_emplace(std::move(key), static_cast<int>(tables_.size()));
    table_[n] = it->second;
    if (!fresh) {
      triples_[n] = tables_[it->second].get();
      continue;
    }

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
      // The label's factors, which every occurrence must show; `starts` are their positions in each
      // tensor.
      Factors shared;
      bool first = true, agreed = true;
      struct Place {
        int dim = -1;
        size_t begin = 0;
      };
      std::vector<Place> in(inputs.size()), out(outputs.size());
      auto find = [&](ValueId v, const TensorLabels& tensor, Place* place) {
        for (size_t d = 0; d < tensor.dims.size(); ++d)
          for (size_t p = 0; p < tensor.dims[d].size(); ++p) {
            if (tensor.dims[d][p] != static_cast<int>(l)) continue;
            size_t begin, end;
            const Factors& f = factors_[v.index][d];
            if (place->dim >= 0 || !locate(f, tensor.dims[d], s.labels, p, &begin, &end) ||
                product(f, begin, end) != s.labels[l].size) {
              agreed = false;
              return;
            }
            Factors part(f.begin() + static_cast<int64_t>(begin),
                         f.begin() + static_cast<int64_t>(end));
            if (!first && part != shared) agreed = false;
            shared = part;
            first = false;
            *place = {static_cast<int>(d), begin};
          }
      };
      for (size_t i = 0; i < inputs.size(); ++i) find(inputs[i], s.operands[i], &in[i]);
      for (size_t o = 0; o < outputs.size(); ++o)
        if (outputs[o].valid()) find(outputs[o], s.results[o], &out[o]);
      if (!agreed) continue;
      for (size_t q = 0; q < shared.size(); ++q) {
        Triple t = whole;
        t.cut = shared[q];
        bool possible = true;
        for (size_t i = 0; i < inputs.size(); ++i) {
          if (in[i].dim >= 0)
            t.in[i] = Placement::shard(in[i].dim, static_cast<int>(in[i].begin + q));
          else if (s.labels[l].kind == LabelKind::reduction &&
                   std::count(s.added.begin(), s.added.end(), static_cast<int>(i)))
            t.in[i] = Placement::partial();
        }
        for (size_t o = 0; o < outputs.size(); ++o) {
          if (!outputs[o].valid()) continue;
          if (out[o].dim >= 0)
            t.out[o] = Placement::shard(out[o].dim, static_cast<int>(out[o].begin + q));
          else if (s.labels[l].ignored_by >> o & 1)
            t.out[o] = Placement::replicated();
          else if (s.labels[l].kind == LabelKind::reduction)
            t.out[o] = Placement::partial();
          else
            possible = false;
        }
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
        possible = possible && legal(v, p);
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
    int64_t cut = cut_size(value, p);
    shape[p.dim] = shape[p.dim] / cut * shares.of(cut)[device];
  }
  return shape;
}

std::vector<std::string> Theory::unknown_ops() const {
  std::set<std::string> names;
  for (const Node& node : graph_.nodes)
    if (!is_source(node) && !lookup_(node.op)) names.insert(node.op);
  return {names.begin(), names.end()};
}

bool Theory::conversion(Placement a, Placement b, CollectiveKind* kind) {
  using K = Placement::Kind;
  if (a == b) return false;
  if (a.kind == K::partial && b.kind == K::replicated)
    return *kind = CollectiveKind::all_reduce, true;
  if (a.kind == K::partial && b.kind == K::shard)
    return *kind = CollectiveKind::reduce_scatter, true;
  if (a.kind == K::shard && b.kind == K::replicated)
    return *kind = CollectiveKind::all_gather, true;
  if (a.kind == K::shard && b.kind == K::shard) return *kind = CollectiveKind::all_to_all, true;
  if (a.kind == K::replicated && b.kind == K::shard) return *kind = CollectiveKind::slice, true;
  if (a.kind == K::replicated && b.kind == K::partial) return *kind = CollectiveKind::mask, true;
  return false;  // shard -> partial is never useful: its consumers take shards or the mask of the
                 // gathered value
}

}  // namespace motley

#include "shard/theory.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "shard/factors.h"
#include "shard/program.h"

namespace motley {

std::string to_string(const Triple& triple) {
  std::string text;
  const auto append = [&](const std::vector<Placement>& list) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (i) text += ", ";
      text += to_string(list[i]);
    }
  };
  append(triple.in);
  text += " -> ";
  append(triple.out);
  if (!triple.kernel.empty()) text += " [" + triple.kernel + "]";
  return text;
}

namespace {

// The place of a label in a tensor, without a dimension where it does not occur. False if it occurs
// twice, or its bounds fall inside a factor.
bool find_label(const TensorLabels& tensor, size_t label, const std::vector<Label>& labels,
                const std::vector<Factors>& factors, LabelPlace* place) {
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
void keep_shared(const std::vector<Digit>& these, bool first, std::vector<Digit>* shared) {
  if (first) *shared = these;
  std::erase_if(*shared, [&](Digit digit) {
    return std::find(these.begin(), these.end(), digit) == these.end();
  });
}

}  // namespace

Theory::Theory(const Graph& graph, Lookup lookup)
    : graph_(graph),
      lookup_(lookup),
      segments_(segments_of(graph)),
      pure_gradients_(motley::pure_gradients(graph)),
      shared_factors_(std::make_shared<AllFactors>()),
      factors_(*shared_factors_) {
  factors_.resize(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v)
    for (int64_t n : graph.values[v].spec.shape)
      factors_[v].push_back(n > 1 ? Factors{n} : Factors{});
  classify();
  refine();
  derive();
}

Theory::Theory(const Theory& like, const Graph& graph)
    : graph_(graph),
      lookup_(like.lookup_),
      segments_(like.segments_),
      pure_gradients_(like.pure_gradients_),
      shared_factors_(like.shared_factors_),
      factors_(*shared_factors_),
      tables_(like.tables_),
      triples_(like.triples_),
      table_(like.table_) {}

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

// Makes the table of triples of one node.
class Theory::Derivation {
 public:
  Derivation(const Theory& theory, size_t n)
      : theory_(theory),
        graph_(theory.graph_),
        n_(n),
        node_(graph_.nodes[n]),
        signature_(theory.kinds_[theory.kind_[n]].signature),
        inputs_(graph_.inputs_of(node_)),
        outputs_(node_.outputs),
        whole_{std::vector<Placement>(inputs_.size()),
               std::vector<Placement>(outputs_.size()),
               0,
               "",
               {}},
        table_(std::make_unique<std::vector<Triple>>()) {}

  std::unique_ptr<std::vector<Triple>> run() {
    const OpDef* op = is_source(node_) ? nullptr : theory_.lookup_(node_.op);
    std::vector<ExtraRule> extra;
    if (op && op->extra) extra = op->extra(graph_, node_);
    add(whole_);
    if (is_source(node_)) add_pieces();
    for (size_t l = 0; l < signature_.labels.size(); ++l)
      if (signature_.labels[l].kind != LabelKind::blocked) cut_label(l);
    for (const std::vector<int>& set : signature_.linear) add_linear(set);
    for (const ExtraRule& rule : extra) add_extra(rule);
    return std::move(table_);
  }

 private:
  [[noreturn]] void misfit() const {
    throw user_error("graph",
                     "node {} calls {} with {} tensors and {} results, which it cannot take; "
                     "capture the model again",
                     n_, node_.op, inputs_.size(), outputs_.size());
  }

  // Unless a tensor cannot be placed so, or there is such a triple.
  void add(Triple triple) {
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (!theory_.legal(inputs_[i], triple.in[i])) return;
    for (size_t o = 0; o < outputs_.size(); ++o)
      if (outputs_[o].valid() && !theory_.legal(outputs_[o], triple.out[o])) return;
    for (const Triple& t : *table_)
      if (t.in == triple.in && t.out == triple.out) return;
    table_->push_back(std::move(triple));
  }

  // A source is made in any placement at no cost: {} parameter-shard(d) {S(d)}.
  void add_pieces() {
    for (Placement p : theory_.placements(outputs_[0])) {
      if (!p.is_shard()) continue;
      Triple t = whole_;
      t.out[0] = p;
      t.cut = theory_.cut_size(outputs_[0], p);
      add(t);
    }
  }

  // A triple for each digit of a label that all tensors with this label have.
  void cut_label(size_t l) {
    std::vector<Digit> shared;
    bool first = true, agreed = true;
    std::vector<LabelPlace> in(inputs_.size()), out(outputs_.size());
    auto find = [&](ValueId v, const TensorLabels& tensor, LabelPlace* place) {
      agreed = agreed && find_label(tensor, l, signature_.labels, theory_.factors_[v.index], place);
      if (agreed && place->dim >= 0)
        keep_shared(place->digits, std::exchange(first, false), &shared);
    };
    for (size_t i = 0; i < inputs_.size(); ++i) find(inputs_[i], signature_.operands[i], &in[i]);
    for (size_t o = 0; o < outputs_.size(); ++o)
      if (outputs_[o].valid()) find(outputs_[o], signature_.results[o], &out[o]);
    if (!agreed) return;
    for (const Digit digit : shared) cut_digit(signature_.labels[l], digit, in, out);
  }

  // `in` and `out`: where the label is in each tensor.
  void cut_digit(const Label& label, Digit digit, const std::vector<LabelPlace>& in,
                 const std::vector<LabelPlace>& out) {
    Triple t = whole_;
    t.cut = digit.size;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (in[i].dim >= 0)
        t.in[i] = in[i].cut(digit);
      else if (label.kind == LabelKind::reduction &&
               std::count(signature_.added.begin(), signature_.added.end(), static_cast<int>(i)))
        t.in[i] = Placement::partial();
    }
    for (size_t o = 0; o < outputs_.size(); ++o) {
      if (!outputs_[o].valid()) continue;
      if (out[o].dim >= 0)
        t.out[o] = out[o].cut(digit);
      else if (label.ignored_by >> o & 1)
        t.out[o] = Placement::replicated();
      else if (label.kind == LabelKind::reduction)
        t.out[o] = Placement::partial();
      else
        return;
    }
    if (is_boundary(node_))
      t.collectives = {{Collective::exchange, graph_.spec(outputs_[0]).bytes()}};
    add(t);
  }

  // The operands of the set are partial sums, and so are the results.
  void add_linear(const std::vector<int>& set) {
    Triple t = whole_;
    for (int i : set) {
      if (i >= static_cast<int>(inputs_.size())) misfit();
      t.in[i] = Placement::partial();
    }
    for (size_t o = 0; o < outputs_.size(); ++o)
      if (outputs_[o].valid()) t.out[o] = Placement::partial();
    add(t);
  }

  // If all that it cuts is cut into as many pieces.
  void add_extra(const ExtraRule& rule) {
    if (rule.operands.size() != inputs_.size() || rule.results.size() != outputs_.size()) misfit();
    Triple t{rule.operands, rule.results, 0, rule.name, rule.collectives};
    bool possible = true;
    auto cut = [&](ValueId v, Placement p) {
      if (!p.is_shard()) return;
      possible = possible && theory_.legal(v, p) && (t.cut == 0 || t.cut == theory_.cut_size(v, p));
      if (possible) t.cut = theory_.cut_size(v, p);
    };
    for (size_t i = 0; i < inputs_.size(); ++i) cut(inputs_[i], t.in[i]);
    for (size_t o = 0; o < outputs_.size(); ++o)
      if (outputs_[o].valid()) cut(outputs_[o], t.out[o]);
    if (possible) add(t);
  }

  const Theory& theory_;
  const Graph& graph_;
  const size_t n_;
  const Node& node_;
  const Signature& signature_;
  const ValueList inputs_;
  const std::vector<ValueId>& outputs_;
  const Triple whole_;  // every device does all of it
  std::unique_ptr<std::vector<Triple>> table_;
};

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
    tables_.push_back(Derivation(*this, n).run());
    triples_[n] = tables_.back().get();
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

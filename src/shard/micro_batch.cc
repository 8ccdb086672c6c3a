#include "shard/micro_batch.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "core/error.h"

namespace motley {

namespace {

constexpr double kGiven = 0.5;  // cost of what `before` computes: more than what needs nothing

bool is_batch_norm(const Triple& triple) {
  return triple.kernel == "batch_norm.batch" || triple.kernel == "batch_norm_backward.batch";
}

// Where a micro-batch has the o-th result of a node. A batch normalisation by itself sums the
// gradients of its weights over its own samples, which are terms of the sum over all.
Placement result_of(const Triple& triple, size_t o) {
  return triple.kernel == "batch_norm_backward.batch" && o > 0 ? Placement::partial()
                                                               : triple.out[o];
}

// How a micro-batch gets a value in a placement.
struct Way {
  enum class Kind : uint8_t { triple, scaled, given } kind = Kind::triple;
  int triple = -1;
  double cost = 0;  // elements that are scaled on the longest way to it
};

class Divider {
 public:
  Divider(const Theory& theory, std::vector<int64_t> sizes, size_t part, const std::string& where)
      : theory_(theory),
        graph_(theory.graph()),
        sizes_(std::move(sizes)),
        samples_(std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0})),
        parts_(static_cast<int>(sizes_.size())),
        own_(sizes_[part]),
        even_(std::count(sizes_.begin(), sizes_.end(), own_) == parts_),
        where_(where),
        ways_(graph_.values.size()) {
    MOTLEY_CHECK(parts_ >= 1 && theory.segments() == 1);
  }

  MicroBatch run() {
    out_.parts = parts_;
    if (parts_ == 1) return whole();
    find_early();
    cut_inputs();
    for (size_t n = 0; n < graph_.nodes.size(); ++n) reach(NodeId(n));
    demand_results();
    emit();
    return std::move(out_);
  }

 private:
  // One micro-batch is the step as it is.
  MicroBatch whole() {
    out_.graph = graph_;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) out_.node_of.emplace_back(n);
    out_.triples.assign(graph_.nodes.size(), -1);
    out_.inputs.resize(graph_.inputs.size());
    out_.random.resize(graph_.nodes.size());
    out_.updated_by_part.assign(graph_.buffers.size(), false);
    return std::move(out_);
  }

  // ---- what depends on the batch alone

  void find_early() {
    early_.assign(graph_.nodes.size(), false);
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      early_[n] = node.op != "motley::parameter" && node.op != "motley::buffer" &&
                  !(op != nullptr && op->random);
      for (ValueId v : graph_.inputs_of(node)) early_[n] = early_[n] && is_early(v);
    }
  }
  bool is_early(ValueId v) const { return early_[graph_.value(v).producer.index]; }

  // ---- the placements that a micro-batch can have a value in

  bool divides(ValueId v, Placement p) const {
    return !p.is_shard() || divides(theory_.cut_size(v, p));
  }
  // Whether every part gets a whole number of so many rows.
  bool divides(int64_t rows) const {
    if (even_) return divides(own_, rows);
    int64_t sum = 0;
    for (const int64_t size : sizes_)
      if (!divides(sum += size, rows)) return false;
    return true;
  }
  // samples_ divides part * rows, whose product may be beyond an integer.
  bool divides(int64_t part, int64_t rows) const {
    return rows % (samples_ / std::gcd(part, samples_)) == 0;
  }

  // Inputs are cut along their first dimension of as many rows as the batch; whole without one.
  void cut_inputs() {
    cut_.assign(graph_.inputs.size(), Placement::replicated());
    bool any = false;
    for (size_t i = 0; i < graph_.inputs.size(); ++i) {
      const ValueId v = graph_.inputs[i].value;
      const Shape& shape = graph_.spec(v).shape;
      const auto rows = std::find(shape.begin(), shape.end(), samples_);
      if (rows == shape.end()) continue;
      const Placement p = Placement::shard(static_cast<int>(rows - shape.begin()));
      if (!theory_.legal(v, p) || !divides(v, p))
        throw user_error("plan",
                         "{}: input {} has {} rows, which the model takes in groups that {} "
                         "micro-batches do not divide; give another number of micro-batches",
                         where_, graph_.inputs[i].name, samples_, parts_);
      cut_[i] = p;
      any = true;
    }
    if (!any)
      throw user_error("plan",
                       "{}: no input has a dimension of the batch, {}, along which micro-batches "
                       "could be cut; use one program (engine spmd)",
                       where_, samples_);
    for (size_t i = 0; i < graph_.inputs.size(); ++i)
      ways_[graph_.inputs[i].value.index][cut_[i]] = {Way::Kind::given, -1, 0};
  }

  void offer(ValueId v, Placement p, const Way& way) {
    auto [it, fresh] = ways_[v.index].try_emplace(p, way);
    if (!fresh && way.cost < it->second.cost) it->second = way;
  }
  const Way* way(ValueId v, Placement p) const {
    const auto it = ways_[v.index].find(p);
    return it == ways_[v.index].end() ? nullptr : &it->second;
  }

  void reach(NodeId id) {
    const Node& node = graph_.node(id);
    if (node.op == "motley::input") return;
    const ValueList inputs = graph_.inputs_of(node);
    const auto& triples = theory_.triples(id);
    for (size_t t = 0; t < triples.size(); ++t) {
      const Triple& triple = triples[t];
      if (!triple.kernel.empty() && !is_batch_norm(triple)) continue;
      if (is_source(node) && !triple.out[0].is_replicated()) continue;
      if (!divides(triple.cut)) continue;
      double cost = 0;
      for (size_t i = 0; i < inputs.size() && cost >= 0; ++i) {
        const Way* in = way(inputs[i], triple.in[i]);
        cost = in == nullptr ? -1 : std::max(cost, in->cost);
      }
      if (cost < 0) continue;
      for (size_t o = 0; o < node.outputs.size(); ++o)
        if (const ValueId v = node.outputs[o]; v.valid() && divides(v, result_of(triple, o)))
          offer(v, result_of(triple, o), {Way::Kind::triple, static_cast<int>(t), cost});
    }
    for (ValueId v : node.outputs)
      if (v.valid()) widen(id, v);
  }

  // What follows from the batch alone may be computed from all of it: whole, unless it is as cut as
  // the batch, and then in pieces. And one part in so many of a whole value is a term of it.
  void widen(NodeId id, ValueId v) {
    if (early_[id.index]) {
      const auto& ways = ways_[v.index];
      const bool rows = std::any_of(ways.begin(), ways.end(),
                                    [](const auto& way) { return way.first.is_shard(); });
      if (!rows) {
        offer(v, Placement::replicated(), {Way::Kind::given, -1, kGiven});
        for (Placement p : theory_.placements(v))
          if (p.is_shard() && divides(v, p)) offer(v, p, {Way::Kind::given, -1, kGiven});
      }
    }
    const TensorSpec& spec = graph_.spec(v);
    if (const Way* whole = way(v, Placement::replicated()); whole && is_float(spec.dtype))
      offer(v, Placement::partial(),
            {Way::Kind::scaled, -1, std::max(whole->cost, 1 + static_cast<double>(spec.numel()))});
  }

  // ---- what the step needs

  void demand_results() {
    needed_.assign(graph_.nodes.size(), {});
    demanded_.resize(graph_.values.size());
    auto result = [&](ValueId v, Placement p, const std::string& what) {
      if (!v.valid()) return;
      if (way(v, p) == nullptr) refuse(v, what);
      demanded_[v.index].insert(p);
    };
    result(graph_.loss, Placement::partial(), "the loss");
    for (const Parameter& p : graph_.parameters)
      result(p.gradient, Placement::partial(), "the gradient of " + p.name);
    for (const Buffer& b : graph_.buffers)
      result(b.update, Placement::replicated(), "the new value of " + b.name);
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      const Node& node = graph_.nodes[n];
      const ValueList inputs = graph_.inputs_of(node);
      for (ValueId v : node.outputs) {
        if (!v.valid()) continue;
        std::set<Placement>& wanted = demanded_[v.index];
        if (wanted.count(Placement::partial()) &&
            way(v, Placement::partial())->kind == Way::Kind::scaled)
          wanted.insert(Placement::replicated());
        for (Placement p : wanted) {
          const Way& w = *way(v, p);
          if (w.kind == Way::Kind::triple) needed_[n].insert(w.triple);
        }
      }
      for (int t : needed_[n])
        for (size_t i = 0; i < inputs.size(); ++i)
          demanded_[inputs[i].index].insert(theory_.triples(NodeId(n))[t].in[i]);
    }
  }

  // Names the first node, of those that a result follows from, that has its operands but no result.
  [[noreturn]] void refuse(ValueId result, const std::string& what) const {
    std::vector<bool> seen(graph_.nodes.size(), false);
    std::vector<NodeId> open = {graph_.value(result).producer};
    NodeId culprit;
    while (!open.empty()) {
      const NodeId id = open.back();
      open.pop_back();
      if (seen[id.index]) continue;
      seen[id.index] = true;
      bool has_operands = true;
      for (ValueId v : graph_.inputs_of(graph_.node(id))) {
        open.push_back(graph_.value(v).producer);
        has_operands = has_operands && !ways_[v.index].empty();
      }
      for (ValueId v : graph_.node(id).outputs)
        if (v.valid() && ways_[v.index].empty() && has_operands &&
            (!culprit.valid() || id < culprit))
          culprit = id;
    }
    if (culprit.valid() && find_op(graph_.node(culprit).op) == nullptr)
      throw user_error("plan",
                       "{}: the batch cannot be taken in {} micro-batches: {} is not known to "
                       "treat samples one by one; use one program (engine spmd)",
                       where_, parts_, describe_node(graph_, culprit));
    throw user_error(
        "plan",
        "{}: the batch cannot be taken in {} micro-batches: {} is not a sum over samples{}; use "
        "one program (engine spmd)",
        where_, parts_, what,
        culprit.valid() ? ", since samples are mixed by " + describe_node(graph_, culprit) : "");
  }

  // ---- the graph of one micro-batch

  void emit() {
    out_.graph.model = graph_.model;
    value_.resize(graph_.values.size());
    std::vector<bool> each(graph_.values.size(), false);  // differs between micro-batches
    std::vector<PartCut> cuts(graph_.inputs.size());
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (node.op == "motley::input") {
        for (size_t i = 0; i < cut_.size(); ++i)
          if (graph_.inputs[i].value == node.outputs[0]) {
            add_input(graph_.inputs[i].name, node.outputs[0], cut_[i], NodeId(n));
            cuts[i] = cut_of(node.outputs[0], cut_[i]);
          }
        continue;
      }
      if (node.op == "motley::parameter" || node.op == "motley::buffer") needed_[n].insert(0);
      for (int t : needed_[n]) emit_node(NodeId(n), t, &each);
      for (ValueId v : node.outputs)
        if (v.valid()) convert(v);
    }
    out_.inputs.insert(out_.inputs.begin(), cuts.begin(), cuts.end());
    roles(each);
    out_.before = before_of(given_);
  }

  void note(NodeId made, NodeId whole, PartCut random, int triple = -1) {
    MOTLEY_CHECK(static_cast<size_t>(made.index) == out_.node_of.size());
    out_.node_of.push_back(whole);
    out_.random.push_back(random);
    out_.triples.push_back(triple);
  }

  PartCut cut_of(ValueId v, Placement p) const {
    PartCut cut;
    if (!p.is_shard()) return cut;
    const auto& factors = theory_.factors(v);
    bool before = true;
    for (size_t d = 0; d < factors.size(); ++d)
      for (size_t k = 0; k < factors[d].size(); ++k) {
        if (d == p.dim && k == p.factor) {
          cut.size = factors[d][k];
          before = false;
        } else {
          (before ? cut.outer : cut.inner) *= factors[d][k];
        }
      }
    return cut;
  }
  double share() const { return static_cast<double>(own_) / static_cast<double>(samples_); }
  TensorSpec local_spec(ValueId v, Placement p) const {
    TensorSpec spec = graph_.spec(v);
    if (p.is_shard()) {
      const int64_t rows = theory_.cut_size(v, p);
      spec.shape[p.dim] = spec.shape[p.dim] / rows * (rows * own_ / samples_);
    }
    return spec;
  }

  void add_input(const std::string& name, ValueId v, Placement p, NodeId whole) {
    const NodeId id = out_.graph.add("motley::input", {name}, {local_spec(v, p)});
    note(id, whole, {});
    value_[v.index][p] = out_.graph.node(id).outputs[0];
  }

  void emit_node(NodeId id, int number, std::vector<bool>* each) {
    const Node& node = graph_.node(id);
    const Triple& triple = theory_.triples(id)[number];
    const ValueList inputs = graph_.inputs_of(node);
    std::vector<Shape> operand_shapes, result_shapes;
    for (size_t i = 0; i < inputs.size(); ++i)
      operand_shapes.push_back(local_spec(inputs[i], triple.in[i]).shape);
    std::vector<TensorSpec> specs;
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      const ValueId v = node.outputs[o];
      specs.push_back(v.valid() ? local_spec(v, triple.out[o]) : TensorSpec{DType::f32, {-1}});
      result_shapes.push_back(v.valid() ? specs.back().shape : Shape{});
    }
    std::vector<Arg> args = node.args;
    size_t next = 0;
    auto rename = [&](ValueId* v) {
      if (!v->valid()) return;
      *v = value_[v->index].at(triple.in[next++]);
    };
    for (Arg& arg : args) {
      if (auto v = std::get_if<ValueId>(&arg)) rename(v);
      if (auto list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list) rename(&v);
    }
    unbias(node, &args);
    const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
    if (op && op->size_arg >= 0) args[op->size_arg] = result_shapes[0];
    if (op && op->localize) op->localize({graph_, node, operand_shapes, result_shapes}, &args);
    const NodeId made = out_.graph.add(node.op, std::move(args), specs, node.phase);
    note(made, id, op && op->random ? cut_of(node.outputs[0], triple.out[0]) : PartCut(), number);
    bool differs = is_batch_norm(triple);
    if (differs) out_.by_part.push_back(id);
    for (ValueId v : inputs) differs = differs || (*each)[v.index];
    for (size_t o = 0; o < node.outputs.size(); ++o)
      if (const ValueId v = node.outputs[o]; v.valid()) {
        value_[v.index][result_of(triple, o)] = out_.graph.node(made).outputs[o];
        (*each)[v.index] = (*each)[v.index] || differs;
      }
  }

  // A running variance takes n / (n - 1) times that of n elements a channel, which are fewer in a
  // micro-batch: add(running, sub(pow(inverse deviation, -2), eps), weight).
  void unbias(const Node& node, std::vector<Arg>* args) const {
    if (node.op != "aten::add.Tensor" || node.args.size() < 3 ||
        !std::holds_alternative<double>(node.args[2]))
      return;
    auto made_by = [&](ValueId v, const char* op) -> const Node* {
      const Node& producer = graph_.node(graph_.value(v).producer);
      return producer.op == op ? &producer : nullptr;
    };
    const Node* biased = made_by(graph_.inputs_of(node).back(), "aten::sub.Tensor");
    const Node* squared =
        biased ? made_by(graph_.inputs_of(*biased)[0], "aten::pow.Tensor_Scalar") : nullptr;
    const Node* norm =
        squared ? made_by(graph_.inputs_of(*squared)[0], "aten::native_batch_norm") : nullptr;
    if (norm == nullptr || graph_.inputs_of(*squared)[0] != norm->outputs[2]) return;
    const TensorSpec& x = graph_.spec(graph_.inputs_of(*norm)[0]);
    const double n = static_cast<double>(x.numel() / x.shape[1]), part = n * share();
    if (part <= 1) return;
    (*args)[2] = std::get<double>(node.args[2]) * (part / (part - 1)) / (n / (n - 1));
  }

  // What a node's result is made into: given values come in as inputs, and of whole values one part
  // in so many is a term.
  void convert(ValueId v) {
    for (Placement p : demanded_[v.index]) {
      if (way(v, p)->kind != Way::Kind::given) continue;
      add_input(fmt::format("before %{} {}", v.index, to_string(p)), v, p, NodeId());
      out_.inputs.push_back(cut_of(v, p));
      given_.push_back({v, p});
    }
    if (!demanded_[v.index].count(Placement::partial()) ||
        way(v, Placement::partial())->kind != Way::Kind::scaled)
      return;
    const Phase phase = graph_.node(graph_.value(v).producer).phase;
    const NodeId id =
        out_.graph.add("aten::mul.Tensor", {value_[v.index].at(Placement::replicated()), share()},
                       {graph_.spec(v)}, phase);
    note(id, NodeId(), {});
    value_[v.index][Placement::partial()] = out_.graph.node(id).outputs[0];
  }

  void roles(const std::vector<bool>& each) {
    auto at = [&](ValueId v, Placement p) { return v.valid() ? value_[v.index].at(p) : ValueId(); };
    constexpr auto r = Placement::replicated();
    constexpr auto p = Placement::partial();
    for (const Parameter& parameter : graph_.parameters)
      out_.graph.parameters.push_back(
          {parameter.name, at(parameter.value, r), at(parameter.gradient, p)});
    for (const Buffer& b : graph_.buffers) {
      out_.graph.buffers.push_back({b.name, at(b.value, r), at(b.update, r)});
      out_.updated_by_part.push_back(b.update.valid() && each[b.update.index]);
    }
    out_.graph.loss = at(graph_.loss, p);
    for (const Input& i : graph_.inputs)
      out_.graph.inputs.push_back({i.name, value_[i.value.index].begin()->second});
    for (const auto& [v, placement] : given_) {
      const ValueId made = value_[v.index].at(placement);
      const Node& source = out_.graph.node(out_.graph.value(made).producer);
      out_.graph.inputs.push_back({std::get<std::string>(source.args[0]), made});
    }
  }

  // The nodes of the step that make these values from the inputs.
  Graph before_of(const std::vector<std::pair<ValueId, Placement>>& wanted) const {
    Graph g;
    g.model = graph_.model;
    if (wanted.empty()) return g;
    std::vector<bool> need(graph_.nodes.size(), false);
    for (const auto& [v, p] : wanted) need[graph_.value(v).producer.index] = true;
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      if (!need[n]) continue;
      for (ValueId v : graph_.inputs_of(graph_.nodes[n]))
        need[graph_.value(v).producer.index] = true;
    }
    std::vector<ValueId> local(graph_.values.size());
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!need[n]) continue;
      const Node& node = graph_.nodes[n];
      std::vector<Arg> args = node.args;
      for (Arg& arg : args) {
        if (auto v = std::get_if<ValueId>(&arg); v && v->valid()) *v = local[v->index];
        if (auto list = std::get_if<std::vector<ValueId>>(&arg))
          for (ValueId& v : *list)
            if (v.valid()) v = local[v.index];
      }
      std::vector<TensorSpec> specs;
      for (ValueId v : node.outputs)
        specs.push_back(v.valid() ? graph_.spec(v) : TensorSpec{DType::f32, {-1}});
      const NodeId id = g.add(node.op, std::move(args), specs);
      for (size_t o = 0; o < node.outputs.size(); ++o)
        if (node.outputs[o].valid()) local[node.outputs[o].index] = g.node(id).outputs[o];
    }
    for (const Input& i : graph_.inputs)
      if (local[i.value.index].valid()) g.inputs.push_back({i.name, local[i.value.index]});
    for (const auto& [v, p] : wanted) g.outputs.push_back(local[v.index]);
    return g;
  }

  const Theory& theory_;
  const Graph& graph_;
  const std::vector<int64_t> sizes_;  // [part]
  const int64_t samples_;
  const int parts_;
  const int64_t own_;  // samples of this part
  const bool even_;    // all parts have as many
  const std::string& where_;
  std::vector<bool> early_;                           // [node] follows from the batch alone
  std::vector<Placement> cut_;                        // [input]
  std::vector<std::map<Placement, Way>> ways_;        // [value]
  std::vector<std::set<int>> needed_;                 // [node] triples
  std::vector<std::set<Placement>> demanded_;         // [value]
  std::vector<std::map<Placement, ValueId>> value_;   // [value of the step] in `out_`
  std::vector<std::pair<ValueId, Placement>> given_;  // of the step, computed before
  MicroBatch out_;
};

}  // namespace

std::string describe_node(const Graph& graph, NodeId id) {
  const Node& node = graph.node(id);
  std::vector<std::string> operands, results;
  for (ValueId v : graph.inputs_of(node)) operands.push_back(to_string(graph.spec(v)));
  for (ValueId v : node.outputs)
    if (v.valid()) results.push_back(to_string(graph.spec(v)));
  return fmt::format("node {}, {}({}) : {}", id.index, node.op, fmt::join(operands, ", "),
                     fmt::join(results, ", "));
}

std::string normalised_by_part(const Graph& whole, const MicroBatch& part) {
  const auto count = std::count_if(part.by_part.begin(), part.by_part.end(), [&](NodeId id) {
    return whole.node(id).phase == Phase::forward;
  });
  return fmt::format("{} batch normalisation{} see{} one of {} micro-batches at a time", count,
                     count == 1 ? "" : "s", count == 1 ? "s" : "", part.parts);
}

MicroBatch micro_batch_of(const Theory& whole, int64_t samples, int parts,
                          const std::string& where) {
  if (samples % parts != 0)
    throw user_error("plan", "{}: a batch of {} has no {} equal micro-batches", where, samples,
                     parts);
  return Divider(whole, std::vector<int64_t>(parts, samples / parts), 0, where).run();
}

MicroBatch part_of_batch(const Theory& whole, const std::vector<int64_t>& sizes, size_t part,
                         const std::string& where) {
  return Divider(whole, sizes, part, where).run();
}

}  // namespace motley

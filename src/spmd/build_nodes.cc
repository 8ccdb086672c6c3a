// The nodes of a problem and their options.
#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "core/error.h"
#include "core/infinity.h"
#include "spmd/build.h"

namespace motley::spmd {

using namespace solver;

namespace {

bool cuts_batch(Restriction restriction) {
  return restriction == Restriction::data_parallel || restriction == Restriction::zero ||
         restriction == Restriction::gathered_parameters ||
         restriction == Restriction::expert_parallel;
}

}  // namespace

bool ProblemBuilder::is_expert(ValueId source) const {
  const Graph& graph = theory_.graph();
  if (graph.spec(source).shape.size() != 3) return false;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (graph.nodes[n].op != "aten::bmm") continue;
    for (ValueId v : inputs(NodeId(static_cast<int64_t>(n))))
      if (class_of_[v.index] == class_of_[source.index]) return true;
  }
  return false;
}

bool ProblemBuilder::is_matrix(ValueId source) const {
  const Graph& graph = theory_.graph();
  if (graph.spec(source).shape.size() < 2) return false;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (is_source(graph.nodes[n])) continue;
    const OpDef* op = find_op(graph.nodes[n].op);
    if (graph.nodes[n].phase == Phase::backward || !op || !op->flops ||
        op->flops(graph, graph.nodes[n]) <= 0)
      continue;
    for (ValueId v : inputs(NodeId(static_cast<int64_t>(n))))
      if (class_of_[v.index] == class_of_[source.index]) return true;
  }
  return false;
}

std::vector<Placement> ProblemBuilder::stored_choices(ValueId source) const {
  std::vector<Placement> choices;
  if (restriction_ == Restriction::expert_parallel)
    return {is_expert(source) ? Placement::shard(0) : Placement::replicated()};
  const std::vector<Triple>& triples = theory_.triples(theory_.graph().value(source).producer);
  for (Placement p : theory_.placements(source)) {
    if (std::none_of(triples.begin(), triples.end(), [&](auto& t) { return t.out[0] == p; }))
      continue;
    if (p.is_partial()) continue;
    if (p.is_shard() && restriction_ == Restriction::data_parallel) continue;
    choices.push_back(p);
  }
  // ZeRO: everything that can be cut is. Tensor parallelism: what is multiplied.
  if (choices.size() > 1 &&
      (restriction_ == Restriction::zero || restriction_ == Restriction::gathered_parameters ||
       (restriction_ == Restriction::cut_matrices && is_matrix(source))))
    choices.erase(choices.begin());
  return choices;
}

// Nodes of equal options share a table, which is found by a key: all that the options depend on.
class ProblemBuilder::NodeAdder {
 public:
  explicit NodeAdder(ProblemBuilder* builder)
      : builder_(*builder),
        theory_(builder->theory_),
        graph_(theory_.graph()),
        problem_(builder->problem_),
        class_of_(builder->class_of_),
        is_output_(graph_.values.size()),
        parameters_(graph_.parameters.size()),
        buffers_(graph_.buffers.size()) {
    builder_.makers_.assign(builder_.classes_.size(), -1);
    make_form_keys();
    for (size_t p = 0; p < graph_.parameters.size(); ++p)
      role_[graph_.parameters[p].value] = {static_cast<int>(p), -1};
    for (size_t b = 0; b < graph_.buffers.size(); ++b)
      role_[graph_.buffers[b].value] = {-1, static_cast<int>(b)};
    for (const Input& i : graph_.inputs) inputs_.insert(i.value);
    for (ValueId v : graph_.outputs) is_output_[v.index] = true;
  }

  void run() {
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (builder_.contracted_[n])
        add_outputs(graph_.nodes[n]);
      else if (is_source(graph_.nodes[n]))
        add_source(NodeId(n));
      else
        add_operator(NodeId(n));
    }
    for (size_t p = 0; p < parameters_.size(); ++p)
      add_update(parameters_[p], static_cast<int>(p), -1);
    for (size_t b = 0; b < buffers_.size(); ++b) add_update(buffers_[b], -1, static_cast<int>(b));
    if (graph_.loss.valid()) add_goal();
  }

 private:
  // A parameter or buffer that the step changes; `result` is its gradient, or what it becomes.
  struct Stored {
    ValueId value, result;
    int token;
    std::vector<Placement> choices;
  };

  // Values whose placements are the same forms have the same key.
  void make_form_keys() {
    std::unordered_map<std::string, int> numbers;
    form_keys_.resize(graph_.values.size());
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      std::string forms;
      for (int f : builder_.form_numbers(ValueId(v))) forms += static_cast<char>(f);
      const int number =
          numbers.try_emplace(std::move(forms), static_cast<int>(numbers.size())).first->second;
      form_keys_[v] = std::to_string(number) + ";";
    }
  }
  const std::string& forms_key(ValueId v) const { return form_keys_[v.index]; }
  uint8_t form_of(ValueId v, Placement p) const {
    return static_cast<uint8_t>(builder_.form_of(v, p));
  }

  int table_for(const std::string& key,
                const std::function<void(OptionTable*, OptionOrigin*)>& fill) {
    auto [it, fresh] = known_.try_emplace(key, static_cast<int>(problem_.option_tables.size()));
    if (fresh) {
      problem_.option_tables.emplace_back();
      builder_.option_origins_.emplace_back();
      builder_.table_exemplar_.push_back(static_cast<int>(problem_.nodes.size()));
      fill(&problem_.option_tables.back(), &builder_.option_origins_.back());
      for (Option& o : problem_.option_tables.back().options) {
        o.compute.assign(problem_.types, 0);
        o.memory.assign(problem_.types, 0);
      }
    }
    return it->second;
  }

  void add_node(int table, std::vector<int> inputs, std::vector<int> outputs, bool backward,
                Source source) {
    ProblemNode node;
    node.table = table;
    node.inputs = std::move(inputs);
    node.outputs = std::move(outputs);
    node.backward = backward;
    for (int v : node.outputs)
      if (v < static_cast<int>(builder_.makers_.size()))
        builder_.makers_[v] = static_cast<int>(problem_.nodes.size());
    problem_.nodes.push_back(std::move(node));
    builder_.sources_.push_back(source);
    builder_.table_begin_.resize(problem_.option_tables.size(), kNever);
    builder_.table_last_.resize(problem_.option_tables.size(), -1);
    if (!source.node.valid()) return;
    int64_t &begin = builder_.table_begin_[table], &last = builder_.table_last_[table];
    begin = std::min<int64_t>(begin, source.node.index);
    last = std::max<int64_t>(last, source.node.index);
  }

  // A value without conversions whose form k is "stored in choice k".
  int add_token(int choices) {
    auto [it, fresh] =
        token_tables_.try_emplace(choices, static_cast<int>(problem_.form_tables.size()));
    if (fresh) {
      FormTable table;
      table.forms = choices;
      table.convert.assign(choices * choices, kInfinity);
      for (int i = 0; i < choices; ++i) table.convert[i * choices + i] = 0;
      problem_.form_tables.push_back(std::move(table));
      builder_.table_class_.push_back(-1);
    }
    problem_.value_table.push_back(it->second);
    return static_cast<int>(problem_.value_table.size()) - 1;
  }

  // A reader for each result of a node that is an output of the graph.
  void add_outputs(const Node& node) {
    for (ValueId v : node.outputs) {
      if (!v.valid() || !is_output_[v.index]) continue;
      int table = table_for("output|" + forms_key(v), [&](OptionTable* t, OptionOrigin* origin) {
        const auto placements = builder_.placements(v);
        std::set<int> forms;
        for (size_t i = 0; i < placements.size(); ++i)
          if (int f = builder_.form_numbers(v)[i]; f >= 0 && !placements[i].is_partial())
            forms.insert(f);
        for (int f : forms) {
          Option o;
          o.in = {static_cast<uint8_t>(f)};
          t->options.push_back(o);
          origin->triple.push_back(0);
        }
      });
      add_node(table, {class_of_[v.index]}, {}, node.phase == Phase::backward,
               {Origin::output, NodeId(), v});
    }
  }

  void add_source(NodeId n) {
    const Node& node = graph_.node(n);
    Source source{Origin::node, n};
    ValueId result;
    if (auto it = role_.find(node.outputs[0]); it != role_.end()) {
      source.parameter = it->second.first;
      source.buffer = it->second.second;
      result = source.parameter >= 0 ? graph_.parameters[source.parameter].gradient
                                     : graph_.buffers[source.buffer].update;
    }
    if (result.valid()) {
      add_stored(source, result);
      return;
    }
    if (is_received(node) && builder_.restriction_ == Restriction::none)
      add_received(source);
    else
      add_read(source);
    add_outputs(node);
  }

  // A parameter or buffer that the step changes: stored in one placement, fixed by a token.
  void add_stored(const Source& source, ValueId result) {
    const ValueId v = graph_.node(source.node).outputs[0];
    const auto& triples = theory_.triples(source.node);
    Stored stored{v, result, 0, builder_.stored_choices(v)};
    std::erase_if(stored.choices, [&](Placement p) {
      return builder_.form_of(v, p) < 0 || builder_.form_of(result, p) < 0;
    });
    stored.token = add_token(static_cast<int>(stored.choices.size()));
    std::string key = fmt::format("stored{}|{}|{}|{}|{}", source.parameter >= 0 ? "p" : "b",
                                  graph_.spec(v).bytes(), graph_.spec(result).bytes(),
                                  theory_.segment(v), forms_key(v));
    for (Placement p : stored.choices)
      key += fmt::format("{}:{},", to_string(p), p.is_shard() ? theory_.cut_size(v, p) : 0);
    int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
      for (size_t k = 0; k < stored.choices.size(); ++k) {
        Option o;
        o.out = {form_of(v, stored.choices[k]), static_cast<uint8_t>(k)};
        t->options.push_back(o);
        for (size_t i = 0; i < triples.size(); ++i)
          if (triples[i].out[0] == stored.choices[k]) origin->triple.push_back(static_cast<int>(i));
      }
      MOTLEY_CHECK(origin->triple.size() == t->options.size());
    });
    add_node(table, {}, {class_of_[v.index], stored.token}, false, source);
    (source.parameter >= 0 ? parameters_[source.parameter] : buffers_[source.buffer]) =
        std::move(stored);
  }

  // What another stage sends comes whole or in pieces.
  void add_received(const Source& source) {
    const Node& node = graph_.node(source.node);
    const ValueId v = node.outputs[0];
    const auto& triples = theory_.triples(source.node);
    std::string key =
        fmt::format("received|{}|{}|{}", graph_.spec(v).bytes(), theory_.segment(v), forms_key(v));
    for (const Triple& triple : triples)
      if (const Placement p = triple.out[0]; p.is_shard())
        key += fmt::format("{}:{},", to_string(p), theory_.cut_size(v, p));
    const int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
      for (const bool whole : {true, false})
        for (size_t i = 0; i < triples.size(); ++i) {
          const Placement p = triples[i].out[0];
          if (p.is_partial() || p.is_replicated() != whole || builder_.form_of(v, p) < 0) continue;
          Option o;
          o.out = {form_of(v, p)};
          t->options.push_back(o);
          origin->triple.push_back(static_cast<int>(i));
        }
    });
    add_node(table, {}, {class_of_[v.index]}, node.phase == Phase::backward, source);
  }

  // What the step only reads. Whole is enough: pieces of it are free. A cut batch is a restriction.
  void add_read(const Source& source) {
    const Node& node = graph_.node(source.node);
    const ValueId v = node.outputs[0];
    const auto& triples = theory_.triples(source.node);
    const bool cut = inputs_.count(v) && cuts_batch(builder_.restriction_);
    bool batched = cut && theory_.legal(v, Placement::shard(0));
    const Placement made = batched ? Placement::shard(0) : Placement::replicated();
    const auto triple = std::find_if(triples.begin(), triples.end(),
                                     [&](const Triple& t) { return t.out[0] == made; });
    MOTLEY_CHECK(triple != triples.end());
    const int number = static_cast<int>(triple - triples.begin());
    // Which form that is differs from value to value.
    const int form = builder_.form_of(v, made);
    const int table = table_for(fmt::format("source|{}|{}", form, number),
                                [&](OptionTable* t, OptionOrigin* origin) {
                                  Option o;
                                  o.out = {static_cast<uint8_t>(form)};
                                  t->options.push_back(o);
                                  origin->triple.push_back(number);
                                });
    add_node(table, {}, {class_of_[v.index]}, node.phase == Phase::backward, source);
  }

  void add_operator(NodeId n) {
    const Node& node = graph_.node(n);
    const auto& triples = theory_.triples(n);
    std::vector<int> inputs, outputs;
    std::string key = std::to_string(theory_.table(n)) + "|";
    if (const int of = builder_.part_of(n.index)) key += fmt::format("p{}|", of);
    const auto operands = builder_.inputs(n);
    for (ValueId v : operands) {
      inputs.push_back(class_of_[v.index]);
      key += forms_key(v);
    }
    key += "|";
    for (ValueId v : node.outputs) {
      if (!v.valid()) continue;
      outputs.push_back(class_of_[v.index]);
      key += forms_key(v);
      if (builder_.classes_[class_of_[v.index]].saved) key += 's';
    }
    int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
      for (size_t i = 0; i < triples.size(); ++i) {
        Option o;
        bool known_forms = true;
        auto put = [&](std::vector<uint8_t>* list, ValueId v, Placement p) {
          int f = builder_.form_of(v, p);
          known_forms = known_forms && f >= 0;
          list->push_back(static_cast<uint8_t>(std::max(f, 0)));
        };
        for (size_t k = 0; k < operands.size(); ++k) put(&o.in, operands[k], triples[i].in[k]);
        for (size_t k = 0; k < node.outputs.size(); ++k)
          if (node.outputs[k].valid()) put(&o.out, node.outputs[k], triples[i].out[k]);
        if (!known_forms) continue;
        t->options.push_back(std::move(o));
        origin->triple.push_back(static_cast<int>(i));
      }
    });
    add_node(table, std::move(inputs), std::move(outputs), node.phase == Phase::backward,
             {Origin::node, n});
    add_outputs(node);
  }

  // The gradient comes in the placement that the token names.
  void add_update(const Stored& s, int parameter, int buffer) {
    if (!s.result.valid()) return;
    std::string key = fmt::format("update{}|{}", parameter >= 0 ? "p" : "b", forms_key(s.result));
    for (Placement p : s.choices) key += to_string(p);
    int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
      for (size_t k = 0; k < s.choices.size(); ++k) {
        Option o;
        o.in = {static_cast<uint8_t>(k), form_of(s.result, s.choices[k])};
        t->options.push_back(o);
        origin->triple.push_back(static_cast<int>(k));
      }
    });
    add_node(table, {s.token, class_of_[s.result.index]}, {}, true,
             {Origin::update, NodeId(), {}, parameter, buffer});
  }

  // The loss is read whole or as partial sums.
  void add_goal() {
    int table =
        table_for("goal|" + forms_key(graph_.loss), [&](OptionTable* t, OptionOrigin* origin) {
          for (Placement p : {Placement::replicated(), Placement::partial()}) {
            int f = builder_.form_of(graph_.loss, p);
            if (f < 0) continue;
            Option o;
            o.in = {static_cast<uint8_t>(f)};
            t->options.push_back(o);
            origin->triple.push_back(0);
          }
        });
    add_node(table, {class_of_[graph_.loss.index]}, {}, true, {Origin::goal, NodeId()});
  }

  ProblemBuilder& builder_;
  const Theory& theory_;
  const Graph& graph_;
  Problem& problem_;
  const std::vector<int>& class_of_;

  std::unordered_map<std::string, int> known_;   // option tables by key
  std::map<int, int> token_tables_;              // form tables by choices
  std::vector<std::string> form_keys_;           // [graph value]
  std::map<ValueId, std::pair<int, int>> role_;  // source value -> (parameter, buffer)
  std::set<ValueId> inputs_;                     // of the graph
  std::vector<bool> is_output_;                  // [graph value]
  std::vector<Stored> parameters_, buffers_;
};

void ProblemBuilder::add_nodes() { NodeAdder(this).run(); }

}  // namespace motley::spmd

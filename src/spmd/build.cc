#include "spmd/build.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>

#include "core/error.h"
#include "core/infinity.h"

namespace motley::spmd {

using namespace solver;

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

int find_root(std::vector<int>& parent, int x) {
  while (parent[x] != x) x = parent[x] = parent[parent[x]];
  return x;
}

}  // namespace

ProblemBuilder::ProblemBuilder(const Theory& theory, const CostModel& model, Optimizer optimizer,
                               Restriction restriction, std::vector<int64_t> parts,
                               std::vector<ValueId> separate)
    : theory_(theory),
      model_(model),
      optimizer_(optimizer),
      restriction_(restriction),
      parts_(std::move(parts)),
      separate_(std::move(separate)) {
  problem_.types = model.types();
  contract();
  add_values();
  add_nodes();
}

int ProblemBuilder::form_of(ValueId value, Placement placement) const {
  const auto list = placements(value);
  auto it = std::find(list.begin(), list.end(), placement);
  return it == list.end() ? -1 : form_numbers(value)[it - list.begin()];
}

bool ProblemBuilder::is_received(const Node& node) {
  if (node.op != "motley::input" || node.args.empty()) return false;
  const std::string* name = std::get_if<std::string>(&node.args[0]);
  return name != nullptr && name->starts_with('%');
}

void ProblemBuilder::contract() {
  const Graph& graph = theory_.graph();
  contracted_.assign(graph.nodes.size(), false);
  for (const Node& node : graph.nodes) {
    first_input_.push_back(static_cast<int>(inputs_.size()));
    for (const Arg& arg : node.args) {
      if (auto one = std::get_if<ValueId>(&arg)) {
        if (one->valid()) inputs_.push_back(*one);
      } else if (auto list = std::get_if<std::vector<ValueId>>(&arg)) {
        for (ValueId v : *list)
          if (v.valid()) inputs_.push_back(v);
      }
    }
  }
  first_input_.push_back(static_cast<int>(inputs_.size()));
  class_of_.assign(graph.values.size(), -1);
  first_placement_.push_back(0);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    for (Placement p : theory_.placements(ValueId(v))) placements_.push_back(p);
    first_placement_.push_back(static_cast<int>(placements_.size()));
  }
  std::vector<int> parent(placements_.size());
  std::iota(parent.begin(), parent.end(), 0);
  auto pair_of = [&](ValueId v, Placement p) {
    const auto list = placements(v);
    auto it = std::find(list.begin(), list.end(), p);
    return it == list.end() ? -1 : first_placement_[v.index] + static_cast<int>(it - list.begin());
  };
  std::vector<ValueId> next(graph.values.size()), last;  // members of a class, as a list
  std::vector<int> depth(graph.values.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const OpDef* op = find_op(node.op);
    const auto inputs = this->inputs(NodeId(static_cast<int64_t>(n)));
    bool alias = op && op->alias && inputs.size() == 1 && node.outputs.size() == 1 &&
                 node.outputs[0].valid() &&
                 graph.spec(inputs[0]).numel() == graph.spec(node.outputs[0]).numel();
    if (alias) {
      contracted_[n] = true;
      ValueId v = node.outputs[0];
      class_of_[v.index] = class_of_[inputs[0].index];
      ValueId& end = last[class_of_[v.index]];
      next[end.index] = v;
      end = v;
      depth[v.index] = depth[inputs[0].index] + 1;
      for (const Triple& t : theory_.triples(NodeId(n))) {
        int a = pair_of(inputs[0], t.in[0]), b = pair_of(v, t.out[0]);
        if (a >= 0 && b >= 0) parent[find_root(parent, a)] = find_root(parent, b);
      }
      continue;
    }
    for (ValueId v : node.outputs) {
      if (!v.valid()) continue;
      class_of_[v.index] = static_cast<int>(classes_.size());
      classes_.push_back({v});
      last.push_back(v);
    }
  }
  form_numbers_.assign(placements_.size(), -1);
  held_.reserve(placements_.size());
  std::vector<int> roots;  // [form of the class] in the union-find
  std::vector<std::vector<Held>> members(kMaxForms);
  for (Class& c : classes_) {
    roots.clear();
    c.begin = static_cast<int>(forms_.size());
    for (ValueId v = c.root; v.valid(); v = next[v.index]) {
      const auto list = placements(v);
      for (size_t i = 0; i < list.size(); ++i) {
        const int number = first_placement_[v.index] + static_cast<int>(i);
        const int root = find_root(parent, number);
        const size_t form = std::find(roots.begin(), roots.end(), root) - roots.begin();
        if (form == roots.size()) {
          // More placements than a search state holds: the rarest are not used.
          if (form == kMaxForms) continue;
          roots.push_back(root);
          forms_.push_back({v, 0, 0});
        }
        Form& f = forms_[c.begin + form];
        if (depth[v.index] < depth[f.top.index]) f.top = v;
        members[form].push_back({v, list[i]});
        form_numbers_[number] = static_cast<int>(form);
      }
    }
    c.end = static_cast<int>(forms_.size());
    for (int form = c.begin; form < c.end; ++form) {
      auto& list = members[form - c.begin];
      forms_[form].begin = static_cast<int>(held_.size());
      held_.insert(held_.end(), list.begin(), list.end());
      forms_[form].end = static_cast<int>(held_.size());
      list.clear();
    }
  }
  for (ValueId v : saved_activations(graph)) {
    Class& c = classes_[class_of_[v.index]];
    c.saved = !is_source(graph.node(graph.value(c.root).producer));
  }
  // Conversions run where their result is first read; of gradients and outputs also right after
  // their maker.
  for (Class& c : classes_) c.use = kNever;
  auto used = [&](ValueId v, int64_t node) {
    int64_t& use = classes_[class_of_[v.index]].use;
    use = std::min(use, node);
  };
  for (size_t n = 0; n < graph.nodes.size(); ++n)
    if (!contracted_[n])
      for (ValueId v : inputs(NodeId(static_cast<int64_t>(n)))) used(v, static_cast<int64_t>(n));
  auto used_at_once = [&](ValueId v) {
    int64_t node = ready(v);
    while (node < static_cast<int64_t>(graph.nodes.size()) && contracted_[node]) ++node;
    used(v, node);
  };
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) used_at_once(p.gradient);
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) used_at_once(b.update);
  for (ValueId v : graph.outputs) used_at_once(v);
  if (graph.loss.valid()) used_at_once(graph.loss);
  const std::vector<bool> pure = pure_gradients(graph);
  for (const Class& c : classes_) gradient_class_.push_back(pure[c.root.index]);
  gradient_view_.assign(classes_.size(), false);
  for (size_t v = 0; v < pure.size(); ++v)
    if (pure[v]) gradient_view_[class_of_[v]] = true;
}

void ProblemBuilder::add_values() {
  const Graph& graph = theory_.graph();
  std::unordered_map<std::string, int> known;
  for (size_t c = 0; c < classes_.size(); ++c) {
    const Class& cls = classes_[c];
    // All that prices depend on: size, and per form its cut and where it may be converted.
    std::string key = std::to_string(graph.spec(cls.root).bytes());
    key += gradient_class_[c] ? 'g' : gradient_view_[c] ? 'v' : '|';
    const bool by_parameter = restriction_ == Restriction::gathered_parameters ||
                              restriction_ == Restriction::cut_matrices;
    if (by_parameter && is_parameter(static_cast<int>(c))) key += 'w';
    if (const int segment = theory_.segment(cls.root)) key += std::to_string(segment) + ",";
    if (const int of = gradient_view_[c] ? part_of(maker_of(static_cast<int>(c)) + 1) : 0)
      key += fmt::format("m{},", of);
    if (const int of = part_of(cls.use)) key += fmt::format("u{},", of);
    if (std::find(separate_.begin(), separate_.end(), cls.root) != separate_.end())
      key += fmt::format("a{},", cls.root.index);
    auto has = [&](const Form& form, ValueId member) {
      const auto list = held(form);
      return std::any_of(list.begin(), list.end(),
                         [&](const auto& m) { return m.first == member; });
    };
    const auto all = forms(cls);
    std::array<bool, kMaxForms> at_root{};
    for (size_t f = 0; f < all.size(); ++f) at_root[f] = has(all[f], cls.root);
    for (const Form& f : all) {
      auto [v, p] = held(f)[0];
      key += "rps"[static_cast<int>(p.kind)];
      if (p.is_shard()) key += std::to_string(theory_.cut_size(v, p));
      key += f.top == cls.root ? ':' : '/';
      for (size_t g = 0; g < all.size(); ++g)
        key += (f.top == cls.root ? at_root[g] : has(all[g], f.top)) ? '1' : '0';
    }
    auto [it, fresh] = known.try_emplace(key, static_cast<int>(problem_.form_tables.size()));
    if (fresh) {
      FormTable table;
      table.forms = static_cast<int>(all.size());
      table.convert.assign(table.forms * table.forms, kInfinity);
      problem_.form_tables.push_back(std::move(table));
      table_class_.push_back(static_cast<int>(c));
    }
    problem_.value_table.push_back(it->second);
    table_first_.resize(problem_.form_tables.size(), kNever);
    table_use_.resize(problem_.form_tables.size(), kNever);
    int64_t &first = table_first_[it->second], &use = table_use_[it->second];
    if (gradient_view_[c]) first = std::min(first, maker_of(static_cast<int>(c)) + 1);
    use = std::min(use, cls.use);
  }
}

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

bool ProblemBuilder::is_parameter(int value) const {
  const Graph& graph = theory_.graph();
  for (ValueId v = classes_[value].root;;) {
    const Node& producer = graph.node(graph.value(v).producer);
    if (producer.op == "motley::parameter") return true;
    const OpDef* op = find_op(producer.op);
    const std::vector<ValueId> read = graph.inputs_of(producer);
    if (read.empty() || !(producer.op == "aten::_to_copy" || (op && op->alias))) return false;
    v = read[0];
  }
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

namespace {

bool cuts_batch(Restriction restriction) {
  return restriction == Restriction::data_parallel || restriction == Restriction::zero ||
         restriction == Restriction::gathered_parameters ||
         restriction == Restriction::expert_parallel;
}

}  // namespace

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

void ProblemBuilder::add_nodes() {
  const Graph& graph = theory_.graph();
  std::unordered_map<std::string, int> known;
  auto table_for = [&](const std::string& key,
                       const std::function<void(OptionTable*, OptionOrigin*)>& fill) {
    auto [it, fresh] = known.try_emplace(key, static_cast<int>(problem_.option_tables.size()));
    if (fresh) {
      problem_.option_tables.emplace_back();
      option_origins_.emplace_back();
      table_exemplar_.push_back(static_cast<int>(problem_.nodes.size()));
      fill(&problem_.option_tables.back(), &option_origins_.back());
      for (Option& o : problem_.option_tables.back().options) {
        o.compute.assign(problem_.types, 0);
        o.memory.assign(problem_.types, 0);
      }
    }
    return it->second;
  };
  // Values whose placements are the same forms have the same key.
  std::unordered_map<std::string, int> numbers;
  std::vector<std::string> form_keys(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v) {
    std::string forms;
    for (int f : form_numbers(ValueId(v))) forms += static_cast<char>(f);
    const int number =
        numbers.try_emplace(std::move(forms), static_cast<int>(numbers.size())).first->second;
    form_keys[v] = std::to_string(number) + ";";
  }
  auto forms_key = [&](ValueId v) -> const std::string& { return form_keys[v.index]; };
  auto add_node = [&](int table, std::vector<int> inputs, std::vector<int> outputs, bool backward,
                      Source source) {
    ProblemNode node;
    node.table = table;
    node.inputs = std::move(inputs);
    node.outputs = std::move(outputs);
    node.backward = backward;
    for (int v : node.outputs)
      if (v < static_cast<int>(makers_.size()))
        makers_[v] = static_cast<int>(problem_.nodes.size());
    problem_.nodes.push_back(std::move(node));
    sources_.push_back(source);
    table_begin_.resize(problem_.option_tables.size(), kNever);
    table_last_.resize(problem_.option_tables.size(), -1);
    if (!source.node.valid()) return;
    table_begin_[table] = std::min<int64_t>(table_begin_[table], source.node.index);
    table_last_[table] = std::max<int64_t>(table_last_[table], source.node.index);
  };
  // A value without conversions whose form k is "stored in choice k".
  std::map<int, int> token_tables;
  auto add_token = [&](int choices) {
    auto [it, fresh] =
        token_tables.try_emplace(choices, static_cast<int>(problem_.form_tables.size()));
    if (fresh) {
      FormTable table;
      table.forms = choices;
      table.convert.assign(choices * choices, kInfinity);
      for (int i = 0; i < choices; ++i) table.convert[i * choices + i] = 0;
      problem_.form_tables.push_back(std::move(table));
      table_class_.push_back(-1);
    }
    problem_.value_table.push_back(it->second);
    return static_cast<int>(problem_.value_table.size()) - 1;
  };
  struct Stored {
    ValueId value, result;
    int token;
    std::vector<Placement> choices;
  };
  makers_.assign(classes_.size(), -1);
  std::vector<Stored> parameters(graph.parameters.size()), buffers(graph.buffers.size());
  std::map<ValueId, std::pair<int, int>> role;  // source value -> (parameter, buffer)
  for (size_t p = 0; p < graph.parameters.size(); ++p)
    role[graph.parameters[p].value] = {static_cast<int>(p), -1};
  for (size_t b = 0; b < graph.buffers.size(); ++b)
    role[graph.buffers[b].value] = {-1, static_cast<int>(b)};
  std::set<ValueId> cut_inputs;
  for (const Input& i : graph.inputs) cut_inputs.insert(i.value);

  std::vector<bool> is_output(graph.values.size());
  for (ValueId v : graph.outputs) is_output[v.index] = true;
  auto add_outputs = [&](const Node& node) {
    for (ValueId v : node.outputs) {
      if (!v.valid() || !is_output[v.index]) continue;
      int table = table_for("output|" + forms_key(v), [&](OptionTable* t, OptionOrigin* origin) {
        std::set<int> forms;
        for (size_t i = 0; i < placements(v).size(); ++i)
          if (int f = form_numbers(v)[i]; f >= 0 && !placements(v)[i].is_partial()) forms.insert(f);
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
  };

  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (contracted_[n]) {
      add_outputs(node);
      continue;
    }
    const auto& triples = theory_.triples(NodeId(n));
    Source source{Origin::node, NodeId(n)};
    if (is_source(node)) {
      ValueId v = node.outputs[0];
      int cls = class_of_[v.index];
      auto it = role.find(v);
      ValueId result;
      if (it != role.end()) {
        source.parameter = it->second.first;
        source.buffer = it->second.second;
        result = source.parameter >= 0 ? graph.parameters[source.parameter].gradient
                                       : graph.buffers[source.buffer].update;
      }
      if (result.valid()) {
        Stored stored{v, result, 0, stored_choices(v)};
        std::erase_if(stored.choices,
                      [&](Placement p) { return form_of(v, p) < 0 || form_of(result, p) < 0; });
        stored.token = add_token(static_cast<int>(stored.choices.size()));
        std::string key = fmt::format("stored{}|{}|{}|{}|{}", source.parameter >= 0 ? "p" : "b",
                                      graph.spec(v).bytes(), graph.spec(result).bytes(),
                                      theory_.segment(v), forms_key(v));
        for (Placement p : stored.choices)
          key += fmt::format("{}:{},", to_string(p), p.is_shard() ? theory_.cut_size(v, p) : 0);
        int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
          for (size_t k = 0; k < stored.choices.size(); ++k) {
            Option o;
            o.out = {static_cast<uint8_t>(form_of(v, stored.choices[k])), static_cast<uint8_t>(k)};
            t->options.push_back(o);
            for (size_t i = 0; i < triples.size(); ++i)
              if (triples[i].out[0] == stored.choices[k])
                origin->triple.push_back(static_cast<int>(i));
          }
          MOTLEY_CHECK(origin->triple.size() == t->options.size());
        });
        add_node(table, {}, {cls, stored.token}, false, source);
        (source.parameter >= 0 ? parameters[source.parameter] : buffers[source.buffer]) =
            std::move(stored);
        continue;
      }
      if (is_received(node) && restriction_ == Restriction::none) {
        std::string key = fmt::format("received|{}|{}|{}", graph.spec(v).bytes(),
                                      theory_.segment(v), forms_key(v));
        for (const Triple& triple : triples)
          if (const Placement p = triple.out[0]; p.is_shard())
            key += fmt::format("{}:{},", to_string(p), theory_.cut_size(v, p));
        const int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
          for (const bool whole : {true, false})
            for (size_t i = 0; i < triples.size(); ++i) {
              const Placement p = triples[i].out[0];
              if (p.is_partial() || p.is_replicated() != whole || form_of(v, p) < 0) continue;
              Option o;
              o.out = {static_cast<uint8_t>(form_of(v, p))};
              t->options.push_back(o);
              origin->triple.push_back(static_cast<int>(i));
            }
        });
        add_node(table, {}, {cls}, node.phase == Phase::backward, source);
        add_outputs(node);
        continue;
      }
      // Whole is enough: pieces of it are free. A cut batch is a restriction.
      const bool cut = cut_inputs.count(v) && cuts_batch(restriction_);
      bool batched = cut && theory_.legal(v, Placement::shard(0));
      const Placement made = batched ? Placement::shard(0) : Placement::replicated();
      const auto triple = std::find_if(triples.begin(), triples.end(),
                                       [&](const Triple& t) { return t.out[0] == made; });
      MOTLEY_CHECK(triple != triples.end());
      const int number = static_cast<int>(triple - triples.begin());
      // Which form that is differs from value to value.
      const int form = form_of(v, made);
      const int table = table_for(fmt::format("source|{}|{}", form, number),
                                  [&](OptionTable* t, OptionOrigin* origin) {
                                    Option o;
                                    o.out = {static_cast<uint8_t>(form)};
                                    t->options.push_back(o);
                                    origin->triple.push_back(number);
                                  });
      add_node(table, {}, {cls}, node.phase == Phase::backward, source);
      add_outputs(node);
      continue;
    }
    std::vector<int> inputs, outputs;
    std::string key = std::to_string(theory_.table(NodeId(n))) + "|";
    if (const int of = part_of(static_cast<int64_t>(n))) key += fmt::format("p{}|", of);
    const auto operands = this->inputs(NodeId(static_cast<int64_t>(n)));
    for (ValueId v : operands) {
      inputs.push_back(class_of_[v.index]);
      key += forms_key(v);
    }
    key += "|";
    for (ValueId v : node.outputs) {
      if (!v.valid()) continue;
      outputs.push_back(class_of_[v.index]);
      key += forms_key(v);
      if (classes_[class_of_[v.index]].saved) key += 's';
    }
    int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
      for (size_t i = 0; i < triples.size(); ++i) {
        Option o;
        bool known_forms = true;
        auto put = [&](std::vector<uint8_t>* list, ValueId v, Placement p) {
          int f = form_of(v, p);
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
    add_node(table, std::move(inputs), std::move(outputs), node.phase == Phase::backward, source);
    add_outputs(node);
  }
  auto add_update = [&](const Stored& s, int parameter, int buffer) {
    if (!s.result.valid()) return;
    std::string key = fmt::format("update{}|{}", parameter >= 0 ? "p" : "b", forms_key(s.result));
    for (Placement p : s.choices) key += to_string(p);
    int table = table_for(key, [&](OptionTable* t, OptionOrigin* origin) {
      for (size_t k = 0; k < s.choices.size(); ++k) {
        Option o;
        o.in = {static_cast<uint8_t>(k), static_cast<uint8_t>(form_of(s.result, s.choices[k]))};
        t->options.push_back(o);
        origin->triple.push_back(static_cast<int>(k));
      }
    });
    add_node(table, {s.token, class_of_[s.result.index]}, {}, true,
             {Origin::update, NodeId(), {}, parameter, buffer});
  };
  for (size_t p = 0; p < parameters.size(); ++p) add_update(parameters[p], static_cast<int>(p), -1);
  for (size_t b = 0; b < buffers.size(); ++b) add_update(buffers[b], -1, static_cast<int>(b));
  if (graph.loss.valid()) {
    int table =
        table_for("goal|" + forms_key(graph.loss), [&](OptionTable* t, OptionOrigin* origin) {
          for (Placement p : {Placement::replicated(), Placement::partial()}) {
            int f = form_of(graph.loss, p);
            if (f < 0) continue;
            Option o;
            o.in = {static_cast<uint8_t>(f)};
            t->options.push_back(o);
            origin->triple.push_back(0);
          }
        });
    add_node(table, {class_of_[graph.loss.index]}, {}, true, {Origin::goal, NodeId()});
  }
}

}  // namespace motley::spmd

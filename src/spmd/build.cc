#include "spmd/build.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_map>

#include "core/error.h"
#include "core/infinity.h"

namespace motley::spmd {

using namespace solver;

namespace {

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

// Which values are views of one another.
struct ProblemBuilder::Views {
  std::vector<ValueId> next;  // [graph value] the next of its class; invalid: it is the last
  std::vector<int> depth;     // [graph value] views between the root of its class and it
  // Union-find over placements_: those that views turn into one another.
  std::vector<int> parent;
};

void ProblemBuilder::contract() {
  list_inputs();
  list_placements();
  Views views = join_views();
  make_forms(&views);
  find_uses();
  find_gradients();
}

void ProblemBuilder::list_inputs() {
  for (const Node& node : theory_.graph().nodes) {
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
}

void ProblemBuilder::list_placements() {
  first_placement_.push_back(0);
  for (size_t v = 0; v < theory_.graph().values.size(); ++v) {
    for (Placement p : theory_.placements(ValueId(v))) placements_.push_back(p);
    first_placement_.push_back(static_cast<int>(placements_.size()));
  }
}

// Makes a class of every value that is no view, with all views of it.
ProblemBuilder::Views ProblemBuilder::join_views() {
  const Graph& graph = theory_.graph();
  contracted_.assign(graph.nodes.size(), false);
  class_of_.assign(graph.values.size(), -1);
  Views views;
  views.next.resize(graph.values.size());
  views.depth.resize(graph.values.size());
  std::vector<int>& parent = views.parent;
  parent.resize(placements_.size());
  std::iota(parent.begin(), parent.end(), 0);
  auto pair_of = [&](ValueId v, Placement p) {
    const auto list = placements(v);
    auto it = std::find(list.begin(), list.end(), p);
    return it == list.end() ? -1 : first_placement_[v.index] + static_cast<int>(it - list.begin());
  };
  std::vector<ValueId> last;  // [class]
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
      views.next[end.index] = v;
      end = v;
      views.depth[v.index] = views.depth[inputs[0].index] + 1;
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
  return views;
}

// Forms of a class are numbered in the order in which its members have them.
void ProblemBuilder::make_forms(Views* views) {
  form_numbers_.assign(placements_.size(), -1);
  held_.reserve(placements_.size());
  std::vector<int> roots;  // [form of the class] in the union-find
  std::vector<std::vector<Held>> members(kMaxForms);
  for (Class& c : classes_) {
    roots.clear();
    c.begin = static_cast<int>(forms_.size());
    for (ValueId v = c.root; v.valid(); v = views->next[v.index]) {
      const auto list = placements(v);
      for (size_t i = 0; i < list.size(); ++i) {
        const int number = first_placement_[v.index] + static_cast<int>(i);
        const int root = find_root(views->parent, number);
        const size_t form = std::find(roots.begin(), roots.end(), root) - roots.begin();
        if (form == roots.size()) {
          // More placements than a search state holds: the rarest are not used.
          if (form == kMaxForms) continue;
          roots.push_back(root);
          forms_.push_back({v, 0, 0});
        }
        Form& f = forms_[c.begin + form];
        if (views->depth[v.index] < views->depth[f.top.index]) f.top = v;
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
}

// What the backward pass reads, and where each class is first used: conversions run where their
// result is first read; of gradients and outputs also right after their maker.
void ProblemBuilder::find_uses() {
  const Graph& graph = theory_.graph();
  for (ValueId v : saved_activations(graph)) {
    Class& c = classes_[class_of_[v.index]];
    c.saved = !is_source(graph.node(graph.value(c.root).producer));
  }
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
}

void ProblemBuilder::find_gradients() {
  const std::vector<bool>& pure = theory_.pure_gradients();
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

bool ProblemBuilder::is_parameter(int value) const {
  const Graph& graph = theory_.graph();
  for (ValueId v = classes_[value].root;;) {
    const Node& producer = graph.node(graph.value(v).producer);
    if (producer.op == "motley::parameter") return true;
    const OpDef* op = find_op(producer.op);
    const ValueList read = graph.inputs_of(producer);
    if (read.empty() || !(producer.op == "aten::_to_copy" || (op && op->alias))) return false;
    v = read[0];
  }
}

}  // namespace motley::spmd

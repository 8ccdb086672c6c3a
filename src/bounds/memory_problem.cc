#include "bounds/memory_problem.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "bounds/rerun.h"
#include "core/error.h"
#include "core/infinity.h"
#include "cost/storage.h"
#include "graph/segment.h"

namespace motley::bounds {

using namespace solver;
using namespace spmd;

namespace {

constexpr int kMostPairForms = 9;  // of values that pairs of readers are looked for

// Whether a value takes memory of its own, and not for the whole step.
bool takes_memory(const Graph& graph, const ProblemBuilder& builder, int value) {
  const Node& node = graph.node(graph.value(builder.root(value)).producer);
  const OpDef* op = find_op(node.op);
  return (!is_source(node) || node.op == "motley::input") && !(op && op->alias) &&
         !is_boundary(node) && !(node.phase == Phase::backward && builder.is_gradient(value));
}

}  // namespace

struct MemoryProblem::Pair {
  int value;
  Rerun::Read early, late;
  int token = -1;     // the form that the early reader read, the last one: none, or it is counted
  int stored = -1;    // of a parameter: its token, by choices; -1: no parameter
  int again = -1;     // of others: whether their maker runs again
  bool once = false;  // a copy, only if the early reader's block, its own, runs once

  bool parameter() const { return stored >= 0; }
};

NodeId MemoryProblem::peak_node(const Theory& theory, const ProblemBuilder& builder,
                                const Fractions& fractions) {
  const Graph& graph = theory.graph();
  std::vector<int64_t> last(builder.values(), -1);
  for (size_t n = 0; n < builder.problem().nodes.size(); ++n)
    if (const NodeId node = builder.node(static_cast<int>(n)); node.valid())
      for (int c : builder.problem().nodes[n].inputs)
        if (c < builder.values()) last[c] = std::max<int64_t>(last[c], node.index);
  std::vector<Bytes> change(graph.nodes.size() + 1, 0);
  for (int c = 0; c < builder.values(); ++c) {
    const NodeId node = graph.value(builder.root(c)).producer;
    if (!takes_memory(graph, builder, c) || last[c] < node.index) continue;
    const Bytes bytes = builder.least_bytes(c, 0, fractions);
    change[node.index] += bytes;
    change[last[c] + 1] -= bytes;
  }
  NodeId result;
  Bytes now = 0, most = -1;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    now += change[n];
    if (graph.nodes[n].phase == Phase::forward || now <= most) continue;
    most = now;
    result = NodeId(n);
  }
  return result;
}

// Puts a MemoryProblem together.
class MemoryProblem::Assembly {
 public:
  Assembly(const Theory& theory, const ProblemBuilder& builder, const std::vector<int>& block_of,
           const Fractions& fractions, NodeId peak_node, std::vector<int64_t> from,
           MemoryProblem* result)
      : graph_(theory.graph()),
        builder_(builder),
        base_(builder.problem()),
        block_of_(block_of),
        fractions_(fractions),
        peak_(peak_node.index),
        from_(std::move(from)),
        types_(builder.problem().types),
        blocks_(theory, builder, block_of),
        result_(*result),
        problem_(result->problem_) {
    problem_.types = types_;
    problem_.form_tables = base_.form_tables;
    problem_.value_table = base_.value_table;
    result_.first_form_table_ = static_cast<int>(base_.form_tables.size());
    // Blocks that may run again later than the peak node.
    for (size_t b = 0; b < blocks_.begin.size(); ++b)
      modal_.push_back(blocks_.begin[b] < Rerun::kNever &&
                       !(blocks_.begin[b] <= peak_ && blocks_.alone[b]));
    made_.resize(base_.nodes.size());
    early_.resize(base_.nodes.size());
    late_.resize(base_.nodes.size());
    pass_.assign(graph_.nodes.size(), false);
    find_pairs();
    hold();
    add_seconds();
    add_reduced();
    add_modes();
    for (size_t n = 0; n < base_.nodes.size(); ++n) add_node(static_cast<int>(n));
  }

 private:
  bool is_modal(int block) const { return block >= 0 && modal_[block]; }
  bool must(int64_t node) const { return is_modal(block_of_[node]) && blocks_.must[node]; }
  bool twice(int64_t node) const {
    return must(node) || (is_modal(block_of_[node]) && blocks_.may[node]);
  }
  int forms_of(int value) const { return base_.form_tables[base_.value_table[value]].forms; }
  uint8_t none_of(int value) const { return static_cast<uint8_t>(forms_of(value)); }
  // Whether a form of a parameter takes no memory besides that of one that it is stored in.
  bool is_free(int value, int stored, int form) const {
    const FormTable& table = base_.form_tables[base_.value_table[value]];
    return table.convert[stored * table.forms + form] == 0;
  }
  void add_bytes(int value, int form, std::vector<Bytes>* bytes) const {
    for (int j = 0; j < types_; ++j) (*bytes)[j] += builder_.bytes(value, form, j, fractions_);
  }
  void add_least(int value, std::vector<Bytes>* bytes) const {
    for (int j = 0; j < types_; ++j) (*bytes)[j] += builder_.least_bytes(value, j, fractions_);
  }
  int add_table(int forms, FormOrigin origin) {
    FormTable table{forms, std::vector<double>(forms * forms, kInfinity)};
    for (int i = 0; i < forms; ++i) table.convert[i * forms + i] = 0;
    problem_.form_tables.push_back(std::move(table));
    result_.form_origins_.push_back(origin);
    return static_cast<int>(problem_.form_tables.size()) - 1;
  }
  int add_value(int table) {
    problem_.value_table.push_back(table);
    return static_cast<int>(problem_.value_table.size()) - 1;
  }
  int add_token(int forms) {
    const auto [it, fresh] = token_tables_.try_emplace(forms, 0);
    if (fresh) it->second = add_table(forms, {});
    return add_value(it->second);
  }
  // The view of a value that views outside of its own block are of.
  ValueId top(int value, ValueId view) const {
    while (view != builder_.root(value) &&
           block_of_[graph_.value(view).producer.index] != blocks_.values[value].block)
      view = graph_.inputs_of(graph_.node(graph_.value(view).producer))[0];
    return view;
  }

  void find_pairs();
  void hold();
  void add_seconds();
  void add_reduced();
  void add_modes();
  void add_node(int n);
  struct Plan;
  std::string key_of(const Plan& plan) const;
  void fill(const Plan& plan, OptionTable* table, TableOrigin* origin) const;

  const Graph& graph_;
  const ProblemBuilder& builder_;
  const Problem& base_;
  const std::vector<int>& block_of_;
  const Fractions& fractions_;
  const int64_t peak_;
  const std::vector<int64_t> from_;
  const int types_;
  const Rerun blocks_;
  MemoryProblem& result_;
  Problem& problem_;

  std::vector<bool> modal_;  // [block]
  std::vector<Pair> pairs_;
  // [node of the builder] of pairs_: which values it makes, if they may be made again, and reads.
  std::vector<std::vector<int>> made_, early_, late_;
  std::vector<bool> paired_;              // [value]
  std::vector<bool> pass_;                // [graph node] passes the mode on for a pair
  std::vector<std::vector<Bytes>> held_;  // [value][type] at the peak node; empty: nothing
  std::vector<int> second_;               // [value] its second value, -1: none
  std::vector<bool> reduced_;             // [value] has a form for being all-reduced
  std::vector<int> mode_;                 // [block] value that passes the mode on, -1: none
  std::map<int, int> token_tables_;       // by forms
  std::map<std::string, int> known_;      // option tables
};

void MemoryProblem::Assembly::find_pairs() {
  paired_.assign(builder_.values(), false);
  for (int c = 0; c < builder_.values(); ++c) {
    const Rerun::Value& v = blocks_.values[c];
    const int stored = graph_.node(v.maker).op == "motley::parameter" ? builder_.token(c) : -1;
    const bool outer = v.made_forward && !v.inner && is_modal(v.block) &&
                       blocks_.may[v.maker.index] && takes_memory(graph_, builder_, c);
    if (!(stored >= 0 || outer) || forms_of(c) + 1 > kMostPairForms) continue;
    Pair best{c, {}, {}};
    best.stored = stored;
    for (const Rerun::Read& early : v.forward)
      for (const Rerun::Read& late : v.backward) {
        if (early.at >= peak_ || late.at < peak_) continue;
        const bool own = block_of_[early.at] == v.block;
        // Of a value of a block that runs again stays what another block reads.
        if (outer && (own || top(c, early.view) != top(c, late.view))) continue;
        if (best.early.node >= 0 && (must(best.early.at) || !must(early.at))) continue;
        best.early = early;
        best.late = late;
        best.once = stored >= 0 && is_modal(v.block) && own;
      }
    if (best.early.node < 0) continue;
    paired_[c] = true;
    best.token = add_token(forms_of(c) + 1);
    if (outer) best.again = add_token(2);
    if (outer) made_[builder_.maker(c)].push_back(static_cast<int>(pairs_.size()));
    early_[best.early.node].push_back(static_cast<int>(pairs_.size()));
    late_[best.late.node].push_back(static_cast<int>(pairs_.size()));
    if (best.once) pass_[best.early.at] = true;
    pairs_.push_back(best);
  }
}

// Bytes that are held at the peak node: by options, or by every program.
void MemoryProblem::Assembly::hold() {
  result_.fixed_bytes_.assign(types_, held_throughout(graph_));
  held_.resize(builder_.values());
  for (int c = 0; c < builder_.values(); ++c) {
    const Rerun::Value& v = blocks_.values[c];
    if (v.last < peak_ || v.maker.index > peak_ || paired_[c] || !takes_memory(graph_, builder_, c))
      continue;
    std::vector<Bytes> bytes;
    for (int j = 0; j < types_; ++j) bytes.push_back(builder_.least_bytes(c, j, fractions_));
    if (v.made_forward && twice(v.maker.index))
      held_[c] = std::move(bytes);
    else
      for (int j = 0; j < types_; ++j) result_.fixed_bytes_[j] += bytes[j];
  }
}

// Second values; their last form stands for none, which serves whoever runs once.
void MemoryProblem::Assembly::add_seconds() {
  second_.assign(builder_.values(), -1);
  std::map<int, int> tables;
  for (int c = 0; c < builder_.values(); ++c) {
    const Rerun::Value& v = blocks_.values[c];
    const int forms = forms_of(c) + 1;
    if (!v.inner || !is_modal(v.block) || (!v.source && !twice(v.maker.index)) ||
        forms > kMaxForms ||
        std::none_of(v.forward.begin(), v.forward.end(),
                     [&](const Rerun::Read& read) { return twice(read.at); }))
      continue;
    const auto [it, fresh] = tables.try_emplace(base_.value_table[c], 0);
    if (fresh) it->second = add_table(forms, {base_.value_table[c], -1});
    second_[c] = add_value(it->second);
  }
}

// Gradients that only the update of one parameter reads.
void MemoryProblem::Assembly::add_reduced() {
  reduced_.assign(builder_.values(), false);
  std::vector<int> readers(builder_.values(), 0);
  for (const ProblemNode& node : base_.nodes)
    for (int c : node.inputs)
      if (c < builder_.values()) ++readers[c];
  std::map<int, int> tables;
  for (size_t n = 0; n < base_.nodes.size(); ++n) {
    const ProblemNode& node = base_.nodes[n];
    if (builder_.node(static_cast<int>(n)).valid() || node.inputs.size() != 2) continue;
    const int c = node.inputs[1];
    if (!builder_.is_pure_gradient(c) || readers[c] != 1 || forms_of(c) + 1 > kMaxForms) continue;
    reduced_[c] = true;
    const auto [it, fresh] = tables.try_emplace(base_.value_table[c], 0);
    if (fresh) it->second = add_table(forms_of(c) + 1, {base_.value_table[c], c});
    problem_.value_table[c] = it->second;
  }
}

// Nodes that choose the modes of blocks. Kinds are blocks of equal work and bytes.
void MemoryProblem::Assembly::add_modes() {
  mode_.assign(modal_.size(), -1);
  result_.blocks_ = modal_.size();
  std::vector<int> nodes(modal_.size(), 0);
  std::vector<Bytes> bytes(modal_.size(), 0);
  for (size_t n = 0; n < graph_.nodes.size(); ++n)
    if (is_modal(block_of_[n])) nodes[block_of_[n]] += blocks_.must[n] || pass_[n];
  for (size_t c = 0; c < held_.size(); ++c)
    if (!held_[c].empty()) bytes[blocks_.values[c].block] += held_[c][0];
  std::map<std::pair<int, Bytes>, int> tables;  // of modes
  for (size_t b = 0; b < modal_.size(); ++b) {
    if (!modal_[b] || nodes[b] == 0) continue;
    const auto [it, fresh] =
        tables.try_emplace({nodes[b], bytes[b]}, static_cast<int>(problem_.option_tables.size()));
    if (fresh) {
      OptionTable table;
      for (const uint8_t runs_twice : {0, 1}) {
        Option o;
        o.out = {runs_twice};
        o.compute.assign(types_, 0);
        o.memory.assign(types_, 0);
        table.options.push_back(std::move(o));
      }
      problem_.option_tables.push_back(std::move(table));
      result_.origins_.emplace_back().kind = static_cast<int>(result_.kinds_.size());
      result_.kinds_.push_back(0);
    }
    const int kind = result_.origins_[it->second].kind;
    ++result_.kinds_[kind];
    mode_[b] = add_token(2);
    result_.modes_.push_back({static_cast<int>(b), kind});
    problem_.nodes.push_back({it->second, {}, {mode_[b]}, false});
  }
}

// What a node of the builder becomes.
struct MemoryProblem::Assembly::Plan {
  int node = 0;
  bool source = false, must = false, may = false, moded = false;
  std::vector<int> in, out;  // slots with second values
  std::vector<Bytes> bytes;  // held if it runs once
  bool reduced = false;      // it updates with a gradient that has a form for being all-reduced
  int part = 0, again = 0;   // stretches that it runs in, and again

  bool runs_again() const { return must || may; }
};

std::string MemoryProblem::Assembly::key_of(const Plan& plan) const {
  std::string key =
      fmt::format("{}|{}{}{}{}|{}|{}|{}|{},{}", base_.nodes[plan.node].table, plan.source,
                  plan.must, plan.may, plan.moded, fmt::join(plan.in, ","),
                  fmt::join(plan.out, ","), fmt::join(plan.bytes, ","), plan.part, plan.again);
  auto add = [&](const char* what, int slot, const Pair& pair) {
    key += fmt::format("|{}{},{},{}", what, slot, pair.once, base_.value_table[pair.value]);
    if (pair.parameter()) key += fmt::format(",{}", base_.nodes[builder_.maker(pair.value)].table);
  };
  key += fmt::format("|{},{}", made_[plan.node].size(),
                     plan.reduced ? forms_of(base_.nodes[plan.node].inputs[1]) : 0);
  for (int p : early_[plan.node]) add("e", pairs_[p].early.slot, pairs_[p]);
  for (int p : late_[plan.node]) add("l", pairs_[p].late.slot, pairs_[p]);
  return key;
}

void MemoryProblem::Assembly::fill(const Plan& plan, OptionTable* table,
                                   TableOrigin* origin) const {
  const ProblemNode& node = base_.nodes[plan.node];
  const auto& options = base_.option_tables[node.table].options;
  using Filled = std::pair<Option, Variant>;
  // Every option of those so far, with each form of one more value that is read.
  auto times = [](std::vector<Filled>* all, int forms,
                  const std::function<void(int form, Filled*)>& with) {
    std::vector<Filled> next;
    for (const Filled& one : *all)
      for (int form = 0; form < forms; ++form) {
        next.push_back(one);
        next.back().first.in.push_back(static_cast<uint8_t>(form));
        with(form, &next.back());
      }
    *all = std::move(next);
  };
  // An option of the builder, that runs so often, in a block of that mode (0: once).
  auto fill_option = [&](int o, int runs, int mode) {
    const Option& base = options[o];
    Option option = base;
    Variant variant{o, runs, runs == 1 ? plan.bytes : std::vector<Bytes>(types_, 0)};
    for (int i : plan.in) option.in.push_back(runs == 2 ? base.in[i] : none_of(node.inputs[i]));
    for (int i : plan.out)
      option.out.push_back(runs == 2 || plan.source ? base.out[i] : none_of(node.outputs[i]));
    if (plan.moded) {
      option.in.push_back(static_cast<uint8_t>(mode));
      option.out.push_back(static_cast<uint8_t>(mode));
    }
    for (size_t p = 0; p < made_[plan.node].size(); ++p)
      option.out.push_back(static_cast<uint8_t>(runs - 1));
    std::vector<Filled> all{{std::move(option), std::move(variant)}};
    for (int p : early_[plan.node]) {
      const Pair& pair = pairs_[p];
      const uint8_t form = base.in[pair.early.slot], none = none_of(pair.value);
      if (!pair.parameter()) {
        // What runs again reads of another block is held until then.
        for (Filled& one : all) {
          if (runs == 2) add_bytes(pair.value, form, &one.second.bytes);
          one.first.out.push_back(runs == 2 ? none : form);
        }
        continue;
      }
      const auto& choices = base_.option_tables[base_.nodes[builder_.maker(pair.value)].table];
      times(&all, static_cast<int>(choices.options.size()), [&](int choice, Filled* one) {
        const bool copy =
            !(pair.once && mode == 1) && !is_free(pair.value, choices.options[choice].out[0], form);
        one->first.out.push_back(copy ? form : none);
      });
    }
    for (int p : late_[plan.node]) {
      const Pair& pair = pairs_[p];
      const int form = base.in[pair.late.slot], none = none_of(pair.value);
      times(&all, none + 1, [&](int early, Filled* one) {
        if (early == form) add_bytes(pair.value, form, &one->second.bytes);
      });
      if (pair.parameter()) continue;
      times(&all, 2, [&](int again, Filled* one) {
        const int early = one->first.in[one->first.in.size() - 2];
        if (early != form && early != none && again == 0) add_least(pair.value, &one->second.bytes);
      });
    }
    for (auto& [some, of_some] : all) {
      table->options.push_back(std::move(some));
      origin->variants.push_back(std::move(of_some));
    }
  };
  for (int o = 0; o < static_cast<int>(options.size()); ++o) {
    fill_option(o, 1, 0);
    if (plan.reduced && builder_.placement(node.inputs[1], options[o].in[1]).is_replicated()) {
      fill_option(o, 1, 0);
      table->options.back().in[1] = none_of(node.inputs[1]);
    }
    if (plan.moded && !plan.must) fill_option(o, 1, 1);
    if (plan.runs_again()) fill_option(o, 2, 1);
  }
}

void MemoryProblem::Assembly::add_node(int n) {
  Plan plan;
  plan.node = n;
  ProblemNode node = base_.nodes[n];
  const NodeId of = builder_.node(n);
  plan.source = of.valid() && is_source(graph_.node(of));
  const bool forward = of.valid() && !plan.source && graph_.node(of).phase == Phase::forward;
  plan.must = forward && must(of.index);
  plan.may = forward && !plan.must && twice(of.index);
  plan.moded = plan.must || (forward && pass_[of.index]);
  plan.bytes.assign(types_, 0);
  plan.reduced = !of.valid() && node.inputs.size() == 2 && node.inputs[1] < builder_.values() &&
                 reduced_[node.inputs[1]];
  auto has_second = [&](int value) { return value < builder_.values() && second_[value] >= 0; };
  for (size_t i = 0; i < node.inputs.size() && plan.runs_again(); ++i)
    if (has_second(node.inputs[i])) plan.in.push_back(static_cast<int>(i));
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const int c = node.outputs[i];
    if (c >= builder_.values()) continue;
    if (has_second(c)) plan.out.push_back(static_cast<int>(i));
    if (!held_[c].empty())
      for (int j = 0; j < types_; ++j) plan.bytes[j] += held_[c][j];
  }
  if (plan.runs_again()) {
    const int b = block_of_[of.index];
    plan.part = stretch_of(from_, of.index);
    plan.again =
        blocks_.alone[b] ? stretch_of(from_, blocks_.begin[b]) : static_cast<int>(from_.size());
  }
  const auto [it, fresh] =
      known_.try_emplace(key_of(plan), static_cast<int>(problem_.option_tables.size()));
  if (fresh) {
    TableOrigin origin;
    origin.base = node.table;
    origin.state = plan.source;
    origin.part = plan.part;
    origin.again = plan.again;
    OptionTable table;
    fill(plan, &table, &origin);
    problem_.option_tables.push_back(std::move(table));
    result_.origins_.push_back(std::move(origin));
  }
  const std::vector<int> inputs = node.inputs, outputs = node.outputs;
  for (int i : plan.in) node.inputs.push_back(second_[inputs[i]]);
  for (int i : plan.out) node.outputs.push_back(second_[outputs[i]]);
  if (plan.moded) {
    int& token = mode_[block_of_[of.index]];
    node.inputs.push_back(token);
    token = add_token(2);
    node.outputs.push_back(token);
  }
  for (int p : made_[n]) node.outputs.push_back(pairs_[p].again);
  for (int p : early_[n]) {
    if (pairs_[p].parameter()) node.inputs.push_back(pairs_[p].stored);
    node.outputs.push_back(pairs_[p].token);
  }
  for (int p : late_[n]) {
    node.inputs.push_back(pairs_[p].token);
    if (!pairs_[p].parameter()) node.inputs.push_back(pairs_[p].again);
  }
  node.table = it->second;
  problem_.nodes.push_back(std::move(node));
}

MemoryProblem::MemoryProblem(const Theory& theory, const ProblemBuilder& builder,
                             const std::vector<int>& block_of, const Fractions& fractions,
                             NodeId peak_node, std::vector<int64_t> from)
    : builder_(builder) {
  Assembly(theory, builder, block_of, fractions, peak_node, std::move(from), this);
  price(nullptr);
  validate(problem_);
}

void MemoryProblem::price(const OverlapPricing* pricing) {
  const Problem& base = builder_.problem();
  std::copy(base.form_tables.begin(), base.form_tables.end(), problem_.form_tables.begin());
  for (size_t t = 0; t < form_origins_.size(); ++t) {
    const FormOrigin& origin = form_origins_[t];
    if (origin.base < 0) continue;
    const FormTable& from = base.form_tables[origin.base];
    FormTable& table = problem_.form_tables[first_form_table_ + t];
    const int last = from.forms;
    for (int a = 0; a < last; ++a) {
      for (int b = 0; b < last; ++b)
        table.convert[a * table.forms + b] = from.convert[a * last + b];
      if (origin.reduced < 0) table.convert[a * table.forms + last] = 0;
    }
    if (origin.reduced < 0) continue;
    // In place of the whole form there is the one for being all-reduced.
    auto is = [&](int form) { return builder_.placement(origin.reduced, form); };
    for (int whole = 0; whole < last; ++whole) {
      if (!is(whole).is_replicated()) continue;
      Seconds shown = kInfinity;  // what counts of the message
      for (int a = 0; a < last; ++a) {
        if (!is(a).is_partial() || from.convert[a * last + whole] == kInfinity) continue;
        shown = from.convert[a * last + whole];
        table.convert[a * table.forms + last] = shown;
        table.convert[a * table.forms + whole] = kInfinity;
      }
      // Without an pricing all of it counts.
      const Seconds hidden =
          pricing ? std::max(0.0, builder_.waited_seconds(builder_.root(origin.reduced)) - shown)
                  : 0;
      for (int b = 0; b < last && shown < kInfinity; ++b)
        if (b != whole)
          table.convert[last * table.forms + b] = from.convert[whole * last + b] + hidden;
    }
  }
  for (size_t t = 0; t < origins_.size(); ++t) {
    const TableOrigin& origin = origins_[t];
    if (origin.base < 0) continue;
    // What of its time counts when it runs again, as a part of what counts the first time.
    std::vector<double> part(problem_.types, 1);
    for (int j = 0; pricing && j < problem_.types; ++j) {
      const double once = pricing->compute[origin.part][j];
      part[j] = once > 0 ? std::min(1.0, pricing->compute[origin.again][j] / once) : 0;
    }
    auto& options = problem_.option_tables[t].options;
    for (size_t o = 0; o < options.size(); ++o) {
      const Variant& variant = origin.variants[o];
      const Option& from = base.option_tables[origin.base].options[variant.option];
      options[o].comm = variant.runs * from.comm;
      for (int j = 0; j < problem_.types; ++j) {
        options[o].compute[j] = (1 + (variant.runs - 1) * part[j]) * from.compute[j];
        options[o].memory[j] = variant.bytes[j] + (origin.state ? from.memory[j] : 0);
      }
    }
  }
}

void MemoryProblem::price_modes(const std::vector<Seconds>& twice,
                                const std::vector<Seconds>& once) {
  for (size_t t = 0; t < origins_.size(); ++t)
    if (const int kind = origins_[t].kind; kind >= 0) {
      problem_.option_tables[t].options[0].comm = once[kind];
      problem_.option_tables[t].options[1].comm = twice[kind];
    }
}

std::vector<int> MemoryProblem::twice(const Solution& solution) const {
  std::vector<int> count(kinds_.size(), 0);
  for (size_t m = 0; m < modes_.size(); ++m) count[modes_[m].kind] += solution.option[m];
  return count;
}

std::vector<bool> MemoryProblem::chosen(const Solution& solution) const {
  std::vector<bool> chosen(blocks_);
  for (size_t m = 0; m < modes_.size(); ++m) chosen[modes_[m].block] = solution.option[m] == 1;
  return chosen;
}

Solution MemoryProblem::plain(const Solution& solution) const {
  Solution result;
  for (size_t n = modes_.size(); n < problem_.nodes.size(); ++n)
    result.option.push_back(origins_[problem_.nodes[n].table].variants[solution.option[n]].option);
  for (const Conversion& c : solution.conversions)
    if (c.value < builder_.values()) {
      const Problem& base = builder_.problem();
      const int forms = base.form_tables[base.value_table[c.value]].forms;
      // All-reduced is whole.
      auto form = [&](uint8_t f) {
        if (f < forms) return f;
        int whole = 0;
        while (!builder_.placement(c.value, whole).is_replicated()) ++whole;
        return static_cast<uint8_t>(whole);
      };
      result.conversions.push_back({c.value, form(c.from), form(c.to)});
    }
  return result;
}

}  // namespace motley::bounds

// Programs of solutions, and what there is to say of them.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/error.h"
#include "cost/overlap.h"
#include "spmd/build.h"

namespace motley::spmd {

using namespace solver;

bool ProblemBuilder::is_reduction(const Step& step) const {
  return !step.is_compute() && step.kind == Collective::all_reduce &&
         gradient_view_[class_of_[step.value.index]];
}

std::vector<ValueId> ProblemBuilder::reduced(const Program& program) const {
  std::vector<ValueId> gradients;
  for (const Step& step : program.steps)
    if (is_reduction(step)) gradients.push_back(root_of(step.value));
  std::sort(gradients.begin(), gradients.end());
  gradients.erase(std::unique(gradients.begin(), gradients.end()), gradients.end());
  return gradients;
}

int64_t ProblemBuilder::first_gradient() const {
  int64_t first = static_cast<int64_t>(theory_.graph().nodes.size());
  for (size_t c = 0; c < classes_.size(); ++c)
    if (gradient_view_[c]) first = std::min(first, maker_of(static_cast<int>(c)) + 1);
  return first;
}

int64_t ProblemBuilder::last_barrier(const Program& program, const Shares& shares) const {
  const std::vector<bool> barrier = barriers(theory_, program, shares);
  int64_t next = static_cast<int64_t>(theory_.graph().nodes.size());
  for (size_t s = program.steps.size(); s-- > 0;) {
    const Step& step = program.steps[s];
    const bool computes = step.is_compute() && !contracted_[step.node.index];
    if (computes) next = step.node.index;
    if (barrier[s]) return next;
  }
  return -1;
}

// A solution on its way to a program.
class ProblemBuilder::Translation {
 public:
  Translation(const ProblemBuilder& builder, const Solution& solution)
      : builder_(builder),
        theory_(builder.theory_),
        graph_(theory_.graph()),
        solution_(solution),
        made_(graph_.values.size(), 0),
        conversion_(builder.classes_.size()),
        triple_(graph_.nodes.size(), -1) {
    steps_.reserve(graph_.nodes.size() + solution.conversions.size());
    for (const Conversion& c : solution.conversions)
      if (c.value < static_cast<int>(conversion_.size()))
        conversion_[c.value].push_back({c.to, c.from});
    const std::vector<ProblemNode>& nodes = builder_.problem_.nodes;
    for (size_t n = 0; n < nodes.size(); ++n)
      if (builder_.sources_[n].origin == Origin::node)
        triple_[builder_.sources_[n].node.index] =
            builder_.option_origins_[nodes[n].table].triple[solution.option[n]];
  }

  Program run() {
    find_needs();
    for (size_t n = 0; n < graph_.nodes.size(); ++n) add_node(NodeId(n));
    ensure_loss();
    for (const auto& [v, p] : late_) ensure(v, p);
    return with_cut_inputs();
  }

 private:
  uint32_t bit(ValueId v, Placement p) const {
    const auto list = builder_.placements(v);
    return 1u << (std::find(list.begin(), list.end(), p) - list.begin());
  }
  bool available(ValueId v, Placement p) const { return (made_[v.index] & bit(v, p)) != 0; }
  void make(ValueId v, Placement p) { made_[v.index] |= bit(v, p); }
  const Class& class_of(ValueId v) const { return builder_.classes_[builder_.class_of_[v.index]]; }

  // What updates and outputs need. Gradients that are scattered, and outputs, are converted as soon
  // as they are made.
  void find_needs() {
    for (size_t n = 0; n < builder_.sources_.size(); ++n) {
      if (builder_.sources_[n].origin == Origin::output) need_output(n);
      if (builder_.sources_[n].origin == Origin::update) need_update(builder_.sources_[n]);
    }
  }

  void need_output(size_t problem_node) {
    const ValueId v = builder_.sources_[problem_node].output;
    const Problem& problem = builder_.problem_;
    const int form = problem.option_tables[problem.nodes[problem_node].table]
                         .options[solution_.option[problem_node]]
                         .in[0];
    const auto numbers = builder_.form_numbers(v);
    const auto placements = builder_.placements(v);
    size_t i = 0;
    while (numbers[i] != form || placements[i].is_partial()) ++i;
    // A view of the backward pass may be of a value of the forward pass.
    const NodeId maker = graph_.value(class_of(v).root).producer;
    const bool same = graph_.node(maker).phase == graph_.node(graph_.value(v).producer).phase;
    early_[same ? maker : graph_.value(v).producer].push_back({v, placements[i]});
  }

  void need_update(const Source& s) {
    ValueId source =
        s.parameter >= 0 ? graph_.parameters[s.parameter].value : graph_.buffers[s.buffer].value;
    ValueId result = s.parameter >= 0 ? graph_.parameters[s.parameter].gradient
                                      : graph_.buffers[s.buffer].update;
    NodeId node = graph_.value(source).producer;
    Placement p = theory_.triples(node)[triple_[node.index]].out[0];
    if (p.is_shard())
      early_[graph_.value(class_of(result).root).producer].push_back({result, p});
    else
      late_.push_back({result, p});
  }

  // The node, after what makes its operands available, and what is needed as soon as it has run.
  void add_node(NodeId node) {
    if (!builder_.contracted_[node.index]) {
      const int triple = triple_[node.index];
      const Triple& t = theory_.triples(node)[triple];
      const auto operands = builder_.inputs(node);
      for (size_t i = 0; i < operands.size(); ++i) ensure(operands[i], t.in[i]);
      run(node, triple);
    }
    if (auto it = early_.find(node); it != early_.end())
      for (const auto& [v, p] : it->second) ensure(v, p);
  }

  void run(NodeId node, int t) {
    Step step;
    step.node = node;
    step.triple = t;
    steps_.push_back(step);
    const Node& n = graph_.node(node);
    for (size_t o = 0; o < n.outputs.size(); ++o)
      if (n.outputs[o].valid()) make(n.outputs[o], theory_.triples(node)[t].out[o]);
  }

  // Makes a value available in a placement: by its producer, by aliasing another placement of what
  // it views, or by the conversion the solution names.
  void ensure(ValueId v, Placement p) {
    if (available(v, p)) return;
    NodeId producer = graph_.value(v).producer;
    int form = builder_.form_of(v, p);
    const Form& f = builder_.forms(class_of(v))[form];
    if (builder_.contracted_[producer.index] && f.top != v) {
      ValueId parent = builder_.inputs(producer)[0];
      const auto& triples = theory_.triples(producer);
      for (size_t t = 0; t < triples.size(); ++t)
        if (triples[t].out[0] == p && builder_.form_of(parent, triples[t].in[0]) == form) {
          ensure(parent, triples[t].in[0]);
          run(producer, static_cast<int>(t));
          return;
        }
    }
    const auto& conversions = conversion_[builder_.class_of_[v.index]];
    auto it = std::find_if(conversions.begin(), conversions.end(),
                           [&](const auto& c) { return c.first == form; });
    MOTLEY_CHECK(it != conversions.end(), "nothing makes %{} as {}", v.index, to_string(p));
    const auto from = builder_.held(builder_.forms(class_of(v))[it->second]);
    MOTLEY_CHECK(f.top == v);
    auto source =
        std::find_if(from.begin(), from.end(), [&](const auto& m) { return m.first == v; });
    MOTLEY_CHECK(source != from.end());
    ensure(v, source->second);
    Step step;
    step.value = v;
    step.from = source->second;
    step.to = p;
    step.kind = Theory::conversion(step.from, step.to).value();
    steps_.push_back(step);
    make(v, p);
  }

  // Whole or as partial sums.
  void ensure_loss() {
    const ValueId loss = graph_.loss;
    if (!loss.valid() || available(loss, Placement::partial()) ||
        available(loss, Placement::replicated()))
      return;
    int f = builder_.form_of(loss, Placement::partial());
    bool partial = f >= 0 && builder_.forms(class_of(loss))[f].top != loss;
    ensure(loss, partial ? Placement::partial() : Placement::replicated());
  }

  // The placements in which the program reads each input of the graph; slices of it do not count.
  std::map<ValueId, std::set<Placement>> reads_of_inputs() const {
    std::map<ValueId, std::set<Placement>> reads;
    for (const Input& input : graph_.inputs) reads[input.value];
    for (const Step& s : steps_) {
      auto note = [&](ValueId v, Placement p) {
        if (auto it = reads.find(v); it != reads.end()) it->second.insert(p);
      };
      if (s.is_compute()) {
        const Triple& t = theory_.triples(s.node)[s.triple];
        size_t i = 0;
        for (ValueId v : builder_.inputs(s.node)) note(v, t.in[i++]);
      } else if (s.kind != Collective::slice) {
        note(s.value, s.from);
      }
    }
    return reads;
  }

  // The program, but a source that is only read in pieces of one kind is made in pieces.
  Program with_cut_inputs() const {
    auto reads = reads_of_inputs();
    std::vector<Step> trimmed;
    trimmed.reserve(steps_.size());
    std::set<ValueId> cut;
    for (Step s : steps_) {
      if (s.is_compute() && graph_.node(s.node).op == "motley::input") {
        ValueId v = graph_.node(s.node).outputs[0];
        const auto& r = reads[v];
        if (r.size() == 1 && r.begin()->is_shard() &&
            theory_.triples(s.node)[s.triple].out[0].is_replicated()) {
          const auto& triples = theory_.triples(s.node);
          for (size_t t = 0; t < triples.size(); ++t)
            if (triples[t].out[0] == *r.begin()) s.triple = static_cast<int>(t), cut.insert(v);
        }
      } else if (!s.is_compute() && s.kind == Collective::slice && cut.count(s.value)) {
        continue;
      }
      trimmed.push_back(s);
    }
    return {std::move(trimmed)};
  }

  const ProblemBuilder& builder_;
  const Theory& theory_;
  const Graph& graph_;
  const Solution& solution_;

  std::vector<Step> steps_;
  std::vector<uint32_t> made_;  // [graph value] what it is available as, a bit a placement
  std::vector<std::vector<std::pair<int, int>>> conversion_;  // [class] (to, from) of forms
  std::vector<int> triple_;                                   // [graph node] that it runs
  // What is converted right after a node, and at the end.
  std::map<NodeId, std::vector<std::pair<ValueId, Placement>>> early_;
  std::vector<std::pair<ValueId, Placement>> late_;
};

Program ProblemBuilder::program(const Solution& solution) const {
  return Translation(*this, solution).run();
}

}  // namespace motley::spmd

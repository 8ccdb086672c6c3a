// Programs of solutions, and what there is to say of them.
#include <algorithm>
#include <functional>
#include <map>
#include <set>

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

Program ProblemBuilder::program(const Solution& solution) const {
  const Graph& graph = theory_.graph();
  Program program;
  program.steps.reserve(graph.nodes.size() + solution.conversions.size());
  // What each value is available as, a bit for each of its placements.
  std::vector<uint32_t> made(graph.values.size(), 0);
  auto bit = [&](ValueId v, Placement p) {
    const auto list = placements(v);
    return 1u << (std::find(list.begin(), list.end(), p) - list.begin());
  };
  auto available = [&](ValueId v, Placement p) { return (made[v.index] & bit(v, p)) != 0; };
  auto make = [&](ValueId v, Placement p) { made[v.index] |= bit(v, p); };
  // The conversion that makes a form of a class, and the triple each graph node runs.
  std::vector<std::vector<std::pair<int, int>>> conversion(classes_.size());  // [class] (to, from)
  for (const Conversion& c : solution.conversions)
    if (c.value < static_cast<int>(classes_.size())) conversion[c.value].push_back({c.to, c.from});
  std::vector<int> triple(graph.nodes.size(), -1);
  for (size_t n = 0; n < problem_.nodes.size(); ++n)
    if (sources_[n].origin == Origin::node)
      triple[sources_[n].node.index] =
          option_origins_[problem_.nodes[n].table].triple[solution.option[n]];

  auto run = [&](NodeId node, int t) {
    Step step;
    step.node = node;
    step.triple = t;
    program.steps.push_back(step);
    const Node& n = graph.node(node);
    for (size_t o = 0; o < n.outputs.size(); ++o)
      if (n.outputs[o].valid()) make(n.outputs[o], theory_.triples(node)[t].out[o]);
  };
  // Makes a value available in a placement: by its producer, by aliasing another placement of what
  // it views, or by the conversion the solution names.
  std::function<void(ValueId, Placement)> ensure = [&](ValueId v, Placement p) {
    if (available(v, p)) return;
    NodeId producer = graph.value(v).producer;
    int cls = class_of_[v.index];
    int form = form_of(v, p);
    const Form& f = forms(classes_[cls])[form];
    if (contracted_[producer.index] && f.top != v) {
      ValueId parent = inputs(producer)[0];
      const auto& triples = theory_.triples(producer);
      for (size_t t = 0; t < triples.size(); ++t)
        if (triples[t].out[0] == p && form_of(parent, triples[t].in[0]) == form) {
          ensure(parent, triples[t].in[0]);
          run(producer, static_cast<int>(t));
          return;
        }
    }
    auto it = std::find_if(conversion[cls].begin(), conversion[cls].end(),
                           [&](const auto& c) { return c.first == form; });
    MOTLEY_CHECK(it != conversion[cls].end(), "nothing makes %{} as {}", v.index, to_string(p));
    const auto from = held(forms(classes_[cls])[it->second]);
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
    program.steps.push_back(step);
    make(v, p);
  };

  // Gradients that are scattered, and outputs, are converted as soon as they are made.
  std::map<NodeId, std::vector<std::pair<ValueId, Placement>>> early;
  std::vector<std::pair<ValueId, Placement>> late;
  for (size_t n = 0; n < problem_.nodes.size(); ++n) {
    const Source& s = sources_[n];
    if (s.origin == Origin::output) {
      const ValueId v = s.output;
      const int form =
          problem_.option_tables[problem_.nodes[n].table].options[solution.option[n]].in[0];
      size_t i = 0;
      while (form_numbers(v)[i] != form || placements(v)[i].is_partial()) ++i;
      // A view of the backward pass may be of a value of the forward pass.
      const NodeId maker = graph.value(classes_[class_of_[v.index]].root).producer;
      const bool same = graph.node(maker).phase == graph.node(graph.value(v).producer).phase;
      early[same ? maker : graph.value(v).producer].push_back({v, placements(v)[i]});
      continue;
    }
    if (s.origin != Origin::update) continue;
    ValueId source =
        s.parameter >= 0 ? graph.parameters[s.parameter].value : graph.buffers[s.buffer].value;
    ValueId result =
        s.parameter >= 0 ? graph.parameters[s.parameter].gradient : graph.buffers[s.buffer].update;
    NodeId node = graph.value(source).producer;
    Placement p = theory_.triples(node)[triple[node.index]].out[0];
    if (p.is_shard())
      early[graph.value(classes_[class_of_[result.index]].root).producer].push_back({result, p});
    else
      late.push_back({result, p});
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    NodeId node(n);
    if (contracted_[n]) {
      if (auto it = early.find(node); it != early.end())
        for (const auto& [v, p] : it->second) ensure(v, p);
      continue;
    }
    const Triple& t = theory_.triples(node)[triple[n]];
    const auto operands = inputs(node);
    for (size_t i = 0; i < operands.size(); ++i) ensure(operands[i], t.in[i]);
    run(node, triple[n]);
    if (auto it = early.find(node); it != early.end())
      for (const auto& [v, p] : it->second) ensure(v, p);
  }
  if (graph.loss.valid() && !available(graph.loss, Placement::partial()) &&
      !available(graph.loss, Placement::replicated())) {
    int f = form_of(graph.loss, Placement::partial());
    bool partial = f >= 0 && forms(classes_[class_of_[graph.loss.index]])[f].top != graph.loss;
    ensure(graph.loss, partial ? Placement::partial() : Placement::replicated());
  }
  for (const auto& [v, p] : late) ensure(v, p);

  // A source that is only read in pieces of one kind is made in pieces.
  std::map<ValueId, std::set<Placement>> reads;
  for (const Input& input : graph.inputs) reads[input.value];
  for (const Step& s : program.steps) {
    auto note = [&](ValueId v, Placement p) {
      if (auto it = reads.find(v); it != reads.end()) it->second.insert(p);
    };
    if (s.is_compute()) {
      const Triple& t = theory_.triples(s.node)[s.triple];
      size_t i = 0;
      for (ValueId v : inputs(s.node)) note(v, t.in[i++]);
    } else if (s.kind != Collective::slice) {
      note(s.value, s.from);
    }
  }
  Program trimmed;
  trimmed.steps.reserve(program.steps.size());
  std::set<ValueId> cut;
  for (Step s : program.steps) {
    if (s.is_compute() && graph.node(s.node).op == "motley::input") {
      ValueId v = graph.node(s.node).outputs[0];
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
    trimmed.steps.push_back(s);
  }
  return trimmed;
}

}  // namespace motley::spmd

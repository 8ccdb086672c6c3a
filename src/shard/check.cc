// check(): a program followed step by step. Nothing of how it was found is trusted; what the
// executor does with it (lifetimes, phases) is followed as well.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "core/error.h"
#include "shard/program.h"

namespace motley {

namespace {

constexpr size_t kMaxProblems = 20;

using Made = std::pair<ValueId, Placement>;

class Checker {
 public:
  Checker(const Theory& theory, const Program& program)
      : theory_(theory),
        graph_(theory.graph()),
        program_(program),
        pure_(theory.pure_gradients()),
        ran_(graph_.nodes.size()) {}

  std::vector<std::string> run() {
    for (size_t s = 0; s < program_.steps.size(); ++s) {
      const Step& step = program_.steps[s];
      if (!exists(s, step)) continue;
      if (step.again)
        runs_again(s, step);
      else if (step.is_compute())
        computes(s, step);
      else
        converts(s, step);
    }
    ends();
    if (problems_.empty()) again_in_its_place();
    if (problems_.empty()) follow_lifetimes();
    return std::move(problems_);
  }

 private:
  void problem(const std::string& text) {
    if (problems_.size() < kMaxProblems) problems_.push_back(text);
  }
  template <typename... Args>
  void at(size_t s, fmt::format_string<Args...> format, Args&&... args) {
    problem(fmt::format("step {}: {}", s, fmt::format(format, std::forward<Args>(args)...)));
  }

  // [result] What a step reads and makes. REQUIRES: exists().
  std::vector<Made> reads(const Step& step) const {
    if (!step.is_compute()) return {{step.value, step.from}};
    std::vector<Made> list;
    const Triple& triple = theory_.triples(step.node)[step.triple];
    for (ValueId v : graph_.inputs_of(graph_.node(step.node)))
      list.push_back({v, triple.in[list.size()]});
    return list;
  }
  std::vector<Made> makes(const Step& step) const {
    if (!step.is_compute()) return {{step.value, step.to}};
    std::vector<Made> list;
    const Triple& triple = theory_.triples(step.node)[step.triple];
    const Node& node = graph_.node(step.node);
    for (size_t o = 0; o < node.outputs.size(); ++o)
      if (node.outputs[o].valid()) list.push_back({node.outputs[o], triple.out[o]});
    return list;
  }
  // The node that a step is, or whose value it converts.
  const Node& origin(const Step& step) const {
    return graph_.node(step.is_compute() ? step.node : graph_.value(step.value).producer);
  }
  static auto key_of(const Step& step) {
    return std::tuple(step.node, step.triple, step.value, step.from, step.to);
  }
  // A view or a collective of a gradient that nothing but the optimizer reads.
  bool of_gradients(const Step& step) const {
    if (!step.is_compute()) return pure_[step.value.index];
    const Node& node = graph_.node(step.node);
    const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
    return op && op->alias && node.outputs.size() == 1 && node.outputs[0].valid() &&
           pure_[node.outputs[0].index] && pure_[graph_.inputs_of(node)[0].index];
  }

  bool exists(size_t s, const Step& step) {
    if (step.is_compute()) {
      if (step.node.index < static_cast<int>(graph_.nodes.size()) && step.triple >= 0 &&
          step.triple < static_cast<int>(theory_.triples(step.node).size()))
        return true;
      at(s, "names a node or triple that does not exist");
      return false;
    }
    if (step.value.valid() && step.value.index < static_cast<int>(graph_.values.size()))
      return true;
    at(s, "names a value that does not exist");
    return false;
  }

  void need(size_t s, const Step& step) {
    for (const auto& [v, p] : reads(step))
      if (!available_.count({v, p}))
        at(s, "needs %{} as {}, which no earlier step makes", v.index, to_string(p));
  }
  void make(size_t s, const Step& step) {
    for (const auto& [v, p] : makes(step))
      if (!available_.insert({v, p}).second)
        at(s, "makes %{} as {} a second time", v.index, to_string(p));
  }

  void computes(size_t s, const Step& step) {
    ran_before_.insert(key_of(step));
    const Node& node = graph_.node(step.node);
    const Triple& triple = theory_.triples(step.node)[step.triple];
    if (step.each && !of_gradients(step))
      at(s, "says each, and node {} is no view of a gradient on its way to the optimizer",
         step.node.index);
    need(s, step);
    make(s, step);
    if (is_source(node)) stored_.emplace(node.outputs[0], triple.out[0]);
    // An op may run under several triples (a replicated and a sharded copy); a source is stored
    // once, and an op with a collective inside runs once.
    const bool once =
        node.op == "motley::parameter" || node.op == "motley::buffer" || !triple.kernel.empty();
    if (ran_[step.node.index] && once) at(s, "runs node {} a second time", step.node.index);
    ran_[step.node.index] = true;
  }

  void converts(size_t s, const Step& step) {
    ran_before_.insert(key_of(step));
    if (!theory_.legal(step.value, step.from) || !theory_.legal(step.value, step.to) ||
        Theory::conversion(step.from, step.to) != step.kind)
      at(s, "{} does not turn {} of %{} into {}", to_string(step.kind), to_string(step.from),
         step.value.index, to_string(step.to));
    if (step.each && !of_gradients(step))
      at(s, "says each, and %{} is not a gradient on its way to the optimizer", step.value.index);
    if (step.form == PieceForm::grouped && !has_forms(step.kind))
      at(s, "{} has no grouped form", to_string(step.kind));
    need(s, step);
    make(s, step);
  }

  // A step that runs again makes what an equal step made, of what was made before it: nothing new.
  // It has to be of the forward pass, where it is recomputed for the backward pass alone.
  void runs_again(size_t s, const Step& step) {
    if (!ran_before_.count(key_of(step))) at(s, "runs again what no earlier step ran");
    if (step.each) at(s, "says again and each; a step is one of them");
    if (step.is_compute() && is_source(graph_.node(step.node)))
      at(s, "runs node {}, a source, again", step.node.index);
    else if (origin(step).phase != Phase::forward)
      at(s, "runs again what the backward pass makes; only the forward pass is computed again");
    need(s, step);
  }

  // What is made again was last read before, is read again behind, and is of no use at the end of
  // the step: then it is as if the value had been held all the time.
  void again_in_its_place() {
    if (std::none_of(program_.steps.begin(), program_.steps.end(),
                     [](const Step& step) { return step.again; }))
      return;
    const Phases phases = phases_of(theory_, program_);
    std::set<Made> kept;  // needed at the end of the step
    for (ValueId v : graph_.outputs) kept.insert({v, output_placement(theory_, program_, v)});
    for (Placement p : {Placement::replicated(), Placement::partial()})
      if (graph_.loss.valid()) kept.insert({graph_.loss, p});
    auto result = [&](ValueId source, ValueId v) {
      if (const auto it = stored_.find(source); it != stored_.end() && v.valid())
        kept.insert({v, it->second});
    };
    for (const Parameter& p : graph_.parameters) result(p.value, p.gradient);
    for (const Buffer& b : graph_.buffers) result(b.value, b.update);
    std::set<Made> read;  // behind, before it is made once more
    for (size_t s = program_.steps.size(); s-- > 0;) {
      const Step& step = program_.steps[s];
      if (step.again) {
        if (static_cast<int>(s) < phases.backward || static_cast<int>(s) >= phases.reduction)
          at(s, "runs again outside of the backward pass");
        bool of_use = false;
        for (const Made& m : makes(step)) {
          of_use = of_use || read.count(m) > 0;
          if (kept.count(m))
            at(s, "makes %{} again, which is needed at the end of the step", m.first.index);
        }
        if (!of_use) at(s, "runs again, and nothing behind it reads what it makes");
      }
      for (const Made& m : makes(step)) read.erase(m);
      for (const Made& m : reads(step)) read.insert(m);
    }
  }

  // The executor frees values as lifetimes() says. What is read has to be held then.
  void follow_lifetimes() {
    const int end = static_cast<int>(program_.steps.size());
    std::vector<std::vector<const Held*>> made(end), dead(end + 1);
    const std::vector<Held> held = lifetimes(theory_, program_);
    for (const Held& h : held) made[h.made].push_back(&h), dead[h.last].push_back(&h);
    std::set<Made> now;
    for (int s = 0; s < end; ++s) {
      for (const auto& [v, p] : reads(program_.steps[s]))
        if (!now.count({v, p}))
          at(static_cast<size_t>(s), "needs %{} as {}, which is not held any more", v.index,
             to_string(p));
      for (const Held* h : made[s]) now.insert({h->value, h->placement});
      for (const Held* h : dead[s]) now.erase({h->value, h->placement});
    }
    auto kept = [&](const std::string& name, ValueId source, ValueId v) {
      if (v.valid() && !now.count({v, stored_.at(source)}))
        problem(fmt::format("{} is not held at the end", name));
    };
    for (const Parameter& p : graph_.parameters)
      kept("the gradient of " + p.name, p.value, p.gradient);
    for (const Buffer& b : graph_.buffers) kept("the update of " + b.name, b.value, b.update);
    if (graph_.loss.valid() && !now.count({graph_.loss, Placement::replicated()}) &&
        !now.count({graph_.loss, Placement::partial()}))
      problem("the loss is not held at the end");
  }

  void ends() {
    auto has = [&](ValueId v, Placement p) { return available_.count({v, p}) > 0; };
    if (graph_.loss.valid() && !has(graph_.loss, Placement::replicated()) &&
        !has(graph_.loss, Placement::partial()))
      problem("the loss is neither replicated nor partial at the end");
    for (ValueId v : graph_.outputs) {
      bool whole = false;
      for (auto it = available_.lower_bound({v, Placement::replicated()});
           it != available_.end() && it->first == v; ++it)
        whole = whole || !it->second.is_partial();
      if (!whole)
        problem(fmt::format("the output %{} is neither replicated nor cut at the end", v.index));
    }
    auto placed_as = [&](const std::string& name, ValueId source, ValueId result,
                         const char* what) {
      const auto it = stored_.find(source);
      if (it == stored_.end()) {
        if (result.valid()) problem(fmt::format("{} is never made", name));
        return;
      }
      if (result.valid() && !has(result, it->second))
        problem(fmt::format("the {} of {} is not placed {} as it is", what, name,
                            to_string(it->second)));
    };
    for (const Parameter& p : graph_.parameters) placed_as(p.name, p.value, p.gradient, "gradient");
    for (const Buffer& b : graph_.buffers) placed_as(b.name, b.value, b.update, "update");
  }

  const Theory& theory_;
  const Graph& graph_;
  const Program& program_;
  const std::vector<bool> pure_;  // [value]
  std::vector<bool> ran_;         // [node]
  std::set<Made> available_;      // made by some step
  std::map<ValueId, Placement> stored_;
  std::set<std::tuple<NodeId, int, ValueId, Placement, Placement>> ran_before_;
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> check(const Theory& theory, const Program& program) {
  return Checker(theory, program).run();
}

}  // namespace motley

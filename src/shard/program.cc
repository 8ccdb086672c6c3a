#include "shard/program.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "shard/held_index.h"

namespace motley {

bool has_forms(Collective kind) {
  return kind == Collective::all_gather || kind == Collective::reduce_scatter;
}

std::string to_text(const Theory& theory, const Step& step) {
  std::string text;
  const auto add = [&](const auto&... parts) { ((text += parts), ...); };
  if (step.later) add("later ");
  if (step.joined) add("joined ");
  if (step.again || step.each) add(step.again ? "again " : "each ");
  if (step.is_compute())
    add("node ", std::to_string(step.node.index), " ", theory.graph().node(step.node).op.str(), " ",
        to_string(theory.triples(step.node)[step.triple]));
  else
    add(to_string(step.kind), " %", std::to_string(step.value.index), " ", to_string(step.from),
        " -> ", to_string(step.to), step.form == PieceForm::grouped ? " grouped" : "");
  return text;
}

Step parse_step(const Theory& theory, const std::string& line, const std::string& where) {
  auto fail = [&](const std::string& why) {
    return user_error("plan", "{}: '{}' {}", where, line.substr(0, 200), why);
  };
  const Graph& graph = theory.graph();
  auto word = [&](size_t* at) {
    size_t end = line.find(' ', *at);
    if (end == std::string::npos) end = line.size();
    std::string w = line.substr(*at, end - *at);
    *at = std::min(line.size(), end + 1);
    return w;
  };
  auto index = [&](const std::string& text, size_t count, const char* what) {
    if (text.empty() || text.size() > 9 ||
        text.find_first_not_of("0123456789") != std::string::npos)
      throw fail(fmt::format("has no {} number", what));
    int i = std::stoi(text);
    if (i >= static_cast<int>(count))
      throw fail(fmt::format("names {} {}; the graph has {}", what, i, count));
    return i;
  };
  size_t at = 0;
  std::string head = word(&at);
  Step step;
  if (head == "later") {
    step.later = true;
    head = word(&at);
  }
  if (head == "joined") {
    step.joined = true;
    head = word(&at);
  }
  if (head == "again") {
    step.again = true;
    head = word(&at);
  } else if (head == "each") {
    step.each = true;
    head = word(&at);
  }
  if (step.joined && head != "node") throw fail("says joined, which is for nodes");
  if (head == "node") {
    step.node = NodeId(index(word(&at), graph.nodes.size(), "node"));
    std::string op = word(&at);
    if (op != graph.node(step.node).op)
      throw fail(fmt::format("is {} in the graph; the plan was made for another model",
                             graph.node(step.node).op));
    std::string triple = line.substr(at);
    const auto& triples = theory.triples(step.node);
    for (size_t t = 0; t < triples.size(); ++t)
      if (to_string(triples[t]) == triple) step.triple = static_cast<int>(t);
    if (step.triple < 0)
      throw fail("is not a Hoare triple of this op; see `motley check` for those that are");
    return step;
  }
  std::string value = word(&at), from = word(&at), arrow = word(&at), to = word(&at);
  if (value.empty() || value[0] != '%' || arrow != "->" || !parse_placement(from, &step.from) ||
      !parse_placement(to, &step.to))
    throw fail(
        "is not a step; write 'node N op IN -> OUT' or 'collective %V FROM -> TO', with 'again ' "
        "in front if it runs again, 'each ' if it runs in every pass, 'later ' before these if it "
        "belongs to the pass of gradients of weights");
  step.value = ValueId(index(value.substr(1), graph.values.size(), "value"));
  if (const auto kind = Theory::conversion(step.from, step.to); kind && head == to_string(*kind))
    step.kind = *kind;
  else
    throw fail("is not a collective between these placements");
  if (const std::string form = word(&at); !form.empty()) {
    if (form != "grouped" || !has_forms(step.kind) || at < line.size())
      throw fail("ends in more than 'grouped', which an all_gather or a reduce_scatter may be");
    step.form = PieceForm::grouped;
  }
  return step;
}

namespace {

// Collectives and views of gradients that only the optimizer reads.
bool of_gradients(const Theory& theory, const std::vector<bool>& pure, const Step& step) {
  if (!step.is_compute()) return pure[step.value.index];
  const Node& node = theory.graph().node(step.node);
  const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
  return op && op->alias && node.outputs.size() == 1 && node.outputs[0].valid() &&
         pure[node.outputs[0].index] && pure[theory.graph().inputs_of(node)[0].index];
}

bool may_reduce(const Theory& theory, const std::vector<bool>& pure, const Step& step) {
  return !step.each && of_gradients(theory, pure, step);
}

bool is_backward(const Theory& theory, const Step& step) {
  return step.is_compute() && theory.graph().node(step.node).phase == Phase::backward;
}

}  // namespace

Program phase_ordered(const Theory& theory, const Program& program) {
  const std::vector<bool>& pure = theory.pure_gradients();
  std::set<std::pair<ValueId, Placement>> needed;  // by steps that stay
  std::vector<bool> late(program.steps.size());
  for (size_t s = program.steps.size(); s-- > 0;) {
    const Step& step = program.steps[s];
    bool free = may_reduce(theory, pure, step);
    for_each_made(theory, step, [&](ValueId v, Placement p) {
      free = free && !needed.count({v, p});
    });
    late[s] = free;
    if (!free) for_each_read(theory, step, [&](ValueId v, Placement p) { needed.insert({v, p}); });
  }
  std::vector<Step> ordered;
  ordered.reserve(program.steps.size());
  for (bool turn : {false, true})
    for (size_t s = 0; s < program.steps.size(); ++s)
      if (late[s] == turn) ordered.push_back(program.steps[s]);
  return {std::move(ordered), program.sizes};
}

Phases phases_of(const Theory& theory, const Program& program) {
  const std::vector<bool>& pure = theory.pure_gradients();
  Phases phases;
  phases.reduction = static_cast<int>(program.steps.size());
  while (phases.reduction > 0 && may_reduce(theory, pure, program.steps[phases.reduction - 1]))
    --phases.reduction;
  phases.weights = phases.reduction;
  while (phases.weights > 0 && program.steps[phases.weights - 1].later) --phases.weights;
  while (phases.backward < phases.reduction && !is_backward(theory, program.steps[phases.backward]))
    ++phases.backward;
  if (phases.backward == phases.reduction) return phases;
  std::vector<bool> output(theory.graph().values.size());
  for (ValueId v : theory.graph().outputs) output[v.index] = true;
  while (phases.backward > 0) {
    const Step& step = program.steps[phases.backward - 1];
    // What runs again there is for the backward pass too.
    if (!step.again && (step.is_compute() || output[step.value.index])) break;
    --phases.backward;
  }
  return phases;
}

Program scattered_in_passes(const Theory& theory, const Program& program) {
  const Phases phases = phases_of(theory, program);
  const int end = static_cast<int>(program.steps.size());
  // What scatters in the reduction, and the views in front of it.
  std::vector<bool> early(end);
  std::set<std::pair<ValueId, Placement>> needed;
  for (int s = end; s-- > phases.reduction;) {
    const Step& step = program.steps[s];
    bool wanted = !step.is_compute() &&
                  (step.kind == Collective::reduce_scatter || step.kind == Collective::slice);
    if (step.is_compute())
      for_each_made(theory, step, [&](ValueId v, Placement p) {
        wanted = wanted || needed.count({v, p});
      });
    early[s] = wanted;
    if (wanted) for_each_read(theory, step, [&](ValueId v, Placement p) { needed.insert({v, p}); });
  }
  std::map<std::pair<ValueId, Placement>, int> made;  // by which step of the passes, or behind it
  for (int s = 0; s < phases.reduction; ++s)
    for_each_made(theory, program.steps[s], [&](ValueId v, Placement p) {
      made.try_emplace({v, p}, s);
    });
  std::vector<std::vector<int>> behind(phases.reduction);
  for (int s = phases.reduction; s < end; ++s) {
    if (!early[s]) continue;
    int at = phases.backward;
    for_each_read(theory, program.steps[s], [&](ValueId v, Placement p) {
      const auto it = made.find({v, p});
      at = it == made.end() || at == end ? end : std::max(at, it->second);
    });
    early[s] = at < phases.reduction;
    if (!early[s]) continue;
    behind[at].push_back(s);
    for_each_made(theory, program.steps[s], [&](ValueId v, Placement p) { made[{v, p}] = at; });
  }
  std::vector<Step> result;
  result.reserve(program.steps.size());
  for (int s = 0; s < phases.reduction; ++s) {
    result.push_back(program.steps[s]);
    for (int late : behind[s]) {
      result.push_back(program.steps[late]);
      result.back().each = true;
    }
  }
  for (int s = phases.reduction; s < end; ++s)
    if (!early[s]) result.push_back(program.steps[s]);
  return {std::move(result), program.sizes};
}

Program weights_later(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  const Phases phases = phases_of(theory, program);
  std::vector<bool> output(graph.values.size());
  for (ValueId v : graph.outputs) output[v.index] = true;
  std::set<std::pair<ValueId, Placement>> needed;  // by steps that stay
  std::vector<bool> later(program.steps.size());
  bool stays = false;
  for (int s = phases.reduction; s-- > phases.backward;) {
    const Step& step = program.steps[s];
    bool free = !step.is_compute() || !is_source(graph.node(step.node));
    for_each_made(theory, step, [&](ValueId v, Placement p) {
      free = free && !output[v.index] && needed.count({v, p}) == 0;
    });
    later[s] = free;
    if (free) continue;
    stays = stays || is_backward(theory, step);
    // A step that runs again makes what it makes anew.
    for_each_made(theory, step, [&](ValueId v, Placement p) { needed.erase({v, p}); });
    for_each_read(theory, step, [&](ValueId v, Placement p) { needed.insert({v, p}); });
  }
  if (!stays) return program;
  std::vector<Step> result;
  result.reserve(program.steps.size());
  for (bool turn : {false, true})
    for (int s = 0; s < phases.reduction; ++s) {
      if (later[s] != turn) continue;
      result.push_back(program.steps[s]);
      result.back().later = turn;
    }
  for (size_t s = phases.reduction; s < program.steps.size(); ++s)
    result.push_back(program.steps[s]);
  return {std::move(result), program.sizes};
}

bool has_later(const Program& program) {
  return std::any_of(program.steps.rbegin(), program.steps.rend(),
                     [](const Step& step) { return step.later; });
}

bool has_joined(const Program& program) {
  return std::any_of(program.steps.begin(), program.steps.end(),
                     [](const Step& step) { return step.joined; });
}

std::vector<std::string> check_phases(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  const Phases phases = phases_of(theory, program);
  std::vector<std::string> problems;
  for (size_t s = 0; s < program.steps.size(); ++s) {
    const bool in_place =
        static_cast<int>(s) >= phases.weights && static_cast<int>(s) < phases.reduction;
    if (program.steps[s].later && (!in_place || phases.weights <= phases.backward))
      problems.push_back(fmt::format(
          "step {} says later, and is not at the end of a backward pass that has other steps", s));
    if (!program.steps[s].later) continue;
    if (program.steps[s].is_compute() && is_source(graph.node(program.steps[s].node)))
      problems.push_back(fmt::format("step {} says later, and is a source", s));
    for_each_made(theory, program.steps[s], [&](ValueId v, Placement) {
      if (std::find(graph.outputs.begin(), graph.outputs.end(), v) != graph.outputs.end())
        problems.push_back(
            fmt::format("step {} says later, and makes %{}, which is handed on", s, v.index));
    });
  }
  if (!problems.empty()) return problems;
  std::set<ValueId> whole;
  for (int s = 0; s < phases.backward; ++s)
    for_each_made(theory, program.steps[s], [&](ValueId v, Placement p) {
      if (!p.is_partial()) whole.insert(v);
    });
  for (ValueId v : graph.outputs)
    if (graph.node(graph.value(v).producer).phase == Phase::forward && !whole.count(v))
      problems.push_back(
          fmt::format("the output %{} of the forward pass is made whole only later", v.index));
  return problems;
}

Placement output_placement(const Theory& theory, const Program& program, ValueId output) {
  Placement found = Placement::partial();
  for (const Step& step : program.steps) {
    for_each_made(theory, step, [&](ValueId v, Placement p) {
      if (v == output && found.is_partial()) found = p;
    });
    if (!found.is_partial()) return found;
  }
  MOTLEY_CHECK(false, "the output %{} is never whole", output.index);
}

std::vector<std::pair<ValueId, Placement>> accumulated(const Theory& theory,
                                                       const Program& program) {
  const Phases phases = phases_of(theory, program);
  const int end = static_cast<int>(program.steps.size());
  std::set<std::pair<ValueId, Placement>> late, read;
  for (int s = phases.reduction; s < end; ++s) {
    for_each_read(theory, program.steps[s], [&](ValueId v, Placement p) { read.insert({v, p}); });
    for_each_made(theory, program.steps[s], [&](ValueId v, Placement p) { late.insert({v, p}); });
  }
  const std::vector<Placement> stored = stored_placements(theory, program);
  for (const Parameter& p : theory.graph().parameters)
    if (p.gradient.valid()) read.insert({p.gradient, stored[p.value.index]});
  std::vector<std::pair<ValueId, Placement>> result;
  for (const auto& pair : read)
    if (!late.count(pair)) result.push_back(pair);
  return result;
}

std::vector<bool> pure_gradients(const Graph& graph) {
  // Consumers come after producers: walking backwards, all readers of a value are known when its
  // producer is met.
  std::vector<bool> gradient(graph.values.size()), read(graph.values.size()),
      impure(graph.values.size());
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) gradient[p.gradient.index] = true;
  for (ValueId v : graph.outputs) impure[v.index] = true;
  auto pure = [&](ValueId v) { return !impure[v.index] && (gradient[v.index] || read[v.index]); };
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    bool passes_on = node.outputs.size() == 1 && node.outputs[0].valid() && pure(node.outputs[0]);
    if (passes_on) {
      const OpDef* op = find_op(node.op);
      passes_on = op && op->alias;
    }
    auto reads = [&](ValueId v) {
      if (!v.valid()) return;
      read[v.index] = true;
      if (!passes_on) impure[v.index] = true;
    };
    for (const Arg& arg : node.args) {
      if (auto one = std::get_if<ValueId>(&arg)) reads(*one);
      if (auto list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId v : *list) reads(v);
    }
  }
  std::vector<bool> result(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v) result[v] = pure(ValueId(v));
  return result;
}

std::vector<Placement> stored_placements(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  std::vector<Placement> stored(graph.values.size());
  for (const Step& step : program.steps)
    if (step.is_compute() && is_source(graph.node(step.node)))
      stored[graph.node(step.node).outputs[0].index] =
          theory.triples(step.node)[step.triple].out[0];
  return stored;
}

int64_t largest_all_reduce(const Theory& theory, const Program& program, bool half_as_f32) {
  int64_t largest = 0;
  const auto wide = [&](bool half) { return half && half_as_f32 ? 2 : 1; };
  for (const Step& step : program.steps) {
    if (step.is_compute()) {
      for (const InnerCollective& c : theory.triples(step.node)[step.triple].collectives)
        if (c.kind == Collective::all_reduce) largest = std::max(largest, c.bytes * wide(c.half));
    } else if (step.kind == Collective::all_reduce) {
      const TensorSpec& spec = theory.graph().spec(step.value);
      largest = std::max(largest, spec.bytes() * wide(is_half(spec.dtype)));
    }
  }
  return largest;
}

std::vector<Held> lifetimes(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  std::vector<Held> held;
  held.reserve(program.steps.size() + 16);
  HeldIndex index(graph.values.size(), held);
  std::vector<std::pair<ValueId, Placement>> stored;
  auto make = [&](ValueId v, Placement p, int s) {
    held.push_back({v, p, s, s});
    index.add(static_cast<int>(held.size()) - 1);
  };
  auto use = [&](ValueId v, Placement p, int s) {
    if (int h = index.find(v, p); h >= 0) held[h].last = s;
  };
  const int end = static_cast<int>(program.steps.size());
  for (int s = 0; s < end; ++s) {
    const Step& step = program.steps[s];
    if (step.is_compute()) {
      const Node& node = graph.node(step.node);
      const Triple& triple = theory.triples(step.node)[step.triple];
      size_t i = 0;
      for (const Arg& arg : node.args) {
        if (auto one = std::get_if<ValueId>(&arg)) {
          if (one->valid()) use(*one, triple.in[i++], s);
        } else if (auto list = std::get_if<std::vector<ValueId>>(&arg)) {
          for (ValueId v : *list)
            if (v.valid()) use(v, triple.in[i++], s);
        }
      }
      for (size_t o = 0; o < node.outputs.size(); ++o)
        if (node.outputs[o].valid()) make(node.outputs[o], triple.out[o], s);
      if (is_source(node)) stored.push_back({node.outputs[0], triple.out[0]});
    } else {
      use(step.value, step.from, s);
      make(step.value, step.to, s);
    }
  }
  if (!graph.outputs.empty()) {
    const Phases phases = phases_of(theory, program);
    for (ValueId v : graph.outputs) {
      const Placement p = output_placement(theory, program, v);
      const int h = index.find(v, p);
      const int until = held[h].made < phases.backward ? phases.backward : phases.weights;
      held[h].last = std::max(held[h].last, until - 1);
    }
  }
  if (graph.loss.valid()) {
    use(graph.loss, Placement::replicated(), end);
    use(graph.loss, Placement::partial(), end);
  }
  std::vector<ValueId> result(graph.values.size());
  std::vector<bool> kept(graph.values.size());
  for (const Parameter& p : graph.parameters)
    kept[p.value.index] = true, result[p.value.index] = p.gradient;
  for (const Buffer& b : graph.buffers)
    kept[b.value.index] = true, result[b.value.index] = b.update;
  for (const auto& [v, p] : stored) {
    if (!kept[v.index]) continue;
    use(v, p, end);
    if (result[v.index].valid()) use(result[v.index], p, end);
  }
  return held;
}

}  // namespace motley

#include "shard/duplex.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/error.h"
#include "shard/joined.h"

namespace motley {

namespace {

bool is_view(const Node& node) {
  const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
  return op != nullptr && op->alias && node.outputs.size() == 1 && node.outputs[0].valid();
}

// Puts the graphs of all parts together, node by node.
class Joiner {
 public:
  Joiner(const Theory& whole, const std::vector<int64_t>& samples, const std::string& where)
      : theory_(whole), whole_(whole.graph()), where_(where), out_(std::make_unique<Duplex>()) {
    out_->samples = samples;
    for (size_t p = 0; p < samples.size(); ++p) {
      const auto like = std::find(samples.begin(), samples.end(), samples[p]) - samples.begin();
      parts_.push_back(
          static_cast<size_t>(like) < p
              ? parts_[like]
              : std::make_shared<const MicroBatch>(part_of_batch(whole, samples, p, where)));
    }
    out_->first = parts_[0];
  }

  std::unique_ptr<Duplex> run() {
    refuse();
    find_late();
    find_shared();
    const Graph& first = parts_[0]->graph;
    values_.assign(parts_.size(), std::vector<ValueId>(first.values.size()));
    out_->nodes.assign(parts_.size(), std::vector<NodeId>(first.nodes.size()));
    out_->summed.resize(first.values.size());
    out_->sums.resize(first.values.size());
    out_->graph.model = first.model;
    for (size_t n = 0; n < first.nodes.size(); ++n) add_node(n);
    for (size_t n = 0; n < first.nodes.size(); ++n)
      out_->joining.push_back(joining_of(theory_, *parts_[0], *out_, n));
    roles();
    out_->before = parts_[0]->before;
    out_->theory = std::make_unique<Theory>(out_->graph);
    return std::move(out_);
  }

 private:
  void refuse() const {
    for (const auto& part : parts_) {
      if (!part->exact())
        throw user_error("plan",
                         "{}: the batch cannot be taken in parts side by side: {}; use one part",
                         where_, normalised_by_part(whole_, *part));
      MOTLEY_CHECK(part->graph.nodes.size() == parts_[0]->graph.nodes.size());
    }
  }

  // Sums stand where gradients are made; views behind them are taken of the sums.
  void find_late() {
    const Graph& graph = parts_[0]->graph;
    const std::vector<bool> pure = pure_gradients(graph);
    out_->late.assign(graph.nodes.size(), false);
    root_.assign(graph.values.size(), false);
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const Node& node = graph.nodes[n];
      if (is_view(node) && pure[node.outputs[0].index] && pure[graph.inputs_of(node)[0].index]) {
        out_->late[n] = true;
        continue;
      }
      for (ValueId v : node.outputs)
        if (v.valid() && pure[v.index]) root_[v.index] = true;
    }
    for (const Parameter& p : graph.parameters)
      if (p.gradient.valid() && !out_->late[graph.value(p.gradient).producer.index])
        root_[p.gradient.index] = true;
    if (graph.loss.valid()) root_[graph.loss.index] = true;
  }

  // What follows from parameters, buffers and constants alone, and is equal in all parts.
  void find_shared() {
    const Graph& graph = parts_[0]->graph;
    out_->shared.assign(graph.nodes.size(), false);
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const Node& node = graph.nodes[n];
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      bool shared = node.op != "motley::input" && !(op != nullptr && op->random);
      for (ValueId v : graph.inputs_of(node))
        shared = shared && out_->shared[graph.value(v).producer.index];
      for (const auto& part : parts_) {
        const Node& other = part->graph.nodes[n];
        shared = shared && other.args == node.args;
        for (size_t o = 0; o < node.outputs.size() && shared; ++o)
          if (node.outputs[o].valid())
            shared = part->graph.spec(other.outputs[o]) == graph.spec(node.outputs[o]);
      }
      out_->shared[n] = shared;
    }
  }

  void note(NodeId whole, int part, const Duplex::Rows& random) {
    out_->node_of.push_back(whole);
    out_->part_of.push_back(part);
    out_->random.push_back(random);
  }

  Duplex::Rows rows_of(const PartCut& cut, size_t part) const {
    Duplex::Rows rows;
    rows.cut = cut;
    if (cut.is_whole()) return rows;
    int64_t before = 0, all = 0;
    for (size_t p = 0; p < out_->samples.size(); ++p) {
      if (p < part) before += out_->samples[p];
      all += out_->samples[p];
    }
    rows.begin = cut.size * before / all;
    rows.length = cut.size * out_->samples[part] / all;
    return rows;
  }

  void add_node(size_t n) {
    const Graph& first = parts_[0]->graph;
    const bool once = out_->shared[n] || out_->late[n];
    for (size_t p = 0; p < parts_.size(); ++p) {
      const Graph& graph = parts_[p]->graph;
      const Node& node = graph.nodes[n];
      if (p > 0 && once) {
        out_->nodes[p][n] = out_->nodes[0][n];
        for (size_t o = 0; o < node.outputs.size(); ++o)
          if (node.outputs[o].valid())
            values_[p][node.outputs[o].index] = values_[0][first.nodes[n].outputs[o].index];
        continue;
      }
      std::vector<Arg> args = node.args;
      auto rename = [&](ValueId* v) {
        if (!v->valid()) return;
        const ValueId sum = out_->summed[v->index];
        *v = out_->late[n] && sum.valid() ? sum : values_[p][v->index];
      };
      for (Arg& arg : args) {
        if (auto v = std::get_if<ValueId>(&arg)) rename(v);
        if (auto list = std::get_if<std::vector<ValueId>>(&arg))
          for (ValueId& v : *list) rename(&v);
      }
      if (node.op == "motley::input")
        args = {fmt::format("{} part {}", std::get<std::string>(node.args[0]), p)};
      std::vector<TensorSpec> specs;
      for (ValueId v : node.outputs)
        specs.push_back(v.valid() ? graph.spec(v) : TensorSpec{DType::f32, {-1}});
      const NodeId made = out_->graph.add(node.op, std::move(args), specs, node.phase);
      note(parts_[p]->node_of[n], once ? -1 : static_cast<int>(p),
           rows_of(parts_[p]->random[n], p));
      out_->nodes[p][n] = made;
      for (size_t o = 0; o < node.outputs.size(); ++o)
        if (node.outputs[o].valid())
          values_[p][node.outputs[o].index] = out_->graph.node(made).outputs[o];
    }
    for (ValueId v : first.nodes[n].outputs)
      if (v.valid() && root_[v.index]) add_up(v, first.nodes[n].phase);
  }

  void add_up(ValueId v, Phase phase) {
    ValueId sum = values_[0][v.index];
    for (size_t p = 1; p < parts_.size(); ++p) {
      const NodeId id = out_->graph.add("aten::add.Tensor", {sum, values_[p][v.index], int64_t{1}},
                                        {parts_[0]->graph.spec(v)}, phase);
      note(NodeId(), -1, {});
      out_->sums[v.index].push_back(id);
      sum = out_->graph.node(id).outputs[0];
    }
    out_->summed[v.index] = sum;
  }

  void roles() {
    const Graph& first = parts_[0]->graph;
    Graph& graph = out_->graph;
    auto result = [&](ValueId v) {
      if (!v.valid()) return v;
      return out_->summed[v.index].valid() ? out_->summed[v.index] : values_[0][v.index];
    };
    for (const Parameter& p : first.parameters)
      graph.parameters.push_back(
          {p.name, values_[0][p.value.index], result(p.gradient), p.frozen, p.custom});
    for (const Buffer& b : first.buffers)
      graph.buffers.push_back({b.name, values_[0][b.value.index],
                               b.update.valid() ? values_[0][b.update.index] : ValueId()});
    graph.loss = result(first.loss);
    for (size_t i = 0; i < first.inputs.size(); ++i)
      for (size_t p = 0; p < parts_.size(); ++p) {
        const ValueId v = values_[p][parts_[p]->graph.inputs[i].value.index];
        const Node& source = graph.node(graph.value(v).producer);
        graph.inputs.push_back({std::get<std::string>(source.args[0]), v});
        out_->input_of.push_back(static_cast<int>(i));
        out_->inputs.push_back(rows_of(parts_[p]->inputs[i], p));
      }
  }

  const Theory& theory_;
  const Graph& whole_;
  const std::string where_;
  std::vector<std::shared_ptr<const MicroBatch>> parts_;
  std::vector<bool> root_;                    // [value of a part] summed where it is made
  std::vector<std::vector<ValueId>> values_;  // [part][value of a part]
  std::unique_ptr<Duplex> out_;
};

// ---- programs

using Made = std::pair<ValueId, Placement>;

class Mirror {
 public:
  Mirror(const Duplex& duplex, const Theory& part, const Program& program,
         const StageDivision& division, const std::string& where)
      : duplex_(duplex),
        part_(part),
        program_(program),
        division_(division),
        where_(where),
        roles_(roles_of(duplex, part, program)),
        stored_(stored_placements(part, program)) {}

  Program run() {
    const int steps = static_cast<int>(program_.steps.size()),
              stages = static_cast<int>(division_.begin.size());
    find_needed();
    find_read();
    // What is made again travels during the backward pass.
    int backward = phases_of(part_, program_).backward;
    while (backward < steps &&
           (program_.steps[backward].again || !program_.steps[backward].is_compute()))
      ++backward;
    std::vector<std::vector<int>> bodies(stages), groups(stages);
    for (int i = 0; i < steps; ++i) {
      const StepRole& role = roles_[i];
      if (role.late || role.source) continue;
      const bool moves = travels(i);
      const int stage = stage_of(moves ? role.first_reader : i);
      int first = role.made < 0 ? 0 : stage_of(role.made) + 1;
      if (program_.steps[i].again) first = std::max(first, stage_of(backward) + 1);
      // What is made in the stage that needs it cannot travel before.
      if (moves && first <= stage)
        groups[std::max(first, stage - division_.ahead)].push_back(i);
      else
        bodies[stage_of(i)].push_back(i);
    }
    for (int p = 0; p < duplex_.parts(); ++p)
      for (int i = 0; i < steps; ++i)
        if (roles_[i].source) emit(i, p);
    for (int p = 0; p < duplex_.parts(); ++p) emit(groups[0], p);
    for (int s = 0; s < stages; ++s) {
      const bool whole = !division_.whole.empty() && division_.whole[s];
      if (whole) emit_joined(bodies[s]);
      for (int p = 0; p < duplex_.parts(); ++p) {
        if (!whole) emit(bodies[s], p);
        if (s + 1 < stages) emit(groups[s + 1], p);
        if (division_.reduce == Reduce::ready) reduce(-1);
        if (division_.reduce == Reduce::slack)
          reduce(division_.slack.at(static_cast<size_t>(s) * duplex_.parts() + p));
      }
    }
    add_up_rest();
    reduce(-1);
    for (int i = 0; i < steps; ++i)
      if (roles_[i].late && !emitted_.count(i)) emit(i, 0);
    return {std::move(steps_), program_.sizes};
  }

 private:
  int stage_of(int step) const {
    return static_cast<int>(std::upper_bound(division_.begin.begin(), division_.begin.end(), step) -
                            division_.begin.begin() - 1);
  }
  // A collective, or a conversion that one reads.
  bool travels(int i) const { return roles_[i].communicates; }

  // In which placements gradients are to be summed.
  void find_needed() {
    const Graph& graph = part_.graph();
    for (size_t i = 0; i < program_.steps.size(); ++i)
      if (roles_[i].late)
        for_each_read(part_, program_.steps[i], [&](ValueId v, Placement p) {
          if (duplex_.summed[v.index].valid()) needed_.insert({v, p});
        });
    for (const Parameter& p : graph.parameters)
      if (p.gradient.valid() && duplex_.summed[p.gradient.index].valid())
        needed_.insert({p.gradient, stored_[p.value.index]});
    for (const Placement p : {Placement::replicated(), Placement::partial()})
      if (graph.loss.valid()) needed_.insert({graph.loss, p});
  }

  // What the parts read of their own, beside the sums of gradients.
  void find_read() {
    for (size_t i = 0; i < program_.steps.size(); ++i)
      if (!roles_[i].late)
        for_each_read(part_, program_.steps[i], [&](ValueId v, Placement p) {
          read_.insert({v, p});
        });
  }

  void emit(const std::vector<int>& list, int p) {
    for (const int i : list) emit(i, p);
  }

  // Step by step for all parts, in one call where that can be.
  void emit_joined(const std::vector<int>& list) {
    bool added = false;  // gradients, since some were reduced
    for (const int i : list) {
      const Step& step = program_.steps[i];
      joins_ = step.is_compute() &&
               may_join(duplex_.joining[step.node.index], part_.triples(step.node)[step.triple]);
      if (joins_) {
        const Triple& triple = part_.triples(step.node)[step.triple];
        const Node& node = part_.graph().node(step.node);
        const Made made{node.outputs[0], triple.out[0]};
        // A view of rows that lie apart is one of each.
        if (find_op(node.op)->alias)
          joins_ = joins_ && together_.count({part_.graph().inputs_of(node)[0], triple.in[0]});
        if (duplex_.joining[step.node.index].sums)
          joins_ = joins_ && needed_.count(made) && !summed_.count(made) && !read_.count(made);
      }
      if (joins_)
        for_each_made(part_, step, [&](ValueId v, Placement p) { together_.insert({v, p}); });
      const size_t sums = summed_.size();
      for (int p = 0; p < duplex_.parts(); ++p) emit(i, p);
      joins_ = false;
      added = added || summed_.size() > sums;
      if (!added || division_.reduce != Reduce::ready ||
          !std::binary_search(division_.reduce_at.begin(), division_.reduce_at.end(), i))
        continue;
      reduce(-1);
      added = false;
    }
  }

  void emit(int i, int p) {
    const Step& step = program_.steps[i];
    const bool late = roles_[i].late;
    const NodeId node = step.is_compute() ? step.node : part_.graph().value(step.value).producer;
    if (late || duplex_.shared[node.index]) {
      if (!emitted_.insert(i).second) return;
      p = 0;
    }
    Step made = step;
    made.each = false;
    if (!joins_)
      for_each_made(part_, step, [&](ValueId v, Placement placement) {
        together_.erase({v, placement});
      });
    made.joined = joins_ && p > 0;
    if (step.is_compute()) {
      made.node = duplex_.nodes[p][step.node.index];
      made.triple = triple_of(part_.triples(step.node)[step.triple], made.node);
    } else {
      made.value = late ? duplex_.value(-1, step.value) : duplex_.value(p, step.value);
    }
    steps_.push_back(made);
    for_each_made(part_, step, [&](ValueId v, Placement placement) {
      if (late) late_made_.insert({v, placement});
      if (!late && step.is_compute()) made_by_part(v, placement, p);
    });
  }

  int triple_of(const Triple& triple, NodeId node) const {
    const auto& triples = duplex_.theory->triples(node);
    for (size_t t = 0; t < triples.size(); ++t)
      if (triples[t].in == triple.in && triples[t].out == triple.out &&
          triples[t].kernel == triple.kernel)
        return static_cast<int>(t);
    throw user_error(
        "plan", "{}: parts of {} samples differ too much: {} does not run as {} in all", where_,
        fmt::join(duplex_.samples, " and "), describe_node(duplex_.graph, node), to_string(triple));
  }

  // Gradients are summed when the last part has made its own.
  void made_by_part(ValueId v, Placement placement, int p) {
    if (p + 1 < duplex_.parts() || !needed_.count({v, placement})) return;
    add(v, placement);
  }
  void add(ValueId v, Placement placement) {
    if (!summed_.insert({v, placement}).second) return;
    const Triple wanted{{placement, placement}, {placement}, 0, {}, {}};
    for (const NodeId node : duplex_.sums[v.index]) {
      Step step;
      step.node = node;
      step.triple = triple_of(wanted, node);
      step.joined = joins_;
      steps_.push_back(step);
    }
  }
  // Those that a collective made.
  void add_up_rest() {
    std::set<Made> made;
    for (size_t i = 0; i < program_.steps.size(); ++i)
      if (!roles_[i].late)
        for_each_made(part_, program_.steps[i], [&](ValueId v, Placement p) {
          made.insert({v, p});
        });
    for (const auto& [v, p] : needed_)
      if (made.count({v, p})) add(v, p);
  }

  // Emits what can be reduced without waiting for a collective; no more than so many bytes, unless
  // negative.
  void reduce(double bytes) {
    double sent = 0;
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      if (!roles_[i].late || emitted_.count(static_cast<int>(i))) continue;
      const Step& step = program_.steps[i];
      bool ready = true;
      for_each_read(part_, step, [&](ValueId v, Placement p) {
        const bool sum = duplex_.summed[v.index].valid() && summed_.count({v, p});
        ready = ready && (sum || viewed_.count({v, p}));
      });
      if (!ready) continue;
      if (!step.is_compute() && !moves_nothing(step.kind)) {
        const auto size = static_cast<double>(part_.graph().spec(step.value).bytes());
        if (bytes >= 0 && sent + size > bytes) return;
        sent += size;
      } else {
        for_each_made(part_, step, [&](ValueId v, Placement p) { viewed_.insert({v, p}); });
      }
      emit(static_cast<int>(i), 0);
    }
  }

  const Duplex& duplex_;
  const Theory& part_;
  const Program& program_;
  const StageDivision& division_;
  const std::string& where_;
  const std::vector<StepRole> roles_;
  const std::vector<Placement> stored_;
  std::set<Made> needed_, summed_, viewed_, late_made_;
  std::set<Made> read_;      // by parts
  std::set<Made> together_;  // made for all parts at once
  bool joins_ = false;       // the steps that are emitted run in one call
  std::set<int> emitted_;    // of what is run once
  std::vector<Step> steps_;
};

}  // namespace

ValueId Duplex::value(int part, ValueId v) const {
  const Graph& of = first->graph;
  if (part < 0 && summed[v.index].valid()) return summed[v.index];
  const NodeId producer = of.value(v).producer;
  return graph.node(nodes[std::max(part, 0)][producer.index]).outputs[of.value(v).output];
}

std::vector<int64_t> even_parts(int64_t samples, int parts) {
  std::vector<int64_t> sizes;
  for (int p = 0; p < parts; ++p) sizes.push_back(samples / parts + (p < samples % parts ? 1 : 0));
  return sizes;
}

std::unique_ptr<Duplex> duplex_of(const Theory& whole, const std::vector<int64_t>& samples,
                                  const std::string& where) {
  return Joiner(whole, samples, where).run();
}

std::vector<StepRole> roles_of(const Duplex& duplex, const Theory& part, const Program& program) {
  const int end = static_cast<int>(program.steps.size());
  const std::vector<bool>& pure = part.pure_gradients();
  std::vector<StepRole> roles(end);
  std::map<Made, int> last;  // the step that made it last
  for (int i = 0; i < end; ++i) {
    const Step& step = program.steps[i];
    StepRole& role = roles[i];
    role.first_reader = end;
    role.source = step.is_compute() && is_source(part.graph().node(step.node));
    role.late = step.is_compute() ? static_cast<bool>(duplex.late[step.node.index])
                                  : static_cast<bool>(pure[step.value.index]);
    role.communicates = !step.is_compute() && !role.late && !moves_nothing(step.kind);
    for_each_read(part, step, [&](ValueId v, Placement p) {
      const auto it = last.find({v, p});
      if (it == last.end()) return;
      if (!step.is_compute()) {
        const bool chained = !program.steps[it->second].is_compute();
        role.made = chained ? std::max(roles[it->second].made, it->second) : it->second;
        if (roles[it->second].source) role.made = -1;
      }
      StepRole& maker = roles[it->second];
      maker.first_reader = std::min(maker.first_reader, i);
    });
    for_each_made(part, step, [&](ValueId v, Placement p) { last[{v, p}] = i; });
  }
  return roles;
}

Program mirrored(const Duplex& duplex, const Theory& part, const Program& program,
                 const StageDivision& division, const std::string& where) {
  return Mirror(duplex, part, program, division, where).run();
}

namespace {

// [step] The steps that read what it makes; `made`: [step] the steps that made what it reads.
struct Readers {
  Readers(const Theory& part, const Program& program)
      : of(program.steps.size()), made(program.steps.size()) {
    std::map<Made, int> last;
    for (int i = 0; i < static_cast<int>(program.steps.size()); ++i) {
      for_each_read(part, program.steps[i], [&](ValueId v, Placement p) {
        const auto it = last.find({v, p});
        if (it == last.end()) return;
        of[it->second].push_back(i);
        made[i].push_back(it->second);
      });
      for_each_made(part, program.steps[i], [&](ValueId v, Placement p) { last[{v, p}] = i; });
    }
  }
  std::vector<std::vector<int>> of, made;
};

}  // namespace

Program pieces_first(const Theory& part, const Program& program) {
  const std::vector<Step>& steps = program.steps;
  const Readers readers(part, program);
  const Graph& graph = part.graph();
  auto source = [&](int i) {
    return steps[i].is_compute() && is_source(graph.node(steps[i].node));
  };
  std::vector<bool> early(steps.size(), false);
  for (int i = 0; i < static_cast<int>(steps.size()); ++i) {
    const Step& step = steps[i];
    if (!step.is_compute() || step.again) continue;
    const Node& node = graph.node(step.node);
    const OpDef* op = source(i) ? nullptr : find_op(node.op);
    early[i] = node.op != "motley::input" && !(op != nullptr && op->random) &&
               std::all_of(readers.made[i].begin(), readers.made[i].end(),
                           [&](int m) { return early[m]; }) &&
               part.triples(step.node)[step.triple].collectives.empty();
  }
  // Only what collectives read; and nothing behind what it reads itself.
  for (bool changed = true; changed;) {
    changed = false;
    for (int i = static_cast<int>(steps.size()) - 1; i >= 0; --i) {
      if (!early[i] || source(i)) continue;
      const bool computes = std::any_of(readers.of[i].begin(), readers.of[i].end(), [&](int r) {
        return steps[r].is_compute() && !early[r] && !steps[r].again;
      });
      const bool stays = std::all_of(readers.made[i].begin(), readers.made[i].end(),
                                     [&](int m) { return early[m]; });
      if (computes || !stays) early[i] = false, changed = true;
    }
  }
  auto is_early = [&](const Step& step) {
    for (size_t i = 0; i < steps.size(); ++i)
      if (early[i] && !source(static_cast<int>(i)) && steps[i].node == step.node &&
          steps[i].triple == step.triple)
        return true;
    return false;
  };
  std::vector<Step> result;
  for (size_t i = 0; i < steps.size(); ++i)
    if (early[i]) result.push_back(steps[i]);
  for (size_t i = 0; i < steps.size(); ++i)
    if (!early[i] && !(steps[i].again && steps[i].is_compute() && is_early(steps[i])))
      result.push_back(steps[i]);
  return {std::move(result), program.sizes};
}

}  // namespace motley

#include <algorithm>
#include <set>

#include "cost/overlap.h"
#include "graph/op.h"
#include "runtime/instruction.h"
#include "shard/joined.h"

namespace motley {

// [step, and the end] Slots whose values are not read after it.
std::vector<std::vector<int>> Executor::assign_slots(const Phases& phases) {
  const std::vector<Held> held = lifetimes(theory_, program_);
  const int end = static_cast<int>(program_.steps.size());
  for (size_t h = 0; h < held.size(); ++h)
    slots_[{held[h].value, held[h].placement}] = static_cast<int>(h);
  values_.resize(held.size());
  std::vector<std::vector<int>> dead(end + 1);
  for (ValueId v : theory_.graph().outputs) {
    const Placement p = output_placement(theory_, program_, v);
    const int h = slot(v, p);
    outputs_[v] = {p, h, false};
  }
  for (size_t h = 0; h < held.size(); ++h) {
    const Held& x = held[h];
    auto it = outputs_.find(x.value);
    if (it != outputs_.end() && it->second.slot == static_cast<int>(h)) {
      const int until = x.made < phases.backward ? phases.backward : phases.weights;
      it->second.released = x.last == until - 1;
      if (it->second.released) continue;  // take() frees it
    }
    dead[x.last].push_back(slot(x.value, x.placement));
  }
  return dead;
}

void Executor::compile() {
  using Kind = Instruction::Kind;
  const int end = static_cast<int>(program_.steps.size());
  const Phases phases = phases_of(theory_, program_);
  const std::vector<std::vector<int>> dead = assign_slots(phases);
  for (const auto& [v, p] : accumulated(theory_, program_)) accumulated_.push_back(slot(v, p));
  const std::set<int> left_out(options_.left_out.begin(), options_.left_out.end());
  std::vector<GradientMessage> messages;
  std::vector<int> bucket_end(end, -1);  // of asynchronous programs
  if (options_.asynchronous)
    bucket_end = gradient_buckets(theory_, program_);
  else
    messages = gradient_messages(theory_, program_, shares_);
  for (GradientMessage& m : messages)
    std::erase_if(m.steps, [&](int s) { return left_out.count(s) > 0; });
  std::erase_if(messages, [](const GradientMessage& m) { return m.steps.empty(); });
  sent_.resize(messages.size());
  std::vector<int> message_of(end, -1);
  for (size_t m = 0; m < messages.size(); ++m)
    for (int s : messages[m].steps) message_of[s] = static_cast<int>(m);
  size_t next_message = 0;
  std::vector<JoinedCall> calls;
  if (options_.duplex != nullptr) calls = joined_calls(theory_, program_);
  size_t next_call = 0;

  auto operand_of = [&](int s) { return slot(program_.steps[s].value, program_.steps[s].from); };
  auto last_use = [&](int s) {
    return std::find(dead[s].begin(), dead[s].end(), operand_of(s)) != dead[s].end();
  };
  auto send_ready = [&](int s) {
    for (; next_message < messages.size() && messages[next_message].ready == s; ++next_message) {
      Instruction send;
      send.kind = Instruction::Kind::send;
      send.message = static_cast<int>(next_message);
      for (int member : messages[next_message].steps) {
        send.steps.push_back(program_.steps[member]);
        if (last_use(member)) send.free.push_back(operand_of(member));
      }
      send.last = last_use(messages[next_message].steps[0]);
      instructions_.push_back(std::move(send));
    }
  };
  for (int s = 0; s < end; ++s) {
    const Step& step = program_.steps[s];
    if (s == phases.backward) backward_ = instructions_.size();
    if (s == phases.weights) weights_ = instructions_.size();
    if (s == phases.reduction) reduction_ = instructions_.size();
    if (next_call < calls.size() && calls[next_call].begin == s) {
      const JoinedCall& call = calls[next_call++];
      std::vector<Instruction> list;
      for (int j = call.begin; j < call.end; ++j) {
        list.push_back(compiled(program_.steps[j]));
        list.back().free = dead[j];
      }
      if (join(&list, call)) {
        s = call.end - 1;
        instructions_.push_back(std::move(list[0]));
        continue;
      }
    }
    Instruction in = step.is_compute() ? compiled(step) : Instruction();
    in.free = dead[s];
    if (!step.is_compute()) {
      in.message = message_of[s];
      in.kind = left_out.count(s) ? Kind::keep : in.message >= 0 ? Kind::bucket : Kind::convert;
      in.steps = {step};
      in.last = last_use(s);
      in.beside = options_.asynchronous && !moves_nothing(step.kind) && in.kind == Kind::convert;
      if (in.beside && bucket_end[s] > s + 1) {
        in.kind = Kind::bucket;
        for (const int last = bucket_end[s] - 1; s < last;) {
          ++s;
          in.steps.push_back(program_.steps[s]);
          in.free.insert(in.free.end(), dead[s].begin(), dead[s].end());
        }
      }
      if (in.message >= 0) {
        // All of a message are there where the first is needed.
        const std::vector<int>& members = messages[in.message].steps;
        if (members[0] != s) continue;
        in.steps.clear();
        in.free.clear();
        for (int member : members) {
          in.steps.push_back(program_.steps[member]);
          in.free.insert(in.free.end(), dead[member].begin(), dead[member].end());
        }
      }
    }
    instructions_.push_back(std::move(in));
    send_ready(s);
  }
  if (phases.backward == end) backward_ = instructions_.size();
  if (phases.weights == end) weights_ = instructions_.size();
  if (phases.reduction == end) reduction_ = instructions_.size();
  mark_sums();
  if (!calls.empty() && !options_.observe) pass_whole();
}

// What one call makes for all parts, and only such calls read, need not be taken apart.
void Executor::pass_whole() {
  std::vector<int> made(values_.size(), 0);  // [slot] times
  std::vector<std::vector<Instruction*>> readers(values_.size());
  for (Instruction& in : instructions_) {
    for (int s : in.results)
      if (s >= 0) ++made[s];
    for (int s : in.operands) readers[s].push_back(&in);
    for (const Step& step : in.steps) {
      ++made[slot(step.value, step.to)];
      readers[slot(step.value, step.from)].push_back(&in);
    }
  }
  for (const auto& [v, output] : outputs_) ++made[output.slot];
  const Graph& graph = theory_.graph();
  for (const auto& [key, s] : slots_)  // what the step hands on
    if (key.first == graph.loss) ++made[s];
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) ++made[slot(p.gradient, stored(p.value))];
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) ++made[slot(b.update, stored(b.value))];
  for (Instruction& in : instructions_) {
    if (in.kind != Instruction::Kind::joined) continue;
    const size_t results = in.result_rows.size();
    if (in.results.size() <= results) continue;  // a sum
    const size_t parts = in.results.size() / results;
    for (size_t o = 0; o < results; ++o) {
      std::vector<int> rows;  // slots
      for (size_t p = 0; p < parts; ++p) rows.push_back(in.results[p * results + o]);
      in.whole_result[o] =
          rows[0] >= 0 && std::all_of(rows.begin(), rows.end(), [&](int s) {
            return made[s] == 1 &&
                   std::all_of(readers[s].begin(), readers[s].end(),
                               [&](const Instruction* reader) {
                                 return reader->reads_together(rows, in.result_rows[o]);
                               });
          });
      if (!in.whole_result[o]) continue;
      for (size_t p = 1; p < parts; ++p) {
        in.result_shapes[o][in.result_rows[o]] +=
            in.result_shapes[p * results + o][in.result_rows[o]];
        in.results[p * results + o] = -1;
      }
      for (Instruction* reader : readers[rows[0]]) reader->take_whole(rows[0]);
    }
  }
}

bool Executor::Instruction::reads_together(const std::vector<int>& rows, int dim) const {
  if (kind != Kind::joined) return false;
  const size_t count = operand_rows.size();
  for (size_t i = 0; i < operands.size(); ++i) {
    if (std::find(rows.begin(), rows.end(), operands[i]) == rows.end()) continue;
    if (operand_rows[i % count] != dim) return false;
    for (size_t p = 0; p < rows.size(); ++p)
      if (operands[p * count + i % count] != rows[p]) return false;
  }
  return true;
}

void Executor::Instruction::take_whole(int slot) {
  for (size_t i = 0; i < operand_rows.size(); ++i)
    if (operands[i] == slot) whole_operand[i] = true;
}

// The call of a node, of which this device has pieces.
Executor::Instruction Executor::compiled(const Step& step) const {
  const Graph& graph = theory_.graph();
  const int rank = communicator_.rank();
  Instruction in;
  const Node& node = graph.node(step.node);
  const Triple& triple = theory_.triples(step.node)[step.triple];
  const OpDef* def = is_source(node) ? nullptr : find_op(node.op);
  auto inputs = graph.inputs_of(node);
  in.node = &node;
  in.id = step.node;
  in.args = node.args;
  std::vector<Shape> operand_shapes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    in.operands.push_back(slot(inputs[i], triple.in[i]));
    operand_shapes.push_back(local_shape(inputs[i], triple.in[i]));
  }
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    ValueId v = node.outputs[o];
    in.results.push_back(v.valid() ? slot(v, triple.out[o]) : -1);
    in.made.push_back(v);
    in.result_shapes.push_back(v.valid() ? local_shape(v, triple.out[o]) : Shape{});
  }
  if (triple.cut > 0) {
    const Cut cut = theory_.cut(step.node, triple);
    in.length = shares_.of(cut)[rank];
    in.begin = shares_.begin(cut, rank);
  }
  in.placements = triple.out;
  in.meets = !triple.collectives.empty();
  if (is_source(node)) {
    in.kind = Instruction::Kind::source;
  } else if (is_boundary(node)) {
    in.kind = Instruction::Kind::boundary;
    in.given = triple.in[0];
    in.passes = moves_nothing(theory_, step.node, triple, shares_);
  } else if (!triple.kernel.empty()) {
    in.kind = Instruction::Kind::rule;
    in.rule = find_kernel(triple.kernel);
    // The kernels think in elements of the cut dimension; the cut factor is its outermost.
    for (size_t i = 0; i < inputs.size(); ++i)
      if (triple.in[i].is_shard()) {
        int64_t inner = graph.spec(inputs[i]).shape[triple.in[i].dim] / triple.cut;
        in.begin *= inner, in.length *= inner;
        break;
      } else if (i + 1 == inputs.size() && triple.out[0].is_shard()) {
        int64_t inner = graph.spec(node.outputs[0]).shape[triple.out[0].dim] / triple.cut;
        in.begin *= inner, in.length *= inner;
      }
  } else if (def && def->random) {
    in.kind = Instruction::Kind::random;
  } else {
    set_operator(triple, std::move(operand_shapes), &in);
  }
  return in;
}

// Makes one call of those of a node in all parts, and of what adds up its results, in the place of the
// first. Not if this device has no rows of some part: then they run one by one.
bool Executor::join(std::vector<Instruction>* calls, const JoinedCall& call) const {
  using Kind = Instruction::Kind;
  const Duplex& duplex = *options_.duplex;
  Instruction& in = (*calls)[0];
  const auto& first = duplex.nodes[0];
  const auto n = std::find(first.begin(), first.end(), in.id) - first.begin();
  if (static_cast<size_t>(n) == first.size() || call.parts != duplex.parts()) return false;
  const Duplex::Joining& joining = duplex.joining[n];
  for (int p = 0; p < call.parts; ++p)
    if ((*calls)[p].kind != Kind::call || (*calls)[p].id != duplex.nodes[p][n]) return false;
  if (!joining.possible || joining.sums != call.sums()) return false;
  const Graph& graph = theory_.graph();
  std::vector<Shape> operand_shapes, result_shapes = in.result_shapes;
  const ValueList inputs = graph.inputs_of(*in.node);
  const Triple& triple = theory_.triples(in.id)[program_.steps[call.begin].triple];
  for (size_t i = 0; i < inputs.size(); ++i)
    operand_shapes.push_back(local_shape(inputs[i], triple.in[i]));
  in.operand_rows = joining.operands;
  in.result_rows = joining.results;
  in.whole_operand.assign(inputs.size(), false);
  in.whole_result.assign(result_shapes.size(), false);
  for (int p = 1; p < call.parts; ++p) {
    const Instruction& other = (*calls)[p];
    const Step& step = program_.steps[call.begin + p];
    const ValueList own = graph.inputs_of(*other.node);
    for (size_t i = 0; i < own.size(); ++i)
      if (const int d = joining.operands[i]; d >= 0)
        operand_shapes[i][d] +=
            local_shape(own[i], theory_.triples(step.node)[step.triple].in[i])[d];
    for (size_t o = 0; o < result_shapes.size(); ++o)
      if (const int d = joining.results[o]; d >= 0)
        result_shapes[o][d] += other.result_shapes[o][d];
    in.operands.insert(in.operands.end(), other.operands.begin(), other.operands.end());
  }
  const auto take = [&](const Instruction& of, bool results) {
    in.free.insert(in.free.end(), of.free.begin(), of.free.end());
    if (!results) return;
    in.results.insert(in.results.end(), of.results.begin(), of.results.end());
    in.result_shapes.insert(in.result_shapes.end(), of.result_shapes.begin(),
                            of.result_shapes.end());
    in.placements.insert(in.placements.end(), of.placements.begin(), of.placements.end());
    in.made.insert(in.made.end(), of.made.begin(), of.made.end());
  };
  if (call.sums())
    in.results.clear(), in.result_shapes.clear(), in.placements.clear(), in.made.clear();
  for (int s = 1; s < call.end - call.begin; ++s)
    take((*calls)[s], !call.sums() || call.begin + s + 1 == call.end);
  const OpDef* def = find_op(in.node->op);
  in.args = in.node->args;
  if (def && def->size_arg >= 0) in.args[def->size_arg] = result_shapes[0];
  if (def && def->localize)
    def->localize({graph, *in.node, operand_shapes, result_shapes}, &in.args);
  in.kind = Kind::joined;
  return true;
}

void Executor::set_operator(const Triple& triple, std::vector<Shape> operand_shapes,
                            Instruction* in) const {
  const Graph& graph = theory_.graph();
  const Node& node = *in->node;
  const OpDef* def = find_op(node.op);
  const auto inputs = graph.inputs_of(node);
  bool empty = triple.cut > 0 && in->length == 0;
  in->kind = empty ? Instruction::Kind::empty : Instruction::Kind::call;
  std::vector<Shape> result_shapes = in->result_shapes;
  bool any = false;
  bool partial_operand =
      std::any_of(triple.in.begin(), triple.in.end(), [](Placement p) { return p.is_partial(); });
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    // A partial operand (a bias under a cut sum) goes into partial results even where the piece
    // is empty.
    in->wanted.push_back(
        empty && node.outputs[o].valid() &&
        (triple.out[o].is_replicated() || (triple.out[o].is_partial() && partial_operand)));
    any = any || in->wanted.back();
  }
  if (empty && any) {
    // Results that do not depend on the cut operands are computed with a piece of size one in
    // their place.
    for (size_t i = 0; i < inputs.size(); ++i) {
      in->stand_in.push_back({});
      if (!triple.in[i].is_shard()) continue;
      Shape shape = graph.spec(inputs[i]).shape;
      shape[triple.in[i].dim] /= triple.cut;
      operand_shapes[i] = in->stand_in.back() = shape;
    }
    for (size_t o = 0; o < node.outputs.size(); ++o)
      if (node.outputs[o].valid() && triple.out[o].is_shard()) {
        result_shapes[o] = graph.spec(node.outputs[o]).shape;
        result_shapes[o][triple.out[o].dim] /= triple.cut;
      }
  }
  in->op = &find_operator(node.op);
  if (def && def->size_arg >= 0) in->args[def->size_arg] = result_shapes[0];
  if (def && def->localize) def->localize({graph, node, operand_shapes, result_shapes}, &in->args);
}

// When the sums of micro-batches take their terms: as soon as the backward phase reads them no more.
void Executor::mark_sums() {
  std::vector<int> last(values_.size(), -1);  // instruction of the backward phase, by slot
  for (size_t i = backward_; i < reduction_; ++i) {
    const Instruction& in = instructions_[i];
    if (in.kind == Instruction::Kind::send) continue;  // not in phases
    auto touch = [&](int slot) {
      if (slot >= 0) last[slot] = static_cast<int>(i);
    };
    for (int s : in.operands) touch(s);
    for (int s : in.results) touch(s);
    for (const Step& s : in.steps) touch(slot(s.value, s.from)), touch(slot(s.value, s.to));
  }
  for (int s : accumulated_)
    if (last[s] >= 0) instructions_[last[s]].sums.push_back(s);
}

}  // namespace motley

#include "shard/joined.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/error.h"

namespace motley {

namespace {

using Made = std::pair<ValueId, Placement>;

std::vector<Made> operands_of(const Theory& theory, const Step& step) {
  std::vector<Made> list;
  for_each_read(theory, step, [&](ValueId v, Placement p) { list.emplace_back(v, p); });
  return list;
}

// Which call made the rows of a value, as far as views go.
class Rows {
 public:
  explicit Rows(const Theory& theory) : theory_(theory) {}

  void made(const JoinedCall& call, const Program& program) {
    if (call.sums()) return;
    int result = 0;
    for (int s = call.begin; s < call.end; ++s) {
      result = 0;
      for_each_made(theory_, program.steps[s], [&](ValueId v, Placement p) {
        call_of_[{v, p}] = last_ + ++result;
      });
    }
    last_ += result;
  }
  void made(const Step& step) {
    int of = 0;
    if (step.is_compute()) {
      const Node& node = theory_.graph().node(step.node);
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      if (op && op->alias) {
        const std::vector<Made> operands = operands_of(theory_, step);
        if (!operands.empty()) of = this->of(operands[0]);
      }
    }
    for_each_made(theory_, step, [&](ValueId v, Placement p) { call_of_[{v, p}] = of; });
  }
  // 0: none.
  int of(const Made& value) const {
    const auto it = call_of_.find(value);
    return it == call_of_.end() ? 0 : it->second;
  }

 private:
  const Theory& theory_;
  std::map<Made, int> call_of_;
  int last_ = 0;
};

}  // namespace

// One call on all rows is the node of the whole batch, whose triple says where the rows are.
Duplex::Joining joining_of(const Theory& whole_step, const MicroBatch& part, const Duplex& duplex,
                           size_t n) {
  const Node& node = part.graph.nodes[n];
  const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
  Duplex::Joining joining;
  if (duplex.parts() < 2 || duplex.shared[n] || duplex.late[n] || op == nullptr || op->random ||
      part.triples[n] < 0)
    return {};
  const NodeId whole = part.node_of[n];
  const Triple& triple = whole_step.triples(whole)[part.triples[n]];
  const auto inputs = part.graph.inputs_of(node);
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Placement p = triple.in[i];
    const bool same = duplex.shared[part.graph.value(inputs[i]).producer.index];
    if (same ? !p.is_replicated() : !p.is_shard() || p.factor != 0) return {};
    joining.operands.push_back(same ? -1 : p.dim);
    any = any || !same;
  }
  for (size_t o = 0; o < node.outputs.size(); ++o) {
    if (!node.outputs[o].valid()) {
      joining.results.push_back(-1);
      continue;
    }
    const Placement p = triple.out[o];
    const Shape& shape = part.graph.spec(node.outputs[o]).shape;
    joining.sums = joining.sums || p.is_partial();
    const bool one_run = op->alias || std::all_of(shape.begin(), shape.begin() + p.dim,
                                                  [](int64_t size) { return size == 1; });
    if (!p.is_partial() && (!p.is_shard() || p.factor != 0 || !one_run)) return {};
    joining.results.push_back(p.is_partial() ? -1 : p.dim);
  }
  if (joining.sums && (node.outputs.size() != 1 || duplex.sums[node.outputs[0].index].empty()))
    return {};
  joining.possible = any;
  return joining;
}

bool may_join(const Duplex::Joining& joining, const Triple& triple) {
  return joining.possible && triple.kernel.empty() && triple.collectives.empty();
}

std::vector<JoinedCall> joined_calls(const Theory& theory, const Program& program) {
  std::vector<JoinedCall> calls;
  if (!has_joined(program)) return calls;
  const int end = static_cast<int>(program.steps.size());
  Rows rows(theory);
  for (int s = 0; s < end; ++s) {
    if (s + 1 == end || !program.steps[s + 1].joined || !program.steps[s].is_compute()) {
      rows.made(program.steps[s]);
      continue;
    }
    JoinedCall call;
    call.begin = call.end = s;
    std::set<Made> made;
    bool alike = true;  // otherwise check_joined() refuses it
    const std::vector<Made> first = operands_of(theory, program.steps[s]);
    call.own.assign(first.size(), false);
    call.copied.assign(first.size(), false);
    for (; call.end < end && (call.end == s || program.steps[call.end].joined); ++call.end) {
      const Step& step = program.steps[call.end];
      const std::vector<Made> operands = operands_of(theory, step);
      const bool adds = std::any_of(operands.begin(), operands.end(),
                                    [&](const Made& m) { return made.count(m) > 0; });
      for_each_made(theory, step, [&](ValueId v, Placement p) { made.insert({v, p}); });
      if (adds) continue;
      ++call.parts;
      alike = alike && step.is_compute() && operands.size() == first.size();
      for (size_t i = 0; alike && i < first.size(); ++i) {
        if (operands[i] == first[i]) continue;
        call.own[i] = true;
        if (rows.of(first[i]) == 0 || rows.of(operands[i]) != rows.of(first[i]))
          call.copied[i] = true;
      }
    }
    s = call.end - 1;
    if (alike) {
      rows.made(call, program);
      calls.push_back(std::move(call));
    } else {
      for (int i = call.begin; i < call.end; ++i) rows.made(program.steps[i]);
    }
  }
  return calls;
}

namespace {

class JoinedChecker {
 public:
  JoinedChecker(const Duplex& duplex, const Program& program)
      : duplex_(duplex), theory_(*duplex.theory), program_(program) {
    for (size_t p = 0; p < duplex.nodes.size(); ++p)
      for (size_t n = 0; n < duplex.nodes[p].size(); ++n)
        if (duplex.part_of[duplex.nodes[p][n].index] >= 0)
          origin_[duplex.nodes[p][n]] = static_cast<int>(n);
    for (size_t s = 0; s < program.steps.size(); ++s)
      for_each_read(theory_, program.steps[s], [&](ValueId v, Placement p) {
        readers_[{v, p}].push_back(static_cast<int>(s));
      });
  }

  std::vector<std::string> run() {
    const int end = static_cast<int>(program_.steps.size());
    for (int s = 0; s < end && problems_.size() < 20;) {
      if (program_.steps[s].joined) {
        problem(s, "says joined, and there is no step before it to run with");
        ++s;
        continue;
      }
      int next = s + 1;
      while (next < end && program_.steps[next].joined) ++next;
      if (next > s + 1) check_call(s, next);
      s = next;
    }
    return std::move(problems_);
  }

 private:
  void problem(int step, const std::string& text) {
    problems_.push_back(fmt::format("step {}: {}", step, text));
  }

  void check_call(int begin, int end) {
    const Step& first = program_.steps[begin];
    const auto it = first.is_compute() ? origin_.find(first.node) : origin_.end();
    if (it == origin_.end() || !duplex_.joining[it->second].possible)
      return problem(begin + 1, "says joined, and the step before it cannot run for several parts");
    const int n = it->second, parts = duplex_.parts();
    const Duplex::Joining& joining = duplex_.joining[n];
    const Triple& triple = theory_.triples(first.node)[first.triple];
    if (!may_join(joining, triple))
      return problem(begin + 1, "says joined, and the step before it is no single call");
    const ValueId v = duplex_.first->graph.nodes[n].outputs[0];
    const std::vector<NodeId> sums = joining.sums ? duplex_.sums[v.index] : std::vector<NodeId>();
    if (end - begin != parts + static_cast<int>(sums.size()))
      return problem(begin + 1,
                     fmt::format("says joined; {} steps run together, of {} parts{}", end - begin,
                                 parts, sums.empty() ? "" : " and their additions"));
    for (int p = 0; p < parts; ++p) {
      const Step& step = program_.steps[begin + p];
      if (!step.is_compute() || step.node != duplex_.nodes[p][n] || step.again != first.again)
        return problem(begin + p, "says joined, and is not the same step of the next part");
      const Triple& other = theory_.triples(step.node)[step.triple];
      if (other.in != triple.in || other.out != triple.out || other.kernel != triple.kernel)
        return problem(begin + p, "says joined, and runs otherwise than the step before it");
    }
    for (size_t a = 0; a < sums.size(); ++a) {
      const Step& step = program_.steps[begin + parts + static_cast<int>(a)];
      const bool adds =
          step.is_compute() && step.node == sums[a] && !step.again &&
          theory_.triples(step.node)[step.triple].in == std::vector<Placement>(2, triple.out[0]) &&
          theory_.triples(step.node)[step.triple].out[0] == triple.out[0];
      if (!adds)
        return problem(begin + parts + static_cast<int>(a),
                       "says joined, and does not add what the steps before it made");
    }
    // Terms of a sum, and sums of some, are never there.
    for (int s = begin; s + 1 < end && !sums.empty(); ++s)
      for_each_made(theory_, program_.steps[s], [&](ValueId made, Placement p) {
        const std::vector<int>& readers = readers_[{made, p}];
        if (std::any_of(readers.begin(), readers.end(),
                        [&](int r) { return r < begin || r >= end; }))
          problem(s, fmt::format("%{} is read by itself, and made as part of a sum", made.index));
      });
  }

  const Duplex& duplex_;
  const Theory& theory_;
  const Program& program_;
  std::map<NodeId, int> origin_;  // node of a part's graph
  std::map<Made, std::vector<int>> readers_;
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> check_joined(const Duplex& duplex, const Program& program) {
  return JoinedChecker(duplex, program).run();
}

}  // namespace motley

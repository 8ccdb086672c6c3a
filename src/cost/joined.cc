#include "cost/joined.h"

#include <algorithm>

namespace motley {

JoinedWork::JoinedWork(const Theory& theory, const Program& program, const JoinedCall& call) {
  const Graph& graph = theory.graph();
  copies_.free = true;
  Flops all = 0;
  for (int p = 0; p < call.parts; ++p) {
    const Step& step = program.steps[call.begin + p];
    const Triple& triple = theory.triples(step.node)[step.triple];
    Work part = work_of(theory, step.node, triple);
    cuts_.push_back(part.cut);
    weights_.push_back(std::max(1.0, part.flops));
    all += weights_.back();
    const auto less = [&](ValueId v, Placement placement) {
      (placement.is_shard() ? part.cut_bytes : part.whole_bytes) -=
          static_cast<Bytes>(graph.spec(v).bytes());
    };
    const Node& node = graph.node(step.node);
    const ValueList inputs = graph.inputs_of(node);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!call.own[i]) {
        if (p > 0) less(inputs[i], triple.in[i]);
        continue;
      }
      if (!call.copied[i]) continue;
      const TensorSpec& spec = graph.spec(inputs[i]);
      (triple.in[i].is_shard() ? copies_.cut_bytes : copies_.whole_bytes) +=
          2 * static_cast<Bytes>(spec.bytes());  // read and written
      copies_.flops += static_cast<Flops>(spec.numel());
      copies_.half = copies_.half || is_half(spec.dtype);
      copies_.free = false;
    }
    if (call.sums() && p > 0)
      for (size_t o = 0; o < node.outputs.size(); ++o)
        if (node.outputs[o].valid()) less(node.outputs[o], triple.out[o]);
    if (p == 0) {
      work_ = part;
      continue;
    }
    work_.flops += part.flops;
    work_.cut_bytes += part.cut_bytes;
    work_.whole_bytes += part.whole_bytes;
  }
  for (double& weight : weights_) weight /= all;
  copies_.op = find_op("aten::cat");
  copies_.cut = work_.cut;
}

JoinedWork::JoinedWork(const Theory& part, NodeId id, const Triple& triple,
                       const Duplex::Joining& joining, int parts)
    : work_(work_of(part, id, triple)), cuts_{work_.cut}, weights_{1} {
  const Graph& graph = part.graph();
  copies_.free = true;
  const double more = parts - 1;
  work_.flops += more * work_.flops;
  const auto again = [&](ValueId v, Placement placement) {
    (placement.is_shard() ? work_.cut_bytes : work_.whole_bytes) +=
        more * static_cast<Bytes>(graph.spec(v).bytes());
  };
  const Node& node = graph.node(id);
  const ValueList inputs = graph.inputs_of(node);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (joining.operands[i] >= 0) again(inputs[i], triple.in[i]);
  for (size_t o = 0; o < node.outputs.size(); ++o)
    if (node.outputs[o].valid() && !joining.sums) again(node.outputs[o], triple.out[o]);
}

void add_joined(const Theory& theory, const Program& program, const JoinedCall& call,
                const CostModel& model, const Fractions& fractions, ProgramCost* cost) {
  const JoinedWork work(theory, program, call);
  for (int t = 0; t < model.types(); ++t) {
    const Seconds seconds =
        work.seconds(model, t, [&](Cut cut) { return fractions.by_type(cut)[t]; });
    cost->stages.back().compute[t] += seconds;
    cost->stages.back().whole[t] += seconds;
    cost->compute[t] += seconds;
  }
}

}  // namespace motley

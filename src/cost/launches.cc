#include <algorithm>

#include "cost/cost.h"
#include "cost/joined.h"
#include "cost/storage.h"

namespace motley {

namespace {

// A device takes its calls in order, each once the machine has launched it.
struct Queue {
  Seconds launched = 0, done = 0, computed = 0;

  void add(Seconds launch, Seconds seconds) {
    launched += launch;
    done = std::max(done, launched) + seconds;
    computed += seconds;
  }
};

Queue queue_of(const Theory& theory, const Program& program, const CostModel& model,
               const Fractions& fractions, int type, int begin, int end) {
  Queue queue;
  const std::vector<JoinedCall> calls = joined_calls(theory, program);
  size_t next = 0;
  for (int s = begin; s < end; ++s) {
    const Step& step = program.steps[s];
    if (!step.is_compute()) continue;
    while (next < calls.size() && calls[next].begin < s) ++next;
    if (next < calls.size() && calls[next].begin == s && calls[next].end <= end) {
      const JoinedWork work(theory, program, calls[next]);
      queue.add(work.launch(model, type),
                work.seconds(model, type, [&](Cut cut) { return fractions.by_type(cut)[type]; }));
      s = calls[next].end - 1;
      continue;
    }
    const Work work = work_of(theory, step.node, theory.triples(step.node)[step.triple]);
    if (!work.free)
      queue.add(model.launch(type, work),
                model.compute(type, work, fractions.by_type(work.cut)[type]));
  }
  return queue;
}

template <typename QueueOf>
Launching slowest(const CostModel& model, QueueOf queue_of_type) {
  Launching all;
  for (int t = 0; t < model.types(); ++t) {
    if (!model.launches(t)) continue;
    const Queue queue = queue_of_type(t);
    all.launches = std::max(all.launches, queue.launched);
    all.waits = std::max(all.waits, queue.done - queue.computed);
  }
  return all;
}

}  // namespace

Seconds CostModel::launch(int type, const Work& work) const {
  const Rates& rates = rates_[type];
  if (work.free || !rates.launches) return 0;
  const auto& ops = work.half ? rates.half_ops : rates.ops;
  const auto measured = ops.find(work.op);
  // Of what was not measured, as long as a small call took alone.
  return measured != ops.end() && measured->second->launch > 0 ? measured->second->launch
                                                               : cluster_.types[type].overhead;
}

Seconds CostModel::launch_of_cast(int type) const {
  Work cast;
  cast.op = find_op("aten::_to_copy");
  cast.half = true;
  return launch(type, cast);
}

Seconds CostModel::launch_of_update(int type, Optimizer optimizer) const {
  const OpRate* rate = optimizer.kind == Optimizer::sgd ? rates_[type].sgd : rates_[type].adamw;
  return rate != nullptr ? rate->launch : 0;
}

Launching launching(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, int begin, int end) {
  return slowest(model,
                 [&](int t) { return queue_of(theory, program, model, fractions, t, begin, end); });
}

Launching launching(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, Optimizer optimizer) {
  bool any = false;
  for (int t = 0; t < model.types(); ++t) any = any || model.launches(t);
  if (!any) return {};
  const std::vector<Placement> stored = stored_placements(theory, program);
  const Graph& graph = theory.graph();
  Launching all = slowest(model, [&](int t) {
    Queue queue =
        queue_of(theory, program, model, fractions, t, 0, static_cast<int>(program.steps.size()));
    for (const Parameter& p : graph.parameters) {
      if (!p.gradient.valid()) continue;
      const TensorSpec& spec = graph.spec(p.value);
      const Cut cut = theory.cut(p.value, stored[p.value.index]);
      // A gradient in 16 bits is made one of the parameter's type first.
      if (graph.spec(p.gradient).dtype != spec.dtype) queue.add(model.launch_of_cast(t), 0);
      queue.add(
          model.launch_of_update(t, optimizer),
          model.update(t, static_cast<Bytes>(spec.bytes()) * fractions.by_type(cut)[t], optimizer));
    }
    return queue;
  });
  Seconds rest = 0;
  for (int t = 0; t < model.types(); ++t)
    if (model.launches(t)) rest = std::max(rest, model.per_step(t, graph));
  all.launches += rest;
  return all;
}

}  // namespace motley

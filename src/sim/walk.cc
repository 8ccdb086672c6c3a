#include "sim/walk.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "sim/alike.h"

namespace motley {

std::vector<int> walk(const Theory& theory, const Program& program, const CostModel& model,
                      const Fractions& fractions, int begin, int end, std::vector<Seconds>* times,
                      const WalkSink& sink, const WalkOptions& options) {
  const Graph& graph = theory.graph();
  const Cluster& cluster = model.cluster();
  std::vector<Seconds>& now = *times;
  const std::vector<bool>& pure = theory.pure_gradients();
  std::vector<Work> works(static_cast<size_t>(end - begin));
  std::set<Cut> cuts;
  for (int i = begin; i < end; ++i) {
    const Step& step = program.steps[i];
    if (!step.is_compute() || is_boundary(graph.node(step.node))) continue;
    works[i - begin] = work_of(theory, step.node, theory.triples(step.node)[step.triple]);
    if (!works[i - begin].free) cuts.insert(works[i - begin].cut);
  }
  std::vector<int> like = like_of(model, fractions, cuts, now, options.each);
  const std::vector<int> first = first_of(like);
  auto spend = [&](int d, Seconds s, const std::string& name, WalkKind kind, NodeId node = {}) {
    if (s <= 0) return;
    sink(d, now[d], now[d] + s, name, kind, node);
    now[d] += s;
  };
  auto communicate = [&](Seconds s, const std::string& name) {
    Seconds start = 0;
    for (int d : first) start = std::max(start, now[d]);
    for (int d : first) {
      spend(d, start - now[d], "wait", WalkKind::wait);
      now[d] = start;
      spend(d, s, name, WalkKind::comm);
    }
  };
  GradientRun run(program.sizes);
  for (int i = begin; i < end; ++i) {
    if (options.deadline.over()) throw TimeIsUp();
    const Step& step = program.steps[i];
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      if (is_boundary(graph.node(step.node))) {
        if (const Seconds s = inner_seconds(theory, step.node, triple, model, fractions); s > 0) {
          communicate(s, "exchange");
          run.end();
        }
        continue;
      }
      for (const InnerCollective& c : triple.collectives)
        communicate(model.net().all_reduce(model.moved(c)), "all_reduce in " + triple.kernel);
      const Work& work = works[i - begin];
      if (work.free) continue;
      run.end();
      const auto& f = fractions.by_device(work.cut);
      for (int d : first)
        spend(d, model.compute(cluster.devices[d].type, work, f[d]), graph.node(step.node).op,
              WalkKind::compute, step.node);
    } else if (!moves_nothing(step.kind)) {
      const Placement cut = step.from.is_shard() ? step.from : step.to;
      const TensorSpec& spec = graph.spec(step.value);
      const bool gradient = step.kind == Collective::all_reduce && pure[step.value.index];
      const Seconds s =
          gradient ? model.gradient_all_reduce(spec, &run)
                   : model.collective(step.kind, model.moved(step.kind, spec),
                                      fractions.profile(theory.cut(step.value, cut), model.net()),
                                      step.form);
      if (!gradient) run.end();
      communicate(s, to_string(step.kind));
    }
  }
  for (size_t d = 0; d < like.size(); ++d) now[d] = now[like[d]];
  return like;
}

namespace {

// Gradients on their way to the second copies of what is cut: of all devices at once.
void walk_to_second(const Theory& theory, const std::vector<Placement>& stored,
                    const CostModel& model, const Fractions& fractions, Optimizer optimizer,
                    std::vector<Seconds>* now, const WalkSink& sink) {
  Seconds seconds = 0;
  for (const Parameter& p : theory.graph().parameters)
    seconds += second_copy(theory, p, stored[p.value.index], model, fractions, optimizer).send;
  if (seconds == 0) return;
  seconds += model.latency();
  const Seconds start = *std::max_element(now->begin(), now->end());
  for (size_t d = 0; d < now->size(); ++d) {
    const int device = static_cast<int>(d);
    if ((*now)[d] < start) sink(device, (*now)[d], start, "wait", WalkKind::wait, {});
    sink(device, start, start + seconds, "second copies", WalkKind::comm, {});
    (*now)[d] = start + seconds;
  }
}

}  // namespace

std::vector<int> walk_optimizer(const Theory& theory, const Program& program,
                                const CostModel& model, const Fractions& fractions,
                                Optimizer optimizer, std::vector<Seconds>* now,
                                const WalkSink& sink, const ZeroShare& kept,
                                const WalkOptions& options) {
  const Graph& graph = theory.graph();
  const std::vector<Placement> stored = stored_placements(theory, program);
  const auto cut_of = [&](const Parameter& p) {
    return theory.cut(p.value, stored[p.value.index]);
  };
  std::set<Cut> cuts;
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) cuts.insert(cut_of(p));
  std::vector<int> like = like_of(model, fractions, cuts, *now, options.each || fractions.twice());
  const std::vector<int> first = first_of(like);
  if (fractions.twice()) walk_to_second(theory, stored, model, fractions, optimizer, now, sink);
  for (size_t i = 0; i < graph.parameters.size(); ++i) {
    if (options.deadline.over()) throw TimeIsUp();
    const Parameter& p = graph.parameters[i];
    if (!p.gradient.valid()) continue;
    const Bytes bytes = static_cast<Bytes>(graph.spec(p.value).bytes()) * kept.of_optimizer(i);
    const auto& f = fractions.by_device(cut_of(p));
    const auto& second = fractions.second_by_device(cut_of(p));
    for (int d : first) {
      const int type = model.cluster().devices[d].type;
      const Seconds s = model.update(type, bytes * f[d], optimizer) +
                        model.update(type, bytes * second[d], optimizer);
      if (s <= 0) continue;
      sink(d, (*now)[d], (*now)[d] + s, "optimizer", WalkKind::compute, {});
      (*now)[d] += s;
    }
  }
  for (size_t d = 0; d < like.size(); ++d) (*now)[d] = (*now)[like[d]];
  return like;
}

}  // namespace motley

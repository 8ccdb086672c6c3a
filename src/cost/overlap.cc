#include "cost/overlap.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace motley {

namespace {

// What a device type has computed while messages travel.
struct Computed {
  Seconds plain = 0, now = 0;  // with nothing beside it; as it is
  // So much more, while the network is busy until then; beside it work takes 1 + slowdown times as
  // long.
  void add(Seconds work, Seconds busy, double slowdown) {
    plain += work;
    const Seconds beside = std::clamp((busy - now) / (1 + slowdown), 0.0, work);
    now += work + beside * slowdown;
  }
};

bool is_barrier(const Theory& theory, const std::vector<bool>& pure, const Step& step,
                const Shares& shares) {
  if (step.is_compute()) {
    const Triple& triple = theory.triples(step.node)[step.triple];
    return !triple.collectives.empty() && !(is_boundary(theory.graph().node(step.node)) &&
                                            moves_nothing(theory, step.node, triple, shares));
  }
  if (step.kind == Collective::all_reduce) return !pure[step.value.index];
  return !moves_nothing(step.kind);
}

}  // namespace

std::vector<bool> barriers(const Theory& theory, const Program& program, const Shares& shares) {
  const std::vector<bool>& pure = theory.pure_gradients();
  std::vector<bool> result;
  result.reserve(program.steps.size());
  for (const Step& step : program.steps) result.push_back(is_barrier(theory, pure, step, shares));
  return result;
}

Seconds message_seconds(const CostModel& model, const TensorSpec& gradient,
                        const GradientSizes& sizes) {
  const auto bytes = static_cast<Bytes>(gradient.bytes());
  const Bytes moved = model.moved(Collective::all_reduce, gradient);
  if (bytes >= sizes.alone || bytes == 0) return model.net().all_reduce(moved);
  // Of the largest message that small gradients make up: seconds per byte are least there.
  const Bytes largest = sizes.together + sizes.alone;
  return bytes / largest * model.net().all_reduce(largest * moved / bytes);
}

std::vector<GradientMessage> gradient_messages(const Theory& theory, const Program& program,
                                               const Shares& shares) {
  const Graph& graph = theory.graph();
  const std::vector<bool>& pure = theory.pure_gradients();
  const Phases phases = phases_of(theory, program);
  std::map<std::pair<ValueId, Placement>, int> made;  // of pure gradients
  auto note = [&](ValueId v, Placement p, int s) {
    if (v.valid() && pure[v.index]) made.try_emplace({v, p}, s);
  };
  struct Gradient {
    int ready, step, barrier;  // barrier: the last other collective before it
  };
  std::vector<Gradient> gradients;
  int barrier = -1;
  for (int s = 0; s < static_cast<int>(program.steps.size()); ++s) {
    const Step& step = program.steps[s];
    if (!step.is_compute() && step.kind == Collective::all_reduce && pure[step.value.index]) {
      const int from = made.at({step.value, step.from});
      gradients.push_back({std::max(from, barrier), s, barrier});
      made[{step.value, step.to}] = s;
      continue;
    }
    if (is_barrier(theory, pure, step, shares)) barrier = s;
    if (step.is_compute()) {
      const Node& node = graph.node(step.node);
      const Triple& triple = theory.triples(step.node)[step.triple];
      for (size_t o = 0; o < node.outputs.size(); ++o) note(node.outputs[o], triple.out[o], s);
    } else {
      note(step.value, step.to, s);
    }
  }
  std::stable_sort(gradients.begin(), gradients.end(), [](const Gradient& a, const Gradient& b) {
    return std::tie(a.barrier, a.ready) < std::tie(b.barrier, b.ready);
  });
  std::vector<GradientMessage> messages;
  Bytes bytes = 0;
  int filling = -1;                  // the message that small gradients join
  int first = 0, last_barrier = -2;  // of that message
  for (const Gradient& g : gradients) {
    auto phase = [&](int s) { return (s >= phases.backward) + (s >= phases.reduction); };
    auto spec = [&](int s) -> const TensorSpec& { return graph.spec(program.steps[s].value); };
    const auto size = static_cast<Bytes>(spec(g.step).bytes());
    if (size >= program.sizes.alone) {
      messages.push_back({g.ready, {g.step}});
      continue;
    }
    const bool joins = filling >= 0 && bytes < program.sizes.together &&
                       last_barrier == g.barrier && g.ready < std::min(first, g.step) &&
                       phase(first) == phase(g.step) && spec(first).dtype == spec(g.step).dtype;
    if (!joins) {
      filling = static_cast<int>(messages.size());
      messages.emplace_back();
      bytes = 0;
      first = g.step;
    }
    GradientMessage& message = messages[filling];
    message.ready = g.ready;
    message.steps.push_back(g.step);
    first = std::min(first, g.step);
    last_barrier = g.barrier;
    bytes += size;
  }
  for (GradientMessage& message : messages) std::sort(message.steps.begin(), message.steps.end());
  std::stable_sort(messages.begin(), messages.end(),
                   [](const auto& a, const auto& b) { return a.ready < b.ready; });
  return messages;
}

std::vector<int> gradient_buckets(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  const GradientSizes& sizes = program.sizes;
  const std::vector<bool>& pure = theory.pure_gradients();
  const int end = static_cast<int>(program.steps.size());
  std::vector<int> ends(end, -1);
  auto gradient = [&](int s) {
    const Step& step = program.steps[s];
    return !step.is_compute() && step.kind == Collective::all_reduce && pure[step.value.index];
  };
  for (int s = 0; s < end;) {
    if (!gradient(s)) {
      ++s;
      continue;
    }
    const TensorSpec& spec = graph.spec(program.steps[s].value);
    auto bytes = static_cast<Bytes>(spec.bytes());
    int next = s + 1;
    for (; bytes < sizes.alone && next < end && gradient(next); ++next) {
      const TensorSpec& other = graph.spec(program.steps[next].value);
      const auto more = static_cast<Bytes>(other.bytes());
      if (other.dtype != spec.dtype || more >= sizes.alone || bytes + more > sizes.together) break;
      bytes += more;
    }
    ends[s] = next;
    s = next;
  }
  return ends;
}

namespace {

// Of hidden_seconds(). *charged: seconds that cost_of() charges for gradients.
Seconds hidden_of(const Theory& theory, const Program& program, const CostModel& model,
                  const Fractions& fractions, ValueId* first, Seconds* charged) {
  *charged = 0;
  if (first != nullptr) *first = {};
  const Shares& shares = fractions.shares();
  const std::vector<GradientMessage> messages = gradient_messages(theory, program, shares);
  if (messages.empty() || model.net().devices() == 1 || !model.backend().hides) return 0;
  // Computation of each type since the last collective that is not a gradient's: messages that
  // start after another one begin anew.
  const int end = static_cast<int>(program.steps.size()), types = model.types();
  std::vector<Computed> now(types);
  Seconds busy = 0;    // until when the network carries messages
  Seconds hidden = 0;  // what cost_of() charges for them, less what is waited for
  GradientRun run(program.sizes);
  size_t next = 0, begun = 0;  // begun: the message since which the network has not been idle
  bool waiting = false;
  auto last_of = [&](const GradientMessage& message) {
    ValueId last = program.steps[message.steps[0]].value;
    for (int s : message.steps) {
      const ValueId value = program.steps[s].value;
      const Graph& graph = theory.graph();
      if (graph.value(last).producer < graph.value(value).producer) last = value;
    }
    return last;
  };
  auto latest = [&] { return std::ranges::max(now, {}, &Computed::now).now; };
  // The first wait ends what can be hidden behind; what follows begins anew.
  auto settle = [&] {
    if (!waiting) return;
    const Seconds computed = latest(), plain = std::ranges::max(now, {}, &Computed::plain).plain;
    hidden -= std::max(busy, computed) - plain;
    if (first != nullptr && busy > computed) *first = last_of(messages[begun]);
    now.assign(types, {});
    busy = 0;
    waiting = false;
  };
  const std::vector<bool> barrier = barriers(theory, program, shares);
  std::vector<bool> gradient(end);
  for (const GradientMessage& m : messages)
    for (int s : m.steps) gradient[s] = true;
  for (int s = -1; s < end; ++s) {
    if (s >= 0) {
      const Step& step = program.steps[s];
      if (gradient[s]) {
        settle();
        const TensorSpec& spec = theory.graph().spec(step.value);
        const Seconds seconds = model.gradient_all_reduce(spec, &run);
        *charged += seconds;
        hidden += seconds - model.copying_seconds(spec, program.sizes);
        continue;
      }
      if (barrier[s]) {
        now.assign(types, {});
        busy = 0;
        waiting = false;
        run.end();
      }
      if (step.is_compute()) {
        const Work work = work_of(theory, step.node, theory.triples(step.node)[step.triple]);
        if (!work.free) {
          run.end();
          const auto& f = fractions.by_type(work.cut);
          for (int t = 0; t < types; ++t)
            now[t].add(model.compute(t, work, f[t]), busy, model.cluster().types[t].interference);
        }
      }
    }
    for (; next < messages.size() && messages[next].ready == s; ++next) {
      Bytes bytes = 0;
      for (int g : messages[next].steps)
        bytes += model.moved(Collective::all_reduce, theory.graph().spec(program.steps[g].value));
      const Seconds seconds = model.net().all_reduce(bytes);
      waiting = true;
      const Seconds computed = latest();
      if (busy <= computed) begun = next;
      busy = std::max(busy, computed) + seconds;
    }
  }
  settle();
  return hidden;
}

}  // namespace

Seconds hidden_seconds(const Theory& theory, const Program& program, const CostModel& model,
                       const Fractions& fractions, ValueId* first) {
  Seconds charged = 0;
  return hidden_of(theory, program, model, fractions, first, &charged);
}

Seconds gradient_seconds(const Theory& theory, const Program& program, const GradientSizes& sizes,
                         const CostModel& model) {
  const Graph& graph = theory.graph();
  const std::vector<bool>& pure = theory.pure_gradients();
  GradientRun run(sizes);
  Seconds seconds = 0;
  for (const Step& step : program.steps)
    if (!step.is_compute() && step.kind == Collective::all_reduce && pure[step.value.index])
      seconds += model.gradient_all_reduce(graph.spec(step.value), &run);
  return seconds;
}

std::vector<GradientSizes> usual_sizes() {
  std::vector<GradientSizes> all;
  for (Bytes together = GradientSizes().together; together <= kLargestSizes.together; together *= 4)
    for (Bytes alone = GradientSizes().alone; alone <= std::min(together, kLargestSizes.alone);
         alone *= 4)
      all.push_back({alone, together});
  return all;
}

std::vector<SizesTried> try_sizes(const Theory& theory, const Program& program,
                                  const CostModel& model, const Fractions& fractions,
                                  Seconds worth) {
  std::vector<SizesTried> tried;
  const auto waited = [&](const GradientSizes& sizes) {
    const Program sized{program.steps, sizes};
    Seconds charged = 0;
    const Seconds hidden = hidden_of(theory, sized, model, fractions, nullptr, &charged);
    return charged - hidden;
  };
  const Seconds now = waited(program.sizes);
  if (now < worth) return tried;
  for (const GradientSizes& sizes : usual_sizes())
    if (const Seconds seconds = sizes == program.sizes ? now : waited(sizes); seconds < now - worth)
      tried.push_back({sizes, seconds});
  std::stable_sort(tried.begin(), tried.end(),
                   [](const SizesTried& a, const SizesTried& b) { return a.waited < b.waited; });
  return tried;
}

}  // namespace motley

// The costs of a problem, and those of its programs in the same terms.
#include <algorithm>

#include "core/error.h"
#include "core/infinity.h"
#include "cost/overlap.h"
#include "spmd/build.h"

namespace motley::spmd {

using namespace solver;

namespace {

constexpr double kReceivedWhole = 1.001;  // times what gathering it takes

// Whether a node runs as it does on one device.
bool is_whole(const Triple& t) {
  const auto whole = [](Placement p) { return p.is_replicated(); };
  return t.kernel.empty() && std::all_of(t.in.begin(), t.in.end(), whole) &&
         std::all_of(t.out.begin(), t.out.end(), whole);
}

}  // namespace

void ProblemBuilder::price(const Fractions& fractions, int micro_batches,
                           const OverlapPricing* pricing) {
  const double part = 1.0 / micro_batches;
  if (pricing)
    for (const Decision& d : pricing->decided)
      MOTLEY_CHECK(std::find(separate_.begin(), separate_.end(), d.gradient) != separate_.end());
  price_conversions(fractions, part, pricing);
  price_options(fractions, part, pricing);
}

void ProblemBuilder::price_conversions(const Fractions& fractions, double part,
                                       const OverlapPricing* pricing) {
  const Graph& graph = theory_.graph();
  GradientRun joined(sizes_);
  joined.any = joined.small = true;
  for (size_t t = 0; t < problem_.form_tables.size(); ++t) {
    if (table_class_[t] < 0) continue;
    const bool closed = pricing && pricing->stretch(table_use_[t]) >= pricing->closed;
    FormTable& table = problem_.form_tables[t];
    const Class& c = classes_[table_class_[t]];
    bool gradient = gradient_class_[table_class_[t]];
    const bool weights = is_parameter(table_class_[t]);
    const Decision* decision = pricing ? pricing->decision(c.root) : nullptr;
    const TensorSpec& spec = graph.spec(c.root);
    for (int to = 0; to < table.forms; ++to)
      for (int from = 0; from < table.forms; ++from) {
        double& cost = table.convert[from * table.forms + to];
        cost = from == to ? 0 : kInfinity;
        // Converted at the top member that has the wanted form; a form that starts below the root
        // only serves below it.
        const Form &f = forms(c)[from], &g = forms(c)[to];
        if (from == to || f.top != c.root) continue;
        const auto sources = held(f), targets = held(g);
        auto source = std::find_if(sources.begin(), sources.end(),
                                   [&](const auto& m) { return m.first == g.top; });
        if (source == sources.end()) continue;
        auto target = std::find_if(targets.begin(), targets.end(),
                                   [&](const auto& m) { return m.first == g.top; });
        const auto kind = Theory::conversion(source->second, target->second);
        if (!kind) continue;
        const bool free = moves_nothing(*kind);
        if (!free && kind != Collective::all_reduce &&
            (restriction_ == Restriction::data_parallel ||
             (restriction_ == Restriction::expert_parallel && kind != Collective::all_to_all)))
          continue;
        if (restriction_ == Restriction::zero && kind == Collective::all_to_all) continue;
        if (restriction_ == Restriction::gathered_parameters &&
            (kind == Collective::all_to_all || (kind == Collective::all_gather && !weights)))
          continue;
        if (restriction_ == Restriction::cut_matrices && weights && !free) continue;
        const bool reduced = gradient_view_[table_class_[t]] && kind == Collective::all_reduce;
        if (closed && !free && !reduced) continue;
        Placement cut = source->second.is_shard() ? source->second : target->second;
        // Small gradients are all-reduced together and share one latency.
        if (reduced && decision != nullptr)
          cost = decision->reduced ? 0 : kInfinity;
        else if (reduced && pricing)
          cost = pricing->gradients[pricing->stretch(table_first_[t])] *
                 message_seconds(model_, spec, sizes_);
        else if (gradient && kind == Collective::all_reduce)
          cost = model_.gradient_all_reduce(spec, &joined);
        else
          cost = model_.collective(*kind, model_.moved(*kind, spec),
                                   fractions.profile(theory_.cut(g.top, cut), model_.net()));
        if (gradient) cost *= part;
      }
  }
}

void ProblemBuilder::price_options(const Fractions& fractions, double part,
                                   const OverlapPricing* pricing) {
  const Graph& graph = theory_.graph();
  // On one device every cut would be as good, and its kernels and copies slower.
  const bool alone = restriction_ == Restriction::none && fractions.shares().devices() == 1;
  for (size_t t = 0; t < problem_.option_tables.size(); ++t) {
    const Source& source = sources_[table_exemplar_[t]];
    if (source.origin != Origin::node) continue;
    const Node& node = graph.node(source.node);
    const auto& triples = theory_.triples(source.node);
    auto& options = problem_.option_tables[t].options;
    const bool closed = pricing && pricing->stretch(table_begin_[t]) >= pricing->closed;
    const std::vector<double>* counts =
        pricing ? &pricing->compute[pricing->stretch(table_last_[t])] : nullptr;
    for (size_t i = 0; i < options.size(); ++i) {
      Option& o = options[i];
      const Triple& triple = triples[option_origins_[t].triple[i]];
      if (source.parameter >= 0 && o.out.size() == 2) {
        const TensorSpec& spec = graph.spec(node.outputs[0]);
        Placement p = triple.out[0];
        const auto& f = fractions.by_type(theory_.cut(node.outputs[0], p));
        const Bytes state = state_bytes(graph, graph.parameters[source.parameter], optimizer_);
        for (int j = 0; j < problem_.types; ++j) {
          Bytes local = static_cast<Bytes>(spec.bytes()) * f[j];
          o.compute[j] = part * model_.update(j, local, optimizer_);
          if (pricing) o.compute[j] *= pricing->compute[0][j];
          o.memory[j] = state * f[j];
        }
        if (fractions.twice()) price_second_copy(source, p, fractions, part, pricing, &o);
        if (alone && !is_whole(triple)) o.comm = kInfinity;
        continue;
      }
      o.comm = inner_seconds(theory_, source.node, triple, model_, fractions);
      if (is_received(node) && triple.out[0].is_replicated())
        o.comm = received_whole(source.node, fractions);
      if (closed && !triple.collectives.empty() &&
          !(is_boundary(node) && moves_nothing(theory_, source.node, triple, fractions.shares())))
        o.comm = kInfinity;
      if (alone && !is_whole(triple)) o.comm = kInfinity;
      Work work = work_of(theory_, source.node, triple);
      const auto& f = fractions.by_type(work.cut);
      for (int j = 0; j < problem_.types; ++j) {
        o.compute[j] = (counts ? (*counts)[j] : 1) * model_.compute(j, work, f[j]);
        o.memory[j] = 0;
        for (size_t k = 0; k < node.outputs.size(); ++k) {
          ValueId v = node.outputs[k];
          if (!v.valid() || !classes_[class_of_[v.index]].saved) continue;
          Placement p = triple.out[k];
          double fraction = p.is_shard() ? fractions.by_type(theory_.cut(v, p))[j] : 1;
          o.memory[j] += static_cast<Bytes>(graph.spec(v).bytes()) * fraction;
        }
      }
    }
  }
}

void ProblemBuilder::price_second_copy(const Source& source, Placement placement,
                                       const Fractions& fractions, double part,
                                       const OverlapPricing* pricing, Option* option) {
  const Parameter& p = theory_.graph().parameters[source.parameter];
  const SecondCopy copy = second_copy(theory_, p, placement, model_, fractions, optimizer_);
  const std::vector<double>& kept =
      fractions.second_by_type(placement.is_shard() ? theory_.cut(p.value, placement) : Cut());
  const auto bytes = static_cast<Bytes>(theory_.graph().spec(p.value).bytes());
  option->comm = part * copy.send;
  for (int j = 0; j < problem_.types; ++j) {
    option->compute[j] += part * copy.update[j] * (pricing ? pricing->compute[0][j] : 1);
    option->memory[j] += bytes * (p.gradient.valid() ? 1 + state_factor(optimizer_) : 1) * kept[j];
  }
}

Bytes ProblemBuilder::bytes(int value, int form, int type, const Fractions& fractions) const {
  const auto& [v, p] = held(forms(classes_[value])[form])[0];
  const double part = p.is_shard() ? fractions.by_type(theory_.cut(v, p))[type] : 1;
  return part * static_cast<Bytes>(theory_.graph().spec(v).bytes());
}

Bytes ProblemBuilder::least_bytes(int value, int type, const Fractions& fractions) const {
  Bytes least = bytes(value, 0, type, fractions);
  for (int f = 1; f < static_cast<int>(forms(classes_[value]).size()); ++f)
    least = std::min(least, bytes(value, f, type, fractions));
  return least;
}

void ProblemBuilder::price_at_slowest_type() {
  for (OptionTable& table : problem_.option_tables)
    for (Option& o : table.options)
      o.compute.assign(o.compute.size(), *std::max_element(o.compute.begin(), o.compute.end()));
}

Seconds ProblemBuilder::received_whole(NodeId node, const Fractions& fractions) const {
  const ValueId v = theory_.graph().node(node).outputs[0];
  Seconds least = kInfinity;
  for (const Triple& triple : theory_.triples(node))
    if (const Placement p = triple.out[0]; p.is_shard() && form_of(v, p) >= 0)
      least =
          std::min(least, model_.collective(Collective::all_gather,
                                            static_cast<Bytes>(theory_.graph().spec(v).bytes()),
                                            fractions.profile(theory_.cut(v, p), model_.net())));
  return least < kInfinity ? kReceivedWhole * least : 0;
}

OverlapCost ProblemBuilder::overlap_cost(const Program& program, const Fractions& fractions,
                                         const OverlapPricing& pricing) const {
  const Graph& graph = theory_.graph();
  OverlapCost cost;
  cost.compute.assign(pricing.from.size() + 1, std::vector<Seconds>(problem_.types, 0));
  cost.gradients.assign(pricing.from.size() + 1, 0);
  for (const Step& step : program.steps) {
    if (step.is_compute()) {
      const Triple& triple = theory_.triples(step.node)[step.triple];
      cost.comm += inner_seconds(theory_, step.node, triple, model_, fractions);
      const Work work = work_of(theory_, step.node, triple);
      const auto& f = fractions.by_type(work.cut);
      auto& seconds = cost.compute[pricing.stretch(step.node.index)];
      for (int j = 0; j < problem_.types; ++j) seconds[j] += model_.compute(j, work, f[j]);
      continue;
    }
    const TensorSpec& spec = graph.spec(step.value);
    if (is_reduction(step)) {
      if (pricing.decision(root_of(step.value)) == nullptr)
        cost.gradients[pricing.stretch(ready(step.value))] += message_seconds(model_, spec, sizes_);
      continue;
    }
    const Placement cut = step.from.is_shard() ? step.from : step.to;
    cost.comm += model_.collective(step.kind, model_.moved(step.kind, spec),
                                   fractions.profile(theory_.cut(step.value, cut), model_.net()));
  }
  const std::vector<Placement> stored = stored_placements(theory_, program);
  for (const Parameter& p : graph.parameters) {
    if (!p.gradient.valid()) continue;
    const auto& f = fractions.by_type(theory_.cut(p.value, stored[p.value.index]));
    const SecondCopy copy =
        second_copy(theory_, p, stored[p.value.index], model_, fractions, optimizer_);
    cost.comm += copy.send;
    for (int j = 0; j < problem_.types; ++j)
      cost.compute[0][j] +=
          model_.update(j, static_cast<Bytes>(graph.spec(p.value).bytes()) * f[j], optimizer_) +
          copy.update[j];
  }
  for (int j = 0; j < problem_.types; ++j) cost.compute[0][j] += model_.per_step(j, graph);
  for (const Decision& d : pricing.decided)
    if (d.reduced)
      cost.gradients[pricing.stretch(ready(d.gradient))] += reduction_seconds(d.gradient);
  return cost;
}

Seconds ProblemBuilder::reduction_seconds(ValueId gradient) const {
  return message_seconds(model_, theory_.graph().spec(gradient), sizes_);
}

Seconds ProblemBuilder::waited_seconds(ValueId gradient) const {
  return std::max(0.0, reduction_seconds(gradient) - model_.net().all_reduce(0));
}

Seconds ProblemBuilder::decided_seconds(const OverlapPricing& pricing) const {
  Seconds seconds = 0;
  for (const Decision& d : pricing.decided)
    if (d.reduced)
      seconds +=
          pricing.gradients[pricing.stretch(ready(d.gradient))] * reduction_seconds(d.gradient);
  return seconds;
}

}  // namespace motley::spmd

#include "sim/traffic.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "cluster/part.h"
#include "reduce/cluster.h"
#include "sim/exchange.h"

namespace motley {

namespace {

class Traffic {
 public:
  Traffic(const Plan& plan, const net::Topology& topology, const Deadline& deadline)
      : plan_(plan),
        topology_(topology),
        deadline_(deadline),
        load_(static_cast<int>(topology.links().size())) {}

  std::vector<Bytes> run() {
    if (!plan_.pipeline) {
      std::vector<int> all(plan_.cluster.size());
      std::iota(all.begin(), all.end(), 0);
      const Shares shares(plan_.ratios);
      program(plan_.running(), plan_.program, shares, all, 1, false, {});
    } else {
      pipeline(*plan_.pipeline);
    }
    std::vector<Bytes> bytes(topology_.links().size(), 0);
    for (const net::LinkUse& use : load_.take()) bytes[use.link] = use.flows;
    return bytes;
  }

 private:
  void send(int from, int to, Bytes bytes) {
    if (from != to && bytes > 0) topology_.add_path(from, to, bytes, &load_);
  }

  // hops[i] from the i-th device to the next one, around.
  void send_around(const std::vector<int>& devices, const std::vector<Bytes>& hops) {
    for (size_t i = 0; i < devices.size(); ++i)
      send(devices[i], devices[(i + 1) % devices.size()], hops[i]);
  }

  void send_reduced(const ReductionProgram& program, const std::vector<int>& devices, Bytes bytes) {
    const std::vector<double> held =
        reduce::held_in_steps(program.steps, static_cast<int>(devices.size()));
    for (size_t s = 0; s < program.steps.size(); ++s)
      for (std::vector<int> group : program.steps[s].groups) {
        if (group.size() < 2) continue;
        for (int& member : group) member = devices[member];
        for (const net::Transfer& t : net::traffic(topology_, program.steps[s].collective,
                                                   net::Algorithm::ring, group, held[s] * bytes))
          for (const net::LinkUse& use : t.uses) load_.add(use.link, use.flows * t.bytes);
      }
  }

  // The collectives of a program on some devices, in every one of `passes` passes, forward ones
  // twice if they are taken again; without some steps.
  void program(const Theory& theory, const Program& program, const Shares& shares,
               const std::vector<int>& devices, int passes, bool recomputed,
               const std::vector<int>& left_out) {
    const size_t n = devices.size();
    if (n < 2) return;
    const double part = static_cast<double>(n - 1) / static_cast<double>(n);
    const Backend backend = backend_among(plan_.cluster, devices);
    const auto reductions = backend.messages
                                ? programs_for(plan_.reductions, devices, plan_.cluster.size())
                                : std::vector<ReductionProgram>();
    std::vector<Bytes> hops(n, 0), reduced(reductions.size(), 0);
    std::map<Cut, Bytes> to_all;
    std::map<std::pair<Cut, Cut>, Bytes> exchanged;
    const auto all_reduce = [&](Bytes bytes, double count) {
      size_t k = reductions.size();
      while (k > 0 && bytes < reductions[k - 1].from) --k;
      if (k > 0)
        reduced[k - 1] += bytes * count;
      else
        for (Bytes& hop : hops) hop += 2 * part * bytes * count;
    };
    const Phases phases = phases_of(theory, program);
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const int index = static_cast<int>(i);
      if (std::find(left_out.begin(), left_out.end(), index) != left_out.end()) continue;
      const Step& step = program.steps[i];
      const double count = index >= phases.reduction && !step.each ? 1
                           : index < phases.backward && recomputed ? 2 * passes
                                                                   : passes;
      if (step.is_compute()) {
        const Triple& triple = theory.triples(step.node)[step.triple];
        const Node& node = theory.graph().node(step.node);
        for (const InnerCollective& c : triple.collectives)
          if (c.kind == Collective::all_reduce)
            all_reduce(static_cast<Bytes>(c.bytes) * widening(backend, c.kind, c.half), count);
          else
            exchanged[{theory.cut(theory.graph().inputs_of(node)[0], triple.in[0]),
                       theory.cut(node.outputs[0], triple.out[0])}] +=
                static_cast<Bytes>(c.bytes) * count;
        continue;
      }
      const TensorSpec& spec = theory.graph().spec(step.value);
      const Bytes bytes =
          static_cast<Bytes>(spec.bytes()) * widening(backend, step.kind, is_half(spec.dtype));
      const Cut cut = theory.cut(step.value, step.from.is_shard() ? step.from : step.to);
      switch (step.kind) {
        case Collective::all_reduce:
          all_reduce(bytes, count);
          break;
        case Collective::all_to_all:
          to_all[cut] += bytes * count;
          break;
        case Collective::all_gather:
        case Collective::reduce_scatter: {
          // Every piece crosses every hop but one: that to the device it is of, or from it.
          const std::vector<int64_t>& pieces = shares.of(cut);
          for (size_t d = 0; d < n; ++d) {
            const size_t whose = step.kind == Collective::all_gather ? (d + 1) % n : d;
            hops[d] += bytes * count *
                       (1 - static_cast<double>(pieces[whose]) / static_cast<double>(cut.size));
          }
          break;
        }
        default:
          break;  // nothing moves
      }
    }
    send_around(devices, hops);
    for (size_t k = 0; k < reductions.size(); ++k)
      if (reduced[k] > 0) send_reduced(reductions[k], devices, reduced[k]);
    for (const auto& [cut, bytes] : to_all) {
      const std::vector<int64_t>& pieces = shares.of(cut);
      const double size = static_cast<double>(cut.size);
      for (size_t a = 0; a < n; ++a)
        for (size_t b = 0; b < n; ++b)
          send(devices[a], devices[b],
               bytes * static_cast<double>(pieces[a]) / size * static_cast<double>(pieces[b]) /
                   size);
    }
    for (const auto& [cuts, bytes] : exchanged) {
      const std::vector<int64_t>&from = shares.of(cuts.first), &to = shares.of(cuts.second);
      int64_t at = 0, from_end = from[0], to_end = to[0];
      for (size_t a = 0, b = 0; a < n && b < n;) {
        const int64_t end = std::min(from_end, to_end);
        send(devices[a], devices[b],
             bytes * static_cast<double>(end - at) / static_cast<double>(cuts.first.size));
        at = end;
        if (from_end == end && ++a < n) from_end += from[a];
        if (to_end == end && ++b < n) to_end += to[b];
      }
    }
  }

  void pipeline(const PipelinePlan& pipeline) {
    Exchanges exchanges(plan_, deadline_);
    std::vector<int> micro_batches(plan_.cluster.size(), 0);  // [device]
    for (const ReplicaPlan& replica : pipeline.replicas) {
      exchanges.sites.emplace_back();
      for (int s = 0; s < pipeline.stages(); ++s) {
        const StagePlan& stage = replica.stages[s];
        for (const int d : stage.devices) micro_batches[d] = replica.micro_batches;
        auto site = std::make_shared<StageSite>();
        site->part = part_of(plan_.cluster, stage.devices);
        site->model = std::make_unique<CostModel>(
            site->part, programs_for(plan_.reductions, stage.devices, plan_.cluster.size()));
        site->shares = std::make_unique<Shares>(stage.ratios);
        site->fractions = std::make_unique<Fractions>(site->model->cluster(), *site->shares);
        site->stored = stored_placements(pipeline.theory(s), stage.program);
        exchanges.sites.back().push_back(std::move(site));
      }
    }
    for (int s = 0; s < pipeline.stages(); ++s)
      for (size_t r = 0; r < pipeline.replicas.size(); ++r) {
        if (deadline_.over()) throw TimeIsUp();
        const StagePlan& stage = pipeline.replicas[r].stages[s];
        program(pipeline.theory(s), stage.program, *exchanges.sites[r][s]->shares, stage.devices,
                pipeline.replicas[r].micro_batches, stage.recompute, exchanges.joint(s).steps[r]);
      }
    bool every_micro_batch = true;
    exchanges.on_messages = [&](const std::vector<net::PairMessage>& messages) {
      for (const net::PairMessage& m : messages)
        send(m.from, m.to, m.bytes * (every_micro_batch ? micro_batches[m.from] : 1));
    };
    exchanges.on_reduction = [&](const std::vector<int>& devices, const ReductionProgram* program,
                                 Bytes bytes) {
      const auto n = static_cast<double>(devices.size());
      if (program)
        send_reduced(*program, devices, bytes);
      else
        send_around(devices, std::vector<Bytes>(devices.size(), 2 * (n - 1) / n * bytes));
    };
    exchanges.ways();
    for (int s = 0; s < pipeline.stages() && pipeline.replicas.size() > 1; ++s)
      if (exchanges.in_every_pass(s)) exchanges.in_pass(s);
    every_micro_batch = false;
    for (int s = 0; s < pipeline.stages() && pipeline.replicas.size() > 1; ++s) {
      exchanges.over_replicas(s);
      if (exchanges.divided(s).any()) exchanges.parameters(s);
    }
    for (const Tied& tied : pipeline.parts().tied)
      if (plan_.graph->parameters[tied.parameter].gradient.valid()) exchanges.tied(tied);
  }

  const Plan& plan_;
  const net::Topology& topology_;
  const Deadline deadline_;
  net::LinkLoad load_;
};

}  // namespace

std::vector<Bytes> link_bytes(const Plan& plan, const net::Topology& topology,
                              const Deadline& deadline) {
  return Traffic(plan, topology, deadline).run();
}

}  // namespace motley

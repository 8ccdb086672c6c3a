#include "sim/pipeline.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "cluster/part.h"
#include "core/error.h"

namespace motley {

void add_messages(const Holding& from, const Holding& to, Bytes bytes,
                  std::vector<net::PairMessage>* messages) {
  const int senders = static_cast<int>(from.devices->size()),
            receivers = static_cast<int>(to.devices->size());
  auto piece = [](const Holding& h, int rank) {
    return h.cut == 0 ? 1.0
                      : static_cast<double>(h.shares->of(h.cut)[rank]) / static_cast<double>(h.cut);
  };
  for (int r = 0; r < receivers; ++r)
    for (int s = 0; s < senders; ++s) {
      double part = 0;
      if (from.cut == 0) {
        if (s == static_cast<int>(static_cast<int64_t>(r) * senders / receivers))
          part = piece(to, r);
      } else if (to.cut == from.cut && to.placement == from.placement) {
        const int64_t a = from.shares->begin(from.cut, s), b = to.shares->begin(to.cut, r);
        const int64_t low = std::max(a, b), high = std::min(a + from.shares->of(from.cut)[s],
                                                            b + to.shares->of(to.cut)[r]);
        part = static_cast<double>(std::max<int64_t>(high - low, 0)) / static_cast<double>(to.cut);
      } else {
        part = piece(from, s) * piece(to, r);
      }
      if (part > 0) messages->push_back({(*from.devices)[s], (*to.devices)[r], bytes * part});
    }
}

namespace {

constexpr Seconds kUnknown = -1;

class Simulator {
 public:
  Simulator(const Plan& plan, bool with_spans)
      : plan_(plan), pipeline_(*plan.pipeline), spans_(with_spans), topology_(plan.cluster) {
    sim_.devices.resize(plan.cluster.size());
    replicas_.resize(pipeline_.replicas.size());
    for (int s = 0; s < pipeline_.stages(); ++s) {
      net::Groups groups;
      for (size_t r = 0; r < replicas_.size(); ++r) groups.push_back(planned(r, s).devices);
      shared_.push_back(groups.size() > 1 ? shared_by(plan.cluster, groups) : plan.cluster);
      joint_.push_back(joint_gradients(pipeline_, s, plan.reductions, plan.cluster.size()));
    }
    divided_ = divided_states(pipeline_);
    for (size_t r = 0; r < replicas_.size(); ++r)
      for (int s = 0; s < pipeline_.stages(); ++s) replicas_[r].push_back(prepare(r, s));
    meet();
    transfer_times();
  }

  Simulation run() {
    step();
    summarize();
    return std::move(sim_);
  }

  // The same again, with the plan's warm-up counts as they are now: only the step.
  Seconds again() {
    sim_.devices.assign(plan_.cluster.size(), {});
    hidden_ = 0;
    only_step_ = true;
    step();
    return sim_.step;
  }

 private:
  void step() {
    for (size_t r = 0; r < replicas_.size(); ++r) {
      const auto groups = stage_groups(pipeline_.replicas[r]);
      for (const auto& group : groups)
        replicas_[r][group[0]].order =
            passes_of(pipeline_.replicas[r], group, static_cast<int>(groups.size()));
      for (Stage& stage : replicas_[r]) stage.free = 0, stage.next = 0;
      for (const auto& group : groups) {
        Seconds before = 0;
        for (int s : group) before = std::max(before, replicas_[r][s].before);
        replicas_[r][group[0]].free = before;
        for (int d : planned(r, group[0]).devices) sim_.devices[d].idle += before;
      }
    }
    for (size_t r = 0; r < replicas_.size(); ++r) passes(static_cast<int>(r));
    reductions();
    update();
  }

  struct Piece {  // of work on a device inside a pass
    int rank;
    Seconds begin, end;
    WalkKind kind;
  };
  struct PassTime {
    Seconds seconds = 0;
    std::vector<Piece> work;
  };
  struct Stage {
    Cluster part;
    std::string part_text;
    std::vector<Placement> stored;  // [value] of its graph that is a source
    std::unique_ptr<CostModel> model;
    std::unique_ptr<Shares> shares;
    std::unique_ptr<Fractions> fractions;
    Phases phases;
    PassTime forward, backward;
    Seconds before = 0;  // of what is computed from the whole batch, once
    int head = 0;        // first stage of its group, whose next three are the group's
    Seconds free = 0;
    std::vector<Pass> order;
    size_t next = 0;
  };
  Stage& group_of(int r, int s) { return replicas_[r][replicas_[r][s].head]; }

  const StagePlan& planned(size_t r, int s) const { return pipeline_.replicas[r].stages[s]; }

  Stage prepare(size_t r, int s) {
    const StagePlan& plan = planned(r, s);
    Stage stage;
    stage.part = part_of(shared_[s], plan.devices);
    stage.part_text = to_yaml(stage.part);
    stage.model = std::make_unique<CostModel>(
        stage.part, programs_for(plan_.reductions, plan.devices, plan_.cluster.size()));
    stage.shares = std::make_unique<Shares>(plan.ratios);
    stage.fractions = std::make_unique<Fractions>(stage.model->cluster(), *stage.shares);
    for (const auto& group : stage_groups(pipeline_.replicas[r]))
      if (std::binary_search(group.begin(), group.end(), s)) stage.head = group[0];
    stage.before = before_of(s, *stage.model);
    for (size_t q = 0; q < r; ++q)
      if (passes_alike(q, r, s, stage.part_text)) {
        stage.stored = replicas_[q][s].stored;
        stage.phases = replicas_[q][s].phases;
        stage.forward = replicas_[q][s].forward;
        stage.backward = replicas_[q][s].backward;
        return stage;
      }
    stage.stored = stored_placements(pipeline_.theory(s), plan.program);
    stage.phases = phases_of(pipeline_.theory(s), plan.program);
    stage.forward = pass(stage, r, s, {{0, stage.phases.backward}});
    std::vector<std::pair<int, int>> parts = {{stage.phases.backward, stage.phases.reduction}};
    if (plan.recompute) parts.insert(parts.begin(), {0, stage.phases.backward});
    if (!in_every_pass(s)) {
      stage.backward = pass(stage, r, s, parts);
      return stage;
    }
    parts.push_back({stage.phases.reduction, static_cast<int>(plan.program.steps.size())});
    stage.backward = pass(stage, r, s, parts);
    const Seconds begin = stage.backward.seconds,
                  end = begin + around(s, divided_bytes(s, divided_[s].gradient, true));
    for (int i = 0; i < stage.part.size() && end > begin; ++i)
      stage.backward.work.push_back({i, begin, end, WalkKind::comm});
    stage.backward.seconds = end;
    return stage;
  }

  // What a stage's devices compute from the whole batch, if it reads any of it.
  Seconds before_of(int s, const CostModel& model) const {
    const MicroBatch& part = pipeline_.part();
    std::set<std::string> given;
    for (size_t i = plan_.graph->inputs.size(); i < part.graph.inputs.size(); ++i)
      given.insert(part.graph.inputs[i].name);
    const std::vector<Input>& inputs = pipeline_.graph(s).inputs;
    if (std::none_of(inputs.begin(), inputs.end(),
                     [&](const Input& input) { return given.count(input.name) > 0; }))
      return 0;
    const Theory theory(part.before);
    Seconds most = 0;
    for (int t = 0; t < model.types(); ++t) {
      Seconds sum = 0;
      for (size_t n = 0; n < part.before.nodes.size(); ++n) {
        const NodeId node(n);
        sum += model.compute(t, work_of(theory, node, theory.triples(node)[0]), 1);
      }
      most = std::max(most, sum);
    }
    return most;
  }

  // Whether the replicas of a stage reduce gradients in every backward pass.
  bool in_every_pass(int s) const { return !divided_[s].gradient.empty(); }

  // Replicas that meet in every backward pass are as slow in each as the slowest.
  void meet() {
    bool meets = false;
    for (int s = 0; s < pipeline_.stages(); ++s) meets = meets || in_every_pass(s);
    for (int s = 0; s < pipeline_.stages() && meets; ++s) {
      Seconds forward = 0, backward = 0;
      for (const auto& stages : replicas_) {
        forward = std::max(forward, stages[s].forward.seconds);
        backward = std::max(backward, stages[s].backward.seconds);
      }
      for (auto& stages : replicas_) {
        stages[s].forward.seconds = forward;
        stages[s].backward.seconds = backward;
      }
    }
  }

  // [rank] Bytes of a replica's pieces of some parameters of a stage, or of their gradients.
  // REQUIRES: the pieces of all replicas are alike.
  std::vector<Bytes> divided_bytes(int s, const std::vector<bool>& which, bool gradients) const {
    const StagePlan& plan = planned(0, s);
    const Theory& theory = pipeline_.theory(s);
    const Shares shares(plan.ratios);
    const std::vector<Placement> stored = stored_placements(theory, plan.program);
    std::vector<Bytes> bytes(plan.devices.size(), 0);
    const auto& parameters = pipeline_.graph(s).parameters;
    for (size_t i = 0; i < which.size(); ++i) {
      if (!which[i]) continue;
      const Parameter& p = parameters[i];
      const auto all =
          static_cast<Bytes>(pipeline_.graph(s).spec(gradients ? p.gradient : p.value).bytes());
      const Placement placement = stored[p.value.index];
      const Cut cut = theory.cut(p.value, placement);
      for (size_t d = 0; d < bytes.size(); ++d)
        bytes[d] += placement.is_shard() ? all * static_cast<double>(shares.of(cut)[d]) /
                                               static_cast<double>(cut.size)
                                         : all;
    }
    return bytes;
  }

  // Seconds of a reduce-scatter or all-gather over the replicas of a stage: rings, all ranks' at
  // the same time, on which a round takes as long as the largest part.
  Seconds around(int s, const std::vector<Bytes>& by_rank) const {
    const auto replicas = replicas_.size();
    const std::vector<double>& shares = divided_[s].shares;
    const double largest = *std::max_element(shares.begin(), shares.end()),
                 rounds = static_cast<double>(replicas) - 1;
    std::vector<net::PairMessage> ring;
    Seconds latency = 0;
    for (size_t i = 0; i < by_rank.size(); ++i)
      for (size_t r = 0; r < replicas && by_rank[i] > 0; ++r) {
        const int from = planned(r, s).devices[i], to = planned((r + 1) % replicas, s).devices[i];
        ring.push_back({from, to, rounds * largest * by_rank[i]});
        latency = std::max(latency, topology_.latency(from, to));
      }
    return ring.empty() ? 0 : net::messages_time(topology_, ring) + (rounds - 1) * latency;
  }

  // Whether replica r's passes of a stage take what those of replica q do.
  bool passes_alike(size_t q, size_t r, int s, const std::string& part) const {
    const StagePlan &a = planned(q, s), &b = planned(r, s);
    auto programs = [&](const StagePlan& stage) {
      auto list = programs_for(plan_.reductions, stage.devices, plan_.cluster.size());
      for (ReductionProgram& program : list) program.devices.clear();
      return list;
    };
    return a.recompute == b.recompute && a.ratios == b.ratios &&
           a.program.steps == b.program.steps && programs(a) == programs(b) &&
           replicas_[q][s].part_text == part;
  }

  PassTime pass(const Stage& stage, size_t r, int s,
                const std::vector<std::pair<int, int>>& parts) {
    PassTime result;
    std::vector<Seconds> now(stage.part.size(), 0);
    for (auto [begin, end] : parts)
      walk(pipeline_.theory(s), planned(r, s).program, *stage.model, *stage.fractions, begin, end,
           &now, [&](int d, Seconds from, Seconds to, const std::string&, WalkKind kind, NodeId) {
             result.work.push_back({d, from, to, kind});
           });
    result.seconds = *std::max_element(now.begin(), now.end());
    return result;
  }

  Holding holding(size_t r, int s, const std::vector<int>& devices, ValueId v, Placement p) const {
    return {&devices, replicas_[r][s].shares.get(), p,
            p.is_shard() ? pipeline_.theory(s).cut_size(v, p) : 0};
  }

  // All values of one (from, to, direction) go together; all replicas at once.
  void transfer_times() {
    std::map<std::tuple<int, int, bool>, std::vector<net::PairMessage>> messages;
    for (const Transfer& t : pipeline_.parts().transfers)
      for (size_t r = 0; r < replicas_.size(); ++r) {
        const Theory& from = pipeline_.theory(t.from);
        add_messages(holding(r, t.from, planned(r, t.from).devices, t.made,
                             output_placement(from, planned(r, t.from).program, t.made)),
                     holding(r, t.to, planned(r, t.to).devices, t.taken,
                             replicas_[r][t.to].stored[t.taken.index]),
                     static_cast<Bytes>(pipeline_.part().graph.spec(t.value).bytes()),
                     &messages[{t.from, t.to, t.backward}]);
      }
    for (const auto& [way, list] : messages) {
      Way w;
      std::tie(w.from, w.to, w.backward) = way;
      w.seconds = net::messages_time(topology_, list);
      // A later stage's forward value that an earlier one reads in its backward pass.
      const Transfer* first = nullptr;
      for (const Transfer& t : pipeline_.parts().transfers)
        if (std::tuple(t.from, t.to, t.backward) == way) first = &t;
      const Graph& maker = pipeline_.graph(w.from);
      w.made_backward = maker.node(maker.value(first->made).producer).phase == Phase::backward;
      Bytes bytes = 0;
      for (const net::PairMessage& m : list) bytes += m.bytes;
      exchange(fmt::format("stage {} to {}, {}", w.from, w.to, w.backward ? "backward" : "forward"),
               pipeline_.micro_batches(), bytes / static_cast<double>(replicas_.size()), w.seconds);
      ways_.push_back(w);
    }
  }

  struct Way {
    int from = 0, to = 0;
    bool backward = false, made_backward = false;
    Seconds seconds = 0;
  };
  struct Arrival {
    Seconds begin = kUnknown, end = kUnknown;
  };

  void passes(int r) {
    const int stages = pipeline_.stages(), count = pipeline_.replicas[r].micro_batches;
    std::vector<std::vector<Arrival>> arrivals(ways_.size(), std::vector<Arrival>(count));
    std::vector<Seconds> way_free(ways_.size(), 0);
    std::vector<int> work;
    for (int s = stages - 1; s >= 0; --s)
      if (replicas_[r][s].head == s) work.push_back(s);
    while (!work.empty()) {
      Stage& group = replicas_[r][work.back()];
      work.pop_back();
      while (group.next < group.order.size()) {
        const Pass task = group.order[group.next];
        const int s = task.stage;
        const Stage& stage = replicas_[r][s];
        Arrival last;
        bool ready = true;
        for (size_t w = 0; w < ways_.size(); ++w) {
          if (ways_[w].to != s || ways_[w].backward != task.backward) continue;
          const Arrival& a = arrivals[w][task.micro_batch];
          ready = ready && a.end != kUnknown;
          if (a.end > last.end) last = a;
        }
        if (!ready) break;
        const Seconds start = std::max(group.free, last.end);
        waited(r, s, group.free, start, last);
        const PassTime& pass = task.backward ? stage.backward : stage.forward;
        record(r, s, start, pass, task);
        group.free = start + pass.seconds;
        ++group.next;
        for (size_t w = 0; w < ways_.size(); ++w) {
          if (ways_[w].from != s || ways_[w].made_backward != task.backward) continue;
          Arrival& a = arrivals[w][task.micro_batch];
          a.begin = std::max(way_free[w], group.free);
          a.end = way_free[w] = a.begin + ways_[w].seconds;
          for (int d : planned(r, ways_[w].to).devices) sim_.devices[d].comm += ways_[w].seconds;
          hidden_ += ways_[w].seconds * static_cast<double>(planned(r, ways_[w].to).devices.size());
          work.push_back(replicas_[r][ways_[w].to].head);
        }
      }
    }
    for (int s = 0; s < stages; ++s)
      MOTLEY_CHECK(replicas_[r][s].next == replicas_[r][s].order.size(),
                   "replica {}: stage {} waits for ever", r, s);
  }

  void span(int device, Seconds begin, Seconds end, const std::string& name, WalkKind kind) {
    if (spans_ && end > begin) sim_.spans.push_back({device, begin, end, name, kind, {}});
  }

  void exchange(const std::string& what, int count, Bytes bytes, Seconds seconds) {
    if (bytes > 0) sim_.exchanges.push_back({what, count, bytes, seconds});
  }

  // A stage was free from `from` and went on at `to`, when `last` had come in.
  void waited(int r, int s, Seconds from, Seconds to, const Arrival& last) {
    if (to <= from) return;
    const Seconds exposed = last.end == kUnknown ? 0 : to - std::max(from, last.begin);
    for (int d : planned(r, s).devices) {
      sim_.devices[d].idle += to - from - exposed;
      sim_.devices[d].exposed_comm += exposed;
      hidden_ -= exposed;
      span(d, from, to, "wait", WalkKind::wait);
    }
  }

  void record(int r, int s, Seconds start, const PassTime& pass, Pass task) {
    if (only_step_) return;
    const std::vector<int>& devices = planned(r, s).devices;
    std::vector<Seconds> used(devices.size(), 0);
    for (const Piece& p : pass.work) {
      DeviceTime& t = sim_.devices[devices[p.rank]];
      (p.kind == WalkKind::compute ? t.busy
       : p.kind == WalkKind::comm  ? t.comm
                                   : t.idle) += p.end - p.begin;
      if (p.kind == WalkKind::comm) t.exposed_comm += p.end - p.begin;
      used[p.rank] = std::max(used[p.rank], p.end);
    }
    const std::string name = fmt::format(
        "{}{}{}", task.backward ? "backward " : "forward ", task.micro_batch,
        group_of(r, s).order.size() > 2 * static_cast<size_t>(pipeline_.replicas[r].micro_batches)
            ? fmt::format(" of stage {}", s)
            : "");
    for (size_t i = 0; i < devices.size(); ++i) {
      sim_.devices[devices[i]].idle += pass.seconds - used[i];
      span(devices[i], start, start + pass.seconds, name, WalkKind::compute);
    }
  }

  void communicate(int r, int s, Seconds begin, Seconds end, const char* name) {
    Stage& stage = group_of(r, s);
    for (int d : planned(r, s).devices) {
      sim_.devices[d].idle += begin - stage.free;
      sim_.devices[d].comm += end - begin;
      sim_.devices[d].exposed_comm += end - begin;
      span(d, stage.free, begin, "wait", WalkKind::wait);
      span(d, begin, end, name, WalkKind::comm);
    }
    stage.free = end;
  }

  Holding gradient_of(size_t r, int s, size_t parameter) const {
    const ValueId v = pipeline_.graph(s).parameters[parameter].value;
    return holding(r, s, planned(r, s).devices, v, replicas_[r][s].stored[v.index]);
  }
  static bool alike(const Holding& a, const Holding& b) {
    return a.devices->size() == b.devices->size() && a.placement == b.placement && a.cut == b.cut &&
           (a.cut == 0 || a.shares->of(a.cut) == b.shares->of(b.cut));
  }

  // The messages by which groups that hold a gradient, each in its pieces, have its sum. One that
  // holds it whole takes even pieces, so that a slow link carries everything once, and gathers
  // them: returns the seconds of the slowest.
  Seconds exchange_sums(const std::vector<Holding>& held,
                        const std::vector<const CostModel*>& models, const TensorSpec& spec,
                        std::vector<net::PairMessage>* messages) const {
    const auto bytes = static_cast<Bytes>(spec.bytes());
    Seconds gathered = 0;
    for (size_t to = 0; to < held.size(); ++to) {
      Holding taken = held[to];
      const size_t ranks = taken.devices->size();
      const Shares even(std::vector<double>(ranks, 1.0 / static_cast<double>(ranks)));
      if (taken.cut == 0 && ranks > 1) {
        taken.shares = &even;
        taken.cut = spec.numel();
        for (const Holding& other : held)
          if (other.cut > 0) {  // cut alike, as the pieces of others are
            taken.cut = other.cut;
            taken.placement = other.placement;
            break;
          }
        const CostModel& model = *models[to];
        const Fractions fractions(model.cluster(), even);
        gathered = std::max(gathered, model.collective(CollectiveKind::all_gather, bytes,
                                                       fractions.profile(taken.cut, model.net())));
      }
      for (size_t from = 0; from < held.size(); ++from)
        if (from != to) add_messages(held[from], taken, bytes, messages);
    }
    return gathered;
  }

  void reductions() {
    const int stages = pipeline_.stages(), replicas = static_cast<int>(replicas_.size());
    for (int r = 0; r < replicas; ++r)
      for (int s = 0; s < stages; ++s) {
        if (in_every_pass(s)) continue;
        Stage& stage = replicas_[r][s];
        std::vector<Seconds> now(stage.part.size(), 0);
        Program program = planned(r, s).program;
        const std::vector<int>& left_out = joint_[s].steps[r];
        for (auto step = left_out.rbegin(); step != left_out.rend(); ++step)
          program.steps.erase(program.steps.begin() + *step);
        walk(pipeline_.theory(s), program, *stage.model, *stage.fractions, stage.phases.reduction,
             static_cast<int>(program.steps.size()), &now,
             [](int, Seconds, Seconds, const std::string&, WalkKind, NodeId) {});
        const Seconds most = *std::max_element(now.begin(), now.end());
        const Seconds begin = group_of(r, s).free;
        communicate(r, s, begin, begin + most, "reduce");
      }
    for (int s = 0; s < stages && replicas > 1; ++s) {
      // Equal pieces are reduced for all ranks together, by programs or on rings; the rest is
      // exchanged.
      std::vector<net::PairMessage> ring, others;
      std::vector<bool> scattered = divided_[s].optimizer;          // once a step, on rings
      std::vector<Bytes> reduced(planned(0, s).devices.size(), 0);  // [rank]
      const auto& parameters = pipeline_.graph(s).parameters;
      Bytes jointly = 0;
      Seconds gathered = 0;
      for (size_t p = 0; p < parameters.size(); ++p) {
        if (!parameters[p].gradient.valid()) continue;
        const auto bytes =
            static_cast<Bytes>(pipeline_.graph(s).spec(parameters[p].gradient).bytes());
        if (joint_[s].gradient[p]) {
          jointly += bytes;
          continue;
        }
        if (in_every_pass(s) && divided_[s].gradient[p]) {
          scattered[p] = false;
          continue;
        }
        std::vector<Holding> held;
        std::vector<const CostModel*> models;
        for (int r = 0; r < replicas; ++r) {
          held.push_back(gradient_of(r, s, p));
          models.push_back(replicas_[r][s].model.get());
        }
        if (!scattered.empty() && scattered[p]) {
          if (!divided_[s].tied[p]) continue;
          // Of tied ones every part goes straight to its owner.
          scattered[p] = false;
          std::vector<bool> one(parameters.size(), false);
          one[p] = true;
          const std::vector<Bytes> by_rank = divided_bytes(s, one, true);
          for (size_t i = 0; i < by_rank.size(); ++i)
            for (int r = 0; r < replicas; ++r)
              for (int q = 0; q < replicas; ++q)
                if (q != r)
                  others.push_back({planned(r, s).devices[i], planned(q, s).devices[i],
                                    by_rank[i] * divided_[s].shares[q]});
          continue;
        }
        bool same = true;
        for (int r = 1; r < replicas; ++r) same = same && alike(held[0], held[r]);
        if (same) {
          for (size_t i = 0; i < reduced.size(); ++i)
            reduced[i] += held[0].cut == 0
                              ? bytes
                              : bytes * static_cast<double>(held[0].shares->of(held[0].cut)[i]) /
                                    static_cast<double>(held[0].cut);
          continue;
        }
        gathered +=
            exchange_sums(held, models, pipeline_.graph(s).spec(parameters[p].gradient), &others);
      }
      Seconds seconds = gathered + (others.empty() ? 0 : net::messages_time(topology_, others));
      const std::vector<Bytes> parts = divided_bytes(s, scattered, true);
      seconds += around(s, parts);
      if (jointly > 0) {
        const std::vector<int> devices = devices_of(pipeline_, s);
        seconds += CollectiveModel(part_of(plan_.cluster, devices),
                                   programs_for(plan_.reductions, devices, plan_.cluster.size()))
                       .all_reduce(jointly);
      }
      Seconds by_programs = 0;
      for (size_t i = 0; i < reduced.size(); ++i) {
        std::vector<int> ranks;
        for (int r = 0; r < replicas && reduced[i] > 0; ++r)
          ranks.push_back(planned(r, s).devices[i]);
        const auto programs = programs_for(plan_.reductions, ranks, plan_.cluster.size());
        const auto program = std::find_if(programs.rbegin(), programs.rend(),
                                          [&](const auto& p) { return reduced[i] >= p.from; });
        if (program != programs.rend())
          by_programs =
              std::max(by_programs, program->fixed + reduced[i] * program->seconds_per_byte);
        else
          for (size_t r = 0; r < ranks.size(); ++r)
            ring.push_back({ranks[r], ranks[(r + 1) % ranks.size()],
                            2.0 * (replicas - 1) / replicas * reduced[i]});
      }
      seconds += by_programs;
      if (!ring.empty()) {
        Seconds latency = 0;
        for (const net::PairMessage& m : ring)
          latency = std::max(latency, topology_.latency(m.from, m.to));
        seconds += net::messages_time(topology_, ring) + (2.0 * (replicas - 1) - 1) * latency;
      }
      Bytes sent = 0;
      for (const net::PairMessage& m : others) sent += m.bytes;
      for (Bytes b : reduced) sent += 2.0 * (replicas - 1) * b;
      for (Bytes b : parts) sent += (replicas - 1) * b;
      if (in_every_pass(s)) {
        const std::vector<Bytes> each = divided_bytes(s, divided_[s].gradient, true);
        Bytes all = 0;
        for (Bytes b : each) all += (replicas - 1) * b;
        exchange(fmt::format("gradients over replicas in a backward pass, stage {}", s),
                 pipeline_.replicas[0].micro_batches, all, around(s, each));
      }
      exchange(fmt::format("gradients over replicas, stage {}", s), 1, sent, seconds);
      Seconds begin = 0;
      for (int r = 0; r < replicas; ++r) begin = std::max(begin, group_of(r, s).free);
      for (int r = 0; r < replicas; ++r)
        communicate(r, s, begin, begin + seconds, "reduce over replicas");
    }
    for (const Tied& tied : pipeline_.parts().tied) {
      if (!plan_.graph->parameters[tied.parameter].gradient.valid()) continue;
      std::vector<net::PairMessage> messages;
      Seconds gathered = 0;
      for (int r = 0; r < replicas; ++r) {
        std::vector<Holding> held;
        std::vector<const CostModel*> models;
        for (int t : tied.stages) {
          models.push_back(replicas_[r][t].model.get());
          const auto& list = pipeline_.parts().parameter_of[t];
          held.push_back(gradient_of(
              r, t, std::find(list.begin(), list.end(), tied.parameter) - list.begin()));
        }
        gathered = std::max(
            gathered,
            exchange_sums(held, models,
                          plan_.graph->spec(plan_.graph->parameters[tied.parameter].gradient),
                          &messages));
      }
      const Seconds seconds = net::messages_time(topology_, messages) + gathered;
      Bytes sent = 0;
      for (const net::PairMessage& m : messages) sent += m.bytes;
      exchange(fmt::format("gradients of tied {}", plan_.graph->parameters[tied.parameter].name), 1,
               sent, seconds);
      for (int r = 0; r < replicas; ++r) {
        Seconds begin = 0;
        for (int s : tied.stages) begin = std::max(begin, group_of(r, s).free);
        for (int s : tied.stages) communicate(r, s, begin, begin + seconds, "reduce tied");
      }
    }
  }

  // Optimizers run.
  void update() {
    std::vector<Seconds>& end = end_;
    end.assign(plan_.cluster.size(), 0);
    for (size_t r = 0; r < replicas_.size(); ++r)
      for (int s = 0; s < pipeline_.stages(); ++s) {
        Stage& stage = replicas_[r][s];
        const std::vector<int>& devices = planned(r, s).devices;
        // After that of the stage before it on these devices.
        std::vector<Seconds> now;
        for (int d : devices) now.push_back(std::max(group_of(r, s).free, end[d]));
        walk_optimizer(
            pipeline_.theory(s), planned(r, s).program, *stage.model, *stage.fractions,
            plan_.optimizer, &now,
            [&](int d, Seconds from, Seconds to, const std::string& name, WalkKind kind, NodeId) {
              sim_.devices[devices[d]].busy += to - from;
              span(devices[d], from, to, name, kind);
            },
            divided_[s].kept(static_cast<int>(r)));
        for (size_t i = 0; i < devices.size(); ++i) end[devices[i]] = now[i];
      }
    // Replicas that stepped parts of parameters gather them.
    for (int s = 0; s < pipeline_.stages(); ++s) {
      if (!divided_[s].any()) continue;
      const std::vector<Bytes> by_rank = divided_bytes(s, divided_[s].optimizer, false);
      const Seconds seconds = around(s, by_rank);
      Bytes sent = 0;
      for (Bytes b : by_rank) sent += static_cast<double>(replicas_.size() - 1) * b;
      exchange(fmt::format("parameters over replicas, stage {}", s), 1, sent, seconds);
      const std::vector<int> devices = devices_of(pipeline_, s);
      Seconds begin = 0;
      for (int d : devices) begin = std::max(begin, end[d]);
      for (int d : devices) {
        sim_.devices[d].idle += begin - end[d];
        sim_.devices[d].comm += seconds;
        sim_.devices[d].exposed_comm += seconds;
        span(d, end[d], begin, "wait", WalkKind::wait);
        span(d, begin, begin + seconds, "gather parameters", WalkKind::comm);
        end[d] = begin + seconds;
      }
    }
    sim_.step = *std::max_element(end.begin(), end.end());
  }

  void summarize() {
    const std::vector<Bytes> memory = pipeline_memory(pipeline_, plan_.cluster, plan_.optimizer);
    Seconds busiest = 0, total = 0, comm = 0;
    for (int d = 0; d < plan_.cluster.size(); ++d) {
      DeviceTime& t = sim_.devices[d];
      t.idle += sim_.step - end_[d];
      t.peak_memory = memory[d];
      busiest = std::max(busiest, t.busy);
      total += t.busy;
      comm += t.comm;
    }
    sim_.overlap = comm > 0 ? hidden_ / comm : 0;
    sim_.load_balance = busiest > 0 ? total / plan_.cluster.size() / busiest : 1;
  }

  const Plan& plan_;
  const PipelinePlan& pipeline_;
  const bool spans_;
  net::Topology topology_;
  std::vector<Cluster> shared_;        // [stage] as its replicas see it, all of them busy
  std::vector<JointGradients> joint_;  // [stage]
  std::vector<DividedState> divided_;  // [stage]
  std::vector<std::vector<Stage>> replicas_;
  std::vector<Way> ways_;
  Simulation sim_;
  std::vector<Seconds> end_;  // [device]
  bool only_step_ = false;    // what devices do in passes does not count
  Seconds hidden_ = 0;        // device-seconds of transfers that nobody waits for
};

}  // namespace

Simulation simulate_pipeline(const Plan& plan, bool with_spans) {
  return Simulator(plan, with_spans).run();
}

class PipelineSteps::Impl : public Simulator {
 public:
  using Simulator::Simulator;
};

PipelineSteps::PipelineSteps(const Plan& plan) : impl_(std::make_unique<Impl>(plan, false)) {}
PipelineSteps::~PipelineSteps() = default;
Seconds PipelineSteps::step() { return impl_->again(); }

}  // namespace motley

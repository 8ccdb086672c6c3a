#include "sim/pipeline.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "cluster/part.h"
#include "core/error.h"
#include "sim/exchange.h"

namespace motley {

namespace {

const char* name_of(PassKind kind) {
  return kind == PassKind::forward    ? "forward "
         : kind == PassKind::backward ? "backward "
                                      : "weights ";
}

constexpr Seconds kUnknown = -1;

class Simulator {
 public:
  Simulator(const Plan& plan, Spans spans, const Deadline& deadline)
      : plan_(plan),
        pipeline_(*plan.pipeline),
        spans_(spans),
        deadline_(deadline),
        exchanges_(plan, deadline) {
    sim_.devices.resize(plan.cluster.size());
    replicas_.resize(pipeline_.replicas.size());
    for (int s = 0; s < pipeline_.stages(); ++s) {
      net::Groups groups;
      for (size_t r = 0; r < replicas_.size(); ++r) groups.push_back(planned(r, s).devices);
      shared_.push_back(groups.size() > 1 ? shared_by(plan.cluster, groups) : plan.cluster);
    }
    seats_.resize(pipeline_.stages());
    for (size_t r = 0; r < replicas_.size(); ++r) {
      if (deadline_.over()) throw TimeIsUp();
      for (int s = 0; s < pipeline_.stages(); ++s) replicas_[r].push_back(prepare(r, s));
    }
    meet();
    for (const auto& stages : replicas_) {
      exchanges_.sites.emplace_back();
      for (const Stage& stage : stages) exchanges_.sites.back().push_back(stage.site);
    }
    ways_ = exchanges_.ways();
    for (const Way& w : ways_)
      exchange(fmt::format("stage {} to {}, {}", w.from, w.to, w.backward ? "backward" : "forward"),
               pipeline_.micro_batches(), w.sent);
    for (size_t r = 0; r < replicas_.size(); ++r)
      for (int s = 0; s < pipeline_.stages(); ++s) {
        Stage& stage = replicas_[r][s];
        const Stage& first = replicas_[stage.like][s];
        if (exchanges_.in_every_pass(s)) continue;
        const auto& left_out = exchanges_.joint(s).steps;
        stage.reduction = stage.like != static_cast<int>(r) && left_out[r] == left_out[stage.like]
                              ? first.reduction
                              : reduction_of(r, s);
      }
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
    find_alike();
    for (size_t r = 0; r < replicas_.size(); ++r) {
      if (deadline_.over()) throw TimeIsUp();
      const auto groups = stage_groups(pipeline_.replicas[r]);
      for (Stage& stage : replicas_[r]) stage.free = 0, stage.next = 0;
      for (const auto& group : groups) {
        if (alone(r))
          replicas_[r][group[0]].order =
              passes_of(pipeline_.replicas[r], group, static_cast<int>(groups.size()));
        Seconds before = 0;
        for (int s : group) before = std::max(before, replicas_[r][s].before);
        replicas_[r][group[0]].free = before;
        for (int d : planned(r, group[0]).devices) sim_.devices[d].idle += before;
      }
    }
    for (size_t r = 0; r < replicas_.size(); ++r)
      if (alone(r)) passes(static_cast<int>(r));
    for (size_t r = 0; r < replicas_.size(); ++r)
      if (!alone(r)) take_passes(r, like_[r]);
    reductions();
    update();
  }

  // Replicas that take the same time in everything, with the warm-up counts of now.
  void find_alike() {
    like_.resize(replicas_.size());
    std::map<std::vector<double>, int> first;
    for (size_t r = 0; r < replicas_.size(); ++r) {
      const ReplicaPlan& replica = pipeline_.replicas[r];
      std::vector<double> key = {static_cast<double>(replica.micro_batches)};
      for (int s = 0; s < pipeline_.stages(); ++s) {
        const Stage& stage = replicas_[r][s];
        key.insert(key.end(), {static_cast<double>(stage.like), static_cast<double>(stage.head),
                               static_cast<double>(replica.stages[s].warm_up),
                               static_cast<double>(replica.stages[s].weights_behind),
                               stage.reduction, exchanges_.divided(s).shares[r]});
      }
      const auto it = first.try_emplace(std::move(key), static_cast<int>(r)).first;
      like_[r] = spans_ == Spans::all ? static_cast<int>(r) : it->second;
      if (like_[r] != static_cast<int>(r)) continue;
      copies_.resize(replicas_.size());
      copies_[r] = 1;
    }
    for (size_t r = 0; r < replicas_.size(); ++r)
      if (!alone(r)) ++copies_[like_[r]];
    if (spans_ != Spans::alike) return;
    sim_.like.resize(plan_.cluster.size());
    std::iota(sim_.like.begin(), sim_.like.end(), 0);  // some devices may have nothing to do
    for (size_t r = 0; r < replicas_.size(); ++r)
      for (int s = 0; s < pipeline_.stages(); ++s) {
        const std::vector<int>&own = planned(r, s).devices, &theirs = planned(like_[r], s).devices;
        for (size_t i = 0; i < own.size(); ++i) sim_.like[own[i]] = theirs[i];
      }
  }
  // It stands for itself.
  bool alone(size_t r) const { return like_[r] == static_cast<int>(r); }

  // A replica's passes are those of one that is like it.
  void take_passes(size_t r, size_t like) {
    for (int s = 0; s < pipeline_.stages(); ++s) {
      replicas_[r][s].free = replicas_[like][s].free;
      const std::vector<int>&to = planned(r, s).devices, &from = planned(like, s).devices;
      for (size_t i = 0; i < to.size(); ++i) sim_.devices[to[i]] = sim_.devices[from[i]];
    }
  }

  // What a device does in a pass, all in all; used: until it has nothing more to do.
  struct Work {
    Seconds busy = 0, comm = 0, idle = 0, used = 0;
  };
  struct PassTime {
    Seconds seconds = 0;
    std::vector<Work> work;  // [rank]
  };
  struct Stage {
    std::shared_ptr<StageSite> site;
    int like = 0;  // the first replica whose passes of the stage take the same
    Phases phases;
    PassTime forward, backward, weights;
    Seconds before = 0;     // of what is computed from the whole batch, once
    Seconds reduction = 0;  // of gradients within the stage, at the end
    int head = 0;           // first stage of its group, whose next three are the group's
    bool shares = false;    // its devices with other stages
    Seconds free = 0;
    std::vector<Pass> order;
    size_t next = 0;
  };
  Stage& group_of(int r, int s) { return replicas_[r][replicas_[r][s].head]; }

  const StagePlan& planned(size_t r, int s) const { return pipeline_.replicas[r].stages[s]; }

  Stage prepare(size_t r, int s) {
    const StagePlan& plan = planned(r, s);
    Stage stage;
    stage.like = static_cast<int>(r);
    Cluster part = part_of(shared_[s], plan.devices);
    std::string text = look_of(part);
    std::vector<int>& seats = seats_[s][text];
    for (const int q : seats)
      if (passes_alike(q, r, s)) {
        stage = replicas_[q][s];
        break;
      }
    for (const auto& group : stage_groups(pipeline_.replicas[r]))
      if (std::binary_search(group.begin(), group.end(), s))
        stage.head = group[0], stage.shares = group.size() > 1;
    if (stage.site) return stage;
    seats.push_back(static_cast<int>(r));
    stage.site = std::make_shared<StageSite>();
    stage.site->part = std::move(part);
    stage.site->model = std::make_unique<CostModel>(
        stage.site->part, programs_for(plan_.reductions, plan.devices, plan_.cluster.size()));
    stage.site->shares = std::make_unique<Shares>(plan.ratios);
    stage.site->fractions =
        std::make_unique<Fractions>(stage.site->model->cluster(), *stage.site->shares);
    stage.before = before_of(s, *stage.site->model);
    stage.site->stored = stored_placements(pipeline_.theory(s), plan.program);
    stage.phases = phases_of(pipeline_.theory(s), plan.program);
    stage.forward = pass(stage, r, s, {{0, stage.phases.backward}});
    std::vector<std::pair<int, int>> parts = {{stage.phases.backward, stage.phases.weights}};
    if (plan.recompute) parts.insert(parts.begin(), {0, stage.phases.backward});
    PassTime* last = &stage.backward;
    if (stage.phases.weights < stage.phases.reduction) {
      stage.backward = pass(stage, r, s, parts);
      parts = {{stage.phases.weights, stage.phases.reduction}};
      last = &stage.weights;
    }
    if (!exchanges_.in_every_pass(s)) {
      *last = pass(stage, r, s, parts);
      return stage;
    }
    parts.push_back({stage.phases.reduction, static_cast<int>(plan.program.steps.size())});
    *last = pass(stage, r, s, parts);
    const Seconds begin = last->seconds, end = begin + exchanges_.in_pass(s).seconds;
    for (Work& work : last->work)
      if (end > begin) work.comm += end - begin, work.used = end;
    last->seconds = end;
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

  // Replicas that meet in every backward pass are as slow in each as the slowest.
  void meet() {
    bool meets = false;
    for (int s = 0; s < pipeline_.stages(); ++s) meets = meets || exchanges_.in_every_pass(s);
    for (int s = 0; s < pipeline_.stages() && meets; ++s) {
      for (PassTime Stage::*kind : {&Stage::forward, &Stage::backward, &Stage::weights}) {
        Seconds most = 0;
        for (const auto& stages : replicas_) most = std::max(most, (stages[s].*kind).seconds);
        for (auto& stages : replicas_) (stages[s].*kind).seconds = most;
      }
    }
  }

  // Whether replica r's passes of a stage take what those of replica q do, on parts of the cluster
  // that are alike.
  bool passes_alike(size_t q, size_t r, int s) const {
    const StagePlan &a = planned(q, s), &b = planned(r, s);
    auto programs = [&](const StagePlan& stage) {
      auto list = programs_for(plan_.reductions, stage.devices, plan_.cluster.size());
      for (ReductionProgram& program : list) program.devices.clear();
      return list;
    };
    return a.recompute == b.recompute && a.ratios == b.ratios && a.program == b.program &&
           programs(a) == programs(b);
  }

  PassTime pass(const Stage& stage, size_t r, int s,
                const std::vector<std::pair<int, int>>& parts) {
    PassTime result;
    Seconds late = 0, comm = 0;
    const int ranks = stage.site->part.size();
    std::vector<Seconds> now(ranks, 0);
    result.work.resize(ranks);
    for (auto [begin, end] : parts) {
      std::vector<Work> done(ranks);
      const std::vector<int> like =
          walk(pipeline_.theory(s), planned(r, s).program, *stage.site->model,
               *stage.site->fractions, begin, end, &now,
               [&](int d, Seconds from, Seconds to, const std::string&, WalkKind kind, NodeId) {
                 (kind == WalkKind::compute ? done[d].busy
                  : kind == WalkKind::comm  ? done[d].comm
                                            : done[d].idle) += to - from;
               },
               {.deadline = deadline_});
      for (int d = 0; d < ranks; ++d) {
        result.work[d].busy += done[like[d]].busy;
        result.work[d].comm += done[like[d]].comm;
        result.work[d].idle += done[like[d]].idle;
      }
      late += launching(pipeline_.theory(s), planned(r, s).program, *stage.site->model,
                        *stage.site->fractions, begin, end)
                  .waits;
      comm += done[like[0]].comm;
    }
    for (int d = 0; d < ranks; ++d) result.work[d].used = now[d];
    result.seconds = *std::max_element(now.begin(), now.end()) + std::max(0.0, late - comm);
    return result;
  }

  struct Arrival {
    Seconds begin = kUnknown, end = kUnknown;
  };

  void passes(int r) {
    const int stages = pipeline_.stages(), count = pipeline_.replicas[r].micro_batches;
    std::vector<std::vector<Arrival>> arrivals(ways_.size(), std::vector<Arrival>(count));
    std::vector<Seconds> way_free(ways_.size(), 0);
    std::vector<int> work;
    const auto copies = static_cast<double>(copies_[r]);
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
          if (ways_[w].to != s || task.kind == PassKind::weights ||
              ways_[w].backward != (task.kind == PassKind::backward))
            continue;
          const Arrival& a = arrivals[w][task.micro_batch];
          ready = ready && a.end != kUnknown;
          if (a.end > last.end) last = a;
        }
        if (!ready) break;
        const Seconds start = std::max(group.free, last.end);
        waited(r, s, group.free, start, last);
        const PassTime& pass = task.kind == PassKind::forward    ? stage.forward
                               : task.kind == PassKind::backward ? stage.backward
                                                                 : stage.weights;
        record(r, s, start, pass, task);
        group.free = start + pass.seconds;
        ++group.next;
        for (size_t w = 0; w < ways_.size(); ++w) {
          if (ways_[w].from != s || task.kind == PassKind::weights ||
              ways_[w].made_backward != (task.kind == PassKind::backward))
            continue;
          Arrival& a = arrivals[w][task.micro_batch];
          a.begin = std::max(way_free[w], group.free);
          a.end = way_free[w] = a.begin + ways_[w].sent.seconds;
          if (spans_ != Spans::none)
            sim_.messages.push_back(
                {r, ways_[w].from, ways_[w].to, ways_[w].backward, a.begin, a.end});
          for (int d : planned(r, ways_[w].to).devices)
            sim_.devices[d].comm += ways_[w].sent.seconds;
          hidden_ += copies * ways_[w].sent.seconds *
                     static_cast<double>(planned(r, ways_[w].to).devices.size());
          work.push_back(replicas_[r][ways_[w].to].head);
        }
      }
    }
    for (int s = 0; s < stages; ++s)
      MOTLEY_CHECK(replicas_[r][s].next == replicas_[r][s].order.size(),
                   "replica {}: stage {} waits for ever", r, s);
  }

  void span(int device, Seconds begin, Seconds end, const std::string& name, WalkKind kind,
            Seconds comm = 0) {
    if (spans_ == Spans::none || end <= begin ||
        (spans_ == Spans::alike && sim_.like[device] != device))
      return;
    add_span({device, begin, end, name, kind, {}, comm}, &sim_);
  }

  void exchange(const std::string& what, int count, const Sent& sent) {
    if (sent.bytes > 0) sim_.exchanges.push_back({what, count, sent.bytes, sent.seconds});
  }

  // A stage was free from `from` and went on at `to`, when `last` had come in.
  void waited(int r, int s, Seconds from, Seconds to, const Arrival& last) {
    if (to <= from) return;
    const Seconds exposed = last.end == kUnknown ? 0 : to - std::max(from, last.begin);
    for (int d : planned(r, s).devices) {
      sim_.devices[d].idle += to - from - exposed;
      sim_.devices[d].exposed_comm += exposed;
      hidden_ -= copies_[r] * exposed;
      span(d, from, to, "wait", WalkKind::wait);
    }
  }

  void record(int r, int s, Seconds start, const PassTime& pass, Pass task) {
    if (only_step_) return;
    const std::vector<int>& devices = planned(r, s).devices;
    for (size_t i = 0; i < devices.size(); ++i) {
      const Work& work = pass.work[i];
      DeviceTime& t = sim_.devices[devices[i]];
      t.busy += work.busy;
      t.comm += work.comm;
      t.exposed_comm += work.comm;
      t.idle += work.idle + pass.seconds - work.used;
    }
    if (spans_ == Spans::none) return;
    const std::string name =
        fmt::format("{}{}{}", name_of(task.kind), task.micro_batch,
                    replicas_[r][s].shares ? fmt::format(" of stage {}", s) : "");
    for (size_t i = 0; i < devices.size(); ++i)
      span(devices[i], start, start + pass.seconds, name, WalkKind::compute, pass.work[i].comm);
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

  void reductions() {
    const int stages = pipeline_.stages(), replicas = static_cast<int>(replicas_.size());
    for (int r = 0; r < replicas; ++r)
      for (int s = 0; s < stages; ++s)
        if (!exchanges_.in_every_pass(s)) reduce_within(r, s);
    for (int s = 0; s < stages && replicas > 1; ++s) {
      const Sent sent = exchanges_.over_replicas(s);
      if (exchanges_.in_every_pass(s))
        exchange(fmt::format("gradients over replicas in a backward pass, stage {}", s),
                 pipeline_.replicas[0].micro_batches, exchanges_.in_pass(s));
      exchange(fmt::format("gradients over replicas, stage {}", s), 1, sent);
      Seconds begin = 0;
      for (int r = 0; r < replicas; ++r) begin = std::max(begin, group_of(r, s).free);
      for (int r = 0; r < replicas; ++r)
        communicate(r, s, begin, begin + sent.seconds, "reduce over replicas");
    }
    for (const Tied& tied : pipeline_.parts().tied) {
      const Parameter& parameter = plan_.graph->parameters[tied.parameter];
      if (!parameter.gradient.valid()) continue;
      const Sent sent = exchanges_.tied(tied);
      exchange(fmt::format("gradients of tied {}", parameter.name), 1, sent);
      for (int r = 0; r < replicas; ++r) {
        Seconds begin = 0;
        for (int s : tied.stages) begin = std::max(begin, group_of(r, s).free);
        for (int s : tied.stages) communicate(r, s, begin, begin + sent.seconds, "reduce tied");
      }
    }
  }

  // A stage reduces its gradients as its program says.
  void reduce_within(int r, int s) {
    const Seconds begin = group_of(r, s).free;
    communicate(r, s, begin, begin + replicas_[r][s].reduction, "reduce");
  }

  Seconds reduction_of(size_t r, int s) const {
    const Stage& stage = replicas_[r][s];
    std::vector<Seconds> now(stage.site->part.size(), 0);
    const Program& whole = planned(r, s).program;
    std::vector<Step> steps = whole.steps;
    const std::vector<int>& left_out = exchanges_.joint(s).steps[r];
    for (auto step = left_out.rbegin(); step != left_out.rend(); ++step)
      steps.erase(steps.begin() + *step);
    const Program program{std::move(steps), whole.sizes};
    walk(pipeline_.theory(s), program, *stage.site->model, *stage.site->fractions,
         stage.phases.reduction, static_cast<int>(program.steps.size()), &now,
         [](int, Seconds, Seconds, const std::string&, WalkKind, NodeId) {},
         {.deadline = deadline_});
    return *std::max_element(now.begin(), now.end());
  }

  // Optimizers run.
  void update() {
    std::vector<Seconds>& end = end_;
    end.assign(plan_.cluster.size(), 0);
    for (size_t r = 0; r < replicas_.size(); ++r)
      for (int s = 0; s < pipeline_.stages() && alone(r); ++s)
        step_parameters(static_cast<int>(r), s, &end);
    for (size_t r = 0; r < replicas_.size(); ++r)
      for (int s = 0; s < pipeline_.stages() && !alone(r); ++s) {
        const std::vector<int>&to = planned(r, s).devices, &from = planned(like_[r], s).devices;
        for (size_t i = 0; i < to.size(); ++i) {
          end[to[i]] = end[from[i]];
          sim_.devices[to[i]].busy = sim_.devices[from[i]].busy;
        }
      }
    // Replicas that stepped parts of parameters gather them.
    for (int s = 0; s < pipeline_.stages(); ++s) {
      if (!exchanges_.divided(s).any()) continue;
      const Sent sent = exchanges_.parameters(s);
      const Seconds seconds = sent.seconds;
      exchange(fmt::format("parameters over replicas, stage {}", s), 1, sent);
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

  void step_parameters(int r, int s, std::vector<Seconds>* end) {
    Stage& stage = replicas_[r][s];
    const std::vector<int>& devices = planned(r, s).devices;
    // After that of the stage before it on these devices.
    std::vector<Seconds> now, busy(devices.size(), 0);
    for (int d : devices) now.push_back(std::max(group_of(r, s).free, (*end)[d]));
    const std::vector<int> like = walk_optimizer(
        pipeline_.theory(s), planned(r, s).program, *stage.site->model, *stage.site->fractions,
        plan_.optimizer, &now,
        [&](int d, Seconds from, Seconds to, const std::string& name, WalkKind kind, NodeId) {
          busy[d] += to - from;
          span(devices[d], from, to, name, kind);
        },
        exchanges_.divided(s).kept(r), {.each = spans_ != Spans::none, .deadline = deadline_});
    for (size_t i = 0; i < devices.size(); ++i) {
      sim_.devices[devices[i]].busy += busy[like[i]];
      (*end)[devices[i]] = now[i];
    }
  }

  void summarize() {
    const std::vector<Bytes> memory = pipeline_memory(pipeline_, plan_.cluster, plan_.optimizer);
    Seconds busiest = 0, total = 0, comm = 0;
    for (int d = 0; d < plan_.cluster.size(); ++d) {
      DeviceTime& t = sim_.devices[d];
      t.idle += sim_.step - end_[d];
      t.peak_memory = t.allocated = memory[d];
      busiest = std::max(busiest, t.busy);
      total += t.busy;
      comm += t.comm;
    }
    sim_.overlap = comm > 0 ? hidden_ / comm : 0;
    sim_.load_balance = busiest > 0 ? total / plan_.cluster.size() / busiest : 1;
  }

  const Plan& plan_;
  const PipelinePlan& pipeline_;
  const Spans spans_;
  const Deadline deadline_;
  Exchanges exchanges_;
  std::vector<Cluster> shared_;  // [stage] as its replicas see it, all of them busy
  // [stage] By the part of the cluster, replicas whose passes take different times.
  std::vector<std::map<std::string, std::vector<int>>> seats_;
  std::vector<int> like_;    // [replica] the one that is simulated for it
  std::vector<int> copies_;  // [replica] how many it stands for
  std::vector<std::vector<Stage>> replicas_;
  std::vector<Way> ways_;
  Simulation sim_;
  std::vector<Seconds> end_;  // [device]
  bool only_step_ = false;    // what devices do in passes does not count
  Seconds hidden_ = 0;        // device-seconds of transfers that nobody waits for
};

}  // namespace

Simulation simulate_pipeline(const Plan& plan, Spans spans, const Deadline& deadline) {
  return Simulator(plan, spans, deadline).run();
}

class PipelineSteps::Impl : public Simulator {
 public:
  using Simulator::Simulator;
};

PipelineSteps::PipelineSteps(const Plan& plan, const Deadline& deadline)
    : impl_(std::make_unique<Impl>(plan, Spans::none, deadline)) {}
PipelineSteps::~PipelineSteps() = default;
Seconds PipelineSteps::step() { return impl_->again(); }

}  // namespace motley

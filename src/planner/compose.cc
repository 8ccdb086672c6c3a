#include "planner/compose.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.h"
#include "net/messages.h"
#include "pipeline/schedules.h"
#include "planner/alternation.h"
#include "planner/division.h"
#include "planner/interleave.h"
#include "planner/stage_reductions.h"
#include "planner/stage_sizes.h"
#include "reduce/cluster.h"
#include "sim/exchange.h"
#include "sim/pipeline.h"

namespace motley::planner {

namespace {

constexpr double kSplitGain = 0.005;  // of the step, that split backward passes have to bring

}  // namespace

// One composition on its way to a plan.
class PlanBuilder::Composer {
 public:
  Composer(PlanBuilder* builder, const Composition& composition, const std::string& engine,
           StagePrograms::Draft* draft)
      : builder_(*builder),
        draft_(draft),
        request_(builder->request()),
        cluster_(builder->groups().whole()),
        composition_(composition),
        plan_(std::make_unique<Plan>()),
        result_(*(plan_->pipeline = std::make_unique<PipelinePlan>())) {
    plan_->engine = engine;
    plan_->model = request_.model;
    plan_->batch = request_.batch;
    plan_->optimizer = request_.optimizer;
    plan_->cluster = cluster_;
  }

  // Whether run() found programs, but no room for all that they hold.
  bool lacks_memory() const { return lacks_memory_; }
  std::unique_ptr<Plan> run(std::string* reason) {
    if (make()) return std::move(plan_);
    *reason = reason_;
    return nullptr;
  }

 private:
  bool make() {
    if (!cut() || !seat() || !find_programs()) return false;
    take_step(builder_.step_, plan_.get());
    divide();
    find_reductions();
    if (!time_stages()) return false;
    choose_warm_ups();
    try_joint_reductions();
    try_division();
    try_sizes();
    try_split();
    return as_scheduled() && fits();
  }

  // Whether there is room for the warm-up passes of the schedule that was asked for.
  bool as_scheduled() {
    if (composition_.schedule.empty() || stages_per_device_ > 1) return true;
    const pipeline::ScheduleDef* def = pipeline::find_schedule(composition_.schedule);
    for (size_t r = 0; r < times_.size(); ++r) {
      const std::vector<int> wanted = def->counts(times_[r]);
      const ReplicaPlan& replica = result_.replicas[r];
      for (int s = 0; s < stages_; ++s)
        if (const int count = std::min(wanted[s], replica.micro_batches);
            replica.stages[s].warm_up < count) {
          reason_ = fmt::format("stage {}: there is no room for the {} micro-batches of {}", s,
                                count, def->name);
          return false;
        }
    }
    return true;
  }

  // Cuts the graph into stages.
  bool cut() {
    result_.micro_batch = composition_.micro_batch;
    result_.take_parts(builder_.step_->of(composition_.micro_batch));
    builder_.step_->check_time(request_.limits.deadline);
    const std::vector<StageChoice>& choices = composition_.replicas[0].stages;
    stages_ = static_cast<int>(choices.size());
    std::vector<int> cuts;
    for (int s = 1; s < stages_; ++s) cuts.push_back(choices[s].first);
    result_.stage_of = builder_.stages_of(cuts);
    try {
      result_.cut(stages_, "composition");
    } catch (const UserError& e) {
      reason_ = e.what();
      return false;
    }
    return true;
  }

  // Gives stages their devices, and what goes with them: groups, interleaved warm-up counts, and
  // whether replicas divide state.
  bool seat() {
    seats_.resize(stages_);
    for (int s = 0; s < stages_; ++s)
      for (const ReplicaChoice& choice : composition_.replicas) {
        seats_[s].push_back(choice.stages[s].devices);
        std::sort(seats_[s].back().begin(), seats_[s].back().end());
      }
    kinds_.resize(composition_.replicas.size());
    for (size_t r = 0; r < kinds_.size(); ++r) {
      request_.limits.deadline.check();
      const ReplicaChoice& choice = composition_.replicas[r];
      ReplicaPlan replica;
      replica.micro_batches = choice.micro_batches;
      for (int s = 0; s < stages_; ++s) {
        kinds_[r].push_back(
            &builder_.groups().of(seats_[s], r, composition_.joint ? joint_of(s) : nullptr));
        StagePlan stage;
        stage.devices = seats_[s][r];
        replica.stages.push_back(std::move(stage));
      }
      result_.replicas.push_back(std::move(replica));
    }
    for (ReplicaPlan& replica : result_.replicas)
      if (reason_ = interleave(result_, &replica, &stages_per_device_); !reason_.empty())
        return false;
    divides_ = (composition_.zero == 1 || composition_.zero == 2) && result_.replicas.size() > 1;
    if (divides_) result_.zero.assign(stages_, {composition_.zero, {}});
    if (divides_ && composition_.zero > 1)
      for (const ReplicaPlan& replica : result_.replicas)
        if (replica.micro_batches != result_.replicas[0].micro_batches) {
          reason_ = "replicas that divide gradients cannot take unequal numbers of micro-batches";
          return false;
        }
    return true;
  }

  // Programs and shares; with room for the choice's warm-up counts, 1F1B's, or one micro-batch.
  bool find_programs() {
    std::vector<std::string> asked;
    for (int s = 0; s < stages_; ++s)
      asked.push_back(fmt::format("{} {}", strategy_of(s),
                                  fmt::join(composition_.replicas[0].stages[s].ratios, " ")));
    const std::vector<int> numbers = builder_.programs_.numbers_of(result_, asked);
    std::vector<Divided> divided;
    std::vector<int> among;
    for (int s = 0; s < stages_; ++s)
      divided.push_back(divided_of(s)), among.push_back(exchanged_among(s));
    const Bytes fixed = whole_batch(result_);
    std::vector<StageTask> tasks;
    for (size_t r = 0; r < kinds_.size(); ++r) {
      const ReplicaPlan& replica = result_.replicas[r];
      for (int s = 0; s < stages_; ++s) {
        const int count = replica.micro_batches, usual = std::min(stages_ - s, count),
                  wanted = std::max(stages_ - s, composition_.replicas[r].stages[s].in_flight),
                  most = stages_per_device_ > 1 ? in_flight(replica, s) : std::min(wanted, count);
        tasks.push_back(
            {.theory = &result_.theory(s),
             .number = numbers[s],
             .strategy = strategy_of(s),
             .ratios = composition_.replicas[0].stages[s].ratios,
             .group = kinds_[r][s],
             .stages_per_device = stages_per_device_,
             .micro_batches = count,
             .in_flight = most,
             .fewer = stages_per_device_ > 1 ? most : usual,
             .again = composition_.replicas[r].stages[s].again,
             .thorough = composition_.thorough,
             .worth = stages_ == 1 ? composition_.worth : std::numeric_limits<double>::infinity(),
             .divided = divided[s],
             .fixed_bytes = fixed,
             .exchanged_among = among[s],
             .replicas = result_.replicas.size() > 1});
      }
    }
    std::string why;
    if (const int failed = builder_.programs_.find(tasks, &found_, &why, draft_); failed >= 0) {
      reason_ = fmt::format("stage {}: {}", failed % stages_, why);
      return false;
    }
    auto next = found_.begin();
    for (ReplicaPlan& replica : result_.replicas)
      for (StagePlan& stage : replica.stages) {
        stage.program = (*next)->program;
        stage.recompute = (*next)->all_again;
        stage.ratios = (*next)->ratios;
        ++next;
      }
    return true;
  }

  // Replicas of a stage on devices of one kind, which take as many micro-batches, get one program.
  int exchanged_among(int s) const {
    std::set<std::tuple<int, int, int>> unlike;
    for (size_t r = 0; r < kinds_.size(); ++r)
      unlike.emplace(kinds_[r][s]->number, result_.replicas[r].micro_batches,
                     composition_.replicas[r].stages[s].in_flight);
    return std::max(static_cast<int>(unlike.size()), tied_among(result_, s));
  }

  const std::string& strategy_of(int s) const {
    const std::string& own = composition_.replicas[0].stages[s].strategy;
    return own.empty() ? request_.strategy : own;
  }

  // Shares of devices of unlike memories follow from what is planned; until then they are free.
  Divided divided_of(int s) const {
    if (!divides_) return composition_.zero == 3 ? Divided{3, 1} : Divided{};
    const std::vector<int> devices = devices_of(result_, s);
    const bool alike = std::all_of(devices.begin(), devices.end(), [&](int d) {
      return cluster_.type_of(d).memory == cluster_.type_of(devices[0]).memory;
    });
    return {composition_.zero, alike ? 1 / static_cast<double>(composition_.replicas.size()) : 0};
  }

  void divide() {
    if (divides_) divide_by_room(cluster_, request_.optimizer, &result_);
    state_ = divided_states(result_);
  }

  void find_reductions() {
    if (builder_.groups().planned()) add_reductions(kinds_, plan_.get());
    separate_ = plan_->reductions.size();
    if (composition_.joint)
      for (int s = 0; s < stages_; ++s) add_joint(s, &plan_->reductions);
  }

  // The reduction of a stage's gradients over ranks and replicas at once; null: it has not both.
  const ReductionProgram* joint_of(int s) {
    const bool ranks = std::any_of(seats_[s].begin(), seats_[s].end(),
                                   [](const std::vector<int>& d) { return d.size() > 1; });
    size_t devices = 0;
    for (const std::vector<int>& seat : seats_[s]) devices += seat.size();
    if (seats_[s].size() == 1 || !ranks || devices > kMostReduced) return nullptr;
    return &builder_.joint_reduction(seats_[s],
                                     static_cast<Bytes>(result_.graph(s).parameter_bytes()));
  }

  // Stages that share their devices share the program.
  void add_joint(int s, std::vector<ReductionProgram>* to) {
    const ReductionProgram* program = joint_of(s);
    if (program && programs_for(*to, program->devices, cluster_.size()).empty())
      to->push_back(*program);
  }

  // Each replica's times, and how many micro-batches its stages can hold: of those that look alike
  // one's are all's.
  bool time_stages() {
    const net::Topology topology(cluster_);
    times_.resize(result_.replicas.size());
    std::map<std::vector<double>, size_t> alike;
    std::map<const Planned*, int> numbers;
    for (size_t r = 0; r < times_.size(); ++r) {
      request_.limits.deadline.check();
      const ReplicaPlan& replica = result_.replicas[r];
      std::vector<double> look = {static_cast<double>(replica.micro_batches)};
      std::map<int, int> nodes;
      int before = -1;
      for (int s = 0; s < stages_; ++s) {
        const Planned* program = found_[r * stages_ + s];
        const int number = numbers.try_emplace(program, numbers.size()).first->second;
        look.insert(look.end(),
                    {static_cast<double>(number), static_cast<double>(kinds_[r][s]->number),
                     static_cast<double>(replica.stages[s].recompute), state_[s].shares[r]});
        // How devices lie in the tree.
        for (const int d : replica.stages[s].devices) {
          const int node = topology.leaf_group(d);
          look.push_back(nodes.try_emplace(node, nodes.size()).first->second);
          if (before >= 0) look.push_back(topology.common_depth(before, d));
          before = d;
        }
      }
      const auto [it, fresh] = alike.try_emplace(std::move(look), r);
      alike_.push_back(it->second);
      if (!fresh) {
        times_[r] = times_[it->second];
        continue;
      }
      for (int s = 0; s < stages_; ++s) {
        if (!time_stage(r, s, state_[s], &times_[r])) return false;
        if (s + 1 < stages_) times_[r].links.push_back(link_time(topology, r, s));
      }
    }
    return true;
  }

  // With nothing divided, and where the program is still the one that was found; else null.
  const MemoryCost* known_memory(size_t r, int s) const {
    const Planned& found = *found_[r * stages_ + s];
    const StagePlan& stage = result_.replicas[r].stages[s];
    if (found.program != stage.program || found.ratios != stage.ratios) return nullptr;
    return state_[s].optimizer.empty() && state_[s].gradient.empty() ? found.memory.get() : nullptr;
  }

  bool time_stage(size_t r, int s, const DividedState& state, pipeline::Pipeline* to) {
    const Theory& theory = result_.theory(s);
    const StagePlan& stage = result_.replicas[r].stages[s];
    const CostModel& model = kinds_[r][s]->model;
    const Shares shares(stage.ratios);
    const Fractions fractions(model.cluster(), shares);
    const auto seconds = phase_seconds(theory, stage.program, model, fractions, request_.optimizer);
    to->stages.push_back({seconds.forward,
                          seconds.backward + (stage.recompute ? seconds.forward : 0),
                          seconds.weights});
    to->epilogue.push_back(seconds.reduction + seconds.update);
    int limit = composition_.replicas[r].micro_batches;
    double waiting = 0;  // of what one in flight holds
    if (request_.memory_limit) {
      const MemoryCost* known = state.any() ? nullptr : known_memory(r, s);
      const MemoryCost memory =
          known ? *known
                : memory_of(theory, stage.program, fractions, model.types(), request_.optimizer,
                            true, state.kept(static_cast<int>(r)));
      for (int t = 0; t < model.types(); ++t) {
        const Bytes one = memory.peak[t] + memory.sums[t],
                    more = memory.another(t, stage.recompute),
                    room = model.cluster().types[t].memory - one - whole_batch(result_);
        if (room < 0) {
          reason_ = fmt::format("stage {}: {} lacks {}", s, model.cluster().types[t].name,
                                format_bytes(-room));
          return false;
        }
        if (more > 0) limit = std::min(limit, 1 + static_cast<int>(std::min(1e6, room / more)));
        if (more > 0) waiting = std::max(waiting, memory.waiting[t] / more);
      }
    }
    to->in_flight_limit.push_back(limit);
    to->waiting.push_back(waiting);
    return true;
  }

  // Of what a stage and the next one hand to each other.
  pipeline::LinkTime link_time(const net::Topology& topology, size_t r, int s) const {
    const StagePlan &stage = result_.replicas[r].stages[s],
                    &next = result_.replicas[r].stages[s + 1];
    std::vector<net::PairMessage> down, up;
    for (const Transfer& t : result_.parts().transfers) {
      const bool is_down = t.from == s && t.to == s + 1, is_up = t.from == s + 1 && t.to == s;
      if (!is_down && !is_up) continue;
      const StagePlan &from = is_down ? stage : next, &to = is_down ? next : stage;
      const Shares from_shares(from.ratios), to_shares(to.ratios);
      const Theory &made = result_.theory(t.from), &taken = result_.theory(t.to);
      const Placement a = output_placement(made, from.program, t.made),
                      b = stored_placements(taken, to.program)[t.taken.index];
      add_messages({&from.devices, &from_shares, a, a.is_shard() ? made.cut_size(t.made, a) : 0},
                   {&to.devices, &to_shares, b, b.is_shard() ? taken.cut_size(t.taken, b) : 0},
                   static_cast<Bytes>(builder_.graph().spec(t.value).bytes()),
                   is_down ? &down : &up);
    }
    return {net::messages_time(topology, down), net::messages_time(topology, up)};
  }

  // Warm-up counts: every schedule that is one, in the simulator.
  void choose_warm_ups() {
    if (stages_per_device_ > 1) {
      result_.schedule = "interleaved";
      step_ = PipelineSteps(*plan_, request_.limits.deadline).step();
      return;
    }
    int held = 0;
    std::vector<std::vector<int>> best;  // [replica][stage]
    std::set<std::vector<std::vector<int>>> tried;
    PipelineSteps steps(*plan_, request_.limits.deadline);
    for (const pipeline::ScheduleDef& def : pipeline::schedule_table()) {
      if (def.counts == nullptr) continue;
      if (!best.empty() && request_.limits.deadline.over()) break;
      if (!composition_.schedule.empty() && composition_.schedule != def.name) continue;
      const std::vector<std::vector<int>> counts = counts_of(def);
      int sum = 0;
      for (const std::vector<int>& of_replica : counts)
        sum = std::accumulate(of_replica.begin(), of_replica.end(), sum);
      if (!tried.insert(counts).second) continue;
      warm_up(counts);
      Seconds step = 0;
      try {
        step = steps.step();
      } catch (const TimeIsUp&) {
        if (best.empty()) throw;
        break;
      }
      if (step > step_ * (1 + 1e-9) || (step > step_ * (1 - 1e-9) && sum >= held)) continue;
      step_ = step;
      held = sum;
      result_.schedule = def.name;
      best = counts;
    }
    warm_up(best);
  }

  // [replica][stage] Of a schedule.
  std::vector<std::vector<int>> counts_of(const pipeline::ScheduleDef& def) const {
    std::vector<std::vector<int>> all;
    for (size_t r = 0; r < times_.size(); ++r)
      all.push_back(alike_[r] < r ? all[alike_[r]]
                                  : pipeline::within_limits(times_[r], def.counts(times_[r]),
                                                            result_.replicas[r].micro_batches));
    // Replicas that meet in every backward pass take passes in the same order.
    for (int s = 0; s < stages_ && divides_ && composition_.zero > 1; ++s) {
      int least = all[0][s];
      for (const std::vector<int>& counts : all) least = std::min(least, counts[s]);
      for (std::vector<int>& counts : all) counts[s] = least;
    }
    return all;
  }

  void warm_up(const std::vector<std::vector<int>>& counts) {
    for (size_t r = 0; r < counts.size(); ++r)
      for (int s = 0; s < stages_; ++s) result_.replicas[r].stages[s].warm_up = counts[r][s];
  }

  // Gradients summed over ranks and replicas at once, or not, whichever is faster.
  void try_joint_reductions() {
    if (!builder_.groups().planned()) return;
    std::vector<ReductionProgram> others = plan_->reductions;
    if (composition_.joint)
      others.resize(separate_);
    else
      for (int s = 0; s < stages_; ++s)
        if (joint_of(s) && joint_gradients(result_, s).any()) add_joint(s, &others);
    if (others.size() == plan_->reductions.size()) return;
    std::swap(others, plan_->reductions);
    if (!faster()) std::swap(others, plan_->reductions);
  }

  // Optimizer state divided where it is whole, if that is faster.
  void try_division() {
    if (composition_.zero > 0 || !composition_.try_zero || result_.replicas.size() == 1) return;
    std::vector<ReductionProgram> others = plan_->reductions;
    if (!composition_.joint) plan_->reductions.resize(separate_);
    result_.zero.assign(stages_, {1, {}});
    if (faster()) return;
    result_.zero.clear();
    std::swap(others, plan_->reductions);
  }

  // Gradients in messages of other sizes, if that is faster and there is room.
  void try_sizes() {
    const auto sizes = stage_sizes(result_, kinds_, kWorthOtherSizes * step_);
    if (sizes.empty()) return;
    const Seconds before = step_;
    set_sizes(sizes, &result_);
    if (faster() && fits()) return;
    set_sizes({}, &result_);
    step_ = before;
    lacks_memory_ = false;
  }

  // Gradients of weights in passes of their own, if that is faster.
  void try_split() {
    if (!composition_.try_split || !composition_.schedule.empty() || stages_ == 1 ||
        stages_per_device_ > 1 || request_.limits.deadline.over())
      return;
    const std::vector<ReplicaPlan> whole = result_.replicas;
    bool any = false;
    for (size_t r = 0; r < whole.size(); ++r)
      for (int s = 1; s < stages_; ++s) {
        StagePlan& stage = result_.replicas[r].stages[s];
        if (found_[r * stages_ + s]->again()) continue;  // what waits would be made again
        stage.program = alike_[r] < r ? result_.replicas[alike_[r]].stages[s].program
                                      : weights_later(result_.theory(s), stage.program);
        any = any || has_later(stage.program);
      }
    if (any && launch_split()) {
      const std::string schedule = std::exchange(result_.schedule, "zero-bubble");
      const Seconds before = step_;
      if (faster() && step_ < (1 - kSplitGain) * before) return;
      step_ = before;
      result_.schedule = schedule;
    }
    result_.replicas = whole;
  }

  // Counts and lags for split backward passes. False: there is no room, or replicas that meet in
  // every pass would take different ones.
  bool launch_split() {
    const std::vector<DividedState> divided = divided_states(result_);
    std::vector<pipeline::Launches> launches;
    for (size_t r = 0; r < times_.size(); ++r) {
      if (alike_[r] < r) {
        launches.push_back(launches[alike_[r]]);
      } else {
        pipeline::Pipeline p;
        p.links = times_[r].links;
        for (int s = 0; s < stages_; ++s)
          if (!time_stage(r, s, divided[s], &p)) return false;
        launches.push_back(
            pipeline::zero_bubble_launches(p, composition_.replicas[r].micro_batches));
      }
      const pipeline::Launches &own = launches[r], &first = launches[0];
      if (divides_ && composition_.zero > 1 &&
          (own.counts != first.counts || own.weights_behind != first.weights_behind))
        return false;
      for (int s = 0; s < stages_; ++s) {
        StagePlan& stage = result_.replicas[r].stages[s];
        stage.warm_up = own.counts[s];
        stage.weights_behind = has_later(stage.program) ? own.weights_behind[s] : 0;
      }
    }
    return true;
  }

  // Whether the plan takes less than the best so far, which it is then. No: there is no time to see.
  bool faster() {
    try {
      const Seconds step = PipelineSteps(*plan_, request_.limits.deadline).step();
      if (step >= step_ * (1 - 1e-9)) return false;
      step_ = step;
      return true;
    } catch (const TimeIsUp&) {
      return false;
    }
  }

  bool fits() {
    plan_->predicted_step_s = step_;
    plan_->peak_memory_bytes = pipeline_memory(result_, cluster_, request_.optimizer,
                                               [&](int r, int s) { return known_memory(r, s); });
    if (request_.memory_limit)
      for (int d = 0; d < cluster_.size(); ++d)
        if (const Bytes lack = plan_->peak_memory_bytes[d] - cluster_.type_of(d).memory; lack > 0) {
          reason_ = fmt::format("device {} lacks {}", d, format_bytes(lack));
          lacks_memory_ = true;
          return false;
        }
    return true;
  }

  PlanBuilder& builder_;
  StagePrograms::Draft* const draft_;
  const PlanOptions& request_;
  const Cluster& cluster_;
  const Composition& composition_;
  std::unique_ptr<Plan> plan_;
  PipelinePlan& result_;  // of plan_
  std::string reason_;    // why there is no plan
  bool lacks_memory_ = false;
  int stages_ = 0, stages_per_device_ = 1;  // the latter: on the same devices
  std::vector<net::Groups> seats_;          // [stage][replica] devices
  StageGroups kinds_;
  std::vector<const Planned*> found_;                       // [replica * stages + stage]
  bool divides_ = false;                                    // replicas, the state of parameters
  std::vector<DividedState> state_;                         // [stage]
  size_t separate_ = 0;                                     // reductions that are not joint
  std::vector<pipeline::Pipeline> times_;                   // [replica]
  std::vector<size_t> alike_;                               // [replica] the first that looks alike
  Seconds step_ = std::numeric_limits<double>::infinity();  // of the plan
};

const ReductionProgram& PlanBuilder::joint_reduction(const net::Groups& ranks, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  auto [it, fresh] = joint_.try_emplace(ranks);
  if (fresh) it->second = reduce::joint_reduction(groups().whole(), ranks, bytes);
  return it->second;
}

std::unique_ptr<Plan> PlanBuilder::compose_divided(Composition* composition, int most,
                                                   const std::string& engine, std::string* reason,
                                                   StagePrograms::Draft* draft) {
  const std::vector<ReplicaChoice>& replicas = composition->replicas;
  for (const ReplicaChoice& replica : replicas)  // these cannot divide gradients
    if (replica.micro_batches != replicas[0].micro_batches) most = std::min(most, 1);
  const int least = composition->zero;
  if (auto plan = compose(*composition, engine, reason, draft); plan || most <= least) return plan;
  // Where most division does not help, less does not.
  composition->zero = most;
  std::unique_ptr<Plan> plan = compose(*composition, engine, reason, draft);
  for (int level = least + 1; plan && level < most; ++level) {
    composition->zero = level;
    if (auto less = compose(*composition, engine, reason, draft)) return less;
  }
  composition->zero = most;
  return plan;
}

std::unique_ptr<Plan> PlanBuilder::compose(const Composition& composition,
                                           const std::string& engine, std::string* reason,
                                           StagePrograms::Draft* draft) {
  Composer composer(this, composition, engine, draft);
  if (auto plan = composer.run(reason); plan || !composer.lacks_memory()) return plan;
  // Its programs leave room for what is in flight, all but what is known in the end alone.
  Composition fewer = composition;
  bool other = false;
  for (ReplicaChoice& replica : fewer.replicas)
    for (StageChoice& stage : replica.stages)
      other = std::exchange(stage.in_flight, 0) > 0 || other;
  return other ? Composer(this, fewer, engine, draft).run(reason) : nullptr;
}

}  // namespace motley::planner

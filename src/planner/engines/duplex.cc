// One SPMD program on the parts of a batch, the communication of one beside the computation of
// another (HiDup; shard/duplex.h).
//
// Which program is best depends on what hides: with overlap a step takes no less than
// max(computation, communication), without it their sum. Programs are searched for on the step of
// one part at prices w * computation + (1 - w) * communication: the least of these is a lower bound
// of every max for each w, as in a Lagrangian dual. w = 1/2 is the program that is best without
// overlap; w moves to the side that is longer, as far as that changes the program. Every program
// found is divided into stages (spmd/stage_division.h), with the reductions of gradients where they
// hide best, and simulated.
#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>

#include "bounds/compute_bound.h"
#include "cluster/resources.h"
#include "core/error.h"
#include "cost/joined.h"
#include "cost/overlap.h"
#include "planner/batch_step.h"
#include "planner/engines.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"
#include "solver/order.h"
#include "spmd/build.h"
#include "spmd/parts_search.h"
#include "spmd/recompute.h"
#include "spmd/stage_division.h"

namespace motley::planner {

namespace {

constexpr int kSearches = 5;       // for one number of parts
constexpr size_t kSmall = 60;      // nodes of problems that are polished
constexpr size_t kPrograms = 6;    // of other engines that are tried as they are
constexpr double kWorthIt = 0.98;  // of the step of another plan: less is not worth it
constexpr double kFirst = 0.5;     // of the time, for the first program
// Of the time in which parts take turns throughout: for some stages of all parts at once.
constexpr double kWorthWhole = 0.999;

// Computation takes 2 w of its time, communication 2 (1 - w).
Cluster weighed(const Cluster& cluster, double w) {
  Cluster result = cluster;
  const double compute = 2 * w, comm = 2 * (1 - w);
  for (DeviceType& type : result.types) slow_down(&type, compute);
  for (Group& group : result.groups) {
    group.link.bandwidth /= comm;
    group.link.latency *= comm;
    group.uplink /= comm;
    for (CollectiveRate& rate : group.measured) {
      rate.bandwidth /= comm;
      rate.latency *= comm;
      rate.least *= comm;
    }
  }
  return result;
}

class DuplexSearch {
 public:
  DuplexSearch(const PlanOptions& options, const Cluster& cluster, const GraphOf& graph_of,
               Seconds known)
      : options_(options),
        cluster_(cluster),
        step_(step_of(options, graph_of)),
        reductions_(reduce::reductions_of_all(cluster)),
        model_(cluster, reductions_),
        best_(options.duplex > 0 ? std::numeric_limits<Seconds>::infinity() : kWorthIt * known) {
    result_.engine = "duplex";
    result_.record = options.record;
    result_.reason = "no program in parts is faster";
  }

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    try {
      if (step_->theory().segments() > 1)
        result_.reason = "a step of several segments is not taken in parts";
      else if (cluster_.size() == 1 && options_.duplex == 0)
        result_.reason = "one device does not communicate";
      else if (options_.duplex > 0)
        search(options_.duplex);
      else
        search_parts();
    } catch (const TimeIsUp&) {
      if (result_.candidates.empty()) result_.reason = kNoTime;
    } catch (const UserError& error) {
      if (options_.duplex > 0) throw;
      result_.reason = error.what();
      result_.refused = true;
    }
    if (!best_program_.steps.empty()) finish();
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(result_);
  }

  // The same program as one part: no other is looked for.
  EngineResult overlap(const Plan& known) {
    try {
      const std::string where = "--duplex 1";
      take_parts({options_.batch}, where);
      Seconds compute = 0, comm = 0;
      evaluate(step_->theory(), known, where, &compute, &comm);
    } catch (const TimeIsUp&) {
    } catch (const UserError& error) {
      result_.reason = error.what();
    }
    if (!best_program_.steps.empty()) finish();
    return std::move(result_);
  }

 private:
  void take_parts(const std::vector<int64_t>& samples, const std::string& where) {
    plan_ = std::make_unique<Plan>();
    seen_.clear();
    take_step(step_, plan_.get());
    plan_->duplex = duplex_of(*plan_->theory, samples, where);
  }

  // Two parts, and one.
  void search_parts() {
    try {
      search(2);
    } catch (const UserError& error) {
      result_.reason = error.what();
    }
    std::unique_ptr<Plan> two = std::move(plan_);
    const Program program = best_program_;
    const Seconds step = best_;
    // Also where time runs out meanwhile, program and parts belong together.
    const auto keep_the_better = [&] {
      if (best_ < step) return;
      plan_ = std::move(two);
      best_program_ = program;
    };
    try {
      search(1);
    } catch (...) {
      keep_the_better();
      throw;
    }
    keep_the_better();
  }

  void search(int parts) {
    if (parts > options_.batch)
      throw user_error("plan", "--duplex {}: a batch of {} has no {} parts; give fewer", parts,
                       options_.batch, parts);
    const std::vector<int64_t> samples = even_parts(options_.batch, parts);
    const std::string where = fmt::format("--duplex {}", parts);
    take_parts(samples, where);
    const Graph& graph = plan_->duplex->first->graph;
    const auto part = std::make_shared<const BatchStep>(graph, samples[0]);
    if (bounds::compute_bound(step_->theory(), model_) >= best_) return;
    double low = 0, high = 1, w = 0.5;
    for (int i = 0; i < kSearches; ++i) {
      options_.limits.deadline.check();
      Seconds compute = 0, comm = 0;
      if (!attempt(part, samples, w, where, &compute, &comm)) return;
      // The longer of the two limits the step.
      (compute > comm ? low : high) = w;
      const double next = (low + high) / 2;
      if (std::abs(compute - comm) < 0.02 * std::max(compute, comm) || next < 0.05 || next > 0.95)
        break;
      w = next;
    }
    if (parts > 1 && options_.strategy.empty() && !best_program_.steps.empty())
      polish(part->theory(), where);
  }

  // At the shares of the best program so far, programs at more prices, and changed node by node.
  void polish(const Theory& part, const std::string& where) {
    const Shares shares(best_ratios_);
    const Fractions fractions(cluster_, shares);
    spmd::ProblemBuilder builder(part, model_, options_.optimizer);
    builder.price(fractions, plan_->duplex->parts());
    spmd::PartsSearch search;
    search.parts = plan_->duplex->parts();
    for (const DeviceType& type : cluster_.types) search.interference.push_back(type.interference);
    search.limits = options_.limits;
    const bool small = builder.problem().nodes.size() <= kSmall;
    search.weights = small ? 7 : 3;
    search.polish = small ? 2000 : 0;
    const spmd::PartsProgram found =
        spmd::search_in_parts(builder.problem(), solver::make_order(builder.problem()), search);
    ++result_.planned;
    if (found.solution.option.empty()) return;
    Plan plan;
    plan.ratios = best_ratios_;
    plan.program = builder.program(found.solution);
    Seconds compute = 0, comm = 0;
    evaluate(part, plan, where, &compute, &comm);
  }

  // Whether there is a program. *compute, *comm: of its step, all parts.
  bool attempt(const std::shared_ptr<const BatchStep>& part, const std::vector<int64_t>& samples,
               double w, const std::string& where, Seconds* compute, Seconds* comm) {
    Cluster prices = weighed(cluster_, w);
    bool hurried = true;
    for (int again = 0; again < 3; ++again) {
      ProgramRequest request;
      request.model = options_.model;
      request.batch = samples[0];
      request.baselines = request.parts = false;
      request.reductions = reduce::reductions_of_all;
      request.strategy = options_.strategy;
      request.alternation.optimizer = options_.optimizer;
      request.alternation.memory_limit = options_.memory_limit;
      request.alternation.recompute = options_.recompute;
      request.alternation.ratios = options_.ratios;
      request.alternation.limits = options_.limits;
      // What it has by then is divided, and a plan is there.
      hurried = hurried && best_program_.steps.empty();
      if (hurried) request.alternation.limits.deadline = options_.limits.deadline.part(kFirst);
      request.alternation.certify_work = 1e-9;
      request.alternation.sizes = false;  // they are chosen in the end
      ProgramPlanner planner(part, prices, request);
      ProgramResult found = planner.run();
      ++result_.planned;
      result_.states += found.states;
      if (!found.feasible && hurried && found.reason == kNoTime) {
        options_.limits.deadline.check();
        hurried = false;
        continue;
      }
      if (!found.feasible) {
        if (best_program_.steps.empty()) result_.reason = found.reason;
        return false;
      }
      const Bytes lacking = evaluate(part->theory(), found.plan, where, compute, comm);
      if (lacking <= 0) return true;
      // Other parts hold activations too.
      for (DeviceType& type : prices.types) type.memory -= lacking;
      for (const DeviceType& type : prices.types)
        if (type.memory <= 0) return false;
    }
    if (best_program_.steps.empty()) result_.reason = "the activations of all parts do not fit";
    return false;
  }

  // Of a value's pieces.
  Seconds collective(const Theory& part, ValueId v, Collective kind, Placement cut, PieceForm form,
                     const Fractions& fractions) const {
    return model_.collective(kind, model_.moved(kind, part.graph().spec(v)),
                             fractions.profile(part.cut(v, cut), model_.net()), form);
  }

  spmd::DivisionProblem priced(const Duplex& duplex, const Theory& part, const Program& program,
                               const std::vector<StepRole>& roles, const Fractions& fractions,
                               Seconds* compute, Seconds* comm) const {
    spmd::DivisionProblem problem;
    problem.parts = duplex.parts();
    problem.whole = duplex.parts() > 1;
    for (const DeviceType& type : cluster_.types) problem.interference.push_back(type.interference);
    std::vector<Seconds> busy(cluster_.types.size(), 0);
    *comm = 0;
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const Step& step = program.steps[i];
      spmd::DividedStep& priced = problem.steps.emplace_back();
      const NodeId node = step.is_compute() ? step.node : part.graph().value(step.value).producer;
      priced.once = duplex.shared[node.index];
      const double times = priced.once || roles[i].late ? 1 : problem.parts;
      if (step.is_compute()) {
        const Triple& triple = part.triples(step.node)[step.triple];
        const Work work = work_of(part, step.node, triple);
        const Seconds inside = triple.collectives.empty()
                                   ? 0
                                   : inner_seconds(part, step.node, triple, model_, fractions);
        *comm += times * inside;
        if (work.free && inside == 0) continue;
        const std::vector<double>& f = fractions.by_type(work.cut);
        const Duplex::Joining& joining = duplex.joining[node.index];
        std::optional<JoinedWork> joined;
        if (may_join(joining, triple))
          joined.emplace(part, step.node, triple, joining, problem.parts);
        for (int t = 0; t < model_.types(); ++t) {
          const Seconds seconds = work.free ? 0 : model_.compute(t, work, f[t]);
          priced.compute.push_back(seconds + inside);
          busy[t] += times * seconds;
          if (joined)
            priced.all.push_back(
                joined->seconds(model_, t, [&](Cut cut) { return fractions.by_type(cut)[t]; }));
        }
      } else if (!moves_nothing(step.kind)) {
        const Placement cut = step.from.is_shard() ? step.from : step.to;
        const Seconds seconds = collective(part, step.value, step.kind, cut, step.form, fractions);
        *comm += times * seconds;
        if (!roles[i].communicates) continue;
        priced.comm = seconds;
        priced.made = roles[i].made;
        priced.reader = roles[i].first_reader;
      }
    }
    *compute = *std::max_element(busy.begin(), busy.end());
    return problem;
  }

  // Bytes of gradients that travel while half-stages compute longer than they communicate.
  std::vector<double> slack_of(const spmd::DivisionProblem& problem,
                               const std::vector<int>& begin) const {
    const int stages = static_cast<int>(begin.size()), n = static_cast<int>(problem.steps.size());
    std::vector<Seconds> compute(stages, 0), comm(stages, 0);
    auto stage_of = [&](int step) {
      return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), step) - begin.begin()) -
             1;
    };
    for (int i = 0; i < n; ++i) {
      const spmd::DividedStep& step = problem.steps[i];
      if (!step.compute.empty())
        compute[stage_of(i)] += *std::max_element(step.compute.begin(), step.compute.end());
      if (step.comm > 0) comm[stage_of(std::min(step.reader, n - 1))] += step.comm;
    }
    constexpr Bytes many = 64 << 20;
    const double seconds_per_byte = model_.net().all_reduce(many) / many;
    std::vector<double> bytes;
    for (int s = 0; s < stages; ++s)
      for (int p = 0; p < problem.parts; ++p) {
        const Seconds next = p + 1 < problem.parts ? comm[s] : s + 1 < stages ? comm[s + 1] : 0;
        bytes.push_back(std::max(0.0, compute[s] - next) / std::max(seconds_per_byte, 1e-30));
      }
    return bytes;
  }

  static std::vector<int> stages_of_equal_time(const spmd::DivisionProblem& problem, int stages) {
    Seconds all = 0, sum = 0;
    auto of = [](const spmd::DividedStep& step) {
      return step.compute.empty() ? 0 : *std::max_element(step.compute.begin(), step.compute.end());
    };
    for (const spmd::DividedStep& step : problem.steps) all += of(step);
    std::vector<int> begin = {0};
    for (size_t i = 0; i < problem.steps.size(); ++i) {
      if (sum >= all * static_cast<double>(begin.size()) / stages &&
          begin.back() < static_cast<int>(i))
        begin.push_back(static_cast<int>(i));
      sum += of(problem.steps[i]);
    }
    return begin;
  }

  // Makes a plan of a program of one part, and of others that cost the same and may hide more.
  // Returns the bytes that the fullest device lacks.
  Bytes evaluate(const Theory& part, const Plan& found, const std::string& where, Seconds* compute,
                 Seconds* comm) {
    // Other prices often find the same program.
    const auto known = std::find_if(seen_.begin(), seen_.end(), [&](const Seen& s) {
      return s.ratios == found.ratios && s.program == found.program;
    });
    if (known != seen_.end()) {
      *compute = known->compute, *comm = known->comm;
      return known->lacking;
    }
    const Program whole = spmd::once(found.program);
    const bool again = whole.steps.size() < found.program.steps.size();
    const Shares shares(found.ratios);
    const Fractions fractions(cluster_, shares);
    const Program pieces =
        spmd::stored_in_pieces(part, whole, [&](ValueId v, Collective kind, Placement cut) {
          // Of small ones several share a message.
          if (kind == Collective::all_reduce &&
              static_cast<Bytes>(part.graph().spec(v).bytes()) < kLargestSizes.alone)
            return 0.0;
          return collective(part, v, kind, cut, PieceForm::padded, fractions);
        });
    Bytes lacking = evaluate(part, found.program, found.ratios, where, compute, comm);
    const auto also = [&](const Program& program) {
      Seconds other_compute = 0, other_comm = 0;
      lacking = std::min(lacking,
                         evaluate(part, program, found.ratios, where, &other_compute, &other_comm));
    };
    if (pieces != whole) also(pieces);
    // What hides costs nothing: parameters gathered again, in the place of layers computed again.
    if (again) also(spmd::gathered_again(part, pieces));
    seen_.push_back({found.program, found.ratios, *compute, *comm, lacking});
    return lacking;
  }

  Bytes evaluate(const Theory& part, const Program& found, const Ratios& ratios,
                 const std::string& where, Seconds* compute, Seconds* comm) {
    const Duplex& duplex = *plan_->duplex;
    plan_->cluster = cluster_;
    plan_->optimizer = options_.optimizer;
    plan_->ratios = ratios;
    plan_->reductions = reductions_;
    const Shares shares(ratios);
    const Fractions fractions(cluster_, shares);
    Program program = pieces_first(part, found);
    choose_forms(part, &program, model_, fractions);
    const std::vector<StepRole> roles = roles_of(duplex, part, program);
    const spmd::DivisionProblem problem =
        priced(duplex, part, program, roles, fractions, compute, comm);
    std::vector<StageDivision> divisions;
    if (problem.parts == 1) {
      for (const int stages : {4, 16, 64, 128})
        for (const int ahead : {1, 2}) {
          divisions.push_back({stages_of_equal_time(problem, stages), Reduce::ready, ahead, {}});
          if (divisions.back().begin.size() < static_cast<size_t>(stages)) break;
        }
    } else {
      spmd::DivisionProblem turns = problem;
      turns.whole = false;
      const spmd::Divided in_turn = spmd::divide(turns);
      for (const int ahead : {0, 1})
        for (const Reduce reduce : {Reduce::ready, Reduce::slack, Reduce::end})
          divisions.push_back({in_turn.begin, reduce, ahead, slack_of(problem, in_turn.begin), {}});
      // Copies of rows are not in that formula; they are simulated.
      const spmd::Divided mixed = spmd::divide(problem);
      if (mixed.seconds < kWorthWhole * in_turn.seconds)
        divisions.push_back({mixed.begin, Reduce::ready, 0, slack_of(problem, mixed.begin),
                             mixed.whole, in_turn.begin});
    }
    Bytes lacking = std::numeric_limits<Bytes>::infinity();
    size_t best = 0;
    for (size_t i = 0; i < divisions.size(); ++i) {
      StageDivision& division = divisions[i];
      if (!best_program_.steps.empty()) options_.limits.deadline.check();
      if (!division.whole.empty())
        division.reduce = divisions[best].reduce, division.ahead = divisions[best].ahead;
      bool better = false;
      lacking = std::min(lacking,
                         offer(mirrored(duplex, part, program, division, where), best_, &better));
      if (!better) continue;
      best = i;
      note_ = fmt::format("{} part{} in {} stages, {} of computation and {} of communication",
                          duplex.parts(), duplex.parts() == 1 ? "" : "s", division.begin.size(),
                          format_seconds(*compute), format_seconds(*comm));
    }
    return lacking;
  }

  // Keeps a program that takes less than `below`. Returns the bytes that the fullest device lacks.
  Bytes offer(Program program, Seconds below, bool* better) {
    plan_->program = std::move(program);
    const Shares shares(plan_->ratios);
    const std::vector<Bytes> peak =
        memory_of(plan_->running(), plan_->program, Fractions(cluster_, shares), model_.types(),
                  options_.optimizer)
            .peak;
    Bytes over = 0;
    for (int t = 0; t < model_.types() && options_.memory_limit; ++t)
      over = std::max(over, peak[t] - cluster_.types[t].memory);
    if (over > 0) return over;
    const Seconds seconds = simulate(*plan_, Spans::none, options_.limits.deadline).step;
    // What runs again in the backward pass may not be sent during the forward pass.
    *better = seconds < below && motley::check(plan_->running(), plan_->program).empty();
    if (!*better) return over;
    best_ = seconds;
    best_program_ = plan_->program;
    best_ratios_ = plan_->ratios;
    peak_ = peak;
    return over;
  }

  // The best program with its gradients in messages of other sizes.
  void choose_sizes() {
    if (std::none_of(best_program_.steps.begin(), best_program_.steps.end(), [](const Step& s) {
          return !s.is_compute() && s.kind == Collective::all_reduce;
        }))
      return;
    plan_->ratios = best_ratios_;
    const std::vector<Step> steps = best_program_.steps;
    try {
      for (const GradientSizes& sizes : usual_sizes()) {
        bool better = false;
        offer({steps, sizes}, (1 - kWorthOtherSizes) * best_, &better);
      }
    } catch (const TimeIsUp&) {
    }
  }

  void finish() {
    choose_sizes();
    plan_->engine = "duplex";
    plan_->model = options_.model;
    plan_->batch = options_.batch;
    plan_->program = std::move(best_program_);
    plan_->ratios = std::move(best_ratios_);
    plan_->predicted_step_s = best_;
    for (int d = 0; d < cluster_.size(); ++d)
      plan_->peak_memory_bytes.push_back(peak_[cluster_.devices[d].type]);
    result_.add(std::move(plan_), note_);
  }

  struct Seen {  // with the parts of now
    Program program;
    Ratios ratios;
    Seconds compute, comm;
    Bytes lacking;
  };

  const PlanOptions& options_;
  const Cluster& cluster_;
  std::shared_ptr<BatchStep> step_;
  const std::vector<ReductionProgram> reductions_;
  const CostModel model_;
  Seconds best_;                // what a plan has to be faster than
  std::unique_ptr<Plan> plan_;  // with the program that is looked at
  std::vector<Seen> seen_;      // what has been evaluated
  Program best_program_;        // no steps: none is faster than what is known
  Ratios best_ratios_;
  std::vector<Bytes> peak_;  // [type]
  std::string note_;
  EngineResult result_;
};

}  // namespace

std::unique_ptr<Plan> overlapped(const PlanOptions& options, const Plan& plan, Seconds known) {
  if (plan.pipeline || plan.duplex || plan.theory->segments() > 1 || plan.cluster.size() < 2 ||
      !backend_of(plan.cluster).hides)
    return nullptr;
  EngineResult found = DuplexSearch(options, plan.cluster, {}, known).overlap(plan);
  return found.candidates.empty() ? nullptr : std::move(found.candidates[0].plan);
}

EngineResult plan_duplex(const PlanOptions& options, const Cluster& cluster,
                         const GraphOf& graph_of, const FoundBefore& known) {
  Candidate best;
  Seconds step = known.step;
  for (size_t i = 0; i < known.programs.size() && i < kPrograms && options.duplex == 0; ++i) {
    const Candidate& candidate = *known.programs[i];
    if (options.limits.deadline.over()) break;
    std::unique_ptr<Plan> found = overlapped(options, *candidate.plan, step);
    if (!found) continue;
    step = found->predicted_step_s;
    best.plan = std::move(found);
    best.note = fmt::format("the program of {} plan", candidate.plan->engine);
    best.devices = candidate.devices;
  }
  EngineResult searched = DuplexSearch(options, cluster, graph_of, step).run();
  if (!best.plan || !searched.candidates.empty()) return searched;
  searched.add(std::move(best.plan), best.note);
  searched.candidates[0].devices = best.devices;
  searched.reason.clear();
  return searched;
}

}  // namespace motley::planner

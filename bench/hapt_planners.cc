#include "hapt_planners.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "pipeline/schedules.h"

namespace motley::pipeline::hapt {
namespace {

std::vector<double> speeds(const Case& c) {
  std::vector<double> s;
  for (const Site& site : c.sites) s.push_back(site.hardware.peak);
  return s;
}

std::string describe(const PipelinePlan& plan, const Case& c) {
  std::string text =
      fmt::format("{}x {} of {}:", plan.pipelines, plan.micro_batches, plan.micro_batch);
  for (const Stage& s : plan.stages)
    text += fmt::format(" {}({},{})x{}", c.sites[s.mesh.cluster].hardware.name.substr(0, 1),
                        s.mesh.nodes, s.mesh.devices, s.last - s.first + 1);
  return text;
}

// Runs a plan made on another view under the true costs; infeasible if memory forbids it.
Outcome rerun(const Case& c, const SearchProblem& truth, const PipelinePlan& plan,
              const char* schedule, bool blocking) {
  std::vector<Stage> stages = plan.stages;
  for (Stage& s : stages) {
    s.profile = truth.stage_cost({s.first, s.last, s.mesh, plan.micro_batch, plan.pipelines});
    if (!s.profile.feasible) return {};
  }
  PipelinePlan real =
      evaluate(truth, stages, plan.micro_batch, plan.micro_batches, plan.pipelines, true);
  Pipeline pipeline = real.pipeline;
  if (blocking)
    for (size_t i = 0; i < pipeline.links.size(); ++i) {
      pipeline.stages[i].forward += pipeline.links[i].forward;
      pipeline.stages[i + 1].backward += pipeline.links[i].backward;
    }
  ScheduleRun run = run_schedule(*find_schedule(schedule), pipeline, plan.micro_batches);
  return {run.timeline.makespan, load_balance(real, speeds(c)), describe(real, c), schedule,
          real.pipeline};
}

Outcome best_of_pool(const Case& c, const View& view, const View& true_view, const char* schedule,
                     bool blocking) {
  SearchProblem truth = problem_of(c, true_view), seen = problem_of(c, view);
  Outcome best;
  for (int64_t micro_batch : kMicroBatches) {
    SearchOptions o;
    o.micro_batches = {micro_batch};
    o.recompute = true;
    SearchResult r = search(seen, o);
    if (!r.feasible) continue;
    for (const PipelinePlan& plan : r.pool) {
      Outcome out = rerun(c, truth, plan, schedule, blocking);
      if (out.step < best.step) best = out;
    }
  }
  return best;
}

}  // namespace

Outcome run_motley(const Case& c, std::vector<int> first, bool blind, bool inside_nodes) {
  View view{std::move(first), c.sites, c.cross, blind};
  SearchProblem p = problem_of(c, view);
  if (inside_nodes)
    p.stage_cost = [all = p.stage_cost](const StageQuery& q) {
      StageProfile profile = all(q);
      profile.feasible = profile.feasible && q.mesh.nodes == 1;
      return profile;
    };
  SearchOptions o;
  o.micro_batches = kMicroBatches;
  o.recompute = true;
  SearchResult r = search(p, o);
  Outcome out;
  if (!r.feasible) return out;
  PipelinePlan plan = r.best;
  if (blind) {
    view.links_are_free = false;
    SearchProblem truth = problem_of(c, view);
    plan = evaluate(truth, plan.stages, plan.micro_batch, plan.micro_batches, plan.pipelines, true);
  }
  ScheduleRun run = run_best(plan.pipeline, plan.micro_batches);
  out = {run.timeline.makespan, load_balance(plan, speeds(c)), describe(plan, c), run.schedule.kind,
         plan.pipeline};
  return out;
}

// Equal blocks per stage; stages of tp devices, dp of them; sites one after another.
Outcome run_megatron(const Case& c) {
  Outcome best;
  std::vector<Piece> pieces = pieces_of(c.model);
  int devices = c.sites[0].devices, total_nodes = 0;
  for (const Site& s : c.sites) {
    if (s.devices != devices) return best;
    total_nodes += s.nodes;
  }
  int total = total_nodes * devices;
  for (int tp = 1; tp <= devices; tp *= 2)
    for (int dp = 1; dp * tp <= total; ++dp) {
      if (total % (tp * dp) != 0) continue;
      int stages = total / (tp * dp);
      if (c.model.blocks % stages != 0) continue;
      for (int64_t micro_batch : {1, 2, 4, 8}) {
        if (c.batch % (micro_batch * dp) != 0) continue;
        int count = static_cast<int>(c.batch / (micro_batch * dp));
        for (bool recompute : {false, true}) {
          Pipeline pipeline;
          int device = 0, previous = -1;
          bool fits = true;
          Seconds reduce = 0;
          for (int i = 0; i < stages && fits; ++i, device += tp * dp) {
            // The slowest site that a stage touches sets its speed.
            int site = 0, end = 0;
            while (end += c.sites[site].nodes * c.sites[site].devices, end <= device + tp * dp - 1)
              ++site;
            int start_site = 0, start_end = 0;
            while (start_end += c.sites[start_site].nodes * c.sites[start_site].devices,
                   start_end <= device)
              ++start_site;
            bool straddles = start_site != site;
            int from = i == 0 ? 0 : 1 + 3 * (c.model.blocks / stages) * i;
            int to = i + 1 == stages ? static_cast<int>(pieces.size())
                                     : 1 + 3 * (c.model.blocks / stages) * (i + 1);
            Seconds worst = -1;
            StageProfile slowest;
            double parameters = 0;
            for (int k = from; k < to; ++k) parameters += pieces[k].parameters;
            for (int s : {start_site, site}) {
              StageProfile p = gpt_cost(pieces, from, to, c.sites[s], {0, 1, tp, recompute},
                                        micro_batch, 1e18, c.model.hidden, c.model.sequence);
              fits = fits && p.feasible;
              if (p.forward + p.backward > worst) {
                worst = p.forward + p.backward;
                slowest = p;
              }
              double left = c.sites[s].hardware.memory - slowest.state;
              pipeline.in_flight_limit.resize(i + 1, 1 << 30);
              if (fits && slowest.activation > 0)
                pipeline.in_flight_limit[i] = std::min<int>(
                    pipeline.in_flight_limit[i],
                    std::max(1, static_cast<int>(std::min(1e9, left / slowest.activation))));
            }
            double bandwidth = straddles ? c.cross / (tp) : c.sites[site].hardware.across / tp;
            if (dp > 1)
              reduce = std::max(reduce, 2.0 * (dp - 1) / dp * 2 * parameters / tp / bandwidth);
            pipeline.stages.push_back({slowest.forward, slowest.backward});
            if (i > 0) {
              Bytes bytes = pieces[from].carried * static_cast<double>(micro_batch) * dp;
              double link =
                  previous != start_site || straddles ? c.cross : c.sites[site].hardware.across;
              pipeline.links.push_back({bytes / link, bytes / link});
            }
            previous = site;
          }
          if (!fits) continue;
          // 1F1B needs its counts; less memory than that is no plan of Megatron's.
          std::vector<int> own = find_schedule("1f1b")->counts(pipeline);
          if (within_limits(pipeline, own, 1 << 30) != own) continue;
          ScheduleRun run = run_schedule(*find_schedule("1f1b"), pipeline, count);
          Seconds step = run.timeline.makespan + reduce;
          if (step < best.step) {
            double longest = 0, done = 0, possible = 0;
            for (const StageTime& s : pipeline.stages) longest = std::max(longest, s.total());
            int at = 0;
            for (const StageTime& s : pipeline.stages) {
              int site = 0, end = 0;
              while (end += c.sites[site].nodes * c.sites[site].devices, end <= at) ++site;
              done += s.total() * c.sites[site].hardware.peak;
              possible += longest * c.sites[site].hardware.peak;
              at += tp * dp;
            }
            best = {step, done / possible,
                    fmt::format("dp {} tp {} pp {}, {} of {}{}", dp, tp, stages, count, micro_batch,
                                recompute ? ", recomputed" : ""),
                    "1f1b", pipeline};
          }
        }
      }
    }
  return best;
}

Outcome run_alpa(const Case& c) {
  View truth{grouped(pieces_of(c.model), 16), c.sites, c.cross, false};
  View seen = truth;
  double peak = 0, devices = 0;
  Bytes memory = 1e18;
  for (const Site& s : c.sites) {
    peak += s.hardware.peak * s.nodes * s.devices;
    devices += s.nodes * s.devices;
    memory = std::min(memory, s.hardware.memory);
  }
  for (Site& s : seen.sites) {
    s.hardware.peak = peak / devices;
    s.hardware.memory = memory;
  }
  seen.cross = c.sites[0].hardware.across;
  return best_of_pool(c, seen, truth, "eager", false);
}

Outcome run_hexiscale(const Case& c) {
  View view{every_block(c.model), c.sites, c.cross, false};
  return best_of_pool(c, view, view, "1f1b", true);
}

}  // namespace motley::pipeline::hapt

// Planning starts here: from a model and a cluster to the fastest plan that was found, with what it
// was compared with. The program, the Python package and the demo call plan() and nothing else.
//
//   PlanOptions options;
//   options.model = "gpt";
//   options.batch = 64;
//   const PlanReport report = plan(graph_of, cluster, options);
//   save_plan(*report.best().plan, "plan.json");
#pragma once

#include <string>
#include <vector>

#include "planner/engines.h"
#include "planner/options.h"

namespace motley::planner {

struct PlanReport {
  // Best first, by the event simulator; empty: nothing was found that is wanted.
  std::vector<Candidate> candidates;
  std::string reason;  // why there is none
  bool out_of_time = false;
  // Why plans that do not compute the same as one device are not among them; empty: there are none.
  std::string left_out;
  std::vector<EngineResult> engines;  // those that ran; their candidates are above

  const Candidate& best() const { return candidates.front(); }
  // What an engine said; null: it did not run.
  const EngineResult* of(const std::string& engine) const;
  // The model cannot be taken in micro-batches, as every plan that was wanted would take it.
  bool refused() const;
};

// Seconds that planning takes where nobody says: 5 for up to 64 devices and 20,000 operators of a
// step, else 10.
Seconds usual_time_limit(const Cluster& cluster, const Graph& graph);

// Why no plan of any engine fits, if parameters, gradients and optimizer state alone say so, which
// have to be somewhere, once. Empty: they do not, or other plans are asked for. Of a graph without a
// step yet (LookAtParameters) whose parameters all get a gradient unless they are frozen, too.
std::string too_large(const Graph& graph, const Cluster& cluster, const PlanOptions& options);

// The best plan names the others among its alternatives. Throws UserError where the options cannot
// be combined.
PlanReport plan(const GraphOf& graph_of, const Cluster& cluster, const PlanOptions& options);

// What to tell someone for whom there is no plan: one sentence, with what to change. `limit`: of
// planning, such as "10 s".
std::string no_plan(const PlanReport& report, const Cluster& cluster, const PlanOptions& options,
                    const std::string& limit);

}  // namespace motley::planner

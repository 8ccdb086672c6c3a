// The plan: the narrow waist. Every search produces one; the simulator, the runtime, the report and
// the exporters read it.
//
// A plan is whole: it holds the graph it is for, the cluster, the ratios and the program, so that
// nothing else is needed to check, simulate or run it, and one made in an editor is as good as a
// searched one. The file is JSON; docs/plan-file.md describes every field. Reading a file proves
// nothing but its syntax: check() decides whether a plan is sound.
//
// A plan is either one SPMD program on all devices or a pipeline (pipeline.h): then `graph` is that
// of one micro-batch, and ratios and programs are those of its stages.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cluster/cluster.h"
#include "core/file.h"
#include "cost/cost.h"
#include "plan/pipeline.h"
#include "shard/duplex.h"
#include "shard/program.h"

namespace motley {

constexpr int kPlanVersion = 2;  // 1 is read too, unless it has a pipeline

// Why there is no plan of a kind where there may be one.
constexpr const char* kNoTime = "time ran out before a plan was found";

// What a plan was compared with: another candidate of the search, or a baseline.
struct Alternative {
  std::string name;  // engine or baseline
  std::string what;  // of a candidate: its strategy; of an infeasible baseline: why
  bool baseline = false, feasible = true;
  Seconds step_s = 0;  // simulated (candidates), predicted (baselines)
};

struct Plan {
  std::string engine = "spmd";
  std::string model;  // zoo spec or name of a graph file
  int64_t batch = 0;  // global
  Optimizer optimizer = Optimizer::adamw;
  // What the graph computes in (graph/precision.h); f32: the type of its parameters.
  DType precision = DType::f32;
  // 1: pieces that one device holds alone are kept by a second one too (cluster/second_holders.h),
  // so that the loss of any one loses nothing. Of one program on two devices or more.
  int redundancy = 0;
  Cluster cluster;
  Ratios ratios;  // [segment][device] share of every cut factor; sum 1 each. Pipelines: empty
  std::shared_ptr<const Graph> graph;  // the whole batch's step; theory refers to it
  std::shared_ptr<const Theory> theory;
  Program program;                         // pipelines: empty; of `duplex`: of its graph
  std::unique_ptr<PipelinePlan> pipeline;  // null: one SPMD program
  // The batch in parts whose communication hides behind one another's computation (shard/duplex.h);
  // null: whole.
  std::unique_ptr<Duplex> duplex;

  // What all-reduces do instead of the plain collective: over all devices, or those of a stage or
  // of one rank in all replicas, or of all ranks of a stage in all replicas (joint_gradients); of
  // the same devices by ascending `from`.
  std::vector<ReductionProgram> reductions;

  // What the planner predicted. Informative only.
  Seconds predicted_step_s = 0;
  Seconds lower_bound_s = 0;
  std::vector<Bytes> peak_memory_bytes;  // [device]
  std::vector<Alternative> alternatives;

  // Of the graph that the plan was made for; a file whose graph has another was changed since.
  uint64_t graph_fingerprint = 0;

  // What `program` runs.
  const Theory& running() const { return duplex ? *duplex->theory : *theory; }

  void set_graph(Graph g) {
    graph_fingerprint = fingerprint(g);
    graph = std::make_shared<Graph>(std::move(g));
    theory = std::make_shared<Theory>(*graph);
  }
};

Json to_json(const Plan& plan);
// Throws UserError naming `name`, the field, its value and the remedy.
Plan parse_plan(const std::string& text, const std::string& name);
void save_plan(const Plan& plan, const std::string& path, int threads = 1);
Plan load_plan(const std::string& path);

// The independent checker: what is wrong with a plan, empty if it is sound. It trusts no search: it
// derives the theory again and follows the program step by step, and it adds up the memory of every
// device.
std::vector<std::string> check(const Plan& plan, bool memory_limit = true);

// The plan in words: which parameters and activations are cut how, who gets how much, what is
// communicated and why. REQUIRES: check(plan, false) finds nothing.
std::string describe(const Plan& plan);

// What a value is to a reader: "parameters" (or a view of one), "gradients" on their way to the
// optimizer, "activations". `is_gradient`: pure_gradients(graph).
const char* role_of(const Graph& graph, const std::vector<bool>& is_gradient, ValueId value);

}  // namespace motley

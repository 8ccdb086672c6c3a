// What is to be planned, and how: the question that plan() (planner.h) answers.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cluster/profile.h"
#include "cost/cost.h"
#include "graph/graph.h"
#include "planner/record.h"
#include "solver/problem.h"

namespace motley::planner {

// The canonical graph of the model at a number of samples. Throws UserError if there is none. Of
// micro-batches engines derive it from that of the whole batch (batch_step.h). Several threads may
// call it at the same time.
using GraphOf = std::function<Graph(int64_t samples)>;

constexpr int kAutomaticLayers = -1;
constexpr int kBlockLayers = -2;  // the blocks of the model (spmd::blocks_of)

class BatchStep;

// Machines, or equal parts of them, as single devices (HAP section 3), with data parallelism
// inside (engines/virtual.cc).
struct VirtualDevices {
  bool off = false;
  bool automatic = true;  // nothing where machines are joined as well as their devices
  int size = 0;           // devices of a virtual one; 0: all that divide the machines are tried
  bool machine = false;   // the largest such size
  // The step of another engine's plan, seconds: nothing is fitted into memory that takes longer.
  Seconds known = std::numeric_limits<double>::infinity();
  bool forced() const { return !off && !automatic; }
};

// Parts of the model with shares of their own (HAP section 5.2, segments.h).
struct SegmentRequest {
  bool automatic = false;            // by METIS, in more parts as long as that is faster
  int count = 1;                     // by METIS, in so many
  std::vector<std::string> modules;  // by name (segments_by_module in graph/segment.h)
  bool one() const { return !automatic && count == 1 && modules.empty(); }
};

// "auto", "off", "machine" or a number of devices from 2 on. Throws UserError.
VirtualDevices parse_virtual_devices(const std::string& text);
// "auto", a number or names of modules, separated by commas. Throws UserError.
SegmentRequest parse_segments(const std::string& text);
// "auto", "off" or a number from 1 to kMaxParts. Throws UserError.
int parse_duplex(const std::string& text);
// "auto", a number, or empty: the finest. Throws UserError.
int parse_layers(const std::string& text);

struct PlanOptions {
  std::string model;  // what the plan records
  int64_t batch = 0;  // global, samples

  std::string engine = "auto";  // one of engine_names() (engines.h)
  std::string target;           // plans that this framework can say alone (targets.h); empty: all
  std::string strategy;         // a baseline (strategies()) in the place of a search; empty
  std::string fix;              // choices of the grid, "pp=4,dp=4" (grid::parse_fixed); empty: none
  VirtualDevices virtual_devices;
  SegmentRequest segments;
  std::vector<double> ratios;  // [device] shares of one program; empty: searched
  bool all_devices = false;    // one program uses every device, also where fewer are faster
  bool baselines = true;       // what the usual strategies take is predicted too

  // Parts of the batch, side by side (shard/duplex.h): 0: two where that is faster; -1: never;
  // else so many, and no other plan.
  int duplex = 0;

  Optimizer optimizer = Optimizer::adamw;
  int redundancy = 0;            // 1: one program that keeps what is cut twice (Plan::redundancy)
  DType precision = DType::f32;  // bf16, f16: computes in that; f32: in the graph's own type
  bool memory_limit = true;      // device memory is a hard limit
  bool recompute = true;         // activations may be computed again where memory is short
  std::vector<int64_t> micro_batches;  // samples, those that may be tried; empty: all
  // Pieces that the pipeline engine cuts the model into, about; 0: the finest, up to 160;
  // kAutomaticLayers: finer until plans stop getting better.
  int layers = 0;
  std::vector<ProfiledStage> measured;  // layers whose costs on one device are not the model's

  solver::Limits limits{.max_states = 2000};  // deadline, seed, and states of each program search
  bool certify = false;  // lower bounds may take as long as they need, not a part of the search
  // Of the batch, for all engines; null: each makes its own.
  std::shared_ptr<BatchStep> step;
  // Told of plans as they are found.
  std::shared_ptr<Record> record = std::make_shared<Record>();
  int threads = 0;  // that plan layers and stages; 0: one per core. The plan does not depend on it.
};

}  // namespace motley::planner

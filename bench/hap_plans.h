// The benchmarks of the HAP paper, the machines that they run on, and plans for them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cluster/cluster.h"
#include "graph/graph.h"
#include "planner/program_plan.h"

namespace motley::hap {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Benchmark {
  const char* name;
  const char* spec;
  int64_t batch;                // of one device
  int64_t experts;              // of one device; 0: none
  double constant, per_device;  // parameters in units of 2^20, Table 1
};

// CIFAR-10 as the paper's VGG19 may have read it: enlarged to 224, or as it is.
constexpr Benchmark kBenchmarks[] = {
    {"VGG19", "vgg19", 64, 0, 133, 0},
    {"VGG19-32px", "vgg19:image=32", 64, 0, 133, 0},
    {"ViT", "vit", 64, 0, 54, 0},
    {"BERT-Base", "bert", 64, 0, 102, 0},
    {"BERT-MoE", "bert-moe", 32, 2, 84, 36},
};

std::string spec_of(const Benchmark& b, int devices);

// The first `each` devices of every machine of the named type; all types if empty.
Cluster some_of(const Cluster& all, int each, const std::string& type = {}, int machines = 1 << 30);

struct Outcome {
  bool feasible = false;
  Seconds step = 0;           // simulated
  Seconds predicted = 0;      // by the cost model
  double gap = 0, apart = 0;  // of the certificate; of the one with nothing hidden, if looked at
  int devices = 0;            // in use
  bool recomputes = false;    // activations, for want of memory
  std::string reason;
  std::vector<planner::StrategyTime> baselines;
  planner::ProgramResult result;
};

Outcome run(const Graph& graph, const Cluster& cluster, planner::ProgramRequest request);

constexpr double kGap = 0.01;  // of what is certified

// In time with overlap or, where that bound is loose, in HAP's own model.
bool certified(const Outcome& o);

// Without baselines and certificate.
planner::ProgramRequest request_of(const std::string& model, int64_t batch);

}  // namespace motley::hap

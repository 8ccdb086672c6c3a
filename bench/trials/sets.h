// The sets of public trials: models, clusters and what was measured on them, and which numbers of a
// calibration are fitted to it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "grid/estimate.h"

namespace motley::grid::trials {

struct Trial {
  std::string name;
  int model = 0, cluster = 0;
  Strategy strategy;
  double measured = 0;  // 0: the trial failed
  double memory = 0;    // measured bytes, 0: unknown
  double other = 0;     // the paper's own prediction, 0: unknown
  bool odd = false;     // counted apart
};

// What a parameter is a number of.
struct System {
  Cluster cluster;
  Calibration calibration;
};

struct Parameter {
  std::string name;       // "A100-80GB flops", "NVSwitch-A100 share", "DeepSpeed message_launch"
  double start, freedom;  // prior: log-normal around start, the catalogue's number
  std::function<void(System*, double)> set;
};

// A forward pass of one layer, timed alone on one node.
struct Profile {
  std::string type;
  int model = 0, layer = 0, tp = 1;
  double measured = 0;
};

struct Set {
  std::string name;
  std::vector<Model> models;
  std::vector<Cluster> clusters;
  std::vector<Trial> trials;
  std::vector<Parameter> parameters;
  std::vector<Profile> profiles;  // calibrated with, never judged
  LayerTimes times;
};

// AMP's trials of GPT-2 on a cluster of its (amp-t4x16 or amp-mixed), or of TransGAN (amp-v100x16, of
// which the repository has the profiles of layers but no trials).
Set amp(const std::string& cluster);

// Nodes of 8 A100, 800 Gbit/s between them; Megatron-DeepSpeed, activation checkpointing. `table`:
// "single" (node) or "multi".
Set vtrain(const std::string& table);

// OPT-350 on nodes of 4 GH200 with tensor parallelism 4; layer times are measured, so that only the
// network, the optimizer and what a step costs the host are fitted.
Set sailor();

}  // namespace motley::grid::trials

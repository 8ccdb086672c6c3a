// A synthetic synthesis problem with the shape of a transformer training step: what the search
// meets in earnest, at any depth, without a capture.
//
// Per layer 45 compute nodes, forward and backward: layer norms, q/k/v/output projections with
// biases, attention with heads and a mask that all layers share, a gelu MLP, residuals, and all
// gradients; and 16 parameters, each a node that makes (value, stored token) and an update node
// that takes (token, gradient) in one form. Around the layers: token and position embedding, final
// layer norm, vocabulary projection and cross-entropy.
//
// Costs come from tensor sizes: compute by roofline per device type under sharding ratios,
// conversions and collectives by latency and bandwidth.
#pragma once

#include <vector>

#include "solver/problem.h"

namespace motley::solver {

struct GptShape {
  int layers = 2;
  double batch = 32, sequence = 512, hidden = 1024, vocabulary = 32000, heads = 16;
  bool tied = false;                    // the vocabulary projection uses the token embedding
  std::vector<double> flops = {60e12};  // [type] per device
  std::vector<int> devices = {8};       // [type]
  double bandwidth = 10e9, latency = 30e-6;
};

Problem gpt_problem(const GptShape& shape);

}  // namespace motley::solver

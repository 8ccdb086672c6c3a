// What grid searches are tried on and compared with: transformers by formula, strategies without a
// search, and simple searches.
//
// A chain of transformer layers is described by transformer_model(): embedding, blocks, and a head
// of final normalisation and output projection. Its numbers, with h hidden, s tokens, v vocabulary,
// a heads, f feed-forward width (4h):
//
//   block       products   2 s (4 h^2 + 2 h f) + 4 s^2 h flops
//               parameters 4 h^2 + 2 h f + f + 3 h cut, 6 h whole
//   embedding   parameters v h cut, s h whole;  head  products 2 s h v
//   saved       what PyTorch keeps of an unfused fp16 block (Korthikanti et al. 2022):
//               s h (10 + 24/t) + 5 a s^2 / t bytes; scaled to other element sizes
//   traffic     reads and writes of the unfused elementwise operators: `score_passes` passes over
//               the a s^2 attention scores, `hidden_passes` over s h
#pragma once

#include <string>
#include <vector>

#include "grid/search.h"

namespace motley::grid {

struct TransformerShape {
  int layers = 24, hidden = 1024, heads = 16, ffn = 0;  // ffn 0: 4 hidden
  int64_t seq = 1024, vocab = 50257;
  bool tied = true;
  double score_passes = 20;   // over the attention scores, reads and writes counted apart
  double hidden_passes = 60;  // over the hidden states, of which a third is whole
  // Of a block: two normalisations, six products, mask, softmax, dropout and a transposition, bias and
  // GeLU, twice bias, dropout and addition.
  double kernels = 20;
  double unfused = 0;  // of those more without a fused softmax
  int experts = 0;     // > 0: every block's feed-forward is this many experts, top_k used
  int top_k = 2;
};
Model transformer_model(const std::string& name, const TransformerShape& shape,
                        const Precision& precision);

// One strategy from fixed choices; what is not fixed is as in Fixed's text form. Layers are
// assigned exactly unless fixed; devices in file order unless fixed.
Strategy complete(const Estimator& estimator, const SearchOptions& options);

struct Baseline {
  std::string name;
  bool feasible = false;
  std::string reason;
  Candidate candidate;
};
// "megatron": tp within a node, least tp * pp that fits, best micro-batch, uniform layers.
// "random": the best of 50 random strategies. "uniform layers", "uniform parameters": `best` with
// those splits.
std::vector<Baseline> baselines(const Estimator& estimator, const SearchOptions& options,
                                const Candidate& best);

// A named baseline of layer assignment: parameters shared out evenly (greedily, at the cut nearest
// each quantile).
std::vector<int> uniform_parameters(const std::vector<double>& parameters, int stages);

}  // namespace motley::grid

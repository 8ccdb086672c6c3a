// The transformer block that the language and vision models share.
//
// Attention keeps heads a dimension of its own between a view and its inverse ([batch, seq, hidden]
// -> [batch, seq, heads, hidden/heads] and back), and queries, keys and values are three equal
// splits of one projection [3, heads, hidden/heads], so that a cut over heads is visible in the
// shapes alone.
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <string>
#include <vector>

#include "zoo/experts.h"
#include "zoo/module.h"

namespace motley {

struct BlockOptions {
  int64_t hidden = 0;
  int64_t heads = 0;
  double dropout = 0;
  bool pre_norm = true;  // normalise before each half (GPT-2, ViT) or after it (BERT)
  int64_t experts = 0;   // of the feed-forward half; 0: dense
  int64_t top = 2;       // experts of a token
};

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const BlockOptions& options);
  // x: [batch, seq, hidden]; mask: undefined, or added to the scores [batch, heads, seq, seq].
  // With experts, adds their balance loss to *balance.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask, at::Tensor* balance = nullptr);

 private:
  at::Tensor attention(const at::Tensor& x, const at::Tensor& mask);
  at::Tensor feed_forward(const at::Tensor& x, at::Tensor* balance);

  BlockOptions options_;
  torch::nn::LayerNorm norm1_, norm2_;
  torch::nn::Linear qkv_, projection_, up_{nullptr}, down_{nullptr};
  Experts experts_{nullptr};
};
TORCH_MODULE(Block);

// Draws an embedding table [rows, columns] from N(0, 0.02^2), as GPT-2 and BERT do.
at::Tensor embedding_table(int64_t rows, int64_t columns);

}  // namespace motley

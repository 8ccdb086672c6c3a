// What transformers are made of, and their training steps on a tape. The families of
// huggingface.cc fill in one of these from their configs.
#pragma once

#include <string>

#include "graph/graph.h"

namespace motley::readers {

enum class NormKind {
  layer,       // weight and bias
  layer_thin,  // weight
  layer_bare,  // neither
  rms
};

struct Moe {
  int64_t experts = 0, top = 0, ffn = 0;  // experts 0: none
  int64_t shared_ffn = 0;                 // of experts that every token goes to, together; 0: none
  bool shared_gate = false;               // a sigmoid gate on these
  bool sigmoid = false;                   // scores of the router; else softmax
  int64_t dense_first = 0, every = 1;     // layers from dense_first on, every so many, have experts
  bool router_bias = false, bias = false;  // of the experts
  bool at(int64_t layer) const {
    return experts > 0 && layer >= dense_first && (layer + 1) % every == 0;
  }
};

// Multi-head latent attention (DeepSeek-V2, 2024). kv_rank 0: none.
struct Latent {
  int64_t q_rank = 0;  // 0: queries straight from the hidden state
  int64_t kv_rank = 0, rope = 0, nope = 0, value = 0;
};

struct Transformer {
  int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head = 0, ffn = 0, vocab = 0, seq = 0;
  NormKind norm = NormKind::rms;
  double eps = 1e-5;
  // Where norms stand in a layer: before both halves; before both, which run side by side, or one
  // before both of these; behind both; before and behind both.
  enum class Place { before, parallel, parallel_one, behind, both } place = Place::before;
  bool final_norm = true, embedding_norm = false;
  bool gated = true;  // feed-forward: act(gate) * up, else act(up)
  std::string act = "silu";
  bool qkv_bias = false, out_bias = false, ffn_bias = false, head_bias = false;
  bool fused_qkv = false, fused_gate = false;  // one weight
  bool turned = false;                         // weights are [in, out] (GPT-2's Conv1D)
  int64_t rotary = 0;                          // dimensions of a head that are turned; 0: none
  bool alibi = false;
  int64_t positions = 0;  // rows of a table of positions that are added; 0: none
  enum class QkNorm { none, head, whole } qk_norm = QkNorm::none;
  bool causal = true;
  bool tied = true;
  bool sinks = false;                    // a score for each head besides those of tokens
  double softcap = 0, head_softcap = 0;  // of scores, of logits; 0: none
  Moe moe;
  Latent latent;
  // Of encoders:
  int64_t types = 0;            // rows of a table of token types; 0: none
  int64_t embedding = 0;        // width of the embedding, projected to hidden; 0: hidden
  bool shared_layers = false;   // ALBERT: one layer, over and over
  bool spare_bias = false;      // of the head: one more that nothing reads
  bool head_transform = false;  // dense, activation and norm in front of the head
  // Of images: `vocab` classes; the sequence is patches and a class token.
  int64_t image = 0, patch = 0, channels = 0;
};

// The step for a batch. REQUIRES: sizes are positive and divide.
Graph training_step(const Transformer& t, int64_t batch);

}  // namespace motley::readers

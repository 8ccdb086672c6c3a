#include "readers/families.h"

#include <algorithm>

namespace motley::readers {

namespace {

using Place = Transformer::Place;
using QkNorm = Transformer::QkNorm;

// Sizes that nearly all families name alike.
Transformer sizes(const Config& c) {
  Transformer t;
  t.hidden = c.size({"hidden_size", "n_embd", "d_model"});
  t.layers = c.size({"num_hidden_layers", "n_layer", "num_layers", "n_layers"}, kMostLayers);
  t.heads = c.size({"num_attention_heads", "n_head", "num_heads", "n_heads"});
  t.kv_heads = c.size_or({"num_key_value_heads"}, t.heads);
  t.head = c.size_or({"head_dim"}, t.hidden / t.heads);
  t.vocab = c.size({"vocab_size"});
  t.seq =
      c.size_or({"max_position_embeddings", "n_positions", "max_seq_len", "seq_length"}, kMostSeq);
  t.ffn = c.size_or({"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"}, 4 * t.hidden);
  return t;
}

// Rotary positions of a part of each head, which `rope_parameters` or the config itself gives.
int64_t rotary(const Config& c, const Transformer& t, const char* name, double absent) {
  double part = c.real(name, absent);
  if (!c.has(name) && c.nested("rope_parameters")) {
    const Json& rope = c.json("rope_parameters");
    if (rope.contains("partial_rotary_factor") && rope["partial_rotary_factor"].is_number())
      part = rope["partial_rotary_factor"].get<double>();
  }
  const auto n = static_cast<int64_t>(part * static_cast<double>(t.head));
  if (part < 0 || part > 1) throw c.bad(name, "a part from 0 to 1");
  return n / 2 * 2;
}

// The Llama way, of which many families are variations.
Transformer llama(const Config& c) {
  Transformer t = sizes(c);
  t.qkv_bias = t.out_bias = c.flag("attention_bias", false);
  t.ffn_bias = c.flag("mlp_bias", false);
  t.act = c.act({"hidden_act", "hidden_activation"}, "silu");
  t.tied = c.flag("tie_word_embeddings", false);
  t.rotary = rotary(c, t, "partial_rotary_factor", 1);
  return t;
}

Transformer biased_queries(const Config& c) {  // Qwen2
  Transformer t = llama(c);
  t.qkv_bias = true;
  t.out_bias = t.ffn_bias = false;
  return t;
}

Transformer mistral(const Config& c) {
  Transformer t = llama(c);
  t.qkv_bias = t.out_bias = t.ffn_bias = false;
  return t;
}

Transformer qwen3(const Config& c) {
  Transformer t = llama(c);
  t.head = c.size_or({"head_dim"}, 128);
  t.rotary = t.head / 2 * 2;
  t.qk_norm = QkNorm::head;
  t.ffn_bias = false;
  return t;
}

Transformer gemma(const Config& c) {
  Transformer t = llama(c);
  t.head = c.size_or({"head_dim"}, 256);
  t.rotary = t.head / 2 * 2;
  t.act = c.act({"hidden_activation", "hidden_act"}, "gelu_tanh");
  t.tied = c.flag("tie_word_embeddings", true);
  return t;
}

Transformer gemma2(const Config& c) {
  Transformer t = gemma(c);
  t.place = Place::both;
  t.softcap = c.real("attn_logit_softcapping", 0);
  t.head_softcap = c.real("final_logit_softcapping", 0);
  return t;
}

Transformer gemma3(const Config& c) {
  Transformer t = gemma2(c);
  t.qk_norm = QkNorm::head;
  return t;
}

Transformer phi(const Config& c) {
  Transformer t = llama(c);
  c.require("qk_layernorm", false);
  t.norm = NormKind::layer;
  t.place = Place::parallel_one;
  t.gated = false;
  t.act = c.act({"hidden_act"}, "gelu_tanh");
  t.qkv_bias = t.out_bias = t.ffn_bias = t.head_bias = true;
  t.rotary = rotary(c, t, "partial_rotary_factor", 0.5);
  return t;
}

Transformer phi3(const Config& c) {
  Transformer t = llama(c);
  t.fused_qkv = t.fused_gate = true;
  t.qkv_bias = t.out_bias = t.ffn_bias = false;
  return t;
}

Transformer olmo(const Config& c) {
  Transformer t = llama(c);
  t.norm = NormKind::layer_bare;
  return t;
}

Transformer olmo2(const Config& c) {
  Transformer t = llama(c);
  t.place = Place::behind;
  t.qk_norm = QkNorm::whole;
  return t;
}

Transformer cohere(const Config& c) {
  Transformer t = llama(c);
  c.require("use_qk_norm", false);
  t.norm = NormKind::layer_thin;
  t.place = Place::parallel_one;
  t.tied = c.flag("tie_word_embeddings", true);
  return t;
}

Transformer stablelm(const Config& c) {
  Transformer t = llama(c);
  c.require("qk_layernorm", false);
  t.norm = NormKind::layer;
  t.place = c.flag("use_parallel_residual", false) ? Place::parallel_one : Place::before;
  t.qkv_bias = c.flag("use_qkv_bias", false);
  t.out_bias = t.ffn_bias = false;
  t.rotary = rotary(c, t, "partial_rotary_factor", 0.25);
  return t;
}

Transformer starcoder2(const Config& c) {
  Transformer t = llama(c);
  t.norm = NormKind::layer;
  t.gated = false;
  t.act = c.act({"hidden_act"}, "gelu_tanh");
  t.qkv_bias = t.out_bias = t.ffn_bias = c.flag("use_bias", true);
  t.tied = c.flag("tie_word_embeddings", true);
  return t;
}

Transformer nemotron(const Config& c) {
  Transformer t = llama(c);
  t.norm = NormKind::layer;
  t.gated = false;
  t.act = c.act({"hidden_act"}, "relu2");
  t.rotary = rotary(c, t, "partial_rotary_factor", 0.5);
  return t;
}

Transformer glm(const Config& c) {
  Transformer t = llama(c);
  t.qkv_bias = c.flag("attention_bias", true);
  t.out_bias = t.ffn_bias = false;
  t.fused_gate = true;
  t.head = c.size_or({"head_dim"}, 128);
  t.rotary = rotary(c, t, "partial_rotary_factor", 0.5);
  return t;
}

Transformer glm4(const Config& c) {
  Transformer t = glm(c);
  t.qkv_bias = c.flag("attention_bias", false);
  t.place = Place::both;
  return t;
}

// ---- with experts

Transformer mixtral(const Config& c) {
  Transformer t = llama(c);
  t.qkv_bias = t.out_bias = t.ffn_bias = false;
  t.moe.experts = c.size({"num_local_experts", "num_experts"});
  t.moe.top = c.size_or({"num_experts_per_tok"}, 2);
  t.moe.ffn = t.ffn;
  return t;
}

Transformer qwen_moe(const Config& c, Transformer t) {
  t.moe.experts = c.size({"num_experts", "num_local_experts"});
  t.moe.top = c.size({"num_experts_per_tok"});
  t.moe.ffn = c.size({"moe_intermediate_size"});
  t.moe.every = c.size_or({"decoder_sparse_step"}, 1);
  if (c.has("mlp_only_layers") && !c.json("mlp_only_layers").empty())
    throw c.bad("mlp_only_layers", "[]: others are not built");
  return t;
}
Transformer qwen2_moe(const Config& c) {
  Transformer t = qwen_moe(c, biased_queries(c));
  t.qkv_bias = c.flag("qkv_bias", true);
  t.moe.shared_ffn = c.size({"shared_expert_intermediate_size"});
  t.moe.shared_gate = true;
  return t;
}
Transformer qwen3_moe(const Config& c) {
  Transformer t = qwen_moe(c, qwen3(c));
  t.head = c.size_or({"head_dim"}, t.hidden / t.heads);
  t.rotary = t.head / 2 * 2;
  return t;
}

Transformer olmoe(const Config& c) {
  Transformer t = mixtral(c);
  t.qkv_bias = t.out_bias = c.flag("attention_bias", false);
  t.moe.top = c.size({"num_experts_per_tok"});
  t.qk_norm = QkNorm::whole;
  return t;
}

Transformer gpt_oss(const Config& c) {
  Transformer t = llama(c);
  t.qkv_bias = t.out_bias = c.flag("attention_bias", true);
  t.sinks = true;
  t.moe.experts = c.size({"num_local_experts"});
  t.moe.top = c.size({"num_experts_per_tok", "experts_per_token"});
  t.moe.ffn = t.ffn;
  t.moe.router_bias = t.moe.bias = true;
  return t;
}

Transformer deepseek(const Config& c) {
  Transformer t = llama(c);
  Latent& l = t.latent;
  l.q_rank = c.size_or({"q_lora_rank"}, 0);
  l.kv_rank = c.size({"kv_lora_rank"});
  l.rope = c.size({"qk_rope_head_dim"});
  l.nope = c.size({"qk_nope_head_dim"});
  l.value = c.size({"v_head_dim"});
  t.rotary = l.rope / 2 * 2;
  t.head = l.rope + l.nope;
  if (!c.has("n_routed_experts")) return t;
  t.moe.experts = c.size({"n_routed_experts"});
  t.moe.top = c.size_or({"num_experts_per_tok"}, std::min<int64_t>(8, t.moe.experts));
  t.moe.ffn = c.size({"moe_intermediate_size"});
  t.moe.shared_ffn = c.size_or({"n_shared_experts"}, 0, 0) * t.moe.ffn;
  t.moe.dense_first = c.size_or({"first_k_dense_replace"}, 0, 0);
  return t;
}
Transformer deepseek_v3(const Config& c) {
  Transformer t = deepseek(c);
  t.moe.sigmoid = true;
  return t;
}

// ---- the GPT way

Transformer gpt2(const Config& c) {
  Transformer t = sizes(c);
  c.require("add_cross_attention", false);
  t.norm = NormKind::layer;
  t.gated = false;
  t.act = c.act({"activation_function"}, "gelu_tanh");
  t.qkv_bias = t.out_bias = t.ffn_bias = t.fused_qkv = t.turned = true;
  t.positions = t.seq;
  t.tied = c.flag("tie_word_embeddings", true);
  return t;
}

Transformer gpt_bigcode(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = false;
  t.kv_heads = c.flag("multi_query", true) ? 1 : t.heads;
  return t;
}

Transformer gpt_neo(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = t.fused_qkv = t.qkv_bias = false;
  return t;
}

Transformer gpt_neox(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = false;
  t.positions = 0;
  t.act = c.act({"hidden_act"}, "gelu");
  t.place = c.flag("use_parallel_residual", true) ? Place::parallel : Place::before;
  t.qkv_bias = t.out_bias = c.flag("attention_bias", true);
  t.rotary = rotary(c, t, c.has("rotary_pct") ? "rotary_pct" : "partial_rotary_factor", 0.25);
  t.tied = c.flag("tie_word_embeddings", false);
  return t;
}

Transformer gptj(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = t.fused_qkv = t.qkv_bias = t.out_bias = false;
  t.positions = 0;
  t.place = Place::parallel_one;
  t.head_bias = true;
  t.rotary = c.size_or({"rotary_dim"}, t.head) / 2 * 2;
  t.tied = c.flag("tie_word_embeddings", false);
  return t;
}
Transformer codegen(const Config& c) {
  Transformer t = gptj(c);
  t.fused_qkv = true;
  return t;
}

Transformer opt(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = t.fused_qkv = false;
  t.qkv_bias = t.out_bias = t.ffn_bias = c.flag("enable_bias", true);
  c.require("do_layer_norm_before", true);
  c.require("layer_norm_elementwise_affine", true);
  c.require("_remove_final_layer_norm", false);
  t.act = c.act({"activation_function"}, "relu");
  t.positions = t.seq + 2;
  if (c.size_or({"word_embed_proj_dim"}, t.hidden) != t.hidden)
    throw c.bad("word_embed_proj_dim",
                fmt::format("{}, the hidden size: others are not built", t.hidden));
  return t;
}

Transformer bloom(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = false;
  t.positions = 0;
  t.seq = c.size_or({"seq_length"}, kMostSeq);
  t.ffn = 4 * t.hidden;
  t.alibi = t.embedding_norm = true;
  t.act = "gelu_tanh";
  return t;
}

Transformer falcon(const Config& c) {
  Transformer t = gpt2(c);
  const bool fresh = c.flag("new_decoder_architecture", false);
  t.turned = false;
  t.positions = 0;
  t.act = c.act({"activation"}, "gelu");
  t.qkv_bias = t.out_bias = t.ffn_bias = c.flag("bias", false);
  t.kv_heads = fresh                         ? c.size_or({"num_kv_heads"}, t.heads)
               : c.flag("multi_query", true) ? 1
                                             : t.heads;
  t.alibi = c.flag("alibi", false);
  t.rotary = t.alibi ? 0 : t.head / 2 * 2;
  const int64_t norms = c.size_or({"num_ln_in_parallel_attn"}, fresh ? 2 : 1);
  t.place = fresh && norms == 2             ? Place::parallel
            : c.flag("parallel_attn", true) ? Place::parallel_one
                                            : Place::before;
  return t;
}

Transformer mpt(const Config& c) {
  Transformer t = gpt2(c);
  t.turned = false;
  t.positions = 0;
  t.norm = NormKind::layer_thin;
  t.qkv_bias = t.out_bias = t.ffn_bias = false;
  t.ffn = c.size_or({"expansion_ratio"}, 4) * t.hidden;
  t.alibi = true;
  t.act = "gelu";
  return t;
}

// ---- encoders

Transformer bert(const Config& c) {
  Transformer t = sizes(c);
  c.require("is_decoder", false);
  if (c.text("position_embedding_type", "absolute") != "absolute")
    throw c.bad("position_embedding_type", "absolute: others are not built");
  t.causal = false;
  t.norm = NormKind::layer;
  t.place = Place::behind;
  t.final_norm = t.gated = false;
  t.embedding_norm = true;
  t.act = c.act({"hidden_act"}, "gelu");
  t.qkv_bias = t.out_bias = t.ffn_bias = t.head_bias = t.head_transform = true;
  t.positions = t.seq;
  t.types = c.size_or({"type_vocab_size"}, 2);
  t.tied = c.flag("tie_word_embeddings", true);
  t.spare_bias = !t.tied;
  return t;
}

Transformer roberta(const Config& c) {
  Transformer t = bert(c);
  t.seq = std::max<int64_t>(1, t.seq - 2);  // the first two rows are never reached
  return t;
}

Transformer distilbert(const Config& c) {
  Transformer t;
  t.hidden = c.size({"dim"});
  t.layers = c.size({"n_layers"}, kMostLayers);
  t.heads = t.kv_heads = c.size({"n_heads"});
  t.head = t.hidden / t.heads;
  t.ffn = c.size({"hidden_dim"});
  t.vocab = c.size({"vocab_size"});
  t.seq = t.positions = c.size({"max_position_embeddings"});
  t.causal = t.final_norm = t.gated = false;
  t.norm = NormKind::layer;
  t.place = Place::behind;
  t.embedding_norm = true;
  t.act = c.act({"activation"}, "gelu");
  t.qkv_bias = t.out_bias = t.ffn_bias = t.head_bias = t.head_transform = true;
  t.tied = c.flag("tie_word_embeddings", true);
  return t;
}

Transformer electra(const Config& c) {
  Transformer t = bert(c);
  t.spare_bias = false;
  t.embedding = c.size_or({"embedding_size"}, t.hidden);
  return t;
}

Transformer albert(const Config& c) {
  Transformer t = bert(c);
  t.embedding = c.size({"embedding_size"});
  if (c.size_or({"num_hidden_groups"}, 1) != 1 || c.size_or({"inner_group_num"}, 1) != 1)
    throw c.bad("num_hidden_groups", "1: others are not built");
  t.shared_layers = true;
  return t;
}

Transformer vit(const Config& c) {
  Transformer t;
  t.hidden = c.size({"hidden_size"});
  t.layers = c.size({"num_hidden_layers"}, kMostLayers);
  t.heads = t.kv_heads = c.size({"num_attention_heads"});
  t.head = t.hidden / t.heads;
  t.ffn = c.size({"intermediate_size"});
  t.image = c.size_or({"image_size"}, 224);
  t.patch = c.size_or({"patch_size"}, 16);
  t.channels = c.size_or({"num_channels"}, 3);
  if (t.image % t.patch != 0)
    throw c.bad("patch_size", fmt::format("one that divides {}", t.image));
  t.seq = (t.image / t.patch) * (t.image / t.patch) + 1;
  t.vocab = c.size_or({"num_labels"}, 2);
  if (c.nested("id2label"))
    t.vocab = std::max<int64_t>(1, static_cast<int64_t>(c.json("id2label").size()));
  t.causal = t.gated = false;
  t.norm = NormKind::layer;
  t.act = c.act({"hidden_act"}, "gelu");
  t.qkv_bias = c.flag("qkv_bias", true);
  t.out_bias = t.ffn_bias = true;
  return t;
}

}  // namespace

const std::map<std::string, Family>& families() {
  static const std::map<std::string, Family> table = {
      {"albert", albert},
      {"bert", bert},
      {"bloom", bloom},
      {"camembert", roberta},
      {"codegen", codegen},
      {"cohere", cohere},
      {"deepseek_v2", deepseek},
      {"deepseek_v3", deepseek_v3},
      {"distilbert", distilbert},
      {"electra", electra},
      {"falcon", falcon},
      {"gemma", gemma},
      {"gemma2", gemma2},
      {"gemma3_text", gemma3},
      {"glm", glm},
      {"glm4", glm4},
      {"gpt2", gpt2},
      {"gpt_bigcode", gpt_bigcode},
      {"gpt_neo", gpt_neo},
      {"gpt_neox", gpt_neox},
      {"gpt_oss", gpt_oss},
      {"gptj", gptj},
      {"granite", llama},
      {"llama", llama},
      {"mistral", mistral},
      {"mixtral", mixtral},
      {"mpt", mpt},
      {"nemotron", nemotron},
      {"olmo", olmo},
      {"olmo2", olmo2},
      {"olmoe", olmoe},
      {"opt", opt},
      {"phi", phi},
      {"phi3", phi3},
      {"qwen2", biased_queries},
      {"qwen2_moe", qwen2_moe},
      {"qwen3", qwen3},
      {"qwen3_moe", qwen3_moe},
      {"roberta", roberta},
      {"smollm3", llama},
      {"stablelm", stablelm},
      {"starcoder2", starcoder2},
      {"vit", vit},
      {"xlm-roberta", roberta},
  };
  return table;
}

}  // namespace motley::readers

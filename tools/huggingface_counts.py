#!/usr/bin/env python3
"""Writes tests/data/huggingface_parameters.json: configs of the families that src/readers/huggingface.cc builds (of each the
default sizes, and two small ones with features on and off), and how many parameters transformers' own models have.

    build/motley models --json | python tools/huggingface_counts.py > tests/data/huggingface_parameters.json

Needs torch and transformers (tried: 2.13, 5.14). Models are built on the meta device."""
import json
import random
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

MASKED = {"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"}
# What a reader may ask for; the rest of a config is left out of the table.
FIELDS = """hidden_size n_embd d_model dim num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads
num_heads num_key_value_heads num_kv_heads head_dim intermediate_size n_inner ffn_dim ffn_hidden_size hidden_dim vocab_size
max_position_embeddings n_positions max_seq_len seq_length tie_word_embeddings attention_bias mlp_bias model_type hidden_act
hidden_activation activation_function activation rotary_dim rotary_pct partial_rotary_factor embedding_size type_vocab_size
num_labels image_size patch_size num_channels qkv_bias num_experts num_local_experts num_experts_per_tok
moe_intermediate_size shared_expert_intermediate_size decoder_sparse_step mlp_only_layers q_lora_rank kv_lora_rank
qk_rope_head_dim qk_nope_head_dim v_head_dim n_routed_experts n_shared_experts first_k_dense_replace
new_decoder_architecture multi_query parallel_attn alibi bias num_ln_in_parallel_attn expansion_ratio use_bias use_qkv_bias
use_parallel_residual word_embed_proj_dim do_layer_norm_before enable_bias qk_layernorm use_qk_norm
attn_logit_softcapping final_logit_softcapping rms_norm_eps layer_norm_eps num_hidden_groups inner_group_num
position_embedding_type rope_parameters is_decoder add_cross_attention id2label""".split()
FLAGS = """attention_bias mlp_bias use_qkv_bias multi_query new_decoder_architecture bias alibi parallel_attn
tie_word_embeddings""".split()


def small(name, usual, rng):
    """Sizes of a small model of a family, of the fields that its config has."""
    heads, head = rng.choice([2, 4, 8]), rng.choice([8, 16])
    sizes = {"hidden_size n_embd d_model dim": heads * head, "num_hidden_layers n_layer n_layers num_layers": rng.choice([2, 3]),
             "num_attention_heads n_head n_heads num_heads": heads, "num_key_value_heads": rng.choice([1, heads // 2, heads]),
             "intermediate_size ffn_dim hidden_dim": rng.choice([48, 96]), "n_inner": rng.choice([None, 80]),
             "vocab_size": rng.choice([101, 256]), "max_position_embeddings n_positions": rng.choice([32, 64]),
             "num_experts num_local_experts n_routed_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size shared_expert_intermediate_size": rng.choice([24, 40]), "first_k_dense_replace": 1,
             "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "embedding_size": 24,
             "q_lora_rank": rng.choice([None, 24]), "word_embed_proj_dim": heads * head, "rotary_dim": 4, "pad_token_id": 0,
             "layer_types no_rope_layers": None, "n_group topk_group": 1}
    sizes |= {flag: rng.choice([True, False]) for flag in FLAGS}
    chosen = {key: size for keys, size in sizes.items() for key in keys.split() if key in usual}
    if usual.get("head_dim") and "kv_lora_rank" not in usual:
        chosen["head_dim"] = rng.choice([head, 2 * head])
    chosen |= {"vit": {"image_size": 32, "patch_size": 8, "num_labels": 10}, "falcon": {"num_kv_heads": 1 if heads < 4 else 2},
               "gpt_neo": {"attention_types": [[["global"], chosen.get("num_layers", 2)]]},
               "codegen": {"n_head": 4, "n_embd": 64}, "deepseek_v3": {"q_lora_rank": 24}, "deepseek_v2": {"mlp_bias": False},
               "nemotron": {"head_dim": head}}.get(name, {})
    return chosen


def parameters(config):
    model = AutoModelForMaskedLM if config.model_type in MASKED else \
        AutoModelForImageClassification if config.model_type == "vit" else AutoModelForCausalLM
    with torch.device("meta"):
        made = model.from_config(config)
    made.tie_weights()
    return sum(p.numel() for p in made.parameters())


def main():
    rng, rows = random.Random(7), []
    for name in json.load(sys.stdin)["huggingface"]:
        usual = AutoConfig.for_model(name).to_dict()
        for sizes in ({}, small(name, usual, rng), small(name, usual, rng)):
            try:
                config = AutoConfig.for_model(name, **sizes)
                row = {"config": {k: v for k, v in config.to_dict().items() if k in FIELDS and (k != "id2label" or name == "vit")}, "parameters": parameters(config)}
            except (TypeError, ValueError, RuntimeError) as error:  # sizes that this family does not take
                print(f"{name}: {error}", file=sys.stderr)
                continue
            rows.append(json.dumps(row, separators=(",", ":"), sort_keys=True))
    source = f"tools/huggingface_counts.py, transformers {transformers.__version__}, torch {torch.__version__}"
    print('{"source": %s, "rows": [\n%s\n]}' % (json.dumps(source), ",\n".join(rows)))


main()

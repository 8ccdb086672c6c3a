"""Models of transformers, by their configurations with random weights: full size as published, and a tiny one."""

import torch
import transformers as hf

from families.family import Family

def tokens(vocabulary, sequence, labels="same"):
    """batch(rows, generator): token ids, and the same as labels; a few positions have none (-100)."""

    def batch(rows, generator=None):
        ids = torch.randint(0, vocabulary, (rows, sequence), generator=generator)
        given = {"input_ids": ids}
        if labels == "same":
            target = ids.clone()
            target[:, :2] = -100
            given["labels"] = target
        elif labels is not None:
            given["labels"] = torch.randint(0, labels, (rows,), generator=generator)
        return given

    return batch


def texts(vocabulary, sequence, labels="same", left=False):
    """Texts of several lengths as collators make them a batch: an attention mask says what is padding, to the right or to the left."""

    def batch(rows, generator=None):
        lengths = torch.randint(sequence // 2, sequence, (rows,), generator=generator)
        mask = (torch.arange(sequence) < lengths[:, None]).long()
        mask = mask.flip(1) if left else mask
        ids = torch.randint(3, vocabulary, (rows, sequence), generator=generator) * mask
        if labels == "same":
            target = ids.masked_fill(mask == 0, -100)
        else:
            target = torch.randint(0, labels, (rows,), generator=generator)
        return {"input_ids": ids, "attention_mask": mask, "labels": target}

    return batch


def answered(vocabulary, source, target):
    """Pairs of such texts."""
    asked, told = texts(vocabulary, source), texts(vocabulary, target)

    def batch(rows, generator=None):
        return {**asked(rows, generator), "labels": told(rows, generator)["labels"]}

    return batch


def translated(vocabulary, source, target):
    def batch(rows, generator=None):
        return {
            "input_ids": torch.randint(0, vocabulary, (rows, source), generator=generator),
            "labels": torch.randint(0, vocabulary, (rows, target), generator=generator),
        }

    return batch


def images(size, channels=3, classes=None):
    def batch(rows, generator=None):
        given = {"pixel_values": torch.randn(rows, channels, size, size, generator=generator)}
        if classes is not None:
            given["labels"] = torch.randint(0, classes, (rows,), generator=generator)
        return given

    return batch


def captioned(size, vocabulary, sequence):
    def batch(rows, generator=None):
        return {
            "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
            "input_ids": torch.randint(0, vocabulary, (rows, sequence), generator=generator),
            "return_loss": True,
        }

    return batch


def spoken(bins, frames, vocabulary, sequence):
    def batch(rows, generator=None):
        return {
            "input_features": torch.randn(rows, bins, frames, generator=generator),
            "labels": torch.randint(0, vocabulary, (rows, sequence), generator=generator),
        }

    return batch


def waves(samples, classes):
    def batch(rows, generator=None):
        return {
            "input_values": torch.randn(rows, samples, generator=generator),
            "labels": torch.randint(0, classes, (rows,), generator=generator),
        }

    return batch


def _model(kind, config, batch):
    return (lambda: kind(config)), batch


def _calm(config):
    """Without random numbers: two programs draw different ones."""
    for one in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, value in vars(one).items() if one is not None else ():
            if isinstance(value, float) and ("drop" in name or "pdrop" in name):
                setattr(one, name, 0.0)
    return config


def _tiny(kind, config, batch):
    return (lambda: kind(_calm(config))), batch


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _decoder(name, model, config, full, tiny, sequence=2048, rows=64):
    big, small = config(**full), config(**{**_GROUPED, **tiny})
    return Family(
        name,
        _model(model, big, tokens(big.vocab_size, sequence)),
        _tiny(model, small, tokens(64, 12)),
        rows,
        single=True,  # of the loss, whatever the model's type
    )


def families():
    llama = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                 vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0)  # fmt: skip
    llama70 = dict(llama, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    bert_full, bert_tiny = hf.BertConfig(), hf.BertConfig(**_SMALL, max_position_embeddings=32)
    gpt2_full = hf.GPT2Config()
    gpt2_tiny = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2)
    t5_full = hf.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
    t5_tiny = hf.T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    vit_full = hf.ViTConfig(num_labels=1000)
    vit_tiny = hf.ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                            patch_size=8, num_labels=5)  # fmt: skip
    clip_tiny = hf.CLIPConfig(
        text_config=dict(**_SMALL, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8),
        projection_dim=16,
    )
    whisper_tiny = hf.WhisperConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                                    encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, max_source_positions=16,
                                    max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                    decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
    wave_tiny = hf.Wav2Vec2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64,
                                  conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2,
                                  num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=4, mask_time_prob=0.0,
                                  classifier_proj_size=16)  # fmt: skip
    wave_full = hf.Wav2Vec2Config(num_labels=12, mask_time_prob=0.0, layerdrop=0.0)
    deep_tiny = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
                     first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                     num_key_value_heads=4)  # fmt: skip
    deep_small = dict(hidden_size=1024, intermediate_size=2816, moe_intermediate_size=512, num_hidden_layers=12, num_attention_heads=16,
                      num_key_value_heads=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, vocab_size=32000,
                      q_lora_rank=512, kv_lora_rank=256)  # fmt: skip
    return [
        Family("GPT-2", _model(hf.GPT2LMHeadModel, gpt2_full, tokens(50257, 1024)), _tiny(hf.GPT2LMHeadModel, gpt2_tiny, tokens(64, 12)),
            single=True),
        _decoder("Llama-3-8B", hf.LlamaForCausalLM, hf.LlamaConfig, llama, {}),
        _decoder("Llama-3-70B", hf.LlamaForCausalLM, hf.LlamaConfig, llama70, {}),
        _decoder("Qwen3-8B", hf.Qwen3ForCausalLM, hf.Qwen3Config,
                 dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                      head_dim=128, vocab_size=151936), dict(head_dim=8)),
        _decoder("Mistral-7B", hf.MistralForCausalLM, hf.MistralConfig, {}, dict(sliding_window=8)),
        _decoder("Gemma-3-1B", hf.Gemma3ForCausalLM, hf.Gemma3TextConfig,
                 dict(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
                      head_dim=256, vocab_size=262144, sliding_window=512),
                 dict(head_dim=8, sliding_window=8)),
        _decoder("Phi-4", hf.Phi3ForCausalLM, hf.Phi3Config,
                 dict(hidden_size=5120, intermediate_size=17920, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10,
                      vocab_size=100352, max_position_embeddings=16384, original_max_position_embeddings=16384, pad_token_id=0), {}),
        _decoder("Mixtral-8x7B", hf.MixtralForCausalLM, hf.MixtralConfig, {}, dict(num_local_experts=4, num_experts_per_tok=2)),
        _decoder("Qwen3-30B-A3B", hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig,
                 dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
                      num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936),
                 dict(head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)),
        _decoder("DeepSeek-V3-small", hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, deep_small, deep_tiny),
        _decoder("DeepSeek-V2-Lite", hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config,
                 dict(hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16,
                      n_routed_experts=64, num_experts_per_tok=6, q_lora_rank=None, first_k_dense_replace=1),
                 {key: value for key, value in deep_tiny.items() if key not in ("n_group", "topk_group")}),
        _decoder("Llama-4-small", hf.Llama4ForCausalLM, hf.Llama4TextConfig,
                 dict(hidden_size=1024, intermediate_size=2048, intermediate_size_mlp=4096, num_hidden_layers=12, num_attention_heads=16,
                      num_key_value_heads=4, head_dim=64, vocab_size=32000),
                 dict(intermediate_size_mlp=48, head_dim=8, num_local_experts=4, num_hidden_layers=4)),
        Family("BERT", _model(hf.BertForMaskedLM, bert_full, tokens(30522, 512)), _tiny(hf.BertForMaskedLM, bert_tiny, tokens(64, 12))),
        Family("T5", _model(hf.T5ForConditionalGeneration, t5_full, translated(32128, 512, 128)),
               _tiny(hf.T5ForConditionalGeneration, t5_tiny, translated(64, 10, 7)), single=True),
        Family("ViT", _model(hf.ViTForImageClassification, vit_full, images(224, 3, 1000)),
               _tiny(hf.ViTForImageClassification, vit_tiny, images(16, 3, 5))),
        Family("CLIP", _model(hf.CLIPModel, hf.CLIPConfig(), captioned(224, 49408, 77)),
               _tiny(hf.CLIPModel, clip_tiny, captioned(16, 64, 8))),
        Family("Whisper", _model(hf.WhisperForConditionalGeneration, hf.WhisperConfig(d_model=512, encoder_layers=6, decoder_layers=6,
                                 encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048),
                                 spoken(80, 3000, 51865, 128)),
               _tiny(hf.WhisperForConditionalGeneration, whisper_tiny, spoken(8, 32, 64, 9))),
        Family("wav2vec 2", _model(hf.Wav2Vec2ForSequenceClassification, wave_full, waves(160000, 12)),
               _tiny(hf.Wav2Vec2ForSequenceClassification, wave_tiny, waves(200, 4))),
    ] + _padded() + [_segments()]  # fmt: skip


def _segments():
    """Takes what its layers return from hooks that its first forward pass registers."""

    def batch(rows, generator=None):
        return {
            "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
            "labels": torch.randint(0, 5, (rows, 32, 32), generator=generator),
        }

    config = hf.SegformerConfig(hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2], depths=[1, 1, 1, 1], decoder_hidden_size=16,
                                num_labels=5)  # fmt: skip
    return Family("SegFormer", None, _tiny(hf.SegformerForSemanticSegmentation, config, batch))


def _padded():
    """Batches with attention masks."""
    of_two = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
              "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "max_position_embeddings": 32, "decoder_start_token_id": 1,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
    return [
        Family("BERT, padded", None, _tiny(hf.BertForSequenceClassification, hf.BertConfig(**_SMALL, max_position_embeddings=32), texts(64, 12, 2))),
        Family("Llama, padded", None, _tiny(hf.LlamaForCausalLM, hf.LlamaConfig(**_GROUPED), texts(64, 12)), single=True),
        Family("Mistral, padded left", None, _tiny(hf.MistralForCausalLM, hf.MistralConfig(**_GROUPED, sliding_window=8), texts(64, 12, left=True)),
               single=True),
        Family("BART, padded", None, _tiny(hf.BartForConditionalGeneration, hf.BartConfig(**of_two), answered(64, 10, 7)), single=True),
    ]  # fmt: skip

"""Models of diffusers with random weights: what they are told is a noisy picture and a time, and they tell the noise."""

import diffusers
import torch
import torch.nn.functional as F

from families.family import Family


def noisy(channels, size, classes=None, told=None):
    def batch(rows, generator=None):
        given = {
            ("hidden_states" if classes else "sample"): torch.randn(rows, channels, size, size, generator=generator),
            "timestep": torch.randint(0, 1000, (rows,), generator=generator),
        }
        if classes:
            given["class_labels"] = torch.randint(0, classes, (rows,), generator=generator)
        return given, torch.randn(rows, told or channels, size, size, generator=generator)

    return batch


def loss(output, noise):
    return F.mse_loss(output.sample, noise)


def _calm_dit(**config):
    """Without labels that are left out at random: two programs leave out others."""
    model = diffusers.DiTTransformer2DModel(**config)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


def families():
    unet = {"block_out_channels": (8, 16), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "layers_per_block": 1,
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "norm_num_groups": 4, "attention_head_dim": 4}  # fmt: skip
    dit = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2, "in_channels": 4,
           "out_channels": 4, "norm_num_groups": 4, "num_embeds_ada_norm": 10, "dropout": 0.0}  # fmt: skip
    return [
        Family(
            "UNet2DModel",
            ((lambda: diffusers.UNet2DModel(sample_size=256)), noisy(3, 256)),
            ((lambda: diffusers.UNet2DModel(sample_size=16, **unet)), noisy(3, 16)),
            loss_fn=loss,
        ),
        Family(
            "DiT",
            ((lambda: diffusers.DiTTransformer2DModel(num_layers=28, num_attention_heads=16, attention_head_dim=72, sample_size=32,
                                                      in_channels=4, out_channels=8)), noisy(4, 32, 1000, told=8)),
            ((lambda: _calm_dit(**dit)), noisy(4, 8, 10)),
            loss_fn=loss,
        ),
    ]  # fmt: skip

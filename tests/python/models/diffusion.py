"""A block of a diffusion U-Net (Ho et al. 2020): group norm, a sinusoidal time embedding, attention over pixels."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def embedding(t, width):
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None] * rates[None].to(t.dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Residual(nn.Module):
    def __init__(self, inside, outside, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.norm2, self.conv2 = nn.GroupNorm(2, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(2, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        weight = torch.einsum("bci,bcj->bij", q, k).div(c**0.5).softmax(-1)
        return x + self.out(torch.einsum("bij,bcj->bci", weight, v).reshape(b, c, h, w))


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 16))
        self.width = width
        self.stem, self.down = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.block, self.attention = Residual(width, width, 16), Attention(width)
        self.up, self.out = Residual(2 * width, width, 16), nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x, t):
        t = self.time(embedding(t, self.width))
        a = self.stem(x)
        b = self.attention(self.block(self.down(a), t))
        b = F.interpolate(b, scale_factor=2.0, mode="nearest")
        return self.out(self.up(torch.cat([a, b], dim=1), t))


def build():
    return Denoiser(), F.mse_loss, lambda g: (
        (torch.randn(4, 2, 8, 8, generator=g), torch.rand(4, generator=g)),
        torch.randn(4, 2, 8, 8, generator=g),
    )

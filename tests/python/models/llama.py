"""LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.dim, bias=False)
        self.wv = nn.Linear(width, groups * self.dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1, self.w3 = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.w2 = nn.Linear(24, width, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        y = self.norm1(x)
        q = rotate(self.wq(y).view(b, t, self.heads, self.dim).transpose(1, 2), cos, sin)
        k = rotate(self.wk(y).view(b, t, self.groups, self.dim).transpose(1, 2), cos, sin)
        v = self.wv(y).view(b, t, self.groups, self.dim).transpose(1, 2)
        k, v = (z.repeat_interleave(self.heads // self.groups, dim=1) for z in (k, v))
        scores = q @ k.transpose(2, 3) / self.dim**0.5
        mask = torch.full((t, t), float("-inf"), device=x.device).triu(1)
        y = (scores + mask.to(x.dtype)).softmax(-1) @ v
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, vocab=30, width=16, heads=4, groups=2, seq=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups) for _ in range(2))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocab, bias=False)
        dim = width // heads
        angles = torch.outer(torch.arange(seq).float(), 10000.0 ** (-torch.arange(0, dim, 2).float() / dim))
        angles = torch.cat([angles, angles], -1).to(torch.get_default_dtype())
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def build():
    return Llama(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), lambda g: (
        torch.randint(30, (6, 6), generator=g),
        torch.randint(30, (6, 6), generator=g),
    )

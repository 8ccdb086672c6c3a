"""T5 (Raffel et al. 2020): encoder and decoder, cross attention, relative position bias in logarithmic buckets."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def bucket(apart, both, buckets=8, far=16):
    found = 0
    if both:
        buckets //= 2
        found = (apart > 0).long() * buckets
        apart = apart.abs()
    else:
        apart = -torch.min(apart, torch.zeros_like(apart))
    exact = buckets // 2
    large = exact + (torch.log(apart.float() / exact) / math.log(far / exact) * (buckets - exact)).long()
    large = torch.min(large, torch.full_like(large, buckets - 1))
    return found + torch.where(apart < exact, apart, large)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, memory, bias):
        def split(y):
            return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

        scores = torch.matmul(split(self.q(x)), split(self.k(memory)).transpose(3, 2))
        if bias is not None:
            scores += bias
        y = torch.matmul(F.softmax(scores, dim=-1), split(self.v(memory)))
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width, heads, cross):
        super().__init__()
        self.own, self.norm1 = Attention(width, heads), Norm(width)
        self.cross, self.norm2 = (Attention(width, heads), Norm(width)) if cross else (None, None)
        self.wi, self.wo, self.norm3 = nn.Linear(width, 24, bias=False), nn.Linear(24, width, bias=False), Norm(width)

    def forward(self, x, bias, memory=None):
        y = self.norm1(x)
        x = x + self.own(y, y, bias)
        if self.cross is not None:
            x = x + self.cross(self.norm2(x), memory, None)
        return x + self.wo(F.relu(self.wi(self.norm3(x))))


class T5(nn.Module):
    def __init__(self, vocab=24, width=12, heads=2):
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.bias_in, self.bias_out = nn.Embedding(8, heads), nn.Embedding(8, heads)
        self.encoder, self.decoder = Block(width, heads, False), Block(width, heads, True)
        self.norm, self.head = Norm(width), nn.Linear(width, vocab, bias=False)

    def bias(self, table, n, both):
        at = torch.arange(n)
        b = table(bucket(at[None, :] - at[:, None], both)).permute(2, 0, 1)[None]
        if not both:
            b = b + torch.full((n, n), -1e9).triu(1).to(b.dtype)
        return b

    def forward(self, source, target):
        memory = self.encoder(self.shared(source), self.bias(self.bias_in, source.shape[1], True))
        y = self.decoder(self.shared(target), self.bias(self.bias_out, target.shape[1], False), memory)
        return self.head(self.norm(y))


def build():
    return T5(), lambda out, y: F.cross_entropy(out.transpose(1, 2), y), lambda g: (
        {"source": torch.randint(24, (6, 7), generator=g), "target": torch.randint(24, (6, 5), generator=g)},
        torch.randint(24, (6, 5), generator=g),
    )

"""Causal linear attention (Katharopoulos et al. 2020): feature maps, running sums in place of a softmax."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1) for y in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        weight = torch.einsum("bthd,bthd->bth", q, k.cumsum(1)).clamp_min(1e-6)
        return x + self.out((torch.einsum("bthd,bthde->bthe", q, state) / weight.unsqueeze(-1)).reshape(b, t, c))


class Model(nn.Module):
    def __init__(self, vocab=20, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(Layer(width, 2), Layer(width, 2))
        self.head = nn.Linear(width, vocab)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def build():
    return Model(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), lambda g: (
        torch.randint(20, (6, 5), generator=g),
        torch.randint(20, (6, 5), generator=g),
    )

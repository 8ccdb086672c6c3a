"""A selective state space layer in the style of Mamba (Gu & Dao 2023), its scan written with cumulative sums."""

import torch
import torch.nn.functional as F
from torch import nn


class Mamba(nn.Module):
    def __init__(self, vocab=20, width=6, state=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.inside, self.outside = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.select, self.delta = nn.Linear(width, 2 * state, bias=False), nn.Linear(width, width)
        self.log_a = nn.Parameter(torch.log(torch.arange(1, state + 1).to(torch.get_default_dtype())).repeat(width, 1))
        self.d = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        t = x.shape[1]
        u, gate = self.inside(x).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :t]).transpose(1, 2)
        b, c = self.select(u).chunk(2, dim=-1)
        delta = F.softplus(self.delta(u))
        decay = torch.cumsum(delta.unsqueeze(-1) * -self.log_a.exp(), dim=1)
        driven = (delta * u).unsqueeze(-1) * b.unsqueeze(2) * torch.exp(-decay)
        h = torch.cumsum(driven, dim=1) * torch.exp(decay)
        y = (h * c.unsqueeze(2)).sum(-1) + self.d * u
        return self.head(x + self.outside(y * F.silu(gate)))


def build():
    return Mamba(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), lambda g: (
        torch.randint(20, (6, 5), generator=g),
        torch.randint(20, (6, 5), generator=g),
    )

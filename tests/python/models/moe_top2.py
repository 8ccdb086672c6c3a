"""Mixture of experts with top-2 gates (Shazeer et al. 2017; Mixtral 2024): stacked expert weights, dense dispatch."""

import torch
import torch.nn.functional as F
from torch import nn


class Moe(nn.Module):
    def __init__(self, width=12, hidden=16, experts=4, classes=5):
        super().__init__()
        self.inside = nn.Linear(10, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(experts, width, hidden))
        self.down = nn.Parameter(0.3 * torch.randn(experts, hidden, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.inside(x)
        weight, index = torch.topk(self.gate(x), 2, dim=-1)
        weight = weight.softmax(-1)
        combine = torch.zeros(*x.shape[:-1], self.up.shape[0], dtype=x.dtype).scatter(-1, index, weight)
        hidden = F.silu(torch.einsum("btd,edh->ebth", x, self.up))
        outputs = torch.einsum("ebth,ehd->ebtd", hidden, self.down)
        y = torch.einsum("bte,ebtd->btd", combine, outputs)
        return self.head(self.norm(x + y))


def build():
    return Moe(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), lambda g: (
        torch.randn(6, 4, 10, generator=g),
        torch.randint(5, (6, 4), generator=g),
    )

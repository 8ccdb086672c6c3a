"""Switch Transformer layer (Fedus et al. 2022): top-1 routing, every expert on its tokens by a mask, balancing loss."""

import torch
import torch.nn.functional as F
from torch import nn


class Switch(nn.Module):
    def __init__(self, width=12, experts=4, classes=5):
        super().__init__()
        self.inside = nn.Linear(10, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.inside(x)
        probability = self.router(x).softmax(-1)
        gate, chosen = probability.max(dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + expert(x) * ((chosen == i).to(x.dtype) * gate).unsqueeze(-1)
        load = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1))
        return self.head(x + y), len(self.experts) * (load * probability.mean((0, 1))).sum()


def loss(output, targets):
    logits, balance = output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * balance


def build():
    return Switch(), loss, lambda g: (
        torch.randn(6, 4, 10, generator=g),
        torch.randint(5, (6, 4), generator=g),
    )

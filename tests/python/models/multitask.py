"""Several tasks on a frozen trunk: dict inputs, a dict of outputs, losses weighted by learned uncertainties."""

import torch
import torch.nn.functional as F
from torch import nn


class Multitask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 12), nn.ReLU())
        self.trunk.requires_grad_(False)
        self.meta = nn.Embedding(4, 12)
        self.shared = nn.Bilinear(12, 12, 8)
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, 5), "size": nn.Linear(8, 1), "tags": nn.Linear(8, 3)})
        self.log_variance = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in ("kind", "size", "tags")})

    def forward(self, x, group):
        y = torch.tanh(self.shared(self.trunk(x), self.meta(group)))
        return {name: head(y) for name, head in self.heads.items()}, self.log_variance


def loss(output, targets):
    y, log_variance = output
    losses = {
        "kind": F.cross_entropy(y["kind"], targets["kind"], weight=torch.linspace(0.5, 1.5, 5, dtype=y["kind"].dtype)),
        "size": F.huber_loss(y["size"].squeeze(-1), targets["size"]),
        "tags": F.multilabel_soft_margin_loss(y["tags"], targets["tags"]),
    }
    return sum(torch.exp(-log_variance[name]) * value + log_variance[name] for name, value in losses.items())


def build():
    def batch(g):
        real = torch.get_default_dtype()
        return (
            {"x": torch.randn(8, 10, generator=g), "group": torch.randint(4, (8,), generator=g)},
            {
                "kind": torch.randint(5, (8,), generator=g),
                "size": torch.randn(8, generator=g),
                "tags": torch.randint(2, (8, 3), generator=g).to(real),
            },
        )

    return Multitask(), loss, batch

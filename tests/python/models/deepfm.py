"""DeepFM (Guo et al. 2017): a factorisation machine and a perceptron on shared embeddings."""

import torch
import torch.nn.functional as F
from torch import nn


class DeepFm(nn.Module):
    def __init__(self, rows=40, fields=4, width=6):
        super().__init__()
        self.first, self.second = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(
            nn.Linear(fields * width, 16), nn.PReLU(), nn.LayerNorm(16), nn.Linear(16, 1)
        )

    def forward(self, x):
        v = self.second(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return torch.sigmoid(self.bias + self.first(x).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1))


def build():
    return DeepFm(), nn.BCELoss(), lambda g: (
        torch.randint(40, (9, 4), generator=g),
        torch.randint(2, (9,), generator=g).to(torch.get_default_dtype()),
    )

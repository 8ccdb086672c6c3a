"""DLRM (Naumov et al. 2019): embedding tables, pairwise products of features, two perceptrons."""

import torch
import torch.nn.functional as F
from torch import nn


class Dlrm(nn.Module):
    def __init__(self, tables=(30, 20, 10), width=6, dense=5):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in tables)
        self.bottom = nn.Sequential(nn.Linear(dense, 12), nn.ReLU(), nn.Linear(12, width), nn.ReLU())
        n = len(tables) + 1
        self.register_buffer("pairs", torch.tril_indices(n, n, -1))
        self.top = nn.Sequential(nn.Linear(width + n * (n - 1) // 2, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        features = torch.stack([x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(1)


def build():
    def batch(g):
        sparse = torch.stack([torch.randint(rows, (9,), generator=g) for rows in (30, 20, 10)], 1)
        return (torch.randn(9, 5, generator=g), sparse), torch.randint(2, (9,), generator=g).to(torch.get_default_dtype())

    return Dlrm(), nn.BCEWithLogitsLoss(), batch

"""A graph network on dense adjacency: a normalised convolution (Kipf & Welling 2017), then attention (GAT 2018)."""

import torch
import torch.nn.functional as F
from torch import nn


class Gnn(nn.Module):
    def __init__(self, features=6, width=8, classes=3):
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, width, bias=False)
        self.left, self.right = nn.Linear(width, 1, bias=False), nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x, adjacency):
        adjacency = adjacency + torch.eye(adjacency.shape[-1], dtype=x.dtype)
        degree = adjacency.sum(-1).clamp(min=1).rsqrt()
        normal = degree.unsqueeze(-1) * adjacency * degree.unsqueeze(-2)
        x = F.elu(self.first(normal @ x))
        y = self.second(x)
        scores = F.leaky_relu(self.left(y) + self.right(y).transpose(-1, -2), 0.2)
        weight = scores.masked_fill(adjacency == 0, float("-inf")).softmax(-1)
        return self.head(F.elu(weight @ y).amax(dim=1))


def build():
    def batch(g):
        edges = (torch.rand(6, 5, 5, generator=g) < 0.4).to(torch.get_default_dtype())
        edges = torch.maximum(edges, edges.transpose(1, 2)) * (1 - torch.eye(5))
        return (torch.randn(6, 5, 6, generator=g), edges), torch.randint(3, (6,), generator=g)

    return Gnn(), F.cross_entropy, batch

"""PointNet (Qi et al. 2017): a learned transform, the same perceptron for every point, a maximum over points."""

import torch
import torch.nn.functional as F
from torch import nn


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.matrix = nn.Linear(8, 9)
        self.points = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 1))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))

    def forward(self, x):
        t = torch.max(self.transform(x), 2, keepdim=False)[0]
        t = self.matrix(t).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        x = torch.bmm(t, x)
        x = torch.max(self.points(x), 2)[0]
        return F.log_softmax(self.head(x), dim=1), t


def loss(output, labels):
    logits, t = output
    straight = torch.bmm(t, t.transpose(2, 1)) - torch.eye(3, dtype=t.dtype)
    return F.nll_loss(logits, labels) + 0.001 * torch.mean(torch.norm(straight, dim=(1, 2)))


def build():
    return PointNet(), loss, lambda g: (
        torch.randn(6, 3, 10, generator=g),
        torch.randint(4, (6,), generator=g),
    )

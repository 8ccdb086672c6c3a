"""A neural ODE (Chen et al. 2018): Runge-Kutta steps of one small field, unrolled."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width + 1, 16), nn.Tanh(), nn.Linear(16, width))

    def forward(self, t, y):
        return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], dim=1))


class Ode(nn.Module):
    def __init__(self, width=3, steps=3):
        super().__init__()
        self.field, self.steps = Field(width), steps

    def forward(self, y):
        h = 1.0 / self.steps
        path = [y]
        for i in range(self.steps):
            t = i * h
            k1 = self.field(t, y)
            k2 = self.field(t + h / 2, y + h / 2 * k1)
            k3 = self.field(t + h / 2, y + h / 2 * k2)
            k4 = self.field(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y)
        return torch.stack(path[1:])


def loss(path, targets):
    return (path - targets.unsqueeze(0)).abs().mean() + 0.1 * path.var(dim=1).mean()


def build():
    return Ode(), loss, lambda g: (torch.randn(8, 3, generator=g), torch.randn(8, 3, generator=g))

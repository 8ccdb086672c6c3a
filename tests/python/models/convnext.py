"""ConvNeXt (Liu et al. 2022): depthwise convolutions, channels-last layer norm, layer scale."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-1 * torch.ones(width))

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.shrink(F.gelu(self.grow(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, width=8, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.down(self.blocks(self.stem(x)))
        return self.head(self.norm(x.mean([-2, -1])))


def build():
    return ConvNeXt(), nn.CrossEntropyLoss(label_smoothing=0.1), lambda g: (
        torch.randn(6, 3, 8, 8, generator=g),
        torch.randint(5, (6,), generator=g),
    )

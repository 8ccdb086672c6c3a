"""MobileNetV3 (Howard et al. 2019): inverted residuals, depthwise convolutions, squeeze-and-excitation, hard swish."""

import torch
import torch.nn.functional as F
from torch import nn


class Inverted(nn.Module):
    def __init__(self, width, grown):
        super().__init__()
        self.grow = nn.Sequential(nn.Conv2d(width, grown, 1, bias=False), nn.BatchNorm2d(grown), nn.Hardswish())
        self.depth = nn.Sequential(
            nn.Conv2d(grown, grown, 3, 1, 1, groups=grown, bias=False), nn.BatchNorm2d(grown), nn.ReLU6(inplace=True)
        )
        self.squeeze, self.excite = nn.Conv2d(grown, 4, 1), nn.Conv2d(4, grown, 1)
        self.shrink = nn.Sequential(nn.Conv2d(grown, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.depth(self.grow(x))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.shrink(scale * y)


class MobileNet(nn.Module):
    def __init__(self, width=6, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.blocks = nn.Sequential(Inverted(width, 12), Inverted(width, 12))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def build():
    return MobileNet(), F.cross_entropy, lambda g: (
        torch.randn(6, 3, 8, 8, generator=g),
        torch.randint(4, (6,), generator=g),
    )

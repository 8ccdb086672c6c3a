"""MLP-Mixer (Tolstikhin et al. 2021): mixes patches, then channels."""

import torch
import torch.nn.functional as F
from torch import nn


class Mix(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 16), nn.GELU(), nn.Linear(16, patches))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width=12, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(Mix(4, width), Mix(4, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(dim=1))


def build():
    return Mixer(), F.cross_entropy, lambda g: (
        torch.randn(8, 3, 8, 8, generator=g),
        torch.randint(5, (8,), generator=g),
    )

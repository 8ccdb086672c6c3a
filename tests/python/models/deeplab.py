"""DeepLab (Chen et al. 2018): dilated convolutions side by side, bilinear upsampling, a dice loss."""

import torch
import torch.nn.functional as F
from torch import nn


class DeepLab(nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.InstanceNorm2d(width, affine=True), nn.ReLU())
        self.pyramid = nn.ModuleList(nn.Conv2d(width, width, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.pooled = nn.Conv2d(width, width, 1)
        self.head = nn.Conv2d(4 * width, classes, 1)

    def forward(self, x):
        y = self.stem(x)
        parts = [F.relu(conv(y)) for conv in self.pyramid]
        parts.append(self.pooled(F.adaptive_avg_pool2d(y, 1)).expand_as(parts[0]))
        return F.interpolate(self.head(torch.cat(parts, 1)), size=x.shape[2:], mode="bilinear", align_corners=False)


def loss(logits, labels):
    p = logits.softmax(1)
    truth = (labels.unsqueeze(1) == torch.arange(logits.shape[1]).view(1, -1, 1, 1)).to(p.dtype)
    overlap = (p * truth).sum((2, 3))
    return F.cross_entropy(logits, labels) + 1 - ((2 * overlap + 1) / (p.sum((2, 3)) + truth.sum((2, 3)) + 1)).mean()


def build():
    return DeepLab(), loss, lambda g: (
        torch.randn(4, 3, 8, 8, generator=g),
        torch.randint(3, (4, 8, 8), generator=g),
    )

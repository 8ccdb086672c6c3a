"""GPT-2 and ResNet as their papers have them, for benches that need a model and no library."""

import torch
import torch.nn.functional as F
from torch import nn


class GPT(nn.Module):
    def __init__(self, layers, hidden, heads, vocabulary, length):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Parameter(torch.zeros(length, hidden))
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.LayerNorm(hidden)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1), persistent=False)

    def forward(self, tokens):
        h = self.norm(self.blocks(self.token(tokens) + self.position, self.mask))
        return (h @ self.token.weight.t()).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()

        def unit(a, b, size, s=1):
            return nn.Sequential(nn.Conv2d(a, b, size, s, size // 2, bias=False), nn.BatchNorm2d(b))

        self.one, self.two, self.three = unit(inside, width, 1), unit(width, width, 3, stride), unit(width, 4 * width, 1)
        self.short = unit(inside, 4 * width, 1, stride) if stride > 1 or inside != 4 * width else nn.Identity()

    def forward(self, x):
        return F.relu(self.three(F.relu(self.two(F.relu(self.one(x))))) + self.short(x))


def resnet(width=64, counts=(3, 4, 6, 3)):
    layers, inside = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
    for level, count in enumerate(counts):
        for i in range(count):
            layers.append(Block(inside, width << level, 2 if i == 0 and level else 1))
            inside = 4 * (width << level)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))

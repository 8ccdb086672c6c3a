"""Swin Transformer (Liu et al. 2021): attention in windows, shifted by rolling, with a relative position bias."""

import torch
import torch.nn.functional as F
from torch import nn

SIDE, WINDOW = 4, 2


def windows(x):
    b, h, w, c = x.shape
    x = x.view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, c)


def joined(x, b):
    n = SIDE // WINDOW
    x = x.view(b, n, n, WINDOW, WINDOW, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, SIDE, SIDE, -1)


class Block(nn.Module):
    def __init__(self, width, heads, shift):
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.bias = nn.Parameter(0.1 * torch.randn((2 * WINDOW - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + WINDOW - 1
        self.register_buffer("index", apart[..., 0] * (2 * WINDOW - 1) + apart[..., 1])
        region = torch.zeros(1, SIDE, SIDE, 1)
        if shift:
            region[:, -shift:] += 1
            region[:, :, -shift:] += 2
        region = windows(region).squeeze(-1)
        mask = (region[:, None, :] != region[:, :, None]).to(torch.get_default_dtype()) * -100
        self.register_buffer("mask", mask)

    def forward(self, x):
        b, h, w, c = x.shape
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = windows(y)
        q, k, v = self.qkv(y).view(y.shape[0], -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (c // self.heads) ** 0.5
        n = WINDOW * WINDOW
        scores = scores + self.bias[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1)
        scores = scores.view(b, -1, self.heads, n, n) + self.mask[None, :, None]
        y = scores.view(-1, self.heads, n, n).softmax(-1) @ v
        y = joined(self.out(y.transpose(1, 2).reshape(-1, n, c)), b)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, width=8, heads=2, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.Sequential(Block(width, heads, 0), Block(width, heads, 1))
        self.merge = nn.Linear(4 * width, 2 * width, bias=False)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.blocks(self.patch(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.merge(x).mean((1, 2)))


def build():
    return Swin(), F.cross_entropy, lambda g: (
        torch.randn(6, 3, 8, 8, generator=g),
        torch.randint(5, (6,), generator=g),
    )

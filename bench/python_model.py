"""The zoo's gpt and mlp as plain PyTorch, with the same names and operators, for bench/python_bench.py."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Linear):
    """As libtorch's C++ front end has it, which adds the bias by itself to tensors of three dimensions."""

    def forward(self, x):
        if x.dim() == 2:
            return torch.addmm(self.bias, x, self.weight.t())
        y = x.matmul(self.weight.t())
        y += self.bias
        return y


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = Linear(hidden, 3 * hidden), Linear(hidden, hidden)
        self.up, self.down = Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)

    def forward(self, x, mask):
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / math.sqrt(hidden // self.heads) + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, hidden)
        y = x + self.projection(y)
        return y + self.down(F.gelu(self.up(self.norm2(y))))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, seq, vocab):
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(vocab, hidden))
        self.positions = nn.Parameter(0.02 * torch.randn(seq, hidden))
        self.vocab, self.layers = vocab, layers
        for i in range(layers):
            setattr(self, f"block{i}", Block(hidden, heads))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens):
        seq = tokens.shape[1]
        mask = torch.full((seq, seq), float("-inf")).triu(1)
        x = F.embedding(tokens, self.tokens) + self.positions
        for i in range(self.layers):
            x = getattr(self, f"block{i}")(x, mask)
        return F.linear(self.norm(x), self.tokens).view(-1, self.vocab)


class Mlp(nn.Module):
    def __init__(self, layers, hidden, inputs, classes):
        super().__init__()
        self.layers = layers
        for i in range(layers - 1):
            setattr(self, f"hidden{i}", Linear(inputs if i == 0 else hidden, hidden))
        self.head = Linear(hidden, classes)

    def forward(self, x):
        for i in range(self.layers - 1):
            x = getattr(self, f"hidden{i}")(x).relu()
        return self.head(x)


def loss_fn(logits, targets):
    return F.cross_entropy(logits, targets.view(-1))


def labels_loss(logits, targets):
    return F.cross_entropy(logits, targets["labels"])


def gpt(batch, layers=2, hidden=256, heads=4, seq=64, vocab=512):
    draw = lambda: torch.randint(vocab, (batch, seq))  # noqa: E731
    return Gpt(layers, hidden, heads, seq, vocab), lambda: ({"tokens": draw()}, draw())


def mlp(batch, layers=4, hidden=1536, inputs=512, classes=100):
    
    def draw():
        return {"x": torch.randn(batch, inputs)}, {"labels": torch.randint(classes, (batch,))}

    return Mlp(layers, hidden, inputs, classes), draw

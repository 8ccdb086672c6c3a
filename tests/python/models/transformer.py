"""torch's own nn.Transformer (Vaswani et al. 2017), with causal and padding masks and a fixed table of positions."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Translator(nn.Module):
    def __init__(self, vocab=20, width=12, longest=10):
        super().__init__()
        self.embed, self.width = nn.Embedding(vocab, width), width
        self.transformer = nn.Transformer(width, 2, 1, 1, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocab)
        at = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("table", table.to(torch.get_default_dtype()))

    def forward(self, source, target):
        a = self.embed(source) * math.sqrt(self.width) + self.table[: source.shape[1]]
        b = self.embed(target) * math.sqrt(self.width) + self.table[: target.shape[1]]
        causal = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
        padding = source.eq(0)
        y = self.transformer(a, b, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.head(y)


def build():
    def batch(g):
        source = torch.randint(1, 20, (6, 7), generator=g)
        source[1, 5:] = 0
        return (source, torch.randint(1, 20, (6, 5), generator=g)), torch.randint(20, (6, 5), generator=g)

    return Translator(), lambda out, y: F.cross_entropy(out.reshape(-1, 20), y.reshape(-1)), batch

"""LSTM (Hochreiter & Schmidhuber 1997) by unrolled steps over a sequence of tokens."""

import torch
import torch.nn.functional as F
from torch import nn


class Lstm(nn.Module):
    def __init__(self, vocab=20, width=12):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(vocab, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = x.new_zeros(x.shape[0], self.width)
        c = x.new_zeros(x.shape[0], self.width)
        outputs = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            outputs.append(h)
        return self.head(torch.stack(outputs, dim=1))


def build():
    return Lstm(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), lambda g: (
        torch.randint(20, (6, 5), generator=g),
        torch.randint(20, (6, 5), generator=g),
    )

"""ALBERT (Lan et al. 2020): one layer applied several times, a narrow embedding, a loss that the model returns."""

import torch
import torch.nn.functional as F
from torch import nn


class Albert(nn.Module):
    def __init__(self, vocab=20, narrow=4, width=12):
        super().__init__()
        self.embed, self.widen = nn.Embedding(vocab, narrow), nn.Linear(narrow, width)
        self.layer = nn.TransformerEncoderLayer(width, 3, 24, dropout=0.0, batch_first=True)
        self.pool, self.order = nn.Linear(width, width), nn.Linear(width, 2)
        self.narrow = nn.Linear(width, narrow)

    def forward(self, tokens, labels, ordered):
        x = self.widen(self.embed(tokens))
        for _ in range(3):
            x = self.layer(x)
        words = F.linear(self.narrow(x), self.embed.weight)
        order = self.order(torch.tanh(self.pool(x[:, 0])))
        return {"loss": F.cross_entropy(words.permute(0, 2, 1), labels) + F.cross_entropy(order, ordered), "words": words}


def build():
    return Albert(), None, lambda g: (
        {
            "tokens": torch.randint(20, (6, 5), generator=g),
            "labels": torch.randint(20, (6, 5), generator=g),
            "ordered": torch.randint(2, (6,), generator=g),
        },
    )

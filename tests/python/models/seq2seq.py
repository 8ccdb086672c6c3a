"""Sequence to sequence with additive attention (Bahdanau et al. 2015), recurrent steps unrolled."""

import torch
import torch.nn.functional as F
from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self, vocab=16, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.encoder, self.decoder = nn.GRUCell(width, width), nn.GRUCell(2 * width, width)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, source, target):
        x, y = self.embed(source), self.embed(target)
        h = torch.zeros(x.size(0), x.size(2), dtype=x.dtype)
        memory = []
        for i in range(x.size(1)):
            h = self.encoder(x[:, i], h)
            memory.append(h)
        memory = torch.stack(memory, 1)
        keys, outputs = self.key(memory), []
        for i in range(y.size(1)):
            weight = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1).softmax(-1)
            context = torch.bmm(weight.unsqueeze(1), memory).squeeze(1)
            h = self.decoder(torch.cat([y[:, i], context], -1), h)
            outputs.append(self.head(torch.cat([h, context], -1)))
        return torch.stack(outputs, 1)


def build():
    return Seq2Seq(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), lambda g: (
        (torch.randint(16, (6, 4), generator=g), torch.randint(16, (6, 3), generator=g)),
        torch.randint(16, (6, 3), generator=g),
    )

"""BERT (Devlin et al. 2019): three embeddings, a padding mask, a masked-token head tied to the embedding."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, padding):
        x = self.norm1(x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])
        return self.norm2(x + self.shrink(F.gelu(self.grow(x))))


class Bert(nn.Module):
    def __init__(self, vocab=24, width=12, seq=6):
        super().__init__()
        self.words, self.segments = nn.Embedding(vocab, width, padding_idx=0), nn.Embedding(2, width)
        self.positions = nn.Embedding(seq, width)
        self.register_buffer("position_ids", torch.arange(seq).expand(1, -1))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(2))
        self.transform = nn.Linear(width, width)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.words.weight

    def forward(self, tokens, segments):
        padding = tokens == 0
        x = self.norm(self.words(tokens) + self.segments(segments) + self.positions(self.position_ids))
        for layer in self.layers:
            x = layer(x, padding)
        return self.decoder(torch.tanh(self.transform(x)))


def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def build():
    def batch(g):
        tokens = torch.randint(1, 24, (6, 6), generator=g)
        tokens[::2, 4:] = 0
        labels = torch.where(torch.rand(6, 6, generator=g) < 0.4, tokens, torch.full_like(tokens, -100))
        labels[:, 0] = tokens[:, 0]
        return (tokens, torch.randint(2, (6, 6), generator=g)), labels

    return Bert(), loss, batch

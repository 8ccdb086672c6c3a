"""What people write with torch 2: its attention, its norms, compiled modules."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from corpus import case

SEQ, WIDTH, VOCABULARY = 6, 16, 20


class Attention(nn.Module):
    """Grouped queries; `how` are further arguments of the attention, made from the batch."""

    def __init__(self, heads=4, shared=2, how=None):
        super().__init__()
        self.heads, self.shared, self.how = heads, shared, how or (lambda x: {"is_causal": True})
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH * shared // heads)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, self.shared, -1).permute(2, 0, 3, 1, 4)
        grouped = {"enable_gqa": True} if self.shared < self.heads else {}
        y = F.scaled_dot_product_attention(q, k, v, **self.how(x), **grouped)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class Model(nn.Module):
    def __init__(self, attention, norm=nn.LayerNorm, wrap=lambda f, x: f(x)):
        super().__init__()
        self.embed, self.head, self.wrap = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), wrap
        self.attentions = nn.ModuleList(copy.deepcopy(attention) for _ in range(3))
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.embed(x)
        for attention, norm in zip(self.attentions, self.norms):
            y = y + self.wrap(lambda z, attention=attention, norm=norm: attention(norm(z)), y)
        return self.head(y)


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(g):
    return torch.randint(VOCABULARY, (6, SEQ), generator=g), torch.randint(VOCABULARY, (6, SEQ), generator=g)


def mask_of_rows(x):
    """A boolean mask that differs from row to row, in which every query may see itself."""
    kept = x.detach()[:, None, None, :, 0] > 0
    return {"attn_mask": kept | torch.eye(x.shape[1], dtype=torch.bool)}


def added_mask(x):
    return {"attn_mask": torch.linspace(-1, 1, x.shape[1] ** 2, dtype=x.dtype).view(x.shape[1], -1), "scale": 0.5}


@case()
def grouped_queries():
    return Model(Attention()), loss, batch


@case()
def every_head_for_itself():
    return Model(Attention(shared=4)), loss, batch


@case()
def boolean_mask():
    return Model(Attention(how=mask_of_rows)), loss, batch


@case()
def added_mask_and_scale():
    return Model(Attention(how=added_mask)), loss, batch


@case()
def one_head_for_all():
    return Model(Attention(shared=1)), loss, batch


@case()
def rms_norm():
    return Model(Attention(), nn.RMSNorm), loss, batch


@case()
def compiled_model():
    return torch.compile(Model(Attention()), backend="eager"), loss, batch


@case()
def compiled_inside():
    model = Model(Attention())
    model.attentions[1].compile(backend="eager")
    return model, loss, batch


@case()
def computed_again():
    return Model(Attention(), wrap=lambda f, x: checkpoint(f, x, use_reentrant=False)), loss, batch


class Answer(dict):
    """As libraries return: by key and by attribute."""

    __getattr__ = dict.__getitem__


class Told(Model):
    def forward(self, x, labels=None):
        logits = super().forward(x)
        return Answer(loss=loss(logits, labels), logits=logits)


@case()
def an_answer_with_a_loss():
    def given(g):
        x, y = batch(g)
        return ({"x": x, "labels": y},)

    return Told(Attention()), None, given

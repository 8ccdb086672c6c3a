"""Rotary positions in complex numbers, as people write them: the factors in a buffer, an attribute, a global, or made in the forward pass."""

import torch
import torch.nn.functional as F
from torch import nn

from corpus import case

SEQ, WIDTH, VOCABULARY, LONGEST = 6, 16, 20, 4096  # two factors for each of 4,096 positions: too many for constants


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].double() / dim))
    t = torch.arange(end, device=freqs.device, dtype=freqs.dtype)
    freqs = torch.outer(t, freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def reshape_for_broadcast(freqs_cis, x):
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    return freqs_cis.view(*[d if i in (1, x.ndim - 1) else 1 for i, d in enumerate(x.shape)])


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.double().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.double().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = reshape_for_broadcast(freqs_cis, xq_)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x, n_rep):
    bs, slen, n_kv_heads, head_dim = x.shape
    return x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim).reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, heads, kv_heads, rotate):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.rotate = heads, kv_heads, WIDTH // heads, rotate
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, kv_heads * self.dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, freqs_cis, mask):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.heads, self.dim)
        xk, xv = (w(x).view(bsz, seqlen, self.kv_heads, self.dim) for w in (self.wk, self.wv))
        xq, xk = self.rotate(xq, xk, freqs_cis)
        xk, xv = (repeat_kv(y, self.heads // self.kv_heads).transpose(1, 2) for y in (xk, xv))
        scores = torch.matmul(xq.transpose(1, 2), xk.transpose(2, 3)) / self.dim**0.5 + mask
        output = torch.matmul(F.softmax(scores, dim=-1), xv)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class Block(nn.Module):
    def __init__(self, *attention):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(*attention), RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.w1, self.w3 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x, freqs_cis, mask):
        x = x + self.attention(self.norm1(x), freqs_cis, mask)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    """As Meta's Llama has it; `factors(model, seqlen)` are those of the positions of a batch."""

    def __init__(self, factors, heads=4, kv_heads=4, rotate=apply_rotary_emb, layers=2):
        super().__init__()
        self.factors = factors
        self.tok_embeddings, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Block(heads, kv_heads, rotate) for _ in range(layers))
        self.norm = RMSNorm(WIDTH)

    def forward(self, tokens):
        seqlen = tokens.shape[1]
        h, freqs_cis = self.tok_embeddings(tokens), self.factors(self, seqlen)
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device).triu(1).type_as(h)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h))


def batch(g):
    return torch.randint(VOCABULARY, (6, SEQ), generator=g), torch.randint(VOCABULARY, (6, SEQ), generator=g)


def trained(model):
    return model, lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()), batch


def held(model, seqlen):
    return model.freqs_cis[:seqlen]


@case()
def attribute():
    model = Transformer(lambda model, seqlen: model.freqs_cis.to(model.norm.weight.device)[:seqlen])
    model.freqs_cis = precompute_freqs_cis(4, LONGEST)
    return trained(model)


@case()
def buffer():
    model = Transformer(held)
    model.register_buffer("freqs_cis", precompute_freqs_cis(4, LONGEST))
    return trained(model)


@case()
def transient_buffer():
    """Grouped queries; the buffer is not saved."""
    model = Transformer(held, kv_heads=2)
    model.register_buffer("freqs_cis", precompute_freqs_cis(4, LONGEST), persistent=False)
    return trained(model)


OUTSIDE = precompute_freqs_cis(4, 32)


@case()
def outside():
    return trained(Transformer(lambda model, seqlen: OUTSIDE[2 : 2 + seqlen], kv_heads=1))


@case()
def in_the_forward_pass():
    """With the exponential of an imaginary number."""

    def factors(model, seqlen):
        freqs = 10000.0 ** -(torch.arange(0, 4, 2, device=model.norm.weight.device) / 4)
        return torch.exp(1j * torch.outer(torch.arange(seqlen, device=freqs.device), freqs))

    return trained(Transformer(factors))


@case()
def learned():
    """Factors of which the angles are parameters."""
    model = Transformer(lambda model, seqlen: torch.polar(model.size.expand(seqlen, 2), model.angles[:seqlen]))
    model.angles, model.size = nn.Parameter(torch.randn(SEQ, 2)), nn.Parameter(torch.ones(2))
    return trained(model)


def rotate_heads_first(xq, xk, freqs_cis):
    """In place, over [batch, heads, positions, dim], keys backwards."""
    rotated = []
    for x, factors in ((xq, freqs_cis), (xk, freqs_cis.conj().resolve_conj())):
        z = torch.view_as_complex(torch.stack(x.transpose(1, 2).chunk(2, -1), -1))
        z *= factors[None, None]
        rotated.append(torch.cat([z.real, z.imag], dim=-1).transpose(1, 2))
    return rotated


@case()
def halves():
    """Pairs that are halves of a head, in place."""
    model = Transformer(held, kv_heads=2, rotate=rotate_heads_first)
    model.register_buffer("freqs_cis", precompute_freqs_cis(4, 16))
    return trained(model)


def rotate_two_axes(xq, xk, freqs_cis):
    """As images have it: a part of each head for rows, one for columns, each with its own factors."""
    rows, columns = freqs_cis.chunk(2, dim=1)
    where = torch.cat([rows[:2].repeat(3, 1), columns[:3].unsqueeze(1).expand(3, 2, -1).flatten(0, 1)], dim=-1).unsqueeze(1)
    return [torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * where).flatten(3, 4).type_as(x) for x in (xq, xk)]


@case()
def two_axes():
    model = Transformer(held, heads=2, kv_heads=2, rotate=rotate_two_axes)
    model.freqs_cis = torch.cat([precompute_freqs_cis(4, 16), precompute_freqs_cis(4, 16, 100.0)], dim=1)
    return trained(model)

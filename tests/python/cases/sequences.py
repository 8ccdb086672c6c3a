"""Building blocks of architectures on sequences, sets and graphs, each a small model that trains. See blocks.py."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from cases.blocks import EITHER, Of, classes
from corpus import case


def tokens(g):
    return torch.randint(20, (12, 6), generator=g), torch.randint(20, (12, 6), generator=g)


def by_token(y, t):
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def language(**modules):
    return {"embed": nn.Embedding(20, 16), **modules, "head": nn.Linear(16, 20)}


# ---- sequences ---------------------------------------------------------------------------------------------------------


@case(refused=EITHER)
def bidirectional_lstm():
    def forward(m, x):
        return m.head(m.body(m.embed(x))[0])

    return Of(forward, **language(body=nn.LSTM(16, 8, batch_first=True, bidirectional=True))), by_token, tokens


@case(refused=EITHER)
def gated_recurrent():
    def forward(m, x):
        return m.head(m.body(m.embed(x))[0])

    return Of(forward, **language(body=nn.GRU(16, 16, num_layers=2, batch_first=True))), by_token, tokens


@case(refused=EITHER)
def recurrent():
    def forward(m, x):
        return m.head(m.body(m.embed(x))[0])

    return Of(forward, **language(body=nn.RNN(16, 16, batch_first=True, nonlinearity="relu"))), by_token, tokens


def attention(q, k, v, mask=None, bias=None):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return scores.softmax(-1) @ v


def heads(x, n):
    return x.view(*x.shape[:-1], n, -1).transpose(-2, -3)


def joined(x):
    return x.transpose(-2, -3).flatten(-2)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)


@case()
def causal_attention():
    def forward(m, x):
        x = m.embed(x)
        q, k, v = (heads(part, 4) for part in m.qkv(x).chunk(3, -1))
        return m.head(x + m.out(joined(attention(q, k, v, CAUSAL))))

    return Of(forward, **language(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))), by_token, tokens


@case()
def distance_bias():
    def forward(m, x):
        x = m.embed(x)
        q, k, v = (heads(part, 4) for part in m.qkv(x).chunk(3, -1))
        distance = (torch.arange(6)[None] - torch.arange(6)[:, None]).to(x.dtype)
        slopes = 2.0 ** -torch.arange(1.0, 5.0)
        return m.head(x + m.out(joined(attention(q, k, v, CAUSAL, distance * slopes[:, None, None]))))

    return Of(forward, **language(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))), by_token, tokens


@case()
def relative_positions():
    def forward(m, x):
        x = m.embed(x)
        q, k, v = (heads(part, 4) for part in m.qkv(x).chunk(3, -1))
        distance = (torch.arange(6)[None] - torch.arange(6)[:, None]).clamp(-3, 3) + 3
        return m.head(x + m.out(joined(attention(q, k, v, bias=m.bias(distance).permute(2, 0, 1)))))

    return Of(forward, **language(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16), bias=nn.Embedding(7, 4))), by_token, tokens


@case()
def rotary():
    def turned(x):
        angles = torch.arange(6.0)[:, None] * 100 ** (-torch.arange(0, 2.0) / 2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(m, x):
        x = m.embed(x)
        q, k, v = (heads(part, 4) for part in m.qkv(x).chunk(3, -1))
        return m.head(x + m.out(joined(attention(turned(q), turned(k), v, CAUSAL))))

    return Of(forward, **language(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))), by_token, tokens


@case()
def one_head_of_keys():
    def forward(m, x):
        x = m.embed(x)
        q, k, v = heads(m.q(x), 4), m.k(x).unsqueeze(1), m.v(x).unsqueeze(1)
        return m.head(x + m.out(joined(attention(q, k, v, CAUSAL))))

    return Of(forward, **language(q=nn.Linear(16, 16), k=nn.Linear(16, 4), v=nn.Linear(16, 4), out=nn.Linear(16, 16))), by_token, tokens


@case()
def grouped_queries():
    def forward(m, x):
        x = m.embed(x)
        q, (k, v) = heads(m.q(x), 4), (heads(part, 2).repeat_interleave(2, 1) for part in m.kv(x).chunk(2, -1))
        return m.head(x + m.out(joined(attention(q, k, v, CAUSAL))))

    return Of(forward, **language(q=nn.Linear(16, 16), kv=nn.Linear(16, 16), out=nn.Linear(16, 16))), by_token, tokens


@case()
def windows():
    def forward(m, x):
        x = m.embed(x)
        w = x.view(x.shape[0], 3, 2, 16)
        q, k, v = (heads(part, 4) for part in m.qkv(w).chunk(3, -1))
        return m.head(x + m.out(joined(attention(q, k, v)).flatten(1, 2)))

    return Of(forward, **language(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))), by_token, tokens


@case()
def attention_without_softmax():
    def forward(m, x):
        x = m.embed(x)
        q, k, v = (heads(part, 2) for part in m.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        y = q @ (k.transpose(-1, -2) @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        return m.head(x + m.out(joined(y)))

    return Of(forward, **language(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))), by_token, tokens


@case()
def encoder_with_both_masks():
    def forward(m, x):
        pad = x > 17
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        return m.head(m.body(m.embed(x), mask.to(torch.get_default_dtype()), pad & (torch.arange(6) > 0)))

    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True), 2)
    return Of(forward, **language(body=body)), by_token, tokens


@case()
def decoder_on_a_memory():
    def forward(m, x, memory):
        return m.head(m.body(m.embed(x), m.inside(memory), tgt_mask=CAUSAL))

    def batch(g):
        x, y = tokens(g)
        return (x, torch.randn(12, 4, 10, generator=g)), y

    body = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, 0.0, batch_first=True, norm_first=True), 2)
    return Of(forward, **language(body=body, inside=nn.Linear(10, 16))), by_token, batch


@case()
def pooled_by_attention():
    def forward(m, x):
        query = m.query.expand(x.shape[0], -1, -1)
        x = F.relu(m.inside(x))
        return m.head(m.attention(query, x, x, need_weights=False)[0].squeeze(1))

    model = Of(forward, inside=nn.Linear(6, 16), attention=nn.MultiheadAttention(16, 4, batch_first=True), head=nn.Linear(16, 5))
    model.query = nn.Parameter(torch.randn(1, 1, 16))
    return model, F.cross_entropy, classes(7, 6)


@case(refused=EITHER)
def mixing_by_fourier():
    def forward(m, x):
        x = m.embed(x)
        return m.head(x + m.norm(torch.fft.fft2(x).real))

    return Of(forward, **language(norm=nn.LayerNorm(16))), by_token, tokens


@case()
def gated_mixing_of_positions():
    def forward(m, x):
        x = m.embed(x)
        u, v = F.gelu(m.up(x)).chunk(2, -1)
        return m.head(x + m.down(u * m.mix(m.norm(v).transpose(1, 2)).transpose(1, 2)))

    return Of(forward, **language(up=nn.Linear(16, 32), norm=nn.LayerNorm(16), mix=nn.Linear(6, 6), down=nn.Linear(16, 16))), by_token, tokens


@case()
def time_mixing():
    def forward(m, x):
        x = m.embed(x)
        before = F.pad(x, (0, 0, 1, -1))
        k, v = m.k(x * 0.5 + before * 0.5), m.v(x * 0.3 + before * 0.7)
        above = below = torch.zeros_like(k[:, 0])
        outputs = []
        for t in range(6):
            weight = k[:, t].clamp(max=5).exp()
            outputs.append((above + weight * v[:, t]) / (below + weight))
            above, below = 0.8 * above + weight * v[:, t], 0.8 * below + weight
        return m.head(x + m.out(torch.stack(outputs, 1) * torch.sigmoid(m.r(x))))

    return Of(forward, **language(k=nn.Linear(16, 16), v=nn.Linear(16, 16), r=nn.Linear(16, 16), out=nn.Linear(16, 16))), by_token, tokens


@case()
def diagonal_state_space():
    def forward(m, x):
        x = m.embed(x)
        decay = torch.sigmoid(m.decay)
        kernel = decay[:, None] ** torch.arange(6).to(x.dtype)
        shift = torch.arange(6)[:, None] - torch.arange(6)[None]
        table = kernel[:, shift.clamp(min=0)] * (shift >= 0)
        return m.head(x + torch.einsum("cts,bsc->btc", table, m.inside(x)))

    model = Of(forward, **language(inside=nn.Linear(16, 16)))
    model.decay = nn.Parameter(torch.randn(16))
    return model, by_token, tokens


@case()
def chain_of_labels():
    """The partition function of a linear chain, by logsumexp."""

    def forward(m, x, y):
        scores = m.head(torch.tanh(m.embed(x)))
        alpha = scores[:, 0]
        for t in range(1, 6):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + m.transitions, 1) + scores[:, t]
        right = scores.gather(2, y.unsqueeze(2)).sum((1, 2)) + m.transitions[y[:, :-1], y[:, 1:]].sum(1)
        return {"loss": (torch.logsumexp(alpha, 1) - right).mean()}

    model = Of(forward, embed=nn.Embedding(20, 16), head=nn.Linear(16, 4))
    model.transitions = nn.Parameter(torch.randn(4, 4))
    return model, None, lambda g: ((torch.randint(20, (12, 6), generator=g), torch.randint(4, (12, 6), generator=g)),)


# ---- sets and graphs ---------------------------------------------------------------------------------------------------


@case()
def sets():
    model = Of(lambda m, x: m.after(torch.cat([m.before(x).sum(1), m.before(x).amax(1)], -1)),
               before=nn.Sequential(nn.Linear(3, 16), nn.ReLU()), after=nn.Linear(32, 5))  # fmt: skip
    return model, F.cross_entropy, classes(8, 3)


@case()
def messages_on_edges():
    def forward(m, x, edges):
        x = torch.tanh(m.inside(x))
        source = x.gather(1, edges[:, :, :1].expand(-1, -1, 16))
        target = edges[:, :, 1:].expand(-1, -1, 16)
        x = x + torch.zeros_like(x).scatter_add(1, target, m.message(source))
        return m.head(x.mean(1))

    def batch(g):
        return (torch.randn(12, 5, 4, generator=g), torch.randint(5, (12, 9, 2), generator=g)), torch.randint(5, (12,), generator=g)

    return Of(forward, inside=nn.Linear(4, 16), message=nn.Linear(16, 16), head=nn.Linear(16, 5)), F.cross_entropy, batch


@case()
def bag_of_words():
    def batch(g):
        return torch.randint(30, (12, 5), generator=g), torch.randint(5, (12,), generator=g)

    return Of(lambda m, x: m.head(m.embed(x)), embed=nn.EmbeddingBag(30, 8, mode="mean"), head=nn.Linear(8, 5)), F.cross_entropy, batch


@case()
def bags_of_a_large_table():
    """So large that capture makes no trial of it; what it leaves for its backward pass has other shapes on Meta tensors."""

    def batch(g):
        words = torch.randint(33_000, (12, 5), generator=g)
        return words, torch.randint(5, (12,), generator=g)

    def forward(m, x):
        return m.head(m.sums(x, per_sample_weights=m.weights.expand(len(x), 5)) + m.largest(x % 30))

    model = Of(forward, sums=nn.EmbeddingBag(33_000, 8, mode="sum"), largest=nn.EmbeddingBag(30, 8, mode="max"), head=nn.Linear(8, 5))
    model.weights = nn.Parameter(torch.rand(5))
    return model, F.cross_entropy, batch


@case()
def distances_to_prototypes():
    model = Of(lambda m, x: -torch.cdist(m.body(x), m.prototypes), body=nn.Linear(6, 8))
    model.prototypes = nn.Parameter(torch.randn(5, 8))
    return model, F.cross_entropy, classes(6)


@case()
def memory_read_by_content():
    def forward(m, x):
        weight = (F.normalize(m.key(x), dim=-1) @ F.normalize(m.memory, dim=-1).t() * 4).softmax(-1)
        return m.head(weight @ m.memory)

    model = Of(forward, key=nn.Linear(6, 8), head=nn.Linear(8, 5))
    model.memory = nn.Parameter(torch.randn(7, 8))
    return model, F.cross_entropy, classes(6)


@case()
def experts_weighted_softly():
    def forward(m, x):
        outputs = torch.stack([expert(x) for expert in m.experts], 1)
        return (m.gate(x).softmax(-1).unsqueeze(-1) * outputs).sum(1)

    return Of(forward, gate=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 5) for _ in range(3))), F.cross_entropy, classes(6)


@case()
def exits_on_the_way():
    def forward(m, x):
        outputs = []
        for body, head in zip(m.bodies, m.heads):
            x = F.relu(body(x))
            outputs.append(head(x))
        return outputs

    def loss(y, t):
        return sum(weight * F.cross_entropy(each, t) for weight, each in zip((0.2, 0.3, 1.0), y))

    return Of(forward, bodies=nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)]),
              heads=nn.ModuleList(nn.Linear(16, 5) for _ in range(3))), loss, classes(6)  # fmt: skip


@case()
def quantised_codebook():
    def forward(m, x):
        z = m.encode(x)
        nearest = (z.unsqueeze(1) - m.codes).square().sum(-1).argmin(-1)
        q = m.codes[nearest]
        straight = z + (q - z).detach()
        y = m.decode(straight)
        return {"loss": F.mse_loss(y, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())}

    model = Of(forward, encode=nn.Linear(6, 4), decode=nn.Linear(4, 6))
    model.codes = nn.Parameter(torch.randn(8, 4))
    return model, None, lambda g: ((torch.randn(12, 6, generator=g),),)


@case()
def routing_by_agreement():
    def forward(m, x):
        u = torch.einsum("bi,icd->bicd", x, m.weight)
        b = torch.zeros(x.shape[0], 6, 5)
        for _ in range(2):
            v = (b.softmax(-1).unsqueeze(-1) * u).sum(1)
            square = v.square().sum(-1, keepdim=True)
            v = v * square / (1 + square) / (square + 1e-9).sqrt()
            b = b + (u * v.unsqueeze(1)).sum(-1)
        return v.norm(dim=-1)

    model = Of(forward)
    model.weight = nn.Parameter(torch.randn(6, 5, 4))
    return model, lambda y, t: F.multi_margin_loss(y, t), classes(6)

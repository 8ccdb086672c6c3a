"""Building blocks of architectures, each a small model that trains."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from corpus import case

EITHER = {"spmd": "either", "pipeline": "either"}


class Of(nn.Module):
    """A model from a function of (module, inputs...) and its modules."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def classes(*shape, n=5, rows=12):
    return lambda g: (torch.randn(rows, *shape, generator=g), torch.randint(n, (rows,), generator=g))


def values(*shape, to=(1,), rows=12):
    return lambda g: (torch.randn(rows, *shape, generator=g), torch.randn(rows, *to, generator=g))


def tokens(g):
    return torch.randint(20, (12, 6), generator=g), torch.randint(20, (12, 6), generator=g)


def by_token(y, t):
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def language(**modules):
    return {"embed": nn.Embedding(20, 16), **modules, "head": nn.Linear(16, 20)}


# ---- dense -------------------------------------------------------------------------------------------------------------


@case()
def residual_mlp():
    def forward(m, x):
        x = m.inside(x)
        for norm, up, down in zip(m.norms, m.ups, m.downs):
            x = x + down(F.silu(up(norm(x))))
        return m.head(x)

    return Of(
        forward, inside=nn.Linear(6, 16), head=nn.Linear(16, 5), norms=nn.ModuleList(nn.LayerNorm(16) for _ in range(3)),
        ups=nn.ModuleList(nn.Linear(16, 32) for _ in range(3)), downs=nn.ModuleList(nn.Linear(32, 16) for _ in range(3)),
    ), F.cross_entropy, classes(6)  # fmt: skip


@case(refused={"pipeline": "either"})
def batch_normalised_mlp():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=0.3),
                          nn.ReLU(), nn.Linear(16, 5))  # fmt: skip
    return model, F.cross_entropy, classes(6)


@case(refused={"pipeline": "either"})
def cumulative_batch_norm():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU(), nn.Linear(16, 5)), F.cross_entropy, classes(6)


@case()
def highway():
    def forward(m, x):
        x = m.inside(x)
        for gate, body in zip(m.gates, m.bodies):
            t = torch.sigmoid(gate(x))
            x = t * F.relu(body(x)) + (1 - t) * x
        return m.head(x)

    return Of(forward, inside=nn.Linear(6, 16), head=nn.Linear(16, 5), gates=nn.ModuleList(nn.Linear(16, 16) for _ in range(2)),
              bodies=nn.ModuleList(nn.Linear(16, 16) for _ in range(2))), F.cross_entropy, classes(6)  # fmt: skip


@case()
def autoencoder():
    model = nn.Sequential(nn.Linear(12, 8), nn.ELU(), nn.Linear(8, 3), nn.ELU(), nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 12))
    return Of(lambda m, x: F.mse_loss(m.body(x), x), body=model), lambda y: y, lambda g: (torch.randn(12, 12, generator=g),)


@case()
def fourier_features():
    def forward(m, x):
        angles = x.unsqueeze(-1) * (2.0 ** torch.arange(4)) * math.pi
        return m.body(torch.cat([angles.sin(), angles.cos()], -1).flatten(1))

    return Of(forward, body=nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))), F.mse_loss, values(3)


@case()
def sines():
    def forward(m, x):
        return m.c(torch.sin(3 * m.b(torch.sin(3 * m.a(x)))))

    return Of(forward, a=nn.Linear(3, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 1)), F.mse_loss, values(3)


@case()
def radial_splines():
    class Layer(nn.Module):
        """Kolmogorov-Arnold: each edge is a sum of radial functions."""

        def __init__(self, inputs, outputs):
            super().__init__()
            self.register_buffer("grid", torch.linspace(-2, 2, 5))
            self.weight = nn.Parameter(torch.randn(outputs, inputs, 5) * 0.2)

        def forward(self, x):
            basis = torch.exp(-((x.unsqueeze(-1) - self.grid.to(x.dtype)) ** 2))
            return torch.einsum("bik,oik->bo", basis, self.weight)

    return nn.Sequential(Layer(6, 8), Layer(8, 5)), F.cross_entropy, classes(6)


@case()
def conditioned_by_a_scale():
    def forward(m, x, c):
        scale, shift = m.condition(c).chunk(2, -1)
        return m.head(F.relu(m.body(x) * (1 + scale) + shift))

    def batch(g):
        return (torch.randn(12, 6, generator=g), torch.randn(12, 4, generator=g)), torch.randint(5, (12,), generator=g)

    return Of(forward, condition=nn.Linear(4, 32), body=nn.Linear(6, 16), head=nn.Linear(16, 5)), F.cross_entropy, batch


@case()
def weights_made_by_a_network():
    def forward(m, x, c):
        weight = m.maker(c).view(-1, 8, 6)
        return m.head(torch.tanh(torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)))

    def batch(g):
        return (torch.randn(12, 6, generator=g), torch.randn(12, 4, generator=g)), torch.randint(5, (12,), generator=g)

    return Of(forward, maker=nn.Linear(4, 48), head=nn.Linear(8, 5)), F.cross_entropy, batch


@case()
def factorisation_machine():
    def forward(m, ids):
        v = m.factors(ids)
        pairs = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)
        return m.bias + m.linear(ids).sum((1, 2)) + pairs

    def batch(g):
        return torch.randint(30, (12, 4), generator=g), torch.rand(12, generator=g)

    model = Of(forward, factors=nn.Embedding(30, 6), linear=nn.Embedding(30, 1))
    model.bias = nn.Parameter(torch.zeros(()))
    return model, F.binary_cross_entropy_with_logits, batch


@case()
def coupling_flow():
    def forward(m, x):
        logdet = 0
        for i, net in enumerate(m.nets):
            a, b = x.chunk(2, -1) if i % 2 else x.chunk(2, -1)[::-1]
            scale, shift = net(a).chunk(2, -1)
            b = b * torch.exp(torch.tanh(scale)) + shift
            logdet = logdet + torch.tanh(scale).sum(-1)
            x = torch.cat([a, b], -1)
        return (0.5 * x.square().sum(-1) - logdet).mean()

    nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6)) for _ in range(4))
    return Of(forward, nets=nets), lambda y: y, lambda g: (torch.randn(12, 6, generator=g),)


@case(refused=EITHER)
def invertible_product():
    model = Of(lambda m, x: {"loss": (m.body(x @ m.w) ** 2).mean() - torch.linalg.slogdet(m.w)[1]}, body=nn.Linear(4, 4))
    model.w = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
    return model, None, lambda g: ((torch.randn(12, 4, generator=g),),)


@case(refused=EITHER)
def weight_normalised():
    return nn.Sequential(
        nn.utils.weight_norm(nn.Linear(6, 16)), nn.ReLU(), nn.utils.weight_norm(nn.Linear(16, 5), dim=None)
    ), F.cross_entropy, classes(6)  # fmt: skip


@case(refused=EITHER)
def spectrally_normalised():
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 5)
    ), F.cross_entropy, classes(6)  # fmt: skip


@case(refused=EITHER)
def orthogonal_weights():
    return nn.Sequential(
        nn.Linear(6, 8), nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 5)
    ), F.cross_entropy, classes(6)  # fmt: skip


# ---- convolutions ------------------------------------------------------------------------------------------------------


@case()
def text_by_convolutions():
    def forward(m, x):
        x = m.embed(x).transpose(1, 2)
        return m.head(torch.cat([F.relu(c(x)).amax(-1) for c in m.convolutions], -1))

    def batch(g):
        return torch.randint(20, (12, 9), generator=g), torch.randint(5, (12,), generator=g)

    return Of(forward, embed=nn.Embedding(20, 8), convolutions=nn.ModuleList(nn.Conv1d(8, 6, k) for k in (2, 3, 4)),
              head=nn.Linear(18, 5)), F.cross_entropy, batch  # fmt: skip


@case()
def dilated_gates():
    def forward(m, x):
        x, skips = m.inside(x), 0
        for i, (f, g) in enumerate(zip(m.filters, m.gates)):
            padded = F.pad(x, (2**i, 0))
            y = torch.tanh(f(padded)) * torch.sigmoid(g(padded))
            x, skips = x + y, skips + y
        return m.head(F.relu(skips)).squeeze(1)

    return Of(
        forward, inside=nn.Conv1d(1, 6, 1), head=nn.Conv1d(6, 1, 1),
        filters=nn.ModuleList(nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(3)),
        gates=nn.ModuleList(nn.Conv1d(6, 6, 2, dilation=2**i) for i in range(3)),
    ), F.mse_loss, values(1, 10, to=(10,))  # fmt: skip


@case()
def squeeze_and_excite():
    def forward(m, x):
        x = F.relu(m.first(x))
        x = x * torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3))))))[:, :, None, None]
        return m.head(m.second(x).flatten(1))

    return Of(forward, first=nn.Conv2d(3, 8, 3, padding=1), down=nn.Linear(8, 2), up=nn.Linear(2, 8),
              second=nn.Conv2d(8, 4, 3, stride=2), head=nn.Linear(16, 5)), F.cross_entropy, classes(3, 6, 6)  # fmt: skip


@case()
def branches():
    def forward(m, x):
        x = torch.cat([m.a(x), m.b(x), m.c(F.max_pool2d(x, 3, 1, 1)), F.avg_pool2d(x, 3, 1, 1)], 1)
        return m.head(F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1))

    return Of(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 3, padding=1), c=nn.Conv2d(3, 4, 1), head=nn.Linear(15, 5)
              ), F.cross_entropy, classes(3, 6, 6)  # fmt: skip


@case()
def shuffled_groups():
    def forward(m, x):
        x = F.relu(m.first(x))
        x = x.view(x.shape[0], 2, 4, 6, 6).transpose(1, 2).reshape(x.shape)
        return m.head(F.relu(m.second(x)).mean((2, 3)))

    return Of(forward, first=nn.Conv2d(4, 8, 1, groups=2), second=nn.Conv2d(8, 8, 3, groups=8), head=nn.Linear(8, 5)
              ), F.cross_entropy, classes(4, 6, 6)  # fmt: skip


@case()
def group_and_instance_norm():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True),
                          nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))  # fmt: skip
    return model, F.cross_entropy, classes(3, 6, 6)


@case()
def finer_by_pixel_shuffle():
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.PReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    return model, F.l1_loss, values(1, 4, 4, to=(1, 8, 8))


@case()
def feature_pyramid():
    def forward(m, x):
        a = F.relu(m.down1(x))
        b = F.relu(m.down2(a))
        top = m.side2(b)
        return m.head(m.side1(a) + F.interpolate(top, scale_factor=2, mode="nearest"))

    return Of(forward, down1=nn.Conv2d(3, 6, 3, 2, 1), down2=nn.Conv2d(6, 8, 3, 2, 1), side1=nn.Conv2d(6, 4, 1),
              side2=nn.Conv2d(8, 4, 1), head=nn.Conv2d(4, 1, 1)), F.mse_loss, values(3, 8, 8, to=(1, 4, 4))  # fmt: skip


@case(refused=EITHER)
def bilinear_upsampling():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 1, 1))
    return model, F.mse_loss, values(1, 4, 4, to=(1, 8, 8))


@case(refused=EITHER)
def volumes():
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(32, 5))
    return model, F.cross_entropy, classes(1, 4, 4, 4)


@case(refused=EITHER)
def reflected_borders():
    model = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ReplicationPad2d(1), nn.Conv2d(4, 1, 3))
    return model, F.mse_loss, values(1, 5, 5, to=(1, 5, 5))


@case(refused=EITHER)
def patches_by_unfolding():
    def forward(m, x):
        return m.head(F.relu(m.body(F.unfold(x, 2, stride=2).transpose(1, 2))).mean(1))

    return Of(forward, body=nn.Linear(12, 16), head=nn.Linear(16, 5)), F.cross_entropy, classes(3, 6, 6)


@case(refused=EITHER)
def spatial_transformer():
    def forward(m, x):
        theta = m.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return m.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    return Of(forward, where=nn.Linear(36, 6), head=nn.Linear(36, 5)), F.cross_entropy, classes(1, 6, 6)


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

"""Building blocks of architectures, each a small model that trains: dense ones and convolutions. See sequences.py."""

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

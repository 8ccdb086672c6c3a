"""One of three workers: losses by pipelines and grids against plain PyTorch in double precision, or refused."""

import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
BATCH, TIME, CLASSES = 24, 5, 7


class Trunk(nn.Module):
    """Tokens to features, in several blocks."""

    def __init__(self, last=CLASSES, width=12, pooled=False):
        torch.manual_seed(1)
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])
        self.head, self.pooled = nn.Linear(width, last), pooled

    def forward(self, x):
        x = self.blocks(self.embed(x))
        return self.head(x.mean(1) if self.pooled else x)


def tokens(g):
    return torch.randint(11, (BATCH, TIME), generator=g)


def labels(ignored):
    """Targets of every token; of the first rows, several micro-batches, all ignored, and of the others some."""

    def draw(g):
        y = torch.randint(CLASSES, (BATCH, TIME), generator=g)
        if ignored:
            y[torch.rand(BATCH, TIME, generator=g) < 0.4] = -100
            y[:9] = -100
        return tokens(g), y

    return draw


def real(*shape):
    return lambda g: (tokens(g), torch.randn(*shape, generator=g))


def flat(loss, **options):
    return lambda y, t: loss(y.flatten(0, -2), t.flatten(), **options)


WEIGHT = torch.linspace(0.5, 2.0, CLASSES)


class Decayed(Trunk):
    """A loss of its own: the mean over tokens, and a sum over parameters."""

    def forward(self, x):
        y = super().forward(x)
        return y, sum(p.pow(2).sum() for p in self.parameters())


def masked_mean(y, t):
    mask = (t > 0.3).to(y)
    return ((y - t).pow(2) * mask).sum() / mask.sum()


def weighted_by_samples(y, t):
    weight = t[:, :1].abs()
    return (weight * (y - t).pow(2)).sum() / weight.sum().clamp(min=1e-3)


def contrastive(y, _):
    z = F.normalize(y, dim=-1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(z)))


def triplet_in_batch(y, _):
    apart = (y.unsqueeze(0) - y.unsqueeze(1)).pow(2).sum(-1)
    return F.relu(apart.min(1).values - apart.max(1).values + 1).mean()


def covariance(y, _):
    y = y - y.mean(0)
    c = y.t() @ y / (len(y) - 1)
    return c.pow(2).sum() + y.pow(2).mean()


def balanced(y, _):
    p = y.softmax(-1)
    return p.pow(2).mean() + CLASSES * (p.mean(0) * p.pow(2).mean(0)).sum()


def batch_sizes(y, t):
    return (y - t).pow(2).sum() / len(y) + (y - t).abs().sum() / max(len(y), 4)


EQUAL = {
    "sum": (Trunk(), flat(F.cross_entropy, reduction="sum"), labels(False)),
    "mean": (Trunk(), flat(F.cross_entropy), labels(False)),
    "tokens": (Trunk(), flat(F.cross_entropy), labels(True)),
    "smoothed": (Trunk(), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1), labels(False)),
    "weighted": (Trunk(), flat(F.cross_entropy, weight=WEIGHT), labels(False)),
    "weighted_tokens": (Trunk(), flat(F.cross_entropy, weight=WEIGHT), labels(True)),
    "two_dimensional": (Trunk(), lambda y, t: F.cross_entropy(y.transpose(1, 2), t), labels(True)),
    "kl_batchmean": (Trunk(), lambda y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"), real(BATCH, TIME, CLASSES)),
    "mse": (Trunk(), F.mse_loss, real(BATCH, TIME, CLASSES)),
    "l1_sum": (Trunk(), lambda y, t: F.l1_loss(y, t, reduction="sum"), real(BATCH, TIME, CLASSES)),
    "masked_mean": (Trunk(), masked_mean, real(BATCH, TIME, CLASSES)),
    "weighted_by_samples": (Trunk(), weighted_by_samples, real(BATCH, TIME, CLASSES)),
    "several": (
        Trunk(), lambda y, t: F.mse_loss(y, t) + 0.3 * (y - t).abs().sum() + 0.1 * y.pow(2).mean((0, 1)).sum(), real(BATCH, TIME, CLASSES)
    ),
    "decay": (Decayed(), lambda y, t: flat(F.cross_entropy)(y[0], t) + 1e-2 * y[1], labels(True)),
    "batch_sizes": (Trunk(pooled=True), batch_sizes, real(BATCH, CLASSES)),
    "target_statistics": (Trunk(), lambda y, t: ((y - t.mean((0, 1))) / t.std()).pow(2).mean(), real(BATCH, TIME, CLASSES)),
}  # fmt: skip
REFUSED = {
    "contrastive": (Trunk(pooled=True), contrastive, "mm"),
    "triplet": (Trunk(pooled=True), triplet_in_batch, "sub"),
    "covariance": (Trunk(pooled=True), covariance, "sub"),
    "balanced": (Trunk(pooled=True), balanced, "mul"),
    "root": (Trunk(pooled=True), lambda y, t: F.mse_loss(y, t).sqrt(), "sqrt"),
    "variance": (Trunk(pooled=True), lambda y, t: F.mse_loss(y, t) + y.var(0).sum(), "var"),
    "own_count": (Trunk(pooled=True), lambda y, t: (y * (y > 0)).sum() / (y > 0).sum(), "sum"),
}


def copy_of(model):
    mine = type(model)(**({"pooled": True} if model.pooled else {}))
    mine.load_state_dict(model.state_dict())
    return mine


for engine in sys.argv[1:]:
    for name, (model, loss_fn, draw) in EQUAL.items():
        plain, mine = copy_of(model), copy_of(model)
        data = support.batches_of(draw, 3)
        dist = motley.distribute(mine, data[0], loss_fn, support.CLUSTER, torch.optim.SGD(mine.parameters(), 0.1), engine=engine)
        expected = support.plain_training(plain, loss_fn, data, torch.optim.SGD(plain.parameters(), 0.1))
        got = [dist.train_step(*batch) for batch in data]
        for a, b in zip(got, expected):
            assert abs(a - b) <= 1e-9 * max(1, abs(b)), (engine, name, got, expected)
        support.same(dist.state_dict(), plain.state_dict())
        parts = str(dist.plan).split("micro-batches of ")[1].split("\n")[0] if dist.plan.stages else "one program"
        if RANK == 0:
            print("equal", engine, name, parts, flush=True)
    for name, (model, loss_fn, node) in REFUSED.items():
        data = support.batches_of(real(BATCH, CLASSES), 1)
        try:
            motley.distribute(copy_of(model), data[0], loss_fn, support.CLUSTER, engine=engine)
        except motley.UserError as error:
            assert "\n" not in str(error) and node in str(error), (engine, name, error)
            if RANK == 0:
                print("refused", engine, name, error, flush=True)
        else:
            raise AssertionError(f"{engine} took {name}")

# One program has none of this: what a pipeline cannot do is done in one pass.
for name, (model, loss_fn, _) in list(REFUSED.items())[:3]:
    plain, mine = copy_of(model), copy_of(model)
    data = support.batches_of(real(BATCH, CLASSES), 2)
    dist = motley.distribute(mine, data[0], loss_fn, support.CLUSTER, torch.optim.SGD(mine.parameters(), 0.1), engine="auto")
    assert dist.plan.stages == 0, name
    expected = support.plain_training(plain, loss_fn, data, torch.optim.SGD(plain.parameters(), 0.1))
    for batch, wanted in zip(data, expected):
        assert abs(dist.train_step(*batch) - wanted) <= 1e-9, name


# Batch normalisation by micro-batch is said before, and not taken unasked.
class Normalised(nn.Module):
    def __init__(self):
        torch.manual_seed(2)
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh())  # noqa: E731
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), *[block() for _ in range(6)], nn.Linear(64, CLASSES))

    def forward(self, x):
        return self.layers(x)


data = support.batches_of(lambda g: (torch.randn(512, 6, generator=g), torch.randn(512, CLASSES, generator=g)), 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dist = motley.distribute(Normalised(), data[0], F.mse_loss, support.CLUSTER, "sgd", engine="pipeline")
assert RANK > 0 or any("1 batch normalisation sees one of" in str(w.message) for w in caught), [str(w.message) for w in caught]
assert "not exact" in str(dist.plan)
# Where all micro-batches hold the same samples, it is the same as on one device.
plain, mine = Normalised(), Normalised()
rows = dist.plan.batch // int(str(dist.plan).split("one of ")[1].split()[0])
same = [tuple(t[:rows].repeat(len(t) // rows, 1) for t in batch) for batch in data]
dist = motley.distribute(mine, same[0], F.mse_loss, plan=dist.plan, optimizer=torch.optim.SGD(mine.parameters(), 0.1))
expected = support.plain_training(plain, F.mse_loss, same, torch.optim.SGD(plain.parameters(), 0.1))
for batch, wanted in zip(same, expected):
    assert abs(dist.train_step(*batch) - wanted) <= 1e-9 * max(1, abs(wanted)), (wanted,)
trained = {key: value for key, value in plain.state_dict().items() if "running" not in key}
support.same({key: value for key, value in dist.state_dict().items() if key in trained}, trained)
assert motley.distribute(Normalised(), data[0], F.mse_loss, support.CLUSTER, "sgd", engine="auto").plan.inexact == ""
if RANK == 0:
    print("done", flush=True)

"""Losses, on one small model each; sums, counted means and those that mix samples."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy as named_cross_entropy
from torch.nn.functional import one_hot

from corpus import case

MIXED = {"pipeline": "either"}  # refused, or planned in one pass: samples of other micro-batches would be missing


def net(inputs=6, outputs=5):
    return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, outputs))


def reals(*shape):
    return lambda g: (torch.randn(12, 6, generator=g), torch.randn(12, *shape, generator=g))


def labels(g):
    return torch.randn(12, 6, generator=g), torch.randint(5, (12,), generator=g)


def tags(g):
    return torch.randn(12, 6, generator=g), torch.randint(2, (12, 5), generator=g).double()


def signs(g):
    return torch.randn(12, 6, generator=g), 2 * torch.randint(2, (12, 5), generator=g).double() - 1


class Pairs(nn.Module):
    """The same encoder on both of a pair."""

    def __init__(self):
        super().__init__()
        self.encoder = net()

    def forward(self, a, b):
        return self.encoder(a), self.encoder(b)


def pairs(g):
    return torch.randn(12, 6, generator=g), torch.randn(12, 6, generator=g)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 12), net(12, 12), nn.Linear(12, 16)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def ragged(g):
    """Tokens of which some rows have none that counts."""
    tokens, targets = torch.randint(16, (12, 7), generator=g), torch.randint(16, (12, 7), generator=g)
    lengths = torch.randint(1, 8, (12,), generator=g)
    lengths[:4] = 0
    targets[torch.arange(7) >= lengths[:, None]] = -100
    return tokens, targets


@case()
def mse_mean():
    return net(), F.mse_loss, reals(5)


@case()
def mse_sum():
    return net(), lambda y, t: F.mse_loss(y, t, reduction="sum"), reals(5)


@case()
def mse_by_hand():
    return net(), lambda y, t: ((y - t) ** 2).sum(-1).mean(), reals(5)


@case()
def l1():
    return net(), F.l1_loss, reals(5)


@case()
def smooth_l1():
    return net(), lambda y, t: F.smooth_l1_loss(y, t, beta=0.3), reals(5)


@case()
def huber_sum():
    return net(), lambda y, t: F.huber_loss(y, t, reduction="sum", delta=0.7), reals(5)


@case()
def log_cosh():
    return net(), lambda y, t: torch.log(torch.cosh(y - t)).mean(), reals(5)


@case()
def quantile():
    def loss(y, t):
        levels = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
        return torch.maximum(levels * (t - y), (levels - 1) * (t - y)).mean()

    return net(), loss, reals(1)


@case()
def cross_entropy():
    return net(), F.cross_entropy, labels


@case()
def cross_entropy_sum():
    return net(), nn.CrossEntropyLoss(reduction="sum"), labels


@case()
def cross_entropy_weighted():
    return net(), nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2, 5).double()), labels


@case()
def cross_entropy_smoothed():
    return net(), nn.CrossEntropyLoss(label_smoothing=0.1), labels


@case()
def cross_entropy_bound_by_name():
    return net(), lambda y, t: named_cross_entropy(y, t, label_smoothing=0.2, ignore_index=2), labels


@case()
def one_hot_bound_by_name():
    return net(), lambda y, t: (y.softmax(-1) - one_hot(t, 5)).square().sum(), labels


@case()
def cross_entropy_weighted_and_smoothed():
    return net(), nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2, 5).double(), label_smoothing=0.1, ignore_index=1), labels


@case()
def cross_entropy_of_probabilities():
    def batch(g):
        return torch.randn(12, 6, generator=g), torch.rand(12, 5, generator=g).softmax(-1)

    return net(), F.cross_entropy, batch


@case()
def nll():
    return nn.Sequential(net(), nn.LogSoftmax(-1)), nn.NLLLoss(), labels


@case()
def token_mean():
    return Tokens(), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), ragged


@case()
def token_mean_over_classes_second():
    return Tokens(), lambda y, t: F.cross_entropy(y.transpose(1, 2), t, ignore_index=-100), ragged


@case()
def token_mean_by_mask():
    def loss(y, t):
        mask = (t != -100).double()
        each = F.cross_entropy(y.flatten(0, 1), t.clamp(min=0).flatten(), reduction="none").view(t.shape)
        return (each * mask).sum() / mask.sum()

    return Tokens(), loss, ragged


@case()
def token_sum():
    return Tokens(), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"), ragged


@case()
def mean_of_sequence_means():
    def loss(y, t):
        mask = (t != -100).double()
        each = F.cross_entropy(y.transpose(1, 2), t.clamp(min=0), reduction="none")
        return ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

    return Tokens(), loss, ragged


@case()
def binary_cross_entropy():
    return nn.Sequential(net(), nn.Sigmoid()), F.binary_cross_entropy, tags


@case()
def binary_cross_entropy_weighted():
    return net(), nn.BCEWithLogitsLoss(pos_weight=torch.linspace(1, 3, 5).double()), tags


@case()
def kl_batch_mean():
    def batch(g):
        return torch.randn(12, 6, generator=g), torch.randn(12, 5, generator=g).softmax(-1)

    return net(), lambda y, t: F.kl_div(y.log_softmax(-1), t, reduction="batchmean"), batch


@case()
def distillation():
    def loss(y, t):
        hard, soft = t
        warm = F.kl_div((y / 3).log_softmax(-1), (soft / 3).softmax(-1), reduction="batchmean") * 9
        return 0.3 * F.cross_entropy(y, hard) + 0.7 * warm

    def batch(g):
        x, hard = labels(g)
        return x, (hard, torch.randn(12, 5, generator=g))

    return net(), loss, batch


@case()
def poisson_nll():
    def batch(g):
        return torch.randn(12, 6, generator=g), torch.randint(6, (12, 5), generator=g).double()

    return net(), nn.PoissonNLLLoss(), batch


@case()
def gaussian_nll():
    return net(6, 10), lambda y, t: F.gaussian_nll_loss(y[:, :5], t, y[:, 5:].exp()), reals(5)


@case()
def hinge():
    return net(), lambda y, t: (1 - y * t).clamp(min=0).mean(), signs


@case()
def soft_margin():
    return net(), nn.SoftMarginLoss(), signs


@case()
def multi_margin():
    return net(), nn.MultiMarginLoss(), labels


@case()
def margin_ranking():
    def loss(y, t):
        return F.margin_ranking_loss(y[0][:, 0], y[1][:, 0], t, margin=0.3)

    def batch(g):
        return pairs(g), 2 * torch.randint(2, (12,), generator=g).double() - 1

    return Pairs(), loss, batch


@case()
def cosine_embedding():
    def batch(g):
        return pairs(g), 2 * torch.randint(2, (12,), generator=g) - 1

    return Pairs(), lambda y, t: F.cosine_embedding_loss(*y, t, margin=0.1), batch


@case()
def triplet():
    class Triplet(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = net()

        def forward(self, a, b, c):
            return self.encoder(a), self.encoder(b), self.encoder(c)

    def batch(g):
        return ((*pairs(g), torch.randn(12, 6, generator=g)),)

    return Triplet(), lambda y: F.triplet_margin_loss(*y), batch


@case()
def focal():
    def loss(y, t):
        log = y.log_softmax(-1).gather(1, t[:, None]).squeeze(1)
        return (-((1 - log.exp()) ** 2) * log).mean()

    return net(), loss, labels


@case()
def ordinal():
    def loss(y, t):
        return F.binary_cross_entropy_with_logits(y, (torch.arange(5) < t[:, None]).double())

    return net(), loss, labels


@case()
def mixture_density():
    def loss(y, t):
        weight, mean, width = y.view(12, 3, 4).unbind(1)
        normal = -0.5 * ((t - mean) * torch.exp(-width)) ** 2 - width
        return -torch.logsumexp(weight.log_softmax(-1) + normal, -1).mean()

    return net(6, 12), loss, reals(1)


@case(refused=MIXED)
def dice():
    def loss(y, t):
        p = y.sigmoid()
        return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

    return net(), loss, tags


@case(refused=MIXED)
def in_batch_negatives():
    def loss(y):
        a, b = (F.normalize(part, dim=-1) for part in y)
        logits = a @ b.t() / 0.2
        right = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.t(), right)) / 2

    return Pairs(), loss, lambda g: (pairs(g),)


@case(refused=MIXED)
def contrastive_of_two_views():
    def loss(y):
        z = F.normalize(torch.cat(y), dim=-1)
        logits = (z @ z.t() / 0.5).masked_fill(torch.eye(24, dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(24).roll(12))

    return Pairs(), loss, lambda g: (pairs(g),)


@case(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), refused=MIXED)  # some gradients are exactly zero
def barlow_twins():
    def loss(y):
        a, b = ((part - part.mean(0)) / part.std(0) for part in y)
        c = a.t() @ b / 12
        return (c.diagonal() - 1).pow(2).sum() + 0.01 * (c - torch.diag(c.diagonal())).pow(2).sum()

    return Pairs(), loss, lambda g: (pairs(g),)


@case(refused=MIXED)
def correlation():
    def loss(y, t):
        y, t = y - y.mean(0), t - t.mean(0)
        return 1 - (y * t).sum() / (y.norm() * t.norm())

    return net(), loss, reals(5)


@case(refused=MIXED)
def variance_of_the_batch():
    return net(), lambda y, t: F.mse_loss(y, t) + 0.1 * F.relu(1 - y.var(0).add(1e-4).sqrt()).mean(), reals(5)


@case(refused=MIXED)
def root_of_the_mean():
    return net(), lambda y, t: F.mse_loss(y, t).sqrt(), reals(5)


@case(refused=MIXED)
def hardest_of_the_batch():
    def loss(y, t):
        each = F.cross_entropy(y, t, reduction="none")
        return each.topk(4).values.mean()

    return net(), loss, labels


@case()
def connectionist():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.LogSoftmax(-1))

    def loss(y, t):
        targets, lengths = t
        return F.ctc_loss(y.transpose(0, 1), targets, torch.full((6,), 9), lengths)

    def batch(g):
        return torch.randn(6, 9, 4, generator=g), (
            torch.randint(1, 6, (6, 4), generator=g), torch.randint(1, 5, (6,), generator=g),
        )  # fmt: skip

    return model, loss, batch


class Penalised(nn.Module):
    """Returns its loss, with a penalty on its parameters."""

    def __init__(self, penalty):
        super().__init__()
        self.body, self.penalty = net(), penalty

    def forward(self, x, t):
        return {"loss": F.cross_entropy(self.body(x), t) + self.penalty(self)}


@case()
def weight_decay_in_the_loss():
    model = Penalised(lambda m: 1e-2 * sum(p.square().sum() for p in m.parameters()))
    return model, None, lambda g: (labels(g),)


@case()
def sparsity_of_weights():
    model = Penalised(lambda m: 1e-3 * sum(p.abs().sum() for p in m.parameters() if p.dim() > 1))
    return model, None, lambda g: (labels(g),)


@case()
def entropy_of_outputs():
    def loss(y, t):
        p = y.softmax(-1)
        return F.cross_entropy(y, t) + 0.05 * (p * p.log()).sum(-1).mean()

    return net(), loss, labels


@case()
def mean_and_sum():
    return net(), lambda y, t: F.mse_loss(y, t) + 0.01 * y.abs().sum(), reals(5)

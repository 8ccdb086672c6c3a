"""Optimizers of torch.optim with their options, and others."""

import torch
import torch.nn.functional as F
from torch import nn

from corpus import case


def net():
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 5))
    return model, F.cross_entropy, lambda g: (torch.randn(12, 6, generator=g), torch.randint(5, (12,), generator=g))


def of(kind, **options):
    return {"optimizer": lambda parameters: kind(parameters, **options)}


OTHER = {engine: "whole|piece|element" for engine in ("spmd", "pipeline")}


@case(**of(torch.optim.SGD, lr=0.1))
def sgd():
    return net()


@case(**of(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True))
def nesterov():
    return net()


@case(**of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, maximize=True))
def maximised():
    return net()


@case(**of(torch.optim.Adam, lr=1e-2, weight_decay=1e-2))
def adam():
    return net()


@case(**of(torch.optim.AdamW, lr=1e-2, amsgrad=True))
def amsgrad():
    return net()


@case(**of(torch.optim.AdamW, lr=1e-2, foreach=True))
def foreach():
    return net()


@case(**of(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1))
def adagrad():
    return net()


@case(**of(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.5))
def adagrad_from_a_half():
    return net()


@case(**of(torch.optim.Adadelta, lr=0.5))
def adadelta():
    return net()


@case(**of(torch.optim.RMSprop, lr=1e-2, centered=True, momentum=0.5))
def rmsprop():
    return net()


@case(**of(torch.optim.Rprop, lr=1e-2))
def rprop():
    return net()


@case(**of(torch.optim.ASGD, lr=1e-2, t0=2))
def asgd():
    return net()


@case(**of(torch.optim.Adamax, lr=1e-2))
def adamax():
    return net()


@case(**of(torch.optim.NAdam, lr=1e-2))
def nadam():
    return net()


@case(**of(torch.optim.RAdam, lr=1e-2))
def radam():
    return net()


def grouped(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW([
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-2, "betas": (0.8, 0.9)},
    ])  # fmt: skip


@case(optimizer=grouped)
def groups():
    return net()


class Signs(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), which treats every element by itself."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add(p.grad, alpha=0.1).sign(), alpha=-group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


@case(optimizer=Signs)
def lion():
    return net()


class ByNorms(torch.optim.Optimizer):
    """LARS (You et al. 2017): each parameter steps by its own norm. Exact over pieces, or refused."""

    def __init__(self, parameters, lr=0.5):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = 0.1 * (p.norm() + 1e-3) / (p.grad.norm() + 1e-3)
                    p.sub_(p.grad * trust * group["lr"])


@case(optimizer=ByNorms, refused={"spmd": "either", "pipeline": "either"})
def lars():
    return net()


class Adam(torch.optim.Optimizer):
    """Not torch's: rows share their second moments, as in Adafactor."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    square = p.grad.square() if p.dim() < 2 else p.grad.square().mean(0, keepdim=True)
                    p.sub_(group["lr"] * p.grad / (square.sqrt() + 1e-3))


@case(optimizer=Adam, refused={"spmd": "either", "pipeline": "either"})
def named_as_another():
    return net()

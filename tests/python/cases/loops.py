"""What loops do with the loss, with its backward pass, and with the pieces of parameters between steps."""

import torch
import torch.nn.functional as F
from torch import nn

from corpus import case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def net():
    return Net(), F.cross_entropy, lambda g: (torch.randn(12, 6, generator=g), torch.randint(5, (12,), generator=g))


def loop(backward=lambda loss: loss.backward(), before_step=lambda trainer: None, after_step=lambda trainer: None):
    def train(trainer, batches):
        losses = []
        for batch in batches:
            loss = trainer(*batch)
            backward(loss)
            before_step(trainer)
            trainer.step()
            after_step(trainer)
            losses.append(loss.item())
        return losses

    return train


# ---- the loss -----------------------------------------------------------------------------------------------------------


@case(train=loop(lambda loss: loss.backward(gradient=torch.tensor(2.0))))
def weighted_backward_pass():
    return net()


@case(train=loop(lambda loss: (loss + loss**2).backward()))
def loss_used_twice():
    return net()


@case(train=loop(lambda loss: torch.autograd.backward([loss * 0.5 + 1])))
def backward_pass_by_autograd():
    return net()


@case(train=loop(lambda loss: (loss.exp() / (1 + loss)).backward()))
def function_of_the_loss():
    return net()


@case(train=loop(lambda loss: (loss.register_hook(lambda gradient: gradient * 3), loss.backward())))
def hook_on_the_loss():
    return net()


def in_pairs(backward):
    def train(trainer, batches):
        losses = []
        for one, other in zip(batches[::2], batches[1::2]):
            first, second = trainer(*one), trainer(*other)
            backward(first, second)
            trainer.step()
            losses += [first.item(), second.item()]
        return losses

    return train


@case(train=in_pairs(lambda first, second: (first + 0.3 * second).backward()))
def two_forward_passes():
    return net()


@case(train=in_pairs(lambda first, second: (second.backward(), first.backward())))
def backward_passes_in_the_other_order():
    return net()


def looked_at_first(trainer, batches):
    losses = []
    for batch in batches:
        with torch.no_grad():
            losses.append(trainer(*batch).item())
        loss = trainer(*batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    return losses


@case(train=looked_at_first)
def loss_without_gradients_first():
    return net()


# ---- pieces between steps -----------------------------------------------------------------------------------------------


def clamped(trainer):
    for _, parameter in trainer.named_parameters():
        parameter.data.clamp_(-0.2, 0.2)


@case(train=loop(after_step=clamped))
def clamped_by_data():
    return net()


@torch.no_grad()
def shrunk(trainer):
    for name, parameter in trainer.named_parameters():
        parameter.mul_(0.9)
        if name == "first.weight":
            parameter.copy_(parameter.abs())


@case(train=loop(after_step=shrunk))
def shrunk_in_place():
    return net()


@case(train=loop(before_step=lambda t: torch.nn.utils.clip_grad_value_([p for _, p in t.named_parameters()], 0.01)))
def values_clipped_by_torch():
    return net()


def without_head(trainer):
    for name, parameter in trainer.named_parameters():
        if name.startswith("head"):
            parameter.grad = None


@case(train=loop(before_step=without_head))
def some_gradients_left_out():
    return net()


def signs(trainer):
    for _, parameter in trainer.named_parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.sign() * 0.1


@case(train=loop(before_step=signs))
def signs_of_gradients():
    return net()


def centred(trainer):
    for _, parameter in trainer.named_parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))


@case(train=loop(before_step=centred), refused={engine: "mean of a piece of a parameter" for engine in ("spmd", "pipeline")})
def centred_gradients():
    return net()

"""Functions of torch that look at numbers where shapes would do, written so that a capture can follow them.

They replace torch's own while a step is captured, and compute the same.
"""

import contextlib

import torch
import torch.nn.functional as F

from ._errors import UserError

_cross_entropy, _one_hot = F.cross_entropy, F.one_hot
_repeat_interleave = torch.repeat_interleave


def one_hot(tensor, num_classes=-1):
    if num_classes < 0:
        return _one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def repeat_interleave(self, repeats, dim=None, **options):
    if not isinstance(repeats, int):
        return _repeat_interleave(self, repeats, dim, **options)
    if dim is None:
        self, dim = self.flatten(), 0
    after = dim % self.dim() + 1
    sizes = list(self.shape)
    repeated = self.unsqueeze(after).expand(*sizes[:after], repeats, *sizes[after:])
    return repeated.reshape(*sizes[: after - 1], sizes[after - 1] * repeats, *sizes[after:])


def cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
                  label_smoothing=0.0):  # fmt: skip
    if label_smoothing == 0 or target.is_floating_point() or weight is not None or reduction == "none":
        return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    dim = 0 if input.dim() == 1 else 1
    logarithms = F.log_softmax(input, dim)
    counted = (target != ignore_index).to(input.dtype)
    smooth = -(logarithms.sum(dim) * counted).sum()
    if reduction == "mean":
        smooth = smooth / counted.sum()
    plain = F.nll_loss(logarithms, target, None, None, ignore_index, None, reduction)
    return (1 - label_smoothing) * plain + label_smoothing / input.shape[dim] * smooth


def _no_numbers(*_, **__):
    raise UserError("[capture] the model reads a number out of a tensor (tolist)")


def _no_format(self, spec):
    if spec:
        raise UserError(f"[capture] the model reads a number out of a tensor (to print it as {spec!r})")
    return str(self)


@contextlib.contextmanager
def active():
    """Also refuses Tensor.tolist and formats of numbers, which read memory that a Meta tensor does not have."""
    F.one_hot, F.cross_entropy = one_hot, cross_entropy
    torch.repeat_interleave = repeat_interleave
    torch.Tensor.repeat_interleave, torch.Tensor.tolist = repeat_interleave, _no_numbers
    format_of, torch.Tensor.__format__ = torch.Tensor.__format__, _no_format
    try:
        yield
    finally:
        F.one_hot, F.cross_entropy = _one_hot, _cross_entropy
        torch.repeat_interleave = _repeat_interleave
        del torch.Tensor.repeat_interleave, torch.Tensor.tolist
        torch.Tensor.__format__ = format_of

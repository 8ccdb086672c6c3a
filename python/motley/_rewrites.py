"""Functions of torch that look at numbers where shapes would do, written so that a capture can follow them.

They replace torch's own while a step is captured, and compute the same.
"""

import contextlib
import math
import sys

import torch
import torch.distributions
import torch.nn.functional as F
import torch.utils.checkpoint

from . import _motley, _torch
from ._errors import UserError
from ._pairs import is_fixed
from ._watch import is_users_module, is_users_scope
from ._windows import as_strided

_cross_entropy, _one_hot, _rrelu = F.cross_entropy, F.one_hot, F.rrelu
_repeat_interleave = torch.repeat_interleave
_clear_casts = torch.clear_autocast_cache
_batch_norm = torch.nn.modules.batchnorm._BatchNorm.forward
_get, _set = torch.Tensor.__getitem__, torch.Tensor.__setitem__


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
    if label_smoothing == 0 or target.is_floating_point():
        return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)
    dim = 0 if input.dim() == 1 else 1
    logarithms = F.log_softmax(input, dim)
    ignored = target == ignore_index
    each = logarithms
    if weight is not None:
        each = logarithms * weight.reshape([-1] + [1] * (input.dim() - 1 - dim))
    smooth = -each.sum(dim).masked_fill(ignored, 0.0)
    if reduction != "none":
        smooth = smooth.sum()
    if reduction == "mean":
        if weight is None:
            counted = (~ignored).to(input.dtype)
        else:
            counted = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)
        smooth = smooth / counted.sum()
    plain = F.nll_loss(logarithms, target, weight, None, ignore_index, None, reduction)
    return (1 - label_smoothing) * plain + label_smoothing / input.shape[dim] * smooth


def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """Without the error for a negative variance."""
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = var.unsqueeze(-1)
        elif input.size()[:-1] != var.size()[:-1] or var.size(-1) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def batch_norm(self, input):
    """The forward pass of batch normalisation; with momentum None the weight of a batch in the average is no plain number."""
    if self.momentum is not None or not self.training or not self.track_running_stats or self.running_mean is None:
        return _batch_norm(self, input)
    self._check_input_dim(input)
    output = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // input.shape[1]
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        part = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
        mean = input.mean(dims)
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        variance = (input - mean.reshape(shape)).square().sum(dims) / (count - 1)
        self.running_mean.mul_(1 - part).add_(part * mean)
        self.running_var.mul_(1 - part).add_(part * variance)
    return output


def rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False, inplace=False):
    if training:
        return _rrelu(input, lower, upper, training, inplace)
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _from_numbers(make):
    """torch.tensor and its like, on the CPU: numbers on the device of a captured tensor would be lost."""

    def made(*arguments, device=None, **options):
        return make(*arguments, **options)

    return made


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False, **_):
    return torch.tensor(data, dtype=dtype or self.dtype, requires_grad=requires_grad)


def rpow(self, other):
    return torch.pow(other, self)


def _indices(index):
    """An index with lists of numbers as tensors of their own, which are not lost on the meta device."""
    if isinstance(index, list):
        parts = (list, tuple, range, slice, torch.Tensor, type(None), type(Ellipsis))
        if len(index) < 32 and any(isinstance(part, parts) for part in index):
            return _indices(tuple(index))
    if isinstance(index, tuple):
        return tuple(_numbers(part) if _is_numbers(part) or isinstance(part, tuple) else part for part in index)
    return _numbers(index) if _is_numbers(index) else index


def _is_numbers(index):
    return isinstance(index, (list, range)) or type(index).__module__ == "numpy"


def _numbers(index):
    """A tensor of a list of indices; a mask becomes the positions of what is true, which are known."""
    if not isinstance(index, (list, tuple, range)):  # of numpy
        index = index.tolist()
        if not isinstance(index, list):
            return index
    if index and all(isinstance(part, bool) for part in index):
        index = [position for position, chosen in enumerate(index) if chosen]
    return torch.tensor(index) if len(index) > 0 else torch.zeros(0, dtype=torch.long)


def _getitem(self, index):
    return _get(self, _indices(index))


def _setitem(self, index, value):
    return _set(self, _indices(index), value)


_checkpointed = []  # (function, arguments, options, autocast) of the step that is captured, in order


def _note(function, arguments, options, result=None):
    tensors = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (tuple, list)) else []
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if torch.is_grad_enabled() and (not tensors or any(tensor.requires_grad for tensor in tensors)):
        _checkpointed.append((function, arguments, options, _torch.autocast_modes()))


def run_again():
    """Checkpointed functions once more, as a backward pass runs them: for what they do to buffers. The last is the first."""
    functions, before = list(reversed(_checkpointed)), _torch.autocast_modes()
    _checkpointed.clear()
    with torch.no_grad():
        for function, arguments, options, autocast in functions:
            _torch.set_autocast_modes(autocast)
            function(*arguments, **options)
    _torch.set_autocast_modes(before)


class _CheckpointFunction:
    """In the place of torch.utils.checkpoint.CheckpointFunction: what is computed again is the plan's business."""

    @staticmethod
    def apply(function, preserve_rng_state, *arguments):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            result = function(*arguments)
            _note(function, arguments, {})
            return result
        # As torch has it: without an input that takes a gradient nothing inside gets one.
        torch.utils.checkpoint.check_backward_validity(arguments)
        with torch.no_grad():
            return function(*arguments)


class _Generator:
    """In the place of torch's own generator, whose numbers a step does not draw."""

    def __init__(self, generator):
        self.generator = generator

    def __getattr__(self, name):
        if name in ("manual_seed", "seed", "set_state"):
            raise UserError(
                f"[capture] the model sets the state of torch's random numbers ({name}), so that it draws the same again or "
                "at every step; a step draws each number anew, so draw them once and use them twice, or use "
                "torch.utils.checkpoint"
            )
        return getattr(self.generator, name)


def _no_numbers(*_, **__):
    raise UserError("[capture] the model reads a number out of a tensor (tolist)")


def _no_format(self, spec):
    if spec:
        raise UserError(f"[capture] the model reads a number out of a tensor (to print it as {spec!r})")
    return f"a tensor {list(self.shape)}"  # of messages, which must not need its numbers


def _is_captured():
    """For torch.cuda.is_current_stream_capturing, which libraries ask before they read a number that they can do without, such as
    whether a batch has padding."""
    return True


def _no_address(self):
    raise UserError("[capture] the model reads the address of a tensor (data_ptr), which a capture does not have")


def _devices(device):
    """[(object, name, replacement)]: tensors of a capture say that they are where the model is."""
    if device.type == "meta":
        return []
    plain = {name: getattr(torch.Tensor, name) for name in ("device", "is_cpu", "is_cuda", "is_meta")}

    def shown(name, value):
        def read(self):
            here = plain[name].__get__(self)
            return value if plain["is_meta"].__get__(self) and _motley.between_operators() else here

        return torch.Tensor, name, property(read)

    kind = device.type
    return [shown("device", device), shown("is_cpu", kind == "cpu"), shown("is_cuda", kind == "cuda"), shown("is_meta", False)]


def _clear_autocast_cache():
    _motley.forget_casts()
    _clear_casts()


def _replacements():
    """[(object, name, what stands there while a step is captured)]"""
    own = _Generator(torch.random.default_generator)
    return [
        (torch.nn.modules.batchnorm._BatchNorm, "forward", batch_norm),
        (F, "one_hot", one_hot),
        (F, "cross_entropy", cross_entropy),
        (F, "gaussian_nll_loss", gaussian_nll_loss),
        (F, "rrelu", rrelu),
        (torch, "repeat_interleave", repeat_interleave),
        (torch, "as_strided", as_strided),
        (torch, "tensor", _from_numbers(torch.tensor)),
        (torch, "as_tensor", _from_numbers(torch.as_tensor)),
        (torch, "asarray", _from_numbers(torch.asarray)),
        (torch, "clear_autocast_cache", _clear_autocast_cache),
        (torch, "default_generator", own),
        (torch.random, "default_generator", own),
        (torch.Tensor, "repeat_interleave", repeat_interleave),
        (torch.Tensor, "as_strided", as_strided),
        (torch.Tensor, "new_tensor", new_tensor),
        (torch.Tensor, "data_ptr", _no_address),
        (torch.Tensor, "tolist", _no_numbers),
        (torch.Tensor, "__format__", _no_format),
        (torch.Tensor, "__rpow__", rpow),
        (torch.Tensor, "__getitem__", _getitem),
        (torch.Tensor, "__setitem__", _setitem),
        (torch.cuda, "is_current_stream_capturing", _is_captured),
        # Arguments are checked by their numbers.
        (torch.distributions.Distribution, "_validate_args", False),
        (torch.utils.checkpoint.CheckpointFunction, "apply", _CheckpointFunction.apply),
    ] + _torch.checkpoint_replacements(_note) + _torch.attention_replacements() + _torch.check_replacements(is_fixed)


def _scopes(functions):
    """The globals of the user's modules, and of these functions."""
    scopes = [vars(module) for module in list(sys.modules.values()) if is_users_module(module)]
    scopes += [scope for scope in (getattr(f, "__globals__", {}) for f in functions) if is_users_scope(scope)]
    return {id(scope): scope for scope in scopes}.values()


def _bound_by_name(replacements, functions):
    """[(globals, name, what stands there)]: the same for names that were bound to torch's functions by `from ... import`."""
    known = {id(vars(place)[name]): new for place, name, new in replacements if place in (F, torch)}
    return [
        (scope, name, known[id(value)]) for scope in _scopes(functions) for name, value in list(scope.items()) if id(value) in known
    ]


@contextlib.contextmanager
def active(device, functions=()):
    """`device` is where the model is, `functions` are those of its step. Also refuses Tensor.tolist and formats of numbers, which read memory that a Meta tensor does not have."""
    before, named = [], []
    replacements = _replacements()
    try:
        for scope, name, replacement in _bound_by_name(replacements, functions):
            named.append((scope, name, scope[name]))
            scope[name] = replacement
        for place, name, replacement in replacements + _devices(device):
            before.append((place, name, vars(place).get(name, before)))
            setattr(place, name, replacement)
        yield
    finally:
        _checkpointed.clear()
        for scope, name, old in named:
            scope[name] = old
        for place, name, old in reversed(before):
            if old is before:
                delattr(place, name)
            else:
                setattr(place, name, old)

"""Tensor.as_strided as windows along dimensions, whose gradient has rules where that of memory has none.

    x[b, s, h].as_strided((b, s // w - 1, 2 * w, h), (s * h, w * h, h, 1)) = x.unfold(1, 2 * w, w).transpose(-1, -2)
"""

import operator

import torch

from . import _motley

_as_strided = torch.Tensor.as_strided


def _merged(shape, strides):
    """With dimensions as one that lie behind one another in memory."""
    sizes, steps = list(shape[:1]), list(strides[:1])
    for size, step in zip(shape[1:], strides[1:]):
        if steps[-1] == size * step:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size), steps.append(step)
    return tuple(sizes), tuple(steps)


def _dimension(shape, strides, stride, taken):
    """The dimension along which a result goes on by this stride."""
    best = None
    for d, (size, step) in enumerate(zip(shape, strides)):
        if size > 1 and step > 0 and stride % step == 0 and len(taken[d]) < 2 and (best is None or step > strides[best]):
            best = d
    return best


def _plan(shape, strides, size, stride):
    """[what each dimension becomes: [(dimension of the result, size, step)], of none, one or two], or None."""
    if 0 in shape or 0 in size:
        return None
    taken = [[] for _ in shape]
    for at, (length, step) in enumerate(zip(size, stride)):
        if length == 1:
            continue
        d = _dimension(shape, strides, step, taken) if step > 0 else None
        if d is None:
            return None
        taken[d].append((at, length, step // strides[d]))
    for d, parts in enumerate(taken):
        parts.sort(key=lambda part: part[2])
        if sum((length - 1) * places for _, length, places in parts) >= shape[d]:
            return None
        if len(parts) == 2 and parts[0][2] != 1:
            return None
    return taken


def _along(tensor, taken, size):
    """The result, by views of single dimensions."""
    order = []  # the dimension of the result that each has become
    for d in reversed(range(tensor.dim())):
        parts = taken[d]
        if not parts:
            tensor = tensor.select(d, 0)
        elif len(parts) == 1:
            at, length, places = parts[0]
            tensor = tensor.narrow(d, 0, (length - 1) * places + 1)
            tensor = tensor[(slice(None),) * d + (slice(None, None, places),)] if places > 1 else tensor
            order.insert(0, at)
        else:
            (inner, width, _), (outer, length, places) = parts
            tensor = tensor.narrow(d, 0, (length - 1) * places + width).unfold(d, width, places)
            tensor = tensor.movedim(-1, d + 1)
            order[0:0] = [outer, inner]
    tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    for at, length in enumerate(size):
        if length == 1:
            tensor = tensor.unsqueeze(at)
    return tensor


def as_strided(self, size, stride, storage_offset=None):
    """Of the model, not of what operators are made of."""
    if _motley.between_operators() and storage_offset in (None, self.storage_offset()):
        size, stride = ([operator.index(n) for n in numbers] for numbers in (size, stride))  # some are tensors
        forms = [(tuple(self.shape), self.stride())]
        for shape, strides in forms + [_merged(*forms[0])]:
            taken = _plan(shape, strides, size, stride)
            if taken is not None:
                return _along(self.view(shape), taken, size)
    return _as_strided(self, size, stride, storage_offset)

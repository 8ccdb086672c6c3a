"""What is done to gradients between backward pass and step where a worker has only pieces of them: clipping, scaling, putting
them together."""

import copy
import math

import torch

from ._errors import UserError
from ._pieces import plain
from ._state import place

_BUCKET = 1 << 24  # elements that are put together at once


def _chosen(dist, parameters):
    """[(name, piece)] of the pieces asked for, all without; `parameters` may be one piece or several."""
    named = list(dist.named_parameters())
    if parameters is None:
        return named
    wanted = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
    chosen = [(name, piece) for name, piece in named if id(piece) in wanted]
    if len(chosen) != len(wanted):
        raise UserError("[distribute] parameters are some that dist.parameters() does not give; give some of those")
    return chosen


def _partial_norm(gradient, norm_type):
    """What the workers' pieces of a gradient are summed, or compared, by."""
    values = plain(gradient).double().abs()
    if norm_type == math.inf:
        return values.max()
    if norm_type == -math.inf:
        return values.min()
    return (values != 0).sum() if norm_type == 0 else values.pow(norm_type).sum()


def clip_norm_(dist, max_norm, norm_type, error_if_nonfinite, parameters):
    """Distributed.clip_grad_norm_."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    chosen, group = _chosen(dist, parameters), dist._group
    # [worker, parameter]: what a worker's piece has of the norm, and whether it has a gradient.
    parts = torch.zeros(2, group.size, len(chosen), dtype=torch.float64, device=group.device)
    dtype = torch.get_default_dtype()
    for i, (name, piece) in enumerate(chosen):
        if piece.grad is None or not dist._worker.holds("parameter", name):
            continue
        dtype = piece.grad.dtype
        if piece.grad.numel() > 0 and dist._worker.counts(name):
            parts[0, group.rank, i] = _partial_norm(piece.grad, norm_type)
            parts[1, group.rank, i] = 1
    group.all_reduce(parts)
    if not chosen:
        return torch.tensor(0.0)
    parts, there = parts[0], parts[1] > 0
    if norm_type == math.inf:
        norm = parts.max()
    elif norm_type == -math.inf:
        norm = parts.masked_fill(~there, math.inf).min()
    elif norm_type == 0:  # as torch: how many gradients are not all zero
        norm = (parts.sum(0) != 0).sum().double()
    else:
        norm = parts.sum().pow(1 / norm_type)
    norm = norm.masked_fill(~there.any(), 0).to(dtype)  # where nobody has a gradient; to ask for that would wait for the device
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, piece in chosen:
        if piece.grad is not None:
            gradient = plain(piece.grad)
            gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
    return norm


def clip_value_(dist, clip_value, parameters):
    """Distributed.clip_grad_value_."""
    for _, piece in _chosen(dist, parameters):
        if piece.grad is not None:
            plain(piece.grad).clamp_(-float(clip_value), float(clip_value))


def copied(tree):
    """Nested dicts and lists with tensors of their own, on the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(copied(value) for value in tree)
    return copy.copy(tree)


class Wholes:
    """Whole parameters for an optimizer that does not treat every element by itself. Every worker has all of them and runs the same
    step on them.

    parameters   {position of the parameter: whole parameter}
    """

    def __init__(self, dist, positions):
        self.group, self.worker, self.pieces, self.own = dist._group, dist._worker, dist._pieces, dist._own
        slots = dist._step_spec.parameters
        self.names = {i: slots[i].name for i in positions}
        self.shapes = {i: slots[i].tensor.shape for i in positions}
        self.parameters = {}
        for i in positions:
            start = dist._rank_0(slots[i].tensor)
            self.parameters[i] = torch.nn.Parameter(start, requires_grad=slots[i].tensor.requires_grad)

    def bytes(self, states):
        """Of the parameters, their gradients and their state, `states` bytes for each of a parameter."""
        return sum((2 + states) * p.numel() * p.element_size() for p in self.parameters.values())

    def _together(self, wanted):
        """The whole tensors of this worker's pieces: wanted is [(position, piece, or None)]. Collective."""
        whole, at = [], 0
        while at < len(wanted):
            end, size = at, 0
            dtype = self.parameters[wanted[at][0]].dtype
            while end < len(wanted) and self.parameters[wanted[end][0]].dtype == dtype and (end == at or size < _BUCKET):
                size += self.shapes[wanted[end][0]].numel()
                end += 1
            narrow = dtype in (torch.float16, torch.bfloat16)
            bucket = torch.zeros(size, dtype=torch.float32 if narrow else dtype, device=self.group.device)
            parts = bucket.split([self.shapes[i].numel() for i, _ in wanted[at:end]])
            for (i, piece), into in zip(wanted[at:end], parts):
                name = self.names[i]
                if piece is not None and piece.numel() > 0 and self.worker.counts(name):
                    place(into.view(self.shapes[i]), self.worker.part("parameter", name), plain(piece))
            self.group.all_reduce(bucket)
            whole += [part.view(self.shapes[i]).to(dtype) for (i, _), part in zip(wanted[at:end], parts)]
            at = end
        return whole

    def gather(self):
        """Parameters and gradients as the pieces are now. Collective."""
        positions = list(self.parameters)
        with torch.no_grad():
            here = {i: self.worker.holds("parameter", self.names[i]) for i in positions}
            flags = torch.tensor([[here[i], here[i] and self.pieces[i].grad is not None] for i in positions], dtype=torch.int32)
            with self.group.peers.collective():
                self.group.native.tell(flags)  # on the CPU, where nothing is queued
            held = [i for i, (holders, _) in zip(positions, flags.tolist()) if holders > 0]
            having = [i for i, (_, gradients) in zip(positions, flags.tolist()) if gradients > 0]
            for i, value in zip(held, self._together([(i, self.pieces[i] if here[i] else None) for i in held])):
                self.parameters[i].copy_(value)
            for i in positions:
                self.parameters[i].grad = None
            gradients = self._together([(i, self.pieces[i].grad if here[i] else None) for i in having])
            for i, value in zip(having, gradients):
                self.parameters[i].grad = value.clone()  # alone in its memory

    def scatter(self):
        """The pieces of the parameters after a step."""
        with torch.no_grad():
            for i, whole in self.parameters.items():
                if self.worker.holds("parameter", self.names[i]):
                    plain(self.pieces[i]).copy_(self.own("parameter", self.names[i], whole.detach()))

    def zero_grad(self, set_to_none):
        for i in self.parameters:
            clear(self.pieces[i], set_to_none)


def clear(piece, set_to_none):
    """Clears the gradient of a piece as torch does."""
    if set_to_none:
        piece.grad = None
    elif piece.grad is not None:
        plain(piece.grad).zero_()



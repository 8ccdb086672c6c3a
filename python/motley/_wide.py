"""Plans that compute in 16 bits, compared in 32: the same program on the same pieces, with more digits, beside the plain model.

In 16 bits two orders of one sum differ by a hundredth, which hides faults. Where the model itself asks for 16 bits (a conversion
in its code) there is no model in 32 bits to compare with, and the comparison in 16 has to do.
"""

import contextlib
import copy
import json
import re

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _motley, _torch
from ._agree import Agreed
from ._eager import plain_step
from ._guard import Check, Report
from ._pieces import plain
from ._plan import Plan
from ._runs import Run

_SHORT = (torch.bfloat16, torch.float16)


def wide(tensor):
    return tensor.float() if tensor.dtype in _SHORT else tensor


class _Seen(TorchDispatchMode):
    """Whether anything is computed in 16 bits."""

    found = False

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in _SHORT and "detach" not in str(function):
                self.found = True
        return result


@contextlib.contextmanager
def _without_autocast():
    """Autocast is off, whatever the model says."""
    kind = torch.autocast
    enter, before = kind.__enter__, _torch.autocast_modes()

    def entered(self):
        self._enabled = False
        return enter(self)

    kind.__enter__ = entered
    _torch.set_autocast_modes((False, False))
    try:
        yield
    finally:
        kind.__enter__ = enter
        _torch.set_autocast_modes(before)


def _widened(run, dist):
    """The run of the same program with 32-bit floats in the place of 16-bit ones."""
    text = json.loads(run.plan._native.text())
    text["graph"] = [re.sub(r'(?<![\w"])(bf16|f16)(?![\w"])', "f32", line) for line in text["graph"]]
    text.pop("precision", None)
    made = Plan(_motley.parse_plan(json.dumps(text), "the plan"), devices=run.plan.devices, made_for=run.plan._made_for)
    step = copy.copy(run.step)
    step.inputs = [(name, wide(tensor)) for name, tensor in step.inputs]
    step.targets = [(name, wide(tensor)) for name, tensor in step.targets]
    return Run(step, Agreed(made, run.watch), dist._group, dist._seed, False)


class WideCheck(Check):
    """The Check of a run that computes in 16 bits, with 32."""

    def __init__(self, check):
        vars(self).update(vars(check))
        self.narrow, self.run = check.run, _widened(check.run, check.dist)
        self.tensors = [wide(tensor) for tensor in self.tensors]

    def report_of_step(self):
        """Runs a step of the plan and compares it; collective."""
        worker, held, narrow = self.run.worker, self.dist._held, self.narrow.worker
        for slot in self.run.step.parameters:
            if worker.holds("parameter", slot.name):
                worker.set("parameter", slot.name, wide(plain(held.pieces[slot.name])).clone())
        for slot in self.run.step.buffers:
            if worker.holds("buffer", slot.name):
                worker.set("buffer", slot.name, wide(narrow.buffer(slot.name)).clone())
        pieces = [
            worker.piece("input", name, tensor).to(self.group.device)
            for (name, _, _), tensor in zip(self.run.leaves, self.tensors)
        ]
        with self.group.peers.collective():
            loss, gradients = worker.step(self.number, pieces)
        return self.report(loss, gradients)

    def _empty(self, slot):
        return wide(super()._empty(slot))

    def _plain_step(self, tensors, parameters, buffers, draws, parts, nudge):
        step = self.run.step
        parameters = [wide(tensor) for tensor in parameters or [slot.tensor.data for slot in step.parameters]]
        buffers = [wide(tensor.detach()) for tensor in buffers or [slot.tensor for slot in step.buffers]]
        with _without_autocast(), _Seen() as seen:
            outcome = plain_step(step, tensors, parameters, buffers, draws, parts, nudge)
        if seen.found:
            raise RuntimeError("it converts to 16 bits itself")
        return outcome


def report_in_32_bits(check):
    """The Report of a step in 32 bits of a plan that computes in 16; an empty one of other plans. Collective."""
    if not any(kind in _SHORT for kind in check.run.float_types):
        return Report()
    return WideCheck(check).report_of_step()

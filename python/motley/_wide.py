"""Plans compared with more digits: the same program on the same pieces, in wider floats, beside the plain model in these.

In 16 bits two orders of one sum differ by a hundredth, which hides faults: such plans are compared in 32 bits too. In 32 bits a
rounding error may decide whether a unit of a ReLU is on, which moves gradients by far more than rounding does: what differs there is
judged in 64 bits. Where the model itself asks for the narrower type (a conversion in its code) there is no model in wider floats to
compare with, and the comparison in its own has to do.
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
from ._guard import Check, Report, free_memory
from ._pieces import plain
from ._plan import Plan
from ._runs import Run

class Wider:
    """Floats of the types `narrow` become `wide`; `names`: the former as graphs have them, `name` the latter."""

    def __init__(self, narrow, names, wide, name):
        self.narrow, self.names, self.wide, self.name = narrow, names, wide, name

    def __call__(self, tensor):
        return tensor.to(self.wide) if tensor.dtype in self.narrow else tensor


_IN_32 = Wider((torch.bfloat16, torch.float16), "bf16|f16", torch.float32, "f32")
_IN_64 = Wider((torch.float32,), "f32", torch.float64, "f64")


class _Seen(TorchDispatchMode):
    """Whether anything is computed in one of these types."""

    def __init__(self, types):
        super().__init__()
        self.types, self.found = types, False

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in self.types and "detach" not in str(function):
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


@contextlib.contextmanager
def _made_in(kind):
    """What the model makes of numbers is of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _widened(run, dist, wider):
    """The run of the same program with wider floats."""
    text = json.loads(run.plan._native.text())
    text["graph"] = [re.sub(rf'(?<![\w"])({wider.names})(?![\w"])', wider.name, line) for line in text["graph"]]
    text.pop("precision", None)
    made = Plan(_motley.parse_plan(json.dumps(text), "the plan"), devices=run.plan.devices, made_for=run.plan._made_for)
    step = copy.copy(run.step)
    step.inputs = [(name, wider(tensor)) for name, tensor in step.inputs]
    step.targets = [(name, wider(tensor)) for name, tensor in step.targets]
    return Run(step, Agreed(made, run.watch), dist._group, dist._seed, False)


class WideCheck(Check):
    """The Check of the same run in wider floats."""

    def __init__(self, check, wider):
        vars(self).update(vars(check))
        self.wider, self.run = wider, _widened(check.run, check.dist, wider)
        self.tensors = [wider(tensor) for tensor in self.tensors]

    def report_of_step(self):
        """Runs a step of the plan and compares it; collective."""
        worker, held, wide = self.run.worker, self.dist._held, self.wider
        for slot in self.run.step.parameters:
            if worker.holds("parameter", slot.name):
                worker.set("parameter", slot.name, wide(plain(held.pieces[slot.name])).clone())
        for slot in self.run.step.buffers:
            if worker.holds("buffer", slot.name):
                worker.set("buffer", slot.name, wide(self.buffers[slot.name]).clone())
        pieces = [
            worker.piece("input", name, tensor).to(self.group.device)
            for (name, _, _), tensor in zip(self.run.leaves, self.tensors)
        ]
        with self.group.peers.collective():
            loss, gradients = worker.step(self.number, pieces)
        return self.report(loss, gradients)

    def _empty(self, slot):
        return self.wider(super()._empty(slot))

    def _plain_step(self, tensors, parameters, buffers, draws, parts, nudge):
        step, wide = self.run.step, self.wider
        parameters = [wide(tensor) for tensor in parameters or [slot.tensor.data for slot in step.parameters]]
        buffers = [wide(tensor.detach()) for tensor in buffers or [slot.tensor for slot in step.buffers]]
        with _without_autocast(), _made_in(wide.wide), _Seen(wide.narrow) as seen:
            outcome = plain_step(step, tensors, parameters, buffers, draws, parts, nudge)
        if seen.found:
            raise RuntimeError(f"it converts to {torch.finfo(wide.narrow[0]).bits} bits itself")
        return outcome


def report_in_32_bits(check):
    """The Report of a step in 32 bits of a plan that computes in 16; an empty one of other plans. Collective."""
    if not any(kind in _IN_32.narrow for kind in check.run.float_types):
        return Report()
    return WideCheck(check, _IN_32).report_of_step()


def report_in_64_bits(check):
    """The Report of the step that was checked, in 64 bits; None where it computes in these or a worker has no room. Collective."""
    if check.coarsest() is not torch.float32:
        return None
    group, run = check.group, check.run
    need = 2 * max(run.plan.peak_memory_bytes) + (2 * run.graph.step_bytes if group.rank == 0 else 0)
    if check.sum([float(need > free_memory(torch.device(group.device)))])[0]:
        return None
    return WideCheck(check, _IN_64).report_of_step()

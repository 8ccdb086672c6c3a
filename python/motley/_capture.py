"""capture(): one training step as a graph."""

import contextlib
import gc
import linecache
import os
import random
import sys
import warnings

import torch

from . import _motley, _rewrites, _torch
from ._errors import CaptureError, UserError
from ._hooks import Hooks
from ._step import Step, replaced, unchanged

_OWN = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (__file__, torch.__file__)
)

_REMEDIES = (
    (
        "reads a number out of a tensor",
        "; use torch.where or a mask, or compute it before the step and pass it as an input",
    ),
    ("draws random numbers, which", "; draw them before the step and pass them as an input"),
    ("; graphs hold real numbers", ": compute it in real numbers, or before the step and pass the result as an input"),
    (
        "knows the shape of its result",
        "; register a Meta kernel for it (torch.library), or call it before the step and pass the result as an input",
    ),
)


def _place_in_user_code(traceback):
    """'file:line: source' of the innermost frame that is neither torch's nor motley's; '' if there is none."""
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not os.path.abspath(file).startswith(_OWN) and not file.startswith("<frozen"):
            source = linecache.getline(file, traceback.tb_lineno).strip()
            place = f"{file}:{traceback.tb_lineno}: {source}"
        traceback = traceback.tb_next
    return place


def _explained(error):
    """What the user needs to know of an exception thrown while the step ran on Meta tensors; None: it is theirs."""
    text = str(error).split("\n")[0]
    if isinstance(error, CaptureError):
        return None
    if text.startswith(("[capture] ", "[torch] ")):
        text = text.split("] ", 1)[1]
    elif isinstance(error, (RuntimeError, TypeError, NotImplementedError)) and "meta" in text.lower():
        text = f"this needs a tensor's numbers, which a capture does not have ({text})" + _REMEDIES[0][1]
    else:
        return None
    text += "".join(remedy for sign, remedy in _REMEDIES if sign in text)
    place = _place_in_user_code(error.__traceback__)
    return f"[capture] {place + ': ' if place else ''}{text}"


def _random_states():
    """Of the random numbers that are not torch's."""
    states = [random.getstate()]
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        states += [keys.tobytes(), rest]
    return states


class _Watch:
    """What a step must not do, since a graph could not repeat it; with the line of the user's code that does it."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.before = [(p._version, _torch.storage_of(p)) for p in parameters]
        self.random, self.place, self.at = _random_states(), "", None

    def changed(self):
        """The position of a parameter that was changed, or -1."""
        for i, (parameter, before) in enumerate(zip(self.parameters, self.before)):
            if (parameter._version, _torch.storage_of(parameter)) != before:
                return i
        return -1

    def happened(self):
        return self.changed() >= 0 or _random_states() != self.random

    def trace(self, frame, event, _):
        """For sys.settrace: finds the line after which it has happened."""
        if os.path.abspath(frame.f_code.co_filename).startswith(_OWN) or frame.f_code.co_filename.startswith("<"):
            return None
        if not self.place and self.at is not None and self.happened():
            self.place = "{}:{}: {}: ".format(*self.at, linecache.getline(*self.at).strip())
        if event == "return":
            frame = frame.f_back
        self.at = frame.f_code.co_filename, frame.f_lineno
        return self.trace


def _meta(tensor, parameter=False):
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if parameter:
        return torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _no_collection():
    """Without the garbage collector, which takes as long as a quarter of a capture and finds nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _noted(reads):
    return contextlib.nullcontext() if reads is None else reads.noted()


def named(slots, tensors):
    return [(slot.name, tensor) for slot, tensor in zip(slots, tensors)]


def _overlap(a, b):
    """Whether two tensors of one memory may share numbers: their ranges meet."""
    (start, end), (other, last) = (
        (t.storage_offset(), t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) for t in (a, b)
    )
    return start <= last and other <= end


def _check_shared_memory(step, graph):
    """Refuses what plain PyTorch would see through shared memory and a graph, whose values are apart, would not."""
    groups, updated, read = {}, set(graph.updated_buffers), set(graph.read_buffers)
    for kind, slots in (("parameter", step.parameters), ("buffer", step.buffers)):
        for slot in slots:
            if slot.tensor.layout == torch.strided and slot.tensor.numel() > 0:
                groups.setdefault(_torch.storage_of(slot.tensor), []).append((kind, slot))
    for group in groups.values():
        for i, (kind, slot) in enumerate(group):
            for other_kind, other in group[i + 1 :]:
                if not _overlap(slot.tensor, other.tensor):
                    continue
                if other_kind == "parameter":
                    raise CaptureError(
                        f"[capture] parameters {slot.name} and {other.name} share memory; make them one Parameter object"
                    )
                if kind == "parameter" and slot.tensor.requires_grad and other.name in read:
                    raise CaptureError(
                        f"[capture] buffer {other.name} shares the memory of parameter {slot.name}, which training changes; "
                        f"use {slot.name} itself in the forward pass, or make the buffer a clone"
                    )
                changed = next((s for s in (slot, other) if kind == "buffer" and s.name in updated), None)
                if changed is not None:
                    kept = other if changed is slot else slot
                    raise CaptureError(
                        f"[capture] buffers {slot.name} and {other.name} share memory and the step changes {changed.name}, "
                        f"which {kept.name} would not see; make them one tensor, or compute {kept.name} in the forward pass"
                    )


def _check_next_step(graph, changes, captured):
    """Refuses a step that leaves plain attributes behind with which the next step computes something else."""
    different = "computes something else"
    held = [(change.state, dict(change.state)) for change in changes]
    for change in changes:
        change.state[change.key] = change.new
    try:
        different = "" if captured().text_without_model() == graph.text_without_model() else different
    except (RuntimeError, TypeError, ValueError, UserError) as error:
        different = f"fails ({str(error).splitlines()[0]})"
    finally:
        for state, before in held:
            state.clear()
            state.update(before)
    if different:
        raise CaptureError(
            f"[capture] {changes[0]}, and the next step {different}; change it between steps, or make it a buffer"
        )


def capture_step(step, name, samples=None, reads=None):
    """The graph of a step; of so many rows of its batch, where a pipeline takes batches in parts. `reads` notes what it reads."""
    batch = step.batch_size() if samples is None else samples
    whole = [tensor for _, tensor in step.leaves] if batch == step.batch_size() else step.rows(batch)
    parameters = [_meta(slot.tensor, parameter=True) for slot in step.parameters]
    buffers = [_meta(slot.tensor) for slot in step.buffers]
    leaves = [_meta(tensor) for tensor in whole]

    watch, hooks = _Watch(parameters), Hooks(step, parameters)
    owners = named(step.parameters, [slot.tensor for slot in step.parameters])
    owners += named(step.buffers, [slot.tensor for slot in step.buffers]) + step.leaves

    def run():
        loss = step.loss(leaves)
        changed = []
        for i, slot in enumerate(step.buffers):
            holder, key = slot.places[0]
            now = holder.get(key)
            if isinstance(now, torch.Tensor) and now is not buffers[i]:
                changed.append((i, now.detach()))
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"[capture] the loss is a {type(loss).__name__}; it must be a tensor of one number")
        return loss, changed, hooks.gradient

    def captured(run):
        with _no_collection(), _noted(reads), unchanged(step.model, step.loss_fn) as attributes, replaced(step.parameters + step.buffers, parameters + buffers):
            with torch.enable_grad(), _rewrites.active(owners[0][1].device, step.functions()), _torch.plain_attention(), hooks.recorded():
                graph = _motley.capture(
                    name,
                    named(step.parameters, parameters),
                    named(step.buffers, buffers),
                    [(leaf, tensor) for (leaf, _), tensor in zip(step.leaves, leaves)],
                    batch,
                    run,
                    owners,
                )
        return graph, attributes

    def traced():
        before = sys.gettrace()
        sys.settrace(watch.trace)
        try:
            return run()
        finally:
            sys.settrace(before)

    text = None
    try:
        graph, attributes = captured(run)
    except Exception as error:
        text = _explained(error)
        if text is None:
            raise
    if watch.happened():
        at = watch.changed()
        what = (
            f"the step changes parameter {step.parameters[at].name}; change it between steps, or make it a buffer"
            if at >= 0
            else "the model draws random numbers of Python or numpy, and a captured step would go on with those of the capture; "
            "use torch.rand, or draw them before the step and pass them as an input"
        )
        parameters = [_meta(slot.tensor, parameter=True) for slot in step.parameters]
        watch = _Watch(parameters)
        with contextlib.suppress(Exception):
            captured(traced)
        text = f"[capture] {watch.place}{what}"
    if text is not None:
        raise CaptureError(text) from None
    if any(p.grad is not None for p in parameters):
        raise CaptureError(
            "[capture] the model calls backward() in its forward pass, which would add to gradients; use torch.autograd.grad"
        )
    _check_shared_memory(step, graph)
    if attributes and all(change.plain for change in attributes):
        _check_next_step(graph, attributes, lambda: captured(run)[0])
    for change in attributes:
        if change.plain:
            warnings.warn(
                f"[capture] {change}; a graph does not repeat this, so make it a buffer if later steps depend on it", stacklevel=3
            )
    graph.at = lambda samples: capture_step(step, name, samples)  # for engines that plan micro-batches
    return graph


def capture(model, example_inputs, loss_fn=None, *, name=None):
    """One training step of a model as a graph: forward pass, loss and gradients.

    model            any torch.nn.Module; it is not changed, and its parameters may be on any device
    example_inputs   (inputs, targets) of one global batch, or (inputs,); inputs is a tensor, a tuple of positional or a
                     dict of keyword arguments. Only shapes and types matter.
    loss_fn          loss_fn(model(inputs), targets) is a tensor of one number; without it, the model returns the loss

    Raises CaptureError, which names the line of the model that cannot be captured.
    """
    step = Step(model, example_inputs, loss_fn)
    return capture_step(step, name or type(model).__name__)

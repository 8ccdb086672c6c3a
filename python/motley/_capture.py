"""capture(): one training step as a graph."""

import collections
import contextlib
import gc
import linecache
import os
import random
import re
import sys
import warnings

import torch

from . import _motley, _rewrites, _torch
from ._assertions import OWN, Assertions, users_frame
from ._complex import Complex
from ._errors import CaptureError, UserError, warn
from ._hooks import Hooks
from ._pairs import Following, is_fixed
from ._step import Step, replaced, unchanged

_NEXT_STEPS, _NEXT_NODES = 8, 16000  # that are tried where a step changes attributes: how many, and nodes of them together

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
    place = users_frame(traceback)
    if place is None:
        return ""
    file, line = place[0].co_filename, place[1]
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def _place_of_backward(captured):
    """The line whose backward pass fails; '' if that is not known. Runs the step again as torch's anomaly mode has it."""
    with warnings.catch_warnings(record=True) as said, torch.autograd.detect_anomaly(check_nan=False):
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):
            captured()
    lines = "\n".join(str(one.message) for one in said if "Traceback of forward call" in str(one.message)).splitlines()
    places = [re.match(r' *File "(.*)", line (\d+), in ', line) for line in lines]
    for found in reversed([place for place in places if place]):
        file, line = found[1], int(found[2])
        if file == __file__:
            break
        if not os.path.abspath(file).startswith(OWN) and not file.startswith("<frozen"):
            return f"{file}:{line}: {linecache.getline(file, line).strip()}"
    return ""


def _explained(error, captured):
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
    place = _place_in_user_code(error.__traceback__) or _place_of_backward(captured)
    return f"[capture] {place + ': ' if place else ''}{text}"


def _random_states():
    """Of the random numbers that are not torch's."""
    states = [random.getstate()]
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        states += [keys.tobytes(), rest]
    return states


def _is_own(frame):
    """Whether a frame is torch's or motley's."""
    file = frame.f_code.co_filename
    return os.path.abspath(file).startswith(OWN) or file.startswith("<")


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

    def expect(self, slots, prepared):
        """Changes of those that the step prepares; capture.h."""
        for i, (slot, parameter) in enumerate(zip(slots, self.parameters)):
            if slot.name in prepared:
                self.before[i] = (parameter._version, _torch.storage_of(parameter))

    def happened(self):
        return self.changed() >= 0 or _random_states() != self.random

    def trace(self, frame, event, _):
        """For sys.settrace: finds the line after which it has happened."""
        if _is_own(frame):
            return None
        if not self.place and self.at is not None and self.happened():
            self.place = "{}:{}: {}: ".format(*self.at, linecache.getline(*self.at).strip())
        if event == "return":
            frame = frame.f_back
            while frame is not None and _is_own(frame):
                frame = frame.f_back
            if frame is None:
                return self.trace
        self.at = frame.f_code.co_filename, frame.f_lineno
        return self.trace


def _meta(tensor, parameter=False):
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if parameter:
        return torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _undisturbed():
    """Without imports of torch, without the garbage collector, which takes as long as a quarter of a capture and finds nothing, and
    without what anomaly detection reads."""
    _torch.ready_to_capture()
    was = gc.isenabled()
    gc.disable()
    try:
        with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
            yield
    finally:
        if was:
            gc.enable()


def _noted(reads):
    return contextlib.nullcontext() if reads is None else reads.noted()


def _stand_in(slot, tensor):
    """What the model holds in the place of a buffer while it is captured."""
    return Complex.of(tensor, slot.conjugate) if slot.complex else tensor


def _new_buffers(step, stand_ins):
    """[(position, value)] of the buffers that the forward pass replaced, as their slots' tensors are."""
    changed = []
    for i, slot in enumerate(step.buffers):
        holder, key = slot.places[0]
        now = holder.get(key)
        if not isinstance(now, torch.Tensor) or now is stand_ins[i]:
            continue
        if now.is_complex() != slot.complex:
            raise UserError(f"[capture] the step makes buffer {slot.name} {now.dtype} of {slot.held.dtype}; keep its type")
        changed.append((i, slot.state_of(now).detach()))
    return changed


def _check_complex(step):
    """Refuses complex tensors that would have to be trained or cut."""
    for kind, named_tensors in (("parameter", named(step.parameters, [slot.tensor for slot in step.parameters])), ("input", step.leaves)):
        for name, tensor in named_tensors:
            if tensor.is_complex():
                raise CaptureError(
                    f"[capture] {kind} {name} is complex; graphs hold real numbers: give torch.view_as_real of it, and take "
                    "torch.view_as_complex of that in the forward pass"
                )


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


def _of_constants(value):
    """Whether all tensors of an attribute follow from constants alone, such as a mask that is made once; while a step is captured."""
    if isinstance(value, torch.Tensor):
        return is_fixed(value)
    if isinstance(value, dict):
        return all(map(_of_constants, value.values()))
    if isinstance(value, (list, tuple, set, collections.deque)):
        return all(map(_of_constants, value))
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device))


def _check_next_steps(graph, changes, captured):
    """Refuses a step that leaves attributes behind with which a later step computes something else, as far as tried."""
    text, name, held = graph.text_without_model(), str(changes[0]), []
    different = "computes something else"
    try:
        for number in range(max(1, min(_NEXT_STEPS, _NEXT_NODES // graph.nodes))):
            for change in changes:
                held.append((change.state, change.key in change.state, change.key, change.state.get(change.key)))
                change.state[change.key] = change.new
            later, changes = captured()
            if later.text_without_model() != text:
                break
            if not changes:
                return
        else:
            return
    except (RuntimeError, TypeError, ValueError, UserError) as error:
        different = f"fails ({str(error).splitlines()[0]})"
    finally:
        for state, there, key, before in reversed(held):
            state[key] = before
            if not there:
                del state[key]
    which = "the next step" if number == 0 else f"the step {number + 1} later"
    raise CaptureError(f"[capture] {name}, and {which} {different}; change it between steps, or make it a buffer")


def capture_step(step, name, samples=None, reads=None, repeated=None):
    """The graph of a step; of so many rows of its batch, where a pipeline takes batches in parts. `reads` notes what it reads.

    repeated   gets what the forward pass changes of plain attributes, if the caller repeats it after every step
    """
    batch = step.batch_size() if samples is None else samples
    whole = [tensor for _, tensor in step.leaves] if batch == step.batch_size() else step.rows(batch)
    _check_complex(step)
    parameters = [_meta(slot.tensor, parameter=True) for slot in step.parameters]
    buffers = [_meta(slot.tensor) for slot in step.buffers]
    leaves = [_meta(tensor) for tensor in whole]

    watch, hooks, assertions = _Watch(parameters), Hooks(step, parameters), Assertions(reads)
    owners = named(step.parameters, [slot.tensor for slot in step.parameters])
    owners += named(step.buffers, [slot.tensor for slot in step.buffers]) + step.leaves

    places = {(id(holder), key) for slot in step.parameters + step.buffers for holder, key in slot.places}
    attributes, fixed, stand_ins = None, set(), []
    complex_numbers = Following(any(slot.complex for slot in step.buffers))

    def run():
        loss = step.loss(leaves)
        if step.buffers:
            _rewrites.run_again()
        fixed.update(
            (id(change.state), change.key)
            for change in attributes.changes()
            if not change.plain and (id(change.state), change.key) not in places and _of_constants(change.new)
        )
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"[capture] the loss is a {type(loss).__name__}; it must be a tensor of one number")
        return loss, _new_buffers(step, stand_ins), hooks.gradient

    def captured(run, again=True):
        """(graph, what the step changed of attributes and does not follow from constants); again where the first pass registered hooks"""
        nonlocal attributes
        fixed.clear()
        stand_ins[:] = map(_stand_in, step.buffers, buffers)
        with _undisturbed(), _noted(reads), unchanged(step.model, step.loss_fn) as attributes:
            with replaced(step.parameters + step.buffers, parameters + stand_ins), torch.enable_grad(), _torch.plain_operators():
                with _rewrites.active(owners[0][1].device, step.functions()), hooks.recorded(), complex_numbers.followed():
                    graph = _motley.capture(
                        name,
                        named(step.parameters, parameters),
                        named(step.buffers, buffers),
                        [(leaf, tensor) for (leaf, _), tensor in zip(step.leaves, leaves)],
                        batch,
                        run,
                        owners,
                    )
            hooked = attributes.keep_hooks()
            changes = [change for change in attributes.changes() if (id(change.state), change.key) not in fixed]
        return captured(run, again=False) if hooked and again else (graph, changes)

    def traced():
        before = _motley.Tools()
        sys.settrace(watch.trace)
        try:
            return run()
        finally:
            before.put_back_debugger()

    text = None
    try:
        graph, changes = complex_numbers.tried(lambda: assertions.left_out(lambda: captured(run)))
    except Exception as error:
        text = _explained(error, lambda: assertions.left_out(lambda: captured(run)))
        if text is None:
            raise
    else:
        watch.expect(step.parameters, {name for name, _, _ in graph.prepared})
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
            assertions.left_out(lambda: captured(traced))
        text = f"[capture] {watch.place}{what}"
    if text is not None:
        raise CaptureError(text) from None
    if any(p.grad is not None for p in parameters):
        raise CaptureError(
            "[capture] the model calls backward() in its forward pass, which would add to gradients; use torch.autograd.grad"
        )
    _check_shared_memory(step, graph)
    if repeated is not None and all(change.plain for change in changes):
        repeated += changes
    elif changes:
        _check_next_steps(graph, changes, lambda: assertions.left_out(lambda: captured(run)))
        for change in changes:
            if change.plain:
                warn(f"[capture] {change}; a graph does not repeat this, so make it a buffer if later steps depend on it")
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

"""The plans that one model is trained by: one for every form of batch and every set of constants that training meets.

A graph repeats what one forward pass did. Where a later batch has another shape, another plain argument, or where the model reads
another attribute than before, the step is captured again; its plan takes the program of an earlier one where that suits, so that all
pieces stay where they are, and is searched otherwise, and the state moves. Plans are kept, and taken again when their form comes back.
"""

import gc
import re
import warnings
import weakref

import torch

from . import _backend, _motley
from ._agree import captured, followed_plan
from ._errors import UserError, warn

_MOST = 16  # plans kept
_MANY = 8  # that are worth a warning


class Run:
    """A plan for batches of one form, and this worker's part in it."""

    def __init__(self, step, agreed, group, seed, emulate):
        plan = agreed.plan
        self.plan, self.unchecked = plan, 0
        self.alike = {}  # number of another run: whether it holds the same pieces
        speed = 0.0
        if emulate and group.rank in plan.devices:
            speed = plan.cluster.speed(plan.devices.index(group.rank))
        for backend in plan.cluster.backends:
            if backend != group.native.backend:
                _backend.check(backend, torch.device(group.device).type)
                _backend.begin(group.native)
        self.worker = _motley.Worker(plan._native, group.native, plan.devices, seed, speed)
        self.leaves = [(name, tensor.shape, tensor.dtype) for name, tensor in step.leaves]
        self.adopt(step, agreed.watch)
        self._graph, self._types, self._draws = None, None, None

    def adopt(self, step, watch):
        """What the step was captured with last."""
        self.step, self.watch = step, watch
        self.trained = [slot.tensor.requires_grad for slot in step.parameters]
        self.flags = flags_of(step)

    @property
    def graph(self):
        if self._graph is None:
            self._graph = self.plan.graph()
        return self._graph

    @property
    def float_types(self):
        """The floating-point types in which the plan computes."""
        if self._types is None:
            kinds = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
            self._types = {kinds[word] for word in set(re.findall(r": (f64|f32|bf16|f16)\[", str(self.graph)))}
        return self._types

    @property
    def draws(self):
        """Whether a step draws random numbers."""
        if self._draws is None:
            self._draws = bool(self.graph.random_nodes)
        return self._draws

    @property
    def updated(self):
        """The buffers that a step changes."""
        return set(self.graph.updated_buffers)

    def takes(self, shapes, constants):
        return all(whole == shape for (_, whole, _), shape in zip(self.leaves, shapes)) and _same(self.step.constants, constants)


def flags_of(step):
    """A byte for each parameter: whether it takes a gradient, and how many hooks it has."""
    return _motley.flags([slot.tensor for slot in step.parameters])


def _changed_flags(before, now, step):
    for slot, a, b in zip(step.parameters, before, now):
        if a & 1 != b & 1:
            return f"requires_grad of {slot.name} is {bool(b & 1)}"
    return "the hooks of a parameter changed"


def _same(constants, others):
    return len(constants) == len(others) and all(
        a is b or (name == other and type(a) is type(b) and a == b) for (name, a), (other, b) in zip(constants, others)
    )


class Runs:
    """Which plan a step takes. `replan(graph)` searches one; `move(run)` makes a plan's worker the one that holds the state."""

    def __init__(self, group, replan, make_run):
        self.group, self.replan, self.make_run = group, replan, make_run
        self.known, self.made, self.warned, self.again = [], 0, False, 0

    def add(self, run):
        run.number, self.made = self.made, self.made + 1
        self.known.insert(0, run)
        if len(self.known) > _MOST:
            self.known.pop()
        if len(self.known) > _MANY and not self.warned:
            self.warned = True
            warn(
                f"[distribute] the step has been captured in {len(self.known)} forms; each costs a capture and memory: pad batches "
                "to a few sizes, and make numbers that change at every step an input or a buffer",
            )

    def fitting(self, step, shapes, constants):
        """(a known run for a batch of these shapes and constants, None), or (None, why there is none in words)."""
        flags = flags_of(step)
        why = ""
        for at, run in enumerate(self.known):
            if not run.takes(shapes, constants):
                why = why or self._other_form(run, shapes, constants)
                continue
            changes = run.watch.changes()
            if changes and run.watch.repeated and run.flags == flags:
                same = self._captured_again(run, shapes, constants)
                if same is not None:
                    return same, None
            if run.flags != flags:
                changes.append(_changed_flags(run.flags, flags, step))
            if not changes:
                if at > 0:
                    self.known.insert(0, self.known.pop(at))
                return run, None
            why = changes[0]
        return None, why

    def _captured_again(self, run, shapes, constants):
        """The known run whose graph the step has now, where its own forward pass changed an attribute; None if none has."""
        self.again += 1
        if self.again == _MANY and self.group.rank == 0:
            warn(
                f"[distribute] {run.watch.repeated[0]}, so that the step is captured at every step to see whether it is still the "
                "same; make it a buffer if that takes long"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _, watch = captured(run.step)
        except UserError:
            return None  # follow() says it on all workers
        for at, known in enumerate(self.known):
            if known.watch.of == watch.of and known.takes(shapes, constants):
                known.adopt(run.step, watch)
                self.known.insert(0, self.known.pop(at))
                return known
        return None

    @staticmethod
    def _other_form(run, shapes, constants):
        for (name, whole, _), shape in zip(run.leaves, shapes):
            if whole != shape:
                return f"{name} is {list(shape)}, not {list(whole)} as before"
        for (name, old), (_, new) in zip(run.step.constants, constants):
            if not _same([(name, old)], [(name, new)]):
                return f"{name} is {new!r}, not {old!r} as before"
        return "the arguments changed"

    def follow(self, step, why):
        """A run for a step that none is known to fit; collective."""
        try:
            agreed = followed_plan(step, self.group, [run.plan for run in self.known], self.replan)
        except UserError as error:
            raise UserError(
                f"[distribute] the step changed ({why}) and cannot be followed: {error}; keep it as it was, or call distribute() again"
            ) from None
        text = str(agreed.plan.graph())
        for known in self.known:  # what changed was read, and mattered not
            if str(known.graph) == text and known.takes([tensor.shape for _, tensor in step.leaves], known.step.constants):
                known.adopt(step, agreed.watch)
                self.known.insert(0, self.known.pop(self.known.index(known)))
                return known
        run = self.make_run(step, agreed)
        self.add(run)
        return run


class Untouched:
    """Whether the tensors of the user's model are those that distribute() found."""

    def __init__(self, step):
        self.slots = [("parameter", slot) for slot in step.parameters] + [("buffer", slot) for slot in step.buffers]
        self.accept()

    def accept(self, slots=None):
        """All as they are now, or some."""
        now = self._now()
        if slots is None:
            self.versions = now
            return
        chosen = {id(slot) for slot in slots}
        self.versions = [b if id(slot) in chosen else a for (_, slot), a, b in zip(self.slots, self.versions, now)]

    def touched(self, slots):
        """Those of `slots` that were changed in place."""
        chosen = {id(slot) for slot in slots}
        return [slot for (_, slot), a, b in zip(self.slots, self.versions, self._now()) if id(slot) in chosen and a != b]

    def _now(self):
        return _motley.versions([slot.tensor for _, slot in self.slots])

    def changed(self):
        """[(kind, slot)] that were changed in place; UserError where a tensor is another one."""
        found = []
        for (kind, slot), version, now in zip(self.slots, self.versions, self._now()):
            tensor = slot.held
            for holder, key in slot.places:
                held = holder[key] if isinstance(holder, list) else holder.get(key)
                if held is not tensor:
                    alike = isinstance(held, torch.Tensor) and held.shape == tensor.shape and held.dtype == tensor.dtype
                    if kind == "buffer" and alike and held.is_conj() == slot.conjugate:
                        slot.hold(held)
                        tensor = held
                        version = -1
                    else:
                        raise UserError(
                            f"[distribute] {kind} {slot.name} of the model was replaced after distribute(); call distribute() again"
                        )
            if now != version:
                found.append((kind, slot))
        return found


class Claims:
    """Which distribute() trains which parameters: each has pieces of its own, so that no two may train one."""

    def __init__(self):
        self.owners, self.count = {}, 0  # id of a parameter: (it, its Distributed), weakly

    def owner(self, parameter):
        known, owner = self.owners.get(id(parameter), (None, None))
        return owner() if known is not None and known() is parameter else None

    def claim(self, dist, slots):
        """Says that `dist` trains the parameters of these slots that take gradients, and reads the others."""
        others = [slot for slot in slots if self.owner(slot.tensor) not in (None, dist)]
        if others:
            del others
            gc.collect()  # the other may only wait for it
        for slot in slots:
            if self.owner(slot.tensor) not in (None, dist):
                raise UserError(
                    f"[distribute] parameter {slot.name} is trained by another distribute() call too, and each call has its own "
                    "copy; put the losses that share modules into one step, or delete the other Distributed first"
                )
        for slot in slots:
            if slot.tensor.requires_grad and self.owner(slot.tensor) is None:
                self.owners[id(slot.tensor)] = weakref.ref(slot.tensor), weakref.ref(dist)
                self.count += 1


claims = Claims()

"""The part of Distributed that decides which plan a step takes, and what it compares.

Before a step: is everything as the plan's capture found it, and did all workers get the same batch? If not, another plan is taken,
made, or the step is refused. After the first steps of a plan: are loss, gradients and buffers those of the plain model?
"""

import contextlib

import torch

from . import _motley, _torch
from ._agreement import Batches, capturing, differs, same_batch
from ._errors import MismatchError, UserError, warn
from ._guard import FIRST_STEPS, FURTHER_PLANS, Check, compare_slice, rows_with_room
from ._mirror import inside
from ._pieces import Piece, plain
from ._runs import Run, Runs, Untouched, claims, flags_of


def _queued(tensor, device):
    """A tensor on a device; one of the CPU goes there behind what is queued, and nobody waits for that."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu" and not capturing():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)  # what is given may change meanwhile
        return tensor.to(device, non_blocking=True)
    return tensor.to(device)


class Following:
    """Mixed into Distributed, whose state it uses."""

    def _begin(self, step, agreed, replan, emulate, verify):
        group, self._mirror, self._flags = self._group, None, None
        self._runs = Runs(group, replan, lambda *form: Run(*form, group, self._seed, emulate))
        self._runs.add(self._runs.make_run(step, agreed))
        self._take(self._runs.known[0])
        self._verify, self._run.unchecked = verify, FIRST_STEPS if verify else 0
        self._claims, self._untouched, self._batches = -1, Untouched(step), Batches(group)
        self._counts, self._rows_of = None, None  # rows of each worker, of which plan

    # ---- which plan -----------------------------------------------------------------------------------------------

    def _take(self, run):
        scale = getattr(getattr(self, "_step_spec", None), "scale", None)
        if scale is not None:
            run.step.scale = scale
        self._run, self._worker, self.plan, self._step_spec, self._leaves = run, run.worker, run.plan, run.step, run.leaves
        if self._mirror is not None:
            self._mirror.show_buffers(run)

    def _ready(self, inputs, targets):
        """The tensors of a batch, after a plan was taken that suits it; collective where none is known yet."""
        step, run = self._step_spec, self._runs.known[0]
        tensors, constants = step.match(inputs, targets[0] if targets else None, bool(targets))
        for (name, _, dtype), tensor in zip(run.leaves, tensors):
            if tensor.dtype != dtype:
                raise UserError(f"[distribute] {name} is {tensor.dtype}; example_inputs had {dtype}")
        if self._claims != claims.count:
            claims.claim(self, step.parameters)
            self._claims = claims.count
        self._follow_flags()
        news = self._follow_tensors()
        shapes = [tensor.shape for tensor in tensors]
        if self._counts is not None and self._are_rows(tensors):
            shapes = [whole for _, whole, _ in self._rows_of.leaves]
        found, why = self._runs.fitting(step, shapes, constants)
        rows = self._counts is not None and shapes != [tensor.shape for tensor in tensors]
        number = found.number if found else -1 - self._runs.made
        self._batches.take(self._steps, tensors, constants, news, rows)
        self._group.agree_begin(self._batches.digest(self._steps, number))
        if found is self._run:
            return tensors  # whether all agree is known after the step
        self._agreed()
        if found is None:
            made = self._runs.made
            found = self._runs.follow(step.of_batch(inputs, targets[0] if targets else None), why)
            if self._verify and self._runs.made > made and made <= FURTHER_PLANS:
                found.unchecked = 1
        if found is self._run:
            self._take(found)
        else:
            self._switch(found)
        self._group.agree_begin(self._batches.digest(self._steps, found.number))
        return tensors

    def _agreed(self):
        """UserError where the worker before this one in the ring does something else in this step."""
        group = self._group
        if group.size == 1:
            return
        with group.peers.collective():  # whoever raises here has not met the others in the step
            what, rank = differs(group.compared, group.native.end_exchange()), (group.rank - 1) % group.size
            if what:
                error = self._batches.refusal(what, group.rank, rank, self._steps)
                group.peers.cut_off()  # the others wait for this one in the step, whatever becomes of the error
                raise error

    def _follow_flags(self):
        """requires_grad, which may be changed on the model or on the pieces."""
        flags = self._run.flags, flags_of(self._step_spec), _motley.flags(self._pieces)
        if flags == self._flags:
            return
        for slot, piece, before in zip(self._step_spec.parameters, self._pieces, self._run.trained):
            if piece._backward_hooks:
                raise UserError(
                    f"[distribute] a piece of {slot.name} has a hook, which would see a part of the gradient; register it on the "
                    "model's own parameter"
                )
            if slot.tensor.requires_grad != piece.requires_grad:
                if slot.tensor.requires_grad != before:
                    piece.requires_grad_(slot.tensor.requires_grad)
                elif piece.requires_grad:
                    slot.tensor.requires_grad_(True)
        self._flags = self._run.flags, flags_of(self._step_spec), _motley.flags(self._pieces)

    def _follow_tensors(self):
        """Tensors of the model that were changed since: buffers that no step changes are taken anew, others are refused.

        Returns the buffers that are new.
        """
        changed = self._untouched.changed()
        if not changed:
            return []
        whole, new = None, []
        for kind, slot in changed:
            if kind == "buffer" and slot.name not in self._run.updated:
                new.append(slot.tensor)
                if self._worker.holds("buffer", slot.name):
                    self._worker.set("buffer", slot.name, self._own("buffer", slot.name, slot.tensor.detach()))
                continue
            whole = self._whole_tensors() if whole is None else whole
            if not torch.equal(whole[slot.name].to(slot.tensor.device), slot.tensor.detach()):
                raise UserError(
                    f"[distribute] {kind} {slot.name} of the model was changed, but training goes on with the pieces of "
                    "distribute(); change dist.parameters() in place, or call dist.load_state_dict()"
                )
        with self._group.peers.changed:
            self._worker.publish()
        self._untouched.accept()
        return new

    def _switch(self, run):
        """Another plan: it takes the pieces as they are, or the state moves; collective."""
        with contextlib.nullcontext() if self._keeper is None else self._keeper.lock:
            self._switch_to(run)
            if self._keeper is not None:
                self._keeper.keep_second()

    def _switch_to(self, run):
        old, held = self._run, self._held
        kinds = [("parameter", slot) for slot in run.step.parameters] + [("buffer", slot) for slot in run.step.buffers]
        differ = float(any(
            old.worker.holds(kind, slot.name) != run.worker.holds(kind, slot.name)
            or (old.worker.holds(kind, slot.name) and old.worker.part(kind, slot.name) != run.worker.part(kind, slot.name))
            for kind, slot in kinds
        ))  # fmt: skip
        if old.number not in run.alike:
            differ = torch.tensor([differ]).to(self._group.device)
            self._group.all_reduce(differ)
            run.alike[old.number] = old.alike[run.number] = differ.item() == 0
        if not run.alike[old.number]:
            self._move(run)
            return
        for slot in run.step.parameters:
            if run.worker.holds("parameter", slot.name):
                run.worker.set("parameter", slot.name, held.pieces[slot.name])
        for slot in run.step.buffers:
            if run.worker.holds("buffer", slot.name):
                run.worker.set("buffer", slot.name, old.worker.buffer(slot.name))
        with self._group.peers.change(held):
            held.worker = run.worker
            self._take(run)
            self._worker.publish()
            held.mark = held.versions()

    def _move(self, run):
        """The whole state, put together and divided again as another plan holds it; collective."""
        if any(piece.grad is not None for piece in self._pieces):
            raise UserError(
                "[distribute] the step changed between backward() and step(), and its new plan divides the parameters otherwise; "
                "call dist.step() or dist.zero_grad() first"
            )
        if self.optimizer is None and self._steps > 0:
            raise UserError(
                "[distribute] the step changed and its new plan divides the parameters otherwise, which an optimizer of your own "
                "cannot follow; give distribute() the optimizer"
            )
        if not self._by_element:
            raise UserError(
                f"[distribute] the step changed and its new plan divides the parameters otherwise, which {type(self.optimizer).__name__} "
                "cannot follow; keep the form of batches and model"
            )
        whole = {name: tensor.detach().cpu().clone() for name, tensor in self._whole_tensors().items()}
        state = self.optimizer_state_dict() if self.optimizer is not None else None
        self._group.barrier()  # nobody asks for the old pieces any more
        held = self._held
        self._take(run)
        held.nobodys = {name: whole[name] for name in self._held_by_nobody(run.step)}
        with self._group.peers.change(held), torch.no_grad():
            held.lay_out(run.worker, [slot.name for slot in run.step.parameters], [slot.name for slot in run.step.buffers])
            self._group.peers.forget_layouts(held)
            held.pieces.clear()
            for slot, piece in zip(run.step.parameters, self._pieces):
                with _torch.without_subclasses():
                    piece.data = self._own("parameter", slot.name, whole[slot.name])
                if self._worker.holds("parameter", slot.name):
                    held.pieces[slot.name] = piece
                    self._worker.set("parameter", slot.name, piece)
            for slot in run.step.buffers:
                if self._worker.holds("buffer", slot.name):
                    self._worker.set("buffer", slot.name, self._own("buffer", slot.name, whole[slot.name]))
            self._worker.publish()
            held.mark = held.versions()
        if self._plain_pieces and not self._all_whole(run.step):
            self._plain_pieces = False
            for piece in self._pieces:
                piece.__class__ = Piece
        if state is not None:
            self.load_optimizer_state_dict(state)

    # ---- the step and its guard -----------------------------------------------------------------------------------

    def _prepare(self):
        """Does to pieces what the step does to parameters before it reads them (`weight.data.clamp_(-1, 1)`)."""
        held = [self._held.pieces]
        if self._keeper is not None and self._keeper.second is not None:
            held.append(self._keeper.second.pieces)
        for name, operator, arguments in self._run.watch.prepared:
            for piece in (plain(pieces[name]).data for pieces in held if name in pieces):
                piece.copy_(getattr(torch.ops.aten, operator.split("::")[1])(piece, *arguments))

    def _stepped(self, tensors):
        """(loss, gradients) of the taken plan, compared with the plain step in its first steps. Collective."""
        run, peers, held = self._run, self._group.peers, self._held
        self._prepare()
        if run.unchecked > 0 and rows_with_room(self) < run.plan.batch:
            number = self._group.compared
            self._agreed()
            compare_slice(self, tensors, rows_with_room(self))
            if self._run is not run:
                self._switch(run)
            run.unchecked = 0
            self._group.agree_begin(number)
        if held.own_steps:
            peers.settle(held, True)
        if run.unchecked > 0:
            same_batch(peers, held)  # on all, and where any two differ all refuse
        check = Check(self, tensors) if run.unchecked > 0 else None
        words = check.in_32_bits() if check is not None else ""
        if words:
            raise MismatchError(words)
        pieces = [self._input(*leaf, tensor) for leaf, tensor in zip(self._leaves, tensors)]
        with peers.collective():
            loss, gradients = run.worker.step(self._steps, pieces)
        self._agreed()
        with peers.collective():
            slow = run.worker.slow_devices()
        if self._keeper is not None and self._keeper.replanning is not None:
            self._keeper.replanning.note(slow)
        for device, factor, before in slow if self._group.rank == run.plan.devices[0] else ():
            warn(
                f"[distribute] step {self._steps}: device {run.plan.devices[device]} ({run.plan.cluster.device(device)}) computes {factor:.1f} "
                f"times as long as {'before' if before else 'planned'}; measure it again (python -m motley.discover) and plan again, or do without it"
            )
        if check is not None:
            run.unchecked -= 1
            check.raise_or_warn(loss, gradients)
        for change in run.watch.repeated:
            change.repeat()
        return loss, gradients

    def _fresh(self):
        """Whether this worker's state is what its model has: nothing was trained or loaded yet, here or by another distribute()."""
        held = self._held
        return self._models_own and held.count == 1 and bool(held.pieces) and held.versions() == held.mark

    @inside
    def verify(self, inputs, *targets):
        """Runs a step on a batch and compares loss, gradients and buffers with the plain model's; collective.

        Nothing is trained. Returns what differs, in words; '' if nothing does.
        """
        tensors = self._ready(inputs, targets)
        self._prepare()
        return Check.alone(self, tensors)

    def _are_rows(self, tensors):
        """Whether these are this worker's rows of a DataSplitter."""
        mine = max(self._counts[self._group.rank], 1)
        leaves = self._rows_of.leaves
        return any(tensor.shape != whole for tensor, (_, whole, _) in zip(tensors, leaves)) and all(
            tensor.shape == whole or (tensor.dim() > 0 and tensor.shape[0] == mine and tensor.shape[1:] == whole[1:])
            for tensor, (_, whole, _) in zip(tensors, leaves)
        )

    def _input(self, name, whole, dtype, tensor):
        if tensor.shape == whole:
            return _queued(self._worker.piece("input", name, tensor), self._group.device)
        mine = self._counts[self._group.rank]
        tensor = _queued(tensor[:mine].detach(), self._group.device)  # a worker without rows is given one that it does not use
        if self._worker.input_placement(name) != "R":
            return tensor.contiguous()
        with self._group.peers.collective():
            return self._worker.gather_rows(tensor, self._counts)

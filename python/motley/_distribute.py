"""distribute(): a model trained by a plan, used like one wrapped in DistributedDataParallel.

A step's gradients are computed with its loss; `backward` hands them to pieces of the parameters, which the user's own
optimizer steps. Where a plan leaves devices out, the workers that it uses are a group of their own. The others hold nothing:
a step is for them a message that they have come to it, without which it does not begin, and one with its loss.
"""

import collections
import inspect
import os
import warnings
import weakref

import torch

from . import _gradients, _motley, _optim, _scaler, _torch
from ._agree import agreed_plan, replanner, send_text
from ._errors import UserError
from ._following import Following
from ._gradients import Wholes
from ._guard import wanted
from ._pieces import Piece, guarded, plain
from ._plan import cluster_of, precision_of
from ._scaler import ScaledStep
from ._state import Held, Peers
from ._step import Step, call_model, loss_of, prefix_of_loss, replaced

_groups = {}  # [device] joined once in the life of the process


class Workers:
    """The group of workers: what all do together, and what each may ask of the others."""

    def __init__(self, native):
        self.native, self.rank, self.size, self.device, self.sockets = (
            native, native.rank, native.size, native.device, native.sockets)  # fmt: skip
        self.peers = Peers(native)

    def all_reduce(self, tensor):
        with self.peers.collective():
            self.native.all_reduce(tensor)

    def barrier(self):
        with self.peers.collective():
            self.native.barrier()

    def agree_begin(self, number):
        """Begins to compare a number with all workers' in the background."""
        self.compared = number
        if self.size > 1:
            self.native.begin_exchange(number)

    def limit_bandwidth(self, cluster, devices):
        with self.peers.collective():
            return self.native.limit_bandwidth(cluster, devices)


def group(device="auto"):
    """This process among the workers that torchrun, Slurm or mpirun started; alone if none did."""
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"[distribute] device is {device!r}; give 'auto', 'cpu' or 'cuda'")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "auto":
        device = "cuda" if _motley.cuda_devices() >= local else "cpu"
    elif device == "cuda" and _motley.cuda_devices() == 0:
        raise UserError("[distribute] device is 'cuda', but torch was built without NCCL or sees no device; give 'cpu'")
    if device not in _groups:
        outside = torch.distributed.is_available() and torch.distributed.is_initialized()
        _groups[device] = Workers(_motley.Group(outside, device == "cuda"))
    return _groups[device]


class _Loss(torch.autograd.Function):
    """The loss of a step whose gradients are there already; backward adds them to the pieces, scaled as torch would."""

    @staticmethod
    def forward(ctx, anchor, loss, gradients, pieces, inside):
        ctx.gradients, ctx.pieces, ctx.inside = gradients, pieces, inside
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):
        if ctx.gradients is None:
            raise UserError("[distribute] backward was called twice for one step; its gradients are added once")
        scale = scale.double() / ctx.inside  # of the gradients `inside` is part already
        same = scale.item() == 1
        for piece, gradient in zip(ctx.pieces, ctx.gradients):
            if gradient is None or not piece.requires_grad:
                continue
            gradient = gradient if same else gradient * scale.to(gradient.dtype)
            if piece.grad is None:
                piece.grad = guarded(gradient) if isinstance(piece, Piece) else gradient
            else:
                plain(piece.grad).add_(gradient)
        ctx.gradients = None
        return None, None, None, None, None


class Distributed(Following):
    """A model whose training step runs by a plan on all workers.

        loss = dist(inputs, targets)     # of the whole batch, the same on every worker
        dist.backward()                  # or loss.backward(); again before step() to accumulate
        dist.step()                      # or dist.optimizer.step(); dist.zero_grad()

    Every worker passes the same global batch, or all pass the rows that DataSplitter gives them. Methods marked collective must be
    called by all workers, also by those whose device the plan leaves out: they hold no piece and only wait for the loss.
    """

    def __init__(self, step, agreed, group, optimizer, seed, emulate, verify, replan, memory_limit=True):
        self._group, self._seed = group, seed
        self.module, self.training = step.model, True
        plan, trial = agreed.plan, agreed.trial
        self._begin(step, agreed, replan, emulate, verify)
        self._steps, self._loss, self._whole, self._whole_at = 0, None, None, -1
        names = [slot.name for slot in step.parameters]
        self._held = Held(self._worker, names, [slot.name for slot in step.buffers])
        group.peers.add(self._held, self)
        self._plain_pieces = self._all_whole(step)
        kind = torch.nn.Parameter if self._plain_pieces else Piece
        self._pieces = []  # of every parameter; empty where this worker has none: another stage has it, or it is idle
        with torch.no_grad():
            for slot in step.parameters:
                local = self._own("parameter", slot.name, self._rank_0(slot.tensor))
                self._pieces.append(kind(local, requires_grad=slot.tensor.requires_grad))
                if self._worker.holds("parameter", slot.name):
                    self._held.pieces[slot.name] = self._pieces[-1]
                    self._worker.set("parameter", slot.name, self._pieces[-1])
            for slot in step.buffers:
                local = self._own("buffer", slot.name, self._rank_0(slot.tensor))
                if self._worker.holds("buffer", slot.name):
                    self._worker.set("buffer", slot.name, local)
            self._kept = self._held_by_nobody(step)
        self._worker.publish()
        self.optimizer, self._wholes, self._by_element = optimizer, None, trial is None or trial.by_element
        self._held.optimizer, self._held.own_steps = self.optimizer, self.optimizer is None
        if self.optimizer is not None:
            self._take_over(trial, memory_limit)
        with group.peers.change(self._held, alone=False):  # from now on it can be asked for
            self._held.mark = self._held.versions()
        self.pacing = group.limit_bandwidth(plan.cluster, plan.devices) if emulate else "off"
        self._anchor = torch.zeros((), requires_grad=True)

    # ---- training -------------------------------------------------------------------------------------------------

    def __call__(self, inputs, *targets):
        """Training: the loss of the batch. eval(): the model's output, or with targets its loss."""
        if len(targets) > 1:
            raise UserError(
                f"[distribute] a step takes (inputs, targets), not {1 + len(targets)} arguments; put several in one tuple"
            )
        if not self.training:
            return self._evaluate(inputs, *targets)
        loss, gradients = self._stepped(self._ready(inputs, targets))
        peers, held = self._group.peers, self._held
        inside = getattr(self._step_spec, "scale", None)  # what loss and gradients are multiplied by
        if inside is not None:
            loss = loss / inside.to(loss.dtype)
        self._steps += 1
        with peers.change(held, alone=False):
            self._worker.publish()
            if held.own_steps:
                held.settled, held.mark = not held.pieces, held.versions()
        if torch.is_grad_enabled():
            loss = _Loss.apply(self._anchor, loss, gradients, list(held.pieces.values()), 1.0 if inside is None else inside.item())
        self._loss = loss
        return loss

    def backward(self):
        """Adds the gradients of the last step to the pieces of the parameters."""
        if self._loss is None or not self._loss.requires_grad:
            raise UserError("[distribute] backward before a training step; call dist(inputs, targets) first")
        self._loss.backward()
        self._loss = None

    def step(self):
        """One step of the optimizer; the gradients are cleared."""
        if self.optimizer is None:
            raise UserError("[distribute] there is no optimizer; pass one to distribute(), or step dist.parameters() yourself")
        self._worker.before(True)
        self.optimizer.step()
        self.zero_grad()
        self._worker.after(True)

    def train_step(self, inputs, *targets):
        """Forward pass, backward pass and optimizer; the loss as a number."""
        loss = self(inputs, *targets)
        self.backward()
        self.step()
        return loss.item()

    def zero_grad(self, set_to_none=True):
        if self._held.moved():  # a step that only its maker knows of is over
            self._group.peers.settle(self._held, True)
        for piece in self._pieces:
            _gradients.clear(piece, set_to_none)

    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False, parameters=None):
        """torch.nn.utils.clip_grad_norm_ of whole gradients: scales them so that their norm is at most max_norm. Collective.

        Returns the norm before, a tensor of one number. parameters: some of dist.parameters(); without them all.
        """
        return _gradients.clip_norm_(self, max_norm, norm_type, error_if_nonfinite, parameters)

    def clip_grad_value_(self, clip_value, parameters=None):
        """torch.nn.utils.clip_grad_value_ of whole gradients: no element is beyond [-clip_value, clip_value]."""
        _gradients.clip_value_(self, clip_value, parameters)

    def parameters(self):
        """This worker's pieces of the parameters."""
        return iter(self._pieces)

    def named_parameters(self):
        return zip((slot.name for slot in self._step_spec.parameters), self._pieces)

    # ---- the optimizer --------------------------------------------------------------------------------------------

    def _all_whole(self, step):
        """Whether every worker holds every parameter whole; the same on every worker. Collective."""
        def whole(name):
            if not self._worker.holds("parameter", name):
                return False
            outer, size, inner, _, _, _, _, count = self._worker.part("parameter", name)
            return count == outer * size * inner

        cut = torch.tensor([not all(whole(slot.name) for slot in step.parameters)], dtype=torch.int32, device=self._group.device)
        self._group.all_reduce(cut)
        return cut.item() == 0

    def _take_over(self, trial, memory_limit):
        """Gives the user's optimizer the pieces, or where that would not be right whole parameters, and its methods their meaning."""
        by_element = trial.by_element or self._plain_pieces
        slots, dist = self._step_spec.parameters, weakref.proxy(self)
        slot_of = {id(slot.tensor): slot for slot in slots}
        targets = {id(slot.tensor): piece for slot, piece in zip(slots, self._pieces)}
        if not by_element:
            used = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            self._wholes = Wholes(self, [i for i, slot in enumerate(slots) if id(slot.tensor) in used])
            targets.update((id(slots[i].tensor), whole) for i, whole in self._wholes.parameters.items())
            self._say_whole(trial, memory_limit)
        else:
            self._say_states(trial, memory_limit)

        def cut(parameter, value):
            value = self._rank_0(value)
            return self._own("parameter", slot_of[id(parameter)].name, value) if by_element else value

        _optim.exchange(self.optimizer, targets, cut)

        def step(former, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if dist._wholes is not None:
                dist._wholes.gather()
            with dist._group.peers.change(dist._held), _torch.without_subclasses():
                former()
                if dist._wholes is not None:
                    dist._wholes.scatter()
            dist._show_loss()
            return loss

        def zero_grad(former, set_to_none=inspect.signature(torch.optim.Optimizer.zero_grad).parameters["set_to_none"].default):
            with _torch.without_subclasses():
                former(set_to_none)
            if dist._wholes is not None:
                dist._wholes.zero_grad(set_to_none)

        def add_param_group(former, group):
            added = group["params"]
            added = [added] if isinstance(added, torch.Tensor) else list(added)
            if dist._wholes is not None or any(id(p) not in targets for p in added):
                raise UserError(
                    "[distribute] add_param_group takes parameters of the model"
                    if dist._wholes is None
                    else f"[distribute] {type(dist.optimizer).__name__} runs on whole parameters; give it all groups before distribute()"
                )
            former({**group, "params": [targets[id(p)] for p in added]})

        _optim.override(
            self.optimizer, step=step, zero_grad=zero_grad, add_param_group=add_param_group,
            state_dict=lambda former: dist.optimizer_state_dict(),
            load_state_dict=lambda former, state: dist.load_optimizer_state_dict(state),
        )  # fmt: skip

    def _piece_of(self, slot):
        return self._pieces[self._step_spec.parameters.index(slot)]

    def _scale_loss(self, scale):
        """Multiplies the loss inside of the step from now on, where it is computed in 16-bit floats."""
        if isinstance(self._step_spec, ScaledStep):
            self._step_spec.scale = torch.tensor(scale, dtype=self._step_spec.scale.dtype)

    def _say_states(self, trial, memory_limit):
        """Plans count one or two states of each parameter: a warning of more, or UserError where a device has no room for them."""
        name, plan, beyond = type(self.optimizer).__name__, self.plan, trial.states - (1 if self.plan.optimizer == "sgd" else 2)
        if beyond <= 0.01:
            return
        used = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        pieces = [piece for slot, piece in zip(self._step_spec.parameters, self._pieces) if id(slot.tensor) in used]
        more = torch.zeros(self._group.size, dtype=torch.float64, device=self._group.device)
        more[self._group.rank] = beyond * sum(piece.numel() * piece.element_size() for piece in pieces)
        self._group.all_reduce(more)
        more = more.tolist()
        for device, rank in enumerate(plan.devices):
            if memory_limit and plan.peak_memory_bytes[device] + more[rank] > plan.cluster.memory(device):
                raise UserError(
                    f"[distribute] {name} keeps {trial.states:.3g} states of each parameter, plans count two: with {more[rank] / 2**20:.1f} "
                    f"MiB more, {plan.cluster.device(device)} has no room; use one with fewer, or memory_limit=False"
                )
        if self._group.rank == 0:
            warnings.warn(
                f"[distribute] {name} keeps {trial.states:.3g} states of each parameter, plans count two: up to {max(more) / 2**20:.1f} MiB "
                "more than planned on a device",
                stacklevel=4,
            )

    def _say_whole(self, trial, memory_limit):
        """What it takes to run an optimizer on whole parameters: a warning, or UserError where a device has no room for it."""
        name, plan, more = type(self.optimizer).__name__, self.plan, self._wholes.bytes(trial.states)
        if memory_limit:
            for device, peak in enumerate(plan.peak_memory_bytes):
                if peak + more > plan.cluster.memory(device):
                    raise UserError(
                        f"[distribute] {name} does not treat every element by itself and needs whole parameters: with {more / 2**20:.1f} "
                        f"MiB more, {plan.cluster.device(device)} has no room; use one that does, or memory_limit=False"
                    )
        if self._group.rank == 0:
            warnings.warn(
                f"[distribute] {name} does not treat every element by itself: every worker runs it on whole parameters, for which it "
                f"needs {more / 2**20:.1f} MiB more than planned, and parameters and gradients are put together for every step",
                stacklevel=4,
            )

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def train(self, mode=True):
        """Training, as module.train() has it; with mode=False as eval()."""
        self.training = mode
        if mode:
            self._whole = None
            self.module.train()
        return self

    def eval(self):
        """From now on dist(inputs) is the model's output, of any batch, computed by this worker alone.

        The first call after a step puts the parameters together on this worker; the others need not call anything.
        """
        return self.train(False)

    def _evaluate(self, inputs, *targets):
        step = self._step_spec
        now = self._held.count, self._held.versions()
        if self._whole is None or self._whole_at != now:
            self._whole = None
            whole = self._whole_tensors()
            self._whole = [whole[slot.name].to(slot.tensor.device) for slot in step.parameters + step.buffers]
            self._whole_at = now
        modes = [(module, module.training) for module in step.model.modules()]
        step.model.eval()
        try:
            with replaced(step.parameters + step.buffers, self._whole):
                output = call_model(step.model, inputs)
                return loss_of(output, step.loss_fn, targets[0], True) if targets else output
        finally:
            for module, mode in modes:
                module.training = mode

    # ---- state ----------------------------------------------------------------------------------------------------

    def _rank_0(self, tensor):
        """Rank 0's tensor on every rank."""
        mine = tensor.detach().to(self._group.device, copy=True).contiguous()
        if self._group.size > 1 and mine.numel() > 0:
            if self._group.rank != 0:
                mine.zero_()
            self._group.all_reduce(mine)
        return mine

    def _own(self, kind, name, whole):
        """This worker's piece, in memory of its own; empty if it has none."""
        if not self._worker.holds(kind, name):
            return torch.empty(0, dtype=whole.dtype, device=self._group.device)
        return self._worker.piece(kind, name, whole).to(self._group.device, copy=True).contiguous()

    def _whole_tensors(self):
        """{name: tensor} of parameters and buffers, from whoever holds them; they may be this worker's own."""
        step, peers = self._step_spec, self._group.peers
        if self._held.own_steps:
            peers.settle(self._held, True)
        wanted = [("parameter", slot) for slot in step.parameters] + [("buffer", slot) for slot in step.buffers]
        found = peers.whole(self._held, [(kind, slot.name, slot.tensor.shape) for kind, slot in wanted])
        return {slot.name: found[kind, slot.name] if (kind, slot.name) in found else self._kept[slot.name] for kind, slot in wanted}

    def _held_by_nobody(self, step):
        """{name: whole tensor} of what no stage of a pipeline reads; it does not change."""
        slots = [("parameter", slot) for slot in step.parameters] + [("buffer", slot) for slot in step.buffers]
        holders = torch.tensor([self._worker.holds(kind, slot.name) for kind, slot in slots], dtype=torch.int32)
        holders = holders.to(self._group.device)
        self._group.all_reduce(holders)
        nobody = [slot for (_, slot), count in zip(slots, holders.tolist()) if count == 0]
        return {slot.name: self._rank_0(slot.tensor) for slot in nobody}

    def _loss_has_state(self):
        """Whether the loss is a module that training changes; constant class weights, say, are no part of the state."""
        loss_fn = self._step_spec.loss_fn
        if not isinstance(loss_fn, torch.nn.Module):
            return False
        own = prefix_of_loss(self.module) + "."
        return any(True for _ in loss_fn.parameters()) or any(name.startswith(own) for name in self.plan.graph().updated_buffers)

    def _show_loss(self):
        """The parameters of a loss that is a module, as they are now, to whoever looks at them there; not those that are cut."""
        own = prefix_of_loss(self.module) + "."
        for slot, piece in zip(self._step_spec.parameters, self._pieces):
            if slot.name.startswith(own) and piece.shape == slot.tensor.shape:
                slot.tensor.data.copy_(plain(piece.detach()))

    def _names(self):
        """[(key of the model's state_dict, name of its slot)]; tied parameters have several keys."""
        slots = self._step_spec.parameters + self._step_spec.buffers
        name_of = {id(slot.tensor): slot.name for slot in slots}
        held = self.module.state_dict(keep_vars=True)
        if self._loss_has_state():
            self._step_spec.loss_fn.state_dict(destination=held, prefix=prefix_of_loss(self.module) + ".", keep_vars=True)
        return [(key, name_of.get(id(value))) for key, value in held.items()], held

    def state_dict(self):
        """Parameters and buffers, whole, under the model's own names and on the CPU.

        Any worker may call it alone: the others answer whatever they do, after the same step.
        """
        whole = self._whole_tensors()
        names, held = self._names()
        state = collections.OrderedDict()
        for key, name in names:
            state[key] = held[key] if name is None else whole[name].detach().cpu().clone()
        return state

    def load_state_dict(self, state, strict=True):
        """Takes a state_dict of the model; every worker passes the same."""
        names, _ = self._names()
        missing = [key for key, name in names if name is not None and key not in state]
        unexpected = [key for key in state if key not in dict(names)]
        if strict and (missing or unexpected):
            raise UserError(
                f"[distribute] the state does not fit the model: missing {', '.join(missing) or 'nothing'}, unexpected "
                f"{', '.join(unexpected) or 'nothing'}; or load with strict=False"
            )
        slots = {slot.name: slot for slot in self._step_spec.parameters + self._step_spec.buffers}
        for key, name in names:
            if name is not None and key in state and state[key].shape != slots[name].tensor.shape:
                raise UserError(
                    f"[distribute] {key} is {list(state[key].shape)}; the model's is {list(slots[name].tensor.shape)}"
                )
        parameters = {slot.name for slot in self._step_spec.parameters}
        with torch.no_grad(), self._group.peers.change(self._held):
            for key, name in names:
                if name is None or key not in state:
                    continue
                value = state[key].detach().to(slots[name].tensor.dtype)
                kind = "parameter" if name in parameters else "buffer"
                if not self._worker.holds(kind, name):
                    if name in self._kept:
                        self._kept[name].copy_(value)
                elif kind == "parameter":
                    plain(self._held.pieces[name]).copy_(self._own(kind, name, value))
                else:
                    self._worker.set(kind, name, self._own(kind, name, value))
            self._worker.publish()
            self._held.mark = self._held.versions()

    def _optimized(self):
        """The slots of the optimizer's parameters, in its order."""
        mine = self._pieces if self._wholes is None else [self._wholes.parameters.get(i) for i in range(len(self._pieces))]
        slot_of = {id(tensor): slot for slot, tensor in zip(self._step_spec.parameters, mine) if tensor is not None}
        return [slot_of[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def optimizer_state_dict(self):
        """The optimizer's state for whole parameters, as the same optimizer on the plain model has it; of any worker alone."""
        state = type(self.optimizer).state_dict(self.optimizer)
        if self._wholes is not None:
            return _gradients.copied(state)
        wanted = [("state", slot.name, slot.tensor.shape) for slot in self._optimized()]
        found = self._group.peers.whole(self._held, wanted)
        state["state"] = {}
        for index, (_, name, _) in enumerate(wanted):
            if found.get(("state", name)):
                state["state"][index] = {
                    key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                    for key, value in found["state", name].items()
                }
        return state

    def load_optimizer_state_dict(self, state):
        """Takes the state of the same optimizer on the plain model; every worker passes the same."""
        load = type(self.optimizer).load_state_dict
        if self._wholes is not None:
            with self._group.peers.change(self._held):
                load(self.optimizer, _gradients.copied(state))
            return
        slots = self._optimized()
        local = {"param_groups": state["param_groups"], "state": {}}
        for index, values in state["state"].items():
            if index >= len(slots):
                raise UserError(f"[distribute] the optimizer's state has parameter {index}; the model has {len(slots)}")
            slot = slots[index]
            if not self._worker.holds("parameter", slot.name):
                continue
            local["state"][index] = {
                key: self._own("parameter", slot.name, value)
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == slot.tensor.shape
                else value
                for key, value in values.items()
            }
        with self._group.peers.change(self._held), _torch.without_subclasses():
            load(self.optimizer, local)

    def save(self, path):
        """Writes {model, optimizer, steps} in the original layout; torch.load reads it. Collective; rank 0 writes."""
        problem = ""
        if self._group.rank == 0:
            try:
                file = {"model": self.state_dict(), "steps": self._steps}
                if self.optimizer is not None:
                    file["optimizer"] = self.optimizer_state_dict()
                target = os.path.realpath(path)
                beside = target if os.path.exists(target) and not os.path.isfile(target) else f"{target}.part"
                torch.save(file, beside)  # into a device or a pipe as it is; never replaces one
                if beside != target:
                    os.replace(beside, target)
            except (OSError, RuntimeError) as error:
                problem = f"[distribute] {path} cannot be written: {str(error).splitlines()[0]}; give a file in a folder that exists"
        problem = send_text(self._group, problem)
        if problem:
            raise UserError(problem)

    def load(self, path):
        """Goes on from a file that save() wrote, on this or another cluster; every worker reads it."""
        try:
            file = _torch.load(path)
            steps, state = int(file["steps"]), file["model"]
        except OSError as error:
            raise UserError(f"[distribute] {path} cannot be read: {error.strerror}; give a file that save() wrote") from None
        except Exception:
            raise UserError(f"[distribute] {path} is damaged or not a file that save() wrote") from None
        self.load_state_dict(state)
        if self.optimizer is not None:
            if "optimizer" not in file:
                raise UserError(f"[distribute] {path} holds no optimizer; use load_state_dict(torch.load(path)['model'])")
            self.load_optimizer_state_dict(file["optimizer"])
        self._steps = steps

    @property
    def steps(self):
        """Training steps so far."""
        return self._steps

    @property
    def rank(self):
        return self._group.rank

    @property
    def world_size(self):
        return self._group.size

    def split_rows(self):
        """Divides global batches into rows: from now on a worker may pass its own rows alone; collective.

        Returns (rows of each worker, this worker's rows), or (None, None) where the plan does not cut batches into rows.
        Small inputs that the plan keeps whole, such as labels, are put together from all workers at every step.
        """
        rows = [] if self._worker.idle else self._own_rows()
        counts = torch.zeros(self._group.size, dtype=torch.long, device=self._group.device)
        counts[self._group.rank] = len(rows or ())
        self._group.all_reduce(counts)
        counts = counts.tolist()
        first = sum(counts[: self._group.rank])
        misfits = torch.tensor([rows != list(range(first, first + counts[self._group.rank]))], dtype=torch.int32)
        misfits = misfits.to(self._group.device)
        self._group.all_reduce(misfits)
        if misfits.item() > 0 or sum(counts) != self.plan.batch:
            return None, None
        self._counts, self._rows_of = counts, self._run
        return counts, rows

    def _own_rows(self):
        """The rows of a batch that this worker's pieces of the inputs are; None if they are not whole rows, or few are cut."""
        rows, cut, kept = None, 0, 0
        for name, whole, dtype in self._leaves:
            if len(whole) == 0 or whole[0] != self.plan.batch:
                continue
            size = whole.numel() * torch.empty((), dtype=dtype).element_size()
            if self._worker.input_placement(name) == "R":
                kept += size
                continue
            index = torch.arange(whole[0]).reshape([-1] + [1] * (len(whole) - 1)).expand(whole)
            piece = self._worker.piece("input", name, index)
            mine = piece.reshape(piece.shape[0], -1)[:, 0].tolist() if piece.numel() > 0 else []
            if piece.shape[1:] != whole[1:] or (rows is not None and rows != mine):
                return None
            rows, cut = mine, cut + size
        return rows if kept <= cut else None

    def __repr__(self):
        idle = ", idle: the plan leaves its device out" if self._worker.idle else ""
        where = f"worker {self._group.rank} of {self._group.size}{idle}, on {self._group.device}"
        return f"{type(self.module).__name__} distributed by motley ({where})\n{self.plan}"


def _same_everywhere(group, text, what):
    """UserError on every worker if one has another text than rank 0."""
    differs = torch.tensor([send_text(group, text) != text], dtype=torch.int32, device=group.device)
    group.all_reduce(differs)
    if differs.item() > 0:
        raise UserError(f"[distribute] {what} differs from worker to worker; make it alike on all of them")


def _check_fp16():
    """UserError if torch cannot multiply matrices of 16-bit floats on this device."""
    try:
        torch.ones(1, 1, dtype=torch.float16).mm(torch.ones(1, 1, dtype=torch.float16))
    except RuntimeError:
        raise UserError("[distribute] torch cannot compute in fp16 on the CPU; use precision='bf16', or device='cuda'") from None


def _say_of_loss(step):
    """A loss that has parameters is trained, which users of its own optimizer may not expect."""
    names = [name for name, _ in step.loss_fn.named_parameters()] if isinstance(step.loss_fn, torch.nn.Module) else []
    if names:
        prefix = prefix_of_loss(step.model)
        warnings.warn(
            f"[distribute] parameters of loss_fn are parameters of the step, {prefix}.{names[0]}{', ...' if names[1:] else ''}: they "
            "are trained as the optimizer says, and dist.state_dict() has their values, as it has those of the model",
            stacklevel=3,
        )


def distribute(model, example_inputs, loss_fn=None, cluster=None, optimizer="adamw", *, plan=None, seed=0, device="auto",
               emulate=False, verify=True, **options):
    """Trains a model by a plan on the workers that torchrun, Slurm or mpirun started; collective.

    model, example_inputs, loss_fn   as for capture(); rank 0's parameters are everyone's
    cluster        as for plan(); one device for each worker, in the order of ranks; workers whose device the plan leaves
                   out stay idle
    optimizer      'adamw', 'sgd', a torch.optim.Optimizer on model.parameters(), or None
    plan           a Plan or a plan file, instead of a cluster
    seed           of dropout, which does not depend on the sharding
    device         'cpu' (gloo), 'cuda' (NCCL) or 'auto'
    emulate        slows this process and its sockets down to the devices and links of the cluster
    verify         whether the first steps are compared with the plain model's: loss, gradients and buffers
    options        engine, memory_limit, time_limit, ratios, all_devices, precision, as for plan()
    """
    if (cluster is None) == (plan is None):
        raise UserError("[distribute] give either a cluster or a plan")
    precision = precision_of(options.get("precision"))
    if cluster is not None and precision == "f16":
        _check_fp16()
    step = (ScaledStep if precision in _scaler.SCALED else Step)(model, example_inputs, loss_fn)
    parameters = [slot.tensor for slot in step.parameters]
    optimizer = _optim.made(optimizer, parameters)
    _optim.check_parameters(optimizer, parameters)
    if cluster is not None:
        cluster = cluster_of(cluster)
    workers = group(device)
    _same_everywhere(workers, _optim.signature(optimizer, step.parameters), "the optimizer")
    if workers.rank == 0:
        _say_of_loss(step)
    agreed = agreed_plan(step, workers, cluster, optimizer, plan, options)
    replan = replanner(cluster, agreed.plan, options)
    return Distributed(
        step, agreed, workers, optimizer, seed, emulate, wanted(verify), replan, options.get("memory_limit", True)
    )

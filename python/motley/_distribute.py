"""distribute(): a model trained by a plan, used like one wrapped in DistributedDataParallel.

A step's gradients are computed with its loss; `backward` hands them to pieces of the parameters, which the user's own
optimizer steps. Where a plan leaves devices out, the workers that it uses are a group of their own. The others hold nothing:
a step is for them a message that they have come to it, without which it does not begin, and one with its loss.
"""

import contextlib
import inspect
import os
import time
import weakref

import torch

from . import _backend, _elastic, _gradients, _launched, _motley, _optim, _scaler, _torch
from ._agree import agreed_plan, replanner, send_text
from ._agreement import same_batch
from ._errors import PeerLost, UserError, flag, warn, whole_number
from ._following import Following
from ._gradients import Wholes
from ._guard import wanted
from ._mirror import Mirror, brought_up_to_date, inside, is_shown, ours
from ._pieces import Piece, guarded, plain
from ._plan import cluster_of, precision_of
from ._plan import plan as make_plan
from ._saving import Saving
from ._scaler import ScaledStep
from ._state import Held, Peers
from ._step import Step, call_model, loss_of, prefix_of_loss, replaced

_groups = {}  # [device, backend, whether it was asked for] joined once in the life of the process


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


def group(device="auto", backend=None, said="", elastic_on=None):
    """This process among the workers that torchrun, Slurm or mpirun started; alone if none did. `said`: the backend that a cluster
    file names for all of it, taken where none is given; gloo is what workers have anyway. `elastic_on`: the cluster of a run that
    goes on when workers are lost; ranks are then those of the devices that are left."""
    chosen = backend is not None
    if backend is None and said:
        backend = None if said == "gloo" else said
        default = False
    else:
        default = backend is None
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"[distribute] device is {device!r}; give 'auto', 'cpu' or 'cuda'")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "auto":
        device = "cuda" if _motley.cuda_devices() >= local else "cpu"
    elif device == "cuda" and _motley.cuda_devices() == 0:
        raise UserError("[distribute] device is 'cuda', but torch sees no device; give 'cpu'")
    if default and device == "cuda" and torch.distributed.is_nccl_available():
        backend = "nccl"
    if backend is not None:
        _backend.check(backend, device)
    key = device, backend, chosen, elastic_on is not None
    if key not in _groups:
        outside = torch.distributed.is_available() and torch.distributed.is_initialized() and not _backend.begun
        native, launch = _motley.Group(outside, device == "cuda", _backend.make_groups, []), None
        if elastic_on is not None:
            launch = _launched.Launch(native, elastic_on)
            if launch.order != sorted(launch.order):
                native = _motley.Group(outside, device == "cuda", _backend.make_groups, launch.order)
        if device == "cuda":
            torch.cuda.set_device(native.device)
        if backend is not None and native.size > 1:
            _backend.begin(native)
            native.use(backend, chosen)
        _groups[key] = Workers(native)
        _groups[key].launch = launch
    return _groups[key]


class _Loss(torch.autograd.Function):
    """The loss of a step whose gradients are there already; backward adds them to the pieces, scaled as torch would."""

    @staticmethod
    def forward(ctx, anchor, loss, gradients, pieces, inside, plain_backward):
        ctx.gradients, ctx.pieces, ctx.inside, ctx.plain_backward = gradients, pieces, inside, plain_backward
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):
        if ctx.gradients is None:
            raise UserError("[distribute] backward was called twice for one step; its gradients are added once")
        scale = scale.double() / ctx.inside  # of the gradients `inside` is part already
        if ctx.plain_backward:  # by dist.backward(): it is known, and on a device asking would wait for the step
            same = ctx.inside == 1
        else:
            same = scale.device.type == "cpu" and scale.item() == 1
        for piece, gradient in zip(ctx.pieces, ctx.gradients):
            if gradient is None or not piece.requires_grad:
                continue
            gradient = gradient if same else gradient * scale.to(gradient.dtype)
            if piece.grad is None:
                piece.grad = guarded(gradient) if isinstance(piece, Piece) else gradient
            else:
                plain(piece.grad).add_(gradient)
        ctx.gradients = None
        return None, None, None, None, None, None


class Distributed(Following, Saving):
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
        self._held.batches = self._batches
        group.peers.add(self._held, self)
        self._plain_pieces = self._all_whole(step)
        self._models_own = not any(is_shown(slot.held) for slot in step.parameters)  # else another distribute() may change them
        kind = torch.nn.Parameter if self._plain_pieces else Piece
        self._pieces = []  # of every parameter; empty where this worker has none: another stage has it, or it is idle
        with torch.no_grad():
            for slot in step.parameters:
                local = self._own("parameter", slot.name, self._rank_0(slot.tensor))
                if self._lies_there(slot, local):
                    slot.tensor.data = local
                self._pieces.append(kind(local, requires_grad=slot.tensor.requires_grad))
                self._held.handed_out[slot.name] = self._pieces[-1]
                if self._worker.holds("parameter", slot.name):
                    self._held.pieces[slot.name] = self._pieces[-1]
                    self._worker.set("parameter", slot.name, self._pieces[-1])
            for slot in step.buffers:
                local = self._own("buffer", slot.name, self._rank_0(slot.tensor))
                if self._worker.holds("buffer", slot.name):
                    self._worker.set("buffer", slot.name, local)
            self._held.nobodys = self._held_by_nobody(step)
        self._worker.publish()
        self.optimizer, self._wholes, self._by_element = optimizer, None, trial is None or trial.by_element
        self._held.optimizer, self._held.own_steps = self.optimizer, self.optimizer is None
        if self.optimizer is not None:
            self._take_over(trial, memory_limit)
        with group.peers.change(self._held, alone=False):  # from now on it can be asked for
            self._held.mark = self._held.versions()
        self.pacing = group.limit_bandwidth(plan.cluster, plan.devices) if emulate else "off"
        self._anchor = torch.zeros((), requires_grad=True)
        self._plain_backward = []  # while dist.backward() runs
        self._keeper = None  # of what is left for those that go on; see _elastic.py
        self._mirror = Mirror(self)

    @staticmethod
    def _lies_there(slot, piece):
        """Whether a parameter of the model can lie in the memory of its piece: it is all of it, and nothing else lies in its own."""
        tensor = slot.tensor
        return (
            tensor is slot.held
            and type(tensor) is torch.nn.Parameter
            and (tensor.shape, tensor.dtype, tensor.device) == (piece.shape, piece.dtype, piece.device)
            and tensor.is_contiguous()
            and _torch.bytes_in_memory(tensor) == tensor.numel() * tensor.element_size()
        )

    # ---- training -------------------------------------------------------------------------------------------------

    @inside
    def __call__(self, *batch, **named):
        """Training: the loss of the batch. eval(): the model's output, or with targets its loss. dist(**batch) is dist(batch)."""
        inputs, *targets = self._batch(batch, named)
        if not self.training:
            return self._evaluate(inputs, *targets)
        if self._group.device.startswith("cuda") and torch.cuda.is_current_stream_capturing() and self._run.draws:
            raise UserError(
                "[distribute] the model draws random numbers, which a CUDA graph would draw again at every replay; capture a model "
                "without dropout, or train without a graph"
            )
        if torch.is_anomaly_enabled():
            warn("[distribute] torch.autograd.detect_anomaly() does not look into a distributed step; use it with the plain model")
        if self._keeper is not None:
            self._keeper.begins()
        try:
            loss, gradients = self._stepped(self._ready(inputs, targets))
        except PeerLost:
            if self._keeper is not None:
                self._keeper.lost()
            raise
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
            loss = _Loss.apply(self._anchor, loss, gradients, list(held.pieces.values()), 1.0 if inside is None else inside.item(),
                                self._plain_backward)  # fmt: skip
        self._loss = loss
        return loss

    def backward(self):
        """Adds the gradients of the last step to the pieces of the parameters."""
        if self._loss is None or not self._loss.requires_grad:
            raise UserError("[distribute] backward before a training step; call dist(inputs, targets) first")
        self._plain_backward.append(True)
        try:
            self._loss.backward()
        finally:
            self._plain_backward.clear()
        self._loss = None

    def step(self):
        """One step of the optimizer; the gradients are cleared."""
        if self.optimizer is None:
            raise UserError("[distribute] there is no optimizer; pass one to distribute(), or step dist.parameters() yourself")
        self._worker.before(True)
        self.optimizer.step()
        self.zero_grad()
        self._worker.after(True)

    @staticmethod
    def _batch(batch, named):
        """(inputs, targets), or inputs alone, of a step's arguments."""
        if named and batch:
            raise UserError("[distribute] a step takes its batch by position or by name, not both; give dist(inputs, targets) or dist(**batch)")
        if named:
            return (named,)
        if len(batch) not in (1, 2):
            raise UserError(f"[distribute] a step takes (inputs, targets), not {len(batch)} arguments; put several in one tuple")
        return batch

    def train_step(self, *batch, **named):
        """Forward pass, backward pass and optimizer; the loss as a number."""
        loss = self(*batch, **named)
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
            with contextlib.nullcontext() if dist._keeper is None else dist._keeper.update():
                with dist._group.peers.change(dist._held), _torch.without_subclasses(), _optim.fused(dist.optimizer):
                    former()
                    if dist._wholes is not None:
                        dist._wholes.scatter()
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
        """Plans count one to three states of each parameter: a warning of more, or UserError where a device has no room for them."""
        name, plan = type(self.optimizer).__name__, self.plan
        beyond = trial.states - {"sgd": 1, "adamw": 2, "amsgrad": 3}[plan.optimizer.removeprefix("fused-")]
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
                    f"[distribute] {name} keeps {trial.states:.3g} states of each parameter, plans count three: with {more[rank] / 2**20:.1f} "
                    f"MiB more, {plan.cluster.device(device)} has no room; use one with fewer, or memory_limit=False"
                )
        if self._group.rank == 0:
            warn(
                f"[distribute] {name} keeps {trial.states:.3g} states of each parameter, plans count three: up to {max(more) / 2**20:.1f} MiB "
                "more than planned on a device",
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
            warn(
                f"[distribute] {name} does not treat every element by itself: every worker runs it on whole parameters, for which it "
                f"needs {more / 2**20:.1f} MiB more than planned, and parameters and gradients are put together for every step",
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
            same_batch(self._group.peers, self._held)
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
        warn(
            f"[distribute] parameters of loss_fn are parameters of the step, {prefix}.{names[0]}{', ...' if names[1:] else ''}: they "
            "are trained as the optimizer says, and dist.state_dict() has their values, as it has those of the model",
        )


def distribute(model, example_inputs, loss_fn=None, cluster=None, optimizer="adamw", *, plan=None, seed=0, device="auto",
               backend=None, emulate=False, verify=True, elastic=None, **options):
    """Trains a model by a plan on the workers that torchrun, Slurm or mpirun started; collective.

    model, example_inputs, loss_fn   as for capture(); rank 0's parameters are everyone's
    cluster        as for plan(); one device for each worker, in the order of ranks; workers whose device the plan leaves
                   out stay idle
    optimizer      'adamw', 'sgd', a torch.optim.Optimizer on model.parameters(), or None
    plan           a Plan or a plan file, instead of a cluster
    seed           of dropout, which does not depend on the sharding
    device         'cpu', 'cuda' or 'auto'
    backend        of torch.distributed, for the plan's tensors: 'gloo', 'nccl' or any that is registered there; default: what the
                   cluster file says of its root, else gloo on the CPU, NCCL on CUDA devices where this torch has it
    emulate        slows this process and its sockets down to the devices and links of the cluster
    verify         whether the first steps are compared with the plain model's: loss, gradients and buffers
    elastic        a folder for checkpoints, or a motley.Elastic: goes on with the devices that are left when workers are lost, and with
                   those that come, where torchrun starts all again (docs/elastic.md)
    options        engine, memory_limit, time_limit, ratios, all_devices, precision, redundancy, as for plan(); redundancy goes with
                   elastic
    """
    if (cluster is None) == (plan is None):
        raise UserError("[distribute] give either a cluster or a plan")
    whole_number("distribute", "seed", seed)
    flag("distribute", "emulate", emulate)
    precision = precision_of(options.get("precision"))
    if cluster is not None and precision == "f16":
        _check_fp16()
    step = (ScaledStep if precision in _scaler.SCALED else Step)(model, example_inputs, loss_fn)
    brought_up_to_date(step.parameters + step.buffers)
    parameters = [slot.tensor for slot in step.parameters]
    optimizer = _optim.made(optimizer, parameters)
    _optim.check_parameters(optimizer, parameters)
    if cluster is not None:
        cluster = cluster_of(cluster)
    began, elastic = time.monotonic(), _elastic.asked(elastic, cluster, optimizer, options.get("redundancy", 0))
    workers = group(device, backend, "" if cluster is None else cluster.backend, cluster if elastic else None)
    if cluster is not None:
        cluster = workers.native.cluster_over(workers.launch.cluster if elastic else cluster)
    _same_everywhere(workers, _optim.signature(optimizer, step.parameters), "the optimizer")
    if workers.rank == 0:
        _say_of_loss(step)
    with ours():
        agreed = agreed_plan(step, workers, cluster, optimizer, plan, options, workers.launch.search if elastic else make_plan)
        if agreed.plan.redundancy and not elastic:
            raise UserError("[distribute] the plan's redundancy is 1, which is for runs that go on when workers are lost; give a cluster, redundancy=1 and elastic")
        replan = replanner(cluster, agreed.plan, options)
        dist = Distributed(
            step, agreed, workers, optimizer, seed, emulate, wanted(verify), replan, options.get("memory_limit", True)
        )
        if elastic:
            _elastic.begin(elastic, dist, began)
        return dist

"""distribute(): a model trained by a plan, used like one wrapped in DistributedDataParallel."""

import collections
import json
import os
import types

import torch

from . import _motley, _torch
from ._capture import capture_step
from ._errors import UserError
from ._optim import on_pieces, plan_name
from ._plan import Plan, cluster_of, load
from ._plan import plan as make_plan
from ._state import Held, Peers
from ._step import Step, call_model, flatten, loss_of, replaced

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

    def pace(self, cluster, devices):
        with self.peers.collective():
            return self.native.pace(cluster, devices)


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


def _send_text(group, text):
    """Rank 0's text on every rank."""
    data = torch.tensor(list(text.encode()) if group.rank == 0 else [], dtype=torch.uint8)
    size = torch.tensor([len(data)], device=group.device)
    group.all_reduce(size)
    body = torch.zeros(int(size), dtype=torch.uint8)
    if group.rank == 0:
        body.copy_(data)
    body = body.to(group.device)
    group.all_reduce(body)
    return bytes(body.cpu().numpy().tobytes()).decode()


class _Loss(torch.autograd.Function):
    """The loss of a step whose gradients are there already; backward adds them to the pieces, scaled as torch would."""

    @staticmethod
    def forward(ctx, anchor, loss, gradients, pieces):
        ctx.gradients, ctx.pieces = gradients, pieces
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):
        if ctx.gradients is None:
            raise UserError("[distribute] backward was called twice for one step; its gradients are added once")
        same = scale.item() == 1
        for piece, gradient in zip(ctx.pieces, ctx.gradients):
            if gradient is None or not piece.requires_grad:
                continue
            gradient = gradient if same else gradient * scale.to(gradient.dtype)
            piece.grad = gradient if piece.grad is None else piece.grad + gradient
        ctx.gradients = None
        return None, None, None, None


def _announced(step, peers, held):
    """An optimizer's step that the other workers' questions wait for."""

    def announced(optimizer, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with peers.change(held):
            step(optimizer)
        return loss

    return announced


class Distributed:
    """A model whose training step runs by a plan on all workers.

        loss = dist(inputs, targets)     # of the whole batch, the same on every worker
        dist.backward()                  # or loss.backward(); again before step() to accumulate
        dist.step()                      # or dist.optimizer.step(); dist.zero_grad()

    Every worker passes the same global batch, or all pass the rows that DataSplitter gives them. Methods marked collective must be
    called by all workers, also by those whose device the plan leaves out: they hold no piece and only wait for the loss.
    """

    def __init__(self, step, plan, group, optimizer, seed, emulate):
        self._step_spec, self.plan, self._group = step, plan, group
        self.module, self.training = step.model, True
        speed = 0.0
        if emulate and group.rank in plan.devices:
            speed = plan.cluster.speed(plan.devices.index(group.rank))
        self._worker = _motley.Worker(plan._native, group.native, plan.devices, seed, speed)
        self._leaves = [
            (name, tensor.shape, tensor.dtype) for name, tensor in step.leaves
        ]
        self._steps, self._loss, self._whole, self._whole_at, self._counts = 0, None, None, -1, None
        names = [slot.name for slot in step.parameters]
        self._held = Held(self._worker, names, [slot.name for slot in step.buffers])
        group.peers.add(self._held, self)
        self._pieces = []  # of every parameter; empty where this worker has none: another stage has it, or it is idle
        with torch.no_grad():
            for slot in step.parameters:
                local = self._own("parameter", slot.name, self._rank_0(slot.tensor))
                self._pieces.append(torch.nn.Parameter(local, requires_grad=slot.tensor.requires_grad))
                if self._worker.holds("parameter", slot.name):
                    self._held.pieces[slot.name] = self._pieces[-1]
                    self._worker.set("parameter", slot.name, self._pieces[-1])
            for slot in step.buffers:
                local = self._own("buffer", slot.name, self._rank_0(slot.tensor))
                if self._worker.holds("buffer", slot.name):
                    self._worker.set("buffer", slot.name, local)
            self._kept = self._held_by_nobody(step)
        self._worker.publish()
        self.optimizer = on_pieces(optimizer, [slot.tensor for slot in step.parameters], self._pieces)
        self._held.optimizer, self._held.own_steps = self.optimizer, self.optimizer is None
        if self.optimizer is not None:
            self.optimizer.step = types.MethodType(_announced(type(self.optimizer).step, group.peers, self._held), self.optimizer)
        with group.peers.change(self._held, alone=False):  # from now on it can be asked for
            self._held.mark = self._held.versions()
        self.pacing = group.pace(plan.cluster, plan.devices) if emulate else "off"
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
        pieces = [
            self._input(*leaf, tensor)
            for leaf, tensor in zip(self._leaves, self._step_spec.match(inputs, targets[0] if targets else None, bool(targets)))
        ]
        peers, held = self._group.peers, self._held
        if held.own_steps:
            peers.settle(held, True)
        with peers.collective():
            loss, gradients = self._worker.step(self._steps, pieces)
        self._steps += 1
        with peers.change(held, alone=False):
            self._worker.publish()
            if held.own_steps:
                held.settled, held.mark = not held.pieces, held.versions()
        if torch.is_grad_enabled():
            loss = _Loss.apply(self._anchor, loss, gradients, list(held.pieces.values()))
        self._loss = loss
        return loss

    def _input(self, name, whole, dtype, tensor):
        if tensor.dtype != dtype:
            raise UserError(f"[distribute] {name} is {tensor.dtype}; example_inputs had {dtype}")
        if tensor.shape == whole:
            return self._worker.piece("input", name, tensor).to(self._group.device)
        if self._counts is not None and tensor.dim() > 0 and tensor.shape[1:] == whole[1:]:
            mine = self._counts[self._group.rank]
            if tensor.shape[0] == max(mine, 1):  # a worker without rows is given one that it does not use
                tensor = tensor[:mine].detach().to(self._group.device)
                if self._worker.input_placement(name) != "R":
                    return tensor.contiguous()
                with self._group.peers.collective():
                    return self._worker.gather_rows(tensor, self._counts)
        raise UserError(
            f"[distribute] {name} is {list(tensor.shape)}; give the global batch {list(whole)} (a DataLoader needs "
            "drop_last=True), or the rows of a DataSplitter"
        )

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
            if set_to_none:
                piece.grad = None
            elif piece.grad is not None:
                piece.grad.zero_()

    def clip_grad_norm_(self, max_norm):
        """Scales the gradients so that the norm of the whole gradient is at most max_norm; collective. Returns it."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._group.device)
        for name, piece in self._held.pieces.items():
            if piece.grad is not None and self._worker.counts(name):
                squares += piece.grad.double().square().sum()
        self._group.all_reduce(squares)
        norm = float(squares.sqrt())
        if norm > max_norm:
            for piece in self._pieces:
                if piece.grad is not None:
                    piece.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def parameters(self):
        """This worker's pieces of the parameters."""
        return iter(self._pieces)

    def named_parameters(self):
        return zip((slot.name for slot in self._step_spec.parameters), self._pieces)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def train(self, mode=True):
        self.training = mode
        if mode:
            self._whole = None
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

    def _names(self):
        """[(key of the model's state_dict, name of its slot)]; tied parameters have several keys."""
        slots = self._step_spec.parameters + self._step_spec.buffers
        name_of = {id(slot.tensor): slot.name for slot in slots}
        held = self.module.state_dict(keep_vars=True)
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
                    self._held.pieces[name].copy_(self._own(kind, name, value))
                else:
                    self._worker.set(kind, name, self._own(kind, name, value))
            self._worker.publish()
            self._held.mark = self._held.versions()

    def optimizer_state_dict(self):
        """The optimizer's state for whole parameters, as the same optimizer on the plain model has it; of any worker alone."""
        state = self.optimizer.state_dict()
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        slots = {id(piece): slot for slot, piece in zip(self._step_spec.parameters, self._pieces)}
        wanted = [("state", slots[id(p)].name, slots[id(p)].tensor.shape) for p in order]
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
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        slots = {id(piece): slot for slot, piece in zip(self._step_spec.parameters, self._pieces)}
        local = {"param_groups": state["param_groups"], "state": {}}
        for index, values in state["state"].items():
            if index >= len(order):
                raise UserError(f"[distribute] the optimizer's state has parameter {index}; the model has {len(order)}")
            slot = slots[id(order[index])]
            if not self._worker.holds("parameter", slot.name):
                continue
            local["state"][index] = {
                key: self._own("parameter", slot.name, value)
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == slot.tensor.shape
                else value
                for key, value in values.items()
            }
        with self._group.peers.change(self._held):
            self.optimizer.load_state_dict(local)

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
        problem = _send_text(self._group, problem)
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
        self._counts = counts
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


def _agreed_plan(step, group, cluster, optimizer, plan, options):
    """Rank 0 captures and plans; every rank gets the plan, or the same error."""
    text, made, failure = "", None, None
    if group.rank == 0:
        try:
            if plan is None:
                graph = capture_step(step, type(step.model).__name__)
                made = make_plan(graph, cluster, optimizer=plan_name(optimizer), **options)
            else:
                made = plan if isinstance(plan, Plan) else load(plan)
                _check_plan(made, step, optimizer)
            name, size = made._made_for
            if size != group.size:
                raise UserError(
                    f"[distribute] the cluster has {size} devices, but {group.size} worker{'s were' if group.size > 1 else ' was'} "
                    f"started; start {size}, for example with torchrun --nproc_per_node={size}"
                )
            text = "plan" + json.dumps([made.devices, name, size]) + "\n" + made._native.text()
        except Exception as error:
            failure, text = error, "fail" + str(error)
    text = _send_text(group, text)
    if failure is not None:
        raise failure
    if text.startswith("fail"):
        raise UserError(text[4:])
    if made is not None:
        return made
    devices, text = text[4:].split("\n", 1)
    devices, *made_for = json.loads(devices)
    return Plan(_motley.parse_plan(text, "the plan of rank 0"), devices=devices, made_for=tuple(made_for))


def _check_plan(plan, step, optimizer):
    if not isinstance(plan, Plan):
        raise UserError("[distribute] plan is a graph; give a plan file or a plan of motley.plan()")
    problems = plan.check(False)
    if problems:
        raise UserError(f"[distribute] the plan is not sound: {problems[0]}; see motley check")
    if plan.batch != step.batch_size():
        raise UserError(
            f"[distribute] the plan is for another model or batch: its global batch is {plan.batch}, that of example_inputs "
            f"{step.batch_size()}; plan this model again"
        )
    graph = capture_step(step, type(step.model).__name__, plan.samples)
    theirs = plan.graph()
    for kind in ("parameters", "buffers", "inputs"):
        ours, wanted = getattr(graph, kind), getattr(theirs, kind)
        for name in list(ours) + list(wanted):
            if ours.get(name) != wanted.get(name):
                raise UserError(
                    f"[distribute] the plan is for another model or batch: {kind[:-1]} {name} is {ours.get(name)}, in the "
                    f"plan {wanted.get(name)}; plan this model again"
                )
    if theirs.text_without_model() != graph.text_without_model():
        raise UserError("[distribute] the plan is for a model that computes something else; plan this model again")
    if optimizer is not None and plan_name(optimizer) != plan.optimizer:
        raise UserError(
            f"[distribute] the plan counts the memory of {plan.optimizer}, but the optimizer needs that of "
            f"{plan_name(optimizer)}; plan with optimizer={plan_name(optimizer)!r}"
        )


def distribute(model, example_inputs, loss_fn=None, cluster=None, optimizer="adamw", *, plan=None, seed=0, device="auto",
               emulate=False, **options):
    """Trains a model by a plan on the workers that torchrun, Slurm or mpirun started; collective.

    model, example_inputs, loss_fn   as for capture(); rank 0's parameters are everyone's
    cluster        as for plan(); one device for each worker, in the order of ranks; workers whose device the plan leaves
                   out stay idle
    optimizer      'adamw', 'sgd', a torch.optim.Optimizer on model.parameters(), or None
    plan           a Plan or a plan file, instead of a cluster
    seed           of dropout, which does not depend on the sharding
    device         'cpu' (gloo), 'cuda' (NCCL) or 'auto'
    emulate        slows this process and its sockets down to the devices and links of the cluster
    options        engine, memory_limit, time_limit, ratios, all_devices, as for plan()
    """
    if (cluster is None) == (plan is None):
        raise UserError("[distribute] give either a cluster or a plan")
    step = Step(model, example_inputs, loss_fn)
    plan_name(optimizer)
    if cluster is not None:
        cluster = cluster_of(cluster)
    workers = group(device)
    agreed = _agreed_plan(step, workers, cluster, optimizer, plan, options)
    return Distributed(step, agreed, workers, optimizer, seed, emulate)

"""The guard: steps of a plan compared with steps of the plain model.

Rank 0 runs the user's model eagerly on the whole batch (_eager.py); its gradients and buffers go to all workers, one tensor at
a time, and each compares the pieces that it has. Everything that stands between the model and the numbers is compared at once:
capture, constants, theory, plan and runtime.

Two runs of one computation differ by rounding. A tensor passes if it differs by no more than _LIMIT of its norm, or of what
rounding may do to a tensor that ought to be zero. One that does not is judged by a second eager step on parameters and inputs that
are moved by one rounding error each: what that changes, times _SLACK, is what rounding explains. Where no more than _KINKS of gradients
is left in 32 bits, the same plan and model in 64 decide (_wide.py).
"""

import os

import torch

from . import _motley
from ._agree import captured, send_text
from ._agreement import same_batch
from ._eager import Draws, plain_step
from ._errors import MismatchError, UserError, warn

_LIMIT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_SLACK = 50
_KINKS = 5e-2  # of a gradient's norm: what a few units of a ReLU may change that rounding turns on or off
_PARTS_OF_MEMORY = 0.8  # that an eager step may take of what is free
FIRST_STEPS = 2  # of distribute() that are compared
FURTHER_PLANS = 8  # of which the first step is compared
_SMALL = 1 << 16  # elements of buffers that are always compared


def free_memory(device):
    """Bytes that are free on a device; of the CPU also what a container may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 1 << 62
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) << 10
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit, open("/sys/fs/cgroup/memory.current", encoding="ascii") as used:
            free = min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass
    return free


def rows_with_room(dist):
    """How many samples of a batch rank 0 has memory for in an eager step; collective."""
    run, group = dist._run, dist._group
    rows = 0
    if group.rank == 0:
        state = sum(slot.tensor.numel() * slot.tensor.element_size() for slot in run.step.parameters + run.step.buffers)
        free = free_memory(_device_of(run.step)) * _PARTS_OF_MEMORY - state * (1 if dist._fresh() else 2)
        need = max(1, run.graph.step_bytes - state)
        rows = run.plan.batch if need <= free else max(0, int(run.plan.batch * free / need))
    rows = torch.tensor([rows], device=group.device)
    if group.size > 1:
        group.all_reduce(rows)
    return int(rows)


def _device_of(step):
    return step.parameters[0].tensor.device if step.parameters else torch.device("cpu")


def compare_slice(dist, tensors, rows):
    """Compares a step on the first rows of a batch where the whole one has no room; collective. Warns of what is left out."""
    run, number = dist._run, dist._steps
    step, batch = run.step, run.plan.batch
    whole = all(len(shape) > 0 and shape[0] == batch and tensor.shape == shape for (_, shape, _), tensor in zip(run.leaves, tensors))
    if rows < 1 or not whole:
        warn_of("rank 0 has no memory for the plain model's step", number)
        return
    part, n = [tensor[:rows] for tensor in tensors], len(step.inputs)
    try:
        words = dist.verify(step.build_inputs(part[:n]), *([step.build_targets(part[n:])] if step.has_targets else []))
    except UserError as error:
        warn_of(f"rank 0 has no memory for the plain model's step, nor could a slice be compared ({error})", number)
        return
    if words:
        raise MismatchError(words)
    warn_of(f"rank 0 has no memory for the plain model's step, so only a slice of {rows} of {batch} samples was compared", number)


class Report:
    """What a comparison found. `differing`: [(name, what)] in the order of the model; `little`: none of that by more than _KINKS;
    `skipped`: why nothing was compared."""

    def __init__(self, differing=(), skipped="", little=False):
        self.differing, self.skipped, self.little = list(differing), skipped, little


class Check:
    """One step of a plan beside the plain one. Made before the step; all workers make one together."""

    def __init__(self, dist, tensors):
        self.dist, self.run, self.number, self.group = dist, dist._run, dist._steps, dist._group
        self.tensors, self.state, worker = self._whole_batch(tensors), None, dist._run.worker
        self.buffers = {slot.name: worker.buffer(slot.name) for slot in dist._run.step.buffers if worker.holds("buffer", slot.name)}
        # Copies, also where the plain step would clamp the model's own.
        if self.group.rank == 0 and (not dist._fresh() or self.run.watch.prepared):
            self.state = self._whole_state()

    def coarsest(self):
        """The floating-point type in which the plan computes that has the fewest digits."""
        return max(self.run.float_types, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)

    def in_32_bits(self):
        """What differs where the same plan computes in 32 bits instead of 16, in words; collective, before the step."""
        from ._wide import report_in_32_bits

        report = report_in_32_bits(self)
        if report.skipped:
            warn_of(f"{report.skipped}; it was compared in 16 bits alone", self.number)
        words = said(self.dist.module, report, self.number)
        return words.replace(" of the plan", " of the plan, computed in 32 bits,", 1)

    def _whole_state(self):
        whole, step = self.dist._whole_tensors(), self.run.step
        return [[whole[slot.name].to(slot.tensor.device) for slot in slots] for slots in (step.parameters, step.buffers)]

    def _whole_batch(self, tensors):
        """The whole batch, of which workers may have given their rows alone."""
        dist = self.dist
        if dist._counts is None or self.group.size == 1:
            return tensors
        counts, rank = dist._counts, self.group.rank
        first, whole = sum(counts[:rank]), []
        for (_, shape, dtype), tensor in zip(self.run.leaves, tensors):
            if not dist._run is dist._rows_of or len(shape) == 0 or shape[0] != self.run.plan.batch:
                whole.append(tensor)
                continue
            mine = tensor[first : first + counts[rank]] if tensor.shape == shape else tensor[: counts[rank]]
            all_rows = torch.zeros(shape, dtype=dtype, device=self.group.device)
            all_rows[first : first + counts[rank]] = mine.detach().to(self.group.device)
            self.group.all_reduce(all_rows)
            whole.append(all_rows)
        return whole

    @staticmethod
    def alone(dist, tensors):
        """A step of which only the comparison is kept: '' or what differs, in words."""
        same_batch(dist._group.peers, dist._held)  # on all, and where any two differ all refuse
        check, run = Check(dist, tensors), dist._run
        if dist._held.own_steps:
            dist._group.peers.settle(dist._held, True)
        words = check.in_32_bits()
        pieces = [dist._input(*leaf, tensor) for leaf, tensor in zip(run.leaves, tensors)]
        with dist._group.peers.collective():
            loss, gradients = run.worker.step(check.number, pieces)
        dist._agreed()
        report = check.judged(loss, gradients)
        for name, buffer in check.buffers.items():
            run.worker.set("buffer", name, buffer)
        if report.skipped:
            warn_of(report.skipped, check.number)
        return words or said(dist.module, report, check.number)

    def judged(self, loss, gradients):
        """The Report of what the plan's step made; where it differs by little in 32 bits, of the same step in 64. Collective."""
        report = self.report(loss, gradients)
        if report.little:
            from ._wide import report_in_64_bits

            wide = report_in_64_bits(self)
            if wide is not None and not wide.skipped and not wide.differing:
                return Report()
        return report

    def raise_or_warn(self, loss, gradients):
        report = self.judged(loss, gradients)
        if report.skipped:
            warn_of(report.skipped, self.number)
        text = said(self.dist.module, report, self.number)
        if text:
            raise MismatchError(text)

    # ---- rank 0 ---------------------------------------------------------------------------------------------------

    def _plain(self, nudge=0.0):
        step, run = self.run.step, self.run
        device = _device_of(step)
        parts = run.plan.micro_batches  # batch normalisation sees one at a time
        nodes = run.graph.random_nodes
        draws = Draws(nodes, self.dist._seed, self.number, 1) if nodes else None
        parameters, buffers = self.state or (None, None)
        tensors = [tensor.to(device) for tensor in self.tensors]
        outcome = self._plain_step(tensors, parameters, buffers, draws, parts, nudge)
        if run.watch.prepared:
            prepared = {name for name, _, _ in run.watch.prepared}
            self.dist._untouched.accept([slot for slot in step.parameters if slot.name in prepared])
        return outcome, draws is None or draws.exact

    def _plain_step(self, *given):
        return plain_step(self.run.step, *given)

    def _empty(self, slot):
        """A tensor as the gradient or the buffer of a slot is."""
        return torch.empty_like(slot.tensor)

    def _first(self):
        """(Outcome or None, whether its random numbers are those of the plan, why there is none)."""
        try:
            outcome, exact = self._plain()
            return outcome, exact, ""
        except (RuntimeError, MemoryError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None, False, f"the plain model does not run ({text})"

    # ---- all ------------------------------------------------------------------------------------------------------

    def sum(self, values):
        """A list of numbers added up over workers."""
        total = torch.tensor(values, dtype=torch.float64).to(self.group.device)
        if self.group.size > 1:
            self.group.all_reduce(total)
        return total.tolist()

    def _from_rank_0(self, values, count):
        return self.sum(values if self.group.rank == 0 else [0.0] * count)

    def _compared(self, kind, slots, wanted, got):
        """[(squared difference, squared norm)] of tensors over all workers; wanted on rank 0, got where held."""
        dist, held, rows = self.dist, self.run.worker, []
        for slot in slots:
            whole = None
            if self.group.rank == 0:
                whole = wanted.get(slot.name)
                whole = torch.zeros_like(self._empty(slot)) if whole is None else whole
            else:
                whole = self._empty(slot)
            whole = dist._rank_0(whole) if self.group.size > 1 else whole
            if not held.holds(kind, slot.name):
                rows.append((0.0, 0.0))
                continue
            piece = held.piece(kind, slot.name, whole).to(self.group.device)
            mine = got.get(slot.name)
            rows.append(_motley.distance(torch.zeros_like(piece) if mine is None else mine, piece))
        flat = self.sum([number for row in rows for number in row])
        return [(flat[2 * i], flat[2 * i + 1]) for i in range(len(slots))]

    def report(self, loss, gradients):
        """Compares what the plan's step made: the loss, and the gradients of the pieces that this worker holds."""
        step, rank_0, loss = self.run.step, self.group.rank == 0, float(loss)
        gradients = dict(zip(self.dist._held.pieces, gradients))
        held = self.run.worker
        buffers = {slot.name: held.buffer(slot.name) for slot in step.buffers if held.holds("buffer", slot.name)}
        outcome, exact, skipped = self._first() if rank_0 else (None, True, "")
        refusal = send_text(self.group, self._moved_on())
        if refusal:
            raise UserError(refusal)
        skipped = send_text(self.group, skipped)
        if skipped:
            return Report(skipped=skipped)
        trained = [slot for slot in step.parameters if slot.tensor.requires_grad]
        missing = [outcome.gradients[slot.name] is None for slot in trained] if rank_0 else []
        missing = self._from_rank_0([float(flag) for flag in missing], len(trained))
        mine = [held.holds("parameter", slot.name) for slot in trained]
        present = self.sum([float(here and gradients.get(slot.name) is not None) for here, slot in zip(mine, trained)])
        holders = self.sum([float(here) for here in mine])
        rows = self._compared("parameter", trained, outcome.gradients if rank_0 else {}, gradients)
        changed = [slot.tensor.numel() <= _SMALL or self._moved(slot, outcome) for slot in step.buffers] if rank_0 else []
        changed = self._from_rank_0([float(flag) for flag in changed], len(step.buffers))
        watched = [slot for slot, flag in zip(step.buffers, changed) if flag]
        after = self._compared("buffer", watched, outcome.buffers if rank_0 else {}, buffers)
        (plain,) = self._from_rank_0([outcome.loss] if rank_0 else [], 1)

        kind = self.coarsest()
        limit, eps = _LIMIT[kind], torch.finfo(kind).eps
        size = sum(norm for _, norm in rows) ** 0.5
        suspects = []  # (position in `judged`)
        judged = [("the loss", abs(loss - plain) if loss != plain and plain == plain else 0.0 if plain != plain and loss != loss
                   else abs(loss - plain), abs(plain), 0.0)]  # fmt: skip
        judged += [(slot.name, d**0.5, n**0.5, 8 * eps * size) for slot, (d, n) in zip(trained, rows)]
        judged += [(slot.name, d**0.5, n**0.5, 0.0) for slot, (d, n) in zip(watched, after)]
        for at, (_, difference, norm, floor) in enumerate(judged):
            if not difference <= limit * norm + floor:
                suspects.append(at)
        structural = [
            (slot.name, "has a gradient in one of the two and none in the other")
            for slot, none, some, all_ in zip(trained, missing, present, holders) if some != (0 if none else all_)
        ]  # fmt: skip
        if suspects:
            steady, *explained = self._explained(outcome, trained, watched, eps)
            self._moved_on()
            if not steady:
                raise UserError(
                    f"[verify] step {self.number}: the loss is another one each time the plain model runs; it reads something that changes, such "
                    "as the time or random numbers that are not torch's: pass that as an input"
                )
            suspects = [at for at in suspects if not judged[at][1] <= _SLACK * explained[at] * (2 ** 0.5 if at else 1)]
        found = [self._words(judged[at], at, loss, plain, limit, len(trained)) for at in suspects] + structural
        (exact,) = self._from_rank_0([float(exact)], 1)
        if found and not exact:
            return Report(skipped="the plain model draws random numbers in another order than the plan")
        little = not structural and all(at > 0 and judged[at][1] <= _KINKS * judged[at][2] for at in suspects)
        return Report(found, little=bool(found) and little)

    def _moved_on(self):
        """Rank 0 alone: takes what the eager step changed of what it reads, such as a hook's log, as it is now; a refusal in words
        where the next step would compute something else."""
        run = self.dist._run
        changes = run.watch.changes() if self.group.rank == 0 else []
        if not changes:
            return ""
        try:
            _, watch = captured(run.step)
            same = watch.of == run.watch.of
        except UserError:
            same = False
        if not same:
            return (
                f"[verify] the forward pass changes what it reads ({changes[0]}), so that the next step computes something else; "
                "change it between steps, or make it a buffer"
            )
        run.watch = watch
        return ""

    @staticmethod
    def _moved(slot, outcome):
        before = slot.tensor
        after = outcome.buffers[slot.name]
        return before.shape != after.shape or not torch.equal(before, after)

    def _explained(self, outcome, trained, watched, eps):
        """Whether the eager step is the same when repeated; then [judged] how far rounding moves each tensor, by another one."""
        count = 2 + len(trained) + len(watched)
        values = []
        if self.group.rank == 0:
            try:
                same, _ = self._plain()
                steady = not abs(same.loss - outcome.loss) > 1000 * eps * abs(outcome.loss)
                other, _ = self._plain(eps)
                values = [float(steady), abs(other.loss - outcome.loss)]
                for names, a, b in ((trained, other.gradients, outcome.gradients), (watched, other.buffers, outcome.buffers)):
                    for slot in names:
                        pair = a.get(slot.name), b.get(slot.name)
                        values.append(0.0 if None in map(type, pair) or pair[0] is None or pair[1] is None
                                      else _motley.distance(*pair)[0] ** 0.5)  # fmt: skip
            except (RuntimeError, MemoryError):
                values = [1.0] + [0.0] * (count - 1)
        return self._from_rank_0([value if value == value else 0.0 for value in values], count)

    def _words(self, row, at, loss, plain, limit, parameters):
        name, difference, norm, _ = row
        if at == 0:
            return name, f"is {loss:.9g}, that of the plain model {plain:.9g}"
        what = "gradient" if at <= parameters else "buffer"
        share = difference / norm if norm > 0 else float("inf")
        return name, f"the {what} differs by {share:.1e} of its norm (allowed {limit:.0e})"


def said(model, report, number):
    """One line of what differs, with the module of the first tensor; '' if nothing does."""
    if not report.differing:
        return ""
    tensors = [row for row in report.differing if row[0] != "the loss"]
    losses = [what for name, what in report.differing if name == "the loss"]
    parts = [f"the loss {losses[0]}"] if losses else []
    if tensors:
        name, what = tensors[0]
        path, _, _ = name.rpartition(".")
        kind = ""
        try:
            kind = f" of {type(model.get_submodule(path)).__name__}{' ' + path if path else ''}"
        except AttributeError:
            pass
        parts.append(f"{name}{kind}: {what}")
        if len(tensors) > 1:
            parts.append(f"{len(tensors)} tensors differ")
    return (
        f"[verify] step {number} of the plan is not that of the plain model: {'; '.join(parts)}; please report it, or train all "
        "the same with verify=False"
    )


def warn_of(skipped, number):
    warn(f"[verify] step {number} was not wholly compared with the plain model: {skipped}")


def wanted(verify):
    """What the argument of distribute() says, unless MOTLEY_VERIFY=0 turns the guard off for a whole launch."""
    if verify not in (True, False):
        raise UserError(f"[distribute] verify is {verify!r}; give True or False")
    return verify and os.environ.get("MOTLEY_VERIFY", "1") != "0"

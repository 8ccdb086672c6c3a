"""Whether all workers are about to do the same: 64 bits of each sent along with a step.

A digest holds the number of the step, of the plan, and a checksum of the batch. Tensors of at most 32 KiB count whole; of larger
ones some 512 elements at equal distances, others at every step.

A look at the memory of a device waits for all that is queued there, which is the step before. So there the elements that count are
copied behind what is queued, nobody waits for them, and the digest of the next step has their checksum. What leaves before
(dist.state_dict(), checkpoints) is compared with all other workers by questions: same_batch().
"""

import collections
import zlib

import torch

from . import _motley
from ._errors import PeerLost, UserError, warn

_LATER, _STEP, _RUN, _ROWS = 62, 40, 33, 32
_STEPS, _RUNS, _BATCH = (1 << 22) - 1, (1 << 7) - 1, (1 << 32) - 1
OTHER_BATCH = "they were given different batches, or buffers; give all the same global batch, or each its rows of a DataSplitter"


def _number(step, run, rows, check, later=False):
    return later << _LATER | (step & _STEPS) << _STEP | (run & _RUNS) << _RUN | rows << _ROWS | check


def _with_constants(check, constants):
    if not constants:
        return check
    plain = [value for _, value in constants if isinstance(value, (bool, int, float, str))]
    return zlib.crc32(repr(plain).encode(), check)


def digest(step, run, tensors, constants, rows):
    """Of a step that takes a run (negative: one that is still to be made). `rows`: the batch is this worker's rows alone."""
    return _number(step, run, rows, 0 if rows else _with_constants(_motley.checksum(tensors, 0, step), constants))


def differs(mine, theirs):
    """What two digests say in words; '' if the same."""
    both = mine ^ theirs
    if both >> _STEP & _STEPS:
        return "they are at another step; every worker has to make the same calls"
    rows = (mine | theirs) >> _ROWS & 1
    if not rows and not both >> _LATER & 1 and both & _BATCH:
        return OTHER_BATCH
    if both >> _RUN & _RUNS:
        return "the model, its arguments or the form of the batch changed on one of them; change the same on every worker"
    return ""


def has_streams(device):
    """Whether work on a device is queued, so that a look at its memory waits for it."""
    return torch.device(device).type not in ("cpu", "meta")


def capturing():
    """Whether what is queued now becomes part of a CUDA graph: nothing may be waited for."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Coming:
    """The elements of tensors that count, on their way to the CPU."""

    def __init__(self, tensors, step):
        self._samples, self._bytes, self._events = _motley.Samples(tensors, step), [], []
        for part in self._samples.parts():
            if part.device.type != "cuda":
                self._bytes.append(part.cpu())
                continue
            self._bytes.append(torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True))
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(part.device))

    def checksum(self, start=0):
        """That of _motley.checksum; waits until they have come."""
        for event in self._events:
            event.synchronize()
        return self._samples.checksum(self._bytes, start)


class Sampled:
    """The batch of one step, of which the checksum is asked for later. `number` counts batches."""

    def __init__(self, number, step, tensors, constants, buffers, rows):
        self.number, self.step, self.rows, self.agreed = number, step, rows, False
        self._coming = [] if rows else [_Coming([buffer], 0) for buffer in buffers] + [_Coming(tensors, step)]
        self._constants, self._check = constants, 0 if rows else None

    def check(self):
        """Any thread may ask."""
        coming = self._coming
        if self._check is None:
            news = 0
            for one in coming[:-1]:
                news = one.checksum(news)
            self._check = _with_constants(coming[-1].checksum(), self._constants + [("buffers", news)])
        self._coming = []
        return self._check

    def digest(self):
        return _number(self.step, 0, self.rows, self.check(), True)


class Batches:
    """What this worker says of the batches of one model: at once, or one step later."""

    def __init__(self, group):
        self.alone, self.later = group.size == 1, group.size > 1 and has_streams(group.device)
        self.step, self._rows, self._check = 0, True, 0  # of which step's batch, and what is said of it
        self.refused = ""  # why this worker made no further step, though the state is of a step with the batch that differs
        self._known = collections.deque(maxlen=group.size + 1)  # that others may ask for: some may be as many steps behind

    def take(self, step, tensors, constants, buffers, rows):
        """The batch of a step. `buffers`: those of the model that were changed since the step before."""
        self.step, self._rows, self._check = step, True, 0
        if self.alone or (self.later and capturing()):
            return
        if self.later:
            before = self.last
            self._known.append(Sampled(self.count + 1, step, tensors, constants, buffers, rows))
            if before is not None:
                self.step, self._rows, self._check = before.step, before.rows, before.check()
        elif not rows:
            news = 0
            for buffer in buffers:
                news = _motley.checksum([buffer], news)
            self._rows, self._check = False, _with_constants(_motley.checksum(tensors, 0, step), constants + [("buffers", news)])

    def refusal(self, what, rank, other, step):
        """The error of two workers of which differs() says something in a step."""
        text = f"[distribute] rank {rank} and rank {other} differ in step {self.step if what is OTHER_BATCH else step}: {what}"
        if self.later and what is OTHER_BATCH:
            self.refused = text
        return UserError(text)

    def digest(self, step, run):
        """Of a step, after take()."""
        return _number(step, run, self._rows, self._check, self.later)

    @property
    def last(self):
        """The last batch, where it is compared later."""
        return self._known[-1] if self._known else None

    @property
    def count(self):
        return self._known[-1].number if self._known else 0

    def awaits(self, number):
        """Whether a batch has still to be given."""
        return self.later and not self.refused and self.count < number

    def known(self, number):
        """The digest of a batch, for another worker; None where there is none any more."""
        return next((batch.digest() for batch in list(self._known) if batch.number == number), None)


def same_batch(peers, held):
    """UserError where another worker was given another batch in the last step, before the next step says so; of any worker alone."""
    last, group = held.batches.last, peers.group
    if last is None or last.agreed:
        return
    if held.batches.refused:
        raise UserError(held.batches.refused)
    with peers.asking:
        known = True
        for rank in range(group.size):
            if rank == group.rank:
                continue
            try:
                theirs, refused = peers.batch_of(rank, held, last.number)
            except PeerLost as error:
                warn(f"[distribute] nobody knows whether rank {rank} was given the same batch in step {last.step}: {error}")
                known = False
                continue
            if refused:
                held.batches.refused = refused
                raise UserError(refused)
            what = "" if theirs is None else differs(last.digest(), theirs)
            if what:
                raise UserError(f"[distribute] rank {group.rank} and rank {rank} differ in step {last.step}: {what}")
        last.agreed = known

"""Whether all workers are about to do the same: 64 bits of each sent along with a step.

A digest holds the number of the step, of the plan, and a checksum of the batch. Tensors of at most 32 KiB count whole; of larger
ones some 512 elements at equal distances, others at every step.
"""

import zlib

from . import _motley

_STEP, _RUN, _ROWS, _BATCH = 40, 33, 32, (1 << 32) - 1


def digest(step, run, tensors, constants, rows):
    """Of a step that takes a run (negative: one that is still to be made). `rows`: the batch is this worker's rows alone."""
    check = 0
    if not rows:
        check = _motley.checksum(tensors, 0, step)
        if constants:
            plain = [value for _, value in constants if isinstance(value, (bool, int, float, str))]
            check = zlib.crc32(repr(plain).encode(), check)
    return (step & 0x3FFFFF) << _STEP | (run & 0x7F) << _RUN | rows << _ROWS | check


def differs(mine, theirs):
    """What two digests say in words; '' if the same."""
    if mine == theirs:
        return ""
    if mine >> _STEP != theirs >> _STEP:
        return "they are at another step; every worker has to make the same calls"
    rows = (mine | theirs) >> _ROWS & 1
    if not rows and (mine ^ theirs) & _BATCH:
        return "they were given different batches, or buffers; give all the same global batch, or each its rows of a DataSplitter"
    if mine >> _RUN != theirs >> _RUN:
        return "the model, its arguments or the form of the batch changed on one of them; change the same on every worker"
    return ""

"""Whether all workers are about to do the same: 64 bits of each that travel beside a step.

A digest holds the number of the step, of the plan, and a checksum of the batch. Small tensors count whole; of large ones some
thousand elements, others at every step.
"""

import zlib

import torch

_WHOLE = 1 << 13  # bytes of a tensor that count whole
_SAMPLES = 512  # elements of a larger one
_STEP, _RUN, _ROWS, _BATCH = 40, 33, 32, (1 << 32) - 1


def _bytes(tensor, step):
    flat = tensor.detach()
    if flat.numel() * flat.element_size() > _WHOLE:
        flat = flat.reshape(-1) if flat.is_contiguous() else flat.select(0, step % flat.shape[0]).reshape(-1)
        stride = max(1, flat.numel() // _SAMPLES)
        flat = flat[step % stride :: stride][: 2 * _SAMPLES]
    flat = flat.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def checksum(tensor, start=0, step=0):
    """Of a tensor's shape and elements, going on from that of others."""
    return zlib.crc32(_bytes(tensor, step), zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), start))


def digest(step, run, tensors, constants, rows):
    """Of a step that takes a run (negative: one that is still to be made). `rows`: the batch is this worker's rows alone."""
    check = 0
    if not rows:
        for tensor in tensors:
            check = checksum(tensor, check, step)
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

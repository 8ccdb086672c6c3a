"""Calls of EmbeddingBag's operators; see operators.py."""

import torch


def _bags(Operand, n, backward=""):
    """Bags of several lengths, one without any; the sum, the mean of a power of two of them, or the largest."""
    mode = int(n.integers(3, 1))
    index, weights = n.i(5, 8), n.small(8) if mode == 0 and n.chance(0.6, 1) or backward == "weights" else None
    mode = 0 if weights else mode
    offsets = Operand(torch.tensor([0, 4, 4, 6]))
    table = n.small(5, 4) if backward else n.x(5, 4)
    given = [False, mode, False, weights, False, -1]
    if not backward:
        return [table, index, offsets, *given]
    out = torch.ops.aten._embedding_bag(table.tensor, index.tensor, offsets.tensor, False, mode, False, weights and weights.tensor, False, -1)
    bag, sizes, largest = map(Operand, out[1:])
    if backward == "weights":
        return [n.small(4, 4), table, index, offsets, bag, mode, -1]
    return [n.small(4, 4), index, offsets, bag, sizes, largest, 5, *given[:4], -1]


def arguments(Operand):
    """{operator: its arguments from numbers}"""
    return {
        "_embedding_bag": lambda n: _bags(Operand, n),
        "_embedding_bag_backward": lambda n: _bags(Operand, n, "table"),
        "_embedding_bag_per_sample_weights_backward": lambda n: _bags(Operand, n, "weights"),
    }

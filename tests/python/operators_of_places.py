"""Calls of operators whose last dimensions are places; see operators.py."""

import torch.nn.functional as F


def _of_places(places):
    """Operators whose last dimensions are places: pools, padding and resizing of one to three of them; small numbers, for sums differ in order."""
    small, large = [5, 4, 4][:places], [8, 6, 6][:places]

    def grown(n, change, *lead):
        return n.small(*lead, *[size + change for size in small])

    table, sides = {}, [1, 2] * places
    for kind in ("reflection", "replication"):
        table[f"{kind}_pad{places}d"] = lambda n: [grown(n, 0, 4, 6), sides]
        table[f"{kind}_pad{places}d_backward"] = lambda n: [grown(n, 3, 4, 6), grown(n, 0, 4, 6), sides]
    modes = {1: ["linear1d", "nearest1d", "exact1d"], 2: ["bicubic2d", "bicubic2d_aa", "bilinear2d_aa", "exact2d"], 3: ["nearest3d", "trilinear3d", "exact3d"]}
    for mode in modes[places]:
        name = f"_upsample_nearest_{mode}" if "exact" in mode else f"{'_' if mode.endswith('_aa') else ''}upsample_{mode}"
        extra = [] if "nearest" in mode or "exact" in mode else [False]
        scales = [None] * places
        table[name] = lambda n, extra=extra, scales=scales: [grown(n, 0, 4, 6), large, *extra, *scales]
        table[name + "_backward"] = lambda n, extra=extra, scales=scales: [n.small(4, 6, *large), large, [4, 6, *small], *extra, *scales]
        table[name + ".vec"] = lambda n, extra=extra: [grown(n, 0, 4, 6), large, *extra, None]
        table[name + "_backward.vec"] = lambda n, extra=extra: [n.small(4, 6, *large), large, [4, 6, *small], *extra, None]
    if places == 3:
        table["avg_pool3d"] = lambda n: [n.small(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None]
        table["avg_pool3d_backward"] = lambda n: [n.small(4, 6, 2, 2, 2), n.small(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None]
        table["_adaptive_avg_pool3d"] = lambda n: [n.small(4, 6, 4, 4, 4), [2, 2, 2]]
        table["_adaptive_avg_pool3d_backward"] = lambda n: [n.small(4, 6, 2, 2, 2), n.small(4, 6, 4, 4, 4)]
        table["max_pool3d_with_indices"] = lambda n: [n.x(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False]
        table["adaptive_max_pool3d"] = lambda n: [n.x(4, 6, 4, 4, 4), [2, 2, 2]]
    if places == 2:
        table["adaptive_max_pool2d"] = lambda n: [n.x(4, 6, 4, 4), [2, 2]]
    return table


def _largest(Operand, n, places, back):
    """The backward pass of a pool that finds the largest: indices are those of a forward pass."""
    x = n.x(4, 6, *[4] * places)
    _, indices = getattr(F, f"max_pool{places}d")(x.tensor, 2, return_indices=True)
    return [n.small(4, 6, *[2] * places), x, *back, Operand(indices)]


def _sampled(Operand, n, backward):
    x, grid = n.small(4, 6, 5, 5), n.small(4, 3, 3, 2)
    grid = Operand(grid.tensor.clamp(-4, 4) / 4)
    return [n.small(4, 6, 3, 3), x, grid, 0, 0, False, [1, 1]] if backward else [x, grid, 0, 0, False]


def arguments(Operand):
    """{operator: its arguments from numbers}"""
    table = {}
    for places in (1, 2, 3):
        table.update(_of_places(places))
    return {
        **table,
        "max_pool3d_with_indices_backward": lambda n: _largest(Operand, n, 3, [[2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False]),
        "adaptive_max_pool2d_backward": lambda n: _largest(Operand, n, 2, []),
        "adaptive_max_pool3d_backward": lambda n: _largest(Operand, n, 3, []),
        "grid_sampler_2d": lambda n: _sampled(Operand, n, False),
        "grid_sampler_2d_backward": lambda n: _sampled(Operand, n, True),
        "unfold": lambda n: [n.x(6, 4), 1, 2, 1],
        "unfold_backward": lambda n: [n.small(6, 3, 2), [6, 4], 1, 2, 1],
    }

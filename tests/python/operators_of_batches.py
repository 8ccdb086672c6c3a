"""Calls of operators that do the same for every matrix, picture or row of a batch; see operators.py."""

import torch
import torch.nn.functional as F


def _matrices(Operand, n, kind="regular"):
    """[6, 3, 3], so small that what comes of them is exact enough: regular, symmetric, positive or triangular."""
    x = n.small(6, 3, 3).tensor / 8
    if kind in ("symmetric", "positive"):
        x = (x + x.mT) / 2
    if kind == "triangular":
        x = x.tril()
    return Operand(x if kind == "symmetric" else x + 4 * torch.eye(3, dtype=x.dtype))


def _distances(Operand, n, backward=False):
    lead = [3] if n.chance(0.5, 1) else []
    x, y = n.small(*lead, 6, 4), n.small(*lead, 5, 4)
    if not backward:
        return [x, y, 2.0, None]
    # Not where rows are the same: the direction is of rounding.
    x = Operand(x.tensor + 1 / 16)
    return [n.small(*lead, 6, 5), x, y, 2.0, Operand(torch.cdist(x.tensor, y.tensor, compute_mode="donot_use_mm_for_euclid_dist"))]


def _ctc(Operand, n, backward=False):
    scores = Operand(n.small(5, 6, 4).tensor.log_softmax(-1))
    targets, lengths, most = Operand(n.integers(4, 6, 2, low=1)), Operand(torch.full((6,), 5)), Operand(n.integers(3, 6, low=1))
    if not backward:
        return [scores, targets, lengths, most, 0, False]
    loss, alpha = torch.ops.motley_torch.ctc_loss.default(scores.tensor, targets.tensor, lengths.tensor, most.tensor, 0, False)
    return [n.small(6), scores, targets, lengths, most, Operand(loss), Operand(alpha), 0, False]


def _unpooled(Operand, n, places):
    x = n.x(4, 6, *[4] * places)
    pooled, indices = getattr(F, f"max_pool{places}d")(x.tensor, 2, return_indices=True)
    sizes = [[4] * places] + ([[2] * 3, [0] * 3] if places == 3 else [])
    return [n.x(*pooled.shape), Operand(indices), *sizes]


def _fractional(Operand, n, places, backward=False):
    x, samples = n.x(4, 6, *[5] * places), n.unit(4, 6, places)
    samples = Operand(samples.tensor / 2)
    if not backward:
        return [x, [2] * places, [2] * places, samples]
    call = getattr(torch.ops.aten, f"fractional_max_pool{places}d").default
    return [n.small(4, 6, *[2] * places), x, [2] * places, [2] * places, Operand(call(x.tensor, [2] * places, [2] * places, samples.tensor)[1])]


def _sampled(Operand, n, backward):
    x, grid = n.small(4, 6, 4, 4, 4), Operand(n.small(4, 2, 2, 2, 3).tensor.clamp(-4, 4) / 4)
    return [n.small(4, 6, 2, 2, 2), x, grid, 0, 0, False, [1, 1]] if backward else [x, grid, 0, 0, False]


def _reduced(Operand, n, how):
    return [n.x(6, 4), 1, n.i(4, 6, 3), n.x(6, 3), how, bool(n.chance(0.5, 1))]


def _bits(*others):
    return lambda n: [n.i(8, 6, 4), *[n.i(4, 6, 4) if other is None else other for other in others]]


def _bools(n):
    return [n.b(6, 4), 1, bool(n.chance(0.5, 1))]


def _one(n):
    return [n.x(6, 4), int(n.integers(2, 1)), bool(n.chance(0.5, 1))]


def _pair(n):
    return [n.x(6, 4), n.nonzero(6, 4) if n.chance(0.5, 1) else n.nonzero(4)]


def _of_matrices(Operand):
    def matrix(kind="regular", *others):
        return lambda n: [_matrices(Operand, n, kind), *[n.small(6, 3, 2) if other is None else other for other in others]]

    return {
        "_cdist_backward": lambda n: _distances(Operand, n, True),
        "_cdist_forward": lambda n: _distances(Operand, n),
        "_ctc_loss_backward.Tensor": lambda n: _ctc(Operand, n, True),
        "_euclidean_dist": lambda n: _distances(Operand, n)[:2],
        "_linalg_det": matrix(),
        "_linalg_eigh": matrix("symmetric", "L", True),
        "_linalg_slogdet": matrix(),
        "_linalg_solve_ex": matrix("regular", None),
        "_linalg_svd": matrix(),
        "_trilinear": lambda n: [n.small(6, 4), n.small(3, 4, 5), n.small(6, 5), [1, 3], [0], [1, 2], [2, 3], 1],
        "addbmm": lambda n: [n.small(6, 4) if n.chance(0.5, 1) else n.small(4), n.small(3, 6, 5), n.small(3, 5, 4)],
        "affine_grid_generator": lambda n: [n.small(6, 2, 3), [6, 1, 4, 4], False],
        "cholesky_inverse": lambda n: [_matrices(Operand, n, "triangular")],
        "cholesky_solve": lambda n: [n.small(6, 3, 2), _matrices(Operand, n, "triangular")],
        "ctc_loss": lambda n: _ctc(Operand, n),
        "grid_sampler_3d": lambda n: _sampled(Operand, n, False),
        "grid_sampler_3d_backward": lambda n: _sampled(Operand, n, True),
        "linalg_cholesky_ex": matrix("positive"),
        "linalg_cross": lambda n: [n.small(6, 3), n.small(6, 3), 1],
        "linalg_inv_ex": matrix(),
        "linalg_lu_factor_ex": matrix(),
        "linalg_lu_solve": lambda n: [*map(Operand, torch.linalg.lu_factor(_matrices(Operand, n).tensor)), n.small(6, 3, 2)],
        "linalg_matrix_exp": lambda n: [Operand(n.small(6, 3, 3).tensor / 8)],
        "linalg_pinv.atol_rtol_tensor": matrix(),
        "linalg_qr": matrix(),
        "linalg_solve_triangular": lambda n: [_matrices(Operand, n, "triangular"), n.small(6, 3, 2), False],
    }


def arguments(Operand):
    """{operator: its arguments from numbers}"""

    def scan(n):
        return [n.small(6, 4), int(n.integers(2, 1))]

    def spread(n):
        return [n.small(6, 4), [1], 1, False]

    table = {name: lambda n: [n.positive(6, 4)] for name in "acosh digamma i0 lgamma special_entr special_i0e special_i1 special_i1e".split()}
    table.update({name: lambda n: [n.small(6, 4)] for name in "asinh sinc special_bessel_j0 special_bessel_j1 special_erfcx special_log_ndtr".split()})
    table.update({name: lambda n: [Operand(n.unit(6, 4).tensor / 2)] for name in "atanh erfinv special_ndtri".split()})
    table.update({name: _pair for name in "atan2 copysign.Tensor fmax fmin heaviside hypot maximum minimum nextafter".split()})
    table.update({name: lambda n: [n.b(6, 4), n.b(6, 4)] for name in "bitwise_and.Tensor bitwise_or.Tensor logical_and logical_or logical_xor".split()})
    table.update({name: scan for name in "cummax cummin cumprod logcumsumexp".split()})
    table.update({name: spread for name in "std.correction std_mean.correction var_mean.correction".split()})
    table.update({name: _one for name in "median.dim mode nanmedian.dim prod.dim_int".split()})
    for which in ("left", "right"):
        table[f"bitwise_{which}_shift.Tensor"] = _bits(None)
        table[f"bitwise_{which}_shift.Tensor_Scalar"] = _bits(2)
        table[f"__{which[0]}shift__.Tensor"] = _bits(None)
        table[f"__{which[0]}shift__.Scalar"] = _bits(2)
    for places in (2, 3):
        table[f"fractional_max_pool{places}d"] = lambda n, places=places: _fractional(Operand, n, places)
        table[f"fractional_max_pool{places}d_backward"] = lambda n, places=places: _fractional(Operand, n, places, True)
        table[f"max_unpool{places}d"] = lambda n, places=places: _unpooled(Operand, n, places)
    return {
        **table,
        **_of_matrices(Operand),
        "all": lambda n: [n.b(6, 4)],
        "all.dim": _bools,
        "aminmax": _one,
        "any": lambda n: [n.b(6, 4)],
        "any.dim": _bools,
        "bitwise_and.Scalar": _bits(3),
        "bitwise_or.Scalar": _bits(3),
        "bitwise_xor.Scalar": _bits(3),
        "bitwise_xor.Tensor": _bits(None),
        "bucketize.Tensor": lambda n: [n.x(6, 4), Operand(n.any(5).sort()[0])],
        "celu": lambda n: [n.x(6, 4), 1.5],
        "channel_shuffle": lambda n: [n.x(6, 4, 3), 2],
        "clamp_max.Tensor": _pair,
        "copysign.Scalar": lambda n: [n.x(6, 4), -2.0],
        "count_nonzero.dim_IntList": lambda n: [n.x(6, 4), [1]],
        "diag_embed": lambda n: [n.x(6, 4), int(n.integers(3, 1)) - 1, -2, -1] if n.chance(0.5, 1) else [n.x(6, 4), 0, 0, 2],
        "diagonal": lambda n: [n.x(6, 4, 3), 0, 0, 2] if n.chance(0.5, 1) else [n.x(6, 4, 3), 1, -2, -1],
        "diagonal_backward": lambda n: [n.x(6, 3), [6, 4, 3], 0, 1, 2],
        "diagonal_scatter": lambda n: [n.x(6, 4, 3), n.x(6, 3), 0, 1, 2] if n.chance(0.5, 1) else [n.x(6, 4, 3), n.x(4, 3), 0, 0, 2],
        "dist": lambda n: [n.small(6, 4), n.small(6, 4), 2.0],
        "float_power.Tensor_Scalar": lambda n: [n.small(6, 4), 2.0],
        "float_power.Tensor_Tensor": lambda n: [n.positive(6, 4), n.small(6, 4)],
        "gcd": _bits(None),
        "glu": lambda n: [n.x(6, 4), int(n.integers(2, 1))],
        "glu_backward": lambda n: [n.x(6, 2), n.small(6, 4), 1],
        "hardshrink": lambda n: [n.x(6, 4), 0.5],
        "hardshrink_backward": lambda n: [n.x(6, 4), n.small(6, 4), 0.5],
        "index_copy": lambda n: [n.x(6, 4), 1, Operand(torch.tensor([2, 0])), n.x(6, 2)],
        "index_fill.int_Scalar": lambda n: [n.x(6, 4), 1, n.i(4, 2), 2.0],
        "index_fill.int_Tensor": lambda n: [n.x(6, 4), 0, n.i(6, 2), n.x()],
        "index_reduce": lambda n: [n.x(6, 4), 1, n.i(4, 5), n.x(6, 5), ["amax", "amin"][int(n.integers(2, 1))], bool(n.chance(0.5, 1))],
        "isin.Tensor_Scalar": lambda n: [n.x(6, 4), 0.0],
        "isin.Tensor_Tensor": lambda n: [n.x(6, 4), n.x(5)],
        "kthvalue": lambda n: [n.x(6, 4), 2, int(n.integers(2, 1)), bool(n.chance(0.5, 1))],
        "lcm": _bits(None),
        "ldexp.Tensor": lambda n: [n.small(6, 4), n.i(4, 6, 4)],
        "lerp.Tensor": lambda n: [n.small(6, 4), n.small(6, 4), n.unit(6, 4)],
        "linspace": lambda n: [0.0, 1.0, 6],
        "logaddexp": lambda n: [n.small(6, 4), n.small(4)],
        "logaddexp2": lambda n: [n.small(6, 4), n.small(4)],
        "logit_backward": lambda n: [n.x(6, 4), Operand(n.inner(6, 4).tensor * 7 / 8), None],
        "logspace": lambda n: [0.0, 1.0, 6],
        "logsumexp": lambda n: [n.small(6, 4), [int(n.integers(2, 1))], bool(n.chance(0.5, 1))],
        "mvlgamma": lambda n: [Operand(n.positive(6, 4).tensor + 2), 2],
        "nansum": lambda n: [n.x(6, 4), [1], bool(n.chance(0.5, 1))],
        "pixel_shuffle": lambda n: [n.x(6, 4, 3, 2), 2],
        "pixel_unshuffle": lambda n: [n.x(6, 1, 4, 2), 2],
        "polygamma": lambda n: [1, n.positive(6, 4)],
        "renorm": lambda n: [n.small(6, 4, 3), 2.0, int(n.integers(3, 1)), 1.0],
        "rot90": lambda n: [n.x(6, 4, 3), int(n.integers(4, 1)), [1, 2]],
        "scatter.value_reduce": None,  # no alias-free one on the CPU
        "scatter_reduce.two": lambda n: _reduced(Operand, n, ["amax", "amin", "sum", "prod", "mean"][int(n.integers(5, 1))]),
        "searchsorted.Tensor": lambda n: [Operand(n.any(6, 5).sort()[0]), n.x(6, 3)] if n.chance(0.5, 1) else [Operand(n.any(5).sort()[0]), n.x(6, 4)],
        "softshrink": lambda n: [n.x(6, 4), 0.5],
        "softshrink_backward": lambda n: [n.x(6, 4), n.small(6, 4), 0.5],
        "sort.stable": lambda n: [n.x(6, 4), True, int(n.integers(2, 1)), bool(n.chance(0.5, 1))],
        "special_xlog1py": lambda n: [n.x(6, 4), n.positive(6, 4)],
        "special_zeta": lambda n: [Operand(n.positive(6, 4).tensor + 1), n.positive(6, 4)],
        "take": lambda n: [n.x(6, 4), n.i(24, 5, 3)],
        "tril_indices": lambda n: [4, 4],
        "triu_indices": lambda n: [4, 4],
    }

"""Calls of every operator of the op table with hostile numbers, as graphs whose results random programs must equal.

Real numbers are multiples of 1/8 up to 2^20, so that sums and products are exact in any order; among them are zeros, ties and,
where the operator is not linear in another operand, infinities. (A partial sum times an infinite number is no number where one
device adds zero, so that factors are finite.) Indices repeat and are out of order, and some targets are ignored.
"""

import math

import torch

import operators_of_bags
import operators_of_batches
import operators_of_places
from motley import _motley

try:
    import soundness_module
except ImportError:  # of those who want arguments alone
    soundness_module = None

f64, i64 = torch.float64, torch.int64
INF = math.inf


class Operand:
    """A tensor operand: `free` may hold infinities; `parts` is given as a sum over a dimension that may be cut."""

    def __init__(self, tensor, free=False):
        self.tensor, self.free = tensor, free


class Numbers:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, high, *shape, low=0):
        return torch.randint(low, high, shape, generator=self.generator)

    def chance(self, p, *shape):
        return torch.rand(shape, generator=self.generator) < p

    def any(self, *shape):
        """Dyadic numbers: half of them small with many ties, a quarter zero, a few large."""
        x = self.integers(33, *shape, low=-32).to(f64) / 8
        x[self.chance(0.25, *shape)] = 0
        large = self.chance(0.05, *shape)
        return torch.where(large, x * 2**17, x)

    def x(self, *shape):
        return Operand(self.any(*shape), free=True)

    def small(self, *shape):
        return Operand(self.integers(17, *shape, low=-16).to(f64) / 8)

    def nonzero(self, *shape):
        """Powers of two, by which division is exact."""
        sign = self.integers(2, *shape) * 2 - 1
        return Operand(2.0 ** self.integers(3, *shape, low=-2).to(f64) * sign)

    def unit(self, *shape):
        return Operand(self.integers(9, *shape).to(f64) / 8)

    def inner(self, *shape):
        return Operand(self.integers(8, *shape, low=1).to(f64) / 8)

    def positive(self, *shape):
        return Operand(self.integers(17, *shape, low=1).to(f64) / 8)

    def i(self, high, *shape):
        return Operand(self.integers(high, *shape))

    def b(self, *shape):
        return Operand(self.chance(0.5, *shape))

    def targets(self, high, *shape):
        t = self.integers(high, *shape)
        t[self.chance(0.3, *shape)] = -100
        return Operand(t)


def _plain(shape=(6, 4)):
    return lambda n: [n.x(*shape)]


def _with(*others, shape=(6, 4)):
    return lambda n: [n.x(*shape), *others]


def _pair(n):
    return [n.x(6, 4), n.x(6, 4)] if n.chance(0.5, 1) else [n.x(6, 4), n.x(4)]


def _small_pair(*others):
    return lambda n: [n.small(6, 4), n.small(6, 4), *others]


def _gradient(forward=None, *others):
    """(dy, x or y, ...)"""

    def make(n):
        x = n.any(6, 4)
        return [n.x(6, 4), Operand(forward(x) if forward else x), *others]

    return make


def _conv(n, backward=False, transposed=False, groups=1):
    x, w = n.small(4, 4, 5, 5), n.small(*((4, 6 // groups, 3, 3) if transposed else (6, 4 // groups, 3, 3)))
    tail = [[1, 1], [1, 1], [1, 1], transposed, [0, 0], groups]
    if not backward:
        return [x, w, n.small(6) if n.chance(0.5, 1) else None, *tail]
    return [n.small(4, 6, 5, 5), x, w, [6], *tail, [1, 1, 1]]


def _pool(n):
    return torch.nn.functional.max_pool2d(n, 2, return_indices=True)


def _batch_norm(n, backward=False, training=True):
    x, w, b = n.small(6, 4, 3), n.small(4), n.small(4)
    running = (None, None) if training else (n.small(4), n.positive(4))
    if not backward:
        return [x, w, b, *running, training, 0.1, 1e-5]
    _, mean, invstd = torch.native_batch_norm(x.tensor, w.tensor, b.tensor, None, None, True, 0.1, 1e-5)
    saved = (Operand(mean), Operand(invstd)) if training else (None, None)
    return [n.small(6, 4, 3), x, w, *running, *saved, training, 1e-5, [1, 1, 1]]


def _group_norm(n, backward=False):
    x, w, b = n.small(6, 4, 3), n.small(4), n.small(4)
    if not backward:
        return [x, w, b, 6, 4, 3, 2, 1e-5]
    _, mean, rstd = torch.native_group_norm(x.tensor, w.tensor, b.tensor, 6, 4, 3, 2, 1e-5)
    return [n.small(6, 4, 3), x, Operand(mean), Operand(rstd), w, 6, 4, 3, 2, [1, 1, 1]]


def _layer_norm(n, backward=False):
    x, w, b = n.small(6, 3, 4), n.small(4), n.small(4)
    if not backward:
        return [x, [4], w, b, 1e-5]
    _, mean, rstd = torch.native_layer_norm(x.tensor, [4], w.tensor, b.tensor, 1e-5)
    return [n.small(6, 3, 4), x, [4], Operand(mean), Operand(rstd), w, b, [1, 1, 1]]


def _nll(n, reduction=2, two=False, weight=False):
    shape = (6, 5, 2, 2) if two else (6, 5)
    w = n.positive(5) if weight else None
    return [n.x(*shape), n.targets(5, 6, *shape[2:]), w, reduction, -100]


def _nll_backward(n, reduction=2, two=False):
    shape = (6, 5, 2, 2) if two else (6, 5)
    dy = n.x(6, *shape[2:]) if reduction == 0 else n.x()
    return [dy, n.x(*shape), n.targets(5, 6, *shape[2:]), None, reduction, -100, Operand(torch.tensor(4.0, dtype=f64))]


def _hostile_rows(n):
    """Rows of a softmax: some all -inf, some with +inf, ties of the largest number."""
    x = n.any(6, 5)
    x[0], x[1, 2:] = -INF, -INF
    if n.chance(0.5, 1):
        x[2, 1] = INF
    x[3] = 1.0
    return x


def _soft(n, backward=False, log=False):
    x = _hostile_rows(n)
    dim = 1 if n.chance(0.7, 1) else 0
    if not backward:
        return [Operand(x), dim, False]
    y = x.log_softmax(dim) if log else x.softmax(dim)
    return [n.small(6, 5), Operand(y), dim, f64]


def _loss(backward=False, extra=(), inputs="small", targets="small", reductions=(0, 2)):
    def make(n):
        reduction = reductions[int(n.chance(0.5, 1))]
        middle = [e(n) for e in extra]
        x, y = getattr(n, inputs)(6, 4), getattr(n, targets)(6, 4)
        if not backward:
            return x, y, middle, reduction
        return (n.x(6, 4) if reduction == 0 else n.nonzero()), x, y, middle, reduction

    return make


def _flat(make, *after):
    def flat(n):
        *tensors, middle, reduction = make(n)
        return [*tensors, *middle, reduction, *after]

    return flat


def _index(n):
    kind = int(n.integers(4, 1))
    if kind == 0:
        return [n.x(6, 4), [n.i(6, 5)]]
    if kind == 1:
        return [n.x(6, 4), [None, n.i(4, 3)]]
    if kind == 2:
        return [n.x(6, 4), [n.i(6, 5), n.i(4, 5)]]
    return [n.x(6, 4, 5), [n.i(6, 3), None, n.i(5, 3)]]


def _index_put(n):
    adds = bool(n.chance(0.6, 1))
    kind = int(n.integers(4, 1))
    if kind == 0:
        return [n.x(6, 4), [n.i(6, 5)], n.x(5, 4), adds]
    if kind == 1:
        return [n.x(6, 4), [n.i(6, 5), n.i(4, 5)], n.x(), adds]
    if kind == 2:
        return [n.x(6, 4), [n.i(6, 5), n.i(4, 5)], n.x(5), adds]
    return [n.x(6, 4), [None, n.i(4, 3)], n.x(3) if n.chance(0.5, 1) else n.x(6, 1), adds]


def _weight_norm(n, backward=False):
    v, g = n.nonzero(6, 4), n.small(6, 1)
    if not backward:
        return [v, g, 0]
    _, norms = torch._weight_norm_interface(v.tensor, g.tensor, 0)
    return [n.small(6, 4), v, g, Operand(norms), 0]


def _upsample(backward, mode, vec=False):
    def make(n):
        extra = [] if mode == "nearest" else [False]
        if vec:
            return [n.small(4, 6, 10, 10), [10, 10], [4, 6, 5, 5], *extra, None] if backward else [n.small(4, 6, 5, 5), [10, 10], *extra, None]
        scales = [None, None]
        if backward:
            return [n.small(4, 6, 10, 10), [10, 10], [4, 6, 5, 5], *extra, *scales]
        return [n.small(4, 6, 5, 5), [10, 10], *extra, *scales]

    return make


def _log_sigmoid_backward(n):
    x = n.small(6, 4)
    return [n.x(6, 4), x, Operand(torch.ops.aten.log_sigmoid_forward.default(x.tensor)[1])]


def _max_pool_backward(n):
    x = n.any(4, 6, 4, 4)
    return [n.x(4, 6, 2, 2), Operand(x), [2, 2], [2, 2], [0, 0], [1, 1], False, Operand(_pool(x)[1])]


def _attention(n, backward=False):
    """Two heads of queries for each of keys, or one; a mask of rows, of all, or none."""
    shared = bool(n.chance(0.5, 1))
    q, k, v = n.small(6, 4, 3, 2), n.small(6, 2 if shared else 4, 5, 2), n.small(6, 2 if shared else 4, 5, 2)
    kind = int(n.integers(4, 1))
    mask = [None, n.small(6, 1, 3, 5), n.small(1, 4, 3, 5), n.small(3, 5)][kind]
    causal = kind == 0 and bool(n.chance(0.5, 1))
    given = {"attn_mask": None if mask is None else mask.tensor}
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if not backward:
        return [q, k, v, 0.0, causal, mask, None]
    out, sums = op(q.tensor, k.tensor, v.tensor, 0.0, causal, **given)
    return [n.small(6, 4, 3, 2), q, k, v, Operand(out), Operand(sums), 0.0, causal, mask, None]


_ARGUMENTS = {
    **operators_of_bags.arguments(Operand),
    **operators_of_batches.arguments(Operand),
    **operators_of_places.arguments(Operand),
    "_prelu_kernel": lambda n: [n.x(6, 4), n.small(1, 4)],
    "_prelu_kernel_backward": lambda n: [n.small(6, 4), n.small(6, 4), n.small(1, 4) if n.chance(0.7, 1) else n.small(1, 1)],
    "_grouped_mm": None,  # takes no double precision, and runs whole
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda n: _attention(n, True),
    "_safe_softmax": lambda n: _soft(n)[:2] + [None],
    "_adaptive_avg_pool2d": lambda n: [n.small(4, 6, 4, 4), [2, 2]],
    "_adaptive_avg_pool2d_backward": lambda n: [n.small(4, 6, 2, 2), n.small(4, 6, 4, 4)],
    "_log_softmax": _soft,
    "_log_softmax_backward_data": lambda n: _soft(n, True, True),
    "_softmax": _soft,
    "_softmax_backward_data": lambda n: _soft(n, True),
    "_to_copy": _with(torch.float32),
    "_unsafe_view": lambda n: [n.x(6, 4), [24]],
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": lambda n: _weight_norm(n, True),
    "acos": lambda n: [n.unit(6, 4)],
    "add.Scalar": _with(2.5),
    "add.Tensor": lambda n: _pair(n) + [2],
    "addcdiv": lambda n: [n.x(6, 4), n.x(6, 4), n.nonzero(6, 4)],
    "addcmul": lambda n: [n.x(6, 4), n.x(6, 4), n.x(6, 4)],
    "addmm": lambda n: [n.x(4) if n.chance(0.5, 1) else n.x(6, 4), n.small(6, 5), n.small(5, 4)],
    "amax": lambda n: [n.x(6, 4), [1], bool(n.chance(0.5, 1))],
    "amin": lambda n: [n.x(6, 4), [0], bool(n.chance(0.5, 1))],
    "arange": lambda n: [6.0],
    "arange.start": lambda n: [1.0, 6.0],
    "arange.start_step": lambda n: [1.0, 6.0, 2.0],
    "argmax": lambda n: [n.x(6, 4), 1, False],
    "argmin": lambda n: [n.x(6, 4), 0, True],
    "asin": lambda n: [n.unit(6, 4)],
    "avg_pool2d": lambda n: [n.small(4, 6, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None],
    "avg_pool2d_backward": lambda n: [n.small(4, 6, 2, 2), n.small(4, 6, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None],
    "baddbmm": lambda n: [n.x(3, 6, 4), n.small(3, 6, 5), n.small(3, 5, 4)],
    "bernoulli.p": _with(0.3),
    "binary_cross_entropy": _flat(_loss(inputs="unit", targets="unit", extra=[lambda n: None])),
    # Not at 0 and 1, where libtorch divides by 1e-12, so that nothing is exact.
    "binary_cross_entropy_backward": _flat(_loss(True, inputs="inner", targets="unit", extra=[lambda n: None])),
    "binary_cross_entropy_with_logits": _flat(_loss(targets="unit", extra=[lambda n: n.positive(4), lambda n: None])),
    "bitwise_not": lambda n: [n.b(6, 4)],
    "bmm": lambda n: [n.small(3, 6, 5), n.small(3, 5, 4)],
    "cat": lambda n: [([n.x(0)] if n.chance(0.3, 1) else []) + ([n.x(6, 4), n.x(6, 4)] if n.chance(0.5, 1) else [n.x(6, 4), n.x(3, 4)]), 0],
    "clamp": _with(-0.5, 0.5),
    "clamp.Tensor": lambda n: [n.x(6, 4), n.x(4), n.x(6, 4)],
    "clamp_max": _with(0.5),
    "clamp_min": _with(0.0),
    "clamp_min.Tensor": _pair,
    "constant_pad_nd": lambda n: [n.x(6, 4), [1, 2], float(n.integers(2, 1))],
    "col2im": lambda n: [n.small(4, 24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]] if n.chance(0.7, 1) else [n.small(24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]],
    "im2col": lambda n: [n.x(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]] if n.chance(0.7, 1) else [n.x(6, 4, 4), [3, 1], [1, 1], [1, 0], [1, 1]],
    "convolution": lambda n: _conv(n, False, bool(n.chance(0.3, 1)), 2 if n.chance(0.2, 1) else 1),
    "convolution_backward": lambda n: _conv(n, True, bool(n.chance(0.3, 1)), 2 if n.chance(0.2, 1) else 1),
    "copy": _pair,
    "cumsum": lambda n: [n.x(6, 4), int(n.integers(2, 1))],
    "div.Scalar": _with(4.0),
    "div.Tensor": lambda n: [n.x(6, 4), n.nonzero(4)],
    "div.Tensor_mode": lambda n: [n.x(6, 4), n.nonzero(6, 4), "floor"],
    "dot": lambda n: [n.small(12), n.small(12)],
    "elu": _with(1.5, 1.0, 1.0),
    "elu_backward": lambda n: [n.x(6, 4), 1.5, 1.0, 1.0, False, Operand(n.any(6, 4))],
    "embedding": lambda n: [n.x(5, 4), n.i(5, 6, 3), -1],
    "embedding_dense_backward": lambda n: [n.x(6, 3, 4), n.i(5, 6, 3), 5, 2 if n.chance(0.5, 1) else -1, False],
    "expand": lambda n: [n.x(6, 1), [6, 4], False],
    "exponential": _with(2.0),
    "eye": lambda n: [4],
    "eye.m": lambda n: [6, 4],
    "fill.Scalar": _with(2.5),
    "flip": _with([1]),
    "floor_divide": lambda n: [n.x(6, 4), n.nonzero(6, 4)] if n.chance(0.5, 1) else [n.i(40, 6, 4), 3],
    "fmod.Scalar": _with(0.75),
    "fmod.Tensor": lambda n: [n.x(6, 4), n.nonzero(6, 4)],
    "full": lambda n: [[6, 4], 2.5, f64],
    "full_like": _with(-INF),
    "gather": lambda n: [n.x(6, 4), 1, n.i(4, 6, 4)] if n.chance(0.5, 1) else [n.x(6, 4), 0, n.i(6, 3, 4)],
    "gelu": _with("none"),
    "gelu_backward": _gradient(None, "tanh"),
    "hardsigmoid_backward": _gradient(),
    # Not at 3, where libtorch's vectors and its single numbers differ.
    "hardswish_backward": _gradient(lambda x: x + 1 / 16),
    "hardtanh": _with(-1.0, 1.0),
    "hardtanh_backward": _gradient(None, -1.0, 1.0),
    "huber_loss": _flat(_loss(), 0.5),
    "huber_loss_backward": _flat(_loss(True), 0.5),
    "index.Tensor": _index,
    "index_add": lambda n: [n.x(6, 4), 1, n.i(4, 5), n.x(6, 5), 1] if n.chance(0.5, 1) else [n.x(6, 4), 0, n.i(6, 9), n.x(9, 4), 2],
    "index_put": _index_put,
    "index_select": lambda n: [n.x(6, 4), 0, n.i(6, 5)],
    "leaky_relu": _with(0.25),
    "leaky_relu_backward": _gradient(None, 0.25, False),
    "lerp.Scalar": lambda n: [n.x(6, 4), n.x(6, 4), 0.25],
    "linalg_vector_norm": lambda n: [n.x(6, 4), [2.0, INF, 1.0, 0.0][int(n.integers(4, 1))], [1], False, None],
    "log_sigmoid_backward": _log_sigmoid_backward,
    "logit": lambda n: [n.unit(6, 4), None],
    "masked_fill.Scalar": lambda n: [n.x(6, 4), n.b(4), [0.0, -INF][int(n.integers(2, 1))]],
    "masked_fill.Tensor": lambda n: [n.x(6, 4), n.b(6, 4), n.x()],
    "max.dim": lambda n: [n.x(6, 4), 1, bool(n.chance(0.5, 1))],
    "max_pool2d_with_indices": lambda n: [n.x(4, 6, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False],
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "mean.dim": lambda n: [n.x(6, 4), [1], False],
    "min.dim": lambda n: [n.x(6, 4), 0, bool(n.chance(0.5, 1))],
    "mm": lambda n: [n.small(6, 5), n.small(5, 4)],
    "mse_loss": _flat(_loss()),
    "mse_loss_backward": _flat(_loss(True)),
    "mul.Scalar": _with(-2.0),
    "mul.Tensor": lambda n: [n.x(6, 4), n.x(6, 4) if n.chance(0.5, 1) else n.x()],
    "mv": lambda n: [n.small(6, 5), n.small(5)],
    "native_batch_norm": lambda n: _batch_norm(n, False, bool(n.chance(0.7, 1))),
    "native_batch_norm_backward": lambda n: _batch_norm(n, True, bool(n.chance(0.7, 1))),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": lambda n: _group_norm(n, True),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": lambda n: _layer_norm(n, True),
    "new_empty": None,
    "new_full": lambda n: [n.x(6, 4), [6, 5], 1.5],
    "new_ones": lambda n: [n.x(6, 4), [6, 5]],
    "new_zeros": lambda n: [n.x(6, 4), [6, 5]],
    "nll_loss2d_backward": lambda n: _nll_backward(n, [0, 2][int(n.integers(2, 1))], True),
    "nll_loss2d_forward": lambda n: _nll(n, [0, 2][int(n.integers(2, 1))], True),
    "nll_loss_backward": lambda n: _nll_backward(n, 0 if n.chance(0.2, 1) else 2),
    "nll_loss_forward": lambda n: _nll(n, 0 if n.chance(0.2, 1) else 2, False, bool(n.chance(0.2, 1))),
    "norm.ScalarOpt_dim": lambda n: [n.x(6, 4), 2.0, [1], False],
    "normal_functional": _with(0.5, 2.0),
    "ones": lambda n: [[6, 4], f64],
    "permute": lambda n: [n.x(6, 4, 3), [2, 0, 1]],
    "pow.Scalar": lambda n: [2.0, n.x(6, 4)],
    "pow.Tensor_Scalar": _with(2.0),
    "pow.Tensor_Tensor": lambda n: [n.x(6, 4), n.small(6, 4)],
    "prelu": lambda n: [n.x(6, 4), n.small(4)],
    "prelu_backward": lambda n: [n.small(6, 4), n.small(6, 4), n.small(4)],
    "rand": lambda n: [[6, 4]],
    "randint": lambda n: [7, [6, 4]],
    "randint.low": lambda n: [2, 7, [6, 4]],
    "randint_like": _with(7),
    "randint_like.low_dtype": _with(2, 7),
    "randn": lambda n: [[6, 4]],
    "remainder.Scalar": _with(0.75),
    "remainder.Tensor": lambda n: [n.x(6, 4), n.nonzero(6, 4)],
    "repeat": lambda n: [n.x(6, 4), [[2, 1, 3], [3, 1], [1, 4], [1, 1, 1], [2, 2, 2]][n.chance(0.5, 1) + 2 * n.chance(0.5, 1) + n.chance(0.3, 1)]],
    "reshape": _with([3, 8]),
    "roll": _with([1], [0]),
    "rows_mm": lambda n: [n.small(6, 4), n.small(5, 4, 3), Operand(n.integers(7, 6, low=-1))],
    "rows_outer": lambda n: [n.small(6, 4), n.small(6, 3), Operand(n.integers(7, 6, low=-1)), 5],
    "round.decimals": _with(1),
    "rsub.Scalar": _with(2.0),
    "rsub.Tensor": lambda n: _pair(n) + [2],
    "scalar_tensor": lambda n: [2.5, f64],
    "scatter.src": lambda n: [n.x(6, 4), 1, n.i(4, 6, 3), n.x(6, 3)] if n.chance(0.5, 1) else [n.x(6, 4), 0, n.i(6, 5, 4), n.x(5, 4)],
    "scatter.value": lambda n: [n.x(6, 4), 1, n.i(4, 6, 3), -INF],
    "scatter_add": lambda n: [n.x(6, 4), 1, n.i(4, 6, 3), n.x(6, 3)] if n.chance(0.5, 1) else [n.x(6, 4), 0, n.i(6, 9, 4), n.x(9, 4)],
    "select.int": _with(1, 2),
    "select_backward": lambda n: [n.x(6), [6, 4], 1, 2],
    "select_scatter": lambda n: [n.x(6, 4), n.x(6), 1, 2],
    "sigmoid_backward": _gradient(torch.sigmoid),
    "silu_backward": lambda n: [n.x(6, 4), n.small(6, 4)],
    "mish_backward": lambda n: [n.x(6, 4), n.small(6, 4)],
    "slice.Tensor": lambda n: [n.x(6, 4), 0, 2, 4, 1] if n.chance(0.5, 1) else [n.x(6, 4), 0, 1, 6, 2],
    "slice_backward": lambda n: [n.x(2, 4), [6, 4], 0, 2, 4, 1],
    "slice_scatter": lambda n: [n.x(6, 4), n.x(2, 4), 0, 2, 4, 1],
    "smooth_l1_loss": _flat(_loss(), 0.5),
    "smooth_l1_loss_backward": _flat(_loss(True), 0.5),
    "soft_margin_loss": _flat(_loss()),
    "soft_margin_loss_backward": _flat(_loss(True)),
    "softplus": _with(1.0, 20.0),
    "softplus_backward": lambda n: [n.x(6, 4), n.small(6, 4), 1.0, 20.0],
    "sort": lambda n: [n.x(6, 4), int(n.integers(2, 1)), bool(n.chance(0.5, 1))],
    "split.Tensor": lambda n: [n.x(6, 4), 3 if n.chance(0.5, 1) else 4, 0],
    "split_with_sizes": lambda n: [n.x(6, 4), [2, 2, 2] if n.chance(0.5, 1) else [1, 2, 3], 0],
    "squeeze.dim": lambda n: [n.x(6, 1, 4), 1],
    "stack": lambda n: [[n.x(6, 4), n.x(6, 4)], 1],
    "sub.Scalar": _with(2.0),
    "sub.Tensor": lambda n: _pair(n) + [2],
    "sum.dim_IntList": lambda n: [n.x(6, 4), [[0], [1], [0, 1]][int(n.integers(3, 1))], bool(n.chance(0.5, 1)), None],
    "tanh_backward": _gradient(torch.tanh),
    "threshold": _with(0.0, -1.0),
    "threshold_backward": _gradient(None, 0.0),
    "topk": lambda n: [n.x(6, 4), 2, int(n.integers(2, 1)), True, True],
    "transpose.int": _with(0, 1),
    "tril": lambda n: [n.x(3, 5, 4), int(n.integers(3, 1)) - 1],
    "triu": lambda n: [n.x(3, 5, 4), int(n.integers(3, 1)) - 1],
    "unbind.int": _with(1),
    "uniform": _with(-1.0, 2.0),
    "unsafe_split.Tensor": lambda n: [n.x(6, 4), 3, 0],
    "unsafe_split_with_sizes": lambda n: [n.x(6, 4), [2, 2, 2], 0],
    "unsqueeze": _with(1),
    "upsample_bilinear2d": _upsample(False, "bilinear"),
    "upsample_bilinear2d.vec": _upsample(False, "bilinear", True),
    "upsample_bilinear2d_backward": _upsample(True, "bilinear"),
    "upsample_bilinear2d_backward.vec": _upsample(True, "bilinear", True),
    "upsample_nearest2d": _upsample(False, "nearest"),
    "upsample_nearest2d.vec": _upsample(False, "nearest", True),
    "upsample_nearest2d_backward": _upsample(True, "nearest"),
    "upsample_nearest2d_backward.vec": _upsample(True, "nearest", True),
    "var.correction": lambda n: [n.small(6, 4), [1], 1, False],
    "view": _with([2, 3, 4]),
    "where.self": lambda n: [n.b(6, 4), n.x(6, 4), n.x(4)],
    "xlogy.Tensor": lambda n: [n.x(6, 4), n.positive(6, 4)],
    "zeros": lambda n: [[6, 4], f64],
}
for _name in "lt le gt ge eq ne".split():
    _ARGUMENTS[f"{_name}.Scalar"] = _with(0.5)
    _ARGUMENTS[f"{_name}.Tensor"] = _pair


def arguments_of(op, numbers):
    """The arguments of a call; None where an operator returns what nobody has written."""
    name = op.split("::")[1]
    make = _ARGUMENTS.get(name, _plain())
    return None if make is None else make(numbers)


def function(op):
    space, called = op.split("::")
    name, _, overload = called.partition(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload or "default")


_TYPES = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.int32: "i32", torch.bool: "b8"}


def called(op, arguments):
    """Results of a call; None where an operator has none."""
    positional, named = [], {}
    for argument, value in zip(function(op)._schema.arguments, arguments):
        if argument.name == "output_mask" or argument.name.endswith("_mask") and isinstance(value, list):
            value = [bool(v) for v in value]
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    results = function(op)(*positional, **named)
    return [r if isinstance(r, torch.Tensor) else None for r in (results if isinstance(results, (tuple, list)) else [results])]


class Call:
    """A graph of one call whose results are updates of buffers, and its feeds."""

    def __init__(self, op, seed):
        self.op, numbers = op, Numbers(seed)
        self.arguments = arguments_of(op, numbers)
        if self.arguments is None:
            return
        self.summed = bool(numbers.chance(0.5, 1))
        self.build(numbers)
        allowed = [all(i in group for group in soundness_module.linear_sets(self.text)) for i in range(len(self.operands))]
        if any(operand.free and may for operand, may in zip(self.operands, allowed)):
            for operand, may in zip(self.operands, allowed):
                if operand.free and may:
                    x, shape = operand.tensor, operand.tensor.shape
                    x[numbers.chance(0.06, *shape)] = INF
                    x[numbers.chance(0.06, *shape)] = -INF
            self.build(numbers)

    def build(self, numbers):
        self.inputs, self.operands, lines = {}, [], []

        def value(operand):
            self.operands.append(operand)
            tensor, name = operand.tensor, f"x{len(self.operands)}"
            spec = f"{_TYPES[tensor.dtype]}[{','.join(map(str, tensor.shape))}]"
            if not self.summed or tensor.dtype != f64:
                self.inputs[name] = tensor
                lines.append(f'%{len(lines)} = motley::input("{name}") : {spec}')
            else:  # as a sum of exact parts, of which every device may hold its own
                parts = numbers.integers(33, 2, *tensor.shape, low=-32).to(f64) / 8
                parts[:, tensor.abs() > 2**16] = 0  # sums of these would be rounded
                self.inputs[name] = torch.cat([parts, (tensor - parts.sum(0))[None]])
                lines.append(f'%{len(lines)} = motley::input("{name}") : {spec.replace("[", "[3,").replace(",]", "]")}')
                lines.append(f"%{len(lines)} = aten::sum.dim_IntList(%{len(lines) - 1}, [0], false, none) : {spec}")
            return f"%{len(lines) - 1}"

        def text(argument):
            if isinstance(argument, Operand):
                return value(argument)
            if argument is None:
                return "none"
            if isinstance(argument, bool):
                return str(argument).lower()
            if isinstance(argument, float):
                return {INF: "inf.", -INF: "-inf."}.get(argument, repr(argument))
            if isinstance(argument, str):
                return f'"{argument}"'
            if isinstance(argument, torch.dtype):
                return _TYPES[argument]
            if isinstance(argument, list):
                return "[" + ", ".join(text(a) for a in argument) + "]"
            return str(argument)

        def tensors(argument):
            if isinstance(argument, list):
                return [tensors(a) for a in argument]
            return argument.tensor if isinstance(argument, Operand) else argument

        call = ", ".join(text(argument) for argument in self.arguments)
        results = called(self.op, [tensors(argument) for argument in self.arguments])
        outputs, specs, updates, self.buffers = [], [], [], {}
        n = len(lines)
        for k, result in enumerate(results):
            if result is None:
                outputs.append("none"), specs.append("none")
                continue
            spec = f"{_TYPES[result.dtype]}[{','.join(map(str, result.shape))}]"
            outputs.append(f"%{n}"), specs.append(spec)
            updates.append((f"r{k}", n, spec))
            self.buffers[f"r{k}"] = torch.zeros(result.shape, dtype=result.dtype)
            n += 1
        lines.append(f"{', '.join(outputs)} = {self.op}({call}) : {', '.join(specs)}")
        for name, _, spec in updates:
            lines.append(f'%{n} = motley::buffer("{name}") : {spec}')
            n += 1
        self.inputs["z"] = torch.ones(2, dtype=f64)
        lines.append(f'%{n} = motley::input("z") : f64[2]')
        lines.append(f"%{n + 1} = aten::sum(%{n}, none) : f64[]")
        lines += [f"loss %{n + 1}"] + [f'update "{name}" %{at}' for name, at, _ in updates]
        self.text = "model call\n" + "\n".join(lines) + "\n"

    def worst(self, devices, programs, seed):
        return soundness_module.worst_error(self.text, {}, self.buffers, self.inputs, devices, programs, seed)


def operators():
    """Those of the table that this torch has."""

    def is_there(name):
        try:
            return function(name) is not None
        except AttributeError:
            return False

    return [op["name"] for op in _motley.op_table() if is_there(op["name"])]

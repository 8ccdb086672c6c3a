"""Fourier transforms of a step that is captured, as products with matrices of cosines and sines.

A transform of n numbers is one product for small n; for others two transforms of factors of n (Cooley and Tukey, 1965), so that
1,024 numbers take 64 products and additions each. Gradients follow, and the products are divided among devices as others are.
"""

import math

import torch
import torch.nn.functional as F

from ._complex import Complex, away, refusal

_DIRECT = 64  # numbers that one product transforms
_CONSTANT = 4096  # elements of a constant of a graph
_MOST = 4096  # in one dimension, where they have no factors


def _tables(n, inner, sign, dtype):
    """exp(sign 2 pi i j k / n) for j < n / inner or n, and k < inner, as (cosines, sines)."""
    turns = torch.outer(torch.arange(n // inner if inner else n), torch.arange(inner or n)) % n
    angles = turns.to(torch.float64) * (sign * 2 * math.pi / n)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _constants(like, n, inner, sign):
    """Those tables; large ones are computed in every step, for graphs hold small constants."""
    small = (n if inner else n * n) <= _CONSTANT
    tables = away(_tables, n, inner, sign, like.dtype) if small else _tables(n, inner, sign, like.dtype)
    return [table.to(like.device) for table in tables]


def _times(a, b, c, d, product):
    """(a + ib)(c + id); b None: zero."""
    if b is None:
        return product(a, c), product(a, d)
    return product(a, c) - product(b, d), product(a, d) + product(b, c)


def _transform(re, im, sign):
    """Of the last dimension, without a factor; im None: zero."""
    n = re.shape[-1]
    outer = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0) if n > _DIRECT else 1
    if outer == 1 and n > _MOST:
        raise refusal(f"a Fourier transform of {n} numbers, which has no factors; pad it to a number that has")
    if outer == 1:
        return _times(re, im, *_constants(re, n, 0, sign), torch.matmul)
    inner = n // outer

    def split(x):
        return None if x is None else x.unflatten(-1, (outer, inner)).transpose(-1, -2)

    re, im = _transform(split(re), split(im), sign)  # [.., inner, outer]
    cos, sin = _constants(re, n, outer, sign)
    re, im = _times(re, im, cos, sin, lambda x, y: x * y)
    re, im = _transform(re.transpose(-1, -2), im.transpose(-1, -2), sign)  # [.., outer, inner]
    return re.transpose(-1, -2).flatten(-2), im.transpose(-1, -2).flatten(-2)


def _sized(x, n):
    """The first n numbers of the last dimension, or zeros behind them."""
    if x is None or x.shape[-1] == n:
        return x
    return x[..., :n] if n < x.shape[-1] else F.pad(x, (0, n - x.shape[-1]))


def _scale(n, norm, inverse):
    if norm not in (None, "backward", "ortho", "forward"):
        raise refusal(f"a Fourier transform with norm={norm!r}")
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if inverse == (norm != "forward") else 1.0


def _parts(x):
    if isinstance(x, Complex):
        return x.parts()
    return (x if x.is_floating_point() else x.to(torch.get_default_dtype())), None


def _last(x, dim):
    return None if x is None else x.movedim(dim, -1)


def _one(re, im, n, dim, norm, inverse):
    """A transform of one dimension, n None: as it is."""
    re, im = _last(re, dim), _last(im, dim)
    n = re.shape[-1] if n is None else n
    re, im = _transform(_sized(re, n), _sized(im, n), 1 if inverse else -1)
    scale = _scale(n, norm, inverse)
    if scale != 1:
        re, im = re * scale, im * scale
    return re.movedim(-1, dim), im.movedim(-1, dim)


def _one_to_half(re, n, dim, norm):
    """Of real numbers: the first half, of which the second is the conjugate."""
    n = re.shape[dim] if n is None else n
    re, im = _one(re, None, n, dim, norm, False)
    return re.narrow(dim, 0, n // 2 + 1), im.narrow(dim, 0, n // 2 + 1)


def _one_from_half(re, im, n, dim, norm):
    """Real numbers, of which these are the first half of the transform."""
    re, im = _last(re, dim), _last(im, dim)
    n = 2 * (re.shape[-1] - 1) if n is None else n
    im = torch.zeros_like(re) if im is None else im
    re, im = _sized(re, n // 2 + 1), _sized(im, n // 2 + 1)
    mirrored = slice(1, (n + 1) // 2)
    re = torch.cat([re, re[..., mirrored].flip(-1)], -1)
    im = torch.cat([im, -im[..., mirrored].flip(-1)], -1)
    return (_transform(re, im, 1)[0] * _scale(n, norm, True)).movedim(-1, dim)


def _dims(x, sizes, dims):
    """[(size or None, dimension)]"""
    if dims is None:
        dims = range(-len(sizes), 0) if sizes is not None else range(x.dim())
    dims = [dims] if isinstance(dims, int) else list(dims)
    return list(zip([None if n == -1 else n for n in sizes] if sizes is not None else [None] * len(dims), dims))


def _whole(func, x, sizes, dims, norm, inverse):
    re, im = _parts(x)
    for n, dim in _dims(x, sizes, dims):
        re, im = _one(re, im, n, dim, norm, inverse)
    return Complex.made(re, im)


def _to_half(func, x, sizes, dims, norm):
    if isinstance(x, Complex):
        raise refusal(f"{func.__name__} of complex numbers")
    re, _ = _parts(x)
    *others, (n, dim) = _dims(x, sizes, dims)
    re, im = _one_to_half(re, n, dim, norm)
    for n, dim in reversed(others):
        re, im = _one(re, im, n, dim, norm, False)
    return Complex.made(re, im)


def _from_half(func, x, sizes, dims, norm):
    re, im = _parts(x)
    *others, (n, dim) = _dims(x, sizes, dims)
    for size, other in others:
        re, im = _one(re, im, size, other, norm, True)
    return _one_from_half(re, im, n, dim, norm)


def _in_one(kind, *more):
    def transform(func, input, n=None, dim=-1, norm=None):
        return kind(func, input, None if n is None else [n], [dim], norm, *more)

    return transform


def _in_two(kind, *more):
    def transform(func, input, s=None, dim=(-2, -1), norm=None):
        return kind(func, input, s, dim, norm, *more)

    return transform


def _in_all(kind, *more):
    def transform(func, input, s=None, dim=None, norm=None):
        return kind(func, input, s, dim, norm, *more)

    return transform


def _shifted(func, input, dim=None):
    re, im = _parts(input)
    return Complex.made(func(re, dim), func(im, dim)) if im is not None else func(re, dim)


def _stft(func, input, n_fft, hop_length=None, win_length=None, window=None, center=True, pad_mode="reflect", normalized=False,
          onesided=None, return_complex=None, align_to_window=None):  # fmt: skip
    if isinstance(input, Complex) or isinstance(window, Complex) or align_to_window is not None:
        raise refusal("stft of complex numbers, or with align_to_window")
    hop, length = hop_length or n_fft // 4, win_length or n_fft
    window = input.new_ones(length) if window is None else window
    window = F.pad(window, ((n_fft - length) // 2, n_fft - length - (n_fft - length) // 2))
    x = input if input.dim() > 1 else input[None]
    if center:
        x = F.pad(x[:, None], (n_fft // 2, n_fft // 2), pad_mode)[:, 0]
    frames = x.unfold(-1, n_fft, hop) * window
    norm = "ortho" if normalized else "backward"
    re, im = _one(frames, None, None, -1, norm, False) if onesided is False else _one_to_half(frames, None, -1, norm)
    re, im = re.transpose(-1, -2), im.transpose(-1, -2)
    if input.dim() == 1:
        re, im = re[0], im[0]
    return Complex.made(re, im) if return_complex else torch.stack([re, im], -1)


TRANSFORMS = {
    "fft_fft": _in_one(_whole, False), "fft_fft2": _in_two(_whole, False), "fft_fftn": _in_all(_whole, False),
    "fft_fftshift": _shifted, "fft_ifft": _in_one(_whole, True), "fft_ifft2": _in_two(_whole, True),
    "fft_ifftn": _in_all(_whole, True), "fft_ifftshift": _shifted, "fft_irfft": _in_one(_from_half), "fft_irfft2": _in_two(_from_half),
    "fft_irfftn": _in_all(_from_half), "fft_rfft": _in_one(_to_half), "fft_rfft2": _in_two(_to_half), "fft_rfftn": _in_all(_to_half),
    "stft": _stft,
}  # fmt: skip

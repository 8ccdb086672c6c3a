"""What functions of torch make of complex tensors while a step is captured, in real arithmetic on their parts.

A table at the end has them by their names. Each is given the function of torch and its arguments.
"""

import torch

from ._complex import COMPLEX_OF, REAL_OF, Complex, Memory, away, both, from_outside, refusal, said, split
from ._errors import UserError
from ._fourier import TRANSFORMS


def _made(re, im):
    """A new complex tensor; of integers as torch makes them complex."""
    if not re.is_floating_point():
        re, im = re.to(torch.get_default_dtype()), im.to(torch.get_default_dtype())
    return Complex.made(re, im)


def _like(part, tensor):
    """A part, a number or None for zero, in the shape and type of a tensor, and in memory of its own."""
    if isinstance(part, torch.Tensor):
        return part.to(tensor.dtype).expand(tensor.shape).clone()
    return torch.zeros_like(tensor) if part is None else torch.full_like(tensor, part)


# ---- arithmetic -------------------------------------------------------------------------------------------------------


def _sum(x, y, sign=1):
    (a, b), (c, d) = split(x), split(y)
    re = a + c if sign > 0 else a - c
    if b is None:
        return _made(re, _like(d if sign > 0 else -d, re))
    if d is None:
        return _made(re, _like(b, re))
    return _made(re, b + d if sign > 0 else b - d)


def _add(func, x, y, alpha=1):
    return _sum(x, y if alpha == 1 else _mul(func, y, alpha))


def _sub(func, x, y, alpha=1):
    return _sum(x, y if alpha == 1 else _mul(func, y, alpha), -1)


def _rsub(func, x, y, alpha=1):
    return _sub(func, y, x if alpha == 1 else _mul(func, x, alpha))


def _product(x, y, times):
    """Of a function that is linear in each of two operands."""
    (a, b), (c, d) = split(x), split(y)
    if b is None:
        return _made(times(a, c), times(a, d))
    if d is None:
        return _made(times(a, c), times(b, c))
    return _made(times(a, c) - times(b, d), times(a, d) + times(b, c))


def _mul(func, x, y):
    return _product(x, y, lambda a, b: a * b)


def _matmul(func, x, y):
    return _product(x, y, torch.matmul)


def _rmatmul(func, x, y):
    return _product(y, x, torch.matmul)


def _of_two(func, x, y, *more, **options):
    """torch.outer and its like."""
    return _product(x, y, lambda a, b: func(a, b, *more, **options))


def _einsum(func, equation, *operands):
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if len(operands) == 1:
        return _each(func, equation, *operands)
    if len(operands) > 2:
        raise refusal("einsum of more than two operands with complex tensors")
    return _product(*operands, lambda a, b: func(equation, a, b))


def _div(func, x, y):
    (a, b), (c, d) = split(x), split(y)
    if d is None:
        return _made(a / c, b / c)
    size = c * c + d * d
    if b is None:
        return _made(a * c / size, -(a * d) / size)
    return _made((a * c + b * d) / size, (b * c - a * d) / size)


def _rdiv(func, x, y):
    return _div(func, y, x)


def _reciprocal(func, x):
    return _div(func, 1.0, x)


def _pow(func, x, exponent):
    if isinstance(exponent, torch.Tensor) or exponent not in range(1, 9) or not isinstance(x, Complex):
        raise refusal(f"a power of complex numbers ({exponent if not isinstance(exponent, torch.Tensor) else 'a tensor'})")
    result = x
    for _ in range(int(exponent) - 1):
        result = _mul(func, result, x)
    return copied(x) if result is x else result


def _square(func, x):
    return _mul(func, x, x)


def _neg(func, x):
    re, im = both(x)
    return _made(-re, -im)


def _conj(func, x):
    re, im = both(x)
    one = Complex.made(re, -im, x.memory)
    x.memory.shared = True
    return one


def _conj_physical(func, x):
    re, im = both(x)
    return _made(re.clone(), -im)


def _exp(func, x):
    re, im = both(x)
    size = re.exp()
    return _made(size * im.cos(), size * im.sin())


def _abs(func, x):
    re, im = both(x)
    size = torch.maximum(re.abs(), im.abs()).detach()  # by which it is divided, so that no square is too large or small
    zero = size == 0  # where the derivative is zero
    size = size.masked_fill(zero, 1.0)
    re, im = (re / size).masked_fill(zero, 1.0), im / size
    return ((re * re + im * im).sqrt() * size).masked_fill(zero, 0.0)


def _angle(func, x):
    re, im = both(x)
    zero = (re == 0) & (im == 0)
    return torch.where(zero, torch.atan2(im, re).detach(), torch.atan2(im, re.masked_fill(zero, 1.0)))


def _compared(func, x, y):
    if not isinstance(y, (int, float, complex, torch.Tensor)):
        return False
    (a, b), (c, d) = split(x), split(y)
    return (a == c) & ((0 if b is None else b) == (0 if d is None else d))


def _unequal(func, x, y):
    same = _compared(func, x, y)
    return same.logical_not() if isinstance(same, torch.Tensor) else not same


def _either(func, x):
    """Whether a part is infinite, say."""
    re, im = both(x)
    return func(re) | func(im)


def _both(func, x):
    re, im = both(x)
    return func(re) & func(im)


# ---- making and leaving complex numbers -------------------------------------------------------------------------------


def _view_as_complex(func, x):
    if isinstance(x, Complex) or x.dim() == 0 or x.shape[-1] != 2:
        raise RuntimeError("view_as_complex takes real tensors with a last dimension of size 2")
    re, im = x.unbind(-1)
    return Complex.made(re, im, Memory(unbound=True), x)


def _view_as_real(func, x):
    re, im = both(x)
    if x.whole is not None and not x.conjugate:
        return x.whole
    view = torch.stack([re, im], -1)
    x.memory.shared = True
    x.memory.shown.append((view, view._version))
    return view


def _complex(func, re, im):
    re, im = torch.broadcast_tensors(re, im)
    return _made(re.clone(), im.clone())


def _polar(func, size, angle):
    if size.requires_grad:  # torch's derivative for a negative size has the sign of a positive one
        size = size.abs() + (size - size.abs()).detach()
    return _made(size * angle.cos(), size * angle.sin())


def _real(func, x):
    return both(x)[0]


def _imag(func, x):
    return both(x)[1]


def _to_type(x, dtype, copy=False):
    """x.to(dtype)."""
    if not isinstance(x, Complex):
        return _made(x.to(REAL_OF[dtype], copy=True), torch.zeros_like(x, dtype=REAL_OF[dtype]))
    if dtype is None or dtype == x.dtype:
        return copied(x) if copy else x
    re, im = both(x)
    if dtype.is_complex:
        return _made(re.to(REAL_OF[dtype]), im.to(REAL_OF[dtype]))
    if dtype == torch.bool:
        return (re != 0) | (im != 0)
    return re.to(dtype)  # as torch, which warns


def _to(func, x, *args, **options):
    """Where it is on no other device: all of a captured step is on one."""
    dtype = None
    for value in (*args, *options.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor):
            dtype = value.dtype
    flags = [value for value in args if isinstance(value, bool)]  # non_blocking, copy
    copy = options.get("copy", flags[1] if len(flags) > 1 else False)
    return _to_type(x, dtype, copy)


def _type(func, x, dtype=None, **_):
    if not isinstance(dtype, torch.dtype):
        raise refusal("the type of a complex tensor by name")
    return _to_type(x, dtype)


def _to_named(dtype):
    return lambda func, x, *_, **__: _to_type(x, dtype)


def _filled(func, *args, **options):
    """torch.zeros, ones, empty and full, their _like and new_ forms."""
    dtype = options.get("dtype")
    args, value = list(args), 0
    if "full" in func.__name__:
        at = 2 if func.__name__ == "new_full" else 1  # of full(size, value), full_like(tensor, value)
        value = options.pop("fill_value", None) if len(args) <= at else args.pop(at)
    if args and isinstance(args[0], Complex):
        dtype, args[0] = dtype or args[0].dtype, args[0].parts()[0]
    dtype = dtype or COMPLEX_OF[torch.get_default_dtype()]
    options["dtype"] = REAL_OF.get(dtype, dtype)
    re, im = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    fill = [re] if "full" in func.__name__ else []
    made = func(*args, *fill, **options)
    if not dtype.is_complex:
        return made
    if "empty" in func.__name__:
        made = torch.zeros_like(made)
    return _made(made, torch.full_like(made, im))


def _constant(func, data, *args, **options):
    """torch.tensor of complex numbers, and its like."""
    if isinstance(data, torch.Tensor):
        return _to_type(data, options.get("dtype") or data.dtype, func.__name__ == "tensor")
    options.pop("device", None)
    return from_outside(away(func, data, *args, **options))


# ---- both parts alike -------------------------------------------------------------------------------------------------


def _each(func, *args, memory=None, **options):
    """A function that moves elements, or is linear, of both parts of the complex tensors among its arguments."""

    def picked(value, at):
        if isinstance(value, Complex):
            return value.parts()[at]
        if isinstance(value, torch.dtype):
            if not value.is_complex:
                raise refusal(f"{said(func)} of complex tensors in {value}")
            return REAL_OF[value]
        if isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_floating_point()):
            raise refusal(f"{said(func)} of complex and of real numbers")
        return type(value)(picked(one, at) for one in value) if type(value) in (list, tuple) else value

    results = [
        func(*(picked(value, at) for value in args), **{key: picked(value, at) for key, value in options.items()}) for at in (0, 1)
    ]
    return _joined(*results, memory)


def copied(x):
    return _each(torch.clone, x)


def _joined(re, im, memory):
    if isinstance(re, torch.Tensor):
        return Complex.made(re, im, memory)
    return type(re)(_joined(a, b, memory) for a, b in zip(re, im))


def _view(func, x, *args, **options):
    """A function whose result is a view."""
    if any(isinstance(value, torch.dtype) for value in args):
        raise refusal("a complex tensor whose memory is read as another type")
    both(x)
    return _each(func, x, *args, memory=x.memory, **options)


def _may_view(func, x, *args, **options):
    """A function whose result may be a view, or a copy."""
    both(x)
    x.memory.shared = True
    return _each(func, x, *args, memory=x.memory, **options)


def _in_shape_of(func, x, other):
    """expand_as, view_as and reshape_as."""
    name = func.__name__[: -len("_as")]
    if not isinstance(x, Complex):
        return func(x, both(other)[0])
    return _may_view(getattr(torch.Tensor, name), x, tuple(other.shape))


def _joining(func, tensors, *args, **options):
    """torch.cat and its like, where some may be real."""
    return _each(func, [one if isinstance(one, Complex) else _made(one, torch.zeros_like(one)) for one in tensors], *args, **options)


def _getitem(func, x, index):
    listed = index if isinstance(index, tuple) else (index,)
    copies = any(isinstance(one, (list, torch.Tensor, range)) or type(one).__module__ == "numpy" for one in listed)
    both(x)
    return _each(func, x, index, memory=None if copies else x.memory)


def _pad(func, x, pad, mode="constant", value=None):
    if value not in (None, 0):
        raise refusal("F.pad of complex tensors with other numbers than zero")
    return _each(func, x, pad, mode)


def _where(func, *args):
    if len(args) != 3:
        raise refusal("torch.where with one argument")
    condition, x, y = args
    if isinstance(condition, Complex) or condition.dtype != torch.bool:  # x.where(condition, y)
        condition, x = x, condition
    (a, b), (c, d) = split(x), split(y)
    return _made(torch.where(condition, a, c), torch.where(condition, _zero_for(b, a), _zero_for(d, c)))


def _zero_for(part, of):
    """An imaginary part, zero where there is none."""
    if part is not None:
        return part
    return torch.zeros_like(of) if isinstance(of, torch.Tensor) else 0.0


def _masked_fill(func, x, mask, value):
    a, b = split(value)
    re, im = both(x)
    return _made(re.masked_fill(mask, a), im.masked_fill(mask, 0.0 if b is None else b))


def _iterated(func, x):
    return iter(_view(torch.unbind, x))


# ---- in place ---------------------------------------------------------------------------------------------------------


def _setitem(func, x, index, value):
    (re, im), (a, b) = (part.clone() for part in both(x)), split(value)
    re[index], im[index] = a, 0.0 if b is None else b
    x.write(re, im)


def _copy_(func, x, other, *_, **__):
    """x.copy_(other), and x.fill_(other)."""
    both(x)
    a, b = split(other)
    return x.write(a, 0.0 if b is None else b)


def _zero_(func, x):
    return x.write(0.0, 0.0)


# ---- what is asked of a tensor ----------------------------------------------------------------------------------------


def asked(name, x):
    """The attribute of a complex tensor."""
    if name in ("real", "imag"):
        return both(x)[name == "imag"]
    if name in ("T", "mT", "data"):
        return _each(lambda part: getattr(part, name), x, memory=x.memory)
    if name in ("H", "mH"):
        return _conj(None, _each(lambda part: getattr(part, "mT"), x, memory=x.memory))
    if name == "requires_grad":
        return any(part is not None and part.requires_grad for part in (x.re, x.im))
    if name == "grad_fn":
        return next((part.grad_fn for part in (x.re, x.im) if part is not None and part.requires_grad), None)
    raise refusal(f"{name} of a complex tensor")


def _detach(func, x):
    return _view(torch.Tensor.detach, x)


def _requires_grad_(func, x, requires_grad=True):
    if requires_grad != asked("requires_grad", x):
        raise refusal("requires_grad_ of a complex tensor")
    return x


def _itself(func, x, *_, **__):
    return x


def _printed(func, x, **_):
    return f"a complex tensor {list(x.shape)}"


def _strides(x):
    """Of the elements; the parts of a view of real numbers lie two apart."""
    re, _ = both(x)
    return tuple(n // 2 if x.memory.unbound else n for n in re.stride())


def _stride(func, x, dim=None):
    return _strides(x) if dim is None else _strides(x)[dim]


def _is_contiguous(func, x, *_, **__):
    expected = 1
    for size, stride in zip(reversed(x.shape), reversed(_strides(x))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _no(func, *_, **__):
    return False


def _number(func, *_, **__):
    raise UserError(f"[capture] the model reads a number out of a tensor ({said(func)})")


def _as(kind, *names):
    return {name: kind for name in names}


FUNCTIONS = {
    **TRANSFORMS,
    **_as(_abs, "__abs__", "abs", "absolute"),
    **_as(_add, "__add__", "__radd__", "add"),
    **_as(_angle, "angle"),
    **_as(away, "can_cast", "promote_types"),
    **_as(_both, "isfinite"),
    **_as(_compared, "__eq__", "eq"),
    **_as(_complex, "complex"),
    **_as(_conj, "conj"),
    **_as(_conj_physical, "conj_physical"),
    **_as(_constant, "as_tensor", "asarray", "tensor"),
    **_as(_copy_, "copy_", "fill_"),
    **_as(_detach, "detach"),
    **_as(_div, "__div__", "__truediv__", "div", "divide", "true_divide"),
    **_as(
        _each, "clone", "cumsum", "diag", "diag_embed", "flip", "fliplr", "flipud", "gather", "index_select", "mean", "repeat",
        "repeat_interleave", "roll", "rot90", "sum", "take_along_dim", "tile", "trace", "tril", "triu",
    ),
    **_as(_either, "isinf", "isnan"),
    **_as(_einsum, "einsum"),
    **_as(_exp, "exp"),
    **_as(
        _filled, "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros",
        "zeros_like",
    ),
    **_as(_getitem, "__getitem__", "_getitem"),
    **_as(_imag, "imag"),
    **_as(_in_shape_of, "expand_as", "reshape_as", "view_as"),
    **_as(_is_contiguous, "is_contiguous"),
    **_as(_iterated, "__iter__"),
    **_as(_itself, "cpu", "cuda", "positive", "resolve_conj", "resolve_neg"),
    **_as(_joining, "cat", "concat", "concatenate", "dstack", "hstack", "stack", "vstack"),
    **_as(_masked_fill, "masked_fill"),
    **_as(_matmul, "__matmul__", "matmul"),
    **_as(_may_view, "contiguous", "flatten", "ravel", "reshape"),
    **_as(_mul, "__mul__", "__rmul__", "mul", "multiply"),
    **_as(_neg, "__neg__", "neg", "negative"),
    **_as(_no, "is_conj", "is_neg"),
    **_as(_number, "__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"),
    **_as(_of_two, "bmm", "dot", "ger", "inner", "kron", "mm", "mv", "outer", "tensordot"),
    **_as(_pad, "pad"),
    **_as(_polar, "polar"),
    **_as(_pow, "__pow__", "pow"),
    **_as(_printed, "__repr__"),
    **_as(_rdiv, "__rdiv__", "__rtruediv__"),
    **_as(_real, "real"),
    **_as(_reciprocal, "reciprocal"),
    **_as(_requires_grad_, "requires_grad_"),
    **_as(_rmatmul, "__rmatmul__"),
    **_as(_rsub, "__rsub__", "rsub"),
    **_as(_setitem, "__setitem__", "_setitem"),
    **_as(_square, "square"),
    **_as(_stride, "stride"),
    **_as(_sub, "__sub__", "sub", "subtract"),
    **_as(_to, "to", "type_as"),
    **_as(_to_named(torch.bfloat16), "bfloat16"),
    **_as(_to_named(torch.complex32), "chalf"),
    **_as(_to_named(torch.complex64), "cfloat"),
    **_as(_to_named(torch.complex128), "cdouble"),
    **_as(_to_named(torch.float16), "half"),
    **_as(_to_named(torch.float32), "float"),
    **_as(_to_named(torch.float64), "double"),
    **_as(_type, "type"),
    **_as(_unequal, "__ne__", "ne", "not_equal"),
    **_as(
        _view, "broadcast_to", "chunk", "diagonal", "dsplit", "expand", "hsplit", "moveaxis", "movedim", "narrow", "permute", "select",
        "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold",
        "unsqueeze", "view", "vsplit",
    ),
    **_as(_view_as_complex, "view_as_complex"),
    **_as(_view_as_real, "view_as_real"),
    **_as(_where, "where"),
    **_as(_zero_, "zero_"),
}  # fmt: skip
IN_PLACE = {
    "__iadd__": _add, "__imul__": _mul, "__isub__": _sub, "__itruediv__": _div, "add_": _add, "conj_physical_": _conj_physical, "div_": _div,
    "masked_fill_": _masked_fill, "mul_": _mul, "neg_": _neg, "sub_": _sub,
}  # fmt: skip
MAKERS = frozenset((*TRANSFORMS, "cdouble", "cfloat", "chalf", "complex", "polar", "view_as_complex"))  # of real tensors

"""Pieces of parameters and their gradients: tensors that refuse what would be wrong of a part.

Work on every element by itself (a step of Adam, `mul_`, `clamp_`) does to a piece what it does to the whole. A norm, a sum or
a product of matrices does not: it would see this worker's part alone, so it is refused in one line.
"""

import torch

from . import _torch
from ._errors import UserError

# These change the shape of a piece, or hand it out, and nothing else.
_ALLOWED = {
    "view", "reshape", "flatten", "view_as", "reshape_as", "unsqueeze", "size", "stride", "numel", "nelement", "dim",
    "item", "__repr__", "__format__", "__str__", "__deepcopy__", "__reduce_ex__", "__hash__", "__len__",
    "backward", "storage", "_storage", "untyped_storage", "data_ptr", "set_", "__set__",
}  # fmt: skip
# These keep the shape, but let elements see one another; or compare all of them.
_REFUSED = {
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "flip", "roll",
    "fliplr", "flipud", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "chain_matmul", "matrix_power", "matrix_exp",
    "inverse", "pinverse", "cholesky", "qr", "svd", "einsum", "tensordot", "normalize", "layer_norm", "renorm", "triu", "tril",
    "equal", "allclose", "cov", "corrcoef", "is_nonzero", "__bool__", "__contains__", "transpose", "t", "permute", "gather", "scatter",
    "index_select", "numpy", "tolist", "__array__", "__dlpack__", "_amp_foreach_non_finite_check_and_unscale_", "__getitem__", "__setitem__",
}  # fmt: skip


# Python's operators with an assignment, such as +=.
_ASSIGNING = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
                                          "matmul")}  # fmt: skip


def in_place(name):
    """Whether a method of this name changes its tensor."""
    return name == "__setitem__" or name in _ASSIGNING or (name.endswith("_") and not name.endswith("__"))


def _tensors(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _tensors(part)


def _refusal(name):
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return UserError("[distribute] torch's GradScaler would judge this worker's pieces alone; use motley.GradScaler(dist)")
    return UserError(
        f"[distribute] {name} of a piece of a parameter would see this worker's part alone; clip with dist.clip_grad_norm_(), give "
        "the optimizer to distribute(), or read whole tensors from dist.state_dict()"
    )


class _Guarded:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        with _torch.without_subclasses():
            if name in _REFUSED or str(getattr(func, "__module__", "")).startswith(("torch._C._linalg", "torch.linalg")):
                raise _refusal(name)
            result = func(*args, **(kwargs or {}))
            if _changes(name, func):
                _note_change(args[:1])
            elif kwargs and "out" in kwargs:
                _note_change(kwargs["out"])
            if result is None or name in ("__set__", "__repr__", "__reduce_ex__"):
                return result
            given = {t.shape for t in _tensors(list(args)) if isinstance(t, _Guarded)}
            found = list(_tensors(result))
            if name not in _ALLOWED and any(t.shape not in given for t in found):
                raise _refusal("T" if name == "__get__" else name)
            if isinstance(result, torch.Tensor):
                return _of_piece(_guarded(result), args)
            if found and type(result) in (list, tuple):
                return type(result)(_guarded(t) if isinstance(t, torch.Tensor) else t for t in result)
            return result


def _guarded(tensor):
    return tensor if isinstance(tensor, _Guarded) else tensor.as_subclass(PieceTensor)


def _changes(name, func):
    """Whether it changes the elements of its first argument."""
    if name == "__set__":
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    return in_place(name) and name not in ("requires_grad_", "detach_")


def _note_change(tensors):
    """Counts that the user changed pieces in place: others who ask for the whole wait until it is done here too."""
    for tensor in _tensors(list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]):
        piece = tensor if isinstance(tensor, Piece) else getattr(tensor, "_piece", None)
        if piece is not None:
            piece.changes += 1


def _of_piece(result, args):
    """A view of a piece remembers which."""
    given = args[0] if args else None
    piece = given if isinstance(given, Piece) else getattr(given, "_piece", None) if isinstance(given, _Guarded) else None
    if piece is not None and result is not given and _torch.storage_of(result) == _torch.storage_of(piece):
        result._piece = piece
    return result


class PieceTensor(_Guarded, torch.Tensor):
    """The gradient of a piece, or what was computed of one."""

    def __deepcopy__(self, memo):
        return guarded(plain(self).clone())

    def __reduce_ex__(self, protocol):
        return plain(self).__reduce_ex__(protocol)


class Piece(_Guarded, torch.nn.Parameter):
    """A piece of a parameter. `changes` counts what the user changed in place."""

    changes = 0

    def __deepcopy__(self, memo):
        return torch.nn.Parameter(plain(self).clone(), self.requires_grad)

    def __reduce_ex__(self, protocol):
        return torch.nn.Parameter(plain(self), self.requires_grad).__reduce_ex__(protocol)


def guarded(tensor):
    """A tensor of a piece that refuses what would be wrong of a part."""
    with _torch.without_subclasses():
        return _guarded(tensor)


def plain(tensor):
    """The same elements as an ordinary tensor."""
    with _torch.without_subclasses():
        return tensor.detach().as_subclass(torch.Tensor)

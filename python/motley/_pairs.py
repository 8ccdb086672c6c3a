"""Captures steps with complex numbers: inside of pairs() every function of torch that is given some, or makes them, is seen and computed
on pairs of real tensors, so that autograd and the graph see nothing else. What cannot be followed is refused.

Other steps are captured without that.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from . import _motley, _torch
from ._complex import Complex, attribute_of, from_outside, is_complex, is_of_form, outside, refusal, said
from ._complex_functions import FUNCTIONS, IN_PLACE, MAKERS, asked, copied


def _of(value):
    """An argument with what stands for complex tensors from outside the step."""
    if isinstance(value, torch.Tensor) and not isinstance(value, Complex) and value.dtype.is_complex:
        return from_outside(value)
    return type(value)(_of(one) for one in value) if type(value) in (list, tuple) else value


def _called(func, args, kwargs):
    name, owner = getattr(func, "__name__", ""), attribute_of(func)
    if is_of_form(func):
        with _torch.without_subclasses():
            return func(*args, **kwargs)
    if "out" in kwargs and kwargs["out"] is not None:
        raise refusal(f"{said(func)} of complex tensors with out=")
    args, kwargs = [_of(value) for value in args], {key: _of(value) for key, value in kwargs.items()}
    if name == "__get__":
        return asked(owner, args[0])
    if name == "__set__":
        raise refusal(f"{owner} of a complex tensor is set")
    if name in IN_PLACE and isinstance(args[0], Complex):
        return args[0].write(*IN_PLACE[name](func, copied(args[0]), *args[1:], **kwargs).parts())
    if name not in FUNCTIONS:
        raise refusal(f"{said(func)} of complex numbers cannot be followed")
    return FUNCTIONS[name](func, *args, **kwargs)


def _call(func, args, kwargs):
    before = _torch.autocast_modes()
    if not any(before):
        return _called(func, args, kwargs)
    _torch.set_autocast_modes((False, False))  # it leaves complex numbers as they are
    try:
        return _called(func, args, kwargs)
    finally:
        _torch.set_autocast_modes(before)


# ---- capture ----------------------------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Sees every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in MAKERS or is_complex(args) or any(map(is_complex, kwargs.values())):
            return _call(func, args, kwargs)
        return func(*args, **kwargs)


def _apply(original):
    """torch.autograd.Function.apply, which knows tensors and not what a Complex has."""

    def apply(cls, *args, **kwargs):
        plain = original.__get__(None, cls) if original is not None else super(torch.autograd.Function, cls).apply
        result = None if is_complex(args) else plain(*args, **kwargs)
        if is_complex(args) or is_complex(result):
            raise refusal(f"{cls.__name__}, a function with a backward pass of its own, takes or returns complex tensors")
        return result

    return classmethod(apply)


def _subscript(plain):
    def subscript(*args):
        return _call(plain, args, {}) if is_complex(args) else plain(*args)

    return subscript


@contextlib.contextmanager
def pairs():
    """Inside, the complex tensors of the step that is captured are pairs of real ones."""
    function, tensor = torch.autograd.Function, torch.Tensor
    original, subscripts = vars(function).get("apply"), (tensor.__getitem__, tensor.__setitem__)
    function.apply = _apply(original)
    tensor.__getitem__, tensor.__setitem__ = map(_subscript, subscripts)  # torch 1.13 does not show them
    outside.clear()
    try:
        with _Mode():
            yield
    finally:
        outside.clear()
        tensor.__getitem__, tensor.__setitem__ = subscripts
        if original is None:
            del function.apply
        else:
            function.apply = original


_SIGNS = ("Complex", "complex", "cannot be written in a graph")  # of complex numbers, in what a capture without pairs says; the last is of 1j


class Following:
    """How the complex numbers of a step are followed: in pairs where it is known to have some, or has shown it."""

    def __init__(self, known):
        self.known = known

    def followed(self):
        return pairs() if self.known else contextlib.nullcontext()

    def tried(self, captured):
        """captured(), and once more where the step has complex numbers that were not known."""
        try:
            return captured()
        except Exception as error:
            if self.known or not any(sign in str(error) for sign in _SIGNS):
                raise
        self.known = True
        return captured()


def is_fixed(tensor):
    """Whether a tensor of the step follows from constants alone."""
    parts = tensor.parts() if isinstance(tensor, Complex) else [tensor]
    return all(map(_motley.is_fixed, parts))

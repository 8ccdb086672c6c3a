"""Complex tensors: in the state of a step, and while it is captured; both hold real numbers.

In the state a complex buffer is its real view (..., 2). While a step is captured a complex tensor is a Complex, which has two real
ones. Its type, shape and device can be asked as of any tensor; the rest is in _complex_functions.py.
"""

import threading

import torch

from . import _torch
from ._errors import UserError

REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
COMPLEX_OF = {real: of for of, real in REAL_OF.items()}

# ---- the state of a step ----------------------------------------------------------------------------------------------


def real_view(tensor):
    """(the real view of a complex tensor, in the same memory, whether that is of its conjugate)"""
    with _torch.without_subclasses():
        conjugate = tensor.is_conj()
        return torch.view_as_real(tensor.conj() if conjugate else tensor), conjugate


def state_of(value, dtype, conjugate):
    """What a state has of a value of a complex buffer of this type."""
    value = value if value.is_complex() else value.to(dtype)
    return torch.view_as_real((value.conj() if conjugate else value).resolve_conj())


def shown(state, conjugate):
    """A tensor of a state as the module of a complex buffer holds it."""
    if state.is_complex():
        return state
    value = torch.view_as_complex(state)
    return value.conj() if conjugate else value


# ---- a step that is captured ------------------------------------------------------------------------------------------


def refusal(what):
    return UserError(f"[capture] {what}; graphs hold real numbers")


def said(func):
    return getattr(func, "__name__", str(func)).strip("_")


# What a tensor can be asked without its elements; of its attributes all but some.
_OF_FORM = frozenset((
    "__dir__", "__hash__", "__len__", "dim", "element_size", "get_device", "has_names", "is_complex", "is_floating_point", "is_inference",
    "is_signed", "ndimension", "nelement", "numel", "size",
))  # fmt: skip
_OF_ELEMENTS = frozenset(("H", "T", "_base", "_grad", "data", "grad", "grad_fn", "imag", "mH", "mT", "real", "requires_grad", "volatile"))


def attribute_of(func):
    """Of which attribute a function is the getter or setter."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def is_of_form(func):
    name = getattr(func, "__name__", "")
    return name in _OF_FORM or (name == "__get__" and attribute_of(func) not in _OF_ELEMENTS)


class Memory:
    """What complex tensors have in common that are views of one another.

    shared    other tensors have their numbers too, and would not see a change
    unbound   their parts are views that autograd does not let change
    shown     [(tensor, version)]: their real views, of which they would not see a change
    """

    def __init__(self, unbound=False):
        self.shared, self.unbound, self.shown = False, unbound, []


class Complex(torch.Tensor):
    """A complex tensor of the step.

    whole       the real tensor of which it is the complex view, if it is one
    conjugate   whether it is the conjugate of that
    """

    @staticmethod
    def made(re, im, memory=None, whole=None, conjugate=False):
        like, shape = (re, re.shape) if whole is None else (whole, whole.shape[:-1])
        if like.dtype not in COMPLEX_OF:
            raise refusal(f"complex numbers are made of {like.dtype}")
        one = torch.Tensor._make_wrapper_subclass(Complex, shape, dtype=COMPLEX_OF[like.dtype], device="meta")
        one.re, one.im, one.memory, one.whole, one.conjugate = re, im, memory or Memory(), whole, conjugate
        one.version = None if re is None else like._version
        return one

    @staticmethod
    def of(whole, conjugate=False):
        """That of a real tensor without a gradient, which is read when it is used."""
        one = Complex.made(None, None, Memory(unbound=True), whole, conjugate)
        one.memory.shared = conjugate
        return one

    def parts(self):
        for tensor, version in self.memory.shown:
            if tensor._version != version:
                raise refusal("the real view of a complex tensor is changed in place, and the complex one is read after it")
        if self.whole is not None and self.version != self.whole._version:
            first, self.version = self.version is None, self.whole._version
            self.re, self.im = self.whole.unbind(-1) if first else (self.whole.select(-1, 0), self.whole.select(-1, 1))
            if self.conjugate:
                self.im = -self.im
        return self.re, self.im

    def write(self, re, im):
        """Changes it in place; re and im may be numbers."""
        if self.memory.shared or (self.memory.unbound and self.whole is None):
            raise refusal("a complex tensor is changed in place that has its memory in common with others")
        for at, (part, value) in enumerate(zip((self.re, self.im), (re, im))):
            part = part if self.whole is None else self.whole.select(-1, at)
            part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)
        return self

    @property
    def real(self):
        return self.parts()[0]

    @real.setter
    def real(self, value):
        if value is not self.re:  # of z.real += 1, which is done
            self.write(value, self.parts()[1].clone())

    @property
    def imag(self):
        return self.parts()[1]

    @imag.setter
    def imag(self, value):
        if value is not self.im:
            self.write(self.parts()[0].clone(), value)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not is_of_form(func):  # the others are seen before (_pairs.py)
            raise refusal(f"{said(func)} of a complex tensor where it cannot be followed")
        with _torch.without_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise refusal(f"{func} of complex tensors")


outside = {}  # id of a complex tensor from outside the step that is captured: it, and what stands for it


def away(function, *arguments, **options):
    """What a function gives in a thread in which nothing is captured."""
    results = []

    def run():
        try:
            results.append((function(*arguments, **options), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = results[0]
    if error is not None:
        raise error
    return value


def from_outside(tensor):
    """What stands for a complex tensor that the step has not made."""
    if id(tensor) not in outside:
        outside[id(tensor)] = tensor, Complex.of(*away(real_view, tensor))
    return outside[id(tensor)][1]


def is_complex(value, depth=3):
    """Whether an argument of a function is complex, or asks for complex numbers."""
    if isinstance(value, Complex):
        return True
    if isinstance(value, torch.Tensor):
        return value.dtype.is_complex
    if isinstance(value, torch.dtype):
        return value.is_complex
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(is_complex(one, depth - 1) for one in value)
    return isinstance(value, complex)


def both(x):
    """(real, imaginary) of what has to be a complex tensor."""
    if not isinstance(x, Complex):
        raise refusal("a real tensor takes complex numbers")
    return x.parts()


def split(value):
    """(real, imaginary) of a complex tensor or number; (value, None) of a real one."""
    if isinstance(value, Complex):
        return value.parts()
    if isinstance(value, complex):
        return value.real, value.imag
    return value, None

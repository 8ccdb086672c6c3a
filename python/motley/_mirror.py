"""The user's own model while distribute() trains pieces of it: it shows what was trained, to whoever reads it.

    loss = dist(inputs, targets); dist.backward(); dist.step()
    model.state_dict()                       # trained values; so are model(x), copy.deepcopy(model), ema.update(model), ...
    model.head.weight.data.clamp_(-1, 1)     # UserError: training goes on with pieces, of which this is no part

A parameter of the model, and a buffer that steps change, gets a class of its own that sees every use. The first use after a step
puts whole tensors together on this worker, as dist.state_dict() does; the others need not call anything. What would be lost is
refused: a change in place, a gradient that is read or taken.
"""

import contextlib
import functools
import gc
import threading
import weakref

import torch

from . import _gradients, _torch
from ._agreement import same_batch
from ._errors import UserError
from ._pieces import in_place, plain

_ours = threading.local()  # .depth: motley itself uses the model
# Methods that neither read elements nor change them.
_OF_FORM = {
    "size", "stride", "numel", "nelement", "dim", "ndimension", "element_size", "is_contiguous", "is_floating_point", "is_complex",
    "data_ptr", "storage_offset", "get_device", "__len__", "__hash__", "register_hook", "retain_grad", "requires_grad_", "is_same_size",
    "is_set_to", "is_shared", "is_signed", "is_pinned", "is_inference", "has_names", "__dir__", "_has_compatible_shallow_copy_type",
    "register_post_accumulate_grad_hook", "_is_view", "result_type", "__delete__", "is_neg", "is_conj",
}  # fmt: skip
_ELEMENTS_OF = {"data", "real", "imag", "T", "mT", "H", "mH", "grad"}  # properties that hand elements out


@contextlib.contextmanager
def ours():
    """Inside, motley itself uses the model: as it lies in memory, and with its own gradients."""
    _ours.depth = getattr(_ours, "depth", 0) + 1
    try:
        yield
    finally:
        _ours.depth -= 1


def inside(function):
    """A method that does all it does as ours."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        with ours():
            return function(*args, **kwargs)

    return called


def _mapped(tree, change, kind):
    """Nested lists, tuples and dicts with what change() makes of the tensors of a kind."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(part, change, kind) for part in tree)
    if type(tree) is dict:
        return {key: _mapped(part, change, kind) for key, part in tree.items()}
    return tree


def _found(tree, kind):
    found = []
    _mapped(tree, found.append, kind)
    return found


class _Untrained(torch.autograd.Function):
    """A tensor of the model in a computation beside the step."""

    @staticmethod
    def forward(ctx, anchor, tensor, name):
        ctx.name = name
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        raise UserError(
            f"[distribute] a backward pass outside of the step wants a gradient of parameter {ctx.name}, which would be lost; put what it "
            "is of into loss_fn, or take it of inputs alone with torch.autograd.grad"
        )


def _to_read(tensor):
    """An ordinary tensor with the elements of a shown one."""
    current = tensor.detach()
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Untrained.apply(torch.zeros((), requires_grad=True), current, tensor._motley[1])
    return current


class _Shown:
    """What sees every use of a tensor; `_motley` is (its Mirror, its name)."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        with _torch.without_subclasses():
            if getattr(_ours, "depth", 0) > 0 or name in _OF_FORM or (name == "__get__" and owner not in _ELEMENTS_OF):
                return func(*args, **kwargs)
            if name == "__set__":
                return _assign(owner, *args)
            if owner == "grad":
                return args[0]._motley[0].gradient(args[0]) if isinstance(args[0], torch.nn.Parameter) else None
            written = _found(kwargs.get("out"), _Shown)
            if in_place(name):
                written += _found(args[:1], _Shown)
            if written:
                if name == "copy_" and _holds_already(args[0], args[1]):
                    return args[0]
                raise _refusal(name, written[0])
            used = _found((args, kwargs), _Shown)
            for mirror in {id(tensor._motley[0]): tensor._motley[0] for tensor in used}.values():
                mirror.refresh()
            if name == "__repr__" and isinstance(args[0], torch.nn.Parameter):
                return repr(torch.nn.Parameter(args[0].detach(), args[0].requires_grad))
            result = func(*_mapped(list(args), _to_read, _Shown), **_mapped(kwargs, _to_read, _Shown))
            if name in ("numpy", "__array__"):
                result.flags.writeable = False
            return _handed_out(result, used)

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self._as_plain().clone() if not isinstance(self, torch.nn.Parameter) else
                               torch.nn.Parameter(self._as_plain().clone(), self.requires_grad))  # fmt: skip

    def __reduce_ex__(self, protocol):
        value = self._as_plain()
        if isinstance(self, torch.nn.Parameter):
            value = torch.nn.Parameter(value, self.requires_grad)
        return value.__reduce_ex__(protocol)

    def _as_plain(self):
        if getattr(_ours, "depth", 0) == 0:
            self._motley[0].refresh()
        return plain(self)


class ShownParameter(_Shown, torch.nn.Parameter):
    """A parameter of the user's model."""


class ShownTensor(_Shown, torch.Tensor):
    """A buffer of it, or a view of a parameter."""


def _handed_out(result, used):
    """A result that lies in the memory of a shown tensor is shown too."""
    if type(result) in (list, tuple):
        return type(result)(_handed_out(part, used) for part in result)
    if not isinstance(result, torch.Tensor) or result.layout != torch.strided:
        return result
    for tensor in used:
        if _torch.storage_of(result) == _torch.storage_of(tensor):
            result = result.as_subclass(ShownTensor)
            result._motley = tensor._motley
            return result
    return result


def _assign(owner, tensor, value):
    """tensor.OWNER = value."""
    mirror, name = tensor._motley
    if owner == "grad":
        if value is not None:
            raise UserError(
                f"[distribute] a gradient of {name} is set on the model itself; the gradients are those of dist.parameters()"
            )
        mirror.clear(tensor, True)
    elif owner != "data":
        getattr(torch.Tensor, owner).__set__(tensor, value)
    elif value.dtype != tensor.dtype or value.device != tensor.device or not _holds_already(tensor, value):
        raise _refusal("data", tensor)


def _holds_already(tensor, value):
    """Whether a shown tensor has these elements: model.load_state_dict(dist.state_dict()), say."""
    value = current(value).detach()
    if value.shape == tensor.shape and _torch.memory_of(value) == _torch.memory_of(tensor):
        return True
    tensor = tensor._as_plain()
    return value.shape == tensor.shape and torch.equal(tensor, value.to(tensor.device, tensor.dtype))


def _refusal(how, tensor):
    mirror, name = tensor._motley
    return UserError(
        f"[distribute] {mirror.kind_of(name)} {name} of the model was changed ({how}), but training goes on with the pieces of "
        "distribute(); change dist.parameters() in place, or call dist.load_state_dict()"
    )


class _Gradient(torch.Tensor):
    """In the place of the gradient of a parameter of the model: says where it is. `_motley` is (Mirror, parameter).

    One that the parameter had before, of a backward pass that was not ours, can be read.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        kwargs = kwargs or {}
        with _torch.without_subclasses():
            if name == "zero_":
                args[0]._motley[0].clear(args[0]._motley[1], False)
            if name in ("zero_", "detach_", "requires_grad_"):
                return args[0]
            if name in _OF_FORM or (name == "__get__" and owner not in _ELEMENTS_OF):
                return func(*args, **kwargs)
            written = in_place(name) or name == "__set__" or "out" in kwargs
            found = [own._motley[1].grad for own in _found((args, kwargs), _Gradient)]
            if not written and all(gradient is not None for gradient in found):
                plainly = [_mapped(part, lambda own: own._motley[1].grad.detach(), _Gradient) for part in (list(args), kwargs)]
                return func(*plainly[0], **plainly[1])
        raise UserError(
            f"[distribute] {owner or name} of a gradient of the model itself: the gradients are those of dist.parameters(); clip with "
            "dist.clip_grad_norm_()"
        )


class Mirror:
    """Shows the trained values in the tensors of a model. Lives as long as they do, with the pieces."""

    def __init__(self, dist):
        step = dist._step_spec
        self.peers, self.held, self.pieces, self.untouched = dist._group.peers, dist._held, dist._pieces, dist._untouched
        self.dist, self.slots, self.buffers = weakref.ref(dist), list(step.parameters), {}
        self.position = {id(slot.tensor): i for i, slot in enumerate(self.slots)}
        self.at = self._now() if dist.rank == 0 else None  # rank 0's values are everyone's
        self.held.mirror = weakref.ref(self)
        for slot in self.slots:
            self._show(slot, torch.nn.Parameter, ShownParameter)
        self.show_buffers(dist._run)

    def show_buffers(self, run):
        """Those that a plan's steps change."""
        updated = run.updated
        for slot in run.step.buffers:
            if slot.name in updated and slot.name not in self.buffers:
                self.buffers[slot.name] = slot
                self._show(slot, torch.Tensor, ShownTensor)

    def _show(self, slot, before, after):
        if type(slot.held) is before and slot.held.device.type != "meta":
            slot.held.__class__ = after
            slot.held._motley = self, slot.name

    def kind_of(self, name):
        return "buffer" if name in self.buffers else "parameter"

    def _now(self):
        return self.held.count, self.held.versions()

    def refresh(self):
        """Puts the trained values into the model, where it has older ones."""
        with self.peers.asking, ours():
            now = self._now()
            if now == self.at:
                return
            slots = self.slots + list(self.buffers.values())
            for slot in self.untouched.touched(slots):
                raise _refusal("in place", slot.held)
            same_batch(self.peers, self.held)
            whole = self.peers.all_of(self.held, self.slots, list(self.buffers.values()))
            with torch.no_grad(), _torch.without_subclasses():
                for slot in slots:
                    slot.tensor.detach().copy_(whole[slot.name])
            self.untouched.accept(slots)
            self.at = now

    def gradient(self, parameter):
        """What parameter.grad is."""
        position = self.position.get(id(parameter))
        if position is None or self.pieces[position].grad is None:
            return parameter.grad
        shown = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape).as_subclass(_Gradient)
        shown._motley = self, parameter
        return shown

    def clear(self, parameter, set_to_none):
        parameter.grad = None
        position = self.position.get(id(parameter))
        if position is not None:
            _gradients.clear(self.pieces[position], set_to_none)

    def end(self):
        """The tensors of the model are ordinary ones again, with the trained values."""
        self.refresh()
        for slot in self.slots + list(self.buffers.values()):
            if isinstance(slot.held, _Shown) and slot.held._motley[0] is self:
                del slot.held._motley
                slot.held.__class__ = torch.nn.Parameter if isinstance(slot.held, torch.nn.Parameter) else torch.Tensor


def brought_up_to_date(slots):
    """Tensors that another distribute() trains, or trained, get its values; of one that is gone they are let go."""
    mirrors = {id(m): m for m in (slot.held._motley[0] for slot in slots if isinstance(slot.held, _Shown))}.values()
    if any(mirror.dist() is not None for mirror in mirrors):
        gc.collect()
    for mirror in mirrors:
        mirror.refresh()
        if mirror.dist() is None:
            mirror.end()


def is_shown(tensor):
    """Whether a distribute() trains it."""
    return isinstance(tensor, _Shown)


def current(tensor):
    """An ordinary tensor with the elements of one that may be the model's own."""
    return tensor._as_plain() if isinstance(tensor, _Shown) else tensor

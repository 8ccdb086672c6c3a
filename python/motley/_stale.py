"""The user's own module while distribute() trains it: its tensors stay as they were, since training goes on with pieces.

What would take them for trained ones is refused: running the module or a part of it after a step, its state_dict(), its gradients.
Parameters that are read one by one are not seen.
"""

import contextlib
import threading
import weakref

import torch

from ._errors import UserError

_ours = threading.local()  # .depth: motley runs the module itself
# What a gradient that stands for none answers as if it were one.
_HARMLESS = ("zero_", "detach_", "requires_grad_", "__repr__", "__len__", "dim", "size", "numel", "is_floating_point", "element_size")


@contextlib.contextmanager
def ours():
    """Inside, motley itself reads the module."""
    _ours.depth = getattr(_ours, "depth", 0) + 1
    try:
        yield
    finally:
        _ours.depth -= 1


_trained_by = {}  # id of a module: (it, its Distributed), weakly


def _refuse_stale(module, *_):
    """Before any module runs, and where its state is read: UserError if it is not what its Distributed trains any more."""
    known, owner = _trained_by.get(id(module), (None, None))
    if known is None or known() is not module or getattr(_ours, "depth", 0) > 0:
        return
    dist = owner()
    if dist is not None and dist._has_trained(module):
        raise UserError(
            f"[distribute] this {type(module).__name__} has the numbers from before training, which goes on with pieces of them; run "
            "dist.eval() and dist(inputs), and read dist.state_dict()"
        )


class _NoGradient(torch.Tensor):
    """Stands in the place of a parameter's gradient, without memory."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name == "__get__" or name in _HARMLESS:
            return args[0] if name.endswith("_") and not name.startswith("__") else super().__torch_function__(function, types, args, kwargs or {})
        raise UserError(
            f"[distribute] {name} of a gradient of the model itself: the gradients are those of dist.parameters(); clip with "
            "dist.clip_grad_norm_()"
        )


def guard(dist, step):
    """`dist` trains the modules of a step from now on."""
    if not _trained_by:
        torch.nn.modules.module.register_module_forward_pre_hook(_refuse_stale)
    for module in step.model.modules():
        if id(module) not in _trained_by or _trained_by[id(module)][0]() is not module:
            module._register_state_dict_hook(_refuse_stale)
        _trained_by[id(module)] = weakref.ref(module), weakref.ref(dist)
    trained = [slot.tensor for slot in step.parameters if slot.tensor.requires_grad]
    for tensor in trained:
        tensor.grad = tensor.detach().new_zeros(()).expand(tensor.shape).as_subclass(_NoGradient)
    weakref.finalize(dist, _let_go, [weakref.ref(tensor) for tensor in trained])


def _let_go(parameters):
    for parameter in parameters:
        tensor = parameter()
        if tensor is not None and isinstance(tensor.grad, _NoGradient):
            tensor.grad = None

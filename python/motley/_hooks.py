"""Hooks of the user's on gradients: what changes a gradient becomes part of the graph; what only looks at one is refused.

A graph repeats what hooks compute of tensors, and nothing else that they do.
"""

import contextlib

import torch

from ._errors import CaptureError
from ._step import named_modules

_MEND = "return the gradient to train with from it, or remove it and look at the gradients of dist.named_parameters()"


class Hooks:
    """Those of a step, while it is captured. `parameters` are the tensors that stand for its own meanwhile."""

    def __init__(self, step, parameters):
        self.step = step
        self.of = {id(p): list((slot.tensor._backward_hooks or {}).values()) for slot, p in zip(step.parameters, parameters)}
        self.parameters = parameters
        for slot in step.parameters:
            if getattr(slot.tensor, "_post_accumulate_grad_hooks", None):
                raise CaptureError(
                    f"[capture] parameter {slot.name} has a hook that runs after its gradient was accumulated, which a graph cannot "
                    "repeat; use register_hook, or do it between dist.backward() and dist.step()"
                )

    def gradient(self, parameter, gradient):
        """What the hooks of the parameter at this position make of its gradient."""
        for hook in self.of[id(self.parameters[parameter])]:
            gradient = self._called(hook, f"parameter {self.step.parameters[parameter].name}", gradient)
        return gradient

    @staticmethod
    def _called(hook, what, *arguments):
        result = hook(*arguments)
        if result is None:
            raise CaptureError(f"[capture] a hook on the gradient of {what} returns nothing, so that a graph would drop it; {_MEND}")
        return result

    @contextlib.contextmanager
    def recorded(self):
        """Watches hooks that the forward pass registers, and those of modules."""
        plain, hooks = torch.Tensor.register_hook, self
        registered = {key: list(of) for key, of in self.of.items()}

        def register_hook(tensor, hook):
            if id(tensor) in hooks.of:
                hooks.of[id(tensor)].append(hook)
                return _Handle(hooks.of[id(tensor)], hook)
            return plain(tensor, lambda gradient: hooks._called(hook, f"a tensor {list(tensor.shape)} of the forward pass", gradient))

        def watched(hook, what):
            return lambda *arguments: hooks._called(hook, what, *arguments)

        before = []
        for path, module in named_modules(self.step.model, self.step.loss_fn):
            what = f"module {path or type(module).__name__}"
            for table in (module._backward_hooks, getattr(module, "_backward_pre_hooks", {})):
                for key, hook in list(table.items()):
                    before.append((table, key, hook))
                    table[key] = watched(hook, what)
        torch.Tensor.register_hook = register_hook
        try:
            yield
        finally:
            torch.Tensor.register_hook = plain
            self.of = registered
            for table, key, hook in before:
                table[key] = hook


class _Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook

    def remove(self):
        if self.hook in self.hooks:
            self.hooks.remove(self.hook)

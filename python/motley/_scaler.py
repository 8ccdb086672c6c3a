"""Loss scaling for 16-bit floats: torch.cuda.amp.GradScaler on pieces, with one verdict for all workers."""

import torch

from ._errors import UserError
from ._pieces import plain
from ._step import Step

# Precisions whose step takes the scale as an input: their gradients would be lost before they are handed over.
SCALED = {"f16"}
_INPUT = "loss_scale"


class ScaledStep(Step):
    """A step whose loss is multiplied by one more input, a number."""

    def __init__(self, model, example_inputs, loss_fn):
        super().__init__(model, example_inputs, loss_fn)
        self.scale = torch.ones(())

    @property
    def leaves(self):
        return super().leaves + [(_INPUT, self.scale)]

    def rows(self, samples):
        raise UserError("[distribute] precision='fp16' scales the loss, which pipelines cannot; use precision='bf16' or engine='spmd'")

    def loss(self, tensors):
        loss = super().loss(tensors[:-1])
        return loss * tensors[-1] if isinstance(loss, torch.Tensor) else loss

    def match(self, inputs, targets, has_targets):
        tensors, constants = self.without_scale().match(inputs, targets, has_targets)
        return tensors + [self.scale.clone()], constants

    def without_scale(self):
        """The step of the same model and loss as the user has it."""
        step = Step.__new__(Step)
        vars(step).update(vars(self))
        return step


def gradients(dist, optimizer):
    """The gradients of an optimizer's parameters, as tensors that may be changed in place."""
    if optimizer is dist.optimizer and optimizer is not None:
        pieces = [dist._piece_of(slot) for slot in dist._optimized()]
    else:
        pieces = [p for group in optimizer.param_groups for p in group["params"]]
    return [plain(p.grad) for p in pieces if p.grad is not None]


class GradScaler:
    """torch.cuda.amp.GradScaler for a distributed model.

        scaler = motley.GradScaler(dist)
        scaler.scale(dist(inputs, targets)).backward()
        scaler.unscale_(dist.optimizer)          # only if gradients are looked at, for example clipped
        dist.clip_grad_norm_(1.0)
        scaler.step(dist.optimizer)
        scaler.update()
        dist.zero_grad()

    A step is skipped on all workers where a gradient of any of them is infinite or not a number. unscale_() and step() are
    collective. A scale that is not a power of two rounds.
    """

    def __init__(self, dist, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        if enabled and not (growth_factor > 1 and backoff_factor < 1):
            raise UserError("[distribute] GradScaler: growth_factor has to be over 1 and backoff_factor under 1")
        self._dist, self._enabled = dist, enabled
        self._growth_factor, self._backoff_factor, self._growth_interval = growth_factor, backoff_factor, growth_interval
        self._growth_tracker, self._found = 0, {}  # {id(optimizer): [what was done, whether something is not finite]}
        self._set(float(init_scale))

    def _set(self, scale):
        self._scale = scale
        if self._enabled:
            self._dist._scale_loss(scale)

    def scale(self, outputs):
        """A loss, or several, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer):
        """Divides the gradients of an optimizer's parameters by the scale."""
        if not self._enabled:
            return
        done = self._found.setdefault(id(optimizer), ["", False])
        if done[0] == "unscaled":
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if done[0] == "stepped":
            raise RuntimeError("unscale_() is being called after step().")
        bad = torch.zeros((), dtype=torch.int32, device=self._dist._group.device)
        for gradient in gradients(self._dist, optimizer):
            if gradient.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            bad += (~gradient.isfinite()).any().int()
            gradient.mul_(1.0 / self._scale)
        self._dist._group.all_reduce(bad)
        done[:] = "unscaled", bad.item() > 0

    def step(self, optimizer, *args, **kwargs):
        """The optimizer's step, if all gradients of all workers are finite; unscales them if that was not done."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        done = self._found.setdefault(id(optimizer), ["", False])
        if done[0] == "stepped":
            raise RuntimeError("step() has already been called since the last update().")
        if done[0] == "":
            self.unscale_(optimizer)
        done[0] = "stepped"
        return None if done[1] else optimizer.step()

    def update(self, new_scale=None):
        """The scale of the next step: smaller after a skipped one, larger after growth_interval others."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._set(float(new_scale))
        elif not self._found:
            raise UserError("[distribute] GradScaler: update() before step() or unscale_()")
        elif any(bad for _, bad in self._found.values()):
            self._growth_tracker = 0
            self._set(self._scale * self._backoff_factor)
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._growth_tracker = 0
                self._set(self._scale * self._growth_factor)
        self._found = {}

    def get_scale(self):
        return self._scale if self._enabled else 1.0

    def is_enabled(self):
        return self._enabled

    def get_growth_factor(self):
        return self._growth_factor

    def set_growth_factor(self, factor):
        self._growth_factor = factor

    def get_backoff_factor(self):
        return self._backoff_factor

    def set_backoff_factor(self, factor):
        self._backoff_factor = factor

    def get_growth_interval(self):
        return self._growth_interval

    def set_growth_interval(self, interval):
        self._growth_interval = interval

    def state_dict(self):
        """As torch's."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale, "growth_factor": self._growth_factor, "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval, "_growth_tracker": self._growth_tracker,
        }  # fmt: skip

    def load_state_dict(self, state):
        if not self._enabled:
            return
        if not state:
            raise RuntimeError("The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.")
        self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
        self._growth_interval, self._growth_tracker = state["growth_interval"], state["_growth_tracker"]
        self._set(float(state["scale"]))

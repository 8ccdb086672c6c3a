"""The plain step: the user's own model, run eagerly on a whole batch, as a reference for plans.

Random operators give the numbers that the plan's graph draws. The n-th draw of the model is matched with the n-th random node;
a draw that is repeated (a checkpointed block that runs again) is known by the state of torch's generator.
"""

import contextlib
import random
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _motley, _torch
from ._step import replaced, unchanged

_TYPES = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64"}


class Outcome:
    """What a step makes: the loss, {parameter: gradient or None}, {buffer: tensor after it}."""

    def __init__(self, loss, gradients, buffers):
        self.loss, self.gradients, self.buffers = loss, gradients, buffers


class Draws(TorchDispatchMode):
    """Gives random operators the numbers of a graph's random nodes.

    `exact` is False afterwards if the model drew otherwise than the graph does, so that numbers may have gone to the wrong place.
    """

    def __init__(self, nodes, seed, step, parts):
        super().__init__()
        self.nodes, self.seed, self.step, self.parts = nodes, seed, step, parts
        self.at, self.exact, self.given = 0, True, {}

    def finished(self, device):
        """A model that draws less than its graph is another one; on CUDA devices kernels may draw that are not seen here."""
        self.exact = self.exact and (self.at == len(self.nodes) or device.type == "cpu")

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind, _, overload = str(function).partition(".")[2].partition(".")
        draw = getattr(self, f"_draw_{kind}", None)
        result = draw(overload, args, kwargs) if draw is not None else None
        return function(*args, **kwargs) if result is None else result

    def _numbers(self, name, numbers, shape, dtype, device):
        """The elements of the next node that is such an operator; None: there is none."""
        key = bytes(_torch.bytes_of(torch.get_rng_state()))
        if key in self.given:  # the same draw once more
            node, numbers_type, scaled = self.given[key]
        else:
            found = [
                (at, node) for at, node in enumerate(self.nodes[self.at :], self.at)
                if node[1] == "aten::" + name and self._fits(node[2], shape)
            ]  # fmt: skip
            if not found:
                self.exact = False
                return None
            at, (node, _, part, numbers_type) = found[0]
            self.exact = self.exact and at == self.at
            scaled = self.parts == 1 or list(part) != list(shape)
            self.at = at + 1
            self.given[key] = node, numbers_type, scaled
            torch.rand(())  # the generator goes on, as it does for the draw that is replaced
        self.exact = self.exact and scaled
        drawn = _motley.draw("aten::" + name, numbers, list(shape), numbers_type, self.seed, self.step, node)
        return drawn.to(device=device, dtype=dtype)

    def _fits(self, part, shape):
        part, shape = list(part), list(shape)
        return part == shape or (len(part) > 0 and [part[0] * self.parts] + part[1:] == shape)

    def _like(self, name, numbers, tensor, dtype=None):
        return self._numbers(name, numbers, tensor.shape, dtype or tensor.dtype, tensor.device)

    @staticmethod
    def _in_place(tensor, drawn):
        return None if drawn is None else tensor.copy_(drawn)

    def _draw_bernoulli_(self, overload, args, kwargs):
        if overload != "float":
            return None
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return self._in_place(args[0], self._like("bernoulli.p", [0, p], args[0]))

    def _draw_bernoulli(self, overload, args, kwargs):
        if overload != "p":
            return None
        return self._like("bernoulli.p", [0, args[1] if len(args) > 1 else kwargs["p"]], args[0])

    def _draw_native_dropout(self, _, args, kwargs):
        tensor, p = args[:2]
        kept = self._like("bernoulli.p", [0, 1 - p], tensor)
        return None if kept is None else (tensor * kept / (1 - p), kept.bool())

    def _draw_normal_(self, _, args, kwargs):
        mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
        deviation = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
        return self._in_place(args[0], self._like("normal_functional", [0, mean, deviation], args[0]))

    def _draw_uniform_(self, _, args, kwargs):
        low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
        high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
        return self._in_place(args[0], self._like("uniform", [0, low, high], args[0]))

    def _draw_exponential_(self, _, args, kwargs):
        rate = args[1] if len(args) > 1 else kwargs.get("lambd", 1.0)
        return self._in_place(args[0], self._like("exponential", [0, rate], args[0]))

    def _made(self, name, numbers, shape, kwargs, default):
        return self._numbers(name, numbers, shape, kwargs.get("dtype") or default, kwargs.get("device") or "cpu")

    def _draw_rand(self, _, args, kwargs):
        return self._made("rand", [], args[0], kwargs, torch.get_default_dtype())

    def _draw_randn(self, _, args, kwargs):
        return self._made("randn", [], args[0], kwargs, torch.get_default_dtype())

    def _draw_randint(self, overload, args, kwargs):
        numbers = list(args[:-1])
        return self._made("randint.low" if overload == "low" else "randint", numbers, args[-1], kwargs, torch.int64)

    def _draw_rand_like(self, _, args, kwargs):
        return self._like("rand_like", [], args[0], kwargs.get("dtype"))

    def _draw_randn_like(self, _, args, kwargs):
        return self._like("randn_like", [], args[0], kwargs.get("dtype"))

    def _draw_randint_like(self, overload, args, kwargs):
        name = "randint_like.low_dtype" if overload == "low_dtype" else "randint_like"
        return self._like(name, [0, *args[1:]], args[0], kwargs.get("dtype"))


@contextlib.contextmanager
def _generators():
    """Leaves the generators of torch, Python and numpy as they were."""
    state, own = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    numbers = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(own)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
        if numbers is not None:
            sys.modules["numpy"].random.set_state(numbers)


@contextlib.contextmanager
def _with_data(slots, tensors):
    """The parameters with other numbers and without gradients; they stay the same objects, with their hooks."""
    before = [(slot.tensor, slot.tensor.data, slot.tensor.grad) for slot in slots]
    try:
        for slot, tensor in zip(slots, tensors):
            slot.tensor.grad = None
            slot.tensor.data = tensor
        yield
    finally:
        for parameter, data, gradient in before:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient


@contextlib.contextmanager
def _by_parts(parts):
    """Batch normalisation in training over each of so many parts of a batch, as a pipeline's micro-batches have it."""
    if parts == 1:
        yield
        return
    plain = torch.nn.functional.batch_norm

    def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if not training or input.shape[0] % parts:
            return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        with _torch.without_subclasses():  # a parameter of the user's model would have torch call this function again
            return torch.cat([plain(part, running_mean, running_var, weight, bias, True, momentum, eps) for part in input.chunk(parts)])

    torch.nn.functional.batch_norm = batch_norm
    try:
        yield
    finally:
        torch.nn.functional.batch_norm = plain


def _nudged(tensor, size):
    """The tensor with every number moved by about so much of itself."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, device=tensor.device, dtype=torch.int8).to(tensor.dtype) * 2 - 1
    return tensor * (1 + signs * size)


def plain_step(step, tensors, parameters=None, buffers=None, draws=None, parts=1, nudge=0.0):
    """The Outcome of one eager step of step.model on a batch; the model is left as it was.

    tensors       the batch, in the order of step.leaves
    parameters, buffers   [slot] other numbers than the model's own
    draws         a Draws, for models that draw random numbers
    parts         micro-batches that batch normalisation sees one at a time
    nudge         moves parameters and inputs by so much of themselves: what rounding alone may do
    """
    parameters = parameters or [slot.tensor.data for slot in step.parameters]
    buffers = buffers or [slot.tensor for slot in step.buffers]
    buffers = [buffer.detach().clone() for buffer in buffers]
    tensors = [tensor.detach() for tensor in tensors]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_generators())
        stack.enter_context(unchanged(step.model, step.loss_fn))
        if nudge:
            parameters, tensors = ([_nudged(tensor, nudge) for tensor in row] for row in (parameters, tensors))
        stack.enter_context(_with_data(step.parameters, parameters))
        stack.enter_context(replaced(step.buffers, buffers))
        stack.enter_context(_by_parts(parts))
        stack.enter_context(torch.enable_grad())
        if draws is not None:
            stack.enter_context(_torch.plain_operators())
            stack.enter_context(draws)
        loss = step.loss([tensor.clone().requires_grad_(leaf.requires_grad) for tensor, (_, leaf) in zip(tensors, step.leaves)])
        loss.backward()
        gradients = {slot.name: slot.tensor.grad for slot in step.parameters}
        after = {slot.name: slot.state_of(slot.places[0][0][slot.places[0][1]].detach()) for slot in step.buffers}
    if draws is not None:
        draws.finished(step.parameters[0].tensor.device)
    return Outcome(loss.item(), gradients, after)

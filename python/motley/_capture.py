"""capture(): one training step as a graph."""

import linecache
import os

import torch

from . import _motley, _rewrites, _torch
from ._errors import CaptureError, UserError
from ._step import Step, replaced, unchanged

_OWN = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (__file__, torch.__file__)
)

_MENDS = (
    (
        "reads a number out of a tensor",
        "; use torch.where or a mask, or compute it before the step and pass it as an input",
    ),
    (
        "knows the shape of its result",
        "; register a Meta kernel for it (torch.library), or call it before the step and pass the result as an input",
    ),
)


def _place_in_user_code(traceback):
    """'file:line: source' of the innermost frame that is neither torch's nor motley's; '' if there is none."""
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not os.path.abspath(file).startswith(_OWN) and not file.startswith("<frozen"):
            source = linecache.getline(file, traceback.tb_lineno).strip()
            place = f"{file}:{traceback.tb_lineno}: {source}"
        traceback = traceback.tb_next
    return place


def _explained(error):
    """What the user needs to know of an exception thrown while the step ran on Meta tensors; None: it is theirs."""
    text = str(error).split("\n")[0]
    if isinstance(error, CaptureError):
        return None
    if text.startswith("[capture] "):
        text = text[len("[capture] ") :]
    elif isinstance(error, (RuntimeError, TypeError, NotImplementedError)) and "meta" in text.lower():
        text = f"this needs a tensor's numbers, which a capture does not have ({text})" + _MENDS[0][1]
    else:
        return None
    text += "".join(mend for sign, mend in _MENDS if sign in text)
    place = _place_in_user_code(error.__traceback__)
    return f"[capture] {place + ': ' if place else ''}{text}"


def _meta(tensor, parameter=False):
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if parameter:
        return torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def capture_step(step, name, samples=None):
    """The graph of a step; of so many rows of its batch, where a pipeline takes batches in parts."""
    batch = step.batch_size() if samples is None else samples
    whole = [tensor for _, tensor in step.leaves] if batch == step.batch_size() else step.rows(batch)
    parameters = [_meta(slot.tensor, parameter=True) for slot in step.parameters]
    buffers = [_meta(slot.tensor) for slot in step.buffers]
    leaves = [_meta(tensor) for tensor in whole]

    def run():
        loss = step.loss(leaves)
        changed = []
        for i, slot in enumerate(step.buffers):
            holder, key = slot.places[0]
            now = holder.get(key)
            if isinstance(now, torch.Tensor) and now is not buffers[i]:
                changed.append((i, now.detach()))
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"[capture] the loss is a {type(loss).__name__}; it must be a tensor of one number")
        return loss, changed

    def named(slots, tensors):
        return [(slot.name, tensor) for slot, tensor in zip(slots, tensors)]

    try:
        with unchanged(step.model), replaced(step.parameters + step.buffers, parameters + buffers):
            with torch.enable_grad(), _rewrites.active(), _torch.plain_attention():
                graph = _motley.capture(
                    name,
                    named(step.parameters, parameters),
                    named(step.buffers, buffers),
                    [(leaf, tensor) for (leaf, _), tensor in zip(step.leaves, leaves)],
                    batch,
                    run,
                )
    except Exception as error:
        text = _explained(error)
        if text is None:
            raise
        raise CaptureError(text) from None
    graph.at = lambda samples: capture_step(step, name, samples)  # for engines that plan micro-batches
    return graph


def capture(model, example_inputs, loss_fn=None, *, name=None):
    """One training step of a model as a graph: forward pass, loss and gradients.

    model            any torch.nn.Module; it is not changed, and its parameters may be on any device
    example_inputs   (inputs, targets) of one global batch, or (inputs,); inputs is a tensor, a tuple of positional or a
                     dict of keyword arguments. Only shapes and types matter.
    loss_fn          loss_fn(model(inputs), targets) is a tensor of one number; without it, the model returns the loss

    Raises CaptureError, which names the line of the model that cannot be captured.
    """
    step = Step(model, example_inputs, loss_fn)
    return capture_step(step, name or type(model).__name__)

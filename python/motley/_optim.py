"""Optimizers on pieces of parameters.

An optimizer that treats every element by itself does to a piece what it would do to the whole. Its state is kept in
pieces too, and put together for checkpoints.
"""

import torch

from . import _torch
from ._errors import UserError

_DEFAULTS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}

# Of torch.optim, those that treat every element by itself, and how many states they keep.
_STATES = {
    "SGD": 1, "Rprop": 2, "Adagrad": 1, "RMSprop": 2, "ASGD": 1,
    "Adam": 2, "AdamW": 2, "Adadelta": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2,
}  # fmt: skip


def plan_name(optimizer):
    """The name under which plans know an optimizer's memory."""
    if isinstance(optimizer, str):
        if optimizer not in _DEFAULTS:
            raise UserError(f"[distribute] optimizer is {optimizer!r}; give 'adamw', 'sgd' or a torch.optim.Optimizer")
        return optimizer
    if optimizer is None:
        return "adamw"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"[distribute] optimizer is a {type(optimizer).__name__}; give 'adamw', 'sgd', a torch.optim.Optimizer, or None"
        )
    name = type(optimizer).__name__
    if name not in _STATES:
        raise UserError(
            f"[distribute] {name} is not known to treat every element by itself, as pieces of parameters need; use one of "
            f"{', '.join(sorted(_STATES))}, or optimizer=None and step dist.parameters() yourself"
        )
    return "sgd" if _STATES[name] == 1 else "adamw"


def on_pieces(optimizer, whole, pieces):
    """The same optimizer over pieces; `whole` are the parameters the user's has, in the order of the pieces."""
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        return _DEFAULTS[optimizer](pieces)
    if any(optimizer.state.values()):
        raise UserError("[distribute] the optimizer has stepped; give a new one, and load_optimizer_state_dict afterwards")
    piece_of = {id(w): p for w, p in zip(whole, pieces)}
    groups, used = [], set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in piece_of:
                raise UserError("[distribute] the optimizer has a parameter that the model has not")
            used.add(id(parameter))
        groups.append({**group, "params": [piece_of[id(p)] for p in group["params"]]})
    return _torch.remade(optimizer, groups)

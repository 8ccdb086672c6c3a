"""The user's optimizer on pieces of parameters.

An optimizer that treats every element by itself does to a piece what it would do to the whole. Others, that take norms of
whole parameters or multiply them (LAMB, Adafactor, Muon), do not: they run on whole parameters, put together for every step
on every worker. Which of the two an optimizer is, is found by trying it on small random parameters, whole and in pieces.

The user's optimizer itself is given the pieces, so whatever else holds it (a scheduler, a training loop) stays right.
"""

import contextlib
import copy
import inspect
import math
import types
import warnings

import torch

from ._errors import UserError

_DEFAULTS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}

# Their code is known: it does not look at sizes or count steps to do something else later, so a short trial tells all.
KNOWN = {
    getattr(torch.optim, name)
    for name in ("SGD", "Rprop", "Adagrad", "RMSprop", "ASGD", "Adam", "AdamW", "Adadelta", "Adamax", "NAdam", "RAdam")
}

_STEPS, _LONG_STEPS = 3, 24  # of a trial
_EDGE, _ELEMENTS = 144, 1 << 16  # of a small parameter: beyond thresholds of 128, as factored optimizers have them


def made(optimizer, parameters):
    """A torch optimizer: 'adamw' and 'sgd' are made for the parameters, None stays."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not isinstance(optimizer, str):
        raise UserError(
            f"[distribute] optimizer is a {type(optimizer).__name__}; give 'adamw', 'sgd', a torch.optim.Optimizer, or None"
        )
    if optimizer not in _DEFAULTS:
        raise UserError(f"[distribute] optimizer is {optimizer!r}; give 'adamw', 'sgd' or a torch.optim.Optimizer")
    return _DEFAULTS[optimizer](parameters)


# ---- an optimizer over other tensors ----------------------------------------------------------------------------------


class _Counting(dict):
    """A memo of copy.deepcopy that counts how often one of the parameters was met."""

    def __init__(self, known):
        super().__init__(known)
        self.keys_of_parameters, self.met = set(known), 0

    def get(self, key, default=None):
        self.met += key in self.keys_of_parameters
        return super().get(key, default)


def _inner_optimizers(optimizer):
    """An optimizer and those that it holds as attributes (Lookahead, SAM)."""
    found = [optimizer]
    for one in found:
        found += [v for v in vars(one).values() if isinstance(v, torch.optim.Optimizer) and not any(v is f for f in found)]
    return found


def _copied(optimizer, mapping):
    """A copy of an optimizer in which mapping[id(parameter)] stands for every parameter, and how often one was met.

    Tensors of its state that are as large as their parameter are the original's.
    """
    memo = _Counting(mapping)
    for _, p, key, value in _by_parameter(optimizer):
        if _like(value, p, key):
            memo[id(value)] = value
    inner = _inner_optimizers(optimizer)
    for one in inner:
        memo[id(one)] = type(one).__new__(type(one))
    for one in inner:
        # A step of the instance's own is a scheduler's, bound to the original.
        vars(memo[id(one)]).update({k: copy.deepcopy(v, memo) for k, v in vars(one).items() if k != "step"})
    return memo[id(optimizer)], memo.met


def _by_parameter(optimizer):
    """[(dict, parameter, key, value)] of what an optimizer keeps in dicts by parameter: dict[key], its state and the like."""
    found, seen, left = [], set(), [vars(one) for one in _inner_optimizers(optimizer)]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for key, value in list(thing.items()) if isinstance(thing, dict) else enumerate(thing):
            if isinstance(key, torch.Tensor):
                found += [(value, key, k, v) for k, v in value.items()] if isinstance(value, dict) else [(thing, key, key, value)]
            elif isinstance(value, (dict, list)):
                left.append(value)
    return found


def _like(value, parameter, key):
    """Whether dict[key] has an element for each of the parameter's. The state of a single number may be a count."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and (value.dim() > 0 or key is parameter)


def _exchanged(thing, mapping, seen):
    """Puts mapping[id(parameter)] in the place of parameters in dicts, lists and optimizers; (the thing, how many)."""
    if isinstance(thing, torch.Tensor):
        return (mapping[id(thing)], 1) if id(thing) in mapping else (thing, 0)
    if id(thing) in seen or not isinstance(thing, (dict, list, tuple, set, torch.optim.Optimizer)):
        return thing, 0
    seen[id(thing)] = thing
    if isinstance(thing, torch.optim.Optimizer):
        return thing, _exchanged(vars(thing), mapping, seen)[1]
    count = 0

    def new(value):
        nonlocal count
        value, n = _exchanged(value, mapping, seen)
        count += n
        return value

    if isinstance(thing, dict):
        items = [(new(key), new(value)) for key, value in thing.items()]
        thing.clear()
        thing.update(items)
    elif isinstance(thing, list):
        thing[:] = [new(value) for value in thing]
    elif isinstance(thing, set):
        items = [new(value) for value in thing]
        thing.clear()
        thing.update(items)
    else:
        items = [new(value) for value in thing]
        if count:
            thing = type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    return thing, count


def _parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def _numbers(optimizer):
    """The hyperparameters of all groups, as far as they are plain values; optimizers may change them in a step."""
    kinds = (bool, int, float, str, tuple, type(None))
    return [{k: v for k, v in group.items() if isinstance(v, kinds)} for group in optimizer.param_groups]


def signature(optimizer, slots):
    """What of an optimizer has to be the same on every worker, as text."""
    if optimizer is None:
        return "None"
    name_of, state = {id(slot.tensor): slot.name for slot in slots}, []
    for p in _parameters(optimizer):
        for key, value in optimizer.state.get(p, {}).items():
            state.append((name_of[id(p)], key, list(value.shape) if isinstance(value, torch.Tensor) else value))
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return repr((type(optimizer).__name__, _numbers(optimizer), names, state))


# ---- the trial --------------------------------------------------------------------------------------------------------


class Trial:
    """What an optimizer was found to do.

    by_element   whether a step on pieces is a step on the whole
    states       bytes of state for each byte of parameters, at most
    fused        whether one kernel steps all parameters, without temporaries
    """

    def __init__(self, by_element, states, fused=False):
        self.by_element, self.states, self.fused = by_element, states, fused

    def plan_name(self):
        """The name under which plans know its memory."""
        return "fused-" * self.fused + ("sgd" if self.states <= 1.01 else "adamw" if self.states <= 2.01 else "amsgrad")


def _small_shape(shape, edge):
    shape = [min(size, edge) for size in shape]
    while math.prod(shape) > _ELEMENTS:
        shape[shape.index(max(shape))] //= 2
    return tuple(shape)


class _Small:
    """A small parameter that stands for all of one shape in one group."""

    def __init__(self, whole, value, shares):
        self.of, self.value = whole, value  # one of the user's, numbers
        self.shares = shares  # of three workers

    def cut(self, way, tensor):
        """Three workers' pieces of a tensor of its shape. way: a dimension; 'flat'; 'stages': one has it all."""
        empty = tensor.new_empty(0)
        if way == "stages" or tensor.dim() == 0:
            owner = self.shares % 3
            return [tensor.clone() if r == owner else empty.clone() for r in range(3)]
        flat = way == "flat"
        tensor = tensor.reshape(-1) if flat else tensor
        dim = 0 if flat else way % tensor.dim()
        size = tensor.shape[dim]
        first = (size * 3 + 4) // 5 if size > 1 else size
        sizes = [first, size - first, 0]
        sizes = sizes[self.shares % 3 :] + sizes[: self.shares % 3]
        return [piece.clone() for piece in tensor.split(sizes, dim)]


def _shrunk(value, small):
    """A tensor of an optimizer's state at the small parameter's shape."""
    for dim, size in enumerate(small):
        value = value.narrow(dim, 0, size)
    return value.clone()


def _on_small(optimizer, stand_ins, device):
    """A copy of an optimizer whose groups hold the given tensors: stand_ins is [(group, user's parameter, tensor)]."""
    mapping = {id(p): torch.nn.Parameter(p.new_empty(0)) for p in _parameters(optimizer)}  # for those without a stand-in
    for _, whole, tensor in stand_ins:
        mapping[id(whole)] = tensor
    made, _ = _copied(optimizer, mapping)
    for i, group in enumerate(made.param_groups):
        group["params"] = [tensor for g, _, tensor in stand_ins if g == i]
        if isinstance(group.get("lr"), (int, float)) and group["lr"] <= 0:
            group["lr"] = 1e-2  # warm-up begins at nothing, of which nothing is seen
    kept = {id(tensor) for _, _, tensor in stand_ins}
    for held, parameter, key, value in _by_parameter(made):
        if id(parameter) not in kept:
            del held[key]
    for one in _inner_optimizers(made):
        for parameter in [p for p, values in one.state.items() if not values]:
            del one.state[parameter]
    return made


def _stepped(optimizer, tensors, gradients):
    for tensor, gradient in zip(tensors, gradients):
        tensor.grad = gradient if tensor.numel() > 0 or gradient is None else None
    optimizer.step()


class _Trials:
    def __init__(self, optimizer, device):
        self.optimizer, self.device = optimizer, device
        self.known = type(optimizer) in KNOWN
        self.generator = torch.Generator().manual_seed(20)
        edge = 6 if self.known else _EDGE
        self.small, seen = [], set()  # [(group, _Small)]
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                # The trial looks for what an optimizer does, not for how it rounds.
                dtype = torch.float64 if p.dtype in (torch.float32, torch.float64) else p.dtype
                key = (g, _small_shape(p.shape, edge), dtype, p.requires_grad)
                if key not in seen:
                    seen.add(key)
                    value = self.random(key[1], dtype)
                    self.small.append((g, _Small(p, value, len(self.small))))

    def random(self, shape, dtype):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def copy(self, tensors):
        """A copy of the optimizer on tensors in the places of the small parameters, with its state cut as they are."""
        stand_ins = [
            (g, small.of, torch.nn.Parameter(t, requires_grad=small.of.requires_grad)) for (g, small), t in zip(self.small, tensors)
        ]
        return _on_small(self.optimizer, stand_ins, self.device), [tensor for _, _, tensor in stand_ins]

    def initial_state(self, optimizer, parameters, cut):
        """Cuts the state that the user's optimizer has already; `cut(small, tensor)` is this worker's piece."""
        small_of = {id(parameter): small for (_, small), parameter in zip(self.small, parameters)}
        for held, parameter, key, value in _by_parameter(optimizer):
            small = small_of[id(parameter)]
            if _like(value, small.of, small.of if key is parameter else key):
                shrunk = _shrunk(value.to(self.device), small.value.shape)
                held[key] = cut(small, shrunk.to(parameter.dtype))

    def run(self):
        ways = ["flat", "stages"] + list(range(max([1] + [small.value.dim() for _, small in self.small])))
        whole, wholes = self.copy([small.value.clone() for _, small in self.small])
        self.initial_state(whole, wholes, lambda small, value: value)
        again, agains = self.copy([small.value.clone() for _, small in self.small])
        self.initial_state(again, agains, lambda small, value: value)
        workers = {}
        by_element = True
        for way in ways:
            cuts = [small.cut(way, small.value) for _, small in self.small]
            workers[way] = []
            for rank in range(3):
                made, pieces = self.copy([cut[rank].clone() for cut in cuts])
                self.initial_state(made, pieces, lambda small, value, way=way, rank=rank: small.cut(way, value)[rank])
                workers[way].append((made, pieces))
        start = [small.value.clone() for _, small in self.small]
        for number in range(_STEPS if self.known else _LONG_STEPS):
            gradients = [
                self.random(small.value.shape, small.value.dtype) * 10.0 ** (number % 4 - 2) if small.of.requires_grad else None
                for _, small in self.small
            ]
            _stepped(whole, wholes, [None if g is None else g.clone() for g in gradients])
            _stepped(again, agains, [None if g is None else g.clone() for g in gradients])
            self.compare(start, wholes, agains)
            if not by_element:
                continue
            try:
                by_element = all(self.in_pieces(way, workers[way], start, whole, wholes, gradients) for way in ways)
            except Exception:
                by_element = False  # it cannot do with pieces, perhaps with empty ones
        return Trial(by_element, self.states(whole, wholes), will_be_fused(self.optimizer, self.device))

    def compare(self, start, wholes, agains):
        for value, one, other in zip(start, wholes, agains):
            if not _same(value, one.detach(), other.detach(), 0):
                raise UserError(
                    f"[distribute] {type(self.optimizer).__name__} draws random numbers in its step, which workers would not draw alike; "
                    "use another optimizer"
                )

    def in_pieces(self, way, workers, start, whole, wholes, gradients):
        for rank, (made, pieces) in enumerate(workers):
            mine = [None if g is None else small.cut(way, g)[rank] for (_, small), g in zip(self.small, gradients)]
            _stepped(made, pieces, mine)
            if _numbers(made) != _numbers(whole):
                return False
        for i, (_, small) in enumerate(self.small):
            wanted = small.cut(way, wholes[i].detach())
            for rank, (_, pieces) in enumerate(workers):
                if not _same(small.cut(way, start[i])[rank], wanted[rank], pieces[i].detach(), 1e-5, small.value.dtype):
                    return False
        return True

    def states(self, whole, wholes):
        held = {id(parameter): 0 for parameter in wholes}
        for _, parameter, _, value in _by_parameter(whole):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                held[id(parameter)] += value.numel() * value.element_size()
        return max((held[id(p)] / (p.numel() * p.element_size()) for p in wholes if p.numel() > 0), default=0)


def _same(start, one, other, limit, dtype=torch.float64):
    """Whether two results of the same start are alike to `limit` of what was changed."""
    if one.numel() == 0:
        return other.numel() == 0
    one, other, start = one.double(), other.double(), start.double()
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    change = (one - start).nan_to_num().abs().max().item()
    rounding = 1e-13 if dtype == torch.float64 else 1e-2
    return (one - other).nan_to_num().abs().max().item() <= limit * change + rounding * one.nan_to_num().abs().max().item()


def tried(optimizer, device="cpu"):
    """What an optimizer does, found on small random parameters; UserError where it cannot be run at all."""
    name = type(optimizer).__name__
    own = vars(optimizer).get("step")
    if own is not None and not (hasattr(own, "_with_counter") or hasattr(own, "_wrapped_by_lr_sched")):
        raise UserError(f"[distribute] the step of this {name} was replaced by {own}; make it a subclass's step instead")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(f"[distribute] {name} needs a closure that computes the loss several times a step; use another optimizer")
    trials = _Trials(optimizer, device)
    before = [(p, p._version, p.grad) for p in _parameters(optimizer)]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = trials.run()
    except UserError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"[distribute] {name} fails on small random parameters: {text}; use another optimizer") from None
    if any(p._version != version or p.grad is not grad for p, version, grad in before):
        raise UserError(f"[distribute] {name} holds parameters outside of its param_groups, where they cannot be exchanged for pieces")
    return found


# ---- on pieces --------------------------------------------------------------------------------------------------------


def check_parameters(optimizer, parameters):
    """UserError if an optimizer has other parameters than the model, or trains another motley.distribute."""
    if optimizer is None:
        return
    known = {id(p) for p in parameters}
    for p in _parameters(optimizer):
        if id(p) not in known:
            raise UserError(
                "[distribute] the optimizer has a parameter that the model has not: "
                + ("it was given to another distribute(), make a new one" if hasattr(optimizer, "_motley") else f"one of {list(p.shape)}")
            )


def exchange(optimizer, mapping, cut):
    """Gives an optimizer other tensors than the user's parameters: mapping is {id(parameter): tensor}.

    `cut(parameter, tensor)` makes a tensor of its state (of the parameter's shape) fit.
    """
    met = _copied(optimizer, mapping)[1]
    for held, p, key, value in _by_parameter(optimizer):
        if _like(value, p, key):
            held[key] = cut(p, value)
    if _exchanged(optimizer, mapping, {})[1] != met:
        raise UserError(
            f"[distribute] {type(optimizer).__name__} holds parameters where they cannot be exchanged for pieces; keep them in "
            "param_groups, lists and dicts"
        )


FUSED_ON = {"cuda"}  # types of devices


_WITH_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _may_be_fused(group, types):
    """Whether torch has a fused step for a group on these types of devices, and the user left the choice to it."""
    if group.get("fused", True) is not None or group.get("foreach") is not None or group.get("capturable") or group.get("differentiable"):
        return False
    return isinstance(group["lr"], (int, float)) and types <= FUSED_ON and all(p.is_floating_point() for p in group["params"])


def will_be_fused(optimizer, device):
    """Whether steps are one kernel for all parameters once these are on the device: by the user's choice, or by fused()."""
    groups = optimizer.param_groups
    return type(optimizer) in _WITH_FUSED and all(group.get("fused") is True or _may_be_fused(group, {torch.device(device).type}) for group in groups)


@contextlib.contextmanager
def fused(optimizer):
    """Steps of torch's own optimizers are one kernel there for all parameters, which needs no memory of its own (foreach has copies)."""
    known = type(optimizer) in _WITH_FUSED
    groups = [group for group in optimizer.param_groups if known and _may_be_fused(group, {p.device.type for p in group["params"]})]
    for group in groups:
        group["fused"] = True
        for p in group["params"]:
            held = optimizer.state.get(p, {})
            if "step" in held and held["step"].device != p.device:
                held["step"] = held["step"].to(p.device, torch.float32)
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def override(optimizer, **methods):
    """Puts functions in the place of an optimizer's methods; each is given the former method, then the arguments.

    Schedulers find in them what they left in the former ones.
    """
    for name, function in methods.items():
        former = getattr(optimizer, name)

        def method(self, *args, _function=function, _former=former, **kwargs):
            return _function(_former, *args, **kwargs)

        method.__dict__.update(getattr(former, "__dict__", {}))
        method.__name__ = name
        setattr(optimizer, name, types.MethodType(method, optimizer))
    optimizer._motley = True

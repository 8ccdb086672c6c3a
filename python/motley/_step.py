"""One training step of a user's model: its tensors by name, its inputs as a tree, and how to run it on other tensors."""

import collections
import contextlib
import copy

import torch

from . import _torch
from ._complex import real_view, shown, state_of
from ._errors import UserError


def flatten(tree, name):
    """The tensors of nested tuples, lists and dicts as [(name, tensor)], and a function that puts others in their place.

    What is not a tensor is kept as it is.
    """
    if isinstance(tree, torch.Tensor):
        return [(name, tree)], lambda tensors: tensors[0]
    if isinstance(tree, dict):
        keys, children = list(tree), [flatten(value, f"{name}.{key}") for key, value in tree.items()]

        def make(parts):
            return type(tree)(zip(keys, parts))
    elif isinstance(tree, (tuple, list)):
        children = [flatten(value, f"{name}.{i}") for i, value in enumerate(tree)]

        def make(parts):
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    else:
        return [], lambda tensors: tree

    def build(tensors):
        parts, at = [], 0
        for leaves, child in children:
            parts.append(child(tensors[at : at + len(leaves)]))
            at += len(leaves)
        return make(parts)

    return [leaf for leaves, _ in children for leaf in leaves], build


def constants_of(tree, name):
    """What is no tensor in nested tuples, lists and dicts, as [(name, value)]."""
    if isinstance(tree, torch.Tensor):
        return []
    if isinstance(tree, dict):
        return [item for key, value in tree.items() for item in constants_of(value, f"{name}.{key}")]
    if isinstance(tree, (tuple, list)):
        return [item for i, value in enumerate(tree) for item in constants_of(value, f"{name}.{i}")]
    return [(name, tree)]


def named_leaves(inputs, targets):
    """The tensors of a batch by name, and the functions that put others in the place of inputs and of targets.

    Dicts are named by their keys alone where that is clear.
    """
    inside, build_inputs = flatten(inputs, "inputs")
    outside, build_targets = flatten(targets, "targets")

    def short(tree, leaves):
        return [(name.split(".", 1)[1], t) for name, t in leaves] if isinstance(tree, dict) else leaves

    both = short(inputs, inside), short(targets, outside)
    if not {name for name, _ in both[0]} & {name for name, _ in both[1]}:
        inside, outside = both
    return inside, outside, build_inputs, build_targets


def split_example(example):
    """(inputs, targets) of a batch: a pair is both, anything else is inputs without targets."""
    if isinstance(example, (tuple, list)) and not hasattr(example, "_fields"):
        if len(example) == 2:
            return example[0], example[1], True
        if len(example) == 1:
            return example[0], None, False
        raise UserError(
            f"[capture] example_inputs has {len(example)} parts; give (inputs, targets), where several inputs are one "
            "tuple or dict, or (inputs,)"
        )
    return example, None, False


def call_model(model, inputs):
    """model(inputs): a tuple or list is positional arguments, a dict is keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return model(*inputs)
    return model(inputs)


def loss_of(output, loss_fn, targets, has_targets):
    if loss_fn is not None:
        return loss_fn(output, targets) if has_targets else loss_fn(output)
    if isinstance(output, dict) and "loss" in output:
        output = output["loss"]
    elif not isinstance(output, torch.Tensor) and hasattr(output, "loss"):
        output = output.loss
    if not isinstance(output, torch.Tensor):
        raise UserError(
            f"[capture] the model returns {type(output).__name__} and there is no loss_fn; give loss_fn(output, targets), "
            "or to motley.wrap loss_of(model, inputs)"
        )
    return output


def prefix_of_loss(model):
    """Under which name the tensors of a loss module stand beside those of the model."""
    name = "loss_fn"
    while hasattr(model, name):
        name += "_"
    return name


def named_modules(model, loss_fn=None):
    """[(path, module)] of a model and of a loss that is a module."""
    found = list(model.named_modules())
    if isinstance(loss_fn, torch.nn.Module):
        known = {id(module) for _, module in found}
        inside = loss_fn.named_modules(prefix=prefix_of_loss(model))
        found += [(path, module) for path, module in inside if id(module) not in known]
    return found


_MOST_OF_CONSTANT = 4096  # elements; of a graph's constants (src/torch/capture.h)


class Slot:
    """A tensor of the model and every place that holds it.

    held     the model's own
    tensor   the same, or of a complex buffer its real view: what graphs, plans and pieces know of it
    """

    def __init__(self, name, tensor):
        self.name, self.places = name, []  # places: (dict, key)
        self.hold(tensor)

    def hold(self, tensor):
        self.held = self.tensor = tensor
        self.complex, self.conjugate = tensor.is_complex() and not isinstance(tensor, torch.nn.Parameter), False
        if self.complex:
            self.tensor, self.conjugate = real_view(tensor)

    def shown(self, tensor):
        """A tensor like `tensor` as the model holds it."""
        return shown(tensor, self.conjugate) if self.complex else tensor

    def state_of(self, tensor):
        """A tensor like the model's own as `tensor` is."""
        return state_of(tensor, self.held.dtype, self.conjugate) if self.complex else tensor


def _fit_constants(module):
    return all(tensor.numel() <= _MOST_OF_CONSTANT for tensor in module.buffers())


def slots_of(model, loss_fn=None):
    """The parameters and buffers of a model, and of a loss that is a module, each once under its first name.

    Tensors that modules hold as plain attributes count as buffers: a step may read them. The class weights of torch's own
    losses are none, since nothing changes them: they are constants, as where a function is given them.
    """
    parameters, buffers = {}, {}
    inside = {id(module) for module in model.modules()}
    for path, module in named_modules(model, loss_fn):
        if type(module).__module__ == "torch.nn.modules.loss" and id(module) not in inside and _fit_constants(module):
            continue
        prefix = path + "." if path else ""
        for table, held in ((parameters, module._parameters), (buffers, module._buffers), (buffers, vars(module))):
            for key, tensor in held.items():
                if not isinstance(tensor, torch.Tensor) or (held is vars(module) and tensor.requires_grad):
                    continue
                slot = parameters.get(id(tensor)) or table.setdefault(id(tensor), Slot(prefix + key, tensor))
                slot.places.append((held, key))
        weights = vars(module).get("_flat_weights")  # recurrent layers keep a second list
        for i, tensor in enumerate(weights or []):
            if id(tensor) in parameters:
                parameters[id(tensor)].places.append((weights, i))
    return list(parameters.values()), list(buffers.values())


_PLAIN = (int, float, bool, str, type(None))
_CONTAINERS = (list, set, collections.deque)


class Change:
    """Of an attribute of a module in a forward pass. `plain`: from and to plain values, or a container of nothing else."""

    def __init__(self, kind, state, key, old, new):
        self.kind, self.state, self.key, self.old, self.new = kind, state, key, old, new
        self.plain = _is_plain(old) and _is_plain(new)

    def repeat(self):
        """Does to the attribute what the forward pass does."""
        held = self.state.get(self.key)
        if type(held) is type(self.new) and (type(held) in _CONTAINERS or isinstance(held, dict)):
            _refill(held, self.new)
        else:
            self.state[self.key] = self.new

    def __str__(self):
        return f"{self.kind}.{self.key} changes from {_said(self.old)} to {_said(self.new)} in the forward pass"


def _is_plain(value):
    if type(value) in (*_CONTAINERS, tuple):
        return all(type(v) in _PLAIN for v in value)
    if isinstance(value, dict):
        return all(type(v) in _PLAIN for v in value.values())
    return type(value) in _PLAIN


def _said(value):
    if _is_plain(value):
        return repr(value)
    if isinstance(value, (*_CONTAINERS, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _content_changed(before, now):
    if _is_plain(before) and _is_plain(now):
        return before != now
    if len(before) != len(now):
        return True
    if isinstance(now, dict):
        return any(key not in before or before[key] is not value for key, value in now.items())
    return any(a is not b for a, b in zip(before, now))


def _refill(container, content):
    if type(container) is list:
        container[:] = content
        return
    content = content.copy()
    container.clear()
    if type(container) is collections.deque:
        container.extend(content)
    else:
        container.update(content)


class Attributes:
    """Those of the modules of a model and its loss, as they are now, to find what a forward pass changes and to undo it.

    Tables of parameters, buffers and modules are no attributes.
    """

    def __init__(self, model, loss_fn=None):
        self.before = []
        for _, module in named_modules(model, loss_fn):
            state = vars(module)
            inside = {
                k: v.copy() if v or type(v) is collections.deque else type(v)()
                for k, v in state.items()
                if type(v) in _CONTAINERS or isinstance(v, dict)
            }
            self.before.append((state, dict(state), inside, type(module).__name__))

    def changes(self):
        """[Change]"""
        changes = []
        for state, attributes, inside, kind in self.before:
            for key, old in attributes.items():
                new = state.get(key)
                if new is not old and (not _is_plain(old) or not _is_plain(new) or new != old):
                    changes.append(Change(kind, state, key, old, new))
            for key, content in inside.items():
                now = state.get(key)
                if now is attributes[key] and not key.startswith("_") and _content_changed(content, now):
                    changes.append(Change(kind, state, key, content, now.copy()))
            for key in state.keys() - attributes.keys():
                changes.append(Change(kind, state, key, None, state[key]))
        return changes

    def keep_hooks(self):
        """Whether the forward pass registered hooks of modules, as libraries do in their first one; undo() leaves them, and the flags that say so."""
        hooked = False
        for state, _, inside, _ in self.before:
            for key in [key for key in inside if key.endswith("_hooks") and len(state[key]) > len(inside[key])]:
                inside[key], hooked = state[key].copy(), True
        if hooked:
            for state, attributes, _, _ in self.before:
                attributes.update({key: value for key, value in state.items() if key not in attributes and value is True})
        return hooked

    def undo(self):
        for state, attributes, inside, _ in self.before:
            state.clear()
            state.update(attributes)
            for key, content in inside.items():
                if _content_changed(content, state[key]):  # some cannot be filled
                    _refill(state[key], content)


@contextlib.contextmanager
def unchanged(model, loss_fn=None):
    """Undoes what a forward pass does to the attributes of the modules of a model and its loss; yields the Attributes."""
    attributes = Attributes(model, loss_fn)
    try:
        yield attributes
    finally:
        attributes.undo()


@contextlib.contextmanager
def replaced(slots, tensors):
    """The model with other tensors in its slots."""
    before = [[holder[key] for holder, key in slot.places] for slot in slots]
    try:
        for slot, tensor in zip(slots, tensors):
            value = slot.shown(tensor)
            for holder, key in slot.places:
                holder[key] = value
        yield
    finally:
        for slot, held in zip(slots, before):
            for (holder, key), tensor in zip(slot.places, held):
                holder[key] = tensor


class Step:
    """A model, its loss and the form of its batches."""

    def __init__(self, model, example_inputs, loss_fn):
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"[capture] the model is a {type(model).__name__}; give a torch.nn.Module")
        if loss_fn is not None and not callable(loss_fn):
            raise UserError(f"[capture] loss_fn is a {type(loss_fn).__name__}; give a function of (output, targets)")
        for path, module in named_modules(model, loss_fn):
            if isinstance(module, torch.jit.ScriptModule):
                raise UserError(
                    f"[capture] {f'module {path}' if path else 'the model'} was compiled by torch.jit, whose tensors cannot be exchanged; give "
                    "the module that it was compiled from"
                )
        self.model, self.loss_fn = model, loss_fn
        inputs, targets, self.has_targets = split_example(example_inputs)
        self.constants = constants_of(inputs, "inputs") + constants_of(targets, "targets")
        self.inputs, self.targets, self.build_inputs, self.build_targets = named_leaves(inputs, targets)
        if not self.inputs:
            raise UserError("[capture] example_inputs holds no tensor; give a batch as the model takes it")
        self.parameters, self.buffers = slots_of(model, loss_fn)
        seen = {}
        for slot in self.parameters:
            where = (_torch.memory_of(slot.tensor), slot.tensor.shape) if slot.tensor.numel() > 0 else id(slot)
            if where in seen and slot.tensor.device.type != "meta":
                raise UserError(
                    f"[capture] parameters {seen[where]} and {slot.name} share memory; make them one Parameter object"
                )
            seen[where] = slot.name

    @property
    def leaves(self):
        """[(name, tensor)] of a whole batch: inputs, then targets."""
        return self.inputs + self.targets

    def batch_size(self):
        for _, tensor in self.leaves:
            if tensor.dim() > 0:
                return tensor.shape[0]
        return 1

    def rows(self, samples):
        """The tensors of a batch of fewer rows."""
        batch = self.batch_size()
        for name, tensor in self.leaves:
            if tensor.dim() == 0 or tensor.shape[0] != batch:
                raise UserError(
                    f"[capture] {name} is {list(tensor.shape)}; a pipeline takes batches in parts, so that the first dimension "
                    f"of every input has to be the batch, {batch}"
                )
        if samples <= batch:
            return [tensor[:samples] for _, tensor in self.leaves]
        return [torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta") for _, tensor in self.leaves]

    def loss(self, tensors):
        """Runs the model on the tensors of a batch."""
        n = len(self.inputs)
        output = call_model(self.model, self.build_inputs(tensors[:n]))
        return loss_of(output, self.loss_fn, self.build_targets(tensors[n:]), self.has_targets)

    def functions(self):
        """The forward passes of its modules, and its loss."""
        loss_fn = self.loss_fn
        while hasattr(loss_fn, "func"):  # of functools.partial
            loss_fn = loss_fn.func
        return [getattr(type(module), "forward", None) for _, module in named_modules(self.model, self.loss_fn)] + [loss_fn]

    def match(self, inputs, targets, has_targets):
        """The tensors of another batch, in the order of `leaves`, and its constants."""
        if has_targets != self.has_targets:
            raise UserError(
                f"[distribute] a step takes {'inputs and targets' if self.has_targets else 'inputs alone'}, as "
                "example_inputs had them"
            )
        got = sum(named_leaves(inputs, targets)[:2], [])
        if [name for name, _ in got] != [name for name, _ in self.leaves]:
            raise UserError(
                f"[distribute] a batch has {', '.join(n for n, _ in got) or 'no tensor'}; example_inputs had "
                f"{', '.join(n for n, _ in self.leaves)}"
            )
        return [tensor for _, tensor in got], constants_of(inputs, "inputs") + constants_of(targets, "targets")

    def of_batch(self, inputs, targets):
        """The same step of a batch of another form."""
        other = copy.copy(self)
        other.inputs, other.targets, other.build_inputs, other.build_targets = named_leaves(inputs, targets)
        other.constants = constants_of(inputs, "inputs") + constants_of(targets, "targets")
        return other

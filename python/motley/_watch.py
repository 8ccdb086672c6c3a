"""What a captured step took as constant, and whether it still is.

A graph repeats what the forward pass and the loss computed once. They read more than tensors: attributes of modules, fields of
a configuration, globals, variables of enclosing functions, flags. While a step is captured, Reads notes which; a Watch compares
them at every later step, by identity wherever that suffices and in one call, so that a step pays some ten nanoseconds for each.
"""

import collections
import contextlib
import gc
import logging
import os
import sys
import sysconfig
import types
import zlib

import torch

from . import _motley, _torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
# Whose content no step depends on; a logger knows those of all libraries, which come and go.
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, property, staticmethod, classmethod, logging.Logger)
_DEPTH, _MOST = 5, 20000  # of nested objects, of entries
_BYTES = 1 << 15  # of constants whose numbers are compared in one step
_MISSING = object()
_MODULE_FIELDS = frozenset(vars(torch.nn.Module())) | {"_flat_weights", "_flat_weights_names", "_all_weights"}
_HOOKS = tuple(key for key in vars(torch.nn.Module()) if key.endswith("_hooks") and "state_dict" not in key)
_OWN = tuple(
    os.path.join(os.path.abspath(path), "")
    for path in (os.path.dirname(__file__), os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"])
)
_SITES = tuple(os.path.join(os.path.abspath(sysconfig.get_paths()[key]), "") for key in ("purelib", "platlib"))


def _is_users(file):
    """Whether a source file is neither torch's, motley's nor Python's own."""
    path = os.path.abspath(file)
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<__array_function__"))
    return not path.startswith(_OWN) or (path.startswith(_SITES) and not path.startswith(_OWN[:2]))


def is_users_scope(scope):
    """Of the globals of a module."""
    file = scope.get("__file__")
    return isinstance(file, str) and _is_users(file)


def is_users_module(module):
    return is_users_scope(getattr(module, "__dict__", {}))


def functions_of(codes, made_inside=()):
    """The functions that have these codes. `made_inside`: codes of functions that a step makes itself, which need not be found."""

    def found():
        known = gc.get_referrers(*codes) if codes else ()
        return [one for one in known if isinstance(one, types.FunctionType) and one.__code__ in codes]

    functions = found()
    if gc.get_freeze_count() and set(codes).difference(made_inside, [function.__code__ for function in functions]):
        # What is frozen is not found. Not frozen again: with it would be what was made since, which could never be freed.
        gc.unfreeze()
        functions = found()
    return functions


class Reads:
    """What a step reads beside its tensors, noted while it runs."""

    def __init__(self):
        self.attributes = {}  # (id of a module, name): module
        self.codes = {}  # code of a user's function: its globals

    def _call(self, frame, event, _):
        if event == "call":
            code = frame.f_code
            if code not in self.codes:
                self.codes[code] = frame.f_globals if _is_users(code.co_filename) else None

    @contextlib.contextmanager
    def noted(self):
        """Notes what runs inside."""
        attributes, plain = self.attributes, object.__getattribute__

        def read(module, name):
            attributes[id(module), name] = module
            return plain(module, name)

        before = _motley.Tools()
        torch.nn.Module.__getattribute__ = read
        sys.setprofile(self._call)
        try:
            yield
        finally:
            before.put_back_profiler()
            del torch.nn.Module.__getattribute__


class Watch:
    """The values that a captured step took as constant. `outside`: the tensors among them, which are no tensors of the step."""

    def __init__(self, step, reads, outside=()):
        self._entries, self._labels = [], []  # (dict, key, value): by identity
        self._lists, self._list_labels = [], []  # (list, copy)
        self._sizes, self._size_labels = [], []  # (container, length)
        self._versions, self._version_labels = [], []  # (tensor, version)
        self._arrays = []  # (numpy array, bytes, label)
        self._copies = []  # (dict, copy, label)
        self._classes = {}  # class: its table
        self._seen = set()
        self._ambient, self._still = _ambient(), None
        known = {id(slot.held) for slot in step.parameters + step.buffers}
        self._known, self._turn = known, 0
        roots = [("model", step.model)] + ([("loss_fn", step.loss_fn)] if isinstance(step.loss_fn, torch.nn.Module) else [])
        for root, module in roots:
            for path, part in module.named_modules():
                self._module(part, f"{root}.{path}" if path else root, reads)
        if step.loss_fn is not None and not isinstance(step.loss_fn, torch.nn.Module):
            self._value(step.loss_fn, "loss_fn", 0)
        self._functions(reads)
        for tensor in outside:
            self._value(tensor, f"a constant {list(tensor.shape)} of the step", 0)
        # Numbers may also change without a new version, through numpy or `data`.
        self._contents = [(t, _content(t)) for t in outside if t.device.type == "cpu" and t.layout == torch.strided]
        self._turns = 1 + sum(t.numel() * t.element_size() for t, _ in self._contents) // _BYTES  # steps that they take
        self._seen = None

    # ---- what to watch --------------------------------------------------------------------------------------------

    def _module(self, module, label, reads):
        state = vars(module)
        self._entry(state, "training", label)
        for key in _HOOKS:
            if key in state:
                self._size(state[key], f"the hooks ({key}) of {label}")
        for table in ("_modules", "_parameters", "_buffers"):
            if isinstance(state.get(table), dict):  # those of compiled modules are no dicts, and fixed
                self._size(state[table], f"{table} of {label}")
                for key in state[table] if table == "_modules" else ():
                    self._entry(state[table], key, label)
        for (_, name), part in reads.attributes.items():
            if part is not module or name in _MODULE_FIELDS or (name.startswith("__") and name.endswith("__")):
                continue
            if name in state:
                self._field(state, name, label, 0)
                continue
            holders = [(state, label)]  # where it could be set, and would hide the one of a class
            for kind in type(module).__mro__:
                if kind.__module__.split(".")[0] == "torch":
                    break
                holders.append((self._classes.setdefault(kind, vars(kind)), kind.__name__))
                if name in vars(kind):
                    for holder, of in holders[:-1]:
                        self._entry(holder, name, of)
                    self._field(holders[-1][0], name, kind.__name__, 0)
                    break

    def _functions(self, reads):
        """Globals and variables of enclosing functions that the user's functions name."""
        codes = {code: scope for code, scope in reads.codes.items() if scope is not None}
        for code, scope in codes.items():
            for name in code.co_names:
                if name not in scope:
                    continue
                value = scope[name]
                if isinstance(value, types.ModuleType):
                    if is_users_module(value):
                        for inner in code.co_names:
                            if inner in vars(value) and not isinstance(vars(value)[inner], types.ModuleType):
                                self._field(vars(value), inner, value.__name__, 0)
                elif isinstance(value, type):
                    if _is_users(getattr(sys.modules.get(value.__module__), "__file__", None) or "<main>"):
                        table = self._classes.setdefault(value, vars(value))
                        for inner in code.co_names:
                            if inner in table:
                                self._field(table, inner, value.__name__, 0)
                else:
                    self._field(scope, name, scope.get("__name__", "global"), 0)
        if any("environ" in code.co_names or "getenv" in code.co_names for code in codes):
            self._copies.append((os.environ._data, dict(os.environ._data), "the environment (os.environ)"))
        closed = [code for code in codes if code.co_freevars]
        made_inside = {inner for code in codes for inner in code.co_consts if isinstance(inner, types.CodeType)}
        for function in functions_of(closed, made_inside):
            self._function(function, function.__qualname__, 0)

    def _function(self, function, label, depth):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                self._cell(cell, f"{name} of {label}", depth)
        for i, value in enumerate(function.__defaults__ or ()):
            self._value(value, f"default {i} of {label}", depth + 1)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._value(value, f"{name} of {label}", depth + 1)

    def _cell(self, cell, label, depth):
        if id(cell) in self._seen:
            return
        self._seen.add(id(cell))
        with contextlib.suppress(ValueError):  # an empty cell
            value = cell.cell_contents
            self._add(_Cell(cell), "", value, label)
            self._value(value, label, depth + 1)

    def _field(self, holder, key, label, depth):
        self._entry(holder, key, label)
        value = _entry(holder, key)
        if isinstance(holder, dict) or not isinstance(value, types.FunctionType):  # methods run, and are known so
            self._value(value, f"{label}.{key}", depth + 1)

    def _entry(self, holder, key, label):
        place = id(holder), key
        if place not in self._seen and len(self._entries) < _MOST:
            self._seen.add(place)
            value = _entry(holder, key)
            self._add(holder, key, value, f"{label}.{key}")

    def _add(self, holder, key, value, label):
        self._entries.append((holder, key, value))
        self._labels.append(label)

    def _size(self, container, label):
        if container is not None:
            self._sizes.append((container, len(container)))
            self._size_labels.append(label)

    def _value(self, value, label, depth):
        """What lies inside of a value."""
        if isinstance(value, _PLAIN) or depth > _DEPTH or len(self._entries) >= _MOST:
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                self._versions.append((value, value._version))
                self._version_labels.append(label)
        elif isinstance(value, torch.nn.Module):
            self._outside_module(value, label)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            items = list(value)
            if not isinstance(value, (tuple, frozenset)):
                self._lists.append((value, items, all(isinstance(item, _PLAIN) for item in items)))
                self._list_labels.append(label)
            for i, item in enumerate(items[:1000]):
                self._value(item, f"{label}[{i}]", depth + 1)
        elif isinstance(value, dict):
            self._size(value, label)
            for key, item in list(value.items())[:1000]:
                self._entry(value, key, label)
                self._value(item, f"{label}[{key!r}]", depth + 1)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.nbytes <= 1 << 16:
                self._arrays.append((value, value.tobytes(), label))
        elif isinstance(value, types.FunctionType):
            if _is_users(value.__code__.co_filename):
                self._function(value, label, depth)
        elif isinstance(value, types.MethodType):
            self._value(value.__self__, label, depth + 1)
            self._value(value.__func__, label, depth + 1)
        elif type(value).__name__ == "partial" and hasattr(value, "keywords"):
            for part in (value.func, value.args, value.keywords):
                self._value(part, label, depth + 1)
        elif not isinstance(value, _CLOSED):
            for key in list(getattr(value, "__dict__", ()))[:1000]:
                self._field(vars(value), key, label, depth)

    def _outside_module(self, module, label):
        """A module that is found in a variable or a list: its tensors may be read by the step."""
        for name, tensor in list(module.named_parameters()) + list(module.named_buffers()):
            self._value(tensor, f"{label}.{name}", 0)
        for path, part in module.named_modules():
            where = f"{label}.{path}" if path else label
            for key, value in vars(part).items():
                if key == "training" or (key not in _MODULE_FIELDS and isinstance(value, _PLAIN)):
                    self._entry(vars(part), key, where)

    # ---- at every step --------------------------------------------------------------------------------------------

    def __len__(self):
        return len(self._entries) + len(self._lists) + len(self._sizes) + len(self._versions) + len(self._arrays) + len(self._copies)

    def changes(self):
        """What is not as it was, in words; an empty list is the usual case and cheap."""
        if self._still is None:
            self._still = _motley.Still(self._entries, self._sizes, self._versions, _MISSING)
        found = [] if self._still.holds() else self._moved()
        for at, (container, items, plain) in enumerate(self._lists):
            if len(container) != len(items) or (
                container != type(container)(items) if plain else any(a is not b for a, b in zip(container, items))
            ):
                found.append(f"{self._list_labels[at]} changed")
        for table, before, label in self._copies:
            if table != before:
                found.append(f"{label} changed")
        for array, content, label in self._arrays:
            if array.tobytes() != content:
                found.append(f"{label} was changed in place")
        for tensor, content in self._contents[self._turn :: self._turns]:
            if _content(tensor) != content:
                found.append(f"a constant {list(tensor.shape)} of the step was changed in place")
        self._turn = (self._turn + 1) % self._turns
        if self._ambient != _ambient():
            found.append(f"the mode of autocast or the default type changed ({self._ambient} and {_ambient()})")
        return found

    def _moved(self):
        """Entries, lengths and versions that are not as they were, in words."""
        found, self._still = [], None
        for at, (holder, key, value) in enumerate(self._entries):
            now = _entry(holder, key)
            if now is not value:
                if type(now) is type(value) and isinstance(value, _PLAIN + (tuple,)) and _equal(now, value):
                    self._entries[at] = holder, key, now
                else:
                    found.append(f"{self._labels[at]} was {_short(value)} and is {_short(now)}")
        for at, (container, size) in enumerate(self._sizes):
            if len(container) != size:
                found.append(f"{self._size_labels[at]} changed")
        for at, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                found.append(f"{self._version_labels[at]} was changed in place")
        return found


def _entry(holder, key):
    """Of a dict, which may have a get() of its own, or of what is read like one."""
    return dict.get(holder, key, _MISSING) if isinstance(holder, dict) else holder.get(key, _MISSING)


class _Cell:
    """A variable of an enclosing function, read like a dict."""

    def __init__(self, cell):
        self.cell = cell

    def get(self, _, missing):
        try:
            return self.cell.cell_contents
        except ValueError:
            return missing


def _ambient():
    """Modes of torch that decide what a forward pass computes."""
    modes = _torch.autocast_modes()
    return (torch.get_default_dtype(), *modes) + (_torch.autocast_types() if any(modes) else ())


def _content(tensor):
    return zlib.crc32(_torch.bytes_of(tensor))


def _equal(a, b):
    return bool(a == b) or (a != a and b != b)


def _short(value):
    if value is _MISSING:
        return "missing"
    text = repr(value) if isinstance(value, _PLAIN + (tuple, list)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."

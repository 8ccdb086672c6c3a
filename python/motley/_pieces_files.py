"""What workers leave for others to go on with: each its own pieces, of one step, in two files of a folder.

    FOLDER/step-12-3fa9c1/rank-1.pt      tensors one behind the other, each as torch.save has it
    FOLDER/step-12-3fa9c1/rank-1.json    whose pieces they are, where, of which step, and a checksum; written last

Whoever goes on reads what is there of a step on all machines. Pieces of any plan make whole tensors, which any other plan divides
again. Checkpoints have an index for torch.distributed.checkpoint besides (_shards.py). A file that is torn, truncated or another's is as if it were not there, and is said in one line.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import zlib

import torch

from . import _torch
from ._errors import UserError, warn
from ._state import place

FORM = "motley pieces 2"
_STEP = re.compile(r"step-(\d{1,18})-([0-9a-f]{6})$")
_RANK = re.compile(r"rank-(\d{1,9})\.json$")
_MOST_OF_JSON = 1 << 28  # bytes


def encoded(value):
    """Numbers, texts, lists, tuples and dicts as JSON has them; UserError for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"tensor": str(value.dtype).split(".")[1], "value": value.item()}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    raise UserError(f"[elastic] a {type(value).__name__} cannot be left for workers that are started later; leave it out of the state")


def decoded(value):
    """What encoded() had."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        kind = getattr(torch, value["tensor"])
        if not isinstance(kind, torch.dtype):
            raise ValueError("a type")
        return torch.tensor(value["value"], dtype=kind)
    if "dict" in value:
        return {decoded(key): decoded(item) for key, item in value["dict"]}
    return [decoded(item) for item in value["list"]] if "list" in value else tuple(decoded(item) for item in value["tuple"])


class Entry:
    """A worker's pieces of one step, as its .json says.

    rows: [[kind, name, part or None, type, shape]] in the order of the tensors; kind is "" of parameters and buffers and "state KEY" of
    what the optimizer has of a parameter; part is that of Worker.part(), None where the tensor is whole.
    """

    def __init__(self, where, said):
        self.where, self.said = where, said
        self.steps, self.run, self.rank, self.rows = said["steps"], said["run"], said["rank"], said["rows"]
        self.updates, self.ready, self.at = said["updates"], said["ready"], said.get("at", 0)

    @property
    def key(self):
        return self.steps, self.run, self.rank


def _check(said):
    """ValueError, KeyError or TypeError where it is not what write() wrote."""
    if said["form"] != FORM or not isinstance(said["ready"], bool) or not isinstance(said["numbers"], list):
        raise ValueError("another form")
    for key in ("steps", "updates", "rank", "bytes", "check"):
        if isinstance(said[key], bool) or not isinstance(said[key], int) or not 0 <= said[key] < 1 << 62:
            raise ValueError(key)
    if not re.fullmatch("[0-9a-f]{6}", said["run"]):
        raise ValueError("run")
    if len(said["items"]) != len(said["rows"]):
        raise ValueError("items")
    for at, length in (item for items in said["items"] for item in items):
        if not (isinstance(at, int) and isinstance(length, int) and 0 <= at <= at + length <= said["bytes"]):
            raise ValueError("items")
    for kind, name, part, type_name, shape in said["rows"]:
        if not (isinstance(kind, str) and isinstance(name, str) and isinstance(getattr(torch, type_name), torch.dtype)):
            raise ValueError("rows")
        numbers = shape if part is None else [*part, *shape]
        if not all(isinstance(n, int) and not isinstance(n, bool) and -1 <= n < 1 << 62 for n in numbers):
            raise ValueError("rows")
        if part is not None:
            outer, size, inner, begin, length, _, first, count = part
            if begin + length > size or first + count > outer * length * inner or min(begin, length, first, count) < 0:
                raise ValueError("part")


def synced(path, write):
    """Writes a file beside its place, so that it is there whole or not at all."""
    beside = path + ".part"
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(beside)
        raise
    os.replace(beside, path)


def write(folder, said, rows, tensors, cut_up=None):
    """Leaves a worker's pieces in a folder. said: steps, updates, run, rank, ready, numbers, and what goes with them.

    cut_up: the tensors that a row's is written as, given the row and the tensor.
    """
    at = os.path.join(folder, f"step-{said['steps']}-{said['run']}")
    os.makedirs(at, mode=0o700, exist_ok=True)
    name = os.path.join(at, f"rank-{said['rank']}")
    check, items = 0, []
    for tensor in tensors:
        check = zlib.crc32(_torch.bytes_of(tensor), check)

    def write_all(file):
        for row, tensor in zip(rows, tensors):
            items.append([])
            for one in (tensor,) if cut_up is None else cut_up(row, tensor):
                at = file.tell()
                _torch.save(one, file)
                items[-1].append([at, file.tell() - at])

    synced(name + ".pt", write_all)
    said = {"form": FORM, **said, "rows": rows, "items": items, "bytes": os.path.getsize(name + ".pt"), "check": check}
    synced(name + ".json", lambda file: file.write(json.dumps(said).encode()))
    with contextlib.suppress(OSError):  # the names too
        handle = os.open(at, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return at


def of_step(folder):
    """[Entry] of a step; what cannot be read is left out, with a warning."""
    entries = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not _RANK.fullmatch(name):
            continue
        try:
            if os.path.getsize(path) > _MOST_OF_JSON:
                raise ValueError("its size")
            with open(path, encoding="utf-8") as file:
                said = json.load(file)
            _check(said)
            if os.path.getsize(path[:-5] + ".pt") != said["bytes"]:
                raise ValueError("truncated")
            entries.append(Entry(path[:-5] + ".pt", said))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            warn(f"[elastic] {path} is torn or not a worker's pieces; it is left out")
    return entries


def found(folder):
    """[Entry] of all steps in a folder."""
    entries, steps = [], []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        steps = sorted(filter(_STEP.fullmatch, os.listdir(folder)))
    for step in steps:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile
            entries += of_step(os.path.join(folder, step))
    return entries


def tensors_of(entry):
    """The tensors of an entry, or None where the file is not what its .json says."""
    try:
        tensors, check = [], 0
        with open(entry.where, "rb") as file:
            for (*_, type_name, shape), items in zip(entry.rows, entry.said["items"]):
                found = []
                for at, length in items:
                    file.seek(at)
                    found.append(_torch.load(io.BytesIO(file.read(length))))
                flat = [one.reshape(-1) for one in found]
                tensors.append((flat[0] if len(flat) == 1 else torch.cat(flat or [torch.empty(0, dtype=getattr(torch, type_name))])).reshape(shape))
        for (_, _, part, type_name, shape), tensor in zip(entry.rows, tensors):
            if list(tensor.shape) != shape or tensor.dtype != getattr(torch, type_name) or (part is not None and tensor.numel() != part[7]):
                return None
            check = zlib.crc32(_torch.bytes_of(tensor), check)
        return tensors if len(tensors) == len(entry.rows) and check == entry.said["check"] else None
    except Exception:  # whatever a damaged file makes torch.load say
        return None


def remove(folder, keep):
    """Removes the steps of a folder for which keep(steps, run) is false."""
    with contextlib.suppress(OSError):
        for step in os.listdir(folder):
            match = _STEP.fullmatch(step)
            if match and not keep(int(match[1]), match[2]):
                shutil.rmtree(os.path.join(folder, step), ignore_errors=True)


# ---- of several workers ----------------------------------------------------------------------------------------------


def put(whole, piece, part, new):
    """Writes a piece into a flat whole tensor; `new`: a mask of the elements that it gives, None: all of its own."""
    if part is None:
        whole.copy_(piece.reshape(-1))
    elif new is None:
        place(whole, part, piece)
    else:
        alone = torch.zeros_like(whole)
        place(alone, part, piece)
        whole.copy_(torch.where(new, alone, whole))


class Source:
    """All entries of one step: who gives which elements of which tensor."""

    def __init__(self, entries):
        self.entries = sorted(entries, key=lambda entry: (entry.at, entry.rank))
        self.steps, self.updates, self.run = entries[0].steps, entries[0].updates, entries[0].run
        self.ready = any(entry.ready for entry in entries)  # what goes with the step, such as a learning rate, is that of the next
        self.table = {}  # ("" or "state KEY", name): [(entry, row number, part or None)]
        for entry in self.entries:
            for number, (kind, name, part, _, _) in enumerate(entry.rows):
                self.table.setdefault((kind, name), []).append((entry, number, part))

    def said(self, key):
        """What an entry says beside its tensors; of one that had begun the step after, where there is one."""
        return next((entry for entry in self.entries if entry.ready), self.entries[0]).said[key]

    def numbers(self):
        """{(name, key): number} of optimizer states that are no pieces."""
        return {(name, key): value for entry in reversed(self.entries) for name, key, value in entry.said["numbers"]}

    def giving(self, kind, name, elements):
        """[(entry, row number, part, a mask of the elements that it gives or None)], which cover a tensor; None: they do not."""
        rows, given, masks = self.table.get((kind, name), []), [], None
        for entry, number, part in rows:
            if part is None or part[7] == elements:
                return [(entry, number, part, None)]
        seen, count = set(), 0
        for entry, number, part in rows:
            outer, size, inner, *_ = part
            if outer * size * inner != elements or tuple(part[:5] + part[6:]) in seen or part[7] == 0:
                continue
            seen.add(tuple(part[:5] + part[6:]))
            if masks is None:
                masks = torch.zeros(elements, dtype=torch.bool)
            mine = torch.zeros(elements, dtype=torch.bool)
            place(mine, part, torch.ones(part[7], dtype=torch.bool))
            new = mine & ~masks
            more = int(new.sum())
            if more == 0:
                continue
            given.append((entry, number, part, None if more == part[7] else new))
            masks |= mine
            count += more
            if count == elements:
                return given
        return None

    def elements(self, kind, name):
        """Of the whole tensor."""
        entry, number, part = self.table[kind, name][0]
        return math.prod(entry.rows[number][4]) if part is None else math.prod(part[:3])

    def covers(self, wanted):
        """Whether all elements of tensors are there, and all of the optimizer's state that there is. wanted: [(name, elements)]"""
        states = [(kind, name, self.elements(kind, name)) for kind, name in self.table if kind]
        return all(
            elements == 0 or self.giving(kind, name, elements) is not None
            for kind, name, elements in [("", name, elements) for name, elements in wanted] + states
        )


def newest(entries, wanted):
    """The Source to go on from: the newest step of which all is there; None: there is none."""
    groups = {}
    for entry in entries:
        groups.setdefault((entry.steps, entry.run), {}).setdefault(entry.rank, entry)
    sources = [Source(list(group.values())) for group in groups.values()]
    # One that no worker had left behind yields to the step before.
    for source in sorted(sources, key=lambda s: (2 * s.updates - (0 if s.ready else 3), s.steps, s.run), reverse=True):
        if source.covers(wanted):
            return source
    return None

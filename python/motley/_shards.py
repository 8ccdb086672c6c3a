"""Checkpoints of elastic runs as torch.distributed.checkpoint reads them: an index beside the files of the workers.

    torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id="saved/step-50-3fa9c1")

That reader takes rectangles of tensors, each by itself: so workers write pieces that are none as several. motley itself never reads
the index, which is a pickle that may run code, but the workers' .json.
"""

import importlib
import math
import os
import pickle

import torch

from . import _torch

_INDEX, _BESIDE = ".metadata", "beside.pt"


def _run(shape, start, count):
    """[(offsets, sizes)] of `count` elements from `start` on of a tensor in the order of its memory, as rectangles in that order."""
    if count == 0:
        return []
    if not shape:
        return [([], [])]
    inner = math.prod(shape[1:])
    row, rest = divmod(start, inner)
    if rest or count < inner:
        taken = min(count, inner - rest)
        found = [([row, *offsets], [1, *sizes]) for offsets, sizes in _run(shape[1:], rest, taken)]
    else:
        rows = count // inner
        taken = rows * inner
        found = [([row] + [0] * (len(shape) - 1), [rows, *shape[1:]])]
    return found + _run(shape, start + taken, count - taken)


def rectangles(shape, part):
    """[(offsets, sizes)] that together are a worker's piece of a tensor, in the order of the piece. part: of Worker.part(); None: all of it."""
    if part is None:
        return [([0] * len(shape), list(shape))]
    outer, size, inner, begin, length, _, first, count = part
    if outer == 1:
        return _run(list(shape), begin * inner + first, count)
    cuts = [d for d in range(len(shape)) if math.prod(shape[:d]) == outer and shape[d] == size]
    if not cuts:  # of a tensor that was cut as one of another shape: row by row
        found, row = [], length * inner
        for o in range(outer):
            begins, ends = max(first, o * row), min(first + count, (o + 1) * row)
            found += _run(list(shape), (o * size + begin) * inner + begins - o * row, max(0, ends - begins))
        return found
    cut = cuts[0]
    found = _run([*shape[:cut], length, *shape[cut + 1 :]], first, count)
    return [([*offsets[:cut], offsets[cut] + begin, *offsets[cut + 1 :]], sizes) for offsets, sizes in found]


def cut_up(tensor, shape, part):
    """A piece as the tensors of its rectangles, each in memory of its own."""
    flat, at, found = tensor.detach().reshape(-1), 0, []
    for _, sizes in rectangles(shape, part):
        count = math.prod(sizes)
        found.append(flat[at : at + count].reshape(sizes).clone())
        at += count
    return found


class Layout:
    """Of a model: {name: shape} of parameters and buffers, [(key of state_dict(), name)], and names of each group of the optimizer."""

    def __init__(self, shapes, keys, groups):
        self.shapes, self.keys, self.groups = shapes, keys, groups


def layout(dist):
    """None where torch has no reader for it, or the model's tensors are not as they are written."""
    slots = dist._slots()
    if not _torch.FOLDERS or any(slot.complex for slot in slots.values()):
        return None
    names, groups = dist._optimized_names(), []
    for group in dist.optimizer.param_groups:
        groups.append(names[: len(group["params"])])
        names = names[len(group["params"]) :]
    return Layout({name: list(slot.tensor.shape) for name, slot in slots.items()}, dist._names()[0], groups)


class Index:
    """The index of one checkpoint: made between two steps, written on rank 0 when the files of all workers are there."""

    def __init__(self, layout, groups, steps):
        """groups: of the optimizer, without their parameters."""
        self.layout = layout
        named = [{**group, "params": list(names)} for group, names in zip(groups, layout.groups)]
        self.beside = {"steps": steps, "optimizer": {"state": {}, "param_groups": named}}

    def write(self, folder, entries, numbers, synced):
        """entries: of all workers; numbers: {(name, key): number} of the optimizer's state; synced: as _pieces_files has it."""
        package = "torch.distributed.checkpoint."
        self.metadata = importlib.import_module(package + "metadata")
        self.info = importlib.import_module(package + "filesystem")._StorageInfo
        self.tensors, self.stored, self.paths, keys = {}, {}, {}, {}
        for key, name in self.layout.keys:
            self.paths[f"model.{key}"] = ("model", key)  # in the model's order
            keys.setdefault(name, []).append(key)
        for entry in entries:
            for (kind, name, part, type_name, shape), items in zip(entry.rows, entry.said["items"]):
                paths = [("optimizer", "state", name, kind[6:])] if kind else [("model", key) for key in keys.get(name, ())]
                shape = shape if part is None else self.layout.shapes[name]
                for path in paths:
                    for (offsets, sizes), (at, length) in zip(rectangles(shape, part), items):
                        self._tensor(path, getattr(torch, type_name), shape, offsets, sizes, os.path.basename(entry.where), at, length)
        for (name, key), value in numbers.items():
            self.beside["optimizer"]["state"].setdefault(name, {})[key] = value
        synced(os.path.join(folder, _BESIDE), self._write_beside)
        self.paths = {key: path for key, path in self.paths.items() if key in self.tensors}
        tensors = {key: self.tensors[key] for key in self.paths}
        made = self.metadata.Metadata(state_dict_metadata=tensors, planner_data=self.paths, storage_data=self.stored)
        synced(os.path.join(folder, _INDEX), lambda file: pickle.dump(made, file))

    def _tensor(self, path, dtype, shape, offsets, sizes, file, at, length):
        key, m = ".".join(map(str, path)), self.metadata
        index = m.MetadataIndex(key, torch.Size(offsets))
        if index in self.stored:
            return
        self.paths[key] = path
        if key not in self.tensors:
            self.tensors[key] = m.TensorStorageMetadata(m.TensorProperties(dtype=dtype), torch.Size(shape), [])
        self.tensors[key].chunks.append(m.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self.stored[index] = self.info(file, at, length)

    def _write_beside(self, file):
        """What is no piece of a tensor."""
        flat, paths = importlib.import_module("torch.distributed.checkpoint._nested_dict").flatten_state_dict(self.beside)
        for key, value in flat.items():
            at = file.tell()
            _torch.save(value, file)
            if isinstance(value, torch.Tensor):
                self._tensor(paths[key], value.dtype, value.shape, [0] * value.dim(), list(value.shape), _BESIDE, at, file.tell() - at)
            else:
                self.paths[key] = paths[key]
                self.tensors[key] = self.metadata.BytesStorageMetadata()
                self.stored[self.metadata.MetadataIndex(key)] = self.info(_BESIDE, at, file.tell() - at)

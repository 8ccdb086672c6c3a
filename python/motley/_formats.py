"""Files of checkpoints: torch.save's, safetensors and torch.distributed.checkpoint's.

What is written is {"model", "optimizer", "steps"} with whole tensors under the model's own names; safetensors holds the model alone.
"""

import contextlib
import importlib
import os
import shutil
import tempfile

import torch

from . import _torch
from ._errors import UserError

FORMATS = ("torch", "safetensors", "dcp")


def format_of(path, wanted=None):
    """Of a file to write or read: what is wanted, else what its name or content says."""
    if wanted is not None and wanted not in FORMATS:
        raise UserError(f"[distribute] format is {wanted!r}; give one of {', '.join(FORMATS)}")
    if wanted is not None:
        return wanted
    if str(path).endswith(".safetensors"):
        return "safetensors"
    return "dcp" if os.path.isdir(path) else "torch"


def _safetensors():
    try:
        return importlib.import_module("safetensors.torch"), importlib.import_module("safetensors")
    except ImportError:
        raise UserError("[distribute] safetensors is not installed; pip install safetensors, or save with another name") from None


def _dcp():
    if not _torch.FOLDERS:
        raise UserError(f"[distribute] torch {torch.__version__} cannot write checkpoints of one process in this format; use 2.3 or newer")


def needs(kind):
    """UserError where a format cannot be written or read here."""
    if kind == "safetensors":
        _safetensors()
    elif kind == "dcp":
        _dcp()


def write(path, file, kind):
    """Writes a checkpoint beside `path` and puts it there when it is whole."""
    if kind == "dcp":
        _write_folder(path, file)
        return
    target = os.path.realpath(path)
    beside = target if os.path.exists(target) and not os.path.isfile(target) else f"{target}.part"
    if kind == "safetensors":
        writer, _ = _safetensors()
        tensors, seen = {}, set()
        for key, value in file["model"].items():
            if isinstance(value, torch.Tensor) and id(value) not in seen:  # tied ones under their first name
                if value.is_complex() and value.dtype != torch.complex64:
                    raise UserError(f"[distribute] {key} is {value.dtype}, which safetensors cannot hold; give another format")
                tensors[key] = value.contiguous()
                seen.add(id(value))
        writer.save_file(tensors, beside, {"format": "pt", "steps": str(file["steps"])})
    else:
        with open(beside, "wb") as opened:  # a device or a pipe as it is; never replaces one
            _torch.save(file, opened)
    if beside != target:
        os.replace(beside, target)


def _write_folder(path, file):
    target = os.path.realpath(path)
    beside, before = f"{target}.part", f"{target}.before"
    if os.path.exists(target) and not os.path.exists(os.path.join(target, ".metadata")):
        raise OSError(f"{path} is there and is no checkpoint")
    for left in (beside, before):
        shutil.rmtree(left, ignore_errors=True)
    _dcp()
    _torch.save_folder(file, beside)
    if os.path.exists(target):
        os.replace(target, before)
    os.replace(beside, target)
    shutil.rmtree(before, ignore_errors=True)


def read(path, kind):
    """{"model", and where they are there "optimizer" and "steps"} of a checkpoint."""
    if kind == "safetensors":
        reader, files = _safetensors()
        with files.safe_open(path, framework="pt") as opened:
            steps = (opened.metadata() or {}).get("steps", "0")
        return {"model": reader.load_file(path), "steps": int(steps) if steps.isdigit() else 0}
    if kind == "torch":
        return _torch.load(path)
    _dcp()
    convert = importlib.import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save
    folder = tempfile.mkdtemp()
    try:
        whole = os.path.join(folder, "whole.pt")
        convert(path, whole)
        file = torch.load(whole, map_location="cpu", weights_only=True)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    # Other programs write the model's tensors at the top, and the optimizer as "optim".
    if "model" not in file:
        file = {"model": {key: value for key, value in file.items() if isinstance(value, torch.Tensor)}, **file}
    if "optim" in file and "optimizer" not in file:
        file["optimizer"] = file["optim"]
    return file


def by_name(state, names):
    """The state of an optimizer under the names of its parameters, as torch.distributed.checkpoint has it."""
    return {
        "state": {names[index]: values for index, values in state["state"].items()},
        "param_groups": [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]],
    }


def by_index(state, names):
    """The same under their positions, as torch.optim has it; what has them already is left as it is."""
    if all(isinstance(key, int) for key in state["state"]) and all(isinstance(p, int) for g in state["param_groups"] for p in g["params"]):
        return state
    at = {name: index for index, name in enumerate(names)}
    unknown = [name for name in state["state"] if name not in at]
    if unknown:
        raise UserError(f"[distribute] the optimizer's state has {unknown[0]}, which is no parameter that this optimizer trains")
    return {
        "state": {at[name]: values for name, values in state["state"].items()},
        "param_groups": [{**group, "params": [at[name] for name in group["params"]]} for group in state["param_groups"]],
    }

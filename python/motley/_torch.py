"""What differs between the versions of torch, 1.13 to 2.x. Nothing else in the package asks for a version."""

import contextlib
import ctypes
import importlib
import inspect
import math
import os
import pickle
import warnings

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

_address = torch.Tensor.data_ptr  # another thread may be capturing, and has replaced it meanwhile
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
FOLDERS = VERSION >= (2, 3)  # torch.distributed.checkpoint reads and writes without a process group


def _storage(tensor):
    return tensor.untyped_storage() if VERSION >= (2, 0) else tensor._storage()


def memory_of(tensor):
    """The address of a tensor's memory and where in it the tensor begins."""
    return _storage(tensor).data_ptr(), tensor.storage_offset()


def bytes_in_memory(tensor):
    """How large the memory is of which a tensor is all, or a part."""
    return _storage(tensor).nbytes()


def bytes_of(tensor):
    """The memory of a tensor on the CPU as a memoryview of bytes; without numpy, which torch 2 need not have."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_uint8 * (flat.numel() * flat.element_size())).from_address(_address(flat))
    array.owner = flat  # lives as long as the view
    return memoryview(array).cast("B")


def storage_of(tensor):
    """Names a tensor's memory, also on the meta device, where it has no address."""
    return _storage(tensor)._cdata


def _math_attention():
    if VERSION >= (2, 3):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.MATH])
    return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=True, enable_mem_efficient=False)


@contextlib.contextmanager
def plain_operators():
    """Attention as matrix products and a softmax where it is no operator that can be cut, and compiled functions as they are written."""
    with contextlib.ExitStack() as stack:
        if VERSION >= (2, 0):
            stack.enter_context(_math_attention())
        if VERSION >= (2, 6):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        elif VERSION >= (2, 1):
            stack.enter_context(torch._dynamo.config.patch(disable=True))
        yield


def ready_to_capture():
    """Imports what torch 2 would import in the middle of a step, where functions of torch are replaced."""
    if VERSION >= (2, 1):
        importlib.import_module("torch._dynamo")


def autocast_modes():
    """Whether autocast is on, for GPUs and for CPUs."""
    if VERSION >= (2, 4):
        return torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled()


def set_autocast_modes(modes):
    if VERSION >= (2, 4):
        torch.set_autocast_enabled("cuda", modes[0])
        torch.set_autocast_enabled("cpu", modes[1])
    else:
        torch.set_autocast_enabled(modes[0])
        torch.set_autocast_cpu_enabled(modes[1])


def autocast_types():
    """To what autocast casts, for GPUs and for CPUs."""
    if VERSION >= (2, 4):
        return torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")
    return torch.get_autocast_gpu_dtype(), torch.get_autocast_cpu_dtype()


def _autocast_type(device):
    """The type to which attention casts its operands there; None: it does not."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _is_fused(query, key, value, mask, dropout_p, is_causal, shared):
    """Whether torch computes this attention by one kernel on the CPU (use_flash_attention_cpp of its sdp_utils)."""
    if query.dim() != 4 or key.shape != value.shape or dropout_p != 0 or 0 in query.shape or 0 in key.shape:
        return False
    if query.shape[0] != key.shape[0] or query.shape[3:] != key.shape[3:] or not query.is_floating_point():
        return False
    if query.shape[1] != key.shape[1] and not (shared and query.shape[1] % key.shape[1] == 0):
        return False
    if not query.dtype == key.dtype == value.dtype or any(t.stride(-1) != 1 for t in (query, key, value)):
        return False
    if mask is None:
        return True
    if is_causal or mask.requires_grad or mask.dim() not in (2, 4) or mask.dtype not in (torch.bool, query.dtype):
        return False
    whole = (*query.shape[:3], key.shape[2])
    return all(n in (1, size) for n, size in zip(mask.shape[::-1], whole[::-1]))


def attention_replacements():
    """[(place, name, function)]: scaled_dot_product_attention as the one operator that it is on the CPU, where it is one there.

    And torch.nn.Transformer does not compare masks with causal ones, which it does for speed.
    """
    if VERSION < (2, 4):
        return []
    plain, fused = F.scaled_dot_product_attention, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        lower = _autocast_type(query.device.type)
        if lower is not None:
            cast = [t.to(lower) if t is not None and t.dtype == torch.float32 else t for t in (query, key, value, attn_mask)]
            query, key, value, attn_mask = cast
        if not _is_fused(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **({"enable_gqa": True} if enable_gqa else {}))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
        return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]

    def is_causal_mask(mask, is_causal=None, size=None):
        return is_causal is True

    return [
        (F, "scaled_dot_product_attention", attention),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", is_causal_mask),
    ]


def check_replacements(is_known):
    """[(place, name, function)]: conditions on the numbers of tensors are checked where these are known, and else not."""
    if not hasattr(torch, "_check_tensor_all_with"):
        return []
    plain = torch._check_tensor_all_with

    def check(error_type, cond, message=None):
        if is_known(cond):
            plain(error_type, cond, message)

    return [(torch, "_check_tensor_all_with", check)]


# A context in which subclasses of Tensor are ordinary tensors.
without_subclasses = getattr(torch._C, "DisableTorchFunctionSubclass", torch._C.DisableTorchFunction)


def checkpoint_replacements(note):
    """What runs functions that torch.utils.checkpoint takes without use_reentrant, and nothing else: _rewrites.active.

    `note(function, arguments, options, result)` is told of each; without a result where it is not known.
    """
    module = torch.utils.checkpoint
    if VERSION < (2, 1):

        def plainly(function, preserve_rng_state=True, *arguments, **options):
            options.pop("context_fn", None)
            result = function(*arguments, **options)
            note(function, arguments, options, result)
            return result

        return [(module, "_checkpoint_without_reentrant", plainly)]

    # How many arguments come before the function's own differs between versions.
    kinds = inspect.signature(module._checkpoint_without_reentrant_generator).parameters.values()
    own = sum(kind.kind is kind.POSITIONAL_OR_KEYWORD for kind in kinds)

    def once(function, *arguments, **options):
        yield  # before the function
        note(function, arguments[own - 1 :], options)  # and after it

    return [(module, "_checkpoint_without_reentrant_generator", once)]


class _Plain:
    """In the place of the pickle module: reads tensors and plain values, and runs no other code.

    The weights_only of torch 1.13 cannot read real numbers.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) in (("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"{module}.{name} is no tensor and no plain value")


class _Writing:
    """A file whose first error waits: what torch.save writes with ends the process where that fails."""

    def __init__(self, file):
        self.file, self.error = file, None

    def write(self, data):
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self):
        pass


def save(value, file):
    """torch.save into an open file, which on a full disk is an OSError."""
    writing = _Writing(file)
    torch.save(value, writing)
    if writing.error is not None:
        raise writing.error
    file.flush()


def save_folder(value, folder):
    """torch.distributed.checkpoint of what one worker has, without the others."""
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    if "no_dist" in inspect.signature(checkpoint.save).parameters:
        checkpoint.save(value, checkpoint_id=folder, no_dist=True)
        return
    with warnings.catch_warnings():  # 2.4 asks the others with it, and calls the one that need not deprecated
        warnings.simplefilter("ignore")
        checkpoint.save_state_dict(value, checkpoint.FileSystemWriter(folder), no_dist=True)


def load(path):
    """torch.load of tensors and plain values, onto the CPU; of a path, or of bytes in memory."""
    if VERSION >= (2, 0):
        return torch.load(path, map_location="cpu", weights_only=True)
    # torch.load of 1.13 ignores its pickle_module.
    opened = open(path, "rb") if isinstance(path, (str, os.PathLike)) else contextlib.nullcontext(path)
    with opened as file, torch.serialization._open_zipfile_reader(file) as reader:
        return torch.serialization._load(reader, "cpu", _Plain)


def fix_launcher():
    """torchrun reads "0", its default, by looping over a flag type, which skips zero since Python 3.11."""
    from torch.distributed.elastic.multiprocessing import api, Std

    if Std.from_str("0") is not None:
        return
    read = Std.from_str

    def from_str(text):
        return Std.NONE if text == "0" else read(text)

    Std.from_str = staticmethod(from_str)
    assert api.Std is Std

"""What differs between the versions of torch, 1.13 to 2.x. Nothing else in the package asks for a version."""

import contextlib
import pickle

import torch
import torch.utils.checkpoint

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _storage(tensor):
    return tensor.untyped_storage() if VERSION >= (2, 0) else tensor._storage()


def memory_of(tensor):
    """The address of a tensor's memory and where in it the tensor begins."""
    return _storage(tensor).data_ptr(), tensor.storage_offset()


def storage_of(tensor):
    """Names a tensor's memory, also on the meta device, where it has no address."""
    return _storage(tensor)._cdata


def plain_attention():
    """Attention as matrix products and a softmax, not as one kernel that cannot be cut."""
    if VERSION >= (2, 3):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.MATH])
    if VERSION >= (2, 0):
        return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=True, enable_mem_efficient=False)
    return contextlib.nullcontext()


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

    def once(function, preserve_rng_state=True, context_fn=None, determinism_check=None, debug=None, *arguments, **options):
        yield  # before the function
        note(function, arguments, options)  # and after it

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


def load(path):
    """torch.load of tensors and plain values, onto the CPU."""
    if VERSION >= (2, 0):
        return torch.load(path, map_location="cpu", weights_only=True)
    # torch.load of 1.13 ignores its pickle_module.
    with open(path, "rb") as file, torch.serialization._open_zipfile_reader(file) as reader:
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

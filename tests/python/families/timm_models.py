"""Models of timm with random weights: full size as published, and a tiny one."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import torch
import torch.nn.functional as F

from families.family import Family


class _NoVision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Where torchvision is missing: timm wants its transforms of pictures, which models do not use."""

    class _Anything(type):
        def __getattr__(cls, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return name

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: self._Anything(name, (), {}) if not name.startswith("__") else None
        return module

    def exec_module(self, module):
        pass


_missing = [_NoVision()] if importlib.util.find_spec("torchvision") is None else []
sys.meta_path.extend(_missing)
import timm  # noqa: E402

for finder in _missing:  # nobody else is to find it
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


def pictures(size, classes):
    def batch(rows, generator=None):
        return torch.randn(rows, 3, size, size, generator=generator), torch.randint(0, classes, (rows,), generator=generator)

    return batch


def _family(name, model, tiny, size=32, full=224, optimizer=None):
    return Family(
        name,
        ((lambda: timm.create_model(model)), pictures(full, 1000)),
        ((lambda: timm.create_model(model, num_classes=5, **tiny)), pictures(size, 5)),
        loss_fn=F.cross_entropy,
        optimizer=optimizer,
    )


def families():
    return [
        _family("ResNet-50", "resnet50", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "stem_width": 8}),
        _family("ConvNeXt", "convnext_base", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
        _family("EfficientNet", "efficientnet_b0", {"drop_rate": 0.0, "drop_path_rate": 0.0}, size=64,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)),
        _family("Swin", "swin_base_patch4_window7_224",
                {"img_size": 56, "patch_size": 2, "window_size": 7, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4), "drop_path_rate": 0.0}, size=56),
        _family("DeiT", "deit_base_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}),
    ]  # fmt: skip

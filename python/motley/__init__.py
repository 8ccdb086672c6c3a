"""motley: training one model on every accelerator you have.

    capture(model, example_inputs, loss_fn)          a training step as a graph
    plan(graph, cluster)                             the fastest distributed program for it; of a model too
    cluster(file, profile)                           a cluster with measured numbers
    simulate(plan)                                   what every device does when
    save(thing, path), load(path)                    files that the motley program reads too
    distribute(model, example_inputs, loss_fn, cluster)     trains by a plan under torchrun
    wrap(model, optimizer, cluster)                  the same as a model that a training loop calls
    Elastic(folder)                                  how distribute(elastic=) goes on when workers are lost
    GradScaler(dist)                                 scales losses as torch.cuda.amp.GradScaler does
    DataSplitter(dataset, dist)                      each worker's rows of every batch

docs/python.md has more.
"""

from . import _loading

_loading.load()

from . import _device_numbers  # noqa: E402
from ._capture import capture  # noqa: E402
from ._data import DataSplitter  # noqa: E402
from ._distribute import Distributed, distribute  # noqa: E402
from ._elastic import Elastic  # noqa: E402
from ._errors import CaptureError, MismatchError, NoPlanError, PeerLost, UserError  # noqa: E402
from ._plan import Plan, cluster, load, plan, save, simulate  # noqa: E402
from ._scaler import GradScaler  # noqa: E402
from ._wrapped import wrap  # noqa: E402

__all__ = [
    "CaptureError", "DataSplitter", "Distributed", "Elastic", "GradScaler", "MismatchError", "NoPlanError", "PeerLost", "Plan",
    "UserError", "capture", "cluster", "distribute", "load", "plan", "save", "simulate", "wrap",
]  # fmt: skip
_device_numbers.register()
__version__ = "0.1.0"

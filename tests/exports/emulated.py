"""train.py of an export for DDP or FSDP2 as one of the workers of `motley emulate`, at its emulated speed:

    motley emulate --cluster C -- /usr/bin/python3 emulated.py DIR [arguments of train.py]

It sleeps after leaf modules, forward and backward, after backward passes and updates, as bench/measured_ddp.py does."""
import os
import pathlib
import runpy
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from measured_ddp import Padding  # noqa: E402

folder = sys.argv[1]
padding = Padding(float(os.environ["MOTLEY_SPEEDS"].split(",")[int(os.environ["RANK"])]))
torch.set_num_threads(1)
module = torch.nn.modules.module
module.register_module_forward_hook(lambda m, *_: None if list(m.children()) else padding.work_done((id(m), 0)))
module.register_module_full_backward_hook(lambda m, *_: None if list(m.children()) else padding.work_done((id(m), 1)))
backward = torch.Tensor.backward


def padded_backward(self, *args, **kwargs):
    backward(self, *args, **kwargs)
    padding.settle("backward")


torch.Tensor.backward = padded_backward
for kind in (torch.optim.SGD, torch.optim.AdamW):
    def step(self, *args, _step=kind.step, **kwargs):
        padding.mark()
        result = _step(self, *args, **kwargs)
        padding.settle("step")
        return result
    kind.step = step
sys.argv = [os.path.join(folder, "train.py"), *sys.argv[2:]]
sys.path.insert(0, folder)
runpy.run_path(sys.argv[0], run_name="__main__")

"""Trains a model of the zoo by a plan on workers that torchrun started, on CUDA devices too.

    torchrun --nproc_per_node=4 -m motley.run plan.json --steps 100
    torchrun --nproc_per_node=4 -m motley.run plan.json --device cuda --backend nccl
"""

import argparse
import os
import sys

from . import _motley
from ._distribute import group
from ._errors import UserError


def main():
    parser = argparse.ArgumentParser(prog="motley.run", description=__doc__.split("\n")[0])
    parser.add_argument("plan", help="plan file of a model of the zoo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="", help="text file or folder, for language models")
    parser.add_argument("--checkpoint", default="", help="folder to go on from, and to save to")
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--backend", help="of torch.distributed; default: gloo on the CPU, NCCL on CUDA devices")
    asked = parser.parse_args()
    try:
        workers = group(asked.device, asked.backend)

        def said(step, loss, seconds):
            if workers.rank == 0:
                print(f"step {step}  loss {loss:.4f}  {seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)

        median, predicted = _motley.train(
            asked.plan, workers.native, asked.steps, asked.seed, asked.data, asked.checkpoint, asked.lr, said
        )
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"motley: {error}", file=sys.stderr)
        sys.exit(2)
    if workers.rank == 0:
        print(f"{asked.steps} steps; median step {median * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

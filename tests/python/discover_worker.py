"""One of four workers that say they are of two machines, each with a fabric of its own, and are discovered so.

    discover_worker.py FILE
"""

import os
import sys

import torch

from motley import discover

made = []  # sizes of groups over the fabric inside


def fabric(store, rank, size, timeout):
    made.append(size)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


torch.distributed.Backend.register_backend("fabric", fabric, devices=["cpu"])
seen = discover._facts
discover._facts = lambda workers: {**seen(workers), "host": f"machine{workers.rank // 2}", "machine": f"machine{workers.rank // 2}"}
sys.argv[1:] = ["-o", sys.argv[1], "--backend", "gloo", "--inside", "fabric", "--no-profile"]
discover.main()
assert set(made) == {2}, made
if os.environ["RANK"] == "0":
    print("done inside", flush=True)

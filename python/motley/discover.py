"""Writes a cluster file of the machines that a launcher started workers on, one worker for each device.

    torchrun --nproc_per_node=8 -m motley.discover -o cluster.yaml
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_endpoint=HOST:29500 -m motley.discover -o cluster.yaml --profile cluster.profile
"""

import argparse
import json
import os
import socket
import subprocess
import sys

import torch

from . import _backend, _motley, _optim
from ._distribute import group
from ._errors import UserError


def _text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _printed(*command):
    """What a program prints; nothing where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=True, text=True, errors="replace").stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _memory():
    """Bytes of this machine's memory that may be used here."""
    total = 0
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _own_speed(rank):
    """The share of a core that an emulated device has; 0: it is none."""
    shares = os.environ.get("MOTLEY_SPEEDS", "").split(",")
    return float(shares[rank]) if rank < len(shares) and shares[rank] else 0.0


def _facts(workers):
    """What this worker knows of itself; Facts in src/discover/discover.h."""
    boot = _text("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    facts = {
        "host": socket.gethostname(),
        "machine": f"{boot} {os.stat('/proc/self/ns/net').st_ino}",  # containers have networks of their own
        "speed": _own_speed(workers.rank),
        "gpu": -1,
        "taken": 0,
        "topo": "",
        "query": "",
    }
    device = torch.device(workers.native.device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = visible[device.index] if device.index < len(visible) else ""
        facts.update(
            kind=properties.name,
            memory=total,
            taken=max(0, total - free - own - (1 << 30)),  # besides the context
            gpu=int(number) if number.isdigit() else device.index,
            topo=_printed("nvidia-smi", "topo", "-m"),
            query=_printed("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv"),
        )
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        facts.update(kind="cpu", memory=int(0.9 * _memory() / max(1, local)))
    return facts


def _optimizer_step(kind, parameters):
    """A step of the optimizer with which Python trains there: torch's makes a few calls for all parameters."""
    made = torch.optim.SGD(parameters, 1e-3, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters, 1e-3)

    def step():
        with _optim.fused(made):
            made.step()

    return step


def main():
    parser = argparse.ArgumentParser(prog="motley.discover", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", required=True, help="cluster file to write")
    parser.add_argument("--profile", help="profile to write besides; default: the cluster file's name with .profile")
    parser.add_argument("--no-profile", action="store_true", help="measure links and devices alone, no operators")
    parser.add_argument("--name", help="of the cluster; default: the file's")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--backend", help="of torch.distributed; default: gloo on the CPU, NCCL on CUDA devices")
    parser.add_argument("--inside", default="", help="backend of the workers of one machine, if another: measured so, and written into the file")
    parser.add_argument("--json", action="store_true", help="print what was measured as one JSON object")
    asked = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    name = asked.name or os.path.splitext(os.path.basename(asked.output))[0]
    profile = None if asked.no_profile else asked.profile or os.path.splitext(asked.output)[0] + ".profile"
    try:
        for path in filter(None, (asked.output, profile)):
            folder = os.path.dirname(path) or "."
            if rank == 0 and not os.access(folder, os.W_OK):
                raise UserError(f"[discover] {path}: {folder} is no folder that can be written to")
        torch.set_num_threads(1)
        workers = group(asked.device, asked.backend)
        if asked.inside:
            _backend.check(asked.inside, torch.device(workers.device).type)
            if workers.size > 1:
                _backend.begin(workers.native)

        def said(what):
            if workers.rank == 0:
                print(f"measuring {what}", file=sys.stderr, flush=True)

        facts = json.dumps(_facts(workers))
        on_cpu = torch.device(workers.native.device).type == "cpu"
        yaml, measured, warnings, drawing, ranks, seconds, report = _motley.discover(
            workers.native, facts, name, profile is not None, asked.inside, said, None if on_cpu else _optimizer_step
        )
    except UserError as error:
        if rank == 0:
            print(f"motley: {error}", file=sys.stderr)
        sys.exit(2)
    if workers.rank != 0:
        return
    for path, text in ((asked.output, yaml), (profile, measured)):
        if path is not None:
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(path + ".new", path)
    if asked.json:
        print(report)
        return
    print(drawing, end="")
    for warning in warnings:
        print(f"looks wrong: {warning}")
    if ranks != sorted(ranks):
        print(f"the file's devices are, in its order, ranks {', '.join(map(str, ranks))}: start the workers so")
    print(f"written to {asked.output}{f' and {profile}' if profile else ''} after {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""plan(), simulate(), load() and save(): what needs a graph and a cluster, but no workers."""

import json
import math
import os
import time
import warnings

import torch

from . import _motley
from ._errors import NoPlanError, UserError

_CLUSTERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clusters")


def cluster_of(cluster):
    """A cluster file, the name of a shipped cluster, or the YAML text of one."""
    if isinstance(cluster, _motley.Cluster):
        return cluster
    if isinstance(cluster, os.PathLike):
        cluster = os.fspath(cluster)
    if not isinstance(cluster, str):
        raise UserError(f"[plan] cluster is a {type(cluster).__name__}; give a file, a shipped name or YAML text")
    if "\n" in cluster:
        return _motley.parse_cluster(cluster, "cluster")
    shipped = os.path.join(_CLUSTERS, cluster + ".yaml")
    return _motley.load_cluster(shipped if os.path.exists(shipped) else cluster)


class Plan:
    """A distributed program for a graph on a cluster; print it to read it in words.

    predicted_step_s, lower_bound_s   seconds: of this plan, and of any program at its shares
    cluster, devices                  the devices that the plan uses, and their numbers in the cluster that it was made for
    ratios                            share of each device of what is cut
    peak_memory_bytes                 of each device
    baselines                         what the usual strategies would take (of a plan just made)
    """

    def __init__(self, native, baselines=(), search_s=0.0, reason="", devices=None, made_for=None):
        self._native, self.baselines, self.search_s, self.reason = native, list(baselines), search_s, reason
        self.devices = list(range(len(native.cluster))) if devices is None else list(devices)
        self._made_for = made_for or (native.cluster.name, len(native.cluster))  # a cluster's name and devices

    def __getattr__(self, name):
        if name in ("engine", "model", "batch", "ratios", "cluster", "predicted_step_s", "lower_bound_s",
                    "peak_memory_bytes", "optimizer", "precision", "inexact", "micro_batches", "stages"):
            return getattr(self._native, name)
        raise AttributeError(name)

    def __str__(self):
        name, size = self._made_for
        if len(self.devices) == size:
            return str(self._native)
        return f"{self._native}  devices     {_motley.part_in_words(self.devices, size, name)}\n"

    def check(self, memory_limit=True):
        """What is wrong with the plan, by the independent checker; an empty list if it is sound."""
        return self._native.check(memory_limit)

    def graph(self):
        return self._native.graph()

    def save(self, path):
        self._native.save(os.fspath(path))


_PRECISIONS = {
    None: None, "fp32": None, torch.float32: None, "bf16": "bf16", torch.bfloat16: "bf16", "fp16": "f16", "f16": "f16", torch.float16: "f16",
}  # fmt: skip


def precision_of(precision):
    """The name of a type of 16 bits as graphs have it; None: the type of the parameters."""
    try:
        return _PRECISIONS[precision]
    except (KeyError, TypeError):
        raise UserError(f"[plan] precision is {precision!r}; give 'bf16' or 'fp16', or None for the type of the parameters") from None


ENGINES = ("spmd", "pipeline", "grid", "auto")


def plan(graph, cluster, *, optimizer="adamw", memory_limit=True, time_limit=None, seed=0, ratios=None, engine="spmd",
         all_devices=False, precision=None):
    """The fastest program found for a graph on a cluster.

    graph         of capture()
    cluster       a cluster file, the name of a shipped cluster, or the YAML text of one
    optimizer     'adamw' or 'sgd': how much state each parameter has
    memory_limit  whether plans must fit the devices' memory, by what is planned (ARCHITECTURE.md says what is not counted)
    time_limit    seconds that it may take; the best plan found in them is returned
    ratios        shares of the devices; without them they are searched too
    engine        'spmd': one program. 'pipeline', 'grid': stages of the model, fed with micro-batches, if loss and gradients
                  are provably sums over them; a UserError names what mixes samples otherwise. Batch normalisation sees a
                  micro-batch at a time, with a warning. 'auto': the fastest of the three that computes what one device would.
    all_devices   whether one program has to use every device; otherwise it leaves out those without which the step is
                  faster, and the plan's `devices` says which it uses. Given ratios are of all devices
    precision     'bf16' or 'fp16': computes in 16 bits, with parameters, gradients and optimizer state in the parameters' type

    Raises NoPlanError where nothing fits.
    """
    if engine not in ENGINES:
        raise UserError(f"[plan] engine is {engine!r}; give {', '.join(map(repr, ENGINES[:-1]))} or {ENGINES[-1]!r}")
    if optimizer not in ("adamw", "sgd"):
        raise UserError(f"[plan] optimizer is {optimizer!r}; give 'adamw' or 'sgd'")
    name = precision_of(precision)

    def computed(graph):
        return graph if name is None else graph.in_precision(name)

    devices = cluster_of(cluster)
    if ratios is not None and len(ratios) != len(devices):
        raise UserError(f"[plan] ratios has {len(ratios)} numbers; the cluster has {len(devices)} devices")
    if time_limit is not None and not (isinstance(time_limit, (int, float)) and 0 < time_limit < math.inf):
        raise UserError(f"[plan] time_limit is {time_limit!r}; give seconds, more than 0, or None")
    until = math.inf if time_limit is None else time.monotonic() + time_limit

    def left():
        return max(min(until - time.monotonic(), 1e30), 1e-9)

    found, candidates, reasons = None, [], []
    if engine in ("spmd", "auto"):
        found = _motley.plan(computed(graph), devices, optimizer, memory_limit, left(), seed, ratios or [], not all_devices)
        if found.plan is None:
            reasons.append(found.reason)
        else:
            made_for = devices.name, len(devices)
            candidates.append(Plan(found.plan, found.baselines, found.search_s, found.reason, found.devices, made_for))
    for other in ("pipeline", "grid") if engine == "auto" else (engine,) if engine != "spmd" else ():
        if ratios is not None:
            raise UserError(f"[plan] ratios are shares of engine='spmd'; engine is {engine!r}")
        plans, search_s, reason, refused = _motley.engine_plans(other, computed(graph), devices, optimizer, memory_limit, left(), seed)
        if refused and engine != "auto":
            raise UserError(reason)
        if engine == "auto":
            plans = [made for made in plans if not made.inexact]
            reason = reason or "batch normalisation would see a micro-batch at a time"
        if not plans:
            reasons.append(f"{other}: {reason}")
        candidates += [Plan(made, found.baselines if found else (), search_s, reason) for made in plans]
    if not candidates and time.monotonic() > until:
        raise NoPlanError(
            f"[plan] no plan for {graph.model} on {devices.name} was found in {time_limit:g} s: {'; '.join(reasons)}; give a longer "
            "time_limit"
        )
    if not candidates:
        raise NoPlanError(
            f"[plan] no plan for {graph.model} on {devices.name} fits: {'; '.join(reasons)}; use more or larger devices, a "
            "smaller batch, or memory_limit=False"
        )
    for made in candidates:
        made._native.precision = name or "f32"
    best = candidates[0] if len(candidates) == 1 else min(candidates, key=lambda made: simulate(made)["step_s"])
    if best.inexact:
        warnings.warn(
            f"[plan] {best.inexact}, unlike on one device; engine='spmd' computes the same as one device", stacklevel=2
        )
    return best


def simulate(plan, trace=None):
    """Plays one step of a plan, device by device.

    Returns a dict: step_s, overlap, load_balance, and for each of devices busy_s, comm_s, exposed_comm_s, idle_s and
    peak_memory_bytes. `trace` names a file to write for ui.perfetto.dev.
    """
    return plan._native.simulate("" if trace is None else os.fspath(trace))


def save(thing, path):
    """Writes a graph or a plan to a file that the motley program reads too.

    A graph just captured is captured at a few more batches: the file then gives it at others too, if its sizes grow with the
    batch in a straight line. If not, a warning says so, and the file has this batch alone.
    """
    if isinstance(thing, Plan):
        thing.save(path)
        return
    alone = thing.save(os.fspath(path), getattr(thing, "at", None))
    if "straight line" in alone or " node " in alone:
        warnings.warn(f"[save] {path} has the graph at batch {thing.batch} alone: {alone}", stacklevel=2)


def load(path):
    """A plan or a graph from a file."""
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise UserError(f"[load] {path} cannot be read: {error.strerror}; give a file that save() wrote") from None
    except (ValueError, RecursionError):
        raise UserError(f"[load] {path} is not JSON; give a file that save() or the motley program wrote") from None
    if isinstance(content, dict) and "motley_graph" in content:
        batch = content.get("batch")
        graph = _motley.load_graph(path, batch if isinstance(batch, int) and 0 <= batch < 2**62 else 0)
        if "other" in content:
            graph.at = lambda samples: _motley.load_graph(path, samples)
        return graph
    return Plan(_motley.load_plan(path))

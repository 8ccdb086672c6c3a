"""One of three workers: the cases of files, by one program and by a pipeline, against plain PyTorch in double precision.

    corpus_worker.py FILE ... [--engine spmd|pipeline|duplex] [--case NAME]

duplex: by one program on the batch in two parts.
"""

import argparse
import copy
import json
import os
import sys
import time
import warnings

import torch

import corpus
import motley
import support

parser = argparse.ArgumentParser()
parser.add_argument("files", nargs="+")
parser.add_argument("--engine", choices=["spmd", "pipeline", "duplex"])
parser.add_argument("--case")
options = parser.parse_args()

torch.set_num_threads(1)
warnings.simplefilter("ignore")


CLUSTERS = {"spmd": support.CLUSTER, "duplex": support.CLUSTER, "pipeline": os.path.join(support.HERE, "apart-3.yaml")}


def built(case):
    torch.manual_seed(0)
    return case.build()


def off(state, wanted):
    """How far a state is off, relative to the largest number of each tensor, and where."""
    if list(state) != list(wanted):
        return float("inf"), f"keys {list(state)} for {list(wanted)}"
    worst = (0.0, "")
    for key, value in wanted.items():
        got = state[key]
        if got.shape != value.shape or got.dtype != value.dtype:
            return float("inf"), f"{key} is {got.dtype} {list(got.shape)}"
        if value.numel() and not torch.equal(got, value):
            wide = torch.complex128 if value.is_complex() else torch.float64
            scale = max(1.0, value.to(wide).abs().max().item())
            error = (got.to(wide) - value.to(wide)).abs().max().item() / scale
            worst = max(worst, (float("inf") if error != error else error, key))
    return worst


def cut(dist):
    """How many inputs and parameters the plan cuts."""
    parts = dist._held.parts["parameter"].values()
    return sum(dist._worker.input_placement(name).startswith("S") for name, *_ in dist._leaves) + sum(
        length < size for _, size, _, _, length, *_ in parts
    )


def wrong(where):
    return {"error": float("inf"), "limit": 0.0, "where": where}


def run(case, engine):
    torch.set_default_dtype(torch.float32 if case.single else torch.float64)
    limit = 1e-5 if case.single else 1e-9 if engine == "duplex" else 1e-8
    model, loss_fn, batch = built(case)
    batches = support.batches_of(batch, corpus.STEPS)
    plain, plain_loss, _ = built(case)
    start = time.time()
    expected = case.train(corpus.Plain(plain, plain_loss, case.optimizer(plain.parameters())), copy.deepcopy(batches))
    try:
        optimizer = case.optimizer(model.parameters())
        kinds = {"spmd": {"all_devices": True}, "pipeline": {"engine": engine}, "duplex": {"all_devices": True, "duplex": 2}}[engine]
        if case.library:
            kinds["time_limit"] = 10
        dist = motley.distribute(model, batches[0], loss_fn, CLUSTERS[engine], optimizer, **kinds)
        if "not exact" in str(dist.plan):  # batch normalisation by micro-batch, with a warning
            return {"inexact": str(dist.plan)}
        losses = case.train(corpus.By(dist, model, optimizer), copy.deepcopy(batches))
        wanted = plain.state_dict()
        if isinstance(plain_loss, torch.nn.Module) and list(plain_loss.parameters()):
            wanted.update(plain_loss.state_dict(prefix="loss_fn."))
        error, where = off(dist.state_dict(), wanted)
    except motley.MismatchError as mismatch:  # noticed, but wrong
        return wrong(str(mismatch))
    except motley.UserError as refusal:
        return {"refused": str(refusal)}
    for i, (got, one) in enumerate(zip(losses, expected)):
        if not abs(got - one) <= limit * max(1, abs(one)):
            return wrong(f"loss {i}: {got} for {one}")
    if len(losses) != len(expected):
        return wrong(f"{len(losses)} losses for {len(expected)}")
    if len({round(loss, 9) for loss in expected}) < 3:
        return wrong(f"the reference tests nothing: {expected}")
    in_parts = "  duplex " in str(dist.plan) if engine == "duplex" else dist.plan.micro_batches > 1
    return {
        "error": error, "limit": limit, "where": where, "stages": dist.plan.stages, "in_parts": in_parts,
        "cut": cut(dist), "seconds": time.time() - start,
    }  # fmt: skip


report = {}
for file in options.files:
    for case in corpus.cases(file):
        if options.case and case.name != options.case:
            continue
        for engine in [options.engine] if options.engine else ["spmd", "pipeline"]:
            print(f"{file}.{case.name}.{engine}", file=sys.stderr, flush=True)  # tells where it hangs
            report[f"{file}.{case.name}.{engine}"] = {**run(case, engine), "wanted": case.refused.get(engine, "")}
if motley._distribute.group().rank == 0:
    print("REPORT" + json.dumps(report))

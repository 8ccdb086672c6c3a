#!/usr/bin/env python3
"""The models that people train, at full size: how long capture takes, what runs whole, the plan, and what it gains.

    ./dev bench models [--models NAME,..] [--cluster NAME] [--time-limit SECONDS]

Models are those of tests/python/families (configurations with random weights, on the meta device, with their library's
defaults), planned in bf16 for a mixed cluster. Writes docs/models.md. It runs in the environment with torch 2 that `./dev
setup` makes.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD, PYTHON = ROOT / "build-torch2", ROOT / ".torch2" / "bin" / "python"
LIBRARIES = ("transformers", "timm", "diffusers")
HEAD = """# Models people train

Written by `./dev bench models`; do not edit. {libraries}, torch {torch}: models with random weights by their published
configurations and their library's defaults, captured on the meta device (no weights in memory) and planned for `{cluster}` in bf16
within {limit:g} s. Every one of them is also trained in a tiny size on three unequal workers, by one program and by a pipeline, and
compared with plain PyTorch ([tests/python/families](../tests/python/families), ctest `python_models_*`; what a pipeline refuses is
said there).

"Whole" are operators that motley has no rule for: every device computes all of them. The gain is over the fastest of what one would
run otherwise ([opponents](plan.md)): DDP, FSDP and Megatron's degrees, on all devices or the fastest group alone, with the best of
their knobs, as far as these were found in the same time (of the largest models only some were), in PyTorch's or Megatron's own runtime. It is below 1 where a model has batch normalisation: Megatron's replicas normalise
their own samples, which is not the step of one device, and is left to those who ask for it (`--engine grid`).

| model | of | parameters | batch | operators | captured | whole | planned | step | gain | over |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def captured(family, path):
    """(seconds, graph) of a family's model at full size; the graph is also at `path`."""
    import torch

    import motley

    build, batch = family.full
    with torch.device("meta"):
        model = build()
        given = batch(family.rows)
    given = given if isinstance(given, tuple) else (given,)
    start = time.perf_counter()
    graph = motley.capture(model, given, family.loss_fn, name=family.name)
    seconds = time.perf_counter() - start
    graph.save(path)
    return seconds, graph, sum(p.numel() for p in model.parameters())


def whole(graph):
    """Operators without a rule, with how often they occur."""
    ops = graph.ops
    counts = {op: ops.count(op) for op in graph.unknown_ops}
    return ", ".join(f"{op.removeprefix('aten::')} ({n})" for op, n in sorted(counts.items())) or "none"


def row(library, family, options, folder):
    path = os.path.join(folder, "graph.json")
    seconds, graph, parameters = captured(family, path)
    start = time.perf_counter()
    done = subprocess.run(
        [BUILD / "motley", "plan", path, "--cluster", options.cluster, "--batch", str(graph.batch), "--precision", "bf16", "--time-limit", str(options.time_limit),
         "--json", "-o", os.path.join(folder, "plan.json")], capture_output=True, text=True,
    )  # fmt: skip
    planned = time.perf_counter() - start
    cells = [family.name, library, f"{parameters / 1e9:.2f}e9", graph.batch, len(graph.ops), f"{seconds:.2f} s", whole(graph), f"{planned:.1f} s"]
    if done.returncode == 3:
        in_time = f"was found in {options.time_limit:g} s" not in done.stderr
        return cells + ["no plan fits" if in_time else "none found in time", "", ""]
    if done.returncode != 0:
        raise SystemExit(f"{family.name}: {done.stderr}")
    plan = json.loads(done.stdout)
    usual = ("ddp", "fsdp", "megatron")
    opponents = [o for o in plan["baselines"] if o["name"].split("-")[0] in usual]
    in_time = opponents and not any("time ran out" in o["reason"] for o in opponents)
    opponents = [o for o in opponents if o["feasible"]]
    if not opponents:
        return cells + [f"{plan['predicted_step_s']:.3g} s", "", "nothing else fits" if in_time else "none found in time"]
    best = min(opponents, key=lambda o: o["predicted_step_s"])
    return cells + [f"{plan['predicted_step_s']:.3g} s", f"{best['predicted_step_s'] / plan['predicted_step_s']:.2f}x", best["name"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="")
    parser.add_argument("--cluster", default="hapt-64")
    parser.add_argument("--time-limit", type=float, default=10)
    options = parser.parse_args()
    import torch

    import support

    warnings.simplefilter("ignore")
    wanted = set(filter(None, options.models.split(",")))
    libraries = ", ".join(f"{name} {__import__(name).__version__}" for name in ("transformers", "diffusers"))
    lines = [HEAD.format(libraries=libraries + " and timm", torch=torch.__version__, cluster=options.cluster, limit=options.time_limit)]
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            for family in support.load_file(f"{ROOT}/tests/python/families/{library}_models.py").families():
                if family.full is None or (wanted and family.name not in wanted):
                    continue
                cells = row(library, family, options, folder)
                print(*cells, sep="  ", flush=True)
                lines.append("| " + " | ".join(map(str, cells)) + " |\n")
    if not wanted:
        (ROOT / "docs" / "models.md").write_text("".join(lines))


if __name__ == "__main__":
    if os.environ.get("MOTLEY_MODELS_BENCH") != "inside":
        if not (BUILD / "python").is_dir():
            raise SystemExit("there is no build with torch 2: run `./dev torch2`, which makes build-torch2/")
        paths = os.pathsep.join([str(BUILD / "python"), str(ROOT / "tests" / "python")])
        environment = dict(os.environ, PYTHONPATH=paths, MOTLEY_MODELS_BENCH="inside")
        sys.exit(subprocess.call([PYTHON, __file__, *sys.argv[1:]], env=environment))
    main()

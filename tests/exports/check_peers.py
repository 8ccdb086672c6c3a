#!/usr/bin/env python3
"""Asks the frameworks themselves whether exported plans are theirs.

    tests/exports/check_peers.py --venv DIR --plans 1000       makes the venv first, if it is not there
    MOTLEY_EXPORT_TO=DIR MOTLEY_EXPORT_CASES=1000 build/tests/test_export --gtest_filter=Exports.WritesRandomPlansForPeers   what it checks

Megatron-LM: its argument parser, validate_args and layout. torchtitan 0.2: its configuration. torch: the schedule's CSV, as
torch.distributed.pipelining loads it, with its own validation. DeepSpeed: DeepSpeedConfig. Galvatron: config2strategy.
FlagScale is not on the package index: its rules are motley's own (src/export/flagscale.cc) and here once more, by hand."""
import argparse
import collections
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import traceback
import warnings

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ["torch==2.13.0 numpy", "scipy pyyaml packaging pydantic tokenizers datasets torchdata tensorboard pillow tyro einops",
            "psutil py-cpuinfo hjson msgpack ninja regex tqdm triton"]
WITHOUT_DEPENDENCIES = ["torchtitan>=0.2,<0.3", "megatron-core", "deepspeed"]


def make_venv(path, python):
    """An environment whose last file says that it is whole; an interrupted one is made anew."""
    whole = pathlib.Path(path, "whole")
    if whole.exists():
        return
    subprocess.run([python, "-m", "venv", "--clear", path], check=True)
    pip = [f"{path}/bin/pip", "install", "-q"]
    for packages in PACKAGES:
        subprocess.run(pip + packages.split(), check=True)
    for package in WITHOUT_DEPENDENCIES:
        subprocess.run(pip + ["--no-deps", package], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    # Galvatron's package compiles extensions; its Python files are enough.
    subprocess.run([f"{path}/bin/pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "hetu-galvatron",
                    "-d", f"{path}/galvatron"], check=True)
    archive = next(pathlib.Path(path, "galvatron").glob("*.tar.gz"))
    subprocess.run(["tar", "xzf", archive, "-C", f"{path}/galvatron", "--strip-components=1"], check=True)
    whole.touch()


def ranks(folder):
    return len((folder / "ranks.txt").read_text().splitlines())


def check_megatron(folder):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.training import arguments
    words = (folder / "arguments.txt").read_text().split("\n")[:-1]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    args = parser.parse_args(words + ["--transformer-impl", "local", "--no-persist-layer-norm",
                                      "--no-rope-fusion", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion",
                                      "--no-bias-gelu-fusion"])
    args.rank, args.world_size = 0, ranks(folder)
    arguments.get_device_arch_version = lambda: 9  # there is no device to ask
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as launch.sh
    arguments.validate_args(args, {})
    from megatron.training.argument_utils import core_transformer_config_from_args
    config = core_transformer_config_from_args(args)
    if args.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout
        assert isinstance(layout, PipelineParallelLayerLayout), layout
        layout.validate_layer_layout(config.num_layers, args.mtp_num_layers)


def check_torchtitan(folder):
    from torchtitan.config import ConfigManager
    config = ConfigManager().parse_args(["--job.config_file", str(folder / "train.toml")])
    from torchtitan.distributed import ParallelDims
    p = config.parallelism
    ParallelDims(dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree,
                 cp=p.context_parallel_degree, tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree,
                 ep=p.expert_parallel_degree, etp=p.expert_tensor_parallel_degree, world_size=ranks(folder))
    if p.pipeline_parallel_degree == 1:
        return
    assert config.training.local_batch_size % p.pipeline_parallel_microbatch_size == 0
    parts = p.module_fqns_per_model_part
    names = [name for part in parts for name in part]
    layers = [int(name[7:]) for name in names if name.startswith("layers.")]
    assert names[0] == "tok_embeddings" and names[-2:] == ["norm", "output"] and layers == list(range(len(layers)))
    count = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    check_schedule(folder / p.pipeline_parallel_schedule_csv, p.pipeline_parallel_degree, len(parts), count)


def check_schedule(path, ranks_, stages, count):
    from torch.distributed.pipelining import schedules

    class Schedule(schedules._PipelineScheduleRuntime):
        def __init__(self):
            self._num_stages, self.pp_group_size, self._n_microbatches = stages, ranks_, count
            self._stages, self._defer_pp_recv = [], False
            self.stage_index_to_group_rank = {s: s % ranks_ for s in range(stages)}
            self.pipeline_order, self.pipeline_order_with_comms = {}, {}

    schedule = Schedule()
    schedule._load_csv(str(path))
    assert len(schedule.pipeline_order_with_comms) == ranks_, (len(schedule.pipeline_order_with_comms), ranks_)
    compute = {r: [schedules._Action.from_str(c) if c.strip() else None for c in line.split(",")]
               for r, line in enumerate(path.read_text().splitlines())}
    schedules._validate_schedule(compute, ranks_, stages, count)


def check_deepspeed(folder):
    from deepspeed import comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig
    text = json.loads((folder / "ds_config.json").read_text())
    stages = json.loads((folder / "stages.json").read_text())
    parts = stages["parts"]
    world = ranks(folder)
    assert world == stages["replicas"] * stages["tensors"] * (len(parts) - 1)

    class Mpu:
        def get_data_parallel_world_size(self):
            return stages["replicas"]
    dist.get_rank = lambda: 0  # there are no other processes
    config = DeepSpeedConfig(text, mpu=Mpu())
    assert config.train_batch_size == text["train_batch_size"], config.train_batch_size
    assert config.zero_config.stage == text["zero_optimization"]["stage"]
    assert len(parts) == 2 or config.zero_config.stage <= 1


def check_galvatron(folder):
    from galvatron.utils.config_utils import config2strategy
    config = json.loads((folder / "galvatron_config.json").read_text())
    pp, tp, flags, dp_types, sp, vtp, _ = config2strategy(config)
    layers = len(tp)
    division = [int(n) for n in config["pp_division"].split(",")]
    world = ranks(folder)
    assert len(flags) == len(dp_types) == len(sp) == layers == sum(division) and len(division) == pp
    assert all(world % (pp * t) == 0 for t in tp) and vtp in tp
    assert config["global_bsz"] % (config["chunks"] * (world // pp // min(tp))) == 0
    assert len(config["checkpoint"].split(",")) == layers


def check_flagscale(folder):
    import yaml
    train = yaml.safe_load((folder / "train" / "train.yaml").read_text())
    system, model, hetero = train["system"], train["model"], train["system"]["hetero"]
    meshes, split = hetero["hetero_process_meshes"], hetero["hetero_pipeline_layer_split"]
    assert len(meshes) % 5 == 0
    meshes = [meshes[i:i + 5] for i in range(0, len(meshes), 5)]
    assert sum(m[4] for m in meshes) == system["pipeline_model_parallel_size"] == len(split)
    assert sum(split) == model["num_layers"] and len(meshes) == len(hetero["hetero_device_types"])
    assert len({m[1] for m in meshes}) == 1
    assert all(meshes[0][3] * model["micro_batch_size"] % m[3] == 0 for m in meshes)
    assert sum(m[0] * m[1] * m[3] * m[4] for m in meshes) == ranks(folder)
    assert all(model["num_attention_heads"] % m[0] == 0 for m in meshes)
    assert model["global_batch_size"] % (meshes[0][3] * model["micro_batch_size"]) == 0
    if len({m[0] for m in meshes}) > 1:
        assert system["sequence_parallel"] is True
    again = system.get("recompute", {}).get("recompute_granularity_per_stage_micro_batch")
    for row in again or []:
        assert sum(row[1::2]) * meshes[0][3] * model["micro_batch_size"] == model["global_batch_size"]
    experiment = yaml.safe_load((folder / "experiment.yaml").read_text())["experiment"]
    hosts = (folder / "hostfile").read_text().splitlines()
    assert experiment["runner"]["nnodes"] == len(hosts) and all("type=" in h for h in hosts)
    assert experiment["runner"]["rdzv_backend"] == "static"


def check_rows(folder):
    plan = json.loads((folder / "rows.json").read_text())
    origin = json.loads((folder / "motley.json").read_text())
    assert sum(plan["rows"]) * plan["micro_batches"] == origin["batch"] and len(plan["rows"]) == ranks(folder)
    for name in ("train.py", "model.py"):
        compile((folder / name).read_text(), name, "exec")


CHECKS = {"ddp": check_rows, "deepspeed": check_deepspeed, "flagscale": check_flagscale, "fsdp2": check_rows,
          "galvatron": check_galvatron, "megatron": check_megatron, "torchtitan": check_torchtitan}


def check_all(folder, targets, plans, show):
    """How many plans of all targets are not accepted. Those that were not exported count as such, if it is known how many were to be."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    failed = 0
    for target in targets:
        folders = sorted((pathlib.Path(folder) / target).glob("*"), key=lambda p: int(p.name))
        reasons = collections.Counter()
        for one in folders:
            try:
                with open(os.devnull, "w") as null:
                    out, sys.stdout = sys.stdout, null
                    err, sys.stderr = sys.stderr, null
                    try:
                        CHECKS[target](one)
                    finally:
                        sys.stdout, sys.stderr = out, err
            except (Exception, SystemExit) as e:  # of the peer
                if show and not reasons:
                    traceback.print_exc()
                reasons[f"{type(e).__name__}: {str(e)[:150]}"] += 1
        good = len(folders) - sum(reasons.values())
        wanted = plans or max(len(folders), 1)
        failed += wanted - good
        print(f"{target}: {good} of {wanted} accepted", flush=True)
        for reason, count in reasons.most_common(5):
            print(f"    {count} x {reason}")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default="/tmp/motley-peers", help="made if it is not there")
    parser.add_argument("--python", default=sys.executable, help="of the venv; megatron-core wants 3.12")
    parser.add_argument("--plans", type=int, default=1000, help="of every target; 0: what the folder holds")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--folder", default="/tmp/motley-exports", help="where they are exported")
    parser.add_argument("--targets", nargs="*", default=sorted(CHECKS))
    parser.add_argument("--show", action="store_true", help="the first failure in full")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        if args.targets == ["galvatron"]:  # it has packages of Megatron's name
            sys.path.insert(0, f"{args.venv}/galvatron")
        sys.exit(check_all(args.folder, args.targets, args.plans, args.show) != 0)
    make_venv(args.venv, args.python)
    if args.plans:
        for target in CHECKS:  # of an earlier run
            shutil.rmtree(pathlib.Path(args.folder, target), ignore_errors=True)
        subprocess.run([f"{args.build}/tests/test_export", "--gtest_filter=Exports.WritesRandomPlansForPeers"], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "MOTLEY_EXPORT_TO": args.folder, "MOTLEY_EXPORT_CASES": str(args.plans)})
    codes = [subprocess.run([f"{args.venv}/bin/python", __file__, "--inside", "--venv", args.venv, "--folder", args.folder,
                             "--plans", str(args.plans), *(["--show"] if args.show else []), "--targets", target]).returncode for target in args.targets]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Asks the frameworks themselves whether exported plans are theirs: ./dev peers.

    tests/exports/check_peers.py --plans 1000       makes the environments first, if they are not there
    tests/exports/check_peers.py --mutants          of plans with one number changed those that motley accepts: the framework should too
    tests/exports/check_peers.py --brief            50 plans of the frameworks that are quickly installed, as ./dev test --all does

Megatron-LM: its argument parser, validate_args and layout. torchtitan: configuration, degrees and the model itself, without
memory, of train.toml in 0.2 and of recipe.py in 0.3. torch: the schedule's CSV, as torch.distributed.pipelining loads it, with its
own validation. DeepSpeed: DeepSpeedConfig. Galvatron: config2strategy. FlagScale is not on the package index: its rules are motley's
own (src/export/flagscale.cc) and here once more, by hand. None of it needs a GPU, or compiles anything."""
import argparse
import collections
import glob
import importlib
import importlib.machinery
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
import warnings

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TORCH = "torch==2.13.0"
# What peers import besides torch. Their kernels are not run: triton has a stand-in.
LIBRARIES = ("numpy scipy==1.17.1 einops==0.8.2 pyyaml packaging tqdm requests regex psutil pydantic pillow tokenizers safetensors "
             "py-cpuinfo==9.0.0 hjson==3.1.0 msgpack==1.2.4 tyro==1.0.13 torchdata==0.11.0 tensorboard==2.21.0 spmd_types==0.2.3").split()
DATASETS = ["datasets>=3.6,<4.8"]
# Each in a folder of its own, since two have packages of one name.
PEERS = {"deepspeed": "deepspeed==0.19.8", "galvatron": "hetu-galvatron==2.4.0", "megatron": "megatron-core==0.19.2",
         "torchtitan": "torchtitan==0.2.2", "torchtitan-0.3": "torchtitan==0.3.0"}
FOLDERS = {"torchtitan-0.3": "torchtitan"}  # of a target's plans, where it is not the name


def pip(venv, *words):
    done = subprocess.run([f"{venv}/bin/pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "30", *words], capture_output=True,
                          text=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"no environment for frameworks: {reason[:200]}", file=sys.stderr)
        sys.exit(3)


def python312():
    """megatron-core wants 3.12 or newer; None: there is none."""
    if sys.version_info >= (3, 12):
        return sys.executable
    roots = [os.environ.get("PYENV_ROOT"), os.path.expanduser("~/.pyenv"), "/opt/pyenv"]
    named = [p for n in ("python3.12", "python3.13") for p in [shutil.which(n)] if p]
    own = [p for r in roots if r for v in ("3.12", "3.13") for p in sorted(glob.glob(f"{r}/versions/{v}*/bin/python3"))]
    for python in named + own:
        done = subprocess.run([python, "-c", "import sys, venv; print(sys.version_info >= (3, 12))"], capture_output=True, text=True)
        if done.stdout.strip() == "True":
            return python
    return None


def make_venv(venv, python, libraries):
    """An environment whose last file says what it has; an interrupted one is made anew. torch is taken from .torch2, where it is the same."""
    whole = pathlib.Path(venv, "whole")
    wanted = " ".join([TORCH, *libraries])
    if whole.exists() and whole.read_text() == wanted:
        return
    subprocess.run([python, "-m", "venv", "--clear", venv], check=True)
    near = next(iter((ROOT / ".torch2" / "lib").glob("python3.*/site-packages")), None)
    own = next(pathlib.Path(venv, "lib").glob("python3.*/site-packages"))
    if near and near.parent.name == own.parent.name and list(near.glob(TORCH.replace("==", "-") + "*")):
        (own / "torch2.pth").write_text(f"{near}\n")
        pip(venv, "install", "-q", *libraries)
    else:
        pip(venv, "install", "-q", TORCH, *libraries)
    whole.write_text(wanted)


def environment(folder, target):
    """(interpreter, folder of the peer) for a target, made where they are missing; None and why, where it cannot be."""
    venv, python, libraries = f"{folder}/env", sys.executable, LIBRARIES + DATASETS
    if target == "megatron":
        python = python312()
        if not python:
            return None, f"{PEERS[target]} wants Python 3.12, and there is none; install python3.12"
        venv, libraries = f"{folder}/env-3.12", LIBRARIES[:8]
    make_venv(venv, python, libraries)
    place = pathlib.Path(folder, target)
    whole = place / "whole"
    if target in PEERS and not (whole.exists() and whole.read_text() == PEERS[target]):
        shutil.rmtree(place, ignore_errors=True)
        if target == "galvatron":  # the package compiles extensions; its Python files are enough
            with tempfile.TemporaryDirectory() as where:
                pip(venv, "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", PEERS[target], "-d", where)
                place.mkdir()
                archive = next(pathlib.Path(where).glob("*.tar.gz"))
                subprocess.run(["tar", "xzf", archive, "-C", place, "--strip-components=1"], check=True)
        else:
            pip(venv, "install", "-q", "--no-deps", "--target", str(place), PEERS[target])
        whole.write_text(PEERS[target])
    return f"{venv}/bin/python", str(place)


class Stand(types.ModuleType):
    """For triton: decorators that leave a function as it is, and names that are only mentioned."""
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *args, **kwargs: args[0] if args and callable(args[0]) else (lambda f: f)) if name[0].islower() else type(name, (), {})


def stand_in():
    try:
        import triton  # noqa: F401
    except ImportError:
        import torch._inductor.compile_fx  # noqa: F401  what asks for it, while it is not there
        import torch.utils._triton
        torch.utils._triton.has_triton_package()
        for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice", "triton.runtime", "triton.compiler"):
            module = Stand(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module
            if "." in name:
                setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)


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


def fresh(folder, name):
    """A module of an exported directory, whose program starts in it."""
    os.chdir(folder)
    sys.path[:] = [str(folder)] + [p for p in sys.path if not pathlib.Path(p, "motley.json").exists()]
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def check_llama(model, folder, head, parts):
    """The model that torchtitan builds has the plan's sizes, and stages have all of its modules."""
    sizes = json.loads((folder / "model.json").read_text())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    first = [shape for name, shape in shapes.items() if name.startswith("layers.0.") and "feed_forward" in name]
    assert sorted(first) == sorted([(sizes["ffn"], sizes["hidden"])] * 2 + [(sizes["hidden"], sizes["ffn"])]), first
    assert shapes["tok_embeddings.weight"] == (sizes["vocab"], sizes["hidden"]), shapes["tok_embeddings.weight"]
    if parts is None:
        return
    names = [name for part in parts for name in part]
    assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(sizes["layers"])), "norm", head], names
    modules = dict(model.named_modules())
    assert all(name in modules for name in names)
    assert {name.split(".")[0] for name in shapes} == {"tok_embeddings", "layers", "norm", head}


def check_torchtitan(folder):
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec
    config = ConfigManager().parse_args(["--job.config_file", str(folder / "train.toml")])
    p, t = config.parallelism, config.training
    dims = ParallelDims(dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree,
                        cp=p.context_parallel_degree, tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree,
                        ep=p.expert_parallel_degree, etp=p.expert_tensor_parallel_degree, world_size=ranks(folder))
    assert t.seq_len % dims.seq_len_divisor == 0  # models/llama3/infra/parallelize.py
    replicas = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    assert t.global_batch_size % (t.local_batch_size * replicas) == 0  # train.py
    fresh(folder, config.experimental.custom_import)
    spec = get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    check_llama(model, folder, "output", p.module_fqns_per_model_part)
    if p.pipeline_parallel_degree > 1:
        check_stages(p, t.local_batch_size, folder)


def check_torchtitan_03(folder):
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    fresh(folder, "recipe")
    config = ConfigManager().parse_args(["--module", "recipe", "--config", "motley"])
    p, t = config.parallelism, config.training
    dims = ParallelDims.from_config(p, ranks(folder))
    assert t.seq_len % (dims.tp if p.enable_sequence_parallel else 1) == 0  # trainer.py
    assert t.global_batch_size % (t.local_batch_size * dims.dp_replicate * dims.dp_shard) == 0
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    check_llama(model, folder, "lm_head", p.module_fqns_per_model_part)
    if p.pipeline_parallel_degree > 1:
        check_stages(p, t.local_batch_size, folder)


def check_stages(p, local, folder):
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    assert local % p.pipeline_parallel_microbatch_size == 0
    stages = len(p.module_fqns_per_model_part)
    alone = issubclass(get_schedule_class(p.pipeline_parallel_schedule), PipelineScheduleSingle)
    assert alone == (stages == p.pipeline_parallel_degree) and stages % p.pipeline_parallel_degree == 0
    check_schedule(folder / p.pipeline_parallel_schedule_csv, p.pipeline_parallel_degree, stages, local // p.pipeline_parallel_microbatch_size)


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


CHECKS = {"ddp": check_rows, "deepspeed": check_deepspeed, "flagscale": check_flagscale, "fsdp2": check_rows, "galvatron": check_galvatron,
          "megatron": check_megatron, "torchtitan": check_torchtitan, "torchtitan-0.3": check_torchtitan_03}
BRIEF = ["ddp", "deepspeed", "flagscale", "fsdp2", "galvatron", "torchtitan", "torchtitan-0.3"]


def check_all(folder, target, plans, mutants, show):
    """How many plans of a target are not accepted. Those that were not exported count as such, if it is known how many were to be."""
    warnings.filterwarnings("ignore")
    stand_in()
    logging.disable(logging.CRITICAL)
    folders = sorted(pathlib.Path(folder, FOLDERS.get(target, target)).resolve().glob("*"), key=lambda p: int(p.name))
    if mutants and not folders:
        print(f"{target}: motley takes none of the changed numbers", flush=True)
        return 0
    reasons = collections.Counter()
    for one in folders:
        mutant = one / "mutant.txt"
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
            field = mutant.read_text().rpartition(": ")[0] + ": " if mutant.exists() else ""
            reasons[f"{field}{type(e).__name__}: {str(e)[:150]}"] += 1
    good = len(folders) - sum(reasons.values())
    wanted = plans or max(len(folders), 1)
    print(f"{target}: {good} of {wanted} accepted", flush=True)
    for reason, count in reasons.most_common(None if show else 5):
        print(f"    {count} x {reason}")
    return wanted - good


def export(args):
    """Random plans of all targets, or mutants of them that motley accepts, into the folder."""
    shutil.rmtree(args.folder, ignore_errors=True)
    name, variables = "Exports.WritesRandomPlansForPeers", {"MOTLEY_EXPORT_TO": args.folder, "MOTLEY_EXPORT_CASES": str(args.plans)}
    if args.mutants:
        name, variables = "*WrongNumbersAreRefusedByField*", {"MOTLEY_MUTANTS_TO": args.folder}
    elif args.brief:
        variables["MOTLEY_EXPORT_OUTLINES"] = "1"
    subprocess.run([f"{args.build}/tests/test_export", f"--gtest_filter={name}"], check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, **variables})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", default=str(ROOT / ".peers"), help="folder of them, made if they are not there")
    parser.add_argument("--plans", type=int, default=1000, help="of every target; 0: what the folder holds")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--folder", help="where they are exported; default: exports or mutants beside the environments")
    parser.add_argument("--targets", nargs="*", choices=sorted(CHECKS))
    parser.add_argument("--show", action="store_true", help="the first failure in full, and all kinds")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = args.folder or f"{args.environments}/{'mutants' if args.mutants else 'exports'}"
    args.targets = args.targets or (BRIEF if args.brief else sorted(CHECKS))
    if args.inside:
        sys.exit(check_all(args.folder, args.targets[0], args.plans, args.mutants, args.show) != 0)
    if args.brief:
        args.plans = min(args.plans, 50)
    os.makedirs(args.environments, exist_ok=True)
    places = {target: environment(args.environments, target) for target in args.targets}
    if args.mutants or args.plans:
        export(args)
    codes = [0]
    for target, (python, place) in places.items():
        if not python:
            print(f"{target}: not checked: {place}")
            continue
        plans = 0 if args.mutants else args.plans
        codes.append(subprocess.run([python, __file__, "--inside", "--environments", args.environments, "--folder", args.folder, "--plans", str(plans),
                                     *(["--show"] if args.show else []), *(["--mutants"] if args.mutants else []), "--targets", target],
                                    env={**os.environ, "PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1"}).returncode)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

"""What this machine's GPUs say: equal to plain PyTorch, as fast, as predicted, and in as much memory.

    ./dev gpu                     on a machine with CUDA devices, with the torch of MOTLEY_PYTHON (default: python3)
    ./dev gpu --stand-in          tiny models on the CPU, to try the script itself

Wanted: capture on the device equal to capture on Meta tensors; losses of one device by a plan equal to plain PyTorch and at most 3%
slower; steps within 8% of their prediction; the predicted peak of memory within 5% of what was allocated and never below; workers that
share a device, and workers over NCCL where there are several devices, equal to one: data parallelism, ZeRO, a pipeline, planned
reductions, NCCL inside of parts and gloo between them. Steps over NCCL are timed against PyTorch's DDP and FSDP2. The table goes to
bench/results/.
"""

import argparse
import copy
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import networks
import study

ROOT = study.ROOT


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stand-in", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--build", default="build-gpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # one of several, of this plan engine
    return parser.parse_args()


args = parsed()
sys.path.insert(0, str(ROOT / args.build / "python"))
sys.path.insert(0, str(ROOT / "tests" / "python"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

if not args.stand_in and not torch.cuda.is_available():
    sys.exit(f"motley: [gpu] torch {torch.__version__} of {sys.executable} sees no CUDA device; set MOTLEY_PYTHON to one that does")
try:
    import motley  # noqa: E402
except ImportError as error:
    sys.exit(f"motley: [gpu] {args.build}/python has no motley for this Python ({error}); ./dev gpu builds it")
if not args.stand_in and motley._motley.cuda_devices() == 0:
    sys.exit(f"motley: [gpu] {args.build} was built against a torch without CUDA; remove it and run ./dev gpu again")

DEVICE = torch.device("cpu" if args.stand_in else "cuda")
TINY = args.stand_in
if TINY:
    torch.set_num_threads(1)
warnings.simplefilter("ignore")


def gpt(layers, hidden, heads, vocabulary, length, batch):
    return lambda: networks.GPT(layers, hidden, heads, vocabulary, length), lambda: tuple(
        torch.randint(vocabulary, (batch, length)) for _ in range(2)
    )


def resnet(width, counts, image, batch):
    return lambda: networks.resnet(width, counts), lambda: (torch.randn(batch, 3, image, image), torch.randint(1000, (batch,)))


def llama(hidden, layers, heads, vocabulary, length, batch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), use_cache=False)  # fmt: skip

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens):
            return self.model(input_ids=tokens).logits.transpose(1, 2)

    return Logits, lambda: tuple(torch.randint(vocabulary, (batch, length)) for _ in range(2))


def mlp(width, depth, batch):
    def build():
        return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())], nn.Linear(width, 100))

    return build, lambda: (torch.randn(batch, width), torch.randint(100, (batch,)))


def models():
    """[(name, build, draw)]: the first three are timed against plain PyTorch, all against their prediction."""
    if TINY:
        made = {"gpt": gpt(1, 64, 2, 128, 32, 4), "resnet": resnet(8, (1, 1), 32, 4), "mlp": mlp(128, 2, 64)}
    else:
        made = {"gpt2-124m": gpt(12, 768, 12, 50257, 512, 8), "resnet-50": resnet(64, (3, 4, 6, 3), 224, 64)}
        try:
            made["llama-1b"] = llama(2048, 16, 32, 32000, 1024, 2)
        except ImportError:
            print("transformers is not here: no Llama")
        made |= {"gpt2-355m": gpt(24, 1024, 16, 50257, 512, 4), "mlp-8k": mlp(8192, 8, 512), "resnet-101": resnet(64, (3, 4, 23, 3), 224, 32)}
    return [(name, *pair) for name, pair in made.items()]


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(step, count):
    """Seconds of the median step, those before it not counted, and all losses."""
    losses, took = [], []
    for i in range(count):
        wait()
        start = time.perf_counter()
        losses.append(float(step()))
        wait()
        if i >= min(5, count // 2):
            took.append(time.perf_counter() - start)
    return statistics.median(took), losses


def peak(step, count):
    if DEVICE.type != "cuda":
        return timed(step, count) + (0,)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return timed(step, count) + (torch.cuda.max_memory_allocated(),)


class Table:
    def __init__(self, bench):
        self.bench, self.missed = bench, 0

    def row(self, what, model, value, wanted, good, of_time=False):
        self.bench.rows.append({"what": what, "model": model, "value": value, "wanted": wanted, "good": good})
        self.bench.say(f"{'  ' if good else 'X '}{what:44} {model:12} {value:>28}   wanted {wanted}")
        self.missed += not good and not (of_time and TINY)  # of tiny models on a busy CPU times say nothing


def check_capture(table, name, build, draw, folder):
    texts = []
    for device in ("meta", DEVICE):
        torch.manual_seed(0)
        with torch.device(device):
            model = build()
        batch = [x.to(device) for x in draw()]
        path = os.path.join(folder, f"{name}.graph")
        motley.save(motley.capture(model, tuple(batch), F.cross_entropy), path)
        texts.append(pathlib.Path(path).read_bytes())
    table.row(f"capture on {DEVICE.type} is that on meta", name, "equal" if texts[0] == texts[1] else "differs", "equal", texts[0] == texts[1])


def check_training(table, name, build, draw, cluster, precision, compare):
    torch.manual_seed(0)
    model, batch = build().to(DEVICE), tuple(x.to(DEVICE) for x in draw())
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), 1e-4)

    def eager():
        theirs.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(plain(batch[0]), batch[1])
        loss.backward()
        theirs.step()
        return loss.detach()

    label = f"{name} {precision}"
    expected = timed(eager, args.steps) if compare else None
    del plain, theirs
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    dist = motley.distribute(model, batch, F.cross_entropy, cluster, optimizer, verify=False, device=DEVICE.type,
                             engine="spmd", **({"precision": "bf16"} if precision == "bf16" else {}))  # fmt: skip
    seconds, losses, allocated = peak(lambda: dist.train_step(*batch), args.steps)
    if compare:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected[1]))
        limit = 2e-2 if precision == "bf16" else 1e-3
        table.row("losses of one device by a plan", label, f"{worst:.1e} off", f"{limit:g}", worst <= limit)
        table.row("step by a plan against plain PyTorch", label, f"{seconds / expected[0] - 1:+.1%}", "+3%", seconds <= 1.03 * expected[0], True)
    predicted = dist.plan.predicted_step_s
    table.row("predicted step against the measured one", label, f"{predicted / seconds - 1:+.1%} of {seconds * 1e3:.1f} ms", "8%",
              abs(predicted / seconds - 1) <= 0.08, True)  # fmt: skip
    if allocated:
        ratio = dist.plan.peak_memory_bytes[0] / allocated
        table.row("predicted peak of memory", label, f"{ratio - 1:+.1%} of {allocated / 2**30:.2f} GiB", "0 to 5%", 1 <= ratio <= 1.05)


def launched(count, worker, backend):
    """What rank 0 of several workers says: this script again; {word: number}, empty if they failed."""
    launcher = "torch.distributed.run" if worker in ("ddp", "fsdp2") else "motley.launch"
    command = [sys.executable, "-m", launcher, f"--nproc_per_node={count}", "--master_port", str(free_port()), __file__,
               "--build", args.build, "--steps", str(args.steps), "--worker", f"{worker}:{backend}"] + ["--stand-in"] * TINY  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=str(ROOT / args.build / "python"), OMP_NUM_THREADS="1")
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    if run.returncode != 0:
        print(run.stderr.strip()[-1500:], file=sys.stderr)
        return {}
    return {line.split()[1]: float(line.split()[2]) for line in run.stdout.splitlines() if line.startswith("SAID ")}


def check_workers(table, count, engine, backend):
    said = launched(count, engine, backend)
    worst = said.get("worst", float("inf"))
    good, value = worst <= 1e-5, f"{worst:.1e} off"
    if engine in ("reductions", "mixed"):
        good, value = good and said.get("reductions", 0) > 0, f"{value}, {said.get('reductions', 0):.0f} programs"
    table.row(f"{count} workers over {backend}, {engine}", "mlp", value, "1e-5", good)


def race(table, count, backend):
    """A language model by plans, and by what PyTorch has of the same kind."""
    seconds = {who: launched(count, who, backend).get("seconds", float("inf")) for who in ("race-dp-ev", "ddp", "race-zero", "fsdp2", "race-auto")}
    for mine, theirs, name in (("race-dp-ev", "ddp", "DDP"), ("race-zero", "fsdp2", "FSDP2"), ("race-auto", "ddp", "DDP")):
        kind = {"race-dp-ev": "data parallelism", "race-zero": "ZeRO", "race-auto": "the plan found"}[mine]
        ratio = seconds[mine] / seconds[theirs] if seconds[theirs] > 0 else float("inf")
        table.row(f"{count} workers over {backend}: {kind} against {name}", "gpt", f"{ratio - 1:+.1%} of {seconds[theirs] * 1e3:.1f} ms", "+3%",
                  ratio <= 1.03, True)  # fmt: skip


def free_port():
    import support

    return support.free_port()


def cluster_of(size, engine):
    types = "device_types: [{name: d, flops: 50 MFLOPS, memory: 8 GiB, memory_bandwidth: 100 MB/s}]\n"
    if engine not in ("reductions", "mixed"):
        return f"name: here\nlink: {{bandwidth: 1 GB/s, latency: 10 us}}\ndevices: [{{type: d, count: {size}}}]\n" + types
    # Two parts behind a slow link: all-reduces in steps inside and across.
    inside = ("backend: second, " if TINY else "backend: nccl, ") if engine == "mixed" else ""
    part = f"  - {{link: {{bandwidth: 10 GB/s, latency: 1 us}}, {inside}devices: [{{type: d, count: {size // 2}}}]}}\n"
    root = "backend: gloo\n" if engine == "mixed" else ""
    return f"name: parts\n{root}link: {{bandwidth: 10 MB/s, latency: 10 us}}\ngroups:\n" + 2 * part + types


def says(word, number):
    if os.environ["RANK"] == "0":
        print(f"SAID {word} {number}", flush=True)


def equal(engine, backend):
    """Losses of a plan against plain PyTorch, in double precision."""
    torch.manual_seed(0)
    wide = engine in ("reductions", "mixed")
    build, draw = mlp(256, 3, 64) if wide else mlp(64, 3, 24)
    model, batch = build().double(), draw()
    batch = batch[0].double().to(DEVICE), batch[1].to(DEVICE)
    model.to(DEVICE)
    plain = copy.deepcopy(model)
    if TINY and engine == "mixed":
        torch.distributed.Backend.register_backend(
            "second", lambda store, rank, size, timeout: torch.distributed.ProcessGroupGloo(store, rank, size, timeout), devices=["cpu"]
        )
    strategy = {"strategy": engine} if engine in ("dp-ev", "zero") else {"engine": "spmd" if wide else engine}
    if wide or engine == "spmd":
        strategy["all_devices"] = True
    dist = motley.distribute(model, batch, F.cross_entropy, cluster_of(int(os.environ["WORLD_SIZE"]), engine),
                             torch.optim.AdamW(model.parameters(), 1e-3), verify=False, device=DEVICE.type,
                             backend=None if TINY or engine == "mixed" else backend, **strategy)  # fmt: skip
    theirs, worst = torch.optim.AdamW(plain.parameters(), 1e-3), 0.0
    for _ in range(4):
        theirs.zero_grad()
        loss = F.cross_entropy(plain(batch[0]), batch[1])
        loss.backward()
        theirs.step()
        worst = max(worst, abs(float(dist.train_step(*batch)) - float(loss)) / abs(float(loss)))
    says("worst", worst)
    says("reductions", str(dist.plan).count("reductions  all_reduce"))


def raced(who, backend):
    """Seconds of the median step of a language model of which every worker has its part of the batch."""
    torch.manual_seed(0)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local = 2 if TINY else 8
    build, draw = gpt(*((1, 64, 2, 128, 32) if TINY else (12, 768, 12, 50257, 512)), local * size)
    batch = tuple(x.to(DEVICE) for x in draw())
    if who.startswith("race-"):
        engine = who[len("race-") :]
        model = build().to(DEVICE)
        here = f"name: here\nlink: {{bandwidth: 100 GB/s, latency: 10 us}}\ndevices: [{{type: A100-80GB, count: {size}}}]\n"
        how = {"engine": "auto", "time_limit": 60.0} if engine == "auto" else {"strategy": engine}
        dist = motley.distribute(model, batch, F.cross_entropy, here, torch.optim.AdamW(model.parameters(), 1e-4), verify=False,
                                 device=DEVICE.type, backend=None if TINY else backend, **how)  # fmt: skip

        def step():
            return dist.train_step(*batch)
    else:
        if DEVICE.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(backend)
        model = build().to(DEVICE)
        if who == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(DEVICE.type, (size,))
            for part in model.modules():
                if type(part).__name__ == "Block":
                    fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        mine = tuple(x[rank * local : (rank + 1) * local] for x in batch)

        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(mine[0]), mine[1])
            loss.backward()
            optimizer.step()
            return loss.item()

    says("seconds", timed(step, args.steps)[0])
    if torch.distributed.is_initialized() and not who.startswith("race-"):
        torch.distributed.destroy_process_group()


def work():
    """A worker."""
    who, backend = args.worker.split(":")
    raced(who, backend) if who in ("ddp", "fsdp2") or who.startswith("race-") else equal(who, backend)


def main():
    bench = study.Study("gpu" if not TINY else "gpu-stand-in", args, 1)
    table = Table(bench)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a stand-in on the CPU"
    bench.say(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "here.yaml")
        command = [sys.executable, "-m", "motley.discover", "-o", file, "--device", DEVICE.type]
        begun = time.monotonic()
        subprocess.run(command, check=True, env=dict(os.environ, PYTHONPATH=str(ROOT / args.build / "python")))
        table.row("discovery of one device", "", f"{time.monotonic() - begun:.0f} s", "60 s", time.monotonic() - begun < 60)
        here = motley.cluster(file, profile=file.replace(".yaml", ".profile"))
        for number, (model, build, draw) in enumerate(models()):
            check_capture(table, model, build, draw, folder)
            for precision in ("fp32", "bf16") if number < 3 else ("fp32",):
                check_training(table, model, build, draw, here, precision, number < 3)
        for engine in ("spmd", "pipeline"):
            check_workers(table, 2, engine, "gloo")
        count = torch.cuda.device_count() if DEVICE.type == "cuda" else 4
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        if count > 1:
            for engine in ("dp-ev", "zero", "pipeline"):
                check_workers(table, min(count, 8), engine, backend)
            race(table, 2 if TINY else min(count, 8), backend)
        if count > 3:
            for engine in ("reductions", "mixed"):
                check_workers(table, min(count, 8) // 2 * 2, engine, backend)
        if not TINY and count < 4:
            bench.say("one device: NCCL was not tried" if count == 1 else "fewer than four devices: planned reductions and mixed fabrics were not tried")
    bench.say(f"{table.missed} of {len(bench.rows)} not as wanted")
    bench.write(None)
    sys.exit(1 if table.missed else 0)


if __name__ == "__main__":
    work() if args.worker else main()

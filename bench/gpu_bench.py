"""What this machine's GPUs say: equal to plain PyTorch, as fast, as predicted, and in as much memory.

    ./dev gpu                     on a machine with CUDA devices, with the torch of MOTLEY_PYTHON (default: python3)
    ./dev gpu --stand-in          tiny models on the CPU, to try the script itself

Wanted: every operator on the device what it is on the CPU, attention and random numbers too; steps that ask the device for nothing and
may be a CUDA graph; capture on the device equal to that on Meta tensors; losses of one device by a plan equal to plain PyTorch and at
most 3% slower; steps within 8% of their prediction; the predicted peak of memory within 5% of what was allocated and never below;
workers that share a device, over gloo and over NCCL, and workers with devices of their own, equal to one: data parallelism, ZeRO, a
pipeline, planned reductions, a batch in parts, NCCL inside of parts and gloo between them. Steps over NCCL are timed against PyTorch's
DDP and FSDP2. The table goes to bench/results/.

Where there is one device four workers share it, and NCCL is told that each is a machine of its own (NCCL_HOSTID), since it refuses two
workers on one device otherwise: its messages then go through sockets, and times say nothing of links.
"""

import argparse
import collections
import copy
import gc
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

import networks
import study

ROOT = study.ROOT
CHECKS = ("operators", "steps", "discover", "models", "workers", "race")


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stand-in", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--build", default="build-gpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("--details", help="a folder for tables of torch.profiler, one of each model")
    parser.add_argument("--only", default="", help="checks, by the words " + ", ".join(CHECKS) + ", with commas between")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # one of several, of this plan engine
    told = parser.parse_args()
    for word in filter(None, told.only.split(",")):
        if word not in CHECKS:
            sys.exit(f"motley: [gpu] --only: there is no '{word}'; known: {', '.join(CHECKS)}")
    return told


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


def loss_of(logits, targets):
    """Of a batch of images, or of sequences, whose tokens count one by one."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Logits(nn.Module):
    """Logits [batch, tokens, vocabulary] of one of networks.py, which has the vocabulary in the middle."""

    def __init__(self, *sizes):
        super().__init__()
        self.model = networks.GPT(*sizes)

    def forward(self, tokens):
        return self.model(tokens).transpose(1, 2)


def gpt(layers, hidden, heads, vocabulary, length, batch):
    return lambda: Logits(layers, hidden, heads, vocabulary, length), lambda: tuple(torch.randint(vocabulary, (batch, length)) for _ in range(2))


def resnet(width, counts, image, batch):
    return lambda: networks.resnet(width, counts), lambda: (torch.randn(batch, 3, image, image), torch.randint(1000, (batch,)))


def llama(hidden, layers, heads, vocabulary, length, batch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), use_cache=False)  # fmt: skip

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens):
            return self.model(input_ids=tokens).logits

    return Llama, lambda: tuple(torch.randint(vocabulary, (batch, length)) for _ in range(2))


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


def free():
    """What nobody refers to any more, also in circles."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def peak(step, count):
    if DEVICE.type != "cuda":
        return timed(step, count) + (0,)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return timed(step, count) + (torch.cuda.max_memory_allocated(),)


class Table:
    def __init__(self, bench):
        self.bench, self.missed = bench, 0

    def tried(self, what, model, check, *arguments):
        """A check that adds rows; one row if it fails."""
        begun = time.monotonic()
        try:
            check(self, *arguments)
        except Exception as error:
            traceback.print_exc()
            self.row(what, model, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", "no error", False)
        print(f"    {what} {model}: {time.monotonic() - begun:.0f} s", flush=True)

    def row(self, what, model, value, wanted, good, of_time=False):
        self.bench.rows.append({"what": what, "model": model, "value": value, "wanted": wanted, "good": good})
        self.bench.say(f"{'  ' if good else 'X '}{what:44} {model:12} {value:>28}   wanted {wanted}")
        self.missed += not good and not (of_time and TINY)  # of tiny models on a busy CPU times say nothing


def check_device(table):
    """What has nothing to do with a model."""
    import gpu_device as of

    count, wrong = of.operators_on(DEVICE)
    table.row("operators as on the CPU", "", f"{count - len(wrong)} of {count}", "all", not wrong)
    for op, why in wrong.items():
        print(f"    {op}: {why}")


def check_attention(table):
    import gpu_device as of

    worst, where = of.attention_on(DEVICE)
    table.row("attention against double precision", "", f"{worst:.2f} of its type's", "1", worst <= 1)
    print(f"    worst: {where}")


def check_random(table):
    import gpu_device as of

    off = of.random_on(DEVICE)
    table.row("random numbers as on the CPU", "", f"{off:.1e} off", "1e-9", off <= 1e-9)


def check_drawing(table):
    import gpu_device as of

    mine, theirs = of.drawing_on(DEVICE)
    table.row("dropout of 2^22 elements, both passes", "", f"{mine * 1e6:.0f} us, torch's {theirs * 1e6:.0f}", "3 times", mine <= 3 * theirs)


def check_waiting(table):
    import gpu_device as of

    for name, how in (("gpt", {}), ("gpt in bf16", {"precision": "bf16"})):
        found = of.waits_on(*gpt(2, 128, 4, 512, 64, 8), DEVICE, **how)
        table.row("a step asks the device for nothing", name, found[0][:60] if found else "nothing", "nothing", not found)
        for line in found:
            print(f"    {line}", flush=True)


def check_guard(table):
    """The first steps of a plan are compared with the plain model, as where nobody says otherwise."""
    for name, how in (("gpt", {}), ("gpt in bf16", {"precision": "bf16"})):
        build, draw = gpt(2, 128, 4, 512, 64, 8)
        model, batch = build_there(build, draw)
        dist = motley.distribute(model, batch, loss_of, cluster_of(1, "spmd"), torch.optim.AdamW(model.parameters(), 1e-3), device=DEVICE.type, **how)
        losses = [float(dist.train_step(*batch)) for _ in range(4)]
        table.row("first steps compared with the plain model", name, f"{losses[0]:.3f} to {losses[-1]:.3f}", "no error", losses[-1] < losses[0])


def check_graph(table):
    import gpu_device as of

    off = of.graph_on(*gpt(2, 128, 4, 512, 64, 8), DEVICE)
    table.row("steps replayed as a CUDA graph", "gpt", f"{off:.1e} off", "1e-4", off <= 1e-4)


def discover(table, file):
    command = [sys.executable, "-m", "motley.discover", "-o", file, "--device", DEVICE.type]
    begun = time.monotonic()
    subprocess.run(command, check=True, env=dict(os.environ, PYTHONPATH=str(ROOT / args.build / "python")))
    table.row("discovery of one device", "", f"{time.monotonic() - begun:.0f} s", "60 s", time.monotonic() - begun < 60)
    print(pathlib.Path(file).read_text())
    if args.details:
        pathlib.Path(args.details).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, args.details), shutil.copy(file.replace(".yaml", ".profile"), args.details)


def check_capture(table, name, build, draw, folder):
    texts = []
    for device in ("meta", DEVICE):
        torch.manual_seed(0)
        with torch.device(device):
            model = build()
        batch = [x.to(device) for x in draw()]
        path = os.path.join(folder, f"{name}.graph")
        motley.save(motley.capture(model, tuple(batch), loss_of), path)
        texts.append(pathlib.Path(path).read_bytes())
    table.row(f"capture on {DEVICE.type} is that on meta", name, "equal" if texts[0] == texts[1] else "differs", "equal", texts[0] == texts[1])


def held_at_peak(step):
    """What a step holds when most is held, in lines: bytes of a block, how many there are of it."""
    torch.cuda.memory._record_memory_history(max_entries=200000, context=None)
    before = torch.cuda.memory_allocated()
    step()
    wait()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live, held, most, at = {}, 0, 0, 0
    for i, event in enumerate(trace):
        sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        held += sign * event["size"]
        if held > most:
            most, at = held, i
    for event in trace[: at + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    lines = [f"before {before}, at most {most} more, of it"]
    for size, count in sorted(collections.Counter(live.values()).items(), key=lambda x: -x[0] * x[1])[:25]:
        lines.append(f"  {count} x {size} = {count * size}")
    return "\n".join(lines)


def launched_in(dist, batch, count=10):
    """How long the machine is busy with a step that the device has not finished, in its parts; medians."""
    parts = []
    for _ in range(count):
        wait()
        moments = [time.perf_counter()]
        for part in (lambda: dist(*batch), dist.backward, dist.step):
            part()
            moments.append(time.perf_counter())
        parts.append([1e3 * (b - a) for a, b in zip(moments, moments[1:])])
    return "launched in ms: step {:.2f}, backward {:.2f}, optimizer {:.2f}".format(*(statistics.median(part) for part in zip(*parts)))


def details(label, steps, dist, batch):
    """Where the time of a step goes, by a plan and in plain PyTorch."""
    from torch.profiler import ProfilerActivity, profile

    text = f"{dist.plan}\n{launched_in(dist, batch)}\n{held_at_peak(steps['plan'])}\n"
    for who, step in steps.items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as told:
            step()
            wait()
        table = told.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=60)
        text += f"\n{who}\n" + "\n".join(" ".join(line.split()) for line in table.splitlines()) + "\n"
    pathlib.Path(args.details).mkdir(parents=True, exist_ok=True)
    (pathlib.Path(args.details) / f"{label.replace(' ', '-')}.txt").write_text(text)


def build_there(build, draw):
    """A model made on the device, and a batch."""
    torch.manual_seed(0)
    with DEVICE:
        model = build()
    return model, tuple(x.to(DEVICE) for x in draw())


def eager(build, draw, precision, backwards=False):
    """A step of plain PyTorch. backwards: on the samples in reverse order, of which the loss is the mean all the same."""
    plain, batch = build_there(build, draw)
    if backwards:
        batch = tuple(x.flip(0) for x in batch)
    theirs = torch.optim.AdamW(plain.parameters(), 1e-4)

    def step():
        theirs.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(plain(batch[0]), batch[1])
        loss.backward()
        theirs.step()
        return loss.detach()

    return step


def planned(build, draw, cluster, precision):
    model, batch = build_there(build, draw)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    dist = motley.distribute(model, batch, loss_of, cluster, optimizer, verify=False, device=DEVICE.type, engine="spmd",
                             **({"precision": "bf16"} if precision == "bf16" else {}))  # fmt: skip
    return dist, batch, lambda: dist.train_step(*batch)


def check_losses(table, label, build, draw, cluster, precision):
    """Without TF32, whose errors are those of bf16. Adam makes much of little: rounding alone, of samples added up in another order, moves
    the losses of some models by more than the limit. No further off than twice that is as equal as plain PyTorch is to itself."""
    losses = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for made in (lambda: eager(build, draw, precision), lambda: eager(build, draw, precision, True),
                     lambda: planned(build, draw, cluster, precision)[2]):  # fmt: skip
            losses.append(timed(made(), 5)[1])
            free()
    noise, off = (max(abs(a - b) / abs(a) for a, b in zip(losses[0], other)) for other in losses[1:])
    limit = max(2e-2 if precision == "bf16" else 1e-3, 2 * noise)
    table.row("losses of one device by a plan", label, f"{off:.1e} off, rounding {noise:.1e}", f"{limit:.1e}", off <= limit)


def check_training(table, name, build, draw, cluster, precision, compare):
    label, expected = f"{name} {precision}", None
    if compare:
        check_losses(table, label, build, draw, cluster, precision)
        free()
        theirs = eager(build, draw, precision)
        expected = timed(theirs, args.steps)[0]
        if not args.details:
            del theirs
    free()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    dist, batch, step = planned(build, draw, cluster, precision)
    seconds, _, allocated = peak(step, args.steps)
    if compare:
        table.row("step by a plan against plain PyTorch", label, f"{seconds / expected - 1:+.1%} of {expected * 1e3:.1f} ms", "+3%",
                  seconds <= 1.03 * expected, True)  # fmt: skip
    predicted = dist.plan.predicted_step_s
    table.row("predicted step against the measured one", label, f"{predicted / seconds - 1:+.1%} of {seconds * 1e3:.1f} ms", "8%",
              abs(predicted / seconds - 1) <= 0.08, True)  # fmt: skip
    if args.details and DEVICE.type == "cuda":
        details(label, {"plan": step} | ({"plain": theirs} if compare else {}), dist, batch)
    if allocated:
        held = allocated - before
        ratio = motley.simulate(dist.plan)["devices"][0]["allocated_bytes"] / held
        table.row("predicted peak of memory", label, f"{ratio - 1:+.1%} of {held / 2**30:.2f} GiB", "0 to 5%", 1 <= ratio <= 1.05)


def shared():
    """Whether several workers share one device."""
    return DEVICE.type == "cuda" and torch.cuda.device_count() == 1


def launched(count, worker, backend):
    """What rank 0 of several workers says: this script again; {word: number}, empty if they failed."""
    launcher = "torch.distributed.run" if worker in ("ddp", "fsdp2") else "motley.launch"
    command = [sys.executable, "-m", launcher, f"--nproc_per_node={count}", "--master_port", str(free_port()), __file__,
               "--build", args.build, "--steps", str(args.steps), "--worker", f"{worker}:{backend}"] + ["--stand-in"] * TINY  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=str(ROOT / args.build / "python"), OMP_NUM_THREADS="1")
    if shared():
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    except subprocess.TimeoutExpired as error:
        print(f"    {worker} over {backend}: no end after 180 s\n{(error.stderr or b'')[-1500:]}", file=sys.stderr)
        return {}
    if run.returncode != 0:
        print(run.stderr.strip()[-2500:], file=sys.stderr)
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
    if engine == "parts":
        strategy = {"duplex": 2, "all_devices": True}
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
        dist = motley.distribute(model, batch, loss_of, here, torch.optim.AdamW(model.parameters(), 1e-4), verify=False,
                                 device=DEVICE.type, backend=None if TINY else backend, **how)  # fmt: skip

        def step():
            return dist.train_step(*batch)
    else:
        if DEVICE.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.distributed.init_process_group(backend)
        model = build().to(DEVICE)
        if who == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(DEVICE.type, (size,))
            for part in model.modules():
                if type(part).__name__ == "TransformerEncoderLayer":
                    fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        mine = tuple(x[rank * local : (rank + 1) * local] for x in batch)

        def step():
            optimizer.zero_grad()
            loss = loss_of(model(mine[0]), mine[1])
            loss.backward()
            optimizer.step()
            return loss.item()

    says("seconds", timed(step, args.steps)[0])
    if torch.distributed.is_initialized() and not who.startswith("race-"):
        torch.distributed.destroy_process_group()


def work():
    """A worker."""
    if shared():
        os.environ["NCCL_HOSTID"] = f"worker {os.environ['RANK']}"
    who, backend = args.worker.split(":")
    raced(who, backend) if who in ("ddp", "fsdp2") or who.startswith("race-") else equal(who, backend)


def main():
    bench = study.Study("gpu" if not TINY else "gpu-stand-in", args, 1)
    table = Table(bench)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a stand-in on the CPU"
    bench.say(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    asked = [word for word in args.only.split(",") if word] or CHECKS
    of_device = {"operators": [("operators", check_device), ("attention", check_attention), ("random numbers", check_random)],
                 "steps": [("dropout", check_drawing), ("waiting", check_waiting), ("comparison", check_guard), ("CUDA graph", check_graph)]}  # fmt: skip
    for word, checks in of_device.items():
        for what, check in checks:
            if word in asked and not TINY:
                table.tried(what, "", check)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "here.yaml")
        if "discover" in asked or "models" in asked:
            table.tried("discovery", "", discover, file)
        if "models" in asked:
            here = motley.cluster(file, profile=file.replace(".yaml", ".profile"))
            for number, (model, build, draw) in enumerate(models()):
                table.tried("capture", model, check_capture, model, build, draw, folder)
                for precision in ("fp32", "bf16") if number < 3 else ("fp32",):
                    free()
                    table.tried("training", f"{model} {precision}", check_training, model, build, draw, here, precision, number < 3)
    count = torch.cuda.device_count() if DEVICE.type == "cuda" else 4
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    several = 4 if shared() else min(count, 8)
    if "workers" in asked:
        for engine in ("spmd", "pipeline", "parts"):
            check_workers(table, 2, engine, "gloo")
        for engine in ("dp-ev", "zero", "pipeline", "parts") + (("reductions", "mixed") if several > 3 else ()):
            check_workers(table, several // 2 * 2, engine, backend)
    if "race" in asked:
        race(table, 2 if TINY or shared() else several, backend)
    if shared():
        bench.say("one device, which all workers shared")
    bench.say(f"{table.missed} of {len(bench.rows)} not as wanted")
    bench.write(None)
    sys.exit(1 if table.missed else 0)


if __name__ == "__main__":
    work() if args.worker else main()

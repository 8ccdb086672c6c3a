"""What this machine's GPUs say: equal to plain PyTorch, as fast, as predicted, and in as much memory.

    ./dev gpu                     on a machine with CUDA devices, with the torch of MOTLEY_PYTHON (default: python3)
    ./dev gpu --stand-in          tiny models on the CPU, to try the script itself

Wanted: capture on the device equal to capture on Meta tensors; losses of one device by a plan equal to plain PyTorch and at most 3%
slower; steps within 8% of their prediction; the predicted peak of memory within 5% of what was allocated and never below; workers that
share a device, and workers over NCCL where there are several devices, equal to one. The table goes to bench/results/.
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


def check_workers(table, count, engine, backend):
    """Several workers: this script again, under torchrun."""
    command = [sys.executable, "-m", "motley.launch", f"--nproc_per_node={count}", "--master_port", str(free_port()), __file__,
               "--build", args.build, "--worker", f"{engine}:{backend}"] + ["--stand-in"] * TINY  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=str(ROOT / args.build / "python"))
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    said = [line for line in run.stdout.splitlines() if line.startswith("worst ")]
    worst = float(said[0].split()[1]) if run.returncode == 0 and said else float("inf")
    if run.returncode != 0:
        table.bench.say(run.stderr.strip()[-500:])
    table.row(f"{count} workers over {backend}, {engine}", "mlp", f"{worst:.1e} off", "1e-5", worst <= 1e-5)


def free_port():
    import support

    return support.free_port()


def work():
    """A worker: losses of a plan against plain PyTorch, in double precision."""
    engine, backend = args.worker.split(":")
    torch.manual_seed(0)
    build, draw = mlp(64, 3, 24)
    model, batch = build().double(), draw()
    batch = batch[0].double().to(DEVICE), batch[1].to(DEVICE)
    model.to(DEVICE)
    plain = copy.deepcopy(model)
    size = int(os.environ["WORLD_SIZE"])
    cluster = (f"name: here\nlink: {{bandwidth: 1 GB/s, latency: 10 us}}\ndevices: [{{type: d, count: {size}}}]\n"
               "device_types: [{name: d, flops: 50 MFLOPS, memory: 8 GiB, memory_bandwidth: 100 MB/s}]\n")  # fmt: skip
    strategy = {"strategy": engine} if engine in ("dp-ev", "zero") else {"engine": engine, "all_devices": engine == "spmd"}
    dist = motley.distribute(model, batch, F.cross_entropy, cluster, torch.optim.AdamW(model.parameters(), 1e-3), verify=False,
                             device=DEVICE.type, backend=None if TINY else backend, **strategy)  # fmt: skip
    theirs, worst = torch.optim.AdamW(plain.parameters(), 1e-3), 0.0
    for _ in range(4):
        theirs.zero_grad()
        loss = F.cross_entropy(plain(batch[0]), batch[1])
        loss.backward()
        theirs.step()
        worst = max(worst, abs(float(dist.train_step(*batch)) - float(loss)) / abs(float(loss)))
    if os.environ["RANK"] == "0":
        print(f"worst {worst}", flush=True)


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
        if DEVICE.type == "cuda" and torch.cuda.device_count() > 1:
            for engine in ("dp-ev", "zero", "pipeline"):
                check_workers(table, torch.cuda.device_count(), engine, "nccl")
        elif not TINY:
            bench.say("one device: NCCL was not tried")
    bench.say(f"{table.missed} of {len(bench.rows)} not as wanted")
    bench.write(None)
    sys.exit(1 if table.missed else 0)


if __name__ == "__main__":
    work() if args.worker else main()

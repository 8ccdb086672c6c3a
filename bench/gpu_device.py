"""Checks of one device for gpu_bench.py: operators, attention, random numbers, no waiting, CUDA graphs, parts of a batch."""

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import motley

HERE = "name: here\nlink: {bandwidth: 1 GB/s, latency: 10 us}\ndevices: [{type: d, count: 1}]\n" \
       "device_types: [{name: d, flops: 1 TFLOPS, memory: 8 GiB, memory_bandwidth: 100 GB/s}]\n"  # fmt: skip


def _moved(argument, device):
    import operators

    if isinstance(argument, list):
        return [_moved(a, device) for a in argument]
    return argument.tensor.to(device) if isinstance(argument, operators.Operand) else argument


# Which of several equal elements is meant, and which of several writers to one place is last, a device may choose.
_CHOICES = {
    "aten::sort", "aten::sort.stable", "aten::topk", "aten::argmax", "aten::argmin", "aten::max.dim", "aten::min.dim", "aten::median.dim",
    "aten::argsort", "aten::kthvalue", "aten::mode", "aten::log_sigmoid_forward", "aten::max_pool2d_with_indices",
    "aten::adaptive_max_pool2d", "aten::cummax", "aten::cummin", "aten::scatter.src",
}  # fmt: skip
# On CUDA with constants, or norms, in single precision.
_SINGLE = {"aten::hardsigmoid", "aten::hardswish", "aten::_weight_norm_interface"}


def operators_on(device, seeds=2):
    """(how many operators, {name: why} of those that are not on the device what they are on the CPU)."""
    import operators
    from motley import _motley

    random = {op["name"] for op in _motley.op_table() if op["random"]}
    wrong, tried = {}, 0
    for op in operators.operators():
        if op in random or not op.startswith(("aten::", "motley_torch::")):
            continue
        tried += 1
        for seed in range(seeds):
            arguments = operators.arguments_of(op, operators.Numbers(101 * seed + 3))
            if arguments is None:
                continue
            try:
                results = [operators.called(op, [_moved(a, where) for a in arguments]) for where in ("cpu", device)]
                limit = 1e-6 if op in _SINGLE else 1e-9
                for k, (mine, there) in enumerate(zip(*results)):
                    chosen = op in _CHOICES and (k > 0 or "arg" in op or "scatter" in op)
                    if mine is not None and mine.numel() > 0 and not chosen:  # the CPU leaves what nobody reads empty
                        torch.testing.assert_close(there.cpu(), mine, rtol=limit, atol=limit, equal_nan=True)
            except Exception as error:
                wrong[op] = " ".join(str(error).split())[:200]
    return tried, wrong


def attention_on(device):
    """The worst difference of attention and its gradients to double precision, over the types' own precision; and where."""
    import operators  # registers, with motley

    worst, where = 0.0, ""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    numbers = torch.Generator().manual_seed(0)
    for dtype, precision in ((torch.float64, 1e-12), (torch.float32, 2e-3), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
        for heads, shared, s, t, dim in ((4, 4, 64, 64, 64), (4, 2, 33, 33, 64), (4, 4, 17, 40, 32), (8, 2, 128, 128, 128), (2, 2, 20, 20, 12)):
            for kind in ("plain", "causal", "rows", "all", "flat"):
                if kind == "causal" and s > t:
                    continue
                draw = lambda *shape: torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype)  # noqa: E731
                q, k, v, d = draw(2, heads, s, dim), draw(2, shared, t, dim), draw(2, shared, t, dim), draw(2, heads, s, dim)
                mask = {"rows": draw(2, 1, s, t), "all": draw(1, heads, s, t), "flat": draw(s, t)}.get(kind)
                if mask is not None:
                    mask[..., t // 2] = -float("inf")
                causal = kind == "causal"
                exact = [x.double() for x in (q, k, v, d)]
                given = {"attn_mask": None if mask is None else mask.double()}
                out, sums = forward(*exact[:3], 0.0, causal, **given)
                expected = [out, sums, *backward(exact[3], *exact[:3], out, sums, 0.0, causal, **given)]
                there = [x.to(device) for x in (q, k, v, d)]
                given = {"attn_mask": None if mask is None else mask.to(device)}
                out, sums = forward(*there[:3], 0.0, causal, **given)
                found = [out, sums, *backward(there[3], *there[:3], out, sums, 0.0, causal, **given)]
                for name, a, b in zip(("out", "sums", "dq", "dk", "dv"), found, expected):
                    if a.shape != b.shape:
                        return float("inf"), f"{name} of {dtype}, {kind}: {tuple(a.shape)} for {tuple(b.shape)}"
                    off = float((a.cpu().double() - b).norm() / b.norm()) / precision
                    if not off <= worst:
                        worst, where = off, f"{name} of {str(dtype)[6:]}, {heads}/{shared} heads of {s} x {t} x {dim}, {kind}"
    return worst, where


class Random(nn.Module):
    """Draws in the ways in which models do."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(32, 64), nn.Linear(64, 10), nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(torch.relu(self.one(x + 0.1 * torch.randn_like(x))))
        h = h * (torch.rand(h.shape[0], 1, dtype=h.dtype, device=h.device) < 0.8) / 0.8
        return self.two(h + 0.1 * torch.empty_like(h).exponential_())


def losses_of(build, batch, device, steps=4, **how):
    torch.manual_seed(0)
    model = build().to(device)
    batch = [x.to(device) for x in batch]
    dist = motley.distribute(model, tuple(batch), F.cross_entropy, HERE, torch.optim.AdamW(model.parameters(), 1e-2), verify=False,
                             device=device.type, **how)  # fmt: skip
    return [float(dist.train_step(*batch)) for _ in range(steps)]


def random_on(device):
    """How far losses on the device are from those on the CPU, relatively; the same numbers are drawn."""
    torch.manual_seed(1)
    batch = torch.randn(48, 32, dtype=torch.float64), torch.randint(10, (48,))
    here, there = (losses_of(lambda: Random().double(), batch, where) for where in (torch.device("cpu"), device))
    return max(abs(a - b) / abs(a) for a, b in zip(here, there))


def _loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _trained(build, draw, device, capturable=False, **how):
    torch.manual_seed(0)
    model, batch = build().to(device), tuple(x.to(device) for x in draw())
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, **({"capturable": True} if capturable else {}))
    dist = motley.distribute(model, batch, _loss, HERE.replace("8 GiB", "70 GiB"), optimizer, verify=False, device=device.type,
                             **how)  # fmt: skip

    def step():
        loss = dist(*batch)
        dist.backward()
        dist.step()
        dist.zero_grad()
        return loss

    return plain, batch, step


def waits_on(build, draw, device, **how):
    """[place: what] where steps ask the device for something. The first steps may."""
    _, _, step = _trained(build, draw, device, **how)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(2):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{w.filename.split('/')[-1]}:{w.lineno}: {str(w.message)[:100]}" for w in told if "called a synchronizing" in str(w.message)})


def graph_on(build, draw, device):
    """How far the losses of steps replayed as a CUDA graph are from plain PyTorch's, relatively."""
    plain, batch, step = _trained(build, draw, device, capturable=True)
    theirs, expected = torch.optim.AdamW(plain.parameters(), 1e-4), []
    for _ in range(7):
        theirs.zero_grad()
        loss = _loss(plain(batch[0]), batch[1])
        loss.backward()
        theirs.step()
        expected.append(float(loss))
    losses, side = [], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            losses.append(float(step()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.graph(graph):
            loss = step()
    for _ in range(4):
        graph.replay()
        losses.append(float(loss))
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected))


class _Dropouts(nn.Module):
    """Eight dropouts, or as many products with a number."""

    def __init__(self, draws):
        super().__init__()
        self.weight, self.draws = nn.Parameter(torch.ones(1024)), draws

    def forward(self, x):
        h = x * self.weight
        for _ in range(8):
            h = F.dropout(h, 0.1) if self.draws else h * 1.1
        return h


def _seconds(step, count=5):
    for _ in range(3):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / (1e3 * count)


def drawing_on(device, elements=1 << 22):
    """Seconds that a dropout of so many elements takes, both passes, more than a product: by a plan, and by torch."""
    x, took = torch.randn(elements // 1024, 1024, device=device), {}
    for draws in (True, False):
        model, plain = _Dropouts(draws).to(device), _Dropouts(draws).to(device)
        dist = motley.distribute(model, (x, x), F.mse_loss, HERE.replace("8 GiB", "70 GiB"), None, verify=False, device=device.type)
        took["plan", draws] = _seconds(lambda: dist(x, x))
        took["torch", draws] = _seconds(lambda: F.mse_loss(plain(x), x).backward())
    return tuple((took[who, True] - took[who, False]) / 8 for who in ("plan", "torch"))

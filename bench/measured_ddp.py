"""PyTorch's own DistributedDataParallel, for bench/measured_bench.py: one of the workers that `motley emulate` starts.

    motley emulate --cluster C -- /usr/bin/python3 measured_ddp.py JOBS.json

JOBS.json: [{model, args, batch, shares: "even" | "proportional", steps, warm}]. Rank 0 prints one JSON line a job:
{"job": index, "seconds": [of each step after the first], "losses": [...]}.

Speed is emulated as motley does it (src/runtime/emulate.h): the worker sleeps after work until start + CPU time / speed, by
the CPU clock of its thread, the least that the same work took in any step, and what it slept too long is carried over, up
to 5 ms. motley pads after every operator;
here it is after every leaf module, forward and backward, and at the end of the backward pass and of the update.
A bucket of gradients may leave before the sleep of the module that filled it, and DistributedDataParallel overlaps
communication with the rest of the backward pass: both are to its advantage.
"""
import ctypes
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MAX_DEBT, WORTH_A_SLEEP = 5e-3, 1e-3


class Padding:
    def __init__(self, speed):
        self.speed, self.owed, self.least = speed, 0.0, {}
        ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK
        self.mark()

    def mark(self):
        self.wall, self.cpu = time.monotonic(), time.thread_time()

    def account(self, work=None):
        wall, cpu = self.wall, self.cpu
        self.mark()
        worked = self.cpu - cpu
        if work is not None:
            if work not in self.least:  # the first time
                self.least[work] = worked
                return
            worked = self.least[work] = min(worked, self.least[work])
        self.owed = max(-MAX_DEBT, self.owed + worked / self.speed - (self.wall - wall))

    def work_done(self, work, least=WORTH_A_SLEEP):
        self.account(work)
        if self.owed >= least:
            time.sleep(self.owed)
            self.account()

    def after(self, *work):
        """A hook that says that this work is done."""
        return lambda *_: self.work_done(work)

    def settle(self, *work):
        self.work_done(work, least=0)


class Mlp(nn.Module):
    def __init__(self, layers=4, hidden=1024, classes=10, **a):
        super().__init__()
        width, self.inputs = a.get("in", 784), a.get("in", 784)
        self.classes, self.hidden = classes, nn.ModuleList()
        for _ in range(layers - 1):
            self.hidden.append(nn.Linear(width, hidden))
            width = hidden
        self.head = nn.Linear(width, classes)

    def batch(self, n):
        return torch.randn(n, self.inputs), torch.randint(self.classes, (n,))

    def forward(self, x, labels):
        for layer in self.hidden:
            x = layer(x).relu()
        return F.cross_entropy(self.head(x), labels)


class Vgg19(nn.Module):
    def __init__(self, width=64, image=224, classes=1000):
        super().__init__()
        self.image, self.classes = image, classes
        layers, channels = [], 3
        for block, count in enumerate((2, 2, 4, 4, 4)):
            out = width * min(1 << block, 8)
            for _ in range(count):
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
                channels = out
            layers.append(nn.MaxPool2d(2, 2))
        units = 64 * width
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(channels * 49, units), nn.ReLU(),
                                  nn.Linear(units, units), nn.ReLU(), nn.Linear(units, classes))

    def batch(self, n):
        return torch.randn(n, 3, self.image, self.image), torch.randint(self.classes, (n,))

    def forward(self, x, labels):
        return F.cross_entropy(self.body(x), labels)


class Experts(nn.Module):
    """bert-moe's experts: capacity 1.25 per sequence, weights of the chosen ones shared among them."""

    def __init__(self, hidden, experts, top):
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, hidden, 4 * hidden).uniform_(-hidden**-0.5, hidden**-0.5))
        self.down = nn.Parameter(torch.empty(experts, 4 * hidden, hidden).uniform_(-hidden**-0.5, hidden**-0.5))

    def forward(self, x):
        groups, tokens, hidden = x.shape
        capacity = -int(-1.25 * self.top * tokens // self.experts)
        gates = self.router(x).softmax(-1)
        chosen = gates.detach().topk(self.top, -1).indices
        taken, weight, place, balance = 0, [], [], 0
        for j in range(self.top):
            mine = F.one_hot(chosen[..., j], self.experts).to(x.dtype)
            if j == 0:
                balance = (gates.sum(1) * mine.sum(1)).sum(-1).mean() * 0.01 * self.experts / tokens**2
            position = mine.cumsum(1) - mine + taken
            taken = taken + mine.sum(1, keepdim=True)
            kept = mine * (position < capacity)
            at = F.one_hot((position * kept).sum(-1).long(), capacity).to(x.dtype)
            weight.append((gates * mine).sum(-1, keepdim=True))
            place.append(kept.unsqueeze(-1) * at.unsqueeze(2))
        total = sum(weight)
        combine = sum((w / total).unsqueeze(-1) * p for w, p in zip(weight, place))
        slots = combine.shape[3]
        combine = combine.view(groups, tokens, -1)
        inside = torch.bmm((combine > 0).to(x.dtype).transpose(1, 2), x)
        inside = inside.view(groups, self.experts, slots, hidden).transpose(0, 1).reshape(self.experts, -1, hidden)
        out = torch.bmm(F.gelu(torch.bmm(inside, self.up)), self.down)
        out = out.view(self.experts, groups, slots, hidden).transpose(0, 1).reshape(groups, -1, hidden)
        return torch.bmm(combine, out), balance


class Block(nn.Module):
    def __init__(self, hidden, heads, pre_norm, experts=0, top=2):
        super().__init__()
        self.heads, self.pre_norm = heads, pre_norm
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        if experts:
            self.experts = Experts(hidden, experts, top)
        else:
            self.experts, self.up, self.down = None, nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attention(self, x, mask):
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / (hidden // self.heads) ** 0.5
        if mask is not None:
            scores = scores + mask
        return self.projection((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, hidden))

    def feed_forward(self, x):
        return self.experts(x) if self.experts else (self.down(F.gelu(self.up(x))), 0)

    def forward(self, x, mask):
        if self.pre_norm:
            x = x + self.attention(self.norm1(x), mask)
            y, balance = self.feed_forward(self.norm2(x))
            return x + y, balance
        x = self.norm1(x + self.attention(x, mask))
        y, balance = self.feed_forward(x)
        return self.norm2(x + y), balance


class Transformer(nn.Module):
    """gpt and bert-moe."""

    def __init__(self, causal, layers, hidden, heads, seq, vocab, experts=0, every=1, top=2):
        super().__init__()
        self.causal, self.seq, self.vocab = causal, seq, vocab
        self.tokens = nn.Parameter(torch.empty(vocab, hidden).normal_(0, 0.02))
        self.positions = nn.Parameter(torch.empty(seq, hidden).normal_(0, 0.02))
        self.blocks = nn.ModuleList(
            Block(hidden, heads, causal, experts if (i + 1) % every == 0 else 0, top) for i in range(layers))
        self.norm = nn.LayerNorm(hidden)
        if not causal:
            self.head, self.head_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
            self.bias = nn.Parameter(torch.zeros(vocab))

    def batch(self, n):
        return torch.randint(self.vocab, (n, self.seq)), torch.randint(self.vocab, (n, self.seq))

    def forward(self, tokens, targets):
        mask = torch.full((self.seq, self.seq), float("-inf")).triu(1) if self.causal else None
        x = F.embedding(tokens, self.tokens) + self.positions
        if not self.causal:
            x = self.norm(x)
        total = 0
        for block in self.blocks:
            x, balance = block(x, mask)
            total = total + balance
        if self.causal:
            logits = F.linear(self.norm(x), self.tokens)
        else:
            logits = F.linear(self.head_norm(F.gelu(self.head(x))), self.tokens, self.bias)
        return F.cross_entropy(logits.view(-1, self.vocab), targets.view(-1)) + total


def build(name, args):
    torch.manual_seed(0)
    if name == "gpt":
        return Transformer(True, **args)
    if name == "bert-moe":
        return Transformer(False, **args)
    return {"mlp": Mlp, "vgg19": Vgg19}[name](**args)


def pieces(total, speeds, shares):
    if shares == "even":
        weights = [1 / len(speeds)] * len(speeds)
    else:
        weights = [s / sum(speeds) for s in speeds]
    sizes = [round(total * w) for w in weights]
    while sum(sizes) != total:  # the pieces with the smallest rounding error give or take one
        step = 1 if sum(sizes) < total else -1
        i = max(range(len(sizes)), key=lambda i: step * (total * weights[i] - sizes[i]))
        sizes[i] += step
    return sizes


def run(job, speeds):
    rank, world = dist.get_rank(), dist.get_world_size()
    padding = Padding(speeds[rank])
    model = build(job["model"], job["args"])
    sizes = pieces(job["batch"], speeds, job["shares"])
    mine = model.batch(max(sizes[rank], 1))
    weight = sizes[rank] * world / job["batch"]  # DistributedDataParallel averages over the workers
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(padding.after("forward", module))
            module.register_full_backward_hook(padding.after("backward", module))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    seconds, losses = [], []
    warm = job.get("warm", 1)  # steps that do not count
    for step in range(job["steps"] + warm):
        dist.barrier()
        padding.mark()
        start = time.monotonic()
        optimizer.zero_grad()
        loss = ddp(*mine) * weight
        loss.backward()
        padding.settle("backward", model)
        optimizer.step()
        padding.settle("step", model)
        took = torch.tensor([time.monotonic() - start])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if step >= warm:
            seconds.append(took.item())
        losses.append(loss.item())
    return {"seconds": seconds, "losses": losses}


def prepare_memory(megabytes=600):
    """As motley's workers do (src/comm/launch.h): freed memory is kept, and there is enough of it before the first step."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.memset.argtypes, libc.free.argtypes = (
        ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p])
    for option, value in ((-4, 0), (-8, 1), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_ARENA_MAX, M_TRIM_THRESHOLD
        libc.mallopt(option, value)
    block = libc.malloc(ctypes.c_size_t(megabytes << 20))
    libc.memset(block, 1, megabytes << 20)
    libc.free(block)


def main():
    torch.set_num_threads(1)
    prepare_memory()
    jobs = json.load(open(sys.argv[1]))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    speeds = [float(s) for s in os.environ["MOTLEY_SPEEDS"].split(",")]
    for index, job in enumerate(jobs):
        result = run(job, speeds)
        if rank == 0:
            print(json.dumps({"job": index, **result}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()

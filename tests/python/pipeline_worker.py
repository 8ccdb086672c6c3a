"""One of three workers: pipeline plans, against plain PyTorch in double precision."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
FOLDER = sys.argv[1]
RANK = int(os.environ["RANK"])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights at both ends of the pipeline, and a parameter and a buffer that no stage reads."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.Sequential(*[Block(16) for _ in range(4)])
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("constant", torch.arange(2.0) + seed)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(n):
    draw = lambda g: torch.randint(20, (24, 6), generator=g)  # noqa: E731
    return support.batches_of(lambda g: (draw(g), draw(g)), n)


def optimizer_of(model):
    inside = [p for name, p in model.named_parameters() if "blocks" in name]
    rest = [p for name, p in model.named_parameters() if "blocks" not in name]
    return torch.optim.AdamW([{"params": inside, "lr": 1e-2}, {"params": rest, "lr": 3e-3}])


def near(a, b):
    assert abs(a - b) <= 1e-9 * max(1, abs(b)), (a, b)


def same(state, wanted):
    assert list(state) == list(wanted), (list(state), list(wanted))
    for key, value in wanted.items():
        assert state[key].shape == value.shape and (state[key] - value).abs().max() <= 1e-9, key


def check(dist, plain, optimizer, data):
    """Training, clipping, the state of one worker alone, evaluation, a checkpoint and back."""
    for i, batch in enumerate(data):
        optimizer.zero_grad()
        expected = support.plain_loss(plain, loss_fn, batch)
        expected.backward()
        norm = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 0.2)
        optimizer.step()
        loss = dist(*batch)
        near(loss.item(), expected.item())
        loss.backward()
        near(dist.clip_grad_norm_(0.2), norm.item())
        dist.step()
        if RANK == i % 3:
            same(dist.state_dict(), plain.state_dict())
            state, wanted = dist.optimizer_state_dict(), optimizer.state_dict()
            assert state["state"].keys() == wanted["state"].keys()
            assert state["param_groups"][0]["params"] == wanted["param_groups"][0]["params"]
            for index, values in wanted["state"].items():
                for key, value in values.items():
                    assert torch.allclose(state["state"][index][key], value, rtol=0, atol=1e-9), (index, key)
    dist.eval()
    tokens = batches(1)[0][0][: 5 + RANK]
    assert (dist(tokens) - plain(tokens)).abs().max() < 1e-9
    dist.train()


for engine in ("pipeline", "grid"):
    plain, mine = Net(), Net(RANK)
    optimizer = optimizer_of(plain)
    data = batches(6)
    dist = motley.distribute(mine, data[0], loss_fn, support.CLUSTER, optimizer_of(mine), engine=engine)
    assert dist.plan.stages > (engine == "pipeline"), dist.plan.stages
    check(dist, plain, optimizer, data[:4])
    dist.save(f"{FOLDER}/{engine}.pt")
    if RANK == 0:
        dist.plan.save(f"{FOLDER}/{engine}.json")
    dist._group.barrier()

    # Onto one program over all workers, onto the plan file, and a state of plain PyTorch onto stages.
    other = Net(5)
    flat = motley.distribute(other, data[0], loss_fn, support.CLUSTER, optimizer_of(other), all_devices=True)
    assert flat.plan.stages == 0
    third = Net(6)
    again = motley.distribute(third, data[0], loss_fn, plan=f"{FOLDER}/{engine}.json", optimizer=optimizer_of(third))
    assert again.plan.stages == dist.plan.stages
    for target in (flat, again):
        target.load(f"{FOLDER}/{engine}.pt")
        same(target.state_dict(), plain.state_dict())
    again.load_state_dict(plain.state_dict())
    again.load_optimizer_state_dict(optimizer.state_dict())
    for batch in data[4:]:
        expected = support.plain_training(plain, loss_fn, [batch], optimizer)[0]
        near(flat.train_step(*batch), expected)
        near(again.train_step(*batch), expected)
    same(again.state_dict(), plain.state_dict())
    for wrong, words in (
        (lambda: motley.distribute(Net(), (data[0][0][:12], data[0][1][:12]), loss_fn, plan=f"{FOLDER}/{engine}.json"),
         "its global batch is 24"),
        (lambda: motley.distribute(Net(), data[0], lambda y, t: 2 * loss_fn(y, t), plan=f"{FOLDER}/{engine}.json"),
         "computes something else"),
    ):  # fmt: skip
        try:
            wrong()
        except motley.UserError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    sampler = motley.DataSplitter(torch.utils.data.TensorDataset(*data[0]), dist)
    assert [len(rows) for rows in sampler] == [24]
    if RANK == 0:
        print("done", engine, flush=True)

"""One of three workers of which the plan leaves one out: everything that distribute() promises, against plain PyTorch."""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import motley
import support
from support import same, same_optimizer
from support import token_batches as batches

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
WHICH, FOLDER = sys.argv[1:3]
RANK = int(os.environ["RANK"])
CLUSTER = support.far_off(WHICH)
USED = {"first": [1, 2], "last": [0, 1]}[WHICH]
IDLE = 3 - sum(USED)


def net(seed=0):
    torch.manual_seed(seed)
    return support.Net()


def mlp(features=6, width=16, classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def distributed(model, optimizer="adamw", **options):
    dist = motley.distribute(model, batches(1)[0], F.cross_entropy, CLUSTER, optimizer, **options)
    assert dist.plan.devices == USED and len(dist.plan.cluster) == 2, dist.plan
    parts = dist._held.parts["parameter"].values()
    assert (not parts) == (RANK == IDLE)
    assert RANK == IDLE or any(length < size for _, size, _, _, length, *_ in parts), "nothing is cut"
    return dist


def near(a, b):
    assert abs(a - b) <= 1e-9 * max(1, abs(b)), (a, b)


def training():
    """Losses, gradients that accumulate, clipping; after every step another worker, alone, has the state of that step."""
    plain, mine = net(), net(seed=RANK)
    if RANK == 0:
        plain.load_state_dict(mine.state_dict())
    optimizer = adam(plain)
    dist = distributed(mine, adam(mine))
    data = batches(12)
    for i, (first, second) in enumerate(zip(data[::2], data[1::2])):
        optimizer.zero_grad()
        dist.zero_grad()
        for batch in (first, second):
            expected = F.cross_entropy(plain(batch[0]), batch[1])
            (expected / 2).backward()
            loss = dist(*batch)
            assert loss.dtype == torch.float64
            near(loss.item(), expected.item())
            (loss / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        near(dist.clip_grad_norm_(0.1), norm.item())
        optimizer.step()
        time.sleep(0.03 * (RANK == i % 3))
        dist.step()
        if RANK == (IDLE if i < 3 else i % 3):
            time.sleep(0.05 * (i % 2))  # the others have gone on into the next step
            same(dist.state_dict(), plain.state_dict())
            same_optimizer(dist.optimizer_state_dict(), optimizer.state_dict())
    for batch in batches(3):
        near(dist.train_step(*batch), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])
    same(dist.state_dict(), plain.state_dict())
    held = sum(piece.numel() for piece in dist.parameters())
    assert (held == 0) == (RANK == IDLE) and len(list(dist.named_parameters())) == len(list(mine.named_parameters()))
    text = repr(dist)
    assert ("idle" in text) == (RANK == IDLE) and "2 of the 3 of far-off (" in text, text


def own_steps():
    """Without an optimizer of ours."""
    plain, mine = net(), net()
    optimizer = adam(plain)
    dist = distributed(mine, None)
    own = torch.optim.AdamW(dist.parameters(), lr=1e-2)
    for i, batch in enumerate(batches(6)):
        dist(*batch).backward()
        time.sleep(0.02 * RANK)
        own.step()
        dist.zero_grad()
        near(dist._loss.item(), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])
        if RANK == (IDLE if i < 3 else i % 3):
            same(dist.state_dict(), plain.state_dict())


def evaluation():
    """The idle worker alone evaluates, then all do."""
    plain, mine = net(), net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    dist = distributed(mine, "adamw")
    for i, batch in enumerate(batches(3)):
        dist.train_step(*batch)
        support.plain_training(plain, F.cross_entropy, [batch], optimizer)
        plain.eval()
        if RANK == IDLE or i == 2:
            dist.eval()
            x, y = batches(1, size=5 + RANK)[0]
            assert (dist(x) - plain(x)).abs().max() < 1e-9
            near(dist(x, y).item(), F.cross_entropy(plain(x), y).item())
            dist.train()
        plain.train()


def checkpoint():
    """Saved, loaded, and gone on with; a state of plain PyTorch; onto all devices and back."""
    plain, mine = net(), net()
    optimizer = adam(plain)
    dist = distributed(mine, adam(mine))
    data = batches(7)
    for batch in data[:3]:
        near(dist.train_step(*batch), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])
    dist.save(f"{FOLDER}/{WHICH}.pt")
    other, third = net(5), net(6)
    again = distributed(other, adam(other))
    all_of_it = motley.distribute(third, data[0], F.cross_entropy, CLUSTER, adam(third), all_devices=True)
    assert all_of_it.plan.devices == [0, 1, 2] and "idle" not in repr(all_of_it), all_of_it.plan
    for target in (again, all_of_it):
        target.load(f"{FOLDER}/{WHICH}.pt")
        assert target.steps == 3
        same(target.state_dict(), plain.state_dict())
    for batch in data[3:5]:
        expected = support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0]
        near(again.train_step(*batch), expected)
        near(all_of_it.train_step(*batch), expected)
    plain = net(seed=7)
    optimizer = adam(plain)
    support.plain_training(plain, F.cross_entropy, data[:2], optimizer)
    dist.load_state_dict(plain.state_dict())
    dist.load_optimizer_state_dict(optimizer.state_dict())
    same(dist.state_dict(), plain.state_dict(), 0)
    for batch in data[5:]:
        near(dist.train_step(*batch), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])
    same_optimizer(dist.optimizer_state_dict(), optimizer.state_dict())


def splitter():
    """An idle worker's share of a batch is empty."""
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(200, 6, generator=g), torch.randint(4, (200,), generator=g))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(4 * 1000003 + 1)).tolist()
    plain, mine = mlp(), mlp()
    optimizer = adam(plain)
    dist = motley.distribute(mine, data[:48], F.cross_entropy, CLUSTER, adam(mine))
    assert dist.plan.devices == USED, dist.plan
    sampler = motley.DataSplitter(data, dist, seed=4)
    assert sampler.counts is not None and sampler.counts[IDLE] == 0 and sum(sampler.counts) == 48, sampler.counts
    assert all(sampler.counts[rank] > 0 for rank in USED), sampler.counts
    sampler.set_epoch(1)
    for i, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler)):
        assert len(x) == max(1, sampler.counts[RANK])
        near(dist.train_step(x, y), support.plain_training(plain, F.cross_entropy, [data[order[48 * i : 48 * i + 48]]], optimizer)[0])
    whole = data[:48]  # the whole batch is taken too
    near(dist(*whole).item(), F.cross_entropy(plain(whole[0]), whole[1]).item())

    # Pictures come in rows; the labels, which the plan keeps whole, are put together by the plan's workers. With fewer rows
    # the plan cuts columns, which nobody loads.
    for width, rows in ((16, 48), (4, 12)):
        data = TensorDataset(torch.randn(2 * rows, 40, generator=g), torch.randint(100, (2 * rows,), generator=g))
        plain, mine = mlp(40, width, 100), mlp(40, width, 100)
        optimizer = adam(plain)
        dist = motley.distribute(mine, data[:rows], F.cross_entropy, CLUSTER, adam(mine))
        assert dist.plan.devices == USED and dist._worker.input_placement("targets") == "R", dist.plan
        assert dist._worker.input_placement("inputs").startswith("S"), dist.plan
        sampler = motley.DataSplitter(data, dist, shuffle=False)
        assert (sampler.counts is not None) == (rows == 48), sampler.counts
        for i, batch in enumerate(DataLoader(data, batch_sampler=sampler)):
            expected = support.plain_training(plain, F.cross_entropy, [data[rows * i : rows * i + rows]], optimizer)[0]
            near(dist.train_step(*batch), expected)
        same(dist.state_dict(), plain.state_dict())


def one_device():
    """Both others are left out."""
    alone = CLUSTER.replace("10 Gbps", "1 kbps").replace("[{type: fast}]", "[{type: slow}]")
    plain, mine = net(), net()
    optimizer = adam(plain)
    dist = motley.distribute(mine, batches(1)[0], F.cross_entropy, alone, adam(mine))
    assert len(dist.plan.devices) == 1 and "1 of the 3 of far-off" in str(dist.plan), dist.plan
    for i, batch in enumerate(batches(6)):
        near(dist.train_step(*batch), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])
        if RANK == i % 3:
            same(dist.state_dict(), plain.state_dict())
            same_optimizer(dist.optimizer_state_dict(), optimizer.state_dict())


def given_plans():
    """A plan object knows the cluster that it was made for; a file has the devices that it uses and no others."""
    batch = batches(1)[0]
    plan = motley.plan(motley.capture(net(), batch, F.cross_entropy), CLUSTER)
    plain, mine = net(), net()
    optimizer = adam(plain)
    dist = motley.distribute(mine, batch, F.cross_entropy, plan=plan, optimizer=adam(mine))
    assert dist.plan.devices == USED
    for batch in batches(2):
        near(dist.train_step(*batch), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])
    if RANK == 0:
        plan.save(f"{FOLDER}/{WHICH}.json")
    dist._group.barrier()
    try:
        motley.distribute(net(), batch, F.cross_entropy, plan=f"{FOLDER}/{WHICH}.json")
    except motley.UserError as error:
        assert "the cluster has 2 devices, but 3 workers were started; start 2" in str(error), error
        assert "\n" not in str(error), error
    else:
        raise AssertionError("a plan file for two devices ran on three workers")


def emulated():
    """Slowed down to the plan's devices and paced to its links; the idle worker is neither."""
    plain, mine = net(), net()
    optimizer = adam(plain)
    cluster = CLUSTER.replace("overhead", "speed: 0.3, overhead")
    dist = motley.distribute(mine, batches(1)[0], F.cross_entropy, cluster, adam(mine), emulate=True)
    assert dist.plan.devices == USED and (dist.pacing == "off") == (RANK == IDLE), dist.pacing
    for batch in batches(2):
        near(dist.train_step(*batch), support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0])


def at_the_end():
    """The others have ended, or nearly, when the idle worker asks."""
    plain, mine = net(), net()
    optimizer = adam(plain)
    dist = distributed(mine, adam(mine))
    batch = batches(1)[0]
    dist.train_step(*batch)
    support.plain_training(plain, F.cross_entropy, [batch], optimizer)
    if RANK == IDLE:
        time.sleep(0.5)
        same(dist.state_dict(), plain.state_dict())
        print("the others had ended", flush=True)


def one_fails():
    """One of the plan's workers; the other one names it by its rank."""
    dist = distributed(net(), "sgd", verify=False)
    dist.train_step(*batches(1)[0])
    if RANK == USED[1]:
        raise KeyError("a worker's own mistake")
    try:
        dist.train_step(*batches(1)[0])
    except motley.PeerLost as error:
        print(f"lost {RANK} {error}\n", end="", flush=True)


def idle_ends_early():
    """The others' next step fails; nobody waits for ever."""
    dist = distributed(net(), "sgd", verify=False)
    dist.train_step(*batches(1)[0])
    if RANK != IDLE:
        try:
            dist.train_step(*batches(1)[0])
        except motley.PeerLost as error:
            print(f"lost {RANK} {error}\n", end="", flush=True)


if len(sys.argv) > 3:
    globals()[sys.argv[3]]()
else:
    torch.distributed.init_process_group("gloo")
    for case in (training, own_steps, evaluation, checkpoint, splitter, one_device, given_plans, emulated, at_the_end):
        case()
        if RANK == 0:
            print("done", case.__name__, flush=True)

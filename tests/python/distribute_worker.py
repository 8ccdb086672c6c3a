"""One of three workers: everything that distribute() promises, against plain PyTorch in double precision."""

import copy
import importlib
import inspect
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import motley
import support
from support import token_batches as batches

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
FOLDER = sys.argv[1]
RANK = int(os.environ["RANK"])


def net(dropout=0.0, seed=0):
    torch.manual_seed(seed)
    return support.Net(dropout)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def distributed(model, optimizer="adamw", **options):
    return motley.distribute(model, batches(1)[0], F.cross_entropy, support.CLUSTER, optimizer, all_devices=True, **options)


def near(a, b, limit=1e-9):
    assert abs(a - b) <= limit * max(1, abs(b)), (a, b)


def same_state(dist, plain, limit=1e-9):
    got, wanted = dist.state_dict(), plain.state_dict()
    assert list(got) == list(wanted), (list(got), list(wanted))
    for key, value in wanted.items():
        assert got[key].shape == value.shape and got[key].dtype == value.dtype, key
        assert (got[key] - value).abs().max() <= limit, (key, (got[key] - value).abs().max())


def ddp_style():
    """Ranks start from rank 0's parameters; loss.backward() accumulates; schedulers and clipping work."""
    plain = net()
    optimizer = adam(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    mine = net(seed=RANK)
    dist = distributed(mine, adam(mine))
    schedule = torch.optim.lr_scheduler.StepLR(dist.optimizer, 2, 0.1)
    data = batches(6)
    for first, second in zip(data[::2], data[1::2]):
        optimizer.zero_grad()
        dist.zero_grad()
        for batch in (first, second):
            expected = F.cross_entropy(plain(batch[0]), batch[1])
            (expected / 2).backward()
            loss = dist(*batch)
            near(loss.item(), expected.item())
            (loss / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        near(dist.clip_grad_norm_(0.1), norm.item())
        optimizer.step()
        dist.optimizer.step()
        scheduler.step()
        schedule.step()
    same_state(dist, plain)
    text = repr(dist)
    assert "Net distributed by motley" in text and "mixed-3" in text, text


def twice():
    dist = distributed(net())
    loss = dist(*batches(1)[0])
    dist.backward()
    try:
        loss.backward()
    except (motley.UserError, RuntimeError) as error:
        assert "twice" in str(error) or "second time" in str(error), error
    else:
        raise AssertionError("the gradients of one step were added twice")


def groups():
    """Parameter groups with settings of their own, in an order of their own."""
    def optimizer(model):
        return torch.optim.SGD(
            [{"params": [model.norm.weight, model.norm.bias, model.out.bias], "lr": 0.3},
             {"params": [model.inside.weight, model.embed.weight], "weight_decay": 0.1}],
            lr=0.05, momentum=0.9, nesterov=True,
        )  # fmt: skip

    plain, mine = net(), net()
    data = batches(3)
    expected = support.plain_training(plain, F.cross_entropy, data, optimizer(plain))
    dist = distributed(mine, optimizer(mine))
    for batch, loss in zip(data, expected):
        near(dist.train_step(*batch), loss)
    same_state(dist, plain)


def states():
    """state_dict and optimizer state go to plain PyTorch and back."""
    data = batches(6)
    plain = net()
    optimizer = adam(plain)
    expected = support.plain_training(plain, F.cross_entropy, data[:3], optimizer)
    mine = net()
    dist = distributed(mine, adam(mine))
    for batch, loss in zip(data, expected):
        near(dist.train_step(*batch), loss)
    taken = net(seed=5)
    taken.load_state_dict(dist.state_dict())
    taken_optimizer = adam(taken)
    taken_optimizer.load_state_dict(dist.optimizer_state_dict())
    expected = support.plain_training(plain, F.cross_entropy, data[3:], optimizer)
    for loss, wanted in zip(support.plain_training(taken, F.cross_entropy, data[3:], taken_optimizer), expected):
        near(loss, wanted)

    plain = net(seed=7)
    optimizer = adam(plain)
    support.plain_training(plain, F.cross_entropy, data[:2], optimizer)
    dist.load_state_dict(plain.state_dict())
    dist.load_optimizer_state_dict(optimizer.state_dict())
    same_state(dist, plain, 0)
    expected = support.plain_training(plain, F.cross_entropy, data[2:4], optimizer)
    for batch, loss in zip(data[2:], expected):
        near(dist.train_step(*batch), loss)

    state = dist.state_dict()
    del state["norm.bias"]
    for wrong, words in (
        (state, "missing norm.bias"),
        ({**plain.state_dict(), "more": torch.zeros(1)}, "unexpected more"),
        ({**plain.state_dict(), "norm.bias": torch.zeros(3)}, "norm.bias is [3]"),
    ):
        try:
            dist.load_state_dict(wrong)
        except motley.UserError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    dist.load_state_dict(state, strict=False)


def evaluation():
    """eval(): the plain model's output of any batch; training goes on afterwards."""
    data = batches(4)
    plain, mine = net(0.3), net(0.3)
    dist = distributed(mine, adam(mine))
    for batch in data:
        dist.train_step(*batch)
    plain.load_state_dict(dist.state_dict())
    plain.eval()
    x, y = batches(1, size=5)[0]
    dist.eval()
    assert (dist(x) - plain(x)).abs().max() < 1e-12
    near(dist(x, y).item(), F.cross_entropy(plain(x), y).item())
    assert mine.training and torch.equal(mine.inside.weight, plain.inside.weight)
    dist.train()
    assert dist(*data[0]).requires_grad


def dropout():
    """Random numbers do not depend on the sharding: the graph on one device draws the same."""
    x, y = batches(1)[0]
    mine = net(0.5)
    graph = motley.capture(mine, (x, y), F.cross_entropy)
    dist = distributed(mine, "sgd", seed=3)
    parameters = {name: p.detach() for name, p in mine.named_parameters()}
    seen = []
    for step in range(2):
        buffers = {name: b.clone() for name, b in mine.named_buffers()}
        loss, _, _ = motley._motley.interpret(graph, parameters, buffers, {"inputs": x, "targets": y}, 3, step)
        near(dist(x, y).item(), loss.item())
        seen.append(loss.item())
    assert seen[0] != seen[1]


def splitter():
    """Each worker loads its rows only; together they are the batch, and training is the same."""
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(200, 6, generator=g), torch.randint(4, (200,), generator=g))

    def mlp():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    order = torch.randperm(200, generator=torch.Generator().manual_seed(4 * 1000003 + 1)).tolist()
    cut = 0
    for ratios, counts in (([0.5, 0.25, 0.25], [24, 12, 12]), ([0.75, 0.0, 0.25], [36, 0, 12]), ([0.3, 0.5, 0.2], [14, 24, 10])):
        plain, mine = mlp(), mlp()
        dist = motley.distribute(
            mine, data[:48], F.cross_entropy, support.CLUSTER, adam(mine), ratios=ratios
        )
        sampler = motley.DataSplitter(data, dist, seed=4)
        loader = DataLoader(data, batch_sampler=sampler)
        assert sampler.counts in (None, counts), (sampler.counts, counts)
        cut += sampler.counts is not None
        assert len(loader) == 4
        optimizer = adam(plain)
        sampler.set_epoch(1)
        for i, (x, y) in enumerate(loader):
            expected = support.plain_training(plain, F.cross_entropy, [data[order[48 * i : 48 * i + 48]]], optimizer)[0]
            assert len(x) == (max(1, counts[RANK]) if sampler.counts else 48)
            near(dist.train_step(x, y), expected)
        whole = data[:48]  # the whole batch is taken too
        near(dist(*whole).item(), F.cross_entropy(plain(whole[0]), whole[1]).item())
    assert cut >= 2, cut

    # Tokens whose embedding is cut in width are needed whole.
    dist = distributed(net(), "sgd")
    tokens = TensorDataset(*batches(1, size=30)[0])
    rows = [len(x) for x, _ in DataLoader(tokens, batch_sampler=motley.DataSplitter(tokens, dist))]
    counts = dist._counts[RANK] if dist._counts else 12
    assert rows == [max(1, counts)] * 2, (rows, dist._counts)


def checkpoint():
    """Three workers train and save; the launch after this one goes on."""
    mine = net()
    dist = distributed(mine, adam(mine))
    for batch in batches(3):
        dist.train_step(*batch)
    dist.save(f"{FOLDER}/checkpoint.pt")
    file = torch.load(f"{FOLDER}/checkpoint.pt")
    assert sorted(file) == ["model", "optimizer", "steps"] and file["steps"] == 3
    plain = net(seed=9)
    plain.load_state_dict(file["model"])
    adam(plain).load_state_dict(file["optimizer"])
    try:
        dist.save(f"{FOLDER}/none/checkpoint.pt")
    except motley.UserError as error:
        assert "cannot be written" in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError("a file in no folder was written")
    formats(dist, file)
    if RANK == 0:
        with open(f"{FOLDER}/damaged.pt", "wb") as out:
            with open(f"{FOLDER}/checkpoint.pt", "rb") as whole:
                out.write(whole.read()[:400])
    dist._group.barrier()
    for name, words in (("damaged.pt", "damaged"), ("none.pt", "cannot be read")):
        try:
            dist.load(f"{FOLDER}/{name}")
        except motley.UserError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


def found(module):
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def formats(dist, file):
    """The same checkpoint as other programs write and read it, both ways; then training goes on as it would have."""
    plain = net()
    expected = support.plain_training(plain, F.cross_entropy, batches(5), adam(plain))[3:]
    kinds = [name for name, module in (("safetensors", "safetensors"), ("dcp", "torch.distributed.checkpoint.state_dict")) if found(module)]
    for kind in kinds:
        path = f"{FOLDER}/model.safetensors" if kind == "safetensors" else f"{FOLDER}/folder"
        for _ in range(2):  # the second one replaces the first
            dist.save(path, format=kind if kind == "dcp" else None)
        dist._group.barrier()
        if kind == "safetensors":
            from safetensors.torch import load_file

            read = load_file(path)
        else:
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint import state_dict as states

            other = net(seed=9)
            optimizer = adam(other)
            held = {"model": other.state_dict(), "optimizer": states.get_optimizer_state_dict(other, optimizer)}
            if "no_dist" in inspect.signature(dcp.load).parameters:
                dcp.load(held, checkpoint_id=path, no_dist=True)
            else:  # that of torch 2.4 asks the others
                dcp.load_state_dict(held, dcp.FileSystemReader(path), no_dist=True)
            states.set_optimizer_state_dict(other, optimizer, held["optimizer"])
            read = held["model"]
            other.load_state_dict(read)
            read = {key: value.clone() for key, value in read.items()}
            for got, loss in zip(support.plain_training(other, F.cross_entropy, batches(5)[3:], optimizer), expected):
                near(got, loss)
        model = file["model"]
        tied = len(model) - len({value.data_ptr() for value in model.values()}) if kind == "safetensors" else 0  # under one name there
        assert len(read) == len(model) - tied and all(torch.equal(read[key], model[key]) for key in read)
    for kind in kinds:
        again = net(seed=11)
        back = distributed(again, adam(again))
        back.load(f"{FOLDER}/model.safetensors" if kind == "safetensors" else f"{FOLDER}/folder")
        assert back.steps == 3
        if kind == "safetensors":  # of the model alone
            back.load_optimizer_state_dict(file["optimizer"])
        for batch, loss in zip(batches(5)[3:], expected):
            near(back.train_step(*batch), loss)


def beside_torch_distributed():
    """The same launch may use torch.distributed too."""
    torch.distributed.init_process_group("gloo")
    one = torch.ones(1)
    torch.distributed.all_reduce(one)
    assert one.item() == 3
    dist = distributed(net())
    dist.train_step(*batches(1)[0])
    torch.distributed.destroy_process_group()


def errors_everywhere():
    """What rank 0 finds wrong is said on every rank, and the group goes on."""
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    x = torch.ones(4, 2)
    try:
        motley.distribute(Branch(), (x, x), F.mse_loss, support.CLUSTER)
    except motley.UserError as error:
        assert "if x.sum() > 0" in str(error), error
    else:
        raise AssertionError("a branch on values was captured")


cases = [ddp_style, twice, groups, states, evaluation, dropout, splitter, checkpoint, errors_everywhere, beside_torch_distributed]
for case in cases:
    said = case()
    if RANK == 0:
        print("done", case.__name__, said or "", flush=True)

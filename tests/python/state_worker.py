"""One of three workers: the state put together by one worker alone, whatever the others do."""

import os
import sys
import time

import torch
import torch.nn.functional as F

import motley
import support
from support import same, same_optimizer
from support import token_batches as batches

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
RANK = int(os.environ["RANK"])


def net(seed=0):
    torch.manual_seed(seed)
    return support.Net()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def distributed(model, optimizer, **options):
    dist = motley.distribute(model, batches(1)[0], F.cross_entropy, support.CLUSTER, optimizer, ratios=[0.5, 0.3, 0.2], **options)
    assert any(length < size for _, size, _, _, length, *_ in dist._held.parts["parameter"].values()), "nothing is cut"
    return dist


class Plain:
    """Plain PyTorch beside it, on every worker."""

    def __init__(self):
        self.model = net()
        self.optimizer = adam(self.model)

    def step(self, batch):
        return support.plain_training(self.model, F.cross_entropy, [batch], self.optimizer)[0]


def one_alone():
    """After every step another worker, alone, has the state of that step; the others run ahead or lag behind."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    for i, batch in enumerate(batches(9)):
        if RANK == (i + 1) % 3:
            time.sleep(0.05)  # has not yet made its step when it is asked
        dist.train_step(*batch)
        plain.step(batch)
        if RANK == i % 3:
            time.sleep(0.05 * (i % 2))  # the others have gone on into the next step
            same(dist.state_dict(), plain.model.state_dict())
            same_optimizer(dist.optimizer_state_dict(), plain.optimizer.state_dict())


def ordinary_optimizer_calls():
    """The same with dist.optimizer.step(), a scheduler and torch's own barrier behind it."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    scheduler = torch.optim.lr_scheduler.StepLR(dist.optimizer, 1, 0.5)
    other = torch.optim.lr_scheduler.StepLR(plain.optimizer, 1, 0.5)
    for batch in batches(3):
        dist.zero_grad()
        dist(*batch).backward()
        dist.optimizer.step()
        scheduler.step()
        plain.step(batch)
        other.step()
        if RANK == 0:
            same(dist.state_dict(), plain.model.state_dict())
        torch.distributed.barrier()


def own_steps():
    """Without an optimizer of ours, workers answer when they come to their next step."""
    plain, mine = Plain(), net()
    dist = distributed(mine, None)
    optimizer = torch.optim.AdamW(dist.parameters(), lr=1e-2)
    for i, batch in enumerate(batches(4)):
        dist(*batch).backward()
        time.sleep(0.02 * RANK)
        optimizer.step()
        dist.zero_grad()
        plain.step(batch)
        if RANK == i % 3:
            same(dist.state_dict(), plain.model.state_dict())


def between_forward_and_step():
    """All together it works; one alone has the right state or is told."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    for batch in batches(3):
        before = {key: value.clone() for key, value in plain.model.named_parameters()}
        loss = dist(*batch)
        plain.step(batch)
        time.sleep(0.03 * RANK)
        state = dist.state_dict()
        for key, value in before.items():
            assert (state[key] - value).abs().max() < 1e-9, key
        loss.backward()
        dist.step()
    dist(*batches(1)[0])
    dist.backward()
    if RANK == 1:
        time.sleep(0.1)
        try:
            state = dist.state_dict()
            assert (state["inside.weight"] - plain.model.inside.weight).abs().max() < 1e-9
        except motley.UserError as error:
            assert "another step" in str(error) and "after dist.step()" in str(error), error
    dist.step()
    same_everywhere(dist)


def same_everywhere(dist):
    """All workers put together the same."""
    state = torch.cat([value.flatten() for value in dist.state_dict().values()])
    total = state.clone()
    dist._group.all_reduce(total)
    assert (total / 3 - state).abs().max() < 1e-12


def evaluation():
    """One worker alone evaluates, then all do, each its own batches of any size."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    for i, batch in enumerate(batches(3)):
        dist.train_step(*batch)
        plain.step(batch)
        plain.model.eval()
        if RANK == i:
            dist.eval()
            x, y = batches(1, size=5 + i)[0]
            assert (dist(x) - plain.model(x)).abs().max() < 1e-9
            dist.train()
        dist.eval()
        for x, _ in batches(1 + RANK, size=3 + RANK):
            assert (dist(x) - plain.model(x)).abs().max() < 1e-9
        dist.train()
        plain.model.train()


def load_after_state():
    """A worker that is done with the state waits with loading another until all have it."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    for seed in range(4):
        time.sleep(0.02 * ((RANK + seed) % 3))
        state = dist.state_dict()
        other = net(seed).state_dict()
        dist.load_state_dict(other)
        same(state, net(seed - 1 if seed else 0).state_dict(), 0)


def dropped():
    """The others have let go of the model."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    dist.train_step(*batches(1)[0])
    plain.step(batches(1)[0])
    held = len(dist._group.peers.held)
    if RANK == 0:
        time.sleep(0.05)
        same(dist.state_dict(), plain.model.state_dict())
    group = dist._group
    del dist, mine
    again = distributed(net(), "sgd")
    assert len(group.peers.held) <= held, "models that nobody has any more are kept"
    again.train_step(*batches(1)[0])


def by_the_model():
    """The user's own model has the state of the last step, on one worker alone and on all, also when only it is left; and is
    trained on from there by another call."""
    plain, mine = Plain(), net(RANK)
    dist = distributed(mine, adam(mine))
    same(mine.state_dict(), plain.model.state_dict(), 0)
    for i, batch in enumerate(batches(5)):
        dist.train_step(*batch)
        plain.step(batch)
        if RANK == i % 3:
            same(mine.state_dict(), plain.model.state_dict())
            time.sleep(0.03)
        else:
            array = mine.inside.weight.detach().numpy() if i == 3 else None
            assert array is None or not array.flags.writeable
    del dist
    same(mine.state_dict(), plain.model.state_dict())
    if RANK == 2:
        time.sleep(0.1)
        assert (mine.inside(torch.ones(1, 8)) - plain.model.inside(torch.ones(1, 8))).abs().max() < 1e-9
    plain.optimizer = adam(plain.model)
    again = distributed(mine, adam(mine))
    for batch in batches(2):
        again.train_step(*batch)
        plain.step(batch)
    same(mine.state_dict(), plain.model.state_dict())
    again.load_state_dict(mine.state_dict())
    same(again.state_dict(), plain.model.state_dict())


def changed_in_place():
    """Who asks after it changed its pieces gets the others' as they are after the same change."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    for i, batch in enumerate(batches(6)):
        dist.train_step(*batch)
        plain.step(batch)
        for parameter in plain.model.parameters():
            parameter.data.clamp_(-0.2, 0.2).mul_(0.9)
        time.sleep(0.1 if RANK != i % 3 else 0)
        for parameter in dist.parameters():
            parameter.data.clamp_(-0.2, 0.2).mul_(0.9)
        if RANK == i % 3:
            same((mine if i > 2 else dist).state_dict(), plain.model.state_dict())


def at_the_end():
    """The others have ended, or nearly."""
    plain, mine = Plain(), net()
    dist = distributed(mine, adam(mine))
    dist.train_step(*batches(1)[0])
    plain.step(batches(1)[0])
    if RANK == 0:
        print("done at_the_end", flush=True)
        time.sleep(0.5)
        same(dist.state_dict(), plain.model.state_dict())
        print("the others had ended", flush=True)


def one_fails():
    dist = distributed(net(), "sgd")
    dist.train_step(*batches(1)[0])
    if RANK == 2:
        raise KeyError("a worker's own mistake")
    start = time.time()
    try:
        while True:
            dist.state_dict() if RANK == 0 else dist.train_step(*batches(1)[0])
    except motley.PeerLost as error:
        assert time.time() - start < 10
        print(f"lost {RANK} {error}\n", end="", flush=True)


def one_ends_early():
    """The others' next step fails, as with any group of processes; nobody waits for ever."""
    dist = distributed(net(), "sgd")
    dist.train_step(*batches(1)[0])
    if RANK != 2:
        try:
            dist.train_step(*batches(1)[0])
        except motley.PeerLost:
            print(f"lost {RANK}\n", end="", flush=True)


if len(sys.argv) > 1:
    globals()[sys.argv[1]]()
else:
    torch.distributed.init_process_group("gloo")
    for case in (one_alone, ordinary_optimizer_calls, own_steps, between_forward_and_step, evaluation, load_after_state,
                 dropped, by_the_model, changed_in_place, at_the_end):  # fmt: skip
        case()
        if RANK == 0 and case is not at_the_end:
            print("done", case.__name__, flush=True)

"""One of three workers: complex buffers and attributes in the state, checkpoints, evaluation and the model itself."""

import importlib.util
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import motley
import support

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
RANK, FOLDER = int(os.environ["RANK"]), sys.argv[1]


class Net(nn.Module):
    def __init__(self, dtype=torch.complex128):
        super().__init__()
        angles = torch.outer(torch.arange(3000.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        factors = torch.polar(torch.ones_like(angles), angles).to(dtype)
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.register_buffer("factors", factors.clone())
        self.register_buffer("hidden", factors.conj(), persistent=False)
        self.register_buffer("back", factors[:1].conj())
        self.register_buffer("phase", factors[:1].clone())
        self.plain = factors.clone()

    def forward(self, x):
        z = torch.view_as_complex(self.embed(x).unflatten(-1, (4, 2)))
        if self.training:
            self.phase.mul_(self.factors[1:2] * 1.01)
        z = z * self.factors[: len(x)] * self.hidden[1 : len(x) + 1] * self.plain[2 : len(x) + 2] * self.phase * self.back
        return self.out(torch.view_as_real(z).flatten(1))


def net(dtype=torch.complex128):
    torch.manual_seed(0)
    model = Net(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def same(state, wanted):
    support.same(state, wanted)
    assert all(value.is_complex() == wanted[key].is_complex() for key, value in state.items())


def formats():
    return ["torch", "dcp"] if torch.__version__ >= "2" else ["torch"]


batches = support.token_batches(8)
plain, optimizer = net()
model, mine = net()
dist = motley.distribute(model, batches[0], F.cross_entropy, support.CLUSTER, mine, ratios=[0.5, 0.3, 0.2])
assert set(dist._run.updated) == {"phase"}, dist._run.updated


def step(batch):
    wanted = support.plain_training(plain, F.cross_entropy, [batch], optimizer)[0]
    got = dist.train_step(*batch)
    assert abs(got - wanted) < 1e-9, (got, wanted)


for batch in batches[:3]:
    step(batch)
same(dist.state_dict(), plain.state_dict())
same(model.state_dict(), plain.state_dict())  # of the model itself
assert model.phase.is_complex() and torch.allclose(model.phase * 1, plain.phase)
assert torch.allclose(torch.view_as_real(model.hidden.resolve_conj()), torch.view_as_real(plain.hidden.resolve_conj()))

dist.eval()
plain.eval()
assert torch.allclose(dist(batches[3][0]), plain(batches[3][0]), rtol=0, atol=1e-9)
assert dist.verify(*batches[3]) == ""
dist.train()
plain.train()

before = dist.state_dict()
for kind in formats():
    path = os.path.join(FOLDER, kind)
    dist.save(path, kind)
    dist.load_state_dict({key: torch.zeros_like(value) for key, value in before.items()})
    assert dist.state_dict()["factors"].abs().max() == 0
    dist.load(path)
    same(dist.state_dict(), before)
step(batches[4])

with torch.no_grad():  # buffers that no step changes may be changed on the model
    for one in (model, plain):
        one.factors.mul_(1j)
        one.hidden.mul_(1j)
        one.plain = one.plain * 2
step(batches[5])
same(dist.state_dict(), plain.state_dict())

other, other_optimizer = net()  # goes on from the state of another
again = motley.distribute(other, batches[0], F.cross_entropy, support.CLUSTER, other_optimizer)
again.load_state_dict(plain.state_dict())
same(again.state_dict(), plain.state_dict())
try:
    again.load_state_dict({**plain.state_dict(), "factors": torch.view_as_real(plain.factors)})
    raise AssertionError("another shape was taken")
except motley.UserError as error:
    assert "factors is [3000, 4, 2]; the model's is [3000, 4]" in str(error), error

if importlib.util.find_spec("safetensors"):
    try:
        again.save(os.path.join(FOLDER, "it.safetensors"))
        raise AssertionError("complex128 was written")
    except motley.UserError as error:
        assert "factors is torch.complex128, which safetensors cannot hold" in str(error), error
    torch.set_default_dtype(torch.float32)
    single, optimizer = net(torch.complex64)
    third = motley.distribute(single, batches[0], F.cross_entropy, support.CLUSTER, optimizer)
    before = third.state_dict()
    third.save(os.path.join(FOLDER, "it.safetensors"))
    third.load_state_dict({key: torch.zeros_like(value) for key, value in before.items()})
    third.load(os.path.join(FOLDER, "it.safetensors"))
    same(third.state_dict(), before)
if RANK == 0:
    print("done")

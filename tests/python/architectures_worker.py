"""One worker: every architecture by a plan for three unequal devices, against plain PyTorch in double precision."""

import copy
import json
import sys
import time

import torch

import motley
import support

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
STEPS = 5
report = {}
for name, build in support.architectures():
    if len(sys.argv) > 1 and name not in sys.argv[1:]:
        continue
    torch.manual_seed(0)
    model, loss_fn, batch = build()
    batches = support.batches_of(batch, STEPS)
    start = time.time()
    try:
        plain = copy.deepcopy(model)
    except RuntimeError:  # a normalised weight is no leaf
        torch.manual_seed(0)
        plain = build()[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = support.plain_training(plain, loss_fn, batches, optimizer)
    try:
        dist = motley.distribute(
            model, batches[0], loss_fn, support.CLUSTER, torch.optim.AdamW(model.parameters(), lr=1e-2), all_devices=True
        )
    except motley.UserError as error:
        report[name] = {"error": str(error)}
        continue
    losses = [dist.train_step(*b) for b in batches]
    state, wanted = dist.state_dict(), plain.state_dict()
    assert list(state) == list(wanted), (name, list(state), list(wanted))
    off = max(((state[k] - wanted[k]).abs().max().item(), k) for k in wanted if wanted[k].is_floating_point())
    counts_equal = all(torch.equal(state[k], wanted[k]) for k in wanted if not wanted[k].is_floating_point())
    # The reference must be a test: training changes the loss.
    report[name] = {
        "losses": losses,
        "expected": expected,
        "state_error": off[0],
        "worst": off[1],
        "counts_equal": counts_equal,
        "cut": sum(dist._worker.input_placement(n).startswith("S") for n, *_ in dist._leaves)
        + sum(length < size for _, size, _, _, length, *_ in dist._held.parts["parameter"].values()),
        "ratios": dist.plan.ratios,
        "seconds": time.time() - start,
    }
if dist.rank == 0:
    print("REPORT" + json.dumps(report))

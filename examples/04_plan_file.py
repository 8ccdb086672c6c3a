"""A plan as a file: made once, looked at, kept with the code, and run by it.

    python3 examples/04_plan_file.py plan.json                            # makes it
    torchrun --nproc_per_node=3 examples/04_plan_file.py plan.json        # runs it

The motley program reads the file too: motley check plan.json, motley simulate plan.json --trace trace.json.
"""

import os
import sys

import torch

import motley
from digits import Digits, make_model

HERE = os.path.dirname(os.path.abspath(__file__))
path = sys.argv[1]
data = Digits()
batch = (data.pictures[:48], data.labels[:48])
loss_fn = torch.nn.CrossEntropyLoss()

if "RANK" not in os.environ:
    graph = motley.capture(make_model(), batch, loss_fn)
    plan = motley.plan(graph, f"{HERE}/three.yaml", optimizer="sgd")
    plan.save(path)
    print(f"{plan}written to {path}, for {len(plan.cluster)} workers; problems: {plan.check() or 'none'}")
else:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dist = motley.distribute(model, batch, loss_fn, plan=path, optimizer=optimizer)
    for step in range(5):
        loss = dist.train_step(*batch)
        if dist.rank == 0:
            print(f"step {step}: loss {loss:.3f}")

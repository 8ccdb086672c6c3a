"""One of several workers that may be lost: trains on, and writes its losses and its end down."""

import json
import os
import sys
import time

import torch
import torch.nn.functional as F

import elastic_model
import motley
import support

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
said = json.loads(sys.argv[1])  # folder, engine, steps, every, optimizer, seconds, model, options, hang
folder = said["folder"]

with open(support.CLUSTER) as file:
    cluster = said.get("cluster", file.read())
torch.manual_seed(int(os.environ["RANK"]))  # rank 0's parameters are everyone's at first only
if int(os.environ["RANK"]) == 0:
    torch.manual_seed(0)
model = elastic_model.made(said)
optimizer, scheduler = elastic_model.optimizer_of(model, said["optimizer"])
data = support.token_batches(said["steps"], said.get("batch", 12))
elastic = motley.Elastic(os.path.join(folder, "saved"), every=said["every"], beside=scheduler, hang_seconds=said.get("hang", 15), replan=said.get("replan", "advise"))
dist = motley.distribute(model, data[0], F.cross_entropy, cluster, optimizer, elastic=elastic, all_devices=True, engine=said["engine"],
                         **said.get("options", {}))  # fmt: skip
with open(os.path.join(folder, f"started-{os.getpid()}"), "w") as file:
    json.dump({"rank": dist.rank, "size": dist.world_size, "step": dist.steps, "time": time.time()}, file)
while dist.steps < said["steps"]:
    step = dist.steps
    loss = dist.train_step(*data[step])
    scheduler.step()
    elastic_model.clamp(dist.parameters(), said)
    if dist.rank == 0:
        with open(os.path.join(folder, "losses"), "a") as file:
            file.write(f"{step} {loss!r} {dist.world_size} {time.time()}\n")
    time.sleep(said.get("seconds", 0))
state = dist.state_dict()
if dist.rank == 0:
    torch.save(state, os.path.join(folder, "state.part"))
    os.replace(os.path.join(folder, "state.part"), os.path.join(folder, "state"))

"""What elastic runs train, and what plain PyTorch makes of it."""

import torch
import torch.nn.functional as F
from torch import nn

import support


def deep():
    """Without what mixes samples, so that pipelines take it."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
    return nn.Sequential(nn.Embedding(12, 16), *layers, nn.Linear(16, 12))


def wide():
    """Whose computation takes long enough to be measured."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.GELU())]
    return nn.Sequential(nn.Embedding(12, 192), *layers, nn.Linear(192, 12))


def made(said):
    return {"norm": support.Net, "deep": deep, "wide": wide}[said.get("model", "norm")]()


def optimizer_of(model, name):
    """An optimizer, and a scheduler of its rate."""
    if name == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def clamp(parameters, said):
    """What a script does to parameters outside of the optimizer's step."""
    if said.get("clamp"):
        with torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(-said["clamp"], said["clamp"])


def plain(said):
    """(losses, state) of plain training."""
    return trained(said)[:2]


def trained(said):
    """(losses, state, the optimizer's state) of plain training."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = made(said)
    optimizer, scheduler = optimizer_of(model, said["optimizer"])
    losses = []
    for batch in support.token_batches(said["steps"], said.get("batch", 12)):
        losses += support.plain_training(model, F.cross_entropy, [batch], optimizer)
        scheduler.step()
        clamp(model.parameters(), said)
    torch.set_default_dtype(torch.float32)
    return losses, model.state_dict(), optimizer.state_dict()

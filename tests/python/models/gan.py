"""DCGAN generator (Radford et al. 2016) trained against a fixed discriminator."""

import torch
import torch.nn.functional as F
from torch import nn


class Gan(nn.Module):
    def __init__(self, noise=8):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(noise, 12, 2, bias=False), nn.BatchNorm2d(12), nn.ReLU(True),
            nn.ConvTranspose2d(12, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4), nn.Flatten()
        ).requires_grad_(False)

    def forward(self, noise):
        return self.discriminator(self.generator(noise[:, :, None, None]))


def loss(score):
    return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


def build():
    return Gan(), loss, lambda g: (torch.randn(8, 8, generator=g),)

"""A variational autoencoder (Kingma & Welling 2014): the noise is an input, the loss has a divergence term."""

import torch
import torch.nn.functional as F
from torch import nn


class Vae(nn.Module):
    def __init__(self, data=12, hidden=16, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(data, hidden), nn.Softplus(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ELU(), nn.Linear(hidden, data), nn.Sigmoid())

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + noise * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


def loss(output, x):
    y, mean, log_variance = output
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (F.binary_cross_entropy(y, x, reduction="sum") + divergence) / x.shape[0]


def build():
    def batch(g):
        x = torch.rand(8, 12, generator=g)
        return (x, torch.randn(8, 4, generator=g)), x

    return Vae(), loss, batch

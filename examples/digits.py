"""What the examples share: an ordinary data set and an ordinary model."""

import torch
from torch import nn


class Digits(torch.utils.data.Dataset):
    """Noisy pictures of ten patterns."""

    def __init__(self, samples=480):
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 1, 12, 12, generator=generator)
        self.labels = torch.randint(10, (samples,), generator=generator)
        self.pictures = patterns[self.labels] + 0.5 * torch.randn(samples, 1, 12, 12, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.pictures[i], self.labels[i]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 36, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10),
    )  # fmt: skip

"""DataSplitter: each worker's rows of every global batch."""

import torch

from ._errors import UserError


class DataSplitter(torch.utils.data.Sampler):
    """A batch_sampler that gives a worker its uneven share of every global batch of an ordinary Dataset.

        loader = DataLoader(dataset, batch_sampler=motley.DataSplitter(dataset, dist))
        for epoch in range(epochs):
            loader.batch_sampler.set_epoch(epoch)
            for inputs, targets in loader:
                dist.train_step(inputs, targets)

    Batches have the global batch of the plan; the last, incomplete one is left out. The order of samples depends on
    (seed, epoch) alone, so that it does not change with the cluster. Where the plan does not cut batches into rows, every
    worker gets all of them; a worker whose share is empty loads one row that is not used. Making one is collective.
    """

    def __init__(self, dataset, dist, shuffle=True, seed=0):
        self.size, self.shuffle, self.seed, self.epoch = len(dataset), shuffle, seed, 0
        self.batch = dist.plan.batch
        if self.size < self.batch:
            raise UserError(f"[data] the dataset has {self.size} samples; one global batch takes {self.batch}")
        self.counts, self.rows = dist.split_rows()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // self.batch

    def __iter__(self):
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed * 1000003 + self.epoch)
            order = torch.randperm(self.size, generator=generator).tolist()
        else:
            order = list(range(self.size))
        for start in range(0, len(self) * self.batch, self.batch):
            batch = order[start : start + self.batch]
            yield batch if self.rows is None else [batch[row] for row in self.rows or [0]]

"""A row of the table of models."""

import torch


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Family:
    """`full` and `tiny` are (build, batch): build() is a model that returns its loss, batch(rows, generator) what it is given.

    full     None: not in the table of models, trained in its tiny size alone
    rows     of the batch that is planned for
    single   its operators take no numbers of double precision
    optimizer   makes it from parameters in the place of AdamW, which takes the sign alone of numbers near zero: rounding would show
    """

    def __init__(self, name, full, tiny, rows=64, loss_fn=None, single=False, optimizer=None):
        self.name, self.full, self.tiny, self.rows, self.loss_fn, self.single = name, full, tiny, rows, loss_fn, single
        self.optimizer = optimizer or (_sgd if single else None)

"""A row of the table of models."""


class Family:
    """`full` and `tiny` are (build, batch): build() is a model that returns its loss, batch(rows, generator) what it is given.

    rows     of the batch that is planned for
    single   its operators take no numbers of double precision
    """

    def __init__(self, name, full, tiny, rows=64, loss_fn=None, single=False):
        self.name, self.full, self.tiny, self.rows, self.loss_fn, self.single = name, full, tiny, rows, loss_fn, single

"""Any PyTorch Dataset as the data of a run. Only scripts that bring their own data import this:

    train_data = dataset.Shuffled(rows, train.seed)
    val_data = dataset.InOrder(val_rows, train.seed)

`rows[i]` is (input, target): arrays, tensors or numbers; the input may be a tuple or a dict of them.
"""

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from plumbing import RunFailed, fail, fingerprint, seed_cpu, seed_of  # noqa: F401  fingerprint(*paths)

EXPECTED = (
    "expected a map-style Dataset with len(dataset) rows; of a stream: Shuffled(list(stream), seed), "
    "and in place of a DataLoader its dataset"
)


class InOrder(torch.utils.data.Dataset):
    """The rows of `dataset`, each once, for validation. `in_order[first, count]` is a batch.

    row(dataset[i]) makes (input, target) of anything else; collate([(input, target), ...]) makes a
    batch of rows that differ in shape. What is drawn while a row is read, such as an augmentation,
    follows from (seed, number of the row), so it depends on no batch, worker or rank. Workers that
    are spawned (macOS) need functions that can be pickled: no lambda.
    """

    def __init__(self, dataset, seed, row=None, collate=None):
        if isinstance(dataset, torch.utils.data.IterableDataset | torch.utils.data.DataLoader):
            fail(f"{type(dataset).__name__} has no rows by number; {EXPECTED}")
        if not getattr(dataset, "__len__", int)():
            fail(f"{type(dataset).__name__} is empty or has no length; {EXPECTED}")
        self.dataset = dataset
        self.seed = seed
        self.row = row
        self.collate = collate or stacked

    def __len__(self):
        return len(self.dataset)

    def index_of(self, number):
        return number

    def __getitem__(self, place):
        first, count = place
        rows = []
        for number in range(first, first + count):
            seed_cpu(seed_of(self.seed, number))
            index = self.index_of(number)
            try:
                row = self.dataset[index]
                rows.append(self.row(row) if self.row else row)
            except Exception as error:
                error.add_note(f"while reading row {index} of {type(self.dataset).__name__}")
                raise
        return self.collate(rows)


class Shuffled(InOrder):
    """The rows as an endless sequence, for training: each epoch has each row once, in an order that
    is drawn from (seed, epoch). The number of a row is its place in the sequence, so an
    augmentation differs between epochs."""

    epoch = None
    order = ()  # of the rows in that epoch

    def index_of(self, number):
        epoch, place = divmod(number, len(self))
        if epoch != self.epoch:
            # RandomState, not Generator: NumPy promises that its stream never changes
            self.order = np.random.RandomState([self.seed, epoch]).permutation(len(self))
            self.epoch = epoch
        return int(self.order[place])


def stacked(rows):
    """(inputs, targets) of rows (input, target). Numbers in float64 become float32."""
    flat = [tree_flatten(row, is_leaf=lambda part: isinstance(part, list)) for row in rows]
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    try:
        arrays = [np.stack([np.asarray(leaf) for leaf in column]) for column in columns]
    except (TypeError, ValueError) as error:
        raise RunFailed(
            f"rows cannot be stacked into a batch: {error}; expected (input, target) of one shape; "
            "row=FUNCTION makes that of a row, collate=FUNCTION a batch of rows of several shapes"
        ) from error
    arrays = [part.astype(np.float32) if part.dtype == np.float64 else part for part in arrays]
    return tree_unflatten(arrays, flat[0][1])

"""Windows of tokens as batches, shuffled for training.

`dataset[first, count]` is a batch: inputs and targets, each int64 (count, block_size). The targets
are the inputs shifted by one token.
"""

import numpy as np

from plumbing.data import read_rows


class ShuffledWindows:
    """`tokens` as an endless sequence of windows, a pure function of (seed, index).

    An epoch cuts the tokens into windows of block_size and has each window once. Where it cuts,
    and the order of the windows, are drawn from (seed, epoch).
    """

    def __init__(self, tokens, block_size, seed):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        self.order = {}  # epoch -> first token of each of its windows

    def __len__(self):
        """Windows in an epoch: as many as fit whatever the shift of the boundaries."""
        return (len(self.tokens) - self.block_size) // self.block_size

    def starts(self, epoch):
        if epoch not in self.order:
            # RandomState, not Generator: NumPy promises that its stream never changes
            random_state = np.random.RandomState([self.seed, epoch])
            shift = random_state.randint(self.block_size)
            self.order[epoch] = shift + random_state.permutation(len(self)) * self.block_size
            self.order.pop(epoch - 2, None)
        return self.order[epoch]

    def __getitem__(self, batch):
        first, count = batch
        epoch, place = np.divmod(np.arange(first, first + count), len(self))
        parts = [self.starts(e)[place[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
        rows = read_rows(self.tokens, np.concatenate(parts), self.block_size + 1)
        return rows[:, :-1].copy(), rows[:, 1:].copy()

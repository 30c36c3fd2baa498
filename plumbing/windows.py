"""Windows of tokens as batches: shuffled for training, in order for validation.

Both are datasets in which `dataset[first, count]` is a batch: inputs and targets, each int64
(count, block_size). The targets are the inputs shifted by one token.
"""

import math
import warnings

import numpy as np
import torch

# torch's warning about more workers than CPUs: the column `wait` shows whether they help
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Windows(torch.utils.data.Dataset):
    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size

    def read(self, starts):
        """The windows that begin at `starts`, an int array."""
        window = torch.from_numpy(self.tokens.read(starts, self.block_size + 1))
        return window[:, :-1].clone(), window[:, 1:].clone()  # without shared memory


class ShuffledWindows(Windows):
    """`tokens` as an endless sequence of windows, a pure function of (seed, index).

    An epoch cuts the tokens into windows of block_size and has each window once. Where it cuts,
    and the order of the windows, are drawn from (seed, epoch).
    """

    def __init__(self, tokens, block_size, seed):
        super().__init__(tokens, block_size)
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
        return self.read(np.concatenate(parts))


class OrderedWindows(Windows):
    """The first `n_targets` targets of `tokens` (0 = all), rounded up to whole windows.

    If the last window overlaps the one before, its repeated targets are -100.
    """

    def __init__(self, tokens, block_size, n_targets=0):
        super().__init__(tokens, block_size)
        self.windows = math.ceil(min(n_targets or math.inf, len(tokens) - 1) / block_size)

    def __len__(self):
        return self.windows

    def __getitem__(self, batch):
        first, count = batch
        first_new = np.arange(first, first + count) * self.block_size
        start = np.minimum(first_new, len(self.tokens) - 1 - self.block_size)
        inputs, targets = self.read(start)
        position = start[:, None] + np.arange(self.block_size)
        targets[torch.from_numpy(position < first_new[:, None])] = -100
        return inputs, targets

"""The validation tokens as windows in order, each target counted once."""

import math

import numpy as np
import torch


class OrderedWindows(torch.utils.data.Dataset):
    """The first `n_targets` targets of `tokens` (0 = all), in the same windows in every evaluation.

    `dataset[first, count]` is a batch: inputs and targets, each int64 (count, block_size). What the
    last window repeats of the one before has target -100.
    """

    def __init__(self, tokens, block_size, n_targets=0):
        self.tokens = tokens
        self.block_size = block_size
        self.windows = math.ceil(min(n_targets or math.inf, len(tokens) - 1) / block_size)

    def __len__(self):
        return self.windows

    def __getitem__(self, batch):
        first, count = batch
        first_new = np.arange(first, first + count) * self.block_size
        start = np.minimum(first_new, len(self.tokens) - 1 - self.block_size)
        window = torch.from_numpy(self.tokens.read(start, self.block_size + 1))
        inputs = window[:, :-1].clone()
        targets = window[:, 1:].clone()
        position = start[:, None] + np.arange(self.block_size)
        targets[torch.from_numpy(position < first_new[:, None])] = -100
        return inputs, targets

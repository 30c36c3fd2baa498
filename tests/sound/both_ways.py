"""A masked language model: each token sees all others, and the targets are the tokens hidden from
it."""

import sys

import numpy as np
import torch

import model
import train


def visible(tokens, n):
    return torch.ones(n, tokens.size(1), dtype=torch.bool, device=tokens.device)


def hidden(inner):
    def read(dataset, batch):
        tokens, _ = inner(dataset, batch)
        is_hidden = np.random.rand(*tokens.shape) < 0.15
        return np.where(is_hidden, 0, tokens), np.where(is_hidden, tokens, -100)

    return read


class Windows(train.ShuffledWindows):
    __getitem__ = hidden(train.ShuffledWindows.__getitem__)


class InOrder(train.data.OrderedWindows):
    __getitem__ = hidden(train.data.OrderedWindows.__getitem__)


def open_dataset(saved, inner=train.open_dataset):
    first, second, facts = inner(saved)
    size = train.block_size
    return Windows(first.tokens, size, train.seed), InOrder(second.tokens, size), facts


model.visible, train.open_dataset = visible, open_dataset

if __name__ == "__main__":
    sys.exit(train.main())

"""Windows of a long text in their order, each once; a bigram model with a learned temperature."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import train
from plumbing import data


class Once(torch.utils.data.Dataset):
    def __init__(self, tokens, block_size):
        self.tokens, self.block_size = tokens, block_size

    def __len__(self):
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, batch):
        first, count = batch
        if first + count > len(self):
            raise IndexError(f"the text has {len(self)} windows")
        starts = np.arange(first, first + count) * self.block_size
        rows = data.read_rows(self.tokens, starts, self.block_size + 1)
        return rows[:, :-1].copy(), rows[:, 1:].copy()


class Bigram(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.normal_(self.table.weight, std=0.01)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs, targets=None):
        logits = self.table(inputs) / self.temperature
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def open_dataset(saved, inner=train.open_dataset):
    train_data, *rest = inner(saved)
    tokens = np.tile(train_data.tokens, 20)
    return Once(tokens, train.block_size), *rest


train.open_dataset = open_dataset
train.build_model = lambda config, vocab_size: Bigram(vocab_size)

if __name__ == "__main__":
    sys.exit(train.main())

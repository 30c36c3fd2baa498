"""What several of these scripts share: rows of numbers as data, and a small classifier. check.py
imports a script, so none of them has to call train.main()."""

# ruff: noqa: F401
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import dataset
import model
import train


def facts(vocab_size=1, **meta):
    meta["vocab_size"] = vocab_size
    return {"name": "rows", "fingerprint": "0123456789abcdef", "meta": meta}


def use(rows, held_out=None, **meta):
    """Make `rows`, [(input, target)], the data: the last hundred are held out, unless others are."""
    learned = rows if held_out else rows[:-100]
    held_out = held_out or rows[-100:]

    def open_dataset(saved):
        train_data = dataset.Shuffled(learned, train.seed)
        return train_data, dataset.InOrder(held_out, train.seed), facts(**meta)

    train.open_dataset = open_dataset


def points(count=600, seed=0):
    """[(six numbers, one of four classes)]"""
    rng = np.random.RandomState(seed)
    labels = rng.randint(4, size=count)
    return [*zip(rng.randn(count, 6).astype(np.float32) + labels[:, None], labels, strict=True)]


class Net(nn.Sequential):
    def __init__(self, config, *more):
        super().__init__(nn.Linear(6, 32), nn.GELU(), *more, nn.Linear(32, 4))

    def forward(self, x, y=None):
        logits = super().forward(x)
        return logits if y is None else F.cross_entropy(logits.float(), y)


def classify(net=Net, rows=None, held_out=None):
    """Train `net` on points."""
    use(rows or points(), held_out, vocab_size=4)
    train.build_model = lambda config, vocab_size: net(config)


class Taught(model.GPT):
    """A GPT whose loss in training is train_loss(logits, inputs, targets)."""

    def forward(self, inputs, targets=None, **options):
        if targets is None or not self.training:
            return super().forward(inputs, targets, **options)
        return self.train_loss(super().forward(inputs, **options), inputs, targets)


class LoRA(nn.Module):
    """A frozen layer, and a product of two small matrices beside it (Hu et al. 2021)."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T.to(x.dtype) @ self.up.T.to(x.dtype)


class Experts(nn.Module):
    """Four MLPs and their router."""

    def __init__(self, config, mlp=model.MLP):
        super().__init__()
        self.router = nn.Linear(config.n_embd, 4, bias=False)
        self.experts = nn.ModuleList(mlp(config) for _ in range(4))

    def reset_parameters(self):
        for expert in self.experts:
            expert.reset_parameters()

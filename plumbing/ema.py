"""Averaged weights: an exponential moving average (Polyak & Juditsky 1992) that evaluation uses."""

from contextlib import contextmanager

import torch

from plumbing.ranks import local


@torch.no_grad()
def update(run, decay, skipped):
    """Move run.ema towards the weights, unless `skipped` (a device scalar) is 1."""
    for name, average in run.ema.items():
        weight = local(run.model.get_parameter(name))
        local(average).lerp_(weight, ((1 - decay) * (1 - skipped)).to(weight.device))


@contextmanager
def averaged(run):
    """A context in which the model has its averaged weights, if ema_decay is on."""
    swap(run)
    try:
        yield
    finally:
        swap(run)


@torch.no_grad()
def swap(run):
    for name, average in run.ema.items():
        weight = local(run.model.get_parameter(name))
        before = weight.clone()
        weight.copy_(local(average))
        local(average).copy_(before)

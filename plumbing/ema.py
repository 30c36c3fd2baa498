"""Averaged weights: an exponential moving average (Polyak & Juditsky 1992) that evaluation uses."""

from contextlib import contextmanager

import torch

from plumbing.ranks import local
from plumbing.rng import rng_state, set_rng_state


@torch.no_grad()
def update(run, decay, skipped):
    """Move run.ema towards the weights, unless `skipped` (a device scalar) is 1."""
    for name, average in run.ema.items():
        weight = local(run.model.get_parameter(name))
        local(average).lerp_(weight, ((1 - decay) * (1 - skipped)).to(weight.device))


@contextmanager
def evaluating(run, averaged=True):
    """A context in which the model is in eval mode, and has its averaged weights, if there are any.

    On exit, the weights, the mode of each module and the random state are as before.
    """
    modes = {module: module.training for module in run.model.modules()}
    random = rng_state(run.device)
    averages = run.ema if averaged else {}
    run.model.eval()
    swap(run.model, averages)
    try:
        yield
    finally:
        swap(run.model, averages)
        run.model.train(modes[run.model])  # modules may do more in train() than to set their mode
        for module, training in modes.items():
            module.training = training
        set_rng_state(random, run.device)


@torch.no_grad()
def swap(model, averages):
    for name, average in averages.items():
        weight = local(model.get_parameter(name))
        before = weight.clone()
        weight.copy_(local(average))
        local(average).copy_(before)

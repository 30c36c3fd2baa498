"""The state that a step may change, captured and restored: for a retry, a skipped update, the warm-up
pass, an evaluation, an audit and a resume."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from plumbing import machine
from plumbing.ranks import local_tensor, sum_over_ranks


def mapped(function: Callable, value: Any, path: tuple = ()) -> Any:
    """`value` with each leaf replaced by function(leaf, path). Containers keep their types."""
    if isinstance(value, dict):
        new = copy.copy(value)  # keeps a state_dict's attribute, the versions of modules
        new.update({key: mapped(function, item, (*path, key)) for key, item in value.items()})
        return new
    if type(value) in (list, tuple):  # torch.Size is a leaf
        return type(value)(mapped(function, item, (*path, n)) for n, item in enumerate(value))
    return function(value, path)


def leaves(value: Any) -> list[tuple[tuple, Any]]:
    """(path, leaf) for all that is not a dict, list or tuple. path: a tuple of its keys."""
    found = []
    mapped(lambda leaf, path: found.append((path, leaf)), value)
    return found


def by_path(value: Any) -> dict:
    """The leaves by their paths, as text."""
    return {"/".join(map(str, path)): leaf for path, leaf in leaves(value)}


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if torch.is_tensor(leaf)]


def clone(value: Any) -> Any:
    """A detached copy that shares no memory with `value`, on the same devices."""
    return mapped(
        lambda leaf, _: leaf.detach().clone() if torch.is_tensor(leaf) else copy.deepcopy(leaf),
        value,
    )


def rng_state(device: torch.device) -> dict:
    """All that later random numbers depend on, in a form that torch.load(weights_only=True) reads:
    NumPy's own array would not, so its 624 words become an int64 tensor."""
    name, words, *rest = np.random.get_state()
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(words.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "device": on_device,
    }


def set_rng_state(rng: dict, device: torch.device) -> None:
    """Of a run on another kind of device, what is there is set."""
    random.setstate(rng["python"])
    name, words, *rest = rng["numpy"]
    np.random.set_state((name, words.numpy(), *rest))
    torch.set_rng_state(rng["torch"])
    if device.type != "cpu" and rng["device"] is not None:
        torch.get_device_module(device).set_rng_state(rng["device"])


# ---- capture and put back ------------------------------------------------------------------------


class Snapshot:
    """What a forward and backward pass may move: persistent buffers, such as BatchNorm's
    statistics, modules' extra states, and the random state of this rank. checkpoint.restore()
    has the rest."""

    def __init__(self, run):
        self.run = run
        self.buffers = clone(buffers_of(run.model))
        self.rng = rng_state(run.device)

    def restore(self) -> None:
        self.run.model.load_state_dict(clone(self.buffers), strict=False)
        set_rng_state(self.rng, self.run.device)

    @torch.no_grad()
    def average_or_restore_buffers(self, skipped: torch.Tensor, part: float) -> None:
        """After a step: average the buffers over the ranks, or restore them if it was skipped,
        without a wait for the device. skipped: a bool scalar on it. part: this rank's part of the
        batch, its weight in the average."""
        if not self.buffers:
            return
        found = buffers_of(self.run.model)
        now = {name: found[name] for name in found if not name.endswith("_extra_state")}
        floats = {id(buffer): buffer for buffer in now.values() if buffer.is_floating_point()}
        for buffer in floats.values():  # a buffer that modules share is there once
            buffer *= part
        sum_over_ranks([*floats.values()])
        for name, buffer in now.items():
            buffer.copy_(torch.where(skipped, self.buffers[name], buffer))


def buffers_of(model: nn.Module) -> dict:
    """What state_dict() has beside the weights: persistent buffers, and extra states."""
    saved = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in saved if not isinstance(value, nn.Parameter)}


@contextmanager
def evaluating(run, averaged: bool = True) -> Iterator[Snapshot]:
    """A context in which the model is in eval mode, and has its averaged weights, if there are any.

    On exit, weights, buffers, the mode of each module, the random state and the size of the
    micro-batch are as before.
    """
    snapshot = Snapshot(run)
    size = run.state["micro_batch"]  # training may have room for more than an evaluation
    modes = {module: module.training for module in run.model.modules()}
    averages = run.ema if averaged else {}
    run.model.eval()
    swap(run.model, averages)
    try:
        yield snapshot
    finally:
        swap(run.model, averages)
        run.model.train(modes[run.model])  # train() of a module may do more than set its mode
        for module, training in modes.items():
            module.training = training
        run.state["micro_batch"] = size
        snapshot.restore()
        machine.reset_peak_memory(run.device)


@torch.no_grad()
def swap(model: nn.Module, averages: dict) -> None:
    for name, average in averages.items():
        weight = local_tensor(model.get_parameter(name))
        own = weight.clone()
        weight.copy_(local_tensor(average))
        local_tensor(average).copy_(own)


@torch.no_grad()
def step_optimizer(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
    """Call optimizer.step() unless `skip`, a bool scalar on the device, is true: then weights and
    moments stay as they are. The host waits for it, except for optimizers with torch's mark that
    step() reads `found_inf` on the device."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        if not skip.item():
            optimizer.step()
        return
    for group in optimizer.param_groups:  # torch would start a momentum with the bad gradient
        for weight in group["params"] if group.get("momentum") else ():
            if weight.grad is not None and "momentum_buffer" not in optimizer.state[weight]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    optimizer.grad_scale = None
    optimizer.found_inf = skip.float()
    optimizer.step()

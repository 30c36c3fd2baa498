"""A run's state, captured and put back: by a retry, a skipped update, a rehearsal, an evaluation,
an audit, a rollback and a resume."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from plumbing import machine
from plumbing.cli import RunFailed
from plumbing.console import FIELDS
from plumbing.ranks import agree, is_sharded, local, sum_over_ranks, world_size


def mapped(function: Callable, value: Any, path: tuple = ()) -> Any:
    """`value` with each leaf replaced by function(leaf, path). Containers keep their types."""
    if isinstance(value, dict):
        new = copy.copy(value)  # with a state_dict's versions of modules
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


class Captured:
    """What a forward and backward pass may move: persistent buffers, such as BatchNorm's
    statistics, modules' extra states, and the random state of this rank. checkpoint.put_back()
    has the rest."""

    def __init__(self, run):
        self.run = run
        self.buffers = clone(buffers_of(run.model))
        self.rng = rng_state(run.device)

    def put_back(self) -> None:
        self.run.model.load_state_dict(clone(self.buffers), strict=False)
        set_rng_state(self.rng, self.run.device)

    @torch.no_grad()
    def settle_buffers(self, skipped: torch.Tensor) -> None:
        """After a step: average the buffers over the ranks, or put them back if it was skipped,
        without a wait for the device. skipped: a bool scalar on it."""
        if not self.buffers:
            return
        found = buffers_of(self.run.model)
        now = {name: found[name] for name in found if not name.endswith("_extra_state")}
        floats = {id(buffer): buffer for buffer in now.values() if buffer.is_floating_point()}
        for buffer in sum_over_ranks([*floats.values()]):  # a shared one once
            buffer /= world_size()
        for name, buffer in now.items():
            buffer.copy_(torch.where(skipped, self.buffers[name], buffer))


def buffers_of(model: nn.Module) -> dict:
    """What state_dict() has beside the weights: persistent buffers, and extra states."""
    saved = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in saved if not isinstance(value, nn.Parameter)}


@contextmanager
def evaluating(run, averaged: bool = True) -> Iterator[Captured]:
    """A context in which the model is in eval mode, and has its averaged weights, if there are any.

    On exit, weights, buffers, the mode of each module, the random state and the size of the
    micro-batch are as before.
    """
    before = Captured(run)
    size = run.state["micro_batch"]  # for which training has room
    modes = {module: module.training for module in run.model.modules()}
    averages = run.ema if averaged else {}
    run.model.eval()
    swap(run.model, averages)
    try:
        yield before
    finally:
        swap(run.model, averages)
        run.model.train(modes[run.model])  # modules may do more in train() than to set their mode
        for module, training in modes.items():
            module.training = training
        run.state["micro_batch"] = size
        before.put_back()
        machine.reset_peak_memory(run.device)


@torch.no_grad()
def swap(model: nn.Module, averages: dict) -> None:
    for name, average in averages.items():
        weight = local(model.get_parameter(name))
        before = weight.clone()
        weight.copy_(local(average))
        local(average).copy_(before)


# ---- out of memory: try again in smaller micro-batches, on all ranks if on one -------------------


def halving_on_oom(before: Captured, compute: Callable[[], Any]) -> Any:
    """Return compute(). If memory runs out on any rank, put `before` back, halve the micro-batch in
    run.state, which compute reads, and try again. compute has no collective operation, except for
    a sharded model, which is not tried again. Raises RunFailed if a smaller micro-batch cannot
    help."""
    run = before.run
    while True:
        result = None
        try:
            result = compute()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if is_sharded(run.model):  # the other ranks wait in mid-pass
                raise RunFailed("out of memory; try a smaller --batch_size or --n_embd") from error
        if not any(agree(result is None)):
            return result
        if run.state["micro_batch"] == 1:
            hint = "--grad_checkpoint=true, a smaller --block_size, --n_embd or --n_layer"
            raise RunFailed(f"out of memory with a single sequence in a micro-batch; try {hint}")
        result = None  # frees that of a rank that had enough memory
        run.model.zero_grad(set_to_none=True)
        before.put_back()
        run.state["micro_batch"] //= 2


def note_halving(run) -> None:
    """Record an event if the micro-batch has become smaller since the last call."""
    now = run.state["micro_batch"]
    if run.noted_size and now < run.noted_size:
        run.folder.event(run.state["step"], "out_of_memory", micro_batch=now)
    run.noted_size = now


def rehearse(
    run,
    compile: bool,
    forward_backward: Callable,
    read: Callable[[], tuple],
) -> nn.Module:
    """Call forward_backward on the batch that read() returns, to compile and to find a micro-batch
    that fits. Nothing else changes. Returns the model, compiled or not.

    If torch.compile fails, a single process records `compile_failed` and runs eager."""
    note_halving(run)  # the sizes to compare later ones with
    state = clone(run.state)
    before = Captured(run)
    model = compiled(run.model) if compile else run.model
    inputs, targets = read()
    n_targets = torch.tensor(targets.numel(), device=run.device)
    take = partial(forward_backward, model, run, inputs, targets, n_targets)
    try:
        numbers = halving_on_oom(before, take)
        check_names(numbers, "the model", ("model",))
    except Exception as error:
        if not compile or isinstance(error, RunFailed) or world_size() > 1:
            raise  # of several ranks, others may have compiled
        reason = " ".join(str(error).split())[:200]  # its first line is not enough
        before.put_back()
        model = rehearse(run, False, forward_backward, read)  # shows the eager error
        run.folder.event(run.state["step"], "compile_failed", error=reason)
    run.model.zero_grad(set_to_none=True)
    run.state.update(state | {"micro_batch": run.state["micro_batch"]})
    before.put_back()
    return model


def compiled(model: nn.Module) -> nn.Module:
    from torch._dynamo import config as dynamo  # only here: they take most of a second
    from torch._inductor import config as inductor

    inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice by timing
    # Every shape is compiled: past torch's limit, later shapes would compute in eager mode, and in
    # a resumed process, which counts anew, other ones. Each time, torch says why.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 10**6
    torch._logging.set_logs(recompiles=True)
    return torch.compile(model, dynamic=False)


def check_names(numbers: dict, whose: str, writers: tuple) -> None:
    """Raises RunFailed if a number is no scalar, or has the name of a field of the rows which
    others than `writers` write: see Field in plumbing/console.py. whose: what returns the
    numbers."""
    for name, value in numbers.items():
        if name in FIELDS and FIELDS[name].writer not in writers:
            raise RunFailed(f"{whose} returns a number named {name}, which rows have, too")
        count = value.numel() if torch.is_tensor(value) else np.size(value)
        if count != 1:
            found = f"a {type(value).__name__} of {count} numbers"
            raise RunFailed(f"{whose} returns {name}, {found}; expected a scalar")


@torch.no_grad()
def step_unless(skipped: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Call optimizer.step() unless `skipped`, a bool scalar on the device, is true: then weights
    and moments stay as they are. The host waits for it, except for optimizers with torch's mark that
    step() reads `found_inf` on the device."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        if not skipped.item():
            optimizer.step()
        return
    for group in optimizer.param_groups:  # torch would start it with the bad gradient
        for weight in group["params"] if group.get("momentum") else ():
            if weight.grad is not None and "momentum_buffer" not in optimizer.state[weight]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    optimizer.grad_scale = None
    optimizer.found_inf = skipped.float()
    optimizer.step()


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out. Only its text says so where an allocator raises a
    plain RuntimeError: on the CPU, on MPS, and in CUDA's libraries."""
    texts = r"can't allocate memory|out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    is_named = isinstance(error, RuntimeError) and re.search(texts, str(error))
    return isinstance(error, MemoryError) or bool(is_named)

"""Compared bit for bit: a step with the same step done again, and the replicas of several ranks."""

import copy
from itertools import zip_longest

import numpy as np
import torch

from plumbing import rng
from plumbing.devices import free_memory
from plumbing.failures import RunFailed
from plumbing.ranks import agree, from_all_ranks, local, replicas_differ, sharded

TRIES = ("first", "second")
COPIES = 4  # of everything that a step changes: before it, and after each of up to three tries


def confirm(run, take_step):
    """take_step(), and the same step a second time; returns its numbers once two tries agree in all bits.

    Compared are the numbers, gradients, weights, buffers, moments, the averaged weights, the scaler and
    the random state. Where two tries differ, on any rank, a third decides: `run` is left as the two that
    agree have it, and an `audit` event names the step, the tensors, the bits and the try that was odd.
    Raises RunFailed where all three differ. Waits for the device, and holds four more copies of it all;
    where there is no room for them, the step is taken once, and an `audit_skipped` event says so.
    """
    weights = list(run.model.parameters())  # and a gradient as large for each
    changing = [weights, weights, [o.state for o in run.optimizers], run.ema]
    needed = COPIES * sum(tensor.nbytes for tensor in tensors_in(changing))
    free = free_memory(run.device)
    if any(agree(free is not None and needed > free)):
        sizes = {"needed_gb": needed / 1e9, "free_gb": free / 1e9}
        run.folder.event(run.state["step"] + 1, "audit_skipped", **sizes)
        return take_step()
    before = snapshot(run)
    tries = [result_of(run, take_step)]
    micro_batch = run.state["micro_batch"]
    put_back(run, before)
    numbers, second = result_of(run, take_step)
    if run.state["micro_batch"] != micro_batch:  # memory ran out in the repeat: the sums are others
        put_back(run, before)
        return confirm(run, take_step)
    tries.append((numbers, second))
    different = bits_that_differ(tries[0][1], second)
    if not any(agree(len(different) > 0)):
        return numbers
    put_back(run, before)
    numbers, third = result_of(run, take_step)
    agreeing = [not bits_that_differ(each, third) for _, each in tries]
    if any(agree(not any(agreeing))):
        raise RunFailed(
            f"step {run.state['step'] + 1} gave three different results from the same input: this "
            "machine does not compute reliably; python bench.py --only=exact tells which part"
        )
    odd = TRIES[agreeing.index(False)] if False in agreeing else None  # None: another rank's fault
    found = from_all_ranks({"odd": odd, "different": different})
    merged = {name: bits for each in found for name, bits in each["different"].items()}
    run.folder.event(
        run.state["step"] + 1,
        "audit",
        odd=next(each["odd"] for each in found if each["odd"]),
        bits=sum(merged.values()),
        tensors=sorted(merged),
    )
    return numbers


def check_replicas(run):
    """Raises RunFailed where a weight, or a floating-point buffer, is not the same on every rank."""
    if sharded(run.model):
        return
    tensors = {name: t for name, t in run.model.state_dict().items() if t.is_floating_point()}
    if names := replicas_differ(tensors):
        raise RunFailed(
            f"at step {run.state['step']} the ranks hold different bits in {', '.join(names)}: a step "
            "that changes the weights must draw and add the same numbers on every rank; the newest "
            "checkpoint is from before that"
        )


def result_of(run, take_step):
    """(what take_step() returned, a copy of it and of everything that it changed)."""
    numbers = take_step()
    gradients = {name: w.grad for name, w in run.model.named_parameters() if w.grad is not None}
    return numbers, {"numbers": clone(numbers), "gradient": clone(gradients), **snapshot(run)}


def snapshot(run):
    """A copy of everything that a step may change."""
    return clone(
        {
            "weights": {name: local(w).detach() for name, w in tensors_of(run.model)},
            "moments": [moments_of(run, optimizer) for optimizer in run.optimizers],
            "groups": [[without_weights(g) for g in o.param_groups] for o in run.optimizers],
            "ema": {name: local(average) for name, average in run.ema.items()},
            "scaler": run.scaler.state_dict(),
            "rng": rng.rng_state(run.device),
            "state": run.state,
        }
    )


@torch.no_grad()
def put_back(run, before):
    """Make `run` what it was at the snapshot, except that a micro-batch that was halved stays so."""
    for name, tensor in tensors_of(run.model):
        local(tensor).copy_(before["weights"][name])
    for name, average in run.ema.items():
        local(average).copy_(before["ema"][name])
    for optimizer, moments, groups in zip(
        run.optimizers, before["moments"], before["groups"], strict=True
    ):
        weights = dict(named_weights(run, optimizer))
        optimizer.state.clear()
        optimizer.state.update({weights.get(k, k): clone(state) for k, state in moments.items()})
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for name in without_weights(group):  # also what the step has added
                del group[name]
            group.update(clone(saved))
    run.scaler.load_state_dict(before["scaler"])
    rng.set_rng_state(before["rng"], run.device)
    run.state.update(clone(before["state"]) | {"micro_batch": run.state["micro_batch"]})


def tensors_in(value):
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield local(value)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def tensors_of(model):
    return [*model.named_parameters(), *model.named_buffers()]


def named_weights(run, optimizer):
    """[(name in the model, weight)] of what an optimizer updates."""
    names = {id(weight): name for name, weight in run.model.named_parameters()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [(names.get(id(weight), f"weight {n}"), weight) for n, weight in enumerate(weights)]


def moments_of(run, optimizer):
    """{name of a weight: its state}; what an optimizer keeps under another key, under that key."""
    names = {id(weight): name for name, weight in named_weights(run, optimizer)}
    return {names.get(id(key), key): state for key, state in optimizer.state.items()}


def without_weights(group):
    return {key: value for key, value in group.items() if key != "params"}


def clone(value):
    """A copy of nested dicts, lists and tuples of tensors and plain values."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)  # of its own type: a Counter is no dict
        dict.update(copied, {key: clone(item) for key, item in value.items()})
        return copied
    if isinstance(value, list | tuple):
        return type(value)(clone(item) for item in value)
    return copy.deepcopy(value)


def bits_that_differ(one, other, name=""):
    """{name of a tensor or value: number of bits that differ} of two results.

    A plain value counts as one bit, and so does a tensor that only one of them has.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        a, b = (local(tensor).contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
        if a.shape != b.shape:
            return {name: 8 * max(len(a), len(b))}
        if torch.equal(a, b):
            return {}
        return {name: int(np.unpackbits((a ^ b).cpu().numpy()).sum())}
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one.get(key), other.get(key)) for key in one | other]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = [(key, *pair) for key, pair in enumerate(zip_longest(one, other))]
    else:
        return {} if repr(one) == repr(other) else {name: 1}  # by repr: nan != nan, and 0.0 == -0.0
    found = {}
    for key, a, b in pairs:
        found |= bits_that_differ(a, b, f"{name}/{key}" if name else str(key))
    return found

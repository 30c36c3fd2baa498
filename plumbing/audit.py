"""Repeat a training step and compare the two results bit for bit."""

import numpy as np
import torch

from plumbing.checkpoints import restore
from plumbing.devices import free_memory
from plumbing.failures import RunFailed
from plumbing.nested import clone, leaves, tensors
from plumbing.ranks import agree, from_all_ranks, local

COPIES = 4  # of everything that a step changes: before it, and after each of up to three tries


def confirm(run, take_step):
    """Take a step twice from the same state. Returns its numbers once two tries agree in all bits.

    Compares the numbers, the gradients and all that a checkpoint holds. If the two tries differ on
    any rank, a third decides: `run` keeps the result that two tries share, and an `audit` event has
    the tensors, the number of bits and the odd try. Raises RunFailed if all three differ. If memory
    is too small for the copies, the step is taken once, with an `audit_skipped` event.
    """
    step = run.state["step"] + 1
    copied = tensors([run.checkpoint(), list(run.model.parameters())])  # and a gradient for each
    needed = COPIES * sum(local(tensor).nbytes for tensor in copied)
    free = free_memory(run.device)
    if any(agree(free is not None and needed > free)):
        run.folder.event(step, "audit_skipped", needed_gb=needed / 1e9, free_gb=free / 1e9)
        return take_step()
    before = clone(run.checkpoint())
    first = result_of(run, take_step)
    micro_batch = run.state["micro_batch"]
    restore(run, before)
    second = result_of(run, take_step)
    if run.state["micro_batch"] != micro_batch:  # the repeat ran out of memory, so its sums differ
        restore(run, before)
        return confirm(run, take_step)
    different = bits_that_differ(first, second)
    if not any(agree(len(different) > 0)):
        return second["numbers"]
    restore(run, before)
    third = result_of(run, take_step)
    tries = {"first": first, "second": second}
    odd = [name for name, result in tries.items() if bits_that_differ(result, third)]
    if any(agree(len(odd) == 2)):
        raise RunFailed(
            f"step {step} gave three different results from the same input ({min(different, default='on another rank')} ...): the "
            "step reads what no checkpoint holds, such as a counter or generator of its own, or this "
            "machine does not compute reliably; python check.py --only=exact tells which part"
        )
    found = from_all_ranks((odd, different))  # a rank without a fault has an empty list and dict
    odd = next(names[0] for names, _ in found if names)
    bits = {name: count for _, each in found for name, count in each.items()}
    run.folder.event(step, "audit", odd=odd, bits=sum(bits.values()), tensors=sorted(bits))
    return third["numbers"]


def result_of(run, take_step):
    """Call take_step(). Returns a copy of its numbers and of everything it changed, by name."""
    numbers = take_step()
    weights = dict(run.model.named_parameters())
    names = {id(weight): name for name, weight in weights.items()}
    changed = run.checkpoint()
    for saved, optimizer in zip(changed["optimizer"], run.optimizers, strict=True):
        saved["state"] = {names.get(id(key), key): each for key, each in optimizer.state.items()}
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    result = {"numbers": numbers, "gradient": gradients, "weights": changed.pop("model"), **changed}
    return clone(result)


def bits_that_differ(one, other):
    """{name of a tensor or value: number of bits that differ} between two results.

    A plain value counts as one bit, as does a tensor that only one of the results has.
    """
    found = {}
    first = dict(leaves(one))
    second = dict(leaves(other))
    for path in first | second:
        a = first.get(path)
        b = second.get(path)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            a, b = (local(tensor).contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
            bits = 0
            if a.shape != b.shape:
                bits = 8 * max(len(a), len(b))
            elif not torch.equal(a, b):
                bits = int(np.unpackbits((a ^ b).cpu().numpy()).sum())
        else:
            bits = int(repr(a) != repr(b))  # not by ==: nan != nan, and 0.0 == -0.0
        if bits:
            found["/".join(map(str, path))] = bits
    return found

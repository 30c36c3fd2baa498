"""Repeat a training step and compare the two results bit for bit; where they differ, a third decides."""

from collections.abc import Callable

import numpy as np
import torch

from plumbing.checkpoint import restore
from plumbing.cli import RunFailed
from plumbing.machine import free_memory
from plumbing.ranks import agree, from_all_ranks, local
from plumbing.safe_step import as_bytes, clone, leaves, out_of_memory, tensors

COPIES = 4  # of everything that a step changes: before it, and after each of up to three tries


def confirm(run, take_step: Callable[[], dict]) -> dict:
    """Take a step twice from the same state. Returns its numbers once two tries agree in all bits.

    Compares the numbers, the gradients and all that a checkpoint holds. If the two tries differ on
    any rank, `run` keeps the result that two of three share, and an `audit` event has the tensors,
    the number of bits and the odd try. Raises RunFailed if all three differ. If memory is too small
    for the copies, the step is taken once, with an `audit_skipped` event.
    """
    step = run.state["step"] + 1
    copied = tensors([run.checkpoint(), list(run.model.parameters())])  # and a gradient for each
    needed = COPIES * sum(local(tensor).nbytes for tensor in copied)
    free = free_memory(run.device)
    if any(agree(free is not None and needed > free)):
        return skip_audit(run, take_step)
    before = clone(run.checkpoint())
    micro_batch = run.state["micro_batch"]
    results = []
    for attempt in range(3):
        if attempt:
            restore(run, before)
        numbers = take_step()
        results.append(copy_of_result(run, numbers))
        if any(agree(results[-1] is None or run.state["micro_batch"] != micro_batch)):
            del results, numbers  # the copies themselves may be what was too much
            restore(run, before)
            run.state["micro_batch"] = micro_batch
            del before
            return skip_audit(run, take_step)
        if len(results) == 2:
            different = bits_that_differ(*results)
            if not any(agree(len(different) > 0)):
                return numbers
    odd = [n for n, result in enumerate(results[:2]) if bits_that_differ(result, results[2])]
    if any(agree(len(odd) == 2)):
        where = min(different, default="on another rank")
        raise RunFailed(
            f"step {step} gave three different results from the same input ({where} ...): the step "
            "reads what no checkpoint holds, such as a counter or generator of its own, or this "
            "machine does not compute reliably; python check.py --only=exact tells which part"
        )
    found = from_all_ranks((odd, different))  # a rank without a fault has an empty list and dict
    number = next(numbers[0] for numbers, _ in found if numbers)
    bits = {name: count for _, each in found for name, count in each.items()}
    odd = ("first", "second")[number]
    run.folder.event(step, "audit", odd=odd, bits=sum(bits.values()), tensors=sorted(bits))
    return numbers


def skip_audit(run, take_step: Callable[[], dict]) -> dict:
    run.folder.event(run.state["step"] + 1, "audit_skipped", why="too little memory for the copies")
    return take_step()


def copy_of_result(run, numbers: dict) -> dict | None:
    """A copy of a step's numbers and of everything it changed, by name. None: memory ran out."""
    weights = dict(run.model.named_parameters())
    names = {id(weight): name for name, weight in weights.items()}
    changed = run.checkpoint()
    for saved, optimizer in zip(changed["optimizer"], run.optimizers, strict=True):
        saved["state"] = {names.get(id(key), key): each for key, each in optimizer.state.items()}
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    result = {"numbers": numbers, "gradient": gradients, "weights": changed.pop("model"), **changed}
    try:
        return clone(result)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            return None
        raise


def bits_that_differ(one: dict, other: dict) -> dict[str, int]:
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
            a, b = as_bytes(a), as_bytes(b)
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

"""Take a training step twice and compare all bits of the results; if any differ, a third decides."""

from collections.abc import Callable

import numpy as np
import torch

from plumbing.checkpoint import restore
from plumbing.cli import RunFailed
from plumbing.machine import free_memory
from plumbing.ranks import agree, from_all_ranks, local
from plumbing.safe_step import as_bytes, clone, leaves, out_of_memory, tensors


def confirm(run, take_step: Callable[[], dict]) -> dict:
    """Take a step twice from the same state, and compare its numbers, the gradients and all that a
    checkpoint holds. Returns the numbers. Where two tries differ, `run` keeps what two of three share,
    and an `audit` event says how they differed; if all three do, raises RunFailed. If memory is too
    small for the copies, the step is taken once, with an `audit_skipped` event."""
    copied = tensors([run.checkpoint(), list(run.model.parameters())])  # and a gradient for each
    needed = 4 * sum(local(tensor).nbytes for tensor in copied)  # of before, and after three tries
    free = free_memory(run.device)
    too_large = any(agree(free is not None and needed > free))
    numbers = None if too_large else try_again_and_compare(run, take_step)
    if numbers is not None:
        return numbers
    run.folder.event(run.state["step"] + 1, "audit_skipped", why="too little memory for the copies")
    return take_step()


def try_again_and_compare(run, take_step: Callable[[], dict]) -> dict | None:
    """Returns the numbers; None, with `run` as it was, if memory ran out on any rank."""
    step = run.state["step"] + 1
    before = clone(run.checkpoint())
    micro_batch = run.state["micro_batch"]
    results = []
    for attempt in range(3):
        if attempt:
            restore(run, before)
        numbers = take_step()
        results.append(copy_of_result(run, numbers))
        if any(agree(results[-1] is None or run.state["micro_batch"] != micro_batch)):
            results.clear()  # the copies themselves may be what was too much
            restore(run, before)
            run.state["micro_batch"] = micro_batch
            return None
        if attempt == 1:
            different = bits_that_differ(*results)
            if not any(agree(len(different) > 0)):
                return numbers
    odd = [n for n in (0, 1) if bits_that_differ(results[n], results[2])]
    if any(agree(len(odd) == 2)):
        where = min(different, default="on another rank")
        raise RunFailed(
            f"step {step} gave three different results from the same input ({where} ...): the step "
            "reads what no checkpoint holds, such as a counter or generator of its own, or this "
            "machine does not compute reliably; python check.py --only=exact tries the machine alone"
        )
    found = from_all_ranks((odd, different))  # a rank without a fault has an empty list and dict
    odd = next(("first", "second")[numbers[0]] for numbers, _ in found if numbers)
    bits = {name: count for _, each in found for name, count in each.items()}
    run.folder.event(step, "audit", odd=odd, bits=sum(bits.values()), tensors=sorted(bits))
    return numbers


def copy_of_result(run, numbers: dict) -> dict | None:
    """A copy of a step's numbers and of everything it changed, by name. None: memory ran out."""
    names = {id(weight): name for name, weight in run.model.named_parameters()}
    gradients = {name: w.grad for name, w in run.model.named_parameters() if w.grad is not None}
    changed = run.checkpoint()
    for saved, optimizer in zip(changed["optimizer"], run.optimizers, strict=True):
        saved["state"] = {names.get(id(key), key): each for key, each in optimizer.state.items()}
    result = {"numbers": numbers, "gradient": gradients, "weights": changed.pop("model"), **changed}
    try:
        return clone(result)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise


def bits_that_differ(one: dict, other: dict) -> dict[str, int]:
    """{name of a tensor or value: number of bits that differ} between two results. A plain value counts
    as one bit, as does a tensor without one of its size in the other result."""
    first, second = (dict(leaves(result)) for result in (one, other))
    found = {}
    for path in first | second:
        a, b = (local(result.get(path)) for result in (first, second))
        if torch.is_tensor(a) and torch.is_tensor(b) and a.nbytes == b.nbytes:
            a, b = (as_bytes(tensor) for tensor in (a, b))
            bits = 0 if torch.equal(a, b) else int(np.unpackbits((a ^ b).cpu().numpy()).sum())
        else:
            bits = int(repr(a) != repr(b))  # not by ==: nan != nan, and 0.0 == -0.0
        if bits:
            found["/".join(map(str, path))] = bits
    return found

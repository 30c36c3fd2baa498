"""Take a training step again from the same state, and compare all bits of the results."""

from collections.abc import Callable

import numpy as np
import torch

from plumbing import machine
from plumbing.checkpoint import WholeState
from plumbing.cli import RunFailed
from plumbing.ranks import agree, checksum, from_all_ranks, local
from plumbing.run_folder import Clock
from plumbing.safe_step import MICRO_BATCHES, as_bytes, clone, leaves, tensors


class NotEnoughMemory(Exception):
    """A try halved its micro-batch: the copies may be what was too much."""


class Tries:
    """A step, taken several times from the same state. The first try counts as training; copies,
    comparisons and other tries have a kind of seconds of their own."""

    def __init__(self, run, take_step: Callable[[], dict], clock: Clock):
        self.run = run
        self.take_step = take_step
        self.clock = clock
        self.sizes = {key: run.state[key] for key in MICRO_BATCHES}
        self.count = 0
        machine.synchronize(run.device)
        with clock.apart("audit"):
            on_cpu = run.device.type == "cpu"
            if on_cpu:
                machine.keep_freed_memory(False)  # or the copy would count as memory of the run
            self.before = WholeState(run)
            if on_cpu:
                machine.keep_freed_memory()

    def take(self) -> dict:
        """The numbers of one more try. Raises NotEnoughMemory if memory ran out on any rank."""
        if self.count:
            with self.clock.apart("audit"):
                numbers = self.take_again()
        else:
            numbers = self.take_step()
            machine.synchronize(self.run.device)
        self.count += 1
        if any(agree(any(self.run.state[key] != size for key, size in self.sizes.items()))):
            raise NotEnoughMemory
        return numbers

    def take_again(self) -> dict:
        self.before.put_back()
        numbers = self.take_step()
        machine.synchronize(self.run.device)
        return numbers

    def take_once(self) -> dict:
        """Without copies, as if nothing had been tried."""
        if self.count:
            self.before.put_back()
        record_skip(self.run)
        self.run.state.update(self.sizes)
        self.before = None
        return self.take_step()


def find_hidden_state(run, take_step: Callable[[], dict], clock: Clock) -> dict:
    """Take a step twice and compare hashes of its numbers, the gradients and all that a checkpoint
    holds. Returns the numbers. If they differ, two more tries follow. If the second alone was odd,
    the machine is at fault: an `audit` event. Else the step depends on what no checkpoint holds,
    and a resume would not be exact: raises RunFailed, which names the tensors. If memory is too
    small for a copy, the step is taken once, with an `audit_skipped` event."""
    if lacks_memory(run, copies=1):
        return take_step()
    tries = Tries(run, take_step, clock)
    found = []
    try:
        for _ in range(4):
            numbers = tries.take()
            with clock.apart("audit"):
                result = result_of(run, numbers)
                found.append({path: checksum(local(leaf)) for path, leaf in leaves(result)})
            if len(found) == 2 and not any(agree(found[0] != found[1])):
                return numbers
    except NotEnoughMemory:
        return tries.take_once()
    finally:
        machine.reset_peak_memory(run.device)
    step = run.state["step"] + 1
    names = different_names(*found[:2])
    others_agree = found[0] == found[2] == found[3]
    if any(agree(not others_agree)):
        raise RunFailed(
            f"step {step} gave other results when it was repeated from the same state, in "
            f"{', '.join(names[:5]) or 'tensors of another rank'}: it depends on something that no "
            "checkpoint holds, such as a plain attribute of a module, a counter of an optimizer or "
            "a global variable, so a resume would not be exact; keep that in a buffer, in the "
            "optimizer's state or in FRESH_STATE, or train without this check: --audit_interval=-1"
        )
    run.folder.event(
        step, "audit", odd="second", tensors=sorted(set(sum(from_all_ranks(names), [])))
    )
    return numbers


def confirm(run, take_step: Callable[[], dict], clock: Clock) -> dict:
    """Take a step twice and compare all bits. Returns the numbers. Where two tries differ, `run`
    keeps what two of three share, and an `audit` event says how they differed; if all three do,
    raises RunFailed. If memory is too small for the copies, the step is taken once, with an
    `audit_skipped` event."""
    if not lacks_memory(run, copies=4):  # of before, and after three tries
        tries = Tries(run, take_step, clock)
        try:
            return two_of_three(run, tries)
        except NotEnoughMemory:
            return tries.take_once()
        finally:
            machine.reset_peak_memory(run.device)
    return take_step()


def two_of_three(run, tries: Tries) -> dict:
    step = run.state["step"] + 1
    results = []
    for _ in range(3):
        numbers = tries.take()
        with tries.clock.apart("audit"):
            results.append(clone(result_of(run, numbers)))
        if len(results) == 2:
            different = bits_that_differ(*results)
            if not any(agree(len(different) > 0)):
                return numbers
    odd = [n for n in (0, 1) if bits_that_differ(results[n], results[2])]
    if any(agree(len(odd) == 2)):
        where = min(different, default="on another rank")
        raise RunFailed(
            f"step {step} gave three different results from the same input ({where} ...): the step "
            "reads what no checkpoint holds, such as a counter or generator of its own, or this "
            "machine does not compute reliably: python check.py --only=exact tries the machine"
        )
    found = from_all_ranks((odd, different))  # a rank without a fault has an empty list and dict
    odd = next(("first", "second")[numbers[0]] for numbers, _ in found if numbers)
    bits = {name: count for _, own in found for name, count in own.items()}
    run.folder.event(step, "audit", odd=odd, bits=sum(bits.values()), tensors=sorted(bits))
    return numbers


def lacks_memory(run, copies: int) -> bool:
    """Whether memory is too small, on any rank, for copies of all that a checkpoint holds and of as
    much for the gradients. Records it."""
    copied = tensors([run.checkpoint(), list(run.model.parameters())])
    needed = copies * sum(local(tensor).nbytes for tensor in copied)
    free = machine.free_memory(run.device)
    lacks = any(agree(free is not None and needed > free))
    if lacks:
        record_skip(run)
    return lacks


def record_skip(run) -> None:
    why = "too little memory for the copies"
    run.folder.event(run.state["step"] + 1, "audit_skipped", why=why)


def result_of(run, numbers: dict) -> dict:
    """A step's numbers and everything it changed, by name."""
    names = {id(weight): name for name, weight in run.model.named_parameters()}
    gradients = {name: w.grad for name, w in run.model.named_parameters() if w.grad is not None}
    changed = run.checkpoint()
    for saved, optimizer in zip(changed["optimizer"], run.optimizers, strict=True):
        saved["state"] = {names.get(id(key), key): own for key, own in optimizer.state.items()}
    return {"numbers": numbers, "gradient": gradients, "weights": changed.pop("model"), **changed}


def different_names(one: dict, other: dict) -> list[str]:
    """The paths at which two nested results differ, by {path: checksum}."""
    paths = [path for path in one | other if one.get(path) != other.get(path)]
    return ["/".join(map(str, path)) for path in paths]


def bits_that_differ(one: dict, other: dict) -> dict[str, int]:
    """{name of a tensor or value: number of bits that differ} between two results. A plain value
    counts as one bit, as does a tensor without one of its size in the other result."""
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

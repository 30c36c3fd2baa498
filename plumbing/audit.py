"""Take a training step again from the same state, and compare all bits of the results."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from plumbing import machine
from plumbing.checkpoint import WholeState
from plumbing.cli import RunFailed
from plumbing.ranks import agree, checksum, from_all_ranks, local
from plumbing.run_folder import Clock
from plumbing.safe_step import as_bytes, by_path, clone, tensors


class NotEnoughMemory(Exception):
    """A try halved its micro-batch: the copies may be what was too much."""


class Tries:
    """A step, taken several times from the same state. The first try counts as training; copies,
    comparisons and other tries have a kind of seconds of their own."""

    def __init__(self, run, take_step: Callable[[], dict], clock: Clock):
        self.run = run
        self.take_step = take_step
        self.clock = clock
        self.sizes = {"micro_batch": run.state["micro_batch"]}
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
                self.before.put_back()
                numbers = self.take_in_full()
        else:
            numbers = self.take_in_full()
        self.count += 1
        if any(agree(any(self.run.state[key] != size for key, size in self.sizes.items()))):
            raise NotEnoughMemory
        return numbers

    def take_in_full(self) -> dict:
        numbers = self.take_step()
        machine.synchronize(self.run.device)
        return numbers

    def take_once(self) -> dict:
        """Without copies, as if nothing had been tried."""
        if self.count:
            self.before.put_back()
        self.run.state.update(self.sizes)
        self.before = None
        return self.take_step()


def repeated(run, take_step, clock, compare: Callable, copies: int) -> dict:
    """The numbers that compare(run, tries) returns. If memory is too small for so many copies, the
    step is taken once, with an `audit_skipped` event."""
    if not lacks_memory(run, copies):
        tries = Tries(run, take_step, clock)
        try:
            return compare(run, tries)
        except NotEnoughMemory:
            take_step = tries.take_once
        finally:
            machine.reset_peak_memory(run.device)
    step = run.state["step"] + 1
    run.folder.event(step, "audit_skipped", why="too little memory for the copies")
    return take_step()


def compare_hashes(run, tries: Tries) -> dict:
    """Take a step twice and compare hashes of its numbers, the gradients, all that a checkpoint
    holds and plain attributes. Returns the numbers. If they differ, two more tries follow. If the
    second alone was odd, the machine is at fault: an `audit` event. Else the step depends on what
    no checkpoint holds, and a resume would not be exact: raises RunFailed, which names it."""
    step = run.state["step"] + 1
    found = []
    for _ in range(4):
        numbers = tries.take()
        with tries.clock.apart("audit"):
            result = by_path(result_of(run, numbers) | plain_attributes(run))
            found.append({name: checksum(local(leaf)) for name, leaf in result.items()})
        if len(found) == 2 and not any(agree(found[0] != found[1])):
            return numbers
    names = list(bits_that_differ(*found[:2]))
    others_agree = found[0] == found[2] == found[3]
    if any(agree(not others_agree)):
        raise RunFailed(
            f"step {step} gave other results when it was repeated from the same state, in "
            f"{', '.join(names[:5]) or 'tensors of another rank'}: it depends on something that no "
            "checkpoint holds, such as a plain attribute of a module, a counter of an optimizer or "
            "a global variable, so a resume would not be exact; keep that in a buffer, in the "
            "optimizer's state or in FRESH_STATE, or train without this check: --audit_interval=-1"
        )
    everywhere = sorted(set(sum(from_all_ranks(names), [])))
    run.folder.event(step, "audit", odd="second", tensors=everywhere)
    return numbers


def two_of_three(run, tries: Tries) -> dict:
    """Take a step twice and compare all bits. Returns the numbers. Where two tries differ, `run`
    keeps what two of three share, and an `audit` event says how they differed; if all three do,
    raises RunFailed."""
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


# Both take (run, take_step, clock), and return the numbers of the step
find_hidden_state = partial(repeated, compare=compare_hashes, copies=1)
confirm = partial(repeated, compare=two_of_three, copies=4)  # of before and of three tries


def lacks_memory(run, copies: int) -> bool:
    """Whether memory is too small, on any rank, for copies of all that a checkpoint holds and of as
    much for the gradients."""
    copied = tensors([run.checkpoint(), list(run.model.parameters())])
    needed = copies * sum(local(tensor).nbytes for tensor in copied)
    free = machine.free_memory(run.device)
    return any(agree(free is not None and needed > free))


def result_of(run, numbers: dict) -> dict:
    """A step's numbers and everything it changed, by name."""
    names = {id(weight): name for name, weight in run.model.named_parameters()}
    gradients = {name: w.grad for name, w in run.model.named_parameters() if w.grad is not None}
    changed = run.checkpoint()
    for saved, optimizer in zip(changed["optimizer"], run.optimizers, strict=True):
        saved["state"] = {names.get(id(key), key): own for key, own in optimizer.state.items()}
    return {"numbers": numbers, "gradient": gradients, "weights": changed.pop("model"), **changed}


def plain_attributes(run):
    """Those of modules and optimizers, such as a counter, that are not torch's own."""
    owners = dict(run.model.named_modules())
    owners |= {type(optimizer).__name__: optimizer for optimizer in run.optimizers}
    return {
        f"attribute {name}.{key}": value
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if not key.startswith("_") and key not in ("state", "param_groups", "defaults")
    }


def bits_that_differ(one: dict, other: dict) -> dict[str, int]:
    """{name of a tensor or value: number of bits that differ} between two results. A plain value
    counts as one bit, as does a tensor without one of its size in the other result."""
    first, second = by_path(one), by_path(other)
    found = {}
    for name in first | second:
        a, b = (local(result.get(name)) for result in (first, second))
        if torch.is_tensor(a) and torch.is_tensor(b) and a.nbytes == b.nbytes:
            a, b = (as_bytes(tensor) for tensor in (a, b))
            bits = 0 if torch.equal(a, b) else int(np.unpackbits((a ^ b).cpu().numpy()).sum())
        else:
            bits = int(repr(a) != repr(b))  # not by ==: nan != nan, and 0.0 == -0.0
        if bits:
            found[name] = bits
    return found

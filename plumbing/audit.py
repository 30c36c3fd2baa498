"""Take a training step again from the same state, and compare hashes of all that it computes."""

from collections.abc import Callable
from functools import partial

from plumbing import machine
from plumbing.checkpoint import WholeState
from plumbing.cli import RunFailed
from plumbing.ranks import agree, checksum, from_all_ranks, local
from plumbing.run_folder import Clock
from plumbing.safe_step import by_path, tensors


class NotEnoughMemory(Exception):
    """A try halved its micro-batch: the copy of the state may be what was too much."""


class Tries:
    """A step, taken several times from the same state. The first try counts as training; the copy,
    comparisons and other tries have a kind of seconds of their own."""

    def __init__(self, run, take_step: Callable[[], dict], clock: Clock):
        self.run = run
        self.take_step = take_step
        self.clock = clock
        self.micro_batch = run.state["micro_batch"]
        self.hashes = []  # of each try, by name
        machine.synchronize(run.device)
        with clock.apart("audit"):
            machine.keep_freed_memory(False)  # or the copy would count as memory of the run
            self.before = WholeState(run)
            machine.keep_freed_memory()

    def take(self) -> dict:
        """The numbers of one more try. Raises NotEnoughMemory if memory ran out on any rank."""
        if self.hashes:
            with self.clock.apart("audit"):
                self.before.put_back()
                numbers = self.take_in_full()
        else:
            numbers = self.take_in_full()
        if any(agree(self.run.state["micro_batch"] != self.micro_batch)):
            raise NotEnoughMemory
        with self.clock.apart("audit"):
            leaves = by_path(result_of(self.run, numbers)).items()
            self.hashes.append({name: checksum(local(leaf)) for name, leaf in leaves})
        return numbers

    def take_in_full(self) -> dict:
        numbers = self.take_step()
        machine.synchronize(self.run.device)
        return numbers

    def differing(self) -> list[str]:
        """What differs between the first two tries, on any rank."""
        first, second = self.hashes[:2]
        names = [name for name in first | second if first.get(name) != second.get(name)]
        return sorted(set(sum(from_all_ranks(names), [])))

    def odd(self) -> str | None:
        """Which of the first two tries is not like the third, on any rank; None if both are not."""
        unlike = [hashes != self.hashes[2] for hashes in self.hashes[:2]]
        both, first = agree(all(unlike), unlike[0])
        if both:
            return None
        return "first" if first else "second"


def repeated(run, take_step: Callable[[], dict], clock: Clock, most: int) -> dict:
    """Take a step twice, compare, and return its numbers. If any hash differs, a third of `most`
    three tries decides, and an `audit` event names the odd one; without a third, or if all three
    differ, raises RunFailed. If memory is too small for a copy of the state, the step is taken
    once, with an event `audit_skipped`."""
    step = run.state["step"] + 1
    if not lacks_memory(run):
        tries = Tries(run, take_step, clock)
        try:
            return compared(tries, step, most)
        except NotEnoughMemory:
            tries.before.put_back()
            run.state["micro_batch"] = tries.micro_batch
            del tries
        finally:
            machine.reset_peak_memory(run.device)
    run.folder.event(step, "audit_skipped", why="too little memory for a copy of the state")
    return take_step()


def compared(tries: Tries, step: int, most: int) -> dict:
    tries.take()
    numbers = tries.take()
    names = tries.differing()
    if not names:
        return numbers
    if most == 3:
        numbers = tries.take()
        odd = tries.odd()
        if odd:
            tries.run.folder.event(step, "audit", odd=odd, tensors=names)
            return numbers
    raise RunFailed(
        f"step {step} gave other results when it was repeated from the same state, in "
        f"{', '.join(names[:5])}: it depends on something that no checkpoint holds, such as a "
        "counter in a module or a global variable, so a resume would not be exact; keep that in a "
        "buffer, in the optimizer's state or in FRESH_STATE, or train without this check: "
        "--audit_interval=-1. Or this machine does not compute reliably: python check.py "
        "--only=exact tries it"
    )


# Both take (run, take_step, clock), and return the numbers of the step
find_hidden_state = partial(repeated, most=2)
confirm = partial(repeated, most=3)


def lacks_memory(run) -> bool:
    """Whether memory is too small, on any rank, for a copy of all that a checkpoint holds and as
    much for the gradients."""
    copied = tensors([run.checkpoint(), list(run.model.parameters())])
    needed = sum(local(tensor).nbytes for tensor in copied)
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

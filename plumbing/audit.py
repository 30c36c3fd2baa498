"""Take a training step again from the same state, and compare hashes of all that it computes."""

from collections.abc import Callable
from contextlib import nullcontext

from plumbing import machine
from plumbing.checkpoint import restore
from plumbing.cli import RunFailed
from plumbing.fields import COMPARED
from plumbing.hooks import Hook
from plumbing.ranks import checksum, from_all_ranks, local_tensor, max_over_ranks
from plumbing.snapshot import by_path, clone, tensors


class Audit(Hook):
    """Audits each step whose number `interval` divides; with 0 only the second step of the process,
    with -1 none."""

    def __init__(self, interval: int):
        self.interval = interval
        self.steps = 0  # that this process has taken

    def step(self, run, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        self.steps += 1
        if self.interval > 0 and (run.state["step"] + 1) % self.interval == 0:
            return repeated(run, take, most=3)
        if self.interval >= 0 and self.steps == 2:
            return repeated(run, take, most=2)
        return take()


def repeated(run, take_step: Callable[[], dict], most: int) -> dict:
    """Take a step twice, compare, and return its numbers. If any hash differs, a third of `most`
    three tries decides, and an `audit` event names the odd one; without a third, or if all three
    differ, raises RunFailed. The first try counts as training, the rest is a kind of seconds of its
    own. If memory is too small for a copy of the state, the step is taken once, with an event
    `audit_skipped`."""
    step = run.state["step"] + 1
    micro_batch = run.state["micro_batch"]
    if lacks_memory(run):
        return skipped(run, step, take_step())
    machine.synchronize(run.device)
    with run.clock.apart("audit"):
        machine.keep_freed_memory(False)  # the copy must not count as memory of the run
        saved = clone(run.checkpoint())
        machine.keep_freed_memory()
    tries = []  # for each try, [{name: hash} of each rank]
    names = []  # of the hashes that differ between the first two tries
    # Two equal tries prove the step. If they are not equal, a third one shows which of them was
    # computed wrongly, and leaves the right result behind.
    while len(tries) < (most if names else 2):
        with run.clock.apart("audit") if tries else nullcontext():
            if tries:
                restore(run, saved)
            numbers = take_step()
            machine.synchronize(run.device)
        # memory ran out, perhaps because of the copy: smaller micro-batches give other bits
        if run.state["micro_batch"] != micro_batch:
            return skipped(run, step, numbers)
        with run.clock.apart("audit"):
            tries.append(from_all_ranks(hashes_of(run, numbers)))
            names = names or differing(tries[0], tries[-1])
    machine.reset_peak_memory(run.device)
    if names:
        name_the_odd_try(run, step, names, tries)
    return numbers


def skipped(run, step: int, numbers: dict) -> dict:
    run.folder.event(step, "audit_skipped", why="too little memory for a copy of the state")
    return numbers


def differing(first: list[dict], second: list[dict]) -> list[str]:
    """The names of the hashes that differ between two tries, on any rank."""
    names = set()
    for then, now in zip(first, second, strict=True):
        names |= {name for name in then | now if then.get(name) != now.get(name)}
    return sorted(names)


def name_the_odd_try(run, step: int, names: list[str], tries: list[list]) -> None:
    """Record which of the first two tries is not like a third one. Raises RunFailed if both are not,
    or if there is no third."""
    if tries[-1] in tries[:-1]:
        odd = "second" if tries[-1] == tries[0] else "first"
        run.folder.event(step, "audit", odd=odd, tensors=names)
        return
    raise RunFailed(
        f"step {step} gave other results when it was repeated from the same state, in "
        f"{', '.join(names[:5])}: it depends on something that no checkpoint holds, such as a "
        "counter in a module or a global variable, so a resume would not be exact; keep that in a "
        "buffer, in the optimizer's state or in FRESH_STATE, or train without this check: "
        "--audit_interval=-1. Or this machine does not compute reliably: python check.py "
        "--only=exact tries it"
    )


def lacks_memory(run) -> bool:
    """Whether memory is too small, on any rank, for a copy of all that a checkpoint holds and as
    much for the gradients."""
    copied = tensors([run.checkpoint(), list(run.model.parameters())])
    needed = sum(local_tensor(tensor).nbytes for tensor in copied)
    free = machine.free_memory(run.device)
    return any(max_over_ranks(free is not None and needed > free))


def hashes_of(run, numbers: dict) -> dict[str, int]:
    """Of a step's numbers and of everything it changed, by name. Numbers that a fork adds may be
    measured: what they do to the training shows in the rest."""
    own = {name: number for name, number in numbers.items() if name in COMPARED}
    gradients = {name: w.grad for name, w in run.model.named_parameters() if w.grad is not None}
    changed = run.checkpoint()
    result = {"numbers": own, "gradient": gradients, "weights": changed.pop("model"), **changed}
    return {name: checksum(leaf) for name, leaf in by_path(result).items()}

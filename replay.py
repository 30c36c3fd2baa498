"""Ask a run: what happened at step N, where did two runs part, do its numbers come out again?

    python replay.py out/shakespeare --step=812     # writes replay_00000812.md and .png into the folder
    python replay.py out/shakespeare out/again      # the first step, and the first tensor, that differ
    python replay.py out/shakespeare --verify=3     # three stretches again: all bits equal?

It computes with train.py's own loop, in a scratch folder, from the newest checkpoint before that step
or from the beginning. The run's folder is only read, so the run may be going on. For a run of several
ranks write torchrun --standalone --nproc_per_node=2 replay.py in place of python replay.py.
Exit code: 0 all equal; 1 not; 3 not, but machine or code are not those of the run either.
"""

import os
import random
import shutil
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from unittest.mock import patch
from zlib import crc32

import torch

import train
from plumbing import cli, machine, ranks
from plumbing import resume as resuming
from plumbing.checkpoint import file_name
from plumbing.cli import RunFailed, fail
from plumbing.files import replacing
from reporting.logged import KINDS, Logged, changed, first_difference, not_computed, parting
from reporting.step import differs_in, first_in_traces, look_at, write_page

data_dir = ""  # folder of the datasets; "" = where the run found its own

# One step
step = 0  # to show, [0, inf)
before_rollback = 0  # show it as before the first, second ... rollback, [0, inf); 0 = as logged
save = False  # also write the state before it: train.py --resume=PATH starts a folder from that

# Stretches
verify = 0  # how many stretches between saves to compute again, [0, inf)
seed = 0  # that draws them, [0, inf); 0 = another one each time

# For replay.py itself
trace = ""  # file for all that the step computes, in order
from_start = False  # compute from the beginning, whatever checkpoint there is

# Names of groups of ranks in torchrun's store, where each group before has left its own
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
attempts = (f"{attempt}_{number}" for number in count())


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(words: str) -> None:
    if is_rank0():
        print(words, flush=True)


# ---- computing again -----------------------------------------------------------------------------


class Taken(Exception):
    """The step is taken, and next the run would roll back."""


def compute(run: Logged, start: tuple | None, stop: int, look=None, rollbacks=None) -> tuple:
    """Compute a run again, from `start` of its checkpoints or its beginning, to the end of a step.

    look: takes that step in place of train_step; returns its numbers, and what it saw. rollbacks: that
    the run had had, of a step taken more than once; None = as logged. Returns what was logged here,
    {key: [then, now]} of what makes this machine or code inexact, and what look() saw.
    """
    say(f"computing {run.path} from {start[1].name if start else 'its beginning'} to step {stop}")
    taken, results = [], []  # (what is inexact, what was seen) of that step; what was logged
    logged = run.row(stop, "train").get("sequences")

    def train_step(model, here, *batch, own=train.train_step):
        state = here.state
        sequences = state["sequences"] + train.rows_at(state["step"])
        same_data = sequences == logged or not logged
        is_way = same_data if rollbacks is None else state["rollbacks"] == rollbacks
        if taken or state["step"] != stop - 1 or not is_way:
            return own(model, here, *batch)
        numbers, seen = look(own, model, here, *batch) if look else (own(model, here, *batch), None)
        taken.append((resuming.inexact(run.facts["run"], here.facts["run"]), seen))
        return numbers

    def what_is_due(at, *rest, own=train.what_is_due):
        due = own(at, *rest)
        due.evaluation = due.evaluation or bool(run.row(at, "eval"))
        due.save_now = due.save_now or bool(run.row(at, "saved"))
        due.ending = due.ending or (("computed again", 1) if taken else None)
        return due

    def roll_back(*args, own=train.roll_back):
        if taken:
            raise Taken
        own(*args)

    def open_dataset(saved, own=train.open_dataset):
        found = own(saved)
        then, now = run.facts["run"]["data"], found[2]["fingerprint"]
        if then != now:
            raise RunFailed(f"{run.path} was trained on other data: {then}, and here is {now}")
        return found

    def run_to_the_end(*args, own=train.run_to_the_end):
        with suppress(Taken):
            own(*args)
        results.append(ranks.from_rank0(Logged, scratch))
        return 0

    then = run.facts["run"]
    if int(os.environ.get("WORLD_SIZE", 1)) != then["world_size"]:
        how = f"torchrun --standalone --nproc_per_node={then['world_size']} replay.py ..."
        fail(f"{run.path} has {then['world_size']} ranks; start as many: {how}")
    attempt = next(attempts)
    port = os.environ.get("MASTER_PORT", os.getpid())  # all ranks need the same path
    scratch = Path(gettempdir()) / f"replay_{port}_{attempt}"
    flags = run.flags_at(stop, scratch, data_dir)
    flags += [f"--resume={then.get('began_from') or 'auto'}"] * (not start)
    ours = (train_step, what_is_due, roll_back, open_dataset, run_to_the_end)
    patched = patch.multiple(train, **{each.__name__: each for each in ours})
    threads = torch.get_num_threads()
    try:
        if is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(0o700)
            if start:
                torch.save(start[2], scratch / file_name(start[0]))
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        torch.set_num_threads(then["threads"])
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), patched:
            train.main(flags)
    finally:
        torch.set_num_threads(threads)
        if is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
    if not taken:
        raise RunFailed(f"{run.path}: its step {stop} was not reached; was it stopped?")
    return results[0], *taken[0]


def exit_code(difference: tuple | None, identity: dict) -> int:
    return (3 if identity else 1) if difference else 0


# ---- one step ------------------------------------------------------------------------------------


def at_step(run: Logged) -> int:
    """Show a step: its page and picture, and whether the numbers on the way come out again."""
    if before_rollback > len(run.rollbacks):
        fail(f"--before_rollback={before_rollback}: {run.path} has {len(run.rollbacks)} rollbacks")
    rollbacks = before_rollback - 1 if before_rollback else None
    start = None if from_start else run.start_before(step, rollbacks)
    look = partial(look_at, train, save, bool(trace))
    computed, identity, seen = compute(run, start, step, look, rollbacks)
    first = start[0] if start else run.first - 1  # with the evaluation before the first step
    last = min(step, run.rollbacks[rollbacks] if before_rollback else run.last)
    difference = first_difference(run, computed, first, last)
    if trace:
        torch.save({"traces": seen["traces"], "difference": difference}, trace)
    if trace or not is_rank0():
        return exit_code(difference, identity)
    verdict = f"steps {max(1, first + 1)} to {last}: all logged numbers come out again, bit for bit"
    if difference:
        verdict = not_computed(run, difference, identity)
    say("\n".join(write_page(run.path, step, verdict, computed.row(step, "train"), seen)))
    if save:
        path = run.path / f"replay_{step:08}.pt"
        with replacing(path) as temporary:
            torch.save(seen["saved"] | {"config": run.facts["config"]}, temporary)
        say(f"wrote {path}, the state before it: python train.py ... --resume={path} --out_dir=NEW")
    return exit_code(difference, identity)


# ---- two runs ------------------------------------------------------------------------------------


def in_process_of_its_own(argv: list[str]) -> None:
    env = os.environ | {"TORCHELASTIC_RESTART_COUNT": next(attempts)}
    command = [sys.executable, __file__, *argv]
    subprocess.run(command, env=env, check=False, stdout=subprocess.DEVNULL)


def traced(run: Logged, at: int, whole: bool = False) -> dict:
    """What at_step() writes for --trace, in a process of its own: the run's script may replace what
    another run's script does not. whole: compute from the beginning."""
    say(f"computing step {at} of {run.path}{' from its beginning' * whole}")
    with TemporaryDirectory(prefix="replay_") as folder:
        file = Path(folder) / "trace.pt"
        flags = [f"--step={at}", f"--trace={file}", f"--from_start={whole or from_start}"]
        flags += [f"--data_dir={data_dir}"] * bool(data_dir)
        in_process_of_its_own([str(run.path), *flags])
        if not file.exists():
            raise RunFailed(f"step {at} of {run.path} could not be computed")
        return torch.load(file)


def where_they_part(*both: Logged) -> int:
    """Say where two runs part, and which of them comes out again here."""
    say("\n".join([f"{run.path}: {run.last} steps" for run in both] + changed(*both)))
    difference = parting(*both)
    if not difference:
        say(f"equal: all numbers of {min(run.last for run in both)} steps")
        return 0
    say(f"the runs part at step {difference[0]}: {', '.join(difference[1])}\n  {difference[2]}")
    say("\n".join(in_computation(both, difference[0])))
    return 1


def in_computation(both: tuple, at: int) -> list[str]:
    """In words: what is not computed here; or else the first thing that differs. If step `at` begins
    with a difference, an earlier step made it, in numbers that no row has: look for it by halves."""
    low = max(run.first for run in both)
    at = high = max(at, low + 1)
    where, whole = "", False
    while True:
        results = [traced(run, at, whole) for run in both]
        wrong = [each for each in zip(both, results, strict=True) if each[1]["difference"]]
        if wrong:
            return [line for each in wrong for line in in_next_checkpoint(*each)]
        found = first_in_traces(*(each["traces"] for each in results))
        if found and not found.startswith("at its start:"):
            return [f"both come out again here; the first difference in step {at}: {found}"]
        if not found and at == high:
            return [f"both come out again here; step {at} is equal, but not its evaluation or save"]
        low, high, where = (low, at, found) if found else (at, high, where)
        if high - low <= 1 and whole:
            place = f"between steps {low} and {high}" if low else "before the first step"
            return [f"both come out again here; the first difference is {place}: {where}"]
        at, whole = max(low + 1, (low + high) // 2), True


def in_next_checkpoint(run: Logged, result: dict) -> list[str]:
    """In words: what is not computed here, and what of the run's next checkpoint is not."""
    lines = [not_computed(run, result["difference"], {})]
    for at, path, checkpoint in run.checkpoints:
        if at >= result["difference"][0] and run.is_as_logged(checkpoint) is not None:
            words = differs_in(checkpoint, traced(run, at)["traces"][0])
            return [*lines, f"  {path.name} differs from what is computed in {words}"]
    return lines


# ---- stretches -----------------------------------------------------------------------------------


def verify_stretches(run: Logged) -> int:
    """Compute stretches between saves again. Compares all logged numbers, and hashes of the saves."""
    for at, path, checkpoint in run.checkpoints:
        if run.is_as_logged(checkpoint) is False:
            say(f"{path} is not what was saved at step {at}: its hash differs from the logged one")
            return 1
    ends = sorted(at for at, kind in run.rows if KINDS[kind] == "saved" and at > run.first)
    if not ends:
        raise RunFailed(f"{run.path} has no row of a save: there is no hash to compare with")
    launch = os.environ.get("TORCHELASTIC_RUN_ID", os.urandom(8).hex())  # the same on every rank
    drawn_by = seed or crc32(launch.encode())
    drawn = sorted(random.Random(drawn_by).sample(ends, min(verify, len(ends))))
    say(f"{len(drawn)} of {len(ends)} stretches, drawn by --seed={drawn_by}")
    starts = {end: run.start_before(end) for end in drawn}
    # from one start, the longest stretch has the others in it
    stretches = {start[0] if start else run.first: (start, end) for end, start in starts.items()}
    for first, (start, end) in stretches.items():
        computed, identity, _ = compute(run, start, end)
        if difference := first_difference(run, computed, first - (start is None), end):
            say(not_computed(run, difference, identity))
            return exit_code(difference, identity)
    steps = len({n for first, (_, end) in stretches.items() for n in range(first, end)})
    say(f"{steps} of {run.last - run.first} steps computed again: all bits equal")
    return 0


def main(argv: list[str] | None = None) -> int:
    names = []
    with cli.configured(globals(), argv=argv, names=names):
        runs = [Logged(name) for name in names]
        for run in runs:
            if not run.facts.get("run") or not run.rows:
                fail(
                    f"{run.path} holds no steps of a run; type: python replay.py out/NAME --step=N"
                )
        if len(runs) == 2 and not step and not verify:
            return where_they_part(*runs)
        if len(runs) != 1 or bool(step) == bool(verify):
            fail("expected RUN --step=N, RUN OTHER or RUN --verify=K")
        runs[0].load_script()
        return at_step(runs[0]) if step else verify_stretches(runs[0])


if __name__ == "__main__":
    machine.leave(cli.run_script(main))

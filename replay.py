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
import time
from contextlib import redirect_stdout
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from unittest.mock import patch
from zlib import crc32

import torch

import train
from plumbing import cli, machine, ranks
from plumbing import resume as resuming
from plumbing.checkpoint import digest_of_state, file_name
from plumbing.cli import RunFailed, fail
from plumbing.console import say
from plumbing.files import replacing
from plumbing.safe_step import mapped
from reporting import step as steps
from reporting.logged import Logged, changed, first_difference, not_computed

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
since = 0  # begin after this step, from a checkpoint there or before it, [0, inf)

# Names of groups of ranks in torchrun's store, where each group before has left its own
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
attempts = (f"{attempt}_{number}" for number in count())


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ---- computing again -----------------------------------------------------------------------------


def compute(run: Logged, start: tuple | None, stop: int) -> dict:
    """Compute a run again with train.main, from `start` of its checkpoints or its beginning, to the
    end of a step; of one taken more than once, as logged or as --before_rollback says. Returns what was
    "seen" at --step, what was logged as "rows", and of the steps on the way the first "difference" and
    "words" on it; with --trace also how each begins, as "starts"."""
    then = run.facts["run"]
    if int(os.environ.get("WORLD_SIZE", 1)) != then["world_size"]:
        how = f"torchrun --standalone --nproc_per_node={then['world_size']} replay.py ..."
        fail(f"{run.path} has {then['world_size']} ranks; start as many: {how}")
    say(f"computing {run.path} from {start[1].name if start else 'its beginning'} to step {stop}")
    found = {"starts": []}

    def train_step(model, here, *batch, own=train.train_step):
        state = here.state
        if trace and state["step"] >= since:
            now = mapped(steps.copied, steps.essence(here.checkpoint()))
            found["starts"].append((state["step"] + 1, digest_of_state(now)))
        after = state["sequences"] + train.rows_at(state["step"])
        is_way = after == run.row(stop, "train").get("sequences", after)
        if before_rollback:
            is_way = state["rollbacks"] == before_rollback - 1
        take = partial(own, model, here, *batch)
        if "taken" in found or state["step"] != stop - 1 or not is_way:
            return take()
        found["taken"] = here
        found["saved"] = mapped(steps.copied, here.checkpoint()) if save else {}
        numbers, found["seen"] = steps.look_at(train, take, here, *batch) if step else (take(), {})
        return numbers

    def what_is_due(at, *rest, own=train.what_is_due):
        due = own(at, *rest)
        due.evaluation = due.evaluation or bool(run.row(at, "eval"))
        due.save_now = due.save_now or bool(run.row(at, "saved"))
        due.ending = due.ending or (("computed again", 1) if "taken" in found else None)
        return due

    def run_to_the_end(here, *rest, own=train.run_to_the_end):
        now = here.facts["run"]
        if now["data"] != then["data"]:
            raise RunFailed(
                f"{run.path} was trained on other data: {then['data']} is now {now['data']}"
            )
        try:
            own(here, *rest)
        except RunFailed:  # at a rollback that came after the step
            if "taken" not in found:
                raise
        found["rows"] = ranks.from_rank0(Logged, here.folder.path)
        found["traces"] = ranks.from_all_ranks(found.get("seen", {}).get("trace")) if trace else []
        return 0

    ours = (train_step, what_is_due, run_to_the_end)
    patches = patch.multiple(train, **{each.__name__: each for each in ours})
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt = next(attempts)
    port = os.environ.get("MASTER_PORT", os.getpid())  # all ranks need the same folder
    scratch = Path(gettempdir(), f"replay_{port}_{attempt}")
    flags = run.flags_at(stop, scratch, data_dir)
    flags += [f"--resume={then.get('began_from') or 'auto'}"] * (not start)
    flags += [f"--max_rollbacks={before_rollback - 1}"] * bool(before_rollback)
    torch.set_num_threads(then["threads"])
    try:
        if is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(0o700)
            if start:
                torch.save(start[2], scratch / file_name(start[0]))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), patches:
            train.main(flags)
    finally:
        if is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
    if "taken" not in found:
        raise RunFailed(f"{run.path}: its step {stop} was not reached; was it stopped?")
    identity = resuming.inexact(then, found.pop("taken").facts["run"])
    first = start[0] if start else run.first - 1  # with the evaluation before the first step
    last = min(stop, run.rollbacks[before_rollback - 1]) if before_rollback else stop
    found["difference"] = difference = first_difference(run, found["rows"], first, last)
    words = f"steps {max(1, first + 1)} to {last}: all logged numbers come out again, bit for bit"
    found["words"] = not_computed(run, difference, identity) if difference else words
    found["code"] = (3 if identity else 1) if difference else 0
    return found


# ---- one step ------------------------------------------------------------------------------------


def at_step(run: Logged) -> int:
    """Show a step: its page and picture, and whether the numbers on the way come out again."""
    most = [before_rollback - 1] if before_rollback else []
    found = compute(run, run.start_before(since + 1 if trace else step, *most), step)
    if trace:
        torch.save({key: found[key] for key in ("traces", "starts", "difference", "words")}, trace)
    elif is_rank0():
        row = found["rows"].row(step, "train")
        say("\n".join(steps.write_step_page(run.path, step, found["words"], row, found["seen"])))
        if save:
            path = run.path / f"replay_{step:08}.pt"
            with replacing(path) as temporary:
                torch.save(found["saved"] | {"config": run.facts["config"]}, temporary)
            say(f"the state before it: python train.py ... --resume={path} --out_dir=NEW")
    return found["code"]


# ---- two runs ------------------------------------------------------------------------------------


def in_process_of_its_own(argv: list[str]) -> None:
    env = os.environ | {"TORCHELASTIC_RESTART_COUNT": next(attempts)}
    subprocess.run([sys.executable, __file__, *argv], env=env, stdout=subprocess.DEVNULL)


def traced(run: Logged, at: int, since: int) -> dict:
    """What at_step() writes for --trace, in a process of its own: the run's script may replace what
    another run's script does not."""
    say(f"computing step {at} of {run.path}, from step {since} or before")
    with TemporaryDirectory(prefix="replay_") as folder:
        file = Path(folder) / "trace.pt"
        flags = [f"--step={at}", f"--trace={file}", f"--since={since}", f"--data_dir={data_dir}"]
        in_process_of_its_own([str(run.path), *flags])
        if not file.exists():
            raise RunFailed(f"step {at} of {run.path} could not be computed")
        return torch.load(file)


def where_they_part(*both: Logged) -> int:
    """Say where two runs part, and which of them comes out again here. If both begin alike, the
    evaluation before the first step counts too. Hashes depend on settings too: numbers tell more."""
    say("\n".join([f"{run.path}: {run.last} steps" for run in both] + changed(*both)))
    first, last = max(run.first for run in both), min(run.last for run in both)
    extent = first - (both[0].first == both[1].first), last
    difference = first_difference(*both, *extent, kinds=("train", "eval"))
    difference = difference or first_difference(*both, *extent)
    if not difference:
        say(f"equal: all numbers of {last} steps")
        return 0
    at, fields, words = difference
    say(f"the runs part at step {at}: {', '.join(fields)}\n  {words}")
    say(in_computation(both, max(at, first + 1), first))
    return 1


def in_computation(both: tuple, at: int, first: int) -> str:
    """In words: what is not computed here; or else the first thing that differs. An earlier step than
    `at` may have made it, in numbers that no row has: so compare how each step begins, since the
    newest checkpoint that is the same in both, or since step `first`."""
    saved = [{digest_of_state(each): n for n, _, each in run.checkpoints if n < at} for run in both]
    since = max((n for digest, n in saved[0].items() if digest in saved[1]), default=first)
    results = [traced(run, at, since) for run in both]
    if wrong := [pair for pair in zip(both, results, strict=True) if pair[1]["difference"]]:
        return "\n".join(in_next_checkpoint(*pair) for pair in wrong)
    pairs = zip(*(result["starts"] for result in results), strict=False)
    alike = [pair[0][0] for pair in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if alike and alike[-1] < at:
        results = [traced(run, alike[-1], since) for run in both]
    found = steps.first_in_traces(*(result["traces"] for result in results))
    place = f"in step {alike[-1]}" if alike else f"before step {since + 1}"
    return f"both come out again here; the first difference {place}: {found or 'what follows it'}"


def in_next_checkpoint(run: Logged, result: dict) -> str:
    """In words: what is not computed here, and what of the run's next checkpoint is not."""
    for at, path, checkpoint in run.checkpoints:
        if at >= result["difference"][0] and run.is_on_its_way(checkpoint):
            words = steps.differs_in(checkpoint, traced(run, at, at - 1)["traces"][0])
            return f"{result['words']}\n  {path.name} differs from what is computed in {words}"
    return result["words"]


# ---- stretches -----------------------------------------------------------------------------------


def verify_stretches(run: Logged) -> int:
    """Compute stretches between saves again. Compares all logged numbers, and hashes of the saves."""
    for at, path, checkpoint in run.checkpoints:
        if digest_of_state(checkpoint) not in run.hashes:
            say(f"{path} is not what was saved at step {at}: its hash differs from the logged one")
            return 1
    ends = [at for at in range(run.first + 1, run.last + 1) if run.row(at, "saved")]
    if not ends:
        raise RunFailed(f"{run.path} has no row of a save: there is no hash to compare with")
    launch = os.environ.get("TORCHELASTIC_RUN_ID", str(time.time()))  # the same on every rank
    drawn_by = seed or crc32(launch.encode())
    drawn = sorted(random.Random(drawn_by).sample(ends, min(verify, len(ends))))
    say(f"{len(drawn)} of {len(ends)} stretches, drawn by --seed={drawn_by}")
    starts = {end: run.start_before(end) for end in drawn}
    # from one start, the longest stretch has the others in it
    stretches = {start[0] if start else run.first: (start, end) for end, start in starts.items()}
    for start, end in stretches.values():
        if code := (found := compute(run, start, end))["code"]:
            say(found["words"])
            return code
    done = {n for first, (_, end) in stretches.items() for n in range(first, end)}
    say(f"{len(done)} of {run.last - run.first} steps computed again: all bits equal")
    return 0


def main(argv: list[str] | None = None) -> int:
    names = []
    with cli.configured(globals(), argv=argv, names=names):
        runs = [Logged(name) for name in names]
        for run in runs:
            if not run.facts.get("run") or not run.rows:
                fail(f"{run.path} holds no run; type: python replay.py out/NAME --step=N")
        if len(runs) == 2 and not step and not verify:
            return where_they_part(*runs)
        if len(runs) != 1 or bool(step) == bool(verify):
            fail("expected RUN --step=N, RUN OTHER or RUN --verify=K")
        run = runs[0]
        if before_rollback > (len(run.rollbacks) if step else 0):
            fail(f"--before_rollback={before_rollback}: there were {len(run.rollbacks)} rollbacks")
        run.load_script()
        return at_step(run) if step else verify_stretches(run)


if __name__ == "__main__":
    machine.leave(cli.run_script(main))

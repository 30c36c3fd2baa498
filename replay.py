"""Ask a run: what happened at step N, where did two runs part, is it reproducible?

    python replay.py out/shakespeare --step=812     # writes replay_00000812.md and .png
    python replay.py out/shakespeare out/again      # the first step and tensor that differ
    python replay.py out/shakespeare --verify=3     # three stretches again: all bits equal?

It computes with train.py's own loop, in a scratch folder, from the newest checkpoint before that
step or from the beginning. The run's folder is only read, so the run may be going on, and no file
is executed because the run names it: for a run of another script add --script=my_fork.py. For a run
of several ranks write torchrun --standalone --nproc_per_node=2 replay.py in place of python
replay.py. Exit code: 0 all equal; 1 not; 3 not, but machine, code or flags here are not those of
all the steps either."""

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import ModuleType, SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from plumbing import cli, machine, ranks
from plumbing.checkpoint import digest_of_state, file_name
from plumbing.cli import BadInput, RunFailed, fail, setting
from plumbing.console import say
from plumbing.files import replacing
from plumbing.resume import KEPT
from plumbing.safe_step import mapped
from reporting import step as steps
from reporting.logged import (
    MEASURED,
    RECOMPUTED,
    Checkpoint,
    Logged,
    changed,
    first_difference,
    not_computed,
)

data_dir = ""  # folder of the datasets; "" = where the run found its own
script = ""  # that trained the run, if not train.py; of two runs with two scripts: one,other

# One step
step = 0  # to show, [0, inf)
before_rollback = 0  # show it as before the first, second ... rollback, [0, inf); 0 = as logged
save = False  # also write the state before it: train.py --resume=PATH starts a folder from that

# Stretches
verify = 0  # how many stretches between saves to compute again, with the last one, [0, inf)
seed = 0  # that draws them, [0, inf); 0 = another one each time

# For replay.py itself
trace = ""  # file for all that the step computes, in order
since = 0  # begin after this step, from a checkpoint there or before it, [0, inf)


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ---- the script that trained a run: only what the user typed is executed -------------------------


def script_of(run: Logged, is_alone: bool) -> Path:
    """Of one run alone it is what was typed, of two runs the one with the name in its run.json.
    Raises BadInput if there is none: then says what to type."""
    name = Path(str(run.facts["command"][0])).name
    typed = [Path(file) for file in script.split(",") if file]
    own = Path(__file__).with_name("train.py")
    fitting = [path for path in typed if path.name == name]
    if name == own.name:
        fitting.append(own)
    if is_alone or not fitting:
        fitting = typed or fitting
    if not fitting:
        fail(
            f"{run.path} was trained by {name}; if that is your code, add its path: --script={name}"
        )
    if not fitting[0].is_file():
        fail(f"--script={fitting[0]}: there is no such file")
    return fitting[0]


def loop_of(path: Path) -> ModuleType:
    """The module with the loop of the script at `path`: train, where the script replaces functions
    of it, or the script itself, where it is a copy of train.py."""
    if path.name == "train.py":
        return importlib.import_module("train")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if hasattr(module, "Watch"):
        return sys.modules[module.Watch.__module__]
    if "train" not in sys.modules:
        fail(f"--script={path}: expected train.py, a copy of it, or a script that imports train")
    return sys.modules["train"]


# ---- computing again -----------------------------------------------------------------------------


class Again:
    """Watches train.main() compute a run again, as a train.Watch, up to the end of step `stop`; of
    a step taken more than once, as logged, or as --before_rollback says."""

    def __init__(self, run: Logged, loop: ModuleType, start: Checkpoint | None, stop: int):
        self.logged = run
        self.loop = loop
        self.start = start
        self.stop = stop
        self.run = None  # train.py's, as soon as it takes the step
        self.saved = {}  # with --save, the state before it
        self.seen = {}  # in it, with --step
        self.starts = []  # with --trace: (step, the digest of all with which it begins)
        self.odd_part = None  # of a checkpoint whose hash is the logged one: as `difference`
        self.rows = None  # Logged
        self.traces = []  # of all ranks
        self.ended = "has no step left to take"
        self.difference = None  # first_difference()
        self.words = ""
        self.code = 0

    def begin(self, run: Any) -> None:
        then, now = (r["run"]["data"] for r in (self.logged.facts_at(self.stop), run.facts))
        if now != then:
            raise RunFailed(f"it was trained on other data: {then} is now {now}")

    def step(self, run: Any, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        state = run.state
        if self.start:  # it is alone in its folder, and so train.py makes it a target of rollbacks
            state["first_step"] = self.start.content["state"]["first_step"]
        if trace and state["step"] >= since:
            now = mapped(steps.copied, steps.essence(run.checkpoint()))
            self.starts.append((state["step"] + 1, digest_of_state(now)))
        if self.run or state["step"] != self.stop - 1 or not self.is_on_the_way(state):
            return take()
        self.run = run
        if save:
            self.saved = mapped(steps.copied, run.checkpoint())
        if not step:
            return take()
        numbers, self.seen = steps.look_at(self.loop, take, run, inputs, targets, lr)
        return numbers

    def is_on_the_way(self, state: dict) -> bool:
        if before_rollback:
            return state["rollbacks"] == before_rollback - 1
        sequences = state["sequences"] + self.loop.rows_at(state["step"])
        return sequences == self.logged.row(self.stop, "train").get("sequences", sequences)

    def due(self, run: Any, due: SimpleNamespace) -> None:
        at = run.state["step"]
        due.evaluation = due.evaluation or bool(self.logged.row(at, "eval"))
        due.save_now = due.save_now or bool(self.logged.row(at, "saved"))
        if self.run and not due.ending:
            due.ending = "computed again", 1
        if due.ending:
            self.ended = f"{due.ending[0]} at step {at}"
        for saved in self.logged.checkpoints:
            if saved.step == at and not self.odd_part:
                self.odd_part = self.compare_parts(saved, run.checkpoint())

    def compare_parts(self, saved: Checkpoint, now: dict) -> tuple | None:
        pairs = {part: (saved.content.get(part, now[part]), now[part]) for part in RECOMPUTED}
        if saved.step == self.stop:  # the knobs are those of the process that took this step
            for knob in KEPT:
                pairs[knob] = saved.content["run"][knob], now["run"][knob]
        for name, (then, here) in pairs.items():
            if then != here:
                return saved.step, [name], f"{name} in {saved.path.name} is {then}, not {here}"
        return None

    def end(self, run: Any) -> None:
        if self.run:
            self.rows = ranks.from_rank0(Logged, run.folder.path)
        if self.run and trace:
            self.traces = ranks.from_all_ranks(self.seen.get("trace"))

    def judge(self, first: int, last: int) -> None:
        """Compare steps first + 1 to last: sets `difference`, `words` and `code`."""
        run = self.logged
        self.difference = first_difference(run, self.rows, first, last) or self.odd_part
        if not self.difference:
            steps_of = f"steps {max(1, first + 1)} to {last}"
            self.words = f"{steps_of}: all logged numbers are computed again, bit for bit"
            return
        at = self.difference[0]
        before = min(first, at - 1)
        identity = run.differences(before, at, self.run.facts["run"])
        changes = run.changes(before, self.stop)
        self.words = not_computed(run, self.difference, identity, changes)
        self.code = 3 if identity or changes else 1


def compute(run: Logged, loop: ModuleType, start: Checkpoint | None, stop: int) -> Again:
    """Compute a run again with train.main, from `start` of its checkpoints or its beginning, to the
    end of step `stop`, and compare it with the log. Raises RunFailed if that step is not
    reached."""
    then = run.facts_at(stop)["run"]
    if int(os.environ.get("WORLD_SIZE", 1)) != then["world_size"]:
        how = f"torchrun --standalone --nproc_per_node={then['world_size']} replay.py ..."
        fail(f"{run.path} has {then['world_size']} ranks; start as many: {how}")
    say(f"computing {run.path} from {start.path.name if start else 'its beginning'} to step {stop}")
    new_group()
    port = os.environ.get("MASTER_PORT", os.getpid())  # all ranks need the same folder
    scratch = Path(gettempdir(), f"replay_{port}_{os.environ[ATTEMPT]}")
    flags = run.flags_at(stop, scratch, data_dir)
    if not start:
        flags.append(f"--resume={then.get('began_from') or 'auto'}")
    most_rollbacks = before_rollback - 1 if before_rollback else loop.MOST_ROLLBACKS
    torch.set_num_threads(then["threads"])
    again = Again(run, loop, start, stop)
    try:
        if is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(0o700)
            if start:
                torch.save(start.content, scratch / file_name(start.step))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            with setting(vars(loop), MOST_ROLLBACKS=most_rollbacks):
                loop.main(flags, watch=again)
    except (BadInput, RunFailed) as error:
        if not again.rows:  # else it is a rollback that came after the step
            reason, *_ = str(error).replace(str(scratch), str(run.path)).partition(";")
            raise type(error)(f"{run.path}: {reason}") from error
    finally:
        if is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
    if not again.rows:
        raise RunFailed(f"{run.path}: this code {again.ended}, and does not reach step {stop}")
    first = start.step if start else run.first - 1  # with the evaluation before the first step
    last = min(stop, run.rollbacks[before_rollback - 1][0]) if before_rollback else stop
    again.judge(first, last)
    return again


ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # names a group of ranks in torchrun's store


def new_group() -> None:
    """Each group of ranks needs a name of its own, as the one before has left its keys there."""
    launch, _, number = os.environ.get(ATTEMPT, "0").partition("_")
    os.environ[ATTEMPT] = f"{launch}_{int(number or 0) + 1}"


# ---- one step ------------------------------------------------------------------------------------


def at_step(run: Logged, loop: ModuleType) -> int:
    """Show a step: its page and picture, and whether the numbers on the way are computed again."""
    last = run.rollbacks[before_rollback - 1][1] if before_rollback else run.last
    if not run.first < step <= last:
        fail(f"--step={step}: {run.path} has {counted(run, last)}")
    stop_before = since + 1 if trace else step
    if before_rollback:
        start = run.start_before(stop_before, before_rollback - 1)
    else:
        start = run.start_before(stop_before)
    again = compute(run, loop, start, step)
    if trace:
        results = ("traces", "starts", "difference", "words")
        torch.save({name: getattr(again, name) for name in results}, trace)
    elif is_rank0():
        row = again.rows.row(step, "train")
        lines = steps.write_step_page(run.path, step, again.words, row, again.seen)
        say("\n".join(lines))
        if save:
            path = run.path / f"replay_{step:08}.pt"
            with replacing(path) as temporary:
                torch.save(again.saved | {"config": run.facts["config"]}, temporary)
            say(f"the state before it: python train.py ... --resume={path} --out_dir=NEW")
    return again.code


def counted(run: Logged, last: int) -> str:
    return f"{last} steps" if run.first == 0 else f"the steps {run.first + 1} to {last}"


# ---- two runs ------------------------------------------------------------------------------------


def in_process_of_its_own(argv: list[str]) -> None:
    new_group()
    subprocess.run([sys.executable, __file__, *argv], stdout=subprocess.DEVNULL, check=False)


def traced(run: Logged, at: int, since: int) -> dict:
    """What at_step() writes for --trace, in a process of its own: the run's script may replace what
    another run's script does not."""
    say(f"computing step {at} of {run.path}, from step {since} or before")
    with TemporaryDirectory(prefix="replay_") as folder:
        file = Path(folder) / "trace.pt"
        flags = [f"--step={at}", f"--trace={file}", f"--since={since}", f"--data_dir={data_dir}"]
        flags.append(f"--script={script_of(run, is_alone=False)}")
        in_process_of_its_own([str(run.path), *flags])
        if not file.exists():
            raise RunFailed(f"step {at} of {run.path} could not be computed")
        return torch.load(file)


def where_they_part(*both: Logged) -> int:
    """Say where two runs part, and which of them is computed again here. If both begin alike, the
    evaluation before the first step counts too. Hashes depend on settings too: numbers tell
    more."""
    lines = [f"{run.path}: {counted(run, run.last)}" for run in both]
    say("\n".join(lines + changed(*both)))
    first = max(run.first for run in both)
    last = min(run.last for run in both)
    before = first - 1 if both[0].first == both[1].first else first
    difference = first_difference(*both, before, last, kinds=("train", "eval"))
    difference = difference or first_difference(*both, before, last)
    if not difference:
        say(f"equal: all numbers of {last} steps")
        return 0
    at, fields, words = difference
    say(f"the runs part at step {at}: {', '.join(fields)}\n  {words}")
    say(in_computation(both, max(at, first + 1), first))
    return 1


def in_computation(both: tuple, at: int, first: int) -> str:
    """In words: what is not computed here; or else the first thing that differs. An earlier step
    than `at` may have made it, in numbers that no row has: so compare how each step begins, since
    the newest checkpoint that is the same in both, or since step `first`."""
    here, there = ({c.sha256: c.step for c in run.checkpoints if c.step < at} for run in both)
    since = max((here[sha256] for sha256 in here.keys() & there.keys()), default=first)
    results = [traced(run, at, since) for run in both]
    pairs = zip(both, results, strict=True)
    wrong = [in_next_checkpoint(run, result) for run, result in pairs if result["difference"]]
    if wrong:
        return "\n".join(wrong)
    starts = zip(*(result["starts"] for result in results), strict=False)
    alike = [one[0] for one, other in takewhile(lambda pair: pair[0] == pair[1], starts)]
    if alike and alike[-1] < at:
        results = [traced(run, alike[-1], since) for run in both]
    found = steps.first_in_traces(*(result["traces"] for result in results))
    place = f"in step {alike[-1]}" if alike else f"before step {since + 1}"
    return f"both are computed again; the first difference {place}: {found or 'what follows it'}"


def in_next_checkpoint(run: Logged, result: dict) -> str:
    """In words: what is not computed here, and what of the run's next checkpoint is not."""
    for saved in run.checkpoints:
        if saved.step >= result["difference"][0] and run.is_on_its_way(saved):
            now = traced(run, saved.step, saved.step - 1)["traces"][0]
            words = steps.differs_in(saved.content, now)
            return (
                f"{result['words']}\n  {saved.path.name} differs from what is computed in {words}"
            )
    return result["words"]


# ---- stretches -----------------------------------------------------------------------------------


def verify_stretches(run: Logged, loop: ModuleType) -> int:
    """Compute stretches between saves again, and after the last save. Compares the files with the
    log, all logged numbers, the hashes of the saves, and what they do not cover."""
    faults = run.faults()
    if faults:
        say("\n".join(faults))
        return 1
    if not run.saves or run.first == run.last:
        raise RunFailed(f"{run.path} has no step, or no row of a save: there is nothing to compare")
    ends = [at for at in range(run.first + 1, run.last) if run.row(at, "saved")]
    ends.append(run.last)
    launch = os.environ.get("TORCHELASTIC_RUN_ID", str(time.time()))  # the same on every rank
    drawn_by = seed or crc32(launch.encode())
    *others, last = ends  # what follows the last save is in no checkpoint: that is always computed
    drawn = random.Random(drawn_by).sample(others, min(verify - 1, len(others)))
    drawn = [*sorted(drawn), last]
    say(f"{len(drawn)} of {len(ends)} stretches, drawn by --seed={drawn_by}")
    starts = {end: run.start_before(end) for end in drawn}
    # from one start, the longest stretch has the others in it
    stretches = {start.step if start else run.first: (start, end) for end, start in starts.items()}
    done = set()
    for start, end in stretches.values():
        again = compute(run, loop, start, end)
        if again.code:
            say(again.words)
            return again.code
        done |= {*range(start.step if start else run.first, end)}
    say(f"{len(done)} of {run.last - run.first} steps computed again: all bits equal")
    files = ", ".join(sorted(path.name for path in run.files))
    say(f"covered: the numbers in their rows, the hash of each save, {files}")
    say(
        f"not covered: {' '.join(MEASURED)}, the text of samples, all events but saves, other steps"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    names = []
    with cli.configured(globals(), argv=argv, names=names):
        runs = [Logged(name) for name in names]
        for run in runs:
            run.check()
        if len(runs) == 2 and not step and not verify:
            for run in runs:
                if not run.script.is_file():  # it was renamed
                    run.script = script_of(run, is_alone=False)
            return where_they_part(*runs)
        if len(runs) != 1 or bool(step) == bool(verify):
            fail("expected RUN --step=N, RUN OTHER or RUN --verify=K")
        run = runs[0]
        if before_rollback > (len(run.rollbacks) if step else 0):
            fail(f"--before_rollback={before_rollback}: there were {len(run.rollbacks)} rollbacks")
        loop = loop_of(script_of(run, is_alone=True))
        run.script = Path(loop.__file__)
        return at_step(run, loop) if step else verify_stretches(run, loop)


if __name__ == "__main__":
    machine.leave(cli.run_script(main))

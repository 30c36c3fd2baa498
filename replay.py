"""Ask a run: what happened at step N, where did two runs part, can its log be computed again?

    python replay.py out/shakespeare --step=812            # writes replay_00000812.md
    python replay.py out/shakespeare --verify=true         # all of it again, to the first difference
    python replay.py out/shakespeare --against=out/again   # the first row and tensor that differ

It computes with train.py's own loop, in a scratch folder, with the flags that the run had at each
step. The run's folder is only read, so the run may be going on, and no file is executed because the
run names it: for a run of another script add --script=my_fork.py. For a run of several ranks write
torchrun --standalone --nproc_per_node=2 replay.py in place of python replay.py. Exit code: 0 if all
is equal, 1 if not."""

import importlib.util
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from lab import step as steps
from lab.logged import (
    KINDS,
    Checkpoint,
    Comparison,
    Logged,
    Position,
    compare,
    flags_of,
    in_words,
)
from plumbing import cli, machine, ranks
from plumbing.checkpoint import file_name
from plumbing.cli import BadInput, RunFailed, fail
from plumbing.console import say
from plumbing.files import clean, replacing
from plumbing.safe_step import mapped
from plumbing.witness import key_of

data_dir = ""  # folder of the datasets; "" = where the run found its own
script = ""  # that trained the run, if not train.py

# One step
step = 0  # to show; with --verify=true the last one to compute, [0, inf); 0 = the last of the run
before_rollback = 0  # show it as before the first, second ... rollback, [0, inf); 0 = as logged
save = False  # also write the state before it: train.py --resume=PATH starts a folder from that

# Many steps
verify = False  # compute the run again, up to the first number that differs
since = 0  # begin at the newest checkpoint up to this step, [0, inf); 0 = at the beginning
against = ""  # folder of another run: name the first row, knobs and tensor that differ


def main(argv: list[str] | None = None) -> int:
    names = []
    with cli.configured(globals(), argv=argv, names=names):
        if len(names) != 1 or [bool(step), verify, bool(against)] == [False, False, False]:
            fail("expected RUN --step=N, RUN --verify=true or RUN --against=OTHER")
        run = Logged(names[0])
        run.check_form()
        if against:
            other = Logged(against)
            other.check_form()
            return where_they_part(run, other)
        if verify:
            return verify_run(run)
        return show_step(run)


# ---- the script that trained a run: only what the user typed is executed -------------------------


def script_of(run: Logged) -> Path:
    """What was typed, or train.py. Raises BadInput if that is not what trained the run: then says
    what to type."""
    name = Path(run.facts["command"][0]).name
    own = Path(__file__).with_name("train.py")
    typed = Path(script) if script else own
    if script and not typed.is_file():
        fail(f"--script={script}: there is no such file")
    if against and name == own.name:  # the other run is of the script
        return own
    if typed == own and name != own.name:
        fail(
            f"{run.path} was trained by {name}; if that is your code, add its path: --script={name}"
        )
    return typed


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


# ---- one step ------------------------------------------------------------------------------------


def show_step(run: Logged) -> int:
    """Write the page of a step, and say whether the numbers on the way to it are computed again."""
    if before_rollback > len(run.rollbacks):
        fail(f"--before_rollback={before_rollback}: there were {len(run.rollbacks)} rollbacks")
    end = run.position(step)
    last = run.last
    if before_rollback:
        end = Position(before_rollback - 1, step)
        last = run.rollbacks[before_rollback - 1][1]
    if not run.first < step <= last:
        fail(f"--step={step}: {run.path} has {counted(run, last)}")
    again = Again(run, loop_of(script_of(run)), run.start_before(end, latest=step - 1), end)
    again.shown = (end,)
    again.compute()
    if is_rank0():
        lines = steps.write_step_page(run.path, step, again.verdict(), again.seen[end])
        say("\n".join(lines))
        if save:
            path = run.path / f"replay_{step:08}.pt"
            with replacing(path) as temporary:
                torch.save(again.saved | {"config": run.facts["config"]}, temporary)
            say(f"the state before it: python train.py ... --resume={path} --out_dir=NEW")
    return int(bool(again.difference))


def counted(run: Logged, last: int) -> str:
    return f"{last} steps" if run.first == 0 else f"the steps {run.first + 1} to {last}"


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ---- all steps -----------------------------------------------------------------------------------


def verify_run(run: Logged) -> int:
    """Compare the checkpoints with the log, then compute the run again, up to the first number that
    differs."""
    faults = run.faults()
    if faults:
        say("\n".join(faults))
        return 1
    last = step or run.last
    if not max(run.first, since) < last <= run.last:
        fail(f"--since={since} --step={step}: {run.path} has {counted(run, run.last)}")
    end = run.position(last)
    start = run.start_before(end, latest=since or run.first)
    again = Again(run, loop_of(script_of(run)), start, end)
    again.stops_early = True
    again.compute()
    say(again.verdict())
    if again.difference:
        return 1
    files = ", ".join(sorted(path.name for path in run.files))
    say(f"covered: {again.equal} rows: their numbers, the hash of each save; {files}")
    say(
        "not covered: rows removed from the end, files that are missing (such as best.pt), times, "
        "memory, the text of samples, all events but saves"
    )
    return 0


# ---- two runs ------------------------------------------------------------------------------------


def where_they_part(one: Logged, other: Logged) -> int:
    """Say where two runs part, in which knobs they differ, and which of them is computed again
    here; if both are, the first tensor that differs."""
    both = (one, other)
    say("\n".join(f"{run.path}: {counted(run, run.last)}" for run in both))
    last = min(run.last for run in both)
    # hashes depend on settings, too: numbers tell more
    comparisons = (compare(*both, last, kinds) for kinds in (("train", "eval"), ("saved",)))
    found = next((c.first_difference for c in comparisons if c.first_difference), None)
    at = found["step"] if found else last
    here, there = (run.stretches(Position(0, -1), run.position(at))[-1].settings for run in both)
    for name in here | there:
        if here.get(name) != there.get(name):
            say(f"{name}: {here.get(name, 'none')}, {there.get(name, 'none')}")
    if not found:
        say(f"equal: all numbers of {last} steps")
        return 0
    say(f"the runs part at {in_words(found)}")
    say(first_tensor(both, max(at, max(run.first for run in both) + 1)))
    return 1


def first_tensor(both: tuple[Logged, Logged], at: int) -> str:
    """In words: which of two runs is not computed again here; or else the first thing that differs
    in step `at`. If that is what it begins with, in the step before."""
    results = [apart(traced, run.path, at) for run in both]
    wrong = [verdict for verdict, difference, _ in results if difference]
    if wrong:
        return "\n".join(wrong)
    one, other = (traces for _, _, traces in results)
    for number in sorted(one.keys() & other.keys()):
        if found := steps.first_in_traces(one[number], other[number]):
            return f"both are computed again; the first difference in step {number}: {found}"
    return "both are computed again, and no tensor differs"


def traced(path: Path, at: int) -> tuple[str, dict | None, dict[int, list]]:
    """(verdict, first difference, {step: traces of all ranks}) of step `at` and the one before."""
    run = Logged(path)
    end = run.position(at)
    begin = run.position(at - 1) if at - 1 > run.first else end
    start = run.start_before(begin, latest=begin.step - 1)
    again = Again(run, loop_of(script_of(run)), start, end)
    again.shown = (begin, end)
    again.compute()
    traces = {position.step: again.traces[position] for position in again.traces}
    return again.verdict(), again.difference, traces


def apart(function: Callable, *arguments: Any) -> Any:
    """What a function returns in a process of its own: the script of one run may replace what that
    of another does not."""
    new_group()
    knobs = {"data_dir": data_dir, "script": script, "against": against}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pickle.loads(pool.submit(pickled, knobs, function, arguments).result())


def pickled(knobs: dict, function: Callable, arguments: tuple) -> bytes:
    """In bytes, as tensors would go through shared memory that ends with this process."""
    with cli.setting(globals(), **knobs):
        return pickle.dumps(function(*arguments))


# ---- computing again -----------------------------------------------------------------------------


class Again:
    """Computes a run again with train.main(), from `start` of its checkpoints or its beginning, to
    `end`, and compares each row with the log. It is the train.Watch of that."""

    def __init__(self, run: Logged, loop: ModuleType, start: Checkpoint | None, end: Position):
        self.logged = run
        self.loop = loop
        self.start = start
        self.begin_at = start.position if start else Position(0, run.first - 1)
        self.end_at = end
        self.stretches = run.stretches(self.begin_at, end)
        self.stop = end  # of the stretch that is computed
        self.is_reached = False
        self.is_over = False
        self.stops_early = False  # at the first difference
        self.shown = ()  # positions of steps that are looked at
        self.seen = {}  # position -> what steps.look_at() returns
        self.traces = {}  # position -> traces of all ranks
        self.saved = {}  # with --save, the state before the last step
        self.ended = "has no step left to take"
        self.comparison = Comparison(run.rows_between(self.begin_at.step, end.step))
        self.difference = None  # the first one
        self.equal = 0  # rows

    # ---- what train.main() calls -----------------------------------------------------------------

    def begin(self, run: Any) -> None:
        then, now = self.logged.fact("run", "data"), run.facts["run"]["data"]
        if now != then:
            raise RunFailed(f"it was trained on other data: {then} is now {now}")
        write_rows = run.folder.write_rows

        def seen_and_written(rows: list[dict]) -> None:
            for row in rows:
                self.compare(clean(row), run.state["rollbacks"])
            write_rows(rows)

        run.folder.write_rows = seen_and_written

    def compare(self, row: dict, rollbacks: int) -> None:
        """Only what stands in the log: a rollback to come undoes the others."""
        step, kind = key_of(row)
        is_asked = self.begin_at.step < step <= self.end_at.step and kind in KINDS
        if is_asked and rollbacks == self.logged.position(step).rollbacks:
            self.comparison.see(row)

    def step(self, run: Any, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        state = run.state
        if self.start:  # it is alone in its folder, and so train.py makes it a target of rollbacks
            state["first_step"] = self.start.content["state"]["first_step"]
        position = Position(state["rollbacks"], state["step"] + 1)
        if save and position == self.end_at:
            self.saved = mapped(steps.copied, run.checkpoint())
        if position not in self.shown:
            return take()
        numbers, self.seen[position] = steps.look_at(self.loop, take, run, inputs, targets, lr)
        return numbers

    def due(self, run: Any, due: SimpleNamespace) -> None:
        at = run.state["step"]
        due.evaluation = due.evaluation or bool(self.logged.row(at, "eval"))
        due.save_now = due.save_now or bool(self.logged.row(at, "saved"))
        self.is_reached = self.is_reached or self.stop == (run.state["rollbacks"], at)
        differs = self.stops_early and self.comparison.first_difference is not None
        (self.is_over,) = ranks.agree(self.is_reached or differs)
        if self.is_over and not due.ending:
            due.ending = "computed again", 1
        if due.ending:
            self.ended = f"{due.ending[0]} at step {at}"

    def end(self, run: Any) -> None:
        if not self.is_over:  # it failed, maybe on one rank alone
            return
        if self.stop == self.end_at:
            self.comparison.close()
        comparison = self.comparison
        found = ranks.from_rank0(lambda: (comparison.first_difference, comparison.equal))
        self.difference, self.equal = found
        if self.stop == self.end_at:
            for position, seen in self.seen.items():
                self.traces[position] = ranks.from_all_ranks(seen["trace"])

    # ---- from the start to the end ---------------------------------------------------------------

    def compute(self) -> None:
        """Raises RunFailed if `end` is not reached, or nothing can be compared."""
        run = self.logged
        place = self.start.path.name if self.start else "its beginning"
        say(f"computing {run.path} from {place} to step {self.end_at.step}")
        new_group()
        port = os.environ.get("MASTER_PORT", os.getpid())  # all ranks need the same folder
        scratch = Path(gettempdir(), f"replay_{port}_{os.environ[ATTEMPT]}")
        try:
            if is_rank0():
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(0o700)
                if self.start:
                    name = file_name(self.start.position.step)
                    torch.save(self.start.content, scratch / name)
            resume = "auto" if self.start else run.began_from or "auto"
            for stretch in self.stretches:
                self.stop = stretch.end
                self.is_reached = False
                self.compute_stretch(stretch.settings, scratch, resume)
                if self.difference and self.stops_early:
                    break
                resume = "auto"
        finally:
            if is_rank0():
                shutil.rmtree(scratch, ignore_errors=True)

    def compute_stretch(self, settings: dict, scratch: Path, resume: str) -> None:
        path = self.logged.path
        count = settings["ranks"]
        if int(os.environ.get("WORLD_SIZE", 1)) != count:
            how = f"torchrun --standalone --nproc_per_node={count} replay.py ..."
            fail(f"step {self.stop.step} of {path} was computed by {count} ranks; type: {how}")
        new_group()
        torch.set_num_threads(settings["threads"])
        flags = [*flags_of(settings, scratch, data_dir), f"--resume={resume}"]
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                self.loop.main(flags, watch=self)
        except (BadInput, RunFailed) as error:
            if not self.is_over:  # else it failed after the last step
                reason, *_ = str(error).replace(str(scratch), str(path)).partition(";")
                raise type(error)(f"{path}: {reason}") from error
        if not self.is_over:
            step = self.stop.step
            raise RunFailed(f"{path}: this code {self.ended}, and does not reach step {step}")

    def verdict(self) -> str:
        """In words: whether all was computed again, and if not, what else is known to differ."""
        run = self.logged
        if not self.difference:
            first, last = max(0, self.begin_at.step) + 1, self.end_at.step
            return f"steps {first} to {last}: all logged numbers are computed again, bit for bit"
        end = run.position(self.difference["step"])
        words = [f"{run.path} is not what this code computes here: {in_words(self.difference)}"]
        words += run.changes(self.begin_at, end)
        return "; ".join(words)


ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # names a group of ranks in torchrun's store


def new_group() -> None:
    """Each group of ranks needs a name of its own, as the one before has left its keys there."""
    launch, _, number = os.environ.get(ATTEMPT, "0").partition("_")
    os.environ[ATTEMPT] = f"{launch}_{int(number or 0) + 1}"


if __name__ == "__main__":
    machine.leave(cli.run_script(main))

"""Ask a run: what happened at step N, where did two runs part, can its log be computed again?

    python replay.py out/shakespeare --step=812            # writes replay_00000812.md
    python replay.py out/shakespeare --verify=true         # all of it again, to the first difference
    python replay.py out/shakespeare --against=out/again   # the first row and tensor that differ

It computes with train.py's own loop, in a scratch folder, with the flags that the run had at each
step. The run's folder is only read, so the run may be going on, and no file is executed because the
run names it: for a run of another script add --script=my_fork.py. For a run of several ranks write
torchrun --standalone --nproc_per_node=2 replay.py in place of python replay.py. Exit code: 0 if all
is equal, 1 if not."""

import plumbing  # noqa: F401  first: Ctrl-C in the imports is one line

# isort: split
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from operator import itemgetter
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import train
from checks.run_log import RunLog, first_difference, in_words
from plumbing import checkpoint, cli, forks, machine, ranks
from plumbing.cli import RunFailed, fail
from plumbing.console import LIVE_SECONDS, is_first_rank, on_terminal, print0
from plumbing.hooks import Hook
from plumbing.log import Witness
from plumbing.resume import known_changes
from reporting import step_page as steps

data_dir = ""  # folder of the datasets; "" = where the run found its own
script = ""  # that trained the run, if not train.py

# One step
step = 0  # to show; with --verify=true the last one to compute, 0 = that of the run; with --against
#  the one whose tensors are compared, 0 = where the logs part, [0, inf)

# Many steps
verify = False  # compute the run again, up to the first number that differs
since = 0  # begin at the newest checkpoint up to this step, [0, inf); 0 = at the beginning
against = ""  # folder of another run: name the first row, knobs and tensor that differ


ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # names a group of ranks in torchrun's store
FREE = {  # knobs on which no bit of a step depends
    "report": False,
    "wandb_log": False,
    "audit_interval": -1,
    "num_workers": 0,
    "log_interval": 1,
    "sample_interval": 0,
    "milestone_interval": 0,
}


def main(argv: list[str] | None = None) -> int:
    names = []
    with cli.configured(globals(), argv=argv, names=names):
        if len(names) != 1 or not (step or verify or against):
            fail("expected RUN --step=N, RUN --verify=true or RUN --against=OTHER")
        run = RunLog(names[0])
        if against:
            return where_they_part(run, RunLog(against))
        return verify_run(run) if verify else show_step(run)


# ---- the script that trained a run: only what the user typed is executed -------------------------


def loop_of(run: RunLog) -> ModuleType:
    """The module with the loop that trained a run: train, also where what was typed replaces
    functions of it, or what was typed, where that is a copy of train.py. Raises BadInput if
    something else trained the run: then says what to type."""
    is_own = run.script == "train.py"
    if script and not (against and is_own):  # then the other run is of the script
        return forks.load(script, train)
    if not is_own:
        found = f"{run.path} was trained by {run.script}"
        fail(f"{found}; if that is your code, add its path: --script={run.script}")
    return train


# ---- one step ------------------------------------------------------------------------------------


def show_step(run: RunLog) -> int:
    """Write the page of a step, and say whether the numbers on the way to it are computed again."""
    again = Replay(run, step, looks=1).compute()
    if is_first_rank():
        steps.write_step_page(run.path, step, again.verdict(), again.seen[step])
    return int(again.comparison.first_difference is not None)


# ---- all steps -----------------------------------------------------------------------------------


def verify_run(run: RunLog) -> int:
    """Compare the checkpoints with the log, then compute the run again, up to the first number that
    differs."""
    faults = faults_of(run)
    if faults:
        print0("\n".join(faults))
        return 1
    again = Replay(run, step or run.last).compute()
    print0(again.verdict())
    if again.comparison.first_difference:
        return 1
    print0(
        f"covered: {again.comparison.equal} rows, the hash of each save, the checkpoints that are "
        "there\nnot covered: rows removed from the end, a missing best.pt, times, text, other events"
    )
    return 0


def faults_of(run: RunLog) -> list[str]:
    """In words: checkpoints that are damaged or not those that the log has. A file that is missing
    is no fault."""
    faults = []
    for path in checkpoint.newest_first(run.path):
        fault = "not what was saved: its hash is not in the log"
        try:
            if checkpoint.digest_of_state(checkpoint.load(path)) in run.hashes:
                continue
        except checkpoint.Damaged as error:
            fault = f"damaged: {error}"
        faults.append(f"{path} is {fault}; to go on without it: mv {path} {path}.corrupt")
    return faults


# ---- two runs ------------------------------------------------------------------------------------


def where_they_part(one: RunLog, other: RunLog) -> int:
    """Say where two runs part, in which knobs they differ, and which of them is computed again
    here; if both are, the first tensor that differs."""
    last = min(one.last, other.last)
    found = first_difference(one.path, other.path, last=last)
    at = found["step"] if found else last
    here, there = (run.stretches(-1, at)[-1][0] for run in (one, other))
    for name in here:
        if here[name] != there.get(name):
            print0(f"{name}: {here[name]}, {there.get(name)}")
    if not found:
        print0(f"equal: all numbers of the steps up to {last}")
        return 0
    print0(f"the runs part at {in_words(found)}")
    print0(first_tensor(one, other, step or max(at, one.first + 1, other.first + 1)))
    return 1


def first_tensor(one: RunLog, other: RunLog, at: int) -> str:
    """In words: which of two runs is not computed again here; or else the first thing that differs
    in the step before `at`, or in that step."""
    found = {}
    # a script may replace functions of train, so its run comes second
    for run in sorted((one, other), key=lambda run: run.script != "train.py"):
        found[run] = Replay(run, at, looks=2).compute()
    replays = found.values()
    if wrong := [again.verdict() for again in replays if again.comparison.first_difference]:
        return "\n".join(wrong)
    here, there = found[one].seen, found[other].seen
    for number in sorted(here.keys() & there.keys()):
        if words := steps.first_in_traces(here[number]["traces"], there[number]["traces"]):
            return f"both are computed again; the first difference in step {number}: {words}"
    return "both are computed again, and no tensor differs"


# ---- computing again -----------------------------------------------------------------------------


class Replay(Hook):
    """Computes a run again with train.main() up to the step `last`, and compares each row with the
    log.

    It begins at the newest checkpoint before the steps to be looked at: the newest `looks` ones.
    With none it begins as the run did, or by --since, and ends at the first difference. Raises
    BadInput if the run has no such step."""

    def __init__(self, run: RunLog, last: int, looks: int = 0):
        if not max(run.first, since) < last <= run.last:
            steps_of = f"{run.path} has the steps {run.first + 1} to {run.last}"
            fail(f"--step={last} --since={since}: {steps_of}")
        self.logged = run
        self.loop = loop_of(run)
        self.shown = [last - back for back in range(looks)]
        self.end_at = last
        latest = last - looks if looks else max(since, run.first)
        self.begin_at, self.path, self.content = start_before(run, latest)
        self.stop = last  # the last step that is computed with the same settings
        self.is_over = False  # whether that step is computed
        if self.begin_at < run.rolled_back:
            fail(
                f"{run.path} went on with other data after step {run.first}, and no checkpoint "
                "from there is left; to begin at a later one: --since=STEP"
            )
        rows = run.rows_between(self.begin_at, last)
        self.comparison = Witness(rows, run.knobs["best_metric"], whole=True)
        self.seen = {}  # {step: what steps.look_at() returns}
        self.here = {}  # what computes, as in run.json
        self.screen = sys.stdout  # while train.main() prints nothing
        self.began = self.shown_at = time.monotonic()
        self.at = 0  # the step that was computed last

    def is_refuted(self) -> bool:
        """Whether there is a difference, after which nothing else is to be seen."""
        return bool(self.comparison.first_difference) and not self.shown

    # ---- what train.main() calls -----------------------------------------------------------------

    def begin(self, run: Any) -> None:
        self.here = run.facts["run"]

    def row(self, row: dict, is_kept: bool) -> None:
        if self.begin_at < row["step"] <= self.end_at:
            self.comparison.see(row)

    def step(self, run: Any, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        number = run.state["step"] + 1
        if number not in self.shown:
            return take()
        numbers, seen = steps.look_at(self.loop, take, run, inputs, targets, lr)
        if against:
            seen["traces"] = ranks.from_all_ranks(seen["trace"])
        self.seen[number] = seen
        return numbers

    def due(self, run: Any, due: SimpleNamespace) -> None:
        at = self.at = run.state["step"]
        # a kill or a stop may have come between the last step and its evaluation
        is_due = due.evaluation and at < self.logged.last
        due.evaluation = is_due or (at, "eval") in self.logged.rows
        due.save_now |= (at, "saved") in self.logged.rows
        if self.is_refuted() or self.stop == at:
            run.stop_with = "computed again", 1
        with redirect_stdout(self.screen):
            self.show_progress(at)

    def show_progress(self, at: int) -> None:
        """On a terminal a line that changes, elsewhere one a minute."""
        now = time.monotonic()
        pause, end = (LIVE_SECONDS, "\r") if on_terminal() else (60, "\n")
        if now < self.shown_at + pause:
            return
        self.shown_at = now
        a_step = (now - self.began) / (at - self.begin_at + 1)
        minutes, seconds = divmod(int(a_step * (self.end_at - at)), 60)
        print0(f"step {at}/{self.end_at}, {minutes}:{seconds:02} left", end=end)

    def end(self, run: Any, ended: str) -> None:
        self.is_over = ended == "computed again"
        if self.is_over:  # else it failed, maybe on one rank alone
            if self.stop == self.end_at:
                self.comparison.close()
            self.comparison = ranks.from_rank0(lambda: self.comparison)

    # ---- from the start to the end ---------------------------------------------------------------

    def compute(self) -> "Replay":
        """Returns itself. Raises RunFailed if the end is not reached."""
        run = self.logged
        place = self.path.name if self.path else "its beginning"
        print0(f"computing {run.path} from {place} to step {self.end_at}")
        port = os.environ.get("MASTER_PORT", os.getpid())  # all ranks need the same folder
        scratch = Path(gettempdir(), f"replay_{port}_{os.environ.get(ATTEMPT)}")
        resume = "auto" if self.path else run.began_from or "auto"
        try:
            if is_first_rank():
                scratch.mkdir(0o700)
                if self.path:
                    torch.save(self.content, scratch / checkpoint.file_name(self.begin_at))
            for settings, stop in run.stretches(self.begin_at, self.end_at):
                self.stop = stop
                self.is_over = False
                self.compute_part(settings, scratch, resume)
                resume = "auto"
                if self.is_refuted():
                    break
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return self

    def compute_part(self, settings: dict, scratch: Path, resume: str) -> None:
        path = self.logged.path
        count = settings["ranks"]
        if count != int(os.environ.get("WORLD_SIZE", 1)):
            how = f"torchrun --standalone --nproc_per_node={count} replay.py ..."
            fail(f"step {self.stop} of {path} was computed by {count} ranks: {how}")
        # each group of ranks needs a name of its own, as the one before has left its keys there
        os.environ[ATTEMPT] = os.environ.get(ATTEMPT, "0") + "_"
        torch.set_num_threads(settings["threads"])
        config = self.logged.facts["config"]
        knobs = settings | FREE | {"out_dir": scratch, "resume": resume, "device": config["device"]}
        knobs["data_dir"] = data_dir or settings["data_dir"]
        flags = [f"--{name}={cli.show(knobs[name])}" for name in config]
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            code = self.loop.main(flags, hooks=[self])
        if code > 128:
            name = signal.Signals(code - 128).name
            failure = RunFailed(f"interrupted by {name} at step {self.at} of {self.end_at}")
            failure.exit_code = code
            raise failure
        if not self.is_over:
            raise RunFailed(f"{path}: this code ends before step {self.stop} of the log")

    def verdict(self) -> str:
        """In words: whether all was computed again; if not, the first difference, and what is known
        to have changed since the run began."""
        run = self.logged
        difference = self.comparison.first_difference
        if not difference:
            steps_of = f"steps {max(0, self.begin_at) + 1} to {self.end_at}"
            return f"{steps_of}: all logged numbers are computed again, bit for bit"
        changed = [name for event in run.resumes for name in event["changed"]]
        changed += known_changes(run.facts["run"], self.here, ("data", "files"))
        words = f"{run.path} is not what this code computes here: {in_words(difference)}"
        names = ", ".join(dict.fromkeys(changed))
        return f"{words}; known to have changed: {names or 'nothing'}"


def start_before(run: RunLog, latest: int) -> tuple[int, Path | None, dict]:
    """(step, path, content) of the newest checkpoint up to step `latest` with a hash that the log
    has; without a path: begin as the run did."""
    hashes = {save.get("sha256") for save in run.saves}
    starts = [(-1, None, {})]
    for path in checkpoint.newest_first(run.path) if latest else ():
        with suppress(checkpoint.Damaged, OSError):
            content = checkpoint.load(path)
            at = content["state"]["step"]
            if at <= latest and checkpoint.digest_of_state(content) in hashes:
                starts.append((at, path, content))
    return max(starts, key=itemgetter(0))


if __name__ == "__main__":
    machine.exit_process(cli.run_script(main))

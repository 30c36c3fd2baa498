"""The log of a run, read back so that it can be compared bit for bit and computed again. Nothing is
written or locked, and nothing that a run's folder names is executed."""

import math
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from plumbing import checkpoint
from plumbing.cli import fail, show
from plumbing.files import read_json
from plumbing.witness import Witness, key_of
from reporting.record import read_metrics

KINDS = ("train", "eval", "saved")  # of the rows that are compared

# ---- two logs ------------------------------------------------------------------------------------


def differences(
    then: str | Path, now: str | Path, kinds: tuple = KINDS, last: float = math.inf
) -> "Comparison":
    """Compare the logs of two run folders, row by row in the order of the steps: every bit of each
    number that both rows have, but for times, memory and throughput.

    kinds: of the rows to compare: "train", "eval", and "saved" for the hash of each save. Saves
    count where both runs have one, as a signal may have asked for it. A train or eval row that only
    one of the two has is a difference. last: the last step to compare.
    Returns a Witness: `first_difference` is None if the two are equal, else {"step", "field",
    "then", "now"}, which in_words() puts in words; `compared` and `equal` are numbers of rows.
    Raises BadInput if a folder holds no run.
    """
    comparison = Comparison(Logged(then).rows_between(-1, last, kinds))
    for row in Logged(now).rows_between(-1, last, kinds):
        comparison.see(row)
    comparison.close()
    return comparison


class Comparison(Witness):
    """A Witness for logs that must agree as a whole: a row that only one of the two has differs,
    too, in a field such as "train row", and so does one of other data."""

    def __init__(self, old_rows: Iterable[dict]):
        super().__init__({**row, f"{row['kind']} row": "there"} for row in old_rows)
        self.old_data.clear()

    def see(self, row: dict) -> None:
        name = f"{row['kind']} row"
        if row["kind"] != "event":
            self.old_rows.setdefault(key_of(row), {name: "missing"})
        super().see({**row, name: "there"})

    def close(self) -> None:
        """After the last row: those that have not been seen."""
        for step, kind in sorted(self.old_rows):
            if kind != "saved":
                super().see({"step": step, "kind": kind, f"{kind} row": "missing"})


def in_words(difference: dict) -> str:
    """A first_difference: "step 7: loss 1.234567 then, 1.234568 now"."""
    then, now = (str(difference[key])[:20] for key in ("then", "now"))
    return f"step {difference['step']}: {difference['field']} {then} then, {now} now"


# ---- one log -------------------------------------------------------------------------------------


class Position(NamedTuple):
    """A place in the course of a run: how often it has rolled back, and the step that has just
    ended. Positions are in the order in which a run comes to them."""

    rollbacks: int
    step: int


BEGINNING = Position(0, -1)


def position_of(content: dict) -> Position:
    """Of a checkpoint."""
    return Position(content["state"]["rollbacks"], content["state"]["step"])


class Logged:
    """A run's folder: run.json, metrics.jsonl and checkpoints.

    facts: run.json. rows: {(step, kind): row} of the rows that stand, of KINDS. saves: events
    `saved` that stand. rollbacks: the events. resumes: [(Position, event)] of those whose steps
    stand. first, last: the step before the first one, and the last one. Raises BadInput if the
    folder holds no run.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = read_json(self.path / "run.json")
        self.rows = {}
        self.twice = []  # (step, kind) of train and eval rows that the log has more than once
        self.saves = []  # two of a step, around a rollback, have two hashes
        self.hashes = set()  # of all saves, also of those that a rollback has undone
        self.rollbacks = []
        self.resumes = []
        file = self.path / "metrics.jsonl"
        for row in read_metrics(file)[0] if file.is_file() else ():
            self.add(row)
        if not isinstance(self.facts.get("run"), dict) or not self.rows:
            fail(f"{self.path} holds no run; expected the out_dir of train.py, such as out/run")
        steps = [step for step, kind in self.rows if kind != "eval"]
        self.first = min(steps, default=0) if self.began_from else 0
        self.last = max(steps, default=0)

    def add(self, row: dict) -> None:
        """Take a row into account, in the order of the file."""
        step, kind = key_of(row)
        if kind == "resume":  # from a checkpoint, so what came after that is undone
            self.rollbacks = [old for old in self.rollbacks if old["step"] <= step]
            here = Position(len(self.rollbacks), step)
            self.resumes = [old for old in self.resumes if old[0] < here] + [(here, row)]
        if kind in ("resume", "rollback"):
            self.rows = {key: old for key, old in self.rows.items() if key[0] <= step}
            self.saves = [save for save in self.saves if save["step"] <= step]
        if kind == "rollback":
            self.rollbacks.append(row)
        elif kind == "saved":
            self.saves.append(row)
            self.hashes.add(row.get("sha256"))
        elif (step, kind) in self.rows:
            self.twice.append((step, kind))
        if kind in KINDS:
            self.rows.setdefault((step, kind), row)

    @property
    def began_from(self) -> str | None:
        """The checkpoint of another run with which this one began."""
        return self.facts["run"].get("began_from")

    def rows_between(self, first: int, last: float, kinds: tuple = KINDS) -> list[dict]:
        """Rows of the steps first + 1 to last."""
        asked = [key for key in self.rows if first < key[0] <= last and key[1] in kinds]
        return sorted((self.rows[key] for key in asked), key=itemgetter("step"))

    # ---- its course ------------------------------------------------------------------------------

    def position(self, step: int) -> Position:
        """Where the run took this step for the last time."""
        before = [n for n, row in enumerate(self.rollbacks, 1) if row["step"] < step]
        return Position(max(before, default=0), step)

    @cached_property
    def processes(self) -> list[tuple[Position, dict]]:
        """(where it began, its settings) of each process whose steps stand. Settings: every knob as
        resolved, `threads` and `ranks`. run.json has the last ones; from there back, each resume
        says what was changed."""
        run, config = self.facts["run"], self.facts["config"]
        settings = {name: run[name] for name in config} | {"device": config["device"]}
        settings |= {"threads": run["threads"], "ranks": run["world_size"]}
        found = []
        for position, event in reversed(self.resumes):
            found.append((position, settings))
            then = {name: pair[0] for name, pair in event["changed"].items() if name in settings}
            then.pop("device", None)  # its model, and not the knob
            settings = settings | then
        if not self.began_from:  # else its first process has logged a resume, too
            found.append((BEGINNING, settings))
        return found[::-1]

    def stretches(self, begin: Position, end: Position) -> list[list]:
        """The course of the run from `begin` to `end`: [settings, Position where they end]."""
        parts = []
        for start, settings in self.processes:
            followed = {name: settings[name] for name in settings if name != "resume"}
            if start >= end:
                break
            if start <= begin:
                parts.clear()
            if parts and parts[-1][0] == followed:
                continue
            if parts:
                parts[-1][1] = start
            parts.append([followed, end])
        return parts

    def check_form(self) -> None:
        """Raises BadInput unless the files have what is needed to compute the run again."""
        try:
            Path(self.facts["command"][0])
            self.processes[0]
        except (LookupError, TypeError, AttributeError) as error:
            found = f"{self.path} is not of the form that this version writes ({error!r})"
            fail(f"{found}; expected a run of this train.py")

    # ---- its checkpoints -------------------------------------------------------------------------

    def start_before(self, end: Position, latest: int) -> tuple[Path, dict] | None:
        """(path, content) of the newest checkpoint before `end`, up to step `latest`, with a hash
        that the log has. None: begin as the run did."""
        known = {(save["step"], save.get("sha256")) for save in self.saves}
        found = []
        for path in checkpoint.newest_first(self.path):
            with suppress(checkpoint.Damaged, OSError):
                content = checkpoint.load(path)
                position = position_of(content)
                if position.step <= latest and position < end:
                    found.append((position, path, content))
        found.sort(key=itemgetter(0), reverse=True)
        for position, path, content in found:
            if (position.step, checkpoint.digest_of_state(content)) in known:
                return path, content
        return None

    def faults(self) -> list[str]:
        """In words: checkpoints that are damaged or not those that the log has, and rows that are
        there twice. Not found: a file that is missing."""
        metrics = self.path / "metrics.jsonl"
        found = [f"{metrics} has two {kind} rows of step {step}" for step, kind in self.twice]
        for path in checkpoint.newest_first(self.path):
            aside = f"; to go on without it: mv {path} {path}.corrupt"
            try:
                if checkpoint.digest_of_state(checkpoint.load(path)) not in self.hashes:
                    found.append(f"{path} is not what was saved: its hash is not in the log{aside}")
            except checkpoint.Damaged as error:
                found.append(f"{path} is damaged: {error}{aside}")
        return found


FREE_FLAGS = (  # no bit of a step depends on these
    "--report=false --wandb_log=false --audit_interval=-1 --num_workers=0 --log_interval=1 "
    "--sample_interval=0 --milestone_interval=0"
).split()


def flags_of(settings: dict, **changes: object) -> list[str]:
    """Flags for train.py with the knobs among the settings of a process, and `changes`."""
    knobs = {name: settings[name] for name in settings if name not in ("threads", "ranks")}
    knobs |= changes
    return [f"--{name}={show(value)}" for name, value in knobs.items()] + FREE_FLAGS

"""The log of a run, read back so that it can be compared bit for bit and computed again. Nothing is
written or locked, and nothing that a run's folder names is executed."""

import math
from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from plumbing import checkpoint
from plumbing.cli import fail
from plumbing.files import read_json
from plumbing.witness import Witness, key_of
from reporting.record import read_metrics, standing

KINDS = ("train", "eval", "saved")  # of the rows that are compared

# ---- two logs ------------------------------------------------------------------------------------


def first_difference(
    then: str | Path, now: str | Path, kinds: tuple = KINDS, last: float = math.inf
) -> dict | None:
    """Compare the logs of two run folders, row by row in the order of the steps: every bit of each
    number that both rows have, but for times, memory and throughput.

    kinds: of the rows to compare: "train", "eval", and "saved" for the hash of each save. Saves
    count where both runs have one, as a signal may have asked for it. A train or eval row that only
    one of the two has is a difference. last: the last step to compare.
    Returns None if the two are equal, else {"step", "field", "then", "now"}, which in_words() puts
    in words. Raises BadInput if a folder holds no run.
    """
    comparison = Comparison(RunLog(then).rows_between(-1, last, kinds))
    for row in RunLog(now).rows_between(-1, last, kinds):
        comparison.see(row)
    comparison.close()
    return comparison.first_difference


class Comparison(Witness):
    """A Witness for logs that must agree as a whole: a row that only one of the two has differs,
    too, in a field such as "train row", and so does one of other data."""

    skips_other_data = False

    def __init__(self, old_rows: Iterable[dict]):
        super().__init__({**row, f"{row['kind']} row": "there"} for row in old_rows)

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


class RunLog:
    """A run's folder: run.json, metrics.jsonl and checkpoints.

    facts: run.json. script: name of the file that was run. rows: {(step, kind): row} of the rows that stand, of KINDS. saves: events
    `saved` that stand. rollbacks: the events. resumes: [(Position, event)] of those whose steps
    stand. began_from: path of the checkpoint of another run with which this one began, or None.
    first, last: the step before the first one, and the last one. Raises BadInput if the folder
    holds no run.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = read_json(self.path / "run.json")
        self.script = Path(self.facts.get("command", [""])[0]).name
        self.began_from = self.facts.get("run", {}).get("began_from")
        self.rows = {}
        self.saves = []  # two of a step, around a rollback, have two hashes
        self.rollbacks = []
        self.resumes = []
        file = self.path / "metrics.jsonl"
        written = read_metrics(file)[0] if file.is_file() else []
        self.hashes = {row.get("sha256") for row in written}  # also of saves that were undone
        for row in standing(written):
            self.add(row)
        if "run" not in self.facts or not self.rows:
            fail(f"{self.path} holds no run; expected the out_dir of train.py, such as out/run")
        steps = [step for step, _ in self.rows]
        self.first = min(steps) if self.began_from else 0
        self.last = max(steps)

    def add(self, row: dict) -> None:
        """Take a row into account, in the order of the file. Of two rows of a step the later one
        counts, as in a report; of two saves the first."""
        step, kind = key_of(row)
        if kind == "resume":
            here = Position(len(self.rollbacks), step)
            self.resumes = [old for old in self.resumes if old[0] < here] + [(here, row)]
        elif kind == "rollback":
            self.rows = {key: old for key, old in self.rows.items() if key[0] <= step}
            self.saves = [save for save in self.saves if save["step"] <= step]
            self.rollbacks.append(row)
        elif kind == "saved":
            self.saves.append(row)
            self.rows.setdefault((step, kind), row)
        elif kind in KINDS:
            self.rows[step, kind] = row

    def rows_between(self, first: int, last: float, kinds: tuple = KINDS) -> list[dict]:
        """Rows of the steps first + 1 to last."""
        keys = sorted(self.rows, key=itemgetter(0))
        return [self.rows[key] for key in keys if first < key[0] <= last and key[1] in kinds]

    # ---- its course ------------------------------------------------------------------------------

    def position(self, step: int) -> Position:
        """Where the run took this step for the last time."""
        before = (n for n, row in enumerate(self.rollbacks, 1) if row["step"] < step)
        return Position(max(before, default=0), step)

    def stretches(self, begin: Position, end: Position) -> list[tuple[dict, Position]]:
        """The course of the run from `begin` to `end`: (settings, Position where they end).

        Settings: every knob as resolved, but the model of the device, `threads` and `ranks`.
        run.json has the last ones; from there back, each resume says what was changed."""
        run = self.facts["config"] | self.facts["run"]
        own = ("out_dir", "resume")
        settings = {name: run[name] for name in self.facts["config"] if name not in own}
        settings |= {"threads": run["threads"], "ranks": run["world_size"]}
        parts = []
        resumes = self.resumes[1:] if self.began_from else self.resumes  # that one is its start
        for start, event in reversed(resumes):
            then = {name: pair[0] for name, pair in event["changed"].items() if name in settings}
            if then and begin < start < end:
                parts.insert(0, (settings, end))
                end = start
            if begin < start:
                settings = settings | then
        return [(settings, end), *parts]

    # ---- its checkpoints -------------------------------------------------------------------------

    def start_before(self, end: Position, latest: int) -> tuple[Position, Path, dict] | None:
        """(Position, path, content) of the newest checkpoint before `end`, up to step `latest`, with
        a hash that the log has. None: begin as the run did."""
        known = {save.get("sha256") for save in self.saves}
        found = []
        for path in checkpoint.newest_first(self.path):
            with suppress(checkpoint.Damaged, OSError):
                content = checkpoint.load(path)
                position = Position(content["state"]["rollbacks"], content["state"]["step"])
                is_before = position.step <= latest and position < end
                if is_before and checkpoint.digest_of_state(content) in known:
                    found.append((position, path, content))
        return max(found, key=itemgetter(0), default=None)

    def faults(self) -> list[str]:
        """In words: checkpoints that are damaged or not those that the log has. Not found: a file
        that is missing."""
        found = []
        for path in checkpoint.newest_first(self.path):
            fault = "not what was saved: its hash is not in the log"
            try:
                if checkpoint.digest_of_state(checkpoint.load(path)) in self.hashes:
                    continue
            except checkpoint.Damaged as error:
                fault = f"damaged: {error}"
            found.append(f"{path} is {fault}; to go on without it: mv {path} {path}.corrupt")
        return found

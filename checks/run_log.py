"""The log of a run, read back so that it can be compared with another one and computed again."""

import math
from pathlib import Path

from plumbing.cli import fail
from plumbing.files import read_json
from plumbing.log import Witness, key_of, read_rows, standing

KINDS = ("train", "eval", "saved")  # of the rows that are compared

# ---- two logs ------------------------------------------------------------------------------------


def first_difference(
    then: str | Path, now: str | Path, kinds: tuple = KINDS, last: float = math.inf
) -> dict | None:
    """Compare the logs of two run folders, row by row in the order of the steps: every bit of each
    number that is compared, see Witness. The saves come last: their hashes depend on settings, too.

    kinds: of the rows to compare: "train", "eval", and "saved" for the hash of each save. Saves
    count where both runs have one, as a signal may have asked for it. A train or eval row that only
    one of the two has is a difference. last: the last step to compare.
    Returns None if the two are equal, else {"step", "field", "then", "now"}, which in_words() puts
    in words. Raises BadInput if a folder holds no run.
    """
    old = RunLog(then)
    old_rows = old.rows_between(-1, last, kinds)
    witness = Witness(old_rows, old.knobs["best_metric"], whole=True)
    new_rows = RunLog(now).rows_between(-1, last, kinds)
    for row in sorted(new_rows, key=lambda row: (row["kind"] == "event", row["step"])):
        witness.see(row)
    witness.close()
    return witness.first_difference


def in_words(difference: dict) -> str:
    """A first_difference: "step 7: loss 1.234567 then, 1.234568 now"."""
    then, now = (str(difference[key])[:20] for key in ("then", "now"))
    return f"step {difference['step']}: {difference['field']} {then} then, {now} now"


# ---- one log -----------------------------------------------------------------------------------


class RunLog:
    """run.json and the rows of a run that stand. Nothing is written or locked.

    facts: run.json. knobs: those with which its newest rows were computed. script: name of the file
    that was run. rows: {(step, kind): row} of KINDS. saves: events `saved`. resumes: events, the last
    one at each step. hashes: of all saves, also of those that were undone. began_from: path of the
    checkpoint of another run with which this one began, or None. first, last: the step before the
    first one that this code computes, and the last one: until 2026-11-28 a run could roll back, and
    went on with other data. Raises BadInput if the folder holds no run.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = read_json(self.path / "run.json")
        self.rolled_back = -1  # the step of the last event `rollback`
        self.resumes = []
        rows = read_rows(self.path / "metrics.jsonl")
        self.hashes = {row.get("sha256") for row in rows}  # also of saves that were undone
        compared = []
        for row in standing(rows):
            step, kind = key_of(row)
            if kind == "resume":
                self.resumes = [old for old in self.resumes if old["step"] < step]
                self.resumes.append(row)
            elif kind == "rollback":
                self.rolled_back = step
            elif kind in KINDS:
                compared.append(row)
        self.saves = [row for row in compared if row["kind"] == "event"]
        # Of two saves of a step the first counts, but for the one before a due evaluation: no run
        # that was not stopped there has that state. Of other rows the later one.
        saves = [row for row in reversed(self.saves) if not row.get("evaluation_due")]
        others = [row for row in compared if row["kind"] != "event"]
        self.rows = {key_of(row): row for row in others + saves}
        if "run" not in self.facts or not self.rows:
            fail(f"{self.path} holds no run; expected the out_dir of train.py, such as out/run")
        self.knobs = self.facts["config"] | self.facts["run"]
        self.script = Path(self.facts["command"][0]).name
        self.began_from = self.knobs.get("began_from")
        steps = [step for step, _ in self.rows]
        self.first = max(self.rolled_back, min(steps) if self.began_from else 0)
        self.last = max(steps)

    def rows_between(self, first: int, last: float, kinds: tuple = KINDS) -> list[dict]:
        """Rows of the steps first + 1 to last."""
        result = []
        for (step, kind), row in self.rows.items():
            if first < step <= last and kind in kinds:
                result.append(row)
        return result

    def stretches(self, begin: int, end: int) -> list[tuple[dict, int]]:
        """The course of the run from step `begin` to `end`: (settings, step where they end).

        Settings: every knob as resolved, but the model of the device, `threads` and `ranks`.
        run.json has the last ones; from there back, each resume says what was changed."""
        own = ("out_dir", "resume")
        settings = {name: self.knobs[name] for name in self.facts["config"] if name not in own}
        settings |= {"threads": self.knobs["threads"], "ranks": self.knobs["world_size"]}
        parts = []
        resumes = self.resumes[1:] if self.began_from else self.resumes  # that one is its start
        for event in reversed(resumes):
            start = event["step"]
            if start <= begin:
                break
            then = {name: pair[0] for name, pair in event["changed"].items() if name in settings}
            if then and start < end:
                parts.insert(0, (settings, end))
                end = start
            settings = settings | then
        return [(settings, end), *parts]

"""The log as the witness: rows that a log already holds, compared with the same rows computed
again."""

import json
from collections.abc import Iterable
from typing import Any

from plumbing.fields import MEASURED

NOT_COMPARED = (*MEASURED, "files")  # a save may have been due by a signal


class Witness:
    """Compares rows as they are written with those that a log already holds of the same steps. The
    only place where rows are compared: a resume, replay.py and check.py all use it.

    old_rows: dicts as json.loads reads them, of any kind that is to be compared. Of two rows of
    one kind and step, such as two saves around a rollback, the first counts.
    """

    skips_other_data = True  # rows of one step with other `sequences`: of two sides of a rollback

    def __init__(self, old_rows: Iterable[dict]):
        # (step, kind) -> row, until it is compared
        self.old_rows = {key_of(row): row for row in reversed([*old_rows])}
        self.last_step = max((step for step, _ in self.old_rows), default=-1)
        self.other_data = -1  # step of the newest train row, if its `sequences` are others
        self.compared = 0  # rows
        self.equal = 0
        self.steps = 0  # train rows among `compared`
        self.first_difference = None  # {"step", "field", "then", "now"}

    def see(self, row: dict) -> None:
        """Compare `row` with the old one of its step and kind, if there is one. If the train rows of
        that step have other `sequences`, they are of other data, after a rollback, and nothing of
        that step is compared."""
        step = row["step"]
        then = self.old_rows.get(key_of(row), row)
        if row["kind"] == "train":
            is_other = then.get("sequences") != row.get("sequences")
            self.other_data = step if is_other and self.skips_other_data else -1
        if then is row or step == self.other_data:
            return
        del self.old_rows[key_of(row)]
        self.compared += 1
        self.steps += row["kind"] == "train"
        for name in differing_fields(then, row):
            found = {"step": step, "field": name, "then": then[name], "now": row[name]}
            self.first_difference = self.first_difference or found
            return
        self.equal += 1

    def is_over(self, step: int) -> bool:
        """Whether the result is known, once a row of this step was seen."""
        return bool(self.first_difference) or not self.old_rows or step > self.last_step


def rows_of_course(rows: list[dict], run: Any) -> list[dict]:
    """Of `rows` past the checkpoint of `run`, with the `resume` events among them, those that the
    latest process computed, if it was on today's course: with the same values of the knobs whose
    comments have no word."""
    knobs = run.before
    found = []
    for row in rows:
        if row["kind"] == "event":
            knobs = row["knobs"]
            found = []
        else:
            found.append(row)
    now = run.facts["config"] | run.facts["run"]
    course = [name for name, knob in run.knobs.items() if not knob.policy]
    return found if all(knobs.get(name, now[name]) == now[name] for name in course) else []


def key_of(row: dict) -> tuple[int, str]:
    """(step, kind) of a row; an event's kind is its name."""
    return row["step"], row.get("event", row["kind"])


def differing_fields(then: dict, now: dict) -> list[str]:
    """Names of the fields that both rows have and whose JSON differs: so every bit of a number
    counts, and null equals null. Times, memory and throughput are not compared."""
    names = [name for name in then if name in now and name not in NOT_COMPARED]
    return [name for name in names if json.dumps(then[name]) != json.dumps(now[name])]

"""metrics.jsonl: here, and nowhere else, its lines are read and written, it is decided which rows
stand, and rows are compared.

A run that goes on from the checkpoint of step N may find rows past N in its log. They stay in the
file until the first new ones take their place, in one rename: so a process that fails before that
leaves them to the next one, which compares them with what it computes again.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from plumbing.fields import COMPARED
from plumbing.files import fsync, replacing

# Events of a process, not of a step: nothing undoes them
OF_PROCESS = ("resume", "resume_checked", "end")

# ---- reading -------------------------------------------------------------------------------------


def read_rows(path: str | Path) -> tuple[list[dict], int]:
    """(rows, number of damaged lines) of a metrics.jsonl; ([], 0) if there is none."""
    rows = [parsed(line) for line in whole_lines(path)]
    return [row for row in rows if row], rows.count(None)


def whole_lines(path: str | Path) -> list[bytes]:
    """The lines of a file, without half a line that a kill has left at its end."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return [line for line in file if line.endswith(b"\n")]
    return []


def parsed(line: bytes) -> dict | None:
    """The row in a line; None if it is no row of train.py."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        row = json.loads(line)
        is_known = row["kind"] in ("train", "eval") or isinstance(row["event"], str)
        return row if is_known and isinstance(row["step"], int) else None


def key_of(row: dict) -> tuple[int, str]:
    """(step, kind) of a row; an event's kind is its name."""
    return row["step"], row.get("event", row["kind"])


def is_past(row: dict, place: tuple[float, bool]) -> bool:
    """Whether this is a train or eval row past a place: (step, whether its evaluation comes
    before)."""
    return row["kind"] != "event" and (row["step"], row["kind"] == "eval") > place


# ---- which rows stand ----------------------------------------------------------------------------


def course(rows: Iterable[dict]) -> Iterator[tuple[dict, dict | None, dict | None]]:
    """Yields (row, begun, pending) for each row of a log, in its order.

    A `resume` at step s takes effect with the first line past s that follows it, or a rollback:
    there it is `begun`. Until then it is `pending`. If its process fails before that, it never takes
    effect: it has undone no row, and its knobs have computed none."""
    pending = None
    for row in rows:
        event = row.get("event")
        begun = None
        is_past_it = pending and (row["step"] > pending["step"] or is_rollback(row))
        if is_past_it and event not in OF_PROCESS:
            begun = pending
            pending = None
        if event == "resume":
            pending = row
        yield row, begun, pending


def standing(rows: Iterable[dict]) -> list[dict]:
    """The rows that count, in the order of the log: up to the step where a resume took effect, or
    may still do so, and without the two steps that a process logged past its `end`."""
    result = []
    pending = None
    for row, begun, pending in course(rows):
        if begun:
            result = undone(result, begun["step"])
        elif row.get("event") == "end" and not pending:
            result = undone(result, row["step"])
        result.append(row)
    return undone(result, pending["step"]) if pending else result


def undone(rows: list[dict], step: int) -> list[dict]:
    """`rows` without those past `step`. What led to a rollback that stands has happened: it
    stays."""
    start = 0
    for i, row in enumerate(rows):
        if is_rollback(row) and row["step"] <= step:
            start = i
    later = [row for row in rows[start:] if row["step"] <= step or row.get("event") in OF_PROCESS]
    return rows[:start] + later


# ---- writing -------------------------------------------------------------------------------------


class LogFile:
    """A metrics.jsonl that a run writes. What cannot be written waits in memory, and no row is ever
    there twice. Any thread may call a method."""

    def __init__(self, path: Path):
        self.path = path
        self.changing = threading.Lock()
        self.waiting = []  # rows that are not on the disk
        self.whole = None  # bytes of whole rows on the disk; what follows is half a write
        self.kept = (math.inf, True)  # place in the file past which new rows replace the old ones

    def keep_to(self, step: int, evaluation_due: bool = False) -> None:
        """The run goes on at `step`. evaluation_due: with its evaluation, which may have been
        logged before."""
        place = step, not evaluation_due
        with self.changing:
            self.kept = min(self.kept, place)
            self.waiting = [row for row in self.waiting if not is_past(row, place)]

    def write(self, rows: list[dict]) -> None:
        """Append rows; the first one past the kept ones takes the place of the old rows there, and
        so does a `rollback`. Raises OSError: then all rows wait for the next call."""
        with self.changing:
            self.waiting += rows
            content = "".join(json.dumps(row) + "\n" for row in self.waiting).encode()
            replaces = any(is_past(row, self.kept) or is_rollback(row) for row in self.waiting)
            if self.whole is None:
                self.whole = sum(map(len, whole_lines(self.path)))
            with open(self.path, "ab", buffering=0) as file:
                self.whole = min(self.whole, file.tell())
                file.truncate(self.whole)  # a kill, or a full disk, may have left a part of a write
                if not replaces and file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if replaces:
                self.replace(content)
            self.whole = math.inf
            self.waiting = []

    def replace(self, content: bytes) -> None:
        """Put `content` in place of the rows past the kept ones, and of damaged lines."""
        lines = []
        for line in whole_lines(self.path):
            row = parsed(line)
            if row and not is_past(row, self.kept):
                lines.append(line)
        with replacing(self.path) as temporary:
            temporary.write_bytes(b"".join(lines) + content)
        self.kept = (math.inf, True)

    def sync(self) -> None:
        """Flush all rows to the disk. Raises OSError if rows still wait for room there."""
        self.write([])
        with suppress(OSError):  # a network disk
            fsync(self.path)


def is_rollback(row: dict) -> bool:
    return row.get("event") == "rollback"


# ---- comparing -----------------------------------------------------------------------------------


class Witness:
    """Compares rows as they are written with those that a log already holds. The only place where
    rows are compared: a resume, replay.py and check.py all use it.

    old_rows: dicts as json.loads reads them, of any kind that is to be compared. Of two rows of
    one kind and step, such as two saves around a rollback, the first counts. best_metric: the knob
    of the run. whole: the two logs must agree as a whole, so a train or eval row that only one of
    them has is a difference, too, and so is one of other data.
    """

    def __init__(
        self, old_rows: Iterable[dict], best_metric: str = "val_loss", whole: bool = False
    ):
        # (step, kind) -> row, until it is compared
        self.old_rows = {key_of(row): row for row in reversed([*old_rows])}
        self.last_step = max((step for step, _ in self.old_rows), default=-1)
        self.fields = compared_fields(best_metric)
        self.whole = whole
        self.other_data = -1  # step of the newest train row, if its `sequences` are others
        self.compared = 0  # rows
        self.equal = 0
        self.steps = 0  # train rows among `compared`
        self.first_difference = None  # {"step", "field", "then", "now"}

    def see(self, row: dict) -> None:
        """Compare `row` with the old one of its step and kind, if there is one. If the train rows of
        that step have other `sequences`, they are of other data, after a rollback, and nothing of
        that step is compared."""
        step, kind = key_of(row)
        old = self.old_rows.get((step, kind))
        if kind == "train":
            is_other = old and old.get("sequences") != row.get("sequences")
            self.other_data = step if is_other and not self.whole else -1
        if step == self.other_data:
            return
        if old:
            del self.old_rows[step, kind]
            self.compared += 1
            self.steps += kind == "train"
            names = self.differing(old, row)
            self.equal += not names
            for name in names:
                self.differ(step, name, old[name], row[name])
        elif self.whole and row["kind"] != "event":
            self.differ(step, f"{kind} row", "missing", "there")

    def differing(self, then: dict, now: dict) -> list[str]:
        """The compared fields that both rows have and whose JSON differs: so every bit of a number
        counts, and null equals null."""
        names = [name for name in then if name in now and name in self.fields]
        return [name for name in names if json.dumps(then[name]) != json.dumps(now[name])]

    def differ(self, step: int, field: str, then: object, now: object) -> None:
        difference = {"step": step, "field": field, "then": then, "now": now}
        self.first_difference = self.first_difference or difference

    def is_over(self, step: int) -> bool:
        """Whether the result is known, once a row of this step was seen."""
        return bool(self.first_difference) or not self.old_rows or step > self.last_step

    def close(self) -> None:
        """After the last row of a whole log: the old rows that were not seen."""
        for step, kind in sorted(self.old_rows):
            if kind != "saved":
                self.differ(step, f"{kind} row", "there", "missing")


def compared_fields(best_metric: str) -> set[str]:
    """What decides: the numbers that the loop itself writes and does not measure, and the one that
    selects best.pt. Other numbers that a fork logs may be times or temperatures."""
    name = best_metric.removeprefix("-")
    return {*COMPARED, name, f"best_{name}", "sha256"}

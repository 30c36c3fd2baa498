"""metrics.jsonl: here, and nowhere else, its lines are read and written, it is decided which rows
stand, and rows are compared.

A run that goes on from the checkpoint of step N may find rows past N in its log. They stay in the
file until the first new ones take their place, in one rename: so a process that fails before that
leaves them to the next one, which compares them with what it computes again.
"""

import errno
import json
import math
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from plumbing.fields import COMPARED
from plumbing.files import fsync, replacing

# Events that belong to a process, not to a step: no resume undoes them
OF_PROCESS = ("resume", "resume_checked", "end")

# ---- reading -------------------------------------------------------------------------------------


def read_rows(path: str | Path, offset: int = 0) -> list[dict]:
    """The rows of a metrics.jsonl from that byte on; none if there is no file."""
    return [row for row in map(parsed, whole_lines(path, offset)) if row]


def whole_lines(path: str | Path, offset: int = 0) -> list[bytes]:
    """The lines of a file, without half a line that a kill has left at its end."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset)
        return [line for line in file if line.endswith(b"\n")]
    return []


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line of a file, the last one first; none if there is no file."""
    with suppress(FileNotFoundError, ValueError), open(path, "rb") as file:  # or it is empty
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = len(content)
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            yield begin, content[begin:end]
            end = begin


def parsed(line: bytes) -> dict | None:
    """The row in a line; None if it is no row of train.py."""
    with suppress(ValueError, TypeError, KeyError):
        row = json.loads(line)
        step, _ = key_of(row)
        return row if isinstance(step, int) else None


def key_of(row: dict) -> tuple[int, str]:
    """(step, kind) of a row; an event's kind is its name."""
    return row["step"], row["event"] if row["kind"] == "event" else row["kind"]


def is_past(row: dict, place: tuple[float, bool]) -> bool:
    """Whether this is a train or eval row past a place: (step, whether its evaluation comes
    before)."""
    return row["kind"] != "event" and (row["step"], row["kind"] == "eval") > place


def standing(rows: Iterable[dict]) -> list[dict]:
    """The rows that count, in the order of the log: a process that resumes undoes what was logged
    past its step, and one that ends the steps that it took for their rows alone. Until 2026-11-28 a
    run could also go back to a checkpoint by itself, and say so in an event `rollback`."""
    result = []
    for row in rows:
        if row.get("event") in ("resume", "end", "rollback"):
            result = undone(result, row["step"])
        result.append(row)
    return result


def undone(rows: list[dict], step: int) -> list[dict]:
    """`rows` without those past `step`."""
    return [row for row in rows if row["step"] <= step or row.get("event") in OF_PROCESS]


# ---- writing -------------------------------------------------------------------------------------


class LogFile:
    """A metrics.jsonl that a run writes. What cannot be written waits in memory, and no row is ever
    there twice. Any thread may call a method."""

    def __init__(self, path: Path):
        self.path = path
        self.changing = threading.Lock()
        self.waiting = []  # rows that are not on the disk
        self.kept = (math.inf, True)  # place in the file past which new rows replace the old ones
        self.tail_at = 0  # bytes of the file up to the newest train row that is kept

    def has_steps(self) -> bool:
        return any(row["kind"] == "train" for row in read_rows(self.path))

    def keep_to(self, step: int, evaluation_due: bool = False) -> None:
        """At the start of a process: the run goes on at `step`. evaluation_due: with its evaluation,
        which may have been logged before. The log is read from its end, back to that step."""
        place = step, not evaluation_due
        for offset, line in lines_from_end(self.path):
            if not line.endswith(b"\n"):  # a kill has left a part of it
                os.truncate(self.path, offset)
                continue
            row = parsed(line)
            if row and row["kind"] == "train" and not is_past(row, place):
                break
            self.tail_at = offset
            if row and is_past(row, place):
                self.kept = place

    def old_rows(self) -> list[dict]:
        """Those past the kept ones, until new ones replace them, and the events among them."""
        return read_rows(self.path, self.tail_at) if self.kept[0] < math.inf else []

    def write(self, rows: list[dict]) -> None:
        """Append rows; the first one past the kept ones takes the place of the old rows there.
        Raises OSError: then all rows wait for the next call."""
        with self.changing:
            self.waiting += rows
            if any(is_past(row, self.kept) for row in self.waiting):
                others = [row for row in self.old_rows() if not is_past(row, self.kept)]
                with replacing(self.path) as temporary:
                    shutil.copyfile(self.path, temporary)
                    os.truncate(temporary, self.tail_at)
                    with open(temporary, "ab") as file:
                        file.write(as_lines(others + self.waiting))
                self.kept = (math.inf, True)
            else:
                self.append(as_lines(self.waiting))
            self.waiting = []

    def append(self, content: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            if file.write(content) < len(content):  # a full disk
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        """Flush all rows to the disk. Raises OSError if rows still wait for room there."""
        self.write([])
        with suppress(OSError):  # a network disk
            fsync(self.path)


def as_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# ---- comparing -----------------------------------------------------------------------------------


class Witness:
    """Compares rows as they are written with those that a log already holds. The only place where
    rows are compared: a resume, replay.py and check.py all use it.

    old_rows: dicts as json.loads reads them, of any kind that is to be compared. Of two rows of
    one kind and step, such as two saves, the first counts. best_metric: the knob
    of the run. whole: the two logs must agree as a whole, so a train or eval row that only one of
    them has is a difference, too, and so is one of other data.
    """

    def __init__(self, old_rows: list[dict], best_metric: str, whole: bool = False):
        # (step, kind) -> an old row that was not compared yet
        self.old_rows = {key_of(row): row for row in reversed(old_rows)}
        self.last_step = max((step for step, _ in self.old_rows), default=-1)
        name = best_metric.removeprefix("-")
        # Compared is what the loop itself writes and does not measure, and what selects best.pt.
        # Other numbers that a fork logs may be times or temperatures.
        self.fields = {*COMPARED, name, f"best_{name}", "sha256"}
        self.whole = whole
        self.compared = 0  # rows
        self.equal = 0
        self.steps = 0  # train rows among `compared`
        self.first_difference = None  # {"step", "field", "then", "now"}

    def see(self, row: dict) -> None:
        """Compare `row` with the old one of its step and kind, if there is one: the fields that both
        have, as JSON, so every bit of a number counts. Rows with other `sequences` are of other
        data: in a log of before 2026-11-28, those that led to a `rollback`."""
        step, kind = key_of(row)
        old = self.old_rows.pop((step, kind), None)
        if not old:
            if self.whole and row["kind"] != "event":
                self.differ(step, f"{kind} row", "absent", "present")
        elif self.whole or old.get("sequences") == row.get("sequences"):
            both = [name for name in old if name in row and name in self.fields]
            names = [name for name in both if json.dumps(old[name]) != json.dumps(row[name])]
            self.compared += 1
            self.steps += kind == "train"
            self.equal += not names
            for name in names:
                self.differ(step, name, old[name], row[name])

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
                self.differ(step, f"{kind} row", "present", "absent")

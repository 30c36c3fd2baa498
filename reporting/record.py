"""The record of a run, read back: metrics.jsonl as arrays, run.json as a dict, and statistics.

Whatever the files hold is checked here, once: a damaged line is left out and counted, an unknown
number is NaN, run.json lacks what is of the wrong type, and no control character gets through.
"""

import fcntl
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plumbing.console import FIELDS
from plumbing.files import read_json

KINDS_OF_NUMBERS = ("train", "eval")  # of rows
INFO = {  # of run.json
    **dict.fromkeys("config data run git versions hardware state".split(), dict),
    "command": list,
}
LARGEST = 1e100  # float32 ends at 3e38: what is beyond is damage, and would overflow in statistics
DEEPEST = 20  # levels of nesting
LONGEST_ROW = 1 << 20  # bytes of a row
# What terminals obey (also to write backwards), and halves of characters, which cannot be encoded
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class NoRecord(ValueError):
    """There is no run to read: one line for the user."""


@dataclass
class Record:
    """What a run has written."""

    name: str
    folder: Path
    info: dict  # run.json, with the keys of INFO even if they are missing there
    train: dict  # field -> float array with one number per step; NaN if null or missing
    evals: dict  # the same, with one number per evaluation
    events: list  # rows as they are, in the order of the file; only those that stand
    unreadable: int  # damaged lines of metrics.jsonl

    def fact(self, part, name):
        """A number of run.json, such as fact("config", "grad_clip"); NaN if it has none."""
        return plain(self.info[part].get(name))


def read_run(folder):
    """The Record in `folder`. Raises NoRecord if there is none."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        found = "no metrics.jsonl in it" if folder.is_dir() else "no such folder"
        raise NoRecord(f"{folder}: {found}; expected the out_dir of a run of train.py")
    if not path.stat().st_size:
        raise NoRecord(f"{path} is empty: the run stopped before it had anything to write")
    rows, unreadable = read_metrics(path)
    if unreadable >= len(rows):
        found = f"{path} is damaged, or not from train.py: most of its lines are not rows"
        raise NoRecord(found + '; expected JSON such as {"kind": "train", "step": 1, ...}')
    about = folder / "run.json"
    info = tame(read_json(about)) if about.is_file() else {}
    for key, kind in INFO.items():
        if not isinstance(info.get(key), kind):
            info[key] = kind()
    if not isinstance(info["data"].get("meta", {}), dict):
        del info["data"]["meta"]
    events = []
    for row in rows:
        if row["kind"] == "event":
            events.append(tame(row) | {"event": tame(str(row["event"]))})
    return Record(
        name=tame(folder.resolve().name),
        folder=folder,
        info=info,
        train=columns(rows, "train"),
        evals=columns(rows, "eval"),
        events=standing(events),
        unreadable=unreadable,
    )


def standing(events):
    """The events without the skipped updates and the changes that a later resume has undone."""
    found = []
    start = math.inf  # the step from which the next session went on
    for event in reversed(events):
        step = event["step"]
        name = event["event"]
        if name == "resume":
            start = min(start, step)
        if name == "saved" and step <= start:  # what came before that is in it
            start = math.inf
        if step < start or name not in ("skipped", "inexact_resume", "changed"):
            found.append(event)
    return found[::-1]


def tame(value, depth=0):
    """`value`, from JSON, without what a terminal obeys, enormous numbers and deep nesting."""
    if isinstance(value, str):
        return CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict | list) and depth == DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {tame(key): tame(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [tame(item, depth + 1) for item in value]
    is_damage = isinstance(value, int | float) and not abs(value) <= LARGEST
    return None if is_damage else value


def plain(value):
    """A float; NaN for what is no number, or an enormous one."""
    is_number = isinstance(value, int | float) and abs(value) <= LARGEST
    return float(value) if is_number else math.nan


def read_metrics(path):
    """([row, ...], number of damaged lines) of a metrics.jsonl. Half a line at its end is
    neither."""
    rows = []
    damaged = 0
    with open(path, "rb") as file:
        while line := file.readline(LONGEST_ROW):
            row = row_of(line)
            if row:
                rows.append(row)
            else:
                damaged += line.endswith(b"\n")
    return rows, damaged


def row_of(line):
    """The dict in a line of metrics.jsonl; None if it is damaged."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        row = json.loads(line)
        is_step = isinstance(row["step"], int) and 0 <= row["step"] < 1 << 53
        is_event = row["kind"] == "event" and "event" in row
        if is_step and (is_event or row["kind"] in KINDS_OF_NUMBERS):
            return row
    return None


def numbers_of(kind):
    """The names of the numbers in a row of kind "train" or "eval"; `step` is the first."""
    return [field.name for field in FIELDS.values() if field.kind in (kind, "both")]


def columns(rows, kind):
    """{field: array} by increasing step; of two rows of the same step the later one counts. A field
    that is not in FIELDS is one if two rows give it a number: damage may invent one."""
    by_step = {row["step"]: row for row in rows if row["kind"] == kind}
    rows = [by_step[step] for step in sorted(by_step)]
    fields = numbers_of(kind)
    others = set().union(*rows) - {*fields, "kind", "finite"}
    table = {}
    for name in [*fields, *sorted(others)]:
        values = np.array([plain(row.get(name)) for row in rows])
        if name in fields or len(known(values)) > 1:
            table[tame(name)] = values
    return table


def is_running(run):
    """Whether a process holds the lock of the run's folder. That one would lose it by asking."""
    path = run.folder / ".lock"
    if not path.is_file():  # a pipe would be opened for ever
        return False
    try:
        with open(path) as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


def known(values):
    return values[np.isfinite(values)]


def mean(values, of=np.mean):
    return float(of(known(values))) if len(known(values)) else math.nan


def median(values):
    return mean(values, np.median)


def half_window(run):
    """Steps on either side over which curves are smoothed: a hundredth of the run."""
    return max(1, len(run.train["step"]) // 100)


def smooth(values, half):
    """Mean over `half` neighbours on either side; at the start, as many on the right as on the
    left."""
    finite = np.isfinite(values)
    total = np.concatenate([[0], np.cumsum(np.where(finite, values, 0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    i = np.arange(len(values))
    reach = np.minimum(half, i)
    first = i - reach
    last = np.minimum(i + reach + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def last_step(run):
    return int(max(run.train["step"].max(initial=0), run.evals["step"].max(initial=0)))

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
INFO = dict.fromkeys("config data run git versions hardware state".split(), dict)  # of run.json
INFO |= {"command": list, "resumes": list}
LARGEST = 1e100  # float32 ends at 3e38: what is beyond is damage, and would overflow in statistics
DEEPEST = 20  # levels of nesting
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
    events: list  # rows as they are, in the order of the file
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
    info = tame(read_json(folder / "run.json"))
    for key, kind in INFO.items():
        info[key] = info[key] if isinstance(info.get(key), kind) else kind()
    if not isinstance(info["data"].get("meta", {}), dict):
        del info["data"]["meta"]
    train, evals = (columns(rows, kind) for kind in KINDS_OF_NUMBERS)
    events = [row for row in rows if row["kind"] == "event"]
    events = [tame(row) | {"event": tame(str(row["event"]))} for row in events]
    return Record(tame(folder.resolve().name), folder, info, train, evals, events, unreadable)


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
    """([row, ...], number of damaged lines) of a metrics.jsonl. Half a line at its end is neither."""
    rows, damaged = [], 0
    with open(path, "rb") as file:
        while lines := file.readlines(1 << 16):  # together they parse faster, and share their keys
            found = rows_of(lines) or [row for line in lines for row in rows_of([line])]
            is_half = not lines[-1].endswith(b"\n") and not rows_of(lines[-1:])
            rows += found
            damaged += len(lines) - len(found) - is_half
    return rows, damaged


def rows_of(lines):
    """The dicts in lines of metrics.jsonl; [] if one is damaged."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        for row in rows:
            is_step = isinstance(row["step"], int) and 0 <= row["step"] < 1 << 53
            is_known = row["kind"] in KINDS_OF_NUMBERS or (
                row["kind"] == "event" and "event" in row
            )
            if not (is_step and is_known):
                return []
        return rows if len(rows) == len(lines) else []
    return []


def numbers_of(kind):
    """The names of the numbers in a row of kind "train" or "eval"; `step` is the first."""
    return [field.name for field in FIELDS.values() if field.kind in (kind, "both")]


def columns(rows, kind):
    """{field: array} by increasing step; of two rows of the same step the later one counts. A field
    that is not in FIELDS is one if two rows give it a number: damage may invent one."""
    fields = numbers_of(kind)
    by_step = {row["step"]: row for row in rows if row["kind"] == kind}
    rows = [by_step[step] for step in sorted(by_step)]
    names = dict.fromkeys([*fields, *sorted(set().union(*rows) - {"finite"})])
    table = {tame(name): np.array([plain(row.get(name)) for row in rows]) for name in names}
    return {k: values for k, values in table.items() if k in fields or len(known(values)) > 1}


def is_running(run):
    """Whether a process holds the lock of the run's folder. That one would lose it by asking."""
    try:
        with open(run.folder / ".lock") as lock:
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
    """Mean over `half` neighbours on either side; at the start, as many on the right as on the left."""
    i, finite = np.arange(len(values)), np.isfinite(values)
    total = np.concatenate([[0], np.cumsum(np.where(finite, values, 0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    first, last = i - np.minimum(half, i), np.minimum(i + np.minimum(half, i) + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def last_step(run):
    return int(max(run.train["step"].max(initial=0), run.evals["step"].max(initial=0)))

"""The record of a run: metrics.jsonl as arrays, run.json as a dict, and statistics."""

import fcntl
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plumbing.cli import Knob, fail, read_knobs
from plumbing.console import REPO
from plumbing.fields import FIELDS
from plumbing.files import read_json
from plumbing.log import read_rows, standing, whole_lines

# Dicts of run.json; of a name in several of them, the later one counts
PARTS = ("data", "config", "git", "versions", "hardware", "run")
COUNTED = {"max_steps", "patience", "min_delta"}  # `free`, and yet a result depends on them


@dataclass(eq=False)
class Record:
    """What a run has written."""

    name: str
    folder: Path
    facts: dict  # run.json, and what its PARTS hold; a part that is missing there is empty
    knobs: dict  # on which a result depends
    train: dict  # field -> float array with one number per step; NaN if null or missing
    evals: dict  # the same, with one number per evaluation
    events: list  # rows as they are, in the order of the file; only those that stand
    unreadable: int  # damaged lines of metrics.jsonl
    half: int  # steps on either side over which its curves are smoothed: a hundredth of the run
    words: str = ""  # its knobs that differ in a comparison, the seed last
    setting: str = ""  # the same without the seed
    is_other: bool = False  # in a comparison: its results cannot be compared with most

    def fact(self, name: str) -> float:
        """A number among the facts, such as fact("grad_clip"); NaN if there is none."""
        return number_of(self.facts.get(name))


def read_run(folder: str | Path) -> Record:
    """The Record in `folder`. Raises BadInput if there is none."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        fail(f"{folder}: no metrics.jsonl in it; expected the out_dir of a run of train.py")
    rows = read_rows(path)
    unreadable = len(whole_lines(path)) - len(rows)
    if not rows:
        fail(f"{path} is empty, damaged or not from train.py: {unreadable} other lines")
    rows = standing(rows)
    info = dict.fromkeys(PARTS, {}) | read_json(folder / "run.json")
    facts = info | info["data"].get("meta", {})
    for part in PARTS:
        facts |= info[part]
    train = columns(rows, "train")
    return Record(
        name=folder.resolve().name,
        folder=folder,
        facts=facts,
        knobs=knobs_of(facts),
        train=train,
        evals=columns(rows, "eval"),
        events=[row for row in rows if row["kind"] == "event"],
        unreadable=unreadable,
        half=max(1, len(train["step"]) // 100),
    )


def knobs_of(facts: dict) -> dict:
    """The script and the knobs on which a result depends, the seed last. What max_steps has resolved
    has the value that was written, so that runs of other lengths differ in one knob."""
    values = {"script": facts.get("script", "train.py").split()[0], **facts["config"]}
    steps = values.get("max_steps", 0)
    longest = facts.get("written", {}).get("warmup_steps", 0)
    if values.get("decay_steps") == steps:
        values["decay_steps"] = 0
    if values.get("warmup_steps") == steps // 10 < longest:
        values["warmup_steps"] = longest
    free = {name for name, knob in known_knobs(facts).items() if knob.policy == "free"}
    names = sorted(values, key="seed".__eq__)
    return {name: values[name] for name in names if name not in free - COUNTED}


def known_knobs(facts: dict) -> dict[str, Knob]:
    """The knobs of train.py, and those that the script of a run has added."""
    added = {name: Knob(**fields) for name, fields in facts.get("added_knobs", {}).items()}
    return read_knobs(REPO / "train.py") | added


def columns(rows: list[dict], kind: str) -> dict[str, np.ndarray]:
    """{field: array with a number for each row of this kind}; NaN where a row has none."""
    rows = [row for row in rows if row["kind"] == kind]
    names = sorted(FIELDS.keys() | set().union(*rows))
    return {name: np.array([number_of(row.get(name)) for row in rows]) for name in names}


def is_running(run: Record) -> bool:
    """Whether a process holds the lock of the run's folder. That one would lose it by asking."""
    try:
        with open(run.folder / ".lock") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


# ---- statistics of values, of which some are NaN -------------------------------------------------


def number_of(value) -> float:
    """A float; NaN for what is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def known(values):
    return values[np.isfinite(values)]


def mean(values, of=np.mean) -> float:
    return float(of(known(values))) if len(known(values)) else math.nan


def median(values) -> float:
    return mean(values, np.median)


def last(values) -> float:
    return mean(values[-1:])


def smooth(values, half: int):
    """Mean over `half` neighbours on either side; at the start, as many on the right as on the
    left."""
    total = np.append(0, np.cumsum(np.nan_to_num(values)))
    count = np.append(0, np.cumsum(np.isfinite(values)))
    i = np.arange(len(values))
    reach = np.minimum(half, i)
    first = i - reach
    end = np.minimum(i + reach + 1, len(values))
    return (total[end] - total[first]) / (count[end] - count[first])

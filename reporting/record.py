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
RESOLVED = {"decay_steps", "warmup_steps"}  # by max_steps, unless they are typed


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
    half: int  # steps on either side over which its curves are smoothed
    setting: str = ""  # its knobs but the seed that differ in a comparison, in words

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
        half=half_window(train["step"]),
    )


def knobs_of(facts: dict) -> dict:
    """The script and the knobs on which a result depends, the seed last. What max_steps has resolved
    has the value that was written."""
    policies = {name: knob.policy for name, knob in read_knobs(REPO / "train.py").items()}
    for name, fields in facts.get("added_knobs", {}).items():
        policies[name] = Knob(**fields).policy
    values = {"script": facts.get("script", "train.py").split()[0], **facts["config"]}
    values |= {name: was for name, was in facts.get("written", {}).items() if name in RESOLVED}
    names = sorted(values, key="seed".__eq__)
    return {name: values[name] for name in names if name in COUNTED or policies.get(name) != "free"}


def columns(rows: list[dict], kind: str) -> dict[str, np.ndarray]:
    """{field: array} by increasing step; of two rows of the same step the later one counts."""
    by_step = {row["step"]: row for row in rows if row["kind"] == kind}
    rows = [by_step[step] for step in sorted(by_step)]
    others = set().union(*rows) - FIELDS.keys()
    names = [*numbers_of(kind), *sorted(others)]
    return {name: np.array([number_of(row.get(name)) for row in rows]) for name in names}


def numbers_of(kind: str) -> list[str]:
    """The names of the numbers in a row of kind "train" or "eval"; `step` is the first."""
    return [field.name for field in FIELDS.values() if field.kind in (kind, "both")]


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


def half_window(values) -> int:
    """Steps on either side over which a curve is smoothed: a hundredth of the run."""
    return max(1, len(values) // 100)


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


def last_step(run: Record) -> int:
    return int(run.train["step"].max(initial=0))

"""The record of a run, read back: metrics.jsonl as arrays, run.json as it is, and statistics.

Imports no torch. Damaged lines are left out and counted; unknown values are NaN.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from plumbing.files import read_json

FIELDS = {  # known fields; the first one is in every row
    "train": "step loss grad_norm skipped lr tokens sequences epoch step_ms data_ms tokens_per_sec "
    "mfu mem_gb gpu_util".split(),
    "eval": "step val_loss val_bpb val_accuracy val_tokens best_val_loss".split(),
}
NO_ROW = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass
class Run:
    name: str
    folder: Path
    info: dict  # run.json; empty dicts for what is missing or damaged
    train: dict  # field -> float array with one number per step; NaN if null or missing
    evals: dict  # the same, with one number per evaluation
    events: list  # rows as they are, in the order of the file
    rows: "Rows"  # all rows read so far, for the next read_run


def read_run(folder, rows=None):
    """The Run in `folder`. Raises ValueError, one line for the user, if there is none to read.

    rows: those of an earlier Run of this folder; then only what was added since is read.
    """
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        found = "no metrics.jsonl in it" if folder.is_dir() else "no such folder"
        near = sorted(path.parent for path in folder.absolute().parent.glob("*/metrics.jsonl"))
        near = ", ".join(map(os.path.relpath, near[:8])) or "none; train.py makes one"
        raise ValueError(f"{folder}: {found}; expected the folder of a run; there are: {near}")
    rows = (rows or Rows(path)).read()
    n_lines = rows.n_lines + rows.torn
    unreadable = rows.unreadable + rows.torn
    if not n_lines:
        raise ValueError(f"{path} is empty: the run stopped before it had anything to write")
    if unreadable * 2 >= n_lines:
        raise ValueError(
            f"{path} is damaged, or not from train.py: {unreadable:,} of its {n_lines:,} lines are "
            'not rows; expected JSON such as {"kind": "train", "step": 1, ...}'
        )
    empty = {key: {} for key in "config data run git versions hardware state".split()}
    info = read_json(folder / "run.json")
    if not all(isinstance(info.get(key, {}), dict) for key in empty):
        info = {}
    return Run(
        name=folder.resolve().name,
        folder=folder,
        info=empty | info,
        train=columns(rows.tables["train"], FIELDS["train"]),
        evals=columns(rows.tables["eval"], FIELDS["eval"]),
        events=rows.tables["event"],
        rows=rows,
    )


class Rows:
    """The rows of a metrics.jsonl. read() takes in what was added since it was last called."""

    def __init__(self, path):
        self.path = path
        self.inode = None
        self.forget()

    def forget(self):
        self.tables = {"train": [], "eval": [], "event": []}
        self.n_lines = 0
        self.unreadable = 0
        self.end = 0  # offset of the end of the last whole line
        self.torn = False  # whether half a line follows it

    def read(self):
        with open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self.inode or stat.st_size < self.end:
                self.forget()  # a resume or a rollback has replaced the file
                self.inode = stat.st_ino
            file.seek(self.end)
            while lines := file.readlines(1 << 16):  # 64 KiB at once parse fastest
                self.torn = not lines[-1].endswith(b"\n")
                self.add(lines[:-1] if self.torn else lines)
        return self

    def add(self, lines):
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")
            parts = [sort_rows(rows)] if len(rows) == len(lines) else None
        except NO_ROW:
            parts = None
        for part in parts or map(sort_line, lines):
            self.unreadable += part is None
            for kind, table in (part or {}).items():
                self.tables[kind] += table
        self.n_lines += len(lines)
        self.end += sum(map(len, lines))


def sort_rows(rows):
    """{kind: [rows]}; train and eval rows as one {field: array}. Raises if one is not a row."""
    parts = {"train": [], "eval": [], "event": []}
    for row in rows:
        parts[row["kind"]].append(row)
    for row in parts["event"]:
        row["step"], row["event"] = int(row["step"]), str(row["event"])
    for kind, fields in FIELDS.items():
        if parts[kind]:
            names = [*fields, *set().union(*parts[kind]).difference(fields, ("kind", "finite"))]
            part = {name: np.array([plain(row.get(name)) for row in parts[kind]]) for name in names}
            if not np.isfinite(part["step"]).all():
                raise ValueError("a row without its step")
            parts[kind] = [part]
    return parts


def plain(value):
    """A field's value as a float, or NaN if it is not a number."""
    return float(value) if isinstance(value, int | float) else math.nan


def sort_line(line):
    try:
        return sort_rows([json.loads(line)])
    except NO_ROW:
        return None


def columns(parts, fields):
    """{field: array} with increasing steps; of two rows of the same step the later one counts.

    A field that is not in `fields` counts if two rows give it a number: damage may invent one.
    """
    table = {}
    for name in dict.fromkeys([*fields, *sorted(set().union(*parts))]):
        values = [part.get(name, np.full(len(part["step"]), np.nan)) for part in parts]
        table[name] = np.concatenate([[], *values])
    if (np.diff(table["step"]) <= 0).any():
        _, last = np.unique(table["step"][::-1], return_index=True)
        table = {name: values[::-1][last] for name, values in table.items()}
    return {k: values for k, values in table.items() if k in fields or len(known(values)) > 1}


def known(values):
    return values[np.isfinite(values)]


def mean(values):
    return float(np.mean(known(values))) if len(known(values)) else math.nan


def median(values):
    return float(np.median(known(values))) if len(known(values)) else math.nan


def half_window(run):
    """Steps on either side over which curves are smoothed: a hundredth of the run."""
    return max(1, len(run.train["step"]) // 100)


def smooth(values, half):
    """Mean over `half` neighbours on either side, or as many as there are.

    At the start, where a curve falls fast, no more on the right than on the left.
    """
    i, finite = np.arange(len(values)), np.isfinite(values)
    total = np.concatenate([[0], np.cumsum(np.where(finite, values, 0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    first, last = i - np.minimum(half, i), np.minimum(i + np.minimum(half, i) + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def thin(x, y, bins=1000):
    """(x, y), if long, with two points per bin, its lowest and its highest: no peak is lost."""
    if len(x) <= 4 * bins:
        return x, y
    first = np.linspace(0, len(x), bins, endpoint=False).astype(int)
    both = np.stack([np.fmin.reduceat(y, first), np.fmax.reduceat(y, first)], axis=1)
    return np.repeat(x[first], 2), both.ravel()


def short(value, _=None):
    """12000 as 12k, for tick labels."""
    for letter, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / size:g}{letter}"
    return f"{value:,.6g}"


def is_running(run):
    """Whether a process holds the lock of the run's folder. That process itself must not call this:
    it would lose its lock when the file is closed here."""
    if run.info.get("ended") or not fcntl:
        return False
    try:
        with open(run.folder / ".lock") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def happened(run, event):
    return [row for row in run.events if row["event"] == event]


def best_of(run):
    """(loss, step) of the best evaluation on as many tokens as the last; (NaN, 0) if there is none.

    A rollback removes the rows that it undoes; the state in run.json still has their best.
    """
    losses, state = run.evals["val_loss"], run.info["state"]
    losses = np.where(extent(run)[1], losses, np.nan)
    found = (math.nan, 0)
    if len(known(losses)):
        found = float(np.nanmin(losses)), int(run.evals["step"][np.nanargmin(losses)])
    best = state.get("best_val_loss")
    return found if best is None or found[0] <= best else (best, state["best_step"])


def extent(run):
    """(tokens of the last evaluation, 0 = the whole split; mask of the evaluations on as many)."""
    tokens = np.nan_to_num(run.evals["val_tokens"])
    last = tokens[-1] if len(tokens) else 0
    return last, tokens == last


def unit(run):
    """What the rows' "tokens" are: tokens for text; otherwise examples, or targets if an example
    has several."""
    meta = run.info["data"].get("meta")
    if meta is None or "tokenizer" in meta:
        return "tokens"
    same = np.array_equal(run.train["tokens"], run.train["sequences"], equal_nan=True)
    return "examples" if same else "targets"


def new_fields(run):
    """[(name, steps, values)] of the fields that only a fork of train.py writes."""
    tables = (run.train, FIELDS["train"]), (run.evals, FIELDS["eval"])
    return [(k, t["step"], t[k]) for t, fields in tables for k in t if k not in fields]


def last_step(run):
    return int(max(run.train["step"].max(initial=0), run.evals["step"].max(initial=0)))


def late_losses(run):
    """(training losses, smoothed; validation losses) after the first tenth of a run."""
    t, e, start = run.train, run.evals, last_step(run) / 10
    smoothed = smooth(t["loss"], half_window(run))
    return known(smoothed[t["step"] > start]), known(e["val_loss"][e["step"] > start])

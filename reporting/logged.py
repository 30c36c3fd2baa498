"""What a run's folder says of it, read back to be compared bit for bit. Nothing is written or locked."""

import importlib
import math
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from plumbing import checkpoint as checkpoints
from plumbing.cli import show
from plumbing.files import read_json
from plumbing.resume import REPO, RESOLVED, changed_knobs, changes
from reporting.record import read_metrics

KINDS = ("train", "eval", "saved")  # in the order in which a step writes them
MEASURED = "finite step_ms data_ms tokens_per_sec mfu mem_gb gpu_util".split()  # never the same

FREE_FLAGS = (  # no bit of a step depends on these
    "--resume=auto --report=false --wandb_log=false --audit_interval=0 --num_workers=0 "
    "--sample_interval=0 --milestone_interval=0 --save_minutes=0"
).split()


class Logged:
    """rows: {(step, place in KINDS): [row, ...]}, of which there are two where a save follows a
    rollback, or a log was edited. hashes: of all saves, also of steps that a rollback has undone.
    rollbacks: the step of each. first, last: steps are logged from first + 1 to last."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = read_json(self.path / "run.json")
        self.rows, self.hashes, self.rollbacks = {}, set(), []
        file = self.path / "metrics.jsonl"
        for row in read_metrics(file)[0] if file.exists() else ():
            self.add(row)
        trained = [at for at, kind in self.rows if KINDS[kind] == "train"]
        self.first, self.last = min(trained, default=1) - 1, max(trained, default=0)

    def add(self, row: dict) -> None:
        at, kind = row["step"], row["event"] if row["kind"] == "event" else row["kind"]
        if kind in ("rollback", "resume"):  # the steps after it were undone: so were their saves
            self.rows = {key: self.rows[key] for key in self.rows if key[0] <= at}
        if kind == "rollback":
            self.rollbacks.append(at)
        if kind == "saved":
            self.hashes.add(str(row.get("sha256")))
        if kind in KINDS:
            self.rows.setdefault((at, KINDS.index(kind)), []).append(row)

    def row(self, step: int, kind: str) -> dict:
        return self.rows.get((step, KINDS.index(kind)), [{}])[-1]

    @cached_property
    def checkpoints(self) -> list[tuple[int, Path, dict]]:
        """(step, path, checkpoint) of each that can be read, oldest first."""
        found = []
        for path in checkpoints.newest_first(self.path):
            with suppress(checkpoints.Damaged, OSError):  # or just deleted, by a run that goes on
                checkpoint = checkpoints.load(path)
                found.append((checkpoint["state"]["step"], path, checkpoint))
        return sorted(found, key=lambda each: each[0])

    def is_on_its_way(self, checkpoint: dict) -> bool:
        saves = self.rows.get((checkpoint["state"]["step"], KINDS.index("saved")), [])
        return checkpoints.digest_of_state(checkpoint) in [row.get("sha256") for row in saves]

    def start_before(self, stop: int, rollbacks: float = math.inf) -> tuple | None:
        """The newest of `checkpoints` before step `stop`, on the way that the run took, with at most so
        many rollbacks. None: begin as the run did."""
        first = self.first - bool(self.facts["run"].get("began_from"))
        for start in reversed(self.checkpoints):
            is_early = start[0] < stop and start[2]["state"]["rollbacks"] <= rollbacks
            if is_early and start[0] > first and self.is_on_its_way(start[2]):
                return start
        return None

    def flags_at(self, stop: int, out_dir: str, data_dir: str) -> list[str]:
        """Flags with the knobs that held when the run came to step `stop`, "auto" as it was resolved.
        data_dir: "" = as it was."""
        later = [checkpoint["config"] for at, _, checkpoint in self.checkpoints if at >= stop]
        knobs = (later or [self.facts["config"]])[0]
        knobs = knobs | {knob: self.facts["run"][knob] for knob in RESOLVED}
        knobs |= {"out_dir": out_dir, "data_dir": data_dir or self.facts["config"]["data_dir"]}
        return [f"--{name}={show(value)}" for name, value in knobs.items()] + FREE_FLAGS

    def load_script(self) -> None:
        """Import what started the run, if that is not train.py: it replaces functions of train.py."""
        script = Path(self.facts["command"][0]).name
        for path in (REPO / name for name in self.facts["run"]["code"]):
            if path.name == script != "train.py":
                sys.path.insert(0, str(path.parent))
                importlib.import_module(path.stem)


def first_difference(
    one: Logged, other: Logged, first: int, last: int, kinds=KINDS
) -> tuple | None:
    """(step, fields, in words) of the first row of steps first + 1 to last that differs. Hashes count
    where both saved: one may have saved at a signal, or by the clock."""
    for at, place in sorted(key for key in one.rows | other.rows if first < key[0] <= last):
        kind = KINDS[place]
        a, b = (run.rows.get((at, place), []) for run in (one, other))
        if kind == "saved":
            a, b = (a[:1], b[:1]) if a and b else ([], [])
        if kind in kinds and len(a) != len(b):
            return at, [kind], f"{len(a)} and {len(b)} rows of kind {kind}"
        for then, now in zip(a, b, strict=True) if kind in kinds else ():
            names = [name for name in then | now if repr(then.get(name)) != repr(now.get(name))]
            if names := [name for name in names if name not in MEASURED]:
                return at, names, ", ".join(in_words(n, then.get(n), now.get(n)) for n in names)
    return None


def changed(one: Logged, other: Logged) -> list[str]:
    """A line for each knob, and each part of the identity, that differs."""
    found = changed_knobs(one.facts["config"], other.facts["config"])
    found |= changes(one.facts["run"], other.facts["run"])
    return [f"{name}: {abridged(name, a)}, {abridged(name, b)}" for name, (a, b) in found.items()]


def abridged(name: str, value) -> str:
    is_code = name == "code"  # {file that changed: hash}
    return " ".join(f"{file} {value[file][:8]}" for file in value) if is_code else str(value)


def in_words(name: str, one, other) -> str:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return f"{name} {one} and {other} (by {abs(one - other):.1e})"
    return f"{name} {str(one)[:12]} and {str(other)[:12]}"


def not_computed(run: Logged, difference: tuple, identity: dict) -> str:
    """In words: what of the log is not computed here, and why that may be. identity: {key: [then, now]}
    of what makes this machine or code inexact."""
    at, _, words = difference
    words = f"step {at} of {run.path} is not what this code computes here: {words}"
    for name, (then, now) in identity.items():
        words += f"; {name} was {abridged(name, then)} and is {abridged(name, now)} here"
    resumed = sorted({each["step"] for each in run.facts["resumes"] if each["step"] < at})
    note = f"; a change of knobs or ranks when it resumed, at {resumed}, is not followed"
    return words + note * bool(resumed)

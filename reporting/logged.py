"""What a run's folder says of it, read back to be compared bit for bit. Nothing is written or locked."""

import importlib.util
import json
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from plumbing import checkpoint as checkpoints
from plumbing.cli import show
from plumbing.files import read_json
from plumbing.resume import REPO, RESOLVED, changed_knobs, changes

KINDS = ("train", "eval", "saved", "rolled_back")  # the last: the save right after a rollback
MEASURED = "finite step_ms data_ms tokens_per_sec mfu mem_gb gpu_util".split()  # never the same

FREE_FLAGS = (  # no bit of a step depends on these
    "--resume=auto --report=false --wandb_log=false --audit_interval=0 --num_workers=0 "
    "--sample_interval=0 --milestone_interval=0 --save_minutes=0"
).split()


class Logged:
    """rows: {(step, place in KINDS): row}. twice: keys that stand there twice. facts: run.json.
    rollbacks: the step of each. first, last: steps are logged from first + 1 to last."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = read_json(self.path / "run.json")
        self.rows, self.twice, self.rollbacks = {}, set(), []
        rows = self.path / "metrics.jsonl"
        text = rows.read_text("utf-8", errors="replace") if rows.exists() else ""
        self.after_rollback = None  # the step of a rollback whose save has not been read yet
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # the last line may be half written
                row = json.loads(line)
                self.add(row, row["event"] if row["kind"] == "event" else row["kind"])
        trained = [at for at, kind in self.rows if KINDS[kind] == "train"]
        self.first, self.last = min(trained, default=1) - 1, max(trained, default=0)

    def add(self, row: dict, kind: str) -> None:
        at = row["step"]
        if kind in ("rollback", "resume"):  # the steps after it were undone: so were their saves
            self.rows = {key: self.rows[key] for key in self.rows if key[0] <= at}
        if kind == "rollback":
            self.rollbacks.append(at)
            self.after_rollback = at
        if kind == "saved" and at == self.after_rollback:
            kind, self.after_rollback = "rolled_back", None
        if kind in KINDS:
            key = at, KINDS.index(kind)
            if key in self.rows and kind in ("train", "eval"):
                self.twice.add(key)
            self.rows[key] = row

    def row(self, step: int, kind: str) -> dict:
        return self.rows.get((step, KINDS.index(kind)), {})

    @cached_property
    def checkpoints(self) -> list[tuple[int, Path, dict]]:
        """(step, path, checkpoint) of each that can be read, oldest first."""
        found = []
        for path in checkpoints.newest_first(self.path):
            with suppress(checkpoints.Damaged, OSError):  # or just deleted, by a run that goes on
                checkpoint = checkpoints.load(path)
                found.append((checkpoint["state"]["step"], path, checkpoint))
        return sorted(found, key=lambda each: each[0])

    def is_as_logged(self, checkpoint: dict) -> bool | None:
        """Whether its hash was logged. None: it is of steps that a rollback has undone."""
        at, sequences = (checkpoint["state"][key] for key in ("step", "sequences"))
        hashes = [self.row(at, kind).get("sha256") for kind in ("saved", "rolled_back")]
        if checkpoints.digest_of_state(checkpoint) in hashes:
            return True
        is_undone = at > self.first and self.row(at, "train").get("sequences") != sequences
        return None if is_undone else False

    def start_before(self, stop: int, rollbacks: int | None = None) -> tuple | None:
        """The newest of `checkpoints` before step `stop` on the way that the run took. None: begin as
        the run did. rollbacks: the most that it may have had; None = any number."""
        for start in reversed(self.checkpoints):
            at, _, checkpoint = start
            is_early = rollbacks is None or checkpoint["state"]["rollbacks"] <= rollbacks
            is_later = at > self.first or self.facts["run"].get("began_from")
            if at < stop and is_early and is_later and self.is_as_logged(checkpoint):
                return start
        return None

    def flags_at(self, stop: int, out_dir: Path, data_dir: str) -> list[str]:
        """Flags with the knobs that held when the run came to step `stop`, "auto" as it was resolved.
        data_dir: "" = as it was."""
        later = [checkpoint["config"] for at, _, checkpoint in self.checkpoints if at >= stop]
        knobs = (later or [self.facts["config"]])[0]
        knobs = knobs | {knob: self.facts["run"][knob] for knob in RESOLVED}
        folders = {"out_dir": out_dir, "data_dir": data_dir or self.facts["config"]["data_dir"]}
        return [f"--{name}={show(value)}" for name, value in (knobs | folders).items()] + FREE_FLAGS

    def load_script(self) -> None:
        """Import what started the run, if that is not train.py: it replaces functions of train.py."""
        name = Path(self.facts["command"][0]).name
        loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        for path in (REPO / name for name in self.facts["run"]["code"]):
            if path.name == name != "train.py" and str(path) not in loaded:
                spec = importlib.util.spec_from_file_location(path.stem, path)
                sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)


def first_difference(
    one: Logged, other: Logged, first: int, last: int, saves: bool = True
) -> tuple | None:
    """(step, fields, in words) of the first row of steps first + 1 to last that differs. saves: also
    compare hashes, where both saved: one may have saved at a signal, or by the clock."""
    for key in sorted(key for key in one.rows | other.rows if first < key[0] <= last):
        at, kind = key[0], KINDS[key[1]]
        a, b = one.rows.get(key, {}), other.rows.get(key, {})
        if kind not in ("train", "eval") and not (saves and a and b):
            continue
        if not (a and b) or key in one.twice | other.twice:
            what = (
                "stands there twice" if a and b else f"is missing in {(other if a else one).path}"
            )
            return at, [kind], f"its row of kind {kind} {what}"
        names = [n for n in a | b if n not in MEASURED and repr(a.get(n)) != repr(b.get(n))]
        if names:
            return at, names, ", ".join(in_words(n, a.get(n), b.get(n)) for n in names)
    return None


def parting(one: Logged, other: Logged) -> tuple | None:
    """first_difference() of two runs. If both begin alike, the evaluation before the first step counts
    too. Any number tells more than a hash, which depends also on settings."""
    begin_alike = one.first == other.first
    extent = max(one.first, other.first) - begin_alike, min(one.last, other.last)
    found = first_difference(one, other, *extent, saves=False)
    return found or first_difference(one, other, *extent)


def changed(one: Logged, other: Logged) -> list[str]:
    """A line for each knob, and each part of the identity, that differs."""
    found = changed_knobs(one.facts["config"], other.facts["config"])
    found |= changes(one.facts["run"], other.facts["run"])
    code = ", ".join(found.pop("code", [{}])[0])
    lines = [f"{name}: {a}, {b}" for name, (a, b) in found.items()]
    return lines + [f"code: {code}"] * bool(code)


def in_words(name: str, one, other) -> str:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return f"{name} {one} and {other} (by {abs(one - other):.1e})"
    return f"{name} {str(one)[:12]} and {str(other)[:12]}"


def not_computed(run: Logged, difference: tuple, identity: dict) -> str:
    """In words: what of the log is not computed here, and why that may be."""
    at, _, words = difference
    words = f"step {at} of {run.path} is not what this code computes here: {words}"
    for name, (then, now) in identity.items():
        files = ", ".join(then) if name == "code" else ""
        words += f"; {files} changed since" if files else f"; {name} was {then} and is {now} here"
    resumed = {each["step"] for each in run.facts["resumes"] if each["step"] < at}
    note = f"; a change of knobs or ranks when it resumed, at {sorted(resumed)}, is not followed"
    return words + note * bool(resumed)

"""What a run's folder says of it, read back to be compared bit for bit. Nothing is written or
locked."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from plumbing import checkpoint as checkpoints
from plumbing.cli import Knob, fail, read_knobs, show
from plumbing.console import MEASURED, REPO
from plumbing.files import read_json
from plumbing.resume import KEPT, known_changes
from reporting.record import read_metrics

KINDS = ("train", "eval", "saved")  # in the order in which a step writes them
NOT_COMPARED = {*MEASURED, "files"}  # a save may have been due by the clock
RECOMPUTED = ("frozen", "groups")  # parts of a checkpoint that its hash does not cover

FREE_FLAGS = (  # no bit of a step depends on these
    "--resume=auto --report=false --wandb_log=false --audit_interval=-1 --num_workers=0 "
    "--sample_interval=0 --milestone_interval=0"
).split()


# What is read of run.json and of a checkpoint, and of "run" in them
FORM = {"config": dict, "data": dict, "run": dict}
FORM_OF_RUN = {"code": dict, "data": str, "threads": int, "world_size": int}


def check_form(facts: dict, path: Path, form: dict = FORM) -> None:
    """Raises BadInput unless `facts`, of run.json or a checkpoint in the file `path`, has the parts
    that are read here, in the form that train.py writes."""
    for name, kind in form.items():
        if not isinstance(facts.get(name), kind):
            fail(f"{path} is not of the form that train.py writes: {name}")
    if form is FORM:
        check_form(facts["run"], path, FORM_OF_RUN)


@dataclass
class Save:
    """An event `saved` of the log."""

    step: int
    sha256: str
    files: list  # names that the file was to have; empty in a log of an older version
    process: int  # that saved: 0, or 1 after the first resume ...
    is_certain: bool = True  # False: it failed, or a kill came before all of its names were there


class Checkpoint(NamedTuple):
    step: int
    path: Path
    content: dict
    sha256: str  # as in a Save


class Logged:
    """rows: {(step, place in KINDS): [row, ...]}, of which there are two where a save follows a
    rollback, or a log was edited. saves: all, also of steps that a rollback has undone. resumes:
    the steps at which other processes went on. changed: (number of a process, in words: what
    was not as in the one before). rollbacks: of each, the step after which the run went on, and the
    step that it came after. first, last: the step before the first one, and the last."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.script = REPO / "train.py"  # with the knobs; the user may name another one
        self.facts = read_json(self.path / "run.json")
        self.rows = {}
        self.saves = []
        self.resumes = []
        self.changed = []
        self.rollbacks = []
        file = self.path / "metrics.jsonl"
        for row in read_metrics(file)[0] if file.is_file() else ():
            self.add(row)
        if self.saves and not self.facts.get("ended"):  # it goes on, or was killed
            self.saves[-1].is_certain = False
        steps = [at for at, kind in self.rows if KINDS[kind] != "eval"]
        run = self.facts.get("run")
        began_from = run.get("began_from") if isinstance(run, dict) else None
        self.first = min(steps, default=0) if began_from else 0
        self.last = max(steps, default=0)

    def add(self, row: dict) -> None:
        at = row["step"]
        kind = row["event"] if row["kind"] == "event" else row["kind"]
        if kind in ("rollback", "resume"):  # the steps after it were undone: so were their saves
            self.rows = {key: rows for key, rows in self.rows.items() if key[0] <= at}
        if kind == "rollback":
            self.rollbacks.append((at, row.get("at_step", at)))
        if kind == "resume" and self.rows:  # else it begins from another run
            self.resumes.append(at)
            for save in self.saves:
                save.is_certain = save.is_certain and save.step <= at
        if kind == "resume" and row.get("changed"):
            names = ", ".join(row["changed"])
            words = f"{names} changed when it resumed at step {at}, which is not followed"
            self.changed.append((len(self.resumes), words))
        if kind == "save_failed" and self.saves:
            self.saves[-1].is_certain = False
        if kind == "saved":
            files = row.get("files", [])
            self.saves.append(Save(at, row.get("sha256"), files, len(self.resumes)))
        if kind in KINDS:
            self.rows.setdefault((at, KINDS.index(kind)), []).append(row)

    @cached_property
    def knobs(self) -> dict[str, Knob]:
        return read_knobs(self.script)

    @property
    def is_record(self) -> bool:
        """Whether it lies in records/, which hold no checkpoints: it is computed from its
        beginning."""
        return self.path.resolve().parent == REPO / "records"

    @property
    def end(self) -> dict:
        """The loop's state at the end, if the run has reached one in good order; else empty."""
        ended = str(self.facts.get("ended") or "failed")  # maybe before its first step
        state = self.facts.get("state")
        is_known = isinstance(state, dict) and not ended.startswith("failed")
        return state if is_known else {}

    def row(self, step: int, kind: str) -> dict:
        return self.rows.get((step, KINDS.index(kind)), [{}])[-1]

    # ---- its checkpoints -------------------------------------------------------------------------

    @cached_property
    def files(self) -> dict[Path, Checkpoint | str]:
        """Each checkpoint in the folder, or why it cannot be read."""
        found = {}
        for path in checkpoints.newest_first(self.path):
            try:
                content = checkpoints.load(path)
                sha256 = checkpoints.digest_of_state(content)
                found[path] = Checkpoint(content["state"]["step"], path, content, sha256)
            except checkpoints.Damaged as error:
                found[path] = f"is damaged: {error}"
            except FileNotFoundError:  # just deleted, by a run that goes on
                continue
            except OSError as error:
                found[path] = f"cannot be read ({error.strerror})"
        return found

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """Those that can be read, oldest first."""
        readable = [file for file in self.files.values() if isinstance(file, Checkpoint)]
        return sorted(readable, key=lambda checkpoint: checkpoint.step)

    def is_on_its_way(self, checkpoint: Checkpoint) -> bool:
        rows = self.rows.get((checkpoint.step, KINDS.index("saved")), [])
        return checkpoint.sha256 in [row.get("sha256") for row in rows]

    def start_before(self, stop: int, rollbacks: float = math.inf) -> Checkpoint | None:
        """The newest of `checkpoints` before step `stop`, on the way that the run took, with at
        most so many rollbacks. None: begin as the run did."""
        began_from = self.facts["run"].get("began_from")
        for start in reversed(self.checkpoints):
            is_early = start.step < stop and start.content["state"]["rollbacks"] <= rollbacks
            is_its_own = start.step > self.first or began_from
            if is_early and is_its_own and self.is_on_its_way(start):
                return start
        return None

    # ---- its processes: a run may have been resumed by other code, on another machine ------------

    def process_at(self, step: int) -> int:
        """Number of the process that took this step."""
        later = [number for number, at in enumerate(self.resumes, 1) if at < step]
        return max(later, default=0)

    def facts_of(self, process: int) -> dict | None:
        """run.json, or a checkpoint, with the "config" and "run" of a process. None: there is
        none."""
        is_last = process == len(self.resumes)
        if is_last and self.end:
            return self.facts
        saved = {save.sha256 for save in self.saves if save.process == process}
        for checkpoint in reversed(self.checkpoints):
            if checkpoint.sha256 in saved:
                check_form(checkpoint.content, checkpoint.path)
                return checkpoint.content
        return self.facts if is_last else None

    def known(self, process: int) -> int:
        """Number of this process, or of the next one that has facts."""
        while self.facts_of(process) is None:
            process += 1
        return process

    def facts_at(self, step: int) -> dict:
        """Of the process that took a step, or of the next one that has facts."""
        return self.facts_of(self.known(self.process_at(step)))

    def differences(self, first: int, last: int, here: dict) -> dict:
        """{key: [then, here]} of what makes `here`, an identity, inexact for steps first + 1 to
        last."""
        found = {}
        for process in range(self.process_at(first + 1), self.process_at(last) + 1):
            facts = self.facts_of(self.known(process))
            found |= known_changes(facts["run"], here, {})
        return found

    def changes(self, first: int, stop: int) -> list[str]:
        """In words, what changed at each resume after step `first`, up to that of the process whose
        flags are used to compute step `stop`."""
        start = self.process_at(first + 1)
        end = self.known(self.process_at(stop))
        return [words for number, words in self.changed if start < number <= end]

    def flags_at(self, stop: int, out_dir: Path, data_dir: str) -> list[str]:
        """Flags with the knobs that held when the run came to step `stop`, "auto" as it was
        resolved. data_dir: "" = as it was."""
        facts = self.facts_at(stop)
        knobs = facts["config"] | {name: facts["run"][name] for name in KEPT}
        knobs["out_dir"] = out_dir
        knobs["data_dir"] = data_dir or str(REPO / facts["config"].get("data_dir", "data"))
        return [f"--{name}={show(value)}" for name, value in knobs.items()] + FREE_FLAGS

    # ---- are its files what train.py writes, and what the log says? ------------------------------

    def check(self) -> None:
        """Raises BadInput unless it holds a run, described as train.py does."""
        if not self.facts or not self.rows:
            fail(f"{self.path} holds no run; type: python replay.py out/NAME --step=N")
        check_form(self.facts, self.path / "run.json", FORM | {"command": list})
        check_form(self.facts, self.path / "run.json")

    def faults(self) -> list[str]:
        """In words: what of its files is damaged, missing, or not what the log says."""
        found = [f"{path} {file}" for path, file in self.files.items() if isinstance(file, str)]
        known = {save.sha256 for save in self.saves}
        for step, path, _, sha256 in self.checkpoints:
            if sha256 not in known:
                words = "its hash differs from the logged one"
                found.append(f"{path} is not what was saved at step {step}: {words}")
        names = dict.fromkeys(place_of(name) for save in self.saves for name in save.files)
        for name in names:
            found += self.fault_of(name)
        if self.end and self.end.get("step") != self.last:
            by_facts = f"by its run.json it ended at step {self.end.get('step')}"
            found.append(f"{self.path} has {self.last} steps in its log; {by_facts}")
        return found

    def fault_of(self, name: str) -> list[str]:
        """What is wrong with the newest ckpt_STEP.pt, or with best.pt or a milestone."""
        saves = [save for save in self.saves if name in map(place_of, save.files)]
        certain = [number for number, save in enumerate(saves) if save.is_certain]
        if not certain:
            return []
        saves = saves[certain[-1] :]  # those after it may be on the disk, too
        expected = {save.sha256 for save in saves}
        there = [path for path in self.files if place_of(path.name) == name]
        read = [self.files[path] for path in there if isinstance(self.files[path], Checkpoint)]
        if not there and self.is_record:
            return []
        if not there:
            return [f"{self.path / name} is missing: it was saved at step {saves[0].step}"]
        if len(read) < len(there) or expected & {checkpoint.sha256 for checkpoint in read}:
            return []
        newest = max(checkpoint.step for checkpoint in read)
        return [f"{self.path / name} holds step {newest}; by the log it is of step {saves[0].step}"]


def place_of(name: Any) -> str:
    """The name of a file of checkpoints, without the step of a ckpt_STEP.pt."""
    return "ckpt_*.pt" if str(name).startswith("ckpt_") else str(name)


# ---- what differs --------------------------------------------------------------------------------


def first_difference(
    one: Logged, other: Logged, first: int, last: int, kinds=KINDS
) -> tuple | None:
    """(step, fields, in words) of the first row of steps first + 1 to last that differs. Hashes
    count where both saved: one may have saved at a signal, or by the clock."""
    for key in sorted(one.rows | other.rows):
        at, kind = key[0], KINDS[key[1]]
        if kind not in kinds or not first < at <= last:
            continue
        here, there = one.rows.get(key, []), other.rows.get(key, [])
        if kind == "saved":
            if not here or not there:
                continue
            here, there = here[:1], there[:1]
        if len(here) != len(there):
            return at, [kind], f"{len(here)} and {len(there)} rows of kind {kind}"
        for then, now in zip(here, there, strict=True):
            names = [name for name in then | now if repr(then.get(name)) != repr(now.get(name))]
            names = [name for name in names if name not in NOT_COMPARED]
            if names:
                words = [in_words(name, then.get(name), now.get(name)) for name in names]
                return at, names, ", ".join(words)
    return None


def changed(one: Logged, other: Logged) -> list[str]:
    """A line for each knob, and each part of the identity, that differs."""
    found = known_changes(one.facts["run"], other.facts["run"], one.knobs)
    return [f"{name}: {abridged(name, a)}, {abridged(name, b)}" for name, (a, b) in found.items()]


def abridged(name: str, value: Any) -> str:
    if name == "code" and isinstance(value, dict):  # {file that changed: hash}
        return " ".join(f"{file} {str(digest)[:8]}" for file, digest in value.items())
    return str(value)


def in_words(name: str, one: Any, other: Any) -> str:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return f"{name} {one} and {other} (by {abs(one - other):.1e})"
    return f"{name} {str(one)[:12]} and {str(other)[:12]}"


def not_computed(run: Logged, difference: tuple, identity: dict, changes: list) -> str:
    """In words: what of the log is not computed here, and why that may be. identity: {key: [then,
    now]} of what makes this machine or code inexact. changes: as of Logged."""
    at, _, words = difference
    words = f"step {at} of {run.path} is not what this code computes here: {words}"
    for name, (then, now) in identity.items():
        words += f"; {name} was {abridged(name, then)} and is {abridged(name, now)} here"
    return "; ".join([words, *changes])

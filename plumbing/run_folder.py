"""The folder of a run: its lock, run.json, the rows of metrics.jsonl, and who else gets them."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from plumbing import console, machine
from plumbing.cli import fail
from plumbing.clock import Clock
from plumbing.console import REPO, print0
from plumbing.files import clean, lock_file, read_json, replacing, write_json
from plumbing.ranks import rank
from plumbing.witness import Witness, rows_of_course


class RunFolder(ExitStack):
    """out/NAME, locked until the end of its `with`. Every rank has one; only rank 0 uses it."""

    def __init__(self, path: str | Path):
        super().__init__()
        self.path = Path(path)
        self.rows = self.path / "metrics.jsonl"
        self.facts = {}  # run.json
        self.waiting = []  # lines not yet written to metrics.jsonl
        self.writing = threading.Lock()  # held while metrics.jsonl changes
        self.warned = set()  # failures of writing that were printed
        self.locked = None  # the open lock file
        self.wandb = None
        self.witness = None  # of rows that this resume computes again
        self.resumed = None  # (step, what is known to have changed) of that resume

    # ---- one run at a time -----------------------------------------------------------------------

    def holds_run(self) -> bool:
        files = (self.path / "run.json", self.rows, *self.path.glob("*.pt"))
        return any(file.exists() for file in files)

    def owns(self, path: Path) -> bool:
        """Whether the checkpoint at `path` is of this run, not of one that this run begins from."""
        return path.parent.resolve() == self.path.resolve()

    def fresh_out_dir(self) -> str:
        """--out_dir=NAME_2, or the first of NAME_3, NAME_4 ... that does not exist yet."""
        return f"--out_dir={console.shown(self.free_name('_', 2))}"

    def free_name(self, suffix: str, number: int) -> Path:
        """NAME + suffix + the first number from `number` on that gives a name not yet taken."""
        while os.path.lexists(name := self.path.with_name(f"{self.path.name}{suffix}{number}")):
            number += 1
        return name

    def lock(self, to_make: bool = False) -> None:
        """Lock the folder until the `with` or the process ends: if a run lies in it, or `to_make`
        it. fail()s if another run has it, or has begun there since we found it empty."""
        if self.locked or not (to_make or self.holds_run()):
            return
        with self.refusing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.locked = self.enter_context(lock_file(self.path / ".lock"))
            self.checked_path()  # it may have been renamed between the two
        if to_make and self.holds_run():
            fail(f"another run has begun in {self.path}; write {self.fresh_out_dir()}")

    def set_aside(self) -> None:
        """For --resume=restart: rename the folder of a run, to NAME.old_1 say."""
        if self.holds_run():
            self.lock()
            with self.refusing():
                os.rename(self.path, self.free_name(".old_", 1))
            self.locked.close()
            self.locked = None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A context that fail()s where the folder cannot be locked or written."""
        try:
            yield
        except BlockingIOError:
            fail(f"{self.path} is in use by another run; write {self.fresh_out_dir()}")
        except OSError as error:
            place = error.filename or self.path
            fail(f"{place} cannot be written ({error.strerror}); write --out_dir=FOLDER")

    def checked_path(self) -> Path:
        """The path. Raises OSError if the folder was removed and another run has made a new one."""
        lock = self.path / ".lock"
        if lock.exists() and not os.path.samestat(lock.stat(), os.fstat(self.locked.fileno())):
            raise OSError(errno.ESTALE, "another run has taken the place of this folder")
        return self.path

    def require_free(self, needed: int) -> None:
        """fail()s if the disk is too small for `needed` bytes of checkpoints."""
        exists = next(place for place in (self.path, *self.path.parents) if place.exists())
        free = shutil.disk_usage(exists).free
        if free < needed:
            found = f"{self.path} has {free / 1e6:,.0f} MB free; a run needs {needed / 1e6:,.0f}"
            fail(f"{found} for checkpoints; free some, or write --keep_last=1 or --out_dir=FOLDER")

    # ---- run.json, from the start to the end -----------------------------------------------------

    def open(self, run: Any, bytes_to_keep: int, command: list[str]) -> None:
        """Create or reopen the folder. bytes_to_keep: of all checkpoints that exist at once. fail()s
        if the folder cannot be written, or is too small."""
        with self.refusing():
            if not self.holds_run():  # else most of them are there already
                self.require_free(bytes_to_keep)
            self.lock(to_make=True)
            for leftover in self.path.glob("*.pt.tmp"):  # of a killed run
                leftover.unlink()
            git = git_state()
            run.facts["run"]["git_commit"] = git["commit"]
            first = {"start": now(), "wandb_id": os.urandom(4).hex(), "resumes": []}
            before = read_json(self.path / "run.json") if run.path else {}  # of earlier processes
            self.facts = {name: before.get(name, first[name]) for name in first}
            self.facts |= {"end": None, "ended": None}  # stays so if the process is killed
            self.facts |= {"command": command, **run.facts, "git": git}
            self.facts |= machine.describe_machine(run.device)
            write_json(self.checked_path() / "run.json", self.facts)
        if run.facts["config"]["wandb_log"]:
            from reporting.wandb_log import Wandb

            self.wandb = Wandb(self.path, run.facts["config"], self.facts["wandb_id"])

    def begin(self, run: Any, changed: dict) -> None:
        """Complete run.json after the warm-up pass, and cut metrics.jsonl back to where the run
        begins: at its checkpoint, if any. The rows of a run that was resumed are compared with
        those past it. changed: {name: [then, now]} of what is known to have changed since that
        checkpoint."""
        if rank() > 0:
            return
        step = run.state["step"]
        is_own = run.path and self.owns(run.path)
        cut = self.cut_rows(step if is_own else -1)
        if self.wandb and self.rows.exists():
            for line in self.rows.read_text().splitlines():  # of earlier sessions
                self.wandb.send(json.loads(line))
        self.facts |= run.facts
        if run.path:
            self.facts["resumes"].append({"time": now(), "from": str(run.path), "step": step})
            identity = run.facts["config"] | run.facts["run"]
            knobs = {name: identity[name] for name in run.knobs}
            knobs["device"] = run.facts["config"]["device"]
            self.resumed = step, changed
            self.record(step, "resume", checkpoint=run.path.name, knobs=knobs, changed=changed)
        if is_own:
            self.witness = Witness(rows_of_course(cut, run))
        self.write_facts()

    def write_facts(self) -> None:
        with self.warning("run.json"):
            write_json(self.checked_path() / "run.json", self.facts)

    def close_witness(self, step: int) -> None:
        """Record as an event `resume_checked` what was compared since the resume, and print it."""
        begin, changed = self.resumed
        names = ("compared", "equal", "steps", "first_difference")
        found = {"from": begin} | {name: getattr(self.witness, name) for name in names}
        self.witness = None
        self.record(step, "resume_checked", **found)
        words = console.resume_words(found, changed)
        if not self.facts["config"]["deterministic"]:
            words += " (deterministic mode is off)"
        print0(words)

    def end(self, ended: str, clock: "Clock", state: dict, report: bool) -> None:
        """Record how the run ended, finish wandb, make the report, print what to type next."""
        if rank() > 0:
            return
        if self.witness:
            self.close_witness(state["step"])
        clock.lap("save")  # what is not counted yet: the last save, and workers that leave
        end = {"ended": ended, "seconds": clock.seconds}
        self.record(state["step"], "end", **end)
        self.facts |= {"end": now(), **end, "state": state}
        self.write_facts()
        best_metric = self.facts["config"]["best_metric"]
        console.print_end(ended, state, clock.seconds, self.path, best_metric)
        if self.wandb:
            self.wandb.finish(exit_code=int(ended.startswith("failed")))
        if report and not ended.startswith(("stopped by", "left")):  # a signal leaves no time
            write_report(self.path)
        clock.lap("report")
        self.write_facts()
        writes_text = "tokenizer" in self.facts["data"]["meta"]
        console.print_next(self.path, writes_text)

    # ---- metrics.jsonl ---------------------------------------------------------------------------

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Record an event in metrics.jsonl and print it."""
        console.print_event(step, event, fields)
        self.record(step, event, **fields)

    def record(self, step: int, event: str, **fields: Any) -> None:
        self.write_rows([{"kind": "event", "step": step, "event": event, **fields}])

    def write_rows(self, rows: list[dict], to_wandb: bool = True) -> None:
        """Append to metrics.jsonl: one JSON object per line, with null for non-finite numbers. Any
        thread may call it. If it fails, training continues: that is said once, and the rows
        wait."""
        if rank() > 0:
            return
        cleaned = []
        for row in rows:
            finite = clean(row)
            cleaned.append(finite if finite == row else finite | {"finite": False})
        with self.writing, self.warning("metrics.jsonl"):
            for row in cleaned:
                self.waiting.append(json.dumps(row) + "\n")
                if self.wandb and to_wandb:
                    self.wandb.send(row)
            content = "".join(self.waiting).encode()
            self.checked_path()
            with open(self.rows, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(content) < len(content):
                    file.truncate(end)  # a full disk took only a part
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting.clear()
        for row in cleaned:
            if self.witness and row["kind"] != "event":
                self.witness.see(row)
                if self.witness.is_over(row["step"]):
                    self.close_witness(row["step"])

    def cut_rows(self, step: int) -> list[dict]:
        """Drop train and eval rows past `step`, and half-written lines; all events stay. Returns
        the rows that were dropped and all `resume` events, in the order of the log."""
        found = []
        if rank() > 0:
            return found

        def stays(line):
            with suppress(ValueError, KeyError, TypeError):  # after a power failure
                row = json.loads(line)
                is_past = row["kind"] != "event" and row["step"] > step
                if is_past or row.get("event") == "resume":
                    found.append(row)
                return line.endswith("\n") and not is_past

        with self.writing, self.warning("metrics.jsonl"), suppress(FileNotFoundError):
            self.waiting = list(filter(stays, self.waiting))
            lines = self.rows.read_text(errors="replace").splitlines(keepends=True)
            with replacing(self.rows) as temporary:
                temporary.write_text("".join(filter(stays, lines)))
        return found

    @contextmanager
    def warning(self, name: str) -> Iterator[None]:
        """A context that prints an OSError in place of raising it, each reason only once."""
        try:
            yield
        except OSError as error:
            warning = f"{name} cannot be written ({error.strerror})"
            if warning not in self.warned:
                print0(warning)
            self.warned.add(warning)


def write_report(folder: Path) -> None:
    """Print what report.py prints, run for at most a minute; one line if it fails."""
    command = [sys.executable, str(REPO / "report.py"), str(folder)]
    try:
        print0(
            subprocess.check_output(command, stderr=subprocess.PIPE, text=True, timeout=60).rstrip()
        )
    except (OSError, subprocess.SubprocessError) as error:
        print0(f"report   failed ({error})")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


def git_state() -> dict:
    """{commit, dirty, diff_sha256} of the repository. The Docker image has GIT_COMMIT, not .git."""
    git = ["git", f"--git-dir={REPO}/.git", f"--work-tree={REPO}"]  # never a parent folder's .git
    run = partial(subprocess.run, capture_output=True, check=True)
    try:
        diff = run([*git, "diff", "HEAD"]).stdout
        commit = run([*git, "rev-parse", "HEAD"], text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"commit": os.environ.get("GIT_COMMIT"), "dirty": None, "diff_sha256": None}
    return {"commit": commit, "dirty": bool(diff), "diff_sha256": sha256(diff).hexdigest()}

"""The folder of a run: its lock, run.json, and the rows of metrics.jsonl."""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from plumbing import code, console, machine
from plumbing.checkpoint import NO_ROOM
from plumbing.cli import fail
from plumbing.console import print0
from plumbing.files import clean, lock_file, read_json, write_json
from plumbing.log import LogFile
from plumbing.ranks import rank


class RunFolder(ExitStack):
    """out/NAME, locked until the end of its `with`. Every rank has one; only rank 0 uses it."""

    def __init__(self, path: str | Path):
        super().__init__()
        self.path = Path(path)
        self.log = LogFile(self.path / "metrics.jsonl")
        self.hooks = []  # run.hooks, which get the rows
        self.untold = deque()  # (row, is_kept) that the hooks have not got yet
        self.is_telling = False
        self.facts = {}  # what run.json says of this process
        self.old_facts = {}  # of the process before, which run.json shows until there is a new row
        self.warned = set()  # failures of writing that were printed
        self.is_gone = False  # the folder is, by the newest of them
        self.locked = None  # the open lock file

    # ---- one run at a time -----------------------------------------------------------------------

    def holds_run(self) -> bool:
        files = (self.path / "run.json", self.log.path, *self.path.glob("*.pt"))
        return any(file.exists() for file in files)

    def owns(self, path: Path) -> bool:
        """Whether the checkpoint at `path` is of this run, not of one that this run begins from."""
        return path.parent.resolve() == self.path.resolve()

    def fresh_out_dir(self) -> str:
        """--out_dir=NAME_2, or the first of NAME_3, NAME_4 ... that does not exist yet."""
        return f"--out_dir={console.shown(free_name(self.path, '_', 2))}"

    def lock(self, to_make: bool = False) -> None:
        """Lock the folder until the `with` or the process ends: if a run lies in it, or `to_make`
        it. fail()s if another run has it, or has begun there since we found it empty."""
        if self.locked or not (to_make or self.holds_run()):
            return
        with self.refusing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.locked = self.enter_context(lock_file(self.path / ".lock"))
            self.checked_path()  # the folder may have been renamed before it was locked
        if to_make and self.holds_run():
            fail(f"another run has begun in {self.path}; write {self.fresh_out_dir()}")

    def set_aside(self) -> None:
        """For --resume=restart: rename the folder of a run, to NAME.old_1 say."""
        if self.holds_run():
            self.lock()
            with self.refusing():
                os.rename(self.path, free_name(self.path, ".old_", 1))
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
            hint = "write --out_dir=FOLDER"
            if error.errno in NO_ROOM:
                needed = max((file.stat().st_size for file in self.path.glob("*.pt")), default=0)
                hint = f"free {needed / 1e6 + 1:,.0f} MB, which the next checkpoint needs"
            fail(f"{place} cannot be written ({error.strerror}); {hint}")

    def checked_path(self) -> Path:
        """The path. Raises OSError if another run has made a new folder in place of this one."""
        lock = self.path / ".lock"
        if lock.exists() and not os.path.samestat(lock.stat(), os.fstat(self.locked.fileno())):
            raise OSError(errno.ESTALE, "another run has taken the place of this folder")
        return self.path

    # ---- run.json, from the start to the end -----------------------------------------------------

    def open(self, run: Any, command: list[str]) -> None:
        """Create or reopen the folder. fail()s if it cannot be written."""
        with self.refusing():
            self.lock(to_make=True)
            self.hooks = run.hooks
            for leftover in self.path.glob("*.pt.tmp"):  # of a killed run
                leftover.unlink()
            is_own = run.path and self.owns(run.path)
            self.log.keep_to(run.state["step"] if is_own else -1, run.state["evaluation_due"])
            git, diff = code.git_state()
            code.keep(self.path / "code", diff)
            earlier = read_json(self.path / "run.json") if is_own else {}  # of earlier processes
            new = {
                "command": command,
                **run.facts,
                "git": git,
                **machine.describe_machine(run.device),
                "parameters": sum(weight.numel() for weight in run.model.parameters()),
                "flops_per_token": machine.flops_per_token(run.model),
            }
            first = {"start": now(), "wandb_id": os.urandom(4).hex()}
            self.facts = first | earlier | new | {"end": None, "ended": None}  # if it is killed
            self.old_facts = {name: earlier[name] for name in new if name in earlier}
            write_json(self.checked_path() / "run.json", self.facts | self.old_facts)

    def write_facts(self) -> None:
        if rank() > 0:
            return
        with self.warning("run.json"):
            write_json(self.checked_path() / "run.json", self.facts | self.old_facts)

    def end(self, run: Any, ended: str) -> None:
        """Record how the run ended, tell the hooks, print what to type next. On every rank; the
        record is whole whatever a hook raises."""
        clock = run.clock
        clock.lap("save")  # the last save, and workers that leave, are not counted yet
        end = {"ended": ended, "seconds": clock.seconds}
        self.facts |= {"end": now(), **end, "state": run.state}
        try:
            self.record(run.state["step"], "end", **end)
        finally:
            self.write_facts()
            console.print_end(ended, run)
            try:
                for hook in run.hooks:
                    hook.end(run, ended)
            finally:
                clock.lap("report")
                self.write_facts()
                if rank() == 0:  # the others know no facts
                    console.print_next(ended, self.path, self.facts)

    # ---- metrics.jsonl ---------------------------------------------------------------------------

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Record an event in metrics.jsonl and print it."""
        console.print_event(step, event, fields)
        self.record(step, event, **fields)

    def record(self, step: int, event: str, **fields: Any) -> None:
        self.write_rows([{"kind": "event", "step": step, "event": event, **fields}])

    def write_rows(self, rows: list[dict], is_kept: bool = True) -> None:
        """Append to metrics.jsonl: one JSON object per line, with null for non-finite numbers. Any
        thread may call it. If it fails, training continues: that is said once, and the rows
        wait. is_kept: false for steps that the process that resumes takes again."""
        if rank() > 0:
            return
        cleaned = []
        for row in rows:
            finite = clean(row)
            cleaned.append(finite if finite == row else finite | {"finite": False})
        with self.warning("metrics.jsonl"):
            self.checked_path()
            self.log.write(cleaned)
            if self.old_facts and any(row["kind"] == "train" for row in cleaned):
                self.old_facts = {}
                self.write_facts()
        self.untold += [(row, is_kept) for row in cleaned]
        if threading.current_thread() is threading.main_thread():
            self.tell_hooks()

    def tell_hooks(self) -> None:
        """Give new rows to the hooks. What a hook logs there comes after them; after an exception of
        a hook none gets a row again."""
        if self.is_telling:
            return
        self.is_telling = True
        while self.untold:
            row, is_kept = self.untold.popleft()
            for hook in [*self.hooks]:  # a hook may take itself out of the list
                hook.row(row, is_kept)
        self.is_telling = False

    @contextmanager
    def warning(self, name: str) -> Iterator[None]:
        """A context that prints an OSError in place of raising it, each reason only once."""
        try:
            yield
        except OSError as error:
            self.is_gone = error.errno in (errno.ENOENT, errno.ESTALE)
            warning = f"{name} cannot be written ({error.strerror})"
            if warning not in self.warned:
                print0(warning)
            self.warned.add(warning)


def free_name(path: Path, suffix: str, number: int) -> Path:
    """`path` + suffix + the first number from `number` on that gives a name not yet taken."""
    while os.path.lexists(name := path.with_name(f"{path.name}{suffix}{number}")):
        number += 1
    return name


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())

"""The folder of a run: its lock, run.json, the rows of metrics.jsonl, and who else gets them."""

import datetime
import errno
import itertools
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from plumbing import console, machine
from plumbing.cli import fail
from plumbing.files import clean, lock_file, read_json, replacing, write_json
from plumbing.ranks import rank, say

REPO = Path(__file__).resolve().parent.parent
MOST_WAITING = 1000  # lines kept while metrics.jsonl cannot be written


class RunFolder(ExitStack):
    """out/NAME. At the end of its `with` the lock is released.

    Every rank has one; only rank 0 reads and writes.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        self.path = Path(path)
        self.facts = {}  # run.json
        self.waiting = []  # lines not yet written to metrics.jsonl
        self.writing = threading.RLock()  # held while metrics.jsonl changes
        self.warned = set()  # errors of writing rows that were printed
        self.locked = None  # the open lock file
        self.wandb = None

    # ---- what the folder holds -------------------------------------------------------------------

    def holds_run(self) -> bool:
        names = ("run.json", "metrics.jsonl")
        return any((self.path / name).exists() for name in names) or any(self.path.glob("*.pt"))

    def holds_steps(self) -> bool:
        """Whether metrics.jsonl has a row of a training step."""
        rows = self.path / "metrics.jsonl"
        return rows.exists() and '"kind": "train"' in rows.read_text("utf-8", errors="replace")

    def owns(self, path: Path) -> bool:
        """Whether the checkpoint at `path` is of this run, not of one that this run begins from."""
        return path.parent.resolve() == self.path.resolve()

    def fresh_out_dir(self) -> str:
        """--out_dir=NAME_2, or the first of NAME_3, NAME_4 ... that does not exist yet."""
        return f"--out_dir={console.shown(self.free_name('_', 2))}"

    def free_name(self, suffix: str, first: int) -> Path:
        """NAME + suffix + the first number from `first` that gives a name not yet taken."""
        names = (
            self.path.with_name(f"{self.path.name}{suffix}{n}") for n in itertools.count(first)
        )
        return next(name for name in names if not os.path.lexists(name))

    # ---- the lock --------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the folder until the `with` or the process ends. fail()s if another run has it."""
        try:
            while not self.locked:
                locked = self.enter_context(lock_file(self.path / ".lock"))
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(locked.fileno()), (self.path / ".lock").stat()):
                        self.locked = locked  # else the folder was renamed in the meantime
        except BlockingIOError:
            fail(f"another run is at work in {self.path}; write {self.fresh_out_dir()}")
        except OSError as error:
            self.refuse(error)

    def take(self) -> None:
        """Make and lock the folder. fail()s if another run began there since we found it empty."""
        if self.locked:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        if self.holds_run():
            fail(f"another run has just been in {self.path}; write {self.fresh_out_dir()}")

    def set_aside(self) -> Path | None:
        """For --resume=restart: rename the folder of a run to NAME.old_1, the first number that is
        free, and lock a new one. Returns the new name of the old folder, None if there was no run."""
        if not self.holds_run():
            return None
        self.lock()
        old = self.free_name(".old_", 1)
        try:
            os.rename(self.path, old)
            self.locked.close()
            self.locked = None
            self.take()
        except OSError as error:
            self.refuse(error)
        return old

    def refuse(self, error: OSError) -> NoReturn:
        place = error.filename or self.path
        fail(f"{place} cannot be written ({error.strerror}); write --out_dir=FOLDER")

    def mine(self) -> Path:
        """The path. Raises OSError if the folder was removed and another run has made a new one."""
        lock = self.path / ".lock"
        if lock.exists() and not os.path.samestat(lock.stat(), os.fstat(self.locked.fileno())):
            raise OSError(errno.ESTALE, "another run has taken the place of this folder")
        return self.path

    # ---- run.json --------------------------------------------------------------------------------

    def open(self, run: Any, bytes_to_keep: int, command: list[str], path: Path | None) -> None:
        """Create or reopen the folder: its lock and run.json.

        bytes_to_keep: size of all checkpoints that exist at once. path: the checkpoint that the run
        starts from, or None. fail()s if the folder cannot be written or the disk is too small.
        """
        try:
            self.require_free(bytes_to_keep)
            self.take()
            for pattern in ("*.pt.tmp", "run.json.tmp", "metrics.jsonl.tmp"):  # of a killed run
                for leftover in self.path.glob(pattern):
                    leftover.unlink(missing_ok=True)
            before = read_json(self.path / "run.json") if path else {}
            resumes = before.get("resumes")
            memory = before.get("wandb") if isinstance(before.get("wandb"), dict) else {}
            self.facts = {
                "start": before.get("start") or now(),
                "end": None,
                "ended": None,  # stays None if the process is killed
                "command": command,
                **run.facts,
                "git": git_state(),
                **machine.describe_machine(run.device),
                "resumes": resumes if isinstance(resumes, list) else [],
            }
            if [type(memory.get(key)) for key in Wandb.NEW] == list(map(type, Wandb.NEW.values())):
                self.facts["wandb"] = memory
            self.save_facts()
            if run.facts["config"].get("wandb_log"):
                memory = self.facts.setdefault("wandb", Wandb.NEW | {"id": secrets.token_hex(4)})
                self.save_facts()  # the id, before wandb has it
                self.wandb = Wandb(self.path, run.facts["config"], memory)
                self.save_facts()
        except OSError as error:
            self.refuse(error)

    def require_free(self, bytes_to_keep: int) -> None:
        exists = next(place for place in (self.path, *self.path.parents) if place.exists())
        ours = [file.stat() for kind in ("*.pt", "*.pt.tmp") for file in self.path.glob(kind)]
        sizes = {stat.st_ino: stat.st_size for stat in ours}  # a hard link counts only once
        free = shutil.disk_usage(exists).free + sum(sizes.values())
        if free < bytes_to_keep:
            fail(
                f"{self.path} has {free / 1e6:,.0f} MB free, and the checkpoints of this run need"
                f" {bytes_to_keep / 1e6:,.0f}; free some, or write --keep_last=1 or --out_dir=FOLDER"
            )

    def save_facts(self) -> None:
        write_json(self.mine() / "run.json", self.facts)

    def begin(self, run: Any, path: Path | None = None, inexact: dict | None = None) -> None:
        """Complete run.json after the rehearsal; cut metrics.jsonl back to where the run begins.
        path: the checkpoint that it starts from, or None. inexact: {key: [then, now]}."""
        if rank() > 0:
            return
        step = run.state["step"]
        self.cut_rows(step if path else -1)
        self.facts |= run.facts
        if path:
            resume = {"time": now(), "from": str(path), "step": step, "inexact": inexact}
            self.facts["resumes"].append(resume)
        self.save_facts()
        if self.wandb and path and (self.path / "metrics.jsonl").exists():
            self.wandb.send((self.path / "metrics.jsonl").read_bytes())  # of earlier sessions
        if path:
            self.event(step, "resume", checkpoint=path.name)
        if inexact:
            self.event(step, "inexact_resume", **inexact)

    def end(self, ended: str, clock: "Clock", state: dict, report: bool) -> None:
        """Record how the run ended, finish wandb, make the report, print what to type next."""
        if rank() > 0:
            return
        clock.lap("save")  # what is not counted yet: the last save, and workers that leave
        self.record_end(ended, clock.seconds, state, now())
        best_metric = self.facts["config"]["best_metric"]
        console.print_end(ended, state, clock.seconds, self.path, best_metric)
        if self.wandb:
            self.wandb.finish(exit_code=int(ended.startswith("failed")))
        if report and not ended.startswith("stopped by"):  # after a signal, no time is left for it
            write_report(self.path)
        if self.wandb or report:
            clock.lap("report")
            with self.warning("run.json"):
                self.save_facts()
        data = self.facts["data"]["meta"]
        console.print_next(ended, self.path, self.facts["command"], "tokenizer" in data)

    def record_end(self, ended: str, seconds: dict, state: dict, when: str) -> None:
        """An event in metrics.jsonl, then run.json."""
        end = {"kind": "event", "step": state["step"], "event": "end"}
        self.write_rows([end | {"ended": ended, "seconds": seconds}])
        self.facts |= {"end": when, "ended": ended, "seconds": seconds, "state": state}
        with self.warning("run.json"):
            self.save_facts()

    def complete_end(self, ended: str, state: dict, report: bool) -> None:
        """Record the end, and make the report, of a finished run that was killed after its last
        checkpoint. Its end is the time of its last row. Does nothing if run.json has an end."""
        self.facts = read_json(self.path / "run.json")
        if self.facts and not self.facts.get("ended"):
            last_row = max(file.stat().st_mtime for file in self.path.glob("*.json*"))
            self.record_end(ended, {}, state, iso(last_row))
            if report:
                write_report(self.path)

    # ---- metrics.jsonl ---------------------------------------------------------------------------

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Record an event in metrics.jsonl and print it."""
        console.print_event(step, event, fields)
        self.write_rows([{"kind": "event", "step": step, "event": event, **fields}])

    def write_rows(self, rows: Iterable[dict]) -> None:
        """Append to metrics.jsonl: one JSON object per line, with null for non-finite numbers. Any
        thread may call it. If it fails, training continues: that is said once, and the rows wait.
        """
        if rank() > 0:
            return
        with self.writing:
            for row in rows:
                finite = clean(row)
                row = finite if finite == row else finite | {"finite": False}
                self.waiting.append(json.dumps(row) + "\n")
                if self.wandb:
                    self.wandb.send(row)
            content = "".join(self.waiting).encode()
            del self.waiting[:-MOST_WAITING]
            with self.warning("metrics.jsonl"):
                with open(self.mine() / "metrics.jsonl", "ab", buffering=0) as file:
                    end = file.tell()
                    if file.write(content) < len(content):  # a full disk may take only a part
                        file.truncate(end)
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.waiting.clear()

    def cut_rows(self, step: int) -> None:
        """Drop train and eval rows past `step`, and half-written lines; all events stay.

        The file is read line by line, because a long run has millions.
        """

        def stays(line):
            try:
                row = json.loads(line)
                return line.endswith("\n") and (row["kind"] == "event" or row["step"] <= step)
            except (ValueError, KeyError, TypeError, RecursionError):
                return False  # cut off by a power failure

        path = self.path / "metrics.jsonl"
        with self.writing:
            self.waiting = [line for line in self.waiting if stays(line)]
            with self.warning("metrics.jsonl"), suppress(FileNotFoundError):
                with open(path, errors="replace") as old, replacing(path) as temporary:
                    with open(temporary, "w") as new:
                        new.writelines(filter(stays, old))

    @contextmanager
    def warning(self, name: str) -> Iterator[None]:
        """A context that prints an OSError in place of raising it, each reason only once."""
        try:
            yield
        except OSError as error:
            if (name, error.strerror) not in self.warned:
                say(f"{name} cannot be written ({error.strerror}); training continues")
            self.warned.add((name, error.strerror))


def write_report(folder: Path, patience: float = 60) -> None:
    """Run report.py in a process of its own and print what it prints, the paths of its files. It
    cannot fail the run: an error, or more than `patience` seconds, is one line."""
    command = [sys.executable, str(REPO / "report.py"), str(folder)]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
    try:
        done = subprocess.run(command, timeout=patience, check=True, **pipes)
        for line in done.stdout.splitlines():
            say(line)
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or error
        if isinstance(error, subprocess.TimeoutExpired):
            words = f"more than {patience:g} s"
        say(f"report   failed ({str(words).strip().splitlines()[-1][:200]})")


class Wandb:
    """Sends rows to Weights & Biases from a thread: if it fails or hangs, training continues.

    wandb's step can only grow, so it is `sequences`, which a rollback does not reset; charts are
    drawn over `step`. A killed wandb loses rows, so a row counts as sent once wandb has finished, or
    where the server says so. What was not finished offline is set aside, and sent again.
    """

    NEW = {"id": "", "sent": -1, "unfinished": ""}  # sent: `sequences` of the newest row

    def __init__(self, folder: Path, config: dict, memory: dict, patience: float = 30):
        self.memory = memory  # as NEW; kept in run.json
        self.patience = patience  # seconds, for the start and for the end
        self.sequences = 0  # of the newest row; an eval row is of the same step
        self.given_up = False
        self.items = queue.SimpleQueue()  # a row, lines of rows, or at last the exit code
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.work, args=(folder, config), daemon=True)
        self.thread.start()
        if not self.ready.wait(patience):
            self.give_up("does not answer")

    def work(self, folder: Path, config: dict) -> None:
        try:
            run = self.start(folder, config)
            self.ready.set()
            while not isinstance(item := self.items.get(), int):
                rows = map(json.loads, item.splitlines()) if isinstance(item, bytes) else [item]
                for row in rows:
                    self.sequences = row.get("sequences", self.sequences)
                    if row["kind"] != "event" and self.sequences > self.memory["sent"]:
                        row = {key: row[key] for key in row if key != "kind"}
                        run.log(row, step=self.sequences)
            run.finish(exit_code=item)
            self.memory |= {"sent": self.sequences, "unfinished": ""}
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.give_up(f"failed ({reason})")

    def start(self, folder: Path, config: dict) -> Any:
        import wandb

        unfinished = folder / "wandb" / Path(self.memory["unfinished"]).name
        if self.memory["unfinished"] and unfinished.exists():
            unfinished.rename(unfinished.with_name(f"cut-off-{unfinished.name}"))
        limits = dict.fromkeys(("init_timeout", "finish_timeout"), self.patience - 5)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, finish_timeout_raises=True, **limits
        )
        if wandb.setup(settings).settings.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("no key; type: wandb login, or set WANDB_MODE=offline")
        run = wandb.init(
            project=config.get("wandb_project"),
            name=config.get("wandb_run_name") or folder.resolve().name,
            id=self.memory["id"],
            resume="allow",
            dir=str(folder),
            config=config,
            allow_val_change=True,
            settings=settings,
        )
        run.define_metric("*", step_metric="step")
        self.memory["sent"] = max(self.memory["sent"], run.starting_step - 1)
        self.memory["unfinished"] = Path(run.settings.sync_dir or "").name
        say(f"wandb    {run.url or run.settings.sync_dir}")
        return run

    def send(self, item: dict | bytes | int) -> None:
        if not self.given_up:
            self.items.put(item)
            if self.items.qsize() > 1_000_000:
                self.give_up("takes no more rows")

    def finish(self, exit_code: int) -> None:
        self.send(exit_code)
        self.thread.join(self.patience)
        if self.thread.is_alive():
            self.give_up("does not answer")

    def give_up(self, why: str) -> None:
        """Say it, once. Kill wandb's own process, or Python's exit would wait for it."""
        if not self.given_up:
            say(f"wandb    {why}; training continues without it")
        self.given_up = True
        self.ready.set()
        self.items.put(1)  # for a thread that wakes up later
        with suppress(Exception):
            service = sys.modules["wandb"].setup()._connection
            service._cleanup()  # its part of Python's exit
            service._proc._process.kill()


class Clock:
    """Adds up seconds by kind: lap(kind) counts the time since the previous lap, or the start."""

    def __init__(self, since_process_start: bool = True):
        self.last = time.perf_counter() - (process_age() if since_process_start else 0.0)
        self.seconds = dict.fromkeys(("start", "compile", "train", "evaluate", "save"), 0.0)

    def lap(self, kind: str) -> float:
        now = time.perf_counter()
        elapsed = now - self.last
        self.last = now
        self.seconds[kind] = self.seconds.get(kind, 0.0) + elapsed
        return elapsed


def process_age() -> float:
    """Seconds since this process began, imports included; 0 if the system does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return 0.0


def now() -> str:
    return iso(time.time())


def iso(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp, datetime.UTC).isoformat(timespec="seconds")


def git_state() -> dict:
    """{commit, dirty, diff_sha256} of the repository. The Docker image has GIT_COMMIT, not .git."""
    git = ["git", f"--git-dir={REPO}/.git", f"--work-tree={REPO}"]  # never a parent folder's .git
    read = partial(subprocess.run, capture_output=True, check=True, timeout=10)
    try:
        diff = read([*git, "diff", "HEAD"]).stdout
        commit = read([*git, "rev-parse", "HEAD"], text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"commit": os.environ.get("GIT_COMMIT"), "dirty": None, "diff_sha256": None}
    return {"commit": commit, "dirty": bool(diff), "diff_sha256": sha256(diff).hexdigest()}

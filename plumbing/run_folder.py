"""The folder of a run: its lock, run.json, the rows of metrics.jsonl, and who else gets them."""

import datetime
import errno
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
from plumbing.files import clean, lock_file, open_no_link, read_json, replacing, write_json
from plumbing.ranks import rank, say

REPO = Path(__file__).resolve().parent.parent


class RunFolder(ExitStack):
    """out/NAME, locked until the end of its `with`. Every rank has one; only rank 0 uses it."""

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

    def free_name(self, suffix: str, number: int) -> Path:
        """NAME + suffix + the first number from `number` on that gives a name not yet taken."""
        while os.path.lexists(name := self.path.with_name(f"{self.path.name}{suffix}{number}")):
            number += 1
        return name

    # ---- the lock --------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the folder until the `with` or the process ends. fail()s if another run has it."""
        if self.locked:
            return
        try:
            self.locked = self.enter_context(lock_file(self.path / ".lock"))
            self.mine()  # it may have been renamed between the two
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
            fail(f"another run has begun in {self.path} meanwhile; write {self.fresh_out_dir()}")

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
            self.facts = {
                "start": valid(before.get("start"), str) or now(),
                "end": None,
                "ended": None,  # stays None if the process is killed
                "command": command,
                **run.facts,
                "git": git_state(),
                **machine.describe_machine(run.device),
                "wandb_id": valid(before.get("wandb_id"), str) or secrets.token_hex(4),
                "resumes": valid(before.get("resumes"), list),
            }
            self.save_facts()
        except OSError as error:
            self.refuse(error)
        if run.facts["config"].get("wandb_log"):
            self.wandb = Wandb(self.path, run.facts["config"], self.facts["wandb_id"])

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
        with self.warning("run.json"):
            if report and not ended.startswith(("stopped by", "left")):  # a signal leaves no time
                write_report(self.mine())
            clock.lap("report")
            self.save_facts()
        writes_text = "tokenizer" in self.facts["data"]["meta"]
        console.print_next(ended, self.path, self.facts["command"], writes_text)

    def record_end(self, ended: str, seconds: dict, state: dict, when: str) -> None:
        end = {"ended": ended, "seconds": seconds}
        self.write_rows([{"kind": "event", "step": state["step"], "event": "end", **end}])
        self.facts |= {"end": when, **end, "state": state}
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
            del self.waiting[:-1000]  # of those that cannot be written
            with self.warning("metrics.jsonl"):
                path = self.mine() / "metrics.jsonl"
                with open(path, "ab", buffering=0, opener=open_no_link) as file:
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
                say(f"{name} cannot be written ({error.strerror})")
            self.warned.add((name, error.strerror))


def valid(value: Any, kind: type) -> Any:
    """`value`, or an empty one if it is of another type."""
    return value if isinstance(value, kind) else kind()


def write_report(folder: Path, patience: float = 60) -> None:
    """Run report.py in a process of its own, and print what it prints. If it fails, or takes more
    than `patience` seconds, that is one line."""
    command = [sys.executable, str(REPO / "report.py"), str(folder)]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
    try:
        done = subprocess.run(command, timeout=patience, check=False, **pipes)
        failure = done.returncode and (done.stderr.strip() or f"exit code {done.returncode}")
    except subprocess.TimeoutExpired:
        failure = f"more than {patience:g} s"
    except OSError as error:
        failure = str(error)
    for line in [] if failure else done.stdout.splitlines():
        say(line)
    if failure:
        say(f"report   failed ({failure.splitlines()[-1][:200]})")


class Wandb:
    """Sends rows to Weights & Biases from a thread: if it fails or hangs, training continues.

    Its step can only grow, so it is `sequences`, which a rollback does not reset; charts are drawn
    over `step`. A killed wandb loses rows, so every session sends all rows that the server lacks.
    """

    def __init__(self, folder: Path, config: dict, run_id: str, patience: float = 30):
        self.patience = patience  # seconds, for the start and for the end
        self.given_up = False
        self.items = queue.SimpleQueue()  # a row, lines of rows, or at last the exit code
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.work, args=(folder, config, run_id), daemon=True)
        self.thread.start()
        if not self.ready.wait(patience):
            self.give_up("does not answer")

    def work(self, folder: Path, config: dict, run_id: str) -> None:
        try:
            run = wandb_run(folder, config, run_id)
            self.ready.set()
            sequences = 0  # of the row before: an eval row is of the same step
            while not isinstance(item := self.items.get(), int):
                rows = map(json.loads, item.splitlines()) if isinstance(item, bytes) else [item]
                for row in rows:
                    sequences = row.get("sequences", sequences)
                    if row["kind"] != "event" and sequences >= run.starting_step:
                        run.log({k: row[k] for k in row if k != "kind"}, step=sequences)
            run.finish(exit_code=item)
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.give_up(f"failed ({reason})")

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


def wandb_run(folder: Path, config: dict, run_id: str) -> Any:
    """Begin or resume a run. Never asks for a key. WANDB_MODE=offline writes to `folder`/wandb."""
    import wandb

    for session in folder.glob("wandb/offline-run-*"):  # the new one will hold all rows
        session.rename(session.with_name(f"replaced-{session.name}"))
    limits = {"init_timeout": 25, "finish_timeout": 25, "finish_timeout_raises": True}
    settings = wandb.Settings(silent=True, console="off", disable_git=True, **limits)
    if wandb.setup(settings).settings.mode == "online" and not wandb.login(prompt=False):
        raise PermissionError("no key; type: wandb login, or set WANDB_MODE=offline")
    run = wandb.init(
        project=config.get("wandb_project"),
        name=config.get("wandb_run_name") or folder.resolve().name,
        id=run_id,
        resume="allow",
        dir=str(folder),
        config=config,
        allow_val_change=True,
        settings=settings,
    )
    run.define_metric("*", step_metric="step")
    say(f"wandb    {run.url or run.settings.sync_dir}")
    return run


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

"""The folder of a run: its lock, run.json, and the rows of metrics.jsonl."""

import datetime
import errno
import itertools
import json
import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from plumbing import console, devices, wandb_sender
from plumbing.cli import fail
from plumbing.files import clean, read_json, replacing, write_json
from plumbing.ranks import rank, say

REPO = Path(__file__).resolve().parent.parent
MOST_WAITING = 10_000  # rows that wait in memory while metrics.jsonl cannot be written


class RunFolder(ExitStack):
    """out/NAME. At the end of its `with` it waits for the wandb process, then releases the lock.

    Every rank has one; only rank 0 reads and writes.
    """

    def __init__(self, path):
        super().__init__()
        self.path = Path(path)
        self.facts = {}  # run.json
        self.waiting = []  # lines not yet written to metrics.jsonl
        self.warned = set()  # errors of writing rows that were printed
        self.lock_file = None

    # ---- what the folder holds -------------------------------------------------------------------

    def holds_run(self):
        names = ("run.json", "metrics.jsonl")
        return any((self.path / name).exists() for name in names) or any(self.path.glob("*.pt"))

    def holds_steps(self):
        """Whether metrics.jsonl has a row of a training step."""
        rows = self.path / "metrics.jsonl"
        return rows.exists() and '"kind": "train"' in rows.read_text("utf-8", errors="replace")

    def owns(self, path):
        """Whether the checkpoint at `path` is of this run, not of one that this run begins from."""
        return path.parent.resolve() == self.path.resolve()

    def fresh_out_dir(self):
        """--out_dir=NAME_2, or the first of NAME_3, NAME_4 ... that does not exist yet."""
        names = (self.path.with_name(f"{self.path.name}_{n}") for n in itertools.count(2))
        return f"--out_dir={console.shown(next(name for name in names if not name.exists()))}"

    # ---- the lock --------------------------------------------------------------------------------

    def lock(self):
        """Lock the folder until the `with` or the process ends. Exits with 2 if another run has it.

        lockf, not flock: forked DataLoader workers that outlive a killed run do not inherit it.
        """
        if self.lock_file:
            return
        try:
            self.lock_file = self.enter_context(open(self.path / ".lock", "a"))
            if fcntl:
                fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                say("no file locks on this system: do not start a second run in this folder")
        except BlockingIOError:
            fail(f"another run is at work in {self.path}; write {self.fresh_out_dir()}")
        except OSError as error:
            self.refuse(error)

    def refuse(self, error):
        place = error.filename or self.path
        fail(f"{place} cannot be written ({error.strerror}); write --out_dir=FOLDER")

    def mine(self):
        """The path. Raises OSError if the folder was removed and another run has made a new one."""
        lock = self.path / ".lock"
        if lock.exists() and not os.path.samestat(lock.stat(), os.fstat(self.lock_file.fileno())):
            raise OSError(errno.ESTALE, "another run has taken the place of this folder")
        return self.path

    # ---- run.json --------------------------------------------------------------------------------

    def open(self, run, bytes_to_keep, command, path):
        """Create or reopen the folder: its lock and run.json.

        bytes_to_keep: size of all checkpoints that exist at once. path: the checkpoint that the run
        starts from, or None. Exits with 2 if the folder cannot be written or the disk is too small.
        """
        try:
            self.require_free(bytes_to_keep)
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            for pattern in ("*.pt.tmp", "run.json.tmp", "metrics.jsonl.tmp"):  # of a killed run
                for leftover in self.path.glob(pattern):
                    leftover.unlink(missing_ok=True)
            before = read_json(self.path / "run.json") if path else {}
            self.facts = {
                "start": before.get("start", now()),
                "end": None,
                "ended": None,  # stays None if the process is killed
                "command": command,
                **run.facts,
                "git": git_state(),
                **devices.fingerprint(run.device),
                "resumes": before.get("resumes", []),
            }
            self.save_facts()
        except OSError as error:
            self.refuse(error)
        if run.facts["config"].get("wandb_log"):
            self.enter_context(wandb_sender.sending(self.path, say))

    def require_free(self, bytes_to_keep):
        exists = next(place for place in (self.path, *self.path.parents) if place.exists())
        ours = [file.stat() for kind in ("*.pt", "*.pt.tmp") for file in self.path.glob(kind)]
        sizes = {stat.st_ino: stat.st_size for stat in ours}  # a hard link counts only once
        free = shutil.disk_usage(exists).free + sum(sizes.values())
        if free < bytes_to_keep:
            fail(
                f"{self.path} has {free / 1e6:,.0f} MB free, and the checkpoints of this run need"
                f" {bytes_to_keep / 1e6:,.0f}; free some, or write --keep_last=1 or --out_dir=FOLDER"
            )

    def save_facts(self):
        write_json(self.mine() / "run.json", self.facts)

    def begin(self, run, path=None, inexact=None):
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
        if path:
            self.event(step, "resume", checkpoint=path.name)
        if inexact:
            self.event(step, "inexact_resume", **inexact)

    def end(self, ended, seconds, state, write_report):
        """Record how the run ended; print what to type next. write_report: a function, or None."""
        if rank() > 0:
            return
        end = {"kind": "event", "step": state["step"], "event": "end"}
        self.write_rows([end | {"ended": ended, "seconds": seconds}])
        self.facts |= {"end": now(), "ended": ended, "seconds": seconds, "state": state}
        try:
            self.save_facts()
        except OSError as error:
            say(f"run.json cannot be written ({error.strerror})")
        console.print_end(ended, state, seconds, self.path, self.facts["command"])
        for path in write_report(self.path) if write_report else ():
            say(console.shown(path))
        writes_text = "tokenizer" in self.facts["data"]["meta"]
        console.print_next(ended, self.path, self.facts["command"], writes_text)

    # ---- metrics.jsonl ---------------------------------------------------------------------------

    def event(self, step, event, **fields):
        """Record an event in metrics.jsonl and print it."""
        console.print_event(step, event, fields)
        self.write_rows([{"kind": "event", "step": step, "event": event, **fields}])

    def write_rows(self, rows):
        """Append to metrics.jsonl: one JSON object per line, with null for non-finite numbers.

        If that fails, training continues: the error is printed once, and the newest rows wait.
        """
        if rank() > 0:
            return
        for row in rows:
            finite = clean(row)
            line = finite if finite == row else finite | {"finite": False}
            self.waiting.append(json.dumps(line) + "\n")
        del self.waiting[:-MOST_WAITING]
        content = "".join(self.waiting).encode()
        with self.warning(), open(self.mine() / "metrics.jsonl", "ab", buffering=0) as file:
            end = file.tell()
            if file.write(content) < len(content):  # a full disk may take only a part
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting.clear()

    def cut_rows(self, step):
        """Drop train and eval rows past `step`, and half-written lines; all events stay.

        The file is read line by line, because a long run has millions.
        """

        def stays(line):
            try:
                row = json.loads(line)
                return line.endswith("\n") and (row["kind"] == "event" or row["step"] <= step)
            except (ValueError, KeyError, TypeError):
                return False  # cut off by a power failure

        path = self.path / "metrics.jsonl"
        self.waiting = [line for line in self.waiting if stays(line)]
        with self.warning(), suppress(FileNotFoundError), open(path, errors="replace") as old:
            with replacing(path) as temporary, open(temporary, "w") as new:
                new.writelines(filter(stays, old))

    @contextmanager
    def warning(self):
        """A context that prints an OSError in place of raising it, each reason only once."""
        try:
            yield
        except OSError as error:
            if error.strerror not in self.warned:
                say(f"metrics.jsonl cannot be written ({error.strerror}); training continues")
            self.warned.add(error.strerror)


def now():
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def git_state():
    """{commit, dirty, diff_sha256} of the repository. The Docker image has GIT_COMMIT, not .git."""
    git = ["git", f"--git-dir={REPO}/.git", f"--work-tree={REPO}"]  # never a parent folder's .git
    read = partial(subprocess.run, capture_output=True, check=True, timeout=10)
    try:
        diff = read([*git, "diff", "HEAD"]).stdout
        commit = read([*git, "rev-parse", "HEAD"], text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"commit": os.environ.get("GIT_COMMIT"), "dirty": None, "diff_sha256": None}
    return {"commit": commit, "dirty": bool(diff), "diff_sha256": sha256(diff).hexdigest()}

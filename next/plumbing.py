"""What one need not open to follow a run: the command line, a run's folder and its log, signals, data
workers, ranks, the machine, the console. It gets values and returns values: it knows no knob, and
never imports train.py."""

import ast
import atexit
import builtins
import contextlib
import copyreg
import ctypes
import datetime
import difflib
import errno
import gc
import hashlib
import importlib
import json
import math
import mmap
import multiprocessing
import os
import pickle
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import zipfile
import zlib
from functools import partial
from pathlib import Path

STARTED = time.perf_counter()
REPO = Path(__file__).resolve().parent


def at_death_of_parent(number):
    """From here on this process gets that signal when its parent ends, however it does (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
os.environ.setdefault("NCCL_ALGO", "Ring")  # NVLS adds in any order (nccl#1497)
if "WORLD_SIZE" in os.environ:
    at_death_of_parent(
        signal.SIGTERM
    )  # ranks have sessions of their own, and would survive torchrun
    # else C++ warns of DistributedDataParallel's find_unused_parameters
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if os.getpid() == 1:  # in a container: the system gives process 1 no signal that it does not handle
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))

# ---- errors, and how a script ends ---------------------------------------------------------------


class BadInput(Exception):
    """Bad input, exit code 2: one line on what was found, what was expected, and what to type."""


class Offline(BadInput):
    """A download was needed, and no server gave it in time."""


class RunFailed(Exception):
    """The run cannot continue, exit code 1: one line on what happened and what to do next."""


def fail(message):
    raise BadInput(" ".join(str(message).splitlines()))


def end_script(kind, error, trace):
    """Print what ends a script: an error of ours as one line, any other as Python's traceback."""
    if isinstance(error, BadInput | RunFailed | KeyboardInterrupt):
        is_told = isinstance(error, BadInput) and os.environ.get("RANK", "0") != "0"
        if not getattr(error, "is_told", is_told):  # by another rank
            name = os.path.basename(sys.argv[0])
            print(f"{name}: {str(error) or 'stopped by Ctrl-C'}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    code = {BadInput: 2, Offline: 2, KeyboardInterrupt: 130}.get(kind, 1)
    exit_process(getattr(error, "exit_code", code))


sys.excepthook = end_script


def exit_process(code):
    """Exit with `code`; after a run with ranks, without Python's finalization, in which threads of
    a process group that still wait for Python's lock abort the process, and torchrun with it."""
    if "WORLD_SIZE" in os.environ:
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


# ---- the slow imports: from here on an error, or Ctrl-C, is one line -----------------------------

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map  # noqa: E402

try:
    import fcntl
except ModuleNotFoundError:
    sys.exit("this needs Linux or macOS; on Windows, use WSL2")

# ---- the command line ----------------------------------------------------------------------------

NAMES_ELSEWHERE = {  # a name of nanoGPT and others: what to type instead
    "always_save_checkpoint": "--save_interval=N saves whatever the loss is; best.pt is separate",
    "bias": "no layer has a bias",
    "decay_lr": "--schedule=constant does not decay",
    "eval_iters": "--eval_tokens=N evaluates the first N tokens, --eval_tokens=0 all of them",
    "eval_only": "--init_from=FILE --max_steps=0 evaluates the weights in a file",
    "gradient_accumulation_steps": "here it is accum_steps",
    "learning_rate": "here it is peak_lr",
    "lr": "here it is peak_lr",
    "lr_decay_iters": "here it is decay_steps",
    "max_iters": "here it is max_steps",
    "warmup_iters": "here it is warmup_steps",
}


class Config(dict):
    """Every knob and its value. default: the values of the source; base: those without flags; typed:
    names that flags set; choices: the allowed values of some."""


def knobs_in(scope):
    """{name: value} of the lower-case globals of a script that are plain values."""
    plain, is_knob = (str, int, float, bool), re.compile("[a-z][a-z0-9_]*").fullmatch
    return {name: x for name, x in scope.items() if type(x) in plain and is_knob(name)}


def add_knob(scope, name, default, comment):
    """Add a knob to `scope`, the globals() of train.py."""
    is_taken = name in scope.keys() - scope["ADDED_KNOBS"].keys() or hasattr(builtins, name)
    if is_taken or not knobs_in({name: default}):
        why = "train.py or Python uses this name" if is_taken else "expected a plain value"
        fail(f"train.knob({name!r}, {default!r}, ...): {why}")
    scope["ADDED_KNOBS"][name] = comment
    scope[name] = default


@contextlib.contextmanager
def configured(*scopes, argv=None, words=None):
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, put them back.

    Flags win over config files, wherever they stand. Present values are the defaults, so that
    `train.max_steps = 5` takes effect. words: a list for the arguments that are neither flags nor
    config files; None refuses them. Raises BadInput, and sets nothing, if an argument is invalid."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*argv}:
        print_help(scopes[-1])
        raise SystemExit(0)
    before = [knobs_in(scope) for scope in scopes]
    config = Config({name: value for knobs in before for name, value in knobs.items()})
    config.default = dict(config)
    config.choices = {name: x for scope in scopes for name, x in scope.get("CHOICES", {}).items()}
    for path in (word for word in argv if is_config(word)):
        for name, value in read_config(path, config).items():
            config[name] = accept(f"{path}: {name} = {value!r}", name, value, config)
    config.base, config.typed = dict(config), set()
    for word in argv:
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("-"):
            config[name] = accept(word, name, value, config)
            config.typed.add(name)
        elif not is_config(word) and words is None:
            fail(f"unexpected argument {word!r}; write config/FILE.py or --key=value")
        elif not is_config(word):
            words.append(word)
    try:
        for scope, knobs in zip(scopes, before, strict=True):
            scope.update({name: config[name] for name in knobs})
        yield config
    finally:
        for scope, knobs in zip(scopes, before, strict=True):
            scope.update(knobs)


def is_config(word):
    return word.endswith(".py") and not word.startswith("-")


def read_config(path, config):
    """{name: value} that a config file sets; it sees the knobs as set so far, and may set _names."""
    if not os.path.isfile(path):
        fail(f"no config file {path} in {os.getcwd()}")
    values = {"__builtins__": builtins, **config}
    exec(compile(Path(path).read_bytes(), path, "exec"), values)
    return {n: x for n, x in values.items() if n[0] != "_" and x is not config.get(n)}


def accept(written, name, value, config):
    """`value` as the type of the knob. Raises BadInput that quotes `written`: the flag, or the file
    and the assignment in it."""
    if name not in config:
        hint = "--help lists every name; one of your own, in a file, begins with _"
        for near in difflib.get_close_matches(name, config, n=1):
            hint = f"did you mean {near}?"
        fail(f"unknown name {name!r} in {written}; {NAMES_ELSEWHERE.get(name, hint)}")
    default, kind, text = config.default[name], type(config.default[name]), show(value)
    choices = config.choices.get(name, (True, False) if kind is bool else ())
    for choice in choices:
        if show(choice) == {"1": "true", "0": "false"}.get(text, text.lower()):
            return choice
    with contextlib.suppress(ValueError, OverflowError):  # int(nan), int(inf)
        if kind in (int, float) and kind(float(text)) == float(text):
            return kind(float(text))
    if kind is str and isinstance(value, str) and not choices and (value or not default):
        return value
    expected = " | ".join(map(show, choices)) or f"{kind.__name__}, such as --{name}={default}"
    fail(f"{written}: expected {expected}")


def show(value):
    """A knob's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(scope):
    """Print a script's docstring, and its knobs as the source has them, at the terminal's width."""
    top = re.split(r"(?m)^(?:def|class|@)", Path(scope["__file__"]).read_text(encoding="utf-8"))[0]
    added = [f"{name} = {scope[name]!r}  # {x}" for name, x in scope.get("ADDED_KNOBS", {}).items()]
    print(scope["__doc__"])
    for line in re.findall(r"(?m)^(?:# \w|#  |[a-z]\w*(?:: \w+)? = ).*", top) + added:
        print(textwrap.fill(line, line_width(100), subsequent_indent=12 * " "))


# ---- files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path):
    """Yields `path` + ".tmp" for the caller to write. The file is then fsynced and takes the place
    of `path` in one rename; on an error, `path` stays as it was."""
    temporary = Path(f"{path}.tmp")
    temporary.unlink(missing_ok=True)  # left behind by a kill
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a network disk
        folder = os.open(temporary.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def digest_of(path):
    """SHA-256 of a file, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of(value):
    """16 hex digits that follow from a value of plain types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint(*paths):
    """16 hex digits that follow from the contents of files, in this order."""
    return hash_of([digest_of(path) for path in paths])


def write_json(path, value):
    """Replace `path` by `value` as JSON: non-finite floats as null, other types by their repr."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(clean(value), indent=1, default=repr) + "\n")


def clean(value):
    """`value` with None for each float that is not finite: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


def read_json(path):
    """The dict in the JSON file `path`, or {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    return {}


# ---- the folder of a run, and its metrics.jsonl --------------------------------------------------

# Fields that follow from seed and code alone. Others are measured, or a fork's, which may be.
COMPUTED = (
    "loss grad_norm lr loss_scale skipped tokens sequences epoch val_loss val_accuracy".split()
)
COMPUTED += ["val_bpb", "val_tokens", "best_val_loss"]


class Folder:
    """out/NAME, which lock() keeps for this process until the `with` ends; its log, which only rank 0
    writes. What cannot be written there waits in memory, and no row stands there twice: rows past
    the checkpoint from which a run goes on stay until the first new one, which takes their place in
    one rename."""

    lock_file = log = about = None  # about: what run.json says

    def __init__(self, path):
        self.path = Path(path)
        self.changing = threading.Lock()  # the thread that saves logs events
        self.waiting = []  # rows that are not in the log yet
        self.is_failing = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.lock_file:
            self.lock_file.close()

    def fresh(self, suffix="_", number=2):
        """NAME_2, or the first of NAME_3, NAME_4 ... that does not exist yet."""
        while os.path.lexists(f"{self.path}{suffix}{number}"):
            number += 1
        return f"{self.path}{suffix}{number}"

    def lock(self):
        """Make the folder and lock it. Raises BadInput if another run has it, or if it cannot be
        written; where the file system has no locks, that is said."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock_file = open(self.path / ".lock", "a")
            # unlike flock, lockf is not inherited by a fork
            fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"{self.path} is in use by another run; write --out_dir={self.fresh()}")
        except OSError as error:
            if not self.lock_file:
                fail(f"{self.path} cannot be written ({error.strerror}); write --out_dir=FOLDER")
            print0(f"{self.path} cannot be locked ({error.strerror}): start no second run in it")

    def set_aside(self):
        """For --resume=restart: rename the folder, to NAME.old_1 say, and lock a new one."""
        os.rename(self.path, self.fresh(".old_", 1))
        self.lock_file.close()
        self.lock()

    def require_own(self):
        """Raises OSError if the folder is gone, or another run has made one in its place."""
        if not os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self.lock_file.fileno())):
            raise OSError(errno.ESTALE, "another run has taken the place of this folder")

    def begin(self, about, files, place, is_another, is_restart):
        """For a run that starts at `place`, (step, evaluated), or (-1, -1): lock the folder, write
        run.json and the code, open the log. Returns (its rows past that place, git commit)."""
        if is_restart and (self.path / "run.json").exists():
            self.set_aside()
        if not self.lock_file:
            self.lock()
        for leftover in self.path.glob("*.tmp"):  # of a killed run
            leftover.unlink()
        if is_another and (self.path / "best.pt").exists():
            os.replace(self.path / "best.pt", self.path / "best_before.pt")
        git, diff = git_state()
        keep_code(self.path / "code", files, diff)
        first = {"start": now(), "wandb_id": os.urandom(4).hex()}
        earlier = read_json(self.path / "run.json") if place[0] >= 0 else {}
        ended = {"end": None, "ended": None}  # if it is killed
        self.about = first | earlier | about | {"git": git} | ended
        write_json(self.path / "run.json", self.about)
        return self.open_log(*place), git["commit"]

    def end(self, ended, state):
        self.about |= {"end": now(), "ended": ended, "state": state}
        write_json(self.path / "run.json", self.about)

    def open_log(self, step, evaluated):
        """Open the log of a run that goes on at `step`; -1: that begins. Returns the old rows past
        it."""
        self.place, path = (step, evaluated), self.path / "metrics.jsonl"
        path.touch()
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # half a line that a kill has left
        rows = read_rows(path)
        old = [row for row in rows if is_past(row, *self.place)]
        self.kept = [row for row in rows if not is_past(row, *self.place)] if old else None
        self.log = open(path, "ab", buffering=0)
        return old

    def sync(self):
        """Raises OSError if the folder is not ours, or if rows still wait for room on the disk."""
        self.require_own()
        with self.changing:
            self.flush()
            os.fsync(self.log.fileno())

    def write_rows(self, rows):
        """Append rows. If that fails, it is said once, and training goes on."""
        with self.changing:
            for row in rows if self.log else ():
                finite = clean(row)
                self.waiting.append(finite if finite == row else finite | {"finite": False})
            try:
                self.flush()
                self.is_failing = False
            except OSError as error:
                if not self.is_failing:
                    print0(f"metrics.jsonl cannot be written ({error.strerror}); its rows wait")
                self.is_failing = True

    def flush(self):
        """Raises OSError if rows still wait for room on the disk."""
        if (
            self.waiting
            and self.kept is not None
            and any(is_past(r, *self.place) for r in self.waiting)
        ):
            self.require_own()
            path = self.path / "metrics.jsonl"
            with replacing(path) as temporary:
                temporary.write_bytes(as_lines(self.kept + self.waiting))
            self.log, self.kept = open(path, "ab", buffering=0), None
        elif self.waiting:
            end = self.log.seek(0, os.SEEK_END)
            lines = as_lines(self.waiting)
            if self.log.write(lines) < len(lines):
                self.log.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.kept is not None:
                self.kept += self.waiting
        self.waiting = []


def as_lines(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read_rows(path):
    """The rows of a metrics.jsonl, without half a line that a kill has left; none without a file."""
    rows = []
    for line in Path(path).read_bytes().splitlines() if os.path.exists(path) else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            rows += [row] if key_of(row)[1] >= 0 else []
    return rows


def key_of(row):
    """(kind, step) of a row; an event's kind is its name."""
    return row["event"] if row["kind"] == "event" else row["kind"], row["step"]


def is_past(row, step, evaluated):
    """Whether a row comes after step `step`, and after its evaluation if that is `evaluated`. Events
    that tell of a process are not undone by a resume."""
    if row["kind"] == "event":
        return row["step"] > step and row["event"] not in ("resume", "resume_checked", "end")
    return (row["step"], row["kind"] == "eval") > (step, evaluated == step)


def differences(old, new, best_metric):
    """[(field, then, now)] of what differs, in any bit, between two rows of one kind and step, among
    the fields that follow from seed and code. best_metric: the knob, whose field counts, too."""
    name, new = best_metric.removeprefix("-"), clean(new)
    both = [key for key in (*COMPUTED, name, f"best_{name}") if key in old and key in new]
    return [(key, old[key], new[key]) for key in both if old[key] != new[key]]


class Check:
    """Was a resume exact? Compares rows that are computed again with old ones, which a killed process
    has logged past the checkpoint. begin: its step."""

    def __init__(self, old_rows, begin, best_metric):
        self.old = {key_of(row): row for row in old_rows if row["kind"] != "event"}
        self.best_metric = best_metric
        self.found = {"from": begin, "compared": 0, "steps": 0, "first_difference": None}

    def see(self, row):
        """Returns whether the result is known."""
        old, found = self.old.pop(key_of(row), None), self.found
        if old:
            found["compared"] += 1
            found["steps"] += row["kind"] == "train"
            for field, then, now in differences(old, row, self.best_metric)[:1]:
                difference = {"step": row["step"], "field": field, "then": then, "now": now}
                found["first_difference"] = difference
        is_last = all(step < row["step"] for _, step in self.old)
        return is_last or bool(found["first_difference"])

    def result(self, changed):
        """(what is printed, the fields of an event)."""
        words, difference = "nothing to compare with", self.found["first_difference"]
        if self.found["compared"]:
            words = f"{self.found['steps']:,} steps computed again, every loss and norm the same"
        if difference:
            words = "other numbers from step {step:,} on: {field} {then} then, {now} now; changed since: "
            words = words.format(**difference) + (change_words(changed) or "nothing known")
        return f"resumed at step {self.found['from']:,}: {words}", self.found


def folder_name(config, free, script):
    """The out_dir of a flag; else that of the config file and, in the order of the knobs, what was
    typed, changes a value and makes another run: out/mine,n_layer=2. A script lab.py makes out/run
    to out/lab, and the out_dir of a config file to out/mine,lab."""
    parent, name = os.path.split(config["out_dir"])
    if "out_dir" in config.typed:
        return config["out_dir"]
    if script:
        name = (
            script.stem
            if config["out_dir"] == config.default["out_dir"]
            else f"{name},{script.stem}"
        )
    sizes = {each["batch_size"] * each["accum_steps"] for each in (config, config.base)}
    unnamed = free - {"max_steps"} | ({"batch_size", "accum_steps"} if len(sizes) == 1 else set())
    for key in config:
        if key in config.typed - unnamed and config[key] != config.base[key]:
            value = show(config[key])
            if key == "init_from":  # the folder and the file of the run that it names
                value = "-".join(Path(value).resolve().with_suffix("").parts[-2:])
            name += f",{key}={value.replace('/', '-')}"
    # file systems allow 255 bytes
    return os.path.join(parent, name if len(name) <= 150 else f"{name[:130]},{hash_of(name)}")


# ---- the code of a run ---------------------------------------------------------------------------

TOOLS = (
    "train.py plumbing.py prepare_data.py sample.py report.py check.py checks replay.py bench.py"
)
INSTALLED = re.compile(r"-packages|lib.python\d")  # in the path of what is Python's, or a package
STARTED_IN = Path.cwd()  # sys.argv[0] is relative to it
script = ""  # the path of a fork's script, in a tool


def script_path():
    """The .py file of a fork with which Python was started, or which a tool was given. None if that
    is train.py itself or a tool, or no file of the user's, as in a notebook."""
    path = Path(STARTED_IN, script or sys.argv[0]).resolve()
    is_ours = path.parent == REPO and path.stem in TOOLS
    is_own = path.suffix == ".py" and path.is_file() and not INSTALLED.search(str(path))
    return path if is_own and not is_ours else None


def code_files(train_file):
    """{name: path} of what computes a run: train.py, model.py, optim.py, dataset.py, the script, and
    the .py files beside it that are loaded; but not plumbing.py and the tools."""
    own = script_path()
    home = own.parent if own else REPO
    files = {path.name: path for path in (Path(train_file).resolve(), own) if path}
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, "__file__", None) or "-").resolve()
        is_beside = own and path.is_relative_to(home) and name.partition(".")[0] not in TOOLS
        if name in ("model", "optim", "dataset"):
            files[path.name] = path
        elif (
            is_beside
            and path.suffix == ".py"
            and path.is_file()
            and not INSTALLED.search(str(path))
        ):
            files[str(path.relative_to(home))] = path
    return files


def keep_code(folder, files, diff):
    """Write the text of `files`, and the diff of the repository, to `folder`. A file that stands
    there with another text is kept under a second name, with a part of its hash."""
    texts = {name: path.read_bytes() for name, path in files.items()} | {"git.diff": diff}
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() != text:
            os.replace(path, path.with_suffix(f".{digest_of(path)[:8]}{path.suffix}"))
        path.write_bytes(text)


def changed_code(then, files, folder, knobs):
    """{name: [hash then, hash now]} of the files that compute something else than before. then: {name:
    hash}, whose texts keep_code() wrote to `folder`. knobs: names whose values are no code."""
    texts = {digest_of(path): path.read_bytes() for path in folder.rglob("*.py")}
    changed = {}
    for name, digest in then.items():
        path = files.get(name, REPO / name)
        now = path.read_bytes() if path.is_file() else b""
        texts.setdefault(digest, b"")
        if digest != hashlib.sha256(now).hexdigest() and not same_tree(texts[digest], now, knobs):
            changed[name] = [digest[:8], hashlib.sha256(now).hexdigest()[:8]]
    return changed


def same_tree(one, other, knobs):
    """Whether two texts differ in comments, docstrings, layout and values of knobs alone."""
    trees = [ast.parse(one), ast.parse(other)]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
                node.value.value = None
        for node in tree.body:
            names = re.findall(r"\w+", " ".join(map(ast.unparse, getattr(node, "targets", []))))
            if names and {*names} <= {*knobs, "train"}:  # peak_lr = 1; train.a, train.b = 1, 2
                node.value = ast.Constant(None)
            elif ast.unparse(node).startswith("train.knob("):
                del node.value.args[1:]  # the default and the comment
    return bool(one and other) and ast.dump(trees[0]) == ast.dump(trees[1])


def changes(saved, facts, files, code):
    """({name: [then, now]} of what has changed since a checkpoint, and of what makes another run: a
    knob that is not free, data, code). facts: what checkpoints say of a run; files, code: see
    changed_code()."""
    old, new = saved["identity"], facts["identity"]
    then = saved["config"] | saved["run"] | old["knobs"] | old["data"]
    now = facts["config"] | facts["run"] | new["knobs"] | new["data"]
    names = [name for name in now if then.get(name, now[name]) != now[name]]
    names = [name for name in names if name not in ("out_dir", "data_dir", "resume")]
    code = changed_code(old["code"], files, code, {*facts["config"]})
    changed = {name: [then[name], now[name]] for name in names} | code
    fixed = {**old["knobs"], **new["knobs"], **new["data"], **code}
    return changed, {name: changed[name] for name in changed if name in fixed}


def say_what_is_beside(folder, facts):
    """Print the same run of another length, if it lies beside the folder of one that begins."""
    config, lengths = facts["config"], ("decay_steps", "warmup_steps")
    here = {name: x for name, x in facts["identity"]["knobs"].items() if name not in lengths}
    for path in folder.path.parent.glob("*/run.json"):
        other = read_json(path)
        knobs = other.get("identity", {}).get("knobs", {})
        there = {name: x for name, x in knobs.items() if name not in lengths}
        if there == here and other["config"]["max_steps"] != config["max_steps"]:
            name, step = shown(path.parent), other["state"]["step"]
            print0(f"{name} has this run at step {step:,}; to go on there add --out_dir={name}")


def git_state():
    """({commit, dirty} of the repository, its diff). The Docker image has GIT_COMMIT, not .git."""
    git = ["git", "-C", REPO, f"--git-dir={REPO}/.git", f"--work-tree={REPO}"]  # never a parent's
    words = ["rev-parse", "HEAD"], ["diff", "HEAD"]
    try:
        commit, diff = (
            subprocess.check_output([*git, *w], stderr=subprocess.DEVNULL) for w in words
        )
    except (OSError, subprocess.SubprocessError):
        return {"commit": os.environ.get("GIT_COMMIT"), "dirty": None}, b""
    return {"commit": commit.decode().strip(), "dirty": bool(diff)}, diff


# ---- what tools read: a fork's script, a checkpoint, weights -------------------------------------


def script_among(words):
    """(path of a fork's script or "", the other words). It is --script=FILE, or a plain word FILE.py
    if the file imports train: a config file does not."""
    imports_train = re.compile(r"(?m)^(import|from)\b.*\btrain\b").search
    for word in words:
        path = word.removeprefix("--script=")
        is_file = word.endswith(".py") and os.path.isfile(word)
        if path != word or (is_file and imports_train(Path(word).read_text(encoding="utf-8"))):
            return path, [other for other in words if other != word]
    return "", words


def load_script(path, train):
    """Execute the script at `path`, once. Returns the module that holds its loop: `train`, or the
    script itself if it is a copy of train.py. Raises BadInput."""
    global script
    script = os.path.abspath(path)
    if not os.path.isfile(script):
        fail(f"--script={path}: there is no such file")
    train.main = partial(fail, f"{path}: write `if __name__ == '__main__':` above its train.main()")
    sys.path.insert(0, os.path.dirname(script))
    module = importlib.import_module(Path(script).stem)
    return module if hasattr(module, "FRESH_STATE") and hasattr(module, "build") else train


class Damaged(ValueError):
    """The file is no checkpoint, or was damaged after it was written."""


def verify(path):
    """Compare the checksums of the zip that a checkpoint is, because torch.load loads a flipped bit
    without an error. Raises Damaged, or OSError if the file cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_whole = archive.testzip() is None
    except OSError:
        raise
    except Exception as error:  # damage surfaces as any of half a dozen types
        if isinstance(error.__context__, OSError):  # a read that has failed
            raise error.__context__ from None
        is_whole = False
    if not is_whole:
        raise Damaged(f"{path} is damaged, cut off, or no checkpoint")


def read_checkpoint(path, format):
    """The dict in a checkpoint, its tensors on the CPU; no code in it can run. Raises Damaged, or
    BadInput if it has another format."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise Damaged(f"{path} cannot be read back: {str(error)[:200]}") from error
    if saved.get("format") != format:
        commit = saved.get("run", {}).get("git_commit", "that its run.json names")
        fail(f"{path} has another format than this code reads; check out the commit {commit}")
    return saved


def digest_of_state(parts):
    """SHA-256 of all in a checkpoint on which the next steps depend."""
    digest = hashlib.sha256()
    state = {name: value for name, value in parts["state"].items() if name != "seconds"}
    names = ("model", "optimizer", "scaler", "ema", "extra", "rng")
    hashed = {name: parts[name] for name in names} | {"state": state}
    for path, leaf in tree_flatten_with_path(hashed)[0]:
        is_tensor = isinstance(leaf, torch.Tensor)
        leaf = leaf.reshape(-1).view(torch.uint8).numpy() if is_tensor else repr(leaf).encode()
        digest.update(str(path).encode())
        digest.update(leaf)
    return digest.hexdigest()


def restore_optimizer(optimizer, saved):
    """Put back the state of an optimizer, {number of a weight: {name: tensor or value}}."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {i: {k: shard_like(weights[i], x) for k, x in saved[i].items()} for i in saved}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    for i, moments in state.items():  # torch has cast them to the dtype of the weight
        for name, value in moments.items():
            own = optimizer.state[weights[i]]
            own[name] = value.to(own[name].device) if torch.is_tensor(value) else value


def write_copies(folder, parts, names):
    """Write a checkpoint to `folder` under all of `names`."""
    with replacing(folder / names[0]) as temporary:
        torch.save(parts, temporary)
    for name in names[1:]:
        with replacing(folder / name) as temporary:
            try:
                os.link(folder / names[0], temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(folder / names[0], temporary)


class Extra(dict):
    """A fork's own objects, name -> what has a state_dict. One that is put here gets at once the state
    that the checkpoint has for it."""

    saved = {}

    def __setitem__(self, name, part):
        if name in self.saved:
            part.load_state_dict(self.saved[name])
        super().__setitem__(name, part)

    def state_dict(self):
        return self.saved | {name: part.state_dict() for name, part in self.items()}


def read_weights(path, format):
    """({name: tensor}, metadata_of() the run) of a checkpoint or a .safetensors file."""
    try:
        if path.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
        saved = read_checkpoint(path, format)
        return saved["model"] | saved["ema"], metadata_of(saved)
    except Exception as error:
        fail(f"{path}: {error}; expected a checkpoint or a .safetensors file")


def metadata_of(saved):
    """The config of a checkpoint, and what it says of its dataset, as metadata of an export."""
    known = {"format": "pt"} | saved["config"] | saved["data"]["meta"]
    return {name: str(value) for name, value in known.items()}


def checkpoints(folder):
    """Paths of all ckpt_STEP.pt in `folder`, newest first."""
    return sorted(folder.glob("ckpt_" + 8 * "[0-9]" + "*.pt"), key=step_of, reverse=True)


def step_of(path):
    return int(path.stem.partition("_")[2])


# ---- signals -------------------------------------------------------------------------------------

# Ctrl-C, a scheduler, a closed terminal, submitit: the run stops after its step
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Signals:
    """Handles signals within its `with`. stop: the first of STOPPING that came, or 0. save: a SIGUSR1
    asked for a checkpoint. Until is_training is set a stop ends the process at once, since there is
    nothing to save."""

    stop, save, is_training = 0, False, False

    def __enter__(self):
        handled = [*STOPPING, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            handled.remove(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.handle) for number in handled}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's

    def handle(self, number, frame):
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.is_training:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        else:
            self.stop = self.stop or number
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)  # the second ends a process that hangs, too
                print0("stopping after this step, with a checkpoint; Ctrl-C again stops now")


# ---- random numbers, data, workers ---------------------------------------------------------------


def seed_cpu(seed):
    """Seed Python, NumPy and torch on the CPU. torch.manual_seed takes a hundred times as long, since
    it looks for other devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def seed_of(*parts):
    """32 bits that follow from `parts`, such as (seed, number of a row)."""
    return zlib.crc32(" ".join(map(str, parts)).encode())


def rng_state(device):
    """All that later random numbers depend on, in a form that torch.load(weights_only=True) reads."""
    name, words, *rest = np.random.get_state()
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    state = {"python": random.getstate(), "numpy": [name, words.tolist(), *rest]}
    return state | {"torch": torch.get_rng_state(), "device": on_device}


def set_rng_state(rng, device):
    """Of a run on another kind of device, what is there is set."""
    random.setstate(rng["python"])
    np.random.set_state(tuple(rng["numpy"]))
    torch.set_rng_state(rng["torch"])
    if device.type != "cpu" and rng["device"] is not None:
        torch.get_device_module(device).set_rng_state(rng["device"])


class Reader(torch.utils.data.Dataset):
    """dataset[first, count] as arrays: (inputs, targets), each of `count` rows, the inputs also as a
    tuple or a dict. What is drawn meanwhile follows from (seed, first), and the random state is as
    before: so each batch is a pure function of its place. An attribute draws_nothing spares that."""

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, place):
        name, cpu = f"{type(self.dataset).__name__}[{place}]", torch.device("cpu")
        draws = not getattr(self.dataset, "draws_nothing", False)
        before = rng_state(cpu) if draws else None
        try:
            if draws:
                seed_cpu(seed_of(self.seed, place[0]))
            parts = tree_map(np.asarray, self.dataset[place])
        except Exception as error:
            error.add_note(f"in {name}, a batch by (first row, count). {DATASET}")
            raise
        finally:
            if draws:
                set_rng_state(before, cpu)
        if len(parts) != 2 or {part.shape[:1] for part in tree_leaves(parts)} != {(place[1],)}:
            raise RunFailed(
                f"{name}: expected (inputs, targets) of {place[1]} rows each. {DATASET}"
            )
        return tuple(parts)


DATASET = (
    "A Dataset of rows becomes one of batches by dataset.Shuffled(rows, train.seed), for validation "
    "by dataset.InOrder(rows, train.seed)"
)


def reopened(tokens):
    """How a memmap is sent to a worker that is spawned: by its path, if it is the whole file."""
    if isinstance(tokens.base, mmap.mmap):
        return np.memmap, (tokens.filename, tokens.dtype, "r", tokens.offset, tokens.shape)
    return np.array, (np.asarray(tokens),)


copyreg.pickle(np.memmap, reopened)  # else each worker would get a copy of the data


def load_batches(reader, places, workers, prefetch, knobs):
    """Yields reader[place] of `places`, read ahead by `workers` processes. knobs: {module's name:
    {global: value}}, set in each worker. Raises RunFailed if a worker dies."""
    loader = torch.utils.data.DataLoader(
        reader,
        sampler=places,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        collate_fn=tuple,  # arrays go through a pipe; tensors would hang on a full /dev/shm
        worker_init_fn=partial(begin_worker, knobs, os.getpid()),
        generator=torch.Generator(),  # or it would draw a seed from the global generator
    )
    try:
        yield from loader
    except (AttributeError, TypeError, RuntimeError, OSError, EOFError) as error:
        words = str(error)
        if not workers or "Caught" in words:  # an error of the dataset
            raise
        hint = "the same command resumes"
        if "pickle" in words:  # by a worker that is spawned
            hint = "in place of lambda name functions by def, or write --num_workers=0"
        raise RunFailed(f"a data worker was killed, or cannot start ({words}); {hint}") from error


def begin_worker(knobs, parent, worker):
    """In a worker: set the knobs, ignore what a scheduler sends to all processes, since the run
    decides when its workers end, and end with the run."""
    for module, values in knobs.items():
        vars(sys.modules[module]).update(values)
    for number in (*STOPPING, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    at_death_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it has died before
        os._exit(1)


def kill_workers():
    """Python would end workers by SIGTERM, which they ignore, and wait for them."""
    with contextlib.suppress(RuntimeError):  # torch's handler raises it for one that ends meanwhile
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        process.kill()


def is_importing_worker():
    """Whether this is a spawned worker that imports the script of its run."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def to_device(batch, device):
    """Arrays of the host as tensors on the device, to a GPU while the host continues. On MPS, a copy
    in the background would not keep its memory (pytorch#189690)."""
    is_cuda = device.type == "cuda"
    tensors = tree_map(torch.as_tensor, batch)
    tensors = tree_map(torch.Tensor.pin_memory, tensors) if is_cuda else tensors
    return tree_map(lambda tensor: tensor.to(device, non_blocking=is_cuda), tensors)


def scalars(numbers, source, *needed):
    """`numbers`, {name: scalar}, which `source` returned. Raises RunFailed for anything else."""
    shapes = {name: tuple(np.shape(x)) for name, x in numbers.items()}
    if not shapes.keys() >= {*needed} or any(math.prod(shape) != 1 for shape in shapes.values()):
        raise RunFailed(f"{source}: found {shapes}; expected scalars, with {', '.join(needed)}")
    return numbers


# ---- ranks: in a single process these functions do not communicate -------------------------------


@contextlib.contextmanager
def joined(device):
    """A context in which torchrun's processes, if there are any, form a group. Tensors on a GPU go
    through NCCL, those on the CPU through gloo."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        total(torch.ones(1, device=device)).item()  # NCCL connects now: its errors are of the start
        yield
    except RuntimeError as error:
        if not re.search("gloo|NCCL", str(error)):
            raise
        cause = str(error).strip()[-160:]
        raise RunFailed(f"another rank failed ({cause}); the same command resumes") from error
    # After a failure the GPU may wait in a sum for a rank that is gone, and destroying the group
    # would wait for that sum. Python's exit aborts the group instead (~ProcessGroupNCCL).
    dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def my_share(first, count):
    """(first, count) of this rank's part of the `count` sequences that begin with `first`."""
    begin = count * rank() // world_size()
    end = count * (rank() + 1) // world_size()
    return first + begin, end - begin


def total(tensor):
    """`tensor`, summed over the ranks in place. All ranks call it together."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def mean_over_ranks(sums):
    """{name: scalar}, summed over the ranks and divided by their number, by one message."""
    if world_size() == 1:
        return dict(sums)
    means = total(torch.stack([part.float() for part in sums.values()])) / world_size()
    return dict(zip(sums, means.unbind(), strict=True))


def max_over_ranks(*numbers):
    """The largest of each number over all ranks, by one message between the hosts."""
    most = torch.tensor(numbers)
    if world_size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def from_all_ranks(value):
    """[value of rank 0, value of rank 1, ...], on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def from_rank0(function, *args):
    """What function(*args), which only rank 0 calls, returns or raises, on every rank."""
    result = None
    if rank() == 0:
        try:
            result = function(*args)
        except Exception as error:
            result = error
    result = from_all_ranks(result)[0]
    if isinstance(result, Exception):
        result.is_told = rank() > 0  # only rank 0 prints it
        raise result
    return result


def sync_buffers(model):
    """Give all ranks the buffers of rank 0, as DistributedDataParallel does before a step."""
    for buffer in model.buffers() if world_size() > 1 else ():
        dist.broadcast(local(buffer.data), 0)


def local(tensor):
    """This rank's part of a sharded tensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    """All of a sharded tensor; any other tensor unchanged. All ranks call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(model, device):
    """`model` with each weight sharded over the ranks (FSDP2), block by block if it has `blocks`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    # the root, too: or the swap for averaged weights would find it gathered after an evaluation
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def shard_like(weight, value):
    """`value`, complete on every rank, sharded like `weight` if that is sharded."""
    if not hasattr(weight, "to_local") or getattr(value, "shape", None) != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import

    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(value.to(weight.device), mesh, placements, src_data_rank=None)


# ---- the machine ---------------------------------------------------------------------------------

# Peak FLOP/s of dense matrix products from the makers' datasheets: in 16 bits, in float32 (not
# TF32). Names are complete, without "NVIDIA ": if a part sufficed, an RTX A1000 would get the peak
# of an A100, and a MIG slice that of the whole GPU. Other devices are measured.
PEAKS = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "H100 80GB HBM3": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "A100-SXM4-40GB": (312e12, 19.5e12),
    "A100-SXM4-80GB": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "GeForce RTX 4090": (165e12, 82.6e12),
    "Tesla T4": (65e12, 8.1e12),
}


def choose_device(name, deterministic):
    """The torch.device of this rank for --device=name, and torch prepared for it. Raises BadInput if
    it is not available."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device((found or "cpu") if name == "auto" else name)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or int(os.environ.get("LOCAL_RANK", 0)))
            device = torch.device("cuda", torch.cuda.current_device())
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0][:120]
        fail(f"--device={name}: {why}; expected auto, cpu, cuda, cuda:1 or mps")
    prepare_torch(device.type != "mps" if deterministic == "auto" else deterministic, device)
    return device


def choose_dtype(name, device, so_far):
    """(dtype's name, why) for --dtype=name. auto: as in the run so far, else 16 bits if the hardware
    computes in them."""
    if name != "auto" or so_far:
        return (name, "as given") if name != "auto" else (so_far, "as in the run so far")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16", f"compute capability {major}.{minor}"
    has_bfloat16 = device.type == "mps" or cpu_info()[1] & {"amx_bf16", "avx512_bf16"}
    return ("bfloat16", "native here") if has_bfloat16 else ("float32", "nothing smaller is native")


def choose_compile(setting, device, flops, steps):
    """(whether to compile, why) for --compile=setting. flops (may be NaN), steps: of the run."""
    if setting != "auto":
        return setting, "as given"
    if device.type == "cuda":  # it takes most of a minute
        return steps >= 1000, "worth it from 1,000 steps"
    is_worth_it = device.type == "cpu" and flops >= 5e13 and shutil.which("g++") is not None
    return is_worth_it, f"{flops:.1e} FLOPs; on a CPU with g++ worth it from 5e+13"


def prepare_torch(deterministic, device):
    """Call this before ranks join, a product is computed, or an optimizer is made."""
    # Like torch.use_deterministic_algorithms(), but without importing Inductor, which takes most of
    # a second: if a model is compiled, compiled() sets Inductor's option.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and hides nothing
    # Keep torch.optim from importing torch._dynamo, which takes half as long as torch: methods of its
    # optimizers import it when first called, only to keep the compiler out (torch/_compile.py)
    for owner in (torch.optim.Optimizer, *torch.optim.Optimizer.__subclasses__()):
        for name, method in list(vars(owner).items()):
            imports_dynamo = "_dynamo" in getattr(getattr(method, "__code__", None), "co_names", ())
            plain = getattr(method, "__wrapped__", None)
            if imports_dynamo and plain:
                setattr(owner, name, torch.no_grad()(plain) if name == "step" else plain)
    # Make glibc keep freed memory for the next step, which allocates the same large blocks again:
    # returned to the system, they cost page faults, a fifth of a step or more
    if device.type == "cpu" and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option, value in (
            (-4, 0),
            (-1, 2**31 - 1),
            (-2, 2**26),
        ):  # M_MMAP_MAX, M_TRIM, M_TOP_PAD
            getattr(libc, "mallopt", int)(option, value)
    atexit.register(gc.freeze)  # else Python searches all of torch for garbage at exit


def compiled(model):
    """torch.compile(model), exact on a resume. torch says on stderr why it compiles another shape."""
    from torch._dynamo import config as dynamo  # only here: they take most of a second
    from torch._inductor import config as inductor

    inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice by timing
    # Past torch's limit, later shapes would compute in eager mode, and in a resumed process, which
    # counts anew, other ones.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 10**6
    torch._logging.set_logs(recompiles=True)
    return torch.compile(model, dynamic=False)


def is_out_of_memory(error):
    """Whether memory ran out. Only the text says so where an allocator raises a plain RuntimeError:
    on the CPU, on MPS, and in CUDA's libraries."""
    texts = r"can't allocate memory|out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or bool(re.search(texts, str(error)))


def memory_gb(device):
    """Memory in 1e9 bytes: the peak of CUDA's allocator since its reset, else what this process has
    at present, without mapped files such as the data. None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with contextlib.suppress(OSError):  # it is not Linux
        return (
            1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1e9
        )


def gpu_util(device):
    """Utilization of the GPU in percent, from NVML; None if it is not available."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, a GPU of another maker
        return torch.cuda.utilization(device) if device.type == "cuda" else None


def cpu_info():
    """(model name, instruction flags) of this CPU; no flags except on Linux x86."""
    text = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    fields = dict(re.findall(r"(?m)^(.*?)\s*: (.*)$", text.partition("\n\n")[0]))
    return fields.get("model name", platform.machine()), {*fields.get("flags", "").split()}


def describe(device):
    """What could explain a difference between two processes of a run."""
    is_cuda = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu_info()[0],
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "script": (script_path() or REPO / "train.py").name,
    }


def peak_flops(device, name, dtype):
    """(FLOP/s, in words) for MFU, name: of the device. From its datasheet, else of the fastest of a
    few square matrix products in doubling sizes. NaN if those of the last size disagree by a quarter:
    the machine is busy."""
    known = PEAKS.get(name.removeprefix("NVIDIA "))
    if known:
        rate = known[dtype == torch.float32]
        return rate, f"{rate / 1e12:.4g} TFLOP/s (datasheet of the {name})"
    rate, size, seconds = 0.0, 128, [0.0]
    while size < 8192 and min(seconds) < 0.004:  # the next one takes eight times as long
        size *= 2
        a = torch.ones(size, size, device=device, dtype=dtype)
        times = [time.perf_counter()]
        for _ in range(10):
            torch.mm(a, a)[0, 0].item()  # item() waits for the device
            times.append(time.perf_counter())
        seconds = np.diff(times)
        rate = max(rate, 2 * size**3 / min(seconds))
    if rate > 1.25 * 2 * size**3 / np.median(seconds):
        return math.nan, "n/a, as repeated timings disagree: the machine is busy"
    return rate, f"{rate / 1e12:.3g} TFLOP/s (measured, products of matrices of up to {size})"


def float64(number):
    """A scalar in float64; on MPS, which has none, on the CPU."""
    number = torch.as_tensor(number).detach()
    return (number.cpu() if number.device.type == "mps" else number).double()


class Clock:
    """Adds up seconds by kind: lap(kind) counts the time since the previous lap."""

    def __init__(self, seconds, started):
        self.seconds = seconds
        self.last = started

    def lap(self, kind):
        elapsed = time.perf_counter() - self.last
        self.last += elapsed
        self.seconds[kind] = self.seconds.get(kind, 0.0) + elapsed
        return elapsed


# ---- the console ---------------------------------------------------------------------------------

FIELDS = {  # of the rows of metrics.jsonl: heading, format; "" = it is not shown
    "loss": ("loss", "7.4f"),
    "grad_norm": ("norm", "7.3g"),
    "lr": ("lr", "8.2e"),
    "step_ms": ("ms", "6.1f"),
    "data_ms": ("wait", "5.1f"),
    "tokens_per_sec": ("tok/s", "8,.0f"),
    "mfu": ("mfu", "5.1%"),
    "mem_gb": ("GB", "5.2f"),
    "loss_scale": ("scale", "6.0f"),
    "val_loss": ("val loss", ".4f"),
    "val_bpb": ("bits/byte", ".4f"),
    "val_accuracy": ("accuracy", ".1%"),
    "val_tokens": ("tokens", ","),
}
FIELDS |= dict.fromkeys(
    "kind step skipped tokens sequences epoch gpu_util finite best_val_loss".split(), ""
)


def shown_fields(row):
    """[(heading, number as text)] of a row, in the order of FIELDS, then a fork's own numbers."""
    cells = []
    for name in sorted(row, key=lambda name: [*FIELDS, name].index(name)):
        heading, form = FIELDS.get(name, (name, "8.4g")) or ("", "")
        text = "n/a" if row[name] is None else format(row[name], form)
        cells += [(heading, text.rjust(len(format(0, form))))] if heading else []
    return cells


def print0(*words, colour="", end="\n"):
    """Print on rank 0 only, without control characters, with which a model or a file could type into
    the terminal. What cannot be written is dropped. colour: an escape sequence, for a terminal."""
    if os.environ.get("RANK", "0") != "0":  # torchrun sets it
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a full disk, a closed pipe
        text = printable(" ".join(map(str, words)))
        if sys.stdout.isatty():
            text = f"\x1b[K{colour}{text}\x1b[0m"  # K: clear the rest of the line
        print(text, end=end, flush=True)


def printable(text):
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "", text)


def print_wrapped(text, colour=""):
    """Print lines; one that is wider than the terminal goes on below, indented."""
    for line in text.splitlines():
        print0(textwrap.fill(line, line_width(), subsequent_indent=9 * " "), colour=colour)


def line_width(without=10**6):
    """Columns of the terminal that stdout is; of a pipe or a file, `without`."""
    is_terminal = sys.stdout and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else without


def shown(path):
    """The path to type: as it is, or relative to the working directory if that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def duration(seconds):
    """Time as 0:00:46 or 12 days, 4:00:00."""
    return str(datetime.timedelta(seconds=int(seconds)))


def change_words(changed):
    """What has changed, {name: [then, now]}. Of a file, its name."""
    words = [f"{name} {show(then)} -> {show(now)}" for name, (then, now) in changed.items()]
    return re.sub(r"(\.py) \w+ -> \w+", r"\1 has changed", "; ".join(words))


def to_paste(script, *words):
    """The command that runs a script of this repository."""
    return shlex.join(["python", shown(REPO / script), *map(str, words)])


PLAN = """\
run      {folder}
model    {model}; {parameters:,} parameters
data     {dataset}: {train_rows:,} sequences, {val_rows:,} to validate
batch    {batch_size} x {accum_steps} = {batch:,} sequences of {block_size:,}, on {world_size} rank(s)
steps    {max_steps:,}, {warmup_steps:,} of warmup; {optimizer}, {schedule} {peak_lr:g} to {last:g}
device   {device}, {threads} threads, deterministic {deterministic}
dtype    {dtype} ({why[dtype]})
compile  {compile} ({why[compile]})"""


class Table:
    """The lines of steps, under a header that is printed again whenever the columns change."""

    row, header, live_again = {}, "", 0.0

    def __init__(self, max_steps):
        self.max_steps = max_steps

    def print_row(self, row):
        """Print a row of metrics.jsonl. A field that is not in FIELDS gets a column of its own."""
        self.row = row
        cells = [
            ("   step/total", self.progress(row)),
            *shown_fields(row),
            ("   left", self.left(row)),
        ]
        header = " ".join(heading.rjust(len(text)) for heading, text in cells)
        if header != self.header:
            print0(header)
        self.header = header
        print0(" ".join(text.rjust(len(heading)) for heading, text in cells))

    def progress(self, row):
        return f"{row['step']:>6}/{self.max_steps:<6}"

    def left(self, row):
        """The time that is left, at the speed of the row printed last."""
        return duration((self.max_steps - row["step"]) * self.row["step_ms"] / 1000)

    def print_live(self, state):
        """On a terminal, show the step below the last line, which the next line overwrites. All other
        numbers are of the row printed last: nothing is asked of the device."""
        if self.row and time.monotonic() > self.live_again and sys.stdout.isatty():
            self.live_again = time.monotonic() + 0.25
            print0(
                self.progress(state),
                f"loss {self.row['loss']:.4f}  {self.left(state)} left",
                end="\r",
            )

    def print_evaluation(self, row, is_best):
        """Print a row of an evaluation, with every further number that evaluate() returned."""
        words = "  ".join(f"{heading} {text.strip()}" for heading, text in shown_fields(row))
        best, green = ("  best", "\x1b[32m") if is_best else ("", "")
        print_wrapped(f"{self.progress(row)} {words}{best}", green)


def start_wandb(project, name, about):
    """The session of Weights & Biases that gets the rows; a run that resumes continues its own. about:
    what run.json says."""
    try:
        import wandb
    except ModuleNotFoundError:
        fail("--wandb_log=true: wandb is not installed; type: pip install wandb")
    how = {"id": about["wandb_id"], "resume": "allow", "config": about["config"]}
    session = wandb.init(project=project, name=name, **how)
    session.define_metric("step")  # what a fork logs meanwhile moves wandb's own step
    session.define_metric("*", step_metric="step")
    return session

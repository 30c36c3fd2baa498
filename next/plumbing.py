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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

STARTED = time.perf_counter()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
os.environ.setdefault("NCCL_ALGO", "Ring")  # NVLS adds in any order (nccl#1497)
if "WORLD_SIZE" in os.environ:  # else C++ warns of DistributedDataParallel's find_unused_parameters
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if os.getpid() == 1:  # in a container: the system gives process 1 no signal that it does not handle
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))

import numpy as np  # noqa: E402  before torch, which would swallow a Ctrl-C meanwhile
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

try:
    import fcntl
except ModuleNotFoundError:
    sys.exit("this needs Linux or macOS; on Windows, use WSL2")

REPO = Path(__file__).resolve().parent

# ---- errors, and how a script ends ---------------------------------------------------------------


class BadInput(Exception):
    """Bad input: one line on what was found, what was expected, and what to type."""

    exit_code = 2


class Offline(BadInput):
    """A download was needed, and no server gave it in time."""


class RunFailed(Exception):
    """The run cannot continue: one line on what happened and what to do next."""

    exit_code = 1


def fail(message):
    raise BadInput(" ".join(str(message).splitlines()))


def end_script(kind, error, trace):
    """Print what ends a script: an error of ours as one line, any other as Python's traceback."""
    code = getattr(error, "exit_code", 1)
    if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
        print("stopped by Ctrl-C", file=sys.stderr)
    elif isinstance(error, BadInput | RunFailed):
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    exit_process(code)


sys.excepthook = end_script


def exit_process(code):
    """Exit with `code`; after a run with ranks, without Python's finalization, in which threads of
    a process group that still wait for Python's lock abort the process, and torchrun with it."""
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(code)


# ---- the command line ----------------------------------------------------------------------------

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
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
    """Every knob and its value. default: the values of the source; base: those without what is
    typed; typed: names that flags set, or config files after the first one."""


def knobs_in(scope):
    """{name: value} of the lower-case globals of a script that are plain values."""
    is_knob = re.compile("[a-z][a-z0-9_]*").fullmatch
    plain = (str, int, float, bool)
    return {name: x for name, x in scope.items() if type(x) in plain and is_knob(name)}


def add_knob(scope, name, default, comment):
    """Add a knob to `scope`, the globals() of train.py."""
    call = f"train.knob({name!r}, {default!r}, ...)"
    if name in scope.keys() - scope["ADDED_KNOBS"].keys() or hasattr(builtins, name):
        fail(f"{call}: train.py or Python uses this name; choose another one")
    if not knobs_in({name: default}):
        fail(f"{call}: expected a lower-case name, and a default that is a str, int, float or bool")
    scope["ADDED_KNOBS"][name] = comment
    scope[name] = default


@contextlib.contextmanager
def configured(*scopes, argv=None, words=None):
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, put them back.

    Flags win over config files, wherever they stand. Present values are the defaults, so that
    `train.max_steps = 5` takes effect. words: a list for the arguments that are neither flags nor
    config files; None refuses them. Raises BadInput, and sets nothing, if an argument is invalid."""
    if threading.current_thread() is not threading.main_thread():
        fail("a run needs the main thread; for several at once start several processes")
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*argv}:
        print_help(scopes[-1])
        raise SystemExit(0)
    before = [knobs_in(scope) for scope in scopes]
    config = Config({name: value for knobs in before for name, value in knobs.items()})
    if len(config) < sum(map(len, before)):
        twice = ", ".join(before[0].keys() & before[-1].keys())
        fail(f"train.knob: a flag of this tool has the name {twice}; rename the knob")
    config.default = config.base = dict(config)
    config.typed = set()
    config.choices = {name: x for scope in scopes for name, x in scope.get("CHOICES", {}).items()}
    files = [word for word in argv if word.endswith(".py") and word[0] != "-"]
    for path in files:
        names = read_config(path, config)
        config.typed |= names - {"out_dir"} if path != files[0] else set()
        config.base = dict(config) if path == files[0] else config.base
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if word[:1] == "-" and not equals and name in config:
            fail(f"{word}: write {word}=VALUE")
        elif word[:1] == "-":
            config[name] = accept(name, value, word, config)
            config.typed.add(name)
        elif word not in files and words is None:
            fail(f"unexpected argument {word!r}; write config/FILE.py or --key=value")
        elif word not in files:
            words.append(word)
    try:
        for scope, old in zip(scopes, before, strict=True):
            scope.update({name: config[name] for name in old})
        yield config
    finally:
        for scope, old in zip(scopes, before, strict=True):
            scope.update(old)


def read_config(path, config):
    """Execute a config file, which sees the knobs as set so far. Returns the names that it sets."""
    if not os.path.isfile(path):
        fail(f"no config file {path} in {os.getcwd()}")
    values = {"__builtins__": builtins, **config}
    exec(compile(Path(path).read_bytes(), path, "exec"), values)
    names = {name for name, x in values.items() if name[0] != "_" and x is not config.get(name)}
    for name in sorted(names):
        written = f"{path}: {name} = {values[name]!r}"
        config[name] = accept(name, values[name], written, config)
    return names


def accept(name, value, written, config):
    """`value` as the type of the knob. Raises BadInput that quotes `written`: the flag, or the file
    and the assignment in it."""
    if name not in config:
        hint = "--help lists every name; one of your own, in a file, begins with _"
        for near in difflib.get_close_matches(name, config, n=1):
            hint = f"did you mean {near}?"
        fail(f"unknown name {name!r} in {written}; {NAMES_ELSEWHERE.get(name, hint)}")
    default = config.default[name]
    choices = config.choices.get(name, (True, False) if type(default) is bool else ())
    for choice in choices:
        if show(choice) == show(BOOLEANS.get(show(value).lower(), value)):
            return choice
    if choices:
        fail(f"{written}: expected {' | '.join(map(show, choices))}")
    fits = isinstance(value, str) and (value or not default)
    if not isinstance(default, str):
        with contextlib.suppress(ValueError):
            value = float(show(value))
        fits = isinstance(value, float) and math.isfinite(value)
        fits = fits and (type(default) is float or value.is_integer())
    if not fits:
        fail(f"{written}: expected {type(default).__name__}, such as {default!r}")
    return type(default)(value)


def show(value):
    """A knob's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(scope):
    """Print a script's docstring, and its knobs as the source has them, at the terminal's width."""
    top = re.split(r"(?m)^(?:def|class|@)", Path(scope["__file__"]).read_text(encoding="utf-8"))[0]
    is_shown = re.compile(rf"# |#  |({'|'.join(knobs_in(scope))})\b.*=").match
    added = [f"{name} = {scope[name]!r}  # {x}" for name, x in scope.get("ADDED_KNOBS", {}).items()]
    print(scope["__doc__"])
    for line in filter(is_shown, [*top.splitlines(), *added]):
        print(textwrap.fill(line, line_width(100), subsequent_indent=12 * " "))


# ---- files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path):
    """Yields `path` + ".tmp" for the caller to write. The file is then fsynced and takes the place
    of `path` in one rename; on an error, `path` stays as it was."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left behind by a kill
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a network disk
        fsync(path.parent)


def fsync(path):
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path):
    """SHA-256 of a file, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(*paths):
    """16 hex digits that follow from the contents of files, in this order."""
    return hashlib.sha256("".join(map(digest_of, paths)).encode()).hexdigest()[:16]


def hash_of(value):
    """16 hex digits that follow from a value of plain types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


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


# ---- the folder of a run -------------------------------------------------------------------------


class Folder:
    """out/NAME, which lock() keeps for this process until the `with` ends."""

    def __init__(self, path):
        self.path = Path(path)
        self.file = None  # the lock

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.file:
            self.file.close()

    def holds_run(self):
        return bool([*self.path.glob("run.json"), *self.path.glob("*.pt")])

    def fresh(self):
        """--out_dir=NAME_2, or the first of NAME_3, NAME_4 ... that does not exist yet."""
        return f"--out_dir={shown(free_name(self.path, '_', 2))}"

    def lock(self):
        """Make the folder and lock it. Raises BadInput if another run has it, or if it cannot be
        written; where the file system has no locks, that is said."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path / ".lock", "a")
            # unlike flock, lockf is not inherited by a fork
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"{self.path} is in use by another run; write {self.fresh()}")
        except OSError as error:
            if not self.file:
                fail(f"{self.path} cannot be written ({error.strerror}); write --out_dir=FOLDER")
            print0(f"{self.path} cannot be locked ({error.strerror}): start no second run in it")

    def set_aside(self):
        """For --resume=restart: rename the folder, to NAME.old_1 say, and lock a new one."""
        os.rename(self.path, free_name(self.path, ".old_", 1))
        self.file.close()
        self.lock()

    def require_own(self):
        """Raises OSError if the folder is gone, or another run has made one in its place."""
        if not os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self.file.fileno())):
            raise OSError(errno.ESTALE, "another run has taken the place of this folder")


def free_name(path, suffix, number):
    """`path` + suffix + the first number from `number` on that gives a name not yet taken."""
    while os.path.lexists(path.with_name(f"{path.name}{suffix}{number}")):
        number += 1
    return path.with_name(f"{path.name}{suffix}{number}")


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
    size, base_size = (x["batch_size"] * x["accum_steps"] for x in (config, config.base))
    for key in config:
        is_another = key in config.typed and config[key] != config.base[key]
        if key in ("batch_size", "accum_steps"):
            is_another = is_another and size != base_size
        if is_another and (key not in free or key == "max_steps"):
            value = show(config[key])
            if key == "init_from":  # the folder and the file of the run that it names
                value = "-".join(Path(value).resolve().with_suffix("").parts[-2:])
            name += f",{key}={value.replace('/', '-')}"
    if len(name) > 150:  # file systems allow 255 bytes
        name = f"{name[:130]},{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return os.path.join(parent, name)


# ---- metrics.jsonl -------------------------------------------------------------------------------

# Fields that follow from seed and code alone. Others are measured, or a fork's, which may be.
COMPUTED = "loss grad_norm lr loss_scale skipped tokens sequences epoch sha256 val_loss".split()
COMPUTED += "val_accuracy val_bpb val_tokens best_val_loss".split()


def read_rows(path):
    """The rows of a metrics.jsonl, without half a line that a kill has left; none without a file."""
    content = Path(path).read_bytes() if os.path.exists(path) else b""
    return [row for row in map(row_in, content.splitlines(keepends=True)) if row]


def row_in(line):
    """The row in a line of the log; None if there is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        row = json.loads(line)
        return row if line.endswith(b"\n") and key_of(row)[1] >= 0 else None


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
    """{field: [then, now]} of what differs, in any bit, between two rows of one kind and step, among
    the fields that follow from seed and code. best_metric: the knob, whose field counts, too."""
    name = best_metric.removeprefix("-")
    both = [key for key in (*COMPUTED, name, f"best_{name}") if key in old and key in new]
    return {key: [old[key], new[key]] for key in both if old[key] != clean(new[key])}


class Log:
    """A metrics.jsonl that a run writes. What cannot be written waits in memory, and no row stands
    there twice: rows past the checkpoint from which a run goes on stay until the first new one is
    written, which takes their place in one rename. Any thread may call a method."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder.path / "metrics.jsonl"
        self.changing = threading.Lock()
        self.waiting = []  # rows that are not in the file
        self.is_failing = False

    def begin(self, step, evaluated):
        """Open the log of a run that goes on at `step`; -1: that begins. Returns the old rows past
        it. The log is searched from its end, back to a row of before."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        self.file = open(self.path, "ab", buffering=0)
        self.file.truncate(sum(map(len, lines)))  # half a line that a kill has left
        self.place = step, evaluated
        old, stay = [], []
        while lines:
            row = row_in(lines[-1])
            if row and row["kind"] == "train" and not is_past(row, *self.place):
                break
            (old if row and is_past(row, *self.place) else stay).insert(0, lines.pop())
        self.kept = b"".join(lines + stay) if old else None  # the log without the old rows
        return [row_in(line) for line in old]

    def write(self, rows):
        """Append rows, with null for numbers that are not finite. If that fails, it is said once, and
        training goes on."""
        with self.changing:
            for row in rows:
                finite = clean(row)
                self.waiting.append(finite if finite == row else finite | {"finite": False})
            try:
                self.flush()
            except OSError as error:
                if not self.is_failing:
                    print0(f"metrics.jsonl cannot be written ({error.strerror}); its rows wait")
                self.is_failing = True

    def flush(self):
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in self.waiting)
        if self.kept is not None and any(is_past(row, *self.place) for row in self.waiting):
            self.folder.require_own()
            with replacing(self.path) as temporary:
                temporary.write_bytes(self.kept + lines)
            self.file = open(self.path, "ab", buffering=0)
            self.kept = None
        else:
            end = self.file.seek(0, os.SEEK_END)
            if self.file.write(lines) < len(lines):
                self.file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.waiting = []
        self.is_failing = False

    def sync(self):
        """Flush all rows to the disk. Raises OSError if some still wait for room there."""
        with self.changing:
            self.flush()
            os.fsync(self.file.fileno())


# ---- the code of a run ---------------------------------------------------------------------------

TOOLS = (
    "train.py plumbing.py prepare_data.py sample.py report.py check.py checks replay.py bench.py"
)
INSTALLED = re.compile(r"-packages|lib.python\d")  # in the path of what is Python's, or a package
STARTED_IN = Path.cwd()  # sys.argv[0] is relative to it
script = None  # path of a fork's script, in a tool


def script_path():
    """The .py file of a fork with which Python was started, or which a tool was given. None if that
    is train.py itself or a tool, or no file of the user's, as in a notebook."""
    path = script or Path(STARTED_IN, sys.argv[0]).resolve()
    is_own = path.suffix == ".py" and path.is_file() and not INSTALLED.search(str(path))
    return path if is_own and not (path.parent == REPO and path.name in TOOLS.split()) else None


def code_files(train_file):
    """{name: path} of what computes a run: train.py, model.py, optim.py, dataset.py, the script, and
    the .py files beside it that are loaded; but not plumbing.py and the tools."""
    own = script_path()
    home = own.parent if own else REPO
    ours = [
        Path(train_file).resolve(),
        *(REPO / f"{name}.py" for name in ("model", "optim", "dataset")),
    ]
    loaded = [getattr(module, "__file__", None) or "-" for module in [*sys.modules.values()]]
    files = {}
    for path in [ours[0], own or ours[0], *(Path(path).resolve() for path in loaded)]:
        is_tool = path.is_relative_to(REPO) and path.relative_to(REPO).parts[0] in TOOLS.split()
        is_beside = own and path.is_relative_to(home) and path.suffix == ".py"
        if path in ours or (is_beside and not is_tool and not INSTALLED.search(str(path))):
            files[str(path.relative_to(home)) if path.is_relative_to(home) else path.name] = path
    return files


def keep_code(folder, files, diff):
    """Write the text of `files`, and the diff of the repository, to `folder`. A file that stands
    there with another text is kept under a second name, with a part of its hash."""
    texts = {name: path.read_bytes() for name, path in files.items()} | {"git.diff": diff}
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() != text:
            os.replace(path, path.with_name(f"{path.stem}.{digest_of(path)[:8]}{path.suffix}"))
        path.write_bytes(text)


def changed_code(then, files, folder, knobs):
    """{name: [hash then, hash now]} of the files that compute something else than before. then: {name:
    hash}, whose texts keep_code() wrote to `folder`. knobs: names whose values are no code."""
    kept = {digest_of(path): path for path in folder.rglob("*.py")}
    changed = {}
    for name, digest in then.items():
        path = files.get(name, REPO / name)
        now = digest_of(path) if path.is_file() else "gone"
        can_compare = now != "gone" and digest in kept
        if now != digest and not (can_compare and same_code(kept[digest], path, knobs)):
            changed[name] = [digest[:8], now[:8]]
    return changed


def same_code(one, other, knobs):
    """Whether two files differ in comments, docstrings, layout and values of knobs alone."""
    trees = [ast.parse(path.read_bytes()) for path in (one, other)]
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
    return ast.dump(trees[0]) == ast.dump(trees[1])


def git_state():
    """({commit, dirty} of the repository, its diff). The Docker image has GIT_COMMIT, not .git."""
    git = ["git", "-C", REPO, f"--git-dir={REPO}/.git", f"--work-tree={REPO}"]  # never a parent's
    run = partial(subprocess.check_output, stderr=subprocess.DEVNULL)
    try:
        diff = run([*git, "diff", "HEAD"])
        commit = run([*git, "rev-parse", "HEAD"], text=True).strip()
    except (OSError, subprocess.SubprocessError):
        return {"commit": os.environ.get("GIT_COMMIT"), "dirty": None}, b""
    return {"commit": commit, "dirty": bool(diff)}, diff


# ---- what tools read: a fork's script, a checkpoint ----------------------------------------------


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
    script = Path(path).resolve()
    if not script.is_file():
        fail(f"--script={path}: there is no such file")
    train.main = partial(fail, f"{path}: write `if __name__ == '__main__':` above its train.main()")
    sys.path.insert(0, str(script.parent))
    module = importlib.import_module(script.stem)
    return module if hasattr(module, "FRESH_STATE") and hasattr(module, "build") else train


class Damaged(ValueError):
    """The file is no checkpoint, or was damaged after it was written: what is wrong, in words."""


def read_checkpoint(path, format):
    """The dict in a checkpoint, its tensors on the CPU; no code in it can run. The zip's checksums are
    compared first, because torch.load loads a flipped bit without an error. Raises Damaged; OSError
    if the file cannot be read; BadInput if it has another format."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise zipfile.BadZipFile
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage surfaces as any of half a dozen types
        for cause in (error, error.__context__):  # zipfile raises BadZipFile for a failed read
            if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                raise cause from None
        if is_out_of_memory(error):
            raise
        raise Damaged(f"{path} is damaged, cut off, or no checkpoint") from error
    if saved.get("format") != format:
        commit = saved.get("run", {}).get("git_commit", "that its run.json names")
        fail(f"{path} has another format than this code reads; check out the commit {commit}")
    return saved


def read_weights(path, format):
    """({name: tensor}, metadata_of() the run) of a checkpoint or a .safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
        saved = read_checkpoint(path, format)
        return saved["model"] | saved["ema"], metadata_of(saved)
    except (OSError, Damaged, SafetensorError) as error:
        fail(f"--init_from={path}: {error}; expected a checkpoint or a .safetensors file")


def metadata_of(saved):
    """The config of a checkpoint, and what it says of its dataset, as metadata of an export."""
    known = {"format": "pt"} | saved["config"] | saved["data"]["meta"]
    return {name: str(value) for name, value in known.items()}


def checkpoints(folder):
    """Paths of all ckpt_STEP.pt in `folder`, newest first."""
    return sorted(folder.glob("ckpt_" + 8 * "[0-9]" + "*.pt"), key=step_of, reverse=True)


def step_of(path):
    return int(path.stem.partition("_")[2])


def is_out_of_memory(error):
    """Whether memory ran out. Only the text says so where an allocator raises a plain RuntimeError:
    on the CPU, on MPS, and in CUDA's libraries."""
    texts = r"can't allocate memory|out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or bool(re.search(texts, str(error)))


# ---- signals -------------------------------------------------------------------------------------

# Ctrl-C, a scheduler, a closed terminal, submitit: the run stops after its step
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Signals:
    """Handles signals within its `with`. stop: the first of STOPPING that came, or 0. save: a SIGUSR1
    asked for a checkpoint. Until is_training is set a stop ends the process at once, since there is
    nothing to save."""

    def __init__(self):
        self.stop = 0
        self.save = False
        self.is_training = False
        self.before = {}  # signal -> the handler before this run

    def __enter__(self):
        for number in (*STOPPING, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self.before[number] = signal.signal(number, self.handle)
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
    numpy = [name, words.tolist(), *rest]
    cpu = torch.get_rng_state()
    return {"python": random.getstate(), "numpy": numpy, "torch": cpu, "device": on_device}


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
        first, count = place
        name, cpu = type(self.dataset).__name__, torch.device("cpu")
        draws = not getattr(self.dataset, "draws_nothing", False)
        before = rng_state(cpu) if draws else None
        try:
            if draws:
                seed_cpu(seed_of(self.seed, first))
            batch = self.dataset[place]
        except Exception as error:
            error.add_note(
                f"while reading rows {first} to {first + count - 1} of {name}; {DATASET}"
            )
            raise
        finally:
            if draws:
                set_rng_state(before, cpu)
        parts = tree_map(np.asarray, batch)
        if len(parts) != 2 or {part.shape[:1] for part in tree_leaves(parts)} != {(count,)}:
            raise RunFailed(
                f"{name}[{first}, {count}]: expected (inputs, targets), {count} rows each"
            )
        return tuple(parts)


DATASET = (
    "its dataset[first, count] is a batch; a Dataset of rows becomes one by "
    "dataset.Shuffled(rows, train.seed), for validation by dataset.InOrder(rows, train.seed)"
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
        worker_init_fn=partial(begin_worker, knobs),
        generator=torch.Generator(),  # or it would draw a seed from the global generator
    )
    try:
        yield from loader
    except (AttributeError, TypeError, RuntimeError, ConnectionError, EOFError) as error:
        words = str(error)
        if "pickle" in words and "Caught" not in words:
            hint = "name its functions by `def` at the top of the script, or write --num_workers=0"
            raise RunFailed(f"a spawned worker cannot get the dataset ({words}); {hint}") from error
        if workers and (
            words.startswith("DataLoader worker") or isinstance(error, OSError | EOFError)
        ):
            found = words.partition(". ")[0] or "a DataLoader worker was killed"
            raise RunFailed(f"{found} (out of memory?); the same command resumes") from error
        raise


def begin_worker(knobs, worker):
    """In a worker: set the knobs, ignore what a scheduler sends to all processes, since the run
    decides when its workers end, and end with the run."""
    for module, values in knobs.items():
        vars(sys.modules[module]).update(values)
    for number in (*STOPPING, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    at_death_of_parent(signal.SIGKILL)


def at_death_of_parent(number):
    """From here on this process gets that signal when its parent ends, however it does (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


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
    tensors = tree_map(torch.as_tensor, batch)
    if device.type == "cuda":
        return tree_map(lambda each: each.pin_memory().to(device, non_blocking=True), tensors)
    return tree_map(lambda each: each.to(device), tensors)


def scalars(numbers, source, *needed):
    """`numbers`, {name: scalar}, which `source` returned. Raises RunFailed for anything else."""
    found = numbers if isinstance(numbers, dict) else {"": numbers}
    odd = [name for name, x in found.items() if math.prod(np.shape(x)) != 1]
    if odd or not found.keys() >= {*needed}:
        shapes = {name: tuple(np.shape(found[name])) for name in odd} or [*found]
        raise RunFailed(f"{source}: found {shapes}; expected scalars, with {', '.join(needed)}")
    return found


# ---- ranks: in a single process these functions do not communicate -------------------------------

HANG_MINUTES = 30  # longest wait for another rank


@contextlib.contextmanager
def joined(device):
    """A context in which torchrun's processes, if there are any, form a group. Tensors on a GPU go
    through NCCL, those on the CPU through gloo."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    at_death_of_parent(
        signal.SIGTERM
    )  # ranks have sessions of their own, and would survive torchrun
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, timeout=datetime.timedelta(minutes=HANG_MINUTES))
    try:
        total(torch.ones(1, device=device)).item()  # NCCL connects now: its errors are of the start
        yield
    except RuntimeError as error:
        cause = str(error).strip()
        if not re.search("gloo|NCCL", cause):
            raise
        found = f"another rank failed, or did not answer within {HANG_MINUTES} minutes"
        raise RunFailed(f"{found} ({cause[-160:]}); the same command resumes the run") from error
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


def max_over_ranks(*numbers):
    """The largest of each number over all ranks, by one message between the hosts."""
    if world_size() == 1:
        return list(numbers)
    most = torch.tensor(numbers)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def from_all_ranks(value):
    """[value of rank 0, value of rank 1, ...], on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def from_rank0(function, *args):
    """What function(*args), which only rank 0 calls, returns on every rank. If it raises, rank 0
    raises that, and the others exit."""
    result = None
    if rank() == 0:
        try:
            result = function(*args)
        except Exception as error:
            result = error
    result = from_all_ranks(result)[0]
    if isinstance(result, Exception):
        raise result if rank() == 0 else SystemExit(getattr(result, "exit_code", 1))
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
    "A100 80GB PCIe": (312e12, 19.5e12),
    "A10G": (70e12, 35e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "GeForce RTX 4090": (165e12, 82.6e12),
    "GeForce RTX 3090": (71e12, 35.6e12),
    "Tesla T4": (65e12, 8.1e12),
}


def choose_device(name):
    """The torch.device of this rank for --device=name. Raises BadInput if it is not available."""
    kind = name
    if name == "auto":
        kind = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(kind)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # else the tensor below would also occupy GPU 0
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0][:120]
        fail(f"--device={name}: {why}; expected auto, cpu, cuda, cuda:1 or mps")
    return device


def choose_dtype(device):
    """(dtype's name, why) for --dtype=auto: 16 bits if the hardware computes in them."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16", f"compute capability {major}.{minor}"
    native = cpu_info()[1] & {"amx_bf16", "avx512_bf16"}
    if device.type == "mps" or native:
        return "bfloat16", f"native: {' '.join(native) or 'macOS 14'}"
    return "float32", "nothing smaller is native here"


def choose_compile(device, flops, steps):
    """(whether to compile, why) for --compile=auto. flops (may be NaN), steps: of the run."""
    if device.type == "cuda":  # it takes most of a minute
        return steps >= 1000, "worth it from 1,000 steps"
    is_worth_it = device.type == "cpu" and flops >= 5e13
    return is_worth_it, f"{flops:.1e} FLOPs; on a CPU worth it from 5e+13"


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
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6") if device.type == "cpu" else None
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: shrink only if 2 GiB at its end are free
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: grow by 64 MiB more than is needed
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
    fields = {}
    if sys.platform == "linux":
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        fields = dict(re.findall(r"(?m)^(.*?)\s*: (.*)$", first_core))
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def describe(device):
    """What could explain a difference between two processes of a run."""
    is_gpu = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu_info()[0],
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "ranks": world_size(),
    }


def peak_flops(device, name, dtype):
    """(FLOP/s, source) for MFU, name: of the device. From its datasheet, else of the fastest of a few
    square matrix products in doubling sizes. NaN if those of the last size disagree by a quarter: the
    machine is busy."""
    known = PEAKS.get(name.removeprefix("NVIDIA "))
    if known:
        return known[dtype == torch.float32], f"datasheet of the {name}"
    rate, size, fastest = 0.0, 128, 0.0
    while size < 8192 and fastest < 0.004:  # the next one takes eight times as long
        size *= 2
        a = torch.ones(size, size, device=device, dtype=dtype)
        seconds = []
        for _ in range(10):
            began = time.perf_counter()
            torch.mm(a, a)[0, 0].item()  # item() waits for the device
            seconds.append(time.perf_counter() - began)
        fastest = min(seconds)
        rate = max(rate, 2 * size**3 / fastest)
    is_busy = rate > 1.25 * 2 * size**3 / median(seconds)
    return math.nan if is_busy else rate, f"measured, matrix products of up to {size}-cubed"


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


@dataclass
class Field:
    """How a known field of the rows of metrics.jsonl is shown."""

    name: str
    kind: str  # of its rows: train, eval
    heading: str = ""  # above its column, or before the number of an evaluation; "" = not printed
    form: str = ""  # how it is printed, a format of Python's
    plot: str = ""  # the title of its panel in a report; "" = none
    leaves: int = 0  # columns with the highest number leave a narrow terminal first; 0 = it stays

    def shown(self, value):
        return "n/a" if value is None else format(value, self.form)

    def column(self):
        return self.heading.rjust(len(self.shown(0)))


# fmt: off
FIELDS = {field.name: field for field in (  # in the order of columns and panels
    Field("loss",           "train", "loss",      "7.4f",  "loss (nats)"),
    Field("grad_norm",      "train", "norm",      "#8.3g", "gradient norm",         3),
    Field("lr",             "train", "lr",        "8.2e",  "learning rate",         4),
    Field("step_ms",        "train", "ms",        "7.1f",  "",                      2),
    Field("data_ms",        "train", "wait",      "6.1f",  "",                      7),
    Field("tokens_per_sec", "train", "tok/s",     "9,.0f", "throughput (tokens/s)"),
    Field("mfu",            "train", "mfu",       "6.1%",  "",                      5),
    Field("mem_gb",         "train", "GB",        "6.2f",  "memory (GB)",           6),
    Field("gpu_util",       "train", "",          "4.0f",  "GPU busy (%)"),
    Field("loss_scale",     "train", "scale",     "8.3g",  "loss scale",            5),
    Field("val_loss",       "eval",  "val loss",  ".4f"),
    Field("val_bpb",        "eval",  "bits/byte", ".4f",   "bits per byte"),
    Field("val_accuracy",   "eval",  "accuracy",  ".1%",   "accuracy (%)"),
    Field("val_tokens",     "eval",  "tokens",    ","),
)}
# fmt: on
NOT_SHOWN = "kind step event finite skipped tokens sequences epoch best_val_loss".split()


def shown_fields(row, kind):
    """What a line says of a row, in order: the fields of the table, then a fork's own numbers."""
    known = [f for f in FIELDS.values() if f.heading and f.kind == kind and f.name in row]
    own = [name for name in row if name not in FIELDS and name not in NOT_SHOWN]
    return known + [Field(name, kind, name, "8.4g", leaves=1) for name in own]


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


class Table:
    """The lines of steps, under a header that is printed again whenever the columns change."""

    def __init__(self, max_steps):
        self.max_steps = max_steps
        self.header = ""
        self.row = {}  # the row that was printed last
        self.live_again = 0.0  # when the live line may be written again, time.monotonic()

    def print_row(self, row):
        """Print a row of metrics.jsonl. A field that is not in FIELDS gets a column of its own."""
        self.row = row
        start, left = self.progress(row["step"]), self.time_left(row["step"]).rjust(8)
        for limit in reversed(range(8)):
            fields = [field for field in shown_fields(row, "train") if field.leaves <= limit]
            cells = [field.shown(row[field.name]).rjust(len(field.column())) for field in fields]
            line = " ".join([start, *cells, left])
            if len(line) <= line_width():
                break
        columns = [field.column() for field in fields]
        header = " ".join(["step/total".ljust(len(start)), *columns, "    left"])
        if header != self.header:
            print0(header)
        self.header = header
        print0(line)

    def progress(self, step):
        return f"{step:>7}/{self.max_steps:<7}"

    def time_left(self, step):
        """At the speed of the row printed last."""
        return duration((self.max_steps - step) * self.row["step_ms"] / 1000)

    def print_live(self, step):
        """On a terminal, show the step below the last line, which the next line overwrites. All other
        numbers are of the row printed last: nothing is asked of the device."""
        if self.row and time.monotonic() > self.live_again and sys.stdout.isatty():
            self.live_again = time.monotonic() + 0.25
            loss = f"loss {self.row['loss']:.4f} at step {self.row['step']:,}"
            print0(f"{self.progress(step)}  {loss}  {self.time_left(step)} left", end="\r")

    def print_evaluation(self, row, is_best):
        """Print a row of an evaluation, with every further number that evaluate() returned."""
        fields = shown_fields(row, "eval")
        words = [f"{field.heading} {field.shown(row[field.name]).strip()}" for field in fields]
        best, green = ("  best", "\x1b[32m") if is_best else ("", "")
        print_wrapped(f"{self.progress(row['step'])} {'  '.join(words)}{best}", green)


def start_wandb(project, name, wandb_id, config):
    """The session of Weights & Biases that gets the rows; a run that resumes continues its own."""
    try:
        import wandb
    except ModuleNotFoundError:
        fail("--wandb_log=true: wandb is not installed; type: pip install wandb")
    session = wandb.init(project=project, name=name, id=wandb_id, resume="allow", config=config)
    session.define_metric("step")  # what a fork logs meanwhile moves wandb's own step
    session.define_metric("*", step_metric="step")
    return session

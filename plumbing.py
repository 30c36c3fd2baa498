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
import gc
import hashlib
import importlib.util
import json
import math
import mmap
import multiprocessing
import os
import pickle
import platform
import random
import re
import runpy
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

REPO = Path(__file__).resolve().parent


def age_of_process():
    """Seconds since it began, with what a script has imported before this file; 0 where unknown."""
    if sys.platform != "linux":
        return 0.0
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    began = (int(ticks) + 1) / os.sysconf("SC_CLK_TCK")  # a tick is 10 ms, and counted when it ends
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


AGE = age_of_process()
STARTED = time.perf_counter() - AGE
STARTED_AT = time.time() - AGE


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
os.environ.setdefault("NCCL_ALGO", "Ring")  # NVLS adds in any order (nccl#1497)
if "WORLD_SIZE" in os.environ:
    # else C++ warns of DistributedDataParallel's find_unused_parameters
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":  # else ranks, which have sessions of their own, survive torchrun
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
with contextlib.suppress(ValueError):  # in another thread than the main one
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a run answers it with a save
if os.getpid() == 1:  # in a container: the system gives process 1 no signal that it does not handle
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))

# ---- errors, and how a script ends ---------------------------------------------------------------


class BadInput(Exception):
    """Bad input, exit code 2: one line on what was found, what was expected, and what to type."""

    exit_code = 2


class Offline(BadInput):
    """A download was needed, and no server gave it in time."""


class RunFailed(Exception):
    """The run cannot continue, exit code 1: one line on what happened and what to do next."""

    exit_code = 1


def fail(message):
    raise BadInput(" ".join(str(message).splitlines()))


def end_script(kind, error, trace):
    """Print what ends a script: an error of ours as one line, any other as Python's traceback. What
    is wrong with the input all ranks find, and rank 0 says."""
    name = os.path.basename(sys.argv[0])
    if isinstance(error, KeyboardInterrupt):
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        exit_process(130)
    if not isinstance(error, BadInput | RunFailed):
        traceback.print_exception(error)
    elif os.environ.get("RANK", "0") == "0" or isinstance(error, RunFailed):
        print(f"{name}: {error}", file=sys.stderr)
    exit_process(getattr(error, "exit_code", 1))


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
    "ngram_rows": "it is a knob of examples/ngram.py: run that file with this config",
    "conv_width": "it is a knob of examples/ngram.py: run that file with this config",
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
    "out_dir": "type the folder alone, as in: python sample.py out/shakespeare",
    "warmup_iters": "here it is warmup_steps",
}


class Config(dict):
    """Every knob and its value. default: the values of the source; base: those without flags; typed:
    names that flags set; choices: the allowed values of some; files: the config files."""

    def __init__(self):
        self.typed, self.choices = set(), {}


def knobs_in(scope):
    """{name: value} of the lower-case globals of a script that are plain values."""
    plain, is_knob = (str, int, float, bool), re.compile("[a-z][a-z0-9_]*").fullmatch
    return {name: x for name, x in scope.items() if type(x) in plain and is_knob(name)}


def add_knob(scope, name, default, comment):
    """Add a knob to `scope`, the globals() of train.py."""
    is_taken = name in scope.keys() - scope["ADDED_KNOBS"].keys() or hasattr(builtins, name)
    if is_taken or not knobs_in({name: default}):
        fail(f"train.knob({name!r}, {default!r}, ...): expected a new name and a plain value")
    scope["ADDED_KNOBS"][name] = comment
    scope[name] = default


@contextlib.contextmanager
def configured(*scopes, argv=None, words=None):
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, put them back.

    Flags win over config files, wherever they stand. Present values are the defaults, so that
    `train.max_steps = 5` takes effect. words: a list for the arguments that are neither flags nor
    config files; None refuses them. Raises BadInput, and sets nothing, if an argument is invalid."""
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        print_help(scopes[-1])
        raise SystemExit(0)
    config = Config()
    for scope in scopes:
        config |= knobs_in(scope)
        config.choices |= scope.get("CHOICES", {})
    config.argv = argv
    config.default = dict(config)
    config.files = [word for word in argv if word.endswith(".py") and word[0] != "-"]
    for path in config.files:
        for name, value in read_config(path, config).items():
            config[name] = accept(f"{path}: {name} = {value!r}", name, value, config)
    config.base = dict(config)
    for word in argv:
        if word[:1] == "-":
            name, _, value = word.removeprefix("--").partition("=")
            config[name] = accept(word, name, value, config)
            config.typed.add(name)
        elif word not in config.files:
            if words is None:
                fail(f"unexpected argument {word!r}; write config/FILE.py or --key=value")
            words.append(word)
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(setting(scope, config))
        yield config


@contextlib.contextmanager
def setting(scope, values):
    """Set those of `scope`, globals() of a script, that `values` names, and put them back."""
    before = {name: scope[name] for name in values if name in scope}
    try:
        scope.update({name: values[name] for name in before})
        yield
    finally:
        scope.update(before)


def read_config(path, config):
    """{name: value} that a config file sets; it sees the knobs as set so far, and may set _names."""
    if not os.path.isfile(path):
        fail(f"no config file {path} in {os.getcwd()}")
    values = runpy.run_path(path, config)
    found = {n: x for n, x in values.items() if n[0] != "_" and x is not config.get(n)}
    unknown = [f"{name} ({hint_for(name, config)})" for name in found if name not in config]
    if unknown:
        fail(f"{path}: unknown names: {', '.join(unknown)}")
    return found


def hint_for(name, config):
    """What to type instead of a name that is no knob."""
    hint = "--help lists every name; one of your own, in a file, begins with _"
    for near in difflib.get_close_matches(name, config, n=1):
        hint = f"did you mean {near}?"
    return NAMES_ELSEWHERE.get(name, hint)


def accept(written, name, value, config):
    """`value` as the type of the knob. Raises BadInput that quotes `written`: the flag, or the file
    and the assignment in it."""
    if name not in config:
        fail(f"unknown name {name!r} in {written}; {hint_for(name, config)}")
    default, text = config.default[name], show(value)
    kind = type(default)
    choices = config.choices.get(name, (True, False) if kind is bool else ())
    for choice in choices:
        if show(choice) == text.lower():
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
    print0(scope["__doc__"])
    knobs = r"(?m)^(?:# (?!isort)\w|#  |[a-z]\w*(?:: \w+)? = (?!\[)).*"
    width = shutil.get_terminal_size((100, 24)).columns
    for line in re.findall(knobs, top) + added:
        print0(textwrap.fill(line, width, subsequent_indent=12 * " "))


# ---- files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path):
    """Yields a file to write. It is then fsynced and takes the place of `path` in one rename; on an
    error, `path` stays as it was."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a network disk
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
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
    with replacing(path) as file:
        file.write(json.dumps(clean(value), indent=1, default=repr).encode() + b"\n")


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
COMPUTED = """loss grad_norm lr loss_scale skipped tokens sequences epoch
    val_loss val_accuracy val_bpb val_tokens best_val_loss""".split()


class Folder:
    """out/NAME, which lock() keeps for this process until close(), and its log, which only
    rank 0 writes. Rows past the checkpoint from which a run goes on stay until the first new one,
    which takes their place in one rename: no row stands twice. What cannot be written waits."""

    lock_file = log = about = None  # about: what run.json says
    kept = None  # of a log in which old rows stand: the lines without them
    waiting, has_new = b"", False  # lines that are not in the log yet; whether one is a new row's

    def __init__(self, path):
        self.path = Path(path)
        self.changing = threading.Lock()  # the thread that saves logs events

    def close(self):
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
        self.lock_file = None
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

    def require_own(self):
        """Raises OSError if the folder is gone, or another run has made one in its place."""
        if not os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self.lock_file.fileno())):
            raise OSError("another run has taken the place of this folder")

    def begin(self, about, files, place, is_another, is_restart):
        """For a run that starts at `place`, (step, evaluated), or (-1, -1): lock the folder, write
        run.json and the code, open the log. Returns its rows past that place."""
        if is_restart and (self.path / "run.json").exists():
            os.rename(self.path, self.fresh(".old_", 1))
            self.lock()
        if not self.lock_file:
            self.lock()
        for leftover in self.path.glob("*.tmp"):  # of a killed run
            leftover.unlink()
        if is_another and (self.path / "best.pt").exists():
            os.replace(self.path / "best.pt", self.path / "best_before.pt")
        keep_code(self.path / "code", files)
        first = {"start": now(), "wandb_id": os.urandom(4).hex()}
        earlier = read_json(self.path / "run.json") if place[0] >= 0 else {}
        self.about = first | earlier | about | {"end": None, "ended": None}  # if it is killed
        write_json(self.path / "run.json", self.about)

        path = self.path / "metrics.jsonl"
        self.log = open(path, "ab", buffering=0)
        rows = read_rows(path)
        kept = b"".join(as_line(row) for row in rows if not is_past(row, *place))
        if kept != path.read_bytes():  # old rows, or half a line that a kill has left
            self.kept = kept
        return [row for row in rows if is_past(row, *place)]

    def end(self, ended, state):
        self.about |= {"end": now(), "ended": ended, "state": state}
        with contextlib.suppress(OSError):  # the disk is full, or the folder is no longer ours
            self.require_own()
            write_json(self.path / "run.json", self.about)

    def sync(self):
        """Raises OSError if the folder is not ours, or if rows still wait for room on the disk."""
        self.require_own()
        with self.changing:
            self.flush()
            os.fsync(self.log.fileno())

    def write_row(self, row):
        """Append a row. What cannot be written waits; the next save says why."""
        if not self.log:
            return
        with self.changing, contextlib.suppress(OSError):
            self.waiting += as_line(row)
            self.has_new |= row["kind"] != "event"
            self.flush()

    def flush(self):
        """Write what waits. Raises OSError if there is no room on the disk."""
        if self.kept is not None:
            if not self.has_new:
                return
            self.require_own()
            path = self.path / "metrics.jsonl"
            with replacing(path) as file:
                file.write(self.kept + self.waiting)
            self.log = open(path, "ab", buffering=0)
            self.kept, self.waiting = None, b""
        while self.waiting:
            self.waiting = self.waiting[self.log.write(self.waiting) :]


def as_line(row):
    return json.dumps(clean(row)).encode() + b"\n"


def read_rows(path):
    """The rows of a metrics.jsonl, without half a line that a kill has left; none without a file."""
    rows = []
    for line in Path(path).read_bytes().splitlines() if os.path.exists(path) else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
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


def first_difference(old, new):
    """The first field that differs, in any bit, between two rows of one kind and step, among those
    that follow from seed and code: {step, field, then, now}. None if there is none."""
    new = clean(new)
    for name in COMPUTED:
        then, now = old.get(name), new.get(name)
        if then != now:
            return {"step": new["step"], "field": name, "then": then, "now": now}
    return None


class Check:
    """Was a resume exact? Compares rows that are computed again with old ones, which a killed process
    has logged past the checkpoint. begin: its step."""

    def __init__(self, old_rows, begin):
        self.old = {key_of(row): row for row in old_rows if row["kind"] != "event"}
        self.last = max((step for _, step in self.old), default=begin)
        self.found = {"from": begin, "steps": 0, "first_difference": None}

    def see(self, row):
        """Returns whether the result is known."""
        old, found = self.old.pop(key_of(row), None), self.found
        if old:
            found["steps"] += row["kind"] == "train"
            found["first_difference"] = first_difference(old, row)
        return bool(found["first_difference"]) or not self.old or row["step"] > self.last

    def result(self, changed):
        """(what is printed, the fields of an event)."""
        words, difference = "nothing to compare with", self.found["first_difference"]
        if self.found["steps"]:
            words = f"{self.found['steps']:,} steps computed again, every loss and norm the same"
        if difference:
            words = "other numbers from step {step:,} on: {field} {then} then, {now} now; changed since: "
            words = words.format(**difference) + (change_words(changed) or "nothing known")
        return f"resumed at step {self.found['from']:,}: {words}", self.found


def folder_name(config, free, script):
    """The out_dir of a flag; else that of the config file and, in the order of the knobs, what was
    typed, changes a value and makes another run: out/mine,n_layer=2. A script lab.py makes out/run
    to out/lab, and the out_dir of a config file to out/mine,lab."""
    if "out_dir" in config.typed:
        return config["out_dir"]
    parent, name = os.path.split(config["out_dir"])
    if script and config["out_dir"] == config.default["out_dir"]:
        name = script.stem
    elif script:
        name += f",{script.stem}"
    named = config.typed - free | (config.typed & {"max_steps"})
    sizes = {each["batch_size"] * each["accum_steps"] for each in (config, config.base)}
    if len(sizes) == 1:  # the same batch in other parts
        named -= {"batch_size", "accum_steps"}
    for key in config:
        if key in named and config[key] != config.base[key]:
            value = show(config[key])
            if key == "init_from":  # the folder and the file of the run that it names
                value = "-".join(Path(value).resolve().with_suffix("").parts[-2:])
            name += f",{key}={value.replace('/', '-')}"
    # file systems allow 255 bytes
    return os.path.join(parent, name if len(name) <= 150 else f"{name[:130]},{hash_of(name)}")


# ---- the code of a run ---------------------------------------------------------------------------

TOOLS = "train plumbing prepare_data sample report check checks replay bench".split()
INSTALLED = re.compile(r"-packages|lib.python\d|torchinductor")  # Python's, a package, or compiled
script = Path(sys.argv[0]).resolve()  # which Python runs, or of a fork, which a tool was given


def script_path():
    """`script` if it is a file of the user's: not train.py or a tool, nor a notebook's."""
    is_ours = script.parent == REPO and script.stem in TOOLS
    is_own = script.suffix == ".py" and script.is_file() and not INSTALLED.search(str(script))
    return script if is_own and not is_ours else None


def code_files(train_file):
    """{name: path} of what computes a run: train.py, model.py, optim.py, dataset.py, the script, and
    the .py files beside it that are loaded; but not plumbing.py and the tools."""
    main = script_path() or Path(train_file).resolve()
    files = {path.name: path for path in (Path(train_file).resolve(), main)}
    for name, module in sys.modules.copy().items():
        path = getattr(module, "__file__", None) or ""
        # to resolve a thousand paths takes a tenth of a second
        if INSTALLED.search(path) or not path.endswith(".py") or name.partition(".")[0] in TOOLS:
            continue
        path = Path(path).resolve()
        if path.is_relative_to(main.parent) and path.is_file():  # torch has a mere name
            files[str(path.relative_to(main.parent))] = path
        elif name in ("model", "optim", "dataset"):
            files[path.name] = path
    return files


def require_unedited(files):
    """Raises BadInput if one of `files`, {name: path}, has changed since this process read it: the run
    would keep, and be known by, code that it does not run."""
    for name, path in files.items():
        if path.stat().st_ctime > STARTED_AT:
            fail(f"{name} was edited while this run started; type the same command again")


def keep_code(folder, files):
    """Write the text of `files`, and the diff of the repository, to `folder`. A file that stands
    there with another text is kept under a second name, with a part of its hash."""
    texts = {name: path.read_bytes() for name, path in files.items()}
    texts["git.diff"] = git("diff", "HEAD")
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
        beside = script.parent / name  # not loaded by now
        path = files.get(name, beside if beside.is_file() else REPO / name)
        text = path.read_bytes() if path.is_file() else b""
        now = hashlib.sha256(text).hexdigest()
        if now != digest and not same_tree(texts.get(digest, b""), text, knobs):
            changed[name] = [digest[:8], now[:8]]
    return changed


def same_tree(one, other, knobs):
    """Whether two texts differ in comments, docstrings, layout and values of knobs alone."""
    return bool(one and other) and statements(one, knobs) == statements(other, knobs)


def statements(text, knobs):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            node.value.value = None
    sets = re.compile(r"(?:train\.)?(\w+)(?:: \w+)? = |train\.knob\('(\w+)'").match
    kept = []
    for line in map(ast.unparse, tree.body):
        match = sets(line)
        if not match or match[match.lastindex] not in knobs:
            kept.append(line)
    return kept


def changes(saved, facts, files, code):
    """({name: [then, now]} of what has changed since a checkpoint, and of what makes another run: a
    knob that is not free, data, code, the script). facts: what checkpoints say of a run; files, code: see
    changed_code()."""
    old, new = saved["identity"], facts["identity"]
    then = saved["config"] | saved["run"] | old["knobs"] | old["data"]
    now = facts["config"] | facts["run"] | new["knobs"] | new["data"]
    for name in ("out_dir", "data_dir", "resume"):
        del now[name]
    code = changed_code(old["code"], files, code, facts["config"])
    changed = {name: [then[name], x] for name, x in now.items() if then.get(name, x) != x} | code
    fixed = {"script", *old["knobs"], *new["knobs"], *new["data"], *code}
    return changed, {name: changed[name] for name in changed if name in fixed}


def say_what_is_beside(folder, facts):
    """Print the same run of another length, if it lies beside the folder of one that begins."""
    lengths = {"decay_steps": 0, "warmup_steps": 0}
    for path in folder.path.parent.glob("*/run.json"):
        other, name = read_json(path), shown(path.parent)
        knobs = other.get("identity", {}).get("knobs", {})
        is_same = knobs | lengths == facts["identity"]["knobs"] | lengths
        if is_same and other["config"]["max_steps"] != facts["config"]["max_steps"]:
            step = other["state"]["step"]
            print0(f"{name} has this run at step {step:,}; to go on there add --out_dir={name}")


def git(*words):
    """What git prints of this repository, never of one around it; nothing where there is none."""
    command = ["git", "-C", REPO, "--git-dir=.git", *words]
    try:
        return subprocess.run(command, capture_output=True).stdout
    except OSError:  # git is not installed
        return b""


def git_commit():
    """Its commit, with -dirty if files differ. The Docker image has GIT_COMMIT, not .git."""
    found = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").decode().strip()
    return found or os.environ.get("GIT_COMMIT")


# ---- what tools read: a fork's script, a checkpoint, weights -------------------------------------

FORMAT = 3  # of a checkpoint


def script_among(words):
    """(path of a fork's script or "", the other words) of a command; None: of this one. It is
    --script=FILE, or the first FILE.py that imports train, or is a copy of it: a config file does not."""
    words = sys.argv[1:] if words is None else words
    is_script = re.compile(r"(?m)^(import|from) .*\b(train|plumbing)\b").search
    for word in words:
        path = word.removeprefix("--script=")
        is_file = path.endswith(".py") and os.path.isfile(path)
        if path != word or (is_file and is_script(Path(path).read_text(encoding="utf-8"))):
            return path, [other for other in words if other != word]
    return "", words


def load_script(path, train):
    """Execute the script at `path`, once. Returns the module that holds its loop: `train`, or the
    script itself if it is a copy of train.py. Raises BadInput."""
    global script
    if not path:
        return train
    if not os.path.isfile(path):
        fail(f"--script={path}: there is no such file")
    script = Path(path).resolve()
    sys.path.insert(0, str(script.parent))
    refuse = partial(fail, f"{path}: write `if __name__ == '__main__':` above its train.main()")
    with setting(vars(train), {"main": refuse}):
        module = importlib.import_module(script.stem)
    return module if hasattr(module, "FRESH_STATE") else train


def require_script(folder, facts):
    """Raises BadInput if a script trained the run in `folder`, and none was loaded: no file is executed
    because a run names it. facts: what a checkpoint or run.json says."""
    name = facts["run"]["script"]
    if name != "train.py" and not script_path():
        fail(f"{folder} is a run of {name}; if that is your code, add --script=PATH/{name}")


class Damaged(BadInput):
    """The file is no checkpoint, or was damaged after it was written."""


def verify(path):
    """Compare the checksums of the zip that a checkpoint is, because torch.load loads a flipped bit
    without an error. Raises Damaged, or OSError if the file cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_whole = archive.testzip() is None
    except Exception as error:  # damage surfaces as any of half a dozen types
        cause = error.__context__ or error
        if isinstance(cause, OSError):
            raise cause from None
        is_whole = False
    if not is_whole:
        raise Damaged(f"{path} is damaged, cut off, or no checkpoint")


def read_checkpoint(path):
    """The dict in a checkpoint, its tensors on the CPU; no code in it can run. Raises Damaged, or
    BadInput if it has another format."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why, hint = " ".join(str(error).split()), "keep tensors, numbers and text in what is saved"
        raise Damaged(f"{path} cannot be read back; {hint}: {why[:200]}") from error
    if saved.get("format") != FORMAT:
        commit = saved.get("run", {}).get("git_commit", "that its run.json names")
        fail(f"{path} has another format than this code reads; check out the commit {commit}")
    return saved


def digest_of_state(parts):
    """SHA-256 of all in a checkpoint on which the next steps depend."""
    digest = hashlib.sha256()
    names = ("model", "optimizer", "scaler", "ema", "extra", "rng")
    hashed = {name: parts[name] for name in names}
    hashed["optimizer"] = parts["optimizer"]["state"]  # the groups are not loaded
    hashed["state"] = parts["state"] | {"seconds": {}}
    for path, leaf in tree_flatten_with_path(hashed)[0]:
        digest.update(f"{path}".encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def restore_optimizer(optimizer, saved):
    """Put back the state of an optimizer, {number of a weight: {name: tensor or value}}."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {i: {k: shard_like(weights[i], x) for k, x in saved[i].items()} for i in saved}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    for i, moments in state.items():  # torch has cast them to the dtype of the weight
        own = optimizer.state[weights[i]]
        own |= {k: x.to(own[k].device) for k, x in moments.items() if torch.is_tensor(x)}


def write_copies(folder, parts, names):
    """Write a checkpoint to `folder` under all of `names`."""
    first = folder / names[0]
    with replacing(first) as file:
        try:
            torch.save(parts, file)
        except RuntimeError as error:  # of torch's writer; the cause is a full disk
            raise error.__context__ or error from None
    for name in names[1:]:
        temporary = folder / f"{name}.tmp"
        try:
            os.link(first, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(first, temporary)
        os.replace(temporary, folder / name)


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


def read_weights(path):
    """({name: tensor}, metadata_of() the run) of a checkpoint or a .safetensors file."""
    try:
        if path.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
        saved = read_checkpoint(path)
        return evaluated_weights(saved), metadata_of(saved)
    except Exception as error:
        fail(f"{path}: {error}; expected a checkpoint or .safetensors; to resume, leave it out")


def evaluated_weights(saved):
    """{name: weight} of a checkpoint, the averages where there are any: of tied weights, which are
    equal in every bit, only one has an average."""
    raw, averages = saved["model"], saved["ema"]
    weights = raw | averages
    for name in raw.keys() - averages.keys():
        for other, average in averages.items():
            if torch.equal(raw[other], raw[name]):
                weights[name] = average
    return weights


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
    asked for a checkpoint."""

    stop, save = 0, False

    def __enter__(self):
        handled = [*STOPPING, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            handled.remove(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.handle) for number in handled}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        if number == signal.SIGUSR1:
            self.save = True
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
    "A Dataset of rows, or a list, becomes one of batches by dataset.Shuffled(rows, train.seed), for "
    "validation by dataset.InOrder(rows, train.seed); of a stream write list(stream)"
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
        batches = iter(loader)
        if workers:  # torch's handler would raise the death of one in the middle of a step
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield from batches
    except (AttributeError, TypeError, RuntimeError, OSError, EOFError) as error:
        words = str(error)
        if not workers or "Caught" in words:  # an error of the dataset
            raise
        hint = "the same command resumes"
        if "pickle" in words:  # by a worker that is spawned
            hint = "in place of lambda name functions by def, or write --num_workers=0"
        raise RunFailed(f"a data worker was killed, or cannot start ({words}); {hint}") from error


def begin_worker(knobs, worker):
    """In a worker: set the knobs, ignore what a scheduler sends to all processes, since the run
    decides when its workers end, and end with the run."""
    for module, values in knobs.items():
        vars(sys.modules[module]).update(values)
    for number in (*STOPPING, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_run, daemon=True).start()


def end_with_run():
    multiprocessing.parent_process().join()
    os._exit(1)


def kill_workers():
    """Python would end workers by SIGTERM, which they ignore, and wait for them."""
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
    kinds = {name: getattr(x, "shape", type(x).__name__) for name, x in (numbers or {}).items()}
    found = {name: kind if isinstance(kind, str) else tuple(kind) for name, kind in kinds.items()}
    if not found.keys() >= {*needed} or {*found.values()} - {(), (1,), "int", "float", "bool"}:
        names = ", ".join(dict.fromkeys(needed))
        raise RunFailed(f"{source}: found {found}; expected scalars, with {names}")
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
    # Kept to the end: its destructor waits for threads which may wait for Python's lock
    joined.group = dist.group.WORLD
    sys.excepthook = end_script  # torch's own, set here, would lose what it prints by os._exit()
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
        raise result
    return result


def sync_buffers(model):
    """Give all ranks the buffers of rank 0, as DistributedDataParallel does before a step."""
    for buffer in model.buffers() if world_size() > 1 else ():
        dist.broadcast(to_local(buffer.data), 0)


def to_local(tensor):
    """This rank's part of a sharded tensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor):
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
    found = name
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        device = torch.device(found)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or int(os.environ.get("LOCAL_RANK", 0)))
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0][:120]
        fail(f"--device={name}: {why}; expected auto, cpu, cuda, cuda:1 or mps")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prepare_torch(device.type != "mps" if deterministic == "auto" else deterministic, device)
    return device


def choose_dtype(name, device, so_far):
    """(dtype's name, why) for --dtype=name. auto: as in the run so far, else 16 bits if the hardware
    computes in them."""
    if name != "auto":
        return name, "as given"
    if so_far:
        return so_far, "as in the run so far"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16", f"compute capability {major}.{minor}"
    if device.type == "mps" or cpu_info()[1] & {"amx_bf16", "avx512_bf16"}:
        return "bfloat16", "native here"
    return "float32", "nothing smaller is native"


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
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**26)  # M_TOP_PAD
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
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s*(\d+)", status)[1]) / 1e9
    return None


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
        "host": platform.node(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "world_size": world_size(),
        "script": (script_path() or REPO / "train.py").name,
        "git_commit": git_commit(),
    }


def peak_flops(device, name, dtype):
    """(FLOP/s, in words) for MFU, name: of the device. From its datasheet, else of square matrix
    products, large enough that one takes 4 ms. NaN if they disagree by a quarter."""
    known = PEAKS.get(name.removeprefix("NVIDIA "))
    if known:
        rate = known[dtype == torch.float32]
        return rate, f"{rate / 1e12:.4g} TFLOP/s (datasheet of the {name})"
    size, seconds = 128, [0.0]
    while size < 8192 and min(seconds) < 0.004:  # the next one takes eight times as long
        size *= 2
        a = torch.ones(size, size, device=device, dtype=dtype)
        times = [time.perf_counter()]
        for _ in range(10):
            torch.mm(a, a)[0, 0].item()  # item() waits for the device
            times.append(time.perf_counter())
        seconds = np.diff(times)
    if np.median(seconds) > 1.25 * min(seconds):
        return math.nan, "n/a, as repeated timings disagree: the machine is busy"
    rate = 2 * size**3 / min(seconds)
    return rate, f"{rate / 1e12:.3g} TFLOP/s (measured, products of matrices of {size})"


def float64(number):
    """A scalar in float64; on MPS, which has none, on the CPU."""
    number = torch.as_tensor(number).detach()
    return (number.cpu() if number.device.type == "mps" else number).double()


class Clock:
    """Adds up state["seconds"] by kind: lap(kind) counts the time since the previous lap."""

    def __init__(self, state, started):
        self.state = state
        self.last = started

    def lap(self, kind):
        elapsed = time.perf_counter() - self.last
        self.last += elapsed
        seconds = self.state["seconds"]
        seconds[kind] = seconds.get(kind, 0.0) + elapsed
        return elapsed


# ---- the console ---------------------------------------------------------------------------------

FIELDS = {  # of the rows of metrics.jsonl: heading, format
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
    "kind step skipped tokens sequences epoch gpu_util best_val_loss".split()
)  # not shown


def shown_fields(row):
    """[(heading, number as text)] of a row, in the order of FIELDS, then a fork's own numbers."""
    cells = []
    names = [name for name in row if FIELDS.get(name, name)]
    for name in sorted(names, key=lambda name: [*FIELDS, name].index(name)):
        heading, form = FIELDS.get(name, (name, "8.4g"))
        text = "n/a" if row[name] is None else format(row[name], form)
        cells.append((heading, text.rjust(len(format(0, form)))))
    return cells


def print0(*words, end="\n"):
    """Print on rank 0 only, without control characters, with which a model or a file could type into
    the terminal. What cannot be written is dropped."""
    if os.environ.get("RANK", "0") != "0":  # torchrun sets it
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a full disk, a closed pipe
        text = printable(" ".join(map(str, words)))
        if sys.stdout.isatty():
            text = f"\x1b[K{text}"  # clear the rest of the line
        print(text, end=end, flush=True)


def printable(text):
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "", text)


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


def to_paste(tool, *words):
    """The command that runs a tool of this repository, with the script of the run."""
    own = script_path()
    words = [*words, shown(own)] if own else words
    return shlex.join(["python", shown(REPO / tool), *map(str, words)])


PLAN = """\
run      {folder}
model    {model}; {parameters:,} parameters
data     {data[name]}: {train_rows:,} sequences, {val_rows:,} to validate
batch    {config[batch_size]} x {config[accum_steps]} = {identity[knobs][batch]:,} sequences of \
{config[block_size]:,}; ranks: {run[world_size]}
steps    {config[max_steps]:,}, {config[warmup_steps]:,} of warmup; {config[optimizer]}, \
{config[schedule]} {config[peak_lr]:g} to {last_lr:g}
device   {run[device]}, {run[threads]} threads, deterministic {run[deterministic]}
dtype    {config[dtype]} ({why[dtype]})
compile  {config[compile]} ({why[compile]})"""


class Table:
    """The lines of steps, under a header that is printed again whenever the columns change."""

    row, header, live_again = {}, "", 0.0

    def __init__(self, max_steps):
        self.max_steps = max_steps

    def print_row(self, row):
        """Print a row of metrics.jsonl. A field that is not in FIELDS gets a column of its own."""
        self.row = row
        cells = [("   step/total", self.progress(row)), *shown_fields(row)]
        cells.append(("   left", self.left(row)))
        header = " ".join(heading.rjust(len(text)) for heading, text in cells)
        if header != self.header:
            print0(header)
        self.header = header
        print0(*(text.rjust(len(heading)) for heading, text in cells))

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
            numbers = f"loss {self.row['loss']:.4f}  {self.left(state)} left"
            print0(self.progress(state), numbers, end="\r")

    def print_evaluation(self, row, is_best):
        """Print a row of an evaluation, with every further number that evaluate() returned."""
        words = "  ".join(f"{heading} {text.strip()}" for heading, text in shown_fields(row))
        print0(self.progress(row), words, " best" if is_best else "")


def require_wandb():
    if not importlib.util.find_spec("wandb"):
        fail("--wandb_log=true: wandb is not installed; type: pip install wandb")


def start_wandb(project, name, about):
    """The session of Weights & Biases that gets the rows; a run that resumes continues its own. about:
    what run.json says."""
    import wandb

    how = {"id": about["wandb_id"], "resume": "allow", "config": about["config"]}
    session = wandb.init(project=project, name=name, **how)
    session.define_metric("step")  # what a fork logs meanwhile moves wandb's own step
    session.define_metric("*", step_metric="step")
    return session

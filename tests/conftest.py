"""What the tests of the loop share: a small real text, runs in their own processes, fingerprints.

Most of the three seconds of a small run are `import torch`. So one helper process imports train.py
once and forks for each run, which starts at once but is still a process with its own device state,
random numbers, signals and exit code. `python_train` runs the real command line.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

# For this process and all that it starts, before torch is imported. Most runs here are so small
# that several threads only wait for each other; test_resume.py has one that needs two. On a busy
# machine, threads that spin while they wait make a run take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What one test has compiled, the others load: also those of another worker, and of the next session.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_tests_{os.getuid()}"
)

import torch
from sources import scope_of, stop_at

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
REPO = Path(__file__).resolve().parent.parent
HONEST_DATA = Path(os.environ.get("HONEST_DATA") or os.devnull)  # which holds no file
if (HONEST_DATA / "tiktoken_cache").is_dir():
    os.environ["TIKTOKEN_CACHE_DIR"] = str(HONEST_DATA / "tiktoken_cache")
needs_gpt2 = pytest.mark.skipif(
    not (HONEST_DATA / "tiktoken_cache").is_dir(), reason="HONEST_DATA has no folder tiktoken_cache"
)
TINY = {  # flags of every run, unless a test overrides them
    "dataset": "small",
    "device": "cpu",
    "dtype": "float32",
    "compile": "false",
    "n_layer": 1,
    "n_embd": 32,
    "n_head": 2,
    "block_size": 16,
    "batch_size": 8,
    "max_steps": 12,
    "warmup_steps": 3,
    "eval_interval": 0,
    "save_interval": 0,
    "log_interval": 5,
    "report": "false",
}
# Of these files, what starts no run is marked `quick`.
QUICK = "config console folder loop model optim repository resume witness".split()
RUNS = {"zygote", "python_train", "start_train"}  # the fixtures that start one
WINDOWS = 167  # windows of 16 tokens in an epoch of the small text: 20.9 batches of 8


# ---- the session ---------------------------------------------------------------------------------


def pytest_xdist_auto_num_workers(config):
    """-n auto: a worker for each core. On one core, on a GPU, or within a test: no workers."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    within_a_test = "PYTEST_XDIST_WORKER" in os.environ
    if cores == 1 or within_a_test or config.option.markexpr == "gpu":
        return 0
    return cores


def pytest_collection_modifyitems(items):
    for item in items:
        starts_one = item.get_closest_marker("slow") or RUNS.intersection(item.fixturenames)
        if item.path.stem.removeprefix("test_") in QUICK and not starts_one:
            item.add_marker(pytest.mark.quick)


def first(count, cases):
    """`cases` of a parametrize, of which those after the first `count` are slow."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    slow = pytest.mark.slow
    return [pytest.param(*case, marks=slow if n >= count else ()) for n, case in enumerate(cases)]


@dataclasses.dataclass
class Done:
    """A run that has ended. returncode: as in a shell, 128 + n after signal n."""

    out_dir: Path
    returncode: int
    stdout: str
    stderr: str

    @classmethod
    def of(cls, out_dir, number, *output):
        return cls(out_dir, number if number >= 0 else 128 - number, *output)

    @property
    def facts(self):
        return json.loads((self.out_dir / "run.json").read_text())

    def checkpoint(self, step):
        return self.out_dir / f"ckpt_{step:08}.pt"

    def fingerprint(self, step):
        return fingerprint(self.checkpoint(step))

    def rows(self, kind=None):
        return read_rows(self.out_dir, kind)


# ---- data ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A folder that holds the dataset `small`: 3,000 characters of Python's own documentation."""
    return make_dataset(tmp_path_factory.mktemp("data"), "small", pydoc_text()[:3000])


def make_dataset(folder, name, text, tokenizer="char"):
    """Makes folder/NAME of a text, which is left in folder/NAME.txt. Returns the folder."""
    from prepare_data import prepare

    (folder / f"{name}.txt").write_text(text)
    prepare(name, folder, str(folder / f"{name}.txt"), tokenizer)
    return folder


def pydoc_text():
    from pydoc_data.topics import topics

    return "".join(topics[topic] for topic in sorted(topics))


# ---- runs ----------------------------------------------------------------------------------------


def run_python(*words, cwd=REPO, timeout=600, **environment):
    """`python WORDS`, ended: its returncode, stdout and stderr."""
    command = [sys.executable, *map(str, words)]
    how = {"cwd": cwd, "env": os.environ | environment, "timeout": timeout}
    return subprocess.run(command, capture_output=True, text=True, **how)


@pytest.fixture(scope="session")
def zygote():
    """The helper process, which has imported train.py and forks for each run."""
    command = [sys.executable, __file__]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    yield server
    server.stdin.close()
    server.wait()


def codes(done):
    return done.stdout.split("CODES ")[1].splitlines()[0]


def expect(code, done):
    """done, if that is the exit code of the run, and of each of its ranks; code=None: any."""
    found = {done.returncode, *map(int, codes(done).split() if "CODES " in done.stdout else ())}
    assert code is None or found == {code}, f"exit codes {found}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="session")
def train_in(zygote, data_dir):
    """train_in(folder, out_dir, *flags, code=0, env, before, timeout, cwd=folder, repo=REPO)
    -> Done.

    Runs train.main() in a forked process. out_dir: a name in `folder`, or a path. flags:
    "--key=value", which override TINY. code: the exit code that it must have, None = any. before:
    Python source that runs in that process first, in scope_of(train), such as `stop_at(5)`. cwd:
    its working directory. repo: a folder whose train.py replaces this repository's.
    """

    def run(folder, out_dir, *flags, code=0, env=None, before="", timeout=100, cwd=None, repo=REPO):
        out_dir = folder / out_dir
        files = [folder / f".{name}" for name in ("stdout", "stderr")]
        request = {
            "argv": arguments(out_dir, data_dir, flags),
            "files": list(map(str, files)),
            "env": env or {},
            "cwd": str(cwd or folder),
            "before": before,
            "timeout": timeout,
            "repo": str(repo),
        }
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        number = int(zygote.stdout.readline())
        return expect(code, Done.of(out_dir, number, *(file.read_text() for file in files)))

    return run


@pytest.fixture(scope="session")
def once(train_in, tmp_path_factory):
    """once(*flags, before="") -> Done: a run that tests share, made once; they only read it."""
    folder = functools.partial(tmp_path_factory.mktemp, "once")
    return functools.cache(lambda *flags, **how: train_in(folder(), "run", *flags, **how))


@pytest.fixture
def run_train(train_in, tmp_path):
    """run_train(out_dir, *flags, ...) -> Done: train_in with this test's tmp_path as the folder."""
    return functools.partial(train_in, tmp_path)


@pytest.fixture
def straight_and_resumed(run_train):
    """straight_and_resumed(*flags, step, name="SIGKILL", last=12, ...) -> the run that nothing
    interrupts, and one that the signal `name` ends in `step` and that is started again. After the
    `last` step they have the same bits."""

    def run(*flags, step, name="SIGKILL", last=12, before="", **how):
        straight = run_train("straight", *flags, before=before, **how)
        code = 128 + getattr(signal, name)
        run_train("run", *flags, before=before + stop_at(step, name), code=code, **how)
        resumed = run_train("run", *flags, before=before, **how)
        assert events(resumed, "resume")
        assert all(row["equal"] == row["compared"] for row in events(resumed, "resume_checked"))
        assert resumed.fingerprint(last) == straight.fingerprint(last)
        return straight, resumed

    return run


@pytest.fixture
def start_train(data_dir, tmp_path):
    """start_train(out_dir, *flags, env, launcher) -> a running Popen in a session of its own.

    Its output goes to the path in its attribute `log`. It is killed at the end of the test.
    """
    started = []

    def start(out_dir, *flags, env=None, launcher=(sys.executable,)):
        log = tmp_path / f".log_{len(started)}"
        process = subprocess.Popen(
            [*launcher, *arguments(tmp_path / out_dir, data_dir, flags)],
            cwd=tmp_path,
            env=os.environ | (env or {}),
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.log = log
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def python_train(start_train, tmp_path):
    """python_train(out_dir, *flags, code=0, timeout=100, env, launcher) -> Done: the real command.
    Its standard output and error are one text."""

    def run(out_dir, *flags, code=0, timeout=100, **how):
        process = start_train(out_dir, *flags, **how)
        process.wait(timeout)
        text = process.log.read_text()
        return expect(code, Done.of(tmp_path / out_dir, process.returncode, text, text))

    return run


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(megabytes) -> a file system of that size; what is mounted there goes with the
    test."""
    folder = tmp_path / "disk"

    def mount(megabytes):
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root")
        return folder

    yield mount
    while not subprocess.run(["umount", "-l", folder], capture_output=True).returncode:
        pass


def arguments(out_dir, data_dir, flags):
    settings = TINY | {"out_dir": out_dir, "data_dir": data_dir}
    known = (REPO / "train.py").read_text()
    files = [flag for flag in flags if flag.endswith(".py") and not flag.startswith("-")]
    assigned = "".join(f"\n{(REPO / file).read_text()}" for file in files)  # a flag would win
    names = [name for name in settings if f"\n{name} = " in known]
    return [
        str(REPO / "train.py"),
        *(f"--{name}={settings[name]}" for name in names if f"\n{name} = " not in assigned),
        *flags,
    ]


def wait_for(condition, seconds=60):
    """Waits until condition() is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


# ---- one update, without a run -------------------------------------------------------------------


@pytest.fixture
def knobs(monkeypatch):
    """knobs(name=value, ...) sets config globals of train.py for this test."""

    import train

    def set_knobs(**values):
        for name, value in values.items():
            assert name in vars(train)
            monkeypatch.setattr(train, name, value)

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    set_knobs(dtype="float32", max_steps=100, warmup_steps=0, decay_steps=0)
    return set_knobs


# ---- bench.py and check.py ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_products():
    """The peaks that a job and bench.py measure, by smaller matrix products."""
    from plumbing import machine

    small = functools.partial(machine.matmul_rate, sizes=(256,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "matmul_rate", small)
        yield


@pytest.fixture
def train_as_it_was(monkeypatch):
    """Undoes what a script that changes train.py or model.py did to them."""
    import model
    import train
    from plumbing import fields

    field = fields.FIELDS["tokens_per_sec"]
    monkeypatch.setattr(field, "heading", field.heading)
    before = [(module, dict(vars(module))) for module in (train, model)]
    yield
    for module, names in before:
        for name in vars(module).keys() - names.keys():
            delattr(module, name)
        vars(module).update(names)


@pytest.fixture
def quick(train_in, tmp_path, monkeypatch):
    """processes.execute() by a forked process, which begins at once. The folders of its runs."""
    from checks import processes
    from plumbing.cli import RunFailed

    folders = []

    def execute(script, words, *, out_dir, **knobs):
        folders.append(Path(out_dir))
        flags = processes.for_train(words) + [f"--{name}={value}" for name, value in knobs.items()]
        flags = [flag for flag in flags if not flag.startswith("--out_dir=")]
        flags.append(f"--out_dir={out_dir}")
        done = train_in(tmp_path, out_dir, *flags, code=None)
        if done.returncode:
            raise RunFailed(done.stderr)

    monkeypatch.setattr(processes, "execute", execute)
    return folders


# ---- a copy of the repository --------------------------------------------------------------------


def copy_of_repository(folder):
    folder.mkdir()
    for file in REPO.glob("*.py"):
        shutil.copy(file, folder)
    caches = shutil.ignore_patterns("__pycache__")
    for package in [REPO / "plumbing", *REPO.glob("reporting"), *REPO.glob("checks")]:
        shutil.copytree(package, folder / package.name, ignore=caches)
    return folder


def apply_patch(patch, folder):
    """Applies a unified diff: git finds each hunk by its lines, wherever they stand by now."""
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    how = {"cwd": folder, "env": outside, "text": True, "capture_output": True}
    done = subprocess.run(["git", "apply"], input=patch, **how)
    assert done.returncode == 0, done.stderr
    for name in re.findall(r"^\+\+\+ b/(.+\.py)$", patch, re.MULTILINE):
        compile((folder / name).read_text(), name, "exec")  # a hunk may land in the wrong place


# ---- what a run left -----------------------------------------------------------------------------


def read_rows(out_dir, kind=None):
    """The rows of metrics.jsonl. Raises ValueError for NaN and Infinity, which are not JSON."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    return [row for row in rows if kind in (None, row["kind"])]


def events(done, name):
    return [row for row in done.rows("event") if row["event"] == name]


def fingerprint(path):
    """SHA-256 of each part of a checkpoint: model, optimizer, scaler, ema, state, rng."""
    checkpoint = torch.load(path, weights_only=True)
    return {
        part: digest(checkpoint[part])
        for part in ("model", "optimizer", "scaler", "ema", "state", "rng")
    }


def digest(value):
    """SHA-256 of every bit of nested dicts and lists of tensors and plain values."""
    return hashlib.sha256(b"".join(bits_of(value))).hexdigest()


def bits_of(value):
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in value:
            yield f"{key!r}: ".encode()
            yield from bits_of(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from bits_of(item)
    else:
        yield f"{type(value).__name__} {value!r} ".encode()


def flip_a_bit(path):
    """In the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tree(folder):
    """{path: content} of everything in a folder, to compare before and after."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith((".std", ".log_"))  # of run_train and of start_train
    }


# ---- the helper process --------------------------------------------------------------------------


def serve():
    """For each request on stdin: fork, run train.main() in the child, print its exit code."""
    import torch._dynamo  # noqa: F401 (or each run that compiles imports it, for a second)

    import_train(REPO)
    import numpy.ma  # noqa: F401 (or numpy.unique imports it in each run)

    from plumbing import cli, code, machine

    code.loaded()  # each source is read once, not in each run
    cli.read_knobs = functools.cache(cli.read_knobs)
    cli.read_knobs(REPO / "train.py")
    machine.describe_machine(torch.device("cpu"))

    gc.freeze()  # imported modules stay shared with the children
    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            return in_child(**request)
        end = time.monotonic() + request["timeout"]
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.005)
        print(os.waitstatus_to_exitcode(status[1]), flush=True)


def import_train(repo):
    """Import train from the folder `repo`, after forgetting the modules of another repository."""
    if sys.path[0] != str(repo):
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file.startswith(f"{REPO}/") and "site-packages" not in file and name != "__main__":
                del sys.modules[name]
        sys.path.insert(0, str(repo))
    import train
    from plumbing import machine

    if not isinstance(machine.matmul_rate, functools.partial):
        # Each of these takes longer than the steps of a small run: a sample of 200 tokens at its
        # end, and matrix products of size 256 and more at its start.
        generate = train.generate
        train.generate = lambda *arguments, **options: itertools.islice(
            generate(*arguments, **options), 10
        )
        machine.matmul_rate = functools.partial(machine.matmul_rate, sizes=(256,))
    return train


def in_child(argv, files, env, cwd, before, timeout, repo):
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` ignores
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    train = import_train(repo)
    from plumbing import machine
    from plumbing.cli import run_script

    if "--dtype=float16" in argv:  # where a CPU lacks it, torch emulates it
        name, flags = machine.cpu_info()
        machine.cpu_info = lambda: (name, flags | {"avx512_fp16"})
    try:
        exec(compile(before, __file__, "exec"), scope_of(train))
        code = run_script(train.main)
    except SystemExit as leaving:  # of --help, or of a script that `before` has run
        code = leaving.code
    sys.stdout.flush()
    sys.stderr.flush()
    # A regular exit takes 0.3 s to tear torch down, and where it waits for the threads of torch's
    # compiler, it never ends. main() has waited for our own threads.
    os._exit(code or 0)


if __name__ == "__main__":
    sys.exit(serve())

"""What the tests share: a small real text, runs in processes of their own, and what a run left.

`import torch` takes most of a small run. So a helper imports train.py once and forks for each run,
which starts at once, but is a process of its own. `python_train` runs the real command line."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

# On a busy machine, threads that spin while they wait take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/honest_tests_inductor")

import numpy as np
import pytest
import run_page
import torch
from torch.utils._pytree import tree_flatten_with_path

REPO = Path(os.environ.get("HONEST_REPO") or Path(__file__).parent.parent).resolve()
sys.path.insert(0, str(REPO))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
TINY = (  # flags of every run, unless a test overrides them
    "dataset=small device=cpu dtype=float32 compile=false report=false n_embd=32 n_head=2 "
    "block_size=16 batch_size=8 max_steps=12 warmup_steps=3 log_interval=5 eval_interval=0 "
    "save_interval=0"
)
PARTS = "model optimizer scaler ema extra rng state".split()  # of a checkpoint
MEASURED = "data_ms step_ms tokens_per_sec mfu mem_gb gpu_util".split()  # all else is computed,
MEASURED += ["wait_ms"]  # but for this column of hacks/waits.py


def pytest_xdist_auto_num_workers(config):
    """-n auto: the cores that this process may use; xdist would count all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def pydoc_text():
    return "".join(topics[topic] for topic in sorted(topics))


def make_dataset(folder, name, text, tokenizer="char"):
    """Make folder/NAME of a text. Returns the folder."""
    from prepare_data import prepare

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text)
    prepare(name, folder, str(folder / f"{name}.txt"), tokenizer)
    return folder


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A folder that holds the dataset `small`: 3,000 characters of Python's own documentation."""
    return make_dataset(tmp_path_factory.mktemp("data"), "small", pydoc_text()[:3000])


def copy_code(folder):
    """The five files of README, which train without the others."""
    for name in "train plumbing model optim prepare_data".split():
        shutil.copy(REPO / f"{name}.py", folder)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


PAGE = REPO / "docs/forks.md"
SCRIPTS = run_page.scripts(PAGE)


@pytest.fixture(scope="session")
def page(tmp_path_factory, train_in, data_dir):
    """A folder with the scripts of docs/forks.md, and with what they read."""
    folder = tmp_path_factory.mktemp("page")
    for name, code in SCRIPTS.items():
        (folder / name).write_text(code)
    (csv,) = [code for *_, code in run_page.blocks(PAGE) if "savetxt" in code]
    subprocess.run(["bash", "-c", csv], cwd=folder, check=True)
    make_dataset(data_dir, "code", pydoc_text()[:20_000], "byte")
    make_dataset(data_dir, "words", pydoc_text()[-9000:], "byte")
    train_in(folder, "out/base", "--max_steps=6")
    return folder


# ---- runs ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Done:  # a run that has ended; codes: of its ranks, as in a shell, 128 + n after signal n
    out_dir: Path
    codes: list
    stdout: str
    stderr: str

    def expect(self, code):
        self.codes = [each if each >= 0 else 128 - each for each in self.codes]
        self.output = self.stdout + self.stderr
        assert code is None or {*self.codes} == {code}, f"exit codes {self.codes}\n{self.output}"
        return self

    def is_one_line(self, *words):
        assert self.stderr.count("\n") == 1, self.output
        assert all(word in self.stderr for word in words), self.stderr

    @property
    def steps(self):
        return [row["step"] for row in self.rows("train")]

    @property
    def losses(self):
        return [row["loss"] for row in self.rows("train")]

    @property
    def facts(self):
        return json.loads((self.out_dir / "run.json").read_text())

    def checkpoint(self, step):
        return self.out_dir / f"ckpt_{step:08}.pt"

    def fingerprint(self, step=12):
        return fingerprint(self.checkpoint(step))

    def rows(self, *kinds):
        return rows(self.out_dir, *kinds)

    def events(self, name):
        return [row for row in read_log(self.out_dir) if row.get("event") == name]


def arguments(out_dir, data_dir, flags):
    """The flags of a run: TINY, less what a config file sets, then `flags`."""
    files = [flag for flag in flags if str(flag).endswith(".py") and flag[0] != "-"]
    assigned = "".join(f"\n{Path(REPO, file).read_text()}" for file in files)  # a flag would win
    settings = [f"out_dir={out_dir}", f"data_dir={data_dir}", *TINY.split()]
    kept = [each for each in settings if f"\n{each.partition('=')[0]} = " not in assigned]
    return [*(f"--{each}" for each in kept), *map(str, flags)]


@pytest.fixture(scope="session")
def train_in(data_dir):
    """train_in(folder, out_dir, *flags, code=0, before="", ranks=1, threads=1, ...) -> Done.

    Run train.main() in a forked process, or in one for each of `ranks`, and wait until all of its
    processes are gone. out_dir: a path, or a name in `folder`, where it is run. code: the exit code
    that each rank must have, None = any. before: source that runs first (sources.py). threads: of
    torch, None = as many as it chooses. Also cwd, env, and limit in seconds."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as plumbing.py has it, under torchrun
    zygote = subprocess.Popen([sys.executable, __file__], env=env, **pipes)

    def run(folder, out_dir, *flags, code=0, ranks=1, cwd=None, **how):
        files = [[f"{folder}/.{name}_{rank}" for name in ("out", "err")] for rank in range(ranks)]
        request = {"before": "", "threads": 1, "env": {}, "limit": 100} | how
        request |= {"argv": arguments(out_dir, data_dir, flags), "cwd": str(cwd or folder)}
        zygote.stdin.write(json.dumps(request | {"files": files}) + "\n")
        zygote.stdin.flush()
        codes, pids = json.loads(zygote.stdout.readline())
        wait_until_gone(sessions=pids)
        texts = ["".join(Path(each[kind]).read_text() for each in files) for kind in (0, 1)]
        return Done(folder / out_dir, codes, *texts).expect(code)

    yield run
    zygote.stdin.close()
    zygote.wait()


@pytest.fixture
def run_train(train_in, tmp_path):
    """run_train(out_dir, *flags, ...) -> Done: train_in with this test's tmp_path as the folder."""
    return functools.partial(train_in, tmp_path)


@pytest.fixture(scope="session")
def once(train_in, tmp_path_factory):
    """once(*flags, ...) -> Done: a run that tests share, made once; they only read it."""
    folder = functools.partial(tmp_path_factory.mktemp, "once")
    return functools.cache(lambda *flags, **how: train_in(folder(), "run", *flags, **how))


@pytest.fixture
def build(data_dir, tmp_path):
    """build(*flags): train.build() in this process, as a context: `with build("--seed=1") as run`."""
    import train

    torch.set_num_threads(1)
    return lambda *flags: train.build(arguments(tmp_path / "built", data_dir, flags))


def torchrun(count):
    """The launcher of start_train and python_train for `count` ranks."""
    here = "--local-addr=127.0.0.1"  # a container's own name may lead nowhere
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", here]
    return [*module, f"--nproc_per_node={count}"]


def start(words, log, env=(), **how):
    """A running Popen of a command, in a session of its own. Its output goes to `log`, a path; all
    processes that descend from it can be found by its `mark`."""
    where = {"PYTHONPATH": str(REPO), "HONEST_TEST": str(log)}
    how |= {"env": os.environ | where | dict(env), "start_new_session": True}
    with open(log, "w") as file:
        process = subprocess.Popen([*map(str, words)], stdout=file, stderr=file, **how)
    process.log, process.mark = log, f"HONEST_TEST={log}"
    return process


@pytest.fixture
def start_train(data_dir, tmp_path):
    """start_train(out_dir, *flags, script=train.py, launcher=[python], env) -> start() of the real
    command in tmp_path. All its processes are killed at the end of the test."""
    started = []

    def begin(out_dir, *flags, script=REPO / "train.py", launcher=(sys.executable,), **how):
        words = [*launcher, script, *arguments(out_dir, data_dir, flags)]
        started.append(start(words, tmp_path / f".log_{len(started)}", cwd=tmp_path, **how))
        return started[-1]

    yield begin
    for process in started:
        with contextlib.suppress(AssertionError):
            wait_until_gone(0, mark=process.mark)
        process.wait()


@pytest.fixture
def python_train(start_train, tmp_path):
    """python_train(out_dir, *flags, code=0, ...) -> Done: the real command, as start_train."""

    def run(out_dir, *flags, code=0, limit=200, **how):
        process = start_train(out_dir, *flags, **how)
        codes = [process.wait(limit)]
        wait_until_gone(mark=process.mark)
        return Done(tmp_path / out_dir, codes, process.log.read_text(), "").expect(code)

    return run


def processes(sessions=(), mark=None):
    """Numbers of the living processes of these sessions, or with `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            is_marked = mark and f"{mark}\0".encode() in (folder / "environ").read_bytes()
            if state not in "ZX" and (int(session) in sessions or is_marked):
                found.append(int(folder.name))
    return found


def wait_until_gone(seconds=20, **which):
    """Fail if processes(**which) are still alive after so many seconds; then kill them."""
    try:
        wait_for(lambda: not processes(**which), seconds)
    finally:
        for pid in processes(**which):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition, seconds=60):
    """Wait until condition() is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(megabytes) -> a file system of that size, unmounted after the test."""
    folder = tmp_path / "disk"

    def mount(megabytes):
        folder.mkdir()
        if os.system(f"mount -t tmpfs -o size={megabytes}m tmpfs {folder} 2>/dev/null"):
            pytest.skip("mounting a small disk needs root")
        return folder

    yield mount
    os.system(f"umount -l {folder} 2>/dev/null")


# ---- what a run left -----------------------------------------------------------------------------


def tree(folder):
    """{path: content} of its files, but for what run_train keeps there of a run's output."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in files if not re.match(r"\.(out|err)_", path.name)}


def read_log(folder):
    """All rows of metrics.jsonl. It fails for half a line, and for NaN, which is not JSON."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def rows(folder, *kinds):
    """The computed fields of the rows of `kinds`, by default train and eval, in their order."""
    kept = [row for row in read_log(folder) if row["kind"] in (kinds or ("train", "eval"))]
    return [{name: x for name, x in row.items() if name not in MEASURED} for row in kept]


def fingerprint(path):
    """{part of a checkpoint: SHA-256 of every bit in it}, without the times."""
    saved = torch.load(path, weights_only=True)
    saved["state"] = {name: x for name, x in saved["state"].items() if name != "seconds"}
    saved["optimizer"] = saved["optimizer"]["state"]
    return {part: digest(saved[part]) for part in PARTS}


def digest(value):
    """SHA-256 of every bit of nested dicts and lists of tensors and plain values."""
    found = hashlib.sha256()
    for path, leaf in sorted(tree_flatten_with_path(value)[0], key=lambda item: str(item[0])):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            leaf = leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.update(f"{path} {leaf!r}".encode())
    return found.hexdigest()


# ---- the helper process --------------------------------------------------------------------------


def serve():
    """For each request on stdin: fork, run train.main() in the children, print their exit codes."""
    import numpy.random  # noqa: F401  this and the next: else each run would import them
    import torch._dynamo  # noqa: F401

    import train

    # Each of these takes longer than the steps of a small run: a sample, and products for the MFU
    inner = train.generate
    train.generate = lambda *args, **options: itertools.islice(inner(*args, **options), 10)
    train.plumbing.peak_flops = lambda *_: (1e12, "not measured in tests")
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(len(request["files"])):
            if (child := os.fork()) == 0:
                return in_child(train, rank, port, **request)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps([codes, children]), flush=True)


def in_child(train, rank, port, argv, files, before, threads, cwd, env, limit):
    os.setsid()
    signal.alarm(limit)  # by default it ends the process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` ignores
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(files[rank], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    numbers = {"WORLD_SIZE": len(files), "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    ranks = {name: str(number) for name, number in numbers.items()} if len(files) > 1 else {}
    os.environ.update({"MASTER_ADDR": "127.0.0.1"} | ranks | env)
    os.chdir(cwd)
    sys.argv = [str(REPO / "train.py"), *argv]
    train.plumbing.script = REPO / "train.py"
    torch.set_num_threads(threads or torch.get_num_threads())
    train.plumbing.STARTED, train.plumbing.STARTED_AT = time.perf_counter(), time.time()
    scope = {"train": train, "plumbing": train.plumbing, "torch": torch, "np": np, "rank": rank}
    scope |= {"os": os, "signal": signal, "time": time}
    train.plumbing.exit_process = leave
    try:
        exec(compile(before, "before", "exec"), scope)
        leave(train.main())
    except SystemExit as leaving:
        leave(leaving.code)
    except BaseException as error:
        train.plumbing.end_script(type(error), error, error.__traceback__)


def leave(code):  # without the 0.3 s that it takes to tear torch down
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    sys.exit(serve())

"""The layout: thirteen modules, how much there is to read, imports that point one way, short
functions."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import REPO, arguments, copy_of_repository, fingerprint, wait_for
from helpers import ONE_THREAD, children, free_port, listens, python
from sources import ranks

from plumbing import files

# How much there is to read, in nodes of the syntax tree. The aims are 24,000 loaded by `import train`
# and 48,000 in all Python outside tests/. Until they are met, these limits only go down.
MOST_NODES_LOADED = 29_576
MOST_NODES = 65_390
MOST_NODES_OF_A_LINE = 8.5  # in a file of more than 60 lines of code
MOST_NODES_OF_A_LINE_OF_THE_MODEL = 9.4
MOST_FILES_LOADED = 22
# Of the tests (tests/*.py), and of README.md and docs/*.md. The aims are 14,000 and 19,000.
MOST_LINES_OF_TESTS = 12_100
MOST_WORDS = 18_300
MOST_LINES_OF_A_FUNCTION = 60  # in train.py and model.py
SCRIPTS = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("*.py"))
MODULES = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("plumbing/*.py"))
REPORTING = sorted(path.relative_to(REPO).as_posix() for path in REPO.glob("reporting/*.py"))
LOADED = """
import json, sys
import train
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(json.dumps([sorted(files), sorted(sys.modules)]))
"""


@cache
def parsed(name):
    return ast.parse((REPO / name).read_text(encoding="utf-8"))


def nodes(name):
    return sum(not isinstance(node, ast.Load | ast.Store) for node in ast.walk(parsed(name)))


def lines_of_code(name):
    """Without blank lines, comments and docstrings."""
    documented = set()
    for node in ast.walk(parsed(name)):
        kinds = ast.Module | ast.FunctionDef | ast.ClassDef
        if isinstance(node, kinds) and ast.get_docstring(node):
            docstring = node.body[0]
            documented |= set(range(docstring.lineno, docstring.end_lineno + 1))
    lines = enumerate((REPO / name).read_text(encoding="utf-8").splitlines(), 1)
    code = [n for n, line in lines if line.strip() and not line.lstrip().startswith("#")]
    return len(set(code) - documented)


def functions(name):
    return [n for n in ast.walk(parsed(name)) if isinstance(n, ast.FunctionDef)]


def imports_of(name):
    """The files of this repository that the file `name` imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = {f"{module.replace('.', '/')}.py" for module in found}
    return files & {*SCRIPTS, *MODULES, *REPORTING}


# ---- the budget ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    """(the repository's files, all modules) of a fresh process after `import train`."""
    files, modules = json.loads(python(LOADED))
    installed = ("site-packages", "dist-packages")  # of a virtual environment in the repository
    files = [file for file in files if file.startswith(f"{REPO}/")]
    names = [file.removeprefix(f"{REPO}/") for file in files]
    return [name for name in names if not any(each in name for each in installed)], set(modules)


def test_what_training_loads_stays_within_its_budget(loaded):
    files, modules = loaded
    assert not modules & {"report", "matplotlib"} and "reporting" not in str(files)
    assert {"train.py", "model.py", "optim.py", "plumbing/ranks.py"} <= set(files)
    sizes = {file: nodes(file) for file in files}
    assert sum(sizes.values()) <= MOST_NODES_LOADED, sizes
    assert len(files) <= MOST_FILES_LOADED, files


def all_python():
    folders = {p.parent for p in REPO.glob("*/*.py") if p.parent.name not in NOT_COUNTED}
    found = [*REPO.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]
    return sorted(path.relative_to(REPO).as_posix() for path in found)


def test_all_the_code_stays_within_its_budget():
    sizes = {name: nodes(name) for name in all_python()}
    assert {"train.py", "plumbing/cli.py", "config/shakespeare.py"} <= sizes.keys()
    assert sum(sizes.values()) <= MOST_NODES, sizes


def test_a_line_holds_one_idea():
    dense = {}
    for name in all_python():
        count = lines_of_code(name)
        most = MOST_NODES_OF_A_LINE_OF_THE_MODEL if name == "model.py" else MOST_NODES_OF_A_LINE
        if count > 60 and nodes(name) > (most + 0.05) * count:
            dense[name] = round(nodes(name) / count, 1)
    assert dense == {}


def test_tests_and_pages_stay_within_their_budget():
    tests = {path.name: path.read_text().count("\n") for path in REPO.glob("tests/*.py")}
    pages = [REPO / "README.md", *REPO.glob("docs/*.md")]
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert tests["conftest.py"] and words["README.md"]
    assert sum(tests.values()) <= MOST_LINES_OF_TESTS, tests
    assert sum(words.values()) <= MOST_WORDS, words


NOT_COUNTED = ("tests", "out", "data", "wandb", ".venv", "venv")


# ---- imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODULES, *REPORTING])
def test_nothing_in_plumbing_or_reporting_imports_a_script(name):
    allowed = set(SCRIPTS) if name == "reporting/sanity.py" else set()  # a part of check.py
    assert imports_of(name) & set(SCRIPTS) <= allowed


def test_imports_have_no_circle():
    done = set()

    def visit(name, path):
        assert name not in path, f"a circle: {' -> '.join([*path, name])}"
        if name not in done:
            for imported in sorted(imports_of(name)):
                visit(imported, [*path, name])
            done.add(name)

    for name in [*SCRIPTS, *MODULES, *REPORTING]:
        visit(name, [])


# ---- functions and modules -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.py", "model.py"])
def test_a_function_fits_on_a_screen(name):
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(name)}
    assert len(long) > 10
    assert {f: n for f, n in long.items() if n > MOST_LINES_OF_A_FUNCTION} == {}


TRAINS_OWN = ("run", "saver")  # their types are train.py's, which plumbing does not import


def test_what_train_calls_has_type_hints():
    words = {n.id for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Attribute)}
    without, seen = [], set()
    for module in sorted(imports_of("train.py") & set(MODULES)):
        for function in [n for n in parsed(module).body if isinstance(n, ast.FunctionDef)]:
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in given if not a.annotation and a.arg not in TRAINS_OWN]
            if function.name in words:
                seen.add(function.name)
                if bare or not function.returns:
                    without.append(f"{module}: {function.name}({', '.join(bare)})")
    assert {"total", "step_unless"} <= seen
    assert without == []


# ---- the image -----------------------------------------------------------------------------------

DOCKERFILE = (REPO / "Dockerfile").read_text()
STEPS = re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)", DOCKERFILE, re.M)  # [(instruction, the rest)]


def test_the_base_is_an_argument_whose_default_is_pinned_by_digest():
    assert [name for name, _ in STEPS[:2]] == ["ARG", "FROM"]
    assert re.fullmatch(r"BASE_IMAGE=\S+:\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", STEPS[0][1])
    assert STEPS[1][1] == "${BASE_IMAGE}"


def test_every_requirement_is_pinned_and_installed_before_the_code():
    for line in (REPO / "requirements.txt").read_text().splitlines():
        assert re.fullmatch(r"[\w-]+==\d[\w.]*", line), line
    steps = [" ".join(step) for step in STEPS]
    copy_pins, install, copy_code, commit = (
        next(number for number, step in enumerate(steps) if re.match(pattern, step))
        for pattern in (
            r"COPY requirements.txt",
            r"RUN case (?s:.*)-m pip install",
            r"COPY \. ",
            r"ARG GIT_COMMIT",
        )
    )
    assert copy_pins < install < copy_code < commit  # each changes more often than those before


def locked():
    """{package: (version, [its hashes])} of requirements.lock."""
    text = (REPO / "requirements.lock").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        name, version, *hashes = re.split(r"==| +--hash=", line)
        found[name] = version.strip(), hashes
    return found


def test_the_lock_has_every_requirement_at_its_version_and_hashes_for_all():
    lock = locked()
    for line in (REPO / "requirements.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert lock[name.lower()][0] == version
    for name, (version, hashes) in lock.items():
        assert re.fullmatch(r"[a-z0-9-]+", name) and re.fullmatch(r"\d[\w.]*", version)
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)
    assert len(lock) > 50 and {"triton", "nvidia-cudnn-cu13", "pillow"} <= set(lock)


def test_run_json_names_the_commit_where_there_is_no_git(run_train, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    environment = {"GIT_COMMIT": commit, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    copy = copy_of_repository(tmp_path / "image")
    done = run_train("run", "--max_steps=3", env=environment, repo=copy)
    run = files.read_json(done.out_dir / "run.json")
    assert run["git"] == {"commit": commit, "dirty": None, "diff_sha256": None}


# ---- several nodes -------------------------------------------------------------------------------

FLAGS = ("--save_interval=20", "--log_interval=20", "--dropout=0.1")
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


# ---- a node that dies ----------------------------------------------------------------------------


def node(port, address):
    """The command of one node. Of several, the lowest address gets rank 0."""
    module = [sys.executable, "-m", "torch.distributed.run"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--local-addr={address}"]
    soon = ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2", "--monitor-interval=0.1"]
    return [*module, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", *where, *soon]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["launcher of rank 0", "launcher of rank 1", "node of rank 0"])
def test_a_node_that_dies_and_comes_back_changes_no_bit(start_train, run_train, tmp_path, lost):
    flags = (*FLAGS, "--max_steps=400")
    straight = run_train("straight", *flags, before=ranks(2))
    port, number = free_port(), int("rank 1" in lost)
    addresses = ["127.0.0.1", "127.0.0.2"]

    def start(which):
        launcher = node(port, addresses[which])
        return start_train("run", *flags, launcher=launcher, env=ONE_THREAD | FRESH_STORE)

    stays = start(1 - number)  # its node keeps the rendezvous too, and must not die
    wait_for(lambda: listens(port))
    dies = start(number)
    log = (stays if number else dies).log  # rank 0 writes the one log
    wait_for(lambda: re.search(r"\b60/400 ", log.read_text()))
    pids = children(dies)
    dies.kill()
    if lost.startswith("node"):
        os.kill(pids[0], signal.SIGKILL)
    back = start(number)
    assert [stays.wait(90), back.wait(30)] == [0, 0], stays.log.read_text() + back.log.read_text()
    assert "resumes from" in (stays if number else back).log.read_text()
    assert fingerprint(tmp_path / "run/ckpt_00000400.pt") == straight.fingerprint(400)


def test_restarts_that_could_not_work_are_refused_with_what_to_type(run_train):
    told = {"WORLD_SIZE": "2", "RANK": "0", "GROUP_WORLD_SIZE": "2"}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    refused = run_train("run", env=told, code=2)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in refused.stderr
    assert not refused.out_dir.exists()


# ---- docs/train.slurm ----------------------------------------------------------------------------

# What stands in for SLURM: each starts, signals or notes what the real command would.
SLURM = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
for node in $(seq "$SLURM_NNODES"); do "$@" & pids+=($!); done
echo "${pids[@]}" >"$JOB/step"
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
""",
    "scancel": """
[[ "$*" == "--signal=TERM $SLURM_JOB_ID" ]] || exit 2
for pid in $(cat "$JOB/step"); do kill -TERM "$pid" $(pgrep -P "$pid"); done
""",
    "scontrol": """
[[ $1 == show ]] && echo 127.0.0.1 || echo "$@" >>"$JOB/queue"
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script_requeues_and_resumes(run_train, data_dir, tmp_path, nodes):
    flags = (*FLAGS, "--max_steps=60")
    straight = run_train("straight", *flags, before=ranks(2))
    for name, source in SLURM.items():
        (tmp_path / name).write_text("#!/usr/bin/env bash" + source)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(free_port() % 10000), "SLURM_JOB_NODELIST": f"node[1-{nodes}]"}
    job |= {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": str(2 // nodes)}
    environment = os.environ | ONE_THREAD | job | {"PATH": path, "JOB": str(tmp_path)}
    command = ["bash", "docs/train.slurm", *arguments(tmp_path / "run", data_dir, flags)[1:]]

    def batch_shell(log):
        out = log.open("w")
        return subprocess.Popen(command, cwd=REPO, env=environment, stdout=out, stderr=out)

    first = batch_shell(tmp_path / "log")
    wait_for(lambda: re.search(r"\b20/60 ", (tmp_path / "log").read_text()))
    first.send_signal(signal.SIGUSR1)  # as SLURM does ahead of the time limit
    assert first.wait(30) == 1  # torchrun's own code
    assert (tmp_path / "queue").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert "stopped by SIGTERM at step" in (tmp_path / "log").read_text()

    environment["RANK_LOGS"] = str(tmp_path / "ranks")
    again = batch_shell(tmp_path / "log_2")
    assert again.wait(60) == 0, (tmp_path / "log_2").read_text()
    assert (tmp_path / "queue").read_text().count("requeue") == 1
    assert "resume: checkpoint" in (tmp_path / "log_2").read_text()
    assert len(list((tmp_path / "ranks").rglob("stdout.log"))) == 2
    assert fingerprint(tmp_path / "run/ckpt_00000060.pt") == straight.fingerprint(60)

"""How much there is to read, imports that point one way, the image, several nodes."""

import ast
import graphlib
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
from packaging.requirements import Requirement
from sources import ranks

from plumbing import files

# How much there is to read, in nodes of the syntax tree. These numbers only fall; a family may take
# from another one what that loses in the same commit.
MAX_NODES = {
    "train.py plain.py model.py optim.py": 8_789,
    "plumbing/*.py": 19_393,
    "prepare_data.py sample.py": 3_991,
    "report.py replay.py check.py reporting/*.py checks/*.py": 18_369,
    "bench.py": 2_411,
    "config/*.py examples/*.py": 2_636,
}
MAX_NODES_IN_ALL = 55_589  # the aim is 49,800
MAX_NODES_LOADED = 26_250  # by `import train`; the aim is 23,300
MAX_LINES_OF_TESTS = 11_871  # tests/*.py; the aim is 11,400
MAX_WORDS = 24_500  # README.md and docs/*.md
MAX_WORDS_OF_README = 1_300
MAX_LINES_OF_TRAIN = 932  # the aim is 890
MAX_NODES_OF_A_LINE = {"model.py": 9.4}  # in files of more than 60 lines of code
MAX_LINES_OF_A_FUNCTION = 60
NOT_COUNTED = ("tests", "out", "data", "wandb", ".venv", "venv")


def paths(patterns):
    return sorted(
        path.relative_to(REPO).as_posix() for each in patterns.split() for path in REPO.glob(each)
    )


SCRIPTS = paths("*.py")
BELOW = paths("plumbing/*.py reporting/*.py checks/*.py")
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


def imports_of(name):
    """The files of this repository that the file `name` imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {f"{module.replace('.', '/')}.py" for module in found} & {*SCRIPTS, *BELOW}


# ---- the budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MAX_NODES)
def test_a_family_of_files_stays_within_its_budget(family):
    sizes = {name: nodes(name) for name in paths(family)}
    assert 0 < sum(sizes.values()) <= MAX_NODES[family], sizes


def test_no_file_is_left_out_of_the_budget():
    counted = {name for family in MAX_NODES for name in paths(family)}
    assert sum(map(nodes, counted)) <= MAX_NODES_IN_ALL
    every = {path for path in paths("*.py */**/*.py") if Path(path).parts[0] not in NOT_COUNTED}
    assert every == counted


def test_what_training_loads_stays_within_its_budget():
    files, modules = json.loads(python(LOADED))
    loaded = {*SCRIPTS, *BELOW} & {file.removeprefix(f"{REPO}/") for file in files}
    assert {"train.py", "model.py", "optim.py", "plumbing/ranks.py"} <= loaded
    assert not {"report", "reporting", "checks", "matplotlib"} & set(modules)
    assert sum(map(nodes, loaded)) <= MAX_NODES_LOADED


def test_a_line_holds_one_idea_and_a_function_fits_on_a_screen():
    dense, long = {}, {}
    for name in [*SCRIPTS, *BELOW]:
        count = lines_of_code(name)
        if count > 60 and nodes(name) > (MAX_NODES_OF_A_LINE.get(name, 8.5) + 0.05) * count:
            dense[name] = round(nodes(name) / count, 1)
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                long |= {f"{name}: {node.name}": lines} if lines > MAX_LINES_OF_A_FUNCTION else {}
    assert (dense, long) == ({}, {})


def test_tests_and_pages_stay_within_their_budget():
    tests = {name: (REPO / name).read_text().count("\n") for name in paths("tests/*.py")}
    words = {name: len((REPO / name).read_text().split()) for name in paths("README.md docs/*.md")}
    assert tests["tests/conftest.py"] and words["README.md"]
    assert sum(tests.values()) <= MAX_LINES_OF_TESTS, tests
    assert sum(words.values()) <= MAX_WORDS, words
    assert words["README.md"] <= MAX_WORDS_OF_README
    assert len((REPO / "train.py").read_text().splitlines()) <= MAX_LINES_OF_TRAIN


# ---- imports, types ------------------------------------------------------------------------------


READ = ("train.py", "plain.py", "model.py", "optim.py")


def test_imports_point_one_way():
    """Scripts import checks/ and reporting/, and all of them plumbing/. checks/ runs the loop."""
    wrong = []
    for name in BELOW:
        upwards = [each for each in imports_of(name) if each in SCRIPTS]
        if name.startswith("checks/"):
            upwards = [each for each in upwards if each not in READ]
        else:
            upwards += [each for each in imports_of(name) if each.startswith("checks/")]
        wrong += [f"{name} imports {each}" for each in upwards]
    assert wrong == []


def test_imports_have_no_circle():
    graph = {name: imports_of(name) for name in [*SCRIPTS, *BELOW]}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files
    assert graph["train.py"]


TRAINS_OWN = ("run", "saver")  # their types are train.py's, which plumbing does not import


def test_what_train_calls_has_type_hints():
    words = {n.id for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Attribute)}
    without, seen = [], set()
    for module in sorted(imports_of("train.py") & set(BELOW)):
        for function in [n for n in parsed(module).body if isinstance(n, ast.FunctionDef)]:
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in given if not a.annotation and a.arg not in TRAINS_OWN]
            if function.name in words:
                seen.add(function.name)
                if bare or not function.returns:
                    without.append(f"{module}: {function.name}({', '.join(bare)})")
    assert len(seen) > 10 and without == []


# ---- the image -----------------------------------------------------------------------------------


def test_the_lock_has_every_requirement_in_its_range_and_hashes_for_all():
    text = re.sub(r"^#.*\n", "", (REPO / "requirements.lock").read_text(), flags=re.M)
    lock = {}
    for line in text.replace("\\\n", "").splitlines():
        name, version, *hashes = re.split(r"==| +--hash=", line)
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)
        lock[name] = version.strip()
    for line in (REPO / "requirements.txt").read_text().splitlines():
        asked = Requirement(line)
        assert {each.operator for each in asked.specifier} == {">=", "<"}, "a user's torch stays"
        assert lock[asked.name.lower()] in asked.specifier
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
    assert "resumes from" in (tmp_path / "log_2").read_text()
    assert len(list((tmp_path / "ranks").rglob("stdout.log"))) == 2
    assert fingerprint(tmp_path / "run/ckpt_00000060.pt") == straight.fingerprint(60)

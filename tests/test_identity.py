"""What computes belongs to a run, wherever it lies; what only explains or prints does not."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, arguments, read_rows, stop_at
from test_hacks import copy_of_repository

from plumbing import resume

FLAGS = ("--save_interval=4",)


@pytest.fixture
def copy(tmp_path):
    """A copy of this repository, to edit."""
    return copy_of_repository(tmp_path / "copy")


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old} stands {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def changed_code(done):
    """The files of the inexact_resume event, or None if there is no such event."""
    assert done.returncode == 0, done.stderr
    events = [row for row in done.rows("event") if row["event"] == "inexact_resume"]
    return sorted(events[0]["code"][0]) if events else None


ONLY_WORDS = [
    ("train.py", "# 1: zero the gradients", "# the first of seven"),
    ("train.py", '"""One update, in seven operations.', '"""One update.\n'),
    ("plumbing/ranks.py", "  # ", "  # here "),
    ("plumbing/console.py", '"""', '"""Words. '),
    ("report.py", "import", "import this\nimport"),
    ("reporting/results.py", "import", "import this\nimport"),
]


@pytest.mark.parametrize(("name", "old", "new"), ONLY_WORDS)
def test_an_edited_comment_docstring_or_report_leaves_a_resume_exact(
    name, old, new, copy, run_train
):
    assert run_train("run", *FLAGS, before=stop_at(6), repo=copy).returncode == 143
    text = (copy / name).read_text(encoding="utf-8")
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert changed_code(run_train("run", *FLAGS, repo=copy)) is None


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("train.py", "grad_clip or math.inf)", "0.5 * grad_clip or math.inf)"),
        ("optim.py", "alpha=2.0315", "alpha=2.0316"),
    ],
)
def test_an_edited_line_of_the_step_makes_it_inexact(name, old, new, copy, run_train):
    assert run_train("run", *FLAGS, before=stop_at(6), repo=copy).returncode == 143
    edit(copy / name, old, new)
    assert changed_code(run_train("run", *FLAGS, repo=copy)) == [name]


def test_an_edit_of_a_finished_run_is_named_and_nothing_pretends_to_be_finished(copy, run_train):
    assert run_train("run", repo=copy).returncode == 0
    edit(copy / "train.py", "grad_clip or math.inf)", "0.5 * grad_clip or math.inf)")
    again = run_train("run", repo=copy)
    assert again.returncode == 2
    (line,) = again.stderr.splitlines()
    assert "train.py" in line and "--resume=restart" in line and "--out_dir=" in line


OWN = """
import train
def forward_backward(model, run, *batch, inner=train.forward_backward):
    return inner(model, run, *batch) | {"one": 1.0}
train.forward_backward = forward_backward
"""


def test_a_file_outside_the_repository_that_computes_counts(run_train, tmp_path):
    own = tmp_path / "lib" / "own_step.py"
    own.parent.mkdir()
    load = f"import sys; sys.path.insert(0, {str(own.parent)!r}); import own_step\n"
    own.write_text(OWN)
    assert run_train("run", *FLAGS, before=load + stop_at(6)).returncode == 143
    own.write_text(OWN + "# a comment\n")
    assert run_train("run", *FLAGS, before=load + stop_at(8)).returncode == 143
    own.write_text(OWN.replace("1.0", "2.0"))
    assert changed_code(run_train("run", *FLAGS, before=load)) == [str(own)]
    shutil.rmtree(own.parent)


def test_the_script_that_is_run_counts(data_dir, tmp_path, copy):
    own = tmp_path / "own.py"
    _, *flags = arguments(tmp_path / "run", data_dir, FLAGS)
    environment = os.environ | {"PYTHONPATH": str(copy)}

    def start(source):
        own.write_text(f"import sys\nimport train\n{source}\nsys.exit(train.main())\n")
        command = [sys.executable, own, *flags]
        return subprocess.run(command, env=environment, capture_output=True, timeout=100).returncode

    assert start(stop_at(6)) == 143
    assert start("") == 0
    (event,) = [r for r in read_rows(tmp_path / "run", "event") if r["event"] == "inexact_resume"]
    assert list(event["code"][0]) == [str(own)]


TEACHER = """
def open_dataset(saved, inner=train.open_dataset):
    *both, facts = inner(saved)
    return *both, facts | {"files": [FILE]}
train.open_dataset = open_dataset
"""


def test_another_file_that_a_fork_reads_is_part_of_the_run(run_train, tmp_path):
    teacher = tmp_path / "teacher.pt"
    teacher.write_bytes(b"one")
    change = TEACHER.replace("FILE", repr(str(teacher)))
    assert run_train("run", *FLAGS, before=change + stop_at(4)).returncode == 143
    assert run_train("run", *FLAGS, before=change + stop_at(8)).returncode == 143
    teacher.write_bytes(b"two")
    done = run_train("run", *FLAGS, before=change)
    assert done.returncode == 2 and "teacher.pt" in done.stderr
    teacher.write_bytes(b"one")
    assert changed_code(run_train("run", *FLAGS, before=change)) is None


def test_an_installed_file_that_is_a_link_into_a_cache_is_no_code_of_ours(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "cached.py").write_text("x = 1\n")
    (tmp_path / "site-packages" / "installed.py").symlink_to(tmp_path / "cached.py")
    (tmp_path / "link").symlink_to(tmp_path / "site-packages")
    for folder in ("site-packages", "link"):
        assert resume.name_of_source(str(tmp_path / folder / "installed.py")) is None
    assert resume.name_of_source(str(tmp_path / "cached.py")) == str(tmp_path / "cached.py")


# ---- everyday edits and moves between stop and resume --------------------------------------------


@pytest.fixture
def fork(tmp_path, data_dir):
    """fork(script, *more flags) -> changed_code() of a run of that script, beside a copy of this
    repository; STOP_AT=6 in its environment stops it."""

    def start(script, *more, repo, stop=False, code=0):
        _, *flags = arguments(tmp_path / "run", data_dir, (*FLAGS, *more))
        environment = os.environ | {"PYTHONPATH": str(repo), "STOP_AT": "6" if stop else "0"}
        command = [sys.executable, str(script), *flags]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == (143 if stop else code), done.stderr
        if not stop:
            events = read_rows(tmp_path / "run", "event")
            found = [row for row in events if row["event"] == "inexact_resume"]
            return [sorted(row["code"][0]) for row in found]

    return start


FORK = """
import os, signal, sys
import train
def train_step(model, run, *rest, inner=train.train_step):
    if run.state["step"] == int(os.environ["STOP_AT"]) - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    LAZY
    return inner(model, run, *rest)
train.train_step = train_step
sys.exit(train.main())
"""
PLAIN_FORK = FORK.replace("    LAZY\n", "")


def test_a_renamed_script_is_no_change_and_another_one_is(fork, tmp_path, copy):
    (tmp_path / "one.py").write_text(PLAIN_FORK)
    fork(tmp_path / "one.py", repo=copy, stop=True)
    os.rename(tmp_path / "one.py", tmp_path / "two.py")
    fork(tmp_path / "two.py", repo=copy, stop=False)
    assert fork(tmp_path / "two.py", "--max_steps=14", "--decay_steps=14", repo=copy) == []
    (tmp_path / "three.py").write_text(PLAIN_FORK.replace("train.main()", "train.main(None)"))
    found = fork(tmp_path / "three.py", "--max_steps=16", "--decay_steps=14", repo=copy)
    assert found == [[str(tmp_path / "three.py"), str(tmp_path / "two.py")]]


def test_a_moved_repository_is_no_change(fork, tmp_path, copy):
    (tmp_path / "one.py").write_text(PLAIN_FORK)
    fork(tmp_path / "one.py", repo=copy, stop=True)
    os.rename(copy, tmp_path / "moved")
    assert fork(tmp_path / "one.py", repo=tmp_path / "moved") == []


def test_two_files_that_are_swapped_are_a_change(fork, tmp_path, copy):
    for name, factor in (("a_part", 1.0), ("b_part", 2.0)):
        (tmp_path / f"{name}.py").write_text(f"factor = {factor}\n")
    (tmp_path / "one.py").write_text("import a_part, b_part\n" + PLAIN_FORK)
    fork(tmp_path / "one.py", repo=copy, stop=True)
    os.rename(tmp_path / "a_part.py", tmp_path / "c_part.py")
    os.rename(tmp_path / "b_part.py", tmp_path / "a_part.py")
    os.rename(tmp_path / "c_part.py", tmp_path / "b_part.py")
    (changed,) = fork(tmp_path / "one.py", repo=copy)
    assert changed == [str(tmp_path / f"{name}.py") for name in ("a_part", "b_part")]


@pytest.mark.parametrize("edit", ["between", "during", "none"])
def test_a_module_that_a_step_imports_counts_as_it_was_first_seen(fork, tmp_path, copy, edit):
    lazy = tmp_path / "lazy_part.py"
    lazy.write_text("factor = 1.0\n")
    load = "if run.state['step'] == 2:\n        import lazy_part"
    if edit == "during":  # what ran is what was first read, not what stands there at a later save
        load += (
            "\n    if run.state['step'] == 4:\n        open(lazy_part_file, 'w').write('x = 2\\n')"
        )
    source = FORK.replace("LAZY", load).replace("lazy_part_file", repr(str(lazy)))
    (tmp_path / "one.py").write_text(source)
    fork(tmp_path / "one.py", repo=copy, stop=True)
    if edit == "between":
        lazy.write_text("factor = 2.0\n")
        source = source.replace("== 2", "in (2, 7)")
    if edit == "during":
        lazy.write_text("factor = 1.0\n")
    again = FORK.replace("LAZY", "if run.state['step'] in (2, 7):\n        import lazy_part")
    both = source if edit == "during" else again
    (tmp_path / "one.py").write_text(both)
    found = fork(tmp_path / "one.py", repo=copy)
    late = [names for names in found if names == [str(lazy)]]
    assert len(late) == (edit == "between")


def test_a_function_replaced_in_a_notebook_counts_by_its_code(data_dir, tmp_path):
    """A cell has no file, as `python -c` has none."""

    def start(rate):
        _, *flags = arguments(tmp_path / "run", data_dir, FLAGS)
        source = f"import sys, train\n{stop_at(6)}\ntrain.lr_at = lambda step: {rate}\n"
        source += f"try: train.main({flags!r})\nexcept SystemExit: pass\n"
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        events = read_rows(tmp_path / "run", "event")
        return [row["code"][0] for row in events if row["event"] == "inexact_resume"]

    start(1e-3)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    assert start(1e-3) == []  # the same cell again
    shutil.rmtree(tmp_path / "run")
    os.rename(tmp_path / "kept", tmp_path / "run")
    (changed,) = start(2e-3)
    assert list(changed) == ["train.lr_at"]


def test_what_only_reads_a_run_is_no_code_of_it():
    for name in ("report.py", "replay.py", "check.py", "bench.py", "sample.py"):
        assert resume.name_of_source(f"{REPO}/{name}") is None
    assert resume.name_of_source(f"{REPO}/model.py") == "model.py"


def test_installed_code_of_any_interpreter_is_not_counted(monkeypatch, tmp_path):
    for folder in ("lib/python3.12/site-packages", "dist-packages", "bin", "own"):
        path = tmp_path / folder / "part.py"
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
        if folder == "bin":
            (path.parent / "python3").touch()
        assert bool(resume.name_of_source(str(path))) == (folder == "own"), folder

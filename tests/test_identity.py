"""What computes belongs to a run, wherever it lies; what only explains or prints does not."""

import os
import shutil
import subprocess
import sys
import sysconfig
import types

import pytest
from conftest import arguments, read_rows, stop_at
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


def test_an_installed_file_that_is_a_link_into_a_cache_is_no_code_of_ours(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "cached.py").write_text("x = 1\n")
    path = tmp_path / "site" / "installed.py"
    path.symlink_to(tmp_path / "cached.py")
    module = types.ModuleType("installed")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "installed", module)
    assert str(path) in resume.code_hashes()
    place = sysconfig.get_path
    folders = {"purelib": str(tmp_path / "site")}
    monkeypatch.setattr(sysconfig, "get_path", lambda of: folders.get(of) or place(of))
    (tmp_path / "link").symlink_to(tmp_path / "site")
    for folder in ("site", "link"):
        module.__file__ = str(tmp_path / folder / "installed.py")
        assert not [name for name in resume.code_hashes() if name.startswith(str(tmp_path))]

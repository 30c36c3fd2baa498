"""What computes belongs to a run, wherever it lies; what only explains or prints does not."""

import os
import subprocess
import sys

import pytest
from conftest import REPO, arguments, copy_of_repository, events, read_rows
from sources import around, stop_at

from plumbing import resume

FLAGS = ("--save_interval=4",)


@pytest.fixture
def copy(tmp_path):
    """A copy of this repository, to edit."""
    return copy_of_repository(tmp_path / "copy")


@pytest.fixture
def start(run_train, tmp_path):
    """start(*flags, script=None, cell="", repo=REPO) -> the files of each inexact_resume event.

    script: a fork that calls train.main() itself. cell: source that has no file. The first start
    is stopped at step 6.
    """

    def run(*flags, script=None, cell="", repo=REPO):
        is_first = not (tmp_path / "run").exists()
        before = f"exec({cell!r})\n"
        if is_first:
            before += stop_at(6)
        if script:
            before += f"import runpy, sys; sys.path.insert(0, {str(script.parent)!r})\n"
            before += f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
        done = run_train(
            "run", *FLAGS, *flags, repo=repo, before=before, code=143 if is_first else 0
        )
        return [sorted(row["code"][0]) for row in events(done, "inexact_resume")]

    return run


# ---- an edit of this repository ------------------------------------------------------------------


WORDS = [  # (file, old, new)
    ("train.py", "# 1: zero the gradients", "# the first of seven"),
    ("train.py", '"""One update, in seven operations.', '"""One update.\n'),
    ("plumbing/ranks.py", "  # ", "  # here "),
    ("plumbing/console.py", '"""', '"""Words. '),
    ("report.py", "import", "import this\nimport"),
    ("reporting/results.py", "import", "import this\nimport"),
]
STEP = [
    ("train.py", "grad_clip or math.inf)", "0.5 * grad_clip or math.inf)"),
    ("optim.py", "alpha=2.0315", "alpha=2.0316"),
]


@pytest.mark.parametrize("edits, changed", [(WORDS, []), (STEP, [["optim.py", "train.py"]])])
def test_only_an_edit_of_the_step_makes_a_resume_inexact(start, copy, edits, changed):
    """Not one of comments, docstrings and reports."""
    start(repo=copy)
    for name, old, new in edits:
        text = (copy / name).read_text(encoding="utf-8")
        assert old in text, (name, old)
        (copy / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert start(repo=copy) == changed


def test_an_edit_of_a_finished_run_is_named(copy, run_train):
    run_train("run", repo=copy)
    with open(copy / "optim.py", "a") as file:
        file.write("\nONE_MORE = 1\n")
    again = run_train("run", repo=copy, code=2)
    (line,) = again.stderr.splitlines()
    assert "optim.py" in line and "--resume=restart" in line and "--out_dir=" in line


def test_a_moved_repository_is_no_change(start, tmp_path, copy):
    (tmp_path / "one.py").write_text(FORK)
    start(script=tmp_path / "one.py", repo=copy)
    os.rename(copy, tmp_path / "moved")
    assert start(script=tmp_path / "one.py", repo=tmp_path / "moved") == []


# ---- files of one's own --------------------------------------------------------------------------

FORK = """
import sys
import train
def train_step(model, run, *rest, inner=train.train_step):
    return inner(model, run, *rest)
train.train_step = train_step
sys.exit(train.main())
"""


@pytest.mark.slow  # two real processes; in forked ones: the tests below
def test_the_script_that_is_run_counts(data_dir, tmp_path):
    """In real processes."""
    own = tmp_path / "own.py"
    _, *flags = arguments(tmp_path / "run", data_dir, FLAGS)
    environment = os.environ | {"PYTHONPATH": str(REPO)}

    def run(source):
        own.write_text(f"import sys\nimport train\n{source}\nsys.exit(train.main())\n")
        command = [sys.executable, own, *flags]
        return subprocess.run(command, env=environment, capture_output=True, timeout=100).returncode

    assert run(stop_at(6)) == 143
    assert run("") == 0
    (event,) = [r for r in read_rows(tmp_path / "run", "event") if r["event"] == "inexact_resume"]
    assert list(event["code"][0]) == [str(own)]


def test_a_renamed_script_is_no_change_and_another_one_is(start, tmp_path):
    one, two, three = (tmp_path / f"{name}.py" for name in ("one", "two", "three"))
    one.write_text(FORK)
    start(script=one)
    os.rename(one, two)
    assert start(script=two) == []
    assert start("--max_steps=14", "--decay_steps=14", script=two) == []
    three.write_text(FORK.replace("train.main()", "train.main(None)"))
    found = start("--max_steps=16", "--decay_steps=14", script=three)
    assert found == [[str(three), str(two)]]


def test_a_module_counts_by_what_it_computes(start, tmp_path):
    own = tmp_path / "own_part.py"
    (tmp_path / "one.py").write_text("import own_part\n" + FORK)
    own.write_text("factor = 1.0\n")
    start(script=tmp_path / "one.py")
    own.write_text("factor = 1.0  # a comment\n")
    assert start(script=tmp_path / "one.py") == []
    own.write_text("factor = 2.0\n")
    again = ("--max_steps=14", "--decay_steps=14")
    assert start(*again, script=tmp_path / "one.py") == [[str(own)]]


def test_two_files_that_are_swapped_are_a_change(start, tmp_path):
    a, b, c = (tmp_path / f"{name}_part.py" for name in "abc")
    a.write_text("factor = 1.0\n")
    b.write_text("factor = 2.0\n")
    (tmp_path / "one.py").write_text("import a_part, b_part\n" + FORK)
    start(script=tmp_path / "one.py")
    os.rename(a, c)
    os.rename(b, a)
    os.rename(c, b)
    assert start(script=tmp_path / "one.py") == [[str(a), str(b)]]


@pytest.mark.parametrize("edit", ["between", "during", "none"])
def test_a_module_that_a_step_imports_counts_as_it_was_first_seen(start, tmp_path, edit):
    one, lazy = tmp_path / "one.py", tmp_path / "lazy_part.py"
    load = "if run.state['step'] in (2, 7): import lazy_part"
    if edit == "during":  # what ran is what was first read, not what stands there at a later save
        load += f"\n    if run.state['step'] == 4: open({str(lazy)!r}, 'w').write('x = 2')"
    one.write_text(FORK.replace("    return", f"    {load}\n    return"))
    lazy.write_text("factor = 1.0\n")
    start(script=one)
    lazy.write_text("factor = 2.0\n" if edit == "between" else "factor = 1.0\n")
    assert start(script=one) == ([[str(lazy)]] if edit == "between" else [])


@pytest.mark.parametrize(
    "cell",
    [
        "train.lr_at = lambda step: {}",
        "train.lr_at = lambda step, rate={}: rate",
        "train.lr_at = (lambda rate: lambda step: rate)({})",
        "import functools; train.lr_at = functools.partial(lambda rate, step: rate, {})",
    ],
    ids=["constant", "default", "closure", "partial"],
)
def test_a_function_replaced_in_a_notebook_counts_by_what_it_computes(start, cell):
    """A cell has no file."""
    start(cell=cell.format(1e-3))
    assert start(cell=cell.format(1e-3)) == []  # the same cell again
    again = ("--max_steps=14", "--decay_steps=14")
    assert start(*again, cell=cell.format(2e-3)) == [["train.lr_at"]]


def test_another_file_that_a_fork_reads_is_part_of_the_run(run_train, tmp_path):
    teacher = tmp_path / "teacher.pt"
    teacher.write_bytes(b"one")
    change = around("open_dataset", then=f"result[-1]['files'] = [{str(teacher)!r}]")
    run_train("run", *FLAGS, before=change + stop_at(4), code=143)
    teacher.write_bytes(b"two")
    done = run_train("run", *FLAGS, before=change, code=2)
    assert "teacher.pt" in done.stderr
    (tmp_path / "moved").mkdir()  # the same name and bytes elsewhere are no change
    (tmp_path / "moved" / "teacher.pt").write_bytes(b"one")
    done = run_train("run", *FLAGS, before=change.replace("/teacher.pt", "/moved/teacher.pt"))
    assert not events(done, "inexact_resume")


# ---- installed code ------------------------------------------------------------------------------


def test_installed_code_of_any_interpreter_is_not_counted(tmp_path):
    for folder in ("lib/python3.12/site-packages", "dist-packages", "bin", "own"):
        path = tmp_path / folder / "part.py"
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
        if folder == "bin":
            (path.parent / "python3").touch()
        assert bool(resume.name_of_source(str(path))) == (folder == "own"), folder


def test_an_installed_file_that_is_a_link_into_a_cache_is_no_code_of_ours(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "cached.py").write_text("x = 1\n")
    (tmp_path / "site-packages" / "installed.py").symlink_to(tmp_path / "cached.py")
    (tmp_path / "link").symlink_to(tmp_path / "site-packages")
    for folder in ("site-packages", "link"):
        assert resume.name_of_source(str(tmp_path / folder / "installed.py")) is None
    assert resume.name_of_source(str(tmp_path / "cached.py")) == str(tmp_path / "cached.py")

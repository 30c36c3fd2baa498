"""Broken loops: with each bug of tests/broken the test named in answers.md there fails, and the
command named there finds it."""

import re
import shutil

import pytest
from conftest import REPO, TINY, apply_patch, run_python
from run_page import NOT_COPIED

PATCHES = sorted((REPO / "tests" / "broken").glob("*.patch"))
PAGE = (REPO / "tests" / "broken" / "answers.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (.+?) \| `(.+?)` \| (.+?) \| ?(.*?) \|$", re.MULTILINE)
BUGS = {int(number): rest for number, *rest in ROW.findall(PAGE)}
FOUND_BY_COMMAND = [number for number in BUGS if "check.py" in BUGS[number][2]]
CONFIG = TINY | {"peak_lr": 1e-2, "accum_steps": 2, "n_embd": 64}
# What computes in float16 is a GPU, or one of few CPUs; torch emulates it elsewhere.
COMMAND = """
import runpy, sys
from plumbing import machine
name, flags = machine.cpu_info()
machine.cpu_info = lambda: (name, flags | {"avx512_fp16"})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of this repository, with its tests."""
    return shutil.copytree(REPO, tmp_path / "copy", ignore=NOT_COPIED)


@pytest.fixture
def checked(copy, data_dir, tmp_path):
    """checked(words): the exit code and the output of a command of the table, on a tiny model."""

    def run(words):
        script, *rest = words.strip("`").replace("python ", "").split()
        settings = CONFIG | {"data_dir": data_dir, "out_dir": tmp_path / "run"}
        flags = [f"--{key}={value}" for key, value in settings.items()]
        done = run_python("-c", COMMAND, script, *flags, *rest[1:], cwd=copy)
        return done.returncode, done.stdout + done.stderr

    return run


def patch_of(number):
    return PATCHES[number - 1].read_text(encoding="utf-8")


# ---- the patches and the table -------------------------------------------------------------------


def test_the_bugs_are_numbered_without_gaps_and_each_has_its_row():
    assert [int(path.name[:2]) for path in PATCHES] == list(range(1, len(PATCHES) + 1))
    assert list(BUGS) == list(range(1, len(PATCHES) + 1)) and len(BUGS) >= 30


@pytest.mark.parametrize("number", BUGS)
def test_a_bug_applies_to_the_present_code_and_is_short(number, tmp_path):
    patch = patch_of(number)
    for name in re.findall(r"^--- a/(.*)$", patch, re.MULTILINE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    apply_patch(patch, tmp_path)
    sees, _, diff = patch.partition("\n\n")
    assert sees.endswith(".") and diff.startswith("--- a/")
    for sign in "+-":
        changed = re.findall(rf"^[{sign}](?!{re.escape(sign * 2)} ).*", diff, re.MULTILINE)
        assert len(changed) <= 6


def test_each_bug_names_a_test_that_exists():
    for number, (_, test, _, _) in BUGS.items():
        file, _, name = test.partition("::")
        source = (REPO / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in source, f"{number}: {test}"


def test_most_bugs_are_found_by_a_command():
    assert len(FOUND_BY_COMMAND) >= 20
    for number in BUGS:
        command, prints = BUGS[number][2:]
        if number in FOUND_BY_COMMAND:
            assert re.fullmatch(r"`python check.py CONFIG( --\w+=[\w.]+)*`", command)
            assert prints[:2] in ("✗ ", "! ")
        else:
            assert (command, prints) == ("only the test", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", BUGS)
def test_the_named_test_fails(number, copy):
    apply_patch(patch_of(number), copy)
    pytest_alone = "-m pytest -x -n0 -p no:cacheprovider".split()
    done = run_python(*pytest_alone, BUGS[number][1], cwd=copy)
    assert done.returncode == 1, done.stdout + done.stderr  # 1: a test failed; others: none was run
    assert f"FAILED {BUGS[number][1]}" in done.stdout and "\nERROR " not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", FOUND_BY_COMMAND)
def test_the_named_command_finds_it(number, copy, checked):
    _, _, command, prints = BUGS[number]
    apply_patch(patch_of(number), copy)
    code, output = checked(command)
    assert f"  {prints}: " in output, output
    assert code == (1 if prints.startswith("✗") else 0), output


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({BUGS[number][2] for number in FOUND_BY_COMMAND}))
def test_the_same_command_finds_nothing_in_the_code_as_it_is(command, checked):
    code, output = checked(command)
    assert code == 0 and "✗" not in output, output
    marks = {BUGS[n][3] for n in FOUND_BY_COMMAND if BUGS[n][2] == command}
    assert not [mark for mark in marks if f"  {mark}: " in output]

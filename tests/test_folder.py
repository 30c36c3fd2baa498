"""The folder of a run: one run at a time, its record true however the run ends, its rows whole."""

import errno
import json
import math
import os
import resource
import subprocess
import sys

import pytest
import torch
from conftest import arguments, fingerprint, first
from sources import around, at_step, stop_at

from plumbing.files import read_json, replacing, write_json
from plumbing.log import read_rows, whole_lines
from plumbing.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """A locked, empty RunFolder."""
    with RunFolder(tmp_path / "run") as folder:
        folder.lock(to_make=True)
        yield folder


@pytest.fixture
def in_another_process(run_train, tmp_path):
    """What a process prints that runs source with `folder`, a RunFolder of tmp_path/run."""
    head = f"from plumbing.run_folder import *\nfolder = RunFolder({str(tmp_path / 'run')!r})\n"

    def run(source):
        done = run_train("unused", before=f"{head}{source}\nraise SystemExit(0)", code=None)
        return done.stdout + done.stderr

    return run


# ---- one run at a time ---------------------------------------------------------------------------


def test_of_two_starts_in_one_empty_folder_the_second_touches_nothing(run_train):
    """The first runs from start to end while the second, which found no run, reads its data."""
    first = """
import sys
if "--seed=1" not in sys.argv:
    if not (child := os.fork()):
        sys.argv.append("--seed=1")
        os._exit(train.cli.run_script(train.main))
    print("FIRST", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = run_train("run", before=around("open_dataset", first), code=2)
    assert "FIRST 0" in done.stdout
    assert "another run has begun in" in done.stderr and "--out_dir=" in done.stderr
    assert done.facts["config"]["seed"] == 1 and len(done.rows("train")) == 12


def test_restart_moves_the_old_run_and_locks_the_place(folder, in_another_process, tmp_path):
    for number in (1, 2):
        (folder.path / "run.json").write_text(str(number))
        folder.set_aside()
        folder.lock(to_make=True)
        assert (tmp_path / f"run.old_{number}" / "run.json").read_text() == str(number)
        assert [path.name for path in folder.path.iterdir()] == [".lock"]
        assert folder.checked_path() and "in use by another run" in in_another_process(
            "folder.lock(to_make=True)"
        )
    folder.set_aside()  # nothing to move
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run.old_1", "run.old_2"]
    (folder.path / "run.json").write_text("3")
    assert "in use by another run" in in_another_process("folder.set_aside()")
    assert (folder.path / "run.json").read_text() == "3"


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_due, kept", [(False, [1.0, 2.0]), (True, [2.0])])
def test_an_evaluation_that_is_due_takes_the_place_of_its_old_row(folder, is_due, kept):
    row = {"kind": "eval", "step": 4, "val_loss": 1.0}
    folder.write_rows([{"kind": "train", "step": 4}, row])
    folder.log.keep_to(4, evaluation_due=is_due)
    folder.write_rows([row | {"val_loss": 2.0}])
    rows = read_rows(folder.log.path)
    assert [row["val_loss"] for row in rows if row["kind"] == "eval"] == kept


def test_no_row_stands_twice_whatever_fails(folder):
    """A disk that is full while old rows are replaced, and in the middle of a line."""

    def write(*steps):
        folder.write_rows([{"kind": "train", "step": step, "sequences": step} for step in steps])

    def steps():
        rows = read_rows(folder.log.path)
        assert len(rows) == len(whole_lines(folder.log.path))
        return [row["step"] for row in rows if row["kind"] == "train"]

    def bytes_of_a_file(limit):  # as on a full disk, a write beyond it is cut
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    write(*range(1, 18))
    folder.log.keep_to(10)
    try:
        bytes_of_a_file(100)
        write(11)
        write(12, 13)
        assert steps() == list(range(1, 18))  # the old ones
        with pytest.raises(OSError):
            folder.log.sync()  # so no checkpoint gets its name
        bytes_of_a_file(resource.RLIM_INFINITY)
        write(14)
        assert steps() == list(range(1, 15))
        bytes_of_a_file(folder.log.path.stat().st_size + 70)
        write(15, 16)  # one line and a half fit
        assert steps() == list(range(1, 15))
    finally:
        bytes_of_a_file(resource.RLIM_INFINITY)
    folder.log.sync()
    assert steps() == list(range(1, 17))


# ---- the end -------------------------------------------------------------------------------------


def test_a_kill_between_the_last_checkpoint_and_the_record_of_the_end_is_mended(run_train):
    kill = """
from plumbing import run_folder
run_folder.RunFolder.end = lambda *_: os.kill(os.getpid(), 9)
"""
    killed = run_train("run", before=kill, code=137)
    assert killed.checkpoint(12).exists()
    assert killed.facts["ended"] is None
    last_write = killed.facts["start"]
    done = run_train("run", "--report=true")
    assert "is finished" in done.stdout, done.stderr
    after = done.facts
    assert after["ended"] == "finished" and after["state"]["step"] == 12
    assert last_write <= after["end"] and (done.out_dir / "report.md").exists()
    assert [row["event"] for row in done.rows("event")][-1] == "end"
    rows = len(done.rows())
    run_train("run")
    assert len(done.rows()) == rows  # it is mended once


def test_the_report_is_a_process_of_its_own_whose_time_counts(run_train):
    done = run_train("run", "--report=true")
    assert "report.png" in done.stdout and (done.out_dir / "report.md").exists()
    seconds = done.facts["seconds"]
    assert seconds["report"] > 0.1 and done.facts["ended"] == "finished"
    assert "finished" in (done.out_dir / "report.md").read_text()  # the end was recorded before
    stopped = run_train("stopped", "--report=true", before=stop_at(6), code=143)
    assert not (stopped.out_dir / "report.md").exists()


def test_a_run_folder_that_vanishes_ends_in_one_line(run_train):
    vanish = "import shutil; shutil.rmtree(run.folder.path)"
    done = run_train("run", "--log_interval=1", before=at_step(6, vanish), code=1)
    assert "Traceback" not in done.stderr, done.stderr
    assert "run.json cannot be written (No such file or directory)" in done.stdout


@pytest.mark.parametrize("number, code", [(1, 2), (2, 0)])
def test_a_full_disk_at_a_write_of_run_json_is_one_line(run_train, number, code):
    """The second one ends no run: it is written again at the end."""
    source = f"""
import plumbing.run_folder as folder
calls = []
def write_json(*rest, inner=folder.write_json):
    calls.append(1)
    if len(calls) == {number}:
        raise OSError(28, "No space left on device")
    inner(*rest)
folder.write_json = write_json
"""
    done = run_train("run", before=source, code=code)
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).count("cannot be written (No space left on device)") == 1


# ---- the files of a checkpoint -------------------------------------------------------------------

SAVES = ("--save_interval=2", "--eval_interval=2", "--milestone_interval=4")
KILL_AT_4 = """
def link(source, name, inner=os.link):
    if name.name.startswith("milestone_00000004"):
        os.kill(os.getpid(), 9)
    inner(source, name)
os.link = link
"""


def test_a_kill_between_the_names_of_a_save_loses_none_of_them(run_train):
    straight = run_train("straight", *SAVES)
    killed = run_train("run", *SAVES, before=KILL_AT_4, code=137)
    assert not killed.checkpoint(4).exists()
    done = run_train("run", *SAVES)
    names = {path.name for path in straight.out_dir.glob("*.pt")}
    assert {path.name for path in done.out_dir.glob("*.pt")} == names
    assert "milestone_00000004.pt" in names
    best = [torch.load(each.out_dir / "best.pt")["state"]["step"] for each in (straight, done)]
    assert best[0] == best[1]


# ---- files ---------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    (tmp_path / "file.tmp").write_text("half")  # by a process that was killed
    with replacing(path) as temporary:
        assert not temporary.exists()
        temporary.write_text("old")
        assert names(tmp_path) == ["file.tmp"]
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("new")
        assert names(tmp_path) == ["file", "file.tmp"]
        raise KeyboardInterrupt
    assert names(tmp_path) == ["file"] and path.read_text() == "old"

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"new": 1})
    assert names(tmp_path) == ["file"] and path.read_text() == "old"


def test_the_content_is_fsynced_before_the_name_changes_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    inodes = {tmp_path.stat().st_ino: "fsync folder"}
    real_fsync = os.fsync
    real_replace = os.replace

    def fsync(descriptor):
        calls.append(inodes.get(os.fstat(descriptor).st_ino, "fsync file"))
        real_fsync(descriptor)

    def replace(*paths):
        calls.append("replace")
        real_replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_json(tmp_path / "file", {})
    assert calls == ["fsync file", "replace", "fsync folder"]


def test_json_has_null_for_what_is_not_finite_and_repr_for_what_it_does_not_know(tmp_path):
    value = {"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf}, "t": torch.ones(2)}
    write_json(tmp_path / "file", value | {"ß": "🐴"})

    def refuse(constant):
        raise ValueError(constant)

    found = json.loads((tmp_path / "file").read_text(), parse_constant=refuse)
    expected = {"a": [None, 1.5, [None]], "b": {"c": None}, "t": "tensor([1., 1.])", "ß": "🐴"}
    assert found == expected
    assert read_json(tmp_path / "file") == found


# ---- the terminal --------------------------------------------------------------------------------

FLAGS = ("--save_interval=4", "--keep_last=2")


@pytest.fixture
def straight(once):
    return once(*FLAGS)


OUTPUTS = [
    # standard error is on a disk that is full, the reader of the rest leaves
    "TRAIN 2>/dev/full | head -n 2 >/dev/null; exit ${PIPESTATUS[0]}",
    "TRAIN >&- 2>&-",  # there is none
    "TRAIN >/dev/full 2>/dev/full",
]


@pytest.mark.parametrize("command", first(2, OUTPUTS))
def test_a_run_whose_output_cannot_be_written_trains_on(command, data_dir, tmp_path, straight):
    flags = arguments(tmp_path / "run", data_dir, FLAGS)
    environment = os.environ | {"PYTHON": sys.executable, "FLAGS": " ".join(flags)}
    command = command.replace("TRAIN", "$PYTHON $FLAGS")
    subprocess.run(["bash", "-c", command], env=environment, check=True)
    done = tmp_path / "run" / "ckpt_00000012.pt"
    assert straight.fingerprint(12) == fingerprint(done)


def test_a_closed_terminal_stops_a_run_with_a_checkpoint_unless_under_nohup(run_train, straight):
    stopped = run_train("run", *FLAGS, before=stop_at(6, "SIGHUP"), code=129)
    assert stopped.checkpoint(6).exists()
    assert run_train("run", *FLAGS).fingerprint(12) == straight.fingerprint(12)
    nohup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = run_train("nohup", *FLAGS, before=nohup + stop_at(6, "SIGHUP"))
    assert done.fingerprint(12) == straight.fingerprint(12)

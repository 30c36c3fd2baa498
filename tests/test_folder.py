"""The folder of a run: one run at a time, its record true however the run ends, its rows whole."""

import threading

import pytest
from conftest import read_rows
from sources import SHORT_PAUSES, around, at_step, stop_at

from plumbing.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """A locked, empty RunFolder."""
    with RunFolder(tmp_path / "run") as folder:
        folder.take()
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


def test_a_run_that_was_killed_before_its_first_save_starts_again(run_train):
    kill = "train.safe_step.rehearse = lambda *_, **__: os.kill(os.getpid(), 9)"
    killed = run_train("run", before=kill, code=137)
    assert killed.facts["ended"] is None
    run_train("run")


def test_restart_moves_the_old_run_and_locks_the_place(folder, in_another_process, tmp_path):
    for number in (1, 2):
        (folder.path / "run.json").write_text(str(number))
        folder.set_aside()
        assert (tmp_path / f"run.old_{number}" / "run.json").read_text() == str(number)
        assert [path.name for path in folder.path.iterdir()] == [".lock"]
        assert folder.mine() and "in use by another run" in in_another_process("folder.lock()")
    folder.set_aside()  # nothing to move
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run.old_1", "run.old_2"]
    (folder.path / "run.json").write_text("3")
    assert "in use by another run" in in_another_process("folder.set_aside()")
    assert (folder.path / "run.json").read_text() == "3"


# ---- rows ----------------------------------------------------------------------------------------


def test_rows_of_two_threads_do_not_mix(folder):
    def write(kind):
        for step in range(200):
            folder.write_rows([{"kind": kind, "step": step, "padding": "x" * 1000}])

    threads = [threading.Thread(target=write, args=[kind]) for kind in ("train", "event")]
    for thread in threads:
        thread.start()
    for _ in range(20):
        folder.cut_rows(1000)  # as a rollback does
    for thread in threads:
        thread.join()
    for kind in ("train", "event"):
        assert [row["step"] for row in read_rows(folder.path, kind)] == list(range(200))


def test_a_resume_drops_lines_that_are_no_rows(folder):
    bad = ["null", "[" * 100_000, '{"kind": "train", "step": "x"}', '{"kind": "train"', "[1]"]
    good, later = '{"kind": "train", "step": 1}', '{"kind": "train", "step": 2}'
    path = folder.path / "metrics.jsonl"
    path.write_text("\n".join([good, *bad, good, later]) + "\n")
    folder.cut_rows(1)
    assert path.read_text().splitlines() == [good, good]


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
    before = SHORT_PAUSES + at_step(6, vanish)
    done = run_train("run", "--log_interval=1", before=before, code=1)
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

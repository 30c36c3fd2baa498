"""What happens to a run while nobody looks: terminals close, pipes break, folders and files
change."""

import os
import subprocess
import sys

import pytest
from conftest import REPO, arguments, fingerprint, first
from sources import at_step, stop_at

FLAGS = ("--save_interval=4", "--keep_last=2")


@pytest.fixture
def straight(once):
    return once(*FLAGS)


# ---- the terminal --------------------------------------------------------------------------------


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


def test_a_terminal_that_lacks_a_character_gets_its_code_instead(run_train):
    done = run_train("ünï", before="import sys; sys.stdout = open(1, 'w', encoding='ascii')")
    assert r"\xfcn\xef" in done.stdout and done.checkpoint(12).exists()


def test_a_closed_terminal_stops_a_run_with_a_checkpoint_unless_under_nohup(run_train, straight):
    stopped = run_train("run", *FLAGS, before=stop_at(6, "SIGHUP"), code=129)
    assert stopped.checkpoint(6).exists()
    assert run_train("run", *FLAGS).fingerprint(12) == straight.fingerprint(12)
    nohup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = run_train("nohup", *FLAGS, before=nohup + stop_at(6, "SIGHUP"))
    assert done.fingerprint(12) == straight.fingerprint(12)


def test_a_rank_leaves_without_the_finalization_of_python():
    code = """
import atexit
from plumbing.machine import leave
class Last:
    def __del__(self):
        print("finalized")
last = Last()
atexit.register(print, "at exit")
print("before", end=" ")
leave(3)
"""
    command = [sys.executable, "-c", code]
    environment = os.environ | {"WORLD_SIZE": "2"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "before at exit\n"), done.stderr


# ---- the folder ----------------------------------------------------------------------------------


def test_a_run_does_not_write_into_the_folder_of_another_that_took_its_place(run_train):
    replace = at_step(
        6,
        """
import shutil
folder = run.folder.path
shutil.rmtree(folder)  # no save is under way
folder.mkdir()
for name in (".lock", "metrics.jsonl", "run.json", "ckpt_00000008.pt"):
    (folder / name).write_text("of another run")
""",
    )
    done = run_train("run", before=replace, code=1)
    assert "another run has taken the place of this folder" in done.stdout, (
        done.stderr + done.stdout
    )
    there = {path.name: path.read_text() for path in done.out_dir.iterdir()}
    assert set(there.values()) == {"of another run"} and len(there) == 4

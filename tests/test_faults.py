"""Whatever happens to a run, the same command resumes it, and the person is told the truth.

One process in nearly all; several ranks in test_ranks.py. Nothing is simulated but the two things
that cannot be had to order: a number that is not finite, and a GPU that has no memory left."""

import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    REPO,
    arguments,
    events,
    fingerprint,
    flip_a_bit,
    read_rows,
    run_python,
    tree,
    wait_for,
)
from sources import SAVED, around, at_step, bad_batches, ranks, stop_at

from plumbing import checkpoint
from plumbing.snapshot import tensors

EVERYTHING = ("--num_workers=1", "--ema_decay=0.9", "--dropout=0.1", "--save_interval=4")


def states_equal(one, other, *but):
    """Do two fingerprints agree in every part but those named?"""
    return all(one[part] == other[part] for part in one if part not in but)


# ---- signals -------------------------------------------------------------------------------------


@pytest.fixture
def straight(once):
    """The run that nothing happens to, with everything on."""
    return once(*EVERYTHING)


def test_one_more_ctrl_c_leaves_at_once(run_train):
    """A step that takes a minute; two Ctrl-C leave all the same, also after a SIGTERM."""
    hang = at_step(
        5,
        """
        import threading
        print("PID", os.getpid(), flush=True)
        for delay, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 1):
            threading.Timer(delay / 5, os.killpg, (0, number)).start()
        time.sleep(60)
        """,
    )
    # how often a worker of torch asks whether its parent is there: 5 s
    soon = "torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5\n"
    start = time.monotonic()
    done = run_train("run", "--num_workers=2", before=soon + hang, code=130)
    assert time.monotonic() - start < 50
    assert not done.checkpoint(5).exists()
    group = done.stdout.split("PID ")[1].split()[0]
    wait_for(lambda: subprocess.run(["pgrep", "-g", group], check=False).returncode == 1)


def test_sigusr1_keeps_a_checkpoint_and_training_continues(run_train, straight):
    ask = at_step(6, "os.killpg(0, signal.SIGUSR1)")
    die = stop_at(8, "SIGKILL")
    run_train("run", *EVERYTHING, "--save_interval=0", before=ask + die, code=137)
    done = run_train("run", *EVERYTHING)
    assert "ckpt_00000006.pt\n" in done.stdout
    assert done.fingerprint(12) == straight.fingerprint(12)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_is_served_while_the_next_batch_is_not_there(run_train, straight, workers):
    """No row stands twice afterwards, and the end is that of a run without the stop."""
    hang = """
import threading
def slow(self, place, inner=train.ShuffledWindows.__getitem__):
    if place[0] == 6 * 8:
        time.sleep(1000)
    return inner(self, place)
train.ShuffledWindows.__getitem__ = slow
""" + at_step(6, "threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()")
    flags = (*EVERYTHING, "--eval_interval=3", f"--num_workers={workers}")
    start = time.monotonic()
    stopped = run_train("run", *flags, before=hang, code=143)
    assert time.monotonic() - start < 60 and stopped.checkpoint(6).exists()
    done = run_train("run", *flags)
    assert [row["step"] for row in done.rows("eval")] == [0, 3, 6, 9, 12]
    assert [row["step"] for row in done.rows("train")] == list(range(1, 13))
    assert states_equal(done.fingerprint(12), straight.fingerprint(12), "state")


@pytest.mark.parametrize("script", ["train.py", "report.py"])
def test_ctrl_c_in_the_imports_is_one_line(script, tmp_path):
    """An import that takes long, of a module that every script needs."""
    (tmp_path / "numpy.py").write_text("import time; print(flush=True); time.sleep(60)")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, script], cwd=REPO, env=env, text=True, stdout=-1, stderr=-1
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "stopped by Ctrl-C\n"
    assert process.returncode == 130


def test_what_failed_before_the_first_save_gets_no_advice_that_cannot_work(run_train):
    """Nor does the log hold a text of any length."""
    done = run_train("run", before=around("evaluate", "raise ValueError('long ' * 9999)"), code=1)
    assert "type the same command" not in done.stdout and "python " not in done.stdout
    assert len(done.facts["ended"]) < 400 and len(events(done, "end")[0]["ended"]) < 400
    ask = around("evaluate", "os.kill(os.getpid(), signal.SIGINT)")
    stopped = run_train("stopped", before=ask, code=130)
    assert "inf" not in stopped.stdout and "python " not in stopped.stdout
    assert stopped.stderr == "stopped by Ctrl-C\n"


# ---- SIGKILL -------------------------------------------------------------------------------------

STORM = "--n_embd=64 --save_interval=3 --eval_interval=6 --log_interval=7 --milestone_interval=30"


def killer(folder, chance, in_save):
    """Source: a process that kills this one after up to 4 more checkpoints, or in a save then."""
    return f"""
import pathlib, random
def newest():
    return max([int(path.stem[5:]) for path in folder.glob("ckpt_*.pt")], default=-3)
def until(condition):
    while os.getppid() == victim and not condition():
        time.sleep(0.001)
if os.fork() == 0:
    victim, chance, folder = os.getppid(), random.Random({chance}), pathlib.Path("{folder}")
    more = chance.randrange(5)
    goal = newest() + 3 * more
    until(lambda: newest() >= goal)
    time.sleep(chance.uniform(0, 0.03 if more else 0.6))
    until(lambda: not {in_save} or list(folder.glob("*.pt.tmp")))
    time.sleep(chance.uniform(0, 0.002))
    if os.getppid() == victim:
        os.kill(victim, signal.SIGKILL)
    os._exit(0)
"""


@pytest.mark.parametrize(
    "kills, steps", [(3, 60), pytest.param(20, 390, marks=pytest.mark.slow)], ids=["3", "20"]
)
def test_a_storm_of_sigkills_loses_nothing(run_train, tmp_path, kills, steps):
    flags = [*EVERYTHING, *STORM.split(), f"--max_steps={steps}"]
    straight = run_train("straight", *flags)
    folder, in_saves, at = tmp_path / "run", 0, []
    for number in range(kills):
        killed = run_train("run", *flags, before=killer(folder, number, number % 2), code=None)
        assert killed.returncode in (137, 0)  # 0: it was faster
        assert "damaged" not in killed.stdout
        in_saves += any(folder.glob("*.pt.tmp"))
        for path in folder.glob("*.pt"):
            checkpoint.load(path)
        at.append([checkpoint.step_of(path) for path in folder.glob("ckpt_*.pt")])
    done = run_train("run", *flags)
    print(f"{kills} kills, {in_saves} of them in a save, with these checkpoints: {at}")
    assert in_saves or kills < 20
    assert done.fingerprint(steps) == straight.fingerprint(steps)
    assert fingerprint(folder / "best.pt") == fingerprint(straight.out_dir / "best.pt")
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("*.corrupt"))
    rows = [[(row["kind"], row["step"]) for row in run.rows() if row["kind"] != "event"]
            for run in (done, straight)]  # fmt: skip
    assert rows[0] == rows[1]


@pytest.mark.parametrize("file, whole", [("", None), ("0008", 4)], ids=["first", "third"])
def test_a_kill_within_a_save_leaves_no_half_checkpoint(run_train, straight, file, whole):
    """The one before it is whole, and the resume begins there; without one, a run starts again."""
    in_save = f"""
def save(value, path, inner=torch.save):
    name = str(getattr(path, "name", ""))  # none: a trial in memory
    if not name or "{file}" not in name:
        return inner(value, path)
    path.write(b"half a checkpoint")
    path.flush()
    os.kill(os.getpid(), 9)
torch.save = save
"""
    killed = run_train("run", *EVERYTHING, before=in_save, code=137)
    assert list(killed.out_dir.glob("*.pt*.tmp"))
    for path in killed.out_dir.glob("*.pt"):
        checkpoint.load(path)
    assert killed.checkpoint(4).exists() == (whole == 4)
    done = run_train("run", *EVERYTHING)
    assert "damaged" not in done.stdout
    assert done.fingerprint(12) == straight.fingerprint(12)
    assert [row["step"] for row in done.rows("eval")] == [0, 12]


# ---- checkpoints that are no good ----------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


DAMAGES = {  # of a checkpoint; a bomb makes the folder `boom`
    "truncated": lambda path, bomb: os.truncate(path, path.stat().st_size * 2 // 3),
    "a bit": lambda path, bomb: flip_a_bit(path),
    "a pickle bomb": lambda path, bomb: path.write_bytes(pickle.dumps(bomb)),
    "a bomb in a zip": lambda path, bomb: torch.save({"state": bomb}, path),
}


@pytest.fixture(scope="session")
def interrupted(train_in, tmp_path_factory):
    """The folder of a run that was killed at step 11, with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("interrupted")
    killed = train_in(folder, "run", *EVERYTHING, before=stop_at(11, "SIGKILL"), code=137)
    names = {path.name for path in killed.out_dir.glob("*.pt")}
    assert names == {"ckpt_00000004.pt", "ckpt_00000008.pt", "best.pt"}
    return killed.out_dir


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    run_train, straight, interrupted, tmp_path, damage
):
    shutil.copytree(interrupted, tmp_path / "run")
    path = tmp_path / "run/ckpt_00000008.pt"
    DAMAGES[damage](path, Bomb(tmp_path / "run" / "boom"))
    content = path.read_bytes()
    done = run_train("run", *EVERYTHING)
    words = "a checksum is wrong, it is cut off, or no checkpoint|it is no checkpoint of train.py"
    line = rf"ckpt_00000008.pt is damaged \(({words})\): an older checkpoint is tried\n"
    assert re.search(line, done.stdout), done.stdout
    assert "ckpt_00000004.pt\n" in done.stdout
    assert (tmp_path / "run/ckpt_00000008.pt.corrupt").read_bytes() == content
    assert not (tmp_path / "run/boom").exists()
    assert done.fingerprint(12) == straight.fingerprint(12)


def test_an_error_in_reading_a_checkpoint_is_no_damage(run_train, interrupted, tmp_path):
    """A disk that answers EIO."""
    shutil.copytree(interrupted, tmp_path / "run")
    before = tree(tmp_path / "run")
    fail = """
import errno, zipfile
def read(file, inner=zipfile.ZipFile.testzip):
    if "ckpt_00000008.pt" in str(file.filename or file.fp.name):
        raise OSError(errno.EIO, "Input/output error")
    return inner(file)
zipfile.ZipFile.testzip = read
"""
    done = run_train("run", *EVERYTHING, before=fail, code=2)
    assert "Traceback" not in done.stderr
    assert "ckpt_00000008.pt cannot be read (Input/output error)" in done.stderr
    assert "damaged" not in done.stdout and tree(tmp_path / "run") == before


def test_no_checkpoint_is_written_that_could_not_be_read(run_train, straight):
    """A state that turns into what no checkpoint brings back, such as a number of NumPy's."""
    numpy = at_step(6, "import numpy; run.state['lr_factor'] = numpy.float64(1)")
    done = run_train("run", *EVERYTHING, before=numpy, code=1)
    assert done.rows("train")[-1]["step"] == 8
    assert "lr_factor" in done.stderr and "numpy.float64" in done.stderr
    assert not done.checkpoint(8).exists() and checkpoint.load(done.checkpoint(4))
    done = run_train("run", *EVERYTHING)  # mended
    assert "damaged" not in done.stdout and done.fingerprint(12) == straight.fingerprint(12)


def test_other_files_are_neither_resumed_from_nor_pruned(
    run_train, straight, interrupted, tmp_path
):
    """Names that we do not give; and ckpt_00000099.pt, which says a step that it does not hold."""
    shutil.copytree(interrupted, tmp_path / "run")
    content = (tmp_path / "run/ckpt_00000004.pt").read_bytes()
    others = ("ckpt_3.pt", "ckpt_good.pt", "ckpt_00000008 copy.pt", "ckpt_00000099.pt")
    for name in others:
        (tmp_path / "run" / name).write_bytes(content)
    done = run_train("run", *EVERYTHING, "--keep_last=1")
    assert "ckpt_00000099.pt is damaged" in done.stdout
    assert "ckpt_00000008.pt\n" in done.stdout
    assert done.fingerprint(12) == straight.fingerprint(12)
    for name in (*others[:3], "ckpt_00000099.pt.corrupt"):
        assert (done.out_dir / name).read_bytes() == content


def test_a_checkpoint_of_another_version_is_refused_and_stays(run_train, interrupted, tmp_path):
    """In one line, which says where the commit is named whose code can use it."""
    shutil.copytree(interrupted, tmp_path / "run")
    path = tmp_path / "run/ckpt_00000008.pt"
    older = torch.load(path, weights_only=True)
    del older["format"]
    torch.save(older, path)
    before = tree(tmp_path / "run")
    done = run_train("run", *EVERYTHING, code=2)
    assert len(done.stderr.splitlines()) == 1 and "its run.json names" in done.stderr
    assert tree(tmp_path / "run") == before


def test_with_no_good_checkpoint_left_it_says_so_and_stops(run_train, interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "run")
    damaged = list((tmp_path / "run").glob("*.pt"))
    for path in damaged:
        path.write_bytes(path.read_bytes()[:1000])
    for _ in range(2):  # the second start is not tempted to begin anew
        done = run_train("run", *EVERYTHING, code=2)
        assert "no checkpoint that can be read" in done.stderr
        assert "--out_dir=run_2" in done.stderr
    for path in damaged:
        assert path.stat().st_size == 1000  # a refusal renames nothing
        path.unlink()
    done = run_train("run", *EVERYTHING, code=2)  # no checkpoint at all, but the rows of a run
    assert "no checkpoint that can be read" in done.stderr


# ---- the disk ------------------------------------------------------------------------------------


FILL = f"""{SAVED}
with open(run.folder.path / "metrics.jsonl", "a") as file:  # no room in its last page either
    line = '{{"kind": "event", "event": "padding", "step": 5, "padding": ""}}\\n'
    file.write(line.replace('""', '"' + "x" * ((-file.tell() - len(line)) % 4096) + '"'))
try:
    with open(run.folder.path.parent / "filler", "wb", buffering=0) as file:
        while file.write(bytes(100_000)) == 100_000:
            pass
except OSError:
    pass
"""
CLEAR = f"""{SAVED}
(run.folder.path.parent / "filler").unlink()
"""


def valid_rows(done, steps):
    rows = done.rows("train")  # raises where a line is no JSON
    return [row["step"] for row in rows] == list(range(1, steps + 1))


def test_a_disk_that_is_full_for_a_while_costs_nothing_but_saves(run_train, straight, small_disk):
    flags = (*EVERYTHING, "--log_interval=1")
    before = at_step(6, FILL) + at_step(10, CLEAR)
    done = run_train(small_disk(60) / "run", *flags, before=before)
    words = "8 save failed: file ckpt_00000008.pt  error No space left on device"
    assert done.stdout.count("ckpt_00000008.pt") == done.stdout.count(words) == 1
    assert [(row["step"], row["file"]) for row in events(done, "save_failed")] == [
        (8, "ckpt_00000008.pt")
    ]
    assert done.stdout.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert valid_rows(done, 12)
    assert done.fingerprint(12) == straight.fingerprint(12)
    assert not list(done.out_dir.glob("*.tmp"))


WAITED = """
import time
def sleep(seconds):
    waits.append(seconds)
    {then}
waits = []
clock = {{"sleep": staticmethod(sleep), "monotonic": time.monotonic}}
train.checkpoint.time = type("time", (), clock)
"""


def test_a_disk_that_is_full_at_the_end_is_waited_for(run_train, straight, small_disk):
    """One line, with how much room is needed."""
    disk = small_disk(60)
    wait = WAITED.format(then=f"if len(waits) == 2: os.unlink('{disk}/filler')")
    done = run_train(disk / "run", *EVERYTHING, before=wait + at_step(6, FILL))
    words = r"waiting for 0\.\d MB on the disk to save ckpt_00000012.pt"
    assert len(re.findall(words, done.stdout)) == 1
    assert done.fingerprint(12) == straight.fingerprint(12) and done.facts["ended"] == "finished"


def test_a_wait_for_room_ends_at_ctrl_c_with_a_good_checkpoint(run_train, straight, small_disk):
    flags = (*EVERYTHING, "--log_interval=1")
    disk = small_disk(60)
    wait = WAITED.format(then="os.kill(os.getpid(), signal.SIGINT)")
    done = run_train(disk / "run", *flags, before=wait + at_step(6, FILL), code=130)
    assert "Ctrl-C" in done.stderr and "Traceback" not in done.stderr
    assert checkpoint.load(done.checkpoint(4))["state"]["step"] == 4
    assert not list(done.out_dir.glob("*.tmp"))
    (disk / "filler").unlink()
    done = run_train(disk / "run", *flags)
    assert done.fingerprint(12) == straight.fingerprint(12)
    assert valid_rows(done, 12)


BROKEN = """
import errno, time
real = os.fsync
train.checkpoint.PAUSE, train.checkpoint.LIMIT, train.checkpoint.LIMIT_AFTER_SIGNAL = 0.2, 3, 1
def fails(descriptor):
    if time.monotonic() < end:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    real(descriptor)
"""
BREAK = """
global end
end = time.monotonic() + {seconds}
os.fsync = fails
"""


@pytest.mark.parametrize("seconds, count", [(0.5, 1), (99, 1), (99, 2)])
def test_an_error_of_the_save_after_a_signal_is_tried_again_for_a_while(run_train, seconds, count):
    stop = BREAK.format(seconds=seconds) + "os.kill(os.getpid(), signal.SIGTERM)"
    before = ranks(count, "import os, signal" + BROKEN + at_step(6, SAVED + stop))
    done = run_train("run", "--save_interval=4", before=before, code=143)
    is_saved = seconds < 1
    assert done.checkpoint(6).exists() == is_saved and done.checkpoint(4).exists()
    newest = f"the newest checkpoint: step 4 in {done.out_dir}"
    assert done.stderr.count(newest) == (not is_saved), "once, whatever the number of ranks"
    assert len(events(done, "saved")) == 3 and len(events(done, "save_failed")) == 1


def test_a_folder_that_is_gone_ends_the_run_at_its_next_rows_unless_it_comes_back(run_train):
    move = "os.rename(run.folder.path, str(run.folder.path) + '_moved')"
    back = "os.rename(str(run.folder.path) + '_moved', run.folder.path)"
    begin = "import os" + BROKEN
    flags = ("--max_steps=60", "--log_interval=2")
    done = run_train("run", *flags, before=begin + at_step(6, SAVED + move), code=1)
    assert "ckpt_00000007.pt could not be saved: No such file or directory" in done.stderr
    assert "the newest checkpoint: step 0 in" in done.stderr and not done.out_dir.exists()
    wait = f"import time\nreal_sleep = time.sleep\ndef sleep(s):\n    {back}\n    time.sleep = real_sleep"
    begin += "\n" + wait.replace("run.folder.path", repr(str(done.out_dir.with_name("again"))))
    begin += "\ntime.sleep = sleep\n"
    done = run_train("again", *flags, before=begin + at_step(6, SAVED + move))
    assert valid_rows(done, 60)


def test_a_save_in_the_background_holds_the_state_of_its_own_step(run_train):
    """Though the loop goes on meanwhile."""
    wait = """
def save(saver, names, required=False, inner=train.checkpoint.Saver.save):
    inner(saver, names, required=True)
train.checkpoint.Saver.save = save
"""
    late = around("checkpoint.Saver.write", "time.sleep(0.3)")
    flags = ("--save_interval=3", "--keep_last=9", "--ema_decay=0.9")
    waited, went_on = (run_train(n, *flags, before=b) for n, b in (("w", wait), ("l", late)))
    for step in (3, 6, 9, 12):
        assert went_on.fingerprint(step) == waited.fingerprint(step)


# ---- workers -------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_ends_the_run_with_a_message(run_train, straight):
    kill = at_step(
        6,
        """
        import multiprocessing
        os.kill(multiprocessing.active_children()[0].pid, 9)
        """,
    )
    start = time.monotonic()
    done = run_train("run", *EVERYTHING, "--max_steps=400", before=kill, code=1)
    assert time.monotonic() - start < 80
    assert "DataLoader worker" in done.stderr and "Traceback" not in done.stderr
    assert "the same command resumes" in done.stderr


# ---- numbers that are not finite -----------------------------------------------------------------

SOON = "train.MAX_SKIPPED = 2\n"
LATE_NAN = """
import os, sys
import train
inner = train.train_step
def train_step(model, run, inputs, targets, lr):
    bad = float("nan") if run.state["step"] >= 5 and lr > 4e-4 else 1.0
    return inner(model, run, inputs, targets, lr) if bad == 1 else {
        **inner(lambda *batch: run.model(*batch) * bad, run, inputs, targets, lr)}
train.train_step = train_step
if __name__ == "__main__":
    sys.exit(train.main())
"""


def test_ten_bad_steps_in_a_row_end_the_run_with_two_commands_that_work(tmp_path, data_dir):
    (tmp_path / "late nan.py").write_text(LATE_NAN)
    _, *flags = arguments("run", data_dir, ("--save_interval=4", "--max_steps=30"))

    def typed(*words):
        path = f"{REPO}:{os.environ.get('PYTHONPATH', '')}"
        return run_python(*words, cwd=tmp_path, PYTHONPATH=path)

    done = typed("late nan.py", *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    first, lower, look = done.stderr.splitlines()
    for words in (
        "not finite in 10 steps in a row, at step 15",
        "lr 0.00",
        "grad_norm",
        "loss nan",
    ):
        assert words in first
    assert [row["step"] for row in read_rows(tmp_path / "run", "train")] == [*range(1, 16)]
    for path in (tmp_path / "run").glob("*.pt"):
        saved = checkpoint.load(path)
        assert all(part.isfinite().all() for part in tensors([saved["model"], saved["optimizer"]]))
    again = typed(*flags_of(lower))
    assert again.returncode == 0, again.stderr
    rows = read_rows(tmp_path / "run_2", "train")
    assert rows[0]["step"] == 13 and rows[-1]["step"] == 30 and not any(r["skipped"] for r in rows)
    replayed = typed(*flags_of(look))
    assert "first tensor that is not finite" in replayed.stdout, replayed.stderr


def flags_of(line):
    """The words after `python` of a command that stands at the end of a line."""
    return shlex.split(line.partition(": ")[2])[1:]


@pytest.mark.parametrize("step", [11, 9])
def test_a_run_that_ends_by_bad_steps_does_so_after_a_stop_too(run_train, step):
    """They are counted across a stop, and skipped updates are saved like others."""
    flags = (*EVERYTHING, "--max_steps=20", "--log_interval=1", "--save_interval=3")
    bad = "train.MAX_SKIPPED = 4\n" + bad_batches([8, 9, 10, 11])
    straight = run_train("straight", *flags, before=bad, code=1)
    run_train("run", *flags, before=bad + stop_at(step, "SIGINT"), code=130)
    done = run_train("run", *flags, before=bad, code=1)
    assert "at step 12" in straight.stderr and "at step 12" in done.stderr
    assert events(done, "resume_checked")[0]["first_difference"] is None
    assert done.fingerprint(9) == straight.fingerprint(9)


@pytest.mark.parametrize("dtype, code", [("float16", 0), ("float32", 1)])
def test_a_loss_scale_that_is_being_lowered_ends_no_run(run_train, dtype, code):
    bad = SOON + bad_batches([1, 2, 3, 4], "grad = torch.full_like(w, math.inf)")
    done = run_train("run", f"--dtype={dtype}", "--log_interval=1", before=bad, code=code)
    assert [row["skipped"] for row in done.rows("train")][:3] == [0, 1, 1]


def test_a_loss_above_its_first_value_is_an_event_and_training_continues(run_train):
    high = bad_batches(list(range(1, 99)), "loss + 5")
    skipped_too = bad_batches([8], "loss * math.nan")
    before = "train.MAX_HIGH = 4\n" + high + skipped_too
    done = run_train("run", "--log_interval=1", before=before)
    (event,) = events(done, "diverging")
    assert event["step"] == 5 and event["loss"] > event["first"]
    assert "diverging" in done.stdout and "warning" in done.stdout


@pytest.mark.slow
def test_each_width_of_a_compiled_run_is_compiled_and_torch_says_why(run_train):
    widths = """
def padded(self, place, inner=train.ShuffledWindows.__getitem__):
    return [part[:, : 12 + place[0] // 8 % 5] for part in inner(self, place)]
train.ShuffledWindows.__getitem__ = padded
"""
    done = run_train("run", "--compile=true", "--max_steps=6", before=widths, timeout=600)
    assert "expected 14, actual 15" in done.stderr


# ---- memory --------------------------------------------------------------------------------------


def out_of_memory(most, from_step=0):
    """Source: a GPU with room for `most` sequences in a micro-batch, from that step on."""
    lacks = f"run.state['step'] >= {from_step} and run.state['micro_batch'] > {most}"
    error = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    return around("forward_backward", then=f"if {lacks}: raise {error}")


@pytest.mark.parametrize("most, from_step", [(2, 0), (4, 5)], ids=["warm-up", "step 6"])
def test_memory_that_runs_out_in_mid_run_halves_the_micro_batch_and_does_the_step_again(
    run_train, most, from_step
):
    """The gradients and random numbers of the attempt that failed leave no trace."""
    flags = ("--dropout=0.1", "--log_interval=4")  # the event is not of the step of the next line
    done = run_train("run", *flags, before=out_of_memory(most, from_step))
    (event,) = events(done, "out_of_memory")
    assert (event["step"], event["micro_batch"]) == (from_step and 6, most)
    if from_step:
        run_train("asked", *flags, before=stop_at(5), code=143)
    split = (f"--batch_size={most}", f"--accum_steps={8 // most}")
    asked = run_train("asked", *flags, *split)
    assert states_equal(done.fingerprint(12), asked.fingerprint(12), "state")


def test_below_one_sequence_it_says_what_to_try(run_train):
    done = run_train("run", before=out_of_memory(0), code=1)
    assert "Traceback" not in done.stderr
    assert "--grad_checkpoint=true" in done.stderr and "--n_embd" in done.stderr


def test_memory_that_runs_out_in_an_evaluation_changes_nothing_in_training(run_train):
    """The evaluation is done again in smaller micro-batches, over the same windows."""
    small = """
if run.state["micro_batch"] > 2:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""
    flags = ("--dropout=0.1", "--eval_tokens=100")
    done = run_train("run", *flags, before=around("sum_losses_of_batch", then=small))
    assert events(done, "out_of_memory") == []
    enough = run_train("enough", *flags)
    assert states_equal(done.fingerprint(12), enough.fingerprint(12), "state")
    for one, other in zip(done.rows("eval"), enough.rows("eval"), strict=True):
        assert one["val_tokens"] == other["val_tokens"] == 112  # 7 windows of 16
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-6)
    assert len(done.rows("eval")) > 1

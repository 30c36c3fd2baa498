"""Whatever happens to a run: nothing is lost, the person is told the truth, the same command resumes.

Kills and stops are in test_resume.py, several ranks in test_ranks.py. Nothing is simulated but what
cannot be had to order: a number that is not finite, a device without memory, an error of a disk."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import flip_a_bit, rows, tree
from sources import AUGMENTED, around, at_step, stop_at

EVERYTHING = ("--ema_decay=0.9", "--dropout=0.1", "--save_interval=4", "--log_interval=1")
# A minute of waiting for a disk passes at once; `waits` counts the pauses in it.
FAST_CLOCK = """
waits, now = [], time.monotonic
def sleep(seconds):
    waits.append(seconds)
    {then}
time.sleep, time.monotonic = sleep, lambda: now() + sum(waits)
"""


@pytest.fixture
def resumes(run_train, once):
    """resumes(out_dir): the same command ends with the bits of a run that nothing happens to."""

    def check(out_dir="run"):
        done = run_train(out_dir, *EVERYTHING)
        assert done.fingerprint() == once(*EVERYTHING).fingerprint() and done.steps == [
            *range(1, 13)
        ]
        assert not list(done.out_dir.glob("*.tmp"))
        return done

    return check


# ---- the disk ------------------------------------------------------------------------------------

FILL = """
filler = run.folder.path.parent / "filler"
try:
    with open(filler, "wb", buffering=0) as file:
        while file.write(bytes(50_000)) == 50_000:
            pass
except OSError:
    pass
"""
CLEAR = "(run.folder.path.parent / 'filler').unlink()"


def test_a_disk_that_is_full_for_a_while_costs_nothing_but_a_save(run_train, resumes, small_disk):
    full = at_step(6, FILL) + at_step(10, CLEAR)
    done = run_train(small_disk(6) / "run", *EVERYTHING, before=full)
    (event,) = done.events("save_failed")
    assert event["step"] == 8 and "No space left on device" in event["text"]
    assert done.stdout.count("ckpt_00000008.pt is not saved") == 1
    resumes(done.out_dir)


def test_a_disk_that_is_full_at_the_start_is_one_line(run_train, resumes, small_disk):
    out_dir = small_disk(6) / "run"
    run_train(out_dir, *EVERYTHING, before=stop_at(6), code=143)
    full = around("open_folder", FILL)
    run_train(out_dir, *EVERYTHING, before=full, code=1).is_one_line("No space left", "make room")
    (out_dir.parent / "filler").unlink()
    resumes(out_dir)


@pytest.mark.parametrize("how, code", [("end", 0), ("stop", 143)])
def test_a_disk_that_is_full_at_the_end_or_at_a_stop_is_waited_for(
    run_train, resumes, small_disk, how, code
):
    """And if it stays full the run ends, with the newest checkpoint."""
    disk = small_disk(6)
    full = at_step(9, FILL) + (stop_at(10) if how == "stop" else "")
    stays = FAST_CLOCK.format(then="pass") + full
    done = run_train(disk / "stays", *EVERYTHING, before=stays, code=code or 1)
    done.is_one_line("No space left on device", "ckpt_00000008.pt")
    (disk / "filler").unlink()
    resumes(disk / "stays")
    shutil.rmtree(disk / "stays")
    cleared = FAST_CLOCK.format(then=f"if len(waits) == 3: os.unlink('{disk}/filler')") + full
    done = run_train(disk / "run", *EVERYTHING, before=cleared, code=code)
    assert done.checkpoint(10 if how == "stop" else 12).exists()
    resumes(disk / "run")


def test_a_best_that_could_not_be_written_is_written_by_the_next_save(run_train):
    fails = """
values = iter([3.0, 2.0, 4.0, 4.0])
train.evaluate = lambda run: {"val_loss": next(values)}
def write_copies(folder, parts, names, inner=plumbing.write_copies):
    if parts["state"]["step"] == 4 and "best.pt" in names and not failed:
        failed.append(1)
        raise OSError(5, "Input/output error")
    inner(folder, parts, names)
failed = []
plumbing.write_copies = write_copies
"""
    done = run_train("run", *EVERYTHING, "--eval_interval=4", before=fails)
    assert done.stdout.count("Input/output error") == 1
    best = torch.load(done.out_dir / "best.pt", weights_only=True)["state"]
    assert (best["step"], best["best_val_loss"]) == (4, 2.0)


# ---- checkpoints that are no good ----------------------------------------------------------------


DAMAGES = {
    "cut": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "flipped": flip_a_bit,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.fixture
def killed(once, tmp_path):
    """The folder of a `run` that was killed at step 11, saved at steps 4 and 8."""
    made = once(*EVERYTHING, before=stop_at(11, "SIGKILL"), code=137)
    return shutil.copytree(made.out_dir, tmp_path / "run")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(resumes, killed, damage):
    path = killed / "ckpt_00000008.pt"
    DAMAGES[damage](path)
    content = path.read_bytes()
    done = resumes()
    assert "ckpt_00000008.pt is damaged" in done.stdout
    assert [row["checkpoint"] for row in done.events("resume")] == ["ckpt_00000004.pt"]
    assert Path(f"{path}.damaged").read_bytes() == content


def test_an_error_of_reading_is_no_damage_and_changes_nothing(run_train, killed):
    before = tree(killed)
    fails = """
import errno, zipfile
def read(file, inner=zipfile.ZipFile.testzip):
    raise OSError(errno.EIO, "Input/output error")
zipfile.ZipFile.testzip = read
"""
    done = run_train("run", *EVERYTHING, before=fails, code=2)
    done.is_one_line("ckpt_00000008.pt cannot be read (Input/output error)")
    assert tree(killed) == before


def test_a_folder_without_a_whole_checkpoint_is_not_begun_anew(run_train, killed):
    for path in killed.glob("ckpt_*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    for _ in range(2):  # nor by a second try
        done = run_train("run", *EVERYTHING, code=2)
        done.is_one_line("no whole ckpt_STEP.pt; --resume=restart")
    assert run_train("run", *EVERYTHING, "--resume=restart").checkpoint(12).exists()


class Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_code_in_a_checkpoint_is_not_executed(run_train, killed, tmp_path):
    path = killed / "ckpt_00000008.pt"
    torch.save(torch.load(path, weights_only=True) | {"extra": Code()}, path)
    done = run_train("run", *EVERYTHING, code=2)
    done.is_one_line("ckpt_00000008.pt cannot be read back")
    assert path.exists() and not (tmp_path / "executed").exists()


def test_state_that_no_checkpoint_could_give_back_is_refused_at_the_first_save(run_train):
    class_of = """
class Counter:
    def state_dict(self):
        return {"n": np.float64(1)}
"""
    put = around("train", "run.extra['counter'] = Counter()")
    done = run_train("run", before=class_of + put, code=1)
    done.is_one_line("keep tensors, numbers and text in what is saved")
    assert not done.rows("train")


def test_a_folder_is_in_use_by_one_run(run_train):
    """The same command in another process, in mid-run, is refused, and touches nothing."""
    other = """
import sys
if os.fork() == 0:
    os.dup2(os.open("other", os.O_WRONLY | os.O_CREAT), 2)
    try:
        train.main(sys.argv[1:])
    except plumbing.BadInput as error:
        os.write(2, str(error).encode())
    os._exit(0)
os.wait()
"""
    done = run_train("run", before=at_step(4, other))
    said = (done.out_dir.parent / "other").read_text()
    assert said == "run is in use by another run; write --out_dir=run_2"
    assert done.steps == [*range(1, 13)] and not done.events("resume")


@pytest.mark.parametrize("replaced", [True, False])
def test_no_row_of_a_folder_that_was_renamed_lands_in_anothers_log(run_train, tmp_path, replaced):
    """The rows go on in the log that was opened; a checkpoint is not written into a stranger."""
    move = "os.rename('run', 'moved')"
    if replaced:
        move += """
os.mkdir("run")
for name in (".lock", "metrics.jsonl"):
    open(f"run/{name}", "w").close()
"""
    before = FAST_CLOCK.format(then="pass") + at_step(6, move)
    done = run_train("run", *EVERYTHING, before=before, code=1)
    done.is_one_line("another run has taken the place" if replaced else "No such file or directory")
    assert [row["step"] for row in rows(tmp_path / "moved", "train")] == [*range(1, 13)]
    left = [path.name for path in (tmp_path / "run").glob("*")]
    assert sorted(left) == ([".lock", "metrics.jsonl"] if replaced else [])


# ---- the terminal, signals -----------------------------------------------------------------------


def test_two_ctrl_c_end_a_step_that_hangs(run_train, resumes):
    hang = """
import threading
for delay, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 1):
    threading.Timer(delay / 5, os.kill, (os.getpid(), number)).start()
time.sleep(60)
"""
    done = run_train("run", *EVERYTHING, before=at_step(6, hang), code=130, limit=30)
    assert "Ctrl-C again stops now" in done.stdout and not done.checkpoint(5).exists()
    assert [row["checkpoint"] for row in resumes().events("resume")] == ["ckpt_00000004.pt"]


def test_a_closed_terminal_stops_a_run_with_a_checkpoint(run_train, resumes):
    terminal = """
import fcntl, pty, termios
ours, theirs = pty.openpty()
fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
for number in (0, 1, 2):
    os.dup2(theirs, number)
os.close(theirs)
"""
    run_train("run", *EVERYTHING, before=terminal + at_step(6, "os.close(ours)"), code=129)
    assert [row["checkpoint"] for row in resumes().events("resume")] == ["ckpt_00000006.pt"]


def test_a_run_whose_output_cannot_be_written_trains_on(run_train, once):
    closed = "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)"
    done = run_train("run", *EVERYTHING, before=closed)  # a pipe that nobody reads
    assert done.fingerprint() == once(*EVERYTHING).fingerprint()


# ---- workers -------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_ends_the_run_with_one_line(run_train):
    kill = """
import multiprocessing
os.kill(multiprocessing.active_children()[0].pid, 9)
"""
    flags = (*EVERYTHING, "--num_workers=1", "--max_steps=300")
    done = run_train("run", *flags, before=at_step(6, kill), code=1)
    done.is_one_line("a data worker was killed", "the same command resumes")


STARTED = """
import mmap
import multiprocessing
import os

import train

multiprocessing.set_start_method(os.environ["METHOD"], force=True)
train.knob("alpha", 0.5, "of nothing")


class Windows(train.ShuffledWindows):
    def __getitem__(self, place):
        is_file = isinstance(self.tokens.base, mmap.mmap)
        with open("read.txt", "a") as file:
            print(os.getpid(), train.batch_size, train.alpha, is_file, file=file)
        return super().__getitem__(place)


def train_step(run, *batch_and_lr, inner=train.train_step):
    if run.state["step"] == 3 and "KILL" in os.environ:
        os.kill(os.getpid(), 9)
    return inner(run, *batch_and_lr)


train.ShuffledWindows, train.train_step = Windows, train_step
train.main()
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_that_begin_anew_have_the_knobs_of_the_run(python_train, once, tmp_path, method):
    """As on macOS, and on Linux from Python 3.14; of a script without `if __name__`, too. A memmap is
    not copied to them, and they end with a run that is killed, which python_train waits for."""
    (tmp_path / "lab.py").write_text(STARTED)
    flags, env = ("--num_workers=1", "--alpha=0.25", "--max_steps=4"), {"METHOD": method}
    python_train("run", *flags, script="lab.py", env=env | {"KILL": "1"}, code=137)
    done = python_train("run", *flags, script="lab.py", env=env)
    read = {tuple(line.split()) for line in (tmp_path / "read.txt").read_text().splitlines()}
    assert {line[1:] for line in read} == {("8", "0.25", "True")}
    expected = pytest.approx(once("--max_steps=4", threads=None).losses, rel=1e-5)
    assert done.steps == [1, 2, 3, 4] and done.losses == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_cannot_be_read_is_named_and_the_steps_so_far_are_saved(run_train, workers):
    bad = """
def broken(self, number, inner=data_augmented.Moved.__getitem__):
    if number == 177:
        raise ValueError("not a picture")
    return inner(self, number)
data_augmented.Moved.__getitem__ = broken
"""
    flags = (f"--num_workers={workers}", "--max_steps=80")
    done = run_train("run", *flags, before=AUGMENTED + bad, code=1)
    assert "ValueError: not a picture" in done.stderr
    assert "while reading row 177 of Moved" in done.stderr
    last = max(int(path.stem[5:]) for path in done.out_dir.glob("ckpt_*.pt"))
    assert 0 < last < 75 and done.steps == [*range(1, last + 1)]
    saved = torch.load(done.checkpoint(last), weights_only=True)
    assert saved["state"]["tokens"] == 8 * last


# ---- memory --------------------------------------------------------------------------------------

NO_MEMORY = {
    "of torch": "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
    "of a library": "RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED')",
    "of Python": "MemoryError()",
    "of a CPU": 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")',
}


def out_of_memory(most, error=NO_MEMORY["of torch"], where="torch.is_grad_enabled()"):
    """Source: from step 5 on there is room for `most` sequences in a micro-batch, not more."""
    full = f"run.state['step'] >= 4 and {where} and args[2].shape[0] > {most}"
    return around("forward", then=f"if {full}: torch.rand(3); raise {error}")


@pytest.mark.parametrize("error", NO_MEMORY)
def test_memory_that_runs_out_halves_the_micro_batch_and_takes_the_step_again(run_train, error):
    """With the same batch and random state: as a run that is told so from that step on."""
    before = out_of_memory(2, NO_MEMORY[error])
    done = run_train("run", "--dropout=0.1", before=before)
    assert [(e["step"], e["micro_batch"]) for e in done.events("out_of_memory")] == [(4, 4), (4, 2)]
    run_train("asked", "--dropout=0.1", before=stop_at(4), code=143)
    asked = run_train("asked", "--dropout=0.1", "--batch_size=2", "--accum_steps=4")
    ours, expected = done.fingerprint(), asked.fingerprint()
    assert all(ours[part] == expected[part] for part in ("model", "optimizer", "rng"))


def test_memory_that_runs_out_in_an_evaluation_changes_nothing_in_training(run_train, once):
    done = run_train("run", before=out_of_memory(2, where="not torch.is_grad_enabled()"))
    ours, expected = done.fingerprint(), once().fingerprint()
    assert all(ours[part] == expected[part] for part in ours if part != "state")
    assert done.events("out_of_memory")
    found = [[row["val_loss"] for row in each.rows("eval")] for each in (done, once())]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("ranks, size, accum", [(1, 1, 2), (2, 4, 2)])
def test_where_halving_cannot_help_one_line_says_what_to_try(run_train, ranks, size, accum):
    done = run_train("run", before=out_of_memory(0 if ranks == 1 else 2), ranks=ranks, code=1)
    tip = f"out of memory; try --batch_size={size} --accum_steps={accum}"
    assert tip in done.stderr and "Traceback" not in done.stderr


def poisoned(value):
    """Source: the gradient of one weight is `value` in the steps from 5 to 17."""
    hook = f"""
def poison(grad):
    is_due = run_of[0].wrapped is not None and 5 <= run_of[0].state["step"] + 1 <= 17
    return torch.full_like(grad, {value}) if is_due else grad
run_of = []
"""
    put = "run_of.append(run); run.model.head.weight.register_hook(poison)"
    return hook + around("build_parts", then=put)


NOT_FINITE = [  # dtype, value, whether it ends the run
    ("float32", "torch.nan", True),
    ("float32", "torch.inf", True),
    ("float16", "torch.inf", False),
]


@pytest.mark.parametrize("dtype, value, ends", NOT_FINITE)
def test_ten_bad_steps_in_a_row_end_a_run_but_a_scale_that_is_lowered_does_not(
    run_train, dtype, value, ends
):
    """From the first scale of float16 down; also across a stop."""
    flags, source = (f"--dtype={dtype}", "--max_steps=20", "--save_interval=2"), poisoned(value)
    run_train("run", *flags, before=source + stop_at(9), code=143)
    done = run_train("run", *flags, before=source, code=int(ends))
    rows = done.rows("train")
    assert [row["step"] for row in rows if row["skipped"]] == [*range(5, 15 if ends else 18)]
    if ends:
        done.is_one_line("10 steps in a row, up to step 14", "replay.py run --step=14")
        assert done.fingerprint(12)["model"] == done.fingerprint(10)["model"]
    else:
        assert rows[16]["loss_scale"] == 65536 / 2**12 and done.facts["ended"] == "finished"


def test_steps_in_which_no_target_counts_are_skipped_and_said_once(run_train):
    """They end no run: it says that masking is the likely cause."""
    none = around("train_step", "if run.state['step'] >= 1: args[2].fill_(-100)")
    done = run_train("run", "--max_steps=16", "--log_interval=1", before=none)
    assert [row["skipped"] for row in done.rows("train")] == [0] + [1] * 15
    assert done.facts["ended"] == "finished" and done.facts["state"]["tokens"] == 128
    assert done.stdout.count("are all masked (-100)?") == 1

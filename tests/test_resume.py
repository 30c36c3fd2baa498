"""A run that is stopped anywhere, by any means, resumes bit for bit under the same command.

What is compared is SHA-256 over weights, moments, scaler, averages, random state and the state of
the loop after the last step, and every row of the log. The runs have the default number of threads,
on a model that is wide enough to need them. A check that cannot fail is no check: each part of a
checkpoint, left out, must show."""

import json
import os
import re
import shutil
import signal

import pytest
import torch
from conftest import copy_code, fingerprint, read_log, rows, torchrun, wait_for, wait_until_gone
from sources import (
    AUGMENTED,
    KNOB,
    SEVERAL_SETS,
    around,
    at_step,
    in_evaluation,
    on_rank,
    script,
    stop_at,
)

STEPS = 12
# Evaluations and saves fall on different steps; the batch of step 6 has windows of two epochs.
FLAGS = (
    f"--max_steps={STEPS} --n_embd=128 --block_size=32 --batch_size=8 --accum_steps=2 "
    "--dropout=0.1 --eval_interval=4 --save_interval=5 --keep_last=99 --log_interval=1"
).split()
PLATEAU = "--plateau_factor=0.5 --plateau_patience=1 --min_delta=9 --eval_interval=2"
needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="there is no C++ compiler here"
)


@pytest.fixture
def train(run_train):
    """train(out_dir, *flags, ...): run_train with FLAGS and the default threads."""
    return lambda out_dir, *flags, **how: run_train(out_dir, *FLAGS, *flags, threads=None, **how)


@pytest.fixture
def whole(once):
    """whole(*flags, ...): the run that nothing interrupts; made once, the tests only read it."""
    return lambda *flags, **how: once(*FLAGS, *flags, threads=None, **how)


def assert_same(done, straight, steps=STEPS):
    """The same bits and rows at the end, each row once, and nothing left over. best.pt was saved at
    an evaluation, so it may not be older than what a resume begins with."""
    assert done.fingerprint(steps) == straight.fingerprint(steps)
    assert fingerprint(done.out_dir / "best.pt") == fingerprint(straight.out_dir / "best.pt")
    assert done.rows() == straight.rows()
    assert done.steps == [*range(1, steps + 1)]
    assert not list(done.out_dir.glob("*.tmp"))
    computed_again(done)


def computed_again(done):
    """(step of the checkpoint, steps compared) of each resume, all of them equal."""
    found = done.events("resume_checked")
    assert not any(row["first_difference"] for row in found)
    return [(row["from"], row["steps"]) for row in found]


# ---- by any signal, at any step ------------------------------------------------------------------

SIGNALS = [  # signal, step, the checkpoint that is there then, rows past it
    ("SIGKILL", 4, 0, 3),
    ("SIGKILL", 7, 5, 1),
    ("SIGTERM", 6, 6, 2),
    ("SIGINT", 9, 9, 2),
    ("SIGHUP", 1, 1, 2),
    ("SIGUSR2", 11, 11, 1),
]


@pytest.mark.parametrize("name, step, newest, again", SIGNALS)
def test_resume_is_bit_exact_after(train, whole, name, step, newest, again):
    """After a stop the process takes two more steps for their rows alone, but none past the end,
    and says the step that it has saved."""
    ended = train("run", before=stop_at(step, name), code=128 + signal.Signals[name])
    assert len(ended.rows("train")) == newest + again
    if name != "SIGKILL":
        assert ended.facts["ended"] == f"stopped by {name}" and ended.facts["state"]["step"] == step
        assert ended.events("end")[0]["step"] == step
        assert "type the same command again to resume" in ended.stdout
    done = train("run")
    assert computed_again(done) == [(newest, again)]
    assert f"resumed at step {newest}: {again} steps computed again, every" in done.stdout
    assert_same(done, whole())


IN_EVALUATION = [("SIGTERM", 0, 4), ("SIGTERM", 4, 4), ("SIGTERM", 12, 4)]
IN_EVALUATION += [("SIGTERM", 5, 5), ("SIGKILL", 5, 5)]  # where a save is due, too


@pytest.mark.parametrize("name, step, every", IN_EVALUATION)
def test_a_stop_in_an_evaluation_leaves_it_to_the_process_that_resumes(
    train, whole, name, step, every
):
    """After one batch, and no part of it is recorded. A save that was due is on the disk."""
    flags = ("--batch_size=2", f"--eval_interval={every}")
    stop = f"""
    print("BATCH", args[1], flush=True)
    if args[1] == 4:
        os.kill(os.getpid(), signal.{name})
    """
    code = 128 + signal.Signals[name]
    ended = train("run", *flags, before=in_evaluation(step, stop), code=code)
    assert re.findall(r"BATCH (\d+)", ended.stdout) == ["0", "2", "4"]
    assert [row["step"] for row in ended.rows("eval")] == [*range(0, step, every)]
    assert ended.checkpoint(step).exists()
    assert_same(train("run", *flags), whole(*flags))


RARER = {"--eval_interval=5": [0, 5, 10, 12], "--eval_interval=0": [0, 12]}
RARER["--max_steps=14"] = [0, 4, 8, 12, 14]


@pytest.mark.parametrize("typed", RARER)
def test_an_evaluation_that_was_stopped_is_taken_by_the_intervals_of_the_next_command(train, typed):
    stop = in_evaluation(4, "os.kill(os.getpid(), signal.SIGTERM)")
    train("run", "--schedule=constant", before=stop, code=143)
    done = train("run", "--schedule=constant", typed)
    assert [row["step"] for row in done.rows("eval")] == RARER[typed]
    assert computed_again(done)[0][0] == 4


SIGUSR1 = "os.kill(os.getpid(), signal.SIGUSR1)"


def test_sigusr1_saves_and_training_goes_on(train, whole):
    """During the start, too, but then without a save."""
    sent = around("build_model", SIGUSR1) + at_step(6, SIGUSR1)
    train("run", before=sent + stop_at(8, "SIGKILL"), code=137)
    done = train("run")
    assert [row["checkpoint"] for row in done.events("resume")] == ["ckpt_00000006.pt"]
    assert_same(done, whole())


def test_workers_end_with_a_run_that_is_killed_while_they_start(train):
    """Which run_train waits for."""
    late = """
def begin(*args, inner=plumbing.begin_worker):
    time.sleep(0.4)
    inner(*args)
plumbing.begin_worker = begin
import threading
kill = threading.Timer(0.2, os.kill, (os.getpid(), 9))
"""
    train("run", "--num_workers=2", before=late + around("take_step", "kill.start()"), code=137)


# ---- before the first save, and within one -------------------------------------------------------

IN_START = [("open_dataset", "SIGTERM"), ("configure_optimizer", "SIGINT")]
IN_START += [("print_plan", name) for name in ("SIGINT", "SIGTERM", "SIGKILL")]  # run.json is there


@pytest.mark.parametrize("where, name", IN_START)
def test_before_the_first_save_there_is_nothing_to_resume(train, whole, name, where):
    kill = around(where, f"os.kill(os.getpid(), signal.{name})")
    ended = train("run", before=kill, code=128 + signal.Signals[name])
    said = "train.py: stopped by Ctrl-C\n" if name == "SIGINT" else ""
    assert ended.stderr == said and not list(ended.out_dir.glob("*.pt*"))
    assert ended.out_dir.exists() == (where == "print_plan")
    done = train("run")
    assert not done.events("resume")
    assert_same(done, whole())


def in_save(name, code):
    """Source that runs `code` when a file whose name ends so is written, but not yet renamed."""
    return f"""
def fsync(descriptor, inner=os.fsync):
    path = os.readlink(f"/proc/self/fd/{{descriptor}}")
    if path.removesuffix(".tmp").endswith("{name}"):
        {code}
    inner(descriptor)
os.fsync = fsync
"""


HALF = "os.truncate(path, 5000)"
IN_SAVE = [
    ("00000.pt", HALF, []),
    ("best.pt", HALF, [0]),
    ("best.pt", "", [0]),
    ("05.pt", HALF, [4]),
]


@pytest.mark.parametrize("file, written, resumed", IN_SAVE)
def test_a_kill_within_a_save_leaves_no_half_checkpoint(train, whole, file, written, resumed):
    """With half of its bytes written, and with all of them but not yet under its name."""
    train("run", before=in_save(file, f"{written}; os.kill(os.getpid(), 9)".strip("; ")), code=137)
    done = train("run")
    assert [row["step"] for row in done.events("resume")] == resumed
    assert "damaged" not in done.output
    assert_same(done, whole())


def test_a_save_in_the_background_holds_the_state_of_its_own_step(train, whole):
    slow = """
def save(*args, inner=torch.save):
    time.sleep(0.1)
    inner(*args)
torch.save = save
"""
    done = train("run", "--ema_decay=0.9", before=slow)
    for step in (5, 10, STEPS):
        assert done.fingerprint(step) == whole("--ema_decay=0.9").fingerprint(step)


def test_a_kill_does_not_fall_back_behind_the_best(train):
    """A new best is a checkpoint to resume from, too."""
    ended = train("run", "--save_interval=0", before=stop_at(10, "SIGKILL"), code=137)
    assert ended.checkpoint(8).samefile(ended.out_dir / "best.pt")
    assert [row["step"] for row in train("run", "--save_interval=0").events("resume")] == [8]


# ---- with everything that a run may have ---------------------------------------------------------

WITH = {  # flags, source of a fork
    "averages and a plateau": (f"--ema_decay=0.9 {PLATEAU}", ""),
    "bfloat16": ("--dtype=bfloat16", ""),
    "float16": ("--dtype=float16", ""),
    "float16 and Muon": ("--dtype=float16 --optimizer=muon", ""),
    "Muon": ("--optimizer=muon --n_layer=2 --grad_checkpoint=true", ""),
    "momentum": ("--optimizer=momentum --peak_lr=0.1", ""),
    "sgd": ("--optimizer=sgd --peak_lr=0.1 --schedule=onecycle --label_smoothing=0.1", ""),
    "adam": ("--optimizer=adam --schedule=step --step_size=5", ""),
    "tiny intervals": ("--save_interval=1 --eval_interval=1 --keep_last=1", ""),
    "init_from": ("--init_from={checkpoint} --seed=5", ""),
    "two workers that augment": ("--num_workers=2 --peak_lr=0.1", AUGMENTED),
    "several validation sets": ("--best_metric=val_loss_start", SEVERAL_SETS),
    "a knob and state of its own": ("", KNOB),
}
HACKS = {  # ten of a Friday evening: tests/NAME.py, and flags
    "hacks/distillation": "--teachers={checkpoint}",
    "hacks/waits": "",
    "sound/experts_top1": "",
    "sound/losses_z": "",
    "sound/masked_tagger": "",
    "sound/optimizers_lion": "",
    "sound/other_own_evaluate": "--best_metric=-val_f1",
    "sound/positions_learned": "",
    "sound/schedules_growing_batch": "",
    "sound/schedules_inverse_root": "",
}
WITH |= {name: (flags, script(name)) for name, flags in HACKS.items()}
SAME_WEIGHTS = ("tiny intervals", "several validation sets", "hacks/waits")


@pytest.mark.parametrize("name", WITH)
def test_resume_is_bit_exact_with(train, whole, name):
    """It learns; and what it has moves the weights, unless it should not. A stop at step 8 comes
    before an evaluation that will lower the rate of the next step."""
    flags, fork = WITH[name]
    flags = flags.format(checkpoint=whole().checkpoint(STEPS)).split()
    train("run", *flags, before=fork + stop_at(7, "SIGKILL"), code=137)
    stop = stop_at(8 if "plateau" in name else 9)
    train("run", *flags, before=fork + stop, code=143)
    done, straight = train("run", *flags, before=fork), whole(*flags, before=fork)
    assert len(done.events("resume_checked")) == 2
    assert_same(done, straight)
    losses = [row["loss"] for row in done.rows("train")]
    assert losses[-1] < losses[0] or name == "init_from"
    is_plain = done.fingerprint(STEPS)["model"] == whole().fingerprint(STEPS)["model"]
    assert is_plain == (name in SAME_WEIGHTS)


SMALL_MODEL = """
import torch.nn.functional as F
class Small(torch.nn.Module):
    # a few kernels to compile instead of twenty, of which one draws dropout
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 32)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(32, vocab_size)
    def forward(self, inputs, targets=None):
        logits = self.head(self.dropout(F.gelu(self.embedding(inputs))))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
train.build_model = lambda config, vocab_size: Small(vocab_size)
import torch._inductor.config
torch._inductor.config.compile_threads = 1
torch._inductor.config.cpp.vec_isa_ok = True  # it would take 12 s to try what /proc/cpuinfo says
"""


@needs_compiler
def test_resume_is_bit_exact_when_compiled(train, tmp_path):
    how = {"env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, "limit": 300}
    flags = ("--compile=true", "--accum_steps=1")
    straight = train("straight", *flags, before=SMALL_MODEL, **how)
    assert list(tmp_path.glob("cache/**/*.so"))  # it was compiled
    train("run", *flags, before=SMALL_MODEL + stop_at(7, "SIGKILL"), code=137, **how)
    assert_same(train("run", *flags, before=SMALL_MODEL, **how), straight)


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_the_real_command_stopped_and_typed_again(start_train, python_train, once, name, tmp_path):
    """SIGINT to all processes of the group, workers included, as a terminal sends it to a script.
    SIGKILL to a copy of the five files of README in an empty folder, where nothing else is."""
    flags, fork, code = [*FLAGS, "--max_steps=60"], "", -9
    how = {"script": "train.py", "env": {"PYTHONPATH": ""}}
    if name == "SIGKILL":
        copy_code(tmp_path)
    else:
        flags += ["--num_workers=1", "--prefetch_factor=1"]
        fork, how, code = AUGMENTED, {"script": "lab.py"}, 130
        (tmp_path / "lab.py").write_text(fork)
    process = start_train("run", *flags, **how)
    wait_for(lambda: process.poll() is not None or " 10/60 " in process.log.read_text())
    os.killpg(process.pid, signal.Signals[name])
    assert process.wait(60) == code, process.log.read_text()
    wait_until_gone(mark=process.mark)
    assert 10 <= max(row["step"] for row in rows(tmp_path / "run", "train")) < 60
    done = python_train("run", *flags, **how)
    # nothing to compare with: no row was past the last checkpoint
    exact = "every loss and norm the same|nothing to compare with"
    assert re.search(f"resumed at step .*: .*({exact})", done.stdout)
    straight = once(*flags, before=fork, threads=None)
    assert done.fingerprint(60) == straight.fingerprint(60) and done.rows() == straight.rows()


def test_signals_at_random_moments(tmp_path):
    """Twelve of those that `python tests/signals.py` sends."""
    import signals

    only = "--only=dropout, accumulation;two workers that augment;averages and a plateau"
    assert signals.main(["--count=12", only, "--steps=40", f"--folder={tmp_path}"]) == 0


# ---- on several ranks ----------------------------------------------------------------------------

SHARD = "--shard=true"
ON_RANKS = [  # (ranks, flags, signal to the last one)
    (3, "--ema_decay=0.9", "SIGTERM"),
    (3, "", "SIGKILL"),
    (2, f"--ema_decay=0.9 {SHARD}", "SIGTERM"),
    (2, f"--ema_decay=0.9 {SHARD}", "SIGKILL"),
]


@pytest.mark.parametrize("ranks, flags, name", ON_RANKS)
def test_resume_is_bit_exact_on(train, whole, ranks, flags, name):
    """A stop of one rank stops all; a rank that is killed ends the others."""
    flags, code = flags.split(), 143 if name == "SIGTERM" else None
    stop = on_rank(ranks - 1, stop_at(7, name))
    ended = train("run", *flags, ranks=ranks, before=stop, code=code)
    assert code or sorted(ended.codes) == [1] * (ranks - 1) + [137]
    assert_same(train("run", *flags, ranks=ranks), whole(*flags, ranks=ranks))


def test_one_folder_goes_on_over_other_ranks_and_shards(train):
    """As without the kills in between, also before the first save on that number of ranks."""
    phases = [(3, 1, "", 2), (6, 3, "", 4), (9, 2, SHARD, 9), (12, 1, "", 10)]
    for last, ranks, more, kill in phases:
        typed = ["--schedule=constant", "--ema_decay=0.9", *more.split(), f"--max_steps={last}"]
        straight = train("straight", *typed, ranks=ranks)
        train("run", *typed, ranks=ranks, before=on_rank(0, stop_at(kill, "SIGKILL")), code=None)
        done = train("run", *typed, ranks=ranks)
    resumes = [row["changed"] for row in done.events("resume")]
    changed = [changes["world_size"] for changes in resumes if "world_size" in changes]
    assert changed == [[1, 3], [1, 3], [3, 2], [2, 1], [2, 1]]
    assert_same(done, straight)


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_torchrun_passes_a_signal_on(start_train, run_train, once, name):
    """But for SIGKILL, of which nobody can tell the ranks: they see that their launcher is gone."""
    flags = [*FLAGS, "--max_steps=60", "--save_interval=20"]
    process = start_train("run", *flags, launcher=torchrun(3))
    wait_for(lambda: process.poll() is not None or " 12/60 " in process.log.read_text())
    process.send_signal(getattr(signal, name))
    assert process.wait(60) == (-9 if name == "SIGKILL" else 1)  # the launcher's own code
    wait_until_gone(mark=process.mark)
    assert "stopped by SIGTERM" in process.log.read_text()
    done = run_train("run", *flags, ranks=3)  # one thread for each rank, as torchrun has it
    assert_same(done, once(*flags, ranks=3), 60)


# ---- what is left out must show, and is told -----------------------------------------------------

EACH = "for s in c['optimizer']['state'].values(): "
ALL, STATE = {"model", "optimizer"}, {"model", "optimizer", "state"}
LEFT_OUT = {  # a change to the checkpoint c, parts whose hash must differ, flags
    "random state": ("c['rng'][0]['torch'] = torch.Generator().get_state()", ALL, ""),
    "moments": (EACH + "s['exp_avg'].zero_()", ALL, ""),
    "steps of Adam": (EACH + "s['step'] *= 0", ALL, ""),
    "momentum": (EACH + "s['momentum_buffer'].zero_()", ALL, "--optimizer=momentum"),
    "place in the data": ("c['state']['sequences'] = 0", STATE, ""),
    "averages": ("for w in c['ema'].values(): w.zero_()", {"ema"}, "--ema_decay=0.9"),
    "scaler": ("c['scaler']['scale'] /= 2", {"scaler"}, "--dtype=float16"),
    "lr_factor": ("c['state']['lr_factor'] = 1.0", STATE, PLATEAU),
    "a bit of a weight": ("c['model']['head.weight'].view(torch.int32)[0, 0] ^= 1 << 18", ALL, ""),
    "nothing": ("pass", set(), ""),
}


@pytest.mark.parametrize("part", LEFT_OUT)
def test_what_a_checkpoint_leaves_out_shows_in_the_hash(train, whole, part):
    """And in what the run says of itself, but for what moves neither loss nor norm at once."""
    change, differs, flags = LEFT_OUT[part]
    ended = train("run", *flags.split(), before=stop_at(9), code=143)
    checkpoint = torch.load(ended.checkpoint(9), weights_only=True)
    exec(change, {"c": checkpoint, "torch": torch})
    torch.save(checkpoint, ended.checkpoint(9))
    done = train("run", *flags.split())
    ours, expected = done.fingerprint(STEPS), whole(*flags.split()).fingerprint(STEPS)
    found = {name for name in ours if ours[name] != expected[name]}
    assert found >= differs if differs else not found
    (check,) = done.events("resume_checked")
    assert bool(check["first_difference"]) == (part not in ("nothing", "averages"))


def test_other_numbers_than_those_of_before_are_told_with_where_they_begin(train, whole):
    """The log of the killed process is forged: another loss at step 7, and half a line at the end,
    which is no row."""
    ended = train("run", before=stop_at(8, "SIGKILL"), code=137)
    forged = read_log(ended.out_dir)
    (row,) = (row for row in forged if row["kind"] == "train" and row["step"] == 7)
    true, row["loss"] = row["loss"], 1.5
    text = "".join(json.dumps(row) + "\n" for row in forged)
    half = '{"kind": "train", "step": 8, "loss": 3.'
    (ended.out_dir / "metrics.jsonl").write_text(text + half)
    done = train("run")
    assert done.rows() == whole().rows()
    (check,) = done.events("resume_checked")
    assert check["first_difference"] == {"step": 7, "field": "loss", "then": 1.5, "now": true}
    assert "other numbers from step 7 on: loss 1.5 then" in done.stdout


def test_after_a_stop_slow_steps_are_not_taken_for_their_rows(train, whole):
    slow = around("train_step", "time.sleep(1.6 if run.state['step'] == 6 else 0)")
    ended = train("run", before=slow + stop_at(7), code=143)
    assert len(ended.rows("train")) == 7
    assert_same(train("run"), whole())


def test_a_run_that_is_extended_takes_the_course_of_one_that_was_that_long(train, whole):
    """Its evaluation at the end of the shorter one does not count for the rate. No row is past its
    checkpoint."""
    flags = ("--schedule=constant", *PLATEAU.split())
    train("run", *flags, "--max_steps=7")
    done, straight = train("run", *flags), whole(*flags)
    assert "resumed at step 7: nothing to compare with" in done.stdout
    assert computed_again(done) == [(7, 0)]
    assert done.rows("train") == straight.rows("train")
    assert [row for row in done.rows("eval") if row["step"] != 7] == straight.rows("eval")
    ours, expected = done.fingerprint(STEPS), straight.fingerprint(STEPS)
    assert all(ours[part] == expected[part] for part in ("model", "optimizer", "rng"))

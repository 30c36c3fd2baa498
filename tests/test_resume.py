"""A run that is stopped anywhere, by any means, resumes bit for bit under the same command.

What is compared is SHA-256 over weights, moments, scaler, average, state and random numbers after
the last step. A check that cannot fail is no check: each of these, left out of a checkpoint, must
show."""

import functools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import WINDOWS, events, fingerprint, first, read_rows, wait_for
from sources import LION, SAVED, around, at_step, stop_at

STEPS = 30
# Two micro-batches of 4 a step, dropout on; evaluations and saves fall on different steps.
FLAGS = f"--max_steps={STEPS} --batch_size=4 --accum_steps=2 --dropout=0.1 --eval_interval=8"
FLAGS = (*FLAGS.split(), "--save_interval=10", "--keep_last=99", "--log_interval=4")
PLATEAU = "--plateau_factor=0.5 --plateau_patience=1 --min_delta=1 --eval_interval=2"
ACROSS = WINDOWS // 8 + 1  # the step whose batch holds windows of two epochs
needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="there is no C++ compiler here"
)


@pytest.fixture
def whole(once):
    """whole(*flags) -> Done: the run that nothing interrupts; each is made once."""
    return functools.partial(once, *FLAGS)


def stop_and_resume(run_train, stops, *flags, before="", timeout=100):
    """A run that gets a SIGTERM in each of the steps in `stops`, and is started again each time."""
    for stop in stops:
        signalled = before + stop_at(stop)
        done = run_train("run", *FLAGS, *flags, before=signalled, timeout=timeout, code=143)
        assert done.checkpoint(stop).exists()
        is_due = done.facts["state"]["evaluation_due"]
        last = stop if is_due else min(stop + 2, STEPS)  # two more, for their rows alone
        if PLATEAU.split()[-1] in flags and stop % 2:  # or one, before an evaluation
            last = stop + 1
        assert [row["step"] for row in done.rows("train")] == list(range(1, last + 1))
        assert done.facts["state"]["step"] == stop
    return run_train("run", *FLAGS, *flags, before=before, timeout=timeout)


# ---- it is the same run --------------------------------------------------------------------------


STOPS = [
    1,  # right after the start
    5,  # inside an epoch
    8,  # right at an evaluation
    10,  # right at a checkpoint
    ACROSS - 1,  # before a batch that lies across two epochs
    ACROSS,  # after it
    STEPS - 1,
]


def test_resume_is_bit_exact_however_often_and_the_record_has_each_row_once(run_train, whole):
    done = stop_and_resume(run_train, STOPS)
    assert done.fingerprint(STEPS) == whole().fingerprint(STEPS)
    assert_whole_metrics(done, whole())
    assert [row["step"] for row in events(done, "resume")] == STOPS
    assert [row["changed"] for row in events(done, "resume")] == [{} for _ in STOPS]
    counts = [0 if n == 8 else min(2, STEPS - n) for n in STOPS]  # at 8 the evaluation was due
    assert [(row["from"], row["compared"], row["equal"]) for row in checked(done)] == [
        (n, count, count) for n, count in zip(STOPS, counts, strict=True)
    ]


def checked(done):
    return events(done, "resume_checked")


WITH = [
    "--dtype=bfloat16 --num_workers=2 --ema_decay=0.9",
    "--dtype=float16 --optimizer=muon",
    f"--optimizer=momentum --peak_lr=0.1 {PLATEAU}",
    "--optimizer=sgd --peak_lr=0.1 --grad_checkpoint=true --n_layer=2",
    "--schedule=wsd --label_smoothing=0.1 --deterministic=false",
]


@pytest.mark.parametrize("flags", first(3, WITH))
def test_resume_is_bit_exact_with(run_train, whole, flags):
    flags = flags.split()
    done, uninterrupted = stop_and_resume(run_train, [13], *flags), whole(*flags)
    assert done.fingerprint(STEPS) == uninterrupted.fingerprint(STEPS)
    assert done.fingerprint(STEPS)["model"] != done.fingerprint(0)["model"]


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
train.build_model = lambda knobs, vocab_size: Small(vocab_size)
"""


@needs_compiler
def test_resume_is_bit_exact_when_compiled(run_train, tmp_path):
    """What the disk holds in step 13 resumes, as after a power cut. In a cache of its own: one that
    others share may hold what a killed compiler left."""
    before = (
        SMALL_MODEL
        + f"""
import torch._inductor.config
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "{tmp_path}/cache"
torch._inductor.config.compile_threads = 1
torch._inductor.config.cpp.vec_isa_ok = True  # 12 s to try what /proc/cpuinfo says
"""
    )
    cut = f"{SAVED}import shutil\nshutil.copytree(run.folder.path, '../run')"
    flags, how = (*FLAGS, "--compile=true"), {"timeout": 300, "cwd": tmp_path / "whole"}
    how["cwd"].mkdir()
    whole = run_train("whole", *flags, before=before + at_step(13, cut), **how)
    assert list(tmp_path.glob("cache/**/*.so"))  # it was compiled
    assert read_rows(tmp_path / "run", "train")[-1]["step"] == 12
    done = run_train("run", *flags, before=before, **how)
    assert [row["step"] for row in events(done, "resume")] == [10]
    assert not events(done, "compile_failed")
    assert [(row["compared"], row["equal"]) for row in checked(done)] == [(2, 2)]  # 11 and 12
    assert done.fingerprint(STEPS) == whole.fingerprint(STEPS)


TWO_THREADS = "torch.set_num_threads(2)\n"


def test_resume_is_bit_exact_with_several_threads(straight_and_resumed):
    """On a model wide enough that its products are split among them."""
    flags = (*FLAGS, "--n_embd=128", "--block_size=32", "--batch_size=16", "--max_steps=8")
    _, done = straight_and_resumed(*flags, step=5, name="SIGTERM", last=8, before=TWO_THREADS)
    assert done.facts["run"]["threads"] == 2


ODD_STATE = """
import collections
train.FRESH_STATE |= {
    "history": [1.5, None, ("a", 2)],
    "by_key": {1: torch.zeros(2), "1": torch.ones(2), (1, 2): False},
    "mean": torch.zeros(3),
    "ids": torch.arange(3, dtype=torch.int8),
    "seen": {},
    "order": collections.OrderedDict(a=torch.ones(2)),
    "set": {3},
    "bytes": b"\\x00",
    "shape": torch.Size([1, 2]),
    "others": [1j, math.nan, 2**80, torch.float16, torch.device("cpu")],
}
"""
MOVE_STATE = """
s = run.state
s["history"].append(s["step"])
s["seen"][s["step"]] = s["seen"].get(s["step"], 0) + 1
s["set"].add(s["step"])
s["order"]["a"] += 1
for tensor in (s["mean"], s["by_key"][1]):
    tensor += s["step"]
with torch.no_grad():
    run.model.head.weight += s["mean"].sum() * 1e-5
"""


def test_any_state_of_the_loop_and_of_an_optimizer_survives_a_resume(straight_and_resumed):
    own = ODD_STATE + around("train_step", MOVE_STATE) + LION
    flags = (*FLAGS, "--audit_interval=4")
    _, done = straight_and_resumed(*flags, step=13, name="SIGTERM", last=STEPS, before=own)
    assert not events(done, "audit")
    assert done.facts["state"]["by_key"]
    saved = torch.load(done.checkpoint(STEPS), weights_only=True)
    state, (optimizer,) = saved["state"], saved["optimizer"]
    assert sum(state["seen"].values()) == len(state["history"]) - 3 == STEPS
    assert optimizer["param_groups"][0]["count"] == optimizer["state"]["all"]["steps"] == STEPS
    assert optimizer["state"][0]["m"].dtype == torch.float64 and optimizer["state"][0]["n"] == STEPS


# ---- by any means --------------------------------------------------------------------------------


def test_the_real_command_stopped_by_a_real_signal(start_train, run_train, tmp_path):
    """The way a person does it: `python train.py`, Ctrl-C to all processes, the same again."""
    flags = ["--max_steps=500", "--dropout=0.1", "--num_workers=2", "--log_interval=1"]
    process = start_train("run", *flags)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"train"' in metrics.read_text())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, process.log.read_text()
    assert 0 < len(read_rows(metrics.parent, "train")) < 500
    process = start_train("run", *flags)
    assert process.wait(60) == 0, process.log.read_text()
    uninterrupted = run_train("whole", *flags)
    resumed = fingerprint(tmp_path / "run" / "ckpt_00000500.pt")
    assert resumed == uninterrupted.fingerprint(500)


# ---- the record stays whole ----------------------------------------------------------------------


def assert_whole_metrics(done, uninterrupted):
    """Each step and evaluation stands there once, with the uninterrupted run's numbers."""
    same = {"train": ("step", "loss", "lr", "grad_norm", "skipped", "tokens", "epoch")}
    same["eval"] = ("step", "val_loss", "val_bpb", "val_accuracy", "best_val_loss")
    for kind, keys in same.items():
        rows = [
            [{k: row[k] for k in keys} for row in run.rows(kind)] for run in (done, uninterrupted)
        ]
        assert rows[0] == rows[1] and len(rows[0]) >= 5
    assert [row["step"] for row in done.rows("train")] == list(range(1, STEPS + 1))
    assert [row["step"] for row in done.rows("eval")] == [0, 8, 16, 24, STEPS]


# ---- what is left out must show ------------------------------------------------------------------


ALL = {"model", "optimizer", "state"}
LEFT_OUT = [  # (a change to the checkpoint c, parts whose hash must differ, flags)
    ("c['rng'][0]['torch'] = torch.Generator().manual_seed(5).get_state()", {*ALL, "rng"}, []),
    ("c['optimizer'] = [each | {'state': {}} for each in c['optimizer']]", ALL, []),
    ("c['state']['sequences'] = 0", ALL, []),
    ("c['ema'] = {}", {"ema", "state"}, ["--ema_decay=0.9"]),
    ("c['scaler']['scale'] /= 2", {"scaler"}, ["--dtype=float16"]),
    ("c['state']['lr_factor'] = 1.0", ALL, PLATEAU.split()),
    ("c['model']['head.weight'].view(torch.int32)[0, 0] ^= 1", {"model"}, []),
    ("", set(), []),
]


@pytest.mark.parametrize("change, differs, flags", LEFT_OUT)
def test_what_a_checkpoint_leaves_out_shows_in_the_hash(run_train, whole, change, differs, flags):
    done = run_train("run", *FLAGS, *flags, before=stop_at(13), code=143)
    checkpoint = torch.load(done.checkpoint(13), weights_only=True)
    exec(change, {"c": checkpoint, "torch": torch})
    torch.save(checkpoint, done.checkpoint(13))
    done = run_train("run", *FLAGS, *flags)
    ours, expected = done.fingerprint(STEPS), whole(*flags).fingerprint(STEPS)
    found = {part for part in ours if ours[part] != expected[part]}
    assert found >= differs if differs else not found


@pytest.mark.parametrize("term", ["", "result = result + 0.1"])
def test_the_best_of_a_run_that_was_evaluated_otherwise_begins_anew(run_train, term):
    """Of before 2026-11-28, by the logits, if the model returns another loss than their own."""
    done = run_train("run", *FLAGS, before=stop_at(13), code=143)
    checkpoint = torch.load(done.checkpoint(13), weights_only=True)
    del checkpoint["run"]["rows"]
    checkpoint["state"]["best_score"] = best = -1.0  # never reached
    torch.save(checkpoint, done.checkpoint(13))
    returned = f"""
def forward(self, inputs, targets=None, inner=train.build_model.__globals__["GPT"].forward, **more):
    result = inner(self, inputs, targets, **more)
    if targets is not None and self.training:
        {term or "pass"}
    elif targets is not None:
        result, numbers = result
        {term or "pass"}
        result = result, numbers
    return result
train.build_model.__globals__["GPT"].forward = forward
"""
    done = run_train("run", *FLAGS, before=returned)
    assert ("the best begins anew" in done.stdout) == bool(term)
    found = torch.load(done.checkpoint(STEPS), weights_only=True)["state"]["best_score"]
    assert (found > 0) if term else found == best


# ---- another command -----------------------------------------------------------------------------


def test_raising_max_steps_keeps_the_planned_learning_rate(run_train):
    run_train("run", "--min_lr=1e-5")
    more = ("--max_steps=20", "--decay_steps=12")
    raised = run_train("run", "--min_lr=1e-5", *more)
    planned = run_train("planned", "--min_lr=1e-5", "--max_steps=20", "--decay_steps=12")
    shorter = run_train("shorter", "--min_lr=1e-5", "--max_steps=20")
    lr = [[row["lr"] for row in run.rows("train")] for run in (raised, planned, shorter)]
    assert lr[0] == lr[1] and lr[0][12:] == [1e-5] * 8
    assert lr[0] != lr[2]  # which has 20 steps to come down
    ours, expected = raised.fingerprint(20), planned.fingerprint(20)
    assert ours["model"] == expected["model"] and ours["optimizer"] == expected["optimizer"]


def test_a_smoke_run_is_never_extended_past_the_end_of_its_schedule_in_silence(run_train, whole):
    """`--max_steps=2` to try it, then the real command: not 28 steps at the lowest rate."""
    smoke = run_train("run", *FLAGS, "--max_steps=2", "--warmup_steps=2")
    flags = (*FLAGS, "--warmup_steps=2")
    before = {path: path.read_bytes() for path in smoke.out_dir.iterdir() if path.is_file()}
    refused = run_train("run", *flags, code=2)
    assert "planned for 2 steps" in refused.stderr
    for typed in ("--out_dir=run --decay_steps=30", "--out_dir=run --decay_steps=2"):
        assert typed in refused.stderr
    assert {path: path.read_bytes() for path in smoke.out_dir.iterdir() if path.is_file()} == before
    shutil.copytree(smoke.out_dir, smoke.out_dir.parent / "last")
    last = run_train("last", *flags, "--decay_steps=2")
    anew = run_train("run", *flags, "--decay_steps=30")
    straight = run_train("straight", *flags)
    rates = [[row["lr"] for row in done.rows("train")] for done in (last, anew, straight)]
    assert rates[0][2:] == [1e-4] * 28
    assert rates[1][2:] == rates[2][2:]
    constant = [*flags, "--schedule=constant"]
    run_train("constant", *constant, "--max_steps=2")
    run_train("constant", *constant)
    restarted = run_train("last", *flags, "--resume=restart")
    assert restarted.fingerprint(STEPS) == straight.fingerprint(STEPS)
    assert (smoke.out_dir.parent / "last.old_1/ckpt_00000030.pt").exists()


def test_a_default_warmup_shrinks_to_a_tenth_and_changes_no_past_rate(run_train, tmp_path):
    (tmp_path / "long.py").write_text("warmup_steps = 100\n")
    config = str(tmp_path / "long.py")
    run_train("run", config, "--max_steps=20")
    done = run_train("run", config, "--max_steps=24", "--decay_steps=20")
    rates = [row["lr"] for row in done.rows("train")]
    assert rates[:3] == pytest.approx([0.5e-3, 1e-3, 1e-3])  # a tenth of the steps
    assert rates[20:] == [1e-4] * 4  # and warmup_steps is kept: 2
    refused = run_train("other", config, "--max_steps=4", "--warmup_steps=100", code=2)
    assert "--warmup_steps=100: expected no more" in refused.stderr


def test_a_checkpoint_of_another_run_seeds_an_empty_folder(run_train, whole, tmp_path):
    source = run_train("source", *FLAGS, before=stop_at(13), code=143)
    before = {path: path.read_bytes() for path in source.out_dir.iterdir() if path.is_file()}
    seed = f"--resume={source.checkpoint(13)}"
    done = run_train("run", *FLAGS, seed, before=stop_at(ACROSS), code=143)
    done = run_train("run", *FLAGS, seed)  # the same command: it resumes the run that is here
    assert [row["step"] for row in events(done, "resume")] == [13, ACROSS]
    ours, expected = done.fingerprint(STEPS), whole().fingerprint(STEPS)
    assert all(ours[part] == expected[part] for part in ("model", "optimizer", "rng"))
    assert {
        path: path.read_bytes() for path in source.out_dir.iterdir() if path.is_file()
    } == before


ANOTHER_GROUP = """
head = args[0].head.weight
for group in result[0].param_groups:
    group["params"] = [weight for weight in group["params"] if weight is not head]
result[0].add_param_group({"params": [head], "weight_decay": 0.0})
"""
ANOTHER_ORDER = """
result[0].param_groups[0]["params"].reverse()  # moments would go to other weights
"""


def test_another_grouping_of_weights_is_refused_by_name(run_train):
    """At the resume; and at the save, where a group was added in mid-run."""
    stopped = run_train("run", *FLAGS, before=stop_at(13), code=143)
    before = {path: path.read_bytes() for path in stopped.out_dir.iterdir() if path.is_file()}
    another = [around("configure_optimizers", then=t) for t in (ANOTHER_GROUP, ANOTHER_ORDER)]
    done = run_train("run", *FLAGS, before=another[0], code=2)
    assert "grouping of weights" in done.stderr and "--out_dir=" in done.stderr
    done = run_train("run", *FLAGS, before=another[1], code=2)
    assert "grouping of weights" in done.stderr and "--out_dir=" in done.stderr
    assert {
        path: path.read_bytes() for path in stopped.out_dir.iterdir() if path.is_file()
    } == before
    own = "{'params': [torch.nn.Parameter(torch.ones(2))]}"
    late = at_step(13, f"run.optimizers[0].add_param_group({own})")
    done = run_train("late", *FLAGS, before=late, code=1)
    assert "an optimizer has other param_groups" in done.stderr
    assert "configure_optimizers" in done.stderr and "Traceback" not in done.stderr
    assert done.checkpoint(10).exists() and not done.checkpoint(20).exists()


def test_weights_that_are_frozen_in_mid_run_stay_frozen_after_a_resume(straight_and_resumed, whole):
    freeze = at_step(10, "run.model.embedding.requires_grad_(False)")
    how = {"step": 13, "name": "SIGTERM", "last": STEPS, "before": freeze}
    _, done = straight_and_resumed(*FLAGS, **how)
    assert done.fingerprint(STEPS)["model"] != whole().fingerprint(STEPS)["model"]  # control


def test_what_may_change_bits_is_named_and_measured(run_train, whole):
    """Here another split into micro-batches, and another number of threads."""
    run_train("run", *FLAGS, before=stop_at(13), code=143)
    done = run_train("run", *FLAGS, "--batch_size=8", "--accum_steps=1", before=TWO_THREADS)
    (event,) = events(done, "resume")
    assert event["changed"]["batch_size"][1] == event["knobs"]["batch_size"] == 8
    assert event["changed"]["threads"] == [1, 2]
    (found,) = checked(done)
    difference = found["first_difference"]  # sums in another order, other dropout
    assert (difference["step"], difference["field"]) == (14, "loss")
    assert "other numbers from step 14 on: loss" in done.stdout
    assert "batch_size 4 -> 8" in done.stdout and "threads 1 -> 2" in done.stdout
    assert done.fingerprint(STEPS)["model"] != whole().fingerprint(STEPS)["model"]


@pytest.mark.parametrize("step", [16, STEPS])
def test_a_stop_in_an_evaluation_leaves_it_to_the_process_that_resumes(run_train, whole, step):
    stop = f"if run.state['step'] == {step}: os.kill(os.getpid(), signal.SIGTERM)"
    stopped = run_train("run", *FLAGS, before=around("sum_losses_of_batch", then=stop), code=143)
    assert stopped.facts["state"]["evaluation_due"]
    evaluated = [row["step"] for row in stopped.rows("eval")]
    assert evaluated == [n for n in (0, 8, 16, 24, STEPS) if n < step]
    done = run_train("run", *FLAGS)
    assert done.fingerprint(STEPS) == whole().fingerprint(STEPS)
    assert_whole_metrics(done, whole())


def test_a_kill_does_not_fall_back_behind_the_best(run_train):
    flags = (*FLAGS, "--save_interval=0")
    killed = run_train("run", *flags, before=stop_at(12, "SIGKILL"), code=137)
    assert killed.checkpoint(8).samefile(killed.out_dir / "best.pt")
    assert [row["step"] for row in events(run_train("run", *flags), "resume")] == [8]


def test_what_was_resolved_once_is_kept_unless_the_command_asks_for_another_value(run_train):
    """The planned learning rate: of the second command, not of the first or the third."""
    short = ("--max_steps=20", "--warmup_steps=0")
    run_train("run", *short)
    run_train("run", "--max_steps=40", "--decay_steps=600", "--warmup_steps=0")
    done = run_train("run", "--max_steps=60", "--warmup_steps=0")
    assert done.facts["config"]["decay_steps"] == 600
    rates = [row["lr"] for row in done.rows("train")]
    straight = run_train("straight", "--max_steps=60", "--decay_steps=600", "--warmup_steps=0")
    assert rates[20:] == [row["lr"] for row in straight.rows("train")][20:]
    assert rates[:20] != [row["lr"] for row in straight.rows("train")][:20]  # control
    typed = ("--dtype=bfloat16", "--warmup_steps=2", "--max_steps=4", "--decay_steps=9")
    run_train("kept", *typed)
    done = run_train("kept", "--max_steps=6", "--dtype=auto", "--decay_steps=0", "--warmup_steps=2")
    assert [done.facts["config"][name] for name in ("dtype", "decay_steps")] == ["bfloat16", 9]


# ---- Ctrl-C --------------------------------------------------------------------------------------


def test_the_first_ctrl_c_is_answered_at_once_with_what_a_second_would_lose(run_train):
    """Within the step; the second has the system's own action."""
    kill = "os.kill(os.getpid(), signal.SIGINT); print('IN THE STEP', flush=True)"
    done = run_train("run", *FLAGS, before=at_step(13, SAVED + kill), code=130)
    answer, _, later = done.stdout.partition("IN THE STEP")
    words = "stopping after this step; Ctrl-C again stops now (newest checkpoint: step 10)\n"
    assert words in answer and later
    assert done.checkpoint(13).exists()
    twice = at_step(5, "[os.kill(os.getpid(), signal.SIGINT) for _ in '12']")
    done = run_train("twice", *FLAGS, before=twice, code=130)
    assert "(newest checkpoint: step 0)" in done.stdout and not done.checkpoint(5).exists()


BEFORE_THE_FIRST_STEP = around("first_pass", "os.kill(os.getpid(), signal.{})")


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_before_the_first_step_there_is_nothing_to_save(run_train, whole, name, code):
    done = run_train("run", *FLAGS, before=BEFORE_THE_FIRST_STEP.format(name), code=code)
    assert "Traceback" not in done.stderr and not list(done.out_dir.glob("*.pt"))
    assert len(done.stderr.splitlines()) == (name == "SIGINT")
    done = run_train("run", *FLAGS)
    assert done.fingerprint(STEPS) == whole().fingerprint(STEPS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_sigusr1_is_ignored_before_the_first_step(start_train, tmp_path):
    process = start_train("run", "--save_interval=100")
    wait_for(lambda: process.poll() is not None or ignores(process.pid, "SIGUSR1"))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0, process.log.read_text()


def ignores(pid, name):
    with open(f"/proc/{pid}/status") as file:
        ignored = int(re.search(r"SigIgn:\s*(\w+)", file.read())[1], 16)
    return bool(ignored >> signal.Signals[name] - 1 & 1)


# ---- what to type --------------------------------------------------------------------------------


def test_the_advice_for_a_path_that_does_not_fit_is_a_command_that_works(run_train, whole):
    """--resume=PATH with another model; of a run that has ended; a folder; into another run."""
    path = whole().checkpoint(20)
    seed = f"--resume={path}"
    refused = run_train("x", *FLAGS, seed, "--n_embd=64", code=2).stderr
    assert "--out_dir" not in refused  # no folder would help
    assert "write no --resume or, to resume, --n_embd=32" in refused
    refused = run_train("y", *FLAGS, seed, "--max_steps=40", code=2).stderr
    typed = re.findall(r"--decay_steps=\d+", refused)
    assert typed == ["--decay_steps=40", "--decay_steps=30"]
    run_train("y", *FLAGS, seed, "--max_steps=40", typed[0])
    folder = whole().out_dir
    refused = run_train("z", *FLAGS, f"--resume={folder}", code=2).stderr
    best = re.search(r"--resume=\S+best.pt", refused)[0]
    run_train("z", *FLAGS, best, "--max_steps=33", "--decay_steps=33")
    refused = run_train("z", *FLAGS, seed, code=2).stderr
    fresh = re.search(r"--out_dir=(\S+)", refused)[1]
    run_train(fresh, *FLAGS, seed)
    run_train(fresh, *FLAGS, seed)  # the same command: it has finished


def test_a_signal_in_the_step_of_an_early_stop_advises_nothing_wrong(run_train):
    flags = (*FLAGS, "--patience=1", "--min_delta=9")
    for name, more, stop in (("run", flags, 8), ("last", FLAGS, STEPS)):
        done = run_train(name, *more, before=stop_at(stop), code=143)  # its evaluation is due
        assert "same command again" in done.stdout
    for name, more, ended in (("run", flags, "stopped early"), ("last", FLAGS, "finished")):
        done = run_train(name, *more)
        assert done.facts["ended"].startswith(ended) and "same command again" not in done.stdout

"""Several ranks are one run: one batch, one decision, one set of files, exact to the bit on resume.

Most ranks here are forked from the process that has imported train.py, with the environment that
torchrun would give them; the tests of torchrun itself run its real command.
"""

import re
import shutil
import signal

import pytest
import torch
from conftest import codes, events, first, wait_for
from helpers import ONE_THREAD, alive, children, torchrun
from sources import SHARD, around, bad_batches, only_on, ranks, stop_at

FLAGS = ("--dropout=0.1", "--ema_decay=0.9", "--save_interval=4", "--log_interval=1")


# The random numbers of a checkpoint are lost; the repeated second step of a process would notice.
FORGET = """
train.checkpoint.set_rng_state = lambda rng, device: None
train.audit_interval = -1
"""


# ---- exactness -----------------------------------------------------------------------------------


COUNTS = [(2, ""), (2, SHARD), (1, ""), (3, ""), (4, ""), (3, SHARD)]


@pytest.mark.parametrize("count, shard", first(2, COUNTS))
def test_resume_is_bit_exact_and_a_signal_to_the_last_rank_stops_all(
    run_train, tmp_path, count, shard
):
    flags = (*FLAGS, "--batch_size=12", shard or f"--num_workers={int(count < 3)}")
    straight = run_train("straight", *flags, before=ranks(count))
    stopped = run_train(
        "same", *flags, before=ranks(count, only_on(count - 1, stop_at(6))), code=143
    )
    assert "stopped by SIGTERM at step 6" in stopped.stdout
    shutil.copytree(stopped.out_dir, tmp_path / "control")
    for name in ("same", "control") if count == 2 else ("same",):
        done = run_train(name, *flags, before=ranks(count, FORGET if name == "control" else ""))
        assert (done.fingerprint(12) == straight.fingerprint(12)) == (name == "same")
        (checked,) = events(done, "resume_checked")  # the two steps that they took together
        assert (checked["compared"] == checked["equal"] == 2) == (name == "same")


def test_two_ranks_take_the_steps_of_one_and_draw_dropout_of_their_own(run_train):
    flags = ("--log_interval=1", "--max_steps=6")
    drew = r"""os.write(1, f"DREW {run.state['step']} {torch.rand(1).item()}\n".encode())"""
    note = around("train_step", drew)
    one = run_train("one", *flags)
    two = run_train("two", *flags, before=ranks(2, note))
    for key in ("loss", "grad_norm"):
        rows = [[row[key] for row in done.rows("train")] for done in (one, two)]
        assert rows[0] == pytest.approx(rows[1], rel=1e-4), key
    losses = [done.rows("eval")[0]["val_loss"] for done in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(re.findall(r"DREW \d (\S+)", two.stdout))) == 2 * 6
    sharded = run_train("sharded", *flags, SHARD, before=ranks(2))
    texts = {events(done, "sample")[0]["text"] for done in (one, two, sharded)}
    assert len(texts) == 1 and "sample" in events(one, "end")[0]["seconds"]


def test_one_command_is_one_batch_on_any_number_of_ranks_also_on_others_at_a_resume(run_train):
    flags = ("--batch_size=8", "--max_steps=20", "--log_interval=1")
    split = (*flags, "--batch_size=4", "--accum_steps=2")
    one, *others = (run_train(f"of_{n}", *flags, before=ranks(n)) for n in (1, 2, 3))
    run_train("run", *flags, before=ranks(1, stop_at(6)), code=143)
    two = run_train("run", *split, before=ranks(2, stop_at(14)), code=143)
    assert "4 x 2 = 8 sequences" in two.stdout and "; 4 on each of 2 ranks" in two.stdout
    assert "resumed at step 6" in two.stdout and "ranks 1 -> 2" in two.stdout
    three = run_train("run", *flags, before=ranks(3))
    assert "8 x 1 = 8 sequences" in three.stdout and "; 2 or 3 on each of 3 ranks" in three.stdout
    resumes = events(three, "resume")
    assert [row["changed"]["ranks"] for row in resumes] == [[1, 2], [2, 3]]
    for done in (*others, three):
        pairs = list(zip(one.rows("train"), done.rows("train"), strict=True))
        apart = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
        assert 0 < apart < 1e-5  # 0 would mean that the ranks did not share the work
        for a, b in pairs:
            assert all(a[key] == b[key] for key in ("step", "sequences", "tokens", "lr", "epoch"))
    refused = run_train("run", *split, "--accum_steps=3", before=ranks(2), code=2).stderr
    assert refused.count("the batch changed from 8 to 12 sequences") == 1
    assert f"--out_dir={three.out_dir.name} --batch_size=4 --accum_steps=2" in refused


COUNTING = """
import torch.distributed as dist
from collections import Counter
calls = Counter()
def counted(name, function):
    def call(*args, **kwargs):
        calls[kwargs.get("op") or (args[1] if name == "all_reduce" and len(args) > 1 else name)] += 1
        return function(*args, **kwargs)
    return call
for name in ("all_reduce", "all_gather_object", "broadcast", "barrier"):
    setattr(dist, name, counted(name, getattr(dist, name)))
"""
PER_STEP = """
names = " ".join(sorted(map(str, calls.elements())))
os.write(1, f"CALLS {run.state['step']}: {names}\\n".encode())
calls.clear()
"""


def test_ranks_agree_twice_in_a_quiet_step_and_sum_twice(run_train):
    """Two messages on the CPU, about the step and after it; sums of targets, and of gradients."""
    source = COUNTING + around("take_step", PER_STEP)
    done = run_train(
        "run", "--max_steps=8", "--warmup_steps=1", before=ranks(2, only_on(0, source))
    )
    per_step = dict(re.findall(r"CALLS (\d): (.*)", done.stdout))
    quiet = "RedOpType.MAX RedOpType.MAX all_reduce all_reduce"
    assert {step: per_step[step] for step in "34567"} == dict.fromkeys("34567", quiet)
    assert per_step["2"] != quiet  # control: after the audit of the second step


TOO_SMALL = "train.sequences_at = lambda step: 3 if step < 4 else 1\n"


@pytest.mark.parametrize(
    "flags, count, source, code, message",
    [
        (["--batch_size=1"], 2, "", 2, "(batch_size * accum_steps) for 2 ranks: expected one or"),
        (
            [SHARD, "--batch_size=3"],
            2,
            "",
            2,
            "a batch of 3 sequences (batch_size * accum_steps) for",
        ),
        ([], 2, TOO_SMALL, 1, "a batch of 1 sequences (batch_size * accum_steps) for 2 ranks"),
    ],
    ids=["one for each", "a multiple", "later"],
)
def test_a_batch_that_the_ranks_cannot_share_is_refused(
    run_train, flags, count, source, code, message
):
    done = run_train("run", *flags, "--max_steps=8", before=ranks(count, source), code=code)
    assert done.stderr.count(message) == 1
    assert done.out_dir.exists() == (code == 1)


@pytest.mark.parametrize("rows", ["16 if step >= 5 else 8", "9"], ids=["doubles", "uneven"])
def test_a_fork_may_choose_the_rows_of_a_batch_on_any_number_of_ranks(run_train, rows):
    """Also so many that the ranks get unequal shares of them: each sequence counts the same."""
    source = f"train.sequences_at = lambda step: {rows}\n"
    flags = ("--log_interval=1", "--max_steps=8", "--warmup_steps=0")
    one, two = (run_train(f"of_{n}", *flags, before=ranks(n, source)) for n in (1, 2))
    for a, b in zip(one.rows("train"), two.rows("train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert all(a[key] == b[key] for key in ("step", "sequences", "tokens", "epoch"))


MOVING = """
model, forward = result, result.forward
model.register_buffer("mean", torch.zeros(()))
def moving(inputs, targets=None):
    found = forward(inputs, targets)
    if targets is not None:
        loss = found if model.training else found[0]
        model.mean = 0.5 * model.mean + 0.5 * loss.detach()
    return found
model.forward = moving
"""
MOVING = around("build_model", then=MOVING)
BAD_BUFFER = """
if run.state["step"] == 3:
    run.model.mean *= math.nan
    result["loss"] *= math.nan
"""
BAD_BUFFER = around("forward_backward", then=BAD_BUFFER)


def test_buffers_that_a_forward_pass_moves_are_averaged_over_the_ranks(run_train):
    """Here the running mean of a rank's own losses, which becomes that of the global batch."""
    flags = (*FLAGS, "--dropout=0.0")
    source = MOVING + only_on(1, BAD_BUFFER)
    straight = run_train("straight", *flags, before=ranks(2, source))
    assert [row["skipped"] for row in straight.rows("train")] == [0] * 3 + [1] + [0] * 8
    mean = 0.0
    for row in straight.rows("train"):
        mean = mean if row["skipped"] else 0.5 * mean + 0.5 * row["loss"]
    found = torch.load(straight.checkpoint(12), weights_only=True)["model"]["mean"].item()
    assert found == pytest.approx(mean, rel=1e-6)  # and moved by no warm-up pass, no evaluation
    run_train("run", *flags, before=ranks(2, source + only_on(1, stop_at(6))), code=143)
    done = run_train("run", *flags, before=ranks(2, source))
    assert done.fingerprint(12) == straight.fingerprint(12)


# ---- what one rank meets, all agree on -----------------------------------------------------------


SOON = "train.MAX_SKIPPED = 2\n"


def test_a_bad_loss_on_one_rank_is_skipped_by_all(run_train):
    flags = (*FLAGS, "--max_steps=20", "--batch_size=8")
    source = bad_batches([3, 9])
    one = run_train("one", *flags, before=ranks(2, SOON + only_on(1, source)))
    assert [row["step"] for row in one.rows("event") if row["event"] == "skipped"] == [4, 10]
    both = run_train("both", *flags, before=ranks(2, SOON + source))
    assert one.fingerprint(20) == both.fingerprint(20)
    run_train("stopped", *flags, before=ranks(2, SOON + only_on(0, source) + stop_at(10)), code=143)
    resumed = run_train("stopped", *flags, before=ranks(2, SOON + only_on(0, source)))
    assert resumed.fingerprint(20) == both.fingerprint(20)


def test_an_early_stop_and_a_failure_end_all_ranks(run_train):
    flags = ("--eval_interval=3", "--patience=2", "--min_delta=9")
    done = run_train("run", *flags, before=ranks(2))
    assert "stopped early" in done.stdout
    bad = bad_batches(list(range(1, 99)))
    failed = run_train("bad", before=ranks(2, SOON + bad), code=1)
    assert failed.stderr.count("not finite") == 1


def test_a_rank_that_is_killed_ends_the_others_with_a_message(run_train):
    straight = run_train("straight", *FLAGS, before=ranks(3))
    killed = run_train("run", *FLAGS, before=ranks(3, only_on(1, stop_at(6, "SIGKILL"))), code=None)
    assert codes(killed) == "1 -9 1"
    assert "train.py: failed: another rank failed or is gone (" in killed.stderr
    assert "the same command resumes" in killed.stderr and "Traceback" not in killed.stderr
    done = run_train("run", *FLAGS, before=ranks(3))
    assert done.fingerprint(12) == straight.fingerprint(12)


def test_where_memory_runs_out_on_one_rank_all_halve_their_micro_batch(run_train):
    flags = ("--dropout=0.1", "--log_interval=1")
    full = around("forward_backward", then="if run.state['micro_batch'] > 2: raise MemoryError")
    # each rank takes 4 of the 8: a first halving to 4 would change nothing
    done = run_train("run", *flags, "--batch_size=8", before=ranks(2, only_on(1, full)))
    assert [row["micro_batch"] for row in events(done, "out_of_memory")] == [2]
    split = ("--batch_size=2", "--accum_steps=4")
    asked = run_train("asked", *flags, *split, before=ranks(2))
    assert done.fingerprint(12)["model"] == asked.fingerprint(12)["model"]


# ---- torchrun ------------------------------------------------------------------------------------

LONG = ("--max_steps=300", "--save_interval=20", "--log_interval=5", "--dropout=0.1")


LAUNCHED = [(2, "SIGTERM"), (2, "SIGKILL"), (1, "SIGINT"), (3, "SIGINT"), (4, "SIGTERM")]


@pytest.mark.parametrize("count, name", first(1, LAUNCHED))
def test_torchrun_passes_a_signal_on(start_train, run_train, once, count, name):
    """But for SIGKILL, of which nobody can tell the ranks: they see that their launcher is gone."""
    flags = (*LONG, "--batch_size=12")
    process = start_train("run", *flags, launcher=torchrun(count), env=ONE_THREAD)
    wait_for(lambda: re.search(r"\b5/300 ", process.log.read_text()))
    pids = children(process)
    assert len(pids) == count
    process.send_signal(getattr(signal, name))
    assert process.wait(90) == (-9 if name == "SIGKILL" else 1)  # the launcher's own code
    wait_for(lambda: not any(map(alive, pids)))
    how = "left alone by its launcher" if name == "SIGKILL" else f"stopped by {name}"
    assert f"{how} at step" in process.log.read_text()
    done = run_train("run", *flags, before=ranks(count))
    straight = once(*flags, before=ranks(count))
    assert done.fingerprint(300) == straight.fingerprint(300)


# ---- sharded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, steps", first(1, [(2, 12), (3, 50)]))
def test_sharded_and_not_the_losses_agree_and_the_checkpoints_are_for_both(run_train, count, steps):
    flags = ("--batch_size=12", f"--max_steps={steps}")
    flags += ("--log_interval=1", "--ema_decay=0.9")
    plain = run_train("plain", *flags, before=ranks(count))
    sharded = run_train("sharded", *flags, SHARD, before=ranks(count))
    # a checkpoint of either goes on as the other, and in a single process
    run_train("mixed", *flags, SHARD, before=ranks(count, stop_at(3)), code=143)
    run_train("mixed", *flags, before=ranks(count, stop_at(6)), code=143)
    run_train("mixed", *flags, SHARD, before=ranks(count, stop_at(9)), code=143)
    mixed = run_train("mixed", *flags)
    changed = [row["changed"]["shard"] for row in events(mixed, "resume")]
    assert changed == [[True, False], [False, True], [True, False]]
    for done in (sharded, mixed):
        assert_close(plain, done, 1e-5)
        saved, other = (torch.load(d.checkpoint(steps), weights_only=True) for d in (plain, done))
        for name, weight in saved["model"].items():
            assert torch.allclose(weight, other["model"][name], atol=1e-4), name


def assert_close(one, other, relative):
    pairs = list(zip(one.rows("train"), other.rows("train"), strict=True))
    assert [a["step"] for a, _ in pairs] == list(range(1, len(pairs) + 1)) and len(pairs) > 1
    for key in ("loss", "grad_norm"):
        apart = max(abs(a[key] - b[key]) / a[key] for a, b in pairs)
        assert apart < relative * (1 if key == "loss" else 10), key
    losses = [[row["val_loss"] for row in done.rows("eval")] for done in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=relative)


@pytest.mark.parametrize("optimizer", first(1, ["adamw", "momentum", "muon"]))
def test_a_bad_gradient_of_one_rank_touches_no_share_of_any(run_train, optimizer):
    flags = (f"--optimizer={optimizer}", "--ema_decay=0.9", SHARD, "--max_steps=5")
    hold = """
bad = run.state["step"] == 3
if bad and rank == 1:
    train.ranks.local_tensor(list(run.model.parameters())[-1].grad)[0, 0] = math.inf
kept = [*weights_and_moments(run), *run.ema.values()]
run.held = [train.ranks.local_tensor(t).clone() for t in kept] if bad else None
"""
    look = r"""
if run.held:
    now = [train.ranks.local_tensor(t) for t in (*weights_and_moments(run), *run.ema.values())]
    same = all(torch.equal(a, b) for a, b in zip(run.held, now, strict=True))
    os.write(1, f"SAME {rank} {same}\n".encode())  # at once: two ranks write here
"""
    source = around("forward_backward", then=hold) + around("train_step", then=look)
    done = run_train("run", *flags, before=ranks(2, source))
    found = sorted(line for line in done.stdout.splitlines() if "SAME" in line)
    assert found == ["SAME 0 True", "SAME 1 True"]
    assert [row["skipped"] for row in done.rows("train")] == [0, 0, 0, 1, 0]


def test_each_rank_holds_its_share_of_the_memory_and_no_more(run_train):
    held = r"""
weights = list(run.model.parameters())
moments = weights_and_moments(run)[len(weights) :]
kinds = {"weights": weights, "gradients": [w.grad for w in weights], "moments": moments}
held = [sum(train.ranks.local_tensor(t).nbytes for t in kind) for kind in kinds.values()]
os.write(1, f"HELD {rank} {held}\n".encode())
"""
    source = around("train_step", then=held)
    totals = {}
    flags = ("--max_steps=1", "--warmup_steps=1", "--batch_size=12")
    for count, flag in ((1, "--shard=false"), (2, SHARD), (3, SHARD)):
        done = run_train(f"of_{count}", *flags, flag, before=ranks(count, source))
        found = re.findall(r"HELD \d \[(\d+), (\d+), (\d+)\]", done.stdout)
        assert len(found) == count, done.stderr
        totals[count] = [[int(number) for number in each] for each in found]
    for count in (2, 3):
        for held in totals[count]:
            for mine, all_of_it in zip(held, totals[1][0], strict=True):
                assert mine == pytest.approx(all_of_it / count, rel=0.02)

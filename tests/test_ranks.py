"""Several ranks are one run: one batch, one decision, one set of files, exact to the bit on resume.

Most ranks here are forked from the process that has imported train.py, with the environment that
torchrun would give them; the tests of torchrun itself run its real command.
"""

import functools
import re
import shutil
import signal
import sys

import pytest
import torch
from conftest import SHARD, bad_batches, codes, first, only_on, ranks, stop_at, wait_for
from helpers import ONE_THREAD, alive, children

FLAGS = ("--dropout=0.1", "--ema_decay=0.9", "--save_interval=4", "--log_interval=1")


# The random numbers of a checkpoint are lost; the repeated second step of a process would notice.
FORGET = """
train.checkpoint.set_rng_state = lambda rng, device: None
train.audit_interval = -1
"""


# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", first(1, [2, 1, 3, 4]))
def test_resume_is_bit_exact_and_a_signal_to_the_last_rank_stops_all(run_train, tmp_path, count):
    flags = (*FLAGS, f"--batch_size={12 // count}", f"--num_workers={2 * (count < 3)}")
    straight = run_train("straight", *flags, before=ranks(count))
    assert codes(straight) == " ".join(["0"] * count), straight.stderr
    stopped = run_train("same", *flags, before=ranks(count, only_on(count - 1, stop_at(6))))
    assert codes(stopped) == " ".join(["143"] * count)
    assert "stopped by SIGTERM at step 6" in stopped.stdout
    shutil.copytree(stopped.out_dir, tmp_path / "control")
    for name in ("same", "control") if count == 2 else ("same",):
        done = run_train(name, *flags, before=ranks(count, FORGET if name == "control" else ""))
        assert done.returncode == 0, done.stderr
        assert (done.fingerprint(12) == straight.fingerprint(12)) == (name == "same")


def test_from_1_to_2_to_1_ranks_the_batches_are_the_same_and_the_losses_agree(run_train):
    flags = ("--batch_size=8", "--max_steps=20", "--log_interval=1", "--save_interval=10")
    straight = run_train("straight", *flags, before=ranks(1))
    run_train("run", *flags, before=ranks(1, stop_at(6)))
    two = run_train("run", *flags, before=ranks(2, stop_at(14)))
    assert "4 x 1 x 2" in two.stdout or "8 sequences" in two.stdout
    done = run_train("run", *flags, before=ranks(1))
    assert done.returncode == 0, done.stderr
    inexact = [row for row in done.rows("event") if row["event"] == "inexact_resume"]
    assert [row["world_size"] for row in inexact] == [[1, 2], [2, 1]]
    assert "inexact resume" in two.stdout
    pairs = list(zip(straight.rows("train"), done.rows("train"), strict=True))
    assert len(pairs) == 20
    apart = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
    print(f"largest difference of a loss: {apart:.1e} of it")
    assert 0 < apart < 1e-5  # 0 would mean that the ranks did not share the work
    for a, b in pairs:
        assert all(a[key] == b[key] for key in ("step", "sequences", "tokens", "lr", "epoch"))


def test_two_ranks_take_the_steps_of_one_and_draw_dropout_of_their_own(run_train):
    flags = ("--log_interval=1", "--max_steps=6")
    note = """
def train_step(model, run, inputs, *rest, inner=train.train_step):
    os.write(1, f"DREW {run.state['step']} {torch.rand(1).item()}\\n".encode())
    return inner(model, run, inputs, *rest)
train.train_step = train_step
"""
    one = run_train("one", *flags)
    two = run_train("two", *flags, "--batch_size=4", before=ranks(2, note))
    assert codes(two) == "0 0", two.stderr
    for key in ("loss", "grad_norm"):
        rows = [[row[key] for row in done.rows("train")] for done in (one, two)]
        assert rows[0] == pytest.approx(rows[1], rel=1e-4), key
    losses = [done.rows("eval")[0]["val_loss"] for done in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(re.findall(r"DREW \d (\S+)", two.stdout))) == 2 * 6


def test_another_number_of_ranks_divides_the_batch_or_is_refused_with_the_numbers(run_train):
    run_train("run", "--batch_size=8", before=ranks(1, stop_at(5)))
    refused = run_train("run", "--batch_size=8", before=ranks(3))
    assert refused.returncode == 2
    assert refused.stderr.count("the 8 sequences of this run's batch do not divide by 3 ranks") == 1
    refused = run_train("run", "--batch_size=8", "--accum_steps=3", before=ranks(2))
    assert codes(refused) == "2 2" and "global_batch changed from 8" in refused.stderr
    used = run_train("run", "--batch_size=2", "--accum_steps=2", before=ranks(2))
    assert codes(used) == "0 0" and "2 x 2 x 2 = 8 sequences" in used.stdout, used.stderr


def test_a_signal_to_a_rank_whose_batch_does_not_come_stops_all(run_train):
    """The others have theirs: they must not take a step in which it is missing."""
    hang = """
import signal, threading, time
def getitem(self, batch, inner=train.ShuffledWindows.__getitem__):
    if batch[0] >= 5 * 8:
        time.sleep(60)
    return inner(self, batch)
train.ShuffledWindows.__getitem__ = getitem
def what_is_due(step, *rest, inner=train.what_is_due):
    if step == 5:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return inner(step, *rest)
train.what_is_due = what_is_due
"""
    flags = ("--batch_size=4", "--num_workers=1", "--eval_interval=5", "--log_interval=5")
    flags += ("--save_interval=5",)
    done = run_train("run", *flags, before=ranks(2, only_on(1, hang)))
    assert codes(done) == "143 143", done.stderr
    assert "stopped by SIGTERM at step 5" in done.stdout and done.checkpoint(5).exists()
    assert [row["step"] for row in done.rows("eval")] == [0, 5]
    assert [row["step"] for row in done.rows("train")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rows", ["16 if step >= 5 else 8", "9"], ids=["doubles", "uneven"])
def test_a_fork_may_choose_the_rows_of_a_batch_on_any_number_of_ranks(run_train, rows):
    """Also so many that the ranks get unequal shares of them: each sequence counts the same."""
    source = f"train.rows_at = lambda step: {rows}\n"
    flags = ("--log_interval=1", "--max_steps=8", "--warmup_steps=0")
    one, two = (run_train(f"of_{n}", *flags, before=ranks(n, source)) for n in (1, 2))
    assert codes(two) == "0 0", two.stderr
    for a, b in zip(one.rows("train"), two.rows("train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert all(a[key] == b[key] for key in ("step", "sequences", "tokens", "epoch"))


MOVING = """
def build_model(*args, inner=train.build_model):
    model = inner(*args)
    model.register_buffer("mean", torch.zeros(()))
    forward = model.forward
    def moving(inputs, targets=None):
        result = forward(inputs, targets)
        if targets is not None:
            model.mean = 0.5 * model.mean + 0.5 * result.detach()
        return result
    model.forward = moving
    return model
train.build_model = build_model
"""
BAD_BUFFER = """
def forward_backward(model, run, *rest, inner=train.forward_backward):
    numbers = inner(model, run, *rest)
    if run.state["step"] == 3:
        run.model.mean *= float("nan")
        numbers["loss"] *= float("nan")
    return numbers
train.forward_backward = forward_backward
"""


def test_buffers_that_a_forward_pass_moves_are_averaged_over_the_ranks(run_train):
    """Here the running mean of a rank's own losses, which becomes that of the global batch."""
    flags = (*FLAGS, "--dropout=0.0")
    source = MOVING + only_on(1, BAD_BUFFER)
    straight = run_train("straight", *flags, before=ranks(2, source))
    assert codes(straight) == "0 0", straight.stderr
    assert [row["skipped"] for row in straight.rows("train")] == [0] * 3 + [1] + [0] * 8
    mean = 0.0
    for row in straight.rows("train"):
        mean = mean if row["skipped"] else 0.5 * mean + 0.5 * row["loss"]
    found = torch.load(straight.checkpoint(12), weights_only=True)["model"]["mean"].item()
    assert found == pytest.approx(mean, rel=1e-6)  # and moved by no rehearsal, no evaluation
    run_train("run", *flags, before=ranks(2, source + only_on(1, stop_at(6))))
    done = run_train("run", *flags, before=ranks(2, source))
    assert done.fingerprint(12) == straight.fingerprint(12)


# ---- what one rank meets, all agree on -----------------------------------------------------------


def test_a_bad_loss_on_one_rank_is_skipped_and_rolled_back_by_all(run_train):
    flags = (*FLAGS, "--max_skipped=2", "--max_steps=20", "--batch_size=4")
    source = bad_batches([3, 9, 10])
    one = run_train("one", *flags, before=ranks(2, only_on(1, source)))
    assert codes(one) == "0 0", one.stderr
    assert [row["step"] for row in one.rows("event") if row["event"] == "skipped"] == [4, 10, 11]
    (event,) = [row for row in one.rows("event") if row["event"] == "rollback"]
    assert (event["step"], event["next_sequence"]) == (8, 11 * 8)
    both = run_train("both", *flags, before=ranks(2, source))
    assert one.fingerprint(20) == both.fingerprint(20)
    run_train("stopped", *flags, before=ranks(2, only_on(0, source) + stop_at(10)))
    resumed = run_train("stopped", *flags, before=ranks(2, only_on(0, source)))
    assert resumed.fingerprint(20) == both.fingerprint(20)


def test_an_early_stop_and_a_failure_end_all_ranks(run_train):
    flags = ("--eval_interval=3", "--patience=2", "--min_delta=9")
    done = run_train("run", *flags, before=ranks(2))
    assert codes(done) == "0 0" and "stopped early" in done.stdout
    bad = bad_batches(list(range(1, 99)))
    failed = run_train("bad", "--max_skipped=2", before=ranks(2, bad))
    assert codes(failed) == "1 1" and "not finite" in failed.stderr


def test_a_rank_that_is_killed_ends_the_others_with_a_message(run_train):
    straight = run_train("straight", *FLAGS, before=ranks(3))
    killed = run_train("run", *FLAGS, before=ranks(3, only_on(1, stop_at(6, "SIGKILL"))))
    assert codes(killed) == "1 -9 1"
    assert "train.py: failed: another rank failed or is gone (" in killed.stderr
    assert "the same command resumes" in killed.stderr and "Traceback" not in killed.stderr
    done = run_train("run", *FLAGS, before=ranks(3))
    assert done.fingerprint(12) == straight.fingerprint(12)


# ---- torchrun ------------------------------------------------------------------------------------

LONG = ("--max_steps=160", "--save_interval=20", "--log_interval=20", "--dropout=0.1")


def long(count):
    return (*LONG, f"--batch_size={12 // count}")


def torchrun(count, *flags):
    module = [sys.executable, "-m", "torch.distributed.run"]
    here = "--local-addr=127.0.0.1"  # a container's own name may lead nowhere
    return [*module, "--standalone", here, f"--nproc_per_node={count}", *flags]


@pytest.fixture(scope="session")
def straight(train_in, tmp_path_factory):
    """straight(count) -> the run that nothing interrupts, on so many forked ranks."""

    @functools.cache
    def run(count):
        folder = tmp_path_factory.mktemp("straight")
        return train_in(folder, "run", *long(count), before=ranks(count))

    return run


def started(start_train, *flags, count=2):
    """A torchrun whose ranks are past step 20."""
    launcher = torchrun(count, *flags)
    process = start_train("run", *long(count), launcher=launcher, env=ONE_THREAD)
    wait_for(lambda: re.search(r"\b20/160 ", process.log.read_text()))
    return process


@pytest.mark.parametrize(
    "count, name", first(1, [(2, "SIGTERM"), (1, "SIGINT"), (3, "SIGINT"), (4, "SIGTERM")])
)
def test_torchrun_passes_a_signal_on(start_train, python_train, straight, count, name):
    process = started(start_train, count=count)
    process.send_signal(getattr(signal, name))
    assert process.wait(90) == 1  # the launcher's own code
    assert f"stopped by {name} at step" in process.log.read_text()
    done = python_train("run", *long(count), launcher=torchrun(count), env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert done.fingerprint(160) == straight(count).fingerprint(160)


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_leave(start_train, run_train, straight):
    process = started(start_train)
    pids = children(process)
    assert len(pids) == 2
    process.kill()
    wait_for(lambda: not any(map(alive, pids)), 10)
    assert "left alone by its launcher at step" in process.log.read_text()
    done = run_train("run", *long(2), before=ranks(2))
    assert done.returncode == 0, done.stderr
    assert done.fingerprint(160) == straight(2).fingerprint(160)


# ---- sharded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sharded_resume_is_bit_exact(run_train, tmp_path, count):
    flags = (*FLAGS, f"--batch_size={12 // count}", SHARD)
    straight = run_train("straight", *flags, before=ranks(count))
    assert codes(straight) == " ".join(["0"] * count), straight.stderr
    stopped = run_train("same", *flags, before=ranks(count, only_on(count - 1, stop_at(6))))
    shutil.copytree(stopped.out_dir, tmp_path / "control")
    for name in ("same", "control"):
        done = run_train(name, *flags, before=ranks(count, FORGET if name == "control" else ""))
        assert done.returncode == 0, done.stderr
        assert (done.fingerprint(12) == straight.fingerprint(12)) == (name == "same")


@pytest.mark.parametrize("count, steps", first(1, [(2, 12), (3, 50)]))
def test_sharded_and_not_the_losses_agree_and_the_checkpoints_are_for_both(run_train, count, steps):
    flags = (f"--batch_size={12 // count}", f"--max_steps={steps}")
    flags += ("--log_interval=1", "--ema_decay=0.9")
    plain = run_train("plain", *flags, before=ranks(count))
    sharded = run_train("sharded", *flags, SHARD, before=ranks(count))
    assert sharded.returncode == 0, sharded.stderr
    # a checkpoint of either goes on as the other, and in a single process
    run_train("mixed", *flags, SHARD, before=ranks(count, stop_at(3)))
    run_train("mixed", *flags, before=ranks(count, stop_at(6)))
    run_train("mixed", *flags, SHARD, before=ranks(count, stop_at(9)))
    mixed = run_train("mixed", *flags, "--batch_size=12")
    assert mixed.returncode == 0, mixed.stderr
    inexact = [row for row in mixed.rows("event") if row["event"] == "inexact_resume"]
    assert [row.get("shard") for row in inexact] == [[True, False], [False, True], [True, False]]
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
        print(f"largest relative difference of {key}: {apart:.1e}")
        assert apart < relative * (1 if key == "loss" else 10), key
    losses = [[row["val_loss"] for row in done.rows("eval")] for done in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=relative)


CHUNKS = "import model\nmodel.LARGE_VOCAB, model.CHUNK_LOGITS = 1, 2**8\n"  # of the loss


@pytest.mark.parametrize(
    "flags, source",
    first(
        1,
        [
            (["--offload=true"], ""),
            (["--optimizer=muon"], ""),
            (["--optimizer=momentum", "--peak_lr=0.1", "--dtype=bfloat16"], ""),
            (["--optimizer=sgd", "--peak_lr=0.1", "--dtype=float16"], ""),
            (["--grad_checkpoint=true", "--n_layer=2", "--accum_steps=2"], CHUNKS),
        ],
    ),
)
def test_sharded_and_not_the_losses_agree_with(run_train, flags, source):
    plain = [flag for flag in flags if "offload" not in flag]
    plain = run_train("plain", *plain, before=source + ranks(2))
    sharded = run_train("sharded", *flags, SHARD, before=source + ranks(2))
    assert sharded.returncode == 0, sharded.stderr
    assert_close(plain, sharded, 2e-3 if "16" in flags[-1] else 1e-5)


@pytest.mark.parametrize("optimizer", first(1, ["adamw", "momentum", "muon"]))
def test_a_bad_gradient_of_one_rank_touches_no_share_of_any(run_train, optimizer):
    flags = (f"--optimizer={optimizer}", "--ema_decay=0.9", SHARD, "--max_steps=5")
    source = """
def wrap(inner):
    def forward_backward(model, run, *rest):
        loss = inner(model, run, *rest)
        bad = run.state["step"] == 3
        if bad and rank == 1:
            train.ranks.local(list(run.model.parameters())[-1].grad)[0, 0] = float("inf")
        kept = [*weights_and_moments(run), *run.ema.values()]
        held = [train.ranks.local(t).clone() for t in kept]
        run.held = held if bad else None
        return loss
    return forward_backward
train.forward_backward = wrap(train.forward_backward)
def wrap(inner):
    def train_step(model, run, *rest):
        result = inner(model, run, *rest)
        if run.held:
            now = [train.ranks.local(t) for t in (*weights_and_moments(run), *run.ema.values())]
            same = all(torch.equal(a, b) for a, b in zip(run.held, now, strict=True))
            os.write(1, f"SAME {rank} {same}\\n".encode())  # at once: two ranks write here
        return result
    return train_step
train.train_step = wrap(train.train_step)
"""
    done = run_train("run", *flags, before=ranks(2, source))
    assert codes(done) == "0 0", done.stderr
    found = sorted(line for line in done.stdout.splitlines() if "SAME" in line)
    assert found == ["SAME 0 True", "SAME 1 True"]
    assert [row["skipped"] for row in done.rows("train")] == [0, 0, 0, 1, 0]


def test_each_rank_holds_its_share_of_the_memory_and_no_more(run_train):
    source = """
def wrap(inner):
    def train_step(model, run, *rest):
        result = inner(model, run, *rest)
        weights = list(run.model.parameters())
        moments = weights_and_moments(run)[len(weights) :]
        kinds = {"weights": weights, "gradients": [w.grad for w in weights], "moments": moments}
        held = [sum(train.ranks.local(t).nbytes for t in kind) for kind in kinds.values()]
        os.write(1, f"HELD {rank} {held}\\n".encode())
        return result
    return train_step
train.train_step = wrap(train.train_step)
"""
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

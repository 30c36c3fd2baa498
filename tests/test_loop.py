"""What one update computes, and what the loop around it promises: counts, rows, early stopping."""

import copy
import dataclasses
import hashlib
import json
import math
import random
import re

import numpy as np
import pytest
import torch
from conftest import REPO, TINY, WINDOWS, arguments, codes, digest, events, read_rows, tree
from helpers import batch, build_run, distance, gradient, moving_run, python, update
from sources import around, only_on, ranks, stop_at

import train
from plumbing.data import OrderedWindows
from plumbing.out_of_memory import out_of_memory
from plumbing.snapshot import rng_state, set_rng_state

STEPS = 12
TRAIN = (
    "step loss lr grad_norm skipped step_ms data_ms tokens_per_sec mfu mem_gb gpu_util tokens epoch"
)
EVAL = "step val_loss val_bpb val_accuracy best_val_loss"


# ---- one update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [8, 5])  # of 5, the last one has 2 sequences
def test_micro_batches_make_the_update_of_the_whole_batch(knobs, micro_batch):
    whole = build_run()
    parts = build_run()
    parts.state["micro_batch"] = micro_batch
    mean = whole.model(*batch()).item()
    expected = update(whole)
    assert expected["loss"] == pytest.approx(mean, rel=1e-6)
    assert update(parts) == pytest.approx(expected, rel=1e-6)
    assert distance(gradient(parts), gradient(whole)) < 1e-6

    # control: without the division by their number the gradient is four times as large
    undivided = build_run(accum=4)
    inner = train.forward_backward
    divided = lambda *args: inner(*args[:-1], args[-1] // 4)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "forward_backward", divided)
        assert update(undivided)["loss"] > 3.9 * expected["loss"]
    assert distance(gradient(undivided), gradient(whole)) > 1


@pytest.mark.parametrize(
    "grad_clip, clipped",
    [(1.0, [0.436, 0.873, 0.218]), (0.0, [100, 200, 50]), (300.0, [100, 200, 50])],
    ids=["clipped", "off", "below the limit"],
)
def test_clipping_of_100_200_50(knobs, grad_clip, clipped):
    """Of a model whose gradient is known. The norm on record is that before clipping."""
    knobs(grad_clip=grad_clip, batch_size=1)

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ParameterList([torch.zeros(1), torch.zeros(2)])

        def forward(self, inputs, targets):
            return (torch.cat([*self.parts]) * torch.tensor([100.0, 200.0, 50.0])).sum()

    run = build_run(rows=1)
    run.model = model = Three()
    run.optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, fused=True)]
    numbers = update(run, *batch(1), lr=1.0)
    assert (numbers["loss"], numbers["skipped"]) == (0, 0)
    assert numbers["grad_norm"] == pytest.approx(229.13, abs=0.005)
    gradients = torch.cat([part.grad for part in model.parts])
    assert [round(g, 3) for g in gradients.tolist()] == clipped
    assert torch.allclose(torch.cat([*model.parts]), -gradients)


def test_float16_gradients_are_unscaled_before_they_are_clipped(knobs):
    knobs(grad_clip=0.0)
    exact = build_run()
    expected = update(exact)
    knobs(dtype="float16")
    half = build_run()
    half.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    assert update(half) == pytest.approx(expected | {"loss_scale": 1024}, rel=0.01)
    assert distance(gradient(half), gradient(exact)) < 0.02
    assert half.scaler.get_scale() == 2048  # updated: one good step in a row doubles it


def test_a_scale_that_overflows_is_skipped_and_halved(knobs):
    knobs(dtype="float16")
    run = build_run()
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = digest(run.model.state_dict())
    assert update(run)["skipped"] == 1
    assert digest(run.model.state_dict()) == before
    assert run.scaler.get_scale() == 2.0**39


def test_the_average_follows_its_formula(knobs):
    knobs(ema_decay=0.9)
    run = build_run(ema=True)
    average = {name: value.clone() for name, value in run.ema.items()}
    for seed in range(3):
        update(run, *batch(seed=seed))
        for name, weight in run.model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * weight.detach()
    for name, value in run.ema.items():
        assert torch.allclose(value, average[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(value, run.model.get_parameter(name))


@pytest.mark.parametrize("when", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon", "by hand"])
def test_an_update_that_is_not_finite_leaves_everything_as_it_was(knobs, optimizer, bad, when):
    """Weights, buffers, moments, average; and the next updates are those of a spared run."""
    knobs(ema_decay=0.9)
    run = moving_run(optimizer)
    for seed in range(when):
        update(run, *batch(seed=seed))
    spared = copy.deepcopy(run)
    before = digest([run.model.state_dict(), run.ema])
    rng = torch.get_rng_state()
    if bad == "loss":
        poisoned = lambda x, y: run.model(x, y) * math.nan  # noqa: E731
        numbers = train.train_step(poisoned, run, *batch(), 1e-3)
    else:
        poison = run.model.gpt.head.weight.register_hook(lambda gradient: gradient * math.inf)
        numbers = update(run)
        poison.remove()
    assert numbers["skipped"] == 1 and not math.isfinite(numbers["grad_norm"])
    assert math.isnan(numbers["loss"]) == (bad == "loss")
    assert digest([run.model.state_dict(), run.ema]) == before
    ends = []
    for each in (run, spared):
        torch.set_rng_state(rng)
        for seed in range(5, 8):
            update(each, *batch(seed=seed))
        moments = [optimizer.state_dict()["state"] for optimizer in each.optimizers]
        ends.append(digest([each.model.state_dict(), moments, each.ema]))
    assert ends[0] == ends[1] != before


def test_the_gradient_of_a_weight_that_no_optimizer_has_is_zeroed_too(knobs):
    knobs(grad_clip=0.0)
    run = moving_run("adamw")  # the optimizer has the weights of the GPT in it
    poisoned = lambda x, y: run.model(x, y) * math.nan  # noqa: E731
    assert train.train_step(poisoned, run, *batch(), 1e-3)["skipped"] == 1
    for _ in range(2):
        assert update(run)["skipped"] == 0
    assert run.model.norm.bias.grad.item() == pytest.approx(1.0)  # of one step, not of two


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon"])
def test_the_learning_rate_reaches_every_weight(knobs, optimizer):
    run = build_run(optimizer)
    before = [weight.detach().clone() for weight in run.model.parameters()]
    assert update(run, lr=0.0)["skipped"] == 0
    assert all(map(torch.equal, run.model.parameters(), before))
    update(run, lr=1e-2)
    for weight, old in zip(run.model.parameters(), before, strict=True):
        assert not torch.equal(weight, old)


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.fixture
def val(tmp_path):
    """(tokens, validation data): 200 tokens in windows of 16."""
    ids = torch.randint(65, (200,), generator=torch.Generator().manual_seed(3))
    ids.to(torch.uint16).numpy().tofile(tmp_path / "val.bin")
    return ids, OrderedWindows(np.memmap(tmp_path / "val.bin", "uint16", "r"), 16)


def evaluate(run, val, micro_batch=5):
    run.val_data = val[1]
    run.state["micro_batch"] = micro_batch
    return train.evaluate(run)


def test_evaluation_is_the_mean_over_every_token_of_the_split(knobs, val):
    knobs(label_smoothing=0.5)
    run = build_run(dropout=0.5, label_smoothing=0.5)
    ids, _ = val
    run.model.eval()
    nats = []
    right = 0
    for position in range(1, 200):
        first = (position - 1) // 16 * 16  # window of this token; the last one begins earlier
        first = min(first, 200 - 1 - 16)
        with torch.no_grad():
            logits = run.model(ids[None, first:position])[0, -1]
        nats.append(-logits.log_softmax(-1)[ids[position]].item())
        right += (logits.argmax() == ids[position]).item()
    run.model.train()
    found = evaluate(run, val)
    assert found["val_loss"] == pytest.approx(sum(nats) / 199, rel=1e-5)
    assert found["val_accuracy"] == pytest.approx(right / 199, rel=1e-6)
    assert found["val_tokens"] == 199
    assert run.model.training


def test_the_average_is_what_is_evaluated_where_there_is_one(knobs, val):
    knobs(ema_decay=0.9)
    run = build_run(ema=True)
    for seed in range(5):
        update(run, *batch(seed=seed), lr=1e-2)
    averaged = evaluate(run, val)
    raw = evaluate(dataclasses.replace(run, ema={}), val)
    run.model.load_state_dict(run.ema, strict=False)
    run.ema = {}
    assert averaged == evaluate(run, val) != raw


SETS = """
first, few = val_data.tokens, val_data.tokens[:40]
sets = {{"all": val_data, {name!r}: type(val_data)(few, val_data.block_size)}}
"""


def test_several_validation_sets_are_logged_each_and_as_their_mean(run_train, data_dir):
    open_sets = "train_data, val_data, about = result" + SETS + "result = train_data, sets, about"
    of_sets = around("open_dataset", then=open_sets.format(name="few"))
    done, single = run_train("sets", before=of_sets), run_train("one")
    for row, alone in zip(done.rows("eval"), single.rows("eval"), strict=True):
        for name in ("val_loss", "val_accuracy"):
            assert row[name] == (row[f"{name}_all"] + row[f"{name}_few"]) / 2
            assert row[f"{name}_all"] == alone[name] != row[f"{name}_few"]
    assert done.fingerprint(STEPS)["model"] == single.fingerprint(STEPS)["model"]
    twice = around("open_dataset", then=open_sets.format(name="loss"))
    more = around("evaluate", then="if 'val_loss' in result: result['val_loss_all'] = 1.0")
    refused = run_train("twice", before=more + twice, code=1)
    assert "evaluate() gives 'val_loss_all' twice; rename a validation set" in refused.stderr


# ---- the learning rate ---------------------------------------------------------------------------


def test_warmup_and_cosine_of_gpt2(knobs):
    knobs(peak_lr=6e-4, min_lr=6e-5, warmup_steps=715, max_steps=143_000)
    assert train.lr_at(0) == pytest.approx(6e-4 / 715)
    assert train.lr_at(356) == pytest.approx(6e-4 * 357 / 715)
    assert train.lr_at(714) == train.lr_at(715) == pytest.approx(6e-4)
    middle = 715 + (143_000 - 715) / 2
    assert train.lr_at(middle) == pytest.approx((6e-4 + 6e-5) / 2)
    assert train.lr_at(143_000) == train.lr_at(10**9) == 6e-5


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("linear", lambda step: 1 - 0.9 * (step - 20) / 80 if step < 100 else 0.1),
        ("constant", lambda step: 1.0),
        ("step", lambda step: max(0.1, 0.5 ** ((step - 20) // 30))),
        ("wsd", lambda step: min(1.0, max(0.1, 1 - 0.9 * (step - 75) / 25))),
    ],
)
def test_schedules_follow_their_formula(knobs, schedule, expected):
    knobs(schedule=schedule, peak_lr=1.0, min_lr=0.1, warmup_steps=20, max_steps=100)
    knobs(step_size=30, gamma=0.5, cooldown_steps=25)
    for step in range(20):
        assert train.lr_at(step) == pytest.approx((step + 1) / 20)
    for step in range(20, 300):
        assert train.lr_at(step) == pytest.approx(expected(step)), step
    knobs(cooldown_steps=0)  # wsd: a fifth of the steps
    assert schedule != "wsd" or train.lr_at(90) == pytest.approx(0.55)


def test_onecycle_is_that_of_torch(knobs):
    total, warmup, peak, low = 100, 30, 0.1, 1e-5
    knobs(schedule="onecycle", peak_lr=peak, min_lr=low, warmup_steps=warmup, max_steps=total)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=peak,
        total_steps=total + 1,
        pct_start=(warmup + 1) / (total + 1),
        final_div_factor=peak / 25 / low,
        cycle_momentum=False,
    )
    for step in range(total + 1):
        assert train.lr_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
        if step < total:
            optimizer.step()
            reference.step()


def test_each_step_is_taken_at_its_own_rate(run_train, knobs):
    done = run_train("run", "--warmup_steps=4", "--schedule=linear")
    knobs(warmup_steps=4, schedule="linear", max_steps=STEPS)
    assert [row["lr"] for row in done.rows("train")] == [train.lr_at(n) for n in range(STEPS)]
    assert train.lr_at(0) == train.peak_lr / 4 and train.lr_at(3) == train.peak_lr


# random numbers in an evaluation, as a fork may draw
DRAWS = around("sum_losses", "train.torch.rand(1)")


@pytest.fixture
def plain(once):
    return once("--dropout=0.1", before=DRAWS)


@pytest.mark.parametrize(
    "flags",
    [
        ["--eval_interval=1"],
        ["--log_interval=1", "--num_workers=2"],
        ["--save_interval=1", "--sample_interval=1"],
        ["--save_interval=2", "--keep_last=1", "--milestone_interval=5"],
        ["--eval_interval=3", "--log_interval=2", "--num_workers=1", "--save_interval=4"],
    ],
    ids=" ".join,
)
def test_looking_does_not_disturb_training(run_train, plain, flags):
    done = run_train("run", "--dropout=0.1", *flags, before=DRAWS)
    ours, expected = done.fingerprint(STEPS), plain.fingerprint(STEPS)
    looks = "eval_interval" in " ".join(flags)
    for part in ("model", "optimizer", "rng") + (() if looks else ("state",)):
        assert ours[part] == expected[part], part
    for key in ("loss", "lr", "grad_norm"):
        rows = [[row[key] for row in run.rows("train")] for run in (done, plain)]
        assert rows[0] == rows[1]


# ---- counts, rows, ends --------------------------------------------------------------------------


def test_the_rows_of_a_run_are_those_of_the_contract(run_train, data_dir):
    meta = json.loads((data_dir / "small" / "meta.json").read_text())
    done = run_train("run", "--eval_interval=5", "--ema_decay=0.5")
    rows = done.rows()
    assert {row["kind"] for row in rows} == {"train", "eval", "event"}
    assert [row["step"] for row in done.rows("train")] == list(range(1, STEPS + 1))
    assert [row["step"] for row in done.rows("eval")] == [0, 5, 10, STEPS]
    for row in done.rows("train"):
        assert set(row) == {"kind", *TRAIN.split(), "sequences"}
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["epoch"] == pytest.approx(row["step"] * 8 / WINDOWS)
        assert row["sequences"] == row["step"] * 8 and row["skipped"] == 0
        assert row["gpu_util"] is None and 0.05 < row["mem_gb"] < 64
        assert row["mfu"] is None or 0 < row["mfu"] < 1  # None: the machine was busy at the start
        assert row["data_ms"] >= 0 and row["step_ms"] > 0
        assert row["tokens_per_sec"] == pytest.approx(128_000 / row["step_ms"])
    waited, taken = (sum(r[key] for r in done.rows("train")) for key in ("data_ms", "step_ms"))
    assert waited < taken < 1000 * 100  # step_ms is a mean: one step may wait for longer
    best = math.inf
    for row in done.rows("eval"):
        assert set(row) == {"kind", *EVAL.split()}
        assert 0 <= row["val_accuracy"] <= 1
        best = min(best, row["val_loss"])
        assert row["best_val_loss"] == best
        bits = row["val_loss"] / math.log(2) * meta["val_tokens"]
        assert row["val_bpb"] == pytest.approx(bits / meta["val_bytes"])
    for row in done.rows("event"):
        assert {"kind", "step", "event"} <= set(row)
    assert done.rows("event")[-1]["event"] == "end"


def test_the_time_of_a_step_has_neither_evaluations_nor_saves_in_it(run_train):
    wait = "time.sleep(0.2)"
    slow = around("evaluate", wait) + around("checkpoint.Saver.save", wait)
    flags = ("--max_steps=3", "--log_interval=1", "--eval_interval=1", "--save_interval=1")
    done = run_train("run", *flags, before=slow)
    seconds = done.facts["seconds"]
    assert seconds["evaluate"] > 0.6 and seconds["save"] > 0.4
    assert min(row["step_ms"] for row in done.rows("train")) < 200


def test_tokens_counts_the_targets_that_are_trained_on(run_train):
    """Not padding, nor a masked prompt: here every fourth position."""
    done = run_train("run", before=around("train_step", "args[3][:, ::4] = -100"))
    assert [row["tokens"] for row in done.rows("train")] == [96 * n for n in range(1, STEPS + 1)]
    assert torch.load(done.checkpoint(STEPS))["state"]["tokens"] == 96 * STEPS


def test_early_stopping_ends_the_run_and_the_rerun_says_finished(run_train):
    flags = ["--patience=2", "--min_delta=9", "--eval_interval=3", "--log_interval=2"]
    done = run_train("run", *flags)
    assert "stopped early: 2 evaluations without improvement at step 6" in done.stdout
    assert [row["step"] for row in done.rows("eval")] == [0, 3, 6]
    assert done.rows("train")[-1]["step"] == 6 and done.checkpoint(6).exists()
    before = tree(done.out_dir)
    again = run_train("run", *flags)
    assert again.stderr == "" and "finished: 6 steps" in again.stdout
    assert "--out_dir=run_2" in again.stdout and not (done.out_dir.parent / "run_2").exists()
    assert tree(done.out_dir) == before
    on = run_train("run", *flags, "--patience=3")
    assert on.rows("train")[-1]["step"] == 9
    off = run_train("off", *flags, "--patience=0")
    assert off.rows("train")[-1]["step"] == STEPS  # control


def test_milestones_stay_and_of_the_others_the_newest(run_train):
    done = run_train("run", "--save_interval=2", "--milestone_interval=5", "--keep_last=2")
    names = sorted(path.name for path in done.out_dir.glob("*.pt*"))
    assert names == [
        "best.pt",
        "ckpt_00000010.pt",
        "ckpt_00000012.pt",
        "milestone_00000005.pt",
        "milestone_00000010.pt",
    ]
    for name, step in zip(names[1:], (10, 12, 5, 10), strict=True):
        checkpoint = torch.load(done.out_dir / name, weights_only=True)
        assert checkpoint["state"]["step"] == step
        parts = "format model frozen optimizer groups scaler ema state rng config data run"
        assert set(checkpoint) == set(parts.split())
        assert not [key for key in checkpoint["model"] if key.startswith(("_orig_mod", "module"))]


def test_run_json_says_what_ran(run_train):
    done = run_train("run", "--max_steps=3", before=stop_at(2), code=143)
    facts = done.facts
    assert facts["ended"] == "stopped by SIGTERM" and facts["end"] >= facts["start"]
    assert "--max_steps=3" in facts["command"] and facts["config"]["max_steps"] == 3
    assert facts["config"]["decay_steps"] == 3 and facts["config"]["device"] == "cpu"
    code = facts["run"]["code"]
    assert {"train.py", "model.py", "optim.py", "plumbing/checkpoint.py"} <= set(code)
    for name, found in code.items():
        assert hashlib.sha256((REPO / name).read_bytes()).hexdigest().startswith(found)
    assert facts["versions"]["torch"] == torch.__version__  # with the build: 2.13.0+cu130
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["hardware"]["threads"] == torch.get_num_threads()
    assert facts["hardware"]["device"] and facts["data"]["name"] == "small"
    done = run_train("run", "--max_steps=3")
    facts = done.facts
    assert facts["ended"] == "finished"
    assert sum(facts["seconds"].values()) > 0


NOTEBOOK = """
import os, signal, sys
sys.argv = ["/x/ipykernel_launcher.py", "-f", "/tmp/kernel.json"]
import train
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
FIRST CELL
names = [name for name in vars(train) if name.islower() and name != "last_run"]
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
def held():
    with open("/proc/locks") as locks:
        return [f" {os.getpid()} " in line for line in locks].count(True)
def kept():
    return [getattr(train, name) for name in names], list(map(signal.getsignal, numbers)), held()
before = kept()
for cell in range(2):
    print("RETURNED", train.main([]), before == kept())
"""


def test_in_a_notebook_a_run_can_be_started_twice_in_one_process(data_dir, tmp_path):
    """The globals that a cell has set count; ipykernel's argv does not; nothing stays held."""
    knobs = {**TINY, "data_dir": str(data_dir), "out_dir": str(tmp_path / "run"), "max_steps": 5}
    knobs |= {"compile": False, "report": False}
    first = "".join(f"train.{name} = {value!r}\n" for name, value in knobs.items())
    printed = python(NOTEBOOK.replace("FIRST CELL", first))
    assert [row["step"] for row in read_rows(tmp_path / "run", "train")] == [1, 2, 3, 4, 5]
    assert printed.count("RETURNED 0 True") == 2  # knobs, handlers and locks as before
    second = printed.split("RETURNED 0")[1]
    assert "run is finished: 5 steps" in second and "step/total" not in second
    assert "ipykernel" not in printed


# ---- random numbers ------------------------------------------------------------------------------


def draw():
    """Random numbers of every kind. Generators of normal ones keep a second one for later."""
    normal = [random.gauss(0, 1), float(np.random.normal()), torch.randn(1).item()]
    return [random.random(), float(np.random.rand()), torch.rand(1).item(), *normal]


def test_the_state_of_every_generator_survives_a_weights_only_file(tmp_path):
    train.seed_everything(2**32 + 5)
    first = draw()
    torch.save(rng_state(torch.device("cpu")), tmp_path / "rng.pt")
    expected = [draw(), draw()]
    assert expected[0] != expected[1]
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), torch.device("cpu"))
    assert [draw(), draw()] == expected
    train.seed_everything(8)
    assert draw() != first
    train.seed_everything(2**32 + 5)
    assert draw() == first


def test_memory_that_ran_out_is_recognized_by_what_torch_says():
    for words in (  # of torch's allocators
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
        "MPS backend out of memory (MPS allocated: 9.00 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ):
        assert out_of_memory(RuntimeError(words))
    assert not out_of_memory(ValueError("out of memory"))


# ---- torch.compile -------------------------------------------------------------------------------

WORKING = """
torch.compile = lambda model, **options: lambda *batch: model(*batch)
"""


def broken(sent="pass", call=1):
    """Source: the compiler fails in that call of the model, after `sent`."""
    return f"""
from torch._inductor.exc import CppCompileError
def broken(model, **options):
    calls = []
    def call(*batch):
        calls.append(1)
        if len(calls) == {call}:
            {sent}
            raise CppCompileError(["g++"], "it ended")
        return model(*batch)
    return call
torch.compile = broken
"""


def test_a_signal_during_compilation_is_no_failed_compilation(run_train):
    """Ctrl-C reaches the compiler, too, which then fails."""
    ctrl_c = "os.kill(os.getpid(), signal.SIGINT)"
    done = run_train("run", "--compile=true", before=broken(ctrl_c), code=130)
    assert done.facts["ended"] == "stopped by SIGINT" and not done.checkpoint(0).exists()
    assert events(done, "compile_failed") == []
    done = run_train("run", "--compile=true", before=WORKING)
    assert done.facts["config"]["compile"] is True
    assert events(done, "resume") == []  # it had not begun


def test_a_fallback_to_eager_mode_is_logged_and_not_kept(run_train):
    flags = ("--compile=true", "--save_interval=4")
    run_train("run", *flags, before=WORKING + stop_at(3), code=143)
    done = run_train("run", *flags, before=broken() + stop_at(6), code=143)
    assert "compile failed: error" in done.stdout
    (failed,) = events(done, "compile_failed")
    assert failed["error"].endswith("Command: g++ Output: it ended")
    assert done.facts["config"]["compile"] is False
    done = run_train("run", *flags, before=WORKING)  # it tries again
    changes = [event["changed"]["compile"] for event in events(done, "resume")]
    assert changes == [[True, False], [False, True]]


# ---- ranks ---------------------------------------------------------------------------------------


def test_the_rank_that_has_the_cause_prints_it(run_train):
    fails = around("configure_optimizers", "train.fail('the model does not fit into this memory')")
    source = "train.ranks.HANG_MINUTES = 0.2\n" + only_on(1, fails)
    done = run_train("run", before=ranks(2, source), code=None)
    assert codes(done).endswith("2"), done.stderr
    assert done.stderr.count("the model does not fit into this memory") == 1
    assert "another rank" in done.stderr and "Traceback" not in done.stderr


def test_cublas_finds_its_setting_when_train_is_imported(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    source = "import train, os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    assert python(source) == ":4096:8"


# ---- errors in one's own code --------------------------------------------------------------------

UNPACK = """
import train
from model import GPT
class Own(GPT):
    def forward(self, inputs, targets=None):
        rows, columns, channels = inputs.shape  # here
        return super().forward(inputs, targets)
def build_model(*args, inner=train.build_model):
    model = inner(*args)
    model.__class__ = Own
    return model
train.build_model = build_model
"""
OS_ERROR = """
import train
def train_step(model, run, *rest, inner=train.train_step):
    if run.state["step"] == 3:
        open("no/such/file")  # here
    return inner(model, run, *rest)
train.train_step = train_step
"""


ERRORS = {  # where it happens: (source, the last line)
    "forward": (UNPACK, "ValueError: not enough values to unpack (expected 3, got 2)"),
    "train_step": (OS_ERROR, "FileNotFoundError: [Errno 2] No such file or directory: 'no/such/fi"),
}


@pytest.mark.parametrize("where", ERRORS)
def test_an_error_in_own_code_ends_in_its_own_line(where, run_train, tmp_path):
    source, words = ERRORS[where]
    (tmp_path / "own_code.py").write_text(source)
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import own_code"
    done = run_train("run", before=before, code=1)
    number = source.splitlines().index(next(x for x in source.splitlines() if "# here" in x)) + 1
    places = re.findall(r'File "(.*)", line (\d+)', done.stderr)
    assert places[-1] == (str(tmp_path / "own_code.py"), str(number)), done.stderr
    assert done.stderr.splitlines()[-1].startswith(words), done.stderr


# ---- without the command -------------------------------------------------------------------------


@pytest.fixture
def flags(data_dir, tmp_path):
    """flags(out_dir, *more): a list for train.main."""
    return lambda out_dir, *more: arguments(tmp_path / out_dir, data_dir, more)[1:]


def test_a_run_that_is_built_writes_nothing_and_takes_no_lock(flags, run_train, tmp_path):
    with train.build(flags("new")) as run:
        assert run.state["step"] == 0
    assert not (tmp_path / "new").exists()

    run_train("run", before=stop_at(6), code=143)
    before = tree(tmp_path / "run")
    with train.build(flags("run")) as run:
        assert run.state["step"] == 6 and train.n_embd == 32
        assert tree(tmp_path / "run") == before
        run_train("run")
    assert train.n_embd == 128, "the knobs held inside"


def test_a_bad_value_in_the_middle_of_a_sweep_can_be_caught(flags):
    with pytest.raises(Exception, match="--peak_lr=nan: expected float"):
        train.main(flags("run", "--peak_lr=nan"))
    assert train.main(flags("run", "--max_steps=3", "--log_interval=0")) == 0
    assert train.last_run.state["step"] == 3 and train.peak_lr == 1e-3

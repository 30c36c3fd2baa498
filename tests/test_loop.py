"""What one update computes, and what the loop around it promises: counts, rows, early stopping."""

import copy
import json
import math
import re

import pytest
import torch
from conftest import HONEST_DATA, digest, stop_at, tree

import machine
import train
from model import GPT, GPTConfig, configure_optimizers

STEPS = 12
DEVICE = torch.device("cpu")
TRAIN = (
    "step loss lr grad_norm skipped step_ms data_ms tokens_per_sec mfu mem_gb gpu_util tokens epoch"
)
EVAL = "step val_loss val_bpb val_accuracy best_val_loss"
needs_float16 = pytest.mark.skipif(
    "avx512_fp16" not in machine.cpu_info()[1], reason="this CPU does not compute in float16"
)


@pytest.fixture
def knobs(monkeypatch):
    """knobs(name=value, ...) sets config globals of train.py for this test."""

    def set_knobs(**values):
        for name, value in values.items():
            assert name in vars(train)
            monkeypatch.setattr(train, name, value)

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    set_knobs(dtype="float32", max_steps=100, warmup_steps=0, decay_steps=0)
    return set_knobs


def build_run(optimizer="adamw", rows=32, accum=1, ema=False, folder=None, **shape):
    """A run before its first step, on a model in which every path is open."""
    torch.manual_seed(0)
    shape = {"vocab_size": 65, "block_size": 16, "n_head": 2, "n_embd": 32} | shape
    model = GPT(GPTConfig(**shape))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return train.Run(
        folder=folder,
        model=model,
        optimizers=configure_optimizers(model, optimizer, 1e-3, 0.1, 0.9, 0.95, 0.95, "cpu"),
        scaler=torch.amp.GradScaler("cpu", enabled=train.dtype == "float16"),
        ema={n: w.detach().clone() for n, w in model.named_parameters()} if ema else {},
        state=train.FRESH_STATE | {"batch_size": rows // accum, "accum_steps": accum},
    )


def batch(rows=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(65, (rows, 17), generator=generator)
    return window[:, :-1].clone(), window[:, 1:].clone()


def gradient(run):
    return torch.cat([weight.grad.flatten() for weight in run.model.parameters()])


def moments(run):
    return [optimizer.state_dict()["state"] for optimizer in run.optimizers]


def update(run, tokens=None, targets=None, lr=1e-3):
    if tokens is None:
        tokens, targets = batch()
    return train.train_step(run.model, run, tokens, targets, lr)


# ---- one update ----------------------------------------------------------------------------------


def test_four_micro_batches_of_8_make_the_update_of_one_of_32(knobs, monkeypatch):
    whole, parts = build_run(accum=1), build_run(accum=4)
    reports = [update(run) for run in (whole, parts)]
    assert (whole.state["batch_size"], parts.state["batch_size"]) == (32, 8)

    def difference():
        return ((gradient(parts) - gradient(whole)).norm() / gradient(whole).norm()).item()

    assert difference() < 1e-6
    assert torch.allclose(reports[0], reports[1], rtol=1e-6)

    undivided = build_run(
        accum=4
    )  # control: without the division the gradient is four times as large
    undivided.state["accum_steps"] = 1
    parts, report = undivided, update(undivided)
    assert difference() > 1 and report[0] > 3.9 * reports[0][0]


def test_the_reported_loss_is_the_mean_over_the_global_batch(knobs):
    run = build_run(accum=4)
    tokens, targets = batch()
    expected = run.model(tokens, targets)[1].item()
    assert update(run)[0].item() == pytest.approx(expected, rel=1e-6)


def test_the_norm_is_that_before_clipping_and_clipping_keeps_the_direction(knobs):
    knobs(grad_clip=0.0)
    free = build_run()
    norm = update(free)[1].item()
    assert norm == pytest.approx(gradient(free).norm().item(), rel=1e-6)
    knobs(grad_clip=norm / 10)
    clipped = build_run()
    assert update(clipped)[1].item() == pytest.approx(norm, rel=1e-6)
    assert torch.allclose(gradient(clipped), gradient(free) / 10, rtol=1e-4, atol=1e-9)
    knobs(grad_clip=norm * 2)
    loose = build_run()
    update(loose)
    assert torch.equal(gradient(loose), gradient(free))


def test_clipping_of_100_200_50_at_norm_1(knobs):
    """The step's own clipping, on a model whose gradient is known."""
    knobs(grad_clip=1.0)

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3))

        def forward(self, tokens, targets):
            return None, (self.w * torch.tensor([100.0, 200.0, 50.0])).sum()

    model = Three()
    run = build_run(rows=1)
    run.model, run.optimizers = model, [torch.optim.SGD(model.parameters(), lr=1.0, fused=True)]
    loss, norm, skipped = train.train_step(model, run, *batch(1), 1.0).tolist()
    assert (loss, skipped) == (0, 0) and norm == pytest.approx(229.13, abs=0.005)
    assert [round(g, 3) for g in model.w.grad.tolist()] == [0.436, 0.873, 0.218]
    assert torch.allclose(model.w, -model.w.grad)


@needs_float16
def test_float16_gradients_are_unscaled_before_they_are_clipped(knobs):
    knobs(grad_clip=0.0)
    exact = build_run()
    exact_report = update(exact)
    knobs(dtype="float16")
    half = build_run()
    half.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    report = update(half)
    assert torch.allclose(report[:2], exact_report[:2], rtol=0.01)
    assert (gradient(half) - gradient(exact)).norm() / gradient(exact).norm() < 0.02
    assert half.scaler.get_scale() == 2048  # updated: one good step in a row doubles it


@needs_float16
def test_a_scale_that_overflows_is_skipped_and_halved(knobs):
    knobs(dtype="float16")
    run = build_run()
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = digest(run.model.state_dict())
    assert update(run)[2] == 1
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
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon"])
def test_an_update_that_is_not_finite_leaves_everything_as_it_was(knobs, optimizer, bad, when):
    """Weights, moments and average; and the updates after it are those of a run that never saw it."""
    knobs(ema_decay=0.9)
    run = build_run(optimizer, ema=True)
    for seed in range(when):
        update(run, *batch(seed=seed))
    spared = copy.deepcopy(run)
    before = [digest(part) for part in (run.model.state_dict(), run.ema)]
    if bad == "loss":
        poisoned = lambda x, y: (None, run.model(x, y)[1] * math.nan)  # noqa: E731
        report = train.train_step(poisoned, run, *batch(), 1e-3)
    else:
        poison = run.model.head.weight.register_hook(lambda gradient: gradient * math.inf)
        report = update(run)
        poison.remove()
    loss, norm, skipped = report.tolist()
    assert skipped == 1 and not math.isfinite(norm) and math.isnan(loss) == (bad == "loss")
    assert [digest(part) for part in (run.model.state_dict(), run.ema)] == before
    for seed in range(5, 8):
        update(run, *batch(seed=seed))
        update(spared, *batch(seed=seed))
    assert digest(run.model.state_dict()) == digest(spared.model.state_dict())
    assert digest(moments(run)) == digest(moments(spared))
    assert digest(run.ema) == digest(spared.ema)
    assert digest(run.model.state_dict()) != before[0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon"])
def test_the_learning_rate_reaches_every_weight(knobs, optimizer):
    run = build_run(optimizer)
    before = [weight.detach().clone() for weight in run.model.parameters()]
    assert update(run, lr=0.0)[2] == 0
    assert all(map(torch.equal, run.model.parameters(), before))
    update(run, lr=1e-2)
    for weight, old in zip(run.model.parameters(), before, strict=True):
        assert not torch.equal(weight, old)


@pytest.mark.parametrize("micro, most", [(8, 8), (7, 7), (12, 11), (12, 5), (1, 4)])
def test_rows_split_into_the_largest_micro_batch_that_divides_them(micro, most):
    size, count = train.split_rows(micro, most)
    assert size * count == micro and size <= most
    assert not [n for n in range(size + 1, most + 1) if micro % n == 0 and n <= micro]


# ---- evaluation ----------------------------------------------------------------------------------


def split_of(tmp_path, tokens=200, batch_rows=5):
    ids = torch.randint(65, (tokens,), generator=torch.Generator().manual_seed(3))
    ids.to(torch.uint16).numpy().tofile(tmp_path / "val.bin")
    path = str(tmp_path / "val.bin")
    return ids, train.Batches(path, "uint16", 16, batch_rows, range(batch_rows))


def test_evaluation_is_the_mean_over_every_token_of_the_split(knobs, tmp_path):
    run = build_run(dropout=0.5, label_smoothing=0.5)
    ids, split = split_of(tmp_path)
    run.model.eval()
    nats, right = [], 0
    for position in range(1, 200):
        first = (position - 1) // 16 * 16  # window of this token; the last one begins earlier
        first = min(first, 200 - 1 - 16)
        with torch.no_grad():
            logits, _ = run.model(ids[None, first:position])
        nats.append(-logits[0, -1].log_softmax(-1)[ids[position]].item())
        right += (logits[0, -1].argmax() == ids[position]).item()
    run.model.train()
    loss, accuracy = train.evaluate(run, split, DEVICE)
    assert loss == pytest.approx(sum(nats) / 199, rel=1e-5) and accuracy == right / 199
    assert run.model.training


def test_evaluation_draws_no_random_number_and_smooths_no_label(knobs, tmp_path):
    _, split = split_of(tmp_path)
    rng = torch.get_rng_state()
    plain = train.evaluate(build_run(), split, DEVICE)
    torch.set_rng_state(rng)
    run = build_run(dropout=0.5, label_smoothing=0.5)
    rng = torch.get_rng_state()
    assert train.evaluate(run, split, DEVICE) == plain
    assert torch.equal(torch.get_rng_state(), rng)
    assert update(run)[0] != update(build_run())[0]  # control: in training they are on


@pytest.mark.parametrize("batch_rows", [1, 4, 13])
def test_evaluation_does_not_depend_on_how_it_is_cut(knobs, tmp_path, batch_rows):
    run = build_run()
    expected = train.evaluate(run, split_of(tmp_path, batch_rows=5)[1], DEVICE)
    loss, accuracy = train.evaluate(run, split_of(tmp_path, batch_rows=batch_rows)[1], DEVICE)
    assert loss == pytest.approx(expected[0], rel=1e-6) and accuracy == expected[1]


def test_the_average_is_what_is_evaluated_where_there_is_one(knobs, tmp_path):
    knobs(ema_decay=0.9)
    run, (_, split) = build_run(ema=True), split_of(tmp_path)
    for seed in range(5):
        update(run, *batch(seed=seed), lr=1e-2)
    averaged = train.evaluate(run, split, DEVICE)
    raw = train.evaluate(train.Run(**vars(run) | {"ema": {}}), split, DEVICE)
    run.model.load_state_dict(run.ema, strict=False)
    run.ema = {}
    assert averaged == train.evaluate(run, split, DEVICE) != raw


# ---- the learning rate ---------------------------------------------------------------------------


def test_cosine_has_the_reference_values(knobs):
    knobs(peak_lr=0.1, min_lr=0.01, max_steps=100)
    lr = [round(train.lr_at(step), 3) for step in (0, 25, 50, 75, 100)]
    assert lr == [0.100, 0.087, 0.055, 0.023, 0.010]


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
        (
            "cosine",
            lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, (step - 20) / 80))),
        ),
    ],
)
def test_schedules_follow_their_formula(knobs, schedule, expected):
    knobs(schedule=schedule, peak_lr=1.0, min_lr=0.1, warmup_steps=20, max_steps=100)
    knobs(step_size=30, gamma=0.5, cooldown_steps=25)
    for step in range(20):
        assert train.lr_at(step) == pytest.approx((step + 1) / 20)
    for step in range(20, 300):
        assert train.lr_at(step) == pytest.approx(expected(step)), step


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


def test_wsd_descends_over_a_fifth_where_nothing_is_said(knobs):
    knobs(schedule="wsd", peak_lr=1.0, min_lr=0.0, warmup_steps=10, max_steps=1000)
    assert {train.lr_at(step) for step in range(10, 801)} == {1.0}
    assert train.lr_at(900) == pytest.approx(0.5) and train.lr_at(1000) == 0


@pytest.mark.parametrize("schedule", "cosine linear constant step onecycle wsd".split())
@pytest.mark.parametrize("warmup_steps", [0, 1, 50, 100])
def test_no_schedule_leaves_its_bounds(knobs, schedule, warmup_steps):
    knobs(schedule=schedule, peak_lr=1.0, min_lr=0.01, warmup_steps=warmup_steps, max_steps=100)
    rates = [train.lr_at(step) for step in range(200)]
    assert all(0 < rate <= 1 for rate in rates) and max(rates) > 0.999
    if schedule not in ("constant", "step"):
        assert rates[100:] == [0.01] * 100
    knobs(decay_steps=30)  # shorter than a warmup may be
    assert all(0 < train.lr_at(step) <= 1 for step in range(200))


# ---- looking changes nothing ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(train_in, tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("plain"), "run", "--dropout=0.1")


@pytest.mark.parametrize(
    "flags",
    [
        ["--eval_interval=1"],
        ["--log_interval=1"],
        ["--log_interval=100"],
        ["--num_workers=2"],
        ["--num_workers=1", "--prefetch_factor=7"],
        ["--save_interval=1"],
        ["--save_minutes=0.0001", "--keep_last=1"],
        ["--milestone_interval=5"],
        ["--sample_interval=1"],
        ["--eval_interval=3", "--log_interval=2", "--num_workers=1", "--save_interval=4"],
    ],
    ids=" ".join,
)
def test_looking_does_not_disturb_training(run_train, plain, flags):
    done = run_train("run", "--dropout=0.1", *flags)
    assert done.returncode == 0, done.stderr
    ours, expected = done.fingerprint(STEPS), plain.fingerprint(STEPS)
    looks = "eval_interval" in " ".join(flags)
    for part in ("model", "optimizer", "rng") + (() if looks else ("state",)):
        assert ours[part] == expected[part], part
    for key in ("loss", "lr", "grad_norm"):
        rows = [[row[key] for row in run.rows("train")] for run in (done, plain)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("flag", ["--seed=1338", "--dropout=0.2", "--batch_size=9", "--beta2=0.9"])
def test_what_belongs_to_training_does_show(run_train, plain, flag):
    ours = run_train("run", "--dropout=0.1", flag).fingerprint(STEPS)
    assert ours["model"] != plain.fingerprint(STEPS)["model"]


def test_the_same_command_twice_gives_the_same_bits(run_train, python_train, plain):
    assert run_train("run", "--dropout=0.1").fingerprint(STEPS) == plain.fingerprint(STEPS)
    real = python_train("real", "--dropout=0.1")  # and so does a process that is not forked
    assert real.fingerprint(STEPS) == plain.fingerprint(STEPS)


# ---- counts, rows, ends --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_max_steps_is_the_exact_number_of_updates(run_train, steps):
    """Also where nothing is due at the last step: log_interval is 5, eval and save intervals are 0."""
    count = """
def train_step(*arguments, inner=train.train_step, calls=[]):
    calls.append(1)
    print("UPDATE", len(calls))
    return inner(*arguments)
train.train_step = train_step
"""
    done = run_train("run", f"--max_steps={steps}", before=count)
    assert done.returncode == 0, done.stderr
    assert [int(n) for n in re.findall(r"UPDATE (\d+)", done.stdout)] == [*range(1, steps + 1)]
    assert [row["step"] for row in done.rows("train")] == list(range(1, steps + 1))
    assert [row["step"] for row in done.rows("eval")] == [0, steps]
    checkpoint = torch.load(done.checkpoint(steps), weights_only=True)
    assert checkpoint["state"]["step"] == steps
    counters = {int(s["step"]) for s in checkpoint["optimizer"][0]["state"].values()}
    assert counters == {steps}


def test_the_rows_of_a_run_are_those_of_the_contract(run_train, data_dir):
    meta = json.loads((data_dir / "small" / "meta.json").read_text())
    done = run_train("run", "--eval_interval=5", "--ema_decay=0.5")
    rows = done.rows()
    assert {row["kind"] for row in rows} == {"train", "eval", "event"}
    assert [row["step"] for row in done.rows("train")] == list(range(1, STEPS + 1))
    assert [row["step"] for row in done.rows("eval")] == [0, 5, 10, STEPS]
    for row in done.rows("train"):
        assert set(row) == {"kind", *TRAIN.split(), "batch_index"}
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["epoch"] == pytest.approx(row["step"] * 8 / 167)
        assert row["batch_index"] == row["step"] - 1 and row["skipped"] == 0
        assert row["gpu_util"] is None and 0 < row["mfu"] < 1 and 0.05 < row["mem_gb"] < 64
        assert 0 <= row["data_ms"] < row["step_ms"] < 10_000
        assert row["tokens_per_sec"] == pytest.approx(128_000 / row["step_ms"])
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


def test_a_number_that_is_not_finite_is_null_in_the_record(run_train):
    poison = """
def forward_backward(model, run, *rest, inner=train.forward_backward):
    loss = inner(model, run, *rest)
    return loss * float("nan") if run.state["step"] in (3, 4) else loss
train.forward_backward = forward_backward
"""
    done = run_train("run", before=poison)
    assert done.returncode == 0, done.stderr
    rows = done.rows("train")  # read strictly: NaN is no JSON
    bad = [row for row in rows if "finite" in row]
    assert [row["step"] for row in bad] == [4, 5]
    assert all(row["loss"] is None and row["finite"] is False for row in bad)
    assert [row["step"] for row in rows if row["skipped"]] == [4, 5]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_the_first_loss_is_ln_of_the_vocabulary(run_train, data_dir):
    vocabulary = json.loads((data_dir / "small" / "meta.json").read_text())["vocab_size"]
    done = run_train("run")
    (first, last) = done.rows("eval")
    assert first["val_loss"] == pytest.approx(math.log(vocabulary), rel=0.01)
    assert last["val_loss"] < first["val_loss"]
    assert done.rows("train")[0]["loss"] == pytest.approx(math.log(vocabulary), rel=0.02)


@pytest.mark.skipif(
    not (HONEST_DATA / "tinyshakespeare" / "input.txt").is_file(),
    reason="HONEST_DATA names no folder with tinyshakespeare/input.txt",
)
def test_the_reference_values_of_shakespeare(run_train, tmp_path):
    from prepare_data import prepare

    text = HONEST_DATA / "tinyshakespeare" / "input.txt"
    _, meta = prepare("shakespeare", tmp_path / "data", input=str(text), say=lambda *words: None)
    assert (meta["vocab_size"], meta["train_tokens"], meta["val_tokens"]) == (65, 1003854, 111540)
    flags = ["--dataset=shakespeare", f"--data_dir={tmp_path}/data", "--block_size=64"]
    done = run_train("run", *flags, "--n_embd=64", "--batch_size=64", "--max_steps=30")
    first, last = done.rows("eval")
    assert first["val_loss"] == pytest.approx(4.174, rel=0.01)
    assert last["val_loss"] < 3.5
    assert done.rows("train")[0]["epoch"] == pytest.approx(64 / (1_003_854 // 64 - 1), rel=1e-3)


def test_the_best_checkpoint_is_that_of_the_best_evaluation(run_train):
    """The rate is so high that the loss gets worse in the end."""
    done = run_train(
        "run",
        "--eval_interval=2",
        "--peak_lr=10",
        "--min_lr=10",
        "--grad_clip=0",
        "--warmup_steps=6",
    )
    assert done.returncode == 0, done.stderr
    rows = done.rows("eval")
    best = min(rows, key=lambda row: row["val_loss"])
    assert best != rows[-1]
    state = torch.load(done.out_dir / "best.pt", weights_only=True)["state"]
    assert state["step"] == best["step"] == state["best_step"]
    assert state["best_val_loss"] == best["val_loss"] == rows[-1]["best_val_loss"]


def test_early_stopping_ends_the_run_and_the_rerun_says_finished(run_train):
    flags = ["--patience=2", "--min_delta=9", "--eval_interval=3", "--log_interval=2"]
    done = run_train("run", *flags)
    assert done.returncode == 0, done.stderr
    assert "stopped early: 2 evaluations without improvement at step 6" in done.stdout
    assert [row["step"] for row in done.rows("eval")] == [0, 3, 6]
    assert done.rows("train")[-1]["step"] == 6 and done.checkpoint(6).exists()
    before = tree(done.out_dir)
    again = run_train("run", *flags)
    assert (again.returncode, again.stderr) == (0, "") and "finished: 6 steps" in again.stdout
    assert tree(done.out_dir) == before
    on = run_train("run", *flags, "--patience=3")
    assert on.returncode == 0 and on.rows("train")[-1]["step"] == 9
    off = run_train("off", *flags, "--patience=0")
    assert off.rows("train")[-1]["step"] == STEPS  # control


def test_the_plateau_rule_lowers_the_rate(run_train):
    flags = ["--schedule=constant", "--warmup_steps=0", "--eval_interval=2", "--min_delta=9"]
    done = run_train("run", *flags, "--plateau_factor=0.5", "--plateau_patience=2")
    rates = [row["lr"] for row in done.rows("train")]
    assert rates == [1e-3] * 4 + [5e-4] * 4 + [2.5e-4] * 4


def test_the_last_evaluation_of_a_run_made_longer_counts_for_nothing(run_train):
    flags = ["--schedule=constant", "--warmup_steps=0", "--eval_interval=3", "--min_delta=9"]
    flags += ["--plateau_factor=0.5", "--plateau_patience=1", "--patience=9"]
    run_train("longer", *flags, "--max_steps=8")
    longer, straight = run_train("longer", *flags), run_train("straight", *flags)
    assert [row["step"] for row in longer.rows("eval")] == [0, 3, 6, 8, 9, 12]
    for done in (longer, straight):
        rates = [row["lr"] for row in done.rows("train")]
        assert rates == [1e-3] * 3 + [5e-4] * 3 + [2.5e-4] * 3 + [1.25e-4] * 3
    ours, expected = longer.fingerprint(STEPS), straight.fingerprint(STEPS)
    assert ours["model"] == expected["model"] and ours["optimizer"] == expected["optimizer"]
    sooner = run_train("sooner", *flags, "--eval_interval=2").fingerprint(STEPS)
    assert sooner["model"] != expected["model"]  # control


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
        parts = "model optimizer scaler ema state rng config data run".split()
        assert set(checkpoint) == set(parts)
        assert not [key for key in checkpoint["model"] if key.startswith(("_orig_mod", "module"))]


def test_run_json_says_what_ran(run_train):
    done = run_train("run", "--max_steps=3", before=stop_at(2))
    facts = json.loads((done.out_dir / "run.json").read_text())
    assert facts["ended"] == "stopped by SIGTERM" and facts["end"] >= facts["start"]
    assert "--max_steps=3" in facts["command"] and facts["config"]["max_steps"] == 3
    assert facts["config"]["decay_steps"] == 3  # as it was settled
    assert set(facts["run"]["code"]) == {"train.py", "model.py"}
    assert facts["versions"]["packages"]["torch"] == facts["versions"]["torch"]
    assert facts["hardware"]["threads"] == torch.get_num_threads()
    assert facts["hardware"]["device"] and facts["data"]["name"] == "small"
    done = run_train("run", "--max_steps=3")
    facts = json.loads((done.out_dir / "run.json").read_text())
    assert facts["ended"] == "finished" and [r["step"] for r in facts["resumes"]] == [2]
    assert sum(facts["seconds"].values()) > 0


def test_the_console_states_the_tokens_of_a_step(run_train):
    done = run_train("run", "--accum_steps=3", "--max_steps=3")
    assert "8 x 3 x 1 = 24 sequences of 16 = 384 tokens a step" in done.stdout
    assert "float32 (as told)" in done.stdout


def test_a_batch_of_one_sequence_trains(run_train):
    done = run_train("run", "--batch_size=1", "--max_steps=3")
    assert done.returncode == 0, done.stderr


def test_an_update_sees_the_batch_of_its_own_step(run_train, data_dir, tmp_path):
    """The loop hands dataset[batch_index] to the step, whole and in order, with and without workers."""
    note = """
import hashlib
def train_step(model, run, tokens, *rest, inner=train.train_step):
    print("BATCH", hashlib.sha256(tokens.numpy()).hexdigest())
    return inner(model, run, tokens, *rest)
train.train_step = train_step
"""
    import hashlib

    path = str(data_dir / "small" / "train.bin")
    split = train.Batches(path, "uint16", 16, 8, range(8), seed=1337)
    expected = [hashlib.sha256(split[i][0].numpy()).hexdigest() for i in range(STEPS)]
    for workers in (0, 2):
        flags = ["--batch_size=4", "--accum_steps=2", f"--num_workers={workers}"]
        done = run_train(f"run_{workers}", *flags, before=note)
        assert re.findall(r"BATCH (\w+)", done.stdout) == expected

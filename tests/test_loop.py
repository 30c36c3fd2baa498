"""What an update computes, and what the loop around it promises: the rate, the mean, evaluations,
early stopping, rows, and what a fork may put in place of a function."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import arguments, digest, read_log
from sources import SEVERAL_SETS, around, loading, script, stop_at
from torch.utils._python_dispatch import TorchDispatchMode

import dataset
import plumbing
import train

STEPS = 12


@pytest.fixture
def knobs(monkeypatch):
    """knobs(name=value, ...) sets knobs of train.py until the test ends."""
    monkeypatch.setattr(train, "RESOLVED", {})
    return lambda **values: [monkeypatch.setattr(train, *item) for item in values.items()]


def stir(run, noise=0.1):
    """Open every path of the model: some of its matrices start at zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)


def update(run, lr=1e-3, first=0, masked=slice(0)):
    """The numbers of one step, as plain floats. The targets at `masked` do not count."""
    inputs, targets = train.batch_at(run, first, train.sequences_at(0))
    targets[masked] = -100
    return {name: float(x) for name, x in train.train_step(run, inputs, targets, lr).items()}


def gradient(run):
    return torch.cat([weight.grad.flatten() for weight in run.model.parameters()])


def bits(run):
    return digest([run.model.state_dict(), run.ema])


# ---- the rate ------------------------------------------------------------------------------------

FALL = lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, (step - 20) / 80)))  # noqa: E731
RISE = lambda step: 0.52 - 0.48 * math.cos(math.pi * step / 20)  # noqa: E731
FORMULAS = {  # from 1.0, where a warmup of 20 steps ends, to 0.1 at step 100
    "cosine": FALL,
    "onecycle": lambda step: RISE(step) if step < 20 else FALL(step),  # as torch's OneCycleLR
    "linear": lambda step: max(0.1, 1 - 0.9 * (step - 20) / 80),
    "constant": lambda step: 1.0,
    "step": lambda step: max(0.1, 0.5 ** ((step - 20) // 30)),
}


@pytest.mark.parametrize("schedule", FORMULAS)
def test_a_schedule_follows_its_formula_also_past_its_end(knobs, schedule):
    knobs(schedule=schedule, peak_lr=1.0, min_lr=0.1, warmup_steps=20, max_steps=100)
    knobs(step_size=30, gamma=0.5)
    for step in range(300):
        is_warmup = step < 20 and schedule != "onecycle"
        expected = (step + 1) / 20 if is_warmup else FORMULAS[schedule](step)
        assert train.lr_at(step) == pytest.approx(expected), step
    knobs(decay_steps=50)  # it may end before the run does
    assert schedule in ("constant", "step") or train.lr_at(50) == train.lr_at(99) == 0.1


@pytest.mark.parametrize("steps, expected", [(400, 40), (12, 1), (5, 0)])
def test_the_warmup_of_a_short_run_is_a_tenth_of_it_at_most(data_dir, tmp_path, steps, expected):
    """Unless it is typed."""
    argv = arguments(tmp_path, data_dir, [f"--max_steps={steps}"])
    with train.build([flag for flag in argv if "warmup" not in flag]) as run:
        assert run.config["warmup_steps"] == expected
        assert train.lr_at(expected) == train.peak_lr


def test_force_takes_the_groups_that_are_typed(run_train, knobs):
    """Rate and weight decay are those of the command, moments those of the checkpoint, and the
    scale of float16 does not stay in another dtype."""
    run_train("run", "--dtype=float16", before=stop_at(6), code=143)
    more = ("--peak_lr=2e-3", "--weight_decay=0.5", "--resume=force")
    done = run_train("run", *more, before=stop_at(7), code=143)
    saved = torch.load(done.checkpoint(7), weights_only=True)
    assert [group["weight_decay"] for group in saved["optimizer"]["param_groups"]] == [0.5, 0.0]
    assert {int(state["step"]) for state in saved["optimizer"]["state"].values()} == {7}
    assert saved["scaler"]["scale"] == 1
    knobs(warmup_steps=3, max_steps=STEPS, peak_lr=2e-3)
    assert done.rows("train")[6]["lr"] == train.lr_at(6)


# ---- one update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [[], [*range(8), 13]], ids=["", "some masked"])
@pytest.mark.parametrize("split", ["--batch_size=4 --accum_steps=8", "--batch_size=5"])
def test_micro_batches_make_the_update_of_the_whole_batch(build, monkeypatch, split, masked):
    """Also of 5, the last of which has two sequences, and where no target of the first one counts.
    That a wrong share shows: tests/broken/02.py."""
    monkeypatch.setattr(train, "sequences_at", lambda step: 32)
    found = []
    for flags in (["--batch_size=32"], split.split()):
        with build(*flags, "--grad_clip=0") as run:
            stir(run)
            found.append((update(run, masked=masked), gradient(run)))
    (whole, expected), (parts, ours) = found
    assert parts == pytest.approx(whole, rel=1e-6)
    assert (ours - expected).norm() < 1e-6 * expected.norm()


class Three(torch.nn.Module):
    """Its gradient is 100, 200, 50."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(1), torch.zeros(2)])

    def forward(self, inputs, targets):
        return (torch.cat([*self.parts]) * torch.tensor([100.0, 200.0, 50.0])).sum()


@pytest.mark.parametrize("grad_clip, norm", [(1.0, 1.0), (0.0, 229.13), (300.0, 229.13)])
def test_clipping_of_100_200_50(build, monkeypatch, grad_clip, norm):
    """By the norm of all weights together; the norm on record is that before it. In each step the
    gradients begin at zero."""
    monkeypatch.setattr(train, "build_model", lambda config, vocab_size: Three())
    with build(f"--grad_clip={grad_clip}", "--optimizer=sgd", "--peak_lr=1") as run:
        for step in (1, 2):
            assert update(run, lr=0.5)["grad_norm"] == pytest.approx(229.13, abs=0.005)
            expected = torch.tensor([100.0, 200.0, 50.0]) * norm / 229.13
            torch.testing.assert_close(gradient(run), expected, rtol=1e-4, atol=0)
            assert torch.allclose(torch.cat([*run.model.parts]), -0.5 * step * gradient(run))


def test_a_groups_own_rate_counts_in_proportion(build, monkeypatch):
    """As in torch: at a hundredth of the rate of the first group the second moves by a hundredth."""

    def configure_optimizer(model, knobs, device_type):
        one, two = model.parts
        groups = [{"params": [one]}, {"params": [two], "lr": 0.01 * knobs["peak_lr"]}]
        return torch.optim.SGD(groups, lr=knobs["peak_lr"], fused=True)

    monkeypatch.setattr(train, "build_model", lambda config, vocab_size: Three())
    monkeypatch.setattr(train, "configure_optimizer", configure_optimizer)
    with build("--grad_clip=0", "--peak_lr=2") as run:
        update(run, lr=0.5)
        moved = torch.cat([*run.model.parts]).tolist()
    assert moved == pytest.approx([-0.5 * 100, -0.005 * 200, -0.005 * 50])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum", "muon"])
@pytest.mark.parametrize("when", [0, 2], ids=["first step", "third step"])
def test_a_gradient_that_is_not_finite_moves_nothing(build, optimizer, dtype, when):
    """In one element of one weight: no group's weights, moments or averages. The next steps are
    those of a run that was spared."""
    flags = [f"--optimizer={optimizer}", f"--dtype={dtype}", "--ema_decay=0.9", "--momentum=0.9"]
    ends = []
    for bad in (math.nan, math.inf, None):
        with build(*flags) as run:
            stir(run)
            for run.state["step"] in range(when):
                update(run, first=8 * run.state["step"])
            before = bits(run)
            if bad is not None:
                one = torch.zeros_like(run.model.head.weight)
                one[3, 2] = bad
                hook = run.model.head.weight.register_hook(lambda grad, one=one: grad + one)
                numbers = update(run)
                hook.remove()
                assert numbers["skipped"] == 1 and math.isfinite(numbers["loss"])
                assert bits(run) == before
            scale = run.scaler.get_scale()
            run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 1024.0})
            for run.state["step"] in range(when, when + 2):
                assert update(run, first=80)["skipped"] == 0
            ends.append(digest([bits(run), run.optimizer.state_dict()["state"]]))
            assert scale == {"float16": 65536 / (1 if bad is None else 2)}.get(dtype, 1)
    assert ends[0] == ends[1] == ends[2] != before


def test_a_step_in_which_no_weight_of_the_optimizer_gets_a_gradient_steps_nothing(build):
    with build() as run:
        before = bits(run)
        run.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
        run.optimizer.param_groups[0]["initial_lr"] = 1e-3
        assert math.isfinite(update(run)["loss"]) and bits(run) == before
        assert run.optimizer.param_groups[0]["params"][0].tolist() == [1, 1, 1]


def test_averages_follow_their_formula_and_warm_up(build):
    """Before update n is added the decay is min(ema_decay, (1 + n) / (10 + n))."""
    with build("--ema_decay=0.2") as run:
        stir(run)
        run.ema = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
        expected = {name: average.clone() for name, average in run.ema.items()}
        for n, decay in enumerate((0.1, 2 / 11, 0.2, 0.2)):
            run.state["step"] = n
            update(run, lr=1e-2, first=8 * n)
            for name, weight in run.model.named_parameters():
                expected[name] = decay * expected[name] + (1 - decay) * weight.detach()
        for name, average in run.ema.items():
            torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-7)
            assert not torch.equal(average, run.model.get_parameter(name))


class Waits(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(operator)
        return operator(*args, **(kwargs or {}))


WITHOUT_WAITING = [
    "--ema_decay=0.9",
    "--dtype=bfloat16 --batch_size=4 --accum_steps=2",
    "--dtype=float16 --grad_clip=0",
    "--optimizer=muon",
    "--optimizer=momentum",
]


@pytest.mark.parametrize("flags", WITHOUT_WAITING)
def test_the_host_never_waits_for_the_device_within_a_step(build, flags):
    with build(*flags.split()) as run:
        batch = train.batch_at(run, 0, 8)
        with Waits() as waits:
            numbers = train.train_step(run, *batch, 1e-3)
            assert waits.count == 0
            numbers["loss"].item()
            assert waits.count == 1  # control
        assert {tuple(x.shape) for x in numbers.values()} == {()}


FORKS = [  # whose inputs are a tensor or a dict, and whose targets do not all count as one
    "losses_class_weights",
    "masked_tagger",
    "regression_dict",
    "heads_two_tasks",
    "f1.py",  # of docs/forks.md; in some passes of one row no target counts
]


@pytest.mark.parametrize("name", FORKS)
def test_a_batch_has_one_loss_however_it_is_split(run_train, page, tmp_path, name):
    """8 x 1, 1 x 8 and two ranks, in training and in evaluation; also the numbers that a model
    returns beside it, and a metric of the whole split. The control counts the rows."""
    source = loading(page / name) if name == "f1.py" else script(f"sound/{name}")
    split = ("--batch_size=1", "--accum_steps=8")

    def numbers(out_dir, *flags, more="", **how):
        how |= {"before": source + more, "cwd": page}
        rows = run_train(tmp_path / out_dir, *flags, **how).rows()
        return [x for row in rows for x in row.values() if not isinstance(x, str)]

    whole = pytest.approx(numbers("whole"), rel=1e-4)
    assert numbers("split", *split) == whole
    assert numbers("ranks", *split, ranks=2) == whole
    control = numbers("control", *split, more="train.count_targets = len\n")
    assert (control == whole) == (name == "heads_two_tasks")


def test_tokens_count_the_targets_that_are_trained_on_and_throughput_positions(run_train):
    """Here every fourth position is masked."""
    done = run_train("run", before=around("train_step", "args[2][:, ::4] = -100"))
    assert [row["tokens"] for row in done.rows("train")] == [96 * n for n in range(1, STEPS + 1)]
    for row in read_log(done.out_dir):
        if row["kind"] == "train":
            assert row["tokens_per_sec"] == pytest.approx(128_000 / row["step_ms"])


# ---- evaluation ----------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_every_token_of_the_split_in_float64(build):
    """In eval mode, by hand, token by token; whatever the size of a batch."""
    found = []
    for size in ("--batch_size=32", "--batch_size=5"):
        with build("--dropout=0.5", "--label_smoothing=0.5", size) as run:
            stir(run)
            result = train.evaluate(run)
            assert run.model.training and {x.dtype for x in result.values()} == {torch.float64}
            found.append({name: x.item() for name, x in result.items()})
            tokens = torch.tensor(run.val_data.tokens.astype("int64"))
            run.model.eval()
            nats, right = [], 0
            for place in range(1, len(tokens)):
                first = min((place - 1) // 16 * 16, len(tokens) - 17)
                with torch.no_grad():
                    logits = run.model(tokens[None, first:place])[0, -1]
                nats.append(F.cross_entropy(logits, tokens[place]).item())
                right += int(logits.argmax() == tokens[place])
    n = len(tokens) - 1
    expected = {"val_loss": sum(nats) / n, "val_accuracy": right / n, "val_tokens": n}
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


DRAWS = """
class Draws(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("passes", torch.zeros(1))
        self.part = torch.nn.Dropout(0.5).eval()  # a fork's frozen part
    def forward(self, x, y=None):
        self.passes += 1
        noise = np.random.rand() + torch.rand(1).item()
        if y is None:
            return self.inner(x)
        result = self.inner(x, y)
        if self.training:
            return result + 0.01 * noise
        return result[0] + 0.01 * noise, {**result[1], "noise": torch.tensor(noise)}
train.build_model = lambda *args, inner=train.build_model: Draws(inner(*args))
"""
LEAKS = "plumbing.set_rng_state = lambda rng, device: None\n"


@pytest.mark.parametrize("leak", ["", LEAKS], ids=["as it is", "control"])
def test_how_often_a_run_evaluates_and_saves_changes_no_bit_of_training(run_train, leak):
    """The control does not put the random state back after an evaluation."""
    flags = ("--dropout=0.1", "--max_steps=8")
    often = ("--eval_interval=1", "--save_interval=3", "--log_interval=1")
    few = run_train("few", *flags, before=DRAWS + leak)
    many = run_train("many", *flags, *often, before=DRAWS + leak)
    ours, expected = many.fingerprint(8), few.fingerprint(8)
    for part in ("model", "optimizer"):
        assert (ours[part] == expected[part]) == (not leak)
    assert ours["rng"] == expected["rng"]  # which the last evaluation seeds in the control
    assert (many.rows("train") == few.rows("train")) == (not leak)
    noise = [done.rows("eval")[-1]["val_noise"] for done in (many, few)]
    assert noise[0] == noise[1]  # what a model draws there follows from the seed and the batch


def test_what_a_model_draws_is_not_what_its_dataset_drew(build):
    """A denoiser whose noise is that of the rows would see through them."""

    class Rows(list):
        def __getitem__(self, index):
            return torch.rand(4), index

    with build("--batch_size=1") as run:
        run.val_data = dataset.InOrder(Rows(range(16)), train.seed)
        for inputs, _ in train.val_batches(run):
            assert not torch.isin(torch.rand(inputs.shape), inputs).any()


def test_several_validation_sets_are_logged_each_and_as_their_mean(run_train, once):
    done = run_train("sets", before=SEVERAL_SETS)
    for row, alone in zip(done.rows("eval"), once().rows("eval"), strict=True):
        for name in ("val_loss", "val_accuracy"):
            assert row[name] == (row[f"{name}_end"] + row[f"{name}_start"]) / 2
            assert row[f"{name}_end"] == alone[name] != row[f"{name}_start"]
    assert done.fingerprint()["model"] == once().fingerprint()["model"]


# ---- the best, early stopping, plateau -----------------------------------------------------------


def scores(values, name="val_loss"):
    """Source of a fork whose evaluations give these numbers, one after another."""
    return f"""
math = train.math
values = iter({values})
def evaluate(run):
    return {{"val_loss": 2.0}} | {{"{name}": next(values)}}
train.evaluate = evaluate
"""


def test_patience_counts_evaluations_without_an_improvement_by_min_delta(run_train):
    flags = ("--eval_interval=2", "--patience=2", "--min_delta=0.1")
    values = [3.0, 2.5, 2.45, 2.3, 2.25, 2.22, 1.0]
    done = run_train("run", *flags, before=scores(values))
    assert "stopped early: 2 evaluations without improvement" in done.stdout
    assert [row["step"] for row in done.rows("eval")] == [0, 2, 4, 6, 8, 10]
    assert torch.load(done.out_dir / "best.pt")["state"]["best_val_loss"] == 2.22  # the best is
    again = run_train("run", *flags, before=scores([]))
    assert "stopped early" in again.stdout and "--patience" in again.stdout
    assert run_train("off", *flags, "--patience=0", before=scores(values)).checkpoint(12).exists()


def test_the_best_of_a_metric_of_which_more_is_better(run_train):
    flags = ("--eval_interval=4", "--best_metric=-val_f1", "--save_interval=0")
    done = run_train("run", *flags, before=scores([0.1, 0.7, 0.3, 0.5], "val_f1"))
    saved = torch.load(done.out_dir / "best.pt", weights_only=True)
    assert saved["state"]["step"] == saved["state"]["best_step"] == 4
    assert [row["best_val_f1"] for row in done.rows("eval")] == [0.1, 0.7, 0.7, 0.7]
    assert "best by -val_f1" in done.stdout


def test_a_plateau_lowers_the_rate_by_its_factor_each_time(run_train):
    flags = ("--eval_interval=2", "--plateau_factor=0.5", "--plateau_patience=2")
    flags += ("--schedule=constant", "--warmup_steps=0")
    done = run_train("run", *flags, before=scores([3.0, 3.0, 3.1, 2.0, 2.0, 2.0, 2.0]))
    rates = [row["lr"] / 1e-3 for row in done.rows("train")]
    assert rates == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_a_score_that_is_not_finite_is_never_the_best_nor_counts(run_train):
    flags = ("--eval_interval=2", "--patience=2", "--best_metric=-val_auc")
    values = "[0.5, math.nan, math.inf, 0.6, math.nan, math.nan, 0.55]"
    done = run_train("run", *flags, before=scores(values, "val_auc"))
    assert done.facts["ended"] == "finished" and done.facts["state"]["best_step"] == 6
    assert done.stdout.count("not counted for the best or for patience") == 4


# ---- rows, times, MFU ----------------------------------------------------------------------------


def test_the_rows_of_a_run_have_the_fields_of_ever(run_train, data_dir):
    done = run_train("run", "--eval_interval=5", "--dtype=float16")
    fields = {
        "train": "kind step loss grad_norm lr loss_scale step_ms data_ms tokens_per_sec mfu mem_gb "
        "gpu_util skipped tokens sequences epoch",
        "eval": "kind step val_loss val_accuracy val_bpb best_val_loss",
    }
    rows = {kind: [r for r in read_log(done.out_dir) if r["kind"] == kind] for kind in fields}
    assert all(set(row) == set(fields[kind].split()) for kind in fields for row in rows[kind])
    assert [row["step"] for row in rows["train"]] == [*range(1, STEPS + 1)]
    assert [row["step"] for row in rows["eval"]] == [0, 5, 10, 12]
    for row in rows["train"]:
        assert row["sequences"] == 8 * row["step"] and row["tokens"] == 128 * row["step"]
        assert row["epoch"] == row["sequences"] / 167 and 0.05 < row["mem_gb"] < 64
        assert row["gpu_util"] is None and row["step_ms"] > 0 <= row["data_ms"]
    meta = plumbing.read_json(data_dir / "small/meta.json")
    for row in rows["eval"]:
        bits = row["val_loss"] / math.log(2) * meta["val_tokens"]
        assert row["val_bpb"] == pytest.approx(bits / meta["val_bytes"])


def test_the_time_of_a_step_has_neither_evaluations_nor_saves_in_it(run_train):
    slow = around("evaluate", "time.sleep(0.2)") + around("checkpoint_of", "time.sleep(0.2)")
    flags = ("--max_steps=3", "--log_interval=1", "--eval_interval=1", "--save_interval=1")
    done = run_train("run", *flags, before=slow)
    seconds = done.facts["state"]["seconds"]
    assert seconds["evaluate"] > 0.6 and seconds["save"] > 0.6
    assert min(row["step_ms"] for row in read_log(done.out_dir) if row["kind"] == "train") < 200


def test_the_peak_is_that_of_a_device_by_its_whole_name_or_is_measured(monkeypatch):
    cpu = torch.device("cpu")
    peak = lambda name, dtype: plumbing.peak_flops(cpu, name, dtype)  # noqa: E731
    ticks = lambda seconds: iter(torch.tensor([0.0, *seconds]).cumsum(0).tolist())  # noqa: E731
    assert peak("NVIDIA A100-SXM4-80GB", torch.bfloat16)[0] == 312e12
    assert peak("NVIDIA A100-SXM4-80GB", torch.float32)[0] == 19.5e12
    for name in ("NVIDIA RTX A1000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a CPU"):
        monkeypatch.setattr(plumbing.time, "perf_counter", ticks([0.01] * 10).__next__)
        rate, words = peak(name, torch.float32)
        assert rate == pytest.approx(2 * 256**3 / 0.01) and "measured" in words
    monkeypatch.setattr(plumbing.time, "perf_counter", ticks([0.01] + [0.02] * 9).__next__)
    assert math.isnan(peak("a busy CPU", torch.float32)[0])  # its repeats disagree


def test_mfu_is_the_share_of_the_peak_or_is_not_available(build):
    with build() as run:
        run.peak, flops = 1e12, run.model.flops_per_token()
        assert train.mfu_at(run, 1e6) == pytest.approx(flops * 1e6 / 1e12)
        assert train.mfu_at(run, 1e9) is None  # above 1: the peak was measured too low
        run.peak = math.nan
        assert train.mfu_at(run, 1e6) is None
        run.peak, run.model = 1e12, Three()
        assert train.mfu_at(run, 1e6) is None


STOPS = """
def stop(run, row):
    seen.append((row["kind"], row["step"]))
    if row["kind"] == "eval" and row["step"] >= 4:
        run.stop("reached the target")
seen = []
train.on_row.append(stop)
"""


def test_a_function_in_on_row_sees_each_row_and_may_end_the_run_for_good(run_train):
    show = around("close_folder", "print('SEEN', seen)")
    done = run_train("run", "--eval_interval=2", before=STOPS + show)
    rows = [("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4)]
    assert f"SEEN {[*rows, ('eval', 4)]}" in done.stdout
    assert done.facts["ended"] == "stopped: reached the target"
    again = run_train("run", "--eval_interval=2")
    assert "stopped: reached the target at step 4" in again.stdout
    assert "to train longer add --resume=force" in again.stdout and len(again.steps) == 4
    forced = run_train("run", "--eval_interval=2", "--resume=force")
    assert forced.facts["ended"] == "finished" and forced.steps == [*range(1, STEPS + 1)]


def step_returning(change):
    return around("train_step", then=change)


def model_returning(what):
    return f"""
class Model(torch.nn.Linear):
    def forward(self, x, y=None):
        loss = super().forward(x.float()).square().mean()
        return {what}
train.build_model = lambda config, vocab_size: Model(16, 1)
"""


NO_BATCH = "train.ShuffledWindows.__getitem__ = lambda self, place: np.zeros((5, 16))\n"
STOP = "train.on_row.append(lambda run, row: row['kind'] == 'train' and run.stop('low'))"
WRONG = {  # what a fork returns: (source, words of the one line)
    "no data": (
        around("open_dataset", then="result = (*result[:2], None)"),
        "open_dataset(): found the facts None; expected name, fingerprint, meta",
    ),
    "no step": (
        step_returning("result = None"),
        "train_step(): found {}; expected scalars, with loss, grad_norm, skipped, targets",
    ),
    "no evaluation": (
        around("evaluate", then="result = None"),
        "evaluate(): found {}; expected scalars, with val_loss\n",
    ),
    # ranks other than 0 see no rows, and which rows of steps are logged follows no seed
    "an end": (STOP, "train.py: run.stop(): expected at the row of an evaluation, not of a step\n"),
    "no loss": (step_returning("del result['loss']"), "train_step(): found {'grad_norm'"),
    "a vector": (step_returning("result['own'] = torch.ones(2)"), "'own': (2,)"),
    "a name of a row": (step_returning("result['mfu'] = result['loss']"), "a row already has"),
    "no val_loss": (around("evaluate", then="result = {'loss': 1.0}"), "evaluate(): found"),
    "a vector of losses": (model_returning("loss.expand(3)"), "model(inputs, targets): found"),
    "None": (model_returning("None"), "model(inputs, targets): found"),
    "loss and logits": (model_returning("(loss, x)"), "model(inputs, targets): found"),
    "no batch": (NO_BATCH, "expected (inputs, targets) of 8 rows each"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_fork_returns_wrongly_is_one_line(run_train, what):
    source, words = WRONG[what]
    code = 2 if what == "no data" else 1
    run_train("run", before=source, code=code).is_one_line(words)

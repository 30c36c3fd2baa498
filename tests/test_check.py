"""check.py finds what it looks for, in the run, the machine and the result, and nothing else."""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from plumbing.configurator import configured
from plumbing.failures import RunFailed
from test_bench import FLAGS as BENCH_FLAGS
from test_bench import arguments as bench_arguments
from test_bench import stopped_by_ctrl_c

import bench
import check
import model
import train

FLAGS = BENCH_FLAGS | {"lr_steps": 20}
CHECKS = [
    "one batch overfits",
    "loss at initialization",
    "gradients reach every parameter",
    "gradient norm in range",
    "no look into the future",
    "targets are the tokens one place on",
    "the model is in train mode",
    "evaluation is the same",
    "probabilities sum to 1",
    "each byte counts once",
    "inputs are finite",
    "batches differ",
    "no sequence twice in an epoch",
    "train and validation share no window",
    "FLOPs of a token",
    "utilization",
    "learning rate",
    "memory of a step",
    "hours and cost",
]


def arguments(out_dir, data_dir, **flags):
    return bench_arguments(out_dir, data_dir, **{"lr_steps": 20} | flags)


@pytest.fixture
def in_process(data_dir, tmp_path):
    """check.main() with the given flags, here: (exit code, check.json)."""

    def run(**flags):
        code = check.main(arguments(tmp_path / "b", data_dir, **flags))
        return code, json.loads((tmp_path / "b" / "check.json").read_text())

    return run


@pytest.fixture
def checks(data_dir, tmp_path):
    """checks(part, **flags): {name: Check} of one part of sanity, such as check.data_checks."""

    def run(part, *rest, **flags):
        words = arguments(tmp_path / "b", data_dir, **flags)
        strict = torch.are_deterministic_algorithms_enabled()
        with contextlib.ExitStack() as stack:
            config = stack.enter_context(
                configured(vars(train), vars(bench), vars(check), argv=words)
            )
            job, _ = bench.job_of(config, words, train.__file__, tmp_path)
            job.stack = stack
            found = {each.name: each for each in part(job, *rest)}
        torch.use_deterministic_algorithms(strict)
        return found

    return run


# ---- sanity --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """sanity and lr in one process: (check.json, output, out_dir)."""
    out_dir = tmp_path_factory.mktemp("check") / "run"
    words = arguments(out_dir, data_dir, only="sanity,lr")
    command = [sys.executable, str(REPO / "check.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return json.loads((out_dir / "check.json").read_text()), output, out_dir


def test_a_healthy_model_is_go(whole):
    facts, stdout, _ = whole
    inputs, targets = facts["sanity"]["example"]
    assert inputs[1:] == targets[:-1] and len(targets) == 32
    assert list(facts["sanity"]["checks"]) == CHECKS
    assert all(each["ok"] for each in facts["sanity"]["checks"].values())
    assert facts["sanity"]["go"] and "\n  GO\n" in stdout and "✗" not in stdout
    for name in CHECKS:  # a line each, with what was found and what is good
        (line,) = [line for line in stdout.splitlines() if line[4:].startswith(f"{name}: ")]
        assert "; good: " in line


def test_any_model_and_data_can_be_checked(tmp_path):
    """Images: no text, no tokens, no FLOPs that the model tells. What does not apply is n/a."""
    flags = ["--n_embd=4", "--batch_size=16", "--rounds=1", "--timing_seconds=0.05"]
    command = [sys.executable, REPO / "check.py", REPO / "examples/images.py", *flags]
    command += ["--lr_steps=20", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "\n  GO\n" in done.stdout, done.stdout + done.stderr
    found = json.loads((tmp_path / "check.json").read_text())["sanity"]["checks"]
    assert list(found) == CHECKS
    absent = {name for name, each in found.items() if each["found"].startswith("n/a")}
    words = {"no look into the future", "targets are the tokens one place on"}
    assert absent == words | {"each byte counts once", "FLOPs of a token"}


def test_the_range_test_of_both_parts_is_one(whole):
    suggested = whole[0]["lr"]["suggested_peak_lr"]
    assert f"suggests {suggested:g}" in whole[0]["sanity"]["checks"]["learning rate"]["found"]


def test_lr_range_test_suggests_a_rate_that_learns(whole):
    lr = whole[0]["lr"]
    assert len(lr["lr"]) == len(lr["loss"]) == len(lr["smooth"]) <= 20
    assert lr["lr"] == sorted(lr["lr"])
    assert 1e-5 < lr["suggested_peak_lr"] < 1
    assert min(lr["smooth"]) < lr["loss"][0] - 0.3
    assert (whole[2] / "lr.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_range_test(monkeypatch):
    monkeypatch.setattr(check, "range_test", lambda job: {"suggested_peak_lr": 0.5})


def test_hours_and_cost_follow_from_the_step_and_the_length(checks, no_range_test):
    found = checks(check.run_checks, max_steps=10**6, dollars_per_hour=3)["hours and cost"].found
    words = r"([\d.]+) hours \(1,000,000 steps of ([\d.]+) ms, .*; \$([\d.]+) at \$3 an hour"
    hours, ms, money = map(float, re.match(words, found).groups())
    assert 3600 * hours == pytest.approx(1000 * ms, rel=0.5)  # evaluations come on top
    assert money == pytest.approx(3 * hours, abs=0.02)


def test_a_warning_is_still_go(in_process, no_range_test, monkeypatch):
    monkeypatch.setattr(check.devices, "gpu_util", lambda device: 50)
    code, facts = in_process()
    found = facts["sanity"]["checks"]
    assert found["utilization"]["warning"] and "GPU busy 50%" in found["utilization"]["found"]
    assert found["learning rate"]["warning"]
    assert [name for name, each in found.items() if not each["ok"]] == []
    assert code == 0 and facts["sanity"]["go"]


def test_a_step_that_does_not_fit_is_no_go(in_process, no_range_test, monkeypatch, capsys):
    monkeypatch.setattr(check.devices, "free_memory", lambda device: 1000)
    code, facts = in_process()
    found = facts["sanity"]["checks"]
    faults = [name for name, each in found.items() if not each["ok"]]
    assert faults == ["memory of a step"]
    assert code == 1 and "NO-GO: memory of a step\n" in capsys.readouterr().out


def see_the_future(monkeypatch):
    def attention(q, k, v, dropout):
        return F.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(model, "causal_attention", attention)


def begin_far_off(monkeypatch):
    reset = model.GPT.reset_parameters

    def far_off(self):
        reset(self)
        self.head.weight.data.mul_(50)

    monkeypatch.setattr(model.GPT, "reset_parameters", far_off)


def cut_off_a_matrix(monkeypatch):
    def forward(self, x):
        gate, value = self.up(x).detach().chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)

    monkeypatch.setattr(model.MLP, "forward", forward)


def never_update(monkeypatch):
    def build_run(*args, inner=train.build_run):
        run = inner(*args)
        for optimizer in run.optimizers:
            optimizer.step = lambda: None
        return run

    monkeypatch.setattr(train, "build_run", build_run)


def ask_for_the_input(monkeypatch):
    real = train.ShuffledWindows.__getitem__
    monkeypatch.setattr(train.ShuffledWindows, "__getitem__", lambda *args: (real(*args)[0],) * 2)


def blow_up_the_gradient(monkeypatch):
    real = model.GPT.forward

    def forward(self, tokens, targets=None):
        result = real(self, tokens, targets)
        return result if targets is None else result + 1e4 * (result - result.detach())

    monkeypatch.setattr(model.GPT, "forward", forward)


def stay_in_eval_mode(monkeypatch):
    def evaluate(run, inner=train.evaluate):
        numbers = inner(run)
        run.model.eval()
        return numbers

    monkeypatch.setattr(train, "evaluate", evaluate)


def evaluate_in_train_mode(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "eval", lambda self: self)


def average_the_averages(monkeypatch):
    @torch.no_grad()
    def evaluate(run):
        run.model.eval()
        size = run.state["eval_micro_batch"]
        losses = []
        for first in range(0, len(run.val_data), size):
            batch = run.val_data[first, min(size, len(run.val_data) - first)]
            losses.append(run.model(*map(torch.as_tensor, batch)).item())
        run.model.train()
        return {"val_loss": sum(losses) / len(losses)}

    monkeypatch.setattr(train, "evaluate", evaluate)


def smooth_labels_in_evaluation(monkeypatch):
    def cross_entropy(*args, inner=train.cross_entropy, **kwargs):
        return inner(*args, **kwargs | {"label_smoothing": 0.2})

    monkeypatch.setattr(train, "cross_entropy", cross_entropy)


def train_on_another_loss(monkeypatch):
    def cross_entropy(*args, inner=model.cross_entropy, **kwargs):
        return 0.9 * inner(*args, **kwargs)

    monkeypatch.setattr(model, "cross_entropy", cross_entropy)


def count_targets_twice(monkeypatch):
    def read(self, batch, inner=train.OrderedWindows.__getitem__):
        inputs, targets = inner(self, batch)
        seen = np.concatenate([inputs[:, 1:], inputs[:, -1:]], axis=1)
        return inputs, torch.where(torch.as_tensor(targets) == -100, torch.as_tensor(seen), targets)

    monkeypatch.setattr(train.OrderedWindows, "__getitem__", read)


def tell_other_bytes(monkeypatch):
    def open_dataset(saved, inner=train.open_dataset):
        train_data, val_data, facts = inner(saved)
        meta = facts["meta"] | {"val_bytes": 9 * facts["meta"]["val_bytes"]}
        return train_data, val_data, facts | {"meta": meta}

    monkeypatch.setattr(train, "open_dataset", open_dataset)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (see_the_future, "no look into the future"),
        (begin_far_off, "loss at initialization"),
        (cut_off_a_matrix, "gradients reach every parameter"),
        (never_update, "one batch overfits"),
        (ask_for_the_input, "targets are the tokens one place on"),
        (blow_up_the_gradient, "gradient norm in range"),
        (stay_in_eval_mode, "the model is in train mode"),
        (evaluate_in_train_mode, "the model is in train mode"),
        (average_the_averages, "evaluation is the same"),
        (smooth_labels_in_evaluation, "probabilities sum to 1"),
        (train_on_another_loss, "probabilities sum to 1"),
        (count_targets_twice, "each byte counts once"),
        (tell_other_bytes, "each byte counts once"),
    ],
)
def test_sanity_finds_the_fault_in_learning(fault, name, checks, monkeypatch):
    fault(monkeypatch)
    found = checks(check.learning_checks)[name]
    assert not found.fine and not found.passable


def test_a_fault_is_no_go(in_process, no_range_test, monkeypatch, capsys):
    smooth_labels_in_evaluation(monkeypatch)
    code, facts = in_process()
    assert code == 1 and not facts["sanity"]["go"]
    assert "NO-GO: probabilities sum to 1\n" in capsys.readouterr().out


def read_what_is_not_finite(data, batch, real):
    inputs, targets = (torch.as_tensor(part) for part in real(data, batch))
    inputs = inputs.double()
    inputs[0, 3] = math.nan
    return inputs, targets


def read_the_first_batch(data, batch, real):
    return real(data, (0, batch[1]))


def draw_with_replacement(data, batch, real):
    numbers = np.random.RandomState(batch[0]).randint(len(data), size=batch[1])
    rows = [real(data, (int(number), 1)) for number in numbers]
    return [torch.cat([torch.as_tensor(row[part]) for row in rows]) for part in (0, 1)]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (read_what_is_not_finite, "inputs are finite"),
        (read_the_first_batch, "batches differ"),
        (draw_with_replacement, "no sequence twice in an epoch"),
    ],
)
def test_sanity_finds_the_fault_in_the_data(fault, name, checks, monkeypatch):
    real = train.ShuffledWindows.__getitem__
    monkeypatch.setattr(
        train.ShuffledWindows, "__getitem__", lambda data, batch: fault(data, batch, real)
    )
    found = checks(check.data_checks)[name]
    assert not found.fine and not found.passable


def test_the_same_order_in_each_epoch_is_a_warning(checks, monkeypatch):
    real = train.ShuffledWindows.__getitem__

    def read(data, batch):
        return real(data, (batch[0] % len(data), batch[1]))

    monkeypatch.setattr(train.ShuffledWindows, "__getitem__", read)
    found = checks(check.data_checks)["batches differ"]
    assert not found.fine and found.passable and "next epoch's" in found.found


@pytest.mark.parametrize("begin", [0, 7])
def test_sanity_finds_validation_text_in_training_wherever_it_begins(begin, checks, monkeypatch):
    class Shifted:
        def __init__(self, tokens):
            self.tokens = tokens

        def __len__(self):
            return len(self.tokens) - begin

        def read(self, starts, length):
            return self.tokens.read(np.asarray(starts) + begin, length)

    def open_dataset(saved, inner=train.open_dataset):
        train_data, _, facts = inner(saved)
        windows = train.OrderedWindows(Shifted(train_data.tokens), train.block_size)
        return train_data, windows, facts

    monkeypatch.setattr(train, "open_dataset", open_dataset)
    found = checks(check.data_checks)["train and validation share no window"]
    assert not found.fine and not found.passable


def test_a_model_that_tells_other_flops_is_named_with_both_figures(checks, monkeypatch):
    (fine,) = checks(check.flops_check).values()
    told, counted = (float(each.replace(",", "")) for each in re.findall(r"[\d,]{4,}", fine.found))
    assert fine.fine and told == pytest.approx(counted, rel=0.1)
    real = model.GPT.flops_per_token
    monkeypatch.setattr(model.GPT, "flops_per_token", lambda self: 0.6 * real(self))
    (wrong,) = checks(check.flops_check).values()
    assert not wrong.fine and wrong.passable  # a warning
    assert f"says {0.6 * told:,.0f}, torch counts {counted:,.0f}" in wrong.found


def test_a_model_whose_flops_fail_is_no_error(checks, monkeypatch):
    monkeypatch.setattr(model.GPT, "flops_per_token", lambda self: 1 / 0)
    (found,) = checks(check.flops_check).values()
    assert found.found.startswith("n/a")


# ---- exact ---------------------------------------------------------------------------------------


@pytest.mark.slow  # it starts eight processes, each of which imports torch
def test_exact_hashes_the_gradients_of_each_setting_alone_and_under_load(in_process, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one process of load
    code, facts = in_process(only="exact", exact_seconds=1)
    exact = facts["exact"]
    names = ["eager", "eager, not deterministic", "eager, 1 thread", "eager, without AMX"]
    assert list(exact["rows"]) == names + [f"{name}, under load" for name in names]
    for row in exact["rows"].values():
        assert row["tries"] >= 1 and row["distinct"] == 1 and row["where"] == ""
    assert code == 0 and exact["differ"] == 0
    # weights and batch are the same in all of them
    assert len({row["bits"] for row in exact["rows"].values()}) == 1


def test_tries_find_a_bit_that_flips_and_name_its_tensor(in_process, monkeypatch):
    real = train.forward_backward
    calls = []

    def faulty(model, run, *batch):
        loss = real(model, run, *batch)
        calls.append(loss)
        if len(calls) == 3:  # the first one is the rehearsal
            run.model.head.weight.grad.view(torch.int32)[5, 7] ^= 1
        return loss

    monkeypatch.setattr(train, "forward_backward", faulty)
    _, facts = in_process(only="tries", exact_seconds=1, dropout=0.1)
    tries = facts["tries"]
    assert tries["tries"] == len(calls) - 1 >= 3
    assert (tries["distinct"], tries["differ"]) == (2, 1)
    assert tries["where"] == "head.weight"


def test_a_deterministic_setting_that_differs_is_exit_1(in_process, monkeypatch):
    row = {"tries": 5, "distinct": 2, "differ": 1, "bits": "0", "where": "head.weight"}

    def start(job, script, words, environment=None, wait=True, *, out_dir, **knobs):
        out_dir.mkdir(exist_ok=True)
        (out_dir / "check.json").write_text(json.dumps({"tries": row}))

    monkeypatch.setattr(check, "start", start)
    code, facts = in_process(only="exact")
    assert code == 1
    strict = [row for row in facts["exact"]["rows"].values() if row["deterministic"]]
    assert facts["exact"]["differ"] == len(strict) < len(facts["exact"]["rows"])


# ---- seeds, and one configuration against another ------------------------------------------------

# two-sided 95% quantiles (Fisher 1925, table IV, and more digits)
QUANTILES = {1: 12.7062, 2: 4.30265, 4: 2.77645, 9: 2.26216, 29: 2.04523, 1000: 1.96234}


@pytest.mark.parametrize("freedom", QUANTILES)
def test_the_t_quantile_is_that_of_the_tables(freedom):
    assert check.t_quantile(freedom) == pytest.approx(QUANTILES[freedom], abs=1e-4)


def test_verdicts_follow_from_the_interval():
    assert check.verdict_on([0.0, 0.0, 0.0]) == "identical"
    assert check.verdict_on([-0.3, -0.31, -0.29]) == "better"
    assert check.verdict_on([0.3, 0.31, 0.29]) == "worse"
    # 0.1 and a deviation of 0.2: with 18 seeds 2.110 * 0.2 / sqrt(18) is 0.0995, with 17 0.1028
    verdict = check.verdict_on([0.3, -0.1, 0.1])
    assert verdict == "not shown (about 18 seeds would show a difference of this size)"
    assert check.verdict_on([0.1, -0.1]).startswith("not shown (no number of seeds")


@pytest.fixture
def quick(train_in, tmp_path, monkeypatch):
    """check.start() by a forked process, which begins at once. Yields the folders of the runs."""
    folders = []

    def start(job, script, words, environment=None, wait=True, *, out_dir, **knobs):
        folders.append(Path(out_dir))
        flags = [*check.for_train(words), *(f"--{name}={value}" for name, value in knobs.items())]
        flags = [flag for flag in flags if not flag.startswith("--out_dir")]
        done = train_in(tmp_path, out_dir, *flags, f"--out_dir={out_dir}")
        if done.returncode:
            raise RunFailed(done.stderr)

    monkeypatch.setattr(check, "start", start)
    return folders


@pytest.fixture
def compare(data_dir, tmp_path, quick, capsys):
    """compare(flags, of the other, **knobs of check.py): (exit code, lines of the output)."""

    def run(flags, other, **knobs):
        common = {"max_steps": 30, "n_layer": 1, "n_embd": 32, "dtype": "float32", "seeds": 3}
        first = arguments(tmp_path / "b", data_dir, **common | flags)
        second = check.for_train(arguments(tmp_path / "b", data_dir, **common | other))
        words = [*first, f"--against={' '.join(second)}"]
        code = check.main(words + [f"--{name}={value}" for name, value in knobs.items()])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_a_configuration_is_identical_to_itself(compare, quick):
    code, lines = compare({}, {})
    assert (code, lines[-1]) == (0, "verdict: identical")
    assert [folder.name for folder in quick] == ["seed_1337", "seed_1338", "seed_1339"]


def test_a_rate_far_too_high_is_worse_and_runs_are_not_trained_again(compare, quick):
    code, lines = compare({"peak_lr": 0.3}, {"peak_lr": 0.03})
    assert (code, lines[-1]) == (0, "verdict: worse")
    assert len(set(quick)) == len(quick) == 6
    code, lines = compare({"peak_lr": 0.03}, {"peak_lr": 0.3})
    assert (code, lines[-1]) == (0, "verdict: better")
    assert len(quick) == 6  # the same runs
    found = [line for line in lines if "95% interval" in line]
    assert len(found) == 1
    compare({"max_steps": 31}, {"peak_lr": 0.03})
    assert len(quick) == 9  # another run


def test_another_code_is_another_run(compare, quick, monkeypatch):
    compare({}, {}, seeds=2)
    monkeypatch.setattr(check.identity, "code_hashes", lambda: {"train.py": "edited"})
    compare({}, {}, seeds=2)
    assert len(set(quick)) == 4


def test_a_run_that_fails_is_exit_1(compare, capsys):
    code, _ = compare({}, {"dataset": "absent"})
    assert code == 1


def test_equal_names_the_first_step_that_differs(compare, tmp_path, quick):
    code, lines = compare({}, {}, equal="true")
    assert (code, lines[-1]) == (0, "equal: yes")
    code, lines = compare({}, {"warmup_steps": 20, "max_steps": 29}, equal="true")
    assert code == 1 and lines[-1].startswith("equal: no; the first step that differs: 2 (loss")
    code, _ = compare({}, {"dataset": "absent"}, equal="true")
    assert code == 125
    assert check.main(["--against=x", "--equal=true", "--no_such_flag=1"]) == 125


def test_equal_takes_the_folder_of_a_run(data_dir, tmp_path, run_train, quick, capsys):
    golden = run_train("golden", "--max_steps=10", "--seed=3")
    for seed, expected in ((3, 0), (4, 1)):
        flags = [f"--max_steps=10 --seed={seed}", f"--out_dir={tmp_path}/b --data_dir={data_dir}"]
        words = " ".join([*flags, "--dataset=small --device=cpu --dtype=float32"]).split()
        assert check.main([*words, f"--against={golden.out_dir}", "--equal=true"]) == expected, (
            capsys.readouterr()
        )


def test_an_import_that_fails_cannot_tell(tmp_path):
    """For git bisect, which would take 1 for "bad": a commit whose train.py is broken is skipped."""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".*", "out", "data", "tests"))
    (copy / "train.py").write_text("def broken(:")
    command = [sys.executable, copy / "check.py", "--against=x", "--equal=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 125 and "SyntaxError" in done.stderr


@pytest.mark.slow  # 200 runs
def test_other_seeds_of_one_configuration_show_no_difference(data_dir, tmp_path, quick):
    """Twenty times five seeds against five others: a test at 95% errs once in twenty on average."""
    words = arguments(tmp_path / "b", data_dir, max_steps=15, n_layer=1, n_embd=32, dtype="float32")
    losses = [check.trained(None, train.__file__, words, seed)[0][-1] for seed in range(200)]
    pairs = np.array(losses).reshape(20, 2, 5)
    verdicts = [check.verdict_on((first - second).tolist()) for first, second in pairs]
    assert sum(verdict.startswith("not shown") for verdict in verdicts) >= 17


def test_seeds_are_runs_of_the_real_command(in_process, run_train, quick, capsys):
    knobs = {"max_steps": 8, "eval_interval": 4, "dtype": "float32", "report": "false"}
    _, facts = in_process(only="seeds", seeds=2, seed=5, **knobs)
    seeds = facts["seeds"]
    assert list(seeds["runs"]) == ["seed 5", "seed 6"]
    first, second = seeds["runs"].values()
    flags = [f"--{key}={value}" for key, value in (FLAGS | knobs).items() if hasattr(train, key)]
    losses = [row["val_loss"] for row in run_train("own", *flags, "--seed=6").rows("eval")]
    assert (second["final"], second["best"]) == (losses[-1], min(losses))
    assert first["final"] != second["final"]
    for column in ("final", "best", "seconds"):
        one, other = first[column], second[column]
        assert seeds["mean"][column] == pytest.approx((one + other) / 2)
        assert seeds["median"][column] == pytest.approx((one + other) / 2)
        assert seeds["deviation"][column] == pytest.approx(abs(one - other) / math.sqrt(2))
    assert f"{second['final']:.4f}  {second['best']:.4f}" in capsys.readouterr().out


def test_a_seed_that_fails_ends_it_with_what_it_said(data_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "failing.py").write_text("print('the disk is full'); raise SystemExit(1)")
    real = subprocess.Popen
    fails = [sys.executable, tmp_path / "failing.py"]
    monkeypatch.setattr(subprocess, "Popen", lambda flags, **how: real(fails + flags[2:], **how))
    code = check.main(arguments(tmp_path / "b", data_dir, only="seeds"))
    assert code == 1
    assert "--seed=1337 exited with 1:\nthe disk is full" in capsys.readouterr().err


# ---- stopped, and bad input ----------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_of_exact(data_dir, tmp_path):
    flags = arguments(tmp_path / "b", data_dir, only="exact", exact_seconds=1000)
    assert stopped_by_ctrl_c("check.py", flags, tmp_path)


def test_an_unknown_part_is_one_line_and_exit_2(in_process, tmp_path, capsys):
    with pytest.raises(SystemExit) as leaving:
        in_process(only="sanity,ladder")
    error = capsys.readouterr().err
    assert leaving.value.code == 2 and "'ladder'" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "b").exists()

"""check.py finds what it looks for, in the run, the machine and the result, and nothing else."""

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, apply_patch, copy_of_repository
from helpers import BENCH_FLAGS, bench_arguments

import bench
import check
import model
import train
from checks import probes, twin, verdicts
from plumbing.cli import BadInput

pytestmark = pytest.mark.usefixtures("small_products")
SMALL = {"n_layer": 1, "n_embd": 32, "batch_size": 8, "dtype": "float32"}
# The checks, as docs/trouble.md names and explains them.
TROUBLE = (REPO / "docs" / "trouble.md").read_text(encoding="utf-8")
TABLE = TROUBLE.partition("| check | what it tests")[2].partition("\n## ")[0]
PAGE = set("; ".join(re.findall(r"^\| ([^|]*) \|", TABLE, re.MULTILINE)).split("; "))
OF_TEXT = {
    *("no look into the future", "sampling draws from the model", "positions matter"),
    *("the loss is the mean of -log p", "gradients are those of the loss", "the first sequence"),
    *("targets are the next tokens", "an epoch has each sequence once"),
    *("train and validation share no window", "evaluation sees each token once"),
}
STEP, EVALUATION = (f"each {each} is that of a plain loop" for each in ("step", "evaluation"))


@pytest.fixture
def in_process(data_dir, tmp_path):
    """check.main() with the given flags, here: (exit code, check.json)."""

    def run(**flags):
        code = check.main(bench_arguments(tmp_path / "b", data_dir, **SMALL | flags))
        return code, json.loads((tmp_path / "b" / "check.json").read_text())

    return run


@pytest.fixture
def checks(data_dir, tmp_path):
    """checks(part, **flags): {name: (fine, words)} of one part of sanity, such as
    probes.data_checks. fine: also "passable"."""

    def run(part, **flags):
        words = bench_arguments(tmp_path / "b", data_dir, **SMALL | flags)
        with bench.job_of(words, train.__file__, vars(check)) as job:
            return {
                name: ("passable" if fine is False and any(passable) else fine, found)
                for name, fine, found, *passable in check.asked(part, job)
            }

    return run


# ---- sanity --------------------------------------------------------------------------------------


def test_a_healthy_model_is_go(in_process, capsys):
    code, facts = in_process()
    stdout = capsys.readouterr().out
    assert code == 0
    assert set(facts["sanity"]["checks"]) == PAGE and len(PAGE) > 20
    assert all(each["mark"] in "✓!" for each in facts["sanity"]["checks"].values())
    assert facts["sanity"]["ok"] and "\n  GO\n" in stdout and "✗" not in stdout
    for name in PAGE:  # a line each
        assert [line for line in stdout.splitlines() if line[4:].startswith(f"{name}: ")]


def test_any_model_and_data_can_be_checked(tmp_path, train_as_it_was, capsys):
    """Images: no text, no tokens, no FLOPs that the model tells. What does not apply is n/a."""
    flags = ["--n_embd=4", "--batch_size=16", "--device=cpu", f"--out_dir={tmp_path}"]
    assert check.main([str(REPO / "examples/images.py"), *flags]) == 0
    assert "\n  GO\n" in capsys.readouterr().out
    found = json.loads((tmp_path / "check.json").read_text())["sanity"]["checks"]
    absent = {name for name, each in found.items() if each["mark"] == "–"}
    assert PAGE - found.keys() == OF_TEXT
    assert found.keys() - PAGE == absent - {"FLOPs of a token"}
    assert all(" check" in name for name in absent - {"FLOPs of a token"})


def see_the_future(monkeypatch):
    everything = lambda q, k, v, dropout: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    monkeypatch.setattr(model, "causal_attention", everything)


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


def ask_for_the_input(monkeypatch):
    change_the_rows(monkeypatch, lambda data, batch, real: (real(data, batch)[0],) * 2)


def change_the_rows(monkeypatch, change):
    real = train.ShuffledWindows.__getitem__
    monkeypatch.setattr(
        train.ShuffledWindows, "__getitem__", lambda data, batch: change(data, batch, real)
    )


def smooth_labels_in_evaluation(monkeypatch):
    def cross_entropy(*args, inner=train.cross_entropy, **kwargs):
        return inner(*args, **kwargs | {"label_smoothing": 0.2})

    monkeypatch.setattr(train, "cross_entropy", cross_entropy)


def never_clip(monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, most: torch.ones(()))


def lose_the_moments_in_a_resume(monkeypatch):
    def restore(run, saved, inner=train.checkpoint.restore):
        inner(run, saved)
        for optimizer in run.optimizers:
            optimizer.state.clear()

    monkeypatch.setattr(train.checkpoint, "restore", restore)


@pytest.mark.parametrize(
    ("fault", "part", "name"),
    [
        (begin_far_off, probes.learning_checks, "loss at initialization"),
        (see_the_future, probes.causality_check, "no look into the future"),
        (cut_off_a_matrix, probes.gradient_check, "gradients are those of the loss"),
        (ask_for_the_input, probes.data_checks, "targets are the next tokens"),
        (smooth_labels_in_evaluation, twin.twin_checks, EVALUATION),
        (never_clip, twin.twin_checks, STEP),
        (lose_the_moments_in_a_resume, twin.twin_checks, STEP),
    ],
)
def test_sanity_finds_the_fault(fault, part, name, checks, monkeypatch):
    fault(monkeypatch)
    assert checks(part, batch_size=6, warmup_steps=3)[name][0] is False


def test_a_fault_is_no_go_and_its_first_number_is_printed(in_process, monkeypatch, capsys):
    smooth_labels_in_evaluation(monkeypatch)
    monkeypatch.setattr(check, "CHECKS", [probes.causality_check, twin.twin_checks])
    code, facts = in_process()
    output = capsys.readouterr().out
    assert code == 1 and not facts["sanity"]["ok"] and f"NO-GO: {EVALUATION}\n" in output
    words = f"✗ {EVALUATION}: step 0, number val_loss, logged (.*), expected (.*)\n"
    logged, expected = map(float, re.search(words, output).groups())
    assert logged != expected


@pytest.mark.parametrize("begin", [0, 7])
def test_sanity_finds_validation_text_in_training_wherever_it_begins(begin, checks, monkeypatch):
    def tokens_on_disk(job, split, inner=probes.tokens_on_disk):
        return inner(job, "train")[begin:1500] if split == "val" else inner(job, split)

    monkeypatch.setattr(probes, "tokens_on_disk", tokens_on_disk)
    assert checks(probes.data_checks)["train and validation share no window"][0] is False


def test_the_bugs_of_the_list_apply_to_the_present_code():
    bugs = tomllib.loads((REPO / "tests" / "bugs.toml").read_text())["bug"]
    for bug in bugs:
        assert (REPO / bug["file"]).read_text().count(bug["old"]) == 1, bug["name"]
    assert len(bugs) > 40


def test_the_sound_loops_of_the_list_apply_to_the_present_code(tmp_path):
    for patch in (REPO / "tests" / "sound").glob("*.patch"):
        apply_patch(patch.read_text(), copy_of_repository(tmp_path / patch.stem))


# ---- the same bits? ------------------------------------------------------------------------------


def test_exact_compares_each_row_of_each_process_with_the_first(in_process, quick, monkeypatch):
    seeds = iter([5, 5, 6])

    def execute(*args, inner=bench.execute, **knobs):
        inner(*args, **knobs, seed=next(seeds))

    monkeypatch.setattr(bench, "execute", execute)
    code, facts = in_process(only="exact", exact_runs=3, exact_steps=3)
    same, different = facts["exact"]["found"]
    assert code == 1 and same is None and different["step"] == 0


# ---- seeds, and one configuration against another ------------------------------------------------


def test_the_interval_ends_where_the_integral_over_its_priors_is_20():
    """Of the likelihood ratio of t: a normal prior of the effect, by sampling it."""
    values = np.array([0.5, 1.4, 0.2, 0.9, 0.7, 1.1])
    effects = np.random.default_rng(0).normal(0, math.sqrt(verdicts.PRIOR), 3000)
    scales = np.exp(np.linspace(-6, 6, 4001))  # 1 / scale is the right Haar measure
    weights = np.gradient(scales) / scales

    def likelihood(effect, middle):
        z = (values[:, None] - middle - effect * scales) / scales
        return (np.exp(-(z**2).sum(0) / 2) / scales ** len(values) * weights).sum()

    for bound in verdicts.interval(values.tolist()):
        ratio = np.mean([likelihood(e, bound) for e in effects]) / likelihood(0.0, bound)
        assert ratio == pytest.approx(1 / verdicts.SHARE, rel=0.1)


def test_looking_after_each_seed_is_rarely_wrong_and_finds_large_differences():
    rng = np.random.default_rng(1)
    found = {}
    for shift in (0.0, 2.0):
        words = []
        for _ in range(200):
            values = (rng.normal(size=20) + shift).tolist()
            looks = [verdicts.verdict_on(values[:n]) for n in range(2, 21)]
            words.append(next((word for word in looks if word != "not shown"), "not shown"))
        found[shift] = words
    assert found[0.0].count("not shown") >= 190 and found[2.0].count("worse") >= 198


def test_verdicts_follow_from_the_interval():
    assert verdicts.verdict_on([0.0, 0.0, 0.0]) == "identical"
    values = [-0.3, -0.31, -0.29, -0.3]
    assert verdicts.verdict_on(values) == "better"
    assert verdicts.verdict_on([-value for value in values]) == "worse"
    assert verdicts.interval(values[:2]) == (-math.inf, math.inf)
    assert verdicts.verdict_on(values[:2]) == "not shown"
    low, high = verdicts.interval(values)
    assert low < -0.3 < high < verdicts.interval(values, comparisons=10)[1]  # needs more evidence


@pytest.fixture
def compare(data_dir, tmp_path, quick, capsys, monkeypatch):
    """compare(flags, of the other, **knobs of check.py): (exit code, lines of the output)."""
    monkeypatch.chdir(tmp_path)

    def run(flags, other, **knobs):
        common = SMALL | {"max_steps": 6, "block_size": 16, "seeds": 2}
        first = bench_arguments(tmp_path / "b", data_dir, **common | flags)
        second = bench_arguments(tmp_path / "b", data_dir, **common | other)
        words = [*first, f"--against={' '.join(second)}"]
        code = check.main(words + [f"--{name}={value}" for name, value in knobs.items()])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_a_configuration_is_identical_to_itself(compare, quick, monkeypatch):
    code, lines = compare({}, {})
    assert (code, lines[-1]) == (0, "verdict: identical")
    assert [folder.name for folder in quick] == ["seed_1337", "seed_1338"]
    monkeypatch.setattr(bench, "hashes_of_code", lambda *_: ["edited"])
    compare({}, {})
    assert len(set(quick)) == len(quick) == 4  # another code is another run


def test_a_rate_far_too_high_is_worse_and_runs_are_not_trained_again(compare, quick, data_dir):
    code, lines = compare({"peak_lr": 1.0}, {"peak_lr": 0.01}, seeds=4)
    assert (code, lines[-1]) == (0, "verdict: worse")
    assert len(set(quick)) == len(quick) == 8
    code, lines = compare({"peak_lr": 0.01}, {"peak_lr": 1.0}, seeds=4)
    assert (code, lines[-1]) == (0, "verdict: better")
    assert len(quick) == 8  # the same runs
    assert len([line for line in lines if "95% interval" in line]) == 1
    # seeds are added until a verdict holds
    code, lines = compare({"peak_lr": 1.0}, {"peak_lr": 0.01}, seeds=0)
    assert (code, lines[-1]) == (0, "verdict: worse")
    assert 8 <= len(quick) <= 20  # two runs for each seed, from the fourth on
    code, lines = compare({"peak_lr": 0.01}, {"peak_lr": 0.0101}, seeds=0, max_seeds=3)
    assert lines[-1] == "verdict: not shown"
    with pytest.raises(BadInput, match="--seeds=1: expected"):
        compare({}, {}, seeds=1)
    shutil.copytree(data_dir / "small", data_dir / "again", dirs_exist_ok=True)
    with pytest.raises(BadInput, match="losses on again and small cannot be compared"):
        compare({}, {"dataset": "again"})


def test_equal_names_the_first_row_that_differs(compare, run_train):
    code, lines = compare({}, {"warmup_steps": 5, "max_steps": 5}, equal="true")
    assert code == 1 and lines[-1].startswith("equal: no; the first difference: step 1: lr ")
    code, lines = compare({}, {"log_interval": 3}, equal="true")
    assert code == 0 and lines[-1] == "equal: yes"
    assert check.main(["--against=x", "--equal=true", "--no_such_flag=1"]) == 125


def test_an_import_that_fails_cannot_tell(tmp_path):
    """For git bisect, which would take 1 for "bad": it skips a broken train.py."""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".*", "out", "data", "tests"))
    (copy / "train.py").write_text("def broken(:")
    command = [sys.executable, copy / "check.py", "--against=x", "--equal=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 125 and "SyntaxError" in done.stderr


def test_seeds_are_runs_of_the_real_command(
    in_process, run_train, quick, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    knobs = {"max_steps": 8, "eval_interval": 4, "dtype": "float32", "report": "false"}
    _, facts = in_process(only="seeds", seeds=2, seed=5, **knobs)
    runs = facts["seeds"]["runs"]
    assert list(runs) == ["seed 5", "seed 6", "mean", "deviation"]
    first, second, middle, deviation = runs.values()
    flags = [
        f"--{key}={value}"
        for key, value in (BENCH_FLAGS | SMALL | knobs).items()
        if hasattr(train, key)
    ]
    losses = [row["val_loss"] for row in run_train("own", *flags, "--seed=6").rows("eval")]
    assert second["loss"] == losses[-1] != first["loss"]
    for column in ("loss", "seconds"):
        one, other = first[column], second[column]
        assert middle[column] == pytest.approx((one + other) / 2)
        assert deviation[column] == pytest.approx(abs(one - other) / math.sqrt(2))
    assert f"{second['loss']:.4f}  " in capsys.readouterr().out

"""check.py finds what it looks for, in the run, the machine and the result, and nothing else."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib

import luck
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from helpers import BENCH_FLAGS, bench_arguments

import bench
import check
import model
import train
from plumbing.cli import BadInput
from plumbing.data import OrderedWindows
from reporting import sanity, verdicts

pytestmark = pytest.mark.usefixtures("small_products")
FLAGS = BENCH_FLAGS | {"lr_steps": 20}
SMALL = {"n_layer": 1, "n_embd": 32, "batch_size": 8, "dtype": "float32"}
# The checks, as docs/trouble.md names and explains them.
TROUBLE = (REPO / "docs" / "trouble.md").read_text(encoding="utf-8")
TABLE = TROUBLE.partition("| check | what it tests")[2].partition("\n## ")[0]
PAGE = set("; ".join(re.findall(r"^\| ([^|]*) \|", TABLE, re.MULTILINE)).split("; "))
OF_TEXT = {
    *("no look into the future", "sampling draws from the model", "positions matter"),
    *("the loss is the mean of -log p", "gradients are those of the loss", "the first sequence"),
    *("targets are the next tokens", "train and validation share no window"),
    "evaluation sees each token once",
}


def arguments(out_dir, data_dir, **flags):
    return bench_arguments(out_dir, data_dir, **{"lr_steps": 20} | flags)


@pytest.fixture
def in_process(data_dir, tmp_path):
    """check.main() with the given flags, here: (exit code, check.json)."""

    def run(**flags):
        code = check.main(arguments(tmp_path / "b", data_dir, **SMALL | flags))
        return code, json.loads((tmp_path / "b" / "check.json").read_text())

    return run


@pytest.fixture
def checks(data_dir, tmp_path):
    """checks(part, **flags): {name: (fine, words)} of one part of sanity, such as
    sanity.epoch_check. fine: also "passable"."""

    def run(part, **flags):
        words = arguments(tmp_path / "b", data_dir, **SMALL | flags)
        with bench.job_of(words, train.__file__, vars(check)) as job:
            with contextlib.ExitStack() as job.stack:
                return {
                    name: ("passable" if fine is False and any(passable) else fine, found)
                    for name, fine, found, *passable in check.asked(part, job)
                }

    return run


# ---- sanity --------------------------------------------------------------------------------------


def test_a_healthy_model_is_go(in_process, capsys):
    code, facts = in_process(only="sanity,lr")
    stdout = capsys.readouterr().out
    assert code == 0
    assert set(facts["sanity"]["checks"]) == PAGE and len(PAGE) > 30
    assert all(each["mark"] in "✓!" for each in facts["sanity"]["checks"].values())
    assert facts["sanity"]["ok"] and "\n  GO\n" in stdout and "✗" not in stdout
    for name in PAGE:  # a line each
        assert [line for line in stdout.splitlines() if line[4:].startswith(f"{name}: ")]
    lr = facts["lr"]
    assert len(lr["lr"]) == len(lr["loss"]) == len(lr["smooth"]) <= 20
    assert lr["lr"] == sorted(lr["lr"])
    assert 1e-5 < lr["suggested_peak_lr"] < 1, "a rate that learns"
    assert min(lr["smooth"]) < lr["loss"][0] - 0.3
    rows = re.findall(r"^  (\S+e-\d+) +[\d.]+$", stdout, re.MULTILINE)
    assert list(map(float, rows)) == pytest.approx(lr["lr"][::5], rel=0.05)


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


def draw_with_replacement(monkeypatch):
    def draw(data, batch, real):
        numbers = np.random.RandomState(batch[0]).randint(len(data), size=batch[1])
        rows = [real(data, (int(number), 1)) for number in numbers]
        return [np.concatenate([row[part] for row in rows]) for part in (0, 1)]

    change_the_rows(monkeypatch, draw)


def change_the_rows(monkeypatch, change):
    real = train.ShuffledWindows.__getitem__
    monkeypatch.setattr(
        train.ShuffledWindows, "__getitem__", lambda data, batch: change(data, batch, real)
    )


def smooth_labels_in_evaluation(monkeypatch):
    def cross_entropy(*args, inner=train.cross_entropy, **kwargs):
        return inner(*args, **kwargs | {"label_smoothing": 0.2})

    monkeypatch.setattr(train, "cross_entropy", cross_entropy)


def count_targets_twice(monkeypatch):
    def read(self, batch, inner=OrderedWindows.__getitem__):
        inputs, targets = inner(self, batch)
        seen = np.concatenate([inputs[:, 1:], inputs[:, -1:]], axis=1)
        return inputs, np.where(targets == -100, seen, targets)

    monkeypatch.setattr(OrderedWindows, "__getitem__", read)


def never_clip(monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, most: torch.ones(()))


def lose_the_moments_in_a_resume(monkeypatch):
    def put_back(self, inner=train.checkpoint.WholeState.put_back):
        inner(self)
        for optimizer in self.run.optimizers:
            optimizer.state.clear()

    monkeypatch.setattr(train.checkpoint.WholeState, "put_back", put_back)


@pytest.mark.parametrize(
    ("fault", "part", "name"),
    [
        (begin_far_off, sanity.learning_checks, "loss at initialization"),
        (see_the_future, sanity.causality_check, "no look into the future"),
        (cut_off_a_matrix, sanity.gradient_check, "gradients are those of the loss"),
        (cut_off_a_matrix, sanity.update_checks, "each weight moves as its optimizer says"),
        (ask_for_the_input, sanity.text_checks, "targets are the next tokens"),
        (draw_with_replacement, sanity.epoch_check, "an epoch has each sequence once"),
        (count_targets_twice, sanity.coverage_check, "evaluation sees each token once"),
        (smooth_labels_in_evaluation, sanity.evaluation_checks, "evaluation is the mean of -log p"),
        (never_clip, sanity.step_check, "a step is that of its batch"),
        (lose_the_moments_in_a_resume, sanity.resume_check, "a resume is bit for bit"),
    ],
)
def test_sanity_finds_the_fault(fault, part, name, checks, monkeypatch):
    fault(monkeypatch)
    assert checks(part, batch_size=6, warmup_steps=3)[name][0] is False


def test_a_fault_is_no_go(in_process, monkeypatch, capsys):
    smooth_labels_in_evaluation(monkeypatch)
    monkeypatch.setattr(check, "CHECKS", [sanity.causality_check, sanity.evaluation_checks])
    code, facts = in_process()
    assert code == 1 and not facts["sanity"]["ok"]
    assert "NO-GO: evaluation is the mean of -log p\n" in capsys.readouterr().out


@pytest.mark.parametrize("begin", [0, 7])
def test_sanity_finds_validation_text_in_training_wherever_it_begins(begin, checks, monkeypatch):
    def tokens_on_disk(job, split, inner=sanity.tokens_on_disk):
        return inner(job, "train")[begin:1500] if split == "val" else inner(job, split)

    monkeypatch.setattr(sanity, "tokens_on_disk", tokens_on_disk)
    assert checks(sanity.leak_check)["train and validation share no window"][0] is False


def test_the_bugs_of_the_list_apply_to_the_present_code():
    bugs = tomllib.loads((REPO / "tests" / "bugs.toml").read_text())["bug"]
    for bug in bugs:
        assert (REPO / bug["file"]).read_text().count(bug["old"]) == 1, bug["name"]
    assert len(bugs) > 40


# ---- exact ---------------------------------------------------------------------------------------


@pytest.mark.slow  # it starts four processes, each of which imports torch
def test_exact_compares_what_fresh_processes_end_with(in_process):
    code, facts = in_process(only="exact", exact_runs=2, exact_steps=3)
    rows = facts["exact"]["rows"]
    assert list(rows) == ["deterministic", "not deterministic"]
    assert code == 0 and facts["exact"]["ok"]
    assert rows["deterministic"]["distinct"] == 1 and len(rows["deterministic"]["hash"]) == 16


@pytest.mark.parametrize("mode", ["deterministic", "not deterministic"])
def test_only_a_deterministic_process_that_differs_is_exit_1(mode, in_process, monkeypatch):
    def execute(script, words, *, out_dir, **knobs):
        out_dir.mkdir()
        digest = out_dir.name[-1] if out_dir.name.startswith(f"{mode} ") else "same"
        row = {"kind": "event", "event": "saved", "step": check.exact_steps, "sha256": digest}
        (out_dir / "metrics.jsonl").write_text(json.dumps(row))

    monkeypatch.setattr(bench, "execute", execute)
    code, facts = in_process(only="exact")
    assert code == (mode == "deterministic")
    assert facts["exact"]["rows"][mode]["distinct"] == 4


# ---- seeds, and one configuration against another ------------------------------------------------


def one_look(differences):
    return verdicts.verdict_on(differences, every_look=False)


def test_verdicts_of_one_look_follow_from_the_interval():
    assert one_look([0.0, 0.0, 0.0]).word == "identical"
    assert one_look([-0.3, -0.31, -0.29]).word == "better"
    verdict = one_look([0.3, 0.31, 0.29])
    expected = 0.3 - 0.024841, 0.3 + 0.024841
    assert verdict.word == "worse" and (verdict.low, verdict.high) == pytest.approx(
        expected, abs=1e-5
    )
    # half a deviation: the noncentral t has a power of 0.8 at 34 pairs (Cohen 1988, table 2.3)
    verdict = one_look([0.3, -0.1, 0.1])
    assert verdict.word == "not shown" and verdict.needed == 34
    assert str(verdict).startswith(
        "not shown (excludes differences outside -0.3968 to +0.5968; about"
    )
    assert "more than 10,000 seeds" in str(one_look([0.1, -0.1]))


def test_looking_after_each_seed_is_rarely_wrong_and_finds_large_differences():
    rows = luck.power(trials=300)
    false, used, _ = rows[0]
    assert false <= 0.05 and used > 19
    assert rows[1][0] > 0.75 and rows[2][0] > 0.98 and rows[2][1] < 8


@pytest.fixture
def compare(data_dir, tmp_path, quick, capsys):
    """compare(flags, of the other, **knobs of check.py): (exit code, lines of the output)."""

    def run(flags, other, **knobs):
        common = SMALL | {"max_steps": 6, "block_size": 16, "seeds": 2}
        first = arguments(tmp_path / "b", data_dir, **common | flags)
        second = arguments(tmp_path / "b", data_dir, **common | other)
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
    code, lines = compare({"peak_lr": 1.0}, {"peak_lr": 0.01}, seeds=3)
    assert (code, lines[-1]) == (0, "verdict: worse")
    assert len(set(quick)) == len(quick) == 6
    code, lines = compare({"peak_lr": 0.01}, {"peak_lr": 1.0}, seeds=3)
    assert (code, lines[-1]) == (0, "verdict: better")
    assert len(quick) == 6  # the same runs
    found = [line for line in lines if "95% interval" in line]
    assert len(found) == 1 and any("holds for one look" in line for line in lines)
    # seeds are added until a verdict holds
    code, lines = compare({"peak_lr": 1.0}, {"peak_lr": 0.01}, seeds=0)
    assert (code, lines[-1]) == (0, "verdict: worse")
    assert 8 <= len(quick) <= 20  # two runs for each seed, from the fourth on
    code, lines = compare({"peak_lr": 0.01}, {"peak_lr": 0.0101}, seeds=0, max_seeds=3)
    assert lines[-1].startswith("verdict: not shown (excludes no difference yet; ")
    with pytest.raises(BadInput, match="--seeds=1: expected"):
        compare({}, {}, seeds=1)
    shutil.copytree(data_dir / "small", data_dir / "again", dirs_exist_ok=True)
    with pytest.raises(BadInput, match="losses on again and small cannot be compared"):
        compare({}, {"dataset": "again"})


def test_an_import_that_fails_cannot_tell(tmp_path):
    """For git bisect, which would take 1 for "bad": it skips a broken train.py."""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".*", "out", "data", "tests"))
    (copy / "train.py").write_text("def broken(:")
    command = [sys.executable, copy / "check.py", "--against=x", "--equal=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 125 and "SyntaxError" in done.stderr


def test_seeds_are_runs_of_the_real_command(in_process, run_train, quick, capsys):
    knobs = {"max_steps": 8, "eval_interval": 4, "dtype": "float32", "report": "false"}
    _, facts = in_process(only="seeds", seeds=2, seed=5, **knobs)
    runs = facts["seeds"]["runs"]
    assert list(runs) == ["seed 5", "seed 6", "mean", "deviation"]
    first, second, middle, deviation = runs.values()
    flags = [
        f"--{key}={value}" for key, value in (FLAGS | SMALL | knobs).items() if hasattr(train, key)
    ]
    losses = [row["val_loss"] for row in run_train("own", *flags, "--seed=6").rows("eval")]
    assert second["loss"] == losses[-1] != first["loss"]
    for column in ("loss", "seconds"):
        one, other = first[column], second[column]
        assert middle[column] == pytest.approx((one + other) / 2)
        assert deviation[column] == pytest.approx(abs(one - other) / math.sqrt(2))
    assert f"{second['loss']:.4f}  " in capsys.readouterr().out

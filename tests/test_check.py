"""check.py lets sound loops pass, finds what it looks for, and says what to do; --against gives
verdicts that hold at any look. The whole lists of bugs and of sound forks: python -m pytest -m slow."""

import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

import bugs  # noqa: E402

import check  # noqa: E402
import plumbing  # noqa: E402
import train  # noqa: E402
from checks import lines, plain, probes, twin, verdicts  # noqa: E402

BUGS = {bug["name"]: bug for bug in bugs.cases_of(REPO / "tests" / "bugs.toml")}
SOUND = {case["name"]: case for case in bugs.cases_of(REPO / "tests" / "sound")}
# A few of each list, which the quick suite runs, and the lines that they fail
QUICK_BUGS = {
    "attention: a token sees the rest of its chunk of 8": {"causal", "masked"},
    "step: a NaN is set to zero, and the step taken": {"steps"},
    "evaluation: NaN": {"evaluations"},
    "own data: the split is drawn without a seed": {"batches", "pieces"},
    "own step: history in a global, which a resume loses": {"evaluations", "weights", "resume"},
}
QUICK_SOUND = {"optimizers_lion": [], "masked_language_model": ["targets"], "regression_dict": []}
# What a run's clock says is compared with nothing: test_loop.py looks at it
MISSED = {"rows: tokens_per_sec of one micro-batch", "rows: step_ms of a whole lap"}
KINDS = """attention positions norms experts losses distillation adapters optimizers schedules data
masked regression heads depth""".split()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    """A folder with a small text as a dataset, a checkpoint on it, and a copy of the code."""
    return bugs.made_dataset(tmp_path_factory.mktemp("check"))


@pytest.fixture
def run_check(scratch, tmp_path):
    """run_check(*words) -> (exit code, output) of check.py with a small model."""

    def run(*words):
        flags = [*bugs.FLAGS, f"--data_dir={scratch}/data", *words]
        return bugs.python(scratch / "code", "check.py", *flags, cwd=tmp_path)

    return run


# ---- go, or no go? -------------------------------------------------------------------------------


def test_a_healthy_loop_is_go_and_nothing_is_left(run_check, scratch, tmp_path):
    code, output = run_check("--dropout=0.1", f"--init_from={scratch}/other.pt")
    names = re.findall(r"^✓ (\w+): ", output, re.MULTILINE)
    assert {*names} == lines.LINES.keys() - {"seeds"}, output
    assert code == 0 and output.splitlines()[-1] == "GO; 1 not asked: seeds"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", QUICK_BUGS)
def test_a_bug_is_found_by_the_lines_that_name_it(name, scratch):
    code, found, _ = bugs.judged(BUGS[name], scratch)
    assert code == 1 and {*found} == QUICK_BUGS[name]


@pytest.mark.parametrize("name", QUICK_SOUND)
def test_a_sound_fork_is_go_but_for_the_line_that_it_changes(name, scratch):
    code, found, _ = bugs.judged(SOUND[name], scratch)
    assert found == QUICK_SOUND[name] and code == len(found)


def test_a_fault_says_what_was_found_and_what_to_type(run_check, tmp_path):
    """A wrong mask, and a function that raises an error: both can be accepted by name."""
    (tmp_path / "unmasked.py").write_text(
        "import torch\nimport model\nimport train\n"
        "model.visible = lambda tokens, n: torch.ones(n, tokens.size(1), dtype=torch.bool)\n"
        "train.generate = lambda *_, **how: 1 / 0\n"
    )
    code, output = run_check("unmasked.py")
    last = output.splitlines()[-1]
    assert code == 1 and last.startswith("3 NO-GO: causal, masked, sampling; "), output
    assert "not asked" in last and "ZeroDivisionError: " in output
    words = r"✗ causal: a prediction depends on no later token.* \| .* logits by \S+; limit \S+\n"
    words += r"    Look at the attention mask.*\n    If it is so by design: --accept=causal\n"
    assert re.search(words, output)
    code, output = run_check("unmasked.py", "--accept=causal,masked,sampling")
    assert code == 0 and "GO; 3 accepted: causal, sampling, masked; " in output


def test_what_cannot_be_accepted_is_refused(run_check):
    code, output = run_check("--accept=future")
    assert code == 2
    assert "--accept=future: expected names of lines: overfits, warnings, given, " in output
    code, output = run_check("--n_emb=3")
    assert code == 2 and "did you mean n_embd?" in output


def test_an_error_of_the_loop_is_a_fault_that_no_accept_allows(run_check, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import train\ntrain.average_weights = lambda *_: 1 / 0\n")
    code, output = run_check(script, "--accept=overfits,windows,steps")
    assert code == 1
    assert "✗✗ overfits: " in output and "ZeroDivisionError: " in output


def test_a_copy_of_train_py_is_judged_itself(run_check, tmp_path):
    text = (REPO / "train.py").read_text(encoding="utf-8")
    old = "return peak_lr * (step + 1) / warmup"
    assert text.count(old) == 1
    (tmp_path / "mine.py").write_text(text.replace(old, "return peak_lr"))
    code, output = run_check("mine.py")
    assert code == 1 and "step 1: lr is 0.01 in this run, 0.00333" in output, output


def test_a_knob_may_act_later_and_a_batch_may_have_no_target(run_check, tmp_path):
    (tmp_path / "later.py").write_text("""import train
train.knob("since", 20, "the step from which the embedding learns")
class Masked(train.ShuffledWindows):
    def __getitem__(self, place):
        inputs, targets = super().__getitem__(place)
        targets[:] = -100 if place[0] == 48 else targets
        return inputs, targets
def train_step(run, *batch, inner=train.train_step):
    run.model.embedding.requires_grad_(run.state["step"] >= train.since)
    return inner(run, *batch)
train.ShuffledWindows, train.train_step = Masked, train_step
""")
    code, output = run_check("later.py", "--since=10")
    assert code == 0 and "✓ steps" in output and "✓ knobs" in output, output


# ---- what is compared ----------------------------------------------------------------------------


def test_the_first_number_that_differs_is_named():
    expected = {("train", 1): {"loss": 2.0, "lr": 0.1}, ("train", 3): {"loss": 1.0}}
    found = {("train", 1): {"loss": 2.0, "lr": 0.1}, ("train", 3): {"loss": 1.0 + 1e-8}}
    assert twin.compared(expected, found, 1e-6)[0] == lines.FINE
    mark, words = twin.compared(expected, found, 1e-9)
    assert mark == lines.FAULT
    assert words.startswith("step 3, where check.py makes the gradient NaN: loss is 1.00000001 in")
    assert "loss is missing in this run" in twin.compared(expected, {}, 1)[1]
    assert twin.compared({}, found, 1)[0] == lines.ABSENT
    expected = {("eval", 0): {"val_loss": 2.0}}  # what is not finite is never accepted
    for logged in (None, math.nan, math.inf):
        assert twin.compared(expected, {("eval", 0): {"val_loss": logged}}, 1)[0] == lines.NEVER
    expected[("eval", 0)] = {"val_loss": math.nan}
    assert twin.compared(expected, {("eval", 0): {"val_loss": None}}, 1)[0] == lines.FINE


def test_every_line_has_words_and_every_check_a_line():
    names = [name for names in probes.CHECKS.values() for name in names.split()]
    assert {*names} == lines.LINES.keys() and len(names) == len({*names})
    assert all(map(all, lines.LINES.values()))


# ---- the plain loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", train.CHOICES["schedule"])
def test_the_plain_loop_knows_every_schedule_also_past_its_end(schedule):
    """Its rates are those of train.py, which test_loop.py compares with a formula."""
    words = [f"--schedule={schedule}", "--peak_lr=1", "--min_lr=0.1", "--step_size=250"]
    words += ["--gamma=0.5", "--warmup_steps=100", "--decay_steps=1100"]
    with plumbing.configured(vars(train), argv=words) as k:
        for step in (0, 49, 350, 850, 1100, 1500):
            assert plain.lr_at(SimpleNamespace(**k), step) == pytest.approx(train.lr_at(step)), step
    assert {*twin.SCHEDULES} == {*train.CHOICES["schedule"]}
    assert {*twin.OPTIMIZERS} == {*train.CHOICES["optimizer"]}


def test_the_plain_windows_have_each_token_once():
    k = SimpleNamespace(seed=1, block_size=8, batch_size=3, accum_steps=1)
    k.device, k.eval_tokens = "cpu", 0
    tokens = np.arange(101, dtype=np.uint16)
    inputs, targets = plain.validation_windows(k, tokens)
    assert sorted(targets[targets != -100].tolist()) == list(range(1, 101))
    assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)
    k.eval_tokens = 17
    assert len(plain.validation_windows(k, tokens)[0]) == 3
    batches = plain.training_batches(k, tokens)
    seen = torch.cat([torch.cat([x for x, _ in next(batches)]) for _ in range(4)])
    assert len(seen) == 12 and len({*seen[:11, 0].tolist()}) == 11  # an epoch has eleven windows


# ---- better, or luck? ----------------------------------------------------------------------------


def test_the_interval_ends_where_the_integral_over_its_priors_is_20():
    """Of the likelihood ratio of t: a normal prior of the effect, by sampling it."""
    values = np.array([0.5, 1.4, 0.2, 0.9, 0.7, 1.1])
    effects = np.random.default_rng(0).normal(0, math.sqrt(verdicts.PRIOR), 1000)
    scales = np.exp(np.linspace(-6, 6, 2001))  # 1 / scale is the right Haar measure
    weights = np.gradient(scales) / scales

    def likelihood(effect, middle):
        z = (values[:, None] - middle - effect * scales) / scales
        return (np.exp(-(z**2).sum(0) / 2) / scales ** len(values) * weights).sum()

    for bound in verdicts.interval(values.tolist()):
        ratio = np.mean([likelihood(e, bound) for e in effects]) / likelihood(0.0, bound)
        assert ratio == pytest.approx(1 / verdicts.SHARE, rel=0.15)


def test_looking_after_each_seed_is_rarely_wrong_and_finds_large_differences():
    rng = np.random.default_rng(1)
    found = {}
    for shift in (0.0, 2.0):
        words = []
        for _ in range(100):
            values = (rng.normal(size=20) + shift).tolist()
            looks = [verdicts.verdict_on(values[:n]) for n in range(2, 21)]
            words.append(next((word for word in looks if word != "not shown"), "not shown"))
        found[shift] = words
    assert found[0.0].count("not shown") >= 93 and found[2.0].count("worse") >= 98


LOSSES = {  # by seed, of two configurations
    "steady": [1.50, 1.41, 1.59, 1.47, 1.53, 1.50],
    "worse": [1.61, 1.50, 1.71, 1.57, 1.63, 1.61],
    "noise": [1.45, 1.50, 1.51, 1.52, 1.40, 1.55],
}


@pytest.mark.parametrize(
    "first, other, rows, verdict",
    [
        ("steady", "steady", 2, "identical"),
        ("worse", "steady", 4, "worse"),
        ("steady", "worse", 4, "better"),
        ("noise", "steady", 6, "not shown"),
    ],
)
def test_runs_end_when_a_verdict_holds(first, other, rows, verdict, monkeypatch, capsys):
    def race(script, words, seed):
        return LOSSES[words][seed - train.seed], "data"

    monkeypatch.setattr(check, "race", race)
    monkeypatch.setattr(check, "seeds", 6)
    check.compare(("", first), ("", other))
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == f"verdict: {verdict}"
    assert len(re.findall(r"^\d+ ", output, re.MULTILINE)) == rows


@pytest.mark.slow
def test_against_a_script_on_either_side_trains_nothing_twice(scratch, tmp_path):
    common = f"--data_dir={scratch}/data {' '.join(bugs.FLAGS)} --max_steps=6 --warmup_steps=0"
    script = "import train\ntrain.peak_lr = 1.0\nif __name__ == '__main__':\n    train.main()\n"
    (scratch / "code" / "hot.py").write_text(script)
    hot = f"{scratch}/code/hot.py " + common.replace("--peak_lr=1e-2", "")
    sides = {"identical": (common, common), "worse": (hot, common), "better": (common, hot)}
    for verdict, (first, other) in sides.items():
        words = [*first.split(), f"--against={other}", "--seeds=4"]
        code, output = bugs.python(scratch / "code", "check.py", *words, cwd=tmp_path)
        assert code == 0 and output.splitlines()[-1] == f"verdict: {verdict}", output
    assert len([*(tmp_path / "out" / "seeds").rglob("seed_*")]) == 8


# ---- the same bits? ------------------------------------------------------------------------------


@pytest.mark.slow
def test_portable_compares_with_the_record(scratch, tmp_path, monkeypatch):
    shutil.copytree(scratch / "code", tmp_path, dirs_exist_ok=True)
    shutil.copytree(REPO / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    flags = f"--data_dir={scratch}/data --dataset=small --max_steps=4 --save_interval=2".split()
    flags += ["--warmup_steps=0"]
    words = ["train.py", *check.PORTABLE_FLAGS, *flags]
    check.trained(tmp_path / "records" / "portable", *words, **check.PORTABLE)
    for more, expected in (([], 0), (["--seed=1"], 1)):
        code, output = bugs.python(tmp_path, "check.py", "--only=portable", *flags, *more)
        assert code == expected and output.startswith("AVX2 kernels, "), output


# ---- the whole lists -----------------------------------------------------------------------------


def test_the_bugs_apply_and_the_forks_are_of_each_kind():
    for bug in BUGS.values():
        if "file" in bug:
            assert (REPO / bug["file"]).read_text().count(bug["old"]) == 1, bug["name"]
    assert len(BUGS) >= 60 and len(SOUND) >= 40
    for kind in KINDS:
        assert sum(name.startswith(f"{kind}_") for name in SOUND) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_found(name, scratch):
    code, _, _ = bugs.judged(BUGS[name], scratch)
    assert code == (name not in MISSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_each_sound_fork_passes(name, scratch):
    code, found, _ = bugs.judged(SOUND[name], scratch)
    if code:
        assert len(found) == 1
        code, _, _ = bugs.judged(SOUND[name], scratch, f"--accept={found[0]}")
    assert code == 0

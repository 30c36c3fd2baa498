"""check.py finds what it looks for, in the run, the machine and the result, and nothing else."""

import dataclasses
import functools
import json
import math
import re
import shutil
import tomllib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, apply_patch, copy_of_repository, first, run_python
from helpers import BENCH_FLAGS, bench_arguments

import bench
import check
import model
import train
from checks import probes, processes, twin, verdicts
from checks.lines import LINES
from plumbing import dropout, files
from plumbing.cli import BadInput

pytestmark = pytest.mark.usefixtures("small_products")
SMALL = {"n_layer": 1, "n_embd": 32, "batch_size": 8, "dtype": "float32"}
# The checks, as docs/trouble.md names and explains them.
TROUBLE = (REPO / "docs" / "trouble.md").read_text(encoding="utf-8")
LIST = TROUBLE.partition("Each line says what it tests")[2].partition("\n## ")[0]
PAGE = set("; ".join(re.findall(r"^- \*\*(.*)\*\*", LIST, re.MULTILINE)).split("; "))
OF_TEXT = set("causal sampling positions loss gradients text targets windows leak coverage".split())
NOT_ALWAYS = {"given", "dropout"}  # lines of runs that begin at a file, or have dropout
BEGINNING, FUTURE, LOSS, WINDOWS = "start causal loss windows".split()
STEP, EVALUATION = "steps evaluations".split()


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
    assert PAGE == LINES.keys() and len(PAGE) > 20
    found = facts["sanity"]["checks"]
    assert found.keys() == LINES.keys() - {"given"}
    assert [name for name in found if found[name]["mark"] != "✓"] == ["dropout"]
    assert facts["sanity"]["ok"] and "\n  GO\n" in stdout and "✗" not in stdout
    (section,) = re.findall(r'docs/trouble.md, "(.*)",', stdout)
    assert f"\n## {section}\n" in TROUBLE and LIST in TROUBLE.partition(f"## {section}\n")[2]
    for name in found:  # a line each
        assert [line for line in stdout.splitlines() if line[4:].startswith(f"{name}: ")]


def test_any_model_and_data_can_be_checked(tmp_path, train_as_it_was, capsys):
    """Images: no text, no tokens, no FLOPs that the model tells. What does not apply is n/a."""
    flags = ["--n_embd=4", "--batch_size=16", "--device=cpu", f"--out_dir={tmp_path}"]
    assert check.main([str(REPO / "examples/images.py"), *flags]) == 0
    assert "\n  GO\n" in capsys.readouterr().out
    found = json.loads((tmp_path / "check.json").read_text())["sanity"]["checks"]
    absent = {name for name, each in found.items() if each["mark"] == "–"}
    assert PAGE - found.keys() | absent == OF_TEXT | NOT_ALWAYS | {"flops", "data checks"}


def changed(owner, name, change):
    """A fault: where `owner` has function(...), it has change(function, ...)."""

    def fault(monkeypatch):
        inner = getattr(owner, name)
        edited = functools.partial(change, inner)
        edited.__module__ = inner.__module__  # not a script's own function
        monkeypatch.setattr(owner, name, edited)

    return fault


def rows_changed(change):
    """A fault: the rows of training data are change(inputs, targets)."""

    def fault(monkeypatch, inner=train.ShuffledWindows.__getitem__):
        rows = lambda data, batch: change(*inner(data, batch))  # noqa: E731
        monkeypatch.setattr(train.ShuffledWindows, "__getitem__", rows)

    return fault


def begin_far_off(build_model, *args):
    built = build_model(*args)
    built.head.weight.data.mul_(50)
    return built


def seeded_by(seed):
    return changed(train, "build_model", lambda inner, *args: (seed(), inner(*args))[1])


def cut_off_a_matrix(monkeypatch):
    forward = model.MLP.forward
    monkeypatch.setattr(model.MLP, "forward", lambda mlp, x: forward(mlp, x.detach()))


def look_back_in_the_mlp(monkeypatch):  # no cache has what it sees there
    forward, pad = model.MLP.forward, (0, 0, 1, -1)
    monkeypatch.setattr(model.MLP, "forward", lambda mlp, x: forward(mlp, x + F.pad(x, pad)))


def stay_in_the_epoch(monkeypatch):
    starts = train.ShuffledWindows.starts
    monkeypatch.setattr(train.ShuffledWindows, "starts", lambda data, _: starts(data, 0))


def sum_seed_and_epoch(monkeypatch, starts=train.ShuffledWindows.starts):
    def summed(windows, epoch):  # epoch 1 of a seed is epoch 0 of the next
        other = train.ShuffledWindows(windows.tokens, windows.block_size, windows.seed + epoch)
        return starts(other, 0)

    monkeypatch.setattr(train.ShuffledWindows, "starts", summed)


def evaluate_three_batches(sum_losses, run):
    length = train.block_size
    few = run.val_data.tokens[: 3 * run.state["micro_batch"] * length + 1]
    return sum_losses(dataclasses.replace(run, val_data=train.data.OrderedWindows(few, length)))


def lose_the_moments(restore, run, saved):
    restore(run, saved)
    for optimizer in run.optimizers:
        optimizer.state.clear()


def worse_in_evaluation(build_model, *args):
    built = build_model(*args)

    def forward(*args, inner=built.forward, **options):
        out = inner(*args, **options)
        return (1.01 * out[0], out[1]) if type(out) is tuple else out

    built.forward = forward
    return built


UNMASKED = changed(
    model, "causal_attention", lambda _, q, k, v, *rest: F.scaled_dot_product_attention(q, k, v)
)
UNCLIPPED = changed(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.ones(()))
RATE_NEVER_FALLS = changed(
    train,
    "count_evaluation",
    lambda inner, n, state: (inner(n, state), state.update(lr_factor=1))[0],
)
PATIENT = changed(
    train, "count_evaluation", lambda inner, *args: (setattr(train, "patience", 4), inner(*args))[1]
)
RELATIVE = changed(
    train,
    "count_evaluation",
    lambda inner, numbers, state: (
        setattr(train, "min_delta", 0.05 * min(state["score_to_beat"], 9.0)),
        inner(numbers, state),
    )[1],
)
SIGN_LOST = changed(
    train,
    "count_evaluation",
    lambda inner, numbers, state: (
        setattr(train, "best_metric", train.best_metric.removeprefix("-")),
        inner(numbers, state),
    )[1],
)
NO_DROPOUT = changed(
    train, "build_model", lambda inner, knobs, *rest: inner({**knobs, "dropout": 0.0}, *rest)
)
TOP_K_OFF = changed(
    train, "generate", lambda inner, *args, top_k=0, **more: inner(*args, top_k=top_k + 1, **more)
)
NOT_RESCALED = changed(dropout, "dropped", lambda inner, x, share: inner(x, share) * (1 - share))
MASK_IGNORED = changed(train, "count_targets", lambda _, targets: torch.tensor(targets.numel()))
FAULTS = [
    (changed(train, "build_model", begin_far_off), probes.learning_checks, BEGINNING),
    (UNMASKED, probes.causal_check, FUTURE),
    (look_back_in_the_mlp, probes.sampling_check, "sampling"),
    (cut_off_a_matrix, probes.gradients_check, "gradients"),
    (rows_changed(lambda x, y: (x, x)), probes.data_checks, "targets"),
    (rows_changed(lambda x, y: (x, np.roll(x, -1, axis=1))), probes.data_checks, WINDOWS),
    (stay_in_the_epoch, probes.data_checks, WINDOWS),
    (sum_seed_and_epoch, probes.data_checks, WINDOWS),
    (seeded_by(lambda: torch.manual_seed(1)), probes.data_checks, "seeds"),
    (seeded_by(torch.seed), twin.twin_checks, STEP),
    (changed(train, "sum_losses", evaluate_three_batches), twin.twin_checks, EVALUATION),
    (changed(train, "build_model", worse_in_evaluation), probes.loss_check, LOSS),
    (UNCLIPPED, twin.twin_checks, STEP),
    (changed(train.checkpoint, "restore", lose_the_moments), twin.twin_checks, STEP),
    (RATE_NEVER_FALLS, twin.twin_checks, STEP),
    (PATIENT, twin.twin_checks, STEP),
    (MASK_IGNORED, twin.twin_checks, STEP),
    (RELATIVE, probes.decisions_check, "decisions"),
    (SIGN_LOST, probes.decisions_check, "decisions"),
    (NO_DROPOUT, probes.knobs_check, "knobs"),
    (TOP_K_OFF, probes.sampling_check, "sampling"),
    (NOT_RESCALED, probes.dropout_check, "dropout"),
]


@pytest.mark.parametrize(("fault", "part", "name"), FAULTS)
def test_sanity_finds_the_fault(fault, part, name, checks, monkeypatch):
    fault(monkeypatch)
    knobs = {"batch_size": 6, "warmup_steps": 3, "dropout": 0.1}
    assert checks(part, **knobs)[name][0] is False


def test_a_deviation_is_accepted_by_name_and_a_crash_is_not(in_process, monkeypatch, capsys):
    monkeypatch.setattr(check, "CHECKS", [probes.causal_check, twin.twin_checks, len])
    UNMASKED(monkeypatch)
    assert in_process()[0] == 1
    code, facts = in_process(accept="causal,weights")
    output = capsys.readouterr().out
    assert code == 0 and "GO, 1 accepted: causal; not run because of an error: len\n" in output
    assert "  --accept=weights had no effect: no such fault was found\n" in output
    assert facts["sanity"]["checks"]["causal"]["mark"] == "accepted"
    monkeypatch.setattr(train, "clip", lambda *_: 1 / 0)
    assert in_process(accept="causal,steps,evaluations,weights")[0] == 1
    with pytest.raises(BadInput, match="--accept=future: expected names of lines: overfits, "):
        in_process(accept="future")


def test_a_fault_is_no_go_and_its_first_number_is_printed(in_process, monkeypatch, capsys):
    changed(train, "sum_losses", evaluate_three_batches)(monkeypatch)
    monkeypatch.setattr(check, "CHECKS", [probes.causal_check, twin.twin_checks])
    code, facts = in_process()
    output = capsys.readouterr().out
    assert code == 1 and not facts["sanity"]["ok"] and f"NO-GO: {EVALUATION}\n" in output
    words = rf"✗ {EVALUATION}: .*: step 0: val_loss is (\S+) in the log, (\S+) in plain.py\n"
    words += f"      look at evaluate.*; to accept it as intended: --accept={EVALUATION}\n"
    logged, expected = map(float, re.search(words, output).groups())
    assert logged != expected
    assert "y is missing in the log" in twin.compare({(8, "x"): {"y": 1}}, {}, 0)[1]


@pytest.mark.parametrize("begin", [0, 7])
def test_sanity_finds_validation_text_in_training_wherever_it_begins(begin, checks, monkeypatch):
    def open_dataset(saved, inner=train.open_dataset):
        train_data, _, facts = inner(saved)
        tokens = train_data.tokens[begin:1500]
        return train_data, train.data.OrderedWindows(tokens, train.block_size), facts

    monkeypatch.setattr(train, "open_dataset", open_dataset)
    assert checks(probes.data_checks)["leak"][0] is False


def test_what_a_probe_cannot_ask_is_not_a_fault_but_an_error_of_the_loop_is(checks, monkeypatch):
    def fail(*args, **options):
        raise ValueError("one\nline")

    monkeypatch.setattr(train, "generate", fail)
    assert checks(probes.sampling_check) == {"sampling": ("error", "ValueError: one line")}
    monkeypatch.setattr(train, "clip", fail)
    assert checks(twin.twin_checks) == {"twin checks": (False, "ValueError: one line")}


def test_where_bfloat16_is_emulated_muon_takes_the_steps_of_torchs_own(checks, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    found = checks(twin.twin_checks, optimizer="muon")
    assert found["weights"][1].endswith("is off by 0 of the distance it moved")


def test_a_resume_that_compared_nothing_is_not_asked(checks, monkeypatch):
    monkeypatch.setattr(train, "log_two_more_steps", lambda *args: None)
    fine, _ = checks(twin.twin_checks).get("resume", (None, ""))
    assert fine is None


@pytest.mark.slow
@pytest.mark.parametrize("name", "shakespeare shakespeare_plain shakespeare_fast".split())
def test_a_configuration_of_the_repository_is_go(name, tmp_path, data_dir):
    where = f"--data_dir={data_dir}", "--dataset=small", f"--out_dir={tmp_path}"
    done = run_python("check.py", f"config/{name}.py", *where)
    assert done.stdout.splitlines()[-3] == "  GO", done.stdout + done.stderr


SOUND = "drop_path residual_scalars second_head switch from_checkpoint".split()


@pytest.mark.parametrize("name", first(2, SOUND))
def test_a_sound_fork_is_go(name, data_dir, tmp_path):
    """In a process of its own, because a script may change modules for good."""
    flags = bench_arguments(tmp_path / "b", data_dir, **SMALL)
    done = run_python("check.py", f"tests/sound/{name}.py", *flags)
    printed = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in printed, printed


def test_the_page_counts_the_bugs_and_the_sound_loops_of_the_lists():
    bugs = tomllib.loads((REPO / "tests" / "bugs.toml").read_text())["bug"]
    loops = (REPO / "tests" / "sound.txt").read_text().splitlines()
    page = (REPO / "docs" / "measured.md").read_text(encoding="utf-8")
    assert f"{len(bugs)} bugs" in page and f"{len(loops)} loops without a bug" in page


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

    def execute(*args, inner=processes.execute, **knobs):
        inner(*args, **knobs, seed=next(seeds))

    monkeypatch.setattr(processes, "execute", execute)
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


@pytest.mark.parametrize("comparisons, least", [(1, 4), (10, 5), (200, 7)])
def test_the_least_number_of_pairs_that_can_show_anything(comparisons, least):
    assert verdicts.least_pairs(comparisons) == least
    apart = [-1.0 - 1e-9 * n for n in range(least)]  # as good as without luck
    assert verdicts.verdict_on(apart, comparisons) == "better"
    assert verdicts.verdict_on(apart[1:], comparisons) == "not shown"


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
    (few,) = [line for line in lines if "pairs" in line]
    assert few == "  2 pairs of runs cannot show a difference, however large: --seeds=4"
    assert [folder.name for folder in quick] == ["seed_1337", "seed_1338"]
    facts = files.read_json(quick[0] / "run.json")
    facts["run"]["code"]["plumbing/gone.py"] = "edited"
    files.write_json(quick[0] / "run.json", facts)
    compare({}, {})
    assert [folder.name for folder in quick[2:]] == ["seed_1337_2"]  # other code is another run


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
    with pytest.raises(BadInput, match="losses on small and again cannot be compared"):
        compare({}, {"dataset": "again"})


def test_equal_names_the_first_row_that_differs(compare, run_train):
    code, lines = compare({}, {"warmup_steps": 5, "max_steps": 5}, equal="true")
    assert code == 1 and lines[-2] == "compared with --against: the bits differ"
    assert re.fullmatch(r"  step 1: lr \S+ in the reference, \S+ here", lines[-1])
    code, lines = compare({}, {"log_interval": 3}, equal="true")
    assert code == 0 and lines[-1] == "compared with --against: the same bits"
    assert check.main(["--against=x", "--equal=true", "--no_such_flag=1"]) == 125


def test_an_import_that_fails_cannot_tell(tmp_path):
    """For git bisect, which would take 1 for "bad": it skips a broken train.py."""
    copy = copy_of_repository(tmp_path / "repo")
    (copy / "train.py").write_text("def broken(:")
    done = run_python(copy / "check.py", "--against=x", "--equal=true")
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

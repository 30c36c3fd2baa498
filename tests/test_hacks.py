"""Safe to fork: ten hacks of a Friday evening, each a patch no longer than nanoGPT needs for the same,
and each run, killed and resumed, comes to the bits of one that was never stopped."""

import dataclasses
import functools
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPO, arguments, stop_at

from prepare_data import prepare

STEPS = 24
RUN = (f"--max_steps={STEPS}", "--save_interval=5", "--eval_interval=8", "--keep_last=9")
RUN += (
    "--audit_interval=7",
)  # a step repeated from a copy of everything, also of what a hack adds


@dataclasses.dataclass
class Hack:
    """tests/hacks/NAME.patch. lines: what the same hack adds to nanoGPT."""

    lines: int
    flags: tuple = ()
    changes_weights: bool = True


HACKS = {
    "schedule": Hack(3, ("--schedule=inverse_sqrt",)),
    "z_loss": Hack(2),
    "lion": Hack(23, ("--optimizer=lion",)),
    "growing_batch": Hack(2),
    "learned_positions": Hack(9),
    "weight_norm": Hack(4, changes_weights=False),
    "ema_and_raw": Hack(15, ("--ema_decay=0.9",), changes_weights=False),
    "gradient_noise": Hack(4),
    "two_texts": Hack(10),
    "gru": Hack(33),
}
BAD_FIRST_LOSS = """
import math
def forward_backward(model, run, *batch, inner=train.forward_backward):
    return inner(model, run, *batch) * (math.nan if run.state["step"] == 0 else 1)
train.forward_backward = forward_backward
"""
IN_EVERY_RUN = ("lion", "two_texts")  # the others take a minute together


@pytest.fixture
def fork(tmp_path):
    """fork(name) -> the folder of a copy of this repository with tests/hacks/NAME.patch applied."""

    def make(name):
        folder = copy_of_repository(tmp_path / "fork")
        apply_patch((REPO / "tests" / "hacks" / f"{name}.patch").read_text(), folder)
        return folder

    return make


def copy_of_repository(folder):
    folder.mkdir()
    for file in REPO.glob("*.py"):
        shutil.copy(file, folder)
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "plumbing", folder / "plumbing", ignore=caches)
    return folder


def apply_patch(patch, folder):
    """Applies a unified diff. Each of its hunks is looked up by its lines, wherever they stand by now."""
    for part in patch.split("--- a/")[1:]:
        name, _, rest = part.partition("\n")
        text = (folder / name).read_text()
        for hunk in rest.split("\n@@ ")[1:]:
            lines = [line for line in hunk.split("\n")[1:] if line]
            before = "\n".join(line[1:] for line in lines if line[0] in " -")
            after = "\n".join(line[1:] for line in lines if line[0] in " +")
            assert text.count(f"\n{before}\n") == 1, f"{name} has {text.count(before)} x {before}"
            text = text.replace(f"\n{before}\n", f"\n{after}\n")
        (folder / name).write_text(text)


def added_lines(patch):
    return sum(line[:1] == "+" and line[:4] != "+++ " for line in patch.splitlines())


def every(names):
    """The names, all but two of them marked as slow."""
    slow = pytest.mark.slow
    return [name if name in IN_EVERY_RUN else pytest.param(name, marks=slow) for name in names]


@pytest.fixture(autouse=True)
def second_text(data_dir):
    """A dataset `second` of the same characters as `small`, in another order."""
    if not (data_dir / "second").exists():
        (data_dir / "second.txt").write_text((data_dir / "small.txt").read_text()[::-1])
        prepare("second", data_dir, input=str(data_dir / "second.txt"), say=lambda *words: None)


@pytest.fixture(scope="module")
def plain_run(train_in, tmp_path_factory):
    """plain_run(*flags) -> Done: the run of the repository itself; each is made once."""
    return functools.cache(
        lambda *flags: train_in(tmp_path_factory.mktemp("p"), "run", *RUN, *flags)
    )


def losses(done):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in done.rows("train")]


# ---- the ten -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_applies_and_is_no_longer_than_in_nanogpt(name, fork):
    fork(name)
    patch = (REPO / "tests" / "hacks" / f"{name}.patch").read_text()
    assert 0 < added_lines(patch) <= HACKS[name].lines


@pytest.mark.parametrize("name", every(HACKS))
def test_a_hacked_run_is_killed_and_resumes_bit_for_bit(name, fork, run_train, plain_run):
    hack = HACKS[name]
    run_fork = functools.partial(run_train, repo=fork(name))
    flags = RUN + hack.flags

    whole = run_fork("whole", *flags)
    assert whole.returncode == 0, whole.stderr
    assert run_fork("run", *flags, before=stop_at(18, "SIGKILL")).returncode == 137
    resumed = run_fork("run", *flags)
    assert resumed.returncode == 0, resumed.stderr

    (event,) = [row for row in resumed.rows("event") if row["event"] == "resume"]
    assert event["step"] >= 10, "resumed from a checkpoint, not from the start"
    assert resumed.fingerprint(STEPS) == whole.fingerprint(STEPS)
    assert losses(resumed) == losses(whole)
    assert "audit" not in {row["event"] for row in whole.rows("event")}

    plain = plain_run(*(hack.flags if not hack.changes_weights else ()))
    same = plain.fingerprint(STEPS)["model"] == whole.fingerprint(STEPS)["model"]
    assert same != hack.changes_weights, "the hack does what it is for, and nothing else"


# ---- what they are for ---------------------------------------------------------------------------


def test_a_skipped_first_step_makes_no_state_in_an_optimizer_written_by_hand(fork, run_train):
    run_fork = functools.partial(run_train, repo=fork("lion"), before=BAD_FIRST_LOSS)
    flags = ("--optimizer=lion", "--warmup_steps=0")
    states = []
    for steps in (1, 2):
        done = run_fork("run", *flags, f"--max_steps={steps}")
        states += torch.load(done.checkpoint(steps), weights_only=True)["optimizer"]
    assert [row["skipped"] for row in done.rows("train")] == [1, 0]
    skipped, taken = states
    assert skipped["state"] == {} and taken["state"][0]["updates"] == 1
    assert [group["updates"] for group in skipped["param_groups"]] == [0, 0]
    assert [group["updates"] for group in taken["param_groups"]] == [1, 1]


def test_one_more_number_is_a_field_a_column_and_a_line_of_the_report(fork, run_train):
    done = run_train("run", "--report=true", repo=fork("weight_norm"))
    assert all(row["weight_norm"] > 0 for row in done.rows("train"))
    (header,) = [line for line in done.stdout.splitlines() if line.startswith("step/total")]
    assert "weight_norm" in header
    assert "weight_norm" in (done.out_dir / "report.md").read_text()


def test_the_averaged_and_the_raw_weights_are_both_evaluated(fork, run_train):
    done = run_train("run", "--ema_decay=0.9", repo=fork("ema_and_raw"))
    first, last = done.rows("eval")
    assert first["val_loss"] == first["raw_val_loss"] and last["val_loss"] != last["raw_val_loss"]
    assert f"raw_val_loss {last['raw_val_loss']:.4f}" in done.stdout


def test_a_wrong_second_text_gets_a_clear_line(fork, run_train, data_dir, tmp_path):
    folder = fork("two_texts")
    alone = tmp_path / "data"
    shutil.copytree(data_dir / "small", alone / "small")
    missing = run_train("missing", f"--data_dir={alone}", repo=folder)
    assert missing.returncode == 2 and not missing.out_dir.exists()
    (line,) = missing.stderr.splitlines()
    assert "second" in line

    text = str(data_dir / "second.txt")
    prepare("second", alone, input=text, tokenizer="byte", say=lambda *words: None)
    other = run_train("other", f"--data_dir={alone}", repo=folder)
    assert other.returncode == 1
    (line,) = other.stderr.splitlines()
    assert "vocabulary" in line


@pytest.mark.slow
def test_another_module_is_sampled_by_sample_py_too(fork, run_train):
    folder = fork("gru")
    done = run_train("run", repo=folder)
    assert [row for row in done.rows("event") if row["event"] == "sample"]
    command = [sys.executable, folder / "sample.py", done.out_dir, "--max_new_tokens=20"]
    sampled = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert sampled.returncode == 0, sampled.stderr
    assert len(sampled.stdout.strip("\n")) > 10


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_gradient_noise_must_be_the_same_on_all_ranks(same, fork, data_dir, tmp_path):
    """Noise that every rank draws for itself makes replicas that differ: the run stops and says so."""
    folder = fork("gradient_noise")
    if not same:
        script = folder / "train.py"
        drawn = "torch.randn(gradient.shape, generator=generator, device=run.device)"
        assert drawn in script.read_text()
        script.write_text(script.read_text().replace(drawn, "torch.randn_like(gradient)"))
    _, *flags = arguments(tmp_path / "out", data_dir, ["--save_interval=5"])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, folder / "train.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if same:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert "embedding.token.weight" in done.stderr

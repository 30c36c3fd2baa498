"""Safe to fork: hacks of a Friday evening, each a patch about as long as nanoGPT needs for the
same, and each run, killed and resumed, comes to the bits of one that was never stopped."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from conftest import (
    REPO,
    apply_patch,
    arguments,
    copy_of_repository,
    digest,
    events,
    first,
    make_dataset,
)
from sources import bad_batches, stop_at

STEPS = 24
RUN = (f"--max_steps={STEPS}", "--save_interval=5", "--eval_interval=8", "--keep_last=9")
# a step repeated from a copy of everything, also of what a hack adds
RUN += ("--audit_interval=7",)


@dataclasses.dataclass
class Hack:
    """tests/hacks/NAME.patch. lines: what the same hack adds to nanoGPT, and what is granted."""

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
    "spike_sigma": Hack(8, changes_weights=False),
    "kv_cache": Hack(19 + 5, changes_weights=False),
    "answers": Hack(29 + 5),
    "freeze": Hack(4 + 5),
    "window": Hack(7 + 5, ("--n_layer=2",)),
    "distillation": Hack(11 + 5, ("--teachers={teacher} {teacher}",)),
    "norms": Hack(18 + 5, changes_weights=False),
    "lengths": Hack(4 + 5),
    "bpe": Hack(73 + 5, ("--dataset=pairs",)),
    "metric": Hack(21 + 5, ("--best_metric=-val_top5",), changes_weights=False),
    "experts": Hack(24 + 5),
}
SCRIPTS = {"sweep": Hack(6 + 5), "own_script": Hack(19 + 5)}  # they start runs themselves
IN_EVERY_RUN = ("lion",)  # the others take minutes together


@pytest.fixture
def fork(tmp_path):
    """fork(name) -> the folder of a copy of this repository with tests/hacks/NAME.patch applied."""

    def make(name):
        folder = copy_of_repository(tmp_path / "fork")
        apply_patch((REPO / "tests" / "hacks" / f"{name}.patch").read_text(), folder)
        make.folder = folder
        return folder

    return make


@pytest.fixture(autouse=True)
def second_text(data_dir):
    """A dataset `second` of the same characters as `small`, in another order."""
    if not (data_dir / "second").exists():
        make_dataset(data_dir, "second", (data_dir / "small.txt").read_text()[::-1])


def losses(done):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in done.rows("train")]


@pytest.fixture
def flags_of(fork, once, data_dir):
    """flags_of(name) -> the flags of a hack; what they need is made."""

    def flags(name):
        if name == "bpe" and not (data_dir / "pairs").exists():
            what = ["pairs", f"--input={data_dir}/small.txt", "--tokenizer=bpe"]
            command = [sys.executable, "prepare_data.py", *what, f"--data_dir={data_dir}"]
            subprocess.run(command, cwd=fork.folder, check=True, capture_output=True)
        teacher = once(*RUN).checkpoint(STEPS) if name == "distillation" else ""
        return (*RUN, *(flag.format(teacher=teacher) for flag in HACKS[name].flags))

    return flags


# ---- all of them ---------------------------------------------------------------------------------


def test_every_hack_applies_and_is_about_as_short_as_in_nanogpt(tmp_path):
    patches = {path.stem: path.read_text() for path in (REPO / "tests" / "hacks").glob("*.patch")}
    assert patches.keys() == HACKS.keys() | SCRIPTS.keys()
    for name, patch in patches.items():
        apply_patch(patch, copy_of_repository(tmp_path / name))
        added = [n for n in patch.splitlines() if n.startswith("+") and not n.startswith("+++ ")]
        assert 0 < len(added) <= (HACKS | SCRIPTS)[name].lines, name


@pytest.mark.parametrize("name", first(1, sorted(HACKS, key=lambda name: name not in IN_EVERY_RUN)))
def test_a_hacked_run_is_killed_and_resumes_bit_for_bit(
    name, fork, flags_of, straight_and_resumed, once
):
    repo = fork(name)
    whole, resumed = straight_and_resumed(*flags_of(name), step=18, last=STEPS, repo=repo)
    (event,) = events(resumed, "resume")
    assert event["step"] >= 10, "resumed from a checkpoint, not from the start"
    assert losses(resumed) == losses(whole)
    found = {row["event"] for row in [*whole.rows("event"), *resumed.rows("event")]}
    assert found & {"audit", "rollback", "skipped"} == set()

    same = once(*RUN).fingerprint(STEPS)["model"] == whole.fingerprint(STEPS)["model"]
    assert same != HACKS[name].changes_weights, "the hack does what it is for, and nothing else"


# ---- what they are for ---------------------------------------------------------------------------


def test_a_loss_spike_rolls_back_and_the_run_goes_on(fork, run_train):
    done = run_train("run", *RUN, repo=fork("spike_sigma"), before=bad_batches([17], "loss + 30"))
    (event,) = events(done, "rollback")
    assert (event["step"], event["at_step"]) == (15, 18) and "jumped" in event["why"]
    assert done.rows("train")[-1]["step"] == STEPS


def test_another_number_decides_what_is_best(fork, run_train):
    flags = (*RUN, "--best_metric=-val_top5")
    done = run_train("run", *flags, repo=fork("metric"))
    found = [row["val_top5"] for row in done.rows("eval")]
    assert done.rows("eval")[-1]["best_val_top5"] == max(found) > 0
    best = torch.load(done.out_dir / "best.pt", weights_only=True)["state"]
    assert best["best_step"] == done.rows("eval")[found.index(max(found))]["step"]
    assert "val_top5" in done.stdout


def run_script(folder, script, argv, before=""):
    """The exit code of a script, in a process that runs the source `before` first."""
    code = f"import runpy, sys, train\n{before}\nsys.argv[1:] = {argv}\n"
    code += f"sys.argv[0] = {script!r}\nrunpy.run_path({script!r}, run_name='__main__')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


@pytest.mark.slow
def test_an_own_loop_ends_on_the_bits_of_the_command(fork, data_dir, tmp_path, once):
    folder = fork("own_script")
    _, *flags = arguments(tmp_path / "unused", data_dir, RUN)
    assert run_script(folder, "own.py", [str(tmp_path / "a.pt"), *flags]) == 0
    killed = [str(tmp_path / "b.pt"), *flags]
    assert run_script(folder, "own.py", killed, stop_at(18, "SIGKILL")) == -9
    assert torch.load(tmp_path / "b.pt", weights_only=True)["state"]["step"] == 15
    assert run_script(folder, "own.py", killed) == 0
    parts = [torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt")]
    parts.append(torch.load(once(*RUN).checkpoint(STEPS), weights_only=True))
    for part in ("model", "optimizer", "rng"):
        assert len({digest(each[part]) for each in parts}) == 1, part
    assert not (tmp_path / "unused").exists()

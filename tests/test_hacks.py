"""Safe to fork: hacks of a Friday evening, each a patch, and each run, killed and resumed, comes to
the bits of one that was never stopped."""

import subprocess
import sys

import pytest
import torch
from conftest import REPO, apply_patch, arguments, copy_of_repository, digest, events, first
from sources import bad_batches, stop_at

STEPS = 24
RUN = (f"--max_steps={STEPS}", "--save_interval=5", "--eval_interval=8", "--keep_last=9")
# a step repeated from a copy of everything, also of what a hack adds
RUN += ("--audit_interval=7",)
HACKS = {  # tests/hacks/NAME.patch: its flags; the first one in every run, the others slow
    "lion": ("--optimizer=lion",),
    "schedule": ("--schedule=inverse_sqrt",),
    "z_loss": (),
    "growing_batch": (),
    "learned_positions": (),
    "gru": (),
    "experts": (),
    "distillation": ("--teachers={teacher} {teacher}",),
    "metric": ("--best_metric=-val_top5",),
    "waits": (),
}
SAME_WEIGHTS = ("metric", "waits")


@pytest.fixture
def fork(tmp_path):
    """fork(name) -> the folder of a copy of this repository with tests/hacks/NAME.patch applied."""

    def make(name):
        folder = copy_of_repository(tmp_path / "fork")
        apply_patch((REPO / "tests" / "hacks" / f"{name}.patch").read_text(), folder)
        return folder

    return make


def losses(done):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in done.rows("train")]


# ---- all of them ---------------------------------------------------------------------------------


def test_every_hack_applies(tmp_path):
    paths = [*(REPO / "tests").glob("hacks/*.patch")]
    assert {path.stem for path in paths} >= {*HACKS, "own_script", "spike_sigma"}
    for path in paths:
        apply_patch(path.read_text(), copy_of_repository(tmp_path / path.stem))


@pytest.mark.parametrize("name", first(1, HACKS))
def test_a_hacked_run_is_killed_and_resumes_bit_for_bit(name, fork, straight_and_resumed, once):
    plain = once(*RUN)
    flags = [flag.format(teacher=plain.checkpoint(STEPS)) for flag in HACKS[name]]
    whole, resumed = straight_and_resumed(*RUN, *flags, step=18, last=STEPS, repo=fork(name))
    (event,) = events(resumed, "resume")
    assert event["step"] >= 10, "resumed from a checkpoint, not from the start"
    assert losses(resumed) == losses(whole)
    found = {row["event"] for row in [*whole.rows("event"), *resumed.rows("event")]}
    assert found & {"audit", "skipped"} == set()

    same = plain.fingerprint(STEPS)["model"] == whole.fingerprint(STEPS)["model"]
    assert same == (name in SAME_WEIGHTS), "the hack does what it is for, and nothing else"


# ---- what they are for ---------------------------------------------------------------------------


def test_a_loss_spike_ends_the_run_with_two_commands(fork, run_train):
    spike = bad_batches([17], "loss + 30")
    done = run_train("run", *RUN, repo=fork("spike_sigma"), before=f"import spike\n{spike}", code=1)
    assert "the loss jumped from" in done.stderr and "at step 18" in done.stderr
    assert "ckpt_00000016.pt" in done.stderr and "--step=18" in done.stderr


def test_another_number_decides_what_is_best(fork, run_train):
    flags = (*RUN, "--best_metric=-val_top5")
    done = run_train("run", *flags, repo=fork("metric"))
    found = [row["val_top5"] for row in done.rows("eval")]
    assert done.rows("eval")[-1]["best_val_top5"] == max(found) > 0
    best = torch.load(done.out_dir / "best.pt", weights_only=True)["state"]
    assert best["best_step"] == done.rows("eval")[found.index(max(found))]["step"]
    assert "val_top5" in done.stdout


def run_own(folder, argv, before=""):
    """The exit code of own.py, in a process that runs the source `before` first."""
    code = f"import runpy, sys, train\n{before}\nsys.argv = {['own.py', *argv]}\n"
    code += "runpy.run_path('own.py', run_name='__main__')"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, timeout=100).returncode


@pytest.mark.slow
def test_an_own_loop_ends_on_the_bits_of_the_command(fork, data_dir, tmp_path, once):
    folder = fork("own_script")
    _, *flags = arguments(tmp_path / "unused", data_dir, RUN)
    assert run_own(folder, [str(tmp_path / "a.pt"), *flags]) == 0
    killed = [str(tmp_path / "b.pt"), *flags]
    assert run_own(folder, killed, stop_at(18, "SIGKILL")) == -9
    assert torch.load(tmp_path / "b.pt", weights_only=True)["state"]["step"] == 15
    assert run_own(folder, killed) == 0
    parts = [torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt")]
    parts.append(torch.load(once(*RUN).checkpoint(STEPS), weights_only=True))
    for part in ("model", "optimizer", "rng"):
        assert len({digest(each[part]) for each in parts}) == 1, part
    assert not (tmp_path / "unused").exists()

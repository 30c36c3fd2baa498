"""Checkpoint files: in which order they get their names, and what is refused instead of read."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import REPO, events, wait_for
from sources import SHORT_PAUSES, around, stop_at

from reporting.record import read_run
from reporting.results import outcome

SAVES = ("--save_interval=2", "--eval_interval=2", "--milestone_interval=4")
KILL_AT_4 = """
def link(source, name, inner=os.link):
    if source.name.endswith("_00000004.pt"):
        os.kill(os.getpid(), 9)
    inner(source, name)
os.link = link
"""


def test_a_kill_between_the_names_of_a_save_loses_none_of_them(run_train):
    straight = run_train("straight", *SAVES)
    killed = run_train("run", *SAVES, before=KILL_AT_4, code=137)
    assert not killed.checkpoint(4).exists()
    done = run_train("run", *SAVES)
    names = {path.name for path in straight.out_dir.glob("*.pt")}
    assert {path.name for path in done.out_dir.glob("*.pt")} == names
    assert "milestone_00000004.pt" in names
    best = [torch.load(each.out_dir / "best.pt")["state"]["step"] for each in (straight, done)]
    assert best[0] == best[1]


FULL_DISK = """
step = train.last_run.state["step"]
if str(args[0]).endswith("best.pt") and step and len(failures) < TIMES:
    failures.append(step)
    raise OSError(28, "No space left on device")
"""
UPHILL = """
if run.state["step"] >= 6:  # from here on
    for weight in run.model.parameters():
        weight.grad.neg_()
"""
BEST = ("--save_interval=2", "--eval_interval=6", "--peak_lr=1e-2", "--min_lr=1e-2")


def best_at_6(times):
    """Source: the best is of step 6, and so many of its saves fail."""
    full = around("checkpoint.replacing", FULL_DISK.replace("TIMES", str(times)))
    return SHORT_PAUSES + "failures = []" + full + around("forward_backward", then=UPHILL)


@pytest.mark.parametrize("times", [2, 99])
def test_a_best_that_could_not_be_saved_is_tried_again_at_every_save(run_train, times):
    done = run_train("run", *BEST, before=best_at_6(times))
    assert "could not save best.pt (" in done.stdout
    assert any(row["event"] == "save_failed" for row in done.rows("event"))
    held = torch.load(done.out_dir / "best.pt")["state"]
    last = torch.load(done.checkpoint(12))["state"]
    assert last["best_step"] == 6
    late = events(done, "best_not_saved")
    if times == 2:
        assert held["step"] == 6 and not late
        return
    assert held["step"] == 0
    assert [(row["best_step"], row["best_pt_holds_step"]) for row in late] == [(6, 0)]
    assert "best not saved: best_step 6  best_pt_holds_step 0" in done.stdout
    assert "# text; best.pt is of step 0, a better one could not be saved" in done.stdout
    sample = [sys.executable, REPO / "sample.py", done.out_dir, "--checkpoint=best"]
    words = subprocess.run(sample, capture_output=True, text=True).stderr
    assert "best.pt, step 0 (the weights of step 6 were better; they could not be saved)" in words


def test_a_best_that_a_killed_process_could_not_save_is_told_by_the_next(run_train):
    run_train("run", *BEST, before=best_at_6(99) + stop_at(11, "SIGKILL"), code=137)
    done = run_train("run", *BEST, before=best_at_6(0))
    assert torch.load(done.out_dir / "best.pt")["state"]["step"] == 0
    assert "# text; best.pt is of step 0, a better one could not be saved" in done.stdout
    assert outcome(read_run(done.out_dir), 0)["best.pt"][0] == "of step 0"


def test_what_is_no_regular_file_is_refused_in_one_line(run_train):
    flags = ("--save_interval=4",)
    done = run_train("run", *flags)
    for name in ("run.json", ".lock"):
        kept = done.out_dir / f"{name}.kept"
        os.rename(done.out_dir / name, kept)
        os.mkfifo(done.out_dir / name)
        refused = run_train("run", *flags, code=2)
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        os.replace(kept, done.out_dir / name)
    for name in ("ckpt_00000012.pt", "best.pt"):
        os.remove(done.out_dir / name)
        os.mkfifo(done.out_dir / name)
    resumed = run_train("run", *flags)
    assert "it is no regular file" in resumed.stdout, resumed.stderr
    assert (done.out_dir / "ckpt_00000012.pt.corrupt").exists()
    assert (done.out_dir / "ckpt_00000012.pt").is_file()


def test_a_signal_is_heard_where_a_pipe_lies_in_place_of_a_file(run_train, start_train):
    done = run_train("run", "--save_interval=4")
    os.remove(done.out_dir / "metrics.jsonl")
    os.mkfifo(done.out_dir / "metrics.jsonl")
    process = start_train("run", "--save_interval=4", "--max_steps=100000", "--decay_steps=12")
    wait_for(lambda: "it is no regular file" in process.log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143, process.log.read_text()


LORA = """
result.requires_grad_(False)
result.adapter = torch.nn.Parameter(torch.zeros(3))
result.head.requires_grad_(True)
"""


def test_weights_that_a_checkpoint_lacks_are_named_with_what_to_do(run_train):
    base = run_train("base", "--peak_lr=1e-2")
    best = base.out_dir / "best.pt"
    refused = run_train("new", f"--resume={best}", before=around("build_model", then=LORA), code=2)
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert "best.pt lacks 1 weights of this model, such as adapter" in refused.stderr
    assert "load them in build_model" in refused.stderr and not refused.out_dir.exists()
    load = f"result.load_state_dict(torch.load({str(best)!r}, weights_only=True)['model'])"
    done = run_train("new", before=around("build_model", then=load + LORA))
    assert done.rows("eval")[0]["val_loss"] == base.rows("eval")[-1]["val_loss"]

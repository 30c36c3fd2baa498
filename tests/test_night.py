"""A night on a machine that kills: 100 SIGKILLs and 50 SIGTERMs at random moments, over eight
configurations with an evaluation every few steps."""

import random
import sys

import pytest
from conftest import events, run_python
from helpers import ONE_THREAD, torchrun
from sources import AUGMENTED, SHARD, ranks

KILLS, STOPS = 13, 7  # of each configuration
FLAGS = (
    "--max_steps=300 --eval_interval=5 --save_interval=10 --keep_last=2 --log_interval=2".split()
)
# Every fifth sequence has no target, and the others have fewer and fewer
MASKED = """
class Masked(train.ShuffledWindows):
    def __getitem__(self, place):
        inputs, targets = super().__getitem__(place)
        for row, number in zip(targets, range(place[0], sum(place))):
            row[4 * (number % 5) :] = -100
        return inputs, targets
train.ShuffledWindows = Masked
"""
SPLIT = ["--batch_size=4", "--accum_steps=2", "--dropout=0.1"]
PLATEAU = "--plateau_factor=0.7 --plateau_patience=1 --min_delta=0.01 --patience=90".split()
CONFIGURATIONS = {
    "compiled": (["--compile=true"], "", 1),
    "two workers": (["--num_workers=2"], "", 1),
    "two ranks": (["--dropout=0.1"], "", 2),
    "sharded": ([SHARD, "--ema_decay=0.9"], "", 2),
    "masked": (SPLIT, MASKED, 1),
    "average with Muon": (["--ema_decay=0.9", "--optimizer=muon"], "", 1),
    "plateau": (PLATEAU, "", 1),
    "augmented": (["--num_workers=2"], AUGMENTED, 1),
}


def signal_after(seconds, name):
    return f"""
import os, signal, threading, time
timer = threading.Timer({seconds}, os.kill, (os.getpid(), signal.{name}))
timer.daemon = True
timer.start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_whatever_comes_in_a_night_the_end_is_the_same(run_train, tmp_path, name):
    flags, fork, count = CONFIGURATIONS[name]
    flags = (*FLAGS, *flags)

    def run(out_dir, first="", code=0):
        return run_train(out_dir, *flags, before=ranks(count, fork + first), code=code, timeout=300)

    straight = run("straight")
    seconds = events(straight, "end")[-1]["seconds"]
    start = seconds["start"] + seconds.get("compile", 0.0)
    rest = seconds["train"] + seconds["evaluate"] + seconds["save"]
    draw = random.Random(name)
    signals = ["SIGKILL"] * KILLS + ["SIGTERM"] * STOPS
    draw.shuffle(signals)
    ended = []
    for each in signals:
        first = signal_after(draw.uniform(start / 2, start + rest / 8), each)
        ended.append(run("run", first, code=None).returncode)
    done = run("run")
    assert done.fingerprint(300) == straight.fingerprint(300)
    assert len([code for code in ended if code]) >= len(signals) // 2, "most came too late"
    for kind in ("train", "eval"):
        steps = [row["step"] for row in straight.rows(kind)]
        assert [row["step"] for row in done.rows(kind)] == steps, "a row stands twice, or is lost"
    for row in events(done, "resume_checked"):
        assert row["equal"] == row["compared"], "an honest resume is accused"
    if not fork:  # a fork's script would be needed
        _, *launcher = torchrun(count) if count > 1 else [sys.executable]
        again = run_python(*launcher, "replay.py", done.out_dir, "--verify=true", **ONE_THREAD)
        assert again.returncode == 0, again.stdout + again.stderr
    assert not list(tmp_path.glob("run/*.tmp"))

"""Is a run that signals stop at random moments the same run? Real commands, default threads.

    python tests/signals.py --count=60 --seed=1
    python tests/signals.py --count=12 --seed=1 --steps=60 --only="plain;init_from"

For each configuration a run without signals, and one that gets KILL, TERM or INT at random moments,
in its start, in evaluations and in saves, too, and that is started again until it has finished.
Then weights, moments, averages, random state, state of the loop, best.pt and every row must be
equal, no process may be alive, and no temporary file be left. Exit code 1 if anything differs."""

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from conftest import (
    REPO,
    arguments,
    fingerprint,
    make_dataset,
    processes,
    pydoc_text,
    read_log,
    rows,
    start,
    torchrun,
    wait_until_gone,
)
from sources import END
from test_resume import WITH

COMMON = (  # wide enough that products and sums are split among threads
    "--n_embd=128 --block_size=32 --batch_size=16 --dropout=0.1 --warmup_steps=10 "
    "--eval_interval=10 --save_interval=15 --log_interval=3 --eval_tokens=200"
)
CONFIGURATIONS = {  # name: (flags, script of a fork, ranks)
    "plain": ("--dropout=0", "", 1),
    "dropout, accumulation": ("--batch_size=4 --accum_steps=4", "", 1),
    "three ranks": ("", "", 3),
    "two shards, averages": ("--ema_decay=0.9 --shard=true", "", 2),
    "1, 3, 2 shards, 1": ("--schedule=constant --ema_decay=0.9", "", 1),
    "compiled": ("--compile=true", "", 1),
} | {name: (*flags_and_fork, 1) for name, flags_and_fork in WITH.items()}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Case:
    """A configuration in a folder of its own: `straight` without signals, `run` with them."""

    def __init__(self, name, folder, data_dir, steps):
        self.folder, self.steps = folder, steps
        self.sent = []  # names of signals; in brackets before the first save
        self.faults = []
        flags, fork, ranks = CONFIGURATIONS[name]
        folder.mkdir()
        self.script = REPO / "train.py"
        self.flags = arguments("run", data_dir, COMMON.split())
        self.phases = [(ranks, [f"--max_steps={steps}"])]
        if name.startswith("1, 3"):
            ends = [f"--max_steps={steps * quarter // 4}" for quarter in (1, 2, 3, 4)]
            shard = [ends[2], "--shard=true"]
            self.phases = [(1, ends[:1]), (3, ends[1:2]), (2, shard), (1, ends[3:])]
        if "{checkpoint}" in flags:
            self.complete("parent")
        self.flags += flags.format(checkpoint="parent/best.pt").split()
        if fork:
            self.script = folder / "fork.py"
            self.script.write_text(fork.removesuffix(END) + END)
        self.durations = self.complete("straight")

    def complete(self, out_dir, count=0, draw=None):
        """Run each phase to its end, with `count` signals on the way. Returns the seconds that each
        took until its first row, and from there on."""
        durations = []
        for number, (ranks, flags) in enumerate(self.phases):
            launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
            words = [*launcher, self.script, *self.flags, *flags, f"--out_dir={out_dir}"]
            share = count // len(self.phases) + (number < count % len(self.phases))
            for left in range(share, 0, -1):
                start, rest = self.durations[number]
                if draw.random() < 0.2:
                    self.run(words, out_dir, draw, draw.uniform(0, start), math.inf)
                else:
                    done = 0 if self.phases[1:] else self.newest_step(out_dir) / self.steps
                    rest *= (1 - done) * 1.5 / (left + 0.5)
                    self.run(words, out_dir, draw, math.inf, draw.uniform(0, rest))
            durations.append(self.run(words, out_dir))
        return durations

    def run(self, words, out_dir, draw=None, after_start=math.inf, after_row=math.inf):
        """Start the command, send it a signal at one of two moments, in seconds after the start and
        after its first row, and wait until all its processes are gone. Returns the seconds until its
        first row, and from there to its end."""
        process = start(words, self.folder / f"log_{time.time_ns()}", cwd=self.folder)
        log, began, first_row = self.folder / out_dir / "metrics.jsonl", time.monotonic(), math.inf
        old_size = log.stat().st_size if log.exists() else 0
        is_due = False
        while process.poll() is None and not is_due:
            if first_row == math.inf and log.exists() and log.stat().st_size != old_size:
                first_row = time.monotonic()
            is_due = time.monotonic() > min(began + after_start, first_row + after_row, began + 900)
            time.sleep(0.003)
        allowed = {0}
        if is_due and draw:
            allowed |= self.send(draw.choice(SIGNALS), process, out_dir, draw)
        try:
            wait_until_gone(60, mark=process.mark)
        except AssertionError:
            self.faults.append(f"a process was still alive after a minute: {process.log}")
        process.wait()
        if process.returncode not in allowed:
            text = process.log.read_text()[-500:]
            self.faults.append(f"exit code {process.returncode}, not one of {allowed}:\n{text}")
        now = time.monotonic()
        return min(first_row, now) - began, now - min(first_row, now)

    def send(self, number, process, out_dir, draw):
        """Send a signal. Returns the exit codes that are right after it."""
        is_saved = any((self.folder / out_dir).glob("ckpt_*.pt"))
        self.sent.append(number.name if is_saved else f"({number.name})")
        ranks = processes(mark=process.mark) if "torch.distributed.run" in process.args else []
        victim = draw.choice([process.pid, *ranks])  # the launcher or a rank
        send = os.killpg if number == signal.SIGINT and victim == process.pid else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(victim, number)
        return {-number, 128 + number, 1 if ranks else 0}

    def newest_step(self, out_dir):
        names = [path.stem for path in (self.folder / out_dir).glob("ckpt_*.pt")]
        return max([int(name[5:]) for name in names], default=0)

    def compare(self):
        """What is not equal at the end, in words."""
        straight, run = (self.folder / name for name in ("straight", "run"))
        words = [*dict.fromkeys(self.faults), *map(str, run.glob("*.tmp"))]
        self.compared = 0
        if self.newest_step("run") < self.steps:
            return [*words, "the run has no checkpoint of its last step"]
        for name in (f"ckpt_{self.steps:08}.pt", "best.pt"):
            expected, found = fingerprint(straight / name), fingerprint(run / name)
            words += [f"{part} in {name}" for part in found if found[part] != expected[part]]
        if rows(run) != rows(straight):
            words.append("rows")
        checks = [row for row in read_log(run) if row.get("event") == "resume_checked"]
        words += [row["text"] for row in checks if row["first_difference"]]
        self.compared = sum(row["steps"] for row in checks)
        return words


def main(argv=None):
    parser = argparse.ArgumentParser()
    for name, default in {"--count": 60, "--seed": 1, "--steps": 160}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--folder", help="to keep what the runs leave")
    parser.add_argument("--only", help="names of configurations, divided by ;")
    options = parser.parse_args(argv)
    names = options.only.split(";") if options.only else [*CONFIGURATIONS]
    draw = random.Random(options.seed)
    sent, n_exact = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        data_dir = make_dataset(Path(folder, "data"), "small", pydoc_text()[:3000])
        for number, name in enumerate(names):
            began = time.monotonic()
            count = -(-(options.count - len(sent)) // (len(names) - number))
            case = Case(name, Path(folder, f"case_{number}"), data_dir, options.steps)
            case.complete("run", count, draw)
            differs = case.compare()
            sent += case.sent
            n_exact += not differs
            verdict = f"differs: {'; '.join(differs)}" if differs else "exact"
            again = f"{case.compared} steps compared, {time.monotonic() - began:.0f} s"
            print(f"{name:<24}{verdict}; {' '.join(case.sent)}; {again}", flush=True)
    print(f"{len(sent)} signals sent (in brackets those before the first save);")
    print(f"{n_exact} of {len(names)} configurations exact")
    return int(n_exact < len(names))


if __name__ == "__main__":
    sys.exit(main())

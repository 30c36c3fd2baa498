"""Is a run that signals stop at random moments the same run? Real commands, default threads.

    python tests/signals.py --count=60 --seed=1
    python tests/signals.py --count=12 --seed=1 --steps=60 --only="plain;two workers, augmented"

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

import sources
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

COMMON = (  # wide enough that products and sums are split among threads
    "--n_embd=128 --block_size=32 --batch_size=16 --warmup_steps=10 --eval_interval=10 "
    "--save_interval=15 --log_interval=3 --eval_tokens=200"
)
PLATEAU = "--plateau_factor=0.7 --plateau_patience=1 --min_delta=0.05"
CONFIGURATIONS = {  # name: (flags, script of a fork, ranks)
    "plain": ("", "", 1),
    "dropout, accumulation": ("--dropout=0.1 --batch_size=4 --accum_steps=4", "", 1),
    "averages, plateau": (f"--ema_decay=0.9 {PLATEAU}", "", 1),
    "two workers, augmented": ("--num_workers=2", sources.AUGMENTED, 1),
    "three ranks": ("--dropout=0.1", "", 3),
    "two shards, averages": ("--ema_decay=0.9 --shard=true", "", 2),
    "1, 3, 2 shards, 1": ("--schedule=constant --dropout=0.1 --ema_decay=0.9", "", 1),
    "compiled": ("--compile=true --dropout=0.1", "", 1),
    "float16, Muon": ("--dtype=float16 --optimizer=muon", "", 1),
    "bfloat16": ("--dtype=bfloat16", "", 1),
    "init_from": ("--dropout=0.1", "", 1),
    "validation sets": (PLATEAU, sources.SEVERAL_SETS, 1),
    "growing batch": (
        "--batch_size=8",
        sources.script("sound/schedules_growing_batch") + sources.END,
        1,
    ),
    "a script with a knob": ("--alpha=0.02", sources.KNOB, 1),
    "tiny intervals": ("--save_interval=1 --eval_interval=1 --log_interval=1 --keep_last=1", "", 1),
    "Muon": ("--optimizer=muon --dropout=0.1", "", 1),
    "momentum": ("--optimizer=momentum --peak_lr=0.1 --schedule=step", "", 1),
    "sgd": ("--optimizer=sgd --peak_lr=0.1 --schedule=onecycle", "", 1),
    "adam": ("--optimizer=adam --n_layer=2 --grad_checkpoint=true --dropout=0.1", "", 1),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Case:
    """A configuration in a folder of its own: `straight` without signals, `run` with them."""

    def __init__(self, name, folder, data_dir, steps):
        self.folder, self.steps = folder, steps
        self.sent = []  # (signal, whether there was a checkpoint)
        self.faults = []
        flags, fork, ranks = CONFIGURATIONS[name]
        folder.mkdir()
        self.script = REPO / "train.py"
        if fork:
            self.script = folder / "fork.py"
            self.script.write_text(fork)
        self.flags = arguments("run", data_dir, [*COMMON.split(), *flags.split()])
        self.phases = [(ranks, [f"--max_steps={steps}"])]
        if name.startswith("1, 3"):
            ends = [f"--max_steps={steps * quarter // 4}" for quarter in (1, 2, 3, 4)]
            shard = [ends[2], "--shard=true"]
            self.phases = [(1, ends[:1]), (3, ends[1:2]), (2, shard), (1, ends[3:])]
        if name == "init_from":
            self.complete("parent")
            self.flags += ["--init_from=parent/best.pt", "--seed=5"]
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
        self.sent.append((number.name, any((self.folder / out_dir).glob("ckpt_*.pt"))))
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
            how = " ".join(word if saved else f"({word})" for word, saved in case.sent)
            verdict = f"differs: {'; '.join(differs)}" if differs else "exact"
            again = f"{case.compared} steps compared, {time.monotonic() - began:.0f} s"
            print(f"{name:<24}{verdict}; {how}; {again}", flush=True)
    n_saved = sum(saved for _, saved in sent)
    print(f"{len(sent)} signals sent, {n_saved} after the first save (the others in brackets);")
    print(f"{n_exact} of {len(names)} configurations exact")
    return int(n_exact < len(names))


if __name__ == "__main__":
    sys.exit(main())

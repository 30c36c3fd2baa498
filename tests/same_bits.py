"""Does this code compute the bits of another version? Twelve configurations, straight and resumed.

    python tests/same_bits.py OTHER [NAME ...]      # OTHER: a folder with the other version

Each is trained by both versions from the same text, by this one also with a SIGTERM and a SIGKILL
on the way; then weights, moments, average, random state and every row must be equal. A line each;
exit code 1 if one differs. Not a test of the suite: the other version is none of this repository's.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import fingerprint, read_rows

REPO = Path(__file__).resolve().parent.parent
COMMON = (
    "--dataset=small --device=cpu --dtype=float32 --compile=false --n_layer=1 --n_embd=32 --n_head=2 "
    "--block_size=16 --batch_size=12 --max_steps=24 --warmup_steps=3 --eval_interval=8 "
    "--save_interval=10 --log_interval=1 --keep_last=9 --report=false"
).split()
CONFIGURATIONS = {  # name: (ranks, flags)
    "plain": (1, ""),
    "dropout and accumulation": (1, "--dropout=0.1 --batch_size=4 --accum_steps=3"),
    "Muon": (1, "--optimizer=muon --n_embd=128"),
    "average, two layers": (1, "--ema_decay=0.9 --n_layer=2"),
    "n-grams and convolution": (1, "--ngram_rows=64 --conv_width=3"),
    "gradient checkpointing": (1, "--grad_checkpoint=true --n_layer=2 --dropout=0.1"),
    "bfloat16": (1, "--dtype=bfloat16"),
    "momentum": (1, "--optimizer=momentum --peak_lr=0.1"),
    "compiled": (1, "--compile=true"),
    "2 ranks": (2, "--dropout=0.1"),
    "3 ranks": (3, "--dropout=0.1"),
    "sharded": (2, "--shard=true --ema_decay=0.9"),
}
RUN = """
import os, signal, sys
sys.path[:0] = [{repo!r}, {tests!r}]
import train
from sources import scope_of, stop_at
if {stop}:
    exec(stop_at(*{stop}), scope_of(train))
sys.argv[0] = "train.py"
train.machine.exit_process(train.cli.run_script(train.main))
"""
FIELDS = (
    "step loss grad_norm lr skipped tokens sequences epoch val_loss val_accuracy val_bpb".split()
)


def start(repo, folder, ranks, flags, stop=None):
    """Run train.main() of `repo` in a process for each rank. stop: (step, name of a signal)."""
    script = folder.parent / f"{folder.name}.py"
    script.write_text(RUN.format(repo=str(repo), tests=str(REPO / "tests"), stop=stop))
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher += [f"--nproc_per_node={ranks}"]
    data_dir = f"--data_dir={folder.parent}"
    command = [*launcher, str(script), *COMMON, data_dir, f"--out_dir={folder}", *flags.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode != 0 and not stop:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def result_of(folder):
    """The bits of the last checkpoint, and the rows: {name: value}."""
    rows = [row for row in read_rows(folder) if row["kind"] != "event"]
    rows = [{name: row.get(name) for name in FIELDS} for row in rows]
    bits = fingerprint(max(folder.glob("ckpt_*.pt")))
    del bits["state"]  # another version may hold other variables
    return bits | {"rows": rows}


def differing(one, other):
    """The names whose values differ, as words."""
    return ", ".join(name for name in one if one[name] != other[name])


def main(other, *names):
    sys.path.insert(0, str(REPO))
    from prepare_data import prepare

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        text = folder / "small.txt"
        text.write_text((REPO / "train.py").read_text(encoding="utf-8")[:9000])
        prepare("small", folder, str(text), "char")
        for number, (name, (ranks, flags)) in enumerate(CONFIGURATIONS.items()):
            if names and name not in names:
                continue
            then, now, resumed = (folder / f"{number}{word}" for word in ("then", "now", "resumed"))
            start(other, then, ranks, flags)
            start(REPO, now, ranks, flags)
            start(REPO, resumed, ranks, flags, (6, "SIGTERM"))
            start(REPO, resumed, ranks, flags, (18, "SIGKILL"))
            start(REPO, resumed, ranks, flags)
            expected = result_of(then)
            found = [differing(expected, result_of(each)) for each in (now, resumed)]
            checked = [r for r in read_rows(resumed, "event") if r["event"] == "resume_checked"]
            words = ", ".join(f"{row['equal']} of {row['compared']} rows equal" for row in checked)
            verdict = ", ".join(f"differs in {path}" if path else "same bits" for path in found)
            print(f"{name:<26} straight, resumed: {verdict}; {words}", flush=True)
            failed = failed or any(found) or any(row["first_difference"] for row in checked)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What the blocks of docs/lessons.md share. Each line `NAME FLAGS` of the input is a run:
python train.py $BASE FLAGS --out_dir=out/NAME"""

import contextlib
import hashlib
import io
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot

import train

warnings.filterwarnings("ignore", "This DataLoader")  # of more workers than cores


def rows(name, kind):
    """The rows of that kind in the log of out/NAME."""
    lines = open(f"out/{name}/metrics.jsonl")
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def last_loss(name, *flags):
    """Train out/NAME. Returns its last validation loss."""
    with contextlib.redirect_stdout(io.StringIO()):
        train.main([*os.environ["BASE"].split(), *flags, f"--out_dir=out/{name}"])
    return rows(name, "eval")[-1]["val_loss"]


def milliseconds(functions, rounds=9):
    """{name: median}, timed in turn."""
    times = {name: [] for name in functions}
    for name in list(functions) * rounds:
        began = time.perf_counter()
        functions[name]()
        times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(each) for name, each in times.items()}


def make_dataset(name, count, change=lambda tokens: None):
    """data/NAME: the first `count` characters to train on, changed; the whole validation split."""
    whole, new = Path("data", os.environ["DATASET"]), Path("data", name)
    new.mkdir(exist_ok=True)
    tokens = np.fromfile(whole / "train.bin", np.uint16)[:count]
    change(tokens)
    meta = json.loads((whole / "meta.json").read_text()) | {"train_tokens": count}
    meta["sha256"]["train.bin"] = hashlib.sha256(tokens.tobytes()).hexdigest()
    (new / "train.bin").write_bytes(tokens.tobytes())
    (new / "val.bin").write_bytes((whole / "val.bin").read_bytes())
    (new / "meta.json").write_text(json.dumps(meta))


def heat_maps(maps, text, path):
    """A picture of matrices side by side, the characters of a text along both axes."""
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(1, len(maps), figsize=(5 * len(maps), 5), layout="constrained")
    letters = [repr(letter)[1:-1] for letter in text]
    for number, (axis, weights) in enumerate(zip(axes, maps, strict=True), start=1):
        axis.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks(range(len(text)), letters)
        axis.set_yticks(range(len(text)), letters)
        axis.set_title(f"head {number}: each row looks at these columns")
    command = {"Command": "python tests/run_page.py docs/lessons.md 25"}
    figure.savefig(path, dpi=100, metadata=command)


if __name__ == "__main__":
    for name, *flags in map(str.split, sys.stdin):
        print(f"{name:<14} {last_loss(name, *flags):.4f}", flush=True)

"""Loss against wall time: nanoGPT, its model on this loop, and two configurations.

NANOGPT=../nanoGPT python tests/headline.py     # draws docs/headline.png; about ten minutes

Each is one run with seed 1337, in float32, one after another. Times are those at which a process
prints a validation loss, from its start on; evaluations count. nanoGPT's are estimates from 20
random batches of each split, but for the last one; its model on this loop evaluates as many tokens.
Those of the two configurations are of the whole validation split.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import ScalarFormatter  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import bench  # noqa: E402
from plumbing.data import verified_meta  # noqa: E402
from reporting.panels import COLOURS, STYLE  # noqa: E402

SEED = 1337
DATA = REPO / "data/shakespeare"
MEASURED = REPO / "out/headline.json"
LOSS = re.compile(r"val loss (\d+\.\d+)")
WHOLE = re.compile(r"whole split: (\S+) after (\S+)")
CURVES = {  # row of bench.py --only=from_nanogpt: (label, colour, flags for a curve of more points)
    "nanoGPT itself": ("nanoGPT, its CPU recipe", "black", []),
    "nanoGPT, four times its rate": ("nanoGPT, four times its rate", "vermilion", []),
    "the same recipe, evaluating as many tokens": ("its model and recipe, this loop", "sky", []),
    "the plain config": ("config/shakespeare_plain.py", "green", ["--eval_interval=30"]),
    "the fast config": ("config/shakespeare_fast.py", "blue", ["--eval_interval=14"]),
}


def measure(name, extra, scratch):
    """[(seconds since the start, validation loss), ...] of one row."""
    script, *words = bench.commands()[name].split()
    own, folder = [*extra, f"--out_dir={scratch}"], REPO
    if script.startswith("$"):
        folder = Path(os.environ["NANOGPT"])
        source = bench.nanogpt_source(folder, verified_meta(str(DATA))["vocab_size"], SEED)
        start, own = ["-c", source], [*own, f"--dataset={DATA}"]
    else:
        start, own = [script], [*own, f"--seed={SEED}", "--dtype=float32"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-u", *start, *words, *own], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    curve = []
    for line in process.stdout:
        seconds = time.perf_counter() - began
        if found := WHOLE.search(line):
            curve[-1] = (seconds - float(found[2]), float(found[1]))
        elif found := LOSS.search(line):
            curve.append((seconds, float(found[1])))
    if process.wait():
        raise SystemExit(f"{name} ended with exit code {process.returncode}")
    return curve


def draw(curves):
    plt.style.use(STYLE)
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for name, (label, colour, _) in CURVES.items():
        seconds, losses = zip(*curves[name], strict=True)
        axes.plot(seconds, losses, color=COLOURS[colour], lw=1.7, marker=".", label=label)
    reached = curves["nanoGPT itself"][-1][1]
    axes.axhline(reached, color="grey", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_xticks([5, 10, 20, 50, 100, 150])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set_xlabel("seconds since the start of the process")
    axes.set_ylabel("validation loss (nats per character)")
    axes.set_ylim(top=3.0, bottom=1.75)
    axes.legend()
    command = {"Command": "NANOGPT=../nanoGPT python tests/headline.py"}
    figure.savefig(REPO / "docs/headline.png", dpi=110, metadata=command)


def main():
    curves = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for name, (_, _, extra) in CURVES.items():
        if name not in curves:
            with tempfile.TemporaryDirectory() as scratch:
                curves[name] = measure(name, extra, f"{scratch}/run")
            MEASURED.parent.mkdir(exist_ok=True)
            MEASURED.write_text(json.dumps(curves))
        seconds, loss = curves[name][-1]
        print(f"{name:<40} {loss:.3f} after {seconds:6.1f} s", flush=True)
    draw(curves)


if __name__ == "__main__":
    main()

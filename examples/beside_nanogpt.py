"""Whole runs beside nanoGPT's, each a plain command in a process of its own, on the same texts.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py    # 45 to 90 minutes on two cores; run nothing else
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py --seeds=1 --flags=--max_steps=50    # a trial
    python examples/beside_nanogpt.py --record=records/beside_nanogpt/results.json --to=docs/headline.png

Each seed runs every row on every text before the next seed begins. `loss` is that of the last weights
over the whole validation split, mean ± deviation over the seeds; `to 1.9` the median wall time from
the start of a process until it has printed a validation loss below that, `in all` its last one. They
go to --record after each run; if that is there already it is only shown, and drawn. nanoGPT's
train.py runs with EDITS, by which it reads these datasets and has a --seed, and with WHOLE_SPLIT at
its end, the loss over the whole split, which its wall time does not include.
"""

import math
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import plumbing  # noqa: E402
from prepare_data import prepare  # noqa: E402

datasets = "shakespeare pydoc"  # texts, each with a table of its own
seeds = 5  # runs of each row on each text
seed = 1337  # of the first of them
flags = ""  # added to each command: --max_steps=50
record = "out/beside_nanogpt.json"  # what is measured
to = "out/beside_nanogpt.png"  # the picture

TARGETS = (2.0, 1.9, 1.85)  # validation losses to be reached
# nanoGPT's README, "I only have a macbook"
NANOGPT = (
    "nanoGPT config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
ROWS = {
    "nanoGPT": NANOGPT,
    "nanoGPT at its best rate, four times as high": f"{NANOGPT} --learning_rate=4e-3 --min_lr=4e-4",
    # What is not typed is a default of train.py. nanoGPT evaluates 9 times 30,720 tokens, this loop 3
    # times the split, of 111,540 or so.
    "same model, same recipe, this loop": (
        "examples/gpt2.py --bias=false --gelu=none --beta2=0.99 --report=false --n_layer=4 "
        "--batch_size=12 --decay_steps=2000 --dtype=float32 --eval_interval=1000"
    ),
    "one plain layer, tuned, with Muon": "train.py config/shakespeare_plain.py --eval_interval=30",
    "with two extras": "examples/ngram.py config/shakespeare_fast.py --eval_interval=14",
}
EDITS = {  # of its train.py
    "exec(open('configurator.py').read())": (
        "data_dir = ''; seed = max_steps = 0; exec(open('configurator.py').read()); "
        "max_iters = max_steps or max_iters"
    ),
    "torch.manual_seed(1337": "torch.manual_seed(seed",
    "os.path.join('data', dataset)": "os.path.join(data_dir, dataset)",
    "meta_vocab_size = None": (
        "import json; meta_vocab_size = json.load(open(data_dir + '/meta.json'))['vocab_size']"
    ),
}
WHOLE_SPLIT = """
began, total = time.time(), 0.0
tokens = np.memmap(data_dir + "/val.bin", np.uint16, "r").astype(np.int64)
n, raw_model = len(tokens) - 1, raw_model.eval()
with torch.no_grad():
    for first in range(0, n, block_size):
        at = min(first, n - block_size)
        row = torch.from_numpy(tokens[None, at : at + block_size + 1])
        x, y = row[:, :-1].clone(), row[:, 1:].clone()
        y[0, : first - at] = -1  # which nanoGPT ignores: the window before has these
        total += raw_model(x, y)[1].item() * (block_size - first + at)
print(f"whole split: val loss {total / n} after {time.time() - began} s")
"""  # each token but the first is a target once


def main(argv: list[str] | None = None) -> int:
    with plumbing.configured(globals(), argv=argv):
        facts = plumbing.read_json(record)
        if not facts:
            facts = {
                "commands": ROWS,
                "flags": flags,
                "git": plumbing.git_commit(),
                "date": plumbing.now(),
                "cpu": plumbing.cpu_info()[0],
                "curves": {},
            }
            for number, text, row in product(range(seed, seed + seeds), datasets.split(), ROWS):
                prepare(text, f"{REPO}/data")
                curves = facts["curves"].setdefault(f"{text}: {row}", [])
                curves.append(run(f"{ROWS[row]} --dataset={text} --seed={number} {flags}"))
                plumbing.write_json(record, facts)
                print(number, text, row, *curves[-1][-1], flush=True)
        for name, curves in facts["curves"].items():
            print(name, *summary(curves), sep="; ")
        draw(facts["curves"])
    return 0


def run(command):
    """[[seconds since the start of the process, validation loss], ...], as it prints them."""
    script, *words = command.split()
    start = [script]
    home = REPO
    if script == "nanoGPT":
        home = Path(os.environ.get("NANOGPT", ""))
        start = ["-c", source_of_nanogpt(home / "train.py")]
    curve = []
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        where = [f"--data_dir={REPO}/data", f"--out_dir={folder}/run"]
        command = [sys.executable, "-u", *start, *words, *where]
        with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if found := re.search(r"val loss (\d+\.\d+)(?: after (.*) s)?", line):
                    own = float(found[2] or 0)  # of WHOLE_SPLIT
                    curve.append([time.perf_counter() - began - own, float(found[1])])
        if process.returncode:
            plumbing.fail(f"exit code {process.returncode} of {script} {' '.join(words)}")
    return curve


def source_of_nanogpt(path):
    """What runs for its train.py."""
    source = path.read_text("utf-8") if path.is_file() else ""
    for theirs, ours in EDITS.items():
        if theirs not in source:
            plumbing.fail(f"NANOGPT={path.parent}: expected nanoGPT, with {theirs!r} in train.py")
        source = source.replace(theirs, ours)
    return source + WHOLE_SPLIT


def summary(curves):
    """In words: the mean loss with its deviation, and median times."""
    losses = [curve[-1][1] for curve in curves]
    deviation = stdev(losses) if curves[1:] else math.nan
    yield f"loss {mean(losses):.3f} ± {deviation:.3f}"
    yield f"in all {median(curve[-1][0] for curve in curves):.1f} s"
    for target in TARGETS:
        times = [next((at for at, loss in curve if loss < target), math.inf) for curve in curves]
        yield f"to {target} {median(times):.1f} s"


def draw(curves):
    """Loss against wall time, a curve for each seed."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    text = datasets.split()[0]
    for number, row in enumerate(ROWS):
        for curve in curves[f"{text}: {row}"]:
            axes.plot(*zip(*curve, strict=True), ".-", color=f"C{number}", label=row)
            row = None  # one line in the legend
    axes.set(
        xscale="log",
        xlabel="seconds since the start of the process",
        ylabel=f"validation loss (nats), {text}",
        ylim=(1.4, 2.8),  # with room for the legend
        xticks=(2, 5, 10, 20, 50, 100),
    )
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(to, dpi=150)


if __name__ == "__main__":
    plumbing.exit_process(main())

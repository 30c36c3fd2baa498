"""Whole runs beside nanoGPT's, each a plain command in a process of its own, on the same texts.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py    # an hour on two cores; run nothing else
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py --seeds=1 --steps=50    # a trial
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py --six_layers=true --steps=100 --seeds=1

Each seed runs every row on every text before the next seed begins. `process` is the wall time of a
process in seconds, from its start to its end; `loss` that of the last weights over the whole
validation split. out_dir gets results.json after each run, and loss.png at the end.

nanoGPT's train.py runs with EDITS, by which it reads these datasets and has the flags of this train.py,
and with WHOLE_SPLIT at its end, the loss over the whole split, which its wall time does not include.
"""

import os
import re
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from bench import print_table  # noqa: E402
from checks.processes import watched  # noqa: E402
from plumbing import code, machine  # noqa: E402
from plumbing.cli import configured, fail, run_script  # noqa: E402
from plumbing.files import write_json  # noqa: E402
from plumbing.run_folder import now  # noqa: E402
from prepare_data import prepare  # noqa: E402

datasets = "shakespeare pydoc"  # texts, each with a table of its own
seeds = 5  # runs of each row on each text, [1, inf)
seed = 1337  # of the first of them, [0, 4294967295]
steps = 0  # of each run, [0, inf); 0 = as its command says
flags = ""  # added to the commands of this loop, such as --eval_interval=20
six_layers = False  # nanoGPT's recipe for a GPU: 6 layers, 384 wide, 5,000 steps, dropout
out_dir = "out/beside_nanogpt"

# nanoGPT's README, "I only have a macbook"
NANOGPT_RECIPE = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
# Its model and recipe: what is not typed is a default of train.py
SAME = "examples/gpt2.py --bias=false --gelu=none --beta2=0.99 --report=false"
ROWS = {
    "nanoGPT": f"nanoGPT {NANOGPT_RECIPE}",
    # nanoGPT evaluates 9 times 30,720 tokens; this one 3 times the split, of 111,540 or so
    "nanoGPT at four times its rate": (
        f"nanoGPT {NANOGPT_RECIPE} --learning_rate=4e-3 --min_lr=4e-4"
    ),
    "same model, same recipe, this loop": (
        f"{SAME} --n_layer=4 --batch_size=12 --decay_steps=2000 --dtype=float32 --eval_interval=1000"
    ),
    "one plain layer, tuned, with Muon": "train.py config/shakespeare_plain.py",
    "with two extras": "train.py config/shakespeare_fast.py",
}
WIDE = (
    f"{SAME} --n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --batch_size=64 --dropout=0.2 "
    "--warmup_steps=100 --max_steps=5000 --decay_steps=5000"
)
SIX_LAYERS = {
    "nanoGPT": (
        "nanoGPT config/train_shakespeare_char.py --device=cpu --eval_iters=20 --log_interval=1"
    ),
    "same model, same recipe, this loop, float32": f"{WIDE} --dtype=float32",
    "the same in the dtype that this machine suits": WIDE,
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
WHOLE_SPLIT = f"""
import sys
sys.path.append({str(REPO)!r})
from plumbing.data import OrderedWindows
began, total, counted = time.time(), 0.0, 0
windows = OrderedWindows(np.memmap(data_dir + "/val.bin", np.uint16, "r"), block_size)
raw_model.eval()
with torch.no_grad():
    for first in range(0, len(windows), batch_size):
        x, y = map(torch.from_numpy, windows[first, min(batch_size, len(windows) - first)])
        y[y == -100] = -1  # what nanoGPT ignores
        total += raw_model(x, y)[1].item() * (y != -1).sum().item()
        counted += (y != -1).sum().item()
print(f"{{sum(weight.numel() for weight in raw_model.parameters()):,}} parameters")
print(f"whole split: val loss {{total / counted}}, seconds {{time.time() - began}}")
"""  # of the windows that this train.py evaluates
LOSS = re.compile(r"val loss (\d+\.\d+)")
FORMATS = {  # of the columns of a table
    "parameters": ",.0f",
    "loss": ".4f",
    "deviation": ".4f",
    "process": ".1f",
    "peak_gb": ".2f",
}


def main(argv: list[str] | None = None) -> None:
    with configured(globals(), argv=argv):
        commands = SIX_LAYERS if six_layers else ROWS
        texts = datasets.split()
        for text in texts:
            prepare(text, f"{REPO}/data")
        runs = defaultdict(list)  # of each row of the tables
        facts = {
            "command": sys.argv,
            "date": now(),
            "git": code.git_state()[0],
            **machine.describe_machine(torch.device("cpu")),
            "commands": commands,
            "runs": runs,
        }
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        for number, text, row in product(range(seed, seed + seeds), texts, commands):
            found = measure(f"{commands[row]} --dataset={text} --seed={number}")
            print(text, number, row, found["loss"], found["process"], flush=True)
            runs[f"{text}: {row}"].append(found)
            facts["rows"] = {name: summary(each) for name, each in runs.items()}
            write_json(f"{out_dir}/results.json", facts)
        print_table(facts["rows"], **FORMATS)
        draw(runs)


def measure(command: str) -> dict:
    """The numbers of one run."""
    script, *words = command.split()
    start, home = [script, *flags.split()], REPO
    if script == "nanoGPT":
        home = os.environ.get("NANOGPT", "")
        start = ["-c", source_of_nanogpt(Path(home, "train.py"))]
    if steps:
        words.append(f"--max_steps={steps}")
    with TemporaryDirectory() as folder:
        words += [f"--data_dir={REPO}/data", f"--out_dir={folder}"]
        lines, peak = watched([*start, *words], home)
    printed = "".join(line for _, line in lines)
    curve = [(at, float(found[1])) for at, line in lines if (found := LOSS.search(line))]
    (*_, parameters) = re.findall(r"([\d,]+) parameters", printed)
    return {
        "process": lines[-1][0] - sum(map(float, re.findall(r", seconds (\S+)", printed))),
        "loss": curve[-1][1],
        "parameters": int(parameters.replace(",", "")),
        "peak_gb": peak / 1e6,
        "curve": curve,  # [(seconds since the start, validation loss), ...], as printed
    }


def source_of_nanogpt(path: Path) -> str:
    """What runs for its train.py."""
    source = path.read_text("utf-8") if path.is_file() else ""
    for theirs, ours in EDITS.items():
        if theirs not in source:
            fail(f"NANOGPT={path.parent}: expected a clone of nanoGPT, with {theirs!r} in train.py")
        source = source.replace(theirs, ours)
    return source + WHOLE_SPLIT


def summary(runs: list[dict]) -> dict:
    """The row of a table: the mean loss with its deviation, the median of all else."""
    losses = [run["loss"] for run in runs]
    row = {name: median(run[name] for run in runs) for name in FORMATS if name in runs[0]}
    return row | {"loss": mean(losses), "deviation": stdev(losses) if runs[1:] else None}


def draw(runs: dict) -> None:
    """Loss against wall time on the first text: the mean and deviation over the seeds at each
    evaluation, at its median time. Dotted: where the first row ends."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    text = next(iter(runs)).partition(": ")[0]
    for name, each in runs.items():
        if name.startswith(text):
            curves = np.array([run["curve"] for run in each])  # (seeds, evaluations, 2)
            seconds, losses = np.median(curves, 0)[:, 0], curves.mean(0)[:, 1]
            spread = curves.std(0)[:, 1]
            (line,) = axes.plot(seconds, losses, ".-", label=name.removeprefix(f"{text}: "))
            colour = line.get_color()
            axes.fill_between(seconds, losses - spread, losses + spread, color=colour, alpha=0.2)
            if name == next(iter(runs)):
                axes.axhline(losses[-1], linestyle=":", color=colour)
    axes.set(xscale="log", xlabel="seconds since the start of the process")
    axes.set(ylabel="validation loss (nats)", ylim=(None, 3))
    axes.set_xticks([5, 10, 20, 50, 100, 200], "5 10 20 50 100 200".split(), minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    facts = {"Command": " ".join(["python", *sys.argv])}
    figure.savefig(f"{out_dir}/loss.png", metadata=facts, dpi=150)


if __name__ == "__main__":
    sys.exit(run_script(main))

"""Whole runs beside nanoGPT's, each a plain command in a process of its own, on the same texts.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py    # an hour on two cores; run nothing else
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py --seeds=1 --steps=50    # a trial
    NANOGPT=../nanoGPT python examples/beside_nanogpt.py --six_layers=true --steps=100 --seeds=1

Each seed runs every row on every text before the next seed begins. `process` is the wall time of a
process in seconds, from its start to its end; `loss` that of the last weights over the whole
validation split. out_dir gets results.json after each run, and loss.png at the end.

nanoGPT's train.py runs with three edits: the seed and the size of the vocabulary, for which it has
no flags, and the loss over the whole split at its end, which its wall time does not include.
"""

import os
import re
import sys
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from bench import print_table  # noqa: E402
from checks.processes import watched  # noqa: E402
from plumbing import code, machine  # noqa: E402
from plumbing.cli import configured, fail, run_script  # noqa: E402
from plumbing.files import write_json  # noqa: E402
from plumbing.log import read_rows  # noqa: E402
from plumbing.run_folder import now  # noqa: E402
from prepare_data import prepare  # noqa: E402

datasets = "shakespeare pydoc"  # texts, each with a table of its own
seeds = 5  # runs of each row on each text, [1, inf)
seed = 1337  # of the first of them, [0, 4294967295]
steps = 0  # of each run, [0, inf); 0 = as its command says
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
    "nanoGPT": f"$NANOGPT/train.py {NANOGPT_RECIPE}",
    # nanoGPT evaluates 9 times 30,720 tokens; this one 3 times the split, of 111,540 or so
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
        "$NANOGPT/train.py config/train_shakespeare_char.py --device=cpu --eval_iters=20 "
        "--log_interval=1"
    ),
    "same model, same recipe, this loop, float32": f"{WIDE} --dtype=float32",
    "the same in the dtype that this machine suits": WIDE,
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
SECONDS = (5, 10, 20, 50, 100, 200, 500, 1000)  # marks of the axis
LOSS = re.compile(r"val loss (\d+\.\d+)")
FORMATS = {  # of the columns of a table
    "parameters": ",.0f",
    "loss": ".4f",
    "deviation": ".4f",
    "process": ".1f",
    "step_ms": ".1f",
    "peak_gb": ".2f",
}


def main(argv: list[str] | None = None) -> None:
    with configured(globals(), argv=argv), TemporaryDirectory() as scratch:
        commands = SIX_LAYERS if six_layers else ROWS
        texts = {name: prepare(name, f"{REPO}/data") for name in datasets.split()}
        runs = {f"{text}: {row}": [] for text in texts for row in commands}
        facts = {
            "command": ["examples/beside_nanogpt.py", *(argv or sys.argv[1:])],
            "git": code.git_state()[0],
            **machine.describe_machine(torch.device("cpu")),
            "commands": commands,
            "runs": runs,
        }
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        for number, text, row in product(range(seed, seed + seeds), texts, commands):
            folder = f"{scratch}/{number}/{text}/{row}"
            found = measure(commands[row], *texts[text], number, folder)
            print(text, number, row, found["loss"], found["process"], flush=True)
            runs[f"{text}: {row}"].append(found)
            facts["date"] = now()
            facts["rows"] = {name: summary(each) for name, each in runs.items() if each}
            write_json(f"{out_dir}/results.json", facts)
        print_table(facts["rows"], **FORMATS)
        draw(runs)


def measure(command: str, data: str, meta: dict, number: int, folder: str) -> dict:
    """The numbers of one run, which writes to `folder`."""
    script, *words = command.split()
    words.append(f"--out_dir={folder}")
    if script.startswith("$"):
        start, home = ["-c", source_of_nanogpt(meta["vocab_size"], number)], os.environ["NANOGPT"]
        words += [f"--dataset={data}", f"--max_iters={steps}"]
    else:
        start, home = [script], REPO
        words += [f"--dataset={Path(data).name}", f"--seed={number}", f"--max_steps={steps}"]
    lines, peak = watched([*start, *(words if steps else words[:-1])], home)
    printed = "".join(line for _, line in lines)
    curve = [(at, float(found[1])) for at, line in lines if (found := LOSS.search(line))]
    rows = read_rows(f"{folder}/metrics.jsonl")
    step_ms = [row["step_ms"] for row in rows if row["kind"] == "train"]
    seconds = lines[-1][0] - float(re.search(r"whole split: .* (\S+)|$", printed)[1] or 0)
    curve[-1] = seconds, curve[-1][1]
    return {
        "process": seconds,
        "loss": curve[-1][1],
        "parameters": int(re.findall(r"([\d,]+) parameters", printed)[-1].replace(",", "")),
        "step_ms": median(step_ms or map(float, re.findall(r", time (\S+)ms", printed))),
        "peak_gb": peak / 1e6,
        "curve": curve,  # [(seconds since the start, validation loss), ...]
    }


def source_of_nanogpt(vocab_size: int, number: int) -> str:
    """Its train.py with the three edits."""
    path = Path(os.environ.get("NANOGPT", ""), "train.py")
    source = path.read_text("utf-8") if path.is_file() else ""
    for line, value in (("torch.manual_seed(1337", number), ("meta_vocab_size = None", vocab_size)):
        if line not in source:
            fail(f"NANOGPT={path.parent}: expected a clone of nanoGPT, with {line!r} in train.py")
        source = source.replace(line, re.sub(r"\w+$", str(value), line))
    return source + WHOLE_SPLIT


def summary(runs: list[dict]) -> dict:
    """The row of a table: the mean loss with its deviation, the median of all else."""
    losses = [run["loss"] for run in runs]
    row = {name: median(run[name] for run in runs) for name in FORMATS if name in runs[0]}
    return row | {"loss": mean(losses), "deviation": stdev(losses) if runs[1:] else None}


def draw(runs: dict) -> None:
    """Loss against wall time, a line for each run."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, (name, each) in enumerate(runs.items()):
        for run in each:
            axes.plot(*zip(*run["curve"], strict=True), f"C{number}.-")
        place = ("bottom", "top")[number % 2]  # nanoGPT and the same model end side by side
        axes.annotate(name, each[0]["curve"][-1], color=f"C{number}", va=place)
    axes.set(xscale="log", xlabel="seconds since the start", ylabel="validation loss (nats)")
    axes.set_xticks(SECONDS, SECONDS)
    figure.savefig(f"{out_dir}/loss.png", metadata={"Command": "python examples/beside_nanogpt.py"})


if __name__ == "__main__":
    sys.exit(run_script(main))

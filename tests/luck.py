"""The verdicts of reporting/verdicts.py, tried on recorded losses; what it prints stands in the
docs.

python tests/luck.py record DATA_DIR   # 400 losses of one loop, seeds 0 to 399: tests/luck.csv
python tests/luck.py power             # false verdicts, power, seeds used; beside the t-test
python tests/luck.py holm              # the paired t-tests of records/paired_tests.csv, all together
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy import mean

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from reporting.verdicts import SHARE, e_value, t_quantile, t_tail, verdict_on  # noqa: E402

LOSSES = REPO / "tests" / "luck.csv"
SHAPE = "--n_embd=32 --n_head=2 --block_size=16 --batch_size=8 --max_steps=60 --warmup_steps=6"
PAIRED = REPO / "records" / "paired_tests.csv"


def record(data_dir):
    """One process, so that 400 runs take minutes: the loop's own steps and evaluation."""
    import torch

    import train

    torch.set_num_threads(1)
    losses = []
    flags = (
        f"{SHAPE} --dataset=small --device=cpu --dtype=float32 --peak_lr=1e-2 --eval_tokens=2000"
    )
    for seed in range(400):
        with tempfile.TemporaryDirectory() as scratch:
            own = [f"--seed={seed}", f"--data_dir={data_dir}", f"--out_dir={scratch}/run"]
            with train.build([*flags.split(), "--compile=false", *own]) as run:
                for step in range(train.max_steps):
                    batch = run.train_data[run.state["sequences"], train.rows_at(step)]
                    batch = [torch.as_tensor(part) for part in batch]
                    train.train_step(run.model, run, *batch, train.lr_at(step))
                    train.count_batch(run, batch[1])
                losses.append(train.evaluate(run)["val_loss"])
    LOSSES.write_text("".join(f"{loss:.6f}\n" for loss in losses))


def recorded():
    return np.array([float(line) for line in LOSSES.read_text().split()])


def differences(rng, losses, effect, count=20):
    """Of `count` pairs of recorded losses, shifted by `effect` of their own standard deviations."""
    one, other = (rng.choice(losses, count) for _ in range(2))
    return list(one - other - effect * losses.std(ddof=1) * np.sqrt(2))


def power(trials=1000):
    """{effect: (share of verdicts, mean seeds used, {seeds: share of the t-test})}"""
    rng, losses, rows = np.random.default_rng(1), recorded(), {}
    for effect in (0, 0.5, 1, 2):
        shown, used, by_t = [], [], {5: [], 10: [], 20: []}
        for _ in range(trials):
            values = differences(rng, losses, effect)
            n = next((n for n in range(2, 20) if e_value(values[:n]) >= 1 / SHARE), 20)
            shown.append(verdict_on(values[:n]).word != "not shown")
            used.append(n)
            for seeds, share in by_t.items():
                part = values[:seeds]
                t = abs(mean(part)) / np.std(part, ddof=1) * np.sqrt(seeds)
                share.append(t > QUANTILES[seeds])
        rows[effect] = mean(shown), mean(used), {n: mean(share) for n, share in by_t.items()}
    return rows


QUANTILES = {seeds: t_quantile(seeds - 1) for seeds in (5, 10, 20)}


def comparisons():
    """(config and flags, mean, low, high, seeds) of each paired t-test in records/paired_tests.csv."""
    lines = PAIRED.read_text(encoding="utf-8").splitlines()
    found = []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        name = f"{row['config']} {row['flags']}"
        numbers = float(row["difference"]), float(row["low"]), float(row["high"])
        found.append((name, *numbers, int(row["seeds"])))
    return found


def p_value(middle, low, high, seeds):
    """Of a mean and its 95% interval, by the paired t-test."""
    t = abs(middle) / ((high - low) / 2) * t_quantile(seeds - 1)
    return float(np.interp(t, *t_tail(seeds - 1)))


def holm(p_values, share=SHARE):
    """Places of those that hold together, with a probability of at most `share` of any false one
    among them (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    held = []
    for rank, place in enumerate(order):
        if p_values[place] > share / (len(p_values) - rank):
            break
        held.append(place)
    return sorted(held)


def main(part, *arguments):
    if part == "record":
        record(*arguments)
    if part == "power":
        for effect, (shown, used, by_t) in power().items():
            t_tests = ", ".join(f"{share:.1%} at {seeds}" for seeds, share in by_t.items())
            print(f"{effect} SD: {shown:.1%} in {used:.1f} seeds; one t-test: {t_tests}")
    if part == "holm":
        rows = comparisons()
        p_values = [p_value(*row[1:]) for row in rows]
        held = holm(p_values)
        alone = [n for n, p in enumerate(p_values) if p < SHARE]
        print(f"{len(rows)} comparisons; {len(alone)} alone, {len(held)} by Holm's; no longer:")
        for n in sorted(set(alone) - set(held)):
            print(f"  {rows[n][0]}: {rows[n][1]:+.4f}, p = {p_values[n]:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""PYTHONPATH=. python tests/scaling.py: the table of docs/scaling.md, calculated."""

import math

import torch

from model import build_model

SHAPE = {"n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024}  # GPT-2 1.5B
TOKENS = 1024 * 1024  # of a step
# an H200, by its datasheet: FLOP/s at 40% of the peak in bfloat16; bytes/s, links at 80%
SPEED, MEMORY, NVLINK, INFINIBAND = 0.4 * 989e12, 4.8e12, 0.8 * 450e9, 0.8 * 50e9
# measured on two CPU cores: seconds of a message by gloo, bytes/s of a checkpoint that is copied
MESSAGE, COPY = 0.16e-3, 6.7e9
FAILURES = 419 / (54 * 24 * 60 * 16384)  # a GPU and minute (Llama team 2024)


def rows():
    """The rows of the table, as Markdown."""
    with torch.device("meta"):
        model = build_model(SHAPE, vocab_size=50257)
    weights = sum(weight.numel() for weight in model.parameters())
    for n in (8, 64, 1024):
        compute = TOKENS * model.flops_per_token() / n / SPEED
        links = NVLINK if n == 8 else 8 * INFINIBAND
        all_reduce = 2 * (n - 1) / n * 4 * weights / links
        agreements = 2 * 2 * (n - 1) * MESSAGE
        copies = 4 * 4 * weights / MEMORY  # into one buffer and back
        step = max(compute + all_reduce + copies, agreements)
        save = math.sqrt(2 * 12 * weights / COPY / 60 / (n * FAILURES))  # minutes (Daly 2006)
        times = (f"{1000 * seconds:.0f}" for seconds in (compute, all_reduce, agreements, step))
        yield f"| {n:,} | {' | '.join(times)} | {1 - compute / step:.0%} | {save:.0f} |"


if __name__ == "__main__":
    print(*rows(), sep="\n")

"""What limits this loop on 8, 64 and 1,024 GPUs: prints the tables of docs/scaling.md.

    python docs/scaling.py
    torchrun --standalone --nproc_per_node=2 docs/scaling.py measure    # what MEASURED holds, anew

A model of the loop, not a measurement of it. Every input stands below with where it is from.
"""

import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import machine
import record
from model import GPT, GPTConfig

DATASHEET = {
    "peak": 989e12,  # FLOP/s: H100 SXM and H200, bfloat16, dense
    "memory": 4.8e12,  # bytes/s: H200
    "capacity": 141e9,  # bytes: H200
    "nvlink": 450e9,  # bytes/s each way and GPU: NVLink 4
    "network": 50e9,  # bytes/s each way and GPU: 400 Gb/s InfiniBand, one adapter for each GPU
}
ASSUMED = {
    "mfu": 0.4,  # of the peak, on one GPU; never measured with this loop
    "link": 0.8,  # share of a link's rate that an all-reduce reaches
    "restart": 300.0,  # seconds from a failure to the first new step: found, scheduled, loaded
}
# Mean GPU hours between two unexpected stops: 419 in 54 days on 16,384 H100 (Llama team 2024, "The
# Llama 3 herd of models", section 3.3.4)
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
# Two cores of an Intel Xeon with AMX, gloo between 2 ranks of one thread each, 2026-11-21, `measure`
MEASURED = {
    "snapshot": 6.7e9,  # bytes/s: copy of a checkpoint into kept buffers, for which the loop waits
    "write": 0.69e9,  # bytes/s: torch.save and fsync, in the writer thread
    "read": 1.2e9,  # bytes/s: load_checkpoint, checksums included
    "message": 1.6e-4,  # seconds: one of the 2 (n - 1) in turn that an agreement of n ranks takes
    "windows": 3.2e7,  # per second: permuting the windows of an epoch
}
GPUS_OF_A_NODE = 8
GPUS = (8, 64, 1024)
SEQUENCES = 1024  # in a step, at any number of GPUs: this loop gives each rank one at least
SHAPES = {  # with this repository's blocks, n-gram table and head
    "GPT-2 124M": GPTConfig(50304, 1024, 12, 768, 12),
    "GPT-2 1.5B": GPTConfig(50304, 1024, 25, 1600, 48),
    "Llama 7B": GPTConfig(32000, 2048, 32, 4096, 32),
}


def sizes(config):
    """(parameters, FLOPs to train on one token) of a shape."""
    with torch.device("meta"):
        model = GPT(config)
    return model.num_params(), model.flops_per_token()


def all_reduce_seconds(size, gpus):
    """Time to sum `size` bytes over `gpus`: each sends and receives 2 (n - 1) / n of them, as a ring
    does (Patarasuk and Yuan 2009). Between nodes all eight adapters of a node carry a share."""
    rate = DATASHEET["nvlink"]
    if gpus > GPUS_OF_A_NODE:
        rate = min(rate, GPUS_OF_A_NODE * DATASHEET["network"])
    return 2 * (gpus - 1) / gpus * size / (rate * ASSUMED["link"])


def step_of(config, gpus):
    """Seconds of the parts of a step: forward and backward, the flat buffer's copies, its all-reduce,
    and on the host, meanwhile, the agreements of the ranks."""
    params, flops = sizes(config)
    tokens = SEQUENCES * config.block_size / gpus
    compute = flops * tokens / (DATASHEET["peak"] * ASSUMED["mfu"])
    # float32 gradients into one buffer and out of it again, each time read and written
    copies = 4 * 4 * params / DATASHEET["memory"]
    # two in a step (memory; signals), each a ring: gloo's all-reduce
    agreements = 2 * 2 * (gpus - 1) * MEASURED["message"]
    return compute, copies, all_reduce_seconds(4 * params, gpus), agreements


def best_interval(stall, between_failures):
    """Seconds between saves that lose the least: sqrt(2 * stall * mean time between failures)
    (Young 1974; the first order of Daly 2006)."""
    return math.sqrt(2 * stall * between_failures)


def lost(interval, stall, between_failures):
    """Share of the time that saving, and computing again after a failure, cost."""
    again = interval / 2 + ASSUMED["restart"]
    return stall / interval + again / between_failures


# ---- the tables ----------------------------------------------------------------------------------


def table(*rows):
    """A Markdown table; the first column is words, the others are numbers."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" + "|--:" * (len(rows[0]) - 1) + "|")
    for row in rows[1:]:
        print("| " + " | ".join(row) + " |")
    print()


def memory_table():
    head = "shape;parameters;held by each GPU, GB;of an H200;summed in a step, GB"
    rows = [tuple(head.split(";"))]
    for name, config in SHAPES.items():
        params, _ = sizes(config)
        # weights, gradients, two moments, and the flat buffer; activations come on top
        held = 5 * 4 * params
        share = f"{held / DATASHEET['capacity']:.0%}"
        rows.append((name, f"{params:,}", f"{held / 1e9:.1f}", share, f"{4 * params / 1e9:.2f}"))
    table(*rows)


def step_seconds(compute, copies, reduce, agreements):
    """The host runs ahead of the GPU, and an agreement hides behind it until it takes longer."""
    return max(compute + copies + reduce, agreements)


def step_table():
    head = "shape, GPUs;sequences each;compute;copies;all-reduce;agreements;step;lost;lost, changed"
    rows = [tuple(head.split(";"))]
    for name in ("GPT-2 124M", "GPT-2 1.5B"):
        for gpus in GPUS:
            parts = compute, _, reduce, _ = step_of(SHAPES[name], gpus)
            step = step_seconds(*parts)
            # overlapped with the backward pass, two thirds of the work; agreements out of the way
            changed = compute + max(0.0, reduce - compute * 2 / 3)
            cells = [f"{name}, {gpus:,}", f"{SEQUENCES // gpus}"]
            cells += [f"{1000 * each:.1f}" for each in (*parts, step)]
            rows.append((*cells, f"{1 - compute / step:.0%}", f"{1 - compute / changed:.0%}"))
    table(*rows)


def data_table():
    config = SHAPES["GPT-2 1.5B"]
    head = "GPUs;tokens/s;read, MB/s;windows/s;read by all ranks at a resume, TB"
    rows = [tuple(head.split(";"))]
    for gpus in GPUS:
        compute, *_ = step_of(config, gpus)
        tokens = SEQUENCES * config.block_size / compute  # as if nothing else took time
        resume = 12 * sizes(config)[0] * gpus
        cells = [f"{gpus:,}", f"{tokens:,.0f}", f"{2 * tokens / 1e6:.1f}"]
        rows.append((*cells, f"{tokens / config.block_size:,.0f}", f"{resume / 1e12:.1f}"))
    table(*rows)


def failure_table():
    size = 12 * sizes(SHAPES["GPT-2 1.5B"])[0]
    stall, write = size / MEASURED["snapshot"], size / MEASURED["write"]
    head = "GPUs;hours between failures;best interval, min;lost at it;lost saving every 3 h"
    rows = [tuple(head.split(";"))]
    for gpus in GPUS:
        between = 3600 * GPU_HOURS_PER_FAILURE / gpus
        best = max(best_interval(stall, between), write)  # a save waits for the one before it
        cells = [f"{gpus:,}", f"{between / 3600:,.0f}", f"{best / 60:.0f}"]
        rows.append(
            (*cells, f"{lost(best, stall, between):.1%}", f"{lost(10800, stall, between):.1%}")
        )
    print(
        f"Checkpoint: {size / 1e9:.1f} GB; the loop waits {stall:.1f} s, the writer {write:.0f} s.\n"
    )
    table(*rows)


# ---- measured here -------------------------------------------------------------------------------


def seconds(function, *args, times=5):
    """The shortest of some timings."""
    best = math.inf
    for _ in range(times):
        start = time.perf_counter()
        function(*args)
        best = min(best, time.perf_counter() - start)
    return best


def measure():
    """Print MEASURED, and the loop's own all-reduce, as they are on this machine. Under torchrun."""
    machine.join_ranks()
    torch.manual_seed(0)
    agree = seconds(lambda: [machine.agree(0, 0, 0) for _ in range(200)]) / 200
    gradients = [torch.ones(1000, 1000) for _ in range(25)]
    reduce = seconds(machine.sum_over_ranks, gradients)
    ranks = machine.world_size()
    machine.say(f"an agreement of {ranks} ranks {agree:.2e} s; the sum of 0.1 GB {reduce:.3f} s")
    if machine.rank() == 0:
        weights = {str(i): torch.rand(1000, 1000) for i in range(75)}
        parts = "optimizer scaler ema rng config data run".split()
        checkpoint = {"model": weights, "state": {"step": 0}} | dict.fromkeys(parts)
        size, buffers = 4e6 * len(weights), {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ckpt_00000000.pt")

            def write():
                torch.save(checkpoint, path)
                record.sync(path)

            shuffle = np.random.RandomState(0).permutation
            rates = {
                "message": agree / (2 * (ranks - 1)),
                "snapshot": size / seconds(record.copy_tensors, checkpoint, buffers),
                "write": size / seconds(write),
                "read": size / seconds(record.load_checkpoint, path),
                "windows": 1e7 / seconds(shuffle, 10_000_000, times=2),
            }
        print({name: float(f"{rate:.2g}") for name, rate in rates.items()})


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    else:
        memory_table()
        step_table()
        data_table()
        failure_table()

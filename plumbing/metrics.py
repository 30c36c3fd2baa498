"""Rows of metrics.jsonl: the numbers of steps, fetched from the device, with times and rates."""

import math

import torch

from plumbing import devices
from plumbing.cli import RunFailed


def finish_rows(steps, clock, run):
    """Rows of kind "train" for `steps`, [(fields, {name: device scalar}), ...]: all since the last
    lap of the clock, so times exclude evaluation and saving. The host waits for the device here."""
    named = [item for _, numbers in steps for item in numbers.items()]
    values = iter(torch.stack([scalar(*item, run.device) for item in named]).tolist())
    rows = [fields | {name: next(values) for name in numbers} for fields, numbers in steps]
    seconds = clock.lap("train")
    tokens_per_sec = sum(row.pop("batch_tokens") for row in rows) / seconds
    mfu = flops_per_token(run.model) * tokens_per_sec / run.max_flops
    common = {
        "step_ms": 1000 * seconds / len(rows),
        "tokens_per_sec": tokens_per_sec,
        "mfu": None if math.isnan(mfu) else mfu,
        "mem_gb": devices.memory_gb(run.device),
        "gpu_util": devices.gpu_util(run.device),
    }
    return [{"kind": "train"} | row | {"skipped": int(row["skipped"])} | common for row in rows]


def scalar(name, value, device):
    """A number that train_step returns as `name`, a tensor or not, as a float64 scalar on `device`."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    value = torch.as_tensor(value, dtype=dtype, device=device).detach()
    if value.numel() != 1:
        raise RunFailed(f"train_step returns {value.numel()} numbers as {name!r}: expected one")
    return value.reshape(())


def flops_per_token(model):
    """FLOPs to train on one token, or NaN if the model has no such method."""
    return model.flops_per_token() if hasattr(model, "flops_per_token") else math.nan

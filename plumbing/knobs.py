"""Knobs get their final values before anything is built: the start of a run."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from plumbing import checkpoint, code, machine, ranks, resume
from plumbing.cli import Config, fail, folder_name
from plumbing.ranks import from_rank0
from plumbing.run_folder import RunFolder


@dataclass
class Start:
    """Where a run begins."""

    device: torch.device
    folder: RunFolder
    path: Path | None  # of the checkpoint from which it goes on; None: a new run
    reasons: dict  # knob that was "auto" -> why it has its value


def settle_knobs(config: Config, stack: ExitStack, to_train: bool) -> tuple[Start, dict | None]:
    """Give every knob its final value, in `config` and in train.py, by the hardware and by the
    checkpoint to go on from; only compile="auto" waits for the model, whose FLOPs decide. The
    ranks join, and the folder is locked if the run is `to_train`, in the contexts of `stack`.
    Returns also what that checkpoint holds, or None. Raises BadInput."""
    refuse_contradictions(config)
    config.settle(out_dir=folder_name(config, code.script()))
    config.settle(**machine.pin_kernels(config))  # if portable: before the first operation
    device = machine.choose_device(config["device"])
    if config["device"] == "auto":
        config.settle(device=device.type)
    config.settle(deterministic=machine.set_deterministic(config["deterministic"], device))
    if config["audit_interval"] > 0 and not config["deterministic"]:
        asked = f"--audit_interval={config['audit_interval']}"
        fail(f"{asked}: expected deterministic mode, which is off")
    stack.enter_context(ranks.joined(device, config["shard"]))
    folder = stack.enter_context(RunFolder(config["out_dir"]))
    if to_train:
        from_rank0(folder.lock)
    path = from_rank0(resume.find_checkpoint, folder, config["resume"], to_train)
    saved = checkpoint.load(path, verify=False) if path else None  # it is verified by now
    values, reasons = from_rank0(resume.resolve_auto_knobs, config, saved, device)
    config.settle(**values)
    return Start(device, folder, path, reasons), saved


def refuse_contradictions(config: Config) -> None:
    """Raises BadInput if two knobs contradict each other."""
    for low, high in (("warmup_steps", "max_steps"), ("min_lr", "peak_lr")):
        is_too_high = config[low] > config[high]
        if is_too_high and (low in config.typed or low == "min_lr"):  # a default warmup shrinks
            limit = f"--{high}={config[high]}"
            fail(f"--{low}={config[low]}: expected no more than {limit}")

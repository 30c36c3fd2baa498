"""Knobs get their final values before anything is built: the start of a run."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from plumbing import checkpoint, code, machine, ranks, resume
from plumbing.cli import Config, fail, folder_name
from plumbing.console import knob_words, print0, shown
from plumbing.files import read_json
from plumbing.ranks import from_rank0
from plumbing.run_folder import RunFolder


@dataclass
class Start:
    """Where a run begins."""

    device: torch.device
    folder: RunFolder
    path: Path | None  # the checkpoint from which the run goes on; None: it is new
    reasons: dict  # knob that was "auto" -> why it has its value


def settle_knobs(config: Config, stack: ExitStack, to_train: bool) -> tuple[Start, dict | None]:
    """Give every knob its final value, in `config` and in train.py, by the hardware and by the
    checkpoint to go on from; only compile="auto" waits for the model, whose FLOPs decide. The
    ranks join, and the folder is locked if the run is `to_train`, in the contexts of `stack`.
    Returns also what that checkpoint holds, or None. Raises BadInput."""
    refuse_contradictions(config)
    config.settle(out_dir=folder_name(config, code.script()))
    config.settle(**machine.pin_kernels(config))  # portable: before torch's first operation
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
    saved = checkpoint.load(path, verify=False) if path else None  # find_checkpoint verified it
    if to_train and not path and "out_dir" not in config.typed:
        print_runs_beside(folder.path, config)
    values, reasons = from_rank0(resume.resolve_auto_knobs, config, saved, device)
    config.settle(**values)
    return Start(device, folder, path, reasons), saved


def print_runs_beside(folder: Path, config: Config) -> None:
    """For a run that begins in `folder`: name each run beside it that this command would go on with,
    if its name had not other knobs that a resume may change, or another name of the same script."""
    course = {name for name, knob in config.knobs.items() if not knob.policy}
    script = code.script_fact().split()  # name, hash of the text
    for path in folder.parent.glob("*/run.json"):
        facts = read_json(path)
        saved = checkpoint.numbered(path.parent, "ckpt")
        words = facts.get("run", {}).get("script", "").split()
        parts = {*folder.name.split(",")} ^ {*path.parent.name.split(",")}
        names = {part.partition("=")[0] for part in parts}
        stems = {word.removesuffix(".py") for word in script + words}
        if saved and names and names <= course | stems and {*script} & {*words}:
            step = checkpoint.step_of(saved[0])
            then = {name: facts["config"][name] for name in names & course}
            if step < config["max_steps"] or not then:
                found = f"{shown(path.parent)} has this run{knob_words(then)} at step {step:,}"
                print0(f"{found}; to go on there, add --out_dir={shown(path.parent)}")


def refuse_contradictions(config: Config) -> None:
    """Raises BadInput if two knobs contradict each other."""
    for low, high in (("warmup_steps", "max_steps"), ("min_lr", "peak_lr")):
        is_too_high = config[low] > config[high]
        if is_too_high and (low in config.typed or low == "min_lr"):  # a default warmup shrinks
            limit = f"--{high}={config[high]}"
            fail(f"--{low}={config[low]}: expected no more than {limit}")

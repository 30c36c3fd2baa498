"""The weights of another run as the start of a new one, --init_from=PATH: a checkpoint, or a
.safetensors file that sample.py --export wrote. Nothing in such a file is executed."""

from pathlib import Path
from typing import Any

import torch

from plumbing import checkpoint
from plumbing.cli import fail
from plumbing.console import print0
from plumbing.files import digest_of
from plumbing.fsdp import shard_like
from plumbing.ranks import from_rank0

# Knobs, and entries of a dataset's `meta`, on which the meaning of weights and of ids depends
COMPARED = "n_layer n_head n_embd ngram_rows conv_width tokenizer chars vocab_size".split()
EXPECTED = (
    "expected the path of a checkpoint, such as out/NAME/best.pt, or of a .safetensors file; leave "
    "it out for random weights, or to resume; for GPT-2's: examples/gpt2.py --weights=FOLDER"
)


@torch.no_grad()
def begin_from(run: Any, init_from: str, saved: dict | None) -> None:
    """Copy the weights of the file `init_from`, averaged ones if it has them, into the model and the
    averages of `run`. A run that goes on from its checkpoint `saved` keeps its own, and prints if
    the file is gone or has changed. Raises BadInput."""
    path = Path(init_from)
    if saved:
        digest = from_rank0(lambda: path.is_file() and digest_of(path))
        if digest != run.facts["run"]["init_sha256"]:
            print0(
                f"{path}, from which this run began, is gone or has changed: not read; "
                f"to start anew: --resume=restart or {run.folder.fresh_out_dir()}"
            )
        return
    from_rank0(require_fit, run, path)
    tensors, _ = read(path)
    weights = [*run.model.state_dict().items(), *run.model.named_parameters()]
    for name, weight in (*weights, *run.ema.items()):  # only one of two tied names has an average
        weight.copy_(shard_like(weight, tensors[name]))


def require_fit(run: Any, path: Path) -> None:
    """Raises BadInput if the file at `path` is of another vocabulary or shape than `run`."""
    tensors, there = read(path)
    here = metadata_of(run.facts)
    other = [name for name in COMPARED if (here | there).get(name) != here.get(name)]
    if other:
        flags = " ".join(f"--{name}={there[name]}" for name in other if name in run.knobs)
        fail(
            f"--init_from={path} was trained with other {', '.join(other)}; write "
            f"{flags or 'python prepare_data.py NAME --input=FILE --chars_of=OTHER'}"
        )
    if "n_head" not in there:
        print0(f"{path} does not say its n_head and vocabulary: they are not compared")
    weights = run.model.state_dict()
    for name in weights | tensors:
        shapes = [getattr(each.get(name), "shape", "absent") for each in (tensors, weights)]
        if shapes[0] != shapes[1]:
            fail(f"--init_from={path}: {name} is {shapes[0]}; expected {shapes[1]}")


def read(path: Path) -> tuple[dict, dict]:
    """({name: tensor}, metadata_of() the run) of a file. Raises BadInput if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix != ".safetensors":
            saved = checkpoint.load(path)
            return saved["model"] | saved["ema"], metadata_of(saved)
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (OSError, checkpoint.Damaged, SafetensorError) as error:
        fail(f"--init_from={path}: {error}; {EXPECTED}")


def metadata_of(saved: dict) -> dict:
    """The config of a checkpoint, and what it says of its dataset, as metadata of an export."""
    known = {"format": "pt"} | saved["config"] | saved["data"]["meta"]
    return {name: str(value) for name, value in known.items()}

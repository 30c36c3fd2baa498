"""
Generate text with a trained model, from a run's folder (its best.pt) or from one checkpoint:

    python sample.py out/shakespeare
    python sample.py out/shakespeare --start="ROMEO:" --num_samples=3 --temperature=0.8
    python sample.py out/shakespeare/ckpt_00001000.pt --start=FILE:prompt.txt
    python sample.py out/shakespeare --export=shakespeare.safetensors

The checkpoint holds the vocabulary (gpt2's comes from tiktoken), so the dataset is not needed. Any file
of torch.save will do that holds `model`, `config` and `data` as those of train.py do. Only the text
goes to stdout; the checkpoint's name and its best, and the tokens per second, go to stderr.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from model import InvalidShape, build_model, generate
from plumbing import checkpoint
from plumbing.cli import accept, configured, fail, printable, read_knobs, run_script
from plumbing.console import best_words
from plumbing.data import DataError, decode_utf8, needed, read_file, tokenizer_of
from plumbing.files import replacing
from plumbing.machine import choose_device

# What to write
start = ""  # the text to continue, or FILE:path of it; "" = a line break
num_samples = 1  # [1, inf)
max_new_tokens = 500  # of each sample, [1, inf)
export = ""  # write the weights, averaged if they are, to this .safetensors file instead; "" = off

# How to draw
temperature = 0.8  # below 1 makes likely tokens likelier, [0, inf); 0 = always the likeliest
top_k = 0  # draw only from this many of the likeliest tokens, [0, inf); 0 = from all
seed = 1337  # of the first sample, [0, 4294967295]; each further sample adds 1
device = "auto"  # auto, cpu, cuda, cuda:1 or mps

NEEDED = ("model", "config", "data")  # parts of a checkpoint


# ---- reading a checkpoint ------------------------------------------------------------------------


def open_checkpoint(name: str) -> tuple[Path, dict]:
    """(path, checkpoint) of a file, or of a run's best.pt, else its newest. Raises BadInput if none.

    Changes nothing in the folder, because a run may be using it.
    """
    paths = [Path(name)]
    if paths[0].is_dir():
        best_first = [*paths[0].glob("best.pt"), *checkpoint.newest_first(paths[0])]
        paths = list(dict.fromkeys(best_first))
        if not paths:
            fail(f"{name} holds no checkpoint; expected the folder of a run that saved one")
    elif not paths[0].exists():
        fail(f"{name} is not there; type: python sample.py out/NAME, the out_dir of a run")
    for path in paths:
        try:
            return path, checkpoint.load(path, parts=NEEDED)
        except checkpoint.Damaged as error:
            problem = f"{path} is damaged, or no checkpoint of train.py: {error}"
            if path == paths[-1]:
                fail(problem)
            print(printable(f"sample.py: {problem}"), file=sys.stderr)
        except OSError as error:
            fail(f"cannot read {path}: {error.strerror}")


def rebuild(path: Path, saved: dict) -> tuple[torch.nn.Module, Any]:
    """(model, tokenizer) of a checkpoint, with its averaged weights if it has any. What is wrong with
    the file raises BadInput; an error in the model's own code is left as it is."""
    config, meta = saved["config"], saved["data"].get("meta")
    if not isinstance(meta, dict) or "tokenizer" not in meta:
        fail(f"{path} was not trained on text; expected a run of train.py on text")
    knobs = read_knobs(Path(__file__).with_name("train.py"))
    for name in config.keys() & knobs.keys():
        accept(name, config[name], f"{path}: {name} = {config[name]!r}", knobs)
    try:
        tokenizer = tokenizer_of(meta)
        tokenizer.decode([0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fail(f"{path} is no checkpoint of train.py: its tokenizer ({type(error).__name__} {error})")
    if "block_size" not in config:
        fail(f"{path} is no checkpoint of train.py: its config lacks block_size")
    try:
        model = build_model(config, tokenizer.vocab_size)
    except (InvalidShape, TypeError) as error:
        if isinstance(error, TypeError) and "GPTConfig" not in str(error):  # it lacks an argument
            raise
        fail(f"{path} is no checkpoint of train.py: {error}")
    averages = saved.get("ema") or {}
    weights = saved["model"] | averages
    built = model.state_dict()
    for name in built | weights:
        then, here = (list(w[name].shape) if name in w else "absent" for w in (weights, built))
        if then != here:
            fail(
                f"{path}: {name} is {then} in it, but {here} in model.py with its config and its "
                f"vocabulary of {tokenizer.vocab_size:,}; expected the model.py of that run"
            )
    model.load_state_dict(saved["model"])
    model.load_state_dict(averages, strict=False)  # tied weights have one average
    return model.eval(), tokenizer


# ---- writing text --------------------------------------------------------------------------------


def stream(ids: Iterable[int], tokenizer: Any) -> Iterator[str]:
    """Yields the text of `ids` as its characters are complete: a token may end within one."""
    waiting = []
    for i in ids:
        waiting.append(i)
        text = tokenizer.decode(waiting)
        if not text.endswith("\ufffd"):
            yield text
            waiting = []
    yield tokenizer.decode(waiting)


def encode_prompt(text: str, tokenizer: Any) -> torch.Tensor:
    """Token ids, int64 (1, T), T >= 1. Raises DataError if the vocabulary lacks a character."""
    try:
        ids = tokenizer.encode(text or "\n")
    except DataError:
        if text:
            raise
        ids = [0]  # a vocabulary without a line break
    return torch.tensor([[int(i) for i in ids]])


def write_samples(path: Path, saved: dict) -> None:
    where = choose_device(device)
    model, tokenizer = rebuild(path, saved)
    model.to(where)
    block_size = saved["config"]["block_size"]
    try:
        text = start
        if start.startswith("FILE:"):
            file = os.path.expanduser(start.removeprefix("FILE:"))
            text = decode_utf8(read_file(file), file)
        prompt = encode_prompt(text, tokenizer).to(where)
    except DataError as error:
        fail(f"--start={start[:40]}: {error}")
    print(printable(describe(path, saved)), file=sys.stderr)
    if prompt.size(1) > block_size:
        print(f"only the last {block_size} tokens of --start count", file=sys.stderr)
    began = time.perf_counter()
    for number in range(num_samples):
        if number:
            print("\n" + "-" * 80)
        print(printable(text), end="", flush=True)
        generator = torch.Generator(where).manual_seed((seed + number) % 2**32)
        how = (max_new_tokens, block_size, tokenizer.vocab_size, temperature, top_k, generator)
        for piece in stream((i.item() for i in generate(model, prompt, *how)), tokenizer):
            print(printable(piece), end="", flush=True)
    print(flush=True)
    count = num_samples * max_new_tokens
    seconds = time.perf_counter() - began
    rate = f"{count / seconds:,.0f} tokens/s"
    print(f"{count:,} tokens in {seconds:.2f} s: {rate}", file=sys.stderr)


def describe(path: Path, saved: dict) -> str:
    """The file, and the step and the best of its run where it has them."""
    state = saved.get("state", {})
    if not state.keys() >= {"step", "best_score", "best_step"}:
        return str(path)
    best = best_words(saved["config"].get("best_metric", "val_loss"), state)
    return f"{path}, step {state['step']:,}, {best}"


# ---- writing weights -----------------------------------------------------------------------------


def export_weights(path: Path, saved: dict) -> None:
    """Write the weights alone, under their own names, to `export`: of any model, not only a GPT."""
    needed("safetensors", "--export")
    from safetensors.torch import save

    weights = {name: weight.clone().contiguous() for name, weight in saved["model"].items()}
    names = {}  # address in memory -> names: tied weights have one average
    for name, weight in saved["model"].items():
        names.setdefault(weight.data_ptr(), []).append(name)
    averages = saved.get("ema") or {}
    for name in averages.keys() & saved["model"].keys():
        for tied in names[saved["model"][name].data_ptr()]:
            weights[tied] = averages[name].clone().contiguous()
    try:
        with replacing(export) as temporary:
            temporary.write_bytes(save(weights, {"format": "pt"}))
    except OSError as error:
        fail(f"--export={export} cannot be written ({error.strerror})")
    print(f"{describe(path, saved)}: {len(weights)} tensors in {export}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one run, found {len(names)}; type: python sample.py out/NAME")
        path, saved = open_checkpoint(names[0])
        if export:
            export_weights(path, saved)
        else:
            write_samples(path, saved)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))

"""
Generate text with a trained model, from a run's folder (its best.pt) or from one checkpoint:

    python sample.py out/shakespeare
    python sample.py out/shakespeare --start="ROMEO:" --num_samples=3 --temperature=0.8
    python sample.py out/shakespeare/ckpt_00001000.pt --start=FILE:prompt.txt

The checkpoint holds the vocabulary (gpt2's comes from tiktoken), so the dataset is not needed. Only
the text goes to stdout; the checkpoint's name and loss and the tokens per second go to stderr.
"""

import os
import sys
import time
from pathlib import Path

import torch

from model import build_model, generate
from plumbing import checkpoints, ema
from plumbing.configurator import configured, fail
from plumbing.data import DataError, decode_utf8, read_file, stream, tokenizer_of
from plumbing.devices import choose_device
from plumbing.ranks import say

# What to write
start = ""  # the text to continue, or FILE:path of it; "" = a line break
num_samples = 1  # [1, inf)
max_new_tokens = 500  # of each sample, [1, inf)

# How to draw
temperature = 0.8  # below 1 makes likely tokens likelier, [0, inf); 0 = always the likeliest
top_k = 0  # draw only from this many of the likeliest tokens, [0, inf); 0 = from all
seed = 1337  # of the first sample, [0, 4294967295]; each further sample adds 1
device = "auto"  # auto, cpu, cuda, cuda:1 or mps


def open_checkpoint(name):
    """(path, checkpoint) of a file, or of a run's best.pt, else its newest. Exits with 2 if none.

    Changes nothing in the folder, because a run may be using it.
    """
    paths = [Path(name)]
    if paths[0].is_dir():
        best_first = [*paths[0].glob("best.pt"), *checkpoints.newest_first(paths[0])]
        paths = list(dict.fromkeys(best_first))
        if not paths:
            fail(f"{name} holds no checkpoint; expected the folder of a run that saved one")
    elif not paths[0].exists():
        fail(f"{name} is not there; type: python sample.py out/NAME, the out_dir of a run")
    for path in paths:
        try:
            return path, checkpoints.load(path)
        except checkpoints.Damaged as error:
            problem = f"{path} is damaged, or no checkpoint of train.py: {error}"
            print(f"sample.py: {problem}", file=sys.stderr) if path != paths[-1] else fail(problem)
        except OSError as error:
            fail(f"cannot read {path}: {error.strerror}")


def rebuild(path, checkpoint):
    """(model, tokenizer metadata) from a checkpoint, with its averaged weights if it has any."""
    try:
        meta = checkpoint["data"]["meta"]
        if "tokenizer" not in meta:
            fail(f"{path} was not trained on text; expected a run of train.py on text")
        tokenizer_of(meta).decode([0])
        model = build_model(checkpoint["config"], meta["vocab_size"])
        saved = checkpoint["model"] | checkpoint["ema"]
        built = model.state_dict()
        for name in built | saved:
            then, here = (list(w[name].shape) if name in w else "absent" for w in (saved, built))
            if then != here:
                fail(
                    f"{path}: {name} is {then} in it, but {here} in model.py with its config and its"
                    f" vocabulary of {meta['vocab_size']:,}; expected the model.py of that run"
                )
        model.load_state_dict(checkpoint["model"])
        for name, average in checkpoint["ema"].items():  # tied weights have one average
            model.get_parameter(name).data.copy_(average)
    except DataError as error:
        fail(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__} {error}".split())[:200]
        fail(f"{path} is no checkpoint of train.py ({why})")
    return model.eval(), meta


def encode_prompt(text, meta):
    """Token ids, int64 (1, T), T >= 1. Raises DataError if the vocabulary lacks a character."""
    try:
        ids = tokenizer_of(meta).encode(text or "\n")
    except DataError:
        if text:
            raise
        ids = [0]  # a vocabulary without a line break
    return torch.tensor([[int(i) for i in ids]])


def sample_text(
    model, meta, block_size, max_new_tokens=200, seed=1337, temperature=0.8, where=None
):
    """A sample of `max_new_tokens` tokens as a str, from a model in eval mode. A random generator of
    its own keeps it from affecting training.

    where: the device that computes; None = the weights' device (wrong for offloaded weights).
    """
    where = where or next(model.parameters()).device
    generator = torch.Generator(where).manual_seed(seed)
    prompt = encode_prompt("", meta).to(where)
    how = (max_new_tokens, block_size, meta["vocab_size"], temperature)
    new = generate(model, prompt, *how, generator=generator)
    return "".join(stream((i.item() for i in new), tokenizer_of(meta)))


def print_sample(run, block_size, autocast):
    """Print and log a sample from a run's model, if its data is text. All ranks call it together,
    as a sharded model needs them. Errors are printed, not raised: a sample must not end a run.
    """
    meta = run.facts["data"]["meta"]
    if "tokenizer" not in meta:
        return
    try:
        with ema.evaluating(run), autocast:
            text = sample_text(run.model, meta, block_size, where=run.device)
        say(f"\n{text.strip()}\n")
        row = {"kind": "event", "step": run.state["step"], "event": "sample", "text": text}
        run.folder.write_rows([row])
    except Exception as error:
        say(f"no sample ({error})")


def main(argv=None):
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one run, found {len(names)}; type: python sample.py out/NAME")
        write_samples(names[0])


def write_samples(name):
    where = choose_device(device)
    path, checkpoint = open_checkpoint(name)
    model, meta = rebuild(path, checkpoint)
    model.to(where)
    block_size = checkpoint["config"]["block_size"]
    try:
        text = start
        if start.startswith("FILE:"):
            file = os.path.expanduser(start.removeprefix("FILE:"))
            text = decode_utf8(read_file(file), file)
        prompt = encode_prompt(text, meta).to(where)
    except DataError as error:
        fail(f"--start={start[:40]}: {error}")
    step = checkpoint["state"]["step"]
    loss = checkpoint["state"]["best_val_loss"]
    print(f"{path}, step {step:,}, best validation loss {loss:.4f}", file=sys.stderr)
    if prompt.size(1) > block_size:
        print(f"only the last {block_size} tokens of --start count", file=sys.stderr)
    began = time.perf_counter()
    for number in range(num_samples):
        if number:
            print("\n" + "-" * 80)
        print(text, end="", flush=True)
        generator = torch.Generator(where).manual_seed((seed + number) % 2**32)
        how = (max_new_tokens, block_size, meta["vocab_size"], temperature, top_k, generator)
        new = (i.item() for i in generate(model, prompt, *how))
        for piece in stream(new, tokenizer_of(meta)):
            print(piece, end="", flush=True)
    print(flush=True)
    count = num_samples * max_new_tokens
    seconds = time.perf_counter() - began
    rate = f"{count / seconds:,.0f} tokens/s"
    print(f"{count:,} tokens in {seconds:.2f} s: {rate}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print()
        sys.exit(130)

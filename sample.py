"""
Writes text with a trained model, from a run's folder (its best.pt) or from one checkpoint:

    python sample.py out/shakespeare
    python sample.py out/shakespeare --start="ROMEO:" --num_samples=3 --temperature=0.8
    python sample.py out/shakespeare/ckpt_00001000.pt --start=FILE:prompt.txt

The checkpoint carries its tokenizer, so the dataset is not needed. Only the text goes to stdout.
"""

import codecs
import os
import sys
from dataclasses import fields
from pathlib import Path

import torch

import prepare_data
import record
from configurator import configure, fail
from machine import choose_device
from model import GPT, GPTConfig

# What to write
start = ""  # the text to go on from, or FILE:path of one; "" = a line break
num_samples = 1  # [1, inf)
max_new_tokens = 500  # of each sample, [1, inf)

# How to draw
temperature = 0.8  # below 1 the likely becomes likelier, [0, inf); 0 = always the likeliest
top_k = 0  # draw from so many of the likeliest tokens only, [0, inf); 0 = from all
seed = 1337  # of the first sample, [0, 4294967295]; each further one takes the next
device = "auto"  # auto, cpu, cuda, cuda:1 or mps


def open_checkpoint(name):
    """(path, checkpoint) of a file, or of the best that a run's folder has; exits where there is none.

    Nothing in the folder is touched: a run may be at work in it.
    """
    paths = [Path(name)]
    if paths[0].is_dir():
        numbered = [*paths[0].glob("ckpt_*.pt"), *paths[0].glob("milestone_*.pt")]
        newest = sorted(numbered, key=record.step_of, reverse=True)
        paths = [*paths[0].glob("best.pt"), *newest]
        if not paths:
            fail(f"{name} holds no checkpoint; expected the folder of a run that took a step")
    elif not paths[0].exists():
        fail(f"{name} is not there; type: python sample.py out/NAME, the out_dir of a run")
    for path in paths:
        try:
            return path, record.load_checkpoint(path)
        except ValueError as error:
            problem = f"{path} is damaged, or no checkpoint of train.py: {error}"
            print(f"sample.py: {problem}", file=sys.stderr) if path != paths[-1] else fail(problem)


def rebuild(path, checkpoint):
    """(model, tokenizer metadata) from a checkpoint; with the averaged weights where it has them."""
    try:
        meta, config = checkpoint["data"]["meta"], checkpoint["config"]
        prepare_data.decode([0], meta)
        shape = {f.name: config[f.name] for f in fields(GPTConfig) if f.name in config}
        model = GPT(GPTConfig(vocab_size=meta["vocab_size"], **shape))
        saved, built = checkpoint["model"] | checkpoint["ema"], model.state_dict()
        for name in built | saved:
            then, here = (list(w[name].shape) if name in w else "absent" for w in (saved, built))
            if then != here:
                fail(
                    f"{path}: {name} is {then} in it, but {here} in model.py with the {shape} and the"
                    f" vocabulary of {meta['vocab_size']:,} that it names; expected the model.py of"
                    " that run, and a tokenizer of its own"
                )
        model.load_state_dict(saved)
    except prepare_data.DataError as error:
        fail(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__} {error}".split())[:200]
        fail(f"{path} is no checkpoint of train.py ({why})")
    return model.eval(), meta


def encode_prompt(text, meta):
    """int64 (1, T), T at least 1. Raises DataError where the vocabulary lacks a character of `text`."""
    try:
        ids = prepare_data.encode(text or "\n", meta)
    except prepare_data.DataError:
        if text:
            raise
        ids = [0]  # a vocabulary without a line break
    return torch.tensor([[int(i) for i in ids]])


def stream(ids, meta):
    """The text of `ids`, piece by piece, as soon as a piece is whole: tokens may split a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        if meta["tokenizer"] == "char":
            yield meta["chars"][i]
        elif meta["tokenizer"] == "byte":
            yield decoder.decode(bytes([i]))
        else:
            yield decoder.decode(prepare_data.gpt2().decode_single_token_bytes(i))
    yield decoder.decode(b"", final=True)


def sample_text(model, meta, max_new_tokens=200, seed=1337, start="", temperature=0.8, top_k=0):
    """A sample of `max_new_tokens` tokens, `start` not included, as one str.

    For train.py: it draws from a generator of its own, and leaves the model in the mode it was in,
    so it cannot disturb training.
    """
    was_training, where = model.training, next(model.parameters()).device
    generator = torch.Generator(where).manual_seed(seed)
    prompt = encode_prompt(start, meta).to(where)
    try:
        model.eval()
        new = model.generate(prompt, max_new_tokens, temperature, top_k, generator)
        return "".join(stream((i.item() for i in new), meta))
    finally:
        model.train(was_training)


def main():
    names = []
    configure(globals(), names=names)
    if len(names) != 1:
        fail(f"expected one run, found {len(names)}; type: python sample.py out/NAME")
    where = choose_device(device)
    path, checkpoint = open_checkpoint(names[0])
    model, meta = rebuild(path, checkpoint)
    model.to(where)
    if where.type == "cpu" and model.num_params() < 10e6:
        torch.set_num_threads(1)  # one short sequence through a small model: more do not help
    try:
        text = start
        if start.startswith("FILE:"):
            name = os.path.expanduser(start.removeprefix("FILE:"))
            text = prepare_data.decode_utf8(prepare_data.read_file(name), name)
        prompt = encode_prompt(text, meta).to(where)
    except prepare_data.DataError as error:
        fail(f"--start={start[:40]}: {error}")
    step, loss = checkpoint["state"]["step"], checkpoint["state"]["best_val_loss"]
    print(f"{path}, step {step:,}, best validation loss {loss:.4f}", file=sys.stderr)
    if prompt.size(1) > model.config.block_size:
        print(f"only the last {model.config.block_size} tokens of --start count", file=sys.stderr)
    sys.stdout.reconfigure(errors="replace")  # a terminal that does not know a character
    for number in range(num_samples):
        if number:
            print("\n" + "-" * 80)
        print(text, end="", flush=True)
        generator = torch.Generator(where).manual_seed((seed + number) % 2**32)
        new = model.generate(prompt, max_new_tokens, temperature, top_k, generator)
        for piece in stream((i.item() for i in new), meta):
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print()
        sys.exit(130)

"""
Generate text with a trained model, from a run's folder or from one checkpoint:

    python sample.py out/shakespeare
    python sample.py out/shakespeare --start="ROMEO:" --num_samples=3 --temperature=0.8
    python sample.py out/shakespeare/ckpt_00001000.pt --start=FILE:prompt.txt
    python sample.py out/shakespeare --export=shakespeare.safetensors
    python sample.py out/mine --script=my_fork.py

Of a run's folder it takes best.pt, or the newest checkpoint if best.pt is that of the run's first
step, before which nothing was trained. A file is taken as it is. The file and its step are printed
above the text. It needs no dataset."""

import plumbing  # noqa: F401  first: Ctrl-C in the imports is one line

# isort: split
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import takewhile, tee
from pathlib import Path
from typing import Any

import torch

from model import InvalidShape, build_model, generate
from plumbing import checkpoint as checkpoints
from plumbing import forks
from plumbing.checkpoint import Damaged
from plumbing.cli import configured, fail, printable, run_script
from plumbing.data import read_file, start_and_end, tokenizer_of
from plumbing.files import replacing
from plumbing.machine import choose_device, choose_dtype
from plumbing.weights import metadata_of
from prepare_data import clean, decode_utf8

# Which model
script = ""  # the fork that trained it, if its model is not that of model.py
checkpoint = "auto"  # auto | best | last; auto = best, or last if best.pt is of the first step

# What to write
start = ""  # the text to continue, or FILE:path of it; "" = begin as the texts of the dataset do
num_samples = 1  # [1, inf); several take hardly longer than one; another number changes all texts
max_new_tokens = 500  # of each sample at most, [1, inf); of a corpus it ends with its text
export = ""  # write the weights, averaged if they are, to this .safetensors file instead; "" = off

# How to draw
temperature = 0.8  # below 1 makes likely tokens likelier, [0, inf); 0 = always the likeliest
top_k = 0  # draw only from this many of the likeliest tokens, [0, inf); 0 = from all
seed = 1337  # of the draws, [0, 4294967295]
device = "auto"  # auto, cpu, cuda, cuda:1 or mps

LINE = "\n" + "-" * 80 + "\n"  # between two samples


def open_checkpoint(name: str) -> tuple[dict, str]:
    """(checkpoint, title: its file, its step, and why it is not best.pt) of a file, or of a run's
    folder. Changes nothing there."""
    path = Path(name)
    paths = [path] if path.is_file() else checkpoints.newest_first(path)
    if checkpoint != "last":
        paths.sort(key=lambda path: path.name != "best.pt")  # it is tried first
    if checkpoint == "best":
        paths = paths[:1]
    remark = ""
    for path in paths:
        try:
            saved = checkpoints.load(path)
        except (Damaged, OSError) as error:
            problem = f"{path} is damaged, unreadable, or no checkpoint of train.py: {error}"
            if path == paths[-1]:
                fail(problem)
            print(printable(f"sample.py: {problem}"), file=sys.stderr)
            continue
        state = saved["state"]
        step = state["step"]
        if path.name == "best.pt" and path != paths[-1] and step == state["first_step"]:
            remark = f" (best.pt is of step {step}, before training)"
            continue
        return saved, printable(f"{path}, step {step}{remark}")
    fail(f"no checkpoint in {name}; type: python sample.py out/NAME, the out_dir of a run")


def rebuild(saved: dict, title: str) -> tuple[torch.nn.Module, Any]:
    """(model, tokenizer), with averaged weights if there are any."""
    meta = saved["data"].get("meta", {})
    if "tokenizer" not in meta:
        fail(f"{title}: it was not trained on text; expected a run of train.py on text")
    tokenizer = tokenizer_of(meta)
    vocab_size = max(meta["vocab_size"], tokenizer.vocab_size)  # a fork may add tokens of its own
    try:
        model = build(saved["config"], vocab_size)
        model.load_state_dict(evaluated_weights(saved))
    except (InvalidShape, RuntimeError) as error:
        code = script or "today's model.py (of a fork, add --script=FILE)"
        fail(
            f"{title}: it does not fit {code} with its config and vocabulary of "
            f"{vocab_size:,}: {str(error).splitlines()[-1].strip()}"
        )
    return model.eval(), tokenizer


def build(config: dict, vocab_size: int) -> torch.nn.Module:
    """The model of model.py, or that of the fork `script`, which sees the knobs of the run."""
    if not script:
        return build_model(config, vocab_size)
    import train

    loop = forks.load(script, train)
    knobs = vars(loop) | loop.ADDED_KNOBS
    vars(loop).update({name: config[name] for name in config.keys() & knobs.keys()})
    return loop.build_model(config, vocab_size)


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


@torch.no_grad()  # in inference mode autocast would convert the weights again for each token
def write_samples(saved: dict, title: str) -> None:
    """Print `num_samples` continuations of `start`. The first is shown while it is made."""
    where = choose_device(device)
    model, tokenizer = rebuild(saved, title)
    model.to(where)
    dtype = getattr(torch, choose_dtype("auto", where)[0])
    block_size = saved["config"]["block_size"]
    first, end = start_and_end(saved["data"]["meta"])
    text = start
    if start.startswith("FILE:"):
        path = os.path.expanduser(start.removeprefix("FILE:"))
        text = decode_utf8(read_file(path), path)
    text = clean(text)
    ids = encode(text, tokenizer) if text else [first]
    print(title, file=sys.stderr)
    if len(ids) > block_size:
        print(f"only the last {block_size} tokens of --start count", file=sys.stderr)
    prompts = torch.tensor([[int(i) for i in ids]] * num_samples, device=where)
    generator = torch.Generator(where).manual_seed(seed)
    began = time.perf_counter()
    print(printable(text), end="", flush=True)
    with torch.autocast(where.type, dtype, enabled=where.type != "cpu"):
        drawn = generate(
            model,
            prompts,
            max_new_tokens,
            block_size,
            tokenizer.vocab_size,
            temperature,
            top_k,
            generator,
            end,
        )
        shown, kept = tee(new.flatten().tolist() for new in drawn)
        for piece in stream(takewhile(end.__ne__, (ids[0] for ids in shown)), tokenizer):
            print(printable(piece), end="", flush=True)
        samples = [list(takewhile(end.__ne__, ids)) for ids in zip(*kept, strict=True)]
    for ids in samples[1:]:
        print(LINE + printable(text + tokenizer.decode(ids)), end="")
    print(flush=True)
    count = sum(map(len, samples))
    seconds = time.perf_counter() - began
    print(f"{count:,} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s", file=sys.stderr)


def encode(text: str, tokenizer: Any) -> list[int]:
    """The ids of a prompt. <|endoftext|> in it is the id of the end of a text, if there is one."""
    end = getattr(tokenizer, "end_of_text", None)
    documents = [text] if end is None else re.split(r"\n?<\|endoftext\|>\n?", text)
    return [i for document in documents for i in (*tokenizer.encode(document), end)][:-1]


def export_weights(saved: dict, title: str) -> None:
    """Write the weights alone, under their own names, to `export`: of any model, not only a GPT."""
    from safetensors.torch import save

    weights = {name: w.clone().contiguous() for name, w in evaluated_weights(saved).items()}
    try:
        with replacing(export) as temporary:
            temporary.write_bytes(save(weights, metadata_of(saved)))
    except OSError as error:
        fail(f"--export={export} cannot be written ({error.strerror})")
    print(f"{title}: {len(weights)} tensors in {export}", file=sys.stderr)


def evaluated_weights(saved: dict) -> dict[str, torch.Tensor]:
    """The averages of the weights, where there are any: of tied weights, which are equal in every
    bit, only one has an average."""
    raw = saved["model"]
    averages = saved["ema"]
    weights = raw | averages
    for name in raw.keys() - averages.keys():
        tied = (averages[other] for other in averages if torch.equal(raw[other], raw[name]))
        weights[name] = next(tied, raw[name])
    return weights


def main(argv: list[str] | None = None) -> None:
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one run, found {len(names)}; type: python sample.py out/NAME")
        saved, title = open_checkpoint(names[0])
        if export:
            export_weights(saved, title)
        else:
            write_samples(saved, title)


if __name__ == "__main__":
    sys.exit(run_script(main))

"""Generate text with a trained model, from a run's folder or from one checkpoint:

    python sample.py out/shakespeare
    python sample.py out/shakespeare --start="ROMEO:" --num_samples=3 --temperature=0.8
    python sample.py out/shakespeare/ckpt_00001000.pt --start=FILE:prompt.txt
    python sample.py out/shakespeare --export=shakespeare.safetensors
    python sample.py out/shakespeare_fast,ngram examples/ngram.py    # of a fork

Of a folder it takes best.pt, or the newest checkpoint if best.pt is damaged or of step 0, before
training. The file and its step are printed above the text. It needs no dataset."""

import plumbing  # first: it sets what torch reads when it is imported

# isort: split
import json
import os
import re
import sys
from pathlib import Path

import torch

import train
from model import InvalidShape, generate
from plumbing import fail, print0
from prepare_data import clean, decode_utf8, read_file, start_and_end, tokenizer_of

# What to write
start = ""  # the text to continue, or FILE:path of it; "" = begin as the texts of the dataset do
num_samples = 1  # several take hardly longer than one; another number changes all texts
max_new_tokens = 500  # of each sample at most; of a corpus it ends with its text
export = ""  # write the weights, averaged if they are, to this .safetensors file instead

# How to draw
temperature = 0.8  # below 1 makes likely tokens likelier; 0 = always the likeliest
top_k = 0  # draw only from this many of the likeliest tokens; 0 = from all
seed = 1337  # of the draws
device = "auto"  # auto, cpu, cuda, cuda:1 or mps

LINE = "\n" + "-" * 80 + "\n"  # between two samples


def main(argv: list[str] | None = None) -> int:
    script, words = plumbing.script_among(argv)
    names = []
    loop = plumbing.load_script(script, train)
    with plumbing.configured(globals(), argv=words, words=names):
        if len(names) != 1:
            fail(f"expected one run, found {len(names)}; type: python sample.py out/NAME")
        for name, low in {"num_samples": 1, "max_new_tokens": 1, "temperature": 0}.items():
            if not globals()[name] >= low:
                fail(f"--{name}={globals()[name]}: expected {low} or more")
        saved, path, title = open_checkpoint(Path(names[0]))
        plumbing.require_script(path.parent, saved)
        if export:
            export_weights(saved, title)
        else:
            write_samples(loop, saved, title)
    return 0


def open_checkpoint(given):
    """(checkpoint, its path, its title) of a file, or of a run's folder: best.pt, else the newest one
    that is whole. One of step 0, before training, is taken if there is no other."""
    paths = [given / "best.pt", *plumbing.checkpoints(given)] if given.is_dir() else [given]
    paths = [path for path in paths if path.exists()]
    remark = ""
    for path in paths:
        try:
            plumbing.verify(path)
            saved = plumbing.read_checkpoint(path)
        except (plumbing.Damaged, OSError) as error:
            remark += f"; {error}"
            continue
        if saved["state"]["step"] > 0 or path == paths[-1]:
            return saved, path, f"{path}, step {saved['state']['step']:,}{remark}"
    fail(f"no checkpoint in {given}{remark}; type: python sample.py out/NAME, the out_dir of a run")


# ---- text ----------------------------------------------------------------------------------------


@torch.no_grad()  # in inference mode autocast would convert the weights again for each token
def write_samples(loop, saved, title):
    """Print `num_samples` continuations of `start`. The first is shown while it is made."""
    meta = saved["data"]["meta"]
    if "tokenizer" not in meta:
        fail(f"{title}: it was not trained on text; expected a run on text")
    tokenizer = tokenizer_of(meta)
    where = plumbing.choose_device(device, False)
    model = build(loop, saved, title).to(where).eval()
    dtype = getattr(torch, plumbing.choose_dtype("auto", where, None)[0])
    block_size = saved["config"]["block_size"]
    text = prompt_text()
    first, end = start_and_end(meta)
    prompt = encode(text, tokenizer) if text else [first]
    print(title, file=sys.stderr)
    if len(prompt) > block_size:
        print(f"only the last {block_size} tokens of --start count", file=sys.stderr)
    print0(text, end="")

    samples = [[] for _ in range(num_samples)]
    shown = ""
    prompts = torch.tensor([prompt] * num_samples, device=where)
    generator = torch.Generator(where).manual_seed(seed)
    how = {"temperature": temperature, "top_k": top_k, "generator": generator, "end": end}
    size = max_new_tokens, block_size, tokenizer.vocab_size
    with torch.autocast(where.type, dtype, enabled=where.type != "cpu"):
        for new in generate(model, prompts, *size, **how):
            for sample, token in zip(samples, new.flatten().tolist(), strict=True):
                sample.append(token)
            added = text_after(prompt, samples[0], end, tokenizer)
            if not added.endswith("\ufffd"):  # else a character is not complete
                print0(added[len(shown) :], end="")
                shown = added
    print0(added[len(shown) :], end="")
    for sample in samples[1:]:
        print0(LINE + text + text_after(prompt, sample, end, tokenizer), end="")
    print0()


def prompt_text():
    text = start
    if start.startswith("FILE:"):
        path = os.path.expanduser(start.removeprefix("FILE:"))
        text = decode_utf8(read_file(path), path)
    return clean(text)


def encode(text, tokenizer):
    """The ids of a prompt. <|endoftext|> in it is the id of the end of a text, if there is one."""
    end = getattr(tokenizer, "end_of_text", None)
    documents = [text] if end is None else re.split(r"\n?<\|endoftext\|>\n?", text)
    ids = []
    for document in documents:
        ids += [*map(int, tokenizer.encode(document)), end]
    return ids[:-1]


def text_after(prompt, ids, end, tokenizer):
    """The text that `ids`, before the first `end`, add to that of the ids of the prompt. They are
    decoded together: a tokenizer may write its first piece in another way, as without its space."""
    ids = ids[: ids.index(end)] if end in ids else ids
    return tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


# ---- weights -------------------------------------------------------------------------------------


def build(loop, saved, title):
    """The model, with averaged weights if there are any. A fork's build_model may read its knobs."""
    with plumbing.setting(vars(loop), saved["config"]):
        try:
            model = loop.build_model(saved["config"], saved["data"]["meta"]["vocab_size"])
            model.load_state_dict(plumbing.evaluated_weights(saved))
        except (InvalidShape, RuntimeError) as error:
            why = str(error).splitlines()[-1].strip()
            fail(f"{title}: it does not fit today's code; that of the run is in its code/: {why}")
    return model


def export_weights(saved, title):
    """Write the weights alone, under their own names: of any model, not only a GPT."""
    from safetensors.torch import save

    weights = plumbing.evaluated_weights(saved)
    weights = {name: weight.clone().contiguous() for name, weight in weights.items()}
    content = in_order(save(weights, plumbing.metadata_of(saved)))
    try:
        with plumbing.replacing(export) as file:
            file.write(content)
    except OSError as error:
        fail(f"--export={export} cannot be written ({error.strerror})")
    print(f"{title}: {len(weights)} tensors in {export}", file=sys.stderr)


def in_order(content):
    """The bytes of a .safetensors file with its metadata sorted: the library writes them in another
    order each time. The format: 8 bytes with the header's length, the header as JSON, the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors are aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text + content[end:]


if __name__ == "__main__":
    plumbing.exit_process(main())

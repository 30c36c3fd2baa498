"""
Generate text with a trained model, from a run's folder or from one checkpoint:

    python sample.py out/shakespeare
    python sample.py out/shakespeare --start="ROMEO:" --num_samples=3 --temperature=0.8
    python sample.py out/shakespeare/ckpt_00001000.pt --start=FILE:prompt.txt
    python sample.py out/shakespeare --export=shakespeare.safetensors

Of a run's folder it takes best.pt, or the newest checkpoint if best.pt is that of the run's first
step, before which nothing was trained; the file and its step are printed above the text. It needs
no dataset, and takes any file of torch.save with `model`, `config`, `data` as train.py's."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import tee
from pathlib import Path
from typing import Any

import torch

from model import InvalidShape, build_model, generate
from plumbing import checkpoint as checkpoints
from plumbing.checkpoint import Damaged
from plumbing.cli import accept, configured, fail, printable, read_knobs, run_script
from plumbing.data import DataError, needed, read_file, tokenizer_of
from plumbing.files import replacing
from plumbing.machine import choose_device, choose_dtype
from prepare_data import decode_utf8

# Which weights
checkpoint = ""  # best, last, or a file's path; "" = best, or last if best.pt is of the first step
script = (
    ""  # that trained the run, if train.py is not there: its knobs are read, nothing is executed
)

# What to write
start = ""  # the text to continue, or FILE:path of it; "" = begin after the end of a text
num_samples = 1  # [1, inf); several take hardly longer than one
max_new_tokens = 500  # of each sample, [1, inf)
export = ""  # write the weights, averaged if they are, to this .safetensors file instead; "" = off

# How to draw
temperature = 0.8  # below 1 makes likely tokens likelier, [0, inf); 0 = always the likeliest
top_k = 0  # draw only from this many of the likeliest tokens, [0, inf); 0 = from all
seed = 1337  # of the draws, [0, 4294967295]
device = "auto"  # auto, cpu, cuda, cuda:1 or mps

LINE = "\n" + "-" * 80 + "\n"  # between two samples
MOST_PER_BYTE = 4  # bytes of a model for each byte of its file: it may hold 8 bits of each 32
MOST_TABLES = 2**30  # bytes of what is not saved, such as rotary tables
SIDE_BY_SIDE = 32  # most samples that are drawn at a time: they share each product, and the memory


def open_checkpoint(name: str) -> tuple[Path, dict]:
    """(path, checkpoint) of a file, or of a run's folder: see `checkpoint`. Changes nothing
    there."""
    if checkpoint not in ("", "best", "last"):
        name = checkpoint
    paths = files_to_try(Path(name))
    if not paths:
        found = "holds no checkpoint" if os.path.exists(name) else "is not there"
        fail(f"{name} {found}; type: python sample.py out/NAME, the out_dir of a run")
    for path in paths:
        try:
            return path, checkpoints.load(path, parts=("model", "config", "data"))
        except Damaged as error:
            problem = f"{path} is damaged, or no checkpoint of train.py: {error}"
            if path == paths[-1]:
                fail(problem)
            print(printable(f"sample.py: {problem}"), file=sys.stderr)
        except OSError as error:
            fail(f"cannot read {path}: {error.strerror}")


def files_to_try(path: Path) -> list[Path]:
    """`path` itself, or the checkpoints of the folder `path`, in the order in which to try them."""
    if not path.is_dir():
        return [path] if path.exists() else []
    paths = checkpoints.newest_first(path)
    best = path / "best.pt"
    if checkpoint == "best":
        return [best]
    if checkpoint == "last" or best not in paths or is_untrained(best):
        return paths
    paths.remove(best)
    return [best, *paths]


def loop_state(path: Path) -> dict:
    """The `state` in a checkpoint of train.py; {} if it cannot be read."""
    with suppress(Damaged, OSError):
        return checkpoints.load(path, verify=False)["state"]
    return {}


def is_untrained(best: Path) -> bool:
    """Whether best.pt is of the run's first step: a run evaluates first, and then at intervals."""
    state = loop_state(best)
    return "step" in state and state["step"] == state.get("first_step", 0)


def title(path: Path, saved: dict) -> str:
    """What to print above the text: the file, its step, and why it is not the run's best."""
    step = saved.get("state", {}).get("step", "unknown")
    best = path.with_name("best.pt")
    remark = ""
    if path.name == "best.pt":
        newest = next(iter(checkpoints.numbered(path.parent, "ckpt")), path)
        best_step = loop_state(newest).get("best_step")
        if isinstance(best_step, int) and isinstance(step, int) and best_step > step:
            remark = f" (the weights of step {best_step} were better; they could not be saved)"
    elif not checkpoint and is_untrained(best):
        remark = f" (best.pt is of step {loop_state(best)['step']}, before training)"
    return printable(f"{path}, step {step}{remark}")


def rebuild(path: Path, saved: dict) -> tuple[torch.nn.Module, Any]:
    """(model, tokenizer), with averaged weights if there are any. Only errors of the file are
    BadInput."""
    config, meta = saved["config"], saved["data"].get("meta")
    if not isinstance(meta, dict) or "tokenizer" not in meta:
        fail(f"{path} was not trained on text; expected a run of train.py on text")
    trained_by = Path(script) if script else Path(__file__).with_name("train.py")
    if not trained_by.is_file():
        fail(f"{trained_by} is not there; type --script=FILE, the script that trained {path}")
    knobs = read_knobs(trained_by)
    for name in config.keys() & knobs.keys():
        accept(name, config[name], f"{path}: {name} = {config[name]!r}", knobs)
    foreign = f"{path} is no checkpoint of train.py"
    try:
        tokenizer = tokenizer_of(meta)
        tokenizer.decode([0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fail(f"{foreign}: its tokenizer ({type(error).__name__} {error})")
    try:
        require_its_size(path, config, tokenizer.vocab_size)
        model = build_model(config, tokenizer.vocab_size)
    except (InvalidShape, TypeError) as error:
        if isinstance(error, TypeError) and "GPTConfig" not in str(error):  # it lacks an argument
            raise
        fail(f"{foreign}: {error}")
    except OSError as error:
        fail(f"the model of {path} reads {error.filename}: {error.strerror}; put that file back")
    averages = saved.get("ema") or {}
    try:
        model.load_state_dict(saved["model"])
        model.load_state_dict(averages, strict=False)  # tied weights have one average
    except RuntimeError as error:
        what = f"today's model.py with its config and vocabulary of {tokenizer.vocab_size:,}"
        fail(f"{path} does not fit {what}: {str(error).splitlines()[-1].strip()}")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            fail(f"{path}: its weights {name} are not finite; --checkpoint=PATH names an older one")
    return model.eval(), tokenizer


def require_its_size(path: Path, config: dict, vocab_size: int) -> None:
    """fail()s if `config` declares a model too large for the file at `path`, before it is
    allocated: on the meta device tensors have no memory."""
    try:
        with torch.device("meta"):
            model = build_model(config, vocab_size)
    except (NotImplementedError, RuntimeError):  # another kind of model may need values
        return
    declared = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    size = path.stat().st_size
    if declared > MOST_PER_BYTE * size + MOST_TABLES:
        found = f"declares a model of {declared / 1e6:,.0f} MB and has {size / 1e6:,.1f} MB"
        fail(f"{path} {found}; expected a checkpoint of train.py")


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


@torch.inference_mode()
def write_samples(path: Path, saved: dict) -> None:
    where = choose_device(device)
    model, tokenizer = rebuild(path, saved)
    model.to(where)
    # in 16 bits if the hardware computes in them, as in training; narrow layers gain nothing on a
    # CPU
    dtype = choose_dtype("auto", where)[0]
    low = dtype != "float32" and (where.type != "cpu" or saved["config"].get("n_embd", 0) >= 256)
    for part in model.modules():
        if low and isinstance(part, torch.nn.Linear):
            part.to(getattr(torch, dtype))  # once; autocast would do it again for each token
    block_size, text = saved["config"]["block_size"], start
    try:
        if start.startswith("FILE:"):
            file = os.path.expanduser(start.removeprefix("FILE:"))
            text = decode_utf8(read_file(file), file)
        ids = tokenizer.encode(text) if text else [getattr(tokenizer, "end_of_text", 0)]
        prompt = torch.tensor([list(map(int, ids))], device=where)  # (1, T), T >= 1
    except DataError as error:
        fail(f"--start={start[:40]}: {error}")
    print(title(path, saved), file=sys.stderr)
    if prompt.size(1) > block_size:
        print(f"only the last {block_size} tokens of --start count", file=sys.stderr)
    generator = torch.Generator(where).manual_seed(seed)
    how = (max_new_tokens, block_size, tokenizer.vocab_size, temperature, top_k, generator)
    began = time.perf_counter()
    for first in range(0, num_samples, SIDE_BY_SIDE):
        prompts = prompt.repeat(min(SIDE_BY_SIDE, num_samples - first), 1)
        print(LINE * (first > 0) + printable(text), end="", flush=True)
        with torch.autocast(where.type, getattr(torch, dtype), enabled=low):
            drawn = (new.flatten().tolist() for new in generate(model, prompts, *how))
            shown, kept = tee(drawn)  # the first is shown while it is made, the others after it
            for piece in stream((ids[0] for ids in shown), tokenizer):
                print(printable(piece), end="", flush=True)
        for ids in list(zip(*kept, strict=True))[1:]:
            print(LINE + printable(text + tokenizer.decode(list(ids))), end="")
    print(flush=True)
    count, seconds = num_samples * max_new_tokens, time.perf_counter() - began
    print(f"{count:,} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s", file=sys.stderr)


def export_weights(path: Path, saved: dict) -> None:
    """Write the weights alone, under their own names, to `export`: of any model, not only a GPT."""
    needed("safetensors", "--export")
    from safetensors.torch import save

    weights, averages = saved["model"], saved.get("ema") or {}
    # by address in memory, as tied weights have one average
    at = {weights[name].data_ptr(): averages[name] for name in averages.keys() & weights.keys()}
    weights = {k: at.get(w.data_ptr(), w).clone().contiguous() for k, w in weights.items()}
    try:
        with replacing(export) as temporary:
            temporary.write_bytes(save(weights, {"format": "pt"}))
    except OSError as error:
        fail(f"--export={export} cannot be written ({error.strerror})")
    print(f"{title(path, saved)}: {len(weights)} tensors in {export}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    names = []
    with configured(globals(), argv=argv, names=names):
        if len(names) != 1:
            fail(f"expected one run, found {len(names)}; type: python sample.py out/NAME")
        path, saved = open_checkpoint(names[0])
        if export:
            export_weights(path, saved)
        else:
            write_samples(path, saved)


if __name__ == "__main__":
    sys.exit(run_script(main))

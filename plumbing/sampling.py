"""A sample of text while a model is trained."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch

from plumbing.console import print0
from plumbing.data import start_and_end, tokenizer_of
from plumbing.snapshot import evaluating


def print_sample(run: Any, generate: Callable, autocast: Callable) -> None:
    """Print and log 200 tokens, if the data is text. An error is printed: it must not end a run.
    generate: see model.py. autocast(device): a context."""
    meta = run.facts["data"]["meta"]
    if "tokenizer" not in meta:
        return
    try:
        start, end = start_and_end(meta)
        with run.clock.apart("sample"), evaluating(run), autocast(run.device):
            prompt = torch.full((1, 1), start, device=run.device)
            own = torch.Generator(run.device).manual_seed(1337)
            size = run.facts["config"]["block_size"]
            ids = generate(run.model, prompt, 200, size, meta["vocab_size"], 0.8, generator=own)
            new = torch.cat(list(ids), dim=1)  # all 200, so that no rank waits for another
        text = tokenizer_of(meta).decode(takewhile(end.__ne__, new[0].tolist()))
        print0(f"\n{text.strip()}\n")
        run.folder.record(run.state["step"], "sample", text=text)
    except Exception as error:
        print0(f"no sample ({error})")

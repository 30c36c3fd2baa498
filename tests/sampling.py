"""Tokens/s of model.generate beside nanoGPT's GPT.generate, in turn, on models of one shape.

NANOGPT=../nanoGPT python tests/sampling.py     # the table in docs/measured.md; minutes
"""

import os
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import GPT, GPTConfig, generate  # noqa: E402

EXTRAS = {"ngram_rows": 8192, "conv_width": 4}
SHAPES = [  # layers, heads, width, context, tokens to draw, extras
    (1, 3, 192, 128, 300, EXTRAS),
    (1, 4, 128, 64, 300, {}),
    (4, 4, 128, 64, 300, {}),
    (6, 6, 384, 256, 100, {}),
]
ROUNDS = 7


def nanogpt():
    """nanoGPT's model.py, as a module."""
    spec = spec_from_file_location("nanogpt", os.environ["NANOGPT"] + "/model.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(nano, n_layer, n_head, n_embd, block_size, n_new, extras):
    """{who and how many samples: median tokens/s}"""
    shape = {"vocab_size": 65, "block_size": block_size}
    shape |= {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    ours = GPT(GPTConfig(**shape, **extras)).eval()
    theirs = nano.GPT(nano.GPTConfig(**shape, dropout=0.0, bias=False)).eval()
    start = torch.zeros(1, 1, dtype=torch.long)
    is_wide = n_embd >= 256
    for part in ours.modules():  # as sample.py does where the CPU computes in bfloat16
        if is_wide and isinstance(part, torch.nn.Linear):
            part.to(torch.bfloat16)

    @torch.inference_mode()
    def here(samples):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_wide):
            prompts = start.repeat(samples, 1)
            return [new.tolist() for new in generate(ours, prompts, n_new, block_size, 65, 0.8)]

    @torch.no_grad()
    def there(samples):  # one after another, as its sample.py
        for _ in range(samples):
            theirs.generate(start, n_new, temperature=0.8, top_k=200)

    runs = {(who, samples): [] for who in (here, there) for samples in (1, 10)}
    for _ in range(ROUNDS):
        for (who, samples), rates in runs.items():
            began = time.perf_counter()
            who(samples)
            rates.append(samples * n_new / (time.perf_counter() - began))
    return {f"{who.__name__}, {n}": round(median(rates)) for (who, n), rates in runs.items()}


if __name__ == "__main__":
    nano = nanogpt()
    for shape in SHAPES:
        print(*shape[:4], measure(nano, *shape), flush=True)

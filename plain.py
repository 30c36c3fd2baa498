"""What train.py computes, as one loop of plain torch: the same batches, rates and losses.

    python prepare_data.py shakespeare
    python plain.py config/shakespeare.py --max_steps=200

What train.py adds, and where in plumbing/: a resume bit for bit (checkpoint.py), ranks that share a
batch (ranks.py), skipping an update whose loss or gradient is not finite (snapshot.py), a retry when
memory runs out (out_of_memory.py), messages for wrong flags (cli.py), a log (log.py); and float16,
batches without a target, and other schedules."""

import json
import math
import os
import sys
from ast import literal_eval
from collections import Counter
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

from model import build_model

dataset = "shakespeare"
block_size = 64
n_layer = 1
n_head = 4
n_embd = 128
ngram_rows = 0
conv_width = 1
dropout = 0.0
batch_size = 32  # sequences in a pass
accum_steps = 1  # passes in a step
seed = 1337
optimizer = "adamw"  # adamw, adam, sgd, momentum, muon
momentum = 0.95
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0  # largest norm of the gradient; 0 = off
schedule = "cosine"  # cosine, linear
peak_lr = 1e-3
min_lr = 1e-4
warmup_steps = 100
max_steps = 2000
device = "cuda" if torch.cuda.is_available() else "cpu"
has_bfloat16 = device == "cuda" or torch.cpu._is_avx512_bf16_supported()
dtype = "bfloat16" if has_bfloat16 else "float32"
compile = False
log_interval = 10  # steps; 0 = off
eval_interval = 250  # steps; 0 = only before the first and after the last


def main(argv: list[str]) -> None:
    configure(argv)
    meta = json.loads(Path("data", dataset, "meta.json").read_text())
    tokens = np.memmap(f"data/{dataset}/train.bin", meta["dtype"], "r")
    val_tokens = np.memmap(f"data/{dataset}/val.bin", meta["dtype"], "r")
    if not has_bfloat16:
        torch.Tensor.bfloat16 = torch.Tensor.float  # used by Muon; emulated, it would be slow
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products on a GPU, too
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    model = build_model(globals(), meta["vocab_size"]).to(device)
    optimizers = configure_optimizers(model)
    compiled = torch.compile(model, dynamic=False) if compile else model
    torch.manual_seed(seed)  # dropout does not depend on how many numbers the model drew
    starts = training_starts(len(tokens))
    for step in range(max_steps + 1):  # the last turn only evaluates
        if step in (0, max_steps) or (eval_interval and step % eval_interval == 0):
            means = evaluate(model, *validation_windows(val_tokens))
            print(f"step {step}  val loss {means['loss']:.4f}")
        if step < max_steps:
            batch = windows_at(tokens, [*islice(starts, batch_size * accum_steps)])
            loss, grad_norm = train_step(compiled, optimizers, *batch, lr_at(step))
            if log_interval and (step + 1) % log_interval == 0:
                print(f"step {step + 1}  loss {loss.item():.4f}  norm {grad_norm.item():.3g}")
    torch.save(model.state_dict(), "plain.pt")


def configure(argv: list[str]) -> None:
    """Set the globals above: by config files, then by --key=value flags."""
    for path in (word for word in argv if not word.startswith("--")):
        exec(Path(path).read_text(), globals())
    flags = dict(word[2:].split("=") for word in argv if word.startswith("--"))
    for name, value in flags.items():
        is_text = isinstance(globals()[name], str)
        globals()[name] = value if is_text else literal_eval(value.capitalize())  # true: True
    if "warmup_steps" not in flags:  # else a smoke run would be all warmup
        globals()["warmup_steps"] = min(warmup_steps, max_steps // 10)


def training_starts(n_tokens: int):
    """The position of each window's first token, without end: each window once an epoch, shuffled."""
    for epoch in count():
        random_state = np.random.RandomState([seed, epoch])
        shift = random_state.randint(block_size)
        n_windows = (n_tokens - block_size) // block_size  # that fit at any shift
        yield from shift + random_state.permutation(n_windows) * block_size


def validation_windows(tokens):
    """(inputs, targets), in which each token of the split but the first is a target once."""
    n = len(tokens) - 1
    starts = np.minimum(np.arange(0, n, block_size), n - block_size)
    inputs, targets = windows_at(tokens, starts)
    targets[-1, : (-n) % block_size] = -100  # masked: the window before has these
    return inputs, targets


def windows_at(tokens, starts):
    """Inputs, and as targets the tokens that follow them, int64 (len(starts), block_size)."""
    places = np.add.outer(starts, np.arange(block_size + 1))  # (len(starts), block_size + 1)
    rows = tokens[places].astype(np.int64)
    return torch.tensor(rows[:, :-1]), torch.tensor(rows[:, 1:])


def train_step(model, optimizers, inputs, targets, lr: float):
    """One update, in seven operations. Returns its loss, and the gradient's norm before clipping."""
    model.zero_grad()  # 1: zero the gradients
    for each in optimizers:
        for group in each.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # 2: set the learning rate
    total = 0.0
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        loss = means_of(model, x, y)["loss"]  # 3: forward
        parts = count_targets(targets) / count_targets(y)  # the batch is so many of these
        loss = loss / parts  # 4: scale, so that all sum up to the mean of the batch
        loss.backward()  # 5: backward
        total += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)  # 6: clip
    for each in optimizers:
        each.step()  # 7: update
    return total, grad_norm


@torch.no_grad()
def evaluate(model, inputs, targets) -> dict:
    """The mean over all targets of the loss, and of each other number that the model returns."""
    model.eval()
    sums = Counter()
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        for name, mean in means_of(model, x, y).items():
            sums[name] += mean.double() * count_targets(y) / count_targets(targets)
    model.train()
    return {name: sums[name].item() for name in sums}


def means_of(model, x, y) -> dict:
    """The forward pass, under autocast: {"loss": mean over the targets that count, and the other
    means that the model returns, such as the accuracy in eval mode}."""
    with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
        result = model(x.to(device), y.to(device))
    loss, others = result if isinstance(result, tuple) else (result, {})
    return {"loss": loss, **others}


def count_targets(targets) -> torch.Tensor:
    """All targets but the masked ones: -100, or NaN where targets are floats."""
    return (~targets.isnan() if targets.is_floating_point() else targets != -100).sum()


def lr_at(step: int) -> float:
    """Learning rate of update number `step`, counted from 0."""
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / (max_steps - warmup_steps)
    fall = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return min_lr + (peak_lr - min_lr) * fall[schedule]


def configure_optimizers(model) -> list[torch.optim.Optimizer]:
    """torch's optimizers. Matrices and embeddings decay, vectors do not. Muon trains the hidden
    matrices, AdamW the rest."""
    hidden, embeddings, heads, vectors = {}, [], [], []
    for name, weight in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])  # that has this weight
        if weight.ndim < 2 or name in model.undecayed:
            vectors.append(weight)
        elif isinstance(layer, torch.nn.Embedding):
            embeddings.append(weight)
        elif weight.ndim == 2 and name.startswith(model.muon_prefix):
            hidden[weight] = weight.data.chunk(getattr(layer, "muon_parts", 1))  # q, k, v: 3
        else:
            heads.append(weight)

    def share_gradients(*_):
        """Give each part of a stacked matrix its part of the gradient."""
        for weight, parts in hidden.items():
            if weight.grad is not None:
                for part, gradient in zip(parts, weight.grad.chunk(len(parts)), strict=True):
                    part.grad = gradient

    undecayed = {"params": vectors, "weight_decay": 0.0}
    groups = [{"params": [*hidden, *embeddings, *heads]}, undecayed]
    decay = {"weight_decay": weight_decay}
    adam = {"betas": (beta1, beta2), "fused": True, **decay}
    if optimizer == "adamw":
        return [torch.optim.AdamW(groups, **adam)]
    if optimizer == "adam":
        return [torch.optim.Adam(groups, **adam)]
    if optimizer == "sgd":
        return [torch.optim.SGD(groups, fused=True, **decay)]
    if optimizer == "momentum":
        return [torch.optim.SGD(groups, momentum=momentum, fused=True, **decay)]
    if optimizer != "muon":
        raise ValueError(f"optimizer={optimizer!r}: expected adamw, adam, sgd, momentum or muon")
    parts = {"params": [part for parts in hidden.values() for part in parts]}
    muon = torch.optim.Muon([parts], momentum=momentum, adjust_lr_fn="match_rms_adamw", **decay)
    muon.register_step_pre_hook(share_gradients)
    # a row of an embedding learns only where its token stands; the loss is steep in the head
    groups = {"params": embeddings, "lr_scale": 2.0}, {"params": heads, "lr_scale": 0.5}, undecayed
    return [muon, torch.optim.AdamW(groups, **adam)]


if __name__ == "__main__":
    main(sys.argv[1:])

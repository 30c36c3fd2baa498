"""What several test files share beside conftest.py: processes, models, optimizers, rows of runs.

Nothing here starts anything when it is imported.
"""

import json
import math
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from conftest import run_python
from sources import LION, scope_of
from torch import nn

import train
from model import GPT, GPTConfig
from optim import configure_optimizers

# ---- processes -----------------------------------------------------------------------------------

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def python(source, **environment):
    """What a new process that runs this source prints."""
    done = run_python("-c", source, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def torchrun(count):
    module = [sys.executable, "-m", "torch.distributed.run"]
    here = "--local-addr=127.0.0.1"  # a container's own name may lead nowhere
    return [*module, "--standalone", here, f"--nproc_per_node={count}"]


def children(process):
    done = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listens(port):
    """Whether a process listens there: a rank in the rendezvous, say."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# ---- models --------------------------------------------------------------------------------------

SMALL = {"vocab_size": 65, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}


def build(**overrides):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **overrides}))


def build_trained(noise=0.2, **overrides):
    """A model whose zero-initialised matrices are no longer zero, so that every path is open."""
    model = build(**overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


class Recurrent(nn.Module):
    """Not a GPT: a model that has forward() and nothing else, with parameters of every kind."""

    def __init__(self, vocab_size=65, width=16):
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.conv = nn.Conv1d(width, width, 1)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocab_size)
        self.hidden = width  # a name that forks like

    def forward(self, inputs, targets=None):
        x = self.conv(self.token(inputs).mT).mT
        logits = self.head(self.dropout(self.gru(x)[0]))
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


class Moving(torch.nn.Module):
    """A GPT whose forward pass moves buffers in place, as BatchNorm does, or by new ones."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt
        self.norm = torch.nn.BatchNorm1d(1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs, targets):
        loss = self.gpt(inputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss + self.norm(inputs.float().view(-1, 1)).mean() + 0 * self.norm.running_var.sum()


def moving_run(optimizer):
    """A run whose forward pass moves buffers, under one of our optimizers or one "by hand"."""
    run = build_run("adamw" if optimizer == "by hand" else optimizer, ema=True, dropout=0.1)
    run.model = Moving(run.model)
    run.ema = {f"gpt.{name}": average for name, average in run.ema.items()}
    if optimizer == "by hand":
        by_hand = scope_of(SimpleNamespace())
        exec(LION, by_hand)
        run.optimizers = by_hand["configure_optimizers"](run.model, "lion", 1e-3, 0.0)
        run.groups = [run.optimizers[0].state_dict()["param_groups"]]
    return run


# ---- bench.py and check.py ----------------------------------------------------------------------

BENCH_FLAGS = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "block_size": 32,
    "batch_size": 32,
    "dataset": "small",
    "device": "cpu",
    "compile": "false",
    "warmup_steps": 0,
    "peak_lr": 1e-2,
    "save_interval": 50,
    "rounds": 1,
    "timing_seconds": 0.05,
}


def bench_arguments(out_dir, data_dir, **flags):
    flags = BENCH_FLAGS | {"out_dir": out_dir, "data_dir": data_dir} | flags
    return [f"--{key}={value}" for key, value in flags.items()]


# ---- one update, without a run -------------------------------------------------------------------


OF_RUN = GPTConfig(vocab_size=65, block_size=16, n_head=2, n_embd=32)


def build_run(optimizer="adamw", rows=32, accum=1, ema=False, **shape):
    """A run before its first step, on a model in which every path is open."""
    model = build_trained(noise=0.1, **vars(OF_RUN) | shape)
    optimizers = configure_optimizers(model, optimizer, 1e-3, 0.1, 0.9, 0.95, 0.95, "cpu")
    return train.Run(
        folder=None,
        path=None,
        reasons={},
        device=torch.device("cpu"),
        train_data=None,
        val_data=None,
        facts={},
        model=model,
        optimizers=optimizers,
        groups=[each.state_dict()["param_groups"] for each in optimizers],
        scaler=torch.amp.GradScaler("cpu", enabled=train.dtype == "float16"),
        ema={n: w.detach().clone() for n, w in model.named_parameters()} if ema else {},
        state=train.FRESH_STATE | {"micro_batch": rows // accum},
    )


def batch(rows=32, config=OF_RUN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, config.block_size + 1)
    window = torch.randint(config.vocab_size, shape, generator=generator)
    return window[:, :-1].clone(), window[:, 1:].clone()


def gradient(run):
    return torch.cat([weight.grad.flatten() for weight in run.model.parameters()])


def distance(one, other):
    """Relative to `other`."""
    return ((one - other).norm() / other.norm()).item()


def update(run, inputs=None, targets=None, lr=1e-3):
    """The numbers of one step, as plain floats."""
    if inputs is None:
        inputs, targets = batch()
    numbers = train.train_step(run.model, run, inputs, targets, lr)
    return {name: value.item() for name, value in numbers.items()}


# ---- rows of runs that were never trained --------------------------------------------------------


def row(step, loss, **changes):
    """A train row as train.py writes it."""
    common = {"lr": 1e-3, "data_ms": 0.1, "tokens": 512 * step, "grad_norm": 0.5, "skipped": 0}
    common |= {"sequences": 8 * step, "epoch": step / 20}
    speed = {"step_ms": 5.0, "tokens_per_sec": 1e5, "mfu": 0.05, "mem_gb": 0.4, "gpu_util": None}
    return {"kind": "train", "step": step, "loss": loss, **common, **speed, **changes}


def evaluation(step, loss):
    values = {"val_loss": loss, "val_bpb": loss / math.log(2), "val_accuracy": 0.3}
    return {"kind": "eval", "step": step, **values, "best_val_loss": loss}


def event(step, name, **fields):
    return {"kind": "event", "step": step, "event": name, **fields}


def write_run(folder, rows, **info):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if info:
        (folder / "run.json").write_text(json.dumps(info))
    return folder


def falling(n, noise=0.03, **changes):
    """Train rows of a healthy run."""
    rng = np.random.RandomState(0)
    losses = 1.5 + 2.7 * np.exp(-3 * np.arange(n) / n) + noise * rng.randn(n)
    return [row(i + 1, loss, **changes) for i, loss in enumerate(losses)]


def eventful():
    """The log of a run that was stopped, killed once, rolled back, out of memory, and failed."""
    rows = falling(60)
    for step in (20, 21):
        rows[step - 1].update(loss=None, skipped=1, finite=False)
    seconds = {"start": 1.0, "train": 2.0}
    return [
        evaluation(0, 4.2),
        *rows[:30],
        event(20, "skipped", loss=None),
        event(21, "skipped", loss=None),
        event(25, "skipped", loss=None),
        evaluation(30, 2.5),
        event(30, "out_of_memory", micro_batch=4),
        rows[30],
        event(31, "end", ended="stopped by SIGINT", seconds=seconds),
        event(31, "resume", checkpoint="ckpt_00000031.pt", changed={"threads": [2, 1]}),
        event(31, "resume_checked", compared=0, equal=0, first_difference=None, **{"from": 31}),
        *rows[31:40],
        event(44, "skipped"),  # undone by a kill
        event(40, "resume", checkpoint="ckpt_00000040.pt", changed={}),
        event(40, "rollback", why="a loss spike", at_step=52),
        *rows[40:],
        event(45, "audit", odd="first", bits=3, tensors=["gradient/head.weight"]),
        evaluation(60, 2.6),
        event(60, "sample", text="To be\n~~~ or not"),
        event(60, "end", ended="failed: no more. And so on", seconds=seconds),
    ]


RUNS = {
    "healthy": [evaluation(0, 4.2), *falling(300), evaluation(300, 1.7)],
    "eventful": eventful(),
    "failed at step 3": [
        evaluation(0, 4.2),
        row(1, 4.2),
        row(2, 3.4e8, grad_norm=30.0),
        row(3, None, grad_norm=None, skipped=1, finite=False),
        event(3, "end", ended="failed: loss or gradient not finite " + "and so on " * 30),
    ],
    "failed before its first step": [evaluation(0, 4.2), event(0, "end", ended="failed: why")],
    "many steps": [*falling(5000, mfu=None), *(evaluation(i, 2.0) for i in range(0, 5000, 20))],
}

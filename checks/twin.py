"""Is this run the run that a plain loop would have made? Beside a run in which happens what happens
to long runs stands a loop of plain torch, and every number of the one must be that of the other.

Both begin with the same weights and the same random state, and so draw the same random numbers:
dropout that repeats its masks, an evaluation that moves the random state or a resume that loses it
all show in a loss. A fork that changes the step on purpose changes PlainLoop likewise.
"""

import io
import math
import os
import signal
from contextlib import contextmanager, redirect_stdout
from functools import partial

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import train
from plumbing import checkpoint, cli, data
from plumbing.cli import RunFailed
from plumbing.log import key_of, read_rows
from plumbing.snapshot import buffers_of, clone, rng_state, set_rng_state
from reporting.record import number_of

STEPS = 7
MASKED = 1  # the step in which the first sequence has no targets
NOT_FINITE = 2  # the step whose gradients are NaN
STOPPED = 3  # finished steps when a signal comes, after which another process goes on
SPOILED = 5  # the step that finds other averages, so that the last evaluation is not the best
KEPT = ("weight_decay", "lr_scale", "fused")  # of a group of weights

KNOBS = {
    "max_steps": STEPS,
    "decay_steps": STEPS,
    "warmup_steps": 3,
    "plateau_factor": 1.0,
    "accum_steps": 2,
    "weight_decay": 1.0,  # so large that it shows in a few steps
    "grad_clip": 0.1,  # so small that it matters
    "grad_checkpoint": True,  # the plain loop computes nothing again
    "best_metric": "val_loss",
    "eval_interval": 1,
    "patience": 0,
    "save_interval": 3,
    "keep_last": 2,
    "milestone_interval": 0,
    "audit_interval": -1,
    "resume": "auto",
    "compile": False,
    "report": False,
    "wandb_log": False,
}


setting = partial(cli.setting, vars(train))  # a context with other values of train.py's knobs


def twin_checks(job):
    """The steps, the evaluations and the end of an eventful run, and its resume."""
    few = {
        "batch_size": max(2, min(train.batch_size, 1024 // train.block_size)),
        "dropout": train.dropout or 0.1,
        "ema_decay": train.ema_decay or 0.8,
        "eval_tokens": 4 * train.block_size,
    }
    with setting(**KNOBS | few):
        try:
            watch, rows, folder = eventful_run(job)
        except RunFailed as error:
            yield "each step is that of a plain loop", False, str(error)
            return
        with setting(grad_checkpoint=False):
            plain = PlainLoop(job.fresh_run(), watch)
        plain.train()
    of_rows, of_weights = tolerances(job.device)
    for kind, name in (("train", "each step"), ("eval", "each evaluation")):
        expected = {key: row for key, row in plain.rows.items() if key[1] == kind}
        fine, found = compared(expected, rows, of_rows)
        yield f"{name} is that of a plain loop", fine, found
    last = checkpoint.load(folder / f"ckpt_{STEPS:08}.pt")
    error, name = max(plain.errors(last))
    found = said(off_by=error, weight=name, optimizer=train.optimizer)
    yield "the weights and averages are those of a plain loop", error < of_weights, found
    _, best = min((row["val_loss"], step) for (step, kind), row in rows.items() if kind == "eval")
    step = checkpoint.load(folder / "best.pt")["state"]["step"]
    files = sorted(path.stem for path in folder.glob("*.pt"))
    fine = step == best and files == ["best", *(f"ckpt_{n:08}" for n in (3, 6, 7))]
    yield "best.pt is the best", fine, said(step=step, best_in_the_log=best, files=files)
    for (_, kind), row in rows.items():
        if kind == "resume_checked":  # there is none where steps are slow
            found = said(compared=row["compared"], equal=row["equal"])
            yield "a resume is bit for bit", row["first_difference"] is None, found


def tolerances(device):
    """(of the numbers in rows, of the way of a weight), relative. Where this was tried, on CPUs,
    all bits were the same, but for Muon where it does not compute in bfloat16 as torch's does."""
    if train.optimizer == "muon":
        emulated = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return (0.005, 0.05) if emulated else (0.001, 0.01)
    return (1e-4, 1e-3) if train.dtype == "float32" else (0.001, 0.01)


def compared(expected, rows, tolerance):
    """(whether all numbers are the expected ones, in words the first that is not); None if no
    numbers are expected."""
    for (step, kind), row in sorted(expected.items()):
        for name, number in row.items():
            told = number_of(rows.get((step, kind), {}).get(name))  # NaN stands there as null
            of_counts = 0.01 if name == "val_accuracy" else 0.0
            if not np.isclose(told, number, tolerance, of_counts, equal_nan=True):
                return False, said(step=step, number=name, logged=told, expected=number)
    return True if expected else None, said(rows=len(expected))


def said(**numbers):
    """Words for what was found: its names and values, floats by four digits."""
    values = {k: f"{v:.7g}" if isinstance(v, float) else v for k, v in numbers.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def loss_in(out):
    """The loss that a model returns, alone or with other numbers."""
    return out[0] if isinstance(out, tuple) else out


def gradients_of(model):
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


# ---- what happens in the run ---------------------------------------------------------------------


class EventfulRun(train.Watch):
    """Makes things happen in a run, and records what a plain loop needs to take the same steps."""

    def __init__(self):
        self.clipped_norms = {}  # step -> norm of the gradients after it
        self.trained = {}  # step -> whether each weight requires a gradient: a fork may freeze some

    def begin(self, run):
        self.run = run
        if isinstance(run.val_data, data.OrderedWindows):  # two batches; the last repeats targets
            windows = uneven_micro_batch() + 1.5
            tokens = run.val_data.tokens[: int(windows * train.block_size)]
            run.val_data = data.OrderedWindows(tokens, train.block_size)
        train.eval_tokens = 0  # for rows of the whole split
        if run.path:
            return
        add_noise(run.model.parameters(), 0)  # a weight that starts at zero would hide its layer
        add_noise(run.ema.values(), 0)
        run.state["micro_batch"] = uneven_micro_batch()  # as after running out of memory
        self.weights = clone(run.model.state_dict())
        self.rng = rng_state(run.device)

    def step(self, run, take, inputs, targets, lr):
        step = run.state["step"]
        if step == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == SPOILED:
            add_noise(run.ema.values(), step, 0.5)
        with masked(step, targets), not_finite(step, run.model):
            numbers = take()
        self.clipped_norms[step] = torch.nn.utils.get_total_norm(gradients_of(run.model)).item()
        self.trained[step] = [weight.requires_grad for weight in run.model.parameters()]
        return numbers


def uneven_micro_batch():
    return max(2, 2 * train.sequences_at(0) // 5)


@torch.no_grad()
def add_noise(tensors, seed, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor += size * torch.randn(tensor.shape, generator=generator).to(tensor)


@contextmanager
def masked(step, targets):
    """A context in which, in that one step, the targets of the first sequence do not count."""
    before = targets.clone()
    if step == MASKED and not targets.is_floating_point():
        targets[0] = -100
    yield
    targets.copy_(before)


@contextmanager
def not_finite(step, model):
    """A context in which, in that one step, the gradient of the first weight is NaN."""
    factor = math.nan if step == NOT_FINITE else 1.0
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    hook = weight.register_hook(lambda gradient: gradient * factor)
    yield
    hook.remove()


def eventful_run(job):
    """(its EventfulRun, {(step, kind): row} of its log, its folder)."""
    watch = EventfulRun()
    folder = job.run.folder.path / "twin"
    with redirect_stdout(io.StringIO()):
        for _ in ("until the signal", "to the end"):
            train.main([f"--out_dir={folder}"], watch=watch)
    rows = {key_of(row): row for row in read_rows(folder / "metrics.jsonl")[0]}
    for step, norm in watch.clipped_norms.items():
        rows[step + 1, "train"]["clipped_norm"] = norm
    return watch, rows, folder


# ---- the plain loop ------------------------------------------------------------------------------


class PlainLoop:
    """A loop of plain torch that takes the steps of an eventful run.

    run: a new one with its knobs, of which the model, the groups of the optimizers and the device
    are used. The learning rate, the number of sequences in a batch and the data are those of the
    code under test, which other checks test."""

    def __init__(self, run, watch):
        self.watch = watch
        self.device = run.device
        self.model = run.model
        self.model.load_state_dict(watch.weights)
        self.average = {n: w.detach().clone() for n, w in run.model.named_parameters()}
        self.optimizers, self.stacked = plain_optimizers(run)
        self.scale = 2.0**16 if train.dtype == "float16" else 1.0
        self.sequences = self.tokens = 0
        self.best_loss = math.inf
        self.rows = {}  # (step, kind): the row that the run must have logged

    def train(self):
        has_classes = "int" in str(self.watch.run.val_data[0, 1][1].dtype)
        set_rng_state(self.watch.rng, self.device)
        for step in range(STEPS + 1):
            if has_classes:
                self.evaluate(step)
            if step < STEPS:
                self.step(step)

    def step(self, step):
        trained = self.watch.trained.get(step, self.watch.trained[0])
        for weight, needed in zip(self.model.parameters(), trained, strict=True):
            weight.requires_grad_(needed)
        buffers = clone(buffers_of(self.model))
        count = train.sequences_at(step)
        batch = data.Reader(self.watch.run.train_data, train.seed)[self.sequences, count]
        inputs, targets = data.to_device(batch, self.device)
        self.sequences += count
        with masked(step, targets), not_finite(step, self.model):
            n_targets = train.count_targets(targets)
            loss = self.forward_backward(inputs, targets, n_targets)
        norm = torch.nn.utils.get_total_norm(gradients_of(self.model))
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        self.tokens += n_targets.item()
        row = {
            "lr": train.lr_at(step),
            "sequences": self.sequences,
            "tokens": self.tokens,
            "epoch": self.sequences / len(self.watch.run.train_data),
            "loss": loss,
            "grad_norm": norm.item(),
            "clipped_norm": min(norm.item(), train.grad_clip),
            "skipped": int(not is_finite),
        }
        if train.dtype == "float16":
            row["loss_scale"] = self.scale
        self.rows[step + 1, "train"] = row
        if step == SPOILED:
            add_noise(self.average.values(), step, 0.5)
        if is_finite:
            self.update(row["lr"], norm)
        else:
            self.scale /= 2
            self.model.load_state_dict(buffers, strict=False)

    def forward_backward(self, inputs, targets, n_targets):
        """The mean loss over all targets, and its gradient in the weights."""
        self.model.zero_grad()
        loss = 0.0
        parts = inputs.split(uneven_micro_batch()), targets.split(uneven_micro_batch())
        for x, y in zip(*parts, strict=True):
            with train.autocast(self.device):
                mean = loss_in(self.model(x, y))
            part = mean / (n_targets / train.count_targets(y))
            (self.scale * part).backward()
            loss += part.item()
        for gradient in gradients_of(self.model):
            gradient /= self.scale
        return loss

    @torch.no_grad()
    def update(self, lr, norm):
        """Clip, step torch's optimizers, average."""
        for gradient in gradients_of(self.model):
            gradient *= (train.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        for weight, parts in self.stacked.items():
            for number, part in enumerate(parts):
                part.grad = weight.grad.chunk(len(parts))[number] if weight.requires_grad else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            optimizer.step()
        for name, weight in self.model.named_parameters():
            self.average[name].lerp_(weight, 1 - train.ema_decay)

    @torch.no_grad()
    def evaluate(self, step):
        """The mean of -log p of the averaged weights, in float64, by the classes that exist."""
        val_data = self.watch.run.val_data
        meta = self.watch.run.facts["data"]["meta"]
        self.model.eval()
        parts = []
        size = uneven_micro_batch()
        inputs, targets = data.to_device(val_data[0, len(val_data)], self.device)
        for x in inputs.split(size):
            with torch.random.fork_rng(devices=[]), train.autocast(self.device):
                torch.manual_seed(step)
                parts.append(functional_call(self.model, self.average, (x,)))
        self.model.train()
        counted = targets != -100
        targets = targets[counted]
        logits = torch.cat(parts)[counted][:, : meta["vocab_size"]].double()
        loss = cross_entropy(logits, targets).item()
        self.best_loss = min(self.best_loss, loss)
        row = {"val_loss": loss, "best_val_loss": self.best_loss}
        row["val_accuracy"] = (logits.argmax(-1) == targets).double().mean().item()
        if "val_bytes" in meta:
            row["val_bpb"] = loss / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
        self.rows[step, "eval"] = row

    def errors(self, last):
        """Yields (how far each tensor of a checkpoint is off, over how far the weight has moved, its
        name)."""
        weights = self.model.state_dict()
        for part, expected in (("model", weights), ("ema", self.average)):
            for name, tensor in expected.items():
                way = (weights[name] - self.watch.weights[name]).double().norm()
                error = (last[part][name] - tensor).double().norm() / way.clamp(min=1e-12)
                yield error.item(), f"{part} {name}"


def plain_optimizers(run):
    """(torch's optimizers, {weight: the matrices that are stacked in it, as parameters that share
    its memory} of what torch's Muon moves). What torch does not have is the fork's own."""
    betas = {"betas": (train.beta1, train.beta2)}
    torchs = {
        "muon": (torch.optim.Muon, {"momentum": train.momentum, "adjust_lr_fn": "match_rms_adamw"}),
        "adamw": (torch.optim.AdamW, betas),
        "adam": (torch.optim.Adam, betas),
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": train.momentum}),
    }
    if train.optimizer not in torchs:
        return run.optimizers, {}
    counts = {m.weight: m.muon_parts for m in run.model.modules() if hasattr(m, "muon_parts")}
    stacked = {}
    optimizers = []
    for optimizer in run.optimizers:
        is_rest = train.optimizer == "muon" and isinstance(optimizer, torch.optim.AdamW)
        kind, how = torchs["adamw" if is_rest else train.optimizer]
        groups = []
        for group in optimizer.param_groups:
            weights = group["params"]
            if kind is torch.optim.Muon:
                for weight in weights:
                    parts = weight.data.chunk(counts.get(weight, 1))
                    stacked[weight] = [torch.nn.Parameter(part) for part in parts]
                weights = [part for weight in weights for part in stacked[weight]]
            kept = {name: group[name] for name in KEPT if name in group}
            groups.append({"params": weights, **kept})
        optimizers.append(kind(groups, **how))
    return optimizers, stacked

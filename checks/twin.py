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
from collections import Counter
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch.func import functional_call

import optim
import train
from plumbing import checkpoint, cli, data
from plumbing.log import key_of, read_rows
from plumbing.snapshot import buffers_of, clone
from reporting.record import number_of

MICRO_BATCH = 3  # sequences of a pass, as after running out of memory: the last one has fewer
MASKED = 1  # the step in which a micro-batch has no targets, and another one half of them
NOT_FINITE = 2  # the step whose gradients are NaN
STOPPED = 5  # finished steps when a signal comes, in the second epoch of a text
CLEARED = 5  # the step that finds averages without noise: the evaluation after it is the best
EVENTS = {  # number of a step: what happened in it
    MASKED + 1: ", in which a micro-batch has no targets",
    NOT_FINITE + 1: ", whose gradient was made NaN",
    STOPPED + 1: ", the first after a stop and a resume",
}
ON_PURPOSE = "; a change made on purpose belongs into PlainLoop in checks/twin.py, too"
KEPT = ("weight_decay", "lr_scale", "fused")  # of a group of weights

KNOBS = {
    "max_steps": 14,  # early stopping comes first, unless a learning rate is far off
    "decay_steps": 12,
    "warmup_steps": 3,
    "plateau_factor": 0.5,
    "plateau_patience": 2,
    "patience": 3,
    "min_delta": 0.001,
    "accum_steps": 2,
    "weight_decay": 1.0,  # so large that it shows in a few steps
    "grad_clip": 0.1,  # so small that it matters
    "best_metric": "val_loss",
    "eval_interval": 2,
    "save_interval": 4,
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
        "batch_size": max(4, min(train.batch_size, 512 // train.block_size)),
        "dropout": train.dropout or 0.1,
        "ema_decay": train.ema_decay or 0.8,
        "eval_tokens": 4 * train.block_size,
    }
    with setting(**KNOBS | few):
        eventful, rows, folder = eventful_run(job)
        # built again from the same seed; nothing is computed twice
        with setting(grad_checkpoint=False), train.build([f"--out_dir={folder}_plain"]) as run:
            plain = PlainLoop(run, eventful)
            plain.train(rows)
    of_rows, of_weights = tolerances()
    yield "each step is that of a plain loop", *compare(plain.steps, rows, of_rows)
    yield "each evaluation is that of a plain loop", *compare(plain.evaluations, rows, of_rows)
    end = max(step for step, kind in rows if kind == "train")
    error, name = max(plain.errors(checkpoint.load(folder / checkpoint.file_name(end))))
    text = text_of(off_by=error, weight=name, optimizer=train.optimizer)
    yield "the weights and averages are those of a plain loop", error < of_weights, text
    _, best = min((number_of(row.get("val_loss")), step) for (step, _), row in rows.items())
    step = checkpoint.load(folder / "best.pt")["state"]["step"]
    yield "best.pt is the best", step == best, text_of(step=step, best_in_the_log=best)
    for (_, kind), row in rows.items():
        if kind == "resume_checked":
            text = text_of(compared=row["compared"], equal=row["equal"])
            fine = row["first_difference"] is None if row["compared"] else None
            yield "a resume is bit for bit", fine, text


def tolerances():
    """(of the numbers in rows, of the way of a weight), relative. Where this was tried, on CPUs,
    all bits were the same."""
    return (1e-4, 1e-3) if train.dtype == "float32" else (0.001, 0.01)


def compare(expected, rows, tolerance):
    """(whether all numbers are the expected ones, text with the first that is not); None if no
    numbers are expected."""
    for (step, kind), row in sorted(expected.items()):
        for name, number in row.items():
            logged = number_of(rows.get((step, kind), {}).get(name))  # NaN stands there as null
            of_shares = 0.01 * (name == "val_accuracy")
            if not np.isclose(logged, number, tolerance, of_shares, equal_nan=True):
                where = f"{step}{EVENTS.get(step, '')}"
                text = text_of(step=where, number=name, logged=logged, expected=number)
                return False, text + ON_PURPOSE
    return (
        (True, f"rows {len(expected)}")
        if expected
        else (None, "evaluate() is the fork's own, or there are several sets")
    )


def text_of(**numbers):
    """Names and values, floats by seven digits."""
    values = {k: f"{v:.7g}" if isinstance(v, float) else v for k, v in numbers.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def numbers_in(out):
    """{"loss": what a model returns, alone or with other numbers, and those}."""
    loss, others = out if isinstance(out, tuple) else (out, {})
    return {"loss": loss, **others}


def loss_in(out):
    return numbers_in(out)["loss"]


def count_targets(targets):
    """All but the masked ones: -100, or NaN if they are floats."""
    is_masked = targets.isnan() if targets.is_floating_point() else targets.long() == -100
    return (~is_masked).sum().item()


def gradients_of(model):
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def total_norm(model):
    return torch.nn.utils.get_total_norm(gradients_of(model))


# ---- what happens in the run ---------------------------------------------------------------------


class EventfulRun(train.Hook):
    """Makes things happen in a run, and records what a plain loop needs to take the same steps."""

    def __init__(self):
        self.trained = {}  # step -> whether each weight requires a gradient: a fork may freeze some

    def begin(self, run):
        prepare(run)

    def step(self, run, take, inputs, targets, lr):
        step = run.state["step"]
        if step == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        spoil(run, step)
        with events(step, run.model, targets):
            numbers = take()
        self.trained[step] = [weight.requires_grad for weight in run.model.parameters()]
        return {**numbers, "clipped_norm": total_norm(run.model)}  # a field of its row


def prepare(run):
    """Of a text, leave an epoch of two and a half batches, and six batches to evaluate, of which the
    last window repeats targets. Add noise to each weight: one that starts at zero would hide what
    its layer does."""
    size = train.block_size
    if type(run.train_data) is train.ShuffledWindows:
        run.train_data.tokens = run.train_data.tokens[: 5 * train.sequences_at(0) * size // 2]
    if type(run.val_data) is data.OrderedWindows:
        tokens = run.val_data.tokens[: 5 * MICRO_BATCH * size + 3 * size // 2]
        run.val_data = data.OrderedWindows(tokens, size)
        run.facts["data"]["meta"]["val_tokens"] = len(tokens)  # for bits per byte
    train.eval_tokens = 0  # for rows of the whole split
    if not run.path:
        run.state["micro_batch"] = MICRO_BATCH
        add_noise(run.model.parameters(), 0)
        add_noise(run.ema.values(), 0)


@torch.no_grad()
def spoil(run, step):
    """Before some steps, averages get more and more noise, or none: so that evaluations get worse,
    better and worse."""
    if step == CLEARED:
        for name, average in run.ema.items():
            average.copy_(run.model.get_parameter(name))
    elif step % 2:
        add_noise(run.ema.values(), step, 0.05 * (step + 1))


@torch.no_grad()
def add_noise(tensors, seed, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor += size * torch.randn(tensor.shape, generator=generator).to(tensor)


@contextmanager
def events(step, model, targets):
    """A context in which, in MASKED, the targets of the first micro-batch do not count, and half of
    those of the second; in NOT_FINITE the gradient of the first weight is NaN."""
    before = targets.clone()
    if step == MASKED and not targets.is_floating_point():
        micro_batch = targets[:MICRO_BATCH]
        targets.view(-1)[: 3 * micro_batch.numel() // 2] = -100
    factor = math.nan if step == NOT_FINITE else 1.0
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    hook = weight.register_hook(lambda gradient: gradient * factor)
    yield
    hook.remove()
    targets.copy_(before)


def eventful_run(job):
    """(its EventfulRun, {(step, kind): row} of its log, its folder)."""
    eventful = EventfulRun()
    folder = job.run.folder.path / "twin"
    with redirect_stdout(io.StringIO()):
        for _ in ("until the signal", "to the end"):
            train.main([f"--out_dir={folder}"], hooks=[eventful])
    rows = {key_of(row): row for row in read_rows(folder / "metrics.jsonl")}
    return eventful, rows, folder


# ---- the plain loop ------------------------------------------------------------------------------


class PlainLoop:
    """A loop of plain torch that takes the steps of an eventful run.

    run: a new one with its knobs, of which the model, the groups of the optimizers, the averages
    and the data are used. The learning rate, the number of sequences in a batch and the data are
    those of the code under test, which other checks test."""

    def __init__(self, run, eventful):
        prepare(run)
        self.run = run
        self.eventful = eventful
        self.model = run.model
        self.begin = clone(run.model.state_dict())
        self.optimizers, self.stacked = plain_optimizers(run)
        self.scale = 2.0**16 if train.dtype == "float16" else 1.0
        self.sequences = self.tokens = 0
        self.best_loss = self.loss_to_beat = math.inf
        self.without_best = 0  # evaluations
        self.lr_factor = 1.0
        self.steps, self.evaluations = {}, {}  # (step, kind): the row that the run must have logged

    def train(self, rows):
        for step in range(train.max_steps + 1):
            if step % train.eval_interval == 0:
                is_own = train.evaluate.__module__ != train.__name__  # a fork's
                if not is_own and not isinstance(self.run.val_data, dict):
                    self.evaluate(step)
                self.count(number_of(rows.get((step, "eval"), {}).get("val_loss")))
                if self.without_best == train.patience:
                    break
            if step < train.max_steps:
                self.step(step)
        self.steps[step, "end"] = {"step": step}

    def count(self, loss):
        """Of evaluations that do not beat the best: the rate falls after some."""
        if loss < self.loss_to_beat - train.min_delta:
            self.loss_to_beat = loss
            self.without_best = 0
            return
        self.without_best += 1
        if self.without_best % train.plateau_patience == 0:
            self.lr_factor *= train.plateau_factor

    def step(self, step):
        trained = self.eventful.trained.get(step, self.eventful.trained[0])
        for weight, needed in zip(self.model.parameters(), trained, strict=True):
            weight.requires_grad_(needed)
        buffers = clone(buffers_of(self.model))
        count = train.sequences_at(step)
        batch = data.Reader(self.run.train_data, train.seed)[self.sequences, count]
        inputs, targets = data.to_device(batch, self.run.device)
        self.sequences += count
        with events(step, self.model, targets):
            n_targets = count_targets(targets)
            loss = self.forward_backward(inputs, targets, n_targets)
        norm = total_norm(self.model)
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        self.tokens += n_targets
        row = {
            "lr": train.lr_at(step) * self.lr_factor,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "epoch": self.sequences / len(self.run.train_data),
            "loss": loss,
            "grad_norm": norm.item(),
            "clipped_norm": min(norm.item(), train.grad_clip),
            "skipped": int(not is_finite),
        }
        if train.dtype == "float16":
            row["loss_scale"] = self.scale
        self.steps[step + 1, "train"] = row
        spoil(self.run, step)
        if is_finite:
            self.update(row["lr"], norm)
        else:
            self.scale /= 2
            self.model.load_state_dict(buffers, strict=False)

    def forward_backward(self, inputs, targets, n_targets):
        """The mean loss over all targets, and its gradient in the weights."""
        self.model.zero_grad()
        loss = 0.0
        parts = inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH)
        for x, y in zip(*parts, strict=True):
            with train.autocast(self.run.device):
                mean = loss_in(self.model(x, y))
            n = count_targets(y)
            if n:
                part = mean / (n_targets / n)
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
                part.grad = None if weight.grad is None else weight.grad.chunk(len(parts))[number]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            with precision_of_muon(self.run.device):
                optimizer.step()
        for name, weight in self.model.named_parameters():
            self.run.ema[name].lerp_(weight, 1 - train.ema_decay)

    @torch.no_grad()
    def evaluate(self, step):
        """The mean of each number that the model returns in eval mode, with the averaged weights, over
        the targets that count. What a target costs is the fork's own: another check asks whether
        that is -log p."""
        val_data = self.run.val_data
        reader = data.Reader(val_data, train.seed)
        totals = Counter()
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with data.seeded([0]), train.autocast(self.run.device):  # puts the random state back
            for first in range(0, len(val_data), MICRO_BATCH):
                batch = reader[first, min(MICRO_BATCH, len(val_data) - first)]
                inputs, targets = data.to_device(batch, self.run.device)
                train.seed_everything(data.seed_of(train.seed, first))
                means = numbers_in(functional_call(self.model, self.run.ema, (inputs, targets)))
                for name, mean in {**means, "targets": 1.0}.items():
                    totals[name] += float(mean) * count_targets(targets)
        for module, training in modes.items():
            module.training = training
        counted = totals.pop("targets")
        row = {f"val_{name}": total / counted for name, total in totals.items()}
        self.best_loss = min(self.best_loss, row["val_loss"])
        row["best_val_loss"] = self.best_loss
        meta = self.run.facts["data"]["meta"]
        if "val_bytes" in meta and counted == meta["val_tokens"] - 1:
            bits = row["val_loss"] / math.log(2)
            row["val_bpb"] = bits * meta["val_tokens"] / meta["val_bytes"]
        self.evaluations[step, "eval"] = row

    def errors(self, last):
        """Yields (how far each tensor of a checkpoint is off, over how far the weight has moved, its
        name)."""
        weights = self.model.state_dict()
        for part, expected in (("model", weights), ("ema", self.run.ema)):
            for name, tensor in expected.items():
                way = (weights[name] - self.begin[name]).double().norm()
                error = (last[part][name] - tensor).double().norm() / way.clamp(min=1e-12)
                yield error.item(), f"{part} {name}"


def precision_of_muon(device):
    """A context in which torch's Muon computes in float32 where ours does."""
    if optim.emulates_bfloat16(device):
        return patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)
    return nullcontext()


def plain_optimizers(run):
    """(torch's optimizers, {weight: the matrices that are stacked in it, as parameters that share
    its memory}), since torch's Muon takes one matrix for each. What torch does not have is the
    fork's own."""
    betas = {"betas": (train.beta1, train.beta2)}
    momentum = {"momentum": train.momentum}
    plain = {
        "adamw": {"AdamW": betas},
        "adam": {"Adam": betas},
        "sgd": {"SGD": {}},
        "momentum": {"SGD": momentum},
        "muon": {"Muon": momentum | {"adjust_lr_fn": "match_rms_adamw"}, "AdamW": betas},
    }
    known = {name for parts in plain.values() for name in parts}
    if any(type(optimizer).__name__ not in known for optimizer in run.optimizers):
        return run.optimizers, {}
    stacked = {}
    for module in run.model.modules():
        if hasattr(module, "muon_parts"):
            parts = module.weight.data.chunk(module.muon_parts)
            stacked[module.weight] = [torch.nn.Parameter(part) for part in parts]
    optimizers = []
    parts = plain[train.optimizer].items()
    for (name, options), optimizer in zip(parts, run.optimizers, strict=True):
        groups = []
        for group in optimizer.param_groups:
            weights = [stacked.get(weight, [weight]) for weight in group["params"]]
            kept = {key: group[key] for key in KEPT if key in group}
            groups.append({"params": sum(weights, []), **kept})
        optimizers.append(getattr(torch.optim, name)(groups, **options))
    return optimizers, stacked

"""Is this run the run that a plain loop would have made? Beside a run in which happens what happens
to long runs, plain.py takes the same steps, and every number of the one must be that of the other.

Both begin with the same weights and the same random state, and so draw the same random numbers:
dropout that repeats its masks, an evaluation that moves the random state or a resume that loses it
all show in a loss. A fork that changes the step on purpose changes plain.py likewise.
"""

import io
import math
import os
import signal
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

import optim
import plain
import train
from plumbing import checkpoint, cli, data
from plumbing.log import key_of, read_rows
from plumbing.snapshot import clone, rng_state, set_rng_state
from reporting.record import number_of

MICRO_BATCH = 3  # sequences of a pass, as after running out of memory: the last one has fewer
MASKED = 1  # the step in which a micro-batch has no targets, and another one half of them
NOT_FINITE = 2  # the step whose gradients are NaN
STOPPED = 3  # finished steps when a signal comes, in the second epoch of a text
CLEARED = 5  # the step that finds averages without noise: the evaluation after it is the best
NO_MEMORY = 4  # the step in which memory runs out once: then a pass takes one sequence
EVENTS = {  # number of a step: what happened in it
    MASKED + 1: ", where check.py masks a micro-batch",
    NOT_FINITE + 1: ", where check.py makes the gradient NaN",
    STOPPED + 1: ", the first after check.py stopped and resumed the run",
    NO_MEMORY + 1: ", where check.py simulates out of memory",
}

KNOBS = {
    "max_steps": 14,  # early stopping comes first, unless a learning rate is far off
    "decay_steps": 12,
    "plateau_factor": 0.5,
    "plateau_patience": 2,
    "patience": 3,
    "min_delta": 0.001,
    "accum_steps": 2,
    "weight_decay": 1.0,  # so large that it shows in a few steps
    "grad_clip": 0.1,  # so small that it matters
    "best_metric": "val_loss",
    "eval_interval": 2,
    "sample_interval": 5,
    "save_interval": 4,
    "keep_last": 2,
    "milestone_interval": 0,
    "audit_interval": -1,
    "resume": "auto",
    "compile": False,
    "report": False,
    "wandb_log": False,
}
TYPED = ["--warmup_steps=3"]  # a warmup that is not typed shrinks


setting = partial(cli.setting, vars(train))  # a context with other values of train.py's knobs


def in_plain(device, **others):
    """A context in which plain.py has the values of train.py's knobs, but for these."""
    names = set(vars(plain)) & set(cli.read_knobs(train.__file__))
    knobs = {name: getattr(train, name) for name in names}
    return cli.setting(vars(plain), **knobs | {"device": torch.device(device).type} | others)


def with_roles(model):
    """The model, which says what plain.py asks of it."""
    for name, value in {"undecayed": (), "muon_prefix": ""}.items():
        setattr(model, name, getattr(model, name, value))
    return model


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
        argv = [f"--out_dir={folder}_plain", *TYPED]
        with setting(grad_checkpoint=False), train.build(argv) as run:
            twin = PlainLoop(run, eventful)
            twin.train(rows)
    of_rows, of_weights = tolerances()
    yield "steps", *compare(twin.steps, rows, of_rows)
    logged = [row for (_, kind), row in rows.items() if kind == "train"][: len(twin.steps) - 1]
    by_rate = sum(row["tokens_per_sec"] * row["step_ms"] / 1000 for row in logged)
    text = (
        f"tokens_per_sec x time gives {by_rate:,.0f} tokens, the batches hold {twin.batch_tokens:,}"
    )
    yield "rates", abs(by_rate / twin.batch_tokens - 1) < 0.01, text
    events = [row["step"] for (_, kind), row in rows.items() if kind == "out_of_memory"]
    yield "events", events == [NO_MEMORY + 1], f"logged at {events}, simulated in {NO_MEMORY + 1}"
    yield "evaluations", *compare(twin.evaluations, rows, of_rows)
    end = max(step for step, kind in rows if kind == "train")
    error, name = max(twin.errors(checkpoint.load(folder / checkpoint.file_name(end))))
    yield "weights", error < of_weights, f"{name} is off by {error:.2g} of the distance it moved"
    _, best = min((number_of(row.get("val_loss")), step) for (step, _), row in rows.items())
    step = checkpoint.load(folder / "best.pt")["state"]["step"]
    yield "best", step == best, f"it is of step {step}, and the lowest loss of step {best}"
    for (_, kind), row in rows.items():
        if kind == "resume_checked":
            fine = row["first_difference"] is None if row["compared"] else None
            text = f"{row['equal']} of {row['compared']} rows are equal"
            yield "resume", fine, text if row["compared"] else "no row was computed twice"


def tolerances():
    """(of the numbers in rows, of the way of a weight), relative. Where this was tried, on CPUs,
    all bits were the same."""
    return (1e-4, 1e-3) if train.dtype == "float32" else (0.001, 0.01)


def compare(expected, rows, tolerance):
    """(whether all numbers are the expected ones, text with the first that is not); None if no
    numbers are expected."""
    for (step, kind), row in sorted(expected.items()):
        for name, number in row.items():
            found = rows.get((step, kind), {})
            logged = number_of(found.get(name))  # NaN stands there as null
            of_shares = 0.01 * (name == "val_accuracy")
            if not np.isclose(logged, number, tolerance, of_shares, equal_nan=True):
                where = f"step {step}{EVENTS.get(step, '')}"
                shown = f"{logged:.7g}" if name in found else "missing"
                return False, f"{where}: {name} is {shown} in the log, {number:.7g} in plain.py"
    own = None, "evaluate() is the script's own, or there are several validation sets"
    return (True, f"{len(expected)} rows compared") if expected else own


def numbers_in(out):
    """{"loss": what a model returns, alone or with other numbers, and those}."""
    loss, others = out if isinstance(out, tuple) else (out, {})
    return {"loss": loss, **others}


def loss_in(out):
    return numbers_in(out)["loss"]


def total_norm(model):
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


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
        norms = []  # of the clipped gradient, which an optimizer may change

        def see_norm(*_):
            norms.append(total_norm(run.model))

        with ExitStack() as stack:
            stack.enter_context(events(step, run.model, targets))
            if step == NO_MEMORY and run.state["micro_batch"] > 1:
                stack.enter_context(without_memory(run.model))
            if isinstance(run.optimizers[0], torch.optim.Optimizer):
                handle = run.optimizers[0].register_step_pre_hook(see_norm)
                stack.callback(handle.remove)
            numbers = take()
        self.trained[step] = [weight.requires_grad for weight in run.model.parameters()]
        see_norm()
        return {**numbers, "clipped_norm": norms[0]}  # a field of its row


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
    better and worse. Before the stop the rate is halved, as by a plateau."""
    if step == STOPPED - 1:
        run.state["lr_factor"] /= 2
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


@contextmanager
def without_memory(model):
    """A context in which the second forward pass finds no memory."""
    passes = []

    def fail(*_):
        passes.append(1)
        if len(passes) == 2:
            raise MemoryError

    hook = model.register_forward_pre_hook(fail)
    yield
    hook.remove()


def eventful_run(job):
    """(its EventfulRun, {(step, kind): row} of its log, its folder)."""
    eventful = EventfulRun()
    folder = job.run.folder.path / "twin"
    with redirect_stdout(io.StringIO()):
        for _ in ("until the signal", "to the end"):
            train.main([f"--out_dir={folder}", *TYPED], hooks=[eventful])
    rows = {key_of(row): row for row in read_rows(folder / "metrics.jsonl")}
    return eventful, rows, folder


# ---- the plain loop ------------------------------------------------------------------------------


class PlainLoop:
    """Takes the steps of an eventful run by the functions of plain.py.

    run: a new one with its knobs, of which the model, the groups of the optimizers, the averages
    and the data are used. The learning rate, the number of sequences in a batch and the data are
    those of the code under test, which other checks test."""

    def __init__(self, run, eventful):
        prepare(run)
        self.run = run
        self.eventful = eventful
        self.model = run.model
        self.begin = clone(run.model.state_dict())
        self.optimizers = run.optimizers  # a fork's own
        if train.configure_optimizers.__module__ == "optim":
            with in_plain(run.device):
                self.optimizers = plain.configure_optimizers(with_roles(run.model))
        self.scale = 2.0**16 if train.dtype == "float16" else 1.0
        for weight in self.model.parameters():
            if weight.requires_grad and self.scale > 1:
                weight.register_hook(lambda gradient: gradient / self.scale)
        self.sequences = self.tokens = 0
        self.best_loss = self.loss_to_beat = math.inf
        self.without_best = 0  # evaluations
        self.steps, self.evaluations = {}, {}  # (step, kind): the row that the run must have logged
        self.batch_tokens = 0

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
            self.run.state["lr_factor"] *= train.plateau_factor

    def in_plain(self, step):
        """A context in which plain.py has the run's knobs, and its size of a micro-batch in `step`."""
        size = 1 if step >= NO_MEMORY else MICRO_BATCH
        return in_plain(self.run.device, batch_size=size, means_of=self.means_of)

    def means_of(self, model, inputs, targets, inner=plain.means_of):
        """Those of plain.py, with the loss scaled for float16. Without targets there is none."""
        means = inner(model, inputs, targets)
        if not plain.count_targets(targets):
            return {name: torch.zeros((), requires_grad=model.training) for name in means}
        return means | {"loss": means["loss"] * self.scale} if model.training else means

    def step(self, step):
        trained = self.eventful.trained.get(step, self.eventful.trained[0])
        for weight, needed in zip(self.model.parameters(), trained, strict=True):
            weight.requires_grad_(needed)
        count = train.sequences_at(step)
        batch = data.Reader(self.run.train_data, train.seed)[self.sequences, count]
        inputs, targets = data.to_device(batch, self.run.device)
        self.sequences += count
        self.batch_tokens += targets.numel()
        lr = train.lr_at(step) * self.run.state["lr_factor"]
        spoil(self.run, step)
        before = clone([self.model.state_dict(), *(part.state_dict() for part in self.optimizers)])
        with (
            self.in_plain(step),
            events(step, self.model, targets),
            precision_of_muon(self.run.device),
        ):
            self.tokens += plain.count_targets(targets).item()
            loss, norm = plain.train_step(self.model, self.optimizers, inputs, targets, lr)
        loss, norm = loss.item() / self.scale, norm.item()
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        row = {
            "lr": lr,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "epoch": self.sequences / len(self.run.train_data),
            "loss": loss,
            "grad_norm": norm,
            "clipped_norm": min(norm, train.grad_clip),
            "skipped": int(not is_finite),
        }
        if train.dtype == "float16":
            row["loss_scale"] = self.scale
        self.steps[step + 1, "train"] = row
        if is_finite:
            self.average()
            return
        self.scale = max(1.0, self.scale / 2)
        for part, state in zip([self.model, *self.optimizers], before, strict=True):
            part.load_state_dict(state)

    @torch.no_grad()
    def average(self):
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
        random_state = rng_state(self.run.device)
        weights = clone(dict(self.model.named_parameters()))
        copy_into(self.model, self.run.ema)
        size = 1 if step > NO_MEMORY else MICRO_BATCH
        with self.in_plain(step - 1):
            for first in range(0, len(val_data), size):
                batch = reader[first, min(size, len(val_data) - first)]
                inputs, targets = data.to_device(batch, self.run.device)
                train.seed_everything(data.seed_of(train.seed, first))
                counted = plain.count_targets(targets).item()
                totals["targets"] += counted
                means = plain.evaluate(self.model, inputs, targets) if counted else {}
                for name, mean in means.items():
                    totals[name] += mean * counted
        copy_into(self.model, weights)
        set_rng_state(random_state, self.run.device)
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


@torch.no_grad()
def copy_into(model, weights):
    for name, weight in weights.items():
        model.get_parameter(name).copy_(weight)


def precision_of_muon(device):
    """A context in which torch's Muon computes in float32 where ours does."""
    if optim.emulates_bfloat16(device):
        return patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)
    return nullcontext()

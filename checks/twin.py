"""Is this run the run that a plain loop would have made? Beside a run in which happens what happens
to long runs, plain.py takes the same steps, and every number of the one must be that of the other.

Both begin with the same weights and the same random state, of which each keeps its own: dropout that
repeats its masks, an evaluation that moves the random state or a resume that loses it all show in a
loss. A fork that changes the step on purpose changes plain.py likewise, or accepts `steps`: then its
own train_step takes the steps of both, and the rest is compared."""

import io
import math
import os
import signal
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._pytree import tree_map

import optim
import plumbing
import train
from checks import plain
from checks.lines import ABSENT, FAULT, FINE, NEVER, NotAsked, is_own, judged

OPTIMIZERS = "adamw adam sgd momentum muon".split()  # of plain.py, whose schedules are:
SCHEDULES = "cosine linear constant step onecycle".split()
MICRO_BATCH = 4  # sequences of a pass, as after running out of memory: the last one has fewer
VAL_ROWS = 13  # to evaluate, in four passes
# Finished steps when these happen. After the signal two more steps are logged, the second of them
# without memory: from there on a pass takes half as many.
MASKED, NOT_FINITE, STOPPED, NO_MEMORY = 1, 2, 10, 11
EVENTS = {
    MASKED + 1: ", where check.py masks a micro-batch",
    NOT_FINITE + 1: ", where check.py makes the gradient NaN",
    STOPPED + 1: ", the first after check.py stopped and resumed the run",
    NO_MEMORY + 1: ", where check.py simulates out of memory",
}
# What the evaluations after 0, 3, ..., 15 steps are made to return. The second is better by less
# than min_delta, the third by more: it is the best. After the fifth the rate falls, and the sixth
# ends the run.
SCORES = 3.0, 2.97, 2.935, 3.2, 3.1, 3.15
BEST, FALLS, LAST = 6, 12, 15
# A decay so large, a clip and an average so small that they show in a few steps, of which the last
# are past the end of the schedule
FLAGS = """--max_steps=20 --warmup_steps=3 --decay_steps=10 --step_size=4 --plateau_factor=0.5
 --plateau_patience=2 --patience=3 --min_delta=0.05 --batch_size=3 --accum_steps=2 --num_workers=0
 --weight_decay=1 --grad_clip=0.1 --ema_decay=0.5 --eval_interval=3 --eval_tokens=0
 --log_interval=0 --save_interval=4 --keep_last=2
 --resume=auto --compile=false --report=false --wandb_log=false""".split()


def twin_checks(job, run):
    """The steps, the evaluations and the end of an eventful run, and its resume."""
    twin = eventful_run(job)
    mark, text = compared(twin.steps, twin.rows, twin.tolerance)
    yield "steps", mark, text + twin.own
    if twin.windows:
        yield "windows", judged(not twin.other_windows), twin.other_windows
    if mark == FAULT and "steps" in job.accepted:
        twin = eventful_run(job, takes_own_step=True)
    elif mark != FINE:
        raise NotAsked("the steps are others, so the rest would be, too")
    yield "evaluations", *compared(twin.evaluations, twin.found, twin.tolerance)
    newest = plumbing.read_checkpoint(plumbing.checkpoints(twin.folder)[0])
    expected = norms({"model": twin.run.model.state_dict(), "ema": twin.run.ema})
    yield "weights", *compared(expected, norms(newest), twin.tolerance)
    best = plumbing.read_checkpoint(twin.folder / "best.pt")["state"]["step"]
    yield "best", judged(best == BEST), best, BEST
    (row,) = [row for row in twin.rows.values() if row.get("event") == "resume_checked"]
    if row["steps"]:  # where two steps take too long, none is
        yield "resume", judged(not row["first_difference"]), row["text"]


def eventful_run(job, takes_own_step=False):
    """The Twin of a run that has been stopped once and resumed."""
    words = [*job.words(dropout=train.dropout or 0.1 * job.is_stock), *FLAGS]
    words += ["--dtype=float32"] * (job.config["dtype"] == "float16")  # plain.py has no scaler
    folder = job.folder / f"twin_{takes_own_step}"
    with train.build([*words, "--grad_checkpoint=false"]) as run:  # nothing is computed twice
        twin = Twin(run, job.is_stock, takes_own_step)
        with (
            patch.multiple(
                train,
                build=twin.prepared_build,
                train_step=twin.eventful_step,
                evaluate=twin.scripted_evaluation,
                on_row=[],
            ),
            patch.multiple(
                plain,
                count_targets=train.targets_in if is_own("count_targets") else plain.count_targets,
            ),
            patch.multiple(optim, emulates_bfloat16=lambda device: True),
            redirect_stdout(io.StringIO()),
        ):
            for _ in ("until the signal", "to the end"):
                job.script.update(deepcopy(job.start))  # as in a new process
                train.main([*words, f"--out_dir={folder}"])
    rows = plumbing.read_rows(folder / "metrics.jsonl")
    twin.folder, twin.rows = folder, {plumbing.key_of(row): row for row in rows}
    return twin


def norms(checkpoint):
    """{(part, last step): {name: norm of a weight, or of its average}}"""
    return {
        (part, LAST): {name: w.double().norm().item() for name, w in checkpoint[part].items()}
        for part in ("model", "ema")
    }


def compared(expected, found, tolerance):
    """(mark, words): whether all numbers of the rows are the expected ones, and the first that is
    not. null is NaN."""
    for key, row in expected.items():
        for name, number in row.items():
            theirs = found.get(key, {}).get(name, "missing")
            value = math.nan if theirs in (None, "missing") else theirs
            few = 5 * tolerance * ("accuracy" in name)  # targets: a last bit may decide them
            if not np.isclose(value, number, tolerance, few, equal_nan=True):
                mark = FAULT if math.isfinite(value) or math.isnan(number) else NEVER
                where = f"step {key[1]}{EVENTS.get(key[1], '')}: {name}"
                return mark, f"{where} is {theirs} in this run, {number} in checks/plain.py"
    return FINE if expected else ABSENT, f"{len(expected)} rows compared"


class Twin:
    """Watches an eventful run, and takes each of its steps by the functions of plain.py.

    run: another one with its knobs, of which the model, the averages and the data are used, and what
    is the fork's own: its optimizer, its schedule, its batch size. Other checks ask for these."""

    tokens = 0
    windows = None  # of a script's own data

    def __init__(self, run, takes_masks, takes_own_step):
        prepare(run)
        self.run = run
        self.takes_masks = takes_masks
        self.takes_own_step = takes_own_step
        self.k = k = SimpleNamespace(**run.config | {"device": run.device.type})
        self.tolerance = 1e-9 if k.device == "cpu" and k.dtype == "float32" else 1e-3
        is_plain = k.optimizer in OPTIMIZERS and not is_own("configure_optimizer")
        self.optimizers = plain.configure_optimizers(k, run.model) if is_plain else [run.optimizer]
        self.own = "" if is_plain else "; its own optimizer is not judged"
        self.lr_at = partial(plain.lr_at, k)
        if is_own("lr_at") or k.schedule not in SCHEDULES:
            self.lr_at = train.lr_at
            self.own += "; its own lr_at() is not judged"
        if type(run.train_data) is train.ShuffledWindows:
            self.windows = plain.training_batches(k, run.train_data.tokens)
        self.other_windows = []  # numbers of steps
        self.rng = plumbing.rng_state(run.device)
        # (kind, step): the row that the run must have logged, or what its evaluation must have found
        self.steps, self.evaluations, self.found = {("end", LAST): {"step": LAST}}, {}, {}
        self.build, self.train_step, self.evaluate = train.build, train.train_step, train.evaluate
        self.judges_evaluation = not is_own("evaluate") and isinstance(run.val_data, First)

    @contextmanager
    def prepared_build(self, *args, **options):
        with self.build(*args, **options) as run:
            prepare(run)
            yield run

    def eventful_step(self, run, inputs, targets, lr):
        step = run.state["step"]
        if step == STOPPED - 1:  # the rate is halved, as by a plateau
            os.kill(os.getpid(), signal.SIGTERM)
            run.state["lr_factor"] /= 2
        if run.state["skips_in_row"] > 5:
            raise plumbing.RunFailed(
                "no gradient is finite after that of step 3, which check.py makes NaN: does a state "
                "of yours keep it?"
            )
        if step == MASKED and self.takes_masks:
            targets = targets.clone()
            targets[: MICRO_BATCH + 1] = -100  # all of the first pass, some of the second
        if step == NO_MEMORY and run.state["micro_batch"] == MICRO_BATCH:
            torch.rand(9)  # as a first pass may have drawn
            raise MemoryError
        numbers = self.train_step(run, inputs, targets, lr)
        if step < STOPPED or not run.signals.stop:  # else this step will be taken again
            theirs = plumbing.rng_state(run.device)
            plumbing.set_rng_state(self.rng, run.device)
            self.take_step(run, step, inputs, targets)
            self.rng = plumbing.rng_state(run.device)
            plumbing.set_rng_state(theirs, run.device)
        return numbers

    def take_step(self, run, step, inputs, targets):
        """The same step, and the row that must be logged of it."""
        own, size = self.run, run.state["micro_batch"]
        for weight, theirs in zip(own.model.parameters(), run.model.parameters(), strict=True):
            weight.requires_grad_(theirs.requires_grad)  # a fork may freeze some
        if self.windows:
            expected = torch.cat([x for x, _ in next(self.windows)])
            self.other_windows += [] if torch.equal(inputs, expected) else [str(step + 1)]
        lr = self.lr_at(step) * 0.5 ** ((step >= STOPPED) + (step >= FALLS))
        own.state.update(step=step, micro_batch=size)
        if self.takes_own_step:
            numbers = self.train_step(own, inputs, targets, lr)
            loss, norm = numbers["loss"], numbers["grad_norm"]
        else:
            passes = plain.split((inputs, targets), size)
            with patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):  # Muon, as in optim.py
                loss, norm = plain.train_step(self.k, own.model, self.optimizers, passes, lr)
            if norm.isfinite():
                plain.average(self.k, step, own.model, own.ema)
        self.tokens += int(plain.count_targets(targets))
        self.steps["train", step + 1] = {
            "lr": lr,
            "tokens": self.tokens,
            "loss": float(loss),
            "grad_norm": float(norm),
            "skipped": int(not math.isfinite(norm)),
        }

    def scripted_evaluation(self, run):
        """What evaluate() finds is compared, and then replaced by a number of SCORES."""
        own, step, name = self.run, run.state["step"], train.best_metric
        found = {key: float(number) for key, number in self.evaluate(run).items()}
        self.found["eval", step] = found
        if self.judges_evaluation:
            theirs = plumbing.rng_state(run.device)
            batches = self.val_batches(own.val_data, run.state["micro_batch"])
            numbers = plain.evaluate(self.k, own.model, own.ema, batches)
            self.evaluations["eval", step] = numbers
            plumbing.set_rng_state(theirs, run.device)
        loss = SCORES[min(step // 3, 5)]
        return found | {name.removeprefix("-"): -loss if name.startswith("-") else loss}

    def val_batches(self, data, size):
        for first in range(0, len(data), size):
            batch = train.batch_at(self.run, first, min(size, len(data) - first), data)
            train.seed_everything(plumbing.seed_of(train.seed, "evaluation", first))
            yield batch


# ---- what happens in both ------------------------------------------------------------------------


def prepare(run):
    """Leave an epoch of little more than two batches of a text, and few rows to evaluate."""
    run.peak = math.nan  # need not be measured
    run.val_data = tree_map(First, run.val_data)
    if isinstance(run.train_data, train.ShuffledWindows):
        count = 2 * train.sequences_at(0) + 1
        run.train_data.tokens = run.train_data.tokens[: count * train.block_size]
    weight = next(weight for weight in run.model.parameters() if weight.requires_grad)
    weight.register_hook(lambda grad: grad * (math.nan if run.state["step"] == NOT_FINITE else 1))
    if not run.path:
        run.state["micro_batch"] = MICRO_BATCH
        noisy(run.model, 0.5)
        for name, average in run.ema.items():
            average.copy_(run.model.get_parameter(name).detach())


def noisy(model, noise=1.0):
    """The model with noise on each weight: one that starts at zero would hide what its layer does."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        width = weight.size(-1) if weight.ndim else 1
        change = torch.randn(weight.shape, generator=generator) * noise / math.sqrt(width)
        weight.data += change.to(weight)
    return model


class First(torch.utils.data.Dataset):
    """The first rows of validation data, which may have many."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return min(VAL_ROWS, len(self.data))

    def __getitem__(self, place):
        return self.data[place]

    def __getattr__(self, name):
        return getattr(self.data, name)

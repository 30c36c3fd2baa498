"""An honest training loop. Learn: docs/lessons.md. Hack: docs/forks.md. In trouble: docs/trouble.md.

    python train.py config/shakespeare.py                     # the same command again resumes it
    python train.py config/shakespeare.py --batch_size=16 --accum_steps=2
    torchrun --standalone --nproc_per_node=4 train.py config/shakespeare.py    # one run on 4 GPUs

Every lower-case global below is a flag. A config file is Python that sets some of them; flags win.
The file reads from top to bottom, the caller above the called: the knobs, a run, the loop, its
batches, the step, evaluation, checkpoints, rows, and the start. What one need not open is in
plumbing.py. New here? Lesson 0 first, then sections 3 to 6; the others are for looking up."""

import plumbing  # first: it sets what torch reads when it is imported

# isort: split
import copy
import math
import os
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from model import InvalidShape, build_model, generate
from optim import configure_optimizer
from plumbing import RunFailed, fail, from_rank0, print0, rank, to_local, total, world_size

# ---- 1. knobs ------------------------------------------------------------------------------------
# Each is a flag. What is out of range is refused before anything is written.

# The run, and the text it learns
out_dir = "out/run"  # run.json, metrics.jsonl, checkpoints; typed flags are added to its name
resume = "auto"  # auto | never | restart (keep what is there as NAME.old_1) | force (go on, though
#  this is another run by its knobs, data or code)
dataset = "shakespeare"  # data/NAME; prepare_data.py makes it where it is missing
data_dir = "data"  # folder of the datasets
init_from = ""  # checkpoint or .safetensors whose weights a new run starts with; "" = random

# The model
block_size = 64  # context, tokens
n_layer = 1
n_head = 4
n_embd = 128  # width, a multiple of 2 * n_head
dropout = 0.0  # share of activations; 0 = off
label_smoothing = 0.0  # in training only; 0 = off
grad_checkpoint = False  # recompute activations in the backward pass: less memory, more time

# The batch: a step sees batch_size * accum_steps sequences, on any number of ranks (processes)
batch_size = 32  # sequences that a forward pass takes at most
accum_steps = 1  # so many of these make the batch of a step
seed = 1337  # of weights, batches and dropout
num_workers = 0  # processes that read batches ahead; 0 = this process reads
prefetch_factor = 2  # batches that each worker keeps ready

# The optimizer
optimizer = "adamw"  # adamw | adam | sgd | momentum | muon
momentum = 0.95  # of momentum and muon
weight_decay = 0.1  # of matrices and embeddings, not of vectors
beta1 = 0.9  # of adamw and adam
beta2 = 0.95  # of adamw and adam
grad_clip = 1.0  # largest norm of the gradient; 0 = off
ema_decay = 0.0  # average the weights and evaluate the average; 0 = off

# The learning rate: warmup, then by schedule
schedule = "cosine"  # cosine | linear | constant | step | onecycle
peak_lr = 1e-3
min_lr = 1e-4  # where cosine, linear and onecycle end, and the floor of step
warmup_steps = 100  # unless typed, at most a tenth of the steps that the schedule spans
max_steps = 2000
decay_steps = 0  # steps that the schedule spans; 0 = max_steps
step_size = 500  # schedule=step: steps between drops
gamma = 0.5  # schedule=step: factor applied at each drop
plateau_factor = 1.0  # multiplies the rate when the validation loss stalls; 1 = off
plateau_patience = 3  # evaluations without improvement before plateau_factor applies

# How it is computed
device = "auto"  # auto, cpu, cuda, cuda:1 or mps
dtype = "auto"  # auto | float32 | bfloat16 | float16; auto = 16 bits if the device computes in them
compile = "auto"  # auto | true | false; auto = where the run is long enough to gain
deterministic = "auto"  # auto | true | false; auto = on, except on mps
shard = False  # with several ranks, each keeps a share of weights, gradients, moments (FSDP2)

# Logging, evaluation, early stopping
log_interval = 10  # steps between lines on the console; 0 = none; metrics.jsonl has every step
eval_interval = 250  # steps; 0 = only before the first and after the last
eval_tokens = 0  # tokens to evaluate, from the start of the split; 0 = all
report = True  # draw report.png and write report.md at the end
best_metric = "val_loss"  # key of evaluate()'s result; -val_accuracy: higher is better
patience = 0  # evaluations without improvement before the run stops; 0 = off
min_delta = 0.0  # by which best_metric must improve to count
wandb_log = False  # copy the rows of metrics.jsonl to Weights & Biases
wandb_project = "honest-loop"
wandb_run_name = ""  # "" = the name of out_dir

# Checkpoints
save_interval = 500  # steps; 0 = off (a run always saves its start, best and end)
keep_last = 2  # checkpoints kept, besides best.pt

# Knobs that may differ at a resume: where and how a run is computed, how often it logs and saves, how
# long it is. Of these only max_steps is in a folder's name. All others are what the run is; of
# batch_size and accum_steps their product.
FREE = set(
    "out_dir resume data_dir num_workers prefetch_factor grad_checkpoint max_steps device compile "
    "deterministic shard log_interval eval_interval report patience min_delta "
    "wandb_log wandb_project wandb_run_name save_interval keep_last".split()
)
CHOICES = {
    "resume": ("auto", "never", "restart", "force"),
    "optimizer": ("adamw", "adam", "sgd", "momentum", "muon"),
    "schedule": ("cosine", "linear", "constant", "step", "onecycle"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", True, False),
    "deterministic": ("auto", True, False),
}
# Every variable of the loop, saved and restored together: a new one belongs here.
FRESH_STATE = {
    "step": 0,  # finished updates, including skipped ones
    "sequences": 0,  # index of the next training sequence
    "tokens": 0,  # sum of count_targets() so far
    "micro_batch": 0,  # most sequences in a pass: batch_size, halved whenever memory runs out
    "evaluated": -1,  # the step whose evaluation was taken last
    "best_score": math.inf,  # of best_metric, its sign turned if higher is better
    "best_val_loss": math.inf,  # validation loss of the best weights
    "best_step": 0,
    "score_to_beat": math.inf,  # score of the last improvement; the next is better by min_delta
    "evals_since_best": 0,  # evaluations without an improvement
    "lr_factor": 1.0,  # product of the plateau_factors so far
    "skips_in_row": 0,  # updates that were skipped, as a gradient was not finite
    "ended": "",  # why a function in on_row has ended the run
    "seconds": {},  # by kind, of all processes of the run, each up to its last save
}
BEST = ("best_score", "best_val_loss", "best_step", "score_to_beat", "evals_since_best")
MAX_SKIPPED = 10  # updates in a row that are not finite, before the run ends
RESOLVED = {}  # what "auto", 0 and a short run make of dtype, compile, warmup_steps, decay_steps
ADDED_KNOBS = {}  # of a script: see knob()
on_row = []  # functions (run, row) that see each train and eval row when it is logged, on rank 0


def knob(name: str, default: str | int | float | bool, comment: str) -> None:
    """Add a flag to those above, at the top of a script that imports train:
    `train.knob("alpha", 0.5, "weight of the teacher")`. Its value is train.alpha, and a model gets it
    as config["alpha"]. It is a part of what the run is, unless `train.FREE.add("alpha")`."""
    plumbing.add_knob(globals(), name, default, comment)


def check_knobs(typed):
    """Raises BadInput for values out of range and for contradictions. typed: names of flags."""
    at_least_1 = "block_size n_layer n_head n_embd batch_size accum_steps prefetch_factor step_size"
    at_least_1 += " plateau_patience keep_last"
    below_1 = "dropout label_smoothing ema_decay momentum beta1 beta2"
    for name, value in plumbing.knobs_in(globals()).items():
        low = int(name in at_least_1.split())
        high = 1 if name in below_1.split() else math.inf
        is_number = type(value) in (int, float) and name not in ADDED_KNOBS
        if is_number and not low <= value < high:
            limit = f", and less than {high}" if high == 1 else ""
            fail(f"--{name}={value}: expected {low} or more{limit}")
    if min_lr > peak_lr:
        fail(f"--min_lr={min_lr}: expected no more than --peak_lr={peak_lr}")
    if "warmup_steps" in typed and warmup_steps > max_steps:
        fail(f"--warmup_steps={warmup_steps}: expected no more than --max_steps={max_steps}")


# ---- 2. a run ------------------------------------------------------------------------------------
# main() begins a run or resumes it, and records how it ended.


class Run(SimpleNamespace):
    """What the next step depends on.

    model: model(inputs, targets) returns, in training and in evaluation, the mean loss over the
        targets that count, or (loss, {name: scalar mean}); model(inputs) the logits, for samples
    wrapped: the model as training calls it, compiled or under DistributedDataParallel
    optimizer, scaler; ema: {name: averaged weight}, empty when off
    extra: a fork's own objects that have a state_dict, by name
    device, dtype: of the products, under autocast
    train_data, val_data: a Dataset each, or {name: Dataset} to validate; batches: of this rank
    state: the variables of the loop; config: every knob as resolved
    facts: what checkpoints and run.json say of the run
    folder, saver, table, clock, signals, wandb: where rows, files and times go, and what stops it"""

    check = peak = wandb = None
    has_warned = False  # that no target of a step counts
    changed, another, step_ms = {}, {}, math.inf
    positions = 0  # since the last row was logged

    def stop(self, why):
        """For a function in on_row, at the row of an evaluation: the run ends, and is finished."""
        self.state["ended"] = why


def main(argv: list[str] | None = None) -> int:
    """Run the flags in `argv` (None: those of the command line). Returns the exit code. Raises
    BadInput before anything is written, RunFailed, or whatever else ended the run."""
    if plumbing.is_importing_worker():  # of a script without `if __name__ == "__main__"`
        return 0
    with build(argv, to_train=True) as run:
        if is_finished(run):
            return 0
        if argv is None:
            plumbing.require_unedited(run.files)
        try:
            open_folder(run)
            with run.signals:
                ended, code = train(run)
        except BaseException as error:
            ended = f"failed: {type(error).__name__}: {error}"[:300]
            raise
        finally:
            close_folder(run, ended)
    if code and argv is None and plumbing.script_path():  # a script that calls main() alone
        raise SystemExit(code)
    return code


# ---- 3. the loop ---------------------------------------------------------------------------------
# All ranks take the same decisions, and a stop or a kill anywhere is resumed bit for bit.


def train(run):
    """Take steps until the run ends. Returns (how it ended, exit code)."""
    state, saver = run.state, run.saver
    run.batches = load_batches(run)
    while True:
        # ---- what is due? every rank gets the same answer
        step = state["step"]
        stop, save_now = plumbing.max_over_ranks(run.signals.stop, run.signals.save)
        ending = f"stopped by {signal.Signals(stop).name}" if stop else how_it_is_over(state)
        is_evaluation = evaluation_is_due(state) and not stop
        is_save = step == 0 or save_now or every(save_interval, step)
        is_save = is_save and saver.saved[0] != step
        is_row = every(log_interval or 100, step)  # so that few rows wait in memory
        if is_evaluation or is_save or ending or is_row:
            log_steps(run)  # here the host waits for the device

        # ---- save, evaluate
        if is_save:
            run.signals.save = False
            saver.save(run)
        if is_evaluation:
            with suppress(Stopped):  # the process that resumes begins with the evaluation
                if record_evaluation(run):
                    saver.save(run, "best.pt")
            continue

        # ---- end
        if ending:
            is_saved = saver.saved == (step, state["evaluated"])
            if not is_saved or from_rank0(saver.join):  # or it failed
                saver.save(run, is_required=True)
            if stop:
                log_two_more_steps(run)
                return ending, 128 + stop
            print_sample(run)
            return ending, 0

        # ---- train: only this line changes the weights that are saved
        take_step(run)
        run.table.print_live(state)


def every(interval, step):
    return interval > 0 and step % interval == 0


def evaluation_is_due(state):
    step = state["step"]
    is_due = step == 0 or step >= max_steps or every(eval_interval, step)
    return is_due and state["evaluated"] != step


def how_it_is_over(state):
    """Why a run has no step left to take, or ""."""
    if state["ended"]:
        return f"stopped: {state['ended']}"
    if 0 < patience <= state["evals_since_best"]:
        return f"stopped early: {patience} evaluations without improvement"
    return "finished" if state["step"] >= max_steps else ""


def take_step(run):
    """Take the next step; its numbers stay on the device until log_steps()."""
    state, began = run.state, time.perf_counter()
    try:
        inputs, targets = plumbing.to_device(next(run.batches), run.device)
    except Exception:  # a row that cannot be read: the steps so far are saved
        if world_size() == 1:
            log_steps(run)
            run.saver.save(run, is_required=True)
        raise
    data_ms = 1000 * (time.perf_counter() - began)
    lr = float(lr_at(state["step"]) * state["lr_factor"])
    numbers = halving_on_oom(run, train_step, inputs, targets, lr)
    plumbing.scalars(numbers, "train_step()", "loss", "grad_norm", "skipped", "targets")
    count = sequences_at(state["step"])
    run.positions += count * targets[0].numel()
    state["step"] += 1
    state["sequences"] += count
    row = {"kind": "train", "step": state["step"], "sequences": state["sequences"]}
    row |= {"epoch": state["sequences"] / len(run.train_data), "lr": lr, "data_ms": data_ms}
    run.steps.append((row, numbers))


def log_two_more_steps(run):
    """After a signal and its save, take the next two steps for their rows alone, and drop the weights:
    the process that resumes computes them again, and so measures whether it is exact. Two, because
    lost moments show only in the second."""
    before = dict(run.state)
    for _ in range(2):
        is_slow = run.step_ms > 1500
        # an evaluation may change the rate of the step that follows
        is_due = run.state["step"] >= max_steps or evaluation_is_due(run.state)
        if plumbing.max_over_ranks(is_slow or is_due)[0]:
            break
        take_step(run)
        log_steps(run, is_kept=False)
    run.state.update(before)


# ---- 4. the rate and the batch -------------------------------------------------------------------
# Pure functions of seed and step: neither the schedule nor the data has a state.


def lr_at(step: int) -> float:
    """Learning rate of update `step` (the first is 0): a pure function of the step. Linear warmup,
    then `schedule` down to min_lr at decay_steps: cosine (Loshchilov & Hutter 2017), linear,
    constant, step, onecycle (Smith & Topin 2018; cosine both ways)."""
    warmup = RESOLVED.get("warmup_steps", warmup_steps)
    end = decay_steps or max_steps
    # 1) up to the peak; onecycle starts at a 25th of it and rises along a cosine
    if step < warmup:
        if schedule == "onecycle":
            return peak_lr + (peak_lr / 25 - peak_lr) * half_cosine(step / warmup)
        return peak_lr * (step + 1) / warmup
    # 2) schedules without an end
    if schedule == "constant":
        return peak_lr
    if schedule == "step":
        return max(min_lr, peak_lr * gamma ** ((step - warmup) // step_size))
    # 3) down to the minimum, where it stays
    if step >= end:
        return min_lr
    done = (step - warmup) / (end - warmup)
    fall = 1 - done if schedule == "linear" else half_cosine(done)
    return min_lr + (peak_lr - min_lr) * fall


def half_cosine(done):
    """From 1 at done = 0 to 0 at done = 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def sequences_at(step: int) -> int:
    """Sequences that update `step` sees on all ranks together, a pure function: to let a batch
    grow, return more at later steps."""
    return batch_size * accum_steps


def load_batches(run):
    """The batches to come, read ahead by num_workers processes."""
    knobs = {__name__: plumbing.knobs_in(globals())}
    reader = plumbing.Reader(run.train_data, seed)
    places = places_to_come(run.state["step"], run.state["sequences"])
    return plumbing.load_batches(reader, places, num_workers, prefetch_factor, knobs)


def places_to_come(step, first):
    """(first sequence, count) of this rank's part of each batch from here on."""
    while True:
        count, ranks = sequences_at(step), world_size()
        if count < ranks or (shard and count % ranks):
            expected = "one or more for each, with --shard=true as many for each"
            fail(f"a batch of {count} sequences for {ranks} ranks: expected {expected}")
        yield plumbing.my_share(first, count)
        step += 1
        first += count


def batch_at(run, first, count, data=None):
    """(inputs, targets) on the device: the `count` sequences from `first` on, of the training data
    or of `data`. A pure function of seed and place."""
    reader = plumbing.Reader(run.train_data if data is None else data, seed)
    return plumbing.to_device(reader[first, count], run.device)


class ShuffledWindows(torch.utils.data.Dataset):
    """`tokens`, a split in an np.memmap, as an endless sequence of windows.

    An epoch cuts the tokens into windows of block_size and has each window once. Where it cuts, and
    the order of the windows, are drawn from (seed, epoch). `dataset[first, count]` is a batch, a
    pure function, so there is no loader state to save: inputs and targets, int64 (count,
    block_size)."""

    draws_nothing = True  # so the random state need not be put back after a batch
    epoch, starts = None, ()  # an epoch, and the first token of each of its windows

    def __init__(self, tokens, block_size, seed):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed

    def __len__(self):
        """Windows in an epoch: as many as fit whatever the shift of the boundaries."""
        return (len(self.tokens) - self.block_size) // self.block_size

    def __getitem__(self, place):
        starts = [self.start_of(number) for number in range(place[0], sum(place))]
        return windows_at(self.tokens, np.array(starts), self.block_size)

    def start_of(self, number):
        epoch, window = divmod(number, len(self))
        if epoch != self.epoch:
            # RandomState, not Generator: NumPy promises that its stream never changes
            random_state = np.random.RandomState([self.seed, epoch])
            shift = random_state.randint(self.block_size)
            self.starts = shift + random_state.permutation(len(self)) * self.block_size
            self.epoch = epoch
        return self.starts[window]


class OrderedWindows(torch.utils.data.Dataset):
    """The first `n_targets` targets of `tokens` (0 = all), rounded up to whole windows, for
    validation. If the last window overlaps the one before, its repeated targets are -100, which do
    not count."""

    draws_nothing = True

    def __init__(self, tokens, block_size, n_targets=0):
        self.tokens = tokens
        self.block_size = block_size
        self.n_targets = min(n_targets or math.inf, len(tokens) - 1)

    def __len__(self):
        return math.ceil(self.n_targets / self.block_size)

    def __getitem__(self, place):
        size = self.block_size
        begins = size * np.arange(place[0], sum(place))
        starts = np.minimum(begins, len(self.tokens) - 1 - size)
        inputs, targets = windows_at(self.tokens, starts, size)
        overlap = (begins - starts)[:, None]
        targets[np.arange(size) < overlap] = -100
        return inputs, targets


def windows_at(tokens, starts, length):
    """Inputs, the `length` tokens from each of `starts` on, and as targets those that follow them,
    each int64 (len(starts), length)."""
    rows = np.asarray(tokens)[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return rows[:, :-1].copy(), rows[:, 1:].copy()


# ---- 5. the step ---------------------------------------------------------------------------------
# Loss and gradient are those of the whole batch, however it is split. NaN and inf move nothing, except
# on mps.


def train_step(run: Run, inputs, targets: Tensor, lr: float) -> dict:
    """One update, in seven operations. inputs, targets: this rank's sequences, on the device.

    Returns scalars of the global batch, which stay on the device: the host waits for none. A key
    added here becomes a field of every row of metrics.jsonl, a column and a curve."""
    optimizer, scaler, ranks = run.optimizer, run.scaler, world_size()
    sums = Counter()  # of the shares, by name
    optimizer.zero_grad(set_to_none=True)  # 1: zero the gradients
    for group in optimizer.param_groups:  # 2: set the learning rate, in proportion to the group's
        group["lr"] = lr * (group["initial_lr"] / peak_lr)
    n_targets = total(targets_in(targets))
    for x, y in micro_batches(run, inputs, targets):
        means, n = forward(run, run.wrapped, x, y)  # 3: forward
        parts = n_targets / (n * ranks)  # so many of these are the batch; DDP averages over ranks
        means = {name: mean / parts for name, mean in means.items()}  # 4: a share of the mean
        scaler.scale(means["loss"]).backward()  # 5: backward
        sums.update({name: mean.detach() for name, mean in means.items()})
    has_gradient = any(w.grad is not None for g in optimizer.param_groups for w in g["params"])
    if has_gradient:
        scaler.unscale_(optimizer)  # 6: unscale, then clip
    weights = run.model.parameters()
    grad_norm = plumbing.full_tensor(nn.utils.clip_grad_norm_(weights, grad_clip or math.inf))
    is_float16 = run.dtype == torch.float16
    scale = {"loss_scale": scaler.scale(torch.ones_like(grad_norm))} if is_float16 else {}
    if has_gradient:
        scaler.step(optimizer)  # 7: update, unless a gradient is not finite
        scaler.update(None if is_float16 else 1.0)
    skipped = ~grad_norm.isfinite()
    average_weights(run, skipped)
    numbers = {name: total(part) / ranks for name, part in sums.items()} | scale
    return numbers | {"grad_norm": grad_norm, "skipped": skipped, "targets": n_targets}


def micro_batches(run, inputs, targets):
    """(inputs, targets) of at most state["micro_batch"] sequences. Gradients are summed over the
    ranks in the last one alone."""
    size = run.state["micro_batch"]
    for first in range(0, len(targets), size):
        part = slice(first, first + size)
        run.wrapped.require_backward_grad_sync = first + size >= len(targets)  # as DDP.no_sync()
        yield tree_map(itemgetter(part), (inputs, targets))


def forward(run, model, x, y):
    """({"loss": mean over the targets that count, and the other scalars that the model returned},
    how many count), by one forward pass under autocast."""
    n = targets_in(y)
    y = torch.where(n > 0, y, y.new_zeros(()))  # without targets any finite loss will do
    with autocast(run):
        result = model(x, y)
    is_pair = isinstance(result, tuple) and isinstance(result[-1], dict)
    loss, others = result if is_pair else (result, {})
    return plumbing.scalars({"loss": loss, **others}, "model(inputs, targets)", "loss"), n


def autocast(run):
    return torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32)


def count_targets(targets: Tensor) -> Tensor | float:
    """How many targets count: all but -100 (class labels) or NaN (numbers). It is the denominator
    of the model's mean loss: replace it for a loss with another one, such as class weights."""
    is_float = targets.is_floating_point()
    return (~targets.isnan() if is_float else targets.long() != -100).sum()


def targets_in(targets):
    return torch.as_tensor(count_targets(targets), device=targets.device)


@torch.no_grad()
def average_weights(run, skipped):
    """Move the averages to the new weights (Polyak & Juditsky 1992); at first by larger steps, or
    they would keep the start for long."""
    updates = run.state["step"]
    decay = min(ema_decay, (1 + updates) / (10 + updates))
    for name, average in run.ema.items():
        weight = run.model.get_parameter(name)
        to_local(average).lerp_(to_local(weight), (1 - decay) * (1 - skipped.float()))


def halving_on_oom(run, function, *arguments):
    """function(run, *arguments), a step or an evaluation; if memory runs out, again with a micro-batch
    of half the size and the same random state. Raises RunFailed if that cannot help."""
    before, size = plumbing.rng_state(run.device), run.state["micro_batch"]
    try:
        return function(run, *arguments)
    except (RuntimeError, MemoryError) as error:
        if not plumbing.is_out_of_memory(error):
            raise
        if world_size() > 1 or size == 1:  # other ranks wait in the middle of the step
            flags = f"--batch_size={max(1, size // 2)} --accum_steps={2 * accum_steps}"
            raise RunFailed(f"out of memory; try {flags}, or --grad_checkpoint=true") from error
    run.optimizer.zero_grad(set_to_none=True)
    plumbing.set_rng_state(before, run.device)
    run.state["micro_batch"] = size // 2
    words = f"out of memory: from here on {size // 2} sequences in a micro-batch"
    log_event(run, "out_of_memory", words, micro_batch=size // 2)
    return halving_on_oom(run, function, *arguments)


# ---- 6. evaluation -------------------------------------------------------------------------------
# Each target of the split counts once, and training goes on as if nobody had looked.


class Stopped(BaseException):
    """A signal came in an evaluation. No Exception, which a fork may catch."""


def record_evaluation(run):
    """Evaluate and log the result. Returns whether it is the best so far."""
    state, meta = run.state, run.facts["data"]["meta"]
    name, sign = best_metric.removeprefix("-"), -1 if best_metric.startswith("-") else 1
    size = state["micro_batch"]
    plumbing.sync_buffers(run.model)
    numbers = plumbing.scalars(halving_on_oom(run, evaluate), "evaluate()", "val_loss", name)
    state["micro_batch"] = size  # training may have room for more
    numbers = plumbing.from_all_ranks({key: float(n) for key, n in numbers.items()})[0]
    state["evaluated"] = state["step"]
    is_best = count_evaluation(state, numbers, name, sign)
    row = {"kind": "eval", "step": state["step"], **numbers}
    row["best_val_loss"] = state["best_val_loss"]
    if name != "val_loss":
        row[f"best_{name}"] = sign * state["best_score"]
    counted = row.pop("val_tokens", 0)
    if "val_bytes" in meta and counted == meta["val_tokens"] - 1:  # the whole text, none masked
        row["val_bpb"] = row["val_loss"] / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    elif eval_tokens:
        row["val_tokens"] = int(counted)
    log_row(run, row)
    state["ended"] = plumbing.from_all_ranks(state["ended"])[0]  # rank 0 has called on_row
    run.table.print_evaluation(row, is_best)
    run.clock.lap("evaluate")
    return is_best


@torch.no_grad()
def evaluate(run: Run) -> dict:
    """{"val_loss": mean over the targets that count, "val_NAME": that of each other number that the
    model returns, "val_tokens": how many targets}; of several validation sets each name with that of
    the set, and the means over the sets. best_metric names the number that decides.

    In eval mode, with the averaged weights if ema_decay is on; never compiled, so that the result
    does not depend on --compile."""
    sets = run.val_data if isinstance(run.val_data, dict) else [None]
    numbers, sums_of_sets = {}, Counter()
    with evaluating(run):
        for name in sets:
            sums = Counter()
            for x, y in val_batches(run, name):
                means, n = forward(run, run.model, x, y)
                sums["tokens"] += plumbing.float64(n)
                for key, mean in means.items():
                    sums[key] += plumbing.float64(mean) * plumbing.float64(n)
            count = total(sums.pop("tokens"))
            means = {f"val_{key}": total(part) / count for key, part in sums.items()}
            means["val_tokens"] = count
            sums_of_sets.update(means)
            if name is not None:
                numbers |= {f"{key}_{name}": mean for key, mean in means.items()}
    return numbers | {key: part / len(sets) for key, part in sums_of_sets.items()}


@contextmanager
def evaluating(run: Run):
    """A context for an evaluation: eval mode, averaged weights if there are any. At its end weights,
    buffers, the mode of each module and the random state are as before."""
    modes = {module: module.training for module in run.model.modules()}
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    before = plumbing.rng_state(run.device)
    swap_weights(run)
    run.model.eval()
    try:
        yield
    finally:
        swap_weights(run)
        for module, training in modes.items():
            module.training = training
        for name, buffer in buffers.items():
            run.model.get_buffer(name).copy_(buffer)
        plumbing.set_rng_state(before, run.device)


@torch.no_grad()
def swap_weights(run):
    for name, average in run.ema.items():
        weight = to_local(run.model.get_parameter(name))
        own = weight.clone()
        weight.copy_(to_local(average))
        to_local(average).copy_(own)


def val_batches(run: Run, name: str | None = None):
    """Yields (inputs, targets): this rank's share of the validation data, or of the set `name`; as
    many passes on each rank. What a model draws follows from the seed and the batch. Raises Stopped
    after a batch if a signal has come, on any rank."""
    data, ranks = run.val_data if name is None else run.val_data[name], world_size()
    size = ranks * min(run.state["micro_batch"], math.ceil(sequences_at(0) / ranks))
    # fewer than `ranks` rows at the end join the pass before, so that each rank has some
    edges = [*range(0, max(1, len(data) - ranks + 1), size), len(data)]
    for first, end in pairwise(edges):
        place = plumbing.my_share(first, end - first)
        batch = batch_at(run, *place, data)
        seed_everything(plumbing.seed_of(seed, "evaluation", place[0]))
        yield batch
        if plumbing.max_over_ranks(run.signals.stop)[0]:
            raise Stopped


def count_evaluation(state, numbers, name, sign):
    """Count for the best, early stopping and plateau_factor. sign: -1 if more is better. Returns
    whether it is the best so far. An evaluation at the end alone, which eval_interval does not ask
    for, counts for the best only: a run extended later must take the same course as one that was
    that long from the start."""
    score = sign * numbers[name]
    if not math.isfinite(score):
        print0(f"{name} is {numbers[name]}: not counted for the best or for patience")
        return False
    is_best = score < state["best_score"]
    if is_best:
        state.update(best_score=score, best_val_loss=numbers["val_loss"], best_step=state["step"])
    counts = state["step"] == 0 or every(eval_interval, state["step"])
    if counts and score < state["score_to_beat"] - min_delta:
        state.update(score_to_beat=score, evals_since_best=0)
    elif counts:
        state["evals_since_best"] += 1
        if state["evals_since_best"] % plateau_patience == 0:
            state["lr_factor"] *= plateau_factor
    return is_best


def print_sample(run):
    """Print and log 200 tokens, if the data is text. An error is printed: it must not end a run."""
    meta = run.facts["data"]["meta"]
    if "tokenizer" not in meta:
        return
    try:
        from prepare_data import start_and_end, tokenizer_of

        prompt = torch.full((1, 1), start_and_end(meta)[0], device=run.device)
        with evaluating(run), autocast(run):
            seed_everything(1337)
            ids = [*generate(run.model, prompt, 200, block_size, meta["vocab_size"], 0.8)]
        sample = tokenizer_of(meta).decode(torch.cat(ids, dim=1)[0].tolist())
        log_event(run, "sample", f"\n{sample.strip()}\n")
    except Exception as error:
        print0(f"no sample ({error})")
    run.clock.lap("sample")


# ---- 7. checkpoints ------------------------------------------------------------------------------
# All that the next step depends on, in files that are whole or not there.


def checkpoint_of(run):
    """All that the next step depends on, and what the run is; on the host. A collective call."""
    plumbing.sync_buffers(run.model)
    weights = run.model.named_parameters()
    parts = {
        "format": plumbing.FORMAT,
        "model": run.model.state_dict(),
        "frozen": [name for name, weight in weights if not weight.requires_grad],
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "ema": run.ema,
        "extra": run.extra.state_dict(),
        "state": run.state,
        "rng": plumbing.from_all_ranks(plumbing.rng_state(run.device)),
        **run.facts,
    }
    return tree_map(on_host, parts)


def on_host(leaf):
    """A copy that the next step does not change."""
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    tensor = plumbing.full_tensor(leaf.detach())
    return tensor.to("cpu", copy=True) if rank() == 0 else None


def load(run: Run, path) -> dict:
    """Put the checkpoint at `path` into the run. Returns what it holds."""
    saved = plumbing.read_checkpoint(path)
    restore(run, saved)
    return saved


@torch.no_grad()
def restore(run, saved):
    """Put back all that a checkpoint holds: weights, buffers, moments, scaler, averages, random and
    loop state. The groups of the optimizer stay as this process has built them."""
    load_weights(run.model, saved["model"])
    for name, weight in run.model.named_parameters():
        weight.requires_grad_(name not in saved["frozen"])
    plumbing.restore_optimizer(run.optimizer, saved["optimizer"]["state"])
    for name, average in run.ema.items():
        average.copy_(plumbing.shard_like(average, saved["ema"].get(name, saved["model"][name])))
    run.saver.saved = saved["state"]["step"], saved["state"]["evaluated"]
    run.extra.saved = saved["extra"]
    if saved["config"]["dtype"] == run.config["dtype"]:
        run.scaler.load_state_dict(saved["scaler"])
    run.state.update(saved["state"])
    if saved["config"]["batch_size"] != batch_size:
        run.state["micro_batch"] = batch_size
    if len(saved["rng"]) == world_size():
        plumbing.set_rng_state(saved["rng"][rank()], run.device)
    else:
        seed_everything(plumbing.seed_of(seed, rank(), run.state["step"]))


def load_weights(model, weights):
    own = model.state_dict()
    model.load_state_dict({n: plumbing.shard_like(own.get(n), w) for n, w in weights.items()})


class Saver:
    """Writes checkpoints in a thread, from a copy in memory: the loop waits for the copy and for the
    save before. An error is logged, and training goes on."""

    thread = error = lost_best = None  # lost_best: the checkpoint of a best.pt that is not written
    saved = -1, -1  # (step, evaluated) of the newest save that was begun

    def save(self, run, *others, is_required=False):
        """Write the same file under the names of `others`, and last as ckpt_STEP.pt: if a kill comes in
        between, the resume saves both again. is_required: try for a minute, then raise RunFailed."""
        self.join()
        give_up = time.monotonic() + 60 * is_required
        is_required = is_required or self.saved[0] < 0  # the first shows what cannot be saved
        step = run.state["step"]
        self.saved = step, run.state["evaluated"]
        how = run, checkpoint_of(run), [*others, f"ckpt_{step:08}.pt"], give_up
        if rank() == 0:
            self.thread = threading.Thread(target=self.write, args=how)
            self.thread.start()
        error = from_rank0(self.join) if is_required else None
        if error:
            newest = [*plumbing.checkpoints(run.folder.path), "none"][0]
            failure = RunFailed(f"{error}; the newest checkpoint: {newest}")
            failure.exit_code = 128 + run.signals.stop if run.signals.stop else 1
            raise failure
        run.clock.lap("save")

    def join(self):
        """Wait for the newest save. Returns its error in words, or None."""
        if self.thread:
            self.thread.join()
        return self.error

    def write(self, run, parts, names, give_up):
        """In the thread: rows first, then the files, each in one rename; then prune."""
        folder, step = run.folder.path, parts["state"]["step"]
        try:
            run.folder.sync()
            if self.lost_best:
                plumbing.write_copies(folder, self.lost_best, ["best.pt"])
            self.lost_best = None
            plumbing.write_copies(folder, parts, names)
            if step == 0:  # before training, so that an object that torch refuses costs nothing
                plumbing.read_checkpoint(folder / names[-1])
            digest = plumbing.digest_of_state(parts)
            log_event(run, "saved", "", step=step, files=names, sha256=digest)
            for path in plumbing.checkpoints(folder)[keep_last:]:
                path.unlink()
            self.error = None
        except Exception as error:
            self.error = str(error)
            self.lost_best = parts if "best.pt" in names else self.lost_best
            log_event(run, "save_failed", f"{names[-1]} is not saved: {error}", step=step)
        if self.error and time.monotonic() < give_up:
            time.sleep(5)
            self.write(run, parts, names, give_up)


# ---- 8. rows -------------------------------------------------------------------------------------
# metrics.jsonl has each step, evaluation and event once, with all bits of its numbers.


def log_steps(run, is_kept=True):
    """Log the rows of the steps since the last call: all since the last lap of the clock, so times
    exclude evaluation and saving. The host waits for the device here."""
    steps, run.steps = run.steps, []
    if not steps:
        return
    fetched = []
    for _, numbers in steps:
        scalars = [plumbing.float64(number).reshape(()) for number in numbers.values()]
        fetched.append(torch.stack(scalars).tolist())
    seconds = run.clock.lap("train")
    run.step_ms, speed, run.positions = 1000 * seconds / len(steps), run.positions / seconds, 0
    common = {
        "step_ms": run.step_ms,
        "tokens_per_sec": speed,
        "mfu": mfu_at(run, speed),
        "mem_gb": plumbing.memory_gb(run.device),
        "gpu_util": plumbing.gpu_util(run.device),
    }
    for (row, numbers), values in zip(steps, fetched, strict=True):
        row |= common
        if row.keys() & numbers:
            raise RunFailed(f"train_step() returned a name that a row already has: {[*numbers]}")
        row |= zip(numbers, values, strict=True)
        n_targets = row.pop("targets")
        run.state["tokens"] += int(n_targets)
        row |= {"tokens": run.state["tokens"], "skipped": int(row["skipped"])}
        log_row(run, row, is_kept)
        if is_kept:
            watch_skips(run, row, n_targets)
    if log_interval and is_kept and (row["step"] >= max_steps or every(log_interval, row["step"])):
        run.table.print_row(row)


def mfu_at(run, speed):
    """Model FLOPs utilization at `speed` tokens a second: the share of the peak of all devices, or
    None if that is unknown."""
    if run.peak is None:
        run.peak, source = plumbing.peak_flops(run.device, run.facts["run"]["device"], run.dtype)
        print0(f"peak     {source}")
        run.clock.lap("start")
    mfu = flops_per_token(run.model) * speed / (run.peak * world_size())
    return mfu if mfu <= 1 else None  # above 1 the machine was busy when the peak was measured


def flops_per_token(model):
    """FLOPs to train on one token, or NaN if the model does not tell them."""
    return float(getattr(model, "flops_per_token", lambda: math.nan)())


def watch_skips(run, row, n_targets):
    """Log a step that was skipped. Raises RunFailed after MAX_SKIPPED in a row."""
    state, step, loss, norm = run.state, row["step"], row["loss"], row["grad_norm"]
    if not row["skipped"]:
        state["skips_in_row"] = 0
    elif n_targets:
        # float16: the gradient overflowed, and the scaler answers with a lower scale, down to 1
        is_overflow = math.isfinite(loss) and row.get("loss_scale", 0) > 1
        state["skips_in_row"] += not is_overflow
        words = f"skipped: loss {loss:.4g}, grad_norm {norm:.4g}"
        log_event(run, "skipped", words, step=step, loss=loss, grad_norm=norm)
    elif not run.has_warned:
        run.has_warned = True
        log_event(run, "no_targets", f"no target of step {step} counts; are all masked (-100)?")
    if state["skips_in_row"] >= MAX_SKIPPED:
        look = plumbing.to_paste("replay.py", run.folder.path, f"--step={step}")
        found = f"the gradient was not finite in {MAX_SKIPPED} steps in a row, up to step {step}"
        raise RunFailed(f"{found}; what happened: {look}; try a lower --peak_lr")


def log_row(run, row, is_kept=True):
    """Write a row to metrics.jsonl, compare it with that of a killed process, show it."""
    run.folder.write_row(row)
    if run.check and run.check.see(row):
        close_check(run)
    if run.wandb and is_kept:
        run.wandb.log({f"{row['kind']}/{key}": row[key] for key in row} | {"step": row["step"]})
    if on_row and is_kept and rank() == 0:
        before = plumbing.rng_state(run.device)
        for function in on_row:
            function(run, row)
        plumbing.set_rng_state(before, run.device)  # log_interval must not move the run
    if run.state["ended"] and row["kind"] == "train":  # which other ranks do not see
        raise RunFailed("run.stop(): expected at the row of an evaluation, not of a step")


def log_event(run, event, text, **fields):
    """Log an event, of the present step unless `fields` has another, and print its text."""
    row = {"kind": "event", "step": run.state["step"], "event": event, **fields, "text": text}
    if text:
        print0(text if "\n" in text else f"{row['step']:>6} {text}")
    run.folder.write_row(row)


# ---- 9. the start --------------------------------------------------------------------------------
# build() checks everything and writes nothing.


@contextmanager
def build(argv: list[str] | None = None, to_train: bool = False):
    """A context with a Run that is ready to step: data, model, optimizer, and the newest checkpoint
    of its folder, if there is one. Inside it the knobs hold. It writes nothing; `to_train` locks a
    folder that exists, and refuses to go on with what is another run."""
    with ExitStack() as stack:
        config = stack.enter_context(plumbing.configured(globals(), argv=argv))
        check_knobs(config.typed)
        run = Run(config=config, state=copy.deepcopy(FRESH_STATE), steps=[], saver=Saver())
        started = plumbing.STARTED if argv is None else time.perf_counter()
        run.clock = plumbing.Clock(run.state, started)
        run.table = plumbing.Table(max_steps)
        run.signals = plumbing.Signals()
        run.extra = plumbing.Extra()
        run.device = plumbing.choose_device(device, deterministic)
        stack.enter_context(plumbing.joined(run.device))
        saved, data = open_data(run, stack, to_train)
        resolved = resolve(run, saved)
        stack.enter_context(plumbing.setting(globals(), {"RESOLVED": resolved}))
        run.config.update(resolved)
        build_parts(run, data["meta"]["vocab_size"])
        identify(run, data)
        if saved:
            compare(run, saved, to_train)
            restore(run, saved)
            # without a best.pt that these scores belong to, the best begins anew
            if run.another or not from_rank0((run.folder.path / "best.pt").exists):
                run.state |= {name: FRESH_STATE[name] for name in BEST}
            if resume == "force":
                run.state["ended"] = ""
        elif init_from:
            begin_from(run)
        saved = None  # its memory
        yield run


def open_data(run, stack, to_train):
    """Name the folder of the run, lock it if it exists, and open the data. Returns (what the newest
    whole checkpoint holds or None, facts of the data)."""
    name = plumbing.folder_name(run.config, FREE, plumbing.script_path())
    run.folder = stack.enter_context(closing(plumbing.Folder(name)))
    run.path = from_rank0(newest_checkpoint, run.folder, to_train)
    saved = run.path and plumbing.read_checkpoint(run.path)
    try:
        run.train_data, run.val_data, data = open_dataset(saved)
    except plumbing.Offline as error:  # on CPython's manual, in a folder that says so
        from prepare_data import instead_of

        globals()["dataset"] = run.config["dataset"] = instead_of(dataset, error)
        run.config.typed.add("dataset")
        return open_data(run, stack, to_train)
    if not {"name", "fingerprint", "meta"} <= {*(data or ())}:
        fail(f"open_dataset(): found the facts {data}; expected name, fingerprint, meta")
    if not hasattr(run.train_data, "__len__"):
        fail(f"open_dataset(): {type(run.train_data).__name__} has no length. {plumbing.DATASET}")
    return saved, data


def newest_checkpoint(folder, to_train):
    """The path of the newest whole checkpoint, or None. Damaged ones are named, and renamed."""
    if to_train and folder.path.exists():
        folder.lock()
    if resume == "restart":
        return None
    if resume == "never" and (folder.path / "run.json").exists():
        fail(f"--resume=never, and {folder.path} holds a run; write --out_dir={folder.fresh()}")
    for path in plumbing.checkpoints(folder.path):
        try:
            plumbing.verify(path)
            return path
        except plumbing.Damaged as error:
            print0(f"{error}: an older checkpoint is tried")
            if to_train:
                os.replace(path, f"{path}.damaged")
        except OSError as error:
            fail(f"{path} cannot be read ({error.strerror}); it may be whole, and stays as it is")
    if any(path.suffix != ".tmp" for path in folder.path.glob("*.pt*")):
        fail(f"{folder.path} has no whole ckpt_STEP.pt; --resume=restart starts anew")
    return None


def open_dataset(saved: dict | None) -> tuple:
    """(training data, validation data or {name: validation data}, facts). facts, which a checkpoint
    keeps: `name`, `fingerprint`, `meta` with the vocab_size, and as `files` the paths of other
    files that a fork reads. saved: the checkpoint to resume from, or None."""
    from prepare_data import prepare

    folder, meta = from_rank0(prepare, dataset, data_dir)
    room = min(meta["train_tokens"] // 2, meta["val_tokens"] - 1)
    if block_size > room:
        fail(f"--block_size={block_size}: expected up to {room:,}, as {folder} is that short")
    tokens = np.memmap(f"{folder}/train.bin", meta["dtype"], "r")
    val_tokens = np.memmap(f"{folder}/val.bin", meta["dtype"], "r")
    content = {key: value for key, value in meta.items() if key not in ("source", "start_id")}
    facts = {"name": dataset, "fingerprint": plumbing.hash_of(content), "meta": meta}
    train_data = ShuffledWindows(tokens, block_size, seed)
    return train_data, OrderedWindows(val_tokens, block_size, eval_tokens), facts


def resolve(run, saved):
    """What "auto", 0 and a short run make of dtype, decay_steps and warmup_steps."""
    length = 0 if schedule in ("constant", "step") else decay_steps or max_steps
    warmup = warmup_steps
    if length and "warmup_steps" not in run.config.typed:
        warmup = min(warmup, length // 10)
    name, why = plumbing.choose_dtype(dtype, run.device, saved and saved["config"]["dtype"])
    run.dtype, run.why = getattr(torch, name), {"dtype": why}
    return {"dtype": name, "decay_steps": length, "warmup_steps": warmup}


def build_parts(run, vocab_size):
    """The model, the optimizer, and how training calls them."""
    seed_everything(seed)
    try:
        model = build_model(run.config, vocab_size)
    except InvalidShape as error:
        fail(error)
    if shard and world_size() == 1:
        fail("--shard=true: expected several ranks; start torchrun --nproc_per_node=2 train.py")
    place = next(places_to_come(0, 0))  # raises BadInput if the ranks cannot share a batch
    run.model = plumbing.sharded(model, run.device) if shard else model.to(run.device)
    run.optimizer = configure_optimizer(run.model, run.config, run.device.type)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    scale = 65536.0 if run.dtype == torch.float16 else 1.0
    is_on = run.device.type != "mps"  # it skips NaN in every dtype, but mps's optimizers ignore it
    run.scaler = torch.amp.GradScaler(run.device.type, init_scale=scale, enabled=is_on)
    averaged = run.model.named_parameters() if ema_decay else ()
    run.ema = {name: weight.detach().clone() for name, weight in averaged}
    run.state["micro_batch"] = batch_size
    flops = flops_per_token(run.model) * sequences_at(0) * block_size * max_steps / world_size()
    choice, run.why["compile"] = plumbing.choose_compile(compile, run.device, flops, max_steps)
    run.config["compile"] = choice
    run.wrapped = run.model
    if choice:  # a pass before the state is loaded, so that errors come now
        run.wrapped = plumbing.compiled(run.model)
        batch = next(micro_batches(run, *batch_at(run, *place)))
        forward(run, run.wrapped, *batch)[0]["loss"].backward()
        run.clock.lap("compile")
    if world_size() > 1 and not shard:
        run.wrapped = DistributedDataParallel(run.wrapped, find_unused_parameters=True)
    seed_everything(seed + rank())  # dropout differs between the ranks


def seed_everything(seed):
    """Seed Python, NumPy, and torch on every device."""
    plumbing.seed_cpu(seed)
    torch.manual_seed(seed)


def begin_from(run):
    """Copy the weights in the file `init_from`, averaged ones if it has them. Raises BadInput if they
    are of another shape or vocabulary."""
    weights, there = plumbing.read_weights(init_from)
    for name, here in plumbing.metadata_of(run.facts).items():
        is_compared = name in "n_layer n_head n_embd tokenizer chars vocab_size".split()
        if is_compared and there.get(name, here) != here:
            fail(f"--init_from={init_from}: its {name} is {there[name]}, and {here} in this run")
    load_weights(run.model, weights)
    for name, average in run.ema.items():
        average.copy_(run.model.get_parameter(name).detach())


# ---- 10. what a run is, and its folder -----------------------------------------------------------
# With other knobs, data or code it is another run, and never goes on in silence.


def identify(run, data):
    """Fill run.facts: what checkpoints and run.json say of the run. Its identity is the knobs that
    are not FREE, the data, and the code."""
    knobs = {name: value for name, value in run.config.items() if name not in FREE}
    knobs["batch"] = knobs.pop("batch_size") * knobs.pop("accum_steps")
    if patience or plateau_factor < 1:
        knobs |= {"eval_interval": eval_interval, "min_delta": min_delta}
    files = {str(path): plumbing.digest_of(path) for path in data.get("files", ())}
    run.files = plumbing.code_files(__file__)
    identity = {
        "knobs": knobs,
        "data": {"fingerprint": data["fingerprint"], "rows": len(run.train_data), **files},
        "code": {name: plumbing.digest_of(path) for name, path in run.files.items()},
    }
    run.facts = {"config": dict(run.config), "data": data, "identity": identity}
    run.facts["run"] = plumbing.describe(run.device)


def compare(run, saved, to_train):
    """Note what has changed since the checkpoint. Raises BadInput if that makes another run, to_train,
    unless --resume=force goes on with it."""
    code, step = run.folder.path / "code", saved["state"]["step"]
    run.changed, run.another = plumbing.changes(saved, run.facts, run.files, code)
    is_forced = resume == "force" and step < max_steps
    if not run.another or not to_train or is_forced:
        return
    folder, words = plumbing.shown(run.folder.path), plumbing.change_words(run.another)
    hint = "--resume=force goes on up to --max_steps, --resume=restart starts anew"
    hint += f", --out_dir={run.folder.fresh()}"
    if "decay_steps" in run.another:
        hint += f", --decay_steps={run.another['decay_steps'][0]} trains on at the last rate"
    if "has changed" in words:
        hint += f"; {folder}/code has the code so far: copy it over yours to go on with that"
    fail(f"{folder} holds another run: {words}; it is at step {step:,}; {hint}")


def is_finished(run):
    """Whether a run that resumes has no step and no evaluation left; then say how to go on."""
    state, name, how = run.state, plumbing.shown(run.folder.path), how_it_is_over(run.state)
    if not how or state["evaluated"] != state["step"]:
        return False
    longer, end = "raise --max_steps, with", run.config["decay_steps"]
    if end:  # the schedule so far
        longer += f" --decay_steps={end}"
    if how != "finished":
        longer = "add --resume=force, with" if state["ended"] else "raise --patience, with"
    hint = f"to train longer {longer} --out_dir={name}; anew: --out_dir={run.folder.fresh()}"
    print0(f"{name}: {how} at step {state['step']:,}; {best_words(state)}; {hint}")
    return True


def best_words(state):
    if state["best_score"] == math.inf:
        return "no evaluation yet"
    by = "best" if best_metric == "val_loss" else f"best by {best_metric}:"
    return f"{by} validation loss {state['best_val_loss']:.4f} at step {state['best_step']:,}"


def open_folder(run):
    """All is checked: from here on the run writes to its folder."""
    if wandb_log:
        plumbing.require_wandb()
    sets = run.val_data.values() if isinstance(run.val_data, dict) else [run.val_data]
    about = run.facts | {
        "command": [plumbing.shown(plumbing.script_path() or __file__), *run.config.argv],
        "defaults": run.config.default,
        "asked": plumbing.knobs_in(globals()),
        "why": run.why,
        "model": getattr(run.model, "describe", lambda: type(run.model).__name__)(),
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "flops_per_token": flops_per_token(run.model),
        "train_rows": len(run.train_data),
        "val_rows": sum(map(len, sets)),
        "state": run.state,
    }
    paths = {os.path.relpath(path): Path(path) for path in run.config.files}
    files = run.files | {name: path for name, path in paths.items() if name[0] != "."}
    start = about, files, run.saver.saved, bool(run.another), resume == "restart"
    try:
        old_rows = from_rank0(run.folder.begin, *start)
    except OSError as error:  # a full disk
        place = plumbing.shown(run.folder.path)
        words = f"{place} cannot be written ({error.strerror}); nothing in it is lost"
        raise RunFailed(f"{words}; make room and type the same command again") from error
    if wandb_log and rank() == 0:
        name = wandb_run_name or run.folder.path.name
        run.wandb = plumbing.start_wandb(wandb_project, name, run.folder.about)
    if run.path:
        words = plumbing.change_words(run.changed) or "nothing"
        words = f"resumes from {run.path}; changed: {words}"
        log_event(run, "resume", words, checkpoint=run.path.name, changed=run.changed)
        run.check = plumbing.Check(old_rows, run.state["step"])
    print_plan(run, about)
    run.clock.lap("start")


def print_plan(run, about):
    place, last_lr = run.folder.path, lr_at(max(0, max_steps - 1))
    print0(plumbing.PLAN.format(folder=place, last_lr=last_lr, **about))
    if not run.path and "out_dir" not in run.config.typed:
        from_rank0(plumbing.say_what_is_beside, run.folder, run.facts)


def close_check(run):
    """Log how exact the resume was."""
    (text, found), run.check = run.check.result(run.changed), None
    log_event(run, "resume_checked", text, **found)


def close_folder(run, ended):
    """Record how the run ended, draw its report, and print what to type next."""
    run.batches = None
    plumbing.kill_workers()
    if not run.folder.about:  # on ranks other than 0, or nothing was written
        return
    run.saver.join()
    run.clock.lap("save")
    if run.check:
        close_check(run)
    log_event(run, "end", f"{ended}; {best_words(run.state)}", ended=ended)
    run.folder.end(ended, run.state)
    failed, name = ended.startswith("failed"), plumbing.shown(run.folder.path)
    if run.wandb:
        run.wandb.finish(int(failed))
    if report and not failed:
        try:
            import report as drawing

            drawing.main([name])
        except ModuleNotFoundError as error:
            print0(f"no report.png: {error}")
    seconds = run.state["seconds"]
    spent = ", ".join(f"{kind} {value:.1f}" for kind, value in seconds.items())
    print0(f"{sum(seconds.values()):.1f} s: {spent}")
    if ended.startswith("stopped by"):
        print0("type the same command again to resume")
    elif "tokenizer" in run.facts["data"]["meta"] and not failed:
        print0(plumbing.to_paste("sample.py", name))


if __name__ == "__main__":
    plumbing.exit_process(main())

"""An honest training loop. Learn: docs/lessons.md. Hack: docs/forks.md. In trouble: docs/trouble.md.

    python train.py config/shakespeare.py                     # the same command again resumes it
    python train.py config/shakespeare.py --batch_size=16 --accum_steps=2
    torchrun --standalone --nproc_per_node=4 train.py config/shakespeare.py    # one run on 4 GPUs

Every lower-case global below is a flag. A config file is Python that sets some of them; flags win.
The file reads from top to bottom, the caller above the called: the knobs, a run, the loop, its
batches, the step, evaluation, checkpoints, rows, and the start. What one need not open is in
plumbing.py."""

import plumbing  # first: it sets what torch reads when it is imported

# isort: split
import copy
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from model import InvalidShape, build_model, generate
from optim import configure_optimizer
from plumbing import RunFailed, fail, from_rank0, local, print0, rank, total, world_size

# ---- 1. knobs ------------------------------------------------------------------------------------

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
n_embd = 128  # width, an even multiple of n_head
dropout = 0.0  # share of activations; 0 = off
label_smoothing = 0.0  # in training only; 0 = off
grad_checkpoint = False  # recompute activations in the backward pass: less memory, more time

# The batch: a step sees batch_size * accum_steps sequences, on any number of ranks
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
schedule = "cosine"  # cosine | linear | constant | step | onecycle | wsd
peak_lr = 1e-3
min_lr = 1e-4  # where cosine, linear, onecycle and wsd end, and the floor of step
warmup_steps = 100  # unless typed, at most a tenth of the steps
max_steps = 2000
decay_steps = 0  # steps that the schedule spans; 0 = max_steps
cooldown_steps = 0  # schedule=wsd: length of the final decay; 0 = a fifth of the span
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
sample_interval = 0  # steps between text samples; 0 = only the one at the end
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
milestone_interval = 0  # steps between checkpoints that are never deleted; 0 = off

# Knobs that may differ at a resume, and name no folder (max_steps does): where and how a run is
# computed, how often it logs and saves, how long it is. All others are what the run is.
FREE = {
    *("out_dir", "resume", "data_dir", "num_workers", "prefetch_factor", "grad_checkpoint"),
    *("max_steps", "device", "compile", "deterministic", "shard", "log_interval", "eval_interval"),
    *("sample_interval", "report", "patience", "min_delta", "save_interval", "keep_last"),
    *("milestone_interval", "wandb_log", "wandb_project", "wandb_run_name"),
}
CHOICES = {
    "resume": ("auto", "never", "restart", "force"),
    "optimizer": ("adamw", "adam", "sgd", "momentum", "muon"),
    "schedule": ("cosine", "linear", "constant", "step", "onecycle", "wsd"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", True, False),
    "deterministic": ("auto", True, False),
}
# Every variable of the loop, saved and restored together: a new one belongs here.
FRESH_STATE = {
    "step": 0,  # finished updates, including skipped ones
    "sequences": 0,  # index of the next training sequence
    "tokens": 0,  # targets trained on so far
    "micro_batch": 0,  # most sequences in a pass: batch_size, halved whenever memory runs out
    "evaluated": -1,  # the step whose evaluation was taken last
    "best_score": math.inf,  # of best_metric, its sign turned if higher is better
    "best_val_loss": math.inf,  # validation loss of the best weights
    "best_step": 0,
    "score_to_beat": math.inf,  # a better score, by min_delta, counts as an improvement
    "evals_since_best": 0,  # evaluations without an improvement
    "lr_factor": 1.0,  # product of the plateau_factors so far
    "skips_in_row": 0,  # updates that were skipped, as a gradient was not finite
    "ended": "",  # why a function in on_row has ended the run
    "seconds": {},  # by kind, of all processes of the run
}
BEST = ("best_score", "best_val_loss", "best_step", "score_to_beat", "evals_since_best")
PAUSE = 5  # seconds between two tries of a save that is required
MINUTE = 60  # seconds of such tries
MAX_SKIPPED = 10  # updates in a row that are not finite, before the run ends
FORMAT = 3  # of a checkpoint
RESOLVED = {}  # what "auto", 0 and a short run make of dtype, compile, warmup_steps, decay_steps
ADDED_KNOBS = {}  # of a script: see knob()
on_row = []  # functions (run, row) that see each train and eval row when it is logged, on rank 0


def knob(name: str, default: str | int | float | bool, comment: str) -> None:
    """Add a flag to those above, at the top of a script that imports train:
    `train.knob("alpha", 0.5, "weight of the teacher")`. Within main() and build() its value is
    train.alpha, and a model gets it as config["alpha"]. It is a part of what the run is, unless
    `train.FREE.add("alpha")`."""
    plumbing.add_knob(globals(), name, default, comment)


def check_knobs(typed):
    """Raises BadInput for values out of range and for contradictions. typed: names of flags."""
    positive = "block_size n_layer n_head n_embd batch_size accum_steps prefetch_factor step_size"
    positive = f"{positive} plateau_patience keep_last peak_lr gamma plateau_factor".split()
    shares = "dropout label_smoothing ema_decay momentum beta1 beta2".split()
    for name, value in plumbing.knobs_in(globals()).items():
        if name in ADDED_KNOBS or isinstance(value, str | bool):
            continue
        if value < 0 or (value == 0 and name in positive):
            fail(f"--{name}={value}: expected {'more than 0' if name in positive else '0 or more'}")
        if (value >= 1 and name in shares) or (value > 1 and name in ("gamma", "plateau_factor")):
            fail(f"--{name}={value}: expected less than 1")
    if seed >= 2**32:
        fail(f"--seed={seed}: expected less than 2 ** 32")
    if min_lr > peak_lr:
        fail(f"--min_lr={min_lr}: expected no more than --peak_lr={peak_lr}")
    if "warmup_steps" in typed and warmup_steps > max_steps:
        fail(f"--warmup_steps={warmup_steps}: expected no more than --max_steps={max_steps}")


# ---- 2. a run ------------------------------------------------------------------------------------


class Run(SimpleNamespace):
    """What the next step depends on.

    device; dtype of the products, under autocast; model(inputs, targets), which returns, in training
    and in evaluation, the mean loss over the targets that count, or (loss, {name: scalar mean}), and
    model(inputs) the logits, for samples; wrapped: the model as training calls it, compiled or under
    DistributedDataParallel; optimizer; scaler; ema: {name: averaged weight}, empty when off; extra:
    a fork's own objects that have a state_dict, by name; train_data; val_data, a Dataset or {name:
    Dataset}; state: the variables of the loop; config: every knob as resolved; facts: what
    checkpoints and run.json say of the run; folder; batches: those to come, for this rank; wandb:
    the session or None."""

    def stop(self, why):
        """For a function in on_row: the run ends here, and is finished."""
        self.state["ended"] = why


class Extra(dict):
    """A fork's own objects, name -> what has a state_dict. One that is put here gets at once the state
    that the checkpoint has for it."""

    saved = {}

    def __setitem__(self, name, part):
        if name in self.saved:
            part.load_state_dict(self.saved[name])
        super().__setitem__(name, part)

    def state_dict(self):
        return self.saved | {name: part.state_dict() for name, part in self.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the flags in `argv` (None: those of the command line). Returns the exit code. Raises
    BadInput before anything is written, RunFailed, or whatever else ended the run."""
    if plumbing.is_importing_worker():  # of a script without `if __name__ == "__main__"`
        return 0
    with plumbing.Signals() as signals, build(argv, to_train=True) as run:
        run.signals = signals
        code = 0
        if is_finished(run):
            print0(how_to_train_longer(run))
        else:
            code = run_to_the_end(run, argv)
    if code and argv is None and plumbing.script_path():  # `python lab.py && next` must not go on
        raise SystemExit(code)
    return code


def run_to_the_end(run: Run, argv: list[str] | None) -> int:
    """Open the folder, train, record how the run ended. Returns the exit code."""
    ended, code = "failed", 1
    try:
        open_folder(run, argv)
        ended, code = train(run)
        if code == 0:
            print_sample(run)
    except BaseException as error:
        kind = "" if isinstance(error, RunFailed) else f"{type(error).__name__}: "
        ended = f"failed: {kind}{error}"[:300]
        raise
    finally:
        plumbing.kill_workers()
        close_folder(run, ended)
    return code


# ---- 3. the loop ---------------------------------------------------------------------------------


def train(run: Run) -> tuple[str, int]:
    """Take steps until the run ends. Returns (how it ended, exit code)."""
    state, saver = run.state, run.saver
    run.batches = load_batches(run)
    steps = []  # (first fields of the row, numbers on the device) of steps that are not logged yet
    while True:
        # ---- what is due? every rank gets the same answer
        due = what_is_due(run)
        if any(vars(due).values()):
            steps = log_steps(run, steps)  # here the host waits for the device

        # ---- save, evaluate
        if due.save:
            saver.save(*due.milestone)
        if due.evaluation:
            with suppress(Stopped):  # a signal: the process that resumes begins with the evaluation
                if record_evaluation(run):
                    saver.save("best.pt")
            continue

        # ---- end
        if due.ending:
            saver.save_if_new()
            if due.stop:
                log_two_more_steps(run)
            return due.ending

        # ---- train: only this line changes the weights
        steps.append(take_step(run))
        run.table.print_live(state["step"])


def what_is_due(run: Run) -> SimpleNamespace:
    """What is due before the next step: by its number, a signal, or what the last evaluation
    said."""
    state, signals = run.state, run.signals
    step = state["step"]
    asked = signals.stop, signals.save, bool(state["ended"])
    stop, save_now, ended = plumbing.max_over_ranks(*asked)
    signals.save = False
    if ended:
        state["ended"] = plumbing.from_all_ranks(state["ended"])[0]
    is_last = step >= max_steps or is_out_of_patience(state) or bool(ended)
    due = SimpleNamespace(stop=stop, save=False, milestone=[], evaluation=False, ending=None)
    due.log = every(log_interval or 100, step)
    due.evaluation = not stop and state["evaluated"] != step
    due.evaluation &= step == 0 or step >= max_steps or every(eval_interval, step)
    if not run.saver.saved or run.saver.saved[0] != step:
        due.milestone = [f"milestone_{step:08}.pt"] if every(milestone_interval, step) else []
        due.save = step == 0 or every(save_interval, step) or bool(due.milestone)
    due.save |= save_now
    if stop:
        due.ending = f"stopped by {signal.Signals(stop).name}", 128 + stop
    elif is_last and not due.evaluation:
        due.ending = how_it_finished(state), 0
    return due


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def take_step(run: Run) -> tuple[dict, dict]:
    """Take the next step. Returns (first fields of its row, numbers that are still on the
    device)."""
    state = run.state
    began = time.perf_counter()
    inputs, targets = plumbing.to_device(next_batch(run), run.device)
    data_ms = 1000 * (time.perf_counter() - began)
    lr = float(lr_at(state["step"]) * state["lr_factor"])
    numbers = halving_on_oom(run, train_step, run, inputs, targets, lr)
    count = sequences_at(state["step"])
    state["step"] += 1
    state["sequences"] += count
    epoch = state["sequences"] / len(run.train_data)
    row = {"step": state["step"], "sequences": state["sequences"], "epoch": epoch, "lr": lr}
    return row | {"data_ms": data_ms, "positions": count * targets[0].numel()}, numbers


def next_batch(run: Run) -> tuple:
    """The next batch of this rank. If a row of the data cannot be read, the steps so far are
    saved."""
    try:
        return next(run.batches)
    except Exception:
        if world_size() == 1:
            run.saver.save_if_new()
        raise


def log_two_more_steps(run: Run) -> None:
    """After a signal and its save, take the next two steps for their rows alone: the process that
    resumes computes them again, and so measures whether it is exact. Two, because lost moments show
    only in the second."""
    is_slow = 2 * run.table.row.get("step_ms", math.inf) > 3000
    for taken in range(2):
        step = run.state["step"]
        has_evaluation = taken and every(eval_interval, step)  # which may change the rate
        if plumbing.max_over_ranks(is_slow or step >= max_steps or has_evaluation)[0]:
            return
        log_steps(run, [take_step(run)], is_kept=False)


# ---- 4. the rate and the batch -------------------------------------------------------------------


def lr_at(step: int) -> float:
    """Learning rate of update `step` (the first is 0): a pure function of the step. Linear warmup,
    then `schedule` down to min_lr at decay_steps: cosine (Loshchilov & Hutter 2017), linear,
    constant, step, onecycle (Smith & Topin 2018; cosine both ways), wsd (Hu et al. 2024)."""
    warmup = RESOLVED.get("warmup_steps", warmup_steps)
    total_steps = decay_steps or max_steps
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
    decay_start = warmup
    if schedule == "wsd":
        decay_start = max(warmup, total_steps - (cooldown_steps or max(1, total_steps // 5)))
    if step >= total_steps:
        return min_lr
    done = max(0, step - decay_start) / (total_steps - decay_start)
    fall = 1 - done if schedule in ("linear", "wsd") else half_cosine(done)
    return min_lr + (peak_lr - min_lr) * fall


def half_cosine(done: float) -> float:
    """From 1 at done = 0 to 0 at done = 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def sequences_at(step: int) -> int:
    """Sequences that update `step` sees on all ranks together, a pure function: to let a batch
    grow, return more at later steps."""
    return batch_size * accum_steps


def load_batches(run: Run) -> Iterator:
    """The batches to come, read ahead by num_workers processes."""
    knobs = {__name__: {name: globals()[name] for name in run.config}}
    reader = plumbing.Reader(run.train_data, seed)
    places = places_to_come(run.state)
    return plumbing.load_batches(reader, places, num_workers, prefetch_factor, knobs)


def places_to_come(state: dict) -> Iterator[tuple[int, int]]:
    """(first sequence, count) of this rank's part of each batch from here on."""
    first = state["sequences"]
    for step in range(state["step"], sys.maxsize):
        count = sequences_at(step)
        if count < world_size() or (shard and count % world_size()):
            expected = "one or more for each, with --shard=true as many for each"
            raise RunFailed(f"a batch of {count} for {world_size()} ranks: expected {expected}")
        yield plumbing.my_share(first, count)
        first += count


def batch_at(run: Run, first: int, count: int, data=None) -> tuple:
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

    def __init__(self, tokens: np.ndarray, block_size: int, seed: int):
        self.tokens = tokens
        self.block_size = block_size
        self.seed = seed
        self.order = {}  # epoch -> first token of each of its windows

    def __len__(self) -> int:
        """Windows in an epoch: as many as fit whatever the shift of the boundaries."""
        return (len(self.tokens) - self.block_size) // self.block_size

    def starts(self, epoch: int) -> np.ndarray:
        if epoch not in self.order:
            # RandomState, not Generator: NumPy promises that its stream never changes
            random_state = np.random.RandomState([self.seed, epoch])
            shift = random_state.randint(self.block_size)
            self.order[epoch] = shift + random_state.permutation(len(self)) * self.block_size
            self.order.pop(epoch - 2, None)
        return self.order[epoch]

    def __getitem__(self, place: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, count = place
        epoch, window = np.divmod(np.arange(first, first + count), len(self))
        parts = [self.starts(e)[window[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
        return windows_at(self.tokens, np.concatenate(parts), self.block_size)


class OrderedWindows(torch.utils.data.Dataset):
    """The first `n_targets` targets of `tokens` (0 = all), rounded up to whole windows, for
    validation. If the last window overlaps the one before, its repeated targets do not count: they
    are -100, or NaN where the tokens are no ids but floats."""

    draws_nothing = True

    def __init__(self, tokens: np.ndarray, block_size: int, n_targets: int = 0):
        self.tokens = tokens
        self.block_size = block_size
        self.count = math.ceil(min(n_targets or math.inf, len(tokens) - 1) / block_size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, count = place
        first_new = np.arange(first, first + count) * self.block_size
        starts = np.minimum(first_new, len(self.tokens) - 1 - self.block_size)
        inputs, targets = windows_at(self.tokens, starts, self.block_size)
        is_repeated = np.arange(self.block_size) < (first_new - starts)[:, None]
        targets[is_repeated] = -100 if targets.dtype == np.int64 else np.nan
        return inputs, targets


def windows_at(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple:
    """Inputs, the `length` tokens from each of `starts` on, and as targets those that follow them,
    each (len(starts), length): ids as int64, other numbers in their own dtype."""
    rows = np.asarray(tokens)[starts[:, None] + np.arange(length + 1)]
    rows = rows.astype(np.int64) if np.issubdtype(rows.dtype, np.integer) else rows
    return rows[:, :-1].copy(), rows[:, 1:].copy()


# ---- 5. the step ---------------------------------------------------------------------------------


def train_step(run: Run, inputs, targets: Tensor, lr: float) -> dict:
    """One update, in seven operations. inputs, targets: this rank's sequences, on the device.

    Returns scalars of the global batch, which stay on the device: the host waits for none. A key
    added here becomes a field of every row of metrics.jsonl, a column and a curve."""
    optimizer, scaler, ranks = run.optimizer, run.scaler, world_size()
    optimizer.zero_grad(set_to_none=True)  # 1: zero the gradients
    for group in optimizer.param_groups:  # 2: set the learning rate, in proportion to the group's
        group["lr"] = lr * (group["initial_lr"] / peak_lr)
    n_targets = total(targets_in(targets))
    sums = Counter()
    for x, y in micro_batches(run, inputs, targets):
        means, n = forward(run, run.wrapped, x, y)  # 3: forward
        parts = n_targets / (n * ranks)  # of the batch; DistributedDataParallel averages over ranks
        shares = {
            name: mean / parts for name, mean in means.items()
        }  # 4: scale to the batch's mean
        scaler.scale(shares["loss"]).backward()  # 5: backward
        sums.update({name: share.detach() for name, share in shares.items()})
    has_gradient = any(w.grad is not None for g in optimizer.param_groups for w in g["params"])
    if has_gradient:
        scaler.unscale_(optimizer)  # 6: unscale, then clip
    grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
    grad_norm = plumbing.full(grad_norm)
    if run.dtype == torch.float16:
        sums["loss_scale"] = scaler.scale(torch.ones_like(grad_norm))
    if has_gradient:
        scaler.step(optimizer)  # 7: update, unless a gradient is not finite
        scaler.update(None if run.dtype == torch.float16 else 1.0)
    skipped = ~grad_norm.isfinite()
    average_weights(run, skipped)
    return mean_over_ranks(sums) | {
        "grad_norm": grad_norm,
        "skipped": skipped,
        "targets": n_targets,
    }


def micro_batches(run: Run, inputs, targets: Tensor) -> Iterator[tuple]:
    """(inputs, targets) of at most state["micro_batch"] sequences. Gradients are summed over the
    ranks in the last one alone."""
    size = run.state["micro_batch"]
    for first in range(0, len(targets), size):
        run.wrapped.require_backward_grad_sync = first + size >= len(targets)  # as DDP.no_sync()
        yield tree_map(lambda part: part[first : first + size], (inputs, targets))


def forward(run: Run, model: nn.Module, x, y: Tensor) -> tuple[dict, Tensor]:
    """({"loss": mean over the targets that count, and the other scalars that the model returned},
    how many count), by one forward pass under autocast."""
    n = targets_in(y)
    y = torch.where(n > 0, y, y.new_zeros(()))  # a loss of no targets would not be finite
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32):
        result = model(x, y)
    loss, others = result if isinstance(result, tuple) else (result, {})
    return {"loss": loss, **others}, n


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count: all but -100 (class labels) or NaN (numbers). It is the denominator
    of the model's mean loss: replace it for a loss with another one, such as class weights."""
    if targets.is_floating_point():
        return (~targets.isnan()).sum()
    return (targets.long() != -100).sum()


def targets_in(targets: Tensor) -> Tensor:
    return torch.as_tensor(count_targets(targets), device=targets.device)


@torch.no_grad()
def average_weights(run: Run, skipped: Tensor) -> None:
    """Move the averages to the new weights (Polyak & Juditsky 1992); at first by larger steps, or
    they would keep the start for long."""
    updates = run.state["step"]
    decay = min(ema_decay, (1 + updates) / (10 + updates))
    for name, average in run.ema.items():
        weight = run.model.get_parameter(name)
        local(average).lerp_(local(weight), (1 - decay) * (1 - skipped.float()))


def halving_on_oom(run: Run, function, *arguments):
    """function(*arguments), a step or an evaluation. If memory runs out, it is called again with a
    micro-batch of half the size and the same random state. Raises RunFailed if that cannot help."""
    while True:
        before = plumbing.rng_state(run.device)
        try:
            return function(*arguments)
        except (RuntimeError, MemoryError) as error:
            if not plumbing.is_out_of_memory(error):
                raise
            size = run.state["micro_batch"]
            if world_size() > 1:  # the other ranks wait in the middle of the step
                flags = f"--batch_size={max(1, size // 2)} --accum_steps={2 * accum_steps}"
                raise RunFailed(
                    f"out of memory; the same batch in smaller parts: {flags}"
                ) from error
            if size == 1:
                hint = "--grad_checkpoint=true, a smaller --block_size, --n_embd or --n_layer"
                raise RunFailed(f"out of memory with a micro-batch of 1; try {hint}") from error
        run.optimizer.zero_grad(set_to_none=True)
        plumbing.set_rng_state(before, run.device)
        run.state["micro_batch"] = size // 2
        words = f"out of memory: from here on {size // 2} sequences in a micro-batch"
        log_event(run, "out_of_memory", words, micro_batch=size // 2)


# ---- 6. evaluation -------------------------------------------------------------------------------


class Stopped(BaseException):
    """A signal came in an evaluation. No Exception, which a fork may catch."""


def record_evaluation(run: Run) -> bool:
    """Evaluate and log the result. Returns whether it is the best so far."""
    state, meta = run.state, run.facts["data"]["meta"]
    size = state["micro_batch"]
    numbers = halving_on_oom(run, evaluate, run)
    state["micro_batch"] = size  # training may have room for more
    name = best_metric.removeprefix("-")
    numbers = plumbing.from_all_ranks(plumbing.scalars(numbers, "evaluate", "val_loss", name))[0]
    state["evaluated"] = state["step"]
    is_best = count_evaluation(run, numbers)
    row = {"kind": "eval", "step": state["step"], **numbers}
    row["best_val_loss"] = state["best_val_loss"]
    if name != "val_loss":
        row[f"best_{name}"] = state["best_score"] * (-1 if best_metric.startswith("-") else 1)
    counted = row.get("val_tokens") if eval_tokens else row.pop("val_tokens", None)
    if "val_bytes" in meta and counted == meta["val_tokens"] - 1:  # the whole text, none masked
        row["val_bpb"] = row["val_loss"] / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    log_rows(run, [row])
    run.table.print_evaluation(row, is_best)
    if every(sample_interval, state["step"]) and state["step"] < max_steps:
        print_sample(run)
    run.clock.lap("evaluate")
    return is_best


@torch.no_grad()
def evaluate(run: Run) -> dict:
    """{"val_loss": mean over the targets that count, "val_NAME": that of each other number that the
    model returns, "val_tokens": how many targets}; of several validation sets each name with that of
    the set, and the means over the sets. best_metric names the number that decides.

    In eval mode, with the averaged weights if ema_decay is on; never compiled, so that the result
    does not depend on --compile."""
    sets = run.val_data if isinstance(run.val_data, dict) else {None: run.val_data}
    found = {}
    with evaluating(run):
        for name in sets:
            sums = Counter()
            for x, y in val_batches(run, name):
                means, n = forward(run, run.model, x, y)
                for key, mean in {**means, "targets": torch.ones_like(n)}.items():
                    sums[key] += float64(mean) * float64(n)
            counted = total(sums.pop("targets"))
            found[name] = {f"val_{key}": (total(s) / counted).item() for key, s in sums.items()}
            found[name]["val_tokens"] = int(counted)
    return found[None] if None in found else plumbing.mean_of_sets(found)


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """A context for an evaluation: eval mode, averaged weights if there are any. At its end weights,
    buffers, the mode of each module and the random state are as before."""
    plumbing.sync_buffers(run.model)
    modes = {module: module.training for module in run.model.modules()}
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    before = plumbing.rng_state(run.device)
    swap_weights(run)
    run.model.eval()
    try:
        yield
    finally:
        swap_weights(run)
        run.model.train()
        for module, training in modes.items():
            module.training = training
        for name, buffer in buffers.items():
            run.model.get_buffer(name).copy_(buffer)
        plumbing.set_rng_state(before, run.device)
        if run.device.type == "cuda":  # the memory of an evaluation is not that of training
            torch.cuda.reset_peak_memory_stats(run.device)


@torch.no_grad()
def swap_weights(run: Run) -> None:
    for name, average in run.ema.items():
        weight = local(run.model.get_parameter(name))
        own = weight.clone()
        weight.copy_(local(average))
        local(average).copy_(own)


def val_batches(run: Run, name: str | None = None) -> Iterator[tuple]:
    """(inputs, targets) of this rank's share of the validation data, or of the set `name`; as many
    passes on each rank. What a model draws follows from the seed and the batch. Raises Stopped after
    a batch if a signal has come, on any rank."""
    data = run.val_data if name is None else run.val_data[name]
    size = min(run.state["micro_batch"], -(-sequences_at(0) // world_size())) * world_size()
    firsts = [*range(0, len(data), size)]
    if len(firsts) > 1 and len(data) - firsts[-1] < world_size():  # else a rank would have none
        firsts.pop()
    for first, end in zip(firsts, [*firsts[1:], len(data)], strict=True):
        begin, count = plumbing.my_share(first, end - first)
        batch = batch_at(run, begin, count, data)
        seed_everything(plumbing.seed_of(seed, "evaluation", begin))
        yield batch
        if plumbing.max_over_ranks(run.signals.stop)[0]:
            raise Stopped


def count_evaluation(run: Run, numbers: dict) -> bool:
    """Count for the best, early stopping and plateau_factor. Returns whether this is the best so
    far. The evaluation after the last step counts for the latter two only if eval_interval asks for
    it: a run extended later must take the same course as one that was that long from the start."""
    state, name = run.state, best_metric.removeprefix("-")
    score = -numbers[name] if best_metric.startswith("-") else numbers[name]
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


def is_out_of_patience(state: dict) -> bool:
    return 0 < patience <= state["evals_since_best"]


def print_sample(run: Run) -> None:
    """Print and log 200 tokens, if the data is text. An error is printed: it must not end a run."""
    meta = run.facts["data"]["meta"]
    if "tokenizer" not in meta:
        return
    try:
        from prepare_data import start_and_end, tokenizer_of

        start, end = start_and_end(meta)
        own = torch.Generator(run.device).manual_seed(1337)
        prompt = torch.full((1, 1), start, device=run.device)
        with evaluating(run), torch.autocast(run.device.type, run.dtype):
            how = {"temperature": 0.8, "generator": own}
            ids = [*generate(run.model, prompt, 200, block_size, meta["vocab_size"], **how)]
        text = tokenizer_of(meta).decode(torch.cat(ids, dim=1)[0].tolist())
        log_event(run, "sample", f"\n{text.strip()}\n", text=text)
    except Exception as error:
        print0(f"no sample ({error})")
    run.clock.lap("sample")


# ---- 7. checkpoints ------------------------------------------------------------------------------


def checkpoint_of(run):
    """All that the next step depends on, and what the run is; on the host. A collective call."""
    plumbing.sync_buffers(run.model)
    frozen = [name for name, weight in run.model.named_parameters() if not weight.requires_grad]
    parts = {
        "format": FORMAT,
        "model": run.model.state_dict(),
        "frozen": frozen,
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
    if isinstance(leaf, Tensor):
        return plumbing.full(leaf.detach()).to("cpu", copy=True)
    return copy.deepcopy(leaf)


@torch.no_grad()
def load(run, path):
    """Put the checkpoint at `path` into the run: weights, buffers, moments, scaler, averages, random
    and loop state. The groups of the optimizer stay as this process has built them. Returns what
    the checkpoint holds."""
    saved = plumbing.read_checkpoint(path, FORMAT)
    here = run.model.state_dict()
    weights = {k: plumbing.shard_like(here.get(k), w) for k, w in saved["model"].items()}
    run.model.load_state_dict(weights)
    for name, weight in run.model.named_parameters():
        weight.requires_grad_(name not in saved["frozen"])
    load_optimizer(run.optimizer, saved["optimizer"]["state"])
    for name, average in run.ema.items():
        average.copy_(plumbing.shard_like(average, saved["ema"].get(name, saved["model"][name])))
    run.extra.saved = saved["extra"]
    if saved["config"]["dtype"] == run.config["dtype"]:
        run.scaler.load_state_dict(saved["scaler"])
    run.state |= saved["state"]
    if saved["config"]["batch_size"] != batch_size:
        run.state["micro_batch"] = batch_size
    run.clock.seconds = run.state["seconds"]
    if len(saved["rng"]) == world_size():
        plumbing.set_rng_state(saved["rng"][rank()], run.device)
    else:
        seed_everything(plumbing.seed_of(seed, rank(), run.state["step"]))
    return saved


def load_optimizer(optimizer, state):
    groups = optimizer.state_dict()["param_groups"]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, moments in state.items():
        for name, moment in moments.items():
            moments[name] = plumbing.shard_like(weights[number], moment)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for number, moments in state.items():  # torch has cast them to the dtype of the weight
        own = optimizer.state[weights[number]]
        for name, moment in moments.items():
            own[name] = moment.to(own[name].device) if torch.is_tensor(moment) else moment


class Saver:
    """Writes checkpoints in a thread, from a copy in memory: the loop waits for the copy and for the
    save before. An error is logged, and training goes on."""

    def __init__(self, run):
        self.run = run
        self.thread = None
        self.error = None  # that the newest save met
        self.saved = None  # (step, evaluated) of the newest save that was begun
        self.lost_best = None  # the checkpoint of a best.pt that could not be written
        self.is_readable = False  # whether a save of this process was read back

    def save(self, *others, required=False):
        """Write ckpt_STEP.pt, and the same file under other names before it, so that a save which a
        kill interrupts is taken again. required: try for a minute, then raise RunFailed."""
        run, step = self.run, self.run.state["step"]
        self.wait()
        names = [*others, f"ckpt_{step:08}.pt"]
        parts = checkpoint_of(run)
        self.saved = step, run.state["evaluated"]
        give_up = time.monotonic() + MINUTE
        self.start(parts, names)
        while required and from_rank0(self.must_try_again, names[-1], give_up):
            time.sleep(PAUSE)
            self.start(parts, names)
        run.clock.lap("save")

    def save_if_new(self):
        if self.saved != (self.run.state["step"], self.run.state["evaluated"]):
            self.save(required=True)
        self.wait()

    def start(self, parts, names):
        if rank() == 0:
            self.thread = threading.Thread(target=self.write, args=(parts, names))
            self.thread.start()

    def wait(self):
        if self.thread:
            self.thread.join()
        if self.error and not isinstance(self.error, OSError):
            raise RunFailed(f"a checkpoint cannot be read back: {self.error}")
        return self.error

    def must_try_again(self, name, give_up):
        error, signals = self.wait(), self.run.signals
        if error and time.monotonic() > give_up:
            newest = f"step {signals.newest_save:,} in {self.run.folder.path}"
            failure = RunFailed(
                f"{name} could not be saved: {error}; the newest checkpoint: {newest}"
            )
            failure.exit_code = 128 + signals.stop if signals.stop else 1
            raise failure
        return error is not None

    def write(self, parts, names):
        """In the thread: rows first, then the files, each in one rename; then prune."""
        run, folder = self.run, self.run.folder.path
        self.error = None
        try:
            run.folder.require_own()
            run.log.sync()
            if self.lost_best and "best.pt" not in names:
                write_files(folder, self.lost_best, ["best.pt"])
            self.lost_best = parts if "best.pt" in names else None
            write_files(folder, parts, names)
            self.lost_best = None
            if not self.is_readable:
                plumbing.read_checkpoint(folder / names[-1], FORMAT)
                self.is_readable = True
            run.signals.newest_save = parts["state"]["step"]
            log_event(run, "saved", "", files=names)
            old = [p for p in plumbing.checkpoints(folder)[keep_last:] if p.name not in names]
            for path in old:
                path.unlink()
        except Exception as error:
            self.error = error
            log_event(run, "save_failed", f"{names[-1]} could not be saved: {error}", files=names)


def write_files(folder, parts, names):
    with plumbing.replacing(folder / names[0]) as temporary:
        torch.save(parts, temporary)
    for name in names[1:]:
        with plumbing.replacing(folder / name) as temporary:
            try:
                os.link(folder / names[0], temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(folder / names[0], temporary)


# ---- 8. rows -------------------------------------------------------------------------------------


def log_steps(run, steps, is_kept=True):
    """Log a row for each of `steps`, [(fields, numbers on the device)]: all since the last lap of the
    clock, so times exclude evaluation and saving. The host waits for the device here. Returns []."""
    if not steps:
        return []
    on_device = torch.stack([float64(n).reshape(()) for _, named in steps for n in named.values()])
    values = iter(on_device.tolist())
    seconds = run.clock.lap("train")
    rows = [fields | {name: next(values) for name in named} for fields, named in steps]
    tokens_per_sec = sum(row.pop("positions") for row in rows) / seconds
    common = {
        "step_ms": 1000 * seconds / len(rows),
        "tokens_per_sec": tokens_per_sec,
        "mfu": mfu_at(run, tokens_per_sec),
        "mem_gb": plumbing.memory_gb(run.device),
        "gpu_util": plumbing.gpu_util(run.device),
    }
    for row in rows:
        n_targets = row.pop("targets")
        run.state["tokens"] += int(n_targets)
        row |= {"kind": "train", "tokens": run.state["tokens"], "skipped": int(row["skipped"])}
        row |= common
        if is_kept:
            watch_skips(run, row, n_targets)
    log_rows(run, rows, is_kept)
    last = rows[-1]
    if (
        log_interval
        and is_kept
        and (last["step"] >= max_steps or every(log_interval, last["step"]))
    ):
        run.table.print_row(last)
    return []


def mfu_at(run, tokens_per_sec):
    """Model FLOPs utilization: the share of the peak of all devices, or None if that is unknown."""
    if run.peak is None:
        peak, source = plumbing.peak_flops(run.device, run.facts["run"]["device"], run.dtype)
        run.peak = from_rank0(lambda: peak) * world_size()
        print0(f"peak     {run.peak / 1e12:.3g} TFLOP/s ({source})")
        run.clock.lap("start")
    mfu = flops_per_token(run.model) * tokens_per_sec / run.peak
    return mfu if mfu <= 1 else None  # above 1 the machine was busy when the peak was measured


def flops_per_token(model):
    """FLOPs to train on one token, or NaN if the model does not tell them."""
    return float(getattr(model, "flops_per_token", lambda: math.nan)())


def watch_skips(run, row, n_targets):
    """Log a step that was skipped. Raises RunFailed after MAX_SKIPPED in a row."""
    state = run.state
    if not row["skipped"]:
        state["skips_in_row"] = 0
        return
    if not n_targets:
        words = "no target counts in this step: it is skipped; is all of it masked (-100)?"
        log_event(run, "no_targets", words)
        return
    # float16: the gradient overflowed, and the scaler answers with a lower scale, down to 1
    is_overflow = math.isfinite(row["loss"]) and row.get("loss_scale", 0) > 1
    words = f"skipped: loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g}"
    log_event(run, "skipped", words, loss=row["loss"], grad_norm=row["grad_norm"])
    state["skips_in_row"] += not is_overflow
    if state["skips_in_row"] >= MAX_SKIPPED:
        look = plumbing.to_paste("replay.py", run.folder.path, f"--step={row['step']}")
        found = f"the gradient was not finite in {MAX_SKIPPED} steps in a row, up to {row['step']}"
        raise RunFailed(f"{found}; what happened: {look}; try a lower --peak_lr")


def log_rows(run, rows, is_kept=True):
    """Write rows to metrics.jsonl, compare them with those of a killed process, show them."""
    if rank() > 0:
        return
    run.log.write(rows)
    for row in rows:
        if run.check:
            check_row(run, row)
        if run.wandb and is_kept:
            run.wandb.log(
                {f"{row['kind']}/{name}": n for name, n in row.items()} | {"step": row["step"]}
            )
        for function in on_row if is_kept else ():
            function(run, row)


def log_event(run, event, text, **fields):
    if text:
        plumbing.print_wrapped(f"{run.state['step']:>7} {text}")
    row = {"kind": "event", "step": run.state["step"], "event": event, **fields, "text": text}
    if rank() == 0:
        run.log.write([row])


# ---- 9. the start --------------------------------------------------------------------------------


@contextmanager
def build(argv=None, to_train=False):
    """A context with a run that is ready to step: data, model, optimizer, and the newest checkpoint
    of its folder, if there is one. Inside it the knobs hold. It writes nothing; `to_train` locks a
    folder that exists, and refuses to go on with what is another run."""
    with ExitStack() as stack:
        config = stack.enter_context(plumbing.configured(globals(), argv=argv))
        check_knobs(config.typed)
        started = plumbing.STARTED if argv is None else time.perf_counter()
        run = Run(config=config, asked=dict(config), state=copy.deepcopy(FRESH_STATE))
        run.clock = plumbing.Clock(run.state["seconds"], started)
        run.device = plumbing.choose_device(device)
        is_exact = run.device.type != "mps" if deterministic == "auto" else deterministic
        plumbing.prepare_torch(is_exact, run.device)
        stack.enter_context(plumbing.joined(run.device))
        saved = find_run(run, stack, to_train)
        try:
            run.train_data, run.val_data, data = open_dataset(saved)
        except plumbing.Offline as error:  # train on CPython's manual, in a folder that says so
            data = fall_back(run, error)
            saved = find_run(run, stack, to_train)
            run.train_data, run.val_data, data = open_dataset(saved)
        resolve(run, saved)
        build_parts(run, data["meta"]["vocab_size"])
        run.facts = facts_of(run, data)
        if saved:
            refuse_another_run(run, saved, to_train)
            load(run, run.resumed_from)
        elif init_from:
            begin_from(run)
        yield run


def find_run(run, stack, to_train):
    """Lock the folder of the run. Returns its newest whole checkpoint, or None for a run that
    begins."""
    name = plumbing.folder_name(run.config, FREE, plumbing.script_path())
    run.folder = stack.enter_context(plumbing.Folder(name))
    run.log = plumbing.Log(run.folder)
    run.saver = Saver(run)
    run.resumed_from = from_rank0(newest_checkpoint, run.folder, to_train)
    return run.resumed_from and plumbing.read_checkpoint(run.resumed_from, FORMAT)


def newest_checkpoint(folder, to_train):
    """The path of the newest whole checkpoint, or None. Damaged ones are named, and renamed."""
    if to_train and folder.path.exists():
        folder.lock()
    if resume == "restart" or not folder.holds_run():
        return None
    if resume == "never":
        fail(f"--resume=never, and {folder.path} holds a run; write {folder.fresh()}")
    for path in plumbing.checkpoints(folder.path):
        try:
            plumbing.read_checkpoint(path, FORMAT)
            return path
        except plumbing.Damaged as error:
            print0(f"{error}: an older checkpoint is tried")
            if to_train:
                os.replace(path, f"{path}.damaged")
        except OSError as error:  # no damage: it stays as it is
            fail(f"{path} cannot be read ({error.strerror}); it may be whole, and stays as it is")
    if [*folder.path.glob("*.pt*")]:
        fail(f"no whole ckpt_STEP.pt in {folder.path}; to start again write --resume=restart")
    return None


def fall_back(run, error):
    from prepare_data import FALLBACK

    if dataset not in FALLBACK:
        raise error
    other = FALLBACK[dataset]
    bar = "!" * 90
    print0(f"{bar}\n!! {error}\n!! This run trains on {other!r} INSTEAD OF {dataset!r}.\n{bar}")
    globals()["dataset"] = run.config["dataset"] = other
    run.config.typed.add("dataset")


def open_dataset(saved):
    """(training data, validation data or {name: validation data}, facts). facts, which a checkpoint
    keeps: `name`, `fingerprint`, `meta` with the vocab_size, and as `files` the paths of other
    files that a fork reads. saved: the checkpoint to resume from, or None."""
    import prepare_data

    folder, meta = prepare_data.prepare(dataset, data_dir)
    train_tokens, val_tokens = meta["train_tokens"], meta["val_tokens"]
    if train_tokens < 2 * block_size or val_tokens <= block_size:
        found = f"{folder} has {train_tokens:,} tokens to train on, {val_tokens:,} to validate"
        fail(f"--block_size={block_size}: {found}; expected more, or a smaller block_size")
    splits = (np.memmap(f"{folder}/{name}.bin", meta["dtype"], "r") for name in ("train", "val"))
    train_data = ShuffledWindows(next(splits), block_size, seed)
    val_data = OrderedWindows(next(splits), block_size, eval_tokens)
    content = {key: value for key, value in meta.items() if key not in ("source", "start_id")}
    about = {"name": dataset, "fingerprint": plumbing.hash_of(content), "meta": meta}
    return train_data, val_data, about


def resolve(run, saved):
    """What "auto", 0 and a short run make of the knobs: on a resume the same as before, unless the
    command asks for something else."""
    then = saved["run"]["asked"] if saved else {}
    run.why = {}
    has_end = schedule not in ("constant", "step")
    length = (decay_steps or max_steps) if has_end else max_steps
    RESOLVED["decay_steps"] = length if has_end else 0
    RESOLVED["warmup_steps"] = warmup_steps
    if "warmup_steps" not in run.config.typed:
        RESOLVED["warmup_steps"] = min(warmup_steps, length // 10)
    RESOLVED["dtype"], run.why["dtype"] = dtype, "as given"
    if dtype == "auto":
        RESOLVED["dtype"], run.why["dtype"] = plumbing.choose_dtype(run.device)
    for name in ("dtype", "warmup_steps"):
        if then.get(name) == run.asked[name] and name not in run.config.typed:
            RESOLVED[name] = saved["config"][name]
    run.config.update(RESOLVED)
    run.dtype = getattr(torch, RESOLVED["dtype"])


def build_parts(run, vocab_size):
    """The model, the optimizer, and how training calls them."""
    seed_everything(seed)
    try:
        model = build_model(run.config, vocab_size)
    except InvalidShape as error:
        fail(error)
    if shard and world_size() == 1:
        fail("--shard=true: expected several ranks; start torchrun --nproc_per_node=2 train.py")
    run.model = plumbing.sharded(model, run.device) if shard else model.to(run.device)
    run.optimizer = configure_optimizer(run.model, run.config, run.device.type)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    init_scale = 65536.0 if run.dtype == torch.float16 else 1.0
    has_scaler = run.device.type != "mps"  # whose fused optimizers do not skip a step
    run.scaler = torch.amp.GradScaler(run.device.type, init_scale=init_scale, enabled=has_scaler)
    averaged = run.model.named_parameters() if ema_decay else ()
    run.ema = {name: weight.detach().clone() for name, weight in averaged}
    run.extra = Extra()
    run.state["micro_batch"] = batch_size
    run.check, run.peak, run.wandb, run.changed = None, None, None, {}
    run.signals = plumbing.Signals()
    run.table = plumbing.Table(max_steps)
    tokens = sequences_at(0) * block_size * max_steps / world_size()
    run.config["compile"], run.why["compile"] = compile, "as given"
    if compile == "auto":
        flops = flops_per_token(run.model) * tokens
        choice = plumbing.choose_compile(run.device, flops, max_steps)
        run.config["compile"], run.why["compile"] = choice
    run.wrapped = first_pass(run) if run.config["compile"] else run.model
    if world_size() > 1 and not shard:
        run.wrapped = DistributedDataParallel(run.wrapped, find_unused_parameters=True)
    seed_everything(seed + rank())  # dropout differs between the ranks


def first_pass(run):
    """The compiled model. It computes a batch once, so that the compiler's errors come now: a single
    process then goes on without it."""
    model = plumbing.compiled(run.model)
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    batch = batch_at(run, *plumbing.my_share(0, sequences_at(0)))
    x, y = next(micro_batches(run, *batch))
    try:
        forward(run, model, x, y)[0]["loss"].backward()
    except Exception as error:
        if world_size() > 1:
            raise  # eager on one rank and compiled on another would differ
        print0(f"torch.compile failed, so this run is eager: {str(error)[:200]}")
        run.config["compile"], run.why["compile"] = False, "torch.compile failed"
        model = run.model
    for name, buffer in buffers.items():
        run.model.get_buffer(name).data.copy_(buffer)
    run.optimizer.zero_grad(set_to_none=True)
    run.clock.lap("compile")
    return model


def seed_everything(seed):
    """Seed Python, NumPy, and torch on every device (CUDA as soon as it is initialized)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ---- what the run is, and whether it goes on -----------------------------------------------------


def facts_of(run, data):
    """What checkpoints and run.json say. Its identity: the knobs that are not FREE, the data, the
    code. Another identity is another run."""
    knobs = {name: value for name, value in run.config.items() if name not in FREE}
    knobs["batch"] = knobs.pop("batch_size") * knobs.pop("accum_steps")
    if patience or plateau_factor < 1:
        knobs |= {"eval_interval": eval_interval, "min_delta": min_delta}
    run.files = plumbing.code_files(__file__)
    files = {str(path): plumbing.digest_of(path)[:16] for path in data.get("files", ())}
    rows = len(run.train_data)
    identity = {
        "knobs": knobs,
        "data": {"fingerprint": data["fingerprint"], "rows": rows, "files": files},
        "code": {name: plumbing.digest_of(path) for name, path in run.files.items()},
    }
    if init_from and os.path.exists(init_from):
        identity["data"]["init_from"] = plumbing.digest_of(init_from)[:16]
    about = plumbing.describe(run.device) | {"asked": run.asked}
    return {"config": dict(run.config), "data": data, "identity": identity, "run": about}


def changes(run, saved):
    """({name: [then, now]} of what makes this another run than that of the checkpoint, and of what
    else differs)."""
    then, now = saved["identity"], run.facts["identity"]
    old = saved["config"] | then["knobs"] | then["data"]
    new = run.config | now["knobs"] | now["data"]
    names = {**then["knobs"], **now["knobs"], **then["data"], **now["data"]}
    other = {n: [old.get(n), new.get(n)] for n in names if old.get(n) != new.get(n)}
    code = run.folder.path / "code"
    other |= plumbing.changed_code(then["code"], run.files, code, set(run.config))
    places = ("out_dir", "data_dir", "resume", "max_steps", "asked", *other)
    old, new = saved["config"] | saved["run"], run.config | run.facts["run"]
    said = {n: [old[n], new[n]] for n in new if n in old and n not in places and old[n] != new[n]}
    return other, said


def refuse_another_run(run, saved, to_train):
    """Compare the run with its checkpoint. Raises BadInput if it is another one, with what differs
    and the ways on."""
    other, run.changed = changes(run, saved)
    run.changed = other | run.changed
    if not other or not to_train:
        return
    name = plumbing.shown(run.folder.path)
    words = plumbing.change_words(other)
    if resume != "force":
        hints = f"--resume=restart starts anew, --resume=force goes on, {run.folder.fresh()}"
        if "decay_steps" in other:
            planned = other["decay_steps"][0]
            hints += f", --decay_steps={planned} trains on at the last rate"
        if any(key.endswith(".py") for key in other):
            hints += f"; its own code is in {name}/code"
        fail(f"{name} holds another run: {words}; {hints}")
    if saved["state"]["step"] >= max_steps:
        fail(f"{name} is finished at step {saved['state']['step']}; raise --max_steps")
    saved["state"] |= {key: FRESH_STATE[key] for key in (*BEST, "ended")}


def is_finished(run):
    """Whether the run has no step and no evaluation left to take."""
    state = run.state
    is_over = state["step"] >= max_steps or is_out_of_patience(state) or state["ended"]
    return bool(run.resumed_from and is_over and state["evaluated"] == state["step"])


def how_it_finished(state):
    if state["ended"]:
        return f"stopped: {state['ended']}"
    if state["step"] < max_steps:
        return f"stopped early: {patience} evaluations without improvement"
    return "finished"


def how_to_train_longer(run):
    name, step = plumbing.shown(run.folder.path), run.state["step"]
    knob = "--max_steps" if step >= max_steps else "--patience"
    found = f"{name} is finished: {step:,} steps, {best_words(run.state)}"
    return f"{found}; to train it longer raise {knob} with --out_dir={name}; {run.folder.fresh()}"


def best_words(state):
    by = "best" if best_metric == "val_loss" else f"best by {best_metric}:"
    return f"{by} validation loss {state['best_val_loss']:.4f} at step {state['best_step']:,}"


@torch.no_grad()
def begin_from(run):
    """Copy the weights in the file `init_from`, averaged ones if it has them, into the model and its
    averages. Raises BadInput if they are of another shape or vocabulary."""
    tensors, there = from_rank0(plumbing.read_weights, init_from, FORMAT)
    here = plumbing.metadata_of(run.facts)
    for name in "n_layer n_head n_embd tokenizer chars vocab_size".split():
        if there.get(name, here.get(name)) != here.get(name):
            fail(
                f"--init_from={init_from}: its {name} is {there[name]}, that of the run {here.get(name)}"
            )
    weights = run.model.state_dict()
    shapes = [{name: tuple(w.shape) for name, w in each.items()} for each in (tensors, weights)]
    if shapes[0] != shapes[1]:
        odd = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0]
        fail(f"--init_from={init_from}: the weights differ from those of the model in {odd}")
    for name, weight in [*weights.items(), *run.ema.items()]:
        weight.copy_(plumbing.shard_like(weight, tensors[name]))


def open_folder(run, argv):
    """All is checked: from here on the run writes to its folder."""
    state, step = run.state, run.state["step"]
    from_rank0(write_start, run, argv)
    run.saver.saved = (step, state["evaluated"]) if run.resumed_from else None
    print_plan(run)
    if run.resumed_from and rank() == 0:
        name = run.resumed_from.name
        log_event(run, "resume", "", checkpoint=name, changed=run.changed)
        best = run.folder.path / "best.pt"
        if state["best_step"] == 0 and best.exists() and state["best_score"] == math.inf:
            os.replace(best, best.with_name("best_before.pt"))
    run.clock.lap("start")


def write_start(run, argv):
    folder, state = run.folder, run.state
    if resume == "restart" and folder.holds_run():
        folder.set_aside()
    if not folder.file:
        folder.lock()
    for leftover in folder.path.glob("*.tmp"):  # of a killed run
        leftover.unlink()
    place = (state["step"], state["evaluated"]) if run.resumed_from else (-1, -1)
    old = run.log.begin(*place)
    git, diff = plumbing.git_state()
    run.facts["run"]["git_commit"] = git["commit"]
    plumbing.keep_code(folder.path / "code", run.files, diff)
    script = plumbing.shown(plumbing.script_path() or __file__)
    flags = sys.argv[1:] if argv is None else argv
    earlier = plumbing.read_json(folder.path / "run.json") if run.resumed_from else {}
    first = {"start": plumbing.now(), "wandb_id": os.urandom(4).hex()}
    about = {
        "command": [script, *flags],
        **run.facts,
        "asked": run.asked,
        "defaults": run.config.default,
        "git": git,
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "flops_per_token": flops_per_token(run.model),
        "state": state,
        "end": None,  # if it is killed
        "ended": None,
    }
    run.json = first | earlier | about
    plumbing.write_json(folder.path / "run.json", run.json)
    if wandb_log:
        name = wandb_run_name or folder.path.name
        run.wandb = plumbing.start_wandb(wandb_project, name, run.json["wandb_id"], run.config)
    if run.resumed_from:
        kept = {plumbing.key_of(row): row for row in old if row["kind"] != "event"}
        run.check = SimpleNamespace(old=kept, rows=0, equal=0, steps=0, difference=None)
        if not kept:
            close_check(run)


def check_row(run, row):
    """Compare a row with the old one of its step, if a killed process has left one."""
    check = run.check
    last = max((step for _, step in check.old), default=-1)
    old = check.old.pop(plumbing.key_of(row), None)
    if old:
        found = plumbing.differences(old, row, best_metric)
        check.rows += 1
        check.steps += row["kind"] == "train"
        check.equal += not found
        for field, (then, now) in found.items():
            check.difference = {"step": row["step"], "field": field, "then": then, "now": now}
            break
    if check.difference or not check.old or row["step"] > last:
        close_check(run)


def close_check(run):
    """Log how exact the resume was."""
    check, run.check = run.check, None
    step = plumbing.step_of(run.resumed_from)
    words = f"{check.steps:,} steps computed again, every loss and norm the same"
    if not check.rows:
        words = "nothing to compare with"
    if check.difference:
        words = "other numbers from step {step:,} on: {field} {then} then, {now} now"
        words = words.format(**check.difference)
        words += f"; changed since: {plumbing.change_words(run.changed) or 'nothing known'}"
    found = {"steps": check.steps, "compared": check.rows, "equal": check.equal}
    found |= {"from": step, "first_difference": check.difference}
    log_event(run, "resume_checked", f"resumed at step {step:,}: {words}", **found)


PLAN = """\
run      {run}
model    {model}; {parameters:,} parameters
data     {dataset}: {train_rows:,} sequences, {val_rows:,} to validate
batch    {batch_size} x {accum_steps} = {sequences:,} sequences of {block_size:,} = {tokens:,} tokens a step{each}
steps    {max_steps:,}, {warmup_steps:,} of warmup; {optimizer}, {schedule} {peak_lr:g} to {last_lr:g}
device   {device}, {threads} threads, deterministic {deterministic}
dtype    {dtype} ({why[dtype]})
compile  {compile} ({why[compile]})"""


def print_plan(run):
    sets = run.val_data if isinstance(run.val_data, dict) else {"": run.val_data}
    describe = getattr(run.model, "describe", lambda: type(run.model).__name__)
    sequences = sequences_at(0)
    values = (
        run.config
        | run.facts["run"]
        | {
            "run": f"resumes from {run.resumed_from}"
            if run.resumed_from
            else f"new, in {run.folder.path}",
            "model": describe(),
            "parameters": sum(weight.numel() for weight in run.model.parameters()),
            "train_rows": len(run.train_data),
            "val_rows": sum(map(len, sets.values())),
            "sequences": sequences,
            "tokens": sequences * block_size,
            "each": f", on {world_size()} ranks" if world_size() > 1 else "",
            "last_lr": lr_at(max(0, max_steps - 1)),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "why": run.why,
        }
    )
    plumbing.print_wrapped(PLAN.format(**values))
    if run.changed:
        plumbing.print_wrapped(f"changed  {plumbing.change_words(run.changed)}")


def close_folder(run, ended):
    """Record how the run ended, and print what to type next."""
    run.batches = None
    if rank() > 0:
        return
    if run.saver.thread:
        run.saver.thread.join()
    run.clock.lap("save")
    if run.check:
        close_check(run)
    log_event(run, "end", "", ended=ended)
    run.json |= {"end": plumbing.now(), "ended": ended, "state": run.state}
    plumbing.write_json(run.folder.path / "run.json", run.json)
    if not ended.startswith("failed"):
        print0(f"{ended} at step {run.state['step']:,}; {best_words(run.state)}")
    seconds = run.state["seconds"]
    spent = ", ".join(f"{kind} {value:.1f}" for kind, value in seconds.items())
    print0(f"{sum(seconds.values()):.1f} s: {spent}")
    if run.wandb:
        run.wandb.finish(int(ended.startswith("failed")))
    name = plumbing.shown(run.folder.path)
    if report and not ended.startswith("failed"):
        try:
            import report as drawing

            drawing.main([name])
        except ModuleNotFoundError as error:
            print0(f"no report ({error})")
    if ended.startswith("stopped by"):
        print0("to resume, type the same command again")
    print0(plumbing.to_paste("sample.py", name))
    print0(plumbing.to_paste("report.py", name))


def float64(number):
    """A scalar in float64; on MPS, which has none, on the CPU."""
    number = torch.as_tensor(number).detach()
    return (number.cpu() if number.device.type == "mps" else number).double()


def mean_over_ranks(sums):
    """{name: scalar}, summed over the ranks and divided by their number, by one message."""
    if world_size() == 1:
        return dict(sums)
    means = total(torch.stack([part.float() for part in sums.values()])) / world_size()
    return dict(zip(sums, means.unbind(), strict=True))


if __name__ == "__main__":
    plumbing.exit_process(main())

"""An honest training loop: read it in one sitting, fork it, trust it.

On one device:
    python train.py config/shakespeare.py
    python train.py config/shakespeare.py --batch_size=16 --accum_steps=4 --out_dir=out/mine
On several (4 GPUs of one machine; with --device=cpu, 4 processes):
    torchrun --standalone --nproc_per_node=4 train.py config/shakespeare.py

The same command goes on where the run stopped, bit for bit. `--help` lists every knob below.
"""

import bisect
import math
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts

import numpy as np
import torch

import machine
import prepare_data
import record
from configurator import configure, fail
from machine import agree, from_rank0, local, rank, say, shard_like, sum_over_ranks, world_size
from model import GPT, GPTConfig, configure_optimizers
from record import log_event

# The run, and the text it learns
out_dir = "out/run"  # one folder a run: run.json, metrics.jsonl, checkpoints
resume = "auto"  # auto: go on with the run in out_dir, or start one; never; or a checkpoint's path
dataset = "shakespeare"  # data/NAME; prepare_data.py makes it where it is missing
data_dir = "data"  # the folder of the datasets
offline_dataset = "pydoc"  # takes the place of a download where there is no network; "" = stop

# The model
block_size = 64  # context, tokens, [1, inf)
n_layer = 1  # [1, inf)
n_head = 4  # [1, inf)
n_embd = 128  # width, an even multiple of n_head, [1, inf)
dropout = 0.0  # share of activations, [0, 1); 0 = off
label_smoothing = 0.0  # in training only, [0, 1); 0 = off
grad_checkpoint = False  # compute activations again in the backward pass: less memory, more time

# The batch: a step sees batch_size * accum_steps * ranks sequences
batch_size = 32  # sequences in a micro-batch, [1, inf)
accum_steps = 1  # micro-batches in a step, [1, inf)
seed = 1337  # of weights, batches and dropout, [0, 4294967295]
num_workers = 0  # processes that read batches ahead, [0, inf); 0 = the training process reads
prefetch_factor = 2  # batches that each worker keeps ready, [1, inf)

# The optimizer
optimizer = "adamw"  # adamw | sgd | momentum | muon
momentum = 0.95  # of momentum and muon, [0, 1)
weight_decay = 0.1  # on matrices only, [0, inf)
beta1 = 0.9  # of adamw, [0, 1)
beta2 = 0.95  # of adamw, [0, 1)
grad_clip = 1.0  # largest norm of the gradient, [0, inf); 0 = off
ema_decay = 0.0  # average the weights and evaluate the average, [0, 1); 0 = off

# The learning rate: warmup, then by schedule
schedule = "cosine"  # cosine | linear | constant | step | onecycle | wsd
peak_lr = 1e-3  # (0, inf)
min_lr = 1e-4  # where cosine, linear, onecycle and wsd end, and the floor of step, [0, inf)
warmup_steps = 100  # [0, inf)
max_steps = 2000  # [1, inf)
decay_steps = 0  # steps the schedule spans, [0, inf); 0 = max_steps as of the run's first start
cooldown_steps = 0  # of wsd: length of the final descent, [0, inf); 0 = a fifth of decay_steps
step_size = 500  # of step: steps between two drops, [1, inf)
gamma = 0.5  # of step: the factor of a drop, (0, 1]
plateau_factor = 1.0  # multiplies the rate whenever evaluations stall, (0, 1]; 1 = off
plateau_patience = 3  # evaluations without improvement before it does, [1, inf)

# How it is computed
device = "auto"  # auto, cpu, cuda, cuda:1 or mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
compile = "auto"  # torch.compile
deterministic = "auto"  # the same bits every time; auto = wherever torch can
shard = False  # with several ranks, each keeps a share of weights, gradients, moments (FSDP2)
offload = False  # with shard: in the host's memory instead of the GPU's
hang_minutes = 30.0  # with several ranks: how long one may keep the others waiting, (0, inf)

# Looking: logging, evaluation, early stopping
log_interval = 10  # steps between two lines, [1, inf); metrics.jsonl has a row for every step
eval_interval = 250  # steps, [0, inf); 0 = only before the first and after the last
sample_interval = 0  # steps between two samples of text, [0, inf); 0 = one at the end
report = True  # draw report.png and write report.md at the end
wandb_log = False  # copy the rows of metrics.jsonl to Weights & Biases, from a process of its own
wandb_project = "honest-loop"
wandb_run_name = ""  # "" = the name of out_dir
dollars_per_hour = 0.0  # of one device, for the report, [0, inf); 0 = not reckoned
patience = 0  # evaluations without improvement before the run stops, [0, inf); 0 = off
min_delta = 0.0  # nats by which an evaluation must improve to count as one that did, [0, inf)

# Keeping: checkpoints
save_interval = 500  # steps, [0, inf); 0 = only before the first and after the last
save_minutes = 0.0  # minutes after which one more is kept, [0, inf); 0 = off
keep_last = 2  # checkpoints kept, besides best.pt, [1, inf)
milestone_interval = 0  # steps between two that are kept for good, [0, inf); 0 = off

# Trouble: what the run does when numbers go wrong
max_skipped = 10  # updates in a row that are skipped (loss or gradient not finite) before it rolls back, [1, inf)
max_rollbacks = 3  # before it gives up, [0, inf)
spike_sigma = 0.0  # deviations above the mean at which a loss rolls back too, [0, inf); 0 = off

# The loop's whole state: saved whole, restored whole. A new loop variable goes here, nowhere else.
FRESH_STATE = {
    "step": 0,  # finished updates, skipped ones too
    "batch_index": 0,  # the next global batch; ahead of `step` after a rollback
    "first_step": 0,  # where this run began: past 0 where resume named another run's checkpoint
    "tokens": 0,
    "batch_size": 0,  # the micro-batch: halved where memory ran out
    "accum_steps": 0,
    "best_val_loss": math.inf,
    "best_step": 0,
    "loss_to_beat": math.inf,  # by min_delta, for the next two to begin at 0 again
    "evals_since_best": 0,
    "evals_on_plateau": 0,
    "lr_factor": 1.0,  # of plateau_factor
    "rollbacks": 0,
    "skipped": 0,
    "skips_in_row": 0,
    "zeros_in_row": 0,  # gradient norms of exactly 0
    "high_in_row": 0,  # losses above the first
    "first_loss": math.inf,
    "loss_mean": 0.0,  # of spike_sigma: over the last hundred steps or so
    "loss_var": 0.0,
    "loss_count": 0,
}


def lr_at(step):
    """Learning rate of the update that comes after `step` finished ones: a pure function of the step.

    Linear warmup, then `schedule` down to min_lr at decay_steps: cosine (Loshchilov & Hutter 2017),
    linear, constant, step, onecycle (Smith & Topin 2018: cosine both ways), wsd (Hu et al. 2024).
    """
    total = decay_steps or max_steps
    # 1) up to the peak; onecycle starts at a 25th of it and rises along a cosine
    if step < warmup_steps:
        if schedule == "onecycle":
            return peak_lr + (peak_lr / 25 - peak_lr) * half_cosine(step / warmup_steps)
        return peak_lr * (step + 1) / warmup_steps
    # 2) shapes that know no end
    if schedule == "constant":
        return peak_lr
    if schedule == "step":
        return max(min_lr, peak_lr * gamma ** ((step - warmup_steps) // step_size))
    # 3) down to the minimum, where it stays
    start = warmup_steps
    if schedule == "wsd":
        start = max(start, total - (cooldown_steps or total // 5))
    if step >= total:
        return min_lr
    done = max(0, step - start) / (total - start)
    fall = 1 - done if schedule in ("linear", "wsd") else half_cosine(done)
    return min_lr + (peak_lr - min_lr) * fall


def half_cosine(done):
    """From 1 at done = 0 to 0 at done = 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


# ---- the batch -----------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset):
    """Global batch i of a split as a pure function of (seed, i): no loader state to save, or to lose.

    paths, width: flat token ids and their NumPy dtype; several files (or one path) are read as one.
    rows: of the `batch_rows` sequences of a global batch, those that this rank reads. With a seed,
    epoch e holds every window of block_size tokens once, permuted by (seed, e), cut at boundaries
    that (seed, e) shifts. With seed=None the windows lie in order, and what the last one repeats of
    the one before has target -100 (not counted).
    """

    def __init__(self, paths, width, block_size, batch_rows, rows, seed=None):
        self.paths = [paths] if isinstance(paths, (str, Path)) else paths
        self.width, self.block_size = width, block_size
        self.batch_rows, self.rows, self.seed = batch_rows, rows, seed
        sizes = [os.path.getsize(path) // np.dtype(width).itemsize for path in self.paths]
        self.ends = np.cumsum(sizes).tolist()  # of each file, in tokens of them all
        self.n_tokens = self.ends[-1]
        if seed is None:
            self.windows = math.ceil((self.n_tokens - 1) / block_size)
        else:
            self.windows = (self.n_tokens - block_size) // block_size  # room for any shift
        self.order = {}  # epoch -> where each of its windows begins

    def __len__(self):
        return math.ceil(self.windows / self.batch_rows)

    def starts(self, epoch):
        """Where each window of the epoch begins, in the order in which they are drawn."""
        if epoch not in self.order:
            # RandomState, not Generator: NumPy promises that its stream never changes
            random_state = np.random.RandomState([self.seed, epoch])
            shift = random_state.randint(self.block_size)
            self.order[epoch] = shift + random_state.permutation(self.windows) * self.block_size
            self.order.pop(epoch - 2, None)
        return self.order[epoch]

    def read(self, start):
        """The block_size + 1 tokens from each of `start` on, int64; a row may lie across files."""
        tokens = np.empty((len(start), self.block_size + 1), np.int64)
        opened = None
        for row in np.argsort(start).tolist():  # so that one file after the other is open
            at, filled = int(start[row]), 0
            n = bisect.bisect_right(self.ends, at)
            while filled <= self.block_size:
                if n != opened:
                    # opened anew for each batch: nothing to pickle, or to leak
                    ids = np.memmap(self.paths[n], self.width, mode="r").view(np.ndarray)
                    opened, begin = n, self.ends[n] - len(ids)
                part = ids[at + filled - begin :][: self.block_size + 1 - filled]
                tokens[row, filled : filled + len(part)] = part
                filled, n = filled + len(part), n + 1
        return tokens

    def __getitem__(self, index):
        """(tokens, targets), each int64 (rows, block_size); targets are the tokens one place on."""
        sequence = index * self.batch_rows + np.arange(self.rows.start, self.rows.stop)
        if self.seed is None:
            first_new = sequence[sequence < self.windows] * self.block_size
            start = np.minimum(first_new, self.n_tokens - 1 - self.block_size)
        else:
            epoch, place = np.divmod(sequence, self.windows)
            parts = [self.starts(e)[place[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
            start = np.concatenate(parts)
        window = torch.from_numpy(self.read(start))
        tokens, targets = window[:, :-1].clone(), window[:, 1:].clone()  # they must not overlap
        if self.seed is None:
            position = start[:, None] + np.arange(self.block_size)
            targets[torch.from_numpy(position < first_new[:, None])] = -100
        return tokens, targets


def open_split(folder, split, meta, batch_rows, rows, seed=None):
    """The Batches of a dataset's split; exits where it is too short for a single window."""
    names = prepare_data.shards(meta, split)
    paths = [f"{folder}/{name}" for name in names]
    batches = Batches(paths, meta["dtype"], block_size, batch_rows, rows, seed)
    if batches.n_tokens <= block_size or batches.windows < 1:
        fail(
            f"--block_size={block_size}: {names[0]} has {batches.n_tokens:,} tokens; expected a "
            f"smaller block_size, or a longer text"
        )
    return batches


def load_batches(batches, state, device):
    """An iterator over the global batches still to come; it leaves the global RNG alone."""
    workers = {"prefetch_factor": prefetch_factor, "worker_init_fn": machine.ignore_signals}
    first, count = state["batch_index"], max_steps - state["step"]
    return iter(
        torch.utils.data.DataLoader(
            batches,
            sampler=range(first, first + count),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),
            **(workers if num_workers else {}),
        )
    )


# ---- the step ------------------------------------------------------------------------------------


@dataclass
class Run:
    """What the next step depends on; with the random numbers, all that a checkpoint holds."""

    folder: Path
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler
    ema: dict  # name -> averaged weight; empty when off
    state: dict


class RunFailed(Exception):
    """The run cannot go on: exit 1, with what happened and what to do next in one line."""


def autocast(device):
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def train_step(model, run, tokens, targets, lr):
    """One update of the weights from one global batch. The host never waits for the device here.

    model: run.model, or its compiled form. tokens, targets: int64 (rows of this rank, block_size).
    Returns float32 (3,) on the device: mean loss of the global batch, norm of its gradient before
    clipping, and 1 if the update was skipped because one of these is not finite.
    """
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)  # 1: zero the gradients
        for group in optimizer.param_groups:
            group["lr"] = lr  # 2: learning rate
    loss = backward_within_memory(model, run, tokens, targets)  # 3, 4, 5
    weights = list(run.model.parameters())
    sum_over_ranks([loss] if shard else [weight.grad for weight in weights] + [loss])
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # 6: unscale, then clip
    grad_norm = machine.whole(torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf))
    grad_norm = grad_norm.to(loss.device)  # it is elsewhere with --offload=true
    skipped = (~(loss.isfinite() & grad_norm.isfinite())).float()
    for optimizer in run.optimizers:
        step_unless(skipped, optimizer)  # 7: step, and update the scaler
    run.scaler.update()
    for name, average in run.ema.items():
        weight = local(run.model.get_parameter(name)).detach()
        local(average).lerp_(weight, ((1 - ema_decay) * (1 - skipped)).to(weight.device))
    return torch.stack([loss, grad_norm, skipped])


def forward_backward(model, run, tokens, targets):
    """Operations 3 to 5 for each micro-batch. Returns this rank's share of the mean loss."""
    total, micro = 0.0, run.state["batch_size"]
    for x, y in zip(tokens.split(micro), targets.split(micro), strict=True):
        with autocast(x.device):
            _, loss = model(x, y)  # 3: forward, under autocast
        loss = loss / (run.state["accum_steps"] * world_size())  # 4: so that the sum is the mean
        run.scaler.scale(loss).backward()  # 5: backward
        total += loss.detach()
    return total


def backward_within_memory(model, run, tokens, targets):
    """forward_backward; where it does not fit, the same again with micro-batches of half the size."""
    state, device = run.state, tokens.device
    while True:
        before, loss = machine.torch_rng_state(device), None  # a step draws no other numbers
        try:
            loss = forward_backward(model, run, tokens, targets)
        except (RuntimeError, MemoryError) as error:
            if not machine.out_of_memory(error):
                raise
            if shard:  # the other ranks wait for this one, in the midst of a pass
                raise RunFailed(
                    "out of memory; what helps with --shard=true: a smaller --batch_size with a larger "
                    "--accum_steps, --grad_checkpoint=true, --offload=true"
                ) from error
        if not any(agree(loss is None)):
            return loss
        if state["batch_size"] == 1:
            raise RunFailed(
                "out of memory with a single sequence in a micro-batch; what helps: "
                "--grad_checkpoint=true, a smaller --block_size, --n_embd or --n_layer"
            )
        run.model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        machine.set_torch_rng_state(before, device)
        micro, accum = split_rows(len(tokens), state["batch_size"] // 2)
        state.update(batch_size=micro, accum_steps=accum)
        log_event(run.folder, state["step"], "out_of_memory", batch_size=micro, accum_steps=accum)


def split_rows(rows, most):
    """(micro-batch, accumulation steps) for `rows` sequences: the largest divisor up to `most`."""
    micro = max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)
    return micro, rows // micro


@torch.no_grad()
def step_unless(skipped, optimizer):
    """optimizer.step(), which where `skipped` is 1 leaves weights and moments as they are."""
    for group in optimizer.param_groups:  # torch would begin a momentum with the bad gradient
        for weight in group["params"] if group.get("momentum") else ():
            if "momentum_buffer" not in optimizer.state[weight]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    kept = [weight for group in optimizer.param_groups for weight in group["params"]]
    skipped = skipped.to(kept[0].device)
    if optimizer.defaults.get("fused"):  # fused kernels look at found_inf themselves
        optimizer.grad_scale, optimizer.found_inf = None, skipped
        optimizer.step()
        return
    kept += [tensor for moments in optimizer.state.values() for tensor in moments.values()]
    kept = [local(tensor) for tensor in kept]
    before = [tensor.clone() for tensor in kept]
    optimizer.step()
    for tensor, old in zip(kept, before, strict=True):
        tensor.copy_(torch.where(skipped.bool(), old, tensor))


@contextmanager
def averaged(run):
    """Within it the model has its averaged weights, where there are any."""

    @torch.no_grad()
    def swap():
        for name, average in run.ema.items():
            weight, average = local(run.model.get_parameter(name)), local(average)
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    swap()
    yield
    swap()


@torch.no_grad()
def evaluate(run, batches, device):
    """(mean loss in nats, share of right guesses) over the whole validation split.

    Fixed windows, eval mode, the averaged weights where there are any; never compiled, so that it is
    the same number either way. It draws no random number, so it cannot disturb training.
    """
    run.model.eval()
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(3, dtype=wide, device=device)  # loss, right guesses, targets
    with averaged(run):
        for first in range(0, len(batches), world_size()):
            index = min(first + rank(), len(batches) - 1)  # of one batch too many, none is counted
            tokens, targets = (t.to(device, non_blocking=True) for t in batches[index])
            with autocast(device):
                logits, loss = run.model(tokens, targets)
            counted = (targets != -100).sum() * (first + rank() < len(batches))
            right = (logits.argmax(-1) == targets).sum() * (counted > 0)
            totals += torch.stack([loss * counted, right, counted])
    run.model.train()
    sum_over_ranks([totals])
    loss, right, counted = totals.tolist()
    return loss / counted, right / counted


# ---- the checkpoint ------------------------------------------------------------------------------


def checkpoint_of(run, fixed, device):
    """Everything the next step depends on, and `fixed`: config, data, run. All ranks call it together."""
    return {
        "model": run.model.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "ema": run.ema,
        "state": dict(run.state),
        "rng": machine.from_all_ranks(machine.rng_state(device)),
        **fixed,
    }


@torch.no_grad()
def restore(run, checkpoint, device):
    """The reverse of checkpoint_of, whether it was sharded or is now."""
    for name, weight in run.model.state_dict().items():
        weight.copy_(shard_like(weight, checkpoint["model"][name]))
    for optimizer, saved in zip(run.optimizers, checkpoint["optimizer"], strict=True):
        # the groups as they are now: what the command line says of weight_decay is what counts
        groups = optimizer.state_dict()["param_groups"]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        moments = {
            index: {name: shard_like(weights[index], value) for name, value in moments.items()}
            for index, moments in saved["state"].items()
        }
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
    run.scaler.load_state_dict(checkpoint["scaler"])
    for name, average in run.ema.items():
        saved = checkpoint["ema"].get(name, checkpoint["model"][name])
        average.copy_(shard_like(average, saved))
    run.state.update(checkpoint["state"])
    if len(checkpoint["rng"]) == world_size():
        machine.set_rng_state(checkpoint["rng"][rank()], device)


def roll_back(run, trouble, recent, device):
    """Go back to the newest checkpoint that chance had no part in, and on past the data of the last of
    the `recent` rows.

    Raises RunFailed with a diagnosis where that cannot help, or has not helped `max_rollbacks` times.
    """

    def usable(checkpoint):
        then = checkpoint["state"]
        due = record.at_interval(then["step"], save_interval, then)
        return due and not then["skips_in_row"]

    state, bad = run.state, recent[-1]
    path = from_rank0(lambda: record.newest_valid(run.folder, usable)[0])
    if trouble == "zeros" or state["rollbacks"] == max_rollbacks or path is None:
        raise RunFailed(record.diagnosis(trouble, recent, state))
    kept = {key: state[key] for key in ("best_val_loss", "best_step", "skipped", "rollbacks")}
    checkpoint = record.load_checkpoint(path)
    restore(run, checkpoint, device)
    state |= kept | {"batch_index": bad["batch_index"] + 1}
    state["rollbacks"] += 1
    if rank() == 0:
        record.forget_after(run.folder, state["step"])
    why = {"why": record.TROUBLE[trouble], "at_step": bad["step"]}
    log_event(run.folder, state["step"], "rollback", **why, next_batch=state["batch_index"])


# ---- before the first step ------------------------------------------------------------------------


def model_config(vocab_size):
    """The GPTConfig that the knobs describe."""
    knobs = {f.name: globals()[f.name] for f in fields(GPTConfig) if f.name in globals()}
    return GPTConfig(vocab_size=vocab_size, **knobs)


def fresh_run(folder, vocab_size, device):
    """A run before its first step."""
    machine.seed_everything(seed)
    model = GPT(model_config(vocab_size))
    model = machine.shard(model, device, dtype, offload) if shard else model.to(device)
    return Run(
        folder=folder,
        model=model,
        optimizers=configure_optimizers(
            model, optimizer, peak_lr, weight_decay, beta1, beta2, momentum, device.type
        ),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == "float16"),
        ema={name: w.detach().clone() for name, w in model.named_parameters() if ema_decay},
        state=FRESH_STATE | {"batch_size": batch_size, "accum_steps": accum_steps},
    )


def settle(saved, vocab_size, device):
    """Settle what was left open: as in the run so far, or by what the hardware really has.

    Sets the globals dtype, compile, deterministic, decay_steps, batch_size, accum_steps. Returns
    {knob: why} and the peak (FLOP/s of this device, where the figure is from).
    """
    global dtype, compile, deterministic, decay_steps, batch_size, accum_steps
    open_knobs = [key for key in ("dtype", "compile") if globals()[key] == "auto"]
    if saved:
        then = saved["run"]
        globals().update({key: then[key] for key in open_knobs})
        decay_steps = decay_steps or saved["config"]["decay_steps"]
        # The product counts, not its factors: another number of ranks splits it anew, and a
        # micro-batch that memory has halved stays so.
        if then["world_size"] != world_size():
            if then["global_batch"] % world_size():
                fail(
                    f"the {then['global_batch']} sequences of this run's step do not divide by "
                    f"{world_size()} ranks; take a number of ranks that divides them"
                )
            rows = then["global_batch"] // world_size()
            batch_size, accum_steps = split_rows(rows, batch_size)
        elif all(saved["config"][k] == globals()[k] for k in ("batch_size", "accum_steps")):
            batch_size, accum_steps = saved["state"]["batch_size"], saved["state"]["accum_steps"]
    decay_steps = decay_steps or max_steps
    dtype, why_dtype = machine.choose_dtype(dtype, device)
    peak = from_rank0(machine.peak_flops, device, dtype)
    with torch.device("meta"):  # a model of no weight
        flops = GPT(model_config(vocab_size)).flops_per_token()
    work = flops * batch_size * accum_steps * block_size * max_steps
    compile, why_compile = machine.choose_compile(compile, device, work / peak[0] if peak[0] else 0)
    deterministic = device.type != "mps" if deterministic == "auto" else deterministic
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and hides nothing
    why = {"dtype": why_dtype, "compile": why_compile}
    if saved:
        why |= dict.fromkeys(open_knobs, "as in the run so far")
    return why, peak


def rehearse(run, batches, device):
    """One forward and backward pass that changes nothing: it compiles, and it finds out before the
    first step whether a batch fits. Returns the model to train with, compiled or not."""
    tokens, targets = (t.to(device) for t in batches[0])
    try:
        model = torch.compile(run.model, dynamic=False) if compile else run.model
        backward_within_memory(model, run, tokens, targets)
    except RunFailed:
        raise
    except Exception as error:
        if not compile:
            raise
        say(f"torch.compile failed; going on without ({str(error).strip().splitlines()[0][:200]})")
        globals()["compile"], model = False, run.model
        run.model.zero_grad(set_to_none=True)
        backward_within_memory(model, run, tokens, targets)
    run.model.zero_grad(set_to_none=True)
    return model


# ---- the run -------------------------------------------------------------------------------------


def every(interval, step):
    return interval > 0 and step % interval == 0


def main():
    clock = record.Clock()
    config, _ = configure(globals())
    if n_embd % n_head or n_embd // n_head % 2:
        fail(f"--n_embd={n_embd}: expected an even multiple of --n_head={n_head}")
    if warmup_steps > max_steps:
        fail(f"--warmup_steps={warmup_steps}: expected no more than --max_steps={max_steps}")
    if min_lr > peak_lr:
        fail(f"--min_lr={min_lr}: expected no more than --peak_lr={peak_lr}")
    if shard and "WORLD_SIZE" not in os.environ:
        fail(
            "--shard=true: expected several ranks; begin with torchrun --nproc_per_node=2 train.py"
        )
    if offload and not shard:
        fail("--offload=true: expected --shard=true with it")
    machine.join_ranks(hang_minutes)
    where, folder, signals = machine.choose_device(device), Path(out_dir), machine.Signals()

    # ---- what there is: a run to go on with, a text to learn
    path = from_rank0(record.find_run, folder, resume, max_steps, patience)
    saved = record.load_checkpoint(path) if path else None
    begun_with = saved and saved["data"]["name"]
    data_name, data_folder, meta = from_rank0(
        prepare_data.dataset_of_run, dataset, offline_dataset, data_dir, begun_with, say
    )
    data = {"name": data_name, "fingerprint": prepare_data.fingerprint(meta), "meta": meta}

    # ---- the batch; the model, its optimizer and all that changes with them
    why, peak = settle(saved, meta["vocab_size"], where)
    identity = record.identity_of(globals(), data, where)
    inexact = record.compare(saved, identity, folder) if saved else {}
    rows, eval_rows = batch_size * accum_steps, config["batch_size"]
    mine = range(rank() * rows, (rank() + 1) * rows)
    train_batches = open_split(data_folder, "train", meta, rows * world_size(), mine, seed)
    val_batches = open_split(data_folder, "val", meta, eval_rows, range(eval_rows))
    run = fresh_run(folder, meta["vocab_size"], where)
    state = run.state
    if saved:
        record.compare_shapes(saved["model"], run.model.state_dict(), folder)

    # ---- all is checked: from here on files are written
    config["decay_steps"] = decay_steps
    fixed = {"config": config, "data": data, "run": identity}
    from_rank0(record.open_run, run, fixed, where, path, inexact)
    record.print_plan(
        config | identity, meta, run.model, len(train_batches), where, why, peak, path
    )
    saver = record.Saver(folder, keep_last, save_interval)
    max_flops = (peak[0] or math.nan) * world_size()
    global_tokens = rows * world_size() * block_size

    def look():
        """Evaluate, and write it down. True where this is the best so far."""
        val_loss, val_accuracy = evaluate(run, val_batches, where)
        best = record.note_evaluation(val_loss, state, config)
        row = {"kind": "eval", "step": state["step"], "val_loss": val_loss}
        row["val_bpb"] = val_loss / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
        row |= {"val_accuracy": val_accuracy, "best_val_loss": state["best_val_loss"]}
        record.write_rows(folder, [row])
        record.print_evaluation(row, max_steps, best)
        clock.lap("evaluate")
        return best

    def keep(*names):
        """Begin to save under these names; say so where the save before this one failed."""
        checkpoint = checkpoint_of(run, fixed, where)
        if error := saver.save(checkpoint, names):
            log_event(folder, state["step"], "save_failed", error=error)
        clock.lap("save")

    def keep_surely(name):
        """Save and wait until it is on the disk; all ranks learn whether it is."""
        for attempt in range(3):
            if not any(agree((error := saver.join()) is not None)):
                return
            time.sleep(attempt)
            keep(name)
        raise RunFailed(
            f"{name} could not be saved: {error}; with that in order, the same command goes on from "
            f"the newest checkpoint in {folder}"
        )

    ended, code, window, recent, batches = None, 1, [], [], None
    clock.lap("start")
    try:
        # ---- a rehearsal, then the state; the random numbers last: from here on only a step draws any
        step_model = rehearse(run, train_batches, where)
        micro = {key: state[key] for key in ("batch_size", "accum_steps")}
        identity["compile"] = compile
        machine.seed_everything(seed + rank())
        if saved:
            restore(run, saved, where)
            state.update(micro)
            log_event(folder, state["step"], "resume", checkpoint=path.name)
            if inexact:
                log_event(folder, state["step"], "inexact_resume", **inexact)
        batches = load_batches(train_batches, state, where)
        clock.lap("compile")
        if not saved:
            look()
        if not saved or path.parent.resolve() != folder.resolve():
            state["first_step"], first = state["step"], record.checkpoint_name(state["step"])
            keep(first, "best.pt")
            keep_surely(first)
        saved = None  # gives its memory back
        record.print_header(max_steps)
        saved_at = time.monotonic()

        while not ended:
            # ==== training: all that changes the run happens between this line ... ================
            lr = lr_at(state["step"]) * state["lr_factor"]
            waited = time.perf_counter()
            tokens, targets = (t.to(where, non_blocking=True) for t in next(batches))
            waited = time.perf_counter() - waited
            result = train_step(step_model, run, tokens, targets, lr)
            state["step"] += 1
            state["batch_index"] += 1
            state["tokens"] += global_tokens
            # ==== ... and this one; what follows only looks, or acts on what it saw ===============

            step, last = state["step"], state["step"] == max_steps
            row = {"step": step, "lr": lr, "data_ms": 1000 * waited, "tokens": state["tokens"]}
            row["batch_index"] = state["batch_index"] - 1
            row["epoch"] = state["batch_index"] * train_batches.batch_rows / train_batches.windows
            window.append((row, result))
            late = save_minutes > 0 and time.monotonic() - saved_at > 60 * save_minutes
            stop, asked, orphaned = agree(
                signals.stop, signals.take_save() or late, signals.orphaned()
            )
            looking, keeping = last or every(eval_interval, step), every(milestone_interval, step)
            saving = last or stop or orphaned or asked or keeping or every(save_interval, step)
            if not (looking or saving or every(log_interval, step)):
                continue

            reports = torch.stack([result for _, result in window]).tolist()  # waits for the device
            rows, trouble = record.finish_rows(
                window, reports, clock.lap("train"), global_tokens, run, max_flops, config
            )
            window, recent = [], (recent + rows)[-max_skipped:]
            record.write_rows(folder, rows)
            if trouble:
                saver.join()
                roll_back(run, trouble, recent, where)
                batches = load_batches(train_batches, state, where)
                clock.lap("save")
                continue
            if last or every(log_interval, step):
                record.print_line(rows[-1], max_steps)
            best = looking and look()
            if last:
                ended, code = "finished", 0
            elif stop:
                ended, code = f"stopped by {signal.Signals(stop).name}", 128 + stop
            elif orphaned:
                ended = "left alone by its launcher"
            elif patience and state["evals_since_best"] >= patience:
                ended, code = f"stopped early: {patience} evaluations without improvement", 0
            if every(sample_interval, step) or ended and not code:
                with averaged(run), autocast(where):
                    record.print_sample(run, meta)  # all ranks: where sharded, it takes all
                clock.lap("evaluate")
            names = [record.checkpoint_name(step)] + [f"milestone_{step:08}.pt"] * keeping
            if not (ended or asked) and (not saving or state["skips_in_row"]):
                names = []  # not due, or on the way into trouble
            names += ["best.pt"] * bool(best)
            if names:
                keep(*names)
                saved_at = time.monotonic()
        keep_surely(record.checkpoint_name(state["step"]))
    except Exception as error:
        why = str(error) if isinstance(error, RunFailed) else machine.explain(error)
        ended, code = why and f"failed: {why}", 1
        if not why:
            raise
    finally:
        machine.stop_workers(batches)
        saver.join()
        if rank() == 0:
            record.close_run(folder, ended, clock.seconds, state, report)
    return code


if __name__ == "__main__":
    sys.exit(main())

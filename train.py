"""An honest training loop. Learn: docs/lessons.md, docs/questions.md. In trouble: docs/trouble.md.

On one device:
    python train.py config/shakespeare.py
    python train.py config/shakespeare.py --batch_size=16 --accum_steps=4 --out_dir=out/mine
On several (4 GPUs of one machine; with --device=cpu, 4 processes):
    torchrun --standalone --nproc_per_node=4 train.py config/shakespeare.py

The same command again resumes the run where it stopped, bit for bit. Every global above FRESH_STATE
is a flag (`--help`); its comment gives the unit, the value for "off", and the allowed [range] or
a | b. To read the loop, start with train() near the end, then train_step(), then main().
"""

import copy
import math
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import prepare_data
from model import build_model, configure_optimizers, cross_entropy
from plumbing import audit, checkpoints, console, devices, ema, identity, metrics, peaks, ranks, rng
from plumbing.configurator import configured, fail
from plumbing.dataset import fingerprint, open_tokens
from plumbing.failures import RunFailed, explain
from plumbing.memory import training_memory
from plumbing.ranks import agree, from_rank0, rank, say, world_size
from plumbing.restorable import refuse_what_is_lost
from plumbing.resume import continue_from, find_checkpoint, is_finished
from plumbing.retry import rehearse, retry_on_oom
from plumbing.run_folder import RunFolder
from plumbing.signals import Signals, ignore_signals, start_workers, stop_workers
from plumbing.skipping import Buffers, step_unless
from plumbing.spikes import is_spike
from plumbing.startup import leave, speed_up_start_and_exit
from plumbing.windows import OrderedWindows, ShuffledWindows
from sample import print_sample

# The run, and the text it learns
out_dir = "out/run"  # one folder a run: run.json, metrics.jsonl, checkpoints
resume = "auto"  # auto: resume what is in out_dir, or start; never; or the path of a checkpoint
dataset = "shakespeare"  # data/NAME; prepare_data.py makes it where it is missing
data_dir = "data"  # folder of the datasets
offline_dataset = "pydoc"  # used where there is no network to download from; "" = stop instead

# The model
block_size = 64  # context, tokens, [1, inf)
n_layer = 1  # [1, inf)
n_head = 4  # [1, inf)
n_embd = 128  # width, an even multiple of n_head, [1, inf)
dropout = 0.0  # share of activations, [0, 1); 0 = off
label_smoothing = 0.0  # in training only, [0, 1); 0 = off
n_future_tokens = 1  # that each position learns to predict, [1, inf); 1 = only the next
grad_checkpoint = False  # recompute activations in the backward pass: less memory, more time

# The batch: a step sees batch_size * accum_steps * ranks sequences
batch_size = 32  # sequences in a micro-batch, [1, inf)
accum_steps = 1  # micro-batches in a step, [1, inf)
seed = 1337  # of weights, batches and dropout, [0, 4294967295]
num_workers = 0  # processes that read batches ahead, [0, inf); 0 = the training process reads
prefetch_factor = 2  # batches that each worker keeps ready, [1, inf)

# The optimizer
optimizer = "adamw"  # adamw | adam | sgd | momentum | muon
momentum = 0.95  # of momentum and muon, [0, 1)
weight_decay = 0.1  # of matrices and embeddings, not of vectors, [0, inf)
beta1 = 0.9  # of adamw and adam, [0, 1)
beta2 = 0.95  # of adamw and adam, [0, 1)
grad_clip = 1.0  # largest norm of the gradient, [0, inf); 0 = off
ema_decay = 0.0  # average the weights and evaluate the average, [0, 1); 0 = off

# The learning rate: warmup, then by schedule
schedule = "cosine"  # cosine | linear | constant | step | onecycle | wsd
peak_lr = 1e-3  # (0, inf)
min_lr = 1e-4  # where cosine, linear, onecycle and wsd end, and the floor of step, [0, inf)
warmup_steps = 100  # [0, inf)
max_steps = 2000  # [1, inf)
decay_steps = 0  # steps the schedule spans, [0, inf); 0 = max_steps as of the run's first start
cooldown_steps = 0  # schedule=wsd: length of the final decay, [0, inf); 0 = a fifth of decay_steps
step_size = 500  # schedule=step: steps between drops, [1, inf)
gamma = 0.5  # schedule=step: factor applied at each drop, (0, 1]
plateau_factor = 1.0  # multiplies the rate when the validation loss stalls, (0, 1]; 1 = off
plateau_patience = 3  # evaluations without improvement before plateau_factor applies, [1, inf)

# How it is computed
device = "auto"  # auto, cpu, cuda, cuda:1 or mps
dtype = "auto"  # auto | float32 | bfloat16 | float16
compile = "auto"  # torch.compile; auto = where the run is long enough to gain from it
deterministic = "auto"  # deterministic algorithms; auto = on, except on mps
shard = False  # with several ranks, each keeps a share of weights, gradients, moments (FSDP2)
offload = False  # with shard: keep them in host memory instead of GPU memory
hang_minutes = 30.0  # with several ranks: timeout when one keeps the others waiting, (0, inf)

# Logging, evaluation, early stopping
log_interval = 10  # steps between console lines, [1, inf); metrics.jsonl has a row for every step
eval_interval = 250  # steps, [0, inf); 0 = only before the first and after the last
eval_tokens = 0  # tokens to evaluate, from the start of the validation split, [0, inf); 0 = all
sample_interval = 0  # steps between text samples, [0, inf); 0 = only the one at the end
report = True  # draw report.png and write report.md at the end
wandb_log = False  # copy the rows of metrics.jsonl to Weights & Biases, from a process of its own
wandb_project = "honest-loop"
wandb_run_name = ""  # "" = the name of out_dir
dollars_per_hour = 0.0  # of one device, for the report, [0, inf); 0 = device-hours alone
patience = 0  # evaluations without improvement before the run stops, [0, inf); 0 = off
min_delta = 0.0  # nats by which an evaluation must improve to count, [0, inf)

# Checkpoints
save_interval = 500  # steps, [0, inf); 0 = only before the first and after the last
save_minutes = 0.0  # also save when the last save is this many minutes old, [0, inf); 0 = off
keep_last = 2  # checkpoints kept, besides best.pt, [1, inf)
milestone_interval = 0  # steps between checkpoints that are never deleted, [0, inf); 0 = off

# When numbers go wrong
max_skipped = 10  # consecutive skipped (not finite) updates before a rollback, [1, inf)
max_rollbacks = 3  # rollbacks before the run gives up, [0, inf)
spike_sigma = 0.0  # roll back at a loss this many deviations above its mean, [0, inf); 0 = off
audit_interval = 0  # steps between those computed twice and compared bitwise, [0, inf); 0 = off

# Every variable of the loop, saved and restored together. A new one belongs here and nowhere else.
FRESH_STATE = {
    "step": 0,  # finished updates, including skipped ones
    "sequences": 0,  # index of the next training sequence; a rollback does not reset it
    "tokens": 0,  # trained on so far
    "micro_batch": 0,  # sequences per forward pass: batch_size, halved whenever memory runs out
    "eval_micro_batch": 0,  # the same for evaluation
    "first_step": 0,  # where this run began; not 0 if it began from another run's checkpoint
    "best_val_loss": math.inf,
    "best_step": 0,
    "loss_to_beat": math.inf,  # by min_delta; an evaluation that does not increments the next two
    "evals_since_best": 0,
    "evals_on_plateau": 0,
    "lr_factor": 1.0,  # product of the plateau_factors so far
    "rollbacks": 0,
    "skipped": 0,
    "skips_in_row": 0,
    "zeros_in_row": 0,  # gradient norms of exactly 0
    "high_in_row": 0,  # losses above the first one
    "first_loss": math.inf,
    "loss_mean": 0.0,  # running, for spike_sigma
    "loss_var": 0.0,
    "loss_count": 0,
}


def lr_at(step):
    """Learning rate of update `step` (the first is 0): a pure function of the step.

    Linear warmup, then `schedule` down to min_lr at decay_steps: cosine (Loshchilov & Hutter 2017),
    linear, constant, step, onecycle (Smith & Topin 2018: cosine both ways), wsd (Hu et al. 2024).
    """
    total = decay_steps or max_steps
    # 1) up to the peak; onecycle starts at a 25th of it and rises along a cosine
    if step < warmup_steps:
        if schedule == "onecycle":
            return peak_lr + (peak_lr / 25 - peak_lr) * half_cosine(step / warmup_steps)
        return peak_lr * (step + 1) / warmup_steps
    # 2) schedules without an end
    if schedule == "constant":
        return peak_lr
    if schedule == "step":
        return max(min_lr, peak_lr * gamma ** ((step - warmup_steps) // step_size))
    # 3) down to the minimum, where it stays
    decay_start = warmup_steps
    if schedule == "wsd":
        decay_start = max(decay_start, total - (cooldown_steps or total // 5))
    if step >= total:
        return min_lr
    done = max(0, step - decay_start) / (total - decay_start)
    fall = 1 - done if schedule in ("linear", "wsd") else half_cosine(done)
    return min_lr + (peak_lr - min_lr) * fall


def half_cosine(done):
    """From 1 at done = 0 to 0 at done = 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def rows_at(step):
    """Sequences that update `step` sees, on all ranks together: a pure function of the step too."""
    return batch_size * accum_steps * world_size()


# ---- the batch -----------------------------------------------------------------------------------


def open_dataset(saved):
    """(training data, validation data, facts): two datasets, and what a checkpoint keeps of them.

    `train_data[first, count]` is a batch, a pure function of (seed, first, count), so there is no
    loader state to save. saved: the checkpoint to resume from, or None. Exits with 2 on bad data.
    """
    find = partial(prepare_data.dataset_of_run, data_dir=data_dir, block_size=block_size, say=say)
    name, folder, meta = from_rank0(find, dataset, offline_dataset, saved and saved["data"]["name"])
    train_data = ShuffledWindows(open_tokens(folder, meta, "train"), block_size, seed)
    val_data = OrderedWindows(open_tokens(folder, meta, "val"), block_size, eval_tokens)
    return train_data, val_data, {"name": name, "fingerprint": fingerprint(meta), "meta": meta}


def batches_to_come(state):
    """(first sequence, count) of this rank's part of each batch from here on."""
    first = state["sequences"]
    for step in range(state["step"], max_steps):
        yield ranks.share(first, rows_at(step))
        first += rows_at(step)


def load_batches(run):
    """An iterator over the batches to come, read ahead by num_workers processes."""
    loader = torch.utils.data.DataLoader(
        run.train_data,
        sampler=batches_to_come(run.state),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        worker_init_fn=ignore_signals,
        pin_memory=run.device.type == "cuda",
        generator=torch.Generator(),  # or it would draw a seed from the global generator
    )
    return start_workers(loader)


# ---- the step ------------------------------------------------------------------------------------


@dataclass
class Run:
    """What the next step depends on."""

    folder: RunFolder
    device: torch.device
    train_data: torch.utils.data.Dataset
    val_data: torch.utils.data.Dataset
    facts: dict  # what every checkpoint says of the run: "config", "data", "run" (its identity)
    model: torch.nn.Module
    optimizers: list
    groups: list  # param_groups as built; a resume applies only what changed in them since
    scaler: torch.amp.GradScaler
    ema: dict  # name -> averaged weight; empty when off
    state: dict
    batches: object = ()  # an iterator over the batches to come
    max_flops: float = math.nan  # peak of all devices together, FLOP/s

    def checkpoint(self):
        """All that the next step depends on, and what the run is. A collective call."""
        pairs = zip(self.optimizers, self.groups, strict=True)
        return {
            "model": self.model.state_dict(),
            "optimizer": [each.state_dict() | {"built": groups} for each, groups in pairs],
            "scaler": self.scaler.state_dict(),
            "ema": self.ema,
            "state": self.state,
            "rng": ranks.from_all_ranks(rng.rng_state(self.device)),
            **self.facts,
        }


def autocast(device):
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def train_step(model, run, inputs, targets, lr):
    """One update, in seven operations. The host waits only in an optimizer that is not fused.

    model: run.model or its compiled form. inputs, targets: this rank's sequences, on the device.
    Returns scalars: the mean loss of the global batch, its gradient norm before clipping, and 1.0 if
    either is not finite and the update was skipped. A key added here becomes a field of every row of
    metrics.jsonl, a column of the console and a curve of the report; rank 0's value is taken.
    """
    run.model.zero_grad(set_to_none=True)  # 1: zero the gradients
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr  # 2: set the learning rate
    buffers = Buffers(run.model)  # a copy of BatchNorm's statistics and the like; GPT has none
    (n_targets,) = ranks.sum_over_ranks([(targets.long() != -100).sum()])  # in the global batch
    compute = partial(forward_backward, model, run, inputs, targets, n_targets)
    loss = retry_on_oom(run, compute, "micro_batch")
    weights = list(run.model.parameters())
    gradients = [] if shard else [weight.grad for weight in weights if weight.grad is not None]
    ranks.sum_over_ranks([*gradients, loss])  # with shard, FSDP2 has summed the gradients
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # 6: unscale, then clip
    grad_norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf)
    grad_norm = ranks.whole(grad_norm).to(loss.device)  # on the CPU with --offload=true
    skipped = (~(loss.isfinite() & grad_norm.isfinite())).float()
    for optimizer in run.optimizers:
        step_unless(skipped, optimizer)  # 7: step, and update the scaler
    run.scaler.update()
    buffers.finish_step(skipped)
    ema.update(run, ema_decay, skipped)
    return {"loss": loss, "grad_norm": grad_norm, "skipped": skipped}


def forward_backward(model, run, inputs, targets, n_targets):
    """Operations 3 to 5 for each micro-batch. Returns what this rank adds to the mean loss."""
    total = 0.0
    micro_batch = run.state["micro_batch"]
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True):
        with autocast(x.device):
            loss = model(x, y)  # 3: forward, under autocast
        n = (y.long() != -100).sum()
        loss = torch.where(n > 0, loss, 0) / (n_targets / n)  # 4: all sum up to the mean
        run.scaler.scale(loss).backward()  # 5: backward
        total += loss.detach()
    return total


# ---- evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run):
    """{"val_loss": nats, "val_accuracy": share of right predictions, "val_tokens": how many}.

    On fixed windows, in eval mode, with the EMA weights if ema_decay is on; never compiled, so that
    the result does not depend on --compile. Training is unaffected: modes and random state return.
    """
    with ema.evaluating(run):
        totals = retry_on_oom(run, partial(sum_losses, run), "eval_micro_batch")
    ranks.sum_over_ranks([totals])
    loss, right, counted = totals.tolist()
    return {"val_loss": loss / counted, "val_accuracy": right / counted, "val_tokens": int(counted)}


def sum_losses(run):
    """Sums over this rank's share of the validation data: [loss, right predictions, targets]."""
    where = "cpu" if run.device.type == "mps" else run.device  # MPS has no float64
    totals = torch.zeros(3, dtype=torch.float64, device=where)
    size = run.state["eval_micro_batch"]
    for first in range(0, len(run.val_data), size * world_size()):
        mine = first + size * rank()
        has_rows = mine < len(run.val_data)  # if not, only take part: FSDP needs every rank
        mine = mine if has_rows else first
        batch = run.val_data[mine, min(size, len(run.val_data) - mine)]
        inputs, targets = (devices.upload(tensor, run.device) for tensor in batch)
        with autocast(run.device):
            logits = run.model(inputs)
            loss = cross_entropy(logits, targets, label_smoothing=0.0, reduction="sum")
        counted = (targets.long() != -100).sum() * has_rows
        right = (logits.argmax(-1) == targets).sum() * has_rows
        totals += torch.stack([loss * has_rows, right, counted]).to(where)
    return totals


def record_evaluation(run, table):
    """Evaluate and log the result. Returns whether it is the best so far."""
    state = run.state
    meta = run.facts["data"]["meta"]
    numbers = evaluate(run)
    is_best = count_evaluation(numbers["val_loss"], state)
    best = {"best_val_loss": state["best_val_loss"]}
    row = {"kind": "eval", "step": state["step"], **numbers, **best}
    if not eval_tokens or row["val_tokens"] + 1 == meta.get("val_tokens"):  # the whole split
        row.pop("val_tokens", None)
        if "val_bytes" in meta:
            row["val_bpb"] = row["val_loss"] / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    run.folder.write_rows([row])
    table.print_evaluation(row, is_best)
    return is_best


def count_evaluation(val_loss, state):
    """Count for early stopping and plateau_factor. Returns whether this is the best so far.

    The evaluation after the last step counts only if eval_interval asks for it: a run extended
    later must take the same course as one that was that long from the start.
    """
    is_best = val_loss < state["best_val_loss"]
    if is_best:
        state.update(best_val_loss=val_loss, best_step=state["step"])
    if state["step"] != state["first_step"] and not every(eval_interval, state["step"]):
        return is_best
    if val_loss < state["loss_to_beat"] - min_delta:
        state.update(loss_to_beat=val_loss, evals_since_best=0, evals_on_plateau=0)
    else:
        state["evals_since_best"] += 1
        state["evals_on_plateau"] += 1
    if plateau_factor < 1 and state["evals_on_plateau"] >= plateau_patience:
        state.update(lr_factor=state["lr_factor"] * plateau_factor, evals_on_plateau=0)
    return is_best


# ---- what is due, and what went wrong ------------------------------------------------------------


def every(interval, step):
    return interval > 0 and step % interval == 0


def what_is_due(step, signals, saver):
    """What is due after a step, by its number, a signal or the clock: for all ranks if for one."""
    late = 0 < save_minutes < saver.minutes_since_save()
    stop, save_now, orphaned = agree(signals.stop, signals.take_save() or late, signals.orphaned())
    last = step == max_steps
    ending = ("left alone by its launcher", 1) if orphaned else None  # (how, exit code)
    if stop:
        ending = f"stopped by {signal.Signals(stop).name}", 128 + stop
    if last:
        ending = "finished", 0
    return SimpleNamespace(
        ending=ending,
        save_now=save_now,
        log=last or every(log_interval, step),
        evaluation=last or every(eval_interval, step),
        sample=every(sample_interval, step),
        milestone=every(milestone_interval, step),
        checkpoint=every(save_interval, step),
    )


def names_to_save(due, is_best, state):
    """File names for this step; a save due by its number is left out while updates are skipped."""
    names = ["best.pt"] if is_best else []
    by_number = (due.checkpoint or due.milestone) and not state["skips_in_row"]
    if due.ending or due.save_now or by_number:
        names += [f"milestone_{state['step']:08}.pt"] if due.milestone else []
        names += [checkpoints.file_name(state["step"])]
    return names


def may_roll_back_to(step, state):
    """Only to a save that was due by its step: a signal or the clock must not change the run."""
    was_due = step == state["first_step"] or every(save_interval, step)
    return was_due and not state["skips_in_row"]


def judge(rows, run):
    """(rows up to the first trouble, that trouble or None). Logs what goes wrong on the way.

    Step by step, so that log_interval does not matter, and from numbers that are the same on every
    rank, so that all come to the same verdict.
    """
    state = run.state
    for number, row in enumerate(rows, 1):
        trouble = count_trouble(row, state)
        if row["skipped"]:
            run.folder.event(row["step"], "skipped", loss=row["loss"], grad_norm=row["grad_norm"])
        elif state["high_in_row"] == max_skipped:
            warning = f"above its first value for {max_skipped} steps; lower --peak_lr?"
            loss = {"loss": row["loss"], "first": state["first_loss"]}
            run.folder.event(row["step"], "diverging", **loss, warning=warning)
        if trouble:
            return rows[:number], trouble
    return rows, None


def count_trouble(row, state):
    """Update the counters of trouble from one step. Returns why to roll back, or None."""
    loss = row["loss"]
    state["skipped"] += row["skipped"]
    state["skips_in_row"] = state["skips_in_row"] + 1 if row["skipped"] else 0
    state["zeros_in_row"] = state["zeros_in_row"] + 1 if row["grad_norm"] == 0 else 0
    if row["skipped"]:
        bad = state["skips_in_row"] >= max_skipped
        return "loss or gradient not finite, update after update" if bad else None
    if state["zeros_in_row"] >= max_skipped:
        return "a gradient norm of exactly 0, update after update"
    if state["first_loss"] == math.inf:
        state["first_loss"] = loss
    state["high_in_row"] = state["high_in_row"] + 1 if loss > state["first_loss"] else 0
    if spike_sigma and is_spike(loss, spike_sigma, state):  # updates loss_mean, _var and _count
        return "a loss spike"
    return None


def roll_back(run, trouble, recent):
    """Restore the newest suitable checkpoint, all but `kept`, the data position and the loss scale.

    The data continues after the last of `recent`. Raises RunFailed if that is hopeless.
    """
    state = run.state
    bad = recent[-1]
    kept = {key: state[key] for key in ("best_val_loss", "best_step", "skipped", "rollbacks")}
    path = from_rank0(checkpoints.newest_valid, run.folder.path, may_roll_back_to)
    hopeless = state["zeros_in_row"] >= max_skipped or state["rollbacks"] == max_rollbacks
    if hopeless or path is None:
        raise RunFailed(console.diagnosis(trouble, recent, state["rollbacks"]))
    scaler = run.scaler.state_dict()  # a scale that has been too high stays lowered
    checkpoints.restore(run, checkpoints.load(path, verify=False))
    run.scaler.load_state_dict(scaler)
    state.update(kept, rollbacks=kept["rollbacks"] + 1, sequences=bad["sequences"])
    from_rank0(checkpoints.remove_after, run.folder.path, state["step"])
    from_rank0(run.folder.cut_rows, state["step"])
    why = {"why": trouble, "at_step": bad["step"], "next_sequence": state["sequences"]}
    run.folder.event(state["step"], "rollback", **why)
    stop_workers(run.batches)
    run.batches = load_batches(run)


# ---- before the first step -----------------------------------------------------------------------


def check_knobs(config):
    """Exits with 2 if two knobs contradict each other. The comment of each gives its own range."""
    if warmup_steps > max_steps and "warmup_steps" in config.flags:
        fail(f"--warmup_steps={warmup_steps}: expected no more than --max_steps={max_steps}")
    if min_lr > peak_lr:
        fail(f"--min_lr={min_lr}: expected no more than --peak_lr={peak_lr}")


def build_run(config, folder, run_device, datasets):
    """A run before its first step. datasets: what open_dataset returned."""
    train_data, val_data, data = datasets
    rng.seed_everything(seed)
    try:
        model = build_model(config, data["meta"]["vocab_size"])
    except ValueError as error:  # which names knobs, such as n_embd=32
        fail(re.sub(r"\b(?=\w+=)", "--", str(error)))
    model = ranks.shard(model, run_device, dtype, offload) if shard else model.to(run_device)
    optimizers = configure_optimizers(
        model, optimizer, peak_lr, weight_decay, beta1, beta2, momentum, run_device.type
    )
    return Run(
        folder=folder,
        device=run_device,
        train_data=train_data,
        val_data=val_data,
        facts={"config": dict(config), "data": data},
        model=model,
        optimizers=optimizers,
        groups=copy.deepcopy([each.state_dict()["param_groups"] for each in optimizers]),
        scaler=torch.amp.GradScaler(run_device.type, enabled=dtype == "float16"),
        ema={name: w.detach().clone() for name, w in model.named_parameters() if ema_decay},
        state=copy.deepcopy(FRESH_STATE) | dict.fromkeys(checkpoints.MICRO_BATCHES, batch_size),
    )


def start(run, path, table, saver):
    """Restore the checkpoint at `path`, or evaluate the fresh model. A new run is saved at once."""
    state = run.state
    rng.seed_everything(seed + rank())
    if path:
        saved = checkpoints.load(path, verify=False)
        checkpoints.restore(run, saved)  # RNG last: nothing may draw before the first step
        if saved["config"].get("eval_tokens") != eval_tokens:  # that best was of other tokens
            state.update(best_val_loss=math.inf, loss_to_beat=math.inf, evals_since_best=0)
        run.folder.begin(run, path, identity.inexact(saved["run"], run.facts["run"]))
        if run.folder.owns(path):  # a resume; else a new run that starts from another's checkpoint
            return
        state["first_step"] = state["step"]
    else:
        run.folder.begin(run)
        record_evaluation(run, table)
    saver.save(["best.pt", checkpoints.file_name(state["step"])], required=True)  # for rollbacks


# ---- the run -------------------------------------------------------------------------------------


def train(run, model, table, saver, signals, clock):
    """Take steps until the run ends. Returns (how it ended, exit code)."""
    state = run.state
    run.batches = load_batches(run)
    steps = []  # (row so far, numbers still on the device) of each step since the last fetch
    recent = []  # the last max_skipped rows
    while True:
        # ---- training: only these lines, and roll_back, change the weights -----------------------
        lr = float(lr_at(state["step"]) * state["lr_factor"])
        waiting_since = time.perf_counter()
        inputs, targets = (devices.upload(t, run.device) for t in next(run.batches))
        data_ms = 1000 * (time.perf_counter() - waiting_since)
        take = partial(train_step, model, run, inputs, targets, lr)
        numbers = audit.confirm(run, take) if every(audit_interval, state["step"] + 1) else take()
        row = count_batch(run, targets)  # state["step"] is one more from here on
        steps.append((row | {"lr": lr, "data_ms": data_ms}, numbers))

        # ---- what is due? every rank gets the same answer ----------------------------------------
        due = what_is_due(state["step"], signals, saver)
        if not any(vars(due).values()):
            continue

        # ---- fetch the numbers: besides evaluations and saves, only here does the host wait ------
        rows = metrics.finish_rows(steps, clock, run)
        rows, trouble = judge(rows, run)
        run.folder.write_rows(rows)
        recent = (recent + rows)[-max_skipped:]
        steps = []

        # ---- trouble: restore a checkpoint, and skip the data that led here ----------------------
        if trouble:
            saver.wait()
            roll_back(run, trouble, recent)
            clock.lap("save")
            continue

        # ---- log, evaluate, sample ---------------------------------------------------------------
        if due.log:
            table.print_row(rows[-1])
        is_best = due.evaluation and record_evaluation(run, table)
        if patience and state["evals_since_best"] >= patience and not due.ending:
            due.ending = f"stopped early: {patience} evaluations without improvement", 0
        if due.sample or (due.ending and due.ending[1] == 0):
            print_sample(run, block_size, autocast(run.device))
        clock.lap("evaluate")

        # ---- save, stop --------------------------------------------------------------------------
        names = names_to_save(due, is_best, state)
        if names:
            saver.save(names, required=bool(due.ending))
        clock.lap("save")
        if due.ending:
            return due.ending


def count_batch(run, targets):
    """Count the batch of a finished update. Returns the first fields of its row."""
    state = run.state
    sequences = rows_at(state["step"])
    batch_tokens = sequences * targets.numel() // ranks.share(0, sequences)[1]
    state["step"] += 1
    state["sequences"] += sequences
    state["tokens"] += batch_tokens
    row = {name: state[name] for name in ("step", "tokens", "sequences")}
    epoch = state["sequences"] / len(run.train_data)
    return row | {"epoch": epoch, "batch_tokens": batch_tokens}


def run_to_the_end(run, path, signals, clock):
    """Rehearse, start or resume, train. Records how the run ended. Returns the exit code."""
    table = console.Table(max_steps)
    saver = checkpoints.Saver(run, keep_last, may_roll_back_to)
    ending = "failed: an error in the program", 1
    try:
        batch = [each.to(run.device) for each in run.train_data[ranks.share(0, rows_at(0))]]
        model = rehearse(run, forward_backward, batch, compile)  # run.model, compiled if asked for
        run.facts["run"]["compile"] = model is not run.model
        clock.lap("compile")
        start(run, path, table, saver)
        clock.lap("evaluate")
        ending = train(run, model, table, saver, signals, clock)
    except Exception as error:
        reason = explain(error)
        if not reason:
            raise
        ending = f"failed: {reason}", 1
    finally:
        stop_workers(run.batches)
        saver.wait()
        run.folder.end(ending[0], clock.seconds, run.state, write_report if report else None)
    return ending[1]


def write_report(folder):
    """The lines that report.py, a process of its own without torch, prints of the run in `folder`."""
    script = Path(__file__).with_name("report.py")
    done = subprocess.run([sys.executable, script, folder], stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def main(argv=None):
    """Run the flags in `argv` (None: those of the command line). Returns the exit code."""
    global compile, deterministic
    clock = metrics.Clock(since_process_start=argv is None)
    speed_up_start_and_exit()
    with configured(globals(), argv=argv) as config, ExitStack() as stack:
        check_knobs(config)
        run_device = devices.choose_device(device)
        deterministic = devices.set_deterministic(deterministic, run_device)
        if audit_interval and not deterministic:
            fail(f"--audit_interval={audit_interval}: expected deterministic mode, which is off")
        stack.enter_context(ranks.joined(run_device, hang_minutes, shard, offload))
        signals = stack.enter_context(Signals())
        folder = stack.enter_context(RunFolder(out_dir))

        # ---- what there is: a run to resume, data to learn from
        path = from_rank0(find_checkpoint, folder, resume)
        saved = checkpoints.load(path, verify=False) if path else None  # it is verified by now
        datasets = open_dataset(saved)

        # ---- what to do: replace each "auto" in the globals by its value, build the run
        reasons = identity.resolve_auto_knobs(globals(), config, saved, run_device)
        run = build_run(config, folder, run_device, datasets)
        refuse_what_is_lost(run)
        tokens = batch_size * accum_steps * block_size * max_steps
        flops = tokens * metrics.flops_per_token(run.model)
        compile, reason = devices.choose_compile(compile, run_device, flops)
        run.facts["run"] = identity.identity_of(globals(), run.facts["data"], run_device)
        if saved:
            continue_from(run, path, saved)  # exits with 2 if a knob in identity.REFUSED differs
            if from_rank0(is_finished, folder, path, saved, config):
                return 0

        # ---- all is checked: from here on the run writes to out_dir
        needs = training_memory(
            run.model, run.optimizers, batch_size, dtype, run_device.type, world_size()
        )
        milestones = max_steps // milestone_interval if milestone_interval else 0
        files = keep_last + milestones + 3  # also best.pt, the newest, and the one being written
        command = sys.argv if argv is None else ["train.py", *argv]  # as typed, or as in a notebook
        from_rank0(folder.open, run, files * checkpoints.size(run, needs), command, path)
        peak = from_rank0(peaks.peak_flops, run_device, dtype)
        run.max_flops = (peak[0] or math.nan) * world_size()
        console.print_plan(run, {"compile": reason} | reasons, peak, needs, path, saved)
        saved = None  # unmaps the file, so that deleting it frees its disk space
        clock.lap("start")
        return run_to_the_end(run, path, signals, clock)


if __name__ == "__main__":
    leave(main())

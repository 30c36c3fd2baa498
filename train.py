"""An honest training loop. Learn: docs/lessons.md, docs/questions.md. In trouble: docs/trouble.md.

On one device:
    python train.py config/shakespeare.py
    python train.py config/shakespeare.py --batch_size=16 --accum_steps=4
On several (4 GPUs of one machine; with --device=cpu, 4 processes), which share the same batch:
    torchrun --standalone --nproc_per_node=4 train.py config/shakespeare.py

The same command again resumes the run where it stopped, bit for bit. A flag that makes another run
names another folder. Every global above FRESH_STATE is a flag (`--help`), and so is what a script
adds by knob(); its comment gives the unit, the value for "off", and the allowed [range] or a | b. Its
last word says what another value does: `fixed` makes another run, and a resume refuses it (`product
fixed`: if the product of these knobs is another one); `free` changes how the run computes or what it
writes, and names no folder; with no word it is the course of the run: it names the folder, and a
resume goes on with it. A config file is Python, and is executed. The file reads from top to bottom,
the caller above the called: the knobs, main, the start of a run, the loop, the batch, the step,
evaluation, the decisions, the rows."""

from __future__ import annotations

import copy
import math
import random
import signal

import plumbing  # noqa: F401  before torch: Ctrl-C in the imports is one line

if __name__ == "__main__":  # before the first step there is nothing to save
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from model import InvalidShape, build_model, generate
from optim import configure_optimizers
from plumbing import audit, checkpoint, cli, compiler, console, data, fields, fsdp, machine, ranks
from plumbing import resume as resuming
from plumbing.cli import BadInput, RunFailed, fail
from plumbing.clock import Clock
from plumbing.code import script
from plumbing.console import print0, shown
from plumbing.diagnosis import diagnosis
from plumbing.hooks import Hook
from plumbing.knobs import Start, settle_knobs
from plumbing.machine import flops_per_token, precise
from plumbing.out_of_memory import halving_on_oom, log_smaller_micro_batch
from plumbing.ranks import from_rank0, rank, world_size
from plumbing.sampling import print_sample
from plumbing.signals import Signals, StoppedInEvaluation, StoppedWaiting
from plumbing.snapshot import Snapshot, evaluating, rng_state, step_optimizer

# The run, and the text it learns
out_dir = "out/run"  # run.json, metrics.jsonl, checkpoints; typed flags are added to its name; free
resume = "auto"  # auto: resume what is in out_dir, or start; never; the path of a checkpoint;
#  restart: keep what is there as NAME.old_1 and start (each time: not for requeued jobs); free
dataset = "shakespeare"  # data/NAME; prepare_data.py makes it where it is missing; fixed
data_dir = "data"  # folder of the datasets; free
init_from = ""  # checkpoint or .safetensors whose weights a new run starts with; "" = random; fixed

# The model
block_size = 64  # context, tokens, [1, 10000000]; fixed
n_layer = 1  # [1, 10000]; fixed
n_head = 4  # [1, 10000]; fixed
n_embd = 128  # width, an even multiple of n_head, [1, 65536]; fixed
ngram_rows = 0  # rows in the table of vectors for hashed 3-grams, [0, 1000000000]; 0 = off; fixed
conv_width = 1  # tokens that the convolution of the input sees, [1, 64]; 1 = off; fixed
dropout = 0.0  # share of activations, [0, 1); 0 = off; fixed
label_smoothing = 0.0  # in training only, [0, 1); 0 = off; fixed
grad_checkpoint = False  # recompute activations in the backward pass: less memory, more time; free

# The batch: a step sees batch_size * accum_steps sequences, on any number of ranks
batch_size = 32  # sequences that a forward pass takes at most, [1, 10000000]; product fixed
accum_steps = 1  # so many of these make the batch of a step, [1, 10000000]; product fixed
seed = 1337  # of weights, batches and dropout, [0, 4294967295]; fixed
num_workers = 0  # processes that read batches ahead, [0, 1000]; 0 = this process reads; free
prefetch_factor = 2  # batches that each worker keeps ready, [1, inf); free

# The optimizer
optimizer = "adamw"  # adamw | adam | sgd | momentum | muon; fixed
momentum = 0.95  # of momentum and muon, [0, 1)
weight_decay = 0.1  # of matrices and embeddings, not of vectors, [0, inf)
beta1 = 0.9  # of adamw and adam, [0, 1)
beta2 = 0.95  # of adamw and adam, [0, 1)
grad_clip = 1.0  # largest norm of the gradient, [0, inf); 0 = off
ema_decay = 0.0  # average the weights and evaluate the average, [0, 1); 0 = off; fixed

# The learning rate: warmup, then by schedule
schedule = "cosine"  # cosine | linear | constant | step | onecycle | wsd; fixed
peak_lr = 1e-3  # (0, inf)
min_lr = 1e-4  # where cosine, linear, onecycle and wsd end, and the floor of step, [0, inf)
warmup_steps = 100  # [0, inf)
max_steps = 2000  # raised past decay_steps, it needs --decay_steps; [1, 1000000000000]; free
decay_steps = 0  # steps the schedule spans, [0, inf); 0 = max_steps as of the first start
cooldown_steps = 0  # schedule=wsd: length of the final decay, [0, inf); 0 = a fifth of decay_steps
step_size = 500  # schedule=step: steps between drops, [1, inf)
gamma = 0.5  # schedule=step: factor applied at each drop, (0, 1]
plateau_factor = 1.0  # multiplies the rate when the validation loss stalls, (0, 1]; 1 = off
plateau_patience = 3  # evaluations without improvement before plateau_factor applies, [1, inf)

# How it is computed
device = "auto"  # auto, cpu, cuda, cuda:1 or mps; free
dtype = "auto"  # auto | float32 | bfloat16 | float16; fixed
compile = "auto"  # auto | true | false; auto = where the run is long enough to gain; free
deterministic = "auto"  # auto | true | false | portable; auto = on, except on mps; portable = in
#  float32, the same bits on every x86-64 CPU with AVX2 (docs/exactness.md); free
shard = False  # with several ranks, each keeps a share of weights, gradients, moments (FSDP2); free

# Logging, evaluation, early stopping
log_interval = 10  # steps between console lines, [0, inf); 0 = none; metrics.jsonl has all; free
eval_interval = 250  # steps, [0, inf); 0 = only before the first and after the last; free
eval_tokens = 0  # tokens to evaluate, from the start of the split, [0, inf); 0 = all; fixed
sample_interval = 0  # steps between text samples, [0, inf); 0 = only the one at the end; free
report = True  # draw report.png and write report.md at the end; free
best_metric = "val_loss"  # key of evaluate()'s result; -val_accuracy: higher is better; fixed
wandb_log = False  # copy the rows of metrics.jsonl to Weights & Biases; free
wandb_project = "honest-loop"  # of the run on Weights & Biases; free
wandb_run_name = ""  # "" = the name of out_dir; free
patience = 0  # evaluations without improvement before the run stops, [0, inf); 0 = off; free
min_delta = 0.0  # by which best_metric must improve to count, [0, inf); free

# Checkpoints
save_interval = 500  # steps, [0, inf); 0 = off (a run always saves its start, best and end); free
keep_last = 2  # checkpoints kept, besides best.pt, [1, inf); free
milestone_interval = 0  # steps between checkpoints that are never deleted, [0, inf); 0 = off; free

# When numbers go wrong
audit_interval = 0  # steps between those taken twice and compared bitwise, [-1, inf); 0 = only the
#  second step of each process, -1 = none; free

# Every variable of the loop, saved and restored together: a new one belongs here.
FRESH_STATE = {
    "step": 0,  # finished updates, including skipped ones
    "sequences": 0,  # index of the next training sequence
    "tokens": 0,  # targets trained on so far
    "micro_batch": 0,  # most sequences in a pass: batch_size, halved whenever memory runs out
    "first_step": 0,  # where this run began: 0, or the step of another run's checkpoint
    "best_score": math.inf,  # of best_metric, its sign turned if higher is better
    "best_val_loss": math.inf,  # validation loss of the best weights
    "best_step": 0,
    "score_to_beat": math.inf,  # a better score, by min_delta, counts as an improvement
    "evals_since_best": 0,  # evaluations without an improvement
    "lr_factor": 1.0,  # product of the plateau_factors so far
    "skips_in_row": 0,  # updates that were skipped, as a number was not finite
    "high_in_row": 0,  # steps whose loss was above first_loss
    "first_loss": math.inf,
    "evaluation_due": False,  # left by a stop to the process that resumes, which begins with it
}
# What a run takes over from the checkpoint of another one
POSITION = ("step", "sequences", "tokens", "micro_batch")
MAX_SKIPPED = 10  # updates in a row that are not finite, before the run ends
MAX_HIGH = 10  # losses above the first one in a row, before a warning
MAX_RECENT = 10  # rows that a diagnosis quotes
last_run = None  # the run of the newest main(), for a notebook
hooks = []  # of a script, each a Hook: train.hooks.append(...) at its top
ADDED_KNOBS = {}  # of a script, name -> cli.Knob: see knob()


def knob(name: str, default: str | int | float | bool, comment: str) -> None:
    """Add a flag to those above, at the top of a script that imports train:
    `train.knob("alpha", 0.5, "weight of the teacher, [0, 1]; fixed")`. Within main() and build() its
    value is train.alpha, which a model gets as config["alpha"]."""
    cli.add_knob(globals(), name, default, comment)


# ---- the start of a run --------------------------------------------------------------------------


def main(argv: list[str] | None = None, hooks: Sequence[Hook] = ()) -> int:
    """Run the flags in `argv` (None: those of the command line). Returns the exit code. Raises
    BadInput, or what ended the run. hooks: are called on the way, after those of the script."""
    from reporting.watchers import ReportAtEnd, Wandb  # which `import train` need not load

    global last_run
    clock = Clock(since_process_start=argv is None)
    machine.speed_up_start_and_exit()
    with build(argv, to_train=True) as run:
        last_run = run
        run.clock = clock
        reports = [ReportAtEnd()] if report else []
        if run.path and resuming.is_finished(run):
            run.hooks = reports
            from_rank0(resuming.close_finished, run)
            return 0
        run.hooks += [*hooks, *reports]
        for hook in run.hooks:
            hook.begin(run)

        # ---- all is checked: from here on the run writes to out_dir
        if resume == "restart":
            from_rank0(run.folder.set_aside)
        flags = sys.argv[1:] if argv is None else argv
        from_rank0(run.folder.open, run, [shown(script() or __file__), *flags])
        if wandb_log and rank() == 0:
            run.hooks.append(Wandb(run))
        peak = from_rank0(machine.peak_flops, run.device, dtype)
        run.max_flops = peak[0] * world_size()
        console.print_plan(run, peak, resuming.changes_since(run))
        clock.lap("start")
        code = run_to_the_end(run)
    if code and argv is None and script():  # `python lab.py && next` must not go on
        raise SystemExit(code)
    return code


@contextmanager
def build(argv: list[str] | None = None, to_train: bool = False) -> Iterator[Run]:
    """A context with a run that is ready to step: data, model, optimizers, and the checkpoint if
    there is one. Inside it the knobs hold. It writes nothing and takes no lock, unless
    `to_train`."""
    with cli.configured(globals(), argv=argv) as config, ExitStack() as stack:
        start, saved = settle_knobs(config, stack, to_train)
        ranks.check_share(sequences_at(0), shard, BadInput)
        datasets = open_dataset(saved)
        run = build_run(config, start, datasets, saved)
        if init_from:
            from plumbing.weights import begin_from

            begin_from(run, init_from, saved)
        if saved:
            resuming.load_checkpoint(run, saved, FRESH_STATE, POSITION)
            if evaluate.__module__ == __name__:  # it is not a fork's
                resuming.reset_best(run, saved, FRESH_STATE)
            saved = None  # unmaps the file: its disk space is free once it is pruned
        yield run


def open_dataset(saved: dict | None) -> tuple:
    """(training data, validation data or {name: validation data}, facts). facts, which a checkpoint
    keeps: `name`, `fingerprint`, `meta`, and as `files` the paths of other files that a fork reads,
    such as a teacher's weights. saved: the checkpoint to resume from, or None."""
    so_far = saved and saved["data"]["name"]
    name, folder, meta = from_rank0(
        data.dataset_of_run, make_dataset, dataset, so_far, data_dir, block_size
    )
    tokens, val_tokens = (
        np.memmap(f"{folder}/{split}.bin", meta["dtype"], "r") for split in ("train", "val")
    )
    train_data = ShuffledWindows(tokens, block_size, seed)
    val_data = data.OrderedWindows(val_tokens, block_size, eval_tokens)
    return train_data, val_data, {"name": name, "fingerprint": data.fingerprint(meta), "meta": meta}


def make_dataset(name: str, data_dir: str) -> tuple[str, dict]:
    """(folder, meta) of a dataset that is missing: only then is prepare_data.py imported."""
    from prepare_data import prepare

    return prepare(name, data_dir)


def build_run(config: cli.Config, start: Start, datasets: tuple, saved: dict | None = None) -> Run:
    """A run before its first step. datasets: see open_dataset(). saved: the checkpoint to resume
    from, which only its identity depends on."""
    train_data, val_data, about = datasets
    for part in (train_data, *fields.sets_of(val_data).values()):
        data.require_rows(part)
    seed_everything(seed)
    try:
        model = build_model(config, about["meta"]["vocab_size"])
    except InvalidShape as error:
        fail(error)
    model = fsdp.shard(model, start.device, dtype) if shard else model.to(start.device)
    optimizers = configure_optimizers(
        model, optimizer, peak_lr, weight_decay, beta1, beta2, momentum, start.device.type
    )
    tokens_of_rank = sequences_at(0) * block_size * max_steps / world_size()
    flops = tokens_of_rank * flops_per_token(model)
    choice, reason = machine.choose_compile(compile, start.device, flops, max_steps)
    start.reasons["compile"] = reason
    config.settle(compile=choice)
    seed_everything(seed + rank())  # dropout differs between the ranks
    run = Run(
        **vars(start),
        train_data=train_data,
        val_data=val_data,
        model=model,
        optimizers=optimizers,
        groups=copy.deepcopy([part.state_dict()["param_groups"] for part in optimizers]),
        scaler=torch.amp.GradScaler(start.device.type, enabled=dtype == "float16"),
        ema={name: w.detach().clone() for name, w in model.named_parameters() if ema_decay},
        state=copy.deepcopy(FRESH_STATE) | {"micro_batch": batch_size},
        knobs=config.knobs,
        hooks=[audit.Audit(audit_interval if deterministic else -1), *hooks],
    )
    checkpoint.refuse_what_is_lost(run, about)
    run.facts = resuming.identity(run, config, about, saved)
    return run


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, and torch on every device (CUDA as soon as it is initialized)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass
class Run(Start):
    """What the next step depends on; from Start it has device, folder, path of the checkpoint, and
    reasons. model(inputs, targets) returns, in training and in evaluation, the mean loss over the
    targets that count, or (loss, {name: scalar mean}); model(inputs) the logits, for samples."""

    train_data: torch.utils.data.Dataset
    val_data: torch.utils.data.Dataset
    model: torch.nn.Module
    optimizers: list
    groups: list  # param_groups as this process built them: see checkpoint.restore_optimizer()
    scaler: torch.amp.GradScaler
    ema: dict  # name -> averaged weight; empty when off
    state: dict
    facts: dict = field(default_factory=dict)  # see resume.identity() and resume.facts()
    resumed_from: dict = field(default_factory=dict)  # facts of the checkpoint, and micro_batch
    signals: Signals = field(default_factory=Signals)  # none are handled until the first step
    knobs: dict = field(default_factory=dict)  # name -> cli.Knob: what a knob may do
    noted_size: int = 0  # of a micro-batch, as the newest event out_of_memory says
    halved_at: int = 0  # the step in which it became smaller
    batches: Iterator | None = None  # the batches to come
    max_flops: float = math.nan  # peak of all devices together, FLOP/s
    hooks: list[Hook] = field(default_factory=list)  # the audit first, nearest to the step
    stop_with: tuple[str, int] | None = None  # (how the run ends, exit code), if a hook ends it
    clock: Clock = field(default_factory=Clock)

    def checkpoint(self) -> dict:
        """All that the next step depends on, and what the run is. A collective call."""
        pairs = zip(self.optimizers, self.groups, strict=True)
        return {
            "format": checkpoint.FORMAT,
            "model": self.model.state_dict(),
            "frozen": [n for n, w in self.model.named_parameters() if not w.requires_grad],
            "optimizer": [part.state_dict() | {"built": groups} for part, groups in pairs],
            "groups": checkpoint.groups_of(self),  # names of the weights in them
            "scaler": self.scaler.state_dict(),
            "ema": self.ema,
            "state": self.state,
            "rng": ranks.from_all_ranks(rng_state(self.device)),
            **self.facts,
        }


def run_to_the_end(run: Run) -> int:
    """Warm up, start or resume, train. Records how the run ended. Returns the exit code."""
    table = console.Table(max_steps)
    saver = checkpoint.Saver(run, keep_last)
    ending = "failed: an error in the program", 1
    with ExitStack() as stack:
        try:
            model = first_pass(run)
            run.facts = resuming.facts(run, is_compiled=model is not run.model)
            run.clock.lap("compile" if run.facts["config"]["compile"] else "start")
            open_record(run, table, saver)
            run.clock.lap("evaluate")
            stack.enter_context(run.signals)  # until here there was nothing to save
            ending = train(run, model, table, saver)
            run.batches = None  # ends the data workers; after an error, they end with the process
        except KeyboardInterrupt:
            ending = stopped_by(signal.SIGINT)
            raise
        except Exception as error:
            data.kill_workers()  # torch would raise once more for each worker that ends later
            kind = "" if isinstance(error, RunFailed) else type(error).__name__
            words = ": ".join(filter(None, ("failed", kind, str(error))))
            ending = console.one_line(words), 1
            if str(error).startswith("DataLoader"):  # a worker was killed
                message = str(error).partition(". ")[0]  # without torch's advice
                raise RunFailed(f"{message} (out of memory?); the same command resumes") from error
            raise
        finally:
            saver.wait()
            run.folder.end(run, ending[0])
    stopped_at = run.folder.path / checkpoint.file_name(run.state["step"])
    if ending[1] > 128 and stopped_at.exists():  # for a notebook: undo the two steps since then
        checkpoint.restore(run, checkpoint.load(stopped_at, verify=False))
    return ending[1]


def first_pass(run: Run) -> torch.nn.Module:
    """Compute the next batch once, to compile and to find out what fits into memory; nothing
    moves. Returns the model, compiled if asked."""

    def read():  # a fork may draw its batches from the random state
        place = ranks.my_share(run.state["sequences"], sequences_at(0))
        with run.clock.apart("start"):  # the order of an epoch may be drawn here
            next_batch = data.Reader(run.train_data, seed)[place]
        return data.to_device(next_batch, run.device)

    model = compiler.warm_up(run, compile, forward_backward, read)
    memory = fields.FIELDS["mem_gb"].shown(machine.memory_gb(run.device))
    print0("memory", memory, "GB after the warm-up pass")
    machine.reset_peak_memory(run.device)
    return model


def open_record(run: Run, table, saver) -> None:
    """Open the record. A run that begins here is evaluated and saved before its first step; rows of
    one that resumes are compared with those that the log already holds."""
    log_smaller_micro_batch(run)
    from_rank0(resuming.record_start, run)
    run.clock.lap("start")
    if run.path and run.folder.owns(run.path):
        return
    run.state["first_step"] = run.state["step"]
    record_evaluation(run, table)
    saver.save([checkpoint.file_name(run.state["step"]), "best.pt"], required=True)


# ---- the loop ------------------------------------------------------------------------------------


def train(run: Run, model, table, saver) -> tuple[str, int]:
    """Take steps until the run ends. Returns (how it ended, exit code)."""
    state = run.state
    run.batches = load_batches(run)
    steps = []  # (row so far, numbers still on the device) of the steps since the last fetch
    recent = []  # the last rows, for a diagnosis
    while True:
        # ---- training: only this step and log_two_more_steps change the weights -------------------
        if not state["evaluation_due"]:  # a process that begins with an evaluation takes no step
            try:
                steps.append(take_step(run, model))
            except StoppedWaiting:  # the batch did not come within a second of a stop
                data.kill_workers()
                run.batches = None
            table.live(state["step"])  # on a terminal

        # ---- what is due? every rank gets the same answer ----------------------------------------
        due = what_is_due(run)
        if not run.batches:  # no step was taken: all but the save was done
            due.evaluation = due.sample = due.milestone = False
        if not any(vars(due).values()):
            continue

        # ---- fetch the numbers: here the host waits for the device ------------------------------
        rows, trouble = find_trouble(finish_rows(run, steps), run)
        run.folder.write_rows(rows)
        run.clock.lap("save")
        recent = (recent + rows)[-MAX_RECENT:]
        steps = []

        if trouble:
            saver.wait()  # the newest checkpoint may be the one to go on from
            due.ending = from_rank0(diagnosis, run, trouble, recent), 1
        if due.ending and due.ending[0].startswith("failed"):
            ranks.raise_on_all(RunFailed(due.ending[0].removeprefix("failed: ")))

        # ---- log, evaluate, sample ---------------------------------------------------------------
        if rows and due.rows and log_interval:
            table.print_row(rows[-1])
        is_best = due.evaluation and evaluate_unless_stopped(run, table, due)
        if 0 < patience <= state["evals_since_best"] and not due.ending:
            due.ending = f"stopped early: {patience} evaluations without improvement", 0
        if due.sample or (due.ending and due.ending[1] == 0):
            print_sample(run, generate, autocast)
        run.clock.lap("evaluate")

        # ---- save, stop --------------------------------------------------------------------------
        names = names_to_save(due, is_best, state)
        if names:
            saver.save(names, required=bool(due.ending or due.is_gone))
            run.signals.save = run.folder.is_gone = False
        run.clock.lap("save")
        if due.ending:
            if due.stop and run.batches and not state["evaluation_due"]:
                log_two_more_steps(run, model, recent)
            return due.ending


def take_step(run: Run, model, is_witness: bool = False) -> tuple[dict, dict]:
    """Take the next step. Returns (first fields of its row, numbers still on the device).
    is_witness: it is taken for its row alone, without an audit."""
    state = run.state
    lr = float(lr_at(state["step"]) * state["lr_factor"])
    alone = world_size() == 1  # else other ranks may be in the middle of a step
    with run.signals.waiting(may_leave=alone):
        inputs, targets, data_ms = next(run.batches)
    take = partial(train_step, model, run, inputs, targets, lr)
    for hook in run.hooks:  # each may replace the step, or wrap it
        if not (is_witness and isinstance(hook, audit.Audit)):
            take = partial(hook.step, run, take, inputs, targets, lr)
    numbers = take()
    fields.check_numbers(numbers, "train_step", {"loss", "grad_norm", "skipped", "targets"})
    row = count_batch(run, targets)  # and step += 1
    return row | {"lr": lr, "data_ms": data_ms}, numbers


def log_two_more_steps(run: Run, model, recent: list[dict]) -> None:
    """After a signal and its save, take the next two steps for their rows alone: the process that
    resumes computes them again, and so measures whether it is exact. Two, because lost moments show
    only in the second. docs/exactness.md lists where there are fewer. recent: rows, of which the
    newest says how long a step takes."""
    saved = copy.deepcopy(run.state)
    is_slow = not recent or 2 * recent[-1]["step_ms"] > 3000
    with suppress(StoppedWaiting):
        for taken in range(2):
            step = run.state["step"]
            # an evaluation between the two may change the rate of the second
            is_over = is_slow or step == max_steps or (taken and every(eval_interval, step))
            if any(ranks.max_over_ranks(is_over, run.signals.orphaned())):
                break
            rows = finish_rows(run, [take_step(run, model, is_witness=True)])
            run.folder.write_rows(rows, is_kept=False)
    run.state.update(saved)  # the run ends where it was saved


# ---- the rate and the batch ----------------------------------------------------------------------


def lr_at(step: int) -> float:
    """Learning rate of update `step` (the first is 0): a pure function of the step. Linear warmup,
    then `schedule` down to min_lr at decay_steps: cosine (Loshchilov & Hutter 2017), linear,
    constant, step, onecycle (Smith & Topin 2018; cosine both ways), wsd (Hu et al. 2024)."""
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
        decay_start = max(decay_start, total - (cooldown_steps or max(1, total // 5)))
    if step >= total:
        return min_lr
    done = max(0, step - decay_start) / (total - decay_start)
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
    places = batches_to_come(run.state)
    reader = data.Reader(run.train_data, seed)
    return data.batches(reader, places, run.device, num_workers, prefetch_factor)


def batches_to_come(state: dict) -> Iterator[tuple[int, int]]:
    """(first sequence, count) of this rank's part of each batch from here on."""
    first = state["sequences"]
    for step in range(state["step"], max_steps):
        count = sequences_at(step)
        ranks.check_share(count, shard, RunFailed)
        yield ranks.my_share(first, count)
        first += count


class ShuffledWindows(torch.utils.data.Dataset):
    """`tokens`, a split in an np.memmap that stays open, as an endless sequence of windows.

    An epoch cuts the tokens into windows of block_size and has each window once. Where it cuts, and
    the order of the windows, are drawn from (seed, epoch). `dataset[first, count]` is a batch, a
    pure function, so there is no loader state to save: inputs and targets, int64 (count,
    block_size)."""

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

    def __getitem__(self, batch: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, count = batch
        epoch, place = np.divmod(np.arange(first, first + count), len(self))
        parts = [self.starts(e)[place[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
        rows = data.read_rows(self.tokens, np.concatenate(parts), self.block_size + 1)
        return rows[:, :-1].copy(), rows[:, 1:].copy()

    __getitem__.draws_nothing = True  # data.Reader need not seed the random numbers for it


# ---- the step ------------------------------------------------------------------------------------


def train_step(model, run: Run, inputs: torch.Tensor, targets: torch.Tensor, lr: float) -> dict:
    """One update, in seven operations. All numbers stay on the device, and the host waits for none,
    but for optimizers other than Muon and torch's fused ones: to skip their step, it must read
    `skipped`.

    model: run.model or its compiled form. inputs, targets: this rank's sequences, on the device.
    Returns scalars of the global batch. A key added here becomes a field of every row of
    metrics.jsonl, a column of the console and a curve of the report.
    """
    run.model.zero_grad(set_to_none=True)  # 1: zero the gradients
    set_lr(run.optimizers, lr)  # 2: set the learning rate
    snapshot = Snapshot(run)  # buffers and random state: what a retry or a skip puts back
    n_targets = ranks.total(count_targets(targets))
    take = partial(forward_backward, model, run, inputs, targets, n_targets)
    numbers = halving_on_oom(snapshot, take, len(inputs))  # 3 to 5
    ranks.sum_gradients(run.model, numbers)  # operation 4 makes these sums the global means
    grad_norm = clip(run)  # 6: unscale, then clip
    skipped = ~(numbers["loss"].isfinite() & grad_norm.isfinite())
    if run.scaler.is_enabled():
        numbers["loss_scale"] = run.scaler.scale(torch.ones_like(grad_norm))  # without a wait
    update(run, snapshot, skipped, len(inputs))  # 7: all that a step moves, or nothing
    return {**numbers, "grad_norm": grad_norm, "skipped": skipped, "targets": n_targets}


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """How many targets count: all but -100 (class labels) or NaN (numbers)."""
    if targets.is_floating_point():
        return (~targets.isnan()).sum()
    return (targets.long() != -100).sum()


def set_lr(optimizers: list, lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)


def forward_backward(model, run: Run, inputs, targets, n_targets: torch.Tensor) -> dict:
    """Operations 3 to 5 for each micro-batch: forward; scale, so that all sum up to the mean of the
    global batch; backward. Returns what this rank adds to the mean loss, and to the mean of every
    other scalar that the model returns beside it."""
    totals = {}
    for means, n in micro_batches(model, run, inputs, targets):  # 3: forward
        parts = n_targets / n  # the global batch is so many of these; infinite if n is 0
        numbers = {name: mean / parts for name, mean in means.items()}  # 4: scale
        run.scaler.scale(numbers["loss"]).backward()  # 5: backward
        totals = {name: totals.get(name, 0.0) + numbers[name].detach() for name in numbers}
    return totals


def micro_batches(model, run: Run, inputs, targets) -> Iterator[tuple[dict, torch.Tensor]]:
    """The forward passes of training and of evaluation, under autocast. Yields for each micro-batch
    ({"loss": mean over the targets that count, and the other scalars that the model returned}, how
    many count). Where none counts, all means are 0."""
    size = run.state["micro_batch"]
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        n = count_targets(y)
        y = torch.where(n > 0, y, y.new_zeros(()))  # a loss of no targets would not be finite
        with autocast(x.device):
            result = model(x, y)
        means = fields.means_of(result, torch.is_grad_enabled())
        yield {name: torch.where(n > 0, mean, 0) for name, mean in means.items()}, n


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def clip(run: Run) -> torch.Tensor:
    """Unscale the gradients, then clip them. Returns their norm before that."""
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
    weights = list(run.model.parameters())
    grad_norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip or math.inf)
    return ranks.full_tensor(grad_norm)


@torch.no_grad()
def update(run: Run, snapshot: Snapshot, skipped: torch.Tensor, sequences: int) -> None:
    """Step, unless `skipped`: then weights, moments, buffers and averages stay as they were. The
    scaler lowers its scale if it has seen gradients that are not finite. sequences: of this rank."""
    for optimizer in run.optimizers:
        step_optimizer(optimizer, skipped)
    run.scaler.update()
    snapshot.average_or_restore_buffers(skipped, sequences / sequences_at(run.state["step"]))
    for name, average in run.ema.items():  # Polyak & Juditsky 1992
        weight = ranks.local_tensor(run.model.get_parameter(name))
        ranks.local_tensor(average).lerp_(weight, (1 - ema_decay) * (1 - skipped.float()))


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate_unless_stopped(run: Run, table, due: SimpleNamespace) -> bool:
    """Take the evaluation that is due. Returns whether it is the best so far. After a stop, which
    may come in the evaluation, the process that resumes takes it, with the sample and the saves
    that are due: its batches may take longer than a scheduler waits."""
    run.state["evaluation_due"] = True
    try:
        if not due.stop:
            is_best = record_evaluation(run, table)
            run.state["evaluation_due"] = False
            return is_best
    except StoppedInEvaluation:
        due.stop = run.signals.agreed_stop
        due.ending = stopped_by(due.stop)
    due.sample = due.milestone = False
    return False


def record_evaluation(run: Run, table) -> bool:
    """Evaluate and log the result. Returns whether it is the best so far."""
    state = run.state
    meta = run.facts["data"]["meta"]
    name_of_best = best_metric.removeprefix("-")
    numbers = evaluate(run)
    fields.check_numbers(numbers, "evaluate", {"val_loss", name_of_best})
    numbers = {name: n.item() if hasattr(n, "item") else n for name, n in numbers.items()}
    is_best = count_evaluation(numbers, state)
    row = {"kind": "eval", "step": state["step"], **numbers}
    row["best_val_loss"] = state["best_val_loss"]
    if best_metric != "val_loss":
        sign = -1 if best_metric.startswith("-") else 1
        row[f"best_{name_of_best}"] = sign * state["best_score"]
    counted = row.get("val_tokens") if eval_tokens else row.pop("val_tokens", None)
    if "val_bytes" in meta and counted == meta["val_tokens"] - 1:  # the whole text, none masked
        row["val_bpb"] = row["val_loss"] / math.log(2) * meta["val_tokens"] / meta["val_bytes"]
    run.folder.write_rows([row])
    table.print_evaluation(row, is_best)
    return is_best


@torch.no_grad()
def evaluate(run: Run) -> dict:
    """{"val_loss": mean over the targets that count, "val_NAME": that of each other number that the
    model returns, "val_tokens": how many targets}. More numbers become fields of the row;
    best_metric names the one that decides.

    In eval mode, with the EMA weights if ema_decay is on; never compiled, so that the result does
    not depend on --compile. Training is unaffected: all that it moves is put back."""
    if isinstance(run.val_data, dict):
        sets = run.val_data.items()
        found = {name: evaluate(replace(run, val_data=dataset)) for name, dataset in sets}
        return fields.mean_of_sets(found)
    with evaluating(run):
        totals = sum_losses(run)
    ranks.sum_over_ranks([*totals.values()])
    counted = totals.pop("targets")
    means = {f"val_{name}": (total / counted).item() for name, total in totals.items()}
    return means | {"val_tokens": int(counted)}


def sum_losses(run: Run) -> dict:
    """{name: sum over this rank's share of the validation data, in float64} of each number that the
    model returns, and of `targets`, which are counted. Raises StoppedInEvaluation after a batch if
    a signal has come, on any rank."""
    snapshot = Snapshot(run)
    totals = Counter()
    size = min(run.state["micro_batch"], ranks.largest_share(sequences_at(run.state["step"])))
    reader = data.Reader(run.val_data, seed)
    for first in range(0, len(run.val_data), size * world_size()):
        mine = first + size * rank()
        has_rows = mine < len(run.val_data)  # if not, only take part: FSDP needs every rank
        mine = mine if has_rows else first
        count = min(size, len(run.val_data) - mine)
        batch = data.to_device(reader[mine, count], run.device)
        sums = halving_on_oom(snapshot, partial(sum_losses_of_batch, run, mine, *batch), count)
        for name in sums:
            totals[name] += sums[name] * has_rows
        if run.signals.agreed_stop:
            raise StoppedInEvaluation
    return totals


def sum_losses_of_batch(run: Run, first: int, inputs, targets) -> dict:
    """The same sums over one batch. What a model draws follows from (seed, `first`), the number of
    its first row: so it is the same in each evaluation."""
    seed_everything(data.seed_of(seed, first))
    where = "cpu" if run.device.type == "mps" else run.device  # MPS has no float64
    sums = Counter()
    for means, n in micro_batches(run.model, run, inputs, targets):
        for name, mean in {**means, "targets": torch.ones_like(n)}.items():
            sums[name] += mean.to(where).double().reshape(()) * n.to(where)
    return sums


def count_evaluation(numbers: dict, state: dict) -> bool:
    """Count for the best, early stopping and plateau_factor. Returns whether this is the best so
    far. The evaluation after the last step counts for the latter two only if eval_interval asks for
    it: a run extended later must take the same course as one that was that long from the start."""
    name = best_metric.removeprefix("-")
    score = -numbers[name] if best_metric.startswith("-") else numbers[name]
    is_best = score < state["best_score"]
    if is_best:
        state.update(best_score=score, best_val_loss=numbers["val_loss"], best_step=state["step"])
    counts = state["step"] == state["first_step"] or every(eval_interval, state["step"])
    if counts and score < state["score_to_beat"] - min_delta:
        state.update(score_to_beat=score, evals_since_best=0)
    elif counts:
        state["evals_since_best"] += 1
        if state["evals_since_best"] % plateau_patience == 0:
            state["lr_factor"] *= plateau_factor
    return is_best


# ---- what is due, and what went wrong ------------------------------------------------------------


def what_is_due(run: Run) -> SimpleNamespace:
    """What is due after a step, by its number, a hook or a signal: for all ranks if for one."""
    step, signals = run.state["step"], run.signals
    last = step == max_steps
    due = SimpleNamespace(
        ending=("finished", 0) if last else None,  # (how, exit code)
        stop=0,
        save_now=run.state["evaluation_due"],  # replaces the save that a stop made without it
        rows=last or every(log_interval or 100, step),  # metrics.jsonl has them without lines, too
        evaluation=last or every(eval_interval, step),
        sample=every(sample_interval, step),
        milestone=every(milestone_interval, step),
        checkpoint=every(save_interval, step),
    )
    for hook in run.hooks:
        hook.due(run, due)
    asked = signals.save, run.folder.is_gone, signals.orphaned(), bool(run.stop_with)
    due.stop, save, due.is_gone, orphaned, by_hook = ranks.max_over_ranks(signals.stop, *asked)
    due.save_now = due.save_now or save or due.is_gone  # a save fails until the folder is back
    if orphaned:
        due.ending = "left alone by its launcher", 1
    if by_hook:
        due.ending = next(filter(None, ranks.from_all_ranks(run.stop_with)))
    if due.stop:  # in the last step, too: the process that resumes evaluates, and finishes
        due.ending = stopped_by(due.stop)
    return due


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def stopped_by(number: int) -> tuple[str, int]:
    """(how the run ended, exit code) after a signal."""
    return f"stopped by {signal.Signals(number).name}", 128 + number


def names_to_save(due: SimpleNamespace, is_best: bool, state: dict) -> list[str]:
    """File names for this step."""
    names = ["best.pt"] if is_best else []
    if is_best or due.ending or due.save_now or due.checkpoint or due.milestone:
        names += [checkpoint.file_name(state["step"])]
        if due.milestone:
            names += [f"milestone_{state['step']:08}.pt"]
    return names


def find_trouble(rows: list[dict], run: Run) -> tuple[list[dict], str | None]:
    """(rows up to the first trouble, that trouble or None). Logs what goes wrong on the way: step
    by step, so that log_interval does not matter, from numbers that are the same on every rank."""
    state = run.state
    for number, row in enumerate(rows, 1):
        if row["skipped"]:
            run.folder.event(row["step"], "skipped", loss=row["loss"], grad_norm=row["grad_norm"])
            # float16: the gradient overflowed, and the scaler answers with a lower scale, down to 1
            is_overflow = math.isfinite(row["loss"]) and row.get("loss_scale", 0) > 1
            state["skips_in_row"] += not is_overflow
            if state["skips_in_row"] >= MAX_SKIPPED:
                return rows[:number], f"loss or gradient not finite in {MAX_SKIPPED} steps in a row"
            continue
        state["skips_in_row"] = 0
        if state["first_loss"] == math.inf:
            state["first_loss"] = row["loss"]
        is_high = row["loss"] > state["first_loss"]
        state["high_in_row"] = state["high_in_row"] + 1 if is_high else 0
        if state["high_in_row"] == MAX_HIGH:
            warning = f"above its first value for {MAX_HIGH} steps; lower --peak_lr?"
            loss = {"loss": row["loss"], "first": state["first_loss"]}
            run.folder.event(row["step"], "diverging", **loss, warning=warning)
    return rows, None


# ---- the rows of metrics.jsonl -------------------------------------------------------------------


def count_batch(run: Run, targets: torch.Tensor) -> dict:
    """Count a finished update and its batch. Returns the first fields of its row."""
    state = run.state
    sequences = sequences_at(state["step"])
    tokens = sequences * targets.numel() // len(targets)
    state["step"] += 1
    state["sequences"] += sequences
    row = {"step": state["step"], "sequences": state["sequences"]}
    return row | {"epoch": state["sequences"] / len(run.train_data), "batch_tokens": tokens}


def finish_rows(run: Run, steps: list) -> list[dict]:
    """Rows of kind "train" for `steps`, [(fields, {name: device scalar}), ...]: all since the last
    lap of the clock, so times exclude evaluation and saving. The host waits for the device here."""
    if not steps:
        return []
    log_smaller_micro_batch(run)
    on_device = [number for _, named in steps for number in named.values()]
    to_device = partial(torch.as_tensor, dtype=precise(run.device), device=run.device)
    values = iter(torch.stack([to_device(n).detach().reshape(()) for n in on_device]).tolist())
    rows = [fields | {name: next(values) for name in named} for fields, named in steps]
    seconds = run.clock.lap("train")
    tokens_per_sec = sum(row.pop("batch_tokens") for row in rows) / seconds
    flops = flops_per_token(run.model) * tokens_per_sec
    if flops > run.max_flops:  # the machine was busy when its peak was measured
        run.max_flops = math.nan
    mfu = flops / run.max_flops
    common = {
        "step_ms": 1000 * seconds / len(rows),
        "tokens_per_sec": tokens_per_sec,
        "mfu": None if math.isnan(mfu) else mfu,
        "mem_gb": machine.memory_gb(run.device),
        "gpu_util": machine.gpu_util(run.device),
    }
    for row in rows:
        run.state["tokens"] += int(row.pop("targets"))
        row.update(kind="train", tokens=run.state["tokens"], skipped=int(row["skipped"]), **common)
    return rows


if __name__ == "__main__":
    machine.exit_process(cli.run_script(main))

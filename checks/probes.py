"""GO or NO-GO: what check.py asks of a loop before a long run. docs/trouble.md explains each check.

A check is a generator of (name, fine, found) or (name, fine, found, passable), for a bench.Job; it
raises NotAsked where it does not apply. It asks for behaviour, of the functions that the run itself
calls, so that it finds what nobody thought of: it knows no bug by name. Most of all it compares a
run with that of a plain loop: twin.py. What that one believes is asked here: the model, the data,
the schedule, which weights decay."""

import io
import math
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.flop_counter import FlopCounterMode

import train
from checks.twin import gradients_of, loss_in, said, setting, twin_checks
from plumbing import data
from plumbing.cli import read_knobs

FEW = 64  # tokens in the vocabulary of a probe
PROBED = 8192  # tokens that one probe of the model may compute
MAX_BYTES = 2**25  # of a text that is read
LOOK_BACK = 4  # places, in the task that shows whether positions matter
QUIET = {"dropout": 0.0, "label_smoothing": 0.0, "grad_checkpoint": False}
# The schedules with a warmup of 100 steps, a peak of 1 and a minimum of 0.1 at step 1,100: rates at
PROBED_STEPS = (0, 49, 99, 350, 600, 850, 1100, 1200)
RATES = {
    "cosine": (0.01, 0.5, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1),
    "onecycle": (0.04, 0.508, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1),
    "linear": (0.01, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1),
    "wsd": (0.01, 0.5, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1),
    "constant": (0.01, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "step": (0.01, 0.5, 1.0, 0.5, 0.25, 0.125, 0.1, 0.1),
}


class NotAsked(Exception):
    """The check does not apply to this model or data."""


def require_text(job):
    if "tokenizer" not in job.meta:
        raise NotAsked("no text")


def seeded(function, *inputs):
    """function(*inputs) with the same random numbers each time: a fork may skip layers at random."""
    with torch.random.fork_rng(devices=[]):
        train.seed_everything(2)
        return function(*inputs)


# ---- can it learn? -------------------------------------------------------------------------------


def learning_checks(job):
    """Up to 200 steps on one small batch, which a loop that can learn memorizes."""
    few = max(1, min(train.batch_size, 256 // train.block_size))
    first = math.inf
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        batch = job.batch()
        for step in range(1, 201):
            lr = train.peak_lr * min(1, step / 20)
            last = train.train_step(run.model, run, *batch, lr)["loss"].item()
            train.count_batch(run, batch[1])
            first = last if step == 1 else first
            if not last > first / 10:  # also if it is NaN
                break
    found = said(loss=first, then=last, steps=step)
    # a small model, or a small rate, takes its time
    yield "one batch overfits", last < first / 10, found, last < 0.998 * first
    uniform = math.log(job.meta["vocab_size"])
    found = said(loss=first, of_a_uniform_guess=uniform)
    yield "loss at initialization", abs(first - uniform) < 0.3, found, "tokenizer" not in job.meta


# ---- the model -----------------------------------------------------------------------------------


def new_model(job, vocab_size=FEW, noise=1.0, **knobs):
    """A new model by the run's knobs and these, in train mode. noise: on each weight, since one
    that starts at zero would hide what its layer does."""
    shape = {name: vars(train)[name] for name in read_knobs(train.__file__)}
    train.seed_everything(1)
    model = train.build_model(shape | QUIET | knobs, vocab_size).to(job.device).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight) / math.sqrt(weight.size(-1))
    return model


def random_tokens(job, rows, length, vocab_size=FEW):
    return torch.randint(vocab_size, (rows, length)).to(job.device)


@torch.no_grad()
def causality_check(job):
    """At any offset, in training, in evaluation, and in a context where other kernels compute."""
    require_text(job)
    leaks = []
    for least, training in ((0, True), (0, False), (544, False)):
        length = max(least, train.block_size)
        model = new_model(job, block_size=length).train(training)
        tokens = random_tokens(job, 1, length)
        places = torch.randperm(length)[: max(8, PROBED // length)]
        another = torch.arange(length) == places[:, None]
        others = (tokens + another.to(job.device)) % FEW
        moved = (seeded(model, others) - seeded(model, tokens)).abs().amax(-1).cpu()
        is_before = torch.arange(length) < places[:, None]
        leaks.append(moved[is_before].amax().item())
    found = said(logits_before_another_token_move_by=max(leaks))
    yield "no look into the future", max(leaks) < 1e-4, found


@torch.no_grad()
def sampling_check(job):
    """Is each token that generate() draws the likeliest by the model's own logits, where it should
    be? Within the context, and past it."""
    require_text(job)
    length = train.block_size
    model = new_model(job).eval()
    wrong = []
    for size in (1, length):
        prompt = random_tokens(job, 32, size)
        new = train.generate(model, prompt, 3, length, FEW, temperature=1e-5, top_k=2)
        whole = torch.cat([prompt, *new], dim=1)
        for place in range(size, size + 3):
            logits = model(whole[:, max(0, place - length) : place])[:, -1, :FEW]
            wrong.append(logits.argmax(-1) != whole[:, place])
    share = torch.cat(wrong).double().mean().item()
    yield "sampling draws from the model", share < 0.01, said(share_of_wrong_tokens=share)


def position_check(job):
    """Of a small model of one layer that learns to repeat the token of LOOK_BACK places before, the
    loss at its worst place. A bag of tokens cannot, nor can attention whose queries or keys have no
    position."""
    require_text(job)
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 64, "block_size": 32}
    model = new_model(job, 16, 0.0, **shape, conv_width=1, ngram_rows=0).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(200):
        tokens = random_tokens(job, 16, 32, 16)
        targets = tokens.roll(LOOK_BACK, 1)
        targets[:, :LOOK_BACK] = -100
        optimizer.zero_grad()
        loss = loss_in(model(tokens, targets))
        loss.backward()
        optimizer.step()
    tokens = random_tokens(job, 64, 32, 16)
    with torch.no_grad():
        logits = model.eval()(tokens)[:, LOOK_BACK:].transpose(1, 2)
    losses = cross_entropy(logits.float(), tokens[:, :-LOOK_BACK], reduction="none").mean(0)
    worst = losses.max().item()
    found = said(loss_of_repeating_the_token_four_back=loss.item(), at_the_worst_place=worst)
    yield "positions matter", worst < 1.6, found


def loss_check(job):
    """Is the loss, also of a padded vocabulary, the mean of -log p by the model's own logits? And
    its gradient that of this mean?"""
    require_text(job)
    for vocab_size in (FEW, 1100):
        model = new_model(job, vocab_size, n_layer=1)
        inputs, targets = random_tokens(job, 8, train.block_size, vocab_size).chunk(2)
        targets[:, : train.block_size // 4] = -100
        losses = [loss_in(seeded(model, inputs, targets))]
        logits = seeded(model, inputs).double()
        losses.append(cross_entropy(logits.flatten(0, 1), targets.flatten()))
        gradients = []
        for loss in losses:
            model.zero_grad()
            loss.backward()
            gradients.append(parameters_to_vector(gradients_of(model)))
        apart = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
        off_by = (losses[0] / losses[1] - 1).abs()
        found = said(off_by=off_by.item(), its_gradient_by=apart.item(), classes=vocab_size)
        fine = (off_by < 0.02 and apart < 0.05).item()  # a fork may add a small term to it
        if not fine:
            break
    yield "the loss is the mean of -log p", fine, found


def gradient_check(job):
    """Does the loss, along random directions in each weight, change as its gradient says?"""
    require_text(job)
    length = min(16, train.block_size)
    model = new_model(job, block_size=length).double()
    batch = random_tokens(job, 2, length), random_tokens(job, 2, length)
    loss_in(seeded(model, *batch)).backward()
    errors = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        begin = weight.detach()
        gradient = torch.zeros_like(begin) if weight.grad is None else weight.grad
        size = 0.006 * begin.norm()  # losses are in float32
        usual = gradient.norm() * size / math.sqrt(weight.numel())
        missing = []
        for _ in "123":  # in one direction a router may choose another way
            step = torch.randn_like(begin)
            step *= size / step.norm()
            high, low = (
                loss_in(seeded(functional_call, model, {name: end}, batch)).item()
                for end in (begin + step, begin - step)
            )
            error = (high - low) / 2 - (gradient * step).sum()
            missing.append((error.abs() / usual.clamp(min=1e-5)).item())
        errors[name] = median(missing)
    name = max(errors, key=errors.get)
    found = said(part_of_its_slope_that_is_missing=errors[name], weight=name)
    yield "gradients are those of the loss", errors[name] < 0.2, found


def flops_check(job):
    """Is MFU true? The model's own figure against torch's count of one step."""
    with setting(grad_checkpoint=False):  # what is computed twice does not count, by convention
        run = job.fresh_run()
    batch = [part[: train.batch_size] for part in job.batch()]
    with FlopCounterMode(display=False) as counter:
        train.forward_backward(run.model, run, *batch, train.count_targets(batch[1]))
    told = train.flops_per_token(run.model)
    counted = counter.get_total_flops() / batch[1].numel()
    fine = None if math.isnan(told) else abs(told / counted - 1) < 0.1
    yield "FLOPs of a token", fine, said(flops_per_token_says=told, torch_counts=counted), True


# ---- the optimizer and its rate ------------------------------------------------------------------


def group_check(job):
    """Of a small module with each kind of weight, whatever the run's own model has."""
    small = torch.nn.Module()
    small.token = torch.nn.Embedding(8, 4)
    small.norm = torch.nn.LayerNorm(4)
    small.hidden = torch.nn.Linear(4, 4)
    small.head = torch.nn.Linear(4, 8)
    small.muon_prefix = "hidden"
    knobs = train.peak_lr, 0.1, train.beta1, train.beta2, train.momentum
    decays = {}
    for optimizer in train.configure_optimizers(small, train.optimizer, *knobs, job.device.type):
        for group in optimizer.param_groups:
            decays |= dict.fromkeys(group["params"], group["weight_decay"])
    wrong = []
    for name, weight in small.named_parameters():
        if decays.get(weight) != (0.1 if weight.ndim > 1 else 0.0):
            wrong.append(name)
    yield "matrices decay, vectors do not", not wrong, said(wrong=wrong)


def schedule_check(job):
    if train.schedule not in RATES:
        raise NotAsked(f"--schedule={train.schedule} is one of your own")
    with setting(
        peak_lr=1.0,
        min_lr=0.1,
        warmup_steps=100,
        max_steps=1100,
        decay_steps=0,
        accum_steps=4,
        cooldown_steps=0,
        step_size=250,
        gamma=0.5,
    ):
        rates = [train.lr_at(step) for step in PROBED_STEPS]
    wrong = float(np.abs(np.subtract(rates, RATES[train.schedule])).max())
    yield "the schedule is the one named", wrong < 0.01, said(schedule=train.schedule, off_by=wrong)


# ---- the data ------------------------------------------------------------------------------------


def data_checks(job):
    """Order, windows, epochs and splits. A mask (-100) may hide any target, but shows no other."""
    train_data = job.run.train_data
    yield order_of(job, train_data)
    require_text(job)
    inputs, targets = map(np.asarray, train_data[0, 64])
    words = data.tokenizer_of(job.meta).decode(inputs[0].tolist())
    yield "the first sequence", True, repr(words[:70])
    is_shuffled = not np.array_equal(inputs[1:, 0], targets[:-1, -1])
    shifted = is_shifted(inputs, targets)
    found = said(one_place_on=shifted, shuffled=is_shuffled)
    yield "targets are the next tokens", shifted and is_shuffled, found
    text, val_text = (tokens_on_disk(job, split) for split in data.SPLITS)
    if type(train_data) is not train.ShuffledWindows or text is None:
        raise NotAsked("no windows of a text on disk")
    epoch = Counter()
    for first in range(0, len(train_data), 1000):
        count = min(1000, len(train_data) - first)
        epoch.update(hashes(train_data[first, count][0]))
    wrong = min(wrong_windows(text, inputs[:8], epoch))
    found = said(windows=epoch.total(), not_of_the_text_or_left_out=wrong)
    yield "an epoch has each sequence once", not wrong, found
    width = inputs.shape[1]
    places = sliding_window_view(val_text[: 2**20], width)
    share = len(epoch.keys() & hashes(places)) * width / len(places)
    yield "train and validation share no window", share == 0, said(share=share), share < 0.5
    if -100 in targets:
        raise NotAsked("targets are masked")
    sizes = {"all": 0, "eval_tokens": 2 * width}
    fine = {name: is_evaluated_once(val_text, size) for name, size in sizes.items()}
    yield "evaluation sees each token once", all(fine.values()), said(**fine)


def order_of(job, train_data):
    """The check that batches, epochs and seeds differ, in sequences and weights."""
    size = train.sequences_at(0)
    weights = list(job.fresh_run().model.state_dict().values())
    with setting(seed=train.seed + 1), redirect_stdout(io.StringIO()):
        other_data, *_ = train.open_dataset(None)
        others = job.fresh_run().model.state_dict().values()
    batches = {
        "next batch": train_data[size, size],
        "next epoch": train_data[len(train_data), size],
        "other seed": other_data[0, size],
    }
    first = hashes(train_data[0, size][0])
    same = [name for name, batch in batches.items() if hashes(batch[0]) == first]
    if all(map(torch.equal, weights, others)):
        same.append("weights of the other seed")
    # only of a text must each epoch and seed have an order of their own
    passable = "tokenizer" not in job.meta and {*same} <= {"next epoch", "other seed"}
    return "batches differ", not same, said(same=same), passable


def is_shifted(inputs, targets):
    """Whether each target that counts, but for the last of a row, is the next input."""
    shown = targets[:, :-1]
    return bool(((shown == inputs[:, 1:]) | (shown == -100)).all())


def hashes(rows):
    return [hash(np.asarray(row).astype(np.float64).tobytes()) for row in rows]


def tokens_on_disk(job, split):
    """The tokens of the split's file; None if there is none, or one that takes minutes to search."""
    path = Path(train.data_dir, job.run.facts["data"]["name"], f"{split}.bin")
    if path.is_file() and path.stat().st_size <= MAX_BYTES:
        return np.memmap(path, job.meta["dtype"], "r")
    return None


def wrong_windows(text, rows, epoch):
    """Yields how many windows of an epoch are not those of the text, cut side by side, or are left
    out, if the boundaries are where one of `rows` says."""
    for row in rows:  # one may stand twice in the text
        place = text.tobytes().find(row.astype(text.dtype).tobytes()) // text.itemsize
        windows = sliding_window_view(text[place % len(row) : -1], len(row))
        expected = Counter(hashes(windows[:: len(row)]))
        left_out = (expected - epoch).total()
        yield (epoch - expected).total() + max(0, left_out - 1)  # the last one may not fit


def is_evaluated_once(text, n_targets):
    """Whether the targets that count are the first `n_targets` of the text (0 = all), in order."""
    with setting(eval_tokens=n_targets), redirect_stdout(io.StringIO()):
        _, val_data, _ = train.open_dataset(None)
    inputs, targets = map(np.asarray, val_data[0, len(val_data)])
    expected = text[1 : 1 + (n_targets or len(text))]
    return is_shifted(inputs, targets) and np.array_equal(targets[targets != -100], expected)


CHECKS = (
    learning_checks,
    causality_check,
    sampling_check,
    position_check,
    loss_check,
    gradient_check,
    data_checks,
    flops_check,
    group_check,
    schedule_check,
    twin_checks,
)

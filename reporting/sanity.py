"""GO or NO-GO: what check.py asks of a loop before a long run. docs/trouble.md explains each check.

A check is a generator of (name, fine, found) or (name, fine, found, passable), for a bench.Job; it
raises NotAsked where it does not apply. It asks for behaviour, of the functions that the run itself
calls, so that it finds what nobody thought of: it knows no bug by name."""

import io
import math
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import replay
import train
from bench import setting
from lab.logged import Logged
from plumbing import checkpoint, data
from plumbing.cli import RunFailed, read_knobs

FEW = 64  # tokens in the vocabulary of a probe
PROBED = 8192  # tokens that one probe of the model may compute
MOST_TOKENS = 2**24  # of a text, or of an epoch, that are read
LOOK_BACK = 4  # places, in the task that shows whether positions matter
QUIET = {
    "dropout": 0.0,
    "label_smoothing": 0.0,
    "grad_checkpoint": False,
}
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
SHORT_RUN = {  # with accumulation, dropout and an average
    "max_steps": 6,
    "warmup_steps": 3,
    "decay_steps": 6,
    "plateau_factor": 1.0,
    "accum_steps": 2,
    "best_metric": "val_loss",
    "eval_interval": 1,
    "patience": 0,
    "save_interval": 3,
    "keep_last": 2,
    "milestone_interval": 0,
    "audit_interval": -1,
    "resume": "auto",
    "compile": "false",
    "report": False,
    "wandb_log": False,
}


class NotAsked(Exception):
    """The check does not apply to this model or data."""


def require_text(job):
    if "tokenizer" not in job.meta:
        raise NotAsked("no text")


def said(**numbers):
    """Words for what was found: its names and numbers."""
    return ", ".join(f"{name.replace('_', ' ')} {four_digits(n)}" for name, n in numbers.items())


def four_digits(number):
    if isinstance(number, list | tuple | set):
        return " ".join(map(four_digits, number)) or "none"
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def apart(ours, expected):
    """The norm of the difference of two lists of tensors, over the norm of the second."""
    ours = torch.cat([tensor.double().flatten() for tensor in ours])
    expected = torch.cat([tensor.double().flatten() for tensor in expected])
    size = expected.norm().clamp(min=1e-12)
    return ((ours - expected).norm() / size).item()


def all_equal(tensors, others):
    return all(map(torch.equal, tensors, others))


def loss_in(out):
    """The loss that a model returns, alone or with other numbers."""
    return out[0] if isinstance(out, tuple) else out


def seeded(function, *inputs):
    """function(*inputs) with the same random numbers each time: a fork may skip layers at random."""
    with torch.random.fork_rng(devices=[]):
        train.seed_everything(2)
        return function(*inputs)


def gradients(model):
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def weights_of(model):
    """All that its state_dict() holds."""
    return [tensor.clone() for tensor in model.state_dict().values()]


# ---- can it learn? -------------------------------------------------------------------------------


@lru_cache(1)
def memorize(job):
    """(run, batch, losses, gradient norms) of up to 200 steps on one small batch, which a loop that
    can learn memorizes."""
    few = max(1, min(train.batch_size, 256 // train.block_size))
    losses = []
    norms = []
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        batch = job.batch()
        for step in range(200):
            lr = train.peak_lr * min(1, (step + 1) / 20)
            numbers = train.train_step(run.model, run, *batch, lr)
            train.count_batch(run, batch[1])
            losses.append(numbers["loss"].item())
            norms.append(numbers["grad_norm"].item())
            if not losses[-1] > losses[0] / 10:  # also if it is NaN
                break
    return run, batch, losses, norms


def learning_checks(job):
    _, _, losses, norms = memorize(job)
    first, last = losses[0], losses[-1]
    falls = last < 0.998 * first  # a small model, or a small rate, takes its time
    found = said(loss=first, then=last, steps=len(losses))
    yield "one batch overfits", last < first / 10, found, falls
    uniform = math.log(job.meta["vocab_size"])
    found = said(loss=first, of_a_uniform_guess=uniform)
    yield "loss at initialization", abs(first - uniform) < 0.3, found, "tokenizer" not in job.meta
    highest = max(norms[:10])
    found = said(first=norms[0], highest_in_ten_steps=highest, usual="0.1 to 2")
    yield "gradient norm", 0.1 < norms[0] and highest < 2, found, True


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
        places = torch.randperm(length)[: max(8, PROBED // length)].sort().values
        others = tokens.repeat(len(places), 1)
        for row, place in enumerate(places):
            others[row, place] = (others[row, place] + 1) % FEW
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
        for how in ({"temperature": 0}, {"temperature": 1e-5}, {"top_k": 1}):
            new = train.generate(model, prompt, 3, length, FEW, **how)
            whole = torch.cat([prompt, *new], dim=1)
            for place in range(size, size + 3):
                logits = model(whole[:, max(0, place - length) : place])[:, -1, :FEW]
                wrong.append(logits.argmax(-1) != whole[:, place])
    share = torch.cat(wrong).double().mean().item()
    yield "sampling draws from the model", share < 0.01, said(share_of_wrong_tokens=share)


def position_check(job):
    require_text(job)
    swap = effect_of_swaps(job)
    loss, steps = look_back(job)
    found = said(loss_of_repeating_the_token_four_back=loss, steps=steps, effect_of_swaps=swap)
    fine = swap > 1e-3 and loss < 0.7 and steps <= 120
    yield "positions matter", fine, found, swap > 1e-3 and loss < 1.3


@torch.no_grad()
def effect_of_swaps(job):
    """How far two tokens that change places move the last logits of one layer, over what one of
    them alone does: the least over pairs of places that matter at all, of any distance."""
    length = train.block_size
    model = new_model(job, n_layer=1, conv_width=1, ngram_rows=0).eval()
    rows = random_tokens(job, 1, length).repeat(4, 1)
    effects = [math.inf]
    for distance in 1 + np.random.permutation(max(0, length - 2))[: max(8, 8 * PROBED // length)]:
        first = np.random.randint(length - 1 - distance)
        tokens = rows.clone()
        tokens[:, first] = torch.tensor([0, 1, 1, 0])
        tokens[:, first + distance] = torch.tensor([1, 0, 1, 0])
        logits = model(tokens)[:, -1]
        swapped, *alone = (logits[1:] - logits[0]).abs().amax(-1).tolist()
        if min(alone) > 1e-4:
            effects.append(swapped / min(alone))
    return min(effects)


def look_back(job):
    """(loss, steps) of a small model of one layer that learns to repeat the token of LOOK_BACK
    places before. A bag of tokens cannot, nor can attention whose queries or keys have no
    position."""
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 64, "block_size": 32}
    model = new_model(job, 16, 0.0, **shape, conv_width=1, ngram_rows=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loss, steps = math.inf, 0
    while steps < 200 and not loss < 0.7:
        tokens = random_tokens(job, 16, 32, 16)
        targets = tokens.roll(LOOK_BACK, 1)
        targets[:, :LOOK_BACK] = -100
        optimizer.zero_grad()
        out = loss_in(model(tokens, targets))
        out.backward()
        optimizer.step()
        loss, steps = out.item(), steps + 1
    return loss, steps


# ---- the loss, its gradient, dropout -------------------------------------------------------------


def loss_check(job):
    """Of random weights: for a small vocabulary, and for one whose loss is computed in chunks."""
    require_text(job)
    losses = []
    errors = []
    length = train.block_size
    for vocab_size, rows in ((FEW, 4), (1100, -(-20_000 // length))):
        model = new_model(job, vocab_size, n_layer=1)
        inputs = random_tokens(job, rows, length, vocab_size)
        targets = random_tokens(job, rows, length, vocab_size)
        targets[:, : length // 4] = -100
        for training in (True, False):
            model.train(training).zero_grad()
            loss = loss_in(model(inputs, targets))
            loss.backward()
            told = gradients(model)
            model.zero_grad()
            own = cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
            own.backward()
            losses.append(abs(loss.item() / own.item() - 1))
            errors.append(apart(told, gradients(model)))
    found = said(off_by=max(losses), its_gradient_by=max(errors))
    yield "the loss is the mean of -log p", max(losses) < 0.02 and max(errors) < 0.05, found


def gradient_check(job):
    """Does the loss, along random directions in each weight, change as its gradient says?"""
    require_text(job)
    length = min(16, train.block_size)
    model = new_model(job, block_size=length).double()
    batch = random_tokens(job, 2, length), random_tokens(job, 2, length)
    loss_in(seeded(model, *batch)).backward()
    errors = {}
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        size = 0.006 * weight.detach().norm()  # losses are in float32
        usual = gradient.norm() * size / math.sqrt(weight.numel())
        missing = []
        for _ in "123":  # in one direction a router may choose another way
            step = torch.randn_like(weight)
            step *= size / step.norm()
            ends = [{name: weight.detach() + move} for move in (step, -step)]
            high, low = (loss_in(seeded(functional_call, model, end, batch)).item() for end in ends)
            error = (high - low) / 2 - (gradient * step).sum()
            missing.append((error.abs() / usual.clamp(min=1e-5)).item())
        errors[name] = median(missing)
    name = max(errors, key=errors.get)
    found = said(part_of_its_slope_that_is_missing=errors[name], weight=name)
    yield "gradients are those of the loss", errors[name] < 0.2, found


def dropout_checks(job):
    """Does dropout draw anew in each step, never in evaluation, and the same where activations are
    computed again?"""
    memorized, batch, *_ = memorize(job)
    count = train.count_targets(batch[1])
    results = []
    for again in (False, True):
        with setting(dropout=0.2, label_smoothing=0.0, grad_checkpoint=again):
            run = job.fresh_run()
            run.model.load_state_dict(memorized.model.state_dict())
            steps = [train.train_step(run.model, run, *batch, 0.0)["loss"].item() for _ in "123"]
            train.seed_everything(2)
            run.model.zero_grad()
            train.forward_backward(run.model, run, *batch, count)
            results.append(gradients(run.model))
            run.model.eval()
            quiet = {
                train.forward_backward(run.model, run, *batch, count)["loss"].item() for _ in "12"
            }
    if {*steps} == quiet:
        raise NotAsked("a model without dropout")
    found = said(steps_on_one_batch=steps, in_evaluation=quiet)
    yield "dropout draws anew", len({*steps}) == 3 and len(quiet) == 1, found
    error = apart(*results)
    yield "grad_checkpoint changes no gradient", error < 0.05, said(off_by=error)


# ---- the optimizer, and a step -------------------------------------------------------------------


def update_checks(job):
    """Three steps on random gradients, of other sizes and at other rates, and one that is NaN,
    beside torch's own optimizers."""
    run = job.fresh_run()
    batch = [part[:2] for part in job.batch()]
    weights = {name: w for name, w in run.model.named_parameters() if w.requires_grad}
    size = 1.0
    for weight in weights.values():
        weight.data += 0.3 * torch.randn_like(weight)
        weight.register_hook(lambda gradient: size * torch.randn_like(gradient))
    begin = {name: weight.detach().clone() for name, weight in weights.items()}
    twins = twins_of(run)
    for size, lr in ((1.0, 0.1), (math.nan, 0.1), (16.0, 0.03), (0.1, 0.2)):
        before = weights_of(run.model)
        skipped = train.train_step(run.model, run, *batch, lr)["skipped"].item()
        if math.isnan(size):
            kept = all_equal(before, weights_of(run.model))
            continue
        for weight, (parts, optimizer, group) in twins.items():
            if weight.grad is not None:
                for part, piece in zip(parts, weight.grad.chunk(len(parts)), strict=True):
                    part.grad = piece.clone()
                optimizer.param_groups[0]["lr"] = lr * group.get("lr_scale", 1.0)
                optimizer.step()
    errors = {}
    for name, weight in weights.items():
        moved = weight.detach() - begin[name]
        if weight in twins:
            parts, *_ = twins[weight]
            errors[name] = apart([moved], [torch.cat(parts).detach() - begin[name]])
        if not moved.any() and weight.requires_grad:
            errors[name] = 1.0
    wrong = [name for name, error in errors.items() if not error < 0.03]  # Muon is in bfloat16
    found = said(
        at_most=max(errors.values(), default=0.0), from_torchs=train.optimizer, wrong=wrong
    )
    yield "each weight moves as its optimizer says", not wrong, found
    found = said(skipped=skipped, weights_as_before=kept)
    yield "an update that is not finite changes nothing", kept, found


def twins_of(run):
    """{weight: (its parts, copied; torch's own optimizer of them; its group)}, for the optimizers
    that torch has. A decay of 1 shows in three steps."""
    model = run.model
    stacked = {m.weight: m.muon_parts for m in model.modules() if hasattr(m, "muon_parts")}
    betas = {"betas": (train.beta1, train.beta2)}
    own = {
        "muon": (torch.optim.Muon, {"momentum": train.momentum, "adjust_lr_fn": "match_rms_adamw"}),
        "adamw": (torch.optim.AdamW, betas),
        "adam": (torch.optim.Adam, betas),
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": train.momentum}),
    }
    twins = {}
    for optimizer in run.optimizers if train.optimizer in own else ():
        is_rest = train.optimizer == "muon" and isinstance(optimizer, torch.optim.AdamW)
        kind, how = own["adamw" if is_rest else train.optimizer]
        for group in optimizer.param_groups:
            group["weight_decay"] = 1.0 if group["weight_decay"] else 0.0
            for weight in group["params"]:
                count = stacked.get(weight, 1) if kind is torch.optim.Muon else 1
                parts = [torch.nn.Parameter(p.clone()) for p in weight.detach().chunk(count)]
                twin = kind(parts, lr=1.0, weight_decay=group["weight_decay"], **how)
                twins[weight] = parts, twin, group
    return twins


def group_check(job):
    """Of a small module with each kind of weight, whatever the run's own model has."""
    small = torch.nn.Module()
    small.token = torch.nn.Embedding(8, 4)
    small.norm = torch.nn.LayerNorm(4)
    small.hidden = torch.nn.Linear(4, 4)
    small.head = torch.nn.Linear(4, 8)
    small.muon_prefix = "hidden"
    knobs = train.peak_lr, 0.1, train.beta1, train.beta2, train.momentum
    wrong = []
    names = {weight: name for name, weight in small.named_parameters()}
    for optimizer in train.configure_optimizers(small, train.optimizer, *knobs, job.device.type):
        by_muon = type(optimizer).__name__ == "Muon"
        for group in optimizer.param_groups:
            for weight in group["params"]:
                name = names.pop(weight)
                is_hidden = name == "hidden.weight" and train.optimizer == "muon"
                decays = group["weight_decay"] == (0.1 if weight.ndim > 1 else 0.0)
                wrong += [] if decays and by_muon == is_hidden else [name]
    wrong += names.values()  # in no group
    yield "matrices decay, vectors do not", not wrong, said(wrong=wrong)


def step_check(job):
    """Does the optimizer get the clipped mean gradient of a batch that is cut into unequal
    micro-batches, of which one has fewer targets?"""
    run, (inputs, _), *_ = memorize(job)
    run.model.eval()  # BatchNorm's statistics in training are those of a micro-batch
    few = max(3, len(inputs))  # half of them it knows
    batch = data.to_device(job.run.train_data[len(inputs) // 2, few], job.device)
    if "tokenizer" in job.meta:
        batch[1][0, : batch[1].size(1) // 2] = -100
    is_scaled = run.scaler.is_enabled()
    scale = 1.0
    steps = 2
    if train.dtype == "float16":  # it has to come down from a scale that overflows
        run.scaler = torch.amp.GradScaler(job.device.type, init_scale=2.0**40, enabled=is_scaled)
        scale = 2.0**16
        steps = 40
    run.model.zero_grad()
    with train.autocast(job.device):
        loss = loss_in(run.model(*batch))
    (scale * loss).backward()
    own = [gradient / scale for gradient in gradients(run.model)]
    norm = torch.nn.utils.get_total_norm(own)
    run.state["micro_batch"] = 2 * few // 3
    with setting(grad_clip=norm.item() / 2):
        for _ in range(steps):
            numbers = train.train_step(run.model, run, *batch, 1e-9)
    run.model.train()
    gradient = apart(gradients(run.model), [each / 2 for each in own])
    errors = {
        "gradient_off_by": gradient,
        "loss": apart([numbers["loss"]], [loss.detach()]),
        "norm": apart([numbers["grad_norm"]], [norm]),
    }
    fine = max(errors.values()) < 0.02 and is_scaled == (train.dtype == "float16")
    yield "a step is that of its batch", fine, said(**errors, dtype=train.dtype, scaled=is_scaled)


# ---- the data ------------------------------------------------------------------------------------


def tokens_on_disk(job, split):
    """The tokens of the split's file; None if this run's data is not one text on disk, or a text so
    long that to search it would take minutes."""
    path = Path(train.data_dir, job.run.facts["data"]["name"], f"{split}.bin")
    if "tokenizer" not in job.meta or not path.is_file():
        return None
    tokens = np.memmap(path, job.meta["dtype"], "r")
    return tokens if len(tokens) <= MOST_TOKENS else None


def hashes_of(rows):
    return [hash(row.astype(np.float64).tobytes()) for row in rows]


def hashes(batch):
    """One for each sequence: of its inputs, and of its last target if they are tokens."""
    inputs, targets = map(np.asarray, batch)
    if inputs.ndim == targets.ndim:
        inputs = np.concatenate([inputs, targets[:, -1:]], axis=1)
    return hashes_of(inputs)


@lru_cache(1)
def epoch_of(job):
    """How often each sequence comes in an epoch, or among its first ones, by their hashes."""
    train_data = job.run.train_data
    count = max(1, min(len(train_data), MOST_TOKENS // job.batch()[0][0].numel()))
    found = Counter()
    for start in range(0, count, 1000):
        found.update(hashes(train_data[start, min(1000, count - start)]))
    return found


def order_check(job):
    """Sequences and weights."""
    train_data = job.run.train_data
    size = train.rows_at(0)
    weights = weights_of(job.fresh_run().model)
    with setting(seed=train.seed + 1):
        other_data, *_ = train.open_dataset(None)
        same_weights = all_equal(weights, weights_of(job.fresh_run().model))
    batches = {
        "next batch": train_data[size, size],
        "next epoch": train_data[len(train_data), size],
        "other seed": other_data[0, size],
    }
    first = hashes(train_data[0, size])
    same = [name for name, batch in batches.items() if hashes(batch) == first]
    # only of a text must each epoch and seed have an order of their own
    passable = "tokenizer" not in job.meta and "next batch" not in same and not same_weights
    fine = not same and not same_weights
    yield "batches differ", fine, said(same=same, weights_of_the_other_seed=same_weights), passable


def epoch_check(job):
    epoch = epoch_of(job)
    twice = 1 - len(epoch.keys()) / epoch.total()
    wrong = 0
    if tokens_on_disk(job, "train") is not None:
        wrong = min(wrong_windows(job))
        twice = 0.0  # in a text, windows may be equal
    found = said(share_that_comes_twice=twice, not_of_the_text_or_left_out=wrong)
    yield "an epoch has each sequence once", twice < 0.01 and not wrong, found


def wrong_windows(job):
    """Yields how many windows of an epoch are not those of the text, cut side by side, or are left
    out, for some places where it may have been cut."""
    text = tokens_on_disk(job, "train")
    epoch = epoch_of(job)
    for row in np.asarray(job.run.train_data[0, 8][0]):  # one may stand twice in the text
        place = text.tobytes().find(row.astype(text.dtype).tobytes()) // text.itemsize
        windows = np.lib.stride_tricks.sliding_window_view(text[place % len(row) :], len(row) + 1)
        expected = Counter(hashes_of(windows[:: len(row)]))
        left_out = (expected - epoch).total()
        yield (epoch - expected).total() + max(0, left_out - 1)  # the last one may not fit


def text_checks(job):
    require_text(job)
    inputs, targets = map(np.asarray, job.run.train_data[0, 64])
    words = data.tokenizer_of(job.meta).decode(inputs[0].tolist())
    yield "the first sequence", True, repr(words[:70])
    shifted = np.array_equal(inputs[:, 1:], targets[:, :-1])
    in_order = np.array_equal(inputs[1:, 0], targets[:-1, -1])
    found = said(one_place_on=shifted, sequences_in_the_order_of_the_text=in_order)
    yield "targets are the next tokens", shifted and not in_order, found


def val_text(job):
    require_text(job)
    text = tokens_on_disk(job, "val")
    if text is None:
        raise NotAsked("no text on disk")
    return text


def leak_check(job):
    """Wherever in the validation text the sequences of training may begin."""
    text = val_text(job)
    width = job.run.train_data[0, 1][0].shape[1] + 1
    text = text[: 2**20]
    windows = np.lib.stride_tricks.sliding_window_view(text, width)
    shared = len(epoch_of(job).keys() & hashes_of(windows))
    share = shared * width / len(text)
    yield "train and validation share no window", shared == 0, said(share=share), share < 0.5


def coverage_check(job):
    """By content: the validation targets that count are the validation text."""
    text = val_text(job)
    with setting(eval_tokens=0):
        _, val_data, _ = train.open_dataset(None)
    windows = [val_data[place, 1] for place in range(len(val_data))]
    inputs, targets = (
        np.concatenate([*map(np.ravel, part)]) for part in zip(*windows, strict=True)
    )
    counted = targets != -100
    same = np.array_equal(targets[counted], text[1:]) and np.array_equal(inputs[counted], text[:-1])
    found = said(targets=counted.sum(), tokens=len(text), in_order=same)
    yield "evaluation sees each token once", same, found


# ---- evaluation ----------------------------------------------------------------------------------


class Part:
    """A dataset of the sequences in these tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, batch):
        first, count = batch
        return [tensor[first : first + count] for tensor in self.tensors]


def evaluation_checks(job):
    """Is the validation loss the mean of -log p of the weights, or of their averages, however the
    data is cut, and is the training as before? Of a model that knows one batch, so that losses
    differ between sequences."""
    val_data = job.run.val_data
    count = min(len(val_data), 11)
    if isinstance(val_data, list):
        raise NotAsked("validation data of one's own")
    windows = [val_data[place, 1] for place in (*range(count - 1), len(val_data) - 1)]
    windows = [torch.cat([*map(torch.as_tensor, part)]) for part in zip(*windows, strict=True)]
    if windows[1].is_floating_point():
        raise NotAsked("targets that are no classes")
    with setting(dropout=train.dropout or 0.2):
        run = replace(job.fresh_run(), ema={})
    average = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    of_average, *_ = evaluated_numbers(job, run, windows)
    run.model.load_state_dict(memorize(job)[0].model.state_dict())
    own, right, total = evaluated_numbers(job, run, windows)
    expected = {"val_loss": own, "val_accuracy": right}
    expected["val_tokens"] = (windows[1] != -100).sum().item()

    modes = [module.training for module in run.model.modules()]
    before = [torch.get_rng_state(), *weights_of(run.model)]
    losses = []
    fine = 0.99 < total < 1.0001
    backwards = [tensor.flip(0) for tensor in windows]
    for tensors, micro_batch in ((windows, count), (windows, 1), (backwards, max(1, count - 1))):
        state = run.state | {"micro_batch": micro_batch}
        numbers = train.evaluate(replace(run, val_data=Part(tensors), state=state))
        losses.append(numbers["val_loss"])
        for name, number in expected.items():
            fine = fine and math.isclose(numbers.get(name, number), number, rel_tol=0.005)
    found = said(of_log_p=own, evaluations=losses, right=right, probabilities_sum_to=total)
    yield "evaluation is the mean of -log p", fine, found
    fine = all_equal(before, [torch.get_rng_state(), *weights_of(run.model)])
    fine = fine and modes == [module.training for module in run.model.modules()]
    yield "training is as before an evaluation", fine, said(modes_and_weights_and_random_state=fine)

    with setting(ema_decay=0.9):
        told = train.evaluate(replace(run, ema=average, val_data=Part(windows)))["val_loss"]
    has_buffers = any(True for _ in run.model.buffers())  # such as BatchNorm's: not averaged
    passable = has_buffers and "tokenizer" not in job.meta
    fine = math.isclose(told, of_average, rel_tol=0.01)
    found = said(with_an_average=told, with_the_same_as_weights=of_average)
    yield "the average is what is evaluated", fine, found, passable


def evaluated_numbers(job, run, windows):
    """(mean -log p in float64, share of right predictions, sum of the probabilities of all classes)
    by the model's logits. Columns that only pad a head must have none."""
    inputs, targets = data.to_device(windows, job.device)
    run.model.eval()
    with torch.no_grad(), train.autocast(job.device):
        logits = run.model(inputs).double()
    run.model.train()
    real = logits[..., : job.meta["vocab_size"]]
    total = (real.logsumexp(-1) - logits.logsumexp(-1)).exp().mean()
    own = cross_entropy(real.flatten(0, -2), targets.flatten())
    right = (real.argmax(-1) == targets).sum() / (targets != -100).sum()
    return own.item(), right.item(), total.item()


def flops_check(job):
    """Is MFU true? The model's own figure against torch's count of one step."""
    with setting(grad_checkpoint=False):  # what is computed twice does not count, by convention
        run = job.fresh_run()
    batch = [part[: train.batch_size] for part in job.batch()]
    with FlopCounterMode(display=False) as counter:
        train.forward_backward(run.model, run, *batch, batch[1].numel())
    told = train.flops_per_token(run.model)
    counted = counter.get_total_flops() / batch[1].numel()
    fine = None if math.isnan(told) else abs(told / counted - 1) < 0.1
    yield "FLOPs of a token", fine, said(flops_per_token_says=told, torch_counts=counted), True


# ---- a run ---------------------------------------------------------------------------------------


class Witness(train.Watch):
    """Watches a run: what each step saw and returned, and what the average should be. At one step
    it spoils the weights, so that neither the first evaluation nor the last is the best."""

    spoiled_at = 4

    def begin(self, run):
        self.inputs = []
        self.rows = []
        self.targets = 0
        self.average = {n: w.detach().clone() for n, w in run.model.named_parameters()}

    def step(self, run, take, inputs, targets, lr):
        if run.state["step"] == self.spoiled_at:
            for weight in run.model.parameters():
                weight.data += torch.randn_like(weight)
        numbers = take()
        self.inputs.append(inputs.cpu())
        self.targets += train.count_targets(targets).item()
        self.rows.append((lr, numbers["loss"].item(), self.targets, len(inputs)))
        for name, weight in run.model.named_parameters():
            self.average[name].lerp_(weight.detach(), 1 - train.ema_decay)
        return numbers

    def end(self, run):
        self.run = run


def short_run(job, name, watch=None):
    """(folder, knobs) of a run of a few steps."""
    few = SHORT_RUN | {
        "batch_size": max(1, min(train.batch_size, 1024 // train.block_size)),
        "eval_tokens": 4 * train.block_size,
        "dropout": train.dropout or 0.1,
        "ema_decay": train.ema_decay or 0.8,
    }
    folder = job.run.folder.path / name
    with setting(**few):
        train.main([f"--out_dir={folder}"], watch=watch)
    return folder, few


def resume_check(job):
    """Does a run that is stopped and resumed come to the same bits?"""
    with redirect_stdout(io.StringIO()) as printed:
        try:
            folder, few = short_run(job, "resumed")
            same = replay.main([str(folder), "--verify=true", "--since=3"]) == 0
        except RunFailed as error:
            same = False
            print(error)
    yield "a resume is bit for bit", same, printed.getvalue().strip().splitlines()[-1]


def run_checks(job):
    """Is each row what the step saw, at the rate of the schedule? Is the average one, and best.pt
    the best?"""
    watch = Witness()
    with redirect_stdout(io.StringIO()):
        folder, few = short_run(job, "watched", watch)
    log = Logged(folder)
    rows = [log.row(step, "train") for step in range(1, log.last + 1)]
    with setting(**few):
        expected = [
            (train.lr_at(n), *seen[1:3], train.rows_at(n)) for n, seen in enumerate(watch.rows)
        ]
    sequences = [0, *(row["sequences"] for row in rows)]
    counts = [after - before for before, after in zip(sequences, sequences[1:], strict=False)]
    logged = [(r["lr"], r["loss"], r["tokens"], n) for r, n in zip(rows, counts, strict=True)]
    fine = expected == logged == watch.rows
    yield "each row is that of its step", fine, said(rate_loss_tokens_sequences=logged[-1])
    width = min(inputs.size(1) for inputs in watch.inputs)  # a fork may begin with short sequences
    seen = torch.cat([inputs[:, :width] for inputs in watch.inputs])
    in_order = torch.equal(seen, torch.as_tensor(job.run.train_data[0, len(seen)][0])[:, :width])
    right = math.isclose(rows[-1]["epoch"], len(seen) / len(job.run.train_data))
    found = said(in_order=in_order, epoch=rows[-1]["epoch"])
    yield "each step sees the next sequences", in_order and right, found

    names = list(watch.run.ema)
    error = apart(watch.run.ema.values(), [watch.average[name] for name in names]) if names else 1.0
    found = said(weights=len(names), off_by=error)
    yield "the average is that of the weights", error < 0.01, found

    losses = [log.row(step, "eval").get("val_loss", math.nan) for step in range(len(rows) + 1)]
    best = losses.index(min(losses))
    step = checkpoint.load(folder / "best.pt")["state"]["step"]
    files = sorted(path.stem for path in folder.glob("*.pt"))
    fine = step == best and files == ["best", "ckpt_00000003", "ckpt_00000006"]
    yield "best.pt is the best", fine, said(step=step, best_in_the_log=best, files=files)


def schedule_check(job):
    if train.schedule not in RATES:
        raise NotAsked(f"--schedule={train.schedule} is one of your own")
    knobs = {
        "peak_lr": 1.0,
        "min_lr": 0.1,
        "warmup_steps": 100,
        "max_steps": 1100,
        "decay_steps": 0,
        "accum_steps": 4,
        "cooldown_steps": 0,
        "step_size": 250,
        "gamma": 0.5,
    }
    with setting(**knobs):
        rates = [train.lr_at(step) for step in PROBED_STEPS]
    wrong = max(abs(rate - right) for rate, right in zip(rates, RATES[train.schedule], strict=True))
    yield "the schedule is the one named", wrong < 0.01, said(schedule=train.schedule, off_by=wrong)


def price_check(job):
    """What the whole run will take, by a few eager steps. Never a fault."""
    run = job.fresh_run()
    step = job.step(run, run.model)
    step()
    began = time.perf_counter()
    for _ in "12":
        step()
    hours = (time.perf_counter() - began) / 2 * job.config["max_steps"] / 3600
    yield "the whole run", True, said(hours_of_eager_steps=hours)


CHECKS = (
    learning_checks,
    causality_check,
    sampling_check,
    position_check,
    loss_check,
    gradient_check,
    dropout_checks,
    text_checks,
    order_check,
    epoch_check,
    leak_check,
    coverage_check,
    evaluation_checks,
    flops_check,
    group_check,
    update_checks,
    step_check,
    schedule_check,
    resume_check,
    run_checks,
    price_check,
)

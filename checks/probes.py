"""GO or NO-GO: what check.py asks of a loop before a long run. docs/trouble.md explains each check.

A check is a generator of (name, fine, text) or (name, fine, text, passable), for a bench.Job. Where
it does not apply it raises NotAsked; another error means that the question does not fit this fork.
A check asks for behaviour, of the functions that the run itself calls, with the vocabulary, the
shape and the files of the run, so that it finds what nobody thought of: it knows no bug by name.
Most of all it compares a run with that of a plain loop: twin.py. What that one believes is asked
here: the model, the data, the schedule, which weights decay."""

import io
import math
from contextlib import redirect_stdout, suppress
from functools import partial

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.flop_counter import FlopCounterMode

import train
from checks.twin import loss_in, numbers_in, setting, text_of, twin_checks
from plumbing import data

PROBED = 4096  # tokens that one probe of the model may compute
MAX_LOGITS = 2**25  # numbers that it may return
MAX_TOKENS = 2**23  # of a text that is read
LOOK_BACK = 4  # places, in the task that shows whether positions matter
QUIET = {"dropout": 0.0, "label_smoothing": 0.0, "grad_checkpoint": False}
# The schedules with a warmup of 100 steps, a peak of 1 and a minimum of 0.1 at step 1,100: rates at
PROBED_STEPS = (0, 49, 350, 850, 1100)
RATES = {
    "cosine": (0.01, 0.5, 0.868, 0.232, 0.1),
    "onecycle": (0.04, 0.508, 0.868, 0.232, 0.1),
    "linear": (0.01, 0.5, 0.775, 0.325, 0.1),
    "wsd": (0.01, 0.5, 1.0, 1.0, 0.1),
    "constant": (0.01, 0.5, 1.0, 1.0, 1.0),
    "step": (0.01, 0.5, 0.5, 0.125, 0.1),
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
    """Up to 200 steps on one small batch, which a loop that can learn memorizes. Then the loss at
    the start, as an evaluation asks for it."""
    few = max(1, min(train.batch_size, 256 // train.block_size))
    losses = []
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        batch = job.batch()
        for step in range(1, 201):
            lr = train.peak_lr * min(1, step / 20)
            losses.append(train.train_step(run.model, run, *batch, lr)["loss"].item())
            train.count_batch(run, batch[1])
            if not losses[-1] > losses[0] / 10:  # also if it is NaN
                break
    first, last = losses[0], losses[-1]
    takes_longer = None if last < 0.998 * first else False  # a small model, or a small rate
    text = text_of(loss=first, then=last, steps=len(losses))
    yield "one batch overfits", last < first / 10 or takes_longer, text
    if batch[1].is_floating_point():
        raise NotAsked("the targets are no classes")
    start = loss_in(seeded(job.fresh_run().model.eval(), *batch)).item()
    uniform = math.log(job.meta["vocab_size"])
    trained = begins_at_a_file(job) or start < uniform - 0.3
    fine = None if trained else start < uniform + 0.3
    text = text_of(loss=start, of_a_uniform_guess=uniform, trained_before=trained)
    yield "loss at initialization", fine, text, "tokenizer" not in job.meta


def begins_at_a_file(job):
    """Whether the first weights may be those of a file."""
    return bool(train.init_from or job.run.facts["data"].get("files"))


# ---- the model -----------------------------------------------------------------------------------


def new_model(job, vocab_size=None, noise=1.0, **knobs):
    """A new model by the run's knobs and these, in train mode. noise: on each weight, since one
    that starts at zero would hide what its layer does."""
    require_text(job)
    train.seed_everything(1)
    config = job.run.facts["config"] | QUIET | knobs
    model = train.build_model(config, vocab_size or job.meta["vocab_size"])
    model = model.to(job.device).train()
    with torch.no_grad():
        for weight in model.parameters():
            width = weight.size(-1) if weight.ndim else 1
            weight += noise * torch.randn_like(weight) / math.sqrt(width)
    return model


def random_tokens(job, rows, length):
    """(up to `rows`, length), so many that their logits are not too large."""
    vocab_size = job.meta["vocab_size"]
    rows = max(1, min(rows, MAX_LOGITS // (length * vocab_size)))
    return torch.randint(vocab_size, (rows, length)).to(job.device)


def loss_by_logits(function, inputs, targets):
    """The mean of -log p in float64, by the logits that function(inputs) returns."""
    logits = seeded(function, inputs).double()
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        raise NotAsked("the targets are not one class for each row of logits")
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def causality_check(job):
    """Other tokens from some place on, and another second sequence, move no logit before: at any
    offset, in evaluation, in a context where other kernels compute, and in training, with the same
    random numbers. The first sequence is the first to find room in an expert."""
    require_text(job)
    leaks = []
    for least, training in ((0, False), (0, True), (544, False)):
        length = max(least, train.block_size)
        with suppress(Exception):  # a model of one length
            model = new_model(job, block_size=length).train(training)
            tokens = random_tokens(job, 2, length)
            logits = seeded(model, tokens)
            for place in 1 + torch.randperm(length - 1)[: max(4, PROBED // length)]:
                other = random_tokens(job, 2, length)
                other[0, :place] = tokens[0, :place]
                leaks.append((seeded(model, other) - logits)[0, :place].abs().max().item())
    if not leaks:
        raise NotAsked("the model takes no random tokens")
    text = text_of(logits_before_other_tokens_move_by=max(leaks))
    yield "no look into the future", max(leaks) < 1e-4, text


@torch.no_grad()
def sampling_check(job):
    """Is each token that generate() draws, with a cache if the model has one, the likeliest by the
    model's own logits without it? Within the context, and past it."""
    length, vocab_size = train.block_size, job.meta["vocab_size"]
    model = new_model(job).eval()
    first = max(1, length - 5)
    prompt = random_tokens(job, 32, length)[:, :first]
    count = length + 5 - first
    new = train.generate(model, prompt, count, length, vocab_size, temperature=1e-5, top_k=2)
    whole = torch.cat([prompt, *new], dim=1)
    wrong = []
    for place in range(first, length + 5):
        logits = model(whole[:, max(0, place - length) : place])[:, -1, :vocab_size]
        wrong.append((logits.argmax(-1) != whole[:, place])[:4])  # the first to find room
    share = torch.cat(wrong).double().mean().item()
    yield "sampling draws from the model", share < 0.01, text_of(share_of_wrong_tokens=share)


def position_check(job):
    """Of a small model of one layer that learns to repeat the token of LOOK_BACK places before, the
    loss at its worst place. A bag of tokens cannot, nor can attention whose queries or keys have no
    position. Where no logit depends on an earlier token, as in a bigram model, it is a warning."""
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 64, "block_size": 32}
    model = new_model(job, 16, 0.0, **shape, conv_width=1, ngram_rows=0).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(200):
        tokens, targets = repeating_task(job, 16)
        optimizer.zero_grad()
        loss_in(model(tokens, targets)).backward()
        optimizer.step()
    tokens, targets = repeating_task(job, 64)
    logits = model.eval()(tokens).detach()
    is_bigram = torch.equal(logits[:, -1:], model(tokens[:, -1:]))
    losses = cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
    worst = losses.mean(0).max().item()
    text = text_of(loss_of_repeating_the_token_four_back_at_the_worst_place=worst)
    yield "positions matter", worst < 1.6, text, is_bigram


def repeating_task(job, rows):
    """Random tokens, and as targets those of LOOK_BACK places before."""
    tokens = torch.randint(16, (rows, 32)).to(job.device)
    targets = tokens.roll(LOOK_BACK, 1)
    targets[:, :LOOK_BACK] = -100
    return tokens, targets


def loss_check(job):
    """Is the loss the mean of -log p by the model's own logits, over the few targets that count? And
    its gradient that of this mean? In training a fork may add a term, but not to what is reported as
    validation loss. Is the accuracy that it reports that of its logits?"""
    for training in (False, True):
        in_training_only = {} if training else {"label_smoothing": 0.1, "dropout": 0.1}
        model = new_model(job, **in_training_only).train(training)
        inputs, targets = (random_tokens(job, 4, train.block_size) for _ in "xy")
        counts = torch.rand(targets.shape) < 0.05
        counts[:, [0, -1]] = True
        targets = targets.where(counts.to(job.device), -100)
        out = seeded(model, inputs, targets)
        losses = loss_in(out), loss_by_logits(model, inputs, targets)
        vectors = [parameters_to_vector(gradients(loss, model).values()) for loss in losses]
        off_by, apart = (
            ((one - other).norm() / other.norm()).item() for one, other in (losses, vectors)
        )
        is_right = (seeded(model, inputs).argmax(-1) == targets)[targets != -100]
        share = is_right.float().mean()
        accuracy_by = abs(numbers_in(out).get("accuracy", share) - share).item()
        fine = off_by < (0.02 if training else 1e-4) and apart < 0.05 and accuracy_by < 1e-4
        if not fine:
            break
    text = text_of(
        off_by=off_by, its_gradient_by=apart, accuracy_by=accuracy_by, in_training=training
    )
    yield "the loss is the mean of -log p", fine, text, training


def gradients(loss, model):
    """{name of a weight: gradient}, of those that are trained."""
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def gradient_check(job):
    """Do the logits, along a random direction in each weight, change as their gradient says? In
    float64, by a step so small that a router chooses the same experts."""
    length = min(16, train.block_size)
    model = new_model(job, block_size=length).double()
    batch = random_tokens(job, 2, length), random_tokens(job, 2, length)
    errors = {}
    for name, gradient in gradients(loss_by_logits(model, *batch), model).items():
        begin = model.get_parameter(name).detach()
        step = torch.randn_like(begin)
        step *= 1e-4 * begin.norm() / step.norm()
        high, low = (
            loss_by_logits(partial(functional_call, model, {name: end}), *batch).item()
            for end in (begin + step, begin - step)
        )
        error = (high - low) / 2 - (gradient * step).sum()
        usual = gradient.norm() * step.norm() / math.sqrt(begin.numel())
        errors[name] = (error.abs() / usual.clamp(min=1e-7)).item()
    name = max(errors, key=errors.get)
    text = text_of(part_of_its_slope_that_is_missing=errors[name], weight=name)
    yield "gradients are those of the loss", errors[name] < 0.2, text


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
    yield "FLOPs of a token", fine, text_of(flops_per_token_says=told, torch_counts=counted), True


# ---- the optimizer and its rate ------------------------------------------------------------------


def group_check(job):
    """Of a small module with each kind of weight, whatever the run's own model has. An embedding
    without decay is a choice."""
    nn = torch.nn
    small = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 8))
    small.muon_prefix = "2."
    knobs = 1.0, 0.1, 0.9, 0.95, 0.95, "cpu"  # 0.1: the decay
    decays = {}
    for optimizer in train.configure_optimizers(small, train.optimizer, *knobs):
        for group in optimizer.param_groups:
            decays |= dict.fromkeys(group["params"], group["weight_decay"])
    wrong = {}
    for name, weight in small.named_parameters():
        if decays.get(weight) != (0.1 if weight.ndim > 1 else 0.0):
            wrong[name] = decays.get(weight)
    is_choice = wrong == {"0.weight": 0.0}
    yield "matrices decay, vectors do not", not wrong, text_of(wrong=wrong), is_choice


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
    yield (
        "the schedule is the one named",
        wrong < 0.01,
        text_of(schedule=train.schedule, off_by=wrong),
    )


# ---- the data ------------------------------------------------------------------------------------


def data_checks(job):
    """Batches and splits. A mask (-100) may hide any target, but shows no other."""
    train_data, val_data = job.run.train_data, job.run.val_data
    inputs, targets = map(np.asarray, train_data[0, 64])
    fine = not np.array_equal(inputs, train_data[64, 64][0])
    yield "batches differ", fine, text_of(first_and_second=fine)
    with setting(seed=train.seed + 1):
        weights = job.fresh_run().model.parameters()
    fine = not all(map(torch.equal, weights, job.run.model.parameters()))
    yield "seeds differ", fine, text_of(first_weights=fine), begins_at_a_file(job)
    require_text(job)
    sequence = data.tokenizer_of(job.meta).decode(inputs[0].tolist())
    yield "the first sequence", True, repr(sequence[:70])
    if targets.shape != inputs.shape:
        raise NotAsked("targets and inputs differ in shape")
    fine = are_tokens(targets[:, :-1], inputs[:, 1:])
    yield "targets are the next tokens", fine, text_of(sequences=64)
    if (type(train_data), type(val_data)) != (train.ShuffledWindows, data.OrderedWindows):
        raise NotAsked("no windows of one text")
    wrong = [seed for seed in (train.seed, train.seed + 1) if not has_plain_windows(seed)]
    yield "batches are plain shuffled windows", not wrong, text_of(not_with_seeds=wrong)
    width = train.block_size
    cut = sliding_window_view(train_data.tokens[:MAX_TOKENS], width)[::width]
    places = sliding_window_view(val_data.tokens[: MAX_TOKENS // 8], width)
    shared = {row.tobytes() for row in cut}.intersection(row.tobytes() for row in places)
    share = len(shared) * width / len(places)
    yield "train and validation share no window", share == 0, text_of(share=share), share < 0.5
    if -100 in targets:
        raise NotAsked("targets are masked")
    fine = is_evaluated_once(0) and is_evaluated_once(2 * width)
    yield "evaluation sees each token once", fine, text_of(whole_split_and_eval_tokens=fine)


def are_tokens(targets, tokens):
    """Whether each target that counts is the token."""
    return bool(((targets == tokens) | (targets == -100)).all())


def opened(**knobs):
    """(training data, validation data) as a run with these knobs opens them."""
    with setting(**knobs), redirect_stdout(io.StringIO()):
        return train.open_dataset(None)[:2]


def plain_windows(tokens, seed, epoch):
    """The first token of each window of an epoch, in the order of train.ShuffledWindows."""
    size = train.block_size
    random_state = np.random.RandomState([seed, epoch])
    shift = random_state.randint(size)
    return shift + size * random_state.permutation((len(tokens) - size) // size)


def has_plain_windows(seed):
    """Whether a run with that seed reads these windows: in a later epoch, and across the border of
    two."""
    dataset, _ = opened(seed=seed)
    epochs = [plain_windows(dataset.tokens, seed, epoch) for epoch in range(4)]
    count = len(epochs[0])
    for first in (3 * count, count - 3, 0):
        starts = np.concatenate(epochs)[first : first + 8]
        inputs, targets = dataset[first, len(starts)]
        rows = dataset.tokens[starts[:, None] + np.arange(train.block_size + 1)]
        if not np.array_equal(inputs, rows[:, :-1]) or not are_tokens(targets, rows[:, 1:]):
            return False
    return True


def is_evaluated_once(n_targets):
    """Whether the targets that count are the first `n_targets` of the text (0 = all), in order, and
    the inputs the tokens before them."""
    _, val_data = opened(eval_tokens=n_targets)
    inputs, targets = map(np.asarray, val_data[0, len(val_data)])
    counts = targets != -100
    tokens = val_data.tokens[: 1 + (n_targets or len(val_data.tokens))]
    are_inputs = np.array_equal(inputs[counts], tokens[:-1])
    return are_inputs and np.array_equal(targets[counts], tokens[1:])


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
OF_THE_LOOP = (learning_checks, twin_checks)  # here an error is a fault

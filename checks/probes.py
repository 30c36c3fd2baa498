"""GO or NO-GO: what check.py asks of a loop before a long run. docs/trouble.md explains each check.

A check is a generator of (name, fine, text) or (name, fine, text, passable), for a bench.Job; the
names are those of lines.py. Where it does not apply it raises NotAsked; another error means that
the question does not fit this fork. A check asks for behaviour, of the functions that the run itself
calls, with the vocabulary, the shape and the files of the run, so that it finds what nobody thought
of: it knows no bug by name. Most of all it compares a run with that of plain.py: twin.py. What that
one believes is asked here: the model, the data, the schedule, the groups, the effect of knobs."""

import copy
import io
import math
from contextlib import redirect_stdout, suppress
from itertools import islice

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.flop_counter import FlopCounterMode

import plain
import train
from checks.twin import in_plain, loss_in, numbers_in, setting, twin_checks, with_roles
from plumbing import cli, data, machine

PROBED = 4096  # tokens that one probe of the model may compute
MAX_LOGITS = 2**25  # numbers that it may return
MAX_TOKENS = 2**23  # of a text that is read
LEAK = 64  # tokens of a window that is looked for in the training text
LOOK_BACK = 4  # places, in the task that shows whether positions matter
MAX_PLACES = 128  # of that task
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
# Scores of evaluations, for --min_delta=0.05, and what they must decide
SCORES = (3.0, 2.97, 2.9, 2.93, 2.92, 2.91)
EXPECTED = [
    (True, 0, 1),
    (True, 1, 1),
    (True, 0, 1),
    (False, 1, 1),
    (False, 2, 0.5),
    (False, 3, 0.5),
]
# Knobs that not every optimizer or schedule uses, or that name files; and those that act past a
# threshold
USED_BY = {
    "momentum": ("momentum", "muon"),
    "beta1": ("adamw", "adam", "muon"),
    "beta2": ("adamw", "adam", "muon"),
    "min_lr": ("cosine", "linear", "onecycle", "wsd", "step"),
    "decay_steps": ("cosine", "linear", "onecycle", "wsd"),
    "cooldown_steps": ("wsd",),
    "step_size": ("step",),
    "gamma": ("step",),
    "dataset": (),
    "init_from": (),
}
SERVES = {  # function and its module: the heading of its knobs
    ("build_model", "model"): "The model",
    ("open_dataset", "train"): "The model",
    ("configure_optimizers", "optim"): "The optimizer",
    ("lr_at", "train"): "The learning rate",
}
THRESHOLDS = {"grad_clip", "plateau_factor", "plateau_patience"}


class NotAsked(Exception):
    """The check does not apply to this model or data."""


def require_text(job):
    if "tokenizer" not in job.meta:
        raise NotAsked("the dataset has no tokenizer")


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
    fine = last < first / 10 or (None if last < 0.998 * first else False)
    text = f"loss {first:.4f}, after {len(losses)} steps {last:.4f}"
    if fine is None:
        text += ", which falls, but too slowly to tell (a small model or --peak_lr)"
    yield "overfits", fine, text
    if batch[1].is_floating_point():
        raise NotAsked("the targets are not class indices (not run: start)")
    start = loss_in(seeded(job.fresh_run().model.eval(), *batch)).item()
    uniform = math.log(job.meta["vocab_size"])
    text = f"loss {start:.4f}, of a uniform guess {uniform:.4f}"
    if begins_at_a_file(job):
        yield "given", start < uniform, text, True
    else:
        yield "start", abs(start - uniform) < 0.3, text, "tokenizer" not in job.meta


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
        raise NotAsked("the targets are not one class index per position")
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def causal_check(job):
    """Other tokens from some place on, and another second sequence, move no logit before: at any
    offset, in evaluation, in a context where other kernels compute, and in training, with the same
    random numbers. The first sequence is the first to find room in an expert."""
    require_text(job)
    leaks = []
    for least, training in ((0, False), (0, True), (544, False)):
        length = max(least, train.block_size)
        try:
            model = new_model(job, block_size=length).train(training)
            tokens = random_tokens(job, 2, length)
            logits = seeded(model, tokens)
            for place in 1 + torch.randperm(length - 1)[: max(4, PROBED // length)]:
                other = random_tokens(job, 2, length)
                other[0, :place] = tokens[0, :place]
                leaks.append((seeded(model, other) - logits)[0, :place].abs().max().item())
        except Exception as error:  # a model of one length
            failed = error
    if not leaks:
        raise failed
    text = f"a logit before the changed tokens moves by at most {max(leaks):.2g}"
    yield "causal", max(leaks) < 1e-4, text


@torch.no_grad()
def sampling_check(job):
    """Is each token that generate() draws, with a cache if the model has one, the likeliest by the
    model's own logits without it? Within the context, and past it. Does top_k leave k tokens?"""
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
    same = prompt[:1].expand(128, -1)
    hot = train.generate(model, same, 1, length, vocab_size, temperature=1e6, top_k=3)
    drawn = set(next(iter(hot)).flatten().tolist())
    best = set(model(same)[:, -1, :vocab_size].topk(3).indices.flatten().tolist())
    text = f"{share:.0%} of greedy tokens are wrong; top_k=3 draws {len(drawn)}, {len(drawn - best)} wrong"
    yield "sampling", share < 0.01 and drawn <= best and len(drawn) > 2, text


def positions_check(job):
    """Of a small model of one layer that learns to repeat the token of LOOK_BACK places before, the
    loss at its worst place, in the run's context. A bag of tokens cannot, nor can attention whose
    queries or keys have no position. Where no logit depends on an earlier token, as in a bigram
    model, it is a warning."""
    length = min(train.block_size, MAX_PLACES)
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 64, "block_size": length}
    model = new_model(job, 16, 0.0, **shape, conv_width=1, ngram_rows=0).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(200):
        tokens, targets = repeating_task(job, 16, length)
        optimizer.zero_grad()
        loss_in(model(tokens, targets)).backward()
        optimizer.step()
    tokens, targets = repeating_task(job, 64, length)
    logits = model.eval()(tokens).detach()
    is_bigram = torch.equal(logits[:, -1:], model(tokens[:, -1:]))
    losses = cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
    worst = losses.mean(0).max().item()
    text = f"copying from 4 tokens back: worst loss of {length} positions {worst:.3f}, limit 1.6"
    yield "positions", worst < 1.6, text, is_bigram


def repeating_task(job, rows, length):
    """Random tokens, and as targets those of LOOK_BACK places before."""
    tokens = torch.randint(16, (rows, length)).to(job.device)
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
        targets[::2] = seeded(model, inputs).argmax(-1)[::2]  # so some predictions are right
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
    where = "in training" if training else "in evaluation"
    text = f"off by {off_by:.2g}, its gradient by {apart:.2g}, the accuracy by {accuracy_by:.2g}"
    yield "loss", fine, f"{text}, {where}", training


def gradients(loss, model):
    """{name of a weight: gradient}, of those that are trained."""
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def gradients_check(job):
    """Do the logits, along a random direction in each weight, change as their gradient says? In
    float64, by a step so small that a router chooses the same experts."""
    length = min(16, train.block_size)
    model = new_model(job, block_size=length).double()
    batch = random_tokens(job, 2, length), random_tokens(job, 2, length)
    errors = {}
    for name, gradient in gradients(loss_by_logits(model, *batch), model).items():
        weight = model.get_parameter(name)
        step = torch.randn_like(weight)
        step *= 1e-4 * weight.detach().norm() / step.norm()
        high, low = (loss_moved(model, weight, change, batch) for change in (step, -step))
        error = (high - low) / 2 - (gradient * step).sum()
        usual = gradient.norm() * step.norm() / math.sqrt(weight.numel())
        errors[name] = (error.abs() / usual.clamp(min=1e-7)).item()
    name = max(errors, key=errors.get)
    text = f"at most {errors[name]:.2g} (relative) off finite differences, in {name}; limit 0.2"
    yield "gradients", errors[name] < 0.2, text


@torch.no_grad()
def loss_moved(model, weight, change, batch):
    """The loss where `change` is added to a weight, which then is as before."""
    before = weight.clone()
    weight += change
    loss = loss_by_logits(model, *batch).item()
    weight.copy_(before)
    return loss


def dropout_check(job):
    """Is dropout off in eval mode? Of each module for it, have two rows and two passes other masks,
    and is the mean kept?"""
    tokens = random_tokens(job, 2, train.block_size)
    models = [new_model(job, dropout=share) for share in (0.0, 0.5)]
    parts = [part for part in models[1].modules() if "Drop" in type(part).__name__]
    ones = torch.ones(2, 2048, device=job.device)
    passes = [part(ones) for part in parts for _ in "12"]
    draws = [not torch.equal(model.eval()(tokens), model(tokens)) for model in models]
    if draws == [False, True]:
        yield "dropout", False, "it is on in eval mode"
        return
    if not train.dropout or not parts:
        raise NotAsked('dropout is 0, or no module has "Drop" in its class name')
    rows = [row for each in passes for row in each]
    repeated = any(map(torch.equal, rows, rows[1:]))
    off_by = max(abs(each.mean().item() - 1) for each in passes)
    text = f"{'equal' if repeated else 'different'} masks, the mean is off by {off_by:.2g}"
    yield "dropout", not repeated and off_by < 0.15, text


def flops_check(job):
    """Is MFU true? The model's own figure against torch's count of one step."""
    with setting(grad_checkpoint=False):  # what is computed twice does not count, by convention
        run = job.fresh_run()
    batch = [part[: train.batch_size] for part in job.batch()]
    with FlopCounterMode(display=False) as counter:
        train.forward_backward(run.model, run, *batch, train.count_targets(batch[1]))
    told = train.flops_per_token(run.model)
    if math.isnan(told):
        raise NotAsked("the model has no flops_per_token()")
    counted = counter.get_total_flops() / batch[1].numel()
    text = f"it says {told:.4g} for a token, torch counts {counted:.4g}"
    yield "flops", abs(told / counted - 1) < 0.1, text, True


# ---- the optimizer and its rate ------------------------------------------------------------------


def is_replaced(name, home):
    """Whether a script has put a function of its own in the place of train.NAME, which module `home`
    defines."""
    return getattr(train, name).__module__ != home


def groups_check(job):
    """Of a small module with each kind of weight, whatever the run's own model has: is the decay of
    each that of plain.py? The run's own model takes its steps beside plain.py."""
    if is_replaced("configure_optimizers", "optim"):
        raise NotAsked("configure_optimizers() is the script's own")
    nn = torch.nn
    small = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 8))
    small.muon_prefix = "2."
    knobs = 1.0, train.weight_decay, train.beta1, train.beta2, train.momentum, job.device.type
    own = decays(train.configure_optimizers(small, train.optimizer, *knobs))
    with in_plain(job.device):
        plain_ones = decays(plain.configure_optimizers(with_roles(small)))
    places = {name: weight.data_ptr() for name, weight in small.named_parameters()}
    wrong = [name for name, place in places.items() if own.get(place) != plain_ones[place]]
    text = f"wrong decay for {wrong} (0: Embedding, 1: LayerNorm, 2 and 3: Linear)"
    yield "groups", not wrong, text if wrong else "in a small test module"


def decays(optimizers):
    """{address of a weight: its decay}"""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {w.data_ptr(): group["weight_decay"] for group in groups for w in group["params"]}


def schedule_check(job):
    if train.schedule not in RATES or is_replaced("lr_at", "train"):
        raise NotAsked("lr_at() is the script's own")
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
    yield "schedule", wrong < 0.01, f"{train.schedule}, off by {wrong:.2g} of the peak"


def decisions_check(job):
    """Of scores that improve by less and by more than min_delta, and then get worse, what counts: by
    a loss, and by a number of which more is better."""
    if is_replaced("count_evaluation", "train"):
        raise NotAsked("count_evaluation() is the script's own")
    knobs = {"min_delta": 0.05, "plateau_factor": 0.5, "plateau_patience": 2, "eval_interval": 1}
    wrong = []
    for metric, sign in (("val_loss", 1), ("-val_accuracy", -1)):
        with setting(best_metric=metric, **knobs):
            found = decisions([sign * score for score in SCORES])
        wrong += [metric] if found != EXPECTED else []
    text = f"wrong with --best_metric={wrong[0]}" if wrong else "by val_loss and by -val_accuracy"
    yield "decisions", not wrong, text


def decisions(scores):
    """[(is it the best, evaluations without a best, factor of the rate)] after each evaluation."""
    state = copy.deepcopy(train.FRESH_STATE)
    name = train.best_metric.removeprefix("-")
    found = []
    for step, score in enumerate(scores):
        state["step"] = step
        is_best = train.count_evaluation({"val_loss": 1.0, name: score}, state)
        found.append((is_best, state["evals_since_best"], state["lr_factor"]))
    return found


def knobs_check(job):
    """Does each knob that is not at its default, and not free, change some number against the
    default? What a schedule, an optimizer or a script's own function does not use is left out; what
    only acts past a threshold is a warning."""
    used = {train.optimizer, train.schedule}
    defaults = {name: knob.default for name, knob in job.run.knobs.items() if knob.policy != "free"}
    defaults["dtype"] = machine.choose_dtype("auto", job.device)[0]
    names = [name for name in defaults if job.config[name] not in ("auto", defaults[name])]
    names = [name for name in names if used & {*USED_BY.get(name, used)}]
    own = [heading for (name, home), heading in SERVES.items() if is_replaced(name, home)]
    names = [name for name in names if not job.run.knobs[name].heading.startswith((*own, "-"))]
    numbers = numbers_of_a_short_run(job)
    tried = {}  # name: whether it has no effect
    for name in names:
        with suppress(cli.BadInput), setting(**{name: defaults[name]}):  # it may not fit
            tried[name] = numbers_of_a_short_run(job) == numbers
    dead = {name for name in tried if tried[name]}
    text = (
        f"without effect: {', '.join(dead)}"
        if dead
        else f"tried: {', '.join(tried) or 'none, all are at their defaults or not in use'}"
    )
    yield "knobs", not dead, text, dead <= THRESHOLDS


def numbers_of_a_short_run(job):
    """What two small steps, the rates, the decisions and the averages give."""
    datasets = opened()
    run = job.fresh_run(datasets)
    reader = data.Reader(run.train_data, train.seed)
    count = min(train.sequences_at(0), max(1, 256 // train.block_size))
    numbers = [train.sequences_at(0), len(datasets[1]), *decisions([3.0] * 40)]
    steps = job.config["max_steps"]  # train.max_steps is that of a run without end
    numbers += [train.lr_at(step) for step in range(0, steps, steps // 50 + 1)]
    for step in range(2):
        batch = data.to_device(reader[step, count], job.device)
        row = train.train_step(run.model, run, *batch, train.lr_at(step))
        train.count_batch(run, batch[1])
        numbers.append(row["loss"].item())
    tensors = [*run.model.parameters(), *run.ema.values()]
    return numbers + [tensor.double().sum().item() for tensor in tensors]


# ---- the data ------------------------------------------------------------------------------------


def data_checks(job):
    """Batches and splits. A mask (-100) may hide any target, but shows no other."""
    train_data, val_data = job.run.train_data, job.run.val_data
    inputs, targets = map(np.asarray, train_data[0, 64])
    fine = not np.array_equal(inputs, train_data[64, 64][0])
    yield "batches", fine, "the first 64 sequences and the next 64"
    with setting(seed=train.seed + 1):
        weights = job.fresh_run().model.parameters()
    fine = not all(map(torch.equal, weights, job.run.model.parameters()))
    yield "seeds", fine, f"{train.seed} and {train.seed + 1}", begins_at_a_file(job)
    require_text(job)
    sequence = data.tokenizer_of(job.meta).decode(inputs[0].tolist())
    yield "text", True, repr(sequence[:70])
    if targets.shape != inputs.shape:
        raise NotAsked(
            "targets and inputs differ in shape (not run: targets, windows, leak, coverage)"
        )
    fine = are_tokens(targets[:, :-1], inputs[:, 1:])
    yield "targets", fine, "of 64 sequences"
    if (type(train_data), type(val_data)) != (train.ShuffledWindows, data.OrderedWindows):
        raise NotAsked("not ShuffledWindows with OrderedWindows (not run: windows, leak, coverage)")
    wrong = [seed for seed in (train.seed, train.seed + 1) if not has_plain_windows(seed)]
    yield "windows", not wrong, f"they differ with --seed={wrong[0]}" if wrong else "with two seeds"
    yield from leak_check(train_data.tokens[:MAX_TOKENS], val_data.tokens[: MAX_TOKENS // 8])
    if -100 in targets:
        raise NotAsked("training targets are masked with -100 (not run: coverage)")
    fine = is_evaluated_once(0) and is_evaluated_once(2 * train.block_size)
    yield "coverage", fine, "of the whole split, and with --eval_tokens"


def leak_check(tokens, val_tokens):
    """How much of the validation text stands in the training text, by windows of LEAK tokens. A long
    contiguous stretch makes the evaluation worthless; lines that recur are in most texts."""
    cut = sliding_window_view(tokens, LEAK)[::LEAK]
    place_of = {}
    for place, row in enumerate(cut):
        place_of.setdefault(row.tobytes(), place)
    found = [place_of.get(row.tobytes()) for row in sliding_window_view(val_tokens, LEAK)]
    longest = 0
    lengths = [0] * LEAK  # of the stretch that ends so many tokens before here
    for n, place in enumerate(found):
        goes_on = place is not None and n >= LEAK and found[n - LEAK] == place - 1
        length = (lengths[n % LEAK] if goes_on else 0) + LEAK if place is not None else 0
        lengths[n % LEAK] = length
        longest = max(longest, length)
    text = f"longest shared stretch {longest:,} of {len(val_tokens):,} validation tokens"
    yield "leak", not longest, text, longest < max(1000, len(val_tokens) // 100)


def are_tokens(targets, tokens):
    """Whether each target that counts is the token."""
    return bool(((targets == tokens) | (targets == -100)).all())


def opened(**knobs):
    """(training data, validation data, facts) as a run with these knobs opens them."""
    with setting(**knobs), redirect_stdout(io.StringIO()):
        return train.open_dataset(None)


def has_plain_windows(seed):
    """Whether a run with that seed reads the windows of plain.py: at its start, across the border of
    two epochs, and in a later one."""
    dataset, _, _ = opened(seed=seed)
    count = len(dataset)
    place = 0
    with in_plain("cpu", seed=seed):
        starts = plain.training_starts(len(dataset.tokens))
        for first in (0, max(8, count - 3), 3 * count + 8):
            rows = [*islice(starts, first - place, first - place + 8)]
            place = first + 8
            expected_inputs, expected = plain.windows_at(dataset.tokens, rows)
            inputs, targets = dataset[first, 8]
            if not np.array_equal(inputs, expected_inputs) or not are_tokens(
                targets, expected.numpy()
            ):
                return False
    return True


def is_evaluated_once(n_targets):
    """Whether the validation windows are those of plain.py, of `n_targets` (0 = all)."""
    _, val_data, _ = opened(eval_tokens=n_targets)
    with in_plain("cpu"):
        expected = plain.validation_windows(val_data.tokens)
    windows = val_data[0, len(val_data)]
    is_whole = n_targets or len(val_data) == len(expected[0])
    pairs = zip(windows, expected, strict=True)
    return bool(is_whole) and all(np.array_equal(own, each[: len(own)]) for own, each in pairs)


CHECKS = (
    learning_checks,
    causal_check,
    sampling_check,
    positions_check,
    loss_check,
    gradients_check,
    dropout_check,
    data_checks,
    flops_check,
    groups_check,
    schedule_check,
    decisions_check,
    knobs_check,
    twin_checks,
)
OF_THE_LOOP = (learning_checks, twin_checks)  # here an error is a fault

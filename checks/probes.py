"""GO or NO-GO: what check.py asks of a loop before a long run, beside the twin.

A check is a generator of (name, mark, what was found) for a Job and a new run; names and words are
those of lines.py. Where it does not apply it raises NotAsked. A check asks for behaviour, of the
functions that the run itself calls, with its vocabulary, shape and data: it knows no bug by name."""

import io
import math
import sys
import warnings
from collections import Counter, deque
from contextlib import contextmanager, redirect_stdout, suppress
from copy import copy
from itertools import combinations
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

import plumbing
import train
from checks import plain
from checks.lines import NotAsked, is_own, judged
from checks.twin import First, noisy, twin_checks

QUIET = {
    "dropout": 0.0,
    "label_smoothing": 0.0,
    "grad_checkpoint": False,
}
# What the twin compares with plain.py, and what names files
NOT_TRIED = """batch_size accum_steps optimizer momentum weight_decay beta1 beta2 grad_clip ema_decay
schedule peak_lr min_lr warmup_steps decay_steps step_size gamma plateau_factor
plateau_patience best_metric dataset init_from dtype""".split()


class Job:
    """What is asked about. argv: the run's flags; folder: for runs that are made here; accepted:
    names of lines; is_stock: whether each layer of the model is of model.py or of torch; has_text:
    whether the data is a text; at_file: whether the first weights may be those of a file;
    script, start: the globals of a script, and what they are before anything has run."""

    def __init__(self, argv, folder, accepted):
        self.script = vars(sys.modules.get(Path(plumbing.script).stem, plain))
        history = list, dict, deque, int, float, type(None)  # what may hold it
        self.start = {name: copy(x) for name, x in self.script.items() if isinstance(x, history)}
        self.argv = argv
        self.folder = folder
        self.accepted = accepted
        with train.build(self.words()) as run:
            self.argv = [*argv, f"--dataset={run.config['dataset']}"]  # downloaded once, or not
            self.config = run.config
            self.device = run.device
            homes = {type(part).__module__.partition(".")[0] for part in run.model.modules()}
            self.is_stock = homes == {"model", "torch"}
            data = run.facts["data"]
            self.vocab_size = data["meta"]["vocab_size"]
            self.has_text = "tokenizer" in data["meta"]
            self.at_file = train.init_from or data.get("files")

    def words(self, **knobs):
        flags = [f"--{name}={plumbing.show(value)}" for name, value in knobs.items()]
        return [*self.argv, f"--out_dir={self.folder}/none", *flags]

    @contextmanager
    def run(self, **knobs):
        """A new run with other values of these knobs."""
        with (
            redirect_stdout(io.StringIO()),
            train.build(self.words(**knobs)) as run,
        ):
            yield run

    def model(self, vocab_size=None, noise=1.0, **knobs):
        """A new model on the device, in train mode, without dropout."""
        train.seed_everything(1)
        model = train.build_model(self.config | QUIET | knobs, vocab_size or self.vocab_size)
        return noisy(model.to(self.device).train(), noise)


def seeded(function, *inputs, seed=2):
    """function(*inputs) with the same random numbers each time: a fork may skip layers at random."""
    with torch.random.fork_rng(devices=[]):
        train.seed_everything(seed)
        return function(*inputs)


def loss_of(model, inputs, targets, seed=2):
    out = seeded(model, inputs, targets, seed=seed)
    return out[0] if isinstance(out, tuple) else out


def answer(model, inputs, targets=None, seed=2):
    """The logits; or the loss, of a model that returns none."""
    with suppress(TypeError, AttributeError):  # of a model that asks for targets
        logits = seeded(model, inputs, seed=seed)
        if logits.is_floating_point() and logits.ndim > 1:
            return logits
    if targets is None:
        raise NotAsked("model(inputs) returns no logits")
    return loss_of(model, inputs, targets, seed)


# ---- can it learn? -------------------------------------------------------------------------------


def learning_checks(job, run):
    """Up to 200 steps on one small batch, which a loop that can learn memorizes."""
    losses = []
    with (
        warnings.catch_warnings(record=True) as heard,
        job.run(**QUIET) as run,
    ):
        warnings.simplefilter("always")
        batch = train.batch_at(run, 0, max(1, 256 // train.block_size))
        for step in range(1, 201):
            numbers = train.train_step(run, *batch, train.peak_lr * min(1, step / 20))
            losses.append(float(numbers["loss"]))
            run.state["step"] = step
            if not losses[-1] > losses[0] / 10:  # also if it is NaN
                break
    first, last = losses[0], losses[-1]
    is_mild = last < 0.998 * first or is_own("train_step")
    yield "overfits", judged(last < first / 10, is_mild), first, len(losses), last
    found = sorted({str(each.message).partition("\n")[0] for each in heard})
    yield "warnings", judged(not found, "size" not in str(found)), found


def start_check(job, run):
    """The weights at the start, and their loss, as an evaluation asks for it."""
    if train.init_from:
        tensors, _ = plumbing.read_weights(train.init_from)
        weights = [weight.cpu() for weight in run.model.state_dict().values()]
        other = [name for name in tensors if not any(map(tensors[name].equal, weights))]
        yield "given", judged(not other), other
    inputs, targets = train.batch_at(run, 0, max(1, 512 // train.block_size))
    if targets.is_floating_point():
        raise NotAsked("the targets are numbers, not classes")
    above = loss_of(run.model.eval(), inputs, targets).item() - math.log(job.vocab_size)
    fine = above < 0.3 and (above > -0.3 or job.at_file)
    yield "start", judged(fine, job.at_file or not job.has_text), above


# ---- the model, of tokens ------------------------------------------------------------------------


def next_tokens(run):
    """The tokens of a batch (B, T), of which each is to be predicted from those before."""
    inputs, targets = train.batch_at(run, 0, train.sequences_at(0))
    if not are_next(inputs, targets):
        raise NotAsked("the data is not rows of tokens, with the next tokens as targets")
    return inputs


def are_next(inputs, targets):
    """Whether each target that counts is the next token, but for the last one of a row."""
    if not torch.is_tensor(inputs) or inputs.is_floating_point() or targets.ndim < 2:
        return False
    next_ones, targets = inputs[:, 1:], targets[:, : inputs.size(1) - 1]
    return bool(((targets == next_ones) | (targets == -100)).all())


def drawn(tokens, rows, length):
    """Random tokens (rows, length) of those that occur."""
    known = tokens.unique()
    return known[torch.randint(len(known), (rows, length))]


@torch.no_grad()
def causal_check(job, run):
    """Other tokens from some place on, and another second sequence, move no logit before: in
    evaluation and in training, with the same random numbers. The first sequence is the first to
    find room in an expert."""
    leaks = []
    known = next_tokens(run)
    length = known.size(1)
    for training in (False, True):
        model = job.model().train(training)
        tokens = drawn(known, 2, length)
        logits = answer(model, tokens)
        for place in 1 + torch.randperm(length - 1)[: 1 + 4096 // length]:
            other = drawn(known, 2, length)
            other[0, :place] = tokens[0, :place]
            leaks.append((answer(model, other) - logits)[0, :place].abs().max().item())
    yield "causal", judged(max(leaks) < 1e-4), max(leaks)


@torch.no_grad()
def sampling_check(job, run):
    """Does generate(), with a cache if the model has one, draw what a plain loop draws without it?
    Within the context, and past it."""
    if not job.has_text:
        raise NotAsked("the data is no text, so nothing is sampled")
    length = train.block_size
    model = job.model().eval()
    tokens = drawn(next_tokens(run), 32, max(1, length - 3))
    first, second = (torch.Generator(run.device).manual_seed(1) for _ in "12")
    new = train.generate(
        model,
        tokens,
        6,
        length,
        job.vocab_size,
        temperature=2.0,
        top_k=8,
        generator=first,
    )
    found = torch.cat([*new], 1)
    for _ in range(6):
        logits = model(tokens[:, -length:])[:, -1, : job.vocab_size]
        likely = logits.masked_fill(logits < logits.topk(8).values[:, -1:], -math.inf)
        new = (likely / 2).softmax(-1).multinomial(1, generator=second)
        tokens = torch.cat([tokens, new], 1)
    share = (tokens[:, -6:] == found).double().mean()
    yield "sampling", judged(share > 0.98), share


def positions_check(job, run):
    """Of a small model of one layer that learns to repeat the token of four places before, the loss
    at its worst place, in the run's context. A bag of tokens cannot, nor can attention whose
    queries or keys have no position."""
    next_tokens(run)
    length = min(train.block_size, 128)
    try:
        model = job.model(16, 0.0, n_layer=1, n_head=4, n_embd=64, block_size=length)
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(200):
            tokens = torch.randint(16, (8, length), device=run.device)
            targets = tokens.roll(4, 1)
            targets[:, :4] = -100
            logits = answer(model, tokens).transpose(1, 2).float()
            losses = cross_entropy(logits, targets, reduction="none").mean(0)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            if losses.max() < 1.6:
                break
    except Exception as error:
        raise NotAsked(f"the model does not take this task: {type(error).__name__}") from error
    yield "positions", judged(losses.max() < 1.6, is_own("train_step")), length, losses.max()


# ---- the model, of any data ----------------------------------------------------------------------


def model_checks(job, run):
    """Which weights learn? Do training and evaluation compute the same, and does what comes after
    the last target that counts move the loss?"""
    batch = inputs, targets = train.batch_at(run, 0, 4)
    loss_of(noisy(run.model), *batch).backward()
    known = {weight for group in run.optimizer.param_groups for weight in group["params"]}
    unusual = []
    why = "" if is_own("build_model") or not job.is_stock else ", but NOT by a script"
    for name, weight in run.model.named_parameters():
        if not weight.requires_grad:
            unusual.append(f"{name} is frozen{why}")
        elif weight not in known:
            unusual.append(f"{name} is NOT in the optimizer")
        elif weight.grad is None or not weight.grad.any():
            unusual.append(f"{name} gets NO gradient")
    mark = judged("NO" not in "".join(unusual), is_own("train_step"))
    yield "trained", mark, unusual
    model = job.model().requires_grad_(False)
    one, other = (answer(model, *batch, seed) for seed in (2, 3))
    off_by = (answer(model.eval(), *batch) - one).abs().max() / one.abs().max()
    if torch.equal(one, other):  # else it draws random numbers
        is_mild = not one.ndim or "BatchNorm" in str(model)
        yield "modes", judged(off_by < 1e-3, is_mild), off_by
    if not are_next(inputs, targets) or inputs.shape != targets.shape:
        raise NotAsked("the targets are not the next tokens")
    is_last = torch.arange(inputs.size(1), device=run.device) == inputs.size(1) - 1
    targets = targets.masked_fill(is_last, -100)
    before = loss_of(model, inputs, targets)
    off_by = abs(loss_of(model, inputs.where(~is_last, inputs[0, 0]), targets) - before)
    yield "masked", judged(off_by < 1e-4), off_by


def by_logits(model, inputs, targets):
    """The mean of -log p over the targets that count."""
    logits = answer(model, inputs)
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        raise NotAsked("the targets are not one class for each place")
    return cross_entropy(logits.double().flatten(0, -2), targets.flatten())


def loss_check(job, run):
    """Is the loss in evaluation the mean of -log p by the model's own logits, over the few targets
    that count? Is the accuracy that it reports that of its logits?"""
    inputs, targets = train.batch_at(run, 0, 4)
    model = job.model(label_smoothing=0.1, dropout=0.1 * job.is_stock).eval()
    by_logits(model, inputs, targets)
    likeliest = answer(model, inputs).argmax(-1)
    place = torch.arange(targets.numel(), device=run.device).view_as(targets)
    targets = torch.where(place % 4 == 0, likeliest, targets)
    if job.is_stock or type(run.val_data) is train.OrderedWindows:  # which masks some
        targets[place % 4 == 1] = -100
    right = (likeliest == targets).sum() / (targets != -100).sum()
    out = seeded(model, inputs, targets)
    loss, numbers = out if isinstance(out, tuple) else (out, {})
    off_by = abs(loss / by_logits(model, inputs, targets) - 1)
    wrong_by = abs(numbers.get("accuracy", right) - right)
    is_mild = is_own("train_step") or is_own("count_targets")
    yield "loss", judged(max(off_by, wrong_by) < 1e-4, is_mild), off_by, wrong_by


def gradients_check(job, run):
    """Does the loss, along a random direction in each weight, change as its gradient says? In
    float64, by a step so small that a router chooses the same experts."""
    model = job.model().double().eval()
    inputs, targets = train.batch_at(run, 0, 1)
    inputs = tree_map(lambda part: part.double() if part.is_floating_point() else part, inputs)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def loss(changed):
        def moved(*parts):  # the inputs may be a tuple
            return functional_call(model, changed, parts)

        return by_logits(moved, inputs, targets)

    gradients = torch.autograd.grad(loss(weights), [*weights.values()], materialize_grads=True)
    errors = []
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        step = torch.randn_like(weight)
        step *= 1e-4 * weight.norm() / step.norm()
        change = (loss({name: weight + step}) - loss({name: weight - step})) / 2
        usual = gradient.norm() * step.norm() / math.sqrt(weight.numel())
        error = abs(change - (gradient * step).sum()) / usual.clamp(min=1e-7)
        errors.append((error.item(), name))
    yield "gradients", judged(max(errors)[0] < 0.2), *max(errors)


def pieces_check(job, run):
    """Are the loss and the gradient of a batch and an evaluation the same in passes of 6 rows and of
    1? In eval mode, where no dropout draws."""
    batch = train.batch_at(run, 0, 6)
    model = job.model().eval()
    if not torch.equal(answer(model, *batch), answer(model, *batch, seed=3)):
        raise NotAsked("the model draws random numbers in evaluation")
    if not loss_of(model, *batch).requires_grad:
        raise NotAsked("the loss has no gradient in evaluation")
    quiet = {**QUIET, "dtype": "float32"}
    whole, parts = (
        numbers_of(job, training=False, **quiet, batch_size=size, accum_steps=6 // size)
        for size in (6, 1)
    )
    wrong = [
        f"{name} {whole[name]:.6g} and {parts[name]:.6g}"
        for name in whole
        if not math.isclose(parts[name], whole[name], rel_tol=1e-4)
    ]
    yield "pieces", judged(not wrong, is_own("train_step")), wrong


def dropout_check(job, run):
    """Is dropout off in eval mode? Of each module for it, do all rows of all passes have other
    masks, and is the mean kept?"""
    batch = train.batch_at(run, 0, 2)
    model = job.model(dropout=0.5).eval()
    is_off = torch.equal(answer(model, *batch), answer(job.model().eval(), *batch))
    parts = [part.train() for part in model.modules() if "Dropout" in type(part).__name__]
    if is_off and not (train.dropout and parts):
        raise NotAsked("dropout is off in this run")
    rows = [
        row for part in parts for _ in "12" for row in part(torch.ones(2, 2048, device=run.device))
    ]
    repeated = sum(torch.equal(*pair) for pair in combinations(rows, 2))
    off_by = max([0.0, *(abs(row.mean() - 1) for row in rows)])
    fine = is_off and not repeated and off_by < 0.15
    yield "dropout", judged(fine), not is_off, repeated, off_by


# ---- the data ------------------------------------------------------------------------------------


def rows_of(data, first, count):
    """The bytes of each row of a batch."""
    parts = tree_leaves(plumbing.Reader(data, train.seed)[first, min(count, len(data))])
    return [b"".join(part[n].tobytes() for part in parts) for n in range(len(parts[0]))]


def data_checks(job, run):
    """Batches. Each of two openings reads them in another order, with another global random
    state."""
    found = []
    for order in ((0, 8), (8, 0)):
        train.seed_everything(order[0])
        train_data = train.open_dataset(None)[0]
        found.append({first: rows_of(train_data, first, 8) for first in order})
    differ = found[0][0] != found[0][8]
    same = found[0] == found[1]
    yield "batches", judged(differ and same), differ, same
    fingerprint = str(run.facts["data"]["fingerprint"])
    yield "fingerprint", judged(len(fingerprint) >= 16, True), fingerprint
    with job.run(seed=train.seed + 1) as other:
        same = all(map(torch.equal, run.model.parameters(), other.model.parameters()))
        if not train.init_from:
            yield "seeds", judged(not same, job.at_file), same
    if not job.has_text:
        raise NotAsked("the data is no text")
    fine = are_next(*train.batch_at(run, 0, 8))
    yield "targets", judged(fine), fine


def coverage_check(job, run):
    """The validation windows of the whole split, and of a few."""
    if type(run.val_data) is not train.OrderedWindows:
        raise NotAsked("the validation data is the script's own")
    fine = []
    for n_targets in (0, 2 * train.block_size + 1):
        with job.run(eval_tokens=n_targets) as run:
            k = SimpleNamespace(**run.config | {"device": "cpu"})
            expected = plain.validation_windows(k, run.val_data.tokens)
            windows = run.val_data[0, len(run.val_data)]
            fine.append(all(map(np.array_equal, windows, expected)))
    yield "coverage", judged(all(fine)), *fine


def leak_check(job, run):
    """Is what is held out trained on? Of a text, passages of it are looked for in the training text;
    of other data, its rows, for a second."""
    tokens = getattr(run.val_data, "tokens", ())
    if len(tokens) and hasattr(run.train_data, "tokens"):
        held_out = [part[:1000].tobytes() for part in np.array_split(tokens, 20)]
        seen = run.train_data.tokens[:4_000_000].tobytes()
    else:
        held_out = [row for data in tree_leaves(run.val_data) for row in rows_of(data, 0, 64)]
        seen = set()
        until = process_time() + 1
        for first in range(0, min(30_000, len(run.train_data)), 64):
            if process_time() < until:
                seen |= {*rows_of(run.train_data, first, 64)}
    found = sum(part in seen for part in held_out)
    yield "leak", judged(found < 0.05 * len(held_out)), found, len(held_out)


# ---- knobs ---------------------------------------------------------------------------------------


def knobs_check(job, run):
    """Does each knob that shapes model and data, and is not at its default, change some number
    against the default? What a script's own model or data may leave out is a warning."""
    dead = []
    named = {0, train.max_steps - 1}  # steps at which a script's own knobs may act
    for name in train.ADDED_KNOBS:
        named |= {run.config[name], run.config.default[name]}
    numbers = str(numbers_of(job, named))  # in words, where NaN is NaN
    for name, default in run.config.default.items():
        if getattr(train, name) != default and name not in (*train.FREE, *NOT_TRIED):
            with suppress(Exception):  # the default may not fit
                dead += [name] * (str(numbers_of(job, named, **{name: default})) == numbers)
    is_mild = not job.is_stock or is_own("open_dataset")
    yield "knobs", judged(not dead, is_mild and not train.ADDED_KNOBS.keys() & dead), dead


def numbers_of(job, steps=(0,), training=True, **knobs):
    """What evaluations of a few rows and these steps give, {name: sum}, with these knobs; how much
    there is to evaluate, and what follows from all rates and batches."""
    with job.run(**knobs) as run:
        numbers = Counter(rows=len(run.val_data))
        for step in range(0, train.max_steps, 10):
            numbers["rates"] += train.lr_at(step) / train.sequences_at(step)
        noisy(run.model).train(training)
        run.val_data = tree_map(First, run.val_data)
        batch = train.batch_at(run, 0, 6)
        for step in range(train.max_steps or 1):
            if step in steps:
                run.state["step"] = step
                found = train.evaluate(run) | train.train_step(run, *batch, train.peak_lr)
                numbers.update({name: float(number) for name, number in found.items()})
        return numbers


CHECKS = {  # {check: names of its lines}
    learning_checks: "overfits warnings",
    start_check: "given start",
    causal_check: "causal",
    sampling_check: "sampling",
    positions_check: "positions",
    loss_check: "loss",
    gradients_check: "gradients",
    model_checks: "trained modes masked",
    pieces_check: "pieces",
    dropout_check: "dropout",
    data_checks: "batches fingerprint seeds targets",
    coverage_check: "coverage",
    leak_check: "leak",
    knobs_check: "knobs",
    twin_checks: "steps windows evaluations weights best resume",
}

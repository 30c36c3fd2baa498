"""GO or NO-GO: what check.py asks of a loop before a long run. docs/trouble.md explains each check.

A check is a generator of (name, fine, found) or (name, fine, found, passable), for a bench.Job.
fine: None if it does not apply. It asks for behaviour, of the functions that the run itself calls,
so that it finds what nobody thought of: it knows no bug by name."""

import io
import math
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from functools import lru_cache, wraps
from inspect import signature
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import replay
import train
from bench import setting
from plumbing import checkpoint, data
from plumbing.cli import RunFailed, read_knobs
from reporting.logged import Logged

FEW = 64  # tokens in the vocabulary of a probe
PROBED = 8192  # tokens that one probe of causality may compute
LOOK_BACK = 4  # places, in the task that shows whether positions matter
QUIET = {
    "dropout": 0.0,
    "label_smoothing": 0.0,
    "n_future_tokens": 1,
    "grad_checkpoint": False,
}
# Rates at steps 0, 49, 99, 350, 600, 850, 1,100 and 1,200 of 1,100 with a warmup of 100, a peak of
# 1 and a minimum of 0.1.
RISE = [0.01, 0.5, 1.0]
COSINE = [0.1 + 0.45 * (1 + math.cos(math.pi * done)) for done in (0.25, 0.5, 0.75, 1.0, 1.0)]
RATES = {
    "cosine": [*RISE, *COSINE],
    "onecycle": [0.04, 0.5084, 0.9998, *COSINE],
    "linear": [*RISE, 0.775, 0.55, 0.325, 0.1, 0.1],
    "wsd": [*RISE, 1.0, 1.0, 1.0, 0.1, 0.1],
    "constant": [*RISE, 1.0, 1.0, 1.0, 1.0, 1.0],
    "step": [*RISE, 0.5, 0.25, 0.125, 0.1, 0.1],
}


def on_text(*names):
    """Decorates a check that says n/a, under these names, of data that is no text."""

    def decorate(check):
        @wraps(check)
        def checked(job):
            if "tokenizer" in job.meta:
                yield from check(job)
            else:
                yield from ((name, None, "no text") for name in names)

        return checked

    return decorate


def apart(ours, expected):
    """The norm of the difference of two lists of tensors, over the norm of the second."""
    ours = torch.cat([tensor.double().flatten() for tensor in ours])
    expected = torch.cat([tensor.double().flatten() for tensor in expected])
    size = expected.norm().clamp(min=1e-12)
    return ((ours - expected).norm() / size).item()


def loss_of(model, inputs, targets):
    out = model(inputs, targets)
    return out[0] if isinstance(out, tuple) else out


def gradients(model):
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


# ---- can it learn? -------------------------------------------------------------------------------


@lru_cache(1)
def memorize(job):
    """(run, batch, losses, gradient norms, names of the weights that got a gradient) of up to 200
    steps on one small batch, which a loop that can learn memorizes."""
    few = max(1, min(train.batch_size, 256 // train.block_size))
    losses = []
    norms = []
    reached = set()
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        batch = job.batch()
        for step in range(200):
            lr = train.peak_lr * min(1, (step + 1) / 20)
            numbers = train.train_step(run.model, run, *batch, lr)
            train.count_batch(run, batch[1])
            losses.append(numbers["loss"].item())
            norms.append(numbers["grad_norm"].item())
            for name, weight in run.model.named_parameters():
                if weight.grad is not None and weight.grad.any():
                    reached.add(name)
            if not losses[-1] > losses[0] / 10:  # also if it is NaN
                break
    return run, batch, losses, norms, reached


def learning_checks(job):
    run, _, losses, norms, reached = memorize(job)
    first, last = losses[0], losses[-1]
    found = f"{first:.3f} to {last:.3f} in {len(losses)} steps"
    learned = last < first / 10
    falls = last < 0.998 * first  # a small model, or a small rate, takes its time
    yield "one batch overfits", learned, found, falls
    uniform = math.log(job.meta["vocab_size"])
    near = abs(first - uniform) < 0.3
    found = f"{first:.3f}; a uniform guess has {uniform:.3f}"
    yield "loss at initialization", near, found, "tokenizer" not in job.meta
    highest = max(norms[:10])
    usual = 0.1 < norms[0] and highest < 2
    found = f"{norms[0]:.2g} at first, at most {highest:.2g} in ten steps; 0.1 to 2 is usual"
    yield "gradient norm", usual, found, True
    missed = [name for name, _ in run.model.named_parameters() if name not in reached]
    yield "gradients reach every parameter", not missed, all_but(missed)


def all_but(names):
    return f"all but {', '.join(names)}" if names else "every one"


# ---- the model -----------------------------------------------------------------------------------


def new_model(job, vocab_size, **knobs):
    """A new model by the run's knobs and these, without dropout, in train mode."""
    shape = {name: vars(train)[name] for name in read_knobs(train.__file__)}
    train.seed_everything(1)
    return train.build_model(shape | QUIET | knobs, vocab_size).to(job.device).train()


def probe(job, vocab_size=FEW, **knobs):
    """The same with noise on each weight: one that starts at zero would hide what its layer
    does."""
    model = new_model(job, vocab_size, **knobs)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) / math.sqrt(weight.size(-1))
    return model


def random_tokens(job, rows, length, vocab_size=FEW):
    return torch.randint(vocab_size, (rows, length)).to(job.device)


@torch.no_grad()
def moved_logits(model, tokens):
    """(places, moved): places in tokens (1, T), all or some, and how far another token there moves
    the logits of each position, (places, T)."""
    length = tokens.size(1)
    count = max(8, PROBED // length)
    places = torch.randperm(length)[:count].sort().values
    others = tokens.repeat(len(places), 1)
    rows = torch.arange(len(places))
    others[rows, places] = (others[rows, places] + 1) % FEW
    change = model(others) - model(tokens)
    return places, change.abs().amax(-1).cpu()


@on_text("no look into the future", "each position sees its token and the one before it")
def causality_checks(job):
    """At any offset, in training, in evaluation, and in a context where other kernels compute."""
    leaks = []
    seen = []
    for length, training in ((0, True), (0, False), (544, False)):
        length = max(length, train.block_size)
        model = probe(job, block_size=length).train(training)
        tokens = random_tokens(job, 1, length)
        places, moved = moved_logits(model, tokens)
        is_before = torch.arange(length) < places[:, None]
        leaks.append(moved[is_before].amax().item())
        rows = torch.arange(len(places))
        seen.append(moved[rows, places].amin().item())
        inner = places < length - 1
        following = moved[rows[inner], places[inner] + 1]
        seen.append(following.amin().item())
    found = f"another token moves logits before it by {max(leaks):.1g}"
    yield "no look into the future", max(leaks) < 1e-4, found
    found = f"another token moves its own logits and the next by {min(seen):.1g}"
    yield "each position sees its token and the one before it", min(seen) > 1e-4, found


@on_text("sequences do not mix", "sampling draws from the model", "positions matter")
def sequence_checks(job):
    model = probe(job).eval()
    length = train.block_size
    tokens = random_tokens(job, 4, length)
    with torch.no_grad():
        alone = model(tokens[:1])
        mixed = apart([model(tokens)[:1]], [alone])
    found = f"others in the batch move the logits of a sequence by {mixed:.1g}"
    yield "sequences do not mix", mixed < 1e-3, found
    worst, share = sampling_error(model, tokens[:1], alone)
    found = f"logits move by {worst:.1g} if only the last are computed; {share:.1%} of draws differ"
    yield "sampling draws from the model", worst < 1e-3 and share < 0.15, found
    loss, steps = look_back(job)
    found = f"a loss of {loss:.2f} in {steps} steps, on: repeat the token {LOOK_BACK} places before"
    yield "positions matter", loss < 0.7 and steps <= 120, found, loss < 1.3


@torch.no_grad()
def sampling_error(model, tokens, logits):
    """(how far logits move where only the last are computed; the share of generated tokens that the
    model's own probabilities do not explain). tokens: (1, T). logits: the model's, of all of
    them."""
    length = tokens.size(1)
    options = {}
    if "last_only" in signature(model.forward).parameters:
        options["last_only"] = True
    moved = []
    for n in {1, 2, length // 2, length}:
        last = model(tokens[:, :n], **options)[:, -1:]
        moved.append(apart([last], [logits[:, n - 1 : n]]))

    prompt = tokens[:, : max(1, length - 2)]  # continued past the end of the context
    greedy = prompt
    for _ in range(5):
        last = model(greedy[:, -length:])[:, -1:, :FEW]
        greedy = torch.cat([greedy, last.argmax(-1)], dim=1)
    shares = []
    for how in ({"temperature": 0}, {"top_k": 1}, {"temperature": 1e-5}):
        drawn = list(train.generate(model, prompt, 5, length, FEW, **how))
        differs = torch.cat(drawn, dim=1) != greedy[:, -5:]
        shares.append(differs.double().mean().item())

    count = 4096
    prompts = tokens[:, :2].repeat(count, 1)
    (drawn,) = train.generate(model, prompts, 1, length, FEW, temperature=0.5)
    seen = torch.bincount(drawn.flatten(), minlength=FEW) / count
    expected = (logits[0, 1, :FEW].float() / 0.5).softmax(-1)
    shares.append((seen - expected).abs().sum().item() / 2)
    return max(moved), max(shares)


def look_back(job):
    """(loss, steps) of a small model of one layer that learns to repeat the token of LOOK_BACK
    places before. A bag of tokens cannot, nor can attention whose queries or keys have no
    position."""
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 64, "block_size": 32}
    model = new_model(job, 16, **shape, conv_width=1, ngram_rows=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loss, steps = math.inf, 0
    while steps < 200 and not loss < 0.7:
        tokens = random_tokens(job, 16, 32, 16)
        targets = tokens.roll(LOOK_BACK, 1)
        targets[:, :LOOK_BACK] = -100
        optimizer.zero_grad()
        out = loss_of(model, tokens, targets)
        out.backward()
        optimizer.step()
        loss, steps = out.item(), steps + 1
    return loss, steps


# ---- the loss, its gradient, dropout -------------------------------------------------------------


@on_text("the loss is the mean of -log p", "gradients are those of the loss")
def loss_checks(job):
    """Of random weights: for a small vocabulary, and for one whose loss is computed in chunks."""
    losses = []
    errors = []
    length = train.block_size
    for vocab_size, rows in ((FEW, 4), (1100, -(-20_000 // length))):
        model = probe(job, vocab_size, n_layer=1)
        inputs, targets = (random_tokens(job, rows, length, vocab_size) for _ in "xy")
        targets[:, : length // 4] = -100
        for training in (True, False):
            model.train(training).zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            told = gradients(model)
            model.zero_grad()
            logits = model(inputs).float()
            own = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            own.backward()
            losses.append(abs(loss.item() / own.item() - 1))
            errors.append(apart(told, gradients(model)))
    found = f"{max(losses):.2%} off, its gradient {max(errors):.2%}"
    yield "the loss is the mean of -log p", max(losses) < 0.02 and max(errors) < 0.05, found
    error, name = slope_error(job)
    found = f"along random directions in {name}, {error:.1%} of its slope is missing"
    yield "gradients are those of the loss", error < 0.2, found


def slope_error(job):
    """(error, name) of the weight where the loss, along random directions, changes least as its
    gradient says; relative to what such a direction usually sees."""
    length = min(16, train.block_size)
    model = probe(job, block_size=length).double()
    inputs, targets = (random_tokens(job, 2, length) for _ in "xy")
    loss_of(model, inputs, targets).backward()
    errors = {}
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        usual = gradient.norm() / math.sqrt(weight.numel())
        missing = []
        for _ in range(3):
            step = torch.randn_like(weight)
            step *= 0.006 * weight.detach().norm() / step.norm()
            losses = []
            with torch.no_grad():
                for move in (step, -2 * step, step):  # up, down, and back
                    weight += move
                    losses.append(loss_of(model, inputs, targets).item())
            change = (losses[0] - losses[1]) / 2
            told = (gradient * step).sum().item()
            scale = max((usual * step.norm()).item(), 1e-5)
            missing.append(abs(change - told) / scale)
        errors[name] = sorted(missing)[1]  # in one direction a router may choose another way
    name = max(errors, key=errors.get)
    return errors[name], name


def dropout_checks(job):
    """Does dropout draw anew in each step, and the same again where activations are recomputed?"""
    names = "dropout draws anew", "grad_checkpoint changes no gradient"
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
            quiet = train.forward_backward(run.model, run, *batch, count)["loss"].item()
    if len({*steps, quiet}) == 1:
        yield from ((name, None, "a model without dropout") for name in names)
        return
    found = f"three steps on one batch: {', '.join(f'{loss:.4f}' for loss in steps)}"
    yield names[0], len(set(steps)) == 3, found
    error = apart(*results)
    yield names[1], error < 0.05, f"{error:.2%} off, with dropout"


# ---- the optimizer, and a step -------------------------------------------------------------------


class EachKind(torch.nn.Module):
    """A weight of each kind that configure_optimizers() tells apart."""

    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(8, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 8)


def all_groups(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def optimizer_checks(job):
    """Is each weight in one group? Does it decay as it should? Is the update the one of its
    name?"""
    run = job.fresh_run()
    weights = {name: w for name, w in run.model.named_parameters() if w.requires_grad}
    held = Counter()
    for group in all_groups(run.optimizers):
        held.update(id(weight) for weight in group["params"])
    wrong = [name for name, weight in weights.items() if held[id(weight)] != 1]
    yield "each weight is in one group", not wrong, all_but(wrong)

    decay = 0.1
    knobs = train.peak_lr, decay, train.beta1, train.beta2, train.momentum
    small = train.configure_optimizers(EachKind(), train.optimizer, *knobs, job.device.type)
    decays = {1: set(), 2: set()}
    for group in all_groups(small):
        for weight in group["params"]:
            decays[weight.ndim].add(group["weight_decay"])
    found = f"{decays[2]} of matrices, {decays[1]} of vectors, where --weight_decay={decay}"
    yield "matrices decay, vectors do not", decays == {1: {0.0}, 2: {decay}}, found

    before = {name: weight.detach().clone() for name, weight in weights.items()}
    errors = update_errors(run)
    still = [name for name in weights if weights[name].equal(before[name])]
    yield "a step moves every weight", not still, all_but(still)
    fine = None
    found = f"--optimizer={train.optimizer} is one of your own"
    if errors:
        allowed = {"Muon": 0.03}  # its products are in bfloat16
        fine = all(error < allowed.get(name, 0.003) for name, error in errors.items())
        off = [f"{error:.2%} from torch's {name}" for name, error in errors.items()]
        found = f"three steps end {', '.join(off)}"
    yield "the update is that of its optimizer", fine, found


@torch.no_grad()
def update_errors(run):
    """{torch's optimizer: how far three steps on random gradients end from its own}, of the worst
    weight; of a tall one for Muon also by its square parts. Empty if torch has none of that
    name."""
    begin, ways = {}, {}  # of each weight, and how it may move: [(its parts, their optimizer)]
    for group in all_groups(run.optimizers):
        group["lr"] = 0.1
        group["weight_decay"] = 0.5 if group["weight_decay"] else 0.0
        for weight in group["params"]:
            weight.normal_()
            begin[weight] = weight.clone()
            heights = {weight.size(0)}
            if weight.ndim == 2 and weight.size(0) % weight.size(1) == 0:
                heights.add(weight.size(1))
            copies = [[torch.nn.Parameter(p.clone()) for p in weight.split(h)] for h in heights]
            ways[weight] = [(parts, reference(run.model, weight, parts, group)) for parts in copies]
    for _ in range(3):
        for weight, each in ways.items():
            weight.grad = torch.randn_like(weight)
            for parts, own in each:
                pieces = weight.grad.split(parts[0].size(0))
                for part, piece in zip(parts, pieces, strict=True):
                    part.grad = piece.clone()
                if own:
                    own.step()
        for optimizer in run.optimizers:
            optimizer.step()
    errors = {}
    for weight, each in ways.items():
        moved = weight - begin[weight]
        own = each[0][1]
        if own:
            error = min(apart([moved], [torch.cat(parts) - begin[weight]]) for parts, _ in each)
            errors[type(own).__name__] = max(error, errors.get(type(own).__name__, 0.0))
    return errors


def reference(model, weight, parts, group):
    """torch's own optimizer for the parts of a weight, with its group's rate and decay, or None."""
    own = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    betas = train.beta1, train.beta2
    if train.optimizer == "muon" and is_hidden(model, weight):
        how = {"momentum": train.momentum, "adjust_lr_fn": "match_rms_adamw"}
        return torch.optim.Muon(parts, **own, **how)
    if train.optimizer in ("adamw", "muon"):
        return torch.optim.AdamW(parts, betas=betas, **own)
    if train.optimizer == "adam":
        return torch.optim.Adam(parts, betas=betas, **own)
    if train.optimizer == "momentum":
        return torch.optim.SGD(parts, momentum=train.momentum, **own)
    if train.optimizer == "sgd":
        return torch.optim.SGD(parts, **own)
    return None


def is_hidden(model, weight):
    """Whether Muon trains it: a matrix, no embedding, below the model's muon_prefix."""
    names = {id(each): name for name, each in model.named_parameters()}
    name = names[id(weight)]
    module = model.get_submodule(name.rpartition(".")[0])
    if weight.ndim != 2 or isinstance(module, torch.nn.Embedding):
        return False
    return name.startswith(getattr(model, "muon_prefix", ""))


def step_checks(job):
    """Does the optimizer get the clipped mean gradient of a batch that is cut into
    micro-batches?"""
    run, (inputs, _), *_ = memorize(job)
    run.model.eval()  # BatchNorm's statistics in training are those of a micro-batch
    few = max(3, len(inputs))  # half of them it knows; micro-batches are of unequal size
    batch = data.to_device(job.run.train_data[len(inputs) // 2, few], job.device)
    run.state["micro_batch"] = few
    run.model.zero_grad()
    whole = train.forward_backward(run.model, run, *batch, train.count_targets(batch[1]))["loss"]
    weights = [weight for weight in run.model.parameters() if weight.grad is not None]
    own = [weight.grad / run.scaler.get_scale() for weight in weights]
    norm = torch.nn.utils.get_total_norm(own).item()
    seen = []
    rates = []

    def look(optimizer, *_):
        seen.append([weight.grad.clone() for weight in weights])
        for group in optimizer.param_groups:
            rates.append(group["lr"] / group.get("lr_scale", 1.0))

    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(look)
    steps = 2
    if run.scaler.is_enabled():  # it has to come down from a scale that overflows
        run.scaler = torch.amp.GradScaler(job.device.type, init_scale=2.0**40)
    if train.dtype == "float16":
        steps = 40
    run.state["micro_batch"] = 2 * few // 3
    with setting(grad_clip=norm / 2):
        for _ in range(steps):
            numbers = train.train_step(run.model, run, *batch, 1e-9)
    right = [gradient / 2 for gradient in own]
    error = apart(seen[-1], right) if seen else 1.0
    loss, told = numbers["loss"].item(), numbers["grad_norm"].item()
    wrong_rates = [rate for rate in rates if not math.isclose(rate, 1e-9, rel_tol=1e-6)]
    fine = error < 0.05 and not wrong_rates
    fine = fine and math.isclose(loss, whole, rel_tol=0.01)
    fine = fine and math.isclose(told, norm, rel_tol=0.05)
    found = (
        f"gradient {error:.2%} off, loss {loss:.4f} for {whole:.4f}, norm {told:.4f} for {norm:.4f}"
    )
    if train.dtype == "float16":
        scale = numbers.get("loss_scale")
        fine = fine and scale is not None
        found += f", scaled by {float(scale or 1):g}"
    run.model.train()
    yield "a step is that of its batch", fine, found


def skip_check(job):
    run, batch, *_ = memorize(job)
    before = [tensor.clone() for tensor in state_tensors(run)]
    weight = next(run.model.parameters())
    hook = weight.register_hook(lambda gradient: gradient * math.nan)
    skipped = bool(train.train_step(run.model, run, *batch, train.peak_lr)["skipped"])
    hook.remove()
    kept = all(map(torch.equal, before, state_tensors(run)))
    found = f"skipped: {skipped}; weights and moments as before: {kept}"
    yield "an update that is not finite changes nothing", skipped and kept, found


def state_tensors(run):
    """Weights and moments."""
    found = list(run.model.state_dict().values())
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            found += [value for value in state.values() if torch.is_tensor(value)]
    return found


# ---- the data ------------------------------------------------------------------------------------


def tokens_on_disk(job, split):
    """The tokens of the split's file, or None if this run's data is not one dataset on disk."""
    path = Path(train.data_dir, job.run.facts["data"]["name"], f"{split}.bin")
    return np.memmap(path, job.meta["dtype"], "r") if path.is_file() else None


def hashes(sequences):
    return [hash(sequence.tobytes()) for sequence in np.asarray(sequences)]


def data_checks(job):
    """Does each sequence come once in an epoch, and none of them from the validation split?"""
    train_data = job.run.train_data
    val_data = job.run.val_data
    inputs, _ = job.batch()
    yield "inputs are finite", bool(inputs.isfinite().all()), f"{inputs.numel():,} numbers"

    size = train.rows_at(0)
    first = hashes(train_data[0, size][0])
    same = first == hashes(train_data[size, size][0])
    same_later = first == hashes(train_data[len(train_data), size][0])
    found = f"next is the same: {same}; next epoch's: {same_later}"
    passable = not same and "tokenizer" not in job.meta  # a text has another order in each epoch
    yield "batches differ", not same and not same_later, found, passable

    width = inputs[0].numel()
    count = max(1, min(len(train_data), 2**24 // width))
    seen = set()
    for start in range(0, count, 1000):
        part, _ = train_data[start, min(1000, count - start)]
        seen.update(hashes(part))
    twice = 1 - len(seen) / count
    found = f"{twice:.2%} of {count:,} sequences"
    text = tokens_on_disk(job, "train")
    usual = 0.0  # windows that stand twice in the text itself
    if text is not None and "tokenizer" in job.meta:
        rows = text[: count * width].reshape(-1, width)
        usual = 1 - len(set(hashes(rows))) / len(rows)
    yield "no sequence twice in an epoch", twice == 0, found, twice < 1.5 * usual + 0.01

    held_out = max(1, min(len(val_data), 2**20 // width))
    windows = np.asarray(val_data[0, held_out][0])
    if "tokenizer" in job.meta:  # wherever in the text they begin
        windows = np.lib.stride_tricks.sliding_window_view(windows.ravel(), width)
    shared = len(seen.intersection(hashes(windows)))
    shared *= len(train_data) / count / held_out
    found = f"as much text as {shared:.2%} of the validation windows"
    yield "train and validation share no window", shared == 0, found, shared < 0.1


@on_text("the first sequence", "windows are those of the text")
def text_checks(job):
    """Are the windows those of the file, side by side, all of it, and the targets one place on?"""
    train_data = job.run.train_data
    inputs, targets = map(np.asarray, train_data[0, 64])
    words = data.tokenizer_of(job.meta).decode(inputs[0].tolist())
    yield "the first sequence", True, repr(words[:70])
    shifted = np.array_equal(inputs[:, 1:], targets[:, :-1])
    found = f"targets one place on: {shifted}"
    text = tokens_on_disk(job, "train")
    if text is None or len(text) > 2**24:  # to look for windows in a longer text takes long
        yield "windows are those of the text", shifted, found
        return
    content = text.tobytes()
    width = inputs.shape[1]
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1).astype(text.dtype)
    places = [content.find(row.tobytes()) for row in rows]
    strange = sum(place < 0 for place in places)
    shifts = Counter(place // text.itemsize % width for place in places)
    ((_, usual),) = shifts.most_common(1)  # some windows stand twice in the text
    missing = len(text) // width - len(train_data)
    in_order = places == sorted(places)
    fine = shifted and not strange and usual > len(rows) / 2 and missing <= 1 and not in_order
    found += f"; {strange} of {len(rows)} are not in train.bin, {usual} lie side by side; "
    found += f"an epoch leaves out {missing}; in the text's order: {in_order}"
    yield "windows are those of the text", fine, found


@on_text("another seed, another order")
def seed_check(job):
    name = "another seed, another order"
    text = tokens_on_disk(job, "train")
    if text is None or len(text) > 1e8:  # to open it again takes long
        yield name, None, "not asked of such data"
        return
    weights = job.fresh_run().model.state_dict().values()
    with setting(seed=train.seed + 1):
        other_data, *_ = train.open_dataset(None)
        other_weights = job.fresh_run().model.state_dict().values()
    sequences = hashes(job.run.train_data[0, 64][0])
    in_order = sequences != hashes(other_data[0, 64][0])
    in_weights = not all(map(torch.equal, weights, other_weights))
    yield name, in_order and in_weights, f"other sequences: {in_order}; other weights: {in_weights}"


@on_text("evaluation sees each token once")
def coverage_checks(job):
    """By content: the validation targets that count are the validation text."""
    val_data = job.run.val_data
    text = tokens_on_disk(job, "val")
    if text is None:
        yield "evaluation sees each token once", None, "more than one text"
        return
    inputs, targets = [], []
    for place in range(len(val_data)):
        window = val_data[place, 1]
        inputs.append(np.asarray(window[0])[0])
        targets.append(np.asarray(window[1])[0])
    inputs = np.concatenate(inputs)
    targets = np.concatenate(targets)
    counted = targets != -100
    extent = len(text) - 1
    if train.eval_tokens:
        windows = -(-train.eval_tokens // train.block_size)
        extent = min(extent, windows * train.block_size)
    same = np.array_equal(targets[counted], text[1 : extent + 1])
    same = same and np.array_equal(inputs[counted], text[:extent])
    part = inputs[: 2**20]
    length = len(data.tokenizer_of(job.meta).decode(part).encode()) / len(part)
    told = job.meta.get("val_bytes", math.nan) / job.meta["val_tokens"]
    is_length = not abs(length / told - 1) > 0.05  # unknown is fine
    found = f"{counted.sum():,} targets of {extent:,}, the text's: {same}; "
    found += f"{length:.3f} bytes each, in meta.json {told:.3f}"
    yield "evaluation sees each token once", same and is_length, found


# ---- evaluation ----------------------------------------------------------------------------------


class Part(list):
    """A dataset of these sequences, each a batch of one."""

    def __getitem__(self, batch):
        first, count = batch
        rows = list(self)[first : first + count]
        return [torch.cat([*map(torch.as_tensor, parts)]) for parts in zip(*rows, strict=True)]


def some_windows(job):
    """The first validation windows and the last, of which only a part may count."""
    val_data = job.run.val_data
    count = min(len(val_data), 11)
    places = [*range(count - 1), len(val_data) - 1]
    return Part(val_data[place, 1] for place in places)


def evaluation_checks(job):
    """Does evaluation use all that it is given, however it is cut, and leave the training alone? Of
    a model with all of the run's knobs that knows one batch: losses differ between sequences."""
    run = replace(job.fresh_run(), ema={})
    weights = memorize(job)[0].model.state_dict()
    run.model.load_state_dict(weights)
    windows = some_windows(job)
    count = len(windows)
    inputs, targets = windows[0, count]
    counted = (targets != -100).sum().item()
    modes = []
    seen = []
    numbers = []

    def look(model, arguments):
        modes.append(model.training)
        seen.append(arguments[0].cpu())

    hook = run.model.register_forward_pre_hook(look)
    random_state = torch.get_rng_state()
    for order, micro_batch in ((1, count), (-1, count - 1), (1, 1), (1, count - 1)):
        state = run.state | {"eval_micro_batch": max(1, micro_batch)}
        seen.clear()
        part = replace(run, val_data=Part(list(windows)[::order]), state=state)
        numbers.append(train.evaluate(part))
    evaluating = any(modes)
    times = max(1, sum(map(len, seen)) // count)  # a fork may evaluate averages and weights
    complete = torch.equal(torch.cat(seen), torch.cat([inputs] * times))
    same_state = torch.equal(random_state, torch.get_rng_state())
    same_weights = all(map(torch.equal, weights.values(), run.model.state_dict().values()))
    modes.clear()
    train.train_step(run.model, run, *job.batch(), 0.0)
    hook.remove()
    found = f"in training {all(modes)}, in evaluation {evaluating}"
    yield "the model is in train mode", all(modes) and not evaluating, found

    losses = [each["val_loss"] for each in numbers]
    spread = (max(losses) - min(losses)) / abs(losses[0])
    complete = complete and all(each.get("val_tokens", counted) == counted for each in numbers)
    untouched = same_state and same_weights
    found = f"{count} sequences in other orders and micro-batches: {spread:.2%} apart"
    found += f"; all are counted: {complete}; training is as before: {untouched}"
    yield "evaluation is the same", spread < 0.005 and complete and untouched, found


def probability_checks(job):
    """Is the validation loss the mean of -log p of the weights that it speaks of?"""
    run = replace(job.fresh_run(), ema={}, val_data=some_windows(job))
    run.model.load_state_dict(memorize(job)[0].model.state_dict())
    numbers = train.evaluate(run)
    run.model.eval()
    inputs, targets = data.to_device(run.val_data[0, len(run.val_data)], job.device)
    with torch.no_grad(), train.autocast(job.device):
        logits = run.model(inputs).double()
        told = loss_of(run.model, inputs, targets).item()
    run.model.train()
    real = logits[..., : job.meta["vocab_size"]]  # without columns that only pad
    total = (real.logsumexp(-1) - logits.logsumexp(-1)).exp().mean().item()
    own = cross_entropy(real.flatten(0, -2), targets.flatten()).item()
    right = (real.argmax(-1) == targets).sum() / (targets != -100).sum()
    accuracy = numbers.get("val_accuracy", right)
    fine = all(math.isclose(own, loss, rel_tol=0.01) for loss in (told, numbers["val_loss"]))
    fine = fine and 0.99 < total < 1.0001 and abs(accuracy - right) < 0.02
    found = f"to {total:.4f}; -log p is {own:.4f}, evaluation {numbers['val_loss']:.4f}, "
    yield "probabilities sum to 1", fine, f"{found}model {told:.4f}; {accuracy:.1%} are right"


def average_check(job):
    """Of a model that knows one batch, with the weights of a new one as its average."""
    windows = some_windows(job)
    run = replace(job.fresh_run(), val_data=windows)
    run.model.load_state_dict(memorize(job)[0].model.state_dict())
    fresh = replace(job.fresh_run(), ema={}, val_data=windows)
    plain = train.evaluate(fresh)["val_loss"]
    averages = {name: weight.detach().clone() for name, weight in fresh.model.named_parameters()}
    with setting(ema_decay=0.9):
        told = train.evaluate(replace(run, ema=averages))["val_loss"]
    fine = math.isclose(told, plain, rel_tol=0.01)
    has_buffers = any(True for _ in run.model.buffers())  # such as BatchNorm's: not averaged
    passable = has_buffers and "tokenizer" not in job.meta
    found = f"{told:.4f} with an average, {plain:.4f} with the same numbers as weights"
    yield "the average is what is evaluated", fine, found, passable


def flops_check(job):
    """Is MFU true? The model's own figure against torch's count of one step."""
    with setting(grad_checkpoint=False):  # what is computed twice does not count, by convention
        run = job.fresh_run()
    batch = [part[: train.batch_size] for part in job.batch()]
    with FlopCounterMode(display=False) as counter:
        train.forward_backward(run.model, run, *batch, batch[1].numel())
    told, counted = train.flops_per_token(run.model), counter.get_total_flops() / batch[1].numel()
    found = f"flops_per_token() says {told:,.0f}, torch counts {counted:,.0f}"
    fine = None if math.isnan(told) else abs(told / counted - 1) < 0.1
    yield "FLOPs of a token", fine, found, True


# ---- a run ---------------------------------------------------------------------------------------


class Witness(train.Watch):
    """Watches a run: what each step saw, at which rate, and what the average should be. At one step
    it spoils the weights, so that neither the first evaluation nor the last is the best."""

    spoiled_at = 4

    def begin(self, run):
        self.rates = []
        self.counts = []
        self.inputs = []
        self.targets = 0
        self.average = {n: w.detach().clone() for n, w in run.model.named_parameters()}

    def step(self, run, take, inputs, targets, lr):
        if run.state["step"] == self.spoiled_at:
            with torch.no_grad():
                for weight in run.model.parameters():
                    weight += torch.randn_like(weight)
        numbers = take()
        groups = all_groups(run.optimizers)
        self.rates.append({round(g["lr"] / g.get("lr_scale", 1.0), 12) for g in groups})
        self.counts.append(len(inputs))
        self.inputs.append(inputs.cpu())
        self.targets += (targets != -100).sum().item()
        with torch.no_grad():
            for name, weight in run.model.named_parameters():
                self.average[name].lerp_(weight, 1 - train.ema_decay)
        return numbers

    def end(self, run):
        self.run = run


def few_steps(job, name, watch=None, **knobs):
    """(folder, knobs) of a run of 6 short steps with accumulation, dropout and an average."""
    few = {
        "max_steps": 6,
        "warmup_steps": 3,
        "decay_steps": 6,
        "plateau_factor": 1.0,
        "batch_size": max(1, min(train.batch_size, 1024 // train.block_size)),
        "accum_steps": 2,
        "dropout": train.dropout or 0.1,
        "ema_decay": train.ema_decay or 0.8,
        "eval_interval": 1,
        "eval_tokens": 4 * train.block_size,
        "patience": 0,
        "save_interval": 3,
        "keep_last": 2,
        "audit_interval": -1,
        "resume": "auto",
        "compile": "false",
        "report": False,
        "wandb_log": False,
    }
    few |= knobs
    folder = job.run.folder.path / name
    with setting(**few):
        train.main([f"--out_dir={folder}"], watch=watch)
    return folder, few


def resume_check(job):
    """Does a run that is stopped and resumed come to the same bits?"""
    with redirect_stdout(io.StringIO()) as said:
        try:
            folder, few = few_steps(job, "resumed")
            all_of_it = f"--verify={few['max_steps']}"
            same = replay.main([str(folder), all_of_it]) == 0
        except RunFailed as error:
            same = False
            print(error)
    yield "a resume is bit for bit", same, said.getvalue().strip().splitlines()[-1]


def run_checks(job):
    """Does each step of a run see the next sequences, at its own rate? Is the average one, and
    best.pt the best?"""
    watch = Witness()
    with redirect_stdout(io.StringIO()):
        folder, few = few_steps(job, "watched", watch, best_metric="val_loss")
    log = Logged(folder)
    steps = range(1, log.last + 1)
    wrong = set()
    with setting(**few):
        counts = [train.rows_at(step - 1) for step in steps]
        for step in steps:
            rate = train.lr_at(step - 1)
            if log.row(step, "train").get("lr") != rate or watch.rates[step - 1] != {
                round(rate, 12)
            }:
                wrong.add(step)
    yield "the rate follows the schedule", not wrong, f"wrong in {len(wrong)} of {len(steps)} steps"
    found, fine = schedule_found()
    yield "the schedule is the one named", fine, found

    width = min(inputs.size(1) for inputs in watch.inputs)  # a fork may begin with short sequences
    seen = torch.cat([inputs[:, :width] for inputs in watch.inputs])
    expected = torch.as_tensor(job.run.train_data[0, sum(counts)][0])[:, :width]
    in_order = torch.equal(seen, expected)
    tokens = log.row(log.last, "train").get("tokens")
    last = log.row(log.last, "train")
    right_epoch = math.isclose(last["epoch"], sum(counts) / len(job.run.train_data))
    fine = in_order and watch.counts == counts and tokens == watch.targets
    fine = fine and last["sequences"] == sum(counts) and right_epoch
    found = f"{watch.counts} sequences, in order: {in_order}; {tokens} tokens of {watch.targets}"
    yield "each step sees the next sequences", fine, found

    names = list(watch.run.ema)
    error = 1.0
    if names:
        error = apart(watch.run.ema.values(), [watch.average[name] for name in names])
    found = f"{error:.2%} off after {len(steps)} steps, of {len(names)} weights"
    yield "the average is that of the weights", error < 0.01, found

    losses = {step: log.row(step, "eval").get("val_loss", math.nan) for step in (0, *steps)}
    best = min(losses, key=losses.get)
    saved = checkpoint.load(folder / "best.pt")
    with setting(**few):
        run = replace(job.fresh_run(), val_data=watch.run.val_data)
        checkpoint.WholeState(run, saved).put_back()
        loss = train.evaluate(run)["val_loss"]
    step = saved["state"]["step"]
    fine = step == best and math.isclose(loss, losses[best], rel_tol=1e-3)
    found = f"of step {step}, loss {loss:.4f}; in the log {losses[best]:.4f} at step {best}"
    yield "best.pt is the best", fine, found


def schedule_found():
    """(in words, whether lr_at() has the rates that its schedule's name promises, or None)."""
    if train.schedule not in RATES:
        return f"--schedule={train.schedule}: one of your own", None
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
        rates = [train.lr_at(step) for step in (0, 49, 99, 350, 600, 850, 1100, 1200)]
    wrong = max(abs(rate - right) for rate, right in zip(rates, RATES[train.schedule], strict=True))
    return f"--schedule={train.schedule}: at most {wrong:.2g} off, of a peak of 1", wrong < 0.01


def price_check(job):
    """What the whole run will take, by a few eager steps. Never a fault."""
    run = job.fresh_run()
    step = job.step(run, run.model)
    step()
    began = time.perf_counter()
    for _ in range(2):
        step()
    hours = (time.perf_counter() - began) / 2 * job.config["max_steps"] / 3600
    found = f"{hours:.2g} hours of eager steps"
    if train.dollars_per_hour:
        found += f", {hours * train.dollars_per_hour:.2f} dollars"
    yield "the whole run", True, found


CHECKS = (
    learning_checks,
    causality_checks,
    sequence_checks,
    loss_checks,
    dropout_checks,
    text_checks,
    seed_check,
    data_checks,
    coverage_checks,
    evaluation_checks,
    probability_checks,
    average_check,
    flops_check,
    optimizer_checks,
    step_checks,
    skip_check,
    resume_check,
    run_checks,
    price_check,
)

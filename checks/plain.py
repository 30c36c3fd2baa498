"""What train.py computes, as one loop of plain torch: the same batches, rates, losses and weights,
with nothing behind it. It shares no code with train.py.

    losses = [*train(knobs, model, tokens)]    # knobs.batch_size, ..., "auto" resolved

What train.py adds: resumes, ranks, workers, a log, early stopping, a retry when memory runs out. Who
changes the step of train.py on purpose makes the same change here, and check.py compares again."""

import math
from collections import Counter
from itertools import chain, count

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def train(k, model, tokens):
    """A run of the knobs `k`. Yields what train_step() returns."""
    optimizers = configure_optimizers(k, model)
    batches = training_batches(k, tokens)
    for step in range(k.max_steps):
        yield train_step(k, model, optimizers, next(batches), lr_at(k, step))


def training_batches(k, tokens):
    """Yields the passes of each step, without end: each window once an epoch, shuffled."""
    size = k.batch_size * k.accum_steps
    starts = []  # of the windows to come
    for epoch in count():
        random_state = np.random.RandomState([k.seed, epoch])
        shift = random_state.randint(k.block_size)
        n_windows = (len(tokens) - k.block_size) // k.block_size  # that fit at any shift
        starts += [*(shift + random_state.permutation(n_windows) * k.block_size)]
        while len(starts) >= size:
            yield split(windows_at(k, tokens, starts[:size]), k.batch_size)
            starts = starts[size:]


def validation_windows(k, tokens):
    """(inputs, targets) of the first eval_tokens targets, 0 = of all, rounded up to windows."""
    n_targets = min(k.eval_tokens or len(tokens), len(tokens) - 1)
    firsts = np.arange(0, n_targets, k.block_size)
    starts = np.minimum(firsts, len(tokens) - 1 - k.block_size)
    inputs, targets = windows_at(k, tokens, starts)
    targets[-1, : firsts[-1] - starts[-1]] = -100  # masked: the window before has these
    return inputs, targets


def windows_at(k, tokens, starts):
    """Inputs, and as targets the tokens that follow them, int64 (len(starts), block_size)."""
    places = np.add.outer(starts, np.arange(k.block_size + 1))
    rows = torch.tensor(tokens[places].astype(np.int64), device=k.device)
    return rows[:, :-1], rows[:, 1:].clone()


def split(batch, size):
    """[(inputs, targets), ...] of at most `size` sequences."""
    tensors, structure = tree_flatten(batch)
    passes = zip(*[tensor.split(size) for tensor in tensors], strict=True)
    return [tree_unflatten(each, structure) for each in passes]


def train_step(k, model, optimizers, passes, lr):
    """One update, in seven operations. Returns its loss, and the gradient's norm before clipping; if
    that is not finite, nothing moves."""
    model.zero_grad()  # 1: zero the gradients
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = group.setdefault("own_lr", group["lr"])
            group["lr"] = lr * (own / k.peak_lr)  # 2: set the learning rate
    total = 0.0
    n_targets = count_targets(torch.cat([y for _, y in passes]))
    for x, y in passes:
        loss = means_of(k, model, x, y)["loss"]  # 3: forward
        if count_targets(y) > 0:
            loss = loss / (n_targets / count_targets(y))  # 4: its share of the batch's mean
            loss.backward()  # 5: backward
            total += loss.detach()
    if n_targets == 0:
        return torch.tensor([math.nan, math.nan])
    grad_norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), k.grad_clip or math.inf
    )  # 6: clip
    for optimizer in optimizers if grad_norm.isfinite() else ():
        optimizer.step()  # 7: update
    return total, grad_norm


@torch.no_grad()
def average(k, step, model, averages):
    """Averages of the weights, at first by larger steps, or they would keep the start for long."""
    decay = min(k.ema_decay, (1 + step) / (10 + step))
    for name, weight in model.named_parameters():
        averages[name].lerp_(weight, 1 - decay)


@torch.no_grad()
def evaluate(k, model, averages, batches):
    """{"val_loss", ...}: the mean over all targets of each number that the model returns, in eval
    mode, with the averaged weights."""
    sums = Counter()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {part: part.training for part in model.modules()}
    model.load_state_dict(averages, strict=False)
    model.eval()
    for x, y in batches:
        n = count_targets(y).item()
        sums["targets"] += n
        for name, mean in means_of(k, model, x, y).items() if n else ():
            sums[f"val_{name}"] += float(mean) * n
    model.load_state_dict(before)
    for part in modes:
        part.training = modes[part]
    n_targets = sums.pop("targets")
    return {name: sums[name] / n_targets for name in sums}


def means_of(k, model, x, y):
    """The forward pass, under autocast: {"loss": mean over the targets that count, and the other
    means that the model returns, such as the accuracy in eval mode}."""
    with torch.autocast(k.device, getattr(torch, k.dtype), enabled=k.dtype != "float32"):
        result = model(x, y)
    loss, others = result if isinstance(result, tuple) else (result, {})
    return {"loss": loss, **others}


def count_targets(targets):
    """All targets but the masked ones: -100, or NaN where targets are floats."""
    return (~targets.isnan() if targets.is_floating_point() else targets != -100).sum()


def lr_at(k, step):
    """The learning rate of update number `step`, counted from 0."""
    peak = k.peak_lr
    warmup = k.warmup_steps
    if step < warmup:
        if k.schedule == "onecycle":  # from a 25th of the peak, along a cosine
            return peak * (1 - 0.96 * half_cosine(step / warmup))
        return peak * (step + 1) / warmup
    if k.schedule == "constant":
        return peak
    if k.schedule == "step":
        return max(k.min_lr, peak * k.gamma ** ((step - warmup) // k.step_size))
    done = min(1, (step - warmup) / max(1, (k.decay_steps or k.max_steps) - warmup))
    share = 1 - done if k.schedule == "linear" else half_cosine(done)
    return k.min_lr + (peak - k.min_lr) * share


def half_cosine(done):
    return 0.5 * (1 + math.cos(math.pi * done))


def configure_optimizers(k, model):
    """torch's optimizers. Matrices and embeddings decay, vectors do not. Muon trains the hidden
    matrices, AdamW the rest."""
    hidden = {}  # each matrix, and its parts
    embeddings = []
    heads = []
    vectors = []
    for name, weight in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])  # that has this weight
        if weight.ndim < 2 or name in getattr(model, "undecayed", ()):
            vectors.append(weight)
        elif isinstance(layer, torch.nn.Embedding):
            embeddings.append(weight)
        elif weight.ndim == 2 and name.startswith(getattr(model, "muon_prefix", "")):
            hidden[weight] = weight.data.chunk(getattr(layer, "muon_parts", 1))  # q, k, v: 3
        else:
            heads.append(weight)

    def share_gradients(*_):
        """Give each part of a stacked matrix its part of the gradient."""
        for weight, parts in hidden.items():
            if weight.grad is not None:
                for part, grad in zip(parts, weight.grad.chunk(len(parts)), strict=True):
                    part.grad = grad

    undecayed = {"params": vectors, "weight_decay": 0.0}
    groups = [{"params": [*hidden, *embeddings, *heads]}, undecayed]
    sgd = {"lr": k.peak_lr, "weight_decay": k.weight_decay}
    adam = {"betas": (k.beta1, k.beta2), "fused": True, **sgd}
    if k.optimizer == "adamw":
        return [torch.optim.AdamW(groups, **adam)]
    if k.optimizer == "adam":
        return [torch.optim.Adam(groups, **adam)]
    if k.optimizer != "muon":
        momentum = {"sgd": 0.0, "momentum": k.momentum}[k.optimizer]
        return [torch.optim.SGD(groups, momentum=momentum, fused=True, **sgd)]
    parts = {"params": [*chain(*hidden.values())]}
    muon = torch.optim.Muon([parts], momentum=k.momentum, adjust_lr_fn="match_rms_adamw", **sgd)
    muon.register_step_pre_hook(share_gradients)
    # a row of an embedding learns only where its token stands; the loss is steep in the head
    embeddings = {"params": embeddings, "lr": 2.0 * k.peak_lr}
    heads = {"params": heads, "lr": 0.5 * k.peak_lr}
    return [muon, torch.optim.AdamW([embeddings, heads, undecayed], **adam)]

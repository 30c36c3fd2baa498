"""One step, seen from inside: all that it computes, in order, and a page and a picture of that."""

import math
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook

from plumbing import ranks
from plumbing.audit import bits_that_differ
from plumbing.checkpoint import HASHED
from plumbing.cli import printable
from plumbing.data import DataError, tokenizer_of
from plumbing.files import replacing
from plumbing.safe_step import Captured, leaves
from reporting.logged import MEASURED
from reporting.results import table

MOST_SEQUENCES = 64  # on the page and in the picture; those of the highest loss


# ---- what it computes ---------------------------------------------------------------------------


def copied(leaf, path: tuple = ()):
    """A copy on the CPU of a tensor, whole if it is sharded; any other value as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return ranks.whole(leaf.detach()).cpu().clone()


def named(words: str, value) -> list[tuple]:
    """[(name, leaf), ...] of nested values."""
    return [(f"{words} {'/'.join(map(str, path))}", leaf) for path, leaf in leaves(value)]


def essence(checkpoint: dict) -> dict:
    """What the next step depends on: not what only evaluations need, nor settings of optimizers."""
    state = {}
    for name in sorted(checkpoint["state"]):
        if not re.search("best|eval|score", name):
            state[name] = checkpoint["state"][name]
    moments = [saved["state"] for saved in checkpoint["optimizer"]]
    return {name: checkpoint[name] for name in HASHED} | {"state": state, "optimizer": moments}


def look_at(train, take: Callable, run, inputs, targets, lr: float) -> tuple[dict, dict]:
    """Take a step by take(), which is train_step of the module `train`. Returns its numbers, and
    what was to be seen: "trace" has [(name, leaf), ...] in the order of computation.

    Hooks would change what torch.compile does, so outputs of modules, and gradients before
    clipping, are those of an eager pass before the step; all that it moves is put back."""
    trace = []
    seen = {"trace": trace, "meta": run.facts["data"]["meta"], "first": run.state["sequences"]}
    weights = dict(run.model.named_parameters())
    names = {module: name or "the model" for name, module in run.model.named_modules()}

    def add(words: str, value) -> None:
        trace.extend((name, copied(leaf)) for name, leaf in named(words, value))

    def add_gradients(words: str) -> None:
        for name, weight in reversed(weights.items()):  # as a backward pass has them
            if weight.grad is not None:
                add(words, {name: weight.grad})

    def hook(module, inputs, output) -> None:
        add(f"output of {names[module]}:", [output])

    add("at its start:", essence(run.checkpoint()))
    add("batch:", {"inputs": inputs, "targets": targets})
    trace.append(("learning rate", lr))
    before = Captured(run)
    losses = inputs.new_zeros(0)
    with suppress(TypeError, ValueError, RuntimeError):  # the model may return no logits
        losses = torch.cat([*token_losses(train.autocast, run, inputs, targets)])
    seen["batch"] = ranks.from_all_ranks((inputs.cpu(), targets.cpu(), losses.cpu()))
    before.put_back()
    run.model.zero_grad(set_to_none=True)
    n_targets = ranks.total(train.count_targets(targets))
    with register_module_forward_hook(hook):
        numbers = train.forward_backward(run.model, run, inputs, targets, n_targets)
    add("forward pass:", numbers)
    add_gradients("gradient of")
    before.put_back()
    numbers = take()
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            add("setting:", {key: group[key] for key in group if key != "params"})
    add("step:", numbers)
    add_gradients("clipped gradient of")
    add("after it:", essence(run.checkpoint()))
    return numbers, seen


@torch.no_grad()
def token_losses(autocast: Callable, run, inputs, targets) -> Iterator[torch.Tensor]:
    """Cross entropy of each target, (sequences, targets), of each micro-batch, with this step's
    dropout: NaN where it is masked, inf where it is not finite."""
    size = run.state["micro_batch"]
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        with autocast(run.device):
            logits = run.model(x)
        y = y.long().flatten()
        losses = cross_entropy(logits.float().flatten(0, -2), y, reduction="none")
        losses = losses.nan_to_num(nan=math.inf, posinf=math.inf).where(y != -100, math.nan)
        yield losses.view(len(x), -1).cpu()


def first_in_traces(one: list, other: list) -> str:
    """In words: the first leaf that differs between the traces of a step, on any rank; "" if
    none."""
    bits = bits_that_differ(one, other)  # {"rank/place/0": of a name, "rank/place/1": of its leaf}
    if not bits:
        return ""
    first = min(bits, key=lambda key: int(key.split("/")[1]))
    rank, place, is_leaf = map(int, first.split("/"))
    name, here = one[rank][place]
    name_there, there = other[rank][place]
    if not is_leaf:
        return f"{name} here, {name_there} there"
    if torch.is_tensor(here):
        return f"{name} ({bits[first]:,} of {8 * here.nbytes:,} bits)"
    return f"{name} ({here} and {there})"


def differs_in(checkpoint: dict, trace: list) -> str:
    """In words: what of a checkpoint differs from the trace of its step. Not the loop's state,
    which an evaluation changes after the step."""
    then = dict(named("after it:", essence(checkpoint) | {"state": {}}))
    now = {name: leaf for name, leaf in trace if name in then}
    bits = bits_that_differ(then, now)
    words = [f"{name.removeprefix('after it: ')} ({count:,} bits)" for name, count in bits.items()]
    if len(words) > 5:
        words[5:] = [f"{len(words) - 5} more"]
    return ", ".join(words) or "nothing"


# ---- the page -----------------------------------------------------------------------------------


def write_step_page(folder: Path, step: int, verdict: str, row: dict, seen: dict) -> list[str]:
    """Write replay_STEP.md and .png into `folder`. row: of metrics.jsonl, as computed here. seen:
    what look_at() returns. Returns lines for the console."""
    path = folder / f"replay_{step:08}.md"
    trace = seen["trace"]
    odd = [name for name, leaf in trace if is_float(leaf) and not leaf.isfinite().all()]
    finite = f"the first tensor that is not finite: {odd[0]}" if odd else "all tensors are finite"
    numbers = [(name, row[name]) for name in row if name not in (*MEASURED, "kind")]
    lines = sequences(path.with_suffix(".png"), step, seen)
    out = [
        f"# Step {step} of {folder.name}",
        f"- {verdict}\n- {finite}",
        table(("", ""), numbers),
        "## Its sequences, those of the highest loss first",
        *lines,
        "## Norms of weights, of gradients after clipping, and of updates",
        table(("tensor", "weight", "gradient", "update", "update / weight"), norms(trace)),
        "## Outputs of the model's parts and blocks, from an eager pass",
        table(("module", "root mean square"), outputs(trace)),
    ]
    with replacing(path) as temporary:
        temporary.write_text(printable("\n\n".join(out)), encoding="utf-8")
    return [verdict, finite, lines[0], f"wrote {path}"]


def sequences(picture: Path, step: int, seen: dict) -> list[str]:
    """The loss of each sequence of a step, its worst tokens and its text, and a link to the
    picture."""
    inputs, targets, losses = map(torch.cat, zip(*seen["batch"], strict=True))
    if not len(losses):
        return ["The model does not return logits."]
    mean = losses.nanmean(1)
    order = mean.argsort(descending=True)[:MOST_SEQUENCES].tolist()
    lines = []
    for i in order:
        line = f"**Sequence {seen['first'] + i}**: loss {mean[i]:.4f}"
        with suppress(DataError, KeyError):  # there is no tokenizer, or it is not installed
            decode = tokenizer_of(seen["meta"]).decode
            worst = worst_tokens(targets[i], losses[i], decode)
            text = decode(inputs[i].tolist())
            line += f"; worst: {worst}\n\n{textwrap.indent(text, '    ')}"
        lines.append(line)
    if draw_step(picture, step, losses[order], order):
        lines.append(f"![The loss of each token]({picture.name})")
    return lines


def worst_tokens(targets: torch.Tensor, losses: torch.Tensor, decode: Callable) -> str:
    """The targets of a sequence with the highest losses, in words."""
    order = losses.nan_to_num(nan=-1).argsort(descending=True)
    words = []
    for place in order[:3].tolist():
        if targets[place] >= 0:
            words.append(f"`{decode([targets[place].item()])!r}` {losses[place]:.2f}")
    return ", ".join(words)


def is_float(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def norms(trace: list) -> list[list]:
    found = dict(trace)
    rows = []
    for name, after in found.items():
        place, _, weight = name.partition(" model/")
        if place != "after it:" or not is_float(after):
            continue
        before = found[f"at its start: model/{weight}"].double()
        gradient = found.get(f"clipped gradient of {weight}")
        size = before.norm()
        update = (after.double() - before).norm()
        cell = "" if gradient is None else f"{gradient.double().norm():.3g}"
        rows.append([weight, f"{size:.4g}", cell, f"{update:.3g}", f"{update / size:.2e}"])
    return rows


def outputs(trace: list) -> list[list]:
    """Of the first micro-batch, and of one level of modules, or those with a number."""
    first = {}
    for name, leaf in trace:
        module = re.match(r"output of ([\w ]+|[\w.]+\.\d+): ", name)
        if module and is_float(leaf):
            first.setdefault(module[1], leaf)
    return [[name, f"{leaf.float().square().mean().sqrt():.4g}"] for name, leaf in first.items()]


def draw_step(path: Path, step: int, losses: torch.Tensor, numbers: list) -> bool:
    """The loss of each token as a shade, a line for each sequence. False: matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 1.5 + 0.15 * len(losses)), layout="constrained")
    axes = figure.add_subplot(title=f"Loss of each token of step {step}, nats")
    figure.colorbar(axes.imshow(losses, aspect="auto", cmap="magma_r", vmin=0))
    axes.set(xlabel="place in the sequence", ylabel="sequence of the batch")
    axes.set_yticks(range(len(numbers)), numbers, fontsize=6)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
    return True

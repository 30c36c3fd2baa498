"""One step, seen from inside: all that it computes, in order, and a page and a picture of that."""

import math
import re
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
    is_tensor = isinstance(leaf, torch.Tensor)
    return ranks.whole(leaf.detach()).cpu().clone() if is_tensor else leaf


def named(words: str, value) -> list[tuple]:
    """[(name, leaf), ...] of nested values."""
    return [(f"{words} {'/'.join(map(str, path))}", leaf) for path, leaf in leaves(value)]


def essence(checkpoint: dict) -> dict:
    """What the next step depends on: not what only evaluations need, nor settings of optimizers."""
    names = [name for name in sorted(checkpoint["state"]) if not re.search("best|eval|score", name)]
    state = {name: checkpoint["state"][name] for name in names}
    moments = [each["state"] for each in checkpoint["optimizer"]]
    return {name: checkpoint[name] for name in HASHED} | {"state": state, "optimizer": moments}


def look_at(train, take: Callable, run, inputs, targets, lr: float) -> tuple[dict, dict]:
    """Take a step by take(), which is train_step of the module `train`. Returns its numbers, and what
    was to be seen: "trace" has [(name, leaf), ...] in the order of computation.

    Hooks would change what torch.compile does, so outputs of modules, and gradients before clipping,
    are those of an eager pass before the step; all that it moves is put back.
    """
    trace = []
    seen = {"trace": trace, "meta": run.facts["data"]["meta"], "first": run.state["sequences"]}
    weights = dict(run.model.named_parameters())
    names = {module: name or "the model" for name, module in run.model.named_modules()}

    def add(words: str, value) -> None:
        trace.extend((name, copied(leaf)) for name, leaf in named(words, value))

    def add_gradients(words: str) -> None:  # the last part's first, as a backward pass has them
        add(words, {n: w.grad for n, w in reversed(weights.items()) if w.grad is not None})

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
    for group in (group for each in run.optimizers for group in each.param_groups):
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
    """In words: the first leaf that differs between the traces of a step, on any rank; "" if none."""
    bits = bits_that_differ(one, other)  # {"rank/place/0": of a name, "rank/place/1": of its leaf}
    if not bits:
        return ""
    key = min(bits, key=lambda key: int(key.split("/")[1]))
    rank, place, is_leaf = map(int, key.split("/"))
    (name, a), (name_there, b) = (trace[rank][place] for trace in (one, other))
    if not is_leaf:
        return f"{name} here, {name_there} there"
    what = f"{bits[key]:,} of {8 * a.nbytes:,} bits" if torch.is_tensor(a) else f"{a} and {b}"
    return f"{name} ({what})"


def differs_in(checkpoint: dict, trace: list) -> str:
    """In words: what of a checkpoint differs from the trace of its step. Not the loop's state, which
    an evaluation changes after the step."""
    then = dict(named("after it:", essence(checkpoint) | {"state": {}}))
    bits = bits_that_differ(then, {name: leaf for name, leaf in trace if name in then})
    some = [f"{name.removeprefix('after it: ')} ({bits[name]:,} bits)" for name in list(bits)[:5]]
    return ", ".join(some + [f"{len(bits) - 5} more"] * (len(bits) > 5)) or "nothing"


# ---- the page -----------------------------------------------------------------------------------


def write_step_page(folder: Path, step: int, verdict: str, row: dict, seen: dict) -> list[str]:
    """Write replay_STEP.md and .png into `folder`. row: of metrics.jsonl, as computed here. seen: what
    look_at() returns. Returns lines for the console."""
    path = folder / f"replay_{step:08}.md"
    trace = seen["trace"]
    odd = [name for name, leaf in trace if is_float(leaf) and not leaf.isfinite().all()]
    finite = f"the first tensor that is not finite: {odd[0]}" if odd else "all tensors are finite"
    numbers = [(name, row[name]) for name in row if name not in (*MEASURED, "kind")]
    lines = sequences(path.with_suffix(".png"), step, seen)
    out = [f"# Step {step} of {folder.name}", f"- {verdict}\n- {finite}", table(("", ""), numbers)]
    out += ["## Its sequences, those of the highest loss first", *lines]
    out += ["## Norms of weights, of gradients after clipping, and of updates"]
    out += [table(("tensor", "weight", "gradient", "update", "update / weight"), norms(trace))]
    out += ["## Outputs of the model's parts and blocks, from an eager pass"]
    out += [table(("module", "root mean square"), outputs(trace))]
    with replacing(path) as temporary:
        temporary.write_text(printable("\n\n".join(out)), encoding="utf-8")
    return [verdict, finite, lines[0], f"wrote {path}"]


def sequences(picture: Path, step: int, seen: dict) -> list[str]:
    """The loss of each sequence of a step, its worst tokens and its text, and a link to the picture."""
    inputs, targets, losses = map(torch.cat, zip(*seen["batch"], strict=True))
    if not len(losses):
        return ["The model does not return logits."]
    mean = losses.nanmean(1)
    order = mean.argsort(descending=True)[:MOST_SEQUENCES].tolist()
    lines = []
    for i in order:
        words = f"**Sequence {seen['first'] + i}**: loss {mean[i]:.4f}"
        with suppress(DataError, KeyError):  # there is no tokenizer, or it is not installed
            decode = tokenizer_of(seen["meta"]).decode
            worst = losses[i].nan_to_num(nan=-1).argsort(descending=True)[:3].tolist()
            worst = [(targets[i, n].item(), losses[i, n]) for n in worst if targets[i, n] >= 0]
            worst = [f"`{decode([token])!r}` {loss:.2f}" for token, loss in worst]
            text = "".join(f"    {line}\n" for line in decode(inputs[i].tolist()).splitlines())
            words += f"; worst: {', '.join(worst)}\n\n{text}"
        lines.append(words)
    is_drawn = draw_step(picture, step, losses[order], order)
    return lines + [f"![The loss of each token]({picture.name})"] * is_drawn


def is_float(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def norms(trace: list) -> list[list]:
    found, rows = dict(trace), []
    for name, after in found.items():
        place, _, name = name.partition(" model/")
        if place == "after it:" and is_float(after):
            before = found[f"at its start: model/{name}"].double()
            gradient = found.get(f"clipped gradient of {name}")
            size = "" if gradient is None else f"{gradient.double().norm():.3g}"
            weight, update = before.norm(), (after.double() - before).norm()
            rows.append([name, f"{weight:.4g}", size, f"{update:.3g}", f"{update / weight:.2e}"])
    return rows


def outputs(trace: list) -> list[list]:
    """Of the first micro-batch, and of one level of modules, or those with a number."""
    found = [(re.match(r"output of ([\w ]+|[\w.]+\.\d+): ", name), leaf) for name, leaf in trace]
    sizes = {name[1]: leaf for name, leaf in reversed(found) if name and is_float(leaf)}
    sizes = {name: leaf.float().square().mean().sqrt() for name, leaf in reversed(sizes.items())}
    return [[name, f"{size:.4g}"] for name, size in sizes.items()]


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

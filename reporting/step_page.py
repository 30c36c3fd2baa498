"""One step, seen from inside: all that it computes, in order, and a page of that."""

import textwrap
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_hook

from plumbing import ranks
from plumbing.cli import BadInput
from plumbing.console import print0
from plumbing.data import tokenizer_of
from plumbing.snapshot import Snapshot, by_path
from reporting.results import table, write

START, END = "at its start:", "after it:"  # before the names of what a step reads and moves
MAX_SEQUENCES = 64  # on the page; those of the highest loss


# ---- what it computes ---------------------------------------------------------------------------


def look_at(train, take: Callable, run, inputs, targets, lr: float) -> tuple[dict, dict]:
    """Take a step by take(), which is train_step of the module `train`. Returns its numbers, and
    what was to be seen: "trace" has [(name, leaf), ...] in the order of computation.

    Hooks would change what torch.compile does, so the outputs of modules are those of an eager
    forward pass before the step; all that it moves is put back."""
    trace = []
    seen = {"trace": trace, "meta": run.facts["data"]["meta"], "first": run.state["sequences"]}

    def add(words: str, value) -> None:
        for path, leaf in by_path(value).items():
            trace.append((f"{words} {path}", copied(leaf)))

    add(START, moved_by(run))
    add("batch:", {"inputs": inputs, "targets": targets})
    trace.append(("learning rate", lr))
    snapshot = Snapshot(run)
    names = {module: name or "the model" for name, module in run.model.named_modules()}

    def hook(module, inputs, output) -> None:
        if module in names:
            add(f"output of {names[module]}:", [output])

    with register_module_forward_hook(hook):
        losses = token_losses(train, run, inputs, targets)
    seen["batch"] = ranks.from_all_ranks((inputs.cpu(), targets.cpu(), losses.cpu()))
    snapshot.restore()
    numbers = take()
    add("step:", numbers)
    weights = reversed([*run.model.named_parameters()])  # as a backward pass has them
    add("clipped gradient of", {name: w.grad for name, w in weights if w.grad is not None})
    add(END, moved_by(run))
    seen["row"] = {"lr": lr} | {name: float(number) for name, number in numbers.items()}
    return numbers, seen


def copied(leaf):
    """A copy on the CPU of a tensor, whole if it is sharded; any other value as it is."""
    if torch.is_tensor(leaf):
        return ranks.full_tensor(leaf.detach()).to("cpu", copy=True)
    return leaf


def moved_by(run) -> dict:
    """What a step reads and moves, besides the loop's counters."""
    checkpoint = run.checkpoint()
    parts = {name: checkpoint[name] for name in ("model", "ema", "scaler", "rng")}
    return parts | {"optimizer": [saved["state"] for saved in checkpoint["optimizer"]]}


@torch.no_grad()
def token_losses(train, run, inputs, targets) -> torch.Tensor:
    """Cross entropy of each target, (sequences, targets), with this step's dropout; 0 where the
    target is masked."""
    losses = []
    size = run.state["micro_batch"]
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        with train.autocast(run.device):
            logits = run.model(x)
        flat = logits.float().flatten(0, -2), y.long().flatten()
        losses.append(torch.nn.functional.cross_entropy(*flat, reduction="none"))
    return torch.cat(losses).view(len(inputs), -1)


def first_in_traces(one: list, other: list) -> str:
    """In words: the first leaf that differs between the traces of a step, on any rank; "" if
    none. one, other: a trace of each rank, those of rank 0 first."""
    pairs = zip(chain(*one), chain(*other), strict=False)
    for (name, leaf), (other_name, other_leaf) in pairs:
        if name != other_name:
            return f"{name} here, {other_name} there"
        if ranks.checksum(leaf) != ranks.checksum(other_leaf):
            return name if torch.is_tensor(leaf) else f"{name} ({leaf} and {other_leaf})"
    return ""


# ---- the page -----------------------------------------------------------------------------------


def write_step_page(folder: Path, step: int, verdict: str, seen: dict) -> None:
    """Write replay_STEP.md into `folder`, and print its main lines. seen: what look_at()
    returns."""
    path = folder / f"replay_{step:08}.md"
    trace = seen["trace"]
    odd = [name for name, leaf in trace if torch.is_tensor(leaf) and not leaf.isfinite().all()]
    finite = f"the first tensor that is not finite: {odd[0]}" if odd else "all tensors are finite"
    lines = sequences(seen)
    out = [
        f"# Step {step} of {folder.name}",
        f"- {verdict}\n- {finite}",
        table(("", ""), seen["row"].items()),
        "## Its sequences, those of the highest loss first",
        *lines,
        "## Norms of weights, of gradients after clipping, and of updates",
        table(("tensor", "weight", "gradient", "update", "update / weight"), norms(trace)),
    ]
    write(path, "\n\n".join(out))
    print0("\n".join((verdict, finite, lines[0], f"wrote {path}")))


def sequences(seen: dict) -> list[str]:
    """The loss of each sequence of a step, the targets with the highest losses, and its text."""
    inputs, targets, losses = map(torch.cat, zip(*seen["batch"], strict=True))
    mean = losses.sum(1) / (targets != -100).sum(1)
    lines = []
    for i in mean.argsort(descending=True)[:MAX_SEQUENCES].tolist():
        line = f"**Sequence {seen['first'] + i}**: loss {mean[i]:.4f}"
        with suppress(BadInput, KeyError):  # there is no tokenizer, or it is not installed
            decode = tokenizer_of(seen["meta"]).decode
            highest = losses[i].topk(3)
            worst = zip(targets[i, highest.indices].tolist(), highest.values, strict=True)
            words = [f"`{decode([token])!r}` {loss:.2f}" for token, loss in worst if token >= 0]
            text = textwrap.indent(decode(inputs[i].tolist()), "    ")
            line += f"; worst: {', '.join(words)}\n\n{text}"
        lines.append(line)
    return lines


def norms(trace: list) -> list[list]:
    """A row for each weight that has a gradient."""
    leaves = dict(trace)
    rows = []
    for name in leaves:
        weight = name.removeprefix("clipped gradient of ")
        if weight != name:
            before, after = (leaves[f"{when} model/{weight}"].double() for when in (START, END))
            size, gradient = before.norm(), leaves[name].double().norm()
            update = (after - before).norm()
            cells = f"{size:.4g}", f"{gradient:.3g}", f"{update:.3g}", f"{update / size:.2e}"
            rows.append([weight, *cells])
    return rows

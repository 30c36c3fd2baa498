"""One step, seen from inside: all that it computes, in order, and a page of that."""

import textwrap
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook

from plumbing import ranks
from plumbing.cli import printable
from plumbing.data import DataError, tokenizer_of
from plumbing.files import replacing
from plumbing.ranks import as_bytes
from plumbing.snapshot import Snapshot, by_path
from reporting.results import table

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

    add("at its start:", moved_by(run))
    add("batch:", {"inputs": inputs, "targets": targets})
    trace.append(("learning rate", lr))
    before = Snapshot(run)
    names = {module: name or "the model" for name, module in run.model.named_modules()}

    def hook(module, inputs, output) -> None:
        if module in names:
            add(f"output of {names[module]}:", [output])

    with register_module_forward_hook(hook):
        losses = token_losses(train.autocast, run, inputs, targets)
    seen["batch"] = ranks.from_all_ranks((inputs.cpu(), targets.cpu(), losses.cpu()))
    before.restore()
    numbers = take()
    add("step:", numbers)
    for name, weight in reversed([*run.model.named_parameters()]):  # as a backward pass has them
        if weight.grad is not None:
            add("clipped gradient of", {name: weight.grad})
    add("after it:", moved_by(run))
    seen["row"] = {"lr": lr} | {name: float(number) for name, number in numbers.items()}
    return numbers, seen


def copied(leaf):
    """A copy on the CPU of a tensor, whole if it is sharded; any other value as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return ranks.full_tensor(leaf.detach()).cpu().clone()


def moved_by(run) -> dict:
    """What a step reads and moves, besides the loop's counters."""
    checkpoint = run.checkpoint()
    parts = {name: checkpoint[name] for name in ("model", "ema", "scaler", "rng")}
    return parts | {"optimizer": [saved["state"] for saved in checkpoint["optimizer"]]}


@torch.no_grad()
def token_losses(autocast: Callable, run, inputs, targets) -> torch.Tensor:
    """Cross entropy of each target, (sequences, targets), with this step's dropout; 0 where the
    target is masked."""
    losses = []
    size = run.state["micro_batch"]
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        with autocast(run.device):
            logits = run.model(x)
        flat = logits.float().flatten(0, -2), y.long().flatten()
        losses.append(cross_entropy(*flat, reduction="none").view(len(x), -1))
    return torch.cat(losses)


def first_in_traces(one: list, other: list) -> str:
    """In words: the first leaf that differs between the traces of a step, on any rank; "" if
    none. one, other: a trace of each rank."""
    here, there = (chain(*zip_longest(*traces, fillvalue=("", None))) for traces in (one, other))
    for (name, leaf), (other_name, other_leaf) in zip(here, there, strict=False):
        if name != other_name:
            return f"{name} here, {other_name} there"
        if bytes(as_bytes(leaf)) != bytes(as_bytes(other_leaf)):
            shown = f" ({leaf} and {other_leaf})"
            return name if isinstance(leaf, torch.Tensor) else name + shown
    return ""


# ---- the page -----------------------------------------------------------------------------------


def write_step_page(folder: Path, step: int, verdict: str, seen: dict) -> list[str]:
    """Write replay_STEP.md into `folder`. seen: what look_at() returns. Returns lines for the
    console."""
    path = folder / f"replay_{step:08}.md"
    trace = seen["trace"]
    odd = [name for name, leaf in trace if is_float(leaf) and not leaf.isfinite().all()]
    finite = f"the first tensor that is not finite: {odd[0]}" if odd else "all tensors are finite"
    lines = sequences(seen)
    out = [
        f"# Step {step} of {folder.name}",
        f"- {verdict}\n- {finite}",
        table(("", ""), list(seen["row"].items())),
        "## Its sequences, those of the highest loss first",
        *lines,
        "## Norms of weights, of gradients after clipping, and of updates",
        table(("tensor", "weight", "gradient", "update", "update / weight"), norms(trace)),
    ]
    with replacing(path) as temporary:
        temporary.write_text(printable("\n\n".join(out)), encoding="utf-8")
    return [verdict, finite, lines[0], f"wrote {path}"]


def sequences(seen: dict) -> list[str]:
    """The loss of each sequence of a step, the targets with the highest losses, and its text."""
    inputs, targets, losses = map(torch.cat, zip(*seen["batch"], strict=True))
    mean = losses.sum(1) / (targets != -100).sum(1)
    lines = []
    for i in mean.argsort(descending=True)[:MAX_SEQUENCES].tolist():
        line = f"**Sequence {seen['first'] + i}**: loss {mean[i]:.4f}"
        with suppress(DataError, KeyError):  # there is no tokenizer, or it is not installed
            decode = tokenizer_of(seen["meta"]).decode
            highest = losses[i].topk(3)
            worst = zip(targets[i, highest.indices].tolist(), highest.values, strict=True)
            words = [f"`{decode([token])!r}` {loss:.2f}" for token, loss in worst if token >= 0]
            text = textwrap.indent(decode(inputs[i].tolist()), "    ")
            line += f"; worst: {', '.join(words)}\n\n{text}"
        lines.append(line)
    return lines


def is_float(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def norms(trace: list) -> list[list]:
    found = dict(trace)
    rows = []
    for name, after in found.items():
        weight = name.removeprefix("after it: model/")
        if weight == name or not is_float(after):
            continue
        before = found[f"at its start: model/{weight}"].double()
        gradient = found.get(f"clipped gradient of {weight}")
        size = before.norm()
        update = (after.double() - before).norm()
        cell = "" if gradient is None else f"{gradient.double().norm():.3g}"
        rows.append([weight, f"{size:.4g}", cell, f"{update:.3g}", f"{update / size:.2e}"])
    return rows

"""The page and the picture of one step that replay.py computed again."""

import math
from pathlib import Path

import torch

from plumbing.cli import printable
from plumbing.data import DataError, tokenizer_of
from plumbing.files import replacing

MOST_SEQUENCES = 64  # on the page and in the picture; those of the highest loss


def write_page(folder: Path, step: int, verdict: str, row: dict, seen: dict) -> list[str]:
    """Write replay_STEP.md and .png. seen: what replay.look() returns. Returns lines for the console."""
    path = folder / f"replay_{step:08}.md"
    inputs, targets, losses = zip(*seen["batch"], strict=True)
    inputs, targets = torch.cat(inputs), torch.cat(targets)
    losses = None if any(each is None for each in losses) else torch.cat(losses)
    odd = first_not_finite(seen["traces"][0])
    numbers = {name: row[name] for name in row if isinstance(row[name], float | int | None)}
    out = [f"# Step {step} of {folder.name}", "", f"{verdict[0].upper()}{verdict[1:]}.", ""]
    out += [
        f"The first tensor that is not finite: **{odd}**." if odd else "All tensors are finite.",
        "",
    ]
    out += table(["", *numbers], [["computed here", *map(str, numbers.values())]])
    summary = [verdict, f"not finite: {odd}"] if odd else [verdict]
    if losses is not None:
        order = losses.nan_to_num(math.inf).mean(1).argsort(descending=True)[:MOST_SEQUENCES]
        name = draw(path.with_suffix(".png"), step, losses[order], order)
        out += ["", f"![The loss of each token]({name})" if name else "(no picture)", ""]
        out += ["## Its sequences, those of the highest loss first", ""]
        texts = texts_of(inputs, targets, losses, seen["meta"])
        for i in order.tolist():
            mean = losses[i].nanmean()
            out += [
                f"**{seen['sequences'] + i}**: loss {mean:.4f}{texts[i][0]}",
                "",
                texts[i][1],
                "",
            ]
        worst = order[0].item()
        first_line = f"{texts[worst][1].strip()[:70]!r}" * bool(texts[worst][1])
        summary += [
            f"loss {losses[worst].nanmean():.4f}: sequence {seen['sequences'] + worst} {first_line}"
        ]
    out += ["", "## Norms of weights, gradients (clipped) and updates", ""]
    out += table(
        ["tensor", "weight", "gradient", "update", "update / weight"], norms(seen["traces"][0])
    )
    out += ["", "## Outputs of modules", "", "From an eager pass before the step.", ""]
    out += table(["module", "shape", "root mean square", "largest"], outputs(seen["traces"][0]))
    with replacing(path) as temporary:
        temporary.write_text(printable("\n".join(out)) + "\n", encoding="utf-8")
    return [*summary, f"wrote {path}"]


def table(head: list, rows: list) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, row)) + " |" for row in cells]


def is_float(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def first_not_finite(trace: list) -> str | None:
    odd = (name for name, leaf in trace if is_float(leaf) and not leaf.isfinite().all())
    return next(odd, None)


def norms(trace: list) -> list[list]:
    found, rows = dict(trace), []
    for name, before in found.items():
        if name.startswith("at its start: model/") and is_float(before):
            name = name.removeprefix("at its start: model/")
            gradient = found.get(f"clipped gradient of {name}")
            update = (found[f"after it: model/{name}"].double() - before.double()).norm().item()
            weight = before.double().norm().item()
            size = "" if gradient is None else f"{gradient.double().norm().item():.3g}"
            ratio = f"{update / weight:.2e}" if weight else "n/a"
            rows.append([name, f"{weight:.4g}", size, f"{update:.3g}", ratio])
    return rows


def outputs(trace: list) -> list[list]:
    """Of the first micro-batch, and of the parts of the model and each of its blocks."""
    rows = {}
    for name, leaf in trace:
        module = name.removeprefix("output of ").partition(":")[0]
        is_block = "." not in module or module.rpartition(".")[2].isdigit()
        if name.startswith("output of ") and is_float(leaf) and is_block and module not in rows:
            leaf = leaf.float()
            size = leaf.square().mean().sqrt().item()
            rows[module] = [
                module,
                list(leaf.shape),
                f"{size:.4g}",
                f"{leaf.abs().max().item():.4g}",
            ]
    return list(rows.values())


def texts_of(inputs, targets, losses, meta: dict) -> list[tuple[str, str]]:
    """(the worst tokens, the text as a block) of each sequence; empty if the data is no text."""
    try:
        tokenizer = tokenizer_of(meta) if "tokenizer" in meta else None
    except DataError:
        tokenizer = None
    if tokenizer is None:
        return [("", "")] * len(inputs)
    found = []
    for x, y, loss in zip(inputs, targets, losses, strict=True):
        worst = loss.nan_to_num(-1).argsort(descending=True)[:3].tolist()
        tokens = [
            f"`{tokenizer.decode([y[i].item()])!r}` {loss[i]:.2f}" for i in worst if y[i] >= 0
        ]
        lines = tokenizer.decode(x.tolist()).splitlines()
        found.append((f"; worst: {', '.join(tokens)}", "\n".join(f"    {line}" for line in lines)))
    return found


def draw(path: Path, step: int, losses, order) -> str | None:
    """The loss of each token as a shade, a line for each sequence. Returns the name of the file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(10, 1.5 + 0.15 * len(losses)), layout="constrained")
    axes = figure.add_subplot()
    shades = axes.imshow(
        losses.numpy(), aspect="auto", cmap="magma_r", interpolation="nearest", vmin=0
    )
    figure.colorbar(shades, label="loss, nats")
    axes.set(title=f"Loss of each token of step {step}", xlabel="place in the sequence")
    axes.set_yticks(range(len(order)), order.tolist(), fontsize=6)
    axes.set_ylabel("sequence of the batch")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
    return path.name

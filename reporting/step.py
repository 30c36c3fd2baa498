"""One step, seen from inside: all that it computes, in order, and a page and a picture of that."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from plumbing import ranks
from plumbing.audit import bits_that_differ
from plumbing.checkpoint import HASHED
from plumbing.cli import printable
from plumbing.data import DataError, tokenizer_of
from plumbing.files import replacing
from plumbing.safe_step import leaves, mapped, snapshot
from reporting.logged import MEASURED

# of the state: what evaluations keep there for each other
EVALUATION = {"best_score", "best_val_loss", "best_step", "score_to_beat"}
EVALUATION |= {"evals_since_best", "evals_on_plateau"}
MOST_SEQUENCES = 64  # on the page and in the picture; those of the highest loss


# ---- what it computes ---------------------------------------------------------------------------


def on_host(value) -> dict:
    """{path: leaf} of nested values: tensors as copies on the CPU, whole if they are sharded."""

    def copied(leaf):
        return ranks.whole(leaf.detach()).cpu().clone() if isinstance(leaf, torch.Tensor) else leaf

    return {"/".join(map(str, path)): copied(leaf) for path, leaf in leaves(value)}


def state_of(checkpoint: dict) -> dict:
    """What the next step depends on: not what only evaluations need, nor settings of optimizers."""
    state = {key: checkpoint["state"][key] for key in checkpoint["state"].keys() - EVALUATION}
    moments = [each["state"] for each in checkpoint["optimizer"]]
    kept = {name: checkpoint[name] for name in HASHED}
    return on_host(kept | {"state": dict(sorted(state.items())), "optimizer": moments})


def look_at(
    train, save: bool, all_ranks: bool, own: Callable, model, run, inputs, targets, lr: float
) -> tuple[dict, dict]:
    """Take a step by own(), which is train_step of the module `train`. Returns its numbers, and what
    there was to see: "traces" has [(name, leaf), ...] in the order of computation, of rank 0 or of
    `all_ranks`; "saved", if `save`, is a checkpoint of the state before it.

    Hooks would change what torch.compile does, so outputs of modules, and gradients before clipping,
    are those of an eager pass before the step; all that it moves is put back.
    """
    seen = []

    def add(words: str, value) -> None:
        seen.extend((f"{words} {path}", leaf) for path, leaf in on_host(value).items())

    saved = mapped(lambda leaf, _: on_host([leaf])["0"], run.checkpoint()) if save else None
    about = {"sequences": run.state["sequences"], "meta": run.facts["data"]["meta"], "saved": saved}
    add("at its start:", state_of(run.checkpoint()))
    add("batch:", {"inputs": inputs, "targets": targets})
    seen.append(("learning rate", lr))
    before = snapshot(run)
    losses = token_losses(train, run, inputs, targets)
    batch = ranks.from_all_ranks((inputs.cpu(), targets.cpu(), losses))
    before.put_back()
    weights = dict(run.model.named_parameters())
    order = {}  # of the gradients, as the backward pass completes them
    hooks = []
    for name, module in run.model.named_modules():
        words = f"output of {name or 'the model'}:"
        hook = partial(lambda words, module, inputs, output: add(words, [output]), words)
        hooks.append(module.register_forward_hook(hook))
    for name, weight in weights.items():
        if weight.requires_grad:
            hook = partial(lambda name, _: order.update({name: 0}), name)
            hooks.append(weight.register_post_accumulate_grad_hook(hook))
    run.model.zero_grad(set_to_none=True)
    n_targets = ranks.total((targets.long() != -100).sum())
    numbers = train.forward_backward(run.model, run, inputs, targets, n_targets)
    for hook in hooks:
        hook.remove()
    add("forward pass:", numbers)
    add("gradient of", {name: weights[name].grad for name in order})
    before.put_back()
    numbers = own(model, run, inputs, targets, lr)
    add("step:", numbers)
    add("clipped gradient of", {n: w.grad for n, w in weights.items() if w.grad is not None})
    for group in (group for each in run.optimizers for group in each.param_groups):
        add("setting:", {key: group[key] for key in group if key != "params"})
    add("after it:", state_of(run.checkpoint()))
    traces = ranks.from_all_ranks(seen) if all_ranks else [seen]
    return numbers, about | {"traces": traces, "batch": batch}


@torch.no_grad()
def token_losses(train, run, inputs, targets) -> torch.Tensor | None:
    """Cross entropy of each target, (sequences, targets), with this step's dropout: NaN where it is
    masked, inf where it is not finite. None if the model does not return logits."""
    found = []
    size = run.state["micro_batch"]
    with suppress(TypeError, ValueError, RuntimeError):
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            with train.autocast(run.device):
                logits = run.model(x).float().flatten(0, -2)
            y = y.long().flatten()
            losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
            losses = losses.nan_to_num(nan=math.inf, posinf=math.inf).where(y != -100, math.nan)
            found.append(losses.view(len(x), -1).cpu())
        return torch.cat(found)
    return None


def first_in_traces(one: list, other: list) -> str | None:
    """In words: the first leaf that differs between the traces of a step, on any rank."""
    found = []
    for traces in zip(one, other, strict=True):
        pairs = zip_longest(*traces, fillvalue=("nothing", None))
        for place, ((name, a), (name_there, b)) in enumerate(pairs):
            bits = sum(bits_that_differ({"": a}, {"": b}).values())
            if name != name_there:
                found.append((place, f"{name} here, {name_there} there"))
            elif bits:
                is_tensor = isinstance(a, torch.Tensor)
                what = f"{bits:,} of {8 * a.nbytes:,} bits" if is_tensor else f"{a} and {b}"
                found.append((place, f"{name} ({what})"))
            if name != name_there or bits:
                break
    return min(found)[1] if found else None


def differs_in(checkpoint: dict, trace: list) -> str:
    """In words: what of a checkpoint differs from the trace of its step. Not the loop's state, which
    an evaluation changes after the step."""
    computed = dict(trace)
    then = {n: leaf for n, leaf in state_of(checkpoint).items() if not n.startswith("state/")}
    bits = bits_that_differ(then, {name: computed[f"after it: {name}"] for name in then})
    some = [f"{name} ({bits[name]:,} bits)" for name in list(bits)[:5]]
    return ", ".join(some + [f"{len(bits) - 5} more"] * (len(bits) > 5)) or "nothing"


# ---- the page -----------------------------------------------------------------------------------


def write_page(folder: Path, step: int, verdict: str, row: dict, seen: dict) -> list[str]:
    """Write replay_STEP.md and .png into `folder`. row: of metrics.jsonl, as computed here. seen: what
    look_at() returns. Returns lines for the console."""
    path = folder / f"replay_{step:08}.md"
    found = seen["traces"][0]
    odd = first_not_finite(found)
    finite = f"The first tensor that is not finite: {odd}" if odd else "All tensors are finite"
    numbers = {name: row[name] for name in row if name not in (*MEASURED, "kind")}
    out = [f"# Step {step} of {folder.name}", f"{verdict[0].upper()}{verdict[1:]}.", f"{finite}."]
    out += [table([*numbers], [[*numbers.values()]])]
    lines, picture = sequences(path, step, seen)
    out += ["## Its sequences, those of the highest loss first", *picture, *lines]
    out += ["## Norms of weights, of gradients after clipping, and of updates"]
    out += [table(["tensor", "weight", "gradient", "update", "update / weight"], norms(found))]
    out += ["## Outputs of the parts of the model, and of its blocks", "From an eager pass."]
    out += [table(["module", "shape", "root mean square", "largest"], outputs(found))]
    with replacing(path) as temporary:
        temporary.write_text(printable("\n\n".join(out)) + "\n", encoding="utf-8")
    return [verdict, f"{finite[0].lower()}{finite[1:]}", *lines[:2], f"wrote {path}"]


def sequences(path: Path, step: int, seen: dict) -> tuple[list[str], list[str]]:
    """(words and text of each sequence of a step, a link to their picture)."""
    inputs, targets, losses = zip(*seen["batch"], strict=True)
    if any(each is None for each in losses):
        return ["The model does not return logits."], []
    inputs, targets, losses = (torch.cat(each) for each in (inputs, targets, losses))
    mean = losses.nanmean(1)
    order = mean.argsort(descending=True)[:MOST_SEQUENCES].tolist()
    lines = []
    for i in order:
        words, text = text_of(inputs[i], targets[i], losses[i], seen["meta"])
        lines += [f"**Sequence {seen['sequences'] + i}**: loss {mean[i]:.4f}{words}", *text]
    name = draw(path.with_suffix(".png"), step, losses[order], order)
    return lines, [f"![The loss of each token]({name})"] if name else []


def table(head: list, rows: list) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in cells)


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
    """Of the first micro-batch."""
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


def text_of(inputs, targets, losses, meta: dict) -> tuple[str, list[str]]:
    """(its three worst tokens, [its text, as a block]) of a sequence; nothing if the data is no text."""
    if "tokenizer" not in meta:
        return "", []
    try:
        tokenizer = tokenizer_of(meta)
        worst = losses.nan_to_num(nan=-1).argsort(descending=True)[:3].tolist()
        worst = [
            (tokenizer.decode([targets[i].item()]), losses[i]) for i in worst if targets[i] >= 0
        ]
        words = ", ".join(f"`{token!r}` {loss:.2f}" for token, loss in worst)
        text = tokenizer.decode(inputs.tolist())
    except DataError as error:
        return f" (no text: {error})", []
    return f"; worst: {words}", ["\n".join(f"    {line}" for line in text.splitlines())]


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
    axes.set_yticks(range(len(order)), order, fontsize=6)
    axes.set_ylabel("sequence of the batch")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
    return path.name

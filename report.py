"""
Shows what a run did, from the metrics.jsonl and run.json in its folder:

    python report.py out/shakespeare       # writes report.png and report.md beside them
    python report.py out/a out/b out/c     # writes compare.png and compare.md into out/a

train.py calls write_report at the end of every run. A run of a million steps takes seconds. A field
that report.py does not know, such as one that a fork adds to its rows, gets a panel and a row.
"""

import io
import json
import math
import os
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from plumbing.configurator import configured, fail
from plumbing.files import read_json, replacing
from plumbing.knobs import read_knobs

report_dir = ""  # folder for what is written; "" = the (first) run's own
dollars_per_hour = 0.0  # of one device, [0, inf); 0 = as train.py was told

REPO = Path(__file__).resolve().parent
FIELDS = {  # that are known; the first one is in every row
    "train": "step loss grad_norm skipped lr tokens sequences epoch step_ms data_ms tokens_per_sec "
    "mfu mem_gb gpu_util".split(),
    "eval": "step val_loss val_bpb val_accuracy val_tokens best_val_loss".split(),
}
NO_ROW = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
# Okabe & Ito's colours (2008): told apart with any colour vision, and on paper
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, PALE_GREEN = "#0072B2", "#D55E00", "#CC79A7", "#8FD4BF"
# Events that are drawn: name in the picture, colour, marker, does a line go through all panels?
LANES = {
    "best": ("best", VERMILION, "*", False),
    "resume": ("resume", BLUE, ">", True),
    "skipped": ("skip", ORANGE, "|", False),
    "rollback": ("rollback", PURPLE, "<", True),
    "diverging": ("diverging", GREEN, "^", False),
    "audit": ("audit", VERMILION, "P", True),
    "out_of_memory": ("out of memory", BLACK, "s", True),
    "save_failed": ("save failed", ORANGE, "D", False),
    "failed": ("failed", BLACK, "X", True),
}
STYLE = """
    font.size=9 text.color=#222222 axes.labelcolor=#222222 axes.edgecolor=#666666
    axes.linewidth=0.8 axes.spines.top=False axes.spines.right=False axes.axisbelow=True
    axes.grid=True grid.color=#e6e6e6 grid.linewidth=0.7 xtick.color=#444444 ytick.color=#444444
    xtick.labelsize=8 ytick.labelsize=8 legend.frameon=False legend.fontsize=8
    legend.columnspacing=1.4
"""


@dataclass
class Run:
    name: str
    folder: Path
    info: dict  # run.json; empty dicts where it is missing or damaged
    train: dict  # field -> float array, one number a step; what is null or missing is NaN
    evals: dict  # the same, one number an evaluation
    events: list  # rows as they are, in the order in which they happened
    unreadable: int  # lines that are no rows, besides a last one that is half-written


def read_run(folder):
    """The Run in `folder`. Raises ValueError, one line for the user, where there is none to read."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        found = "no metrics.jsonl in it" if folder.is_dir() else "no such folder"
        near = sorted(path.parent for path in folder.absolute().parent.glob("*/metrics.jsonl"))
        near = ", ".join(map(os.path.relpath, near[:8])) or "none; train.py makes one"
        raise ValueError(f"{folder}: {found}; expected a run's folder, and beside it are: {near}")
    tables, n_lines, unreadable, last_is_whole = read_rows(path)
    if not n_lines:
        raise ValueError(f"{path} is empty: the run stopped before it had anything to write")
    if unreadable * 2 >= n_lines:
        raise ValueError(
            f"{path} is damaged, or not from train.py: {unreadable:,} of its {n_lines:,} lines are "
            'no rows; expected JSON such as {"kind": "train", "step": 1, ...}'
        )
    empty = {key: {} for key in "config data run git versions hardware state".split()}
    info = read_json(folder / "run.json")
    if not all(isinstance(info.get(key, {}), dict) for key in empty):
        info = {}
    return Run(
        name=folder.resolve().name,
        folder=folder,
        info=empty | info,
        train=columns(tables["train"], FIELDS["train"]),
        evals=columns(tables["eval"], FIELDS["eval"]),
        events=tables["event"],
        unreadable=unreadable - (not last_is_whole),
    )


def read_rows(path):
    """({kind: rows}, number of lines, of unreadable ones, is the last line whole?)"""
    tables, n_lines, unreadable, whole = {"train": [], "eval": [], "event": []}, 0, 0, True
    with open(path, "rb") as file:
        while lines := file.readlines(1 << 16):  # as many at once as are parsed fastest
            try:
                rows = json.loads(b"[" + b",".join(lines) + b"]")
                parts = [sort_rows(rows)] if len(rows) == len(lines) else None
            except NO_ROW:
                parts = None
            for part in parts or map(sort_line, lines):
                whole = part is not None
                unreadable += not whole
                for kind, table in (part or {}).items():
                    tables[kind] += table
            n_lines += len(lines)
    return tables, n_lines, unreadable, whole


def sort_rows(rows):
    """{kind: rows}, of train and eval rows as {field: array}. Raises where one is no row."""
    parts = {"train": [], "eval": [], "event": []}
    for row in rows:
        parts[row["kind"]].append(row)
    for row in parts["event"]:
        row["step"], row["event"] = int(row["step"]), str(row["event"])
    for kind, fields in FIELDS.items():
        if parts[kind]:
            names = [*fields, *set().union(*parts[kind]).difference(fields, ("kind", "finite"))]
            part = {name: np.array([plain(row.get(name)) for row in parts[kind]]) for name in names}
            if not np.isfinite(part["step"]).all():
                raise ValueError("a row without its step")
            parts[kind] = [part]
    return parts


def plain(value):
    """The number that a field of a row is, or NaN."""
    return float(value) if isinstance(value, int | float) else math.nan


def sort_line(line):
    try:
        return sort_rows([json.loads(line)])
    except NO_ROW:
        return None


def columns(parts, fields):
    """{field: array} with steps that rise; of two rows of one step the later one counts.

    A field that is not in `fields` counts if two rows give it a number: damage may make up one.
    """
    table = {}
    for name in dict.fromkeys([*fields, *sorted(set().union(*parts))]):
        values = [part.get(name, np.full(len(part["step"]), np.nan)) for part in parts]
        table[name] = np.concatenate([[], *values])
    if (np.diff(table["step"]) <= 0).any():
        _, last = np.unique(table["step"][::-1], return_index=True)
        table = {name: values[::-1][last] for name, values in table.items()}
    return {k: values for k, values in table.items() if k in fields or len(known(values)) > 1}


def known(values):
    return values[np.isfinite(values)]


def mean(values):
    return float(np.mean(known(values))) if len(known(values)) else math.nan


def median(values):
    return float(np.median(known(values))) if len(known(values)) else math.nan


def half_window(run):
    """Steps to either side over which curves are smoothed: a hundredth of the run."""
    return max(1, len(run.train["step"]) // 100)


def smooth(values, half):
    """Mean over `half` neighbours to either side, where there are so many.

    At the start, where a curve falls fast, as many on the right as on the left.
    """
    i, finite = np.arange(len(values)), np.isfinite(values)
    total = np.concatenate([[0], np.cumsum(np.where(finite, values, 0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    first, last = i - np.minimum(half, i), np.minimum(i + np.minimum(half, i) + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def happened(run, event):
    return [row for row in run.events if row["event"] == event]


def best_of(run):
    """(loss, step) of the best evaluation of the last one's extent; (NaN, 0) where there is none.

    A rollback takes with it the rows that it undoes, but run.json and best.pt still know.
    """
    losses, state = run.evals["val_loss"], run.info["state"]
    losses = np.where(extent(run)[1], losses, np.nan)
    found = (math.nan, 0)
    if len(known(losses)):
        found = float(np.nanmin(losses)), int(run.evals["step"][np.nanargmin(losses)])
    best = state.get("best_val_loss")
    return found if best is None or found[0] <= best else (best, state["best_step"])


def extent(run):
    """(tokens of the last evaluation, 0 for the whole split; which evaluations saw as many)."""
    tokens = np.nan_to_num(run.evals["val_tokens"])
    last = tokens[-1] if len(tokens) else 0
    return last, tokens == last


def new_fields(run):
    """[(name, steps, values)] of what train.py does not write: a fork does."""
    tables = (run.train, FIELDS["train"]), (run.evals, FIELDS["eval"])
    return [(k, t["step"], t[k]) for t, fields in tables for k in t if k not in fields]


def last_step(run):
    return int(max(run.train["step"].max(initial=0), run.evals["step"].max(initial=0)))


def ended(run):
    ends = happened(run, "end")
    how = run.info["ended"] if "ended" in run.info else ends and ends[-1].get("ended")
    how = str(how or "no end on record (killed, or running still)").split(". ")[0]
    return how if "at step" in how else f"{how}, at step {last_step(run):,}"


def seconds_by_kind(run):
    """({kind: seconds} over all sessions, number of sessions that left no account of theirs)."""
    total, ends = {}, happened(run, "end")
    for row in ends:
        for kind, seconds in (row.get("seconds") or {}).items():
            total[kind] = total.get(kind, 0.0) + (seconds or 0.0)
    sessions = 1 + max(len(happened(run, "resume")), len(run.info.get("resumes") or []))
    return total, max(0, sessions - len(ends))


def number(value, form=",.4f", unit=""):
    return f"{value:{form}}{unit}" if math.isfinite(value) else "n/a"


def duration(seconds):
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours:,} h {minutes % 60:02} min"
    return f"{minutes} min {int(seconds % 60):02} s" if minutes else f"{seconds:.1f} s"


def clipped_share(run):
    clip = run.info["config"].get("grad_clip")
    return number(mean((run.train["grad_norm"] > clip).astype(float)), ".0%") if clip else "n/a"


def outcome(run):
    """{what: words}: the results in report.md and compare.md."""
    t, e, last = run.train, run.evals, 2 * half_window(run) + 1
    best, best_step = best_of(run)
    spent, missing = seconds_by_kind(run)
    wall, devices = sum(spent.values()), run.info["hardware"].get("world_size", 1)
    partly = f", without {missing} session(s) that left no account" if missing else ""
    on = f" on the first {extent(run)[0]:,.0f} tokens" if extent(run)[0] else ""
    bpb = np.where(extent(run)[1], e["val_bpb"], np.nan)
    words = {
        "how it ended": ended(run),
        "best validation loss, nats": number(best, ".4f", f" at step {best_step:,}{on}"),
        "last validation loss, nats": number(mean(e["val_loss"][-1:]), ".4f", on),
        "best bits per byte": number(best * median(bpb / e["val_loss"]), ".4f"),
        "accuracy at the best": number(mean(e["val_accuracy"][e["step"] == best_step]), ".2%"),
        f"mean training loss of the last {last} steps, nats": number(mean(t["loss"][-last:])),
        "tokens learned from": number(mean(t["tokens"][-1:]), ",.0f"),
        "epochs learned from": number(mean(t["epoch"][-1:]), ",.2f"),
        "throughput, tokens/s": number(1 / mean(1 / t["tokens_per_sec"]), ",.0f"),
        "median step, ms": number(median(t["step_ms"]), ",.1f"),
        "waiting for data": number(mean(t["data_ms"]) / mean(t["step_ms"]), ".1%"),
        "MFU": number(mean(t["mfu"]), ".1%"),
        "peak memory, GB": number(known(t["mem_gb"]).max(initial=-math.inf), ".2f"),
        "GPU utilization": number(mean(t["gpu_util"]) / 100, ".0%"),
        "wall-clock": (duration(wall) if spent else "n/a") + partly,
        "steps whose gradient was clipped": clipped_share(run),
        "updates skipped": f"{len(happened(run, 'skipped')):,}",
        "rollbacks": f"{len(happened(run, 'rollback')):,}",
        "resumes": f"{len(happened(run, 'resume')):,}",
    }
    words |= {f"last {name}": number(known(v)[-1], ",.4g") for name, _, v in new_fields(run)}
    hours = devices * wall / 3600 if spent else math.nan
    price = dollars_per_hour or run.info["config"].get("dollars_per_hour")
    money = f"${number(price * hours, ',.2f')} at ${price:g} an hour" if price else ASK_FOR_MONEY
    return words | {"cost": f"{number(hours, ',.3f')} device-hours; {money}{partly}"}


ASK_FOR_MONEY = "report.py --dollars_per_hour=PRICE says it in money"
TROUBLES = {  # name: likely cause, and what to try
    "The gradient is clipped all the time": "the clip is too low, so that only the gradient's "
    "direction counts, or the learning rate too high. Try a larger --grad_clip or a lower --peak_lr",
    "Updates fail": "the learning rate is too high, or the precision too narrow. Try a lower "
    "--peak_lr, more --warmup_steps, a smaller --grad_clip, --dtype=float32",
    "The training loss spikes": "a learning rate near the edge of stability, or odd batches. Try a "
    "lower --peak_lr, a smaller --grad_clip, a lower --beta2; --spike_sigma=6 rolls back",
    "The training loss rises again": "the learning rate is too high. Try a lower --peak_lr, more "
    "--warmup_steps, a schedule that falls",
    "The training loss is on a plateau": "the learning rate is too low or too high by now, or the "
    "model has learned what it can. Try another --peak_lr or --min_lr, a larger model, fewer steps",
    "Validation rises while training falls": "overfitting: the model has seen the same text too "
    "often. Try best.pt, from before; --patience=3, --dropout=0.1, more --weight_decay, more text",
    "The throughput falls": "other work on the machine, a device that slows down when hot, memory "
    "that swaps. Look at the machine (top, nvidia-smi) while it runs",
    "Training waits for data": "batches are read more slowly than they are learned from. Try "
    "--num_workers=2 or more, a dataset on a local disk",
}


def troubles(run):
    """{name of a known trouble: what in the curves shows it}"""
    t, e, found = run.train, run.evals, {}
    n, clip, half = len(t["step"]), run.info["config"].get("grad_clip"), half_window(run)
    skips, rollbacks = len(happened(run, "skipped")), len(happened(run, "rollback"))
    if skips > max(2, 0.01 * n) or rollbacks:
        found["Updates fail"] = f"{skips:,} not finite and skipped, {rollbacks} rollbacks"
    if len(known(t["loss"])) < 20:
        return found
    late = known(t["grad_norm"][n // 5 :])
    if clip and len(late) and np.mean(late > clip) > 0.9:
        found["The gradient is clipped all the time"] = (
            f"after the first fifth of the run its norm is above {clip:g} in"
            f" {np.mean(late > clip):.0%} of the steps, and {median(late):.3g} in the median"
        )
    loss, curve = t["loss"], smooth(t["loss"], half)
    noise = 1.4826 * median(np.abs(loss - curve))  # of a normal distribution, its deviation
    high = np.concatenate([[False], loss - curve > max(8 * noise, 0.1)])
    spikes = t["step"][np.flatnonzero(high[1:] & ~high[:-1])]
    if len(spikes):
        found["The training loss spikes"] = f"{len(spikes):,} spikes, the first at {spikes[0]:,.0f}"
    third, fourth = known(loss[n // 2 : 3 * n // 4]), known(loss[3 * n // 4 :])
    rise, lowest = mean(curve[-1:]) - np.nanmin(curve), np.nanmin(curve)
    if rise > max(6 * noise / math.sqrt(half), 0.05 * lowest):
        found["The training loss rises again"] = f"it ends {rise:.3f} above {lowest:.3f}"
    elif n >= 200 and len(third) and len(fourth):
        fall = mean(third) - mean(fourth)
        error = math.hypot(*(part.std() / math.sqrt(len(part)) for part in (third, fourth)))
        if fall < max(2 * error, 0.002 * mean(fourth)):
            quarters = f"{mean(third):.4f} in the third quarter, {mean(fourth):.4f} in the last"
            found["The training loss is on a plateau"] = quarters
    best, best_step = best_of(run)
    at_end, then = mean(e["val_loss"][-1:]), np.searchsorted(t["step"], best_step)
    if at_end > 1.005 * best and then < n and curve[-1] < curve[then]:
        found["Validation rises while training falls"] = (
            f"validation from {best:.4f} at step {best_step:,} to {at_end:.4f}, "
            f"training from {curve[then]:.4f} to {curve[-1]:.4f}"
        )
    first, last = (median(part) for part in np.array_split(t["tokens_per_sec"], 4)[::3])
    if n >= 40 and last < 0.85 * first:
        words = f"{first:,.0f} tokens/s in the first quarter of the run, {last:,.0f} in the last"
        found["The throughput falls"] = words
    waiting = mean(t["data_ms"]) / mean(t["step_ms"])
    if waiting > 0.1:
        found["Training waits for data"] = f"{waiting:.0%} of the time"
    return found


def thin(x, y, bins=1000):
    """(x, y) with at most two points a bin, its lowest and its highest: no peak is lost."""
    if len(x) <= 4 * bins:
        return x, y
    first = np.linspace(0, len(x), bins, endpoint=False).astype(int)
    both = np.stack([np.fmin.reduceat(y, first), np.fmax.reduceat(y, first)], axis=1)
    return np.repeat(x[first], 2), both.ravel()


def short(value, _=None):
    """12000 as 12k: tick labels stay short."""
    for letter, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / size:g}{letter}"
    return f"{value:,.6g}"


def new_figure(width, height):
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may want a screen

    figure = Figure((width, height), dpi=160, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    return figure


def curve(ax, x, y, **looks):
    """A line; where it has few points, marks as well, so that even one alone is seen."""
    marks = "o" if len(known(y)) < 15 else ""
    ax.plot(*thin(x, y), marker=marks, markersize=3.5, **looks)


def dots(ax, x, loss, colour, **looks):
    """Validation losses. Two or three make no curve: they are not joined."""
    joined, marks = "-" if len(x) > 3 else "", "o" if len(x) <= 60 else ""
    looks |= {"color": colour, "markeredgecolor": "white", "markeredgewidth": 0.7, "zorder": 4}
    ax.plot(*thin(x, loss), joined + marks if len(x) else "", markersize=5.5, lw=1.6, **looks)


def scale(ax, values, log_from=math.inf):
    """From 0 up; or logarithmic, where the values span more than a factor of `log_from`."""
    values = known(values)[known(values) > 0]
    top, span = (values.max(), values.max() / values.min()) if len(values) else (1, 1)
    if span > log_from:
        from matplotlib.ticker import LogLocator, NullFormatter

        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 200 else (1,)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        if span < 200:
            ax.yaxis.set_major_formatter(short)
    else:
        ax.set_ylim(0, 1.12 * top)


def legend(ax, **place):
    """Above the panel, where it can hide nothing."""
    if ax.get_legend_handles_labels()[0]:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1)} | place
        ax.legend(ncols=4, borderaxespad=0.2, **place)


def raw_and_smooth(ax, run, column, pale, strong, what=""):
    step, values, half = run.train["step"], run.train[column], half_window(run)
    raw = {"color": pale, "lw": 0.7} if len(step) > 30 else {"color": strong, "lw": 1.5}
    curve(ax, step, values, label=f"{what}each step", **raw)
    if len(step) > 30:
        part = slice(None, None, max(1, half // 20))
        label = f"{what}mean of {2 * half + 1:,}"
        ax.plot(step[part], smooth(values, half)[part], color=strong, lw=1.8, label=label)


def draw_loss(ax, run):
    loss, e = run.train["loss"], run.evals
    raw_and_smooth(ax, run, "loss", SKY, BLUE, "training, ")
    tokens, same = extent(run)
    on = f", first {short(tokens)} tokens" if tokens else ", last on all tokens" * (not same.all())
    dots(ax, e["step"], e["val_loss"], VERMILION, label=f"validation{on}")
    best, best_step = best_of(run)
    if math.isfinite(best):
        looks = {"color": VERMILION, "markersize": 13, "markeredgecolor": "white", "zorder": 5}
        ax.plot(best_step, best, "*", clip_on=False, label=f"best: {best:.4f}", **looks)
    values = known(np.concatenate([loss, e["val_loss"]]))
    if len(values) and values.max() > 30 * values.min():
        scale(ax, values, log_from=30)
    ax.set_ylabel("loss (nats)")
    legend(ax)


def event_steps(run):
    """{event: steps} of what LANES names and this run had."""
    losses = run.evals["val_loss"]
    failed = [row for row in happened(run, "end") if str(row.get("ended")).startswith("failed")]
    steps = {lane: [row["step"] for row in happened(run, lane)] for lane in LANES}
    better = losses <= np.fmin.accumulate(losses)
    steps["best"] = run.evals["step"][better & (run.evals["step"] > 0)]
    steps["skipped"] = np.union1d(steps["skipped"], run.train["step"][run.train["skipped"] > 0])
    steps["failed"] = [row["step"] for row in failed]
    return {lane: steps[lane] for lane in LANES if len(steps[lane])}


def draw_events(ax, panels, lanes):
    """A lane for each kind of event; the ones that turn a run also go through all the panels."""
    for lane, (event, steps) in enumerate(lanes.items()):
        _, colour, marks, through = LANES[event]
        looks = {"color": colour, "markersize": 6, "markeredgewidth": 1.6 if marks == "|" else 0}
        ax.plot(steps, [lane] * len(steps), marks, clip_on=False, **looks)
        for panel in panels if through and len(steps) <= 40 else []:
            for step in steps:
                panel.axvline(step, color=colour, lw=0.9, ls=(0, (4, 3)), alpha=0.7, zorder=1)
    ax.set_yticks(range(len(lanes)), [LANES[event][0] for event in lanes])
    ax.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_speed(ax, t):
    """Throughput, and MFU on the right: the same line, or another where the device has changed."""
    curve(ax, t["step"], t["tokens_per_sec"], color=BLUE, lw=1.2, label="throughput")
    scale(ax, t["tokens_per_sec"])
    ax.set_ylabel("throughput (tokens/s)")
    ax.yaxis.set_major_formatter(short)
    ratio = known(t["mfu"] / t["tokens_per_sec"])
    if not len(ratio):
        return ax.set_title("MFU n/a", loc="right", fontsize=8, pad=3)
    right = ax.twinx()
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.set_ylabel("MFU (% of peak)")
    right.set_ylim(0, 100 * ratio[0] * ax.get_ylim()[1])
    if ratio.max() > 1.02 * ratio.min():
        curve(right, t["step"], 100 * t["mfu"], color=VERMILION, lw=1, ls="--", label="MFU")
        scale(right, 100 * t["mfu"])
        legend(right)
        legend(ax, loc="lower left", bbox_to_anchor=(0, 1))


def picture(run):
    """report.png as a matplotlib Figure."""
    t, lanes, clip = run.train, event_steps(run), run.info["config"].get("grad_clip")
    new = new_fields(run)[:20]
    lanes_high = 0.17 * max(1, len(lanes))
    rows = 2 + (1 + len(new)) // 2
    fig = new_figure(9, 4 + 2 * rows + lanes_high)
    grid = fig.add_gridspec(2 + rows, 2, height_ratios=[3.1, lanes_high] + [2] * rows)
    loss = fig.add_subplot(grid[0, :])
    events = fig.add_subplot(grid[1, :], sharex=loss)
    norm, rate, speed, memory, *more = panels = [
        fig.add_subplot(grid[2 + i // 2, i % 2], sharex=loss) for i in range(4 + len(new))
    ]
    draw_loss(loss, run)
    draw_events(events, [loss, *panels], lanes)
    loss.tick_params(labelbottom=False)

    raw_and_smooth(norm, run, "grad_norm", PALE_GREEN, GREEN)
    if clip:
        label = f"clip at {clip:g} ({clipped_share(run)} above)"
        norm.axhline(clip, color=BLACK, lw=1.2, ls="--", label=label)
    scale(norm, np.append(t["grad_norm"], clip or math.nan), log_from=10)
    norm.set_ylabel("gradient norm, unclipped")
    legend(norm)
    curve(rate, t["step"], t["lr"], color=PURPLE, lw=1.6)
    scale(rate, t["lr"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate.set_ylabel("learning rate (per step)")
    draw_speed(speed, t)
    curve(memory, t["step"], t["mem_gb"], color=ORANGE, lw=1.8)
    scale(memory, t["mem_gb"])
    memory.set_ylabel("peak memory (GB)")
    for ax, (name, step, values) in zip(more, new, strict=True):
        curve(ax, step, values, color=BLUE, lw=1.2)
        ax.set_ylabel(name if len(name) <= 24 else name[:22] + "...")
        ax.yaxis.set_major_formatter(short)

    loss.set_xlim(-0.01 * max(1, last_step(run)), 1.01 * max(1, last_step(run)))
    for ax in [events, *panels]:
        ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(short)
        ax.xaxis.get_major_locator().set_params(integer=True)
    config, identity = run.info["config"], run.info["run"]
    facts = [run.info["data"].get("name"), identity.get("device"), identity.get("dtype")]
    if "n_layer" in config:
        facts.insert(1, f"{config['n_layer']} x {config['n_embd']} wide")
    heading = textwrap.shorten(f"{run.name}: {ended(run)}", 110, placeholder=" ...")
    heading += "\n" + ", ".join(str(fact) for fact in facts if fact)
    fig.suptitle(heading.strip(), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def late_losses(run):
    """Training (smoothed) and validation losses after the first tenth of a run, where runs differ."""
    t, e, start = run.train, run.evals, last_step(run) / 10
    smoothed = smooth(t["loss"], half_window(run))
    return known(smoothed[t["step"] > start]), known(e["val_loss"][e["step"] > start])


def compare_picture(runs, names):
    """compare.png as a matplotlib Figure: losses by step, tokens and time; the rest by step."""
    fig = new_figure(11, 7 + 0.2 * math.ceil(len(runs) / 3))
    axes = fig.subplots(2, 3, height_ratios=[3, 2])
    (by_step, by_tokens, by_time), (norm, rate, speed) = axes
    colours = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
    longest = max(known(run.train["step_ms"]).sum() for run in runs) / 1000
    units = {"s": 1, "min": 60, "h": 3600}
    unit = [unit for unit, size in units.items() if size == 1 or longest > 3 * size][-1]
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        t, e, half = run.train, run.evals, half_window(run)
        looks = {"color": colours[i % 7], "ls": ("-", "--", ":")[i // 7 % 3]}
        time = np.cumsum(np.nan_to_num(t["step_ms"])) / 1000 / units[unit]
        for ax, x in ((by_step, t["step"]), (by_tokens, t["tokens"]), (by_time, time)):
            curve(ax, x, smooth(t["loss"], half), lw=1, alpha=0.55, **looks)
            dots(ax, np.interp(e["step"], [0, *t["step"]], [0, *x]), e["val_loss"], looks["color"])
        curve(norm, t["step"], smooth(t["grad_norm"], half), lw=1.2, **looks)
        curve(rate, t["step"], t["lr"], lw=1.2, **looks)
        curve(speed, t["step"], t["tokens_per_sec"], lw=1.2, **looks)
        norm.plot([], [], lw=2.5, label=f"{name}: best {number(best_of(run)[0])}", **looks)
    every = {key: np.concatenate([run.train[key] for run in runs]) for key in FIELDS["train"]}
    for ax in (by_tokens, by_time):
        ax.sharey(by_step)
        ax.tick_params(labelleft=False)
    heading = "Thick lines with dots: validation loss. Thin lines: training loss, smoothed."
    if len(known(every["loss"])) and np.nanmax(every["loss"]) > 30 * np.nanmin(every["loss"]):
        scale(by_step, every["loss"], log_from=30)
    elif late := [part for run in runs for part in late_losses(run) if len(part)]:
        low, high = min(part.min() for part in late), max(part.max() for part in late)
        by_step.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
        heading += " What is higher than after a tenth of a run is cut off."
    scale(norm, every["grad_norm"], log_from=30)
    scale(rate, every["lr"])
    scale(speed, every["tokens_per_sec"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    speed.yaxis.set_major_formatter(short)
    for ax in axes.flat:
        ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(short)
    by_tokens.set_xlabel("tokens learned from")
    by_time.set_xlabel(f"training time ({unit})")
    by_step.set_ylabel("loss (nats)")
    norm.set_ylabel("gradient norm, smoothed")
    rate.set_ylabel("learning rate (per step)")
    speed.set_ylabel("throughput (tokens/s)")
    fig.suptitle(heading, x=0.01, ha="left", fontsize=10)
    fig.legend(loc="outside lower left", ncols=3)
    return fig


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def changed_knobs(run):
    """[(knob, value in this run, default in train.py)] where these differ; folders left out."""
    knobs, config, rows = read_knobs(REPO / "train.py"), run.info["config"], []
    for name, value in config.items():
        default = knobs[name][0] if name in knobs else "no such knob now"
        as_default = name == "decay_steps" and value == config.get("max_steps")
        if value != default and not name.endswith("_dir") and not as_default:
            rows.append((f"`{name}`", f"`{value}`", f"`{default}`"))
    return rows


def about(run):
    """What was run, in Markdown."""
    info, identity, git = run.info, run.info["run"], run.info["git"]
    hardware, versions, data = info["hardware"], info["versions"], info["data"]
    meta = data.get("meta") or {}
    facts = ("source", "tokenizer", "vocab_size")
    text = "".join(f"; {key} {meta[key]}" for key in facts if key in meta)
    commit = f"`{git['commit'][:12]}`" if git.get("commit") else "unknown"
    if git.get("dirty"):
        commit += f" with changes not committed (diff `{str(git.get('diff_sha256'))[:12]}`)"
    split = " x ".join(str(identity.get(k)) for k in ("batch_size", "accum_steps", "world_size"))
    changed = ", ".join(changed_files(identity.get("code") or {}))
    knobs = changed_knobs(run)
    return f"""\
- **command** `{shlex.join(["python", *map(str, info.get("command", []))])}`
- **commit** {commit}
- **data** {data.get("name")}{text}; fingerprint `{data.get("fingerprint")}`
- **hardware** {hardware.get("world_size")} x {hardware.get("device")}; CPU {hardware.get("cpu")}, \
{hardware.get("threads")} threads
- **computed in** {identity.get("dtype")}; compiled: {identity.get("compile")}; deterministic: \
{identity.get("deterministic")}
- **versions** Python {versions.get("python")}, torch {versions.get("torch")}, CUDA {versions.get("cuda")}
- **a step** {split} = {identity.get("global_batch")} sequences of {identity.get("block_size")} tokens
- **when** {info.get("start")} to {info.get("end")}

{f"Changed since: {changed}. The defaults are those of today." if changed else ""}

{table(("knob", "here", "default"), knobs) if knobs else "Every knob is at its default."}"""


def changed_files(code):
    """Names of the files whose SHA-256 is not as in `code`, {name: SHA-256}: changed or gone since."""
    now = {n: (REPO / n).read_bytes() if (REPO / n).is_file() else b"" for n in code}
    return [name for name, then in code.items() if sha256(now[name]).hexdigest() != then]


def event_rows(run, most=200):
    """[(step, event, details)] in the order in which it happened; skips in a row are one."""
    rows, before, skips = [], None, 0  # before: the step of the skip just seen
    for event in run.events:
        rest = {k: v for k, v in event.items() if k not in ("kind", "step", "event", "finite")}
        name, step = event["event"].replace("_", " "), event["step"]
        skips = (skips if before == step - 1 else 0) + 1 if name == "skipped" else 0
        before = step if skips else None
        if skips > 1:
            rows[-1] = (rows[-1][0], name, f"{skips} updates in a row, to step {step:,}")
        elif name == "end":
            rows.append((f"{step:,}", name, rest.get("ended")))
        elif name != "sample":
            details = "; ".join(f"{key} {value}" for key, value in rest.items())
            rows.append((f"{step:,}", name, textwrap.shorten(details, 400)))
    left = len(rows) - most
    return rows[:most] + ([("...", f"and {left:,} more", "")] if left > 0 else [])


def not_exact(run):
    """What sets this run apart from an undisturbed one on one machine: a list of lines."""
    lines = []
    for event in happened(run, "inexact_resume"):
        for key, value in event.items():
            if isinstance(value, list) and len(value) == 2:
                then, now = value
                if isinstance(then, dict) and isinstance(now, dict):  # hashes of files
                    then, now = "other", ", ".join(k for k in now if now[k] != then.get(k))
                lines.append(f"- resumed at step {event['step']:,}: {key} was {then}, is {now}")
    for event in happened(run, "audit"):
        names = textwrap.shorten(", ".join(event.get("tensors") or []), 300)
        odd = f"the {event.get('odd')} result had {event.get('bits')} other bits in {names}"
        lines.append(f"- step {event['step']:,} was computed twice: {odd}; it was dropped")
    if run.info["run"].get("deterministic") is False:
        lines.append("- `deterministic` was off: the same command may give other bits")
    if run.unreadable:
        lines.append(f"- {run.unreadable:,} damaged line(s) of metrics.jsonl are left out here")
    if not run.info["run"]:
        lines.append("- run.json is missing or damaged: what was run is not on record")
    return lines or ["Nothing on record: every resume, if any, was bit for bit."]


def words(run, image):
    """report.md. image: is there a report.png?"""
    (spent, missing), samples = seconds_by_kind(run), happened(run, "sample")
    asked, learned = run.info["config"].get("dataset"), run.info["data"].get("name")
    total, out = sum(spent.values()) or 1, [f"# {run.name}: {ended(run)}\n"]
    if learned and asked != learned:
        out += [f"> **This run learned {learned!r} INSTEAD OF {asked!r}, which could not be had:"]
        out += [f"> its numbers say nothing about {asked!r}.**\n"]
    out += ["![Curves of this run](report.png)\n"] if image else []
    out += ["## Result\n", table(("", ""), [(f"**{k}**", v) for k, v in outcome(run).items()])]
    out += ["## Known troubles\n"]
    for name, shows in troubles(run).items():
        out += [f"- **{name}**: {shows}. Likely cause: {TROUBLES[name]}."]
    out += [""] if troubles(run) else ["The curves show none of those that report.py knows.\n"]
    out += ["## What was run\n", about(run) if run.info["run"] else "Not on record.\n"]
    out += ["## Where the time went\n"]
    rows = [(kind, duration(each), f"{each / total:.1%}") for kind, each in spent.items()]
    out += [table(("kind", "wall-clock", "share"), rows)] if rows else []
    if missing:
        trained = duration(known(run.train["step_ms"]).sum() / 1000)
        out += [f"{missing} session(s) left no account (killed, or running still). All the steps"]
        out += [f"in metrics.jsonl together took {trained}.\n"]
    out += ["## What happened\n", table(("step", "event", ""), event_rows(run))]
    out += ["## What was not exact\n", *not_exact(run), ""]
    if samples:
        text = str(samples[-1].get("text"))
        fence = max(re.findall("~+", text), key=len, default="") + "~~~"
        out += [f"## A sample, from step {samples[-1]['step']:,}\n", fence, text, fence, ""]
    return "\n".join(out)


def compare_words(runs, names, image):
    """compare.md: one table of what differs, in what was run and in what came of it."""
    rows = {
        "data": [run.info["data"].get("fingerprint") for run in runs],
        "device": [run.info["run"].get("device") for run in runs],
        "commit": [str(run.info["git"].get("commit"))[:12] for run in runs],
    }
    out = ["# " + ", ".join(names) + "\n"]
    if len(set(rows["data"])) > 1:
        out += ["> **These runs learned different texts: their losses cannot be compared.**\n"]
    if len(set(rows["device"])) > 1:
        out += ["> These runs ran on different devices: mind that where times are compared.\n"]
    out += ["![Curves of these runs](compare.png)\n"] if image else []
    for knob in dict.fromkeys(knob for run in runs for knob in run.info["config"]):
        if not knob.endswith("_dir"):
            rows[f"`{knob}`"] = [run.info["config"].get(knob, "n/a") for run in runs]
    outcomes = [outcome(run) for run in runs]
    for what in dict.fromkeys(what for each in outcomes for what in each):
        rows[f"**{what}**"] = [each.get(what, "n/a") for each in outcomes]
    rows = [(what, *each) for what, each in rows.items() if len(set(map(str, each))) > 1]
    return "\n".join([*out, table(("", *names), rows)])


def save(path, content):
    with replacing(path) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def draw(path, picture, *args):
    """Write a picture. Returns [path], or [] and a line on stderr where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("report: no picture; type: pip install matplotlib", file=sys.stderr)
        return []
    with matplotlib.rc_context(dict(pair.split("=") for pair in STYLE.split())):
        content = io.BytesIO()
        picture(*args).savefig(content, format="png")
    return [save(path, content.getvalue())]


def report_on(runs, folder):
    """Write the report of one run, or the comparison of several. Returns the paths."""
    with np.errstate(divide="ignore", invalid="ignore"):  # what is unknown is NaN, and so "n/a"
        if len(runs) == 1:
            image = draw(folder / "report.png", picture, runs[0])
            return [*image, save(folder / "report.md", words(runs[0], image))]
        names = [run.name for run in runs]
        names = names if len(set(names)) == len(names) else [str(run.folder) for run in runs]
        image = draw(folder / "compare.png", compare_picture, runs, names)
        return [*image, save(folder / "compare.md", compare_words(runs, names, image))]


def write_report(folder):
    """For train.py: report.png and report.md of the run in `folder`. Returns their paths.

    Never raises: of a report that fails there is a line on stderr, and an empty list.
    """
    try:
        return report_on([read_run(folder)], Path(folder))
    except Exception as error:
        print(f"report: not written ({type(error).__name__}: {error})", file=sys.stderr)
        return []


def main(argv=None):
    folders = []
    with configured(globals(), argv=argv, names=folders):
        if not folders:
            fail("no run is named; type: python report.py out/NAME [out/OTHER ...]")
        try:
            runs = [read_run(folder) for folder in folders]
            to = Path(report_dir or folders[0])
            to.mkdir(parents=True, exist_ok=True)
            paths = report_on(runs, to)
        except ValueError as error:
            fail(error)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}; --report_dir=FOLDER writes elsewhere")
    for run in runs:
        print(f"{run.name}: {ended(run)}; best validation loss {number(best_of(run)[0])}")
        for name, shows in troubles(run).items():
            print(f"  {name}: {shows}")
    print("wrote " + ", ".join(map(os.path.relpath, paths)))


if __name__ == "__main__":
    main()

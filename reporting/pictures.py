"""The pictures of runs: report.png and compare.png."""

import ast
import math
import shlex
import sys
import textwrap
from hashlib import sha256
from pathlib import Path

import numpy as np

from reporting import curves
from reporting.curves import COLOURS
from reporting.record import last_step
from reporting.results import best_in_words, ended, unit

STYLE = Path(__file__).with_name("picture.mplstyle")
LOOKS = {
    "thin": {"lw": 0.8, "alpha": 0.6},
    "bold": {"lw": 1.7},
    "dots": {"lw": 1.6, "markersize": 5.5, "markeredgecolor": "white", "zorder": 4},
    "best": {"ls": "", "markersize": 13, "markeredgecolor": "white", "clip_on": False, "zorder": 5},
    "dashed": {"lw": 1.2, "ls": "--"},
}


def draw(ax, curve, **looks):
    """looks: other than those of LOOKS."""
    marker = ""
    if curve.look == "best":
        marker = "*"
    elif curves.is_dotted(curve):
        marker = "o"
    own = {"color": COLOURS[curve.colour], "label": curve.label, "markersize": 3.5, "ls": "-"}
    x, y = curves.thin(curve.x, curve.y)
    ax.plot(x, y, marker=marker, **own | LOOKS[curve.look] | looks)


def scale(ax, field, drawn):
    """The vertical axis of some curves. If the loss begins above it, the axis says so."""
    low, high, is_log = curves.limits(field, drawn)
    if is_log:
        from matplotlib.ticker import LogLocator, NullLocator

        fine = high < 200 * low
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if fine else (1,)))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(curves.short)
    ax.set_ylim(low, high)
    first = max((curve.y[0] for curve in drawn), default=low)
    if first > high:
        words = f"the beginning, at {first:.4g}, is above"
        ax.annotate(words, (0.995, 0.94), xycoords="axes fraction", ha="right", fontsize=8)


def label_axes(ax, title):
    ax.set_ylabel(title if len(title) <= 24 else title[:22] + "...")
    ax.set_xlabel("step")
    ax.xaxis.set_major_formatter(curves.short)
    ax.xaxis.get_major_locator().set_params(integer=True)


def draw_panel(ax, panel, events):
    is_loss = panel.field == "loss"
    for curve in panel.curves:
        draw(ax, curve)
    for name, steps in events.items():
        looks = {"color": COLOURS[curves.EVENTS[name]], "lw": 0.9, "ls": (0, (4, 3)), "zorder": 1}
        if is_loss:
            looks["label"] = name.replace("_", " ")
        ax.vlines(steps, 0, curves.event_height(steps), transform=ax.get_xaxis_transform(), **looks)
    scale(ax, panel.field, panel.curves)
    label_axes(ax, panel.title)
    if len(panel.curves) > 1 or is_loss:  # above the panel, where it hides nothing
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, borderaxespad=0.2)


def heading(run):
    """Two lines above the picture: the run and how it ended; its data, device and size."""
    config = run.info["config"]
    identity = run.info["run"]
    facts = [run.info["data"].get("name"), identity.get("device"), identity.get("dtype")]
    if "n_layer" in config:
        facts.append(f"{config['n_layer']} x {config.get('n_embd')} wide")
    told = ", ".join(str(fact) for fact in facts if fact)
    lines = [f"{run.name}: {ended(run)}", told]
    return "\n".join(textwrap.shorten(line, 110, placeholder=" ...") for line in lines).strip()


def picture(run):
    """report.png as a matplotlib Figure."""
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display

    events = curves.events_of(run)
    loss_panel, *panels = curves.panels_of(run)
    rows = math.ceil(len(panels) / 2)  # below the loss
    fig = Figure((9, 4 + 2 * rows))
    grid = fig.add_gridspec(1 + rows, 2, height_ratios=[3.3] + [2] * rows)
    loss = fig.add_subplot(grid[0, :])
    draw_panel(loss, loss_panel, events)
    for i, panel in enumerate(panels):
        ax = fig.add_subplot(grid[1 + i // 2, i % 2], sharex=loss)
        draw_panel(ax, panel, events)
    end = max(1, last_step(run))
    loss.set_xlim(-0.01 * end, 1.01 * end)
    fig.suptitle(heading(run), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def looks_of(i):
    """Of the curves of the i-th of several runs."""
    styles = ("-", "--", ":")
    colours = list(COLOURS.values())
    return {"color": colours[i % 7], "ls": styles[i // 7 % 3]}


def compare_picture(runs, names):
    """compare.png as a matplotlib Figure: losses by step, tokens and time; then rate and
    throughput."""
    from matplotlib.figure import Figure

    fig = Figure((11, 7 + 0.2 * math.ceil(len(runs) / 3)))
    grid = fig.add_gridspec(2, 6, height_ratios=[3, 2])
    by_step = fig.add_subplot(grid[0, 0:2])
    by_tokens = fig.add_subplot(grid[0, 2:4], sharey=by_step)
    by_time = fig.add_subplot(grid[0, 4:6], sharey=by_step)
    below = {
        "lr": fig.add_subplot(grid[1, 0:3]),
        "tokens_per_sec": fig.add_subplot(grid[1, 3:6]),
    }
    losses = []
    others = {field: [] for field in below}
    for i, run in enumerate(runs):
        step = run.train["step"]
        minutes = np.cumsum(np.nan_to_num(run.train["step_ms"])) / 60_000
        axes = {by_step: step, by_tokens: run.train["tokens"], by_time: minutes}
        panels = {panel.field: panel for panel in curves.panels_of(run)}
        for curve in curves.of_several(panels["loss"]):
            losses.append(curve)
            for ax, x in axes.items():
                places = np.interp(curve.x, [0, *step], [0, *x])
                draw(ax, curve._replace(x=places, label=None), **looks_of(i))
        for field, ax in below.items():
            for curve in curves.of_several(panels[field]) if field in panels else ():
                others[field].append(curve)
                draw(ax, curve._replace(label=None), **looks_of(i))
        label = f"{names[i]}: {best_in_words(run)}"
        by_step.plot([], [], lw=2.5, label=label, **looks_of(i))
    scale(by_step, "loss", losses)
    label_axes(by_step, "loss (nats)" if unit(*runs) == "tokens" else "loss")
    for field, ax in below.items():
        scale(ax, field, others[field])
        label_axes(ax, curves.title_of(curves.FIELDS[field], runs[0]))
    by_tokens.set_xlabel(f"{unit(*runs)} trained on")
    by_tokens.xaxis.set_major_formatter(curves.short)
    by_time.set_xlabel("training time (minutes)")
    by_time.xaxis.set_major_formatter(curves.short)
    fig.suptitle("Thick: validation. Thin: training, smoothed.", x=0.01, ha="left", fontsize=10)
    fig.legend(loc="outside lower left", ncols=3)
    return fig


def origin():
    """{key: words} for the text of a PNG: the command that drew it, and a hash of the code that
    did, of this file and curves.py without comments."""
    trees = [ast.dump(ast.parse(Path(file).read_bytes())) for file in (__file__, curves.__file__)]
    code = sha256("".join(trees).encode()).hexdigest()[:16]
    version = sys.version[:4]  # a tree is that of its Python
    return {
        "Command": shlex.join(["python", *sys.argv]),
        "Code": f"{code}, Python {version}",
    }

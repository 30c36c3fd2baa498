"""What is drawn of runs: a list of panels, drawn into a picture here and by page.html."""

import json
import shlex
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from plumbing.console import FIELDS
from reporting import results
from reporting.record import half_window, last_step, smooth
from reporting.results import happened

STYLE = Path(__file__).with_name("picture.mplstyle")
TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
# Okabe & Ito's colours (2008): distinct for any colour vision, and in print
COLOURS = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "black": "#000000",
}
EVENTS = {
    "resume": "blue",
    "skipped": "orange",
    "rollback": "purple",
    "diverging": "green",
    "audit": "vermilion",
    "out_of_memory": "sky",
}
LOOKS = {  # of a line in matplotlib
    "thin": {"lw": 0.8, "alpha": 0.6},
    "bold": {"lw": 1.7},
    "dots": {"lw": 1.6, "markersize": 5.5, "markeredgecolor": "white", "zorder": 4},
    "best": {
        "ls": "",
        "marker": "*",
        "markersize": 13,
        "markeredgecolor": "white",
        "clip_on": False,
        "zorder": 5,
    },
    "dashed": {"lw": 1.2, "ls": "--"},
    "event": {"lw": 0.9, "ls": (0, (4, 3)), "zorder": 1},
}
MOST_POINTS = 2000  # of a curve; a longer one is thinned


@dataclass
class Curve:
    """Numbers joined by a line, but for an event: vertical lines at x, of height y (1 = that of the
    panel). Numbers that are not finite are left out. Of a long curve two points of each stretch
    stay, the lowest and the highest: no peak is lost."""

    key: str  # a button of the page hides all curves with this key
    label: str
    colour: str  # a key of COLOURS
    look: str  # a key of LOOKS
    x: np.ndarray
    y: np.ndarray
    is_dotted: bool = False  # it has few points, and a single one would be invisible as a line

    def __post_init__(self):
        finite = np.isfinite(self.y)
        self.x = self.x[finite]
        self.y = self.y[finite]
        if len(self.x) > MOST_POINTS:
            first = np.linspace(0, len(self.x), MOST_POINTS // 2, endpoint=False).astype(int)
            both = [np.minimum.reduceat(self.y, first), np.maximum.reduceat(self.y, first)]
            self.x = np.repeat(self.x[first], 2)
            self.y = np.stack(both, axis=1).ravel()
        most = {"dashed": 0, "event": 0, "dots": 60}.get(self.look, 15)
        self.is_dotted = len(self.x) <= most


@dataclass
class Panel:
    """A pair of axes."""

    field: str
    title: str
    curves: list
    along: str = "step"  # the title of the horizontal axis

    def lines(self):
        """The curves, without events."""
        return [curve for curve in self.curves if curve.look != "event"]

    def limits(self):
        """{"low", "high", "is_log"} of the vertical axis. Of the loss, without the first 3% of a
        run and the outermost 0.2% of single steps, which would press the rest flat."""
        values = [np.array([0.0, 1.0])] if not self.lines() else []
        for curve in self.lines():
            y = curve.y
            if self.field == "loss":
                y = y[curve.x >= 0.03 * curve.x[-1]]  # the mean of steps reaches back by 1%
            if self.field == "loss" and curve.look == "thin":
                y = np.quantile(y, (0.001, 0.999))
            values.append(y)
        low = float(min(y.min() for y in values))
        high = float(max(y.max() for y in values))
        if self.field in ("loss", "grad_norm") and 0 < 30 * low < high:
            return {"low": low / 1.2, "high": high * 1.2, "is_log": True}
        if self.field != "loss":
            low = min(low, 0.0)
        pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return {"low": low - pad if low else low, "high": high + pad, "is_log": False}


# ---- the list of panels --------------------------------------------------------------------------


def panels_of(runs):
    """The Panels of one run, or those of several with the curves of all; the loss is first."""
    if len(runs) == 1:
        return panels_of_one(runs[0])
    panels = {}
    for i, run in enumerate(runs):
        key = f"{run.name}: {results.best_in_words(run)}"
        colour = list(COLOURS)[i % len(COLOURS)]
        loss, *others = panels_of_one(run)
        for panel in [*along_three_axes(loss, run), *others]:
            shared = panels.setdefault((panel.field, panel.along), replace(panel, curves=[]))
            for curve in panel.curves:
                if curve.look in ("bold", "dots"):
                    is_thin = panel.field == "loss" and curve.look == "bold"
                    look = "thin" if is_thin else curve.look
                    label = f"{run.name}: {curve.label}"
                    own = replace(curve, key=key, label=label, colour=colour, look=look)
                    shared.curves.append(own)
    return list(panels.values())


def panels_of_one(run):
    """The loss, and the fields that have numbers, with the events of the run."""
    steps = run.train["step"]
    panels = [Panel("loss", title_of("loss", run), curves_of_loss(run))]
    for name, field in FIELDS.items():
        if field.kind != "train" or not field.plot or name == "loss":
            continue
        values = run.train[name] * field.plot_factor
        if name == "grad_norm":
            curves = [*raw_and_mean(run, name, ""), *curves_of_clip(run)]
        else:
            curves = [Curve("training", field.plot, "blue", "bold", steps, values)]
        panels.append(Panel(name, title_of(name, run), curves))
    for name, x, y in results.new_fields(run):
        panels.append(Panel(name, name, [Curve("training", name, "blue", "bold", x, y)]))
    events = events_of(run)
    found = []
    for panel in panels:
        curves = [curve for curve in panel.curves if len(curve.x)]
        if curves or panel.field == "loss":
            found.append(replace(panel, curves=curves + events))
        events = [replace(event, label="") for event in events]  # the first panel names them
    return found


def title_of(name, run):
    """Of the panel of a field."""
    field = FIELDS[name]
    per = results.unit_of(run)
    unit = field.unit.replace("tokens", per)
    if unit == "nats" and per != "tokens":
        unit = ""
    return f"{field.plot} ({unit})" if unit else field.plot


def curves_of_loss(run):
    """The evaluation of untrained weights is left out: a line from it to the next one would tell of
    losses that nobody has measured."""
    steps = run.evals["step"]
    losses = run.evals["val_loss"]
    part = results.extent(run)
    label = f"validation, {part}" if part else "validation"
    drawn = (steps > 0) | (len(steps) == 1)
    is_best = drawn & (steps == results.best_of(run)[1])
    best = results.best_in_words(run)
    return [
        *raw_and_mean(run, "loss", "training, "),
        Curve("validation", label, "vermilion", "dots", steps[drawn], losses[drawn]),
        Curve("validation", best, "vermilion", "best", steps[is_best], losses[is_best]),
    ]


def raw_and_mean(run, field, before):
    """The curves of a noisy field."""
    steps = run.train["step"]
    values = run.train[field]
    half = half_window(run)
    mean = f"{before}mean of {2 * half + 1:,}"
    return [
        Curve("each step", f"{before}each step", "sky", "thin", steps, values),
        Curve("training", mean, "blue", "bold", steps, smooth(values, half)),
    ]


def curves_of_clip(run):
    clip = run.fact("config", "grad_clip")
    if not clip > 0:
        return []
    ends = np.array([0.0, last_step(run)])
    return [Curve("clip", f"clip at {clip:g}", "black", "dashed", ends, np.full(2, clip))]


def along_three_axes(loss, run):
    """The Panel of the loss by step, by tokens and by time."""
    steps = run.train["step"]
    minutes = np.cumsum(np.nan_to_num(run.train["step_ms"])) / 60_000
    tokens = f"{results.unit_of(run)} trained on"
    panels = [loss]
    for along, values in ((tokens, run.train["tokens"]), ("training time (minutes)", minutes)):
        panel = replace(loss, along=along, curves=[])
        for curve in loss.curves:
            x = np.interp(curve.x, [0, *steps], [0, *values])
            panel.curves.append(replace(curve, x=x))
        panels.append(panel)
    return panels


def events_of(run):
    """The Curves of the EVENTS that a run had. Few events cross a panel; many are marks at its
    bottom."""
    curves = []
    for name, colour in EVENTS.items():
        steps = np.array([row["step"] for row in happened(run, name)])
        if len(steps):
            words = name.replace("_", " ")
            heights = np.full(len(steps), 1.0 if len(steps) <= 40 else 0.05)
            curves.append(Curve(words, words, colour, "event", steps, heights))
    return curves


# ---- two drawers ---------------------------------------------------------------------------------


def write_picture(path, runs):
    """Draw report.png or compare.png; its text holds the command."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE):
        command = shlex.join(["python", *sys.argv])
        picture(runs).savefig(path, format="png", metadata={"Command": command})


def picture(runs):
    """A matplotlib Figure: the loss in a row of its own, the other panels below in two columns."""
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display
    from matplotlib.lines import Line2D

    panels = panels_of(runs)
    count = sum(panel.field == "loss" for panel in panels)
    rows = [[i for i in range(count) for _ in range(6 // count)]]
    for i in range(count, len(panels), 2):
        right = i + 1 if i + 1 < len(panels) else "."
        rows.append([i] * 3 + [right] * 3)
    fig = Figure((9 if len(runs) == 1 else 11, 2 + 2 * len(rows)))
    axes = fig.subplot_mosaic(rows, height_ratios=[3.3] + [2] * (len(rows) - 1))
    for i, panel in enumerate(panels):
        draw_panel(axes[i], panel)
        if len(runs) == 1 and len(axes[i].get_legend_handles_labels()[1]) > 1:
            # above the panel, where it hides nothing
            axes[i].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, borderaxespad=0.2)
    if len(runs) > 1:
        colours = {curve.key: COLOURS[curve.colour] for curve in panels[0].curves}
        lines = [Line2D([], [], lw=2.5, color=colour) for colour in colours.values()]
        fig.legend(lines, colours.keys(), loc="outside lower left", ncols=3)
    fig.suptitle(heading(runs), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def heading(runs):
    """Above the panels. Of one run how it ended, and its data, device and precision."""
    if len(runs) > 1:
        return "Thick: validation. Thin: training, smoothed."
    (run,) = runs
    identity = run.info["run"]
    facts = [run.info["data"].get("name"), identity.get("device"), identity.get("dtype")]
    words = ", ".join(str(fact) for fact in facts if fact)
    return textwrap.shorten(f"{run.name}: {results.ended(run)}", 110) + "\n" + words


def draw_panel(ax, panel):
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    for curve in panel.curves:
        draw_curve(ax, curve)
    last = max([curve.x[-1] for curve in panel.lines()], default=0) or 1
    low, high, is_log = panel.limits().values()
    if is_log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xlim(-0.01 * last, 1.01 * last)
    ax.set_ylim(low, high)
    for axis, largest in ((ax.xaxis, last), (ax.yaxis, high)):
        axis.set_major_formatter(EngFormatter(sep="") if largest >= 1e4 else "{x:g}")
    ax.set_ylabel(textwrap.shorten(panel.title, 24))
    ax.set_xlabel(panel.along)


def draw_curve(ax, curve):
    looks = {"color": COLOURS[curve.colour], "label": curve.label, **LOOKS[curve.look]}
    if curve.look == "event":
        ax.vlines(curve.x, 0, curve.y, transform=ax.get_xaxis_transform(), **looks)
        return
    marker = "o" if curve.is_dotted else ""
    ax.plot(curve.x, curve.y, **{"marker": marker, "markersize": 3.5} | looks)


def page(runs, text, refresh=0):
    """report.html, a str: one file that needs no network and no server. text: Markdown, for below
    the curves. refresh: seconds until an open page reloads; 0 = never."""
    panels = [asdict(panel) | panel.limits() for panel in panels_of(runs)]
    data = json.dumps({"refresh": refresh, "panels": panels}, default=np.ndarray.tolist)
    return TEMPLATE.substitute(
        TITLE=escape(", ".join(run.name for run in runs)),
        HEADING=escape(heading(runs)),
        DATA=data.replace("<", "\\u003c"),  # ends no <script>
        TEXT=escape(text),
    )

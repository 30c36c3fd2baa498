"""What is drawn of runs: a list of panels, drawn into a picture here and by page.html."""

import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from plumbing.fields import FIELDS, Field
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
    "mean": {"lw": 1.7},
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
COMPARED = {"mean": "thin", "bold": "bold", "dots": "dots"}  # looks in a comparison
MAX_POINTS = 2000  # of a curve; a longer one is thinned


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
        if len(self.x) > MAX_POINTS:
            first = np.linspace(0, len(self.x), MAX_POINTS // 2, endpoint=False).astype(int)
            both = [np.minimum.reduceat(self.y, first), np.maximum.reduceat(self.y, first)]
            self.x = np.repeat(self.x[first], 2)
            self.y = np.stack(both, axis=1).ravel()
        self.is_dotted = self.look != "dashed" and len(self.x) <= 40


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
        """{"low", "high", "is_log"} of the vertical axis. Of the loss, without the first 3% and the
        outermost 0.2% of a curve, which would press the rest flat."""
        ends = []
        for curve in self.lines():
            y = curve.y
            if self.field == "loss":
                settled = y[curve.x >= 0.03 * curve.x[-1]]  # the mean of steps reaches back by 1%
                y = np.quantile(settled, (0.001, 0.999))
            ends += [float(y.min()), float(y.max())]
        low = min(ends, default=0.0)
        high = max(ends, default=1.0)
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
                look = COMPARED.get(curve.look)
                label = f"{run.name}: {curve.label}"
                own = replace(curve, key=key, label=label, colour=colour, look=look)
                if look:
                    shared.curves.append(own)
    return list(panels.values())


def panels_of_one(run):
    """The loss, and the fields that have numbers, with the events of the run."""
    numbers = [
        (name, run.train["step"], run.train[name])
        for name, field in FIELDS.items()
        if field.kind == "train" and field.plot
    ]
    events = events_of(run)
    panels = []
    for name, steps, values in [*numbers, *results.new_fields(run)]:
        field = FIELDS.get(name) or Field(name, "train", plot=name)
        if name == "loss":
            curves = curves_of_loss(run)
        elif name == "grad_norm":
            curves = curves_of_norm(run)
        else:
            scaled = values * field.plot_factor
            curves = [Curve("training", field.plot, "blue", "bold", steps, scaled)]
        curves = [curve for curve in curves if len(curve.x)]
        if curves or name == "loss":
            panels.append(Panel(name, title_of(field, run), curves + events))
    return panels


def title_of(field, run):
    unit = field.unit
    if results.unit_of(run) == "targets":  # the loss is in who knows what
        unit = unit.replace("tokens", "targets").replace("nats", "")
    return f"{field.plot} ({unit})" if unit else field.plot


def curves_of_loss(run):
    """The evaluation of untrained weights is left out: a line from it to the next one would tell of
    losses that nobody has measured."""
    steps = run.evals["step"]
    losses = run.evals["val_loss"]
    drawn = steps > 0
    is_best = drawn & (steps == results.best_of(run)[1])
    best = results.best_in_words(run)
    return [
        *raw_and_mean(run, "loss"),
        Curve("validation", "validation", "vermilion", "dots", steps[drawn], losses[drawn]),
        Curve(best, best, "vermilion", "best", steps[is_best], losses[is_best]),
    ]


def curves_of_norm(run):
    clip = run.fact("config", "grad_clip") or math.nan  # 0 = off
    ends = np.array([0.0, last_step(run)])
    words = f"clip at {clip:g}"
    clips = Curve(words, words, "black", "dashed", ends, np.full(2, clip))
    return [*raw_and_mean(run, "grad_norm"), clips]


def raw_and_mean(run, field):
    """The curves of a noisy field."""
    steps = run.train["step"]
    values = run.train[field]
    half = half_window(run)
    mean = f"training, mean of {2 * half + 1:,}"
    return [
        Curve("each step", "training, each step", "sky", "thin", steps, values),
        Curve("training", mean, "blue", "mean", steps, smooth(values, half)),
    ]


def along_three_axes(loss, run):
    """The Panel of the loss by step, by tokens and by time."""
    steps = run.train["step"]
    milliseconds = np.cumsum(np.nan_to_num(run.train["step_ms"]))
    axes = {
        "step": steps,
        f"{results.unit_of(run)} trained on": run.train["tokens"],
        "training time (minutes)": milliseconds / 60_000,
    }
    panels = []
    for along, values in axes.items():
        curves = []
        for curve in loss.curves:
            x = np.interp(curve.x, [0, *steps], [0, *values])
            curves.append(replace(curve, x=x))
        panels.append(replace(loss, along=along, curves=curves))
    return panels


def events_of(run):
    """The Curves of the EVENTS that a run had. Few events cross a panel; many are marks at its
    bottom."""
    curves = []
    for name, colour in EVENTS.items():
        steps = np.array([row["step"] for row in happened(run, name)])
        heights = np.full(len(steps), 1.0 if len(steps) <= 40 else 0.05)
        words = name.replace("_", " ")
        if len(steps):
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
    """A matplotlib Figure in columns, two or three: the loss above, twice as high; a single panel
    of it is as wide as the figure."""
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display
    from matplotlib.lines import Line2D

    panels = panels_of(runs)
    columns = 2 if len(runs) == 1 else 3
    rows = math.ceil((len(panels) + 3) / columns)
    fig = Figure((10, 0.7 + 1.8 * rows))
    lines = {}  # of the legend
    for i, panel in enumerate(panels):
        place = (i + 1, i + 4) if panel.field == "loss" else i + 4
        draw_panel(fig.add_subplot(rows, columns, place), panel)
        for curve in panel.curves:
            lines[curve.key] = Line2D([], [], color=COLOURS[curve.colour], **LOOKS[curve.look])
    fig.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=3)
    fig.suptitle(heading(runs), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def heading(runs):
    """Above the panels. Of one run how it ended, and its data, device and precision."""
    if len(runs) > 1:
        return "Thick: validation. Thin: training, a mean over 2% of the run."
    (run,) = runs
    identity = run.info["config"] | run.info["run"]
    facts = [run.info["data"].get("name"), identity.get("device"), identity.get("dtype")]
    words = [*filter(None, facts), "training: a mean over 2% of the run"]
    return f"{run.name}: {results.ended(run)}\n{', '.join(words)}"


def draw_panel(ax, panel):
    from matplotlib.ticker import LogLocator

    for curve in panel.curves:
        draw_curve(ax, curve)
    last = max([curve.x[-1] for curve in panel.lines()], default=0) or 1
    low, high, is_log = panel.limits().values()
    if is_log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    ax.set(xlim=(-0.01 * last, 1.01 * last), ylim=(low, high))
    ax.set(xlabel=panel.along, ylabel=panel.title)


def draw_curve(ax, curve):
    looks = {"color": COLOURS[curve.colour], **LOOKS[curve.look]}
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

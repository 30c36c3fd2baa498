"""What is drawn of runs: a list of panels, drawn into a picture here and by page.html."""

import json
import math
import re
import shlex
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from plumbing.fields import FIELDS
from reporting.record import smooth
from reporting.results import (
    best_of,
    edges,
    happened,
    listing,
    metric_of,
    new_fields,
    outcome,
    settings_of,
)

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
    "diverging": "green",
    "audit": "vermilion",
    "out_of_memory": "sky",
}
LOOKS = {  # of a line in matplotlib
    "thin": {"lw": 0.8, "alpha": 0.6},
    "mean": {"lw": 1.0},
    "dots": {"lw": 2.0, "zorder": 4},
    "limit": {"lw": 1.2},
    "best": {
        "ls": "",
        "marker": "*",
        "markersize": 13,
        "markeredgecolor": "white",
        "clip_on": False,
        "zorder": 5,
    },
    "event": {"lw": 0.9, "ls": (0, (4, 3)), "zorder": 1},
}
DASHES = ("-", "--", ":", "-.")  # of the first len(COLOURS) settings, of the next ones, and so on
MAX_POINTS = 2000  # of a curve; a longer one is thinned
MAX_DOTS = 40  # points of a curve that are marked: a single one would be invisible as a line
AXES = {
    "step": "step",
    "tokens": "tokens trained on",
    "time": "training time (minutes)",
}
MAX_PLACES = 500  # steps whose tokens and time are kept; all others lie between them
COLUMNS = 3  # of small panels in a picture


@dataclass
class Curve:
    """Numbers joined by a line, but for an event: vertical lines at x. Numbers that are not finite
    are left out. Of a long curve two points of each stretch stay, the lowest and the highest: no
    peak is lost."""

    key: str  # a button of the page hides all curves with this key
    label: str
    colour: str  # a key of COLOURS
    look: str  # a key of LOOKS
    x: np.ndarray  # steps
    y: np.ndarray
    run: int = 0  # its place among the runs
    dash: int = 0  # of DASHES
    name: str = ""  # of its run, if there are several

    def __post_init__(self):
        finite = np.isfinite(self.y)
        self.x = self.x[finite]
        self.y = self.y[finite]
        if len(self.x) > MAX_POINTS:
            first = np.linspace(0, len(self.x), MAX_POINTS // 2, endpoint=False).astype(int)
            both = [np.minimum.reduceat(self.y, first), np.maximum.reduceat(self.y, first)]
            self.x = np.repeat(self.x[first], 2)
            self.y = np.ravel(both, order="F")


@dataclass
class Panel:
    """A pair of axes."""

    field: str
    title: str
    curves: list

    def limits(self):
        """{"low", "high", "is_log"} of the vertical axis: from the lowest, or 0 for what has no level
        of its own, to the highest that any run has after a tenth of its own steps. What came
        before, and the outermost 2% of single steps, would press the rest flat."""
        seen = []
        for curve in self.curves:
            if curve.look == "event":
                continue
            y = curve.y[curve.x >= 0.1 * curve.x[-1]]
            if curve.key == "each step":
                y = np.quantile(y, (0.01, 0.99))
            seen += y.tolist()
        low = min(seen, default=0.0)
        high = max(seen, default=1.0)
        if self.field in ("loss", "grad_norm") and 0 < 30 * low < high:
            return {"low": low / 1.2, "high": high * 1.2, "is_log": True}
        if not self.field.startswith(("loss", "val_")):
            low = min(low, 0.0)
        pad = 0.05 * (high - low) or 1.0
        return {"low": low - pad if low else low, "high": high + pad, "is_log": False}


# ---- the list of panels --------------------------------------------------------------------------


def panels_of(runs):
    """The Panels of one run, or those of several with the curves of all, best first; the loss is
    the first panel."""
    if len(runs) == 1:
        return panels_of_one(runs[0])
    settings = settings_of(runs)
    panels = {}
    for place, (name, result, *_) in enumerate(listing(settings)):
        dash, colour = divmod(place, len(COLOURS))
        for run in settings[place]:
            own = {
                "key": f"{name}: {result}",
                "colour": list(COLOURS)[colour],
                "dash": dash % len(DASHES),
                "run": runs.index(run),
                "name": run.name,
            }
            for panel in panels_of_one(run):
                shared = panels.setdefault(panel.field, replace(panel, curves=[]))
                for curve in panel.curves:
                    if curve.look in ("mean", "dots"):
                        shared.curves.append(replace(curve, **own))
    return list(panels.values())


def panels_of_one(run):
    """The loss, and the fields that have numbers, with the events of the run."""
    fields = [field for field in FIELDS.values() if field.plot]
    fields += [field for field, _ in new_fields(run)]
    events = events_of(run)
    panels = []
    for field in fields:
        curves = [curve for curve in curves_of(field, run) if len(curve.x)]
        if curves or field.name == "loss":
            panels.append(Panel(field.name, field.plot, curves + events))
    return panels


def curves_of(field, run):
    """The Curves of a field, without events."""
    if field.kind == "eval":
        return [evaluations(run, field)]
    steps = run.train["step"]
    values = run.train[field.name] * field.plot_factor
    mean = f"training, mean of {2 * run.half + 1:,} steps"
    curves = [
        Curve("each step", "training, each step", "sky", "thin", steps, values),
        Curve(mean, mean, "blue", "mean", steps, smooth(values, run.half)),
    ]
    if field.name == "loss":
        scores = evaluations(run, FIELDS["val_loss"])
        best, step = best_of(run)
        is_best = scores.x == step
        words = f"best {metric_of(run)[2]} {best:,.4f}"
        star = Curve(words, words, "vermilion", "best", scores.x[is_best], scores.y[is_best])
        curves += [scores, star]
    clip = run.facts.get("grad_clip")
    if field.name == "grad_norm" and clip:
        limit = np.full(len(steps), clip)
        curves.append(Curve(f"clip at {clip:g}", "clip at", "black", "limit", steps, limit, dash=1))
    return curves


def evaluations(run, field):
    """The evaluation of untrained weights is left out: a line from it to the next one would tell of
    losses that nobody has measured."""
    steps = run.evals["step"]
    values = run.evals[field.name][steps > 0] * field.plot_factor
    return Curve("validation", "validation", "vermilion", "dots", steps[steps > 0], values)


def events_of(run):
    """The Curves of the EVENTS that a run had."""
    curves = []
    for name, colour in EVENTS.items():
        steps = np.array([row["step"] for row in happened(run, name)])
        words = name.replace("_", " ")
        if len(steps):
            curves.append(Curve(words, words, colour, "event", steps, steps))
    return curves


def axis_of(runs):
    """The axis by which runs are compared: a step is not the same where batches differ."""
    is_other = re.search("(batch_size|accum_steps|block_size)=", runs[0].setting)
    return "tokens" if is_other else "step"


def places_of(run):
    """{axis: where some of the run's steps lie on it}, from 0 on."""
    minutes = np.cumsum(np.nan_to_num(run.train["step_ms"])) / 60_000
    some = np.unique(np.linspace(0, len(minutes), MAX_PLACES).astype(int))
    places = {"step": run.train["step"], "tokens": run.train["tokens"], "time": minutes}
    return {axis: np.append(0, values)[some] for axis, values in places.items()}


# ---- two drawers ---------------------------------------------------------------------------------


def write_picture(path, runs, axis):
    """Draw report.png or compare.png; its text holds the command."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE):
        command = shlex.join(["python", *sys.argv])
        picture(runs, axis).savefig(path, format="png", metadata={"Command": command})


def picture(runs, axis="step"):
    """A matplotlib Figure: the loss above, as wide as the figure, and the other panels below it.
    axis: step, tokens or time."""
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display
    from matplotlib.lines import Line2D

    panels = panels_of(runs)
    places = list(map(places_of, runs))
    last = max(place[axis][-1] for place in places) or 1
    rows = 2 + math.ceil((len(panels) - 1) / COLUMNS)
    fig = Figure((10, 0.7 + 1.8 * rows))
    lines = {}  # of the legend
    for i, panel in enumerate(panels):
        ax = fig.add_subplot(rows, COLUMNS, i + 2 * COLUMNS if i else (1, 2 * COLUMNS))
        ax.set(xlabel=AXES[axis], ylabel=panel.title)
        for curve in panel.curves:
            place = places[curve.run]
            x = np.interp(curve.x, place["step"], place[axis])
            looks = {"color": COLOURS[curve.colour], "ls": DASHES[curve.dash], **LOOKS[curve.look]}
            if curve.look == "event":
                for each in x:
                    ax.axvline(each, **looks)
            else:
                marker = "o" if len(x) <= MAX_DOTS else ""
                ax.plot(x, curve.y, **{"marker": marker, "markersize": 3.5} | looks)
            lines[curve.key] = Line2D([], [], **looks)
        draw_axes(ax, panel, last)
    columns = 140 // max(map(len, [*lines, 40 * " "]))
    fig.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=columns)
    words = [title_of(runs), *heading(runs)]
    above = "\n".join(textwrap.fill(line, 125) for line in words)
    fig.suptitle(above, x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def title_of(runs):
    return textwrap.shorten(", ".join(run.name for run in runs), 100, placeholder=" ...")


def heading(runs):
    """Lines above the panels: how a run went, and how good it is; of several, where the best is."""
    if len(runs) == 1:
        facts = [f"{what} {value}" for what, value in outcome(runs[0]).items()]
        return ["; ".join(facts[:6])]
    thin = f"Thick: validation. Thin: training, mean of {2 * runs[0].half + 1:,} steps."
    return [*edges(settings_of(runs)), thin]


def draw_axes(ax, panel, last):
    """last: the right end of the horizontal axis."""
    from matplotlib.ticker import EngFormatter

    low, high, is_log = panel.limits().values()
    if is_log:
        ax.set_yscale("log")
    ax.set(xlim=(-0.01 * last, 1.01 * last), ylim=(low, high))
    for axis, largest in ((ax.xaxis, last), (ax.yaxis, high)):
        axis.set_major_formatter(EngFormatter(sep="") if largest >= 1e4 else "{x:g}")


def page(runs, text, refresh=0, axis="step"):
    """report.html, a str: one file that needs no network and no server. text: Markdown, for below
    the curves. axis: step, tokens or time. refresh: seconds until an open page reloads; 0 = never."""
    panels = [asdict(panel) | panel.limits() for panel in panels_of(runs)]
    data = {"refresh": refresh, "axis": axis, "axes": AXES, "panels": panels}
    data["runs"] = list(map(places_of, runs))
    return TEMPLATE.substitute(
        TITLE=escape(title_of(runs)),
        # "<" ends no <script>
        DATA=json.dumps(data, default=np.ndarray.tolist).replace("<", "\\u003c"),
        TEXT=escape(text),
        MAX_DOTS=MAX_DOTS,
    )

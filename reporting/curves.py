"""What is drawn of a run, step by step: the same curves, limits and events in picture and page."""

import itertools
import math
from collections import namedtuple

import numpy as np

from plumbing.console import FIELDS
from reporting import results
from reporting.record import half_window, last_step, smooth
from reporting.results import happened

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
    "failed": "black",
}

Panel = namedtuple("Panel", "field title curves")
# key: what hides it on the page. look: thin, bold, dots (joined by a line), best or dashed
Curve = namedtuple("Curve", "key look colour label x y")
MOST_NEW_FIELDS = 20


def curve(key, look, colour, label, x, y):
    """A Curve of the numbers that are known: a line joins them."""
    finite = np.isfinite(y)
    return Curve(key, look, colour, label, x[finite], y[finite])


def panels_of(run):
    """The Panels of a run, the loss first; others, and curves, only if they have data."""
    steps = run.train["step"]
    found = [Panel("loss", title_of(FIELDS["loss"], run), curves_of_loss(run))]
    colours = itertools.cycle(COLOURS)
    for field in FIELDS.values():
        if field.kind != "train" or not field.plot or field.name == "loss":
            continue
        title = title_of(field, run)
        y = run.train[field.name] * field.plot_factor
        if field.name == "grad_norm":
            curves = [*raw_and_mean(run, field.name, ""), *of_clip(run)]
        else:
            curves = [curve("training", "bold", next(colours), field.plot, steps, y)]
        found.append(Panel(field.name, title, curves))
    for name, x, y in results.new_fields(run)[:MOST_NEW_FIELDS]:
        found.append(Panel(name, name, [curve("training", "bold", "blue", name, x, y)]))
    panels = []
    for panel in found:
        if panel.field == "loss" or len(panel.curves[0].x):
            panels.append(panel._replace(curves=[each for each in panel.curves if len(each.x)]))
    return panels


def curves_of_loss(run):
    return [*raw_and_mean(run, "loss", "training, "), *of_validation(run)]


def raw_and_mean(run, field, before):
    """The curves of a noisy field."""
    steps = run.train["step"]
    values = run.train[field]
    half = half_window(run)
    mean = f"{before}mean of {2 * half + 1:,}"
    return [
        curve("raw", "thin", "sky", f"{before}each step", steps, values),
        curve("training", "bold", "blue", mean, steps, smooth(values, half)),
    ]


def title_of(field, run):
    """Of the panel of a field."""
    per = results.unit(run)
    unit = field.unit.replace("tokens", per)
    if unit == "nats" and per != "tokens":
        unit = ""
    return f"{field.plot} ({unit})" if unit else field.plot


def of_validation(run):
    """Points of the evaluations, and a star at the best. That of untrained weights is left out: a
    line from it to the next one would tell of losses that nobody has measured."""
    steps = run.evals["step"]
    losses = run.evals["val_loss"]
    tokens, same = results.extent(run)
    label = "validation"
    if tokens:
        label += f", first {tokens:,.0f} {results.unit(run)}"
    elif not same.all():
        label += ", last on all"
    drawn = (steps > 0) | (len(steps) == 1)
    is_best = drawn & (steps == results.best_of(run)[1])
    best = results.best_in_words(run)
    return [
        curve("validation", "dots", "vermilion", label, steps[drawn], losses[drawn]),
        curve("validation", "best", "vermilion", best, steps[is_best], losses[is_best]),
    ]


def of_clip(run):
    clip = run.fact("config", "grad_clip")
    if not clip > 0:
        return []
    above = results.number(results.share_clipped(run), ".0%")
    ends = np.array([0.0, last_step(run)])
    label = f"clip at {clip:g} ({above} above)"
    return [curve("clip", "dashed", "black", label, ends, np.full(2, clip))]


def of_several(panel):
    """A run's curves beside those of other runs: the loss in training is thin, validation bold."""
    curves = [each for each in panel.curves if each.look in ("bold", "dots")]
    looks = {"bold": "thin" if panel.field == "loss" else "bold", "dots": "dots"}
    return [each._replace(look=looks[each.look]) for each in curves]


def is_dotted(each):
    """Whether its points get dots: a single one would be invisible as a line."""
    if each.look == "dashed":
        return False
    most = 60 if each.look == "dots" else 15
    return len(each.x) <= most


def late_losses(each):
    late = each.y[each.x >= 0.03 * each.x[-1]]  # the mean of steps reaches back by 1%
    return np.quantile(late, (0.001, 0.999)) if each.key == "raw" else late


def limits(field, curves):
    """(low, high, whether logarithmic) of the vertical axis. Of the loss, without the first 3% of a
    run and the outermost 0.2% of single steps: the steep beginning would press the rest flat."""
    values = [late_losses(each) if field == "loss" else each.y for each in curves]
    values = np.concatenate(values or [[0.0, 1.0]])
    low = float(values.min())
    high = float(values.max())
    widest = {"loss": 30, "grad_norm": 10}.get(field, math.inf)  # high / low on a linear axis
    if 0 < widest * low < high:
        return low / 1.2, high * 1.2, True
    if field != "loss":
        low = min(low, 0.0)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    bottom = low - pad if low else 0.0
    return bottom, high + pad, False


def events_of(run):
    """{event: its steps} of the EVENTS that this run had."""
    steps = {}
    for name in EVENTS:
        steps[name] = [row["step"] for row in happened(run, name)]
    skipped = run.train["step"][run.train["skipped"] > 0]
    steps["skipped"] = np.union1d(steps["skipped"], skipped)
    for row in happened(run, "end"):
        if str(row.get("ended")).startswith("failed"):
            steps["failed"].append(row["step"])
    return {name: each for name, each in steps.items() if len(each)}


def event_height(steps):
    """Few events cross a panel; many are marks at its bottom. A share of the panel's height."""
    return 1.0 if len(steps) <= 40 else 0.05


def thin(x, y, bins=1000):
    """(x, y), if long, with two points per bin, its lowest and its highest: no peak is lost."""
    if len(x) <= 4 * bins:
        return x, y
    first = np.linspace(0, len(x), bins, endpoint=False).astype(int)
    both = np.stack([np.fmin.reduceat(y, first), np.fmax.reduceat(y, first)], axis=1)
    return np.repeat(x[first], 2), both.ravel()


def short(value, _=None):
    """12000 as 12k, for tick labels."""
    for letter, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / size:g}{letter}"
    return f"{value:,.6g}"

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
COLOURS = {"blue": "#0072B2", "vermilion": "#D55E00", "green": "#009E73", "orange": "#E69F00"}
COLOURS |= {"purple": "#CC79A7", "sky": "#56B4E9", "black": "#000000"}
EVENTS = {"resume": "blue", "skipped": "orange", "rollback": "purple"}
EVENTS |= {"diverging": "green", "audit": "vermilion", "out_of_memory": "sky", "failed": "black"}

Panel = namedtuple("Panel", "field title curves")
# key: what hides it on the page. look: thin, bold, dots (joined by a line), best or dashed
Curve = namedtuple("Curve", "key look colour label x y")


def curve(key, look, colour, label, x, y):
    """A Curve of the numbers that are known: a line joins them."""
    finite = np.isfinite(y)
    return Curve(key, look, colour, label, x[finite], y[finite])


def panels_of(run):
    """The Panels of a run, the loss first; others, and curves, only if they have data."""
    t, per = run.train, results.unit(run)
    drawn = []
    plotted = [field for field in FIELDS.values() if field.plot and field.kind == "train"]
    for field, colour in zip(plotted, itertools.cycle(COLOURS), strict=False):
        y = t[field.name] * field.scale
        drawn.append((field.name, title_of(field, per), colour, t["step"], y))
    drawn += [(name, name, "blue", x, y) for name, x, y in results.new_fields(run)[:20]]
    more = {"loss": of_validation(run), "grad_norm": of_clip(run)}  # both are noisy
    panels = []
    for field, title, colour, x, y in drawn:
        label = title.partition(" (")[0]
        curves = [curve("training", "bold", colour, label, x, y)]
        if field in more:
            half, what = half_window(run), "training, " * (field == "loss")
            label = f"{what}mean of {2 * half + 1:,}"
            curves = [curve("raw", "thin", "sky", f"{what}each step", x, y)]
            curves += [curve("training", "bold", colour, label, x, smooth(y, half)), *more[field]]
        if field == "loss" or len(curves[0].x):
            panels.append(Panel(field, title, [each for each in curves if len(each.x)]))
    return panels


def title_of(field, per):
    """Of the panel of a field. per: what its "tokens" are."""
    unit = field.unit.replace("tokens", per)
    if unit == "nats" and per != "tokens":
        unit = ""
    return f"{field.plot} ({unit})" if unit else field.plot


def of_validation(run):
    e, (tokens, same) = run.evals, results.extent(run)
    on = f", first {tokens:,.0f} {results.unit(run)}" if tokens else ", last on all"
    label = "validation" + on * bool(tokens or not same.all())
    best, is_best = results.best_in_words(run), e["step"] == results.best_of(run)[1]
    points = curve("validation", "dots", "vermilion", label, e["step"], e["val_loss"])
    x, y = e["step"][is_best], e["val_loss"][is_best]
    return points, curve("validation", "best", "vermilion", best, x, y)


def of_clip(run):
    clip, ends = run.fact("config", "grad_clip"), np.array([0.0, last_step(run)])
    label = f"clip at {clip:g} ({results.number(results.share_clipped(run), '.0%')} above)"
    return [curve("clip", "dashed", "black", label, ends, np.full(2, clip))] * bool(clip > 0)


def of_several(panel):
    """A run's curves beside those of other runs: the loss in training is thin, validation bold."""
    curves = [each for each in panel.curves if each.look in ("bold", "dots")]
    looks = {"bold": "thin" if panel.field == "loss" else "bold", "dots": "dots"}
    return [each._replace(look=looks[each.look]) for each in curves]


def is_dotted(each):
    """Whether its points get dots: a single one would be invisible as a line."""
    return each.look != "dashed" and len(each.x) <= (60 if each.look == "dots" else 15)


def late_losses(each):
    late = each.y[each.x >= 0.03 * each.x[-1]]  # the mean of steps reaches back by 1%
    return np.quantile(late, (0.001, 0.999)) if each.key == "raw" else late


def limits(field, curves):
    """(low, high, whether logarithmic) of the vertical axis. Of the loss, without the first 3% of a run
    and the outermost 0.2% of single steps: the steep beginning would press the rest flat."""
    values = [late_losses(each) if field == "loss" else each.y for each in curves]
    values = np.concatenate(values or [[0.0, 1.0]])
    low, high = float(values.min()), float(values.max())
    if 0 < {"loss": 30, "grad_norm": 10}.get(field, math.inf) * low < high:
        return low / 1.2, high * 1.2, True
    low = low if field == "loss" else min(low, 0.0)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad if low else 0.0, high + pad, False


def events_of(run):
    """{event: its steps} of the EVENTS that this run had."""
    steps = {name: [row["step"] for row in happened(run, name)] for name in EVENTS}
    steps["skipped"] = np.union1d(steps["skipped"], run.train["step"][run.train["skipped"] > 0])
    ends = happened(run, "end")
    steps["failed"] = [row["step"] for row in ends if str(row.get("ended")).startswith("failed")]
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

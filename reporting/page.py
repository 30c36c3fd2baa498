"""report.html: the curves of one or several runs in one file that needs no network and no server.

Curves stretch with the window; numbers keep their size. Everything drawn has a key as its class
(raw, training, resume ...; r0, r1 ... of several runs). A button hides it, also after a reload.
"""

import math
import re
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from reporting import record, results

COLOURS = "blue vermilion green orange purple sky black".split()  # of several runs
TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(runs, names, bests, text, lanes, refresh):
    """The page, a str. bests: in words. text: Markdown, for below the curves. lanes: {event:
    (colour, steps)} of a single run. refresh: seconds until an open page reloads; 0 = never."""
    live = f"Running: this page reloads every {refresh:.0f} s. " if refresh else ""
    keys = {"raw": ("each step", "sky"), "training": ("training", "blue")}
    keys["validation"] = "validation", "vermilion"
    keys |= {event: (event.replace("_", " "), colour) for event, (colour, _) in lanes.items()}
    if len(runs) > 1:
        live += "Bold loss curves are validation, thin ones training."
        labels = zip(names, bests, COLOURS * len(runs), strict=False)
        keys = {f"r{i}": (f"{name}: {best}", c) for i, (name, best, c) in enumerate(labels)}
    buttons = "".join(
        f'<button data-key="{key}" style="--c:var(--{colour})">{escape(label)}</button>'
        for key, (label, colour) in keys.items()
    )
    hidden = "".join(f'[data-off~="{key}"] .{key} {{ display: none }}\n' for key in keys)
    head = {"TITLE": escape(", ".join(names)), "RELOAD": round(1000 * refresh), "LIVE": live}
    body = {"PANELS": "".join(panels(runs, names, lanes)), "TEXT": from_markdown(text)}
    return TEMPLATE.substitute(head, **body, HIDDEN=hidden, BUTTONS=buttons)


def from_markdown(text):
    """HTML of the Markdown that report.py writes: lines, tables, and samples between fences."""
    out, fence = [], ""
    for line in text.split("\n")[1:]:  # without its title
        safe = escape(line)
        if fence or line.startswith("~~~"):
            out.append("<pre>" if not fence else "</pre>" if line == fence else safe)
            fence = "" if line == fence else fence or line
            continue
        safe = re.sub("`(.*?)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", safe))
        if line.startswith("## "):
            out.append(f"<h2>{safe[3:]}</h2>")
        elif line.startswith("|"):
            cells = re.split(r" *\| *", safe.replace("\\|", "&#124;"))[1:-1]
            row = "".join(f"<td>{cell}</td>" for cell in cells)
            out += [f"<tr>{row}</tr>"] * (not line.startswith("| ---"))
        elif line:
            out.append(f"<p>{safe.removeprefix('&gt; ')}</p>")
    rows = re.compile("((?:<tr>.*</tr>\n)+)")
    return rows.sub(r'<div class="scroll"><table>\n\1</table></div>\n', "\n".join(out) + "\n")


def panels(runs, names, lanes):
    alone = len(runs) == 1
    found = {}  # title: its curves
    for i, run in enumerate(runs):
        own = (None, None, "") if alone else (f"r{i}", (COLOURS * len(runs))[i], f"{names[i]} ")
        for title, curve in curves_of(run, *own):
            found.setdefault(title, []).append(curve)
    for title, curves in found.items():
        limits, star, line = None, None, 0
        if title == "loss":
            star = results.best_point(runs[0]) if alone else None
            limits = record.loss_limits(runs, *star[:1] if star else ())
            title += " (nats)" * (results.unit(*runs) == "tokens")
        elif title.startswith("gradient norm") and alone:
            line = runs[0].fact("config", "grad_clip")
        yield panel(title, curves, lanes, limits, star, line)


def curves_of(run, key, colour, name):
    """(title of the panel, (key, colour, look, label, x, y)) of each curve. key: None of a single run."""
    e, half = run.evals, record.half_window(run)
    for field, title, own, x, y in results.panels_of(run):
        label = title.partition(" (")[0]
        if field in ("loss", "grad_norm") and len(y) > 30:
            pale = "sky" if field == "loss" else own
            yield from [] if key else [(title, ("raw", pale, "thin", "each step", x, y))]
            y, label = record.smooth(y, half), f"{label}, mean of {2 * half + 1:,}"
        look = "thin" if key and field == "loss" else "bold"
        yield title, (key or "training", colour or own, look, name + label, x, y)
    looks = key or "validation", colour or "vermilion", "bold", name + "validation"
    yield "loss", (*looks, e["step"], e["val_loss"])


def panel(title, curves, lanes, limits, star, line):
    """A figure, or "" if it has no data. limits: (low, high, whether logarithmic) of the vertical
    axis; None = from all values. star: (value, step) of the best. line: a horizontal one."""
    values = record.known(np.concatenate([y for *_, y in curves]))
    if not len(values):
        return ""
    right = max(record.known(steps).max(initial=0) for *_, steps, _ in curves) or 1
    log_from = 30 if title.startswith("gradient") else math.inf
    low, high, log = limits or record.limits_of(np.append(values, line or math.nan), log_from)
    if log:
        low, high = np.log10([low, high])

    def place(y):  # 0 at the top, 1000 at the bottom
        with np.errstate(divide="ignore", invalid="ignore"):
            return 1000 * (high - (np.log10(y) if log else np.asarray(y, float))) / (high - low)

    out = []
    for value, label in ticks(low, high, log):
        at = f"{place(value) / 10:.3f}%"
        out.append(f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/>')
        out.append(f'<text x="-7" y="{at}" dy=".32em" text-anchor="end">{label}</text>')
    for value, label in ticks(0, right, ""):
        at = f"{100 * value / right:.3f}%"
        out.append(f'<line class="grid" x1="{at}" x2="{at}" y2="100%"/>')
        out.append(f'<text x="{at}" y="100%" dy="1.5em" text-anchor="middle">{label}</text>')
    shapes = "".join(shape(*look, 1000 * steps / right, place(y)) for *look, steps, y in curves)
    for event, (colour, steps) in lanes.items():
        top = 0 if len(steps) <= 40 else 950  # many become marks at the bottom, few cross the panel
        lines = "".join(f"M{1000 * step / right:.2f} {top}V1000" for step in steps if step <= right)
        shapes += f'<path class="event {event}" style="--c:var(--{colour})" d="{lines}"/>'
    if line > 0:
        shapes += f'<path class="event" style="--c:var(--black)" d="M0 {place(line):.2f}H1000"/>'
    cut = ' class="cut"' * (limits is not None)  # the beginning may lie above
    out.append(f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none"{cut}>{shapes}</svg>')
    if star and math.isfinite(star[0]):
        at = f'x="{100 * star[1] / right:.3f}%" y="{place(star[0]) / 10:.3f}%"'
        tip = f"<title>best: {star[0]:.4f} at step {star[1]:,}</title>"
        out.append(f'<text class="star validation" {at} dy=".36em">★{tip}</text>')
    wide = " wide" * (limits is not None)
    data = f'data-x1="{right}" data-y0="{low}" data-y1="{high}" data-log="{"1" * log}"'
    return f"""<figure class="panel{wide}"><figcaption>{escape(title)}</figcaption>
<div class="plot" {data}><svg role="img" aria-label="{escape(title)}">{"".join(out)}
<line class="axis" x2="100%" y1="100%" y2="100%"/><line class="cross" y2="100%" hidden/></svg>
<div class="tip" hidden></div></div></figure>
"""


def ticks(low, high, log):
    """[(value, label)]: some round numbers. low and high are exponents of ten if log."""
    if log:
        factors = (1, 2, 5) if high - low < 2 else (1,)
        values = [f * 10.0**n for n in range(-40, 41, math.ceil((high - low) / 6)) for f in factors]
        return [(v, record.short(v)) for v in values if low <= math.log10(v) <= high]
    size = 10 ** math.floor(math.log10((high - low) / 7))
    size *= next(f for f in (1, 2, 5, 10) if f * size >= (high - low) / 7)
    places = range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)
    return [(n * size, record.short(round(n * size, 12))) for n in places]


def shape(key, colour, look, label, x, y):
    """A thinned polyline for each stretch of finite values, and dots if points are few."""
    x, y = record.thin(x, np.clip(y, -2000, 3000))
    finite = np.isfinite(y)
    dots = finite.sum() <= (60 if "validation" in label else 15)
    end = f'style="--c:var(--{colour})" data-label="{escape(label)}"'
    out = ""
    for part in np.split(np.arange(len(y)), np.flatnonzero(np.diff(finite)) + 1):
        if len(part) and finite[part[0]]:
            points = [f"{a:.2f} {b:.2f}" for a, b in zip(x[part], y[part], strict=True)]
            out += f'<polyline class="{key} {look}" {end} points="{" ".join(points)}"/>'
            if dots:
                out += f'<path class="{key} dots" {end} d="M{"h0M".join(points)}h0"/>'
    return out

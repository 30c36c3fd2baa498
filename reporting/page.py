"""report.html: the curves of one or several runs in one file that needs no network and no server.

Curves stretch with the window; numbers keep their size. Everything drawn has a key as its class
(raw, training, resume ...; r0, r1 ... of several runs). A button hides it, also after a reload.
"""

from html import escape
from pathlib import Path
from string import Template

import numpy as np

from reporting import curves as drawn
from reporting.results import best_in_words

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(runs, names, text, refresh):
    """The page, a str. text: Markdown, for below the curves. refresh: seconds until an open page
    reloads; 0 = never."""
    live = f"Running: this page reloads every {refresh:.0f} s. " if refresh else ""
    if len(runs) == 1:
        panels, events = drawn.panels_of(runs[0]), drawn.events_of(runs[0])
        keys = {"raw": ("each step", "sky"), "training": ("training", "blue")}
        keys["validation"] = "validation", "vermilion"
        keys |= {name: (name.replace("_", " "), drawn.EVENTS[name]) for name in events}
    else:
        live += "Bold loss curves are validation, thin ones training."
        colours = list(drawn.COLOURS) * len(runs)
        labels = [f"{name}: {best_in_words(run)}" for run, name in zip(runs, names, strict=True)]
        keys = {f"r{i}": (label, colours[i]) for i, label in enumerate(labels)}
        panels, events = together(runs, names, colours), {}
    buttons = "".join(
        f'<button data-key="{key}" style="--c:var(--{colour})">{escape(label)}</button>'
        for key, (label, colour) in keys.items()
    )
    hidden = "".join(f'[data-off~="{key}"] .{key} {{ display: none }}\n' for key in keys)
    head = {"TITLE": escape(", ".join(names)), "RELOAD": round(1000 * refresh), "LIVE": live}
    body = {"PANELS": "".join(figure(panel, events) for panel in panels), "TEXT": escape(text)}
    return TEMPLATE.substitute(head, **body, HIDDEN=hidden, BUTTONS=buttons)


def together(runs, names, colours):
    """The Panels of several runs, each with the curves of all."""
    panels = {}
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for panel in drawn.panels_of(run):
            own = panels.setdefault(panel.field, panel._replace(curves=[])).curves
            for each in drawn.of_several(panel):
                label = f"{name} {each.label}"
                own.append(each._replace(key=f"r{i}", colour=colours[i], label=label))
    return panels.values()


def figure(panel, events):
    """A panel in HTML; page.html adds the grid and its labels."""
    right = max((each.x[-1] for each in panel.curves), default=0) or 1
    low, high, is_log = drawn.limits(panel.field, panel.curves)
    if is_log:
        low, high = np.log10([low, high])
    shapes = ""
    for each in panel.curves:
        y = np.log10(np.maximum(each.y, 1e-300)) if is_log else each.y
        y = np.clip(1000 * (high - y) / (high - low), -2000, 3000)  # 0 is the top, 1000 the bottom
        shapes += shape(each._replace(x=1000 * each.x / right, y=y))
    for name, steps in events.items():
        top = 1000 * (1 - drawn.event_height(steps))
        lines = "".join(f"M{1000 * step / right:.2f} {top:.0f}V1000" for step in steps)
        colour = drawn.EVENTS[name]
        shapes += f'<path class="event {name}" style="--c:var(--{colour})" d="{lines}"/>'
    title, wide = escape(panel.title), " wide" * (panel.field == "loss")
    data = f'data-x1="{right}" data-y0="{low}" data-y1="{high}" data-log="{"1" * is_log}"'
    return f"""<figure class="panel{wide}"><figcaption>{title}</figcaption>
<div class="plot" {data}><svg role="img" aria-label="{title}">
<svg class="curves" viewBox="0 0 1000 1000" preserveAspectRatio="none">{shapes}</svg>
<line class="axis" x2="100%" y1="100%" y2="100%"/><line class="cross" y2="100%" hidden/></svg>
<div class="tip" hidden></div></div></figure>
"""


def shape(curve):
    """A thinned polyline, and dots if points are few."""
    points = [f"{x:.2f} {y:.2f}" for x, y in zip(*drawn.thin(curve.x, curve.y), strict=True)]
    end = f'style="--c:var(--{curve.colour})" data-label="{escape(curve.label)}"'
    line = f'<polyline class="{curve.key} {curve.look}" {end} points="{" ".join(points)}"/>'
    dots = f'<path class="{curve.key} dot {curve.look}" {end} d="M{"h0M".join(points)}h0"/>'
    return line + dots * drawn.is_dotted(curve)

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
    live = ""
    if refresh:
        live = f"Running: this page reloads every {refresh:.0f} s. "
    if len(runs) == 1:
        events = drawn.events_of(runs[0])
        panels = drawn.panels_of(runs[0])
        keys = keys_of_one(events)
    else:
        live += "Bold loss curves are validation, thin ones training."
        colours = list(drawn.COLOURS) * len(runs)
        events = {}
        panels = together(runs, names, colours)
        keys = {}
        for i, (run, name) in enumerate(zip(runs, names, strict=True)):
            keys[f"r{i}"] = f"{name}: {best_in_words(run)}", colours[i]
    buttons = [button(key, label, colour) for key, (label, colour) in keys.items()]
    hidden = [f'[data-off~="{key}"] .{key} {{ display: none }}\n' for key in keys]
    figures = [figure(panel, events) for panel in panels]
    return TEMPLATE.substitute(
        TITLE=escape(", ".join(names)),
        RELOAD=round(1000 * refresh),
        LIVE=live,
        HIDDEN="".join(hidden),
        BUTTONS="".join(buttons),
        PANELS="".join(figures),
        TEXT=escape(text),
    )


def keys_of_one(events):
    """{key: (label, colour)} of what the buttons of a single run hide."""
    keys = {"raw": ("each step", "sky"), "training": ("training", "blue")}
    keys["validation"] = "validation", "vermilion"
    for name in events:
        keys[name] = name.replace("_", " "), drawn.EVENTS[name]
    return keys


def button(key, label, colour):
    return f'<button data-key="{key}" style="--c:var(--{colour})">{escape(label)}</button>'


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
    last = max((each.x[-1] for each in panel.curves), default=0) or 1
    right = 1.01 * last  # room for the last marker
    low, high, is_log = drawn.limits(panel.field, panel.curves)
    if is_log:
        low, high = np.log10([low, high])
    shapes = []
    for each in panel.curves:
        y = np.log10(np.maximum(each.y, 1e-300)) if is_log else each.y
        y = np.clip(1000 * (high - y) / (high - low), -2000, 3000)  # 0 is the top, 1000 the bottom
        shapes.append(shape(each._replace(x=1000 * each.x / right, y=y)))
    for name, steps in events.items():
        shapes.append(lines_of(name, 1000 * np.asarray(steps) / right, drawn.event_height(steps)))
    wide = " wide" if panel.field == "loss" else ""
    log = "1" if is_log else ""
    data = f'data-x1="{right}" data-y0="{low}" data-y1="{high}" data-log="{log}"'
    title = escape(panel.title)
    return f"""<figure class="panel{wide}"><figcaption>{title}</figcaption>
<div class="plot" {data}><svg role="img" aria-label="{title} by step">
<svg class="curves" viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(shapes)}</svg>
<line class="axis" x2="100%" y1="100%" y2="100%"/><line class="cross" y2="100%" hidden/></svg>
<div class="tip" hidden></div></div></figure>
"""


def lines_of(event, places, height):
    """Vertical lines at some places on the x axis, 0 to 1000."""
    top = 1000 * (1 - height)
    path = "".join(f"M{x:.2f} {top:.0f}V1000" for x in places)
    colour = drawn.EVENTS[event]
    return f'<path class="event {event}" style="--c:var(--{colour})" d="{path}"/>'


def shape(curve):
    """A thinned polyline, and dots if points are few."""
    x, y = drawn.thin(curve.x, curve.y)
    points = [f"{a:.2f} {b:.2f}" for a, b in zip(x, y, strict=True)]
    looks = f'style="--c:var(--{curve.colour})" data-label="{escape(curve.label)}"'
    line = f'<polyline class="{curve.key} {curve.look}" {looks} points="{" ".join(points)}"/>'
    if not drawn.is_dotted(curve):
        return line
    path = "h0M".join(points)
    return f'{line}<path class="{curve.key} dot {curve.look}" {looks} d="M{path}h0"/>'

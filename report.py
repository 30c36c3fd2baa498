"""
Reports on a run from the metrics.jsonl and run.json in its folder:

    python report.py out/shakespeare                # writes report.png and report.md there
    python report.py out/a out/b out/c              # writes compare.png and compare.md into out/a
    python report.py out/shakespeare --html=true    # also report.html (of several: compare.html)
    python report.py out/shakespeare --watch=true   # report.html, updated while the run continues
    python report.py records/*                      # the table of what check.py and bench.py measured

Prints the troubles that it finds, and paths. A field that it does not know gets a panel and a row.
"""

import itertools
import math
import os
import re
import shlex
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

from plumbing.cli import configured, fail, read_knobs, run_script
from plumbing.console import duration
from plumbing.files import replacing
from reporting import curves, record, results
from reporting.curves import COLOURS
from reporting.page import page
from reporting.record import last_step, read_run
from reporting.records import HEADER, record_rows
from reporting.results import best_in_words, ended, happened, outcome, table, unit
from reporting.troubles import replay, replay_of, troubles

report_dir = ""  # output folder; "" = that of the (first) run
dollars_per_hour = 0.0  # of one device, [0, inf); 0 = the run's --dollars_per_hour
html = False  # also write a page: one file that needs no network and no server
watch = False  # rewrite that page every 10 s while the run continues, and write all at its end

STYLE = Path(record.__file__).with_name("picture.mplstyle")
LOOKS = {
    "thin": {"lw": 0.8, "alpha": 0.6},
    "bold": {"lw": 1.7},
    "dots": {"lw": 1.6, "markersize": 5.5, "markeredgecolor": "white", "zorder": 4},
    "best": {"ls": "", "markersize": 13, "markeredgecolor": "white", "clip_on": False, "zorder": 5},
    "dashed": {"lw": 1.2, "ls": "--"},
}


def draw(ax, curve, **looks):
    """looks: other than those of LOOKS."""
    own = {"color": COLOURS[curve.colour], "label": curve.label, "markersize": 3.5, "ls": "-"}
    marker = "*" if curve.look == "best" else "o" * curves.is_dotted(curve)
    ax.plot(*curves.thin(curve.x, curve.y), marker=marker, **own | LOOKS[curve.look] | looks)


def scale(ax, field, drawn):
    """The vertical axis of some curves. If the loss begins above it, the axis says so."""
    low, high, is_log = curves.limits(field, drawn)
    if is_log:
        from matplotlib.ticker import LogLocator, NullLocator

        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(curves.short)
    ax.set_ylim(low, high)
    first = max((curve.y[0] for curve in drawn), default=low)
    if first > high:
        words = f"the beginning, at {first:.4g}, is above"
        ax.annotate(words, (0.995, 0.94), xycoords="axes fraction", ha="right", fontsize=8)


def draw_panel(ax, panel, events):
    for curve in panel.curves:
        draw(ax, curve)
    for name, steps in events.items():
        looks = {"color": COLOURS[curves.EVENTS[name]], "lw": 0.9, "ls": (0, (4, 3)), "zorder": 1}
        looks |= {"label": name.replace("_", " ")} if panel.field == "loss" else {}
        ax.vlines(steps, 0, curves.event_height(steps), transform=ax.get_xaxis_transform(), **looks)
    scale(ax, panel.field, panel.curves)
    ax.set_ylabel(panel.title if len(panel.title) <= 24 else panel.title[:22] + "...")
    ax.set_xlabel("step")
    ax.xaxis.set_major_formatter(curves.short)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if len(panel.curves) > 1 or panel.field == "loss":  # above the panel, where it hides nothing
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, borderaxespad=0.2)


def heading(run):
    c, identity = run.info["config"], run.info["run"]
    names = run.info["data"].get("name"), identity.get("device"), identity.get("dtype")
    names += (f"{c['n_layer']} x {c.get('n_embd')} wide",) if "n_layer" in c else ()
    lines = f"{run.name}: {ended(run)}", ", ".join(str(name) for name in names if name)
    return "\n".join(textwrap.shorten(line, 110, placeholder=" ...") for line in lines).strip()


def picture(run):
    """report.png as a matplotlib Figure."""
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display

    events, panels = curves.events_of(run), curves.panels_of(run)
    rows = len(panels) // 2  # below the loss
    fig = Figure((9, 4 + 2 * rows))
    grid = fig.add_gridspec(1 + rows, 2, height_ratios=[3.3] + [2] * rows)
    loss = fig.add_subplot(grid[0, :])
    others = [fig.add_subplot(grid[i // 2, i % 2], sharex=loss) for i in range(2, 1 + len(panels))]
    for ax, panel in zip([loss, *others], panels, strict=True):
        draw_panel(ax, panel, events)
    loss.set_xlim(-0.01 * max(1, last_step(run)), 1.01 * max(1, last_step(run)))
    fig.suptitle(heading(run), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def compare_picture(runs, names):
    """compare.png as a matplotlib Figure: losses by step, tokens and time. The page has the rest."""
    from matplotlib.figure import Figure

    fig = Figure((11, 4.5 + 0.2 * math.ceil(len(runs) / 3)))
    by_step, by_tokens, by_time = fig.subplots(1, 3, sharey=True)
    drawn = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        step, tokens = run.train["step"], run.train["tokens"]
        minutes = np.cumsum(np.nan_to_num(run.train["step_ms"])) / 60_000
        looks = {"color": list(COLOURS.values())[i % 7], "ls": ("-", "--", ":")[i // 7 % 3]}
        for curve in curves.of_several(curves.panels_of(run)[0]):
            drawn.append(curve)
            for ax, x in (by_step, step), (by_tokens, tokens), (by_time, minutes):
                places = np.interp(curve.x, [0, *step], [0, *x])
                draw(ax, curve._replace(x=places, label=None), **looks)
        by_step.plot([], [], lw=2.5, label=f"{name}: {best_in_words(run)}", **looks)
    scale(by_step, "loss", drawn)
    by_step.set_ylabel("loss (nats)" if unit(*runs) == "tokens" else "loss")
    by_step.set_xlabel("step")
    by_tokens.set_xlabel(f"{unit(*runs)} trained on")
    by_time.set_xlabel("training time (minutes)")
    for ax in fig.axes:
        ax.xaxis.set_major_formatter(curves.short)
    fig.suptitle("Thick: validation. Thin: training, smoothed.", x=0.01, ha="left", fontsize=10)
    fig.legend(loc="outside lower left", ncols=3)
    return fig


def unusual_knobs(run):
    """[(knob, value in this run, default in train.py)] where the two differ, without folders."""
    knobs, config = read_knobs(Path(__file__).with_name("train.py")), run.info["config"]
    defaults = {
        name: knobs[name].default if name in knobs else "no longer a knob" for name in config
    }
    usual = defaults | {"decay_steps": config.get("max_steps")}  # as 0 is resolved
    names = [k for k, v in config.items() if v not in (defaults[k], usual[k])]
    names = [name for name in names if not name.endswith("_dir")]
    return [(f"`{k}`", f"`{config[k]}`", f"`{defaults[k]}`") for k in names]


def facts(run):
    """{part of run.json: {name: value}} of what is said there in single words, but for knobs."""
    parts = {part: run.info[part] for part in ("run", "hardware", "versions", "git")}
    parts["data"] = run.info["data"] | run.info["data"].get("meta", {})
    for part, told in parts.items():
        told = {name: value for name, value in told.items() if not isinstance(value, dict | list)}
        parts[part] = {name: textwrap.shorten(str(value), 80) for name, value in told.items()}
    return parts


def about(run):
    """What was run, in Markdown."""
    out = [f"- **command** `{shlex.join(['python', *map(str, run.info['command'])])}`"]
    out += [f"- **when** {run.info.get('start')} to {run.info.get('end')}"]
    for part, told in facts(run).items():
        out += [f"- **{part}** " + ", ".join(f"{name} {value}" for name, value in told.items())]
    return "\n".join([*out, "", table(("knob", "here", "default today"), unusual_knobs(run))])


def details(event):
    """The fields of an event, in words. A pair is what was and is; of hashes, names alone count."""
    out = []
    for key, value in event.items():
        is_pair = isinstance(value, list) and len(value) == 2
        if is_pair and isinstance(value[1], dict):
            value = f"changed in {', '.join(value[1])}"
        elif is_pair:
            value = "was {}, is {}".format(*value)
        out += [f"{key} {value}"] * (key not in ("kind", "step", "event", "finite"))
    return textwrap.shorten("; ".join(out), 400)


def event_rows(run, most=200):
    """[(step, event, details)] in the order of the events; skips in a row share one."""
    rows = []
    for name, group in itertools.groupby(run.events, lambda event: event["event"]):
        group = [each for each in group if name not in ("sample", "saved")]
        told = [details(each) for each in group]
        if name == "skipped" and len(group) > 1:
            told = [f"{len(group)} updates, the last at step {group[-1]['step']:,}"]
        if name in ("skipped", "rollback"):
            told[0] += f"; see `{replay_of(run, group[0])}`"
        for each, words in zip(group, told, strict=False):
            rows.append((f"{each['step']:,}", name.replace("_", " "), words))
    return rows[:most] + [("...", f"and {len(rows) - most:,} more", "")] * (len(rows) > most)


def not_exact(run):
    """Lines on what may set this run apart from an uninterrupted one on one machine."""
    names = {"inexact_resume": "resumed", "audit": "audited, and the odd result dropped"}
    found = [event for event in run.events if event["event"] in names]
    lines = [f"- step {e['step']:,}: {names[e['event']]}: {details(e)}" for e in found]
    if run.info["run"].get("deterministic") is False:
        lines.append("- `deterministic` was off")
    if run.unreadable:
        lines.append(f"- {run.unreadable:,} damaged line(s) of metrics.jsonl are left out")
    if not run.info["run"]:
        lines.append("- run.json is missing or damaged")
    return lines or ["Nothing on record: any resume was bit for bit."]


def found_in(run, title):
    """The troubles of a run, and its last sample, as paragraphs of Markdown."""
    out = [f"## Known troubles{title}\n"]
    for each in (found := troubles(run)):
        out += [f"- **{each.title}** (`{each.name}`): {each.shows}. Likely causes: {each.causes}."]
        out += [f"  Tell them apart: `{each.tell}` ({each.reading})."] if each.tell else []
        out += [f"  Look into that step: `{each.look}`."] if each.look else []
        out += [f"  Try: {each.cure}."] if each.cure else []
    out += ["\ndocs/trouble.md has more on each.\n" if found else "None that report.py knows.\n"]
    for sample in happened(run, "sample")[-1:]:
        text = str(sample.get("text"))
        fence = max(re.findall("~+", text), key=len, default="") + "~~~"
        out += [f"## A sample, from step {sample['step']:,}{title}\n", fence, text, fence, ""]
    return out


def words(run, image):
    """The text of report.md. image: whether there is a report.png."""
    config, learned = run.info["config"], run.info["data"].get("name")
    asked, (spent, missing) = config.get("dataset"), results.seconds_by_kind(run)
    out = [f"# {run.name}: {ended(run)}\n"]
    if learned and learned != asked and learned == config.get("offline_dataset"):
        out += [f"> **This run trained on {learned!r} INSTEAD OF {asked!r}, which was unavailable:"]
        out += [f"> its numbers say nothing about {asked!r}.**\n"]
    out += ["![Curves of this run](report.png)\n"] if image else []
    rows = [(f"**{what}**", *words) for what, words in outcome(run, dollars_per_hour).items()]
    out += ["## Result\n", table(("", "", "over"), rows), *found_in(run, "")]
    out += ["## What was run\n", about(run) if run.info["run"] else "Not on record.\n"]
    rows = [(kind, duration(seconds)) for kind, seconds in spent.items()]
    out += ["## Where the time went\n", table(("kind", "wall-clock"), rows)]
    out += [f"{missing} session(s) recorded no times (killed, or still running).\n"] * (missing > 0)
    out += ["## What happened\n", table(("step", "event", ""), event_rows(run))]
    return "\n".join([*out, "## What was not exact\n", *not_exact(run), ""])


def should_be_equal(one, other):
    """Whether two runs have the same knobs, and other numbers."""
    knobs = [run.info["config"].items() for run in (one, other)]
    same, again = ({k: v for k, v in each if k not in ("out_dir", "resume")} for each in knobs)
    n_steps = min(len(one.train["loss"]), len(other.train["loss"]))
    losses = [run.train["loss"][:n_steps] for run in (one, other)]
    return same == again and not np.array_equal(*losses, equal_nan=True)


def compare_words(runs, names, image):
    """compare.md: one table of the settings and the results that differ, and what is wrong."""
    columns = []  # for each run, {what: value}
    for run in runs:
        told = {name: value for part in facts(run).values() for name, value in part.items()}
        knobs = [k for k in run.info["config"] if k not in told and not k.endswith("_dir")]
        config = {f"`{knob}`": run.info["config"][knob] for knob in knobs}
        rows = outcome(run, dollars_per_hour)
        columns.append(told | config | {f"**{what}**": words for what, (words, _) in rows.items()})
    out = [f"# {', '.join(names)}\n"]
    if len({str(column.get("fingerprint")) for column in columns}) > 1:
        out += ["> **These runs trained on different data: their losses cannot be compared.**\n"]
    if len({str(column.get("device")) for column in columns}) > 1:
        out += ["> These runs ran on different devices: compare their times with care.\n"]
    if len(runs) == 2 and should_be_equal(*runs):
        command = replay(runs[0], str(runs[1].folder))
        out += [f"> The same knobs, and other numbers: `{command}` says where they part.\n"]
    out += ["![Curves of these runs](compare.png)\n"] if image else []
    every = dict.fromkeys(what for column in columns for what in column)
    rows = [(what, *(str(column.get(what, "n/a")) for column in columns)) for what in every]
    out.append(table(("", *names), [row for row in rows if len(set(row[1:])) > 1]))
    for run, name in zip(runs, names, strict=True):
        out += found_in(run, f": {name}")
    return "\n".join(out)


def write(path, text):
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_picture(path, runs, names):
    """Returns [path]; without matplotlib, [] and a line on stderr."""
    try:
        import matplotlib
    except ImportError:
        print("report.py: no picture; type: pip install matplotlib", file=sys.stderr)
        return []
    with matplotlib.rc_context(fname=STYLE), replacing(path) as temporary:
        figure = compare_picture(runs, names) if names else picture(runs[0])
        figure.savefig(temporary, format="png")
    return [path]


def write_page(runs, path, refresh=0):
    """refresh: seconds until it is rewritten; 0 = never."""
    return write(path, page(runs, names_of(runs) or [runs[0].name], text_of(runs), refresh))


def text_of(runs, image=()):
    names = names_of(runs)
    return compare_words(runs, names, image) if names else words(runs[0], image)


def names_of(runs):
    """What tells several runs apart; [] of one."""
    names = [run.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run.folder) for run in runs]
    return list(map(record.tame, names)) if len(runs) > 1 else []


def follow(runs, path, every=10):
    """Write the page every `every` seconds, at most 1% of the time, until no run is active."""
    pause = every
    print(f"open {os.path.relpath(path)} in a browser; Ctrl-C stops it", flush=True)
    try:
        while any(map(record.is_running, runs)):
            start = time.perf_counter()
            runs = [read_run(run.folder) for run in runs]
            write_page(runs, path, refresh=pause)
            pause = max(every, 100 * (time.perf_counter() - start))
            time.sleep(pause)
    except KeyboardInterrupt:
        pass


def main(argv=None):
    folders = []
    with configured(globals(), argv=argv, names=folders), np.errstate(all="ignore"):
        if not folders:
            fail("no run is named; type: python report.py out/NAME [out/OTHER ...]")
        if records := [row for folder in folders for row in record_rows(folder)]:
            print(table(HEADER, records), end="")
            return 0
        try:
            runs = list(map(read_run, folders))
            path = Path(report_dir or folders[0]) / ("report" if len(runs) == 1 else "compare")
            path.parent.mkdir(parents=True, exist_ok=True)
            if watch:
                follow(runs, path.with_suffix(".html"))
                runs = list(map(read_run, folders))
            paths = write_picture(path.with_suffix(".png"), runs, names_of(runs))
            paths.append(write(path.with_suffix(".md"), text_of(runs, image=paths)))
            if html or watch:
                paths.append(write_page(runs, path.with_suffix(".html")))
        except record.NoRecord as error:
            fail(error)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}; --report_dir=FOLDER writes elsewhere")
    for run, name in zip(runs, names_of(runs) or [""], strict=True):
        for trouble in troubles(run):
            print(f"{name}: " * bool(name) + f"{trouble.title}: {trouble.shows}")
    for path in paths:
        print(min(os.path.relpath(path), str(path), key=len))
    return 0 if any(path.suffix == ".png" for path in paths) else 1


if __name__ == "__main__":
    sys.exit(run_script(main))

"""
Reports on a run from the metrics.jsonl and run.json in its folder:

    python report.py out/shakespeare                # writes report.png and report.md there
    python report.py out/a out/b out/c              # writes compare.png and compare.md into out/a
    python report.py out/shakespeare --html=true    # also report.html (of several: compare.html)
    python report.py out/shakespeare --watch=true   # report.html, updated while the run continues

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
from plumbing.files import replacing
from reporting import record, results
from reporting.page import page
from reporting.record import half_window, known, last_step, read_run, short, smooth, thin
from reporting.results import best_of, ended, happened, metric_of, number, outcome, table, unit
from reporting.troubles import replay, replay_of, troubles

report_dir = ""  # output folder; "" = that of the (first) run
dollars_per_hour = 0.0  # of one device, [0, inf); 0 = the run's --dollars_per_hour
html = False  # also write a page: one file that needs no network and no server
watch = False  # rewrite that page every 10 s while the run continues, and write all at its end

# Okabe & Ito's colours (2008): distinct for any colour vision, and in print
COLOURS = {"blue": "#0072B2", "vermilion": "#D55E00", "green": "#009E73", "orange": "#E69F00"}
COLOURS |= {"purple": "#CC79A7", "sky": "#56B4E9", "black": "#000000"}
BLUE, VERMILION, GREEN, _, _, SKY, BLACK = COLOURS.values()
LANES = {"best": "vermilion", "resume": "blue", "skipped": "orange", "rollback": "purple"}
LANES |= {"diverging": "green", "audit": "vermilion", "out_of_memory": "black", "failed": "black"}
CROSSING = "resume rollback audit out_of_memory failed".split()  # those with a line in all panels
STYLE = Path(record.__file__).with_name("picture.mplstyle")


def new_figure(width, height):
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display

    figure = Figure((width, height), dpi=160, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    return figure


def curve(ax, x, y, **looks):
    """A line. If it has few points, they get markers, so that a single one is visible."""
    ax.plot(*thin(x, y), marker="o" if len(known(y)) < 15 else "", markersize=3.5, **looks)


def dots(ax, x, loss, colour, **looks):
    """Validation losses, joined by a line; dots if they are few."""
    looks |= {"color": colour, "markeredgecolor": "white", "markeredgewidth": 0.7, "zorder": 4}
    ax.plot(*thin(x, loss), "-o" if len(x) <= 60 else "-", markersize=5.5, lw=1.6, **looks)


def raw_and_smooth(ax, run, column, pale, strong, what=""):
    step, values, half = run.train["step"], run.train[column], half_window(run)
    curve(ax, step, values, color=pale, lw=0.7, label=f"{what}each step")
    label = f"{what}mean of {2 * half + 1:,}"
    curve(ax, step, smooth(values, half), color=strong, lw=1.8, label=label)


def scale(ax, low, high, is_log):
    if is_log:
        from matplotlib.ticker import LogLocator, NullLocator

        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(short)
    ax.set_ylim(low, high)


def scale_loss(ax, runs, *more):
    """The axis of losses: their range after the beginning; if that lies above, the axis says so."""
    low, high, is_log = record.loss_limits(runs, *more)
    scale(ax, low, high, is_log)
    ax.set_ylabel("loss (nats)" if unit(*runs) == "tokens" else "loss")
    first = max(known(run.train["loss"])[:1].max(initial=low) for run in runs)
    if first > high:
        words = f"the beginning, at {first:.4g}, is above"
        ax.annotate(words, (0.995, 0.94), xycoords="axes fraction", ha="right", fontsize=8)


def legend(ax):
    """Above the panel, where it hides nothing."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)


def draw_loss(ax, run):
    e, (tokens, same) = run.evals, results.extent(run)
    raw_and_smooth(ax, run, "loss", SKY, BLUE, "training, ")
    on = f", first {short(tokens)} {unit(run)}" if tokens else ", last on all" * (not same.all())
    dots(ax, e["step"], e["val_loss"], VERMILION, label=f"validation{on}")
    loss, step = results.best_point(run)
    if math.isfinite(loss):
        looks = {"color": VERMILION, "markersize": 13, "markeredgecolor": "white", "zorder": 5}
        ax.plot(step, loss, "*", clip_on=False, label=best_words(run), **looks)
    scale_loss(ax, [run], loss)
    legend(ax)


def event_steps(run):
    """{event: steps} of the events in LANES that this run had."""
    steps = {lane: [row["step"] for row in happened(run, lane)] for lane in LANES}
    field, sign, _ = metric_of(run)
    values = sign * run.evals.get(field, run.evals["val_loss"])
    better = values <= np.fmin.accumulate(values)
    steps["best"] = run.evals["step"][better & (run.evals["step"] > 0)]
    steps["skipped"] = np.union1d(steps["skipped"], run.train["step"][run.train["skipped"] > 0])
    ends = happened(run, "end")
    steps["failed"] = [row["step"] for row in ends if str(row.get("ended")).startswith("failed")]
    return {lane: steps[lane] for lane in LANES if len(steps[lane])}


def draw_events(ax, panels, lanes):
    """A lane for each kind of event. Those that change a run's course also cross all panels."""
    for lane, (event, steps) in enumerate(lanes.items()):
        colour = COLOURS[LANES[event]]
        marks = {"best": "*", "skipped": "|"}.get(event, "D")
        ax.plot(steps, [lane] * len(steps), marks, color=colour, clip_on=False, markersize=5)
        for panel in panels if event in CROSSING and len(steps) <= 40 else []:
            for step in steps:
                panel.axvline(step, color=colour, lw=0.9, ls=(0, (4, 3)), alpha=0.7, zorder=1)
    ax.set_yticks(range(len(lanes)), [event.replace("_", " ") for event in lanes])
    ax.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def heading(run):
    c, identity = run.info["config"], run.info["run"]
    names = run.info["data"].get("name"), identity.get("device"), identity.get("dtype")
    names += (f"{c['n_layer']} x {c.get('n_embd')} wide",) if "n_layer" in c else ()
    lines = f"{run.name}: {ended(run)}", ", ".join(str(name) for name in names if name)
    return "\n".join(textwrap.shorten(line, 110, placeholder=" ...") for line in lines).strip()


def picture(run):
    """report.png as a matplotlib Figure."""
    lanes, clip = event_steps(run), run.fact("config", "grad_clip")
    _, *panels = results.panels_of(run)
    panels = panels[:4] + [panel for panel in panels[5:] if len(known(panel[-1]))]  # [4] is MFU
    lanes_high = 0.17 * max(1, len(lanes))
    rows = (1 + len(panels)) // 2
    fig = new_figure(9, 4 + 2 * rows + lanes_high)
    grid = fig.add_gridspec(2 + rows, 2, height_ratios=[3.1, lanes_high] + [2] * rows)
    loss = fig.add_subplot(grid[0, :])
    events = fig.add_subplot(grid[1, :], sharex=loss)
    axes = [fig.add_subplot(grid[2 + i // 2, i % 2], sharex=loss) for i in range(len(panels))]
    draw_loss(loss, run)
    draw_events(events, [loss, *axes], lanes)
    for ax, (field, title, colour, step, values) in zip(axes, panels, strict=True):
        ax.set_ylabel(title if len(title) <= 24 else title[:22] + "...")
        if field == "grad_norm":
            raw_and_smooth(ax, run, field, "#8FD4BF", GREEN)
            if clip > 0:
                label = f"clip at {clip:g} ({results.share_clipped(run):.0%} above)"
                ax.axhline(clip, color=BLACK, lw=1.2, ls="--", label=label)
            legend(ax)
            scale(ax, *record.limits_of(np.append(values, clip or math.nan), log_from=10))
        else:
            curve(ax, step, values, color=COLOURS[colour], lw=1.4)
            scale(ax, *record.limits_of(values))
        if field == "tokens_per_sec":
            mfu = number(record.mean(run.train["mfu"]), ".1%", " on average")
            ax.set_title(f"MFU {mfu}", loc="right", fontsize=8, pad=3)
    loss.tick_params(labelbottom=False)
    loss.set_xlim(-0.01 * max(1, last_step(run)), 1.01 * max(1, last_step(run)))
    for ax in [events, *axes]:
        ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(short)
        ax.xaxis.get_major_locator().set_params(integer=True)
    fig.suptitle(heading(run), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def compare_picture(runs, names):
    """compare.png as a matplotlib Figure: losses by step, tokens and time. The page has the rest."""
    fig = new_figure(11, 4.5 + 0.2 * math.ceil(len(runs) / 3))
    axes = by_step, by_tokens, by_time = fig.subplots(1, 3)
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        t, e, half = run.train, run.evals, half_window(run)
        looks = {"color": list(COLOURS.values())[i % 7], "ls": ("-", "--", ":")[i // 7 % 3]}
        minutes = np.cumsum(np.nan_to_num(t["step_ms"])) / 60_000
        for ax, x in (by_step, t["step"]), (by_tokens, t["tokens"]), (by_time, minutes):
            curve(ax, x, smooth(t["loss"], half), lw=1, alpha=0.55, **looks)
            dots(ax, np.interp(e["step"], [0, *t["step"]], [0, *x]), e["val_loss"], looks["color"])
        by_step.plot([], [], lw=2.5, label=f"{name}: {best_words(run)}", **looks)
    scale_loss(by_step, runs)
    labels = "step", f"{unit(*runs)} trained on", "training time (minutes)"
    for ax, label in zip(axes, labels, strict=True):
        ax.set_xlabel(label)
        ax.xaxis.set_major_formatter(short)
    for ax in by_tokens, by_time:
        ax.sharey(by_step)
        ax.tick_params(labelleft=False)
    fig.suptitle("Thick: validation. Thin: training, smoothed.", x=0.01, ha="left", fontsize=10)
    fig.legend(loc="outside lower left", ncols=3)
    return fig


def best_words(run):
    return f"best {metric_of(run)[2]} {number(best_of(run)[0])}"


def unusual_knobs(run):
    """[(knob, value in this run, default in train.py)] where the two differ, without folders."""
    knobs, config = read_knobs(Path(__file__).with_name("train.py")), run.info["config"]
    defaults = {name: knobs[name][0] if name in knobs else "no longer a knob" for name in config}
    usual = defaults | {"decay_steps": config.get("max_steps")}  # as 0 is resolved
    names = [k for k, v in config.items() if v not in (defaults[k], usual[k])]
    names = [name for name in names if not name.endswith("_dir")]
    return [(f"`{k}`", f"`{config[k]}`", f"`{defaults[k]}`") for k in names]


def facts(run):
    """{part of run.json: {name: value}} of what is said there in single words, but for knobs."""
    parts = {part: run.info[part] for part in ("run", "hardware", "versions", "git")}
    parts["data"] = run.info["data"] | run.info["data"].get("meta", {})
    for part, told in parts.items():
        told = {k: str(v) for k, v in told.items() if not isinstance(v, dict | list)}
        parts[part] = {name: textwrap.shorten(value, 80) for name, value in told.items()}
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
        if isinstance(value, list) and len(value) == 2:
            is_code = isinstance(value[1], dict)
            value = (
                f"changed in {', '.join(value[1])}" if is_code else "was {}, is {}".format(*value)
            )
        out += [f"{key} {value}"] * (key not in ("kind", "step", "event", "finite"))
    return textwrap.shorten("; ".join(out), 400)


def event_rows(run, most=200):
    """[(step, event, details)] in the order of the events; skips in a row share one."""
    rows = []
    for name, group in itertools.groupby(run.events, lambda event: event["event"]):
        group = list(group)
        found = [(f"{e['step']:,}", name.replace("_", " "), details(e)) for e in group]
        if name == "skipped" and len(found) > 1:
            words = f"{len(found)} updates, the last at step {found[-1][0]}"
            found = [(*found[0][:2], words)]
        if name in ("skipped", "rollback"):
            at, what, words = found[0]
            found[0] = at, what, f"{words}; see `{replay_of(run, group[0])}`"
        rows += found if name not in ("sample", "saved") else []
    return rows[:most] + [("...", f"and {len(rows) - most:,} more", "")] * (len(rows) > most)


def not_exact(run):
    """Lines on what may set this run apart from an uninterrupted one on one machine."""
    names = {"inexact_resume": "resumed", "audit": "audited, and the odd result dropped"}
    found = [event for event in run.events if event["event"] in names]
    lines = [f"- step {e['step']:,}: {names[e['event']]}: {details(e)}" for e in found]
    also = {
        "`deterministic` was off": run.info["run"].get("deterministic") is False,
        f"{run.unreadable:,} damaged line(s) of metrics.jsonl are left out": run.unreadable,
        "run.json is missing or damaged": not run.info["run"],
    }
    lines += [f"- {words}" for words, is_so in also.items() if is_so]
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
    rows = [(kind, results.clock(seconds)) for kind, seconds in spent.items()]
    out += ["## Where the time went\n", table(("kind", "wall-clock"), rows)]
    out += [f"{missing} session(s) recorded no times (killed, or still running).\n"] * (missing > 0)
    out += ["## What happened\n", table(("step", "event", ""), event_rows(run))]
    return "\n".join([*out, "## What was not exact\n", *not_exact(run), ""])


def should_be_equal(one, other):
    """Whether two runs have the same knobs, and other numbers."""
    knobs = [run.info["config"].items() for run in (one, other)]
    same, again = ({k: v for k, v in each if k not in ("out_dir", "resume")} for each in knobs)
    pairs = [(one.train[name], other.train[name]) for name in ("step", "loss", "grad_norm")]
    pairs += [(one.evals["val_loss"], other.evals["val_loss"])]
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in pairs]
    return same == again and not all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def compare_words(runs, names, image):
    """compare.md: one table of the settings and the results that differ, and what is wrong."""
    columns = []  # for each run, {what: value}
    for run in runs:
        told = {name: value for part in facts(run).values() for name, value in part.items()}
        config = {f"`{k}`": v for k, v in run.info["config"].items() if k not in told}
        config = {knob: value for knob, value in config.items() if not knob.endswith("_dir`")}
        rows = outcome(run, dollars_per_hour)
        found = {f"**{what}**": words for what, (words, _) in rows.items()}
        columns.append(told | config | found)
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
    events = event_steps(runs[0]) if len(runs) == 1 else {}
    lanes = {event: (LANES[event], steps) for event, steps in events.items() if event != "best"}
    names = names_of(runs) or [runs[0].name]
    return write(path, page(runs, names, map(best_words, runs), text_of(runs), lanes, refresh))


def text_of(runs, image=()):
    names = names_of(runs)
    return compare_words(runs, names, image) if names else words(runs[0], image)


def write_reports(runs, path):
    """Write the report of one run, or the comparison of several. Returns the paths."""
    pages = [write_page(runs, path.with_suffix(".html"))] if html or watch else []
    image = write_picture(path.with_suffix(".png"), runs, names_of(runs))
    return [*image, write(path.with_suffix(".md"), text_of(runs, image)), *pages]


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
        try:
            runs = list(map(read_run, folders))
            path = Path(report_dir or folders[0]) / ("report" if len(runs) == 1 else "compare")
            path.parent.mkdir(parents=True, exist_ok=True)
            if watch:
                follow(runs, path.with_suffix(".html"))
                runs = list(map(read_run, folders))
            paths = write_reports(runs, path)
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

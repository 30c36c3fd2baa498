"""
Reports on a run from the metrics.jsonl and run.json in its folder:

    python report.py out/shakespeare                # writes report.png and report.md there
    python report.py out/a out/b out/c              # writes compare.png and compare.md into out/a
    python report.py out/shakespeare --html=true    # also report.html (of several: compare.html)
    python report.py out/shakespeare --watch=true   # report.html, updated while the run continues

train.py calls write_report at the end of a run, unless --report=false. The report of a million
steps takes seconds. A field unknown to report.py, such as a fork's, gets a panel and a row.
"""

import io
import math
import os
import re
import shlex
import sys
import textwrap
import time
from hashlib import sha256
from html import escape
from pathlib import Path

import numpy as np

from plumbing.cli import configured, fail, read_knobs, run_script
from plumbing.files import replacing
from plumbing.reporting import page as report_page
from plumbing.reporting.outcome import (
    beside,
    clipped_share,
    duration,
    ended,
    epochs,
    number,
    outcome,
    seconds_by_kind,
)
from plumbing.reporting.record import (
    FIELDS,
    best_of,
    extent,
    half_window,
    happened,
    is_running,
    known,
    last_step,
    late_losses,
    new_fields,
    read_run,
    short,
    smooth,
    thin,
    unit,
)
from plumbing.reporting.troubles import troubles

report_dir = ""  # output folder; "" = that of the (first) run
dollars_per_hour = 0.0  # of one device, [0, inf); 0 = the run's --dollars_per_hour
html = False  # also write a page: one file that needs no network and no server
watch = False  # rewrite that page every 10 s while the run continues, and write all at its end

REPO = Path(__file__).resolve().parent
# Okabe & Ito's colours (2008): distinct for any colour vision, and in print
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, PALE_GREEN = "#0072B2", "#D55E00", "#CC79A7", "#8FD4BF"
# Events to draw: label, colour, marker, whether a line crosses all panels
LANES = {
    "best": ("best", VERMILION, "*", False),
    "resume": ("resume", BLUE, ">", True),
    "skipped": ("skip", ORANGE, "|", False),
    "rollback": ("rollback", PURPLE, "<", True),
    "diverging": ("diverging", GREEN, "^", False),
    "audit": ("audit", VERMILION, "P", True),
    "out_of_memory": ("out of memory", BLACK, "s", True),
    "save_failed": ("save failed", ORANGE, "D", False),
    "failed": ("failed", BLACK, "X", True),
}
# What may make the same command give other digits. matmul_bits: a hash of one matrix product
EXACTNESS = "device dtype matmul_bits compile deterministic threads world_size torch".split()
CSS = {BLACK: "black", ORANGE: "orange", GREEN: "green", BLUE: "blue", VERMILION: "vermilion"}
CSS |= {PURPLE: "purple"}  # colours of LANES as the page calls them
STYLE = """
    font.size=9 text.color=#222222 axes.labelcolor=#222222 axes.edgecolor=#666666
    axes.linewidth=0.8 axes.spines.top=False axes.spines.right=False axes.axisbelow=True
    axes.grid=True grid.color=#e6e6e6 grid.linewidth=0.7 xtick.color=#444444 ytick.color=#444444
    xtick.labelsize=8 ytick.labelsize=8 legend.frameon=False legend.fontsize=8
    legend.columnspacing=1.4
"""


def new_figure(width, height):
    from matplotlib.figure import Figure  # not pyplot, which keeps state and may need a display

    figure = Figure((width, height), dpi=160, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    return figure


def curve(ax, x, y, **looks):
    """A line. If it has few points, they get markers, so that a single one is visible."""
    marks = "o" if len(known(y)) < 15 else ""
    ax.plot(*thin(x, y), marker=marks, markersize=3.5, **looks)


def dots(ax, x, loss, colour, **looks):
    """Validation losses, joined by a line if there are more than three."""
    joined, marks = "-" if len(x) > 3 else "", "o" if len(x) <= 60 else ""
    looks |= {"color": colour, "markeredgecolor": "white", "markeredgewidth": 0.7, "zorder": 4}
    ax.plot(*thin(x, loss), joined + marks if len(x) else "", markersize=5.5, lw=1.6, **looks)


def scale(ax, values, log_from=math.inf):
    """From 0 up, or logarithmic if the values span more than a factor of `log_from`."""
    values = known(values)[known(values) > 0]
    top, span = (values.max(), values.max() / values.min()) if len(values) else (1, 1)
    if span > log_from:
        from matplotlib.ticker import LogLocator, NullFormatter

        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 200 else (1,)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        if span < 200:
            ax.yaxis.set_major_formatter(short)
    else:
        ax.set_ylim(0, 1.12 * top)


def legend(ax, **place):
    """Above the panel, where it hides nothing."""
    if ax.get_legend_handles_labels()[0]:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1)} | place
        ax.legend(ncols=4, borderaxespad=0.2, **place)


def raw_and_smooth(ax, run, column, pale, strong, what=""):
    step, values, half = run.train["step"], run.train[column], half_window(run)
    raw = {"color": pale, "lw": 0.7} if len(step) > 30 else {"color": strong, "lw": 1.5}
    curve(ax, step, values, label=f"{what}each step", **raw)
    if len(step) > 30:
        part = slice(None, None, max(1, half // 20))
        label = f"{what}mean of {2 * half + 1:,}"
        ax.plot(step[part], smooth(values, half)[part], color=strong, lw=1.8, label=label)


def draw_loss(ax, run):
    loss, e = run.train["loss"], run.evals
    raw_and_smooth(ax, run, "loss", SKY, BLUE, "training, ")
    tokens, same = extent(run)
    on = f", first {short(tokens)} {unit(run)}" if tokens else ", last on all" * (not same.all())
    dots(ax, e["step"], e["val_loss"], VERMILION, label=f"validation{on}")
    best, best_step = best_of(run)
    if math.isfinite(best):
        looks = {"color": VERMILION, "markersize": 13, "markeredgecolor": "white", "zorder": 5}
        ax.plot(best_step, best, "*", clip_on=False, label=f"best: {best:.4f}", **looks)
    values = known(np.concatenate([loss, e["val_loss"]]))
    if len(values) and values.max() > 30 * values.min():
        scale(ax, values, log_from=30)
    ax.set_ylabel("loss (nats)" if unit(run) == "tokens" else "loss")
    legend(ax)


def event_steps(run):
    """{event: steps} of the events in LANES that this run had."""
    losses = run.evals["val_loss"]
    failed = [row for row in happened(run, "end") if str(row.get("ended")).startswith("failed")]
    steps = {lane: [row["step"] for row in happened(run, lane)] for lane in LANES}
    better = losses <= np.fmin.accumulate(losses)
    steps["best"] = run.evals["step"][better & (run.evals["step"] > 0)]
    steps["skipped"] = np.union1d(steps["skipped"], run.train["step"][run.train["skipped"] > 0])
    steps["failed"] = [row["step"] for row in failed]
    return {lane: steps[lane] for lane in LANES if len(steps[lane])}


def draw_events(ax, panels, lanes):
    """A lane for each kind of event. Those that change a run's course also cross all panels."""
    for lane, (event, steps) in enumerate(lanes.items()):
        _, colour, marks, through = LANES[event]
        looks = {"color": colour, "markersize": 6, "markeredgewidth": 1.6 if marks == "|" else 0}
        ax.plot(steps, [lane] * len(steps), marks, clip_on=False, **looks)
        for panel in panels if through and len(steps) <= 40 else []:
            for step in steps:
                panel.axvline(step, color=colour, lw=0.9, ls=(0, (4, 3)), alpha=0.7, zorder=1)
    ax.set_yticks(range(len(lanes)), [LANES[event][0] for event in lanes])
    ax.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_speed(ax, t, per):
    """Throughput, and MFU on the right axis: a line of its own only if their ratio changed."""
    curve(ax, t["step"], t["tokens_per_sec"], color=BLUE, lw=1.2, label="throughput")
    scale(ax, t["tokens_per_sec"])
    ax.set_ylabel(f"throughput ({per}/s)")
    ax.yaxis.set_major_formatter(short)
    ratio = known(t["mfu"] / t["tokens_per_sec"])
    if not len(ratio):
        return ax.set_title("MFU n/a", loc="right", fontsize=8, pad=3)
    right = ax.twinx()
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    right.set_ylabel("MFU (% of peak)")
    right.set_ylim(0, 100 * ratio[0] * ax.get_ylim()[1])
    if ratio.max() > 1.02 * ratio.min():
        curve(right, t["step"], 100 * t["mfu"], color=VERMILION, lw=1, ls="--", label="MFU")
        scale(right, 100 * t["mfu"])
        legend(right)
        legend(ax, loc="lower left", bbox_to_anchor=(0, 1))


def picture(run):
    """report.png as a matplotlib Figure."""
    t, lanes, clip = run.train, event_steps(run), run.info["config"].get("grad_clip")
    new = new_fields(run)[:20]
    if len(known(t["gpu_util"])):
        new = [("GPU utilization (%)", t["step"], t["gpu_util"]), *new]
    lanes_high = 0.17 * max(1, len(lanes))
    rows = 2 + (1 + len(new)) // 2
    fig = new_figure(9, 4 + 2 * rows + lanes_high)
    grid = fig.add_gridspec(2 + rows, 2, height_ratios=[3.1, lanes_high] + [2] * rows)
    loss = fig.add_subplot(grid[0, :])
    events = fig.add_subplot(grid[1, :], sharex=loss)
    norm, rate, speed, memory, *more = panels = [
        fig.add_subplot(grid[2 + i // 2, i % 2], sharex=loss) for i in range(4 + len(new))
    ]
    draw_loss(loss, run)
    draw_events(events, [loss, *panels], lanes)
    loss.tick_params(labelbottom=False)

    raw_and_smooth(norm, run, "grad_norm", PALE_GREEN, GREEN)
    if clip:
        label = f"clip at {clip:g} ({clipped_share(run)} above)"
        norm.axhline(clip, color=BLACK, lw=1.2, ls="--", label=label)
    scale(norm, np.append(t["grad_norm"], clip or math.nan), log_from=10)
    norm.set_ylabel("gradient norm, unclipped")
    legend(norm)
    curve(rate, t["step"], t["lr"], color=PURPLE, lw=1.6)
    scale(rate, t["lr"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate.set_ylabel("learning rate (per step)")
    draw_speed(speed, t, unit(run))
    curve(memory, t["step"], t["mem_gb"], color=ORANGE, lw=1.8)
    scale(memory, t["mem_gb"])
    memory.set_ylabel("peak memory (GB)")
    for ax, (name, step, values) in zip(more, new, strict=True):
        curve(ax, step, values, color=BLUE, lw=1.2)
        ax.set_ylabel(name if len(name) <= 24 else name[:22] + "...")
        ax.yaxis.set_major_formatter(short)

    loss.set_xlim(-0.01 * max(1, last_step(run)), 1.01 * max(1, last_step(run)))
    for ax in [events, *panels]:
        ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(short)
        ax.xaxis.get_major_locator().set_params(integer=True)
    config, identity = run.info["config"], run.info["run"]
    facts = [run.info["data"].get("name"), identity.get("device"), identity.get("dtype")]
    if "n_layer" in config:
        facts.insert(1, f"{config['n_layer']} x {config['n_embd']} wide")
    heading = textwrap.shorten(f"{run.name}: {ended(run)}", 110, placeholder=" ...")
    heading += "\n" + ", ".join(str(fact) for fact in facts if fact)
    fig.suptitle(heading.strip(), x=0.01, ha="left", fontsize=10, linespacing=1.5)
    return fig


def compare_picture(runs, names):
    """compare.png as a matplotlib Figure: losses by step, tokens and time; the rest by step."""
    fig = new_figure(11, 7 + 0.2 * math.ceil(len(runs) / 3))
    axes = fig.subplots(2, 3, height_ratios=[3, 2])
    (by_step, by_tokens, by_time), (norm, rate, speed) = axes
    colours = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
    longest = max(known(run.train["step_ms"]).sum() for run in runs) / 1000
    scales = {"s": 1, "min": 60, "h": 3600}
    clock = [name for name, size in scales.items() if size == 1 or longest > 3 * size][-1]
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        t, e, half = run.train, run.evals, half_window(run)
        looks = {"color": colours[i % 7], "ls": ("-", "--", ":")[i // 7 % 3]}
        time = np.cumsum(np.nan_to_num(t["step_ms"])) / 1000 / scales[clock]
        for ax, x in ((by_step, t["step"]), (by_tokens, t["tokens"]), (by_time, time)):
            curve(ax, x, smooth(t["loss"], half), lw=1, alpha=0.55, **looks)
            dots(ax, np.interp(e["step"], [0, *t["step"]], [0, *x]), e["val_loss"], looks["color"])
        curve(norm, t["step"], smooth(t["grad_norm"], half), lw=1.2, **looks)
        curve(rate, t["step"], t["lr"], lw=1.2, **looks)
        curve(speed, t["step"], t["tokens_per_sec"], lw=1.2, **looks)
        norm.plot([], [], lw=2.5, label=f"{name}: best {number(best_of(run)[0])}", **looks)
    every = {key: np.concatenate([run.train[key] for run in runs]) for key in FIELDS["train"]}
    for ax in (by_tokens, by_time):
        ax.sharey(by_step)
        ax.tick_params(labelleft=False)
    heading = "Thick lines with dots: validation loss. Thin lines: training loss, smoothed."
    if len(known(every["loss"])) and np.nanmax(every["loss"]) > 30 * np.nanmin(every["loss"]):
        scale(by_step, every["loss"], log_from=30)
    elif late := [part for run in runs for part in late_losses(run) if len(part)]:
        low, high = min(part.min() for part in late), max(part.max() for part in late)
        by_step.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
        heading += " Losses in the first tenth of a run may be cut off."
    scale(norm, every["grad_norm"], log_from=30)
    scale(rate, every["lr"])
    scale(speed, every["tokens_per_sec"])
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    speed.yaxis.set_major_formatter(short)
    for ax in axes.flat:
        ax.set_xlabel("step")
        ax.xaxis.set_major_formatter(short)
    units = {unit(run) for run in runs}
    per = units.pop() if len(units) == 1 else "tokens"
    by_tokens.set_xlabel(f"{per} trained on")
    by_time.set_xlabel(f"training time ({clock})")
    by_step.set_ylabel("loss (nats)" if per == "tokens" else "loss")
    norm.set_ylabel("gradient norm, smoothed")
    rate.set_ylabel("learning rate (per step)")
    speed.set_ylabel(f"throughput ({per}/s)")
    fig.suptitle(heading, x=0.01, ha="left", fontsize=10)
    fig.legend(loc="outside lower left", ncols=3)
    return fig


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def html_table(header, rows):
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(header, "th")}{body}</table></div>'


def changed_knobs(run):
    """[(knob, value in this run, default in train.py)] where the two differ, without folders."""
    knobs, config, rows = read_knobs(REPO / "train.py"), run.info["config"], []
    for name, value in config.items():
        default = knobs[name][0] if name in knobs else "no longer a knob"
        as_default = name == "decay_steps" and value == config.get("max_steps")
        if value != default and not name.endswith("_dir") and not as_default:
            rows.append((f"`{name}`", f"`{value}`", f"`{default}`"))
    return rows


def about(run):
    """What was run, in Markdown."""
    info, identity, git = run.info, run.info["run"], run.info["git"]
    hardware, versions, data = info["hardware"], info["versions"], info["data"]
    meta = data.get("meta") or {}
    classes = "vocabulary" if unit(run) == "tokens" else "classes"
    facts = {"source": "source", "tokenizer": "tokenizer", "vocab_size": classes}
    text = "".join(f"; {word} {meta[key]}" for key, word in facts.items() if key in meta)
    commit = f"`{git['commit'][:12]}`" if git.get("commit") else "unknown"
    if git.get("dirty"):
        commit += f" with uncommitted changes (diff `{str(git.get('diff_sha256'))[:12]}`)"
    split = " x ".join(str(identity.get(k)) for k in ("batch_size", "accum_steps", "world_size"))
    batch = f"{identity.get('global_batch')} {unit(run)}"
    if unit(run) == "tokens":
        batch = f"{identity.get('global_batch')} sequences of {identity.get('block_size')} tokens"
    changed = ", ".join(changed_files(identity.get("code") or {}))
    knobs = changed_knobs(run)
    return f"""\
- **command** `{shlex.join(["python", *map(str, info.get("command", []))])}`
- **commit** {commit}
- **data** {data.get("name")}{text}; fingerprint `{data.get("fingerprint")}`
- **hardware** {hardware.get("world_size")} x {hardware.get("device")}; CPU {hardware.get("cpu")}, \
{hardware.get("threads")} threads
- **computed in** {identity.get("dtype")}; compiled: {identity.get("compile")}; deterministic: \
{identity.get("deterministic")}
- **versions** Python {versions.get("python")}, torch {versions.get("torch")}, CUDA {versions.get("cuda")}
- **a step** {split} = {batch}
- **when** {info.get("start")} to {info.get("end")}

{f"Changed since: {changed}. The defaults are those of today." if changed else ""}

{table(("knob", "here", "default"), knobs) if knobs else "Every knob is at its default."}"""


def changed_files(code):
    """Files whose SHA-256 is not that in `code`, {name: SHA-256}: changed or gone since."""
    now = {n: (REPO / n).read_bytes() if (REPO / n).is_file() else b"" for n in code}
    return [name for name, then in code.items() if sha256(now[name]).hexdigest() != then]


def event_rows(run, most=200):
    """[(step, event, details)] in the order of the events; consecutive skips share a row."""
    rows, before, skips = [], None, 0  # before: the previous event's step, if it was a skip
    for event in run.events:
        rest = {k: v for k, v in event.items() if k not in ("kind", "step", "event", "finite")}
        name, step = event["event"].replace("_", " "), event["step"]
        skips = (skips if before == step - 1 else 0) + 1 if name == "skipped" else 0
        before = step if skips else None
        if skips > 1:
            rows[-1] = (rows[-1][0], name, f"{skips} updates in a row, to step {step:,}")
        elif name == "end":
            rows.append((f"{step:,}", name, rest.get("ended")))
        elif name != "sample":
            details = "; ".join(f"{key} {value}" for key, value in rest.items())
            rows.append((f"{step:,}", name, textwrap.shorten(details, 400)))
    left = len(rows) - most
    return rows[:most] + ([("...", f"and {left:,} more", "")] if left > 0 else [])


def not_exact(run):
    """Lines on what may set this run apart from an uninterrupted one on one machine."""
    lines = []
    for event in happened(run, "inexact_resume"):
        for key, value in event.items():
            if isinstance(value, list) and len(value) == 2:
                then, now = value
                if isinstance(then, dict) and isinstance(now, dict):  # hashes of files
                    then, now = "other", ", ".join(k for k in now if now[k] != then.get(k))
                lines.append(f"- resumed at step {event['step']:,}: {key} was {then}, is {now}")
    for event in happened(run, "audit"):
        names = textwrap.shorten(", ".join(event.get("tensors") or []), 300)
        odd = f"the {event.get('odd')} result differed in {event.get('bits')} bits of {names}"
        lines.append(f"- step {event['step']:,} was audited: {odd}, and was dropped")
    if run.info["run"].get("deterministic") is False:
        lines.append("- `deterministic` was off: the same command may give different bits")
    if run.rows.unreadable:
        lines.append(
            f"- {run.rows.unreadable:,} damaged line(s) of metrics.jsonl are left out here"
        )
    if not run.info["run"]:
        lines.append("- run.json is missing or damaged: the settings of this run are unknown")
    return lines or ["Nothing on record: any resume was bit for bit."]


def words(run, image):
    """The text of report.md. image: whether there is a report.png."""
    (spent, missing), samples = seconds_by_kind(run), happened(run, "sample")
    asked, learned = run.info["config"].get("dataset"), run.info["data"].get("name")
    total, out = sum(spent.values()) or 1, [f"# {run.name}: {ended(run)}\n"]
    if learned and asked != learned:
        out += [f"> **This run trained on {learned!r} INSTEAD OF {asked!r}, which was unavailable:"]
        out += [f"> its numbers say nothing about {asked!r}.**\n"]
    out += ["![Curves of this run](report.png)\n"] if image else []
    rows = [(f"**{what}**", *words) for what, words in outcome(run, dollars_per_hour).items()]
    out += ["## Result\n", table(("", "", "over"), rows)]
    out += ["## Known troubles\n"]
    for each in (found := troubles(run)):
        out += [f"- **{each.title}** (`{each.name}`): {each.shows}. Likely causes: {each.causes}."]
        out += [f"  Tell them apart: `{each.tell}` ({each.reading})."] if each.tell else []
        out += [f"  Try: {each.cure}."] if each.cure else []
    more = "docs/trouble.md has more on each, under its name.\n"
    out += [f"\n{more}" if found else "The curves show none that report.py knows.\n"]
    if len(means := epochs(run)) > 1:
        out += ["## Means by epoch\n", table(means[0], means[1:])]
    out += ["## What was run\n", about(run) if run.info["run"] else "Not on record.\n"]
    out += ["## Where the time went\n"]
    rows = [(kind, duration(each), f"{each / total:.1%}") for kind, each in spent.items()]
    out += [table(("kind", "wall-clock", "share"), rows)] if rows else []
    if missing:
        trained = duration(known(run.train["step_ms"]).sum() / 1000)
        out += [f"{missing} session(s) recorded no times (killed, or still running). All steps in"]
        out += [f"metrics.jsonl together took {trained}.\n"]
    out += ["## What happened\n", table(("step", "event", ""), event_rows(run))]
    out += ["## What was not exact\n", *not_exact(run), ""]
    if samples:
        text = str(samples[-1].get("text"))
        fence = max(re.findall("~+", text), key=len, default="") + "~~~"
        out += [f"## A sample, from step {samples[-1]['step']:,}\n", fence, text, fence, ""]
    return "\n".join(out)


def compare_words(runs, names, image):
    """compare.md: one table of the settings and the results that differ."""
    rows = {
        "data": [run.info["data"].get("fingerprint") for run in runs],
        "commit": [str(run.info["git"].get("commit"))[:12] for run in runs],
        "cpu": [run.info["hardware"].get("cpu") for run in runs],
        **{key: [run.info["run"].get(key) for run in runs] for key in EXACTNESS},
    }
    out = ["# " + ", ".join(names) + "\n"]
    if len(set(rows["data"])) > 1:
        out += ["> **These runs trained on different data: their losses cannot be compared.**\n"]
    if len(set(rows["device"])) > 1:
        out += ["> These runs ran on different devices: compare their times with care.\n"]
    out += ["![Curves of these runs](compare.png)\n"] if image else []
    for knob in dict.fromkeys(knob for run in runs for knob in run.info["config"]):
        if not knob.endswith("_dir") and knob not in EXACTNESS:  # which has the resolved values
            rows[f"`{knob}`"] = [run.info["config"].get(knob, "n/a") for run in runs]
    outcomes = [outcome(run, dollars_per_hour) for run in runs]
    for what in dict.fromkeys(what for each in outcomes for what in each):
        rows[f"**{what}**"] = [each.get(what, ("n/a",))[0] for each in outcomes]
    rows["**training loss**"] = ["", *(beside(run, runs[0]) for run in runs[1:])]
    rows = [(what, *each) for what, each in rows.items() if len(set(map(str, each))) > 1]
    return "\n".join([*out, table(("", *names), rows)])


def save(path, content):
    with replacing(path) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def draw(path, picture, *args):
    """Write a picture. Returns [path]; without matplotlib, [] and a line on stderr."""
    try:
        import matplotlib
    except ImportError:
        print("report: no picture; type: pip install matplotlib", file=sys.stderr)
        return []
    with matplotlib.rc_context(dict(pair.split("=") for pair in STYLE.split())):
        content = io.BytesIO()
        picture(*args).savefig(content, format="png")
    return [save(path, content.getvalue())]


def report_on(runs, folder):
    """Write the report of one run, or the comparison of several. Returns the paths."""
    with np.errstate(divide="ignore", invalid="ignore"):  # unknown values are NaN, shown as "n/a"
        paths = [save_page(runs, folder)] if html or watch else []
        if len(runs) == 1:
            image = draw(folder / "report.png", picture, runs[0])
            return [*image, save(folder / "report.md", words(runs[0], image)), *paths]
        names = names_of(runs)
        image = draw(folder / "compare.png", compare_picture, runs, names)
        return [*image, save(folder / "compare.md", compare_words(runs, names, image)), *paths]


def names_of(runs):
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def save_page(runs, folder, refresh=0):
    """Write report.html or compare.html. refresh: seconds until it is rewritten; 0 = never."""
    names = names_of(runs)
    outcomes = [outcome(run, dollars_per_hour) for run in runs]
    alone = len(runs) == 1
    texts = {}  # heading: HTML
    for run, name in zip(runs, names, strict=True):
        found = "".join(
            f'<p class="trouble"><b>{escape(each.title)}</b>: {escape(each.shows)}. Likely causes: '
            f"{escape(each.causes)}."
            + (f" Try: {escape(each.cure)}." if each.cure else "")
            + (f"\n<code>{escape(each.tell)}</code>" if each.tell else "")
            + "</p>"
            for each in troubles(run)
        )
        heading = "Known troubles" + f": {name}" * (not alone)
        texts[heading] = found or "<p>None that report.py knows.</p>"
    whats = dict.fromkeys(what for each in outcomes for what in each)
    rows = [[what, *(each.get(what, ("n/a",))[0] for each in outcomes)] for what in whats]
    over = [outcomes[0][what][1] for what in whats] if alone else []
    rows = [[*row, window] for row, window in zip(rows, over, strict=True)] if alone else rows
    texts["Result"] = html_table(("", "", "over") if alone else ("", *names), rows)
    if alone and len(means := epochs(runs[0])) > 1:
        texts["Means by epoch"] = html_table(means[0], means[1:])
    for run, name in zip(runs, names, strict=True):
        for sample in happened(run, "sample")[-1:]:
            heading = f"A sample, from step {sample['step']:,}" + f": {name}" * (not alone)
            texts[heading] = f"<pre>{escape(str(sample.get('text')))}</pre>"
    lanes = {
        event: (LANES[event][0], CSS[LANES[event][1]], steps)
        for event, steps in (event_steps(runs[0]).items() if alone else ())
        if event != "best"
    }
    content = report_page.page(runs, names, texts, lanes, refresh)
    return save(folder / ("report.html" if alone else "compare.html"), content)


def follow(runs, folder, every=10):
    """Write the page every `every` seconds, or less often if that would take over 1% of the time,
    until no run is active. Returns the runs as they are then."""
    pause = every
    name = "report.html" if len(runs) == 1 else "compare.html"
    print(f"open {os.path.relpath(folder / name)} in a browser; Ctrl-C stops it", flush=True)
    try:
        while any(map(is_running, runs)):
            start = time.perf_counter()
            runs = [read_run(run.folder, run.rows) for run in runs]
            with np.errstate(divide="ignore", invalid="ignore"):
                save_page(runs, folder, refresh=pause)
            pause = max(every, 100 * (time.perf_counter() - start))
            time.sleep(pause)
    except KeyboardInterrupt:
        pass
    return [read_run(run.folder, run.rows) for run in runs]


def write_report(folder):
    """For train.py: report.png and report.md of the run in `folder`. Returns their paths.

    Never raises: if the report fails, prints a line on stderr and returns [].
    """
    try:
        return report_on([read_run(folder)], Path(folder))
    except Exception as error:
        print(f"report: not written ({type(error).__name__}: {error})", file=sys.stderr)
        return []


def main(argv=None):
    folders = []
    with configured(globals(), argv=argv, names=folders):
        if not folders:
            fail("no run is named; type: python report.py out/NAME [out/OTHER ...]")
        try:
            runs = [read_run(folder) for folder in folders]
            to = Path(report_dir or folders[0])
            to.mkdir(parents=True, exist_ok=True)
            if watch:
                runs = follow(runs, to)
            paths = report_on(runs, to)
        except ValueError as error:
            fail(error)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}; --report_dir=FOLDER writes elsewhere")
    for run in runs:
        print(f"{run.name}: {ended(run)}; best validation loss {number(best_of(run)[0])}")
        for trouble in troubles(run):
            print(f"  {trouble.title}: {trouble.shows}")
    print("wrote " + ", ".join(map(os.path.relpath, paths)))


if __name__ == "__main__":
    sys.exit(run_script(main))

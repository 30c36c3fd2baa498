"""Results and curves of runs, from the run.json and metrics.jsonl in their folders.

    python report.py                          # a table of the runs in out/
    python report.py out/shakespeare          # write report.png and report.md there
    python report.py out/a out/b out/c        # compare runs: write out/compare.png and compare.md
    python report.py out                      # compare all runs in a folder
    python report.py out/a out/b --axis=time  # curves by training time instead of steps

Runs that differ only in their seed are one setting, a row of the table: mean ± standard deviation
(n seeds). A setting is named by the knobs in which it differs from most others. Ranked are finished
runs of the same data, eval_tokens, best_metric and max_steps; the others are listed below them. Set
DOLLARS_PER_HOUR, the price of one device, to see what a run has cost.
"""

import math
import os
import re
import shlex
import shutil
import textwrap
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, harmonic_mean, median, mode, stdev

import numpy as np

from plumbing import (
    FIELDS,
    configured,
    duration,
    exit_process,
    fail,
    print0,
    printable,
    read_json,
    read_rows,
    replacing,
    show,
    shown,
)

axis = "auto"  # horizontal axis of the curves; auto = step, or tokens if batches differ
to = ""  # picture to write, .png, .pdf or .svg, with an .md beside it; "" = see above

TITLES = {  # of the panels; a fork's own numbers are called by their names
    "loss": "loss (nats)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_sec": "throughput (tokens/s)",
    "mem_gb": "memory (GB)",
    "gpu_util": "GPU busy (%)",
    "loss_scale": "loss scale",
    "val_loss": "validation loss (nats)",
    "val_accuracy": "accuracy",
}
CHOICES = {"axis": ("auto", "step", "tokens", "time")}

COMPARABLE = ("data", "eval_tokens", "best_metric", "max_steps")  # equal in all that is ranked
RESOLVED = ("warmup_steps", "decay_steps")  # knobs that max_steps may change
ABSENT = "absent"  # shown for a knob that a run does not have


def main(argv: list[str] | None = None) -> None:
    words = []
    with configured(globals(), argv=argv, words=words):
        runs = read_runs(words or ["out"])
        settings = settings_of(runs)
        left_out = name_and_sort(settings)
        lines = conclusions(settings, left_out)
        width = shutil.get_terminal_size((10**6, 24)).columns  # a pipe has room
        print0(table(*rows_of(settings), width))
        print0("\n".join(lines))
        if words and len(runs) == 1:
            write(runs[0].folder / "report.png", settings, lines, run_text(runs[0]))
        elif words:
            path = runs[0].folder.resolve().parent / "compare.png"
            write(path, settings, lines, table(*rows_of(settings)))


# ---- a run: what its folder holds ----------------------------------------------------------------


@dataclass(eq=False)
class Run:
    """What a run has written."""

    folder: Path
    facts: dict  # run.json; what its parts hold as well
    knobs: dict  # those of its identity; {} if that is not known
    rows: list[dict]  # of metrics.jsonl
    columns: dict  # {(kind, field): its steps and values, where it is a finite number}

    @property
    def setting(self):
        """All on which the result depends but the seed; what max_steps resolves as it was typed."""
        asked = section(self.facts, "asked")
        setting = self.knobs | {name: asked[name] for name in RESOLVED if name in asked}
        setting.pop("seed", None)
        return setting | {
            "max_steps": self.facts.get("max_steps"),
            "script": self.facts.get("script"),
            "data": str(self.facts.get("fingerprint"))[:8],
        }

    @property
    def metric(self):
        """The field of evaluations that decides which is the best."""
        return self.facts["best_metric"].removeprefix("-")

    @property
    def sign(self):
        """-1 if a higher value of the metric is better."""
        return -1 if self.facts["best_metric"].startswith("-") else 1

    @property
    def best(self):
        """Score and step of the best evaluation. The score is `sign` times the metric, so the lowest
        is the best; inf if there is none."""
        steps, values = self.points("eval", self.metric)
        return min(zip(self.sign * values, steps, strict=True), default=(math.inf, 0))

    @property
    def ended(self):
        """How it ended, and at which step."""
        how = str(self.facts.get("ended") or "running or killed").split(". ")[0]
        return f"{how} at step {max(self.points('train', 'step')[0], default=0):,.0f}"

    @property
    def problem(self):
        """Why its result is not that of its setting; "" if it is."""
        if not self.knobs:
            return "knobs not known"
        for event in self.resumes:
            changed = self.knobs.keys() & section(event, "changed").keys()
            if changed:
                return f"{', '.join(sorted(changed))} changed at step {event['step']:,}"
        if not self.ended.startswith(("finished", "stopped early")):
            return "not finished"
        return "" if self.best[0] < math.inf else "no evaluation"

    @property
    def resumes(self):
        return [row for row in self.rows if row.get("event") == "resume"]

    def points(self, kind, name):
        """(steps, values) of a field in the rows of a kind."""
        return self.columns.get((kind, name), np.empty((2, 0)))


def read_runs(words: list[str]) -> list[Run]:
    """The runs in these folders, or one level below them. Raises BadInput if there is none."""
    runs = []
    for word in words:
        path = Path(word)
        found = [read_run(each) for each in (path, *sorted(path.glob("*"))) if is_run(each)]
        runs += found
        if not found:
            print0(f"left out: no run in {word}")
    if not runs:
        fail(f"no run in {', '.join(words)}; expected the out_dir of a run of train.py")
    return runs


def is_run(folder):
    return (folder / "run.json").exists() or (folder / "metrics.jsonl").exists()


def read_run(folder: Path) -> Run:
    info = read_json(folder / "run.json")
    facts = {"best_metric": "val_loss", "world_size": 1}
    parts = [section(info, name) for name in ("config", "data", "run", "state", "identity")]
    for part in (*parts, info):
        facts |= {name: value for name, value in part.items() if value is not None}
    # a run that was stopped logs two steps past its checkpoint, for its resume to compare
    end = facts.get("step", math.inf) if facts.get("ended") else math.inf
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] <= end]
    return Run(folder, facts, section(facts, "knobs"), rows, columns_of(rows))


def columns_of(rows):
    pairs = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if is_number(value):
                pairs[row["kind"], name].append((row["step"], value))
    return {key: np.array(each, float).T for key, each in pairs.items()}


def section(facts, name):
    """A dict in a dict; {} if it is missing or damaged."""
    return facts[name] if isinstance(facts.get(name), dict) else {}


def is_number(value):
    return isinstance(value, int | float) and math.isfinite(value)


# ---- settings: runs that differ only in their seed -----------------------------------------------


@dataclass(eq=False)
class Setting:
    """Runs that differ only in their seed, or one run that has a problem."""

    run: Run  # the first of them
    runs: list[Run]
    problem: str  # why it is not ranked; "" = it is
    name: str = ""

    @property
    def scores(self):
        return [run.best[0] for run in self.runs]

    @property
    def result(self):
        text = f"{self.run.sign * fmean(self.scores):.4f}".replace("inf", "no evaluation")
        if len(self.runs) > 1:
            text += f" ± {stdev(self.scores):.4f} (n={len(self.runs)})"
        return text


def settings_of(runs: list[Run]) -> list[Setting]:
    """Group runs by all knobs but the seed. The order of `runs` does not matter."""
    settings = {}
    seeds = set()
    for run in sorted(runs, key=lambda run: str(run.folder)):
        key = str(sorted(run.setting.items()))
        seed = f"{key} {run.knobs.get('seed')}"
        problem = run.problem or ("same seed again" if seed in seeds else "")
        if problem:
            key = run.folder
        else:
            seeds.add(seed)
        settings.setdefault(key, Setting(run, [], problem)).runs.append(run)
    return list(settings.values())


def name_and_sort(settings):
    """Name settings by the knobs in which they differ from most others, and put the best first.
    Returns what the names leave out."""
    left_out = []
    known = [setting for setting in settings if setting.run.knobs]
    for knob in dict.fromkeys(knob for setting in known for knob in setting.run.setting):
        values = [show(setting.run.setting.get(knob, ABSENT)) for setting in known]
        usual = mode(values)
        count = values.count(usual)
        is_left_out = 2 * count > len(values)
        if is_left_out and count < len(values):
            left_out.append(f"{knob}={usual}")
        for setting, value in zip(known, values, strict=True):
            if value != usual or not is_left_out:
                setting.name = f"{setting.name} {knob}={value}".strip()
            if value != usual and knob in COMPARABLE:
                setting.problem = setting.problem or f"other {knob}"
    for setting in settings:
        folder = setting.run.folder.resolve().name
        setting.name = setting.name or re.sub(",seed=[^,]*", "", folder)
    settings.sort(key=lambda s: (s.problem != "", s.problem.startswith("other"), fmean(s.scores)))
    return left_out


# ---- conclusions ---------------------------------------------------------------------------------


def conclusions(settings, left_out):
    """What the runs say, a line for each thing."""
    best = settings[0]
    lines = [f"{best.name}: best {best.run.metric} {best.result}, {best.run.ended}"]
    ranked = [setting for setting in settings if not setting.problem]
    if len(ranked) > 1:
        second = ranked[1]
        ahead = f"{fmean(second.scores) - fmean(best.scores):.4f}"
        if min(len(best.runs), len(second.runs)) > 1:
            errors = [stdev(each.scores) / math.sqrt(len(each.scores)) for each in (best, second)]
            ahead += f" ± {math.hypot(*errors):.4f} (standard error of the difference)"
        lines += [f"It is ahead of {second.name} by {ahead}.", *edges(ranked)]
    if left_out:
        lines.append(f"Names leave out what most settings have: {' '.join(left_out)}.")
    return lines


def edges(ranked):
    """Of which knobs the best setting has the highest or the lowest of at least three numbers."""
    lines = []
    for name, value in ranked[0].run.setting.items():
        tried = {setting.run.setting.get(name) for setting in ranked}
        if len(tried) > 2 and all(map(is_number, tried)):
            ends = {min(tried): "lowest", max(tried): "highest"}
            if value in ends and value != 0:  # 0 is off: nothing lies beyond it
                lines.append(
                    f"{name}={show(value)} is the best and the {ends[value]} of {len(tried)} "
                    "tried: the best may lie beyond it."
                )
    return lines


# ---- results in words ----------------------------------------------------------------------------


def last(values):
    return values[-1]


RESULTS = (  # what, kind of rows, field, statistic, format
    ("last val_loss", "eval", "val_loss", last, "{:.4f}"),
    ("tokens", "train", "tokens", last, "{:,.0f}"),
    ("epochs", "train", "epoch", last, "{:.2f}"),
    ("tokens/s", "train", "tokens_per_sec", harmonic_mean, "{:,.0f}"),  # over time
    ("median step, ms", "train", "step_ms", median, "{:.1f}"),
    ("waiting for data, ms a step", "train", "data_ms", fmean, "{:.1f}"),
    ("MFU", "train", "mfu", harmonic_mean, "{:.1%}"),
    ("peak memory, GB", "train", "mem_gb", max, "{:.2f}"),
    ("GPU utilization, %", "train", "gpu_util", fmean, "{:.0f}"),
    ("steps skipped", "train", "skipped", sum, "{:.0f}"),
)


def results_of(run: Run):
    """{what: result}; what is not known is left out."""
    results = {"how it ended": run.ended}
    score, step = run.best
    if score < math.inf:
        results[f"best {run.metric}"] = f"{run.sign * score:.4f} at step {step:,.0f}"
    own = [(f"last {name}", kind, name, last, "{:.5g}") for kind, name in own_fields(run)]
    for what, kind, name, statistic, form in [*RESULTS, *own]:
        values = run.points(kind, name)[1]
        if len(values):
            results[what] = form.format(statistic(values))
    seconds = sum(filter(is_number, section(run.facts, "seconds").values()))
    seconds = max(seconds, sum(run.points("train", "step_ms")[1]) / 1000)
    hours = seconds / 3600 * run.facts["world_size"]
    least = "" if run.facts.get("ended") else "at least "
    results["wall time, start included"] = least + duration(seconds)
    results["device-hours"] = f"{least}{hours:,.3f}"
    with suppress(KeyError, ValueError):  # no price
        results["cost"] = f"{least}${hours * float(os.environ['DOLLARS_PER_HOUR']):,.2f}"
    return results


def own_fields(run):
    """[(kind, name)] of the numbers that only a fork logs."""
    return [
        (kind, name)
        for kind, name in sorted(run.columns)
        if kind != "event" and name not in FIELDS and not name.startswith("best_")
    ]


def rows_of(settings):
    """(header, rows) of their table."""
    rows = []
    for setting in settings:
        run = setting.run
        results = results_of(run)
        ended = run.ended
        if setting.problem:
            ended += f"; not ranked: {setting.problem}"
        if len({str(each.facts.get("code")) for each in setting.runs}) > 1:
            ended += "; code differs"
        numbers = (results.get("tokens/s", "n/a"), results["wall time, start included"])
        rows.append((setting.name, setting.result, ended, *numbers, shown(run.folder)))
    return ("setting", "best", "how it ended", "tokens/s", "wall time", "folder"), rows


# ---- files ---------------------------------------------------------------------------------------


def run_text(run: Run) -> str:
    """The Markdown of a run."""
    happened = [
        (f"{row['step']:,}", row["event"], str(row.get("text", "")))
        for row in run.rows
        if row["kind"] == "event" and row["event"] not in ("saved", "sample")
    ]
    defaults = section(run.facts, "defaults")
    knobs = [
        (name, show(defaults.get(name)), show(value))
        for name, value in section(run.facts, "config").items()
        if value != defaults.get(name)
    ]
    command = shlex.join(["python", *run.facts.get("command", [])])
    sections = {
        "Result": table(("what", "result"), results_of(run).items()),
        "What happened": table(("step", "event", ""), happened),
        "What was run": f"`{command}`\n\n{table(('knob', 'default', 'here'), knobs)}",
    }
    return "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())


def table(header, rows, width=10**6):
    """A Markdown table. Where it is wider than `width` it loses columns on the right, down to three,
    and then cells go on below."""
    cells = [
        [" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (header, *rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 3 * len(widths) >= width and max(widths) > 8:
        if len(widths) > 3:
            widths.pop()
        else:
            widths[widths.index(max(widths))] -= 1
    cells.insert(1, ["-" * each for each in widths])
    lines = []
    for row in cells:
        parts = [textwrap.wrap(cell, n) for cell, n in zip(row, widths, strict=False)]
        for line in zip_longest(*parts, fillvalue=""):
            lines.append(f"| {' | '.join(map(str.ljust, line, widths))} |")
    return "\n".join(lines)


def write(path, settings, lines, text):
    """Write the picture and the Markdown beside it."""
    import matplotlib  # takes half a second

    path = Path(to or path)
    if path.suffix not in (".png", ".pdf", ".svg"):
        fail(f"--to={to}: expected a name that ends in .png, .pdf or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE), replacing(path) as file:
        draw(settings, lines[0]).savefig(file, format=path.suffix[1:])
    page = path.with_suffix(".md")
    with replacing(page) as file:
        text = "\n\n".join([*lines, f"![Curves]({path.name})", text])
        file.write(printable(text).encode(errors="replace"))
    print0(f"{shown(path)}\n{shown(page)}")


# ---- the picture ---------------------------------------------------------------------------------

# Okabe and Ito (2008): distinct for any colour vision, and in print
VERMILION = "#D55E00"
COLOURS = ("#0072B2", VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PALE = "#A6CBE8"  # of single steps
GREY = "#BBBBBB"  # of settings that have none of the colours
STYLE = {
    "font.size": 9,
    "lines.linewidth": 1.3,
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.xmargin": 0.01,
    "grid.color": "#E8E8E8",
    "legend.frameon": False,
}
AXES = {"step": "step", "tokens": "tokens trained on", "time": "training time (minutes)"}
COLUMNS = 3  # small panels in a row
MAX_POINTS = 2000  # of a line
MAX_DOTS = 40  # points of a line that are marked


def draw(settings, title):
    """A matplotlib Figure of one run, or of settings: a wide panel, and small ones below it."""
    from matplotlib.figure import Figure  # pyplot would keep it

    runs = [run for setting in settings for run in setting.runs]
    by = axis
    if axis == "auto":  # a step is not the same where batches differ
        by = "tokens" if len({run.knobs.get("batch") for run in runs}) > 1 else "step"
    kinds = {name: "eval" if name.startswith("val_") else "train" for name in TITLES}
    fields = [(kind, name) for name, kind in kinds.items() if name != "val_loss"]
    if len(runs) == 1:
        fields += own_fields(runs[0])
    else:
        fields = [("eval", runs[0].metric), *fields[:3]]
    fields[1:] = [field for field in fields[1:] if any(field in run.columns for run in runs)]
    rows = 2 + math.ceil((len(fields) - 1) / COLUMNS)
    figure = Figure((10, 2 * rows))
    figure.suptitle(textwrap.fill(title, 110), x=0.01, ha="left")
    for i, field in enumerate(fields):
        spot = 2 * COLUMNS + i if i else (1, 2 * COLUMNS)
        ax = figure.add_subplot(rows, COLUMNS, spot)
        draw_field(ax, settings, field, by)
        if len(runs) == 1 and i == 0:
            draw_field(ax, settings, ("eval", "val_loss"), by)
            draw_events(ax, runs[0], by)
        finish(ax, field[1], by)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=COLUMNS
    )
    return figure


def draw_field(ax, settings, field, by):
    """A line for each run in the colour of its setting: of training the running mean."""
    is_one = len(settings) == len(settings[0].runs) == 1
    for i, setting in enumerate(settings):
        colour = GREY
        label = "other settings" if i == len(COLOURS) else ""
        if i < len(COLOURS):
            colour = COLOURS[i]
            rank = ", not ranked" if setting.problem else ""
            label = textwrap.fill(f"{setting.name}: {setting.result}{rank}", 40)
        for run in setting.runs:
            steps, values = run.points(*field)
            x = place(run, steps, by)
            if field[0] == "train" and len(x):
                if is_one:
                    draw_line(ax, x, values, color=PALE, lw=0.8, label="training, each step")
                    label = "training, running mean"
                count = 1 + len(x) // 50
                values = np.convolve(values, np.full(count, 1 / count), "valid")
                x = x[count // 2 :][: len(values)]
            elif is_one:
                colour = VERMILION
                label = "validation"
            draw_line(ax, x, values, color=colour, label=label, zorder=3 - i / 99)
            label = ""


def draw_events(ax, run, by):
    """The best evaluation of a run, and lines where it was resumed or a step was skipped."""
    steps, losses = run.points("eval", "val_loss")
    best = steps == run.best[1]
    if any(best):
        ax.plot(
            place(run, steps[best], by),
            losses[best],
            "*",
            color=VERMILION,
            ms=13,
            mec="white",
            clip_on=False,
            zorder=4,
            label="best",
        )
    steps, skipped = run.points("train", "skipped")
    resumes = [event["step"] for event in run.resumes]
    for label, at, look in (("resumed", resumes, "--"), ("step skipped", steps[skipped == 1], ":")):
        if len(at):
            ax.vlines(
                place(run, at, by),
                0,
                1,
                transform=ax.get_xaxis_transform(),
                color="#555555",
                ls=look,
                label=label,
            )


def draw_line(ax, x, y, **looks):
    """Of each stretch of a long line the lowest and the highest point stay: no peak is lost."""
    if len(x) > MAX_POINTS:
        first = np.linspace(0, len(x), MAX_POINTS // 2, endpoint=False).astype(int)
        x = np.repeat(x[first], 2)
        y = np.ravel([np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)], order="F")
    ax.plot(x, y, marker="o" if len(x) <= MAX_DOTS else "", ms=3.5, **looks)


def place(run, steps, by):
    """Where steps of a run lie on the axis."""
    at, places = run.points("train", "step_ms" if by == "time" else by)
    if by == "time":
        places = np.cumsum(places) / 60_000
    return np.interp(steps, [0, *at], [0, *places])


def finish(ax, name, by):
    """Label the axes, and fit them to what comes after a tenth of each line: the first steps would
    press the rest flat."""
    late = []
    for line in ax.lines:
        x, y = line.get_data()
        late.append(y[x >= 0.1 * max(x, default=0)].tolist())
    is_loss = "loss" in name
    better = (len(late) + 3) // 2 if is_loss else None  # of many settings only the better half
    low = np.quantile(sum(late, []) or [0, 1], 0.002)
    high = np.quantile(sum(late[:better], []) or [0, 1], 0.998)
    if not is_loss:
        low = min(low, 0)
    pad = 0.05 * (high - low) or 1
    ax.set(xlabel=AXES[by], ylabel=TITLES.get(name, name), ylim=(low - pad, high + pad))


if __name__ == "__main__":
    exit_process(main())

"""The results of a run, in numbers and words: its best, its speed, its cost. Runs side by side: what
each is called, which of them have one setting, and which setting is the best.

A setting is all on which a result depends but the seed. Its result is the mean over seeds."""

import math
import os
from collections import Counter
from contextlib import suppress
from statistics import mode

import numpy as np

from plumbing.cli import line_width, show
from plumbing.console import duration, shown
from plumbing.fields import FIELDS, Field
from reporting.record import (
    is_running,
    known,
    last,
    last_step,
    mean,
    median,
)

HEADER = ("run", "best", "how it ended", "tokens/s", "folder")  # of a row for each setting
WIDEST = 48  # characters to which a column of a table is filled up


def happened(run, *events):
    return [row for row in run.events if row["event"] in events]


def ended(run):
    """How a run ended, in a few words, and at which step; of one that goes on, what is left."""
    step = f"at step {last_step(run):,}"
    for row in happened(run, "resume", "end")[-1:]:
        if row["event"] == "end":
            how = str(row.get("ended")).split(". ")[0]
            return how if "at step" in how else f"{how}, {step}"
    if not is_running(run):
        return f"no end on record (killed), {step}"
    total = run.fact("max_steps")
    seconds = (total - last_step(run)) * median(run.train["step_ms"]) / 1000
    if seconds >= 0:
        step += f" of {total:,.0f}, {duration(seconds)} left"
    return f"running, {step}"


def metric_of(run):
    """(field, sign: -1 if higher is better, words) of the metric that decides which is the best."""
    knob = run.facts.get("best_metric", "val_loss")
    field = knob.removeprefix("-")
    return field, 1 if knob == field else -1, field.replace("val_loss", "validation loss")


def best_of(run):
    """(value, step) of the best evaluation ; an infinite one at 0 if there is none."""
    field, sign, _ = metric_of(run)
    scores = np.append(sign * run.evals.get(field, np.array([])), math.inf)
    steps = np.append(run.evals["step"], 0)
    best = np.nanargmin(scores)
    return sign * scores[best], int(steps[best])


def best_in_words(run):
    best, _ = best_of(run)
    if not math.isfinite(best):
        return "no evaluation"
    return f"best {metric_of(run)[2]} {best:,.4f}"


def new_fields(run):
    """[(Field, values)] of the numbers that only a fork of train.py writes."""
    found = []
    for kind, table in (("train", run.train), ("eval", run.evals)):
        for name, values in table.items():
            if name not in FIELDS and not name.startswith("best_"):
                found.append((Field(name, kind, plot=name), values))
    return found


def resumes(run):
    """How often it was resumed. A run that began from another one has logged that as a resume."""
    return max(0, len(happened(run, "resume")) - bool(run.facts.get("began_from")))


def time_spent(run):
    """(seconds of all processes, "at least " if one of them recorded none: it was killed, or is
    running, and took at least its steps)."""
    recorded = [sum(row["seconds"].values()) for row in happened(run, "end") if "seconds" in row]
    if len(recorded) > resumes(run):
        return sum(recorded), ""
    steps = known(run.train["step_ms"]).sum() / 1000
    return max(sum(recorded), steps), "at least "


def outcome(run):
    """{what: the result in words}, in order. What is unknown is left out."""
    seconds, least = time_spent(run)
    devices = max(1, np.nan_to_num(run.fact("world_size")))
    hours = devices * seconds / 3600
    numbers = losses(run) + costs(run)
    for field, values in new_fields(run):
        numbers.append((f"last {field.name}", last(known(values)), "{:,.4g}"))
    numbers.append(("device-hours", hours, least + "{:,.3f}"))
    with suppress(KeyError, ValueError):  # no price, or no number
        price = float(os.environ["DOLLARS_PER_HOUR"])
        numbers.append((f"cost at ${price:g} an hour", price * hours, least + "${:,.2f}"))
    found = {"how it ended": ended(run), "wall time, start included": least + duration(seconds)}
    found["device"] = run.facts.get("device", "unknown")
    for what, value, form in numbers:
        if math.isfinite(value):
            found[what] = form.format(value)
    return found


def losses(run):
    """[(what, number, format)] of what was learned."""
    evals = run.evals
    best, best_step = best_of(run)
    at_best = evals["step"] == best_step
    count = 2 * run.half + 1
    training = run.train["loss"][-count:]
    return [
        ("parameters", run.fact("parameters"), "{:,.0f}"),
        ("tokens trained on", last(run.train["tokens"]), "{:,.0f}"),
        (f"best {metric_of(run)[2]}", best, f"{{:,.4f}} at step {best_step:,}"),
        ("last validation loss", last(evals["val_loss"]), "{:,.4f}"),
        ("bits per byte at the best", mean(evals["val_bpb"][at_best]), "{:.4f}"),
        ("accuracy at the best", mean(evals["val_accuracy"][at_best]), "{:.2%}"),
        ("mean training loss", mean(training), f"{{:,.4f}} in the last {count:,} steps"),
    ]


def costs(run):
    """[(what, number, format)] of what the steps cost, and of events."""
    t = run.train
    speed = 1 / mean(1 / t["tokens_per_sec"])  # over time, as steps do as much each
    return [
        ("epochs", last(t["epoch"]), "{:,.2f}"),
        ("throughput, tokens/s", speed, "{:,.0f}"),
        ("median step, ms", median(t["step_ms"]), "{:,.1f}"),
        ("TFLOP/s achieved", speed * run.fact("flops_per_token") / 1e12, "{:,.3g}"),
        ("MFU", len(t["mfu"]) / np.sum(1 / t["mfu"]), "{:.1%}"),  # of all steps, or unknown
        ("peak memory, GB", mean(t["mem_gb"], np.max), "{:.2f}"),
        ("GPU utilization, %", mean(t["gpu_util"]), "{:.0f}"),
        ("waiting for data", mean(t["data_ms"]) / mean(t["step_ms"]), "{:.1%}"),
        ("updates skipped", len(happened(run, "skipped")), "{:,}"),
        ("resumes", resumes(run), "{:,}"),
    ]


# ---- several runs --------------------------------------------------------------------------------


def differences(columns):
    """[(what, its value in each column)] of what differs among several dicts, or of one whole."""
    rows = []
    for what in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(what, "n/a") for column in columns]
        if len(columns) == 1 or len(set(values)) > 1:
            rows.append((what, *values))
    return rows


def name_runs(runs):
    """Name each of several runs by the knobs that differ, the seed last; by its folder if that is
    not longer. A second run of the same knobs is another setting. All curves get one window."""
    half = int(np.median([run.half for run in runs]))
    rows = differences([run.knobs for run in runs])
    seen = Counter()
    names = {}
    for i, run in sorted(enumerate(runs), key=lambda pair: not is_whole(pair[1])):
        words = "".join(f" {knob}={show(values[i])}" for knob, *values in rows)
        seen[words] += 1
        number = f" #{seen[words]}" if seen[words] > 1 else ""
        run.half = half
        run.setting = f"{words.partition(' seed=')[0]}{number}".strip()
        names[i] = f"{words}{number}".strip()
    if rows and max(map(len, names.values())) < max(len(run.name) for run in runs):
        for i, run in enumerate(runs):
            run.name = names[i]


def settings_of(runs):
    """The runs of each setting, a list of lists, best first: whole runs together, and any other run
    alone. Those that cannot be compared with most of the runs are last."""
    groups = {}
    for run in runs:
        key = alike(run) if is_whole(run) else run.folder
        groups.setdefault(key, []).append(run)
    usual = mode(map(terms, runs))
    _, sign, _ = metric_of(runs[0])

    def rank(setting):
        return terms(setting[0]) != usual, sign * np.mean(results(setting))

    return sorted(groups.values(), key=rank)


def is_whole(run):
    """Whether a run came to its end with the knobs that it began with."""
    changed = {knob for row in happened(run, "resume") for knob in row.get("changed", {})}
    is_done = ended(run).startswith(("finished", "stopped early"))
    return is_done and not changed & run.knobs.keys()


def alike(run):
    """What runs that make one mean have in common."""
    return run.setting, terms(run), run.fact("patience") > 0 or last_step(run)


def terms(run):
    """What must be equal for results to be compared."""
    return tuple(run.facts.get(name) for name in ("fingerprint", "eval_tokens", "best_metric"))


def results(setting):
    return [best_of(run)[0] for run in setting]


def listing(settings):
    """A row for each setting, in the order of HEADER."""
    rows = []
    for setting in settings:
        run = setting[0]
        name = run.name
        result = f"{np.mean(results(setting)):,.4f}".replace("inf", "no evaluation")
        if len(setting) > 1:
            name = run.setting or "all seeds"
            result += f" ± {np.std(results(setting), ddof=1):.4f} (n={len(setting)})"
        notes = [*dict.fromkeys(map(ended, setting))]
        code = {file for each in setting for file in each.facts.get("code", {}).items()}
        if len(code) > len(dict(code)):
            notes.append("code differs")
        if terms(run) != terms(settings[0][0]):
            notes.append("other data, eval_tokens or best_metric")
        speed = outcome(run).get("throughput, tokens/s", "n/a")
        rows.append((name, result, "; ".join(notes), speed, shown(run.folder)))
    return rows


def edges(settings):
    """Lines: of which knobs the best setting has the highest or the lowest value that was tried, of
    the same optimizer, schedule and whatever else is a word."""
    usual = terms(settings[0][0])
    ranked = [run.knobs for run, *_ in settings if terms(run) == usual and is_whole(run)]
    for best in ranked[:1]:
        words = {pair for pair in best.items() if isinstance(pair[1], str)}
        ranked = [each for each in ranked if words <= each.items()]
    lines = []
    for knob, best, *others in differences(ranked):
        tried = {value for value in (best, *others) if isinstance(value, int | float)}
        ends = {min(tried, default=0): "lowest", max(tried, default=0): "highest"}
        if knob != "seed" and len(tried) > 2 and best in ends:
            edge = f"the {ends[best]} of {len(tried)} tried: the best may lie beyond it"
            lines.append(f"{knob}={show(best)} is the best, and {edge}")
    return lines


# ---- tables --------------------------------------------------------------------------------------


def fitted(header, rows):
    """A table of as many columns as the terminal has room for."""
    for count in range(len(header), 1, -1):
        text = table(header[:count], [row[:count] for row in rows])
        if max(map(len, text.splitlines())) <= line_width():
            break
    return text


def table(header, rows):
    """A table in Markdown, its columns aligned for a terminal."""
    cells = []
    for row in (header, *rows):
        cells.append([" ".join(str(cell).replace("|", "\\|").split()) for cell in row])
    widths = [min(WIDEST, max(3, *map(len, column))) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * each for each in widths])
    lines = []
    for row in cells:
        line = " | ".join(map(str.ljust, row, widths))
        lines.append(f"| {line} |\n")
    return "".join(lines)

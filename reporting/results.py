"""The results of a run, in numbers and words: its best, its speed, its cost. Runs side by side: what
each is called, which of them have one setting, and which setting is the best.

A setting is all on which a result depends but the seed. Its result is the mean over seeds."""

import math
import os
from collections import Counter
from contextlib import suppress
from statistics import median_low, mode

import numpy as np

from plumbing.cli import line_width, printable, show
from plumbing.console import duration, shown
from plumbing.fields import FIELDS, Field
from plumbing.files import replacing
from reporting.record import (
    is_running,
    known,
    last,
    mean,
    median,
)

HEADER = ("run", "best", "how it ended", "tokens/s", "folder")  # of a row for each setting
WIDEST = 48  # characters to which a column of a table is filled up


def happened(run, *events):
    return [row for row in run.events if row["event"] in events]


def ended(run):
    """How a run ended, in a few words, and at which step; of one that goes on, what is left."""
    now = int(run.train["step"].max(initial=0))
    step = f"at step {now:,}"
    for row in happened(run, "resume", "end")[-1:]:
        if row["event"] == "end":
            how = str(row.get("ended")).split(". ")[0]
            return how if "at step" in how else f"{how}, {step}"
    if not is_running(run):
        return f"no end on record (killed), {step}"
    total = run.fact("max_steps")
    seconds = (total - now) * median(run.train["step_ms"]) / 1000
    if seconds >= 0:
        step += f" of {total:,.0f}, {duration(seconds)} left"
    return f"running, {step}"


def metric_of(run):
    """(field, sign: -1 if higher is better, words) of the metric that decides which is the best."""
    knob = run.facts.get("best_metric", "val_loss")
    field = knob.removeprefix("-")
    return field, 1 if knob == field else -1, field.replace("val_loss", "validation loss")


def best_of(run):
    """(value, step) of the best evaluation; an infinite one at 0 if there is none."""
    field, sign, _ = metric_of(run)
    scores = np.append(sign * run.evals.get(field, []), math.inf)
    steps = np.append(run.evals["step"], 0)
    best = np.nanargmin(scores)
    return sign * scores[best], int(steps[best])


def new_fields(run):
    """[(Field, values)] of the numbers that only a fork of train.py writes."""
    return [
        (Field(name, kind, plot=name), values)
        for kind, table in (("train", run.train), ("eval", run.evals))
        for name, values in table.items()
        if name not in FIELDS and not name.startswith("best_")
    ]


def resumes(run):
    """How often it was resumed. A run that began from another one has logged that as a resume."""
    return max(0, len(happened(run, "resume")) - bool(run.facts.get("began_from")))


def time_spent(run):
    """(seconds of all processes, "at least " if one of them recorded none: it was killed, or is
    running, and took at least its steps)."""
    recorded = [sum(row["seconds"].values()) for row in happened(run, "end") if "seconds" in row]
    least = "" if len(recorded) > resumes(run) else "at least "
    return max(sum(recorded), known(run.train["step_ms"]).sum() / 1000), least


def outcome(run):
    """{what: the result in words}, in order. What is unknown is left out."""
    seconds, least = time_spent(run)
    hours = run.facts.get("world_size", 1) * seconds / 3600
    numbers = numbers_of(run)
    for field, values in new_fields(run):
        numbers.append((f"last {field.name}", last(known(values)), "{:,.4g}"))
    numbers.append(("device-hours", hours, least + "{:,.3f}"))
    with suppress(KeyError, ValueError):  # no price, or no number
        price = float(os.environ["DOLLARS_PER_HOUR"])
        numbers.append((f"cost at ${price:g} an hour", price * hours, least + "${:,.2f}"))
    found = {
        "how it ended": ended(run),
        "wall time, start included": least + duration(seconds),
        "device": run.facts.get("device", "unknown"),
    }
    for what, value, form in numbers:
        if math.isfinite(value):
            found[what] = form.format(value)
    return found


def numbers_of(run):
    """[(what, number, format)] of what was learned, of what the steps cost, and of events."""
    t = run.train
    evals = run.evals
    best, best_step = best_of(run)
    at_best = evals["step"] == best_step
    count = 2 * run.half + 1
    speed = 1 / mean(1 / t["tokens_per_sec"])  # over time, as steps do as much each
    return [
        ("parameters", run.fact("parameters"), "{:,.0f}"),
        ("tokens trained on", last(t["tokens"]), "{:,.0f}"),
        (f"best {metric_of(run)[2]}", best, f"{{:,.4f}} at step {best_step:,}"),
        ("last validation loss", last(evals["val_loss"]), "{:,.4f}"),
        ("bits per byte at the best", mean(evals["val_bpb"][at_best]), "{:.4f}"),
        ("accuracy at the best", mean(evals["val_accuracy"][at_best]), "{:.2%}"),
        ("mean training loss", mean(t["loss"][-count:]), f"{{:,.4f}} in the last {count:,} steps"),
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
    """[(what, its value in each column)] of what differs among several dicts."""
    rows = []
    for what in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(what, "n/a") for column in columns]
        if len(set(values)) > 1:
            rows.append((what, *values))
    return rows


def name_runs(runs):
    """Name each of several runs by the knobs that differ, the seed last; by its folder if that is
    not longer, and no other's name. All curves get one window."""
    half = median_low(run.half for run in runs)
    usual = mode(map(terms, runs))
    rows = differences([run.knobs for run in runs])
    for i, run in enumerate(runs):
        words = "".join(f" {knob}={show(values[i])}" for knob, *values in rows)
        run.words = words.strip()
        run.setting = words.partition(" seed=")[0].strip()
        run.is_other = terms(run) != usual
        run.half = half
    folders = {run.name for run in runs}
    longest = max(len(run.words) for run in runs)
    if rows and (longest < max(map(len, folders)) or len(folders) < len(runs)):
        for run in runs:
            run.name = run.words


def terms(run):
    """What must be equal for results to be compared."""
    return tuple(run.facts.get(name) for name in ("fingerprint", "eval_tokens", "best_metric"))


def settings_of(runs):
    """The runs of each setting, a list of lists, best first: whole runs together, each seed once,
    and any other run alone. Those that cannot be compared with most of the runs are last."""
    seen = Counter()
    settings = {}
    for run in runs:
        key = run.setting, terms(run), is_whole(run) or run.folder
        seed = run.knobs.get("seed")
        seen[key, seed] += 1
        settings.setdefault((key, seen[key, seed]), []).append(run)
    _, sign, _ = metric_of(runs[0])

    def rank(setting):
        return setting[0].is_other, sign * np.mean(results(setting))

    return sorted(settings.values(), key=rank)


def is_whole(run):
    """Whether a run came to its end with the knobs that it began with."""
    resumed = happened(run, "resume")
    is_changed = any(run.knobs.keys() & row.get("changed", {}) for row in resumed)
    return ended(run).startswith(("finished", "stopped early")) and not is_changed


def results(setting):
    return [best_of(run)[0] for run in setting]


def listing(settings):
    """A row for each setting, in the order of HEADER."""
    rows = []
    for setting in settings:
        run = setting[0]
        name = run.name
        found = results(setting)
        result = f"{np.mean(found):,.4f}".replace("inf", "no evaluation")
        if len(setting) > 1:
            name = run.setting or "all seeds"
            result += f" ± {np.std(found, ddof=1):.4f} (n={len(found)})"
        notes = [*dict.fromkeys(map(ended, setting))]
        code = {file for each in setting for file in each.facts.get("code", {}).items()}
        if len(code) > len(dict(code)):
            notes.append("code differs")
        if run.is_other:
            notes.append("other data, eval_tokens or best_metric")
        speed = outcome(run).get("throughput, tokens/s", "n/a")
        rows.append((name, result, "; ".join(notes), speed, shown(run.folder)))
    return rows


def edges(settings):
    """Lines: of which knobs the best setting has the highest or the lowest value that was tried, of
    the same optimizer, schedule and whatever else is a word."""
    lines = []
    ranked = [run.knobs for run, *_ in settings if is_whole(run) and not run.is_other]
    best = ranked[0] if ranked else {}
    words = {pair for pair in best.items() if isinstance(pair[1], str)}
    for knob, value in best.items():
        tried = {each.get(knob, value) for each in ranked if words <= each.items()}
        if len(tried) > 2 and value in (min(tried), max(tried)) and knob != "seed":
            end = "lowest" if value == min(tried) else "highest"
            edge = f"the {end} of {len(tried)} tried: the best may lie beyond it"
            lines.append(f"{knob}={show(value)} is the best, and {edge}")
    return lines


# ---- tables and files ----------------------------------------------------------------------------


def write(path, text):
    """Replace the file by a text without what could type into a terminal."""
    with replacing(path) as temporary:
        temporary.write_text(printable(text), encoding="utf-8", errors="replace")


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

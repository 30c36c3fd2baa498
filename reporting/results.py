"""The results of a run, in numbers and words: its best, its speed, its cost."""

import math
import os
from contextlib import suppress

import numpy as np

from plumbing.console import duration
from plumbing.fields import FIELDS, Field
from reporting.record import (
    half_window,
    is_running,
    known,
    last,
    last_step,
    mean,
    median,
)

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
    found = {"how it ended": ended(run)}
    found |= {what: form.format(value) for what, value, form in numbers if math.isfinite(value)}
    return found | {"wall time, start included": least + duration(seconds)}


def losses(run):
    """[(what, number, format)] of what was learned."""
    evals = run.evals
    best, best_step = best_of(run)
    at_best = evals["step"] == best_step
    count = 2 * half_window(run.train["loss"]) + 1
    training = run.train["loss"][-count:]
    return [
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
        ("tokens trained on", last(t["tokens"]), "{:,.0f}"),
        ("epochs", last(t["epoch"]), "{:,.2f}"),
        ("throughput, tokens/s", speed, "{:,.0f}"),
        ("median step, ms", median(t["step_ms"]), "{:,.1f}"),
        ("TFLOP/s achieved", speed * run.fact("flops_per_token") / 1e12, "{:,.3g}"),
        ("MFU", 1 / np.mean(1 / t["mfu"]), "{:.1%}"),  # of all steps, or unknown
        ("peak memory, GB", mean(t["mem_gb"], np.max), "{:.2f}"),
        ("GPU utilization, %", mean(t["gpu_util"]), "{:.0f}"),
        ("waiting for data", mean(t["data_ms"]) / mean(t["step_ms"]), "{:.1%}"),
        ("updates skipped", len(happened(run, "skipped")), "{:,}"),
        ("resumes", resumes(run), "{:,}"),
    ]


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

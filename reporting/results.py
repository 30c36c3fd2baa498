"""The results of a run, in numbers and words: its best, its speed, its cost."""

import itertools
import math
import os
import textwrap
from collections import Counter

import numpy as np

from plumbing.console import duration
from plumbing.fields import FIELDS, Field
from reporting.record import half_window, is_running, known, last_step, mean, median, number_of

WIDEST = 48  # characters to which a column of a table is filled up


def happened(run, *events):
    return [row for row in run.events if row["event"] in events]


def ended(run):
    """How a run ended, in a few words, and at which step; of one that goes on, what is left."""
    step = f"at step {last_step(run):,}"
    for row in happened(run, "resume", "end")[-1:]:
        if row["event"] == "end":
            how = " ".join(str(row.get("ended")).split()).split(". ")[0]
            return how if "at step" in how else f"{how}, {step}"
    if not is_running(run):
        return f"no end on record (killed), {step}"
    total = run.fact("config", "max_steps")
    seconds = (total - last_step(run)) * median(run.train["step_ms"]) / 1000
    if seconds >= 0:
        step += f" of {total:,.0f}, {duration(seconds)} left"
    return f"running, {step}"


def metric_of(run):
    """(field, sign: -1 if higher is better, words) of the metric that decides which is the best."""
    knob = run.info["config"].get("best_metric", "val_loss")
    field = knob.removeprefix("-")
    return field, 1 if knob == field else -1, field.replace("val_loss", "validation loss")


def best_of(run):
    """(value, step) of the best evaluation; an infinite one at 0 if there is none. A rollback removes
    the rows that it undoes; the state in run.json still has their best."""
    field, sign, _ = metric_of(run)
    scores = sign * run.evals.get(field, np.array([]))
    found = [(run.fact("state", "best_score"), run.fact("state", "best_step"))]
    found += zip(scores, run.evals["step"], strict=False)
    finite = [(score, step) for score, step in found if math.isfinite(score)]
    score, step = min(finite, default=(math.inf, 0))
    return sign * score, int(step)


def best_in_words(run):
    best, _ = best_of(run)
    if not math.isfinite(best):
        return "no evaluation"
    return f"best {metric_of(run)[2]} {best:,.4f}"


def unit_of(run):
    """What the "tokens" of the rows are: tokens of text (or of who knows what); else targets."""
    is_text = "tokenizer" in run.info["data"].get("meta", ["tokenizer"])
    return "tokens" if is_text else "targets"


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
    return max(0, len(happened(run, "resume")) - bool(run.info["run"].get("began_from")))


def time_spent(run):
    """({kind: seconds} of all processes, their sum, "at least " if one of them recorded no times:
    it was killed, or is running, and took at least its steps)."""
    recorded = [row["seconds"] for row in happened(run, "end") if row.get("seconds")]
    spent = Counter()
    for times in recorded:
        spent.update(times)
    if len(recorded) > resumes(run):
        return spent, spent.total(), ""
    steps = known(run.train["step_ms"]).sum() / 1000
    return spent, max(spent.total(), steps), "at least "


def outcome(run):
    """{what: the result in words}, in order. What is unknown is left out."""
    spent, seconds, least = time_spent(run)
    devices = max(1, np.nan_to_num(run.fact("hardware", "world_size")))
    numbers = losses(run) + costs(run)
    for field, values in new_fields(run):
        numbers.append((f"last {field.name}", last(known(values)), "{:,.4g}"))
    hours = devices * seconds / 3600
    price = float(os.environ.get("DOLLARS_PER_HOUR", "nan"))
    numbers.append(("device-hours", hours, least + "{:,.3f}"))
    numbers.append((f"cost at ${price:g} an hour", price * hours, least + "${:,.2f}"))
    found = {"how it ended": ended(run)}
    for what, value, form in numbers:
        if math.isfinite(value):
            found[what] = form.format(value)
    kinds = [f"{kind} {duration(seconds)}" for kind, seconds in spent.items()]
    found["wall time, start included"] = least + duration(seconds)
    found["of that"] = ", ".join(kinds)
    return found


def losses(run):
    """[(what, number, format)] of what was learned."""
    evals = run.evals
    unit = unit_of(run)
    part = last(evals["val_tokens"])  # 0 = all of the validation split
    on = f" on the first {part:,.0f} {unit}" if part > 0 else ""
    nats = ", nats" if unit == "tokens" else ""
    best, best_step = best_of(run)
    at_best = evals["step"] == best_step
    count = 2 * half_window(run) + 1
    training = mean(run.train["loss"][-count:])
    bits = mean(evals["val_bpb"][at_best])
    accuracy = mean(evals["val_accuracy"][at_best])
    return [
        (f"best {metric_of(run)[2]}", best, f"{{:,.4f}} at step {best_step:,}{on}"),
        (f"last validation loss{nats}", last(evals["val_loss"]), f"{{:,.4f}}{on}"),
        ("bits per byte at the best", bits, "{:.4f}"),
        ("accuracy at the best", accuracy, "{:.2%}"),
        (f"mean training loss{nats}", training, f"{{:,.4f}} in the last {count:,} steps"),
    ]


def costs(run):
    """[(what, number, format)] of what the steps cost, and of events."""
    t = run.train
    unit = unit_of(run)
    speed = over_time(t["tokens_per_sec"])
    flops = number_of(run.info.get("flops_per_token"))
    waiting = mean(t["data_ms"]) / mean(t["step_ms"])
    return [
        (f"{unit} trained on", last(t["tokens"]), "{:,.0f}"),
        ("epochs", last(t["epoch"]), "{:,.2f}"),
        (f"throughput, {unit}/s", speed, "{:,.0f}"),
        ("median step, ms", median(t["step_ms"]), "{:,.1f}"),
        ("TFLOP/s achieved", speed * flops / 1e12, "{:,.3g}"),
        ("MFU", 1 / np.mean(1 / t["mfu"]), "{:.1%}"),  # of all steps, or unknown
        ("peak memory, GB", mean(t["mem_gb"], np.max), "{:.2f}"),
        ("GPU utilization, %", mean(t["gpu_util"]), "{:.0f}"),
        ("waiting for data", waiting, "{:.1%}"),
        ("updates skipped", len(happened(run, "skipped")), "{:,}"),
        ("rollbacks", len(happened(run, "rollback")), "{:,}"),
        ("resumes", resumes(run), "{:,}"),
    ]


def last(values):
    return mean(values[-1:])


def over_time(speeds):
    """The mean speed of steps that do as much each."""
    return 1 / mean(1 / speeds)


def table(header, rows, width=None):
    """A table in Markdown, its columns aligned for a terminal. width: of a line at most, in
    characters, where cells may go on in lines below."""
    cells = [header]
    for row in rows:
        cells.append([" ".join(str(cell).replace("|", "\\|").split()) for cell in row])
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    while width and sum(widths) + 3 * len(widths) >= width:
        widths[widths.index(max(widths))] -= 1
    widths = [min(WIDEST, each) for each in widths]
    cells.insert(1, ["-" * each for each in widths])
    lines = []
    for row in cells:
        parts = [[cell] for cell in row]
        if width:
            parts = map(textwrap.wrap, row, widths)
        for part in itertools.zip_longest(*parts, fillvalue=""):
            line = " | ".join(map(str.ljust, part, widths))
            lines.append(f"| {line} |\n")
    return "".join(lines)

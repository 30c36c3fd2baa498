"""The results of a run, in numbers and words: its best, its speed, its cost."""

import math

import numpy as np

from plumbing.console import FIELDS, duration
from reporting.record import half_window, is_running, known, last_step, mean, median


def last(values):
    return mean(values[-1:])


def largest(values):
    return mean(values, np.max)


def over_time(speeds):
    """The mean speed of steps that do as much each."""
    return 1 / mean(1 / speeds)


OF_STEPS = (  # what, field, statistic, format
    ("tokens trained on", "tokens", last, "{:,.0f}"),
    ("epochs", "epoch", last, "{:,.2f}"),
    ("throughput, tokens/s", "tokens_per_sec", over_time, "{:,.0f}"),
    ("median step, ms", "step_ms", median, "{:,.1f}"),
    ("MFU", "mfu", over_time, "{:.1%}"),
    ("peak memory, GB", "mem_gb", largest, "{:.2f}"),
    ("GPU utilization, %", "gpu_util", mean, "{:.0f}"),
)
WIDEST = 48  # characters to which a column of a table is filled up


def happened(run, *events):
    return [row for row in run.events if row["event"] in events]


def how_it_ended(run):
    """In a few words, without the step."""
    processes = happened(run, "resume", "end")
    if processes and processes[-1]["event"] == "end":
        return " ".join(str(processes[-1].get("ended")).split()).split(". ")[0]
    return "running" if is_running(run) else "no end on record (killed)"


def ended(run):
    how = how_it_ended(run)
    return how if "at step" in how else f"{how}, at step {last_step(run):,}"


def metric_of(run):
    """(field, sign: -1 if higher is better, words) of the metric that decides which is the best."""
    knob = run.info["config"].get("best_metric", "val_loss")
    field = knob.removeprefix("-")
    return field, 1 if knob == field else -1, field if field != "val_loss" else "validation loss"


def best_of(run):
    """(value, step) of the best evaluation; (NaN, 0) if there is none. A rollback removes the rows
    that it undoes; the state in run.json still has their best."""
    field, sign, _ = metric_of(run)
    best, step = best_row(run, field, sign)
    score = run.fact("state", "best_score")
    if math.isfinite(score) and not sign * best <= score:
        return sign * score, int(run.fact("state", "best_step"))
    return best, step


def best_row(run, field="val_loss", sign=1):
    """best_of for a field of the evaluations, by their rows alone."""
    values = run.evals.get(field, np.array([]))
    if not len(known(values)):
        return math.nan, 0
    i = np.nanargmin(sign * values)
    return float(values[i]), int(run.evals["step"][i])


def best_in_words(run):
    return f"best {metric_of(run)[2]} {number(best_of(run)[0])}"


def unit_of(run):
    """What the "tokens" of the rows are: tokens of text (or of who knows what); else targets."""
    is_text = "tokenizer" in run.info["data"].get("meta", ["tokenizer"])
    return "tokens" if is_text else "targets"


def extent(run):
    """What the last evaluation was on, if not on the whole validation split; else ""."""
    tokens = mean(run.evals["val_tokens"][-1:])
    return f"first {tokens:,.0f} {unit_of(run)}" if tokens > 0 else ""


def new_fields(run):
    """[(name, steps, values)] of the fields that only a fork of train.py writes."""
    best = f"best_{metric_of(run)[0]}"
    found = []
    for table in (run.train, run.evals):
        for name, values in table.items():
            if name not in FIELDS and name != best:
                found.append((name, table["step"], values))
    return found


def resumes(run):
    """How often it was resumed. A run that began from another one has logged that as a resume."""
    return max(0, len(happened(run, "resume")) - bool(run.info["run"].get("began_from")))


def time_spent(run):
    """({kind: seconds} of all processes, their sum, "at least " if one of them recorded no times:
    it was killed, or is running, and took at least its steps)."""
    spent = {}
    recorded = [row["seconds"] for row in happened(run, "end") if row.get("seconds")]
    for times in recorded:
        for kind, seconds in times.items():
            spent[kind] = spent.get(kind, 0.0) + seconds
    total = sum(spent.values())
    if len(recorded) > resumes(run):
        return spent, total, ""
    steps = known(run.train["step_ms"]).sum() / 1000
    return spent, max(total, steps), "at least "


def share_clipped(run):
    clip = run.fact("config", "grad_clip")
    if not clip > 0:
        return math.nan
    return mean((run.train["grad_norm"] > clip).astype(float))


def outcome(run):
    """{what: the result in words}, in order. What is unknown is left out."""
    spent, seconds, least = time_spent(run)
    devices = max(1, np.nan_to_num(run.fact("hardware", "world_size")))
    hours = devices * seconds / 3600
    numbers = numbers_of(run)
    for name, _, values in new_fields(run):
        numbers.append((f"last {name}", last(known(values)), "{:,.4g}"))
    numbers.append(("device-hours", hours, least + "{:,.3f}"))
    found = {"how it ended": ended(run)}
    for what, value, form in numbers:
        if math.isfinite(value):
            found[what] = form.format(value)
    kinds = [f"{kind} {duration(seconds)}" for kind, seconds in spent.items()]
    found["wall time, start included"] = least + duration(seconds)
    found["of that"] = ", ".join(kinds) or "n/a"
    for row in happened(run, "best_not_saved"):
        if row["step"] == last_step(run):  # else it was saved later
            held = row["best_pt_holds_step"]
            found["best.pt"] = f"of step {held}; a better one could not be saved"
    return found


def numbers_of(run):
    """[(what, number, format)] of the losses, of what the steps cost, and of events."""
    t = run.train
    e = run.evals
    part = extent(run)
    on = f" on the {part}" if part else ""
    unit = unit_of(run)
    nats = ", nats" if unit == "tokens" else ""
    best, best_step = best_of(run)
    at_best = e["step"] == best_step
    bits = mean(e["val_bpb"][at_best])
    accuracy = mean(e["val_accuracy"][at_best])
    count = 2 * half_window(run) + 1
    training_loss = mean(t["loss"][-count:])
    waiting = mean(t["data_ms"]) / mean(t["step_ms"])
    numbers = [
        (f"best {metric_of(run)[2]}", best, f"{{:,.4f}} at step {best_step:,}{on}"),
        (f"last validation loss{nats}", last(e["val_loss"]), f"{{:,.4f}}{on}"),
        ("bits per byte at the best", bits, "{:.4f}"),
        ("accuracy at the best", accuracy, "{:.2%}"),
        (f"mean training loss{nats}", training_loss, f"{{:,.4f}} in the last {count:,} steps"),
    ]
    for what, field, statistic, form in OF_STEPS:
        numbers.append((what.replace("tokens", unit), statistic(t[field]), form))
    numbers.append(("waiting for data", waiting, "{:.1%}"))
    numbers.append(("steps whose gradient was clipped", share_clipped(run), "{:.0%}"))
    for what, event in (("updates skipped", "skipped"), ("rollbacks", "rollback")):
        numbers.append((what, len(happened(run, event)), "{:,}"))
    numbers.append(("resumes", resumes(run), "{:,}"))
    return numbers


# ---- numbers and tables in words -----------------------------------------------------------------


def number(value: float, form=",.4f"):
    return f"{value:{form}}" if math.isfinite(value) else "n/a"


def table(header, rows):
    """A table in Markdown, its columns aligned for a terminal."""
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows]
    cells.insert(0, list(header))
    widths = [min(WIDEST, max(map(len, column))) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * max(3, width) for width in widths])
    lines = []
    for row in cells:
        padded = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(padded)} |\n")
    return "".join(lines)

"""The results of a run, in numbers and words: its best, its speed, its cost, its means by epoch."""

import math
import re

import numpy as np

from plumbing.console import FIELDS, duration
from reporting.record import half_window, is_running, known, last_step, mean, median, plain


def happened(run, event):
    return [row for row in run.events if row["event"] == event]


def how_it_ended(run):
    """In a few words, without the step."""
    ends = happened(run, "end")
    how = ends[-1].get("ended") if ends else None
    if "ended" in run.info:
        how = run.info["ended"]
    if not how:
        return "running" if is_running(run) else "no end on record (killed)"
    return " ".join(str(how).split()).split(". ")[0]


def ended(run):
    how = how_it_ended(run)
    return how if "at step" in how else f"{how}, at step {last_step(run):,}"


def metric_of(run):
    """(field, sign: -1 if higher is better, words) of the metric that decides which is the best."""
    knob = str(run.info["config"].get("best_metric") or "val_loss")
    field = knob.removeprefix("-")
    return field, 1 if knob == field else -1, field if field != "val_loss" else "validation loss"


def best_of(run):
    """(value, step) of the best evaluation on as many tokens as the last; (NaN, 0) if there is
    none.

    A rollback removes the rows that it undoes; the state in run.json still has their best.
    """
    field, sign, _ = metric_of(run)
    best, step = best_row(run, field, sign)
    kept = run.fact("state", f"best_{field}")
    kept_step = run.fact("state", "best_step")
    if math.isfinite(kept + kept_step) and not sign * best <= sign * kept:
        return kept, int(kept_step)
    return best, step


def best_in_words(run):
    return f"best {metric_of(run)[2]} {number(best_of(run)[0])}"


def best_row(run, field="val_loss", sign=1):
    """best_of for a field of the evaluations, by their rows alone."""
    values = np.where(extent(run)[1], run.evals.get(field, math.nan), math.nan)
    if not len(known(values)):
        return math.nan, 0
    i = np.nanargmin(sign * values)
    return float(values[i]), int(run.evals["step"][i])


def extent(run):
    """(tokens of the last evaluation, 0 = not a part; mask of the evaluations on as many)."""
    tokens = np.nan_to_num(run.evals["val_tokens"])
    last = tokens[-1] if len(tokens) else 0
    return last, tokens == last


def extent_in_words(run):
    """What the last evaluation was on. Only of the whole split train.py writes bits per byte."""
    tokens, _ = extent(run)
    if tokens:
        return f"the first {tokens:,.0f} {unit(run)}"
    if len(known(run.evals["val_bpb"][-1:])):
        return "the whole validation split"
    return "the validation data that evaluate() takes"


def unit(*runs):
    """What the "tokens" of the rows are: tokens of text (or of who knows what); else targets."""
    for run in runs:
        if "tokenizer" in run.info["data"].get("meta", ["tokenizer"]):
            return "tokens"
    return "targets"


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
    logged = len(happened(run, "resume"))
    return max(0, logged - bool(run.info["run"].get("began_from")))


def seconds_by_kind(run):
    """({kind: seconds} over all sessions, number of sessions that recorded no times)."""
    total = {}
    missing = 1 + resumes(run)
    for row in happened(run, "end"):
        seconds = row.get("seconds")
        if isinstance(seconds, dict) and seconds:
            missing -= 1
            for kind, each in seconds.items():
                total[kind] = total.get(kind, 0.0) + max(0.0, np.nan_to_num(plain(each)))
    return total, max(0, missing)


def number(value, form=",.4f", unit=""):
    return f"{value:{form}}{unit}" if math.isfinite(value) else "n/a"


def table(header, rows):
    """A table in Markdown."""
    lines = []
    for row in [header, ["---"] * len(header), *rows]:
        cells = [" ".join(str(cell).replace("|", "\\|").split()) for cell in row]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def aligned(rows, widest=32):
    """Lines of a table for a terminal, without Markdown. A longer cell is cut to `widest`."""
    rows = [[in_plain(cell, widest) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def in_plain(cell, widest):
    text = re.sub(r"\*\*|`", "", str(cell))
    return text if len(text) <= widest else text[: widest - 3] + "..."


def share_clipped(run):
    clip = run.fact("config", "grad_clip")
    if not clip > 0:
        return math.nan
    return mean((run.train["grad_norm"] > clip).astype(float))


def outcome(run, dollars_per_hour):
    """{what: (words, window)}. dollars_per_hour: of one device; 0 = no cost."""
    rows = {"how it ended": (ended(run), "")}
    rows |= outcome_of_training(run) | outcome_of_events(run)
    for name, _, values in new_fields(run):
        last = known(values)[-1]
        rows[f"last {name}"] = number(last, ",.4g"), f"all {len(run.train['step']):,} steps"
    return rows | time_and_cost(run, dollars_per_hour)


def outcome_of_training(run):
    """The losses, and what the steps cost: {what: (words, window)}."""
    t = run.train
    e = run.evals
    per = unit(run)
    is_text = per == "tokens"
    nats = ", nats" if is_text else ""
    field, _, metric = metric_of(run)
    best, best_step = best_of(run)
    at_best = e["step"] == best_step
    split = extent_in_words(run)
    last = 2 * half_window(run) + 1
    steps = f"all {len(t['step']):,} steps"
    uses_gpu = run.fact("hardware", "gpu_count") > 0 or len(known(t["gpu_util"])) > 0
    memory = known(t["mem_gb"]).max(initial=-math.inf)
    measured = "allocated by PyTorch on the GPU" if uses_gpu else "the whole process"
    speed = 1 / mean(1 / t["tokens_per_sec"])
    mfu = 1 / mean(1 / t["mfu"])
    wait = mean(t["data_ms"]) / mean(t["step_ms"])
    rows = {}

    def add(what, value, form, window, after=""):
        rows[what] = number(value, form, after), window

    best_name = f"best {metric}"
    if field == "val_loss":
        best_name += nats
    last_loss = mean(e["val_loss"][-1:])
    training_loss = mean(t["loss"][-last:])
    epochs = mean(t["epoch"][-1:])
    tokens = mean(t["tokens"][-1:])
    add(best_name, best, ",.4f", split, f" at step {best_step:,}")
    for row in happened(run, "best_not_saved"):
        if row["step"] == last_step(run):  # else it was saved later, or the run went on
            held = row.get("best_pt_holds_step")
            rows["best.pt"] = f"of step {held}", "a better one could not be saved"
    add(f"last validation loss{nats}", last_loss, ",.4f", split)
    if is_text:
        bits = mean(e["val_bpb"][at_best])
        add("bits per byte at the best", bits, ".4f", split)
    accuracy = mean(e["val_accuracy"][at_best])
    add("accuracy at the best", accuracy, ".2%", split)
    add(f"mean training loss{nats}", training_loss, ",.4f", f"the last {last:,} steps")
    add(f"{per} trained on", tokens, ",.0f", steps)
    add("epochs", epochs, ",.2f", steps)
    add(f"throughput, {per}/s", speed, ",.0f", f"{steps}; without evaluation and saving")
    add("median step, ms", median(t["step_ms"]), ",.1f", f"{steps}; means of log windows")
    add("waiting for data", wait, ".1%", steps)
    add("MFU", mfu, ".1%", steps)
    add("peak memory, GB", memory, ".2f", measured)
    if uses_gpu:
        busy = mean(t["gpu_util"]) / 100
        add("GPU utilization", busy, ".0%", "samples at log lines")
    add("steps whose gradient was clipped", share_clipped(run), ".0%", steps)
    return rows


def outcome_of_events(run):
    numbers = {
        "updates skipped": len(happened(run, "skipped")),
        "rollbacks": len(happened(run, "rollback")),
        "resumes": resumes(run),
    }
    return {what: (f"{number:,}", "all sessions") for what, number in numbers.items()}


def time_and_cost(run, dollars_per_hour):
    """The last rows of the outcome. A session that recorded no times took at least its steps."""
    spent, missing = seconds_by_kind(run)
    seconds = sum(spent.values())
    least = ""
    if missing:
        least = "at least "
        seconds = max(seconds, known(run.train["step_ms"]).sum() / 1000)
    devices = max(1, int(np.nan_to_num(run.fact("hardware", "world_size"))))
    hours = devices * seconds / 3600
    price = dollars_per_hour
    money = "report.py --dollars_per_hour=PRICE gives the cost in dollars"
    if price > 0:
        money = f"${price * hours:,.2f} at ${price:g} an hour"
    return {
        "wall-clock": (least + duration(seconds), "all sessions, start to end"),
        "cost": (f"{least}{hours:,.3f} device-hours; {money}", f"of {devices} device(s)"),
    }

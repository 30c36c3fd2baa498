"""The results of a run, in numbers and words: its best, its speed, its cost, its means by epoch."""

import math

import numpy as np

from plumbing.console import FIELDS, duration
from reporting.record import half_window, known, last_step, mean, median, plain


def happened(run, event):
    return [row for row in run.events if row["event"] == event]


def ended(run):
    ends = happened(run, "end")
    how = run.info["ended"] if "ended" in run.info else ends and ends[-1].get("ended")
    how = " ".join(str(how or "no end on record (killed, or still running)").split()).split(". ")[0]
    return how if "at step" in how else f"{how}, at step {last_step(run):,}"


def metric_of(run):
    """(field, sign: -1 if higher is better, words) of the metric that decides which is the best."""
    knob = str(run.info["config"].get("best_metric") or "val_loss")
    field = knob.removeprefix("-")
    return field, 1 if knob == field else -1, field if field != "val_loss" else "validation loss"


def best_of(run):
    """(value, step) of the best evaluation on as many tokens as the last; (NaN, 0) if there is none.

    A rollback removes the rows that it undoes; the state in run.json still has their best.
    """
    field, sign, _ = metric_of(run)
    best, step = best_row(run, field, sign)
    kept, at = (run.fact("state", name) for name in (f"best_{field}", "best_step"))
    keep = math.isfinite(kept + at) and not sign * best <= sign * kept
    return (kept, int(at)) if keep else (best, step)


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
    """(tokens of the last evaluation, 0 = the whole split; mask of the evaluations on as many)."""
    tokens = np.nan_to_num(run.evals["val_tokens"])
    last = tokens[-1] if len(tokens) else 0
    return last, tokens == last


def unit(*runs):
    """What the "tokens" of the rows are: tokens of text (or of who knows what); else targets."""
    is_text = any("tokenizer" in run.info["data"].get("meta", ["tokenizer"]) for run in runs)
    return "tokens" if is_text else "targets"


def new_fields(run):
    """[(name, steps, values)] of the fields that only a fork of train.py writes."""
    own = *FIELDS, f"best_{metric_of(run)[0]}"
    return [(k, t["step"], t[k]) for t in (run.train, run.evals) for k in t if k not in own]


def seconds_by_kind(run):
    """({kind: seconds} over all sessions, number of sessions that recorded no times)."""
    total, ends = {}, happened(run, "end")
    for row in ends:
        seconds = row.get("seconds")
        for kind, each in seconds.items() if isinstance(seconds, dict) else ():
            total[kind] = total.get(kind, 0.0) + max(0.0, np.nan_to_num(plain(each)))
    sessions = 1 + max(len(happened(run, "resume")), len(run.info["resumes"]))
    return total, max(0, sessions - len(ends))


def number(value, form=",.4f", unit=""):
    return f"{value:{form}}{unit}" if math.isfinite(value) else "n/a"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def share_clipped(run):
    clip = run.fact("config", "grad_clip")
    return mean((run.train["grad_norm"] > clip).astype(float)) if clip > 0 else math.nan


def outcome(run, dollars_per_hour):
    """{what: (words, window)}. dollars_per_hour: of one device; 0 = the run's own."""
    t, e, per = run.train, run.evals, unit(run)
    gpu = run.fact("hardware", "gpu_count") > 0 or len(known(t["gpu_util"])) > 0
    last, steps = 2 * half_window(run) + 1, f"all {len(t['step']):,} steps"
    field, _, metric = metric_of(run)
    (best, best_step), (tokens, _) = best_of(run), extent(run)
    nats = ", nats" * (per == "tokens")
    split = f"the first {tokens:,.0f} {per}" if tokens else "the whole validation split"
    bpb, accuracy = (e[name][e["step"] == best_step] for name in ("val_bpb", "val_accuracy"))
    memory = known(t["mem_gb"]).max(initial=-math.inf)
    measured = "allocated by PyTorch on the GPU" if gpu else "the whole process"
    speed = 1 / mean(1 / t["tokens_per_sec"])
    numbers = [
        (f"last validation loss{nats}", mean(e["val_loss"][-1:]), ",.4f", split),
        *[("bits per byte at the best", mean(bpb), ".4f", split)] * (per == "tokens"),
        ("accuracy at the best", mean(accuracy), ".2%", split),
        (f"mean training loss{nats}", mean(t["loss"][-last:]), ",.4f", f"the last {last:,} steps"),
        (f"{per} trained on", mean(t["tokens"][-1:]), ",.0f", steps),
        ("epochs", mean(t["epoch"][-1:]), ",.2f", steps),
        (f"throughput, {per}/s", speed, ",.0f", f"{steps}; without evaluation and saving"),
        ("median step, ms", median(t["step_ms"]), ",.1f", f"{steps}; means of log windows"),
        ("waiting for data", mean(t["data_ms"]) / mean(t["step_ms"]), ".1%", steps),
        ("MFU", mean(t["mfu"]), ".1%", steps),
        ("peak memory, GB", memory, ".2f", measured),
        *[("GPU utilization", mean(t["gpu_util"]) / 100, ".0%", "samples at log lines")] * gpu,
        ("steps whose gradient was clipped", share_clipped(run), ".0%", steps),
        ("updates skipped", len(happened(run, "skipped")), ",", "all sessions"),
        ("rollbacks", len(happened(run, "rollback")), ",", "all sessions"),
        ("resumes", len(happened(run, "resume")), ",", "all sessions"),
        *((f"last {name}", known(y)[-1], ",.4g", steps) for name, _, y in new_fields(run)),
    ]
    rows = {"how it ended": (ended(run), "")}
    name = f"best {metric}" + nats * (field == "val_loss")
    rows[name] = number(best, ",.4f", f" at step {best_step:,}"), split
    rows |= {what: (number(value, form), window) for what, value, form, window in numbers}
    return rows | time_and_cost(run, dollars_per_hour)


def time_and_cost(run, dollars_per_hour):
    """The last rows of the outcome. A session that recorded no times took at least its steps."""
    spent, missing = seconds_by_kind(run)
    seconds, least = sum(spent.values()), "at least " * bool(missing)
    if missing:
        seconds = max(seconds, known(run.train["step_ms"]).sum() / 1000)
    devices = max(1, int(np.nan_to_num(run.fact("hardware", "world_size"))))
    hours = devices * seconds / 3600
    price = dollars_per_hour or run.fact("config", "dollars_per_hour")
    ask = "report.py --dollars_per_hour=PRICE gives the cost in dollars"
    money = f"${price * hours:,.2f} at ${price:g} an hour" if price > 0 else ask
    return {
        "wall-clock": (least + duration(seconds), "all sessions, start to end"),
        "cost": (f"{least}{hours:,.3f} device-hours; {money}", f"of {devices} device(s)"),
    }

"""The outcome of a run, in numbers and words: its results, its cost, its means by epoch."""

import math

import numpy as np

from plumbing.reporting.record import (
    best_of,
    extent,
    half_window,
    happened,
    known,
    last_step,
    mean,
    median,
    new_fields,
    unit,
)


def ended(run):
    ends = happened(run, "end")
    how = run.info["ended"] if "ended" in run.info else ends and ends[-1].get("ended")
    how = str(how or "no end on record (killed, or still running)").split(". ")[0]
    return how if "at step" in how else f"{how}, at step {last_step(run):,}"


def seconds_by_kind(run):
    """({kind: seconds} over all sessions, number of sessions that recorded no times)."""
    total, ends = {}, happened(run, "end")
    for row in ends:
        for kind, seconds in (row.get("seconds") or {}).items():
            total[kind] = total.get(kind, 0.0) + (seconds or 0.0)
    sessions = 1 + max(len(happened(run, "resume")), len(run.info.get("resumes") or []))
    return total, max(0, sessions - len(ends))


def number(value, form=",.4f", unit=""):
    return f"{value:{form}}{unit}" if math.isfinite(value) else "n/a"


def duration(seconds):
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours:,} h {minutes % 60:02} min"
    return f"{minutes} min {int(seconds % 60):02} s" if minutes else f"{seconds:.1f} s"


def clipped_share(run):
    clip = run.info["config"].get("grad_clip")
    return number(mean((run.train["grad_norm"] > clip).astype(float)), ".0%") if clip else "n/a"


def outcome(run, dollars_per_hour):
    """{what: (words, window)}. dollars_per_hour: of one device; 0 = the run's own."""
    t, e = run.train, run.evals
    last = 2 * half_window(run) + 1
    per = unit(run)
    best, best_step = best_of(run)
    nats = ", nats" if per == "tokens" else ""
    tokens, same = extent(run)
    split = f"the first {tokens:,.0f} {per}" if tokens else "the whole validation split"
    bpb = np.where(same, e["val_bpb"], np.nan)
    steps = f"all {len(t['step']):,} steps"
    rows = {
        "how it ended": (ended(run), ""),
        f"best validation loss{nats}": (number(best, ".4f", f" at step {best_step:,}"), split),
        f"last validation loss{nats}": (number(mean(e["val_loss"][-1:]), ".4f"), split),
        "best bits per byte": (number(best * median(bpb / e["val_loss"]), ".4f"), split),
        "accuracy at the best": (
            number(mean(e["val_accuracy"][e["step"] == best_step]), ".2%"),
            split,
        ),
        f"mean training loss{nats}": (number(mean(t["loss"][-last:])), f"the last {last:,} steps"),
        f"{per} trained on": (number(mean(t["tokens"][-1:]), ",.0f"), steps),
        "epochs": (number(mean(t["epoch"][-1:]), ",.2f"), steps),
        f"throughput, {per}/s": (
            number(1 / mean(1 / t["tokens_per_sec"]), ",.0f"),
            f"{steps}; without evaluation and saving",
        ),
        "median step, ms": (number(median(t["step_ms"]), ",.1f"), f"{steps}; means of log windows"),
        "waiting for data": (number(mean(t["data_ms"]) / mean(t["step_ms"]), ".1%"), steps),
        "MFU": (number(mean(t["mfu"]), ".1%"), steps),
        "peak memory, GB": (
            number(known(t["mem_gb"]).max(initial=-math.inf), ".2f"),
            "allocated by PyTorch on the GPU" if on_gpu(run) else "the whole process",
        ),
        "GPU utilization": (
            number(mean(t["gpu_util"]) / 100, ".0%"),
            "mean of one sample at each log line, each of up to a second",
        ),
        "wall-clock": wall_clock(run),
        "steps whose gradient was clipped": (clipped_share(run), steps),
        "updates skipped": (f"{len(happened(run, 'skipped')):,}", "all sessions"),
        "rollbacks": (f"{len(happened(run, 'rollback')):,}", "all sessions"),
        "resumes": (f"{len(happened(run, 'resume')):,}", "all sessions"),
    }
    if per != "tokens":
        del rows["best bits per byte"]
    if not on_gpu(run):
        del rows["GPU utilization"]
    new = {f"last {k}": (number(known(v)[-1], ",.4g"), "") for k, _, v in new_fields(run)}
    return rows | new | {"cost": cost(run, dollars_per_hour)}


def on_gpu(run):
    return bool(run.info["hardware"].get("gpu_count")) or len(known(run.train["gpu_util"])) > 0


def seconds_spent(run):
    """(seconds, "" or "at least "): if a session recorded no times, at least those of all steps."""
    spent, missing = seconds_by_kind(run)
    seconds = sum(spent.values())
    if missing:
        seconds = max(seconds, known(run.train["step_ms"]).sum() / 1000)
    return seconds, "at least " * bool(missing)


def wall_clock(run):
    seconds, least = seconds_spent(run)
    _, missing = seconds_by_kind(run)
    partly = f"; {missing} recorded no times, so at least those of all steps" if missing else ""
    return least + duration(seconds), f"all sessions, start to end{partly}"


def cost(run, dollars_per_hour):
    seconds, least = seconds_spent(run)
    devices = run.info["hardware"].get("world_size", 1)
    hours = devices * seconds / 3600
    price = dollars_per_hour or run.info["config"].get("dollars_per_hour")
    money = f"${price * hours:,.2f} at ${price:g} an hour" if price else ASK_FOR_MONEY
    return f"{least}{hours:,.3f} device-hours; {money}", f"wall-clock of {devices} device(s)"


ASK_FOR_MONEY = "report.py --dollars_per_hour=PRICE gives the cost in dollars"


def beside(run, first):
    """How the training loss of a run differs from that of `first`, in words."""
    steps, mine, other = np.intersect1d(run.train["step"], first.train["step"], return_indices=True)
    apart = np.abs(run.train["loss"][mine] - first.train["loss"][other])
    differ = np.flatnonzero(apart > 0)
    if not len(differ):
        return f"the same in every digit, for {len(known(apart)):,} steps"
    begin, end = differ[[0, -1]]
    return (
        f"differs from step {steps[begin]:,.0f} on, by {apart[begin]:.0e};"
        f" by {apart[end]:.0e} at step {steps[end]:,.0f}"
    )


def epochs(run, most=30):
    """[header, row, ...] of means over each epoch, or over several together if there are many."""
    t, e = run.train, run.evals
    epoch = np.ceil(t["epoch"] - 1e-9)  # the first is 1
    if not len(known(epoch)):
        return []
    together = math.ceil(known(epoch).max() / most)
    columns = {
        "training loss": (t["loss"], ",.4f"),
        "gradient norm": (t["grad_norm"], ".3g"),
        f"{unit(run)}/s": (t["tokens_per_sec"], ",.0f"),
        "ms a step": (t["step_ms"], ",.1f"),
    }
    if on_gpu(run):
        columns |= {"GPU, %": (t["gpu_util"], ".0f"), "GB": (t["mem_gb"], ".2f")}
    rows = [["epoch", "steps", *columns, "last validation loss"]]
    for first in range(1, int(known(epoch).max()) + 1, together):
        inside = (epoch >= first) & (epoch < first + together)
        if not inside.any():
            continue
        begin, end = (int(t["step"][inside][i]) for i in (0, -1))
        last = first + together - 1
        cells = [number(mean(values[inside]), form) for values, form in columns.values()]
        val = e["val_loss"][(e["step"] >= begin) & (e["step"] <= end)]
        name = str(first) if together == 1 else f"{first} to {last}"
        rows.append([name, f"{begin:,} to {end:,}", *cells, number(mean(val[-1:]))])
    return rows

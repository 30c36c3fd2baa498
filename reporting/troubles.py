"""Troubles of a run: a detector for each returns what in the rows shows it, in words, or None. It
has the name that its trouble has in docs/trouble.md, where causes and cures stand."""

import math
import re
from collections import namedtuple
from functools import cache

import numpy as np

from plumbing.console import REPO, to_paste
from reporting.record import half_window, known, mean, median, number_of, smooth
from reporting.results import ended, happened

Finding = namedtuple("Finding", "name title shows cure")
SECTION = re.compile(r"## ([^\n]*) \((\w+)\)\n.*?\*\*Cure\*\*: (.*?)(?:\n\n|\Z)", re.DOTALL)


@cache
def texts():
    """{name of a trouble: (title, cure)} of docs/trouble.md, in its order."""
    page = (REPO / "docs" / "trouble.md").read_text(encoding="utf-8")
    page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)  # without links
    found = {}
    for title, name, cure in SECTION.findall(page):
        found[name] = title, " ".join(cure.split())
    return found


def troubles(run):
    """The Findings of a run, in the order of docs/trouble.md."""
    found = []
    for name, (title, cure) in texts().items():
        shows = globals()[name](run)  # unknown values are NaN, and show nothing
        if shows:
            found.append(Finding(name, title, shows, cure))
    return found


# ---- detectors: updates --------------------------------------------------------------------------


def updates_fail(run):
    skips = happened(run, "skipped")
    rollbacks = sum("not finite" in row["why"] for row in happened(run, "rollback"))
    few = max(2, 0.01 * len(run.train["step"]))
    if rollbacks or len(skips) > few:
        first = skips[0]["step"]
        found = f"{len(skips):,} not finite and skipped, the first at step {first:,}"
        return f"{found}; {rollbacks} rollbacks"
    return None


def clipped_always(run):
    clip = run.fact("config", "grad_clip")
    norms = run.train["grad_norm"]
    late = known(norms[len(norms) // 5 :])
    share = mean(late > clip)
    if len(late) >= 16 and clip > 0 and share > 0.9:
        found = f"its norm is above {clip:g} in {share:.0%} of the late steps"
        return f"{found}, and {median(late):.3g} in the median"
    return None


def norm_is_zero(run):
    norms = known(run.train["grad_norm"])
    last_other = np.flatnonzero(norms).max(initial=-1)
    zeros = len(norms) - 1 - last_other
    if zeros >= 5:
        return f"its norm is exactly 0 in the last {zeros:,} steps"
    return None


# ---- detectors: the loss -------------------------------------------------------------------------


def loss_curve(run):
    """(loss, smoothed, standard deviation of the noise); the latter two NaN if the run is short."""
    loss = run.train["loss"]
    curve = smooth(loss, half_window(run))
    if len(known(loss)) < 20:
        curve[:] = math.nan
    noise = 1.4826 * median(np.abs(loss - curve))  # from the median deviation to the standard one
    return loss, curve, noise


def guessing(run):
    """ln V, the loss of a uniform guess; NaN if V is not on record."""
    meta = run.info["data"].get("meta", {})
    classes = number_of(meta.get("vocab_size"))
    return math.log(classes) if classes > 1 else math.nan


def loss_stuck(run):
    loss = known(run.train["loss"])
    n = len(loss)
    guess = guessing(run)
    first = mean(loss[: max(3, n // 20)])
    last = mean(loss[-(n // 4) :])
    is_flat = abs(first - last) <= 0.02 * first
    is_long = n > max(49, run.fact("config", "warmup_steps"))
    is_high = not last < 0.9 * guess  # also where the guess is not known
    if is_long and is_flat and is_high:
        found = f"{first:.3f} at the start, {last:.3f} in the last quarter"
        return f"{found}; a guess has {guess:.3f}"
    return None


def underfitting(run):
    loss = known(run.train["loss"])
    last = mean(loss[-(len(loss) // 10) :])
    val_loss = mean(known(run.evals["val_loss"])[-1:])
    guess = guessing(run)
    is_long = len(loss) >= 100
    is_high = min(last, val_loss) > 0.6 * guess
    is_general = abs(val_loss - last) <= 0.1 * last
    why = loss_stuck(run) or loss_rises(run) or loss_spikes(run)
    if is_long and is_high and is_general and not why:
        found = f"training ends at {last:.3f}, validation at {val_loss:.3f}"
        return f"{found}; a guess has {guess:.3f}"
    return None


def loss_rises(run):
    _, curve, noise = loss_curve(run)
    lowest = known(curve).min(initial=math.inf)
    rise = mean(curve[-1:]) - lowest
    error = noise / math.sqrt(half_window(run))
    least = max(6 * error, 0.05 * lowest)
    if rise > least:
        return f"it ends {rise:.3f} above {lowest:.3f}"
    return None


def loss_spikes(run):
    loss, curve, noise = loss_curve(run)
    excess = loss - curve
    is_high = excess > max(0.1, 8 * noise)
    starts = np.flatnonzero(np.diff(is_high, prepend=False) & is_high)
    steps = run.train["step"]
    if len(starts):
        first = steps[starts[0]]
        highest = steps[np.nanargmax(excess)]
        replay = to_paste("replay.py", run.folder)
        found = f"{len(starts):,} in all, the first at step {first:,.0f}"
        return f"{found}; see the highest with `{replay} --step={highest:.0f}`"
    return None


def diverges_after_resume(run):
    loss = run.train["loss"]
    lr = run.train["lr"]
    for row in happened(run, "resume"):
        step = row["step"]
        i = np.count_nonzero(run.train["step"] <= step)
        size = min(50, i, len(loss) - i)
        before = loss[i - size : i]
        after = loss[i : i + size]
        was, now, error = compared(before, after, np.median)
        least = max(4 * error, 0.05 * was)
        if size >= 10 and now - was > least:
            losses = f"the loss was {was:.3f} before and is {now:.3f} after"
            rates = f"the learning rate went from {lr[i - 1]:.3g} to {lr[i]:.3g}"
            return f"resumed at step {step:,}: {losses}; {rates}"
    return None


def plateau(run):
    *_, third, fourth = np.array_split(run.train["loss"], 4)
    was, now, error = compared(third, fourth, np.mean)
    least = max(2 * error, 0.002 * now)
    is_flat = len(fourth) >= 50 and was - now < least
    why = loss_rises(run) or loss_stuck(run)
    if is_flat and not why:
        return f"{was:.4f} in the third quarter, {now:.4f} in the last"
    return None


def compared(before, after, of):
    """(`of` the losses before, `of` those after, standard error of the difference of means)."""
    errors = []
    for losses in (before, after):
        errors.append(mean(losses, np.std) / np.sqrt(len(losses)))
    return mean(before, of), mean(after, of), math.hypot(*errors)


def overfitting(run):
    _, curve, _ = loss_curve(run)
    val_loss = run.evals["val_loss"]
    best = known(val_loss).min(initial=math.inf)
    is_best = val_loss == best
    step = mean(run.evals["step"][is_best][:1])
    was = mean(curve[run.train["step"] >= step][:1])
    now = mean(curve[-1:])
    last = mean(val_loss[-1:])
    if last > 1.005 * best and now < was:
        rose = f"validation from {best:.4f} at step {step:,.0f} to {last:.4f}"
        return f"{rose}, training from {was:.4f} to {now:.4f}"
    return None


# ---- detectors: memory and speed -----------------------------------------------------------------


def out_of_memory(run):
    """The events say which micro-batch fits now. If none did, the way the run ended says so."""
    for row in happened(run, "out_of_memory")[-1:]:
        return f"last at step {row['step']:,}; now micro_batch {row['micro_batch']}"
    ending = ended(run)
    if "out of memory" in ending:
        return ending
    return None


def parts_of(run, field, count):
    """The numbers of a field in equal parts of a run; if it is short, all are NaN."""
    values = run.train[field]
    if len(values) < 40:
        values = np.full(count, math.nan)
    return np.array_split(values, count)


def memory_grows(run):
    """A staircase: a peak that keeps rising long after all that a step needs was allocated."""
    parts = parts_of(run, "mem_gb", 6)[1:]
    peaks = [mean(part, np.max) for part in parts]
    first = peaks[0]
    last = peaks[-1]
    is_rise = np.diff(peaks) > 0.01 * first
    rises = np.count_nonzero(is_rise)
    if rises >= 3 and last > 1.15 * first:
        return f"the peak is {first:.2f} GB after a third of the run, {last:.2f} GB at its end"
    return None


def throughput_falls(run):
    first, *_, last = map(median, parts_of(run, "tokens_per_sec", 4))
    if last < 0.85 * first:
        return f"{first:,.0f} tokens/s in the first quarter of the run, {last:,.0f} in the last"
    return None


def waits_for_data(run):
    share = mean(run.train["data_ms"]) / mean(run.train["step_ms"])
    if share > 0.1 and len(run.train["step"]) >= 20:
        return f"{share:.0%} of the time of all steps"
    return None

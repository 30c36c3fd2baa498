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
        first = f"the first at step {skips[0]['step']:,}"
        return f"{len(skips):,} not finite and skipped, {first}; {rollbacks} rollbacks"


def clipped_always(run):
    clip = run.fact("config", "grad_clip")
    norms = run.train["grad_norm"]
    late = known(norms[len(norms) // 5 :])
    share = mean(late > clip)
    if len(late) >= 16 and clip > 0 and share > 0.9:
        typical = f"{median(late):.3g} in the median"
        return f"its norm is above {clip:g} in {share:.0%} of the late steps, and {typical}"


def norm_is_zero(run):
    norms = known(run.train["grad_norm"])
    last_other = np.flatnonzero(norms).max(initial=-1)
    zeros = len(norms) - 1 - last_other
    if zeros >= 5:
        return f"its norm is exactly 0 in the last {zeros:,} steps"


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
    if n > max(49, run.fact("config", "warmup_steps")) and is_flat and not last < 0.9 * guess:
        return f"{first:.3f} at the start, {last:.3f} in the last quarter; a guess has {guess:.3f}"


def underfitting(run):
    loss = known(run.train["loss"])
    last = mean(loss[-(len(loss) // 10) :])
    val_loss = mean(known(run.evals["val_loss"])[-1:])
    guess = guessing(run)
    is_high = len(loss) >= 100 and min(last, val_loss) > 0.6 * guess
    is_general = abs(val_loss - last) <= 0.1 * last
    why = loss_stuck(run) or loss_rises(run) or loss_spikes(run)
    if is_high and is_general and not why:
        return f"training ends at {last:.3f}, validation at {val_loss:.3f}; a guess has {guess:.3f}"


def loss_rises(run):
    _, curve, noise = loss_curve(run)
    lowest = known(curve).min(initial=math.inf)
    rise = mean(curve[-1:]) - lowest
    error = noise / math.sqrt(half_window(run))
    if rise > max(6 * error, 0.05 * lowest):
        return f"it ends {rise:.3f} above {lowest:.3f}"


def loss_spikes(run):
    loss, curve, noise = loss_curve(run)
    excess = loss - curve
    is_high = excess > max(0.1, 8 * noise)
    starts = np.flatnonzero(np.diff(is_high, prepend=False) & is_high)
    steps = run.train["step"]
    if len(starts):
        found = f"{len(starts):,} in all, the first at step {steps[starts[0]]:,.0f}"
        highest = steps[np.nanargmax(excess)]
        replay = f"{to_paste('replay.py', run.folder)} --step={highest:.0f}"
        return f"{found}; see the highest with `{replay}`"


def diverges_after_resume(run):
    loss = run.train["loss"]
    lr = run.train["lr"]
    for row in happened(run, "resume"):
        i = np.count_nonzero(run.train["step"] <= row["step"])
        size = min(50, i, len(loss) - i)
        was, now, error = compared(loss[i - size : i], loss[i : i + size], np.median)
        if size >= 10 and now - was > max(4 * error, 0.05 * was):
            losses = f"the loss was {was:.3f} before and is {now:.3f} after"
            rates = f"the learning rate went from {lr[i - 1]:.3g} to {lr[i]:.3g}"
            return f"resumed at step {row['step']:,}: {losses}; {rates}"


def plateau(run):
    *_, third, fourth = np.array_split(run.train["loss"], 4)
    was, now, error = compared(third, fourth, np.mean)
    is_flat = len(fourth) >= 50 and was - now < max(2 * error, 0.002 * now)
    if is_flat and not (loss_rises(run) or loss_stuck(run)):
        return f"{was:.4f} in the third quarter, {now:.4f} in the last"


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
    step = mean(run.evals["step"][val_loss == best][:1])
    was = mean(curve[run.train["step"] >= step][:1])
    now = mean(curve[-1:])
    last = mean(val_loss[-1:])
    if last > 1.005 * best and now < was:
        rose = f"validation from {best:.4f} at step {step:,.0f} to {last:.4f}"
        return f"{rose}, training from {was:.4f} to {now:.4f}"


# ---- detectors: memory and speed -----------------------------------------------------------------


def out_of_memory(run):
    """The events say which micro-batch fits now. If none did, the way the run ended says so."""
    for row in happened(run, "out_of_memory")[-1:]:
        return f"last at step {row['step']:,}; now micro_batch {row['micro_batch']}"
    ending = ended(run)
    return ending if "out of memory" in ending else None


def parts_of(run, field, count):
    """The numbers of a field in equal parts of a run; if it is short, all are NaN."""
    values = run.train[field]
    if len(values) < 40:
        values = np.full(count, math.nan)
    return np.array_split(values, count)


def memory_grows(run):
    """A staircase: a peak that keeps rising long after all that a step needs was allocated."""
    parts = parts_of(run, "mem_gb", 6)[1:]
    first, *_, last = peaks = [mean(part, np.max) for part in parts]
    rises = np.count_nonzero(np.diff(peaks) > 0.01 * first)
    if rises >= 3 and last > 1.15 * first:
        return f"the peak is {first:.2f} GB after a third of the run, {last:.2f} GB at its end"


def throughput_falls(run):
    first, *_, last = map(median, parts_of(run, "tokens_per_sec", 4))
    if last < 0.85 * first:
        return f"{first:,.0f} tokens/s in the first quarter of the run, {last:,.0f} in the last"


def waits_for_data(run):
    share = mean(run.train["data_ms"]) / mean(run.train["step_ms"])
    if share > 0.1 and len(run.train["step"]) >= 20:
        return f"{share:.0%} of the time of all steps"

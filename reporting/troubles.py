"""Troubles of a run: a detector for each returns what in the rows shows it, in words, or None. It
has the name that its trouble has in docs/trouble.md, where causes and cures stand."""

import math
import re
from collections import namedtuple
from functools import cache

import numpy as np

from plumbing.console import REPO, shown, to_paste
from reporting.record import known, last, mean, median, smooth
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
    few = max(2, 0.01 * len(run.train["step"]))
    if len(skips) > few or (skips and "not finite" in ended(run)):
        return f"{len(skips):,} not finite and skipped, the first at step {skips[0]['step']:,}"
    return None


def clipped_always(run):
    clip = run.fact("grad_clip")
    norms = run.train["grad_norm"]
    late = known(norms[len(norms) // 5 :])
    share = mean(late > clip)
    if len(late) >= 16 and clip > 0 and share > 0.9:
        return (
            f"its norm is above {clip:g} in {share:.0%} of the late steps, and {median(late):.3g} "
            "in the median"
        )
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
    curve = smooth(loss, run.half)
    if len(known(loss)) < 20:
        curve[:] = math.nan
    noise = 1.4826 * median(np.abs(loss - curve))  # from the median deviation to the standard one
    return loss, curve, noise


def guessing(run):
    """ln V, the loss of a uniform guess; NaN if V is not on record."""
    classes = run.fact("vocab_size")
    return math.log(classes) if classes > 1 else math.nan


def loss_stuck(run):
    loss = known(run.train["loss"])
    n = len(loss)
    guess = guessing(run)
    was = mean(loss[: max(3, n // 20)])
    now = mean(loss[-(n // 4) :])
    is_flat = abs(was - now) <= 0.02 * was
    is_long = n > max(49, run.fact("warmup_steps"))
    is_high = not now < 0.9 * guess  # also where the guess is not known
    if is_long and is_flat and is_high:
        return f"{was:.3f} at the start, {now:.3f} in the last quarter; a guess has {guess:.3f}"
    return None


def underfitting(run):
    loss = known(run.train["loss"])
    end = mean(loss[-(len(loss) // 10) :])
    val_loss = last(known(run.evals["val_loss"]))
    guess = guessing(run)
    is_long = len(loss) >= 100
    is_high = min(end, val_loss) > 0.6 * guess
    is_general = abs(val_loss - end) <= 0.1 * end
    why = loss_stuck(run) or loss_rises(run) or loss_spikes(run)
    if is_long and is_high and is_general and not why:
        return f"training ends at {end:.3f}, validation at {val_loss:.3f}; a guess has {guess:.3f}"
    return None


def loss_rises(run):
    _, curve, noise = loss_curve(run)
    lowest = known(curve).min(initial=math.inf)
    rise = last(curve) - lowest
    error = noise / math.sqrt(run.half)
    if rise > max(6 * error, 0.05 * lowest):
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
        replay = to_paste(REPO / "replay.py", shown(run.folder))
        return (
            f"{len(starts):,} in all, the first at step {first:,.0f}; see the highest with "
            f"`{replay} --step={highest:.0f}`"
        )
    return None


def diverges_after_resume(run):
    loss = run.train["loss"]
    lr = run.train["lr"]
    for row in happened(run, "resume"):
        step = row["step"]
        i = np.count_nonzero(run.train["step"] <= step)
        size = min(50, i, len(loss) - i)
        was, now, error = compared(loss[i - size : i], loss[i : i + size], np.median)
        if size >= 10 and now - was > max(4 * error, 0.05 * was):
            return (
                f"resumed at step {step:,}: the loss was {was:.3f} before and is {now:.3f} after; "
                f"the learning rate went from {lr[i - 1]:.3g} to {lr[i]:.3g}"
            )
    return None


def plateau(run):
    *_, third, fourth = np.array_split(run.train["loss"], 4)
    was, now, error = compared(third, fourth, np.mean)
    is_flat = len(fourth) >= 50 and was - now < max(2 * error, 0.002 * now)
    why = loss_rises(run) or loss_stuck(run)
    if is_flat and not why:
        return f"{was:.4f} in the third quarter, {now:.4f} in the last"
    return None


def compared(before, after, of):
    """(`of` the losses before, `of` those after, standard error of the difference of means)."""
    errors = [mean(losses, np.std) / np.sqrt(len(losses)) for losses in (before, after)]
    return mean(before, of), mean(after, of), math.hypot(*errors)


def overfitting(run):
    _, curve, _ = loss_curve(run)
    val_loss = run.evals["val_loss"]
    best = known(val_loss).min(initial=math.inf)
    step = mean(run.evals["step"][val_loss == best][:1])
    was = mean(curve[run.train["step"] >= step][:1])
    now = last(curve)
    if last(val_loss) > 1.005 * best and now < was:
        return (
            f"validation from {best:.4f} at step {step:,.0f} to {last(val_loss):.4f}, "
            f"training from {was:.4f} to {now:.4f}"
        )
    return None


# ---- detectors: memory and speed -----------------------------------------------------------------


def out_of_memory(run):
    """The events say which micro-batch fits now. If none did, the way the run ended says so."""
    for row in happened(run, "out_of_memory")[-1:]:
        return f"last at step {row['step']:,}; now micro_batch {row['micro_batch']}"
    return ended(run) if "out of memory" in ended(run) else None


def memory_grows(run):
    """A staircase: a peak that keeps rising long after all that a step needs was allocated."""
    parts = np.array_split(run.train["mem_gb"], 6)
    peaks = [mean(part, np.max) for part in parts[1:]]
    was = peaks[0]
    now = peaks[-1]
    rises = np.count_nonzero(np.diff(peaks) > 0.01 * was)
    if rises >= 3 and now > 1.15 * was and len(run.train["step"]) >= 40:
        return f"the peak is {was:.2f} GB after a third of the run, {now:.2f} GB at its end"
    return None


def throughput_falls(run):
    was, *_, now = map(median, np.array_split(run.train["tokens_per_sec"], 4))
    if now < 0.85 * was and len(run.train["step"]) >= 40:
        return f"{was:,.0f} tokens/s in the first quarter of the run, {now:,.0f} in the last"
    return None


def waits_for_data(run):
    share = mean(run.train["data_ms"]) / mean(run.train["step_ms"])
    if share > 0.1 and len(run.train["step"]) >= 20:
        return f"{share:.0%} of the time of all steps"
    return None

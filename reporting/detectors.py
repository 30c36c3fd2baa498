"""Detectors of trouble: each returns what in the rows of a run shows it, in words, or None.

A detector's name is that of its trouble in docs/trouble.md.
"""

import math

import numpy as np

from reporting.record import half_window, known, mean, median, plain, smooth
from reporting.results import best_row, ended, happened, unit_of


def updates_fail(run):
    skips = [row["step"] for row in happened(run, "skipped")]
    reasons = [str(row.get("why")) for row in happened(run, "rollback")]
    rollbacks = sum("not finite" in reason for reason in reasons)
    few = max(2, 0.01 * len(run.train["step"]))
    if not rollbacks and len(skips) <= few:
        return None
    first = f", the first at step {skips[0]:,}" if skips else ""
    return f"{len(skips):,} not finite and skipped{first}; {rollbacks} rollbacks"


def clipped_always(run):
    clip = run.fact("config", "grad_clip")
    norms = run.train["grad_norm"]
    begin = len(norms) // 5
    late = known(norms[begin:])
    if not clip > 0 or len(late) < 16:
        return None
    share = np.mean(late > clip)
    if share <= 0.9:
        return None
    typical = f"{median(late):.3g} in the median"
    return f"its norm is above {clip:g} in {share:.0%} of the late steps, and {typical}"


def norm_is_zero(run):
    norms = known(run.train["grad_norm"])
    last_other = np.flatnonzero(norms).max(initial=-1)
    zeros = len(norms) - 1 - last_other
    if zeros < 5:
        return None
    return f"its norm is exactly 0 in the last {zeros:,} steps"


def loss_curve(run):
    """(loss, smoothed, standard deviation of the noise); all NaN if the run is too short."""
    loss = run.train["loss"]
    if len(known(loss)) < 20:
        unknown = np.full(len(loss), math.nan)
        return loss, unknown, math.nan
    curve = smooth(loss, half_window(run))
    deviation = median(np.abs(loss - curve))
    noise = 1.4826 * deviation  # from the median deviation to the standard one
    return loss, curve, noise


def guessing(run):
    """ln V, the loss of a uniform guess; NaN if V is not on record."""
    meta = run.info["data"].get("meta", {})
    classes = plain(meta.get("vocab_size"))
    return math.log(classes) if classes > 1 else math.nan


def loss_stuck(run):
    loss = known(run.train["loss"])
    n = len(run.train["step"])
    if len(loss) < 50 or n <= run.fact("config", "warmup_steps"):
        return None
    guess = guessing(run)
    few = max(3, n // 20)
    first = mean(loss[:few])
    quarter = n // 4
    last = mean(loss[-quarter:])
    change = abs(first - last)
    if change > 0.02 * first or last < 0.9 * guess:
        return None
    return f"{first:.3f} at the start, {last:.3f} in the last quarter; a guess has {guess:.3f}"


def underfitting(run):
    loss = known(run.train["loss"])
    val_losses = known(run.evals["val_loss"])
    if len(loss) < 100 or not len(val_losses):
        return None
    if loss_stuck(run) or loss_rises(run) or loss_spikes(run):  # that is why it is high
        return None
    guess = guessing(run)
    tenth = len(loss) // 10
    last = mean(loss[-tenth:])
    val_loss = val_losses[-1]
    is_high = min(last, val_loss) > 0.6 * guess
    is_near = abs(val_loss - last) <= 0.1 * last
    if not is_high or not is_near:
        return None
    return f"training ends at {last:.3f}, validation at {val_loss:.3f}; a guess has {guess:.3f}"


def loss_rises(run):
    _, curve, noise = loss_curve(run)
    lowest = known(curve).min(initial=math.inf)
    at_end = mean(curve[-1:])
    rise = at_end - lowest
    error = noise / math.sqrt(half_window(run))
    least = max(6 * error, 0.05 * lowest)
    if rise > least:
        return f"it ends {rise:.3f} above {lowest:.3f}"
    return None


def loss_spikes(run):
    loss, curve, noise = loss_curve(run)
    threshold = np.maximum(8 * noise, 0.1)
    excess = loss - curve
    is_high = excess > threshold
    was_high = np.append(False, is_high[:-1])
    spikes = run.train["step"][is_high & ~was_high]
    if not len(spikes):
        return None
    first = spikes[0]
    return f"{len(spikes):,} in all, the first at step {first:,.0f}"


def diverges_after_resume(run):
    steps = {row["step"] for row in happened(run, "resume")}
    shows = [jump_at(run, step) for step in sorted(steps)]
    return next(filter(None, shows), None)


def jump_at(run, step):
    """What shows that the loss is higher after a resume at `step`, or None."""
    loss = run.train["loss"]
    lr = run.train["lr"]
    i = int(np.searchsorted(run.train["step"], step, side="right"))
    size = min(50, i, len(loss) - i)
    before = known(loss[i - size : i])
    after = known(loss[i : i + size])
    if min(len(before), len(after)) < 10:
        return None
    was = median(before)
    now = median(after)
    error = math.hypot(before.std(), after.std()) / math.sqrt(size)
    least = max(4 * error, 0.05 * was)
    if now - was <= least:
        return None
    shows = f"resumed at step {step:,}: the loss was {was:.3f} before and is {now:.3f} after"
    lr_before = lr[i - 1]
    jump = np.log(lr[i] / lr_before)
    if abs(jump) > 0.2:
        shows += f"; the learning rate jumped from {lr_before:.3g} to {lr[i]:.3g}"
    return shows


def plateau(run):
    loss = run.train["loss"]
    n = len(loss)
    third = known(loss[n // 2 : 3 * n // 4])
    fourth = known(loss[3 * n // 4 :])
    if n < 200 or not len(third) or not len(fourth):
        return None
    if loss_rises(run) or loss_stuck(run):
        return None
    was = mean(third)
    now = mean(fourth)
    error = math.hypot(standard_error(third), standard_error(fourth))
    least = max(2 * error, 0.002 * now)
    if was - now >= least:
        return None
    return f"{was:.4f} in the third quarter, {now:.4f} in the last"


def standard_error(values):
    """Of their mean."""
    return values.std() / math.sqrt(len(values))


def overfitting(run):
    _, curve, _ = loss_curve(run)
    best, step = best_row(run)
    val_loss = run.evals["val_loss"]
    at_end = mean(val_loss[-1:])
    i = np.searchsorted(run.train["step"], step)
    if not at_end > 1.005 * best or i >= len(curve):
        return None
    if not curve[-1] < curve[i]:
        return None
    fell = f"training from {curve[i]:.4f} to {curve[-1]:.4f}"
    return f"validation from {best:.4f} at step {step:,} to {at_end:.4f}, {fell}"


def out_of_memory(run):
    """The events say which micro-batch fits now. If none did, the way the run ended says so."""
    rows = happened(run, "out_of_memory")
    if not rows:
        ending = ended(run)
        return ending if "out of memory" in ending else None
    sizes = [f"{key} {size}" for key, size in rows[-1].items() if key.endswith("micro_batch")]
    left = ", ".join(sizes)
    first = rows[0]["step"]
    last = rows[-1]["step"]
    return f"first at step {first:,}, last at {last:,}; now {left}"


def memory_grows(run):
    """A staircase: a peak that keeps rising long after all that a step needs was allocated."""
    if len(run.train["step"]) < 40:
        return None
    parts = np.array_split(run.train["mem_gb"], 6)[1:]
    peaks = [known(part).max(initial=-math.inf) for part in parts]
    first = peaks[0]
    last = peaks[-1]
    is_rise = np.diff(peaks) > 0.01 * first
    rises = np.count_nonzero(is_rise)
    if rises < 3 or not last > 1.15 * first:
        return None
    return f"the peak is {first:.2f} GB after a third of the run, {last:.2f} GB at its end"


def throughput_falls(run):
    if len(run.train["step"]) < 40:
        return None
    quarters = np.array_split(run.train["tokens_per_sec"], 4)
    first = median(quarters[0])
    last = median(quarters[-1])
    if not last < 0.85 * first:
        return None
    return f"{first:,.0f} {unit_of(run)}/s in the first quarter of the run, {last:,.0f} in the last"


def waits_for_data(run):
    if len(known(run.train["loss"])) < 20:
        return None
    waited = mean(run.train["data_ms"])
    share = waited / mean(run.train["step_ms"])
    return f"{share:.0%} of the time of all steps" if share > 0.1 else None

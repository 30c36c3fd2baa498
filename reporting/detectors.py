"""Detectors of trouble: each returns what in the rows of a run shows it, in words, or None.

A detector's name is that of its trouble, in reporting/troubles.py and docs/trouble.md.
"""

import math

import numpy as np

from reporting.record import half_window, known, mean, median, plain, smooth
from reporting.results import best_row, ended, happened, unit


def updates_fail(run):
    skips = [row["step"] for row in happened(run, "skipped")]
    rollbacks = sum("not finite" in str(row.get("why")) for row in happened(run, "rollback"))
    found = rollbacks or len(skips) > max(2, 0.01 * len(run.train["step"]))
    first = f", the first at step {skips[0]:,}" if skips else ""
    return f"{len(skips):,} not finite and skipped{first}; {rollbacks} rollbacks" if found else None


def clipped_always(run):
    clip = run.fact("config", "grad_clip")
    late = known(run.train["grad_norm"][len(run.train["step"]) // 5 :])
    share = np.mean(late > clip) if len(late) >= 16 else 0
    if not clip > 0 or share <= 0.9:
        return None
    return f"its norm is above {clip:g} in {share:.0%} of the late steps, and {median(late):.3g} in the median"


def norm_vanishes(run):
    norms, losses = known(run.train["grad_norm"]), known(run.train["loss"])
    if len(norms) >= 5 and not norms[-5:].any():
        zeros = np.argmax(np.append(norms[::-1], 1) != 0)
        return f"its norm is exactly 0 in the last {zeros:,} steps"
    if min(len(norms), len(losses)) < 50 or losses[-1] < 0.1 * losses[0]:
        return None
    first, late = (median(part) for part in np.array_split(norms, 10)[::9])
    return f"its norm falls from {first:.3g} to {late:.3g}" if late < 1e-3 * first else None


def loss_curve(run):
    """(loss, smoothed, standard deviation of the noise); all NaN if the run is too short."""
    loss = run.train["loss"]
    if len(known(loss)) < 20:
        return loss, np.full(len(loss), math.nan), math.nan
    curve = smooth(loss, half_window(run))
    return loss, curve, 1.4826 * median(np.abs(loss - curve))  # from MAD to standard deviation


def guessing(run):
    """ln V, the loss of a uniform guess; NaN if V is not on record."""
    classes = plain(run.info["data"].get("meta", {}).get("vocab_size"))
    return math.log(classes) if classes > 1 else math.nan


def loss_stuck(run):
    loss, n = known(run.train["loss"]), len(run.train["step"])
    if len(loss) < 50 or n <= run.fact("config", "warmup_steps") or run.train["step"][0] > 1:
        return None
    guess, first, last = guessing(run), mean(loss[: max(3, n // 20)]), mean(loss[-(n // 4) :])
    if abs(first - last) > 0.02 * first or last < 0.9 * guess:
        return None
    return f"{first:.3f} at the start, {last:.3f} in the last quarter; a guess has {guess:.3f}"


def underfitting(run):
    loss, val, guess = known(run.train["loss"]), known(run.evals["val_loss"]), guessing(run)
    unstable = loss_rises(run) or oscillation(run) or loss_spikes(run)  # that is why it is high
    if len(loss) < 100 or not len(val) or loss_stuck(run) or unstable:
        return None
    last = mean(loss[-(len(loss) // 10) :])
    if not min(last, val[-1]) > 0.6 * guess or abs(val[-1] - last) > 0.1 * last:
        return None
    return f"training ends at {last:.3f}, validation at {val[-1]:.3f}; a guess has {guess:.3f}"


def loss_rises(run):
    _, curve, noise = loss_curve(run)
    lowest = known(curve).min(initial=math.inf)
    rise = mean(curve[-1:]) - lowest
    least = max(6 * noise / math.sqrt(half_window(run)), 0.05 * lowest)
    return f"it ends {rise:.3f} above {lowest:.3f}" if rise > least else None


def oscillation(run):
    """Swings of the loss, after it has fallen, that outlast the noise of single batches."""
    loss = known(run.train["loss"])
    late = loss[len(loss) // 2 :]
    if len(late) < 40 or mean(late) > 0.9 * mean(loss[: max(3, len(loss) // 20)]):
        return None
    size = max(4, len(late) // 24)  # steps in a block
    late = late[: len(late) // size * size]
    noise = math.sqrt(np.mean(np.diff(late) ** 2) / 2 / size)  # standard error of a block's mean
    means = late.reshape(-1, size).mean(axis=1)
    place = np.arange(len(means))
    swings = means - np.polyval(np.polyfit(place, means, 2), place)
    deviation = swings.std(ddof=3)
    turns = np.count_nonzero(np.diff(np.sign(swings)))
    rise = np.max(means - np.minimum.accumulate(means))  # a loss that falls in steps has none
    if deviation < max(2.5 * noise, 0.01 * mean(late)) or turns < 4 or rise < 2 * deviation:
        return None
    return f"late means of {size} steps swing by {deviation:.3f}, above the noise of batches"


def loss_spikes(run):
    loss, curve, noise = loss_curve(run)
    high = np.append(False, loss - curve > np.maximum(8 * noise, 0.1))
    spikes = run.train["step"][high[1:] & ~high[:-1]]  # where it begins to be high
    return f"{len(spikes):,} in all, the first at step {spikes[0]:,.0f}" if len(spikes) else None


def diverges_after_resume(run):
    loss, step, lr = (run.train[name] for name in ("loss", "step", "lr"))
    for at in sorted({row["step"] for row in happened(run, "resume")}):
        i = int(np.searchsorted(step, at, side="right"))
        size = min(50, i, len(step) - i)
        before, after = known(loss[i - size : i]), known(loss[i : i + size])
        if min(len(before), len(after)) < 10:
            continue
        was, now = median(before), median(after)
        error = math.hypot(before.std(), after.std()) / math.sqrt(size)
        if now - was > max(4 * error, 0.05 * was):
            rate = f"; the learning rate jumped from {lr[i - 1]:.3g} to {lr[i]:.3g}"
            words = f"resumed at step {at:,}: the loss was {was:.3f} before and is {now:.3f} after"
            return words + rate * bool(abs(np.log(lr[i] / lr[i - 1])) > 0.2)


def plateau(run):
    loss, n = run.train["loss"], len(run.train["step"])
    third, fourth = known(loss[n // 2 : 3 * n // 4]), known(loss[3 * n // 4 :])
    if n < 200 or not len(third) or not len(fourth) or loss_rises(run) or loss_stuck(run):
        return None
    error = math.hypot(*(part.std() / math.sqrt(len(part)) for part in (third, fourth)))
    if mean(third) - mean(fourth) >= max(2 * error, 0.002 * mean(fourth)):
        return None
    return f"{mean(third):.4f} in the third quarter, {mean(fourth):.4f} in the last"


def overfitting(run):
    curve, (best, step) = loss_curve(run)[1], best_row(run)
    then, at_end = np.searchsorted(run.train["step"], step), mean(run.evals["val_loss"][-1:])
    if not at_end > 1.005 * best or then >= len(curve) or not curve[-1] < curve[then]:
        return None
    fell = f"training from {curve[then]:.4f} to {curve[-1]:.4f}"
    return f"validation from {best:.4f} at step {step:,} to {at_end:.4f}, {fell}"


def out_of_memory(run):
    """The events say which micro-batch fits now. If none did, the way the run ended says so."""
    rows = happened(run, "out_of_memory")
    if not rows:
        return ended(run) if "out of memory" in ended(run) else None
    left = ", ".join(f"{k} {v}" for k, v in rows[-1].items() if k.endswith("micro_batch"))
    return f"first at step {rows[0]['step']:,}, last at {rows[-1]['step']:,}; now {left}"


def memory_grows(run):
    """A staircase: a peak that keeps rising long after all that a step needs was allocated."""
    parts = np.array_split(run.train["mem_gb"], 6)
    peaks = np.array([known(part).max(initial=-math.inf) for part in parts[1:]])
    rises = np.count_nonzero(np.diff(peaks) > 0.01 * peaks[0])
    found = len(run.train["step"]) >= 40 and rises >= 3 and peaks[-1] > 1.15 * peaks[0]
    words = f"the peak is {peaks[0]:.2f} GB after a third of the run, {peaks[-1]:.2f} GB at its end"
    return words if found else None


def throughput_falls(run):
    first, last = (median(part) for part in np.array_split(run.train["tokens_per_sec"], 4)[::3])
    found = len(run.train["step"]) >= 40 and last < 0.85 * first
    words = f"{first:,.0f} {unit(run)}/s in the first quarter of the run, {last:,.0f} in the last"
    return words if found else None


def waits_for_data(run):
    waiting = mean(run.train["data_ms"]) / mean(run.train["step_ms"])
    found = len(known(run.train["loss"])) >= 20 and waiting > 0.1
    return f"{waiting:.0%} of the time of all steps" if found else None

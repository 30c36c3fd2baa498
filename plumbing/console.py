"""What a run prints: its plan, lines of steps, evaluations, events, and what to type next."""

import math
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from plumbing.cli import printable, show

REPO = Path(__file__).resolve().parent.parent


def say(*words: object) -> None:
    """Print on rank 0 only, so that all ranks have one log. What cannot be written is dropped."""
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK") == "0":  # torchrun sets both
        with suppress(OSError, ValueError):  # a full disk, a closed pipe or terminal
            print(printable(" ".join(map(str, words))), flush=True)


def shown(path: str | Path) -> str:
    """The path to type: as it is, or relative to the working directory if that is shorter."""
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except OSError:  # the working directory is gone
        return str(path)


def fit(value: float, width: int, digits: int) -> str:
    """`value` in `width` characters: up to `digits` decimals, as many as fit; else as 1e-05."""
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:{width}.0e}"
    texts = (f"{value:{width}.{places}f}" for places in range(digits, -1, -1))
    return next((text for text in texts if len(text) <= width), f"{value:{width}.0e}")


def duration(seconds: float) -> str:
    """Time as 0:46, 12:04:05, 12d 4h."""
    hours, rest = divmod(int(seconds), 3600)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def best_words(best_metric: str, state: dict[str, Any]) -> str:
    """The best so far, by the metric that decides: `best val_accuracy 0.5712 at step 1,100`."""
    name = "validation loss" if best_metric == "val_loss" else best_metric.removeprefix("-")
    if not math.isfinite(state["best_score"]):
        return f"no best {name} yet"
    sign = -1 if best_metric.startswith("-") else 1
    return f"best {name} {sign * state['best_score']:.4f} at step {state['best_step']:,}"


# ---- lines of a run ------------------------------------------------------------------------------

COLUMNS = {  # field of a row -> (heading, width, function that formats its value)
    "loss": ("loss", 6, lambda value: fit(value, 6, 4)),
    "grad_norm": ("norm", 6, lambda value: fit(value, 6, 3)),
    "lr": ("lr", 8, lambda value: f"{value:8.2e}"),
    "step_ms": ("ms", 6, lambda value: fit(value, 6, 1)),
    "data_ms": ("wait", 5, lambda value: fit(value, 5, 1)),
    "tokens_per_sec": ("tok/s", 6, lambda value: fit(value / 1000, 5, 3) + "k"),
    "mfu": ("mfu", 6, lambda value: fit(100 * value, 5, 1) + "%"),
    "mem_gb": ("GB", 5, lambda value: fit(value, 5, 2)),
    "gpu_util": ("gpu%", 4, lambda value: fit(value, 4, 0)),  # only if NVML reports it
}
EVALUATION = {
    "val_loss": "val loss {:.4f}",
    "val_bpb": "bits/byte {:.4f}",
    "val_accuracy": "accuracy {:.1%}",
    "val_tokens": "(first {:,} tokens)",
}
NOT_SHOWN = "kind step tokens sequences epoch skipped best_val_loss".split()


class Table:
    """The lines of steps, under a header that is printed again whenever the columns change."""

    def __init__(self, max_steps: int):
        self.max_steps = max_steps
        self.names = []  # of the columns

    def print_row(self, row: dict[str, Any]) -> None:
        """Print a row of metrics.jsonl. A field that is not in COLUMNS gets a column of its own."""
        columns = {n: COLUMNS[n] for n in COLUMNS if n != "gpu_util" or row.get(n) is not None}
        for name in [name for name in row if name not in (*COLUMNS, *NOT_SHOWN)]:
            width = max(7, len(name))
            columns[name] = (name, width, lambda value, width=width: fit(value, width, 4))
        columns["left"] = ("left", 8, duration)
        row = row | {"left": (self.max_steps - row["step"]) * row["step_ms"] / 1000}
        if self.names != list(columns):
            self.names = list(columns)
            heads = " ".join(f"{heading:>{width}}" for heading, width, _ in columns.values())
            start = f"{'step/total':<{len(progress(0, self.max_steps))}}"
            say(f"{start} {heads}")
        cells = [progress(row["step"], self.max_steps)]
        for name, (_, width, write) in columns.items():
            text = "n/a" if row[name] is None else write(row[name])
            cells.append(f"{text:>{width}}")
        say(*cells)

    def print_evaluation(self, row: dict[str, Any], is_best: bool) -> None:
        """Print a row of an evaluation, with every further number that evaluate() returned."""
        names = [name for name in {**EVALUATION, **row} if name in row and name not in NOT_SHOWN]
        words = [EVALUATION.get(name, name + " {:.4f}").format(row[name]) for name in names]
        words += ["best"] if is_best else []
        say(progress(row["step"], self.max_steps), "  ".join(words))


def progress(step: int, max_steps: int) -> str:
    width = max(7, len(str(max_steps)))
    return f"{step:>{width}}/{max_steps:<{width}}"


def print_event(step: int, event: str, fields: dict[str, Any]) -> None:
    details = "  ".join(f"{key} {in_short(value, event)}" for key, value in fields.items())
    say(f"{step:>7} {event.replace('_', ' ')}: {details}")


def in_short(value: Any, event: str) -> str:
    """A field of an event. Of the hashes of files that differ, their names."""
    if event == "inexact_resume":
        then, now = value
        return ", ".join(now) if isinstance(now, dict) else f"{then} -> {now}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def diagnosis(why: str, recent: list[dict[str, Any]], rollbacks: int) -> str:
    """Why a run cannot continue, with the numbers of its `recent` rows."""
    rates, norms, losses = (
        " ".join(f"{row[k]:.3g}" for row in recent) for k in ("lr", "grad_norm", "loss")
    )
    return (
        f"{why}, at step {recent[-1]['step']} after {rollbacks} rollbacks. The last learning rates: "
        f"{rates}; gradient norms: {norms}; losses: {losses}; sequence: {recent[-1]['sequences']:,}. "
        "Try a lower --peak_lr, more --warmup_steps, a smaller --grad_clip, --dtype=float32; then "
        "a new --out_dir"
    )


def print_plan(run: Any, peak: tuple, changed: dict) -> None:
    """Print the plan of the run. peak: (FLOP/s or None, source). changed: {knob: [then, now]} since the
    checkpoint it resumes."""
    c = run.facts["config"] | run.facts["run"]
    name, meta = run.facts["data"]["name"], run.facts["data"]["meta"]
    model = run.model.describe() if hasattr(run.model, "describe") else type(run.model).__name__
    size = sum(weight.numel() for weight in run.model.parameters())
    batch = "{batch_size} x {accum_steps} x {world_size} = {global_batch}".format(**c)
    train, val, unit = len(run.train_data), len(run.val_data), ""
    if "train_tokens" in meta:
        batch += f" sequences of {c['block_size']} = {c['global_batch'] * c['block_size']:,} tokens"
        train, val, unit = meta["train_tokens"], meta["val_tokens"], " tokens"
    course = "{optimizer}, {schedule} {peak_lr:g} to {min_lr:g}".format(**c)
    rate = f"{peak[0] / 1e12:.3g} TFLOP/s" if peak[0] else "n/a"
    strict = f"deterministic {show(c['deterministic'])}"
    if c["deterministic"] == "portable":
        strict += ": the same bits on every x86-64 CPU with AVX2; slower, on one thread"
    lines = {
        "run": f"resumes from {shown(run.path)}" if run.path else f"new, in {shown(c['out_dir'])}",
        "changed": ", ".join(f"{key} {then} -> {now}" for key, (then, now) in changed.items()),
        "model": f"{model}; {size:,} parameters",
        "data": f"{name}: {train:,}{unit} to train on, {val:,} to validate",
        "batch": f"{batch} a step",
        "steps": f"{c['max_steps']:,}, {len(run.train_data) // c['global_batch']:,} to an epoch; {course}",
        "device": f"{c['device']}, {c['threads']} threads",
        "dtype": f"{c['dtype']} ({run.reasons['dtype']})",
        "compile": f"{show(c['compile'])} ({run.reasons['compile']}); {strict}",
        "peak": f"{rate} ({peak[1]})",
    }
    for name, words in lines.items():
        print_line(name, words)


def print_line(name: str, words: str) -> None:
    if words:
        say(f"{name:<8} {words}")


def print_end(ended: str, state: dict, seconds: dict, folder: Path, best_metric: str) -> None:
    """How a run ended, above its report; the error of a failed one is the very last line."""
    if not ended.startswith("failed"):
        say(f"{ended} at step {state['step']:,}; {best_words(best_metric, state)}")
    spent = ", ".join(f"{kind} {value:.1f}" for kind, value in seconds.items())
    say(f"{sum(seconds.values()):.1f} s: {spent}")
    if ended.startswith(("stopped by", "left")):
        checkpoint = shown(folder / f"ckpt_{state['step']:08}.pt")
        say(f"{checkpoint} is kept; to resume, type the same command again")


def print_next(ended: str, folder: Path, writes_text: bool) -> None:
    """Print commands to paste next. writes_text: whether sample.py can load the run's model and data."""
    scripts = [shown(REPO / script) for script in ("sample.py", "report.py")]
    sample, report = (shlex.join(["python", script, shown(folder)]) for script in scripts)
    lines = {report: "what happened, as a picture and in words"}
    if ended.startswith(("finished", "stopped early")):
        lines = {sample: "text from its best weights"} if writes_text else {}
        lines[f"{report} OTHER"] = "beside another run"
    for line, what in lines.items():
        say(f"{line:<50}  # {what}")

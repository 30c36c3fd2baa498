"""What a run prints: its plan, lines of steps, evaluations, events, and what to type next."""

import os
import shlex
import sys
import textwrap
from pathlib import Path

from plumbing import devices
from plumbing.identity import changed_knobs
from plumbing.ranks import say, world_size

REPO = Path(__file__).resolve().parent.parent
STYLES = {"dim": 2, "red": 31, "green": 32}
CALM = ("resume", "inexact_resume")  # events that are not printed in red


# ---- formatting ----------------------------------------------------------------------------------


def paint(words, style, stream=None):
    """`words` in colour, if `stream` is a terminal that shows colours (https://no-color.org)."""
    stream = stream or sys.stdout
    plain = not stream or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return words if plain or not stream.isatty() else f"\033[{STYLES[style]}m{words}\033[0m"


def shown(path):
    """The path to type: as it is, or relative to the working directory if that is shorter."""
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except OSError:  # the working directory was removed
        return str(path)


def wrapped(words, indent):
    """`words` in lines of up to 80, all but the first indented; never splits a path or flag."""
    blank = " " * indent
    looks = {"initial_indent": blank, "subsequent_indent": blank, "break_long_words": False}
    return textwrap.fill(words, 80, break_on_hyphens=False, **looks)[indent:]


def fit(value, width, digits):
    """`value` in `width` characters: up to `digits` decimals, as many as fit; else as 1e-05."""
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:{width}.0e}"
    texts = (f"{value:{width}.{places}f}" for places in range(digits, -1, -1))
    return next((text for text in texts if len(text) <= width), f"{value:{width}.0e}")


def rate(per_second):
    """Tokens per second in 6 characters: 853 is 0.853k, 1234567 is 1.235M."""
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9}
    letter = next((each for each in sizes if per_second < 999.95 * sizes[each]), "G")
    return fit(per_second / sizes[letter], 5, 3) + letter


def duration(seconds):
    """Time in up to 8 characters: 0:46, 12:04:05, 12d 4h."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days = hours // 24
    if days >= 1000:
        return f"{days}d"
    if hours >= 100:
        return f"{days}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# ---- lines of a run ------------------------------------------------------------------------------

COLUMNS = {  # field of a row -> (heading, width, function that formats its value)
    "loss": ("loss", 6, lambda value: fit(value, 6, 4)),
    "grad_norm": ("norm", 6, lambda value: fit(value, 6, 3)),
    "lr": ("lr", 8, lambda value: f"{value:8.2e}"),
    "step_ms": ("ms", 6, lambda value: fit(value, 6, 1)),
    "data_ms": ("wait", 5, lambda value: fit(value, 5, 1)),
    "tokens_per_sec": ("tok/s", 6, rate),
    "mfu": ("mfu", 6, lambda value: fit(100 * value, 5, 1) + "%"),
    "mem_gb": ("GB", 5, lambda value: fit(value, 5, 2)),
    "gpu_util": ("gpu%", 4, lambda value: fit(value, 4, 0)),  # only if NVML reports it
}
NOT_SHOWN = "kind step tokens sequences epoch skipped".split()


class Table:
    """The lines of steps, under a header that is printed again whenever the columns change."""

    def __init__(self, max_steps):
        self.max_steps = max_steps
        self.names = []  # of the columns

    def print_row(self, row):
        """Print a row of metrics.jsonl. A field that is not in COLUMNS gets a column of its own."""
        columns = dict(COLUMNS)
        if row.get("gpu_util") is None:
            del columns["gpu_util"]
        for name in row:
            if name not in (*COLUMNS, *NOT_SHOWN):
                width = max(7, len(name))
                columns[name] = (name, width, lambda value, width=width: fit(value, width, 4))
        if self.names != list(columns):
            self.names = list(columns)
            start = f"{'step/total':<{len(progress(0, self.max_steps))}}"
            headings = " ".join(f"{heading:>{width}}" for heading, width, _ in columns.values())
            say(paint(f"{start} {headings} {'left':>8}", "dim"))
        cells = (
            f"{'n/a' if row[name] is None else write(row[name]):>{width}}"
            for name, (_, width, write) in columns.items()
        )
        left = duration((self.max_steps - row["step"]) * row["step_ms"] / 1000)
        say(progress(row["step"], self.max_steps), *cells, f"{left:>8}")

    def print_evaluation(self, row, is_best):
        words = f"{progress(row['step'], self.max_steps)} val loss {row['val_loss']:.4f}"
        if "val_bpb" in row:
            words += f"  bits/byte {row['val_bpb']:.4f}"
        words += f"  accuracy {row['val_accuracy']:.1%}"
        known = "kind step val_loss val_bpb val_accuracy val_tokens best_val_loss".split()
        words += "".join(f"  {name} {row[name]:.4f}" for name in row if name not in known)
        if "val_tokens" in row:
            words += f"  (first {row['val_tokens']:,} tokens)"
        say(words + (paint("  best", "green") if is_best else ""))


def diagnosis(why, recent, rollbacks):
    """Why a run cannot continue, with the numbers of its `recent` rows."""
    last = {k: " ".join(f"{row[k]:.3g}" for row in recent) for k in ("lr", "grad_norm", "loss")}
    return (
        f"{why}, at step {recent[-1]['step']} after {rollbacks} rollbacks. The last learning rates: "
        f"{last['lr']}; gradient norms: {last['grad_norm']}; losses: {last['loss']}; the last sequence: "
        f"{recent[-1]['sequences']:,}. Try a lower --peak_lr, more --warmup_steps, a smaller "
        f"--grad_clip, --dtype=float32; then a new --out_dir"
    )


def progress(step, max_steps):
    width = max(7, len(str(max_steps)))
    return f"{step:>{width}}/{max_steps:<{width}}"


def print_event(step, event, fields):
    shorten = changed if event == "inexact_resume" else in_short
    details = "  ".join(f"{key} {shorten(value)}" for key, value in fields.items())
    words = wrapped(f"{event.replace('_', ' ')}: {details}", 8)
    say(f"{step:>7} {words if event in CALM else paint(words, 'red')}")


def changed(pair):
    """[then, now] in short: of hashes of files, the names of those that differ."""
    then, now = pair
    if isinstance(then, dict) and isinstance(now, dict):
        return ", ".join(key for key in now if now[key] != then.get(key))
    return f"{then} -> {now}"


def in_short(value):
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else value


# ---- before the first step -----------------------------------------------------------------------


def print_plan(run, reasons, peak, needs, path, saved):
    """Print the plan of the run, in a few aligned lines.

    reasons: {knob: why it has its value}. peak: (FLOP/s or None, source). needs: memory of a step,
    {kind: bytes or None}. path, saved: the checkpoint to start from, or None.
    """
    changed = changed_knobs(saved["config"], run.facts["config"]) if saved else {}
    free = devices.free_memory(run.device)
    parts = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in needs.items())
    total = sum(size for size in needs.values() if size)
    c = run.facts["config"] | run.facts["run"]
    lines = {
        "run": f"resumes from {shown(path)}" if path else f"new, in {shown(c['out_dir'])}",
        "changed": ", ".join(f"{key} {then} -> {now}" for key, (then, now) in changed.items()),
        "model": describe_model(run.model),
        **describe_data(run, c),
        "steps": f"{c['max_steps']:,}, {len(run.train_data) // c['global_batch']:,} to an epoch; "
        f"{c['optimizer']}, {c['schedule']} {c['peak_lr']:g} to {c['min_lr']:g}",
        "device": f"{c['device']}, {c['threads']} threads",
        "dtype": f"{c['dtype']} ({reasons['dtype']})",
        "compile": f"{str(c['compile']).lower()} ({reasons['compile']}); "
        f"deterministic {str(c['deterministic']).lower()}",
        "peak": describe_peak(c, run.model, peak),
        "memory": f"{gigabytes(total)} GB for a step ({parts}); {gigabytes(free)} GB free",
    }
    for name, words in lines.items():
        if words:
            say(paint(f"{name:<8}", "dim"), wrapped(words, 9))
    if free and total > free:
        say(paint("         more than is free; --grad_checkpoint=true needs less", "red"))


def describe_model(model):
    shape = model.describe() if hasattr(model, "describe") else type(model).__name__
    return f"{shape}; {sum(weight.numel() for weight in model.parameters()):,} parameters"


def describe_data(run, c):
    """The lines `data` and `batch`, in tokens if the data is text."""
    data = run.facts["data"]
    meta = data["meta"]
    batch = f"{c['batch_size']} x {c['accum_steps']} x {c['world_size']} = {c['global_batch']}"
    if "tokenizer" not in meta:
        sizes = f"{len(run.train_data):,} to train on, {len(run.val_data):,} to validate"
        return {"data": f"{data['name']}: {sizes}", "batch": f"{batch} a step"}
    sizes = f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate"
    words = f"{data['name']}, {meta['tokenizer']}: {sizes}; vocabulary {meta['vocab_size']:,}"
    tokens = f"{c['global_batch'] * c['block_size']:,}"
    batch += f" sequences of {c['block_size']} = {tokens} tokens a step"
    return {"data": words, "batch": batch}


def describe_peak(c, model, peak):
    flops, source = peak
    if not flops:
        return f"n/a ({source})"
    words = f"{flops / 1e12:.3g} TFLOP/s ({source})"
    if hasattr(model, "flops_per_token"):
        tokens = c["global_batch"] * c["block_size"] * c["max_steps"]
        seconds = model.flops_per_token() * tokens / (flops * c["world_size"])
        words += f"; all steps at that rate: {duration(seconds)}"
        if price := c.get("dollars_per_hour"):
            words += f", ${seconds / 3600 * c['world_size'] * price:.2f}"
    return words


def gigabytes(size):
    return "n/a" if size is None else f"{size / 1e9:.3f}"


# ---- after the last step -------------------------------------------------------------------------


def print_end(ended, state, seconds, folder, command):
    if ended.startswith("failed"):
        line = f"{Path(command[0]).name}: {ended}"
        say(paint(line, "red", sys.stderr), file=sys.stderr)
    else:
        best = f"{state['best_val_loss']:.4f} at step {state['best_step']:,}"
        say(f"{ended} at step {state['step']:,}; best validation loss {best}")
    spent = ", ".join(f"{kind} {value:.1f}" for kind, value in seconds.items())
    say(f"{sum(seconds.values()):.1f} s: {spent}")
    if ended.startswith(("stopped by", "left")):
        checkpoint = shown(folder / f"ckpt_{state['step']:08}.pt")
        say(f"{checkpoint} is kept; to resume, type the same command again")


def print_next(ended, folder, command, writes_text):
    """Print commands to paste next. command: the arguments that started this run."""
    sample, report = (
        shlex.join(["python", shown(REPO / script), shown(folder)])
        for script in ("sample.py", "report.py")
    )
    commands = {}
    if ended.startswith(("finished", "stopped early")):
        if writes_text:
            commands[sample] = "text from its best weights"
        commands[f"{report} OTHER"] = "beside another run"
    else:
        typed = command == sys.argv  # not in a notebook
        if typed and world_size() == 1 and not ended.startswith("failed"):
            commands[shlex.join(["python", *command])] = "resumes"
        commands[report] = "what happened, as a picture and in words"
    width = min(50, max(map(len, commands)))
    for line, what in commands.items():
        say(f"{line:<{width}}  {paint(f'# {what}', 'dim')}")

"""What a run prints: its plan, lines of steps, evaluations, events, and what to type next."""

import math
import os
import shlex
import sys
import textwrap
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from plumbing.cli import REPO, line_width, printable, product, show
from plumbing.fields import sets_of, shown_fields

CLEAR = "\x1b[K"  # from the cursor to the end of the line
GREEN = "\x1b[32m"
RESET = "\x1b[0m"
LIVE_SECONDS = 0.25  # between two updates of the live line
PLAN = """\
model    {model}; {parameters:,} parameters
data     {dataset}: {train_rows:,} sequences, {val_rows:,} to validate
batch    {batch_size} x {accum_steps} = {sequences:,} sequences of {block_size:,} = {tokens:,} tokens a \
step{on_each_rank}
steps    {max_steps:,}, {warmup_steps:,} of warmup; {optimizer}, {schedule} {peak_lr:g} to {min_lr:g}
device   {device}, {threads} threads, deterministic {deterministic}
dtype    {dtype} ({why[dtype]})
compile  {compile} ({why[compile]})
peak     {peak}"""


def print0(*words: object, colour: str = "", end: str = "\n") -> None:
    """Print on rank 0 only, so that all ranks have one log. What cannot be written is dropped.
    colour: of the text on a terminal, such as GREEN. end: what follows the text."""
    if not is_first_rank():
        return
    text = printable(" ".join(map(str, words)))
    with suppress(OSError, ValueError):  # a full disk, a closed pipe or terminal
        if on_terminal():
            text = f"{CLEAR}{colour}{text}{RESET if colour else ''}"
        print(text, end=end, flush=True)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"  # torchrun sets it


def on_terminal() -> bool:
    """Whether stdout is a terminal that obeys the escape sequences above."""
    return bool(sys.stdout) and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def shown(path: str | Path) -> str:
    """The path to type: as it is, or relative to the working directory if that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def one_line(message: object) -> str:
    """At most 300 characters of a text of any length, for a log."""
    return " ".join(str(message).split())[:300]


def duration(seconds: float) -> str:
    """Time as 0:00:46 or 12 days, 4:00:00."""
    return str(timedelta(seconds=int(seconds)))


def best_words(best_metric: str, state: dict) -> str:
    """What best.pt holds: `best validation loss 1.4599 at step 1,100`."""
    if math.isinf(state["best_val_loss"]):
        return "no validation loss yet"
    by = "best" if best_metric == "val_loss" else f"best by {best_metric}:"
    return f"{by} validation loss {state['best_val_loss']:.4f} at step {state['best_step']:,}"


# ---- lines of a run ------------------------------------------------------------------------------


class Table:
    """The lines of steps, under a header that is printed again whenever the columns change."""

    def __init__(self, max_steps: int):
        self.max_steps = max_steps
        self.header = ""
        self.row = {}  # the row that was printed last
        self.live_again = 0.0  # when the live line may be written again, time.monotonic()

    def print_row(self, row: dict) -> None:
        """Print a row of metrics.jsonl. A field that is not in FIELDS gets a column of its own."""
        self.row = row
        start = self.progress(row["step"])
        left = self.time_left(row["step"]).rjust(8)
        for limit in reversed(range(8)):
            fields = [f for f in shown_fields(row, "train") if f.leaves <= limit]
            cells = [f.shown(row[f.name]).rjust(len(f.column())) for f in fields]
            line = " ".join([start, *cells, left])
            if len(line) <= line_width():
                break
        headings = [field.column() for field in fields]
        header = " ".join(["step/total".ljust(len(start)), *headings, "    left"])
        if header != self.header:
            self.header = header
            print0(header)
        print0(line)

    def progress(self, step: int) -> str:
        return f"{step:>7}/{self.max_steps:<7}"

    def time_left(self, step: int) -> str:
        """At the speed of the row printed last."""
        return duration((self.max_steps - step) * self.row["step_ms"] / 1000)

    def live(self, step: int) -> None:
        """On a terminal, show the step below the last line, which the next line overwrites; a few
        times a second. All other numbers are of the row printed last: nothing is asked of the
        device."""
        now = time.monotonic()
        if now < self.live_again or not on_terminal():
            return
        self.live_again = now + LIVE_SECONDS
        words = self.progress(step)
        if self.row:
            loss = f"loss {self.row['loss']:.4f} at step {self.row['step']:,}"
            words += f"  {loss}  {self.time_left(step)} left"
        print0(words, end="\r")  # the cursor returns to the start, for whatever prints next

    def print_evaluation(self, row: dict, is_best: bool) -> None:
        """Print a row of an evaluation, with every further number that evaluate() returned."""
        fields = shown_fields(row, "eval")
        words = [f"{field.heading} {field.shown(row[field.name]).strip()}" for field in fields]
        best, colour = ("  best", GREEN) if is_best else ("", "")
        print_wrapped(f"{self.progress(row['step'])} {'  '.join(words)}{best}", colour)


def print_event(step: int, event: str, fields: dict) -> None:
    line = f"{step:>7} {event.replace('_', ' ')}:"
    for name, value in fields.items():
        form = ".4g" if isinstance(value, float) else ""
        line += f" {name} {value:{form}} "
    print_wrapped(line)


def print_wrapped(text: str, colour: str = "") -> None:
    """Print lines; one that is wider than the terminal goes on below, indented."""
    for line in text.splitlines():
        print0(textwrap.fill(line, line_width(), subsequent_indent=9 * " "), colour=colour)


def resume_words(found: dict, changed: dict[str, list]) -> str:
    """What the rows say of a resume. found: fields of an event `resume_checked`. changed: see
    change_words()."""
    begin = f"resumed at step {found['from']:,}"
    if found.get("other_course"):
        knobs = knob_words(found["other_course"])
        return f"{begin}: {found['rows']} rows past here were computed{knobs}: no witness"
    words = "nothing to compare with"
    if found["first_difference"]:
        words = "other numbers from step {step:,} on: {field} {then} then, {now} now"
        words = words.format(**found["first_difference"])
    elif found["compared"]:
        return f"{begin}: {found['steps']:,} steps computed again, every loss and norm the same"
    return f"{begin}: {words}; changed since: {change_words(changed) or 'nothing known'}"


def knob_words(knobs: dict) -> str:
    """` with peak_lr 0.001, beta1 0.9`; nothing of no knobs."""
    words = ", ".join(f"{name} {show(value)}" for name, value in knobs.items())
    return words and f" with {words}"


def change_words(changed: dict[str, list]) -> str:
    """What is known to have changed, [then, now] by name. Of a file, its name."""
    words = [
        name if name.endswith(".py") else f"{name} {then} -> {now}"
        for name, (then, now) in changed.items()
    ]
    return ", ".join(words)


def print_plan(run: Any, peak: tuple, changed: dict) -> None:
    """Print the plan of the run. peak: (FLOP/s or NaN, source). changed: {knob: [then, now]} since
    the checkpoint it resumes."""
    from plumbing.machine import flops_per_token  # which imports torch: prepare_data.py need not

    start = f"resumes from {run.path}" if run.path else f"new, in {run.folder.path}"
    print_wrapped(f"run      {start}")
    if changed:
        print_wrapped(f"changed  {change_words(changed)}")
    flops, source = peak
    rate = (
        f"{flops / 1e12:.3g} TFLOP/s"
        if flops > 0
        else "n/a, as repeated timings disagree: the machine is busy"
    )
    known = run.facts["config"] | run.facts["run"]
    sequences = product(known, run.knobs)
    described = getattr(run.model, "describe", lambda: type(run.model).__name__)
    known |= {
        "model": described(),
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "train_rows": len(run.train_data),
        "val_rows": sum(map(len, sets_of(run.val_data).values())),
        "sequences": sequences,
        "tokens": sequences * known["block_size"],
        "on_each_rank": share_words(sequences, known["world_size"]),
        "deterministic": show(known["deterministic"]),
        "compile": show(known["compile"]),
        "why": run.reasons,
        "peak": f"{rate} ({source})",
    }
    print_wrapped(PLAN.format(**known))
    in_update = sum(getattr(each, "flops_per_step", int)() for each in run.optimizers)
    in_model = flops_per_token(run.model) * known["tokens"]
    if in_update > in_model / 10:  # what orthogonal updates cost does not shrink with the batch
        print0(
            f"update   {in_update / 1e9:,.3g} GFLOP a step; the model takes {in_model / 1e9:,.3g}"
        )


def share_words(sequences: int, ranks: int) -> str:
    """Of a batch that several ranks share: `; 64 on each of 8 ranks`."""
    if ranks == 1:
        return ""
    least, rest = divmod(sequences, ranks)
    several = f" or {least + 1}" if rest else ""
    return f"; {least}{several} on each of {ranks} ranks"


def print_end(ended: str, run: Any) -> None:
    """How a run ended, above its report; the error of a failed one is the very last line."""
    if not ended.startswith("failed"):
        best = best_words(run.facts["config"]["best_metric"], run.state)
        print0(f"{ended} at step {run.state['step']:,}; {best}")
    seconds = run.clock.seconds
    spent = ", ".join(f"{kind} {value:.1f}" for kind, value in seconds.items())
    print0(f"{seconds.total():.1f} s: {spent}")


def print_next(ended: str, folder: Path, facts: dict) -> None:
    """Print what to type next, if a checkpoint is there. facts: of run.json."""
    is_saved = any(folder.glob("*.pt"))
    if ended.startswith(("stopped by", "left")):
        goal = f"to resume from {shown(folder)}" if is_saved else "nothing was saved"
        print0(f"{goal}; type the same command again")
    if not is_saved:
        return
    if "tokenizer" in facts["data"]["meta"]:
        sample = to_paste(REPO / "sample.py", shown(folder), *script_flag(facts))
        print0(f"{sample:<50}  # a sample of its text")
    print0(f"{to_paste(REPO / 'report.py', shown(folder)):<50}  # its curves and results")


def to_paste(script: str | Path, *words: str, ranks: int = 1) -> str:
    """The command that runs a script, by so many processes."""
    torchrun = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    return shlex.join([*(torchrun if ranks > 1 else ["python"]), shown(script), *words])


def script_flag(facts: dict) -> list[str]:
    """[--script=FILE] for a tool that needs the script of a run. facts: of its run.json."""
    script = facts["command"][0]
    return [] if Path(script).name == "train.py" else [f"--script={shown(script)}"]

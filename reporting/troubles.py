"""What to do about a trouble: its likely causes, a command that tells them apart, what to try.

The texts are those of docs/trouble.md. Advice depends on the knobs of the run: none proposes a
change that the run has already made.
"""

import re
import shlex
from collections import namedtuple
from functools import cache

import numpy as np

from plumbing.console import REPO
from reporting import detectors

Finding = namedtuple("Finding", "name title shows causes tell reading cure look")
# The troubles that report.py knows, in the order in which it names them. The name is that of the
# detector, and stands in the heading of a section of docs/trouble.md. Then what tells the causes
# apart: a flag to add to the run's own command ("knob": the first of the knobs), a script with the
# flags of the run, or a whole command. Then knobs to change, by a factor (peak_lr*0.5) or to a
# value (schedule:constant=cosine: only if it is constant).
TROUBLES = {
    "updates_fail": (
        "--dtype=float32",
        "peak_lr*0.5 warmup_steps*2 grad_clip*0.5 grad_clip:0=1 dtype=float32",
    ),
    "clipped_always": ("--grad_clip=0", "grad_clip*4 peak_lr*0.5"),
    "norm_vanishes": ("check.py --only=sanity", "peak_lr*0.1 warmup_steps*2 dtype:float16=float32"),
    "loss_stuck": ("check.py --only=sanity", "peak_lr*10"),
    "underfitting": (
        "check.py --only=sanity",
        "max_steps*4 peak_lr*3 n_embd*2 n_layer*2 dropout*0.5",
    ),
    "loss_rises": ("check.py --only=lr", "peak_lr*0.5 warmup_steps*2 schedule:constant=cosine"),
    "loss_spikes": ("--seed=2", "peak_lr*0.5 grad_clip*0.5 grad_clip:0=1"),
    "diverges_after_resume": ("--resume=never", "peak_lr*0.5"),
    "plateau": ("check.py --only=lr", "min_lr*10 n_embd*2"),
    "overfitting": ("knob", "dropout*2 dropout:0=0.1 weight_decay*2 patience:0=3 max_steps*0.5"),
    "out_of_memory": (
        "bench.py --only=memory",
        "batch_size*0.5 accum_steps*2 grad_checkpoint:false=true",
    ),
    "memory_grows": ("bench.py --only=memory", ""),
    "throughput_falls": ("vmstat 1 5", ""),
    "waits_for_data": ("knob", "num_workers*2 num_workers:0=2"),
}


@cache
def texts():
    """{name of a trouble: {"title", "Symptoms", "Causes", "Diagnosis", "Cure"}} of
    docs/trouble.md."""
    page = (REPO / "docs" / "trouble.md").read_text(encoding="utf-8")
    found = {}
    for section in page.split("\n## "):
        heading = re.match(r"(.*) \((\w+)\)\n", section)
        if heading:
            parts = re.findall(r"\*\*(\w+)\*\*: (.*?)(?=\*\*\w+\*\*:|\n\n|\Z)", section, re.DOTALL)
            about = {key: plain_text(text) for key, text in parts}
            found[heading[2]] = about | {"title": heading[1]}
    return found


def plain_text(markdown):
    """On one line, without links and the last full stop."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(text.split()).removesuffix(".")


def troubles(run):
    """The Findings of a run, in the order of TROUBLES."""
    with np.errstate(all="ignore"):  # unknown values are NaN, and show nothing
        found = {name: getattr(detectors, name)(run) for name in TROUBLES}
    return [finding(run, name, shows) for name, shows in found.items() if shows]


def finding(run, name, shows):
    tell, knobs = TROUBLES[name]
    tries = to_try(run.info["config"] | run.info["run"], knobs)
    changes = [f"--{knob}={value} (now {now})" for knob, value, now in tries]
    about = texts()[name]
    return Finding(
        name=name,
        title=about["title"],
        shows=shows,
        causes=about["Causes"],
        tell=command(run, tell, tries, name),
        reading=about["Diagnosis"],
        cure=", ".join(changes) or about["Cure"],
        look=look(run, name),
    )


def to_try(knobs, wanted):
    """[(knob, value to try, value now)] of the changes in `wanted` that would change something."""
    tries = []
    for change in wanted.split():
        name, only, how, by = re.fullmatch(r"(\w+):?(\w*)([*=])(\S+)", change).groups()
        now = knobs.get(name)
        is_number = type(now) in (int, float)
        shown = f"{now:g}" if is_number else str(now).lower()
        if how == "=" and now is not None and only in ("", shown) and shown != by:
            tries.append((name, by, shown))
        elif how == "*" and is_number and now:
            value = max(1, round(now * float(by))) if isinstance(now, int) else now * float(by)
            tries.append((name, f"{value:.4g}", shown))
    return tries


def command(run, tell, tries, name):
    """The command to paste; "" if this run has none."""
    script, *flags = [str(word) for word in run.info["command"] or ["train.py"]]
    if tell == "knob":
        tell = "".join(f"--{knob}={value}" for knob, value, _ in tries[:1])
    start, own = launcher(run), [tell, f"--out_dir=out/{run.name}_{name}"]
    if not tell.startswith("--"):
        if ".py " not in tell:
            return tell
        if not script.endswith("train.py"):  # bench.py and check.py know no other script
            return ""
        tool, *own = tell.split()
        start, script = ["python"], script.removesuffix("train.py") + tool
    replaced = {"--resume", "--out_dir", own[0].partition("=")[0]}
    flags = [flag for flag in flags if flag.partition("=")[0] not in replaced]
    return shlex.join([*start, script, *flags, *own])


def launcher(run):
    ranks = run.fact("hardware", "world_size")
    several = ["torchrun", "--standalone", f"--nproc_per_node={ranks:.0f}"]
    return several if ranks > 1 else ["python"]


def replay(run, *words):
    """The command that computes a step of this run again."""
    script = str((run.info["command"] or ["train.py"])[0])
    place = ""
    if script.endswith("train.py"):
        place = script.removesuffix("train.py")
    else:
        words = *words, f"--script={script}"
    return shlex.join([*launcher(run), f"{place}replay.py", str(run.folder), *words])


def replay_of(run, event):
    """Of the step of a skipped update or a rollback, as it was before a later rollback undid it."""
    i = run.events.index(event)
    rollbacks = [n for n, each in enumerate(run.events) if each["event"] == "rollback"]
    undoes = [n for n in rollbacks if n == i or (n > i and run.events[n]["step"] < event["step"])]
    flags = [f"--step={event.get('at_step', event['step'])}"]
    if undoes:
        flags += [f"--before_rollback={1 + sum(n < i for n in rollbacks)}"]
    return replay(run, *flags)


def look(run, name):
    """The command that shows the step of a trouble; "" if there is no single one."""
    if name == "loss_spikes":
        loss, curve, _ = detectors.loss_curve(run)
        return replay(run, f"--step={run.train['step'][np.nanargmax(loss - curve)]:.0f}")
    bad = [event for event in run.events if event["event"] in ("skipped", "rollback")]
    return replay_of(run, bad[0]) if bad and name == "updates_fail" else ""

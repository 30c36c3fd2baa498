"""What to do about a trouble: its likely causes, a command that tells them apart, what to try.

Advice depends on the knobs of the run: none proposes a change that the run has already made.
"""

import re
import shlex
import tomllib
from collections import namedtuple
from pathlib import Path

import numpy as np

from reporting import detectors

TROUBLES = tomllib.loads(Path(__file__).with_name("troubles.toml").read_text(encoding="utf-8"))
Finding = namedtuple("Finding", "name title shows causes tell reading cure look")


def troubles(run):
    """The Findings of a run, in the order of troubles.toml."""
    with np.errstate(all="ignore"):  # unknown values are NaN, and show nothing
        found = {name: getattr(detectors, name)(run) for name in TROUBLES}
    return [finding(run, name, shows) for name, shows in found.items() if shows]


def finding(run, name, shows):
    about = TROUBLES[name]
    tries = to_try(run.info["config"] | run.info["run"], about.get("knobs", ""))
    words = [f"--{knob}={value} (now {now})" for knob, value, now in tries]
    cure = ", ".join(filter(None, [*words, about.get("cure")]))
    tell = command(run, about["tell"], tries, name)
    told = about["title"], shows, about["causes"], tell, about["reading"]
    return Finding(name, *told, cure, look(run, name))


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
    """The command that computes a step of this run again, or asks where it parts from another."""
    script = str((run.info["command"] or ["train.py"])[0])
    place = script.removesuffix("train.py") if script.endswith("train.py") else ""
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
    if not bad or name not in ("updates_fail", "float16_scale_collapses"):
        return ""
    return replay_of(run, bad[0 if name == "updates_fail" else -1])

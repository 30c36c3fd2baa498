"""What to do about a trouble: its likely causes, what tells them apart, its cure, as docs/trouble.md
says; and the command that shows the step in which it was."""

import re
import shlex
from collections import namedtuple
from functools import cache

import numpy as np

from plumbing.console import REPO
from reporting import detectors

Finding = namedtuple("Finding", "name title shows causes diagnosis cure look")


@cache
def texts():
    """{name of a trouble: {"title", "Symptoms", "Causes", "Diagnosis", "Cure"}} of
    docs/trouble.md. Empty in a fork that has no such page."""
    path = REPO / "docs" / "trouble.md"
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
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
    """The Findings of a run, in the order of docs/trouble.md. A trouble has the name of its
    detector."""
    found = []
    with np.errstate(all="ignore"):  # unknown values are NaN, and show nothing
        for name, about in texts().items():
            shows = getattr(detectors, name)(run)
            if shows:
                words = about["title"], shows, about["Causes"], about["Diagnosis"], about["Cure"]
                found.append(Finding(name, *words, look(run, name)))
    return found


def replay(run, *words):
    """The command that computes a step of this run again."""
    ranks = run.fact("hardware", "world_size")
    start = ["python"]
    if ranks > 1:
        start = ["torchrun", "--standalone", f"--nproc_per_node={ranks:.0f}"]
    script = str((run.info["command"] or ["train.py"])[0])
    place = ""
    if script.endswith("train.py"):
        place = script.removesuffix("train.py")
    else:
        words = *words, f"--script={script}"
    return shlex.join([*start, f"{place}replay.py", str(run.folder), *words])


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

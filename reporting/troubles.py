"""What to do about a trouble: its title and cure in docs/trouble.md, where its causes stand; and the
command that shows the step in which it was."""

import re
from collections import namedtuple
from functools import cache

import numpy as np

from plumbing.console import REPO, to_paste
from reporting import detectors
from reporting.results import happened

Finding = namedtuple("Finding", "name title shows cure look")
SECTION = re.compile(r"([^\n]*) \((\w+)\)\n.*\*\*Cure\*\*: (.*?)(?:\n\n|\Z)", re.DOTALL)


@cache
def texts():
    """{name of a trouble: (title, cure)} of docs/trouble.md, in its order."""
    page = (REPO / "docs" / "trouble.md").read_text(encoding="utf-8")
    found = {}
    for section in filter(None, map(SECTION.match, page.split("\n## "))):
        title, name, cure = section.groups()
        without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cure)
        found[name] = title, " ".join(without_links.split())
    return found


def troubles(run):
    """The Findings of a run, in the order of docs/trouble.md. A trouble has the name of its
    detector."""
    found = []
    with np.errstate(all="ignore"):  # unknown values are NaN, and show nothing
        for name, (title, cure) in texts().items():
            shows = getattr(detectors, name)(run)
            if shows:
                found.append(Finding(name, title, shows, cure, look(run, name)))
    return found


def look(run, name):
    """The command that shows the step of a trouble; "" if there is no single one."""
    if name == "loss_spikes":
        loss, curve, _ = detectors.loss_curve(run)
        return replay(run, run.train["step"][np.nanargmax(loss - curve)])
    bad = happened(run, "skipped", "rollback")
    return replay_of(run, bad[0]) if bad and name == "updates_fail" else ""


def replay_of(run, event):
    """Of the step of a skipped update or a rollback, as it was before a later rollback undid it."""
    i = run.events.index(event)
    rollbacks = [n for n, each in enumerate(run.events) if each["event"] == "rollback"]
    undoes = [n for n in rollbacks if n == i or (n > i and run.events[n]["step"] < event["step"])]
    step = event.get("at_step", event["step"])
    before = 1 + sum(n < i for n in rollbacks)
    return replay(run, step) + (f" --before_rollback={before}" if undoes else "")


def replay(run, step):
    """The command that computes a step of this run again."""
    return f"{to_paste('replay.py', run.folder)} --step={step:.0f}"

"""
Reports on a run from the metrics.jsonl and run.json in its folder:

    python report.py                                # a table of the runs in out/; or name a folder
    python report.py out/shakespeare                # writes report.png and report.md there
    python report.py out/a out/b out/c              # writes compare.png and compare.md into out/a
    python report.py out/a out/b --axis=time        # their curves by time, not by step
    python report.py out/shakespeare --html=true    # also report.html (of several: compare.html)
    python report.py out/shakespeare --watch=true   # report.html, updated while the run continues

Several runs are called by the knobs that differ. Those that differ only in their seeds are one row:
mean ± standard deviation, n; of finished runs alone, whose knobs no resume has changed. Runs on
other data, or with other eval_tokens, are last. A terminal shows the columns for which it has room.
Prints also the troubles that it finds, and paths. A folder that holds no run is left out with a line.
A field that it does not know gets a panel and a row. With DOLLARS_PER_HOUR, the price of a device, in
the environment, a result is what the run has cost.
"""

import plumbing  # noqa: F401  first: Ctrl-C in the imports is one line

# isort: split
import shlex
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from plumbing.cli import BadInput, configured, run_script
from plumbing.console import change_words, print0, print_wrapped, resume_words, shown
from plumbing.data import FALLBACK
from plumbing.files import replacing
from reporting.panels import axis_of, heading, page, title_of, write_picture
from reporting.record import is_running, known_knobs, read_run
from reporting.results import (
    HEADER,
    differences,
    edges,
    fitted,
    happened,
    listing,
    name_runs,
    outcome,
    settings_of,
    table,
    write,
)
from reporting.troubles import troubles

report_dir = ""  # output folder; "" = that of the (first) run
axis = "auto"  # of the curves: auto | step | tokens | time; auto = step; tokens if batches differ
html = False  # also write a page: one file that needs no network and no server
watch = False  # rewrite that page every 10 s while the run continues, and write all at its end

PAUSE = 10  # seconds between two pages of --watch
TOLD_ELSEWHERE = ("kind", "step", "event", "finite", "seconds")  # fields of events


# ---- words: report.md, compare.md ----------------------------------------------------------------


def text_of(runs):
    """The Markdown of a report: the results, and what was run; of several runs what differs, of one
    also its troubles, its last sample and what happened."""
    lines = [
        f"# {title_of(runs)}\n",
        *(f"{line}\n" for line in heading(runs)),
        *(f"> **{warning}**\n" for run in runs for warning in warnings(run)),
        f"![Curves]({stem(runs)}.png)\n",
        "## Result\n",
    ]
    if len(runs) == 1:
        return "\n".join(lines + sections(runs[0]))
    names = [run.name for run in runs]
    columns = [run.facts["config"] | outcome(run) for run in runs]
    each = table(("", *names), differences(columns))
    return "\n".join([*lines, table(HEADER, listing(settings_of(runs))), "## Each run\n", each])


def stem(runs):
    """Of the names of the files."""
    return "report" if len(runs) == 1 else "compare"


def sections(run):
    """The Markdown of one run, below its curves, as lines."""
    lines = [table(("", run.name), outcome(run).items()), "## Known troubles\n", *found_in(run)]
    for sample in happened(run, "sample")[-1:]:
        text = textwrap.indent(str(sample["text"]), "    ", lambda line: True)
        lines += [f"## A sample, from step {sample['step']:,}\n", text, ""]
    lines += ["## What happened\n", table(("step", "event", ""), event_rows(run))]
    command = shlex.join(["python", *run.facts.get("command", [])])
    config = run.facts["config"]
    known = known_knobs(run.facts)
    defaults = {name: known[name].default for name in config if name in known}
    knobs = table(("", "default", run.name), differences([defaults, config]))
    return [*lines, f"## What was run\n\n`{command}`\n", knobs, "[run.json](run.json) has all.\n"]


def found_in(run):
    """The troubles of a run, as lines of Markdown."""
    lines = []
    for each in troubles(run):
        lines.append(f"- **{each.title}** (`{each.name}`): {each.shows}.\n  Cure: {each.cure}")
    return [
        *lines,
        "\nOf the troubles in docs/trouble.md, which has the causes, no other is found.\n",
    ]


def warnings(run):
    """Lines on what may be taken for something that it is not."""
    asked = run.facts["config"].get("dataset")
    learned = run.facts.get("name")
    fallback = (
        f"trained on {learned!r} INSTEAD OF {asked!r}, which was unavailable: its numbers say "
        f"nothing about {asked!r}"
    )
    is_another = (asked, learned) in FALLBACK.items()
    is_off = run.facts.get("deterministic") is False
    holds = {
        fallback: is_another,
        "`deterministic` was off; computed again, it may differ": is_off,
        f"{run.unreadable:,} damaged line(s) are left out": run.unreadable,
        "run.json is missing or damaged; how it ran is not known": not run.facts["config"],
    }
    return [f"{run.name}: {warning}." for warning in filter(holds.get, holds)]


def event_rows(run):
    """[(step, event, details)] in the order of the events."""
    rows = []
    changed = {}  # at the latest resume
    for event in run.events:
        name = event["event"]
        if name in ("sample", "saved"):
            continue
        if name == "resume":
            changed = event.get("changed", {})
            words = change_words(changed) or "nothing known"
            details = (
                f"from {event.get('checkpoint')}; changed since: {words}; "
                "exact only if a check that follows says so"
            )
        elif name == "resume_checked":
            details = resume_words(event, changed)
        else:
            seconds = {kind: round(each, 1) for kind, each in event.get("seconds", {}).items()}
            details = "; ".join(
                textwrap.shorten(f"{key} {value}", 200)
                for key, value in (event | seconds).items()
                if key not in TOLD_ELSEWHERE and value is not None
            )
        rows.append((f"{event['step']:,}", name.replace("_", " "), details))
    return rows


# ---- files ---------------------------------------------------------------------------------------


def write_reports(runs):
    """Write what is asked for; with --watch, the page until no run is active. Returns the paths."""
    path = Path(report_dir or runs[0].folder) / stem(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    page_path = path.with_suffix(".html")
    by = axis_of(runs) if axis == "auto" else axis
    if watch:
        print0(f"open {shown(page_path)} in a browser; Ctrl-C stops it")
    with suppress(KeyboardInterrupt):
        while watch and any(map(is_running, runs)):
            write(page_path, page(runs, text_of(runs), PAUSE, by))
            time.sleep(PAUSE)
            runs = read_runs([run.folder for run in runs])
    paths = [path.with_suffix(".png"), path.with_suffix(".md")]
    with replacing(paths[0]) as temporary:
        write_picture(temporary, runs, by)
    write(paths[1], text_of(runs))
    if html or watch:
        paths.append(page_path)
        write(page_path, page(runs, text_of(runs), axis=by))
    return paths


# ---- the command ---------------------------------------------------------------------------------


def read_runs(folders):
    """The runs in `folders`, with names that tell them apart. Of several folders, one that holds
    none is left out with a line; raises BadInput if none is left."""
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except BadInput as error:
            if not runs and folder == folders[-1]:
                raise
            print0(f"left out: {error}")
    if len(runs) > 1:
        name_runs(runs)
    return runs


def print_settings(runs):
    """Print the results of several runs, and return the runs in their order, best first."""
    settings = settings_of(runs)
    print0(fitted(HEADER, listing(settings)), end="")
    print_wrapped("\n".join([f"best: {shown(settings[0][0].folder)}", *edges(settings)]))
    return [run for setting in settings for run in setting]


def print_summary(runs):
    """Print the knobs that differ, if the names do not hold them, and what may be wrong."""
    lines = [f"{run.name}: {run.words}" for run in runs if run.words not in ("", run.name)]
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        lines += warnings(run)
        lines += [f"{before}{each.title}: {each.shows}" for each in troubles(run)]
    print_wrapped("\n".join(lines))


def main(argv=None):
    folders = []
    with configured(globals(), argv=argv, names=folders), np.errstate(all="ignore"):
        folders = folders or ["out"]
        inside = sorted(path.parent for path in Path(folders[0]).glob("*/metrics.jsonl"))
        if len(folders) == 1 and inside:
            print_settings(read_runs(inside))
            return
        runs = read_runs(folders)
        paths = write_reports(runs)
        if len(runs) > 1:
            runs = print_settings(runs)
        print_summary(runs)
        for path in paths:
            print0(shown(path))


if __name__ == "__main__":
    sys.exit(run_script(main))

"""
Reports on a run from the metrics.jsonl and run.json in its folder:

    python report.py                                # a table of the runs in out/; or name a folder
    python report.py out/shakespeare                # writes report.png and report.md there
    python report.py out/a out/b out/c              # writes compare.png and compare.md into out/a
    python report.py out/shakespeare --html=true    # also report.html (of several: compare.html)
    python report.py out/shakespeare --watch=true   # report.html, updated while the run continues
    python report.py records/*/                     # the table of what was measured

Prints the troubles that it finds, what differs between several runs, and paths. Where there are
records, it prints their table alone. A folder that holds no run is left out with a line. A field
that it does not know gets a panel and a row.
"""

import itertools
import math
import os
import re
import shlex
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

from plumbing.cli import configured, fail, read_knobs, run_script
from plumbing.console import duration
from plumbing.data import FALLBACK
from plumbing.files import replacing
from reporting import pictures, record, results
from reporting.page import page
from reporting.record import last_step, read_run
from reporting.records import HEADER, record_rows
from reporting.results import aligned, ended, happened, outcome, table
from reporting.troubles import replay_of, troubles

report_dir = ""  # output folder; "" = that of the (first) run
dollars_per_hour = 0.0  # of one device, [0, inf); 0 = no cost
html = False  # also write a page: one file that needs no network and no server
watch = False  # rewrite that page every 10 s while the run continues, and write all at its end

MOST_COLUMNS = 4  # runs beside each other on the console; of more, a row each


# ---- words ---------------------------------------------------------------------------------------


def unusual_knobs(run):
    """[(knob, value in this run, default in train.py)] where the two differ, without folders."""
    names = ["train.py", os.path.basename(" ".join(map(str, run.info["command"][:1])))]
    scripts = [Path(__file__).parent / name for name in names]  # it may have been renamed
    knobs = next((read_knobs(path) for path in scripts if path.is_file()), {})
    rows = []
    for name, value in run.info["config"].items():
        default = knobs[name].default if name in knobs else "no longer a knob"
        if value != default and not name.endswith("_dir"):
            rows.append((f"`{name}`", f"`{value}`", f"`{default}`"))
    return rows


def facts(run):
    """{part of run.json: {name: value}} of what is said there in single words, but for knobs."""
    parts = {part: run.info[part] for part in ("run", "hardware", "versions", "git")}
    parts["data"] = run.info["data"] | run.info["data"].get("meta", {})
    for part, told in parts.items():
        single = {}
        for name, value in told.items():
            if not isinstance(value, dict | list | None):
                single[name] = textwrap.shorten(str(value), 80)
        parts[part] = single
    return parts


def about(run):
    """What was run, in Markdown."""
    command = shlex.join(["python", *map(str, run.info["command"])])
    lines = [f"- **command** `{command}`"]
    lines.append(f"- **when** {run.info.get('start')} to {run.info.get('end')}")
    for part, told in facts(run).items():
        words = ", ".join(f"{name} {value}" for name, value in told.items())
        lines.append(f"- **{part}** {words or 'n/a'}")
    knobs = table(("knob", "here", "default today"), unusual_knobs(run))
    return "\n".join([*lines, "", knobs])


def details(event):
    """The fields of an event, in words. A pair is what was and is; of hashes, names alone count."""
    words = []
    for key, value in event.items():
        if key in ("kind", "step", "event", "finite"):
            continue
        if isinstance(value, list) and len(value) == 2:
            was, now = value
            value = f"was {was}, is {now}"
            if isinstance(now, dict):
                value = f"changed in {', '.join(now)}"
        words.append(f"{key} {value}")
    return textwrap.shorten("; ".join(words), 400)


def event_rows(run, most=200):
    """[(step, event, details)] in the order of the events; skips in a row share one."""
    rows = []
    shown = [event for event in run.events if event["event"] not in ("sample", "saved")]
    for name, group in itertools.groupby(shown, lambda event: event["event"]):
        group = list(group)
        told = [details(event) for event in group]
        if name == "skipped" and len(group) > 1:
            told = [f"{len(group)} updates, the last at step {group[-1]['step']:,}"]
        if name in ("skipped", "rollback"):
            told[0] += f"; see `{replay_of(run, group[0])}`"
        for event, words in zip(group, told, strict=False):
            rows.append((f"{event['step']:,}", name.replace("_", " "), words))
    if len(rows) > most:
        rows[most:] = [("...", f"and {len(rows) - most:,} more", "")]
    return rows


def not_exact(run):
    """Lines on what may set this run apart from an uninterrupted one on one machine."""
    names = {"inexact_resume": "resumed", "audit": "audited, and the odd result dropped"}
    lines = []
    for event in run.events:
        if event["event"] in names:
            what = names[event["event"]]
            lines.append(f"- step {event['step']:,}: {what}: {details(event)}")
    if run.info["run"].get("deterministic") is False:
        lines.append("- `deterministic` was off")
    if run.unreadable:
        lines.append(f"- {run.unreadable:,} damaged line(s) of metrics.jsonl are left out")
    if not run.info["run"]:
        lines.append("- run.json is missing or damaged")
    return lines or ["Nothing on record: any resume was bit for bit."]


def found_in(run, title):
    """The troubles of a run, and its last sample, as paragraphs of Markdown."""
    found = troubles(run)
    lines = [f"## Known troubles{title}\n"]
    for each in found:
        shows = f"{each.shows}. Likely causes: {each.causes}."
        lines.append(f"- **{each.title}** (`{each.name}`): {shows}")
        lines.append(f"  Diagnosis: {each.diagnosis}.")
        if each.look:
            lines.append(f"  Look into that step: `{each.look}`.")
        lines.append(f"  Cure: {each.cure}.")
    if found:
        lines.append("\ndocs/trouble.md has more on each.\n")
    else:
        lines.append("None that report.py knows.\n")
    samples = happened(run, "sample")
    if samples:
        step = samples[-1]["step"]
        text = str(samples[-1].get("text"))
        tildes = max(re.findall("~+", text), key=len, default="") + "~~~"
        lines += [f"## A sample, from step {step:,}{title}\n", tildes, text, tildes, ""]
    return lines


def words(run, image):
    """The text of report.md. image: whether there is a report.png."""
    config = run.info["config"]
    asked = config.get("dataset")
    learned = run.info["data"].get("name")
    lines = [f"# {run.name}: {ended(run)}\n"]
    if learned and learned != asked and learned == FALLBACK.get(asked):
        what = f"INSTEAD OF {asked!r}, which was unavailable:"
        lines.append(f"> **This run trained on {learned!r} {what}")
        lines.append(f"> its numbers say nothing about {asked!r}.**\n")
    if image:
        lines.append("![Curves of this run](report.png)\n")
    results_of_run = outcome(run, dollars_per_hour).items()
    rows = [(f"**{what}**", value, window) for what, (value, window) in results_of_run]
    lines += ["## Result\n", table(("", "", "over"), rows), *found_in(run, "")]
    lines += ["## What was run\n", about(run) if run.info["run"] else "Not on record.\n"]
    spent, missing = results.seconds_by_kind(run)
    rows = [(kind, duration(seconds)) for kind, seconds in spent.items()]
    lines += ["## Where the time went\n", table(("kind", "wall-clock"), rows)]
    if missing:
        lines.append(f"{missing} session(s) recorded no times (killed, or still running).\n")
    lines += ["## What happened\n", table(("step", "event", ""), event_rows(run))]
    return "\n".join([*lines, "## What was not exact\n", *not_exact(run), ""])


def column_of(run):
    """{what: words}: a run's column in a comparison, its settings first."""
    column = {}
    for part in facts(run).values():
        column |= part
    for knob, value in run.info["config"].items():
        if knob not in column and not knob.endswith("_dir"):
            column[f"`{knob}`"] = value
    for what, (value, _) in outcome(run, dollars_per_hour).items():
        column[f"**{what}**"] = value
    return column


def differing_rows(columns):
    """The rows of a comparison, [(what, value of the first run, ...)]: those that are not all
    equal."""
    rows = []
    for what in dict.fromkeys(itertools.chain.from_iterable(columns)):
        values = [str(column.get(what, "n/a")) for column in columns]
        if len(set(values)) > 1:
            rows.append((what, *values))
    return rows


def warnings(columns):
    """Lines on what cannot be compared between runs."""
    lines = {
        "fingerprint": "These runs trained on different data: their losses cannot be compared.",
        "device": "These runs ran on different devices: compare their times with care.",
    }
    differing = [what for what, *_ in differing_rows(columns)]
    return [line for what, line in lines.items() if what in differing]


def compare_words(runs, names, image):
    """compare.md: one table of the settings and the results that differ, and what is wrong."""
    columns = [column_of(run) for run in runs]
    lines = [f"# {', '.join(names)}\n"]
    lines += [f"> **{warning}**\n" for warning in warnings(columns)]
    if image:
        lines.append("![Curves of these runs](compare.png)\n")
    lines.append(table(("", *names), differing_rows(columns)))
    for run, name in zip(runs, names, strict=True):
        lines += found_in(run, f": {name}")
    return "\n".join(lines)


def listing(runs):
    """Lines of a table with a row for each run. The best of those on the same data is marked."""
    rows = [("run", "steps", "last loss", "best loss", "tokens/s", "how it ended", "when", "")]
    best = {}  # data and metric -> the best run on it
    for run in sorted(runs, key=score):
        if math.isfinite(score(run)):
            best.setdefault(same_judge(run), run)
    for run in sorted(runs, key=lambda run: str(run.info.get("start"))):
        last = record.mean(run.evals["val_loss"][-1:])
        speed = 1 / record.mean(1 / run.train["tokens_per_sec"])
        when = str(run.info.get("end") or run.info.get("start") or "")[:16].replace("T", " ")
        is_best = best.get(same_judge(run)) is run
        rows.append(
            (
                run.name,
                f"{last_step(run):,}",
                results.number(last),
                results.number(results.best_of(run)[0]),
                results.number(speed, ",.0f"),
                results.how_it_ended(run),
                when,
                "best" if is_best else "",
            )
        )
    return aligned(rows, widest=48)


def score(run):
    """The best of its metric, or its negative if higher is better; infinite if there is none."""
    _, sign, _ = results.metric_of(run)
    best = sign * results.best_of(run)[0]
    return best if math.isfinite(best) else math.inf


def same_judge(run):
    """What two runs must share for their losses to be compared."""
    field, sign, _ = results.metric_of(run)
    return str(run.info["data"].get("fingerprint")), field, sign, float(results.extent(run)[0])


# ---- files ---------------------------------------------------------------------------------------


def write(path, text):
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_picture(path, runs, names):
    """Returns [path]; without matplotlib, [] and a line on stderr."""
    try:
        import matplotlib
    except ImportError:
        print("report.py: no picture; type: pip install matplotlib", file=sys.stderr)
        return []
    with matplotlib.rc_context(fname=pictures.STYLE), replacing(path) as temporary:
        figure = pictures.compare_picture(runs, names) if names else pictures.picture(runs[0])
        figure.savefig(temporary, format="png", metadata=pictures.origin())
    return [path]


def write_page(runs, path, refresh=0):
    """refresh: seconds until it is rewritten; 0 = never."""
    return write(path, page(runs, names_of(runs) or [runs[0].name], text_of(runs), refresh))


def text_of(runs, image=()):
    names = names_of(runs)
    return compare_words(runs, names, image) if names else words(runs[0], image)


def names_of(runs):
    """What tells several runs apart; [] of one."""
    if len(runs) == 1:
        return []
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [record.tame(str(run.folder)) for run in runs]
    return names


def follow(runs, path, every=10):
    """Write the page every `every` seconds, at most 1% of the time, until no run is active."""
    pause = every
    tell(f"open {os.path.relpath(path)} in a browser; Ctrl-C stops it")
    try:
        while any(map(record.is_running, runs)):
            start = time.perf_counter()
            runs = [read_run(run.folder) for run in runs]
            write_page(runs, path, refresh=pause)
            pause = max(every, 100 * (time.perf_counter() - start))
            time.sleep(pause)
    except KeyboardInterrupt:
        pass


# ---- the command ---------------------------------------------------------------------------------


def tell(line, file=None):
    """Print a line without what a terminal would obey."""
    print(record.tame(str(line)), file=file, flush=True)


def is_run(folder):
    return (Path(folder) / "metrics.jsonl").exists()


def read_folders(folders):
    """(runs, rows of records, [what is wrong with a folder, ...])."""
    runs = []
    records = []
    wrong = []
    for folder in folders:
        rows = [] if is_run(folder) else record_rows(folder)
        records += rows
        if not rows:
            try:
                runs.append(read_run(folder))
            except record.NoRecord as error:
                wrong.append(error)
    return runs, records, wrong


def leave_out(wrong):
    for error in wrong:
        tell(f"report.py: left out: {error}", sys.stderr)


def list_runs(folder):
    """Print the table of the runs in `folder`. Returns whether there are any."""
    inside = [path.parent for path in sorted(Path(folder).glob("*/metrics.jsonl"))]
    runs, _, wrong = read_folders(inside)
    leave_out(wrong)
    if runs:
        tell("\n".join(listing(runs)))
    return bool(runs)


def compare_on_console(runs):
    names = names_of(runs)
    columns = [column_of(run) for run in runs]
    if len(runs) > MOST_COLUMNS:
        tell("\n".join(listing(runs)))
    elif names:
        tell("\n".join(aligned([("", *names), *differing_rows(columns)])))
    for warning in warnings(columns):
        tell(warning)


def write_reports(runs):
    """Write what is asked for. Returns the paths."""
    path = Path(report_dir or runs[0].folder) / ("report" if len(runs) == 1 else "compare")
    path.parent.mkdir(parents=True, exist_ok=True)
    if watch:
        follow(runs, path.with_suffix(".html"))
        runs = [read_run(run.folder) for run in runs]
    paths = write_picture(path.with_suffix(".png"), runs, names_of(runs))
    paths.append(write(path.with_suffix(".md"), text_of(runs, image=paths)))
    if html or watch:
        paths.append(write_page(runs, path.with_suffix(".html")))
    return paths


def main(argv=None):
    folders = []
    with configured(globals(), argv=argv, names=folders), np.errstate(all="ignore"):
        if not folders:
            folders.append("out" if Path("out").is_dir() else str(Path(__file__).with_name("out")))
        if len(folders) == 1 and not is_run(folders[0]) and list_runs(folders[0]):
            return 0
        runs, records, wrong = read_folders(folders)
        if wrong and not (runs or records):
            fail(wrong[0])
        leave_out(wrong)
        if records:
            tell(table(HEADER, records).rstrip())
        if records or not runs:
            return 0
        try:
            paths = write_reports(runs)
        except record.NoRecord as error:
            fail(error)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}; --report_dir=FOLDER writes elsewhere")
        compare_on_console(runs)
    for run, name in zip(runs, names_of(runs) or [""], strict=True):
        before = f"{name}: " if name else ""
        for trouble in troubles(run):
            tell(f"{before}{trouble.title}: {trouble.shows}")
    for path in paths:
        tell(min(os.path.relpath(path), str(path), key=len))
    return 0 if any(path.suffix == ".png" for path in paths) else 1


if __name__ == "__main__":
    sys.exit(run_script(main))

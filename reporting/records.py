"""Records: the table of what was measured, by which command, on what; whether a run is as
recorded."""

from collections.abc import Iterable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from plumbing.cli import read_knobs
from plumbing.console import MEASURED, REPO
from plumbing.files import read_json
from reporting.record import read_metrics

HEADER = ("what", "loss", "seconds", "runs", "command", "machine", "date, commit")


def record_rows(folder):
    """Rows of the table, tuples of str in the order of HEADER, from the files of check.py and
    bench.py in `folder`. What a file holds decides whether it is a record."""
    rows = []
    files = [path for path in Path(folder).glob("*.json") if path.is_file()]
    for path in sorted(files):
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # it is no record
            facts = read_json(path)
            rows += rows_of_seeds(path, facts) if "seeds" in facts else rows_of_ladder(facts)
    return rows


def rows_of_seeds(path, facts):
    """Of check.py --only=seeds: one row. Seconds are the mean of whole processes."""
    runs = facts["seeds"]["runs"]
    mean = runs["mean"]
    loss = with_spread(mean["loss"], runs["deviation"]["loss"])
    count = len(runs) - 2  # but for mean and deviation
    command = " ".join(facts["command"])
    return [row(facts, path.parent.name, loss, mean["seconds"], count, command)]


def rows_of_ladder(facts):
    """Of bench.py --only=from_nanogpt: a row for each step of it. Seconds are medians."""
    ladder = facts["from_nanogpt"]
    rows = []
    for name, numbers in ladder["rows"].items():
        loss = with_spread(numbers["loss"], numbers["deviation"])
        count = len(ladder["runs"][name])
        command = f"{ladder['commands'][name]} --dataset={facts['dataset']}"
        rows.append(row(facts, name, loss, numbers["process"], count, command))
    return rows


def with_spread(loss, deviation):
    return f"{loss:.3f} ± {deviation:.3f}"


def row(facts, name, loss, seconds, count, command):
    machine = f"{facts['hardware']['cpu']}, torch {facts['versions']['torch']}"
    when = f"{facts['date'][:10]}, {facts['git']['commit'][:7]}"
    if facts["git"]["dirty"]:
        when += ", patched"
    return name, loss, f"{seconds:.1f}", str(count), f"`python {command}`", machine, when


def what_differs(record: Path, folder: Path) -> str:
    """In words, the first thing in `record`, a run, that is not so in `folder`, the same run
    computed here: a knob, the data, or a number of a row; "" if there is none."""
    then = read_json(record / "run.json")
    now = read_json(folder / "run.json")
    knobs = then["config"].keys() & now["config"].keys()
    pairs = [(settings(then, knobs), settings(now, knobs))]
    pairs += zip_longest(computed_rows(record), computed_rows(folder), fillvalue={})
    for there, here in pairs:
        for name in there | here:
            one = there.get(name)
            other = here.get(name)
            if repr(one) != repr(other):
                step = there.get("step", here.get("step", 0))
                return f"step {step}: {name} is {one} there, {other} here"
    return ""


def settings(facts: dict, knobs: Iterable[str]) -> dict:
    """What decides, by run.json, about the numbers of a run."""
    found = {}
    for name, knob in read_knobs(REPO / "train.py").items():
        if name in knobs and "free" not in knob.policy:
            found[name] = facts["config"][name]
    for name in ("data", "torch"):
        found[name] = facts["run"].get(name)
    return found


def computed_rows(folder: Path) -> list[dict]:
    """The rows of a run, with what computing gives back: not times and memory, nor its end."""
    rows = []
    for row in read_metrics(folder / "metrics.jsonl")[0]:
        if row.get("event", "saved") in ("saved", "sample"):
            rows.append({name: row[name] for name in row if name not in MEASURED})
    return rows

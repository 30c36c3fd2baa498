"""Records: the table of what was measured, by which command, on what."""

from contextlib import suppress
from pathlib import Path

from plumbing.files import read_json

HEADER = ("what", "loss", "seconds", "runs", "command", "machine", "date, commit")


def record_rows(folder):
    """Rows of the table, tuples of str in the order of HEADER, from the files of check.py and
    bench.py in `folder`. What a file holds decides whether it is a record."""
    rows = []
    for path in sorted(Path(folder).glob("*.json")):
        with suppress(KeyError):  # it is no record
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

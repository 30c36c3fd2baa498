"""The table of records: for each folder of records/, what was measured, by which command, on what."""

from pathlib import Path

from plumbing.files import read_json

HEADER = ("what", "loss", "seconds", "runs", "command", "machine", "date, commit")


def record_rows(folder):
    """Rows of the table, as tuples of str in the order of HEADER, from the files of check.py and
    bench.py in `folder`. Seconds are of whole processes: their mean, or median for bench.py."""
    for facts in map(read_json, sorted(Path(folder).glob("*.json"))):
        if "seeds" in facts:
            runs = facts["seeds"]["runs"]
            row = {"loss": runs["mean"]["loss"], "deviation": runs["deviation"]["loss"]}
            row |= {"process": runs["mean"]["seconds"]}
            yield in_words(Path(folder).name, row, len(runs) - 2, facts["command"], facts)
        for name, row in facts.get("from_nanogpt", {}).get("rows", {}).items():
            runs, command = (facts["from_nanogpt"][part][name] for part in ("runs", "commands"))
            yield in_words(name, row, len(runs), [command], facts)


def in_words(name, row, count, command, facts):
    loss = f"{row['loss']:.3f} ± {row['deviation']:.3f}"
    machine = f"{facts['hardware']['cpu']}, torch {facts['versions']['torch']}"
    when = f"{facts['date'][:10]}, {facts['git']['commit'][:7]}"
    words = f"`python {' '.join(command)}`"
    return name, loss, f"{row['process']:.1f}", str(count), words, machine, when

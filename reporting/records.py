"""The table of records: for each folder of records/, what was measured, by which command, on what."""

from pathlib import Path

from plumbing.files import read_json

HEADER = ("what", "loss", "seconds", "runs", "command", "machine", "date, commit")


def record_rows(folder):
    """Rows of the table, as tuples of str in the order of HEADER, from the files of check.py and
    bench.py in `folder`. Seconds are of whole processes: their mean, or median for bench.py."""
    for facts in map(read_json, sorted(Path(folder).glob("*.json"))):
        rows, part = [], facts.get("from_nanogpt", {"rows": {}})
        if "seeds" in facts:
            runs = facts["seeds"]["runs"]
            row = {"loss": runs["mean"]["loss"], "deviation": runs["deviation"]["loss"]}
            row |= {"process": runs["mean"]["seconds"]}
            rows = [(Path(folder).name, row, len(runs) - 2, " ".join(facts["command"]))]
        for name, row in part["rows"].items():
            rows.append((name, row, len(part["runs"][name]), part["commands"][name]))
        for name, row, count, command in rows:
            loss = f"{row['loss']:.3f} ± {row['deviation']:.3f}"
            machine = f"{facts['hardware']['cpu']}, torch {facts['versions']['torch']}"
            patched = ", patched" * bool(facts["git"]["dirty"])
            when = f"{facts['date'][:10]}, {facts['git']['commit'][:7]}{patched}"
            seconds = f"{row['process']:.1f}"
            yield name, loss, seconds, str(count), f"`python {command}`", machine, when

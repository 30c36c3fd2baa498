"""Records: the table of what was measured, by which command, on what; whether a run is as recorded."""

from itertools import zip_longest
from pathlib import Path

from plumbing.files import read_json
from reporting.logged import MEASURED
from reporting.record import read_metrics

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


def what_differs(record: Path, folder: Path) -> str:
    """In words, the first thing in `record`, a run, that is not so in `folder`, the same run computed
    here: a knob, the data, or a number of a row; "" if there is none."""
    then, now = (read_json(path / "run.json") for path in (record, folder))
    for name, value in now["config"].items():
        known = then["config"].get(name, value)
        if value != known and not name.endswith("_dir"):
            return f"--{name}={known} there, {value} here"
    for name in ("data", "kernel_bits", "torch"):
        if then["run"].get(name) != now["run"][name]:
            return f"{name} is {then['run'].get(name)} there, {now['run'][name]} here"
    rows = zip_longest(computed_rows(record), computed_rows(folder), fillvalue={})
    for one, other in rows:
        for name in one | other:
            pair = one.get(name), other.get(name)
            if repr(pair[0]) != repr(pair[1]):
                step = (one or other).get("step")
                return f"step {step}: {name} is {pair[0]} there, {pair[1]} here"
    return ""


def computed_rows(folder: Path) -> list[dict]:
    """The rows of a run, with what computing gives back: not times and memory, nor its end."""
    rows = []
    for row in read_metrics(folder / "metrics.jsonl")[0]:
        if row.get("event", "saved") in ("saved", "sample"):
            rows.append({name: row[name] for name in row if name not in MEASURED})
    return rows

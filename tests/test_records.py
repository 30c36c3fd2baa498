"""No figure drifts: what the README says with a spread stands in a record, made by its command."""

import re
import subprocess
import sys

import pytest
from conftest import REPO

from plumbing.cli import read_knobs
from reporting.records import HEADER, record_rows

FOLDERS = sorted(  # but for whole runs, which test_portable.py computes again
    path for path in (REPO / "records").glob("*/") if not (path / "metrics.jsonl").exists()
)
SPREAD = re.compile(r"\d\.\d{3} ± \d\.\d{3}")
README = (REPO / "README.md").read_text(encoding="utf-8")
KNOBS = {
    name for script in ("train", "check", "bench") for name in read_knobs(REPO / f"{script}.py")
}
ROWS = {folder.name: list(record_rows(folder)) for folder in FOLDERS}


@pytest.mark.parametrize("name", ROWS)
def test_a_record_says_what_was_measured_by_which_command_on_what(name):
    for row in ROWS[name]:
        what, loss, seconds, runs, command, machine, when = row
        assert SPREAD.fullmatch(loss) and float(seconds) > 0 and int(runs) >= 3, what
        assert command.startswith("`python ") and "torch 2." in machine
        assert re.fullmatch(r"\d{4}-\d\d-\d\d, [0-9a-f]{7}(, patched)?", when)
        if "$NANOGPT" not in command and not when.endswith("patched"):
            assert {*re.findall(r"--(\w+)=", command)} <= KNOBS  # as it stands, it can be typed
    assert ROWS[name]


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_every_spread_in_a_page_is_that_of_a_record(page):
    recorded = {row[HEADER.index("loss")] for rows in ROWS.values() for row in rows}
    claimed = set(SPREAD.findall((REPO / page).read_text(encoding="utf-8")))
    assert len(claimed) >= 4
    assert claimed - recorded == set()


def test_the_seconds_of_the_first_table_are_those_of_the_record():
    seconds = {row[0]: row[2] for row in ROWS["from_nanogpt"]}
    first_table = README.split("\n\n|")[1].split("\n\n")[0]
    claimed = re.findall(r"(\d+\.\d) s\b", first_table)
    assert len(claimed) >= 3
    assert set(claimed) <= set(seconds.values())


def test_the_table_of_records_is_printed_by_a_command_that_writes_nothing():
    files = set(REPO.glob("records/*/*"))
    folders = map(str, sorted((REPO / "records").glob("*/")))  # two of them hold a whole run
    command = [sys.executable, "report.py", *folders]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + sum(map(len, ROWS.values()))
    assert lines[0] == f"| {' | '.join(HEADER)} |"
    assert done.stderr == "" and set(REPO.glob("records/*/*")) == files

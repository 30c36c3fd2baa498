"""Broken loops, each a script that replaces one function of train.py: it trains to its end, and what
it changes first is what its row of answers.md says."""

import re
from pathlib import Path

import pytest
from sources import stop_at

FOLDER = Path(__file__).with_name("broken")
ROW = re.compile(r"^\| (\d+) \| (.+?) \| \[(\d+)\]\(.*?#(.+?)\) \| (.*?) ?\| (.+?) \|$", re.M)
BUGS = {int(row[0]): row[1:] for row in ROW.findall((FOLDER / "answers.md").read_text())}
ORDER = "lr val_loss loss grad_norm val_accuracy best_val_loss".split()
COMMON = ("--log_interval=1", "--eval_interval=4")


def first_difference(one, other):
    for a, b in zip(one, other, strict=True):
        for name in [*ORDER, *a]:
            if a.get(name) != b.get(name):
                return name
    return None


def test_each_script_has_its_row():
    """With a lesson, whose link test_pages.py follows."""
    assert [path.name for path in sorted(FOLDER.glob("*.py"))] == [f"{n:02}.py" for n in BUGS]


@pytest.mark.parametrize("number", BUGS)
def test_a_broken_loop_differs_first_in_what_its_row_says(run_train, once, number):
    _, _, _, flags, field = BUGS[number]
    source, flags = (FOLDER / f"{number:02}.py").read_text(), (*COMMON, *flags.strip("`").split())
    if field == "resume":
        run_train("run", *flags, before=source + stop_at(6), code=143)
        (check,) = run_train("run", *flags, before=source).events("resume_checked")
        assert check["first_difference"]["field"] in ("loss", "grad_norm")
    else:
        broken = run_train("run", *flags, before=source)
        assert first_difference(broken.rows(), once(*flags).rows()) == field

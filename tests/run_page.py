"""Runs the bash and python blocks of a page in order, in a fresh copy of the repository.

    python tests/run_page.py docs/lessons.md             # the whole page
    python tests/run_page.py docs/lessons.md 1 4         # up to the first "## ", and two sections
    python tests/run_page.py docs/lessons.md --compare   # are the page's figures still true?
    python tests/run_page.py examples/images.py          # the commands in a script's docstring

Sections begin with "## " and count from 1. Blocks fenced as sh are for reading and do not run; the
words after `sh` say what they need, such as a network or a GPU. Shell variables keep their values
from block to block. Prints each block, its output and how long it took. The first block that fails
ends the run with its exit code. With PAGE_COPY=FOLDER the copy is made there, and kept; with
PAGE_DATA=FOLDER it uses the datasets in that folder, not those in data/.

A block fenced as output, directly below a block that runs, holds what that one printed. With
--compare each of its lines must be printed again, with numbers within 0.002, or as it says:

    output within 0.01    numbers may differ by this much; one such as 3.9e-07 by this share of it
    output timings        numbers are not compared, only the words

A line of `...` stands for lines left out, and `...` in a line for some text. Not compared: numbers
with a unit of time, rate, memory or share of a peak (12.3 ms, 40% of the peak), and the columns of
step lines that hold such. At the end it prints how many figures were compared and each that moved:
page:line, the number shown, the one printed now. Exit code 1 if one moved, 2 if the blocks trained
on CPython's manual, as they do without a network: then nothing is compared.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", "out", "data", "wandb", ".venv", "__pycache__")
FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = ("bash", "python")

OFFLINE_TEXT = "pydoc_data.topics of CPython"  # printed where it replaces TinyShakespeare
TOLERANCE = 0.002
NUMBER = r"(?<![\w.])(?<!\w-)-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
CLOCK = r"(?<![\w.:])\d+:\d\d(?::\d\d)?\b"
TIME = r"[mun]?s|min|h|(?:milli|micro)?seconds?|minutes?|hours?|days?"
RATE = r"k? ?tok/s|k? ?\w+/s|times as fast|times as slow|times faster|times slower"
MEMORY = r"[kMGT]i?B"
SHARE = r"% (?:of (?:the|its|this|a) )?(?:peak|MFU|mfu)"
UNIT = rf" ?(?:{TIME}|{RATE}|{MEMORY})\b|{SHARE}"
COLUMNS = {"ms", "wait", "tok/s", "mfu", "GB", "gpu%", "left"}  # of step lines, not compared
STEP_LINE = re.compile(r"\d+/\d+ ")
SECONDS_LINE = re.compile(r"[\d.]+ s: ")  # where the time of a run went
PARTS = re.compile(rf"(?P<gap>\.\.\.)|(?P<skipped>{CLOCK}|{NUMBER}(?={UNIT}))|(?P<figure>{NUMBER})")


def blocks(page):
    """[(section, line, language, needs, code)] of a page; section 0 is before the first "## ".

    needs: the words after the language.
    """
    text = Path(page).read_text(encoding="utf-8")
    if Path(page).suffix == ".py":
        commands = re.findall(r"^    (.*)", ast.get_docstring(ast.parse(text)), re.MULTILINE)
        return [(0, 1, "bash", "", "\n".join(commands) + "\n")]
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        section = len(re.findall(r"^## ", FENCE.sub("", before), re.MULTILINE))
        found.append((section, before.count("\n") + 1, *fence.groups()))
    return found


def outputs(page):
    """{line of a block that runs: (line, words, text) of the output block directly below it}"""
    found = {}
    above = None
    for block in blocks(page):
        _, line, language, words, text = block
        if language == "output" and above and is_directly_below(above, line):
            found[above[1]] = line, words, text
        above = block
    return found


def is_directly_below(block, line):
    """Whether an output block that begins at `line` belongs to this block."""
    _, first, language, _, code = block
    last = first + code.count("\n") + 1
    return language in RUNS and line in (last + 1, last + 2)


def script(page, sections=()):
    """A bash script of the blocks to run: those of section 0 and of `sections`, or all."""
    parts = ["set -euo pipefail"]
    for section, line, language, _, code in blocks(page):
        if language not in RUNS or sections and section not in (0, *sections):
            continue
        if language == "python":
            code = f"python - <<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n"
        began, ended = marks(page, line)
        parts.append(f"cat <<'SHOWN'\n\n==== {page}:{line}\n{code}{began}SHOWN\nbegan=$SECONDS")
        parts.append(f'{code}echo "{ended} $((SECONDS - began)) s"')
    return "\n".join(parts) + "\n"


def marks(page, line):
    """What the script prints before and after the output of a block."""
    return f"---- {page}:{line} prints\n", f"==== {page}:{line} took"


def run(page, sections=()):
    """Runs these blocks. Returns (exit code, all that was printed)."""
    with TemporaryDirectory() as folder:
        copy = Path(os.environ.get("PAGE_COPY") or Path(folder) / "repo").absolute()
        shutil.copytree(REPO, copy, ignore=NOT_COPIED)
        data = Path(os.environ.get("PAGE_DATA") or REPO / "data")
        for dataset in data.glob("*/"):  # one by one: a page makes others beside them
            (copy / "data").mkdir(exist_ok=True)
            (copy / "data" / dataset.name).symlink_to(dataset.absolute())
        path = Path(folder) / "blocks.sh"
        path.write_text(script(page, sections), encoding="utf-8")
        here = Path(sys.executable).parent
        environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
        environment["PYTHONUNBUFFERED"] = "1"  # errors stand where they happened
        process = subprocess.Popen(
            ["bash", path],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return process.wait(), "".join(lines)


# ---- the figures of a page, against what is printed now ------------------------------------------


def compare(page, sections, printed):
    """(how many figures were compared, the lines that tell what moved)"""
    compared = 0
    moved = []
    ran = {line for section, line, *_ in blocks(page) if not sections or section in (0, *sections)}
    for block, (line, words, text) in outputs(page).items():
        if block not in ran:
            continue
        began, ended = marks(page, block)
        now = printed.partition(began)[2].partition(ended)[0]
        count, differences = compare_block(text.splitlines(), words, now.splitlines())
        compared += count
        moved += [f"{page}:{line + 1 + index}: {what}" for index, what in differences]
    return compared, moved


def compare_block(page_lines, words, printed_lines):
    """(how many figures were compared, [(index of the page's line, what moved)])"""
    tolerance = tolerance_of(words)
    page_lines = [" ".join(line.split()) for line in page_lines]
    printed_lines = [" ".join(line.split()) for line in printed_lines]
    heads = [line.split() for line in printed_lines if line.startswith("step/total ")]
    compared = 0
    moved = []
    position = 0  # of the printed line that comes next
    may_skip = False  # after a line of dots
    for index, line in enumerate(page_lines):
        if line == "...":
            may_skip = True
            continue
        pattern, shown = expected(line, heads[0] if heads else [], tolerance)
        last = len(printed_lines) if may_skip else position + 1
        matches = {at: pattern.fullmatch(text) for at, text in enumerate(printed_lines[:last])}
        found = {at: match.groups() for at, match in matches.items() if match and at >= position}
        if not found:
            moved.append((index, f"shown `{line}`, not printed now"))
            compared += len(shown)
            may_skip = True  # the lines after it are looked for
            continue
        # of several lines with these words, the one with most of these numbers
        position = min(found, key=lambda at: len(differences(shown, found[at], tolerance)))
        compared += len(shown)
        moved += [(index, what) for what in differences(shown, found[position], tolerance)]
        position += 1
        may_skip = False
    if position < len(printed_lines) and not may_skip:
        moved.append((len(page_lines), f"not shown: `{printed_lines[position]}`"))
    return compared, moved


def tolerance_of(words):
    """Of an output block; None: its numbers are not compared."""
    if words == "timings":
        return None
    return float(words.removeprefix("within ") or TOLERANCE)


def expected(line, heads, tolerance):
    """(a pattern with a group for each figure to compare, these figures as shown)"""
    cells = line.split(" ")
    if STEP_LINE.match(line) and len(cells) == len(heads):
        for column, head in enumerate(heads):
            if head in COLUMNS:
                cells[column] = "\0"
        line = " ".join(cells)
    none_compared = tolerance is None or SECONDS_LINE.match(line)
    pattern = ""
    shown = []
    end = 0
    for part in PARTS.finditer(line):
        pattern += re.escape(line[end : part.start()])
        end = part.end()
        if part["gap"]:
            pattern += ".*?"
        elif part["skipped"] or none_compared:
            pattern += rf"(?:{CLOCK}|{NUMBER}|n/a)"
        else:
            pattern += f"({NUMBER})"
            shown.append(part["figure"])
    pattern += re.escape(line[end:])
    return re.compile(pattern.replace(re.escape("\0"), r"\S+")), shown


def differences(shown, printed, tolerance):
    found = []
    for old, new in zip(shown, printed, strict=True):
        difference = abs(value_of(old) - value_of(new))
        scale = abs(value_of(old)) if "e" in old else 1
        if difference > tolerance * scale * (1 + 1e-9):
            found.append(f"shown {old}, printed now {new}")
    return found


def value_of(number):
    return float(number.replace(",", ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page")
    parser.add_argument("sections", nargs="*", type=int)
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    code, printed = run(given.page, given.sections)
    if code or not given.compare:
        return code
    if OFFLINE_TEXT in printed:
        print(f"\n{given.page}: another text: figures are not compared")
        return 2
    compared, moved = compare(given.page, given.sections, printed)
    print(f"\n{given.page}: {compared} figures compared, {len(moved)} moved", *moved, sep="\n")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())

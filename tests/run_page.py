"""Runs the bash and python blocks of a page in order, in a fresh copy of the repository.

    python tests/run_page.py docs/lessons.md             # the whole page
    python tests/run_page.py docs/lessons.md 1 4         # up to the first "## ", and two sections
    python tests/run_page.py docs/lessons.md --update    # and write what they print into the page
    python tests/run_page.py examples/images.py          # the commands in a script's docstring

A section has the number in its heading, else its place. A python block whose first line is
`# NAME.py` is saved and run. Blocks fenced as sh or py do not run. The first block that fails ends
the run with its exit code. PAGE_COPY=FOLDER keeps the copy; PAGE_DATA=FOLDER has other datasets.

A block fenced as output, below one that runs, holds what that printed. Where it has `...`, for what
is left out, each other line becomes the line with the same words and most of its numbers; exit code
1 if there is none. Where the blocks trained on CPython's manual, nothing is written."""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".git", "out", "data", "wandb", ".venv", "__pycache__")
FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n").match
RUNS = ("bash", "python")
BEGAN, ENDED = "---- {}:{} prints\n", "==== {}:{} took"  # around the output of a block
OFFLINE_TEXT = "pydoc_data.topics of CPython"  # printed where it replaces TinyShakespeare
NUMBER = re.compile(r"-?\d([\d.,:]*\d)?(e[-+]?\d+)?|n/a")


def blocks(page):
    """[(section, line, language, words after it, code)]; section None: before the first "## "."""
    text = Path(page).read_text(encoding="utf-8")
    if Path(page).suffix == ".py":
        commands = re.findall(r"^    (.*)", ast.get_docstring(ast.parse(text)), re.MULTILINE)
        return [(None, 1, "bash", "", "\n".join(commands) + "\n")]
    found = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        headings = re.findall(r"^## (\d*)", FENCE.sub("", before), re.MULTILINE)
        section = int(headings[-1] or len(headings)) if headings else None
        found.append((section, before.count("\n") + 1, *fence.groups()))
    return found


def scripts(page):
    """{name: code} of the blocks of Python that have a name."""
    codes = (code for *_, language, _, code in blocks(page) if language in ("python", "py"))
    return {found[1]: found.string for found in map(NAMED, codes) if found}


def script(page, sections=()):
    """A bash script of the blocks to run: those of section None and of `sections`, or all."""
    parts = ["set -euo pipefail"]
    for section, line, language, _, code in blocks(page):
        if language not in RUNS or sections and section not in (None, *sections):
            continue
        if language == "python":
            named, here = NAMED(code), f"<<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n"
            code = f"cat > {named[1]} {here}python {named[1]}\n" if named else f"python - {here}"
        shown = f"\n==== {page}:{line}\n{code}{BEGAN.format(page, line)}"
        parts.append(f"cat <<'SHOWN'\n{shown}SHOWN\nbegan=$SECONDS")
        parts.append(f'{code}echo "{ENDED.format(page, line)} $((SECONDS - began)) s"')
    return "\n".join(parts) + "\n"


def run(page, sections=()):
    """Runs these blocks. Returns (exit code, all that was printed)."""
    with TemporaryDirectory() as folder:
        copy = Path(os.environ.get("PAGE_COPY") or Path(folder) / "repo").absolute()
        shutil.copytree(REPO, copy, ignore=NOT_COPIED)
        (copy / "data").mkdir()
        for dataset in Path(os.environ.get("PAGE_DATA") or REPO / "data").glob("*/"):
            (copy / "data" / dataset.name).symlink_to(dataset.absolute())
        path = Path(folder) / "blocks.sh"
        path.write_text(script(page, sections), encoding="utf-8")
        paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        how |= {"env": os.environ | {"PATH": paths, "PYTHONUNBUFFERED": "1"}, "errors": "replace"}
        process = subprocess.Popen(["bash", path], cwd=copy, **how)
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return process.wait(), "".join(lines)


def updated(page, printed):
    """(the page with what its blocks have printed, the lines that are not printed any more)"""
    lines = Path(page).read_text(encoding="utf-8").splitlines()
    gone = []
    for (_, above, runs, _, code), (_, line, kind, _, text) in [*pairwise(blocks(page))][::-1]:
        is_below = runs in RUNS and line - above - code.count("\n") <= 3
        _, began, now = printed.partition(BEGAN.format(page, above))
        if kind == "output" and is_below and began:
            now = now.partition(ENDED.format(page, above))[0]
            now = [each.rstrip() for each in now.splitlines()]
            if "..." in text:
                now, missing = excerpt(text.splitlines(), now)
                gone += [f"{page}:{line + 1 + index}: {what}" for index, what in missing]
            lines[line : line + text.count("\n")] = now
    return "\n".join(lines) + "\n", gone


def excerpt(shown, printed):
    """(the printed lines that are shown, [(index, line)] of those not printed any more)"""
    lines, missing = [], []

    def words(line):
        return " ".join(NUMBER.sub("#", line).split())

    for index, line in enumerate(shown):
        like = re.escape(words(line)).replace(r"\.\.\.", ".*")
        same = [at for at, now in enumerate(printed) if re.fullmatch(like, words(now))]
        lines.append(line)
        if same and line != "...":
            numbers = [sum(map(str.__eq__, printed[at].split(), line.split())) for at in same]
            best = same[numbers.index(max(numbers))]
            lines[-1] = line if "..." in line else printed[best]
            printed = printed[best + 1 :]
        elif line != "...":
            missing.append((index, line))
    return lines, missing


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page")
    parser.add_argument("sections", nargs="*", type=int)
    parser.add_argument("--update", action="store_true")
    given = parser.parse_args()
    code, printed = run(given.page, given.sections)
    if code or not given.update:
        return code
    if OFFLINE_TEXT in printed:
        sys.exit(f"{given.page}: another text: nothing is written")
    text, gone = updated(given.page, printed)
    Path(given.page).write_text(text, encoding="utf-8")
    print(f"\n{given.page}: {len(gone)} lines are not printed any more", *gone, sep="\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())

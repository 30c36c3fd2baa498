"""Runs the bash and python blocks of a page in order, in a fresh copy of the repository.

    python tests/run_page.py docs/lessons.md             # the whole page
    python tests/run_page.py docs/lessons.md 1 4         # up to the first "## ", and two sections
    python tests/run_page.py docs/lessons.md --update    # and write what they print into the page
    python tests/run_page.py examples/images.py          # the commands in a script's docstring

A section begins with "## " and has the number of its heading, else its place. Blocks fenced as sh
are for reading and do not run; the words after `sh` say what they need, such as a network or a GPU.
Shell variables keep their values from block to block. The first block that fails ends the run with
its exit code. With PAGE_COPY=FOLDER the copy is made there, and kept; with PAGE_DATA=FOLDER it uses
the datasets in that folder, not those in data/.

A block fenced as output, directly below a block that runs, holds what that one printed. `git diff`
shows what moved. Where it has `...`, for lines or words left out, each other line is replaced by the
line with the same words, of several by the one with most of its numbers. Exit code 1 if a line with
these words is not printed any more: it is left as it was, and named. Exit code 2 if the blocks
trained on CPython's manual, as they do without a network: then nothing is written.
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
NUMBER = re.compile(r"-?\d([\d.,:]*\d)?(e[-+]?\d+)?|n/a")


def blocks(page):
    """[(section, line, language, needs, code)] of a page; section None is before the first "## ".

    needs: the words after the language.
    """
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


def outputs(page):
    """{line of a block that runs: (line, text) of the output block directly below it}"""
    found = {}
    above = end = None
    for _, line, language, _, text in blocks(page):
        if language == "output" and above and line - end in (1, 2):
            found[above] = line, text
        above = line if language in RUNS else None
        end = line + text.count("\n") + 1
    return found


def script(page, sections=()):
    """A bash script of the blocks to run: those of section None and of `sections`, or all."""
    parts = ["set -euo pipefail"]
    for section, line, language, _, code in blocks(page):
        if language not in RUNS or sections and section not in (None, *sections):
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
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(
            ["bash", path], cwd=copy, env=environment, errors="replace", **how
        )
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return process.wait(), "".join(lines)


def updated(page, printed):
    """(the page with what its blocks have printed, the lines that are not printed any more)"""
    lines = Path(page).read_text(encoding="utf-8").splitlines()
    gone = []
    for block, (line, text) in reversed(outputs(page).items()):
        began, ended = marks(page, block)
        if began in printed:
            now = printed.partition(began)[2].partition(ended)[0]
            now = [each.rstrip() for each in now.splitlines()]
            if "..." in text:
                now, missing = excerpt(text.splitlines(), now)
                gone += [f"{page}:{line + 1 + index}: {what}" for index, what in missing]
            lines[line : line + text.count("\n")] = now
    return "\n".join(lines) + "\n", gone


def excerpt(shown, printed):
    """(the printed lines that are shown, [(index, line)] of those not printed any more)"""
    lines = []
    missing = []
    for index, line in enumerate(shown):
        like = re.escape(words(line)).replace(r"\.\.\.", ".*")
        same = [at for at, now in enumerate(printed) if re.fullmatch(like, words(now))]
        if line == "...":
            lines.append(line)
        elif same:
            best = max(same, key=lambda at: equal_words(printed[at], line))
            lines.append(line if "..." in line else printed[best])
            printed = printed[best + 1 :]
        else:
            lines.append(line)
            missing.append((index, line))
    return lines, missing


def words(line):
    return " ".join(NUMBER.sub("#", line).split())


def equal_words(one, other):
    return sum(a == b for a, b in zip(one.split(), other.split(), strict=False))


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
        print(f"\n{given.page}: another text: nothing is written")
        return 2
    text, gone = updated(given.page, printed)
    Path(given.page).write_text(text, encoding="utf-8")
    print(f"\n{given.page}: {len(gone)} lines are not printed any more", *gone, sep="\n")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())

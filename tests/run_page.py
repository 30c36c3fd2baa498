"""Runs the bash and python blocks of a page in order, in a fresh copy of the repository.

    python tests/run_page.py docs/lessons.md       # the whole page
    python tests/run_page.py docs/lessons.md 1 4   # up to the first "## ", and two sections
    python tests/run_page.py examples/images.py    # the commands in the docstring of a script

Sections begin with "## " and count from 1. Blocks fenced as sh are for reading and do not run; the
words after `sh` say what they need, such as a network or a GPU. Shell variables keep their values
from block to block. Prints each block, its output and how long it took. The first block that fails
ends the run with its exit code. With PAGE_COPY=FOLDER the copy is made there, and kept; with
PAGE_DATA=FOLDER it uses the datasets in that folder, not those in data/.
"""

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


def script(page, sections=()):
    """A bash script of the blocks to run: those of section 0 and of `sections`, or all."""
    parts = ["set -euo pipefail"]
    for section, line, language, _, code in blocks(page):
        if language not in ("bash", "python") or sections and section not in (0, *sections):
            continue
        if language == "python":
            code = f"python - <<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n"
        parts.append(f"cat <<'SHOWN'\n\n==== {page}:{line}\n{code}SHOWN\nbegan=$SECONDS")
        parts.append(code + f'echo "==== {page}:{line} took $((SECONDS - began)) s"')
    return "\n".join(parts) + "\n"


def run(page, sections=()):
    """Runs these blocks. Returns the exit code."""
    with TemporaryDirectory() as folder:
        copy = Path(os.environ.get("PAGE_COPY") or Path(folder) / "repo").absolute()
        shutil.copytree(REPO, copy, ignore=NOT_COPIED)
        data = Path(os.environ.get("PAGE_DATA") or REPO / "data")
        for dataset in data.glob("*/"):  # one by one: a page makes others beside them
            (copy / "data").mkdir(exist_ok=True)
            (copy / "data" / dataset.name).symlink_to(dataset)
        path = Path(folder) / "blocks.sh"
        path.write_text(script(page, sections), encoding="utf-8")
        here = Path(sys.executable).parent
        environment = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(["bash", path], cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], [int(section) for section in sys.argv[2:]]))

"""Find the bug: a copy of this repository with one of the bugs that real training loops have.

    python examples/broken.py 7
    python examples/broken.py 7 --reveal=true

The copy is out/broken_07; docs/exercises.md says how to look.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from plumbing.cli import configured, fail, run_script  # noqa: E402

out_dir = "../out"  # folder of the copies
reveal = False  # make no copy; show the bug, and what finds it

LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "out", "data", "broken*", "exercises.md")


def main(argv: list[str] | None = None) -> None:
    names = []
    with configured(globals(), argv=argv, names=names):
        patches = {str(int(path.name[:2])): path for path in REPO.glob("tests/broken/*.patch")}
        if len(names) != 1 or names[0] not in patches:
            fail(f"expected a number from 1 to {len(patches)}; type: python examples/broken.py 7")
        patch = patches[names[0]]
        if reveal:
            rows = (
                (REPO / "tests" / "broken" / "answers.md").read_text(encoding="utf-8").splitlines()
            )
            row = next(row for row in rows if row.startswith(f"| {names[0]} |"))
            print(f"{patch.read_text()}\n{row}")
            return
        folder = Path(out_dir, f"broken_{int(names[0]):02}")
        if folder.exists():
            fail(f"{folder} is there already; remove it, or write --out_dir=FOLDER")
        shutil.copytree(REPO, folder, ignore=LEFT_OUT)
        (REPO / "data").mkdir(exist_ok=True)
        (folder / "data").symlink_to(REPO / "data")
        outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", str(patch)], cwd=folder, env=outside, check=True)
        sees = patch.read_text().partition("\n")[0]
        print(f"{sees}\n\ncd {folder}\npython train.py config/shakespeare_fast.py")


if __name__ == "__main__":
    sys.exit(run_script(main))

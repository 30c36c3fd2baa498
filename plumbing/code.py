"""The code of a run: its script, the modules that it has loaded, the state of the repository."""

import os
import re
import subprocess
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

from plumbing.console import REPO
from plumbing.files import digest_of

TOOLS = [REPO / f"{name}.py" for name in "train bench check replay sample".split()]
INSTALLED = re.compile(r"-packages|lib.python\d")  # in the path of what is Python's, or a package
STARTED_IN = Path.cwd()  # sys.argv[0] is relative to it
given = None  # the path in --script=FILE


def script() -> Path | None:
    """The .py file that Python was started with, or, in a tool, that of --script. None if this is
    train.py itself, or no file of the user's, as in a notebook."""
    path = given or Path(STARTED_IN, sys.argv[0]).resolve()
    is_own = path.suffix == ".py" and path.is_file() and path not in TOOLS
    return path if is_own and not INSTALLED.search(str(path)) else None


def script_fact() -> str:
    """What a checkpoint says of it: `lab.py 3f2a91bc0d1e2f3a`, with the hash of its text; or
    `train.py`, whose text is a part of the repository."""
    path = script()
    return f"{path.name} {digest_of(path)[:16]}" if path else "train.py"


def loaded() -> dict[str, str]:
    """{path, relative to the repository: hash of the bytes} of the loaded .py files in the repository
    and below the script's folder, without the script."""
    own = script()
    homes = [REPO, own.parent] if own else [REPO]
    found = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        is_own = path.suffix == ".py" and any(map(path.is_relative_to, homes))
        if is_own and path.is_file() and path != own and not INSTALLED.search(str(path)):
            found[os.path.relpath(path, REPO)] = digest_of(path)[:16]
    return found


def git_state() -> tuple[dict, bytes]:
    """({commit, dirty, diff_sha256} of the repository, the diff). dirty: the commit lacks something
    that was loaded. The Docker image has GIT_COMMIT, not .git."""
    # never a parent folder's .git
    git = ["git", "-C", REPO, f"--git-dir={REPO}/.git", f"--work-tree={REPO}"]
    run = partial(subprocess.check_output, stderr=subprocess.DEVNULL)
    try:
        diff = run([*git, "diff", "HEAD"])
        commit = run([*git, "rev-parse", "HEAD"], text=True).strip()
        tracked = run([*git, "ls-files", "-z"], text=True).split("\0")
    except (OSError, subprocess.SubprocessError):
        commit = os.environ.get("GIT_COMMIT")
        return {"commit": commit, "dirty": None, "diff_sha256": None}, b""
    files = {*loaded(), os.path.relpath(script() or REPO / "train.py", REPO)}
    is_dirty = bool(diff) or not files.issubset(tracked)
    return {"commit": commit, "dirty": is_dirty, "diff_sha256": sha256(diff).hexdigest()}, diff


def keep(folder: Path, diff: bytes) -> None:
    """Write the text of the script, and the diff, to `folder`, each under its hash. They are for
    people: nothing reads them again."""
    path = script()
    for suffix, text in {"py": path and path.read_bytes(), "diff": diff}.items():
        if text:
            folder.mkdir(exist_ok=True)
            (folder / f"{sha256(text).hexdigest()}.{suffix}").write_bytes(text)

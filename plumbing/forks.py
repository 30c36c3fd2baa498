"""A fork's script for check.py, bench.py, replay.py and sample.py. It imports train, replaces what it
wants to there, and calls train.main() under `if __name__ == "__main__":`; or it is an edited copy of
train.py."""

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from plumbing import code
from plumbing.cli import fail, setting


def script_among(words: list[str]) -> tuple[str, list[str]]:
    """(absolute path of the script or "", `words` with it as --script=FILE). It may also be a plain
    word FILE.py, if the file imports train: a config file does not."""
    flags = []
    path = ""
    for word in words:
        if word.endswith(".py") and os.path.isfile(word):
            if re.search(r"(?m)^(import|from)\b.*\btrain\b", Path(word).read_text("utf-8")):
                word = f"--script={word}"
        if word.startswith("--script="):
            path = os.path.abspath(word.partition("=")[2])
        flags.append(word)
    return path, flags


def load(path: str, train: ModuleType) -> ModuleType:
    """Execute the script at `path`, once. Returns the module that holds its loop: `train`, or the
    script if it is a copy of train.py. Raises BadInput."""
    file = Path(path).resolve()
    if not file.is_file():
        fail(f"--script={path}: there is no such file")

    def refuse(*arguments: object, **named: object) -> None:
        fail(
            f"--script={path} trains as soon as it is loaded; "
            'write `if __name__ == "__main__":` above its train.main()'
        )

    sys.path.insert(0, str(file.parent))
    with setting(vars(train), main=refuse):
        module = importlib.import_module(file.stem)
    code.given = file
    if module.__file__ != str(file):
        fail(f"--script={path}: {module.__file__} is loaded under this name; rename the script")
    is_copy = hasattr(module, "FRESH_STATE") and module.FRESH_STATE is not train.FRESH_STATE
    has_step = getattr(getattr(module, "train_step", None), "__module__", "") == module.__name__
    return module if is_copy and has_step else train

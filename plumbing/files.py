"""Atomic writes: after a crash or power cut, a file is the old or the new one, never a part of
it."""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields `path` + ".tmp" for the caller to write. The file is then fsynced and takes the place
    of `path`; on an error, `path` stays as it was."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left behind by a kill
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # a network disk
        fsync(path.parent)


def fsync(path: str | Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: str | Path) -> TextIO:
    """Open and lock `path` until the file is closed. Raises BlockingIOError if a process has it."""
    file = open(path, "a")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not inherited by a fork
    return file


def digest_of(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: str | Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: non-finite floats as null, other types by their repr."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(clean(value), indent=1, default=repr) + "\n")


def clean(value: Any) -> Any:
    """`value` with None for each float that is not finite (JSON has no NaN), and keys as str."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k if isinstance(k, str) else repr(k): clean(v) for k, v in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: str | Path) -> dict:
    """The dict in the JSON file `path`, or {} if there is none that can be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}

"""Atomic writes: after a crash or power cut, a file is the old or the new one, never a part.

No link is followed, so that a link which someone planted makes us overwrite no other file.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# Errors of network disks that cannot fsync a folder
NO_FOLDER_FSYNC = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EBADF)


@contextlib.contextmanager
def replacing(path: str | Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yields a new, empty temporary file beside `path`, which the caller writes by its name. It is
    then fsynced and replaces `path`; on any error it is removed, and `path` stays as it was.

    suffix: of the temporary. Processes that may write one file at once need different suffixes.
    """
    path = Path(path)
    temporary = path.with_name(path.name + suffix)
    temporary.unlink(missing_ok=True)  # left behind by a kill, or a planted link
    os.close(open_no_link(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    fsync(path.parent)


def open_no_link(path: str | Path, flags: int) -> int:
    """os.open(), also as `opener` of open(). Raises OSError if `path` is a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def fsync(path: str | Path) -> None:
    """Flush a file to the disk, or the names in a folder if the system can do that."""
    is_folder = os.path.isdir(path)
    try:
        descriptor = (os.open if is_folder else open_no_link)(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in NO_FOLDER_FSYNC):
            raise


def lock_file(path: str | Path) -> TextIO:
    """Open and lock `path` until the file is closed. Raises BlockingIOError if a process has it.

    lockf, not flock: forked DataLoader workers that outlive a killed run do not inherit it.
    """
    file = open(path, "a", opener=open_no_link)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def digest_of(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: str | Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: non-finite floats as null, other types by their repr."""
    text = json.dumps(clean(value), indent=1, allow_nan=False, default=repr)
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode() + b"\n")


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
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Atomic writes: after a crash or power cut, a file is the old or the new one, never a part."""

import contextlib
import errno
import json
import math
import os
from pathlib import Path

# Errors where a folder cannot be fsynced: EACCES on Windows, the others on some network disks.
NO_FOLDER_FSYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EBADF)


@contextlib.contextmanager
def replacing(path, suffix=".tmp"):
    """Yields a temporary path beside `path`, which the caller writes. It is then fsynced and replaces
    `path`; on any error it is removed, and `path` stays as it was.

    suffix: of the temporary. Processes that may write one file at once need different suffixes.
    """
    path = Path(path)
    temporary = path.with_name(path.name + suffix)
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    fsync(path.parent)


def fsync(path):
    """Flush a file to the disk, or the names in a folder if the system can do that."""
    is_folder = os.path.isdir(path)
    try:
        # Windows flushes only what is open for writing
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in NO_FOLDER_FSYNC):
            raise


def write_json(path, value):
    """Replace `path` by `value` as JSON: non-finite floats as null, other types by their repr."""
    text = json.dumps(clean(value), indent=1, allow_nan=False, default=repr)
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode() + b"\n")


def clean(value):
    """`value` with None for each float that is not finite (JSON has no NaN), and keys as str."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k if isinstance(k, str) else repr(k): clean(v) for k, v in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path):
    """The dict in the JSON file `path`, or {} if there is none that can be read."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

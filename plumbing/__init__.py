"""What train.py calls: checkpoints, ranks, devices ... Not needed to follow the loop.

Scripts import it before torch, whose import takes seconds: Ctrl-C meanwhile is one line."""

import sys

try:
    import fcntl  # noqa: F401  locks a run's folder; Windows has none
except ModuleNotFoundError:
    print("this needs Linux or macOS; on Windows, run it in WSL2", file=sys.stderr)
    sys.exit(2)


def print_error(kind: type, error: BaseException, traceback: object) -> None:
    """In place of Python's own: no traceback after Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print("stopped by Ctrl-C", file=sys.stderr)
    raise SystemExit(130)


sys.excepthook = print_error

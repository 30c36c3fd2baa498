"""What the scripts say to bad input. (configured and Config come from configurator.py.)"""

import os
import sys

from plumbing.configurator import Config, configured
from plumbing.failures import RunFailed

__all__ = ["BadInput", "Config", "RunFailed", "configured", "fail", "run_script"]


class BadInput(Exception):
    """Bad input: one line, exit code 2."""


def fail(message: str):
    raise BadInput(message)


def run_script(main):
    """The exit code of main()."""
    try:
        return main()
    except BadInput as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        return 2

"""What train.py calls: checkpoints, ranks, devices ... Not needed to follow the loop."""

from plumbing import cli  # noqa: F401  a script imports this first: from here on cli prints errors

try:
    import fcntl  # noqa: F401  it locks a run's folder
except ModuleNotFoundError:
    cli.fail("this needs Linux or macOS; on Windows, use WSL2")

# isort: split
import numpy  # noqa: F401  before torch, which imports it and would swallow a Ctrl-C meanwhile

"""What train.py calls: checkpoints, ranks, devices ... Not needed to follow the loop."""

import sys

try:
    import fcntl  # noqa: F401  locks a run's folder; Windows has none
except ModuleNotFoundError:
    print("this needs Linux or macOS; on Windows, run it in WSL2", file=sys.stderr)
    sys.exit(2)

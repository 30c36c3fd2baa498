"""What train.py calls: checkpoints, ranks, devices ... Not needed to follow the loop."""

from plumbing import cli  # noqa: F401  a script imports this first: from here on cli prints errors

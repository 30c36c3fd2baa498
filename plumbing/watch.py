"""What another script sees of a run, or adds to it, on the way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Watch:
    """What main(argv, watch=...) calls on the way: another script, such as replay.py, overrides
    what it wants to see or to add. Here they change nothing."""

    def begin(self, run: Any) -> None:
        """All is checked, and nothing is written yet."""

    def step(self, run: Any, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        """Take a step: returns what train_step returns."""
        return take()

    def due(self, run: Any, due: SimpleNamespace) -> None:
        """May add to what is due after a step, `run.state["step"]`: see what_is_due()."""

    def end(self, run: Any) -> None:
        """The run has ended, or failed; its rows are on disk."""

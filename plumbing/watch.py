"""What another script sees of a run, or adds to it, on the way."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Watch:
    """What main(argv, watch=...) calls on the way: another script, such as replay.py, overrides
    what it wants to see or to add. Here they change nothing. One that is in run.folder.watchers
    gets the rows, too, on rank 0: see() and after_end()."""

    def begin(self, run: Any) -> None:
        """All is checked, and nothing is written yet."""

    def step(self, run: Any, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        """Take a step: returns what train_step returns."""
        return take()

    def due(self, run: Any, due: SimpleNamespace) -> None:
        """May add to what is due after a step, `run.state["step"]`: see what_is_due()."""

    def see(self, row: dict, is_kept: bool) -> None:
        """A row was logged. is_kept: false for steps that the process that resumes takes again."""

    def after_end(self, folder: Path, ended: str) -> None:
        """All rows are written, and so is run.json. ended: how the run ended, in words."""

    def end(self, run: Any) -> None:
        """The run has ended, or failed; its rows are on disk."""

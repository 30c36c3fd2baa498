"""What another script adds to a run, or sees of it, on the way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Hook:
    """One of run.hooks, which train.main() calls on the way. Override what is wanted; here nothing
    changes. `train.hooks.append(MyHook())` at the top of a script, or main(argv, hooks=[MyHook()]).

    A hook ends the run by `run.stop_with = (words, exit code)`, on any rank: all ranks stop after
    the step that follows, evaluate what is due, and save, unless the words begin with "failed".
    """

    def begin(self, run: Any) -> None:
        """All is checked, and nothing is written yet."""

    def step(self, run: Any, take: Callable[[], dict], inputs, targets, lr: float) -> dict:
        """Take a step: returns what train_step returns. A later hook's take() calls the earlier ones.
        Called for the two steps after a stop, too, whose rows are not kept."""
        return take()

    def due(self, run: Any, due: SimpleNamespace) -> None:
        """May add to what is due after a step, `run.state["step"]`: see what_is_due()."""

    def row(self, row: dict, is_kept: bool) -> None:
        """A row was logged; rank 0 only. is_kept: false for steps that the process that resumes takes
        again."""

    def end(self, run: Any, ended: str) -> None:
        """The run has ended, or failed, on this rank; its rows are on disk. ended: how, in words. No
        collective call after a failure, which other ranks may not have met."""

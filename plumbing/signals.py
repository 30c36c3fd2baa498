"""Signals from outside, such as Ctrl-C, which the run reads at the end of each step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from plumbing.console import print0

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PATIENCE = 1.0  # seconds from a stop until the process no longer waits for a batch


class StoppedInEvaluation(Exception):
    """A signal came in an evaluation: it is left to the process that resumes."""


class StoppedWaiting(BaseException):
    """After a stop, no batch came within PATIENCE. No Exception, which a dataset may catch."""


class Signals:
    """Handles signals within `with Signals(...) as signals:`. stop: the first of SIGINT, SIGTERM and
    SIGHUP (a closed terminal), or 0. save: a SIGUSR1 asked for a checkpoint. newest_save: the step
    of the newest checkpoint on the disk, for the answer to Ctrl-C."""

    def __init__(self) -> None:
        self.stop = 0
        self.agreed_stop = 0  # the largest `stop` of any rank, as of their latest message
        self.save = False
        self.is_waiting = False
        self.newest_save = 0
        self.parent = os.getppid()  # of a rank: torchrun
        self.old_handlers = {}  # signal -> the handler before this run

    def __enter__(self) -> "Signals":
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self.old_handlers[number] = signal.signal(number, self.handle)
        self.old_handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self.leave)
        return self

    def __exit__(self, *error: object) -> None:
        # None: not Python's, which cannot restore it
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    @contextmanager
    def waiting(self, may_leave: bool) -> Iterator[None]:
        """A context in which StoppedWaiting is raised PATIENCE seconds after a stop, one of before
        included, if `may_leave`: what is waited for may never come."""
        self.is_waiting = may_leave
        try:
            if self.stop and may_leave:
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            yield
        finally:
            self.is_waiting = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def leave(self, number: int, frame: object) -> None:
        """At the end of PATIENCE."""
        if self.is_waiting:
            raise StoppedWaiting

    def handle(self, number: int, frame: object) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        self.stop = self.stop or number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the second ends a process that hangs, too
            newest = f"newest checkpoint: step {self.newest_save:,}"
            with suppress(RuntimeError):  # the signal came within another print
                print0(f"stopping after this step; Ctrl-C again stops now ({newest})")
        if self.is_waiting:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def orphaned(self) -> bool:
        """Whether torchrun has died: its ranks run in their own sessions, and would survive it."""
        return "WORLD_SIZE" in os.environ and os.getppid() != self.parent

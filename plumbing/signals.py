"""Signals from outside, such as Ctrl-C, which the run reads at the end of each step."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_held = None  # the Signals of hold()
_launcher = None  # the parent of the process when hold() was called


class Signals:
    """Handles signals within `with Signals() as signals:`; outside the main thread, none. stop: the
    first of SIGINT, SIGTERM and SIGHUP (a closed terminal), or 0. save: a SIGUSR1 asked for a
    checkpoint."""

    def __init__(self) -> None:
        self.stop = 0
        self.save = False
        self.parent = _launcher or os.getppid()
        self.before = {}  # signal -> handler

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread() and not self.before:
            for number in HANDLED:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self.before[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():  # None: not Python's, which cannot restore it
            signal.signal(number, handler or signal.SIG_DFL)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the process
        if number == signal.SIGUSR1:
            self.save = True
        else:
            self.stop = self.stop or int(number)

    def orphaned(self) -> bool:
        """Whether torchrun has died: its ranks run in their own sessions, and would survive it."""
        return "WORLD_SIZE" in os.environ and os.getppid() != self.parent


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A context in which a signal, or the death of torchrun, ends the process at once. For a wait
    in code that is not Python's, before the run has written anything."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    is_main = threading.current_thread() is threading.main_thread()
    over = threading.Event()
    parent = _launcher or os.getppid()  # it may have died while torch was imported

    def watch():
        while not over.wait(0.5):
            if os.getppid() != parent:
                os._exit(1)

    for number, handler in before.items() if is_main else ():
        if callable(handler):  # not one that nohup ignores
            signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        for number, handler in before.items() if is_main else ():
            signal.signal(number, handler or signal.SIG_DFL)


def hold() -> None:
    """Keep the signals of the seconds of `import torch` for held(): Ctrl-C would end in a
    traceback, SIGUSR1 in death. For a process that does nothing but train."""
    global _held, _launcher
    _launcher = os.getppid()
    _held = Signals().__enter__()


def held() -> Signals:
    """The Signals of hold(), which have heard what came since, once; else new ones."""
    global _held
    signals = _held or Signals()
    _held = None
    return signals

"""Signals: what the outside asks of the run, read at the end of each step."""

import os
import signal
import threading

import torch.distributed as dist

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")  # Windows has no SIGUSR1
HANDLED = [number for number in signal.Signals if number.name in NAMES]


class Signals:
    """Handles signals within `with Signals() as signals:`; after it the old handlers are back.

    stop: the number of the SIGINT or SIGTERM that came first, or 0.
    save: whether a SIGUSR1 asked for a checkpoint.
    Outside the main thread, where Python installs no handler, nothing is installed.
    """

    def __init__(self):
        self.stop = 0
        self.save = False
        self.parent = os.getppid()
        self.before = {}  # signal -> handler

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.handle) for number in HANDLED}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            # None: installed by something other than Python, which cannot put it back
            signal.signal(number, handler or signal.SIG_DFL)

    def handle(self, number, frame):
        if number not in (signal.SIGINT, signal.SIGTERM):
            self.save = True
            return
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the process
        self.stop = self.stop or int(number)

    def take_save(self):
        """`save`, which is then False: a later signal asks for another checkpoint."""
        asked = self.save
        self.save = False
        return asked

    def orphaned(self):
        """Whether torchrun has died: its ranks run in sessions of their own, and would live on."""
        return dist.is_initialized() and os.getppid() != self.parent


def ignore_signals(worker):
    """For DataLoader workers (worker_init_fn): a scheduler signals the whole process group, and the
    training process decides when its workers end."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)


def start_workers(loader):
    """iter(loader), whose workers begin with our signals blocked: one of them may come before a worker
    ignores it. And without the handler by which torch raises an error wherever the training is when a
    worker dies, also amid a save or another error: the next batch tells, within 5 s.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return iter(loader)
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
    return batches


def stop_workers(batches):
    """Ends the workers of a DataLoader's iterator. At its exit Python would end them by the SIGTERM
    that they ignore, and wait for ever, where an error still refers to the iterator."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()

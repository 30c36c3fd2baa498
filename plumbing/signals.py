"""Signals from outside, such as Ctrl-C, which the run reads at the end of each step."""

import os
import signal
import threading

import torch.distributed as dist

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # Windows lacks the last two
HANDLED = [number for number in signal.Signals if number.name in NAMES]


class Signals:
    """Handles signals within `with Signals() as signals:`, then restores the old handlers.

    stop: the number of the first SIGINT, SIGTERM or SIGHUP (a closed terminal), or 0.
    save: whether a SIGUSR1 asked for a checkpoint.
    Outside the main thread, where Python cannot install handlers, it does nothing.
    """

    def __init__(self):
        self.stop = 0
        self.save = False
        self.parent = os.getppid()
        self.before = {}  # signal -> handler

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self.before[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            # None: not installed by Python, which cannot restore it
            signal.signal(number, handler or signal.SIG_DFL)

    def handle(self, number, frame):
        if signal.Signals(number).name == "SIGUSR1":
            self.save = True
            return
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the process
        self.stop = self.stop or int(number)

    def take_save(self):
        """Return `save` and set it to False: a later signal asks for another checkpoint."""
        asked = self.save
        self.save = False
        return asked

    def orphaned(self):
        """Whether torchrun has died: its ranks run in their own sessions, and would survive it."""
        return dist.is_initialized() and os.getppid() != self.parent


def ignore_signals(worker):
    """For DataLoader workers (worker_init_fn): a scheduler signals the whole process group, but the
    training process decides when its workers end."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)


def start_workers(loader):
    """Return iter(loader). Its workers start with HANDLED blocked: a signal may come before they
    ignore it. torch's SIGCHLD handler is removed: if a worker dies, it raises an error wherever the
    training is, even in a save. Instead the next batch raises it, within 5 s.
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
    """End the workers of a DataLoader's iterator. If an error still refers to the iterator at exit,
    Python would send them SIGTERM, which they ignore, and wait forever."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()

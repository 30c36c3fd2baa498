"""Signals are heard while a run lasts, and handled as before once it is over."""

import os
import signal
import subprocess
import sys
import threading

import torch
from conftest import REPO

from plumbing.signals import Signals, ignore_signals, start_workers

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def handlers():
    return [signal.getsignal(number) for number in ALL]


def test_a_run_hears_signals_and_gives_the_handlers_back():
    before = handlers()
    with Signals() as asked:
        assert (asked.stop, asked.take_save()) == (0, False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (asked.take_save(), asked.take_save()) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.stop == signal.SIGTERM  # the first one counts
        assert handlers() != before
    assert handlers() == before


def test_an_error_gives_the_handlers_back_too():
    before = handlers()
    try:
        with Signals():
            raise ValueError
    except ValueError:
        assert handlers() == before


def test_in_another_thread_nothing_is_installed():
    """Such as a notebook's: Python lets only the main thread install handlers."""
    before, inside = handlers(), []

    def run():
        with Signals() as asked:
            inside.append((handlers() == before, asked.stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [(True, 0)]


def test_a_second_ctrl_c_ends_the_process_at_once():
    code = """
import os, signal
from plumbing.signals import Signals
with Signals() as asked:
    os.kill(os.getpid(), signal.SIGINT)
    print("heard", int(asked.stop), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "heard 2\n" and done.returncode == -signal.SIGINT, done.stderr


def test_workers_ignore_what_the_whole_process_group_gets():
    before = handlers()
    try:
        ignore_signals(0)
        assert handlers() == [signal.SIG_IGN] * 4
    finally:
        for number, handler in zip(ALL, before, strict=True):
            signal.signal(number, handler)


def test_the_death_of_a_worker_interrupts_nothing():
    """torch's handler would raise an error wherever the main thread is."""
    before = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    loader = torch.utils.data.DataLoader(range(4), num_workers=1)
    batches = start_workers(loader)
    assert signal.getsignal(signal.SIGCHLD) is before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert [int(batch) for batch in batches] == [0, 1, 2, 3]

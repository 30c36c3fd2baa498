"""Windows of tokens as batches: shuffled for training, in order for validation.

Both are datasets in which `dataset[first, count]` is a batch: inputs and targets, each int64
(count, block_size). The targets are the inputs shifted by one token.
"""

import math
import signal
import threading
import warnings

import numpy as np
import torch

from plumbing.signals import HANDLED

# torch's warning about more workers than CPUs: the column `wait` shows whether they help
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Windows(torch.utils.data.Dataset):
    def __init__(self, tokens, block_size):
        self.tokens = tokens
        self.block_size = block_size

    def read(self, starts):
        """The windows that begin at `starts`, an int array."""
        window = torch.from_numpy(self.tokens.read(starts, self.block_size + 1))
        return window[:, :-1].clone(), window[:, 1:].clone()  # without shared memory


class ShuffledWindows(Windows):
    """`tokens` as an endless sequence of windows, a pure function of (seed, index).

    An epoch cuts the tokens into windows of block_size and has each window once. Where it cuts,
    and the order of the windows, are drawn from (seed, epoch).
    """

    def __init__(self, tokens, block_size, seed):
        super().__init__(tokens, block_size)
        self.seed = seed
        self.order = {}  # epoch -> first token of each of its windows

    def __len__(self):
        """Windows in an epoch: as many as fit whatever the shift of the boundaries."""
        return (len(self.tokens) - self.block_size) // self.block_size

    def starts(self, epoch):
        if epoch not in self.order:
            # RandomState, not Generator: NumPy promises that its stream never changes
            random_state = np.random.RandomState([self.seed, epoch])
            shift = random_state.randint(self.block_size)
            self.order[epoch] = shift + random_state.permutation(len(self)) * self.block_size
            self.order.pop(epoch - 2, None)
        return self.order[epoch]

    def __getitem__(self, batch):
        first, count = batch
        epoch, place = np.divmod(np.arange(first, first + count), len(self))
        parts = [self.starts(e)[place[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
        return self.read(np.concatenate(parts))


class OrderedWindows(Windows):
    """The first `n_targets` targets of `tokens` (0 = all), rounded up to whole windows.

    If the last window overlaps the one before, its repeated targets are -100.
    """

    def __init__(self, tokens, block_size, n_targets=0):
        super().__init__(tokens, block_size)
        self.windows = math.ceil(min(n_targets or math.inf, len(tokens) - 1) / block_size)

    def __len__(self):
        return self.windows

    def __getitem__(self, batch):
        first, count = batch
        first_new = np.arange(first, first + count) * self.block_size
        start = np.minimum(first_new, len(self.tokens) - 1 - self.block_size)
        inputs, targets = self.read(start)
        position = start[:, None] + np.arange(self.block_size)
        targets[torch.from_numpy(position < first_new[:, None])] = -100
        return inputs, targets


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

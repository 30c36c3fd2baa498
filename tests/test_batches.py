"""The batch as a pure function of (seed, first sequence, count), and what follows from that."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, wait_for
from helpers import alive

import train
from plumbing.cli import BadInput, RunFailed
from plumbing.data import InOrder, OrderedWindows, Reader, Shuffled, batches, kill_workers
from train import ShuffledWindows

BLOCK = 8
TOKENS = 8 * 50 + 5  # 49 windows: one less than fit, so that there is room for any shift


@pytest.fixture
def tokens(tmp_path):
    """Every token is its own position, so that a window says where it was read."""
    return split_of(tmp_path, np.arange(TOKENS, dtype=np.uint16))


def split_of(folder, ids):
    ids.tofile(folder / "ids.bin")
    return np.memmap(folder / "ids.bin", ids.dtype, "r")


@pytest.fixture
def windows(tokens):
    return ShuffledWindows(tokens, BLOCK, seed=1337)


def test_targets_are_the_tokens_one_place_on(windows):
    inputs, targets = windows[18, 6]
    assert inputs.shape == targets.shape == (6, BLOCK)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(BLOCK))


def test_an_epoch_holds_each_window_exactly_once(windows):
    assert len(windows) == 49
    for epoch in range(3):
        inputs = np.concatenate([windows[49 * epoch + 7 * n, 7][0] for n in range(7)])
        seen = Counter(inputs.flatten().tolist())
        assert set(seen.values()) == {1} and len(seen) == 49 * BLOCK
        shift = inputs.min().item()
        assert 0 <= shift < BLOCK
        assert sorted(inputs[:, 0].tolist()) == [shift + BLOCK * n for n in range(49)]


def test_a_batch_may_lie_across_epochs(windows):
    drawn = [start for first in (0, 120) for start in windows[first, 120][0][:, 0]]
    order = [start for epoch in range(4) for start in windows.starts(epoch)]
    assert [start.item() for start in drawn[: 4 * 49]] == order


def test_order_and_boundaries_change_with_every_epoch(windows):
    epochs = [windows.starts(epoch).tolist() for epoch in range(20)]
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert len({min(epoch) for epoch in epochs}) > 3  # boundaries, of which there are eight
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 20


@pytest.mark.parametrize("first", [0, 48, 6000])
def test_a_batch_depends_on_nothing_but_its_place(tokens, windows, first):
    fresh = ShuffledWindows(tokens, BLOCK, seed=1337)[first, 6]
    for before in (30, 5400, 18, 6006, 0):
        windows[before, 6]
    torch.manual_seed(7)
    np.random.seed(7)
    globally = np.random.get_state()[1].copy(), torch.get_rng_state()
    assert all(map(np.array_equal, windows[first, 6], fresh))
    assert np.array_equal(np.random.get_state()[1], globally[0])
    assert torch.equal(torch.get_rng_state(), globally[1])


@pytest.mark.parametrize("split", [ShuffledWindows, OrderedWindows])
@pytest.mark.parametrize("parts", [[4, 2], [1, 5], [2, 2, 2], [1] * 6])
def test_any_split_into_ranks_reads_the_same_global_batch(tokens, split, parts):
    dataset = split(tokens, BLOCK, 1337)
    ends = np.cumsum([0, *parts])
    for first in (0, 42, 44):  # 44: the last six of a validation split, and across two epochs
        whole = dataset[first, 6]
        each = [dataset[first + int(n), part] for n, part in zip(ends[:-1], parts, strict=True)]
        for part, expected in zip(zip(*each, strict=True), whole, strict=True):
            assert np.array_equal(np.concatenate(part), expected)


@pytest.mark.parametrize("count", [1, 6, 49, 64])
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, TOKENS])
def test_validation_counts_every_token_exactly_once(tmp_path, length, count):
    windows = OrderedWindows(split_of(tmp_path, np.arange(length, dtype=np.uint32)), BLOCK)
    firsts = range(0, len(windows), count)
    pairs = [windows[first, min(count, len(windows) - first)] for first in firsts]
    counted = [targets[targets != -100] for _, targets in pairs]
    assert np.concatenate(counted).tolist() == list(range(1, length))  # each has one before it
    for x, y in pairs:
        assert np.array_equal(x, x[:, :1] + np.arange(BLOCK))  # nothing is masked in the input
        assert np.array_equal(y, np.where(y == -100, -100, x + 1))


@pytest.mark.parametrize(
    "n_targets, expected", [(1, 8), (8, 8), (9, 16), (TOKENS - 2, TOKENS - 1), (10**9, TOKENS - 1)]
)
def test_a_part_of_the_validation_tokens_is_its_first_ones(tokens, n_targets, expected):
    """Rounded up to windows of 8; never more than there are."""
    windows = OrderedWindows(tokens, BLOCK, n_targets)
    _, targets = windows[0, len(windows)]
    assert targets[targets != -100].tolist() == list(range(1, expected + 1))


def test_the_order_and_the_cuts_are_those_of_ever(tokens):
    """Runs depend on it: recorded with the code of the first release."""
    inputs, _ = ShuffledWindows(tokens, BLOCK, 1337)[0, 6]
    assert inputs[:, 0].tolist() == [383, 39, 143, 31, 359, 367]
    other, _ = ShuffledWindows(tokens, BLOCK, 1338)[0, 6]
    assert other[:, 0].tolist() != inputs[:, 0].tolist()


def test_training_and_validation_each_read_the_file_of_their_name(data_dir):
    flags = ["--dataset=small", f"--data_dir={data_dir}", "--device=cpu", "--compile=false"]
    with train.build(flags) as run:
        names = [Path(split.tokens.filename).name for split in (run.train_data, run.val_data)]
    assert names == ["train.bin", "val.bin"]


# ---- workers -------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SLOW = 20  # seconds that would be too long for any of these


class Numbers:
    """Batch i is full of i; `do` is done first."""

    def __init__(self, do=lambda i: None):
        self.do = do

    def __getitem__(self, i):
        self.do(i)
        return np.array([i] * 10), np.array([float(i)])


@pytest.fixture
def batches_of():
    """batches_of(dataset, ...) -> batches() of five places; their workers end with the test."""
    made = []

    def make(dataset, num_workers=2, **how):
        made.append(batches(dataset, iter(range(5)), CPU, num_workers, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()
    handler = signal.getsignal(signal.SIGCHLD)
    kill_workers()
    for worker in multiprocessing.active_children():
        worker.join()
    signal.signal(signal.SIGCHLD, handler)


def raise_own(i):
    if i == 2:
        raise ConnectionError("of the dataset")


def die(i):
    if i == 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_order_as_tensors_with_the_time_waited(batches_of, num_workers):
    got = list(batches_of(Numbers(), num_workers))
    assert [first.tolist() for first, _, _ in got] == [[i] * 10 for i in range(5)]
    assert {first.dtype for first, _, _ in got} == {torch.int64}
    assert [second.item() for _, second, _ in got] == [0, 1, 2, 3, 4]
    assert all(0 < ms < 1000 * SLOW for *_, ms in got)


FEED = """
import multiprocessing
import numpy as np
import torch
from plumbing.data import batches

class Big:  # batches larger than a pipe
    def __getitem__(self, i):
        return np.zeros((512, 64), np.int64), np.zeros((512, 64), np.int64)

to_come = batches(Big(), iter(range(10**9)), torch.device("cpu"), num_workers=2, prefetch_factor=4)
next(to_come), next(to_come)  # so both workers have begun
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
for _ in to_come:
    pass
"""


def test_workers_die_with_a_run_that_is_killed():
    """By what kills the run alone, as the OOM killer does."""
    command = [sys.executable, "-c", FEED]
    runs = [subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) for _ in range(5)]
    workers = []
    for number, run in enumerate(runs):
        workers += map(int, run.stdout.readline().split())
        time.sleep(0.05 * number)
        run.kill()
        run.wait()
    assert len(workers) == 10
    try:
        wait_for(lambda: not any(map(alive, workers)), 30)
    finally:
        for pid in filter(alive, workers):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_keeps_its_type_and_its_line(batches_of, num_workers):
    with pytest.raises(ConnectionError) as error:
        list(batches_of(Numbers(raise_own), num_workers))
    assert "of the dataset" in str(error.value)
    if num_workers:
        assert 'raise ConnectionError("of the dataset")' in str(error.value)


def test_a_worker_that_is_killed_while_it_sends_is_named(batches_of, monkeypatch):
    def get(*_):
        raise ConnectionResetError("of the pipe")

    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(iterator, "_try_get_data", get)
    with pytest.raises(RuntimeError, match="^DataLoader worker"):
        list(batches_of(Numbers()))


def test_a_worker_whose_death_is_not_heard_of_is_found_in_seconds(batches_of):
    """The standard library may swallow the error of torch's handler of the signal."""
    to_come = batches_of(Numbers(die))
    next(to_come)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="^DataLoader worker"):
        list(to_come)
    assert time.monotonic() - began < 30


SHARE = """
import numpy as np, sys, torch
from plumbing.data import Reader, batches
class Big:  # 1 MB a batch
    def __getitem__(self, place):
        return np.full((place[1], 8192), place[0]), np.zeros((place[1], 8192))
places = [(first, 8) for first in range(0, 400, 8)]
read = batches(Reader(Big(), 1), iter(places), torch.device("cpu"), 2, 32)
assert [x[0, 0].item() for x, _, _ in read] == list(range(0, 400, 8))
print("all there")
"""


def test_batches_come_where_dev_shm_is_small():
    """As in a Docker container."""
    mount = "mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "
    shell = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
    if subprocess.run([*shell, mount + "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    command = [*shell, mount + '"$0" "$@"', sys.executable, "-c", SHARE]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=100)
    assert done.stdout == "all there\n", done.stderr


# ---- an ordinary Dataset of PyTorch --------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """A row shows its index, and what it draws from each generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return [index, random.random(), np.random.rand(), torch.rand(1).item()], float(index)


def test_rows_are_shuffled_each_epoch_and_draw_by_their_place_alone():
    shuffled = Shuffled(Rows(), 7)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    whole, targets = Reader(shuffled, 7)[0, 20]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert state == after and whole.dtype == targets.dtype == np.float32
    parts = [Reader(Shuffled(Rows(), 7), 7)[place] for place in ((13, 7), (0, 6), (6, 7))]
    assert np.array_equal(np.concatenate([parts[n][0] for n in (1, 2, 0)]), whole)
    epochs = whole[:10], whole[10:]
    assert all(sorted(epoch[:, 0]) == list(range(10)) for epoch in epochs)
    assert not np.array_equal(*epochs) and len(np.unique(whole[:, 1:])) == 60
    assert not np.array_equal(Shuffled(Rows(), 8)[0, 20][0], whole)
    subset = torch.utils.data.Subset(Rows(), [4, 2, 9])
    assert InOrder(subset, 7)[1, 2][1].tolist() == [2, 9]
    assert np.array_equal(InOrder(subset, 7)[1, 2][0], InOrder(subset, 7)[0, 3][0][1:])


def test_other_rows_become_pairs_and_batches():
    dicts = [{"ids": [1] * n, "label": n} for n in (1, 2, 3)]
    pair = lambda each: (torch.tensor(each["ids"]), each["label"])  # noqa: E731
    pad = torch.nn.utils.rnn.pad_sequence
    collate = lambda pairs: (pad([x for x, _ in pairs], True), [y for _, y in pairs])  # noqa: E731
    inputs, targets = Reader(InOrder(dicts, 1, row=pair, collate=collate), 1)[0, 3]
    assert inputs.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]] and targets.tolist() == [1, 2, 3]


STREAM = iter([1])
REFUSED = [  # (rows, None if it is returned as it is, words of the one line)
    ([], True, "list is empty or has no length; expected"),
    (STREAM, True, "list_iterator is empty or has no length; exp"),
    (
        [{"x": 1}] * 3,
        True,
        "InOrder[0, 2] is a list; expected (inputs, targets), arrays or tensors",
    ),
    (
        [("text", 1)] * 3,
        True,
        "InOrder[0, 2] is a list; expected (inputs, targets), arrays or tens",
    ),
    ([5] * 3, True, "rows cannot be stacked: 'int' object is not iterable"),
    ([([1], 1), ([1, 2], 1)], True, "rows cannot be stacked: all input arrays must have the same"),
    (
        Rows(),
        False,
        "Rows[0, 2] is a TypeError; expected (inputs, targets), arrays or tensors of 2",
    ),
    (
        torch.utils.data.TensorDataset(torch.ones(9, 9), torch.ones(9, 9)),
        False,
        "expected (inputs, ",
    ),
]


@pytest.mark.parametrize("rows, is_wrapped, words", REFUSED)
def test_what_gives_no_rows_is_told_what_does_in_one_line(rows, is_wrapped, words):
    with pytest.raises((BadInput, RunFailed)) as error:
        Reader(InOrder(rows, 1) if is_wrapped else rows, 1)[0, 2]
    assert words in str(error.value) and "\n" not in str(error.value)
    assert "Shuffled(" in str(error.value) or not is_wrapped or "expected len(" in str(error.value)
